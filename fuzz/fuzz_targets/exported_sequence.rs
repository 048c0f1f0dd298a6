//! Arbitrary bytes as an exported sequence: an error, or a sequence that can be used and exported again. Then arbitrary
//! bytes as the page tables of a step.
#![cfg_attr(fuzzing, no_main)]

use kvant::{
    CacheLayer, Codec, DType, Device, HeadOrder, KvPool, PoolSpec, Tensor,
    ops::{self, KvWrite},
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let device = Device::cpu();
    let full = CacheLayer::new(1, 64, Codec::F16).v(Codec::tq(4));
    let layers = vec![full, full.window(Some(20))];
    let pool = KvPool::new(&device, &PoolSpec::new(layers, 1 << 18).page_tokens(16)).expect("a valid specification");
    if let Ok(mut sequence) = pool.import(bytes) {
        let len = sequence.len();
        let _ = pool.step(&mut [(&mut sequence, 1)]);
        let _ = sequence.truncate(len.saturating_sub(1));
        let _ = sequence.export().expect("a sequence can be exported");
    }
    assert_eq!(pool.usage().used, 0, "every page is free again");

    let mut sequence = pool.sequence();
    let step = pool.step(&mut [(&mut sequence, 40)]).expect("there is room");
    for table in step.page_tables() {
        let mut words = bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().expect("four bytes")));
        let entries: Vec<u32> = (0..table.elements()).map(|_| words.next().unwrap_or(u32::MAX)).collect();
        table.write(&entries).expect("as many entries as the table has");
    }
    let x = Tensor::zeros(&device, DType::F32, &[40, 1, 64]).expect("room for it");
    let mut enc = device.encoder().expect("an encoder");
    for index in 0..2 {
        let (layer, order) = (pool.layer(index).expect("the layer exists"), HeadOrder::TokenMajor);
        let write = KvWrite::new(&x, &x, &step, layer).order(order);
        ops::kv_write(&mut enc, &write).expect("a valid call");
    }
    enc.commit().expect("entries that are no pages are skipped").wait().expect("as above");
});

/// Without cargo-fuzz, a target is only compiled.
#[cfg(not(fuzzing))]
fn main() {}
