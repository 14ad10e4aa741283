// What the tensor-core kernels of attention share: the matrix of queries of a key head, tiles in shared
// memory, their loads, and products of tiles by mma.sync m16n8k16 (bf16 in, fp32 sums).
// A tile [ROWS, D] lies as panels [ROWS, 64] of 128-byte rows; the 16-byte chunks of a row are permuted
// by xor with the row's low 3 bits, so that the 8 rows an ldmatrix reads differ in their banks.
#ifndef KERNELS_ATTENTION_MMA_CUH
#define KERNELS_ATTENTION_MMA_CUH

#include <math.h>

#include "kernels/attention_internal.cuh"

enum {
    ROW_BYTES = 128, // of a panel
    PANEL = 64,      // columns
    CHUNK = 8,       // elements that one cp.async moves
    INVERSE_BITS = 34
};

// The queries of one key head as a matrix [M, D], M = N times G heads per key head: row m is block row
// m / G, head m % G.
struct query_matrix {
    int32_t count, group; // M, G
    uint64_t inverse;     // 2^INVERSE_BITS / G, rounded up: m / G by a product, exact for m < 2^29
};

static inline struct query_matrix query_matrix_make(const struct attention *op)
{
    int64_t group = op->heads / op->kv_heads, count = op->rows * group;
    BUG_UNLESS(count < 1 << 29 && group <= 32);
    struct query_matrix q;
    q.count = (int32_t)count;
    q.group = (int32_t)group;
    q.inverse = ((1ull << INVERSE_BITS) + (uint64_t)group - 1) / (uint64_t)group;
    return q;
}

static __device__ __forceinline__ int row_of(const struct query_matrix &q, int m)
{
    return (int)(((uint64_t)(uint32_t)m * q.inverse) >> INVERSE_BITS);
}

// Index into lse and delta, and of the row in q, out and dout.
static __device__ __forceinline__ int64_t index_of(const struct attention &op,
                                                   const struct query_matrix &q, int kv_head, int m)
{
    int row = row_of(q, m);
    return row * op.heads + (kv_head - row) * (int64_t)q.group + m;
}

// Keys [begin, end) that a query sees: context positions, or block rows. Empty: begin is past all.
struct span {
    int32_t begin, end;
};

static __device__ __forceinline__ struct span context_span(const struct attention &op, int row)
{
    struct span s = {op.begin[row], op.end[row]};
    bug_unless(s.begin >= s.end || (s.begin >= 0 && s.end <= op.context));
    if (s.begin >= s.end)
        s = {INT32_MAX, 0};
    return s;
}

static __device__ __forceinline__ struct span own_span(const struct attention &op, int row)
{
    int size = (int)op.block_size, begin = row / size * size;
    return {begin, op.causal ? row + 1 : begin + size};
}

// Of some rows: what any of them sees lies in [begin, end), and all of them see [all_begin, all_end).
struct span_bounds {
    int32_t begin, end, all_begin, all_end;
};

// The same in every lane. A lane gives the bounds of some of the rows.
static __device__ __forceinline__ struct span_bounds warp_bounds(struct span_bounds b)
{
    b.begin = __reduce_min_sync(~0u, b.begin);
    b.end = __reduce_max_sync(~0u, b.end);
    b.all_begin = __reduce_max_sync(~0u, b.all_begin);
    b.all_end = __reduce_min_sync(~0u, b.all_end);
    return b;
}

static __device__ __forceinline__ void bounds_add(struct span_bounds *b, const struct span &s)
{
    b->begin = min(b->begin, s.begin);
    b->end = max(b->end, s.end);
    b->all_begin = max(b->all_begin, s.begin);
    b->all_end = min(b->all_end, s.end);
}

static __device__ __forceinline__ uint32_t shared_address(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

// 16 bytes, or 16 zero bytes without a look at `from`.
static __device__ __forceinline__ void copy_chunk(uint32_t to, const void *from, bool there)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
}

