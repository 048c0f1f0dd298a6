//! Invalid GGUF files.

use std::io::{Seek, SeekFrom, Write};

use kvant::Device;
use kvant_models::{
    Config, Model,
    gguf::{Gguf, GgufHeader},
};

use crate::{
    assert_modest,
    common::{
        gguf::{Value, Writer, array, f32, flag, text, texts, u32},
        golden,
    },
};

/// A file with every kind of value and some types of tensors.
fn sample() -> Writer {
    Writer::default()
        .pair("general.architecture", text("llama"))
        .pair("general.alignment", u32(32))
        .pair("a", array(&[f32(1.0), f32(2.0)]))
        .pair("b", flag(true))
        .pair("c", texts(["x", "yz", ""]))
        .pair("d", array(&[array(&[u32(1)]), texts(["a"])]))
        .tensor("f", &[3, 2], 0, vec![1; 24])
        .tensor("q", &[32, 2], 2, vec![2; 36])
        .tensor("k", &[256], 12, vec![3; 144])
}

/// Opens bytes as a file and reads all tensors.
fn open(bytes: &[u8]) -> Result<(), String> {
    let dir = tempfile::tempdir().unwrap();
    let device = Device::reference();
    let path = dir.path().join("x.gguf");
    std::fs::write(&path, bytes).unwrap();
    let result = Gguf::open(&path).map_err(|e| e.to_string());
    assert_modest();
    let gguf = result?;
    let mut names: Vec<_> = gguf.tensors().map(|(name, tensor)| (name.to_string(), tensor.kind)).collect();
    names.sort_by(|a, b| a.0.cmp(&b.0));
    for (name, kind) in names {
        gguf.read(&name, &device).map_err(|e| e.to_string())?;
        if Gguf::is_affine(kind) {
            gguf.read_affine(&name, &device).map_err(|e| e.to_string())?;
        }
    }
    assert_modest();
    Ok(())
}

#[test]
fn every_truncation_is_an_error() {
    let bytes = sample().bytes();
    open(&bytes).unwrap();
    for length in 0..bytes.len() {
        let error = open(&bytes[..length]).unwrap_err();
        assert!(error.contains("truncated"), "{length}: {error}");
    }
    // Bytes after the last tensor are ignored.
    open(&[&bytes[..], &[7; 100]].concat()).unwrap();
}

/// Replacing any byte gives an error or a consistent file.
#[test]
fn every_replaced_byte_is_an_error_or_consistent() {
    let bytes = sample().bytes();
    let mut errors = 0;
    for at in 0..bytes.len() {
        for lie in [0u64, 1, 2, 0x7f, 0x80, 0xff, 0xffff, 0x7fff_ffff, 0xffff_ffff, 1 << 62, u64::MAX - 7, u64::MAX] {
            for width in [1, 4, 8] {
                let mut wrong = bytes.clone();
                let end = (at + width).min(wrong.len());
                wrong[at..end].copy_from_slice(&lie.to_le_bytes()[..end - at]);
                errors += usize::from(GgufHeader::read(&wrong[..], wrong.len() as u64).is_err());
                assert_modest();
            }
        }
        // Reads the tensors too.
        let mut wrong = bytes.clone();
        wrong[at] = !bytes[at];
        errors += usize::from(open(&wrong).is_err());
    }
    assert!(errors > bytes.len() * 10, "{errors} errors");
}

