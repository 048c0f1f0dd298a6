//! Determines what a checkpoint needs from its headers, without loading weights.

use std::collections::BTreeMap;

use kvant::{CacheLayer, DType};

use crate::{
    CacheDivision, Config, DecoderSpec, Files, LoadOptions, PoolOptions, Result,
    cut::output_rows,
    drafter::DraftMemory,
    forward::workspace_bytes,
    open::with_source,
    pools::{pool_spec, pool_spec_with},
    shard::local_spec,
    source::{Form, Part, Role, Source, converted::is_converted},
    spec::{
        AttentionSpec, BlockSpec, DeltaNetSpec, DenseSpec, FeedForwardSpec, MixerSpec, MoeSpec, ParallelSum,
        RouterSpec, ShortConvSpec,
    },
    weights::{DELTA_PROJECTIONS, has_output, has_router_bias},
};

/// A checkpoint's configuration and sizes.
///
/// ```no_run
/// use kvant_models::{Files, Inspection, LoadOptions, PoolOptions};
/// let model = Inspection::open(&Files::directory("path/to/a/model"))?;
/// println!("{}: {} parameters", model.config.family, model.parameters);
/// let memory = model.memory(&PoolOptions::default(), &LoadOptions::default())?;
/// println!("{} bytes of weights, {} of cache", memory.weights, memory.cache);
/// # Ok::<(), kvant_models::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Inspection {
    /// The configuration.
    pub config: Config,
    /// Number of parameters in all tensors of the text model.
    pub parameters: usize,
    /// Bytes of the matrices, as they are in memory unless [`LoadOptions::dense_weights`] changes that; on each device
    /// of a group.
    pub weight_bytes: usize,
    /// The formats of the matrices, sorted by bytes, descending.
    pub formats: Vec<StoredFormat>,
    /// The decoder of each device of a group.
    local: DecoderSpec,
    ranks: usize,
    /// Numbers and bytes of the matrices to which [`LoadOptions::dense_weights`] applies.
    dense: [usize; 2],
    drafter: Option<DraftMemory>,
}

/// The matrices of one format.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredFormat {
    /// For example `bf16`, `4 bit, group 64`, `Q4_K` or `mxfp4`.
    pub name: String,
    /// Number of parameters in these matrices.
    pub parameters: usize,
    /// Bytes of these matrices, including scales.
    pub bytes: usize,
}

/// Memory that a model needs, in bytes; on each device of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryEstimate {
    /// The matrices, with those of a drafter.
    pub weights: usize,
    /// Keys and values.
    pub cache: usize,
    /// Activations of one pass, scratch memory of its delta nets, and the logits of one token.
    pub scratch: usize,
}

impl MemoryEstimate {
    /// The sum of all parts.
    pub fn total(&self) -> usize {
        self.weights.saturating_add(self.cache).saturating_add(self.scratch)
    }
}

impl Inspection {
    /// Reads the configuration and the headers of a checkpoint.
    ///
    /// # Errors
    /// As [`Model::load`](crate::Model::load), except for the contents of tensors.
    pub fn open(files: &Files) -> Result<Inspection> {
        Inspection::open_for(files, 1, CacheDivision::Auto)
    }

    /// As [`Inspection::open`], for a [group](kvant::Device::group) of `ranks` devices.
    ///
    /// # Errors
    /// As [`Inspection::open`]; `Argument` for no device; `Indivisible` if the model does not divide among them.
    pub fn open_for(files: &Files, ranks: usize, division: CacheDivision) -> Result<Inspection> {
        if ranks == 0 {
            return Err(crate::Error::argument("ranks", "at least 1", 0));
        }
        with_source(files, |config, source| Inspection::of(config, source, ranks, division))
    }

