//! The table of decode attention: kvant with every codec, ggml in both layouts, candle, and the memory limit.

use std::{cell::RefCell, collections::BTreeMap};

use candle_core::DType;
use kvant::{Codec, Device, f16};
use kvant_bench::{
    Result, Shape,
    attention::{Attention, Context},
    data,
};

use crate::{
    Options, memory,
    peers::{
        candle,
        ggml::{self, Layout, Type},
    },
    race::{Contender, race},
};

/// kvant's contenders, by the name of the codec.
const CODECS: [(&str, Codec); 6] = [
    ("f16", Codec::F16),
    ("bf16", Codec::BF16),
    ("tq8", Codec::tq(8)),
    ("tq6", Codec::tq(6)),
    ("tq5", Codec::tq(5)),
    ("tq4", Codec::tq(4)),
];

/// ggml's contenders, in the layouts of a cache.
const GGML: [(&str, Type, Layout); 6] = [
    ("ggml f16 llama.cpp", Type::F16, Layout::Interleaved),
    ("ggml f16 contiguous", Type::F16, Layout::Contiguous),
    ("ggml q8_0 llama.cpp", Type::Q8_0, Layout::Interleaved),
    ("ggml q8_0 contiguous", Type::Q8_0, Layout::Contiguous),
    ("ggml q4_0 llama.cpp", Type::Q4_0, Layout::Interleaved),
    ("ggml q4_0 contiguous", Type::Q4_0, Layout::Contiguous),
];

const CANDLE: [(&str, DType); 2] = [("candle f32", DType::F32), ("candle f16", DType::F16)];

/// The results of one shape and context.
struct Row {
    shape: Shape,
    tokens: usize,
    ceiling: f64,
    micros: BTreeMap<String, f64>,
    /// Relative errors against f64 over the f16 keys and values, in the order of [`names`].
    errors: Vec<f64>,
}

/// Prints the tables.
pub fn tables(options: &Options) -> Result {
    let mut rows = Vec::new();
    for &shape in &options.shapes {
        for &tokens in &options.contexts {
            rows.push(measure(options, shape, tokens)?);
        }
    }
    println!("\n### Decode attention, microseconds\n");
    println!("| D, H, Hk, context | read ceiling, GB/s | floor f16 | floor tq4 | {} |", names().join(" | "));
    println!("|---|---|---|---|{}", "---|".repeat(names().len()));
    for row in &rows {
        let floor = |codec| memory::floor(Context::full(row.shape, codec, row.tokens).bytes(), row.ceiling);
        let (f16, tq4) = (floor(Codec::F16), floor(Codec::tq(4)));
        let cells: Vec<String> = names().iter().map(|name| micros(row.micros[*name])).collect();
        println!("| {} | {:.1} | {} | {} | {} |", row.name(), row.ceiling, micros(f16), micros(tq4), cells.join(" | "));
    }
    println!("\n### Share of the ceiling, and speedup over ggml's better layout, candle's better type, kvant's f16\n");
    println!(
        "| D, H, Hk, context | f16, of the ceiling | bf16, of the ceiling | f16 to ggml f16 | f16 to candle | tq8 to f16 | \
         tq6 to f16 | tq5 to f16 | tq4 to f16 | tq4 to ggml q4_0 | tq8 to ggml q8_0 |"
    );
    println!("|---|{}", "---|".repeat(10));
    for row in &rows {
        row.print_ratios();
    }
    println!(
        "\n### Relative error of the result against f64 over the f16 keys and values, including the error of the cache format\n"
    );
    println!("| D, H, Hk, context | {} |", names().join(" | "));
    println!("|---|{}", "---|".repeat(names().len()));
    for row in &rows {
        let cells: Vec<String> = row.errors.iter().map(|error| format!("{error:.1e}")).collect();
        println!("| {} | {} |", row.name(), cells.join(" | "));
    }
    Ok(())
}

fn names() -> Vec<&'static str> {
    CODECS.iter().map(|c| c.0).chain(GGML.iter().map(|g| g.0)).chain(CANDLE.iter().map(|c| c.0)).collect()
}

fn micros(x: f64) -> String {
    if x < 100.0 { format!("{x:.1}") } else { format!("{x:.0}") }
}

impl Row {
    fn name(&self) -> String {
        let Shape { head_dim, heads, kv_heads } = self.shape;
        format!("{head_dim}, {heads}, {kv_heads}, {}", self.tokens)
    }

    fn print_ratios(&self) {
        let t = |name: &str| self.micros[name];
        let ggml = |kind: &str| t(&format!("ggml {kind} llama.cpp")).min(t(&format!("ggml {kind} contiguous")));
        let floor = memory::floor(Context::full(self.shape, Codec::F16, self.tokens).bytes(), self.ceiling);
        let percent = |x: f64| format!("{:.0} %", 100.0 * x);
        let times = |x: f64| format!("{x:.2}");
        let cells = [
            percent(floor / t("f16")),
            percent(floor / t("bf16")),
            times(ggml("f16") / t("f16")),
            times(t("candle f32").min(t("candle f16")) / t("f16")),
            times(t("f16") / t("tq8")),
            times(t("f16") / t("tq6")),
            times(t("f16") / t("tq5")),
            times(t("f16") / t("tq4")),
            times(ggml("q4_0") / t("tq4")),
            times(ggml("q8_0") / t("tq8")),
        ];
        println!("| {} | {} |", self.name(), cells.join(" | "));
    }
}

