//! Gemma 4's tensors, found under any of the names that checkpoints use, with the shapes that the configuration
//! implies.

use std::ops::Range;

use kvant::{
    DType, Device, Tensor,
    ops::{Affine, Weight},
};

use crate::{
    Error, Result,
    config::{Config, LayerConfig, Moe, PerLayerInput},
    safetensors::Checkpoint,
};

/// A matrix, dense or quantised.
#[derive(Clone, Debug)]
pub(crate) enum Matrix {
    Dense(Tensor),
    Affine { codes: Tensor, scales: Tensor, biases: Tensor, bits: u32, group: usize },
}

impl Matrix {
    /// The matrix as an argument of operations.
    pub(crate) fn weight(&self) -> Weight<'_> {
        match self {
            Matrix::Dense(tensor) => Weight::Dense(tensor),
            Matrix::Affine { codes, scales, biases, bits, group } => {
                Affine { codes, scales, biases, bits: *bits, group: *group }.into()
            }
        }
    }

    fn zeros(form: Form, shape: &[usize], device: &Device) -> Result<Matrix> {
        let zeros = |dtype, shape: &[usize]| Ok::<_, Error>(Tensor::zeros(device, dtype, shape)?);
        Ok(match form {
            Form::Dense(dtype) => Matrix::Dense(zeros(dtype, shape)?),
            Form::Affine { bits, group, dtype } => {
                let groups = form.groups(shape);
                let [scales, biases] = [zeros(dtype, &groups)?, zeros(dtype, &groups)?];
                Matrix::Affine { codes: zeros(DType::U32, &form.words(shape))?, scales, biases, bits, group }
            }
        })
    }

    /// Some of the outputs.
    fn rows(&self, rows: Range<usize>) -> Result<Matrix> {
        Ok(match self {
            Matrix::Dense(tensor) => Matrix::Dense(tensor.rows(rows)?),
            Matrix::Affine { codes, scales, biases, bits, group } => Matrix::Affine {
                codes: codes.rows(rows.clone())?,
                scales: scales.rows(rows.clone())?,
                biases: biases.rows(rows)?,
                bits: *bits,
                group: *group,
            },
        })
    }

    fn bytes(&self) -> usize {
        match self {
            Matrix::Dense(tensor) => tensor.bytes(),
            Matrix::Affine { codes, scales, biases, .. } => codes.bytes() + scales.bytes() + biases.bytes(),
        }
    }
}

/// The storage format of a matrix.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    Dense(DType),
    Affine { bits: u32, group: usize, dtype: DType },
}

impl Form {
    /// For a matrix of `shape`, the shape of the codes' words, or of the elements if it is dense.
    fn words(self, shape: &[usize]) -> Vec<usize> {
        match self {
            Form::Dense(_) => shape.to_vec(),
            Form::Affine { bits, .. } => with_inputs(shape, |inputs| inputs * bits as usize / 32),
        }
    }

    /// The shape of scales and biases.
    fn groups(self, shape: &[usize]) -> Vec<usize> {
        match self {
            Form::Dense(_) => Vec::new(),
            Form::Affine { group, .. } => with_inputs(shape, |inputs| inputs / group),
        }
    }
}

fn with_inputs(shape: &[usize], change: impl Fn(usize) -> usize) -> Vec<usize> {
    let (&inputs, rows) = shape.split_last().expect("a matrix has dimensions");
    [rows, &[change(inputs)]].concat()
}

/// Matrices with the same inputs.
#[derive(Debug)]
pub(crate) struct Stack {
    /// All of them as one matrix, if they have the same format. A single token is multiplied by it in one product.
    pub whole: Option<Matrix>,
    /// Each matrix; they are views of `whole`.
    pub parts: Vec<Matrix>,
}

/// All tensors of a model.
#[derive(Debug)]
pub(crate) struct Weights {
    pub embed: Matrix,
    pub norm: Tensor,
    /// Absent if the embedding is the output matrix.
    pub lm_head: Option<Matrix>,
    pub per_layer: Option<PerLayerWeights>,
    pub layers: Vec<LayerWeights>,
    /// Bytes of the matrices.
    pub bytes: usize,
}