    fn of(config: Config, source: &dyn Source, ranks: usize, division: CacheDivision) -> Result<Inspection> {
        let spec = &config.decoder;
        spec.check()?;
        let local = local_spec(spec, ranks, division, source)?;
        let (mut weight_bytes, mut dense) = (0usize, [0usize; 2]);
        let mut formats = BTreeMap::<String, StoredFormat>::new();
        let (stored, of_rank) = (tensors(spec, source, 1), tensors(&local, source, ranks));
        let elements = |tensor: &Stored| tensor.shape.iter().product::<usize>();
        let parameters = stored.iter().map(elements).fold(0, usize::saturating_add);
        let parts = stored.iter().zip(&of_rank).filter(|(tensor, _)| tensor.is_matrix);
        let output = output_part(spec, source, ranks);
        for (tensor, of_rank) in parts.chain(output.iter().map(|[whole, part]| (whole, part))) {
            let form = source.form(tensor.role, &tensor.shape)?;
            let (elements, bytes) = (elements(of_rank), form.bytes(&of_rank.shape));
            weight_bytes = weight_bytes.saturating_add(bytes);
            if is_converted(tensor.role, form) {
                dense = [dense[0].saturating_add(elements), dense[1].saturating_add(bytes)];
            }
            let name = form.to_string();
            let format = formats.entry(name.clone()).or_insert(StoredFormat { name, parameters: 0, bytes: 0 });
            format.parameters = format.parameters.saturating_add(elements);
            format.bytes = format.bytes.saturating_add(bytes);
        }
        let mut formats: Vec<StoredFormat> = formats.into_values().collect();
        formats.sort_by_key(|format| std::cmp::Reverse(format.bytes));
        Ok(Inspection { config, parameters, weight_bytes, formats, local, ranks, dense, drafter: None })
    }

    /// Counts the memory of a drafter, too: its tensors and its own layer. `files` as in
    /// [`Model::with_drafter`](crate::Model::with_drafter).
    ///
    /// # Errors
    /// `NotADrafter` for files without a drafter; otherwise as [`Inspection::open`].
    pub fn with_drafter(self, files: &Files) -> Result<Inspection> {
        Ok(Inspection { drafter: Some(DraftMemory::read(files)?), ..self })
    }

    /// Bytes of the drafter's tensors; 0 without a drafter.
    pub fn drafter_bytes(&self, load: &LoadOptions) -> usize {
        self.drafter.as_ref().map_or(0, |drafter| drafter.weight_bytes(load))
    }

    fn draft_layer(&self, load: &LoadOptions) -> Option<CacheLayer> {
        self.drafter.as_ref()?.cache_layer(self.ranks, load)
    }

    /// Bytes of a pool for this model.
    ///
    /// # Errors
    /// `Kvant` for a codec that does not support the model's head sizes, or a size that overflows.
    pub fn cache_bytes(&self, options: &PoolOptions, load: &LoadOptions) -> Result<usize> {
        let draft = self.draft_layer(load);
        Ok(pool_spec(&self.local, options, load.pass_tokens, load.activations, draft)?.bytes)
    }

    /// Bytes of the keys and values in a pool for this model: [`Inspection::cache_bytes`] without states.
    ///
    /// # Errors
    /// As [`Inspection::cache_bytes`].
    pub fn key_value_bytes(&self, options: &PoolOptions, load: &LoadOptions) -> Result<usize> {
        Ok(pool_spec_with(
            &self.local,
            options,
            load.pass_tokens,
            load.activations,
            (self.draft_layer(load), Vec::new()),
        )?
        .bytes)
    }

    /// Bytes of the states of one sequence in all recurrent layers; 0 if the model has none.
    pub fn state_bytes(&self, load: &LoadOptions) -> usize {
        let bytes = |state: kvant::StateLayer| {
            state.shape.iter().fold(state.dtype.size(), |bytes, &size| bytes.saturating_mul(size))
        };
        self.local.states(load.activations).into_iter().map(bytes).fold(0, usize::saturating_add)
    }

