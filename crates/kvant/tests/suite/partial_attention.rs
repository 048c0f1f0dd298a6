//! Attention over keys that are divided among several layers, as among the ranks of a group: slices of consecutive
//! positions go to the layers in turn. A layer's keys are in the order of their positions, so that a token sees a
//! leading part of each layer.

use crate::common::{
    Bound, Out, Output, Rng, conform, input,
    layers::{self, Source, copy_to, linear_spec, write_at},
    run,
};
use kvant::{
    Codec, DType, Device, DeviceKind, Error, KvLayer, Result, Step, Tensor,
    ops::{self, Attend},
    reference,
};

/// Positions of a slice.
const SLICE: usize = 16;
const KV_HEADS: usize = 2;
const HEADS: usize = 4;
const DIM: usize = 64;

/// The last `new` tokens of a sequence of `len` tokens, whose keys are divided among `parts` layers.
#[derive(Clone, Copy, Debug)]
struct Case {
    parts: usize,
    len: usize,
    new: usize,
    codec: Codec,
    q: DType,
}

/// Results `[T, H, D]`, and their ends `[T, H]`.
struct Results {
    out: Vec<f32>,
    ends: Vec<f32>,
}

impl Case {
    /// The number of keys of a layer among the first `count` positions.
    fn held(&self, part: usize, count: usize) -> usize {
        let round = self.parts * SLICE;
        count / round * SLICE + (count % round).saturating_sub(part * SLICE).min(SLICE)
    }

    fn source(&self) -> Source {
        Source::random(&mut Rng::of(format!("{self:?}")), self.len, KV_HEADS, DIM)
    }

    fn queries(&self, device: &Device) -> Result<Tensor> {
        input(device, self.q, &Rng::new(7).normals(self.new * HEADS * DIM), &[self.new, HEADS, DIM])
    }

    /// A layer of some tokens, encoded by the reference.
    fn layer(&self, device: &Device, source: &Source) -> Result<KvLayer> {
        let spec = linear_spec(KV_HEADS, source.tokens().max(1), DIM, self.codec);
        let layer = KvLayer::new(&Device::reference(), spec)?;
        if source.tokens() > 0 {
            write_at(&layer, source, 0)?;
        }
        copy_to(&layer, device)
    }

    fn part(&self, device: &Device, part: usize) -> Result<(KvLayer, Step)> {
        let positions: Vec<usize> = (0..self.len).filter(|position| position / SLICE % self.parts == part).collect();
        let layer = self.layer(device, &self.source().gather(&positions))?;
        let token = |position: usize| match self.held(part, position + 1) {
            0 => (Step::INACTIVE, 0),
            seen => (0, seen as u32 - 1),
        };
        let tokens: Vec<(u32, u32)> = (self.len - self.new..self.len).map(token).collect();
        Ok((layer, layers::step(device, 1, &tokens)?))
    }

    fn whole(&self) -> Result<Results> {
        let device = Device::reference();
        let step = layers::range_step(&device, 1, self.len - self.new..self.len)?;
        self.attend(&self.layer(&device, &self.source())?, &step)
    }

    fn attend(&self, layer: &KvLayer, step: &Step) -> Result<Results> {
        let device = layer.device();
        let q = self.queries(device)?;
        let out = Out::new(device, DType::F32, &[self.new, HEADS, DIM])?;
        let ends = Out::new(device, DType::F32, &[self.new, HEADS])?;
        let args = Attend::new(&q, layer, step, &out.tensor).ends(Some(&ends.tensor));
        run(device, |enc| ops::attend(enc, &args))?;
        // Checks the memory around both, too.
        out.bytes()?;
        ends.bytes()?;
        Ok(Results { out: out.tensor.to_f32()?, ends: ends.tensor.to_f32()? })
    }

    /// The results of all parts, merged by the reference.
    fn merged(&self, device: &Device) -> Result<Vec<f32>> {
        let part = |part| self.part(device, part).and_then(|(layer, step)| self.attend(&layer, &step));
        let parts: Vec<Results> = (0..self.parts).map(part).collect::<Result<_>>()?;
        let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let mut merged = Vec::new();
        for row in 0..self.new * HEADS {
            let outs: Vec<_> = parts.iter().map(|part| wide(&part.out[row * DIM..(row + 1) * DIM])).collect();
            let results: Vec<_> =
                outs.iter().zip(&parts).map(|(out, part)| (&out[..], part.ends[row].into())).collect();
            merged.extend(reference::merge_attention(&results, None)?.iter().map(|&x| x as f32));
        }
        Ok(merged)
    }

