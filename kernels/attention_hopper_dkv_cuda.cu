// Owns the gradients of keys and values of attention on Hopper's own tensor-core instructions. A tile of 128
// keys of a key head is an item; a CTA works on one after the other, 64 keys for each of two warpgroups
// that compute. Of a third, one warp has the copy engine bring keys and values, and tiles of queries and
// dout through a ring of slots; the others write the numbers that belong to their rows, each those of every
// third tile, because one of them alone would wait longer for memory than the products of a tile take.
#include "kernels/attention_plan.cuh"
#include "kernels/attention_wgmma.cuh"

enum {
    KEYS = 128,
    GROUP_KEYS = 64,
    ROWS = 64,
    NUMBERS = 3, // slots for numbers of rows, one of each warp that writes them
    REGISTERS = 240
};

// What the warps that compute are told about a tile of queries.
enum tile_state { TILE_MASKED, TILE_WHOLE, TILE_NONE }; // NONE: there are no more

struct tile_numbers {
    struct query_rows<ROWS> rows;
    int32_t state[4]; // the first counts
};

// Shared memory: keys, values, SLOTS tiles of queries or dout, numbers of rows, barriers.
template <int D, int SLOTS> struct layout {
    static constexpr int TILE = tile_bytes<ROWS, D>(), KEY = tile_bytes<KEYS, D>();
    static constexpr int SLOT = 2 * KEY, NUMBER = SLOT + SLOTS * TILE;
    static constexpr int BARRIERS = NUMBER + NUMBERS * (int)sizeof(struct tile_numbers);
    static constexpr int NUMBER_BARRIERS = BARRIERS + 16 * SLOTS;
    static constexpr int KEY_BARRIERS = NUMBER_BARRIERS + 16 * NUMBERS;
    static constexpr int BYTES = KEY_BARRIERS + 16;
};

#if HAS_WGMMA

template <int D, int SLOTS>
static __device__ __forceinline__ void
fetch_tile(struct tile_ring<SLOTS> *ring, uint32_t slots, const CUtensorMap *map,
           const struct query_matrix &q, int kv_head, int tile)
{
    constexpr int TILE = tile_bytes<ROWS, D>();
    ring_wait_empty(*ring);
    barrier_expect(ring_full(*ring), TILE / ROWS * rows_used(q, ROWS));
    fetch_queries<D, ROWS>(q, kv_head, tile * rows_used(q, ROWS), slots + ring->slot * TILE, map,
                           ring_full(*ring));
    ring_next(ring);
}

// Keys and values of an item.
template <int D>
static __device__ __forceinline__ void fetch_item(const struct attention_maps &maps,
                                                  const struct key_tile &keys, int kv_head,
                                                  uint32_t to, uint32_t barrier)
{
    constexpr int KEY = tile_bytes<KEYS, D>();
    const CUtensorMap *k = keys.own ? &maps.k_block : &maps.k_context;
    const CUtensorMap *v = keys.own ? &maps.v_block : &maps.v_context;
    barrier_expect(barrier, 2 * KEY);
    for (int panel = 0; panel < D / PANEL; panel++, to += KEYS * ROW_BYTES) {
        fetch_panel(to, k, kv_head * D + panel * PANEL, keys.first, barrier);
        fetch_panel(to + KEY, v, kv_head * D + panel * PANEL, keys.first, barrier);
    }
}

template <int D, int SLOTS>
static __device__ __forceinline__ void
produce_tiles(const struct attention &op, const struct query_matrix &q,
              const struct attention_plan &plan, const struct attention_maps &maps, uint32_t base)
{
    typedef struct layout<D, SLOTS> Layout;
    struct tile_ring<SLOTS> ring = ring_make<SLOTS>(base + Layout::BARRIERS);
    struct tile_ring<1> key_ring = ring_make<1>(base + Layout::KEY_BARRIERS);
    bool leads = threadIdx.x % WARP == 0;
    for (int turn = 0, index; (index = item_of_turn(turn)) < plan.items; turn++) {
        struct key_tile keys = tile_of<KEYS>(op, plan, index);
        int kv_head = index % (int)op.kv_heads;
        if (leads) {
            ring_wait_empty(key_ring);
            fetch_item<D>(maps, keys, kv_head, base, ring_full(key_ring));
        }
        ring_next(&key_ring);
        struct query_cursor cursor = cursor_make<KEYS>(op, q, plan, keys);
        for (int tile; (tile = cursor_next<KEYS>(&cursor, plan, keys)) >= 0;) {
            if (leads) {
                fetch_tile<D, SLOTS>(&ring, base + Layout::SLOT, &maps.q, q, kv_head, tile);
                fetch_tile<D, SLOTS>(&ring, base + Layout::SLOT, &maps.dout, q, kv_head, tile);
            }
            __syncwarp();
        }
    }
}

