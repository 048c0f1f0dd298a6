//! Loads and runs a model.

use std::{
    ops::RangeInclusive,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use kvant::{
    CacheLayer, DType, Device, KvPool, PoolSpec, Sequence, StateLayer, Step, Submission, Tensor, device::DeviceKind,
    ops,
};

use crate::{
    AttentionSpec, CacheCodecs, CacheDivision, Config, DecoderSpec, DeviceTokens, Drafter, Error, Files, Result,
    TargetStates,
    forward::{Network, OnStored, Wanted, Workspace},
    open::with_source,
    pass_rows::PassRows,
    pools::{self, PoolOptions},
    shard::local_spec,
    source::{Source, converted::Converted},
    weights::Weights,
};

/// Options of [`Model::load_with`].
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// The dtype of activations: f32 (the default), f16 or bf16.
    ///
    /// f16 overflows above 65504. A model that was trained in bf16 may exceed this; its logits are then NaN
    /// ([`Error::NotANumber`]).
    pub activations: DType,
    /// The dtype of dense matrices in memory: f32, f16 or bf16. `None` (the default) keeps the dtype of the file.
    /// Routers, quantised matrices and vectors are never converted.
    ///
    /// On CUDA, products are fast if activations and dense matrices have one 16-bit dtype. f16 overflows above 65504.
    /// During conversion, a matrix is in memory in both dtypes.
    pub dense_weights: Option<DType>,
    /// Maximum tokens of a pass of [`Model::feed`], at least 1; 512 is the default. On a GPU, larger passes are faster.
    /// They need memory for activations, and in pools for layers with windows.
    pub pass_tokens: usize,
    /// Maximum tokens of a text. It affects only models with LongRoPE (Phi 3 and 4), which have other factors for texts
    /// longer than their original context. If `context` exceeds the original context, these factors apply to every
    /// text. Texts longer than both are rejected. `None` (the default) is the original context.
    pub context: Option<usize>,
    /// The kind of device for which memory is estimated ([`Inspection::memory`](crate::Inspection::memory)): some
    /// operations need scratch memory on GPUs. [`DeviceKind::Cpu`] by default.
    pub device: DeviceKind,
    /// How a [group](kvant::Device::group) divides the caches of layers without windows.
    pub cache_division: CacheDivision,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            activations: DType::F32,
            dense_weights: None,
            pass_tokens: 512,
            context: None,
            device: DeviceKind::Cpu,
            cache_division: CacheDivision::Auto,
        }
    }
}

impl LoadOptions {
    /// Fast options for a device. On CUDA: activations and dense matrices in bf16, and passes of 1024 to 8192 tokens,
    /// depending on the device's memory. On other devices the defaults.
    pub fn for_device(device: &Device) -> LoadOptions {
        let options = LoadOptions { device: device.kind(), ..LoadOptions::default() };
        if device.kind() != DeviceKind::Cuda {
            return options;
        }
        let pass_tokens = match device.memory().map_or(0, |memory| memory.total >> 30) {
            0..20 => 1024,
            20..60 => 2048,
            60..120 => 4096,
            _ => 8192,
        };
        LoadOptions { activations: DType::BF16, dense_weights: Some(DType::BF16), pass_tokens, ..options }
    }
}

/// The tokens whose logits [`Model::feed`] returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// Every token.
    All,
    /// The last token.
    Last,
}

