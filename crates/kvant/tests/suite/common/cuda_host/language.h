// CUDA C++ for clang on a CPU: the language features that kernels use, without PTX. The threads of a block are fibers
// (runtime.cpp): each runs until it waits for others.
struct uint2 { unsigned x, y; };
struct uint3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct float3 { float x, y, z; };
struct alignas(16) float4 { float x, y, z, w; };

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define __global__
#define __device__
#define __shared__ static
#define __constant__
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __noinline__

// Set when a fiber is resumed.
extern "C" {
extern uint3 kvant_thread, kvant_block, kvant_threads, kvant_blocks;
extern unsigned char *kvant_shared;
void kvant_wait_for_block();
// For the barrier with a number: waits for `threads` threads, and returns how many of them passed true.
unsigned kvant_count_of_threads(unsigned barrier, unsigned threads, bool own);
// For barriers in shared memory.
void kvant_barrier_arrive(void *barrier);
void kvant_barrier_wait(const void *barrier, unsigned parity);
[[noreturn]] void kvant_has_no_ptx(const char *statement);
// Exchanges 16 bytes with the other lanes of the warp; returns a mask of the lanes that exist.
unsigned kvant_exchange(const void *own, void *all);
}
#define threadIdx kvant_thread
#define blockIdx kvant_block
#define blockDim kvant_threads
#define gridDim kvant_blocks

// For other ranks, which run in other threads of the system.
extern "C" int sched_yield();
template <typename T, typename V> inline void kvant_publish(T *at, V value) { __atomic_store_n(at, T(value), __ATOMIC_RELEASE); }
template <typename T> inline T kvant_look(const T *at) {
    sched_yield();
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}

inline void __syncthreads() { kvant_wait_for_block(); }
inline void kvant_wait_for_threads(unsigned barrier, unsigned threads) { kvant_count_of_threads(barrier, threads, false); }
inline unsigned __syncthreads_count(bool own) { return kvant_count_of_threads(0, blockDim.x, own); }
inline void __threadfence() {}
[[noreturn]] inline void __trap() { __builtin_trap(); }

template <typename T> struct KvantLanes {
    alignas(16) unsigned char bytes[32][16];
    unsigned there;

    KvantLanes(T x) {
        alignas(16) unsigned char own[16] = {};
        static_assert(sizeof(T) <= 16, "the value of a lane must fit 16 bytes");
        __builtin_memcpy(own, &x, sizeof(T));
        there = kvant_exchange(own, bytes);
    }
    T of(unsigned lane, T otherwise) const {
        if (!(there >> (lane & 31) & 1)) {
            return otherwise;
        }
        T x;
        __builtin_memcpy(&x, bytes[lane & 31], sizeof(T));
        return x;
    }
};

inline unsigned kvant_lane() { return kvant_thread.x % 32; }
template <typename T> T __shfl_sync(unsigned, T x, unsigned lane, unsigned width = 32) {
    return KvantLanes<T>(x).of(kvant_lane() / width * width + lane % width, x);
}
template <typename T> T __shfl_xor_sync(unsigned, T x, int mask) {
    const unsigned own = kvant_lane();
    return KvantLanes<T>(x).of(own ^ mask, x);
}
template <typename T> T __shfl_up_sync(unsigned, T x, unsigned by) {
    const unsigned own = kvant_lane();
    const KvantLanes<T> lanes(x);
    return own >= by ? lanes.of(own - by, x) : x;
}
template <typename T> T __shfl_down_sync(unsigned, T x, unsigned by) {
    const unsigned own = kvant_lane();
    const KvantLanes<T> lanes(x);
    return own + by < 32 ? lanes.of(own + by, x) : x;
}
inline unsigned __ballot_sync(unsigned, bool x) {
    const KvantLanes<bool> lanes(x);
    unsigned out = 0;
    for (unsigned lane = 0; lane < 32; lane++) {
        out |= unsigned(lanes.of(lane, false)) << lane;
    }
    return out;
}
inline bool __any_sync(unsigned all, bool x) { return __ballot_sync(all, x) != 0; }
inline bool __all_sync(unsigned all, bool x) { return __ballot_sync(all, !x) == 0; }
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
    const KvantLanes<unsigned> lanes(x);
    for (unsigned lane = 0; lane < 32; lane++) {
        const unsigned other = lanes.of(lane, x);
        x = other > x ? other : x;
    }
    return x;
}
inline unsigned __reduce_min_sync(unsigned, unsigned x) {
    const KvantLanes<unsigned> lanes(x);
    for (unsigned lane = 0; lane < 32; lane++) {
        const unsigned other = lanes.of(lane, x);
        x = other < x ? other : x;
    }
    return x;
}
inline unsigned __reduce_add_sync(unsigned, unsigned x) {
    const KvantLanes<unsigned> lanes(x);
    unsigned sum = 0;
    for (unsigned lane = 0; lane < 32; lane++) {
        sum += lanes.of(lane, 0);
    }
    return sum;
}
inline void __syncwarp(unsigned = 0xFFFFFFFF) { KvantLanes<unsigned> lanes(0); }

