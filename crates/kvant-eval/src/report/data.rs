//! The data of the plots.

use serde::{Deserialize, Serialize};

use crate::{answers::AnswerLine, needles::PassKeys, prediction::EvalLine};

/// The data of the plots.
#[derive(Serialize)]
pub struct ReportData {
    /// Model, device and text.
    pub subject: String,
    /// Tokens of all windows.
    pub tokens: usize,
    /// Maximum tokens of a window.
    pub window_tokens: usize,
    pub caches: Vec<CacheData>,
    pub layers: LayerData,
    /// `None` if no window fills a page.
    pub pages: Option<PageData>,
    /// One entry per context length; none if the text is too short.
    pub needles: Vec<NeedleData>,
    /// `None` without --answers.
    pub answers: Option<AnswerData>,
}

/// Answers generated token by token.
#[derive(Serialize)]
pub struct AnswerData {
    /// Number and length of the answers.
    pub subject: String,
    pub caches: Vec<AnswerLine>,
}

/// One cache type.
#[derive(Clone, Serialize, Deserialize)]
pub struct CacheData {
    #[serde(flatten)]
    pub line: EvalLine,
    /// Mean divergence in consecutive parts of equal length of a window.
    pub kl_by_position: Vec<f64>,
}

/// The cost of each layer: the divergence if only its keys, or only its values, are quantised.
#[derive(Serialize)]
pub struct LayerData {
    /// The cache type of the quantised side; the others are f32.
    pub kv: String,
    #[serde(flatten)]
    pub kl: SideNumbers,
}

/// One number for the keys and one for the values of each layer that has its own.
#[derive(Clone, Serialize, Deserialize)]
pub struct SideNumbers {
    pub keys: Vec<f64>,
    pub values: Vec<f64>,
}

/// Probabilities of the second half of a needle.
#[derive(Serialize)]
pub struct NeedleData {
    /// Tokens before the cue.
    pub context: usize,
    /// The fraction of them before the needle.
    pub depths: Vec<f64>,
    pub caches: Vec<CacheNeedles>,
    /// Probabilities with an f32 cache in contexts without needles.
    pub without: Vec<f64>,
}

/// The retrieval results of a cache type.
#[derive(Serialize)]
pub struct CacheNeedles {
    pub kv: String,
    /// By depth.
    pub probabilities: Vec<f64>,
    /// `None` without a tokenizer.
    pub pass_keys: Option<PassKeys>,
}

/// Results with an f32 cache over the full pages of all windows.
#[derive(Clone, Serialize, Deserialize)]
pub struct PageData {
    /// Positions per page.
    pub page_tokens: usize,
    /// Σ‖mean‖²/Σ‖x‖² by layer: the fraction of the energy of a page's vectors in their mean.
    pub mean_share: SideNumbers,
    /// Bits of the codebook of `clipped`.
    pub bits: u32,
    /// The fraction of coordinates beyond the outermost centroids, by layer. The coordinates are of vectors minus the
    /// mean of their page, rotated, and divided by the root mean square of their block.
    pub clipped: SideNumbers,
    /// This fraction for normally distributed numbers.
    pub clipped_normal: f64,
}