// The numbers of a lane's rows of a tile, one in each 32.
struct lane_numbers {
    float lse[ROWS / WARP], delta[ROWS / WARP];
    struct span seen[ROWS / WARP];
};

// All loads are on their way before the first number is looked at.
static __device__ __forceinline__ void read_numbers(const struct attention &op,
                                                    const struct query_matrix &q, bool own,
                                                    int kv_head, int tile, struct lane_numbers *to)
{
    int first = tile * rows_used(q, ROWS), used = min(rows_used(q, ROWS), q.count - first);
#pragma unroll
    for (int i = 0; i < ROWS / WARP; i++) {
        int at = i * WARP + threadIdx.x % WARP;
        int64_t index = index_of(op, q, kv_head, first + min(at, used - 1));
        to->lse[i] = at < used ? op.lse[index] : INFINITY;
        to->delta[i] = at < used ? op.delta[index] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < ROWS / WARP; i++) {
        int at = i * WARP + threadIdx.x % WARP, row = row_of(q, first + min(at, used - 1));
        to->seen[i] = own ? own_span(op, row) : context_span(op, row);
    }
}

static __device__ __forceinline__ void write_numbers(const struct lane_numbers &from,
                                                     struct query_rows<ROWS> *to)
{
#pragma unroll
    for (int i = 0; i < ROWS / WARP; i++) {
        int at = i * WARP + threadIdx.x % WARP;
        to->begin[at] = from.seen[i].begin;
        to->end[at] = from.seen[i].end;
        to->lse[at] = from.lse[i];
        to->delta[at] = from.delta[i];
    }
}

// Whether all rows see all keys of a tile of the context; the same in all lanes.
static __device__ __forceinline__ bool sees_whole(const struct lane_numbers &of,
                                                  const struct key_tile &keys)
{
    bool all = !keys.own;
#pragma unroll
    for (int i = 0; i < ROWS / WARP; i++)
        all = all && of.seen[i].begin <= keys.first && of.seen[i].end >= keys.first + KEYS;
    return __all_sync(~0u, all);
}

// The numbers of a tile, or the word that there are no more, into the current slot.
static __device__ __forceinline__ void
produce_tile_numbers(const struct attention &op, const struct query_matrix &q,
                     const struct key_tile &keys, int kv_head, int tile, struct tile_numbers *to,
                     const struct tile_ring<NUMBERS> &ring)
{
    struct lane_numbers numbers;
    int state = TILE_NONE;
    if (tile >= 0) {
        read_numbers(op, q, keys.own, kv_head, tile, &numbers);
        state = sees_whole(numbers, keys) ? TILE_WHOLE : TILE_MASKED;
    }
    ring_wait_empty(ring);
    if (tile >= 0)
        write_numbers(numbers, &to->rows);
    if (threadIdx.x % WARP == 0)
        to->state[0] = state;
    barrier_arrive(ring_full(ring));
}

