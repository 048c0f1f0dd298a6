//! norm_rope and norm_rope_write against the reference.

use crate::common::{
    Bound, FLOATS, Out, Output, Rng, conform, devices, indices, input,
    layers::{self, CODECS, fill, linear_spec},
    nmse, run,
};
use kvant::{
    Codec, DType, Device, HeadOrder, KvLayer, LayerSpec, Result, Tensor,
    ops::{self, Angles, HeadNorm, KvSide, NormRope, NormRopeWrite, PairLayout, Rope},
};

const LAYOUTS: [PairLayout; 3] = [PairLayout::Halves, PairLayout::LeadingHalves, PairLayout::Interleaved];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Turn {
    None,
    Theta(f64),
    /// theta with frequency factors.
    Factors(f64),
    /// Tables with this many rows.
    Tables(usize),
}

#[derive(Clone, Debug)]
struct Case {
    tokens: usize,
    heads: usize,
    head_dim: usize,
    x: DType,
    out: DType,
    /// The norm's weight: `None` for no norm, `Some(None)` for ones.
    norm: Option<Option<DType>>,
    eps: f32,
    turn: Turn,
    pairs: usize,
    layout: PairLayout,
    rotate: bool,
    out_order: HeadOrder,
    in_place: bool,
    positions: Vec<u32>,
}

impl Default for Case {
    fn default() -> Case {
        Case {
            tokens: 3,
            heads: 2,
            head_dim: 64,
            x: DType::F32,
            out: DType::F32,
            norm: Some(Some(DType::F32)),
            eps: 1e-6,
            turn: Turn::Theta(10_000.0),
            pairs: 32,
            layout: PairLayout::Halves,
            rotate: false,
            out_order: HeadOrder::TokenMajor,
            in_place: false,
            positions: vec![0, 17, 4099],
        }
    }
}

/// The tensors that a rotary embedding refers to.
struct Tables {
    factors: Tensor,
    cos: Tensor,
    sin: Tensor,
}

impl Tables {
    fn new(device: &Device, rng: &mut Rng, rows: usize, pairs: usize) -> Result<Tables> {
        let factors: Vec<f32> = (0..pairs).map(|_| 1.0 + 7.0 * rng.uniform() as f32).collect();
        let angles: Vec<f32> = (0..rows * pairs).map(|_| 6.3 * rng.uniform() as f32).collect();
        let table = |f: fn(f32) -> f32| {
            input(device, DType::F32, &angles.iter().map(|&a| f(a)).collect::<Vec<_>>(), &[rows, pairs])
        };
        Ok(Tables {
            factors: input(device, DType::F32, &factors, &[pairs])?,
            cos: table(f32::cos)?,
            sin: table(f32::sin)?,
        })
    }

    fn rope(&self, turn: Turn, rotated_pairs: usize, layout: PairLayout) -> Option<Rope<'_>> {
        let (angles, freq_factors) = match turn {
            Turn::None => return None,
            Turn::Theta(theta) => (Angles::Theta(theta), None),
            Turn::Factors(theta) => (Angles::Theta(theta), Some(&self.factors)),
            Turn::Tables(_) => (Angles::Tables { cos: &self.cos, sin: &self.sin }, None),
        };
        Some(Rope::new(angles, rotated_pairs).layout(layout).freq_factors(freq_factors))
    }
}

fn table_rows(turn: Turn) -> usize {
    if let Turn::Tables(rows) = turn { rows } else { 1 }
}

/// Angles are exact to 1e-5 rad at the farthest position, and nearly exact at small ones: a coordinate's error is that
/// share of its pair's length.
fn bound(out: DType, turn: Turn, positions: &[u32]) -> Bound {
    let mut bound = Bound::of(out);
    if matches!(turn, Turn::Theta(_) | Turn::Factors(_)) {
        bound.arithmetic += 1e-5 * f64::from(positions.iter().copied().max().unwrap_or(0)).min(1048576.0) / 1048576.0;
    }
    bound
}

