//! Arguments that several subcommands share.

use std::{fmt, str::FromStr};

use kvant::{Codec, CpuOptions, DType, Device, device::DeviceKind};
use kvant_models::{Files, LoadOptions, Model};

use crate::Result;

/// `--device` and `--threads`.
#[derive(clap::Args)]
pub struct DeviceArgs {
    /// Where to run: auto (Metal, then CUDA, then the CPU), cpu, cuda, cuda:N (the GPU with this number), metal, or
    /// reference (plain f64 loops: slow; the definition of correct)
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: DeviceChoice,
    /// Threads of the CPU device [default: one per core]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum DeviceChoice {
    Auto,
    Cpu,
    Cuda(usize),
    Metal,
    Reference,
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<DeviceChoice, String> {
        let number = name.strip_prefix("cuda:").and_then(|number| number.parse().ok());
        match (name, number) {
            ("auto", _) => Ok(DeviceChoice::Auto),
            ("cpu", _) => Ok(DeviceChoice::Cpu),
            ("cuda", _) => Ok(DeviceChoice::Cuda(0)),
            ("metal", _) => Ok(DeviceChoice::Metal),
            ("reference", _) => Ok(DeviceChoice::Reference),
            (_, Some(number)) => Ok(DeviceChoice::Cuda(number)),
            _ => Err("expected auto, cpu, cuda, cuda:N, metal or reference".to_string()),
        }
    }
}

impl DeviceArgs {
    /// The requested device, or the reason why it is not available.
    pub fn open(&self) -> Result<Device> {
        let device = match self.device {
            DeviceChoice::Auto => Device::default(),
            DeviceChoice::Cpu => Device::cpu(),
            DeviceChoice::Cuda(number) => Device::cuda(number)?,
            DeviceChoice::Metal => Device::open(DeviceKind::Metal)?,
            DeviceChoice::Reference => Device::reference(),
        };
        match (device.kind(), self.threads) {
            (_, None) => Ok(device),
            (DeviceKind::Cpu, threads) => Ok(Device::cpu_with(CpuOptions { threads, simd: None })?),
            (kind, Some(_)) => Err(format!("--threads is for the CPU device, got --device {kind}").into()),
        }
    }
}

/// `--activations`.
#[derive(clap::Args)]
pub struct ActivationArgs {
    /// Dtype of activations [default: bf16 on CUDA, f32 elsewhere]. Caches and weights keep their dtypes; sums are
    /// always f32. The fastest attention on CUDA requires f16 or bf16 here, and the same dtype or a tq type in --kv.
    /// f16 overflows above 65504; use bf16 for models whose activations exceed that
    #[arg(long, value_name = "TYPE", value_enum)]
    activations: Option<Activations>,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Activations {
    F32,
    F16,
    Bf16,
}

impl ActivationArgs {
    /// The dtype on a device.
    pub fn dtype(&self, device: &Device) -> DType {
        self.options(device).activations
    }

    /// How a checkpoint is loaded.
    pub fn options(&self, device: &Device) -> LoadOptions {
        let options = LoadOptions::for_device(device);
        let activations = match self.activations {
            Some(Activations::F32) => DType::F32,
            Some(Activations::F16) => DType::F16,
            Some(Activations::Bf16) => DType::BF16,
            None => options.activations,
        };
        LoadOptions { activations, ..options }
    }

    /// The cache type: the one that was asked for, or the one that attention is fastest with.
    pub fn kv(&self, device: &Device, asked: Option<Kv>) -> Kv {
        asked.unwrap_or_else(|| match self.dtype(device) {
            DType::BF16 => Kv { k: Codec::BF16, v: Codec::BF16 },
            _ => Kv::F16,
        })
    }

    /// Loads a checkpoint to run with these activations.
    pub fn load(&self, files: &Files, device: &Device) -> Result<Model> {
        Ok(Model::load_files(files, device, &self.options(device))?)
    }
}

/// The codecs of keys and values: `f16`, or `K:V` as in `f16:tq4`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kv {
    pub k: Codec,
    pub v: Codec,
}

impl Kv {
    pub const F32: Kv = Kv { k: Codec::F32, v: Codec::F32 };
    pub const F16: Kv = Kv { k: Codec::F16, v: Codec::F16 };
}

impl FromStr for Kv {
    type Err = kvant::Error;

    fn from_str(name: &str) -> kvant::Result<Kv> {
        let (k, v) = name.split_once(':').unwrap_or((name, name));
        if v.contains(':') {
            let (expected, got) = ("one codec, or two as in f16:tq4".to_string(), format!("{name:?}"));
            return Err(kvant::Error::Value { op: "codec", arg: "kv", expected, got });
        }
        Ok(Kv { k: k.parse()?, v: v.parse()? })
    }
}

impl fmt::Display for Kv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.k == self.v { self.k.fmt(f) } else { write!(f, "{}:{}", self.k, self.v) }
    }
}

/// The heads of an attention layer: `D:H:Hk`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    pub head_dim: usize,
    pub heads: usize,
    pub kv_heads: usize,
}

impl Heads {
    /// Larger numbers are typing errors.
    const MOST: usize = 65536;
}

impl FromStr for Heads {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Heads, String> {
        let number = |part: &str| part.parse().ok().filter(|n| (1..=Heads::MOST).contains(n));
        let numbers: Option<Vec<usize>> = text.split(':').map(number).collect();
        match numbers.as_deref() {
            Some(&[head_dim, heads, kv_heads]) => Ok(Heads { head_dim, heads, kv_heads }),
            _ => Err(format!("expected head_dim:heads:kv_heads, each 1 to {}, as in 256:16:8", Heads::MOST)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_have_numbers() {
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        assert_eq!("cuda:1".parse(), Ok(DeviceChoice::Cuda(1)));
        assert_eq!("auto".parse(), Ok(DeviceChoice::Auto));
        for bad in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "CUDA"] {
            assert!(bad.parse::<DeviceChoice>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn kv_is_one_codec_or_two() {
        assert_eq!("f16".parse::<Kv>().unwrap(), Kv::F16);
        let mixed: Kv = "bf16:tq6".parse().unwrap();
        assert_eq!((mixed.k, mixed.v), (Codec::BF16, Codec::tq(6)));
        assert_eq!(mixed.to_string(), "bf16:tq6");
        assert_eq!("tq3:tq2".parse::<Kv>().unwrap().to_string(), "tq3:tq2");
        assert_eq!("tq4:tq4".parse::<Kv>().unwrap().to_string(), "tq4");
        assert_eq!("f16:tq4c".parse::<Kv>().unwrap(), Kv { k: Codec::F16, v: Codec::tq_centred(4) });
        for bad in ["", "f8", "tq7", ":", "f16:", ":f16", "f16:f16:f16", "F16"] {
            assert!(bad.parse::<Kv>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn heads_are_three_positive_numbers() {
        assert_eq!("256:16:8".parse(), Ok(Heads { head_dim: 256, heads: 16, kv_heads: 8 }));
        for bad in ["", "256", "256:16", "256:16:8:1", "256:0:8", "256:-1:8", "a:b:c", "256:16:8:x", "256:16:65537"] {
            assert!(bad.parse::<Heads>().is_err(), "{bad:?}");
        }
    }
}
