//! The function `strftime_now`.

use jiff::{Timestamp, Zoned, fmt::strtime, tz::TimeZone};

use super::budget;
use crate::{Error, Result};

/// Maximum bytes of a format. Templates use some twenty.
const MAX_FORMAT: usize = 1024;
/// Bytes that a call, and each byte of its format, take from the rendering's budget. The number corresponds to their
/// time.
const CALL_COST: usize = 1024;
const BYTE_COST: usize = 64;

/// The clock that templates read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Clock {
    /// Now, in the local time zone.
    #[default]
    Now,
    /// A fixed time in seconds since 1970, in UTC. Prompts with a fixed time can share a prefix on different days.
    Utc(i64),
}

impl Clock {
    pub(super) fn zoned(self) -> Result<Zoned> {
        match self {
            Clock::Now => Ok(Zoned::now()),
            Clock::Utc(seconds) => Timestamp::from_second(seconds)
                .map(|time| time.to_zoned(TimeZone::UTC))
                .map_err(|_| Error::argument("clock", "a time between the years -9999 and 9999", seconds)),
        }
    }
}

/// `datetime.now().strftime(format)` of Python.
pub fn strftime(time: &Zoned, format: &str) -> std::result::Result<String, minijinja::Error> {
    let failed = |reason: &dyn std::fmt::Display| {
        minijinja::Error::new(minijinja::ErrorKind::InvalidOperation, format!("strftime_now: {reason}"))
    };
    if format.len() > MAX_FORMAT {
        let reason = format!("the format must have at most {MAX_FORMAT} bytes, got {}", format.len());
        return Err(failed(&reason));
    }
    budget::spend(CALL_COST + format.len() * BYTE_COST)?;
    budget::made(strtime::format(format, time).map_err(|error| failed(&error))?)
}
