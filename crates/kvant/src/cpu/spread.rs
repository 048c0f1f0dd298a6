//! Values of some columns are spread over all columns. Threads share the outputs.

use super::{
    Cpu,
    elements::{Elements, PIECE, Padded},
    simd::{Simd, SimdKernel},
};
use crate::ops::spread::Call;

/// Minimum outputs of a task.
const TASK: usize = 16 * 1024;

pub(crate) fn run(cpu: &Cpu, call: &Call) {
    let (x, out) = (Elements::of(&call.x), Elements::of(&call.out));
    // SAFETY: calls run under the device's lock, and places and groups are inputs only.
    let places = unsafe { call.places.host_slice::<u32>() };
    // SAFETY: as above.
    let groups = call.groups.as_ref().map(|groups| unsafe { groups.host_slice::<u32>() });
    let of_tokens: Vec<Vec<(u32, usize)>> = match groups {
        Some(groups) => (0..call.tokens).map(|token| rows_of_groups(call, groups, token)).collect(),
        None => Vec::new(),
    };
    let pieces = call.outputs.div_ceil(TASK);
    cpu.threads.run(call.tokens * pieces, |task| {
        let (token, piece) = (task / pieces, task % pieces);
        let range = piece * TASK..call.outputs.min((piece + 1) * TASK);
        let rows = of_tokens.get(token).map(Vec::as_slice);
        cpu.level.dispatch(Outputs { call, x, out, places, rows, token, range });
    });
}

/// The groups of a token, in order, and the row of x that has each of them.
fn rows_of_groups(call: &Call, groups: &[u32], token: usize) -> Vec<(u32, usize)> {
    let rows = token * call.chosen..(token + 1) * call.chosen;
    let mut sorted: Vec<(u32, usize)> = rows.map(|row| (groups[row], row)).collect();
    sorted.sort_unstable();
    sorted
}

struct Outputs<'a> {
    call: &'a Call,
    x: Elements,
    out: Elements,
    places: &'a [u32],
    /// The groups in order, and their rows; without groups, a token has one row.
    rows: Option<&'a [(u32, usize)]>,
    token: usize,
    range: std::ops::Range<usize>,
}

impl Outputs<'_> {
    /// The element of x with the value of a place.
    fn element(&self, place: u32) -> Option<usize> {
        let (width, place) = (self.call.width, place as usize);
        let row = match self.rows {
            None if place < width => self.token,
            None => return None,
            Some(rows) => {
                let group = (place / width) as u32;
                rows[rows.binary_search_by_key(&group, |&(group, _)| group).ok()?].1
            }
        };
        Some(row * width + place % width)
    }
}

impl SimdKernel for Outputs<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self) {
        let (mut piece, mut one) = (Padded::new(PIECE), Padded::new(1));
        for start in self.range.clone().step_by(PIECE) {
            piece.set_len(PIECE.min(self.range.end - start));
            for (j, value) in piece.iter_mut().enumerate() {
                *value = match self.element(self.places[start + j]) {
                    Some(element) => {
                        one.set_len(1);
                        // SAFETY: `dispatch` enables the instructions; the row and the column are within x.
                        unsafe { self.x.load::<S>(element, &mut one) };
                        one[0]
                    }
                    None => self.call.fill,
                };
            }
            // SAFETY: `dispatch` enables the instructions; the elements are within the output and belong to this task.
            unsafe { self.out.store::<S>(self.token * self.call.outputs + start, &piece) };
        }
    }
}
