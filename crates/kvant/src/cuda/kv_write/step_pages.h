// The pages that a step writes, for layers with centred codecs, and how each token is stored.
//
// Tokens are planned in windows of as many as a page has positions. A page is whole if the step writes all its
// positions by tokens that follow one another: at most one whole page begins in a window. What is left of a window is
// looked up among all tokens of the step: positions, sequences and tables are what somebody put in a buffer.
#ifndef KVANT_CUDA_KV_WRITE_STEP_PAGES_H
#define KVANT_CUDA_KV_WRITE_STEP_PAGES_H
#include "codec/page_means.h"
#include "kv_write/vectors.h"

constexpr uint NO_TOKEN = 0xFFFFFFFF;

// How a token is stored. Each is the number of a bit where several are meant.
constexpr uint SKIPPED = 0;  // the layer does not hold it
constexpr uint WHOLE = 1;    // in a whole page, around the mean of the page's vectors
constexpr uint KEPT = 2;     // around the mean that its page has already
constexpr uint OWN = 3;      // in another page that the step opens, around the mean of the step's vectors in it
constexpr uint PREVIOUS = 4; // in a page that the step opens, around the mean of what the previous page stores

// The page of a sequence that holds the positions from index << PAGE_SHIFT on.
struct PageOfSequence {
    uint sequence;
    uint index;

    uint first() const {
        return index << PAGE_SHIFT;
    }
};

inline bool find_page(const KvWriteParams &p, const Tokens &tokens, PageOfSequence page, uint head, RowPlace &place) {
    return find_in_pages(p.layer, tokens.table, page.sequence, head, page.first(), place);
}

// Whether the sequence holds the page before this one.
inline bool has_previous(const KvWriteParams &p, const Tokens &tokens, PageOfSequence page) {
    RowPlace place;
    return page.index > 0 && find_page(p, tokens, {page.sequence, page.index - 1}, 0, place);
}

inline bool is_written(const KvWriteParams &p, const Tokens &tokens, uint sequence, uint position) {
    return position < p.position_limit && is_kept(p.layer, sequence, position, tokens.lens);
}

// Whether token t is written to the page, if that is held.
inline bool is_in(const KvWriteParams &p, const Tokens &tokens, PageOfSequence page, uint t) {
    const uint position = tokens.positions[t];
    return tokens.sequence[t] == page.sequence && position >> PAGE_SHIFT == page.index &&
           is_written(p, tokens, page.sequence, position);
}

// tokens[i] ← the token of the page's position i, or NO_TOKEN. Begins and ends with a barrier.
inline void list_tokens(const KvWriteParams &p, const Tokens &tokens, PageOfSequence page, uint *list) {
    __syncthreads();
    for (uint i = threadIdx.x; i < PAGE_POSITIONS; i += THREADS) {
        list[i] = NO_TOKEN;
    }
    __syncthreads();
    for (uint t = threadIdx.x; t < p.tokens; t += THREADS) {
        if (is_in(p, tokens, page, t)) {
            list[tokens.positions[t] - page.first()] = t;
        }
    }
    __syncthreads();
}

// A window of tokens, in shared memory.
struct Window {
    uint first;
    // The token of the first position of the whole page that begins here, or NO_TOKEN.
    uint whole;
    // How many tokens are in no whole page, and in pages with the mean of a previous page.
    uint left;
    uint later;
    // Bit i: token first - PAGE_POSITIONS + i has the position after that of the token before it, in one sequence.
    uint follows[(3 * PAGE_POSITIONS + 31) / 32];
    uint kinds[PAGE_POSITIONS];
    // Runs of tokens in one page that follow one another: the run of each token, and what the step does to its page.
    uint runs;
    uint run_of[PAGE_POSITIONS];
    PageOfSequence pages[PAGE_POSITIONS];
    uint written[PAGE_POSITIONS];
    uint opened[PAGE_POSITIONS];

    // Whether each of `count` tokens from t on follows the one before it.
    bool follow(uint t, uint count) const {
        const uint begin = t + PAGE_POSITIONS - first, end = begin + count;
        for (uint word = begin / 32; word * 32 < end; word++) {
            uint wanted = word == begin / 32 ? ALL << (begin % 32) : ALL;
            wanted &= end - word * 32 < 32 ? ~(ALL << (end % 32)) : ALL;
            if ((follows[word] & wanted) != wanted) {
                return false;
            }
        }
        return true;
    }
};

