//! Returns free heap memory to the system.

/// Returns free heap memory to the system. glibc keeps it: after some prompts of megabytes, as much as they all needed
/// at the same time. Other allocators return it automatically, or cannot.
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
