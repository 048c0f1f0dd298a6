//! Tests attention on every level and several thread counts against the reference device.

use half::{bf16, f16};

use crate::{
    Codec, DType, Device, HeadOrder, KvLayer, LayerSpec, Planes, Result, SimdLevel, Step, Tensor,
    cpu::testing::{self, device},
    ops::{self, Attend, Query, attend::visible},
};

#[derive(Clone)]
struct AttendCase {
    k: Codec,
    v: Codec,
    head_dim: usize,
    kv_heads: usize,
    group: usize,
    capacity: usize,
    ring: bool,
    order: HeadOrder,
    /// (sequence, position).
    tokens: Vec<(u32, u32)>,
    lens: Vec<u32>,
    window: Option<usize>,
    softcap: Option<f32>,
    scale: f32,
    sinks: bool,
    q_rotated: bool,
    dtype: DType,
    splits: Option<usize>,
    /// (sequence, position) of a key and value that are NaN.
    nan: Option<(usize, usize)>,
    /// (sequence, position, value): one coordinate of the dense key or value (side 1) at the position has this value.
    odd: Option<(usize, usize, f32)>,
    /// (index, value): an element of the queries has this value.
    odd_query: Option<(usize, f32)>,
}

impl Default for AttendCase {
    fn default() -> AttendCase {
        AttendCase {
            k: Codec::F16,
            v: Codec::F16,
            head_dim: 64,
            kv_heads: 2,
            group: 2,
            capacity: 160,
            ring: false,
            order: HeadOrder::HeadMajor,
            tokens: vec![(0, 149)],
            lens: vec![150],
            window: None,
            softcap: None,
            scale: 0.2,
            sinks: false,
            q_rotated: false,
            dtype: DType::F32,
            splits: None,
            nan: None,
            odd: None,
            odd_query: None,
        }
    }
}