/// A model on a device. Cloning is cheap; clones share the model.
///
/// ```no_run
/// use kvant::Device;
/// use kvant_models::{Logits, Model, PoolOptions};
/// let model = Model::load("path/to/a/model".as_ref(), &Device::default())?;
/// let pool = model.new_pool(&PoolOptions::default())?;
///
/// let mut a = pool.sequence();
/// let logits = model.feed(&mut a, &[2, 17, 300], Logits::Last)?;
/// assert_eq!(logits.shape(), [1, model.vocab_size()]);
///
/// // A batch: the next token of `a`, and the prompt of another sequence. Logits for the last token of each.
/// let mut b = pool.sequence();
/// let step = pool.step(&mut [(&mut a, 1), (&mut b, 4)])?;
/// let logits = model.forward(&pool, &step, &[5, 2, 90, 91, 92], &[0, 4])?;
/// assert_eq!(logits.shape(), [2, model.vocab_size()]);
/// # Ok::<(), kvant_models::Error>(())
/// ```
#[derive(Clone)]
pub struct Model {
    network: Arc<Network>,
    device: Device,
    pass_tokens: usize,
    cache_division: CacheDivision,
    drafter: Option<Arc<Drafter>>,
    /// Unused scratch memory.
    spaces: Arc<Mutex<Vec<Workspace>>>,
}

impl Model {
    /// Loads a checkpoint: a directory with `config.json` and either `model.safetensors` or shards under
    /// `model.safetensors.index.json`, or a GGUF file. [`Files::at`] describes paths.
    ///
    /// # Errors
    /// `File`, `Config`, `Metadata`, `Unsupported`, `MissingTensor`, `TensorShape`, `TensorDType` or `TensorValue` for
    /// invalid files; each names the file, key or tensor. `Kvant` if the device has too little memory.
    pub fn load(dir: &Path, device: &Device) -> Result<Model> {
        Model::load_with(dir, device, &LoadOptions::default())
    }

    /// Like [`Model::load`], with options.
    pub fn load_with(dir: &Path, device: &Device, options: &LoadOptions) -> Result<Model> {
        Model::load_files(&Files::at(dir)?, device, options)
    }

    /// Like [`Model::load_with`], from any [`Files`].
    pub fn load_files(files: &Files, device: &Device, options: &LoadOptions) -> Result<Model> {
        if !options.activations.is_float() {
            return Err(Error::argument("activations", "f32, f16 or bf16", options.activations));
        }
        if let Some(dtype) = options.dense_weights.filter(|dtype| !dtype.is_float()) {
            return Err(Error::argument("dense_weights", "f32, f16 or bf16", dtype));
        }
        if options.context == Some(0) {
            return Err(Error::argument("context", "at least 1", 0));
        }
        if options.pass_tokens == 0 {
            return Err(Error::argument("pass_tokens", "at least 1", 0));
        }
        let model = with_source(files, |config, source| Model::assemble(config, source, device, options))?;
        tracing::info!(%files, %device, bytes = model.weight_bytes(), "loaded");
        Ok(model)
    }

    /// Creates a model from a configuration and the tensors of a checkpoint, in any format.
    pub(crate) fn assemble(
        config: Config,
        source: &dyn Source,
        device: &Device,
        options: &LoadOptions,
    ) -> Result<Model> {
        let converted = options.dense_weights.map(|dtype| Converted { source, dtype });
        let source = converted.as_ref().map_or(source, |converted| converted as &dyn Source);
        let local = local_spec(&config.decoder, device.ranks(), options.cache_division, source)?;
        let weights = Weights::load(&config.decoder, &local, source, device)?;
        let network = Arc::new(Network::new(config, local, weights, options.activations, options.context)?);
        let LoadOptions { pass_tokens, cache_division, .. } = *options;
        let (device, drafter, spaces) = (device.clone(), None, Arc::default());
        Ok(Model { network, device, pass_tokens, cache_division, drafter, spaces })
    }

    /// Adds a drafter, which guesses the next tokens ([`DraftDecoder`](crate::DraftDecoder)). `files` and
    /// `dense_weights` are as in [`Drafter::load`].
    ///
    /// If the drafter has keys and values of its own, new pools have one more layer for them, after the model's. Pools
    /// that were made before do not fit.
    ///
    /// # Errors
    /// As [`Drafter::load`].
    pub fn with_drafter(self, files: &Files, dense_weights: Option<DType>) -> Result<Model> {
        let drafter = Drafter::load(files, &self, dense_weights)?;
        Ok(Model { drafter: Some(Arc::new(drafter)), ..self })
    }

