//! Decode over page means, in 16 bits: CUDA's kernels for it, and those of other devices in the same cases.

use super::{around, reference_and_devices};
use crate::common::{Out, Rng, bytes_of, input, layers, leaves_out, nmse, on_threads, run};
use kvant::{
    CacheLayer, Codec, DType, Device, DeviceKind, KvPool, PoolSpec, Result, Sequence, Step,
    codec::BITS,
    ops::{self, Attend},
};

/// One token of each sequence attends to all tokens before it. `common` is the size of the coordinates that all vectors
/// of a head have in common; the rest has size 1.
#[derive(Clone, Debug)]
struct Decode {
    k: Codec,
    v: Codec,
    dtype: DType,
    head_dim: usize,
    group: usize,
    page_tokens: usize,
    lengths: Vec<usize>,
    window: Option<usize>,
    splits: Option<usize>,
    softcap: Option<f32>,
    sinks: bool,
    common: f32,
    /// Every third entry of the page table is missing.
    gaps: bool,
}

const C4: Codec = Codec::tq_centred(4);
const DECODE: Decode = Decode {
    k: C4,
    v: C4,
    dtype: DType::F16,
    head_dim: 128,
    group: 2,
    page_tokens: 16,
    lengths: Vec::new(),
    window: None,
    splits: None,
    softcap: None,
    sinks: false,
    common: 1.0,
    gaps: false,
};
const KV_HEADS: usize = 2;

impl Decode {
    /// A pool in which the reference has stored all tokens, or another device with these bytes; the step of the last
    /// tokens, and their sequences.
    fn filled(&self, device: &Device, bytes: Option<&[u8]>) -> Result<(KvPool, Step, Vec<Sequence>)> {
        let layer = CacheLayer::new(KV_HEADS, self.head_dim, self.k).v(self.v).window(self.window);
        let held = |&length: &usize| length.next_multiple_of(self.page_tokens);
        let tokens = self.lengths.iter().map(held).sum::<usize>() + self.page_tokens;
        let spec = PoolSpec::new(vec![layer], 0).page_tokens(self.page_tokens).room_for(1, tokens, tokens)?;
        let pool = KvPool::new(device, &spec)?;
        layers::fill(pool.layer(0)?, 0xFF)?;
        let data = bytes.is_none().then(|| {
            let mut rng = Rng::of(format!("{self:?}"));
            around(&mut rng, self.lengths.iter().sum(), KV_HEADS, self.head_dim, self.common)
        });
        let mut sequences: Vec<_> = self.lengths.iter().map(|_| pool.sequence()).collect();
        let mut last = Vec::new();
        let mut first = 0;
        for (sequence, &length) in sequences.iter_mut().zip(&self.lengths) {
            if length > 1 {
                let step = pool.step(&mut [(sequence, length - 1)])?;
                if let Some(data) = &data {
                    layers::write(pool.layer(0)?, &data.part(first..first + length - 1), DType::F32, &step)?;
                }
            }
            first += length;
            last.push(first - 1);
        }
        let mut batch: Vec<_> = sequences.iter_mut().map(|sequence| (sequence, 1)).collect();
        let step = pool.step(&mut batch)?;
        match (bytes, data) {
            (Some(bytes), _) => memory(&pool)?.write_bytes(bytes)?,
            (None, data) => {
                let data = data.expect("data or bytes are given");
                layers::write(pool.layer(0)?, &data.gather(&last), DType::F32, &step)?;
            }
        }
        if self.gaps {
            let table = &step.page_tables()[0];
            let mut entries = table.to_vec::<u32>()?;
            entries.iter_mut().skip(1).step_by(3).for_each(|entry| *entry = Step::INACTIVE);
            table.write(&entries)?;
        }
        Ok((pool, step, sequences))
    }

    fn attend(&self, pool: &KvPool, step: &Step, splits: Option<usize>) -> Result<Vec<f32>> {
        let (device, layer, heads) = (pool.device(), pool.layer(0)?, KV_HEADS * self.group);
        let shape = [step.tokens(), heads, self.head_dim];
        let mut rng = Rng::of(format!("queries of {self:?}"));
        let q = input(device, self.dtype, &rng.normals(shape.iter().product()), &shape)?;
        let sinks = input(device, DType::F32, &rng.normals(heads), &[heads])?;
        let out = Out::new(device, self.dtype, &shape)?;
        run(device, |enc| {
            let attend = Attend::new(&q, layer, step, &out.tensor).splits(splits).softcap(self.softcap);
            ops::attend(enc, &attend.sinks(self.sinks.then_some(&sinks)))
        })?;
        out.bytes()?;
        out.tensor.to_f32()
    }

    fn check(&self) {
        let reference = || -> Result<(Vec<f32>, Vec<u8>)> {
            let (pool, step, _sequences) = self.filled(&Device::reference(), None)?;
            Ok((self.attend(&pool, &step, None)?, bytes_of(&memory(&pool)?)?))
        };
        let (want, bytes) = reference().unwrap_or_else(|error| panic!("{self:?}: {error}"));
        assert!(want.iter().all(|x| x.is_finite()), "{self:?}");
        for device in reference_and_devices() {
            // Kernels with clusters serve short contexts, unless splits are requested.
            let splits = if self.splits.is_some() { vec![self.splits] } else { vec![None, Some(2)] };
            let attended = self.filled(&device, Some(&bytes)).and_then(|(pool, step, _sequences)| {
                splits.into_iter().map(|splits| self.attend(&pool, &step, splits)).collect::<Result<Vec<_>>>()
            });
            // Several times the output's rounding; other devices multiply integers.
            let unit = if self.dtype == DType::F16 { 2e-7 } else { 6e-6 };
            let bound = if device.kind() == DeviceKind::Cuda { 8.0 * unit } else { 1e-3 };
            for got in attended.unwrap_or_else(|error| panic!("{self:?} on {device}: {error}")) {
                assert!(nmse(&got, &want) < bound, "{self:?} on {device}: {}", nmse(&got, &want));
            }
        }
    }
}