/// Reproducible numbers in −1 … 1.
fn random(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / 8_388_608.0 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn tensor(device: &Device, dtype: DType, shape: &[usize], x: &[f32]) -> Result<Tensor> {
    match dtype {
        DType::F16 => Tensor::from_slice(device, &x.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>(), shape),
        DType::BF16 => Tensor::from_slice(device, &x.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>(), shape),
        _ => Tensor::from_slice(device, x, shape),
    }
}

/// Fills a side with random vectors; rows of `poisoned` are NaN.
fn fill(planes: &Planes, seed: u64, poisoned: &[bool]) -> Result<()> {
    for (name, plane) in planes.tensors() {
        let row = plane.elements() / poisoned.len();
        let mut x = random(seed + name.len() as u64, plane.elements());
        if plane.dtype() == DType::U8 {
            plane.write_bytes(&x.iter().map(|x| (x * 128.0) as i8 as u8).collect::<Vec<_>>())?;
            continue;
        }
        if name == "norms" {
            x.iter_mut().for_each(|x| *x = 0.6 + 0.3 * *x);
        }
        for (row, _) in x.chunks_mut(row).zip(poisoned).filter(|(_, poisoned)| **poisoned) {
            row.fill(f32::NAN);
        }
        let filled = tensor(plane.device(), plane.dtype(), plane.shape(), &x)?;
        let mut bytes = vec![0; filled.bytes()];
        filled.read_bytes(&mut bytes)?;
        plane.write_bytes(&bytes)?;
    }
    Ok(())
}

impl AttendCase {
    fn run(&self, device: &Device) -> Result<Vec<f32>> {
        let (heads, tokens, sequences) = (self.kv_heads * self.group, self.tokens.len(), self.lens.len());
        let spec = LayerSpec::new(self.kv_heads, self.head_dim, self.capacity, self.k)
            .sequences(sequences)
            .v(self.v)
            .ring(self.ring)
            .order(self.order);
        let layer = KvLayer::new(device, spec)?;
        // Slots that no token sees are poisoned.
        let mut poisoned = vec![true; sequences * self.kv_heads * self.capacity];
        for head in 0..self.kv_heads {
            for &(sequence, position) in &self.tokens {
                let sequence = sequence as usize;
                let window = self.window.unwrap_or(usize::MAX);
                for j in visible(position as usize, self.lens[sequence] as usize, self.capacity, window) {
                    poisoned[layer.row(sequence, head, layer.slot(j))] = self.nan == Some((sequence, j));
                }
            }
        }
        fill(&layer.k, 1, &poisoned)?;
        fill(&layer.v, 2, &poisoned)?;
        if let Some((side, position, value)) = self.odd {
            let plane = &[&layer.k, &layer.v][side].low;
            let mut x = plane.to_f32()?;
            for sequence in 0..sequences {
                for head in 0..self.kv_heads {
                    x[layer.row(sequence, head, layer.slot(position)) * self.head_dim + 37] = value;
                }
            }
            let mut bytes = vec![0; plane.bytes()];
            tensor(device, plane.dtype(), plane.shape(), &x)?.read_bytes(&mut bytes)?;
            plane.write_bytes(&bytes)?;
        }
        let (positions, sequence): (Vec<u32>, Vec<u32>) = self.tokens.iter().map(|t| (t.1, t.0)).unzip();
        let step = Step::from_tensors(
            Tensor::from_slice(device, &positions, &[tokens])?,
            Tensor::from_slice(device, &sequence, &[tokens])?,
            Tensor::from_slice(device, &self.lens, &[sequences])?,
        );
        let shape = [tokens, heads, self.head_dim];
        let mut q = random(3, shape.iter().product());
        if let Some((at, value)) = self.odd_query {
            q[at] = value;
        }
        let q = tensor(device, self.dtype, &shape, &q)?;
        let out = Tensor::zeros(device, self.dtype, &shape)?;
        let q = if self.q_rotated { Query::Rotated(&q) } else { Query::Raw(&q) };
        let sinks = Tensor::from_slice(device, &random(6, heads), &[heads])?;
        let args = Attend::new(q, &layer, &step, &out)
            .scale(self.scale)
            .softcap(self.softcap)
            .window(self.window)
            .sinks(self.sinks.then_some(&sinks))
            .splits(self.splits);
        let mut enc = device.encoder()?;
        ops::attend(&mut enc, &args)?;
        enc.commit()?.wait()?;
        out.to_f32()
    }

    /// Asserts equality with the reference on every device of `devices`, up to f32 rounding.
    #[track_caller]
    fn check(&self, devices: &[Device]) {
        let want = self.run(&Device::reference()).unwrap();
        let name = format!("{}:{} D {} G {} T {}", self.k, self.v, self.head_dim, self.group, self.tokens.len());
        for device in devices {
            let got = self.run(device).unwrap();
            let is_of = |level: SimdLevel| device.name().starts_with(&level.to_string());
            let quantised = self.k.is_quantised() || self.v.is_quantised();
            let spread = (f64::from(self.scale.abs()) * (self.head_dim as f64).sqrt()).max(1.0);
            // The squares of a few units in the output's last place, and of further rounding.
            let mut bound = match self.dtype {
                DType::F16 => 1e-7,
                DType::BF16 => 1e-5,
                _ => 3e-12 * spread.powi(2),
            };
            if quantised && (is_of(SimdLevel::Avx512Vbmi) || is_of(SimdLevel::Avx512Amx)) {
                bound += 1e-7;
            }
            if is_of(SimdLevel::Avx512Amx) {
                bound += ((1.0 + spread) / 131_072.0).powi(2);
            }
            close(&got, &want, bound, &format!("{name} on {device}"));
        }
    }
}

/// Asserts that the normalised squared error is within a bound.
#[track_caller]
fn close(got: &[f32], want: &[f32], bound: f64, what: &str) {
    let (mut error, mut norm) = (0f64, 0f64);
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.is_nan(), want.is_nan(), "{what}, element {i}: {got}, expected {want}");
        assert!(got == want || got.is_finite() == want.is_finite(), "{what}, element {i}: {got}, expected {want}");
        if want.is_finite() {
            error += (f64::from(got) - f64::from(want)).powi(2);
            norm += f64::from(want).powi(2);
        }
    }
    assert!(error <= bound * norm, "{what}: normalised squared error {:e}", error / norm);
}

