// Owns attention of block rows on CUDA for any shape, in fp32 arithmetic. The queries of one block that share a key
// head are one matrix [M, D], M = B times heads per key head, row m being slot m / group and head
// m % group. A CTA works on tiles of it and tiles of keys, those of the block first, then the context
// that some row of the block sees. Rows without blocks are taken LOOSE_ROWS at a time, as blocks that have
// no keys. The backward pass has one kernel over tiles of queries, for dq, and
// one over tiles of keys, for the gradients of keys and values, which goes through blocks in order: no
// two CTAs add to the same element, and all orders are fixed.
#include <math.h>

#include "kernels/attention_internal.cuh"

enum {
    SIDE =
        16, // threads of a CTA are SIDE x SIDE; thread (y, x) has rows y + 16 i, columns x + 16 j
    THREADS = SIDE * SIDE,
    RANGE_THREADS = 128,
    LOOSE_ROWS = 16,
    WIDE_HEAD = 256 // wider ones have no room for all four tiles of the backward pass
};

static __host__ __device__ int64_t block_rows(const struct attention &op)
{
    return op.block_size > 0 ? op.block_size : LOOSE_ROWS;
}

static __host__ __device__ int64_t block_count(const struct attention &op)
{
    return (op.rows + block_rows(op) - 1) / block_rows(op);
}

// Rows [first, end) of a block; the last one of loose rows may have less.
static __device__ __forceinline__ int64_t block_end(const struct attention &op, int64_t block)
{
    int64_t end = (block + 1) * block_rows(op);
    return end < op.rows ? end : op.rows;
}

// Context that some row of a block sees: [begin, end), empty when begin >= end.
struct range {
    int32_t begin, end;
};

// A tile of rows in shared memory: fp32, zeros beyond the rows and beyond D, rows `stride` apart. The
// stride is 4 more than a multiple of 4, so that 16-byte reads of neighbouring rows differ in banks.
static __host__ __device__ int tile_depth(int64_t head_dim)
{
    return (int)((head_dim + 3) / 4 * 4);
}

static __host__ __device__ int tile_stride(int64_t head_dim)
{
    return tile_depth(head_dim) + 4;
}

// Queries [first, first + TILE) of block `block` and key head `kv_head`.
struct queries {
    int64_t block, kv_head, group, first, count; // count: M
};

// Keys [first, first + count) of the context, or slots of the own block.
struct keys {
    bool own;
    int64_t first, count;
};

// Row of q, out and dout, and index into lse and delta, of query m.
static __device__ __forceinline__ int64_t query_index(const struct attention &op,
                                                      const struct queries &q, int64_t m)
{
    int64_t row = q.block * block_rows(op) + m / q.group;
    return row * op.heads + q.kv_head * q.group + m % q.group;
}

template <int TILE, typename Type>
static __device__ void load_queries(const struct attention &op, const struct queries &q,
                                    const Type *from, float *to)
{
    int depth = tile_depth(op.head_dim), stride = tile_stride(op.head_dim);
    for (int row = threadIdx.x / WARP; row < TILE; row += THREADS / WARP) {
        int64_t m = q.first + row;
        int64_t at = m < q.count ? query_index(op, q, m) * op.head_dim : 0;
        for (int d = threadIdx.x % WARP; d < depth; d += WARP)
            to[row * stride + d] = m < q.count && d < op.head_dim ? load(from, at + d) : 0.0f;
    }
}

// Rows of one key head out of keys or values whose rows are row_stride elements apart.
template <int TILE, typename Type>
static __device__ void load_keys(const struct attention &op, const Type *from, int64_t row_stride,
                                 int64_t first, int64_t count, int64_t kv_head, float *to)
{
    int depth = tile_depth(op.head_dim), stride = tile_stride(op.head_dim);
    for (int row = threadIdx.x / WARP; row < TILE; row += THREADS / WARP) {
        int64_t at = (first + row) * row_stride + kv_head * op.head_dim;
        for (int d = threadIdx.x % WARP; d < depth; d += WARP)
            to[row * stride + d] = row < count && d < op.head_dim ? load(from, at + d) : 0.0f;
    }
}

