//! What kvant is measured beside.

pub mod candle;
pub mod ggml;
