//! Matrices in the formats that kernels read.

use std::ops::Range;

use kvant::{
    DType, Device, Encoder, Tensor,
    ops::{self, Affine, BlockFormat, Blocks, FloatFormat, ScaledFloats, Weight},
};

use super::Destination;
use crate::{Error, Result, cut::Cut};

/// A matrix, or the matrices of all experts, dense or quantised. `T` has one of its tensors.
#[derive(Clone, Debug)]
pub(crate) enum Matrix<T = Tensor> {
    Dense(T),
    Affine {
        codes: T,
        scales: T,
        biases: T,
        bits: u32,
        group: usize,
    },
    /// u8; the last dimension is the bytes of a row.
    Blocks {
        data: T,
        format: BlockFormat,
    },
    Floats {
        codes: T,
        scales: T,
        format: FloatFormat,
    },
}

impl Matrix {
    /// Allocates a matrix of `shape`, given in elements.
    pub(crate) fn zeros(form: Form, shape: &[usize], device: &Device) -> Result<Matrix> {
        let zeros = |dtype, shape: &[usize]| Ok::<_, Error>(Tensor::zeros(device, dtype, shape)?);
        Ok(match form {
            Form::Dense(dtype) => Matrix::Dense(zeros(dtype, shape)?),
            Form::Affine { bits, group, dtype } => {
                let groups = form.groups(shape);
                let [scales, biases] = [zeros(dtype, &groups)?, zeros(dtype, &groups)?];
                Matrix::Affine { codes: zeros(DType::U32, &form.words(shape))?, scales, biases, bits, group }
            }
            Form::Blocks(format) => Matrix::Blocks { data: zeros(DType::U8, &form.words(shape))?, format },
            Form::Floats { format, codes } => Matrix::Floats {
                codes: zeros(codes, &form.words(shape))?,
                scales: zeros(DType::U8, &form.groups(shape))?,
                format,
            },
        })
    }

    /// The matrix as an argument of operations.
    pub(crate) fn weight(&self) -> Weight<'_> {
        match self {
            Matrix::Dense(tensor) => Weight::Dense(tensor),
            Matrix::Affine { codes, scales, biases, bits, group } => {
                Weight::Affine(Affine { codes, scales, biases, bits: *bits, group: *group })
            }
            Matrix::Blocks { data, format } => Weight::Blocks(Blocks::new(data, *format)),
            Matrix::Floats { codes, scales, format } => Weight::Floats(ScaledFloats::new(codes, scales, *format)),
        }
    }

    /// Another handle of the matrix.
    pub(crate) fn all(&self) -> Result<Matrix> {
        self.views(|tensor| Ok(tensor.clone()))
    }

    /// The number of outputs of a matrix `[outputs, inputs]`.
    pub(crate) fn outputs(&self) -> usize {
        self.tensors()[0].map_or(0, |first| first.shape()[0])
    }

    /// Returns some of the outputs; for `[E, outputs, inputs]`, some of the experts.
    pub(crate) fn rows(&self, rows: Range<usize>) -> Result<Matrix> {
        self.views(|tensor| Ok(tensor.rows(rows.clone())?))
    }

    /// The matrix `[outputs, inputs]` of one expert.
    pub(crate) fn expert(&self, index: usize) -> Result<Matrix> {
        self.views(|tensor| {
            let one = tensor.rows(index..index + 1)?;
            Ok(one.reshape(&tensor.shape()[1..])?)
        })
    }

    /// The destination of a matrix of this form and `shape`. This matrix has the part of each rank, given by `cut`.
    pub(crate) fn destination<'a>(&self, form: Form, shape: &[usize], cut: &'a Cut) -> Result<Matrix<Destination<'a>>> {
        let words = |tensor: &Tensor| Destination::new(tensor, form.words(shape), cut);
        let groups = |tensor: &Tensor| Destination::new(tensor, form.groups(shape), cut);
        self.map(words, groups)
    }

    /// Records copies of all parts to a matrix of equal form and shape.
    pub(crate) fn copy_to(&self, enc: &mut Encoder, to: &Matrix) -> Result<()> {
        for (from, to) in self.tensors().into_iter().zip(to.tensors()) {
            if let (Some(from), Some(to)) = (from, to) {
                ops::copy(enc, from, to)?;
            }
        }
        Ok(())
    }

    pub(crate) fn tensors(&self) -> [Option<&Tensor>; 3] {
        match self {
            Matrix::Dense(tensor) | Matrix::Blocks { data: tensor, .. } => [Some(tensor), None, None],
            Matrix::Affine { codes, scales, biases, .. } => [Some(codes), Some(scales), Some(biases)],
            Matrix::Floats { codes, scales, .. } => [Some(codes), Some(scales), None],
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.tensors().into_iter().flatten().map(Tensor::bytes).sum()
    }
}

