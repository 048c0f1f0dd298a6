//! Property tests of arguments: an operation accepts a call or returns an error, and writes nothing if it returns an
//! error.
//!
//! Proptest generates a tape of bytes, and every choice in the construction of a call reads one. Byte 0 is always the
//! simplest choice, so a tape of zeros is a valid call, and shrinking a failing tape isolates the choice that matters.
//! Each tensor is a view inside a larger allocation, and every byte of every allocation is checked afterwards.

mod operations;
mod rules;

use crate::common::{FLOATS, bytes_of, devices, indices, input, layers::linear_spec, proptest_cases, run};
use kvant::{
    Codec, CpuOptions, DType, Device, DeviceKind, Encoder, Error, HeadOrder, KvLayer, LayerSpec, Result, Step, Tensor,
    codec::{BITS, Norm, TurboQuant},
    ops::{
        self, Activation, Add, AddBias, Affine, AllGather, AllReduce, Angles, Argmax, Attend, BlockFormat, Blocks,
        CausalConv, Columns, DeltaRule, Embed, ExpertGroups, ExpertScores, Experts, FloatFormat, Gate, Hadamard,
        HeadNorm, KvRead, KvSide, KvWrite, Linear, MergeAttention, MoeCombine, MoeRoute, NextNorm, NormRope,
        NormRopeWrite, PairLayout, Residual, RmsNorm, Rope, Sample, SampleRow, ScaledFloats, Softcap, Spread,
        StateRuns, StateSlots, Weight,
    },
};
use operations::*;
use proptest::prelude::*;

// ------------------------------------------------------------------------------------------------------------ the tape

struct Tape<'a> {
    bytes: &'a [u8],
}

impl Tape<'_> {
    fn next(&mut self) -> u8 {
        let Some((&first, rest)) = self.bytes.split_first() else { return 0 };
        self.bytes = rest;
        first
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.next() as usize % from.len()]
    }

    /// Rarely true.
    fn fault(&mut self) -> bool {
        self.next() > 246
    }

    fn flag(&mut self) -> bool {
        self.next() % 2 == 1
    }

    /// A valid number, or rarely any number.
    fn number(&mut self, valid: &[f32]) -> f32 {
        if self.fault() {
            self.pick(&[f32::NAN, f32::INFINITY, -1.0, 0.0, f32::MAX, 1e-45, 2.0])
        } else {
            self.pick(valid)
        }
    }

    fn size(&mut self, valid: &[usize]) -> usize {
        if self.fault() {
            self.pick(&[0, 1, 5, usize::MAX, usize::MAX / 2, u32::MAX as usize, 1 << 33])
        } else {
            self.pick(valid)
        }
    }
}

/// The contents of a tensor.
#[derive(Clone, Copy)]
enum Content {
    Floats,
    /// u32, usually below a limit.
    Below(usize),
    /// As `Below`, in rising order.
    Rising(usize),
    /// Any u32.
    Words,
}

/// An allocation, and the part of it that is passed to an operation.
struct Made {
    whole: Tensor,
    view: Tensor,
    written: bool,
}

struct World<'t> {
    tape: Tape<'t>,
    device: Device,
    /// A device for tensors that are on the wrong device.
    other: Device,
    made: Vec<Made>,
}

