//! Codecs: decode and writes over pages of a pool, by bits of a code, with and without page means. The graphs of a line
//! are replayed in turns. Times are medians in µs.

use std::sync::OnceLock;

use kvant::{
    CacheLayer, Codec, DType, Device, Encoder, Graph, HeadOrder, KvLayer, KvPool, PoolSpec, Result, Sequence, Step,
    Tensor,
    ops::{self, Attend, HeadNorm, KvWrite, NormRopeWrite, Query, Rope},
};

use crate::timer::{Timer, copies, in_turns, noise, random_bits};

/// Threads that compile kernels.
const THREADS: usize = 8;

/// A codec, and the page size.
type Column = (Codec, usize);

const COLUMNS: [Column; 7] = [
    (Codec::tq(4), 64),
    (Codec::tq_centred(4), 64),
    (Codec::tq_centred(4), 128),
    (Codec::tq(3), 64),
    (Codec::tq_centred(3), 64),
    (Codec::tq(2), 64),
    (Codec::tq_centred(2), 64),
];

/// Head size, query heads, KV heads.
const SHAPES: [[usize; 3]; 4] = [[128, 32, 8], [256, 16, 8], [512, 16, 2], [64, 32, 8]];

#[derive(Clone, Copy, Debug)]
enum Operation {
    Attend,
    KvWrite,
    NormRopeWrite,
}

/// An operation on the last `tokens` of `keys` tokens.
#[derive(Clone, Copy, Debug)]
struct CodecLine {
    operation: Operation,
    shape: [usize; 3],
    tokens: usize,
    keys: usize,
}

/// Layers of a pool, the step of a sequence's last tokens, the sequence, and the inputs and outputs.
struct FilledPool {
    layers: Vec<KvLayer>,
    step: Step,
    _sequence: Sequence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    weight: Tensor,
}

impl CodecLine {
    fn name(&self) -> String {
        let CodecLine { operation, shape: [dim, heads, kv_heads], tokens, keys } = self;
        format!("{operation:?} {dim}, {heads}, {kv_heads}: {tokens} of {keys}")
    }

    /// Layers filled with arbitrary data.
    fn filled(&self, device: &Device, (codec, page_tokens): Column, layers: usize) -> Result<FilledPool> {
        let &CodecLine { shape: [dim, heads, kv_heads], tokens, keys, .. } = self;
        let spec = PoolSpec::new(vec![CacheLayer::new(kv_heads, dim, codec); layers], 0).page_tokens(page_tokens);
        let pool = KvPool::new(device, &spec.room_for(1, keys + page_tokens, tokens)?)?;
        let mut sequence = pool.sequence();
        if keys > tokens {
            pool.step(&mut [(&mut sequence, keys - tokens)])?;
        }
        let step = pool.step(&mut [(&mut sequence, tokens)])?;
        let layers = (0..layers).map(|index| pool.layer(index).cloned()).collect::<Result<_>>()?;
        let new = |heads| noise(device, DType::BF16, &[tokens, heads, dim]);
        let (q, k, v, out, weight) =
            (new(heads)?, new(kv_heads)?, new(kv_heads)?, new(heads)?, noise(device, DType::BF16, &[dim])?);
        Ok(FilledPool { layers, step, _sequence: sequence, q, k, v, out, weight })
    }

    fn record(&self, enc: &mut Encoder, filled: &FilledPool, call: usize) -> Result<()> {
        let FilledPool { layers, step, q, k, v, out, weight, .. } = filled;
        let (layer, dim) = (&layers[call % layers.len()], self.shape[0]);
        match self.operation {
            Operation::Attend => {
                ops::attend(enc, &Attend::new(Query::Rotated(q), layer, step, out).scale((dim as f32).powf(-0.5)))
            }
            Operation::KvWrite => ops::kv_write(enc, &KvWrite::new(k, v, step, layer).order(HeadOrder::TokenMajor)),
            Operation::NormRopeWrite => {
                let norm = Some(HeadNorm::new(1e-6).weight(Some(weight)));
                let write = NormRopeWrite::new(q, k, v, step, layer, out).rope(Some(Rope::new(1e6, dim / 2)));
                ops::norm_rope_write(enc, &write.q_norm(norm).k_norm(norm).v_norm(norm)).map(drop)
            }
        }
    }
}

