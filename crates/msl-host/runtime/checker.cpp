// The checker build: clang's thread-sanitizer instrumentation calls these hooks before every access of memory that is
// not a local variable. They check bounds, declared access, initialisation and races; no sanitizer runtime is involved.
//
// Two accesses of one byte by two threads of a threadgroup are ordered if a threadgroup_barrier with the right flag is
// between them, or, within a SIMD-group, a simdgroup_barrier. Accesses of two threadgroups are never ordered within a
// dispatch. Unordered accesses race if one of them writes, unless both are atomic. The rule does not depend on the
// schedule: a race is found even in a run where it did no harm.
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "state.h"

// Memory that no launch describes but a kernel may access: locals, the library's constants, the results of SIMD-group
// functions.
static bool private_memory(const State &s, const char *p) {
  if (p >= s.stacks && p < s.stacks + MAX_THREADS * (STACK + PAGE)) return true;
  if (p >= s.image[0] && p < s.image[1]) return true;
  if (p >= absent && p < absent + ABSENT) return true;
  if (p >= s.thread_locals[0] && p < s.thread_locals[1]) return true;
  return p >= (const char *)&s && p < (const char *)(&s + 1);
}

static void race(State &s, const Bound &b, uintptr_t pc, const Trace &other, const char *mine, const char *theirs, long byte) {
  uint32_t linear = s.order[other.serial - s.first_serial];
  char whose[80] = "";
  if (other.serial != s.serial) {
    const uint32_t *g = s.launch->groups;
    snprintf(whose, sizeof whose, " of threadgroup (%u,%u,%u)", linear % g[0], linear / g[0] % g[1], linear / g[0] / g[1]);
  }
  uintptr_t other_pc = other.pc ? (uintptr_t)s.image[0] + other.pc : 0;
  note(s, RACE, pc, other_pc, "race: %s of byte %ld of %s, which thread %u%s %s with no barrier between", mine, byte, b.name, other.thread, whose, theirs);
}

void judge(State &s) {
  Pending p = s.pending;
  s.pending.address = nullptr;
  if (p.address && memcmp(p.address, p.before, p.bytes)) race(s, *p.bound, p.pc, p.other, "write", "wrote", p.byte);
}

struct Use { bool write, atomic; };

// Splits cells: each smaller cell gets the bytes of the larger one.
static void split(Chunk &c, unsigned log) {
  unsigned shift = c.log - log;
  for (size_t i = CHUNK >> log; i-- > 0;) c.cells[i] = c.cells[i >> shift];
  c.log = log;
}

