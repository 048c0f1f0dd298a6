//! Matrix products of AMX tiles, of up to 16 rows of 64 bytes. Kernels use inline assembly, because Rust's
//! intrinsics for AMX are not stable.

use std::{arch::asm, marker::PhantomData, sync::OnceLock};

/// Rows of the largest tile.
pub(crate) const AMX_ROWS: usize = 16;
/// Bytes of a row of the largest tile.
pub(crate) const AMX_ROW_BYTES: usize = 64;

/// The shapes of the eight tile registers, in the processor's layout.
#[repr(C, align(64))]
struct AmxShapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// All registers have the largest shape.
const SHAPES: AmxShapes = {
    let mut shapes = AmxShapes { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    let mut i = 0;
    while i < 8 {
        (shapes.row_bytes[i], shapes.rows[i]) = (AMX_ROW_BYTES as u16, AMX_ROWS as u8);
        i += 1;
    }
    shapes
};

/// The tile registers of this thread, in use. Dropping this releases them; until then, every context switch saves them.
pub(crate) struct AmxRegisters {
    /// Not `Send`: the registers belong to one thread.
    _thread: PhantomData<*mut ()>,
}

impl AmxRegisters {
    /// Sets the shapes of the registers, and clears them.
    ///
    /// # Safety
    /// [`is_supported`] holds, and this thread has no other `AmxRegisters`.
    #[inline(always)]
    pub(crate) unsafe fn new() -> AmxRegisters {
        // SAFETY: the caller's promise; the shapes are 64 bytes that describe valid tiles.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &SHAPES, options(nostack, preserves_flags, readonly)) };
        AmxRegisters { _thread: PhantomData }
    }
}

impl Drop for AmxRegisters {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: `AmxRegisters` exist only on machines with AMX.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
    }
}

/// Whether the processor has AMX with tiles of bf16 and conversions to bf16, and the system lets this process use
/// tiles.
pub(super) fn is_supported() -> bool {
    static IS_SUPPORTED: OnceLock<bool> = OnceLock::new();
    *IS_SUPPORTED.get_or_init(|| has_instructions() && is_permitted())
}

fn has_instructions() -> bool {
    const BF16: u32 = 1 << 22;
    const TILE: u32 = 1 << 24;
    const ALL: u32 = BF16 | TILE;
    #[allow(unused_unsafe, reason = "safe in newer compilers")]
    // SAFETY: every x86-64 processor has CPUID, and those with AVX-512 have leaf 7.
    let features = unsafe { std::arch::x86_64::__cpuid_count(7, 0) };
    features.edx & ALL == ALL && is_x86_feature_detected!("avx512bf16")
}

/// Requests permission from Linux, which saves tiles only for processes that have it. This fails on kernels without
/// AMX, and if a thread has an alternate signal stack that is too small for tiles. After success, Linux rejects
/// alternate signal stacks that are too small.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const REQUEST_PERMISSION: libc::c_ulong = 0x1023;
    const TILE_DATA: libc::c_ulong = 18;
    // SAFETY: the call reads its arguments only.
    unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}