template <int TILE, typename Type>
static __device__ void load_k(const struct attention &op, int64_t block, int64_t kv_head,
                              const struct keys &keys, float *to)
{
    int64_t packed = op.kv_heads * op.head_dim;
    if (keys.own)
        load_keys<TILE>(op, (const Type *)op.k_block, packed, block * op.block_size + keys.first,
                        keys.count, kv_head, to);
    else
        load_keys<TILE>(op, (const Type *)op.k_context, packed, keys.first, keys.count, kv_head,
                        to);
}

template <int TILE, typename Type>
static __device__ void load_v(const struct attention &op, int64_t block, int64_t kv_head,
                              const struct keys &keys, float *to)
{
    if (keys.own)
        load_keys<TILE>(op, (const Type *)op.v_block, op.v_block_stride,
                        block * op.block_size + keys.first, keys.count, kv_head, to);
    else
        load_keys<TILE>(op, (const Type *)op.v_context, op.v_context_stride, keys.first, keys.count,
                        kv_head, to);
}

// Which keys a query sees: positions of the context, or slots of its block, in [begin, end).
struct sight {
    int32_t begin, end, slots;
};

// A query beyond M sees what the last one sees: its zeros then give nothing and meet no infinity.
static __device__ struct sight sight_of(const struct attention &op, const struct queries &q,
                                        int64_t m)
{
    int64_t slot = (m < q.count ? m : q.count - 1) / q.group;
    int64_t row = q.block * block_rows(op) + slot;
    struct sight s;
    s.begin = op.begin[row];
    s.end = op.end[row];
    s.slots = (int32_t)(op.causal ? slot + 1 : op.block_size);
    return s;
}

static __device__ __forceinline__ bool sees(const struct sight &s, const struct keys &keys, int n)
{
    int64_t at = keys.first + n;
    if (n >= keys.count)
        return false;
    return keys.own ? at < s.slots : at >= s.begin && at < s.end;
}

// out[i][j] = dot of row (y + 16 i) of a and row (x + 16 j) of b, both [TILE, D].
template <int COUNT>
static __device__ __forceinline__ void dots(const float *a, const float *b, int depth, int stride,
                                            float (*out)[COUNT])
{
    int y = threadIdx.x / SIDE, x = threadIdx.x % SIDE;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            out[i][j] = 0.0f;
    for (int d = 0; d < depth; d += 4) {
        float4 left[COUNT], right[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            left[i] = *(const float4 *)(a + (y + SIDE * i) * stride + d);
            right[i] = *(const float4 *)(b + (x + SIDE * i) * stride + d);
        }
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
            for (int j = 0; j < COUNT; j++) {
                out[i][j] += left[i].x * right[j].x;
                out[i][j] += left[i].y * right[j].y;
                out[i][j] += left[i].z * right[j].z;
                out[i][j] += left[i].w * right[j].w;
            }
    }
}

// sum[i][j] += over n: weight of (row y + 16 i, n) times element x + 16 j of row n of `rows`. The weight
// lies at weights[row * (TILE + 1) + n], or transposed at weights[n * (TILE + 1) + row].
template <int TILE, int DEPTH, bool TRANSPOSED>
static __device__ __forceinline__ void weighted_rows(const float *weights, const float *rows,
                                                     int stride, int depth,
                                                     float (*sum)[DEPTH / SIDE])
{
    int y = threadIdx.x / SIDE, x = threadIdx.x % SIDE;
    for (int n = 0; n < TILE; n++) {
        float weight[TILE / SIDE];
#pragma unroll
        for (int i = 0; i < TILE / SIDE; i++) {
            int row = y + SIDE * i;
            weight[i] = weights[TRANSPOSED ? n * (TILE + 1) + row : row * (TILE + 1) + n];
        }
#pragma unroll
        for (int j = 0; j < DEPTH / SIDE; j++) {
            int d = x + SIDE * j;
            if (d >= depth)
                continue;
            float value = rows[n * stride + d];
#pragma unroll
            for (int i = 0; i < TILE / SIDE; i++)
                sum[i][j] += weight[i] * value;
        }
    }
}