impl<'t> World<'t> {
    fn new(device: &Device, bytes: &'t [u8]) -> World<'t> {
        let other = if *device == Device::reference() { Device::cpu() } else { Device::reference() };
        World { tape: Tape { bytes }, device: device.clone(), other, made: Vec::new() }
    }

    /// A tensor of one of the dtypes (the first by default) and the shape. Rarely its dtype, shape or device is wrong,
    /// or it aliases an earlier tensor.
    fn tensor(&mut self, accepts: &[DType], shape: &[usize], content: Content, written: bool) -> Tensor {
        if self.tape.fault() && !self.made.is_empty() {
            let at = self.tape.next() as usize % self.made.len();
            self.made[at].written |= written;
            let made = &self.made[at].view;
            return made.reshape(shape).unwrap_or_else(|_| made.clone());
        }
        let mut shape = shape.to_vec();
        if self.tape.fault() {
            match self.tape.next() % 6 {
                0 => drop(shape.pop()),
                1 if shape.len() < 4 => shape.push(1),
                2 => shape.reverse(),
                3 => shape.iter_mut().take(1).for_each(|d| *d += 1),
                4 => shape.iter_mut().take(1).for_each(|d| *d = d.saturating_sub(1)),
                _ => shape.iter_mut().skip(1).take(1).for_each(|d| *d = self.tape.pick(&[0, 1, 3, 64])),
            }
        }
        let any = [DType::F32, DType::F16, DType::BF16, DType::U32, DType::U8];
        let dtype = if self.tape.fault() { self.tape.pick(&any) } else { self.tape.pick(accepts) };
        let device = if self.tape.fault() { self.other.clone() } else { self.device.clone() };
        let count: usize = shape.iter().product();
        let before = self.tape.pick(&[0, 1, 3]);
        let whole = Tensor::zeros(&device, dtype, &[before + count + 5]).unwrap();
        let bytes = self.content(dtype, before + count + 5, content);
        whole.write_bytes(&bytes).unwrap();
        let view = whole.rows(before..before + count).unwrap().reshape(&shape).unwrap();
        self.made.push(Made { whole, view: view.clone(), written });
        view
    }

    fn content(&mut self, dtype: DType, count: usize, content: Content) -> Vec<u8> {
        // One byte of the tape seeds a whole tensor.
        let seed = self.tape.next();
        let mut rng = crate::common::Rng::new(seed.into());
        let wild = self.tape.fault();
        match (dtype, content) {
            (DType::U32, Content::Below(limit) | Content::Rising(limit)) => {
                let far = [limit as u32, u32::MAX, limit as u32 + 1];
                let value = |_| if wild && rng.below(4) == 0 { rng.pick(&far) } else { rng.below(limit.max(1)) as u32 };
                let mut values: Vec<u32> = (0..count).map(value).collect();
                if matches!(content, Content::Rising(_)) {
                    values.sort_unstable();
                }
                values.into_iter().flat_map(u32::to_le_bytes).collect()
            }
            (DType::U32 | DType::U8, _) => (0..count * dtype.size()).map(|_| rng.bits() as u8).collect(),
            _ => {
                let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38, 1e-42, -0.0];
                let mut values = rng.normals(count);
                if wild {
                    values.iter_mut().for_each(|x| *x = if rng.below(4) == 0 { rng.pick(&odd) } else { *x });
                }
                crate::common::encode(dtype, &values)
            }
        }
    }

    fn input(&mut self, shape: &[usize]) -> Tensor {
        self.tensor(&FLOATS, shape, Content::Floats, false)
    }

    fn f32(&mut self, shape: &[usize]) -> Tensor {
        self.tensor(&[DType::F32], shape, Content::Floats, false)
    }

    fn output(&mut self, shape: &[usize]) -> Tensor {
        self.tensor(&FLOATS, shape, Content::Floats, true)
    }

    fn u32s(&mut self, shape: &[usize], limit: usize, written: bool) -> Tensor {
        self.tensor(&[DType::U32], shape, Content::Below(limit), written)
    }

    fn weight(&mut self, shape: &[usize]) -> Option<Tensor> {
        self.tape.flag().then(|| self.input(shape))
    }

    /// A layer, whose planes are added to the watched tensors.
    fn layer(&mut self, written: bool) -> KvLayer {
        let tape = &mut self.tape;
        let quantised = Codec::TurboQuant(TurboQuant {
            bits: tape.pick(&[4, 5, 6, 8, 2, 3]),
            scale: 1.0,
            norm: tape.pick(&[Norm::Rms, Norm::LeastSquares, Norm::Unbiased]),
            centred: false,
        });
        let codecs = [Codec::F32, quantised, Codec::F16, Codec::BF16];
        let spec = LayerSpec::new(
            tape.pick(&[1, 2, 3]),
            tape.pick(&[64, 128, 8, 64]),
            tape.pick(&[9, 4, 1, 33]),
            tape.pick(&codecs),
        )
        .sequences(tape.pick(&[1, 2]))
        .ring(tape.flag())
        .order(tape.pick(&[HeadOrder::HeadMajor, HeadOrder::TokenMajor]));
        let device = if tape.fault() { &self.other } else { &self.device };
        let layer = KvLayer::new(device, spec).unwrap();
        for (_, plane) in layer.k().tensors().chain(layer.v().tensors()) {
            self.made.push(Made { whole: plane.clone(), view: plane.clone(), written });
        }
        layer
    }

