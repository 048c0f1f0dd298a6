// Runs the threads of a block as fibers, for language.h. Blocks run one after the other; in every second block, fibers
// are resumed in descending order.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

struct uint3 {
    unsigned x, y, z;
};

extern "C" {
uint3 kvant_thread, kvant_block, kvant_threads, kvant_blocks;
extern unsigned char *kvant_shared;
void kvant_wait_for_block();
unsigned kvant_count_of_threads(unsigned barrier, unsigned threads, bool own);
void kvant_barrier_arrive(void *barrier);
void kvant_barrier_wait(const void *barrier, unsigned parity);
void kvant_has_no_ptx(const char *statement);
unsigned kvant_exchange(const void *own, void *all);
void kvant_enter(void **args);
int kvant_run(void **args, const unsigned *grid, const unsigned *threads, unsigned shared_bytes);
// Saves the registers that a call preserves on the stack, and the stack pointer in `from`; continues where `to` was
// suspended. swapcontext would make a system call.
void kvant_switch(void **from, void *to);
}

asm(R"(
    .text
    .globl kvant_switch
kvant_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");

namespace {
// Dynamic shared memory; static shared memory is next to it, in the same library.
alignas(1024) unsigned char shared_memory[256 << 10];

constexpr size_t STACK = 256 << 10;

struct Fiber {
    void *stack;
    bool has_ended;
};

// Fibers that wait for each other: `arrived` of `there`. A generation ends when all have arrived.
struct Meeting {
    unsigned there, arrived;
    unsigned long generation;

    void end_if_complete() {
        if (there > 0 && arrived == there) {
            arrived = 0;
            generation++;
        }
    }
};

struct Warp {
    Meeting meeting;
    // The lanes that have not ended, and their values for generations of either parity.
    unsigned lanes;
    alignas(16) unsigned char slots[2][32][16];
};

// The state of a barrier with a number: how many threads passed true, for generations of either parity.
struct NumberedBarrier {
    Meeting meeting;
    unsigned count[2];
};

std::vector<Fiber> fibers;
std::vector<Warp> warps;
std::vector<char *> stacks;
Meeting block;
NumberedBarrier numbered[16];
void *scheduler;
unsigned current;
bool progress;
void **arguments;

unsigned linear_index(uint3 at) { return (at.z * kvant_threads.y + at.y) * kvant_threads.x + at.x; }

void yield() { kvant_switch(&fibers[current].stack, scheduler); }

void meet(Meeting &meeting) {
    const unsigned long generation = meeting.generation;
    meeting.arrived++;
    progress = true;
    meeting.end_if_complete();
    while (meeting.generation == generation) {
        yield();
    }
}

void enter() {
    kvant_enter(arguments);
    Fiber &fiber = fibers[current];
    Warp &warp = warps[current / 32];
    fiber.has_ended = progress = true;
    warp.lanes &= ~(1u << current % 32);
    warp.meeting.there--;
    warp.meeting.end_if_complete();
    block.there--;
    block.end_if_complete();
    kvant_switch(&fiber.stack, scheduler);
}

// Returns 0, or 1 if threads wait for others that never arrive.
int run_block(unsigned count, bool backwards) {
    block = {count, 0, 0};
    std::memset(numbered, 0, sizeof numbered);
    warps.assign((count + 31) / 32, Warp{});
    for (unsigned i = 0; i < count; i++) {
        Warp &warp = warps[i / 32];
        warp.meeting.there++;
        warp.lanes |= 1u << i % 32;
        Fiber &fiber = fibers[i];
        fiber.has_ended = false;
        // Six registers, then the entry address, as after a call: the stack is 8 bytes off a multiple of 16.
        void **top = reinterpret_cast<void **>(stacks[i] + STACK) - 8;
        std::memset(top, 0, 8 * sizeof(void *));
        top[6] = reinterpret_cast<void *>(enter);
        fiber.stack = top;
    }
    for (unsigned left = count; left > 0;) {
        progress = false;
        for (unsigned i = 0; i < count; i++) {
            current = backwards ? count - 1 - i : i;
            if (fibers[current].has_ended) {
                continue;
            }
            kvant_thread = {current % kvant_threads.x, current / kvant_threads.x % kvant_threads.y,
                            current / (kvant_threads.x * kvant_threads.y)};
            kvant_switch(&scheduler, fibers[current].stack);
            left -= fibers[current].has_ended;
        }
        if (!progress) {
            return 1;
        }
    }
    return 0;
}
} // namespace

// Defined before the kernel's variables, one of which may have its address.
unsigned char *kvant_shared = shared_memory;

void kvant_wait_for_block() { meet(block); }

unsigned kvant_count_of_threads(unsigned barrier, unsigned threads, bool own) {
    NumberedBarrier &at = numbered[barrier];
    unsigned &count = at.count[at.meeting.generation % 2];
    // All threads have read the result of the last generation of this parity.
    count = (at.meeting.arrived > 0 ? count : 0) + own;
    at.meeting.there = threads;
    meet(at.meeting);
    return count;
}

// Eight bytes: threads that end a phase, threads that have arrived, phases that have ended.
struct Barrier {
    unsigned short count, arrived;
    unsigned phases;
};

void kvant_barrier_arrive(void *barrier) {
    Barrier &at = *static_cast<Barrier *>(barrier);
    progress = true;
    if (++at.arrived == at.count) {
        at.arrived = 0;
        at.phases++;
    }
}

void kvant_barrier_wait(const void *barrier, unsigned parity) {
    const Barrier &at = *static_cast<const Barrier *>(barrier);
    while (at.phases % 2 == parity) {
        yield();
    }
    progress = true;
}

void kvant_has_no_ptx(const char *statement) {
    std::fprintf(stderr, "cuda-host: the kernel has reached PTX that does not run here: %s\n", statement);
    std::abort();
}

unsigned kvant_exchange(const void *own, void *all) {
    Warp &warp = warps[linear_index(kvant_thread) / 32];
    const unsigned lane = linear_index(kvant_thread) % 32, parity = warp.meeting.generation % 2, lanes = warp.lanes;
    std::memcpy(warp.slots[parity][lane], own, 16);
    meet(warp.meeting);
    std::memcpy(all, warp.slots[parity], sizeof warp.slots[parity]);
    return lanes;
}

int kvant_run(void **args, const unsigned *grid, const unsigned *threads, unsigned shared_bytes) {
    arguments = args;
    kvant_blocks = {grid[0], grid[1], grid[2]};
    kvant_threads = {threads[0], threads[1], threads[2]};
    const unsigned count = threads[0] * threads[1] * threads[2];
    if (shared_bytes > sizeof shared_memory) {
        return 1;
    }
    // Uninitialised memory must not happen to be zero.
    std::memset(shared_memory, 0xA5, sizeof shared_memory);
    if (fibers.size() < count) {
        fibers.resize(count);
    }
    while (stacks.size() < count) {
        stacks.push_back(static_cast<char *>(std::aligned_alloc(16, STACK)));
    }
    unsigned number = 0;
    for (unsigned z = 0; z < grid[2]; z++) {
        for (unsigned y = 0; y < grid[1]; y++) {
            for (unsigned x = 0; x < grid[0]; x++) {
                kvant_block = {x, y, z};
                if (run_block(count, number++ % 2 == 1)) {
                    return 1;
                }
            }
        }
    }
    return 0;
}
