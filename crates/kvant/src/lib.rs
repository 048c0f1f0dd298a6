//! The KV cache and attention of transformer inference, on CPU, Metal and CUDA.
//!
//! kvant stores new keys and values in a cache, attends over the cache, and prepares queries and keys (per-head RMS
//! norm and RoPE) in fused kernels. It also has the other operations of a decoder layer. Caches are
//! in f32, f16, bf16 or TurboQuant at 2, 3, 4, 5, 6 or 8 bits, in pages that many sequences share.
//!
//! Each operation has one contract and one validation, in [`ops`]. [`mod@reference`] defines the exact results in plain
//! f64 loops, and every device is tested against it.
//!
//! # Quick start
//!
//! A prompt and then one token of one layer: make a step, write keys and values, attend.
//!
//! ```
//! use kvant::{CacheLayer, Codec, DType, Device, KvPool, PoolSpec, Tensor, ops};
//!
//! let device = Device::default();
//! let layer = CacheLayer::new(2, 64, Codec::F16).v(Codec::tq(8));
//! let pool = KvPool::new(&device, &PoolSpec::new(vec![layer], 16 << 20))?; // 16 MiB for all sequences
//! let mut sequence = pool.sequence();
//!
//! for tokens in [5, 1] {
//!     // What a model computes for the new tokens: 8 query heads share 2 KV heads.
//!     let q = Tensor::from_slice(&device, &vec![0.5f32; tokens * 8 * 64], &[tokens, 8, 64])?;
//!     let kv = Tensor::from_slice(&device, &vec![0.5f32; tokens * 2 * 64], &[tokens, 2, 64])?;
//!     let out = Tensor::zeros(&device, DType::F32, &[tokens, 8, 64])?;
//!
//!     let step = pool.step(&mut [(&mut sequence, tokens)])?;
//!     let mut enc = device.encoder()?;
//!     ops::kv_write(&mut enc, &ops::KvWrite::new(&kv, &kv, &step, pool.layer(0)?))?;
//!     ops::attend(&mut enc, &ops::Attend::new(&q, pool.layer(0)?, &step, &out))?;
//!     enc.commit()?.wait()?;
//!     assert!((out.to_f32()?[0] - 0.5).abs() < 0.1); // all values are alike
//! }
//! assert_eq!(sequence.len(), 6);
//! # Ok::<(), kvant::Error>(())
//! ```
//!
//! `examples/` has more:
//!
//! | example | shows |
//! |---|---|
//! | `01-attend` | layers with memory of their own |
//! | `02-pool` | windows, drafts, forks, shared prefixes |
//! | `03-turboquant` | the error and size of each codec |
//! | `04-graph` | recording a step once and replaying it for every token |
//!
//! # Concepts
//!
//! | concept | here |
//! |---|---|
//! | the place where tensors live and operations run | [`Device`]; [`Device::list`] reports which devices are available, and why others are not |
//! | an array | [`Tensor`]: row-major; clones and [`rows`](Tensor::rows) share its memory |
//! | a forward pass | [`Encoder`]: records operations and runs them at [`commit`](Encoder::commit); each sees the writes of the previous ones |
//! | the same pass for the next token | [`Encoder::capture`] makes a [`Graph`]; each replay reads positions and lengths from device buffers |
//! | keys and values of a model, for many sequences | [`KvPool`]: pages under one budget; [`Sequence`]: append, truncate, fork, export |
//! | prompts that begin alike | [`PrefixCache`] |
//! | prefixes outside of memory, or of another pool | [`PageStore`], [`PrefixCache::export_pages`] |
//! | keys and values of one layer | [`KvLayer`]: memory only, for engines with their own cache manager |
//! | the storage format of a vector | [`Codec`]: dense, or TurboQuant at 2, 3, 4, 5, 6 or 8 bits, also around the mean of a page |
//! | the positions of a pass's tokens | [`Step`]: position and sequence of each token, length of each sequence |
//! | an operation | a function in [`ops`] and its descriptor struct with named fields |
//! | the residual stream | [`RmsNorm::residual`](ops::RmsNorm::residual) adds it before or after the norm |
//! | threads | devices, tensors, caches and steps can be shared among threads; only one thread at a time can use an encoder or a graph |
//! | several devices as one | [`Device::group`]: each rank has its own memory; [`ops::all_reduce`](ops::all_reduce()) adds over ranks |
//! | the definition of correct | [`mod@reference`], also available as a device: [`Device::reference`] |
//! | errors | [`Error`]: names the operation, the argument, the expected and the actual value |
//!
//! # Operations
//!
//! | operation | reference | CPU | Metal | CUDA |
//! |---|---|---|---|---|
//! | [`kv_write`](ops::kv_write()), [`kv_read`](ops::kv_read()): every dtype and codec; pages, linear, ring | yes | yes | yes | yes |
//! | [`attend`](ops::attend()): decode, verification, prefill; eight head sizes from 64 to 512 | yes | yes | yes | yes |
//! | [`norm_rope`](ops::norm_rope()), [`norm_rope_write`](ops::norm_rope_write()) | yes | yes | yes | yes |
//! | [`hadamard`](ops::hadamard()) | yes | yes | yes | yes |
//! | [`linear`](ops::linear()): dense, MLX affine 2 to 6 and 8 bit, GGUF blocks, MXFP4, MXFP8, NVFP4, experts; [`embed`](ops::embed()) | yes | yes | yes | yes |
//! | [`rms_norm`](ops::rms_norm()), [`gate`](ops::gate()), [`add`](ops::add()), [`add_bias`](ops::add_bias()), [`softcap`](ops::softcap()), [`spread`](ops::spread()) | yes | yes | yes | yes |
//! | [`causal_conv`](ops::causal_conv()), [`delta_rule`](ops::delta_rule()): states of sequences, in pools | yes | yes | yes | yes |
//! | [`moe_route`](ops::moe_route()), [`moe_combine`](ops::moe_combine()) | yes | yes | yes | yes |
//! | [`argmax`](ops::argmax()), [`sample`](ops::sample()) | yes | yes | yes | yes |
//! | [`all_reduce`](ops::all_reduce()), [`all_gather`](ops::all_gather()): groups of devices | yes | yes | one rank | yes |
//! | [`merge_attention`](ops::merge_attention()): groups of devices | yes | yes | no | yes |
//!
//! The Metal kernels are untested on Apple hardware; a test tool runs them on Linux. `docs/verification.md` lists the
//! tests of each backend, and the gaps.
//!
//! # Features
//!
//! `cuda` (default): the CUDA backend. It has no build-time dependencies. At run time it requires a GPU of compute
//! capability 8.0 or newer, a driver for CUDA 12.0 or newer, and NVRTC. Attention is fastest if q, cache and out have
//! the same 16-bit dtype, or if the cache is quantised and out has 16 bits.
//!
//! The other backends have no feature: the CPU backend is always built, the Metal backend on macOS.

