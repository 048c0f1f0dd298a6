//! argmax and sample against the reference.

use crate::common::{FLOATS, Out, Output, Rng, conform, devices, indices, input, one_in, run};
use kvant::{
    DType, Device, Result, Tensor,
    ops::{self, Argmax, MoeRoute, Sample, SampleRow},
};

/// Rows of logits with every corner case: equal logits, infinities, NaN, only NaN.
fn logits(rng: &mut Rng, rows: usize, dim: usize) -> Vec<f32> {
    let mut values = rng.normals(rows * dim);
    for (r, row) in values.chunks_mut(dim).enumerate() {
        let at = rng.below(dim);
        match r % 6 {
            0 => {}
            1 => row.fill(-2.5),
            2 => row[at] = f32::NAN,
            3 => row.fill(f32::NAN),
            4 => {
                row.fill(f32::NEG_INFINITY);
                row[at] = -1e30;
            }
            _ => {
                let other = rng.below(dim);
                row[at] = 9.0;
                row[other] = 9.0;
            }
        }
    }
    values
}

#[test]
fn argmax() {
    // In the last two, threads compare many elements each, also if blocks share a row.
    for dim in [1, 2, 7, 64, 65, 1000, 5003, 70_000, 200_003] {
        for dtype in FLOATS {
            conform(format!("argmax of {dim} {dtype}"), |device| {
                let x = input(device, dtype, &logits(&mut Rng::new(dim as u64), 13, dim), &[13, dim])?;
                let out = Out::new(device, DType::U32, &[13])?;
                run(device, |enc| ops::argmax(enc, &Argmax::new(&x, &out.tensor)))?;
                Ok(vec![out.same("out")?])
            });
        }
    }
}

/// Infinities are ordinary values, NaN is skipped: a row of NaN has no largest element.
#[test]
fn argmax_of_logits_that_are_not_finite() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let rows =
        [1.0, inf, inf, 2.0, -inf, nan, -inf, nan, nan, nan, nan, nan, nan, -inf, 3.0, -inf, -nan, inf, nan, 0.0];
    for dtype in FLOATS {
        conform(format!("argmax of what is not finite, {dtype}"), |device| {
            let x = input(device, dtype, &rows, &[5, 4])?;
            let out = Out::new(device, DType::U32, &[5])?;
            run(device, |enc| ops::argmax(enc, &Argmax::new(&x, &out.tensor)))?;
            assert_eq!(out.tensor.to_vec::<u32>()?, [1, 0, u32::MAX, 2, 1], "{device}");
            Ok(vec![out.same("out")?])
        });
    }
}

/// Rows of NaN only, short ones and those that several blocks share, have no token, with any cuts.
#[test]
fn nan_is_never_drawn() {
    for device in devices() {
        for (vocab, dtype) in [(1, DType::F32), (7, DType::BF16), (300, DType::F16), (9001, DType::F32)] {
            let logits = input(device, dtype, &vec![f32::NAN; 2 * vocab], &[2, vocab]).unwrap();
            for how in &DRAWS {
                let drawn = draw(device, &logits, how, 1, &[0, 7]).unwrap();
                assert_eq!(drawn, [u32::MAX; 2], "{device}: {vocab} of {dtype} at temperature {}", how.temperature);
            }
        }
    }
}

/// Zeros are equal with any signs, in all three orders.
#[test]
fn signed_zeros() {
    for dtype in FLOATS {
        conform(format!("signed zeros, {dtype}"), |device| {
            let rows = [-1.0, -0.0, 0.0, -0.0, -0.0, 0.0, -2.0, 0.0, 0.0, -0.0, -0.0, -3.0];
            let x = input(device, dtype, &rows, &[3, 4])?;
            let largest = Out::new(device, DType::U32, &[3])?;
            let ids = Out::new(device, DType::U32, &[3, 3])?;
            let weights = Out::new(device, DType::F32, &[3, 3])?;
            run(device, |enc| {
                ops::argmax(enc, &Argmax::new(&x, &largest.tensor))?;
                let (ids, weights) = (&ids.tensor, &weights.tensor);
                ops::moe_route(enc, &MoeRoute::new(&x, ids, weights))
            })?;
            let how = Draw { temperature: 1.0, top_k: 2, top_p: 1.0, min_p: 0.0 };
            let drawn = draw(device, &x, &how, 3, &[1, 2, 3])?;
            let drawn = Output::Same("drawn".into(), bytemuck::cast_slice(&drawn).to_vec());
            Ok(vec![largest.same("argmax")?, ids.same("ids")?, weights.close("weights")?, drawn])
        });
    }
}

