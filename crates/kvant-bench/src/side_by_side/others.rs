//! The tables other than attention: writing, norm and RoPE, matrix products, windows, threads.

use kvant::{Codec, CpuOptions, DType, Device, ops::BlockFormat};
use kvant_bench::{
    Result, Shape,
    attention::{Attention, Context},
    data,
    linear::{Linear, Storage},
    rope::NormRope,
    writing::{Batch, Writing},
};

use crate::{
    Options, memory,
    peers::ggml::{self, Type},
    race::{Contender, race},
};

/// The layer whose keys and values are written: 8 KV heads of 256.
const WRITTEN: Shape = Shape::new(256, 16, 8);
/// Tokens of a prefill chunk.
const CHUNK: usize = 512;

/// Writing into the cache, dense and encoded, compared with ggml's `set_rows` and a plain copy.
pub fn writing(options: &Options) -> Result {
    let shape = WRITTEN;
    let batch = |source, codec| Batch { shape, source, codec, tokens: CHUNK };
    let elements = batch(DType::F32, Codec::F16).elements();
    let cases = [
        (DType::F16, Codec::F16),
        (DType::F32, Codec::F32),
        (DType::F32, Codec::F16),
        (DType::F32, Codec::BF16),
        (DType::F32, Codec::tq(8)),
        (DType::F32, Codec::tq(6)),
        (DType::F32, Codec::tq(5)),
        (DType::F32, Codec::tq(4)),
    ];
    println!("\n### kv_write of {CHUNK} tokens, 8 KV heads of 256\n");
    println!("A core: elements a second over the threads. The copy moves as many bytes as the cache takes.\n");
    println!("| | threads | µs | G elements/s a core |\n|---|---|---|---|");
    for threads in [1, options.threads] {
        let device = &options.with_threads(threads)?;
        let mut contenders = Vec::new();
        for (source, codec) in cases {
            let mut writing = Writing::new(device, &batch(source, codec), data::ROTATION)?;
            contenders.push(Contender::each(format!("kvant {source} → {codec}"), 0, move || writing.call()));
        }
        for dtype in [DType::F16, DType::F32] {
            let mut copier = memory::copier(elements * dtype.size(), threads);
            copier.name = format!("copy of {dtype}");
            contenders.push(copier);
        }
        for kind in [Type::F16, Type::Q8_0, Type::Q4_0] {
            let row = shape.elements(1);
            let copies = data::copies(2 * CHUNK * kind.row_bytes(row));
            let mut rotation = ggml::set_rows(kind, (CHUNK, row), threads, copies)?;
            contenders
                .push(Contender::new(format!("ggml set_rows f32 → {}", kind.name()), 0, move || rotation.run()));
        }
        let mut convert = ggml::quantiser(Type::Q4_0, shape.head_dim)?;
        let from = data::normal(elements, 1);
        let mut to = vec![0; elements / shape.head_dim * Type::Q4_0.row_bytes(shape.head_dim)];
        if threads == 1 {
            contenders.push(Contender::each("ggml quantiser q4_0 alone", 0, move || {
                convert(&from, &mut to);
                Ok(())
            }));
        }
        let times = race(&mut contenders, options.rounds)?;
        options.log(&contenders, &times);
        for (contender, micros) in contenders.iter().zip(times) {
            let rate = elements as f64 / micros / 1e3 / threads as f64;
            println!("| {} | {threads} | {micros:.0} | {rate:.2} |", contender.name);
        }
    }
    Ok(())
}

/// Norm and RoPE of one token and of a chunk, compared with ggml's three operators.
pub fn norm_rope(options: &Options) -> Result {
    let (heads, head_dim) = (24, 256);
    println!("\n### norm_rope of {heads} heads of {head_dim}, f32\n");
    println!("| tokens | threads | kvant, µs | ggml rms_norm + mul + rope, µs | times faster | relative difference |");
    println!("|---|---|---|---|---|---|");
    for tokens in [1, CHUNK] {
        for threads in [1, options.threads] {
            let device = &options.with_threads(threads)?;
            let mut ours = NormRope::new(device, tokens, heads, head_dim)?;
            ours.call()?;
            let values = ours.values()?;
            let mut theirs = ggml::norm_rope(&values, tokens, heads, threads)?;
            theirs.run()?;
            let right: Vec<f64> = values[2].iter().map(|&x| x.into()).collect();
            let difference = super::attention::distance(&theirs.output(right.len()), &right);
            let mut contenders =
                [Contender::each("kvant", 0, || ours.call()), Contender::new("ggml", 0, || theirs.run())];
            let times = race(&mut contenders, options.rounds)?;
            let ratio = times[1] / times[0];
            println!("| {tokens} | {threads} | {:.2} | {:.2} | {ratio:.2} | {difference:.1e} |", times[0], times[1]);
        }
    }
    Ok(())
}

