// Owns the norm in fp32 and rounded with a second one behind it on CUDA: a CTA has a row, which stays in registers;
// odd widths and very long rows are read again for each sum.
#include "kernels/norm_chain.h"

#include "kernels/cuda_vector.cuh"

enum { THREADS = 256, MOST_EACH = 8 };

// Where a thread's pack e is.
template <int N> static __device__ __forceinline__ int64_t pack_first(int e)
{
    return ((int64_t)e * THREADS + threadIdx.x) * N;
}

static __device__ __forceinline__ float rstd_of(float squares, const struct norm_chain &op)
{
    return 1.0f / sqrtf(squares / (float)op.width + op.eps);
}

static __device__ __forceinline__ int64_t row_from(const struct norm_chain &op, int64_t row)
{
    if (op.index == NULL)
        return row;
    int64_t from = op.index[row];
    bug_unless(from >= 0 && from < op.x_rows);
    return from;
}

// y = y rstd weight; returns the thread's share of its sum of squares.
template <int N, int EACH>
static __device__ __forceinline__ float scale(float (&y)[EACH][N], float rstd, const float *weight,
                                              int64_t width)
{
    float squares = 0.0f;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        struct pack<float, N> w = pack_zero<float, N>();
        if (pack_first<N>(e) < width)
            w = pack_load<N>(weight + pack_first<N>(e));
#pragma unroll
        for (int i = 0; i < N; i++) {
            y[e][i] = y[e][i] * rstd * pack_value(w, i);
            squares += y[e][i] * y[e][i];
        }
    }
    return squares;
}

template <int N, int EACH, typename Type>
static __device__ __forceinline__ void row_store(Type *to, const float (&y)[EACH][N], int64_t width)
{
#pragma unroll
    for (int e = 0; e < EACH; e++)
        if (pack_first<N>(e) < width)
            store_values<N>(to + pack_first<N>(e), y[e]);
}

template <typename X, typename Type, int EACH>
static __global__ void __launch_bounds__(THREADS) chain_kernel(struct norm_chain op)
{
    enum { N = pack_of<X, Type>::N };
    int64_t row = blockIdx.x, at = row * op.width;
    const X *x = (const X *)op.x + row_from(op, row) * op.x_stride;
    float y[EACH][N], squares = 0.0f;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        struct pack<X, N> p = pack_zero<X, N>();
        if (pack_first<N>(e) < op.width)
            p = pack_load_once<N>(x + pack_first<N>(e));
#pragma unroll
        for (int i = 0; i < N; i++) {
            y[e][i] = pack_value(p, i);
            squares += y[e][i] * y[e][i];
        }
    }
    if (op.copy != NULL)
        row_store<N, EACH>(op.copy + at, y, op.width);
    float rstd = rstd_of(block_sum<THREADS>(squares), op);
    squares = scale<N, EACH>(y, rstd, op.weight, op.width);
    if (op.wide != NULL)
        row_store<N, EACH>(op.wide + at, y, op.width);
    if (op.narrow != NULL)
        row_store<N, EACH>((Type *)op.narrow + row * op.narrow_stride, y, op.width);
    if (threadIdx.x == 0 && op.rstd != NULL)
        op.rstd[row] = rstd;
    if (op.second_weight == NULL)
        return;
    rstd = rstd_of(block_sum<THREADS>(squares), op);
    scale<N, EACH>(y, rstd, op.second_weight, op.width);
    row_store<N, EACH>((Type *)op.second + at, y, op.width);
    if (threadIdx.x == 0)
        op.second_rstd[row] = rstd;
}

template <typename X, typename Type>
static __global__ void __launch_bounds__(THREADS) chain_long_kernel(struct norm_chain op)
{
    int64_t row = blockIdx.x, at = row * op.width;
    const X *x = (const X *)op.x + row_from(op, row) * op.x_stride;
    float squares = 0.0f, second = 0.0f;
    for (int64_t i = threadIdx.x; i < op.width; i += THREADS)
        squares += load(x, i) * load(x, i);
    float rstd = rstd_of(block_sum<THREADS>(squares), op);
    squares = 0.0f;
    for (int64_t i = threadIdx.x; i < op.width; i += THREADS) {
        float y = load(x, i) * rstd * op.weight[i];
        squares += y * y;
        if (op.copy != NULL)
            op.copy[at + i] = load(x, i);
        if (op.wide != NULL)
            op.wide[at + i] = y;
        if (op.narrow != NULL)
            store((Type *)op.narrow, row * op.narrow_stride + i, y);
    }
    if (threadIdx.x == 0 && op.rstd != NULL)
        op.rstd[row] = rstd;
    if (op.second_weight == NULL)
        return;
    second = rstd_of(block_sum<THREADS>(squares), op);
    for (int64_t i = threadIdx.x; i < op.width; i += THREADS) {
        float y = load(x, i) * rstd * op.weight[i];
        store((Type *)op.second, at + i, y * second * op.second_weight[i]);
    }
    if (threadIdx.x == 0)
        op.second_rstd[row] = second;
}

template <typename X, typename Type>
static void chain_launch(struct stream *stream, const struct norm_chain *op)
{
    enum { N = pack_of<X, Type>::N };
    bool packs = packs_at(op->x) && packs_at(op->weight) && packs_at(op->wide) &&
                 packs_at(op->copy) && packs_at(op->narrow) && packs_at(op->second_weight) &&
                 packs_at(op->second) && packs_in(op->width, N) && packs_in(op->x_stride, N) &&
                 packs_in(op->narrow_stride, N);
    unsigned grid = grid_size(op->rows);
    int64_t each = divide_up(op->width, THREADS * N);
    if (!packs || each > MOST_EACH)
        chain_long_kernel<X, Type><<<grid, THREADS, 0, stream->cuda>>>(*op);
    else if (each == 1)
        chain_kernel<X, Type, 1><<<grid, THREADS, 0, stream->cuda>>>(*op);
    else if (each == 2)
        chain_kernel<X, Type, 2><<<grid, THREADS, 0, stream->cuda>>>(*op);
    else if (each <= 4)
        chain_kernel<X, Type, 4><<<grid, THREADS, 0, stream->cuda>>>(*op);
    else
        chain_kernel<X, Type, MOST_EACH><<<grid, THREADS, 0, stream->cuda>>>(*op);
    launch_check();
}

// One CTA a row.
void norm_chain_cuda(struct stream *stream, const struct norm_chain *op)
{
    if (op->rows == 0 || op->width == 0)
        return;
    BUG_UNLESS(op->x_type == op->type || op->x_type == DTYPE_F32);
    if (is_bf16(op->x_type))
        chain_launch<bf16_t, bf16_t>(stream, op);
    else if (is_bf16(op->type))
        chain_launch<float, bf16_t>(stream, op);
    else
        chain_launch<float, float>(stream, op);
}
