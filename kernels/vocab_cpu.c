// Owns the teacher's numbers over the whole vocabulary, beside a draft vocabulary, on the CPU.
#include "kernels/vocab.h"

#include <math.h>

#include "base/log.h"
#include "kernels/cpu_internal.h"

// Maximum and sum of exp(logit - max) of the logits seen so far; column of the maximum.
struct scan {
    float max;
    double sum;
    int64_t column;
};

static int64_t first_equal(const float *x, float value, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (x[i] == value)
            return i;
    BUG("a maximum that is nowhere");
}

static void scan_piece(struct scan *s, const float *x, int64_t column, int64_t n)
{
    float largest = piece_max(x, n), e[PIECE];
    if (largest > s->max) {
        s->sum *= exp((double)s->max - (double)largest);
        s->max = largest;
        s->column = column + first_equal(x, largest, n);
    }
    // While all was -inf any reference will do: exp(-inf) is 0, NaN stays NaN.
    piece_exp(e, x, s->max == -INFINITY ? 0.0f : s->max, 1.0f, n);
    s->sum += (double)piece_sum(e, n);
}

// column: of the first logit.
static struct scan scan_row(const void *logits, enum dtype type, int64_t row, int64_t column,
                            int64_t count)
{
    struct scan s = {-INFINITY, 0.0, 0};
    for (int64_t first = 0; first < count; first += PIECE) {
        float x[PIECE];
        int64_t n = min_i64(PIECE, count - first);
        piece_load(x, logits, type, row * count + first, n);
        scan_piece(&s, x, column + first, n);
    }
    return s;
}

static double scan_lse(const struct scan *s)
{
    return s->max == -INFINITY ? (double)NAN : (double)s->max + log(s->sum);
}

static void vocab_row(const struct vocab_scan *op, int64_t row)
{
    struct scan kept = scan_row(op->kept_logits, op->logits_type, row, 0, op->kept);
    struct scan others = scan_row(op->other_logits, op->logits_type, row, op->kept, op->others);
    bool other = others.max > kept.max ||
                 (others.max == kept.max && op->ids[others.column] < op->ids[kept.column]);
    struct scan all = other ? others : kept;
    const struct scan *less = other ? &kept : &others;
    if (less->max != -INFINITY)
        all.sum += less->sum * exp((double)less->max - (double)all.max);
    else
        all.sum += less->sum; // 0 or NaN
    op->lse[row] = (float)scan_lse(&all);
    op->argmax[row] = (int32_t)all.column;
}

void vocab_scan_cpu(struct stream *stream, const struct vocab_scan *op)
{
    int threads = team(stream, op->rows * (op->kept + op->others));
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < op->rows; row++)
        vocab_row(op, row);
}

static double overlap_row(const struct draft_overlap *op, int64_t row)
{
    int64_t teacher = op->teacher_row[row];
    struct scan s = scan_row(op->student, op->logits_type, row, 0, op->vocab);
    float q_lse = (float)scan_lse(&s), p_lse = op->teacher_lse[teacher];
    double sum = 0.0;
    if (isnan(q_lse) || isnan(p_lse))
        return (double)NAN;
    for (int64_t first = 0; first < op->vocab; first += PIECE) {
        float q[PIECE], p[PIECE];
        int64_t n = min_i64(PIECE, op->vocab - first);
        piece_load(q, op->student, op->logits_type, row * op->vocab + first, n);
        piece_load(p, op->teacher, op->logits_type, teacher * op->vocab + first, n);
        piece_exp(q, q, q_lse, 1.0f, n);
        piece_exp(p, p, p_lse, 1.0f, n);
        for (int64_t i = 0; i < n; i++)
            q[i] = q[i] < p[i] ? q[i] : p[i];
        sum += (double)piece_sum(q, n);
    }
    return sum;
}

void draft_overlap_cpu(struct stream *stream, const struct draft_overlap *op)
{
    int threads = team(stream, op->rows * op->vocab);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < op->rows; row++)
        op->overlap[row] = (float)overlap_row(op, row);
}

void mask_rows_cpu(struct stream *stream, const struct mask_rows *op)
{
    (void)stream;
    for (int64_t row = 0; row < op->rows; row++)
        op->scale[row] = op->argmax[op->teacher_row[row]] < op->kept ? op->weight[row] : 0.0f;
}
