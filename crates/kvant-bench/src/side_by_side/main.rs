//! Compares kvant's kernels with those of other libraries in one run. The package's `README.md` describes the method.

mod attention;
mod memory;
mod others;
mod peers;
mod race;

use std::time::Duration;

use kvant::{CpuOptions, Device};
use kvant_bench::{Result, Shape};

use race::{Contender, Rounds};

const USAGE: &str = "\
usage: kvant-bench [TABLE…] [OPTION…]

tables (all where none is named):
  attention   decode attention, every codec, beside ggml and candle
  writing     kv_write, beside ggml's set_rows and a copy
  norm-rope   norm and RoPE, beside ggml
  linear      matrix products, beside ggml and the gemm crate
  windows     a sliding window at two positions
  threads     one thread and all

options:
  --shapes D:H:Hk,…    of the attention layers [128:32:8,256:16:8,512:16:2]
  --context N,…        cached tokens [1024,32768]
  --threads N          [2]
  --rounds N           turns of each contender; the median counts [7]
  --turn MS            minimum duration of a turn [60]
  --verbose            every median on standard error as it comes
";

/// The options of a run.
pub struct Options {
    tables: Vec<String>,
    shapes: Vec<Shape>,
    contexts: Vec<usize>,
    threads: usize,
    rounds: Rounds,
    verbose: bool,
    device: Device,
}

type Table = (&'static str, fn(&Options) -> Result);

const TABLES: [Table; 6] = [
    ("attention", attention::tables),
    ("writing", others::writing),
    ("norm-rope", others::norm_rope),
    ("linear", others::linear),
    ("windows", others::windows),
    ("threads", others::threads),
];

fn main() -> Result {
    let options = Options::parse(std::env::args().skip(1))?;
    println!("{}; {}; {} threads", memory::describe()?, options.device, options.threads);
    for (name, table) in TABLES {
        if options.tables.is_empty() || options.tables.iter().any(|table| table == name) {
            table(&options)?;
        }
    }
    Ok(())
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Options> {
        let mut options = Options {
            tables: Vec::new(),
            shapes: Shape::ALL.to_vec(),
            contexts: vec![1024, 32768],
            threads: 2,
            rounds: Rounds { count: 7, turn: Duration::from_millis(60) },
            verbose: false,
            device: Device::cpu(),
        };
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or(format!("{arg} needs a value"));
            match arg.as_str() {
                "--shapes" => options.shapes = value()?.split(',').map(parse_shape).collect::<Result<_>>()?,
                "--context" => options.contexts = value()?.split(',').map(number).collect::<Result<_>>()?,
                "--threads" => options.threads = number(&value()?)?,
                "--rounds" => options.rounds.count = number(&value()?)?,
                "--turn" => options.rounds.turn = Duration::from_millis(number(&value()?)? as u64),
                "--verbose" => options.verbose = true,
                "--help" | "-h" => {
                    print!("{USAGE}");
                    std::process::exit(0);
                }
                table if TABLES.iter().any(|(name, _)| *name == table) => options.tables.push(arg),
                _ => return Err(format!("{arg}: no such table or option\n{USAGE}").into()),
            }
        }
        options.device = Device::cpu_with(CpuOptions { threads: Some(options.threads), ..CpuOptions::default() })?;
        Ok(options)
    }

    /// Prints medians as they are measured.
    fn log(&self, contenders: &[Contender], times: &[f64]) {
        for (contender, micros) in contenders.iter().zip(times).filter(|_| self.verbose) {
            let rate = memory::gigabytes(contender.bytes, *micros);
            eprintln!("{:<32} {micros:>11.1} µs {rate:>8.1} GB/s", contender.name);
        }
    }
}

/// Parses a count of at least 1.
fn number(text: &str) -> Result<usize> {
    match text.parse() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err(format!("{text}: not a number of at least 1").into()),
    }
}

/// Parses `D:H:Hk`.
fn parse_shape(text: &str) -> Result<Shape> {
    let numbers = text.split(':').map(number).collect::<Result<Vec<_>>>()?;
    match numbers[..] {
        [head_dim, heads, kv_heads] if heads % kv_heads == 0 => Ok(Shape::new(head_dim, heads, kv_heads)),
        _ => Err(format!("{text}: not head_dim:heads:kv_heads").into()),
    }
}
