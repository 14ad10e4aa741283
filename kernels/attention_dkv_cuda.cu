// Owns the gradients of keys and values of attention on tensor cores. A CTA has one tile of keys of one
// key head, of the context or of block rows, and goes over the tiles of the matrix of queries that see
// some of it, in order: the heads of a group add up there, no two CTAs add to the same element. A warp
// has 16 keys, and D or half of D columns of their gradients; scores are computed with keys as rows, so
// that probabilities come as left factors of the products with dout and the queries.
#include "kernels/attention_mma.cuh"

enum { COUNT_THREADS = 128, RANK_THREADS = 256 };

// Fixed before the kernel of gradients, in the workspace.
struct plan {
    struct span_bounds *bounds; // [query tiles]
    int32_t *counts, *order; // [context tiles] query tiles that see it; tiles, the most seen first
    int32_t query_tiles, context_tiles;
};

static __device__ __forceinline__ bool may_see(const struct span_bounds &b, int first, int keys)
{
    return b.begin < first + keys && b.end > first;
}

// A warp for each tile of queries.
static __global__ void bounds_kernel(struct attention op, struct query_matrix q, struct plan plan,
                                     int rows)
{
    int tile = (int)(blockIdx.x * COUNT_THREADS + threadIdx.x) / WARP;
    if (tile >= plan.query_tiles)
        return;
    struct span_bounds b = {INT32_MAX, 0, 0, INT32_MAX};
    for (int i = threadIdx.x % WARP; i < rows; i += WARP)
        bounds_add(&b, context_span(op, row_of(q, min(tile * rows + i, q.count - 1))));
    b = warp_bounds(b);
    if (threadIdx.x % WARP == 0)
        plan.bounds[tile] = b;
}

static __global__ void count_kernel(struct plan plan, int keys)
{
    int count = 0, first = (int)blockIdx.x * keys;
    for (int i = threadIdx.x; i < plan.query_tiles; i += COUNT_THREADS)
        count += may_see(plan.bounds[i], first, keys);
    count = block_sum<COUNT_THREADS>(count);
    if (threadIdx.x == 0)
        plan.counts[blockIdx.x] = count;
}

// order[rank of a tile] = tile; the most seen first, then the earlier.
static __global__ void rank_kernel(struct plan plan)
{
    int tile = (int)(blockIdx.x * RANK_THREADS + threadIdx.x), rank = 0;
    if (tile >= plan.context_tiles)
        return;
    int count = plan.counts[tile];
    for (int i = 0; i < plan.context_tiles; i++)
        rank += plan.counts[i] > count || (plan.counts[i] == count && i < tile);
    plan.order[rank] = tile;
}

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

template <int KEYS, int ROWS>
static __device__ __forceinline__ struct query_cursor
cursor_make(const struct attention &op, const struct query_matrix &q, const struct plan &plan,
            const struct key_tile &keys)
{
    if (!keys.own)
        return {-WARP, plan.query_tiles, 0};
    int size = (int)op.block_size, last = min(keys.first + KEYS, keys.limit) - 1;
    int begin = keys.first / size * size * q.group / ROWS;
    int end = ((last / size + 1) * size * q.group - 1) / ROWS + 1;
    return {begin - WARP, end, 0};
}

// -1: no more.
template <int KEYS>
static __device__ __forceinline__ int
cursor_next(struct query_cursor *cursor, const struct plan &plan, const struct key_tile &keys)
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

template <int ROWS, int D> static __host__ __device__ constexpr int stage_bytes()
{
    return 2 * tile_bytes<ROWS, D>() + (int)sizeof(struct query_rows<ROWS>);
}

template <int ROWS, int THREADS>
static __device__ __forceinline__ void load_rows(const struct attention &op,
                                                 const struct query_matrix &q, int kv_head,
                                                 int first, bool own, struct query_rows<ROWS> *to)
{
    for (int i = threadIdx.x; i < 4 * ROWS; i += THREADS) {
        int at = i % ROWS, m = min(first + at, q.count - 1), row = row_of(q, m);
        if (i < ROWS)
            copy_word(shared_address(&to->lse[at]), op.lse + index_of(op, q, kv_head, m));
        else if (i < 2 * ROWS)
            copy_word(shared_address(&to->delta[at]), op.delta + index_of(op, q, kv_head, m));
        else if (!own)
            copy_word(shared_address(i < 3 * ROWS ? &to->begin[at] : &to->end[at]),
                      (i < 3 * ROWS ? op.begin : op.end) + row);
        else if (i < 3 * ROWS)
            to->begin[at] = own_span(op, row).begin;
        else
            to->end[at] = own_span(op, row).end;
    }
}

template <int ROWS, int D, int THREADS>
static __device__ __forceinline__ void load_stage(const struct attention &op,
                                                  const struct query_matrix &q, int kv_head,
                                                  int tile, bool own, unsigned char *stage)
{
    uint32_t query = shared_address(stage);
    load_queries<ROWS, D, THREADS>(op, q, kv_head, tile * ROWS, query, op.q,
                                   query + tile_bytes<ROWS, D>(), op.dout);
    load_rows<ROWS, THREADS>(op, q, kv_head, tile * ROWS, own,
                             (struct query_rows<ROWS> *)(stage + 2 * tile_bytes<ROWS, D>()));
}

