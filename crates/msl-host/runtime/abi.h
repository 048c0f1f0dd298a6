// The interface of the Rust side and the runtime. src/runtime.rs declares the same types; change both together.
#pragma once
#include <stddef.h>
#include <stdint.h>

struct Region;  // a block of memory between guard pages
struct State;   // one dispatch at a time; a pool on the Rust side lets several run on several OS threads

enum Access : uint32_t { READ = 1, WRITE = 2, CONSTANT = 4 };
enum Schedule : uint32_t { FORWARD, REVERSE, RANDOM };
enum Kind : uint32_t {
  OUT_OF_BOUNDS, UNDECLARED_ACCESS, UNINITIALISED_READ, RACE, DIVERGENCE, TIME_LIMIT, STACK_OVERFLOW, ARITHMETIC, MISALIGNED, LIMIT
};

// A buffer binding as part of a region: the range that the kernel may access, and how.
struct MslExtent { Region *region; uint64_t offset, bytes; uint32_t access, index; };

// Counting build (count.cpp): accesses of SIMD-groups to the memory of a space.
enum Space : uint32_t { DEVICE, THREADGROUP, CONSTANTS, PRIVATE, SPACES };
struct MslTraffic {
  uint64_t issues;  // instructions of SIMD-groups
  uint64_t bytes;   // requested by lanes
  uint64_t units;   // device, constants: sectors of 32 bytes; threadgroup: cycles of 32 banks
  uint64_t ideal;   // minimum units
};
struct MslSite { MslTraffic spaces[SPACES]; };
struct MslCounts {
  uint32_t blocks, sites;
  uint64_t *block_issues, *block_lanes;  // by block: instructions of SIMD-groups, of threads
  MslSite *by_site;
  uint64_t simdgroups, barriers, simdgroup_barriers, reductions, scans, shuffles, quads, votes;
  uint64_t matrix_loads, matrix_stores, matrix_products;
  uint64_t footprint_read, footprint_written;  // bytes of device memory, in whole sectors, each once
  uint64_t threadgroup_bytes;
};

struct MslLaunch {
  void (*entry)(const struct MslContext *);
  const char *kernel;
  const MslExtent *extents;
  uint64_t extent_count;
  uint64_t threadgroup_bytes[31];
  uint32_t groups[3], threads[3];
  uint32_t total[3];  // threads of the whole grid; fewer than groups * threads where the edge is cut off
  uint32_t schedule, allow_divergence;
  uint32_t flush;      // subnormal floats are zero
  uint32_t sum_order;  // of simd_sum and of products of matrices: msl_host::SumOrder
  uint32_t lockstep;   // checker build: the lanes of a SIMD-group access memory together
  uint32_t same_values;  // checker build: writes of equal values to one byte do not race
  uint32_t reads_end;  // a barrier without a memory flag orders earlier reads before later writes
  uint64_t seed;
  MslCounts *counts;  // or null
  uint32_t time_limit_ms;
};

struct MslFinding {
  uint32_t kind, line;        // line: where the runtime knows it itself, else 0
  uint64_t pc, other_pc;      // of the access, and of the one it conflicts with; 0 if unknown
  uint32_t group[3], thread, simdgroup, lane, has_thread;
  uint64_t count;
  char text[500];
};

struct MslStats { uint64_t threads, switches, rendezvous; };

extern "C" {
Region *msl_region_new(uint64_t bytes, bool zeroed);
void msl_region_free(Region *);
char *msl_region_base(Region *);
State *msl_state_new();
void msl_state_free(State *);
// Runs a launch to its end or its first fatal finding. Returns the number of findings.
uint64_t msl_dispatch(State *, const MslLaunch *, MslStats *);
const MslFinding *msl_finding(State *, uint64_t index);
}