template <int COUNT, int COLUMNS>
static __device__ __forceinline__ void clear(float (*sum)[COLUMNS])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            sum[i][j] = 0.0f;
}

// Over the 16 threads of one row y, which are half a warp.
static __device__ __forceinline__ float side_max(float x)
{
    for (int half = SIDE / 2; half > 0; half /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, half));
    return x;
}

static __device__ __forceinline__ float side_sum(float x)
{
    for (int half = SIDE / 2; half > 0; half /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, half);
    return x;
}

// The next tile of keys after `keys`: the block's own, then the context in `range`. False: no more.
template <int TILE>
static __device__ bool next_keys(const struct attention &op, const struct range &range,
                                 struct keys *keys)
{
    int64_t first = keys->first + TILE, end = keys->own ? op.block_size : range.end;
    if (keys->own && first >= end) {
        keys->own = false;
        first = range.begin;
        end = range.end;
    }
    keys->first = first;
    keys->count = end - first < TILE ? end - first : TILE;
    return first < end;
}

// range[block] for every block.
static __global__ void range_kernel(struct attention op, struct range *range)
{
    int64_t block = (int64_t)blockIdx.x * RANGE_THREADS + threadIdx.x;
    if (block >= block_count(op))
        return;
    struct range r = {INT32_MAX, 0};
    for (int64_t row = block * block_rows(op); row < block_end(op, block); row++) {
        int32_t begin = op.begin[row], end = op.end[row];
        bug_unless(begin >= 0 && end <= op.context);
        if (begin >= end)
            continue;
        r.begin = begin < r.begin ? begin : r.begin;
        r.end = end > r.end ? end : r.end;
    }
    range[block] = r;
}

// Running softmax of the rows of a thread: out and sum are relative to max. sum is the thread's own
// part until the end.
template <int TILE> struct running {
    float max[TILE / SIDE], sum[TILE / SIDE];
};

// Scores become probabilities relative to the running max, and go to shared memory [TILE, TILE + 1];
// out is brought to the new max, or to 0 where a row, without a block, has seen nothing yet.
template <int TILE, int DEPTH>
static __device__ void forward_scores(const struct attention &op, const struct keys &keys,
                                      const struct sight *sight, float (*score)[TILE / SIDE],
                                      struct running<TILE> *r, float (*out)[DEPTH / SIDE],
                                      float *probability)
{
    int y = threadIdx.x / SIDE, x = threadIdx.x % SIDE;
#pragma unroll
    for (int i = 0; i < TILE / SIDE; i++) {
        float max = -INFINITY;
#pragma unroll
        for (int j = 0; j < TILE / SIDE; j++) {
            score[i][j] = sees(sight[i], keys, x + SIDE * j) ? score[i][j] * op.scale : -INFINITY;
            max = fmaxf(max, score[i][j]);
        }
        max = fmaxf(r->max[i], side_max(max));
        float base = max == -INFINITY ? 0.0f : max;
        float correction = expf(r->max[i] - base);
        r->max[i] = max;
        r->sum[i] *= correction;
#pragma unroll
        for (int j = 0; j < TILE / SIDE; j++) {
            float p = expf(score[i][j] - base);
            r->sum[i] += p;
            probability[(y + SIDE * i) * (TILE + 1) + x + SIDE * j] = p;
        }
#pragma unroll
        for (int j = 0; j < DEPTH / SIDE; j++)
            out[i][j] *= correction;
    }
}

