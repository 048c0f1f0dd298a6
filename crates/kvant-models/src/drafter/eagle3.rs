//! EAGLE-3 heads: one layer that reads the residual stream of three layers of the target, with a vocabulary of its own.
//!
//! | files | description | layer |
//! |---|---|---|
//! | speculators (Red Hat) | `transformer_layer_config` | `layers.0.` |
//! | SafeAILab, SpecForge, NVIDIA | the whole `config.json` | `midlayer.` |

use kvant::{DType, Tensor};
use serde_json::Value;

use super::{
    Drafter, Parts,
    entry::Entry,
    integers, not_a_drafter, other_target,
    vocabulary::{DraftVocabulary, places},
    with_dtype,
};
use crate::{
    Config, Error, Files, Model, Result,
    config::fields::Fields,
    families,
    forward::Taps,
    safetensors::Checkpoint,
    source::{DraftNames, DraftPart, Part, Role, Source, hf::HfSource, quantization::Quantization},
    spec::OutputMatrix,
    weights::{SharedMatrices, shifted, whole_matrix},
};

const LAYER: &str = "layers.{l}.";
const MIDDLE_LAYER: &str = "midlayer.";

const NAMES: DraftNames = DraftNames {
    block: LAYER,
    first_block: 0,
    parts: &[(Part::AttentionNorm, "hidden_norm.weight")],
    others: &[
        (Role::Embedding, "embed_tokens.weight"),
        (Role::FinalNorm, "norm.weight"),
        (Role::Output, "lm_head.weight"),
        (Role::Draft(DraftPart::Input), "fc.weight"),
        (Role::Draft(DraftPart::EmbeddingNorm), "{block}input_layernorm.weight"),
        (Role::Draft(DraftPart::FeaturesNorm), "input_norm.weight"),
    ],
};

/// The offset from each draft token to its target token.
const OFFSETS: &str = "d2t";

/// The layers that EAGLE-3 reads.
const LAYERS_KEY: &str = "eagle_aux_hidden_state_layer_ids";

/// Whether a `config.json` is that of an EAGLE-3 head.
pub(super) fn is_config(fields: &Fields) -> Result<bool> {
    let is_eagle = |name: &str| name.to_lowercase().contains("eagle3");
    let architectures = fields.get("architectures").and_then(Value::as_array);
    let is_named = architectures.is_some_and(|names| names.iter().filter_map(Value::as_str).any(is_eagle));
    let speculator = fields.string("speculators_model_type")?;
    Ok(is_named || speculator == Some("eagle3") || fields.get("draft_vocab_size").is_some())
}

/// The options of a head.
struct Options {
    /// Tokens that it can draft.
    tokens: usize,
    target_width: usize,
    /// The target's blocks before which it reads the residual stream.
    layers: [usize; 3],
    norm_before_residual: bool,
    norm_before_fc: bool,
    norm_output: bool,
}

pub(super) fn load(files: &Files, target: &Model, dense_weights: Option<DType>) -> Result<Drafter> {
    let json = files.read_json("config.json")?;
    let fields = Fields::new(&json)?;
    let config = layer_config(&json)?;
    let options = Options::parse(&fields, &config, target)?;
    check_target(&config, &options, target)?;
    let checkpoint = Checkpoint::open_files(files)?;
    let is_middle = checkpoint.contains("midlayer.self_attn.q_proj.weight");
    let names = DraftNames { block: if is_middle { MIDDLE_LAYER } else { LAYER }, ..NAMES };
    if !checkpoint.contains("fc.weight") {
        return Err(not_a_drafter("the checkpoint has no tensor `fc.weight`"));
    }
    let vocabulary = vocabulary(&checkpoint, &options, target)?;
    let family = families::named(config.family)?;
    let source = HfSource::of_drafter(&checkpoint, Quantization::parse(&json)?, family, 1, names);
    with_dtype(&source, dense_weights, |source| assemble(config, options, vocabulary, source, target))
}

/// The configuration of the layer, in the form of a model with one layer.
pub(super) fn layer_config(json: &Value) -> Result<Config> {
    let mut layer = json.get("transformer_layer_config").unwrap_or(json).clone();
    if let Some(keys) = layer.as_object_mut() {
        keys.remove("architectures");
        keys.entry("model_type").or_insert("llama".into());
    }
    let config = families::parse(&layer)?;
    match config.decoder.blocks.len() {
        1 => Ok(config),
        more => Err(Error::Unsupported {
            what: format!("an EAGLE-3 head of {more} layers"),
            reason: "heads have one layer".to_string(),
        }),
    }
}