#[macro_use]
mod descriptor;

mod backend;
pub mod codec;
mod cpu;
mod cuda;
pub mod device;
mod devices;
mod dtype;
mod encoder;
mod error;
#[doc(hidden)]
pub mod gpu;
mod group;
mod host;
mod host_memory;
mod key_bias;
mod kv;
mod layer;
mod metal;
pub mod ops;
mod position_share;
mod readback;
pub mod reference;
mod step;
mod tensor;

pub use codec::Codec;
pub use cpu::{CpuOptions, SimdLevel};
pub use device::{Device, DeviceKind, KernelReport, MemoryInfo};
pub use devices::DeviceEntry;
pub use dtype::{DType, Element, Float};
pub use encoder::{Encoder, Graph, Submission};
pub use error::{Error, Result};
pub use key_bias::{KeyBias, KeyTurns};
pub use kv::{
    CacheLayer, Fetched, KvPool, PageKey, PageStore, PoolSpec, PoolUsage, Prefetched, PrefixCache, PrefixChange,
    PrefixPage, PrefixPlace, Sequence, StateLayer, StepSize,
};
pub use layer::{HeadOrder, KvLayer, LayerSpec, Planes};
pub use readback::Readback;
pub use step::{Batch, Step};
pub use tensor::{MAX_RANK, Tensor};

pub use half::{bf16, f16};

/// The example in the crate's README runs as a doctest. `kvant-msl`, which is not published, tests the repository's
/// README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
