//! Key biases of layers that seal pages, which store keys without their bias.

use std::sync::Arc;

use crate::{
    CacheLayer, DType, Device, Error, Result, Tensor,
    group::{Rank, RankTensors},
    ops::{Angles, Rope, check},
};

const NAME: &str = "key_bias";

/// The bias that a model adds to the keys of a layer before the rotary embedding (Qwen 2 and 2.5, gpt-oss).
///
/// The bias can be many times longer than the keys without it, and the rotary embedding rotates it by a different angle
/// at each position. Therefore neither a codec nor the mean of a page describes it well. A layer of
/// [`KvPool::with_key_biases`](crate::KvPool::with_key_biases) that seals pages ([`CacheLayer`](crate::CacheLayer))
/// encodes keys minus their rotated bias, and attention adds the product of the query and the rotated bias to the
/// scores. Dense pages, and keys of a dense codec, keep the bias. A bias followed by a norm is not supported.
///
/// ```
/// use kvant::{CacheLayer, Codec, Device, KeyBias, KeyTurns, KvPool, PoolSpec, Tensor, ops::Rope};
/// let device = Device::cpu();
/// let (kv_heads, head_dim, longest) = (2, 64, 4096);
/// let spec = PoolSpec::new(vec![CacheLayer::new(kv_heads, head_dim, Codec::tq_centred(4))], 4 << 20);
/// let turns = KeyTurns::new(&device, Rope::new(1e6, head_dim / 2), head_dim, spec.page_tokens, longest)?;
/// let bias = Tensor::from_slice(&device, &vec![0.5f32; kv_heads * head_dim], &[kv_heads, head_dim])?;
/// let pool = KvPool::with_key_biases(&device, &spec, vec![Some(KeyBias::new(&bias, &turns)?)])?;
/// # Ok::<(), kvant::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct KeyBias {
    /// f32 `[Hk, 2, D/2]`: the first coordinates of all pairs, then the second ones.
    pub(crate) pairs: Tensor,
    pub(crate) turns: Arc<Turns>,
}

impl RankTensors for KeyBias {
    fn move_to(&mut self, rank: &Rank) {
        self.pairs.move_to(rank);
        let mut turns = Turns::clone(&self.turns);
        for tensor in [&mut turns.places, &mut turns.starts, &mut turns.steps] {
            tensor.move_to(rank);
        }
        turns.first = if turns.position_ranks() > 1 { rank.index() * turns.page_tokens } else { 0 };
        self.turns = Arc::new(turns);
    }
}

/// The rotation of key biases by the rotary embedding, shared by all layers with the same embedding. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct KeyTurns(Arc<Turns>);

#[derive(Clone, Debug)]
pub(crate) struct Turns {
    pub head_dim: usize,
    /// Positions of a page that a rank stores.
    pub page_tokens: usize,
    /// Positions of a page on all ranks together, if ranks divide them; otherwise `page_tokens`.
    pub page_stride: usize,
    /// The position within a page of its first row on this rank.
    pub first: usize,
    /// The number of positions that the tables cover.
    pub positions: usize,
    /// The angle from a position to the next one, of each of D/2 pairs. Zero for pairs that do not rotate.
    pub frequencies: Vec<f64>,
    /// u32 `[D]`: the index of each coordinate in [`KeyBias::pairs`].
    pub places: Tensor,
    /// f32 `[pages, 2, D/2]`: cosines, then sines, of the angles of the first position of each page that a rank stores.
    pub starts: Tensor,
    /// f32 `[page_tokens, 2, D/2]`: cosines, then sines, of the angles from a page's first position to each of its
    /// positions.
    pub steps: Tensor,
}

