//! linear and embed against the reference: dense and affine weights, mixtures of experts, odd sizes.

use std::fmt::Display;

use crate::common::{
    Bound, FLOATS, Out, Output, Rng, conform, conform_on, devices_for_products, indices, input, leaves_out, one_in,
    run,
    without_gpu::{Launches, Model},
};
use kvant::{
    DType, Device, Result, Tensor, gpu,
    ops::{self, Affine, BlockFormat, Blocks, Embed, Experts, FloatFormat, Linear, ScaledFloats, Weight},
};

/// As [`conform`], on all devices with their own matrix products.
fn conform_products(case: impl Display, run: impl Fn(&Device) -> Result<Vec<Output>>) {
    conform_on(devices_for_products(), case, run);
}

/// A weight of E matrices (or one) with rows of K inputs.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Dense(DType),
    Affine {
        bits: u32,
        group: usize,
        scales: DType,
    },
    Blocks(BlockFormat),
    /// The dtype of the codes.
    Floats(FloatFormat, DType),
}

impl Kind {
    /// The inputs of a row are a multiple of this.
    fn step(self) -> usize {
        match self {
            Kind::Dense(_) => 1,
            Kind::Affine { group, .. } => group,
            Kind::Blocks(format) => format.block_inputs(),
            Kind::Floats(..) => 32,
        }
    }

    /// The rows that [`Bound::of_rows`] counts: 0 if no device rounds these weights, or the activations that they are
    /// multiplied by.
    fn rounded_rows(self, rows: usize) -> usize {
        if matches!(self, Kind::Dense(DType::F32) | Kind::Floats(FloatFormat::Mxfp8, _)) { 0 } else { rows }
    }
}

/// Every block format, and small floats with separate scales.
fn block_kinds() -> Vec<Kind> {
    let floats = FloatFormat::ALL.into_iter().flat_map(|f| [Kind::Floats(f, DType::U8), Kind::Floats(f, DType::U32)]);
    BlockFormat::ALL.into_iter().map(Kind::Blocks).chain(floats).collect()
}

/// Blocks of random codes, with scales of both signs that make weights of about 1.
fn blocks(rng: &mut Rng, format: BlockFormat, count: usize) -> Vec<u8> {
    use BlockFormat::*;
    let bytes = format.block_bytes();
    let mut data: Vec<u8> = (0..count * bytes).map(|_| rng.bits() as u8).collect();
    // The offsets of the scale and the minimum, and their usual magnitudes.
    let [scale, min] = match format {
        Q5_0 => [Some((0, 0.06)), None],
        Q5_1 => [Some((0, 0.06)), Some((2, 1.0))],
        Q2_K => [Some((80, 0.1)), Some((82, 0.1))],
        Q3_K => [Some((108, 0.02)), None],
        Q4_K | Q5_K => [Some((0, if format == Q4_K { 0.004 } else { 0.002 })), Some((2, 0.03))],
        Q6_K => [Some((208, 0.0008)), None],
        IQ4_NL => [Some((0, 0.015)), None],
        IQ4_XS => [Some((0, 0.0008)), None],
        MXFP4 => [None, None],
        _ => unreachable!("{format} has no scales here"),
    };
    for block in data.chunks_exact_mut(bytes) {
        for (at, magnitude) in [scale, min].into_iter().flatten() {
            let sign = if rng.bits() & 1 == 0 { 1.0 } else { -1.0 };
            let number = kvant::f16::from_f32(sign * magnitude * (0.5 + rng.uniform() as f32));
            block[at..at + 2].copy_from_slice(&number.to_le_bytes());
        }
        if format == MXFP4 {
            block[0] = power(rng);
        }
    }
    data
}

/// A scale of MXFP4 from 1/4 to 1.
fn power(rng: &mut Rng) -> u8 {
    125 + (rng.bits() % 3) as u8
}

/// A scale that makes weights of about 1: a power of two, or E4M3 of any mantissa and either sign.
fn scale_of(rng: &mut Rng, format: FloatFormat) -> u8 {
    match format {
        FloatFormat::Mxfp8 => power(rng) - 5,
        FloatFormat::Nvfp4 => (0x28 + (rng.bits() % 16) as u8) | (rng.bits() << 7) as u8,
        _ => power(rng),
    }
}

/// A byte of codes that are not NaN.
fn code_of(rng: &mut Rng, format: FloatFormat) -> u8 {
    let code = rng.bits() as u8;
    if format == FloatFormat::Mxfp8 && code & 0x7F == 0x7F { code - 1 } else { code }
}

pub(super) struct Matrices {
    kind: Kind,
    /// Dense: the weights. Affine: codes, scales, biases.
    tensors: Vec<Tensor>,
}

impl Matrices {
    /// `lead` is `[N]` or `[E, N]`.
    pub(super) fn new(device: &Device, rng: &mut Rng, kind: Kind, lead: &[usize], inputs: usize) -> Result<Matrices> {
        let shape = |last: usize| [lead, &[last]].concat();
        let rows: usize = lead.iter().product();
        let tensors = match kind {
            Kind::Dense(dtype) => vec![input(device, dtype, &rng.normals(rows * inputs), &shape(inputs))?],
            Kind::Blocks(format) => {
                let bytes = format.row_bytes(inputs).expect("whole blocks");
                let data = blocks(rng, format, rows * inputs / format.block_inputs());
                vec![Tensor::from_bytes(device, DType::U8, &shape(bytes), &data)?]
            }
            Kind::Floats(format, dtype) => {
                let (bytes, groups) = (inputs * format.bits() / 8, inputs / format.group());
                let codes: Vec<u8> = (0..rows * bytes).map(|_| code_of(rng, format)).collect();
                let scales: Vec<u8> = (0..rows * groups).map(|_| scale_of(rng, format)).collect();
                vec![
                    Tensor::from_bytes(device, dtype, &shape(bytes / dtype.size()), &codes)?,
                    Tensor::from_bytes(device, DType::U8, &shape(groups), &scales)?,
                ]
            }
            Kind::Affine { bits, group, scales } => {
                let words = inputs * bits as usize / 32;
                let codes: Vec<u32> = (0..rows * words).map(|_| rng.bits() as u32).collect();
                let groups = inputs / group;
                let step = 4.0 / (1u32 << bits) as f32;
                let scale: Vec<f32> = (0..rows * groups).map(|_| step * (0.5 + rng.uniform() as f32)).collect();
                let bias: Vec<f32> = (0..rows * groups).map(|_| -2.0 + 0.3 * rng.normal() as f32).collect();
                vec![
                    indices(device, &codes, &shape(words))?,
                    input(device, scales, &scale, &shape(groups))?,
                    input(device, scales, &bias, &shape(groups))?,
                ]
            }
        };
        Ok(Matrices { kind, tensors })
    }

    /// These matrices in tensors that begin at multiples of 16 bytes.
    fn aligned(&self, device: &Device) -> Result<Matrices> {
        let tensors = self.tensors.iter().map(|tensor| {
            let mut bytes = vec![0; tensor.bytes()];
            tensor.read_bytes(&mut bytes)?;
            Tensor::from_bytes(device, tensor.dtype(), tensor.shape(), &bytes)
        });
        Ok(Matrices { kind: self.kind, tensors: tensors.collect::<Result<_>>()? })
    }

