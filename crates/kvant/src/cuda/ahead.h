// Kernels that may begin before the launch in front of them has ended (gpu/launch.rs: `reads_ahead`).
//
// Such a kernel waits before it touches anything but what it may read ahead, in every thread that touches it, and only
// then lets the next one begin: so at most two launches run at a time, and what one of them may not see has ended. A block
// with nothing to do may end without having waited, so long as one of its grid waits.
#ifndef KVANT_AHEAD_H
#define KVANT_AHEAD_H

// Returns when all launches before this one have ended and what they wrote can be read.
inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next launch may begin as soon as every block has come here, or has ended.
inline void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// For kernels that read nothing ahead.
inline void take_turn() {
    wait_for_previous();
    let_next_begin();
}

#endif
