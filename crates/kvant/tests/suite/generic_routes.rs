//! The cases that CUDA runs with its general kernels, for layers of released models. Every case must have a reason
//! here, and every reason a case.

use std::collections::BTreeSet;

use crate::common::without_gpu::{Launches, Model};
use kvant::{
    Codec, DType, Device, KvLayer, LayerSpec, Result, Step, Tensor, gpu,
    ops::{self, Affine, Attend, BlockFormat, Blocks, Experts, FloatFormat, Linear, ScaledFloats, Weight},
};

/// Heads, KV heads, head size and window of a layer.
#[derive(Clone, Copy, Debug)]
struct Attention(usize, usize, usize, Option<usize>);

const ATTENTION: [(&str, Attention); 9] = [
    ("Llama 3 8B, Qwen 3 8B, Ministral 3", Attention(32, 8, 128, None)),
    ("Mistral 7B", Attention(32, 8, 128, Some(4096))),
    ("Qwen 3 30B-A3B", Attention(32, 4, 128, None)),
    ("Gemma 3 27B", Attention(32, 16, 128, Some(1024))),
    ("Gemma 3 4B", Attention(8, 4, 256, Some(1024))),
    ("Gemma 4 31B, window", Attention(32, 16, 256, Some(1024))),
    ("Gemma 4 31B", Attention(32, 4, 512, None)),
    ("Gemma 4 26B-A4B", Attention(16, 2, 512, None)),
    ("gpt-oss", Attention(64, 8, 64, Some(128))),
];

/// Outputs, inputs and experts of a matrix; with experts, eight rows per token.
const MATRICES: [(&str, [usize; 3]); 6] = [
    ("Llama 3 8B, down", [4096, 14_336, 0]),
    ("Gemma 4 31B, gate", [21_504, 5376, 0]),
    ("Gemma 4 26B-A4B, dense down", [2816, 2112, 0]),
    ("Gemma 4 26B-A4B, experts", [704, 2816, 128]),
    ("Qwen 3 30B-A3B, experts", [2048, 768, 128]),
    ("gpt-oss, experts", [2880, 2880, 32]),
];

/// Sequences and new tokens of each.
const BATCHES: [[usize; 2]; 6] = [[1, 1], [8, 1], [64, 1], [8, 4], [1, 512], [1, 4096]];

const GPUS: [Model; 3] = [Model::H200, Model::A100, Model::Rtx4090];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Affine(u32),
    Dense(DType),
    Blocks(BlockFormat),
    Floats(FloatFormat),
}

#[derive(Clone, Copy, Debug)]
enum Case {
    Attention(Attention, Codec),
    /// Outputs, inputs, experts.
    Product([usize; 3], Kind),
}

/// A case on a GPU, with a batch.
#[derive(Clone, Copy, Debug)]
struct On {
    case: Case,
    batch: [usize; 2],
    gpu: Model,
}

impl On {
    /// The kernels that are launched for bf16 activations.
    fn kernels(&self) -> Result<Vec<String>> {
        let launches = Launches { model: self.gpu, ..Launches::default() };
        let device = gpu::cuda_device(launches.clone());
        let [sequences, each] = self.batch;
        let mut enc = device.encoder()?;
        match self.case {
            Case::Attention(Attention(heads, kv_heads, dim, window), codec) => {
                let spec = LayerSpec::new(kv_heads, dim, 8192, codec).sequences(sequences);
                let layer = KvLayer::new(&device, spec)?;
                let rows: Vec<_> = (0..sequences as u32).flat_map(|s| (0..each as u32).map(move |p| (s, p))).collect();
                let step = Step::new(&device, sequences, &rows)?;
                let q = zeros(&device, DType::BF16, &[rows.len(), heads, dim])?;
                let out = zeros(&device, DType::BF16, &[rows.len(), heads, dim])?;
                ops::attend(&mut enc, &Attend::new(&q, &layer, &step, &out).window(window))?;
            }
            Case::Product([outputs, inputs, experts], kind) => {
                let tokens = sequences * each;
                let x = zeros(&device, DType::BF16, &[tokens, inputs])?;
                let ids = zeros(&device, DType::U32, &[tokens, 8])?;
                let rows = if experts > 0 { 8 * tokens } else { tokens };
                let out = zeros(&device, DType::BF16, &[rows, outputs])?;
                let shape = |last: usize| match experts {
                    0 => vec![outputs, last],
                    _ => vec![experts, outputs, last],
                };
                let parts = |dtype, row, other, factors| -> Result<[Tensor; 2]> {
                    Ok([zeros(&device, dtype, &shape(row))?, zeros(&device, other, &shape(factors))?])
                };
                let [codes, scales] = match kind {
                    Kind::Affine(bits) => parts(DType::U32, inputs * bits as usize / 32, DType::BF16, inputs / 64)?,
                    Kind::Dense(dtype) => parts(dtype, inputs, DType::U8, 1)?,
                    Kind::Blocks(format) => {
                        parts(DType::U8, format.row_bytes(inputs).expect("whole blocks"), DType::U8, 1)?
                    }
                    Kind::Floats(format) => {
                        parts(DType::U8, inputs * format.bits() / 8, DType::U8, inputs / format.group())?
                    }
                };
                let weight: Weight = match kind {
                    Kind::Affine(bits) => {
                        Affine { codes: &codes, scales: &scales, biases: &scales, bits, group: 64 }.into()
                    }
                    Kind::Dense(_) => Weight::Dense(&codes),
                    Kind::Blocks(format) => Blocks::new(&codes, format).into(),
                    Kind::Floats(format) => ScaledFloats::new(&codes, &scales, format).into(),
                };
                let chosen = (experts > 0).then(|| Experts::new(&ids));
                ops::linear(&mut enc, &Linear::new(&x, weight, &out).experts(chosen))?;
            }
        }
        enc.commit()?.wait()?;
        let all = launches.all.lock().unwrap();
        Ok(all.iter().map(|launch| launch.split([' ', '/']).nth(1).unwrap_or_default().to_string()).collect())
    }

