//! A product followed by a gate in a graph, which a device may fuse, against the reference.

use super::linear::{Kind, Matrices};
use crate::common::{Bound, FLOATS, Out, Output, Rng, conform, indices, input, one_in, without_gpu::Launches};
use kvant::{
    DType, Device, Encoder, Result, Tensor, gpu,
    ops::{self, Activation, BlockFormat, Columns, Experts, Gate, Linear},
};

/// The source of the gate's factors, and the destination of its results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sides {
    /// The product's second half, or the second of its parts; the results replace the first.
    HalvesInPlace,
    /// The product's second half.
    Halves,
    /// Another tensor; the results replace the product.
    OtherInPlace,
    /// Another tensor.
    Other,
}
use Sides::*;

#[derive(Clone, Copy, Debug)]
struct Case {
    kind: Kind,
    sides: Sides,
    /// Tokens; one and `None` without experts, or the experts of each token and the number of experts.
    tokens: usize,
    experts: Option<[usize; 2]>,
    inputs: usize,
    /// Columns of the result.
    dim: usize,
    /// The dtypes of x, the product, the factors and the result.
    dtypes: [DType; 4],
    activation: Activation,
}

impl Case {
    /// The product and the results.
    fn launch(&self, device: &Device) -> Result<[Out; 2]> {
        let Case { kind, sides, tokens, experts, inputs, dim, dtypes: [x, product, up, result], activation } = *self;
        let mut rng = Rng::of(format!("{self:?}"));
        let halves = matches!(sides, Halves | HalvesInPlace);
        let outputs = if halves { 2 * dim } else { dim };
        let lead = experts.map_or(vec![outputs], |[_, experts]| vec![experts, outputs]);
        let w = Matrices::new(device, &mut rng, kind, &lead, inputs)?;
        let x = input(device, x, &rng.normals(tokens * inputs), &[tokens, inputs])?;
        let rows = tokens * experts.map_or(1, |[top_k, _]| top_k);
        let ids: Vec<u32> = (0..rows).map(|_| rng.below(experts.map_or(1, |[_, experts]| experts)) as u32).collect();
        let ids = indices(device, &ids, &[tokens, rows / tokens])?;
        // The factors are columns 8 to 8 + dim.
        let up = input(device, up, &rng.normals(rows * (dim + 8)), &[rows, dim + 8])?;
        let (whole, out) = (Out::new(device, product, &[rows, outputs])?, Out::new(device, result, &[rows, dim])?);
        let sides_of = |tensor: &Tensor| -> Result<[Tensor; 2]> {
            let both = tensor.reshape(&[2 * rows, dim])?;
            Ok([both.rows(0..rows)?, both.rows(rows..2 * rows)?])
        };
        let graph = Encoder::capture(device, |enc| {
            let args = Linear::new(&x, w.weight(), &whole.tensor).alpha((inputs as f32).sqrt().recip());
            let parts: &[usize] = if sides == HalvesInPlace { &[dim, dim] } else { &[] };
            ops::linear(enc, &args.parts(parts).experts(experts.map(|_| Experts::new(&ids))))?;
            let product = &whole.tensor;
            match sides {
                HalvesInPlace => {
                    let [gate, up] = sides_of(product)?;
                    ops::gate(enc, &Gate::new(&gate, &up, activation, &gate))
                }
                Halves => {
                    let up = Columns { tensor: product, start: dim };
                    ops::gate(enc, &Gate::new(product, up, activation, &out.tensor))
                }
                OtherInPlace => {
                    ops::gate(enc, &Gate::new(product, Columns { tensor: &up, start: 8 }, activation, product))
                }
                Other => {
                    ops::gate(enc, &Gate::new(product, Columns { tensor: &up, start: 8 }, activation, &out.tensor))
                }
            }
        })?;
        graph.replay()?.wait()?;
        graph.replay()?.wait()?;
        Ok([whole, out])
    }

    fn run(&self, device: &Device) -> Result<Vec<Output>> {
        let [whole, out] = self.launch(device)?;
        let [_, product, _, result] = self.dtypes;
        // The gate reads the rounded product, which at a tie may be the other neighbour.
        let tie = if product == DType::F32 { 0.0 } else { Bound::of(product).unit };
        let bound = |dtype| Bound { rounding: tie, ..Bound::of(dtype).times(16.0) };
        let mut outputs = vec![whole.close_within("product", bound(product))?];
        if matches!(self.sides, Halves | Other) {
            outputs.push(out.close_within("gated", bound(result))?);
        }
        Ok(outputs)
    }

    fn check(self) {
        conform(format!("{self:?}"), |device| self.run(device));
    }

