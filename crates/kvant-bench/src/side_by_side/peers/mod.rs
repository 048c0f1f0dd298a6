//! The libraries that kvant is compared with.

pub mod candle;
pub mod ggml;
