// The counting build: the instructions and accesses of the SIMD-groups of a dispatch, as a GPU would issue them.
//
// The compiler's output has a call of __msl_block at the start of every basic block, and of __msl_access before every
// access of memory (src/count/ir.rs). Threads run one after another here, while a GPU's SIMD-group issues an
// instruction once for all of its lanes. Between two places where the lanes meet, the count of a block is therefore its
// maximum number of runs by a lane, and the n-th accesses of an instruction by all lanes count as one.
#include <algorithm>
#include <stdarg.h>
#include "state.h"

constexpr unsigned SECTOR = 32, BANKS = 32, BANK_BYTES = 4;

// Memory that one instruction accessed, lane by lane.
struct Together {
  uint32_t lanes;
  uint32_t bytes, write;
  uint64_t address[SIMD_WIDTH];
};
struct Runs {
  uint32_t interval, times;
};
// A SIMD-group in the interval between two places where its lanes meet.
struct Interval {
  uint32_t number = 1;
  std::vector<Runs> longest;                 // by block: the runs of the lane that ran it most
  std::vector<Runs> of_lane;                 // by lane and block
  std::vector<Runs> accesses_of_lane;        // by lane and site
  std::vector<std::vector<Together>> sites;  // by site
  std::vector<uint32_t> touched;             // the sites that are not empty
};
struct Counting {
  MslCounts *out;
  std::vector<Interval> groups;
};

void begin_counting(State &s) {
  if (!s.launch->counts) return;
  s.counting = new Counting{s.launch->counts, {}};
}

static Interval &interval_of(State &s, unsigned group) {
  Counting &c = *s.counting;
  if (c.groups.size() <= group) c.groups.resize(group + 1);
  Interval &i = c.groups[group];
  if (i.longest.empty()) {
    i.longest.resize(c.out->blocks + 1);
    i.of_lane.resize((size_t)(c.out->blocks + 1) * SIMD_WIDTH);
    i.accesses_of_lane.resize((size_t)(c.out->sites + 1) * SIMD_WIDTH);
    i.sites.resize(c.out->sites + 1);
  }
  return i;
}

static uint32_t &times(Runs &r, uint32_t interval) {
  if (r.interval != interval) r = {interval, 0};
  return r.times;
}

extern "C" void __msl_block(uint32_t block) {
  State &s = *running;
  if (!s.counting) return;
  const Fiber &f = s.fibers[s.current];
  Interval &i = interval_of(s, f.simdgroup);
  MslCounts &out = *s.counting->out;
  uint32_t &mine = times(i.of_lane[(size_t)block * SIMD_WIDTH + f.lane], i.number), &longest = times(i.longest[block], i.number);
  out.block_lanes[block]++;
  if (++mine > longest) {
    longest = mine;
    out.block_issues[block]++;
  }
}

extern "C" void __msl_access(char *address, uint32_t bytes, uint32_t write, uint32_t site) {
  State &s = *running;
  if (!s.counting) return;
  const Fiber &f = s.fibers[s.current];
  Interval &i = interval_of(s, f.simdgroup);
  uint32_t at = times(i.accesses_of_lane[(size_t)site * SIMD_WIDTH + f.lane], i.number)++;
  std::vector<Together> &list = i.sites[site];
  if (list.empty()) i.touched.push_back(site);
  if (list.size() <= at) list.resize(at + 1);
  Together &t = list[at];
  t.lanes |= 1u << f.lane;
  t.bytes = bytes;
  t.write = write;
  t.address[f.lane] = (uint64_t)address;
}
// Accesses of any length, in pieces of at most 16 bytes, as on a GPU.
extern "C" void __msl_access_many(char *address, uint64_t bytes, uint32_t write, uint32_t site) {
  for (uint64_t at = 0; at < bytes; at += 16) __msl_access(address + at, (uint32_t)std::min<uint64_t>(16, bytes - at), write, site);
}

// All library accesses of a launch are one site: the lanes make them together, after they have met.
extern "C" void __msl_library_access(const void *address, unsigned bytes, unsigned write, unsigned) {
  State &s = *running;
  if (s.counting) __msl_access((char *)address, bytes, write, s.counting->out->sites);
}
// A missing buffer may be read before the kernel checks.
extern "C" void *__msl_buffer_argument(unsigned index) { return running->buffers[index] ? running->buffers[index] : absent; }
extern "C" void *__msl_threadgroup_argument(unsigned index) { return running->threadgroup_memory[index]; }

// Distinct values of `count`.
static unsigned distinct(uint64_t *values, unsigned count) {
  std::sort(values, values + count);
  return (unsigned)(std::unique(values, values + count) - values);
}

