//! Reads checkpoints of safetensors files in the layouts of Hugging Face and MLX.

use kvant::{DType, Device, Tensor, ops::FloatFormat};

use super::{
    Destination, DraftNames, Form, Matrix, Part, Role, Source,
    experts::Interleaved,
    fp8::{self, Fp8},
    packed::Packed,
    quantization::{Quantization, Scheme},
};
use crate::{
    Error, Result,
    families::{ExpertLayout, Family, Names},
    safetensors::Checkpoint,
};

/// The prefixes of a text model's tensors.
const PREFIXES: [&str; 5] = ["model.", "model.language_model.", "language_model.model.", "language_model.", ""];
/// The output matrix is not part of the text model.
const OUTPUTS: [&str; 4] =
    ["lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight", "model.language_model.lm_head.weight"];
const EMBEDDING: &str = "embed_tokens.weight";
/// LFM2 names the norm after its last block `embedding_norm`.
const FINAL_NORMS: [&str; 2] = ["norm.weight", "embedding_norm.weight"];

/// A checkpoint with a family's names.
#[derive(Debug)]
pub(crate) struct HfSource<'a> {
    checkpoint: &'a Checkpoint,
    quantization: Quantization<'a>,
    family: &'static Family,
    /// The names of experts in the file's layout.
    experts: Names,
    layout: ExpertLayout,
    prefix: &'static str,
    blocks: usize,
    /// The names of a drafter.
    drafter: Option<DraftNames>,
}

