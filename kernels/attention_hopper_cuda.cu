// Owns attention's forward pass and gradient of queries on Hopper's own tensor-core instructions. A CTA
// has a tile of 128 rows of the matrix of queries, 64 for each of two warpgroups that compute; one warp
// of a third has the copy engine bring tiles of keys and values through a ring of slots. Products of a
// tile run while the softmax of another goes on, in the other warpgroup or in the same.
#include "kernels/attention_wgmma.cuh"

enum { ROWS = 128 };

// Shared memory: q (and dout), SLOTS tiles of keys or values, spans, barriers.
template <int D, int KEYS, int SLOTS, int QUERY_TILES> struct layout {
    static constexpr int TILE = tile_bytes<KEYS, D>(), QUERY = tile_bytes<ROWS, D>();
    static constexpr int SLOT = QUERY_TILES * QUERY, SPANS = SLOT + SLOTS * TILE;
    static constexpr int BARRIERS = SPANS + (int)sizeof(struct row_spans<ROWS>);
    static constexpr int BYTES = BARRIERS + 16 * (SLOTS + 1);
};

#if HAS_WGMMA

template <int D, int KEYS, int SLOTS>
static __device__ __forceinline__ void fetch_keys(struct tile_ring<SLOTS> *ring, uint32_t slots,
                                                  const CUtensorMap *map, int kv_head, int first)
{
    constexpr int TILE = tile_bytes<KEYS, D>();
    uint32_t to = slots + ring->slot * TILE;
    ring_wait_empty(*ring);
    barrier_expect(ring_full(*ring), TILE);
    for (int panel = 0; panel < D / PANEL; panel++)
        fetch_panel(to + panel * KEYS * ROW_BYTES, map, kv_head * D + panel * PANEL, first,
                    ring_full(*ring));
    ring_next(ring);
}

// The warp that fills the ring: keys, values, keys, values. One lane gives the orders.
template <int D, int KEYS, int SLOTS>
static __device__ __forceinline__ void produce(const struct attention_maps &maps,
                                               const struct row_spans<ROWS> &rows, int kv_head,
                                               uint32_t slots, uint32_t barriers)
{
    struct span_bounds context = spans_bounds<ROWS>(rows.context);
    struct span_bounds own = spans_bounds<ROWS>(rows.own);
    struct tile_ring<SLOTS> ring = ring_make<SLOTS>(barriers);
    for (struct key_step step = {true, true, own.begin, own.end}; step.there;
         step = step_after<ROWS, KEYS>(step, context, rows)) {
        if (threadIdx.x % WARP == 0) {
            const CUtensorMap *k = step.own ? &maps.k_block : &maps.k_context;
            const CUtensorMap *v = step.own ? &maps.v_block : &maps.v_context;
            fetch_keys<D, KEYS, SLOTS>(&ring, slots, k, kv_head, step.first);
            fetch_keys<D, KEYS, SLOTS>(&ring, slots, v, kv_head, step.first);
        }
        __syncwarp();
    }
}

// Spans, barriers, and orders for the queries' own tiles.
template <int D, class Layout, int SLOTS>
static __device__ __forceinline__ void
prologue(const struct attention &op, const struct query_matrix &q, int kv_head, int first,
         const CUtensorMap *map, const CUtensorMap *map_2, unsigned char *shared)
{
    uint32_t base = shared_address(shared), barriers = base + Layout::BARRIERS;
    spans_load<ROWS>(op, q, first, (struct row_spans<ROWS> *)(shared + Layout::SPANS));
    if (threadIdx.x == 0) {
        ring_init<SLOTS>(barriers, 1, CONSUMERS / WARP);
        barrier_init(barriers + 16 * SLOTS, 1);
        barriers_publish();
    }
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    uint32_t barrier = barriers + 16 * SLOTS;
    barrier_expect(barrier, (map_2 != NULL ? 2 : 1) * Layout::QUERY);
    fetch_queries<D, ROWS>(q, kv_head, first, base, map, barrier);
    if (map_2 != NULL)
        fetch_queries<D, ROWS>(q, kv_head, first, base + Layout::QUERY, map_2, barrier);
}

