//! The tensors of a GGUF file as a source of weights.

use kvant::{DType, Device, Tensor};

use super::{Gguf, GgufTensor, GgufType, affine};
use crate::{
    Error, Result,
    source::{Destination, DraftNames, Form, Matrix, Part, Role, Source},
};

/// The source of a model in a GGUF file. One table of names covers all architectures.
#[derive(Debug)]
pub(crate) struct GgufSource<'a> {
    gguf: &'a Gguf,
    /// The names of a drafter.
    drafter: Option<DraftNames>,
}

impl<'a> GgufSource<'a> {
    pub(crate) fn new(gguf: &'a Gguf) -> GgufSource<'a> {
        GgufSource { gguf, drafter: None }
    }

    /// The source of a drafter.
    pub(crate) fn of_drafter(gguf: &'a Gguf, names: DraftNames) -> GgufSource<'a> {
        GgufSource { gguf, drafter: Some(names) }
    }
}

impl GgufSource<'_> {
    fn part(&self, l: usize, part: Part) -> Option<String> {
        let name = match part {
            Part::AttentionNorm => "attn_norm.weight",
            Part::Query => "attn_q.weight",
            Part::Key => "attn_k.weight",
            Part::Value => "attn_v.weight",
            // Files have either one matrix or several.
            Part::QueryKeyValue => return self.present(format!("blk.{l}.attn_qkv.weight")),
            Part::QueryNorm => "attn_q_norm.weight",
            Part::KeyNorm => "attn_k_norm.weight",
            // The gate of attention has its own matrix, or rows of the query's.
            Part::QueryGateJoint => {
                let has_gate = self.gguf.tensor(&format!("blk.{l}.attn_gate.weight")).is_some();
                return if has_gate { None } else { self.present(format!("blk.{l}.attn_q.weight")) };
            }
            Part::DeltaQkv => "attn_qkv.weight",
            Part::DeltaZ => "attn_gate.weight",
            Part::DeltaB => "ssm_beta.weight",
            Part::DeltaA => "ssm_alpha.weight",
            // Old files of Qwen3-Next.
            Part::DeltaJoint => return self.present(format!("blk.{l}.ssm_in.weight")),
            Part::DeltaGatesJoint => return self.present(format!("blk.{l}.ssm_ba.weight")),
            Part::ConvTaps => {
                let short = self.present(format!("blk.{l}.shortconv.conv.weight"));
                return Some(short.unwrap_or_else(|| format!("blk.{l}.ssm_conv1d.weight")));
            }
            Part::DeltaRate => "ssm_a",
            Part::DeltaABias => "ssm_dt.bias",
            Part::DeltaNorm => "ssm_norm.weight",
            Part::DeltaOutput => "ssm_out.weight",
            Part::ConvInput => "shortconv.in_proj.weight",
            Part::ConvOutput => "shortconv.out_proj.weight",
            Part::Sinks => "attn_sinks.weight",
            Part::AttentionGate => "attn_gate.weight",
            Part::AttentionOutput => "attn_output.weight",
            Part::AttentionPostNorm => "post_attention_norm.weight",
            Part::FeedForwardNorm => {
                // gpt-oss' files use the name of the preceding tensor.
                let (own, other) = (format!("blk.{l}.ffn_norm.weight"), format!("blk.{l}.post_attention_norm.weight"));
                let is_other = self.gguf.tensor(&own).is_none() && self.gguf.tensor(&other).is_some();
                return Some(if is_other { other } else { own });
            }
            Part::GateUp => {
                // Phi's files use `ffn_up` for both.
                let has_gate = self.gguf.tensor(&format!("blk.{l}.ffn_gate.weight")).is_some();
                return if has_gate { None } else { self.present(format!("blk.{l}.ffn_up.weight")) };
            }
            Part::Gate => "ffn_gate.weight",
            Part::Up => "ffn_up.weight",
            Part::Down => "ffn_down.weight",
            Part::FeedForwardPostNorm => "post_ffw_norm.weight",
            Part::Router => "ffn_gate_inp.weight",
            Part::RouterNorm => "ffn_gate_inp.scale",
            Part::ExpertScale => "ffn_down_exps.scale",
            Part::ExpertGateUp => return self.present(format!("blk.{l}.ffn_gate_up_exps.weight")),
            Part::ExpertGate => "ffn_gate_exps.weight",
            Part::ExpertUp => "ffn_up_exps.weight",
            Part::ExpertDown => "ffn_down_exps.weight",
            Part::RouterBias => "exp_probs_b.bias",
            Part::SharedGateUp => return None,
            Part::SharedGate => "ffn_gate_shexp.weight",
            Part::SharedUp => "ffn_up_shexp.weight",
            Part::SharedDown => "ffn_down_shexp.weight",
            Part::SharedRouter => "ffn_gate_inp_shexp.weight",
            Part::DensePostNorm => "post_ffw_norm_1.weight",
            Part::ExpertsNorm => "pre_ffw_norm_2.weight",
            Part::ExpertsPostNorm => "post_ffw_norm_2.weight",
            Part::PerLayerGate => "inp_gate.weight",
            Part::PerLayerOutput => "proj.weight",
            Part::PerLayerPostNorm => "post_norm.weight",
            Part::Scalar => "layer_output_scale.weight",
        };
        Some(format!("blk.{l}.{name}"))
    }

    /// Returns the name if the file has the tensor.
    fn present(&self, name: String) -> Option<String> {
        self.gguf.tensor(&name).is_some().then_some(name)
    }

    fn required(&self, role: Role) -> Result<String> {
        self.name(role).ok_or_else(|| Error::MissingTensor { name: format!("{role:?}") })
    }

    fn floats(&self, name: &str, shape: &[usize], device: &Device) -> Result<Tensor> {
        let kind = self.checked(name, shape)?.kind;
        if !matches!(kind, GgufType::F32 | GgufType::F16 | GgufType::BF16) {
            let (name, got) = (name.to_string(), kind.to_string());
            return Err(Error::TensorDType { name, expected: "F32, F16 or BF16", got });
        }
        self.gguf.read(name, device)
    }

    /// Checks existence and shape in the header, before any allocation.
    fn checked(&self, name: &str, expected: &[usize]) -> Result<&GgufTensor> {
        let info = self.gguf.tensor(name).ok_or_else(|| Error::MissingTensor { name: name.to_string() })?;
        // The matrix of a single output is stored as a vector.
        if info.shape == expected || expected.len() == 2 && expected[0] == 1 && info.shape == expected[1..] {
            return Ok(info);
        }
        Err(Error::TensorShape { name: name.to_string(), expected: expected.to_vec(), got: info.shape.clone() })
    }
}

impl Source for GgufSource<'_> {
    fn name(&self, role: Role) -> Option<String> {
        let global = |name: &str| Some(name.to_string());
        match (role, &self.drafter) {
            (Role::Block(l, part), Some(names)) => return self.part(names.first_block + l, part),
            (role, Some(names)) => return names.other(role),
            (_, None) => {}
        }
        match role {
            Role::Draft(_) => None,
            Role::Embedding => global("token_embd.weight"),
            // LFM2's files use the name of another norm.
            Role::FinalNorm => self.present("output_norm.weight".into()).or_else(|| global("token_embd_norm.weight")),
            Role::Output => global("output.weight"),
            Role::PerLayerTable => global("per_layer_token_embd.weight"),
            Role::PerLayerProjection => global("per_layer_model_proj.weight"),
            Role::PerLayerProjectionNorm => global("per_layer_proj_norm.weight"),
            Role::Block(l, part) => self.part(l, part),
        }
    }