// Of all tiles of all items in turn, the numbers of those whose slot is `own`.
template <int D, int SLOTS>
static __device__ __forceinline__ void
produce_numbers(const struct attention &op, const struct query_matrix &q,
                const struct attention_plan &plan, unsigned own, unsigned char *shared)
{
    typedef struct layout<D, SLOTS> Layout;
    struct tile_ring<NUMBERS> ring =
        ring_make<NUMBERS>(shared_address(shared) + Layout::NUMBER_BARRIERS);
    struct tile_numbers *to = (struct tile_numbers *)(shared + Layout::NUMBER) + own;
    for (int turn = 0, index; (index = item_of_turn(turn)) < plan.items; turn++) {
        struct key_tile keys = tile_of<KEYS>(op, plan, index);
        struct query_cursor cursor = cursor_make<KEYS>(op, q, plan, keys);
        int tile;
        do {
            tile = cursor_next<KEYS>(&cursor, plan, keys);
            if (ring.slot == own)
                produce_tile_numbers(op, q, keys, index % (int)op.kv_heads, tile, to, ring);
            ring_next(&ring);
        } while (tile >= 0);
    }
}

// Where a CTA's tiles are, as a warpgroup sees them: its own keys and values, and the rings.
template <int SLOTS> struct dkv_tiles {
    uint32_t keys, values, slots;
    const struct tile_numbers *numbers;
    struct tile_ring<SLOTS> ring;
    struct tile_ring<NUMBERS> number_ring;
    struct tile_ring<1> key_ring;
};

// Adds up dk and dv of a warpgroup's 64 keys, of which this warp has 16 from `first` on. The products of
// a tile of queries with dscore are on their way while the scores of the next are computed.
template <int D, int SLOTS>
static __device__ __forceinline__ void dkv_consume(struct dkv_tiles<SLOTS> *tiles, int group_first,
                                                   int first, float factor, float (*dk)[D / 8][4],
                                                   float (*dv)[D / 8][4])
{
    constexpr int TILE = tile_bytes<ROWS, D>(), NT = ROWS / 8;
    float score[NT][4], dp[NT][4];
    uint32_t p[NT / 2][4], full_q, full_do, last = 0;
    ring_wait_full(tiles->key_ring);
    for (;;) {
        uint32_t full_number = ring_full(tiles->number_ring);
        ring_wait_full(tiles->number_ring);
        const struct query_rows<ROWS> &rows = tiles->numbers[tiles->number_ring.slot].rows;
        int state = tiles->numbers[tiles->number_ring.slot].state[0];
        ring_next(&tiles->number_ring);
        if (state == TILE_NONE) {
            reads_release(full_number);
            break;
        }
        bool whole = state == TILE_WHOLE;
        uint32_t query = take_slot<SLOTS, TILE>(&tiles->ring, tiles->slots, &full_q);
        if (!whole && !keys_are_seen<ROWS, GROUP_KEYS>(rows, group_first)) {
            take_slot<SLOTS, TILE>(&tiles->ring, tiles->slots, &full_do);
            slot_release(full_q);
            slot_release(full_do);
            reads_release(full_number);
            products_wait<0>();
            if (last != 0)
                slot_release(last); // or the ring would stop, were all further tiles passed over
            last = 0;
            continue;
        }
        products_fence();
        scores_start<D, ROWS, KEYS, ROWS>(score, tiles->keys, query);
        products_commit();
        uint32_t dout = take_slot<SLOTS, TILE>(&tiles->ring, tiles->slots, &full_do);
        products_fence();
        scores_start<D, ROWS, KEYS, ROWS>(dp, tiles->values, dout);
        products_commit();
        products_wait<1>();
        sums_settle<NT>(score);
        if (last != 0)
            slot_release(last);
        last = full_q;
        if (!whole)
            hide_columns<NT>(score, rows, first);
        probabilities<NT>(score, rows, factor);
        pack_factors<NT>(p, score);
        products_fence();
        sums_start<ROWS, D, ROWS>(dv[0], p, dout);
        products_commit();
        products_wait<0>(); // dv's, too: there are no registers for both factors
        slot_release(full_do);
        sums_settle<NT>(dp);
        score_gradients<NT>(score, dp, rows);
        reads_release(full_number);
        pack_factors<NT>(p, score);
        products_fence();
        sums_start<ROWS, D, ROWS>(dk[0], p, query);
        products_commit();
    }
    slot_release(ring_full(tiles->key_ring)); // no scores are under way
    ring_next(&tiles->key_ring);
    products_wait<0>();
    sums_settle<D / 8>(dk[0]);
    sums_settle<D / 8>(dv[0]);
    if (last != 0)
        slot_release(last);
}

