//! Parameter structs: one definition in Rust, one in the kernel file; the kernel's compiler checks that they agree.

use std::fmt::Write;

/// The layout of a parameter struct.
#[derive(Debug)]
pub struct Layout {
    /// The struct's name, in Rust and in the kernel file.
    pub name: &'static str,
    /// Its size in bytes.
    pub size: usize,
    /// Name, offset and size of each field.
    pub fields: Vec<(&'static str, usize, usize)>,
}

impl Layout {
    /// The layout as `static_assert`s of C++.
    pub fn assertions(&self) -> String {
        let Layout { name, size, .. } = self;
        let mut text = format!("static_assert(sizeof({name}) == {size}, \"{name}: size\");\n");
        for (field, offset, bytes) in &self.fields {
            let _ = writeln!(
                text,
                "static_assert(__builtin_offsetof({name}, {field}) == {offset} && sizeof({name}::{field}) == {bytes}, \
                 \"{name}: {field}\");"
            );
        }
        text
    }
}

/// A struct that is handed to a kernel byte for byte.
pub(crate) trait Params: bytemuck::Pod {
    fn layout() -> Layout;
}

/// Defines parameter structs: `repr(C)`, plain data, with their [`Layout`].
///
/// A kernel file declares the same struct, with the same names; the layout is asserted when it is compiled. Fields of
/// 8 bytes go first: padding does not compile.
macro_rules! params {
    ($($(#[$doc:meta])* pub(crate) struct $name:ident { $($(#[$field_doc:meta])* pub $field:ident: $type:ty),* $(,)? })*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
        pub(crate) struct $name { $($(#[$field_doc])* pub $field: $type),* }

        impl $crate::gpu::Params for $name {
            fn layout() -> $crate::gpu::Layout {
                $crate::gpu::Layout {
                    name: stringify!($name),
                    size: size_of::<$name>(),
                    fields: vec![$((stringify!($field), std::mem::offset_of!($name, $field), size_of::<$type>())),*],
                }
            }
        }
    )*};
}
pub(crate) use params;

#[cfg(test)]
mod tests {
    use super::*;

    params! {
        /// For the test.
        pub(crate) struct TwoParams {
            pub wide: u64,
            pub narrow: [u32; 2],
        }
    }

    #[test]
    fn assertions_name_every_field() {
        let text = TwoParams::layout().assertions();
        assert!(text.contains("sizeof(TwoParams) == 16"));
        assert!(text.contains("__builtin_offsetof(TwoParams, narrow) == 8 && sizeof(TwoParams::narrow) == 8"));
    }
}
