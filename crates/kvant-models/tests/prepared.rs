//! Checks that no step needs a kernel that was not compiled in advance. Uses a CUDA device that runs nothing, with the
//! limits of an H200 and of a smaller GPU.

mod common;

use std::{
    any::Any,
    collections::BTreeSet,
    ptr::NonNull,
    sync::{Arc, Mutex},
};

use common::{golden, shipped};
use kvant::{
    Codec, DType, Device, KvPool, Result, Sequence, Tensor,
    gpu::{self, Executor, Launch, LaunchPass, Limits, Memory, Replay, Wait},
};
use kvant_models::{BatchDecoder, DeviceSampler, DeviceTokens, LoadOptions, Model, PoolOptions, Sampling};

const H200: Limits = Limits {
    threads: 1024,
    threadgroup_bytes: 227 << 10,
    busy_groups: 132,
    warpgroup_products: true,
    library_products: true,
    clusters: true,
};
const RTX_4090: Limits = Limits {
    threads: 1024,
    threadgroup_bytes: 99 << 10,
    busy_groups: 128,
    warpgroup_products: false,
    library_products: true,
    clusters: false,
};

/// Records the kernels of launches, with their constants.
#[derive(Clone)]
struct Recorder {
    limits: Limits,
    kernels: Arc<Mutex<BTreeSet<String>>>,
}

impl Recorder {
    fn needs(&self, launch: &Launch) {
        let key = format!("{}/{} {:?}", launch.source.name, launch.kernel, launch.constants);
        self.kernels.lock().unwrap().insert(key);
    }

    /// The kernels of the launches since the last call.
    fn take(&self) -> BTreeSet<String> {
        std::mem::take(&mut self.kernels.lock().unwrap())
    }
}

/// Memory without contents.
struct Nothing;

impl Memory for Nothing {
    fn host(&self) -> Option<NonNull<u8>> {
        None
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Executor for Recorder {
    fn name(&self) -> String {
        "no GPU".to_string()
    }
    fn limits(&self) -> Limits {
        self.limits
    }
    fn allocate(&self, _bytes: usize, _zeroed: bool) -> Result<Box<dyn Memory>> {
        Ok(Box::new(Nothing))
    }
    fn upload(&self, _memory: &dyn Memory, _offset: usize, _bytes: &[u8]) -> Result<()> {
        Ok(())
    }
    fn download(&self, _memory: &dyn Memory, _offset: usize, _out: &mut [u8]) -> Result<()> {
        Ok(())
    }
    fn begin(&self) -> Result<Box<dyn LaunchPass>> {
        Ok(Box::new(self.clone()))
    }
    fn capture(self: Arc<Self>, launches: Vec<Launch>) -> Result<Box<dyn Replay>> {
        launches.iter().for_each(|launch| self.needs(launch));
        Ok(Box::new((*self).clone()))
    }
}

impl LaunchPass for Recorder {
    fn launch(&mut self, launch: Launch) -> Result<()> {
        self.needs(&launch);
        Ok(())
    }
    fn commit(self: Box<Self>) -> Result<Box<dyn Wait>> {
        Ok(self)
    }
}

impl Replay for Recorder {
    fn replay(&self) -> Result<Option<Box<dyn Wait>>> {
        Ok(None)
    }
}

impl Wait for Recorder {
    fn wait(self: Box<Self>) -> Result<()> {
        Ok(())
    }
    fn is_done(&self) -> bool {
        true
    }
}

/// Random numbers: SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % limit.max(1) as u64) as usize
    }

    /// At most `max`. Small and large sizes are equally likely.
    fn size(&mut self, max: usize) -> usize {
        let bits = self.below(max.max(1).ilog2() as usize + 2);
        self.below(1 << bits).min(max)
    }
}

/// A sequence of `tokens` tokens.
fn sequence(pool: &KvPool, tokens: usize) -> Sequence {
    let mut sequence = pool.sequence();
    if tokens > 0 {
        pool.step(&mut [(&mut sequence, tokens)]).unwrap();
    }
    sequence
}

const SEQUENCES: usize = 40;
const STEP_TOKENS: usize = 600;

