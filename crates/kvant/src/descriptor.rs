//! Setters of the descriptors that operations and pools take.

/// Setters of a descriptor's optional fields. A setter takes what the field holds.
macro_rules! setters {
    ($name:ident $(<$life:lifetime>)? { $($field:ident: $type:ty),* $(,)? }) => {
        impl $(<$life>)? $name $(<$life>)? {
            $(
                #[doc = concat!("Sets [`", stringify!($name), "::", stringify!($field), "`].")]
                #[must_use]
                pub fn $field(self, $field: $type) -> Self {
                    $name { $field, ..self }
                }
            )*
        }
    };
}
