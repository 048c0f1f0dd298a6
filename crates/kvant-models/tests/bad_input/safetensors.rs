//! safetensors files and their indices.

use kvant::Device;
use kvant_models::{
    Error,
    safetensors::{Checkpoint, Header, SafetensorsFile, parse_index},
};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::{
    assert_modest, checkpoint,
    common::{golden, model_dir, with_header},
    config_bytes, load,
};

/// Opens bytes as a safetensors file.
fn open(bytes: &[u8]) -> Result<SafetensorsFile, Error> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.safetensors");
    std::fs::write(&path, bytes).unwrap();
    let result = SafetensorsFile::open(&path);
    assert_modest();
    result
}

fn reason(error: Error) -> String {
    match error {
        Error::File { path, reason } => {
            assert!(!path.is_empty());
            reason
        }
        other => panic!("not a file error: {other}"),
    }
}

#[test]
fn headers_that_lie_are_refused() {
    let entry = r#""a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
    let data = [0u8; 8];
    assert!(open(&with_header(format!("{{{entry}}}").as_bytes(), &data)).is_ok());
    let cases: &[(&str, &[u8], &str)] = &[
        ("", &data, "header"),
        ("[]", &data, "object"),
        ("{\"a\":3}", &data, "header"),
        ("\u{1}\u{2}", &data, "header"),
        (r#"{"a":{"dtype":"F32","shape":[2]}}"#, &data, "data_offsets"),
        (r#"{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}"#, &data, "header"),
        (r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}"#, &data, "outside of"),
        (r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}"#, &data, "outside of"),
        (r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,18446744073709551615]}}"#, &data, "outside of"),
        (r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#, &data, "do not match 8 bytes"),
        (r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,8]}}"#, &data, "overflows"),
        (r#"{"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,8]}}"#, &data, "do not match 8 bytes"),
        (r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#, &data, "take 4 bytes"),
        (r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#, &data, "gap"),
        (
            r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#,
            &data,
            "overlap",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#,
            &data,
            "twice",
        ),
    ];
    for (header, data, expected) in cases {
        let got = reason(open(&with_header(header.as_bytes(), data)).unwrap_err());
        assert!(got.contains(expected), "{header}: {got}");
    }
}

#[test]
fn header_lengths_that_lie_are_refused() {
    for claimed in [9u64, 100_000_001, 1 << 40, u64::MAX, u64::MAX - 7] {
        let mut bytes = with_header(b"{}      ", &[]);
        bytes[..8].copy_from_slice(&claimed.to_le_bytes());
        assert!(reason(open(&bytes).unwrap_err()).contains("claims"), "{claimed}");
    }
    // Only a file of this size may claim a header of a hundred million bytes.
    let mut bytes = with_header(b"{}", &[]);
    bytes[..8].copy_from_slice(&99_999_999u64.to_le_bytes());
    assert!(reason(open(&bytes).unwrap_err()).contains("claims"));
}

#[test]
fn truncated_and_oversized_files_are_refused() {
    let bytes = std::fs::read(golden("moe_mlx").join("model.safetensors")).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let lengths = (0..20).chain((header - 3)..(header + 3)).chain([bytes.len() / 2, bytes.len() - 1]);
    for length in lengths {
        reason(open(&bytes[..length]).unwrap_err());
        let dir = model_dir(&config_bytes("moe_mlx"), &bytes[..length]);
        reason(load(dir.path()).unwrap_err());
    }
    assert!(reason(open(&[&bytes[..], &[0]].concat()).unwrap_err()).contains("the file has"));
}

#[test]
fn indices_lead_nowhere_else() {
    let bad = [
        "../model.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..safetensors",
        ".safetensors",
        "x",
        "",
        "a\\b.safetensors",
    ];
    for shard in bad {
        let index = json!({"weight_map": {"model.norm.weight": shard}}).to_string();
        assert!(parse_index(index.as_bytes()).unwrap_err().contains("plain name"), "{shard}");
    }
    for index in ["", "{}", "[]", "{\"weight_map\": 3}", "{\"weight_map\": {\"a\": 3}}"] {
        assert!(parse_index(index.as_bytes()).is_err(), "{index}");
    }
    let many: serde_json::Map<String, Value> =
        (0..5000).map(|i| (format!("t{i}"), format!("s{i}.safetensors").into())).collect();
    assert!(parse_index(json!({"weight_map": many}).to_string().as_bytes()).unwrap_err().contains("more than"));

    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    assert!(reason(Checkpoint::open(dir.path()).unwrap_err()).contains("neither"));
    write("model.safetensors.index.json", r#"{"weight_map": {"a": "model-1.safetensors"}}"#);
    assert!(
        matches!(Checkpoint::open(dir.path()), Err(Error::File { path, .. }) if path.ends_with("model-1.safetensors"))
    );
    std::fs::write(dir.path().join("model-1.safetensors"), with_header(b"{}", &[])).unwrap();
    assert!(reason(Checkpoint::open(dir.path()).unwrap_err()).contains("`a` is not in model-1"));
}

/// A listed file with missing contents is not treated as absent.
#[cfg(unix)]
#[test]
fn links_that_lead_nowhere_are_errors() {
    let parts = checkpoint("moe");
    for name in ["generation_config.json", "model.safetensors"] {
        let dir = model_dir(&config_bytes("moe"), &parts.bytes());
        let path = dir.path().join(name);
        let _ = std::fs::remove_file(&path);
        std::os::unix::fs::symlink("/nowhere/at/all", &path).unwrap();
        let error = load(dir.path()).err().unwrap_or_else(|| panic!("{name}: it was passed over")).to_string();
        assert!(error.contains(name), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// Changed bytes in a header give an error or a consistent header, never a panic.
    #[test]
    fn mutated_headers_never_panic(edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)) {
        let original = std::fs::read(golden("moe_mlx").join("model.safetensors")).unwrap();
        let header = 8 + u64::from_le_bytes(original[..8].try_into().unwrap()) as usize;
        let mut bytes = original;
        for (at, byte) in edits {
            bytes[at.index(header)] = byte;
        }
        if let Ok(file) = open(&bytes) {
            for (name, info) in file.header().tensors() {
                prop_assert!(info.start <= info.end && info.end <= bytes.len() as u64);
                let _ = file.read(name, &Device::cpu());
            }
        }
        let dir = model_dir(&config_bytes("moe_mlx"), &bytes);
        let _ = load(dir.path());
    }

    /// Arbitrary bytes as a header.
    #[test]
    fn arbitrary_headers_never_panic(json in prop::collection::vec(any::<u8>(), 0..200), data in any::<u64>()) {
        let _ = Header::parse(&json, data);
        let _ = parse_index(&json);
        assert_modest();
    }
}