template <typename Type, int TILE, int DEPTH>
static __device__ void forward_store(const struct attention &op, const struct queries &q,
                                     const struct running<TILE> &r, float (*out)[DEPTH / SIDE])
{
    int y = threadIdx.x / SIDE, x = threadIdx.x % SIDE;
#pragma unroll
    for (int i = 0; i < TILE / SIDE; i++) {
        int64_t m = q.first + y + SIDE * i;
        float sum = side_sum(r.sum[i]);
        if (m >= q.count)
            continue;
        int64_t at = query_index(op, q, m);
        float inverse = sum == 0.0f && op.block_size == 0 ? 0.0f : 1.0f / sum;
        if (x == 0)
            op.lse[at] = r.max[i] + logf(sum);
#pragma unroll
        for (int j = 0; j < DEPTH / SIDE; j++)
            if (x + SIDE * j < op.head_dim)
                store((Type *)op.out, at * op.head_dim + x + SIDE * j, out[i][j] * inverse);
    }
}

// The queries of the CTA: blockIdx.x is block * tiles + tile of M, blockIdx.y the key head.
template <int TILE> static __device__ struct queries queries_of(const struct attention &op)
{
    struct queries q;
    q.group = op.heads / op.kv_heads;
    int64_t tiles = (block_rows(op) * q.group + TILE - 1) / TILE;
    q.block = blockIdx.x / tiles;
    q.count = (block_end(op, q.block) - q.block * block_rows(op)) * q.group;
    q.first = blockIdx.x % tiles * TILE;
    q.kv_head = blockIdx.y;
    return q;
}

template <typename Type, int TILE, int DEPTH>
static __global__ void __launch_bounds__(THREADS)
    forward_kernel(struct attention op, const struct range *ranges)
{
    extern __shared__ float4 shared[];
    int depth = tile_depth(op.head_dim), stride = tile_stride(op.head_dim);
    float *query = (float *)shared, *key = query + TILE * stride; // key: K, then V
    float *probability = key + TILE * stride;
    struct queries q = queries_of<TILE>(op);
    struct range range = ranges[q.block];
    struct sight sight[TILE / SIDE];
    struct running<TILE> r;
    float out[TILE / SIDE][DEPTH / SIDE], score[TILE / SIDE][TILE / SIDE];
#pragma unroll
    for (int i = 0; i < TILE / SIDE; i++) {
        sight[i] = sight_of(op, q, q.first + threadIdx.x / SIDE + SIDE * i);
        r.max[i] = -INFINITY;
        r.sum[i] = 0.0f;
    }
    clear<TILE / SIDE>(out);
    load_queries<TILE>(op, q, (const Type *)op.q, query);
    struct keys keys = {true, -TILE, 0};
    while (next_keys<TILE>(op, range, &keys)) {
        __syncthreads(); // the last tile's values and probabilities are read
        load_k<TILE, Type>(op, q.block, q.kv_head, keys, key);
        __syncthreads();
        dots(query, key, depth, stride, score);
        forward_scores<TILE, DEPTH>(op, keys, sight, score, &r, out, probability);
        __syncthreads(); // the keys are read, the probabilities there
        load_v<TILE, Type>(op, q.block, q.kv_head, keys, key);
        __syncthreads();
        weighted_rows<TILE, DEPTH, false>(probability, key, stride, depth, out);
    }
    forward_store<Type, TILE, DEPTH>(op, q, r, out);
}

static const struct range *ranges_make(struct stream *stream, const struct attention *op)
{
    int64_t blocks = block_count(*op);
    struct range *ranges = (struct range *)stream->workspace;
    BUG_UNLESS((size_t)blocks * sizeof(*ranges) <= stream->workspace_bytes);
    range_kernel<<<grid_size(divide_up(blocks, RANGE_THREADS)), RANGE_THREADS, 0, stream->cuda>>>(
        *op, ranges);
    launch_check();
    return ranges;
}

// Tiles of queries in all blocks, for one key head.
static int64_t query_tiles(const struct attention *op, int64_t tile)
{
    int64_t count = block_rows(*op) * (op->heads / op->kv_heads);
    return block_count(*op) * divide_up(count, tile);
}

