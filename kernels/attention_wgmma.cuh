// Instructions of sm_90a for attention: products of a warpgroup (wgmma), barriers in shared memory, and
// tiles by the copy engine (TMA). Tiles lie as in attention_mma.cuh, at multiples of 1024 bytes.
#ifndef KERNELS_ATTENTION_WGMMA_CUH
#define KERNELS_ATTENTION_WGMMA_CUH

#include <cuda.h>

#include "kernels/attention_walk.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA 1
#else
#define HAS_WGMMA 0
#endif

// A factor in shared memory, 128-byte rows permuted. next_panel: bytes from 64 columns to the next 64,
// where the columns are not what is summed over.
static __device__ __forceinline__ uint64_t factor_at(uint32_t address, uint32_t next_panel)
{
    const uint64_t permuted = 1ull << 62, eight_rows = 8 * ROW_BYTES >> 4;
    return (address & 0x3ffff) >> 4 | (uint64_t)(next_panel >> 4) << 16 | eight_rows << 32 |
           permuted;
}

// d [64, N] = (add ? d : 0) + A B^T of 16 columns: A [64, 16] and B [N, 16] in shared memory.
#if HAS_WGMMA
static __device__ __forceinline__ void scores_64(float *d, uint64_t a, uint64_t b, int add)
{
    asm volatile("{\n.reg .pred p;\n"
                 "setp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "%32, %33, p, 1, 1, 0, 0;\n}\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31])
                 : "l"(a), "l"(b), "r"(add));
}

static __device__ __forceinline__ void scores_128(float *d, uint64_t a, uint64_t b, int add)
{
    asm volatile("{\n.reg .pred p;\n"
                 "setp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "%64, %65, p, 1, 1, 0, 0;\n}\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
                   "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
                   "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                   "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]),
                   "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
                   "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
                 : "l"(a), "l"(b), "r"(add));
}

// d [64, N] = (add ? d : 0) + A B: A [64, 16] as fragments, B [16, N] in shared memory.
static __device__ __forceinline__ void sums_64(float *d, const uint32_t *a, uint64_t b, int add)
{
    asm volatile("{\n.reg .pred p;\n"
                 "setp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

static __device__ __forceinline__ void sums_128(float *d, const uint32_t *a, uint64_t b, int add)
{
    asm volatile("{\n.reg .pred p;\n"
                 "setp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
                   "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
                   "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                   "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]),
                   "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
                   "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// By all lanes. The compiler knows what comes from one lane to be the same in all, and keeps addresses of
// factors that follow from it where products want them.
static __device__ __forceinline__ int warp_of_cta(void)
{
    return __shfl_sync(~0u, (int)threadIdx.x / WARP, 0);
}

// Before the first product that reads registers written otherwise; after some; until at most `left` of
// the last groups are under way.
static __device__ __forceinline__ void products_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void products_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int LEFT> static __device__ __forceinline__ void products_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

template <int REGISTERS> static __device__ __forceinline__ void registers_take(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS> static __device__ __forceinline__ void registers_give(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Rows [first, first + 64) or so of a tile, by the copy engine: column and rows as the map counts them.
static __device__ __forceinline__ void fetch_panel(uint32_t to, const CUtensorMap *map, int column,
                                                   int row, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(barrier)
                 : "memory");
}

static __device__ __forceinline__ void fetch_panel(uint32_t to, const CUtensorMap *map, int column,
                                                   int head, int row, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
                 "l"(map), "r"(column), "r"(head), "r"(row), "r"(barrier)
                 : "memory");
}

// Starts d [64, N] = A B^T over D columns: 64 rows of a tile of A_ROWS, N of a tile of B_ROWS.
template <int D, int N, int A_ROWS, int B_ROWS>
static __device__ __forceinline__ void scores_start(float (*d)[4], uint32_t a, uint32_t b)
{
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint64_t left = factor_at(a + k / 4 * A_ROWS * ROW_BYTES + k % 4 * 32, 16);
        uint64_t right = factor_at(b + k / 4 * B_ROWS * ROW_BYTES + k % 4 * 32, 16);
        if (N == 64)
            scores_64(d[0], left, right, k > 0);
        else
            scores_128(d[0], left, right, k > 0);
    }
}

// Starts d [64, N] += A B over K rows of b, a tile of B_ROWS.
template <int K, int N, int B_ROWS>
static __device__ __forceinline__ void sums_start(float (*d)[4], const uint32_t (*a)[4], uint32_t b)
{
#pragma unroll
    for (int k = 0; k < K / 16; k++) {
        uint64_t right = factor_at(b + k * 16 * ROW_BYTES, B_ROWS * ROW_BYTES);
        if (N == 64)
            sums_64(d[0], a[k], right, 1);
        else
            sums_128(d[0], a[k], right, 1);
    }
}

// The sums of products that are waited for are read after this point, not before.
template <int NT> static __device__ __forceinline__ void sums_settle(float (*d)[4])
{
#pragma unroll
    for (int n = 0; n < NT; n++)
        asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
}

// fp32 fragments [64, 8 NT] as left factors.
template <int NT>
static __device__ __forceinline__ void pack_factors(uint32_t (*a)[4], const float (*c)[4])
{
#pragma unroll
    for (int k = 0; k < NT / 2; k++) {
        a[k][0] = pack(c[2 * k][0], c[2 * k][1]);
        a[k][1] = pack(c[2 * k][2], c[2 * k][3]);
        a[k][2] = pack(c[2 * k + 1][0], c[2 * k + 1][1]);
        a[k][3] = pack(c[2 * k + 1][2], c[2 * k + 1][3]);
    }
}

// A tile of the matrix of queries, which begins at row `first`.
template <int D, int ROWS>
static __device__ __forceinline__ void fetch_queries(const struct query_matrix &q, int kv_head,
                                                     int first, uint32_t to, const CUtensorMap *map,
                                                     uint32_t barrier)
{
    for (int panel = 0; panel < D / PANEL; panel++)
        fetch_panel(to + panel * ROWS * ROW_BYTES, map, panel * PANEL, kv_head * q.group,
                    first / q.group, barrier);
}

#endif // HAS_WGMMA

// Which item a CTA has in its turn, when items come with the heaviest first: every second turn in reverse,
// so that all CTAs have about the same work.
static __device__ __forceinline__ int item_of_turn(int turn)
{
    int ctas = (int)gridDim.x, at = (int)blockIdx.x;
    return turn * ctas + (turn % 2 == 0 ? at : ctas - 1 - at);
}

// A CTA for each multiprocessor, at most one for each item.
unsigned attention_hopper_ctas(int64_t items);

// Rows of a tile of `rows` that are in use: whole block rows, all heads of the group of each. The copy
// engine can not bring others.
static __host__ __device__ inline int rows_used(const struct query_matrix &q, int rows)
{
    return rows / q.group * q.group;
}

// How the copy engine sees the tensors: q and dout as [N, heads, D] in boxes of query_rows rows of the
// matrix of queries, keys and values as [rows, kv_heads D] in boxes of key_rows; 64 columns each.
struct attention_maps {
    CUtensorMap q, dout, k_block, v_block, k_context, v_context;
};

void attention_maps_make(const struct attention *op, int query_rows, int key_rows,
                         struct attention_maps *maps);

enum {
    CONSUMERS = 2 * 128, // threads that compute: two warpgroups
    HOPPER_THREADS = 128 + CONSUMERS,
    HOPPER_REGISTERS = 504 // one thread of each warpgroup has together, as 384 threads have 64512
};

// Builds without wgmma leave these kernels empty, which their bound then says.
#define HOPPER_BOUNDS __launch_bounds__(HAS_WGMMA ? HOPPER_THREADS : WARP, 1)

static __device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}

