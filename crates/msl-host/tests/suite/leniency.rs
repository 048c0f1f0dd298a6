//! Features allowed on request, for foreign code that Apple's compiler accepts and Apple's GPUs run.

use crate::support::*;
use msl_host::{Buffer, Build, Constant, Error, Kind, Launch, Schedule, Strictness, SumOrder};

const KERNELS: &str = "
struct Pair {
  float a, b;
  constexpr Pair(float x) thread : a(x), b(-x) {}
  constexpr Pair(float x) constant : a(x), b(-x) {}
  float sum() const thread { return a + b; }
  float sum() const device { return a + b; }
};
template <typename T> struct space_of {};
template <typename T> struct space_of<device T *> { static constexpr constant int value = 1; };
template <typename T> struct space_of<threadgroup T *> { static constexpr constant int value = 1; };
METAL_FUNC float first(device const float *p) { return p[0]; }
METAL_FUNC float first(threadgroup const float *p) { return p[0]; }
constant const bool doubled [[function_constant(100 + 20 + 3)]];
[[kernel, max_total_threads_per_threadgroup(32)]] void k(device float *o, constant float &s, threadgroup float *t,
    constant int &absent [[buffer(7), function_constant(doubled)]], uint i [[thread_position_in_grid]]) {
  t[i] = s;
  float4x4 m(2.0);
  half2x4 h = half2x4(half4(1.0h), half4(2.0h));
  bool4 big = m[1] > 1.0;
  float v = any(big) && !all(big) ? m[1][1] + h[1][3] + fmax(0, float4(-1.0))[2] + 0.5 : NAN;
  v += simd_shuffle_and_fill_up(float(i), -1.0f, ushort(1)) + Pair(3).sum() + first(t + i) + first(&o[i]);
  if (doubled) v += absent;
  o[i] = v;
}
kernel void other(device float *o) { o[0] = 1.0; }
";

#[test]
fn trusted_sources_need_only_run() {
    // Parameters without an attribute, and member functions with address spaces, are rejected in one's own kernels.
    for strictness in [Strictness::Strict, Strictness::Typed] {
        let refused = host().compile(&source(KERNELS).strictness(strictness), Build::Plain);
        assert!(matches!(refused, Err(Error::Compile { .. })), "{strictness:?}");
    }
    let trusted = source(KERNELS).strictness(Strictness::Trusted).only(["k"]);
    for build in [Build::Plain, Build::Checker] {
        let library = host().compile(&trusted, build).unwrap_or_else(|e| panic!("{e}"));
        let names: Vec<&str> = library.kernels().iter().map(|k| k.name.as_str()).collect();
        assert_eq!(names, ["k"]);
        let (mut o, s) = (floats(&[1.0; 32]), floats(&[10.0]));
        let launch = Launch::new("k", groups(1, 32))
            .buffer(0, Buffer::read_write(&mut o))
            .bytes(1, &s)
            .threadgroup_memory(0, 128)
            .constant(123, Constant::Bool(false));
        run(&library, &launch, Schedule::Reverse);
        // 2 + 2 + 0 + 0.5, the lane below (or -1), 0, 10 and 1.
        let expected: Vec<f32> = (0..32).map(|i| 15.5 + i as f32 - 1.0).collect();
        assert_eq!(to_floats(&o), expected, "{build:?}");
    }
}

#[test]
fn the_language_has_a_version() {
    let text = "kernel void k(device bfloat *o [[buffer(0)]]) { o[0] = bfloat(__METAL_VERSION__); }";
    assert!(host().compile(&source(text), Build::Plain).is_ok());
    let Err(Error::Compile { diagnostics, .. }) = host().compile(&source(text).language(3, 0), Build::Plain) else {
        panic!("Metal 3.0 has no bfloat");
    };
    assert!(diagnostics[0].message.contains("bfloat_needs_metal_3_1"), "{diagnostics:?}");
}

#[test]
fn tensors_are_refused_with_the_reason() {
    let Err(Error::Compile { diagnostics, .. }) =
        host().compile(&msl_host::Source::new("t.metal", "#include <metal_tensor>\n"), Build::Plain)
    else {
        panic!("accepted");
    };
    assert!(diagnostics[0].message.contains("tensors are not simulated"), "{diagnostics:?}");
}

#[test]
fn an_execution_barrier_can_end_reads_and_never_ends_writes() {
    let text = "kernel void k(device float *o [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float s[64]; s[t] = t; threadgroup_barrier(mem_flags::mem_threadgroup);
  float v = s[63 - t];
  threadgroup_barrier(mem_flags::mem_none);
  s[t] = v;
  READ
  o[t] = v;
}";
    for (read, expected) in [("", vec![]), ("v = s[63 - t];", vec![6])] {
        let library = compile(&text.replace("READ", read), Build::Checker);
        let mut o = vec![0; 256];
        let launch = Launch::new("k", groups(1, 64)).buffer(0, Buffer::write(&mut o));
        assert!(lines(&findings(&library, &launch, Schedule::Forward), Kind::Race).contains(&5));
        let launch = launch.reads_end_at_barriers();
        let found = library.run(&launch, Schedule::Random(1));
        let list = found.as_ref().err().and_then(|e| e.findings()).map_or(vec![], |f| lines(&f.list, Kind::Race));
        // In a random order, a read may be before or after its partner's write.
        assert!(list.iter().all(|line| [5, 6].contains(line)) && list.is_empty() == expected.is_empty(), "{list:?}");
    }
}

