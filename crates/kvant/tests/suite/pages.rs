//! Pools on every device: operations over pages, and random histories against a list of tokens and naive attention.

use std::ops::Range;

use crate::common::{
    Bound, Out, Output, Rng, assert_close, bytes_of, conform, devices, differences, input,
    layers::{self, CODECS, Source},
    proptest_cases, run,
};
use kvant::{
    CacheLayer, Codec, DType, Device, Encoder, Error, HeadOrder, KvLayer, KvPool, LayerSpec, PoolSpec, PrefixCache,
    Result, Sequence, Step, StepSize, Tensor,
    codec::{self, TurboQuant},
    ops::{self, Attend, KvRead, KvSide, KvWrite, NormRopeWrite},
};
use proptest::prelude::*;

/// Attention over pages: sequences of (past, new) tokens, the past written in pieces.
#[derive(Clone, Debug)]
struct Case {
    head_dim: usize,
    kv_heads: usize,
    group: usize,
    k: Codec,
    v: Codec,
    dtype: DType,
    page_tokens: usize,
    window: Option<usize>,
    sequences: Vec<(usize, usize)>,
}

const CASE: Case = Case {
    head_dim: 64,
    kv_heads: 2,
    group: 2,
    k: Codec::F16,
    v: Codec::F16,
    dtype: DType::F32,
    page_tokens: 16,
    window: None,
    sequences: Vec::new(),
};

/// A pool whose sequences hold what a case says, and the step of the new tokens.
struct Filled {
    pool: KvPool,
    step: Step,
    sequences: Vec<Sequence>,
    /// Of the new tokens, in the order of the step.
    new: Vec<usize>,
}

impl Case {
    fn layer(&self) -> CacheLayer {
        CacheLayer::new(self.kv_heads, self.head_dim, self.k).v(self.v).window(self.window)
    }

    /// The keys and values of all sequences, one after the other.
    fn source(&self) -> Source {
        let all = self.sequences.iter().map(|&(past, new)| past + new).sum();
        Source::random(&mut Rng::of(format!("{self:?}")), all, self.kv_heads, self.head_dim)
    }

    /// Pages are taken in turns, so that those of a sequence do not follow one another. Memory that nobody has written
    /// holds NaN.
    fn filled(&self, device: &Device, source: &Source) -> Result<Filled> {
        let pages: usize = self.sequences.iter().map(|&(past, new)| (past + new).div_ceil(self.page_tokens) + 2).sum();
        let bytes_per_page = {
            let vector = |codec: Codec| codec.bytes_per_vector(self.head_dim) + 256;
            (vector(self.k) + vector(self.v)) * self.kv_heads * self.page_tokens + 2048
        };
        // Another layer of the same group, so that the tested one does not begin where the page does.
        let other = if self.head_dim.is_power_of_two() { Codec::tq(5) } else { Codec::F16 };
        let before = self.layer().k(Codec::BF16).v(other);
        let bytes = 4 * pages * bytes_per_page + (1 << 16);
        let spec = PoolSpec::new(vec![before, self.layer()], bytes).page_tokens(self.page_tokens);
        let pool = KvPool::new(device, &spec)?;
        layers::fill(pool.layer(0)?, 0xFF)?;
        let firsts: Vec<usize> = self
            .sequences
            .iter()
            .scan(0, |at, &(past, new)| {
                *at += past + new;
                Some(*at - past - new)
            })
            .collect();
        let mut sequences: Vec<Sequence> = self.sequences.iter().map(|_| pool.sequence()).collect();
        let piece = 2 * self.page_tokens + 3;
        loop {
            let mut batch = Vec::new();
            let mut tokens = Vec::new();
            for ((sequence, &(past, _)), &first) in sequences.iter_mut().zip(&self.sequences).zip(&firsts) {
                let (len, count) = (sequence.len(), piece.min(past - sequence.len()));
                tokens.extend(first + len..first + len + count);
                batch.push((sequence, count));
            }
            if tokens.is_empty() {
                break;
            }
            let step = pool.step(&mut batch)?;
            layers::write(pool.layer(1)?, &source.gather(&tokens), DType::F32, &step)?;
        }
        let mut batch = Vec::new();
        let mut new = Vec::new();
        for ((sequence, &(past, count)), &first) in sequences.iter_mut().zip(&self.sequences).zip(&firsts) {
            new.extend(first + past..first + past + count);
            batch.push((sequence, count));
        }
        let step = pool.step(&mut batch)?;
        Ok(Filled { pool, step, sequences, new })
    }

    fn queries(&self, tokens: usize) -> Vec<f32> {
        Rng::of(format!("queries of {self:?}")).normals(tokens * self.kv_heads * self.group * self.head_dim)
    }

    fn attend(&self, layer: &KvLayer, step: &Step) -> Result<Out> {
        let shape = [step.tokens(), self.kv_heads * self.group, self.head_dim];
        let device = layer.device();
        let q = input(device, self.dtype, &self.queries(step.tokens()), &shape)?;
        let out = Out::new(device, self.dtype, &shape)?;
        run(device, |enc| ops::attend(enc, &Attend::new(&q, layer, step, &out.tensor)))?;
        Ok(out)
    }

    fn bound(&self, device: &Device) -> Bound {
        let codec = if self.k.is_quantised() { self.k } else { self.v };
        let mut bound = Bound::of(self.dtype).over(device, codec, 1.0);
        if self.dtype != DType::F32 && device.kind() == kvant::DeviceKind::Cuda && codec.is_quantised() {
            bound.arithmetic += 1.0 / 2048.0;
        }
        bound
    }

    /// Every device agrees with the reference over the same bytes.
    fn check(&self) {
        self.check_with(|_| Ok(()));
    }

    /// The same after `change` has changed the step.
    fn check_with(&self, change: impl Fn(&Step) -> Result<()>) {
        let source = self.source();
        for device in devices() {
            let compare = || -> Result<Vec<String>> {
                let made = |device| -> Result<Filled> {
                    let filled = self.filled(device, &source)?;
                    change(&filled.step)?;
                    layers::write(filled.pool.layer(1)?, &source.gather(&filled.new), DType::F32, &filled.step)?;
                    Ok(filled)
                };
                let (got, want) = (made(device)?, made(&Device::reference())?);
                // Both took the same pages. The first plane of the first layer begins where the memory does.
                let [from, to] = [&got, &want].map(|made| made.pool.layer(0).map(|layer| layer.k().clone()));
                let (from, to) = (from?, to?);
                let memory = |planes: &kvant::Planes| planes.tensors().next().map(|(_, low)| low.clone()).unwrap();
                memory(&to).write_bytes(&bytes_of(&memory(&from))?)?;
                let bound = self.bound(device);
                let [got, want] = [&got, &want].map(|made| -> Result<Output> {
                    self.attend(made.pool.layer(1)?, &made.step)?.close_within("out", bound)
                });
                Ok(differences(&[got?], &[want?]))
            };
            let wrong = compare().unwrap_or_else(|error| vec![error.to_string()]);
            assert!(wrong.is_empty(), "{self:?} on {device}:\n  {}", wrong.join("\n  "));
        }
    }
}