    /// Memory for the model and a pool. Kernels and internal tables of the device are not included.
    ///
    /// # Errors
    /// As [`Inspection::cache_bytes`].
    pub fn memory(&self, pool: &PoolOptions, load: &LoadOptions) -> Result<MemoryEstimate> {
        let spec = &self.local;
        let rows = load.pass_tokens.min(pool.longest);
        let scratch = workspace_bytes(spec, self.ranks, load.activations, rows);
        let scratch = scratch.saturating_add(delta_net_bytes(spec, load, rows));
        let scratch = scratch.saturating_add(spec.vocab_size.saturating_mul(DType::F32.size()));
        let [elements, bytes] = self.dense;
        let converted = load.dense_weights.map_or(bytes, |dtype| elements.saturating_mul(dtype.size()));
        let weights = self.weight_bytes.saturating_sub(bytes).saturating_add(converted);
        let weights = weights.saturating_add(self.drafter_bytes(load));
        Ok(MemoryEstimate { weights, cache: self.cache_bytes(pool, load)?, scratch })
    }

    /// Maximum length of the sequences of `pool` that fit into `bytes` together with the weights, in whole pages and at
    /// most `pool.longest`. `None` if not even one page fits.
    ///
    /// # Errors
    /// As [`Inspection::cache_bytes`].
    pub fn longest_in(&self, bytes: usize, pool: &PoolOptions, load: &LoadOptions) -> Result<Option<usize>> {
        let fits = |pages: usize| {
            let longest = pages.saturating_mul(pool.page_tokens).min(pool.longest);
            Ok::<_, crate::Error>(self.memory(&PoolOptions { longest, ..pool.clone() }, load)?.total() <= bytes)
        };
        let (mut fit, mut first_not) = (0, pool.longest.div_ceil(pool.page_tokens.max(1)).saturating_add(1));
        while first_not - fit > 1 {
            let middle = fit + (first_not - fit) / 2;
            if fits(middle)? { fit = middle } else { first_not = middle }
        }
        Ok((fit > 0).then(|| fit.saturating_mul(pool.page_tokens).min(pool.longest)))
    }
}

/// Maximum bytes that the delta nets of a pass need between their kernels. They run one after the other.
fn delta_net_bytes(spec: &DecoderSpec, load: &LoadOptions, rows: usize) -> usize {
    let of_block = |block: &BlockSpec| match &block.mixer {
        MixerSpec::DeltaNet(net) => net.rule_shape(load.activations).max_scratch_bytes(load.device, rows),
        MixerSpec::Attention(_) | MixerSpec::ShortConv(_) => 0,
    };
    spec.blocks.iter().map(of_block).max().unwrap_or(0)
}

/// A tensor that the loader reads.
struct Stored {
    role: Role,
    shape: Vec<usize>,
    is_matrix: bool,
}

/// The embedding, and the rows of it that each of `ranks` devices has once more as the output matrix.
fn output_part(spec: &DecoderSpec, source: &dyn Source, ranks: usize) -> Option<[Stored; 2]> {
    let rows = output_rows(spec.vocab_size, ranks);
    let of = |rows| Stored { role: Role::Embedding, shape: vec![rows, spec.hidden_size], is_matrix: true };
    let has_part = rows != spec.vocab_size && !has_output(spec.output, source);
    has_part.then(|| [of(spec.vocab_size), of(rows)])
}