template <int ROWS>
static __device__ __forceinline__ bool keys_are_seen(const struct query_rows<ROWS> &rows, int first)
{
    bool any = false;
#pragma unroll
    for (int i = 0; i < ROWS; i += WARP) {
        int at = i + threadIdx.x % WARP, begin = rows.begin[at], end = rows.end[at];
        any = any || (begin < end && begin < first + 16 && end > first);
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

// What a tile of queries adds to dk and dv of a warp's 16 keys, which are the first of the addresses
// keys and values. column: the first of the tile's panels that the warp has.
template <int D, int KEYS, int ROWS, int COLUMNS>
static __device__ __forceinline__ void
dkv_step(const unsigned char *stage, uint32_t keys, uint32_t values, int first, bool whole,
         uint32_t column, float factor, float (*dk)[COLUMNS / 8][4], float (*dv)[COLUMNS / 8][4])
{
    constexpr int NT = ROWS / 8;
    const struct query_rows<ROWS> &rows =
        *(const struct query_rows<ROWS> *)(stage + 2 * tile_bytes<ROWS, D>());
    uint32_t query = shared_address(stage), dout = query + tile_bytes<ROWS, D>();
    if (!whole && !keys_are_seen<ROWS>(rows, first))
        return;
    float score[1][NT][4], dp[1][NT][4];
    multiply_rows<D, 1, NT, KEYS, ROWS>(score, keys, query);
    if (!whole)
        hide_columns<NT>(score[0], rows, first);
    probabilities<NT>(score[0], rows, factor);
    multiply_fragments<1, NT, COLUMNS / 8, ROWS>(dv, score, dout + column);
    multiply_rows<D, 1, NT, KEYS, ROWS>(dp, values, dout);
    score_gradients<NT>(score[0], dp[0], rows);
    multiply_fragments<1, NT, COLUMNS / 8, ROWS>(dk, score, query + column);
}

// One row's gradients of a warp's keys: added in fp32, or written as bf16.
template <int COLUMNS>
static __device__ __forceinline__ void
store_gradients(bool own, void *to, int64_t at, const float (*sum)[4], int half, float factor)
{
    at += fragment_column();
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n++) {
        float x = sum[n][half * 2] * factor, y = sum[n][half * 2 + 1] * factor;
        if (own) {
            *(uint32_t *)((bf16_t *)to + at + n * 8) = pack(x, y);
        } else {
            float2 *element = (float2 *)((float *)to + at + n * 8);
            *element = make_float2(element->x + x, element->y + y);
        }
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

// blockIdx.x is item * kv_heads + key head: context tiles in the planned order, then tiles of block rows.
template <int KEYS>
static __device__ __forceinline__ struct key_tile tile_of(const struct attention &op,
                                                          const struct plan &plan)
{
    int item = (int)(blockIdx.x / op.kv_heads);
    if (item < plan.context_tiles)
        return {false, plan.order[item] * KEYS, (int32_t)op.context};
    return {true, (item - plan.context_tiles) * KEYS, (int32_t)op.rows};
}

template <int D, int THREADS, int KEYS>
static __device__ __forceinline__ void load_key_tile(const struct attention &op, int kv_head,
                                                     const struct key_tile &tile, uint32_t keys)
{
    const bf16_t *k = (const bf16_t *)(tile.own ? op.k_block : op.k_context) + kv_head * D;
    const bf16_t *v = (const bf16_t *)(tile.own ? op.v_block : op.v_context) + kv_head * D;
    int64_t v_stride = tile.own ? op.v_block_stride : op.v_context_stride;
    load_keys<KEYS, D, THREADS>(keys, k, op.kv_heads * D, tile.first, tile.limit);
    load_keys<KEYS, D, THREADS>(keys + tile_bytes<KEYS, D>(), v, v_stride, tile.first, tile.limit);
}

// SPLIT warps have the same keys and each D / SPLIT columns.
template <int D, int WARPS, int ROWS, int STAGES, int SPLIT, int CTAS>
static __global__ void __launch_bounds__(WARPS *WARP, CTAS)
    dkv_kernel(struct attention op, struct query_matrix q, struct plan plan)
{
    constexpr int THREADS = WARPS * WARP, KEYS = WARPS / SPLIT * 16, COLUMNS = D / SPLIT;
    constexpr int STAGE = stage_bytes<ROWS, D>();
    extern __shared__ __align__(128) unsigned char shared[];
    unsigned char *stages = shared + 2 * tile_bytes<KEYS, D>();
    int kv_head = (int)(blockIdx.x % op.kv_heads), warp = threadIdx.x / WARP;
    struct key_tile tile = tile_of<KEYS>(op, plan);
    uint32_t keys = shared_address(shared) + warp / SPLIT * 16 * ROW_BYTES;
    uint32_t values = keys + tile_bytes<KEYS, D>();
    int first = tile.first + warp / SPLIT * 16;
    uint32_t column = warp % SPLIT * (COLUMNS / PANEL) * ROWS * ROW_BYTES;
    float dk[1][COLUMNS / 8][4], dv[1][COLUMNS / 8][4], factor = op.scale * log2_e;
    clear<1, COLUMNS / 8>(dk);
    clear<1, COLUMNS / 8>(dv);
    load_key_tile<D, THREADS, KEYS>(op, kv_head, tile, shared_address(shared));
    struct query_cursor cursor = cursor_make<KEYS, ROWS>(op, q, plan, tile);
    int at = cursor_next<KEYS>(&cursor, plan, tile), stage = 0;
    if (at >= 0)
        load_stage<ROWS, D, THREADS>(op, q, kv_head, at, tile.own, stages);
    while (at >= 0) {
        int next = cursor_next<KEYS>(&cursor, plan, tile);
        const unsigned char *current = stages + stage * STAGE;
        copies_wait();
        __syncthreads(); // all have the tile, and are done with the one before
        stage = STAGES == 1 ? 0 : 1 - stage;
        if (STAGES > 1 && next >= 0)
            load_stage<ROWS, D, THREADS>(op, q, kv_head, next, tile.own, stages + stage * STAGE);
        bool whole = !tile.own && plan.bounds[at].all_begin <= tile.first &&
                     plan.bounds[at].all_end >= tile.first + KEYS;
        dkv_step<D, KEYS, ROWS, COLUMNS>(current, keys, values, first, whole, column, factor, dk,
                                         dv);
        if (STAGES == 1) {
            __syncthreads();
            if (next >= 0)
                load_stage<ROWS, D, THREADS>(op, q, kv_head, next, tile.own, stages);
        }
        at = next;
    }
    copies_wait(); // the keys' own, where no query sees them
    dkv_store<D, COLUMNS>(op, kv_head, tile, first, warp % SPLIT * COLUMNS, dk, dv);
}

static struct plan plan_make(struct stream *stream, const struct attention *op,
                             const struct query_matrix &q, int rows, int keys)
{
    struct plan plan;
    plan.query_tiles = (int32_t)divide_up(q.count, rows);
    plan.context_tiles = (int32_t)divide_up(op->context, keys);
    plan.bounds = (struct span_bounds *)stream->workspace;
    plan.counts = (int32_t *)(plan.bounds + plan.query_tiles);
    plan.order = plan.counts + plan.context_tiles;
    size_t bytes = (size_t)((char *)(plan.order + plan.context_tiles) - (char *)stream->workspace);
    BUG_UNLESS(bytes <= stream->workspace_bytes);
    if (plan.context_tiles == 0)
        return plan;
    bounds_kernel<<<grid_size(divide_up(plan.query_tiles, COUNT_THREADS / WARP)), COUNT_THREADS, 0,
                    stream->cuda>>>(*op, q, plan, rows);
    launch_check();
    count_kernel<<<grid_size(plan.context_tiles), COUNT_THREADS, 0, stream->cuda>>>(plan, keys);
    launch_check();
    rank_kernel<<<grid_size(divide_up(plan.context_tiles, RANK_THREADS)), RANK_THREADS, 0,
                  stream->cuda>>>(plan);
    launch_check();
    return plan;
}

// A CTA for each tile of keys and key head. Shared memory: keys, values, STAGES times queries, dout and
// their rows' numbers.
template <int D, int WARPS, int ROWS, int STAGES, int SPLIT, int CTAS>
static void dkv_launch(struct stream *stream, const struct attention *op)
{
    constexpr int KEYS = WARPS / SPLIT * 16;
    constexpr int bytes = 2 * tile_bytes<KEYS, D>() + STAGES * stage_bytes<ROWS, D>();
    static_assert(bytes <= 99 << 10, "what every device has");
    struct query_matrix q = query_matrix_make(op);
    struct plan plan = plan_make(stream, op, q, ROWS, KEYS);
    int64_t tiles = plan.context_tiles + divide_up(op->rows, KEYS);
    unsigned ctas = grid_size(tiles * op->kv_heads);
    allow_shared(dkv_kernel<D, WARPS, ROWS, STAGES, SPLIT, CTAS>, bytes);
    dkv_kernel<D, WARPS, ROWS, STAGES, SPLIT, CTAS>
        <<<ctas, WARPS * WARP, bytes, stream->cuda>>>(*op, q, plan);
    launch_check();
}

void attention_dkv(struct stream *stream, const struct attention *op)
{
    if (op->head_dim == 64)
        dkv_launch<64, 4, 64, 2, 1, 3>(stream, op);
    else if (op->head_dim == 96)
        dkv_launch<96, 4, 64, 2, 1, 2>(stream, op);
    else if (op->head_dim == 128)
        dkv_launch<128, 4, 64, 2, 1, 2>(stream, op);
    else
        dkv_launch<256, 8, 32, 1, 2, 1>(stream, op);
}