impl Matrix<Destination<'_>> {
    /// The matrix `[outputs, inputs]` of one expert.
    pub(crate) fn expert(&self, index: usize) -> Result<Self> {
        self.views(|tensor| Ok(tensor.expert(index)))
    }

    /// The number of experts in `[E, outputs, inputs]`.
    pub(crate) fn experts(&self) -> usize {
        match self {
            Matrix::Dense(first)
            | Matrix::Affine { codes: first, .. }
            | Matrix::Blocks { data: first, .. }
            | Matrix::Floats { codes: first, .. } => first.shape()[0],
        }
    }
}

impl<T> Matrix<T> {
    /// Applies `view` to each tensor of the matrix.
    pub(crate) fn views(&self, view: impl Fn(&T) -> Result<T>) -> Result<Self> {
        self.map(&view, &view)
    }

    /// Applies `words` to the main tensor, and `groups` to scales and biases.
    fn map<U>(&self, words: impl Fn(&T) -> Result<U>, groups: impl Fn(&T) -> Result<U>) -> Result<Matrix<U>> {
        Ok(match self {
            Matrix::Dense(tensor) => Matrix::Dense(words(tensor)?),
            Matrix::Affine { codes, scales, biases, bits, group } => Matrix::Affine {
                codes: words(codes)?,
                scales: groups(scales)?,
                biases: groups(biases)?,
                bits: *bits,
                group: *group,
            },
            Matrix::Blocks { data, format } => Matrix::Blocks { data: words(data)?, format: *format },
            Matrix::Floats { codes, scales, format } => {
                Matrix::Floats { codes: words(codes)?, scales: groups(scales)?, format: *format }
            }
        })
    }
}

/// The storage format of a matrix. Matrices with equal form and inputs can be joined.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Form {
    Dense(DType),
    /// `dtype`: the dtype of scales and biases.
    Affine {
        bits: u32,
        group: usize,
        dtype: DType,
    },
    /// The number of inputs must be a multiple of the format's block.
    Blocks(BlockFormat),
    /// `codes`: their dtype, u8, or u32 with several codes per word.
    Floats {
        format: FloatFormat,
        codes: DType,
    },
}

impl Form {
    /// The shape of the main tensor of a matrix of `shape`: elements, words of codes or bytes of blocks.
    pub(crate) fn words(self, shape: &[usize]) -> Vec<usize> {
        match self {
            Form::Dense(_) => shape.to_vec(),
            Form::Affine { bits, .. } => with_inputs(shape, |inputs| inputs * bits as usize / 32),
            Form::Blocks(format) => with_inputs(shape, |inputs| inputs / format.block_inputs() * format.block_bytes()),
            Form::Floats { format, codes } => with_inputs(shape, |inputs| inputs * format.bits() / 8 / codes.size()),
        }
    }

    /// Bytes of a matrix of `shape`.
    pub(crate) fn bytes(self, shape: &[usize]) -> usize {
        let words = self.words(shape).into_iter().product::<usize>();
        let groups = self.groups(shape).into_iter().product::<usize>();
        match self {
            Form::Dense(dtype) => words * dtype.size(),
            Form::Affine { dtype, .. } => words * DType::U32.size() + 2 * groups * dtype.size(),
            Form::Blocks(_) => words,
            Form::Floats { codes, .. } => words * codes.size() + groups,
        }
    }

    /// The shape of scales (and biases).
    pub(crate) fn groups(self, shape: &[usize]) -> Vec<usize> {
        match self {
            Form::Dense(_) | Form::Blocks(_) => Vec::new(),
            Form::Affine { group, .. } => with_inputs(shape, |inputs| inputs / group),
            Form::Floats { format, .. } => with_inputs(shape, |inputs| inputs / format.group()),
        }
    }
}

fn with_inputs(shape: &[usize], change: impl Fn(usize) -> usize) -> Vec<usize> {
    let (&inputs, rows) = shape.split_last().expect("a matrix has dimensions");
    [rows, &[change(inputs)]].concat()
}
