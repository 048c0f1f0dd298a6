//! Helpers of all tests of the library: the devices, random data, guarded tensors, and comparison with the reference
//! device.
//!
//! Tests access a device's memory only through uploads and downloads, so that one file tests the CPU and the GPUs.
//! Every input is surrounded by rows of NaN, and every output by rows of a known pattern. A kernel that reads or writes
//! outside its tensor is therefore detected by every test.

#![allow(dead_code, reason = "each test binary uses its part")]

pub mod attention;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
pub mod cuda_host;
pub mod layers;
pub mod limited;
pub mod without_gpu;

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    fmt::{Debug, Display},
    sync::{Mutex, OnceLock, PoisonError},
};

use kvant::{
    Codec, CpuOptions, DType, Device, DeviceKind, Encoder, Float, Result, SimdLevel, Tensor, bf16, f16, ops::Query,
};

/// The three activation types.
pub const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// The number of devices that a case runs on, selected by `KVANT_TEST_SCOPE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The CPU's best instruction set, and one schedule of msl-host: for every edit.
    Quick,
    /// Every instruction set, with thread counts that rotate from case to case. The first case of each test runs on
    /// every pair of them. msl-host runs all its schedules for the first launches of a kind, then one: before a
    /// submission.
    Default,
    /// Every device for every case, every schedule for every launch: before a release.
    All,
}

impl Scope {
    pub fn get() -> Scope {
        match std::env::var("KVANT_TEST_SCOPE").as_deref() {
            Ok("quick") => Scope::Quick,
            Ok("all") => Scope::All,
            Ok("default") | Err(_) => Scope::Default,
            Ok(other) => panic!("KVANT_TEST_SCOPE is {other}, not quick, default or all"),
        }
    }
}

/// The number of random cases of a property, by [`Scope`].
pub fn proptest_cases(usual: u32) -> u32 {
    match Scope::get() {
        Scope::Quick => usual.div_ceil(16),
        Scope::Default => usual,
        Scope::All => 4 * usual,
    }
}

/// The devices for this case: the available ones, the Metal kernels under msl-host if it runs here, and the CPU at each
/// instruction set with 1, 2 and 3 threads, reduced by [`Scope`]. Each call counts as a case, so call it once per case.
///
/// `KVANT_TEST_SHARE=20` runs the first and then every twentieth case of each test; the others get no device. For
/// emulators. `KVANT_TEST_DEVICE=metal` selects the devices of a kind; `KVANT_TEST_SIMD=NEON` selects one instruction
/// set of the CPU. `KVANT_TEST_RANKS=2` makes each device a group of two.
///
/// Concurrent tests share all devices except msl-host, which runs one launch after the other: each thread has its own.
pub fn devices() -> &'static [Device] {
    devices_of(|devices| &devices.all)
}

/// As [`devices`], for matrix products: adds the CPU with 8-bit activations, at each instruction set where they make a
/// difference.
pub fn devices_for_products() -> &'static [Device] {
    devices_of(|devices| &devices.for_products)
}

fn devices_of(set: impl Fn(&'static Devices) -> &'static DeviceSet) -> &'static [Device] {
    thread_local! {
        static LENT: Lent = Lent::new();
    }
    LENT.with(|lent| {
        let case = lent.cases.replace(lent.cases.get() + 1);
        if case % share() != 0 {
            return [].as_slice();
        }
        let case = case / share();
        let DeviceSet { every, in_turn } = set(lent.devices);
        match Scope::get() {
            // An emulator is too slow for every pair.
            Scope::Default if case == 0 && share() == 1 => every,
            Scope::All => every,
            Scope::Quick | Scope::Default => &in_turn[case % in_turn.len()],
        }
    })
}

