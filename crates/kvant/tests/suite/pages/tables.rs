//! Page tables and steps that do not match a pool: memory outside of the pool is never accessed.

use super::case::{CASE, Case, Filled};
use crate::common::{
    Out, Rng, conform, devices, input,
    layers::{self, Source},
    run,
};
use kvant::{
    CacheLayer, Codec, DType, Device, Error, HeadOrder, KvLayer, KvPool, PoolSpec, Result, Step, StepSize, Tensor,
    ops::{self, Attend, KvRead, KvSide, KvWrite, NormRopeWrite},
};

/// Positions beyond a sequence's row of the table do not use the next row: they are skipped, read as zero, and not
/// seen.
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
            // The window contains only positions beyond the end.
            let out = Out::new(device, DType::F32, &shape)?;
            let window = Some(2);
            run(device, |enc| ops::attend(enc, &Attend::new(&k, layer, &step, &out.tensor).window(window)))?;
            outputs.push(out.close_within("attend", case.bound(device))?);
            drop(sequences);
            Ok(outputs)
        });
    }
}

/// Entries that are not pages, and tables without some rows' pages: positions are skipped, on every device.
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

/// Random entries: memory outside of the pool is not accessed.
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

/// Every entry from the first to beyond the last: a page that would exceed the pool's memory is not a page. The values
/// are at the end of a page, so that a read beyond the memory would fault on a device of this machine.
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

/// The batch of a pool's step bounds later writes to it.
#[test]
fn the_batch_of_a_step_is_a_bound() {
    let device = Device::cpu();
    let pool = KvPool::new(&device, &PoolSpec::new(vec![CacheLayer::new(1, 64, Codec::F32)], 1 << 20)).unwrap();
    let (mut a, mut b) = (pool.sequence(), pool.sequence());
    // Two sequences; one of them has new tokens.
    let step = pool.step(&mut [(&mut a, 3), (&mut b, 0)]).unwrap();
    let known = step.batch();
    assert_eq!((known.sequences, known.longest, known.max_new, known.decode), (1, 3, 3, 0));
    let narrower = step.clone().with_batch(known.sequences(0).longest(1).max_new(1).decode(3)).batch();
    assert_eq!(narrower, known);
    assert_eq!(step.clone().with_batch(known.longest(9)).batch().longest, 9);
    a.truncate(0).unwrap();
    let both = pool.step_into(&mut [(&mut a, 2), (&mut b, 1)], &step);
    assert!(matches!(both, Err(Error::Value { arg: "batch (sequences with tokens)", .. })), "{both:?}");
    assert_eq!((a.len(), b.len()), (0, 0));
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
    // Another sequence does not affect this step.
    let mut b = ours.sequence();
    ours.step(&mut [(&mut b, 1)]).unwrap();
    drop(b);
    write(ours.layer(0).unwrap(), &new).unwrap();
    drop(a);
    refused(write(ours.layer(0).unwrap(), &new));
    // A selected step is out of date when its source is.
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
    // Its page tables are those of the whole step, even if another sequence now uses it.
    let part = whole.select(&[2]).unwrap();
    let mut d = ours.sequence();
    ours.step_into(&mut [(&mut d, 3)], &whole).unwrap();
    refused(write_part(&part));
    let mut foreign = other.sequence();
    assert!(matches!(ours.step(&mut [(&mut foreign, 1)]), Err(Error::Value { .. })));
    assert!(matches!(other.step_into(&mut [(&mut foreign, 1)], &new), Err(Error::Value { .. })));
}
