// Owns how norms behind each other, and the gradients of a matrix and of the norm before it, are tested.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "tests/support/kernel_ops_parts.h"
#include "tests/support/naive.h"

// norm_chain: rows, width, outputs of the first norm and of the second: 0 narrow, 1 wide and narrow, 2 these and the
// second, rows of x that an index picks from, which are copied (0: all in order); TO_F32: x is fp32; STRIDED;
// FROZEN: no rstd of the first
static const double chain_eps = 1e-6;

void norm_chain_build(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = c->shape[0], width = c->shape[1],
            apart = kernel_case_has(c, CASE_STRIDED) ? 8 : 0;
    run_add_normal(run, "x", TENSOR_IN, kernel_case_has(c, CASE_TO_F32) ? DTYPE_F32 : c->type,
                   c->shape[3] > 0 ? c->shape[3] : rows, width, 2.0)
        ->stride += 2 * apart;
    if (c->shape[3] > 0) {
        struct kernel_tensor *index = run_add(run, "index", TENSOR_IN, DTYPE_I32, 1, rows);
        for (int64_t r = 0; r < rows; r++)
            index->value[r] = (double)run_below(run, c->shape[3]);
        run_add(run, "copy", TENSOR_OUT, DTYPE_F32, rows, width);
    }
    run_add_normal(run, "weight", TENSOR_IN, DTYPE_F32, 1, width, 1.0);
    run_add(run, "narrow", TENSOR_OUT, c->type, rows, width)->stride += apart;
    if (!kernel_case_has(c, CASE_FROZEN))
        run_add(run, "rstd", TENSOR_OUT, DTYPE_F32, rows, 1);
    if (c->shape[2] > 0)
        run_add(run, "wide", TENSOR_OUT, DTYPE_F32, rows, width);
    if (c->shape[2] < 2)
        return;
    run_add_normal(run, "second_weight", TENSOR_IN, DTYPE_F32, 1, width, 1.0);
    run_add(run, "second", TENSOR_OUT, c->type, rows, width);
    run_add(run, "second_rstd", TENSOR_OUT, DTYPE_F32, rows, 1);
}

void norm_chain_expect(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = c->shape[0], width = c->shape[1];
    double *y = run_expected(run, "narrow"), *rstd = memory_alloc((size_t)rows, sizeof(*rstd));
    for (int64_t r = 0; r < rows; r++) {
        int64_t from = c->shape[3] > 0 ? (int64_t)run_value(run, "index")[r] : r;
        naive_rms_norm(1, width, chain_eps, 0.0, run_value(run, "x") + from * width,
                       run_value(run, "weight"), y + r * width, rstd + r);
        if (c->shape[3] > 0)
            memcpy(run_expected(run, "copy") + r * width, run_value(run, "x") + from * width,
                   (size_t)width * sizeof(*y));
    }
    if (!kernel_case_has(c, CASE_FROZEN))
        memcpy(run_expected(run, "rstd"), rstd, (size_t)rows * sizeof(*rstd));
    free(rstd);
    if (c->shape[2] > 0)
        memcpy(run_expected(run, "wide"), y, (size_t)(rows * width) * sizeof(*y));
    if (c->shape[2] == 2)
        naive_rms_norm(rows, width, chain_eps, 0.0, y, run_value(run, "second_weight"),
                       run_expected(run, "second"), run_expected(run, "second_rstd"));
}

void norm_chain_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct norm_chain op = {.rows = c->shape[0],
                            .width = c->shape[1],
                            .eps = (float)chain_eps,
                            .x_type = kernel_case_has(c, CASE_TO_F32) ? DTYPE_F32 : c->type,
                            .type = c->type,
                            .x = run_device(run, "x"),
                            .x_stride = run_stride(run, "x"),
                            .index = run_device(run, "index"),
                            .x_rows = c->shape[3],
                            .copy = run_device(run, "copy"),
                            .weight = run_device(run, "weight"),
                            .wide = run_device(run, "wide"),
                            .narrow = run_device(run, "narrow"),
                            .narrow_stride = run_stride(run, "narrow"),
                            .rstd = run_device(run, "rstd"),
                            .second_weight = run_device(run, "second_weight"),
                            .second = run_device(run, "second"),
                            .second_rstd = run_device(run, "second_rstd")};
    run->backend->kernels->norm_chain(run->stream, &op);
}

// norm_chain_backward: rows, width; IN_PLACE (on dy)
void norm_chain_backward_build(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = c->shape[0], width = c->shape[1];
    run_add_normal(run, "x", TENSOR_IN, DTYPE_F32, rows, width, 2.0);
    run_add_normal(run, "weight", TENSOR_IN, DTYPE_F32, 1, width, 1.0);
    run_add_normal(run, "second_weight", TENSOR_IN, DTYPE_F32, 1, width, 1.0);
    run_add_normal(run, "dsecond", TENSOR_IN, c->type, rows, width, 1.0);
    run_add_normal(run, "dy", TENSOR_IN, c->type, rows, width, 1.0);
    run_add_normal(run, "more", TENSOR_IN, c->type, rows, width, 1.0);
    run_add(run, "rstd", TENSOR_IN, DTYPE_F32, rows, 1);
    run_add(run, "second_rstd", TENSOR_IN, DTYPE_F32, rows, 1);
    double *y = memory_alloc((size_t)(rows * width), sizeof(*y));
    naive_rms_norm(rows, width, chain_eps, 0.0, run_value(run, "x"), run_value(run, "weight"), y,
                   run_value(run, "rstd"));
    double *second = memory_alloc((size_t)(rows * width), sizeof(*second));
    naive_rms_norm(rows, width, chain_eps, 0.0, y, run_value(run, "second_weight"), second,
                   run_value(run, "second_rstd"));
    free(second);
    free(y);
    struct kernel_tensor *dx = run_add(run, "dx", TENSOR_OUT, c->type, rows, width);
    if (kernel_case_has(c, CASE_IN_PLACE))
        dx->alias = "dy";
    // Sums over rows of products near 1, those of the first norm of two or three terms.
    run_add_normal(run, "dweight", TENSOR_CHANGED, DTYPE_F32, 1, width, 1.0)->extra =
        4e-6 * sqrt((double)rows);
    run_add_normal(run, "second_dweight", TENSOR_CHANGED, DTYPE_F32, 1, width, 1.0)->extra =
        2e-6 * sqrt((double)rows);
    run_add(run, "scratch", TENSOR_SCRATCH, DTYPE_F32, RMS_NORM_PARTS, width);
}

