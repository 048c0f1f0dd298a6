//! Correct kernels and their results, under every schedule, in both builds.

use crate::support::*;
use half::{bf16, f16};
use msl_host::{Access, Buffer, Build, Constant, Error, Grid, Launch, Schedule};

const BUILDS: [Build; 2] = [Build::Plain, Build::Checker];

#[test]
fn a_reduction_through_threadgroup_memory() {
    let text = "kernel void sum(device const float *x [[buffer(0)]], device float *o [[buffer(1)]], constant uint &n [[buffer(2)]], threadgroup float *parts [[threadgroup(0)]],
    uint g [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]], uint size [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]], uint sgs [[simdgroups_per_threadgroup]]) {
  float v = 0;
  for (uint i = t; i < n; i += size) v += x[g * n + i];
  v = simd_sum(v);
  if (lane == 0) parts[sg] = v;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (sg == 0) {
    v = simd_sum(lane < sgs ? parts[lane] : 0.0f);
    if (lane == 0) o[g] = v;
  }
}";
    let n = 1000usize;
    let x: Vec<f32> = (0..3 * n).map(|i| (i % 17) as f32 - 5.0).collect();
    let wanted: Vec<f32> = x.chunks(n).map(|c| c.iter().sum()).collect(); // small integers: exact in any order
    let bytes = floats(&x);
    for build in BUILDS {
        let library = compile(text, build);
        for schedule in SCHEDULES {
            for threads in [32, 256, 1024] {
                let mut o = vec![0; 12];
                let count = (n as u32).to_le_bytes();
                let launch = Launch::new("sum", groups(3, threads))
                    .buffer(0, Buffer::read(&bytes))
                    .buffer(1, Buffer::write(&mut o))
                    .bytes(2, &count);
                run(&library, &launch.threadgroup_memory(0, 128), schedule);
                assert_eq!(to_floats(&o), wanted, "{build:?} {schedule:?} {threads}");
            }
        }
    }
}