// Probabilities of a tile of scores as factors; what sums so far are to be multiplied with.
template <int KEYS>
static __device__ __forceinline__ bool
forward_probabilities(const struct key_step &step, const struct span_bounds &context,
                      const struct row_spans<ROWS> &rows, int top, float (*score)[KEYS / 8][4],
                      struct running<1> *r, float (*correction)[2], float factor)
{
    if (!step_whole<KEYS>(step, context))
        hide<1, KEYS / 8>(score, (step.own ? rows.own : rows.context) + top, step.first);
    return softmax_step<1, KEYS / 8>(score, r, correction, factor);
}

// A warpgroup that computes. The scores of a tile are on their way while the tile before is summed up.
template <int D, int KEYS, int SLOTS>
static __device__ __forceinline__ void
forward_consume(const struct attention &op, const struct row_spans<ROWS> &rows, uint32_t query,
                uint32_t slots, uint32_t barriers, int top, struct running<1> *r,
                float (*out)[D / 8][4])
{
    constexpr int TILE = tile_bytes<KEYS, D>();
    struct span_bounds context = spans_bounds<ROWS>(rows.context);
    struct span_bounds own = spans_bounds<ROWS>(rows.own);
    struct tile_ring<SLOTS> ring = ring_make<SLOTS>(barriers);
    struct key_step step = {true, true, own.begin, own.end};
    float score[1][KEYS / 8][4], correction[1][2], factor = op.scale * log2_e;
    uint32_t p[KEYS / 16][4], full_k, full_v;
    barrier_wait(barriers + 16 * SLOTS, 0);
    uint32_t keys = take_slot<SLOTS, TILE>(&ring, slots, &full_k);
    products_fence();
    scores_start<D, KEYS, ROWS, KEYS>(score[0], query, keys);
    products_commit();
    products_wait<0>();
    sums_settle<KEYS / 8>(score[0]);
    slot_release(full_k);
    forward_probabilities<KEYS>(step, context, rows, top, score, r, correction, factor);
    pack_factors<KEYS / 8>(p, score[0]);
    for (;;) {
        step = step_after<ROWS, KEYS>(step, context, rows);
        struct tile_ring<SLOTS> of_values = ring;
        ring_next(&ring);
        if (!step.there) {
            ring = of_values;
            break;
        }
        keys = take_slot<SLOTS, TILE>(&ring, slots, &full_k);
        products_fence();
        scores_start<D, KEYS, ROWS, KEYS>(score[0], query, keys);
        products_commit();
        uint32_t values = take_slot<SLOTS, TILE>(&of_values, slots, &full_v);
        products_fence();
        sums_start<KEYS, D, KEYS>(out[0], p, values);
        products_commit();
        products_wait<1>();
        sums_settle<KEYS / 8>(score[0]);
        slot_release(full_k);
        bool changed =
            forward_probabilities<KEYS>(step, context, rows, top, score, r, correction, factor);
        products_wait<0>();
        sums_settle<D / 8>(out[0]);
        slot_release(full_v);
        if (changed)
            rescale<1, D / 8>(out, correction);
        pack_factors<KEYS / 8>(p, score[0]);
    }
    uint32_t values = take_slot<SLOTS, TILE>(&ring, slots, &full_v);
    products_fence();
    sums_start<KEYS, D, KEYS>(out[0], p, values);
    products_commit();
    products_wait<0>();
    sums_settle<D / 8>(out[0]);
}

