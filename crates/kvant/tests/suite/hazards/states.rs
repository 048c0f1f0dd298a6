//! States of recurrent layers: a sequence does not affect another one, and bits do not depend on the other runs of a
//! call.

use super::*;
use kvant::ops::{CausalConv, DeltaRule, StateRuns, StateSlots};

const HEADS: usize = 3;
const DIM: usize = 32;
const CHANNELS: usize = 3 * HEADS * DIM;
const TAPS: usize = 4;
const SLOTS: usize = 3;

/// The two operations of a layer, the second on the results of the first.
struct Net {
    x: Tensor,
    weight: Tensor,
    gates: [Tensor; 2],
    decay: [Tensor; 2],
    inputs: Tensor,
    states: Tensor,
    out: Tensor,
}

impl Net {
    fn new(device: &Device, rows: usize) -> Result<Net> {
        let mut rng = Rng::of("recurrent states");
        let mut random = |shape: &[usize]| input(device, DType::F32, &rng.normals(shape.iter().product()), shape);
        Ok(Net {
            x: random(&[rows, CHANNELS])?,
            weight: random(&[CHANNELS, TAPS])?,
            gates: [random(&[rows, HEADS])?, random(&[rows, HEADS])?],
            decay: [input(device, DType::F32, &[-0.5; HEADS], &[HEADS])?, random(&[HEADS])?],
            inputs: random(&[SLOTS, TAPS - 1, CHANNELS])?,
            states: random(&[SLOTS, HEADS, DIM, DIM])?,
            out: Tensor::zeros(device, DType::F32, &[rows, HEADS, DIM])?,
        })
    }

    /// The bits of results and of both kinds of states.
    fn run(&self, runs: &[(u32, u32, u32)]) -> Result<[Vec<u8>; 3]> {
        let device = self.x.device();
        let between = Tensor::zeros(device, DType::F32, self.x.shape())?;
        let (inputs, states) = (StateSlots::new(&self.inputs)?, StateSlots::new(&self.states)?);
        let runs = StateRuns::new(device, runs)?;
        run(device, |enc| {
            let conv = CausalConv::new(&self.x, &self.weight, &inputs, &runs, &between).silu(true);
            ops::causal_conv(enc, &conv)?;
            let (gates, decay) = (self.gates.each_ref(), self.decay.each_ref());
            ops::delta_rule(enc, &DeltaRule::new(&between, gates, decay, &states, &runs, &self.out))
        })?;
        Ok([bytes_of(&self.out)?, bytes_of(&self.inputs)?, bytes_of(&self.states)?])
    }
}

/// Fills some of the equal parts of a tensor with NaN.
fn fill_with_nan(tensor: &Tensor, parts: std::ops::Range<usize>) {
    let part = tensor.rows(parts).unwrap();
    let nan: Vec<u8> = f32::NAN.to_le_bytes().repeat(part.elements());
    part.write_bytes(&nan).unwrap();
}

/// Part `index` of the bytes, divided into `parts`.
fn part(bytes: &[u8], index: usize, parts: usize) -> &[u8] {
    bytes.chunks_exact(bytes.len() / parts).nth(index).unwrap()
}

/// A sequence begins with zeros, whatever its slot holds.
#[test]
fn a_new_sequence_ignores_its_slot() {
    for device in devices() {
        for rows in [1, 5, 40] {
            let (clean, used) = (Net::new(device, rows).unwrap(), Net::new(device, rows).unwrap());
            fill_with_nan(&used.inputs, 1..2);
            fill_with_nan(&used.states, 1..2);
            let runs = [(1, 0, rows as u32)];
            assert!(used.run(&runs).unwrap() == clean.run(&runs).unwrap(), "{device}: {rows} rows");
        }
    }
}

/// NaN in one sequence, in its state or in its rows, changes no bit of another, and none of a slot whose run is empty.
#[test]
fn sequences_do_not_meet() {
    for device in devices() {
        for rows in [1usize, 20] {
            let runs = [(0, 3, rows as u32), (1, 0, 0), (2, 3, rows as u32)];
            let (clean, dirty) = (Net::new(device, 2 * rows).unwrap(), Net::new(device, 2 * rows).unwrap());
            let before = [bytes_of(&clean.inputs).unwrap(), bytes_of(&clean.states).unwrap()];
            fill_with_nan(&dirty.states, 0..1);
            fill_with_nan(&dirty.x, rows - 1..rows);
            let (want, got) = (clean.run(&runs).unwrap(), dirty.run(&runs).unwrap());
            let case = format!("{device}: {rows} rows");
            assert!(part(&got[0], 1, 2) == part(&want[0], 1, 2), "{case}: results");
            for (got, before) in [(&got[1], &before[0]), (&got[2], &before[1])] {
                assert!(part(got, 1, SLOTS) == part(before, 1, SLOTS), "{case}: a slot without rows");
            }
            for (got, want) in got[1..].iter().zip(&want[1..]) {
                assert!(part(got, 2, SLOTS) == part(want, 2, SLOTS), "{case}: states");
                assert!(part(got, 0, SLOTS) != part(want, 0, SLOTS), "{case}: NaN is lost");
            }
        }
    }
}

/// Equal calls give equal bits. Sequences in one call get the bits that each gets alone.
#[test]
fn one_result_in_every_company() {
    for device in devices() {
        for rows in [1usize, 33] {
            let fresh = |rows| Net::new(device, rows).unwrap();
            let runs = [(2, 1, rows as u32), (0, 0, rows as u32), (1, 7, rows as u32)];
            let together = fresh(3 * rows).run(&runs).unwrap();
            let rounds = if device.kind() == DeviceKind::Cuda { 20 } else { 2 };
            for _ in 0..rounds {
                assert!(fresh(3 * rows).run(&runs).unwrap() == together, "{device}: {rows} rows, again");
            }
            // Rows of the other sequences belong to inactive runs.
            for (index, alone) in runs.iter().enumerate() {
                let mut only = runs.map(|(_, past, rows)| (StateRuns::INACTIVE, past, rows));
                only[index] = *alone;
                let got = fresh(3 * rows).run(&only).unwrap();
                let slot = alone.0 as usize;
                assert!(part(&got[0], index, 3) == part(&together[0], index, 3), "{device}: {rows} rows, alone");
                for (got, together) in got[1..].iter().zip(&together[1..]) {
                    assert!(part(got, slot, SLOTS) == part(together, slot, SLOTS), "{device}: states alone");
                }
            }
        }
    }
}