impl KeyTurns {
    /// Computes the turns of positions below `positions`, for heads of `head_dim` coordinates and pages of
    /// `page_tokens` positions. `rope` is the keys' rotary embedding. Takes 4·D bytes for each page.
    ///
    /// # Errors
    /// As [`norm_rope`](crate::ops::norm_rope()) for `rope`; `Value` for [`Angles::Tables`], an odd head size, or no
    /// position; `OutOfMemory`.
    pub fn new(device: &Device, rope: Rope, head_dim: usize, page_tokens: usize, positions: usize) -> Result<KeyTurns> {
        KeyTurns::divided(device, rope, head_dim, [page_tokens, 1], positions)
    }

    /// As [`KeyTurns::new`], for layers whose positions are divided among ranks ([`CacheLayer::position_ranks`]): the
    /// positions of a page, and the number of ranks that divide them.
    ///
    /// # Errors
    /// As [`KeyTurns::new`]; `Value` if the ranks do not divide the positions of a page, or are not those of the
    /// device.
    ///
    /// [`CacheLayer::position_ranks`]: crate::CacheLayer::position_ranks
    pub fn divided(
        device: &Device,
        rope: Rope,
        head_dim: usize,
        [page_stride, position_ranks]: [usize; 2],
        positions: usize,
    ) -> Result<KeyTurns> {
        let even = head_dim > 0 && head_dim.is_multiple_of(2);
        check::value_is(NAME, "head_dim", even, "positive and even", head_dim)?;
        check::positive(NAME, "page_tokens", page_stride)?;
        check::positive(NAME, "position_ranks", position_ranks)?;
        let (ranks, fits) = (device.ranks(), [1, device.ranks()].contains(&position_ranks));
        check::value_is(
            NAME,
            "position_ranks",
            fits,
            format_args!("1, or the {ranks} ranks of the device"),
            position_ranks,
        )?;
        let (divides, expected) =
            (page_stride.is_multiple_of(position_ranks), format_args!("a multiple of {position_ranks} ranks"));
        check::value_is(NAME, "page_tokens", divides, expected, page_stride)?;
        let page_tokens = page_stride / position_ranks;
        check::positive(NAME, "positions", positions)?;
        check::at_most(NAME, "positions", positions, u32::MAX as usize)?;
        rope.validate(NAME, head_dim)?;
        let Angles::Theta(theta) = rope.angles else {
            let (expected, got) = ("Angles::Theta".to_string(), "Angles::Tables".to_string());
            return Err(Error::Value { op: NAME, arg: "rope.angles", expected, got });
        };
        let factors = rope.freq_factors.map(Tensor::to_vec::<f32>).transpose()?;
        let n = rope.layout.frequency_base(head_dim, rope.rotated_pairs) as f64;
        let mut frequencies = vec![0.0; head_dim / 2];
        for (i, frequency) in frequencies.iter_mut().take(rope.rotated_pairs).enumerate() {
            *frequency = theta.powf(-2.0 * i as f64 / n) / factors.as_ref().map_or(1.0, |all| f64::from(all[i]));
        }
        let pages = positions.div_ceil(page_stride);
        // The turns of `count` positions, `distance` apart. A rank's begin `of_rank` positions after the last one's.
        let turns = |count: usize, distance: usize, of_rank: usize| {
            crate::tensor::element_count(&[count, head_dim])?;
            Tensor::from_rank_bytes(device, DType::F32, &[count, 2, head_dim / 2], |rank| {
                let angle = |at: usize, of: fn(f64) -> f64| {
                    let position = (at * distance + rank * of_rank) as f64;
                    frequencies.iter().map(move |frequency| of(position * frequency) as f32)
                };
                let rows = (0..count).flat_map(|at| angle(at, f64::cos).chain(angle(at, f64::sin)));
                Ok::<_, Error>(bytemuck::cast_slice(&rows.collect::<Vec<f32>>()).to_vec())
            })
        };
        let places = Tensor::from_slice(device, &places(&rope, head_dim), &[head_dim])?;
        let of_rank = if position_ranks > 1 { page_tokens } else { 0 };
        let (starts, steps) = (turns(pages, page_stride, of_rank)?, turns(page_tokens, 1, 0)?);
        Ok(KeyTurns(Arc::new(Turns {
            head_dim,
            page_tokens,
            page_stride,
            first: 0,
            positions,
            frequencies,
            places,
            starts,
            steps,
        })))
    }
}