// dq of a warpgroup's rows, without the scale. The sums of a tile are on their way while the scores of
// the next are computed.
template <int D, int KEYS, int SLOTS>
static __device__ __forceinline__ void
dq_consume(const struct attention &op, const struct row_spans<ROWS> &rows, uint32_t query,
           uint32_t dout, uint32_t slots, uint32_t barriers, int top,
           const struct row_statistics<1> &statistics, float (*dq)[D / 8][4])
{
    constexpr int TILE = tile_bytes<KEYS, D>();
    struct span_bounds context = spans_bounds<ROWS>(rows.context);
    struct span_bounds own = spans_bounds<ROWS>(rows.own);
    struct tile_ring<SLOTS> ring = ring_make<SLOTS>(barriers);
    float score[1][KEYS / 8][4], dp[1][KEYS / 8][4], factor = op.scale * log2_e;
    uint32_t ds[KEYS / 16][4], full_k, full_v, last = 0;
    barrier_wait(barriers + 16 * SLOTS, 0);
    for (struct key_step step = {true, true, own.begin, own.end}; step.there;
         step = step_after<ROWS, KEYS>(step, context, rows)) {
        uint32_t keys = take_slot<SLOTS, TILE>(&ring, slots, &full_k);
        products_fence();
        scores_start<D, KEYS, ROWS, KEYS>(score[0], query, keys);
        products_commit();
        uint32_t values = take_slot<SLOTS, TILE>(&ring, slots, &full_v);
        products_fence();
        scores_start<D, KEYS, ROWS, KEYS>(dp[0], dout, values);
        products_commit();
        products_wait<1>();
        sums_settle<KEYS / 8>(score[0]);
        if (last != 0)
            slot_release(last);
        last = full_k;
        if (!step_whole<KEYS>(step, context))
            hide<1, KEYS / 8>(score, (step.own ? rows.own : rows.context) + top, step.first);
        products_wait<0>();
        sums_settle<KEYS / 8>(dp[0]);
        slot_release(full_v);
        score_gradients<1, KEYS / 8>(score, dp, statistics, factor);
        pack_factors<KEYS / 8>(ds, score[0]);
        products_fence();
        sums_start<KEYS, D, KEYS>(dq[0], ds, keys);
        products_commit();
    }
    products_wait<0>();
    sums_settle<D / 8>(dq[0]);
}

// The last tiles see the most of their document, as blocks are sorted: they start first.
static __device__ __forceinline__ int first_of_tile(const struct attention &op)
{
    return (int)((gridDim.x - 1 - blockIdx.x) / op.kv_heads) * ROWS;
}

#endif // HAS_WGMMA

template <int D, int KEYS, int SLOTS>
static __global__ void HOPPER_BOUNDS forward_kernel(
    struct attention op, struct query_matrix q, const __grid_constant__ struct attention_maps maps)
{
#if HAS_WGMMA
    typedef struct layout<D, KEYS, SLOTS, 1> Layout;
    extern __shared__ __align__(1024) unsigned char shared[];
    const struct row_spans<ROWS> &rows = *(const struct row_spans<ROWS> *)(shared + Layout::SPANS);
    uint32_t base = shared_address(shared);
    int kv_head = (int)(blockIdx.x % op.kv_heads), first = first_of_tile(op);
    prologue<D, Layout, SLOTS>(op, q, kv_head, first, &maps.q, NULL, shared);
    if (threadIdx.x < 128) {
        registers_give<PRODUCER_REGISTERS>();
        if (threadIdx.x < WARP)
            produce<D, KEYS, SLOTS>(maps, rows, kv_head, base + Layout::SLOT,
                                    base + Layout::BARRIERS);
        return;
    }
    registers_take<CONSUMER_REGISTERS>();
    int group = (int)threadIdx.x / 128 - 1, top = ((int)threadIdx.x / WARP - 4) * 16;
    float out[1][D / 8][4], inverse[1][2];
    struct running<1> r;
    running_init<1>(&r);
    clear<1, D / 8>(out);
    forward_consume<D, KEYS, SLOTS>(op, rows, base + group * 64 * ROW_BYTES, base + Layout::SLOT,
                                    base + Layout::BARRIERS, top, &r, out);
    running_end<1>(op, q, kv_head, first + top, r, inverse);
    store_fragments<D, ROWS, 1>(op, q, kv_head, first, top, out, inverse, (bf16_t *)op.out, shared);
#endif
}

