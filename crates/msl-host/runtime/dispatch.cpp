// Runs a dispatch from its launch to its findings: threadgroup by threadgroup, catching faults.
#include <algorithm>
#include <link.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include "state.h"

// ---- faults

static struct sigaction previous[NSIG];
static const int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE}, TIMER_SIGNAL = SIGVTALRM;

// The signal is not ours: call the previous handler.
static void chain(int signal, siginfo_t *info, void *context) {
  const struct sigaction &old = previous[signal];
  if (old.sa_flags & SA_SIGINFO) return old.sa_sigaction(signal, info, context);
  if (old.sa_handler == SIG_IGN) return;
  if (old.sa_handler != SIG_DFL) return old.sa_handler(signal);
  sigaction(signal, &old, nullptr);  // the faulting instruction runs again and meets the default action
}
// The kernel's own address if it faults in a function that it called: walks up the frames until one returns into its
// library.
static uintptr_t kernel_place(const State &s, const mcontext_t &registers) {
  uintptr_t pc = instruction(registers), low = (uintptr_t)s.image[0], high = (uintptr_t)s.image[1];
  const char *stack = s.fibers[s.current].stack;
  const char *frame = (const char *)frame_pointer(registers);
  for (int depth = 0; depth < 16 && !(pc >= low && pc < high); depth++) {
    if (frame < stack || frame > stack + STACK - 16 || (uintptr_t)frame % 8) return 0;
    pc = ((const uintptr_t *)frame)[1] - 1;
    frame = *(const char *const *)frame;
  }
  return pc;
}
static void on_signal(int signal, siginfo_t *info, void *context) {
  State *state = running;
  if (!state || state->current < 0) {
    if (signal != TIMER_SIGNAL) chain(signal, info, context);
    return;
  }
  State &s = *state;
  mcontext_t &registers = ((ucontext_t *)context)->uc_mcontext;
  uintptr_t pc = instruction(registers);
  bool in_kernel = pc >= (uintptr_t)s.image[0] && pc < (uintptr_t)s.image[1];
  pc = kernel_place(s, registers);
  char *address = (char *)info->si_addr;
  if (signal == TIMER_SIGNAL) {
    if (!in_kernel) return;  // inside the runtime: the timer will fire again
    // In a linker stub, only the caller has a line.
    note(s, TIME_LIMIT, pc, return_address(registers) - 1, "still running after %u ms of CPU time", s.launch->time_limit_ms);
  } else if (signal == SIGFPE) {
    note(s, ARITHMETIC, pc, 0, "integer division by zero, or of the smallest integer by -1");
  } else if (without_address(*info)) {
    note(s, MISALIGNED, pc, 0, "a vector access that violates its alignment, or an access at an impossible address");
  } else {
    const char *verb = was_write(registers) ? "write" : "read";
    const Fiber &f = s.fibers[s.current];
    if (Bound *b = s.find(address)) {
      const Extent &e = b->extents[0];
      note(s, OUT_OF_BOUNDS, pc, 0, "out-of-bounds %s at byte offset %ld of %s, which has %lu bytes", verb, (long)(address - b->region->base) - (long)e.offset, b->name, (unsigned long)e.bytes);
    } else if (address >= f.stack - PAGE && address < f.stack) {
      note(s, STACK_OVERFLOW, pc, 0, "stack overflow: more than %zu KiB of locals", STACK >> 10);
    } else {
      note(s, OUT_OF_BOUNDS, pc, 0, "%s at %p, which is in no bound buffer", verb, (void *)address);
    }
  }
  s.stop = true;
  go_on_at(registers, msl_resume_main, s.main_stack);
}
static void install_handlers() {
  static const bool once = [] {
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int signal : FAULTS) sigaction(signal, &action, &previous[signal]);
    sigaction(TIMER_SIGNAL, &action, &previous[TIMER_SIGNAL]);
    return true;
  }();
  (void)once;
}

