//! Pages with means that several sequences share, that are rolled back, or that follow vectors that are not finite.

use super::{PAGE, append, around, distance, means, pool, reference_and_devices};
use crate::{
    common::{
        Rng, bytes_of, devices, input,
        layers::{self, CENTRED_CODECS, Source},
        nmse, run,
    },
    pages::tokens::{DIM, WINDOW, feed, prompt_token},
};
use kvant::{
    CacheLayer, Codec, DType, Device, DeviceKind, KvPool, PoolSpec, PrefixCache, Sequence,
    ops::{self, Attend, KvSide},
};

/// What a sequence stores of the positions that a layer holds.
fn stored(pool: &KvPool, sequence: &mut Sequence) -> Vec<f32> {
    let step = pool.step(&mut [(sequence, 0)]).unwrap();
    let layers = 0..pool.spec().layers.len();
    let read = |index: usize| {
        let (layer, held) = (pool.layer(index).unwrap(), sequence.held(index).unwrap());
        let side = |side| layers::read_paged(layer, side, &step, 0, held.clone()).unwrap();
        [side(KvSide::K), side(KvSide::V)].concat()
    };
    layers.flat_map(read).collect()
}

/// A prompt whose beginning is found gives the same bits as one that is computed whole in the same pieces: at every
/// length modulo the page, over full and sliding layers. And it stores what a prompt at once stores.
#[test]
fn a_found_prefix_gives_the_same_bits() {
    for device in devices() {
        let lengths = if device.kind() == DeviceKind::Metal { vec![17, 40, 63] } else { (33..=64).collect() };
        for len in lengths {
            let codec = |at: usize| CENTRED_CODECS[(len + at) % CENTRED_CODECS.len()];
            let full = CacheLayer::new(1, DIM, codec(0)).v(codec(2));
            let sliding = full.window(Some(WINDOW));
            let spec = PoolSpec::new(vec![sliding, full], 0).page_tokens(PAGE);
            let pool = KvPool::new(device, &spec.room_for(3, len + 1, len).unwrap()).unwrap();
            let cache = PrefixCache::new(&pool, b"bits");
            let tokens: Vec<u32> = (0..=len).map(|at| prompt_token(0, at)).collect();
            let whole = (len - 1) / PAGE * PAGE;
            // The rest of the prompt, then a token.
            let finish = |sequence: &mut Sequence| -> [Vec<Vec<u8>>; 2] {
                [len, len + 1].map(|end| feed(&pool, sequence, &tokens[..end]))
            };
            let mut miss = pool.sequence();
            feed(&pool, &mut miss, &tokens[..whole]);
            cache.keep(&miss, &tokens[..whole]).unwrap();
            let want = finish(&mut miss);
            let want_stored = stored(&pool, &mut miss);
            drop(miss);
            let mut hit = cache.find(&tokens[..len - 1]).unwrap();
            assert_eq!(hit.len(), whole, "{device}: {len} tokens");
            assert!(finish(&mut hit) == want, "{device}: {}, {len} tokens", codec(0));
            assert!(stored(&pool, &mut hit) == want_stored, "{device}: {}, {len} tokens", codec(0));
            drop(hit);
            let mut at_once = pool.sequence();
            feed(&pool, &mut at_once, &tokens[..len]);
            feed(&pool, &mut at_once, &tokens);
            // Its windows have passed fewer positions: the last page is in all of them.
            let (got, end) = (stored(&pool, &mut at_once), DIM * (len + 1 - whole));
            let (got, want) = (&got[got.len() - end..], &want_stored[want_stored.len() - end..]);
            // Other kernels may store rows of prompts and of single tokens.
            let same = if device.kind() == DeviceKind::Cpu { got == want } else { nmse(got, want) < 1e-4 };
            assert!(same, "{device}: {}, {len} tokens", codec(2));
        }
    }
}