/// Reduces cases that run the same kernels: keeps one in `n` of each kind, chosen by a hash, and at least as many as
/// the CPU has thread counts. Cases of a kind follow each other, so [`devices`] gives them every pair of instruction
/// set and thread count. Keeps all cases unless [`leaves_out`].
pub fn one_in<C: Debug>(n: usize, kind: impl Fn(&C) -> String, cases: impl IntoIterator<Item = C>) -> Vec<C> {
    let cases = cases.into_iter();
    if !leaves_out() {
        return cases.collect();
    }
    let mut kinds: Vec<(String, Vec<C>)> = Vec::new();
    for case in cases {
        let kind = kind(&case);
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, of_kind)) => of_kind.push(case),
            None => kinds.push((kind, vec![case])),
        }
    }
    let chosen = kinds.into_iter().flat_map(|(_, mut of_kind)| {
        of_kind.sort_by_cached_key(|case| Rng::of(format!("{case:?}")).bits());
        let count = of_kind.len().div_ceil(n).max(THREADS);
        of_kind.into_iter().take(count)
    });
    chosen.collect()
}

/// Whether tests with many similar cases run only some of them. Not in [`Scope::All`]; not with a GPU, which may have
/// kernels for single cases; and not with `KVANT_TEST_SHARE`, which already selects cases.
pub fn leaves_out() -> bool {
    let has_gpu = shared().present.iter().any(|device| device.kind() != DeviceKind::Cpu);
    Scope::get() != Scope::All && share() == 1 && !has_gpu
}

/// `n`, if one in `n` cases runs.
fn share() -> usize {
    let share = std::env::var("KVANT_TEST_SHARE");
    share
        .map_or(1, |share| share.parse().ok().filter(|&share| share > 0).expect("KVANT_TEST_SHARE is a number above 0"))
}

/// All devices, and the smaller sets that cases use in rotation.
struct DeviceSet {
    every: Vec<Device>,
    in_turn: Vec<Vec<Device>>,
}

struct Devices {
    all: DeviceSet,
    for_products: DeviceSet,
    /// Restarts the Metal kernels' choice of schedules.
    start: Box<dyn Fn() + Send + Sync>,
}

/// Sets of devices that no thread uses.
static IDLE: Mutex<Vec<&'static Devices>> = Mutex::new(Vec::new());

/// The set of a thread, until it ends: each test is a thread.
struct Lent {
    devices: &'static Devices,
    cases: Cell<usize>,
}

impl Lent {
    fn new() -> Lent {
        let idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let devices = idle.unwrap_or_else(|| Box::leak(Box::new(Devices::new())));
        // A test must not depend on earlier users of the set.
        (devices.start)();
        Lent { devices, cases: Cell::new(0) }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        IDLE.lock().unwrap_or_else(PoisonError::into_inner).push(self.devices);
    }
}

/// Maximum threads of the CPU: 1 to this number at each instruction set.
const THREADS: usize = 3;

impl Devices {
    fn new() -> Devices {
        let only = std::env::var("KVANT_TEST_DEVICE").ok();
        let wanted = |kind: DeviceKind| only.as_deref().is_none_or(|only| only == kind.name());
        let Shared { present, cpus, cpus_in_eight_bits } = shared();
        let gpus = present.iter().filter(|device| device.kind() != DeviceKind::Cpu);
        let mut gpus: Vec<Device> = gpus.filter(|device| wanted(device.kind())).cloned().collect();
        let metal = if wanted(DeviceKind::Metal) && ranks() == 1 { metal_on_this_machine() } else { None };
        let (metal, start): (Option<Device>, Box<dyn Fn() + Send + Sync>) = match metal {
            Some((device, start)) => (Some(device), Box::new(start)),
            None => (None, Box::new(|| ())),
        };
        gpus.extend(metal);
        #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
        if only.as_deref() == Some("cuda-host") {
            gpus.push(cuda_host::device());
        }
        let quick = Scope::get() == Scope::Quick;
        let levels = |cpus: &'static [Vec<Device>]| if wanted(DeviceKind::Cpu) { cpus } else { &[] };
        let in_turn = |cpus: &'static [Vec<Device>], turn: usize| {
            let levels = cpus.iter().enumerate().rev().take(if quick { 1 } else { usize::MAX });
            levels.map(move |(i, level)| &level[(turn + i) % THREADS])
        };
        let (cpus, in_eight_bits) = (levels(cpus), levels(cpus_in_eight_bits));
        // The default device comes first.
        let default = present.iter().filter(|device| device.kind() == DeviceKind::Cpu && wanted(DeviceKind::Cpu));
        let every: Vec<Device> = default.chain(cpus.iter().flatten()).chain(&gpus).cloned().collect();
        assert!(!every.is_empty(), "KVANT_TEST_DEVICE: there is no such device here");
        let sets = |extra: &'static [Vec<Device>]| DeviceSet {
            every: every.iter().chain(extra.iter().flatten()).cloned().collect(),
            in_turn: (0..THREADS)
                .map(|turn| in_turn(cpus, turn).chain(&gpus).chain(in_turn(extra, turn)).cloned().collect())
                .collect(),
        };
        Devices { all: sets(&[]), for_products: sets(in_eight_bits), start }
    }
}