/// The weights that compute per-layer inputs.
#[derive(Debug)]
pub(crate) struct PerLayerWeights {
    /// `[Vp, L·P]`.
    pub embed: Matrix,
    /// `[L·P, H]`.
    pub projection: Matrix,
    /// `[P]`.
    pub norm: Tensor,
}

#[derive(Debug)]
pub(crate) struct LayerWeights {
    pub input_norm: Tensor,
    /// Queries, keys and values. No keys and values if the layer attends to another layer's; no values if they are
    /// the raw keys.
    pub qkv: Stack,
    pub q_norm: Tensor,
    /// Absent if the layer attends to another layer's keys and values.
    pub k_norm: Option<Tensor>,
    pub o: Matrix,
    pub post_attention_norm: Tensor,
    pub pre_feedforward_norm: Tensor,
    /// The gate and up projections.
    pub gate_up: Stack,
    pub down: Matrix,
    pub post_feedforward_norm: Tensor,
    pub moe: Option<MoeWeights>,
    pub per_layer: Option<LayerInputWeights>,
    /// Multiplies the layer's output.
    pub scalar: f32,
}

#[derive(Debug)]
pub(crate) struct MoeWeights {
    pub router: Matrix,
    /// `[H]`.
    pub router_scale: Tensor,
    /// f32 `[E]`.
    pub expert_scale: Tensor,
    pub gate_up: GateUp,
    /// `[E, H, I]`.
    pub down: Matrix,
    /// After the dense branch.
    pub post_norm_1: Tensor,
    /// Before the experts.
    pub pre_norm_2: Tensor,
    /// After the experts.
    pub post_norm_2: Tensor,
}

/// The gate and up matrices of every expert.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // One a layer: nothing is gained by a box.
pub(crate) enum GateUp {
    /// Hugging Face: `[E, 2I, H]`, with the gate's rows first.
    Fused(Matrix),
    /// MLX: `[E, I, H]` each.
    Split { gate: Matrix, up: Matrix },
}

/// The weights that add a layer's per-layer input.
#[derive(Debug)]
pub(crate) struct LayerInputWeights {
    /// `[P, H]`.
    pub gate: Matrix,
    /// `[H, P]`.
    pub projection: Matrix,
    pub norm: Tensor,
}

impl Weights {
    /// Reads the tensors that the configuration requires, and no others: encoders of images and sound stay in the
    /// file.
    pub(crate) fn load(config: &Config, checkpoint: &Checkpoint, device: &Device) -> Result<Weights> {
        let prefix = ["model.", "model.language_model.", "language_model.model.", "language_model.", ""]
            .into_iter()
            .find(|prefix| checkpoint.contains(&format!("{prefix}embed_tokens.weight")))
            .ok_or_else(|| Error::MissingTensor { name: "model.embed_tokens.weight".to_string() })?;
        let mut loader = Loader { config, checkpoint, device, prefix, bytes: 0 };
        let h = config.hidden_size;
        let embed = loader.matrix("embed_tokens", &[config.vocab_size, h])?;
        let norm = loader.vector("norm.weight", h)?;
        let lm_head = if config.tie_word_embeddings {
            loader.expect_tied()?;
            None
        } else {
            Some(loader.lm_head()?)
        };
        let per_layer = match config.per_layer_input {
            Some(ple) => Some(loader.per_layer(ple)?),
            None => None,
        };
        let layers =
            config.layers.iter().enumerate().map(|(l, layer)| loader.layer(l, layer)).collect::<Result<_>>()?;
        Ok(Weights { embed, norm, lm_head, per_layer, layers, bytes: loader.bytes })
    }

    /// Bytes of the matrices that a pass of one token reads.
    pub(crate) fn bytes_per_token(&self, config: &Config) -> usize {
        // All but `read` of `count` equal parts of a matrix.
        let skipped = |matrix: &Matrix, read: usize, count: usize| matrix.bytes() / count * (count - read);
        let mut bytes = self.bytes;
        if self.lm_head.is_some() {
            bytes -= skipped(&self.embed, 1, config.vocab_size);
        }
        if let (Some(weights), Some(ple)) = (&self.per_layer, config.per_layer_input) {
            bytes -= skipped(&weights.embed, 1, ple.vocab_size);
        }
        for weights in self.layers.iter().filter_map(|layer| layer.moe.as_ref()) {
            let Some(moe) = config.moe else { continue };
            let skipped = |matrix| skipped(matrix, moe.top_k, moe.experts);
            bytes -= skipped(&weights.down);
            bytes -= match &weights.gate_up {
                GateUp::Fused(matrix) => skipped(matrix),
                GateUp::Split { gate, up } => skipped(gate) + skipped(up),
            };
        }
        bytes
    }
}

