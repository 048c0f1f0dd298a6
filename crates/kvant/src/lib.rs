//! The KV cache and attention of LLM inference.

mod backend;
mod cache;
pub mod codec;
mod cpu;
mod cuda;
pub mod device;
mod dtype;
mod encoder;
mod error;
mod host;
mod layer;
mod metal;
pub mod ops;
pub mod reference;
mod step;
mod tensor;

pub use cache::{CacheLayer, CacheSpec, KvCache, LOAD_LIMIT, LayerBytes};
pub use codec::Codec;
pub use device::{CpuOptions, Device, DeviceEntry, DeviceKind, SimdLevel};
pub use dtype::{DType, Element, Float};
pub use encoder::{Access, Encoder, Graph, Submission};
pub use error::{Error, Result};
pub use layer::{KvLayer, LayerSpec, Planes, SlotOrder};
pub use step::Step;
pub use tensor::{MAX_RANK, Tensor};

pub use half::{bf16, f16};
