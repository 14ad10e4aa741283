// How a CTA of attention that owns a tile of queries goes over keys: those of the rows' own blocks, unless
// the rows are LOOSE, which have none, then the context from the first key that a row sees to the last,
// without what lies between documents.
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

// By `threads` threads, of which this one is `thread`.
template <int ROWS, bool LOOSE>
static __device__ void spans_load(const struct attention &op, const struct query_matrix &q,
                                  int first, int thread, int threads, struct row_spans<ROWS> *spans)
{
    for (int i = thread; i < ROWS; i += threads) {
        int row = row_of(q, min(first + i, q.count - 1));
        spans->context[i] = context_span(op, row);
        if (!LOOSE)
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

// The first one of loose rows.
static __device__ __forceinline__ struct key_step context_step(const struct span_bounds &context)
{
    return {false, context.begin < context.end, context.begin, context.end};
}

template <int ROWS, bool LOOSE>
static __device__ __forceinline__ struct key_step first_step(const struct span_bounds &context,
                                                             const struct row_spans<ROWS> &rows)
{
    if (LOOSE)
        return context_step(context);
    struct span_bounds own = spans_bounds<ROWS>(rows.own);
    return {true, true, own.begin, own.end};
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

// Running softmax of a thread's rows, of scores without their scale. sum: the thread's own part.
template <int MT> struct running {
    float max[MT][2], sum[MT][2];
};

template <int MT> static __device__ __forceinline__ void running_init(struct running<MT> *r)
{
#pragma unroll
    for (int i = 0; i < MT; i++) {
        r->max[i][0] = r->max[i][1] = -INFINITY;
        r->sum[i][0] = r->sum[i][1] = 0.0f;
    }
}

// Over the 4 lanes that hold a row of a fragment.
static __device__ __forceinline__ float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

static __device__ __forceinline__ float quad_sum(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Scores become probabilities relative to the running max. factor: the scale, for powers of 2.
// correction: what sums so far are to be multiplied with; false: by 1 in the whole warp.
template <int MT, int NT>
static __device__ __forceinline__ bool softmax_step(float (*score)[NT][4], struct running<MT> *r,
                                                    float (*correction)[2], float factor)
{
    bool changed = false;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float top = r->max[i][half], sum = 0.0f;
#pragma unroll
            for (int n = 0; n < NT; n++)
                top = fmaxf(top, fmaxf(score[i][n][half * 2], score[i][n][half * 2 + 1]));
            top = quad_max(top);
            // Of a row that has seen nothing yet all is -inf.
            float base = top == -INFINITY ? 0.0f : top * factor;
            correction[i][half] = power2(r->max[i][half] * factor - base);
            changed = changed || r->max[i][half] != top;
            r->max[i][half] = top;
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int e = half * 2; e < half * 2 + 2; e++) {
                    score[i][n][e] = power2(score[i][n][e] * factor - base);
                    sum += score[i][n][e];
                }
            r->sum[i][half] = r->sum[i][half] * correction[i][half] + sum;
            // Never so: a branch on the answer then comes after the exponentials.
            changed = changed || sum < 0.0f;
        }
    return __any_sync(~0u, changed);
}

template <int MT, int DT>
static __device__ __forceinline__ void rescale(float (*out)[DT][4], const float (*correction)[2])
{
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int n = 0; n < DT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                out[i][n][e] *= correction[i][e / 2];
}

// 1 / sum of each row, for all lanes; writes lse. top: the fragment's first row, of the queries' tile
// that begins at `first`.
template <int MT, bool LOOSE>
static __device__ __forceinline__ void
running_end(const struct attention &op, const struct query_matrix &q, int kv_head, int first,
            const struct running<MT> &r, float (*inverse)[2])
{
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int m = first + i * 16 + half * 8 + fragment_row();
            float sum = quad_sum(r.sum[i][half]);
            // A loose row may see nothing.
            inverse[i][half] = LOOSE && sum == 0.0f ? 0.0f : 1.0f / sum;
            if (threadIdx.x % 4 == 0 && m < q.count)
                op.lse[index_of(op, q, kv_head, m)] = r.max[i][half] * op.scale + logf(sum);
        }
}

// Softmax statistics of a thread's rows: log-sum-exp for powers of 2, and delta.
template <int MT> struct row_statistics {
    float lse[MT][2], delta[MT][2];
};

template <int MT>
static __device__ __forceinline__ struct row_statistics<MT>
statistics_of(const struct attention &op, const struct query_matrix &q, int kv_head, int first) {
    struct row_statistics<MT> s;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int m = min(first + i * 16 + half * 8 + fragment_row(), q.count - 1);
            int64_t at = index_of(op, q, kv_head, m);
            s.lse[i][half] = op.lse[at] * log2_e;
            s.delta[i][half] = op.delta[at];
        }
    return s;
}

// dscore = P (dout V^T - delta), P = exp(score - lse); score becomes it.
template <int MT, int NT>
static __device__ __forceinline__ void
score_gradients(float (*score)[NT][4], const float (*dp)[NT][4], const struct row_statistics<MT> &s,
                float factor)
{
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float p = power2(score[i][n][e] * factor - s.lse[i][e / 2]);
                score[i][n][e] = p * (dp[i][n][e] - s.delta[i][e / 2]);
            }
}

// Two columns of the fragment n of rows [top, top + 8), into a tile of ROWS.
template <int ROWS>
static __device__ __forceinline__ void fragment_put(unsigned char *tile, int top, int n,
                                                    uint32_t columns)
{
    *(uint32_t *)(tile + tile_offset<ROWS>(top + fragment_row(), n) + fragment_column() * 2) =
        columns;
}

// Rows [top, top + COUNT) of a tile of ROWS, which the warp alone wrote, to their place in global memory.
template <int D, int ROWS, int COUNT>
static __device__ __forceinline__ void
store_rows(const struct attention &op, const struct query_matrix &q, int kv_head, int first,
           int top, bf16_t *to, const unsigned char *tile)
{
    constexpr int CHUNKS = D / CHUNK;
    __syncwarp();
    for (int i = threadIdx.x % WARP; i < COUNT * CHUNKS; i += WARP) {
        int row = top + i / CHUNKS, chunk = i % CHUNKS;
        if (first + row < q.count)
            *(uint4 *)(to + index_of(op, q, kv_head, first + row) * D + chunk * CHUNK) =
                *(const uint4 *)(tile + tile_offset<ROWS>(row, chunk));
    }
}

// 16 MT rows of fp32 fragments times factors, as bf16, by way of rows [top, top + 16 MT) of a tile in
// shared memory that no other warp uses.
template <int D, int ROWS, int MT>
static __device__ __forceinline__ void
store_fragments(const struct attention &op, const struct query_matrix &q, int kv_head, int first,
                int top, const float (*sum)[D / 8][4], const float (*factor)[2], bf16_t *to,
                unsigned char *tile)
{
    __syncwarp(); // the lanes have read their queries
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int n = 0; n < D / 8; n++)
                fragment_put<ROWS>(tile, top + i * 16 + half * 8, n,
                                   pack(sum[i][n][half * 2] * factor[i][half],
                                        sum[i][n][half * 2 + 1] * factor[i][half]));
    store_rows<D, ROWS, MT * 16>(op, q, kv_head, first, top, to, tile);
}

#endif
