//! Loading and running a model.

use std::{
    path::Path,
    sync::{Mutex, PoisonError},
};

use kvant::{CacheLayer, CacheSpec, Codec, DType, Device, KvCache, Tensor};

use crate::{
    Config, Error, Files, Result, config, gemma4::Gemma4, safetensors::Checkpoint, weights::Weights,
    workspace::Workspace,
};

/// The largest number of tokens in one pass: large enough to keep matrix products busy, small enough to limit scratch
/// memory.
const MAX_CHUNK: usize = 512;

/// Options of [`Model::load_with`].
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// The dtype of activations: f32 (the default), f16 or bf16. Weights keep the dtype of the file.
    ///
    /// f16 overflows above 65504. A model that was trained in bf16 may exceed this; its logits are then NaN
    /// ([`Error::NotANumber`]).
    pub activations: DType,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions { activations: DType::F32 }
    }
}

/// Options of [`Model::new_cache`].
#[derive(Clone, Copy, Debug)]
pub struct CacheOptions {
    /// The codec of keys.
    pub k: Codec,
    /// The codec of values.
    pub v: Codec,
    /// The largest number of tokens of a sequence.
    pub capacity: usize,
    /// Independent sequences.
    pub sequences: usize,
    /// Slots of sliding-window layers in addition to their window: a pass takes up to slack + 1 tokens at once.
    pub slack: usize,
}

impl Default for CacheOptions {
    /// f16, one sequence of up to 4096 tokens, passes of up to 256 tokens.
    fn default() -> Self {
        CacheOptions { k: Codec::F16, v: Codec::F16, capacity: 4096, sequences: 1, slack: 255 }
    }
}

/// The tokens whose logits a pass returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// Every token.
    All,
    /// The last token.
    Last,
}

/// A model on a device.
///
/// ```no_run
/// use kvant::Device;
/// use kvant_models::{CacheOptions, Logits, Model};
/// let model = Model::load("path/to/a/model".as_ref(), &Device::default())?;
/// let mut cache = model.new_cache(&CacheOptions::default())?;
/// let logits = model.forward(&mut cache, 0, &[2, 17, 300], Logits::Last)?;
/// assert_eq!(logits.shape(), [1, model.vocab_size()]);
/// # Ok::<(), kvant_models::Error>(())
/// ```
pub struct Model {
    gemma4: Gemma4,
    device: Device,
    activations: DType,
    /// Unused scratch.
    spaces: Mutex<Vec<Workspace>>,
}

impl Model {
    /// Loads a directory with `config.json` and either `model.safetensors` or shards under
    /// `model.safetensors.index.json`.
    ///
    /// # Errors
    /// `File`, `Config`, `Unsupported`, `MissingTensor`, `TensorShape`, `TensorDType` or `TensorValue` for invalid
    /// files; each names the file, key or tensor. `Kvant` if the device has too little memory.
    pub fn load(dir: &Path, device: &Device) -> Result<Model> {
        Model::load_with(dir, device, &LoadOptions::default())
    }

    /// As [`Model::load`], with options.
    pub fn load_with(dir: &Path, device: &Device, options: &LoadOptions) -> Result<Model> {
        Model::load_files(&Files::directory(dir), device, options)
    }

    /// As [`Model::load_with`], from any [`Files`].
    pub fn load_files(files: &Files, device: &Device, options: &LoadOptions) -> Result<Model> {
        if !options.activations.is_float() {
            return Err(Error::argument("activations", "f32, f16 or bf16", options.activations));
        }
        files.check()?;
        let config = Config::load_files(files)?;
        let weights = Weights::load(&config, &Checkpoint::open_files(files)?, device)?;
        tracing::info!(?files, %device, layers = config.layers.len(), bytes = weights.bytes, "loaded");
        Ok(Model {
            gemma4: Gemma4::new(config, weights)?,
            device: device.clone(),
            activations: options.activations,
            spaces: Mutex::default(),
        })
    }

    /// The model's configuration.
    pub fn config(&self) -> &Config {
        &self.gemma4.config
    }

    /// The number of logits per token.
    pub fn vocab_size(&self) -> usize {
        self.config().vocab_size
    }

