// Owns the elementwise ops of Muon on the CPU.
#include "kernels/muon.h"

#include <math.h>

#include "kernels/cpu_internal.h"

static KERNEL_CLONES void momentum_piece(float *grad, float *m, float scale, float momentum,
                                         float one_momentum, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float g = one_momentum * (scale * grad[i]);
        float mean = momentum * m[i] + g;
        m[i] = mean;
        grad[i] = momentum * mean + g;
    }
}

void muon_momentum_cpu(struct stream *stream, const struct muon_momentum *op)
{
    float scale = (float)op->grad_scale, momentum = (float)op->momentum;
    float one_momentum = (float)(1.0 - op->momentum);
#pragma omp parallel for num_threads(team(stream, op->count)) schedule(static)
    for (int64_t first = 0; first < op->count; first += PIECE)
        momentum_piece(op->grad + first, op->m + first, scale, momentum, one_momentum,
                       min_i64(PIECE, op->count - first));
}

static KERNEL_CLONES void scale_piece(float *x, float factor, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] *= factor;
}

void muon_normalise_cpu(struct stream *stream, const struct muon_normalise *op)
{
    float factor = (float)(1.0 / fmax(sqrt(op->squares[0]), MUON_LEAST_NORM));
#pragma omp parallel for num_threads(team(stream, op->count)) schedule(static)
    for (int64_t first = 0; first < op->count; first += PIECE) {
        float piece[PIECE];
        int64_t n = min_i64(PIECE, op->count - first);
        piece_load(piece, op->from, DTYPE_F32, first, n);
        scale_piece(piece, factor, n);
        piece_store(op->to, piece, op->to_type, first, n);
    }
}

static KERNEL_CLONES void update_piece(float *param, const float *x, float keep, float step,
                                       int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        param[i] = param[i] * keep - step * x[i];
}

void muon_update_cpu(struct stream *stream, const struct muon_update *op)
{
    float keep = (float)op->keep, step = (float)op->step;
#pragma omp parallel for num_threads(team(stream, op->count)) schedule(static)
    for (int64_t first = 0; first < op->count; first += PIECE) {
        float piece[PIECE];
        int64_t n = min_i64(PIECE, op->count - first);
        piece_load(piece, op->x, op->x_type, first, n);
        update_piece(op->param + first, piece, keep, step, n);
        if (op->copy != NULL)
            piece_store(op->copy, op->param + first, op->copy_type, first, n);
    }
}
