//! The bytes of a transfer: a greeting, an answer, and frames of pages.
//!
//! | who | bytes |
//! |---|---|
//! | receiver | `kvantkv3`, token, format of the pages, hash of the prompt: 8 + 3 · 32 bytes |
//! | receiver | number of layer groups (u32), for each the first page that it lacks (u32) |
//! | sender | one byte: 0 if pages follow, otherwise a [`Refusal`] |
//! | sender | for each page: index (u32), layer group (u32), length (u64), the page, checksum (32 bytes) |
//! | sender | index 2³² − 2, number of pages so far (u32), 0 (u64), checksum: the prompt is still being computed |
//! | sender | index 2³² − 1, number of pages (u32), 0 (u64), checksum: the end |
//!
//! Numbers are little-endian. A checksum is SHA-256 of the token and the frame before it, so that a frame of another
//! transfer is not accepted.

use std::io::{self, Read, Write};

use kvant_engine::PrefixPage;
use sha2::{Digest, Sha256};

const MAGIC: &[u8; 8] = b"kvantkv3";
/// The index of the last frame.
const END: u32 = u32::MAX;
/// The index of a frame without a page.
const WAITING: u32 = u32::MAX - 1;
/// Maximum layer groups of a pool.
const MAX_GROUPS: u32 = 1024;
const FRAME: usize = 16;
const CHECKSUM: usize = 32;

/// Why a sender refuses, or a receiver stops.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The connection failed or timed out.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The sender has refused.
    #[error("the sender refused: {0}")]
    Refused(Refusal),
    /// The bytes are not those of a transfer, or not of this one.
    #[error("invalid bytes: {0}")]
    Invalid(&'static str),
}

/// Why a sender refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The token is unknown, was used before, or has expired.
    #[error("unknown token")]
    Token,
    /// The workers have other models, cache types, page sizes or versions.
    #[error("other model, cache type, page size or version")]
    Format,
    /// The prompt is another.
    #[error("another prompt")]
    Prompt,
}

impl Refusal {
    fn byte(self) -> u8 {
        match self {
            Refusal::Token => 1,
            Refusal::Format => 2,
            Refusal::Prompt => 3,
        }
    }
}

/// The first bytes of a receiver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Greeting {
    pub token: [u8; 32],
    pub format: [u8; 32],
    pub prompt: [u8; 32],
    /// The first page that the receiver lacks, by layer group.
    pub first: Vec<u32>,
}

impl Greeting {
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let mut bytes = [&MAGIC[..], &self.token, &self.format, &self.prompt].concat();
        let groups = u32::try_from(self.first.len()).map_err(|_| io::Error::other("too many layer groups"))?;
        [groups].iter().chain(&self.first).for_each(|number| bytes.extend(number.to_le_bytes()));
        to.write_all(&bytes)
    }

    pub fn read(from: &mut impl Read) -> Result<Greeting, TransferError> {
        let mut hash = |expected: Option<&[u8]>| {
            let mut bytes = [0; 32];
            let len = expected.map_or(32, <[u8]>::len);
            from.read_exact(&mut bytes[..len])?;
            match expected.is_none_or(|expected| expected == &bytes[..len]) {
                true => Ok(bytes),
                false => Err(TransferError::Invalid("not a receiver of pages")),
            }
        };
        hash(Some(MAGIC))?;
        let [token, format, prompt] = [hash(None)?, hash(None)?, hash(None)?];
        let mut number = || {
            let mut bytes = [0; 4];
            from.read_exact(&mut bytes).map(|()| u32::from_le_bytes(bytes))
        };
        let groups = number()?;
        if groups > MAX_GROUPS {
            return Err(TransferError::Invalid("too many layer groups"));
        }
        let first = (0..groups).map(|_| number()).collect::<io::Result<_>>()?;
        Ok(Greeting { token, format, prompt, first })
    }
}

/// Writes the answer to a greeting.
pub fn write_answer(to: &mut impl Write, refusal: Option<Refusal>) -> io::Result<()> {
    to.write_all(&[refusal.map_or(0, Refusal::byte)])
}

fn checksum(token: &[u8; 32], header: &[u8; FRAME], page: &[u8]) -> [u8; CHECKSUM] {
    Sha256::new().chain_update(token).chain_update(header).chain_update(page).finalize().into()
}

fn header(index: u32, group: u32, len: u64) -> [u8; FRAME] {
    let mut header = [0; FRAME];
    header[..4].copy_from_slice(&index.to_le_bytes());
    header[4..8].copy_from_slice(&group.to_le_bytes());
    header[8..].copy_from_slice(&len.to_le_bytes());
    header
}

