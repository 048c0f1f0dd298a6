//! From a drafter's last norm to logits over the target's vocabulary.

use kvant::{
    DType, Device, Encoder, Tensor,
    ops::{self, Experts, Linear, MoeRoute, Spread},
};

use super::Drafter;
use crate::{Error, Result, forward::Views, source::Matrix};

/// The tokens that a drafter can draft.
#[derive(Debug)]
pub(super) enum DraftVocabulary {
    /// All tokens of the target.
    Whole,
    /// Some tokens of the target. `places` has the draft token of each, u32 `[V]`.
    Some { tokens: usize, places: Tensor },
    /// The tokens of the groups whose centroids have the largest logits.
    Centroids(Box<Centroids>),
}

/// A vocabulary in groups of equal size. A row has the logits of the tokens of `top_k` groups.
#[derive(Debug)]
pub(super) struct Centroids {
    /// `[C, H]`.
    pub centroids: Matrix,
    /// The output matrix, ordered by groups: `[C, V/C, H]`.
    pub tokens: Matrix,
    /// The place of each token in that order, u32 `[V]`.
    pub places: Tensor,
    pub groups: usize,
    pub group_tokens: usize,
    pub top_k: usize,
}

/// Scratch for the logits of several rows.
pub(super) struct VocabularyBuffers {
    /// f32 `[M·N]`: logits of some tokens.
    logits: Option<Tensor>,
    /// f32 `[M·C]`, u32 `[M·K]`, f32 `[M·K]`.
    route: Option<[Tensor; 3]>,
    /// N and the widths of `route`.
    widths: [usize; 3],
    /// Rows of `logits` for each row.
    rows_each: usize,
}

/// The scratch in the shapes of n rows.
pub(super) struct VocabularyViews {
    /// f32 `[n, N]`; for centroids `[n·K, V/C]`.
    logits: Option<Tensor>,
    /// Logits of the centroids, f32 `[n, C]`; the selected groups, u32 `[n, K]`; their unused weights, f32 `[n, K]`.
    route: Option<[Tensor; 3]>,
}

impl DraftVocabulary {
    pub(super) fn bytes(&self) -> usize {
        match self {
            DraftVocabulary::Whole | DraftVocabulary::Some { .. } => 0,
            DraftVocabulary::Centroids(own) => own.centroids.bytes() + own.tokens.bytes(),
        }
    }

    /// Scratch for up to `rows` rows.
    pub(super) fn buffers(&self, device: &Device, rows: usize) -> Result<VocabularyBuffers> {
        let flat = |dtype, width: usize| Ok::<_, Error>(Tensor::zeros(device, dtype, &[rows * width])?);
        Ok(match self {
            DraftVocabulary::Whole => VocabularyBuffers { logits: None, route: None, widths: [0; 3], rows_each: 1 },
            DraftVocabulary::Some { tokens, .. } => VocabularyBuffers {
                logits: Some(flat(DType::F32, *tokens)?),
                route: None,
                widths: [*tokens, 0, 0],
                rows_each: 1,
            },
            DraftVocabulary::Centroids(own) => VocabularyBuffers {
                logits: Some(flat(DType::F32, own.top_k * own.group_tokens)?),
                route: Some([
                    flat(DType::F32, own.groups)?,
                    flat(DType::U32, own.top_k)?,
                    flat(DType::F32, own.top_k)?,
                ]),
                widths: [own.group_tokens, own.groups, own.top_k],
                rows_each: own.top_k,
            },
        })
    }
}

impl VocabularyBuffers {
    pub(super) fn views(&self, rows: usize) -> Result<VocabularyViews> {
        let [tokens, groups, top_k] = self.widths;
        let view = |buffer: &Tensor, rows: usize, width: usize| -> Result<Tensor> {
            Ok(buffer.rows(0..rows * width)?.reshape(&[rows, width])?)
        };
        let logits = self.logits.as_ref().map(|logits| view(logits, rows * self.rows_each, tokens)).transpose()?;
        let route = match &self.route {
            Some([of_groups, ids, weights]) => {
                Some([view(of_groups, rows, groups)?, view(ids, rows, top_k)?, view(weights, rows, top_k)?])
            }
            None => None,
        };
        Ok(VocabularyViews { logits, route })
    }
}

impl Drafter {
    /// Writes the logits of rows after the last norm, over the target's vocabulary.
    pub(super) fn draft_logits(
        &self,
        enc: &mut Encoder,
        (views, own): (&Views, &VocabularyViews),
        x: &Tensor,
        out: &Tensor,
    ) -> Result<()> {
        match (&self.vocabulary, &own.logits, &own.route) {
            (DraftVocabulary::Some { places, .. }, Some(logits), _) => {
                self.network.logits(enc, views, x, logits)?;
                Ok(ops::spread(enc, &Spread::new(logits, places, f32::NEG_INFINITY, out))?)
            }
            (DraftVocabulary::Centroids(own), Some(logits), Some([of_groups, ids, weights])) => {
                let Centroids { centroids, tokens, places, .. } = &**own;
                ops::linear(enc, &Linear::new(x, centroids.weight(), of_groups))?;
                ops::moe_route(enc, &MoeRoute::new(of_groups, ids, weights))?;
                ops::linear(enc, &Linear::new(x, tokens.weight(), logits).experts(Some(Experts::new(ids))))?;
                Ok(ops::spread(enc, &Spread::new(logits, places, f32::NEG_INFINITY, out).groups(Some(ids)))?)
            }
            _ => self.network.logits(enc, views, x, out),
        }
    }
}

/// The place of each of `vocab_size` tokens in a list of different tokens; `u32::MAX` for tokens that are not in it.
/// `name`: the list's tensor.
pub(super) fn places(name: &str, tokens: &[i64], vocab_size: usize) -> Result<Vec<u32>> {
    let wrong = |got: &dyn std::fmt::Display| Error::TensorValue {
        name: name.to_string(),
        expected: "different tokens of the vocabulary",
        got: got.to_string(),
    };
    let mut places = vec![u32::MAX; vocab_size];
    for (place, token) in tokens.iter().enumerate() {
        let of_token = usize::try_from(*token).ok().and_then(|token| places.get_mut(token));
        match of_token {
            Some(of_token) if *of_token == u32::MAX => *of_token = place as u32,
            Some(_) => return Err(wrong(&format_args!("{token} twice"))),
            None => return Err(wrong(token)),
        }
    }
    Ok(places)
}
