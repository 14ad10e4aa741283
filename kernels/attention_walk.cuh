// How a CTA of attention that owns a tile of queries goes over keys: those of the rows' own blocks, then
// the context from the first key that a row sees to the last, without what lies between documents.
#ifndef KERNELS_ATTENTION_WALK_CUH
#define KERNELS_ATTENTION_WALK_CUH

#include "kernels/attention_mma.cuh"

enum { WARPS = 4, THREADS = WARPS * WARP };

// Spans of the rows of a tile, in shared memory.
template <int ROWS> struct row_spans {
    struct span context[ROWS], own[ROWS];
};

// Keys [first, first + KEYS) of the context or of the block rows; those from limit on are not there.
struct key_step {
    bool own, there;
    int32_t first, limit;
};

template <int ROWS>
static __device__ void spans_load(const struct attention &op, const struct query_matrix &q,
                                  int first, struct row_spans<ROWS> *spans)
{
    for (int i = threadIdx.x; i < ROWS; i += THREADS) {
        int row = row_of(q, min(first + i, q.count - 1));
        spans->context[i] = context_span(op, row);
        spans->own[i] = own_span(op, row);
    }
}

// In every lane of every warp.
template <int ROWS>
static __device__ __forceinline__ struct span_bounds spans_bounds(const struct span *spans)
{
    struct span_bounds b = {INT32_MAX, 0, 0, INT32_MAX};
#pragma unroll
    for (int i = 0; i < ROWS; i += WARP)
        bounds_add(&b, spans[i + threadIdx.x % WARP]);
    return warp_bounds(b);
}

// The first key from `from` on that a row sees; INT32_MAX: none.
template <int ROWS>
static __device__ __forceinline__ int next_seen(const struct span *spans, int from)
{
    int next = INT32_MAX;
#pragma unroll
    for (int i = 0; i < ROWS; i += WARP) {
        struct span s = spans[i + threadIdx.x % WARP];
        if (s.end > from)
            next = min(next, max(s.begin, from));
    }
    return __reduce_min_sync(~0u, next);
}

template <int ROWS, int KEYS>
static __device__ __forceinline__ struct key_step step_after(const struct key_step &step,
                                                             const struct span_bounds &context,
                                                             const struct row_spans<ROWS> &spans)
{
    struct key_step next = step;
    next.first += KEYS;
    if (step.own && next.first < step.limit)
        return next;
    if (step.own)
        next = {false, true, context.begin, context.end};
    else if (next.first < context.all_begin || next.first >= context.all_end)
        next.first = next_seen<ROWS>(spans.context, next.first);
    next.there = next.first < next.limit;
    return next;
}

template <int D, int KEYS>
static __device__ __forceinline__ void load_step(const struct attention &op, int kv_head,
                                                 const struct key_step &step, uint32_t keys,
                                                 uint32_t values)
{
    const bf16_t *k = (const bf16_t *)(step.own ? op.k_block : op.k_context) + kv_head * D;
    const bf16_t *v = (const bf16_t *)(step.own ? op.v_block : op.v_context) + kv_head * D;
    int64_t v_stride = step.own ? op.v_block_stride : op.v_context_stride;
    load_keys<KEYS, D, THREADS>(keys, k, op.kv_heads * D, step.first, step.limit);
    load_keys<KEYS, D, THREADS>(values, v, v_stride, step.first, step.limit);
}

template <int MT, int KEYS>
static __device__ __forceinline__ bool warp_sees(const struct span *spans, int first)
{
    bool any = false;
#pragma unroll
    for (int i = 0; i < MT * 16; i += 16) {
        struct span s = spans[i + threadIdx.x % 16];
        any = any || (s.begin < first + KEYS && s.end > first);
    }
    return __any_sync(~0u, any);
}

// Every row sees every key of it.
template <int KEYS>
static __device__ __forceinline__ bool step_whole(const struct key_step &step,
                                                  const struct span_bounds &context)
{
    return !step.own && step.first >= context.all_begin && step.first + KEYS <= context.all_end;
}

// Two columns of the fragment n of rows [top, top + 8), into a tile of ROWS.
template <int ROWS>
static __device__ __forceinline__ void fragment_put(unsigned char *tile, int top, int n,
                                                    uint32_t columns)
{
    *(uint32_t *)(tile + tile_offset<ROWS>(top + fragment_row(), n) + fragment_column() * 2) =
        columns;
}

// The warp's rows of a tile, which it alone wrote, to their place in global memory.
template <int D, int MT>
static __device__ __forceinline__ void store_rows(const struct attention &op,
                                                  const struct query_matrix &q, int kv_head,
                                                  int first, bf16_t *to, const unsigned char *tile)
{
    constexpr int ROWS = WARPS * MT * 16, CHUNKS = D / CHUNK;
    __syncwarp();
    for (int i = threadIdx.x % WARP; i < MT * 16 * CHUNKS; i += WARP) {
        int row = threadIdx.x / WARP * MT * 16 + i / CHUNKS, chunk = i % CHUNKS;
        if (first + row < q.count)
            *(uint4 *)(to + index_of(op, q, kv_head, first + row) * D + chunk * CHUNK) =
                *(const uint4 *)(tile + tile_offset<ROWS>(row, chunk));
    }
}

#endif
