//! Selection of the attention kernel.
//!
//! [`select`] is a decision tree, read from the top: the first kernel whose conditions hold and whose shared memory
//! fits takes the call. Running and explaining a call use it.

use super::{
    HeadShares, MAX_GROUP,
    decode::AttendDecode,
    generic::AttendGeneric,
    has_clusters, is_aligned, is_aligned16, longest_context, precision,
    prefill::{AttendPrefill, PREFILL},
    quantised::AttendQuantised,
    short::AttendShort,
    short_quantised::AttendShortQuantised,
    unpack::AttendUnpack,
};
use crate::{
    Codec, DType, Error, Result,
    encoder::overlap,
    gpu::{Builder, Launch, Limits},
    ops::attend::Call,
};

/// The name of the kernel for everything.
const GENERIC: &str = "attend_generic";

/// The kernel of a call, with its division of the work.
pub(super) enum CudaAttendKernel {
    ShortQuantised(AttendShortQuantised),
    Quantised(AttendQuantised),
    Short(AttendShort),
    Decode(AttendDecode),
    Prefill(AttendPrefill),
    Unpack(AttendUnpack),
    Generic(AttendGeneric),
}

/// Inputs of the selection, in addition to shared memory.
struct AttendTraits {
    /// No sequence has two tokens, so that tokens share no keys.
    one_token_each: bool,
    /// The query heads of a KV head, or equal shares of them, are at most [`MAX_GROUP`].
    few_heads: bool,
    /// The result has the precision of f16 or bf16.
    is_16_bit: bool,
    /// Queries begin at a multiple of 16 bytes, and the output at a multiple of four elements.
    has_aligned_rows: bool,
    /// The call merges an earlier result, and leaves its own for a later one in the earlier one's memory.
    merges_in_place: bool,
    /// Rows of the cache begin at multiples of 16 bytes.
    has_aligned_cache: bool,
    /// Bits of keys and values, if both are quantised.
    quantised: Option<[u32; 2]>,
    /// Keys or values are quantised.
    is_quantised: bool,
    /// Keys are stored without a bias.
    has_bias: bool,
    /// Keys and values are dense, and of the queries' 16-bit dtype.
    dense_16_bit: bool,
    /// The head size is a power of two: only the generic kernel accepts other sizes.
    has_fast_head_dim: bool,
    /// Every context fits into one cluster of blocks, and there are enough clusters.
    fits_in_cluster: bool,
}

impl AttendTraits {
    fn new(call: &Call, limits: &Limits) -> AttendTraits {
        let spec = call.layer.spec();
        let dtype = call.q.dtype();
        AttendTraits {
            one_token_each: call.step.batch().max_new <= 1,
            few_heads: HeadShares::of_decode(call).group <= MAX_GROUP,
            is_16_bit: precision(call) != DType::F32,
            has_aligned_rows: is_aligned16(&call.q)
                && call.out.byte_offset().is_multiple_of(4 * call.out.dtype().size()),
            merges_in_place: call
                .earlier
                .as_ref()
                .zip(call.ends.as_ref())
                .is_some_and(|(earlier, ends)| overlap(&earlier.ends, ends) || overlap(&earlier.out, &call.out)),
            has_aligned_cache: [&call.layer.k, &call.layer.v].into_iter().all(is_aligned),
            quantised: match [spec.k, spec.v] {
                [Codec::TurboQuant(k), Codec::TurboQuant(v)] => Some([k.bits, v.bits]),
                _ => None,
            },
            has_bias: call.layer.key_bias().is_some(),
            is_quantised: spec.k.is_quantised() || spec.v.is_quantised(),
            dense_16_bit: dtype != DType::F32 && [spec.k, spec.v] == [Codec::Dense(dtype); 2],
            has_fast_head_dim: call.head_dim.is_power_of_two(),
            fits_in_cluster: has_clusters(call, limits) && longest_context(call) <= super::short::MAX_KEYS,
        }
    }
}

