// The state of a dispatch: fibers, SIMD-groups, accessible memory, findings.
#pragma once
#include <setjmp.h>
#include <vector>
#include "../include/msl/context.h"
#include "abi.h"
#include "machine.h"

constexpr unsigned MAX_THREADS = 1024, SIMD_WIDTH = 32, MAX_BINDINGS = 31;
constexpr size_t THREADGROUP_LIMIT = 32 << 10;  // bytes, of threadgroup arguments and variables together
extern const size_t PAGE;  // of the system
constexpr size_t STACK = 256 << 10, GUARD = 16 << 20;
constexpr unsigned FLAG_DEVICE = 1, FLAG_THREADGROUP = 2;  // of metal::mem_flags

struct Region {
  char *map;            // guard, data, guard
  size_t map_bytes;
  char *base;
  size_t bytes, capacity;  // the data ends `capacity` bytes before the guard; the bytes from `bytes` to there are slack
  bool contains(const char *p) const { return p >= map && p < map + map_bytes; }
  void poison() const;
  // Offset of the first slack byte that lost its poison, or capacity + 1 if none did.
  long damage() const;
};

enum class Wait : uint8_t { READY, SIMD, SIMD_BARRIER, BARRIER, DONE, ACCESS };

struct alignas(64) Fiber {
  void *stack_pointer;
  Wait wait;  // the place where it waits, or READY
  unsigned index, simdgroup, lane;
  unsigned operation, site, value_bytes;  // the function it waits at, and its position in the source (line << 10 | column)
  uint64_t path;                          // the chain of return addresses: two inlined copies of one source line are two places
  uintptr_t pc;
  MslCombine combine;
  // Fields that are read often come before this one, in one cache line.
  char *stack, *top;
  size_t depth;  // of the stack, at an access
  MslContext context;
};

struct SimdGroup {
  unsigned first, lanes;
  uint32_t epoch[2];  // of simdgroup barriers, [0] for threadgroup and [1] for device memory
  uint32_t any_epoch; // of all of them
  // The place of the first lane that has arrived since the group last continued, and the number of lanes at that place.
  unsigned alike, operation;
  Wait wait;
  uint64_t path;
  unsigned active;     // lanes of the last function
  const char *result;  // its slots
  int parity;
  alignas(64) char slots[2][33 * 16];  // two sets: a fast lane may be at the next function while a slow one still reads
};

// One earlier access to a byte. A threadgroup's serial number is never used twice, so a stale cell needs no clearing.
struct Trace { uint32_t serial, epoch, simd_epoch, pc; uint16_t thread, atomic; };
struct Cell { Trace write, read[2]; };
// The cells of CHUNK bytes: one cell for `1 << log` bytes, as long as every access has touched whole cells.
constexpr size_t CHUNK = 256;
constexpr unsigned WIDEST_CELL = 2;
struct Chunk { unsigned log; Cell cells[CHUNK]; };

struct Extent { uint64_t offset, bytes; uint32_t access, index; };
// A region of the running dispatch.
struct Bound {
  Region *region;
  bool threadgroup, owned;  // owned: made for this dispatch
  char name[48];
  std::vector<Extent> extents;
  Chunk **chunks;  // checker only, for regions that can be written; null until a chunk is accessed
  std::vector<uint64_t> sectors[2];  // counting only: those that were read and written, a bit each
  bool writable;
};

// A possible race of two writes. It is no race if the second one writes an equal value, which is known only afterwards.
struct Pending {
  char *address;
  size_t bytes;
  const Bound *bound;
  uintptr_t pc;
  Trace other;
  long byte;
  char before[16];
};

struct ThreadgroupVariable { const void *key; Bound *bound; uint32_t serial; };

struct Counting;

struct State {
  void *main_stack;
  int current = -1;
  Fiber fibers[MAX_THREADS];
  SimdGroup groups[MAX_THREADS / SIMD_WIDTH];
  uint64_t ready[MAX_THREADS / 64];  // the fibers that can run, a bit each
  unsigned threads, simdgroups, at_barrier;
  uint64_t barrier_path;  // of the first thread at the barrier
  ptrdiff_t main_frame, entry_frame;  // from the top of a stack: the frames of fiber_main and of the kernel's entry point
  bool barriers_differ;
  uint32_t epoch[2], any_epoch;  // of threadgroup barriers
  uint32_t serial, first_serial;
  char *stacks;
  void *signal_stack;

  const MslLaunch *launch;
  uint64_t random;
  bool stop;
  std::vector<uint32_t> order;      // linear threadgroup numbers as they run
  std::vector<Bound *> bounds;
  Bound *last_bound;
  std::vector<ThreadgroupVariable> variables;
  Counting *counting = nullptr;
  // Memory of chunks and of threadgroups, kept for later dispatches.
  std::vector<char *> arenas;
  size_t chunks_used = 0;
  std::vector<Region *> spare;
  Pending pending;  // of the thread that runs; null address if none
  size_t threadgroup_bytes;
  char *image[2], *thread_locals[2];  // of the kernel's library
  std::vector<MslFinding> findings;
  MslStats stats;
  // The addresses of the kernel's arguments; stored here, because the checker lets a kernel read its State.
  char *buffers[MAX_BINDINGS], *threadgroup_memory[MAX_BINDINGS];
  uint64_t buffer_bytes[MAX_BINDINGS];

  unsigned next_random() {
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    return (unsigned)(random >> 20);
  }
  // The bound region that holds an address, or null. Accesses come in runs, so the last answer is tried first.
  Bound *find(const char *address) {
    if (last_bound && last_bound->region->contains(address)) return last_bound;
    return find_among_all(address);
  }
  Bound *find_among_all(const char *address);
  Bound *bind(Region *region, const char *name, bool threadgroup, bool owned);
  // Poisoned memory, which release_bounds releases if it is bound as owned. Null if memory is exhausted.
  Region *take_region(size_t bytes);
  // The cells of an offset into a bound region; null if memory is exhausted.
  Chunk *chunk(Bound &b, size_t offset);
  void release_bounds();
  void release_memory();
  // Adds a finding, or counts it if one of the same kind and place exists.
  void report(Kind kind, uintptr_t pc, uintptr_t other_pc, const char *format, va_list arguments);
};

// The memory behind a reference to a parameter that does not exist.
constexpr size_t ABSENT = 64 << 10;
extern char absent[ABSENT];

extern thread_local State *running;  // null outside of a dispatch

// Records a finding and leaves the dispatch. Only from a fiber.
[[noreturn]] void fatal(State &s, Kind kind, uintptr_t pc, const char *format, ...) __attribute__((format(printf, 4, 5)));
void note(State &s, Kind kind, uintptr_t pc, uintptr_t other_pc, const char *format, ...) __attribute__((format(printf, 5, 6)));

// schedule.cpp
void start_fiber(State &s, unsigned index);
void set_all_ready(State &s);
void run_threadgroup(State &s);
// Lockstep: waits until the other lanes are at this access, too, or cannot reach it earlier.
void step(State &s, uintptr_t pc);
// Reports the pending race, or discards it.
void judge(State &s);

// count.cpp: all without effect unless the launch counts.
void begin_counting(State &s);
void end_counting(State &s);
// The lanes of a SIMD-group have met.
void end_interval(State &s, unsigned group);
void count_together(State &s, unsigned operation, unsigned bytes);
void count_barrier(State &s, bool of_threadgroup);
