// Owns the gradients of a matrix and of the norm before it, from one product, on the CPU.
#include "kernels/norm_split.h"

#include "kernels/cpu_internal.h"
#include "kernels/rms_norm.h"

struct split_piece {
    float sums[PIECE], matrix[PIECE], dmatrix[PIECE];
};

static KERNEL_CLONES void split_piece(struct split_piece *p, const float *weight, float *dweight,
                                      int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        p->dmatrix[i] += p->sums[i] * weight[i];
        dweight[i] += p->sums[i] * p->matrix[i];
    }
}

static void split_row(const struct norm_split *op, int64_t row, float *dweight)
{
    const void *matrix = row_at(op->matrix, op->type, row, op->matrix_stride);
    float *dmatrix = op->dmatrix + row * op->dmatrix_stride;
    for (int64_t first = 0; first < op->width; first += PIECE) {
        int64_t n = min_i64(PIECE, op->width - first);
        struct split_piece p;
        piece_load(p.sums, op->sums, DTYPE_F32, row * op->width + first, n);
        piece_load(p.matrix, matrix, op->type, first, n);
        if (op->add)
            piece_load(p.dmatrix, dmatrix, DTYPE_F32, first, n);
        else
            memset(p.dmatrix, 0, sizeof(p.dmatrix));
        split_piece(&p, op->weight + first, dweight + first, n);
        piece_store(dmatrix, p.dmatrix, DTYPE_F32, first, n);
    }
}

// Each part of the rows sums its dweight alone, and the parts are added in order: the sum does not
// depend on the number of threads.
void norm_split_cpu(struct stream *stream, const struct norm_split *op)
{
    struct row_parts parts = row_parts_make(op->rows, RMS_NORM_PARTS);
#pragma omp parallel for num_threads(team(stream, op->rows * op->width)) schedule(static)
    for (int64_t part = 0; part < parts.count; part++) {
        float *sums = op->scratch + part * op->width;
        memset(sums, 0, (size_t)op->width * sizeof(float));
        for (int64_t row = row_parts_first(&parts, part); row < row_parts_first(&parts, part + 1);
             row++)
            split_row(op, row, sums);
    }
    row_parts_add(&parts, op->dweight, op->scratch, op->width);
}