    fn check(self) {
        // The reference's own parts agree with its whole, too.
        let (merged, whole) = (self.merged(&Device::reference()).unwrap(), self.whole().unwrap().out);
        assert!(merged.iter().zip(&whole).all(|(a, b)| (a - b).abs() <= 1e-5), "{self:?}");
        conform(format!("{self:?}"), |device| {
            let is_reference = device.kind() == DeviceKind::Reference;
            let out = if is_reference { self.whole()?.out } else { self.merged(device)? };
            let mut bound = Bound::of(self.q).over(device, self.codec, 1.0);
            if self.q != DType::F32 {
                bound = bound.of_prompt(device, self.q, [self.codec; 2], 1.0);
            }
            Ok(vec![Output::Close("out".into(), out, bound)])
        });
    }

    /// The results and ends of each part.
    fn check_parts(self) {
        for part in 0..self.parts {
            conform(format!("{self:?}, part {part}"), |device| {
                let (layer, step) = self.part(device, part)?;
                let Results { out, ends } = self.attend(&layer, &step)?;
                let mut bound = Bound::of(self.q).over(device, self.codec, 1.0);
                if self.q != DType::F32 {
                    bound = bound.of_prompt(device, self.q, [self.codec; 2], 1.0);
                }
                Ok(vec![Output::Close("out".into(), out, bound), Output::Close("ends".into(), ends, bound)])
            });
        }
    }
}

fn cases(parts: &[usize], lens: &[usize], new: usize) -> Vec<Case> {
    let codecs = [Codec::F32, Codec::BF16, Codec::tq(4)];
    let mut cases = Vec::new();
    for &parts in parts {
        for &len in lens {
            for codec in codecs {
                let q = if codec == Codec::F32 { DType::F32 } else { DType::BF16 };
                cases.push(Case { parts, len, new, codec, q });
            }
        }
    }
    cases
}

#[test]
fn parts_of_one_token_merge_to_the_whole() {
    // Below 17 positions, only the first part has keys.
    cases(&[2, 4], &[1, 17, 64, 200], 1).into_iter().for_each(Case::check);
}

#[test]
fn parts_of_a_prompt_merge_to_the_whole() {
    cases(&[3], &[20, 70], 20).into_iter().for_each(Case::check);
}

/// A part without keys is (0, −∞).
#[test]
fn parts_have_ends() {
    cases(&[3], &[1, 40, 200], 1).into_iter().chain(cases(&[2], &[20], 20)).for_each(Case::check_parts);
}

#[test]
fn tensors_of_partial_results_are_checked() {
    let device = Device::cpu();
    let case = Case { parts: 2, len: 20, new: 1, codec: Codec::F32, q: DType::F32 };
    let (layer, step) = case.part(&device, 0).unwrap();
    let q = case.queries(&device).unwrap();
    let zeros = |dtype, shape: &[usize]| Tensor::zeros(&device, dtype, shape).unwrap();
    let (out, ends) = (zeros(DType::F32, &[1, HEADS, DIM]), zeros(DType::F32, &[1, HEADS]));
    let (half, long) = (zeros(DType::F16, &[1, HEADS, DIM]), zeros(DType::F32, &[1, HEADS + 1]));
    let sinks = zeros(DType::F32, &[HEADS]);
    let refused = |args: Attend| run(&device, |enc| ops::attend(enc, &args)).unwrap_err();
    let attend = |out| Attend::new(&q, &layer, &step, out);
    let short = refused(attend(&out).ends(Some(&long)));
    assert!(matches!(short, Error::Shape { arg: "ends", .. }), "{short}");
    let rounded = refused(attend(&half).ends(Some(&ends)));
    assert!(matches!(rounded, Error::DType { arg: "out", .. }), "{rounded}");
    let with_sinks = refused(attend(&out).ends(Some(&ends)).sinks(Some(&sinks)));
    assert!(matches!(with_sinks, Error::Value { arg: "ends", .. }), "{with_sinks}");
}
