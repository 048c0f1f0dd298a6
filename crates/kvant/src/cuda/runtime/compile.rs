//! Compiles a kernel file to machine code, by NVRTC.

use std::{
    ffi::{CStr, CString, c_char, c_int},
    ptr::{null, null_mut},
};

use cudarc::nvrtc::sys::{self as nvrtc, nvrtcProgram, nvrtcResult};

use super::libraries;
use crate::cuda::entry;
use crate::gpu::{Constant, Launch, Source};

/// The architecture that a kernel is compiled for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cuda) struct CompileTarget {
    /// `sm_90a`: machine code for one kind of device; or `compute_120`: PTX, which the driver finishes.
    pub arch: String,
}

impl CompileTarget {
    /// The best target of this NVRTC for a device of compute capability `major`.`minor`.
    pub(super) fn new(major: i32, minor: i32) -> Result<CompileTarget, String> {
        let mut count: c_int = 0;
        // SAFETY: `count` is what the function fills.
        check("nvrtcGetNumSupportedArchs", unsafe { nvrtc::nvrtcGetNumSupportedArchs(&mut count) })?;
        let mut archs = vec![0; count.max(0) as usize];
        // SAFETY: the array holds `count` numbers.
        check("nvrtcGetSupportedArchs", unsafe { nvrtc::nvrtcGetSupportedArchs(archs.as_mut_ptr()) })?;
        let own = major * 10 + minor;
        if archs.contains(&own) {
            // From Hopper on, instructions of one architecture need the suffix.
            return Ok(CompileTarget { arch: format!("sm_{own}{}", if major >= 9 { "a" } else { "" }) });
        }
        let older = archs.into_iter().filter(|&arch| arch < own).max();
        let older = older.ok_or_else(|| format!("this libnvrtc has no code for compute capability {major}.{minor}"))?;
        Ok(CompileTarget { arch: format!("compute_{older}") })
    }

    /// Whether kernels wait for the previous kernel themselves: the condition of `device/dependent_launch.h`.
    pub(super) fn has_waits(&self) -> bool {
        let number: String = self.arch.chars().filter(char::is_ascii_digit).collect();
        number.parse::<u32>().is_ok_and(|number| number >= 90)
    }

    fn is_machine_code(&self) -> bool {
        self.arch.starts_with("sm_")
    }
}

/// The version of the loaded NVRTC.
pub(super) fn version() -> Result<(i32, i32), String> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both are what the function fills.
    check("nvrtcVersion", unsafe { nvrtc::nvrtcVersion(&mut major, &mut minor) })?;
    Ok((major, minor))
}

/// A kernel file with the constants of one launch: the input of the compiler.
pub(in crate::cuda) struct KernelProgram<'a> {
    source: &'static Source,
    kernel: &'a str,
    constants: &'a [(&'static str, Constant)],
    /// The name of the compiled kernel.
    pub entry: String,
}