#[test]
fn every_page_size() {
    for page_tokens in [16, 32, 64, 128, 256] {
        for sequences in [vec![(300, 1), (0, 1), (17, 1)], vec![(40, 20), (255, 1), (16, 16), (3, 0)], vec![(0, 130)]] {
            for (k, v) in [(Codec::F16, Codec::F32), (Codec::tq(4), Codec::tq(8))] {
                Case { page_tokens, sequences: sequences.clone(), k, v, ..CASE }.check();
            }
        }
    }
}

#[test]
fn every_codec_and_head_size() {
    for head_dim in [64, 128, 256, 512] {
        for codec in CODECS {
            for sequences in [vec![(70, 1), (33, 1)], vec![(35, 9)]] {
                Case { head_dim, k: codec, v: codec, sequences, ..CASE }.check();
            }
        }
    }
}

/// Those that are no power of two, over dense caches.
#[test]
fn other_head_sizes() {
    for (i, head_dim) in [80, 96, 112, 192].into_iter().enumerate() {
        for codec in [Codec::F32, Codec::F16, Codec::BF16] {
            for sequences in [vec![(70, 1), (33, 1)], vec![(35, 9)], vec![(20, 70)]] {
                let window = [None, Some(40)][i % 2];
                Case { head_dim, k: codec, v: codec, sequences, window, page_tokens: 16 << (i % 3), ..CASE }.check();
            }
        }
    }
}

/// More query heads of a KV head than a kernel of decode takes at once.
#[test]
fn large_groups() {
    for (i, codec) in CODECS.into_iter().enumerate() {
        let (group, head_dim) = ([10, 12, 16][i % 3], [128, 256, 512][i / 3 % 3]);
        let (dtype, sequences) = (DType::BF16, vec![(70, 1), (133, 1)]);
        Case { group, head_dim, k: codec, v: codec, dtype, sequences, ..CASE }.check();
    }
}

#[test]
fn windows_pass_pages() {
    for window in [1, 5, 16, 17, 40, 1000] {
        for sequences in [vec![(100, 1), (16, 1), (0, 1)], vec![(90, 30), (5, 3)]] {
            for codec in [Codec::BF16, Codec::tq(6)] {
                Case { window: Some(window), k: codec, v: codec, sequences: sequences.clone(), ..CASE }.check();
            }
        }
    }
}

/// Decode and prompts as CUDA's fast kernels take them: queries, cache and output in 16 bits.
#[test]
fn sixteen_bits() {
    for (dtype, head_dim) in [(DType::F16, 64), (DType::BF16, 128), (DType::F16, 256), (DType::BF16, 512)] {
        let codec = Codec::Dense(dtype);
        let case = Case { head_dim, dtype, ..CASE };
        for page_tokens in [16, 64] {
            for sequences in [vec![(500, 1), (100, 1)], vec![(1100, 1)], vec![(60, 90)]] {
                // The long ones are for the kernels, which head size and page do not select together.
                if sequences.len() == 1 && (head_dim > 128) != (page_tokens == 64) {
                    continue;
                }
                let case = Case { page_tokens, sequences, ..case.clone() };
                Case { k: codec, v: codec, group: 4, ..case.clone() }.check();
                Case { k: Codec::tq(4), v: Codec::tq(5), ..case }.check();
            }
        }
    }
}

#[test]
fn the_reference_computes_the_same_over_pages_and_over_slots() {
    let device = Device::reference();
    for window in [None, Some(20)] {
        for codec in CODECS {
            let case = Case { window, k: codec, v: codec, sequences: vec![(50, 3), (10, 1)], ..CASE };
            let source = case.source();
            let Filled { pool, step, new, sequences } = case.filled(&device, &source).unwrap();
            layers::write(pool.layer(1).unwrap(), &source.gather(&new), DType::F32, &step).unwrap();
            let paged = case.attend(pool.layer(1).unwrap(), &step).unwrap().bytes().unwrap();

            let (ring, order) = (false, HeadOrder::HeadMajor);
            let CacheLayer { kv_heads, head_dim, window, k, v, .. } = case.layer();
            let spec =
                LayerSpec::new(kv_heads, head_dim, 60, k).sequences(2).v(v).window(window).ring(ring).order(order);
            let layer = KvLayer::new(&device, spec).unwrap();
            let all: Vec<(u32, u32)> = (0..53).map(|p| (0, p)).chain((0..11).map(|p| (1, p))).collect();
            let written = Step::new(&device, 2, &all).unwrap();
            layers::write(&layer, &source, DType::F32, &written).unwrap();
            let slots = Step::new(&device, 2, &[(0, 50), (0, 51), (0, 52), (1, 10)]).unwrap();
            assert!(case.attend(&layer, &slots).unwrap().bytes().unwrap() == paged, "{codec}, window {window:?}");
            drop(sequences);
        }
    }
}

/// What was written is read back, and positions that have no page are zeros.
#[test]
fn reads_what_was_written() {
    // The widest heads: a thread has several parts of a row.
    let cases =
        CODECS.into_iter().map(|codec| (codec, 64)).chain([(Codec::F32, 4096), (Codec::F16, 80), (Codec::BF16, 112)]);
    for (codec, head_dim) in cases {
        let case = Case { head_dim, k: codec, v: Codec::F32, window: Some(20), sequences: vec![(70, 3)], ..CASE };
        let source = case.source();
        conform(format!("kv_read of {codec}"), |device| {
            let Filled { pool, step, new, sequences } = case.filled(device, &source)?;
            let layer = pool.layer(1)?;
            layers::write(layer, &source.gather(&new), DType::F32, &step)?;
            let mut outputs = Vec::new();
            for (side, order) in [(KvSide::K, HeadOrder::TokenMajor), (KvSide::V, HeadOrder::HeadMajor)] {
                for start in [sequences[0].held(1)?.start, 0] {
                    let (tokens, heads) = (73 - start, case.kv_heads);
                    let shape = if order == HeadOrder::TokenMajor {
                        [tokens, heads, head_dim]
                    } else {
                        [heads, tokens, head_dim]
                    };
                    let out = Out::new(device, DType::F32, &shape)?;
                    // Zeros must be written, too.
                    out.tensor.write(&vec![f32::NAN; out.tensor.elements()])?;
                    let (sequence, keep_rotated, step) = (0, false, Some(&step));
                    let read = KvRead::new(layer, side, &out.tensor)
                        .sequence(sequence)
                        .step(step)
                        .start(start)
                        .keep_rotated(keep_rotated)
                        .order(order);
                    run(device, |enc| ops::kv_read(enc, &read))?;
                    outputs.push(out.close(&format!("{side:?} from {start}"))?);
                }
            }
            Ok(outputs)
        });
    }
}