    /// The files of CUDA's launches.
    fn files(&self) -> Vec<String> {
        let launches = Launches::default();
        self.launch(&gpu::cuda_device(launches.clone())).expect("it is launched");
        let all = launches.all.lock().unwrap();
        all.iter().map(|launch| launch.split('/').next().unwrap_or("").to_string()).collect()
    }
}

fn affine(bits: u32) -> Kind {
    Kind::Affine { bits, group: 64, scales: DType::BF16 }
}

const ACTIVATIONS: [Activation; 5] =
    [Activation::GeluTanh, Activation::Silu, Activation::ClampedSwish, Activation::Sigmoid, Activation::Identity];

/// One row by each kernel that gates: partial tiles, blocks with less work than others, parts of rows.
#[test]
fn one_row() {
    let (mut rng, mut cases) = (Rng::of("one gated row"), Vec::new());
    for (kind, file, inputs, dims) in [
        (Kind::Dense(DType::BF16), "linear_skinny_dense_tma.cu", 2560, [1, 70, 1400]),
        (Kind::Dense(DType::F16), "linear_skinny_dense_tma.cu", 576, [3, 132, 4700]),
        (Kind::Dense(DType::BF16), "linear_skinny_dense_tma.cu", 14_336, [2, 16, 133]),
        (affine(4), "linear_gemv_affine_int8.cu", 320, [1, 20, 1060]),
        (affine(8), "linear_gemv_affine_int8.cu", 448, [3, 40, 2116]),
    ] {
        for (i, dim) in dims.into_iter().enumerate() {
            // The largest case with half of the kinds.
            let all = [HalvesInPlace, Other, OtherInPlace, Halves];
            for &sides in if i == 2 { &all[..2] } else { &all[..] } {
                let mut dtypes = [(); 4].map(|()| rng.pick(&FLOATS));
                if let Kind::Dense(dtype) = kind {
                    dtypes[0] = dtype;
                }
                if sides == OtherInPlace {
                    dtypes[3] = dtypes[1];
                }
                let activation = rng.pick(&ACTIVATIONS);
                let case = Case { kind, sides, tokens: 1, experts: None, inputs, dim, dtypes, activation };
                assert_eq!(case.files(), [file], "{case:?}");
                cases.push(case);
            }
        }
    }
    one_in(3, |case| format!("{:?}", case.sides), cases).into_iter().for_each(Case::check);
}

/// Few rows of a dense weight, whose kernel gates: gates of halves, of parts and of another tensor's columns; partial
/// tiles; rows that several blocks divide.
#[test]
fn few_dense_rows() {
    let (mut rng, mut cases) = (Rng::of("few gated rows"), Vec::new());
    for (dtype, tokens, inputs, dims) in [
        (DType::BF16, 2, 2560, [1, 70, 1400]),
        (DType::F16, 7, 256, [3, 132, 4700]),
        (DType::BF16, 13, 10_240, [2, 16, 133]),
        (DType::BF16, 32, 2048, [8, 66, 1061]),
        (DType::F16, 20, 5376, [5, 16, 300]),
    ] {
        for (i, dim) in dims.into_iter().enumerate() {
            // The largest case with half of the kinds.
            let all = [HalvesInPlace, Other, OtherInPlace, Halves];
            for &sides in if i == 2 { &all[..2] } else { &all[..] } {
                let mut dtypes = [dtype, rng.pick(&FLOATS), rng.pick(&FLOATS), rng.pick(&FLOATS)];
                if matches!(sides, OtherInPlace | HalvesInPlace) {
                    dtypes[3] = dtypes[1];
                }
                let (kind, activation) = (Kind::Dense(dtype), rng.pick(&ACTIVATIONS));
                let case = Case { kind, sides, tokens, experts: None, inputs, dim, dtypes, activation };
                assert_eq!(case.files(), ["linear_skinny_dense_tma.cu"], "{case:?}");
                cases.push(case);
            }
        }
    }
    one_in(3, |case| format!("{:?}", case.sides), cases).into_iter().for_each(Case::check);
}

/// Few rows of experts, by integer products.
#[test]
fn experts() {
    let mut rng = Rng::of("gated experts");
    for bits in [4, 6, 8] {
        for (tokens, experts, inputs, dim) in [(1, [8, 16], 704, 96), (1, [2, 4], 2816, 20), (2, [3, 5], 320, 35)] {
            for sides in [Halves, Other] {
                let mut dtypes = [(); 4].map(|()| rng.pick(&FLOATS));
                if dtypes[0] == DType::BF16 && bits == 4 {
                    dtypes[0] = DType::F16;
                }
                let (kind, activation) = (affine(bits), rng.pick(&ACTIVATIONS));
                let case = Case { kind, sides, tokens, experts: Some(experts), inputs, dim, dtypes, activation };
                let files: &[&str] = if sides == Halves {
                    &["linear_gemv_affine_int8.cu"]
                } else {
                    &["linear_gemv_affine_int8.cu", "gate.cu"]
                };
                assert_eq!(case.files(), files, "{case:?}");
                case.check();
            }
        }
    }
}

