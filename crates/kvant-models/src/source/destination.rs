//! The place in which a source writes the bytes of a tensor: on a device, or in the parts of the ranks that share it.

use std::cell::Cell;

use kvant::{DType, Tensor};

use crate::{
    Result,
    cut::{Cut, Share, of_rank},
    parallel::PIECE,
};

/// The destination of a tensor, or of the matrix of one expert.
///
/// Sources write it in pieces, in any order and on several threads. Each piece goes to the ranks that have a part of
/// it: the tensor is never in host memory as a whole.
#[derive(Clone, Debug)]
pub(crate) struct Destination<'a> {
    tensor: Tensor,
    /// The tensor of each rank, as one dimension. There is one on a device that is no group.
    ranks: Vec<Tensor>,
    cut: &'a Cut,
    /// Rows and columns of a matrix, in all ranks together; the row has this number of bytes.
    rows: usize,
    row_bytes: usize,
    /// Rows of a matrix on one rank.
    local_rows: usize,
    /// The shape of the whole tensor.
    shape: Vec<usize>,
    /// Bytes of the matrices of earlier experts.
    offset: usize,
}

impl<'a> Destination<'a> {
    /// On each rank, `tensor` is the part of a tensor of `shape` that `cut` assigns to the rank. Its elements after the
    /// end of the whole must be zero.
    pub(crate) fn new(tensor: &Tensor, shape: Vec<usize>, cut: &'a Cut) -> Result<Destination<'a>> {
        let flat = tensor.reshape(&[tensor.elements()])?;
        let ranks = (0..tensor.device().ranks()).map(|rank| flat.on_rank(rank)).collect::<kvant::Result<_>>()?;
        let rows_of = |shape: &[usize]| shape.len().checked_sub(2).map_or(1, |dimension| shape[dimension]);
        let (rows, local_rows) = (rows_of(&shape), rows_of(tensor.shape()));
        let row_bytes = shape.last().copied().unwrap_or(1) * tensor.dtype().size();
        Ok(Destination { tensor: tensor.clone(), ranks, cut, rows, row_bytes, local_rows, shape, offset: 0 })
    }

    /// All of a tensor, on every rank.
    pub(crate) fn whole(tensor: &Tensor) -> Result<Destination<'static>> {
        const WHOLE: &Cut = &Cut::Whole;
        Destination::new(tensor, tensor.shape().to_vec(), WHOLE)
    }

    /// A new tensor of another dtype, divided like this one, and its destination.
    pub(crate) fn in_dtype(&self, dtype: DType) -> Result<(Tensor, Destination<'a>)> {
        let tensor = Tensor::zeros(self.tensor.device(), dtype, self.tensor.shape())?;
        let destination = Destination::new(&tensor, self.shape.clone(), self.cut)?;
        Ok((tensor, destination))
    }

    /// The tensor on the device, which has the parts of all ranks.
    pub(crate) fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// The matrix of an expert of `[E, outputs, inputs]`.
    pub(crate) fn expert(&self, index: usize) -> Destination<'a> {
        let shape = self.shape[1..].to_vec();
        let bytes = self.bytes() / self.shape[0].max(1);
        Destination { shape, offset: self.offset + index * bytes, ..self.clone() }
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The number of devices that are written.
    pub(crate) fn devices(&self) -> usize {
        self.ranks.len()
    }

    pub(crate) fn dtype(&self) -> DType {
        self.tensor.dtype()
    }

