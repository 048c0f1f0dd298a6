//! Cache types of kvant by their names, and files of codecs per layer, which `--budget` writes.

use std::{fmt, io::Read, str::FromStr};

use kvant_models::{CacheCodecs, KvCodec};
use serde::Deserialize;

/// A cache type: a codec, `K:V` as in `f16:tq4`, or `@FILE` with codecs per layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Kv {
    /// The type as given.
    pub name: String,
    /// The codecs of that name.
    pub codecs: CacheCodecs,
}

/// The contents of a file for `--kv @FILE`, as `kvant eval --budget` writes it.
#[derive(Deserialize)]
struct LayerFile {
    /// A codec or a pair for each layer that has its own keys and values.
    layers: Vec<String>,
}

/// Maximum bytes of a file for `--kv @FILE`.
const MAX_BYTES: u64 = 1 << 20;

impl<T: Into<KvCodec>> From<T> for Kv {
    fn from(kv: T) -> Kv {
        let kv = kv.into();
        Kv { name: kv.to_string(), codecs: kv.into() }
    }
}

impl FromStr for Kv {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Kv, String> {
        let Some(path) = name.strip_prefix('@') else {
            return name.parse::<KvCodec>().map(Kv::from).map_err(|error| error.to_string());
        };
        let error = |error: &dyn fmt::Display| format!("{path}: {error}");
        let mut text = String::new();
        let file = std::fs::File::open(path).map_err(|e| error(&e))?;
        file.take(MAX_BYTES).read_to_string(&mut text).map_err(|e| error(&e))?;
        let file: LayerFile = serde_json::from_str(&text).map_err(|e| error(&e))?;
        let codecs = file.layers.iter().map(|name| name.parse()).collect::<kvant::Result<Vec<KvCodec>>>();
        let codecs = CacheCodecs::PerLayer(codecs.map_err(|e| error(&e))?.into());
        Ok(Kv { name: name.to_string(), codecs })
    }
}

impl fmt::Display for Kv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name)
    }
}

#[cfg(test)]
mod tests {
    use kvant::Codec;

    use super::*;

    #[test]
    fn kv_is_a_name_or_a_file() {
        let kv: Kv = "f16:tq4c".parse().unwrap();
        assert_eq!(kv.codecs, KvCodec { k: Codec::F16, v: Codec::tq_centred(4) }.into());
        assert_eq!(kv.to_string(), "f16:tq4c");
        let path = std::env::temp_dir().join(format!("kvant-kv-{}.json", std::process::id()));
        let name = format!("@{}", path.display());
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            name.parse::<Kv>()
        };
        let kv = read(r#"{"layers": ["tq4", "tq3c:f16"], "bits": 3.5}"#).unwrap();
        let second = KvCodec { k: Codec::tq_centred(3), v: Codec::F16 };
        assert_eq!(kv.codecs, CacheCodecs::PerLayer([Codec::tq(4).into(), second].into()));
        assert_eq!(kv.to_string(), name);
        for bad in ["", "[]", "{}", r#"{"layers": 3}"#, r#"{"layers": ["tq4", 5]}"#, r#"{"layers": ["tq7"]}"#, "\u{0}"]
        {
            assert!(read(bad).unwrap_err().contains(path.to_str().unwrap()), "{bad:?}");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(name.parse::<Kv>().unwrap_err().contains("No such file"));
        assert!("tq7".parse::<Kv>().is_err() && "@".parse::<Kv>().is_err());
    }
}