/// One token through weights that come from memory, and prefill.
pub fn linear(options: &Options) -> Result {
    let (outputs, inputs) = (4096, 4096);
    println!("\n### linear, one token, {outputs} × {inputs}, weights from memory\n");
    let mut contenders = vec![memory::reader(options.threads)];
    let storages = [
        Storage::Affine { bits: 4 },
        Storage::Blocks(BlockFormat::Q4_K),
        Storage::Affine { bits: 8 },
        Storage::Dense(DType::BF16),
    ];
    for storage in storages {
        let bytes = storage.bytes(outputs, inputs);
        let mut linear = Linear::new(&options.device, (1, outputs, inputs), storage, data::copies(bytes))?;
        contenders.push(Contender::each(format!("kvant {storage}"), bytes, move || linear.call()));
    }
    for kind in [Type::Q4_0, Type::Q8_0, Type::F16] {
        let bytes = outputs * kind.row_bytes(inputs);
        let mut rotation = ggml::mul_mat(kind, (outputs, inputs), options.threads, data::copies(bytes))?;
        contenders.push(Contender::new(format!("ggml {}", kind.name()), bytes, move || rotation.run()));
    }
    let times = race(&mut contenders, options.rounds)?;
    options.log(&contenders, &times);
    let ceiling = memory::gigabytes(memory::READ, times[0]);
    println!("Read ceiling {ceiling:.1} GB/s.\n");
    println!("| | µs | MB | of the ceiling |\n|---|---|---|---|");
    for (contender, &micros) in contenders.iter().zip(&times).skip(1) {
        let share = 100.0 * memory::gigabytes(contender.bytes, micros) / ceiling;
        println!("| {} | {micros:.0} | {:.1} | {share:.0} % |", contender.name, contender.bytes as f64 / 1e6);
    }
    drop(contenders);

    let size = 1024;
    println!("\n### linear, prefill, {size} tokens, {size} × {size}\n");
    let (a, b) = (data::normal(size * size, 1), data::normal(size * size, 2));
    let mut c = vec![0f32; size * size];
    let parallelism =
        if options.threads == 1 { gemm::Parallelism::None } else { gemm::Parallelism::Rayon(options.threads) };
    let mut contenders = Vec::new();
    for storage in [Storage::Affine { bits: 4 }, Storage::Dense(DType::BF16), Storage::Dense(DType::F32)] {
        let mut linear = Linear::new(&options.device, (size, size, size), storage, 1)?;
        contenders.push(Contender::each(format!("kvant {storage}"), 0, move || linear.call()));
    }
    contenders.push(Contender::each("gemm crate f32", 0, || {
        let n = size as isize;
        // C = A·Bᵀ, because a linear layer stores its weights by rows.
        // SAFETY: three matrices of size × size numbers, strides within them, and nobody else accesses C.
        unsafe {
            gemm::gemm(
                size,
                size,
                size,
                c.as_mut_ptr(),
                1,
                n,
                false,
                a.as_ptr(),
                1,
                n,
                b.as_ptr(),
                n,
                1,
                0.0,
                1.0,
                false,
                false,
                false,
                parallelism,
            );
        }
        Ok(())
    }));
    let times = race(&mut contenders, options.rounds)?;
    options.log(&contenders, &times);
    println!("| | ms | GFLOP/s | of the gemm crate |\n|---|---|---|---|");
    let gemm = times[times.len() - 1];
    for (contender, micros) in contenders.iter().zip(&times) {
        let flops = 2.0 * (size as f64).powi(3) / micros / 1e3;
        println!("| {} | {:.2} | {flops:.0} | {:.0} % |", contender.name, micros / 1e3, 100.0 * gemm / micros);
    }
    Ok(())
}

/// A sliding window near the start of a sequence and far from it.
pub fn windows(options: &Options) -> Result {
    println!("\n### Window of 1024 on a ring, from memory\n");
    println!("| D, H, Hk | codec | position 2000, µs | position 1 000 000, µs | ratio |\n|---|---|---|---|---|");
    for &shape in &options.shapes {
        for codec in [Codec::F16, Codec::tq(4)] {
            let mut contenders = Vec::new();
            for position in [2000, 1_000_000] {
                let context = Context { shape, codec, position, window: Some(1024) };
                let mut attention = Attention::new(&options.device, &context, data::copies(context.bytes()))?;
                contenders.push(Contender::each("", 0, move || attention.call()));
            }
            let times = race(&mut contenders, options.rounds)?;
            let (near, far) = (times[0], times[1]);
            println!("| {shape} | {codec} | {near:.1} | {far:.1} | {:.3} |", far / near);
        }
    }
    Ok(())
}

/// One thread and all threads, on keys and values that stay in the shared cache.
pub fn threads(options: &Options) -> Result {
    let bytes = 12 << 20;
    println!("\n### One thread and {}, over some 12 MiB that stay in the L3 cache\n", options.threads);
    println!("| D, H, Hk | codec | tokens | 1 thread, µs | {} threads, µs | times faster |", options.threads);
    println!("|---|---|---|---|---|---|");
    let one_head = |shape: &Shape| Shape::new(shape.head_dim, shape.heads / shape.kv_heads, 1);
    let shapes = options.shapes.iter().copied().chain(options.shapes.iter().map(one_head));
    for shape in shapes.collect::<Vec<_>>() {
        for codec in [Codec::F16, Codec::tq(4)] {
            let tokens = bytes / (2 * shape.kv_heads * codec.bytes_per_vector(shape.head_dim)) / 64 * 64;
            let mut contenders = Vec::new();
            for threads in [1, options.threads] {
                let device = options.with_threads(threads)?;
                let mut attention = Attention::new(&device, &Context::full(shape, codec, tokens), 1)?;
                contenders.push(Contender::each("", 0, move || attention.call()));
            }
            let times = race(&mut contenders, options.rounds)?;
            let (one, all) = (times[0], times[1]);
            println!("| {shape} | {codec} | {tokens} | {one:.1} | {all:.1} | {:.2} |", one / all);
        }
    }
    Ok(())
}

impl Options {
    fn with_threads(&self, threads: usize) -> Result<Device> {
        if threads == self.threads {
            return Ok(self.device.clone());
        }
        Ok(Device::cpu_with(CpuOptions { threads: Some(threads), ..CpuOptions::default() })?)
    }
}