    /// The drafter, if the model has one.
    pub fn drafter(&self) -> Option<&Drafter> {
        self.drafter.as_deref()
    }

    /// The drafter, shared with its decoders.
    pub(crate) fn shared_drafter(&self) -> Option<Arc<Drafter>> {
        self.drafter.clone()
    }

    /// The layer of the drafter in the model's pools.
    fn draft_layer(&self) -> Option<CacheLayer> {
        self.drafter()?.cache_layer()
    }

    /// The model's configuration.
    pub fn config(&self) -> &Config {
        &self.network.config
    }

    /// The description of the decoder.
    pub fn decoder(&self) -> &DecoderSpec {
        &self.config().decoder
    }

    /// The decoder that each rank of a [group](Device::group) runs: fewer heads and narrower MLPs. On a single device,
    /// [`Model::decoder`].
    pub fn rank_decoder(&self) -> &DecoderSpec {
        self.network.spec()
    }

    /// The number of logits per token.
    pub fn vocab_size(&self) -> usize {
        self.decoder().vocab_size
    }

    /// The device that the model runs on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The dtype of activations.
    pub fn activations(&self) -> DType {
        self.network.activations()
    }

    /// Maximum tokens of a pass of [`Model::feed`] ([`LoadOptions::pass_tokens`]).
    pub fn pass_tokens(&self) -> usize {
        self.pass_tokens
    }

    /// Maximum tokens of a text, if limited by more than memory: by [`LoadOptions::context`], or by a table of factors.
    pub fn max_length(&self) -> Option<usize> {
        self.network.max_length()
    }

    /// Bytes of the weight matrices, on each device of a group.
    pub fn weight_bytes(&self) -> usize {
        self.network.weights.bytes
    }

    /// Bytes of the matrices that a pass of one token reads, on each device of a group. For a mixture of experts, this
    /// includes the `top_k` experts of a token. A table of embeddings counts one row, unless it is also the output
    /// matrix.
    pub fn weight_bytes_per_token(&self) -> usize {
        self.network.weights.bytes_per_token(self.rank_decoder())
    }

    /// Creates a pool with one layer for each model layer that has its own keys and values, and one for the drafter if
    /// it has its own.
    ///
    /// It has room for passes of [`Model::pass_tokens`] tokens over all sequences. With sealed pages, a sequence keeps
    /// the dense pages of its last pass until its next step: if sequences are fed one after the other, feed at most
    /// `pass_tokens / sequences` tokens at a time.
    ///
    /// Logs a warning if sequences can exceed the context for which the model was made.
    pub fn new_pool(&self, options: &PoolOptions) -> Result<KvPool> {
        let longest = options.longest;
        if let Some(made_for) = self.config().max_position_embeddings.filter(|&most| longest > most) {
            tracing::warn!(
                "the pool is for texts of up to {longest} tokens, and the model was made for at most {made_for}"
            );
        }
        self.pool_of(&self.pool_spec(options)?, longest)
    }

    /// The specification of the pool that [`Model::new_pool`] makes, with its bytes on each device of a group.
    pub fn pool_spec(&self, options: &PoolOptions) -> Result<PoolSpec> {
        let (decoder, activations) = (self.rank_decoder(), self.activations());
        pools::pool_spec(decoder, options, self.pass_tokens, activations, self.draft_layer())
    }

    /// The layers of a pool for this model: the layers with their own keys and values, then the drafter's.
    ///
    /// # Errors
    /// `Argument` if the number of codecs differs from the number of layers.
    pub fn cache_layers(&self, codecs: &CacheCodecs) -> Result<Vec<CacheLayer>> {
        let layers = pools::cache_layers(self.rank_decoder(), codecs, self.network.activations())?;
        Ok(layers.into_iter().chain(self.draft_layer()).collect())
    }