/// Steps of random batches: numbers of rows, prompt chunks, lengths.
fn steps(model: &Model, pool: &KvPool, decoder: &mut BatchDecoder, longest: usize, count: usize) {
    let sampler = DeviceSampler::new(model.device(), SEQUENCES).unwrap();
    let drawn = Tensor::zeros(model.device(), DType::U32, &[SEQUENCES]).unwrap();
    let (greedy, warm) = (Sampling::default(), Sampling::default().temperature(0.8));
    let mut random = Random(7);
    for _ in 0..count {
        let rows = 1 + random.size(SEQUENCES - 1);
        // The first ones decode; the rest compute prompt chunks.
        let prompts = [0, 0, 1, 1, 2, rows][random.below(6)].min(rows);
        let mut left = STEP_TOKENS - rows;
        let mut sizes: Vec<usize> = (0..rows)
            .map(|row| {
                let more = if row < rows - prompts { 0 } else { random.size(left) };
                left -= more;
                1 + more
            })
            .collect();
        sizes.sort_unstable();
        let max = 1 + random.size(longest - STEP_TOKENS - 1);
        let lengths: Vec<usize> = sizes.iter().map(|_| 1 + random.below(max)).collect();
        let mut sequences: Vec<Sequence> = lengths.iter().map(|&len| sequence(pool, len)).collect();
        let mut batch: Vec<(&mut Sequence, usize)> = sequences.iter_mut().zip(sizes.iter().copied()).collect();
        let how = if random.below(2) == 0 { &greedy } else { &warm };
        let tokens = vec![1u32; sizes.iter().sum()];
        let fed: Vec<_> = (0..sizes.iter().take_while(|&&size| size == 1).count()).map(|row| (row, row)).collect();
        // Includes tokens from the middle of the sampled ones.
        let fed = if random.below(2) == 0 { &fed[..] } else { fed.get(1..).unwrap_or(&[]) };
        let fed = Some(DeviceTokens { drawn: &drawn, places: fed });
        // Sometimes, a few tokens of each sequence are rows of a recorded pass.
        let has_drafts = sizes.last().is_some_and(|&size| size < 5) && random.below(2) == 0;
        if sizes.iter().all(|&size| size == 1) || has_drafts && tokens.len() <= decoder.rows() {
            decoder.append(&mut batch).unwrap();
            let how = vec![how; if random.below(4) == 0 { 0 } else { tokens.len() }];
            decoder.run_fed(&tokens, fed, &how).unwrap().wait().unwrap();
            continue;
        }
        let step = pool.step(&mut batch).unwrap();
        // Not every prompt ends in this step.
        let wanted = rows - random.below(2);
        let mut end = 0;
        let ends = sizes.iter().map(|size| {
            end += size;
            end - 1
        });
        let ends: Vec<usize> = ends.take(wanted).collect();
        let logits = Tensor::zeros(model.device(), DType::F32, &[wanted, model.vocab_size()]).unwrap();
        model.start(pool, &step, &tokens, fed, &ends, &logits).unwrap().wait().unwrap();
        let how: Vec<(&Sampling, u32)> = ends.iter().map(|_| (how, 0)).collect();
        sampler.start(&logits, &how).unwrap().0.wait().unwrap();
    }
}

#[test]
fn no_step_needs_a_kernel_that_is_not_prepared() {
    let tq4 = Codec::tq(4);
    let small: [&str; 3] = ["moe", "llama", "qwen3"];
    let models = [(shipped(), Codec::BF16), (shipped(), tq4), (shipped(), Codec::tq(8))];
    let models = models.into_iter().chain(small.map(|name| (golden(name), Codec::BF16)));
    let mut missing = BTreeSet::new();
    for (path, codec) in models {
        for (limits, activations, longest) in [
            (H200, DType::BF16, 6000),
            (H200, DType::BF16, 40_000),
            (RTX_4090, DType::BF16, 6000),
            (H200, DType::F32, 3000),
        ] {
            let recorder = Recorder { limits, kernels: Arc::default() };
            let device: Device = gpu::cuda_device(recorder.clone());
            let options = LoadOptions { activations, ..LoadOptions::default() };
            let model = Model::load_with(&path, &device, &options).unwrap();
            // Room for sequences that grow in one step without a window passing any page.
            let sequences = 20 * SEQUENCES;
            let options = PoolOptions { codecs: codec.into(), longest, sequences, ..PoolOptions::default() };
            let pool = model.new_pool(&options).unwrap();
            let mut decoder = BatchDecoder::new(&model, &pool, SEQUENCES).unwrap();
            decoder.sizes(longest).into_iter().for_each(|size| decoder.record_size(size).unwrap());
            let mixed = model.mixed_sizes(SEQUENCES, STEP_TOKENS, longest);
            mixed.iter().for_each(|&size| model.prepare(&pool, size).unwrap());
            let (passes, prepared) = (decoder.sizes(longest).len() + mixed.len(), recorder.take());
            steps(&model, &pool, &mut decoder, longest, 250);
            let needed = recorder.take();
            let name = path.file_name().unwrap().display();
            let of = format!("{name}, {codec}, {activations}, {} KiB, {longest}", limits.threadgroup_bytes >> 10);
            println!("{of}: {passes} passes prepare {} kernels, {} of them needed", prepared.len(), needed.len());
            assert!(needed.len() > 10 && prepared.len() > 10);
            missing.extend(needed.difference(&prepared).map(|kernel| format!("{of}: {kernel}")));
        }
    }
    assert!(missing.is_empty(), "{} kernels:\n{}", missing.len(), missing.into_iter().collect::<Vec<_>>().join("\n"));
}
