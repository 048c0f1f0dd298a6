//! Results as rows of a table.

use serde::Serialize;

/// A row, and a JSON object.
pub trait Row: Serialize {
    /// The line above the rows.
    const HEADER: &str;

    /// The line.
    fn row(&self) -> String;
}
