// kv_write: new keys and values, [T, Hk, D] or [Hk, T, D], into the slots of a cache layer, both in one launch.
//
// A threadgroup takes one vector: group.x is its head, group.y the token, group.z 0 for the key and 1 for the value. A
// dense layer of the source's dtype gets its bits. A token that the layer does not hold when the step is written, that
// has no page, or whose sequence or position is out of range, is skipped, so that no slot is written twice.
//
// Around page means (page_means.h) a step of several tokens of a sequence has two passes, each with a launch of
// page_means and one of kv_write.
//
// page_means: the means of the pages that a step opens. A threadgroup takes a head of a token, as in kv_write, and has
// work if the token has the first position of a page. Threads share the coordinates and the vectors. In the first pass
// the threadgroups of the first head also write, for each token, whether it belongs to the second (`second`).
#include "page_means.h"

struct KvWriteParams {
    ulong first_token;
    ulong source_tokens;
    uint tokens;
    uint position_limit; // tokens from this position on are skipped; with passes alone
    LayerParams layer;
    float k_scale;
    float v_scale;
    uint head_dim;
};

constant uint K_DTYPE [[function_constant(0)]];
constant uint V_DTYPE [[function_constant(1)]];
constant uint K_CODEC [[function_constant(2)]];
constant uint V_CODEC [[function_constant(3)]];
constant uint K_NORM [[function_constant(4)]];
constant uint V_NORM [[function_constant(5)]];
constant bool HEAD_MAJOR [[function_constant(6)]];
constant bool ALIGNED [[function_constant(7)]];
constant uint PAGE_SHIFT [[function_constant(8)]];
constant uint PASS [[function_constant(9)]];
constant bool PAGED = PAGE_SHIFT != 0;
constant bool K_HAS_HIGH = (WITH_HIGH >> K_CODEC % CENTRED & 1) != 0;
constant bool V_HAS_HIGH = (WITH_HIGH >> V_CODEC % CENTRED & 1) != 0;
constant bool K_HAS_NORMS = K_CODEC >= TQ2;
constant bool V_HAS_NORMS = V_CODEC >= TQ2;
constant bool HAS_PASSES = PASS != ALONE;
constant bool K_HAS_MEANS = (K_CODEC & CENTRED) != 0;
constant bool V_HAS_MEANS = (V_CODEC & CENTRED) != 0;

// The source of a side.
struct Source {
    device const uchar *rows;
    uint dtype;

    ulong row(constant KvWriteParams &p, uint token, uint head) const {
        const ulong at = p.first_token + token;
        return HEAD_MAJOR ? ulong(head) * p.source_tokens + at : at * p.layer.kv_heads + head;
    }
};

// Moves the vector of a token. `row` holds D floats if a side of the layer is quantised, `room` WRITE_ROOM.
inline void write(constant KvWriteParams &p, StepTokens step, device const uint *second, Source source,
                  WritablePlanes planes, Encoding encoding, uint token, uint head, threadgroup float *row,
                  threadgroup float *room, Place place) {
    const uint position = step.positions[token], seq = step.sequence[token], dim = p.head_dim;
    if (!is_kept(p.layer, seq, position, step.lens) || (PASS != ALONE && position >= step.limit) ||
        (PASS == SECOND_PASS && !is_centred(encoding.codec))) {
        return;
    }
    const RowPlace at = layer_place(p.layer, step.table, PAGE_SHIFT, seq, head, position);
    if (!at.held) {
        return;
    }
    const uint index = index_of(place), threads = threads_of(place);
    const ulong from = source.row(p, token, head) * dim;
    if (!is_quantised(encoding.codec)) {
        device uchar *to = planes.low + at.bytes;
        move_row(source.rows, from, source.dtype, to, at.row * dim, encoding.codec, dim, ALIGNED, index, threads);
        return;
    }
    if (is_centred(encoding.codec) && PASS != ALONE) {
        if ((second[token] != 0) != (PASS == SECOND_PASS)) {
            return;
        }
        load_row(row, source.rows, from, dim, source.dtype, ALIGNED, index, threads);
        write_row_around(row, room, planes, at, head, dim, encoding, false, at, PAGE_SHIFT, place);
        return;
    }
    load_row(row, source.rows, from, dim, source.dtype, ALIGNED, index, threads);
    write_alone(row, room, planes, at, p.layer, step, seq, position, head, dim, PAGE_SHIFT, encoding, ALIGNED, place);
}

