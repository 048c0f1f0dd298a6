//! Loads the tensors that a description requires, each rank its part.

use kvant::{DType, Device, Tensor};

use super::*;
use crate::{
    Error, Result,
    cut::{Cut, Share, of_rank, output_rows},
    source::{Form, Part},
    spec::{AttentionSpec, BlockSpec, FeedForwardSpec, MoeSpec, ParallelSum, PerLayerInputSpec, QkNorm, RouterSpec},
};

mod mixers;

pub(crate) use mixers::DELTA_PROJECTIONS;

impl Weights {
    /// Reads only the tensors that the description requires: image and audio encoders stay in the file.
    /// `local` is the part of each rank of the device.
    pub(crate) fn load(
        spec: &DecoderSpec,
        local: &DecoderSpec,
        source: &dyn Source,
        device: &Device,
    ) -> Result<Weights> {
        spec.check()?;
        let mut loader = Loader { spec, local, source, device, first_inputs: spec.hidden_size, bytes: 0 };
        let embed = loader.matrix(Role::Embedding, &[spec.vocab_size, spec.hidden_size], &Cut::Whole)?;
        let output = loader.output()?;
        loader.finish(embed, output)
    }

    /// Like [`Weights::load`], for a decoder that shares matrices with another one.
    pub(crate) fn load_with(
        spec: &DecoderSpec,
        local: &DecoderSpec,
        source: &dyn Source,
        device: &Device,
        shared: SharedMatrices,
    ) -> Result<Weights> {
        spec.check()?;
        let SharedMatrices { embed, output, first_inputs } = shared;
        let mut loader = Loader { spec, local, source, device, first_inputs, bytes: 0 };
        let output = match output {
            Some(output) => Some(output),
            None => loader.output()?,
        };
        loader.finish(embed, output)
    }
}

/// The parts of a decoder that are not its own, or not as its description says.
pub(crate) struct SharedMatrices {
    pub embed: Matrix,
    /// `None`: as the description says.
    pub output: Option<Matrix>,
    /// Inputs of the first block's queries, keys and values.
    pub first_inputs: usize,
}

impl Loader<'_> {
    /// Loads everything except the embedding and the output matrix.
    fn finish(mut self, embed: Matrix, output: Option<Matrix>) -> Result<Weights> {
        let spec = self.spec;
        let loader = &mut self;
        let norm = loader.shifted(Role::FinalNorm, spec.hidden_size, spec.final_norm_offset)?;
        let per_layer = spec.per_layer_input.map(|inputs| loader.per_layer(inputs)).transpose()?;
        let blocks = (0..spec.blocks.len()).map(|l| loader.block(l)).collect::<Result<_>>()?;
        Ok(Weights { embed, norm, output, per_layer, blocks, bytes: loader.bytes })
    }
}

impl StackBiases {
    /// `whole` are the biases of matrices with these numbers of outputs.
    fn new(whole: Tensor, outputs: &[usize]) -> Result<StackBiases> {
        let mut end = 0;
        let part = |&outputs: &usize| {
            end += outputs;
            Ok(whole.rows(end - outputs..end)?)
        };
        let parts = outputs.iter().map(part).collect::<Result<_>>()?;
        Ok(StackBiases { whole, parts })
    }
}

struct Loader<'a> {
    spec: &'a DecoderSpec,
    /// The part of each rank.
    local: &'a DecoderSpec,
    source: &'a dyn Source,
    device: &'a Device,
    /// Inputs of the first block's queries, keys and values.
    first_inputs: usize,
    bytes: usize,
}