struct Draw {
    temperature: f32,
    top_k: usize,
    top_p: f32,
    min_p: f32,
}

fn draw(device: &Device, logits: &Tensor, how: &Draw, seed: u64, counters: &[u32]) -> Result<Vec<u32>> {
    let &Draw { temperature, top_k, top_p, min_p } = how;
    let counter = indices(device, counters, &[counters.len()])?;
    let out = Out::new(device, DType::U32, &[counters.len()])?;
    let args = Sample::new(logits, &counter, &out.tensor)
        .temperature(temperature)
        .top_k(top_k)
        .top_p(top_p)
        .min_p(min_p)
        .seed(seed);
    run(device, |enc| ops::sample(enc, &args))?;
    out.bytes()?;
    out.tensor.to_vec::<u32>()
}

const DRAWS: [Draw; 8] = [
    Draw { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0 },
    Draw { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 },
    Draw { temperature: 0.7, top_k: 40, top_p: 1.0, min_p: 0.0 },
    Draw { temperature: 1.0, top_k: 0, top_p: 0.9, min_p: 0.0 },
    Draw { temperature: 1.3, top_k: 0, top_p: 1.0, min_p: 0.05 },
    Draw { temperature: 0.8, top_k: 20, top_p: 0.8, min_p: 0.02 },
    Draw { temperature: 2.0, top_k: 1, top_p: 0.5, min_p: 0.5 },
    Draw { temperature: 100.0, top_k: 1_000_000, top_p: 1e-6, min_p: 0.999 },
];

/// Draws equal the reference's. If two candidates are equal up to rounding, either may be drawn, so one row may differ.
#[test]
fn samples() {
    let all = (0..DRAWS.len()).flat_map(|case| [1, 5, 300, 4001].map(|vocab| (case, vocab)));
    let all = all.flat_map(|(case, vocab)| FLOATS.map(|dtype| (case, vocab, dtype)));
    for (case, vocab, dtype) in one_in(3, |(_, vocab, _)| vocab.to_string(), all) {
        let rows = 97;
        let values = Rng::new(vocab as u64).normals(rows * vocab);
        let spread: Vec<f32> = values.iter().map(|x| x * 2.0).collect();
        let counters: Vec<u32> = (0..rows as u32).map(|r| r * 31 + 5).collect();
        let drawn = |device: &Device| {
            let logits = input(device, dtype, &spread, &[rows, vocab]).unwrap();
            draw(device, &logits, &DRAWS[case], 42, &counters).unwrap_or_else(|e| panic!("{device}: {e}"))
        };
        let want = drawn(&Device::reference());
        for device in devices() {
            let got = drawn(device);
            let changed = got.iter().zip(&want).filter(|(a, b)| a != b).count();
            assert!(changed <= 1, "{device}: draw {case}, {vocab} {dtype}: {changed} of {rows} tokens differ");
        }
    }
}

/// Draws with parameters per row.
fn draw_rows(device: &Device, logits: &Tensor, words: &[u32], counters: &[u32]) -> Result<Vec<u32>> {
    let rows = counters.len();
    let (counter, words) = (indices(device, counters, &[rows])?, indices(device, words, &[rows, SampleRow::WORDS])?);
    let out = Out::new(device, DType::U32, &[rows])?;
    run(device, |enc| ops::sample(enc, &Sample::new(logits, &counter, &out.tensor).rows(Some(&words))))?;
    out.bytes()?;
    out.tensor.to_vec::<u32>()
}

