// What the kernels that own a tile of keys share: which tiles of queries see it, in which order the tiles
// of keys start, and a warp's 16 keys against a tile of queries.
#ifndef KERNELS_ATTENTION_PLAN_CUH
#define KERNELS_ATTENTION_PLAN_CUH

#include "kernels/attention_mma.cuh"

// Fixed before the kernel of gradients, in the workspace, for tiles of `rows` queries and `keys` keys.
struct attention_plan {
    struct span_bounds *bounds; // [query tiles]
    int32_t *counts, *order; // [context tiles] query tiles that see it; tiles, the most seen first
    int32_t query_tiles, context_tiles, rows;
    int32_t items; // tiles of context keys and of block rows, for each key head
};

// Both bounds are looked at, so that they are loaded together.
static __device__ __forceinline__ bool may_see(const struct span_bounds &b, int first, int keys)
{
    return (b.begin < first + keys) & (b.end > first);
}

struct attention_plan attention_plan_make(struct stream *stream, const struct attention *op,
                                          const struct query_matrix &q, int rows, int keys);

// Keys [first, first + KEYS) of the context or of the block rows; those from limit on are not there.
struct key_tile {
    bool own;
    int32_t first, limit;
};

// Goes over the tiles of queries that may see a tile of keys; the same in every warp.
struct query_cursor {
    int32_t group, end; // the 32 tiles from `group` on are looked at; none from end on
    unsigned seen;      // those of them that are left
};

template <int KEYS>
static __device__ __forceinline__ struct query_cursor
cursor_make(const struct attention &op, const struct query_matrix &q,
            const struct attention_plan &plan, const struct key_tile &keys)
{
    if (!keys.own)
        return {-WARP, plan.query_tiles, 0};
    int size = (int)op.block_size, last = min(keys.first + KEYS, keys.limit) - 1;
    int begin = keys.first / size * size * q.group / plan.rows;
    int end = ((last / size + 1) * size * q.group - 1) / plan.rows + 1;
    return {begin - WARP, end, 0};
}

// -1: no more.
template <int KEYS>
static __device__ __forceinline__ int cursor_next(struct query_cursor *cursor,
                                                  const struct attention_plan &plan,
                                                  const struct key_tile &keys)
{
    while (cursor->seen == 0) {
        cursor->group += WARP;
        if (cursor->group >= cursor->end)
            return -1;
        int tile = cursor->group + (int)threadIdx.x % WARP;
        bool seen = tile < cursor->end;
        if (seen && !keys.own)
            seen = may_see(plan.bounds[tile], keys.first, KEYS);
        cursor->seen = __ballot_sync(~0u, seen);
    }
    int bit = __ffs((int)cursor->seen) - 1;
    cursor->seen &= cursor->seen - 1;
    return cursor->group + bit;
}

// What a tile of queries brings along, in shared memory.
template <int ROWS> struct query_rows {
    float lse[ROWS], delta[ROWS];
    int32_t begin[ROWS], end[ROWS]; // keys seen, none where begin >= end
};

// Whether a row of the tile sees one of KEYS keys; the same in all lanes.
template <int ROWS, int KEYS>
static __device__ __forceinline__ bool keys_are_seen(const struct query_rows<ROWS> &rows, int first)
{
    bool any = false;
#pragma unroll
    for (int i = 0; i < ROWS; i += WARP) {
        int at = i + threadIdx.x % WARP, begin = rows.begin[at], end = rows.end[at];
        any = any || (begin < end && begin < first + KEYS && end > first);
    }
    return __any_sync(~0u, any);
}

// -inf at the keys, 16 from `first` on, that a column's query does not see.
template <int NT>
static __device__ __forceinline__ void
hide_columns(float (*score)[4], const struct query_rows<NT * 8> &rows, int first)
{
    int key = first + fragment_row();
#pragma unroll
    for (int n = 0; n < NT; n++) {
        int2 begin = *(const int2 *)&rows.begin[n * 8 + fragment_column()];
        int2 end = *(const int2 *)&rows.end[n * 8 + fragment_column()];
        if (key < begin.x || key >= end.x)
            score[n][0] = -INFINITY;
        if (key < begin.y || key >= end.y)
            score[n][1] = -INFINITY;
        if (key + 8 < begin.x || key + 8 >= end.x)
            score[n][2] = -INFINITY;
        if (key + 8 < begin.y || key + 8 >= end.y)
            score[n][3] = -INFINITY;
    }
}