/// C (8x8 at an unaligned place of a wider matrix) = A * B + C, for all transposes.
#[test]
fn simdgroup_matrices_multiply() {
    let text = "template <typename T> kernel void mm(device const T *a [[buffer(0)]], device const T *b [[buffer(1)]], device float *c [[buffer(2)]],
    constant uint &flags [[buffer(3)]], threadgroup T *s [[threadgroup(0)]], uint t [[thread_index_in_threadgroup]]) {
  simdgroup_matrix<T, 8, 8> A, B; simdgroup_float8x8 C;
  for (uint i = t; i < 16 * 11; i += 32) s[i] = b[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_load(C, c, 13, ulong2(2, 1), (flags & 4) != 0);
  for (ulong k = 0; k < 2; k++) {
    if (flags & 1) simdgroup_load(A, a + 8 * k * 9, 9, ulong2(0, 0), true);
    else simdgroup_load(A, a, 17, ulong2(8 * k, 0));
    simdgroup_load(B, s, 11, ulong2(1, 8 * k));
    simdgroup_multiply_accumulate(C, A, B, C);
  }
  if (flags & 2) { simdgroup_float8x8 D = make_filled_simdgroup_matrix<float, 8, 8>(2.0f), E = simdgroup_float8x8(3.0f); simdgroup_multiply_accumulate(C, D, E, C); simdgroup_multiply(D, C, E); C = D; }
  simdgroup_store(C, c, 13, ulong2(2, 1), (flags & 4) != 0);
}
template [[host_name(\"mm_float\")]] kernel void mm<float>(device const float *a [[buffer(0)]], device const float *b [[buffer(1)]], device float *c [[buffer(2)]], constant uint &flags [[buffer(3)]], threadgroup float *s [[threadgroup(0)]], uint t [[thread_index_in_threadgroup]]);
template [[host_name(\"mm_half\")]] [[kernel]] decltype(mm<half>) mm<half>;
template [[host_name(\"mm_bfloat\")]] [[kernel]] decltype(mm<bfloat>) mm<bfloat>;";
    let value = |i: usize| ((i * 37 % 101) as f64 - 50.0) / 16.0; // exact in all three types
    let encode = |kernel: &str, n: usize| -> Vec<u8> {
        (0..n)
            .flat_map(|i| match kernel {
                "mm_float" => (value(i) as f32).to_le_bytes().to_vec(),
                "mm_half" => f16::from_f64(value(i)).to_le_bytes().to_vec(),
                _ => bf16::from_f64(value(i)).to_le_bytes().to_vec(),
            })
            .collect()
    };
    for build in BUILDS {
        let library = compile(text, build);
        for (kernel, size) in [("mm_float", 4), ("mm_half", 2), ("mm_bfloat", 2)] {
            for flags in 0..8u32 {
                let (a, b) = (encode(kernel, 200), encode(kernel, 200));
                let start: Vec<f32> = (0..200).map(|i| value(i + 7) as f32).collect();
                let (mut c, flag_bytes) = (floats(&start), flags.to_le_bytes());
                let launch = Launch::new(kernel, groups(1, 32))
                    .buffer(0, Buffer::read(&a))
                    .buffer(1, Buffer::read(&b))
                    .buffer(2, Buffer::read_write(&mut c));
                run(
                    &library,
                    &launch.bytes(3, &flag_bytes).threadgroup_memory(0, 176 * size),
                    Schedule::Random(u64::from(flags)),
                );
                let got = to_floats(&c);
                let place =
                    |r: usize, col: usize| if flags & 4 != 0 { (col + 2) * 13 + r + 1 } else { (r + 1) * 13 + col + 2 };
                for r in 0..8 {
                    for col in 0..8 {
                        let mut sum = f64::from(start[place(r, col)]);
                        for k in 0..16 {
                            let x = if flags & 1 != 0 { value(k * 9 + r) } else { value(r * 17 + k) };
                            sum += x * value(k * 11 + col + 1);
                        }
                        if flags & 2 != 0 {
                            sum = (sum + 6.0) * 3.0;
                        }
                        let error = (f64::from(got[place(r, col)]) - sum).abs();
                        assert!(
                            error <= 1e-4 * sum.abs().max(1.0),
                            "{kernel} {flags} ({r},{col}): {} {sum}",
                            got[place(r, col)]
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn function_constants_specialise_without_compiling_again() {
    let text = "constant uint width [[function_constant(0)]];
constant bool has_bias [[function_constant(7)]];
constant half factor [[function_constant(2)]];
constant float scale = is_function_constant_defined(factor) ? float(factor) : 1.0f;
constant uint twice = 2 * width;
kernel void k(device float *o [[buffer(0)]], device const float *bias [[buffer(1), function_constant(has_bias)]], uint t [[thread_position_in_grid]]) {
  float v = float(t % width + twice) * scale;
  if (has_bias) v += bias[t];
  o[t] = v;
}";
    for build in BUILDS {
        let library = compile(text, build);
        let bias = floats(&[100.0; 8]);
        // Two threads at once, each with its own constants.
        std::thread::scope(|scope| {
            for width in [3u32, 5] {
                let (library, bias) = (&library, &bias);
                scope.spawn(move || {
                    for round in 0..50 {
                        let (with_bias, with_factor) = (round % 2 == 0, round % 3 == 0);
                        let mut o = vec![0; 32];
                        let mut launch = Launch::new("k", groups(2, 4))
                            .buffer(0, Buffer::write(&mut o))
                            .constant(0, Constant::UInt(width))
                            .constant(7, Constant::Bool(with_bias));
                        if with_bias {
                            launch = launch.buffer(1, Buffer::read(bias));
                        }
                        if with_factor {
                            launch = launch.constant(2, Constant::Half(f16::from_f32(0.5).to_bits()));
                        }
                        run(library, &launch, Schedule::Forward);
                        let wanted: Vec<f32> = (0..8)
                            .map(|t| {
                                (t % width + 2 * width) as f32 * if with_factor { 0.5 } else { 1.0 }
                                    + if with_bias { 100.0 } else { 0.0 }
                            })
                            .collect();
                        assert_eq!(to_floats(&o), wanted);
                    }
                });
            }
        });
        let mut o = vec![0; 32];
        let launch = Launch::new("k", groups(1, 1)).buffer(0, Buffer::write(&mut o)).constant(0, Constant::Int(3));
        assert!(
            matches!(library.run(&launch, Schedule::Forward), Err(Error::Launch { reason, .. }) if reason.contains("is a uint, got a int"))
        );
        let launch = Launch::new("k", groups(1, 1))
            .buffer(0, Buffer::write(&mut o))
            .constant(0, Constant::UInt(3))
            .constant(7, Constant::Bool(true));
        assert!(
            matches!(library.run(&launch, Schedule::Forward), Err(Error::Launch { reason, .. }) if reason.contains("`bias`"))
        );
    }
}

/// All 65536 halves and bfloats to float; and back from floats at, just below and just above every rounding boundary.
#[test]
fn half_and_bfloat_convert_as_ieee_says() {
    let text = "kernel void widen(device const half *h [[buffer(0)]], device const bfloat *b [[buffer(1)]], device float *fh [[buffer(2)]], device float *fb [[buffer(3)]], uint t [[thread_position_in_grid]]) {
  fh[t] = float(h[t]); fb[t] = float(b[t]);
}
kernel void narrow(device const float *x [[buffer(0)]], device half *h [[buffer(1)]], device bfloat *b [[buffer(2)]], uint t [[thread_position_in_grid]]) {
  h[t] = half(x[t]); b[t] = bfloat(x[t]);
}";
    let library = compile(text, Build::Plain);
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let (bits, mut fh, mut fb) = (shorts(&all), vec![0; 4 << 16], vec![0; 4 << 16]);
    let launch = Launch::new("widen", groups(64, 1024))
        .buffer(0, Buffer::read(&bits))
        .buffer(1, Buffer::read(&bits))
        .buffer(2, Buffer::write(&mut fh))
        .buffer(3, Buffer::write(&mut fb));
    run(&library, &launch, Schedule::Forward);
    let (fh, fb) = (to_floats(&fh), to_floats(&fb));
    for (&u, (&h, &b)) in all.iter().zip(fh.iter().zip(&fb)) {
        let same = |got: f32, wanted: f32| got.to_bits() == wanted.to_bits() || (got.is_nan() && wanted.is_nan());
        assert!(same(h, f16::from_bits(u).to_f32()), "half {u:#06x}: {h}");
        assert!(same(b, bf16::from_bits(u).to_f32()), "bfloat {u:#06x}: {b}");
    }
    for wide in [&fh, &fb] {
        // Each value, the middle to the next one, and the floats next to both.
        let floats_near: Vec<f32> =
            wide.windows(2).flat_map(|w| [w[0], ((f64::from(w[0]) + f64::from(w[1])) / 2.0) as f32]).collect();
        for by in [0i32, 1, -1] {
            let x: Vec<f32> = floats_near
                .iter()
                .map(|f| f32::from_bits(f.to_bits().wrapping_add_signed(by)))
                .chain([0.0])
                .take(1 << 17)
                .collect();
            let count = x.len();
            let (bytes, mut h, mut b) = (floats(&x), vec![0; count * 2], vec![0; count * 2]);
            let launch = Launch::new("narrow", Grid::Threads { total: [count as u32, 1, 1], threads: [1024, 1, 1] });
            run(
                &library,
                &launch
                    .buffer(0, Buffer::read(&bytes))
                    .buffer(1, Buffer::write(&mut h))
                    .buffer(2, Buffer::write(&mut b)),
                Schedule::Forward,
            );
            for ((&x, h), b) in x.iter().zip(to_shorts(&h)).zip(to_shorts(&b)) {
                let (h, b) = (f16::from_bits(h), bf16::from_bits(b));
                assert!(h.to_bits() == f16::from_f32(x).to_bits() || (h.is_nan() && x.is_nan()), "half of {x:e}: {h}");
                assert!(
                    b.to_bits() == bf16::from_f32(x).to_bits() || (b.is_nan() && x.is_nan()),
                    "bfloat of {x:e}: {b}"
                );
            }
        }
    }
}

/// a * b + a in half and bfloat: two roundings.
#[test]
fn every_operation_of_a_narrow_type_rounds() {
    let text = "kernel void k(device const half *a [[buffer(0)]], device half *o [[buffer(1)]], device const bfloat *c [[buffer(2)]], device bfloat *p [[buffer(3)]], uint t [[thread_position_in_grid]]) {
  o[t] = a[t] * a[t + 1] + a[t]; p[t] = c[t] * c[t + 1] + c[t];
}";
    let n = 512;
    let x: Vec<f32> = (0..=n).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
    let (h, b): (Vec<f16>, Vec<bf16>) = x.iter().map(|&v| (f16::from_f32(v), bf16::from_f32(v))).unzip();
    let (hb, bb) = (
        shorts(&h.iter().map(|v| v.to_bits()).collect::<Vec<_>>()),
        shorts(&b.iter().map(|v| v.to_bits()).collect::<Vec<_>>()),
    );
    for build in BUILDS {
        let (mut o, mut p) = (vec![0; n * 2], vec![0; n * 2]);
        let launch = Launch::new("k", groups(2, 256))
            .buffer(0, Buffer::read(&hb))
            .buffer(1, Buffer::write(&mut o))
            .buffer(2, Buffer::read(&bb))
            .buffer(3, Buffer::write(&mut p));
        run(&compile(text, build), &launch, Schedule::Forward);
        for i in 0..n {
            let wanted = f16::from_f32(f16::from_f32(h[i].to_f32() * h[i + 1].to_f32()).to_f32() + h[i].to_f32());
            assert_eq!(to_shorts(&o)[i], wanted.to_bits());
            let wanted = bf16::from_f32(bf16::from_f32(b[i].to_f32() * b[i + 1].to_f32()).to_f32() + b[i].to_f32());
            assert_eq!(to_shorts(&p)[i], wanted.to_bits());
        }
    }
}

#[test]
fn atomics_count_in_device_and_threadgroup_memory() {
    let text = "kernel void k(device atomic_uint *total [[buffer(0)]], device atomic_int *extremes [[buffer(1)]], device atomic_float *f [[buffer(2)]], device uint *o [[buffer(3)]],
    uint t [[thread_index_in_threadgroup]], uint g [[threadgroup_position_in_grid]], uint i [[thread_position_in_grid]]) {
  threadgroup atomic_uint mine;
  if (t == 0) atomic_store_explicit(&mine, 0, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&mine, t, memory_order_relaxed);
  atomic_fetch_or_explicit(total + 1, 1u << (i % 32), memory_order_relaxed);
  atomic_fetch_max_explicit(extremes, int(i), memory_order_relaxed);
  atomic_fetch_min_explicit(extremes + 1, -int(i), memory_order_relaxed);
  atomic_fetch_add_explicit(f, 0.5f, memory_order_relaxed);
  uint expected = atomic_load_explicit(total, memory_order_relaxed);
  while (!atomic_compare_exchange_weak_explicit(total, &expected, expected + 2, memory_order_relaxed, memory_order_relaxed)) {}
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t == 0) o[g] = atomic_exchange_explicit(&mine, 0, memory_order_relaxed);
}";
    for build in BUILDS {
        let library = compile(text, build);
        for schedule in SCHEDULES {
            let (mut total, mut extremes, mut f, mut o) = (vec![0; 8], vec![0; 8], vec![0; 4], vec![0; 16]);
            let launch = Launch::new("k", groups(4, 96))
                .buffer(0, Buffer::read_write(&mut total))
                .buffer(1, Buffer::read_write(&mut extremes));
            run(&library, &launch.buffer(2, Buffer::read_write(&mut f)).buffer(3, Buffer::write(&mut o)), schedule);
            assert_eq!(to_words(&total), [768, u32::MAX]);
            assert_eq!(to_words(&extremes), [383, -383i32 as u32]);
            assert_eq!(to_floats(&f), [192.0]);
            assert_eq!(to_words(&o), [96 * 95 / 2; 4]);
        }
    }
}

#[test]
fn simdgroup_and_quad_functions() {
    let text = "kernel void k(device uint *o [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  uint x = t * 3 + 1, at = t * 20;
  o[at] = simd_sum(x); o[at + 1] = simd_max(x); o[at + 2] = simd_min(x); o[at + 3] = simd_shuffle_xor(x, 5); o[at + 4] = simd_shuffle_down(x, 4);
  o[at + 5] = simd_shuffle_up(x, 4); o[at + 6] = simd_broadcast(x, 7); o[at + 7] = simd_prefix_exclusive_sum(x); o[at + 8] = simd_prefix_inclusive_sum(x);
  o[at + 9] = uint(ulong(simd_vote::vote_t(simd_ballot(x % 2 == 0)))); o[at + 10] = simd_any(t == 40); o[at + 11] = simd_all(t < 50); o[at + 12] = simd_xor(x);
  o[at + 13] = simd_shuffle_rotate_down(x, 30); o[at + 14] = simd_shuffle(x, ushort((t * 7) % 32)); o[at + 15] = quad_sum(x); o[at + 16] = quad_shuffle_xor(x, 2);
  o[at + 17] = quad_broadcast(x, 3); o[at + 18] = simd_is_first(); o[at + 19] = uint(simd_sum(float4(float(x), 1.0f, 2.0f, 0.0f)).y) + uint(simd_prefix_inclusive_product(t % 32 == 3 ? 2u : 1u));
}";
    for build in BUILDS {
        for schedule in SCHEDULES {
            let mut o = vec![0; 64 * 80];
            run(&compile(text, build), &Launch::new("k", groups(1, 64)).buffer(0, Buffer::write(&mut o)), schedule);
            for (t, got) in to_words(&o).chunks(20).enumerate() {
                let t = t as u32;
                let (lane, base) = (t % 32, t - t % 32);
                let x = |lane: u32| (base + lane) * 3 + 1;
                let sum = |n: u32| (0..n).map(x).sum::<u32>();
                let quad = lane & !3;
                let wanted = [
                    sum(32),
                    x(31),
                    x(0),
                    x(lane ^ 5),
                    if lane + 4 < 32 { x(lane + 4) } else { x(lane) },
                    if lane >= 4 { x(lane - 4) } else { x(lane) },
                    x(7),
                    sum(lane),
                    sum(lane + 1),
                    0xAAAA_AAAA,
                    u32::from(base == 32),
                    u32::from(base == 0),
                    (0..32).map(x).fold(0, |a, b| a ^ b),
                    x((lane + 30) % 32),
                    x((t * 7) % 32),
                    (quad..quad + 4).map(x).sum(),
                    x(lane ^ 2),
                    x(quad + 3),
                    u32::from(lane == 0),
                    32 + if lane >= 3 { 2 } else { 1 },
                ];
                assert_eq!(got, wanted, "{build:?} {schedule:?} thread {t}");
            }
        }
    }
}

#[test]
fn a_grid_of_threads_is_cut_at_its_edge() {
    let text = "kernel void k(device uint *o [[buffer(0)]], uint2 p [[thread_position_in_grid]], uint2 size [[threads_per_grid]], uint2 local [[threads_per_threadgroup]], ushort2 whole [[dispatch_threads_per_threadgroup]], uint2 groups [[threadgroups_per_grid]]) {
  o[p.y * size.x + p.x] = local.x + 10 * local.y + 100 * whole.x + 1000 * whole.y + 10000 * groups.x + 100000 * groups.y;
}";
    for build in BUILDS {
        let mut o = vec![0; 7 * 5 * 4];
        let launch =
            Launch::new("k", Grid::Threads { total: [7, 5, 1], threads: [4, 2, 1] }).buffer(0, Buffer::write(&mut o));
        run(&compile(text, build), &launch, Schedule::Random(9));
        for (i, got) in to_words(&o).into_iter().enumerate() {
            let (x, y) = (i % 7, i / 7);
            assert_eq!(got as usize, 322400 + if x < 4 { 4 } else { 3 } + 10 * if y < 4 { 2 } else { 1 });
        }
    }
}

#[test]
fn memory_is_used_in_place_and_overlapping_bindings_share() {
    let text = "kernel void k(device const uint *x [[buffer(0)]], device uint *o [[buffer(1)]], uint t [[thread_position_in_grid]]) { o[t] = x[t] + 1; }";
    for build in BUILDS {
        let library = compile(text, build);
        let mut memory = host().memory(512).unwrap_or_else(|e| panic!("{e}"));
        assert!(memory.iter().all(|&b| b == 0xFF), "fresh memory is poisoned");
        memory[..256].copy_from_slice(&words(&(0..64).collect::<Vec<_>>()));
        let mut plain = memory.to_vec();
        for pointer in [memory.as_mut_ptr(), plain.as_mut_ptr()] {
            // SAFETY: both allocations have 512 bytes and outlive the run; nobody else uses them meanwhile.
            let (x, o) = unsafe {
                (
                    Buffer::raw(pointer, 512, msl_host::Access::Read).extent(256),
                    Buffer::raw(pointer, 512, msl_host::Access::Write).offset(256),
                )
            };
            run(&library, &Launch::new("k", groups(2, 32)).buffer(0, x).buffer(1, o), Schedule::Reverse);
        }
        assert_eq!(to_words(&memory[256..]), (1..=64).collect::<Vec<_>>());
        assert_eq!(plain, memory.to_vec());
    }
}

/// A buffer far larger than the machine's memory; a kernel touches only its end.
#[test]
fn zeroed_memory_costs_what_is_touched() {
    let text = "kernel void last(device uint *x [[buffer(0)]], constant ulong &n [[buffer(1)]]) { x[n - 1] += 7; }";
    for build in BUILDS {
        let library = compile(text, build);
        // An emulator has an entry for every page.
        let shift = if emulator().is_empty() { 38 } else { 32 };
        let memory = host().zeroed_memory(1 << shift).unwrap();
        let n = (1u64 << (shift - 2)).to_le_bytes();
        // SAFETY: the memory outlives the run, and nobody else uses it.
        let all = unsafe { Buffer::raw(memory.as_mut_ptr(), memory.len(), Access::ReadWrite) };
        run(&library, &Launch::new("last", groups(1, 1)).buffer(0, all).bytes(1, &n), Schedule::Forward);
        assert_eq!(memory[memory.len() - 4..], 7u32.to_le_bytes(), "{build:?}");
    }
}