/// Few rows of experts by bulk copies, one by one and sorted: short rows and long ones, rows of scales that are copied
/// one by one and together.
#[test]
fn experts_by_bulk_copies() {
    let mut rng = Rng::of("gated experts by bulk copies");
    for (tokens, experts, inputs, dim) in [
        (1, [8, 128], 2816, 704),
        (1, [8, 16], 704, 96),
        (1, [1, 2], 5376, 16),
        (12, [2, 16], 384, 64),
        (4, [8, 128], 512, 80),
        (9, [4, 40], 512, 80),
    ] {
        for sides in [Halves, Other] {
            let dtypes = [DType::BF16, rng.pick(&FLOATS), rng.pick(&FLOATS), rng.pick(&FLOATS)];
            let (kind, activation) = (affine(4), rng.pick(&ACTIVATIONS));
            let case = Case { kind, sides, tokens, experts: Some(experts), inputs, dim, dtypes, activation };
            let alone = tokens * experts[0] <= (experts[1] / 4).max(8);
            let sort = (!alone).then_some("linear_gemm_affine.cu");
            let gate = (sides == Other).then_some("gate.cu");
            let files: Vec<&str> = sort.into_iter().chain(["linear_skinny_affine4_tma.cu"]).chain(gate).collect();
            assert_eq!(case.files(), files, "{case:?}");
            case.check();
        }
    }
}

/// Products whose kernels have no gate.
#[test]
fn others() {
    // The row of 4-bit codes is computed by linear_gemv_affine_tma.
    for (kind, tokens, dtype) in [
        (Kind::Dense(DType::F32), 1, DType::F32),
        (Kind::Blocks(BlockFormat::Q4_K), 1, DType::BF16),
        (affine(4), 1, DType::BF16),
        (affine(4), 9, DType::BF16),
        (Kind::Dense(DType::BF16), 33, DType::BF16),
        // With two rows, linear_gemv_affine_int8 gates halves, but not parts or other columns.
        (affine(8), 2, DType::BF16),
    ] {
        let first = if tokens == 2 { HalvesInPlace } else { Halves };
        for sides in [first, Other] {
            let (dtypes, activation) = ([dtype; 4], Activation::Silu);
            let case = Case { kind, sides, tokens, experts: None, inputs: 512, dim: 48, dtypes, activation };
            assert_eq!(case.files().last().map(String::as_str), Some("gate.cu"), "{case:?}");
            case.check();
        }
    }
}

/// A gate is a separate kernel if other blocks of the product may still read the memory that it overwrites, or if its
/// sides are not the halves.
#[test]
fn gates_apart() {
    let (inputs, dim) = (64, 32);
    let product_and_gate = |case: usize, device: &Device| -> Result<Vec<Output>> {
        let mut rng = Rng::of(format!("gates apart {case}"));
        let w = Matrices::new(device, &mut rng, Kind::Dense(DType::BF16), &[2 * dim], inputs)?;
        let x = input(device, DType::BF16, &rng.normals(inputs), &[1, inputs])?;
        let whole = Out::new(device, DType::BF16, &[1, 2 * dim])?;
        let out = Out::new(device, DType::BF16, &[1, dim])?;
        let both = whole.tensor.reshape(&[2, dim])?;
        let (first, second) = (both.rows(0..1)?, both.rows(1..2)?);
        let to = if case == 0 { x.reshape(&[2, dim])?.rows(1..2)? } else { out.tensor.clone() };
        let graph = Encoder::capture(device, |enc| {
            ops::linear(enc, &Linear::new(&x, w.weight(), &whole.tensor).alpha(0.1))?;
            let (gate, up) = match case {
                0 => (Columns::from(&first), Columns::from(&second)),
                1 => (Columns::from(&second), Columns::from(&first)),
                _ => (Columns::from(&first), Columns::from(&first)),
            };
            ops::gate(enc, &Gate::new(gate, up, Activation::Silu, &to))
        })?;
        graph.replay()?.wait()?;
        let bound = Bound { rounding: 1.0 / 256.0, ..Bound::of(DType::BF16).times(16.0) };
        Ok(vec![Output::Close("gated".to_string(), to.to_f32()?, bound)])
    };
    for case in 0..3 {
        let launches = Launches::default();
        product_and_gate(case, &gpu::cuda_device(launches.clone())).expect("it is launched");
        let all = launches.all.lock().unwrap();
        assert_eq!(all.len(), 2, "case {case}: {all:?}");
        conform(format!("gates apart {case}"), |device| product_and_gate(case, device));
    }
}
