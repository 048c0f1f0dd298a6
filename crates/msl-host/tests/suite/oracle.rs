//! Tests of the oracle: errors of kernels must be found, with their kind, line and thread.

use std::time::Duration;

use crate::support::*;
use msl_host::{Buffer, Build, Error, Grid, Kind, Launch, Schedule};

#[test]
fn a_missing_barrier_is_a_race_under_every_schedule() {
    let text = "kernel void k(device float *o [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float s[64];
  s[t] = t;
  o[t] = s[63 - t];
}";
    let library = compile(text, Build::Checker);
    for schedule in SCHEDULES {
        let mut o = vec![0; 256];
        let launch = Launch::new("k", groups(1, 64)).buffer(0, Buffer::write(&mut o));
        let list = findings(&library, &launch, schedule);
        let race = list
            .iter()
            .find(|f| f.kind == Kind::Race)
            .unwrap_or_else(|| panic!("no race under {schedule:?}: {list:?}"));
        let (here, there) = (race.location.as_ref().expect("a place"), race.other.as_ref().expect("the other place"));
        let mut both = [here.line, there.line];
        both.sort_unstable();
        assert_eq!(both, [3, 4], "{race}");
        assert_eq!(here.file, "test.metal");
        assert!(race.message.contains("threadgroup variable s"), "{race}");
    }
}

#[test]
fn a_missing_barrier_shows_in_the_plain_build_too() {
    let text = "kernel void k(device float *o [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float s[64];
  s[t] = t;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  o[t] = s[63 - t];
}";
    let library = compile(text, Build::Plain);
    let mut results = Vec::new();
    for schedule in SCHEDULES {
        let mut o = vec![0; 256];
        run(&library, &Launch::new("k", groups(1, 64)).buffer(0, Buffer::write(&mut o)), schedule);
        results.push(to_floats(&o));
    }
    assert!(results.iter().any(|r| r.iter().any(|x| x.is_nan())), "poison shows what was not yet written");
}

#[test]
fn a_simdgroup_barrier_does_not_order_two_simdgroups() {
    let text = "kernel void k(device float *o [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float s[64];
  s[t] = t;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  o[t] = s[t ^ 1] + s[(t + 32) % 64];
}";
    let library = compile(text, Build::Checker);
    let mut o = vec![0; 256];
    let launch = Launch::new("k", groups(1, 64)).buffer(0, Buffer::write(&mut o));
    let list = findings(&library, &launch, Schedule::Forward);
    assert!(lines(&list, Kind::Race).contains(&5), "{list:?}");
    let mut o = vec![0; 128];
    let one = text.replace("s[(t + 32) % 64]", "0.0f");
    run(
        &compile(&one, Build::Checker),
        &Launch::new("k", groups(1, 32)).buffer(0, Buffer::write(&mut o)),
        Schedule::Forward,
    );
}

#[test]
fn a_barrier_orders_only_the_memory_of_its_flag() {
    let text = "kernel void k(device float *o [[buffer(0)]], device float *tmp [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
  tmp[t] = t;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  o[t] = tmp[63 - t];
}";
    for (flag, clean) in [("mem_threadgroup", false), ("mem_device", true), ("mem_none", false)] {
        let library = compile(&text.replace("mem_threadgroup", flag), Build::Checker);
        let (mut o, mut tmp) = (vec![0; 256], vec![0; 256]);
        let launch =
            Launch::new("k", groups(1, 64)).buffer(0, Buffer::write(&mut o)).buffer(1, Buffer::read_write(&mut tmp));
        if clean {
            run(&library, &launch, Schedule::Forward);
        } else {
            assert!(lines(&findings(&library, &launch, Schedule::Forward), Kind::Race).contains(&4), "{flag}");
        }
    }
}

#[test]
fn threadgroups_that_write_one_byte_race() {
    let text = "kernel void k(device float *o [[buffer(0)]], uint g [[threadgroup_position_in_grid]]) {
  o[g / 2] = g;
}";
    let library = compile(text, Build::Checker);
    let mut o = vec![0; 16];
    let list =
        findings(&library, &Launch::new("k", groups(4, 1)).buffer(0, Buffer::write(&mut o)), Schedule::Random(7));
    assert_eq!(lines(&list, Kind::Race), [2]);
    assert!(list[0].message.contains("of threadgroup ("), "{}", list[0]);
}

