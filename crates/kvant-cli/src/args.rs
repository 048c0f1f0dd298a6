//! Arguments shared by several subcommands.

use std::str::FromStr;

use clap::builder::RangedU64ValueParser;
use kvant::{Codec, CpuOptions, DType, Device, device::DeviceKind};
pub use kvant_eval::Kv;
use kvant_models::{CacheDivision, Files, LoadOptions, Model};

use crate::result::Result;

/// `--device` and related options.
#[derive(Clone, clap::Args)]
pub struct DeviceArgs {
    /// Where to run: auto (Metal, then CUDA, then the CPU), cpu, cuda, cuda:N (the GPU with this number), metal, or
    /// reference (plain f64 loops: slow; the definition of correct)
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: DeviceChoice,
    /// Threads of the CPU device [default: one per physical core]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Faster prompts on the CPU device: matrix products with 16 tokens or more round activations to 8 bits, on
    /// processors with VNNI; with AMX, activations and weights to 8 significant bits. Decoding of fewer than 16
    /// sequences is not affected
    #[arg(long)]
    eight_bit_activations: bool,
    /// On the CPU device, equal seeds and prompts give equal texts: logits depend on the text alone, not on prefixes
    /// found in the cache, chunks of prompts, concurrent requests or the number of threads. Prompts are slower
    #[arg(long, conflicts_with = "eight_bit_activations")]
    batch_invariant: bool,
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
    /// Whether `--eight-bit-activations` was given.
    pub fn eight_bit_activations(&self) -> bool {
        self.eight_bit_activations
    }

    /// The requested device, or the reason why it is not available.
    pub fn open(&self) -> Result<Device> {
        let device = self.device.open()?;
        let Some(name) = self.cpu_option() else { return Ok(device) };
        if device.kind() != DeviceKind::Cpu {
            return Err(format!("{name} is for the CPU device, got --device {}", device.kind()).into());
        }
        Ok(Device::cpu_with(CpuOptions { threads: self.threads, ..self.cpu_options() })?)
    }

    /// An option for the CPU that was given.
    fn cpu_option(&self) -> Option<&'static str> {
        let options = [
            ("--threads", self.threads.is_some()),
            ("--eight-bit-activations", self.eight_bit_activations),
            ("--batch-invariant", self.batch_invariant),
        ];
        options.into_iter().find(|(_, is_given)| *is_given).map(|(name, _)| name)
    }

    fn cpu_options(&self) -> CpuOptions {
        let DeviceArgs { eight_bit_activations, batch_invariant, .. } = *self;
        CpuOptions { eight_bit_activations, batch_invariant, ..CpuOptions::default() }
    }
}

impl DeviceChoice {
    fn open(self) -> Result<Device> {
        Ok(match self {
            DeviceChoice::Auto => Device::default(),
            DeviceChoice::Cpu => Device::cpu(),
            DeviceChoice::Cuda(number) => Device::cuda(number).map_err(|error| with_number(error, number))?,
            DeviceChoice::Metal => Device::open(DeviceKind::Metal)?,
            DeviceChoice::Reference => Device::reference(),
        })
    }
}

/// The device of a model: one, or a group.
#[derive(Clone, clap::Args)]
pub struct ModelDeviceArgs {
    #[command(flatten)]
    device: DeviceArgs,
    /// Divide the model among N devices: the first N GPUs, those from the one of --device cuda:N on, or N CPU devices
    /// that share the threads. Each has its part of the weights and of the cache
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..=64))]
    tensor_parallel: Option<usize>,
    /// How the devices divide caches of layers without windows: by heads (copies of heads if there are more devices
    /// than KV heads), by positions (each device has all KV heads of a part of each page; for 2 or 4 devices), or auto:
    /// by positions if the devices do not divide the KV heads
    #[arg(long, value_name = "HOW", value_enum, default_value = "auto")]
    cache_division: Division,
    /// The devices among which the model is divided, as in cuda:0,cuda:2
    #[arg(long, value_name = "DEVICE,…", value_delimiter = ',', conflicts_with = "device")]
    devices: Vec<DeviceChoice>,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Division {
    Auto,
    Heads,
    Positions,
}

