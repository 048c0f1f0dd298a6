//! Sequences that are forked, truncated, exported, or batched by a recorded graph.

use super::tokens::{DIM, WINDOW, feed, prompt_token, two_layers};
use crate::common::{Bound, Rng, assert_close, devices};
use kvant::{
    CacheLayer, Codec, DType, Device, Encoder, Error, HeadOrder, KvPool, PoolSpec, Sequence, StepSize, Tensor,
    ops::{self, Attend, KvWrite},
};

/// A fork gets its own last page as soon as one of the two writes to it.
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

/// Exported bytes import unchanged; anything else is rejected, and takes no page.
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

/// A sequence that was truncated into its second page holds page 0 apart from the others.
#[test]
fn truncated_sequences_are_exported() {
    for device in devices() {
        let layer = CacheLayer::new(1, DIM, Codec::tq_centred(5));
        let pool = KvPool::new(device, &PoolSpec::new(vec![layer], 1 << 20).page_tokens(16)).unwrap();
        let tokens: Vec<u32> = (0..40).map(|at| prompt_token(0, at)).collect();
        let mut sequence = pool.sequence();
        for end in [33, 34] {
            feed(&pool, &mut sequence, &tokens[..end]);
        }
        sequence.truncate(17).unwrap();
        let mut moved = pool.import(&sequence.export().unwrap()).unwrap();
        assert!(feed(&pool, &mut moved, &tokens) == feed(&pool, &mut sequence, &tokens), "{device}");
    }
}

/// A graph recorded for 32 rows serves 1 to 32 sequences that join and leave.
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
        // Keys and values of each sequence, for all tokens in order.
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

/// Changes a sequence, and returns it unless it has ended.
type Change = fn(&KvPool, Sequence) -> Option<Sequence>;

/// Changes of a sequence that make its steps out of date.
const CHANGES: [(&str, Change); 4] = [
    ("dropped", |_, sequence| {
        drop(sequence);
        None
    }),
    ("emptied", |_, mut sequence| {
        sequence.truncate(0).unwrap();
        Some(sequence)
    }),
    ("truncated by a token", |_, mut sequence| {
        sequence.truncate(sequence.len() - 1).unwrap();
        Some(sequence)
    }),
    ("extended", |pool, mut sequence| {
        drop(pool.step(&mut [(&mut sequence, 1)]).unwrap());
        Some(sequence)
    }),
];

/// Whether the result is the error of operations whose step is out of date.
fn is_out_of_date(result: &kvant::Result<kvant::Submission>, op: &str) -> bool {
    matches!(result, Err(Error::Value { op: found, arg: "step", .. }) if *found == op)
}

/// Operations recorded for a sequence do not run after it has changed: its pages may have another owner.
#[test]
fn recorded_operations_are_refused_after_their_sequence_changed() {
    for device in devices() {
        for (change, apply) in CHANGES {
            let spec = PoolSpec::new(vec![CacheLayer::new(1, DIM, Codec::F32)], 0).page_tokens(16);
            let spec = spec.room_for(2, 32, 1).unwrap();
            let (pool, other) = (KvPool::new(device, &spec).unwrap(), KvPool::new(device, &spec).unwrap());
            let mut sequence = pool.sequence();
            let step = pool.step(&mut [(&mut sequence, 20)]).unwrap();
            let rows = Tensor::from_slice(device, &vec![7f32; 20 * DIM], &[20, 1, DIM]).unwrap();
            let mut enc = device.encoder().unwrap();
            ops::kv_write(&mut enc, &KvWrite::new(&rows, &rows, &step, pool.layer(0).unwrap())).unwrap();
            let kept = apply(&pool, sequence);
            let tokens: Vec<u32> = (0..21).collect();
            let (mut next, mut alone) = (pool.sequence(), other.sequence());
            feed(&pool, &mut next, &tokens[..20]);
            feed(&other, &mut alone, &tokens[..20]);
            let committed = enc.commit();
            assert!(is_out_of_date(&committed, "commit"), "{device}: {change}: {:?}", committed.err());
            let same = feed(&pool, &mut next, &tokens) == feed(&other, &mut alone, &tokens);
            assert!(same, "{device}: {change}: a page of another sequence was written");
            drop(kept);
        }
    }
}

/// A graph runs again after its step has been rewritten.
#[test]
fn replays_are_refused_after_their_sequence_changed() {
    for device in devices() {
        let spec = PoolSpec::new(vec![CacheLayer::new(1, DIM, Codec::F32)], 1 << 20).page_tokens(16);
        let pool = KvPool::new(device, &spec).unwrap();
        let step = pool.reserve_step(StepSize::decode(2, 64)).unwrap();
        let rows = Tensor::from_slice(device, &[7f32; 2 * DIM], &[2, 1, DIM]).unwrap();
        let graph =
            Encoder::capture(device, |enc| ops::kv_write(enc, &KvWrite::new(&rows, &rows, &step, pool.layer(0)?)));
        let graph = graph.unwrap();
        for (change, apply) in CHANGES {
            let (mut a, mut b) = (pool.sequence(), pool.sequence());
            for _ in 0..3 {
                pool.step_into(&mut [(&mut a, 1), (&mut b, 1)], &step).unwrap();
                graph.replay().unwrap().wait().unwrap();
            }
            let kept = apply(&pool, a);
            let replayed = graph.replay();
            assert!(is_out_of_date(&replayed, "replay"), "{device}: {change}: {:?}", replayed.err());
            pool.step_into(&mut [(&mut b, 1)], &step).unwrap();
            graph.replay().unwrap().wait().unwrap();
            drop(kept);
        }
    }
}
