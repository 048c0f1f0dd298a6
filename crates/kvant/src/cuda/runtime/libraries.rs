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
    for path in first_with(name, named.into_iter().chain(toolkits)) {
        // SAFETY: as in `has_driver`.
        if let Ok(library) = unsafe { Library::new(path) } {
            std::mem::forget(library);
        }
    }
}

/// The files of `lib{name}` and its parts in the first folder that has any.
fn first_with(name: &str, folders: impl IntoIterator<Item = PathBuf>) -> Vec<PathBuf> {
    // `libnvrtc.so.13`, and `libnvrtc-builtins.so.13.0`, which `libnvrtc` opens by name.
    let (library, parts) = (format!("lib{name}.so.1"), format!("lib{name}-builtins.so.1"));
    let is_part = |path: &PathBuf| {
        let file = path.file_name().and_then(|file| file.to_str()).unwrap_or_default();
        (file.starts_with(&library) && file.matches('.').count() == 2) || file.starts_with(&parts)
    };
    let in_folder = |folder: PathBuf| {
        let entries = std::fs::read_dir(folder).ok()?;
        let paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).filter(is_part).collect();
        (!paths.is_empty()).then_some(paths)
    };
    folders.into_iter().find_map(in_folder).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// The layout of NVIDIA's packages for CUDA 12 and 13, and of a toolkit.
    #[test]
    fn the_first_folder_with_a_library_is_used() {
        let root = std::env::temp_dir().join(format!("kvant-nvidia-{}", std::process::id()));
        let packages = root.join("site-packages/nvidia");
        let folders = [
            ("cu13/lib", &["libnvrtc.so.13", "libnvrtc-builtins.so.13.2", "libnvrtc.alt.so.13", "libcudart.so.13"][..]),
            ("cublas/lib", &["libcublas.so.12", "libcublasLt.so.12", "libcublasLt.so", "libcublasLt.so.12.9.1"]),
            ("cuda_nvrtc/lib", &["libnvrtc.so.12", "libnvrtc-builtins.so.12.9"]),
            ("../../toolkit/lib64", &["libnvrtc.so.12", "libcublasLt.so.12"]),
        ];
        for (folder, files) in folders {
            fs::create_dir_all(packages.join(folder)).unwrap();
            files.iter().for_each(|file| fs::write(packages.join(folder).join(file), "").unwrap());
        }
        let all = || [PathBuf::from("/nowhere")].into_iter().chain(folders.map(|(folder, _)| packages.join(folder)));
        let mut found = first_with("nvrtc", all());
        found.sort();
        let expected = ["cu13/lib/libnvrtc-builtins.so.13.2", "cu13/lib/libnvrtc.so.13"];
        assert_eq!(found, expected.map(|path| packages.join(path)));
        assert_eq!(first_with("cublasLt", all()), [packages.join("cublas/lib/libcublasLt.so.12")]);
        assert_eq!(first_with("cublasLt", all().skip(3)), [packages.join("../../toolkit/lib64/libcublasLt.so.12")]);
        assert!(first_with("cufft", all()).is_empty());
        fs::remove_dir_all(root).unwrap();
    }
}