impl Turns {
    fn position_ranks(&self) -> usize {
        self.page_stride / self.page_tokens
    }

    /// The position of a row of the rank.
    pub(crate) fn position(&self, row: usize) -> usize {
        row / self.page_tokens * self.page_stride + self.first + row % self.page_tokens
    }
}

/// The index of each coordinate among the pairs: rotated pairs first, then the other coordinates in order.
fn places(rope: &Rope, head_dim: usize) -> Vec<u32> {
    let (half, rotated) = (head_dim / 2, rope.rotated_pairs);
    let mut places = vec![u32::MAX; head_dim];
    for i in 0..rotated {
        let (first, second) = rope.layout.pair(i, head_dim, rotated);
        (places[first], places[second]) = (i as u32, (half + i) as u32);
    }
    let mut free = (rotated..half).chain(half + rotated..head_dim);
    for place in places.iter_mut().filter(|place| **place == u32::MAX) {
        *place = free.next().map_or(0, |place| place as u32);
    }
    places
}

impl KeyBias {
    /// The bias `[Hk, D]`, f32, f16 or bf16, in the order of the coordinates of keys.
    ///
    /// # Errors
    /// `Shape`, `DType`, or `WrongDevice` if it is on another device than the turns.
    pub fn new(bias: &Tensor, turns: &KeyTurns) -> Result<KeyBias> {
        let turns = Arc::clone(&turns.0);
        let [heads, _] = check::rank(NAME, "bias", bias, ["Hk", "D"])?;
        check::float(NAME, "bias", bias)?;
        check::shape(NAME, "bias", bias, &[("Hk", heads), ("D", turns.head_dim)])?;
        check::device(NAME, "bias", bias, turns.steps.device())?;
        let (dim, places) = (turns.head_dim, turns.places.to_vec::<u32>()?);
        // Each rank of a group has its own heads.
        let pairs = Tensor::from_rank_bytes(bias.device(), DType::F32, &[heads, 2, dim / 2], |rank| {
            let mut pairs = vec![0f32; heads * dim];
            for (from, to) in bias.on_rank(rank)?.to_f32()?.chunks_exact(dim).zip(pairs.chunks_exact_mut(dim)) {
                from.iter().zip(&places).for_each(|(&x, &place)| to[place as usize] = x);
            }
            Ok::<_, Error>(bytemuck::cast_slice(&pairs).to_vec())
        })?;
        Ok(KeyBias { pairs, turns })
    }

    /// The tensors that kernels read.
    pub(crate) fn tensors(&self) -> [&Tensor; 4] {
        [&self.pairs, &self.turns.places, &self.turns.starts, &self.turns.steps]
    }

    /// The number of positions that the turns cover.
    pub(crate) fn positions(&self) -> usize {
        self.turns.positions
    }

    /// KV heads.
    pub(crate) fn kv_heads(&self) -> usize {
        self.pairs.shape()[0]
    }

    /// Checks that the bias fits the keys of a layer, in pages of this size, on the device.
    pub(crate) fn check(&self, device: &Device, layer: &CacheLayer, page_tokens: usize) -> Result<()> {
        let (op, arg) = ("kv_pool", "biases");
        let got = [self.kv_heads(), self.turns.head_dim, self.turns.page_stride, self.turns.position_ranks()];
        let wanted = [layer.kv_heads, layer.head_dim, page_tokens, layer.position_ranks];
        let of = |[heads, dim, tokens, ranks]: [usize; 4]| match ranks {
            1 => format!("{heads} KV heads of {dim}, pages of {tokens} positions"),
            _ => format!("{heads} KV heads of {dim}, pages of {tokens} positions that {ranks} ranks divide"),
        };
        check::value_is(op, arg, got == wanted, of(wanted), of(got))?;
        check::device(op, arg, &self.pairs, device)
    }
}
