//! Keys with a bias: sealed pages are encoded without it, and attention adds its product with the query.

use super::{PAGE, append, reference_and_devices, sealed_positions};
use crate::{
    common::{
        Rng, input,
        layers::{self, CENTRED_CODECS, Source},
        nmse, run,
    },
    pages::case::{CASE, Case},
};
use kvant::{
    CacheLayer, Codec, DType, Device, Error, KeyBias, KeyTurns, KvPool, PoolSpec, Tensor,
    ops::{self, KvSide, NormRope, PairLayout, Rope},
};

const HALVES: Option<(PairLayout, usize)> = Some((PairLayout::Halves, 32));

/// Every width of keys and every layout of pairs, decode and prompts, in every dtype.
#[test]
fn every_codec_and_layout() {
    let layouts = [PairLayout::Halves, PairLayout::LeadingHalves, PairLayout::Interleaved];
    for (i, codec) in CENTRED_CODECS.into_iter().chain([Codec::tq(8)]).enumerate() {
        for (j, layout) in layouts.into_iter().enumerate() {
            let head_dim = [64, 128, 256][(i + j) % 3];
            let pairs = [head_dim / 2, head_dim / 4, 3][(i + 2 * j) % 3];
            let page_tokens = [16, 64, 32][(i + j) % 3];
            let group = [2, 7, 1, 8][(i + j) % 4];
            let sequences = if j == 1 { vec![(200, 1), (17, 1), (70, 1)] } else { vec![(150, 40), (33, 2)] };
            let dtype = [DType::F32, DType::BF16, DType::F16][(i + j) % 3];
            let v = if codec.is_centred() { codec } else { Codec::tq_centred(4) };
            let rope = Some((layout, pairs));
            Case { k: codec, v, head_dim, page_tokens, group, sequences, dtype, rope, ..CASE }.check();
        }
    }
}

/// Windows whose first page is not the sequence's first, and dense values.
#[test]
fn windows_and_dense_values() {
    for (window, sequences) in [(70, vec![(150, 1), (40, 1)]), (50, vec![(100, 60)]), (100, vec![(300, 1), (0, 1)])] {
        let (k, v) = (Codec::tq_centred(4), Codec::F16);
        Case { window: Some(window), k, v, rope: HALVES, sequences, ..CASE }.check();
    }
}

/// The longest heads, whose coordinates and rows several SIMD-groups of a GPU share.
#[test]
fn long_heads() {
    for (group, sequences) in [(8, vec![(100, 1)]), (2, vec![(100, 12)])] {
        let (k, v) = (Codec::tq_centred(4), Codec::tq_centred(4));
        let rope = Some((PairLayout::Halves, 256));
        Case { head_dim: 512, kv_heads: 1, group, page_tokens: 32, k, v, rope, sequences, ..CASE }.check();
    }
}

/// A rotary embedding, and a bias `[2, 64]` that is ten times longer than keys.
fn rope_and_bias(device: &Device) -> (Rope<'static>, Tensor) {
    let bias: Vec<f32> = Rng::of("bias").normals(2 * 64).iter().map(|x| 10.0 * x).collect();
    (Rope::new(1e4, 32), input(device, DType::F32, &bias, &[2, 64]).unwrap())
}

fn pool(device: &Device, codec: Codec, bias: Option<KeyBias>) -> kvant::Result<KvPool> {
    let spec = PoolSpec::new(vec![CacheLayer::new(2, 64, codec)], 0).page_tokens(PAGE);
    KvPool::with_key_biases(device, &spec.room_for(1, 10 * PAGE, 10 * PAGE)?, vec![bias])
}