struct Loader<'a> {
    config: &'a Config,
    checkpoint: &'a Checkpoint,
    device: &'a Device,
    /// The prefix of the text model's names.
    prefix: &'static str,
    bytes: usize,
}

impl Loader<'_> {
    fn per_layer(&mut self, ple: PerLayerInput) -> Result<PerLayerWeights> {
        let width = self.config.layers.len() * ple.size;
        Ok(PerLayerWeights {
            embed: self.matrix("embed_tokens_per_layer", &[ple.vocab_size, width])?,
            projection: self.matrix("per_layer_model_projection", &[width, self.config.hidden_size])?,
            norm: self.vector("per_layer_projection_norm.weight", ple.size)?,
        })
    }

    fn layer(&mut self, l: usize, layer: &LayerConfig) -> Result<LayerWeights> {
        let h = self.config.hidden_size;
        let (d, inner) = (layer.head_dim, layer.intermediate_size);
        let name = |part: &str| format!("layers.{l}.{part}");
        let q_width = self.config.heads * d;
        let kv_width = layer.kv_heads * d;
        let qkv = [("q", q_width), ("k", kv_width), ("v", kv_width)]
            .map(|(part, width)| (name(&format!("self_attn.{part}_proj")), width));
        let qkv = &qkv[..1 + layer.kv_projections()];
        let k_norm = match layer.kv_source {
            None => Some(self.vector(&name("self_attn.k_norm.weight"), d)?),
            Some(_) => None,
        };
        let gate_up = ["gate", "up"].map(|part| (name(&format!("mlp.{part}_proj")), inner));
        Ok(LayerWeights {
            input_norm: self.vector(&name("input_layernorm.weight"), h)?,
            qkv: self.stack(qkv, h)?,
            q_norm: self.vector(&name("self_attn.q_norm.weight"), d)?,
            k_norm,
            o: self.matrix(&name("self_attn.o_proj"), &[h, q_width])?,
            post_attention_norm: self.vector(&name("post_attention_layernorm.weight"), h)?,
            pre_feedforward_norm: self.vector(&name("pre_feedforward_layernorm.weight"), h)?,
            gate_up: self.stack(&gate_up, h)?,
            down: self.matrix(&name("mlp.down_proj"), &[h, inner])?,
            post_feedforward_norm: self.vector(&name("post_feedforward_layernorm.weight"), h)?,
            moe: match self.config.moe {
                Some(moe) => Some(self.moe(&name(""), moe)?),
                None => None,
            },
            per_layer: match self.config.per_layer_input {
                Some(ple) => Some(LayerInputWeights {
                    gate: self.matrix(&name("per_layer_input_gate"), &[ple.size, h])?,
                    projection: self.matrix(&name("per_layer_projection"), &[h, ple.size])?,
                    norm: self.vector(&name("post_per_layer_input_norm.weight"), h)?,
                }),
                None => None,
            },
            scalar: self.scalar(&name("layer_scalar"))?,
        })
    }

    /// `layer` is the layer's name with its final dot.
    fn moe(&mut self, layer: &str, moe: Moe) -> Result<MoeWeights> {
        let h = self.config.hidden_size;
        let Moe { experts, intermediate_size: inner, .. } = moe;
        let fused = format!("{layer}experts.gate_up_proj");
        let (gate_up, down) = if self.checkpoint.contains(&self.full(&fused)) {
            let gate_up = self.dense(&self.full(&fused), &[experts, 2 * inner, h])?;
            let down = self.dense(&self.full(&format!("{layer}experts.down_proj")), &[experts, h, inner])?;
            (GateUp::Fused(gate_up), down)
        } else {
            let glu = format!("{layer}experts.switch_glu.");
            let gate = self.matrix(&format!("{glu}gate_proj"), &[experts, inner, h])?;
            let up = self.matrix(&format!("{glu}up_proj"), &[experts, inner, h])?;
            (GateUp::Split { gate, up }, self.matrix(&format!("{glu}down_proj"), &[experts, h, inner])?)
        };
        let per_expert = self.vector(&format!("{layer}router.per_expert_scale"), experts)?.to_f32()?;
        Ok(MoeWeights {
            router: self.matrix(&format!("{layer}router.proj"), &[experts, h])?,
            router_scale: self.vector(&format!("{layer}router.scale"), h)?,
            expert_scale: Tensor::from_slice(self.device, &per_expert, &[experts])?,
            gate_up,
            down,
            post_norm_1: self.vector(&format!("{layer}post_feedforward_layernorm_1.weight"), h)?,
            pre_norm_2: self.vector(&format!("{layer}pre_feedforward_layernorm_2.weight"), h)?,
            post_norm_2: self.vector(&format!("{layer}post_feedforward_layernorm_2.weight"), h)?,
        })
    }

    /// The output matrix is outside of the text model.
    fn lm_head_module(&self) -> Option<&'static str> {
        ["lm_head", "language_model.lm_head", "model.lm_head", "model.language_model.lm_head"]
            .into_iter()
            .find(|module| self.checkpoint.contains(&format!("{module}.weight")))
    }

    fn lm_head(&mut self) -> Result<Matrix> {
        let missing = || Error::MissingTensor { name: "lm_head.weight".to_string() };
        let module = self.lm_head_module().ok_or_else(missing)?;
        self.matrix_at(module, &[self.config.vocab_size, self.config.hidden_size])
    }

    /// If the embedding is also the output matrix, a file that has both must have identical ones. Otherwise,
    /// transformers uses the second one regardless.
    fn expect_tied(&self) -> Result<()> {
        let Some(module) = self.lm_head_module() else { return Ok(()) };
        for part in ["weight", "scales", "biases"] {
            let (head, embed) = (format!("{module}.{part}"), self.full(&format!("embed_tokens.{part}")));
            let (has_head, has_embed) = (self.checkpoint.contains(&head), self.checkpoint.contains(&embed));
            if has_head != has_embed || has_head && !self.checkpoint.same(&head, &embed)? {
                return Err(Error::TensorValue {
                    name: head,
                    expected: "a copy of embed_tokens, because tie_word_embeddings is true or absent",
                    got: if has_head && has_embed { "different values" } else { "only one of the two tensors" }
                        .to_string(),
                });
            }
        }
        Ok(())
    }

    fn full(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// A float vector of `len` elements.
    fn vector(&self, name: &str, len: usize) -> Result<Tensor> {
        self.float(&self.full(name), &[len])
    }

    /// The value of a `[1]` tensor.
    fn scalar(&self, name: &str) -> Result<f32> {
        let name = self.full(name);
        let value = self.float(&name, &[1])?.to_f32()?[0];
        if !value.is_finite() {
            return Err(Error::TensorValue { name, expected: "a finite number", got: value.to_string() });
        }
        Ok(value)
    }

    /// `[outputs, inputs]` or `[E, outputs, inputs]`, dense or quantised.
    fn matrix(&mut self, module: &str, shape: &[usize]) -> Result<Matrix> {
        self.matrix_at(&self.full(module), shape)
    }

    /// Modules with the given numbers of outputs and the same inputs.
    fn stack(&mut self, modules: &[(String, usize)], inputs: usize) -> Result<Stack> {
        let forms = modules.iter().map(|(module, outputs)| self.form(&self.full(module), &[*outputs, inputs]));
        let forms = forms.collect::<Result<Vec<_>>>()?;
        if modules.len() == 1 || forms.iter().any(|form| *form != forms[0]) {
            let parts = modules.iter().map(|(module, outputs)| self.matrix(module, &[*outputs, inputs]));
            return Ok(Stack { parts: parts.collect::<Result<_>>()?, whole: None });
        }
        let outputs = modules.iter().map(|(_, outputs)| outputs).sum();
        let whole = Matrix::zeros(forms[0], &[outputs, inputs], self.device)?;
        let (mut parts, mut first) = (Vec::new(), 0);
        for (module, outputs) in modules {
            let part = whole.rows(first..first + outputs)?;
            self.fill(&part, &self.full(module))?;
            parts.push(part);
            first += outputs;
        }
        self.bytes += whole.bytes();
        Ok(Stack { whole: Some(whole), parts })
    }

    fn matrix_at(&mut self, module: &str, shape: &[usize]) -> Result<Matrix> {
        let form = self.form(module, shape)?;
        let matrix = Matrix::zeros(form, shape, self.device)?;
        self.fill(&matrix, module)?;
        self.bytes += matrix.bytes();
        Ok(matrix)
    }

    /// The format of a matrix in the file, completely checked.
    fn form(&self, module: &str, shape: &[usize]) -> Result<Form> {
        let weight = format!("{module}.weight");
        let scales = format!("{module}.scales");
        if !self.checkpoint.contains(&scales) {
            return Ok(Form::Dense(self.float_dtype(&weight, shape)?));
        }
        let scheme = self.config.quantization.scheme(module).ok_or_else(|| Error::Config {
            key: "quantization".to_string(),
            expected: format!("an object with the bits and group size of `{module}`, which is quantised"),
            got: "nothing".to_string(),
        })?;
        let &inputs = shape.last().expect("a matrix has dimensions");
        if !inputs.is_multiple_of(scheme.group) {
            return Err(Error::Config {
                key: "quantization.group_size".to_string(),
                expected: format!("a divisor of the {inputs} inputs of `{module}`"),
                got: scheme.group.to_string(),
            });
        }
        let form = |dtype| Form::Affine { bits: scheme.bits, group: scheme.group, dtype };
        let any = form(DType::F32);
        self.expect_shape(&weight, &any.words(shape))?;
        let info = self.checkpoint.info(&weight).expect("expect_shape found it");
        if info.dtype() != Some(DType::U32) {
            let (expected, got) = ("U32, because it has scales", info.dtype.clone());
            return Err(Error::TensorDType { name: weight, expected, got });
        }
        let dtype = self.float_dtype(&scales, &any.groups(shape))?;
        let biases = format!("{module}.biases");
        let got = self.float_dtype(&biases, &any.groups(shape))?;
        if got != dtype {
            return Err(Error::dtype(&biases, "of the scales' dtype", got));
        }
        Ok(form(dtype))
    }

    /// Reads a matrix whose format has been checked.
    fn fill(&self, matrix: &Matrix, module: &str) -> Result<()> {
        let read = |part: &str, to: &Tensor| self.checkpoint.read_into(&format!("{module}.{part}"), to);
        match matrix {
            Matrix::Dense(tensor) => read("weight", tensor),
            Matrix::Affine { codes, scales, biases, .. } => {
                read("weight", codes)?;
                read("scales", scales)?;
                read("biases", biases)
            }
        }
    }

    fn dense(&mut self, name: &str, shape: &[usize]) -> Result<Matrix> {
        let matrix = Matrix::Dense(self.float(name, shape)?);
        self.bytes += matrix.bytes();
        Ok(matrix)
    }

    fn float(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.float_dtype(name, shape)?;
        self.checkpoint.read(name, self.device)
    }

    /// Read from the header.
    fn float_dtype(&self, name: &str, shape: &[usize]) -> Result<DType> {
        self.expect_shape(name, shape)?;
        let info = self.checkpoint.info(name).expect("expect_shape found it");
        info.dtype().filter(|dtype| dtype.is_float()).ok_or_else(|| Error::TensorDType {
            name: name.to_string(),
            expected: "F32, F16 or BF16",
            got: info.dtype.clone(),
        })
    }

    /// Read from the header, before any allocation.
    fn expect_shape(&self, name: &str, expected: &[usize]) -> Result<()> {
        let info = self.checkpoint.info(name).ok_or_else(|| Error::MissingTensor { name: name.to_string() })?;
        if info.shape == expected {
            return Ok(());
        }
        Err(Error::TensorShape { name: name.to_string(), expected: expected.to_vec(), got: info.shape.clone() })
    }
}
