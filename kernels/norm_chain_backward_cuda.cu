// Owns the gradients of two norms behind each other on CUDA. A CTA takes rows in turn, each in registers while the
// next one is on its way; odd widths and very long rows are read again for each sum.
#include "kernels/norm_chain.h"

#include "kernels/cuda_vector.cuh"
#include "kernels/rms_norm.h"

enum {
    PARTS = RMS_NORM_PARTS / 2, // CTAs, one on an SM of Hopper: scratch has the sums of both norms
    MOST_THREADS = 640,
    MOST_EACH = 4, // packs of a thread
    MOST_AHEAD = 2 // with more than these there are no registers for the next row
};

// Sums of the warps of a CTA, in a fixed order; of those that it does not have: 0.
struct warp_sums {
    float4 four[MOST_THREADS / WARP / 4];
};

// For all threads, which all call it; two calls in a row must use different sums.
static __device__ __forceinline__ float row_sum(float x, struct warp_sums &sums)
{
    float sum = 0.0f;
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0)
        ((float *)sums.four)[threadIdx.x / WARP] = x;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < MOST_THREADS / WARP / 4; w++) {
        float4 four = sums.four[w];
        sum += (four.x + four.y) + (four.z + four.w);
    }
    return sum;
}

// A thread's packs of a row.
template <typename Type, int EACH> struct chain_row {
    enum { N = pack_of<float, Type>::N };
    struct pack<float, N> x[EACH];
    struct pack<Type, N> dsecond[EACH], dy[EACH], more[EACH];
    float rstd, second_rstd;
};

template <int N> static __device__ __forceinline__ int64_t pack_first(int e)
{
    return ((int64_t)e * blockDim.x + threadIdx.x) * N;
}

// What is not there is 0.
template <typename Type, int EACH>
static __device__ __forceinline__ void row_load(struct chain_row<Type, EACH> &to,
                                                const struct norm_chain_gradient &op, int64_t row)
{
    enum { N = chain_row<Type, EACH>::N };
    bool there = row < op.rows;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        int64_t column = pack_first<N>(e), at = row * op.width + column;
        bool mine = there && column < op.width;
        to.x[e] = mine ? pack_load_once<N>(op.x + at) : pack_zero<float, N>();
        to.dsecond[e] = mine ? pack_load<N>((const Type *)op.dsecond + at) : pack_zero<Type, N>();
        to.dy[e] = mine ? pack_load<N>((const Type *)op.dy + at) : pack_zero<Type, N>();
        to.more[e] = mine ? pack_load<N>((const Type *)op.more + at) : pack_zero<Type, N>();
    }
    to.rstd = there ? op.rstd[row] : 0.0f;
    to.second_rstd = there ? op.second_rstd[row] : 0.0f;
}

template <int N>
static __device__ __forceinline__ struct pack<float, N> weight_load(const float *weight, int e,
                                                                    int64_t width) {
    return pack_first<N>(e) < width ? pack_load<N>(weight + pack_first<N>(e))
                                    : pack_zero<float, N>();
}

// A thread's columns.
template <int N, int EACH>
struct columns {
    float value[EACH][N];
};

// scaled: dsecond times the weight. Returns the thread's part of the sum of scaled times y second_rstd.
template <typename Type, int EACH, int N>
static __device__ __forceinline__ float
second_begin(const struct chain_row<Type, EACH> &row, const struct norm_chain_gradient &op,
             struct columns<N, EACH> &x, struct columns<N, EACH> &scaled,
             struct columns<N, EACH> &sums)
{
    float projection = 0.0f;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        struct pack<float, N> weight = weight_load<N>(op.weight, e, op.width),
                              second = weight_load<N>(op.second_weight, e, op.width);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float d = pack_value(row.dsecond[e], i);
            x.value[e][i] = pack_value(row.x[e], i) * row.rstd;
            float z = x.value[e][i] * pack_value(weight, i) * row.second_rstd;
            scaled.value[e][i] = d * pack_value(second, i);
            sums.value[e][i] += d * z;
            projection += scaled.value[e][i] * z;
        }
    }
    return projection;
}