static __device__ __forceinline__ void copy_word(uint32_t to, const void *from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

static __device__ __forceinline__ void copies_wait(void)
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

static __device__ __forceinline__ void load_fragment(uint32_t *to, uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}

static __device__ __forceinline__ void load_transposed(uint32_t *to, uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}

// c [16, 8] += a [16, 16] b [16, 8]
static __device__ __forceinline__ void multiply_add(float *c, const uint32_t *a, uint32_t b0,
                                                    uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ uint32_t pack(float low, float high)
{
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// 2^x; relative error below 2^-22, 0 below 2^-126.
static __device__ __forceinline__ float power2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static const float log2_e = 1.44269504088896340736f, log_2 = 0.693147180559945309417f;

template <int ROWS, int D> static __host__ __device__ constexpr int tile_bytes()
{
    return (D + PANEL - 1) / PANEL * ROWS * ROW_BYTES;
}

template <int ROWS> static __device__ __forceinline__ uint32_t tile_offset(int row, int chunk)
{
    return (uint32_t)(chunk / 8 * ROWS * ROW_BYTES + row * ROW_BYTES + ((chunk ^ row) & 7) * 16);
}

// Rows [first, first + ROWS) of one head; zeros from row `limit` on.
template <int ROWS, int D, int THREADS>
static __device__ __forceinline__ void load_keys(uint32_t to, const bf16_t *from, int64_t stride,
                                                 int first, int limit)
{
    constexpr int CHUNKS = D / CHUNK;
#pragma unroll
    for (int at = 0; at < ROWS * CHUNKS; at += THREADS) {
        int i = at + (int)threadIdx.x, row = i / CHUNKS, chunk = i % CHUNKS;
        if (ROWS * CHUNKS % THREADS != 0 && i >= ROWS * CHUNKS)
            break;
        bool there = first + row < limit;
        copy_chunk(to + tile_offset<ROWS>(row, chunk),
                   from + (first + row) * stride + chunk * CHUNK, there);
    }
}

// Rows [first, first + ROWS) of the matrix of queries, of one or two tensors; zeros beyond M.
template <int ROWS, int D, int THREADS>
static __device__ __forceinline__ void
load_queries(const struct attention &op, const struct query_matrix &q, int kv_head, int first,
             uint32_t to, const void *from, uint32_t to_2, const void *from_2)
{
    constexpr int CHUNKS = D / CHUNK;
#pragma unroll
    for (int at = 0; at < ROWS * CHUNKS; at += THREADS) {
        int i = at + (int)threadIdx.x, row = i / CHUNKS, chunk = i % CHUNKS;
        if (ROWS * CHUNKS % THREADS != 0 && i >= ROWS * CHUNKS)
            break;
        bool there = first + row < q.count;
        int64_t source = there ? index_of(op, q, kv_head, first + row) * D + chunk * CHUNK : 0;
        uint32_t offset = tile_offset<ROWS>(row, chunk);
        copy_chunk(to + offset, (const bf16_t *)from + source, there);
        if (from_2 != NULL)
            copy_chunk(to_2 + offset, (const bf16_t *)from_2 + source, there);
    }
}

// Where a lane reads a 16 x 16 part of a tile with ldmatrix. `across`: the order of fragments of the
// left factor, and of the right factor where its rows are the ones summed over (read transposed).
// `along`: the right factor whose rows are its columns in the product.
struct lane_offsets {
    uint32_t row, chunk; // bytes
};

static __device__ __forceinline__ struct lane_offsets lane_across(void)
{
    uint32_t lane = threadIdx.x % WARP, row = lane & 15;
    return {row * ROW_BYTES, ((lane >> 4) ^ (row & 7)) << 4};
}

static __device__ __forceinline__ struct lane_offsets lane_along(void)
{
    uint32_t lane = threadIdx.x % WARP, row = (lane & 7) + (lane >> 4) * 8;
    return {row * ROW_BYTES, (((lane >> 3) & 1) ^ (row & 7)) << 4};
}

// Columns [16 k, 16 k + 16) at the lane's rows, counted from the first row of the tile.
template <int ROWS>
static __device__ __forceinline__ uint32_t lane_address(uint32_t tile,
                                                        const struct lane_offsets &lane, int k)
{
    return tile + (uint32_t)(k / 4 * ROWS * ROW_BYTES) + lane.row +
           (lane.chunk ^ (uint32_t)((k & 3) << 5));
}

// c [16 MT, 8 NT] = A B^T: 16 MT rows of a tile of A_ROWS, from address a on, and the 8 NT rows of a
// tile b of B_ROWS.
template <int D, int MT, int NT, int A_ROWS, int B_ROWS>
static __device__ __forceinline__ void multiply_rows(float (*c)[NT][4], uint32_t a, uint32_t b)
{
    struct lane_offsets across = lane_across(), along = lane_along();
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int n = 0; n < NT; n++)
            c[i][n][0] = c[i][n][1] = c[i][n][2] = c[i][n][3] = 0.0f;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t left[MT][4], right[4];
#pragma unroll
        for (int i = 0; i < MT; i++)
            load_fragment(left[i], lane_address<A_ROWS>(a + i * 16 * ROW_BYTES, across, k));
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            load_fragment(right, lane_address<B_ROWS>(b + n * 8 * ROW_BYTES, along, k));
#pragma unroll
            for (int i = 0; i < MT; i++) {
                multiply_add(c[i][n], left[i], right[0], right[1]);
                multiply_add(c[i][n + 1], left[i], right[2], right[3]);
            }
        }
    }
}