/// Every level, each with another number of threads.
fn devices() -> Vec<Device> {
    testing::levels().enumerate().map(|(i, level)| device(level, 1 + (i + 1) % 3)).collect()
}

const CODECS: [Codec; 9] = [
    Codec::F32,
    Codec::F16,
    Codec::BF16,
    Codec::tq(2),
    Codec::tq(3),
    Codec::tq(4),
    Codec::tq(5),
    Codec::tq(6),
    Codec::tq(8),
];

#[test]
fn every_codec_at_every_head_size() {
    let devices = devices();
    for (i, head_dim) in ops::attend::HEAD_DIMS.into_iter().enumerate() {
        // Quantised codecs need head sizes that are powers of two.
        let codecs = if head_dim.is_power_of_two() { &CODECS[..] } else { &CODECS[..3] };
        for (j, &k) in codecs.iter().enumerate() {
            // Different codecs for keys and values, every group size, a context that is not a multiple of a tile.
            let v = codecs[(j + i + 1) % codecs.len()];
            AttendCase {
                k,
                v,
                head_dim,
                group: [1, 2, 3, 8][(i + j) % 4],
                splits: (j % 4 > 0).then_some(j % 4),
                ..AttendCase::default()
            }
            .check(&devices);
            AttendCase { k, v: k, head_dim, kv_heads: 1, group: 4, ..AttendCase::default() }.check(&devices);
        }
    }
}

#[test]
fn every_group_size() {
    let devices = devices();
    for group in 1..=9 {
        for (k, v) in [(Codec::F16, Codec::F32), (Codec::tq(4), Codec::tq(8))] {
            AttendCase { k, v, group, ..AttendCase::default() }.check(&devices);
        }
    }
}

#[test]
fn ring_wrap() {
    let devices = devices();
    let ring = |len: u32| AttendCase {
        ring: true,
        capacity: 70,
        lens: vec![len],
        tokens: vec![(0, len - 1)],
        ..AttendCase::default()
    };
    for len in [1, 5, 69, 70, 71, 100, 140, 141, 7_000_003] {
        for order in [HeadOrder::HeadMajor, HeadOrder::TokenMajor] {
            let case = AttendCase { order, ..ring(len) };
            case.check(&devices);
            AttendCase { window: Some(33), splits: Some(3), k: Codec::tq(6), ..case.clone() }.check(&devices);
            AttendCase { window: Some(1), v: Codec::tq(5), ..case }.check(&devices);
        }
    }
}

#[test]
fn multi_token_on_wrapped_ring() {
    let devices = devices();
    let tokens: Vec<(u32, u32)> = (10..14).map(|p| (0, p)).collect();
    let case = AttendCase { ring: true, capacity: 8, lens: vec![14], tokens, ..AttendCase::default() };
    case.check(&devices);
    AttendCase { window: Some(3), ..case.clone() }.check(&devices);
    // The first of these tokens are overwritten by later ones: they see nothing, and get zeros.
    let tokens: Vec<(u32, u32)> = (0..14).map(|p| (0, p)).collect();
    let case = AttendCase { tokens, ..case };
    case.check(&devices);
    let out = case.run(&devices[0]).unwrap();
    assert!(out[..6 * 4 * 64].iter().all(|x| *x == 0.0) && out[6 * 4 * 64..].iter().all(|x| *x != 0.0));
}

#[test]
fn prompts() {
    let devices = devices();
    for tokens in [2, 5, 31, 75] {
        for (group, window) in [(1, None), (2, Some(3)), (3, Some(40)), (8, None)] {
            let tokens: Vec<(u32, u32)> = (0..tokens).map(|i| (0, 80 + i)).collect();
            let lens = vec![80 + tokens.len() as u32];
            let case = AttendCase { tokens, lens, group, window, ..AttendCase::default() };
            case.check(&devices);
            AttendCase { k: Codec::tq(4), v: Codec::BF16, splits: Some(2), head_dim: 128, ..case }.check(&devices);
        }
    }
}