static __device__ __forceinline__ void barrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// An arrival that also announces so many bytes.
static __device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

static __device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t phase)
{
    uint32_t done = 0;
    while (!done)
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}\n"
                     : "=r"(done)
                     : "r"(barrier), "r"(phase)
                     : "memory");
}

// What this thread wrote in shared memory comes before what the copy engine is asked for from now on.
static __device__ __forceinline__ void copies_after_writes(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Rows that are not in use are zeros from the start, so that they hold no NaN.
static __device__ __forceinline__ void zeros_write(unsigned char *to, int bytes)
{
    for (int i = (int)threadIdx.x * 16; i < bytes; i += HOPPER_THREADS * 16)
        *(uint4 *)(to + i) = make_uint4(0, 0, 0, 0);
    copies_after_writes();
}

// Waits for the other threads of the warpgroup, of the CTA's third or so: group > 0.
static __device__ __forceinline__ void group_sync(int group)
{
    asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory");
}

// Barriers are initialised by one thread before the copy engine and the other threads use them.
static __device__ __forceinline__ void barriers_publish(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A ring of SLOTS tiles: one thread fills, WARPS warps empty. Barriers: full and empty of each slot.
template <int SLOTS> struct tile_ring {
    uint32_t barriers; // shared memory, 16 bytes a slot
    uint32_t slot, phase;
};

template <int SLOTS>
static __device__ __forceinline__ struct tile_ring<SLOTS> ring_make(uint32_t barriers) {
    return {barriers, 0, 0};
}

template <int SLOTS>
static __device__ __forceinline__ void ring_init(uint32_t barriers, int fillers, int emptiers)
{
    for (int i = 0; i < SLOTS; i++) {
        barrier_init(barriers + 16 * i, fillers);
        barrier_init(barriers + 16 * i + 8, emptiers);
    }
}

template <int SLOTS> static __device__ __forceinline__ void ring_next(struct tile_ring<SLOTS> *ring)
{
    ring->slot++;
    if (ring->slot == SLOTS) {
        ring->slot = 0;
        ring->phase ^= 1;
    }
}

template <int SLOTS>
static __device__ __forceinline__ uint32_t ring_full(const struct tile_ring<SLOTS> &ring)
{
    return ring.barriers + 16 * ring.slot;
}

template <int SLOTS>
static __device__ __forceinline__ void ring_wait_full(const struct tile_ring<SLOTS> &ring)
{
    barrier_wait(ring_full(ring), ring.phase);
}

// The first time round a slot is empty.
template <int SLOTS>
static __device__ __forceinline__ void ring_wait_empty(const struct tile_ring<SLOTS> &ring)
{
    barrier_wait(ring_full(ring) + 8, ring.phase ^ 1);
}

// By all lanes of a warp that computes, whose products have read a slot: one arrival.
static __device__ __forceinline__ void slot_release(uint32_t full)
{
    __syncwarp();
    if (threadIdx.x % WARP == 0)
        barrier_arrive(full + 8);
}

// By each thread that has read a slot itself: an arrival each, so that no thread's reads need the word of
// another one before the slot is written again.
static __device__ __forceinline__ void reads_release(uint32_t full)
{
    barrier_arrive(full + 8);
}

// Waits for the current slot's tile of TILE bytes. full: what slot_release() wants.
template <int SLOTS, int TILE>
static __device__ __forceinline__ uint32_t take_slot(struct tile_ring<SLOTS> *ring, uint32_t slots,
                                                     uint32_t *full)
{
    ring_wait_full(*ring);
    *full = ring_full(*ring);
    uint32_t tile = slots + ring->slot * TILE;
    ring_next(ring);
    return tile;
}

#endif