/// The devices that all threads share.
struct Shared {
    present: Vec<Device>,
    /// By instruction set, the best one last, and number of threads.
    cpus: Vec<Vec<Device>>,
    /// `cpus` with 8-bit activations, at instruction sets where they make a difference.
    cpus_in_eight_bits: Vec<Vec<Device>>,
}

fn shared() -> &'static Shared {
    static SHARED: OnceLock<Shared> = OnceLock::new();
    SHARED.get_or_init(|| {
        let present = Device::list().into_iter().filter_map(|entry| entry.device.ok());
        let present = present.filter(|device| device.kind() != DeviceKind::Reference);
        let present = if ranks() == 1 { present.collect() } else { groups_of_ranks() };
        let only = std::env::var("KVANT_TEST_SIMD").ok();
        let levels = SimdLevel::ALL.into_iter().filter(|simd| simd.is_supported());
        let levels = levels.filter(|simd| only.as_deref().is_none_or(|only| only == simd.to_string()));
        let levels: Vec<SimdLevel> = levels.collect();
        let with_threads = |simd, eight_bit_activations| {
            let with = |threads| CpuOptions {
                threads: Some(threads),
                simd: Some(simd),
                eight_bit_activations,
                ..CpuOptions::default()
            };
            let cpu = |threads| Device::cpu_with(with(threads)).expect("the level is supported");
            (1..=THREADS).map(|threads| in_ranks(|| cpu(threads))).collect()
        };
        let cpus = levels.iter().map(|&simd| with_threads(simd, false)).collect();
        let rounding = levels.iter().filter(|simd| simd.has_vnni());
        Shared { present, cpus, cpus_in_eight_bits: rounding.map(|&simd| with_threads(simd, true)).collect() }
    })
}

/// `KVANT_TEST_RANKS`: the number of ranks of every device.
pub fn ranks() -> usize {
    let ranks = std::env::var("KVANT_TEST_RANKS");
    ranks.map_or(1, |ranks| ranks.parse().expect("KVANT_TEST_RANKS is a number"))
}

/// A device, or a group of [`ranks`] such devices.
fn in_ranks(device: impl Fn() -> Device) -> Device {
    if ranks() == 1 {
        return device();
    }
    let devices: Vec<Device> = (0..ranks()).map(|_| device()).collect();
    Device::group(&devices).unwrap_or_else(|error| panic!("KVANT_TEST_RANKS: {error}"))
}

/// The default CPU device and the GPUs of this machine, as groups.
fn groups_of_ranks() -> Vec<Device> {
    let gpus: Vec<Device> = (0..ranks()).map_while(|index| Device::cuda(index).ok()).collect();
    let gpus = (gpus.len() == ranks()).then(|| Device::group(&gpus).unwrap_or_else(|error| panic!("{error}")));
    let cpu = in_ranks(|| Device::cpu_with(CpuOptions::default()).expect("the default options fit"));
    gpus.into_iter().chain([cpu]).collect()
}

