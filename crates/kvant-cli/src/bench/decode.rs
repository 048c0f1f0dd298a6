//! `kvant bench decode`: a decode step of a model, without sampling.
//!
//! Every step feeds the same token at the same position and removes it again.

use std::{path::PathBuf, time::Duration};

use kvant_models::{Decoder, Logits, Model, PoolOptions, Sampling};

use super::{How, Line, Measured, print, timing};
use crate::{
    Result,
    args::{ActivationArgs, DeviceArgs, Kv},
    shipped,
};

#[derive(clap::Args)]
pub struct DecodeArgs {
    /// Directory of a checkpoint in Hugging Face or MLX layout [default: the model that ships with kvant]
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Tokens in the cache, the new one included
    #[arg(
        long,
        value_name = "N,…",
        value_delimiter = ',',
        default_value = "128,1024",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    context: Vec<u32>,
    /// Cache types: f32, f16, bf16, tq8, tq6, tq5, tq4, tq3, tq2, or K:V as in f16:tq4
    #[arg(long, value_name = "KV,…", value_delimiter = ',', default_value = "f16,tq4")]
    kv: Vec<Kv>,
    #[command(flatten)]
    activations: ActivationArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    how: How,
}

pub fn run(args: &DecodeArgs) -> Result {
    let files = shipped::files(args.model.as_deref())?;
    let budget = args.how.budget()?;
    let device = args.device.open()?;
    let model = args.activations.load(&files, &device)?;
    for &context in &args.context {
        for &kv in &args.kv {
            let measured = measure(&model, kv, context as usize, budget)?;
            let line = Line::new("decode", &device, context, &measured);
            print(&Line { kv: Some(kv.to_string()), ..line }, args.how.json)?;
        }
    }
    Ok(())
}

fn measure(model: &Model, kv: Kv, context: usize, budget: Duration) -> Result<Measured> {
    let options = PoolOptions { k: kv.k, v: kv.v, longest: context, ..PoolOptions::default() };
    let mut sequence = model.new_pool(&options)?.sequence();
    let past = context - 1;
    if past > 0 {
        // The ids do not affect the time.
        let ids: Vec<u32> = (0..past).map(|i| (i * 37 % model.vocab_size()) as u32).collect();
        model.feed(&mut sequence, &ids, Logits::Last)?;
    }
    let mut decoder = Decoder::new(model, &mut sequence, Sampling::default())?;
    let timing = timing::repeat(budget, |_| {
        decoder.feed(&[0])?;
        Ok(decoder.truncate(past)?)
    })?;
    let read = |block: &kvant_models::BlockSpec| {
        let attention = &block.attention;
        let vector = kv.k.bytes_per_vector(attention.head_dim) + kv.v.bytes_per_vector(attention.head_dim);
        context.min(attention.window.unwrap_or(usize::MAX)) * attention.kv_heads * vector
    };
    let bytes = model.weight_bytes_per_token() + model.decoder().blocks.iter().map(read).sum::<usize>();
    Ok(Measured { timing, bytes })
}
