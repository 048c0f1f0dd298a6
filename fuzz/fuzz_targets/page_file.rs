//! Arbitrary bytes in the file of a stored page: the page as it was stored, or none. Then arbitrary names of files.
#![cfg_attr(fuzzing, no_main)]

use std::{fs, path::PathBuf};

use kvant::PageStore;
use kvant_engine::PageFiles;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u16, &[u8])| {
    let (at, bytes) = input;
    let folder = tempfile::tempdir().expect("a temporary directory");
    let open = || PageFiles::open(folder.path(), 1 << 20).expect("nobody else has it open");
    let page: Vec<u8> = (0..300u32).map(|at| (at * 7) as u8).collect();
    let key = {
        let files = open();
        let mut store = files.store(&[b"fuzz"]);
        let key = store.child(&store.root(b""), &[1, 2]);
        store.write(&key, 0, page.clone());
        key
    };
    let mut entries = fs::read_dir(folder.path()).expect("a directory").map(|entry| entry.expect("an entry").path());
    let is_page = |path: &PathBuf| path.extension().is_some_and(|kind| kind == "page");
    let path = entries.find(is_page).expect("the page was written");
    // The bytes replace a part of the file, or all of it.
    let mut file = fs::read(&path).expect("the page's file");
    match usize::from(at) % (file.len() + 1) {
        at if at == file.len() => file = bytes.to_vec(),
        at => file.iter_mut().skip(at).zip(bytes).for_each(|(to, from)| *to = *from),
    }
    fs::write(&path, &file).expect("room for it");
    if let Some(name) = std::str::from_utf8(bytes).ok().filter(|name| !name.contains(['/', '\0'])) {
        // The system refuses some names.
        let _ = fs::write(folder.path().join(name), bytes);
    }
    let files = open();
    let read = files.store(&[b"fuzz"]).read(&key, 0, page.len());
    assert!(read.is_none_or(|read| read == page), "another page was read");
});

/// Without cargo-fuzz, a target is only compiled.
#[cfg(not(fuzzing))]
fn main() {}
