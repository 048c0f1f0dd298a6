//! kvant's operations, prepared for repeated calls by the benches and the instruction counter.
//!
//! The programs measure: `kvant-bench` compares with other libraries, `speed` times operations on a GPU, `cargo bench`
//! measures single kernels, and `counted` counts instructions under valgrind.

use std::error::Error;

pub mod attention;
pub mod data;
pub mod linear;
pub mod rope;
pub mod writing;

/// An error of kvant, of another library, or of an argument.
pub type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

/// The sizes of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Coordinates of a query, key or value.
    pub head_dim: usize,
    /// Query heads.
    pub heads: usize,
    /// KV heads.
    pub kv_heads: usize,
}

impl Shape {
    /// The measured shapes: a Llama-like layer, and the two kinds of a Gemma 4 layer.
    pub const ALL: [Shape; 3] = [Shape::new(128, 32, 8), Shape::new(256, 16, 8), Shape::new(512, 16, 2)];

    /// A shape from its three numbers.
    pub const fn new(head_dim: usize, heads: usize, kv_heads: usize) -> Shape {
        Shape { head_dim, heads, kv_heads }
    }

    /// The factor of the scores.
    pub fn scale(self) -> f32 {
        (self.head_dim as f32).sqrt().recip()
    }

    /// Elements of the keys (or the values) of `tokens` tokens.
    pub fn elements(self, tokens: usize) -> usize {
        tokens * self.kv_heads * self.head_dim
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}:{}", self.head_dim, self.heads, self.kv_heads)
    }
}
