//! Standard output for results, standard error for everything else. A closed pipe ends the command silently.
//!
//! Names from files and generated text are untrusted. On a terminal, control characters are escaped. Files and pipes
//! get generated text unchanged. Errors are always escaped and shortened.

use std::{
    error::Error,
    io::{self, IsTerminal, Write},
};

pub use kvant_eval::replace;
use kvant_models::untrusted;
use serde::Serialize;

use crate::result::Result;

/// Writes one JSON object as a line to standard output.
pub fn json_line(value: &impl Serialize) -> Result {
    let mut line = serde_json::to_string(value)?;
    line.push('\n');
    text(&line)
}

/// Writes text to standard output and flushes it.
pub fn text(text: &str) -> Result {
    write(io::stdout().lock(), text)
}

/// Writes text for humans: to standard output, or to standard error if standard output is used for JSON. In the latter
/// case, a closed standard error is ignored.
pub fn people(text: &str, json: bool) -> Result {
    if !json {
        return self::text(text);
    }
    let _ = note(text);
    Ok(())
}

/// Writes text to standard error.
pub fn note(text: &str) -> Result {
    write(io::stderr().lock(), text)
}

fn write(mut out: impl Write + IsTerminal, text: &str) -> Result {
    if out.is_terminal() {
        out.write_all(untrusted::text(text).as_bytes())?;
    } else {
        out.write_all(text.as_bytes())?;
    }
    Ok(out.flush()?)
}

/// Whether an error means that the reader of standard output has closed it (`kvant … | head`).
pub fn is_closed(error: &(dyn Error + 'static)) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

/// Writes an error's message, and the messages of its causes that it does not quote.
pub fn report(error: &(dyn Error + 'static)) {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let text = inner.to_string();
        if !message.contains(&text) {
            message = format!("{message}: {text}");
        }
        cause = inner.source();
    }
    // A closed standard error cannot be reported.
    let _ = note(&format!("error: {}\n", untrusted::message(&message)));
}

/// Formats bytes for humans: `512 B`, `7.9 KiB`, `3.0 MiB`.
pub fn bytes(bytes: usize) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if value < 1024.0 {
            let digits = if unit == "B" { 0 } else { 1 };
            return format!("{value:.digits$} {unit}");
        }
        value /= 1024.0;
    }
    format!("{value:.1} TiB")
}

/// Rounds to three decimals, which exceeds the precision of the clock.
pub fn round3(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_in_the_unit_that_fits() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(8090), "7.9 KiB");
        assert_eq!(bytes(3 << 20), "3.0 MiB");
        assert_eq!(bytes(5 << 40), "5.0 TiB");
    }

    #[test]
    fn only_a_broken_pipe_is_quiet() {
        assert!(is_closed(&io::Error::from(io::ErrorKind::BrokenPipe)));
        assert!(!is_closed(&io::Error::from(io::ErrorKind::NotFound)));
    }
}
