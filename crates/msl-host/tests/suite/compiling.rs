//! Sources that the front end, the lint and the typed pass reject, and sources that they accept.

use crate::support::*;
use msl_host::{Build, Error, Source};

/// The first error as (line, message).
fn refused(text: &str) -> (u32, String) {
    match host().compile(&source(text), Build::Plain) {
        Err(Error::Compile { diagnostics, .. }) => (diagnostics[0].line, diagnostics[0].message.clone()),
        other => panic!("expected a compile error, got {other:?}"),
    }
}

const HEAD: &str = "struct P { uint n; float s; }; inline float local(thread float *p) { return *p; } inline float dev(device const float *p) { return *p; }
";

#[test]
fn address_spaces_do_not_mix() {
    let cases = [
        (
            "device_to_thread_argument",
            "kernel void k(device float *o [[buffer(0)]]) {\n o[0] = local(o); }",
            "no matching function",
        ),
        (
            "threadgroup_from_device",
            "kernel void k(device float *o [[buffer(0)]], threadgroup float *s [[threadgroup(0)]]) {\n s = o; }",
            "assigning",
        ),
        (
            "cast",
            "kernel void k(device float *o [[buffer(0)]]) {\n threadgroup float *s = (threadgroup float *)o; s[0] = 1; }",
            "changes the address space",
        ),
        (
            "reinterpret_cast",
            "kernel void k(device float *o [[buffer(0)]]) {\n threadgroup float *s = reinterpret_cast<threadgroup float *>(o); s[0] = 1; }",
            "reinterpret_cast",
        ),
        (
            "threadgroup_array_to_device",
            "kernel void k(device float *o [[buffer(0)]]) {\n threadgroup float s[4]; o[0] = dev(s); }",
            "no matching function",
        ),
        (
            "local_to_device",
            "kernel void k(device float *o [[buffer(0)]]) {\n float l[4]; device float *q = l; o[0] = q[0]; }",
            "cannot initialize",
        ),
        (
            "device_to_thread_pointer",
            "kernel void k(device float *o [[buffer(0)]]) {\n thread float *q = o; o[0] = q[0]; }",
            "cannot initialize",
        ),
        ("write_const", "kernel void k(device const float *o [[buffer(0)]]) {\n ((void)0); o[0] = 1; }", "read-only"),
        (
            "write_constant",
            "kernel void k(device float *o [[buffer(0)]], constant P &p [[buffer(1)]]) {\n p.n = 1; }",
            "const-qualified",
        ),
    ];
    for (name, body, wanted) in cases {
        let (line, message) = refused(&format!("{HEAD}{body}"));
        assert!(message.contains(wanted), "{name}: {message}");
        assert_eq!(line, 3, "{name}: {message}");
    }
}

#[test]
fn types_do_not_mix() {
    let cases = [
        ("implicit vector conversion", "half4 h = half4(o[0]); float4 f = h; o[0] = f.x;"),
        ("ambiguous max", "o[0] = max(1, 2u);"),
        ("vector with too few elements", "float4 f = float4(o[0], o[1]); o[0] = f.x;"),
        ("as_type of another size", "o[0] = as_type<float>(ushort(1));"),
        ("a warning", "float x; o[0] = x;"),
        ("a comparison of signs", "int i = int(o[0]); uint n = 3; o[0] = i < n;"),
    ];
    for (name, body) in cases {
        let (line, message) = refused(&format!("kernel void k(device float *o [[buffer(0)]]) {{\n {body}\n}}"));
        assert_eq!(line, 2, "{name}: {message}");
    }
}

#[test]
fn a_missing_qualifier_is_an_error() {
    let (line, message) = refused(
        "kernel void k(device float *o [[buffer(0)]]) {\n thread float x = 1;\n float *p = &x;\n o[0] = *p;\n}",
    );
    assert_eq!(line, 3);
    assert!(message.contains("`float *p` names no address space"), "{message}");
    assert_eq!(refused("inline void f(float4 &x) { x = 1; }\nkernel void k(device float4 *o [[buffer(0)]]) { float4 v = 0; f(v); o[0] = v; }").0, 1);
}

