//! Times kvant's operations on one device, usually a GPU, and prints Markdown tables. A measurement without assertions:
//! `tools/h200/peers.py` measures PyTorch and FlashInfer on equal shapes.
//!
//! Every figure is of replays of a graph that contains the operation many times, over buffers that together exceed the
//! caches. GB/s counts each input read once and each output written once.

mod attention;
mod blocks;
mod codecs;
mod collectives;
mod linear;
mod others;
mod pages;
mod states;
mod timer;

use kvant::{Device, DeviceKind};
use kvant_bench::Result;

use timer::Timer;

const USAGE: &str = "\
usage: speed [TABLE…] [OPTION…]

tables (all but the last two if none is named):
  attention       decode attention and prompts, in every codec
  batches         decode attention of many sequences
  pages           decode attention over pages, relative to a contiguous layer
  prompts         prompts over pages
  prompt-errors   errors of attention for prompts, instead of times
  steps           attention with the operations before and after it
  cache           writes to the cache, norm and RoPE
  products        matrix products of few rows
  many-rows       matrix products of many rows, without a library
  dense-batches   matrix products of few rows with dense weights
  blocks          weights in GGUF's blocks and in small floats, experts
  others          norm, gate, hadamard, argmax, sample, embed
  states          causal_conv and delta_rule
  codec-decode    decode attention by codec, with and without page means
  codec-writes    writes by codec, with and without page means
  all-reduces     sums of a group of NVIDIA GPUs
  all-gathers     concatenations of a group of NVIDIA GPUs
  summed-norms    sums of a group of NVIDIA GPUs with the norm that follows

options:
  --device KIND   cuda, metal or cpu [the default device]
  --only PART     only lines whose names contain PART
  --ranks N       maximum GPUs of a group [all]
";

type SpeedTable = (&'static str, fn(&Timer) -> kvant::Result<()>);
/// A table for a group of GPUs, given their maximum number.
type GroupTable = (&'static str, fn(usize) -> kvant::Result<()>);

const TABLES: [SpeedTable; 15] = [
    ("attention", attention::contexts),
    ("batches", attention::batches),
    ("pages", pages::decode),
    ("prompts", pages::prompts),
    ("prompt-errors", attention::prompt_errors),
    ("steps", attention::steps),
    ("cache", others::cache),
    ("products", linear::products),
    ("many-rows", linear::many_rows),
    ("dense-batches", linear::dense_batches),
    ("blocks", blocks::products),
    ("others", others::rest),
    ("states", states::all),
    ("codec-decode", codecs::decode),
    ("codec-writes", codecs::writes),
];

const COLLECTIVES: [GroupTable; 3] = [
    ("all-reduces", collectives::all_reduces),
    ("all-gathers", collectives::all_gathers),
    ("summed-norms", collectives::summed_norms),
];

struct SpeedOptions {
    tables: Vec<String>,
    kind: Option<DeviceKind>,
    only: Option<String>,
    ranks: usize,
}

fn main() -> Result {
    let options = SpeedOptions::parse(std::env::args().skip(1))?;
    let named = |name: &str| options.tables.iter().any(|table| table == name);
    for (_, table) in COLLECTIVES.iter().filter(|(name, _)| named(name)) {
        table(options.ranks)?;
    }
    let is_wanted = |(name, _): &&SpeedTable| options.tables.is_empty() || named(name);
    let wanted: Vec<&SpeedTable> = TABLES.iter().filter(is_wanted).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let device = options.kind.map_or_else(|| Ok(Device::default()), Device::open)?;
    let timer = Timer::new(device, options.only);
    for (_, table) in wanted {
        println!();
        table(&timer)?;
    }
    Ok(())
}

impl SpeedOptions {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<SpeedOptions> {
        let mut options = SpeedOptions { tables: Vec::new(), kind: None, only: None, ranks: usize::MAX };
        let is_table =
            |arg: &str| TABLES.iter().any(|table| table.0 == arg) || COLLECTIVES.iter().any(|table| table.0 == arg);
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or(format!("{arg} needs a value"));
            match arg.as_str() {
                "--device" => options.kind = Some(device_kind(&value()?)?),
                "--only" => options.only = Some(value()?),
                "--ranks" => options.ranks = ranks(&value()?)?,
                "--help" | "-h" => {
                    print!("{USAGE}");
                    std::process::exit(0);
                }
                table if is_table(table) => options.tables.push(arg),
                _ => return Err(format!("{arg}: no such table or option\n{USAGE}").into()),
            }
        }
        Ok(options)
    }
}

fn device_kind(name: &str) -> Result<DeviceKind> {
    let kind = [DeviceKind::Cuda, DeviceKind::Metal, DeviceKind::Cpu].into_iter().find(|kind| kind.name() == name);
    kind.ok_or_else(|| format!("--device must be cuda, metal or cpu, got {name}").into())
}

fn ranks(text: &str) -> Result<usize> {
    let ranks = text.parse().ok().filter(|&ranks| ranks > 0);
    ranks.ok_or_else(|| format!("--ranks must be a number of at least 1, got {text}").into())
}
