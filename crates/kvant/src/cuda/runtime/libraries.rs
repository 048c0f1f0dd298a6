//! Finding NVIDIA's libraries at run time.
//!
//! The loader searches `LD_LIBRARY_PATH` and the linker's cache. A CUDA toolkit is often outside both. Therefore the
//! libraries in named folders and in the toolkit's are opened first, by path; the loader then finds them by name.

use std::{
    path::PathBuf,
    sync::{Mutex, OnceLock, PoisonError},
};

use libloading::Library;

/// Folders that the program has named.
static FOLDERS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Adds folders that are searched before those of a toolkit.
pub(in crate::cuda) fn search_in(folders: Vec<PathBuf>) {
    FOLDERS.lock().unwrap_or_else(PoisonError::into_inner).extend(folders);
}

/// Whether `libcuda`, the driver, can be loaded.
pub(in crate::cuda) fn has_driver() -> bool {
    // SAFETY: loading NVIDIA's driver runs its initialisers, which is what the caller wants.
    unsafe { cudarc::driver::sys::is_culib_present() }
}

/// The first of these functions that the driver lacks, if [`has_driver`]: cudarc panics when such a function is called.
pub(super) fn missing_in_driver(names: &[&'static str]) -> Option<&'static str> {
    // SAFETY: cudarc has loaded it under one of these names, so no initialiser runs now.
    let open = |name| unsafe { Library::new(name) }.ok();
    let driver = ["libcuda.so.1", "libcuda.so", "nvcuda.dll"].into_iter().find_map(open)?;
    // SAFETY: the symbol is only looked for.
    let is_missing = |name: &&&str| unsafe { driver.get::<*const ()>(name.as_bytes()) }.is_err();
    names.iter().find(is_missing).copied()
}

/// Whether `libnvrtc`, the compiler, can be loaded.
pub(in crate::cuda) fn has_nvrtc() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| {
        open_from_toolkit("nvrtc");
        // SAFETY: as in `has_driver`.
        unsafe { cudarc::nvrtc::sys::is_culib_present() }
    })
}

/// Whether `libcublasLt`, for matrix products, can be loaded.
pub(super) fn has_cublaslt() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| {
        open_from_toolkit("cublasLt");
        // SAFETY: as in `has_driver`.
        unsafe { cudarc::cublaslt::sys::is_culib_present() }
    })
}

/// Opens `lib{name}` and its parts from the first folder that has it, and keeps them open.
fn open_from_toolkit(name: &str) {
    if !cfg!(target_os = "linux") {
        return;
    }
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    let toolkits = homes.chain([PathBuf::from("/usr/local/cuda")]).map(|home| home.join("lib64"));
    let named = FOLDERS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    for folder in named.into_iter().chain(toolkits) {
        let Ok(entries) = std::fs::read_dir(folder) else { continue };
        // `libnvrtc.so.13`, and `libnvrtc-builtins.so.13.0`, which `libnvrtc` opens by name.
        let (library, parts) = (format!("lib{name}.so.1"), format!("lib{name}-builtins.so.1"));
        let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        paths.retain(|path| {
            let file = path.file_name().and_then(|file| file.to_str()).unwrap_or_default();
            (file.starts_with(&library) && file.matches('.').count() == 2) || file.starts_with(&parts)
        });
        for path in &paths {
            // SAFETY: as in `has_driver`.
            if let Ok(library) = unsafe { Library::new(path) } {
                std::mem::forget(library);
            }
        }
        if !paths.is_empty() {
            return;
        }
    }
}