#[test]
fn the_front_end_names_the_place() {
    assert_eq!(refused("\nkernel void k(device float *o) { o[0] = 1; }").0, 2);
    assert_eq!(refused("\nkernel void k(device float *o [[buffer(40)]]) { o[0] = 1; }").0, 2);
    assert_eq!(refused("kernel void k(device float *o [[buffer(0)]]) {\n\n o[0] = undefined_thing; }").0, 3);
    assert_eq!(
        refused("\n\ntemplate [[host_name(\"x\")]] kernel void nothing<float>(device float *o [[buffer(0)]]);").0,
        3
    );
    assert_eq!(refused("#include \"missing.h\"\n").0, 1);
    assert_eq!(refused("\n#error no\n").0, 2);
    for rubbish in [
        "}",
        "kernel void",
        "kernel void k(",
        "template [[host_name(",
        "constant [[",
        "((((",
        "\"",
        "kernel void k([[buffer(0)]]) {}",
        "<<>>",
        "threadgroup",
    ] {
        assert!(host().compile(&source(rubbish), Build::Plain).is_err(), "{rubbish}");
    }
}

#[test]
fn headers_macros_and_instantiations_from_outside() {
    let main = Source::new(
        "main.metal",
        "#include <metal_stdlib>\n#include \"scale.h\"\nkernel void plain(device float *o [[buffer(0)]]) { o[0] = FACTOR; }\n",
    );
    let header = "template <typename T> kernel void scale(device T *o [[buffer(0)]], uint i [[thread_position_in_grid]]) { o[i] = T(float(o[i]) * FACTOR); }\n";
    let main = main.header("scale.h", header).define("FACTOR", "3.0f").instantiate("scale_half", "scale<half>");
    let library = host().compile(&main, Build::Plain).unwrap_or_else(|e| panic!("{e}"));
    let names: Vec<&str> = library.kernels().iter().map(|k| k.name.as_str()).collect();
    assert_eq!(names, ["plain", "scale_half"]);
    let broken = main.header("scale.h", &format!("\n\n{}", header.replace("FACTOR", "nothing")));
    match host().compile(&broken, Build::Plain) {
        Err(Error::Compile { diagnostics, .. }) => {
            assert!(diagnostics[0].file == "scale.h" && diagnostics[0].line == 3, "{diagnostics:?}")
        }
        other => panic!("{other:?}"),
    }
}

