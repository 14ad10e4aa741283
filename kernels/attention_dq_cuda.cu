// Owns the gradient of queries of attention on tensor cores, and delta. As in the forward pass a CTA has
// one tile of the matrix of queries and goes over the keys that its rows see.
#include "kernels/attention_walk.cuh"

// Tiles in shared memory, by their addresses.
struct dq_tiles {
    uint32_t query, dout, keys, values;
};

// One tile of keys for the warp's rows, which begin at `top` of the tile of queries.
template <int D, int MT, int KEYS>
static __device__ __forceinline__ void
dq_step(const struct key_step &step, bool whole, const struct row_spans<WARPS * MT * 16> &rows,
        const struct dq_tiles &tiles, const struct row_statistics<MT> &statistics, float factor,
        float (*dq)[D / 8][4])
{
    constexpr int ROWS = WARPS * MT * 16, NT = KEYS / 8;
    int top = threadIdx.x / WARP * MT * 16;
    const struct span *spans = (step.own ? rows.own : rows.context) + top;
    if (!whole && !warp_sees<MT, KEYS>(spans, step.first))
        return;
    float score[MT][NT][4], dp[MT][NT][4];
    multiply_rows<D, MT, NT, ROWS, KEYS>(score, tiles.query + top * ROW_BYTES, tiles.keys);
    if (!whole)
        hide<MT, NT>(score, spans, step.first);
    multiply_rows<D, MT, NT, ROWS, KEYS>(dp, tiles.dout + top * ROW_BYTES, tiles.values);
    score_gradients<MT, NT>(score, dp, statistics, factor);
    multiply_fragments<MT, NT, D / 8, KEYS>(dq, score, tiles.keys);
}

template <int D, int MT, int KEYS, int STAGES, int CTAS, bool LOOSE>
static __global__ void __launch_bounds__(THREADS, CTAS)
    dq_kernel(struct attention op, struct query_matrix q)
{
    constexpr int ROWS = WARPS * MT * 16, TILE = tile_bytes<KEYS, D>();
    constexpr int QUERIES = tile_bytes<ROWS, D>();
    extern __shared__ __align__(128) unsigned char shared[];
    struct row_spans<ROWS> &rows =
        *(struct row_spans<ROWS> *)(shared + 2 * QUERIES + STAGES * 2 * TILE);
    struct dq_tiles tiles;
    tiles.query = shared_address(shared);
    tiles.dout = tiles.query + QUERIES;
    uint32_t stages = tiles.dout + QUERIES;
    int kv_head = (int)(blockIdx.x % op.kv_heads);
    int first = (int)((gridDim.x - 1 - blockIdx.x) / op.kv_heads) * ROWS;
    load_queries<ROWS, D, THREADS>(op, q, kv_head, first, tiles.query, op.q, tiles.dout, op.dout);
    spans_load<ROWS, LOOSE>(op, q, first, threadIdx.x, THREADS, &rows);
    struct row_statistics<MT> statistics =
        statistics_of<MT>(op, q, kv_head, first + threadIdx.x / WARP * MT * 16);
    __syncthreads();
    struct span_bounds &context = *(struct span_bounds *)(&rows + 1); // not in registers
    if (threadIdx.x < WARP) {
        struct span_bounds b = spans_bounds<ROWS>(rows.context);
        if (threadIdx.x == 0)
            context = b;
    }
    __syncthreads();
    struct key_step step = first_step<ROWS, LOOSE>(context, rows);
    float dq[MT][D / 8][4], factor = op.scale * log2_e;
    clear<MT, D / 8>(dq);

    if (!LOOSE || step.there)
        load_step<D, KEYS>(op, kv_head, step, stages, stages + TILE);
    for (uint32_t stage = 0; step.there;) {
        struct key_step next = step_after<ROWS, KEYS>(step, context, rows);
        tiles.keys = stages + stage * 2 * TILE;
        tiles.values = tiles.keys + TILE;
        copies_wait();
        __syncthreads(); // all have the tile, and are done with the one before
        stage = STAGES == 1 ? 0 : 1 - stage;
        uint32_t free = stages + stage * 2 * TILE;
        if (STAGES > 1 && next.there)
            load_step<D, KEYS>(op, kv_head, next, free, free + TILE);
        bool whole = step_whole<KEYS>(step, context);
        dq_step<D, MT, KEYS>(step, whole, rows, tiles, statistics, factor, dq);
        if (STAGES == 1) {
            __syncthreads();
            if (next.there)
                load_step<D, KEYS>(op, kv_head, next, free, free + TILE);
        }
        step = next;
    }
    if (LOOSE) {
        copies_wait(); // of the queries, where there was no step
        __syncthreads();
    }
    float scale[MT][2];
#pragma unroll
    for (int i = 0; i < MT; i++)
        scale[i][0] = scale[i][1] = op.scale;
    store_fragments<D, ROWS, MT>(op, q, kv_head, first, threadIdx.x / WARP * MT * 16, dq, scale,
                                 (bf16_t *)op.dq, shared);
}