// Fibers are not interrupted, so plain code is atomic.
template <typename T, typename U> T atomicAdd(T *at, U x) { T old = *at; *at = old + T(x); return old; }
template <typename T, typename U> T atomicMax(T *at, U x) { T old = *at; *at = old < T(x) ? T(x) : old; return old; }
template <typename T, typename U> T atomicMin(T *at, U x) { T old = *at; *at = T(x) < old ? T(x) : old; return old; }
template <typename T, typename U> T atomicOr(T *at, U x) { T old = *at; *at = old | T(x); return old; }
template <typename T, typename U> T atomicExch(T *at, U x) { T old = *at; *at = T(x); return old; }
template <typename T> T atomicCAS(T *at, T compare, T x) { T old = *at; *at = old == compare ? x : old; return old; }
inline unsigned atomicInc(unsigned *at, unsigned most) { unsigned old = *at; *at = old >= most ? 0 : old + 1; return old; }

template <typename A, typename B> auto min(A a, B b) -> decltype(a + b) { using C = decltype(a + b); return C(a) < C(b) ? C(a) : C(b); }
template <typename A, typename B> auto max(A a, B b) -> decltype(a + b) { using C = decltype(a + b); return C(a) > C(b) ? C(a) : C(b); }

inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float fabsf(float x) { return __builtin_fabsf(x); }
inline float sqrtf(float x) { return __builtin_sqrtf(x); }
inline float rsqrtf(float x) { return 1 / __builtin_sqrtf(x); }
inline float expf(float x) { return __builtin_expf(x); }
inline float log1pf(float x) { return __builtin_log1pf(x); }
inline float exp2f(float x) { return __builtin_exp2f(x); }
inline float logf(float x) { return __builtin_logf(x); }
inline float log2f(float x) { return __builtin_log2f(x); }
inline float tanhf(float x) { return __builtin_tanhf(x); }
inline float erff(float x) { return __builtin_erff(x); }
inline float powf(float x, float y) { return __builtin_powf(x, y); }
inline float floorf(float x) { return __builtin_floorf(x); }
inline float ceilf(float x) { return __builtin_ceilf(x); }
inline float ldexpf(float x, int n) { return __builtin_ldexpf(x, n); }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }
inline float sinf(float x) { return __builtin_sinf(x); }
inline float cosf(float x) { return __builtin_cosf(x); }
inline void sincospif(float x, float *s, float *c) {
    const double half_turns = double(x) * 3.141592653589793;
    *s = float(__builtin_sin(half_turns)), *c = float(__builtin_cos(half_turns));
}
inline void sincosf(float x, float *s, float *c) { *s = __builtin_sinf(x), *c = __builtin_cosf(x); }
inline float copysignf(float x, float y) { return __builtin_copysignf(x, y); }
inline float __expf(float x) { return __builtin_expf(x); }
inline float __logf(float x) { return __builtin_logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline float rintf(float x) { return __builtin_rintf(x); }
inline double rint(double x) { return __builtin_rint(x); }
inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline double exp2(double x) { return __builtin_exp2(x); }
inline double floor(double x) { return __builtin_floor(x); }
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline unsigned __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return unsigned(((unsigned long long)high << 32 | low) >> (by & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return unsigned(((unsigned long long)high << 32 | low) << (by & 31) >> 32);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned out = 0;
    for (unsigned i = 0; i < 4; i++) {
        const unsigned s = selector >> (4 * i) & 15, byte = unsigned(both >> (8 * (s & 7))) & 255;
        out |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
    }
    return out;
}
// Dynamic shared memory begins at address 0, as on some GPUs. Static shared memory is near it, in the same library.
inline unsigned long __cvta_generic_to_shared(const void *at) { return static_cast<const unsigned char *>(at) - kvant_shared; }
template <typename T> T __ldg(const T *at) { return *at; }
template <typename T> T __ldcg(const T *at) { return *at; }
template <typename T> void __stcg(T *at, T x) { *at = x; }

inline float kvant_of_half(unsigned short bits) { return float(__builtin_bit_cast(_Float16, bits)); }
inline unsigned short kvant_to_half(float x) { return __builtin_bit_cast(unsigned short, _Float16(x)); }

inline float kvant_of_bf16(unsigned short bits) { return __uint_as_float(unsigned(bits) << 16); }

// Rounds a finite number to nearest, ties to even.
inline unsigned short kvant_to_bf16(float x) {
    const unsigned bits = __float_as_uint(x);
    return (unsigned short)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// a b + c of pairs of 16-bit floats.
template <float (*FLOAT)(unsigned short), unsigned short (*NARROW)(float)> unsigned kvant_fma(unsigned a, unsigned b, unsigned c) {
    unsigned out = 0;
    for (unsigned shift = 0; shift < 32; shift += 16) {
        const auto of = [&](unsigned pair) { return FLOAT((unsigned short)(pair >> shift)); };
        out |= unsigned(NARROW(fmaf(of(a), of(b), of(c)))) << shift;
    }
    return out;
}

// The shared memory at an address.
inline unsigned char *kvant_at(unsigned address) { return kvant_shared + int(address); }
template <typename T> void kvant_load(unsigned from, T &x) { __builtin_memcpy(&x, kvant_at(from), sizeof(T)); }
template <typename T, typename U> void kvant_load(unsigned from, T &x, U &y) {
    kvant_load(from, x);
    kvant_load(from + sizeof(T), y);
}
template <typename T> void kvant_store(unsigned to, T x) { __builtin_memcpy(kvant_at(to), &x, sizeof(T)); }
// Copies `bytes` of `size` bytes; the rest become zeros.
inline void kvant_copy(unsigned to, const unsigned char *from, unsigned size, unsigned bytes) {
    __builtin_memcpy(kvant_at(to), from, bytes);
    __builtin_memset(kvant_at(to + bytes), 0, size - bytes);
}

// A pair of 16-bit floats, with infinities replaced by the largest finite numbers.
inline unsigned kvant_made_finite(unsigned pair, unsigned infinity, unsigned largest) {
    unsigned out = 0;
    for (unsigned shift = 0; shift < 32; shift += 16) {
        const unsigned x = pair >> shift & 0xFFFF;
        out |= ((x & 0x7FFF) == infinity ? (x & 0x8000) | largest : x) << shift;
    }
    return out;
}

// c += a * b, with the operands in the layout of device/fragments.h.
template <float (*FLOAT)(unsigned short)> void kvant_mma(float (&c)[4], const unsigned (&a)[4], uint2 b) {
    const KvantLanes<uint4> rows({a[0], a[1], a[2], a[3]});
    const KvantLanes<uint2> columns(b);
    const unsigned g = kvant_lane() / 4, t = kvant_lane() % 4;
    for (unsigned half = 0; half < 2; half++) {
        for (unsigned i = 0; i < 2; i++) {
            float sum = 0;
            for (unsigned pair = 0; pair < 8; pair++) {
                const uint4 of_row = rows.of(g * 4 + pair % 4, {});
                const uint2 of_column = columns.of((2 * t + i) * 4 + pair % 4, {});
                const unsigned x = pair < 4 ? (half == 0 ? of_row.x : of_row.y) : (half == 0 ? of_row.z : of_row.w);
                const unsigned y = pair < 4 ? of_column.x : of_column.y;
                sum += FLOAT((unsigned short)x) * FLOAT((unsigned short)y);
                sum += FLOAT((unsigned short)(x >> 16)) * FLOAT((unsigned short)(y >> 16));
            }
            c[2 * half + i] += sum;
        }
    }
}

template <float (*FLOAT)(unsigned short)> void kvant_mma_alone(float (&d)[4], const unsigned (&a)[4], uint2 b) {
    d[0] = d[1] = d[2] = d[3] = 0;
    kvant_mma<FLOAT>(d, a, b);
}

// Transposes an 8 x 8 matrix: lane 4g + t has row g, columns 2t and 2t + 1.
inline unsigned kvant_transpose8(unsigned pair) {
    const KvantLanes<unsigned> lanes(pair);
    const unsigned g = kvant_lane() / 4, t = kvant_lane() % 4, shift = 16 * (g % 2);
    const unsigned low = lanes.of(2 * t * 4 + g / 2, 0) >> shift & 0xFFFF;
    return low | (lanes.of((2 * t + 1) * 4 + g / 2, 0) >> shift & 0xFFFF) << 16;
}

// Loads four matrices, whose rows are at the addresses of the lanes, in the layout of device/fragments.h.
inline uint4 kvant_load_matrices(unsigned from) {
    const KvantLanes<unsigned> rows(from);
    const unsigned g = kvant_lane() / 4, t = kvant_lane() % 4;
    unsigned words[4];
    for (unsigned i = 0; i < 4; i++) {
        kvant_load(rows.of(8 * i + g, 0) + 4 * t, words[i]);
    }
    return {words[0], words[1], words[2], words[3]};
}
inline uint4 kvant_load_matrices_transposed(unsigned from) {
    const KvantLanes<unsigned> rows(from);
    const unsigned g = kvant_lane() / 4, t = kvant_lane() % 4;
    unsigned words[4];
    for (unsigned i = 0; i < 4; i++) {
        unsigned short low, high;
        kvant_load(rows.of(8 * i + 2 * t, 0) + 2 * g, low);
        kvant_load(rows.of(8 * i + 2 * t + 1, 0) + 2 * g, high);
        words[i] = low | unsigned(high) << 16;
    }
    return {words[0], words[1], words[2], words[3]};
}

// Calls a kernel with the arguments that `args` points to.
template <unsigned... I> struct KvantIndices {};
template <typename T, T... I> struct KvantSequence { using indices = KvantIndices<I...>; };
template <typename T> struct KvantPlain { using type = T; };
template <typename T> struct KvantPlain<const T> { using type = T; };
template <typename... A, unsigned... I>
void kvant_call(void (*kernel)(A...), void **args, KvantIndices<I...>) {
    kernel(*static_cast<typename KvantPlain<A>::type *>(args[I])...);
}
template <typename... A> void kvant_call(void (*kernel)(A...), void **args) {
    kvant_call(kernel, args, typename __make_integer_seq<KvantSequence, unsigned, sizeof...(A)>::indices());
}