    fn tokens(&self) -> usize {
        self.batch[0] * self.batch[1]
    }

    fn codec(&self) -> Option<Codec> {
        match self.case {
            Case::Attention(_, codec) => Some(codec),
            Case::Product(..) => None,
        }
    }
}

/// Whether a reason explains a case.
type Explains = fn(&On) -> bool;

/// The reasons for using general kernels. The first reason that explains a case applies.
const REASONS: [(&str, Explains); 7] = [
    ("prompts over quantised caches have no kernel of their own", |on| {
        on.batch[1] >= 512 && on.codec().is_some_and(|codec| codec.is_quantised())
    }),
    ("drafts are few rows for a kernel of prompts", |on| on.codec().is_some() && (2..512).contains(&on.batch[1])),
    (
        "long contexts of quantised caches, and those of 3 bits, need a head size of 128 or more",
        |on| matches!(on.case, Case::Attention(Attention(_, _, 64, _), codec) if codec.is_quantised()),
    ),
    ("the shared memory is too small", |on| on.codec().is_some() && on.gpu != Model::H200),
    ("kvant-models gives dense matrices the dtype of activations", |on| {
        matches!(on.case, Case::Product(_, Kind::Dense(DType::F16 | DType::F32)))
    }),
    ("cuBLASLt multiplies in its place", |on| {
        matches!(on.case, Case::Product([_, _, 0], Kind::Dense(_))) && on.tokens() > 8
    }),
    ("many rows of experts by blocks become bf16 only where there are products of warpgroups", |on| {
        matches!(on.case, Case::Product([_, _, experts], Kind::Blocks(_) | Kind::Floats(_)) if experts > 0)
            && on.gpu != Model::H200
    }),
];

fn zeros(device: &Device, dtype: DType, shape: &[usize]) -> Result<Tensor> {
    Tensor::zeros(device, dtype, shape)
}

fn cases() -> Vec<(&'static str, Case)> {
    let codecs = [Codec::BF16, Codec::tq(8), Codec::tq(4), Codec::tq(3)];
    let attention =
        ATTENTION.into_iter().flat_map(|(model, layer)| codecs.map(|codec| (model, Case::Attention(layer, codec))));
    let kinds = [
        Kind::Affine(4),
        Kind::Affine(6),
        Kind::Affine(8),
        Kind::Affine(3),
        Kind::Dense(DType::BF16),
        Kind::Dense(DType::F16),
        Kind::Dense(DType::F32),
        Kind::Blocks(BlockFormat::Q4_K),
        Kind::Blocks(BlockFormat::Q5_0),
        Kind::Floats(FloatFormat::Mxfp4),
        Kind::Floats(FloatFormat::Mxfp8),
        Kind::Floats(FloatFormat::Nvfp4),
    ];
    let takes = |kind: Kind, inputs: usize| match kind {
        Kind::Blocks(format) => inputs.is_multiple_of(format.block_inputs()),
        _ => true,
    };
    let products = MATRICES.into_iter().flat_map(|(model, shape)| {
        kinds
            .into_iter()
            .filter(move |&kind| takes(kind, shape[1]))
            .map(move |kind| (model, Case::Product(shape, kind)))
    });
    attention.chain(products).collect()
}

#[test]
fn general_kernels_serve_what_is_listed() -> Result<()> {
    let (mut unknown, mut reasons) = (Vec::new(), BTreeSet::new());
    for gpu in GPUS {
        for (model, case) in cases() {
            for batch in BATCHES {
                let on = On { case, batch, gpu };
                let kernels = on.kernels()?;
                let last = kernels.last().expect("a launch");
                // cuBLASLt multiplies after linear_dequantise.
                let is_general = ["attend_generic", "linear_few", "linear_tiles"].contains(&last.as_str())
                    && !kernels.iter().any(|kernel| kernel == "linear_dequantise");
                if !is_general {
                    continue;
                }
                match REASONS.iter().find(|(_, explains)| explains(&on)) {
                    Some((reason, _)) => drop(reasons.insert(*reason)),
                    None => unknown.push(format!("{last}: {model}, {on:?}")),
                }
            }
        }
    }
    assert!(unknown.is_empty(), "without a reason:\n{}", unknown.join("\n"));
    // A reason without a case must be removed.
    let unused: Vec<&str> =
        REASONS.iter().map(|(reason, _)| *reason).filter(|reason| !reasons.contains(reason)).collect();
    assert!(unused.is_empty(), "{unused:?}");
    Ok(())
}
