// Owns attention to the keys of a row's own steps on the CPU: the heads of a row that share a key head
// are one task, so no two threads write the same element.
#include "kernels/attention_diagonal.h"

#include <math.h>

#include "base/log.h"
#include "kernels/cpu_internal.h"

enum { MAX_HEAD_DIM = 512 };

struct buffers {
    float k[DIAGONAL_MOST_STEPS * MAX_HEAD_DIM], v[DIAGONAL_MOST_STEPS * MAX_HEAD_DIM];
    float dk[DIAGONAL_MOST_STEPS * MAX_HEAD_DIM], dv[DIAGONAL_MOST_STEPS * MAX_HEAD_DIM];
    float q[MAX_HEAD_DIM], out[MAX_HEAD_DIM], dout[MAX_HEAD_DIM], dq[MAX_HEAD_DIM];
};
_Static_assert(sizeof(struct buffers) <= CPU_WORKSPACE_PER_THREAD, "buffers of one thread");

static void check(const struct diagonal *op)
{
    BUG_UNLESS(op->steps > 0 && op->steps <= DIAGONAL_MOST_STEPS);
    BUG_UNLESS(op->heads % op->kv_heads == 0 && op->head_dim <= MAX_HEAD_DIM);
}

static void load_keys(const struct diagonal *op, int64_t row, int64_t kv_head, struct buffers *buf)
{
    int64_t d = op->head_dim;
    for (int64_t j = 0; j < op->steps; j++) {
        piece_load(buf->k + j * d, op->k, op->type,
                   j * op->k_step + row * op->k_stride + kv_head * d, d);
        piece_load(buf->v + j * d, op->v, op->type,
                   j * op->v_step + row * op->v_stride + kv_head * d, d);
    }
}

static KERNEL_CLONES void scale_row(float *x, float factor, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] *= factor;
}

static KERNEL_CLONES void add_scaled(float *x, const float *y, float factor, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] += factor * y[i];
}

// at: row * heads + head
static void forward_head(const struct diagonal *op, int64_t at, struct buffers *buf)
{
    int64_t d = op->head_dim;
    float score[DIAGONAL_MOST_STEPS], max = op->lse[at], sum;
    piece_load(buf->q, op->q, op->type, at * d, d);
    piece_load(buf->out, op->out, op->type, at * d, d);
    for (int64_t j = 0; j < op->steps; j++) {
        score[j] = op->scale * piece_dot(buf->q, buf->k + j * d, d);
        max = score[j] > max ? score[j] : max;
    }
    sum = expf(op->lse[at] - max);
    for (int64_t j = 0; j < op->steps; j++)
        sum += expf(score[j] - max);
    float lse = max + logf(sum);
    scale_row(buf->out, expf(op->lse[at] - lse), d);
    for (int64_t j = 0; j < op->steps; j++)
        add_scaled(buf->out, buf->v + j * d, expf(score[j] - lse), d);
    op->lse[at] = lse;
    piece_store(op->out, buf->out, op->type, at * d, d);
}

static int64_t elements(const struct diagonal *op)
{
    return op->rows * op->heads * op->head_dim * (op->steps + 1);
}

void diagonal_forward_cpu(struct stream *stream, const struct diagonal *op)
{
    int64_t group = op->heads / op->kv_heads;
    check(op);
#pragma omp parallel for collapse(2) num_threads(team(stream, elements(op))) schedule(static)
    for (int64_t row = 0; row < op->rows; row++)
        for (int64_t kv_head = 0; kv_head < op->kv_heads; kv_head++) {
            struct buffers *buf = thread_workspace(stream);
            load_keys(op, row, kv_head, buf);
            for (int64_t i = 0; i < group; i++)
                forward_head(op, row * op->heads + kv_head * group + i, buf);
        }
}

static void backward_head(const struct diagonal *op, int64_t at, struct buffers *buf)
{
    int64_t d = op->head_dim;
    piece_load(buf->q, op->q, op->type, at * d, d);
    piece_load(buf->out, op->out, op->type, at * d, d);
    piece_load(buf->dout, op->dout, op->type, at * d, d);
    piece_load(buf->dq, op->dq, op->type, at * d, d);
    float delta = piece_dot(buf->out, buf->dout, d);
    for (int64_t j = 0; j < op->steps; j++) {
        float p = expf(op->scale * piece_dot(buf->q, buf->k + j * d, d) - op->lse[at]);
        float ds = p * (piece_dot(buf->dout, buf->v + j * d, d) - delta) * op->scale;
        add_scaled(buf->dq, buf->k + j * d, ds, d);
        add_scaled(buf->dk + j * d, buf->q, ds, d);
        add_scaled(buf->dv + j * d, buf->dout, p, d);
    }
    piece_store(op->dq, buf->dq, op->type, at * d, d);
}

static void store_keys(const struct diagonal *op, int64_t row, int64_t kv_head,
                       const struct buffers *buf)
{
    int64_t d = op->head_dim;
    for (int64_t j = 0; j < op->steps; j++) {
        int64_t at = ((j * op->rows + row) * op->kv_heads + kv_head) * d;
        for (int64_t i = 0; i < d; i++) {
            op->dk[at + i] = (op->fresh ? 0.0f : op->dk[at + i]) + buf->dk[j * d + i];
            op->dv[at + i] = (op->fresh ? 0.0f : op->dv[at + i]) + buf->dv[j * d + i];
        }
    }
}

void diagonal_backward_cpu(struct stream *stream, const struct diagonal *op)
{
    int64_t group = op->heads / op->kv_heads;
    size_t bytes = (size_t)(op->steps * op->head_dim) * sizeof(float);
    check(op);
#pragma omp parallel for collapse(2) num_threads(team(stream, elements(op))) schedule(static)
    for (int64_t row = 0; row < op->rows; row++)
        for (int64_t kv_head = 0; kv_head < op->kv_heads; kv_head++) {
            struct buffers *buf = thread_workspace(stream);
            load_keys(op, row, kv_head, buf);
            memset(buf->dk, 0, bytes);
            memset(buf->dv, 0, bytes);
            for (int64_t i = 0; i < group; i++)
                backward_head(op, row * op->heads + kv_head * group + i, buf);
            store_keys(op, row, kv_head, buf);
        }
}
