//! `kvant bench`: measures the time of an operation, or of a model, case by case.

mod attend;
mod buffers;
mod case;
mod kv_write;
mod model;
mod norm_rope;
mod pages;
mod timing;

pub use buffers::random;

use std::time::Duration;

use kvant::{Codec, Device};
use kvant_models::KvCodec;
use serde::Serialize;

use self::case::{Case, Measured};
use crate::{
    Result,
    args::{ActivationArgs, DeviceArgs, Heads},
    output,
};

/// Measure the time of an operation, or of a model.
///
/// Each case of an operation fills its buffers and then runs for about a second. The output has the median and the
/// minimum time of a call, and the bytes that a call must move, divided by the median time. Cached keys and values
/// rotate over at least 700 MB of buffers, if memory permits, so that they are read from memory and not from a
/// processor's cache. On a GPU, the time includes recording, submitting and waiting for each call, which takes longer
/// than a small kernel; `model` replays graphs.
#[derive(clap::Subcommand)]
pub enum Bench {
    /// Attention of one new token over `context` cached ones; bytes: keys and values read
    Attend(OpArgs),
    /// Write `context` new tokens at once; bytes: new keys and values read, cached ones written
    KvWrite(OpArgs),
    /// Per-head RMS norm and RoPE of `context` tokens of H heads at once; bytes: inputs and outputs
    NormRope(OpArgs),
    /// Encode `context` new tokens at once and write them to a TurboQuant cache; bytes: as for kv-write
    Encode(OpArgs),
    /// A whole model, in one run: plain reads of the device's memory, loading, prompts, decoding of one sequence, and
    /// of many together. Bytes of a decode step: the weights, keys and values read (in a mixture of experts only the
    /// weights that a token uses, and one row of a table of embeddings)
    Model(model::ModelArgs),
}

/// The cases: every combination of shape, context and cache type.
#[derive(clap::Args)]
pub struct OpArgs {
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    activations: ActivationArgs,
    /// head_dim:heads:kv_heads of the attention layers
    #[arg(long, value_name = "D:H:Hk,…", value_delimiter = ',', default_value = "128:32:8,256:16:8,512:16:2")]
    shapes: Vec<Heads>,
    /// Tokens in the cache (attend) or in one call (others) [default: 1024,32768 for attend; 512 for encode; 1,512 for
    /// kv-write and norm-rope]
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    context: Option<Vec<u32>>,
    /// Cache types: f32, f16, bf16, tq8, tq6, tq5, tq4, tq3, tq2, these with sealed pages (tq4c), or K:V; norm-rope has
    /// no cache [default: f16,tq8,tq4 for attend; f16,tq4 for kv-write; tq8,tq6,tq5,tq4,tq3,tq2 for encode]
    #[arg(long, value_name = "KV,…", value_delimiter = ',')]
    kv: Option<Vec<KvCodec>>,
    /// Use a pool with N positions per page: 16, 32, 64, 128 or 256 [default: contiguous layers; 64 for types with
    /// sealed pages]
    #[arg(long, value_name = "N")]
    page_tokens: Option<usize>,
    #[command(flatten)]
    how: How,
}

/// The duration and the output format.
#[derive(clap::Args)]
struct How {
    /// Seconds of measurement per case
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    seconds: f64,
    /// One JSON object per line: op, device, head_dim, heads, kv_heads, context, kv, us_median, us_min, bytes, gbps
    #[arg(long)]
    json: bool,
}

impl How {
    fn budget(&self) -> Result<Duration> {
        timing::budget(self.seconds)
    }
}

/// A line of `--json`.
#[derive(Serialize)]
struct Line {
    op: &'static str,
    device: String,
    head_dim: usize,
    heads: usize,
    kv_heads: usize,
    context: u32,
    kv: Option<String>,
    us_median: f64,
    us_min: f64,
    bytes: usize,
    /// `bytes` per median time, in 1e9 bytes per second.
    gbps: f64,
}

pub fn run(bench: &Bench) -> Result {
    match bench {
        Bench::Attend(args) => cases("attend", args, (&[1024, 32768], &["f16", "tq8", "tq4"]), attend::measure),
        Bench::KvWrite(args) => cases("kv-write", args, (&[1, 512], &["f16", "tq4"]), kv_write::measure),
        Bench::NormRope(args) => cases("norm-rope", args, (&[1, 512], &[]), norm_rope::measure),
        Bench::Encode(args) => {
            if args.kv.iter().flatten().any(|kv| !(kv.k.is_quantised() && kv.v.is_quantised())) {
                return Err(
                    "bench encode requires --kv of TurboQuant types; bench kv-write takes every cache type".into()
                );
            }
            cases("encode", args, (&[512], &["tq8", "tq6", "tq5", "tq4", "tq3", "tq2"]), kv_write::measure)
        }
        Bench::Model(args) => model::run(args),
    }
}

/// Measures every combination. `defaults` are the default contexts and cache types of the operation.
fn cases(
    op: &'static str,
    args: &OpArgs,
    defaults: (&[u32], &[&str]),
    measure: impl Fn(&Device, &Case, Duration) -> Result<Measured>,
) -> Result {
    let device = args.device.open()?;
    let budget = args.how.budget()?;
    let contexts = args.context.clone().unwrap_or_else(|| defaults.0.to_vec());
    let activations = args.activations.dtype(&device);
    let has_cache = !defaults.1.is_empty();
    let kvs = match &args.kv {
        Some(_) if !has_cache => return Err(format!("bench {op} has no cache and does not take --kv").into()),
        None if !has_cache => vec![Codec::F32.into()],
        Some(kvs) => kvs.clone(),
        None => defaults.1.iter().map(|name| name.parse()).collect::<kvant::Result<_>>()?,
    };
    for &shape in &args.shapes {
        for &context in &contexts {
            for &kv in &kvs {
                let case = Case { shape, context, kv, activations, page_tokens: args.page_tokens };
                let measured = measure(&device, &case, budget)?;
                let line = Line::new(op, &device, &case, &measured);
                print(&Line { kv: has_cache.then(|| kv.to_string()), ..line }, args.how.json)?;
            }
        }
    }
    Ok(())
}

impl Line {
    /// Without a cache type.
    fn new(op: &'static str, device: &Device, case: &Case, measured: &Measured) -> Line {
        let Measured { timing, bytes } = measured;
        let Heads { head_dim, heads, kv_heads } = case.shape;
        Line {
            op,
            device: device.to_string(),
            head_dim,
            heads,
            kv_heads,
            context: case.context,
            kv: None,
            us_median: output::round3(timing.median_us),
            us_min: output::round3(timing.min_us),
            bytes: *bytes,
            gbps: output::round3(*bytes as f64 / timing.median_us / 1e3),
        }
    }
}

fn print(line: &Line, json: bool) -> Result {
    if json {
        return output::json_line(line);
    }
    let shape = format!("{}:{}:{}", line.head_dim, line.heads, line.kv_heads);
    let kv = line.kv.as_deref().unwrap_or("-");
    output::text(&format!(
        "{:<10} {:<10} context {:<7} kv {:<9} median {:>11.1} µs   min {:>11.1} µs   {:>7.2} GB/s\n",
        line.op, shape, line.context, kv, line.us_median, line.us_min, line.gbps
    ))
}
