//! Scalings of rotary embeddings from metadata, with llama.cpp's keys and defaults.

use kvant_models::{Config, Error, Result, spec::AttentionSpec};

use crate::common::gguf::{Value, Writer, f32, text, u32};

/// A key without the architecture, and its value.
type Pair<'a> = (&'a str, Value);

/// The first layer's attention in a model of an architecture with additional keys.
fn attention(architecture: &str, keys: &[Pair]) -> Result<AttentionSpec> {
    attention_without("", architecture, keys)
}

fn attention_without(lacks: &str, architecture: &str, keys: &[Pair]) -> Result<AttentionSpec> {
    let full = |key: &str| format!("{architecture}.{key}");
    let writer = Writer::default()
        .pair("general.architecture", text(architecture))
        .pair(&full("embedding_length"), u32(64))
        .pair(&full("block_count"), u32(1))
        .pair(&full("context_length"), u32(256))
        .pair(&full("attention.head_count"), u32(1))
        .pair(&full("attention.layer_norm_rms_epsilon"), f32(1e-5))
        .pair(&full("attention.sliding_window"), u32(if architecture == "llama" { 0 } else { 8 }))
        .pair(&full("feed_forward_length"), u32(64))
        .tensor("token_embd.weight", &[64, 8], 0, vec![0; 64 * 8 * 4]);
    let mut writer =
        keys.iter().fold(writer, |writer, (key, value)| writer.pair(&full(key), Value(value.0, value.1.clone())));
    writer.pairs.retain(|(key, _)| *key != full(lacks));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.gguf");
    std::fs::write(&path, writer.bytes()).unwrap();
    Ok(Config::load(&path)?.decoder.blocks[0].attention().unwrap().clone())
}

#[test]
fn a_factor_divides_all_frequencies() {
    let cases: [(&[(&str, Value)], f32); 10] = [
        (&[], 1.0),
        (&[("rope.scale_linear", f32(4.0))], 4.0),
        (&[("rope.scaling.factor", f32(4.0))], 4.0),
        (&[("rope.scaling.factor", f32(2.0)), ("rope.scale_linear", f32(4.0))], 2.0),
        (&[("rope.scaling.factor", f32(0.0))], 1.0),
        (&[("rope.scale_linear", f32(0.0))], 1.0),
        (&[("rope.scaling.type", text("linear")), ("rope.scaling.factor", f32(4.0))], 4.0),
        (&[("rope.scaling.type", text("linear")), ("rope.scale_linear", f32(4.0))], 4.0),
        (&[("rope.scaling.type", text("linear"))], 1.0),
        (&[("rope.scaling.type", text("none")), ("rope.scaling.factor", f32(4.0))], 1.0),
    ];
    for (keys, factor) in cases {
        let names: Vec<_> = keys.iter().map(|(key, _)| key).collect();
        let got = attention("llama", keys).unwrap();
        assert_eq!(got.rope.factors.unwrap_or_else(|| vec![1.0; 32]), [factor; 32], "{names:?}");
        assert_eq!((got.rope.theta, got.scale), (1e4, 0.125), "{names:?}");
    }
}

#[test]
fn yarn_scales_scores_by_the_square_of_its_factor() {
    let usual = 0.1 * 4f32.ln() + 1.0;
    let cases: [(&[(&str, Value)], f32); 6] = [
        (&[], usual),
        (&[("rope.scaling.yarn_attn_factor", f32(1.5))], 1.5),
        (&[("rope.scaling.attn_factor", f32(0.5))], 0.5 * usual),
        (&[("rope.scaling.yarn_log_multiplier", f32(1.0))], 1.0),
        (&[("rope.scaling.yarn_log_multiplier", f32(1.0)), ("rope.scaling.attn_factor", f32(0.5))], 0.5),
        (&[("rope.scaling.yarn_ext_factor", f32(1.0))], usual),
    ];
    let original = || ("rope.scaling.original_context_length", u32(64));
    for (keys, factor) in cases {
        let mut all = vec![("rope.scaling.type", text("yarn")), original(), ("rope.scaling.factor", f32(4.0))];
        all.extend(keys.iter().map(|(key, value)| (*key, Value(value.0, value.1.clone()))));
        let got = attention("llama", &all).unwrap();
        let want = 0.125 * factor * factor;
        assert!(
            (got.scale - want).abs() < 1e-6,
            "{:?}: {} and {want}",
            keys.iter().map(|key| key.0).collect::<Vec<_>>(),
            got.scale
        );
        let factors = got.rope.factors.unwrap();
        assert_eq!((factors[0], factors[31]), (1.0, 4.0));
    }
    let old = [("rope.scaling.type", text("yarn")), original(), ("rope.scale_linear", f32(4.0))];
    assert_eq!(attention("llama", &old).unwrap().rope.factors.unwrap()[31], 4.0);
}

#[test]
fn factors_without_a_place_are_refused_by_key() {
    let yarn = || ("rope.scaling.type", text("yarn"));
    let cases: [(&str, &[Pair], &str); 7] = [
        ("llama", &[("rope.scaling.attn_factor", f32(2.0))], "llama.rope.scaling.attn_factor"),
        ("llama", &[yarn(), ("rope.scaling.yarn_ext_factor", f32(0.5))], "llama.rope.scaling.yarn_ext_factor"),
        ("llama", &[("rope.scaling.factor", f32(-4.0))], "llama.rope.scaling.factor"),
        ("llama", &[yarn(), ("rope.scaling.yarn_beta_fast", f32(-1.0))], "llama.rope.scaling.yarn_beta_fast"),
        ("llama", &[yarn(), ("rope.scaling.original_context_length", u32(0))], "scaling.original_context_length"),
        ("gemma3", &[yarn(), ("rope.scaling.attn_factor", f32(2.0))], "gemma3.rope.scaling.attn_factor"),
        ("gemma4", &[("rope.scaling.factor", f32(4.0))], "gemma4.rope.scaling.type"),
    ];
    for (architecture, keys, key) in cases {
        match attention(architecture, keys) {
            Err(Error::Metadata { key: named, .. }) => assert!(named.ends_with(key), "{key}: {named}"),
            other => panic!("{key}: {other:?}"),
        }
    }
}

/// Keys that llama.cpp requires.
#[test]
fn keys_without_a_default_are_required() {
    for key in ["context_length", "attention.layer_norm_rms_epsilon"] {
        let error = attention_without(key, "llama", &[]).unwrap_err();
        assert!(matches!(&error, Error::Metadata { key: named, .. } if named.ends_with(key)), "{error}");
    }
}
