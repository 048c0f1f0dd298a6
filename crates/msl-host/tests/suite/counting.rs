//! The counting build, on kernels whose counts follow from their text.

use msl_host::{Buffer, Constant, Counts, Grid, Host, Launch, Source};

/// Runs a kernel in `groups` threadgroups of 64 threads over 64 KiB of zeros and counts.
fn count(text: &str, groups: u32, constants: &[(u32, Constant)]) -> Counts {
    let text = format!("#include <metal_stdlib>\nusing namespace metal;\n{text}");
    let grid = Grid::Threadgroups { groups: [groups, 1, 1], threads: [64, 1, 1] };
    let (x, mut y) = (vec![0; 64 << 10], vec![0; 64 << 10]);
    let launch = Launch::new("k", grid).buffer(0, Buffer::read(&x)).buffer(1, Buffer::read_write(&mut y));
    let launch = constants.iter().fold(launch, |l, &(index, value)| l.constant(index, value));
    Host::new().and_then(|host| host.count(&Source::new("k.metal", &text), &launch)).expect("counts")
}

const HEAD: &str = "kernel void k(device const uchar *x [[buffer(0)]], device float *y [[buffer(1)]],
                                  uint i [[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {";

#[test]
fn arithmetic_counts_by_simdgroup() {
    // Two products, one fused with the addition; four elements each.
    let body = "device const float4 *v = (device const float4 *)x;
        float4 a = v[i], b = v[i + 256];
        float4 c = a * b + a * a;
        y[i] = c.x; y[i + 64] = c.y; y[i + 128] = c.z; y[i + 192] = c.w; }";
    let counts = count(&format!("{HEAD}{body}"), 1, &[]);
    assert_eq!((counts.threads, counts.simdgroups, counts.threadgroups), (64, 2, 1));
    assert_eq!(counts.operations.float32, 2 * 8);
    assert_eq!(counts.operations.float16, 0);
    assert_eq!((counts.operations.int64, counts.operations.exponentials), (0, 0));
    // Each load is 32 · 16 bytes, each store 32 · 4.
    assert_eq!((counts.device.accesses, counts.device.bytes), (2 * 6, 2 * (2 * 512 + 4 * 128)));
    assert_eq!((counts.device.units, counts.device.excess()), (2 * (2 * 16 + 4 * 4), 0));
    assert_eq!(counts.footprint, [2 * 64 * 16, 4 * 64 * 4]);
    assert!((counts.active - 1.0).abs() < 1e-9);
}

#[test]
fn a_branch_counts_for_the_simdgroup_that_takes_it() {
    let body = "float a = y[i]; if (lane < 2) { a = exp2(a) * a; } y[i] = a; }";
    let counts = count(&format!("{HEAD}{body}"), 1, &[]);
    assert_eq!((counts.operations.exponentials, counts.operations.float32), (2, 2));
    let none = count(&format!("{HEAD}{}", body.replace("lane < 2", "lane > 40")), 1, &[]);
    assert_eq!((none.operations.exponentials, none.operations.float32), (0, 0));
    assert!(counts.active < 1.0);
}

#[test]
fn loops_count_their_iterations_and_their_longest_lane() {
    // Lane n runs n + 1 iterations, the SIMD-group 32.
    let body = "float a = 0; for (uint j = 0; j <= lane; j++) { a += y[j * 64 + i]; } y[i] = a; }";
    let counts = count(&format!("{HEAD}{body}"), 1, &[]);
    assert_eq!(counts.operations.float32, 2 * 32);
    assert_eq!(counts.device.accesses, 2 * (32 + 1));
    // Lanes n to 31, 4 bytes each, in sectors of 32 bytes.
    let sectors: u64 = (0..32u64).map(|n| 4 - n / 8).sum();
    assert_eq!(counts.device.units, 2 * (sectors + 4));
}

/// The compiler marks their pointers as dereferenceable.
#[test]
fn copies_of_structs_are_accesses() {
    let body = "threadgroup V s[64]; s[i] = ((device const V *)x)[i]; threadgroup_barrier(mem_flags::mem_threadgroup);
        y[i] = s[63 - i].v[0]; }";
    let counts = count(&format!("struct alignas(16) V {{ uchar v[64]; }}; {HEAD}{body}"), 1, &[]);
    assert_eq!(counts.footprint, [64 * 64, 64 * 4]);
    assert_eq!(counts.device.bytes, 64 * 64 + 64 * 4);
}

#[test]
fn strides_cost_transactions_and_bank_conflicts() {
    let spread = count(&format!("{HEAD} y[i * 16] = 1; }}"), 1, &[]);
    assert_eq!((spread.device.units, spread.device.ideal, spread.device.excess()), (64, 8, 56));
    let body = |index: &str| {
        format!(
            "{HEAD} threadgroup float s[1024]; s[i] = 0; threadgroup_barrier(mem_flags::mem_threadgroup);
             y[i] = s[{index}]; }}"
        )
    };
    let cycles = |index: &str| {
        let counts = count(&body(index), 1, &[]);
        assert_eq!((counts.threadgroup.accesses, counts.barriers, counts.threadgroup_bytes), (4, 2, 4096), "{index}");
        (counts.threadgroup.units - 2, counts.threadgroup.excess())
    };
    assert_eq!(cycles("i"), (2, 0));
    // Two neighbours share a bank; 32 neighbours share one; all read one word.
    assert_eq!(cycles("i * 2"), (4, 2));
    assert_eq!(cycles("i * 32 % 1024"), (64, 62));
    assert_eq!(cycles("5"), (2, 0));
}

