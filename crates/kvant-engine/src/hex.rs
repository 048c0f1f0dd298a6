//! Hashes and tokens as text.

use std::fmt::Write;

/// 64 lower-case hexadecimal digits.
pub fn of(bytes: &[u8; 32]) -> String {
    bytes.iter().fold(String::with_capacity(64), |mut text, byte| {
        // Strings accept all text.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The bytes of 64 hexadecimal digits of either case. `None` for any other text.
pub fn parse(text: &str) -> Option<[u8; 32]> {
    if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let mut bytes = [0; 32];
    for (byte, at) in bytes.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(&text[at..at + 2], 16).ok()?;
    }
    Some(bytes)
}
