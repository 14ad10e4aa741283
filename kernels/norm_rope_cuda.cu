// Owns the norm and rotary embedding of heads on CUDA. One warp works on one head; lane l has the pairs
// (i, i + head_dim / 2) with i = l, l + 32, ...
#include "kernels/norm_rope.h"

#include "kernels/cuda_internal.cuh"
#include "kernels/rms_norm.h"

enum {
    MAX_HEAD_DIM = 512,
    MAX_PAIRS = MAX_HEAD_DIM / 2 / WARP, // of a lane
    WARPS = 8,
    THREADS = WARPS * WARP
};

// One head of one row.
struct head {
    int64_t row, head;
    const float *cos, *sin; // [head_dim / 2] at the row's position
};

static __device__ struct head head_at(const struct norm_rope &op, int64_t index)
{
    struct head h;
    h.row = index / op.heads;
    h.head = index % op.heads;
    int64_t position = op.positions[h.row];
    bug_unless(position >= 0 && position < op.table_rows);
    h.cos = op.cos + position * (op.head_dim / 2);
    h.sin = op.sin + position * (op.head_dim / 2);
    return h;
}

template <typename Type>
static __device__ float head_rstd(const struct norm_rope &op, const Type *x, int lane)
{
    float squares = 0.0f;
    for (int i = lane; i < op.head_dim; i += WARP)
        squares += load(x, i) * load(x, i);
    return 1.0f / sqrtf(warp_sum(squares) / (float)op.head_dim + op.eps);
}

template <typename Type>
static __global__ void __launch_bounds__(THREADS) forward_kernel(struct norm_rope op)
{
    int64_t index = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP;
    int lane = threadIdx.x % WARP, half = (int)(op.head_dim / 2);
    if (index >= op.rows * op.heads)
        return; // a whole warp
    struct head h = head_at(op, index);
    const Type *x = (const Type *)op.x + h.row * op.x_stride + h.head * op.head_dim;
    const Type *weight = (const Type *)op.weight;
    Type *y = (Type *)op.y + index * op.head_dim;
    float rstd = weight != NULL ? head_rstd(op, x, lane) : 1.0f;
    for (int i = lane; i < half; i += WARP) {
        float low = load(x, i), high = load(x, i + half);
        if (weight != NULL) {
            low = low * rstd * load(weight, i);
            high = high * rstd * load(weight, i + half);
        }
        store(y, i, low * h.cos[i] - high * h.sin[i]);
        store(y, i + half, high * h.cos[i] + low * h.sin[i]);
    }
}

static void check(const struct norm_rope *op)
{
    BUG_UNLESS(op->head_dim % 2 == 0 && op->head_dim <= MAX_HEAD_DIM);
}

// One warp a head.
void norm_rope_forward_cuda(struct stream *stream, const struct norm_rope *op)
{
    check(op);
    if (op->rows == 0)
        return;
    unsigned grid = grid_size(divide_up(op->rows * op->heads, WARPS));
    if (is_bf16(op->type))
        forward_kernel<bf16_t><<<grid, THREADS, 0, stream->cuda>>>(*op);
    else
        forward_kernel<float><<<grid, THREADS, 0, stream->cuda>>>(*op);
    launch_check();
}