#[test]
fn neighbours_are_one_access_and_addresses_of_64_bits_count() {
    let by_elements = "device const half *h = (device const half *)x + 4 * i;
        float a = float(h[0]) + float(h[1]) + float(h[2]) + float(h[3]); y[i] = a; }";
    let counts = count(&format!("{HEAD}{by_elements}"), 1, &[]);
    assert_eq!((counts.device.accesses, counts.device.units), (2 * 2, 2 * (8 + 4)));
    assert_eq!(counts.operations.float32, 2 * 3);
    // A pointer that moves in a loop.
    let moving = "device const uchar *p = x + lane; float a = 0;
        for (uint j = 0; j < uint(y[0]) + 10; j++) { a += p[0]; p += i + 100; } y[i] = a; }";
    let counts = count(&format!("{HEAD}{moving}"), 1, &[]);
    assert!(counts.operations.int64 >= 2 * 10, "{counts}");
}

#[test]
fn lanes_meet_and_constants_are_those_of_the_pipeline() {
    let text = format!(
        "constant bool MANY [[function_constant(3)]];
         constant uint TIMES = MANY ? 7 : 2;
         {HEAD} float a = y[i]; for (uint j = 0; j < TIMES; j++) {{ a = simd_shuffle_xor(a, 1) + simd_sum(a); }}
         simdgroup_barrier(mem_flags::mem_none); bool b = simd_any(a > 0); y[i] = b ? a : 0; }}"
    );
    for (many, times) in [(false, 2), (true, 7)] {
        let counts = count(&text, 3, &[(3, Constant::Bool(many))]);
        assert_eq!((counts.shuffles, counts.reductions), (6 * times, 6 * times));
        assert_eq!((counts.simdgroup_barriers, counts.votes), (6, 6));
        // An addition per iteration; a comparison and a selection.
        assert_eq!(counts.operations.float32, 6 * (times + 2));
        // TIMES is known, so no loop remains.
        assert_eq!(counts.operations.branches, 0);
    }
}

#[test]
fn matrix_products_and_accesses_are_counted() {
    let text = "kernel void k(device const half *x [[buffer(0)]], device float *y [[buffer(1)]]) {
        threadgroup half t[64];
        simdgroup_half8x8 a, b; simdgroup_float8x8 c(0);
        simdgroup_load(a, x); simdgroup_load(b, x + 64);
        for (uint j = 0; j < 1000; j++) { simdgroup_multiply_accumulate(c, a, b, c); }
        simdgroup_store(c, y); simdgroup_store(a, t); }";
    let counts = count(text, 1, &[]);
    assert_eq!((counts.matrix_products, counts.matrix_accesses), (2 * 1000, 2 * 4));
    // Two halves per lane, 128 bytes of a matrix, and 256 of floats.
    assert_eq!((counts.device.accesses, counts.device.units), (2 * 3, 2 * (4 + 4 + 8)));
    assert_eq!(counts.threadgroup.accesses, 2);
    assert_eq!((counts.private.accesses, counts.operations.float32), (0, 0));
}
