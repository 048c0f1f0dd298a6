//! Every CUDA kernel but those of attention compiles for an H200, on any machine that has libnvrtc: the launches that the
//! operations build are handed to the compiler instead of a GPU. Whether the kernels are right is for the conformance
//! tests to say, on a GPU.

use std::{
    any::Any,
    collections::HashSet,
    ptr::NonNull,
    sync::{Arc, Mutex},
};

use kvant::{
    Codec, DType, Device, Encoder, Error, KvLayer, LayerSpec, Result, SlotOrder, Step, Tensor,
    gpu::{self, Executor, Launch, LaunchPass, Limits, Memory, Replay, Wait, compile_cuda},
    ops::{
        self, Activation, Affine, Angles, Argmax, Columns, Embed, Experts, Gate, Hadamard, HeadNorm, KvRead, KvSide,
        KvWrite, Linear, MoeCombine, MoeRoute, NormRope, NormRopeWrite, PairLayout, Residual, RmsNorm, Rope, Sample,
        Softcap, SourceOrder, Weight,
    },
};

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Compiles what it is asked to run, each kernel once.
#[derive(Clone, Default)]
struct Compiler {
    seen: Arc<Mutex<HashSet<String>>>,
}

struct Nothing;

impl Memory for Nothing {
    fn host(&self) -> Option<NonNull<u8>> {
        None
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Executor for Compiler {
    fn name(&self) -> String {
        "a compiler without a GPU".to_string()
    }
    fn limits(&self) -> Limits {
        Limits { threads: 1024, threadgroup_bytes: 227 << 10, busy_groups: 132 }
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
    fn capture(self: Arc<Self>, _launches: Vec<Launch>) -> Result<Box<dyn Replay>> {
        unreachable!("nothing is captured here")
    }
}

impl LaunchPass for Compiler {
    fn launch(&mut self, launch: Launch) -> Result<()> {
        let key = format!("{}/{} {:?}", launch.source.name, launch.kernel, launch.constants);
        if !self.seen.lock().unwrap().insert(key) {
            return Ok(());
        }
        let fault = |reason| Error::DeviceFault { device: "nvrtc".to_string(), reason };
        let code = compile_cuda(&launch, "sm_90a").map_err(fault)?;
        assert!(code.starts_with(b"\x7fELF"), "{launch:?}: not a cubin");
        Ok(())
    }
    fn commit(self: Box<Self>) -> Result<Box<dyn Wait>> {
        Ok(Box::new(Compiler::default()))
    }
}

impl Wait for Compiler {
    fn wait(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

fn device() -> Option<(Device, Compiler)> {
    if !gpu::has_cuda_compiler() {
        eprintln!("libnvrtc cannot be loaded: the CUDA kernels are not compiled on this machine");
        return None;
    }
    let compiler = Compiler::default();
    Some((gpu::cuda_device(compiler.clone()), compiler))
}

#[test]
fn every_kernel_compiles() -> Result<()> {
    let Some((device, compiler)) = device() else { return Ok(()) };
    let mut enc = device.encoder()?;
    for dtype in FLOATS {
        elements(&device, &mut enc, dtype)?;
        products(&device, &mut enc, dtype)?;
    }
    for codec in [Codec::F32, Codec::F16, Codec::BF16, Codec::tq(4), Codec::tq(5), Codec::tq(6), Codec::tq(8)] {
        caches(&device, &mut enc, codec)?;
    }
    enc.commit()?.wait()?;
    let seen = compiler.seen.lock().unwrap();
    let files: HashSet<&str> = seen.iter().filter_map(|key| key.split('/').next()).collect();
    println!("{} kernels of {} files", seen.len(), files.len());
    assert!(files.len() >= 14, "only {files:?}");
    Ok(())
}

fn zeros(device: &Device, dtype: DType, shape: &[usize]) -> Result<Tensor> {
    Tensor::zeros(device, dtype, shape)
}

fn elements(device: &Device, enc: &mut Encoder, dtype: DType) -> Result<()> {
    // Aligned rows, and rows that are not.
    for dim in [64, 67] {
        let x = zeros(device, dtype, &[3, dim])?;
        let (out, other) = (zeros(device, DType::BF16, &[3, dim])?, zeros(device, dtype, &[3, dim])?);
        ops::softcap(enc, &Softcap { x: &x, cap: 30.0, out: &out })?;
        let weight = zeros(device, dtype, &[dim])?;
        let residuals = [Residual::None, Residual::After(&other), Residual::Before { residual: &other, sum: &other }];
        for residual in residuals {
            ops::rms_norm(enc, &RmsNorm { x: &x, weight: Some(&weight), eps: 1e-6, residual, scale: 1.0, out: &out })?;
        }
        for activation in [Activation::GeluTanh, Activation::Silu] {
            let (gate, up) = (Columns::all(&x), Columns::all(&other));
            ops::gate(enc, &Gate { gate, up, activation, out: &out })?;
        }
        let ids = zeros(device, DType::U32, &[3])?;
        ops::argmax(enc, &Argmax { x: &x, out: &ids })?;
        for (top_k, top_p) in [(0, 1.0), (5, 1.0), (5, 0.5)] {
            let (counter, seed) = (&ids.reshape(&[3])?, 1);
            let drawn = zeros(device, DType::U32, &[3])?;
            let args = Sample { logits: &x, temperature: 1.0, top_k, top_p, min_p: 0.1, seed, counter, out: &drawn };
            ops::sample(enc, &args)?;
        }
        let weights = zeros(device, DType::F32, &[3, 2])?;
        let chosen = zeros(device, DType::U32, &[3, 2])?;
        ops::moe_route(enc, &MoeRoute { logits: &x, expert_scale: None, ids: &chosen, weights: &weights })?;
        let rows = zeros(device, dtype, &[6, dim])?;
        ops::moe_combine(enc, &MoeCombine { x: &rows, weights: &weights, out: &out })?;
    }
    let rows = zeros(device, dtype, &[3, 512])?;
    let out = zeros(device, DType::F32, &[3, 512])?;
    for inverse in [false, true] {
        ops::hadamard(enc, &Hadamard { x: &rows, inverse, out: &out })?;
    }
    Ok(())
}

fn products(device: &Device, enc: &mut Encoder, dtype: DType) -> Result<()> {
    let (n, k) = (64, 256);
    let dense = zeros(device, dtype, &[n, k])?;
    let ids = zeros(device, DType::U32, &[3])?;
    let embedded = zeros(device, DType::BF16, &[3, k])?;
    for bits in [0usize, 4, 6, 8] {
        let codes = zeros(device, DType::U32, &[n, k * bits.max(1) / 32])?;
        let scales = zeros(device, dtype, &[n, k / 64])?;
        let affine = Affine { codes: &codes, scales: &scales, biases: &scales, bits: bits as u32, group: 64 };
        let weight = if bits == 0 { Weight::Dense(&dense) } else { Weight::Affine(affine) };
        ops::embed(enc, &Embed { table: weight, ids: &ids, scale: 1.0, out: &embedded })?;
        // Few rows, and many.
        for rows in [1, 2, 5, 60] {
            let (x, out) = (zeros(device, dtype, &[rows, k])?, zeros(device, dtype, &[rows, n])?);
            ops::linear(enc, &Linear { x: &x, weight, experts: None, alpha: 1.0, out: &out })?;
        }
    }
    let experts = zeros(device, dtype, &[2, n, k])?;
    for tokens in [1, 30] {
        let (x, ids) = (zeros(device, dtype, &[tokens, k])?, zeros(device, DType::U32, &[tokens, 2])?);
        let out = zeros(device, dtype, &[2 * tokens, n])?;
        let choice = Some(Experts { ids: &ids, expanded: false });
        let weight = Weight::Dense(&experts);
        ops::linear(enc, &Linear { x: &x, weight, experts: choice, alpha: 1.0, out: &out })?;
    }
    Ok(())
}

fn caches(device: &Device, enc: &mut Encoder, codec: Codec) -> Result<()> {
    let (sequences, kv_heads, capacity, head_dim) = (1, 2, 8, 64);
    let order = SlotOrder::HeadMajor;
    let spec = LayerSpec { sequences, kv_heads, capacity, head_dim, k: codec, v: codec, ring: true, order };
    let layer = KvLayer::new(device, spec)?;
    let step = Step::new(device, 1, &[(0, 0), (0, 1)])?;
    let order = SourceOrder::TokenMajor;
    let tables = zeros(device, DType::F32, &[16, 32])?;
    let factors = zeros(device, DType::F32, &[32])?;
    for dtype in FLOATS {
        let (kv, q) = (zeros(device, dtype, &[2, 2, 64])?, zeros(device, dtype, &[2, 4, 64])?);
        let (back, q_out) = (zeros(device, dtype, &[2, 2, 64])?, zeros(device, DType::BF16, &[2, 4, 64])?);
        ops::kv_write(enc, &KvWrite { k: &kv, v: &kv, order, first_token: 0, step: &step, layer: &layer })?;
        for keep_rotated in [false, true] {
            let (side, sequence, start) = (KvSide::K, 0, 0);
            let args = KvRead { layer: &layer, side, sequence, start, keep_rotated, order, out: &back };
            ops::kv_read(enc, &args)?;
        }
        let weight = zeros(device, dtype, &[64])?;
        let norm = Some(HeadNorm { weight: Some(&weight), eps: 1e-6 });
        let angles = [
            (Angles::Theta(1e4), None),
            (Angles::Theta(1e4), Some(&factors)),
            (Angles::Tables { cos: &tables, sin: &tables }, None),
        ];
        for (angles, freq_factors) in angles {
            for layout in [PairLayout::Halves, PairLayout::Interleaved] {
                let rope = Some(Rope { angles, rotated_pairs: 32, layout, freq_factors });
                let rotate_q = codec.is_quantised();
                let args = NormRopeWrite {
                    q: &q,
                    k: &kv,
                    v: &kv,
                    q_norm: norm,
                    k_norm: norm,
                    v_norm: None,
                    rope,
                    rotate_q,
                    step: &step,
                    layer: &layer,
                    q_out: &q_out,
                };
                ops::norm_rope_write(enc, &args)?;
                let positions = &step.positions;
                let args = NormRope { x: &q, norm, rope, positions, rotate: rotate_q, out_order: order, out: &q_out };
                ops::norm_rope(enc, &args)?;
            }
        }
    }
    Ok(())
}
