//! Arbitrary bytes from another worker: an error, or pages that fit the pool.
#![cfg_attr(fuzzing, no_main)]

use kvant_transfer::{PageReader, Received};
use libfuzzer_sys::fuzz_target;

/// Bytes of a page of each layer group, and pages of the prompt.
const SIZES: [usize; 2] = [5, 300];
const MAX_PAGES: usize = 4;

fuzz_target!(|bytes: &[u8]| {
    let Ok(mut reader) = PageReader::start(bytes, [7; 32], SIZES.to_vec(), MAX_PAGES) else { return };
    let mut count = 0;
    while let Ok(Some(frame)) = reader.next_frame() {
        let Received::Page(page) = frame else { continue };
        assert!(page.index < MAX_PAGES && page.bytes.len() == SIZES[page.group]);
        count += 1;
        assert!(count <= MAX_PAGES * SIZES.len());
    }
    assert!(matches!(reader.next_frame(), Ok(None)), "a stream ends once");
});

/// Without cargo-fuzz, a target is only compiled.
#[cfg(not(fuzzing))]
fn main() {}