    /// The device that the model runs on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The dtype of activations.
    pub fn activations(&self) -> DType {
        self.activations
    }

    /// Bytes of the weight matrices.
    pub fn weight_bytes(&self) -> usize {
        self.gemma4.weights.bytes
    }

    /// Bytes of the matrices that a pass of one token reads. Of a mixture of experts, these are the `top_k` experts
    /// of the token. A table of embeddings counts one row, unless it is also the output matrix.
    pub fn weight_bytes_per_token(&self) -> usize {
        self.gemma4.weights.bytes_per_token(self.config())
    }

    /// Makes an empty cache with one layer for each model layer that has its own keys and values.
    ///
    /// Logs a warning if the capacity exceeds the context that the model was made for.
    pub fn new_cache(&self, options: &CacheOptions) -> Result<KvCache> {
        let CacheOptions { k, v, capacity, sequences, slack } = *options;
        if let Some(made_for) = self.config().max_position_embeddings.filter(|&most| capacity > most) {
            tracing::warn!(
                "the cache is for texts of up to {capacity} tokens, and the model was made for at most {made_for}"
            );
        }
        let own = &self.config().layers[..self.config().cache_layers()];
        let layer = |layer: &config::LayerConfig| CacheLayer {
            kv_heads: layer.kv_heads,
            head_dim: layer.head_dim,
            window: layer.window,
            k,
            v,
        };
        let spec = CacheSpec { layers: own.iter().map(layer).collect(), sequences, capacity, slack };
        Ok(KvCache::new(&self.device, &spec)?)
    }

    /// Feeds `tokens` to a sequence and returns logits, f32 `[tokens or 1, vocab_size]`. The logits of a token
    /// predict the next token.
    ///
    /// Any number of tokens can be fed, regardless of the number that the cache takes at once. Feeding tokens
    /// together, in chunks or one by one gives the same results up to rounding: kernels depend on the number of rows
    /// ([accuracy](kvant::ops#accuracy)).
    ///
    /// # Errors
    /// `Argument` for no tokens, ids outside the vocabulary, or a cache of another model. `Kvant` with `CacheFull` if
    /// the sequence has no room. In all these cases, nothing has changed.
    ///
    /// After any other error, the sequence has its previous length. If rings have overwritten positions that this
    /// length needs, the sequence keeps the chunks that were completed.
    pub fn forward(&self, cache: &mut KvCache, sequence: usize, tokens: &[u32], logits: Logits) -> Result<Tensor> {
        self.check(cache, sequence, tokens)?;
        let rows = if logits == Logits::All { tokens.len() } else { 1 };
        let out = Tensor::zeros(&self.device, DType::F32, &[rows, self.vocab_size()])?;
        self.run(cache, sequence, tokens, &out)?;
        Ok(out)
    }

    /// As [`Model::forward`], into an existing tensor. `out` is `[n, vocab_size]`, f32, f16 or bf16, and receives the
    /// logits of the last n tokens, with n from 1 to the number of tokens.
    pub fn forward_into(&self, cache: &mut KvCache, sequence: usize, tokens: &[u32], out: &Tensor) -> Result<()> {
        self.check(cache, sequence, tokens)?;
        let vocab = self.vocab_size();
        let ok = matches!(out.shape(), &[rows, width] if (1..=tokens.len()).contains(&rows) && width == vocab);
        if !ok || !out.dtype().is_float() || out.device() != &self.device {
            let expected = format!("[1 to {}, {vocab}] of floats on {}", tokens.len(), self.device);
            return Err(Error::argument("out", expected, format_args!("{out:?}")));
        }
        self.run(cache, sequence, tokens, out)
    }

