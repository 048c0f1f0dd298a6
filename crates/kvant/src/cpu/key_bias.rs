//! The key bias ([`KeyBias`]), rotated to positions. Sealed pages store keys without it.
//!
//! A row of pairs has two halves: the first coordinates of all pairs, then the second ones.

use crate::KeyBias;

/// The bias of one KV head.
#[derive(Clone, Copy)]
pub(super) struct HeadBias<'a> {
    pairs: &'a [f32],
    /// The index of each coordinate among the pairs.
    places: &'a [u32],
    /// `[pages, D]` and `[page_tokens, D]`: cosines, then sines.
    starts: &'a [f32],
    pub steps: &'a [f32],
    pub dim: usize,
    pub page_tokens: usize,
}

impl<'a> HeadBias<'a> {
    /// # Safety
    /// The device's lock is held while this lives.
    pub unsafe fn new(bias: &'a KeyBias, head: usize) -> HeadBias<'a> {
        let (dim, page_tokens) = (bias.turns.head_dim, bias.turns.page_tokens);
        // SAFETY: the caller's promise; nothing writes to these tensors.
        unsafe {
            let pairs = &bias.pairs.host_slice()[head * dim..(head + 1) * dim];
            let (places, starts) = (bias.turns.places.host_slice(), bias.turns.starts.host_slice());
            HeadBias { pairs, places, starts, steps: bias.turns.steps.host_slice(), dim, page_tokens }
        }
    }

    /// The bias of a page's first key, as pairs.
    #[inline(always)]
    pub fn at_page(&self, page: usize, to: &mut [f32]) {
        turn(self.pairs, &self.starts[page * self.dim..][..self.dim], to);
    }

    /// The bias of the page's key in `slot`, by coordinates. `first` is the bias of the page's first key; `pairs` is
    /// scratch for a row.
    #[inline(always)]
    pub fn at_slot(&self, first: &[f32], slot: usize, pairs: &mut [f32], to: &mut [f32]) {
        turn(first, &self.steps[slot * self.dim..][..self.dim], pairs);
        to.iter_mut().zip(self.places).for_each(|(to, &place)| *to = pairs[place as usize]);
    }

    /// Computes x and y of each pair from a query q: q's product with the bias is Σ (x·cos + y·sin) over the pairs'
    /// angles.
    #[inline(always)]
    pub fn product(&self, q: &[f32], to: &mut [f32]) {
        q.iter().zip(self.places).for_each(|(&q, &place)| to[place as usize] = q);
        let half = self.dim / 2;
        let ((first, second), (x, y)) = (to.split_at_mut(half), self.pairs.split_at(half));
        for i in 0..half {
            let [a, b] = [first[i], second[i]];
            (first[i], second[i]) = (a * x[i] + b * y[i], b * x[i] - a * y[i]);
        }
    }

    /// As [`HeadBias::product`], for angles relative to a page's first position.
    #[inline(always)]
    pub fn product_at_page(&self, product: &[f32], page: usize, to: &mut [f32]) {
        let half = self.dim / 2;
        let (cos, sin) = self.starts[page * self.dim..][..self.dim].split_at(half);
        let ((x, y), (to_x, to_y)) = (product.split_at(half), to.split_at_mut(half));
        for i in 0..half {
            (to_x[i], to_y[i]) = (x[i] * cos[i] + y[i] * sin[i], y[i] * cos[i] - x[i] * sin[i]);
        }
    }
}

/// Turns pairs by angles. `turns` has the cosines, then the sines.
#[inline(always)]
fn turn(pairs: &[f32], turns: &[f32], to: &mut [f32]) {
    let half = pairs.len() / 2;
    let ((x, y), (cos, sin), (to_x, to_y)) = (pairs.split_at(half), turns.split_at(half), to.split_at_mut(half));
    for i in 0..half {
        (to_x[i], to_y[i]) = (x[i] * cos[i] - y[i] * sin[i], x[i] * sin[i] + y[i] * cos[i]);
    }
}
