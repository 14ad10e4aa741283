// Owns the forward pass of attention on tensor cores. A CTA has one tile of the matrix of queries of a
// key head (so the heads of a group share what is read of keys and values), its warps have rows of it.
// Keys come in tiles: those of the rows' own blocks, then the context that some row sees, while the
// next tile is on its way. Only tiles that some row does not see wholly are masked; what no row sees is
// passed over.
#include "kernels/attention_walk.cuh"

// One tile of keys for the warp's rows, which begin at `top` of the tile of queries.
template <int D, int MT, int KEYS>
static __device__ __forceinline__ void
forward_step(const struct key_step &step, bool whole, const struct row_spans<WARPS * MT * 16> &rows,
             uint32_t query, uint32_t keys, uint32_t values, float factor, struct running<MT> *r,
             float (*out)[D / 8][4])
{
    constexpr int ROWS = WARPS * MT * 16;
    int top = threadIdx.x / WARP * MT * 16;
    const struct span *spans = (step.own ? rows.own : rows.context) + top;
    if (!whole && !warp_sees<MT, KEYS>(spans, step.first))
        return;
    float score[MT][KEYS / 8][4];
    multiply_rows<D, MT, KEYS / 8, ROWS, KEYS>(score, query + top * ROW_BYTES, keys);
    if (!whole)
        hide<MT, KEYS / 8>(score, spans, step.first);
    float correction[MT][2];
    if (softmax_step<MT, KEYS / 8>(score, r, correction, factor))
        rescale<MT, D / 8>(out, correction);
    multiply_fragments<MT, KEYS / 8, D / 8, KEYS>(out, score, values);
}

// Shared memory: queries, STAGES times keys and values, spans.
template <int D, int MT, int KEYS, int STAGES> static constexpr int forward_bytes()
{
    return tile_bytes<WARPS * MT * 16, D>() + STAGES * 2 * tile_bytes<KEYS, D>() +
           (int)sizeof(struct row_spans<WARPS * MT * 16>) + (int)sizeof(struct span_bounds);
}

template <int D, int MT, int KEYS, int STAGES, int CTAS, bool LOOSE>
static __global__ void __launch_bounds__(THREADS, CTAS)
    forward_kernel(struct attention op, struct query_matrix q)
{
    constexpr int ROWS = WARPS * MT * 16, TILE = tile_bytes<KEYS, D>();
    extern __shared__ __align__(128) unsigned char shared[];
    struct row_spans<ROWS> &rows =
        *(struct row_spans<ROWS> *)(shared + tile_bytes<ROWS, D>() + STAGES * 2 * TILE);
    uint32_t query = shared_address(shared), stages = query + tile_bytes<ROWS, D>();
    // The last tiles see the most of their document, as blocks are sorted: they start first.
    int kv_head = (int)(blockIdx.x % op.kv_heads);
    int first = (int)((gridDim.x - 1 - blockIdx.x) / op.kv_heads) * ROWS;
    load_queries<ROWS, D, THREADS>(op, q, kv_head, first, query, op.q, 0, NULL);
    spans_load<ROWS, LOOSE>(op, q, first, threadIdx.x, THREADS, &rows);
    __syncthreads();
    struct span_bounds &context = *(struct span_bounds *)(&rows + 1); // not in registers
    if (threadIdx.x < WARP) {
        struct span_bounds b = spans_bounds<ROWS>(rows.context);
        if (threadIdx.x == 0)
            context = b;
    }
    __syncthreads();
    struct key_step step = first_step<ROWS, LOOSE>(context, rows);
    float out[MT][D / 8][4], factor = op.scale * log2_e;
    struct running<MT> r;
    clear<MT, D / 8>(out);
    running_init<MT>(&r);

    if (!LOOSE || step.there)
        load_step<D, KEYS>(op, kv_head, step, stages, stages + TILE);
    for (uint32_t stage = 0; step.there;) {
        struct key_step next = step_after<ROWS, KEYS>(step, context, rows);
        uint32_t keys = stages + stage * 2 * TILE;
        copies_wait();
        __syncthreads(); // all have the tile, and are done with the one before
        stage = STAGES == 1 ? 0 : 1 - stage;
        uint32_t free = stages + stage * 2 * TILE;
        if (STAGES > 1 && next.there)
            load_step<D, KEYS>(op, kv_head, next, free, free + TILE);
        bool whole = step_whole<KEYS>(step, context);
        forward_step<D, MT, KEYS>(step, whole, rows, query, keys, keys + TILE, factor, &r, out);
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
    float inverse[MT][2];
    int top = threadIdx.x / WARP * MT * 16;
    running_end<MT, LOOSE>(op, q, kv_head, first + top, r, inverse);
    store_fragments<D, ROWS, MT>(op, q, kv_head, first, top, out, inverse, (bf16_t *)op.out,
                                 shared);
}

// A CTA for each tile of queries and key head. Shared memory: 50 KiB at D 64, 98 KiB at D 96 to 256.
template <int D, int MT, int KEYS, int STAGES, int CTAS, bool LOOSE>
static void forward_launch(struct stream *stream, const struct attention *op)
{
    constexpr int bytes = forward_bytes<D, MT, KEYS, STAGES>();
    static_assert(bytes <= 99 << 10, "what every device has");
    struct query_matrix q = query_matrix_make(op);
    unsigned ctas = grid_size(divide_up(q.count, WARPS * MT * 16) * op->kv_heads);
    allow_shared(forward_kernel<D, MT, KEYS, STAGES, CTAS, LOOSE>, bytes);
    forward_kernel<D, MT, KEYS, STAGES, CTAS, LOOSE>
        <<<ctas, THREADS, bytes, stream->cuda>>>(*op, q);
    launch_check();
}

template <bool LOOSE> static void forward_choose(struct stream *stream, const struct attention *op)
{
    if (op->head_dim == 64)
        forward_launch<64, 2, 64, 2, 3, LOOSE>(stream, op);
    else if (op->head_dim == 96)
        forward_launch<96, 2, 64, 2, 2, LOOSE>(stream, op);
    else if (op->head_dim == 128)
        forward_launch<128, 2, 64, 2, 2, LOOSE>(stream, op);
    else
        forward_launch<256, 1, 64, 1, 2, LOOSE>(stream, op);
}

void attention_forward_mma(struct stream *stream, const struct attention *op)
{
    if (op->block_size == 0)
        forward_choose<true>(stream, op);
    else
        forward_choose<false>(stream, op);
}