// Gradients of one head: dx, and dweight added to the lane's own sums [2][MAX_PAIRS].
template <typename Type, typename Gradient>
static __device__ void backward_head(const struct norm_rope &op, int64_t index, int lane,
                                     float (*sums)[MAX_PAIRS])
{
    struct head h = head_at(op, index);
    const Type *x = (const Type *)op.x + h.row * op.x_stride + h.head * op.head_dim;
    const Type *weight = (const Type *)op.weight;
    const Gradient *dy = (const Gradient *)op.dy + index * op.head_dim;
    Type *dx = (Type *)op.dx + h.row * op.dx_stride + h.head * op.head_dim;
    int half = (int)(op.head_dim / 2);
    float dn[2][MAX_PAIRS], rstd = 1.0f, projection = 0.0f;
#pragma unroll
    for (int p = 0; p < MAX_PAIRS; p++) {
        int i = lane + p * WARP;
        dn[0][p] = dn[1][p] = 0.0f;
        if (i >= half)
            continue;
        float low = load(dy, i), high = load(dy, i + half);
        dn[0][p] = low * h.cos[i] + high * h.sin[i];
        dn[1][p] = high * h.cos[i] - low * h.sin[i];
        if (weight != NULL)
            projection += dn[0][p] * load(weight, i) * load(x, i) +
                          dn[1][p] * load(weight, i + half) * load(x, i + half);
    }
    if (weight != NULL)
        rstd = head_rstd(op, x, lane);
    double c64 = (double)warp_sum(projection) * (double)rstd * (double)rstd;
    float c = (float)(c64 / (double)op.head_dim);
#pragma unroll
    for (int p = 0; p < MAX_PAIRS; p++)
#pragma unroll
        for (int side = 0; side < 2; side++) {
            int i = lane + p * WARP, at = i + side * half;
            if (i >= half)
                continue;
            float value = dn[side][p];
            if (weight != NULL) {
                float xi = load(x, at);
                sums[side][p] += value * (xi * rstd);
                value = rstd * (value * load(weight, at) - xi * c);
            }
            store(dx, at, value);
        }
}

// A part of `size` heads: warps take them in turn, and their sums of dweight are added in order.
template <typename Type, typename Gradient>
static __global__ void __launch_bounds__(THREADS) backward_kernel(struct norm_rope op, int64_t size)
{
    __shared__ float partial[WARPS][MAX_HEAD_DIM];
    float sums[2][MAX_PAIRS] = {{0.0f}};
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, half = (int)(op.head_dim / 2);
    int64_t first = blockIdx.x * size, heads = op.rows * op.heads;
    int64_t end = first + size < heads ? first + size : heads;
    for (int64_t index = first + warp; index < end; index += WARPS)
        backward_head<Type, Gradient>(op, index, lane, sums);
    if (op.weight == NULL)
        return;
#pragma unroll
    for (int p = 0; p < MAX_PAIRS; p++) {
        int i = lane + p * WARP;
        if (i >= half)
            continue;
        partial[warp][i] = sums[0][p];
        partial[warp][i + half] = sums[1][p];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < op.head_dim; i += THREADS) {
        float sum = 0.0f;
        for (int w = 0; w < WARPS; w++)
            sum += partial[w][i];
        op.scratch[blockIdx.x * op.head_dim + i] = sum;
    }
}

// A CTA for each of at most RMS_NORM_PARTS parts of the heads, 16 KiB of shared memory; then one
// thread a column of dweight.
void norm_rope_backward_cuda(struct stream *stream, const struct norm_rope *op)
{
    check(op);
    BUG_UNLESS((op->weight == NULL) == (op->dweight == NULL));
    if (op->rows == 0)
        return;
    int64_t heads = op->rows * op->heads, size = divide_up(heads, RMS_NORM_PARTS);
    int64_t parts = divide_up(heads, size);
    unsigned grid = grid_size(parts);
    bool type = is_bf16(op->type), gradient = is_bf16(op->dy_type);
    if (type && gradient)
        backward_kernel<bf16_t, bf16_t><<<grid, THREADS, 0, stream->cuda>>>(*op, size);
    else if (type)
        backward_kernel<bf16_t, float><<<grid, THREADS, 0, stream->cuda>>>(*op, size);
    else if (gradient)
        backward_kernel<float, bf16_t><<<grid, THREADS, 0, stream->cuda>>>(*op, size);
    else
        backward_kernel<float, float><<<grid, THREADS, 0, stream->cuda>>>(*op, size);
    launch_check();
    if (op->weight != NULL)
        column_parts_add(stream, op->dweight, op->scratch, (int)parts, op->head_dim);
}
