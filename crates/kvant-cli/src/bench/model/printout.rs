//! The lines of results, as text or JSON.

use kvant::Device;
use serde::Serialize;

use super::super::timing::Timing;
use crate::{output, result::Result};

/// A line of results.
#[derive(Default, Serialize)]
pub struct ModelLine {
    pub op: &'static str,
    pub device: String,
    pub kv: Option<String>,
    pub sequences: Option<usize>,
    /// Tokens of the prompt, or of each sequence in the cache.
    pub context: Option<usize>,
    pub temperature: Option<f32>,
    /// The time of the first call, which may compile kernels and allocate memory.
    pub us_first: Option<f64>,
    pub us_median: f64,
    pub us_min: f64,
    pub tokens_per_second: Option<f64>,
    /// Bytes that the call must move.
    pub bytes: Option<usize>,
    /// `bytes` per median time, in 1e9 bytes per second.
    pub gbps: Option<f64>,
    /// `gbps` relative to the rate of plain reads.
    pub of_read: Option<f64>,
}

/// Prints lines as text or JSON.
pub struct Printout {
    pub device: Device,
    pub json: bool,
    /// The rate of plain reads, in 1e9 bytes per second.
    pub read_gbps: f64,
}

impl Printout {
    pub fn line(&self, op: &'static str, timing: &Timing) -> ModelLine {
        let [us_median, us_min] = [timing.median_us, timing.min_us].map(output::round3);
        ModelLine { op, device: self.device.to_string(), us_median, us_min, ..ModelLine::default() }
    }

    pub fn print(&self, line: ModelLine) -> Result {
        let gbps = line.bytes.map(|bytes| bytes as f64 / line.us_median / 1e3);
        let is_rate = matches!(line.op, "decode" | "batch");
        let of_read = gbps.filter(|_| is_rate && self.read_gbps > 0.0).map(|gbps| gbps / self.read_gbps);
        let (gbps, of_read) = (gbps.map(output::round3), of_read.map(output::round3));
        let us_first = line.us_first.map(output::round3);
        let line = ModelLine { us_first, gbps, of_read, ..line };
        if self.json {
            return output::json_line(&line);
        }
        let count = |n: Option<usize>| n.map_or(String::new(), |n| n.to_string());
        // Draws other than greedy ones.
        let drawn = line.temperature.filter(|&temperature| temperature > 0.0);
        let op = drawn.map_or(line.op.to_string(), |temperature| format!("{} T={temperature}", line.op));
        let number = |x: Option<f64>, unit: &str| x.map_or(String::new(), |x| format!("{x:.1}{unit}"));
        output::text(&format!(
            "{:<12} {:<9} {:>9} {:>8} {:>12} {:>14.1} {:>14.1} {:>10} {:>9} {:>8}\n",
            op,
            line.kv.as_deref().unwrap_or(""),
            count(line.sequences),
            count(line.context),
            number(line.us_first, ""),
            line.us_median,
            line.us_min,
            number(line.tokens_per_second, ""),
            number(line.gbps, ""),
            number(line.of_read.map(|part| part * 100.0), " %"),
        ))
    }

    pub fn heading(&self) -> Result {
        if self.json {
            return Ok(());
        }
        output::text(&format!(
            "{}\n\n{:<12} {:<9} {:>9} {:>8} {:>12} {:>14} {:>14} {:>10} {:>9} {:>8}\n",
            self.device,
            "",
            "kv",
            "sequences",
            "context",
            "first, µs",
            "median, µs",
            "fastest, µs",
            "tokens/s",
            "GB/s",
            "of read"
        ))
    }
}
