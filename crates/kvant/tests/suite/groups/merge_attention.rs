//! merge_attention against the reference.

use super::groups;
use crate::common::{Bound, FLOATS, Rng, assert_close, run, without_gpu::Launches};
use kvant::{
    DType, Device, Encoder, Error, Result, Tensor, gpu,
    ops::{self, MergeAttention},
    reference,
};

const NONE: f32 = f32::NEG_INFINITY;

/// A tensor with numbers of its own on each rank.
fn by_rank(group: &Device, shape: &[usize], values: impl Fn(usize) -> Vec<f32>) -> Result<Tensor> {
    Tensor::from_rank_bytes(group, DType::F32, shape, |rank| {
        Ok::<_, Error>(bytemuck::cast_slice::<f32, u8>(&values(rank)).to_vec())
    })
}

struct Case {
    ranks: usize,
    tokens: usize,
    /// Heads of a rank.
    own: usize,
    dim: usize,
    has_sinks: bool,
}

impl Case {
    fn heads(&self) -> usize {
        self.ranks * self.own
    }

    fn x(&self, rank: usize) -> Vec<f32> {
        Rng::of(format!("x of {rank}")).normals(self.tokens * self.heads() * self.dim)
    }

    /// Ends of all sizes; some are those of no keys.
    fn ends(&self, rank: usize) -> Vec<f32> {
        let ends = Rng::of(format!("ends of {rank}")).normals(self.tokens * self.heads());
        let ends = ends.iter().zip(rank..).map(|(end, index)| if index % 5 == 2 { NONE } else { *end });
        ends.zip(0..).map(|(end, index)| end * [1.0, 10.0, 100.0][index % 3]).collect()
    }

    fn sinks(&self, rank: usize) -> Vec<f32> {
        Rng::of(format!("sinks of {rank}")).normals(self.own)
    }

    fn wanted(&self, rank: usize) -> Vec<f32> {
        let wide = |values: Vec<f32>| values.into_iter().map(f64::from).collect::<Vec<f64>>();
        let x: Vec<_> = (0..self.ranks).map(|rank| wide(self.x(rank))).collect();
        let ends: Vec<_> = (0..self.ranks).map(|rank| wide(self.ends(rank))).collect();
        let (sinks, mut wanted) = (self.sinks(rank), Vec::new());
        for (token, head) in (0..self.tokens).flat_map(|token| (0..self.own).map(move |head| (token, head))) {
            let row = token * self.heads() + rank * self.own + head;
            let range = row * self.dim..(row + 1) * self.dim;
            let results: Vec<_> = x.iter().zip(&ends).map(|(x, ends)| (&x[range.clone()], ends[row])).collect();
            let sink = self.has_sinks.then(|| sinks[head].into());
            wanted.extend(reference::merge_attention(&results, sink).unwrap().iter().map(|&x| x as f32));
        }
        wanted
    }
}

#[test]
fn merge_attention() {
    for group in groups() {
        let ranks = group.ranks();
        for (index, [tokens, own, dim]) in
            [[1, 1, 64], [3, 4, 80], [2, 3, 65], [5, 8, 512], [0, 1, 64], [40, 2, 256]].into_iter().enumerate()
        {
            let case = Case { ranks, tokens, own, dim, has_sinks: index % 2 == 1 };
            let heads = case.heads();
            let x = by_rank(&group, &[tokens, heads, dim], |rank| case.x(rank)).unwrap();
            let ends = by_rank(&group, &[tokens, heads], |rank| case.ends(rank)).unwrap();
            let sinks = by_rank(&group, &[own], |rank| case.sinks(rank)).unwrap();
            for dtype in FLOATS {
                let out = Tensor::zeros(&group, dtype, &[tokens, own, dim]).unwrap();
                let args = MergeAttention::new(&x, &ends, &out).sinks(case.has_sinks.then_some(&sinks));
                let graph = Encoder::capture(&group, |enc| ops::merge_attention(enc, &args)).unwrap();
                for replays in [false, true] {
                    out.write_bytes(&vec![0xA5; out.bytes()]).unwrap();
                    match replays {
                        false => run(&group, |enc| ops::merge_attention(enc, &args)).unwrap(),
                        true => graph.replay().unwrap().wait().unwrap(),
                    }
                    for rank in 0..ranks {
                        let got = out.on_rank(rank).unwrap().to_f32().unwrap();
                        let what = format!("{group}: [{tokens}, {own}, {dim}] {dtype}, rank {rank}");
                        assert_close(what, &got, &case.wanted(rank), Bound::of(dtype).times(4.0));
                    }
                }
            }
        }
    }
}