impl Case {
    fn run(&self, device: &Device) -> Result<Vec<Output>> {
        let mut rng = Rng::of(format!("{self:?}"));
        let shape = [self.tokens, self.heads, self.head_dim];
        let x_values: Vec<f32> = rng.normals(shape.iter().product()).iter().map(|x| x * 3.0).collect();
        let x = input(device, self.x, &x_values, &shape)?;
        let weights: Vec<f32> = (0..self.head_dim).map(|_| 1.0 + 0.3 * rng.normal() as f32).collect();
        let weight = match self.norm {
            Some(Some(dtype)) => Some(input(device, dtype, &weights, &[self.head_dim])?),
            _ => None,
        };
        let tables = Tables::new(device, &mut rng, table_rows(self.turn), self.pairs)?;
        let positions = indices(device, &self.positions, &[self.tokens])?;
        let out_shape = match self.out_order {
            HeadOrder::TokenMajor => shape,
            HeadOrder::HeadMajor => [self.heads, self.tokens, self.head_dim],
        };
        let out = Out::new(device, self.out, &out_shape)?;
        if self.in_place {
            out.tensor.write_bytes(&crate::common::bytes_of(&x)?)?;
        }
        let args = NormRope::new(if self.in_place { &out.tensor } else { &x }, &positions, &out.tensor)
            .norm(self.norm.map(|_| HeadNorm::new(self.eps).weight(weight.as_ref())))
            .rope(tables.rope(self.turn, self.pairs, self.layout))
            .rotate(self.rotate)
            .out_order(self.out_order);
        run(device, |enc| ops::norm_rope(enc, &args))?;
        Ok(vec![out.close_within("out", bound(self.out, self.turn, &self.positions))?])
    }

    fn check(self) {
        conform(format!("{self:?}"), |device| self.run(device));
    }
}

#[test]
fn dtypes() {
    for x in FLOATS {
        for out in FLOATS {
            for norm in [None, Some(None), Some(Some(DType::F32)), Some(Some(DType::F16)), Some(Some(DType::BF16))] {
                for out_order in [HeadOrder::TokenMajor, HeadOrder::HeadMajor] {
                    Case { x, out, norm, out_order, ..Case::default() }.check();
                }
            }
        }
    }
}

/// Every layout at every usual head size, all pairs and some of them, and sizes that no vector width divides.
#[test]
fn layouts_and_sizes() {
    for layout in LAYOUTS {
        for head_dim in [2, 6, 30, 64, 80, 96, 128, 256, 512, 2500] {
            let half = head_dim / 2;
            for pairs in [0, 1, half / 4, half - half / 3, half] {
                for turn in [Turn::Theta(10_000.0), Turn::Factors(5e5), Turn::Tables(70)] {
                    let norm = if pairs == half { None } else { Some(Some(DType::F32)) };
                    let last = if turn == Turn::Tables(70) { 69 } else { 4099 };
                    let positions = vec![0, 17, last];
                    Case { layout, head_dim, pairs, turn, norm, positions, ..Case::default() }.check();
                }
            }
        }
    }
    for layout in [PairLayout::LeadingHalves, PairLayout::Interleaved] {
        for pairs in [0, 1, 3] {
            Case { layout, head_dim: 7, pairs, ..Case::default() }.check();
        }
    }
    for head_dim in [1, 3, 31, 33, 65] {
        Case { head_dim, turn: Turn::None, ..Case::default() }.check();
    }
}

#[test]
fn batches() {
    for (tokens, heads) in [(0, 3), (1, 1), (1, 8), (2, 3), (33, 5), (130, 1)] {
        let mut rng = Rng::new(tokens as u64);
        let positions: Vec<u32> = (0..tokens).map(|_| rng.below(10_000) as u32).collect();
        for x in FLOATS {
            Case { tokens, heads, x, out: x, positions: positions.clone(), ..Case::default() }.check();
        }
    }
}

#[test]
fn far_positions() {
    for layout in LAYOUTS {
        for turn in [Turn::Theta(10_000.0), Turn::Theta(1e6), Turn::Factors(10_000.0)] {
            let positions = vec![1_048_576, 1_000_003, 524_287];
            Case { layout, turn, positions, norm: None, ..Case::default() }.check();
        }
    }
}