impl<'a> HfSource<'a> {
    /// `blocks`: number of blocks of the decoder.
    ///
    /// # Errors
    /// `MissingTensor` if there is no embedding.
    pub(crate) fn new(
        checkpoint: &'a Checkpoint,
        quantization: Quantization<'a>,
        family: &'static Family,
        blocks: usize,
    ) -> Result<HfSource<'a>> {
        let prefix = PREFIXES
            .into_iter()
            .find(|prefix| checkpoint.contains(&format!("{prefix}{EMBEDDING}")))
            .ok_or_else(|| Error::MissingTensor { name: format!("{}{EMBEDDING}", PREFIXES[0]) })?;
        let start = |l| format!("{prefix}layers.{l}.");
        let (experts, layout) = expert_names(checkpoint, family, (0..blocks).map(start));
        Ok(HfSource { checkpoint, quantization, family, experts, layout, prefix, blocks, drafter: None })
    }

    /// The source of a drafter whose blocks have a family's names.
    pub(crate) fn of_drafter(
        checkpoint: &'a Checkpoint,
        quantization: Quantization<'a>,
        family: &'static Family,
        blocks: usize,
        names: DraftNames,
    ) -> HfSource<'a> {
        let (experts, layout) = expert_names(checkpoint, family, (0..blocks).map(|l| names.of_block(l)));
        HfSource { checkpoint, quantization, family, experts, layout, prefix: "", blocks, drafter: Some(names) }
    }

    /// The name of a tensor. For an expert, it has `{}` in place of the index.
    fn pattern(&self, role: Role) -> Option<String> {
        if let Some(names) = &self.drafter {
            return match role {
                Role::Block(l, part) => Some(format!("{}{}", names.of_block(l), self.of_block(part)?)),
                role => names.other(role),
            };
        }
        let global = |name: &str| Some(format!("{}{name}", self.prefix));
        match role {
            Role::Draft(_) => None,
            Role::Embedding => global(EMBEDDING),
            Role::FinalNorm => {
                let found = FINAL_NORMS.into_iter().map(|name| format!("{}{name}", self.prefix));
                let mut names = found.filter(|name| self.checkpoint.contains(name));
                names.next().or_else(|| global(FINAL_NORMS[0]))
            }
            Role::Output => {
                let found = OUTPUTS.into_iter().find(|name| self.checkpoint.contains(name));
                Some(found.unwrap_or(OUTPUTS[0]).to_string())
            }
            Role::PerLayerTable => global("embed_tokens_per_layer.weight"),
            Role::PerLayerProjection => global("per_layer_model_projection.weight"),
            Role::PerLayerProjectionNorm => global("per_layer_projection_norm.weight"),
            Role::Block(l, part) => Some(format!("{}layers.{l}.{}", self.prefix, self.of_block(part)?)),
        }
    }

    /// The name of a block's tensor.
    fn of_block(&self, part: Part) -> Option<&'static str> {
        let own = self.drafter.map_or(&[][..], |names| names.parts);
        let mut tables = [own, self.experts].into_iter().chain(self.family.names.iter().copied());
        tables.find_map(|table: Names| table.iter().find(|(of, _)| *of == part).map(|(_, name)| *name))
    }

    /// Like [`HfSource::pattern`], for a role that the loader requires.
    fn required(&self, role: Role) -> Result<String> {
        self.pattern(role).ok_or_else(|| Error::MissingTensor { name: format!("{role:?}") })
    }

    /// The layout of a role's tensors.
    fn layout(&self, role: Role) -> ExpertLayout {
        match role {
            Role::Block(_, part) if self.experts.iter().any(|(of, _)| *of == part) => self.layout,
            _ => ExpertLayout::Plain,
        }
    }

    /// The rows or columns of a tensor of gpt-oss' experts.
    fn interleaved(&self, role: Role) -> Interleaved<'_> {
        let alternates = matches!(role, Role::Block(_, Part::ExpertGateUp));
        Interleaved { checkpoint: self.checkpoint, alternates }
    }

    /// Whether the file has convolutions in the layout of MLX: `[channels, taps, 1]`.
    pub(crate) fn has_mlx_taps(&self) -> bool {
        let taps = |l| self.pattern(Role::Block(l, Part::ConvTaps)).and_then(|name| self.checkpoint.info(&name));
        (0..self.blocks).find_map(taps).is_some_and(|info| matches!(info.shape[..], [_, taps, 1] if taps > 1))
    }

    fn form_of(&self, name: &str, shape: &[usize]) -> Result<Form> {
        if let Some(packed) = self.packed(name) {
            return packed.form(shape);
        }
        if let Some(fp8) = self.fp8(name) {
            return fp8.form(shape);
        }
        let Some((module, scales)) = self.scales(name) else {
            return Ok(Form::Dense(self.float_dtype(name, shape)?));
        };
        let scheme = self.quantization.scheme(module)?.ok_or_else(|| Error::Config {
            key: "quantization".to_string(),
            expected: format!("an object with the bits and group size of `{module}`, which is quantised"),
            got: "nothing".to_string(),
        })?;
        let &inputs = shape.last().expect("a matrix has dimensions");
        if !inputs.is_multiple_of(scheme.step()) {
            return Err(Error::Config {
                key: "quantization.group_size".to_string(),
                expected: format!("a divisor of the {inputs} inputs of `{module}`"),
                got: scheme.step().to_string(),
            });
        }
        let (bits, group) = match scheme {
            Scheme::Affine { bits, group } => (bits, group),
            Scheme::Floats(format) => {
                let form = Form::Floats { format, codes: DType::U32 };
                self.expect(name, DType::U32, &form.words(shape))?;
                self.expect(&scales, DType::U8, &form.groups(shape))?;
                return Ok(form);
            }
        };
        let form = |dtype| Form::Affine { bits, group, dtype };
        let any = form(DType::F32);
        self.expect(name, DType::U32, &any.words(shape))?;
        let dtype = self.float_dtype(&scales, &any.groups(shape))?;
        let biases = format!("{module}.biases");
        let got = self.float_dtype(&biases, &any.groups(shape))?;
        if got != dtype {
            return Err(Error::dtype(&biases, "of the scales' dtype", got));
        }
        Ok(form(dtype))
    }

    /// The form of a matrix of gpt-oss' experts, `[E, outputs, inputs]`.
    fn expert_form(&self, name: &str, shape: &[usize]) -> Result<Form> {
        let &[experts, outputs, inputs] = shape else { unreachable!("matrices of experts have three dimensions") };
        if self.layout == ExpertLayout::InterleavedTransposed {
            return Ok(Form::Dense(self.float_dtype(name, &[experts, inputs, outputs])?));
        }
        let format = FloatFormat::Mxfp4;
        let group = format.group();
        if !inputs.is_multiple_of(group) {
            let expected = format!("a multiple of {group} with experts in MXFP4 (`{name}`)");
            let key = "hidden_size or intermediate_size".to_string();
            return Err(Error::Config { key, expected, got: inputs.to_string() });
        }
        let groups = inputs / group;
        self.expect(name, DType::U8, &[experts, outputs, groups, group / 2])?;
        self.expect(&scales_of_blocks(name), DType::U8, &[experts, outputs, groups])?;
        Ok(Form::Floats { format, codes: DType::U8 })
    }

    /// The module of a matrix and the name of its scales, if it is quantised.
    fn scales<'n>(&self, name: &'n str) -> Option<(&'n str, String)> {
        let module = name.strip_suffix(".weight")?;
        let scales = format!("{module}.scales");
        self.checkpoint.contains(&scales).then_some((module, scales))
    }

    /// A matrix in a format of compressed-tensors.
    fn packed<'n>(&'n self, name: &'n str) -> Option<Packed<'n>> {
        let module = name.strip_suffix(".weight")?;
        Packed::has(self.checkpoint, module).then_some(Packed { checkpoint: self.checkpoint, module })
    }

    /// A matrix of 8-bit floats.
    fn fp8<'n>(&'n self, name: &'n str) -> Option<Fp8<'n>> {
        let module = name.strip_suffix(".weight")?;
        let is_fp8 = self.checkpoint.info(name).is_some_and(|info| info.dtype == fp8::DTYPE);
        is_fp8.then_some(Fp8 { checkpoint: self.checkpoint, module, block: self.quantization.block() })
    }

    fn read_matrix(&self, name: &str, to: &Matrix<Destination>) -> Result<()> {
        match to {
            Matrix::Dense(tensor) => match self.fp8(name) {
                Some(fp8) => fp8.read(tensor),
                None => self.checkpoint.read_to(name, tensor),
            },
            Matrix::Affine { codes, scales, biases, bits, group } => {
                if let Some(packed) = self.packed(name) {
                    return packed.read(*bits, *group, [codes, scales, biases]);
                }
                let module = name.strip_suffix(".weight").expect("only modules are quantised");
                self.checkpoint.read_to(name, codes)?;
                self.checkpoint.read_to(&format!("{module}.scales"), scales)?;
                self.checkpoint.read_to(&format!("{module}.biases"), biases)
            }
            Matrix::Blocks { data, .. } => self.checkpoint.read_to(name, data),
            Matrix::Floats { codes, scales, .. } => {
                let module = name.strip_suffix(".weight").expect("only modules are quantised");
                self.checkpoint.read_to(name, codes)?;
                self.checkpoint.read_to(&format!("{module}.scales"), scales)
            }
        }
    }

    /// Reads the dtype from the header.
    fn float_dtype(&self, name: &str, shape: &[usize]) -> Result<DType> {
        self.expect_shape(name, shape)?;
        let info = self.checkpoint.info(name).expect("expect_shape found it");
        info.dtype().filter(|dtype| dtype.is_float()).ok_or_else(|| Error::TensorDType {
            name: name.to_string(),
            expected: "F32, F16 or BF16",
            got: info.dtype.clone(),
        })
    }

    /// Checks dtype and shape in the header.
    fn expect(&self, name: &str, dtype: DType, shape: &[usize]) -> Result<()> {
        self.expect_shape(name, shape)?;
        let info = self.checkpoint.info(name).expect("expect_shape found it");
        if info.dtype() == Some(dtype) {
            return Ok(());
        }
        let expected = if dtype == DType::U32 { "U32, because it has scales" } else { "U8" };
        Err(Error::TensorDType { name: name.to_string(), expected, got: info.dtype.clone() })
    }

    /// Checks the shape in the header, before any allocation.
    fn expect_shape(&self, name: &str, expected: &[usize]) -> Result<()> {
        let info = self.checkpoint.info(name).ok_or_else(|| Error::MissingTensor { name: name.to_string() })?;
        if info.shape == expected {
            return Ok(());
        }
        Err(Error::TensorShape { name: name.to_string(), expected: expected.to_vec(), got: info.shape.clone() })
    }
}

