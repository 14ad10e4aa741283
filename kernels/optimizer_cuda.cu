// Owns the optimizer's ops on CUDA: AdamW, sum of squares, conversion.
#include "kernels/optimizer.h"

#include <math.h>

#include "kernels/cuda_internal.cuh"

enum { THREADS = 256 };

struct adamw_factors {
    float grad, beta1, beta2, one_beta1, one_beta2, keep, step, correction2, eps;
};

static struct adamw_factors adamw_factors_make(const struct adamw *op)
{
    double correction1 = 1.0 - pow(op->beta1, (double)op->step);
    double correction2 = 1.0 - pow(op->beta2, (double)op->step);
    struct adamw_factors f;
    f.grad = (float)op->grad_scale;
    f.beta1 = (float)op->beta1;
    f.beta2 = (float)op->beta2;
    f.one_beta1 = (float)(1.0 - op->beta1);
    f.one_beta2 = (float)(1.0 - op->beta2);
    f.keep = (float)(1.0 - op->lr * op->weight_decay);
    f.step = (float)(op->lr / correction1);
    f.correction2 = (float)correction2;
    f.eps = (float)op->eps;
    return f;
}

template <typename Copy>
static __global__ void adamw_kernel(struct adamw op, struct adamw_factors f, Copy *copy)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= op.count)
        return;
    float g = f.grad * op.grad[i];
    float mean = f.beta1 * op.m[i] + f.one_beta1 * g;
    float square = f.beta2 * op.v[i] + f.one_beta2 * g * g;
    op.m[i] = mean;
    op.v[i] = square;
    float param = op.param[i] * f.keep - f.step * mean / (sqrtf(square / f.correction2) + f.eps);
    op.param[i] = param;
    if (copy != NULL)
        store(copy, i, param);
}

// One thread an element.
void adamw_cuda(struct stream *stream, const struct adamw *op)
{
    BUG_UNLESS(op->step > 0);
    if (op->count == 0)
        return;
    struct adamw_factors factors = adamw_factors_make(op);
    unsigned grid = grid_size(divide_up(op->count, THREADS));
    if (op->copy != NULL && is_bf16(op->copy_type))
        adamw_kernel<<<grid, THREADS, 0, stream->cuda>>>(*op, factors, (bf16_t *)op->copy);
    else
        adamw_kernel<<<grid, THREADS, 0, stream->cuda>>>(*op, factors, (float *)op->copy);
    launch_check();
}

// scratch[part] = sum over elements [part * size, (part + 1) * size), in fp64 from the first product
// on: squares of finite gradients overflow fp32.
static __global__ void squares_kernel(struct sum_squares op, int64_t size)
{
    int64_t first = blockIdx.x * size;
    int64_t end = first + size < op.count ? first + size : op.count;
    double sum = 0.0;
    for (int64_t i = first + threadIdx.x; i < end; i += THREADS)
        sum += (double)op.x[i] * (double)op.x[i];
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0)
        op.scratch[blockIdx.x] = sum;
}

static __global__ void squares_total_kernel(struct sum_squares op)
{
    double sum = 0.0;
    for (int part = threadIdx.x; part < SUM_SQUARES_PARTS; part += THREADS)
        sum += op.scratch[part];
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0)
        op.result[0] = sum;
}

// A CTA for each of SUM_SQUARES_PARTS parts, which the count alone fixes; then one CTA.
void sum_squares_cuda(struct stream *stream, const struct sum_squares *op)
{
    int64_t size = divide_up(op->count, SUM_SQUARES_PARTS);
    squares_kernel<<<SUM_SQUARES_PARTS, THREADS, 0, stream->cuda>>>(*op, size);
    launch_check();
    squares_total_kernel<<<1, THREADS, 0, stream->cuda>>>(*op);
    launch_check();
}

template <typename To, typename From>
static __global__ void convert_kernel(To *to, const From *from, int64_t count)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < count)
        store(to, i, load(from, i));
}

template <typename To, typename From>
static void convert_launch(struct stream *stream, const struct convert *op)
{
    convert_kernel<<<grid_size(divide_up(op->count, THREADS)), THREADS, 0, stream->cuda>>>(
        (To *)op->to, (const From *)op->from, op->count);
    launch_check();
}

// One thread an element.
void convert_cuda(struct stream *stream, const struct convert *op)
{
    bool from = is_bf16(op->from_type), to = is_bf16(op->to_type);
    if (op->count == 0)
        return;
    if (from && to)
        convert_launch<bf16_t, bf16_t>(stream, op);
    else if (from)
        convert_launch<float, bf16_t>(stream, op);
    else if (to)
        convert_launch<bf16_t, float>(stream, op);
    else
        convert_launch<float, float>(stream, op);
}