// Two tiles and the probabilities: 84 KiB at TILE 64 and D 128, 70 KiB at TILE 32 and D 256, 66 KiB at
// TILE 16 and D 512.
template <typename Type, int TILE, int DEPTH>
static void forward_launch(struct stream *stream, const struct attention *op)
{
    const struct range *ranges = ranges_make(stream, op);
    size_t floats = (size_t)(2 * TILE * tile_stride(op->head_dim) + TILE * (TILE + 1));
    size_t bytes = floats * sizeof(float);
    dim3 grid(grid_size(query_tiles(op, TILE)), (unsigned)op->kv_heads);
    allow_shared(forward_kernel<Type, TILE, DEPTH>, bytes);
    forward_kernel<Type, TILE, DEPTH><<<grid, THREADS, bytes, stream->cuda>>>(*op, ranges);
    launch_check();
}

template <typename Type>
static void forward_of_type(struct stream *stream, const struct attention *op)
{
    if (op->head_dim > WIDE_HEAD)
        forward_launch<Type, 16, ATTENTION_MOST_HEAD_DIM>(stream, op);
    else if (op->head_dim > 128 || block_rows(*op) * (op->heads / op->kv_heads) <= 32)
        forward_launch<Type, 32, WIDE_HEAD>(stream, op);
    else
        forward_launch<Type, 64, 128>(stream, op);
}

// A CTA for each tile of queries and key head.
void attention_forward_plain(struct stream *stream, const struct attention *op)
{
    if (is_bf16(op->type))
        forward_of_type<bf16_t>(stream, op);
    else
        forward_of_type<float>(stream, op);
}

// delta = sum over the head of dout * out. One warp a query.
template <typename Type> static __global__ void delta_kernel(struct attention op)
{
    int64_t at = (int64_t)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (at >= op.rows * op.heads)
        return; // a whole warp
    float sum = 0.0f;
    for (int64_t d = threadIdx.x % WARP; d < op.head_dim; d += WARP)
        sum += load((const Type *)op.dout, at * op.head_dim + d) *
               load((const Type *)op.out, at * op.head_dim + d);
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0)
        op.delta[at] = sum;
}

// Shared memory of a backward CTA. Of wide heads dout lies on query and value on key.
struct backward_tiles {
    float *query, *dout, *key, *value; // [TILE, stride]
    float *probability, *dscore;       // [TILE, TILE + 1]: query, key
};

template <int TILE, bool WIDE>
static __device__ struct backward_tiles tiles_of(float *shared, int stride)
{
    struct backward_tiles t;
    t.query = shared;
    t.dout = WIDE ? t.query : t.query + TILE * stride;
    t.key = t.dout + TILE * stride;
    t.value = WIDE ? t.key : t.key + TILE * stride;
    t.probability = t.value + TILE * stride;
    t.dscore = t.probability + TILE * (TILE + 1);
    return t;
}

// Softmax statistics and sight of a thread's queries.
template <int TILE> struct query_rows {
    float lse[TILE / SIDE], delta[TILE / SIDE];
    struct sight sight[TILE / SIDE];
};

template <int TILE>
static __device__ struct query_rows<TILE> rows_of(const struct attention &op,
                                                  const struct queries &q) {
    struct query_rows<TILE> rows;
#pragma unroll
    for (int i = 0; i < TILE / SIDE; i++) {
        int64_t m = q.first + threadIdx.x / SIDE + SIDE * i;
        int64_t at = m < q.count ? query_index(op, q, m) : 0;
        rows.lse[i] = m < q.count ? op.lse[at] : 0.0f;
        rows.delta[i] = m < q.count ? op.delta[at] : 0.0f;
        rows.sight[i] = sight_of(op, q, m);
    }
    return rows;
}

