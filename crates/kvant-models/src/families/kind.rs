//! Kinds of layers.

/// The attention kind of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Sliding,
    Full,
}

impl Kind {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Kind::Sliding => "sliding_attention",
            Kind::Full => "full_attention",
        }
    }
}
