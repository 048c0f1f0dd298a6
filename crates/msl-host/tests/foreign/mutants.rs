//! Copies of foreign kernels with one error each.

use crate::case::Case;

/// A function of a kernel to break, and the case that must notice.
pub struct Target {
    /// A part of the case's name.
    pub case: &'static str,
    /// The index of the case's unit that has the function, and its file.
    pub unit: usize,
    pub file: &'static str,
    /// The text at the start of the function, which ends with a brace at the start of a line.
    pub function: &'static str,
    /// Changes in addition to dropped barriers: text, replacement.
    pub changes: &'static [(&'static str, &'static str)],
    /// Mutants without effect: parts of their descriptions.
    pub harmless: &'static [&'static str],
    pub chosen: bool,
}

pub struct Mutant {
    pub what: String,
    /// The file and its new text.
    pub edit: (String, String),
}

impl Target {
    /// Drops each barrier of the function, then applies each change at the first occurrence of its text.
    pub fn mutants(&self, case: &Case) -> Vec<Mutant> {
        let text = case.units[self.unit].text(self.file);
        let start = text.find(self.function).unwrap_or_else(|| panic!("{}: no {}", self.file, self.function));
        let end = text[start..].find("\n}").map_or(text.len(), |n| start + n);
        let mut mutants = Vec::new();
        let mut replace = |what: String, at: usize, len: usize, with: &str| {
            let changed = format!("{}{with}{}", &text[..at], &text[at + len..]);
            mutants.push(Mutant { what, edit: (self.file.into(), changed) });
        };
        for barrier in ["threadgroup_barrier(", "simdgroup_barrier("] {
            for (number, (at, _)) in text[start..end].match_indices(barrier).enumerate() {
                let at = start + at;
                let len = text[at..end].find(')').map_or(0, |n| n + 1);
                replace(format!("{} {} dropped", &barrier[..barrier.len() - 1], number + 1), at, len, "");
            }
        }
        for (from, to) in self.changes {
            let at = text[start..end].find(from).unwrap_or_else(|| panic!("{}: no {from}", self.function));
            replace(format!("`{from}` is `{to}`"), start + at, from.len(), to);
        }
        mutants
    }
}

const fn target(
    case: &'static str,
    file: &'static str,
    function: &'static str,
    changes: &'static [(&'static str, &'static str)],
) -> Target {
    Target { case, unit: 0, file, function, changes, harmless: &[], chosen: false }
}

const fn chosen(target: Target) -> Target {
    Target { chosen: true, ..target }
}

const fn harmless(target: Target, harmless: &'static [&'static str]) -> Target {
    Target { harmless, ..target }
}

