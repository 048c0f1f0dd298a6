//! Gemma 4's assistants: a few layers that attend to the target's last sliding and its last full layer. Their residual
//! stream starts from the target's embedding of the next token and its hidden state; a last projection returns the
//! hidden state for the next pass. Assistants of E2B and E4B compute the logits of some groups of tokens only.

use kvant::{DType, Device, Tensor};
use serde_json::{Value, json};

use super::{
    Drafter, Parts,
    entry::Entry,
    integers, not_a_drafter, other_target,
    vocabulary::{Centroids, DraftVocabulary, places},
    with_dtype,
};
use crate::{
    Config, Error, Files, Model, Result,
    config::fields::Fields,
    families,
    forward::Taps,
    gguf::{self, source::GgufSource},
    safetensors::Checkpoint,
    source::{DraftNames, DraftPart, Matrix, Role, Source, hf::HfSource, quantization::Quantization},
    spec::{AttentionSpec, KeysValues, OutputMatrix},
    weights::{SharedMatrices, whole_matrix},
};

/// The `model_type` of assistants.
pub(super) const MODEL_TYPES: [&str; 2] = ["gemma4_assistant", "gemma4_unified_assistant"];
/// The architecture of assistants in GGUF files.
pub(super) const ARCHITECTURE: &str = "gemma4-assistant";

const FAMILY: &str = "gemma4";
const ORDERING: &str = "masked_embedding.token_ordering";
/// The defaults of transformers: the target's hidden size, groups of tokens, and selected groups.
const WIDTH: usize = 1536;
const UNIFIED_WIDTH: usize = 3840;
const GROUPS: usize = 2048;
const TOP_K: usize = 32;
/// Maximum of a width, and of the number of groups.
const MAX_SIZE: usize = 1 << 20;

/// The embedding is the output matrix.
const HF: DraftNames = DraftNames {
    block: "model.layers.{l}.",
    first_block: 0,
    parts: &[],
    others: &[
        (Role::FinalNorm, "model.norm.weight"),
        (Role::Output, "model.embed_tokens.weight"),
        (Role::Draft(DraftPart::Input), "pre_projection.weight"),
        (Role::Draft(DraftPart::Output), "post_projection.weight"),
        (Role::Draft(DraftPart::Centroids), "masked_embedding.centroids.weight"),
    ],
};

const GGUF: DraftNames = DraftNames {
    block: "blk.{l}.",
    first_block: 0,
    parts: &[],
    others: &[
        (Role::FinalNorm, "output_norm.weight"),
        (Role::Output, "token_embd.weight"),
        (Role::Draft(DraftPart::Input), "nextn.pre_projection.weight"),
        (Role::Draft(DraftPart::Output), "nextn.post_projection.weight"),
    ],
};

/// The numbers of an output layer with groups of tokens.
struct Groups {
    count: usize,
    top_k: usize,
}

pub(super) fn load(files: &Files, target: &Model, dense_weights: Option<DType>) -> Result<Drafter> {
    if let Some(gguf) = files.as_gguf() {
        // As in llama.cpp, all logits are computed.
        let (config, width) = gguf::describe::assistant(gguf)?;
        let layers = check_target(&config, width, target)?;
        let source = GgufSource::of_drafter(gguf, GGUF);
        return with_dtype(&source, dense_weights, |source| assemble(config, layers, None, source, target));
    }
    let json = files.read_json("config.json")?;
    let fields = Fields::new(&json)?;
    let config = text_config(&json)?;
    let is_unified = fields.string("model_type")? == Some(MODEL_TYPES[1]);
    let default = if is_unified { UNIFIED_WIDTH } else { WIDTH };
    let width = fields.size("backbone_hidden_size", Some(default), MAX_SIZE)?;
    let layers = check_target(&config, width, target)?;
    let groups = Groups::parse(&fields, &config)?;
    let checkpoint = Checkpoint::open_files(files)?;
    let ordering = match &groups {
        Some(_) => Some(integers::read(&checkpoint, ORDERING, config.decoder.vocab_size)?),
        None => None,
    };
    let blocks = config.decoder.blocks.len();
    let family = families::named(config.family)?;
    let source = HfSource::of_drafter(&checkpoint, Quantization::parse(&json)?, family, blocks, HF);
    let groups = groups.zip(ordering);
    with_dtype(&source, dense_weights, |source| assemble(config, layers, groups, source, target))
}

/// The configuration of the layers, in the form of a model that has keys and values of its own.
fn text_config(json: &Value) -> Result<Config> {
    let Some(mut text) = json.get("text_config").cloned() else {
        return Err(not_a_drafter("config.json has no `text_config`"));
    };
    if let Some(keys) = text.as_object_mut() {
        keys.insert("num_kv_shared_layers".into(), json!(0));
        let is_unified = json.get("model_type").and_then(Value::as_str) == Some(MODEL_TYPES[1]);
        let model_type = if is_unified { "gemma4_unified_text" } else { "gemma4_text" };
        keys.entry("model_type").or_insert(model_type.into());
    }
    families::parse(&text)
}

impl Groups {
    fn parse(fields: &Fields, config: &Config) -> Result<Option<Groups>> {
        if fields.bool_or_null("use_ordered_embeddings")? != Some(true) {
            return Ok(None);
        }
        let count = fields.size("num_centroids", Some(GROUPS), MAX_SIZE)?;
        let vocab = config.decoder.vocab_size;
        if !vocab.is_multiple_of(count) {
            return Err(fields.error("num_centroids", format_args!("a divisor of the vocabulary, {vocab}"), count));
        }
        Ok(Some(Groups { count, top_k: fields.size("centroid_intermediate_top_k", Some(TOP_K.min(count)), count)? }))
    }
}