#[test]
fn in_place() {
    for dtype in FLOATS {
        for (layout, pairs) in LAYOUTS.into_iter().flat_map(|layout| [(layout, 32), (layout, 9)]) {
            Case { x: dtype, out: dtype, layout, pairs, in_place: true, ..Case::default() }.check();
            Case { x: dtype, out: dtype, layout, pairs, in_place: true, rotate: true, ..Case::default() }.check();
        }
    }
}

#[test]
fn rotated_results() {
    for head_dim in [2, 8, 64, 128, 256, 512, 1024] {
        for out in FLOATS {
            for out_order in [HeadOrder::TokenMajor, HeadOrder::HeadMajor] {
                Case { head_dim, pairs: head_dim / 2, rotate: true, out, out_order, ..Case::default() }.check();
            }
        }
    }
}

/// If the input is tiny or zero, eps dominates.
#[test]
fn small_inputs() {
    let shape = [3, 1, 64];
    for eps in [1e-6, 1e-5, 0.0] {
        conform(format!("small inputs, eps {eps}"), |device| {
            let mut values = Rng::of("small").normals(192);
            values[..64].iter_mut().for_each(|x| *x *= 1e-4);
            // With eps 0, a zero vector has no norm: 0/0 is NaN, only in this row.
            values[64..128].fill(0.0);
            values[128..].iter_mut().for_each(|x| *x *= 1e-12);
            let x = input(device, DType::F32, &values, &shape)?;
            let out = Out::new(device, DType::F32, &shape)?;
            let positions = indices(device, &[0, 1, 2], &[3])?;
            let args = NormRope::new(&x, &positions, &out.tensor).norm(Some(HeadNorm::new(eps)));
            run(device, |enc| ops::norm_rope(enc, &args))?;
            let rows = out.tensor.to_f32()?;
            let row =
                |r: usize| Output::Close(format!("row {r}"), rows[r * 64..][..64].to_vec(), Bound::of(DType::F32));
            Ok(vec![row(0), row(1), row(2)])
        });
    }
}

/// Heads whose squares overflow or underflow f32 still have a norm; NaN stays in its head.
#[test]
fn extreme_heads() {
    for (head_dim, weighted) in [(64, false), (256, false), (20, true)] {
        for eps in [1e-6, 0.0] {
            conform(format!("extreme heads, D {head_dim}, eps {eps}"), |device| {
                let mut rows: Vec<Vec<f32>> = (0..6).map(|_| Rng::of(eps).normals(head_dim)).collect();
                for (row, factor) in rows.iter_mut().zip([1e30f32, 1e20, 1e-15, 1e-30]) {
                    row.iter_mut().for_each(|x| *x *= factor);
                }
                rows[5].iter_mut().for_each(|x| *x = x.clamp(-1.0, 1.0) * 3e38);
                let weight = input(device, DType::F32, &vec![1e-4; head_dim], &[head_dim])?;
                rows[4][head_dim - 1] = f32::NAN;
                let shape = [6, 1, head_dim];
                let x = input(device, DType::F32, &rows.concat(), &shape)?;
                let out = Out::new(device, DType::F32, &shape)?;
                let positions = indices(device, &[0; 6], &[6])?;
                let args = NormRope::new(&x, &positions, &out.tensor)
                    .norm(Some(HeadNorm::new(eps).weight(weighted.then_some(&weight))));
                run(device, |enc| ops::norm_rope(enc, &args))?;
                let all = out.tensor.to_f32()?;
                let row =
                    |(r, row): (usize, &[f32])| Output::Close(format!("row {r}"), row.to_vec(), Bound::of(DType::F32));
                Ok(all.chunks(head_dim).enumerate().map(row).collect())
            });
        }
    }
}

