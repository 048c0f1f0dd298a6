//! Checks that a decode step on the CPU does not allocate after warm-up.
//!
//! The only test of its binary: the allocator counts the allocations of all threads.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    path::Path,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

use kvant::{
    Codec, CpuOptions, DType, Device, Encoder, HeadOrder, KvLayer, LayerSpec, Step, StepSize, Tensor,
    ops::{self, KvWrite},
};
use kvant_models::{Decoder, Model, PoolOptions, Sampling};

struct Counting;

static TAKEN: AtomicUsize = AtomicUsize::new(0);

// SAFETY: forwards to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        TAKEN.fetch_add(1, Relaxed);
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: guaranteed by the caller.
        unsafe { System.dealloc(at, layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        TAKEN.fetch_add(1, Relaxed);
        // SAFETY: guaranteed by the caller.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Repeats steps, because the assignment of work to threads varies, and each thread has its own scratch memory.
fn check(what: &str, steps: &mut dyn FnMut(u32)) {
    let mut steps = (0..60).map(|token| {
        let taken = TAKEN.load(Relaxed);
        steps(token);
        TAKEN.load(Relaxed) - taken
    });
    let warm_up: Vec<usize> = steps.by_ref().take(50).collect();
    let after: Vec<usize> = steps.collect();
    assert!(after.iter().all(|&taken| taken == 0), "{what}: {warm_up:?}, then {after:?}");
}

#[test]
fn a_decode_step_allocates_nothing() {
    let taken = TAKEN.load(Relaxed);
    std::hint::black_box(vec![1u8; 100]);
    assert!(TAKEN.load(Relaxed) > taken, "the allocator counts");

    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kvant-cli/model");
    for (threads, codec) in [(1, Codec::F16), (2, Codec::tq(4))] {
        let device = Device::cpu_with(CpuOptions { threads: Some(threads), ..CpuOptions::default() }).unwrap();
        let model = Model::load(&directory, &device).unwrap();
        let options = PoolOptions { codecs: codec.into(), longest: 256, ..PoolOptions::default() };
        let mut sequence = model.new_pool(&options).unwrap().sequence();
        // The sequence is truncated again below.
        sequence.hold(100);
        let logits = Tensor::zeros(&device, DType::F32, &[1, model.vocab_size()]).unwrap();
        let prompt: Vec<u32> = (0..140).collect();
        model.feed_into(&mut sequence, &prompt, &logits).unwrap();
        let pool = sequence.pool().clone();
        let step = pool.reserve_step(StepSize::decode(1, 256)).unwrap();
        check(&format!("forward, {codec}"), &mut |token| {
            pool.step_into(&mut [(&mut sequence, 1)], &step).unwrap();
            model.forward_into(&pool, &step, &[token], &[0], &logits).unwrap();
        });
        let sampling = Sampling::default().temperature(1.0).top_k(40);
        sequence.truncate(140).unwrap();
        let mut decoder = Decoder::new(&model, &mut sequence, sampling).unwrap();
        check(&format!("decoder, {codec}"), &mut |token| decoder.feed(&[token]).unwrap());
    }

    // Many sequences, in mixed order.
    let device = Device::cpu_with(CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap();
    let (sequences, kv_heads, head_dim) = (64, 8, 128);
    let spec = LayerSpec::new(kv_heads, head_dim, 4, Codec::F16).sequences(sequences).v(Codec::tq(4));
    let layer = KvLayer::new(&device, spec).unwrap();
    let places: Vec<(u32, u32)> = (0..sequences as u32).rev().map(|sequence| (sequence, 0)).collect();
    let step = Step::new(&device, sequences, &places).unwrap();
    let new = Tensor::zeros(&device, DType::F32, &[sequences, kv_heads, head_dim]).unwrap();
    let order = HeadOrder::TokenMajor;
    let write = KvWrite::new(&new, &new, &step, &layer).order(order);
    let graph = Encoder::capture(&device, |enc| ops::kv_write(enc, &write)).unwrap();
    check("kv_write", &mut |_| graph.replay().unwrap().wait().unwrap());
}