// Measures CPU time of this thread, so that a loaded machine does not cause timeouts.
struct Timer {
  timer_t id;
  bool armed = false;
  explicit Timer(uint32_t ms) {
    if (!ms) return;
    struct sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = TIMER_SIGNAL;
    event._sigev_un._tid = (pid_t)syscall(SYS_gettid);
    if (timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &id)) return;
    armed = true;
    struct itimerspec when = {};
    when.it_value.tv_sec = ms / 1000;
    when.it_value.tv_nsec = (long)(ms % 1000) * 1000000;
    when.it_interval.tv_nsec = 7000000;
    timer_settime(id, 0, &when, nullptr);
  }
  ~Timer() { if (armed) timer_delete(id); }
};

// ---- the library that holds the kernel

// As in the loader's interface for compilers.
struct TlsIndex { unsigned long module, offset; };
extern "C" void *__tls_get_addr(TlsIndex *);

static void find_image(State &s) {
  s.image[0] = s.image[1] = s.thread_locals[0] = s.thread_locals[1] = nullptr;
  dl_iterate_phdr(
      [](struct dl_phdr_info *info, size_t, void *data) {
        State &s = *(State *)data;
        char *low = nullptr, *high = nullptr;
        size_t local_bytes = 0;
        for (int i = 0; i < info->dlpi_phnum; i++) {
          const auto &h = info->dlpi_phdr[i];
          char *at = (char *)info->dlpi_addr + h.p_vaddr;
          if (h.p_type == PT_LOAD) {
            if (!low) low = (char *)info->dlpi_addr;
            high = std::max(high, at + h.p_memsz);
          }
          if (h.p_type == PT_TLS) local_bytes = h.p_memsz;
        }
        char *entry = (char *)(void *)s.launch->entry;
        if (entry < low || entry >= high) return 0;
        s.image[0] = low;
        s.image[1] = high;
        if (local_bytes) {
          // `dlpi_tls_data` is null if only descriptors have been used.
          TlsIndex first = {info->dlpi_tls_modid, 0};
          s.thread_locals[0] = (char *)__tls_get_addr(&first);
          s.thread_locals[1] = s.thread_locals[0] + local_bytes;
        }
        return 1;
      },
      &s);
}

// ---- threadgroup memory

static char *add_threadgroup_memory(State &s, size_t bytes, const char *name) {
  Region *region = s.take_region(bytes);
  if (!region) return nullptr;
  Bound *b = s.bind(region, name, true, true);
  b->extents.push_back({0, bytes, READ | WRITE, 0});
  return region->base;
}
extern "C" void *__msl_threadgroup_variable(const void *key, unsigned long bytes, const char *name) {
  State &s = *running;
  for (ThreadgroupVariable &v : s.variables)
    if (v.key == key) {
      if (v.serial != s.serial) v.bound->region->poison();
      v.serial = s.serial;
      return v.bound->region->base;
    }
  s.threadgroup_bytes += bytes;
  if (s.threadgroup_bytes > THREADGROUP_LIMIT)
    fatal(s, LIMIT, (uintptr_t)__builtin_return_address(0) - 1, "threadgroup variable %s takes threadgroup memory to %zu bytes; the limit is %zu", name, s.threadgroup_bytes, THREADGROUP_LIMIT);
  char label[48];
  snprintf(label, sizeof label, "threadgroup variable %s", name);
  char *base = add_threadgroup_memory(s, bytes, label);
  if (!base) fatal(s, LIMIT, 0, "no memory for %s", label);
  s.variables.push_back({key, s.bounds.back(), s.serial});
  return base;
}
alignas(64) char absent[ABSENT];
extern "C" void *__msl_absent(unsigned long bytes) {
  if (bytes > ABSENT) fatal(*running, LIMIT, 0, "a parameter that does not exist has %lu bytes; msl-host has %zu", bytes, ABSENT);
  return absent;
}
extern "C" unsigned __msl_sum_order() { return running->launch->sum_order; }
extern "C" void __msl_short_buffer(unsigned index, unsigned long bytes, unsigned long needed) {
  fatal(*running, OUT_OF_BOUNDS, 0, "buffer(%u) has %lu bytes, its parameter needs %lu", index, bytes, needed);
}

