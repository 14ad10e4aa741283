// Owns the gated activation on the CPU.
#include "kernels/swiglu.h"

#include "kernels/cpu_internal.h"

// sigmoid[i] = 1 / (1 + exp(-gate[i]))
static KERNEL_CLONES void sigmoid_piece(float *sigmoid, const float *gate, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        sigmoid[i] = -gate[i];
    piece_exp(sigmoid, sigmoid, 0.0f, 1.0f, n);
    for (int64_t i = 0; i < n; i++)
        sigmoid[i] = 1.0f / (1.0f + sigmoid[i]);
}

static KERNEL_CLONES void forward_piece(float *gate, const float *up, const float *sigmoid,
                                        int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        gate[i] = gate[i] * sigmoid[i] * up[i];
}

static void forward_row(const struct swiglu *op, int64_t row)
{
    const void *gate_up = row_at(op->gate_up, op->type, row, 2 * op->width);
    void *y = row_of(op->y, op->type, row, op->width);
    for (int64_t first = 0; first < op->width; first += PIECE) {
        int64_t n = min_i64(PIECE, op->width - first);
        float gate[PIECE], up[PIECE], sigmoid[PIECE];
        piece_load(gate, gate_up, op->type, first, n);
        piece_load(up, gate_up, op->type, op->width + first, n);
        sigmoid_piece(sigmoid, gate, n);
        forward_piece(gate, up, sigmoid, n);
        piece_store(y, gate, op->type, first, n);
    }
}

void swiglu_forward_cpu(struct stream *stream, const struct swiglu *op)
{
#pragma omp parallel for num_threads(team(stream, op->rows * op->width)) schedule(static)
    for (int64_t row = 0; row < op->rows; row++)
        forward_row(op, row);
}

// gate and up become their own gradients, dy becomes y; d silu(g)/dg = s (1 + g (1 - s))
static KERNEL_CLONES void backward_piece(float *gate, float *up, const float *sigmoid, float *dy,
                                         int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float s = sigmoid[i], g = gate[i], u = up[i], d = dy[i];
        gate[i] = d * u * (s * (1.0f + g * (1.0f - s)));
        up[i] = d * (g * s);
        dy[i] = g * s * u;
    }
}

static void backward_row(const struct swiglu *op, int64_t row)
{
    const void *gate_up = row_at(op->gate_up, op->type, row, 2 * op->width);
    void *dgate_up = row_of(op->dgate_up, op->type, row, 2 * op->width);
    const void *dy = row_at(op->dy, op->type, row, op->width);
    void *y = op->y != NULL ? row_of(op->y, op->type, row, op->width) : NULL;
    for (int64_t first = 0; first < op->width; first += PIECE) {
        int64_t n = min_i64(PIECE, op->width - first);
        float gate[PIECE], up[PIECE], sigmoid[PIECE], dys[PIECE];
        piece_load(gate, gate_up, op->type, first, n);
        piece_load(up, gate_up, op->type, op->width + first, n);
        piece_load(dys, dy, op->type, first, n);
        sigmoid_piece(sigmoid, gate, n);
        backward_piece(gate, up, sigmoid, dys, n);
        piece_store(dgate_up, gate, op->type, first, n);
        piece_store(dgate_up, up, op->type, op->width + first, n);
        if (y != NULL)
            piece_store(y, dys, op->type, first, n);
    }
}

void swiglu_backward_cpu(struct stream *stream, const struct swiglu *op)
{
#pragma omp parallel for num_threads(team(stream, op->rows * op->width)) schedule(static)
    for (int64_t row = 0; row < op->rows; row++)
        backward_row(op, row);
}
