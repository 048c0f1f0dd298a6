//! The bytes of a page's file.
//!
//! | bytes | contents |
//! |---|---|
//! | 8 | `kvantpg1` |
//! | 32 | the identity of model, format and device |
//! | 32 | the key: a hash of the identity, the salt and all tokens up to the end of the page |
//! | 4 | layer group, little-endian |
//! | 8 | length of the page, little-endian |
//! | … | the page |
//! | 32 | SHA-256 of all bytes before |

use kvant::PageKey;
use sha2::{Digest, Sha256};

use crate::hex;

const MAGIC: &[u8; 8] = b"kvantpg1";
const HEADER: usize = 8 + 32 + 32 + 4 + 8;
const CHECKSUM: usize = 32;

/// The name of a page: unique among all models, formats and devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageName {
    pub identity: [u8; 32],
    pub key: PageKey,
    pub group: u32,
}

/// A hash of several parts, whose lengths are part of it.
pub fn hash(parts: &[&[u8]]) -> [u8; 32] {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hasher.finalize().into()
}

/// Length of the file of a page of `page` bytes.
pub fn file_len(page: usize) -> u64 {
    (page as u64).saturating_add((HEADER + CHECKSUM) as u64)
}

fn header(name: &PageName, page: usize) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(MAGIC);
    header[8..40].copy_from_slice(&name.identity);
    header[40..72].copy_from_slice(&name.key);
    header[72..76].copy_from_slice(&name.group.to_le_bytes());
    header[76..].copy_from_slice(&(page as u64).to_le_bytes());
    header
}

/// The bytes before and after a page in its file.
pub fn frame(name: &PageName, page: &[u8]) -> ([u8; HEADER], [u8; CHECKSUM]) {
    let header = header(name, page.len());
    let checksum = Sha256::new().chain_update(header).chain_update(page).finalize();
    (header, checksum.into())
}

/// The page in the bytes of a file. `None` unless they are exactly those of this page, with this length.
pub fn read(name: &PageName, page: usize, mut file: Vec<u8>) -> Option<Vec<u8>> {
    if file.len() as u64 != file_len(page) || file[..HEADER] != header(name, page) {
        return None;
    }
    let (rest, checksum) = file.split_at(file.len() - CHECKSUM);
    if Sha256::digest(rest)[..] != *checksum {
        return None;
    }
    file.truncate(HEADER + page);
    file.drain(..HEADER);
    Some(file)
}

impl PageName {
    /// The name of the page's file.
    pub fn file_name(&self) -> String {
        format!("{}-{}-{}.page", hex::of(&self.identity), hex::of(&self.key), self.group)
    }

    /// The page with a file name. `None` for names of other files.
    pub fn parse(file_name: &str) -> Option<PageName> {
        let mut parts = file_name.strip_suffix(".page")?.split('-');
        let (identity, key) = (hex::parse(parts.next()?)?, hex::parse(parts.next()?)?);
        let name = PageName { identity, key, group: parts.next()?.parse().ok()? };
        // Other spellings of the same name, such as capitals, are other files.
        (name.file_name() == file_name).then_some(name)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name(seed: u8) -> PageName {
        PageName { identity: [seed; 32], key: [seed ^ 0x5a; 32], group: u32::from(seed) }
    }

    fn file(name: &PageName, page: &[u8]) -> Vec<u8> {
        let (header, checksum) = frame(name, page);
        [&header, page, &checksum].concat()
    }

    #[test]
    fn names_of_files_are_exact() {
        let page = name(7);
        let text = page.file_name();
        assert_eq!(PageName::parse(&text), Some(page));
        for other in [text.to_uppercase(), text.replace("-7.", "-07."), format!("{text}x"), text[1..].to_string()] {
            assert_eq!(PageName::parse(&other), None, "{other}");
        }
        for other in ["", ".page", "--.page", &format!("{}-{}-1.page", "é".repeat(32), "0".repeat(64))] {
            assert_eq!(PageName::parse(other), None, "{other}");
        }
    }

    #[test]
    fn parts_of_a_hash_are_separate() {
        assert_ne!(hash(&[b"ab", b"c"]), hash(&[b"a", b"bc"]));
        assert_ne!(hash(&[b"ab"]), hash(&[b"ab", b""]));
    }

    proptest! {
        /// A file is read as it was written, and not if any bit or its length differs, or under another name.
        #[test]
        fn only_exact_files_are_read(
            page in prop::collection::vec(any::<u8>(), 0..300),
            seed in any::<u8>(),
            bit in any::<prop::sample::Index>(),
            len in any::<prop::sample::Index>(),
        ) {
            let (name, other) = (name(seed), name(seed.wrapping_add(1)));
            let whole = file(&name, &page);
            prop_assert_eq!(whole.len() as u64, file_len(page.len()));
            prop_assert_eq!(read(&name, page.len(), whole.clone()), Some(page.clone()));
            prop_assert_eq!(read(&other, page.len(), whole.clone()), None);
            prop_assert_eq!(read(&name, page.len() + 1, whole.clone()), None);
            let mut flipped = whole.clone();
            let bit = bit.index(whole.len() * 8);
            flipped[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(read(&name, page.len(), flipped), None);
            let cut = whole[..len.index(whole.len())].to_vec();
            prop_assert_eq!(read(&name, page.len(), cut), None);
            prop_assert_eq!(read(&name, page.len(), [whole, vec![0]].concat()), None);
        }
    }
}