/// Angles that turn many times per position, or hardly, or backwards.
#[test]
fn unusual_frequencies() {
    let factors = [0.5f32, 0.01, 3e-5, -3.0, 64.0, 1e6, 1e30, f32::INFINITY, 1.0, 7.7];
    let positions = [0u32, 1, 999, 65_535];
    let (pairs, shape) = (factors.len(), [positions.len(), 2, 64]);
    for theta in [10_000.0, 0.5, 1e300, 1.0] {
        for with_factors in [true, false] {
            for layout in LAYOUTS {
                conform(format!("theta {theta}, factors {with_factors}, {layout:?}"), |device| {
                    let x = input(device, DType::F32, &Rng::of("frequencies").normals(8 * 64), &shape)?;
                    let out = Out::new(device, DType::F32, &shape)?;
                    let table = input(device, DType::F32, &factors, &[pairs])?;
                    let freq_factors = with_factors.then_some(&table);
                    let rope = Rope::new(theta, pairs).layout(layout).freq_factors(freq_factors);
                    let positions = indices(device, &positions, &[positions.len()])?;
                    let args = NormRope::new(&x, &positions, &out.tensor).rope(Some(rope));
                    run(device, |enc| ops::norm_rope(enc, &args))?;
                    Ok(vec![out.close_within("out", bound(DType::F32, Turn::Theta(theta), &[1 << 20]))?])
                });
            }
        }
    }
}

/// A case of norm_rope_write, with its outputs and its layer.
struct Fused {
    spec: LayerSpec,
    group: usize,
    q: DType,
    kv: DType,
    q_out: DType,
    norms: [Option<Option<DType>>; 3],
    turn: Turn,
    pairs: usize,
    layout: PairLayout,
    /// V is the tensor K.
    shared: bool,
    tokens: Vec<(u32, u32)>,
}

impl Fused {
    fn name(&self) -> String {
        let Fused { spec, group, q, kv, q_out, norms, turn, pairs, layout, shared, tokens } = self;
        format!(
            "{spec:?} group {group} q {q} kv {kv} -> {q_out}, norms {norms:?}, {turn:?} {pairs} {layout:?}, \
             shared {shared}, T {}",
            tokens.len()
        )
    }

    fn run(&self, device: &Device) -> Result<(Out, KvLayer)> {
        let mut rng = Rng::of(self.name());
        let LayerSpec { head_dim, kv_heads, sequences, .. } = self.spec;
        let tokens = self.tokens.len();
        let q_shape = [tokens, kv_heads * self.group, head_dim];
        let kv_shape = [tokens, kv_heads, head_dim];
        let q = input(device, self.q, &rng.normals(q_shape.iter().product()), &q_shape)?;
        let k = input(device, self.kv, &rng.normals(kv_shape.iter().product()), &kv_shape)?;
        let v = input(device, self.kv, &rng.normals(kv_shape.iter().product()), &kv_shape)?;
        let mut weights = Vec::new();
        for norm in self.norms {
            let values: Vec<f32> = (0..head_dim).map(|_| 1.0 + 0.3 * rng.normal() as f32).collect();
            weights.push(match norm {
                Some(Some(dtype)) => Some(input(device, dtype, &values, &[head_dim])?),
                _ => None,
            });
        }
        let norm = |i: usize| self.norms[i].map(|_| HeadNorm::new(1e-6).weight(weights[i].as_ref()));
        let tables = Tables::new(device, &mut rng, table_rows(self.turn), self.pairs)?;
        let step = layers::step(device, sequences, &self.tokens)?;
        let layer = KvLayer::new(device, self.spec)?;
        fill(&layer, 0x3C)?;
        let q_out = Out::new(device, self.q_out, &q_shape)?;
        let args = NormRopeWrite::new(&q, &k, if self.shared { &k } else { &v }, &step, &layer, &q_out.tensor)
            .q_norm(norm(0))
            .k_norm(norm(1))
            .v_norm(norm(2))
            .rope(tables.rope(self.turn, self.pairs, self.layout));
        run(device, |enc| ops::norm_rope_write(enc, &args))?;
        Ok((q_out, layer))
    }

    /// The whole contents of the layer, as numbers.
    fn contents(&self, layer: &KvLayer) -> Result<Vec<Vec<f32>>> {
        let mut all = Vec::new();
        for side in [KvSide::K, KvSide::V] {
            for s in 0..self.spec.sequences {
                all.push(layers::read(layer, side, s, 0..self.spec.capacity)?);
            }
        }
        Ok(all)
    }

