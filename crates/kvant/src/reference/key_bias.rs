//! The key bias, rotated to positions. Sealed pages store keys without it.

use super::io;
use crate::KeyBias;

/// The bias of a KV head's key, for the row of its position.
pub(super) fn at(bias: &KeyBias, head: usize, row: usize) -> Vec<f64> {
    let turns = &bias.turns;
    let (dim, half) = (turns.head_dim, turns.head_dim / 2);
    let pairs = io::load_range(&bias.pairs, head * dim..(head + 1) * dim);
    let turned = |place: usize| {
        let (x, y) = (pairs[place % half], pairs[half + place % half]);
        let (sin, cos) = (turns.position(row) as f64 * turns.frequencies[place % half]).sin_cos();
        if place < half { x * cos - y * sin } else { x * sin + y * cos }
    };
    io::load_u32(&turns.places).into_iter().map(|place| turned(place as usize)).collect()
}