/// The name of a device, or of a rank of a group.
fn name_of(device: &Device) -> String {
    device.rank(0).expect("there is a rank").name()
}

/// The Metal kernels under msl-host. `KVANT_MSL_SEED` sets the seed of its schedules.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn metal_on_this_machine() -> Option<(Device, impl Fn() + Send + Sync + 'static)> {
    let seed = std::env::var("KVANT_MSL_SEED").map_or(1, |seed| seed.parse().expect("KVANT_MSL_SEED is a number"));
    let runs = match Scope::get() {
        Scope::Quick => kvant_msl::Runs::once(kvant_msl::Build::Plain, kvant_msl::Schedule::Random(seed)),
        Scope::Default => kvant_msl::Runs::first_of_a_kind(seed),
        Scope::All => kvant_msl::Runs::all(seed),
    };
    let device = kvant_msl::device(runs.clone()).unwrap_or_else(|e| panic!("{e}"));
    Some((device, move || runs.forget()))
}

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
fn metal_on_this_machine() -> Option<(Device, fn())> {
    None
}

/// Whether the device checks the contents of index buffers, and returns an error if they are out of range. Other
/// devices skip such entries.
pub fn sees_indices(device: &Device) -> bool {
    matches!(device.kind(), DeviceKind::Cpu | DeviceKind::Reference)
}

/// Records with `record`, runs the operations, and waits.
pub fn run<T>(device: &Device, record: impl FnOnce(&mut Encoder) -> Result<T>) -> Result<()> {
    let mut enc = device.encoder()?;
    record(&mut enc)?;
    enc.commit()?.wait()
}

/// Runs a check of every item, on several threads: on a GPU, most time is spent compiling kernels.
pub fn on_threads<T: Sync>(items: &[T], run: impl Fn(&T) + Sync) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    let run = &run;
    std::thread::scope(|scope| {
        for first in 0..threads {
            scope.spawn(move || items.iter().skip(first).step_by(threads).for_each(run));
        }
    });
}

/// Arguments with a change.
pub fn with<T>(mut args: T, change: impl FnOnce(&mut T)) -> T {
    change(&mut args);
    args
}

/// Queries, rotated or raw.
pub fn query(q: &Tensor, rotated: bool) -> Query<'_> {
    if rotated { Query::Rotated(q) } else { Query::Raw(q) }
}

// --------------------------------------------------------------------------------------------------------- random data

/// SplitMix64 (Steele et al. 2014): the same numbers on every machine.
pub struct Rng(u64);