    fn has(&self, role: Role) -> bool {
        self.name(role).is_some_and(|name| self.gguf.tensor(&name).is_some())
    }

    fn form(&self, role: Role, shape: &[usize]) -> Result<Form> {
        let name = self.required(role)?;
        let kind = self.checked(&name, shape)?.kind;
        if let Some(bits) = affine::bits(kind) {
            return Ok(Form::Affine { bits, group: affine::GROUP, dtype: DType::F16 });
        }
        match kind.block_format() {
            Some(format) => Ok(Form::Blocks(format)),
            None => self.gguf.dense_dtype(&name).map(Form::Dense),
        }
    }

    fn read(&self, role: Role, to: &Matrix<Destination>) -> Result<()> {
        let name = self.required(role)?;
        match to {
            Matrix::Dense(tensor) => self.gguf.read_to(&name, tensor),
            Matrix::Blocks { data, .. } => self.gguf.read_bytes_to(&name, data),
            // `form` never returns it: MXFP4 is a block format here, and the others do not occur.
            Matrix::Floats { .. } => {
                Err(Error::TensorDType { name, expected: "blocks", got: "MXFP4 codes".to_string() })
            }
            Matrix::Affine { codes, scales, biases, .. } => {
                if self.gguf.read_affine_to(&name, [codes, scales, biases])? {
                    return Ok(());
                }
                let expected = "scales whose products with the zero point fit f16";
                Err(Error::TensorValue { name, expected, got: "a larger one".to_string() })
            }
        }
    }

    fn vector(&self, role: Role, len: usize, device: &Device) -> Result<Tensor> {
        self.floats(&self.required(role)?, &[len], device)
    }

    fn bias(&self, role: Role, shape: &[usize], device: &Device) -> Result<Tensor> {
        let name = self.required(role)?;
        let module = name.strip_suffix(".weight").unwrap_or(&name);
        self.floats(&format!("{module}.bias"), shape, device)
    }

    fn taps(&self, role: Role, shape: [usize; 2], device: &Device) -> Result<Tensor> {
        self.floats(&self.required(role)?, &shape, device)
    }

    fn has_log_rates(&self) -> bool {
        false
    }

    fn same(&self, a: Role, b: Role) -> Result<bool> {
        self.gguf.same(&self.required(a)?, &self.required(b)?)
    }
}