template <int D, int KEYS, int SLOTS>
static __global__ void HOPPER_BOUNDS dq_kernel(struct attention op, struct query_matrix q,
                                               const __grid_constant__ struct attention_maps maps)
{
#if HAS_WGMMA
    typedef struct layout<D, KEYS, SLOTS, 2> Layout;
    extern __shared__ __align__(1024) unsigned char shared[];
    const struct row_spans<ROWS> &rows = *(const struct row_spans<ROWS> *)(shared + Layout::SPANS);
    uint32_t base = shared_address(shared);
    int kv_head = (int)(blockIdx.x % op.kv_heads), first = first_of_tile(op);
    prologue<D, Layout, SLOTS>(op, q, kv_head, first, &maps.q, &maps.dout, shared);
    if (threadIdx.x < 128) {
        registers_give<PRODUCER_REGISTERS>();
        if (threadIdx.x < WARP)
            produce<D, KEYS, SLOTS>(maps, rows, kv_head, base + Layout::SLOT,
                                    base + Layout::BARRIERS);
        return;
    }
    registers_take<CONSUMER_REGISTERS>();
    int group = (int)threadIdx.x / 128 - 1, top = ((int)threadIdx.x / WARP - 4) * 16;
    uint32_t query = base + group * 64 * ROW_BYTES;
    float dq[1][D / 8][4], scale[1][2] = {{op.scale, op.scale}};
    struct row_statistics<1> statistics = statistics_of<1>(op, q, kv_head, first + top);
    clear<1, D / 8>(dq);
    dq_consume<D, KEYS, SLOTS>(op, rows, query, query + Layout::QUERY, base + Layout::SLOT,
                               base + Layout::BARRIERS, top, statistics, dq);
    store_fragments<D, ROWS, 1>(op, q, kv_head, first, top, dq, scale, (bf16_t *)op.dq, shared);
#endif
}

typedef void tile_kernel(struct attention, struct query_matrix, const struct attention_maps);

// A CTA for each tile of queries and key head.
static void launch(struct stream *stream, const struct attention *op, tile_kernel *kernel, int keys,
                   int bytes)
{
    struct query_matrix q = query_matrix_make(op);
    struct attention_maps maps;
    attention_maps_make(op, ROWS, keys, &maps);
    unsigned ctas = grid_size(divide_up(q.count, ROWS) * op->kv_heads);
    allow_shared(kernel, (size_t)bytes);
    kernel<<<ctas, HOPPER_THREADS, bytes, stream->cuda>>>(*op, q, maps);
    launch_check();
}

bool attention_fits_hopper(struct stream *stream, const struct attention *op)
{
    int64_t group = op->heads / op->kv_heads;
    if (stream->generic || (op->head_dim != 64 && op->head_dim != 128) || 64 % group != 0)
        return false;
    cudaFuncAttributes built;
    cuda_check(cudaFuncGetAttributes(&built, forward_kernel<128, 128, 4>));
    return built.maxThreadsPerBlock >= HOPPER_THREADS;
}

// Shared memory: 162 KiB at D 128, 98 KiB at D 64.
void attention_forward_hopper(struct stream *stream, const struct attention *op)
{
    if (op->head_dim == 64)
        launch(stream, op, forward_kernel<64, 128, 4>, 128, layout<64, 128, 4, 1>::BYTES);
    else
        launch(stream, op, forward_kernel<128, 128, 4>, 128, layout<128, 128, 4, 1>::BYTES);
}

// Shared memory: 162 KiB at D 128, 82 KiB at D 64.
void attention_dq_hopper(struct stream *stream, const struct attention *op)
{
    if (op->head_dim == 64)
        launch(stream, op, dq_kernel<64, 64, 6>, 64, layout<64, 64, 6, 2>::BYTES);
    else
        launch(stream, op, dq_kernel<128, 64, 6>, 64, layout<128, 64, 6, 2>::BYTES);
}