#[test]
fn no_reader_is_forgotten() {
    // Every thread reads o[0]; thread 0, whose SIMD-group has a barrier, then writes it. The readers of the other
    // SIMD-group race.
    let text = "kernel void k(device float *o [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  float x = o[0];
  if (x < 0.0f) o[1] = x;
  simdgroup_barrier(mem_flags::mem_device);
  if (t == 0) o[0] = 1.0f;
}";
    let library = compile(text, Build::Checker);
    for schedule in SCHEDULES {
        let mut o = floats(&[1.0, 2.0]);
        let list = findings(&library, &Launch::new("k", groups(1, 64)).buffer(0, Buffer::read_write(&mut o)), schedule);
        let places: Vec<u32> = list.iter().flat_map(|f| [&f.location, &f.other]).flatten().map(|l| l.line).collect();
        assert!(list.iter().all(|f| f.kind == Kind::Race) && places.contains(&2) && places.contains(&5), "{list:?}");
        let mut o = floats(&[1.0, 2.0]);
        run(&library, &Launch::new("k", groups(1, 32)).buffer(0, Buffer::read_write(&mut o)), schedule);
    }
}

#[test]
fn accesses_outside_of_a_buffer_are_found_in_both_builds() {
    let text = "kernel void k(device const float *x [[buffer(0)]], device float *o [[buffer(1)]], constant int &by [[buffer(2)]],
              uint t [[thread_position_in_grid]]) {
  float v = x[(int)t + by];
  o[t] = v;
}";
    for build in [Build::Plain, Build::Checker] {
        let library = compile(text, build);
        for (by, len_out, line) in [(32i32, 64usize, 3u32), (1 << 20, 64, 3), (-20000, 64, 3), (0, 32, 4)] {
            let (x, mut o, by) = (floats(&[1.0; 64]), vec![0; len_out * 4], by.to_le_bytes());
            let launch = Launch::new("k", groups(2, 32))
                .buffer(0, Buffer::read(&x))
                .buffer(1, Buffer::write(&mut o))
                .bytes(2, &by);
            let list = findings(&library, &launch, Schedule::Forward);
            assert_eq!(lines(&list, Kind::OutOfBounds), [line], "{build:?} {list:?}");
            let buffer = if line == 3 { "buffer(0)" } else { "buffer(1)" };
            assert!(list[0].message.contains(buffer), "{}", list[0]);
            assert!(list[0].thread.is_some());
        }
    }
}

#[test]
fn the_extent_of_a_binding_counts_not_its_allocation() {
    let text = "kernel void k(device float *o [[buffer(0)]], uint t [[thread_position_in_grid]]) {
  o[t] = 1.0f;
}";
    let library = compile(text, Build::Checker);
    let mut memory = vec![0; 1024];
    run(
        &library,
        &Launch::new("k", groups(1, 32)).buffer(0, Buffer::write(&mut memory).offset(256).extent(128)),
        Schedule::Forward,
    );
    assert!(memory[..256].iter().chain(&memory[384..]).all(|&b| b == 0) && memory[256..384].iter().any(|&b| b != 0));
    let list = findings(
        &library,
        &Launch::new("k", groups(1, 33)).buffer(0, Buffer::write(&mut memory).offset(256).extent(128)),
        Schedule::Forward,
    );
    assert_eq!(lines(&list, Kind::OutOfBounds), [2]);
    assert!(list[0].message.contains("byte offset 128 of buffer(0)"), "{}", list[0]);
}

#[test]
fn a_write_just_past_the_end_breaks_the_slack() {
    let text = "kernel void k(device float *o [[buffer(0)]], uint t [[thread_position_in_grid]]) { o[t] = 1.0f; }";
    let mut o = vec![0; 4 * 30]; // rounded up to 128
    let list = findings(
        &compile(text, Build::Plain),
        &Launch::new("k", groups(1, 31)).buffer(0, Buffer::write(&mut o)),
        Schedule::Forward,
    );
    assert_eq!(list[0].kind, Kind::OutOfBounds);
    assert!(list[0].message.contains("byte offset 120 of buffer(0)"), "{}", list[0]);
}