impl ModelDeviceArgs {
    /// The options that change the bits of keys and values.
    #[cfg(feature = "serve")]
    pub fn numerics(&self, load: &LoadOptions) -> String {
        let LoadOptions { activations, dense_weights, context, cache_division, .. } = load;
        let cpu = self.device.cpu_options();
        let of_cpu = (cpu.eight_bit_activations, cpu.batch_invariant);
        format!("{activations:?} {dense_weights:?} {context:?} {cache_division:?} {of_cpu:?}")
    }

    /// How a group divides its caches.
    pub fn cache_division(&self) -> CacheDivision {
        match self.cache_division {
            Division::Auto => CacheDivision::Auto,
            Division::Heads => CacheDivision::Heads,
            Division::Positions => CacheDivision::Positions,
        }
    }

    /// The requested device or group, or the reason why it is not available.
    pub fn open(&self) -> Result<Device> {
        let ranks = self.tensor_parallel.unwrap_or(self.devices.len().max(1));
        if !self.devices.is_empty() && ranks != self.devices.len() {
            let devices = self.devices.len();
            return Err(format!("--devices names {devices} devices, and --tensor-parallel is {ranks}").into());
        }
        if ranks == 1 && self.devices.is_empty() {
            return self.device.open();
        }
        let choices = match self.devices.is_empty() {
            true => self.device.device.first(ranks),
            false => self.devices.clone(),
        };
        let cpus = choices.iter().filter(|choice| **choice == DeviceChoice::Cpu).count();
        if let Some(name) = self.device.cpu_option().filter(|_| cpus < ranks) {
            return Err(format!("{name} is for CPU devices").into());
        }
        let mut threads = threads_of_ranks(self.device.threads.unwrap_or_else(CpuOptions::default_threads), cpus);
        let open = |choice: DeviceChoice| match choice {
            DeviceChoice::Cpu => {
                Ok(Device::cpu_with(CpuOptions { threads: threads.next(), ..self.device.cpu_options() })?)
            }
            other => other.open(),
        };
        let devices = choices.into_iter().map(open).collect::<Result<Vec<_>>>()?;
        match &devices[..] {
            [device] => Ok(device.clone()),
            devices => Ok(Device::group(devices)?),
        }
    }
}

impl DeviceChoice {
    /// This device and those that follow it.
    fn first(self, ranks: usize) -> Vec<DeviceChoice> {
        let choice = match self {
            DeviceChoice::Auto => match Device::default().kind() {
                DeviceKind::Cuda => DeviceChoice::Cuda(0),
                DeviceKind::Metal => DeviceChoice::Metal,
                DeviceKind::Cpu | DeviceKind::Reference => DeviceChoice::Cpu,
            },
            named => named,
        };
        let of_rank = |rank: usize| match choice {
            DeviceChoice::Cuda(number) => DeviceChoice::Cuda(number.saturating_add(rank)),
            other => other,
        };
        (0..ranks).map(of_rank).collect()
    }
}

/// Divides threads among CPU devices. Each has at least one.
fn threads_of_ranks(threads: usize, ranks: usize) -> impl Iterator<Item = usize> {
    let ranks = ranks.max(1);
    (0..ranks).map(move |rank| (threads / ranks + usize::from(rank < threads % ranks)).max(1))
}

/// Adds the number of the GPU to the message of a device that cannot be opened. Plain `cuda` selects the first one.
fn with_number(error: kvant::Error, number: usize) -> Box<dyn std::error::Error> {
    match error {
        kvant::Error::NoDevice { kind, reason } if number > 0 => {
            format!("device {kind}:{number} is not available: {reason}").into()
        }
        error => error.into(),
    }
}

