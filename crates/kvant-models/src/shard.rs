//! Tensor parallelism: the part of a decoder that each rank of a group of devices has.
//!
//! | tensor | a rank has |
//! |---|---|
//! | queries, keys, values, gates of heads, with their biases; sinks | its heads |
//! | gate and up of MLPs and experts, with their biases | some of the outputs |
//! | the attention's output, down | the inputs that it computes: the ranks' results are summed |
//! | biases of the attention's output and of down | rank 0 has them, other ranks zeros, because of that sum |
//! | the output matrix | some rows of the vocabulary: the ranks' logits are gathered |
//! | embeddings, routers, norms, per-layer inputs | all |
//!
//! Inputs are cut between groups of a quantised matrix. The last rank may have fewer groups of an MLP. Its matrices
//! then end with zeros, because all ranks have tensors of one shape.

use std::ops::Range;

use kvant::Tensor;

use crate::{
    DecoderSpec, Error, Result,
    parallel::{self, PIECE},
    source::{Form, Matrix, Part, Role, Source},
    spec::{AttentionSpec, BlockSpec, FeedForwardSpec},
    weights::dense_parts,
};

/// The largest group that messages propose.
const MAX_PROPOSED: usize = 16;
/// Widths of dense matrices are cut at multiples of this, for which kernels are fast.
const DENSE_STEP: usize = 8;

/// Consecutive elements of a dimension that are divided among the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    /// Elements of all ranks.
    pub whole: usize,
    /// Elements of one rank. Elements beyond the whole are zero.
    pub local: usize,
    /// Consecutive ranks that have the same elements.
    pub copies: usize,
}

impl Share {
    /// `local` of `whole` elements on each rank. If the ranks outnumber the parts, consecutive ranks have equal parts.
    pub(crate) fn new(whole: usize, local: usize, ranks: usize) -> Share {
        // Padding is less than `local`, so the ranks' elements reach twice the whole only if parts are repeated.
        Share { whole, local, copies: (local * ranks / whole.max(1)).max(1) }
    }

    /// The elements of a rank.
    fn range(self, rank: usize) -> Range<usize> {
        let start = (rank / self.copies * self.local).min(self.whole);
        start..(start + self.local).min(self.whole)
    }

    /// The share in bytes, if `units` elements take `bytes`.
    fn scaled(self, bytes: usize, units: usize) -> Share {
        let scale = |elements: usize| elements * bytes / units.max(1);
        Share { whole: scale(self.whole), local: scale(self.local), ..self }
    }
}

/// How a matrix is divided among the ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Every rank has all of it.
    Whole,
    /// By outputs, of one matrix or of several matrices that are joined by rows. Each matrix has a share.
    Outputs(Vec<Share>),
    /// By inputs.
    Inputs(Share),
}

impl Cut {
    /// The shape of a rank's part of a matrix of `shape`.
    pub(crate) fn shape(&self, shape: &[usize]) -> Vec<usize> {
        let mut local = shape.to_vec();
        match (self, &mut local[..]) {
            (Cut::Outputs(shares), [.., outputs, _]) => *outputs = shares.iter().map(|share| share.local).sum(),
            (Cut::Inputs(share), [.., inputs]) => *inputs = share.local,
            (Cut::Whole | Cut::Outputs(_), _) | (Cut::Inputs(_), []) => {}
        }
        local
    }

    /// Writes each rank's part of a matrix in host memory to one on a group.
    pub(crate) fn write(&self, from: &Matrix, to: &Matrix) -> Result<()> {
        from.tensors().into_iter().zip(to.tensors()).try_for_each(|pair| match pair {
            (Some(from), Some(to)) => self.write_tensor(from, to),
            _ => Ok(()),
        })
    }

    fn write_tensor(&self, from: &Tensor, to: &Tensor) -> Result<()> {
        if from.bytes() == 0 || to.bytes() == 0 {
            return Ok(());
        }
        let ([.., rows, _], [.., local_rows, _]) = (from.shape(), to.shape()) else {
            unreachable!("matrices have two dimensions or three")
        };
        match self {
            Cut::Whole => unreachable!("whole matrices are read to the group"),
            Cut::Outputs(shares) => write_rows(from, to, [*rows, *local_rows], shares),
            Cut::Inputs(share) => write_columns(from, to, *share),
        }
    }
}

/// Rows of a tensor in host memory, and their place on one rank.
struct Rows {
    rank: usize,
    from: usize,
    to: usize,
    count: usize,
}