static void touch(Bound &b, uint64_t from, uint64_t to, bool write) {
  std::vector<uint64_t> &bits = b.sectors[write];
  if (bits.empty()) bits.resize((b.region->capacity / SECTOR + 2 + 63) / 64);
  // Sectors begin at multiples of their size. A region ends at a multiple, and its capacity is a multiple.
  uint64_t base = (uint64_t)b.region->base / SECTOR;
  for (uint64_t sector = from / SECTOR; sector <= (to - 1) / SECTOR; sector++) bits[(sector - base) / 64] |= 1ull << (sector - base) % 64;
}

static void settle_access(State &s, uint32_t site, const Together &t) {
  MslCounts &out = *s.counting->out;
  MslSite &counts = out.by_site[site];
  unsigned lanes = (unsigned)__builtin_popcount(t.lanes);
  char *first = (char *)t.address[__builtin_ctz(t.lanes)];
  Bound *b = s.find(first);
  uint32_t space = PRIVATE;
  if (b) {
    const bool is_constant = !b->extents.empty() && (b->extents[0].access & CONSTANT);
    space = b->threadgroup ? THREADGROUP : is_constant ? CONSTANTS : DEVICE;
  } else if (first >= s.image[0] && first < s.image[1]) {
    space = CONSTANTS;
  }
  MslTraffic &traffic = counts.spaces[space];
  traffic.issues++;
  traffic.bytes += (uint64_t)lanes * t.bytes;
  if (space == PRIVATE) return;
  uint64_t list[SIMD_WIDTH * 8];
  unsigned n = 0;
  if (space == THREADGROUP) {
    // Lanes that read one word share its bank. The minimum number of cycles keeps all banks busy.
    for (unsigned lane = 0; lane < SIMD_WIDTH; lane++)
      if (t.lanes >> lane & 1)
        for (uint64_t word = t.address[lane] / BANK_BYTES; word <= (t.address[lane] + t.bytes - 1) / BANK_BYTES && n < SIMD_WIDTH * 8; word++) list[n++] = word;
    n = distinct(list, n);
    unsigned banks[BANKS] = {}, cycles = 0;
    for (unsigned i = 0; i < n; i++) cycles = std::max(cycles, ++banks[list[i] % BANKS]);
    traffic.units += cycles;
    traffic.ideal += (n + BANKS - 1) / BANKS;
    return;
  }
  for (unsigned lane = 0; lane < SIMD_WIDTH; lane++)
    if (t.lanes >> lane & 1) {
      uint64_t from = t.address[lane], to = from + t.bytes;
      for (uint64_t sector = from / SECTOR; sector <= (to - 1) / SECTOR && n < SIMD_WIDTH * 8; sector++) list[n++] = sector;
      if (space == DEVICE && b->region->contains((char *)from)) touch(*b, from, to, t.write);
    }
  n = distinct(list, n);
  traffic.units += n;
  traffic.ideal += std::max<unsigned>(1, (lanes * t.bytes + SECTOR - 1) / SECTOR);
}

void end_interval(State &s, unsigned group) {
  if (!s.counting || s.counting->groups.size() <= group) return;
  Interval &i = s.counting->groups[group];
  i.number++;
  for (uint32_t site : i.touched) {
    for (const Together &t : i.sites[site])
      if (t.lanes) settle_access(s, site, t);
    i.sites[site].clear();
  }
  i.touched.clear();
}

void count_together(State &s, unsigned operation, unsigned bytes) {
  if (!s.counting) return;
  MslCounts &out = *s.counting->out;
  // Registers have 32 bits.
  uint64_t words = std::max(1u, (bytes + 3) / 4);
  if (operation < 20) out.reductions += words;
  else if (operation < 40) out.scans += words;
  else if (operation < 60) out.shuffles += words;
  else if (operation < 80) out.quads += words;
  else if (operation == 80) out.matrix_loads++;
  else if (operation == 81) out.matrix_stores++;
  else if (operation < 90) out.matrix_products++;
  else out.votes++;
}
void count_barrier(State &s, bool of_threadgroup) {
  if (!s.counting) return;
  MslCounts &out = *s.counting->out;
  if (of_threadgroup) out.barriers += s.simdgroups;
  else out.simdgroup_barriers++;
}

void end_counting(State &s) {
  if (!s.counting) return;
  MslCounts &out = *s.counting->out;
  for (Bound *b : s.bounds)
    for (int write = 0; write < 2; write++)
      for (uint64_t bits : b->sectors[write]) (write ? out.footprint_written : out.footprint_read) += SECTOR * (uint64_t)__builtin_popcountll(bits);
  out.threadgroup_bytes = s.threadgroup_bytes;
  delete s.counting;
  s.counting = nullptr;
}