    /// A step of `tokens` tokens that fits the layer, except for rare faults.
    fn step(&mut self, layer: &KvLayer, tokens: usize) -> Step {
        let spec = layer.spec();
        let mut places = Vec::new();
        let limit = if spec.ring { 100 } else { spec.capacity };
        // Each position once in its sequence: two tokens for one slot would race.
        for i in 0..tokens {
            places.push(((i % spec.sequences) as u32, (i / spec.sequences % limit) as u32));
        }
        let plain = Step::new(&self.device, spec.sequences, &places).unwrap();
        let mut guarded = |values: &Tensor, limit: usize| {
            let made = self.u32s(&[values.elements()], limit, false);
            let keep = self.tape.fault();
            if !keep && made.dtype() == DType::U32 && made.elements() == values.elements() {
                made.write(&values.to_vec::<u32>().unwrap()).unwrap();
            }
            made
        };
        let positions = guarded(plain.positions(), limit);
        let sequence = guarded(plain.sequence(), spec.sequences);
        Step::from_tensors(positions, sequence, guarded(plain.lens(), limit + 1))
    }

    fn norm(&mut self, head_dim: usize) -> (bool, Option<Tensor>, f32) {
        let present = !self.tape.flag();
        (present, self.weight(&[head_dim]), self.tape.number(&[1e-6, 0.0]))
    }

    /// Records and runs a call, which is accepted or rejected, and checks the memory in both cases. Some calls are
    /// captured and replayed.
    fn attempt(&mut self, what: &str, record: impl Fn(&mut Encoder) -> Result<()>) -> Result<()> {
        let before: Vec<Vec<u8>> = self.made.iter().map(|made| bytes_of(&made.whole).unwrap()).collect();
        let result = if self.tape.flag() {
            Encoder::capture(&self.device, record).and_then(|graph| {
                let after: Vec<Vec<u8>> = self.made.iter().map(|made| bytes_of(&made.whole).unwrap()).collect();
                assert!(before == after, "{}: {what}: a capture runs nothing", self.device);
                graph.replay()?.wait()
            })
        } else {
            run(&self.device, record)
        };
        for (i, (made, before)) in self.made.iter().zip(&before).enumerate() {
            let after = bytes_of(&made.whole).unwrap();
            let from = made.view.byte_offset() - made.whole.byte_offset();
            let inside = from..from + made.view.bytes();
            for (at, (x, y)) in before.iter().zip(&after).enumerate() {
                let allowed = result.is_ok() && made.written && inside.contains(&at);
                assert!(
                    allowed || x == y,
                    "{}: {what}: byte {at} of tensor {i} {:?} changed; result {result:?}",
                    self.device,
                    made.view
                );
            }
        }
        result
    }
}

type Operation = fn(&mut World) -> Result<()>;

const OPERATIONS: [(&str, Operation); 23] = [
    ("kv_write", kv_write),
    ("kv_read", kv_read),
    ("attend", attend),
    ("norm_rope", norm_rope),
    ("norm_rope_write", norm_rope_write),
    ("rms_norm", rms_norm),
    ("hadamard", hadamard),
    ("linear", linear),
    ("embed", embed),
    ("gate", gate),
    ("add", add),
    ("add_bias", add_bias),
    ("causal_conv", causal_conv),
    ("delta_rule", delta_rule),
    ("softcap", softcap),
    ("spread", spread),
    ("argmax", argmax),
    ("sample", sample),
    ("moe_route", moe_route),
    ("moe_combine", moe_combine),
    ("all_reduce", all_reduce),
    ("all_gather", all_gather),
    ("merge_attention", merge_attention),
];

/// The available devices, including the reference.
fn present() -> Vec<Device> {
    Device::list().into_iter().filter_map(|entry| entry.device.ok()).collect()
}

/// The simplest arguments are valid, so that the property tests vary valid calls.
#[test]
fn plain_arguments_are_accepted() {
    for device in present() {
        // Metal devices form no groups, whose ranks merge results.
        let has = |name: &str| name != "merge_attention" || device.kind() != DeviceKind::Metal;
        for (name, operation) in OPERATIONS.into_iter().filter(|(name, _)| has(name)) {
            operation(&mut World::new(&device, &[])).unwrap_or_else(|e| panic!("{device}: {name}: {e}"));
        }
    }
}

/// Many random tapes give accepted calls, and many give rejected ones; otherwise the property tests would show little.
#[test]
fn tapes_give_accepted_and_rejected_calls() {
    let mut rng = crate::common::Rng::of("tapes");
    for (name, operation) in OPERATIONS {
        let mut taken = 0;
        for _ in 0..200 {
            let tape: Vec<u8> = (0..96).map(|_| rng.bits() as u8).collect();
            taken += usize::from(operation(&mut World::new(&Device::cpu(), &tape)).is_ok());
        }
        assert!((20..=195).contains(&taken), "{name}: {taken} of 200 calls are accepted");
    }
}