/// Writes each rank's rows of `[.., rows, n]`. Rows beyond the whole stay zero.
fn write_rows(from: &Tensor, to: &Tensor, [rows, local_rows]: [usize; 2], shares: &[Share]) -> Result<()> {
    let (from, to) = (flat_rows(from)?, flat_rows(to)?);
    let row_bytes = from.bytes() / from.shape()[0];
    let step = (PIECE / row_bytes).max(1);
    let mut pieces = Vec::new();
    for matrix in 0..from.shape()[0] / rows {
        let (mut first, mut first_local) = (matrix * rows, matrix * local_rows);
        for share in shares {
            for rank in 0..to.device().ranks() {
                let of_rank = share.range(rank);
                for done in (0..of_rank.len()).step_by(step) {
                    let count = step.min(of_rank.len() - done);
                    pieces.push(Rows { rank, from: first + of_rank.start + done, to: first_local + done, count });
                }
            }
            first += share.whole;
            first_local += share.local;
        }
    }
    parallel::for_each(pieces.len(), Vec::new, |bytes, number| {
        let piece = &pieces[number];
        bytes.resize(piece.count * row_bytes, 0);
        from.rows(piece.from..piece.from + piece.count)?.read_bytes(bytes)?;
        Ok(to.rows(piece.to..piece.to + piece.count)?.on_rank(piece.rank)?.write_bytes(bytes)?)
    })
}

/// Writes each rank's columns of `[.., n]`, and zeros beyond the whole.
fn write_columns(from: &Tensor, to: &Tensor, share: Share) -> Result<()> {
    let (from, to) = (flat_rows(from)?, flat_rows(to)?);
    let rows = from.shape()[0];
    let row_bytes = from.bytes() / rows;
    let share = share.scaled(row_bytes, share.whole);
    let step = (PIECE / row_bytes).clamp(1, rows);
    parallel::for_each(rows.div_ceil(step), <[Vec<u8>; 2]>::default, |[bytes, part], number| {
        let range = number * step..rows.min((number + 1) * step);
        bytes.resize(range.len() * row_bytes, 0);
        from.rows(range.clone())?.read_bytes(bytes)?;
        let to = to.rows(range)?;
        for rank in 0..to.device().ranks() {
            of_rank(bytes, &[share], rank, part);
            to.on_rank(rank)?.write_bytes(part)?;
        }
        Ok(())
    })
}

/// A tensor as rows of its last dimension.
fn flat_rows(tensor: &Tensor) -> Result<Tensor> {
    let columns = tensor.shape().last().copied().unwrap_or(1);
    Ok(tensor.reshape(&[tensor.elements() / columns.max(1), columns])?)
}

/// A rank's part of rows that consist of `shares`.
pub(crate) fn of_rank<T: Copy + Default>(rows: &[T], shares: &[Share], rank: usize, out: &mut Vec<T>) {
    out.clear();
    let width = shares.iter().map(|share| share.whole).sum::<usize>().max(1);
    for row in rows.chunks_exact(width) {
        let mut first = 0;
        for share in shares {
            let of_rank = share.range(rank);
            let missing = share.local - of_rank.len();
            out.extend_from_slice(&row[first + of_rank.start..first + of_rank.end]);
            out.resize(out.len() + missing, T::default());
            first += share.whole;
        }
    }
}

/// Number of rows of the output matrix that a rank has: all if the ranks do not divide the vocabulary.
pub(crate) fn output_rows(vocab_size: usize, ranks: usize) -> usize {
    if vocab_size.is_multiple_of(ranks) { vocab_size / ranks } else { vocab_size }
}

/// The decoder that each of `ranks` ranks runs: fewer heads and narrower MLPs, and the whole vocabulary.
///
/// # Errors
/// `Indivisible`; those of the source.
pub(crate) fn local_spec(spec: &DecoderSpec, ranks: usize, source: &dyn Source) -> Result<DecoderSpec> {
    if ranks == 1 {
        return Ok(spec.clone());
    }
    spec.check()?;
    if spec.blocks.iter().any(|block| block.attention().is_none()) {
        let reason = "models with recurrent states run on one device".to_string();
        return Err(Error::Unsupported { what: format!("a group of {ranks} devices"), reason });
    }
    let blocks = spec.blocks.iter().enumerate();
    let steps: Vec<Steps> =
        blocks.map(|(l, block)| Steps::new(l, block, spec.hidden_size, source)).collect::<Result<_>>()?;
    let blocks = |ranks| {
        let blocks = spec.blocks.iter().zip(&steps).enumerate();
        blocks.map(|(l, (block, steps))| steps.local_block(block, ranks).map_err(|misfit| (l, misfit))).collect()
    };
    let divided: std::result::Result<Vec<BlockSpec>, (usize, Misfit)> = blocks(ranks);
    match divided {
        Ok(blocks) => Ok(DecoderSpec { blocks, ..spec.clone() }),
        Err((layer, Misfit { what, count })) => {
            let fits = |ranks: &usize| blocks(*ranks).is_ok();
            Err(Error::Indivisible { what, count, layer, ranks, fits: (2..=MAX_PROPOSED).filter(fits).collect() })
        }
    }
}