/// A row with its own parameters draws as with the same parameters for all rows.
#[test]
fn rows_have_parameters_of_their_own() {
    for (vocab, rows) in [(1, 3), (2, 40), (300, 97), (4001, 50), (20_001, 9)] {
        for dtype in FLOATS {
            let values = logits(&mut Rng::new(vocab as u64), rows, vocab);
            let counters: Vec<u32> = (0..rows as u32).map(|r| r * 31 + 5).collect();
            let how = |row: usize| (&DRAWS[row % DRAWS.len()], 42 + (row as u64 % 3) * 0x1_0000_0001);
            let words: Vec<u32> = (0..rows)
                .flat_map(|row| {
                    let (&Draw { temperature, top_k, top_p, min_p }, seed) = how(row);
                    let row = SampleRow::default().temperature(temperature).top_k(top_k);
                    row.top_p(top_p).min_p(min_p).seed(seed).words()
                })
                .collect();
            for device in devices().iter().chain([&Device::reference()]) {
                let logits = input(device, dtype, &values, &[rows, vocab]).unwrap();
                let got = draw_rows(device, &logits, &words, &counters).unwrap_or_else(|e| panic!("{device}: {e}"));
                for (row, &got) in got.iter().enumerate() {
                    let (how, seed) = how(row);
                    let alone = logits.rows(row..row + 1).unwrap();
                    let want = draw(device, &alone, how, seed, &counters[row..=row]).unwrap();
                    assert_eq!([got], want[..], "{device}: row {row} of {vocab} {dtype}");
                }
            }
        }
    }
}

/// With any bits as parameters, a row draws a token, or none if all logits are NaN.
#[test]
fn words_of_any_bits_draw_tokens() {
    let (rows, vocab) = (64, 300);
    let mut rng = Rng::new(8);
    let values = logits(&mut rng, rows, vocab);
    let special =
        [0, 1, u32::MAX, f32::NAN.to_bits(), f32::INFINITY.to_bits(), (-1f32).to_bits(), 1 << 31, 2f32.to_bits()];
    let words: Vec<u32> = (0..rows * SampleRow::WORDS).map(|_| special[rng.below(special.len())]).collect();
    let counters: Vec<u32> = (0..rows as u32).collect();
    for device in devices().iter().chain([&Device::reference()]) {
        let logits = input(device, DType::F32, &values, &[rows, vocab]).unwrap();
        let drawn = draw_rows(device, &logits, &words, &counters).unwrap_or_else(|e| panic!("{device}: {e}"));
        for (row, id) in drawn.into_iter().enumerate() {
            assert_eq!(id == u32::MAX, row % 6 == 3, "{device}: row {row} drew {id}");
            assert!(id == u32::MAX || (id as usize) < vocab, "{device}: row {row} drew {id}");
        }
    }
}

/// A vocabulary as large as those of models. In all draws, one may choose between two candidates that are equal up to
/// rounding.
#[test]
fn samples_of_a_large_vocabulary() {
    let cases = DRAWS[1..].iter().enumerate().map(|(i, how)| (how, FLOATS[i % 3], 20_001, 5));
    let cases: Vec<_> = cases.chain([(&DRAWS[5], DType::BF16, 262_144, 2)]).collect();
    let drawn = |device: &Device| -> Vec<u32> {
        let tokens = cases.iter().flat_map(|&(how, dtype, vocab, rows)| {
            let values = Rng::new(vocab as u64).normals(rows * vocab);
            let spread: Vec<f32> = values.iter().map(|x| x * 3.0).collect();
            let counters: Vec<u32> = (0..rows as u32).map(|r| r * 1000).collect();
            let logits = input(device, dtype, &spread, &[rows, vocab]).unwrap();
            draw(device, &logits, how, 7, &counters).unwrap_or_else(|e| panic!("{device}: {e}"))
        });
        tokens.collect()
    };
    let want = drawn(&Device::reference());
    for device in devices() {
        let changed = drawn(device).iter().zip(&want).filter(|(a, b)| a != b).count();
        assert!(changed <= 1, "{device}: {changed} of {} tokens differ", want.len());
    }
}