// c [16 MT, 8 NT] += A B: A [16 MT, 8 KT] as fp32 fragments, rounded to bf16 here; the rows of b are
// those summed over, c's columns begin at its first.
template <int MT, int KT, int NT, int B_ROWS>
static __device__ __forceinline__ void multiply_fragments(float (*c)[NT][4],
                                                          const float (*a)[KT][4], uint32_t b)
{
    struct lane_offsets across = lane_across();
#pragma unroll
    for (int k = 0; k < KT; k += 2) {
        uint32_t left[MT][4], right[4];
#pragma unroll
        for (int i = 0; i < MT; i++) {
            left[i][0] = pack(a[i][k][0], a[i][k][1]);
            left[i][1] = pack(a[i][k][2], a[i][k][3]);
            left[i][2] = pack(a[i][k + 1][0], a[i][k + 1][1]);
            left[i][3] = pack(a[i][k + 1][2], a[i][k + 1][3]);
        }
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            load_transposed(right, lane_address<B_ROWS>(b + k * 8 * ROW_BYTES, across, n / 2));
#pragma unroll
            for (int i = 0; i < MT; i++) {
                multiply_add(c[i][n], left[i], right[0], right[1]);
                multiply_add(c[i][n + 1], left[i], right[2], right[3]);
            }
        }
    }
}

// A fragment's element e of [16, 8]: row lane / 4 + 8 (e / 2), column lane % 4 * 2 + e % 2.
static __device__ __forceinline__ int fragment_row(void)
{
    return threadIdx.x % WARP / 4;
}

static __device__ __forceinline__ int fragment_column(void)
{
    return threadIdx.x % 4 * 2;
}

template <int MT, int NT> static __device__ __forceinline__ void clear(float (*c)[NT][4])
{
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int n = 0; n < NT; n++)
            c[i][n][0] = c[i][n][1] = c[i][n][2] = c[i][n][3] = 0.0f;
}

// -inf at the keys first + column that a row does not see. spans: of the fragment's first row.
template <int MT, int NT>
static __device__ __forceinline__ void hide(float (*score)[NT][4], const struct span *spans,
                                            int first)
{
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            struct span s = spans[i * 16 + half * 8 + fragment_row()];
            int at = first + fragment_column() - s.begin;
            unsigned width = (unsigned)max(s.end - s.begin, 0);
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if ((unsigned)(at + n * 8 + e) >= width)
                        score[i][n][half * 2 + e] = -INFINITY;
        }
}

#endif