#[test]
fn declared_access_is_binding() {
    let text = "kernel void k(device float *o [[buffer(0)]], uint t [[thread_position_in_grid]]) {
  if (t > 40)
    o[t] = 1.0f;
  o[t] += 1.0f;
}";
    let library = compile(text, Build::Checker);
    let mut o = floats(&[0.0; 64]);
    let list = findings(&library, &Launch::new("k", groups(1, 64)).buffer(0, Buffer::read(&o)), Schedule::Forward);
    assert_eq!(lines(&list, Kind::UndeclaredAccess), [4], "{list:?}");
    let list = findings(&library, &Launch::new("k", groups(1, 64)).buffer(0, Buffer::write(&mut o)), Schedule::Forward);
    assert_eq!(lines(&list, Kind::UninitialisedRead), [4], "{list:?}");
    run(&library, &Launch::new("k", groups(1, 64)).buffer(0, Buffer::read_write(&mut o)), Schedule::Forward);
}

#[test]
fn threadgroup_memory_is_uninitialised_in_every_threadgroup() {
    let text = "kernel void k(device float *o [[buffer(0)]], threadgroup float *s [[threadgroup(0)]],
              uint t [[thread_index_in_threadgroup]], uint g [[threadgroup_position_in_grid]]) {
  if (g == 0 || t != 5) s[t] = t;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  o[g * 64 + t] = s[63 - t];
}";
    let (mut o, library) = (vec![0; 512], compile(text, Build::Checker));
    let list = findings(
        &library,
        &Launch::new("k", groups(2, 64)).buffer(0, Buffer::write(&mut o)).threadgroup_memory(0, 256),
        Schedule::Forward,
    );
    assert_eq!(lines(&list, Kind::UninitialisedRead), [5], "{list:?}");
    let thread = list[0].thread.expect("a thread");
    assert_eq!((thread.index, thread.threadgroup, thread.simdgroup, thread.lane), (58, [1, 0, 0], 1, 26));
    run(
        &compile(text, Build::Plain),
        &Launch::new("k", groups(2, 64)).buffer(0, Buffer::write(&mut o)).threadgroup_memory(0, 256),
        Schedule::Forward,
    );
    assert!(to_floats(&o)[64 + 58].is_nan(), "poison");
}

