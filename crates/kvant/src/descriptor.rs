//! Setters for descriptors of operations and pools.

/// Defines setters of a descriptor's optional fields. A setter's argument has the type that the field's `Option`
/// contains.
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