/// The tensors of a decoder, or of the part of it that each of `ranks` devices has. A bias has the role of its matrix.
fn tensors(spec: &DecoderSpec, source: &dyn Source, ranks: usize) -> Vec<Stored> {
    let h = spec.hidden_size;
    let mut list = List(Vec::new());
    list.matrix(Role::Embedding, &[spec.vocab_size, h]);
    list.vector(Role::FinalNorm, &[h]);
    if has_output(spec.output, source) {
        list.matrix(Role::Output, &[output_rows(spec.vocab_size, ranks), h]);
    }
    if let Some(inputs) = spec.per_layer_input {
        let width = spec.blocks.len() * inputs.size;
        list.matrix(Role::PerLayerTable, &[inputs.vocab_size, width]);
        list.matrix(Role::PerLayerProjection, &[width, h]);
        list.vector(Role::PerLayerProjectionNorm, &[inputs.size]);
    }
    for (l, block) in spec.blocks.iter().enumerate() {
        let mut list = InBlock { list: &mut list, l };
        for part in [Part::AttentionNorm, Part::FeedForwardNorm] {
            list.vector_if(block.pre_norms, part, &[h]);
        }
        match &block.mixer {
            MixerSpec::Attention(spec) => list.attention(spec, h, source),
            MixerSpec::DeltaNet(spec) => list.delta_net(spec, h, source),
            MixerSpec::ShortConv(spec) => list.short_conv(spec, h),
        }
        list.feed_forward(&block.feed_forward, h, source);
        for part in [Part::AttentionPostNorm, Part::FeedForwardPostNorm] {
            list.vector_if(block.post_norms, part, &[h]);
        }
        list.vector_if(block.scalar, Part::Scalar, &[1]);
        if let Some(inputs) = spec.per_layer_input {
            list.matrix(Part::PerLayerGate, &[inputs.size, h], false);
            list.matrix(Part::PerLayerOutput, &[h, inputs.size], false);
            list.vector_if(true, Part::PerLayerPostNorm, &[h]);
        }
    }
    list.0
}

struct List(Vec<Stored>);

impl List {
    fn matrix(&mut self, role: Role, shape: &[usize]) {
        self.0.push(Stored { role, shape: shape.to_vec(), is_matrix: true });
    }

    fn vector(&mut self, role: Role, shape: &[usize]) {
        self.0.push(Stored { role, shape: shape.to_vec(), is_matrix: false });
    }
}

/// The tensors of one block.
struct InBlock<'a> {
    list: &'a mut List,
    l: usize,
}