/// Checks that a model is the assistant's target. `width`: the target's hidden size. Returns the target's cache layer
/// of each block.
fn check_target(config: &Config, width: usize, target: &Model) -> Result<Vec<usize>> {
    let of_target = target.decoder();
    if target.config().family != FAMILY {
        return Err(other_target("family", FAMILY, target.config().family));
    }
    for (what, own, of_target) in
        [("hidden size", width, of_target.hidden_size), ("vocabulary", config.decoder.vocab_size, of_target.vocab_size)]
    {
        if own != of_target {
            return Err(other_target(what, own, of_target));
        }
    }
    let layers: Vec<&AttentionSpec> = of_target.cache_blocks().map(|(_, attention)| attention).collect();
    let layer_of = |block: &crate::BlockSpec| {
        let own = block.attention().ok_or_else(|| not_a_drafter("a layer is no attention"))?;
        let found = layers.iter().rposition(|layer| layer.window.is_some() == own.window.is_some());
        let layer = found.ok_or_else(|| other_target("kind of a layer", kind(own), "none of this kind"))?;
        let shape = |of: &AttentionSpec| format!("{} of {} coordinates", of.kv_heads, of.head_dim);
        let (of_own, of_target) = (shape(own), shape(layers[layer]));
        if of_own != of_target {
            return Err(other_target("KV heads", of_own, of_target));
        }
        Ok(layer)
    };
    config.decoder.blocks.iter().map(layer_of).collect()
}

/// The stored positions that a query sees. The target keeps those within its own window. The key of the row's own
/// token, which windows include, is not stored yet.
fn seen(own: Option<usize>, of_target: Option<usize>) -> Result<Option<usize>> {
    match own.into_iter().chain(of_target).min() {
        Some(0 | 1) => Err(Error::Unsupported {
            what: "an assistant's window of 1 position".to_string(),
            reason: "its queries would see no key".to_string(),
        }),
        window => Ok(window.map(|window| window - 1)),
    }
}

fn kind(attention: &AttentionSpec) -> &'static str {
    if attention.window.is_some() { "sliding" } else { "full" }
}

fn assemble(
    config: Config,
    layers: Vec<usize>,
    groups: Option<(Groups, Vec<i64>)>,
    source: &dyn Source,
    target: &Model,
) -> Result<Drafter> {
    let (device, weights) = (target.device(), &target.network().weights);
    let (mut spec, width) = (config.decoder, target.decoder().hidden_size);
    let of_target: Vec<&AttentionSpec> = target.decoder().cache_blocks().map(|(_, attention)| attention).collect();
    for (block, &layer) in spec.blocks.iter_mut().zip(&layers) {
        let Some(attention) = block.attention_mut() else { continue };
        attention.keys_values = KeysValues::External;
        attention.window = seen(attention.window, of_target[layer].window)?;
    }
    spec.embedding_scale = target.decoder().embedding_scale;
    (spec.output, spec.final_softcap) = (OutputMatrix::Own, None);
    let h = spec.hidden_size;
    let matrix = |part, shape: &[usize]| whole_matrix(source, Role::Draft(part), shape, device);
    let entry = Entry::Assistant {
        input: matrix(DraftPart::Input, &[h, 2 * width])?,
        output: matrix(DraftPart::Output, &[width, h])?,
    };
    let (vocabulary, output) = match groups {
        None => (DraftVocabulary::Whole, None),
        Some((groups, ordering)) => {
            let centroids = matrix(DraftPart::Centroids, &[groups.count, h])?;
            let places = places(ORDERING, &ordering, spec.vocab_size)?;
            let tokens = whole_matrix(source, Role::Output, &[spec.vocab_size, h], &Device::cpu())?;
            let tokens = tokens.reordered(&ordering, device)?;
            let output = tokens.all()?;
            let vocabulary = Centroids {
                centroids,
                tokens: tokens.grouped(groups.count)?,
                places: Tensor::from_slice(device, &places, &[places.len()])?,
                groups: groups.count,
                group_tokens: spec.vocab_size / groups.count,
                top_k: groups.top_k,
            };
            (DraftVocabulary::Centroids(Box::new(vocabulary)), Some(output))
        }
    };
    let parts = Parts {
        spec,
        family: FAMILY,
        layers,
        shared: SharedMatrices { embed: weights.embed.all()?, output, first_inputs: h },
        entry,
        vocabulary,
        taps: Taps::Final,
        hidden_width: width,
        source,
    };
    parts.load(target)
}

impl Matrix {
    /// The matrix on a device, with its outputs in another order: output i is output `order[i]`, which exists.
    fn reordered(&self, order: &[i64], device: &Device) -> Result<Matrix> {
        self.views(|tensor| {
            let mut bytes = vec![0; tensor.bytes()];
            tensor.read_bytes(&mut bytes)?;
            let row = bytes.len() / tensor.shape()[0].max(1);
            let mut moved = Vec::with_capacity(bytes.len());
            for &from in order {
                let start = usize::try_from(from).unwrap_or(usize::MAX).saturating_mul(row);
                let rows = bytes.get(start..start.saturating_add(row));
                let rows = rows.ok_or_else(|| Error::argument("order", "outputs of the matrix", from))?;
                moved.extend_from_slice(rows);
            }
            Ok(Tensor::from_bytes(device, tensor.dtype(), tensor.shape(), &moved)?)
        })
    }

    /// The outputs in `groups` groups: `[groups, outputs / groups, inputs]`.
    fn grouped(&self, groups: usize) -> Result<Matrix> {
        self.views(|tensor| {
            let (&outputs, rest) = tensor.shape().split_first().expect("a matrix has dimensions");
            Ok(tensor.reshape(&[&[groups, outputs / groups], rest].concat())?)
        })
    }
}