/// Sets the activations of the options. Dense matrices are converted to this dtype if it has 16 bits; with f32, which
/// is for exact results, they keep the dtype of the file.
fn with_activations(options: LoadOptions, activations: DType) -> LoadOptions {
    let dense_weights = options.dense_weights.and((activations != DType::F32).then_some(activations));
    LoadOptions { activations, dense_weights, ..options }
}

/// `--activations`.
#[derive(Clone, clap::Args)]
pub struct ActivationArgs {
    /// Dtype of activations [default: bf16 on CUDA, f32 elsewhere]. Caches and weights keep their dtypes, except that
    /// with f16 or bf16 on CUDA dense matrices get that dtype. Sums are always f32. The fastest attention on CUDA
    /// requires f16 or bf16 here, and the same dtype or a tq type in --kv. f16 overflows above 65504; use bf16 for
    /// models whose activations exceed that
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

    /// The options to load a checkpoint.
    pub fn options(&self, device: &Device) -> LoadOptions {
        let options = LoadOptions::for_device(device);
        match self.activations {
            Some(Activations::F32) => with_activations(options, DType::F32),
            Some(Activations::F16) => with_activations(options, DType::F16),
            Some(Activations::Bf16) => with_activations(options, DType::BF16),
            None => options,
        }
    }

    /// The requested cache type, or else the one with the fastest attention.
    pub fn kv(&self, device: &Device, asked: Option<&Kv>) -> Kv {
        asked.cloned().unwrap_or_else(|| match self.dtype(device) {
            DType::BF16 => Codec::BF16.into(),
            _ => Codec::F16.into(),
        })
    }

    /// Loads a checkpoint with these activations for texts of up to `context` tokens.
    pub fn load(&self, files: &Files, device: &Device, context: usize, cache_division: CacheDivision) -> Result<Model> {
        let options = LoadOptions { context: Some(context), cache_division, ..self.options(device) };
        Ok(Model::load_files(files, device, &options)?)
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
    /// Maximum of each number. Larger ones are probably typing errors.
    const MAX: usize = 65536;
}

impl FromStr for Heads {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Heads, String> {
        let number = |part: &str| part.parse().ok().filter(|n| (1..=Heads::MAX).contains(n));
        let numbers: Option<Vec<usize>> = text.split(':').map(number).collect();
        match numbers.as_deref() {
            Some(&[head_dim, heads, kv_heads]) => Ok(Heads { head_dim, heads, kv_heads }),
            _ => Err(format!("expected head_dim:heads:kv_heads, each 1 to {}, as in 256:16:8", Heads::MAX)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dense_matrices_follow_16_bit_activations() {
        let cuda = LoadOptions { dense_weights: Some(DType::BF16), ..LoadOptions::default() };
        for (options, activations, want) in [
            (cuda, DType::BF16, Some(DType::BF16)),
            (cuda, DType::F16, Some(DType::F16)),
            (cuda, DType::F32, None),
            (LoadOptions::default(), DType::BF16, None),
        ] {
            let got = with_activations(options, activations);
            assert_eq!((got.activations, got.dense_weights), (activations, want));
        }
    }

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
    fn groups_have_the_devices_that_follow() {
        assert_eq!(DeviceChoice::Cuda(2).first(3), [2, 3, 4].map(DeviceChoice::Cuda));
        assert_eq!(DeviceChoice::Cpu.first(2), [DeviceChoice::Cpu; 2]);
        assert_eq!(threads_of_ranks(7, 3).collect::<Vec<_>>(), [3, 2, 2]);
        assert_eq!(threads_of_ranks(1, 2).collect::<Vec<_>>(), [1, 1]);
    }

    #[test]
    fn heads_are_three_positive_numbers() {
        assert_eq!("256:16:8".parse(), Ok(Heads { head_dim: 256, heads: 16, kv_heads: 8 }));
        for bad in ["", "256", "256:16", "256:16:8:1", "256:0:8", "256:-1:8", "a:b:c", "256:16:8:x", "256:16:65537"] {
            assert!(bad.parse::<Heads>().is_err(), "{bad:?}");
        }
    }
}
