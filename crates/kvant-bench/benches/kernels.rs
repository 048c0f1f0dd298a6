//! Criterion benches of single kernels, to compare a kernel before and after a change.
//!
//! ```text
//! cargo bench -p kvant-bench -- attend/f16
//! ```
//!
//! All data comes from the processor's caches, so that the benches measure the kernel and not the memory. `kvant
//! bench` and `kvant-bench` rotate over memory.

use std::{hint::black_box, time::Duration};

use criterion::{Criterion, Throughput};
use kvant::{Codec, DType, Device, ops::BlockFormat};
use kvant_bench::{
    Result, Shape,
    attention::{Attention, Context},
    linear::{Linear, Storage},
    rope::NormRope,
    writing::{Batch, Writing},
};

const CODECS: [Codec; 8] =
    [Codec::F16, Codec::BF16, Codec::tq(8), Codec::tq(6), Codec::tq(5), Codec::tq(4), Codec::tq(3), Codec::tq(2)];

fn main() {
    let mut criterion = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .sample_size(20)
        .configure_from_args();
    run(&mut criterion).expect("every case is valid");
    criterion.final_summary();
}

fn run(criterion: &mut Criterion) -> Result {
    let device = &Device::cpu();
    for shape in Shape::ALL {
        for codec in CODECS {
            let context = Context::full(shape, codec, 1024);
            let attention = Attention::new(device, &context, 1)?;
            let name = format!("attend/{codec}/{shape}");
            bench(criterion, &name, Throughput::Bytes(context.bytes() as u64), attention, Attention::call);
        }
    }
    let shape = Shape::new(256, 16, 8);
    for codec in CODECS {
        for tokens in [1, 512] {
            let batch = Batch { shape, source: DType::F32, codec, tokens };
            let writing = Writing::new(device, &batch, 1)?;
            let elements = Throughput::Elements(batch.elements() as u64);
            bench(criterion, &format!("kv_write/{codec}/{tokens}"), elements, writing, Writing::call);
        }
    }
    for tokens in [1, 512] {
        let norm_rope = NormRope::new(device, tokens, 24, 256)?;
        let elements = Throughput::Elements((tokens * 24 * 256) as u64);
        bench(criterion, &format!("norm_rope/{tokens}"), elements, norm_rope, NormRope::call);
    }
    let affine = [4, 6, 8].map(|bits| (format!("{bits}-bit"), Storage::Affine { bits }));
    let blocks = [BlockFormat::Q4_K, BlockFormat::Q6_K, BlockFormat::MXFP4];
    let blocks = blocks.map(|format| (format.to_string(), Storage::Blocks(format)));
    for (name, storage) in affine.into_iter().chain(blocks) {
        for tokens in [1, 8, 512] {
            let linear = Linear::new(device, (tokens, 1024, 1024), storage, 1)?;
            let products = Throughput::Elements((tokens * 1024 * 1024) as u64);
            bench(criterion, &format!("linear/{name}/{tokens}"), products, linear, Linear::call);
        }
    }
    Ok(())
}

/// Benchmarks `call` on prepared data.
fn bench<T>(
    criterion: &mut Criterion,
    name: &str,
    throughput: Throughput,
    mut prepared: T,
    call: impl Fn(&mut T) -> Result,
) {
    let (group, function) = name.split_once('/').unwrap_or((name, ""));
    let mut group = criterion.benchmark_group(group);
    group.throughput(throughput);
    group.bench_function(function, |bencher| bencher.iter(|| black_box(call(&mut prepared)).expect("a valid call")));
    group.finish();
}
