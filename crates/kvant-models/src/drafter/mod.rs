//! Drafters: small decoders that guess the next tokens of a target, from its hidden states.
//!
//! | drafter | reads of the target | own keys and values |
//! |---|---|---|
//! | Gemma 4's assistants | the last norm; its last sliding and its last full layer's keys and values | none |
//! | MTP of Qwen3-Next and Qwen 3.5 | the last norm of every token | one layer |
//! | EAGLE-3 heads | the residual stream before three blocks, of every token | one layer |
//!
//! A drafter is a decoder that the interpreter of [`forward`](crate::forward) runs, with an [entry](Entry) of its own:
//! it computes the first residual stream from the embedding of the next token and the target's hidden state.
//!
//! A row of MTP and EAGLE-3 at position p has the hidden state of p and the token of p + 1, attends to the positions up
//! to p of the drafter's layer, and predicts the token of p + 2. The next row has the hidden state that the previous
//! one left. A row of an assistant attends to all stored positions of the target. Its queries rotate by the position of
//! its token, which is not stored yet, and further rows have the same position.

mod assistant;
mod decoder;
mod eagle3;
mod encode;
mod entry;
mod integers;
mod memory;
mod mtp;
mod space;
mod states;
#[cfg(test)]
mod tests;
mod vocabulary;

use kvant::{CacheLayer, DType};

use crate::{
    DecoderSpec, Error, Files, Model, Result,
    config::fields::Fields,
    forward::{Network, Taps},
    pools,
    shard::local_spec,
    source::{Source, converted::Converted},
    weights::{SharedMatrices, Weights},
};
pub use decoder::{Draft, DraftDecoder, DraftSize};
pub(crate) use encode::{DraftHidden, DraftInput, DraftOutput};
use entry::Entry;
pub(crate) use memory::DraftMemory;
pub(crate) use space::DraftSpace;
pub use states::TargetStates;
use vocabulary::DraftVocabulary;

/// A drafter of a loaded model.
pub struct Drafter {
    network: Network,
    entry: Entry,
    vocabulary: DraftVocabulary,
    taps: Taps,
    cache_layer: Option<CacheLayer>,
    /// Width of the target's residual stream.
    target_width: usize,
    /// Width of the hidden states that a pass leaves for the next one.
    hidden_width: usize,
    /// The target's number of logits.
    vocab_size: usize,
    /// Bytes of the matrices that are not the target's.
    bytes: usize,
}

/// The drafter that some files contain.
enum FileKind {
    Assistant,
    Mtp,
    Eagle3,
}

impl Drafter {
    /// Loads the drafter of a model. `files` are those of an assistant or an EAGLE-3 head, or for MTP those of the
    /// model itself. `dense_weights` is as in [`LoadOptions`](crate::LoadOptions::dense_weights).
    ///
    /// # Errors
    /// `NotADrafter` for files without a drafter; `OtherTarget` for a drafter of another model; otherwise as
    /// [`Model::load_files`].
    pub fn load(files: &Files, target: &Model, dense_weights: Option<DType>) -> Result<Drafter> {
        let drafter = match FileKind::of(files)? {
            FileKind::Assistant => assistant::load(files, target, dense_weights),
            FileKind::Mtp => mtp::load(files, target, dense_weights),
            FileKind::Eagle3 => eagle3::load(files, target, dense_weights),
        }?;
        tracing::info!(%files, bytes = drafter.bytes, "loaded a drafter");
        Ok(drafter)
    }

    /// The target's hidden states that the drafter reads.
    pub fn taps(&self) -> Taps {
        self.taps
    }

    /// The drafter's own layer in the target's pools, which follows the target's layers. It is never sealed.
    pub fn cache_layer(&self) -> Option<CacheLayer> {
        self.cache_layer
    }

    /// Bytes of the matrices that the target does not have, on each device of a group.
    pub fn weight_bytes(&self) -> usize {
        self.bytes
    }

    /// Width of the hidden states that a pass leaves for the next one.
    pub(crate) fn hidden_width(&self) -> usize {
        self.hidden_width
    }

    /// Width of the embedding and of the hidden state that the entry joins.
    fn joined_width(&self) -> usize {
        match self.entry {
            Entry::Assistant { .. } => self.target_width,
            Entry::Mtp { .. } | Entry::Eagle3 { .. } => self.network.spec().hidden_size,
        }
    }
}