/// Harmless mutants drop barriers that order no memory or no shared memory, barriers within a SIMD-group whose lanes
/// run in lockstep, or change branches that the case does not take.
pub const TARGETS: &[Target] = &[
    chosen(target(
        "kernel_rms_norm_mul_f32_4, 64 threads",
        "norm.metal",
        "kernel void kernel_rms_norm_fuse_impl",
        &[
            ("i00 += ntg.x", "i00 += ntg.x + 1"),
            ("shmem_f32[sgitg] =", "shmem_f32[0] ="),
            ("sumf/args.ne00", "sumf/args.ne00_t"),
        ],
    )),
    target(
        "kernel_norm_mul_add_f32_4, 64 threads",
        "norm.metal",
        "kernel void kernel_norm_fuse_impl",
        &[("= tpitg.x;", "= tpitg.x + 1;"), ("shmem_f32[tiisg] = 0.0f", "shmem_f32[0] = 0.0f")],
    ),
    target(
        "kernel_soft_max_f32_4",
        "softmax.metal",
        "kernel void kernel_soft_max_4",
        &[("< args.ne00/4", "<= args.ne00/4"), ("buf[sgitg] = max_val", "buf[tiisg] = max_val")],
    ),
    target(
        "kernel_rope_neox_f16",
        "rope.metal",
        "kernel void kernel_rope_neox",
        &[("2*tiitg", "2*tiitg + 2"), ("src[args.n_dims/2]", "src[args.n_dims/2 + 1]")],
    ),
    target(
        "argsort: ascending",
        "argsort.metal",
        "kernel void kernel_argsort_f32_i32(",
        &[("k <= ntg.x", "k < ntg.x"), ("col ^ j", "col ^ (j - 1)"), ("ixj > col", "ixj < col")],
    ),
    target(
        "kernel_mul_mv_q8_0_f32",
        "mul_mv.metal",
        "static inline void helper_mv_reduce_and_write",
        &[("shmem_f32[row][sgitg] =", "shmem_f32[row][0] =")],
    ),
    target(
        "kernel_mul_mv_q4_0_f32",
        "mul_mv.metal",
        "void mul_vec_q_n_f32_impl",
        &[("ib < nb; ib += NQ", "ib <= nb; ib += NQ"), ("r0 + row < args.ne01", "r0 + row + 1 < args.ne01")],
    ),
    // The definition without Metal's tensors.
    harmless(
        target(
            "kernel_mul_mm_q4_0_f32",
            "mul_mm.metal",
            "threadgroup S1 * sb = (threadgroup S1 *)(shmem + 4096);",
            &[],
        ),
        &["threadgroup_barrier 1 ", "simdgroup_barrier"],
    ),
    harmless(
        target(
            "kernel_flash_attn_ext_vec_f16_dk128_dv128, 1 threadgroups",
            "fa_vec_common.metal",
            "kernel void kernel_flash_attn_ext_vec(",
            &[
                ("ic >= args.ne11", "ic > args.ne11"),
                ("ss[qq*C + NE*tx + ty] = fma", "ss[qq*C + NE*tx + ty + 1] = fma"),
            ],
        ),
        &["simdgroup_barrier", "threadgroup_barrier 3"],
    ),
    chosen(target(
        "softmax_single_row<float, float>",
        "softmax.h",
        "[[kernel]] void softmax_single_row",
        &[("N_READS <= axis_size", "N_READS <= axis_size + 1"), ("lid * N_READS;", "lid * N_READS + 1;")],
    )),
    harmless(
        target(
            "hadamard_n<float, 128, 4, 4>",
            "hadamard.h",
            "[[kernel]] void hadamard_n",
            &[("j + h * r", "j + h * (r + 1)"), ("h <<= logR", "h <<= 1")],
        ),
        &["threadgroup_barrier 1"],
    ),
    target(
        "block_sort<half, uint, true, 64, 8>",
        "sort.h",
        "struct BlockMergeSort",
        &[("sort_st + sort_sz / 2", "sort_st + sort_sz / 2 + 1"), ("merge_threads <= BLOCK", "merge_threads < BLOCK")],
    ),
    target(
        "sdpa_vector<half, 128, 128>",
        "sdpa_vector.h",
        "[[kernel]] void sdpa_vector(",
        &[("i <= (N - int(tpg.y)", "i < (N - int(tpg.y)"), ("max_scores[simd_gid]", "max_scores[0]")],
    ),
    harmless(
        target("affine_qmm_t<half, 64, 4, true, false>", "quantized.h", "METAL_FUNC void qmm_t_impl(", &[]),
        &["barrier 1 ", "barrier 2 ", "barrier 5 ", "barrier 6 ", "barrier 9 "],
    ),
    target(
        "affine_qmv_fast<half, 64, 4, false>",
        "quantized.h",
        "METAL_FUNC void qmv_fast_impl(",
        &[("row < results_per_simdgroup", "row <= results_per_simdgroup"), ("tid.y * (", "(tid.y + 1) * (")],
    ),
    harmless(
        target(
            "steel attention<half, 32, 16, 128, 128",
            "steel/attn/kernels/steel_attention.h",
            "[[kernel, max_total_threads_per_threadgroup(WM * WN * 32)]] void attention(",
            &[],
        ),
        &[
            "threadgroup_barrier 1 ",
            "threadgroup_barrier 4 ",
            "threadgroup_barrier 5 ",
            "threadgroup_barrier 8 ",
            "simdgroup_barrier",
        ],
    ),
];