impl Source for HfSource<'_> {
    fn name(&self, role: Role) -> Option<String> {
        self.pattern(role)
    }

    fn has(&self, role: Role) -> bool {
        self.pattern(role).is_some_and(|name| self.checkpoint.contains(&name.replace("{}", "0")))
    }

    fn form(&self, role: Role, shape: &[usize]) -> Result<Form> {
        let pattern = self.required(role)?;
        if self.layout(role) != ExpertLayout::Plain {
            return self.expert_form(&pattern, shape);
        }
        if !pattern.contains("{}") {
            return self.form_of(&pattern, shape);
        }
        // One matrix per expert.
        let (&experts, shape) = shape.split_first().expect("matrices of experts have three dimensions");
        let first = self.form_of(&expert(&pattern, 0), shape)?;
        for e in 1..experts {
            let name = expert(&pattern, e);
            if self.form_of(&name, shape)? != first {
                let expected = "of the same format as that of expert 0";
                return Err(Error::TensorDType { name, expected, got: "another one".to_string() });
            }
        }
        Ok(first)
    }

    fn read(&self, role: Role, to: &Matrix<Destination>) -> Result<()> {
        let pattern = self.required(role)?;
        match (self.layout(role), to) {
            (ExpertLayout::Plain, _) => {}
            (_, Matrix::Dense(tensor)) => return self.interleaved(role).read_transposed(&pattern, tensor),
            (_, Matrix::Floats { codes, scales, .. }) => {
                self.interleaved(role).read_rows(&pattern, codes)?;
                return self.interleaved(role).read_rows(&scales_of_blocks(&pattern), scales);
            }
            (_, Matrix::Affine { .. } | Matrix::Blocks { .. }) => unreachable!("`form` gave another one"),
        }
        if !pattern.contains("{}") {
            return self.read_matrix(&pattern, to);
        }
        (0..to.experts()).try_for_each(|e| self.read_matrix(&expert(&pattern, e), &to.expert(e)?))
    }

    fn vector(&self, role: Role, len: usize, device: &Device) -> Result<Tensor> {
        let name = self.required(role)?;
        // ERNIE stores the biases of routers as a row.
        let row = [1, len];
        let is_bias = matches!(role, Role::Block(_, Part::RouterBias));
        let is_row = is_bias && self.checkpoint.info(&name).is_some_and(|info| info.shape == row);
        self.float_dtype(&name, if is_row { &row } else { &row[1..] })?;
        Ok(self.checkpoint.read(&name, device)?.reshape(&[len])?)
    }

    fn bias(&self, role: Role, shape: &[usize], device: &Device) -> Result<Tensor> {
        let pattern = self.required(role)?;
        let name = match (pattern.strip_suffix(".weight"), pattern.strip_suffix("_blocks")) {
            (Some(module), _) => format!("{module}.bias"),
            (None, module) => format!("{}_bias", module.unwrap_or(&pattern)),
        };
        let dtype = self.float_dtype(&name, shape)?;
        if self.layout(role) == ExpertLayout::Plain {
            return self.checkpoint.read(&name, device);
        }
        let bias = Tensor::zeros(device, dtype, shape)?;
        self.interleaved(role).read_rows(&name, &Destination::whole(&bias)?)?;
        Ok(bias)
    }

    fn taps(&self, role: Role, shape: [usize; 2], device: &Device) -> Result<Tensor> {
        let (name, [channels, taps]) = (self.required(role)?, shape);
        // MLX moves the dimension of a channel's inputs, whose size is 1, to the end.
        let (torch, mlx) = ([channels, 1, taps], [channels, taps, 1]);
        let is_mlx = self.checkpoint.info(&name).is_some_and(|info| info.shape == mlx);
        self.float_dtype(&name, if is_mlx { &mlx } else { &torch })?;
        Ok(self.checkpoint.read(&name, device)?.reshape(&shape)?)
    }

    fn has_log_rates(&self) -> bool {
        true
    }

    fn same(&self, a: Role, b: Role) -> Result<bool> {
        let parts = |name: String| {
            let module = name.strip_suffix(".weight").unwrap_or(&name).to_string();
            [name, format!("{module}.scales"), format!("{module}.biases")]
        };
        for (a, b) in parts(self.required(a)?).into_iter().zip(parts(self.required(b)?)) {
            let (has_a, has_b) = (self.checkpoint.contains(&a), self.checkpoint.contains(&b));
            if has_a != has_b || has_a && !self.checkpoint.same(&a, &b)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The names of experts in the checkpoint's layout. `blocks`: the start of the names of each block.
fn expert_names(
    checkpoint: &Checkpoint,
    family: &'static Family,
    blocks: impl Iterator<Item = String>,
) -> (Names, ExpertLayout) {
    let blocks: Vec<String> = blocks.collect();
    let has = |name: &str| {
        let first = name.replace("{}", "0");
        blocks.iter().any(|block| checkpoint.contains(&format!("{block}{first}")))
    };
    let found = family.experts.iter().find(|layout| layout.names.iter().any(|(_, name)| has(name)));
    found.or(family.experts.first()).map_or((&[][..], ExpertLayout::Plain), |of| (of.names, of.layout))
}

fn expert(pattern: &str, index: usize) -> String {
    pattern.replace("{}", &index.to_string())
}

/// The name of the scales of MXFP4 codes.
fn scales_of_blocks(blocks: &str) -> String {
    format!("{}_scales", blocks.strip_suffix("_blocks").unwrap_or(blocks))
}