impl FileKind {
    fn of(files: &Files) -> Result<FileKind> {
        if let Some(gguf) = files.as_gguf() {
            return match gguf.metadata().text("general.architecture")? {
                Some(assistant::ARCHITECTURE) => Ok(FileKind::Assistant),
                _ => Ok(FileKind::Mtp),
            };
        }
        files.check()?;
        let json = files.read_json("config.json")?;
        let fields = Fields::new(&json)?;
        if fields.string("model_type")?.is_some_and(|name| assistant::MODEL_TYPES.contains(&name)) {
            return Ok(FileKind::Assistant);
        }
        Ok(if eagle3::is_config(&fields)? { FileKind::Eagle3 } else { FileKind::Mtp })
    }
}

/// The description of a drafter, and matrices that it shares with its target.
struct Parts<'a> {
    /// The decoder; its `embedding_scale` is that of the tokens' table.
    spec: DecoderSpec,
    family: &'static str,
    /// The layer of the target's pools that each block reads or writes.
    layers: Vec<usize>,
    shared: SharedMatrices,
    entry: Entry,
    vocabulary: DraftVocabulary,
    taps: Taps,
    hidden_width: usize,
    source: &'a dyn Source,
}

impl Parts<'_> {
    /// Loads the blocks.
    fn load(self, target: &Model) -> Result<Drafter> {
        let Parts { spec, family, layers, shared, entry, vocabulary, taps, hidden_width, source } = self;
        let (device, decoder) = (target.device(), target.decoder());
        let local = local_spec(&spec, device.ranks(), target.cache_division(), source)?;
        check_layers(&local, &layers, target)?;
        let weights = Weights::load_with(&spec, &local, source, device, shared)?;
        let cache_layer = pools::draft_layer(&local, target.activations());
        let bytes = weights.bytes + entry.bytes() + vocabulary.bytes();
        let config = crate::Config {
            family,
            decoder: spec,
            max_position_embeddings: None,
            bos_token_id: None,
            eos_token_ids: Vec::new(),
        };
        let network = Network::new(config, local, weights, target.activations(), target.max_length())?;
        Ok(Drafter {
            network: network.with_layers(layers),
            entry,
            vocabulary,
            taps,
            cache_layer,
            target_width: decoder.hidden_size,
            hidden_width,
            vocab_size: decoder.vocab_size,
            bytes,
        })
    }
}

/// Checks that blocks without keys of their own fit the target's layers, as each rank has them.
fn check_layers(local: &DecoderSpec, layers: &[usize], target: &Model) -> Result<()> {
    let of_target: Vec<_> = target.rank_decoder().cache_blocks().map(|(_, attention)| attention).collect();
    for (block, &layer) in local.blocks.iter().zip(layers) {
        let Some(own) = block.attention().filter(|attention| attention.is_external()) else { continue };
        let Some(of_target) = of_target.get(layer) else { continue };
        let shape = |of: &crate::AttentionSpec| [of.kv_heads, of.head_dim, of.position_ranks];
        if shape(own) != shape(of_target) {
            let show = |[heads, width, _]: [usize; 3]| format!("{heads} of {width} coordinates");
            return Err(other_target("KV heads", show(shape(own)), show(shape(of_target))));
        }
    }
    Ok(())
}

/// An error for a drafter of another model.
fn other_target(what: &'static str, drafter: impl std::fmt::Display, target: impl std::fmt::Display) -> Error {
    Error::OtherTarget { what, drafter: drafter.to_string(), target: target.to_string() }
}

/// An error for files without a drafter.
fn not_a_drafter(reason: impl std::fmt::Display) -> Error {
    Error::NotADrafter { reason: reason.to_string() }
}

/// Applies the dtype of dense matrices.
fn with_dtype<T>(
    source: &dyn Source,
    dense_weights: Option<DType>,
    then: impl FnOnce(&dyn Source) -> Result<T>,
) -> Result<T> {
    match dense_weights {
        Some(dtype) => then(&Converted { source, dtype }),
        None => then(source),
    }
}

impl std::fmt::Debug for Drafter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Drafter({} layers, {:?})", self.network.spec().blocks.len(), self.taps)
    }
}
