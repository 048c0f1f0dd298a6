// Fibers, and the places where they meet: barriers and SIMD-group functions.
//
// A fiber runs until it has to wait for others; then the schedule selects the next one. Nothing else interrupts it, so
// a kernel without a barrier sees the memory of threads that ran to their end (forward), that have not started
// (reverse), or a mixture (random).
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "state.h"

#if defined(__x86_64__)
asm(R"(
.text
.globl msl_switch
.type msl_switch, @function
msl_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
.globl msl_resume_main
.type msl_resume_main, @function
msl_resume_main:
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
#else
asm(R"(
.text
.globl msl_switch
.type msl_switch, %function
msl_switch:
  sub sp, sp, #160
  stp x29, x30, [sp]
  stp x19, x20, [sp, #16]
  stp x21, x22, [sp, #32]
  stp x23, x24, [sp, #48]
  stp x25, x26, [sp, #64]
  stp x27, x28, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
.globl msl_resume_main
.type msl_resume_main, %function
msl_resume_main:
  ldp x29, x30, [sp]
  ldp x19, x20, [sp, #16]
  ldp x21, x22, [sp, #32]
  ldp x23, x24, [sp, #48]
  ldp x25, x26, [sp, #64]
  ldp x27, x28, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#endif

static const char *const WAITS[] = {"runnable", "at a SIMD-group function", "at simdgroup_barrier", "at threadgroup_barrier", "returned", "at an access"};

static bool is_ready(const State &s, unsigned fiber) { return s.ready[fiber / 64] >> fiber % 64 & 1; }
static Wait state_of(const State &s, unsigned fiber) { return is_ready(s, fiber) ? Wait::READY : s.fibers[fiber].wait; }
static void set_waiting(State &s, Fiber &f, Wait wait) {
  f.wait = wait;
  s.ready[f.index / 64] &= ~(1ull << f.index % 64);
}
// SIMD-groups begin at multiples of 32.
static uint32_t ready_lanes(const State &s, const SimdGroup &g) { return (uint32_t)(s.ready[g.first / 64] >> g.first % 64); }
static void set_ready(State &s, const SimdGroup &g, uint32_t lanes) { s.ready[g.first / 64] |= (uint64_t)lanes << g.first % 64; }
void set_all_ready(State &s) {
  for (unsigned i = 0; i < s.threads; i += 64) s.ready[i / 64] = s.threads - i < 64 ? (1ull << (s.threads - i)) - 1 : ~0ull;
}

// The next READY fiber, or -1. Fibers of the current SIMD-group come first, then the others, in the order of the
// schedule.
static int pick(State &s) {
  unsigned words = (s.threads + 63) / 64;
  if (s.launch->schedule == RANDOM) {
    unsigned from = s.next_random() % s.threads, word = from / 64;
    uint64_t bits = s.ready[word] & ~0ull << from % 64;
    for (unsigned k = 0; k <= words; k++) {
      if (bits) return (int)(word * 64) + __builtin_ctzll(bits);
      word = word + 1 == words ? 0 : word + 1;
      bits = s.ready[word];
    }
    return -1;
  }
  bool reverse = s.launch->schedule == REVERSE;
  const Fiber &f = s.fibers[s.current];
  const SimdGroup &g = s.groups[f.simdgroup];
  if (uint32_t lanes = ready_lanes(s, g)) {
    uint32_t before = lanes & ((1u << f.lane) - 1), behind = lanes & ~((2u << f.lane) - 1);
    if (reverse) return (int)g.first + 31 - __builtin_clz(before ? before : lanes);
    return (int)g.first + __builtin_ctz(behind ? behind : lanes);
  }
  for (unsigned k = 0; k < words; k++) {
    unsigned word = reverse ? words - 1 - k : k;
    if (uint64_t bits = s.ready[word]) return (int)(word * 64) + (reverse ? 63 - __builtin_clzll(bits) : __builtin_ctzll(bits));
  }
  return -1;
}

static void go(State &s, int to) {
  int from = s.current;
  if (to == from) return;
  s.current = to;
  s.stats.switches++;
  msl_switch(&s.fibers[from].stack_pointer, s.fibers[to].stack_pointer);
}
// After a release: under the random schedule, another thread may continue before the last one to arrive.
static void yield_if_random(State &s) {
  if (s.launch->schedule != RANDOM) return;
  int i = pick(s);
  if (i >= 0) go(s, i);
}

// Describes the waiting threads for a report of divergence, e.g. "40 threads at threadgroup_barrier, line 6 (the first
// is thread 0)".
static void describe(const State &s, char *text, size_t size) {
  struct Party { Wait wait; uint64_t path; unsigned line, count, first; } parties[6];
  unsigned n = 0;
  for (unsigned i = 0; i < s.threads; i++) {
    const Fiber &f = s.fibers[i];
    Wait wait = state_of(s, i);
    unsigned j = 0;
    while (j < n && !(parties[j].wait == wait && (wait == Wait::DONE || wait == Wait::READY || parties[j].path == f.path))) j++;
    if (j == 6) continue;
    if (j == n) parties[n++] = {wait, f.path, f.site >> 10, 0, i};
    parties[j].count++;
  }
  size_t at = 0;
  text[0] = 0;
  for (unsigned j = 0; j < n && at < size; j++) {
    const Party &p = parties[j];
    at += (size_t)snprintf(text + at, size - at, "%s%u threads %s", j ? "; " : "", p.count, WAITS[(int)p.wait]);
    if (p.wait != Wait::DONE && p.wait != Wait::READY && at < size) at += (size_t)snprintf(text + at, size - at, ", line %u", p.line);
    if (at < size) at += (size_t)snprintf(text + at, size - at, " (the first is thread %u)", p.first);
  }
}
[[noreturn]] static void diverged(State &s, const char *what) {
  char who[400];
  describe(s, who, sizeof who);
  // Reports the place of a waiting thread, even if the current one does not wait.
  auto waits = [&](unsigned i) { return state_of(s, i) != Wait::DONE && state_of(s, i) != Wait::READY; };
  for (unsigned i = 0; i < s.threads && !waits((unsigned)s.current); i++)
    if (waits(i)) s.current = (int)i;
  fatal(s, DIVERGENCE, state_of(s, (unsigned)s.current) == Wait::DONE ? 0 : s.fibers[s.current].pc, "%s: %s", what, who);
}

// Lanes in lockstep: lanes at the first access continue. That is the access deepest in calls, then the one with the
// lowest address. Lanes in a loop therefore come before lanes that have left it, and all meet after it.
static bool advance(State &s, SimdGroup &g) {
  const Fiber *first = nullptr;
  for (unsigned i = g.first; i < g.first + g.lanes; i++) {
    const Fiber &f = s.fibers[i];
    if (f.wait == Wait::ACCESS && (!first || f.depth > first->depth || (f.depth == first->depth && f.pc < first->pc))) first = &f;
  }
  if (!first) return false;
  size_t depth = first->depth;
  uintptr_t pc = first->pc;
  for (unsigned i = 0; i < g.lanes; i++) {
    const Fiber &f = s.fibers[g.first + i];
    if (f.wait == Wait::ACCESS && f.depth == depth && f.pc == pc) set_ready(s, g, 1u << i);
  }
  return true;
}

// Called if no lane of a SIMD-group can run. All lanes must be at one place. With divergence allowed, lanes at the
// first place in the source continue, because MSL defines SIMD-group functions over the active lanes.
static bool settle(State &s, SimdGroup &g) {
  if (ready_lanes(s, g)) return false;
  if (s.launch->lockstep && advance(s, g)) return true;
  const Fiber *first = nullptr;
  uint32_t active = 0, full = g.lanes == 32 ? ~0u : (1u << g.lanes) - 1;
  if (g.alike == g.lanes) {
    first = &s.fibers[g.first];
    active = full;
  } else {
    for (unsigned i = g.first; i < g.first + g.lanes; i++) {
      const Fiber &f = s.fibers[i];
      if ((f.wait == Wait::SIMD || f.wait == Wait::SIMD_BARRIER) && (!first || f.site < first->site)) first = &f;
    }
    if (!first) return false;
    for (unsigned i = 0; i < g.lanes; i++) {
      const Fiber &f = s.fibers[g.first + i];
      if (f.wait == first->wait && f.operation == first->operation && f.path == first->path) active |= 1u << i;
    }
    if (active != full && !s.launch->allow_divergence) diverged(s, "divergence inside a SIMD-group");
  }
  if (s.counting) {
    end_interval(s, (unsigned)(&g - s.groups));
    if (first->wait == Wait::SIMD_BARRIER) count_barrier(s, false);
    else count_together(s, first->operation, first->value_bytes);
  }
  char *slots = g.slots[g.parity];
  g.parity ^= 1;
  g.alike = 0;
  // The other lanes take part in a later function, which uses the other set of slots.
  for (unsigned i = 0; active != full && i < g.lanes; i++)
    if (!(active >> i & 1)) memcpy(g.slots[g.parity] + 16 * i, slots + 16 * i, 16);
  if (first->combine) first->combine(slots, g.lanes, active);
  if (first->wait == Wait::SIMD_BARRIER && active == full) {
    if (first->operation & FLAG_THREADGROUP) g.epoch[0]++;
    if (first->operation & FLAG_DEVICE) g.epoch[1]++;
    g.any_epoch++;
  }
  g.active = active;
  g.result = slots;
  set_ready(s, g, active);
  return true;
}

// Blocks this fiber: releases its SIMD-group if it was the last one, then runs the next ready fiber.
static void block(State &s) {
  if (s.pending.address) judge(s);
  settle(s, s.groups[s.fibers[s.current].simdgroup]);
  if (is_ready(s, (unsigned)s.current)) return yield_if_random(s);
  int next = pick(s);
  if (next < 0) diverged(s, "not every thread reaches the same barrier");
  go(s, next);
}

void step(State &s, uintptr_t pc) {
  Fiber &f = s.fibers[s.current];
  f.pc = pc;
  f.depth = (size_t)(f.top - (char *)__builtin_frame_address(0));
  set_waiting(s, f, Wait::ACCESS);
  block(s);
}

// Hashes the return addresses up to the entry point of the kernel. Kernels are compiled with frame pointers. Other
// fibers have evicted the frames from the cache, so it reads only the necessary ones.
__attribute__((always_inline)) static inline void mark_place(State &s, Fiber &f, void **frame) {
  uint64_t path = 1469598103934665603ull;
  f.pc = (uintptr_t)frame[1] - 1;
  for (int depth = 0; depth < 24; depth++) {
    void **caller = (void **)frame[0];
    // If the caller is fiber_main, this frame is the entry point's. Its distance from the top is equal for all stacks.
    if (f.top - (char *)caller == s.main_frame) {
      s.entry_frame = f.top - (char *)frame;
      break;
    }
    path = (path ^ (uint64_t)frame[1]) * 1099511628211ull;
    if (!caller || f.top - (char *)caller == s.entry_frame) break;
    frame = caller;
  }
  f.path = path;
}

// A lane has arrived at a SIMD-group function or barrier.
static void arrive(State &s, SimdGroup &g, Fiber &f, Wait wait) {
  s.stats.rendezvous++;
  set_waiting(s, f, wait);
  if (g.alike == 0) {
    g.wait = wait;
    g.operation = f.operation;
    g.path = f.path;
    g.alike = 1;
  } else if (g.wait == wait && g.operation == f.operation && g.path == f.path) {
    g.alike++;
  }
}

extern "C" __attribute__((noinline)) MslMeeting __msl_simd(const void *value, unsigned bytes, unsigned operation, MslCombine combine, unsigned site) {
  State &s = *running;
  Fiber &f = s.fibers[s.current];
  mark_place(s, f, (void **)__builtin_frame_address(0));
  f.operation = operation;
  f.site = site;
  f.combine = combine;
  f.value_bytes = bytes;
  SimdGroup &g = s.groups[f.simdgroup];
  char *slot = g.slots[g.parity] + 16 * f.lane;
  switch (bytes) {  // of a constant size: no call
    case 4: memcpy(slot, value, 4); break;
    case 16: memcpy(slot, value, 16); break;
    default: memcpy(slot, value, bytes);
  }
  if (operation >= 80 && operation < 90 && g.lanes < SIMD_WIDTH)
    fatal(s, DIVERGENCE, f.pc, "a simdgroup_matrix function in a SIMD-group of %u threads: it needs all 32", g.lanes);
  arrive(s, g, f, Wait::SIMD);
  block(s);
  return {g.result, f.lane, g.active};
}
extern "C" __attribute__((noinline)) void __msl_simdgroup_barrier(unsigned flags, unsigned site) {
  State &s = *running;
  Fiber &f = s.fibers[s.current];
  mark_place(s, f, (void **)__builtin_frame_address(0));
  f.operation = flags;
  f.site = site;
  f.combine = nullptr;
  arrive(s, s.groups[f.simdgroup], f, Wait::SIMD_BARRIER);
  block(s);
}
extern "C" __attribute__((noinline)) void __msl_threadgroup_barrier(unsigned flags, unsigned site) {
  State &s = *running;
  Fiber &f = s.fibers[s.current];
  mark_place(s, f, (void **)__builtin_frame_address(0));
  f.operation = flags;
  f.site = site;
  s.stats.rendezvous++;
  set_waiting(s, f, Wait::BARRIER);
  if (s.at_barrier == 0) {
    s.barrier_path = f.path;
    s.barriers_differ = false;
  }
  s.barriers_differ |= s.barrier_path != f.path;
  if (++s.at_barrier < s.threads) return block(s);
  if (s.barriers_differ) diverged(s, "threads wait at different barriers");
  s.at_barrier = 0;
  if (s.counting) {
    for (unsigned i = 0; i < s.simdgroups; i++) end_interval(s, i);
    count_barrier(s, true);
  }
  if (flags & FLAG_THREADGROUP) s.epoch[0]++;
  if (flags & FLAG_DEVICE) s.epoch[1]++;
  s.any_epoch++;
  set_all_ready(s);
  yield_if_random(s);
}
extern "C" unsigned __msl_lane() { return running->fibers[running->current].lane; }

static void fiber_main() {
  State &s = *running;
  s.main_frame = s.fibers[s.current].top - (char *)__builtin_frame_address(0);
  s.launch->entry(&s.fibers[s.current].context);
  if (s.pending.address) judge(s);
  Fiber &f = s.fibers[s.current];
  set_waiting(s, f, Wait::DONE);
  settle(s, s.groups[f.simdgroup]);
  int next = pick(s);
  void *abandoned;
  if (next >= 0) {
    s.current = next;
    s.stats.switches++;
    msl_switch(&abandoned, s.fibers[next].stack_pointer);
  }
  for (unsigned i = 0; i < s.threads; i++)
    if (s.fibers[i].wait != Wait::DONE) diverged(s, "some threads returned while others wait");
  msl_switch(&abandoned, s.main_stack);
  __builtin_unreachable();
}
void start_fiber(State &s, unsigned index) {
  Fiber &f = s.fibers[index];
  f.operation = f.site = 0;
  f.path = 0;
  // Stacks begin at multiples of a page: tops at equal offsets would share a few sets of the cache.
  f.top = f.stack + STACK - 64 * (5 * index % 64);
  f.stack_pointer = first_frame(f.top, fiber_main);
}
void run_threadgroup(State &s) {
  unsigned n = s.threads;
  s.current = s.launch->schedule == REVERSE ? (int)n - 1 : s.launch->schedule == RANDOM ? (int)(s.next_random() % n) : 0;
  msl_switch(&s.main_stack, s.fibers[s.current].stack_pointer);
  for (unsigned i = 0; i < s.simdgroups; i++) end_interval(s, i);
  s.current = -1;
}
