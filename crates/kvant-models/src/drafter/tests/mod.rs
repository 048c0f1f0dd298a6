//! Drafters of small random targets against transformers, and against f64 references written from the definitions.

mod assistant;
mod checkpoint;
mod eagle3;
mod gguf_files;

mod malformed;
mod mtp;
mod quantised;
mod reference;
mod taps;

use std::path::{Path, PathBuf};

use kvant::{CacheLayer, CpuOptions, DType, Device, Encoder, KvPool, PoolSpec, Sequence, Step, Tensor};

use super::{DraftHidden, DraftInput, DraftMemory, DraftOutput, DraftSpace, Drafter};
use crate::{
    CacheCodecs, Files, LoadOptions, Model,
    forward::{Features, Wanted},
    safetensors::Checkpoint,
};

/// The positions of a page in these tests.
const PAGE_TOKENS: usize = 16;
const MAX_ROWS: usize = 64;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn files(dir: &Path) -> Files {
    Files::at(dir).unwrap()
}

/// A tensor of a golden target, as f32.
fn tensor_of(dir: &Path, name: &str) -> Vec<f32> {
    Checkpoint::open(dir).unwrap().read(name, &Device::cpu()).unwrap().to_f32().unwrap()
}

fn max_difference(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).fold(0.0, |max, (got, want)| match (got - want).abs() {
        _ if got == want => max,
        // NaN must not be lost in a maximum.
        difference if difference <= max => max,
        difference => difference,
    })
}

/// A target with its drafter, and a pool with layers for both.
struct Pair {
    target: Model,
    drafter: Drafter,
    pool: KvPool,
    space: DraftSpace,
    /// The hidden states of the target's last pass.
    features: Tensor,
}

impl Pair {
    fn new(target: Model, drafter: Drafter, codecs: &CacheCodecs) -> Pair {
        let mut layers: Vec<CacheLayer> = target.cache_layers(codecs).unwrap();
        layers.extend(drafter.cache_layer());
        // Each rank has at least 16 positions of a page.
        let page_tokens = PAGE_TOKENS * layers.iter().map(|layer| layer.position_ranks).max().unwrap_or(1);
        let spec = PoolSpec::new(layers, 0).page_tokens(page_tokens).states(target.state_layers());
        let pool = KvPool::new(target.device(), &spec.room_for_steps(3, 256, MAX_ROWS).unwrap()).unwrap();
        let space = DraftSpace::new(&drafter, MAX_ROWS, 4).unwrap();
        let shape = [drafter.taps().count() * MAX_ROWS, target.decoder().hidden_size];
        let features = Tensor::zeros(target.device(), target.activations(), &shape).unwrap();
        Pair { target, drafter, pool, space, features }
    }

    /// Runs the target over new tokens, whose hidden states go to [`Pair::features`], with logits of the row `wanted`.
    fn feed(&self, sequence: &mut Sequence, tokens: &[u32], wanted: usize) -> Step {
        let step = self.pool.step(&mut [(sequence, tokens.len())]).unwrap();
        let (mut space, mut last) = (self.target.workspace(tokens.len()).unwrap(), self.target.workspace(1).unwrap());
        space.fit(self.target.rank_decoder(), tokens.len()).unwrap();
        space.views.ids.write(tokens).unwrap();
        last.fit(self.target.rank_decoder(), 1).unwrap();
        last.views.ids.write(&[wanted as u32]).unwrap();
        let of_row = step.select(&[wanted]).unwrap();
        let wanted = Wanted::Some { rows: &last.views.ids, views: &last.views, step: &of_row, logits: None };
        let features = Features { taps: self.drafter.taps(), out: &self.features };
        commit(self.target.device(), |enc| {
            self.target.network().encode(enc, &space.views, &self.pool, &step, &wanted, Some(&features))
        });
        step
    }

    /// Runs the drafter over a step. `next` are the tokens after its positions; `rows` are the rows of features, or the
    /// hidden states of the previous pass are fed. Returns logits and hidden states of the row `wanted`.
    fn draft(&mut self, step: &Step, next: &[u32], hidden: Hidden, wanted: usize) -> (Vec<f32>, Tensor) {
        let (device, taps) = (self.target.device().clone(), self.drafter.taps());
        self.space.fit(&self.drafter, next.len(), 1).unwrap();
        let ids = Tensor::from_slice(&device, next, &[next.len()]).unwrap();
        let logits = Tensor::zeros(&device, DType::F32, &[1, self.target.vocab_size()]).unwrap();
        let out_hidden = Tensor::zeros(&device, self.target.activations(), &[1, self.drafter.hidden_width()]).unwrap();
        let of_features = match hidden {
            Hidden::Features(rows) => Features::rows(taps, MAX_ROWS, rows),
            Hidden::Fed(_) => Vec::new(),
        };
        let of_features = Tensor::from_slice(&device, &of_features, &[of_features.len()]).unwrap();
        let hidden = match hidden {
            Hidden::Features(_) => DraftHidden::Features { table: &self.features, rows: &of_features },
            Hidden::Fed(hidden) => DraftHidden::Fed(hidden),
        };
        let rows = Tensor::from_slice(&device, &[wanted as u32], &[1]).unwrap();
        let rows = (next.len() > 1).then_some(&rows);
        let out = DraftOutput { rows, hidden: &out_hidden, logits: &logits };
        let input = DraftInput { ids: &ids, hidden };
        commit(&device, |enc| self.drafter.encode(enc, &self.space, &self.pool, step, input, Some(out)));
        (logits.to_vec().unwrap(), out_hidden)
    }