    fn check(&self) {
        let name = self.name();
        let positions: Vec<u32> = self.tokens.iter().map(|t| t.1).collect();
        let (q, layer) = self.run(&Device::reference()).unwrap();
        let bound_of = |dtype| bound(dtype, self.turn, &positions);
        let want = q.close_within("q_out", bound_of(self.q_out)).unwrap();
        let contents = self.contents(&layer).unwrap();
        for device in devices() {
            let (q, layer) = self.run(device).unwrap_or_else(|e| panic!("{device}: {name}: {e}"));
            let got = q.close_within("q_out", bound_of(self.q_out)).unwrap();
            let wrong = crate::common::differences(&[got], std::slice::from_ref(&want));
            assert!(wrong.is_empty(), "{device}: {name}: {}", wrong.join(", "));
            for (i, (got, want)) in self.contents(&layer).unwrap().iter().zip(&contents).enumerate() {
                let codec = if i < self.spec.sequences { self.spec.k } else { self.spec.v };
                match codec {
                    Codec::Dense(dtype) => {
                        crate::common::assert_close(format!("{device}: {name}: plane {i}"), got, want, bound_of(dtype));
                    }
                    // A coordinate between two centroids may get either.
                    Codec::TurboQuant(_) => {
                        let error = nmse(got, want);
                        assert!(error < 2e-5, "{device}: {name}: plane {i}: {error:.3e} from the reference's");
                    }
                }
            }
        }
    }
}

#[test]
fn fused_writes() {
    let mut rng = Rng::of("fused");
    let norms = [None, Some(None), Some(Some(DType::F32)), Some(Some(DType::BF16))];
    for k in CODECS {
        for v in CODECS {
            let of_power = rng.pick(&[64, 128, 256, 512]);
            // Only dense vectors may have other head sizes.
            let other = (!k.is_quantised() && !v.is_quantised()).then(|| rng.pick(&[80, 96, 112, 192]));
            for head_dim in [of_power].into_iter().chain(other) {
                let pairs = rng.pick(&[head_dim / 2, head_dim / 8, 0]);
                let kv_heads = rng.pick(&[1, 2, 3]);
                let spec = linear_spec(kv_heads, 9, head_dim, Codec::F32)
                    .k(k)
                    .sequences(2)
                    .v(v)
                    .ring(true)
                    .order(rng.pick(&[HeadOrder::HeadMajor, HeadOrder::TokenMajor]));
                let start = rng.below(30) as u32;
                let mut tokens: Vec<(u32, u32)> = (start..start + rng.pick(&[1, 4, 12])).map(|p| (1, p)).collect();
                tokens.extend((0..rng.pick(&[0, 1, 5])).map(|p| (0, p)));
                rng.shuffle(&mut tokens);
                Fused {
                    spec,
                    group: rng.pick(&[1, 2, 4]),
                    q: rng.pick(&FLOATS),
                    kv: rng.pick(&FLOATS),
                    q_out: rng.pick(&FLOATS),
                    norms: [rng.pick(&norms), rng.pick(&norms), rng.pick(&norms)],
                    turn: rng.pick(&[Turn::None, Turn::Theta(1e4), Turn::Factors(1e4), Turn::Tables(64)]),
                    pairs,
                    layout: rng.pick(&LAYOUTS),
                    shared: rng.below(3) == 0,
                    tokens,
                }
                .check();
            }
        }
    }
}