// From there to y's gradient times the weight, in the place of scaled. c: the mean of what second_begin summed.
template <typename Type, int EACH, int N>
static __device__ __forceinline__ float
first_begin(const struct chain_row<Type, EACH> &row, const struct norm_chain_gradient &op, float c,
            const struct columns<N, EACH> &x, struct columns<N, EACH> &scaled,
            struct columns<N, EACH> &sums)
{
    float projection = 0.0f;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        struct pack<float, N> weight = weight_load<N>(op.weight, e, op.width);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float z = x.value[e][i] * pack_value(weight, i) * row.second_rstd;
            float dy = row.second_rstd * (scaled.value[e][i] - z * c) +
                       (pack_value(row.dy[e], i) + pack_value(row.more[e], i));
            sums.value[e][i] += dy * x.value[e][i];
            scaled.value[e][i] = dy * pack_value(weight, i);
            projection += scaled.value[e][i] * x.value[e][i];
        }
    }
    return projection;
}

template <typename Type, int EACH, int N>
static __device__ __forceinline__ void
row_store(const struct norm_chain_gradient &op, int64_t row, float rstd, float c,
          const struct columns<N, EACH> &x, const struct columns<N, EACH> &scaled)
{
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        float value[N];
#pragma unroll
        for (int i = 0; i < N; i++)
            value[i] = rstd * (scaled.value[e][i] - x.value[e][i] * c);
        if (pack_first<N>(e) < op.width)
            store_values<N>((Type *)op.dx + row * op.width + pack_first<N>(e), value);
    }
}

template <int N, int EACH>
static __device__ __forceinline__ void sums_store(const struct columns<N, EACH> &sums, float *to,
                                                  int64_t width)
{
#pragma unroll
    for (int e = 0; e < EACH; e++)
        if (pack_first<N>(e) < width)
            store_values<N>(to + pack_first<N>(e), sums.value[e]);
}

// dx may be dy or more: a thread has its own elements before it writes them.
template <typename Type, int EACH>
static __global__ void __launch_bounds__(MOST_THREADS)
    chain_kernel(struct norm_chain_gradient op, float inverse_width)
{
    enum { N = chain_row<Type, EACH>::N, AHEAD = EACH <= MOST_AHEAD };
    __shared__ struct warp_sums warps[2];
    struct columns<N, EACH> sums = {}, second_sums = {
    };
    struct chain_row<Type, EACH> next;
    for (int i = threadIdx.x; i < 2 * MOST_THREADS / WARP; i += blockDim.x)
        ((float *)warps)[i] = 0.0f;
    __syncthreads();
    row_load(next, op, blockIdx.x);
    parts_add_may_start();
    for (int64_t row = blockIdx.x; row < op.rows; row += gridDim.x) {
        struct chain_row<Type, EACH> now = next;
        if (AHEAD)
            row_load(next, op, row + gridDim.x);
        struct columns<N, EACH> x, scaled;
        float c = second_begin(now, op, x, scaled, second_sums);
        c = row_sum(c, warps[0]) * inverse_width;
        c = first_begin(now, op, c, x, scaled, sums);
        c = row_sum(c, warps[1]) * inverse_width;
        row_store<Type>(op, row, now.rstd, c, x, scaled);
        if (!AHEAD)
            row_load(next, op, row + gridDim.x);
    }
    float *part = op.scratch + blockIdx.x * op.width;
    sums_store(sums, part, op.width);
    sums_store(second_sums, part + PARTS * op.width, op.width);
}

// One element of a row that is read again for each sum.
struct chain_element {
    float x, z, dz, scaled; // x rstd, y second_rstd, dsecond and that times the weight
};

template <typename Type>
static __device__ __forceinline__ struct chain_element
element_of(const struct norm_chain_gradient &op, int64_t row, int64_t i)
{
    struct chain_element e;
    e.x = op.x[row * op.width + i] * op.rstd[row];
    e.z = e.x * op.weight[i] * op.second_rstd[row];
    e.dz = load((const Type *)op.dsecond, row * op.width + i);
    e.scaled = e.dz * op.second_weight[i];
    return e;
}

// The gradient of y.
template <typename Type>
static __device__ __forceinline__ float middle_of(const struct norm_chain_gradient &op,
                                                  const struct chain_element &e, float c,
                                                  int64_t row, int64_t i)
{
    int64_t at = row * op.width + i;
    return op.second_rstd[row] * (e.scaled - e.z * c) +
           (load((const Type *)op.dy, at) + load((const Type *)op.more, at));
}