/// Writes the frames of a transfer.
pub struct PageWriter<W> {
    to: W,
    token: [u8; 32],
    pages: u32,
}

impl<W: Write> PageWriter<W> {
    pub fn new(to: W, token: [u8; 32]) -> PageWriter<W> {
        PageWriter { to, token, pages: 0 }
    }

    pub fn write(&mut self, page: &PrefixPage) -> io::Result<()> {
        let too_large = |_| io::Error::other("a page number above u32");
        let (index, group) = (page.index.try_into().map_err(too_large)?, page.group.try_into().map_err(too_large)?);
        self.pages += 1;
        self.frame(&header(index, group, page.bytes.len() as u64), &page.bytes)
    }

    /// Sends what is written, and that the prompt is still being computed.
    pub fn wait(&mut self) -> io::Result<()> {
        self.frame(&header(WAITING, self.pages, 0), &[])?;
        self.to.flush()
    }

    pub fn end(mut self) -> io::Result<()> {
        self.frame(&header(END, self.pages, 0), &[])?;
        self.to.flush()
    }

    fn frame(&mut self, header: &[u8; FRAME], page: &[u8]) -> io::Result<()> {
        let checksum = checksum(&self.token, header, page);
        [&header[..], page, &checksum].into_iter().try_for_each(|bytes| self.to.write_all(bytes))
    }
}

/// A frame of a transfer.
#[derive(Debug, PartialEq, Eq)]
pub enum Received {
    /// A page.
    Page(PrefixPage),
    /// The prompt is still being computed.
    Waiting,
}

/// Reads the pages that another worker sends. Nothing is trusted: a page has an index below `max_pages`, a layer group
/// of the pool, and that group's size. Memory is allocated only for such a page.
#[derive(Debug)]
pub struct PageReader<R> {
    from: R,
    token: [u8; 32],
    /// Bytes of a page of each layer group.
    sizes: Vec<usize>,
    max_pages: usize,
    pages: u32,
    is_over: bool,
}

impl<R: Read> PageReader<R> {
    /// Reads the answer to a greeting with a token. `sizes`: bytes of a page of each layer group. `max_pages`: pages of
    /// the prompt.
    ///
    /// # Errors
    /// `Refused`, `Io`, `Invalid`.
    pub fn start(mut from: R, token: [u8; 32], sizes: Vec<usize>, max_pages: usize) -> Result<Self, TransferError> {
        let mut answer = [0];
        from.read_exact(&mut answer)?;
        let refusals = [Refusal::Token, Refusal::Format, Refusal::Prompt];
        match (answer[0], refusals.into_iter().find(|refusal| refusal.byte() == answer[0])) {
            (0, _) => Ok(PageReader { from, token, sizes, max_pages, pages: 0, is_over: false }),
            (_, Some(refusal)) => Err(TransferError::Refused(refusal)),
            _ => Err(TransferError::Invalid("not a sender of pages")),
        }
    }

    /// Returns the next frame; `None` after the last one.
    ///
    /// # Errors
    /// `Io`, also for a truncated stream; `Invalid`. The stream is then of no further use.
    pub fn next_frame(&mut self) -> Result<Option<Received>, TransferError> {
        if self.is_over {
            return Ok(None);
        }
        // An error ends the stream.
        self.is_over = true;
        let mut header = [0; FRAME];
        self.from.read_exact(&mut header)?;
        let (numbers, len) = header.split_at(8);
        let [index, group] = [0, 4].map(|at| u32::from_le_bytes(numbers[at..at + 4].try_into().unwrap_or_default()));
        let len = u64::from_le_bytes(len.try_into().unwrap_or_default());
        if index >= WAITING {
            self.check(&header, &[])?;
            if (group, len) != (self.pages, 0) {
                return Err(TransferError::Invalid("missing pages"));
            }
            self.is_over = index == END;
            return Ok(if self.is_over { None } else { Some(Received::Waiting) });
        }
        let (index, group) = (index as usize, group as usize);
        let Some(&size) = self.sizes.get(group).filter(|&&size| size as u64 == len) else {
            return Err(TransferError::Invalid("a page of another size"));
        };
        let max_frames = self.max_pages.saturating_mul(self.sizes.len());
        if index >= self.max_pages || self.pages as usize >= max_frames {
            return Err(TransferError::Invalid("a page after the prompt"));
        }
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(size).map_err(|_| TransferError::Invalid("a page larger than the memory"))?;
        bytes.resize(size, 0);
        self.from.read_exact(&mut bytes)?;
        self.check(&header, &bytes)?;
        self.pages += 1;
        self.is_over = false;
        Ok(Some(Received::Page(PrefixPage::new(index, group, bytes))))
    }

