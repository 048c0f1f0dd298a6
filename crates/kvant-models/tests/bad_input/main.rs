//! Invalid files. Each is an error with a reason, without a panic, and without allocations that exceed the size of the
//! file.

#[path = "../common/mod.rs"]
mod common;
mod compressed;
mod config;
mod families;
mod gguf;
mod gpt_oss;
mod safetensors;
mod tensors;
mod tokenizer;
mod windows;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
};

use common::{Parts, golden};
use kvant::Device;
use kvant_models::{Error, Model};
use proptest::prelude::*;
use serde_json::{Value, json};

/// Records the largest single allocation.
struct Watched;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: forwards to the system's allocator.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.fetch_max(size, Ordering::Relaxed);
        // SAFETY: guaranteed by the caller.
        unsafe { System.realloc(block, layout, size) }
    }
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: guaranteed by the caller.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

/// Far above the needs of these files (the piece buffer is 8 MiB), and far below the sizes that they claim.
const MODEST: usize = 64 << 20;

fn assert_modest() {
    let largest = LARGEST.load(Ordering::Relaxed);
    assert!(largest < MODEST, "{largest} bytes were allocated at once");
}

fn load(dir: &Path) -> Result<Model, Error> {
    let result = Model::load(dir, &Device::reference());
    assert_modest();
    result
}

fn config_of(variant: &str) -> Value {
    serde_json::from_slice(&std::fs::read(golden(variant).join("config.json")).unwrap()).unwrap()
}

fn config_bytes(variant: &str) -> Vec<u8> {
    std::fs::read(golden(variant).join("config.json")).unwrap()
}

fn checkpoint(variant: &str) -> Parts {
    Parts::read(&golden(variant).join("model.safetensors"))
}

/// A value of arbitrary type.
fn any_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (0u64..1 << 20).prop_map(Value::from),
        (0u64..8).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-z_]{0,12}".prop_map(Value::from),
        Just(json!([])),
        Just(json!([1, 2, 3])),
        Just(json!({})),
        Just(json!({"a": 1})),
        Just(json!({"0": {"head_dim": 64}})),
    ]
}
