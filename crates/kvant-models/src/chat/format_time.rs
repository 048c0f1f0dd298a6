//! The function `strftime_now`.

use jiff::{Timestamp, Zoned, fmt::strtime, tz::TimeZone};

use super::jinja;
use crate::{Error, Result};

/// Bytes of a format. Those of templates have some twenty.
const LONGEST_FORMAT: usize = 1024;
/// Bytes of a rendering's budget for a call and for each byte of its format: about the time that as many bytes take
/// elsewhere.
const CALL_COST: usize = 1024;
const BYTE_COST: usize = 64;

/// The time that templates ask for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Clock {
    /// Now, in the local time zone.
    #[default]
    Now,
    /// So many seconds after 1970 began, in UTC. Prompts with a fixed time can share a prefix on different days.
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
    if format.len() > LONGEST_FORMAT {
        let reason = format!("the format must have at most {LONGEST_FORMAT} bytes, got {}", format.len());
        return Err(failed(&reason));
    }
    jinja::spend(CALL_COST + format.len() * BYTE_COST)?;
    jinja::made(strtime::format(format, time).map_err(|error| failed(&error))?)
}
