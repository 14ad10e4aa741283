// Owns the choice between the implementations of attention on CUDA.
#include <math.h>

#include "kernels/attention_internal.cuh"

enum { LSE_THREADS = 256 };

static void check(const struct attention *op)
{
    BUG_UNLESS(op->block_size == 0 || op->rows % op->block_size == 0);
    BUG_UNLESS(op->heads % op->kv_heads == 0);
    BUG_UNLESS(op->head_dim <= ATTENTION_MOST_HEAD_DIM && op->kv_heads <= UINT16_MAX);
    BUG_UNLESS(op->context <= INT32_MAX / 2 && op->rows <= INT32_MAX / 2);
}

static bool is_aligned(const void *pointer)
{
    return (uintptr_t)pointer % 16 == 0;
}

// Tensor cores take bf16 in rows that begin at multiples of 16 bytes, of the head_dims they are built for.
static bool fits_mma(const struct attention *op)
{
    int64_t d = op->head_dim, group = op->heads / op->kv_heads;
    bool strides = op->v_block_stride % 8 == 0 && op->v_context_stride % 8 == 0;
    bool keys = is_aligned(op->k_block) && is_aligned(op->v_block) && is_aligned(op->k_context) &&
                is_aligned(op->v_context);
    bool queries = is_aligned(op->q) && is_aligned(op->out) && is_aligned(op->dout) &&
                   is_aligned(op->dq) && is_aligned(op->dk_block) && is_aligned(op->dv_block) &&
                   is_aligned(op->dk_context) && is_aligned(op->dv_context);
    return is_bf16(op->type) && (d == 64 || d == 96 || d == 128 || d == 256) && strides && keys &&
           queries && group <= 32 && op->rows * group < 1 << 29;
}

void attention_forward_cuda(struct stream *stream, const struct attention *op)
{
    check(op);
    if (op->rows == 0)
        return;
    if (!fits_mma(op))
        attention_forward_plain(stream, op);
    else if (attention_fits_hopper(stream, op))
        attention_forward_hopper(stream, op);
    else
        attention_forward_mma(stream, op);
}

// lse, but 0 of rows that see nothing: of -inf their scores, which are -inf, would give NaN.
static __global__ void __launch_bounds__(LSE_THREADS) lse_kernel(struct attention op, float *lse)
{
    int64_t at = (int64_t)blockIdx.x * LSE_THREADS + threadIdx.x;
    if (at < op.rows * op.heads)
        lse[at] = op.lse[at] == -INFINITY ? 0.0f : op.lse[at];
}

static void backward_mma(struct stream *stream, const struct attention *op)
{
    attention_delta(stream, op);
    bool hopper = attention_fits_hopper(stream, op);
    if (hopper)
        attention_dq_hopper(stream, op);
    else
        attention_dq(stream, op);
    if (op->block_size == 0 && op->context == 0)
        return; // no keys
    if (hopper)
        attention_dkv_hopper(stream, op);
    else
        attention_dkv(stream, op);
}

// Rows [first, first + count) of loose rows.
static struct attention rows_part(const struct attention *op, int64_t first, int64_t count)
{
    int64_t heads = first * op->heads, at = heads * op->head_dim;
    struct attention part = *op;
    part.rows = count;
    part.q = (const bf16_t *)op->q + at;
    part.out = (bf16_t *)op->out + at;
    part.dout = (const bf16_t *)op->dout + at;
    part.dq = (bf16_t *)op->dq + at;
    part.lse = op->lse + heads;
    part.delta = op->delta + heads;
    part.begin = op->begin + first;
    part.end = op->end + first;
    return part;
}

// Without blocks a row may see nothing: then lse is a copy, in half of the workspace. So many rows at a time.
static void backward_loose(struct stream *stream, const struct attention *op)
{
    struct stream rest = *stream;
    size_t half = stream->workspace_bytes / 2 / LSE_THREADS * LSE_THREADS;
    int64_t most = (int64_t)(half / sizeof(float)) / op->heads;
    BUG_UNLESS(most > 0);
    rest.workspace = (char *)stream->workspace + half;
    rest.workspace_bytes -= half;
    for (int64_t first = 0; first < op->rows; first += most) {
        int64_t left = op->rows - first;
        struct attention part = rows_part(op, first, left < most ? left : most);
        int64_t count = part.rows * part.heads;
        lse_kernel<<<grid_size(divide_up(count, LSE_THREADS)), LSE_THREADS, 0, stream->cuda>>>(
            part, (float *)stream->workspace);
        launch_check();
        part.lse = (float *)stream->workspace;
        backward_mma(&rest, &part);
    }
}

void attention_backward_cuda(struct stream *stream, const struct attention *op)
{
    check(op);
    if (op->rows == 0)
        return;
    if (!fits_mma(op))
        attention_backward_plain(stream, op);
    else if (op->block_size == 0)
        backward_loose(stream, op);
    else
        backward_mma(stream, op);
}