/// The fused operation finds the same rows: without norms and a rotation it stores what `kv_write` would.
#[test]
fn norm_rope_write_stores_on_pages() {
    // The widest heads: a thread has several parts of a row.
    let cases =
        CODECS.into_iter().map(|codec| (codec, 64)).chain([(Codec::F32, 4096), (Codec::F16, 80), (Codec::BF16, 112)]);
    for (codec, head_dim) in cases {
        let case = Case { head_dim, k: codec, v: Codec::BF16, sequences: vec![(70, 20), (20, 1)], ..CASE };
        let source = case.source();
        conform(format!("norm_rope_write of {codec}"), |device| {
            let Filled { pool, step, new, sequences } = case.filled(device, &source)?;
            let (layer, data) = (pool.layer(1)?, source.gather(&new));
            let x = |values: &[f32]| input(device, DType::F32, values, &[new.len(), case.kv_heads, case.head_dim]);
            let (k, v) = (x(&data.k)?, x(&data.v)?);
            let q_out = Out::new(device, DType::F32, &[new.len(), case.kv_heads, case.head_dim])?;
            let args = NormRopeWrite::new(&k, &k, &v, &step, layer, &q_out.tensor);
            run(device, |enc| ops::norm_rope_write(enc, &args))?;
            let mut outputs = vec![q_out.close("q_out")?];
            for (sequence, held) in sequences.iter().enumerate() {
                for side in [KvSide::K, KvSide::V] {
                    let out = Out::new(device, DType::F32, &[held.len(), case.kv_heads, case.head_dim])?;
                    let (start, keep_rotated, order, step) = (0, false, HeadOrder::TokenMajor, Some(&step));
                    let read = KvRead::new(layer, side, &out.tensor)
                        .sequence(sequence)
                        .step(step)
                        .start(start)
                        .keep_rotated(keep_rotated)
                        .order(order);
                    run(device, |enc| ops::kv_read(enc, &read))?;
                    outputs.push(out.close(&format!("{side:?} of sequence {sequence}"))?);
                }
            }
            Ok(outputs)
        });
    }
}

/// Positions past the end of a sequence's row of the table are not those of the next row: they are skipped, read as zeros,
/// and not seen.
#[test]
fn positions_beyond_the_table_are_skipped() {
    for codec in [Codec::F32, Codec::tq(6)] {
        let case = Case { k: codec, v: codec, sequences: vec![(20, 1), (6, 1)], ..CASE };
        let source = case.source();
        conform(format!("beyond the table, {codec}"), |device| {
            let Filled { pool, step, new, sequences } = case.filled(device, &source)?;
            let (layer, data) = (pool.layer(1)?, source.gather(&new));
            layers::write(layer, &data, DType::F32, &step)?;
            // Would be position 2 of the other sequence.
            let end = step.page_tables()[0].shape()[1] * case.page_tokens;
            let past = end as u32 + 2;
            step.positions().write(&[past, 6])?;
            step.lens().write(&[past + 1, 7])?;
            let other = Source::random(&mut Rng::of("beyond"), 2, case.kv_heads, case.head_dim);
            let other = Source { k: [&other.k[..128], &data.k[128..]].concat(), ..data };
            layers::write(layer, &other, DType::F32, &step)?;
            let shape = [2, case.kv_heads, case.head_dim];
            let (k, v) = (input(device, DType::F32, &other.k, &shape)?, input(device, DType::F32, &other.v, &shape)?);
            let q_out = Out::new(device, DType::F32, &shape)?;
            run(device, |enc| ops::norm_rope_write(enc, &NormRopeWrite::new(&k, &k, &v, &step, layer, &q_out.tensor)))?;
            let mut outputs = vec![q_out.close("q_out")?];
            for (sequence, start, tokens) in [(0, 0, 21), (0, end, 16), (1, 0, 7)] {
                let out = Out::new(device, DType::F32, &[tokens, case.kv_heads, case.head_dim])?;
                let (side, keep_rotated, order) = (KvSide::K, false, HeadOrder::TokenMajor);
                let step = Some(&step);
                let read = KvRead::new(layer, side, &out.tensor)
                    .sequence(sequence)
                    .step(step)
                    .start(start)
                    .keep_rotated(keep_rotated)
                    .order(order);
                run(device, |enc| ops::kv_read(enc, &read))?;
                outputs.push(out.close(&format!("{tokens} from {start} of sequence {sequence}"))?);
            }
            // Within the window there are only positions past the end.
            let out = Out::new(device, DType::F32, &shape)?;
            let window = Some(2);
            run(device, |enc| ops::attend(enc, &Attend::new(&k, layer, &step, &out.tensor).window(window)))?;
            outputs.push(out.close_within("attend", case.bound(device))?);
            drop(sequences);
            Ok(outputs)
        });
    }
}

/// Entries that are no pages, tables that lack rows' pages: positions are skipped, on every device alike.
#[test]
fn entries_out_of_range_are_skipped() {
    for codec in [Codec::F32, Codec::BF16, Codec::tq(4), Codec::tq(8)] {
        for sequences in [vec![(100, 1), (60, 1)], vec![(70, 40)]] {
            let dtype = if codec == Codec::F32 { DType::F32 } else { DType::BF16 };
            Case { k: codec, v: codec, dtype, head_dim: 128, sequences, ..CASE }.check_with(|step| {
                let table = &step.page_tables()[0];
                let mut entries = table.to_vec::<u32>()?;
                for (index, entry) in entries.iter_mut().enumerate() {
                    match index % 3 {
                        0 => *entry = u32::MAX - index as u32,
                        1 if index % 2 == 0 => *entry = 1 << 31,
                        _ => {}
                    }
                }
                table.write(&entries)
            });
        }
    }
}

/// Any entry at all: nothing is read or written outside of the pool's memory.
#[test]
fn random_tables_stay_within_the_pool() {
    for device in devices() {
        let case = Case { sequences: vec![(60, 4), (20, 1)], ..CASE };
        let source = case.source();
        let Filled { pool, step, new, sequences } = case.filled(device, &source).unwrap();
        let mut rng = Rng::of("random tables");
        for round in 0..20 {
            let table = &step.page_tables()[0];
            let bits = if round % 2 == 0 { 32 } else { 8 };
            let entries: Vec<u32> = (0..table.elements()).map(|_| (rng.bits() >> (64 - bits)) as u32).collect();
            table.write(&entries).unwrap();
            let layer = pool.layer(1).unwrap();
            layers::write(layer, &source.gather(&new), DType::F32, &step).unwrap();
            case.attend(layer, &step).unwrap();
        }
        drop(sequences);
    }
}