    /// Runs the drafter over a step only for its keys and values.
    fn catch_up(&mut self, step: &Step, next: &[u32], rows: &[usize]) {
        let device = self.target.device().clone();
        self.space.fit(&self.drafter, next.len(), 1).unwrap();
        let ids = Tensor::from_slice(&device, next, &[next.len()]).unwrap();
        let rows = Features::rows(self.drafter.taps(), MAX_ROWS, rows);
        let rows = Tensor::from_slice(&device, &rows, &[rows.len()]).unwrap();
        let hidden = DraftHidden::Features { table: &self.features, rows: &rows };
        let input = DraftInput { ids: &ids, hidden };
        commit(&device, |enc| self.drafter.encode(enc, &self.space, &self.pool, step, input, None));
    }

    /// The target's hidden states of a row, the taps one after the other.
    fn features_of(&self, row: usize) -> Vec<f32> {
        let width = self.target.decoder().hidden_size;
        let all = self.features.to_f32().unwrap();
        let of_tap = |tap: usize| all[(tap * MAX_ROWS + row) * width..][..width].to_vec();
        (0..self.drafter.taps().count()).flat_map(of_tap).collect()
    }
}

enum Hidden<'a> {
    Features(&'a [usize]),
    Fed(&'a Tensor),
}

/// The CPU, the reference, and a group of two CPUs, among which drafters are divided.
fn devices() -> [Device; 3] {
    let rank = || Device::cpu_with(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap();
    [Device::cpu(), Device::reference(), Device::group(&[rank(), rank()]).unwrap()]
}

fn commit(device: &Device, record: impl FnOnce(&mut Encoder) -> crate::Result<()>) {
    let mut enc = device.encoder().unwrap();
    record(&mut enc).unwrap();
    enc.commit().unwrap().wait().unwrap();
}

/// Loads a drafter, and compares its memory with what its headers say.
fn load_drafter(files: &Files, target: &Model) -> Drafter {
    let drafter = Drafter::load(files, target, None).unwrap();
    let (memory, ranks) = (DraftMemory::read(files).unwrap(), target.device().ranks());
    let load = LoadOptions {
        activations: target.activations(),
        cache_division: target.cache_division(),
        ..LoadOptions::default()
    };
    assert_eq!(memory.cache_layer(ranks, &load), drafter.cache_layer());
    let (bytes, estimate) = (drafter.weight_bytes(), memory.weight_bytes(&load));
    // The headers also count norms. The ranks of a group divide some matrices.
    assert!(estimate + 4096 > bytes, "{estimate} bytes instead of {bytes}");
    assert!(ranks > 1 || estimate < bytes + bytes / 10 + 4096, "{estimate} bytes instead of {bytes}");
    drafter
}

fn load(dir: &Path, device: &Device) -> Model {
    Model::load_with(dir, device, &LoadOptions { pass_tokens: MAX_ROWS, ..LoadOptions::default() }).unwrap()
}

/// Runs a target and its drafter with keys of its own, and compares each row of the drafter's with a reference, which
/// gets the row's features (or the hidden state that the reference left) and the next token, and returns logits and the
/// hidden state: first over the prompt in two passes, then three drafts.
fn check_chain(pair: &mut Pair, tokens: &[u32], mut reference: impl FnMut(&[f32], bool, u32) -> [Vec<f32>; 2]) {
    let mut sequence = pair.pool.sequence();
    let (next, mut done, mut hidden) = (&tokens[1..], 0, None);
    for (count, has_drafts) in [(11, false), (next.len() - 11, true)] {
        let step = pair.feed(&mut sequence, &tokens[done..done + count], count - 1);
        let rows: Vec<usize> = (0..count).collect();
        let last: Vec<[Vec<f32>; 2]> =
            rows.iter().map(|&row| reference(&pair.features_of(row), true, next[done + row])).collect();
        let of_step = &next[done..done + count];
        if has_drafts {
            let (logits, left) = pair.draft(&step, of_step, Hidden::Features(&rows), count - 1);
            compare("the last token of the prompt", &logits, &left, &last[count - 1]);
            hidden = Some((left, last[count - 1][1].clone()));
        } else {
            pair.catch_up(&step, of_step, &rows);
        }
        done += count;
    }
    let Some((mut left, mut of_reference)) = hidden else { panic!("the last pass drafts") };
    for token in [7, 3, 90] {
        let step = pair.pool.step(&mut [(&mut sequence, 1)]).unwrap();
        let (logits, next) = pair.draft(&step, &[token], Hidden::Fed(&left), 0);
        let want = reference(&of_reference, false, token);
        compare("a draft", &logits, &next, &want);
        (left, of_reference) = (next, want[1].clone());
    }
}

fn compare(what: &str, logits: &[f32], hidden: &Tensor, [want_logits, want_hidden]: &[Vec<f32>; 2]) {
    let logits = max_difference(logits, want_logits);
    let hidden = max_difference(&hidden.to_f32().unwrap(), want_hidden);
    println!("{what}: logits differ by {logits:.1e}, hidden states by {hidden:.1e}");
    assert!(logits < 2e-4 && hidden < 2e-4, "{what}: logits off by {logits}, hidden states by {hidden}");
    let spread = want_logits.iter().filter(|logit| logit.is_finite()).fold(0f32, |max, logit| max.max(logit.abs()));
    assert!(spread > 0.3, "{what}: logits are too small to show differences: {spread}");
}