    /// Matrices of one kind, concatenated along their rows.
    fn joined(device: &Device, all: &[Matrices]) -> Result<Matrices> {
        let tensors = (0..all[0].tensors.len()).map(|t| {
            let (first, mut data) = (&all[0].tensors[t], Vec::new());
            for matrix in all {
                let mut bytes = vec![0; matrix.tensors[t].bytes()];
                matrix.tensors[t].read_bytes(&mut bytes)?;
                data.extend(bytes);
            }
            let rows = all.iter().map(|matrix| matrix.tensors[t].shape()[0]).sum();
            Tensor::from_bytes(device, first.dtype(), &[rows, first.shape()[1]], &data)
        });
        Ok(Matrices { kind: all[0].kind, tensors: tensors.collect::<Result<_>>()? })
    }

    pub(super) fn weight(&self) -> Weight<'_> {
        match self.kind {
            Kind::Dense(_) => Weight::Dense(&self.tensors[0]),
            Kind::Blocks(format) => Blocks::new(&self.tensors[0], format).into(),
            Kind::Floats(format, _) => ScaledFloats::new(&self.tensors[0], &self.tensors[1], format).into(),
            Kind::Affine { bits, group, .. } => Weight::Affine(Affine {
                codes: &self.tensors[0],
                scales: &self.tensors[1],
                biases: &self.tensors[2],
                bits,
                group,
            }),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Case {
    kind: Kind,
    tokens: usize,
    inputs: usize,
    outputs: usize,
    x: DType,
    out: DType,
    alpha: f32,
}

impl Case {
    /// With `outliers`, one input of each row is 1000. Activations as integers of 23 bits, relative to the largest one,
    /// then have a larger error than in other cases.
    fn launch(&self, device: &Device, outliers: bool) -> Result<Out> {
        let mut rng = Rng::of(format!("{self:?}"));
        let w = Matrices::new(device, &mut rng, self.kind, &[self.outputs], self.inputs)?;
        self.launch_with(device, rng, w, outliers)
    }

    fn launch_with(&self, device: &Device, mut rng: Rng, w: Matrices, outliers: bool) -> Result<Out> {
        let shape = [self.tokens, self.inputs];
        let mut x = rng.normals(shape.iter().product());
        if outliers {
            x.chunks_exact_mut(self.inputs).for_each(|row| row[rng.bits() as usize % self.inputs] = 1000.0);
        }
        let x = input(device, self.x, &x, &shape)?;
        let out = Out::new(device, self.out, &[self.tokens, self.outputs])?;
        let args = Linear::new(&x, w.weight(), &out.tensor).alpha(self.alpha);
        run(device, |enc| ops::linear(enc, &args))?;
        Ok(out)
    }

    /// As [`Case::launch`], with all of the weight's tensors at multiples of 16 bytes.
    fn launch_aligned(&self, device: &Device) -> Result<Out> {
        let mut rng = Rng::of(format!("{self:?}"));
        let w = Matrices::new(device, &mut rng, self.kind, &[self.outputs], self.inputs)?;
        self.launch_with(device, rng, w.aligned(device)?, false)
    }

    fn run(&self, device: &Device, outliers: bool) -> Result<Vec<Output>> {
        self.output(device, self.launch(device, outliers)?, outliers)
    }

    fn output(&self, device: &Device, out: Out, outliers: bool) -> Result<Vec<Output>> {
        let quantised = !matches!(self.kind, Kind::Dense(_) | Kind::Floats(FloatFormat::Mxfp8, _));
        let rows = self.kind.rounded_rows(self.tokens);
        // Rounding of sequential f32 sums of thousands of products is noticeable. If the outputs are few, all may be
        // small sums of large products.
        let cancels = quantised && rows > 0 && self.outputs < 16;
        let gain = if outliers || cancels || self.inputs >= 4096 { 2.0 } else { 1.0 };
        let bound = Bound::of(self.out).of_rows(device, rows, quantised).times(gain);
        Ok(vec![out.close_within("out", bound)?])
    }

    /// Panics unless CUDA launches a kernel of this file; needs no GPU.
    fn comes_to(&self, file: &str) {
        let launches = Launches::default();
        self.launch(&gpu::cuda_device(launches.clone()), false).expect("it is launched");
        self.came_to(file, &launches);
    }

    fn came_to(&self, file: &str, launches: &Launches) {
        let all = launches.all.lock().unwrap();
        assert!(all.iter().any(|launch| launch.starts_with(file)), "{self:?}: {all:?}");
    }

    fn check(self) {
        conform_products(format!("{self:?}"), |device| self.run(device, false));
    }

    fn check_outliers(self) {
        conform_products(format!("{self:?}, outliers"), |device| self.run(device, true));
    }
}

const TOKENS: [usize; 7] = [0, 1, 2, 5, 8, 16, 33];

#[test]
fn dense() {
    let (mut rng, mut cases) = (Rng::of("dense"), Vec::new());
    for w in FLOATS {
        for x in FLOATS {
            for out in FLOATS {
                for tokens in TOKENS {
                    let (inputs, outputs) = (rng.pick(&[1, 7, 64, 100, 257]), rng.pick(&[1, 3, 16, 65]));
                    let alpha = rng.pick(&[1.0, 1.0, -0.37]);
                    cases.push(Case { kind: Kind::Dense(w), tokens, inputs, outputs, x, out, alpha });
                }
            }
        }
    }
    one_in(3, |case| format!("{:?} {}", case.kind, case.tokens), cases).into_iter().for_each(Case::check);
}

/// An empty sum is zero.
#[test]
fn no_inputs() {
    for tokens in [1, 33] {
        for kind in [
            Kind::Dense(DType::F16),
            Kind::Affine { bits: 4, group: 64, scales: DType::F32 },
            Kind::Blocks(BlockFormat::Q4_K),
            Kind::Floats(FloatFormat::Mxfp4, DType::U8),
            Kind::Floats(FloatFormat::Mxfp8, DType::U8),
        ] {
            Case { kind, tokens, inputs: 0, outputs: 5, x: DType::F32, out: DType::F32, alpha: 2.0 }.check();
        }
    }
}

/// Few and many rows, one block and several, a last block that does not fill a vector.
#[test]
fn block_formats() {
    let (mut rng, mut cases) = (Rng::of("blocks"), Vec::new());
    for kind in block_kinds() {
        for tokens in TOKENS {
            for blocks in [1, 2, 3, 9] {
                let (inputs, outputs) = (kind.step() * blocks, rng.pick(&[1, 3, 16, 65]));
                let (x, out, alpha) = (rng.pick(&FLOATS), rng.pick(&FLOATS), rng.pick(&[1.0, 1.0, -0.37]));
                cases.push(Case { kind, tokens, inputs, outputs, x, out, alpha });
            }
        }
        // Rows that are read in streams; matrices that are widened.
        for (tokens, inputs, outputs) in [(1, 4096, 70), (3, 2048, 69), (70, 512, 67)] {
            let (x, out) = (DType::F32, DType::F32);
            cases.push(Case { kind, tokens, inputs, outputs, x, out, alpha: 1.0 });
        }
    }
    let kind = |case: &Case| {
        let size = if case.inputs >= 2048 { "long" } else { ["few", "many"][usize::from(case.tokens >= 16)] };
        format!("{:?}, {size}", case.kind)
    };
    one_in(3, kind, cases).into_iter().for_each(Case::check);
}

/// Few rows by weights that a CUDA kernel unpacks itself: rows that do not begin at a multiple of 16 bytes, warps with
/// several spans of 256 inputs and with none, partial spans, partial tiles, two tiles per block, more rows than a block
/// processes.
#[test]
fn few_rows_of_blocks() {
    let (mut rng, mut cases) = (Rng::of("few rows of blocks"), Vec::new());
    let affine = [2, 3, 5].map(|bits| Kind::Affine { bits, group: 64, scales: DType::BF16 });
    for kind in block_kinds().into_iter().chain(affine) {
        let step = kind.step();
        for (tokens, inputs, outputs) in [
            (1, 256, 40),
            (1, 2880 / step * step, 33),
            (2, 5376, 17),
            (3, 1024 + step, 50),
            (8, 2304, 35),
            (8, 256, 3712),
            (19, 768, 20),
        ] {
            let x = rng.pick(&[DType::BF16, DType::BF16, DType::F16, DType::F32]);
            let case = Case { kind, tokens, inputs, outputs, x, out: rng.pick(&FLOATS), alpha: rng.pick(&[1.0, -0.5]) };
            case.comes_to("linear_skinny_blocks_mma.cu/");
            cases.push(case);
        }
    }
    one_in(5, |case| format!("{} {}", case.tokens, case.outputs), cases).into_iter().for_each(Case::check);
}

/// A NaN code of an E4M3 weight or scale makes only results of its row NaN.
#[test]
fn nan_codes_affect_only_their_row() {
    for (format, in_scales) in [(FloatFormat::Mxfp8, false), (FloatFormat::Nvfp4, true)] {
        for tokens in [1, 40] {
            conform_products(format!("{format}, {tokens} rows, NaN"), |device| {
                let mut rng = Rng::of(format!("NaN of {format}"));
                let (outputs, inputs) = (20, 320);
                let w = Matrices::new(device, &mut rng, Kind::Floats(format, DType::U8), &[outputs], inputs)?;
                let tensor = &w.tensors[usize::from(in_scales)];
                let mut bytes = crate::common::bytes_of(tensor)?;
                let row = bytes.len() / outputs;
                (bytes[3 * row + row - 1], bytes[17 * row + 5]) = (0x7F, 0xFF);
                tensor.write_bytes(&bytes)?;
                let x = input(device, DType::BF16, &rng.normals(tokens * inputs), &[tokens, inputs])?;
                let out = Out::new(device, DType::BF16, &[tokens, outputs])?;
                run(device, |enc| ops::linear(enc, &Linear::new(&x, w.weight(), &out.tensor)))?;
                let bad = out.tensor.to_f32()?.iter().filter(|y| y.is_nan()).count();
                assert_eq!(bad, 2 * tokens, "{device}: {format}");
                Ok(vec![out.close_within("out", Bound::of(DType::BF16).of_rows(device, tokens, true))?])
            });
        }
    }
}

#[test]
fn affine() {
    let (mut rng, mut cases) = (Rng::of("affine"), Vec::new());
    for bits in [2, 3, 4, 5, 6, 8] {
        for group in [32, 64, 128] {
            for scales in FLOATS {
                for tokens in TOKENS {
                    let kind = Kind::Affine { bits, group, scales };
                    let (inputs, outputs) = (group * rng.pick(&[1, 2, 3, 5]), rng.pick(&[1, 3, 16, 65]));
                    let (x, out, alpha) = (rng.pick(&FLOATS), rng.pick(&FLOATS), rng.pick(&[1.0, 1.0, 2.5]));
                    cases.push(Case { kind, tokens, inputs, outputs, x, out, alpha });
                }
            }
        }
    }
    let kind = |case: &Case| {
        let Kind::Affine { bits, group, .. } = case.kind else { unreachable!("all are affine") };
        format!("{bits} {group} {}", case.tokens >= 16)
    };
    one_in(3, kind, cases).into_iter().for_each(Case::check);
}

/// Kernels that turn a few rows of activations into integers keep small activations next to a large one.
#[test]
fn outliers() {
    let mut cases = Vec::new();
    for bits in [2, 3, 4, 5, 6, 8] {
        for (x, out) in [(DType::F32, DType::F32), (DType::BF16, DType::F32), (DType::F16, DType::F16)] {
            for (tokens, inputs, outputs) in [(1, 128, 65), (1, 2048, 40), (2, 448, 33), (5, 320, 64)] {
                let kind = Kind::Affine { bits, group: 64, scales: x };
                cases.push((bits, Case { kind, tokens, inputs, outputs, x, out, alpha: 1.0 }));
            }
        }
    }
    one_in(3, |(bits, _)| bits.to_string(), cases).into_iter().for_each(|(_, case)| case.check_outliers());
}

/// CUDA multiplies one row by bulk copies on Hopper and later, if weight rows have equal parts for its warps: one part
/// or several per warp, a last part for some warps only, more parts than buffers, blocks with fewer tiles than others.
#[test]
fn one_row_in_equal_parts() {
    let (mut rng, mut cases) = (Rng::of("one row"), Vec::new());
    for bits in [4, 6, 8] {
        let mut sizes =
            vec![(256, 16), (512, 144), (512, 2128), (1536, 48), (2816, 48), (4096, 32), (4608, 64), (5120, 16)];
        sizes.push((28_672, 16));
        if bits == 4 {
            // Parts of three spans.
            sizes.push((13_056, 16));
        }
        for (inputs, outputs) in sizes {
            for group in [32, 64, 128] {
                let scales = rng.pick(&FLOATS);
                let (x, out) = (rng.pick(&FLOATS), rng.pick(&FLOATS));
                // The scales of a row are multiples of 16 bytes, or of 8 if the scales of 256 inputs have 8 bytes or
                // fewer.
                let alignment = if 256 / group * scales.size() > 8 { 16 } else { 8 };
                let whole = (inputs / group * scales.size()).is_multiple_of(alignment);
                if !whole || (inputs * outputs > 1 << 17 && (group != 64 || inputs == 13_056 && scales == DType::F32)) {
                    continue;
                }
                let kind = Kind::Affine { bits, group, scales };
                let case = Case { kind, tokens: 1, inputs, outputs, x, out, alpha: rng.pick(&[1.0, -0.5]) };
                let launches = Launches::default();
                case.launch(&gpu::cuda_device(launches.clone()), false).expect("it is launched");
                let all = launches.all.lock().unwrap();
                let bulk = all.iter().any(|launch| launch.starts_with("linear_gemv_affine_tma.cu/"));
                assert!(bulk, "{case:?}: {all:?}");
                cases.push((bits, case, false));
                if inputs * outputs < 1 << 16 {
                    cases.push((bits, case, true));
                }
            }
        }
    }
    for (_, case, outliers) in one_in(3, |(bits, _, outliers)| format!("{bits} {outliers}"), cases) {
        if outliers { case.check_outliers() } else { case.check() }
    }
}

/// One row by a long matrix: whole rows are copied at a time, and warps have five, six or seven spans of them.
#[test]
fn one_row_of_a_long_matrix() {
    let mut cases = Vec::new();
    for (inputs, outputs, spans) in [(5120, 4240, 5), (5376, 4240, 6), (7168, 2128, 7)] {
        for scales in [DType::BF16, DType::F16] {
            let kind = Kind::Affine { bits: 4, group: 64, scales };
            let case = Case { kind, tokens: 1, inputs, outputs, x: DType::BF16, out: DType::F32, alpha: 1.0 };
            let launches = Launches::default();
            case.launch(&gpu::cuda_device(launches.clone()), false).expect("it is launched");
            let all = launches.all.lock().unwrap();
            let has_spans = format!("(\"SPANS\", UInt({spans}))");
            assert!(
                all[0].starts_with("linear_gemv_affine_tma.cu/") && all[0].contains(&has_spans),
                "{case:?}: {all:?}"
            );
            cases.push(case);
        }
    }
    one_in(3, |_| String::new(), cases).into_iter().for_each(Case::check);
}

/// CUDA multiplies one row by a dense weight with bulk copies on Hopper and later: inputs that two, four and eight
/// warps divide, and several blocks; fewer outputs than blocks; ranges of outputs of different lengths.
#[test]
fn one_dense_row() {
    let (mut rng, mut cases) = (Rng::of("one dense row"), Vec::new());
    let sizes = [
        (64, 1),
        (576, 4321),
        (256, 9000),
        (1152, 131),
        (896, 2200),
        (2560, 1333),
        (2624, 40),
        (4864, 896),
        (5376, 300),
        (10_240, 133),
        (18_944, 71),
        (28_672, 17),
    ];
    for (inputs, outputs) in sizes {
        for weight in [DType::F16, DType::BF16] {
            let (x, out) = (weight, rng.pick(&FLOATS));
            let alpha = rng.pick(&[1.0, -0.5]);
            let case = Case { kind: Kind::Dense(weight), tokens: 1, inputs, outputs, x, out, alpha };
            case.comes_to("linear_skinny_dense_tma.cu/");
            cases.push(case);
        }
    }
    // Other dtypes of x, and rows that are not divided evenly.
    for (x, inputs) in [(DType::F32, 1024), (DType::F16, 1024), (DType::BF16, 1032), (DType::BF16, 8)] {
        let kind = Kind::Dense(DType::BF16);
        cases.push(Case { kind, tokens: 1, inputs, outputs: 70, x, out: rng.pick(&FLOATS), alpha: 1.0 });
    }
    one_in(3, |case| format!("{:?}", case.kind), cases).into_iter().for_each(Case::check);
}

/// CUDA multiplies 2 to 32 rows by a dense weight with bulk copies on Hopper and later: inputs in one segment and in
/// several; blocks with part of a tile of outputs, one tile, and many; long rows, whose inputs several blocks divide.
#[test]
fn few_dense_rows() {
    let (mut rng, mut cases) = (Rng::of("few dense rows"), Vec::new());
    let sizes = [
        (256, 16),
        (256, 9001),
        (512, 1),
        (768, 300),
        (2048, 1061),
        (2560, 2200),
        (2816, 77),
        (4096, 133),
        (5376, 1059),
        (10_240, 1203),
    ];
    for (inputs, outputs) in sizes {
        for weight in [DType::F16, DType::BF16] {
            for rows in [&[2, 3, 5, 7, 8], &[9, 11, 13, 15, 16], &[17, 22, 25, 31, 32]] {
                let tokens = rng.pick(rows);
                let (out, alpha) = (rng.pick(&FLOATS), rng.pick(&[1.0, -0.5]));
                let case = Case { kind: Kind::Dense(weight), tokens, inputs, outputs, x: weight, out, alpha };
                case.comes_to("linear_skinny_dense_tma.cu/");
                cases.push(case);
            }
        }
    }
    let kind = |case: &Case| format!("{:?} {}", case.kind, case.tokens.div_ceil(8).next_power_of_two());
    // Large matrices select other divisions of the work only on CUDA.
    cases.retain(|case| !leaves_out() || case.inputs * case.outputs < 4 << 20);
    one_in(3, kind, cases).into_iter().for_each(Case::check);
}

/// CUDA multiplies 2 to 8 rows by affine 4-bit codes with bulk copies on Hopper and later: one warp and many, rows of
/// scales that are copied one by one and together, blocks with part of a tile of outputs, one tile, and many; long
/// rows, whose inputs several blocks divide.
#[test]
fn few_affine_rows() {
    let (mut rng, mut cases) = (Rng::of("few affine rows"), Vec::new());
    let sizes = [
        (64, 16),
        (384, 9000),
        (704, 304),
        (2112, 2200),
        (2816, 1000),
        (4096, 133),
        (5376, 2308),
        (8192, 1061),
        (21_504, 777),
    ];
    for (inputs, outputs) in sizes {
        for (group, scales) in [(64, DType::BF16), (64, DType::F16), (128, DType::BF16)] {
            if inputs % group != 0 {
                continue;
            }
            let tokens = rng.pick(&[2, 3, 5, 7, 8]);
            let (out, alpha) = (rng.pick(&FLOATS), rng.pick(&[1.0, -0.5]));
            let kind = Kind::Affine { bits: 4, group, scales };
            cases.push(Case { kind, tokens, inputs, outputs, x: DType::BF16, out, alpha });
        }
    }
    for case in one_in(3, |case| format!("{:?}", case.kind), cases) {
        let launches = Launches::default();
        case.launch_aligned(&gpu::cuda_device(launches.clone())).expect("it is launched");
        case.came_to("linear_skinny_affine4_tma.cu/", &launches);
        conform(format!("{case:?}"), |device| case.output(device, case.launch_aligned(device)?, false));
    }
}

/// 9 to 64 rows by a dense weight: few inputs and many; fewer outputs than a tile, and partial tiles.
#[test]
fn dense_batches() {
    let (mut rng, mut cases) = (Rng::of("dense batches"), Vec::new());
    let sizes = [
        (64, 16),
        (128, 1),
        (320, 300),
        (256, 9001),
        (576, 40),
        (1024, 1061),
        (2560, 133),
        (2560, 2200),
        (10_240, 270),
        (64, 40_003),
    ];
    for (inputs, outputs) in sizes {
        for weight in [DType::F16, DType::BF16] {
            for few in [true, false] {
                let tokens = if few { rng.pick(&[9, 13, 16]) } else { rng.pick(&[17, 25, 32, 33, 64]) };
                let (out, alpha) = (rng.pick(&FLOATS), rng.pick(&[1.0, -0.5]));
                let case = Case { kind: Kind::Dense(weight), tokens, inputs, outputs, x: weight, out, alpha };
                cases.push(case);
            }
        }
    }
    one_in(3, |case| format!("{:?} {}", case.kind, case.tokens > 16), cases).into_iter().for_each(Case::check);
}

/// Shapes beyond the tiles of a matrix product.
#[test]
fn larger() {
    let mut cases = Vec::new();
    for kind in [
        Kind::Dense(DType::F32),
        Kind::Dense(DType::BF16),
        Kind::Affine { bits: 4, group: 64, scales: DType::BF16 },
        Kind::Affine { bits: 6, group: 32, scales: DType::F16 },
    ] {
        for (tokens, inputs, outputs) in
            [(1, 1024, 771), (70, 384, 130), (129, 640, 67), (1, 192, 5000), (2, 256, 9001)]
        {
            let (x, out) = (DType::F32, DType::F32);
            cases.push(Case { kind, tokens, inputs, outputs, x, out, alpha: 1.0 });
        }
    }
    one_in(3, |case| format!("{:?}", case.kind), cases).into_iter().for_each(Case::check);
}

/// Prompts in half precision, which a backend may compute with matrix units or a library.
#[test]
fn many_rows_of_halves() {
    let affine = [(4, 64), (6, 32), (8, 128)].map(|(bits, group)| Kind::Affine { bits, group, scales: DType::BF16 });
    let mut cases = Vec::new();
    for dtype in [DType::BF16, DType::F16] {
        for kind in affine.into_iter().chain([Kind::Dense(dtype)]) {
            for (tokens, inputs, outputs) in [(70, 384, 136), (129, 640, 64)] {
                for out in [dtype, DType::F32] {
                    cases.push(Case { kind, tokens, inputs, outputs, x: dtype, out, alpha: 0.75 });
                }
            }
        }
    }
    one_in(3, |case| format!("{:?}", case.kind), cases).into_iter().for_each(Case::check);
}

/// Many rows by affine weights, or by bf16 weights if x is not bf16, for which CUDA has its own kernel: full and
/// partial tiles, inputs that are not a multiple of its steps, more groups than it sums at once, results at any offset.
#[test]
fn many_rows() {
    let (mut rng, mut cases) = (Rng::of("many rows"), Vec::new());
    for bits in [0, 4, 6, 8, 2, 3, 5] {
        for (tokens, inputs, outputs, in_32) in [
            (33, 64, 128, false),
            (64, 256, 3, false),
            (65, 320, 130, false),
            (40, 4160, 17, false),
            (300, 128, 52, false),
            (128, 384, 257, false),
            (41, 96, 40, true),
            (64, 4128, 19, true),
            (290, 352, 131, true),
            (47, 512, 64, true),
        ] {
            for x in FLOATS {
                let group = match in_32 {
                    true if bits == 0 => continue,
                    true => 32,
                    false if inputs % 128 == 0 => rng.pick(&[64, 128]),
                    false => 64,
                };
                let may_be_dense = in_32 || [2, 3, 5].contains(&bits);
                let kind = match bits {
                    0 if x == DType::BF16 => continue,
                    0 => Kind::Dense(DType::BF16),
                    _ => Kind::Affine { bits, group, scales: rng.pick(&FLOATS) },
                };
                let case =
                    Case { kind, tokens, inputs, outputs, x, out: rng.pick(&FLOATS), alpha: rng.pick(&[1.0, -0.5]) };
                for (model, other) in [
                    (Model::H200, "linear_gemm_affine_wgmma.cu/"),
                    (Model::A100, "linear_dequantise.cu/"),
                    (Model::Rtx4090, "linear_dequantise.cu/"),
                ] {
                    let launches = Launches { model, ..Launches::default() };
                    case.launch(&gpu::cuda_device(launches.clone()), false).expect("it is launched");
                    let all = launches.all.lock().unwrap();
                    let mut files = vec!["linear_gemm_affine.cu/", other];
                    if may_be_dense {
                        files.extend(["linear_dequantise.cu/", "linear_skinny_blocks_mma.cu/"]);
                    }
                    let is_one = |launch: &String| files.iter().any(|file| launch.starts_with(file));
                    assert!(all.iter().any(is_one), "{model:?}, {case:?}: {all:?}");
                }
                cases.push((bits, case));
            }
        }
    }
    one_in(3, |(bits, _)| bits.to_string(), cases).into_iter().for_each(|(_, case)| case.check());
}

/// Batches of up to 128 bf16 rows by affine weights, for which CUDA reads each matrix once on Hopper and later: full
/// and partial chunks of inputs and tiles of outputs, scales at odd offsets, blocks that share a tile, in clusters and
/// not.
#[test]
fn batches() {
    let (mut rng, mut cases) = (Rng::of("batches"), Vec::new());
    for bits in [4, 6, 8] {
        for (tokens, inputs, outputs) in [
            (9, 2240, 18),
            (12, 704, 130),
            (10, 1472, 140),
            (16, 1024, 258),
            (20, 320, 771),
            (32, 1024, 140),
            (33, 256, 2),
            (64, 1472, 130),
            (70, 384, 136),
            (128, 448, 258),
            (65, 2048, 514),
            // More tiles than clusters process.
            (12, 704, 8714),
            (24, 320, 17090),
            (100, 576, 17090),
        ] {
            if outputs > 8192 && bits != 4 && (bits, tokens) != (8, 100) {
                continue;
            }
            let group = if inputs % 128 == 0 { rng.pick(&[64, 128]) } else { 64 };
            let scales = if tokens > 32 { DType::BF16 } else { rng.pick(&[DType::BF16, DType::F16]) };
            let kind = Kind::Affine { bits, group, scales };
            let (x, alpha) = (DType::BF16, rng.pick(&[1.0, -0.5]));
            let outs: &[DType] = if tokens > 32 { &[DType::BF16] } else { &[DType::BF16, DType::F32] };
            for &out in outs {
                let case = Case { kind, tokens, inputs, outputs, x, out, alpha };
                case.comes_to("linear_gemm_affine_wgmma.cu/");
                cases.push((bits, case));
            }
        }
    }
    one_in(3, |(bits, _)| bits.to_string(), cases).into_iter().for_each(|(_, case)| case.check());
}

/// The results of several matrices, one after the other, equal those of each matrix alone.
#[test]
fn parts() {
    let affine = Kind::Affine { bits: 4, group: 64, scales: DType::BF16 };
    let floats = Kind::Floats(FloatFormat::Nvfp4, DType::U8);
    check_parts(&[affine, Kind::Blocks(BlockFormat::Q4_K), floats]);
}

#[test]
fn parts_of_dense_weights() {
    check_parts(&[Kind::Dense(DType::BF16), Kind::Dense(DType::F16)]);
}

fn check_parts(kinds: &[Kind]) {
    let widths = [34, 7, 23];
    for kind in kinds {
        let dtype = if let Kind::Dense(dtype) = *kind { dtype } else { DType::BF16 };
        for tokens in [0, 1, 3, 12, 30, 70] {
            conform_products(format!("parts of {kind:?}, {tokens} tokens"), |device| {
                let mut rng = Rng::of(format!("parts {kind:?} {tokens}"));
                let inputs = 256;
                let x = input(device, dtype, &rng.normals(tokens * inputs), &[tokens, inputs])?;
                let matrices: Vec<Matrices> = widths
                    .iter()
                    .map(|&n| Matrices::new(device, &mut rng, *kind, &[n], inputs))
                    .collect::<Result<_>>()?;
                let whole = Matrices::joined(device, &matrices)?;
                let out = Out::new(device, dtype, &[tokens, widths.iter().sum()])?;
                run(device, |enc| ops::linear(enc, &Linear::new(&x, whole.weight(), &out.tensor).parts(&widths)))?;
                let mut alone = Vec::new();
                for (matrix, &width) in matrices.iter().zip(&widths) {
                    let part = Tensor::zeros(device, dtype, &[tokens, width])?;
                    run(device, |enc| ops::linear(enc, &Linear::new(&x, matrix.weight(), &part)))?;
                    alone.extend(part.to_f32()?);
                }
                // Kernels for other widths may add in another order.
                for (i, (a, b)) in out.tensor.to_f32()?.into_iter().zip(alone).enumerate() {
                    assert!((a - b).abs() <= 0.02 * b.abs().max(4.0), "{device}, element {i}: {a}, not {b}");
                }
                let quantised = !matches!(kind, Kind::Dense(_));
                let bound = Bound::of(dtype).of_rows(device, kind.rounded_rows(tokens), quantised);
                Ok(vec![out.close_within("out", bound)?])
            });
        }
    }
}

/// Batches of experts: experts with no row, one row, several tiles; ids that all choices share or not.
#[test]
fn batches_of_experts() {
    let mut cases = Vec::new();
    for bits in [4, 6, 8] {
        for (tokens, top_k, experts, expanded, inputs, outputs) in [
            (8, 8, 16, false, 256, 130),
            (60, 2, 70, false, 704, 70),
            (32, 4, 5, true, 320, 256),
            (40, 2, 3, true, 2112, 40),
        ] {
            let kind = Kind::Affine { bits, group: 64, scales: DType::BF16 };
            let (x_type, out_type) = (DType::BF16, DType::BF16);
            let case = ExpertCase { kind, tokens, top_k, experts, expanded, inputs, outputs, x_type, out_type };
            let launches = Launches::default();
            case.launch(&gpu::cuda_device(launches.clone()), case.uneven()).expect("it is launched");
            let all = launches.all.lock().unwrap();
            assert!(all.iter().any(|launch| launch.starts_with("linear_gemm_affine_wgmma.cu/")), "{case:?}: {all:?}");
            cases.push(case);
        }
    }
    one_in(3, |_| String::new(), cases).into_iter().for_each(|case| case.check(case.uneven()));
}

/// Few rows of each expert by 4-bit codes, which CUDA computes with bulk copies on Hopper and later: experts with no
/// row, one row, several tiles; long rows, and short ones for one warp each; so few rows that each is alone.
#[test]
fn few_rows_of_experts() {
    let mut cases = Vec::new();
    for (tokens, top_k, experts, expanded, inputs, outputs, group) in [
        (8, 8, 32, false, 2816, 48, 64),
        (9, 1, 128, false, 704, 32, 64),
        (32, 8, 128, true, 704, 176, 64),
        (40, 2, 24, false, 1408, 64, 64),
        (12, 4, 16, true, 2048, 16, 128),
        (10, 2, 20, false, 384, 16, 128),
        (60, 2, 40, true, 64, 1600, 64),
        (1, 8, 128, false, 2816, 1408, 64),
        (1, 8, 128, true, 704, 2816, 64),
        (4, 2, 3, false, 512, 64, 128),
        (1, 1, 2, true, 5376, 16, 64),
    ] {
        for (scales, out_type) in [(DType::BF16, DType::BF16), (DType::F16, DType::F32)] {
            let kind = Kind::Affine { bits: 4, group, scales };
            let x_type = DType::BF16;
            let case = ExpertCase { kind, tokens, top_k, experts, expanded, inputs, outputs, x_type, out_type };
            let launches = Launches::default();
            case.launch_with(&gpu::cuda_device(launches.clone()), case.uneven(), true).expect("it is launched");
            let all = launches.all.lock().unwrap();
            assert!(all.iter().any(|launch| launch.starts_with("linear_skinny_affine4_tma.cu/")), "{case:?}: {all:?}");
            cases.push(case);
        }
    }
    one_in(3, |_| String::new(), cases).into_iter().for_each(|case| case.check_with(case.uneven(), true));
}

/// More than a thousand rows of bf16, for which CUDA dequantises W first, from any format.
#[test]
fn very_many_rows() {
    let affine = |bits, group| Kind::Affine { bits, group, scales: DType::BF16 };
    let floats = FloatFormat::ALL.map(|format| Kind::Floats(format, DType::U8));
    let others = [affine(4, 64), affine(6, 128), affine(3, 32), Kind::Blocks(BlockFormat::Q4_K)];
    let cases = others.into_iter().chain(floats).map(|kind| {
        let (inputs, dtype) = (kind.step().max(64), DType::BF16);
        let case = Case { kind, tokens: 1030, inputs, outputs: 40, x: dtype, out: dtype, alpha: 0.5 };
        case.comes_to("linear_dequantise.cu/");
        case
    });
    one_in(3, |_| String::new(), cases).into_iter().for_each(Case::check);
}

/// Many rows of experts, which CUDA sorts: experts with no rows, with less than a tile, with several tiles; more
/// experts than a warp sums at once.
#[test]
fn many_rows_of_experts() {
    let (mut rng, mut cases) = (Rng::of("many rows of experts"), Vec::new());
    let affine = |bits, group| Kind::Affine { bits, group, scales: DType::BF16 };
    for kind in [
        affine(4, 64),
        affine(6, 128),
        affine(8, 64),
        affine(4, 32),
        affine(5, 64),
        affine(3, 32),
        Kind::Dense(DType::BF16),
    ] {
        for (tokens, top_k, experts, expanded) in [(60, 2, 3, false), (300, 2, 3, true), (90, 4, 70, false)] {
            let (inputs, outputs) = (rng.pick(&[128, 384]), rng.pick(&[40, 131]));
            let (x_type, out_type) = (rng.pick(&FLOATS), rng.pick(&FLOATS));
            let case = ExpertCase { kind, tokens, top_k, experts, expanded, inputs, outputs, x_type, out_type };
            for model in [Model::H200, Model::A100, Model::Rtx4090] {
                let launches = Launches { model, ..Launches::default() };
                case.launch(&gpu::cuda_device(launches.clone()), case.uneven()).expect("it is launched");
                let all = launches.all.lock().unwrap();
                let is_sorted = all.iter().any(|launch| launch.contains("linear_gemm_affine_sort"));
                assert!(is_sorted, "{model:?}, {case:?}: {all:?}");
            }
            cases.push(case);
        }
    }
    one_in(3, |_| String::new(), cases).into_iter().for_each(|case| case.check(case.uneven()));
}

/// Many rows of experts with block weights, which CUDA reads once for several rows of an expert, or dequantises first.
#[test]
fn many_rows_of_experts_of_blocks() {
    let affine = Kind::Affine { bits: 3, group: 32, scales: DType::BF16 };
    let mut cases = Vec::new();
    for kind in block_kinds().into_iter().chain([affine]) {
        for (tokens, top_k, experts, expanded, kernel) in [
            (100, 2, 3, false, "linear_dequantise.cu/"),
            (300, 4, 20, true, "linear_dequantise.cu/"),
            (60, 2, 3, true, "linear_skinny_blocks_mma.cu/"),
            (90, 4, 70, false, "linear_skinny_blocks_mma.cu/"),
        ] {
            let (inputs, outputs) = (if kind.step() == 256 { 1024 } else { 192 }, 40);
            let (x_type, out_type) = (DType::BF16, DType::BF16);
            let case = ExpertCase { kind, tokens, top_k, experts, expanded, inputs, outputs, x_type, out_type };
            let launches = Launches::default();
            case.launch(&gpu::cuda_device(launches.clone()), case.uneven()).expect("it is launched");
            let all = launches.all.lock().unwrap();
            let has = |name: &str| all.iter().any(|launch| launch.contains(name));
            assert!(has("linear_gemm_affine_sort") && has(kernel), "{case:?}: {all:?}");
            cases.push(case);
        }
    }
    // Other devices use the kernels of `experts`, which covers every kind.
    one_in(8, |case| case.tokens.to_string(), cases).into_iter().for_each(|case| case.check(case.uneven()));
}

/// More experts than are dequantised at a time: each row equals its result among few rows.
#[test]
#[ignore = "takes two gigabytes"]
fn more_experts_than_are_dense_at_a_time() -> Result<()> {
    for device in crate::common::devices() {
        let mut rng = Rng::of("dense experts");
        let (experts, outputs, inputs, tokens) = (1100, 1000, 512, 53_000);
        let kind = Kind::Floats(FloatFormat::Mxfp4, DType::U8);
        let w = Matrices::new(device, &mut rng, kind, &[experts, outputs], inputs)?;
        let x = input(device, DType::BF16, &rng.normals(tokens * inputs), &[tokens, inputs])?;
        // One expert of twelve does not exist.
        let ids: Vec<u32> = (0..tokens).map(|_| rng.below(experts + experts / 12) as u32).collect();
        let product = |rows: std::ops::Range<usize>| -> Result<Vec<f32>> {
            let choices = indices(device, &ids[rows.clone()], &[rows.len(), 1])?;
            let out = Tensor::zeros(device, DType::BF16, &[rows.len(), outputs])?;
            let x = x.rows(rows)?;
            let args = Linear::new(&x, w.weight(), &out).experts(Some(Experts::new(&choices)));
            run(device, |enc| ops::linear(enc, &args))?;
            out.to_f32()
        };
        let all = product(0..tokens)?;
        for first in (0..tokens).step_by(5300) {
            let few = product(first..first + 5300)?;
            let bound = Bound { rounding: 1.0 / 256.0, ..Bound::of(DType::BF16) };
            crate::common::assert_close(
                format!("{device}: {first}"),
                &all[first * outputs..][..few.len()],
                &few,
                bound,
            );
        }
    }
    Ok(())
}

/// A product of rows with the matrices of their experts.
#[derive(Clone, Copy, Debug)]
struct ExpertCase {
    kind: Kind,
    tokens: usize,
    top_k: usize,
    experts: usize,
    expanded: bool,
    inputs: usize,
    outputs: usize,
    x_type: DType,
    out_type: DType,
}

impl ExpertCase {
    /// Many rows choose the first expert, and none the second.
    fn uneven(&self) -> impl Fn(&mut Rng) -> u32 + use<> {
        let experts = self.experts;
        move |rng| match rng.below(2 * experts) {
            id if id >= experts || id == 1 => 0,
            id => id as u32,
        }
    }

    fn launch(&self, device: &Device, choose: impl Fn(&mut Rng) -> u32) -> Result<Out> {
        self.launch_with(device, choose, false)
    }

    fn launch_with(&self, device: &Device, choose: impl Fn(&mut Rng) -> u32, aligned: bool) -> Result<Out> {
        let ExpertCase { kind, tokens, top_k, experts, expanded, inputs, outputs, x_type, out_type } = *self;
        let mut rng = Rng::of(format!("{self:?}"));
        let w = Matrices::new(device, &mut rng, kind, &[experts, outputs], inputs)?;
        let w = if aligned { w.aligned(device)? } else { w };
        let rows = if expanded { tokens * top_k } else { tokens };
        let x = input(device, x_type, &rng.normals(rows * inputs), &[rows, inputs])?;
        let ids: Vec<u32> = (0..tokens * top_k).map(|_| choose(&mut rng)).collect();
        let ids = indices(device, &ids, &[tokens, top_k])?;
        let out = Out::new(device, out_type, &[tokens * top_k, outputs])?;
        let experts = Some(Experts::new(&ids).expanded(expanded));
        let args = Linear::new(&x, w.weight(), &out.tensor).experts(experts).alpha(0.5);
        run(device, |enc| ops::linear(enc, &args))?;
        Ok(out)
    }

    fn check(&self, choose: impl Fn(&mut Rng) -> u32) {
        self.check_with(choose, false);
    }

    fn check_with(&self, choose: impl Fn(&mut Rng) -> u32, aligned: bool) {
        let rows = self.kind.rounded_rows(self.tokens * self.top_k);
        let quantised = !matches!(self.kind, Kind::Dense(_));
        conform_products(format!("{self:?}"), |device| {
            let bound = Bound::of(self.out_type).of_rows(device, rows, quantised);
            Ok(vec![self.launch_with(device, &choose, aligned)?.close_within("out", bound)?])
        });
    }
}

#[test]
fn experts() {
    let (mut rng, mut cases) = (Rng::of("experts"), Vec::new());
    let kinds = FLOATS.map(Kind::Dense).into_iter().chain([3, 4, 6, 8].into_iter().flat_map(|bits| {
        [32, 64].map(|group| Kind::Affine { bits, group, scales: if group == 32 { DType::F32 } else { DType::BF16 } })
    }));
    for kind in kinds.chain(block_kinds()) {
        for expanded in [false, true] {
            for (tokens, top_k) in [(1, 1), (1, 3), (5, 2), (70, 2)] {
                let step = kind.step().max(64);
                let (inputs, outputs, experts) = (step * rng.pick(&[1, 3]), rng.pick(&[1, 5, 33]), 4);
                let (x_type, out_type) = (rng.pick(&FLOATS), rng.pick(&FLOATS));
                cases.push(ExpertCase { kind, tokens, top_k, experts, expanded, inputs, outputs, x_type, out_type });
            }
        }
    }
    for case in one_in(3, |case| format!("{:?}", case.kind), cases) {
        // Some experts are chosen by nobody.
        case.check(|rng| rng.pick(&[0, 1, 3]));
    }
}

#[test]
fn embed() {
    let affine = [2, 3, 4, 5, 6, 8].into_iter().flat_map(|bits| {
        [32, 64, 128].into_iter().flat_map(move |group| FLOATS.map(|scales| Kind::Affine { bits, group, scales }))
    });
    let mut cases = Vec::new();
    for kind in FLOATS.map(Kind::Dense).into_iter().chain(affine).chain(block_kinds()) {
        for out_type in FLOATS {
            for (tokens, scale) in [(0, 1.0), (1, 1.0), (7, 11.313_708), (65, -1.0)] {
                cases.push((kind, out_type, tokens, scale));
            }
        }
    }
    for (kind, out_type, tokens, scale) in one_in(3, |(kind, ..)| format!("{kind:?}"), cases) {
        let case = format!("embed {kind:?} -> {out_type}, T {tokens}, scale {scale}");
        conform(&case, |device| {
            let mut rng = Rng::of(&case);
            let width = if matches!(kind, Kind::Dense(_)) { 37 } else { kind.step().max(128) * rng.pick(&[1, 2]) };
            let table = Matrices::new(device, &mut rng, kind, &[29], width)?;
            let ids: Vec<u32> = (0..tokens).map(|t| if t == 0 { 28 } else { rng.below(29) as u32 }).collect();
            let ids = indices(device, &ids, &[tokens])?;
            let out = Out::new(device, out_type, &[tokens, width])?;
            let args = Embed::new(table.weight(), &ids, &out.tensor).scale(scale);
            run(device, |enc| ops::embed(enc, &args))?;
            Ok(vec![out.close("out")?])
        });
    }
}

/// Tensors that are not aligned to a vector: their rows are read and written element by element.
#[test]
fn odd_offsets() {
    let kinds = FLOATS.map(Kind::Dense).into_iter().chain([2, 3, 4, 5, 6, 8].map(|bits| {
        let scales = DType::F16;
        Kind::Affine { bits, group: 32, scales }
    }));
    let cases = kinds.chain(block_kinds()).flat_map(|kind| [1, 2, 5, 20, 33].map(|tokens| (kind, tokens)));
    for (kind, tokens) in one_in(3, |(kind, _)| format!("{kind:?}"), cases) {
        let dtype = DType::BF16;
        let case = format!("at odd offsets: {kind:?}, T {tokens}");
        conform_products(&case, |device| {
            let mut rng = Rng::of(&case);
            let (inputs, outputs) = (kind.step().max(64), 20);
            // A view from element 1 of a flat tensor of the same dtype.
            let shifted = |tensor: &Tensor| -> Result<Tensor> {
                let bytes = crate::common::bytes_of(tensor)?;
                let flat = [vec![0xFF; tensor.dtype().size()], bytes].concat();
                let flat = Tensor::from_bytes(device, tensor.dtype(), &[tensor.elements() + 1], &flat)?;
                flat.rows(1..tensor.elements() + 1)?.reshape(tensor.shape())
            };
            let mut w = Matrices::new(device, &mut rng, kind, &[outputs], inputs)?;
            w.tensors = w.tensors.iter().map(shifted).collect::<Result<_>>()?;
            let x = shifted(&input(device, dtype, &rng.normals(tokens * inputs), &[tokens, inputs])?)?;
            let out = shifted(&Tensor::zeros(device, dtype, &[tokens, outputs])?)?;
            run(device, |enc| ops::linear(enc, &Linear::new(&x, w.weight(), &out)))?;
            let ids: Vec<u32> = (0..tokens).map(|_| rng.below(outputs) as u32).collect();
            let ids = indices(device, &ids, &[tokens])?;
            let rows = shifted(&Tensor::zeros(device, dtype, &[tokens, inputs])?)?;
            run(device, |enc| ops::embed(enc, &Embed::new(w.weight(), &ids, &rows).scale(2.0)))?;
            let close = |name: &str, tensor: &Tensor, bound: Bound| -> Result<Output> {
                Ok(Output::Close(name.to_string(), tensor.to_f32()?, bound))
            };
            let exact = Bound::of(dtype);
            let bound = exact.of_rows(device, kind.rounded_rows(tokens), !matches!(kind, Kind::Dense(_)));
            Ok(vec![close("linear", &out, bound)?, close("embed", &rows, exact)?])
        });
    }
}

/// An id beyond the table's rows or the experts: an error if the host sees it, otherwise a row of zeros.
#[test]
fn ids_out_of_range() {
    for kind in [
        Kind::Dense(DType::F32),
        Kind::Dense(DType::BF16),
        Kind::Affine { bits: 4, group: 32, scales: DType::F16 },
        Kind::Affine { bits: 4, group: 64, scales: DType::F16 },
        Kind::Blocks(BlockFormat::Q6_K),
        Kind::Floats(FloatFormat::Mxfp4, DType::U8),
    ] {
        for (device, tokens) in crate::common::devices().iter().flat_map(|d| [3, 40, 140].map(|tokens| (d, tokens))) {
            let mut rng = Rng::of("out of range");
            let (experts, outputs, inputs) = (4, 9, kind.step().max(64));
            let w = Matrices::new(device, &mut rng, kind, &[experts, outputs], inputs).unwrap();
            let table = Matrices::new(device, &mut rng, kind, &[experts], inputs).unwrap();
            let x = input(device, DType::F32, &rng.normals(tokens * inputs), &[tokens, inputs]).unwrap();
            let ids: Vec<u32> = (0..tokens).map(|t| [3, 4, 0, u32::MAX, 1][t % 5]).collect();
            let (rows, choices) =
                (indices(device, &ids, &[tokens]).unwrap(), indices(device, &ids, &[tokens, 1]).unwrap());
            let out = Out::new(device, DType::F32, &[tokens, outputs]).unwrap();
            let embedded = Out::new(device, DType::F32, &[tokens, inputs]).unwrap();
            let experts_of = Some(Experts::new(&choices));
            let linear = run(device, |enc| {
                let (weight, experts) = (w.weight(), experts_of);
                ops::linear(enc, &Linear::new(&x, weight, &out.tensor).experts(experts))
            });
            let embed = run(device, |enc| ops::embed(enc, &Embed::new(table.weight(), &rows, &embedded.tensor)));
            if crate::common::sees_indices(device) {
                let refused = |result| matches!(result, Err(kvant::Error::OutOfRange { got: 4, .. }));
                assert!(refused(linear) && refused(embed), "{device}: {kind:?}");
                assert!(out.untouched().unwrap() && embedded.untouched().unwrap(), "{device}: {kind:?}");
                continue;
            }
            linear.unwrap();
            embed.unwrap();
            for (out, dim) in [(&out, outputs), (&embedded, inputs)] {
                out.bytes().unwrap();
                for (row, id) in out.tensor.to_f32().unwrap().chunks(dim).zip(&ids) {
                    let zeros = row.iter().all(|&y| y == 0.0);
                    assert_eq!(zeros, *id as usize >= experts, "{device}: {kind:?}, id {id}: {row:?}");
                }
            }
        }
    }
}

/// The result with an expert's matrix equals the result with that matrix alone.
#[test]
fn an_expert_is_a_matrix() {
    for device in crate::common::devices() {
        let mut rng = Rng::of("one expert");
        let kind = Kind::Dense(DType::F32);
        let w = Matrices::new(device, &mut rng, kind, &[3, 5], 64).unwrap();
        let x = input(device, DType::F32, &rng.normals(2 * 64), &[2, 64]).unwrap();
        let ids = indices(device, &[2, 0], &[2, 1]).unwrap();
        let out = Out::new(device, DType::F32, &[2, 5]).unwrap();
        let experts = Some(Experts::new(&ids));
        run(device, |enc| ops::linear(enc, &Linear::new(&x, w.weight(), &out.tensor).experts(experts))).unwrap();
        let got = out.tensor.to_f32().unwrap();
        for (row, expert) in [(0, 2), (1, 0)] {
            let matrix = w.tensors[0].rows(expert..expert + 1).unwrap().reshape(&[5, 64]).unwrap();
            let alone = Out::new(device, DType::F32, &[1, 5]).unwrap();
            let x = x.rows(row..row + 1).unwrap();
            let weight = Weight::Dense(&matrix);
            run(device, |enc| ops::linear(enc, &Linear::new(&x, weight, &alone.tensor))).unwrap();
            let (got, want) = (&got[row * 5..][..5], alone.tensor.to_f32().unwrap());
            crate::common::assert_close(
                format!("{device}: row {row}"),
                got,
                &want,
                crate::common::Bound::of(DType::F32),
            );
        }
    }
}
