// Programmatic dependent launch: kernels that may begin before the previous kernel has ended (gpu/launch.rs:
// `reads_ahead`).
//
// An overlapping kernel waits before it accesses any buffer that it must not read ahead, in every thread that accesses
// one. A block without work may end without waiting, if one block of its grid waits.
//
// Most kernels let the next kernel begin after they have waited; all earlier kernels have ended by then. Two kinds of
// kernels let the next one begin before they wait: short kernels (take_turn_early), so that the next kernel reads ahead
// meanwhile; and kernels that merge the previous kernel's results at their end (take_turn_unless_late). In both cases
// the next kernel may also overlap with the kernels for which this one waits (runtime/running.rs).
#ifndef KVANT_CUDA_DEVICE_DEPENDENT_LAUNCH_H
#define KVANT_CUDA_DEVICE_DEPENDENT_LAUNCH_H

// Returns when all earlier kernels have ended and their results are visible.
inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may begin when every block has called this or has ended.
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

// For kernels that may need the previous kernel's results only at their end. IF_LATE: they wait there, and let the next
// kernel begin now (gpu/launch.rs: `waits_late`).
template <bool IF_LATE> inline void wait_unless_late() {
    if (!IF_LATE) {
        wait_for_previous();
    }
}

template <bool IF_LATE> inline void take_turn_unless_late() {
    wait_unless_late<IF_LATE>();
    let_next_begin();
}

template <bool IF_LATE> inline void wait_if_late() {
    if (IF_LATE) {
        wait_for_previous();
    }
}

// For short kernels.
inline void take_turn_early() {
    let_next_begin();
    wait_for_previous();
}

#endif