/// Every entry from the first to past the last: a page that would reach past the pool's memory is none. The values are at the
/// end of a page, so that a read beyond the memory would fault on a device that runs on this machine.
#[test]
fn pages_end_within_the_pool() {
    for device in devices() {
        let layer = CacheLayer::new(1, 64, Codec::F32);
        let pool = KvPool::new(device, &PoolSpec::new(vec![layer], 40 << 10).page_tokens(16)).unwrap();
        let mut sequence = pool.sequence();
        let step = pool.step(&mut [(&mut sequence, 64)]).unwrap();
        let (table, layer) = (&step.page_tables()[0], pool.layer(0).unwrap());
        let (start, tokens, order, keep_rotated) = (0, 64, HeadOrder::TokenMajor, false);
        let out = Tensor::zeros(device, DType::F32, &[tokens, 1, 64]).unwrap();
        let (side, sequence) = (KvSide::V, 0);
        let read = KvRead::new(layer, side, &out)
            .sequence(sequence)
            .step(Some(&step))
            .start(start)
            .keep_rotated(keep_rotated)
            .order(order);
        for first in (0..200).step_by(4) {
            let entries: Vec<u32> = (0..table.elements() as u32).map(|i| first + i).collect();
            table.write(&entries).unwrap();
            run(device, |enc| ops::kv_read(enc, &read)).unwrap();
        }
    }
}

/// Rows of a step that are no tokens: nothing is stored, and attention gives zeros.
#[test]
fn inactive_rows_do_nothing() {
    for codec in [Codec::F16, Codec::tq(4)] {
        conform(format!("inactive rows over {codec}"), |device| {
            let layer = CacheLayer::new(2, 64, codec);
            let pool = KvPool::new(device, &PoolSpec::new(vec![layer], 1 << 20))?;
            let (mut a, mut b) = (pool.sequence(), pool.sequence());
            let step = pool.reserve_step(StepSize::decode(5, 100))?;
            let layer = pool.layer(0)?;
            let mut rng = Rng::of("inactive");
            let mut outputs = Vec::new();
            for round in 0..3 {
                let mut batch = vec![(&mut b, 1), (&mut a, 1)];
                batch.truncate(round);
                pool.step_into(&mut batch, &step)?;
                let data = Source::random(&mut rng, 5, 2, 64);
                layers::write(layer, &data, DType::F32, &step)?;
                let q = input(device, DType::F32, &rng.normals(5 * 4 * 64), &[5, 4, 64])?;
                let out = Out::new(device, DType::F32, &[5, 4, 64])?;
                run(device, |enc| ops::attend(enc, &Attend::new(&q, layer, &step, &out.tensor)))?;
                let values = out.tensor.to_f32()?;
                assert!(values[round * 4 * 64..].iter().all(|&x| x == 0.0), "{device}: rows from {round} on");
                outputs.push(out.close_within("out", Bound::of(DType::F32).over(device, codec, 1.0))?);
            }
            Ok(outputs)
        });
    }
}

#[test]
fn steps_belong_to_a_pool_and_a_moment() {
    let device = Device::cpu();
    let layer = CacheLayer::new(1, 64, Codec::F32);
    let pool = |_| KvPool::new(&device, &PoolSpec::new(vec![layer], 1 << 20)).unwrap();
    let [ours, other] = [0, 1].map(pool);
    let mut a = ours.sequence();
    let old = ours.step(&mut [(&mut a, 3)]).unwrap();
    let x = Tensor::zeros(&device, DType::F32, &[3, 1, 64]).unwrap();
    let write = |layer: &KvLayer, step: &Step| {
        let order = HeadOrder::TokenMajor;
        run(&device, |enc| ops::kv_write(enc, &KvWrite::new(&x, &x, step, layer).order(order)))
    };
    let refused = |result: Result<()>| assert!(matches!(result, Err(Error::Value { arg: "step", .. })), "{result:?}");
    write(ours.layer(0).unwrap(), &old).unwrap();
    refused(write(other.layer(0).unwrap(), &old));
    let plain = Step::new(&device, 1, &[(0, 0), (0, 1), (0, 2)]).unwrap();
    refused(write(ours.layer(0).unwrap(), &plain));
    let slots = KvLayer::new(&device, layers::linear_spec(1, 8, 64, Codec::F32)).unwrap();
    refused(write(&slots, &old));
    let new = ours.step(&mut [(&mut a, 3)]).unwrap();
    refused(write(ours.layer(0).unwrap(), &old));
    write(ours.layer(0).unwrap(), &new).unwrap();
    // Another sequence changes nothing for this step.
    let mut b = ours.sequence();
    ours.step(&mut [(&mut b, 1)]).unwrap();
    drop(b);
    write(ours.layer(0).unwrap(), &new).unwrap();
    drop(a);
    refused(write(ours.layer(0).unwrap(), &new));
    // A part of a step is as old as the step was.
    let mut c = ours.sequence();
    let whole = ours.reserve_step(StepSize::decode(1, 40).tokens(3, 3)).unwrap();
    ours.step_into(&mut [(&mut c, 3)], &whole).unwrap();
    let part = whole.select(&[2]).unwrap();
    assert_eq!(part.positions().to_vec::<u32>().unwrap(), [2]);
    let one = Tensor::zeros(&device, DType::F32, &[1, 1, 64]).unwrap();
    let write_part =
        |part: &Step| run(&device, |enc| ops::kv_write(enc, &KvWrite::new(&one, &one, part, ours.layer(0).unwrap())));
    write_part(&part).unwrap();
    assert!(matches!(whole.select(&[3]), Err(Error::OutOfRange { .. })));
    ours.step_into(&mut [(&mut c, 3)], &whole).unwrap();
    refused(write_part(&part));
    let mut foreign = other.sequence();
    assert!(matches!(ours.step(&mut [(&mut foreign, 1)]), Err(Error::Value { .. })));
    assert!(matches!(other.step_into(&mut [(&mut foreign, 1)], &new), Err(Error::Value { .. })));
}

// ------------------------------------------------------------------------------------------------------- histories

const WINDOW: usize = 21;
const DIM: usize = 64;

