//! Attention of many tokens over quantised pages. A call decodes the visible keys and values to bf16 pages once, and
//! the kernel of prompts reads these pages.

use crate::{
    Codec, DType, Error, Planes, Result, Step,
    cuda::{
        attend::{AttendParams, HeadShares, keys_of_tokens, max_keys, params, prefill::AttendPrefill, with_span},
        headers, planes,
    },
    gpu::{Builder, Launch, Limits, Params, Scratch, Source, Use, key_bias},
    ops::attend::{Call, NAME},
};

params! {
    pub(crate) struct AttendUnpackParams {
        pub attend: [u64; size_of::<AttendParams>() / 8],
        pub slots: u32,
        pub slot_pages: u32,
    }
}

static RANGES: Source = Source {
    name: "attend_unpack_ranges.cu",
    text: include_str!("attend_unpack_ranges.cu"),
    headers: headers::ALL,
    layouts: &[AttendParams::layout],
};

static UNPACK: Source = Source {
    name: "attend_unpack.cu",
    text: include_str!("attend_unpack.cu"),
    headers: headers::ALL,
    layouts: &[AttendParams::layout, AttendUnpackParams::layout],
};

const WARPS: usize = 8;
/// Warps of the block that finds the visible ranges.
const RANGE_WARPS: usize = 32;
/// Maximum bytes of decoded keys, and of decoded values.
const MAX_BYTES: usize = 1 << 30;

/// Decoded pages.
pub(super) struct UnpackedPages {
    pub k: Scratch,
    pub v: Scratch,
    pub table: Scratch,
    /// Table entries at or above this value name no page.
    pub entries: u32,
}

/// The kernel of prompts, and the size of the decoded pages.
pub(super) struct AttendUnpack {
    prefill: AttendPrefill,
    slots: usize,
    slot_pages: usize,
    /// Bytes of a decoded page of one side.
    page_bytes: usize,
}

impl AttendUnpack {
    /// Whether bf16 can hold the side's vectors. Quantised ones lose their last bits.
    fn can_read(codec: Codec) -> bool {
        codec.is_quantised() || codec == Codec::BF16
    }

    /// `None` for unsupported caches, and if the visible keys exceed [`MAX_BYTES`].
    pub(super) fn new(call: &Call, limits: &Limits) -> Option<AttendUnpack> {
        let spec = call.layer.spec();
        let page_tokens = call.layer.pages()?.page_tokens;
        if call.q.dtype() != DType::BF16 || ![spec.k, spec.v].into_iter().all(AttendUnpack::can_read) {
            return None;
        }
        // The batch of a step over a pool bounds the contents of the step's buffers on the device.
        let batch = call.step.batch();
        let slots = batch.sequences.min(call.tokens).min(call.step.sequences());
        let seen = keys_of_tokens(call, batch.max_new.max(1));
        let slot_pages = (seen.div_ceil(page_tokens) + 1).min(max_keys(call).div_ceil(page_tokens));
        let page_bytes = spec.kv_heads.checked_mul(page_tokens * call.head_dim * 2)?;
        let bytes = slots.checked_mul(slot_pages)?.checked_mul(page_bytes)?;
        if bytes > MAX_BYTES {
            return None;
        }
        Some(AttendUnpack { prefill: AttendPrefill::new(call, limits)?, slots, slot_pages, page_bytes })
    }

    pub(super) fn reason(&self) -> String {
        let pages = self.slots * self.slot_pages;
        format!("attend_unpack decodes up to {pages} pages to bf16 before; {}", self.prefill.reason())
    }

    /// The launches: two kernels that decode pages, then the kernel of prompts.
    ///
    /// # Errors `OutOfMemory` for the decoded pages, and the errors of a launch.
    pub(super) fn launches(&self, call: &Call, b: &Builder) -> Result<Vec<Launch>> {
        let Some(table) = call.step.table_of(&call.layer) else {
            return Err(Error::Unsupported { op: NAME, device: "cuda", reason: "no pages to unpack".into() });
        };
        let AttendUnpack { slots, slot_pages, page_bytes, .. } = *self;
        let (sequences, width) = (call.step.sequences(), table.shape()[1]);
        let bytes = slots * slot_pages * page_bytes;
        let pages = UnpackedPages {
            k: b.scratch(bytes)?,
            v: b.scratch(bytes)?,
            table: b.scratch(sequences * width * 4)?,
            entries: Launch::uint(NAME, "layer", bytes / crate::layer::PAGE_UNIT)?,
        };
        let ranges = b.scratch(sequences * 3 * 4)?;
        let attend = params(call, HeadShares::whole(call), 0, 0, 1)?;
        let Step { positions, sequence, lens, .. } = &call.step;
        let constants = |launch: Launch, warps: usize| {
            with_span(launch, call)
                .constant("WARPS", warps as u32)
                .constant("TILE", 16u32)
                .constant("RING", false)
                .constant("SHARES", 1u32)
                .constant("LACKING", 0u32)
                .constant("SINKS", false)
                .constant("EARLIER", false)
                .constant("ENDS", false)
                .grid([1; 3], [32 * warps, 1, 1])
        };
        let find = constants(Launch::new(NAME, &RANGES, "attend_unpack_ranges"), RANGE_WARPS)
            .read(0, positions)
            .read(1, sequence)
            .read(2, lens)
            .scratch(3, &ranges, Use::Write)
            .params(4, &attend);
        let params = AttendUnpackParams {
            attend: bytemuck::cast(attend),
            slots: Launch::uint(NAME, "step", slots)?,
            slot_pages: Launch::uint(NAME, "step", slot_pages)?,
        };
        let side = |planes: &Planes, to: &Scratch, unrotate: bool, is_keys: bool| {
            let launch = constants(Launch::new(NAME, &UNPACK, "attend_unpack"), WARPS)
                .constant("HEAD_DIM", call.head_dim as u32)
                .constant("CODEC", planes::codec_code(planes.codec()))
                .constant("UNROTATE", unrotate)
                .constant("TABLE", is_keys);
            let launch = key_bias::bind(launch, 9, call.layer.key_bias().filter(|_| is_keys));
            let launch = planes::bind(launch, 0, planes, Use::Read)
                .read_if(3, planes.means.as_ref())
                .scratch(4, to, Use::Write)
                .scratch(5, &ranges, Use::Read)
                .read(6, table)
                .params(8, &params)
                .grid([width, call.layer.spec().kv_heads, sequences], [32 * WARPS, 1, 1]);
            if is_keys { launch.scratch(7, &pages.table, Use::Write) } else { launch }
        };
        // Rotated queries need rotated keys.
        Ok(vec![
            find,
            side(&call.layer.k, &pages.k, !call.q_rotated, true),
            side(&call.layer.v, &pages.v, true, false),
            self.prefill.launch(call, Some(&pages), b)?,
        ])
    }
}