#[test]
fn prompts_of_every_shape() {
    // Numbers of rows and keys that are not multiples of 16 or 32, ranges that end everywhere in a tile, and more rows
    // than a block has.
    let devices = devices();
    for (i, head_dim) in ops::attend::HEAD_DIMS.into_iter().enumerate() {
        let codecs = if head_dim.is_power_of_two() { &CODECS[..] } else { &CODECS[..3] };
        for (j, &k) in codecs.iter().enumerate() {
            let (past, tokens) = [(0, 17), (31, 70), (150, 33), (7, 129), (64, 64)][(i + j) % 5];
            let case = AttendCase {
                k,
                v: codecs[(j + i) % codecs.len()],
                head_dim,
                kv_heads: 1,
                group: [4, 1, 2, 3][(i + 3 * j) % 4],
                capacity: 300,
                tokens: (past..past + tokens).map(|p| (0, p)).collect(),
                lens: vec![past + tokens],
                window: [None, Some(50), Some(16)][(i + j) % 3],
                sinks: j % 2 == 1,
                scale: [0.2, 1.0][j % 2],
                softcap: (j % 4 == 3).then_some(5.0),
                splits: (j % 3 == 1).then_some(3),
                ..AttendCase::default()
            };
            case.check(&devices);
            AttendCase { v: k, order: HeadOrder::TokenMajor, window: None, ..case }.check(&devices);
        }
    }
}

#[test]
fn scores_that_rise_and_fall() {
    // Later keys raise the largest score by a little, by a lot, and not at all.
    let devices = devices();
    let tokens: Vec<(u32, u32)> = (400..440).map(|p| (0, p)).collect();
    for scale in [0.01, 2.0, 8.0] {
        for k in [Codec::F32, Codec::BF16] {
            let (tokens, lens) = (tokens.clone(), vec![440]);
            AttendCase { k, scale, tokens, lens, capacity: 440, ..AttendCase::default() }.check(&devices);
        }
    }
}

#[test]
fn several_sequences_in_any_order() {
    let devices = devices();
    let mut tokens: Vec<(u32, u32)> = (3..40).map(|p| (2, p)).collect();
    tokens.extend([(0, 149), (1, 0), (1, 1), (0, 148), (2, 5), (2, 5), (3, 77)]);
    let case = AttendCase { tokens, lens: vec![150, 2, 40, 78], ..AttendCase::default() };
    case.check(&devices);
    AttendCase { window: Some(20), order: HeadOrder::TokenMajor, splits: Some(4), ..case }.check(&devices);
}

#[test]
fn sinks() {
    let devices = devices();
    for (past, tokens) in [(0u32, 33u32), (50, 1), (50, 12), (130, 90)] {
        for window in [None, Some(30)] {
            let mut all: Vec<(u32, u32)> = (past..past + tokens).map(|p| (1, p)).collect();
            all.extend([(0, 7), (0, 8)]);
            let lens = vec![9, past + tokens];
            let case = AttendCase {
                tokens: all,
                lens,
                sinks: true,
                window,
                ring: true,
                capacity: 100,
                ..AttendCase::default()
            };
            case.check(&devices);
            AttendCase { k: Codec::tq(4), v: Codec::tq(8), splits: Some(3), ..case.clone() }.check(&devices);
            AttendCase { v: Codec::tq(6), head_dim: 512, group: 1, ..case }.check(&devices);
        }
    }
}

#[test]
fn softcap_used() {
    let devices = devices();
    for (softcap, scale) in [(50.0, 20.0), (0.5, 0.2), (1000.0, 3.0)] {
        let case = AttendCase { softcap: Some(softcap), scale, k: Codec::F32, v: Codec::F32, ..AttendCase::default() };
        case.check(&devices);
        let without = AttendCase { softcap: None, ..case.clone() }.run(&devices[0]).unwrap();
        assert!(case.run(&devices[0]).unwrap() != without);
    }
}