    pub(crate) fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.elements() * self.dtype().size()
    }

    /// Bytes to write at once: whole rows, if one is not too long.
    pub(crate) fn piece(&self) -> usize {
        if (1..=PIECE).contains(&self.row_bytes) { PIECE / self.row_bytes * self.row_bytes } else { PIECE }
    }

    /// Writes little-endian bytes from byte `start` on. Both ends are those of elements.
    pub(crate) fn write_at(&self, start: usize, bytes: &[u8]) -> Result<()> {
        let start = self.offset + start;
        match self.cut {
            Cut::Whole => (0..self.ranks.len()).try_for_each(|rank| self.upload(rank, start, bytes)),
            Cut::Outputs(shares) => self.write_outputs(shares, start, bytes),
            Cut::Inputs(shares) => {
                let inputs = shares.iter().map(|share| share.whole).sum();
                let shares: Vec<Share> = shares.iter().map(|share| share.scaled(self.row_bytes, inputs)).collect();
                self.write_inputs(&shares, start, bytes)
            }
        }
    }

    /// Writes the rows of each rank.
    fn write_outputs(&self, shares: &[Share], start: usize, bytes: &[u8]) -> Result<()> {
        let (matrix_bytes, end) = ((self.rows * self.row_bytes).max(1), start + bytes.len());
        for matrix in start / matrix_bytes..end.div_ceil(matrix_bytes) {
            let (mut first, mut first_local) = (matrix * self.rows, matrix * self.local_rows);
            for share in shares {
                for rank in 0..self.ranks.len() {
                    let rows = share.range(rank);
                    let from = (first + rows.start) * self.row_bytes;
                    let (a, b) = (from.max(start), end.min((first + rows.end) * self.row_bytes));
                    if a < b {
                        self.upload(rank, first_local * self.row_bytes + a - from, &bytes[a - start..b - start])?;
                    }
                }
                first += share.whole;
                first_local += share.local;
            }
        }
        Ok(())
    }

    /// Writes the columns of each rank, which `shares` give in bytes.
    fn write_inputs(&self, shares: &[Share], start: usize, bytes: &[u8]) -> Result<()> {
        let (width, local) = (self.row_bytes.max(1), shares.iter().map(|share| share.local).sum::<usize>());
        // The bytes are the end of a row, then whole rows, then the start of a row.
        let (head, rest) = bytes.split_at((start.next_multiple_of(width) - start).min(bytes.len()));
        let (rows, tail) = rest.split_at(rest.len() / width * width);
        let first = (start + head.len()) / width;
        // The memory stays with the thread: new memory for each piece would cost more than the copy.
        thread_local! { static PART: Cell<Vec<u8>> = const { Cell::new(Vec::new()) } }
        let mut part = PART.take();
        let written = (0..self.ranks.len()).try_for_each(|rank| {
            self.write_columns(rank, shares, start, head)?;
            of_rank(rows, shares, rank, &mut part);
            self.upload(rank, first * local, &part)?;
            self.write_columns(rank, shares, start + head.len() + rows.len(), tail)
        });
        PART.set(part);
        written
    }

    /// Writes a rank's columns of a part of one row.
    fn write_columns(&self, rank: usize, shares: &[Share], start: usize, bytes: &[u8]) -> Result<()> {
        let (row, column) = (start / self.row_bytes.max(1), start % self.row_bytes.max(1));
        let local = shares.iter().map(|share| share.local).sum::<usize>();
        let (mut first, mut first_local) = (0, row * local);
        for share in shares {
            let columns = share.range(rank);
            let from = first + columns.start;
            let (a, b) = (from.max(column), (first + columns.end).min(column + bytes.len()));
            if a < b {
                self.upload(rank, first_local + a - from, &bytes[a - column..b - column])?;
            }
            first += share.whole;
            first_local += share.local;
        }
        Ok(())
    }

    /// Writes bytes of a rank's tensor.
    fn upload(&self, rank: usize, start: usize, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let size = self.dtype().size();
        debug_assert!(start.is_multiple_of(size) && bytes.len().is_multiple_of(size), "{start}, {}", bytes.len());
        Ok(self.ranks[rank].rows(start / size..(start + bytes.len()) / size)?.write_bytes(bytes)?)
    }
}

#[cfg(test)]
mod tests {
    use kvant::{CpuOptions, Device};

    use super::*;

