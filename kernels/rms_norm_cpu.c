// Owns the RMS norm on the CPU, forward and backward. A row's result depends on that row alone.
#include "kernels/rms_norm.h"

#include <math.h>

#include "base/log.h"
#include "kernels/cpu_internal.h"

static void load_scale(float *scale, const struct rms_norm *norm, int64_t first, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        scale[i] = norm->weight[first + i] + norm->weight_offset;
}

static float row_rstd(const struct rms_norm *norm, const void *x)
{
    float piece[PIECE];
    double squares = 0.0;
    for (int64_t first = 0; first < norm->width; first += PIECE) {
        int64_t n = min_i64(PIECE, norm->width - first);
        piece_load(piece, x, norm->x_type, first, n);
        squares += (double)piece_dot(piece, piece, n);
    }
    return (float)(1.0 / sqrt(squares / (double)norm->width + (double)norm->eps));
}

static KERNEL_CLONES void scale_piece(float *x, const float *scale, float rstd, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = x[i] * rstd * scale[i];
}

static void forward_row(const struct rms_norm *norm, int64_t row)
{
    const void *x = row_at(norm->x, norm->x_type, row, norm->width);
    void *y = row_of(norm->y, norm->type, row, norm->width);
    float rstd = row_rstd(norm, x);
    for (int64_t first = 0; first < norm->width; first += PIECE) {
        int64_t n = min_i64(PIECE, norm->width - first);
        float piece[PIECE], scale[PIECE];
        piece_load(piece, x, norm->x_type, first, n);
        load_scale(scale, norm, first, n);
        scale_piece(piece, scale, rstd, n);
        piece_store(y, piece, norm->type, first, n);
    }
    if (norm->rstd != NULL)
        norm->rstd[row] = rstd;
}

void rms_norm_forward_cpu(struct stream *stream, const struct rms_norm *norm)
{
#pragma omp parallel for num_threads(team(stream, norm->rows * norm->width)) schedule(static)
    for (int64_t row = 0; row < norm->rows; row++)
        forward_row(norm, row);
}

// sum over the row of dy * scale * x
static double row_projection(const struct rms_norm *norm, const void *x, const void *dy)
{
    double sum = 0.0;
    for (int64_t first = 0; first < norm->width; first += PIECE) {
        int64_t n = min_i64(PIECE, norm->width - first);
        float xs[PIECE], dys[PIECE], scale[PIECE];
        piece_load(xs, x, norm->x_type, first, n);
        piece_load(dys, dy, norm->type, first, n);
        load_scale(scale, norm, first, n);
        for (int64_t i = 0; i < n; i++)
            dys[i] *= scale[i];
        sum += (double)piece_dot(xs, dys, n);
    }
    return sum;
}

struct backward_piece {
    float x[PIECE], dy[PIECE], scale[PIECE], dx[PIECE];
};

// dx = rstd (scale dy - x c), c = rstd^2 mean(dy scale x), and dweight += dy x rstd
static KERNEL_CLONES void backward_piece(struct backward_piece *p, float rstd, float c,
                                         float *dweight, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        p->dx[i] += rstd * (p->scale[i] * p->dy[i] - p->x[i] * c);
    if (dweight != NULL)
        for (int64_t i = 0; i < n; i++)
            dweight[i] += p->dy[i] * (p->x[i] * rstd);
}

static void backward_row(const struct rms_norm *norm, int64_t row, float *dweight)
{
    const void *x = row_at(norm->x, norm->x_type, row, norm->width);
    const void *dy = row_at(norm->dy, norm->type, row, norm->width);
    void *dx = row_of(norm->dx, norm->type, row, norm->width);
    const void *from =
        norm->dx_from != NULL ? row_at(norm->dx_from, norm->type, row, norm->width) : dx;
    double rstd = (double)norm->rstd[row];
    float c = (float)(row_projection(norm, x, dy) * rstd * rstd / (double)norm->width);
    for (int64_t first = 0; first < norm->width; first += PIECE) {
        int64_t n = min_i64(PIECE, norm->width - first);
        struct backward_piece p;
        piece_load(p.x, x, norm->x_type, first, n);
        piece_load(p.dy, dy, norm->type, first, n);
        load_scale(p.scale, norm, first, n);
        if (norm->dx_add)
            piece_load(p.dx, from, norm->type, first, n);
        else
            memset(p.dx, 0, sizeof(p.dx));
        backward_piece(&p, norm->rstd[row], c, dweight != NULL ? dweight + first : NULL, n);
        piece_store(dx, p.dx, norm->type, first, n);
    }
}

// Each part of the rows sums its dweight alone, and the parts are added in order: the sum does not
// depend on the number of threads.
void rms_norm_backward_cpu(struct stream *stream, const struct rms_norm *norm)
{
    BUG_UNLESS(!norm->dx_add || norm->dx != norm->dy);
    struct row_parts parts = row_parts_make(norm->rows, RMS_NORM_PARTS);
#pragma omp parallel for num_threads(team(stream, norm->rows * norm->width)) schedule(static)
    for (int64_t part = 0; part < parts.count; part++) {
        float *sums = NULL;
        if (norm->dweight != NULL) {
            sums = norm->scratch + part * norm->width;
            memset(sums, 0, (size_t)norm->width * sizeof(float));
        }
        for (int64_t row = row_parts_first(&parts, part); row < row_parts_first(&parts, part + 1);
             row++)
            backward_row(norm, row, sums);
    }
    if (norm->dweight != NULL)
        row_parts_add(&parts, norm->dweight, norm->scratch, norm->width);
}