#[test]
fn local_and_threadgroup_arrays_have_bounds() {
    let text = "kernel void local(device float *o [[buffer(0)]], constant uint &n [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
  float a[8];
  for (uint i = 0; i < n; i++)
    a[i] = t;
  o[t] = a[t % 8];
}
kernel void shared(device float *o [[buffer(0)]], constant uint &n [[buffer(1)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float a[2][16];
  a[0][t] = t;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  o[t] = a[0][t + n];
}";
    let library = compile(text, Build::Checker);
    for (kernel, n, line) in [("local", 9u32, 4), ("shared", 1, 11)] {
        let (mut o, n) = (vec![0; 64], n.to_le_bytes());
        let list = findings(
            &library,
            &Launch::new(kernel, groups(1, 16)).buffer(0, Buffer::write(&mut o)).bytes(1, &n),
            Schedule::Reverse,
        );
        assert!(lines(&list, Kind::OutOfBounds).contains(&line), "{kernel}: {list:?}");
    }
}

#[test]
fn divergence_is_reported_and_does_not_hang() {
    let text = "kernel void some_wait(device float *o [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  if (t < 40)
    threadgroup_barrier(mem_flags::mem_threadgroup);
  o[t] = t;
}
kernel void two_barriers(device float *o [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  if (t & 1) { threadgroup_barrier(mem_flags::mem_threadgroup); o[t] = 1; } else { o[t] = 2; threadgroup_barrier(mem_flags::mem_threadgroup); }
}
kernel void early(device float *o [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  if (t == 13) return;
  o[t] = simd_sum(1.0f);
}
inline float sum(float x) { return simd_sum(x); }
kernel void two_calls(device float *o [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  o[t] = t & 1 ? sum(1.0f) : sum(2.0f);
}
kernel void one_line(device float *o [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  float v; if (t & 1) v = simd_sum(1.0f); else v = simd_sum(2.0f);
  o[t] = v;
}";
    for build in [Build::Plain, Build::Checker] {
        let library = compile(text, build);
        for (kernel, line) in
            [("some_wait", 3), ("two_barriers", 7), ("early", 11), ("two_calls", 13), ("one_line", 18)]
        {
            for schedule in SCHEDULES {
                let mut o = vec![0; 256];
                let list =
                    findings(&library, &Launch::new(kernel, groups(1, 64)).buffer(0, Buffer::write(&mut o)), schedule);
                let found = lines(&list, Kind::Divergence);
                assert_eq!(found, [line], "{kernel} {build:?} {schedule:?}: {list:?}");
            }
        }
    }
}

#[test]
fn divergence_that_is_allowed_works_over_the_active_lanes() {
    let text = "kernel void k(device float *o [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  float v; if (t & 1) v = simd_sum(1.0f); else v = simd_sum(2.0f) + simd_broadcast_first(float(t));
  o[2 * t] = v;
  if (t % 4 == 0) v = simd_sum(100.0f);
  o[2 * t + 1] = v + simd_sum(1.0f);
}";
    for schedule in SCHEDULES {
        let mut o = vec![0; 256];
        let launch = Launch::new("k", groups(1, 32)).buffer(0, Buffer::write(&mut o)).allow_divergence();
        run(&compile(text, Build::Plain), &launch, schedule);
        let o = to_floats(&o);
        assert_eq!(o[..4], [32.0, 832.0, 16.0, 48.0], "{schedule:?}");
        assert_eq!((o[4], o[5]), (32.0, 64.0));
    }
}

#[test]
fn endless_loops_divisions_and_deep_stacks_end() {
    let text = "kernel void forever(device float *o [[buffer(0)]]) {
  while (o[0] != 12345.0f) o[1] += 1.0f;
}
kernel void divide(device int *o [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  o[t] = 7 / o[t];
}
inline float down(uint n, device const float *x) { float a[64]; for (uint i = 0; i < 64; i++) a[i] = x[i % 2] + n; return n == 0 ? a[3] : down(n - 1, x) + a[n % 64]; }
kernel void deep(device float *o [[buffer(0)]]) { o[0] = down(5000, o); }";
    for build in [Build::Plain, Build::Checker] {
        let library = compile(text, build);
        for (kernel, kind, line) in
            [("forever", Kind::TimeLimit, 2), ("divide", Kind::Arithmetic, 5), ("deep", Kind::StackOverflow, 7)]
        {
            let mut o = vec![0; 8];
            let launch = Launch::new(kernel, groups(1, 2))
                .buffer(0, Buffer::read_write(&mut o))
                .time_limit(Duration::from_millis(200));
            let launch = if kernel == "forever" {
                Launch::new(kernel, groups(1, 1))
                    .buffer(0, Buffer::read_write(&mut o))
                    .time_limit(Duration::from_millis(200))
            } else {
                launch
            };
            let list = findings(&library, &launch, Schedule::Forward);
            assert_eq!((list[0].kind, lines(&list, kind)), (kind, vec![line]), "{build:?}: {list:?}");
        }
    }
}

#[test]
fn misaligned_vectors_and_short_structs_are_found() {
    let text = "struct P { uint n; float4 x; };
kernel void wide(device float *o [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  *(device float4 *)(o + t) = float4(1.0f);
}
kernel void params(device float *o [[buffer(0)]], constant P &p [[buffer(1)]]) { o[0] = p.x.y; }";
    let library = compile(text, Build::Checker);
    let mut o = vec![0; 64];
    let list =
        findings(&library, &Launch::new("wide", groups(1, 2)).buffer(0, Buffer::write(&mut o)), Schedule::Forward);
    assert_eq!(lines(&list, Kind::Misaligned), [3], "{list:?}");
    let list = findings(
        &library,
        &Launch::new("params", groups(1, 1)).buffer(0, Buffer::write(&mut o)).bytes(1, &[0; 20]),
        Schedule::Forward,
    );
    assert!(
        list[0].kind == Kind::OutOfBounds && list[0].message.contains("buffer(1) has 20 bytes, its parameter needs 32"),
        "{list:?}"
    );
}

#[test]
fn a_plain_access_of_an_atomic_races() {
    let text = "kernel void mixed(device atomic_uint *a [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  atomic_fetch_add_explicit(a, 1u, memory_order_relaxed);
  if (t == 9)
    *(device uint *)a = 5;
}
kernel void atomic_only(device atomic_uint *a [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  if (atomic_load_explicit(a, memory_order_relaxed) < 1000u) atomic_fetch_add_explicit(a, t, memory_order_relaxed);
}";
    let library = compile(text, Build::Checker);
    let mut a = vec![0; 4];
    let list = findings(
        &library,
        &Launch::new("mixed", groups(1, 64)).buffer(0, Buffer::read_write(&mut a)),
        Schedule::Forward,
    );
    assert!(
        list.iter().any(|f| f.kind == Kind::Race && [&f.location, &f.other].into_iter().flatten().any(|l| l.line == 4)),
        "{list:?}"
    );
    run(
        &library,
        &Launch::new("atomic_only", groups(3, 64)).buffer(0, Buffer::read_write(&mut a)),
        Schedule::Random(3),
    );
}

#[test]
fn launches_that_do_not_fit_are_refused() {
    let text = "kernel void k(device float *o [[buffer(0)]], threadgroup float *s [[threadgroup(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float big[4096]; big[t] = 0; s[t] = big[t]; o[t] = s[t];
}";
    let library = compile(text, Build::Plain);
    let reason = |launch: Launch<'_>| match library.run(&launch, Schedule::Forward) {
        Err(Error::Launch { reason, .. }) => reason,
        other => panic!("{other:?}"),
    };
    let o = vec![0u8; 8192];
    let all = |grid| Launch::new("k", grid).buffer(0, Buffer::read(&o)).threadgroup_memory(0, 4096);
    assert!(reason(all(groups(1, 1025))).contains("Metal allows 1024"));
    assert!(reason(all(groups(0, 1))).contains("empty grid"));
    assert!(reason(all(Grid::Threadgroups { groups: [1 << 20, 1 << 20, 1], threads: [1, 1, 1] })).contains("32 bits"));
    assert!(reason(Launch::new("k", groups(1, 1)).threadgroup_memory(0, 16)).contains("buffer(0) (`o`) is not bound"));
    assert!(
        reason(Launch::new("k", groups(1, 1)).buffer(0, Buffer::read(&o)))
            .contains("threadgroup(0) (`s`) is not bound")
    );
    assert!(reason(all(groups(1, 1)).bytes(4, &[0])).contains("buffer(4) is bound, but"));
    assert!(reason(all(groups(1, 1)).bytes(0, &[0])).contains("bound twice"));
    assert!(
        reason(Launch::new("k", groups(1, 1)).buffer(0, Buffer::read(&o).offset(8193)).threadgroup_memory(0, 16))
            .contains("reach past")
    );
    assert!(
        reason(Launch::new("k", groups(1, 1)).buffer(0, Buffer::read(&o)).threadgroup_memory(0, 20))
            .contains("multiple of 16")
    );
    assert!(
        reason(Launch::new("k", groups(1, 1)).buffer(0, Buffer::read(&o)).threadgroup_memory(0, 40000))
            .contains("Metal allows 32768")
    );
    assert!(reason(Launch::new("none", groups(1, 1))).contains("it has k"));
    assert!(reason(all(groups(1, 1)).constant(3, msl_host::Constant::Bool(true))).contains("no function constant 3"));
    // Dynamic and static threadgroup memory share the limit.
    let mut o = vec![0; 8192];
    let list = findings(
        &library,
        &Launch::new("k", groups(1, 1)).buffer(0, Buffer::write(&mut o)).threadgroup_memory(0, 16400),
        Schedule::Forward,
    );
    assert_eq!(lines(&list, Kind::Limit), [2], "{list:?}");
}

#[test]
fn a_random_run_is_reproducible() {
    let text = "kernel void k(device atomic_uint *next [[buffer(0)]], device uint *o [[buffer(1)]], uint t [[thread_position_in_grid]]) {
  o[t] = atomic_fetch_add_explicit(next, 1u, memory_order_relaxed);
}";
    let library = compile(text, Build::Plain);
    let order = |seed| {
        let (mut next, mut o) = (vec![0; 4], vec![0; 4 * 256]);
        run(
            &library,
            &Launch::new("k", groups(4, 64)).buffer(0, Buffer::read_write(&mut next)).buffer(1, Buffer::write(&mut o)),
            Schedule::Random(seed),
        );
        o
    };
    assert_eq!(order(5), order(5));
    assert_ne!(order(5), order(6));
}
