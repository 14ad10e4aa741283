// Owns the optimizer's ops on the CPU: AdamW, sum of squares, conversion.
#include "kernels/optimizer.h"

#include <math.h>

#include "base/log.h"
#include "kernels/arguments.h"
#include "kernels/cpu_internal.h"

static KERNEL_CLONES void adamw_piece(const struct adamw_factors *factors, float *param, float *m,
                                      float *v, const float *grad, int64_t n)
{
    const struct adamw_factors f = *factors;
    for (int64_t i = 0; i < n; i++) {
        float g = f.grad * grad[i];
        float mean = f.beta1 * m[i] + f.one_beta1 * g;
        float square = f.beta2 * v[i] + f.one_beta2 * g * g;
        m[i] = mean;
        v[i] = square;
        param[i] = param[i] * f.keep - f.step * mean / (sqrtf(square / f.correction2) + f.eps);
    }
}

void adamw_cpu(struct stream *stream, const struct adamw *op)
{
    BUG_UNLESS(op->step > 0);
    struct adamw_factors factors = adamw_factors_make(op);
#pragma omp parallel for num_threads(team(stream, op->count)) schedule(static)
    for (int64_t first = 0; first < op->count; first += PIECE) {
        int64_t n = min_i64(PIECE, op->count - first);
        float *param = op->param + first;
        adamw_piece(&factors, param, op->m + first, op->v + first, op->grad + first, n);
        if (op->copy != NULL)
            piece_store(op->copy, param, op->copy_type, first, n);
    }
}

// In fp64 from the first product on: squares of finite gradients overflow fp32.
static KERNEL_CLONES double piece_squares(const float *x, int64_t n)
{
    enum { LANES = 8 };
    double lane[LANES] = {0}, sum = 0.0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++)
            lane[l] += (double)x[i + l] * (double)x[i + l];
    for (int l = 0; i + l < n; l++)
        lane[l] += (double)x[i + l] * (double)x[i + l];
    for (int l = 0; l < LANES; l++)
        sum += lane[l];
    return sum;
}

// Parts are fixed by the count alone, so the order of additions does not depend on threads.
void sum_squares_cpu(struct stream *stream, const struct sum_squares *op)
{
    int64_t size = (op->count + SUM_SQUARES_PARTS - 1) / SUM_SQUARES_PARTS;
    size = (size + PIECE - 1) / PIECE * PIECE;
#pragma omp parallel for num_threads(team(stream, op->count)) schedule(static)
    for (int64_t part = 0; part < SUM_SQUARES_PARTS; part++) {
        int64_t end = min_i64(op->count, (part + 1) * size);
        double sum = 0.0;
        for (int64_t first = part * size; first < end; first += PIECE) {
            int64_t n = min_i64(PIECE, end - first);
            sum += piece_squares(op->x + first, n);
        }
        op->scratch[part] = sum;
    }
    double total = 0.0;
    for (int64_t part = 0; part < SUM_SQUARES_PARTS; part++)
        total += op->scratch[part];
    op->result[0] = total;
}

// Elements [first, first + n) of from, in one row of to.
static void convert_piece(const struct convert *op, int64_t first, int64_t n)
{
    float piece[PIECE];
    int64_t at = op->width > 0 ? first / op->width * op->to_stride + first % op->width : first;
    piece_load(piece, op->from, op->from_type, first, n);
    piece_store(op->to, piece, op->to_type, at, n);
}

void convert_cpu(struct stream *stream, const struct convert *op)
{
    int64_t width = op->width > 0 ? op->width : op->count;
    int64_t each = (width + PIECE - 1) / PIECE, pieces = width > 0 ? op->count / width * each : 0;
#pragma omp parallel for num_threads(team(stream, op->count)) schedule(static)
    for (int64_t p = 0; p < pieces; p++) {
        int64_t column = p % each * PIECE;
        convert_piece(op, p / each * width + column, min_i64(PIECE, width - column));
    }
}