/// Ordinary Metal code that must compile, in one kernel each.
#[test]
fn ordinary_metal_is_accepted() {
    let text = "
constant float TABLE[4] = {1.0f, 2.0f, 4.0f, 8.0f};
struct P { uint n; float s; };
static_assert(sizeof(P) == 8 && __builtin_offsetof(P, s) == 4, \"the layout that the host writes\");
struct Block { half d; uchar q[32]; };
template <typename T> inline void load(threadgroup T *dst, device const T *src, uint t) { dst[t] = src[t]; }
template <typename P> inline float first(P p) { return p[0]; }
template <typename T, int N> struct Tile { T v[N]; void fill(T x) { for (int i = 0; i < N; i++) v[i] = x; } };
template <typename T> inline void bump(thread T (&x)[4]) { for (int i = 0; i < 4; i++) x[i] += T(1); }
kernel void structs(device float *o [[buffer(0)]], constant P &p [[buffer(1)]], device P *q [[buffer(2)]], device const Block *b [[buffer(3)]], uint t [[thread_position_in_grid]]) {
  P local = p; local.n += 1; q[t] = local; P back = q[t]; o[t] = back.s + float(b[t].d) * float(b[t].q[3]);
}
kernel void vectors(device float *o [[buffer(0)]], threadgroup float *s [[threadgroup(0)]], uint t [[thread_position_in_grid]]) {
  load(s, o, t); load<float>(s, o, t);
  thread float l = first(s) + first(o); thread float &r = l; o[t] = r;
  device float4 &d = ((device float4 *)o)[t]; d.xy += 1.0f; d.w = dot(d, d);
  auto v = d; v *= 2; o[t] = v.x + min(v, d).y + float4(half4(v)).z + ((float4)half4(d)).w + (-(float4)half4(d)).x;
  float a[4] = {1, 2, 3, 4}; bump(a); o[t] += a[t & 3] + TABLE[t & 3];
  Tile<half, 4> tile; tile.fill(1.0h); o[t] += float(tile.v[0]) + float(bfloat(2.0f));
  uchar4 bytes = as_type<uchar4>(o[t]); o[t] = float(bytes.x) + float(as_type<half2>(o[t]).y);
  float4 c = select(v, d, v < d); if (any(isnan(c.x)) || all(v == d)) o[t] = 0;
  o[t] += fast::exp(1.0f) + precise::log(2.0f) + metal::max(1.0f, 2.0f) + clamp(l, 0.0f, 1.0f) + fma(l, 2.0f, 1.0f);
}
template <typename T, uint D> inline float row_max(threadgroup const T *s, const thread float (&x)[D], uint t) { float m = x[0]; for (uint i = 1; i < D; i++) m = max(m, x[i]); return max(m, float(s[t])); }
kernel void attend(const device half *q [[buffer(0)]], const device bfloat *k [[buffer(1)]], device float *o [[buffer(2)]], const constant uint &n [[buffer(3)]], const constant int64_t *strides [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]], uint3 threads [[threads_per_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  constexpr uint D = 64; constexpr int PAD = 4; threadgroup half tile[8 * (D + PAD)];
  for (ulong i = lane; i < 8 * D; i += 32) tile[(i / D) * (D + PAD) + i % D] = q[ulong(group.x) * strides[0] + i];
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  simdgroup_matrix<float, 8, 8> s[D / 8]; simdgroup_half8x8 a, b;
  #pragma clang loop unroll(full)
  for (uint j = 0; j < D / 8; j++) { s[j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f); simdgroup_load(a, tile + 8 * j, D + PAD); simdgroup_load(b, tile, D + PAD, 0, true); simdgroup_multiply_accumulate(s[j], a, b, s[j]); s[j].thread_elements()[0] *= 2.0f; }
  thread auto &e = s[0].thread_elements(); e.x = simd_max(max(e.x, e.y)); float m[4] = {e.x, e.y, float(k[lane]), max3(1.0f, 2.0f, 3.0f)};
  const half4 v = *((const threadgroup half4 *)(tile) + lane); uint bits = as_type<uint>(half2(v.xy)); ushort2 two = ushort2(uint2(bits & 0xFFFFu, bits >> 16)); half2 pair = as_type<half2>(two);
  o[group.x * n + lane] = row_max(tile, m, lane) + float(v.w) + float(pair.y) + exp2(-m[0] * M_LOG2E_F) + (threads.x > 32 ? -INFINITY : 0.0f) + tanh(float(v.z) / 30.0f) * 30.0f;
}
kernel void packed(device packed_float4 *o [[buffer(0)]], device packed_half4 *h [[buffer(1)]], uint t [[thread_position_in_grid]]) { float4 v = o[t]; h[t] = half4(v); o[t] = v * 2.0f; }
[[kernel]] [[max_total_threads_per_threadgroup(256)]] void with_attribute(device float *o [[buffer(0)]], uint3 g [[threadgroup_position_in_grid]], ushort l [[thread_index_in_simdgroup]]) {
  threadgroup float a[4], b[8][2]; threadgroup half4 c[2];
  if (l < 2) { a[l] = 1; b[l][0] = 2; c[l] = half4(3.0h); o[g.x + l] = a[l] + b[l][0] + float(c[l].w); }
}
template <typename T, int N> [[kernel]] void scale(device T *o [[buffer(0)]], constant float &s [[buffer(1)]], uint3 g [[thread_position_in_grid]]) {
  vec<T, N> v = vec<T, N>(o[g.x]); threadgroup T shared[N * 2]; shared[0] = v[0]; o[g.x] = T(float(v[N - 1]) * s);
}
#define instantiate(name, function, ...) template [[host_name(name)]] [[kernel]] decltype(function<__VA_ARGS__>) function<__VA_ARGS__>;
#define each(T, n) instantiate(\"scale_\" #T \"_\" #n, scale, T, n)
each(float, 4) each(half, 2)
each(bfloat, 3)
template [[host_name(\"scale_long\")]] [[kernel]] void scale<float, 2>(device float *o [[buffer(0)]], constant float &s [[buffer(1)]], uint3 g [[thread_position_in_grid]]);
";
    for build in [Build::Plain, Build::Checker] {
        let library = compile(text, build);
        let names: Vec<&str> = library.kernels().iter().map(|k| k.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "structs",
                "vectors",
                "attend",
                "packed",
                "with_attribute",
                "scale_float_4",
                "scale_half_2",
                "scale_bfloat_3",
                "scale_long"
            ]
        );
    }
}
