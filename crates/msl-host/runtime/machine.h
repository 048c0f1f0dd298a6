// Processor-specific code: switching stacks, the registers of a signal, the mode of floating-point arithmetic.
#pragma once
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

// Saves the callee-saved registers on the old stack, and restores them from the new one.
extern "C" void msl_switch(void **save, void *to);
// The second half of msl_switch.
extern "C" void msl_resume_main();

#if defined(__x86_64__)

// A new stack's first switch returns into `entry`, whose frame pointer is null: mark_place stops there.
inline void *first_frame(char *top_of_stack, void (*entry)()) {
  void **top = (void **)top_of_stack;
  *--top = nullptr;
  *--top = (void *)entry;
  for (int i = 0; i < 6; i++) *--top = nullptr;
  return top;
}

inline uintptr_t instruction(const mcontext_t &m) { return (uintptr_t)m.gregs[REG_RIP]; }
inline uintptr_t frame_pointer(const mcontext_t &m) { return (uintptr_t)m.gregs[REG_RBP]; }
// The address after the call, before the callee has saved anything.
inline uintptr_t return_address(const mcontext_t &m) { return *(uintptr_t *)m.gregs[REG_RSP]; }
inline bool was_write(const mcontext_t &m) { return m.gregs[REG_ERR] & 2; }
// The signal has no address if an instruction requires an aligned vector, or if the address exceeds 48 bits.
inline bool without_address(const siginfo_t &info) { return info.si_code == SI_KERNEL && !info.si_addr; }
inline void go_on_at(mcontext_t &m, void (*place)(), void *stack) {
  m.gregs[REG_RSP] = (long long)stack;
  m.gregs[REG_RIP] = (long long)place;
}

inline uint64_t arithmetic_mode() { return __builtin_ia32_stmxcsr(); }
inline void set_arithmetic_mode(uint64_t mode) { __builtin_ia32_ldmxcsr((unsigned)mode); }
constexpr uint64_t FLUSH = 1 << 15 | 1 << 6;  // results and operands

#elif defined(__aarch64__)

inline void *first_frame(char *top_of_stack, void (*entry)()) {
  void **top = (void **)top_of_stack - 20;
  memset(top, 0, 20 * sizeof(void *));
  top[1] = (void *)entry;
  return top;
}

inline uintptr_t instruction(const mcontext_t &m) { return (uintptr_t)m.pc; }
inline uintptr_t frame_pointer(const mcontext_t &m) { return (uintptr_t)m.regs[29]; }
inline uintptr_t return_address(const mcontext_t &m) { return (uintptr_t)m.regs[30]; }
// Emulators leave out the record of writes, so decode the instruction.
inline bool was_write(const mcontext_t &m) {
  uint32_t code = *(const uint32_t *)m.pc;
  bool vector = code >> 26 & 1, flag = code >> 22 & 1;
  switch (code >> 27 & 7) {
    case 1: return !flag;  // exclusive and ordered accesses; structures of vectors
    case 3: return false;  // loads of a constant near the instruction
    case 5: return !flag;  // pairs
    case 7: {
      bool atomic = !vector && !(code >> 24 & 1) && (code >> 21 & 1) && !(code >> 10 & 3);
      return atomic || (vector ? !flag : !(code >> 22 & 3));
    }
    default: return false;
  }
}
inline bool without_address(const siginfo_t &info) { return info.si_signo == SIGBUS && info.si_code == BUS_ADRALN; }
inline void go_on_at(mcontext_t &m, void (*place)(), void *stack) {
  m.sp = (unsigned long long)stack;
  m.pc = (unsigned long long)place;
}

inline uint64_t arithmetic_mode() {
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
inline void set_arithmetic_mode(uint64_t mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }
constexpr uint64_t FLUSH = 1 << 24;

#else
#error "msl-host runs on x86-64 and on 64-bit ARM"
#endif
