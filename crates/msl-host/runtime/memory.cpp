// Guarded, poisoned memory, and the findings that name it.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "state.h"

thread_local State *running;
const size_t PAGE = (size_t)sysconf(_SC_PAGESIZE);

// The data ends at the guard, rounded to the alignment of the widest vector, so that a read past the end faults at
// once. Before it is the rest of its first page, then another guard. Zeroed memory is mapped lazily, so that a huge
// buffer costs only its used pages.
extern "C" Region *msl_region_new(uint64_t bytes, bool zeroed) {
  Region *r = new Region();
  r->bytes = bytes;
  r->capacity = (bytes + 31) & ~(size_t)31;
  size_t body = (r->capacity + PAGE) / PAGE * PAGE;
  r->map_bytes = body + 2 * GUARD;
  void *map = mmap(nullptr, r->map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED || mprotect((char *)map + GUARD, body, PROT_READ | PROT_WRITE)) {
    if (map != MAP_FAILED) munmap(map, r->map_bytes);
    delete r;
    return nullptr;
  }
  r->map = (char *)map;
  r->base = r->map + GUARD + body - r->capacity;
  if (zeroed)
    memset(r->base + bytes, 0xFF, r->capacity - bytes);
  else
    r->poison();
  memset(r->map + GUARD, 0xFF, r->base - (r->map + GUARD));
  return r;
}
extern "C" void msl_region_free(Region *r) {
  munmap(r->map, r->map_bytes);
  delete r;
}
extern "C" char *msl_region_base(Region *r) { return r->base; }

void Region::poison() const { memset(base, 0xFF, capacity); }
long Region::damage() const {
  char *front = map + GUARD;
  size_t before = base - front;
  // Compares each byte with the next one.
  if (before && (*front != (char)0xFF || memcmp(front, front + 1, before - 1)))
    for (char *p = front; p < base; p++)
      if (*p != (char)0xFF) return p - base;
  for (size_t i = bytes; i < capacity; i++)
    if (base[i] != (char)0xFF) return (long)i;
  return (long)capacity + 1;
}

Bound *State::find_among_all(const char *address) {
  for (Bound *b : bounds)
    if (b->region->contains(address)) return last_bound = b;
  return nullptr;
}
Bound *State::bind(Region *region, const char *name, bool is_threadgroup, bool owned) {
  Bound *b = new Bound();
  b->region = region;
  b->threadgroup = is_threadgroup;
  b->owned = owned;
  b->writable = is_threadgroup;
  snprintf(b->name, sizeof b->name, "%s", name);
  bounds.push_back(b);
  return b;
}
constexpr size_t MAX_SPARE = 32, ARENA_CHUNKS = 256, MAX_ARENAS = 8;

Region *State::take_region(size_t bytes) {
  for (Region *&r : spare)
    if (r->bytes == bytes) {
      Region *taken = r;
      r = spare.back();
      spare.pop_back();
      taken->poison();
      return taken;
    }
  return msl_region_new(bytes, false);
}
// Chunks are reused without being cleared: a trace of an earlier dispatch is not current, whatever bytes it belonged
// to.
Chunk *State::chunk(Bound &b, size_t offset) {
  if (!b.chunks) b.chunks = (Chunk **)calloc(b.region->capacity / CHUNK + 1, sizeof(Chunk *));
  if (!b.chunks) return nullptr;
  Chunk *&c = b.chunks[offset / CHUNK];
  if (c) return c;
  if (chunks_used / ARENA_CHUNKS == arenas.size()) {
    void *arena = mmap(nullptr, ARENA_CHUNKS * sizeof(Chunk), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (arena == MAP_FAILED) return nullptr;
    arenas.push_back((char *)arena);
  }
  c = (Chunk *)arenas[chunks_used / ARENA_CHUNKS] + chunks_used % ARENA_CHUNKS;
  chunks_used++;
  c->log = WIDEST_CELL;
  return c;
}
void State::release_bounds() {
  for (Bound *b : bounds) {
    free(b->chunks);
    // After a dispatch that was stopped, its memory is not reused.
    if (b->owned && !stop && spare.size() < MAX_SPARE) spare.push_back(b->region);
    else if (b->owned) msl_region_free(b->region);
    delete b;
  }
  chunks_used = 0;
  for (; arenas.size() > MAX_ARENAS; arenas.pop_back()) munmap(arenas.back(), ARENA_CHUNKS * sizeof(Chunk));
  bounds.clear();
  variables.clear();
  last_bound = nullptr;
}

void State::release_memory() {
  for (Region *r : spare) msl_region_free(r);
  for (char *arena : arenas) munmap(arena, ARENA_CHUNKS * sizeof(Chunk));
}

void State::report(Kind kind, uintptr_t pc, uintptr_t other_pc, const char *format, va_list arguments) {
  for (MslFinding &f : findings)
    if (f.kind == kind && f.pc == pc && f.other_pc == other_pc && pc) {
      f.count++;
      return;
    }
  if (findings.size() >= 64) return;
  MslFinding f = {};
  f.kind = kind;
  f.pc = pc;
  f.other_pc = other_pc;
  f.count = 1;
  vsnprintf(f.text, sizeof f.text, format, arguments);
  if (current >= 0) {
    const Fiber &fiber = fibers[current];
    f.has_thread = 1;
    for (int i = 0; i < 3; i++) f.group[i] = fiber.context.threadgroup_position_in_grid[i];
    f.thread = fiber.index;
    f.simdgroup = fiber.simdgroup;
    f.lane = fiber.lane;
  }
  findings.push_back(f);
}
void note(State &s, Kind kind, uintptr_t pc, uintptr_t other_pc, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  s.report(kind, pc, other_pc, format, arguments);
  va_end(arguments);
}
void fatal(State &s, Kind kind, uintptr_t pc, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  s.report(kind, pc, 0, format, arguments);
  va_end(arguments);
  s.stop = true;
  void *abandoned;
  msl_switch(&abandoned, s.main_stack);
  __builtin_unreachable();
}
