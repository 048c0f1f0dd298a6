//! Metadata of models with recurrent layers, with llama.cpp's keys and defaults.

use kvant_models::{
    Config, Result,
    spec::{BlockSpec, DeltaNetSpec, MixerSpec},
};

use crate::common::gguf::{Value, Writer, array, f32, flag, text, u32};

/// A key without the architecture, and its value. A later pair replaces an earlier one.
type Pair<'a> = (&'a str, Value);

/// The blocks of a model of an architecture. `Err` is the text of an error.
fn blocks(architecture: &str, keys: &[Pair]) -> std::result::Result<Vec<BlockSpec>, String> {
    let full = |key: &str| format!("{architecture}.{key}");
    let usual: [Pair; 15] = [
        ("embedding_length", u32(64)),
        ("block_count", u32(4)),
        ("context_length", u32(256)),
        ("attention.head_count", u32(2)),
        ("attention.head_count_kv", u32(1)),
        ("attention.key_length", u32(64)),
        ("attention.layer_norm_rms_epsilon", f32(1e-5)),
        ("feed_forward_length", u32(96)),
        ("ssm.conv_kernel", u32(4)),
        ("ssm.state_size", u32(32)),
        ("ssm.group_count", u32(2)),
        ("ssm.time_step_rank", u32(6)),
        ("ssm.inner_size", u32(6 * 48)),
        ("rope.freq_base", f32(1e6)),
        ("shortconv.l_cache", u32(3)),
    ];
    let mut writer = Writer::default().pair("general.architecture", text(architecture)).tensor(
        "token_embd.weight",
        &[64, 8],
        0,
        vec![0; 64 * 8 * 4],
    );
    for (key, value) in usual.iter().chain(keys) {
        writer.pairs.retain(|(other, _)| *other != full(key));
        writer = writer.pair(&full(key), Value(value.0, value.1.clone()));
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.gguf");
    std::fs::write(&path, writer.bytes()).unwrap();
    let config: Result<Config> = Config::load(&path);
    config.map(|config| config.decoder.blocks).map_err(|error| error.to_string())
}

fn are_attention(blocks: &[BlockSpec]) -> Vec<bool> {
    blocks.iter().map(|block| block.attention().is_some()).collect()
}

#[test]
fn layers_of_delta_nets() {
    let partial = || ("rope.dimension_count", u32(16));
    let every_fourth = [false, false, false, true];
    let all = blocks("qwen35", &[partial()]).unwrap();
    assert_eq!(are_attention(&all), every_fourth);
    let net = DeltaNetSpec { key_heads: 2, value_heads: 6, key_dim: 32, value_dim: 48, taps: 4, tiled: true };
    assert_eq!(all[0].mixer, MixerSpec::DeltaNet(net));
    let attention = all[3].attention().unwrap();
    assert!(attention.output_gate);
    assert_eq!((attention.rope.rotated_pairs, attention.kv_heads), (8, 1));
    let every = |n| blocks("qwen35", &[partial(), ("full_attention_interval", u32(n))]).map(|all| are_attention(&all));
    assert_eq!(every(2).unwrap(), [false, true, false, true]);
    assert_eq!(every(1).unwrap(), [true; 4]);
    // Layers for multi-token prediction are not read.
    let predicting = || [partial(), ("block_count", u32(5)), ("nextn_predict_layers", u32(1))];
    assert_eq!(are_attention(&blocks("qwen35", &predicting()).unwrap()), every_fourth);
    let marked = |marks: &[bool]| {
        let marks = array(&marks.iter().map(|&mark| flag(mark)).collect::<Vec<_>>());
        let [a, b, c] = predicting();
        blocks("qwen35", &[a, b, c, ("attention.recurrent_layers", marks)]).map(|all| are_attention(&all))
    };
    assert_eq!(marked(&[false, true, true, false, false]).unwrap(), [true, false, false, true]);
    assert!(marked(&[false, true, true]).unwrap_err().contains("layer_types"));
    let experts = || {
        [
            partial(),
            ("expert_count", u32(4)),
            ("expert_used_count", u32(2)),
            ("expert_feed_forward_length", u32(32)),
            ("expert_shared_feed_forward_length", u32(48)),
        ]
    };
    for (architecture, is_tiled) in [("qwen3next", false), ("qwen35moe", true)] {
        let all = blocks(architecture, &experts()).unwrap();
        assert_eq!(all[0].mixer, MixerSpec::DeltaNet(DeltaNetSpec { tiled: is_tiled, ..net }), "{architecture}");
        let moe = all[3].feed_forward.moe().unwrap();
        assert!((moe.experts, moe.top_k, moe.width) == (4, 2, 32) && moe.routing.normalise, "{architecture}");
        assert_eq!(all[3].feed_forward.dense().unwrap().width, 48, "{architecture}");
    }
    assert!(blocks("qwen35", &experts()).unwrap_err().contains("`qwen35.expert_count` must be absent or 0"));
}

#[test]
fn layers_of_short_convolutions() {
    let kv_heads = || ("attention.head_count_kv", array(&[u32(0), u32(0), u32(2), u32(0)]));
    let all = blocks("lfm2", &[kv_heads()]).unwrap();
    assert_eq!(are_attention(&all), [false, false, true, false]);
    assert_eq!(all[2].attention().unwrap().kv_heads, 2);
    let MixerSpec::ShortConv(conv) = all[0].mixer else { panic!("{:?}", all[0].mixer) };
    assert_eq!((conv.channels, conv.taps, conv.biases), (64, 3, false));
    assert_eq!(all[0].feed_forward.dense().unwrap().width, 96);
    assert_eq!(are_attention(&blocks("lfm2", &[]).unwrap()), [true; 4]);
    let moe = [
        kv_heads(),
        ("leading_dense_block_count", u32(1)),
        ("expert_count", u32(4)),
        ("expert_used_count", u32(2)),
        ("expert_feed_forward_length", u32(32)),
        ("expert_gating_func", u32(2)),
    ];
    let all = blocks("lfm2moe", &moe).unwrap();
    assert_eq!(
        all.iter().map(|block| block.feed_forward.moe().is_some()).collect::<Vec<_>>(),
        [false, true, true, true]
    );
}

/// Errors name the key.
#[test]
fn sizes_that_cannot_be() {
    for (architecture, key, value) in [
        ("qwen35", "ssm.inner_size", u32(100)),
        ("qwen35", "ssm.inner_size", u32(0)),
        ("qwen35", "ssm.time_step_rank", u32(0)),
        ("qwen35", "ssm.group_count", u32(0)),
        ("qwen35", "ssm.state_size", text("x")),
        ("qwen35", "ssm.conv_kernel", u32(u32::MAX)),
        ("qwen35", "full_attention_interval", u32(0)),
        ("qwen35", "nextn_predict_layers", u32(4)),
        ("lfm2", "shortconv.l_cache", u32(0)),
        ("lfm2", "attention.head_count_kv", array(&[u32(1), u32(0)])),
        ("lfm2", "attention.head_count_kv", array(&[u32(0), u32(1 << 30), u32(0), u32(0)])),
    ] {
        let error = blocks(architecture, &[(key, value)]).unwrap_err();
        let named = if key == "nextn_predict_layers" { "block_count" } else { key };
        assert!(error.contains(named), "{architecture} {key}: {error}");
    }
    // Heads that do not share keys evenly, and sizes that kernels do not have.
    for (key, value) in [("ssm.group_count", 4), ("ssm.state_size", 33), ("ssm.conv_kernel", 9)] {
        let error = blocks("qwen35", &[(key, u32(value))]).unwrap_err();
        assert!(error.contains("layer 0"), "{key}: {error}");
    }
}
