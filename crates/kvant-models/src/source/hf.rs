//! Checkpoints of safetensors files as Hugging Face and MLX lay them out.

use kvant::{DType, Device, Tensor};

use super::{
    Form, Matrix, Part, Role, Source,
    quantization::{Quantization, Scheme},
};
use crate::{
    Error, Result,
    families::{Family, Names},
    safetensors::Checkpoint,
};

/// The prefixes of a text model's tensors.
const PREFIXES: [&str; 5] = ["model.", "model.language_model.", "language_model.model.", "language_model.", ""];
/// The output matrix is outside of the text model.
const OUTPUTS: [&str; 4] =
    ["lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight", "model.language_model.lm_head.weight"];
const EMBEDDING: &str = "embed_tokens.weight";

/// A checkpoint with a family's names.
#[derive(Debug)]
pub(crate) struct HfSource<'a> {
    checkpoint: &'a Checkpoint,
    quantization: Quantization<'a>,
    family: &'static Family,
    /// The layout of experts that the file has.
    experts: &'static [(Part, &'static str)],
    prefix: &'static str,
}

impl<'a> HfSource<'a> {
    /// `blocks` is the number of the decoder's blocks.
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
        let has = |name: &str| (0..blocks).any(|l| checkpoint.contains(&full(prefix, l, &name.replace("{}", "0"))));
        let layouts = family.experts.iter().copied();
        let found = layouts.clone().find(|layout: &Names| layout.iter().any(|(_, name)| has(name)));
        let experts = found.or(layouts.clone().next()).unwrap_or(&[]);
        Ok(HfSource { checkpoint, quantization, family, experts, prefix })
    }

    /// The name of a tensor; that of an expert has `{}` for its number.
    fn pattern(&self, role: Role) -> Option<String> {
        let global = |name: &str| Some(format!("{}{name}", self.prefix));
        match role {
            Role::Embedding => global(EMBEDDING),
            Role::FinalNorm => global("norm.weight"),
            Role::Output => {
                let found = OUTPUTS.into_iter().find(|name| self.checkpoint.contains(name));
                Some(found.unwrap_or(OUTPUTS[0]).to_string())
            }
            Role::PerLayerTable => global("embed_tokens_per_layer.weight"),
            Role::PerLayerProjection => global("per_layer_model_projection.weight"),
            Role::PerLayerProjectionNorm => global("per_layer_projection_norm.weight"),
            Role::Block(l, part) => {
                let mut tables = std::iter::once(self.experts).chain(self.family.names.iter().copied());
                let of_part = |table: Names| table.iter().find(|(of, _)| *of == part).map(|(_, name)| *name);
                Some(full(self.prefix, l, tables.find_map(of_part)?))
            }
        }
    }

    /// As [`HfSource::pattern`], for a role that the loader asks for.
    fn required(&self, role: Role) -> Result<String> {
        self.pattern(role).ok_or_else(|| Error::MissingTensor { name: format!("{role:?}") })
    }

    fn form_of(&self, name: &str, shape: &[usize]) -> Result<Form> {
        let Some((module, scales)) = self.scales(name) else {
            return Ok(Form::Dense(self.float_dtype(name, shape)?));
        };
        let scheme = self.quantization.scheme(module)?.ok_or_else(|| Error::Config {
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
        let Scheme { bits, group } = scheme;
        let form = |dtype| Form::Affine { bits, group, dtype };
        let any = form(DType::F32);
        self.expect_shape(name, &any.words(shape))?;
        let info = self.checkpoint.info(name).expect("expect_shape found it");
        if info.dtype() != Some(DType::U32) {
            let (expected, got) = ("U32, because it has scales", info.dtype.clone());
            return Err(Error::TensorDType { name: name.to_string(), expected, got });
        }
        let dtype = self.float_dtype(&scales, &any.groups(shape))?;
        let biases = format!("{module}.biases");
        let got = self.float_dtype(&biases, &any.groups(shape))?;
        if got != dtype {
            return Err(Error::dtype(&biases, "of the scales' dtype", got));
        }
        Ok(form(dtype))
    }

    /// The module of a matrix and the name of its scales, if it is quantised.
    fn scales<'n>(&self, name: &'n str) -> Option<(&'n str, String)> {
        let module = name.strip_suffix(".weight")?;
        let scales = format!("{module}.scales");
        self.checkpoint.contains(&scales).then_some((module, scales))
    }

    fn read_matrix(&self, name: &str, to: &Matrix) -> Result<()> {
        match to {
            Matrix::Dense(tensor) => self.checkpoint.read_into(name, tensor),
            Matrix::Affine { codes, scales, biases, .. } => {
                let module = name.strip_suffix(".weight").expect("only modules are quantised");
                self.checkpoint.read_into(name, codes)?;
                self.checkpoint.read_into(&format!("{module}.scales"), scales)?;
                self.checkpoint.read_into(&format!("{module}.biases"), biases)
            }
            Matrix::Blocks { data, .. } => self.checkpoint.read_into(name, data),
        }
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

impl Source for HfSource<'_> {
    fn name(&self, role: Role) -> Option<String> {
        self.pattern(role)
    }

    fn has(&self, role: Role) -> bool {
        self.pattern(role).is_some_and(|name| self.checkpoint.contains(&name.replace("{}", "0")))
    }

    fn form(&self, role: Role, shape: &[usize]) -> Result<Form> {
        let pattern = self.required(role)?;
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

    fn read(&self, role: Role, to: &Matrix) -> Result<()> {
        let pattern = self.required(role)?;
        if !pattern.contains("{}") {
            return self.read_matrix(&pattern, to);
        }
        (0..to.experts()).try_for_each(|e| self.read_matrix(&expert(&pattern, e), &to.expert(e)?))
    }

    fn vector(&self, role: Role, len: usize, device: &Device) -> Result<Tensor> {
        let name = self.required(role)?;
        self.float_dtype(&name, &[len])?;
        self.checkpoint.read(&name, device)
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

fn full(prefix: &str, layer: usize, name: &str) -> String {
    format!("{prefix}layers.{layer}.{name}")
}

fn expert(pattern: &str, index: usize) -> String {
    pattern.replace("{}", &index.to_string())
}