    /// Checks every argument of a pass.
    pub(crate) fn check(&self, cache: &KvCache, sequence: usize, tokens: &[u32]) -> Result<()> {
        if tokens.is_empty() {
            return Err(Error::argument("tokens", "at least one token", "none"));
        }
        let config = self.config();
        let ple_vocab = config.per_layer_input.map_or(usize::MAX, |ple| ple.vocab_size);
        let vocab = config.vocab_size.min(ple_vocab);
        if let Some((i, id)) = tokens.iter().enumerate().find(|&(_, &id)| id as usize >= vocab) {
            return Err(Error::argument("tokens", format_args!("ids below {vocab}"), format_args!("{id} at {i}")));
        }
        if cache.device() != &self.device {
            return Err(Error::argument("cache", format_args!("on {}", self.device), cache.device()));
        }
        let (spec, own) = (cache.spec(), &config.layers[..config.cache_layers()]);
        let same = |(cached, layer): (&CacheLayer, &config::LayerConfig)| {
            (cached.kv_heads, cached.head_dim, cached.window) == (layer.kv_heads, layer.head_dim, layer.window)
        };
        if spec.layers.len() != own.len() || !spec.layers.iter().zip(own).all(same) {
            return Err(Error::argument("cache", "one made for this model", "layers of other shapes"));
        }
        let len = cache.len(sequence)?;
        let bounded = own.iter().any(|layer| layer.window.is_none());
        if bounded && tokens.len() > spec.capacity.saturating_sub(len) {
            let (tokens, capacity) = (tokens.len(), spec.capacity);
            return Err(kvant::Error::CacheFull { sequence, len, tokens, capacity }.into());
        }
        Ok(())
    }

    /// Feeds checked tokens in chunks. `out` receives the logits of the last tokens, as many as it has rows.
    fn run(&self, cache: &mut KvCache, sequence: usize, tokens: &[u32], out: &Tensor) -> Result<()> {
        let most = cache.max_batch().clamp(1, MAX_CHUNK);
        let mut space = self.space(tokens.len().min(most), most)?;
        let first_row = tokens.len() - out.shape()[0];
        let before = cache.len(sequence)?;
        let mut done = 0;
        let mut result = Ok(());
        for piece in tokens.chunks(most) {
            let end = done + piece.len();
            let rows = done.max(first_row).min(end)..end;
            result = self.piece(&mut space, cache, (sequence, piece), rows.start - done, || {
                Ok(out.rows(rows.start - first_row..rows.end - first_row)?)
            });
            if result.is_err() {
                break;
            }
            done = end;
        }
        if result.is_err() && cache.truncate(sequence, before).is_err() {
            // Rings have overwritten older positions: keep the completed chunks.
            cache.truncate(sequence, before + done)?;
        }
        self.lock_spaces().push(space);
        result
    }

    /// Runs one pass. The logits of the chunk from row `skip` on go to `out`, if any are requested.
    fn piece(
        &self,
        space: &mut Workspace,
        cache: &mut KvCache,
        (sequence, piece): (usize, &[u32]),
        skip: usize,
        out: impl FnOnce() -> Result<Tensor>,
    ) -> Result<()> {
        let out = if skip < piece.len() { Some(out()?) } else { None };
        space.fit(&self.gemma4.config, piece.len())?;
        space.views.ids.write(piece)?;
        space.append(cache, sequence, piece.len())?;
        let mut enc = self.device.encoder()?;
        self.gemma4.encode(&mut enc, space, cache, out.as_ref())?;
        Ok(enc.commit()?.wait()?)
    }

    /// The model's configuration and tensors.
    pub(crate) fn gemma4(&self) -> &Gemma4 {
        &self.gemma4
    }

    /// Allocates scratch for passes of `rows` tokens.
    pub(crate) fn workspace(&self, rows: usize) -> Result<Workspace> {
        Workspace::new(self.config(), &self.device, self.activations, rows)
    }

    /// Scratch for passes of `rows` tokens: unused scratch, or a new allocation.
    fn space(&self, rows: usize, most: usize) -> Result<Workspace> {
        match self.lock_spaces().pop() {
            Some(space) if space.rows() >= rows => Ok(space),
            // Sizes grow in powers of two, so that prompts of increasing length do not each allocate.
            _ => self.workspace(rows.next_power_of_two().min(most)),
        }
    }

    fn lock_spaces(&self) -> std::sync::MutexGuard<'_, Vec<Workspace>> {
        // A panic cannot leave a list of scratch memory in an invalid state.
        self.spaces.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Model({} layers on {})", self.config().layers.len(), self.device)
    }
}