// probability = exp(scale Q K^T - lse), dscore = P (dout V^T - delta) scale, both 0 where the query
// does not see the key. To shared memory. Of wide heads it loads the four tiles itself, the last two
// stay.
template <typename Type, int TILE, bool WIDE>
static __device__ void tile_gradients(const struct attention &op, const struct queries &q,
                                      const struct keys &keys, const struct query_rows<TILE> &rows,
                                      const struct backward_tiles &t)
{
    int y = threadIdx.x / SIDE, x = threadIdx.x % SIDE;
    int depth = tile_depth(op.head_dim), stride = tile_stride(op.head_dim);
    float score[TILE / SIDE][TILE / SIDE], dp[TILE / SIDE][TILE / SIDE];
    if (WIDE) {
        __syncthreads(); // the last tile is read
        load_queries<TILE>(op, q, (const Type *)op.q, t.query);
        load_k<TILE, Type>(op, q.block, q.kv_head, keys, t.key);
        __syncthreads();
    }
    dots(t.query, t.key, depth, stride, score);
    if (WIDE) {
        __syncthreads();
        load_queries<TILE>(op, q, (const Type *)op.dout, t.dout);
        load_v<TILE, Type>(op, q.block, q.kv_head, keys, t.value);
        __syncthreads();
    }
    dots(t.dout, t.value, depth, stride, dp);
#pragma unroll
    for (int i = 0; i < TILE / SIDE; i++)
#pragma unroll
        for (int j = 0; j < TILE / SIDE; j++) {
            int at = (y + SIDE * i) * (TILE + 1) + x + SIDE * j;
            bool seen = sees(rows.sight[i], keys, x + SIDE * j);
            float p = seen ? expf(score[i][j] * op.scale - rows.lse[i]) : 0.0f;
            t.probability[at] = p;
            t.dscore[at] = p == 0.0f ? 0.0f : p * (dp[i][j] - rows.delta[i]) * op.scale;
        }
}

// dq of a tile of queries: over all keys that they see.
template <typename Type, int TILE, int DEPTH>
static __global__ void __launch_bounds__(THREADS)
    dq_kernel(struct attention op, const struct range *ranges)
{
    extern __shared__ float4 shared[];
    constexpr bool WIDE = DEPTH > WIDE_HEAD;
    int depth = tile_depth(op.head_dim), stride = tile_stride(op.head_dim);
    struct backward_tiles t = tiles_of<TILE, WIDE>((float *)shared, stride);
    struct queries q = queries_of<TILE>(op);
    struct range range = ranges[q.block];
    struct query_rows<TILE> rows = rows_of<TILE>(op, q);
    float dq[TILE / SIDE][DEPTH / SIDE];
    clear<TILE / SIDE>(dq);
    if (!WIDE) {
        load_queries<TILE>(op, q, (const Type *)op.q, t.query);
        load_queries<TILE>(op, q, (const Type *)op.dout, t.dout);
    }
    struct keys keys = {true, -TILE, 0};
    while (next_keys<TILE>(op, range, &keys)) {
        if (!WIDE) {
            __syncthreads(); // the last tile is read
            load_k<TILE, Type>(op, q.block, q.kv_head, keys, t.key);
            load_v<TILE, Type>(op, q.block, q.kv_head, keys, t.value);
            __syncthreads();
        }
        tile_gradients<Type, TILE, WIDE>(op, q, keys, rows, t);
        __syncthreads();
        if (WIDE) {
            load_k<TILE, Type>(op, q.block, q.kv_head, keys, t.key);
            __syncthreads();
        }
        weighted_rows<TILE, DEPTH, false>(t.dscore, t.key, stride, depth, dq);
    }
    int y = threadIdx.x / SIDE, x = threadIdx.x % SIDE;
#pragma unroll
    for (int i = 0; i < TILE / SIDE; i++) {
        int64_t m = q.first + y + SIDE * i;
        if (m >= q.count)
            continue;
        int64_t at = query_index(op, q, m) * op.head_dim;
#pragma unroll
        for (int j = 0; j < DEPTH / SIDE; j++)
            if (x + SIDE * j < op.head_dim)
                store((Type *)op.dq, at + x + SIDE * j, dq[i][j]);
    }
}

