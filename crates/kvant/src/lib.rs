//! The KV cache and the attention of transformer inference.
//!
//! kvant writes new keys and values into a cache (linear or sliding-window ring; f32, f16, bf16 or TurboQuant at 4, 5,
//! 6 or 8 bits), attends over that cache, and prepares queries and keys (per-head RMS norm and RoPE) in fused kernels. Around
//! that stand the few other operations of a decoder layer. Each operation has one contract and one validation, in
//! [`ops`]; [`mod@reference`] defines in plain f64 loops what is correct; devices follow.
//!
//! # Quick start
//!
//! One decode step of one layer: ask the cache where the token stands, write its key and value, attend.
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
//! // What the model computed for the new token: [tokens, heads, head_dim].
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
//! assert!((out.to_f32()?[0] - 0.5).abs() < 0.1); // the only value it can see
//! # Ok::<(), kvant::Error>(())
//! ```
//!
//! More, in `examples/`: `01-attend` (layers without a [`KvCache`]), `02-cache` (rings, drafts, forks), `03-turboquant`
//! (what each codec costs), `04-graph` (record once, replay for every token).
//!
//! # Concepts
//!
//! | concept | here |
//! |---|---|
//! | where tensors live and operations run | [`Device`]; [`Device::list`] says what is there and why the rest is not |
//! | an array | [`Tensor`]: row-major, shared memory, [`rows`](Tensor::rows) is a view |
//! | a forward pass | [`Encoder`]: operations in order, which run at [`commit`](Encoder::commit); every one sees what the ones before it wrote |
//! | the same pass again, for the next token | [`Encoder::capture`] gives a [`Graph`]; positions and lengths are read from device buffers at each replay |
//! | keys and values of a model | [`KvCache`]: sequences, lengths, rings; append, truncate, fork, save, load |
//! | keys and values of one layer | [`KvLayer`]: memory only, for engines that keep their own books |
//! | how a vector is stored | [`Codec`]: dense, or TurboQuant at 4, 5, 6 or 8 bits |
//! | where the tokens of a pass stand | [`Step`]: position, sequence, lengths |
//! | an operation | a function of [`ops`] and its descriptor struct with named fields |
//! | the residual stream | [`RmsNorm::residual`](ops::RmsNorm::residual) adds, before the norm or after it |
//! | threads | devices, tensors, caches and steps may be shared among threads; an encoder and a graph are one thread's at a time |
//! | what is correct | [`mod@reference`], which is also a device: [`Device::reference`] |
//! | what can go wrong | [`Error`], with the operation, the argument, what was expected and what came |
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
//! No Apple hardware has run the Metal kernels yet: they are executed on Linux, by a test tool. `docs/verification.md` says
//! what that shows and what it cannot show, and what ran on CUDA devices. A device that is not there says why:
//! [`Device::list`].
//!
//! # Features
//!
//! `cuda` (default): the CUDA backend. It needs nothing to be built; driver and compiler are looked for at run time: a GPU of
//! compute capability 8.0, a driver for CUDA 12.0, NVRTC. Its fastest attention is for q, cache and out of one 16-bit type, and
//! for quantised caches with a 16-bit out. The other backends depend on the system alone.

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

/// The example in the README is a test.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