impl<'a> KernelProgram<'a> {
    pub(in crate::cuda) fn of(launch: &'a Launch) -> KernelProgram<'a> {
        let Launch { source, kernel, constants, .. } = launch;
        KernelProgram { source, kernel, constants, entry: entry::name(kernel, constants) }
    }

    /// The file, and assertions of the layout of its parameter structs. NVRTC has `offsetof` under another name.
    fn text(&self) -> String {
        let offset = "#define __builtin_offsetof(type, field) __INTADDR__(&((type *)0)->field)";
        format!("{}\n{offset}\n{}", self.source.text, self.source.assertions())
    }

    /// Every constant is a macro. `KERNEL_name` selects a kernel of a file with several. `KVANT_KERNEL` is the entry
    /// name.
    fn options(&self, target: &CompileTarget) -> Vec<String> {
        let mut options = vec![
            format!("--gpu-architecture={}", target.arch),
            "-std=c++17".to_string(),
            "-default-device".to_string(),
            format!("-DKERNEL_{}=1", self.kernel),
            format!("-DKVANT_KERNEL={}", self.entry),
        ];
        options.extend(self.constants.iter().map(|(name, value)| match value {
            Constant::Bool(value) => format!("-D{name}={value}"),
            Constant::UInt(value) => format!("-D{name}={value}u"),
        }));
        options
    }

    /// The key of the machine code, without the compiler's version: options, with the entry name and constants, and all
    /// text.
    pub(super) fn key(&self, target: &CompileTarget) -> String {
        let mut key = self.options(target).join(" ");
        let headers = self.source.included();
        for part in
            [self.text()].into_iter().chain(headers.into_iter().flat_map(|(name, text)| [name.to_string(), text]))
        {
            key.push('\n');
            key.push_str(&part);
        }
        key
    }

    /// Machine code, or PTX.
    ///
    /// # Errors
    /// The compiler's messages.
    pub(in crate::cuda) fn compile(&self, target: &CompileTarget) -> Result<Vec<u8>, String> {
        if !libraries::has_nvrtc() {
            return Err("libnvrtc cannot be loaded".to_string());
        }
        let c_string =
            |text: String| CString::new(text).map_err(|_| format!("{}: a NUL in the text", self.source.name));
        let text = c_string(self.text())?;
        let name = c_string(self.source.name.to_string())?;
        let included = self.source.included();
        let names = included.iter().map(|(name, _)| c_string(name.to_string())).collect::<Result<Vec<_>, _>>()?;
        let headers = included.into_iter().map(|(_, text)| c_string(text)).collect::<Result<Vec<_>, _>>()?;
        let options = self.options(target).into_iter().map(c_string).collect::<Result<Vec<_>, _>>()?;
        let pointers = |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).collect::<Vec<*const c_char>>();
        let (headers_at, names_at, options_at) = (pointers(&headers), pointers(&names), pointers(&options));
        let mut program = NvrtcHandle(null_mut());
        // SAFETY: the strings outlive the calls, and the numbers are those of the arrays.
        let status = unsafe {
            check(
                "nvrtcCreateProgram",
                nvrtc::nvrtcCreateProgram(
                    &mut program.0,
                    text.as_ptr(),
                    name.as_ptr(),
                    headers.len() as c_int,
                    if headers.is_empty() { null() } else { headers_at.as_ptr() },
                    if headers.is_empty() { null() } else { names_at.as_ptr() },
                ),
            )?;
            nvrtc::nvrtcCompileProgram(program.0, options.len() as c_int, options_at.as_ptr())
        };
        if status != nvrtcResult::NVRTC_SUCCESS {
            let log = fetch(program.0, nvrtc::nvrtcGetProgramLogSize, nvrtc::nvrtcGetProgramLog).unwrap_or_default();
            let log = String::from_utf8_lossy(log.strip_suffix(&[0]).unwrap_or(&log)).into_owned();
            let options = self.options(target).join(" ");
            return Err(format!("{} does not compile ({options}):\n{log}", self.source.name));
        }
        if target.is_machine_code() {
            fetch(program.0, nvrtc::nvrtcGetCUBINSize, nvrtc::nvrtcGetCUBIN)
        } else {
            fetch(program.0, nvrtc::nvrtcGetPTXSize, nvrtc::nvrtcGetPTX)
        }
    }
}

/// A program of NVRTC, destroyed when it is dropped.
struct NvrtcHandle(nvrtcProgram);

impl Drop for NvrtcHandle {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: nobody else has it.
            unsafe { nvrtc::nvrtcDestroyProgram(&mut self.0) };
        }
    }
}

/// Gets a size, then the bytes.
fn fetch(
    program: nvrtcProgram,
    size_of: unsafe fn(nvrtcProgram, *mut usize) -> nvrtcResult,
    fill: unsafe fn(nvrtcProgram, *mut c_char) -> nvrtcResult,
) -> Result<Vec<u8>, String> {
    let mut size = 0;
    // SAFETY: the program is alive, and `size` is what the function fills.
    check("nvrtc: the size of the result", unsafe { size_of(program, &mut size) })?;
    let mut bytes = vec![0u8; size];
    // SAFETY: there are `size` bytes.
    check("nvrtc: the result", unsafe { fill(program, bytes.as_mut_ptr().cast()) })?;
    Ok(bytes)
}

fn check(call: &str, status: nvrtcResult) -> Result<(), String> {
    if status == nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    // SAFETY: the function gives a string that lives forever.
    let text = unsafe { CStr::from_ptr(nvrtc::nvrtcGetErrorString(status)) };
    Err(format!("{call}: {}", text.to_string_lossy()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_for_hopper_and_later_waits_itself() {
        for (arch, has_waits) in
            [("sm_80", false), ("compute_89", false), ("sm_90a", true), ("compute_90", true), ("sm_120a", true)]
        {
            assert_eq!(CompileTarget { arch: arch.to_string() }.has_waits(), has_waits, "{arch}");
        }
    }
}
