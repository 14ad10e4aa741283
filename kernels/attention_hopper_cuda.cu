// Owns attention's forward pass and gradient of queries on Hopper's own tensor-core instructions. A tile of
// 128 rows of the matrix of queries and a key head are an item; a CTA works on one item after the other,
// 64 rows for each of two warpgroups that compute. A third warpgroup runs ahead of them: one warp has the
// copy engine bring queries, and keys and values through a ring of slots, one writes what rows see.
// Products of a tile of keys run while the softmax of another goes on, in the other warpgroup or in the
// same.
#include "kernels/attention_wgmma.cuh"

enum {
    ROWS = 128,
    ITEMS = 2, // that a CTA holds: one in work, one on its way
    REGISTERS = 232
};

// Shared memory: q (and dout) of each item, SLOTS tiles of keys or values, spans, barriers.
template <int D, int KEYS, int SLOTS, int QUERY_TILES> struct layout {
    static constexpr int TILE = tile_bytes<KEYS, D>(), QUERY = tile_bytes<ROWS, D>();
    static constexpr int ITEM = QUERY_TILES * QUERY, SLOT = ITEMS * ITEM;
    static constexpr int SPANS = SLOT + SLOTS * TILE;
    static constexpr int BARRIERS = SPANS + ITEMS * (int)sizeof(struct row_spans<ROWS>);
    static constexpr int ITEM_BARRIERS = BARRIERS + 16 * SLOTS;
    static constexpr int BYTES = ITEM_BARRIERS + 16 * ITEMS;
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

// Items come with the heaviest first, as blocks are sorted and the last ones of a document see the most
// of it.
struct item {
    int kv_head, first;       // first row of the matrix of queries
    struct query_matrix rows; // the matrix up to the item's last row
};

struct item_cursor {
    int turn, tiles; // tiles of queries
};

static __device__ __forceinline__ struct item_cursor items_begin(const struct query_matrix &q)
{
    int rows = rows_used(q, ROWS);
    return {0, (q.count + rows - 1) / rows};
}

static __device__ __forceinline__ bool item_next(const struct attention &op,
                                                 const struct query_matrix &q,
                                                 struct item_cursor *cursor, struct item *item)
{
    int i = item_of_turn(cursor->turn++), heads = (int)op.kv_heads;
    item->kv_head = i % heads;
    item->rows = q;
    item->first = (cursor->tiles - 1 - i / heads) * rows_used(q, ROWS);
    item->rows.count = min(item->first + rows_used(q, ROWS), q.count);
    return i < cursor->tiles * heads;
}

// The blocks' own keys of an item, without a look at what is in memory. Loose rows have none, and begin
// with what their spans say.
template <bool LOOSE>
static __device__ __forceinline__ struct key_step own_step(const struct attention &op,
                                                           const struct item &item)
{
    if (LOOSE)
        return {false, false, 0, 0};
    int size = (int)op.block_size, last = row_of(item.rows, item.rows.count - 1);
    return {true, true, row_of(item.rows, item.first) / size * size, (last / size + 1) * size};
}

// The warp that fills the ring: keys, values, keys, values. One lane gives the orders.
template <int D, int KEYS, int SLOTS, class Layout, bool LOOSE>
static __device__ __forceinline__ void
produce(const struct attention &op, const struct query_matrix &q, const struct attention_maps &maps,
        bool with_dout, unsigned char *shared)
{
    uint32_t base = shared_address(shared);
    bool leads = threadIdx.x % WARP == 0;
    const struct row_spans<ROWS> *spans = (const struct row_spans<ROWS> *)(shared + Layout::SPANS);
    struct tile_ring<SLOTS> ring = ring_make<SLOTS>(base + Layout::BARRIERS);
    struct tile_ring<ITEMS> items = ring_make<ITEMS>(base + Layout::ITEM_BARRIERS);
    struct item_cursor cursor = items_begin(q);
    for (struct item item; item_next(op, q, &cursor, &item); ring_next(&items)) {
        ring_wait_empty(items);
        if (leads) {
            uint32_t to = base + items.slot * Layout::ITEM;
            barrier_expect(ring_full(items), Layout::ITEM / ROWS * rows_used(q, ROWS));
            fetch_queries<D, ROWS>(q, item.kv_head, item.first, to, &maps.q, ring_full(items));
            if (with_dout)
                fetch_queries<D, ROWS>(q, item.kv_head, item.first, to + Layout::QUERY, &maps.dout,
                                       ring_full(items));
        }
        struct span_bounds context;
        struct key_step step = own_step<LOOSE>(op, item);
        if (LOOSE) {
            ring_wait_full(items);
            context = spans_bounds<ROWS>(spans[items.slot].context);
            step = context_step(context);
        }
        for (bool known = LOOSE; step.there;
             step = step_after<ROWS, KEYS>(step, context, spans[items.slot])) {
            if (leads) {
                const CUtensorMap *k = step.own ? &maps.k_block : &maps.k_context;
                const CUtensorMap *v = step.own ? &maps.v_block : &maps.v_context;
                fetch_keys<D, KEYS, SLOTS>(&ring, base + Layout::SLOT, k, item.kv_head, step.first);
                fetch_keys<D, KEYS, SLOTS>(&ring, base + Layout::SLOT, v, item.kv_head, step.first);
            }
            __syncwarp();
            if (!known) { // the first step needs no spans
                ring_wait_full(items);
                context = spans_bounds<ROWS>(spans[items.slot].context);
                known = true;
            }
        }
        reads_release(ring_full(items));
    }
}

// The warp that writes spans.
template <class Layout, bool LOOSE>
static __device__ __forceinline__ void
produce_spans(const struct attention &op, const struct query_matrix &q, unsigned char *shared)
{
    struct row_spans<ROWS> *spans = (struct row_spans<ROWS> *)(shared + Layout::SPANS);
    struct tile_ring<ITEMS> items =
        ring_make<ITEMS>(shared_address(shared) + Layout::ITEM_BARRIERS);
    struct item_cursor cursor = items_begin(q);
    for (struct item item; item_next(op, q, &cursor, &item); ring_next(&items)) {
        ring_wait_empty(items);
        spans_load<ROWS, LOOSE>(op, item.rows, item.first, threadIdx.x % WARP, WARP,
                                &spans[items.slot]);
        barrier_arrive(ring_full(items));
    }
}

// An item is full when its queries have come and each lane of the other warp has written; it is empty
// when all threads that compute and the lanes that fill the ring are done with it.
template <int SLOTS, class Layout>
static __device__ __forceinline__ void barriers_make(const struct query_matrix &q,
                                                     unsigned char *shared)
{
    uint32_t base = shared_address(shared);
    if (rows_used(q, ROWS) < ROWS)
        zeros_write(shared, Layout::SLOT);
    if (threadIdx.x == 0) {
        ring_init<SLOTS>(base + Layout::BARRIERS, 1, CONSUMERS / WARP);
        ring_init<ITEMS>(base + Layout::ITEM_BARRIERS, 1 + WARP, CONSUMERS + WARP);
        barriers_publish();
    }
    __syncthreads();
}

// Whether this thread computes. Otherwise its work is done.
template <int D, int KEYS, int SLOTS, class Layout, bool LOOSE>
static __device__ __forceinline__ bool
split_roles(const struct attention &op, const struct query_matrix &q,
            const struct attention_maps &maps, bool with_dout, unsigned char *shared)
{
    barriers_make<SLOTS, Layout>(q, shared);
    if (threadIdx.x >= 128) {
        registers_take<REGISTERS>();
        return true;
    }
    registers_give<HOPPER_REGISTERS - 2 * REGISTERS>();
    if (threadIdx.x < WARP)
        produce<D, KEYS, SLOTS, Layout, LOOSE>(op, q, maps, with_dout, shared);
    else if (threadIdx.x < 2 * WARP)
        produce_spans<Layout, LOOSE>(op, q, shared);
    return false;
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
template <int D, int KEYS, int SLOTS, bool LOOSE>
static __device__ __forceinline__ void
forward_consume(const struct attention &op, const struct row_spans<ROWS> &rows,
                const struct item &item, uint32_t query, uint32_t slots,
                struct tile_ring<SLOTS> *keys_ring, int top, struct running<1> *r,
                float (*out)[D / 8][4])
{
    constexpr int TILE = tile_bytes<KEYS, D>();
    struct key_step step = own_step<LOOSE>(op, item);
    struct span_bounds context = spans_bounds<ROWS>(rows.context);
    if (LOOSE)
        step = context_step(context);
    if (LOOSE && !step.there)
        return;
    struct tile_ring<SLOTS> ring = *keys_ring;
    float score[1][KEYS / 8][4], correction[1][2], factor = op.scale * log2_e;
    uint32_t p[KEYS / 16][4], full_k, full_v;
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
        // Two waits, so that the exponentials of this tile run while the last one is summed up.
        if (changed) {
            products_wait<0>();
            sums_settle<D / 8>(out[0]);
            rescale<1, D / 8>(out, correction);
        } else {
            asm volatile("// nothing to rescale");
            products_wait<0>();
            sums_settle<D / 8>(out[0]);
        }
        slot_release(full_v);
        pack_factors<KEYS / 8>(p, score[0]);
    }
    uint32_t values = take_slot<SLOTS, TILE>(&ring, slots, &full_v);
    products_fence();
    sums_start<KEYS, D, KEYS>(out[0], p, values);
    products_commit();
    products_wait<0>();
    sums_settle<D / 8>(out[0]);
    slot_release(full_v);
    *keys_ring = ring;
}

// dq of a warpgroup's rows, without the scale. The sums of a tile are on their way while the scores of
// the next are computed.
template <int D, int KEYS, int SLOTS, bool LOOSE>
static __device__ __forceinline__ void
dq_consume(const struct attention &op, const struct row_spans<ROWS> &rows, const struct item &item,
           uint32_t query, uint32_t dout, uint32_t slots, struct tile_ring<SLOTS> *keys_ring,
           int top, const struct row_statistics<1> &statistics, float (*dq)[D / 8][4])
{
    constexpr int TILE = tile_bytes<KEYS, D>();
    struct key_step step = own_step<LOOSE>(op, item);
    struct span_bounds context = spans_bounds<ROWS>(rows.context);
    if (LOOSE)
        step = context_step(context);
    if (LOOSE && !step.there)
        return;
    struct tile_ring<SLOTS> ring = *keys_ring;
    float score[1][KEYS / 8][4], dp[1][KEYS / 8][4], factor = op.scale * log2_e;
    uint32_t ds[KEYS / 16][4], full_k, full_v, last = 0;
    for (; step.there; step = step_after<ROWS, KEYS>(step, context, rows)) {
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
    slot_release(last);
    *keys_ring = ring;
}

#endif // HAS_WGMMA

template <int D, int KEYS, int SLOTS, bool LOOSE>
static __global__ void HOPPER_BOUNDS forward_kernel(
    struct attention op, struct query_matrix q, const __grid_constant__ struct attention_maps maps)
{
#if HAS_WGMMA
    typedef struct layout<D, KEYS, SLOTS, 1> Layout;
    extern __shared__ __align__(1024) unsigned char shared[];
    if (!split_roles<D, KEYS, SLOTS, Layout, LOOSE>(op, q, maps, false, shared))
        return;
    const struct row_spans<ROWS> *spans = (const struct row_spans<ROWS> *)(shared + Layout::SPANS);
    uint32_t base = shared_address(shared);
    int warp = warp_of_cta(), group = warp / 4 - 1, top = (warp - 4) * 16;
    struct tile_ring<SLOTS> ring = ring_make<SLOTS>(base + Layout::BARRIERS);
    struct tile_ring<ITEMS> items = ring_make<ITEMS>(base + Layout::ITEM_BARRIERS);
    struct item_cursor cursor = items_begin(q);
    for (struct item item; item_next(op, q, &cursor, &item); ring_next(&items)) {
        float out[1][D / 8][4], inverse[1][2];
        struct running<1> r;
        running_init<1>(&r);
        clear<1, D / 8>(out);
        uint32_t query = base + items.slot * Layout::ITEM + group * 64 * ROW_BYTES;
        ring_wait_full(items);
        forward_consume<D, KEYS, SLOTS, LOOSE>(op, spans[items.slot], item, query,
                                               base + Layout::SLOT, &ring, top, &r, out);
        group_sync(group + 1); // out lies where all of them read queries
        running_end<1, LOOSE>(op, item.rows, item.kv_head, item.first + top, r, inverse);
        store_fragments<D, ROWS, 1>(op, item.rows, item.kv_head, item.first, top, out, inverse,
                                    (bf16_t *)op.out, shared + items.slot * Layout::ITEM);
        copies_after_writes();
        reads_release(ring_full(items));
    }
#endif
}

template <int D, int KEYS, int SLOTS, bool LOOSE>
static __global__ void HOPPER_BOUNDS dq_kernel(struct attention op, struct query_matrix q,
                                               const __grid_constant__ struct attention_maps maps)
{
#if HAS_WGMMA
    typedef struct layout<D, KEYS, SLOTS, 2> Layout;
    extern __shared__ __align__(1024) unsigned char shared[];
    if (!split_roles<D, KEYS, SLOTS, Layout, LOOSE>(op, q, maps, true, shared))
        return;
    const struct row_spans<ROWS> *spans = (const struct row_spans<ROWS> *)(shared + Layout::SPANS);
    uint32_t base = shared_address(shared);
    int warp = warp_of_cta(), group = warp / 4 - 1, top = (warp - 4) * 16;
    struct tile_ring<SLOTS> ring = ring_make<SLOTS>(base + Layout::BARRIERS);
    struct tile_ring<ITEMS> items = ring_make<ITEMS>(base + Layout::ITEM_BARRIERS);
    struct item_cursor cursor = items_begin(q);
    for (struct item item; item_next(op, q, &cursor, &item); ring_next(&items)) {
        float dq[1][D / 8][4], scale[1][2] = {{op.scale, op.scale}};
        struct row_statistics<1> statistics =
            statistics_of<1>(op, item.rows, item.kv_head, item.first + top);
        clear<1, D / 8>(dq);
        uint32_t query = base + items.slot * Layout::ITEM + group * 64 * ROW_BYTES;
        ring_wait_full(items);
        dq_consume<D, KEYS, SLOTS, LOOSE>(op, spans[items.slot], item, query, query + Layout::QUERY,
                                          base + Layout::SLOT, &ring, top, statistics, dq);
        group_sync(group + 1); // dq lies where all of them read queries
        store_fragments<D, ROWS, 1>(op, item.rows, item.kv_head, item.first, top, dq, scale,
                                    (bf16_t *)op.dq, shared + items.slot * Layout::ITEM);
        copies_after_writes();
        reads_release(ring_full(items));
    }
#endif
}

typedef void tile_kernel(struct attention, struct query_matrix, const struct attention_maps);

static void launch(struct stream *stream, const struct attention *op, tile_kernel *kernel, int keys,
                   int bytes)
{
    struct query_matrix q = query_matrix_make(op);
    struct attention_maps maps;
    attention_maps_make(op, ROWS, keys, &maps);
    int64_t items = divide_up(q.count, rows_used(q, ROWS)) * op->kv_heads;
    unsigned ctas = attention_hopper_ctas(items);
    allow_shared(kernel, (size_t)bytes);
    kernel<<<ctas, HOPPER_THREADS, bytes, stream->cuda>>>(*op, q, maps);
    launch_check();
}

bool attention_fits_hopper(struct stream *stream, const struct attention *op)
{
    int64_t group = op->heads / op->kv_heads;
    if (stream->generic || (op->head_dim != 64 && op->head_dim != 128) || group > 64)
        return false;
    cudaFuncAttributes built;
    cuda_check(cudaFuncGetAttributes(&built, forward_kernel<128, 128, 4, false>));
    return built.maxThreadsPerBlock >= HOPPER_THREADS;
}

// Shared memory: 196 KiB at D 128, 100 KiB at D 64.
template <bool LOOSE> static void forward_launch(struct stream *stream, const struct attention *op)
{
    if (op->head_dim == 64)
        launch(stream, op, forward_kernel<64, 128, 4, LOOSE>, 128, layout<64, 128, 4, 1>::BYTES);
    else
        launch(stream, op, forward_kernel<128, 128, 4, LOOSE>, 128, layout<128, 128, 4, 1>::BYTES);
}

void attention_forward_hopper(struct stream *stream, const struct attention *op)
{
    if (op->block_size == 0)
        forward_launch<true>(stream, op);
    else
        forward_launch<false>(stream, op);
}

// Shared memory: 196 KiB at D 128, 100 KiB at D 64.
template <bool LOOSE> static void dq_launch(struct stream *stream, const struct attention *op)
{
    if (op->head_dim == 64)
        launch(stream, op, dq_kernel<64, 64, 4, LOOSE>, 64, layout<64, 64, 4, 2>::BYTES);
    else
        launch(stream, op, dq_kernel<128, 64, 4, LOOSE>, 64, layout<128, 64, 4, 2>::BYTES);
}

void attention_dq_hopper(struct stream *stream, const struct attention *op)
{
    if (op->block_size == 0)
        dq_launch<true>(stream, op);
    else
        dq_launch<false>(stream, op);
}
