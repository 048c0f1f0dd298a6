//! Tests that need private parts of a pool, or Linux's report of resident memory.

use super::*;
use crate::{Codec, DType, Device, Tensor, ops};

/// 64 sequences of one token take less than 200 MB in a pool for 32768 tokens of 32 layers of 8 heads.
#[test]
fn resident_memory_follows_use() {
    let (device, layers, kv_heads, head_dim) = (Device::cpu(), 32, 8, 128);
    let layer = CacheLayer::new(kv_heads, head_dim, Codec::F16);
    let spec = PoolSpec::new(vec![layer; layers], 0).room_for(1, 32_768, 1).unwrap();
    let pool = KvPool::new(&device, &spec).unwrap();
    assert!(pool.usage().bytes >= 4 << 30);
    let mut sequences: Vec<Sequence> = (0..64).map(|_| pool.sequence()).collect();
    let mut batch: Vec<_> = sequences.iter_mut().map(|sequence| (sequence, 1)).collect();
    let step = pool.step(&mut batch).unwrap();
    let x = Tensor::zeros(&device, DType::F16, &[64, kv_heads, head_dim]).unwrap();
    let mut enc = device.encoder().unwrap();
    for index in 0..layers {
        ops::kv_write(&mut enc, &ops::KvWrite::new(&x, &x, &step, pool.layer(index).unwrap())).unwrap();
    }
    enc.commit().unwrap().wait().unwrap();
    let resident = resident_bytes(pool.memory());
    assert!(resident > 0 && resident < 200 << 20, "{} MB", resident >> 20);
}

/// Bytes of a tensor that are in memory.
fn resident_bytes(tensor: &Tensor) -> usize {
    // SAFETY: no arguments.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap();
    let first = tensor.host_ptr() as usize / page * page;
    let bytes = tensor.host_ptr() as usize + tensor.bytes() - first;
    let mut pages = vec![0u8; bytes.div_ceil(page)];
    // SAFETY: the range is mapped, and `pages` has a byte for each of its pages.
    let failed = unsafe { libc::mincore(std::ptr::with_exposed_provenance_mut(first), bytes, pages.as_mut_ptr()) };
    assert_eq!(failed, 0);
    pages.iter().filter(|&&page| page & 1 != 0).count() * page
}

/// A step reserved for single tokens rejects a batch whose first tokens share a sequence.
#[test]
fn steps_refuse_tokens_that_are_not_alone() {
    let layers = vec![CacheLayer::new(1, 64, Codec::F32)];
    let pool = KvPool::new(&Device::reference(), &PoolSpec::new(layers, 1 << 20)).unwrap();
    let step = pool.reserve_step(StepSize::decode(4, 64).tokens(10, 6).alone(2)).unwrap();
    assert_eq!(step.batch().decode, 2);
    for (counts, fits) in [
        (&[1, 1, 5][..], true),
        (&[1, 0, 1, 6], true),
        (&[1], true),
        (&[], true),
        (&[5, 1], false),
        (&[1, 2, 1], false),
    ] {
        let mut sequences: Vec<Sequence> = counts.iter().map(|_| pool.sequence()).collect();
        let mut batch: Vec<(&mut Sequence, usize)> = sequences.iter_mut().zip(counts.iter().copied()).collect();
        let written = pool.step_into(&mut batch, &step);
        assert_eq!(written.is_ok(), fits, "{counts:?}: {written:?}");
        assert!(fits || sequences.iter().all(Sequence::is_empty));
    }
}