#[test]
fn large_scores_do_not_overflow() {
    // Scores up to ±1e4: the softmax picks one key, up to the rounding of such scores.
    for scale in [1500.0, -1500.0] {
        let case = AttendCase { scale, k: Codec::F32, v: Codec::F32, tokens: vec![(0, 40)], ..AttendCase::default() };
        let want = case.run(&Device::reference()).unwrap();
        for device in devices() {
            for (got, want) in case.run(&device).unwrap().iter().zip(&want) {
                assert!((got - want).abs() < 2e-2, "{got}, expected {want}");
            }
        }
    }
}

#[test]
fn activation_dtypes() {
    let devices = devices();
    for dtype in [DType::F16, DType::BF16] {
        AttendCase { dtype, k: Codec::tq(8), v: Codec::F32, ..AttendCase::default() }.check(&devices);
    }
}

#[test]
fn rotated_queries() {
    let devices = devices();
    for (k, v) in [(Codec::tq(4), Codec::F16), (Codec::tq(8), Codec::tq(4)), (Codec::tq(2), Codec::tq(3))] {
        AttendCase { k, v, q_rotated: true, head_dim: 256, ..AttendCase::default() }.check(&devices);
    }
}

#[test]
fn a_nan_affects_only_rows_that_see_it() {
    let devices = devices();
    let tokens: Vec<(u32, u32)> = (100..130).map(|p| (0, p)).collect();
    for (k, v) in [(Codec::F16, Codec::F16), (Codec::tq(4), Codec::tq(8)), (Codec::tq(6), Codec::BF16)] {
        // Seen by the first tokens only, by the last only, by all.
        for position in [85, 117, 95] {
            let nan = Some((0, position));
            let case = AttendCase { k, v, window: Some(30), nan, tokens: tokens.clone(), ..AttendCase::default() };
            case.check(&devices);
            assert!(case.run(&devices[0]).unwrap().iter().any(|x| x.is_nan()));
        }
    }
}

#[test]
fn odd_keys_and_values_affect_only_rows_that_see_them() {
    // Infinities, and numbers that are finite only in f32.
    let devices = devices();
    let tokens: Vec<(u32, u32)> = (100..130).map(|p| (0, p)).collect();
    for codec in [Codec::F16, Codec::F32, Codec::BF16] {
        for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 3.4e38, 1e30] {
            if codec == Codec::F16 && value.is_finite() {
                continue;
            }
            // A score of 10³⁸ overflows f32.
            for side in if value.is_finite() { 1..2 } else { 0..2 } {
                for position in [85, 117, 95] {
                    let (odd, tokens) = (Some((side, position, value)), tokens.clone());
                    let case =
                        AttendCase { k: codec, v: codec, window: Some(30), odd, tokens, ..AttendCase::default() };
                    case.check(&devices);
                    // The softcapped score of an infinity is finite.
                    AttendCase { window: None, softcap: Some(5.0), ..case }.check(&devices);
                }
            }
        }
    }
}

#[test]
fn odd_queries_affect_only_their_row() {
    let devices = devices();
    let tokens: Vec<(u32, u32)> = (100..130).map(|p| (0, p)).collect();
    for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        for codec in [Codec::F16, Codec::tq(4), Codec::tq(8)] {
            let odd_query = Some((9 * 4 * 64 + 64 + 5, value));
            let case = AttendCase { k: codec, v: codec, odd_query, tokens: tokens.clone(), ..AttendCase::default() };
            case.check(&devices);
            // The softcapped score of an infinity is finite; a rotation makes it NaN.
            if !codec.is_quantised() {
                AttendCase { softcap: Some(5.0), ..case }.check(&devices);
            }
        }
    }
}

#[test]
fn one_split_writes_output() {
    let devices = devices();
    for splits in [1, 2, 7, 150, 1000] {
        AttendCase { splits: Some(splits), ..AttendCase::default() }.check(&devices);
    }
}

#[test]
fn determinism() {
    let tokens = vec![(0, 3000), (1, 2999), (1, 3000)];
    let case = AttendCase { tokens, lens: vec![3001; 2], capacity: 3001, k: Codec::tq(5), ..AttendCase::default() };
    for level in SimdLevel::ALL.into_iter().filter(|level| level.is_supported()) {
        for threads in [1, 2, 3] {
            let device = device(level, threads);
            let first = case.run(&device).unwrap();
            for _ in 0..5 {
                assert_eq!(first, case.run(&device).unwrap(), "{device}");
            }
        }
    }
}

