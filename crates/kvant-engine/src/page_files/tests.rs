//! Directories of pages: restarts, limits, damage, and other processes.

use std::{fs, path::PathBuf, time::Duration};

use super::*;

/// A new directory, removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("kvant-page-files-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Scratch(path)
    }

    fn open(&self, max_bytes: u64) -> PageFiles {
        PageFiles::open(&self.0, max_bytes).unwrap()
    }

    /// The files of pages.
    fn files(&self) -> Vec<PathBuf> {
        let paths = fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().path());
        let mut files: Vec<PathBuf> =
            paths.filter(|path| path.extension().is_some_and(|kind| kind == "page")).collect();
        files.sort();
        files
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const PAGE: usize = 5000;

fn page(number: u8) -> Vec<u8> {
    (0..PAGE).map(|at| number ^ at as u8).collect()
}

/// The keys of a prefix of `n` pages.
fn keys(store: &PageFileStore, salt: &[u8], n: u32) -> Vec<PageKey> {
    let mut key = store.root(salt);
    (0..n)
        .map(|at| {
            key = store.child(&key, &[at, at + 1]);
            key
        })
        .collect()
}

#[test]
fn pages_outlive_their_process() {
    let scratch = Scratch::new("outlive");
    let files = scratch.open(1 << 20);
    let mut store = files.store(&[b"model"]);
    let names = keys(&store, b"salt", 3);
    for (number, key) in names.iter().enumerate() {
        assert!(!store.has(key, 1) && store.has_room());
        store.write(key, 1, page(number as u8));
        assert_eq!(store.read(key, 1, PAGE), Some(page(number as u8)), "before it is written");
    }
    files.wait();
    assert_eq!(store.read(&names[1], 1, PAGE), Some(page(1)), "after it is written");
    assert_eq!((files.bytes(), scratch.files().len()), (3 * format::file_len(PAGE), 3));
    drop(store);
    assert!(files.close(Duration::from_secs(10)));

    let files = scratch.open(1 << 20);
    let mut same = files.store(&[b"model"]);
    assert_eq!((keys(&same, b"salt", 3), files.bytes()), (names.clone(), 3 * format::file_len(PAGE)));
    for (number, key) in names.iter().enumerate() {
        assert_eq!(same.read(key, 1, PAGE), Some(page(number as u8)));
        assert!(!same.has(key, 0));
    }
    // Another salt, another model and another size are other pages.
    assert!(keys(&same, b"other", 3).iter().all(|key| !same.has(key, 1)));
    let mut other = files.store(&[b"mod", b"el"]);
    assert!(keys(&other, b"salt", 3).iter().chain(&names).all(|key| !other.has(key, 1)));
    other.clear();
    assert_eq!(scratch.files().len(), 3);
    same.clear();
    files.wait();
    assert_eq!((files.bytes(), scratch.files().len()), (0, 0));
}

/// A directory serves one process at a time.
#[test]
fn a_directory_in_use_is_refused() {
    let scratch = Scratch::new("lock");
    let files = scratch.open(1);
    let again = PageFiles::open(&scratch.0, 1);
    assert!(matches!(&again, Err(PageFilesError::InUse { path }) if *path == scratch.0), "{again:?}");
    assert!(!files.clone().close(Duration::ZERO), "there is another handle");
    assert!(files.close(Duration::ZERO));
    drop(scratch.open(1));
    fs::write(scratch.0.join("file"), "").unwrap();
    let error = PageFiles::open(&scratch.0.join("file"), 1).unwrap_err();
    assert!(matches!(error, PageFilesError::Io { .. }) && error.to_string().contains("file"), "{error}");
}

/// The least recently used pages go first, also after a restart.
#[test]
fn the_least_recently_used_pages_are_removed() {
    let scratch = Scratch::new("limit");
    let limit = 4 * format::file_len(PAGE) + 1;
    let files = scratch.open(limit);
    let mut store = files.store(&[b"model"]);
    let names = keys(&store, b"", 8);
    let held = |store: &PageFileStore| -> Vec<usize> {
        (0..names.len()).filter(|&index| store.has(&names[index], 0)).collect()
    };
    for (number, key) in names[..4].iter().enumerate() {
        store.write(key, 0, page(number as u8));
    }
    // The pages of a prefix, the last one first: later ones are removed first.
    store.touch(&[(names[1], 0), (names[0], 0), (names[0], 7)]);
    store.write(&names[4], 0, page(4));
    assert_eq!(held(&store), [0, 1, 3, 4]);
    store.write(&names[5], 0, page(5));
    store.write(&names[6], 0, page(6));
    assert_eq!(held(&store), [0, 4, 5, 6]);
    files.wait();
    assert_eq!((scratch.files().len(), files.bytes()), (4, limit - 1));
    store.touch(&[(names[5], 0)]);
    store.touch(&[(names[0], 0)]);
    drop(store);
    assert!(files.close(Duration::from_secs(10)));
    let files = scratch.open(2 * format::file_len(PAGE));
    let mut store = files.store(&[b"model"]);
    assert_eq!(held(&store), [0, 5]);
    files.wait();
    assert_eq!(scratch.files().len(), 2);
    // A page that does not fit at all.
    store.write(&names[7], 0, vec![0; 3 * PAGE]);
    assert_eq!(held(&store), [0, 5]);
}

