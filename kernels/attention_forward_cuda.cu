// Owns the forward pass of attention on tensor cores. A CTA has one tile of the matrix of queries of a
// key head (so the heads of a group share what is read of keys and values), its warps have rows of it.
// Keys come in tiles: those of the rows' own blocks, then the context that some row sees, while the
// next tile is on its way. Only tiles that some row does not see wholly are masked; what no row sees is
// passed over.
#include "kernels/attention_walk.cuh"

// Running softmax of a thread's rows, of scores without their scale. sum: the thread's own part.
template <int MT> struct running {
    float max[MT][2], sum[MT][2];
};

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
template <int MT, int NT, int DT>
static __device__ __forceinline__ void softmax_step(float (*score)[NT][4], struct running<MT> *r,
                                                    float (*out)[DT][4], float factor)
{
    float correction[MT][2];
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
        }
    if (!__any_sync(~0u, changed))
        return;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int n = 0; n < DT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                out[i][n][e] *= correction[i][e / 2];
}

// out / sum as bf16, and lse.
template <int D, int MT>
static __device__ __forceinline__ void
forward_store(const struct attention &op, const struct query_matrix &q, int kv_head, int first,
              const struct running<MT> &r, const float (*out)[D / 8][4], unsigned char *tile)
{
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int top = threadIdx.x / WARP * MT * 16 + i * 16 + half * 8;
            int m = first + top + fragment_row();
            float sum = quad_sum(r.sum[i][half]), inverse = 1.0f / sum;
            if (threadIdx.x % 4 == 0 && m < q.count)
                op.lse[index_of(op, q, kv_head, m)] = r.max[i][half] * op.scale + logf(sum);
#pragma unroll
            for (int n = 0; n < D / 8; n++)
                fragment_put<WARPS * MT * 16>(
                    tile, top, n,
                    pack(out[i][n][half * 2] * inverse, out[i][n][half * 2 + 1] * inverse));
        }
    store_rows<D, MT>(op, q, kv_head, first, (bf16_t *)op.out, tile);
}

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
    softmax_step<MT, KEYS / 8, D / 8>(score, r, out, factor);
    multiply_fragments<MT, KEYS / 8, D / 8, KEYS>(out, score, values);
}

// Shared memory: queries, STAGES times keys and values, spans.
template <int D, int MT, int KEYS, int STAGES> static constexpr int forward_bytes()
{
    return tile_bytes<WARPS * MT * 16, D>() + STAGES * 2 * tile_bytes<KEYS, D>() +
           (int)sizeof(struct row_spans<WARPS * MT * 16>);
}

template <int D, int MT, int KEYS, int STAGES, int CTAS>
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
    spans_load<ROWS>(op, q, first, &rows);
    __syncthreads();
    struct span_bounds context = spans_bounds<ROWS>(rows.context);
    struct span_bounds own = spans_bounds<ROWS>(rows.own);
    float out[MT][D / 8][4], factor = op.scale * log2_e;
    struct running<MT> r;
    clear<MT, D / 8>(out);
#pragma unroll
    for (int i = 0; i < MT; i++)
        r.max[i][0] = r.max[i][1] = -INFINITY, r.sum[i][0] = r.sum[i][1] = 0.0f;

    struct key_step step = {true, true, own.begin, own.end};
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
    forward_store<D, MT>(op, q, kv_head, first, r, out, shared);
}

// A CTA for each tile of queries and key head. Shared memory: 50 KiB at D 64, 98 KiB at D 96 to 256.
template <int D, int MT, int KEYS, int STAGES, int CTAS>
static void forward_launch(struct stream *stream, const struct attention *op)
{
    constexpr int bytes = forward_bytes<D, MT, KEYS, STAGES>();
    static_assert(bytes <= 99 << 10, "what every device has");
    struct query_matrix q = query_matrix_make(op);
    unsigned ctas = grid_size(divide_up(q.count, WARPS * MT * 16) * op->kv_heads);
    allow_shared(forward_kernel<D, MT, KEYS, STAGES, CTAS>, bytes);
    forward_kernel<D, MT, KEYS, STAGES, CTAS><<<ctas, THREADS, bytes, stream->cuda>>>(*op, q);
    launch_check();
}

void attention_forward_mma(struct stream *stream, const struct attention *op)
{
    if (op->head_dim == 64)
        forward_launch<64, 2, 64, 2, 3>(stream, op);
    else if (op->head_dim == 96)
        forward_launch<96, 2, 64, 2, 2>(stream, op);
    else if (op->head_dim == 128)
        forward_launch<128, 2, 64, 2, 2>(stream, op);
    else
        forward_launch<256, 1, 64, 1, 2>(stream, op);
}