#[test]
fn lanes_in_lockstep_need_no_barrier() {
    // Halving within a SIMD-group, a branch, a loop of different lengths; then one SIMD-group reads the other's writes.
    let text = "kernel void k(device uint *o [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup uint s[64];
  uint lane = t % 32, base = t - lane;
  s[t] = t;
  for (uint n = 16; n > 0; n /= 2) if (lane < n) s[t] += s[t + n];
  uint total = s[base];
  if (lane == 0) s[base] = 7;
  for (uint i = 0; i < lane; i++) s[t] = i;
  o[t] = total + s[base];
  OTHER
}";
    for (other, races) in [("", false), ("o[t] = s[63 - t];", true)] {
        let library = compile(&text.replace("OTHER", other), Build::Checker);
        for schedule in SCHEDULES {
            let mut o = vec![0; 256];
            let launch = Launch::new("k", groups(1, 64)).buffer(0, Buffer::read_write(&mut o));
            assert!(!lines(&findings(&library, &launch, schedule), Kind::Race).is_empty(), "{schedule:?}");
            let outcome = library.run(&launch.lockstep(), schedule);
            assert_eq!(outcome.is_err(), races, "{schedule:?}: {outcome:?}");
            if !races {
                let (low, high) = ((0..32).sum::<u32>() + 7, (32..64).sum::<u32>() + 7);
                assert_eq!(to_words(&o), [[low; 32], [high; 32]].concat(), "{schedule:?}");
            }
        }
    }
    let library = compile(&text.replace("OTHER", ""), Build::Plain);
    let mut o = vec![0; 256];
    let launch = Launch::new("k", groups(1, 64)).buffer(0, Buffer::write(&mut o)).lockstep();
    assert!(matches!(library.run(&launch, Schedule::Forward), Err(Error::Launch { .. })));
}

#[test]
fn one_value_may_be_written_twice_on_request() {
    let text = "kernel void k(device uint *o [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  o[0] = VALUE;
}";
    for (value, races) in [("5", false), ("t / 2", true)] {
        let library = compile(&text.replace("VALUE", value), Build::Checker);
        for schedule in SCHEDULES {
            let mut o = vec![0; 4];
            let launch = Launch::new("k", groups(1, 64)).buffer(0, Buffer::write(&mut o));
            assert_eq!(lines(&findings(&library, &launch, schedule), Kind::Race), [2]);
            assert_eq!(library.run(&launch.same_values(), schedule).is_err(), races, "{value}");
        }
    }
}

#[test]
fn alignment_can_be_ignored() {
    let text = "kernel void k(device float4 *o [[buffer(0)]], device const char *x [[buffer(1)]]) {
  o[0] = *(device const float4 *)(x + 4);
}";
    let x = floats(&[1.0, 2.0, 3.0, 4.0, 5.0]);
    for build in [Build::Plain, Build::Checker] {
        let library = host().compile(&source(text).unaligned(), build).unwrap_or_else(|e| panic!("{e}"));
        let mut o = vec![0; 16];
        let launch = || Launch::new("k", groups(1, 1)).buffer(1, Buffer::read(&x));
        run(&library, &launch().buffer(0, Buffer::write(&mut o)), Schedule::Forward);
        assert_eq!(to_floats(&o), [2.0, 3.0, 4.0, 5.0]);
        let strict = compile(text, build);
        let launch = launch().buffer(0, Buffer::write(&mut o));
        if build == Build::Plain && cfg!(target_arch = "aarch64") {
            // The processor supports it.
            run(&strict, &launch, Schedule::Forward);
            continue;
        }
        let list = findings(&strict, &launch, Schedule::Forward);
        assert_eq!(lines(&list, Kind::Misaligned), [2], "{build:?}: {list:?}");
    }
}

#[test]
fn arithmetic_can_be_that_of_a_gpu() {
    let text = "kernel void k(device float *o [[buffer(0)]], device const float *x [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
  if (t == 0) { o[0] = x[0] - x[3]; o[1] = x[1] * x[1] - x[2]; }
  float sum = simd_sum(t == 0 ? 1e8f : t == 16 ? -1e8f : 1.0f);
  if (t == 0) o[2] = sum;
}";
    let x = floats(&[1.8e-38, 1.0 + 2f32.powi(-12), 1.0 + 2f32.powi(-11), 1.2e-38]);
    for build in [Build::Plain, Build::Checker] {
        let result = |contract: bool, set: fn(Launch<'_>) -> Launch<'_>| {
            let source = if contract { source(text).contract() } else { source(text) };
            let library = host().compile(&source, build).unwrap_or_else(|e| panic!("{e}"));
            let mut o = vec![0; 12];
            let launch = Launch::new("k", groups(1, 32)).buffer(0, Buffer::write(&mut o)).buffer(1, Buffer::read(&x));
            run(&library, &set(launch), Schedule::Forward);
            to_floats(&o)
        };
        assert_eq!(result(false, |l| l), [1.8e-38 - 1.2e-38, 0.0, 30.0]);
        assert_eq!(result(false, |l| l.flush_subnormals()), [0.0, 0.0, 30.0]);
        if build == Build::Plain {
            assert_eq!(result(true, |l| l), [1.8e-38 - 1.2e-38, 2f32.powi(-24), 30.0]);
        }
        // 1e8 + 1 is 1e8 in float: ones added before the large numbers cancel are lost.
        assert_eq!(result(false, |l| l.sum_order(SumOrder::Lanes))[2], 15.0);
        assert_eq!(result(false, |l| l.sum_order(SumOrder::Neighbours))[2], 16.0);
    }
}