void norm_chain_backward_expect(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = c->shape[0], width = c->shape[1];
    const struct kernel_tensor *dweight = run_find(run, "dweight"),
                               *second = run_find(run, "second_dweight");
    double *y = memory_alloc((size_t)(rows * width), sizeof(*y)),
           *dy = memory_alloc((size_t)(rows * width), sizeof(*dy));
    memcpy(dweight->expected, dweight->value, (size_t)width * sizeof(double));
    memcpy(second->expected, second->value, (size_t)width * sizeof(double));
    naive_rms_norm(rows, width, chain_eps, 0.0, run_value(run, "x"), run_value(run, "weight"), y,
                   NULL);
    naive_rms_norm_backward(rows, width, chain_eps, 0.0, y, run_value(run, "second_weight"),
                            run_value(run, "dsecond"), dy, second->expected);
    for (int64_t i = 0; i < rows * width; i++)
        dy[i] += run_value(run, "dy")[i] + run_value(run, "more")[i];
    naive_rms_norm_backward(rows, width, chain_eps, 0.0, run_value(run, "x"),
                            run_value(run, "weight"), dy, run_expected(run, "dx"),
                            dweight->expected);
    free(dy);
    free(y);
}

void norm_chain_backward_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct norm_chain_gradient op = {.rows = c->shape[0],
                                     .width = c->shape[1],
                                     .type = c->type,
                                     .x = run_device(run, "x"),
                                     .weight = run_device(run, "weight"),
                                     .rstd = run_device(run, "rstd"),
                                     .second_weight = run_device(run, "second_weight"),
                                     .second_rstd = run_device(run, "second_rstd"),
                                     .dsecond = run_device(run, "dsecond"),
                                     .dy = run_device(run, "dy"),
                                     .more = run_device(run, "more"),
                                     .dx = run_device(run, "dx"),
                                     .dweight = run_device(run, "dweight"),
                                     .second_dweight = run_device(run, "second_dweight"),
                                     .scratch = run_device(run, "scratch")};
    run->backend->kernels->norm_chain_backward(run->stream, &op);
}

// norm_split: rows, width; ADD, STRIDED
void norm_split_build(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = c->shape[0], width = c->shape[1],
            apart = kernel_case_has(c, CASE_STRIDED) ? 8 : 0;
    run_add_normal(run, "sums", TENSOR_IN, DTYPE_F32, rows, width, 1.0);
    run_add_normal(run, "weight", TENSOR_IN, DTYPE_F32, 1, width, 1.0);
    run_add_normal(run, "matrix", TENSOR_IN, c->type, rows, width, 1.0)->stride += apart;
    run_add_normal(run, "dmatrix", kernel_case_has(c, CASE_ADD) ? TENSOR_CHANGED : TENSOR_OUT,
                   DTYPE_F32, rows, width, 1.0)
        ->stride += 2 * apart;
    run_add_normal(run, "dweight", TENSOR_CHANGED, DTYPE_F32, 1, width, 1.0);
    run_add(run, "scratch", TENSOR_SCRATCH, DTYPE_F32, RMS_NORM_PARTS, width);
}

void norm_split_expect(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t width = c->shape[1];
    const struct kernel_tensor *dmatrix = run_find(run, "dmatrix"),
                               *dweight = run_find(run, "dweight");
    const double *sums = run_value(run, "sums"), *matrix = run_value(run, "matrix");
    memcpy(dweight->expected, dweight->value, (size_t)width * sizeof(double));
    for (int64_t i = 0; i < c->shape[0] * width; i++) {
        dmatrix->expected[i] = sums[i] * run_value(run, "weight")[i % width];
        if (kernel_case_has(c, CASE_ADD))
            dmatrix->expected[i] += dmatrix->value[i];
        dweight->expected[i % width] += sums[i] * matrix[i];
    }
}

void norm_split_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct norm_split op = {.rows = c->shape[0],
                            .width = c->shape[1],
                            .sums = run_device(run, "sums"),
                            .weight = run_device(run, "weight"),
                            .matrix = run_device(run, "matrix"),
                            .matrix_stride = run_stride(run, "matrix"),
                            .type = c->type,
                            .dmatrix = run_device(run, "dmatrix"),
                            .dmatrix_stride = run_stride(run, "dmatrix"),
                            .add = kernel_case_has(c, CASE_ADD),
                            .dweight = run_device(run, "dweight"),
                            .scratch = run_device(run, "scratch")};
    run->backend->kernels->norm_split(run->stream, &op);
}