macro_rules! taken_or_refused {
    ($($operation:ident),* $(,)?) => {
        mod taken_or_refused {
            use super::*;

            proptest! {
                #![proptest_config(ProptestConfig { cases: proptest_cases(400), failure_persistence: None, ..ProptestConfig::default() })]
                $(
                    #[test]
                    fn $operation(tape in prop::collection::vec(any::<u8>(), 0..128)) {
                        for device in present() {
                            // Any result is allowed; `attempt` has checked the memory.
                            let _ = super::$operation(&mut World::new(&device, &tape));
                        }
                    }
                )*
            }
        }
    };
}
taken_or_refused!(
    kv_write,
    kv_read,
    attend,
    norm_rope,
    norm_rope_write,
    rms_norm,
    hadamard,
    linear,
    embed,
    gate,
    add,
    add_bias,
    causal_conv,
    delta_rule,
    softcap,
    spread,
    argmax,
    sample,
    moe_route,
    moe_combine,
    all_reduce,
    all_gather,
    merge_attention,
);

proptest! {
    #![proptest_config(ProptestConfig { cases: proptest_cases(256), failure_persistence: None, ..ProptestConfig::default() })]

    /// Tensors and layers of any description are allocated, or rejected without an attempt to allocate.
    #[test]
    fn tensors_and_layers(
        shape in prop::collection::vec(prop_oneof![0usize..5, Just(usize::MAX), Just(1 << 40)], 0..6),
        range in (any::<u8>(), any::<u8>()),
        numbers in prop::collection::vec(prop_oneof![0usize..9, Just(64), Just(usize::MAX), Just(1usize << 33)], 4),
        bits in prop_oneof![Just(4u32), Just(8), 0u32..10, Just(u32::MAX)],
        scale in prop_oneof![Just(1.0f32), Just(f32::NAN), Just(0.0), Just(1e-3), Just(9e-4), Just(1000.0), Just(1001.0), any::<f32>()],
    ) {
        for device in present() {
            // Dimensions of zero must not hide the size of the others.
            let bytes = shape.iter().try_fold(4usize, |n, &d| n.checked_mul(d.max(1)));
            if shape.len() > 4 || bytes.is_none() {
                prop_assert!(Tensor::zeros(&device, DType::F32, &shape).is_err());
            } else if shape.contains(&0) || bytes.is_some_and(|bytes| bytes <= 4 << 20) {
                let t = Tensor::zeros(&device, DType::F16, &shape).unwrap();
                prop_assert_eq!(t.shape(), &shape[..]);
                let (a, b) = (range.0 as usize % 6, range.1 as usize % 6);
                let valid = a <= b && b <= shape.first().copied().unwrap_or(0);
                prop_assert_eq!(t.rows(a..b).is_ok(), valid && !shape.is_empty());
                let other = t.reshape(&[t.elements() + 1]);
                prop_assert!(t.reshape(&[t.elements()]).is_ok() && other.is_err());
                prop_assert!(t.read_bytes(&mut vec![0; t.bytes() + 1]).is_err() && t.write_bytes(&[0; 1 << 12]).is_err() || t.bytes() == 1 << 12);
            }
            let k = Codec::TurboQuant(TurboQuant { bits, scale, norm: Norm::Rms, centred: false });
            let [sequences, kv_heads, capacity, head_dim] = [numbers[0], numbers[1], numbers[2], numbers[3]];
            let small = numbers.iter().all(|&n| n <= 64);
            let spec = linear_spec(1, 1, 1, Codec::F16).kv_heads(kv_heads).capacity(capacity).head_dim(head_dim).k(k).sequences(sequences);
            let bytes = numbers.iter().try_fold(4usize, |n, &d| n.checked_mul(d));
            if small || bytes.is_none() || numbers.contains(&0) {
                let valid = small
                    && !numbers.contains(&0)
                    && BITS.contains(&bits)
                    && (1e-3..=1000.0).contains(&scale)
                    && head_dim.is_power_of_two()
                    && head_dim >= 8;
                prop_assert_eq!(KvLayer::new(&device, spec).is_ok(), valid, "{:?}", spec);
            }
        }
    }
}