    /// The states of a pool for this model: those of its recurrent layers. Empty if it has none.
    pub fn state_layers(&self) -> Vec<StateLayer> {
        self.rank_decoder().states(self.activations())
    }

    /// Runs a batch of any sequences and numbers of tokens. `step` belongs to `pool`, and `tokens` are the ids of its
    /// tokens. Returns the logits of the tokens in `rows`, f32 `[rows.len(), vocab_size]`. The logits of a token
    /// predict the next one of its sequence.
    ///
    /// Layers that write no keys run only for the tokens in `rows`. The whole batch is one pass: divide long prompts,
    /// as [`Model::feed`] does.
    ///
    /// Results do not depend on how tokens are divided into passes, except for rounding: kernels depend on the number
    /// of rows ([accuracy](kvant::ops#accuracy)). A model with [recurrent states](Model::state_layers) runs a step
    /// once: each pass advances the states.
    ///
    /// # Errors
    /// `Argument` for ids outside the vocabulary, a number of ids that differs from the step's tokens, rows out of
    /// range, or a pool of another model. `Kvant` for an outdated step. The sequences keep their tokens: truncate them
    /// if the pass failed.
    pub fn forward(&self, pool: &KvPool, step: &Step, tokens: &[u32], rows: &[usize]) -> Result<Tensor> {
        let out = Tensor::zeros(&self.device, DType::F32, &[rows.len(), self.vocab_size()])?;
        self.forward_into(pool, step, tokens, rows, &out)?;
        Ok(out)
    }

    /// Like [`Model::forward`], into an existing tensor of f32, f16 or bf16.
    pub fn forward_into(&self, pool: &KvPool, step: &Step, tokens: &[u32], rows: &[usize], out: &Tensor) -> Result<()> {
        Ok(self.start(pool, step, tokens, None, rows, out)?.wait()?)
    }

    /// Like [`Model::forward_into`], without waiting for the pass, and with tokens that an earlier step samples.
    ///
    /// # Errors
    /// As [`Model::forward`]; `Argument` or `Kvant` for places out of range.
    pub fn start(
        &self,
        pool: &KvPool,
        step: &Step,
        tokens: &[u32],
        fed: Option<DeviceTokens>,
        rows: &[usize],
        out: &Tensor,
    ) -> Result<Submission> {
        self.start_with(pool, step, tokens, fed, (rows, out), None)
    }

    /// Like [`Model::start`], and leaves hidden states for the drafter in `states`.
    ///
    /// # Errors
    /// As [`Model::start`]; `Argument` for more tokens than rows of `states`.
    pub fn start_with(
        &self,
        pool: &KvPool,
        step: &Step,
        tokens: &[u32],
        fed: Option<DeviceTokens>,
        (rows, out): (&[usize], &Tensor),
        states: Option<&TargetStates>,
    ) -> Result<Submission> {
        let tokens = &*DeviceTokens::known(fed.as_ref(), tokens);
        self.check_pass(pool, step, tokens, rows)?;
        self.check_out(out, rows.len()..=rows.len())?;
        states.map_or(Ok(()), |states| states.check(self, tokens.len()))?;
        if tokens.is_empty() {
            return Ok(self.device.encoder()?.commit()?);
        }
        self.run(pool, step, tokens, fed, PassRows { states, ..PassRows::logits(rows, out) }, None)
    }

    /// Checks the inputs of a pass.
    pub(crate) fn check_pass(&self, pool: &KvPool, step: &Step, tokens: &[u32], rows: &[usize]) -> Result<()> {
        self.check_pool(pool)?;
        self.check_tokens(tokens)?;
        if step.batch().longest != usize::MAX {
            self.check_length(step.batch().longest)?;
        }
        if tokens.len() != step.tokens() {
            return Err(Error::argument("tokens", format_args!("{} ids", step.tokens()), tokens.len()));
        }
        match rows.iter().find(|&&row| row >= tokens.len()) {
            Some(row) => Err(Error::argument("rows", format_args!("below {}", tokens.len()), row)),
            None => Ok(()),
        }
    }