impl InBlock<'_> {
    fn matrix(&mut self, part: Part, shape: &[usize], is_biased: bool) {
        let role = Role::Block(self.l, part);
        self.list.matrix(role, shape);
        if is_biased {
            self.list.vector(role, &shape[..shape.len() - 1]);
        }
    }

    fn vector_if(&mut self, wanted: bool, part: Part, shape: &[usize]) {
        if wanted {
            self.list.vector(Role::Block(self.l, part), shape);
        }
    }

    /// Matrices with common inputs, which some files fuse.
    fn stack(&mut self, fused: Part, parts: &[(Part, usize)], h: usize, is_biased: bool, source: &dyn Source) {
        if source.name(Role::Block(self.l, fused)).is_some() {
            let outputs = parts.iter().map(|(_, outputs)| outputs).sum();
            return self.matrix(fused, &[outputs, h], is_biased);
        }
        for (part, outputs) in parts {
            self.matrix(*part, &[*outputs, h], is_biased);
        }
    }

    fn attention(&mut self, spec: &AttentionSpec, h: usize, source: &dyn Source) {
        let (q, kv) = (spec.q_width(), spec.kv_width());
        let joint = source.name(Role::Block(self.l, Part::QueryGateJoint)).filter(|_| spec.output_gate);
        if joint.is_some() {
            self.matrix(Part::QueryGateJoint, &[2 * q, h], spec.qkv_bias);
            self.matrix(Part::Key, &[kv, h], spec.qkv_bias);
            self.matrix(Part::Value, &[kv, h], spec.qkv_bias);
        } else {
            let qkv = [(Part::Query, q), (Part::Key, kv), (Part::Value, kv)];
            self.stack(Part::QueryKeyValue, &qkv[..1 + spec.kv_projections()], h, spec.qkv_bias, source);
        }
        for (part, width) in [Part::QueryNorm, Part::KeyNorm].into_iter().zip(spec.qk_norm_widths()) {
            width.into_iter().for_each(|width| self.vector_if(true, part, &[width]));
        }
        self.vector_if(spec.sinks, Part::Sinks, &[spec.heads]);
        if spec.output_gate && joint.is_none() {
            self.matrix(Part::AttentionGate, &[q, h], false);
        }
        self.matrix(Part::AttentionOutput, &[h, q], spec.output_bias);
    }

    fn delta_net(&mut self, spec: &DeltaNetSpec, h: usize, source: &dyn Source) {
        let outputs = spec.projections();
        for (i, joint) in [Part::DeltaJoint, Part::DeltaGatesJoint].into_iter().enumerate() {
            let of_pair = 2 * i..2 * i + 2;
            if source.name(Role::Block(self.l, joint)).is_some() {
                self.matrix(joint, &[outputs[of_pair].iter().sum(), h], false);
                continue;
            }
            of_pair.for_each(|part| self.matrix(DELTA_PROJECTIONS[part], &[outputs[part], h], false));
        }
        self.vector_if(true, Part::ConvTaps, &[spec.channels(), spec.taps]);
        for part in [Part::DeltaRate, Part::DeltaABias] {
            self.vector_if(true, part, &[spec.value_heads]);
        }
        self.vector_if(true, Part::DeltaNorm, &[spec.value_dim]);
        self.matrix(Part::DeltaOutput, &[h, spec.value_width()], false);
    }

    fn short_conv(&mut self, spec: &ShortConvSpec, h: usize) {
        let ShortConvSpec { channels, taps, biases } = *spec;
        self.matrix(Part::ConvInput, &[3 * channels, h], biases);
        self.vector_if(true, Part::ConvTaps, &[channels, taps]);
        self.vector_if(biases, Part::ConvTaps, &[channels]);
        self.matrix(Part::ConvOutput, &[h, channels], biases);
    }

    fn feed_forward(&mut self, spec: &FeedForwardSpec, h: usize, source: &dyn Source) {
        if let Some(DenseSpec { width, biases, .. }) = spec.dense() {
            let [fused, gate, up, down] = Part::of_dense(spec);
            self.stack(fused, &[(gate, width), (up, width)], h, biases, source);
            self.matrix(down, &[h, width], biases);
        }
        if let Some(moe) = spec.moe() {
            self.moe(&moe, h, source);
        }
        match spec.parallel_sum() {
            None | Some(ParallelSum::Plain) => {}
            Some(ParallelSum::Gated) => self.matrix(Part::SharedRouter, &[1, h], false),
            Some(ParallelSum::Normed) => {
                for part in [Part::DensePostNorm, Part::ExpertsNorm, Part::ExpertsPostNorm] {
                    self.vector_if(true, part, &[h]);
                }
            }
        }
    }

    fn moe(&mut self, spec: &MoeSpec, h: usize, source: &dyn Source) {
        let MoeSpec { experts, width, biases, .. } = *spec;
        let is_scaled = spec.router == RouterSpec::Scaled;
        self.matrix(Part::Router, &[experts, h], biases);
        self.vector_if(is_scaled, Part::RouterNorm, &[h]);
        self.vector_if(is_scaled, Part::ExpertScale, &[experts]);
        let bias = Role::Block(self.l, Part::RouterBias);
        self.vector_if(has_router_bias(spec.routing.bias, bias, source), Part::RouterBias, &[experts]);
        if source.name(Role::Block(self.l, Part::ExpertGateUp)).is_some() {
            self.matrix(Part::ExpertGateUp, &[experts, 2 * width, h], biases);
        } else {
            self.matrix(Part::ExpertGate, &[experts, width, h], biases);
            self.matrix(Part::ExpertUp, &[experts, width, h], biases);
        }
        self.matrix(Part::ExpertDown, &[experts, h, width], biases);
    }
}

impl std::fmt::Display for Form {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Form::Dense(dtype) => dtype.fmt(f),
            Form::Affine { bits, group, .. } => write!(f, "{bits} bit, group {group}"),
            Form::Blocks(format) => format.fmt(f),
            Form::Floats { format, .. } => write!(f, "{format}"),
        }
    }
}