/// The pool's memory: the first plane begins at its start.
fn memory(pool: &KvPool) -> Result<kvant::Tensor> {
    let (_, low) = pool.layer(0)?.k().tensors().next().expect("every codec has a plane");
    Ok(low.clone())
}

/// Every pair of widths, centred on both sides or on one, over few keys and, with splits, as if over many.
#[test]
fn pairs() {
    let mut cases = Vec::new();
    for (i, k) in BITS.into_iter().enumerate() {
        for (j, v) in BITS.into_iter().enumerate() {
            let (tq, centred) = (Codec::tq, Codec::tq_centred);
            let (k, v) = match (i + j) % 4 {
                0 | 2 => (centred(k), centred(v)),
                1 => (centred(k), tq(v)),
                _ => (tq(k), centred(v)),
            };
            let head_dim = [128, 256, 512][(i + 2 * j) % 3];
            let page_tokens = [16, 32, 64, 128, 256][(i + j) % 5];
            let dtype = [DType::F16, DType::BF16][(i + j) % 2];
            let group = [1, 4, 8, 7, 2, 3][j];
            let lengths = vec![300, 17, 1];
            let few = Decode { k, v, dtype, head_dim, group, page_tokens, lengths, ..DECODE };
            let split = Decode { splits: Some(1), ..few.clone() };
            // On GPUs every pair of widths is another kernel; elsewhere each width runs with splits and without.
            match (leaves_out(), (i + j / 2) % 2 == 0) {
                (false, _) => cases.extend([split, few]),
                (true, true) => cases.push(split),
                (true, false) => cases.push(few),
            }
        }
    }
    on_threads(&cases, Decode::check);
}

/// Heads of 64 coordinates, which have a kernel only for short contexts.
#[test]
fn small_heads() {
    for (k, v, page_tokens) in [(2, 4, 32), (4, 2, 64), (6, 8, 32), (2, 2, 256)] {
        let (k, v) = (Codec::tq_centred(k), Codec::tq_centred(v));
        Decode { k, v, head_dim: 64, page_tokens, lengths: vec![900, 1, 77], ..DECODE }.check();
    }
}

/// Every fill of the last page, and every length of the last group of keys.
#[test]
fn fills() {
    for head_dim in [64, 128, 256, 512] {
        for (page_tokens, lengths) in [
            (16, vec![1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127]),
            (64, vec![1, 15, 16, 17, 31, 32, 33]),
            (64, vec![63, 64, 65, 127]),
        ] {
            Decode { head_dim, page_tokens, lengths, ..DECODE }.check();
        }
    }
}

/// Windows begin anywhere in a page, and earlier pages are released.
#[test]
fn windows() {
    for window in [1, 15, 17, 40, 64, 200] {
        let lengths = vec![250, 230, 17];
        Decode { window: Some(window), lengths: lengths.clone(), ..DECODE }.check();
        Decode { window: Some(window), page_tokens: 64, v: Codec::tq(8), lengths, ..DECODE }.check();
    }
}

/// Many pages, more than a warp multiplies at a time; keys divided among blocks in several ways.
#[test]
fn many_pages() {
    for (head_dim, lengths) in [(128, vec![2600, 700]), (512, vec![1900])] {
        for splits in [Some(1), Some(3), None] {
            Decode { head_dim, splits, lengths: lengths.clone(), ..DECODE }.check();
        }
    }
    let k = Codec::tq(4);
    Decode { k, splits: Some(1), page_tokens: 32, lengths: vec![3300], ..DECODE }.check();
    Decode { v: k, splits: Some(1), lengths: vec![1700, 5], ..DECODE }.check();
}

/// Pages without an entry in the table.
#[test]
fn gaps() {
    for head_dim in [64, 128, 256, 512] {
        Decode { gaps: true, head_dim, lengths: vec![500, 40, 20], ..DECODE }.check();
        let splits = Some(1);
        Decode { gaps: true, head_dim, page_tokens: 32, splits, lengths: vec![400, 33], ..DECODE }.check();
        Decode { gaps: true, head_dim, page_tokens: 32, lengths: vec![1000, 33], ..DECODE }.check();
    }
}

/// Means of zero, and means that are large relative to the rest.
#[test]
fn sizes_of_means() {
    for common in [0.0, 0.01, 100.0, 10000.0] {
        Decode { common, head_dim: 256, lengths: vec![333, 90], ..DECODE }.check();
        Decode { common, page_tokens: 64, lengths: vec![900, 90], ..DECODE }.check();
        Decode { common, dtype: DType::BF16, v: Codec::tq_centred(8), lengths: vec![333, 90], ..DECODE }.check();
    }
}

#[test]
fn softcaps_sinks_and_groups() {
    for (group, head_dim) in [(1, 128), (3, 256), (8, 128), (9, 512), (12, 128), (13, 256)] {
        Decode { group, head_dim, softcap: Some(5.0), lengths: vec![200, 50], ..DECODE }.check();
        Decode { group, head_dim, sinks: true, page_tokens: 32, lengths: vec![200, 50], ..DECODE }.check();
    }
}