static void check(char *address, size_t bytes, Use use, uintptr_t pc) {
  State *state = running;
  if (!state || state->current < 0) return;
  State &s = *state;
  if (s.pending.address) judge(s);
  const char *verb = use.write ? "write" : "read";
  Bound *b = s.last_bound;
  if (!b || !b->region->contains(address)) {
    if (private_memory(s, address)) return;
    b = s.find(address);
    if (!b) fatal(s, OUT_OF_BOUNDS, pc, "%s of %zu bytes at %p, which is in no bound buffer", verb, bytes, (void *)address);
  }
  long offset = address - b->region->base;
  const Extent *within = nullptr, *readable = nullptr;  // an extent that covers the access; one that also permits it
  for (const Extent &e : b->extents)
    if (offset >= (long)e.offset && (uint64_t)offset + bytes <= e.offset + e.bytes) {
      within = &e;
      if (use.write ? e.access & WRITE : e.access & READ) { readable = &e; break; }
    }
  if (!within) {
    const Extent &e = b->extents[0];
    fatal(s, OUT_OF_BOUNDS, pc, "out-of-bounds %s of %zu bytes at byte offset %ld of %s, which has %lu bytes", verb, bytes, offset - (long)e.offset, b->name, (unsigned long)e.bytes);
  }
  if (use.write && !readable) fatal(s, UNDECLARED_ACCESS, pc, "write to byte %ld of buffer(%u), which the launch declares read-only", offset - (long)within->offset, within->index);
  if (!b->writable) return;
  if (s.launch->lockstep) step(s, pc);
  // Threadgroup memory and buffers declared write-only are uninitialised until the kernel writes them.
  const bool of_group = b->threadgroup, fresh = of_group || !readable, lockstep = s.launch->lockstep;
  const Fiber &f = s.fibers[s.current];
  const SimdGroup &g = s.groups[f.simdgroup];
  const int space = of_group ? 0 : 1;
  const uint32_t serial = s.serial, first_serial = s.first_serial, thread = f.index, simdgroup = f.simdgroup;
  // The barriers that order an access: those with the flag of its space; for a read, if the launch requests it, all of
  // them.
  struct Clock { uint32_t epoch, simd_epoch; };
  const Clock of_writes = {s.epoch[space], g.epoch[space]}, of_reads = s.launch->reads_end ? Clock{s.any_epoch, g.any_epoch} : of_writes;
  // Whether the trace belongs to this dispatch, and, in threadgroup memory, to this threadgroup.
  auto current = [=](const Trace &t) { return of_group ? t.serial == serial : t.serial >= first_serial; };
  auto ordered = [=](const Trace &t, const Clock &now) {
    if (t.serial != serial) return false;
    if (t.thread == thread || t.epoch != now.epoch) return true;
    return t.thread / SIMD_WIDTH == simdgroup && (lockstep || t.simd_epoch != now.simd_epoch);
  };
  const uint32_t short_pc = pc >= (uintptr_t)s.image[0] && pc < (uintptr_t)s.image[1] ? (uint32_t)(pc - (uintptr_t)s.image[0]) : 0;
  const Clock now = use.write ? of_writes : of_reads;
  const Trace mine = {serial, now.epoch, now.simd_epoch, short_pc, (uint16_t)thread, use.atomic};
  const size_t end = (size_t)offset + bytes;
  for (size_t at = (size_t)offset; at < end;) {
    Chunk *chunk = s.chunk(*b, at);
    if (!chunk) fatal(s, LIMIT, pc, "no memory to check %s", b->name);
    unsigned alignment = (unsigned)__builtin_ctzll(at | end);
    if (alignment < chunk->log) split(*chunk, alignment);
    const size_t cell_bytes = (size_t)1 << chunk->log, stop = at / CHUNK == (end - 1) / CHUNK ? end : (at / CHUNK + 1) * CHUNK;
    for (; at < stop; at += cell_bytes) {
      Cell &c = chunk->cells[at % CHUNK >> chunk->log];
      const long byte = (long)(at - within->offset), byte_end = byte + (long)cell_bytes;
      const bool written = current(c.write);
      if (written && !(use.atomic && c.write.atomic) && !ordered(c.write, of_writes)) {
        if (use.write && s.launch->same_values && bytes <= sizeof s.pending.before) {
          if (!s.pending.address) {
            s.pending = {address, bytes, b, pc, c.write, byte, {}};
            memcpy(s.pending.before, address, bytes);
          }
        } else {
          for (long i = byte; i < byte_end; i++) race(s, *b, pc, c.write, verb, "wrote", i);
        }
      }
      if (use.write) {
        for (Trace &r : c.read)
          if (current(r) && !(use.atomic && r.atomic) && !ordered(r, of_reads))
            for (long i = byte; i < byte_end; i++) race(s, *b, pc, r, verb, "read", i);
        c.write = mine;
        c.read[0].serial = c.read[1].serial = 0;
        continue;
      }
      if (fresh && !written)
        for (long i = byte; i < byte_end; i++) note(s, UNINITIALISED_READ, pc, 0, "read of byte %ld of %s before anything wrote it", i, b->name);
      // Two readers suffice to catch any later writer if they are in two SIMD-groups, or in one if no other has read. A
      // reader that is ordered before this one adds no information.
      Trace *slot = nullptr;
      for (Trace &r : c.read)
        if (!current(r) || ordered(r, of_reads)) { slot = slot ? slot : &r; if (slot != &r) r.serial = 0; }
      if (!slot && c.read[0].serial == c.read[1].serial && c.read[0].thread / SIMD_WIDTH == c.read[1].thread / SIMD_WIDTH &&
          (c.read[0].thread / SIMD_WIDTH != simdgroup || c.read[0].serial != serial))
        slot = &c.read[1];
      if (slot) *slot = mine;
    }
  }
}