impl Options {
    fn parse(fields: &Fields, config: &Config, target: &Model) -> Result<Options> {
        let (hidden, vocab) = (config.decoder.hidden_size, config.decoder.vocab_size);
        let nested = fields.object("eagle_config")?;
        let flag = |key: &str| -> Result<Option<bool>> {
            let inner = nested.as_ref().map(|nested| nested.bool_or_null(key)).transpose()?.flatten();
            Ok(inner.or(fields.bool_or_null(key)?))
        };
        for (key, usual) in [
            ("use_aux_hidden_state", true),
            ("use_input_layernorm_in_first_layer", true),
            ("use_last_layernorm", true),
            ("use_mtp_layernorm", false),
            ("fc_norm", false),
        ] {
            if let Some(other) = flag(key)?.filter(|&on| on != usual) {
                return Err(fields.error(key, format_args!("absent or {usual}"), other));
            }
        }
        Ok(Options {
            tokens: fields.size_or_null("draft_vocab_size", vocab)?.unwrap_or(vocab),
            target_width: fields.size_or_null("target_hidden_size", 1 << 20)?.unwrap_or(hidden),
            layers: layers(fields, nested.as_ref(), target.decoder().blocks.len())?,
            norm_before_residual: flag("norm_before_residual")?.unwrap_or(false),
            norm_before_fc: flag("norm_before_fc")?.unwrap_or(false),
            norm_output: flag("norm_output")?.unwrap_or(false),
        })
    }
}

/// The blocks before which the residual stream is read. At the top level, files name these blocks, as in vLLM; in
/// `eagle_config` the blocks before them, as in SGLang.
fn layers(fields: &Fields, nested: Option<&Fields>, blocks: usize) -> Result<[usize; 3]> {
    let named = fields.indices(LAYERS_KEY, blocks + 1)?;
    let inner = nested.map(|nested| nested.indices(LAYERS_KEY, blocks)).transpose()?.unwrap_or_default();
    let named = if named.is_empty() { inner.iter().map(|layer| layer + 1).collect() } else { named };
    match named[..] {
        [] => Ok([2.min(blocks), blocks / 2, blocks.saturating_sub(3)]),
        [a, b, c] => Ok([a, b, c]),
        _ => Err(fields.error(LAYERS_KEY, "three layers", named.len())),
    }
}

fn check_target(config: &Config, options: &Options, target: &Model) -> Result<()> {
    let of_target = target.decoder();
    for (what, own, of_target) in [
        ("hidden size", options.target_width, of_target.hidden_size),
        ("vocabulary", config.decoder.vocab_size, of_target.vocab_size),
    ] {
        if own != of_target {
            return Err(other_target(what, own, of_target));
        }
    }
    Ok(())
}

fn vocabulary(checkpoint: &Checkpoint, options: &Options, target: &Model) -> Result<DraftVocabulary> {
    let vocab = target.vocab_size();
    if options.tokens == vocab && !checkpoint.contains(OFFSETS) {
        return Ok(DraftVocabulary::Whole);
    }
    let offsets = integers::read(checkpoint, OFFSETS, options.tokens)?;
    let tokens: Vec<i64> = offsets.iter().zip(0i64..).map(|(offset, token)| offset.saturating_add(token)).collect();
    let places = places(OFFSETS, &tokens, vocab)?;
    Ok(DraftVocabulary::Some {
        tokens: options.tokens,
        places: Tensor::from_slice(target.device(), &places, &[vocab])?,
    })
}

fn assemble(
    config: Config,
    options: Options,
    vocabulary: DraftVocabulary,
    source: &dyn Source,
    target: &Model,
) -> Result<Drafter> {
    let (device, of_target) = (target.device(), &target.network().weights);
    let mut spec = config.decoder;
    let (h, width, vocab) = (spec.hidden_size, options.target_width, spec.vocab_size);
    let is_as_wide = h == width;
    (spec.vocab_size, spec.output) = (options.tokens, OutputMatrix::Own);
    // Without an embedding of its own, a head reads the target's, and the same holds for the output matrix.
    let embed = match source.has(Role::Embedding) || !is_as_wide {
        true => whole_matrix(source, Role::Embedding, &[vocab, h], device)?,
        false => of_target.embed.all()?,
    };
    let output = match source.has(Role::Output) || !is_as_wide || options.tokens != vocab {
        true => None,
        false => Some(of_target.output.as_ref().unwrap_or(&of_target.embed).all()?),
    };
    let norm = |part, len| shifted(source, Role::Draft(part), len, spec.norm_offset, device);
    let entry = Entry::Eagle3 {
        input: whole_matrix(source, Role::Draft(DraftPart::Input), &[h, 3 * width], device)?,
        features_norm: match options.norm_before_fc {
            true => Some(norm(DraftPart::FeaturesNorm, 3 * width)?),
            false => None,
        },
        embedding_norm: norm(DraftPart::EmbeddingNorm, h)?,
        norm_before_residual: options.norm_before_residual,
        norm_output: options.norm_output,
    };
    let parts = Parts {
        spec,
        family: config.family,
        layers: vec![target.decoder().cache_layers()],
        shared: SharedMatrices { embed, output, first_inputs: 2 * h },
        entry,
        vocabulary,
        taps: Taps::Residual(options.layers),
        hidden_width: h,
        source,
    };
    parts.load(target)
}