/// One token with four query heads over a layer of one head. All coordinates are outermost centroids, which fixed point
/// does not round; norms and queries are given.
struct Chosen {
    codec: Codec,
    head_dim: usize,
    scale: f32,
    /// Norms of keys and values.
    norms: Vec<[f32; 2]>,
    /// Rotated queries, `[4, D]`.
    q: Vec<f32>,
}

impl Chosen {
    const HEADS: usize = 4;

    fn run(&self, device: &Device) -> Vec<f32> {
        let keys = self.norms.len();
        let spec = LayerSpec::new(1, self.head_dim, keys, self.codec);
        let layer = KvLayer::new(device, spec).unwrap();
        for (side, planes) in [&layer.k, &layer.v].into_iter().enumerate() {
            for (name, plane) in planes.tensors() {
                if plane.dtype() == DType::U8 {
                    plane.write_bytes(&vec![0xFF; plane.bytes()]).unwrap();
                    continue;
                }
                assert_eq!(name, "norms");
                let blocks = plane.elements() / keys;
                let norms: Vec<f32> = self.norms.iter().flat_map(|n| vec![n[side]; blocks]).collect();
                let filled = tensor(device, plane.dtype(), plane.shape(), &norms).unwrap();
                let mut bytes = vec![0; filled.bytes()];
                filled.read_bytes(&mut bytes).unwrap();
                plane.write_bytes(&bytes).unwrap();
            }
        }
        let shape = [1, Self::HEADS, self.head_dim];
        let q = Tensor::from_slice(device, &self.q, &shape).unwrap();
        let out = Tensor::zeros(device, DType::F32, &shape).unwrap();
        let step = Step::new(device, 1, &[(0, keys as u32 - 1)]).unwrap();
        let args = Attend::new(Query::Rotated(&q), &layer, &step, &out).scale(self.scale);
        let mut enc = device.encoder().unwrap();
        ops::attend(&mut enc, &args).unwrap();
        enc.commit().unwrap().wait().unwrap();
        out.to_f32().unwrap()
    }
}

const QUANTISED: [Codec; 6] = [Codec::tq(2), Codec::tq(3), Codec::tq(4), Codec::tq(5), Codec::tq(6), Codec::tq(8)];

/// √(Σ(x−y)²/Σy²).
fn distance(x: &[f32], y: &[f32]) -> f64 {
    let error: f64 = x.iter().zip(y).map(|(&x, &y)| (f64::from(x) - f64::from(y)).powi(2)).sum();
    (error / y.iter().map(|&y| f64::from(y).powi(2)).sum::<f64>()).sqrt()
}

#[test]
fn equal_values_give_that_value() {
    // One key of 64 scores 11.09 above the others, whose weights are then half a unit; and all keys score the same.
    for codec in QUANTISED {
        let bits = codec.to_string().trim_start_matches("tq").parse().unwrap();
        let head_dim = 128;
        let outermost = *crate::codec::centroids(bits).unwrap().last().unwrap();
        for (above, keys) in [(11.09, 64), (0.0, 64), (4.0, 64), (11.09, 61), (7.0, 130)] {
            let scale = 1.0 / (head_dim as f32 * outermost);
            let norms = (0..keys).map(|key| [if key == 5 { 1.0 + above } else { 1.0 }, 1.0]).collect();
            let case = Chosen { codec, head_dim, scale, norms, q: vec![1.0; Chosen::HEADS * head_dim] };
            let want = case.run(&Device::reference());
            for device in devices() {
                let error = distance(&case.run(&device), &want);
                assert!(error < 1e-5, "{device}, {codec}, {keys} keys, one {above} above: off by {error:e}");
            }
        }
    }
}