/// The kernel of a call.
///
/// # Errors
/// A block has too little shared memory for any kernel.
pub(super) fn select(call: &Call, limits: &Limits) -> Result<CudaAttendKernel> {
    let t = AttendTraits::new(call, limits);
    if !t.has_fast_head_dim {
        return Ok(CudaAttendKernel::Generic(AttendGeneric::new(call, limits)?));
    }
    let is_decode = t.one_token_each && t.few_heads && t.is_16_bit && t.has_aligned_cache;
    if is_decode
        && !t.has_bias
        && let Some(bits) = t.quantised
    {
        if t.fits_in_cluster
            && t.has_aligned_rows
            && let Some(kernel) = AttendShortQuantised::new(call, bits, limits)
        {
            return Ok(CudaAttendKernel::ShortQuantised(kernel));
        }
        if call.head_dim >= 128
            && let Some(kernel) = AttendQuantised::new(call, bits, limits)
        {
            return Ok(CudaAttendKernel::Quantised(kernel));
        }
    }
    if is_decode && t.dense_16_bit && t.has_aligned_rows && !t.merges_in_place {
        if t.fits_in_cluster
            && let Some(kernel) = AttendShort::new(call, limits)
        {
            return Ok(CudaAttendKernel::Short(kernel));
        }
        if let Some(kernel) = AttendDecode::new(call, limits) {
            return Ok(CudaAttendKernel::Decode(kernel));
        }
    }
    if is_prompt(call) {
        if t.dense_16_bit
            && t.has_aligned_cache
            && let Some(kernel) = AttendPrefill::new(call, limits)
        {
            return Ok(CudaAttendKernel::Prefill(kernel));
        }
        if t.is_quantised
            && let Some(kernel) = AttendUnpack::new(call, limits)
        {
            return Ok(CudaAttendKernel::Unpack(kernel));
        }
    }
    Ok(CudaAttendKernel::Generic(AttendGeneric::new(call, limits)?))
}

/// Whether the kernel of prompts accepts a call, apart from its keys.
fn is_prompt(call: &Call) -> bool {
    call.q.dtype() != DType::F32
        && precision(call) != DType::F32
        && is_aligned16(&call.q)
        && is_aligned16(&call.out)
        // A negative scale reverses the order of scores.
        && call.scale > 0.0
        && AttendPrefill::has_enough_rows(call)
}