/// Read keys include the bias, and are as accurate as keys without one. If the pool does not know the bias, the codec's
/// error is many times larger.
#[test]
fn stored_keys_are_as_accurate_as_without_a_bias() {
    let tokens = 8 * PAGE;
    for device in reference_and_devices() {
        let (rope, bias) = rope_and_bias(&device);
        let mut rng = Rng::of("keys");
        let plain = Source::random(&mut rng, tokens, 2, 64);
        let mut biased = Source { k: plain.k.clone(), v: plain.v.clone(), ..plain };
        let values = bias.to_f32().unwrap();
        biased.k.iter_mut().enumerate().for_each(|(i, k)| *k += values[i % values.len()]);
        // Keys are rotated after the bias is added.
        let positions: Vec<u32> = (0..tokens as u32).collect();
        let positions = Tensor::from_slice(&device, &positions, &[tokens]).unwrap();
        let turned = |k: &[f32]| {
            let x = input(&device, DType::F32, k, &[tokens, 2, 64]).unwrap();
            run(&device, |enc| ops::norm_rope(enc, &NormRope::new(&x, &positions, &x).rope(Some(rope))).map(|_| ()))
                .unwrap();
            x.to_f32().unwrap()
        };
        let (want, keys) = (turned(&plain.k), turned(&biased.k));
        biased.k = keys;
        // The error, relative to keys without the bias.
        let error = |bias: Option<KeyBias>| {
            let pool = pool(&device, Codec::tq_centred(4), bias).unwrap();
            let mut sequence = pool.sequence();
            append(&pool, &mut sequence, &biased.part(0..tokens - 1));
            append(&pool, &mut sequence, &biased.part(tokens - 1..tokens));
            let step = pool.step(&mut [(&mut sequence, 0)]).unwrap();
            let at = sealed_positions(tokens);
            let got = layers::read_paged(pool.layer(0).unwrap(), KvSide::K, &step, 0, at.clone()).unwrap();
            let of = at.start * 128..at.end * 128;
            let distance = nmse(&got, &biased.k[of.clone()]);
            let energy = |x: &[f32]| x.iter().map(|x| f64::from(x * x)).sum::<f64>();
            distance * energy(&biased.k[of.clone()]) / energy(&want[of])
        };
        let turns = KeyTurns::new(&device, rope, 64, PAGE, tokens).unwrap();
        let (with, without) = (error(Some(KeyBias::new(&bias, &turns).unwrap())), error(None));
        assert!(with < 0.012, "{device}: {with}");
        assert!(without > 10.0 * with, "{device}: {without} against {with}");
    }
}

#[test]
fn other_shapes_are_refused() {
    let device = Device::reference();
    let (rope, bias) = rope_and_bias(&device);
    let turns = |head_dim, page, positions| KeyTurns::new(&device, rope, head_dim, page, positions);
    let value = |arg: &'static str| move |error: &Error| matches!(error, Error::Value { arg: got, .. } if *got == arg);
    assert!(value("positions")(&turns(64, PAGE, 0).unwrap_err()));
    assert!(value("page_tokens")(&turns(64, 0, 100).unwrap_err()));
    assert!(value("head_dim")(&turns(65, PAGE, 100).unwrap_err()));
    assert!(value("rope.rotated_pairs")(&turns(32, PAGE, 100).unwrap_err()));
    let table = input(&device, DType::F32, &[0.0; 320], &[10, 32]).unwrap();
    let tables = Rope::new(ops::Angles::Tables { cos: &table, sin: &table }, 32);
    assert!(value("rope.angles")(&KeyTurns::new(&device, tables, 64, PAGE, 10).unwrap_err()));

    let whole = turns(64, PAGE, 100).unwrap();
    let short = input(&device, DType::F32, &[0.0; 64], &[2, 32]).unwrap();
    assert!(matches!(KeyBias::new(&short, &whole), Err(Error::Shape { arg: "bias", .. })));
    let cpu = Device::cpu();
    assert!(matches!(KeyBias::new(&rope_and_bias(&cpu).1, &whole), Err(Error::WrongDevice { arg: "bias", .. })));

    let key_bias = |turns: &KeyTurns| KeyBias::new(&bias, turns).unwrap();
    let codec = Codec::tq_centred(4);
    assert!(value("biases")(&pool(&device, codec, Some(key_bias(&turns(64, 2 * PAGE, 100).unwrap()))).err().unwrap()));
    let one_head = input(&device, DType::F32, &[0.0; 64], &[1, 64]).unwrap();
    assert!(value("biases")(&pool(&device, codec, KeyBias::new(&one_head, &whole).ok()).err().unwrap()));
    let spec = PoolSpec::new(vec![CacheLayer::new(2, 64, codec); 2], 1 << 20).page_tokens(PAGE);
    assert!(value("biases")(&KvPool::with_key_biases(&device, &spec, vec![None]).err().unwrap()));

    // The turns cover 100 positions.
    let pool = pool(&device, codec, Some(key_bias(&whole))).unwrap();
    let mut sequence = pool.sequence();
    pool.step(&mut [(&mut sequence, 100)]).unwrap();
    let refused = pool.step(&mut [(&mut sequence, 1)]).err().unwrap();
    assert!(value("batch (length of a sequence)")(&refused), "{refused}");
    assert_eq!(sequence.len(), 100);
}