// Whether the page of token t is whole.
inline bool is_whole(const KvWriteParams &p, const Tokens &tokens, const Window &window, uint t, uint sequence,
                     uint position) {
    const uint at = position & (PAGE_POSITIONS - 1), first = position - at;
    return t >= at && p.tokens - (t - at) >= PAGE_POSITIONS && window.follow(t - at + 1, PAGE_POSITIONS - 1) &&
           is_written(p, tokens, sequence, first) && is_written(p, tokens, sequence, first + PAGE_POSITIONS - 1);
}

// Looks up what the step does to the pages of the tokens that are left. All threads call it; it ends with a barrier.
inline void plan_rest(const KvWriteParams &p, const Tokens &tokens, Window &window) {
    const auto begins_run = [&](uint i) {
        const uint t = window.first + i;
        return i == 0 || window.kinds[i - 1] != KEPT || !window.follow(t, 1) ||
               (tokens.positions[t] & (PAGE_POSITIONS - 1)) == 0;
    };
    for (uint i = threadIdx.x; i < PAGE_POSITIONS; i += THREADS) {
        window.run_of[i] = NO_TOKEN;
        if (window.kinds[i] == KEPT && begins_run(i)) {
            const uint run = atomicAdd(&window.runs, 1u), t = window.first + i;
            window.run_of[i] = run;
            window.pages[run] = {tokens.sequence[t], tokens.positions[t] >> PAGE_SHIFT};
            window.written[run] = 0;
            window.opened[run] = 0;
        }
    }
    __syncthreads();
    for (uint t = threadIdx.x; t < p.tokens; t += THREADS) {
        const uint position = tokens.positions[t], sequence = tokens.sequence[t];
        for (uint run = 0; run < window.runs; run++) {
            const PageOfSequence page = window.pages[run];
            if (sequence == page.sequence && position >> PAGE_SHIFT == page.index &&
                is_written(p, tokens, sequence, position)) {
                atomicAdd(&window.written[run], 1u);
                atomicAdd(&window.opened[run], position == page.first() ? 1u : 0u);
            }
        }
    }
    __syncthreads();
    for (uint i = threadIdx.x; i < PAGE_POSITIONS; i += THREADS) {
        if (window.kinds[i] != KEPT) {
            continue;
        }
        uint begin = i;
        while (window.run_of[begin] == NO_TOKEN) {
            begin--;
        }
        const uint run = window.run_of[begin];
        if (window.opened[run] > 0) {
            const bool later = window.written[run] < PAGE_POSITIONS && has_previous(p, tokens, window.pages[run]);
            window.kinds[i] = later ? PREVIOUS : OWN;
            if (later) {
                atomicAdd(&window.later, 1u);
            }
        }
    }
    __syncthreads();
}

// Plans the window that begins with token `first`. All threads call it; it begins and ends with a barrier.
inline void plan_window(const KvWriteParams &p, const Tokens &tokens, uint first, Window &window) {
    __syncthreads();
    for (uint i = threadIdx.x; i < sizeof(window.follows) * 8; i += THREADS) {
        const uint t = first + i - PAGE_POSITIONS;
        const bool follows = t > 0 && t < p.tokens && tokens.sequence[t] == tokens.sequence[t - 1] &&
                             tokens.positions[t] == tokens.positions[t - 1] + 1;
        const uint word = __ballot_sync(ALL, follows);
        if (threadIdx.x % 32 == 0) {
            window.follows[i / 32] = word;
        }
    }
    if (threadIdx.x == 0) {
        window.first = first;
        window.whole = NO_TOKEN;
        window.left = window.later = window.runs = 0;
    }
    __syncthreads();
    for (uint i = threadIdx.x; i < PAGE_POSITIONS; i += THREADS) {
        const uint t = first + i;
        uint kind = SKIPPED;
        if (t < p.tokens) {
            const uint position = tokens.positions[t], sequence = tokens.sequence[t];
            RowPlace place;
            if (is_written(p, tokens, sequence, position) &&
                find_page(p, tokens, {sequence, position >> PAGE_SHIFT}, 0, place)) {
                kind = is_whole(p, tokens, window, t, sequence, position) ? WHOLE : KEPT;
            }
            if (kind == WHOLE && (position & (PAGE_POSITIONS - 1)) == 0) {
                window.whole = t;
            }
            if (kind == KEPT) {
                atomicAdd(&window.left, 1u);
            }
        }
        window.kinds[i] = kind;
    }
    __syncthreads();
    if (window.left > 0) {
        plan_rest(p, tokens, window);
    }
}

#endif