kernel void kv_write(device const uchar *k [[buffer(0)]],
                     device const uchar *v [[buffer(1)]],
                     device const uint *positions [[buffer(2)]],
                     device const uint *sequence [[buffer(3)]],
                     device const uint *lens [[buffer(4)]],
                     device uchar *k_low [[buffer(5)]],
                     device uchar *k_high [[buffer(6), function_constant(K_HAS_HIGH)]],
                     device uchar *k_norms [[buffer(7), function_constant(K_HAS_NORMS)]],
                     device uchar *v_low [[buffer(8)]],
                     device uchar *v_high [[buffer(9), function_constant(V_HAS_HIGH)]],
                     device uchar *v_norms [[buffer(10), function_constant(V_HAS_NORMS)]],
                     constant KvWriteParams &p [[buffer(11)]],
                     device const uint *table [[buffer(12), function_constant(PAGED)]],
                     device uchar *k_means [[buffer(13), function_constant(K_HAS_MEANS)]],
                     device uchar *v_means [[buffer(14), function_constant(V_HAS_MEANS)]],
                     device const uint *second [[buffer(15), function_constant(HAS_PASSES)]],
                     threadgroup float *row [[threadgroup(0)]],
                     uint3 group [[threadgroup_position_in_grid]],
                     uint lane [[thread_index_in_simdgroup]],
                     uint simdgroup [[simdgroup_index_in_threadgroup]],
                     uint simdgroups [[simdgroups_per_threadgroup]]) {
    const StepTokens step = {positions, sequence, lens, PAGED ? table : nullptr, p.tokens, p.position_limit};
    const Place place = {lane, simdgroup, simdgroups};
    threadgroup float room[WRITE_ROOM];
    device const uint *flags = HAS_PASSES ? second : nullptr;
    if (group.z == 0) {
        const WritablePlanes to = {k_low, K_HAS_HIGH ? k_high : nullptr, K_HAS_NORMS ? k_norms : nullptr,
                                   K_HAS_MEANS ? k_means : nullptr};
        const Encoding encoding = {K_CODEC, K_NORM, p.k_scale};
        write(p, step, flags, Source{k, K_DTYPE}, to, encoding, group.y, group.x, row, room, place);
    } else {
        const WritablePlanes to = {v_low, V_HAS_HIGH ? v_high : nullptr, V_HAS_NORMS ? v_norms : nullptr,
                                   V_HAS_MEANS ? v_means : nullptr};
        const Encoding encoding = {V_CODEC, V_NORM, p.v_scale};
        write(p, step, flags, Source{v, V_DTYPE}, to, encoding, group.y, group.x, row, room, place);
    }
}

// Vectors of the step: those of a page's tokens, NO_TOKEN for positions without one.
struct StepVectors {
    constant KvWriteParams *p;
    Source source;
    threadgroup const uint *tokens;
    threadgroup const uint *finite;
    uint head;

    bool counts(uint i) const {
        return finite[i] != 0;
    }
    float4 quad(uint i, uint j) const {
        const ulong from = source.row(*p, tokens[i], head) * p->head_dim;
        return load4(source.rows, from + j, 4, source.dtype, ALIGNED);
    }
};

// What the threads of page_means share: the token of each position of a page, and whether its vector is finite; room to
// reduce; partial sums or a row.
struct MeanRoom {
    threadgroup uint *tokens;
    threadgroup uint *finite;
    threadgroup float *room;
    threadgroup float *row;
};