#[test]
fn errors_name_the_inconsistency() {
    let claims = |pairs: u64, tensors: u64| {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(tensors.to_le_bytes());
        bytes.extend(pairs.to_le_bytes());
        bytes
    };
    let version = |version: [u8; 4]| [&b"GGUF"[..], &version].concat();
    let long = |count: u64, kind: u32| Value(9, [&kind.to_le_bytes()[..], &count.to_le_bytes()].concat());
    let pair = |value: Value| Writer::default().pair("k", value).bytes();
    let mut deep = u32(1);
    for _ in 0..5 {
        deep = array(&[deep]);
    }
    let tensor = |dims: &[u64], kind: u32| Writer::default().tensor("t", dims, kind, vec![0; 64]).bytes();
    let align = |n: u32| Writer::default().pair("general.alignment", u32(n)).bytes();
    let twice = |a: &str, b: &str| Writer::default().tensor(a, &[8], 0, vec![0; 32]).tensor(b, &[8], 0, vec![0; 32]);
    let moved = |offset: u64| {
        let mut bytes = twice("a", "b").bytes();
        let at = bytes.windows(8).position(|window| window == 32u64.to_le_bytes()).unwrap();
        bytes[at..at + 8].copy_from_slice(&offset.to_le_bytes());
        bytes
    };
    let cases: &[(Vec<u8>, &str)] = &[
        (b"PK\x03\x04aaaa".to_vec(), "does not start with"),
        (version([1, 0, 0, 0]), "version 1; versions 2 and 3"),
        (version([4, 0, 0, 0]), "version 4"),
        (version([0, 0, 0, 3]), "big-endian"),
        (claims(u64::MAX, 0), "claims 18446744073709551615 metadata pairs"),
        (claims(0, u64::MAX), "claims 18446744073709551615 tensors"),
        (claims(1, 0), "a metadata key needs 8 bytes, 0 remain"),
        (pair(Value(13, Vec::new())), "metadata `k`: value type 13 is unknown"),
        (pair(Value(7, vec![2])), "metadata `k`: a boolean must be 0 or 1, got 2"),
        (pair(Value(8, u64::MAX.to_le_bytes().to_vec())), "a string needs 18446744073709551615 bytes"),
        (pair(Value(8, [&1u64.to_le_bytes()[..], &[0xff]].concat())), "a string is not UTF-8"),
        (pair(long(u64::MAX, 4)), "an array of 18446744073709551615 numbers overflows"),
        (pair(long(1 << 40, 4)), "an array needs 4398046511104 bytes, 0 remain"),
        (pair(long(1 << 40, 8)), "a string of an array needs 8 bytes, 0 remain"),
        (pair(long(1 << 40, 9)), "a value type needs 4 bytes, 0 remain"),
        (pair(long(1, 77)), "value type 77 is unknown"),
        (pair(deep), "nested more than 4 deep"),
        (Writer::default().pair("k", u32(1)).pair("k", u32(1)).bytes(), "metadata `k` appears twice"),
        (align(0), "must be a power of two, at most 65536, got 0"),
        (align(24), "got 24"),
        (align(1 << 17), "got 131072"),
        (Writer::default().pair("general.alignment", text("32")).bytes(), "got \"32\""),
        (tensor(&[4], 4), "tensor `t`: type 4 is unknown"),
        (tensor(&[1, 1, 1, 1, 1], 0), "5 dimensions, the limit is 4"),
        (tensor(&[33], 2), "rows of 33 elements are not whole blocks of Q4_0, 32 each"),
        (tensor(&[1 << 32, 1 << 32], 0), "overflows"),
        (tensor(&[1 << 62], 0), "overflows"),
        (tensor(&[1 << 40], 0), "outside of the 64 bytes"),
        (twice("a", "a").bytes(), "tensor `a` appears twice"),
        (moved(0), "it starts at byte 0, the previous one ends at 32"),
        (moved(33), "its offset 33 is not a multiple of the alignment, 32"),
        (moved(u64::MAX - 31), "overflows"),
    ];
    for (bytes, expected) in cases {
        let error = open(bytes).unwrap_err();
        assert!(error.contains(expected), "expected {expected:?}, got {error:?}");
    }
    let mut gap = twice("a", "b").bytes();
    gap.extend([0; 32]);
    let at = gap.windows(8).position(|window| window == 32u64.to_le_bytes()).unwrap();
    gap[at..at + 8].copy_from_slice(&64u64.to_le_bytes());
    assert!(open(&gap).unwrap_err().contains("the previous one ends at 32"));
}

/// Metadata and tensors of models: replacing any byte of a header gives an error or a model that runs.
#[test]
fn replaced_header_bytes_are_errors_or_run() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gguf");
    for variant in ["llama_gguf", "ministral3_gguf", "gemma4_shared_gguf", "qwen3_5_gguf", "lfm2_moe_gguf"] {
        let good = std::fs::read(golden(variant).join("model.gguf")).unwrap();
        let header = GgufHeader::read(&good[..], good.len() as u64).unwrap().data_start as usize;
        std::fs::write(&path, &good).unwrap();
        let mut file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        let mut patch = |at: usize, bytes: &[u8]| {
            file.seek(SeekFrom::Start(at as u64)).unwrap();
            file.write_all(bytes).unwrap();
        };
        let (mut errors, mut lies) = (0, 0);
        for at in 0..header {
            let flipped = [!good[at]];
            let all: [&[u8]; 4] = [&flipped, &[0; 4], &[0xff; 4], &[0xff, 0xff, 0xff, 0x7f, 0, 0, 0, 0]];
            for (i, lie) in all.iter().enumerate() {
                patch(at, lie);
                lies += 1;
                // Reading tensors takes most of the time, so only one variant in four does.
                let failed = if i == 0 {
                    Model::load(&path, &Device::reference()).is_err()
                } else {
                    Config::load(&path).is_err()
                };
                errors += usize::from(failed);
                assert_modest();
                patch(at, &good[at..at + lie.len()]);
            }
        }
        println!("{variant}: {errors} errors of {lies} lies");
        assert!(errors > lies / 2 && errors < lies, "{variant}: {errors} of {lies}");
        assert!(Model::load(&path, &Device::reference()).is_ok());
    }
}

