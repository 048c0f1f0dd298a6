//! One pass of a drafter.

use kvant::{
    DType, Encoder, KvPool, Step, Tensor,
    ops::{self, Linear},
};

use super::{DraftSpace, Drafter, entry::Entry};
use crate::{Error, Result, forward::Wanted};

/// The inputs of R rows.
#[derive(Clone, Copy)]
pub(crate) struct DraftInput<'a> {
    /// The token after each row's position, u32 `[R]`.
    pub ids: &'a Tensor,
    pub hidden: DraftHidden<'a>,
}

/// The hidden states of R rows.
#[derive(Clone, Copy)]
pub(crate) enum DraftHidden<'a> {
    /// The target's: `rows` are rows of `table`, u32 `[taps.count()·R]`, the taps of a row one after the other
    /// ([`Features`](crate::forward::Features)).
    Features { table: &'a Tensor, rows: &'a Tensor },
    /// The output of an earlier pass, `[R, hidden_width]`.
    Fed(&'a Tensor),
}

/// The outputs of some rows, n in total.
#[derive(Clone, Copy)]
pub(crate) struct DraftOutput<'a> {
    /// Their indices, u32 `[n]`; `None` for all rows.
    pub rows: Option<&'a Tensor>,
    /// `[n, hidden_width]` in the dtype of activations: the input of the next pass. Not a tensor of the input.
    pub hidden: &'a Tensor,
    /// f32 `[n, vocab_size]`, over the target's vocabulary; −∞ for tokens that the drafter cannot draft.
    pub logits: &'a Tensor,
}

impl Drafter {
    /// Encodes a pass over the rows for which `space` is [fitted](DraftSpace::fit). `step` has their positions, at
    /// which the drafter's own keys and values are written. An assistant's rows have the position of the last stored
    /// token, one row per sequence. Without `out`, only keys and values are written.
    ///
    /// # Errors
    /// `Argument` for tensors of other shapes; `Kvant`.
    pub(crate) fn encode(
        &self,
        enc: &mut Encoder,
        space: &DraftSpace,
        pool: &KvPool,
        step: &Step,
        input: DraftInput,
        out: Option<DraftOutput>,
    ) -> Result<()> {
        self.check(space, step, input, out)?;
        let views = space.views();
        let first_input = self.enter(enc, views, input)?;
        let entered = self.entered(first_input, step.lens());
        let (blocks, last) = (&space.blocks().views, &space.last().views);
        let (wanted, of_wanted) = match out {
            None => (Wanted::Nothing, blocks),
            Some(DraftOutput { rows: None, .. }) => (Wanted::Every { logits: None }, blocks),
            Some(DraftOutput { rows: Some(rows), .. }) => {
                (Wanted::Some { rows, views: last, step, logits: None }, last)
            }
        };
        self.network.encode_entered(enc, (blocks, entered), pool, step, &wanted)?;
        let Some(out) = out else { return Ok(()) };
        match &self.entry {
            Entry::Assistant { output, .. } => {
                ops::linear(enc, &Linear::new(&of_wanted.x, output.weight(), out.hidden))?;
            }
            Entry::Mtp { .. } | Entry::Eagle3 { norm_output: true, .. } => ops::copy(enc, &of_wanted.x, out.hidden)?,
            Entry::Eagle3 { norm_output: false, .. } => ops::copy(enc, &of_wanted.h, out.hidden)?,
        }
        self.draft_logits(enc, (of_wanted, &views.vocabulary), &of_wanted.x, out.logits)
    }

    /// Checks the shapes of a pass.
    fn check(&self, space: &DraftSpace, step: &Step, input: DraftInput, out: Option<DraftOutput>) -> Result<()> {
        let rows = space.blocks().views.tokens;
        let expect = |arg, tensor: &Tensor, dtype: DType, shape: &[usize]| match tensor.shape() == shape {
            true if tensor.dtype() == dtype => Ok(()),
            _ => Err(Error::argument(arg, format_args!("{dtype} of shape {shape:?}"), format_args!("{tensor:?}"))),
        };
        let (activations, taps) = (self.network.activations(), self.taps.count());
        if step.tokens() != rows {
            return Err(Error::argument("step", format_args!("one of {rows} rows"), step.tokens()));
        }
        if matches!(self.entry, Entry::Assistant { .. }) {
            expect("step.lens", step.lens(), DType::U32, &[rows])?;
        }
        expect("ids", input.ids, DType::U32, &[rows])?;
        match input.hidden {
            DraftHidden::Features { rows: ids, .. } => expect("hidden.rows", ids, DType::U32, &[taps * rows])?,
            DraftHidden::Fed(hidden) => expect("hidden", hidden, activations, &[rows, self.hidden_width])?,
        }
        let Some(DraftOutput { rows: wanted, hidden, logits }) = out else { return Ok(()) };
        let count = match wanted {
            Some(wanted) => {
                let count = space.last().views.tokens;
                expect("rows", wanted, DType::U32, &[count])?;
                count
            }
            None => rows,
        };
        expect("out.hidden", hidden, activations, &[count, self.hidden_width])?;
        expect("logits", logits, DType::F32, &[count, self.vocab_size])
    }
}