/// Prepares all contenders with equal keys, values and query, races them, and checks their results.
fn measure(options: &Options, shape: Shape, tokens: usize) -> Result<Row> {
    let device: &Device = &options.device;
    let ours = CODECS.map(|(_, codec)| {
        let context = Context::full(shape, codec, tokens);
        Ok((RefCell::new(Attention::new(device, &context, data::copies(context.bytes()))?), context.bytes()))
    });
    let ours = ours.into_iter().collect::<Result<Vec<_>>>()?;
    let query = ours[0].0.borrow().query()?;
    let halves = ours[0].0.borrow().dense_bytes()?;
    let numbers = halves.each_ref().map(|bytes| {
        let half = |b: &[u8]| f16::from_ne_bytes([b[0], b[1]]).to_f32();
        bytes.chunks_exact(2).map(half).collect::<Vec<f32>>()
    });
    let ggml = GGML.map(|(_, kind, layout)| {
        let quantised;
        let sides = if kind == Type::F16 {
            &halves
        } else {
            quantised = numbers.each_ref().map(|numbers| ggml::quantise(kind, numbers, shape.head_dim));
            &quantised
        };
        let bytes = sides[0].len() + sides[1].len();
        let (query, threads, copies) = (&query, options.threads, data::copies(bytes));
        let attention = ggml::GgmlAttention { shape, kind, layout, tokens, query, sides, threads, copies };
        Ok((RefCell::new(attention.build()?), bytes))
    });
    let ggml = ggml.into_iter().collect::<Result<Vec<_>>>()?;
    let candle = CANDLE.map(|(_, dtype)| {
        let bytes = dtype.size_in_bytes() * (numbers[0].len() + numbers[1].len());
        let attention = candle::CandleAttention::new(shape, dtype, &query, &numbers, data::copies(bytes))?;
        Ok((RefCell::new(attention), bytes))
    });
    let candle = candle.into_iter().collect::<Result<Vec<_>>>()?;

    let mut contenders = vec![memory::reader(options.threads)];
    for ((name, _), (attention, bytes)) in CODECS.iter().zip(&ours) {
        contenders.push(Contender::each(*name, *bytes, || attention.borrow_mut().call()));
    }
    for ((name, ..), (rotation, bytes)) in GGML.iter().zip(&ggml) {
        contenders.push(Contender::new(*name, *bytes, || rotation.borrow_mut().run()));
    }
    for ((name, _), (attention, bytes)) in CANDLE.iter().zip(&candle) {
        contenders.push(Contender::each(*name, *bytes, || attention.borrow_mut().call()));
    }
    let times = race(&mut contenders, options.rounds)?;
    let ceiling = memory::gigabytes(memory::READ, times[0]);
    options.log(&contenders, &times);
    let micros = contenders.iter().map(|c| c.name.clone()).zip(times).collect();
    drop(contenders);

    let right = exact(shape, &query, &numbers);
    let mut errors = Vec::new();
    for (attention, _) in &ours {
        errors.push(distance(&attention.borrow().output()?, &right));
    }
    for (rotation, _) in &ggml {
        errors.push(distance(&rotation.borrow().output(query.len()), &right));
    }
    for (attention, _) in &candle {
        errors.push(distance(&attention.borrow().output()?, &right));
    }
    // The results must agree, otherwise the table is meaningless; unrelated results have an error of 1.4.
    for (name, &error) in names().iter().zip(&errors) {
        let quantised = ["tq", "q8_0", "q4_0"].iter().any(|kind| name.contains(kind));
        let limit = if quantised { 0.5 } else { 0.2 };
        if error.is_nan() || error > limit {
            return Err(format!("{name} has another result at {shape}, {tokens} tokens: relative error {error}").into());
        }
    }
    Ok(Row { shape, tokens, ceiling, micros, errors })
}

/// softmax(q·Kᵀ·scale)·V in f64.
fn exact(shape: Shape, query: &[f32], [k, v]: &[Vec<f32>; 2]) -> Vec<f64> {
    let Shape { head_dim, heads, kv_heads } = shape;
    let tokens = k.len() / shape.elements(1);
    let mut out = Vec::new();
    for head in 0..heads {
        let rows = |side: &[f32]| -> Vec<f32> {
            let from = head / (heads / kv_heads) * tokens * head_dim;
            side[from..from + tokens * head_dim].to_vec()
        };
        let (k, v) = (rows(k), rows(v));
        let q = &query[head * head_dim..][..head_dim];
        let dot = |row: &[f32]| row.iter().zip(q).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
        let scores: Vec<f64> = k.chunks_exact(head_dim).map(|row| dot(row) * f64::from(shape.scale())).collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let mut sums = vec![0.0; head_dim];
        let mut total = 0.0;
        for (score, row) in scores.iter().zip(v.chunks_exact(head_dim)) {
            let weight = (score - top).exp();
            total += weight;
            sums.iter_mut().zip(row).for_each(|(sum, &x)| *sum += weight * f64::from(x));
        }
        out.extend(sums.iter().map(|sum| sum / total));
    }
    out
}

/// The relative error of a result.
pub fn distance(got: &[f32], right: &[f64]) -> f64 {
    let square = |x: f64| x * x;
    let error: f64 = got.iter().zip(right).map(|(&g, &r)| square(f64::from(g) - r)).sum();
    (error / right.iter().map(|&r| square(r)).sum::<f64>()).sqrt()
}