/// What a random history does next. Indices choose among what is there.
#[derive(Clone, Debug)]
enum Action {
    Begin { prompt: u32, tokens: usize },
    Append { which: Vec<(u16, usize)> },
    Fork(u16),
    Truncate(u16, u16),
    End(u16),
    Keep(u16),
    Find { prompt: u32, tokens: usize },
    Move(u16),
    Hold(u16, usize),
    Forget,
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let count = prop_oneof![4 => Just(1usize), 2 => 1..6usize, 2 => 10..45usize];
    let action = prop_oneof![
        3 => (0..3u32, 1..70usize).prop_map(|(prompt, tokens)| Action::Begin { prompt, tokens }),
        8 => prop::collection::vec((any::<u16>(), count), 1..4).prop_map(|which| Action::Append { which }),
        2 => any::<u16>().prop_map(Action::Fork),
        3 => (any::<u16>(), any::<u16>()).prop_map(|(which, len)| Action::Truncate(which, len)),
        2 => any::<u16>().prop_map(Action::End),
        3 => any::<u16>().prop_map(Action::Keep),
        4 => (0..3u32, 1..90usize).prop_map(|(prompt, tokens)| Action::Find { prompt, tokens }),
        1 => any::<u16>().prop_map(Action::Move),
        1 => (any::<u16>(), 0..30usize).prop_map(|(which, n)| Action::Hold(which, n)),
        1 => Just(Action::Forget),
    ];
    prop::collection::vec(action, 1..40)
}

/// A sequence and what it should hold.
struct Told {
    sequence: Sequence,
    tokens: Vec<u32>,
    /// The length before the latest step: what was appended since can be removed.
    certain: usize,
}

/// A pool of a full and a sliding layer, with the sequences of a history.
struct History {
    pool: KvPool,
    cache: PrefixCache,
    codec: Codec,
    told: Vec<Told>,
}

/// Token `at` of one of the prompts that histories share.
fn prompt_token(prompt: u32, at: usize) -> u32 {
    // Prompts have their first 40 tokens in common.
    if at < 40 { at as u32 } else { 1000 * (prompt + 1) + at as u32 }
}