template <int D, int SLOTS>
static __device__ __forceinline__ void prologue(const struct query_matrix &q, unsigned char *shared)
{
    typedef struct layout<D, SLOTS> Layout;
    uint32_t base = shared_address(shared);
    if (rows_used(q, ROWS) < ROWS)
        zeros_write(shared + Layout::SLOT, SLOTS * Layout::TILE);
    if (threadIdx.x == 0) {
        ring_init<SLOTS>(base + Layout::BARRIERS, 1, CONSUMERS / WARP);
        ring_init<NUMBERS>(base + Layout::NUMBER_BARRIERS, WARP, CONSUMERS);
        ring_init<1>(base + Layout::KEY_BARRIERS, 1, CONSUMERS / WARP);
        barriers_publish();
    }
    __syncthreads();
}

#endif // HAS_WGMMA

template <int D, int SLOTS>
static __global__ void HOPPER_BOUNDS dkv_kernel(struct attention op, struct query_matrix q,
                                                struct attention_plan plan,
                                                const __grid_constant__ struct attention_maps maps)
{
#if HAS_WGMMA
    typedef struct layout<D, SLOTS> Layout;
    extern __shared__ __align__(1024) unsigned char shared[];
    uint32_t base = shared_address(shared);
    int warp = warp_of_cta(), group = warp / 4 - 1;
    prologue<D, SLOTS>(q, shared);
    if (warp < 4) {
        registers_give<HOPPER_REGISTERS - 2 * REGISTERS>();
        if (warp == 0)
            produce_tiles<D, SLOTS>(op, q, plan, maps, base);
        else
            produce_numbers<D, SLOTS>(op, q, plan, (unsigned)warp - 1, shared);
        return;
    }
    registers_take<REGISTERS>();
    struct dkv_tiles<SLOTS> tiles;
    tiles.keys = base + group * GROUP_KEYS * ROW_BYTES;
    tiles.values = tiles.keys + Layout::KEY;
    tiles.slots = base + Layout::SLOT;
    tiles.numbers = (const struct tile_numbers *)(shared + Layout::NUMBER);
    tiles.ring = ring_make<SLOTS>(base + Layout::BARRIERS);
    tiles.number_ring = ring_make<NUMBERS>(base + Layout::NUMBER_BARRIERS);
    tiles.key_ring = ring_make<1>(base + Layout::KEY_BARRIERS);
    for (int turn = 0, index; (index = item_of_turn(turn)) < plan.items; turn++) {
        struct key_tile keys = tile_of<KEYS>(op, plan, index);
        int first = keys.first + (warp - 4) * 16;
        float dk[1][D / 8][4], dv[1][D / 8][4];
        clear<1, D / 8>(dk);
        clear<1, D / 8>(dv);
        dkv_consume<D, SLOTS>(&tiles, keys.first + group * GROUP_KEYS, first, op.scale * log2_e, dk,
                              dv);
        dkv_store<D, D>(op, index % (int)op.kv_heads, keys, first, 0, dk, dv);
    }
#endif
}

// Shared memory: 164 KiB at D 128, 84 KiB at D 64.
template <int D, int SLOTS> static void launch(struct stream *stream, const struct attention *op)
{
    constexpr int bytes = layout<D, SLOTS>::BYTES;
    struct query_matrix q = query_matrix_make(op);
    struct attention_plan plan = attention_plan_make(stream, op, q, rows_used(q, ROWS), KEYS);
    struct attention_maps maps;
    attention_maps_make(op, ROWS, KEYS, &maps);
    unsigned ctas = attention_hopper_ctas(plan.items);
    allow_shared(dkv_kernel<D, SLOTS>, bytes);
    dkv_kernel<D, SLOTS><<<ctas, HOPPER_THREADS, bytes, stream->cuda>>>(*op, q, plan, maps);
    launch_check();
}

void attention_dkv_hopper(struct stream *stream, const struct attention *op)
{
    if (op->head_dim == 64)
        launch<64, 6>(stream, op);
    else
        launch<128, 6>(stream, op);
}