// A CTA for each tile of queries and key head. Shared memory: queries, dout, STAGES times keys and
// values, spans; 66 KiB at D 64, 98 KiB at D 96 to 256.
template <int D, int MT, int KEYS, int STAGES, int CTAS, bool LOOSE>
static void dq_launch(struct stream *stream, const struct attention *op)
{
    constexpr int ROWS = WARPS * MT * 16;
    constexpr int bytes = 2 * tile_bytes<ROWS, D>() + STAGES * 2 * tile_bytes<KEYS, D>() +
                          (int)sizeof(struct row_spans<ROWS>) + (int)sizeof(struct span_bounds);
    static_assert(bytes <= 99 << 10, "what every device has");
    struct query_matrix q = query_matrix_make(op);
    unsigned ctas = grid_size(divide_up(q.count, ROWS) * op->kv_heads);
    allow_shared(dq_kernel<D, MT, KEYS, STAGES, CTAS, LOOSE>, bytes);
    dq_kernel<D, MT, KEYS, STAGES, CTAS, LOOSE><<<ctas, THREADS, bytes, stream->cuda>>>(*op, q);
    launch_check();
}

// delta = sum over the head of dout * out, LANES lanes for each.
template <int LANES> static __global__ void delta_kernel(struct attention op)
{
    int64_t at = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / LANES;
    int lane = threadIdx.x % LANES;
    float sum = 0.0f;
    if (at < op.rows * op.heads && lane * CHUNK < op.head_dim) {
        int64_t from = at * op.head_dim + lane * CHUNK;
        uint4 x = *(const uint4 *)((const bf16_t *)op.dout + from);
        uint4 y = *(const uint4 *)((const bf16_t *)op.out + from);
        const __nv_bfloat162 *left = (const __nv_bfloat162 *)&x,
                             *right = (const __nv_bfloat162 *)&y;
#pragma unroll
        for (int i = 0; i < CHUNK / 2; i++) {
            float2 a = __bfloat1622float2(left[i]), b = __bfloat1622float2(right[i]);
            sum += a.x * b.x + a.y * b.y;
        }
    }
#pragma unroll
    for (int half = LANES / 2; half > 0; half /= 2)
        sum += __shfl_xor_sync(~0u, sum, half);
    if (at < op.rows * op.heads && lane == 0)
        op.delta[at] = sum;
}

template <int LANES> static void delta_launch(struct stream *stream, const struct attention *op)
{
    unsigned ctas = grid_size(divide_up(op->rows * op->heads * LANES, THREADS));
    delta_kernel<LANES><<<ctas, THREADS, 0, stream->cuda>>>(*op);
    launch_check();
}

void attention_delta(struct stream *stream, const struct attention *op)
{
    if (op->head_dim <= 64)
        delta_launch<8>(stream, op);
    else if (op->head_dim <= 128)
        delta_launch<16>(stream, op);
    else
        delta_launch<32>(stream, op);
}

template <bool LOOSE> static void dq_choose(struct stream *stream, const struct attention *op)
{
    if (op->head_dim == 64)
        dq_launch<64, 2, 32, 2, 2, LOOSE>(stream, op);
    else if (op->head_dim == 96)
        dq_launch<96, 2, 32, 2, 2, LOOSE>(stream, op);
    else if (op->head_dim == 128)
        dq_launch<128, 2, 32, 2, 2, LOOSE>(stream, op);
    else
        dq_launch<256, 1, 32, 1, 2, LOOSE>(stream, op);
}

void attention_dq(struct stream *stream, const struct attention *op)
{
    if (op->block_size == 0)
        dq_choose<true>(stream, op);
    else
        dq_choose<false>(stream, op);
}
