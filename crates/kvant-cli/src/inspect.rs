//! `kvant inspect`: describes a checkpoint and the memory that it needs.

use std::{fmt::Write, path::PathBuf};

use kvant::Codec;
use kvant_models::{Files, Inspection, LoadOptions, PoolOptions};
use serde::Serialize;

use crate::{output, result::Result, shipped};

/// Describe a model and the memory that it needs, without loading it
#[derive(clap::Args)]
pub struct InspectArgs {
    /// Directory of a checkpoint in Hugging Face or MLX layout, a GGUF file, or a name on the Hugging Face Hub such as
    /// openai/gpt-oss-20b [default: the model that ships with kvant]
    #[arg(value_name = "MODEL")]
    model: Option<PathBuf>,
    /// One JSON object: family, layers, recurrent_layers, window_layers, window, hidden_size, vocab_size, context,
    /// parameters, weight_bytes, formats (name, parameters, bytes), state_bytes, cache (context, kv, bytes)
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct ModelReport {
    family: &'static str,
    layers: usize,
    /// Layers with a state for each sequence instead of keys and values.
    recurrent_layers: usize,
    /// Layers with a window of positions.
    window_layers: usize,
    /// The maximum of these windows.
    window: Option<usize>,
    hidden_size: usize,
    vocab_size: usize,
    /// The context that the model was made for, in tokens.
    context: Option<usize>,
    parameters: usize,
    weight_bytes: usize,
    formats: Vec<FormatLine>,
    /// The states of one sequence.
    state_bytes: usize,
    /// Keys and values of one sequence.
    cache: Vec<CacheLine>,
}

#[derive(Serialize)]
struct FormatLine {
    name: String,
    parameters: usize,
    bytes: usize,
}

#[derive(Serialize)]
struct CacheLine {
    context: usize,
    kv: String,
    bytes: usize,
}

pub fn run(args: &InspectArgs) -> Result {
    let report = ModelReport::of(&shipped::files(args.model.as_deref())?)?;
    if args.json { output::json_line(&report) } else { output::text(&report.people()?) }
}

impl ModelReport {
    fn of(files: &Files) -> Result<ModelReport> {
        let model = Inspection::open(files)?;
        let (config, decoder) = (&model.config, &model.config.decoder);
        let windows: Vec<usize> = decoder.blocks.iter().filter_map(|block| block.attention()?.window).collect();
        let format = |format: &kvant_models::StoredFormat| FormatLine {
            name: format.name.clone(),
            parameters: format.parameters,
            bytes: format.bytes,
        };
        Ok(ModelReport {
            family: config.family,
            layers: decoder.blocks.len(),
            recurrent_layers: decoder.blocks.iter().filter(|block| block.attention().is_none()).count(),
            window_layers: windows.len(),
            window: windows.into_iter().max(),
            hidden_size: decoder.hidden_size,
            vocab_size: decoder.vocab_size,
            context: config.max_position_embeddings,
            parameters: model.parameters,
            weight_bytes: model.weight_bytes,
            formats: model.formats.iter().map(format).collect(),
            state_bytes: model.state_bytes(&LoadOptions::default()),
            cache: cache(&model),
        })
    }

    fn people(&self) -> Result<String> {
        let mut text = String::new();
        let window = match self.window {
            Some(window) => format!(", {} with a window of {window}", self.window_layers),
            None => String::new(),
        };
        writeln!(text, "family      {}", self.family)?;
        let recurrent = match self.recurrent_layers {
            0 => String::new(),
            layers => format!(", {layers} of them recurrent"),
        };
        writeln!(text, "layers      {}{recurrent}{window}", self.layers)?;
        writeln!(text, "width       {}", self.hidden_size)?;
        writeln!(text, "vocabulary  {}", self.vocab_size)?;
        if let Some(context) = self.context {
            writeln!(text, "context     {context}")?;
        }
        writeln!(text, "parameters  {}", count(self.parameters))?;
        writeln!(text, "weights     {}", output::bytes(self.weight_bytes))?;
        for FormatLine { name, parameters, bytes } in &self.formats {
            writeln!(text, "  {name:<18} {:>8}  {:>10}", count(*parameters), output::bytes(*bytes))?;
        }
        if self.recurrent_layers > 0 {
            writeln!(text, "\nstates of one sequence, at any length  {}", output::bytes(self.state_bytes))?;
        }
        writeln!(text, "\ncache of one sequence")?;
        let kinds: Vec<&str> = columns(&self.cache, |line| &line.kv);
        let header: String = kinds.iter().map(|kv| format!("{kv:>11}")).collect();
        writeln!(text, "{:>9}{header}", "tokens")?;
        let mut contexts: Vec<usize> = self.cache.iter().map(|line| line.context).collect();
        contexts.dedup();
        for context in contexts {
            let row = self.cache.iter().filter(|line| line.context == context);
            let row: String = row.map(|line| format!("{:>11}", output::bytes(line.bytes))).collect();
            writeln!(text, "{context:>9}{row}")?;
        }
        Ok(text)
    }
}

/// Cache sizes of one sequence by length and type. Types that do not support the model's head sizes are omitted.
fn cache(model: &Inspection) -> Vec<CacheLine> {
    let max = model.config.max_position_embeddings.unwrap_or(131_072);
    let mut contexts: Vec<usize> = [4096, 32_768, 131_072].into_iter().filter(|&tokens| tokens < max).collect();
    contexts.push(max);
    let codecs = [Codec::F32, Codec::F16, Codec::tq(8), Codec::tq(6), Codec::tq(5), Codec::tq(4)];
    let line = |context: usize, codec: Codec| {
        let options = PoolOptions { codecs: codec.into(), longest: context, ..PoolOptions::default() };
        Some(CacheLine {
            context,
            kv: codec.to_string(),
            bytes: model.key_value_bytes(&options, &LoadOptions::default()).ok()?,
        })
    };
    contexts.into_iter().flat_map(|context| codecs.into_iter().filter_map(move |codec| line(context, codec))).collect()
}

/// The distinct values of a column, in order.
fn columns<'a>(lines: &'a [CacheLine], value: impl Fn(&'a CacheLine) -> &'a str) -> Vec<&'a str> {
    let mut values = Vec::new();
    for line in lines {
        if !values.contains(&value(line)) {
            values.push(value(line));
        }
    }
    values
}

/// Formats a number for humans: `512`, `10.9 M`, `20.9 B`.
fn count(number: usize) -> String {
    match number {
        0..1_000_000 => number.to_string(),
        1_000_000..1_000_000_000 => format!("{:.1} M", number as f64 / 1e6),
        _ => format!("{:.1} B", number as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_the_unit_that_fits() {
        assert_eq!(count(999_999), "999999");
        assert_eq!(count(10_945_536), "10.9 M");
        assert_eq!(count(20_914_757_184), "20.9 B");
    }
}