    /// Starts a batch with checked arguments.
    pub(crate) fn run(
        &self,
        pool: &KvPool,
        step: &Step,
        tokens: &[u32],
        fed: Option<DeviceTokens>,
        wanted: PassRows,
        stored: Option<&mut OnStored>,
    ) -> Result<Submission> {
        let mut space = self.space(tokens.len())?;
        let rows = wanted.rows;
        let every = rows.len() == tokens.len() && rows.iter().enumerate().all(|(index, &row)| index == row);
        let mut fewer = if every || rows.is_empty() { None } else { Some(self.space(rows.len())?) };
        let result = self.pass(pool, step, tokens, fed, wanted, (&mut space, fewer.as_mut()), stored);
        // Passes are ordered, so the next one can reuse this memory.
        self.give_spaces(std::iter::once(space).chain(fewer));
        result
    }

    #[allow(clippy::too_many_arguments, reason = "checked arguments of one call")]
    fn pass(
        &self,
        pool: &KvPool,
        step: &Step,
        tokens: &[u32],
        fed: Option<DeviceTokens>,
        wanted: PassRows,
        (space, fewer): (&mut Workspace, Option<&mut Workspace>),
        stored: Option<&mut OnStored>,
    ) -> Result<Submission> {
        let PassRows { rows, out, is_hidden, states } = wanted;
        space.fit(self.rank_decoder(), tokens.len())?;
        let mut enc = self.device.encoder()?;
        match fed {
            Some(fed) => fed.write(&mut enc, tokens, &space.views.ids)?,
            None => space.views.ids.write(tokens)?,
        }
        let logits = (!is_hidden).then_some(out);
        let features = states.map(TargetStates::features);
        let encode = |wanted: &Wanted| {
            self.network.encode_with(&mut enc, &space.views, pool, step, wanted, features.as_ref(), stored)
        };
        let x = match fewer {
            None if rows.is_empty() => {
                encode(&Wanted::Nothing)?;
                None
            }
            None => {
                encode(&Wanted::Every { logits })?;
                Some(&space.views.x)
            }
            Some(fewer) => {
                fewer.fit(self.rank_decoder(), rows.len())?;
                let indices: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
                fewer.views.ids.write(&indices)?;
                let (step_of_rows, views) = (step.select(rows)?, &fewer.views);
                encode(&Wanted::Some { rows: &views.ids, views, step: &step_of_rows, logits })?;
                Some(&views.x)
            }
        };
        if let Some(x) = x.filter(|_| is_hidden) {
            ops::copy(&mut enc, x, out)?;
        }
        Ok(enc.commit()?)
    }

    /// Feeds any number of tokens to one sequence, in passes of up to [`Model::pass_tokens`]. Returns logits, f32
    /// `[tokens or 1, vocab_size]`.
    ///
    /// # Errors
    /// `Argument` for no tokens, ids outside the vocabulary, or a sequence of another model's pool. `Kvant` with
    /// `OutOfPages` if the pool is full.
    ///
    /// After an error, the sequence has its previous length, unless windows have passed positions that this length
    /// needs: then it keeps the completed passes.
    pub fn feed(&self, sequence: &mut Sequence, tokens: &[u32], logits: Logits) -> Result<Tensor> {
        let rows = if logits == Logits::All { tokens.len() } else { 1 };
        let out = Tensor::zeros(&self.device, DType::F32, &[rows, self.vocab_size()])?;
        self.feed_into(sequence, tokens, &out)?;
        Ok(out)
    }

