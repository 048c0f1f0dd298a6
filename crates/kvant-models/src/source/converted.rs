//! Converts dense matrices to another dtype.

use kvant::{
    DType, Device, Tensor,
    ops::{self, Embed, Weight},
};

use super::{Destination, DraftPart, Form, Matrix, Part, Role, Source};
use crate::Result;

/// Rows converted at once.
const ROWS: usize = 1 << 16;

/// Whether [`LoadOptions::dense_weights`](crate::LoadOptions::dense_weights) applies to a matrix. It applies to dense
/// matrices except routers and centroids: rounding a router could change the selected experts.
pub(crate) fn is_converted(role: Role, form: Form) -> bool {
    let selects = matches!(role, Role::Block(_, Part::Router | Part::SharedRouter) | Role::Draft(DraftPart::Centroids));
    matches!(form, Form::Dense(_)) && !selects
}

/// A source whose dense matrices have `dtype`.
pub(crate) struct Converted<'a> {
    pub source: &'a dyn Source,
    pub dtype: DType,
}

impl Source for Converted<'_> {
    fn name(&self, role: Role) -> Option<String> {
        self.source.name(role)
    }

    fn has(&self, role: Role) -> bool {
        self.source.has(role)
    }

    fn form(&self, role: Role, shape: &[usize]) -> Result<Form> {
        let form = self.source.form(role, shape)?;
        Ok(if is_converted(role, form) { Form::Dense(self.dtype) } else { form })
    }

    fn read(&self, role: Role, to: &Matrix<Destination>) -> Result<()> {
        let Matrix::Dense(converted) = to else { return self.source.read(role, to) };
        let stored = match self.source.form(role, converted.shape())? {
            Form::Dense(dtype) if dtype != converted.dtype() => dtype,
            _ => return self.source.read(role, to),
        };
        let (from, parts) = converted.in_dtype(stored)?;
        self.source.read(role, &Matrix::Dense(parts))?;
        convert(&from, converted.tensor())
    }

    fn vector(&self, role: Role, len: usize, device: &Device) -> Result<Tensor> {
        self.source.vector(role, len, device)
    }

    fn bias(&self, role: Role, shape: &[usize], device: &Device) -> Result<Tensor> {
        self.source.bias(role, shape, device)
    }

    fn taps(&self, role: Role, shape: [usize; 2], device: &Device) -> Result<Tensor> {
        self.source.taps(role, shape, device)
    }

    fn has_log_rates(&self) -> bool {
        self.source.has_log_rates()
    }

    fn same(&self, a: Role, b: Role) -> Result<bool> {
        self.source.same(a, b)
    }
}

/// Converts a dense matrix on the device to the dtype of `to`, by looking up all rows. Shapes are equal.
fn convert(from: &Tensor, to: &Tensor) -> Result<()> {
    let (&inputs, outer) = to.shape().split_last().expect("a matrix has dimensions");
    let rows: usize = outer.iter().product();
    let [from, to] = [from.reshape(&[rows, inputs])?, to.reshape(&[rows, inputs])?];
    let ids: Vec<u32> = (0..rows.min(ROWS) as u32).collect();
    let ids = Tensor::from_slice(to.device(), &ids, &[ids.len()])?;
    let mut enc = to.device().encoder()?;
    for first in (0..rows).step_by(ROWS) {
        let end = (first + ROWS).min(rows);
        let [from, to] = [from.rows(first..end)?, to.rows(first..end)?];
        ops::embed(&mut enc, &Embed::new(Weight::Dense(&from), &ids.rows(0..end - first)?, &to))?;
    }
    Ok(enc.commit()?.wait()?)
}