    fn group(ranks: usize) -> Device {
        let rank = |_| Device::cpu_with(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap();
        Device::group(&(0..ranks).map(rank).collect::<Vec<_>>()).unwrap()
    }

    /// The tensor of a rank, after its destination has got 0, 1, 2, … in pieces of `step` elements, the last one first.
    fn written(device: &Device, shape: &[usize], cut: &Cut, step: usize) -> Vec<Vec<u32>> {
        let tensor = Tensor::zeros(device, DType::U32, &cut.shape(shape)).unwrap();
        let to = Destination::new(&tensor, shape.to_vec(), cut).unwrap();
        let numbers: Vec<u32> = (0..to.elements() as u32).collect();
        for (index, piece) in numbers.chunks(step).enumerate().rev() {
            let bytes: Vec<u8> = piece.iter().flat_map(|number| number.to_le_bytes()).collect();
            to.write_at(index * step * 4, &bytes).unwrap();
        }
        (0..device.ranks()).map(|rank| tensor.on_rank(rank).unwrap().to_vec().unwrap()).collect()
    }

    /// Pieces that end within rows, and matrices of experts, give each rank its part.
    #[test]
    fn pieces_of_any_length_reach_their_ranks() {
        let device = group(3);
        let shape = [2, 5, 4];
        let numbers: Vec<u32> = (0..40).collect();
        // Two matrices of 2 and 3 rows in one; the last rank has padding only.
        let shares = vec![Share::new(2, 1, 3), Share::new(3, 1, 3)];
        let rows = Cut::Outputs(shares.clone());
        let columns = Cut::Inputs(vec![Share::new(4, 2, 3)]);
        // Each rank has a column of both halves; the last one has padding only.
        let halves = vec![Share::new(2, 1, 3); 2];
        let halved = Cut::Inputs(halves.clone());
        for step in 1..=40 {
            assert_eq!(written(&device, &shape, &Cut::Whole, step), vec![numbers.clone(); 3], "{step}");
            let (by_row, by_column) = (written(&device, &shape, &rows, step), written(&device, &shape, &columns, step));
            for rank in 0..3 {
                let mut expected: Vec<&u32> = Vec::new();
                for matrix in numbers.chunks(20) {
                    let matrix: Vec<&[u32]> = matrix.chunks(4).collect();
                    let mut of_rank = Vec::new();
                    super::of_rank(&matrix, &shares, rank, &mut of_rank);
                    expected.extend(of_rank.into_iter().flat_map(|row| if row.is_empty() { &[0; 4] } else { row }));
                }
                assert_eq!(by_row[rank].iter().collect::<Vec<_>>(), expected, "{step}, rank {rank}");
                let column = |number: &u32| rank < 2 && *number as usize % 4 / 2 == rank;
                let mut expected: Vec<u32> = numbers.iter().copied().filter(column).collect();
                expected.resize(20, 0);
                assert_eq!(by_column[rank], expected, "{step}, rank {rank}");
                let mut expected = Vec::new();
                super::of_rank(&numbers, &halves, rank, &mut expected);
                assert_eq!(written(&device, &shape, &halved, step)[rank], expected, "{step}, rank {rank}");
            }
        }
    }

    /// Experts that are written one by one.
    #[test]
    fn the_matrix_of_an_expert() {
        let device = group(2);
        let cut = Cut::Outputs(vec![Share::new(4, 2, 2)]);
        let tensor = Tensor::zeros(&device, DType::U8, &[3, 2, 2]).unwrap();
        let to = Destination::new(&tensor, vec![3, 4, 2], &cut).unwrap();
        for expert in 0..3u8 {
            let to = to.expert(usize::from(expert));
            assert_eq!((to.shape(), to.bytes()), (&[4, 2][..], 8));
            to.write_at(0, &[10 * expert, 1, 2, 3]).unwrap();
            to.write_at(4, &[4, 5, 6, 7]).unwrap();
        }
        let rank = |rank| tensor.on_rank(rank).unwrap().to_vec::<u8>().unwrap();
        assert_eq!(rank(0), [0, 1, 2, 3, 10, 1, 2, 3, 20, 1, 2, 3]);
        assert_eq!(rank(1), [4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7]);
    }
}
