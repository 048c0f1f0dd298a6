//! Multi-token prediction of Qwen3-Next and Qwen 3.5: one more block of the model, which the checkpoint contains as
//! `mtp.*`, and GGUF files as their last block.

use kvant::DType;

use super::{Drafter, Parts, entry::Entry, not_a_drafter, other_target, vocabulary::DraftVocabulary, with_dtype};
use crate::{
    BlockSpec, Config, DecoderSpec, Error, Files, Model, Result, families,
    forward::Taps,
    gguf::{self, source::GgufSource},
    safetensors::Checkpoint,
    source::{DraftNames, DraftPart, Role, Source, hf::HfSource, quantization::Quantization},
    spec::OutputMatrix,
    weights::{SharedMatrices, shifted, whole_matrix},
};

const FAMILIES: [&str; 2] = ["qwen3_next", "qwen3_5"];

/// The start of the names of all tensors in Hugging Face's files.
pub(super) const PREFIX: &str = "mtp.";

const HF: DraftNames = DraftNames {
    block: "mtp.layers.{l}.",
    first_block: 0,
    parts: &[],
    others: &[
        (Role::FinalNorm, "mtp.norm.weight"),
        (Role::Draft(DraftPart::Input), "mtp.fc.weight"),
        (Role::Draft(DraftPart::EmbeddingNorm), "mtp.pre_fc_norm_embedding.weight"),
        (Role::Draft(DraftPart::HiddenNorm), "mtp.pre_fc_norm_hidden.weight"),
    ],
};

/// The block's number is that of the first one after the model's.
const GGUF: DraftNames = DraftNames {
    block: "blk.{l}.",
    first_block: 0,
    parts: &[],
    others: &[
        (Role::FinalNorm, "blk.{l}.nextn.shared_head_norm.weight"),
        (Role::Embedding, "blk.{l}.nextn.embed_tokens.weight"),
        (Role::Output, "blk.{l}.nextn.shared_head_head.weight"),
        (Role::Draft(DraftPart::Input), "blk.{l}.nextn.eh_proj.weight"),
        (Role::Draft(DraftPart::EmbeddingNorm), "blk.{l}.nextn.enorm.weight"),
        (Role::Draft(DraftPart::HiddenNorm), "blk.{l}.nextn.hnorm.weight"),
    ],
};

pub(super) fn load(files: &Files, target: &Model, dense_weights: Option<DType>) -> Result<Drafter> {
    let config = Config::load_files(files)?;
    check_family(&config)?;
    check_target(&config, target)?;
    let blocks = config.decoder.blocks.len();
    if let Some(gguf) = files.as_gguf() {
        check_count(gguf::describe::predicting_blocks(gguf)?)?;
        let source = GgufSource::of_drafter(gguf, DraftNames { first_block: blocks, ..GGUF });
        return with_dtype(&source, dense_weights, |source| assemble(config, source, target));
    }
    let json = files.read_json("config.json")?;
    let checkpoint = Checkpoint::open_files(files)?;
    check_count(u64::from(checkpoint.contains("mtp.fc.weight")) + u64::from(checkpoint.contains(SECOND_BLOCK)))?;
    let family = families::named(config.family)?;
    let source = HfSource::of_drafter(&checkpoint, Quantization::parse(&json)?, family, 1, HF);
    with_dtype(&source, dense_weights, |source| assemble(config, source, target))
}

/// Checks that models of a family can have the blocks.
pub(super) fn check_family(config: &Config) -> Result<()> {
    match FAMILIES.contains(&config.family) {
        true => Ok(()),
        false => Err(not_a_drafter(format_args!("the files are of the family {}", config.family))),
    }
}

/// A tensor of a second block.
const SECOND_BLOCK: &str = "mtp.layers.1.input_layernorm.weight";

/// Checks the number of predicting blocks. vLLM and llama.cpp run one.
fn check_count(blocks: u64) -> Result<()> {
    match blocks {
        0 => Err(not_a_drafter("the checkpoint has no blocks for multi-token prediction")),
        1 => Ok(()),
        more => Err(Error::Unsupported {
            what: format!("{more} blocks for multi-token prediction"),
            reason: "drafters have one".to_string(),
        }),
    }
}

fn check_target(config: &Config, target: &Model) -> Result<()> {
    let (own, of_target) = (&config.decoder, target.decoder());
    if config.family != target.config().family {
        return Err(other_target("family", config.family, target.config().family));
    }
    for (what, own, of_target) in [
        ("hidden size", own.hidden_size, of_target.hidden_size),
        ("vocabulary", own.vocab_size, of_target.vocab_size),
        ("number of layers", own.blocks.len(), of_target.blocks.len()),
    ] {
        if own != of_target {
            return Err(other_target(what, own, of_target));
        }
    }
    Ok(())
}

/// The decoder of the block: an attention block of the model, with the feed-forward of its first block.
pub(super) fn describe(decoder: &DecoderSpec) -> Result<DecoderSpec> {
    let attention = decoder.blocks.iter().find(|block| block.attention().is_some());
    let (Some(attention), Some(first)) = (attention, decoder.blocks.first()) else {
        return Err(not_a_drafter("the model has no attention layer"));
    };
    let block = BlockSpec { feed_forward: first.feed_forward, ..attention.clone() };
    Ok(DecoderSpec { blocks: vec![block], output: OutputMatrix::Embedding, ..decoder.clone() })
}

fn assemble(config: Config, source: &dyn Source, target: &Model) -> Result<Drafter> {
    let mut spec = describe(&config.decoder)?;
    let (device, weights) = (target.device(), &target.network().weights);
    let (h, vocab) = (spec.hidden_size, spec.vocab_size);
    let input = whole_matrix(source, Role::Draft(DraftPart::Input), &[h, 2 * h], device)?;
    let norm = |part| shifted(source, Role::Draft(part), h, spec.norm_offset, device);
    let entry = Entry::Mtp {
        input,
        embedding_norm: norm(DraftPart::EmbeddingNorm)?,
        hidden_norm: norm(DraftPart::HiddenNorm)?,
    };
    let embed = match source.has(Role::Embedding) {
        true => whole_matrix(source, Role::Embedding, &[vocab, h], device)?,
        false => weights.embed.all()?,
    };
    let output = match source.has(Role::Output) {
        true => {
            spec.output = OutputMatrix::Own;
            None
        }
        // On one device, the target's embedding may be its output matrix.
        false => Some(weights.output.as_ref().unwrap_or(&weights.embed).all()?),
    };
    let parts = Parts {
        spec,
        family: config.family,
        layers: vec![target.decoder().cache_layers()],
        shared: SharedMatrices { embed, output, first_inputs: h },
        entry,
        vocabulary: DraftVocabulary::Whole,
        taps: Taps::FinalOfEvery,
        hidden_width: h,
        source,
    };
    parts.load(target)
}
