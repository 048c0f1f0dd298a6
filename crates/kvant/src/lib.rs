//! The KV cache and attention of transformer inference, on CPU, Metal and CUDA.
//!
//! kvant stores new keys and values in a cache, attends over the cache, and prepares queries and keys (per-head RMS norm
//! and RoPE) in fused kernels. It also has the other operations of a decoder layer. A cache is linear or a sliding-window
//! ring, in f32, f16, bf16 or TurboQuant at 4, 5, 6 or 8 bits.
//!
//! Each operation has one contract and one validation, in [`ops`]. [`mod@reference`] defines the exact results in plain
//! f64 loops, and every device is tested against it.
//!
//! # Quick start
//!
//! One decode step of one layer: append a token to the cache, write its key and value, attend.
//!
//! ```
//! use kvant::{CacheLayer, CacheSpec, Codec, DType, Device, KvCache, Tensor, ops};
//!
//! let device = Device::default();
//! let (heads, kv_heads, head_dim) = (8, 2, 64);
//! let layer = CacheLayer { kv_heads, head_dim, window: None, k: Codec::F16, v: Codec::tq(8) };
//! let spec = CacheSpec { layers: vec![layer], sequences: 1, capacity: 4096, slack: 0 };
//! let mut cache = KvCache::new(&device, &spec)?;
//!
//! // The model's projections of the new token: [tokens, heads, head_dim].
//! let q = Tensor::from_slice(&device, &vec![0.5f32; heads * head_dim], &[1, heads, head_dim])?;
//! let k = Tensor::from_slice(&device, &vec![0.5f32; kv_heads * head_dim], &[1, kv_heads, head_dim])?;
//! let v = Tensor::from_slice(&device, &vec![0.5f32; kv_heads * head_dim], &[1, kv_heads, head_dim])?;
//! let out = Tensor::zeros(&device, DType::F32, &[1, heads, head_dim])?;
//!
//! let step = cache.append(&[(0, 1)])?; // one token for sequence 0
//! let layer = cache.layer(0)?;
//! let mut enc = device.encoder()?;
//! let order = ops::SourceOrder::TokenMajor;
//! ops::kv_write(&mut enc, &ops::KvWrite { k: &k, v: &v, order, first_token: 0, step: &step, layer })?;
//! ops::attend(
//!     &mut enc,
//!     &ops::Attend {
//!         q: &q,
//!         layer,
//!         step: &step,
//!         fresh: None,
//!         scale: (head_dim as f32).sqrt().recip(),
//!         softcap: None,
//!         window: None,
//!         q_rotated: false,
//!         plan: None,
//!         out: &out,
//!     },
//! )?;
//! enc.commit()?.wait()?;
//! assert!((out.to_f32()?[0] - 0.5).abs() < 0.1); // the token sees only its own value
//! # Ok::<(), kvant::Error>(())
//! ```
//!
//! `examples/` has more:
//!
//! | example | shows |
//! |---|---|
//! | `01-attend` | layers without a [`KvCache`] |
//! | `02-cache` | rings, drafts, forks |
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
//! | keys and values of a model | [`KvCache`]: sequences, lengths, rings; append, truncate, fork, save, load |
//! | keys and values of one layer | [`KvLayer`]: memory only, for engines with their own cache manager |
//! | the storage format of a vector | [`Codec`]: dense, or TurboQuant at 4, 5, 6 or 8 bits |
//! | the positions of a pass's tokens | [`Step`]: position and sequence of each token, length of each sequence |
//! | an operation | a function in [`ops`] and its descriptor struct with named fields |
//! | the residual stream | [`RmsNorm::residual`](ops::RmsNorm::residual) adds it before or after the norm |
//! | threads | devices, tensors, caches and steps can be shared among threads; only one thread at a time can use an encoder or a graph |
//! | the definition of correct | [`mod@reference`], also available as a device: [`Device::reference`] |
//! | errors | [`Error`]: names the operation, the argument, the expected and the actual value |
//!
//! # Operations
//!
//! | operation | reference | CPU | Metal | CUDA |
//! |---|---|---|---|---|
//! | [`kv_write`](ops::kv_write()), [`kv_read`](ops::kv_read()): every dtype and codec, linear and ring | yes | yes | yes | yes |
//! | [`attend`](ops::attend()): decode, verification, prefill; head sizes 64, 128, 256, 512 | yes | yes | yes | yes |
//! | [`norm_rope`](ops::norm_rope()), [`norm_rope_write`](ops::norm_rope_write()) | yes | yes | yes | yes |
//! | [`hadamard`](ops::hadamard()) | yes | yes | yes | yes |
//! | [`linear`](ops::linear()): dense, MLX affine 4, 6, 8 bit, experts; [`embed`](ops::embed()) | yes | yes | yes | yes |
//! | [`rms_norm`](ops::rms_norm()), [`gate`](ops::gate()), [`softcap`](ops::softcap()) | yes | yes | yes | yes |
//! | [`moe_route`](ops::moe_route()), [`moe_combine`](ops::moe_combine()) | yes | yes | yes | yes |
//! | [`argmax`](ops::argmax()), [`sample`](ops::sample()) | yes | yes | yes | yes |
//!
//! The Metal kernels are untested on Apple hardware; a test tool runs them on Linux. `docs/verification.md` lists what has
//! been tested where, and the gaps.
//!
//! # Features
//!
//! `cuda` (default): the CUDA backend. It has no build-time dependencies. At run time it requires a GPU of compute
//! capability 8.0 or newer, a driver for CUDA 12.0 or newer, and NVRTC. Attention is fastest if q, cache and out have the
//! same 16-bit dtype, or if the cache is quantised and out has 16 bits.
//!
//! The other backends have no feature: the CPU backend is always built, the Metal backend on macOS.

mod backend;
mod cache;
pub mod codec;
mod cpu;
mod cuda;
pub mod device;
mod dtype;
mod encoder;
mod error;
#[doc(hidden)]
pub mod gpu;
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
pub use encoder::{Encoder, Graph, Submission};
pub use error::{Error, Result};
pub use layer::{KvLayer, LayerSpec, Planes, SlotOrder};
pub use step::Step;
pub use tensor::{MAX_RANK, Tensor};

pub use half::{bf16, f16};

/// The example in the crate's README runs as a doctest. `kvant-msl`, which is not published, tests the repository's README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