/// A vocabulary for which 44-bit probabilities would overflow a 64-bit sum. All logits are equal, so the random bits
/// decide.
#[test]
fn samples_of_a_million_equals() {
    let vocab = 1 << 20;
    let drawn = |device: &Device| {
        let logits = input(device, DType::BF16, &vec![0.0; vocab], &[1, vocab]).unwrap();
        draw(device, &logits, &DRAWS[1], 42, &[3]).unwrap_or_else(|e| panic!("{device}: {e}"))
    };
    let want = (0..vocab as u32).min_by_key(|&id| Sample::noise(42, 3, id)).unwrap();
    for device in devices().iter().chain([&Device::reference()]) {
        assert_eq!(drawn(device), [want], "{device}");
    }
}

/// Logits that differ by rounding draw another token only if two candidates are as close. A draw that scans the
/// candidates in order would differ in most rows, because many candidates are nearly equal.
#[test]
fn draws_survive_rounding() {
    let (rows, vocab) = (97, 6000);
    let mut rng = Rng::of("rounding");
    let logits: Vec<f32> = rng.normals(rows * vocab);
    let near: Vec<f32> = logits.iter().zip(rng.normals(rows * vocab)).map(|(x, off)| x + off * 1e-3).collect();
    let counters: Vec<u32> = (0..rows as u32).collect();
    for device in devices() {
        for how in &DRAWS[1..6] {
            let drawn = |logits: &[f32]| {
                let logits = input(device, DType::F32, logits, &[rows, vocab]).unwrap();
                draw(device, &logits, how, 5, &counters).unwrap_or_else(|e| panic!("{device}: {e}"))
            };
            let changed = drawn(&logits).iter().zip(drawn(&near)).filter(|(a, b)| **a != *b).count();
            assert!(changed <= 2, "{device}: {changed} of {rows} tokens differ at temperature {}", how.temperature);
        }
    }
}

/// A share that is reached exactly suffices. Among equal candidates, the one with the smaller random bits is drawn.
#[test]
fn samples_on_the_border() {
    let all = Draw { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 };
    let half = Draw { top_p: 0.5, ..all };
    let tiny = Draw { top_p: 1e-30, ..all };
    for device in devices() {
        let logits = input(device, DType::F32, &[-9.0, 1.5, 1.5, f32::NEG_INFINITY], &[1, 4]).unwrap();
        for counter in 0..6 {
            let [one, two] = [1, 2].map(|id| Sample::noise(42, counter, id));
            let smaller = if one < two { 1 } else { 2 };
            for (how, want) in [(&all, smaller), (&half, 1), (&tiny, 1)] {
                // Of two equal candidates, each has half.
                let how = Draw { top_k: 2, ..*how };
                let got = draw(device, &logits, &how, 42, &[counter]).unwrap();
                assert_eq!(got, [want], "{device}: top_p {}, counter {counter}", how.top_p);
            }
        }
    }
}

#[test]
fn samples_of_odd_rows() {
    for how in &DRAWS[..6] {
        for vocab in [1, 7, 300] {
            conform(format!("sample of odd rows of {vocab} at temperature {}", how.temperature), |device| {
                let logits = input(device, DType::F32, &logits(&mut Rng::new(5), 12, vocab), &[12, vocab])?;
                let drawn = draw(device, &logits, how, 1, &[7; 12])?;
                Ok(vec![Output::Same("out".into(), bytemuck::cast_slice(&drawn).to_vec())])
            });
        }
    }
}

/// Frequencies follow the distribution.
#[test]
fn samples_follow_the_distribution() {
    let p = [0.5f64, 0.25, 0.125, 0.0625, 0.0625];
    let rows = 4096;
    let row: Vec<f32> = p.iter().map(|p| p.ln() as f32).collect();
    let counters: Vec<u32> = (0..rows as u32).collect();
    for device in devices() {
        let logits = input(device, DType::F32, &row.repeat(rows), &[rows, 5]).unwrap();
        let how = Draw { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 };
        let drawn = draw(device, &logits, &how, 99, &counters).unwrap();
        for (id, p) in p.iter().enumerate() {
            let share = drawn.iter().filter(|&&t| t as usize == id).count() as f64 / rows as f64;
            let deviation = (p * (1.0 - p) / rows as f64).sqrt();
            assert!((share - p).abs() < 4.0 * deviation, "{device}: token {id}: {share}, not {p}");
        }
    }
}