/// The fused operation equals its two parts.
#[test]
fn fused_equals_its_parts() {
    for device in devices() {
        let mut rng = Rng::of("parts");
        let (tokens, heads, kv_heads, dim) = (5, 4, 2, 128);
        let up = |rng: &mut Rng, shape: &[usize]| {
            input(device, DType::F32, &rng.normals(shape.iter().product()), shape).unwrap()
        };
        let q = up(&mut rng, &[tokens, heads, dim]);
        let (k, v) = (up(&mut rng, &[tokens, kv_heads, dim]), up(&mut rng, &[tokens, kv_heads, dim]));
        let weight = up(&mut rng, &[dim]);
        let norm = Some(HeadNorm::new(1e-6).weight(Some(&weight)));
        let plain = Some(HeadNorm::new(1e-6));
        let rope = Some(Rope::new(1e4, 64));
        let step = layers::range_step(device, 1, 3..8).unwrap();
        let spec = linear_spec(kv_heads, 9, dim, Codec::F16);
        let (fused, parts) = (KvLayer::new(device, spec).unwrap(), KvLayer::new(device, spec).unwrap());
        let shape = [tokens, heads, dim];
        let (q_fused, q_parts) =
            (Out::new(device, DType::F32, &shape).unwrap(), Out::new(device, DType::F32, &shape).unwrap());
        let k_parts = Out::new(device, DType::F32, &[tokens, kv_heads, dim]).unwrap();
        let v_parts = Out::new(device, DType::F32, &[tokens, kv_heads, dim]).unwrap();
        run(device, |enc| {
            let args = NormRopeWrite::new(&q, &k, &v, &step, &fused, &q_fused.tensor)
                .q_norm(norm)
                .k_norm(norm)
                .v_norm(plain)
                .rope(rope);
            ops::norm_rope_write(enc, &args)?;
            for (x, norm, rope, out) in [
                (&q, norm, rope, &q_parts.tensor),
                (&k, norm, rope, &k_parts.tensor),
                (&v, plain, None, &v_parts.tensor),
            ] {
                ops::norm_rope(enc, &NormRope::new(x, step.positions(), out).norm(norm).rope(rope))?;
            }
            let (k, v) = (&k_parts.tensor, &v_parts.tensor);
            ops::kv_write(enc, &ops::KvWrite::new(k, v, &step, &parts))
        })
        .unwrap();
        let read = |layer| [KvSide::K, KvSide::V].map(|side| layers::read(layer, side, 0, 0..9).unwrap());
        let bound = Bound::of(DType::F32);
        crate::common::assert_close(
            format!("{device}: q"),
            &q_fused.tensor.to_f32().unwrap(),
            &q_parts.tensor.to_f32().unwrap(),
            bound,
        );
        for (fused, parts) in read(&fused).iter().zip(&read(&parts)) {
            crate::common::assert_close(format!("{device}: cache"), fused, parts, Bound::of(DType::F16));
        }
    }
}

/// If the device does not check positions, a token beyond the tables changes nothing: neither its result nor its slots.
#[test]
fn positions_beyond_the_tables_are_skipped() {
    for device in devices().iter().filter(|device| !crate::common::sees_indices(device)) {
        let mut rng = Rng::of("tables");
        let (rows, pairs, dim) = (5, 4, 8);
        let tables = Tables::new(device, &mut rng, rows, pairs).unwrap();
        let x = input(device, DType::F32, &rng.normals(4 * dim), &[4, 1, dim]).unwrap();
        // The first position beyond the tables, and one far beyond.
        let step = layers::step(device, 1, &[(0, 4), (0, 5), (0, 0), (0, 700)]).unwrap();
        let rope = tables.rope(Turn::Tables(rows), pairs, PairLayout::Halves);
        let layer = KvLayer::new(device, linear_spec(1, 701, dim, Codec::F32)).unwrap();
        fill(&layer, 0xA5).unwrap();
        let pattern = f32::from_le_bytes([0xA5; 4]);
        let (alone, fused) =
            (Out::new(device, DType::F32, &[4, 1, dim]).unwrap(), Out::new(device, DType::F32, &[4, 1, dim]).unwrap());
        run(device, |enc| {
            let (positions, out_order, out) = (step.positions(), HeadOrder::TokenMajor, &alone.tensor);
            ops::norm_rope(enc, &NormRope::new(&x, positions, out).rope(rope).out_order(out_order))?;
            ops::norm_rope_write(enc, &NormRopeWrite::new(&x, &x, &x, &step, &layer, &fused.tensor).rope(rope))
        })
        .unwrap();
        let keys = layers::read(&layer, KvSide::K, 0, 0..701).unwrap();
        let values = layers::read(&layer, KvSide::V, 0, 0..701).unwrap();
        for (token, position) in [4, 5, 0, 700].into_iter().enumerate() {
            let skipped = position >= rows;
            let row = |x: &[f32], row: usize| x[row * dim..][..dim].iter().all(|&x| x == pattern);
            for out in [&alone, &fused] {
                assert_eq!(row(&out.tensor.to_f32().unwrap(), token), skipped, "{device}: position {position}");
                out.bytes().unwrap();
            }
            assert_eq!(row(&keys, position), skipped, "{device}: key at {position}");
            assert_eq!(row(&values, position), skipped, "{device}: value at {position}");
        }
    }
}