/// The increment of the state for each draw.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// A generator seeded by a case's name.
    pub fn of(name: impl Display) -> Rng {
        // FNV-1a.
        let hash = name
            .to_string()
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
        Rng(hash)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// Uniform in (0, 1).
    pub fn uniform(&mut self) -> f64 {
        ((self.bits() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Standard normal (Box and Muller).
    pub fn normal(&mut self) -> f64 {
        let (r, angle) = ((-2.0 * self.uniform().ln()).sqrt(), std::f64::consts::TAU * self.uniform());
        r * angle.cos()
    }

    pub fn normals(&mut self, n: usize) -> Vec<f32> {
        /// Numbers that a thread has drawn recently, by the state before. A case draws the same numbers for each
        /// device; computing two logarithms and a cosine for each would take longer than most operations.
        type RecentDraws = VecDeque<(u64, Vec<f32>)>;
        const KEPT: usize = 1 << 22;
        thread_local! {
            static RECENT: RefCell<RecentDraws> = const { RefCell::new(VecDeque::new()) };
        }
        RECENT.with_borrow_mut(|drawn| {
            if let Some((_, values)) = drawn.iter().find(|(state, values)| *state == self.0 && values.len() == n) {
                // Skips the two draws of each number.
                self.0 = self.0.wrapping_add(STEP.wrapping_mul(2 * n as u64));
                return values.clone();
            }
            let state = self.0;
            let values: Vec<f32> = (0..n).map(|_| self.normal() as f32).collect();
            drawn.push_back((state, values.clone()));
            while drawn.len() > 16 || drawn.iter().map(|(_, values)| values.len()).sum::<usize>() > KEPT {
                drawn.pop_front();
            }
            values
        })
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

// ------------------------------------------------------------------------------------------------------------- tensors

/// The bytes of `values` in a dtype.
pub fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    fn narrow<E: Float>(values: &[f32]) -> Vec<u8> {
        let narrow: Vec<E> = values.iter().map(|&x| E::from_f32(x)).collect();
        bytemuck::cast_slice(&narrow).to_vec()
    }
    match dtype {
        DType::F32 => narrow::<f32>(values),
        DType::F16 => narrow::<f16>(values),
        DType::BF16 => narrow::<bf16>(values),
        DType::U32 | DType::U8 => panic!("{dtype} is not a float"),
    }
}

/// The values, rounded to a dtype.
pub fn rounded(dtype: DType, values: &[f32]) -> Vec<f32> {
    match dtype {
        DType::F16 => values.iter().map(|&x| f16::from_f32(x).to_f32()).collect(),
        DType::BF16 => values.iter().map(|&x| bf16::from_f32(x).to_f32()).collect(),
        _ => values.to_vec(),
    }
}

/// A tensor of any float dtype, between rows of NaN.
pub fn input(device: &Device, dtype: DType, values: &[f32], shape: &[usize]) -> Result<Tensor> {
    let row: usize = shape[1..].iter().product();
    let nan = encode(dtype, &vec![f32::NAN; row]);
    let bytes = [nan.clone(), encode(dtype, values), nan].concat();
    between_rows(device, dtype, &bytes, shape)
}

/// Indices, between rows of numbers that are out of any range.
pub fn indices(device: &Device, values: &[u32], shape: &[usize]) -> Result<Tensor> {
    let row: usize = shape[1..].iter().product();
    let far = vec![0xFFFF_FFF0u32; row];
    let all = [far.as_slice(), values, far.as_slice()].concat();
    between_rows(device, DType::U32, bytemuck::cast_slice(&all), shape)
}

/// Uploads `bytes`, which have one more row on either side than `shape`, and returns the inner part.
fn between_rows(device: &Device, dtype: DType, bytes: &[u8], shape: &[usize]) -> Result<Tensor> {
    let mut whole = shape.to_vec();
    whole[0] += 2;
    Tensor::from_bytes(device, dtype, &whole, bytes)?.rows(1..shape[0] + 1)
}

/// An output tensor between rows of a pattern.
pub struct Out {
    whole: Tensor,
    /// The tensor that an operation writes.
    pub tensor: Tensor,
}

/// A byte that is an unlikely value in all dtypes.
const PATTERN: u8 = 0xA5;

impl Out {
    pub fn new(device: &Device, dtype: DType, shape: &[usize]) -> Result<Out> {
        let mut all = shape.to_vec();
        all[0] += 2;
        let whole = Tensor::zeros(device, dtype, &all)?;
        whole.write_bytes(&vec![PATTERN; whole.bytes()])?;
        let tensor = whole.rows(1..shape[0] + 1)?;
        Ok(Out { whole, tensor })
    }

    /// The output of a rank of a group.
    pub fn on_rank(&self, rank: usize) -> Out {
        let of_rank = |tensor: &Tensor| tensor.on_rank(rank).expect("the rank exists");
        Out { whole: of_rank(&self.whole), tensor: of_rank(&self.tensor) }
    }

    /// The output's bytes. Checks that the rows around it still hold the pattern.
    pub fn bytes(&self) -> Result<Vec<u8>> {
        let all = bytes_of(&self.whole)?;
        let row = (all.len() - self.tensor.bytes()) / 2;
        let (before, rest) = all.split_at(row);
        let (inside, after) = rest.split_at(rest.len() - row);
        assert!(before.iter().all(|&b| b == PATTERN), "wrote before {:?}", self.tensor);
        assert!(after.iter().all(|&b| b == PATTERN), "wrote after {:?}", self.tensor);
        Ok(inside.to_vec())
    }

    pub fn untouched(&self) -> Result<bool> {
        Ok(bytes_of(&self.whole)?.iter().all(|&b| b == PATTERN))
    }

    /// The values, to be compared within the bound of the output's dtype.
    pub fn close(&self, name: &str) -> Result<Output> {
        self.close_within(name, Bound::of(self.tensor.dtype()))
    }

    pub fn close_within(&self, name: &str, bound: Bound) -> Result<Output> {
        self.bytes()?;
        Ok(Output::Close(name.to_string(), self.tensor.to_f32()?, bound))
    }

    /// The bits, to be compared exactly.
    pub fn same(&self, name: &str) -> Result<Output> {
        Ok(Output::Same(name.to_string(), self.bytes()?))
    }
}

pub fn bytes_of(tensor: &Tensor) -> Result<Vec<u8>> {
    let mut bytes = vec![0; tensor.bytes()];
    tensor.read_bytes(&mut bytes)?;
    Ok(bytes)
}

// ---------------------------------------------------------------------------------------------------------- comparison

/// One result of a run, and its comparison.
pub enum Output {
    /// Numbers within a bound.
    Close(String, Vec<f32>, Bound),
    /// Bytes that must be equal.
    Same(String, Vec<u8>),
}

/// The error bound of a result.
///
/// Both sides round to the dtype at the end, so equal results before that differ by at most one rounding: `unit` is the
/// dtype's unit roundoff (2⁻²⁴, 2⁻¹¹, 2⁻⁸). The device computes in f32: `arithmetic` is the relative error of this,
/// 2⁻²⁴ times the growth of an ordinary sum. `rounding` is further rounding that the device's contract allows. Its size
/// is known more precisely, so single elements may deviate by fewer multiples of it.
///
/// Two conditions must hold: the normalised squared error Σ(x−y)²/Σy² is at most `unit² + (arithmetic + rounding)²`,
/// and no single element deviates by more than `2·unit·|y| + (100·arithmetic + 8·rounding)·rms(y)`. The squared error
/// excludes the worst element: with few elements, one that lies on a tie of the last rounding and is rounded the other
/// way would dominate it.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    pub unit: f64,
    pub arithmetic: f64,
    pub rounding: f64,
}

/// Whether a device may flush subnormals: Apple's GPUs, and msl-host on request.
pub fn subnormals_are_zero() -> bool {
    let requested = |list: String| list.split(',').any(|word| word == "flush");
    cfg!(target_os = "macos") || std::env::var("KVANT_MSL_ARITHMETIC").is_ok_and(requested)
}

/// The unit roundoff of f32, in which kernels compute.
pub const EPS: f64 = 1.0 / (1u64 << 24) as f64;

/// Whether the device is the CPU at an instruction set that satisfies `is_wanted`.
fn is_cpu_with(device: &Device, is_wanted: impl Fn(&SimdLevel) -> bool) -> bool {
    let is_of = |level: SimdLevel| name_of(device).starts_with(&level.to_string());
    device.kind() == DeviceKind::Cpu && SimdLevel::ALL.into_iter().filter(is_wanted).any(is_of)
}

impl Bound {
    /// The bound of a well-conditioned operation.
    pub fn of(dtype: DType) -> Bound {
        let unit = match dtype {
            DType::F32 => EPS,
            DType::F16 => 1.0 / 2048.0,
            DType::BF16 => 1.0 / 256.0,
            DType::U32 | DType::U8 => panic!("{dtype} is compared exactly"),
        };
        Bound { unit, arithmetic: 16.0 * EPS, rounding: 0.0 }
    }

    /// The bound of an operation that amplifies the errors of its inputs.
    pub fn times(self, gain: f64) -> Bound {
        Bound { arithmetic: self.arithmetic * gain, ..self }
    }

    /// The bound of attention over keys or values of `codec`, with scores of standard deviation `spread`. The CPU with
    /// VBMI processes quantised ones, queries and weights in fixed point: rounding of weights matters most for even
    /// scores, and a score's error grows with its size. With AMX, factors of prompts are hi + lo bf16.
    pub fn over(self, device: &Device, codec: Codec, spread: f64) -> Bound {
        let fixed = is_cpu_with(device, |level| [SimdLevel::Avx512Vbmi, SimdLevel::Avx512Amx].contains(level))
            && codec.is_quantised();
        let digits = is_cpu_with(device, |level| *level == SimdLevel::Avx512Amx);
        let fixed = if fixed { 1.0 / 4096.0 + spread / 16384.0 } else { 0.0 };
        let digits = if digits { (1.0 + spread) / 131_072.0 } else { 0.0 };
        Bound { rounding: self.rounding + fixed.max(digits), ..self }
    }

    /// The bound of attention with queries of a 16-bit dtype over keys and values of `codecs`. CUDA's kernel for
    /// prompts rounds weights to the queries' dtype, and quantised keys and values, too.
    pub fn of_prompt(self, device: &Device, q: DType, codecs: [Codec; 2], spread: f64) -> Bound {
        let reads = |codec: Codec| codec.is_quantised() || codec == Codec::Dense(q);
        if device.kind() != DeviceKind::Cuda || q == DType::F32 || !codecs.into_iter().all(reads) {
            return self;
        }
        let half_unit = Bound::of(q).unit / 2.0;
        let [k, v] = codecs.map(|codec| if codec.is_quantised() { half_unit } else { 0.0 });
        Bound { rounding: self.rounding + half_unit + k * spread + v, ..self }
    }

    /// The bound of products of `quantised` or 16-bit weights with `rows` rows of activations. With quantised weights
    /// and many rows, the CPU with VNNI rounds activations to 16 bits relative to the largest in a group: 2.0e-5 of the
    /// root mean square in these tests. With AMX, products of 16-bit weights, and of others from 32 rows on, use hi +
    /// lo bf16 (3e-6). With 8-bit activations, many rows have an error of at most 1/254 of the largest in a group, or
    /// activations and weights of 2⁻⁸ each: 6e-3 and 2.4e-3 of the root mean square. CUDA rounds quantised weights to
    /// bf16 in products with more than 16 rows of bf16 (with experts: of each expert).
    pub fn of_rows(self, device: &Device, rows: usize, quantised: bool) -> Bound {
        let amx = is_cpu_with(device, |&level| level == SimdLevel::Avx512Amx);
        let vnni = is_cpu_with(device, |level| level.has_vnni());
        let eight_bits = name_of(device).ends_with("8-bit activations");
        let bf16 = self.unit == Bound::of(DType::BF16).unit;
        let rounding = match device.kind() {
            DeviceKind::Cuda if quantised && rows > 16 && bf16 => 3.0 / 2048.0,
            _ if eight_bits && vnni && quantised && rows >= 16 => 1.0 / 128.0,
            _ if eight_bits && amx && rows >= 16 => 1.0 / 256.0,
            _ if vnni && quantised && rows >= 16 => 1.0 / 32768.0,
            _ if amx && rows >= 16 => 1.0 / 131072.0,
            _ => 0.0,
        };
        Bound { rounding: self.rounding + rounding, ..self }
    }

    fn judge(&self, got: &[f32], want: &[f32]) -> std::result::Result<(), String> {
        if got.len() != want.len() {
            return Err(format!("{} elements, not {}", got.len(), want.len()));
        }
        let finite = |x: &f32| x.is_finite();
        let squares = want.iter().filter(|y| finite(y)).map(|&y| f64::from(y).powi(2));
        let (total, count) = (squares.clone().sum::<f64>(), squares.count().max(1));
        let rms = (total / count as f64).sqrt();
        let (mut error, mut worst) = (0.0, 0.0f64);
        for (i, (&x, &y)) in got.iter().zip(want).enumerate() {
            if !x.is_finite() || !y.is_finite() {
                if x == y || (x.is_nan() && y.is_nan()) {
                    continue;
                }
                return Err(format!("element {i} is {x}, not {y}"));
            }
            let distance = f64::from(x) - f64::from(y);
            let limit = 2.0 * self.unit * f64::from(y).abs() + (100.0 * self.arithmetic + 8.0 * self.rounding) * rms;
            if distance.abs() > limit {
                return Err(format!("element {i} is {x}, not {y} (further than {limit:.3e})"));
            }
            error += distance * distance;
            worst = worst.max(distance * distance);
        }
        error -= worst;
        let limit = (self.unit.powi(2) + (self.arithmetic + self.rounding).powi(2)) * total;
        if error > limit {
            return Err(format!("normalised squared error {:.3e}, more than {:.3e}", error / total, limit / total));
        }
        Ok(())
    }
}

/// The differences between `got` and the reference's `want` that exceed the bounds of `got`.
pub fn differences(got: &[Output], want: &[Output]) -> Vec<String> {
    assert_eq!(got.len(), want.len(), "runs have equally many outputs");
    let mut wrong = Vec::new();
    for pair in got.iter().zip(want) {
        match pair {
            (Output::Close(name, got, bound), Output::Close(_, want, _)) => {
                if let Err(why) = bound.judge(got, want) {
                    wrong.push(format!("{name}: {why}"));
                }
            }
            (Output::Same(name, got), Output::Same(_, want)) => {
                if let Some(at) = (0..got.len().max(want.len())).find(|&i| got.get(i) != want.get(i)) {
                    let (got, want) = (&got[at / 4 * 4..], &want[at / 4 * 4..]);
                    let (got, want) = (&got[..got.len().min(8)], &want[..want.len().min(8)]);
                    wrong.push(format!("{name}: byte {at}: {got:02x?}, not {want:02x?}"));
                }
            }
            _ => panic!("outputs have equal kinds"),
        }
    }
    wrong
}

/// Runs a case on the reference and on every device, and panics with a list of all wrong devices.
pub fn conform(case: impl Display, run: impl Fn(&Device) -> Result<Vec<Output>>) {
    conform_on(devices(), case, run);
}

/// As [`conform`], on the given devices.
pub fn conform_on(devices: &[Device], case: impl Display, run: impl Fn(&Device) -> Result<Vec<Output>>) {
    if devices.is_empty() {
        return;
    }
    let want = run(&Device::reference()).unwrap_or_else(|e| panic!("{case}: on the reference: {e}"));
    let mut wrong = Vec::new();
    for device in devices {
        match run(device) {
            Ok(got) => wrong.extend(differences(&got, &want).into_iter().map(|why| format!("{device}: {why}"))),
            Err(e) => wrong.push(format!("{device}: {e}")),
        }
    }
    assert!(wrong.is_empty(), "{case}:\n  {}", wrong.join("\n  "));
}

/// Panics unless `got` is within the bound of `want`.
pub fn assert_close(what: impl Display, got: &[f32], want: &[f32], bound: Bound) {
    if let Err(why) = bound.judge(got, want) {
        panic!("{what}: {why}");
    }
}

/// Σ(x−y)²/Σy².
pub fn nmse(got: &[f32], want: &[f32]) -> f64 {
    let sum =
        |f: &dyn Fn(f64, f64) -> f64| got.iter().zip(want).map(|(&x, &y)| f(f64::from(x), f64::from(y))).sum::<f64>();
    sum(&|x, y| (x - y) * (x - y)) / sum(&|_, y| y * y)
}
