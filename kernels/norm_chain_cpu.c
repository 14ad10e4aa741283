// Owns the norm in fp32 and rounded with a second one behind it on the CPU.
#include "kernels/norm_chain.h"

#include <math.h>

#include "base/log.h"
#include "kernels/cpu_internal.h"

static KERNEL_CLONES void norm_piece(float *x, const float *weight, float rstd, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = x[i] * rstd * weight[i];
}

// Elements [first, first + n) of y.
static void load_y(float *y, const struct norm_chain *op, const void *x, float rstd, int64_t first,
                   int64_t n)
{
    piece_load(y, x, op->x_type, first, n);
    norm_piece(y, op->weight + first, rstd, n);
}

// Of x, or (rstd > 0) of y.
static float row_rstd(const struct norm_chain *op, const void *x, float rstd)
{
    float piece[PIECE];
    double squares = 0.0;
    for (int64_t first = 0; first < op->width; first += PIECE) {
        int64_t n = min_i64(PIECE, op->width - first);
        if (rstd > 0.0f)
            load_y(piece, op, x, rstd, first, n);
        else
            piece_load(piece, x, op->x_type, first, n);
        squares += (double)piece_dot(piece, piece, n);
    }
    return (float)(1.0 / sqrt(squares / (double)op->width + (double)op->eps));
}

static void chain_row(const struct norm_chain *op, int64_t row)
{
    int64_t from = op->index != NULL ? op->index[row] : row;
    BUG_UNLESS(op->index == NULL || (from >= 0 && from < op->x_rows));
    const void *x = row_at(op->x, op->x_type, from, op->x_stride);
    float rstd = row_rstd(op, x, 0.0f), second = 0.0f;
    if (op->second_weight != NULL)
        second = row_rstd(op, x, rstd);
    for (int64_t first = 0; first < op->width; first += PIECE) {
        float y[PIECE];
        int64_t n = min_i64(PIECE, op->width - first);
        if (op->copy != NULL) {
            piece_load(y, x, op->x_type, first, n);
            piece_store(op->copy, y, DTYPE_F32, row * op->width + first, n);
        }
        load_y(y, op, x, rstd, first, n);
        if (op->wide != NULL)
            piece_store(op->wide, y, DTYPE_F32, row * op->width + first, n);
        if (op->narrow != NULL)
            piece_store(op->narrow, y, op->type, row * op->narrow_stride + first, n);
        if (op->second_weight == NULL)
            continue;
        norm_piece(y, op->second_weight + first, second, n);
        piece_store(op->second, y, op->type, row * op->width + first, n);
    }
    if (op->rstd != NULL)
        op->rstd[row] = rstd;
    if (op->second_weight != NULL)
        op->second_rstd[row] = second;
}

void norm_chain_cpu(struct stream *stream, const struct norm_chain *op)
{
#pragma omp parallel for num_threads(team(stream, op->rows * op->width)) schedule(static)
    for (int64_t row = 0; row < op->rows; row++)
        chain_row(op, row);
}
