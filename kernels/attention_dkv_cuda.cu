// Owns the gradients of keys and values of attention on tensor cores. A CTA has one tile of keys of one
// key head, of the context or of block rows, and goes over the tiles of the matrix of queries that see
// some of it, in order: the heads of a group add up there, no two CTAs add to the same element. A warp
// has 16 keys, and D or half of D columns of their gradients; scores are computed with keys as rows, so
// that probabilities come as left factors of the products with dout and the queries.
#include "kernels/attention_plan.cuh"

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
    if (!whole && !keys_are_seen<ROWS, 16>(rows, first))
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
    dkv_kernel(struct attention op, struct query_matrix q, struct attention_plan plan)
{
    constexpr int THREADS = WARPS * WARP, KEYS = WARPS / SPLIT * 16, COLUMNS = D / SPLIT;
    constexpr int STAGE = stage_bytes<ROWS, D>();
    extern __shared__ __align__(128) unsigned char shared[];
    unsigned char *stages = shared + 2 * tile_bytes<KEYS, D>();
    int kv_head = (int)(blockIdx.x % op.kv_heads), warp = threadIdx.x / WARP;
    struct key_tile tile = tile_of<KEYS>(op, plan, (int)blockIdx.x);
    uint32_t keys = shared_address(shared) + warp / SPLIT * 16 * ROW_BYTES;
    uint32_t values = keys + tile_bytes<KEYS, D>();
    int first = tile.first + warp / SPLIT * 16;
    uint32_t column = warp % SPLIT * (COLUMNS / PANEL) * ROWS * ROW_BYTES;
    float dk[1][COLUMNS / 8][4], dv[1][COLUMNS / 8][4], factor = op.scale * log2_e;
    clear<1, COLUMNS / 8>(dk);
    clear<1, COLUMNS / 8>(dv);
    load_key_tile<D, THREADS, KEYS>(op, kv_head, tile, shared_address(shared));
    struct query_cursor cursor = cursor_make<KEYS>(op, q, plan, tile);
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

// A CTA for each tile of keys and key head. Shared memory: keys, values, STAGES times queries, dout and
// their rows' numbers.
template <int D, int WARPS, int ROWS, int STAGES, int SPLIT, int CTAS>
static void dkv_launch(struct stream *stream, const struct attention *op)
{
    constexpr int KEYS = WARPS / SPLIT * 16;
    constexpr int bytes = 2 * tile_bytes<KEYS, D>() + STAGES * stage_bytes<ROWS, D>();
    static_assert(bytes <= 99 << 10, "what every device has");
    struct query_matrix q = query_matrix_make(op);
    struct attention_plan plan = attention_plan_make(stream, op, q, ROWS, KEYS);
    unsigned ctas = grid_size(plan.items);
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
