//! Metadata, tensors on devices, and models in several files.

use std::path::{Path, PathBuf};

use kvant::Device;
use kvant_models::gguf::{Gguf, MetadataValue, Scalar};

use crate::common::gguf::{Value, Writer, array, f32, flag, text, texts, u16, u32};

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn write(dir: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn metadata_of_every_type() {
    let nested = array(&[array(&[u32(1), u32(2)]), texts(["a"])]);
    let writer = Writer::default()
        .pair("u8", Value(0, vec![200]))
        .pair("i8", Value(1, vec![200]))
        .pair("u16", u16(40_000))
        .pair("i16", Value(3, (-2i16).to_le_bytes().to_vec()))
        .pair("u32", u32(u32::MAX))
        .pair("i32", Value(5, i32::MIN.to_le_bytes().to_vec()))
        .pair("f32", f32(1.5))
        .pair("true", flag(true))
        .pair("text", text("Grüße"))
        .pair("u64", Value(10, u64::MAX.to_le_bytes().to_vec()))
        .pair("i64", Value(11, i64::MIN.to_le_bytes().to_vec()))
        .pair("f64", Value(12, f64::INFINITY.to_le_bytes().to_vec()))
        .pair("flags", array(&[flag(true), flag(false)]))
        .pair("numbers", array(&[u16(3), u16(4)]))
        .pair("texts", texts(["", "b", "é"]))
        .pair("nested", nested)
        .pair("empty", Value(9, [&8u32.to_le_bytes()[..], &0u64.to_le_bytes()].concat()));
    let dir = tempfile::tempdir().unwrap();
    let gguf = Gguf::open(&write(dir.path(), "a.gguf", &writer.bytes())).unwrap();
    let m = gguf.metadata();
    assert_eq!(m.iter().len(), 17);
    assert_eq!(m.get("i8"), Some(&MetadataValue::Scalar(Scalar::Integer(-56))));
    assert_eq!(m.get("i32"), Some(&MetadataValue::Scalar(Scalar::Integer(i32::MIN.into()))));
    assert_eq!(m.get("i64"), Some(&MetadataValue::Scalar(Scalar::Integer(i64::MIN.into()))));
    assert_eq!(m.get("nested"), Some(&MetadataValue::Nested { count: 2 }));
    let wholes = ["u8", "u16", "u32", "u64"].map(|key| m.whole(key).unwrap().unwrap());
    assert_eq!(wholes, [200, 40_000, u64::from(u32::MAX), u64::MAX]);
    assert_eq!((m.number("f32").unwrap(), m.number("i16").unwrap()), (Some(1.5), Some(-2.0)));
    assert_eq!((m.flag("true").unwrap(), m.text("text").unwrap()), (Some(true), Some("Grüße")));
    assert_eq!(m.texts("texts").unwrap().unwrap().iter().collect::<Vec<_>>(), ["", "b", "é"]);
    assert!(m.texts("empty").unwrap().unwrap().is_empty());
    let flags: Vec<_> = m.scalars("flags").unwrap().unwrap().iter().collect();
    assert_eq!(flags, [Scalar::Bool(true), Scalar::Bool(false)]);
    assert_eq!(m.scalars("numbers").unwrap().unwrap().len(), 2);
    assert!(m.text("absent").unwrap().is_none() && m.get("absent").is_none());
    for (error, expected) in [
        (m.text("u8").unwrap_err(), "metadata: `u8` must be a string, got 200"),
        (m.whole("i16").unwrap_err(), "metadata: `i16` must be an integer, at least 0, got -2"),
        (m.number("f64").unwrap_err(), "metadata: `f64` must be a finite number, got inf"),
        (m.flag("text").unwrap_err(), "metadata: `text` must be true or false, got \"Grüße\""),
        (m.texts("numbers").unwrap_err(), "metadata: `numbers` must be an array of strings, got an array of 2 × U16"),
        (m.scalars("texts").unwrap_err(), "metadata: `texts` must be an array of numbers, got an array of 3 texts"),
    ] {
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn shapes_are_reversed_and_version_2_is_read() {
    let writer = Writer::default()
        .tensor("a", &[3, 2], 0, floats(&[1., 2., 3., 4., 5., 6.]))
        .tensor("scalar", &[], 0, floats(&[9.]))
        .tensor("none", &[0, 5], 0, Vec::new());
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = writer.bytes();
    for version in [3, 2] {
        bytes[4] = version;
        let gguf = Gguf::open(&write(dir.path(), "a.gguf", &bytes)).unwrap();
        assert_eq!(gguf.headers().next().unwrap().version, u32::from(version));
        let a = gguf.read("a", &Device::cpu()).unwrap();
        assert_eq!((a.shape(), a.to_f32().unwrap()), (&[2, 3][..], vec![1., 2., 3., 4., 5., 6.]));
        assert_eq!(gguf.tensor("scalar").unwrap().shape, [0usize; 0]);
        assert_eq!(gguf.tensor("none").unwrap().shape, [5, 0]);
    }
}

/// A model of three files: whichever is opened, the metadata are the first file's.
#[test]
fn split_models_are_opened_as_a_whole() {
    let part = |number: u16, count: u16, total: u32, tensor: &str| {
        let writer = Writer::default()
            .pair("split.no", u16(number))
            .pair("split.count", u16(count))
            .pair("split.tensors.count", Value(5, total.to_le_bytes().to_vec()));
        let writer = if number == 0 { writer.pair("general.architecture", text("llama")) } else { writer };
        writer.tensor(tensor, &[2], 0, floats(&[f32::from(number), 1.])).bytes()
    };
    let dir = tempfile::tempdir().unwrap();
    let names = [1, 2, 3].map(|i| format!("m-0000{i}-of-00003.gguf"));
    for (i, name) in names.iter().enumerate() {
        write(dir.path(), name, &part(i as u16, 3, 3, &format!("t{i}")));
    }
    for name in &names {
        let gguf = Gguf::open(&dir.path().join(name)).unwrap();
        assert_eq!(gguf.metadata().text("general.architecture").unwrap(), Some("llama"));
        for i in 0..3u8 {
            let tensor = gguf.read(&format!("t{i}"), &Device::cpu()).unwrap();
            assert_eq!(tensor.to_f32().unwrap(), [f32::from(i), 1.]);
        }
        assert_eq!((gguf.headers().len(), gguf.tensors().count()), (3, 3));
    }
    let bad: [(&str, Vec<u8>, &str); 6] = [
        (&names[1], part(2, 3, 3, "t1"), "its name must end with -00003-of-00003.gguf"),
        (&names[1], part(1, 4, 3, "t1"), "its name must end with -00002-of-00004.gguf"),
        (&names[1], Writer::default().bytes(), "split.no and split.count must be 1 and 3"),
        (&names[1], part(1, 3, 3, "t0"), "tensor `t0` is also in another file"),
        (&names[0], part(0, 3, 4, "t0"), "`split.tensors.count` is 4, the files have 3"),
        (&names[0], part(7, 3, 3, "t0"), "`split.no` is 7 of `split.count` 3"),
    ];
    for (name, bytes, reason) in bad {
        let path = dir.path().join(name);
        let good = std::fs::read(&path).unwrap();
        std::fs::write(&path, bytes).unwrap();
        let error = Gguf::open(&dir.path().join(&names[0])).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
        std::fs::write(&path, good).unwrap();
    }
    std::fs::remove_file(dir.path().join(&names[2])).unwrap();
    let error = Gguf::open(&dir.path().join(&names[0])).unwrap_err().to_string();
    assert!(error.contains(&names[2]), "{error}");
}
