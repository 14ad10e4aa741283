// Owns the RMS norm on CUDA, forward and backward. A row's result depends on that row alone.
#include "kernels/rms_norm.h"

#include "kernels/cuda_internal.cuh"

enum { THREADS = 256, BACKWARD_THREADS = 512, COLUMN_THREADS = 128 };

template <typename Type>
static __global__ void __launch_bounds__(THREADS) forward_kernel(struct rms_norm op)
{
    int64_t row = blockIdx.x;
    const Type *x = (const Type *)op.x + row * op.width, *weight = (const Type *)op.weight;
    Type *y = (Type *)op.y + row * op.width;
    float squares = 0.0f;
    for (int64_t i = threadIdx.x; i < op.width; i += THREADS)
        squares += load(x, i) * load(x, i);
    squares = block_sum<THREADS>(squares);
    float rstd = 1.0f / sqrtf(squares / (float)op.width + op.eps);
    for (int64_t i = threadIdx.x; i < op.width; i += THREADS) // y may be x: each reads its own
        store(y, i, load(x, i) * rstd * (load(weight, i) + op.weight_offset));
    if (threadIdx.x == 0 && op.rstd != NULL)
        op.rstd[row] = rstd;
}

// One CTA a row.
void rms_norm_forward_cuda(struct stream *stream, const struct rms_norm *norm)
{
    if (norm->rows == 0)
        return;
    if (is_bf16(norm->type))
        forward_kernel<bf16_t><<<grid_size(norm->rows), THREADS, 0, stream->cuda>>>(*norm);
    else
        forward_kernel<float><<<grid_size(norm->rows), THREADS, 0, stream->cuda>>>(*norm);
    launch_check();
}

// dx = rstd (scale dy - x c), c = rstd^2 mean(dy scale x); sums += dy x rstd. dx may be dy: each
// thread reads its own elements before it writes them.
template <typename Type>
static __device__ void backward_row(const struct rms_norm &op, int64_t row, float *sums, bool first)
{
    const Type *x = (const Type *)op.x + row * op.width, *weight = (const Type *)op.weight;
    const Type *dy = (const Type *)op.dy + row * op.width;
    Type *dx = (Type *)op.dx + row * op.width;
    float rstd = op.rstd[row], projection = 0.0f;
    for (int64_t i = threadIdx.x; i < op.width; i += BACKWARD_THREADS)
        projection += load(dy, i) * (load(weight, i) + op.weight_offset) * load(x, i);
    projection = block_sum<BACKWARD_THREADS>(projection);
    float c = (float)((double)projection * (double)rstd * (double)rstd / (double)op.width);
    for (int64_t i = threadIdx.x; i < op.width; i += BACKWARD_THREADS) {
        float xi = load(x, i), dyi = load(dy, i), scale = load(weight, i) + op.weight_offset;
        float value = rstd * (scale * dyi - xi * c);
        store(dx, i, op.dx_add ? load(dx, i) + value : value);
        if (sums != NULL)
            sums[i] = (first ? 0.0f : sums[i]) + dyi * (xi * rstd);
    }
}

// A part of `size` rows; its dweight goes to its row of scratch, each column by one thread.
template <typename Type>
static __global__ void __launch_bounds__(BACKWARD_THREADS)
    backward_kernel(struct rms_norm op, int64_t size)
{
    int64_t first = blockIdx.x * size;
    int64_t end = first + size < op.rows ? first + size : op.rows;
    float *sums = op.dweight != NULL ? op.scratch + blockIdx.x * op.width : NULL;
    for (int64_t row = first; row < end; row++)
        backward_row<Type>(op, row, sums, row == first);
}

static __global__ void add_parts_kernel(float *sum, const float *partial, int parts, int64_t width)
{
    int64_t i = (int64_t)blockIdx.x * COLUMN_THREADS + threadIdx.x;
    if (i >= width)
        return;
    double total = 0.0;
    for (int part = 0; part < parts; part++)
        total += (double)partial[part * width + i];
    sum[i] = (float)((double)sum[i] + total);
}

void column_parts_add(struct stream *stream, float *sum, const float *partial, int parts,
                      int64_t width)
{
    add_parts_kernel<<<grid_size(divide_up(width, COLUMN_THREADS)), COLUMN_THREADS, 0,
                       stream->cuda>>>(sum, partial, parts, width);
    launch_check();
}

// A CTA for each of at most RMS_NORM_PARTS parts of the rows, then one thread a column.
void rms_norm_backward_cuda(struct stream *stream, const struct rms_norm *norm)
{
    BUG_UNLESS(!norm->dx_add || norm->dx != norm->dy);
    if (norm->rows == 0)
        return;
    int64_t size = divide_up(norm->rows, RMS_NORM_PARTS);
    int64_t parts = divide_up(norm->rows, size);
    if (is_bf16(norm->type))
        backward_kernel<bf16_t>
            <<<grid_size(parts), BACKWARD_THREADS, 0, stream->cuda>>>(*norm, size);
    else
        backward_kernel<float>
            <<<grid_size(parts), BACKWARD_THREADS, 0, stream->cuda>>>(*norm, size);
    launch_check();
    if (norm->dweight != NULL)
        column_parts_add(stream, norm->dweight, norm->scratch, (int)parts, norm->width);
}