// bfloat from float, to nearest even; gcc's runtime library lacks this function on some systems.
extern "C" __bf16 __truncsfbf2(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  uint16_t h = (u & 0x7fffffff) > 0x7f800000 ? (uint16_t)((u >> 16) | 0x40) : (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  __bf16 b;
  memcpy(&b, &h, 2);
  return b;
}
extern "C" __bf16 __truncdfbf2(double d) { return __truncsfbf2((float)d); }

// ---- dispatch

extern "C" State *msl_state_new() {
  State *s = new State();
  size_t bytes = MAX_THREADS * (STACK + PAGE);
  void *stacks = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  s->signal_stack = malloc(64 << 10);
  if (stacks == MAP_FAILED || !s->signal_stack) {
    free(s->signal_stack);
    if (stacks != MAP_FAILED) munmap(stacks, bytes);
    delete s;
    return nullptr;
  }
  s->stacks = (char *)stacks;
  for (unsigned i = 0; i < MAX_THREADS; i++) {
    mprotect(s->stacks + i * (STACK + PAGE), PAGE, PROT_NONE);
    s->fibers[i].stack = s->stacks + i * (STACK + PAGE) + PAGE;
  }
  install_handlers();
  memset(absent, 0xFF, ABSENT);
  return s;
}
extern "C" void msl_state_free(State *s) {
  s->release_memory();
  munmap(s->stacks, MAX_THREADS * (STACK + PAGE));
  free(s->signal_stack);
  delete s;
}
extern "C" const MslFinding *msl_finding(State *s, uint64_t index) { return index < s->findings.size() ? &s->findings[index] : nullptr; }

static void choose_order(State &s) {
  const MslLaunch &l = *s.launch;
  uint32_t n = l.groups[0] * l.groups[1] * l.groups[2];
  s.order.resize(n);
  for (uint32_t i = 0; i < n; i++) s.order[i] = l.schedule == REVERSE ? n - 1 - i : i;
  if (l.schedule == RANDOM)
    for (uint32_t i = n; i > 1; i--) std::swap(s.order[i - 1], s.order[s.next_random() % i]);
}
static void begin_threadgroup(State &s, uint32_t linear) {
  const MslLaunch &l = *s.launch;
  uint32_t group[3] = {linear % l.groups[0], linear / l.groups[0] % l.groups[1], linear / l.groups[0] / l.groups[1]}, size[3];
  for (int i = 0; i < 3; i++) size[i] = std::min(l.threads[i], l.total[i] - group[i] * l.threads[i]);
  s.threads = size[0] * size[1] * size[2];
  s.simdgroups = (s.threads + SIMD_WIDTH - 1) / SIMD_WIDTH;
  s.at_barrier = 0;
  s.epoch[0] = s.epoch[1] = s.any_epoch = 1;
  for (unsigned i = 0; i < s.simdgroups; i++) {
    SimdGroup &g = s.groups[i];
    g.first = i * SIMD_WIDTH;
    g.lanes = std::min(SIMD_WIDTH, s.threads - g.first);
    g.alike = g.active = 0;
    g.epoch[0] = g.epoch[1] = g.any_epoch = 1;
  }
  for (unsigned i = 0; i < s.threads; i++) {
    Fiber &f = s.fibers[i];
    MslContext &c = f.context;
    f.index = i;
    f.simdgroup = i / SIMD_WIDTH;
    f.lane = i % SIMD_WIDTH;
    uint32_t position[3] = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
    for (int k = 0; k < 3; k++) {
      c.thread_position_in_threadgroup[k] = position[k];
      c.threadgroup_position_in_grid[k] = group[k];
      c.thread_position_in_grid[k] = group[k] * l.threads[k] + position[k];
      c.threads_per_threadgroup[k] = size[k];
      c.dispatch_threads_per_threadgroup[k] = l.threads[k];
      c.threads_per_grid[k] = l.total[k];
      c.threadgroups_per_grid[k] = l.groups[k];
    }
    c.buffer = s.buffers;
    c.buffer_bytes = s.buffer_bytes;
    c.threadgroup_memory = s.threadgroup_memory;
    c.thread_index_in_threadgroup = i;
    c.thread_index_in_simdgroup = f.lane;
    c.simdgroup_index_in_threadgroup = f.simdgroup;
    c.simdgroups_per_threadgroup = s.simdgroups;
    start_fiber(s, i);
  }
  set_all_ready(s);
}
// Finds changed slack bytes: a write just past the end that the guard could not catch.
static void check_slack(State &s) {
  for (Bound *b : s.bounds) {
    long at = b->region->damage();
    if (at <= (long)b->region->capacity) {
      note(s, OUT_OF_BOUNDS, 0, 0, "something wrote at byte offset %ld of %s, which has %zu bytes", at, b->name, b->region->bytes);
      s.stop = true;
    }
  }
}

extern "C" uint64_t msl_dispatch(State *state, const MslLaunch *launch, MslStats *stats) {
  State &s = *state;
  s.launch = launch;
  s.random = launch->seed * 2654435761u + 88172645463325252ull;
  s.stop = false;
  s.pending.address = nullptr;
  s.main_frame = s.entry_frame = 0;
  s.findings.clear();
  s.stats = {};
  s.threadgroup_bytes = 0;
  if (s.serial == 0) s.serial = 1;
  s.first_serial = s.serial + 1;

  memset(s.buffers, 0, sizeof s.buffers);
  memset(s.threadgroup_memory, 0, sizeof s.threadgroup_memory);
  memset(s.buffer_bytes, 0, sizeof s.buffer_bytes);
  for (uint64_t i = 0; i < launch->extent_count; i++) {
    const MslExtent &e = launch->extents[i];
    Bound *b = nullptr;
    for (Bound *o : s.bounds)
      if (o->region == e.region) b = o;
    char name[48];
    snprintf(name, sizeof name, "buffer(%u)", e.index);
    if (!b) b = s.bind(e.region, name, false, false);
    b->extents.push_back({e.offset, e.bytes, e.access, e.index});
    b->writable |= (e.access & WRITE) != 0;
    s.buffers[e.index] = e.region->base + e.offset;
    s.buffer_bytes[e.index] = e.bytes;
  }
  for (unsigned i = 0; i < MAX_BINDINGS; i++) {
    if (!launch->threadgroup_bytes[i]) continue;
    char name[48];
    snprintf(name, sizeof name, "threadgroup(%u)", i);
    s.threadgroup_memory[i] = add_threadgroup_memory(s, launch->threadgroup_bytes[i], name);
    s.threadgroup_bytes += launch->threadgroup_bytes[i];
  }
  find_image(s);
  choose_order(s);
  begin_counting(s);

  stack_t own = {}, before = {};
  own.ss_sp = s.signal_stack;
  own.ss_size = 64 << 10;
  sigaltstack(&own, &before);
  running = &s;
  uint64_t arithmetic = arithmetic_mode();
  if (launch->flush) set_arithmetic_mode(arithmetic | FLUSH);
  {
    Timer timer(launch->time_limit_ms);
    for (size_t i = 0; i < s.order.size() && !s.stop; i++) {
      s.serial++;
      for (unsigned k = 0; k < MAX_BINDINGS; k++)
        if (s.threadgroup_memory[k]) s.find(s.threadgroup_memory[k])->region->poison();
      begin_threadgroup(s, s.order[i]);
      s.stats.threads += s.threads;
      if (launch->counts) launch->counts->simdgroups += s.simdgroups;
      run_threadgroup(s);
    }
    s.current = -1;
  }
  set_arithmetic_mode(arithmetic);
  running = nullptr;
  sigaltstack(&before, nullptr);
  if (!s.stop) check_slack(s);
  // Addresses become offsets into the library, as in its line table.
  for (MslFinding &f : s.findings)
    for (uint64_t *pc : {&f.pc, &f.other_pc}) *pc = *pc >= (uintptr_t)s.image[0] && *pc < (uintptr_t)s.image[1] ? *pc - (uintptr_t)s.image[0] : 0;
  end_counting(s);
  s.release_bounds();
  if (stats) *stats = s.stats;
  return s.findings.size();
}
