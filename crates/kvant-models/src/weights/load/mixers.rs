//! Loads the first halves of blocks that need more than plain matrices: joint matrices, delta nets, convolutions.

use kvant::{Device, Tensor};

use super::Loader;
use crate::{
    Result,
    cut::{Share, of_rank},
    source::{Form, Matrix, Part, Role},
    spec::{AttentionSpec, DeltaNetSpec, MixerSpec, ShortConvSpec},
    weights::{DeltaNetWeights, Mixer, ShortConvWeights, Stack, StackMatrices},
};

/// The projections of a delta net's input, as [`DeltaNetSpec::projections`] lists their outputs.
pub(crate) const DELTA_PROJECTIONS: [Part; 4] = [Part::DeltaQkv, Part::DeltaZ, Part::DeltaB, Part::DeltaA];

impl Loader<'_> {
    pub(super) fn mixer(&mut self, l: usize, spec: &MixerSpec) -> Result<Mixer> {
        Ok(match spec {
            MixerSpec::Attention(spec) => Mixer::Attention(self.attention(l, spec)?),
            MixerSpec::DeltaNet(spec) => Mixer::DeltaNet(self.delta_net(l, spec)?),
            MixerSpec::ShortConv(spec) => Mixer::ShortConv(self.short_conv(l, spec)?),
        })
    }

    fn delta_net(&mut self, l: usize, spec: &DeltaNetSpec) -> Result<DeltaNetWeights> {
        let (h, role) = (self.spec.hidden_size, |part| Role::Block(l, part));
        let local = match &self.local.blocks[l].mixer {
            MixerSpec::DeltaNet(local) => *local,
            MixerSpec::Attention(_) | MixerSpec::ShortConv(_) => *spec,
        };
        let keys = self.share(spec.key_heads * spec.key_dim, local.key_heads * local.key_dim);
        let (values, heads) = (self.value_shares(spec, &local, spec.value_dim), self.value_shares(spec, &local, 1));
        let channels = [&[keys; 2], &values[..]].concat();
        let projections = self.delta_projections(l, [spec, &local], &[&channels, &values, &heads, &heads])?;
        let rate = self.finite(role(Part::DeltaRate), spec.value_heads)?;
        let rate: Vec<f32> = match self.source.has_log_rates() {
            true => rate.into_iter().map(|log| -log.exp()).collect(),
            false => rate,
        };
        let a_bias = self.finite(role(Part::DeltaABias), spec.value_heads)?;
        Ok(DeltaNetWeights {
            projections,
            conv: self.taps(role(Part::ConvTaps), spec.taps, &channels)?,
            rate: self.divided(&rate, &[local.value_heads], &heads)?,
            a_bias: self.divided(&a_bias, &[local.value_heads], &heads)?,
            // This norm multiplies by its weights, even if the other norms multiply by 1 + w.
            norm: self.vector(role(Part::DeltaNorm), spec.value_dim)?,
            output: self.output_projection(role(Part::DeltaOutput), &[h, spec.value_width()], false, &values)?,
        })
    }

    /// The division of the value heads, each of `width` elements. A rank has the value heads of its key heads.
    fn value_shares(&self, spec: &DeltaNetSpec, local: &DeltaNetSpec, width: usize) -> Vec<Share> {
        match spec.tiled {
            // Tiled: the value heads form runs, and each run has one value head of every key head.
            true => {
                let share = self.share(spec.key_heads * width, local.key_heads * width);
                vec![share; spec.value_heads / spec.key_heads]
            }
            false => vec![self.share(spec.value_heads * width, local.value_heads * width)],
        }
    }

    /// The projections of a delta net, with shares of the outputs of each. Some files join qkv with z, or b with a, in
    /// a matrix with rows by key head.
    fn delta_projections(&mut self, l: usize, specs: [&DeltaNetSpec; 2], shares: &[&[Share]; 4]) -> Result<Stack> {
        let (h, [spec, local]) = (self.spec.hidden_size, specs);
        let [qkv, z, b, a] = spec.projections();
        let joint = |part| Some(Role::Block(l, part)).filter(|&role| self.source.name(role).is_some());
        let joint = [(joint(Part::DeltaJoint), qkv + z), (joint(Part::DeltaGatesJoint), b + a)];
        let roles = DELTA_PROJECTIONS.map(|part| Role::Block(l, part));
        let form = |i: usize| match joint[i / 2] {
            (Some(role), outputs) => self.source.form(role, &[outputs, h]),
            (None, _) => self.source.form(roles[i], &[spec.projections()[i], h]),
        };
        let forms = [form(0)?, form(1)?, form(2)?, form(3)?];
        let outputs = local.projections();
        let (matrices, parts) = self.zero_stack(&forms, &outputs)?;
        let keys = local.key_heads * local.key_dim;
        let (q, k) = (parts[0].rows(0..keys)?, parts[0].rows(keys..2 * keys)?);
        let v = parts[0].rows(2 * keys..outputs[0])?;
        let of_joint = [vec![q, k, v, parts[1].all()?], vec![parts[2].all()?, parts[3].all()?]];
        for (i, (role, whole)) in joint.into_iter().enumerate() {
            match role {
                Some(role) => {
                    let share = self.share(whole, whole / spec.key_heads * local.key_heads);
                    self.read_groups(role, share, local.key_heads, &of_joint[i])?;
                }
                None => (2 * i..2 * i + 2).try_for_each(|i| self.read_outputs(roles[i], shares[i], &parts[i]))?,
            }
        }
        Ok(Stack { matrices, biases: None })
    }

    /// The taps of a convolution whose channels consist of `shares`.
    fn taps(&self, role: Role, taps: usize, shares: &[Share]) -> Result<Tensor> {
        let channels = shares.iter().map(|share| share.whole).sum();
        if self.device.ranks() == 1 {
            return self.source.taps(role, [channels, taps], self.device);
        }
        let whole = self.source.taps(role, [channels, taps], &Device::cpu())?;
        let mut bytes = vec![0; whole.bytes()];
        whole.read_bytes(&mut bytes)?;
        let row = taps * whole.dtype().size();
        let of_bytes: Vec<Share> = shares.iter().map(|share| share.scaled(row, 1)).collect();
        let local = shares.iter().map(|share| share.local).sum();
        Tensor::from_rank_bytes(self.device, whole.dtype(), &[local, taps], |rank| {
            let mut part = Vec::new();
            of_rank(&bytes, &of_bytes, rank, &mut part);
            Ok::<_, crate::Error>(part)
        })
    }

    /// A stack of zeros, one matrix if all forms are equal, and its parts.
    fn zero_stack(&mut self, forms: &[Form], outputs: &[usize]) -> Result<(StackMatrices, Vec<Matrix>)> {
        let h = self.spec.hidden_size;
        if forms.iter().all(|form| *form == forms[0]) {
            let whole = Matrix::zeros(forms[0], &[outputs.iter().sum(), h], self.device)?;
            self.bytes += whole.bytes();
            let mut end = 0;
            let rows = outputs.iter().map(|&outputs| {
                end += outputs;
                whole.rows(end - outputs..end)
            });
            let parts = rows.collect::<Result<_>>()?;
            return Ok((StackMatrices::Joined(Box::new(whole), outputs.to_vec()), parts));
        }
        let parts = forms.iter().zip(outputs).map(|(&form, &outputs)| Matrix::zeros(form, &[outputs, h], self.device));
        let parts = parts.collect::<Result<Vec<_>>>()?;
        self.bytes += parts.iter().map(Matrix::bytes).sum::<usize>();
        Ok((StackMatrices::Separate(parts.iter().map(Matrix::all).collect::<Result<_>>()?), parts))
    }

    /// Queries and the gate of the output, whose rows alternate by head in one matrix, and keys and values.
    pub(super) fn gated_queries(
        &mut self,
        l: usize,
        spec: &AttentionSpec,
        local: &AttentionSpec,
    ) -> Result<(Stack, Matrix)> {
        let (h, role) = (self.spec.hidden_size, |part| Role::Block(l, part));
        let (q, kv, joint) = (spec.q_width(), spec.kv_width(), role(Part::QueryGateJoint));
        let forms = [
            self.source.form(joint, &[2 * q, h])?,
            self.source.form(role(Part::Key), &[kv, h])?,
            self.source.form(role(Part::Value), &[kv, h])?,
        ];
        let gate = Matrix::zeros(forms[0], &[local.q_width(), h], self.device)?;
        let (matrices, parts) = self.zero_stack(&forms, &[local.q_width(), local.kv_width(), local.kv_width()])?;
        self.bytes += gate.bytes();
        let (of_joint, keys) = (self.share(2 * q, 2 * local.q_width()), self.share(kv, local.kv_width()));
        self.read_groups(joint, of_joint, local.heads, &[parts[0].all()?, gate.all()?])?;
        self.read_outputs(role(Part::Key), &[keys], &parts[1])?;
        self.read_outputs(role(Part::Value), &[keys], &parts[2])?;
        Ok((Stack { matrices, biases: None }, gate))
    }

    /// Reads each rank's part of a matrix whose outputs consist of `shares`.
    fn read_outputs(&self, role: Role, shares: &[Share], to: &Matrix) -> Result<()> {
        let shape = [shares.iter().map(|share| share.whole).sum(), self.spec.hidden_size];
        self.read(role, (self.source.form(role, &shape)?, &shape), &self.outputs_cut(shares), to)
    }

    /// Reads a matrix whose rows form groups; each group has rows of every matrix of `to` in turn. A rank has `groups`
    /// groups, and its share of `outputs`.
    fn read_groups(&self, role: Role, outputs: Share, groups: usize, to: &[Matrix]) -> Result<()> {
        let h = self.spec.hidden_size;
        let joint = Matrix::zeros(self.source.form(role, &[outputs.whole, h])?, &[outputs.local, h], self.device)?;
        self.read_outputs(role, &[outputs], &joint)?;
        let (mut enc, mut first) = (self.device.encoder()?, 0);
        for group in 0..groups {
            for to in to {
                let rows = to.outputs() / groups;
                joint.rows(first..first + rows)?.copy_to(&mut enc, &to.rows(group * rows..(group + 1) * rows)?)?;
                first += rows;
            }
        }
        Ok(enc.commit()?.wait()?)
    }

    fn short_conv(&mut self, l: usize, spec: &ShortConvSpec) -> Result<ShortConvWeights> {
        let (h, role) = (self.spec.hidden_size, |part| Role::Block(l, part));
        let ShortConvSpec { channels, taps, biases } = *spec;
        let local = match &self.local.blocks[l].mixer {
            MixerSpec::ShortConv(local) => local.channels,
            MixerSpec::Attention(_) | MixerSpec::DeltaNet(_) => channels,
        };
        let share = self.share(channels, local);
        let conv_bias = match biases {
            true => Some(self.divided(&self.bias_values(role(Part::ConvTaps), &[channels])?, &[local], &[share])?),
            false => None,
        };
        let input = self.outputs_cut(&[share; 3]);
        Ok(ShortConvWeights {
            input: self.projection(role(Part::ConvInput), &[3 * channels, h], biases, &input)?,
            conv: self.taps(role(Part::ConvTaps), taps, &[share])?,
            conv_bias,
            output: self.output_projection(role(Part::ConvOutput), &[h, channels], biases, &[share])?,
        })
    }
}
