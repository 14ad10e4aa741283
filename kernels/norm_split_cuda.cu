// Owns the gradients of a matrix and of the norm before it, from one product, on CUDA: a CTA has a slab of columns
// in a part of the rows, a thread a pack of them; the parts' sums of dweight are added in order.
#include "kernels/norm_split.h"

#include "kernels/cuda_vector.cuh"
#include "kernels/rms_norm.h"

enum {
    THREADS = 256,
    TOGETHER = 4,   // rows that are on their way
    LEAST_ROWS = 16 // of a part
};

template <typename Type, int N> struct split_row {
    struct pack<float, N> sums, before;
    struct pack<Type, N> matrix;
};

template <typename Type, int N>
static __device__ __forceinline__ void
split_load(struct split_row<Type, N> &x, const struct norm_split &op, int64_t row, int64_t column)
{
    x.sums = pack_load<N>(op.sums + row * op.width + column);
    x.matrix = pack_load<N>((const Type *)op.matrix + row * op.matrix_stride + column);
    x.before = op.add ? pack_load<N>(op.dmatrix + row * op.dmatrix_stride + column)
                      : pack_zero<float, N>();
}

template <typename Type, int N>
static __device__ __forceinline__ void
split_store(const struct split_row<Type, N> &x, const float (&weight)[N], float (&dweight)[N],
            const struct norm_split &op, int64_t row, int64_t column)
{
    float value[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        value[i] = pack_value(x.before, i) + pack_value(x.sums, i) * weight[i];
        dweight[i] += pack_value(x.sums, i) * pack_value(x.matrix, i);
    }
    store_values<N>(op.dmatrix + row * op.dmatrix_stride + column, value);
}

template <typename Type, int N>
static __global__ void __launch_bounds__(THREADS) split_kernel(struct norm_split op, int64_t size)
{
    int64_t column = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * N;
    int64_t row = blockIdx.y * size, end = row + size < op.rows ? row + size : op.rows;
    parts_add_may_start();
    if (column >= op.width)
        return;
    float weight[N], dweight[N] = {0.0f};
    struct pack<float, N> scale = pack_load<N>(op.weight + column);
#pragma unroll
    for (int i = 0; i < N; i++)
        weight[i] = pack_value(scale, i);
    for (; row + TOGETHER <= end; row += TOGETHER) {
        struct split_row<Type, N> x[TOGETHER];
#pragma unroll
        for (int t = 0; t < TOGETHER; t++)
            split_load<Type, N>(x[t], op, row + t, column);
#pragma unroll
        for (int t = 0; t < TOGETHER; t++)
            split_store<Type, N>(x[t], weight, dweight, op, row + t, column);
    }
    for (; row < end; row++) {
        struct split_row<Type, N> x;
        split_load<Type, N>(x, op, row, column);
        split_store<Type, N>(x, weight, dweight, op, row, column);
    }
    store_values<N>(op.scratch + blockIdx.y * op.width + column, dweight);
}

template <typename Type>
static void split_launch(struct stream *stream, const struct norm_split *op)
{
    enum { N = pack_of<float, Type>::N };
    bool packs = packs_at(op->sums) && packs_at(op->weight) && packs_at(op->matrix) &&
                 packs_at(op->dmatrix) && packs_at(op->scratch) && packs_in(op->width, N) &&
                 packs_in(op->matrix_stride, N) && packs_in(op->dmatrix_stride, N);
    int64_t size = divide_up(op->rows, RMS_NORM_PARTS);
    size = size > LEAST_ROWS ? size : LEAST_ROWS;
    int64_t parts = divide_up(op->rows, size);
    dim3 grid(grid_size(divide_up(op->width, THREADS * (packs ? N : 1))), (unsigned)parts);
    if (packs)
        split_kernel<Type, N><<<grid, THREADS, 0, stream->cuda>>>(*op, size);
    else
        split_kernel<Type, 1><<<grid, THREADS, 0, stream->cuda>>>(*op, size);
    launch_check();
    column_parts_add(stream, op->dweight, op->scratch, (int)parts, op->width);
}

void norm_split_cuda(struct stream *stream, const struct norm_split *op)
{
    if (op->rows == 0 || op->width == 0)
        return;
    if (is_bf16(op->type))
        split_launch<bf16_t>(stream, op);
    else
        split_launch<float>(stream, op);
}
