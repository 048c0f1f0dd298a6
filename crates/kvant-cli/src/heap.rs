//! Memory of the process that is free, but not the system's.

/// Gives free memory of the heap back to the system. glibc keeps what it has had: after some prompts of megabytes, all
/// that these took at once. Other allocators do this on their own, or cannot.
pub fn reclaim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            fn malloc_trim(pad: usize) -> i32;
        }
        // SAFETY: it may be called at any time, from any thread.
        unsafe { malloc_trim(0) };
    }
}
