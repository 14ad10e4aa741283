// Owns the moving average of parameters on the CPU.
#include "kernels/average.h"

#include "kernels/cpu_internal.h"

static KERNEL_CLONES void average_piece(float *average, const float *x, float share, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        average[i] += share * (x[i] - average[i]);
}

void average_cpu(struct stream *stream, const struct average *op)
{
    float share = (float)op->share;
#pragma omp parallel for num_threads(team(stream, op->count)) schedule(static)
    for (int64_t first = 0; first < op->count; first += PIECE)
        average_piece(op->average + first, op->x + first, share, min_i64(PIECE, op->count - first));
}

void exchange_cpu(struct stream *stream, const struct exchange *op)
{
#pragma omp parallel for num_threads(team(stream, op->count)) schedule(static)
    for (int64_t first = 0; first < op->count; first += PIECE) {
        float piece[PIECE];
        size_t bytes = (size_t)min_i64(PIECE, op->count - first) * sizeof(float);
        memcpy(piece, op->a + first, bytes);
        memcpy(op->a + first, op->b + first, bytes);
        memcpy(op->b + first, piece, bytes);
    }
}
