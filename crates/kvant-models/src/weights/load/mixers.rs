//! Loads the first halves of blocks that need more than plain matrices: joint matrices, delta nets, convolutions.

use kvant::Tensor;

use super::Loader;
use crate::{
    Result,
    cut::{Cut, Share},
    source::{Form, Matrix, Part, Role},
    spec::{AttentionSpec, DeltaNetSpec, MixerSpec, ShortConvSpec},
    weights::{DeltaNetWeights, Mixer, Projection, ShortConvWeights, Stack, StackMatrices},
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
        let has = |part| self.source.name(role(part)).is_some();
        let projections = match has(Part::DeltaJoint) || has(Part::DeltaGatesJoint) {
            true => self.joint_projections(l, spec, &roles)?,
            false => self.stack(None, &roles, h, false)?,
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

    /// The projections of a delta net in files that join qkv with z, or b with a, in a matrix with rows by key head.
    fn joint_projections(&mut self, l: usize, spec: &DeltaNetSpec, roles: &[(Role, Share); 4]) -> Result<Stack> {
        let h = self.spec.hidden_size;
        let [qkv, z, b, a] = spec.projections();
        let joint = |part| Some(Role::Block(l, part)).filter(|&role| self.source.name(role).is_some());
        let joint = [(joint(Part::DeltaJoint), qkv + z), (joint(Part::DeltaGatesJoint), b + a)];
        let form = |i: usize| match joint[i / 2] {
            (Some(role), outputs) => self.source.form(role, &[outputs, h]),
            (None, _) => self.source.form(roles[i].0, &[roles[i].1.whole, h]),
        };
        let forms = [form(0)?, form(1)?, form(2)?, form(3)?];
        let (matrices, parts) = self.zero_stack(&forms, &spec.projections())?;
        let keys = spec.key_heads * spec.key_dim;
        let (q, k) = (parts[0].rows(0..keys)?, parts[0].rows(keys..2 * keys)?);
        let v = parts[0].rows(2 * keys..qkv)?;
        let of_joint = [vec![q, k, v, parts[1].all()?], vec![parts[2].all()?, parts[3].all()?]];
        for (i, (role, _)) in joint.into_iter().enumerate() {
            match role {
                Some(role) => self.read_groups(role, spec.key_heads, &of_joint[i])?,
                None => (2 * i..2 * i + 2).try_for_each(|part| self.read_whole(roles[part].0, &parts[part]))?,
            }
        }
        Ok(Stack { matrices, biases: None })
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
    pub(super) fn gated_queries(&mut self, l: usize, spec: &AttentionSpec) -> Result<(Stack, Matrix)> {
        let (h, role) = (self.spec.hidden_size, |part| Role::Block(l, part));
        let (q, kv, joint) = (spec.q_width(), spec.kv_width(), role(Part::QueryGateJoint));
        let forms = [
            self.source.form(joint, &[2 * q, h])?,
            self.source.form(role(Part::Key), &[kv, h])?,
            self.source.form(role(Part::Value), &[kv, h])?,
        ];
        let gate = Matrix::zeros(forms[0], &[q, h], self.device)?;
        let (matrices, parts) = self.zero_stack(&forms, &[q, kv, kv])?;
        self.bytes += gate.bytes();
        self.read_groups(joint, spec.heads, &[parts[0].all()?, gate.all()?])?;
        self.read_whole(role(Part::Key), &parts[1])?;
        self.read_whole(role(Part::Value), &parts[2])?;
        Ok((Stack { matrices, biases: None }, gate))
    }

    /// Reads a matrix that is not divided.
    fn read_whole(&self, role: Role, to: &Matrix) -> Result<()> {
        let shape = [to.outputs(), self.spec.hidden_size];
        self.read(role, (self.source.form(role, &shape)?, &shape), &Cut::Whole, to)
    }

    /// Reads a matrix whose rows are `groups` groups, each with rows of every matrix of `to` in turn.
    fn read_groups(&self, role: Role, groups: usize, to: &[Matrix]) -> Result<()> {
        let outputs = to.iter().map(Matrix::outputs).sum();
        let shape = [outputs, self.spec.hidden_size];
        let joint = Matrix::zeros(self.source.form(role, &shape)?, &shape, self.device)?;
        self.read_whole(role, &joint)?;
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