/// A repeated sequence of random bytes.
fn bits(bytes: usize) -> Vec<u8> {
    static BITS: OnceLock<Vec<u8>> = OnceLock::new();
    let pattern = BITS.get_or_init(|| random_bits(64 << 20));
    let mut out = pattern.repeat(bytes.div_ceil(pattern.len()));
    out.truncate(bytes);
    out
}

/// Compiles the kernels of all lines, on several threads: a compiler takes longer than the measurement.
fn compile(device: &Device, lines: &[CodecLine]) -> Result<()> {
    let all: Vec<_> = lines.iter().flat_map(|&line| COLUMNS.map(|column| (line, column))).collect();
    let compile_part = |first: usize| {
        all.iter().skip(first).step_by(THREADS).try_for_each(|&(line, column)| {
            let filled = line.filled(device, column, 1)?;
            Encoder::capture(device, |enc| line.record(enc, &filled, 0)).map(drop)
        })
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|first| scope.spawn(move || compile_part(first))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("a thread that compiles panicked"))
    })
}

fn measure(timer: &Timer, lines: impl Iterator<Item = CodecLine>) -> Result<()> {
    let device = &timer.device;
    let lines: Vec<CodecLine> = lines.filter(|line| timer.is_wanted(&line.name())).collect();
    compile(device, &lines)?;
    let names = COLUMNS.map(|(codec, page_tokens)| format!("{codec}, pages of {page_tokens}"));
    println!("| operation on {}, D, H, Hk: tokens | {} |", device.name(), names.join(" | "));
    println!("|---|{}", "---|".repeat(COLUMNS.len()));
    for line in lines {
        let CodecLine { shape: [dim, _, kv_heads], tokens, keys, .. } = line;
        let filled = COLUMNS.map(|column| {
            let layers = copies(2 * kv_heads * keys * column.0.bytes_per_vector(dim));
            let filled = line.filled(device, column, layers)?;
            if let Some((_, memory)) = filled.layers[0].k().tensors().next() {
                memory.write_bytes(&bits(memory.bytes()))?;
            }
            Ok(filled)
        });
        let filled = filled.into_iter().collect::<Result<Vec<FilledPool>>>()?;
        let calls = if tokens > 1 { 8 } else { 64 };
        let record = |filled| Encoder::capture(device, |enc| (0..calls).try_for_each(|i| line.record(enc, filled, i)));
        let graphs = filled.iter().map(record).collect::<Result<Vec<Graph>>>()?;
        let times = in_turns(&graphs, calls)?.into_iter().map(|time| format!("{time:.2}"));
        println!("| {} | {} |", line.name(), times.collect::<Vec<_>>().join(" | "));
    }
    Ok(())
}

/// Decode attention of one token.
pub fn decode(timer: &Timer) -> Result<()> {
    let lines = |keys| SHAPES.map(|shape| CodecLine { operation: Operation::Attend, shape, tokens: 1, keys });
    measure(timer, [131_072, 8192, 1024].into_iter().flat_map(lines))
}

/// A prompt and decode steps: in the middle of a page, and at its first position, where a mean is chosen.
pub fn writes(timer: &Timer) -> Result<()> {
    let lines = |shape| {
        [(8192, 8192), (1, 4096 + 33), (1, 4096 + 1)].into_iter().flat_map(move |(tokens, keys)| {
            [Operation::KvWrite, Operation::NormRopeWrite].map(|operation| CodecLine { operation, shape, tokens, keys })
        })
    };
    measure(timer, [SHAPES[0], SHAPES[1]].into_iter().flat_map(lines))
}