/// Results over no keys have no effect, whatever they contain.
#[test]
fn parts_without_keys() {
    for group in groups() {
        let ranks = group.ranks();
        let merge = |holder: Option<usize>, sink: Option<f32>| {
            let number = |rank, held, other| if Some(rank) == holder { held } else { other };
            let x = by_rank(&group, &[1, ranks, 64], |rank| vec![number(rank, 2.0, f32::NAN); ranks * 64]).unwrap();
            let ends = by_rank(&group, &[1, ranks], |rank| vec![number(rank, 0.0, NONE); ranks]).unwrap();
            let sink = sink.map(|sink| Tensor::from_slice(&group, &[sink], &[1]).unwrap());
            let out = Tensor::zeros(&group, DType::F32, &[1, 1, 64]).unwrap();
            let args = MergeAttention::new(&x, &ends, &out).sinks(sink.as_ref());
            run(&group, |enc| ops::merge_attention(enc, &args)).unwrap();
            (0..ranks).flat_map(|rank| out.on_rank(rank).unwrap().to_vec::<f32>().unwrap()).collect::<Vec<f32>>()
        };
        for holder in 0..ranks {
            assert!(merge(Some(holder), None).iter().all(|&x| x == 2.0), "{group}: rank {holder} has keys");
            // The key and the sink count equally.
            assert!(merge(Some(holder), Some(0.0)).iter().all(|x| (x - 1.0).abs() < 1e-6), "{group}: a sink");
        }
        assert!(merge(None, None).iter().chain(&merge(None, Some(-7.0))).all(|&x| x == 0.0), "{group}: no keys");
    }
}

/// The merge of results is that of states.
#[test]
fn results_merge_as_states_do() {
    let mut rng = Rng::of("states");
    let wide = |values: Vec<f32>| values.into_iter().map(f64::from).collect::<Vec<f64>>();
    let query = wide(rng.normals(8));
    let query = reference::QueryVector { q: &query, scale: 0.5, softcap: None };
    let vectors: Vec<[Vec<f64>; 2]> = (0..12).map(|_| [wide(rng.normals(8)), wide(rng.normals(8))]).collect();
    let state = |range: std::ops::Range<usize>| {
        reference::attend(query, vectors[range].iter().map(|[k, v]| (&k[..], &v[..]))).unwrap()
    };
    for cut in [0, 1, 7, 12] {
        let parts = [state(0..cut), state(cut..12)];
        let ends = parts.each_ref().map(|state| (state.m + state.l.ln()) * std::f64::consts::LOG2_E);
        let results = parts.each_ref().map(reference::State::finish);
        let got = reference::merge_attention(&[(&results[0], ends[0]), (&results[1], ends[1])], None).unwrap();
        let want = state(0..12).finish();
        assert!(got.iter().zip(&want).all(|(got, want)| (got - want).abs() < 1e-12), "{got:?}, not {want:?}");
    }
    assert!(reference::merge_attention(&[(&[1.0], 0.0), (&[], 0.0)], None).is_err());
}

/// Metal devices form no groups.
#[test]
fn metal_refuses_it() {
    let device = gpu::metal_device(Launches::default());
    let zeros = |shape: &[usize]| Tensor::zeros(&device, DType::F32, shape).unwrap();
    let (x, ends, out) = (zeros(&[1, 1, 64]), zeros(&[1, 1]), zeros(&[1, 1, 64]));
    let result = run(&device, |enc| ops::merge_attention(enc, &MergeAttention::new(&x, &ends, &out)));
    assert!(matches!(result, Err(Error::Unsupported { op: "merge_attention", .. })), "{result:?}");
}

#[test]
fn tensors_are_checked() {
    let device = Device::cpu();
    let zeros = |dtype, shape: &[usize]| Tensor::zeros(&device, dtype, shape).unwrap();
    let (x, ends, out) = (zeros(DType::F32, &[2, 4, 64]), zeros(DType::F32, &[2, 4]), zeros(DType::BF16, &[2, 4, 64]));
    let refused = |args: MergeAttention| run(&device, |enc| ops::merge_attention(enc, &args)).unwrap_err();
    let error = refused(MergeAttention::new(&zeros(DType::F16, &[2, 4, 64]), &ends, &out));
    assert!(matches!(error, Error::DType { arg: "x", .. }), "{error}");
    let error = refused(MergeAttention::new(&x, &zeros(DType::F32, &[2, 5]), &out));
    assert!(matches!(error, Error::Shape { arg: "ends", .. }), "{error}");
    let error = refused(MergeAttention::new(&x, &ends, &zeros(DType::U32, &[2, 4, 64])));
    assert!(matches!(error, Error::DType { arg: "out", .. }), "{error}");
    let error = refused(MergeAttention::new(&x, &ends, &zeros(DType::F32, &[2, 3, 64])));
    assert!(matches!(error, Error::Shape { arg: "x", .. }), "{error}");
    let error = refused(MergeAttention::new(&x, &ends, &out).sinks(Some(&zeros(DType::F32, &[3]))));
    assert!(matches!(error, Error::Shape { arg: "sinks", .. }), "{error}");
}
