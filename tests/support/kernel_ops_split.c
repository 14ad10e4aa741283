// Owns how the gradients of a matrix and of the norm before it are tested.
#include <string.h>

#include "tests/support/kernel_ops_parts.h"

static bool has(const struct kernel_case *c, unsigned flag)
{
    return (c->flags & flag) != 0;
}

// norm_split: rows, width; ADD, STRIDED
void norm_split_build(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = c->shape[0], width = c->shape[1], apart = has(c, CASE_STRIDED) ? 8 : 0;
    run_add_normal(run, "sums", TENSOR_IN, DTYPE_F32, rows, width, 1.0);
    run_add_normal(run, "weight", TENSOR_IN, DTYPE_F32, 1, width, 1.0);
    run_add_normal(run, "matrix", TENSOR_IN, c->type, rows, width, 1.0)->stride += apart;
    run_add_normal(run, "dmatrix", has(c, CASE_ADD) ? TENSOR_CHANGED : TENSOR_OUT, DTYPE_F32, rows,
                   width, 1.0)
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
        if (has(c, CASE_ADD))
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
                            .add = has(c, CASE_ADD),
                            .dweight = run_device(run, "dweight"),
                            .scratch = run_device(run, "scratch")};
    run->backend->kernels->norm_split(run->stream, &op);
}