/// Files that are not exactly those of a page are never read as one; files of others stay.
#[test]
fn nothing_in_the_directory_is_trusted() {
    let scratch = Scratch::new("trust");
    let names = {
        let files = scratch.open(1 << 20);
        let mut store = files.store(&[b"model"]);
        let names = keys(&store, b"", 6);
        names.iter().enumerate().for_each(|(number, key)| store.write(key, 0, page(number as u8)));
        names
    };
    let path = |index: usize| {
        let name = PageName { identity: format::hash(&[b"model"]), key: names[index], group: 0 };
        scratch.0.join(name.file_name())
    };
    let whole = fs::read(path(0)).unwrap();
    // Truncated, longer, one bit, the bytes of another page, a directory.
    fs::write(path(0), &whole[..whole.len() - 1]).unwrap();
    fs::write(path(1), [&whole[..], b"x"].concat()).unwrap();
    let mut flipped = fs::read(path(2)).unwrap();
    flipped[2000] ^= 4;
    fs::write(path(2), flipped).unwrap();
    fs::write(path(3), &whole).unwrap();
    fs::remove_file(path(4)).unwrap();
    fs::create_dir(path(4)).unwrap();
    #[cfg(unix)]
    {
        // A link, even to the right bytes.
        let target = scratch.0.join("target");
        fs::rename(path(5), &target).unwrap();
        std::os::unix::fs::symlink(&target, path(5)).unwrap();
    }
    let foreign = ["notes.txt", "0123-4567-0.page", ".page", "kvant.lock.tmp"];
    foreign.iter().for_each(|name| fs::write(scratch.0.join(name), "mine").unwrap());
    let unfinished = path(0).with_extension("page.tmp");
    fs::write(&unfinished, "half").unwrap();

    let files = scratch.open(1 << 20);
    let mut store = files.store(&[b"model"]);
    assert!(!unfinished.exists());
    for key in &names[..if cfg!(unix) { 6 } else { 5 }] {
        assert_eq!(store.read(key, 0, PAGE), None);
        assert!(!store.has(key, 0));
    }
    // They can be stored again, except where the system refuses it.
    names.iter().for_each(|key| store.write(key, 0, page(9)));
    files.wait();
    drop(store);
    drop(files);
    let files = scratch.open(1 << 20);
    let mut store = files.store(&[b"model"]);
    let read: Vec<bool> = names.iter().map(|key| store.read(key, 0, PAGE) == Some(page(9))).collect();
    assert_eq!(read, [true, true, true, true, false, true]);
    for name in foreign {
        assert_eq!(fs::read(scratch.0.join(name)).unwrap(), b"mine");
    }
}

/// A directory that can no longer be written loses pages, and nothing else.
#[test]
fn a_directory_that_disappears_loses_pages() {
    let scratch = Scratch::new("gone");
    let files = scratch.open(1 << 20);
    let mut store = files.store(&[b"model"]);
    let names = keys(&store, b"", 2);
    store.write(&names[0], 0, page(0));
    files.wait();
    fs::remove_dir_all(&scratch.0).unwrap();
    store.write(&names[1], 0, page(1));
    files.wait();
    assert_eq!((store.read(&names[0], 0, PAGE), store.read(&names[1], 0, PAGE)), (None, None));
    assert_eq!(files.bytes(), 0);
}

/// More pages than wait in memory at a time.
#[test]
fn a_writer_waits_for_the_disk() {
    let scratch = Scratch::new("room");
    let files = scratch.open(1 << 30);
    let mut store = files.store(&[b"model"]);
    let names = keys(&store, b"", 5);
    for key in &names {
        store.write(key, 0, vec![1; MAX_UNWRITTEN / 2 + 1]);
    }
    files.wait();
    assert!(store.has_room() && names.iter().all(|key| store.has(key, 0)));
    assert_eq!(scratch.files().len(), 5);
}