// Adds to dk and dv [TILE, D] what all queries of one block give. K and V are in shared memory.
template <typename Type, int TILE, int DEPTH>
static __device__ void add_block(const struct attention &op, int64_t block, int64_t kv_head,
                                 const struct keys &keys, const struct backward_tiles &t,
                                 float (*dk)[DEPTH / SIDE], float (*dv)[DEPTH / SIDE])
{
    constexpr bool WIDE = DEPTH > WIDE_HEAD;
    int depth = tile_depth(op.head_dim), stride = tile_stride(op.head_dim);
    int64_t group = op.heads / op.kv_heads, rows = block_end(op, block) - block * block_rows(op);
    struct queries q = {block, kv_head, group, 0, rows * group};
    for (; q.first < q.count; q.first += TILE) {
        struct query_rows<TILE> rows = rows_of<TILE>(op, q);
        if (!WIDE) {
            __syncthreads(); // the last tile is read
            load_queries<TILE>(op, q, (const Type *)op.q, t.query);
            load_queries<TILE>(op, q, (const Type *)op.dout, t.dout);
            __syncthreads();
        }
        tile_gradients<Type, TILE, WIDE>(op, q, keys, rows, t);
        __syncthreads();
        weighted_rows<TILE, DEPTH, true>(t.probability, t.dout, stride, depth, dv);
        if (WIDE) {
            __syncthreads();
            load_queries<TILE>(op, q, (const Type *)op.q, t.query);
            __syncthreads();
        }
        weighted_rows<TILE, DEPTH, true>(t.dscore, t.query, stride, depth, dk);
    }
}

// dk and dv of a tile of the block's own keys: blockIdx.x is block * tiles + tile of slots.
template <typename Type, int TILE, int DEPTH>
static __global__ void __launch_bounds__(THREADS) dkv_block_kernel(struct attention op)
{
    extern __shared__ float4 shared[];
    constexpr bool WIDE = DEPTH > WIDE_HEAD;
    struct backward_tiles t = tiles_of<TILE, WIDE>((float *)shared, tile_stride(op.head_dim));
    int64_t tiles = (op.block_size + TILE - 1) / TILE, kv_head = blockIdx.y;
    int64_t block = blockIdx.x / tiles, first = blockIdx.x % tiles * TILE;
    int64_t left = op.block_size - first;
    struct keys keys = {true, first, left < TILE ? left : TILE};
    float dk[TILE / SIDE][DEPTH / SIDE], dv[TILE / SIDE][DEPTH / SIDE];
    clear<TILE / SIDE>(dk);
    clear<TILE / SIDE>(dv);
    if (!WIDE) {
        load_k<TILE, Type>(op, block, kv_head, keys, t.key);
        load_v<TILE, Type>(op, block, kv_head, keys, t.value);
    }
    add_block<Type, TILE, DEPTH>(op, block, kv_head, keys, t, dk, dv);
    int y = threadIdx.x / SIDE, x = threadIdx.x % SIDE;
#pragma unroll
    for (int i = 0; i < TILE / SIDE; i++) {
        int n = y + SIDE * i;
        if (n >= keys.count)
            continue;
        int64_t row = block * op.block_size + first + n;
        int64_t at_k = (row * op.kv_heads + kv_head) * op.head_dim;
        int64_t at_v = row * op.v_block_stride + kv_head * op.head_dim;
#pragma unroll
        for (int j = 0; j < DEPTH / SIDE; j++)
            if (x + SIDE * j < op.head_dim) {
                store((Type *)op.dk_block, at_k + x + SIDE * j, dk[i][j]);
                store((Type *)op.dv_block, at_v + x + SIDE * j, dv[i][j]);
            }
    }
}