// Makes the list of a page's tokens. Ends with a barrier.
inline void list_tokens(constant KvWriteParams &p, StepTokens step, PageOfSequence page, threadgroup uint *tokens,
                        Place place) {
    const uint index = index_of(place), threads = threads_of(place);
    for (uint i = index; i < page.positions(); i += threads) {
        tokens[i] = NO_TOKEN;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint t = index; t < step.count; t += threads) {
        if (is_in(p.layer, step, page, t)) {
            tokens[step.positions[t] - page.first()] = t;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Notes which of the listed vectors are finite, with a finite squared length. Ends with a barrier.
inline void note_finite(constant KvWriteParams &p, Source source, uint head, uint positions, MeanRoom shared,
                        Place place) {
    for (uint i = place.simdgroup; i < positions; i += place.simdgroups) {
        const uint token = shared.tokens[i];
        float squares = 0;
        if (token != NO_TOKEN) {
            const ulong from = source.row(p, token, head) * p.head_dim;
            for (uint j = 4 * place.lane; j < p.head_dim; j += 128) {
                const float4 x = load4(source.rows, from + j, 4, source.dtype, ALIGNED);
                squares += dot(x, x);
            }
        }
        squares = simd_sum(squares);
        if (place.lane == 0) {
            shared.finite[i] = token != NO_TOKEN && is_finite(squares) ? 1 : 0;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// row ← the sum of all vectors that count; returns how many there are. Threads form slices of so many that they have a
// row at a time. At the end a thread may read the quads `index`, `index` + `threads`, … of the row.
template <typename Vectors>
inline uint sum_slices(Vectors vectors, uint positions, uint dim, MeanRoom shared, Place place) {
    const uint index = index_of(place), threads = threads_of(place);
    const uint quads = clamp(dim / 4, 32u, threads), slices = threads / quads;
    const uint slice = index / quads, quad = index % quads;
    float4 sums[MOST_QUADS];
    uint found = sum_vectors(vectors, positions, slice, slices, quad, quads, dim, sums);
    found = reduce<Sum>(quad == 0 ? found : 0, reinterpret_cast<threadgroup uint *>(shared.room), place);
    for (uint k = 0; k < MOST_QUADS; k++) {
        const uint j = 4 * (quad + k * quads);
        if (j < dim) {
            put4(shared.row, slice * dim + j, 4, sums[k], true);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (slices > 1 && 4 * index < dim) {
        float4 sum = get4(shared.row, 4 * index, 4, true);
        for (uint s = 1; s < slices; s++) {
            sum += get4(shared.row, s * dim + 4 * index, 4, true);
        }
        put4(shared.row, 4 * index, 4, sum, true);
    }
    return found;
}

// Chooses the mean of a page that the step opens. All threads call it.
inline void choose_mean(constant KvWriteParams &p, StepTokens step, Source source, WritablePlanes planes, uint codec,
                        PageOfSequence page, uint head, MeanRoom shared, Place place) {
    const uint index = index_of(place), threads = threads_of(place), dim = p.head_dim;
    const RowPlace at = place_of(p.layer, step, page, head);
    device uchar *to = planes.means + at.bytes + head * mean_bytes(dim);
    float4 mean[MOST_QUADS];
    if (PASS == FIRST_PASS) {
        note_finite(p, source, head, page.positions(), shared, place);
        const StepVectors vectors = {&p, source, shared.tokens, shared.finite, head};
        const uint found = sum_slices(vectors, page.positions(), dim, shared, place);
        for (uint j = 4 * index; j < dim; j += 4 * threads) {
            put4(shared.row, j, 4, get4(shared.row, j, 4, true) / float(max(found, 1u)), true);
        }
        rotate(shared.row, 1, dim, false, index, threads);
        for (uint k = 0; k < MOST_QUADS; k++) {
            const uint j = 4 * (index + k * threads);
            mean[k] = coordinates(shared.row, j, j < dim);
        }
    } else {
        const RowPlace from = place_of(p.layer, step, PageOfSequence{page.sequence, page.index - 1, page.shift}, head);
        const Planes stored = shifted(readable(planes), from.bytes, codec);
        const StoredVectors vectors = {stored, head, page.shift, dim, codec};
        const uint found = sum_slices(vectors, page.positions(), dim, shared, place);
        for (uint k = 0; k < MOST_QUADS; k++) {
            const uint j = 4 * (index + k * threads);
            mean[k] = j < dim ? mean_of_stored(get4(shared.row, j, 4, true), found, vectors, j) : float4(0);
        }
    }
    store_mean(mean, to, dim, shared.room, place);
}

// Whether a token belongs to the second pass. All threads call it.
inline bool is_second(constant KvWriteParams &p, StepTokens step, uint token, threadgroup uint *counts, Place place) {
    const uint position = step.positions[token];
    const PageOfSequence page = {step.sequence[token], position >> PAGE_SHIFT, PAGE_SHIFT};
    const uint in_page = position - page.first();
    return is_kept(p.layer, page.sequence, position, step.lens) &&
           needs_previous(p.layer, step, page, token - in_page, counts, place);
}

// The means of a page and head that token `token` opens, which is in this pass. In the second pass pages may need one
// another: only a step with gaps opens two pages of a sequence without filling the first. The threadgroup of the first
// of them does all, and stores the vectors of each before it goes on to the next.
inline void open_pages(constant KvWriteParams &p, StepTokens step, Source source, WritablePlanes planes,
                       Encoding encoding, uint token, uint head, MeanRoom shared, Place place) {
    const uint position = step.positions[token], seq = step.sequence[token];
    PageOfSequence page = {seq, position >> PAGE_SHIFT, PAGE_SHIFT};
    threadgroup uint *counts = reinterpret_cast<threadgroup uint *>(shared.room);
    if (PASS == FIRST_PASS) {
        list_tokens(p, step, page, shared.tokens, place);
        choose_mean(p, step, source, planes, encoding.codec, page, head, shared, place);
        return;
    }
    const PageOfSequence before = {seq, page.index - 1, PAGE_SHIFT};
    if (needs_previous(p.layer, step, before, NO_TOKEN, counts, place)) {
        return;
    }
    for (;;) {
        choose_mean(p, step, source, planes, encoding.codec, page, head, shared, place);
        const PageOfSequence next = {seq, page.index + 1, PAGE_SHIFT};
        if (!place_of(p.layer, step, next, head).held ||
            !needs_previous(p.layer, step, next, NO_TOKEN, counts, place)) {
            return;
        }
        threadgroup_barrier(mem_flags::mem_device);
        list_tokens(p, step, page, shared.tokens, place);
        for (uint i = 0; i < page.positions(); i++) {
            const uint t = shared.tokens[i];
            if (t == NO_TOKEN) {
                continue;
            }
            const RowPlace at = layer_place(p.layer, step.table, PAGE_SHIFT, seq, head, step.positions[t]);
            const uint dim = p.head_dim;
            const ulong from = source.row(p, t, head) * dim;
            load_row(shared.row, source.rows, from, dim, source.dtype, ALIGNED, index_of(place), threads_of(place));
            write_row_around(shared.row, shared.room, planes, at, head, dim, encoding, false, at, PAGE_SHIFT, place);
        }
        threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
        page = next;
    }
}

kernel void page_means(device const uchar *k [[buffer(0)]],
                       device const uchar *v [[buffer(1)]],
                       device const uint *positions [[buffer(2)]],
                       device const uint *sequence [[buffer(3)]],
                       device const uint *lens [[buffer(4)]],
                       device uchar *k_low [[buffer(5)]],
                       device uchar *k_high [[buffer(6), function_constant(K_HAS_HIGH)]],
                       device uchar *k_norms [[buffer(7), function_constant(K_HAS_NORMS)]],
                       device uchar *v_low [[buffer(8)]],
                       device uchar *v_high [[buffer(9), function_constant(V_HAS_HIGH)]],
                       device uchar *v_norms [[buffer(10), function_constant(V_HAS_NORMS)]],
                       constant KvWriteParams &p [[buffer(11)]],
                       device const uint *table [[buffer(12)]],
                       device uchar *k_means [[buffer(13), function_constant(K_HAS_MEANS)]],
                       device uchar *v_means [[buffer(14), function_constant(V_HAS_MEANS)]],
                       device uint *second [[buffer(15)]],
                       threadgroup float *row [[threadgroup(0)]],
                       uint3 group [[threadgroup_position_in_grid]],
                       uint lane [[thread_index_in_simdgroup]],
                       uint simdgroup [[simdgroup_index_in_threadgroup]],
                       uint simdgroups [[simdgroups_per_threadgroup]]) {
    const StepTokens step = {positions, sequence, lens, table, p.tokens, p.position_limit};
    const Place place = {lane, simdgroup, simdgroups};
    threadgroup float room[WRITE_ROOM];
    threadgroup uint tokens[MOST_POSITIONS];
    threadgroup uint finite[MOST_POSITIONS];
    const MeanRoom shared = {tokens, finite, room, row};
    const uint head = group.x, token = group.y, position = positions[token], seq = sequence[token];
    const bool opens = (position & ((1u << PAGE_SHIFT) - 1)) == 0 && position < step.limit &&
                       is_kept(p.layer, seq, position, lens) &&
                       layer_place(p.layer, table, PAGE_SHIFT, seq, head, position).held &&
                       is_centred(group.z == 0 ? K_CODEC : V_CODEC);
    const bool marks = PASS == FIRST_PASS && head == 0 && group.z == 0;
    if (!opens && !marks) {
        return;
    }
    const bool is_later = PASS == FIRST_PASS
                              ? is_second(p, step, token, reinterpret_cast<threadgroup uint *>(room), place)
                              : second[token] != 0;
    if (marks && index_of(place) == 0) {
        second[token] = is_later ? 1 : 0;
    }
    if (!opens || is_later != (PASS == SECOND_PASS)) {
        return;
    }
    if (group.z == 0) {
        const WritablePlanes to = {k_low, K_HAS_HIGH ? k_high : nullptr, K_HAS_NORMS ? k_norms : nullptr,
                                   K_HAS_MEANS ? k_means : nullptr};
        open_pages(p, step, Source{k, K_DTYPE}, to, Encoding{K_CODEC, K_NORM, p.k_scale}, token, head, shared, place);
    } else {
        const WritablePlanes to = {v_low, V_HAS_HIGH ? v_high : nullptr, V_HAS_NORMS ? v_norms : nullptr,
                                   V_HAS_MEANS ? v_means : nullptr};
        open_pages(p, step, Source{v, V_DTYPE}, to, Encoding{V_CODEC, V_NORM, p.v_scale}, token, head, shared, place);
    }
}
