//! Returns free heap memory to the system.

/// Returns free heap memory to the system. glibc keeps it: after concurrent prompts of megabytes, it keeps the memory
/// that all of them needed. Other allocators return memory automatically, or cannot return it.
pub fn reclaim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            fn malloc_trim(pad: usize) -> i32;
        }
        // SAFETY: `malloc_trim` is thread-safe and has no preconditions.
        unsafe { malloc_trim(0) };
    }
}