    /// Like [`Model::feed`], and calls `stored` in each layer with its own keys and values, after the keys and values
    /// of a pass are stored and before its tokens attend to them. `stored` gets the layer's index in the pool and the
    /// step. It may read and modify the stored data, to examine keys and values or to try formats.
    ///
    /// Every layer waits for the device, which is slower than [`Model::feed`].
    ///
    /// # Errors
    /// As [`Model::feed`], and those of `stored`; `Argument` for a model on a group of devices.
    pub fn feed_with(
        &self,
        sequence: &mut Sequence,
        tokens: &[u32],
        logits: Logits,
        stored: &mut dyn FnMut(usize, &Step) -> Result<()>,
    ) -> Result<Tensor> {
        if self.device.ranks() > 1 {
            return Err(Error::argument("model", "on one device, whose cache is the whole one", &self.device));
        }
        let rows = if logits == Logits::All { tokens.len() } else { 1 };
        let out = Tensor::zeros(&self.device, DType::F32, &[rows, self.vocab_size()])?;
        self.feed_passes(sequence, tokens, &out, Some(stored))?;
        Ok(out)
    }

    /// Like [`Model::feed`], into an existing tensor. `out` is `[n, vocab_size]`, f32, f16 or bf16, and receives the
    /// logits of the last n tokens, with n from 1 to the number of tokens.
    pub fn feed_into(&self, sequence: &mut Sequence, tokens: &[u32], out: &Tensor) -> Result<()> {
        self.feed_passes(sequence, tokens, out, None)
    }

    fn feed_passes(
        &self,
        sequence: &mut Sequence,
        tokens: &[u32],
        out: &Tensor,
        mut stored: Option<&mut OnStored>,
    ) -> Result<()> {
        let pool = sequence.pool().clone();
        if tokens.is_empty() {
            return Err(Error::argument("tokens", "at least one token", "none"));
        }
        self.check_pool(&pool)?;
        self.check_tokens(tokens)?;
        self.check_length(sequence.len().saturating_add(tokens.len()))?;
        self.check_out(out, 1..=tokens.len())?;
        let (before, first_row) = (sequence.len(), tokens.len() - out.shape()[0]);
        let mut done = 0;
        for piece in tokens.chunks(self.pass_tokens) {
            let end = done + piece.len();
            let wanted = done.max(first_row).min(end)..end;
            let rows: Vec<usize> = (wanted.start - done..piece.len()).collect();
            let first_out = wanted.start.saturating_sub(first_row).min(out.shape()[0]);
            let out = out.rows(first_out..first_out + rows.len())?;
            let step = pool.step(&mut [(&mut *sequence, piece.len())]).map_err(Error::from);
            let wanted = PassRows::logits(&rows, &out);
            let run = |step| Ok(self.run(&pool, &step, piece, None, wanted, stored.as_deref_mut())?.wait()?);
            if let Err(error) = step.and_then(run) {
                take_back(sequence, before, before + done)?;
                return Err(error);
            }
            done = end;
        }
        Ok(())
    }