// sums, second_sums: [width]
template <typename Type>
static __device__ void long_row(const struct norm_chain_gradient &op, int64_t row, float *sums,
                                float *second_sums, bool first, float inverse_width)
{
    float projection = 0.0f, c, second;
    for (int64_t i = threadIdx.x; i < op.width; i += MOST_THREADS) {
        struct chain_element e = element_of<Type>(op, row, i);
        second_sums[i] = (first ? 0.0f : second_sums[i]) + e.dz * e.z;
        projection += e.scaled * e.z;
    }
    second = block_sum<MOST_THREADS>(projection) * inverse_width;
    projection = 0.0f;
    for (int64_t i = threadIdx.x; i < op.width; i += MOST_THREADS) {
        struct chain_element e = element_of<Type>(op, row, i);
        float dy = middle_of<Type>(op, e, second, row, i);
        sums[i] = (first ? 0.0f : sums[i]) + dy * e.x;
        projection += dy * op.weight[i] * e.x;
    }
    c = block_sum<MOST_THREADS>(projection) * inverse_width;
    for (int64_t i = threadIdx.x; i < op.width; i += MOST_THREADS) {
        struct chain_element e = element_of<Type>(op, row, i);
        float dy = middle_of<Type>(op, e, second, row, i);
        store((Type *)op.dx, row * op.width + i, op.rstd[row] * (dy * op.weight[i] - e.x * c));
    }
}

template <typename Type>
static __global__ void __launch_bounds__(MOST_THREADS)
    chain_long_kernel(struct norm_chain_gradient op, float inverse_width)
{
    float *sums = op.scratch + blockIdx.x * op.width, *second = sums + PARTS * op.width;
    for (int64_t row = blockIdx.x; row < op.rows; row += gridDim.x)
        long_row<Type>(op, row, sums, second, row == blockIdx.x, inverse_width);
}

template <typename Type, int EACH>
static void chain_start(struct stream *stream, const struct norm_chain_gradient *op, unsigned grid,
                        int64_t packs)
{
    unsigned threads = (unsigned)round_up(divide_up(packs, EACH), WARP);
    chain_kernel<Type, EACH><<<grid, threads, 0, stream->cuda>>>(*op, 1.0f / (float)op->width);
    launch_check();
}

template <typename Type>
static void chain_launch(struct stream *stream, const struct norm_chain_gradient *op, unsigned grid)
{
    enum { N = pack_of<float, Type>::N };
    bool packs = packs_at(op->x) && packs_at(op->weight) && packs_at(op->second_weight) &&
                 packs_at(op->dsecond) && packs_at(op->dy) && packs_at(op->more) &&
                 packs_at(op->dx) && packs_at(op->scratch) && packs_in(op->width, N);
    int64_t count = op->width / N;
    if (packs && count <= MOST_THREADS)
        chain_start<Type, 1>(stream, op, grid, count);
    else if (packs && count <= 2 * MOST_THREADS)
        chain_start<Type, 2>(stream, op, grid, count);
    else if (packs && count <= MOST_EACH * MOST_THREADS)
        chain_start<Type, MOST_EACH>(stream, op, grid, count);
    else {
        chain_long_kernel<Type>
            <<<grid, MOST_THREADS, 0, stream->cuda>>>(*op, 1.0f / (float)op->width);
        launch_check();
    }
}

// A CTA for each of at most PARTS parts of the rows; then the parts' sums of both weights' gradients are added.
void norm_chain_backward_cuda(struct stream *stream, const struct norm_chain_gradient *op)
{
    if (op->rows == 0 || op->width == 0)
        return;
    int parts = op->rows < PARTS ? (int)op->rows : PARTS;
    if (is_bf16(op->type))
        chain_launch<bf16_t>(stream, op, grid_size(parts));
    else
        chain_launch<float>(stream, op, grid_size(parts));
    column_parts_add(stream, op->dweight, op->scratch, parts, op->width);
    column_parts_add(stream, op->second_dweight, op->scratch + PARTS * op->width, parts, op->width);
}
