//! Loads the first halves of blocks that need more than plain matrices: joint matrices, delta nets, convolutions.

use kvant::Tensor;

use super::{DeltaNetWeights, Loader, Mixer, Projection, ShortConvWeights, Stack, StackMatrices, outputs};
use crate::{
    Result,
    shard::{Cut, Share},
    source::{Matrix, Part, Role},
    spec::{AttentionSpec, DeltaNetSpec, MixerSpec, ShortConvSpec},
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
        let whole = |outputs| Share::new(outputs, outputs, 1);
        let roles: [(Role, Share); 4] =
            std::array::from_fn(|i| (role(DELTA_PROJECTIONS[i]), whole(spec.projections()[i])));
        let projections = match self.source.name(role(Part::DeltaJoint)) {
            Some(_) => self.joint_projections(l, spec, &roles)?,
            None => self.stack(None, &roles, h, false)?,
        };
        let rate = self.finite(role(Part::DeltaRate), spec.value_heads)?;
        let rate: Vec<f32> = match self.source.has_log_rates() {
            true => rate.into_iter().map(|log| -log.exp()).collect(),
            false => rate,
        };
        Ok(DeltaNetWeights {
            projections,
            conv: self.source.taps(role(Part::ConvTaps), [spec.channels(), spec.taps], self.device)?,
            rate: Tensor::from_slice(self.device, &rate, &[spec.value_heads])?,
            a_bias: self.finite_tensor(role(Part::DeltaABias), spec.value_heads)?,
            // This norm multiplies by its weights alone, whatever the other norms do.
            norm: self.vector(role(Part::DeltaNorm), spec.value_dim)?,
            output: self.whole_projection(role(Part::DeltaOutput), [h, spec.value_width()], false)?,
        })
    }

    /// The projections of a delta net in files that have two matrices in their place, each with rows by key head.
    fn joint_projections(&mut self, l: usize, spec: &DeltaNetSpec, roles: &[(Role, Share)]) -> Result<Stack> {
        let h = self.spec.hidden_size;
        let joint = [Part::DeltaJoint, Part::DeltaGatesJoint].map(|part| Role::Block(l, part));
        let [qkv, z, b, a] = spec.projections();
        let forms = [self.source.form(joint[0], &[qkv + z, h])?, self.source.form(joint[1], &[b + a, h])?];
        let widths = [qkv, z, b, a];
        let (matrices, parts): (_, Vec<Matrix>) = if forms[0] == forms[1] {
            let whole = Matrix::zeros(forms[0], &[widths.iter().sum(), h], self.device)?;
            self.bytes += whole.bytes();
            let mut end = 0;
            let rows = widths.map(|width| {
                end += width;
                whole.rows(end - width..end)
            });
            let parts = rows.into_iter().collect::<Result<_>>()?;
            (StackMatrices::Joined(Box::new(whole), outputs(roles)), parts)
        } else {
            let form = |i: usize| forms[i / 2];
            let parts = widths.iter().enumerate().map(|(i, &width)| Matrix::zeros(form(i), &[width, h], self.device));
            let parts = parts.collect::<Result<Vec<_>>>()?;
            self.bytes += parts.iter().map(Matrix::bytes).sum::<usize>();
            (StackMatrices::Separate(parts.iter().map(Matrix::all).collect::<Result<_>>()?), parts)
        };
        let keys = spec.key_heads * spec.key_dim;
        let (q, k) = (parts[0].rows(0..keys)?, parts[0].rows(keys..2 * keys)?);
        let v = parts[0].rows(2 * keys..qkv)?;
        self.read_groups(joint[0], spec.key_heads, &[q, k, v, parts[1].all()?])?;
        self.read_groups(joint[1], spec.key_heads, &[parts[2].all()?, parts[3].all()?])?;
        Ok(Stack { matrices, biases: None })
    }

    /// Queries and the gate of the output, whose rows alternate by head in one matrix, and keys and values.
    pub(super) fn gated_queries(&mut self, l: usize, spec: &AttentionSpec) -> Result<(Stack, Matrix)> {
        let (h, role) = (self.spec.hidden_size, |part| Role::Block(l, part));
        let (q, kv, joint) = (spec.q_width(), spec.kv_width(), role(Part::QueryGateJoint));
        let forms = [
            self.source.form(joint, &[2 * q, h])?,
            self.source.form(role(Part::Key), &[kv, h])?,
            self.source.form(role(Part::Value), &[kv, h])?,
        ];
        let gate = Matrix::zeros(forms[0], &[q, h], self.device)?;
        let (matrices, parts) = if forms.iter().all(|form| *form == forms[0]) {
            let whole = Matrix::zeros(forms[0], &[q + 2 * kv, h], self.device)?;
            let parts = [whole.rows(0..q)?, whole.rows(q..q + kv)?, whole.rows(q + kv..q + 2 * kv)?];
            self.bytes += whole.bytes();
            (StackMatrices::Joined(Box::new(whole), vec![q, kv, kv]), parts)
        } else {
            let zeros = |form, outputs: usize| Matrix::zeros(form, &[outputs, h], self.device);
            let parts = [zeros(forms[0], q)?, zeros(forms[1], kv)?, zeros(forms[2], kv)?];
            self.bytes += parts.iter().map(Matrix::bytes).sum::<usize>();
            (StackMatrices::Separate(parts.iter().map(Matrix::all).collect::<Result<_>>()?), parts)
        };
        self.bytes += gate.bytes();
        let [queries, keys, values] = parts;
        self.read_groups(joint, spec.heads, &[queries, gate.all()?])?;
        self.source.read(role(Part::Key), &keys)?;
        self.source.read(role(Part::Value), &values)?;
        Ok((Stack { matrices, biases: None }, gate))
    }

    /// Reads a matrix whose rows are `groups` groups, each with rows of every matrix of `to` in turn.
    fn read_groups(&self, role: Role, groups: usize, to: &[Matrix]) -> Result<()> {
        let outputs = to.iter().map(Matrix::experts).sum();
        let shape = [outputs, self.spec.hidden_size];
        let joint = Matrix::zeros(self.source.form(role, &shape)?, &shape, self.device)?;
        self.source.read(role, &joint)?;
        let (mut enc, mut first) = (self.device.encoder()?, 0);
        for group in 0..groups {
            for to in to {
                let rows = to.experts() / groups;
                joint.rows(first..first + rows)?.copy_to(&mut enc, &to.rows(group * rows..(group + 1) * rows)?)?;
                first += rows;
            }
        }
        Ok(enc.commit()?.wait()?)
    }

    fn short_conv(&mut self, l: usize, spec: &ShortConvSpec) -> Result<ShortConvWeights> {
        let role = |part| Role::Block(l, part);
        let ShortConvSpec { channels, taps, biases } = *spec;
        let conv_bias = match biases {
            true => Some(self.source.bias(role(Part::ConvTaps), &[channels], self.device)?),
            false => None,
        };
        Ok(ShortConvWeights {
            input: self.whole_projection(role(Part::ConvInput), [3 * channels, channels], biases)?,
            conv: self.source.taps(role(Part::ConvTaps), [channels, taps], self.device)?,
            conv_bias,
            output: self.whole_projection(role(Part::ConvOutput), [channels, channels], biases)?,
        })
    }

    fn whole_projection(&mut self, role: Role, shape: [usize; 2], is_biased: bool) -> Result<Projection> {
        self.projection(role, &shape, is_biased, &Cut::Whole)
    }
}