// score becomes P = exp(score - lse).
template <int NT>
static __device__ __forceinline__ void
probabilities(float (*score)[4], const struct query_rows<NT * 8> &rows, float factor)
{
#pragma unroll
    for (int n = 0; n < NT; n++) {
        float2 lse = *(const float2 *)&rows.lse[n * 8 + fragment_column()];
#pragma unroll
        for (int e = 0; e < 4; e++)
            score[n][e] = power2(score[n][e] * factor - (e % 2 == 0 ? lse.x : lse.y) * log2_e);
    }
}

// p becomes dscore = P (dout V^T - delta).
template <int NT>
static __device__ __forceinline__ void score_gradients(float (*p)[4], const float (*dp)[4],
                                                       const struct query_rows<NT * 8> &rows)
{
#pragma unroll
    for (int n = 0; n < NT; n++) {
        float2 delta = *(const float2 *)&rows.delta[n * 8 + fragment_column()];
#pragma unroll
        for (int e = 0; e < 4; e++)
            p[n][e] *= dp[n][e] - (e % 2 == 0 ? delta.x : delta.y);
    }
}

// One row's gradients of a warp's keys: added in fp32, or written as bf16. What they are added to is loaded
// before the first of it is stored, or each load would wait for the one before.
template <int COLUMNS>
static __device__ __forceinline__ void
store_gradients(bool own, void *to, int64_t at, const float (*sum)[4], int half, float factor)
{
    constexpr int NT = COLUMNS / 8;
    float2 before[NT];
    at += fragment_column();
#pragma unroll
    for (int n = 0; n < NT; n++)
        before[n] = own ? make_float2(0.0f, 0.0f) : *(const float2 *)((float *)to + at + n * 8);
#pragma unroll
    for (int n = 0; n < NT; n++) {
        float x = sum[n][half * 2] * factor, y = sum[n][half * 2 + 1] * factor;
        if (own)
            *(uint32_t *)((bf16_t *)to + at + n * 8) = pack(x, y);
        else
            *(float2 *)((float *)to + at + n * 8) =
                make_float2(__fadd_rn(before[n].x, x), __fadd_rn(before[n].y, y));
    }
}

// first: of the warp's keys; column: its first.
template <int D, int COLUMNS>
static __device__ __forceinline__ void
dkv_store(const struct attention &op, int kv_head, const struct key_tile &keys, int first,
          int column, const float (*dk)[COLUMNS / 8][4], const float (*dv)[COLUMNS / 8][4])
{
    int64_t packed = op.kv_heads * D, from = (int64_t)kv_head * D + column;
    int64_t v_stride = keys.own ? op.v_block_stride : packed;
    void *to_k = keys.own ? op.dk_block : (void *)op.dk_context;
    void *to_v = keys.own ? op.dv_block : (void *)op.dv_context;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int64_t key = first + half * 8 + fragment_row();
        if (key >= keys.limit)
            continue;
        store_gradients<COLUMNS>(keys.own, to_k, key * packed + from, dk[0], half, op.scale);
        store_gradients<COLUMNS>(keys.own, to_v, key * v_stride + from, dv[0], half, 1.0f);
    }
}

// Item * kv_heads + key head: context tiles in the planned order, then tiles of block rows.
template <int KEYS>
static __device__ __forceinline__ struct key_tile
tile_of(const struct attention &op, const struct attention_plan &plan, int index)
{
    int item = index / (int)op.kv_heads;
    if (item < plan.context_tiles)
        return {false, plan.order[item] * KEYS, (int32_t)op.context};
    return {true, (item - plan.context_tiles) * KEYS, (int32_t)op.rows};
}

#endif