#define PC ((uintptr_t)__builtin_return_address(0) - 1)
#define HOOKS(n)                                                                                                          \
  extern "C" void __tsan_read##n(char *a) { check(a, n, {false, false}, PC); }                                            \
  extern "C" void __tsan_write##n(char *a) { check(a, n, {true, false}, PC); }                                            \
  extern "C" void __tsan_unaligned_read##n(char *a) { check(a, n, {false, false}, PC); }                                  \
  extern "C" void __tsan_unaligned_write##n(char *a) { check(a, n, {true, false}, PC); }                                  \
  extern "C" void __tsan_read_write##n(char *a) { check(a, n, {false, false}, PC); check(a, n, {true, false}, PC); }      \
  extern "C" void __tsan_unaligned_read_write##n(char *a) { check(a, n, {false, false}, PC); check(a, n, {true, false}, PC); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void *) {}
extern "C" void __tsan_func_exit() {}
extern "C" void *__tsan_memcpy(char *d, char *from, size_t n) {
  if (n) { check(from, n, {false, false}, PC); check(d, n, {true, false}, PC); }
  return memcpy(d, from, n);
}
extern "C" void *__tsan_memmove(char *d, char *from, size_t n) {
  if (n) { check(from, n, {false, false}, PC); check(d, n, {true, false}, PC); }
  return memmove(d, from, n);
}
extern "C" void *__tsan_memset(char *d, int v, size_t n) {
  if (n) check(d, n, {true, false}, PC);
  return memset(d, v, n);
}
extern "C" void __msl_atomic(const void *address, unsigned bytes, unsigned kind) {
  if (kind != 1) check((char *)address, bytes, {false, true}, PC);
  if (kind != 0) check((char *)address, bytes, {true, true}, PC);
}

// -fsanitize=bounds,alignment,integer-divide-by-zero: each report starts with its place in the source.
struct Place { const char *file; uint32_t line, column; };
[[noreturn]] static void undefined(const Place *place, Kind kind, uintptr_t pc, const char *text) {
  State &s = *running;
  note(s, kind, pc, 0, "%s", text);
  if (!s.findings.empty()) s.findings.back().line = place->line;
  s.stop = true;
  void *abandoned;
  msl_switch(&abandoned, s.main_stack);
  __builtin_unreachable();
}
extern "C" void __ubsan_handle_out_of_bounds(const Place *place, uintptr_t index) {
  char text[80];
  snprintf(text, sizeof text, "index %ld outside of a local or member array", (long)index);
  undefined(place, OUT_OF_BOUNDS, PC, text);
}
extern "C" void __ubsan_handle_divrem_overflow(const Place *place, uintptr_t, uintptr_t) { undefined(place, ARITHMETIC, PC, "integer division by zero, or of the smallest integer by -1"); }
extern "C" void __ubsan_handle_type_mismatch_v1(const Place *place, uintptr_t address) {
  char text[100];
  State &s = *running;
  Bound *b = s.find((char *)address);
  if (b) snprintf(text, sizeof text, "misaligned access at byte offset %ld of %s", (long)((char *)address - b->region->base) - (long)b->extents[0].offset, b->name);
  else snprintf(text, sizeof text, "misaligned access at %p", (void *)address);
  undefined(place, MISALIGNED, PC, text);
}