/// Errors name the key or the tensor.
#[test]
fn models_that_cannot_run() {
    const PATTERN: &str = "muse-glimmer.attention.sliding_window_pattern";
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gguf");
    let named = |writer: Writer, expected: &str| {
        std::fs::write(&path, writer.bytes()).unwrap();
        let error = Config::load(&path).unwrap_err().to_string();
        assert!(error.contains(expected), "expected {expected:?}, got {error}");
    };
    let llama = |key: &str, value: Value| {
        let mut writer = Writer::default()
            .pair("general.architecture", text("llama"))
            .pair("llama.embedding_length", u32(64))
            .pair("llama.block_count", u32(2))
            .pair("llama.context_length", u32(256))
            .pair("llama.attention.head_count", u32(1))
            .pair("llama.attention.layer_norm_rms_epsilon", f32(1e-5))
            .pair("llama.rope.freq_base", f32(1e4))
            .pair("llama.feed_forward_length", u32(64))
            .tensor("token_embd.weight", &[64, 8], 0, vec![0; 64 * 8 * 4]);
        writer.pairs.retain(|(other, _)| other != key);
        writer.pair(key, value)
    };
    named(Writer::default(), "`general.architecture` must be a string, got nothing");
    named(llama("general.architecture", text("bert")), "general.architecture \"bert\" is not supported");
    named(llama("general.architecture", text("gemma3")), "`gemma3.");
    named(llama("llama.embedding_length", text("x")), "`llama.embedding_length` must be an integer");
    named(llama("llama.attention.head_count", u32(0)), "llama.attention.head_count");
    // Sizes that others are derived from, with a rotation width as in every released file.
    for key in
        ["embedding_length", "block_count", "attention.head_count", "attention.head_count_kv", "attention.key_length"]
    {
        for size in [0, 1 << 30, u32::MAX] {
            let key = format!("llama.{key}");
            let file = llama(&key, u32(size)).pair("llama.rope.dimension_count", u32(64));
            named(file, &format!("metadata: `{key}` must be from 1 to "));
            let file = llama(&key, u32(size)).pair("llama.rope.dimension_count", u32(64));
            named(file, &format!(", got {size}"));
        }
    }
    named(llama("llama.expert_count", u32(8)), "`llama.expert_count` must be absent or 0, got 8");
    named(llama("llama.rope.scaling.type", text("longrope")), "`llama.rope.scaling.type` must be");
    named(llama("llama.attention.value_length", u32(32)), "`llama.attention.value_length` must be the same");
    let widths = |n: usize| array(&(0..n).map(|_| u32(64)).collect::<Vec<_>>());
    named(llama("llama.feed_forward_length", widths(3)), "`llama.feed_forward_length` must be 2 integers");
    named(llama("llama.attention.head_count_kv", array(&[u32(1), u32(0)])), "`llama.attention.head_count_kv` must be");
    named(
        llama("llama.rope.dimension_count", u32(32)),
        "`llama.rope.dimension_count` must be 64, all of a head, got 32",
    );
    // The first block's tensors determine the biases.
    for name in ["blk.0.attn_k.bias", "blk.1.attn_q.bias", "blk.0.attn_norm.bias", "blk.7.attn_q.bias", "blk.x.y.bias"]
    {
        let biased = llama("x", u32(0)).tensor(name, &[64], 0, vec![0; 256]);
        named(biased, &format!("tensor `{name}` is not supported: llama has no such bias"));
    }
    let mut qwen2 = llama("general.architecture", text("qwen2"));
    qwen2.pairs.iter_mut().for_each(|(key, _)| *key = key.replace("llama.", "qwen2."));
    let biased = qwen2.tensor("blk.0.attn_q.bias", &[64], 0, vec![0; 256]);
    named(
        biased.tensor("blk.1.attn_output.bias", &[64], 0, vec![0; 256]),
        "`blk.1.attn_output.bias` is not supported: qwen2",
    );
    let glimmer = |key: &str, value: Value| {
        let mut writer = llama("general.architecture", text("muse-glimmer")).pair(key, value);
        writer.pairs.iter_mut().for_each(|(key, _)| *key = key.replace("llama.", "muse-glimmer."));
        writer
    };
    named(glimmer("x", u32(0)), "`muse-glimmer.logit_scale` must be a number, got nothing");
    let scaled = |pattern: Value| glimmer("llama.logit_scale", f32(0.5)).pair(PATTERN, pattern);
    named(scaled(u32(4)), "`muse-glimmer.attention.sliding_window_pattern`");
    named(scaled(array(&[u32(1), u32(0)])), "`muse-glimmer.attention.sliding_window` must be an integer");
    let factors = llama("x", u32(0)).tensor("rope_freqs.weight", &[16], 0, vec![0; 64]);
    named(factors, "tensor `rope_freqs.weight`");
    std::fs::write(&path, llama("llama.feed_forward_length", widths(2)).bytes()).unwrap();
    assert_eq!(Config::load(&path).unwrap().decoder.blocks.len(), 2);
}