    /// Checks that ids are in the vocabulary.
    pub(crate) fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        let vocab = self.decoder().fed_vocab();
        match tokens.iter().enumerate().find(|&(_, &id)| id as usize >= vocab) {
            Some((i, id)) => {
                Err(Error::argument("tokens", format_args!("ids below {vocab}"), format_args!("{id} at {i}")))
            }
            None => Ok(()),
        }
    }

    /// Checks the length of a sequence after a pass. Queries scaled by position have a table of factors of limited
    /// length, and LongRoPE is configured for the context with which the model was loaded.
    pub(crate) fn check_length(&self, length: usize) -> Result<()> {
        match self.max_length() {
            Some(most) if length > most => {
                Err(Error::argument("tokens", format_args!("at most {most} of a sequence ({})", self.limit()), length))
            }
            _ => Ok(()),
        }
    }

    /// The reason for the maximum length of a sequence.
    fn limit(&self) -> &'static str {
        match self.decoder().original_context() {
            Some(_) => "the context that the model was loaded for",
            None => "the context that it was made for",
        }
    }

    /// Checks a tensor for the logits of `rows` rows.
    fn check_out(&self, out: &Tensor, rows: RangeInclusive<usize>) -> Result<()> {
        let vocab = self.vocab_size();
        let fits = matches!(out.shape(), &[count, width] if rows.contains(&count) && width == vocab);
        if fits && out.dtype().is_float() && out.device() == &self.device {
            return Ok(());
        }
        let (least, most) = (rows.start(), rows.end());
        let rows = if least == most { most.to_string() } else { format!("{least} to {most}") };
        Err(Error::argument("out", format!("[{rows}, {vocab}] of floats on {}", self.device), format_args!("{out:?}")))
    }

    /// Checks that a pool was made for this model.
    pub(crate) fn check_pool(&self, pool: &KvPool) -> Result<()> {
        if pool.device() != &self.device {
            return Err(Error::argument("pool", format_args!("on {}", self.device), pool.device()));
        }
        let (layers, own) = (&pool.spec().layers, self.rank_decoder().cache_blocks());
        let same = |(cached, (_, own)): (&CacheLayer, (usize, &AttentionSpec))| {
            (cached.kv_heads, cached.head_dim, cached.window, cached.position_ranks)
                == (own.kv_heads, own.head_dim, own.window, own.position_ranks)
        };
        let (of_model, of_drafter) = layers.split_at(layers.len().min(self.decoder().cache_layers()));
        let fits = of_model.len() == self.decoder().cache_layers() && of_model.iter().zip(own).all(same);
        if !fits || of_drafter != self.draft_layer().as_slice() {
            return Err(Error::argument("pool", "one made for this model", "layers of other shapes"));
        }
        if pool.spec().states != self.state_layers() {
            return Err(Error::argument("pool", "one made for this model", "states of other shapes"));
        }
        Ok(())
    }

    /// How a group divides the caches of layers without windows.
    pub(crate) fn cache_division(&self) -> CacheDivision {
        self.cache_division
    }

    /// The model's description and tensors.
    pub(crate) fn network(&self) -> &Network {
        &self.network
    }

    /// Allocates scratch for passes of `rows` tokens.
    pub(crate) fn workspace(&self, rows: usize) -> Result<Workspace> {
        Workspace::new(self.rank_decoder(), &self.device, self.activations(), rows)
    }

    /// Takes unused scratch for passes of `rows` tokens, or allocates it.
    pub(crate) fn space(&self, rows: usize) -> Result<Workspace> {
        let mut spaces = self.lock_spaces();
        let fits = spaces.iter().enumerate().filter(|(_, space)| space.rows() >= rows);
        if let Some((index, _)) = fits.min_by_key(|(_, space)| space.rows()) {
            return Ok(spaces.swap_remove(index));
        }
        // Replaces scratch that is too small. Sizes are rounded up to powers of two, so that prompts of increasing
        // length rarely allocate.
        spaces.pop();
        drop(spaces);
        self.workspace(rows.next_power_of_two())
    }

    /// Returns scratch for reuse.
    pub(crate) fn give_spaces(&self, spaces: impl IntoIterator<Item = Workspace>) {
        self.lock_spaces().extend(spaces);
    }

    fn lock_spaces(&self) -> std::sync::MutexGuard<'_, Vec<Workspace>> {
        // The list is valid even after a panic.
        self.spaces.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Rolls a failed pass back: to the length `before` the feed or, if windows have passed older positions, to the length
/// after the `complete` passes. Recurrent states go back to their last boundary, or the sequence becomes empty.
fn take_back(sequence: &mut Sequence, before: usize, complete: usize) -> Result<()> {
    let boundary = sequence.boundary().filter(|&boundary| boundary <= before);
    for len in [Some(before), Some(complete), boundary].into_iter().flatten() {
        if sequence.truncate(len).is_ok() {
            return Ok(());
        }
    }
    Ok(sequence.truncate(0)?)
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Model({} layers on {})", self.decoder().blocks.len(), self.device)
    }
}
