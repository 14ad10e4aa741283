// Owns the gradients of two norms behind each other on the CPU.
#include "kernels/cpu_internal.h"
#include "kernels/norm_chain.h"
#include "kernels/rms_norm.h"

enum { PARTS = RMS_NORM_PARTS / 2 }; // of the rows: scratch has those of both norms

// Elements of a row: x rstd, what is multiplied with the weights, and gradients. z: of the second norm.
struct piece {
    float x[PIECE], z[PIECE], weight[PIECE], dz[PIECE], scaled[PIECE], dy[PIECE], more[PIECE];
};

static KERNEL_CLONES void norms_piece(struct piece *p, const float *weight,
                                      const float *second_weight, float rstd, float second_rstd,
                                      int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        p->x[i] *= rstd;
        p->weight[i] = weight[i];
        p->z[i] = p->x[i] * weight[i] * second_rstd;
        p->scaled[i] = p->dz[i] * second_weight[i];
    }
}

// Elements [first, first + n) up to the second norm's gradient.
static void load_row(struct piece *p, const struct norm_chain_gradient *op, int64_t row,
                     int64_t first, int64_t n)
{
    int64_t at = row * op->width + first;
    piece_load(p->x, op->x, DTYPE_F32, at, n);
    piece_load(p->dz, op->dsecond, op->type, at, n);
    norms_piece(p, op->weight + first, op->second_weight + first, op->rstd[row],
                op->second_rstd[row], n);
}

// dy = the gradient of y; scaled = times the weight
static KERNEL_CLONES void middle_piece(struct piece *p, float second_rstd, float c, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        p->dy[i] += p->more[i] + second_rstd * (p->scaled[i] - p->z[i] * c);
        p->scaled[i] = p->dy[i] * p->weight[i];
    }
}

static void load_middle(struct piece *p, const struct norm_chain_gradient *op, int64_t row, float c,
                        int64_t first, int64_t n)
{
    int64_t at = row * op->width + first;
    load_row(p, op, row, first, n);
    piece_load(p->dy, op->dy, op->type, at, n);
    piece_load(p->more, op->more, op->type, at, n);
    middle_piece(p, op->second_rstd[row], c, n);
}

static KERNEL_CLONES void add_products(float *sum, const float *a, const float *b, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        sum[i] += a[i] * b[i];
}

static KERNEL_CLONES void end_piece(struct piece *p, float rstd, float c, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        p->scaled[i] = rstd * (p->scaled[i] - p->x[i] * c);
}

// sums, second_sums: [width] of the weights' gradients
static void backward_row(const struct norm_chain_gradient *op, int64_t row, float *sums,
                         float *second_sums)
{
    struct piece p;
    double second = 0.0, first_norm = 0.0, width = (double)op->width;
    for (int64_t first = 0; first < op->width; first += PIECE) {
        int64_t n = min_i64(PIECE, op->width - first);
        load_row(&p, op, row, first, n);
        add_products(second_sums + first, p.dz, p.z, n);
        second += (double)piece_dot(p.scaled, p.z, n);
    }
    float c = (float)(second / width);
    for (int64_t first = 0; first < op->width; first += PIECE) {
        int64_t n = min_i64(PIECE, op->width - first);
        load_middle(&p, op, row, c, first, n);
        add_products(sums + first, p.dy, p.x, n);
        first_norm += (double)piece_dot(p.scaled, p.x, n);
    }
    for (int64_t first = 0; first < op->width; first += PIECE) {
        int64_t n = min_i64(PIECE, op->width - first);
        load_middle(&p, op, row, c, first, n);
        end_piece(&p, op->rstd[row], (float)(first_norm / width), n);
        piece_store(op->dx, p.scaled, op->type, row * op->width + first, n);
    }
}

void norm_chain_backward_cpu(struct stream *stream, const struct norm_chain_gradient *op)
{
    struct row_parts parts = row_parts_make(op->rows, PARTS);
    float *second = op->scratch + PARTS * op->width;
#pragma omp parallel for num_threads(team(stream, op->rows * op->width)) schedule(static)
    for (int64_t part = 0; part < parts.count; part++) {
        float *sums = op->scratch + part * op->width, *second_sums = second + part * op->width;
        memset(sums, 0, (size_t)op->width * sizeof(float));
        memset(second_sums, 0, (size_t)op->width * sizeof(float));
        for (int64_t row = row_parts_first(&parts, part); row < row_parts_first(&parts, part + 1);
             row++)
            backward_row(op, row, sums, second_sums);
    }
    row_parts_add(&parts, op->dweight, op->scratch, op->width);
    row_parts_add(&parts, op->second_dweight, second, op->width);
}