impl CudaAttendKernel {
    /// The kernel's name, which begins the name that a profiler shows.
    pub(super) fn name(&self) -> &'static str {
        match self {
            CudaAttendKernel::ShortQuantised(_) => "attend_short_quantised",
            CudaAttendKernel::Quantised(_) => "attend_quantised",
            CudaAttendKernel::Short(_) => "attend_short",
            CudaAttendKernel::Decode(_) => "attend_decode",
            CudaAttendKernel::Prefill(_) | CudaAttendKernel::Unpack(_) => PREFILL,
            CudaAttendKernel::Generic(_) => GENERIC,
        }
    }

    /// How the kernel divides the work.
    pub(super) fn reason(&self) -> String {
        match self {
            CudaAttendKernel::ShortQuantised(kernel) => kernel.reason(),
            CudaAttendKernel::Quantised(kernel) => kernel.reason(),
            CudaAttendKernel::Short(kernel) => kernel.reason(),
            CudaAttendKernel::Decode(kernel) => kernel.reason(),
            CudaAttendKernel::Prefill(kernel) => kernel.reason(),
            CudaAttendKernel::Unpack(kernel) => kernel.reason(),
            CudaAttendKernel::Generic(kernel) => kernel.reason(),
        }
    }

    /// The launches.
    pub(super) fn launches(&self, call: &Call, b: &Builder) -> Result<Vec<Launch>> {
        let launch = match self {
            CudaAttendKernel::ShortQuantised(kernel) => kernel.launch(self.name(), call),
            CudaAttendKernel::Quantised(kernel) => kernel.launch(self.name(), call, b),
            CudaAttendKernel::Short(kernel) => kernel.launch(self.name(), call),
            CudaAttendKernel::Decode(kernel) => kernel.launch(self.name(), call, b),
            CudaAttendKernel::Prefill(kernel) => kernel.launch(call, None, b),
            CudaAttendKernel::Unpack(kernel) => match kernel.launches(call, b) {
                Ok(launches) => return Ok(launches),
                // The generic kernel is slower, but needs no memory for decoded pages.
                Err(Error::OutOfMemory { .. }) => AttendGeneric::new(call, &b.limits)?.launch(GENERIC, call, b),
                Err(error) => Err(error),
            },
            CudaAttendKernel::Generic(kernel) => kernel.launch(self.name(), call, b),
        };
        Ok(vec![launch?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        CacheLayer, Device, HeadOrder, KvLayer, KvPool, LayerSpec, PoolSpec, Step, StepSize, Tensor,
        codec::BITS,
        ops::attend::{PageSpan, Results},
    };

    const H200: Limits = Limits {
        threads: 1024,
        threadgroup_bytes: 227 << 10,
        busy_groups: 132,
        warpgroup_products: true,
        library_products: true,
        clusters: true,
    };
    const A100: Limits =
        Limits { threadgroup_bytes: 163 << 10, busy_groups: 108, warpgroup_products: false, clusters: false, ..H200 };
    const RTX_4090: Limits = Limits { threadgroup_bytes: 99 << 10, busy_groups: 128, ..A100 };

    /// Heads, KV heads and head size of a model's layers.
    #[derive(Clone, Copy)]
    struct Heads(usize, usize, usize);

    const LLAMA_3_8B: Heads = Heads(32, 8, 128);
    const LLAMA_3_70B: Heads = Heads(64, 8, 128);
    const QWEN_3_30B_A3B: Heads = Heads(32, 4, 128);
    const MISTRAL_LARGE: Heads = Heads(96, 8, 128);
    const QWEN_3_235B: Heads = Heads(64, 4, 128);
    const PHI_3_MINI: Heads = Heads(32, 32, 96);
    const GEMMA_3_27B: Heads = Heads(32, 16, 128);
    const GEMMA_3_4B: Heads = Heads(8, 4, 256);
    const GEMMA_4_FULL: Heads = Heads(16, 2, 512);

    /// The kernel for `tokens` bf16 queries of one sequence (`decode`: of as many sequences), on a GPU.
    fn selected(
        heads: Heads,
        codec: Codec,
        capacity: usize,
        tokens: usize,
        decode: bool,
        limits: &Limits,
    ) -> CudaAttendKernel {
        let Heads(heads, kv_heads, head_dim) = heads;
        let device = Device::reference();
        let sequences = if decode { tokens } else { 1 };
        let order = HeadOrder::HeadMajor;
        let spec = LayerSpec::new(kv_heads, head_dim, capacity, codec).sequences(sequences).order(order);
        let rows: Vec<_> = (0..tokens as u32).map(|t| if decode { (t, 0) } else { (0, t) }).collect();
        let (layer, step) = (KvLayer::new(&device, spec).unwrap(), Step::new(&device, sequences, &rows).unwrap());
        select(&call(layer, step, heads, DType::BF16).unwrap(), limits).unwrap()
    }

    /// Its name.
    fn kernel(
        heads: Heads,
        codec: Codec,
        capacity: usize,
        tokens: usize,
        decode: bool,
        limits: &Limits,
    ) -> &'static str {
        selected(heads, codec, capacity, tokens, decode, limits).name()
    }

    /// The attention of a step's tokens.
    fn call(layer: KvLayer, step: Step, heads: usize, dtype: DType) -> Result<Call> {
        let (tokens, head_dim) = (step.tokens(), layer.spec().head_dim);
        let new = || Tensor::zeros(layer.device(), dtype, &[tokens, heads, head_dim]);
        Ok(Call {
            q: new()?,
            out: new()?,
            layer,
            step,
            scale: 1.0,
            softcap: None,
            window: usize::MAX,
            q_rotated: false,
            splits: 0,
            sinks: None,
            span: PageSpan::All,
            earlier: None,
            ends: None,
            tokens,
            heads,
            head_dim,
        })
    }

    /// As above, over a layer of a pool, with 64 query heads and 8 KV heads of 128.
    fn call_over_pages(k: Codec, v: Codec, page_tokens: usize, size: StepSize, dtype: DType) -> Result<Call> {
        let layers = vec![CacheLayer::new(8, 128, k).v(v)];
        let pool = KvPool::new(&Device::reference(), &PoolSpec::new(layers, 1 << 20).page_tokens(page_tokens))?;
        call(pool.layer(0)?.sealed(), pool.reserve_step(size)?, 64, dtype)
    }

    /// One sequence, decode. Columns: H200, A100, RTX 4090.
    #[test]
    fn decode_of_known_models() {
        let (bf16, tq4, tq8) = (Codec::BF16, Codec::tq(4), Codec::tq(8));
        #[rustfmt::skip]
        let cases = [
            (LLAMA_3_70B,    bf16, 8192, ["attend_decode",          "attend_decode",    "attend_decode"]),
            (LLAMA_3_70B,    bf16, 1024, ["attend_short",           "attend_decode",    "attend_decode"]),
            (LLAMA_3_70B,    tq4,  8192, ["attend_quantised",       "attend_quantised", "attend_quantised"]),
            (LLAMA_3_70B,    tq4,  1024, ["attend_short_quantised", "attend_quantised", "attend_quantised"]),
            (LLAMA_3_8B,     bf16, 8192, ["attend_decode",          "attend_decode",    "attend_decode"]),
            (LLAMA_3_8B,     bf16, 1024, ["attend_short",           "attend_decode",    "attend_decode"]),
            (QWEN_3_30B_A3B, bf16, 8192, ["attend_decode",          "attend_decode",    "attend_decode"]),
            (MISTRAL_LARGE,  bf16, 8192, ["attend_decode",          "attend_decode",    "attend_decode"]),
            (QWEN_3_235B,    bf16, 1024, ["attend_short",           "attend_decode",    "attend_decode"]),
            (QWEN_3_235B,    tq4,  8192, ["attend_quantised",       "attend_quantised", "attend_quantised"]),
            (PHI_3_MINI,     bf16, 1024, ["attend_generic",         "attend_generic",   "attend_generic"]),
            (GEMMA_3_27B,    bf16, 1024, ["attend_decode",          "attend_decode",    "attend_decode"]),
            (GEMMA_3_4B,     bf16, 1024, ["attend_short",           "attend_decode",    "attend_decode"]),
            (GEMMA_3_4B,     tq8,  8192, ["attend_quantised",       "attend_quantised", "attend_quantised"]),
        ];
        for (heads, codec, capacity, want) in cases {
            let got = [H200, A100, RTX_4090].map(|limits| kernel(heads, codec, capacity, 1, true, &limits));
            let Heads(q, kv, dim) = heads;
            assert_eq!(got, want, "{q} heads, {kv} KV heads, D {dim}, {codec}, {capacity} keys");
        }
    }

    /// On every GPU, shared memory holds the tables of every pair of codecs.
    #[test]
    fn decode_of_all_codecs() {
        for limits in [H200, A100, RTX_4090] {
            for (k, v) in BITS.into_iter().flat_map(|k| BITS.map(|v| (k, v))) {
                for head_dim in [128, 256, 512] {
                    let device = Device::reference();
                    let spec = LayerSpec::new(8, head_dim, 8192, Codec::tq(k)).v(Codec::tq(v));
                    let (layer, step) =
                        (KvLayer::new(&device, spec).unwrap(), Step::new(&device, 1, &[(0, 0)]).unwrap());
                    let call = call(layer, step, 32, DType::BF16).unwrap();
                    let name = select(&call, &limits).unwrap().name();
                    assert_eq!(
                        name, "attend_quantised",
                        "{k} and {v} bits, D {head_dim}, {}",
                        limits.threadgroup_bytes
                    );
                }
            }
        }
    }

    /// Llama-3-70B on an H200: more sequences.
    #[test]
    fn batches() {
        let kernel = |codec, tokens| kernel(LLAMA_3_70B, codec, 2048, tokens, true, &H200);
        assert_eq!(kernel(Codec::BF16, 32), "attend_decode");
        assert_eq!(kernel(Codec::tq(4), 32), "attend_quantised");
    }

    /// Many items over codes of 4 bits: two blocks per multiprocessor if their tables fit.
    #[test]
    fn blocks_of_a_multiprocessor() {
        let (tq4, tq8) = (Codec::tq(4), Codec::tq(8));
        for (head_dim, codec, sequences, want) in [
            (128, tq4, 34, [2, 2, 1]),
            (256, tq4, 34, [2, 2, 1]),
            (256, tq8, 34, [1, 1, 1]),
            (512, tq4, 34, [1, 1, 1]),
            (128, tq4, 16, [1, 1, 1]),
        ] {
            for (limits, want) in [H200, A100, RTX_4090].into_iter().zip(want) {
                let reason = selected(Heads(16, 8, head_dim), codec, 2048, sequences, true, &limits).reason();
                let what = format!("{codec}, D {head_dim}, {sequences} sequences, {}", limits.threadgroup_bytes);
                assert!(reason.contains(&format!("{want} a multiprocessor")), "{what}: {reason}");
            }
        }
    }

    /// One sequence, several tokens, with every head size: the same kernels on all GPUs.
    #[test]
    fn prompts() {
        for limits in [H200, A100, RTX_4090] {
            for heads in [Heads(32, 8, 64), LLAMA_3_70B, GEMMA_3_4B, GEMMA_4_FULL] {
                let kernel = |codec, tokens| kernel(heads, codec, 2048, tokens, false, &limits);
                assert_eq!(kernel(Codec::BF16, 512), "attend_prefill", "D {}, {limits:?}", heads.2);
                assert_eq!(kernel(Codec::BF16, 3), "attend_generic");
                assert_eq!(kernel(Codec::tq(4), 512), "attend_generic");
            }
            assert_eq!(kernel(PHI_3_MINI, Codec::BF16, 2048, 512, false, &limits), "attend_generic");
        }
    }

    /// Prompts over quantised pages are decoded to the dtype of the queries, if that is bf16.
    #[test]
    fn quantised_prompts() -> Result<()> {
        let bf16 = DType::BF16;
        for (k, v, dtype, longest, limits, want) in [
            (Codec::tq(4), Codec::tq(4), bf16, 8192, H200, "attend_prefill"),
            (Codec::tq_centred(3), Codec::tq(2), bf16, 8192, H200, "attend_prefill"),
            (Codec::BF16, Codec::tq(8), bf16, 8192, H200, "attend_prefill"),
            (Codec::F16, Codec::tq(8), bf16, 8192, H200, "attend_generic"),
            (Codec::tq(4), Codec::tq(4), DType::F16, 8192, H200, "attend_generic"),
            (Codec::tq(4), Codec::tq(4), bf16, 8192, A100, "attend_prefill"),
            (Codec::tq(4), Codec::BF16, bf16, 8192, RTX_4090, "attend_prefill"),
            // More than a gigabyte of keys.
            (Codec::tq(4), Codec::tq(4), bf16, 1 << 20, H200, "attend_generic"),
        ] {
            let call = call_over_pages(k, v, 64, StepSize::decode(4, longest).tokens(64, 32), dtype)?;
            assert_eq!(select(&call, &limits)?.name(), want, "{k}, {v}, {dtype}, {longest}");
        }
        Ok(())
    }

    /// Page means change the kernel only for short contexts over pages of 16 positions.
    #[test]
    fn page_means() -> Result<()> {
        let (tq, centred) = (Codec::tq, Codec::tq_centred);
        for (k, v, page_tokens, longest, want) in [
            (tq(4), tq(4), 64, 8192, "attend_quantised"),
            (centred(4), tq(4), 64, 8192, "attend_quantised"),
            (tq(6), centred(8), 16, 8192, "attend_quantised"),
            (centred(8), centred(8), 64, 8192, "attend_quantised"),
            (centred(3), centred(2), 64, 8192, "attend_quantised"),
            (centred(5), tq(2), 64, 8192, "attend_quantised"),
            (tq(3), centred(3), 128, 512, "attend_short_quantised"),
            (tq(4), tq(4), 16, 512, "attend_short_quantised"),
            (centred(4), centred(4), 32, 512, "attend_short_quantised"),
            (tq(8), centred(6), 64, 512, "attend_short_quantised"),
            (centred(4), centred(4), 16, 512, "attend_quantised"),
        ] {
            let call = call_over_pages(k, v, page_tokens, StepSize::decode(1, longest), DType::BF16)?;
            assert_eq!(select(&call, &H200)?.name(), want, "{k}, {v}, {page_tokens}, {longest}");
        }
        Ok(())
    }

    /// A call over a part of the positions, whose result a later call merges in f32, uses the kernels of 16-bit
    /// outputs.
    #[test]
    fn spans() -> Result<()> {
        let (decode, prompt) = (StepSize::decode(1, 8192), StepSize::decode(1, 8192).tokens(512, 512));
        let (bf16, tq4c) = (Codec::BF16, Codec::tq_centred(4));
        for (span, codec, size, want) in [
            (PageSpan::First, bf16, decode, ["attend_short", "attend_decode"]),
            (PageSpan::Sealed, tq4c, decode, ["attend_quantised"; 2]),
            (PageSpan::Recent, bf16, decode, ["attend_short", "attend_decode"]),
            (PageSpan::Exact, bf16, decode, ["attend_short", "attend_decode"]),
            (PageSpan::First, bf16, prompt, ["attend_prefill"; 2]),
            (PageSpan::Sealed, tq4c, prompt, ["attend_prefill"; 2]),
            (PageSpan::Recent, bf16, prompt, ["attend_prefill"; 2]),
        ] {
            let mut call = call_over_pages(codec, codec, 64, size, DType::BF16)?;
            let zeros = |shape: &[usize]| Tensor::zeros(call.q.device(), DType::F32, shape);
            let results = Results { out: zeros(call.q.shape())?, ends: zeros(&[call.tokens, call.heads])? };
            call.earlier = Some(results.clone()).filter(|_| span != PageSpan::First);
            if ![PageSpan::Recent, PageSpan::Exact].contains(&span) {
                (call.out, call.ends) = (results.out, Some(results.ends));
            }
            call.span = span;
            for (limits, want) in [H200, A100].iter().zip(want) {
                assert_eq!(select(&call, limits)?.name(), want, "{span:?}, {} tokens", call.tokens);
            }
        }
        Ok(())
    }
}