#[test]
fn extreme_queries_and_values() {
    // Numbers that are finite in f32 must stay finite in fixed point, although the sum of a query's magnitudes and the
    // inverse of a small weight overflow. The norms of keys compensate for the size of queries.
    let devices = devices();
    for codec in QUANTISED {
        for (q, value) in [(1.0, 1.0), (2e36, 1.0), (3e-36, 1.0), (1.0, 1e-36), (1.0, 2.4e-31), (1.0, 1e30), (0.0, 1.0)]
        {
            let head_dim = 256;
            let queries: Vec<f32> = random(7, Chosen::HEADS * head_dim).iter().map(|x| x * q).collect();
            let key = if q == 0.0 { 1.0 } else { 0.05 / q };
            let norms = random(8, 100).iter().map(|x| [key * (1.0 + 0.5 * x), value * (1.0 + 0.3 * x)]).collect();
            let case = Chosen { codec, head_dim, scale: 1.0, norms, q: queries };
            let want = case.run(&Device::reference());
            for device in &devices {
                // Vectors are about √D long: neither squares nor sums of these overflow.
                let [got, want] = [&case.run(device), &want].map(|x| x.iter().map(|x| x / value).collect::<Vec<_>>());
                let error = distance(&got, &want);
                assert!(error < 1e-4, "{device}, {codec}, queries {q:e}, values {value:e}: off by {error:e}");
            }
        }
    }
}

#[test]
fn queries_that_are_not_finite_affect_only_their_row() {
    for codec in QUANTISED {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let head_dim = 128;
            let mut q = random(9, Chosen::HEADS * head_dim);
            q[2 * head_dim + 77] = bad;
            let case = Chosen { codec, head_dim, scale: 0.1, norms: vec![[1.0; 2]; 70], q };
            for device in devices() {
                for (row, out) in case.run(&device).chunks(head_dim).enumerate() {
                    // A row of infinite scores is NaN, too: the maximum is subtracted from itself.
                    let want = row == 2;
                    assert!(out.iter().all(|x| x.is_nan() == want), "{device}, {codec}, {bad}, row {row}: {out:?}");
                }
            }
        }
    }
}

#[test]
fn the_number_of_threads_changes_only_rounding() {
    // Splits end where tiles do: only the order in which tiles are added differs.
    for (k, v) in [
        (Codec::tq(4), Codec::tq(4)),
        (Codec::tq(8), Codec::tq(8)),
        (Codec::tq(6), Codec::F16),
        (Codec::tq(3), Codec::tq(2)),
    ] {
        let tokens = vec![(0, 2999)];
        let case =
            AttendCase { k, v, tokens, lens: vec![3000], capacity: 3001, head_dim: 128, ..AttendCase::default() };
        for level in SimdLevel::ALL.into_iter().filter(|level| level.is_supported()) {
            let one = case.run(&device(level, 1)).unwrap();
            for threads in [2, 3] {
                let error = distance(&case.run(&device(level, threads)).unwrap(), &one);
                assert!(error < 1e-5, "{level}, {k}:{v}: {threads} threads are {error:e} from one");
            }
        }
    }
}

#[test]
fn view_offset() {
    // The output and the queries are in the middle of larger tensors; the surroundings of the output must not change.
    for device in devices() {
        let case = AttendCase::default();
        let want = case.run(&device).unwrap();
        let all = Tensor::from_slice(&device, &vec![7f32; 3 * want.len()], &[3, 4, 64]).unwrap();
        let out = all.rows(1..2).unwrap();
        out.write(&want).unwrap();
        let spec = LayerSpec::new(2, 64, 4, Codec::F32);
        let layer = KvLayer::new(&device, spec).unwrap();
        let step = Step::new(&device, 1, &[(0, 2)]).unwrap();
        let q = Tensor::from_slice(&device, &random(1, 3 * 256), &[3, 4, 64]).unwrap().rows(2..3).unwrap();
        let mut enc = device.encoder().unwrap();
        let args = Attend::new(&q, &layer, &step, &out).scale(1.0);
        ops::attend(&mut enc, &args).unwrap();
        enc.commit().unwrap().wait().unwrap();
        let all = all.to_vec::<f32>().unwrap();
        // Keys and values of zeros give zeros.
        assert!(all[..256].iter().chain(&all[512..]).all(|x| *x == 7.0) && all[256..512].iter().all(|x| *x == 0.0));
    }
}
