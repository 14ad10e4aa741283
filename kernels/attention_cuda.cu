// Owns the choice between the implementations of attention on CUDA.
#include "kernels/attention_internal.cuh"

static void check(const struct attention *op)
{
    BUG_UNLESS(op->rows % op->block_size == 0 && op->heads % op->kv_heads == 0);
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

void attention_backward_cuda(struct stream *stream, const struct attention *op)
{
    check(op);
    if (op->rows == 0)
        return;
    if (!fits_mma(op)) {
        attention_backward_plain(stream, op);
        return;
    }
    attention_delta(stream, op);
    if (attention_fits_hopper(stream, op)) {
        attention_dq_hopper(stream, op);
        attention_dkv_hopper(stream, op);
    } else {
        attention_dq(stream, op);
        attention_dkv(stream, op);
    }
}