/// A number that the ranks cannot share.
struct Misfit {
    what: &'static str,
    count: usize,
}

/// The inputs between which the matrices of a block may be cut.
struct Steps {
    attention: usize,
    dense: usize,
    moe: usize,
}

impl Steps {
    fn new(l: usize, block: &BlockSpec, h: usize, source: &dyn Source) -> Result<Steps> {
        let step = |part, shape: &[usize]| Ok::<_, Error>(step_of(source.form(Role::Block(l, part), shape)?));
        let feed_forward = &block.feed_forward;
        let [.., down] = dense_parts(feed_forward);
        Ok(Steps {
            attention: match block.attention() {
                Some(attention) => step(Part::AttentionOutput, &[h, attention.q_width()])?,
                None => 1,
            },
            dense: feed_forward.dense().map_or(Ok(1), |dense| step(down, &[h, dense.width]))?,
            moe: feed_forward.moe().map_or(Ok(1), |moe| step(Part::ExpertDown, &[moe.experts, h, moe.width]))?,
        })
    }

    fn local_block(&self, block: &BlockSpec, ranks: usize) -> std::result::Result<BlockSpec, Misfit> {
        let mut local = block.clone();
        local.attention_mut().map_or(Ok(()), |attention| self.divide_heads(attention, ranks))?;
        match &mut local.feed_forward {
            FeedForwardSpec::Dense(dense) => divide_width(&mut dense.width, self.dense, ranks)?,
            FeedForwardSpec::Moe(moe) => divide_width(&mut moe.width, self.moe, ranks)?,
            FeedForwardSpec::Parallel(dense, moe, _) => {
                divide_width(&mut dense.width, self.dense, ranks)?;
                divide_width(&mut moe.width, self.moe, ranks)?;
            }
        }
        Ok(local)
    }

    /// Divides the heads. If there are more ranks than KV heads, several ranks have one KV head.
    fn divide_heads(&self, attention: &mut AttentionSpec, ranks: usize) -> std::result::Result<(), Misfit> {
        let AttentionSpec { heads, kv_heads, .. } = *attention;
        if !heads.is_multiple_of(ranks) {
            return Err(Misfit { what: "heads", count: heads });
        }
        if !kv_heads.is_multiple_of(ranks) && !ranks.is_multiple_of(kv_heads) {
            return Err(Misfit { what: "KV heads", count: kv_heads });
        }
        attention.heads = heads / ranks;
        attention.kv_heads = (kv_heads / ranks).max(1);
        // A dense matrix may be cut anywhere.
        let is_cut = attention.q_width().is_multiple_of(self.attention) || self.attention == DENSE_STEP;
        if !is_cut {
            let count = heads * attention.head_dim / self.attention;
            return Err(Misfit { what: "groups of inputs of the attention's output", count });
        }
        Ok(())
    }
}

/// Each rank gets a whole number of steps, the last one may get fewer.
fn divide_width(width: &mut usize, step: usize, ranks: usize) -> std::result::Result<(), Misfit> {
    let steps = width.div_ceil(step);
    let of_rank = steps.div_ceil(ranks);
    if of_rank.saturating_mul(ranks - 1) >= steps {
        return Err(Misfit { what: "groups of inputs of an MLP's down projection", count: steps });
    }
    *width = of_rank * step;
    Ok(())
}

/// The inputs between which a matrix of this form may be cut.
fn step_of(form: Form) -> usize {
    match form {
        Form::Dense(_) => DENSE_STEP,
        Form::Affine { group, .. } => group,
        Form::Blocks(format) => format.block_inputs(),
        // A multiple of all groups, as kernels require.
        Form::Floats { .. } => 32,
    }
}