/// A fork and a roll-back within a page: the page's first vectors stay, new ones are stored around its mean, and
/// attention sees both.
#[test]
fn forks_and_roll_backs_keep_what_a_page_stores() {
    for codec in CENTRED_CODECS {
        let attended = |device: &Device| {
            let pool = pool(device, 2, DIM, codec);
            let layer = pool.layer(0).unwrap();
            let data = around(&mut Rng::of(format!("shared {codec}")), 4 * PAGE, 2, DIM, 3.0);
            let mut a = pool.sequence();
            let before = means(&pool, &append(&pool, &mut a, &data.part(0..PAGE + 9)));
            let mut b = a.fork();
            let kept = |sequence: &mut Sequence, end: usize| {
                let step = pool.step(&mut [(sequence, 0)]).unwrap();
                [KvSide::K, KvSide::V].map(|side| layers::read_paged(layer, side, &step, 0, 0..end).unwrap())
            };
            let first = kept(&mut a, PAGE + 4);
            a.truncate(PAGE + 4).unwrap();
            let after = append(&pool, &mut a, &data.part(2 * PAGE..2 * PAGE + 3));
            assert_eq!(means(&pool, &after), before, "{device}: {codec}");
            let after = append(&pool, &mut b, &data.part(3 * PAGE..3 * PAGE + 5));
            assert_eq!(means(&pool, &after), before, "{device}: {codec}");
            assert!(kept(&mut a, PAGE + 4) == first && kept(&mut b, PAGE + 4) == first, "{device}: {codec}");
            let step = pool.step(&mut [(&mut a, 1), (&mut b, 1)]).unwrap();
            layers::write(layer, &data.part(50..52), DType::F32, &step).unwrap();
            let q = input(device, DType::F32, &Rng::of("q").normals(2 * 4 * DIM), &[2, 4, DIM]).unwrap();
            let out = kvant::Tensor::zeros(device, DType::F32, &[2, 4, DIM]).unwrap();
            run(device, |enc| ops::attend(enc, &Attend::new(&q, layer, &step, &out))).unwrap();
            assert!(!bytes_of(&out).unwrap().is_empty());
            out.to_f32().unwrap()
        };
        let want = attended(&Device::reference());
        for device in devices() {
            let got = attended(device);
            assert!(nmse(&got, &want) < 1e-3, "{device}: {codec}: {}", nmse(&got, &want));
        }
    }
}

/// A page that decode opens gets the mean of the finite vectors of the page before, whatever else that stores: NaN, and
/// vectors whose norms or lengths overflow.
#[test]
fn a_mean_leaves_out_what_is_not_finite() {
    let dim = 64;
    for device in reference_and_devices() {
        let data = around(&mut Rng::of("left out"), PAGE + 1, 1, dim, 3.0);
        let opened = |source: &Source| {
            let pool = pool(&device, 1, dim, Codec::tq_centred(8));
            let mut sequence = pool.sequence();
            // One by one after the first half, so that none of the others is in the first mean.
            append(&pool, &mut sequence, &source.part(0..PAGE / 2));
            for at in PAGE / 2..PAGE {
                append(&pool, &mut sequence, &source.part(at..at + 1));
            }
            let last = source.part(PAGE..PAGE + 1);
            let step = append(&pool, &mut sequence, &last);
            let got = layers::read_paged(pool.layer(0).unwrap(), KvSide::K, &step, 0, PAGE..PAGE + 1).unwrap();
            assert!(nmse(&got, &last.k) < 1e-3, "{device}");
            means(&pool, &step)
        };
        let mut damaged = data.clone();
        let replaced = [(PAGE - 1, f32::NAN), (PAGE - 2, f32::INFINITY), (PAGE - 3, 1e30), (PAGE - 4, 1e7)];
        for (at, x) in replaced {
            damaged.k[at * dim..(at + 1) * dim].fill(x);
        }
        let got = opened(&damaged);
        let pool = pool(&device, 1, dim, Codec::tq_centred(8));
        let mut finite = pool.sequence();
        let want = means(&pool, &append(&pool, &mut finite, &data.part(0..PAGE - 4)));
        assert!(distance(&got[1], &want[0]) < 0.02, "{device}: {}", distance(&got[1], &want[0]));
    }
}