/// A key or value: it depends on all tokens up to its own, so that a page of another history is noticed.
fn vector(side: u32, layer: usize, tokens: &[u32]) -> Vec<f32> {
    let hash = tokens.iter().fold(u64::from(side) << 32 | layer as u64, |hash, &token| {
        (hash ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    });
    Rng::new(hash).normals(DIM)
}

/// What a codec makes of it.
fn stored(codec: Codec, x: Vec<f32>) -> Vec<f64> {
    let wide = || x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    match codec {
        Codec::TurboQuant(tq) => {
            let tq: TurboQuant = tq;
            codec::decode(tq, &codec::encode(tq, &wide()).unwrap()).unwrap()
        }
        _ => wide(),
    }
}

impl History {
    fn new(device: &Device, codec: Codec, bytes: usize) -> History {
        let full = CacheLayer::new(1, DIM, codec);
        let sliding = full.window(Some(WINDOW));
        let spec = PoolSpec::new(vec![sliding, full, sliding], bytes).page_tokens(16).host_bytes(bytes / 4);
        let pool = KvPool::new(device, &spec).unwrap();
        let cache = PrefixCache::new(&pool, b"history");
        History { cache, pool, codec, told: Vec::new() }
    }

    /// Appends to the sequences, writes their keys and values, and compares attention with the naive one.
    fn append(&mut self, counts: &[(usize, usize)], rng: &mut Rng) -> bool {
        let before: Vec<usize> = self.told.iter().map(|told| told.sequence.len()).collect();
        let used = self.pool.usage().used;
        let mut batch: Vec<(&mut Sequence, usize)> = Vec::new();
        let mut order = Vec::new();
        for (index, told) in self.told.iter_mut().enumerate() {
            if let Some(&(_, count)) = counts.iter().find(|(which, _)| *which == index) {
                order.push((index, count));
                batch.push((&mut told.sequence, count));
            }
        }
        let step = match self.pool.step(&mut batch) {
            Ok(step) => step,
            Err(Error::OutOfPages { missing }) => {
                assert!(missing > 0);
                let after: Vec<usize> = self.told.iter().map(|told| told.sequence.len()).collect();
                assert_eq!((after, self.pool.usage().used), (before, used), "a refused step changes nothing");
                return false;
            }
            Err(error) => panic!("{error}"),
        };
        for &(index, count) in &order {
            let told = &mut self.told[index];
            told.certain = told.tokens.len();
            let at = told.tokens.len();
            told.tokens.extend((at..at + count).map(|_| rng.below(1 << 20) as u32));
        }
        self.write_and_compare(&order, &step, rng);
        true
    }

    fn write_and_compare(&self, order: &[(usize, usize)], step: &Step, rng: &mut Rng) {
        let device = self.pool.device();
        let tokens = step.tokens();
        if tokens == 0 {
            return;
        }
        let q = rng.normals(tokens * 2 * DIM);
        for layer in 0..3 {
            let side = |side: u32| -> Vec<f32> {
                let of = |&(index, count): &(usize, usize)| {
                    let all = &self.told[index].tokens;
                    (all.len() - count..all.len()).flat_map(move |at| vector(side, layer, &all[..=at]))
                };
                order.iter().flat_map(of).collect()
            };
            let kv_layer = self.pool.layer(layer).unwrap();
            layers::write(kv_layer, &Source { k: side(0), v: side(1), heads: 1, dim: DIM }, DType::F32, step).unwrap();
            let q_tensor = Tensor::from_slice(device, &q, &[tokens, 2, DIM]).unwrap();
            let out = Tensor::zeros(device, DType::F32, &[tokens, 2, DIM]).unwrap();
            run(device, |enc: &mut Encoder| ops::attend(enc, &Attend::new(&q_tensor, kv_layer, step, &out))).unwrap();
            let mut want = Vec::new();
            for &(index, count) in order {
                let all = &self.told[index].tokens;
                for position in all.len() - count..all.len() {
                    let first = if layer == 1 { 0 } else { (position + 1).saturating_sub(WINDOW) };
                    let at = want.len();
                    want.extend(self.naive(&q[at..at + 2 * DIM], layer, all, first..position + 1));
                }
            }
            let bound = Bound::of(DType::F32).over(device, self.codec, 1.0);
            // The codec's own encoder works in f64: a coordinate next to a threshold differs.
            let loose =
                Bound { arithmetic: bound.arithmetic + if self.codec.is_quantised() { 0.02 } else { 0.0 }, ..bound };
            assert_close(format!("layer {layer} on {device}"), &out.to_f32().unwrap(), &want, loose);
        }
    }

    fn naive(&self, q: &[f32], layer: usize, tokens: &[u32], seen: Range<usize>) -> Vec<f32> {
        let scale = (DIM as f64).powf(-0.5);
        let rows: Vec<[Vec<f64>; 2]> =
            seen.map(|at| [0, 1].map(|side| stored(self.codec, vector(side, layer, &tokens[..=at])))).collect();
        let mut out = Vec::new();
        for q in q.chunks_exact(DIM) {
            let scores: Vec<f64> = rows
                .iter()
                .map(|[k, _]| scale * q.iter().zip(k).map(|(&q, k)| f64::from(q) * k).sum::<f64>())
                .collect();
            let most = scores.iter().copied().fold(f64::MIN, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
            let total: f64 = weights.iter().sum();
            let value = |i: usize| rows.iter().zip(&weights).map(|([_, v], w)| w * v[i]).sum::<f64>() / total;
            out.extend((0..DIM).map(|i| value(i) as f32));
        }
        out
    }

    fn act(&mut self, action: &Action, rng: &mut Rng) {
        let pick = |which: u16, n: usize| usize::from(which) % n.max(1);
        let n = self.told.len();
        match *action {
            Action::Begin { prompt, tokens } | Action::Find { prompt, tokens } => {
                let all: Vec<u32> = (0..tokens).map(|at| prompt_token(prompt, at)).collect();
                let sequence = match action {
                    Action::Find { .. } => self.cache.find(&all[..tokens - 1]).unwrap(),
                    _ => self.pool.sequence(),
                };
                let found = sequence.len();
                assert!(found < tokens && found % 16 == 0);
                self.told.push(Told { sequence, tokens: all[..found].to_vec(), certain: found });
                // The rest of the prompt, whose tokens are not random.
                let Told { sequence, .. } = &mut self.told[n];
                match self.pool.step(&mut [(sequence, tokens - found)]) {
                    Ok(step) => {
                        self.told[n].tokens = all;
                        self.write_and_compare(&[(n, tokens - found)], &step, rng);
                    }
                    Err(Error::OutOfPages { .. }) => drop(self.told.pop()),
                    Err(error) => panic!("{error}"),
                }
            }
            Action::Forget => self.cache.clear(),
            _ if n == 0 => {}
            Action::Append { ref which } => {
                let mut counts: Vec<(usize, usize)> =
                    which.iter().map(|&(which, count)| (pick(which, n), count)).collect();
                counts.sort_unstable();
                counts.dedup_by_key(|(which, _)| *which);
                if !self.append(&counts, rng) {
                    self.told.remove(counts[0].0);
                }
            }
            Action::Fork(which) => {
                let Told { sequence, tokens, .. } = &self.told[pick(which, n)];
                let (sequence, tokens) = (sequence.fork(), tokens.clone());
                self.told.push(Told { certain: tokens.len(), sequence, tokens });
            }
            Action::Truncate(which, len) => {
                let Told { sequence, tokens, certain } = &mut self.told[pick(which, n)];
                let len = pick(len, tokens.len() + 1);
                match sequence.truncate(len) {
                    Ok(()) => tokens.truncate(len),
                    Err(Error::NotHeld { needed, oldest }) => {
                        assert!(len < *certain && needed < oldest && sequence.len() == tokens.len());
                    }
                    Err(error) => panic!("{error}"),
                }
                *certain = (*certain).min(tokens.len());
            }
            Action::End(which) => drop(self.told.remove(pick(which, n))),
            Action::Keep(which) => {
                let Told { sequence, tokens, .. } = &self.told[pick(which, n)];
                self.cache.keep(sequence, tokens).unwrap();
            }
            Action::Move(which) => {
                let Told { sequence, tokens, .. } = &self.told[pick(which, n)];
                let bytes = sequence.export().unwrap();
                match self.pool.import(&bytes) {
                    Ok(sequence) => {
                        assert_eq!(sequence.len(), tokens.len());
                        let tokens = tokens.clone();
                        self.told.push(Told { certain: tokens.len(), sequence, tokens });
                    }
                    Err(Error::OutOfPages { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            Action::Hold(which, tokens) => self.told[pick(which, n)].sequence.hold(tokens),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: proptest_cases(96), ..ProptestConfig::default() })]
    #[test]
    fn random_histories_match_naive_attention(
        actions in actions(),
        quantised in any::<bool>(),
        // From a pool that is nearly always full to one with room for all.
        pages in prop_oneof![6..14usize, 14..60usize],
        seed in any::<u64>(),
    ) {
        let codec = if quantised { Codec::tq(8) } else { Codec::F32 };
        // A page of the sliding group: two layers.
        let slab = 2 * 2 * 16 * codec.bytes_per_vector(DIM).next_multiple_of(16) + 1024;
        for device in devices() {
            // msl-host is no fast machine.
            if device.kind() == kvant::DeviceKind::Metal && seed % 5 != 0 {
                continue;
            }
            let mut history = History::new(device, codec, pages * slab);
            let mut rng = Rng::new(seed);
            for action in &actions {
                history.act(action, &mut rng);
            }
            let History { pool, cache, told, .. } = history;
            drop(told);
            cache.clear();
            prop_assert_eq!(pool.usage().used, 0, "every page is free after the last handle");
        }
    }
}

/// A prompt whose beginning is found gives the same bits as one that is computed whole, in the same pieces: at every length
/// modulo the page, over full and sliding layers, in a pool that has just enough pages.
#[test]
fn a_found_prefix_gives_the_same_bits() {
    const PAGE: usize = 16;
    for codec in CODECS {
        for device in devices() {
            let lengths =
                if device.kind() == kvant::DeviceKind::Metal { vec![17, 40, 63] } else { (17..=64).collect() };
            for len in lengths {
                let full = CacheLayer::new(1, DIM, codec);
                let sliding = full.window(Some(WINDOW));
                let spec = PoolSpec::new(vec![sliding, full], 0).page_tokens(PAGE);
                // Room for the kept prefix and one sequence.
                let pool = KvPool::new(device, &spec.room_for(2, len + 1, len).unwrap()).unwrap();
                let cache = PrefixCache::new(&pool, b"bits");
                let tokens: Vec<u32> = (0..=len).map(|at| prompt_token(0, at)).collect();
                let whole = (len - 1) / PAGE * PAGE;
                // The rest of the prompt, then a token; the attention of both layers over each.
                let finish = |sequence: &mut Sequence| -> Vec<Vec<u8>> {
                    let mut outs = Vec::new();
                    for end in [len, len + 1] {
                        outs.extend(feed(&pool, sequence, &tokens[..end]));
                    }
                    outs
                };
                let mut miss = pool.sequence();
                feed(&pool, &mut miss, &tokens[..whole]);
                cache.keep(&miss, &tokens[..whole]).unwrap();
                let want = finish(&mut miss);
                drop(miss);
                let mut hit = cache.find(&tokens[..len - 1]).unwrap();
                assert_eq!(hit.len(), whole, "{device}: {len} tokens");
                assert!(finish(&mut hit) == want, "{device}: {codec}, {len} tokens");
            }
        }
    }
}

/// Appends the tokens that a sequence lacks, and returns the attention of each layer over them.
fn feed(pool: &KvPool, sequence: &mut Sequence, tokens: &[u32]) -> Vec<Vec<u8>> {
    let (start, count) = (sequence.len(), tokens.len() - sequence.len());
    let step = pool.step(&mut [(sequence, count)]).unwrap();
    let q = Rng::of(tokens.len()).normals(count * 2 * DIM);
    let q = Tensor::from_slice(pool.device(), &q, &[count, 2, DIM]).unwrap();
    let layers = 0..pool.spec().layers.len();
    layers
        .map(|index| {
            let layer = pool.layer(index).unwrap();
            let side = |side| (start..tokens.len()).flat_map(|at| vector(side, index, &tokens[..=at])).collect();
            layers::write(layer, &Source { k: side(0), v: side(1), heads: 1, dim: DIM }, DType::F32, &step).unwrap();
            let out = Tensor::zeros(pool.device(), DType::F32, &[count, 2, DIM]).unwrap();
            run(pool.device(), |enc| ops::attend(enc, &Attend::new(&q, layer, &step, &out))).unwrap();
            bytes_of(&out).unwrap()
        })
        .collect()
}

/// A full and a sliding layer.
fn two_layers() -> Vec<CacheLayer> {
    let full = CacheLayer::new(1, DIM, Codec::F32);
    vec![full.window(Some(WINDOW)), full]
}

/// The last page of a fork is its own as soon as one of the two writes to it.
#[test]
fn forks_do_not_see_each_other() {
    for device in devices() {
        let pool = KvPool::new(device, &PoolSpec::new(two_layers(), 1 << 20).page_tokens(16)).unwrap();
        let tails = [0, 1].map(|tail| (0..31).map(|at| if at < 20 { at } else { at + 100 * (tail + 1) }).collect());
        let tails: [Vec<u32>; 2] = tails;
        let mut a = pool.sequence();
        feed(&pool, &mut a, &tails[0][..20]);
        let mut b = a.fork();
        for end in [30, 31] {
            for (sequence, tokens) in [(&mut a, &tails[0]), (&mut b, &tails[1])] {
                let got = feed(&pool, sequence, &tokens[..end]);
                let mut alone = pool.sequence();
                for end in [20, 30, 31].into_iter().take_while(|&before| before < end) {
                    feed(&pool, &mut alone, &tokens[..end]);
                }
                assert!(feed(&pool, &mut alone, &tokens[..end]) == got, "{device}: {end} tokens");
            }
        }
    }
}

/// A prefix ends where all windows have their positions, and nowhere else.
#[test]
fn prefixes_need_their_windows() {
    let pool = KvPool::new(&Device::cpu(), &PoolSpec::new(two_layers(), 1 << 20).page_tokens(16)).unwrap();
    let cache = PrefixCache::new(&pool, b"windows");
    let tokens: Vec<u32> = (0..70).collect();
    let mut sequence = pool.sequence();
    // The full layer has all pages; the sliding one those before the ends of what was kept.
    for end in [33, 70] {
        feed(&pool, &mut sequence, &tokens[..end]);
        cache.keep(&sequence, &tokens[..end]).unwrap();
    }
    // Windows of 21: what was kept of the two ends also serves 48.
    for (asked, found) in [(70, 64), (64, 64), (63, 48), (50, 48), (47, 32), (32, 32), (31, 16), (15, 0)] {
        assert_eq!(cache.find(&tokens[..asked]).unwrap().len(), found, "{asked} tokens");
    }
    let mut other = tokens.clone();
    other[5] = 1000;
    assert!(cache.find(&other).unwrap().is_empty());
    assert!(PrefixCache::new(&pool, b"another model").find(&tokens).unwrap().is_empty());
}

/// Eviction takes prefixes that nobody uses, the least recently used first, and nothing else.
#[test]
fn prefixes_in_use_stay() {
    let spec = PoolSpec::new(two_layers(), 0).page_tokens(16).room_for(3, 48, 48).unwrap();
    let pool = KvPool::new(&Device::cpu(), &spec).unwrap();
    let cache = PrefixCache::new(&pool, b"use");
    let prompts = [0u32, 1, 2].map(|prompt| (0..33).map(|at| 100 * prompt + at).collect::<Vec<u32>>());
    for tokens in &prompts {
        let mut sequence = pool.sequence();
        feed(&pool, &mut sequence, &tokens[..32]);
        cache.keep(&sequence, &tokens[..32]).unwrap();
    }
    // The first is in use, the second is older than the third.
    let mut held = cache.find(&prompts[0][..32]).unwrap();
    assert_eq!(cache.find(&prompts[2][..32]).unwrap().len(), 32);
    let mut others: Vec<Sequence> = Vec::new();
    loop {
        let mut other = pool.sequence();
        match pool.step(&mut [(&mut other, 1)]) {
            Ok(_) => others.push(other),
            Err(Error::OutOfPages { missing }) => break assert!(missing > 0),
            Err(error) => panic!("{error}"),
        }
    }
    assert!(cache.find(&prompts[1][..32]).unwrap().is_empty() && cache.find(&prompts[2][..32]).unwrap().is_empty());
    assert_eq!(cache.find(&prompts[0][..32]).unwrap().len(), 32, "the prefix in use is still there");
    drop(others);
    let got = feed(&pool, &mut held, &prompts[0]);
    cache.clear();
    let mut again = pool.sequence();
    feed(&pool, &mut again, &prompts[0][..32]);
    assert!(feed(&pool, &mut again, &prompts[0]) == got, "what is in use has not changed");
}

/// A sequence can be truncated exactly as far as its windows are held.
#[test]
fn truncation_ends_where_positions_are_gone() {
    let pool = KvPool::new(&Device::cpu(), &PoolSpec::new(two_layers(), 1 << 20).page_tokens(16)).unwrap();
    for hold in [0, 1, 16, 40, 1000] {
        let mut sequence = pool.sequence();
        sequence.hold(hold);
        for _ in 0..100 {
            pool.step(&mut [(&mut sequence, 1)]).unwrap();
        }
        let oldest = sequence.held(0).unwrap().start;
        assert!(oldest <= (100 - WINDOW).saturating_sub(hold), "hold {hold}: {oldest}");
        assert!(oldest + 16 > (100 - WINDOW).saturating_sub(hold), "hold {hold}: pages that have passed are gone");
        for len in 0..=100 {
            let needed = (len + 1usize).saturating_sub(WINDOW);
            let truncated = sequence.fork().truncate(len);
            assert_eq!(truncated.is_ok(), len == 0 || needed >= oldest, "hold {hold}: to {len}: {truncated:?}");
        }
    }
}

/// Evicted prefixes wait in host memory, and come back as they were.
#[test]
fn prefixes_come_back_from_host_memory() {
    for device in devices() {
        let layer = CacheLayer::new(1, DIM, Codec::F32);
        let layers = vec![layer, layer.window(Some(WINDOW))];
        let spec = PoolSpec::new(layers, 0).page_tokens(16).room_for(1, 64, 64).unwrap().host_bytes(1 << 20);
        let pool = KvPool::new(device, &spec).unwrap();
        let cache = PrefixCache::new(&pool, b"host");
        let prompts = [0, 1].map(|prompt| (0..49).map(|at| prompt_token(prompt, at + 40)).collect::<Vec<u32>>());
        let mut outs = Vec::new();
        for tokens in &prompts {
            let mut sequence = pool.sequence();
            feed(&pool, &mut sequence, &tokens[..48]);
            cache.keep(&sequence, &tokens[..48]).unwrap();
            outs.push(feed(&pool, &mut sequence, tokens));
        }
        assert!(pool.usage().host > 0, "{device}: the first prompt has left the device");
        for _ in 0..3 {
            for (tokens, want) in prompts.iter().zip(&outs) {
                let mut sequence = cache.find(&tokens[..48]).unwrap();
                assert_eq!(sequence.len(), 48, "{device}");
                assert!(feed(&pool, &mut sequence, tokens) == *want, "{device}");
            }
        }
        cache.clear();
        assert_eq!((pool.usage().used, pool.usage().host), (0, 0));
    }
}

/// What comes back from bytes is what was exported; anything else is refused, and takes no page.
#[test]
fn exports_come_back_or_are_refused() {
    for device in devices() {
        let layer = CacheLayer::new(1, DIM, Codec::tq(5)).v(Codec::BF16);
        let spec = PoolSpec::new(vec![layer, layer.window(Some(WINDOW))], 1 << 20).page_tokens(16);
        let (pool, other) = (KvPool::new(device, &spec).unwrap(), KvPool::new(device, &spec).unwrap());
        let tokens: Vec<u32> = (0..70).map(|at| prompt_token(0, at)).collect();
        let mut sequence = pool.sequence();
        feed(&pool, &mut sequence, &tokens[..50]);
        feed(&pool, &mut sequence, &tokens[..69]);
        let bytes = sequence.export().unwrap();
        let mut moved = other.import(&bytes).unwrap();
        assert!(feed(&other, &mut moved, &tokens) == feed(&pool, &mut sequence, &tokens), "{device}");
        drop((moved, sequence));
        let wrong = KvPool::new(device, &spec.clone().page_tokens(32)).unwrap();
        assert!(matches!(wrong.import(&bytes), Err(Error::File { .. })), "another size of pages");
        let mut rng = Rng::of("damage");
        for round in 0..60 {
            let mut damaged = bytes.clone();
            match round % 3 {
                0 => damaged.truncate(rng.below(bytes.len())),
                1 => damaged[rng.below(600)] = rng.bits() as u8,
                // Numbers of the metadata.
                _ => {
                    let digits: Vec<usize> = (8..800).filter(|&at| bytes[at].is_ascii_digit()).collect();
                    damaged[rng.pick(&digits)] = b'0' + rng.below(10) as u8;
                }
            }
            match other.import(&damaged) {
                Ok(mut sequence) => drop(other.step(&mut [(&mut sequence, 1)])),
                Err(Error::File { .. } | Error::OutOfPages { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        assert_eq!((pool.usage().used, other.usage().used), (0, 0));
    }
}

/// A graph recorded for 32 rows serves any 1 to 32 sequences that join and leave.
#[test]
fn a_graph_serves_sequences_that_join_and_leave() {
    for device in devices() {
        let steps = if device.kind() == kvant::DeviceKind::Metal { 12 } else { 300 };
        let layer = CacheLayer::new(1, DIM, Codec::F32);
        let spec = PoolSpec::new(vec![layer, layer.window(Some(WINDOW))], 4 << 20).page_tokens(16);
        let pool = KvPool::new(device, &spec).unwrap();
        let step = pool.reserve_step(StepSize::decode(32, 1000)).unwrap();
        let tensor = |heads| Tensor::zeros(device, DType::F32, &[32, heads, DIM]).unwrap();
        let (q, k, v) = (tensor(2), tensor(1), tensor(1));
        let outs = [tensor(2), tensor(2)];
        let graph = Encoder::capture(device, |enc| {
            for (index, out) in outs.iter().enumerate() {
                let layer = pool.layer(index)?;
                let order = HeadOrder::TokenMajor;
                ops::kv_write(enc, &KvWrite::new(&k, &v, &step, layer).order(order))?;
                ops::attend(enc, &Attend::new(&q, layer, &step, out))?;
            }
            Ok(())
        });
        let graph = graph.unwrap();
        let mut rng = Rng::of("join and leave");
        // Keys and values of each sequence: all tokens, one after the other.
        let mut live: Vec<(Sequence, Vec<f32>, Vec<f32>)> = Vec::new();
        for _ in 0..steps {
            while live.len() > 1 && rng.below(4) == 0 {
                live.swap_remove(rng.below(live.len()));
            }
            while live.is_empty() || live.len() < 32 && rng.below(3) == 0 {
                live.push((pool.sequence(), Vec::new(), Vec::new()));
            }
            let (q_data, k_data, v_data) = (rng.normals(32 * 2 * DIM), rng.normals(32 * DIM), rng.normals(32 * DIM));
            let mut batch: Vec<_> = live.iter_mut().map(|(sequence, ..)| (sequence, 1)).collect();
            pool.step_into(&mut batch, &step).unwrap();
            for (tensor, data) in [(&q, &q_data), (&k, &k_data), (&v, &v_data)] {
                tensor.write(data).unwrap();
            }
            graph.replay().unwrap().wait().unwrap();
            for (row, (_, keys, values)) in live.iter_mut().enumerate() {
                keys.extend(&k_data[row * DIM..(row + 1) * DIM]);
                values.extend(&v_data[row * DIM..(row + 1) * DIM]);
            }
            for (out, window) in outs.iter().zip([usize::MAX, WINDOW]) {
                let got = out.to_f32().unwrap();
                let mut want = vec![0.0; got.len()];
                for (row, (_, keys, values)) in live.iter().enumerate() {
                    let first = (keys.len() / DIM).saturating_sub(window);
                    for head in 0..2 {
                        let at = (row * 2 + head) * DIM;
                        let q: Vec<f64> = q_data[at..at + DIM].iter().map(|&x| f64::from(x)).collect();
                        let wide = |x: &[f32]| x[first * DIM..].chunks_exact(DIM).map(widen).collect::<Vec<_>>();
                        let (keys, values) = (wide(keys), wide(values));
                        let query =
                            kvant::reference::QueryVector { q: &q, scale: (DIM as f64).powf(-0.5), softcap: None };
                        let pairs = keys.iter().zip(&values).map(|(k, v)| (&k[..], &v[..]));
                        let state = kvant::reference::attend(query, pairs).unwrap();
                        want[at..at + DIM].iter_mut().zip(state.finish()).for_each(|(to, x)| *to = x as f32);
                    }
                }
                assert_close(format!("{} rows on {device}", live.len()), &got, &want, Bound::of(DType::F32));
            }
        }
    }
}

fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}