// dk and dv of a tile of context keys, blockIdx.x: over all blocks that see some of it, in order.
template <typename Type, int TILE, int DEPTH>
static __global__ void __launch_bounds__(THREADS)
    dkv_context_kernel(struct attention op, const struct range *ranges)
{
    extern __shared__ float4 shared[];
    constexpr bool WIDE = DEPTH > WIDE_HEAD;
    struct backward_tiles t = tiles_of<TILE, WIDE>((float *)shared, tile_stride(op.head_dim));
    int64_t first = (int64_t)blockIdx.x * TILE, left = op.context - first, kv_head = blockIdx.y;
    struct keys keys = {false, first, left < TILE ? left : TILE};
    float dk[TILE / SIDE][DEPTH / SIDE], dv[TILE / SIDE][DEPTH / SIDE];
    clear<TILE / SIDE>(dk);
    clear<TILE / SIDE>(dv);
    if (!WIDE) {
        load_k<TILE, Type>(op, 0, kv_head, keys, t.key);
        load_v<TILE, Type>(op, 0, kv_head, keys, t.value);
    }
    for (int64_t block = 0; block < block_count(op); block++) {
        struct range range = ranges[block];
        if (range.begin < first + keys.count && range.end > first)
            add_block<Type, TILE, DEPTH>(op, block, kv_head, keys, t, dk, dv);
    }
    int y = threadIdx.x / SIDE, x = threadIdx.x % SIDE;
#pragma unroll
    for (int i = 0; i < TILE / SIDE; i++) {
        int n = y + SIDE * i;
        if (n >= keys.count)
            continue;
        int64_t at = ((first + n) * op.kv_heads + kv_head) * op.head_dim;
#pragma unroll
        for (int j = 0; j < DEPTH / SIDE; j++)
            if (x + SIDE * j < op.head_dim) {
                op.dk_context[at + x + SIDE * j] += dk[i][j];
                op.dv_context[at + x + SIDE * j] += dv[i][j];
            }
    }
}

// Four tiles (of wide heads two), probabilities and their gradients: 75 KiB at TILE 32 and D 128, 67 KiB
// at TILE 16 and D 256 or 512.
template <typename Type, int TILE, int DEPTH>
static void backward_launch(struct stream *stream, const struct attention *op)
{
    const struct range *ranges = ranges_make(stream, op);
    int tiles = DEPTH > WIDE_HEAD ? 2 : 4;
    size_t floats = (size_t)(tiles * TILE * tile_stride(op->head_dim) + 2 * TILE * (TILE + 1));
    size_t bytes = floats * sizeof(float);
    unsigned heads = (unsigned)op->kv_heads;
    unsigned queries = grid_size(divide_up(op->rows * op->heads, THREADS / WARP));
    delta_kernel<Type><<<queries, THREADS, 0, stream->cuda>>>(*op);
    launch_check();

    dim3 grid(grid_size(query_tiles(op, TILE)), heads);
    allow_shared(dq_kernel<Type, TILE, DEPTH>, bytes);
    dq_kernel<Type, TILE, DEPTH><<<grid, THREADS, bytes, stream->cuda>>>(*op, ranges);
    launch_check();

    if (op->block_size > 0) {
        int64_t slots = divide_up(op->block_size, TILE);
        grid.x = grid_size(op->rows / op->block_size * slots);
        allow_shared(dkv_block_kernel<Type, TILE, DEPTH>, bytes);
        dkv_block_kernel<Type, TILE, DEPTH><<<grid, THREADS, bytes, stream->cuda>>>(*op);
        launch_check();
    }

    if (op->context == 0)
        return;
    grid.x = grid_size(divide_up(op->context, TILE));
    allow_shared(dkv_context_kernel<Type, TILE, DEPTH>, bytes);
    dkv_context_kernel<Type, TILE, DEPTH><<<grid, THREADS, bytes, stream->cuda>>>(*op, ranges);
    launch_check();
}

template <typename Type>
static void backward_of_type(struct stream *stream, const struct attention *op)
{
    if (op->head_dim > WIDE_HEAD)
        backward_launch<Type, 16, ATTENTION_MOST_HEAD_DIM>(stream, op);
    else if (op->head_dim > 128)
        backward_launch<Type, 16, WIDE_HEAD>(stream, op);
    else
        backward_launch<Type, 32, 128>(stream, op);
}

// A CTA for each tile of queries, of own keys and of context keys, and key head.
void attention_backward_plain(struct stream *stream, const struct attention *op)
{
    if (is_bf16(op->type))
        backward_of_type<bf16_t>(stream, op);
    else
        backward_of_type<float>(stream, op);
}
