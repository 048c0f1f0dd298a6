//! The CPU backend.

use crate::{
    Result,
    device::DeviceKind,
    host::HostExecutor,
    ops::{self, Call, check},
};

mod add_bias;
mod all_gather;
mod all_reduce;
#[cfg(target_arch = "x86_64")]
mod amx_product;
mod argmax;
mod attend;
mod causal_conv;
mod convert;
mod copy;
mod cores;
mod delta_rule;
mod elements;
mod embed;
mod gate;
mod hadamard;
mod key_bias;
mod kv_read;
mod kv_write;
mod linear;
mod merge_attention;
mod moe;
mod norm_rope;
mod norm_rope_write;
mod planes;
mod rms_norm;
mod sample;
mod scratch;
mod seal;
mod simd;
mod softcap;
mod spread;
#[cfg(test)]
mod testing;
mod thread_pool;
mod turboquant;

pub use simd::SimdLevel;
pub(crate) use thread_pool::ThreadPool;

/// This backend's rows of the accuracy table in `ops/mod.rs`, in the table's order: attention, then products.
#[cfg(test)]
pub(crate) fn accuracy_rows() -> [Vec<String>; 2] {
    [attend::accuracy::rows(), linear::accuracy::rows()]
}

/// Options of a CPU device; the default uses the best instruction set and all physical cores.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuOptions {
    /// Threads, the calling one included; `None` for one per physical core that the process may use. Only Linux reports
    /// which CPUs share a core; elsewhere each CPU counts as one core.
    pub threads: Option<usize>,
    /// The instruction set; `None` for the best.
    pub simd: Option<SimdLevel>,
    /// Whether [`ops::linear`](ops::linear()) may round the activations of 16 rows or more for one matrix to 8 bits,
    /// which makes prompts faster. With normal activations, results err by 0.4 to 0.6 % of their root mean square. With
    /// AMX, it rounds activations and weights to bf16 if the product has 48 rows or more (16 for 16-bit weights): 0.25
    /// %. No effect at levels without VNNI, for f32 and MXFP8 weights, and for 16-bit weights without AMX.
    pub eight_bit_activations: bool,
    /// Whether the results of a token depend only on its own sequence, bit for bit: not on other tokens in the batch,
    /// the chunks of a prompt, or the number of threads. Kernels for many rows are not used, so prompts are slower.
    /// Excludes `eight_bit_activations`.
    pub batch_invariant: bool,
}

impl CpuOptions {
    /// The threads of a device for which the options name none: one per physical core.
    pub fn default_threads() -> usize {
        cores::cores().min(MAX_THREADS)
    }
}

const MAX_THREADS: usize = 1024;

/// The CPU device's executor.
pub(crate) struct Cpu {
    threads: ThreadPool,
    level: SimdLevel,
    eight_bit_activations: bool,
    batch_invariant: bool,
}

impl Cpu {
    pub(crate) fn new(options: CpuOptions) -> Result<Cpu> {
        let threads = options.threads.unwrap_or_else(CpuOptions::default_threads);
        check::value_is("cpu", "threads", (1..=MAX_THREADS).contains(&threads), "1 to 1024", threads)?;
        let level = options.simd.unwrap_or_else(SimdLevel::best);
        check::value_is("cpu", "simd", level.is_supported(), "an instruction set of this machine", level)?;
        let CpuOptions { eight_bit_activations, batch_invariant, .. } = options;
        let excluded = eight_bit_activations && batch_invariant;
        check::value_is(
            "cpu",
            "eight_bit_activations",
            !excluded,
            "false with `batch_invariant`",
            eight_bit_activations,
        )?;
        Ok(Cpu { threads: ThreadPool::new(threads), level, eight_bit_activations, batch_invariant })
    }

    /// The number of rows that selects a kernel for `rows` rows: 1 if results must be batch-invariant.
    fn selecting_rows(&self, rows: usize) -> usize {
        if self.batch_invariant { rows.min(1) } else { rows }
    }
}

impl HostExecutor for Cpu {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Cpu
    }

    fn name(&self) -> String {
        let option = match self {
            Cpu { eight_bit_activations: true, .. } => ", 8-bit activations",
            Cpu { batch_invariant: true, .. } => ", batch-invariant",
            _ => "",
        };
        format!("{}, {} threads{option}", self.level, self.threads.threads())
    }

    fn run(&self, call: &Call) -> Result<()> {
        match call {
            Call::Add(call) => add_bias::run(self, &call.0),
            Call::AddBias(call) => add_bias::run(self, call),
            Call::AllGather(call) => all_gather::run(self, call)?,
            Call::AllReduce(call) => all_reduce::run(self, call)?,
            Call::Argmax(call) => argmax::run(self, call),
            Call::Attend(call) => attend::run(self, call),
            Call::CausalConv(call) => causal_conv::run(self, call),
            Call::Copy(call) => copy::run(self, call),
            Call::DeltaRule(call) => delta_rule::run(self, call),
            Call::Embed(call) => embed::run(self, call),
            Call::Gate(call) => gate::run(self, call),
            Call::Hadamard(call) => hadamard::run(self, call),
            Call::KvRead(call) => kv_read::run(self, call),
            Call::KvWrite(call) => kv_write::run(self, call),
            Call::Linear(call) => linear::run(self, call),
            Call::MergeAttention(call) => merge_attention::run(self, call)?,
            Call::MoeCombine(call) => moe::run_combine(self, call),
            Call::MoeRoute(call) => moe::run_route(self, call),
            Call::NormRope(call) => norm_rope::run(self, call),
            Call::NormRopeWrite(call) => norm_rope_write::run(self, call),
            Call::RmsNorm(call) => rms_norm::run(self, call)?,
            Call::Sample(call) => sample::run(self, call),
            Call::Seal(call) => seal::run(self, call),
            Call::Softcap(call) => softcap::run(self, call),
            Call::Spread(call) => spread::run(self, call),
        }
        Ok(())
    }

    fn explain_attend(&self, call: &ops::attend::Call) -> ops::attend::Explanation {
        attend::explain(self, call)
    }
}