impl Loader<'_> {
    /// If the embedding is also the output matrix but the file contains both, they must be equal. Otherwise,
    /// transformers uses the second one regardless.
    fn output(&mut self) -> Result<Option<Matrix>> {
        let shape = [self.spec.vocab_size, self.spec.hidden_size];
        let cut = self.vocabulary_cut();
        if has_output(self.spec.output, self.source) {
            return self.matrix(Role::Output, &shape, &cut).map(Some);
        }
        if self.source.has(Role::Output) && !self.source.same(Role::Output, Role::Embedding)? {
            return Err(Error::TensorValue {
                name: self.source.name(Role::Output).unwrap_or_default(),
                expected: "a copy of the embedding, because tie_word_embeddings is true or absent",
                got: "different values or parts".to_string(),
            });
        }
        // A rank embeds every token, and computes some of the logits.
        (cut != Cut::Whole).then(|| self.matrix(Role::Embedding, &shape, &cut)).transpose()
    }

    /// The division of the output matrix.
    fn vocabulary_cut(&self) -> Cut {
        let (vocab, ranks) = (self.spec.vocab_size, self.device.ranks());
        let rows = output_rows(vocab, ranks);
        if rows == vocab { Cut::Whole } else { Cut::Outputs(vec![self.share(vocab, rows)]) }
    }

    /// `local` of `whole` elements on each rank.
    fn share(&self, whole: usize, local: usize) -> Share {
        Share::new(whole, local, self.device.ranks())
    }

    fn per_layer(&mut self, inputs: PerLayerInputSpec) -> Result<PerLayerWeights> {
        let width = self.spec.blocks.len() * inputs.size;
        Ok(PerLayerWeights {
            embed: self.matrix(Role::PerLayerTable, &[inputs.vocab_size, width], &Cut::Whole)?,
            projection: self.matrix(Role::PerLayerProjection, &[width, self.spec.hidden_size], &Cut::Whole)?,
            norm: self.norm(Role::PerLayerProjectionNorm, inputs.size)?,
        })
    }

    fn block(&mut self, l: usize) -> Result<BlockWeights> {
        let (h, block) = (self.spec.hidden_size, &self.spec.blocks[l]);
        let role = |part| Role::Block(l, part);
        Ok(BlockWeights {
            mixer_norm: self.norm_if(block.pre_norms.then_some(h), role(Part::AttentionNorm))?,
            mixer: self.mixer(l, &block.mixer)?,
            mixer_post_norm: self.norm_if(block.post_norms.then_some(h), role(Part::AttentionPostNorm))?,
            feed_forward: self.feed_forward(l, block)?,
            per_layer: match self.spec.per_layer_input {
                Some(inputs) => Some(LayerInputWeights {
                    gate: self.matrix(role(Part::PerLayerGate), &[inputs.size, h], &Cut::Whole)?,
                    output: self.matrix(role(Part::PerLayerOutput), &[h, inputs.size], &Cut::Whole)?,
                    norm: self.norm(role(Part::PerLayerPostNorm), h)?,
                }),
                None => None,
            },
            scalar: if block.scalar { self.scalar(role(Part::Scalar))? } else { 1.0 },
        })
    }

    fn attention(&mut self, l: usize, spec: &AttentionSpec) -> Result<AttentionWeights> {
        let h = self.spec.hidden_size;
        let inputs = if l == 0 { self.first_inputs } else { h };
        let local = self.local.blocks[l].attention().unwrap_or(spec);
        let role = |part| Role::Block(l, part);
        let (q, kv) = (spec.q_width(), spec.kv_width());
        let (queries, keys) = (self.share(q, local.q_width()), self.share(kv, local.kv_width()));
        let qkv = [(Part::Query, queries), (Part::Key, keys), (Part::Value, keys)];
        let qkv = qkv.map(|(part, share)| (role(part), share));
        let [q_norm, k_norm] = spec.qk_norm_widths();
        let gate = Cut::Outputs(vec![queries]);
        let (qkv, output_gate) = match self.source.name(role(Part::QueryGateJoint)) {
            Some(_) if spec.output_gate => {
                let (qkv, gate) = self.gated_queries(l, spec, local)?;
                (qkv, Some(gate))
            }
            _ => {
                let projections = &qkv[..1 + spec.kv_projections()];
                let qkv = self.stack(Some(role(Part::QueryKeyValue)), projections, inputs, spec.qkv_bias)?;
                let gate = match spec.output_gate {
                    true => Some(self.matrix(role(Part::AttentionGate), &[q, inputs], &gate)?),
                    false => None,
                };
                (qkv, gate)
            }
        };
        Ok(AttentionWeights {
            qkv,
            q_norm: self.norm_if(q_norm, role(Part::QueryNorm))?,
            k_norm: match local.position_ranks {
                1 => self.key_norm(k_norm, role(Part::KeyNorm), spec.qk_norm, keys)?,
                _ => self.norm_if(k_norm, role(Part::KeyNorm))?,
            },
            sinks: if spec.sinks { Some(self.sinks(role(Part::Sinks), spec.heads, local.heads)?) } else { None },
            output_gate,
            output: self.output_projection(role(Part::AttentionOutput), &[h, q], spec.output_bias, &[queries])?,
        })
    }

    /// The norm of keys. A norm over all heads reads the gathered keys of all ranks; ranks that share a KV head repeat
    /// its keys, so the weights are repeated, too.
    fn key_norm(&self, len: Option<usize>, role: Role, norm: Option<QkNorm>, keys: Share) -> Result<Option<Tensor>> {
        let weights = self.norm_if(len, role)?;
        let (Some(weights), Some(QkNorm::Rows), true) = (&weights, norm, keys.copies > 1) else { return Ok(weights) };
        let (weights, mut part, mut repeated) = (weights.to_f32()?, Vec::new(), Vec::new());
        for rank in 0..self.device.ranks() {
            of_rank(&weights, &[keys], rank, &mut part);
            repeated.extend_from_slice(&part);
        }
        Ok(Some(Tensor::from_slice(self.device, &repeated, &[repeated.len()])?))
    }

    fn sinks(&self, role: Role, heads: usize, local: usize) -> Result<Tensor> {
        self.divided(&self.finite(role, heads)?, &[local], &[self.share(heads, local)])
    }

    fn feed_forward(&mut self, l: usize, block: &BlockSpec) -> Result<FeedForwardWeights> {
        let h = self.spec.hidden_size;
        let spec = &block.feed_forward;
        let role = |part| Role::Block(l, part);
        Ok(FeedForwardWeights {
            norm: self.norm_if(block.pre_norms.then_some(h), role(Part::FeedForwardNorm))?,
            dense: self.dense(l, spec)?,
            moe: spec.moe().map(|moe| self.moe(l, moe)).transpose()?,
            parallel: match spec.parallel_sum() {
                None => None,
                Some(ParallelSum::Plain) => Some(ParallelWeights::Plain),
                Some(ParallelSum::Gated) => {
                    Some(ParallelWeights::Gated(self.matrix(role(Part::SharedRouter), &[1, h], &Cut::Whole)?))
                }
                Some(ParallelSum::Normed) => Some(ParallelWeights::Normed(ParallelNorms {
                    after_dense: self.norm(role(Part::DensePostNorm), h)?,
                    before_experts: self.norm(role(Part::ExpertsNorm), h)?,
                    after_experts: self.norm(role(Part::ExpertsPostNorm), h)?,
                })),
            },
            post_norm: self.norm_if(block.post_norms.then_some(h), role(Part::FeedForwardPostNorm))?,
        })
    }

    fn dense(&mut self, l: usize, spec: &FeedForwardSpec) -> Result<Option<DenseWeights>> {
        let Some(dense) = spec.dense() else { return Ok(None) };
        let local = self.local.blocks[l].feed_forward.dense().map_or(dense.width, |local| local.width);
        let (h, share) = (self.spec.hidden_size, self.share(dense.width, local));
        let [fused, gate, up, down] = Part::of_dense(spec).map(|part| Role::Block(l, part));
        Ok(Some(DenseWeights {
            gate_up: self.stack(Some(fused), &[(gate, share), (up, share)], h, dense.biases)?,
            down: self.output_projection(down, &[h, dense.width], dense.biases, &[share])?,
        }))
    }

    fn moe(&mut self, l: usize, spec: MoeSpec) -> Result<MoeWeights> {
        let h = self.spec.hidden_size;
        let MoeSpec { experts, width, biases, .. } = spec;
        let local = self.local.blocks[l].feed_forward.moe().map_or(width, |local| local.width);
        let share = self.share(width, local);
        let role = |part| Role::Block(l, part);
        let router_scales = match spec.router {
            RouterSpec::Plain => None,
            RouterSpec::Scaled => {
                let factors = self.vector(role(Part::ExpertScale), experts)?.to_f32()?;
                let factors = Tensor::from_slice(self.device, &factors, &[experts])?;
                Some((self.norm(role(Part::RouterNorm), h)?, factors))
            }
        };
        Ok(MoeWeights {
            router: self.projection(role(Part::Router), &[experts, h], biases, &Cut::Whole)?,
            router_scales,
            router_bias: self.router_bias(role(Part::RouterBias), spec)?,
            gate_up: self.expert_gate_up(l, spec, share)?,
            down: self.output_projection(role(Part::ExpertDown), &[experts, h, width], biases, &[share])?,
        })
    }

    fn router_bias(&self, role: Role, spec: MoeSpec) -> Result<Option<Tensor>> {
        let is_stored = has_router_bias(spec.routing.bias, role, self.source);
        is_stored.then(|| self.finite_tensor(role, spec.experts)).transpose()
    }

    /// The gate and up matrices of every expert. Separate ones of equal format are joined.
    fn expert_gate_up(&mut self, l: usize, spec: MoeSpec, share: Share) -> Result<GateUp> {
        let h = self.spec.hidden_size;
        let MoeSpec { experts, width, biases, .. } = spec;
        let [both, gate, up] = [Part::ExpertGateUp, Part::ExpertGate, Part::ExpertUp].map(|part| Role::Block(l, part));
        if self.source.name(both).is_some() {
            let cut = self.outputs_cut(&[share, share]);
            return Ok(GateUp::Fused(self.projection(both, &[experts, 2 * width, h], biases, &cut)?));
        }
        let shape = [experts, width, h];
        let form = self.source.form(gate, &shape)?;
        if form != self.source.form(up, &shape)? {
            let cut = self.outputs_cut(&[share]);
            let mut projection = |role| self.projection(role, &shape, biases, &cut);
            return Ok(GateUp::Split { gate: projection(gate)?, up: projection(up)? });
        }
        let bias = if biases { Some(self.joined_expert_biases([gate, up], experts, share)?) } else { None };
        Ok(GateUp::Fused(Projection { matrix: self.joined_experts([gate, up], form, shape, share)?, bias }))
    }

    /// Joins two matrices `[E, I, H]` to one of `[E, 2I, H]`. While one of them is moved, it exists twice.
    fn joined_experts(&mut self, roles: [Role; 2], form: Form, shape: [usize; 3], share: Share) -> Result<Matrix> {
        let ([experts, _, h], width) = (shape, share.local);
        let cut = self.outputs_cut(&[share]);
        let whole = Matrix::zeros(form, &[experts, 2 * width, h], self.device)?;
        for (role, first) in roles.into_iter().zip([0, width]) {
            let part = Matrix::zeros(form, &cut.shape(&shape), self.device)?;
            self.read(role, (form, &shape), &cut, &part)?;
            let mut enc = self.device.encoder()?;
            for expert in 0..experts {
                part.expert(expert)?.copy_to(&mut enc, &whole.expert(expert)?.rows(first..first + width)?)?;
            }
            enc.commit()?.wait()?;
        }
        self.bytes += whole.bytes();
        Ok(whole)
    }

    /// Joins two biases `[E, I]` to one of `[E, 2I]`, f32.
    fn joined_expert_biases(&self, roles: [Role; 2], experts: usize, share: Share) -> Result<Tensor> {
        let width = share.whole;
        let read = |role| self.bias_values(role, &[experts, width]);
        let [gate, up] = [read(roles[0])?, read(roles[1])?];
        let rows = gate.chunks(width.max(1)).zip(up.chunks(width.max(1)));
        let joined: Vec<f32> = rows.flat_map(|(gate, up)| gate.iter().chain(up).copied()).collect();
        self.divided(&joined, &[experts, 2 * share.local], &[share, share])
    }

    /// The numbers of a bias.
    fn bias_values(&self, role: Role, shape: &[usize]) -> Result<Vec<f32>> {
        Ok(self.source.bias(role, shape, &Device::cpu())?.to_f32()?)
    }

    /// A division by outputs; none on a single device.
    fn outputs_cut(&self, shares: &[Share]) -> Cut {
        if self.device.ranks() == 1 { Cut::Whole } else { Cut::Outputs(shares.to_vec()) }
    }

    /// Uploads rows that consist of `shares`: each rank gets its part, as f32 of this shape.
    fn divided(&self, rows: &[f32], shape: &[usize], shares: &[Share]) -> Result<Tensor> {
        self.by_rank(shape, |rank| {
            let mut part = Vec::new();
            of_rank(rows, shares, rank, &mut part);
            part
        })
    }

    /// A tensor of f32 whose numbers depend on the rank.
    fn by_rank(&self, shape: &[usize], numbers: impl Fn(usize) -> Vec<f32>) -> Result<Tensor> {
        let bytes = |rank| Ok(numbers(rank).into_iter().flat_map(f32::to_le_bytes).collect::<Vec<u8>>());
        Tensor::from_rank_bytes(self.device, DType::F32, shape, bytes)
    }

    fn vector(&self, role: Role, len: usize) -> Result<Tensor> {
        self.source.vector(role, len, self.device)
    }

    /// The weights of a block's norm, including the offset.
    fn norm(&self, role: Role, len: usize) -> Result<Tensor> {
        self.shifted(role, len, self.spec.norm_offset)
    }

    /// The weights of a norm plus an offset. With an offset they are f32, so that 1 + w is not rounded.
    fn shifted(&self, role: Role, len: usize, offset: f32) -> Result<Tensor> {
        shifted(self.source, role, len, offset, self.device)
    }

    /// A norm of this length, if any.
    fn norm_if(&self, len: Option<usize>, role: Role) -> Result<Option<Tensor>> {
        len.map(|len| self.norm(role, len)).transpose()
    }

    /// The value of a `[1]` tensor.
    fn scalar(&self, role: Role) -> Result<f32> {
        Ok(self.finite(role, 1)?[0])
    }

    /// A vector of finite numbers, f32.
    fn finite_tensor(&self, role: Role, len: usize) -> Result<Tensor> {
        Ok(Tensor::from_slice(self.device, &self.finite(role, len)?, &[len])?)
    }

    /// The values of a vector, which must be finite.
    fn finite(&self, role: Role, len: usize) -> Result<Vec<f32>> {
        let values = self.vector(role, len)?.to_f32()?;
        match values.iter().find(|value| !value.is_finite()) {
            Some(value) => {
                let name = self.source.name(role).unwrap_or_default();
                Err(Error::TensorValue { name, expected: "finite numbers", got: value.to_string() })
            }
            None => Ok(values),
        }
    }

    /// A matrix, with a bias for each output if `is_biased`.
    fn projection(&mut self, role: Role, shape: &[usize], is_biased: bool, cut: &Cut) -> Result<Projection> {
        let outputs = &shape[..shape.len() - 1];
        let bias = match (is_biased, cut) {
            (false, _) => None,
            (true, Cut::Outputs(shares)) => {
                let local = cut.shape(shape);
                Some(self.divided(&self.bias_values(role, outputs)?, &local[..outputs.len()], shares)?)
            }
            (true, _) => Some(self.source.bias(role, outputs, self.device)?),
        };
        Ok(Projection { matrix: self.matrix(role, shape, cut)?, bias })
    }

    /// The last projection of half a block. The factor of the residual stream is part of the stored bias; each product
    /// applies it to the matrix. The ranks' results are summed, so only rank 0 adds the bias.
    fn output_projection(
        &mut self,
        role: Role,
        shape: &[usize],
        is_biased: bool,
        inputs: &[Share],
    ) -> Result<Projection> {
        let ranks = self.device.ranks();
        let cut = if ranks == 1 { Cut::Whole } else { Cut::Inputs(inputs.to_vec()) };
        let mut projection = self.projection(role, shape, is_biased, &cut)?;
        let scale = self.spec.residual_scale;
        if let Some(bias) = projection.bias.as_mut().filter(|_| scale != 1.0 || ranks > 1) {
            let scaled: Vec<f32> = bias.to_f32()?.iter().map(|b| b * scale).collect();
            let of_rank = |rank| if rank == 0 { scaled.clone() } else { vec![0.0; scaled.len()] };
            *bias = self.by_rank(bias.shape(), of_rank)?;
        }
        Ok(projection)
    }

    fn matrix(&mut self, role: Role, shape: &[usize], cut: &Cut) -> Result<Matrix> {
        let form = self.source.form(role, shape)?;
        let matrix = Matrix::zeros(form, &cut.shape(shape), self.device)?;
        self.read(role, (form, shape), cut, &matrix)?;
        self.bytes += matrix.bytes();
        Ok(matrix)
    }

    /// Reads each rank's part of a matrix.
    fn read(&self, role: Role, (form, shape): (Form, &[usize]), cut: &Cut, to: &Matrix) -> Result<()> {
        self.source.read(role, &to.destination(form, shape, cut)?)
    }

    /// Matrices with common inputs. Some files have one matrix, `fused`, instead.
    fn stack(&mut self, fused: Option<Role>, roles: &[(Role, Share)], inputs: usize, is_biased: bool) -> Result<Stack> {
        if let Some(fused) = fused.filter(|fused| self.source.name(*fused).is_some()) {
            return self.fused_stack(fused, roles, inputs, is_biased);
        }
        let biases = if is_biased { Some(self.stack_biases(roles)?) } else { None };
        let forms = roles.iter().map(|&(role, share)| self.source.form(role, &[share.whole, inputs]));
        let forms: Vec<Form> = forms.collect::<Result<_>>()?;
        if roles.len() == 1 || forms.iter().any(|form| *form != forms[0]) {
            let parts = roles.iter().map(|&(role, share)| {
                let cut = self.outputs_cut(&[share]);
                self.matrix(role, &[share.whole, inputs], &cut)
            });
            return Ok(Stack { matrices: StackMatrices::Separate(parts.collect::<Result<_>>()?), biases });
        }
        let parts = outputs(roles);
        let whole = Matrix::zeros(forms[0], &[parts.iter().sum(), inputs], self.device)?;
        let mut first = 0;
        for &(role, share) in roles {
            let (cut, to) = (self.outputs_cut(&[share]), whole.rows(first..first + share.local)?);
            self.read(role, (forms[0], &[share.whole, inputs]), &cut, &to)?;
            first += share.local;
        }
        self.bytes += whole.bytes();
        Ok(Stack { matrices: StackMatrices::Joined(Box::new(whole), parts), biases })
    }

    /// Loads a stack that is one matrix in the file.
    fn fused_stack(&mut self, role: Role, roles: &[(Role, Share)], inputs: usize, is_biased: bool) -> Result<Stack> {
        let shares: Vec<Share> = roles.iter().map(|(_, share)| *share).collect();
        let whole = shares.iter().map(|share| share.whole).sum();
        let biases = match is_biased {
            true => Some(self.divided_biases(&self.bias_values(role, &[whole])?, &shares)?),
            false => None,
        };
        let cut = self.outputs_cut(&shares);
        let matrix = self.matrix(role, &[whole, inputs], &cut)?;
        Ok(Stack { matrices: StackMatrices::Joined(Box::new(matrix), outputs(roles)), biases })
    }

    fn stack_biases(&self, roles: &[(Role, Share)]) -> Result<StackBiases> {
        let mut all = Vec::new();
        for &(role, share) in roles {
            all.extend(self.bias_values(role, &[share.whole])?);
        }
        self.divided_biases(&all, &roles.iter().map(|(_, share)| *share).collect::<Vec<_>>())
    }

    fn divided_biases(&self, all: &[f32], shares: &[Share]) -> Result<StackBiases> {
        let parts: Vec<usize> = shares.iter().map(|share| share.local).collect();
        StackBiases::new(self.divided(all, &[parts.iter().sum()], shares)?, &parts)
    }
}

/// A vector plus an offset. With an offset it is f32.
pub(crate) fn shifted(source: &dyn Source, role: Role, len: usize, offset: f32, device: &Device) -> Result<Tensor> {
    let weights = source.vector(role, len, device)?;
    if offset == 0.0 {
        return Ok(weights);
    }
    let shifted: Vec<f32> = weights.to_f32()?.iter().map(|w| w + offset).collect();
    Ok(Tensor::from_slice(device, &shifted, &[len])?)
}

/// A whole matrix.
pub(crate) fn whole_matrix(source: &dyn Source, role: Role, shape: &[usize], device: &Device) -> Result<Matrix> {
    let form = source.form(role, shape)?;
    let matrix = Matrix::zeros(form, shape, device)?;
    source.read(role, &matrix.destination(form, shape, &Cut::Whole)?)?;
    Ok(matrix)
}

/// The outputs of each matrix on a rank.
fn outputs(roles: &[(Role, Share)]) -> Vec<usize> {
    roles.iter().map(|(_, share)| share.local).collect()
}