    fn check(&mut self, header: &[u8; FRAME], page: &[u8]) -> Result<(), TransferError> {
        let mut got = [0; CHECKSUM];
        self.from.read_exact(&mut got)?;
        let is_equal = got == checksum(&self.token, header, page);
        if is_equal { Ok(()) } else { Err(TransferError::Invalid("a wrong checksum")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: [u8; 32] = [7; 32];

    fn pages() -> Vec<PrefixPage> {
        [(0, 0, 5), (0, 1, 300), (1, 1, 300)]
            .map(|(index, group, len)| PrefixPage::new(index, group, vec![3; len]))
            .into()
    }

    fn stream() -> Vec<u8> {
        let mut bytes = Vec::new();
        write_answer(&mut bytes, None).unwrap();
        let mut writer = PageWriter::new(&mut bytes, TOKEN);
        for page in pages() {
            writer.wait().unwrap();
            writer.write(&page).unwrap();
        }
        writer.end().unwrap();
        bytes
    }

    /// All pages of a stream, or the first error.
    fn read(
        bytes: &[u8],
        token: [u8; 32],
        sizes: &[usize],
        max_pages: usize,
    ) -> Result<Vec<PrefixPage>, TransferError> {
        let mut reader = PageReader::start(bytes, token, sizes.to_vec(), max_pages)?;
        let mut pages = Vec::new();
        while let Some(frame) = reader.next_frame()? {
            if let Received::Page(page) = frame {
                pages.push(page);
            }
        }
        Ok(pages)
    }

    #[test]
    fn greetings() {
        let greeting = Greeting { token: TOKEN, format: [1; 32], prompt: [2; 32], first: vec![0, 70_000] };
        let mut bytes = Vec::new();
        greeting.write(&mut bytes).unwrap();
        assert_eq!(Greeting::read(&mut &bytes[..]).unwrap(), greeting);
        for end in [103, 105, bytes.len() - 1] {
            assert!(matches!(Greeting::read(&mut &bytes[..end]), Err(TransferError::Io(_))), "{end} bytes");
        }
        bytes[107] = 1;
        assert!(matches!(Greeting::read(&mut &bytes[..]), Err(TransferError::Invalid(_))));
        bytes[107] = 0;
        bytes[7] = b'1';
        assert!(matches!(Greeting::read(&mut &bytes[..]), Err(TransferError::Invalid(_))));
    }

    #[test]
    fn a_stream_is_read_as_it_was_written() {
        assert_eq!(read(&stream(), TOKEN, &[5, 300], 2).unwrap(), pages());
    }

    #[test]
    fn refusals_arrive() {
        for refusal in [Refusal::Token, Refusal::Format, Refusal::Prompt] {
            let mut bytes = Vec::new();
            write_answer(&mut bytes, Some(refusal)).unwrap();
            let error = read(&bytes, TOKEN, &[5], 1).unwrap_err();
            assert!(matches!(error, TransferError::Refused(got) if got == refusal), "{error}");
        }
        assert!(matches!(read(&[9], TOKEN, &[5], 1), Err(TransferError::Invalid(_))));
    }

    /// Every truncation and every flipped bit of a stream is noticed, and so are pages that do not fit the pool.
    #[test]
    fn damaged_streams_are_refused() {
        let whole = stream();
        for end in 0..whole.len() {
            assert!(matches!(read(&whole[..end], TOKEN, &[5, 300], 2), Err(TransferError::Io(_))), "{end} bytes");
        }
        for at in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[at] ^= 1 << (at % 8);
            assert!(read(&flipped, TOKEN, &[5, 300], 2).is_err(), "byte {at}");
        }
        for (token, sizes, max_pages) in
            [([8; 32], &[5, 300][..], 2), (TOKEN, &[5, 301], 2), (TOKEN, &[5], 2), (TOKEN, &[5, 300], 1)]
        {
            assert!(matches!(read(&whole, token, sizes, max_pages), Err(TransferError::Invalid(_))));
        }
        // A length that nobody has is not allocated.
        let mut large = whole[..1].to_vec();
        large.extend(header(0, 0, u64::MAX));
        assert!(matches!(read(&large, TOKEN, &[5], 2), Err(TransferError::Invalid(_))));
    }
}
