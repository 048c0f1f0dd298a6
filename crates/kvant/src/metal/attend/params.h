// Parameters and function constants of the attention kernels.
#ifndef KVANT_ATTEND_PARAMS_H
#define KVANT_ATTEND_PARAMS_H
#include "planes.h"

struct MetalAttendParams {
    uint tokens;
    uint sequences;
    uint heads;
    uint kv_heads;
    uint group;      // query heads of a KV head, G
    uint capacity;   // maximum positions; with pages, those for which the page table has entries
    uint window;     // 2^32 - 1 for none
    uint tile_rows;  // of a threadgroup
    uint splits;
    uint min_keys; // of a split, except the last one
    float scale;
    float softcap;
    uint page_width;
    uint page_entries;
};

constant uint Q_DTYPE [[function_constant(0)]];
constant uint OUT_DTYPE [[function_constant(1)]];
constant uint K_CODEC [[function_constant(2)]];
constant uint V_CODEC [[function_constant(3)]];
// Whether dense keys (values), and queries, are aligned for loads of four elements.
constant bool K_ALIGNED [[function_constant(4)]];
constant bool V_ALIGNED [[function_constant(5)]];
constant bool Q_ALIGNED [[function_constant(6)]];
constant bool RING [[function_constant(7)]];
// The layer's order: a token's vectors are contiguous, instead of a head's.
constant bool TOKEN_MAJOR [[function_constant(8)]];
constant bool SOFTCAP [[function_constant(9)]];
constant bool Q_ROTATED [[function_constant(10)]];
// The kernel writes states for attend_merge instead of results.
constant bool PARTIAL [[function_constant(11)]];
// A page holds 2 to this power positions; 0 without pages.
constant uint PAGE_SHIFT [[function_constant(12)]];

// Each query head has a sink, a score without a value.
constant bool SINKS [[function_constant(13)]];
// The span of the seen positions that the call attends to: ops::attend::PageSpan.
constant uint SPAN [[function_constant(14)]];
// The results over other positions are merged with those of the call.
constant bool EARLIER [[function_constant(15)]];
// A later call merges the results: their ends are stored, too.
constant bool ENDS [[function_constant(16)]];
// Keys are stored without a bias, whose product with the query is added to the score.
constant bool KEY_BIAS [[function_constant(17)]];

// The spans (metal/attend/mod.rs).
constant constexpr uint FIRST_PAGE = 1;
constant constexpr uint SEALED_PAGES = 2;
constant constexpr uint RECENT_PAGES = 3;

constant bool K_QUANTISED = K_CODEC >= TQ2;
constant bool V_QUANTISED = V_CODEC >= TQ2;
constant bool K_HIGH = (WITH_HIGH >> K_CODEC % CENTRED & 1) != 0;
constant bool V_HIGH = (WITH_HIGH >> V_CODEC % CENTRED & 1) != 0;
constant bool K_CENTRED = (K_CODEC & CENTRED) != 0;
constant bool V_CENTRED = (V_CODEC & CENTRED) != 0;
constant bool WHOLE = !PARTIAL;
constant bool PAGED = PAGE_SHIFT != 0;
constant bool SINKS_HERE = SINKS && WHOLE;
constant bool EARLIER_HERE = EARLIER && WHOLE;
constant bool ENDS_HERE = ENDS && WHOLE;

#endif
