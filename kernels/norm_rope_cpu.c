// Owns the norm and rotary embedding of heads on the CPU. A head's result depends on it alone.
#include "kernels/norm_rope.h"

#include <math.h>

#include "base/log.h"
#include "kernels/cpu_internal.h"
#include "kernels/rms_norm.h"

enum { MAX_HEAD_DIM = PIECE };

struct angles {
    const float *cos, *sin; // [head_dim / 2]
};

static struct angles row_angles(const struct norm_rope *op, int64_t row)
{
    int64_t position = op->positions[row], half = op->head_dim / 2;
    BUG_UNLESS(position >= 0 && position < op->table_rows);
    return (struct angles){op->cos + position * half, op->sin + position * half};
}

static float head_rstd(const struct norm_rope *op, const float *x)
{
    double squares = (double)piece_dot(x, x, op->head_dim);
    return (float)(1.0 / sqrt(squares / (double)op->head_dim + (double)op->eps));
}

static KERNEL_CLONES void multiply(float *x, const float *weight, float factor, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = x[i] * factor * weight[i];
}

static KERNEL_CLONES void rotate(float *x, struct angles angles, int64_t half)
{
    for (int64_t i = 0; i < half; i++) {
        float low = x[i], high = x[i + half];
        x[i] = low * angles.cos[i] - high * angles.sin[i];
        x[i + half] = high * angles.cos[i] + low * angles.sin[i];
    }
}

static KERNEL_CLONES void rotate_back(float *x, struct angles angles, int64_t half)
{
    for (int64_t i = 0; i < half; i++) {
        float low = x[i], high = x[i + half];
        x[i] = low * angles.cos[i] + high * angles.sin[i];
        x[i + half] = high * angles.cos[i] - low * angles.sin[i];
    }
}

static void forward_row(const struct norm_rope *op, const float *weight, int64_t row)
{
    struct angles angles = row_angles(op, row);
    const void *x = row_at(op->x, op->type, row, op->x_stride);
    void *y = row_of(op->y, op->type, row, op->heads * op->head_dim);
    for (int64_t head = 0; head < op->heads; head++) {
        float values[MAX_HEAD_DIM];
        piece_load(values, x, op->type, head * op->head_dim, op->head_dim);
        if (weight != NULL)
            multiply(values, weight, head_rstd(op, values), op->head_dim);
        rotate(values, angles, op->head_dim / 2);
        piece_store(y, values, op->type, head * op->head_dim, op->head_dim);
    }
}

static void check(const struct norm_rope *op)
{
    BUG_UNLESS(op->head_dim % 2 == 0 && op->head_dim <= MAX_HEAD_DIM);
}

void norm_rope_forward_cpu(struct stream *stream, const struct norm_rope *op)
{
    check(op);
    int threads = team(stream, op->rows * op->heads * op->head_dim);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < op->rows; row++)
        forward_row(op, op->weight, row);
}

// dn, the gradient of the normed head, becomes that of x; see rms_norm_cpu.c for the formula.
static KERNEL_CLONES void norm_backward(float *dn, const float *x, const float *weight, float rstd,
                                        float c, float *dweight, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        dweight[i] += dn[i] * (x[i] * rstd);
        dn[i] = rstd * (dn[i] * weight[i] - x[i] * c);
    }
}

static void head_backward(const struct norm_rope *op, const void *x_row, const float *weight,
                          int64_t head, float *dn, float *dweight)
{
    float x[MAX_HEAD_DIM], scaled[MAX_HEAD_DIM];
    piece_load(x, x_row, op->type, head * op->head_dim, op->head_dim);
    memcpy(scaled, dn, (size_t)op->head_dim * sizeof(float));
    multiply(scaled, weight, 1.0f, op->head_dim);
    double rstd = (double)head_rstd(op, x);
    double projection = (double)piece_dot(scaled, x, op->head_dim);
    float c = (float)(projection * rstd * rstd / (double)op->head_dim);
    norm_backward(dn, x, weight, (float)rstd, c, dweight, op->head_dim);
}

static void backward_row(const struct norm_rope *op, const float *weight, int64_t row,
                         float *dweight)
{
    struct angles angles = row_angles(op, row);
    const void *x = row_at(op->x, op->type, row, op->x_stride);
    const void *dy = row_at(op->dy, op->dy_type, row, op->heads * op->head_dim);
    void *dx = row_of(op->dx, op->type, row, op->dx_stride);
    for (int64_t head = 0; head < op->heads; head++) {
        float dn[MAX_HEAD_DIM];
        piece_load(dn, dy, op->dy_type, head * op->head_dim, op->head_dim);
        rotate_back(dn, angles, op->head_dim / 2);
        if (weight != NULL)
            head_backward(op, x, weight, head, dn, dweight);
        piece_store(dx, dn, op->type, head * op->head_dim, op->head_dim);
    }
}

void norm_rope_backward_cpu(struct stream *stream, const struct norm_rope *op)
{
    check(op);
    const float *weight = op->weight;
    BUG_UNLESS((weight == NULL) == (op->dweight == NULL));
    struct row_parts parts = row_parts_make(op->rows, RMS_NORM_PARTS);
    int threads = team(stream, op->rows * op->heads * op->head_dim);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t part = 0; part < parts.count; part++) {
        float sums[MAX_HEAD_DIM] = {0};
        for (int64_t row = row_parts_first(&parts, part); row < row_parts_first(&parts, part + 1);
             row++)
            backward_row(op, weight, row, sums);
        if (weight != NULL)
            memcpy(op->scratch + part * op->head_dim, sums, (size_t)op->head_dim * sizeof(float));
    }
    if (weight != NULL)
        row_parts_add(&parts, op->dweight, op->scratch, op->head_dim);
}
