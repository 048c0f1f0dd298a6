// The interface of compiled kernels and the runtime. Both sides include this file, so it includes no other header.
#pragma once
#pragma clang system_header

// One thread's view of the dispatch: the source of the values of a kernel's attributed parameters.
struct MslContext {
  char *const *buffer;                // by [[buffer(n)]]
  const unsigned long *buffer_bytes;  // from the binding's offset to its end
  char *const *threadgroup_memory;    // by [[threadgroup(n)]]
  unsigned thread_position_in_grid[3], threadgroup_position_in_grid[3], thread_position_in_threadgroup[3];
  unsigned threads_per_threadgroup[3];           // smaller at the edge of a grid that the threadgroup does not divide
  unsigned dispatch_threads_per_threadgroup[3];  // equal for all threadgroups
  unsigned threads_per_grid[3], threadgroups_per_grid[3];
  unsigned thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup;
};

// Runs once per SIMD-group function, over the 16-byte slots of the lanes in `active`; slot 32 holds a common result.
typedef void (*MslCombine)(char *slots, unsigned lanes, unsigned active);

// A lane's view of a SIMD-group function: the slots of all lanes, its own number, and the lanes that took part.
struct MslMeeting {
  const char *slots;
  unsigned lane, active;
};

// Calls that wait for other threads: never copied into a branch, and never merged with another call.
#define MSL_CONVERGENT __attribute__((convergent, nomerge))
// Marks functions that the counting build does not count.
#ifdef MSL_COUNT
#define MSL_UNCOUNTED __attribute__((noinline, section(".msl.library")))
#else
#define MSL_UNCOUNTED
#endif
extern "C" {
// Counting build: an access by a function that is not counted otherwise. `site` as in __msl_simd.
void __msl_library_access(const void *address, unsigned bytes, unsigned write, unsigned site);
// Counting build: an address of the launch, which counts as no load.
__attribute__((const)) void *__msl_buffer_argument(unsigned index);
__attribute__((const)) void *__msl_threadgroup_argument(unsigned index);
MSL_CONVERGENT void __msl_threadgroup_barrier(unsigned flags, unsigned site);
MSL_CONVERGENT void __msl_simdgroup_barrier(unsigned flags, unsigned site);
// Stores `bytes` bytes of `value` in this lane's slot, and waits for the other lanes.
MSL_CONVERGENT MslMeeting __msl_simd(const void *value, unsigned bytes, unsigned operation, MslCombine combine, unsigned site);
// The order in which the launch adds: 0 halves first, 1 lane by lane, 2 neighbours first.
unsigned __msl_sum_order(void);
unsigned __msl_lane(void);
// The threadgroup variable that `key` identifies, poisoned at the start of every threadgroup.
void *__msl_threadgroup_variable(const void *key, unsigned long bytes, const char *name);
// Poison, for a reference to a parameter that a function constant removes.
void *__msl_absent(unsigned long bytes);
// Reports a buffer that is smaller than the struct of its reference parameter.
void __msl_short_buffer(unsigned index, unsigned long bytes, unsigned long needed);
// Checker build: an atomic operation (0 load, 1 store, 2 read-modify-write).
void __msl_atomic(const void *address, unsigned bytes, unsigned kind);
}
