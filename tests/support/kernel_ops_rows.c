// Owns how summing and clearing rows are tested.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "tests/support/kernel_ops_parts.h"

// A scale for each row; every third is 0. NOT_FINITE: what those rows hold is NaN.
static void add_scales(const struct kernel_case *c, struct kernel_run *run, struct kernel_tensor *x)
{
    struct kernel_tensor *scale =
        run_add_normal(run, "scale", TENSOR_IN, DTYPE_F32, x->rows, 1, 1.0);
    for (int64_t r = 0; r < x->rows; r += 3) {
        scale->value[r] = 0.0;
        for (int64_t i = 0; i < x->columns && kernel_case_has(c, CASE_NOT_FINITE); i++)
            x->value[r * x->columns + i] = (double)NAN;
    }
}

// sum_rows: in_rows, width, sums, out_rows; SCALED (with NOT_FINITE). Half of the rows are segment 0's.
void sum_rows_build(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = c->shape[0], width = c->shape[1], sums = c->shape[2], at = 0;
    struct kernel_tensor *in = run_add_normal(run, "in", TENSOR_IN, DTYPE_F32, rows, width, 1.0);
    if (kernel_case_has(c, CASE_SCALED))
        add_scales(c, run, in);
    else
        run_add_normal(run, "scale", TENSOR_IN, DTYPE_F32, rows, 1, 1.0);
    struct kernel_tensor *from = run_add(run, "from", TENSOR_IN, DTYPE_I32, rows, 1);
    struct kernel_tensor *begin = run_add(run, "begin", TENSOR_IN, DTYPE_I32, sums + 1, 1);
    struct kernel_tensor *index = run_add(run, "index", TENSOR_IN, DTYPE_I32, sums, 1);
    int64_t *segment = memory_alloc((size_t)rows, sizeof(*segment));
    for (int64_t r = 0; r < rows; r++) {
        int64_t any = run_below(run, sums);
        segment[r] = r < sums ? r : any * run_below(run, 2);
    }
    for (int64_t s = 0; s < sums; s++) {
        for (int64_t r = 0; r < rows; r++)
            if (segment[r] == s)
                from->value[at++] = (double)r;
        begin->value[s + 1] = (double)at;
        index->value[s] = (double)(c->shape[3] - 1 - s * (c->shape[3] / sums));
    }
    free(segment);
    run_add_normal(run, "out", TENSOR_CHANGED, DTYPE_F32, c->shape[3], width, 1.0);
}

void sum_rows_expect(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t width = c->shape[1];
    const struct kernel_tensor *out = run_find(run, "out");
    const double *from = run_value(run, "from"), *begin = run_value(run, "begin");
    const double *scale = run_value(run, "scale"), *in = run_value(run, "in");
    memcpy(out->expected, out->value, (size_t)(out->rows * width) * sizeof(double));
    for (int64_t s = 0; s < c->shape[2]; s++) {
        double *sum = out->expected + (int64_t)run_value(run, "index")[s] * width;
        for (int64_t i = (int64_t)begin[s]; i < (int64_t)begin[s + 1]; i++) {
            int64_t row = (int64_t)from[i];
            for (int64_t k = 0; k < width && scale[row] != 0.0; k++)
                sum[k] += scale[row] * in[row * width + k];
        }
    }
}

void sum_rows_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct sum_rows op = {.sums = c->shape[2],
                          .width = c->shape[1],
                          .in = run_device(run, "in"),
                          .from = run_device(run, "from"),
                          .begin = run_device(run, "begin"),
                          .index = run_device(run, "index"),
                          .scale = run_device(run, "scale"),
                          .out = run_device(run, "out"),
                          .in_rows = c->shape[0],
                          .out_rows = c->shape[3]};
    run->backend->kernels->sum_rows(run->stream, &op);
}

// gather_sum: rows, width, terms, in_rows, 1: out in the type of in; ADD, STRIDED. A third of the terms is none, and
// every fifth row has none.
void gather_sum_build(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = c->shape[0], width = c->shape[1], terms = c->shape[2];
    int64_t apart = kernel_case_has(c, CASE_STRIDED) ? 8 : 0;
    run_add_normal(run, "in", TENSOR_IN, c->type, c->shape[3], width, 1.0)->stride += 2 * apart;
    struct kernel_tensor *from =
        run_add(run, "from", TENSOR_IN, DTYPE_I32, terms > 0 ? terms : 1, rows);
    from->stride += apart;
    for (int64_t i = 0; i < from->rows * rows; i++)
        from->value[i] = i % rows % 5 == 4 || run_below(run, 3) == 0
                             ? -1.0
                             : (double)run_below(run, c->shape[3]);
    run_add_normal(run, "out", kernel_case_has(c, CASE_ADD) ? TENSOR_CHANGED : TENSOR_OUT,
                   c->shape[4] == 1 ? c->type : DTYPE_F32, rows, width, 1.0)
        ->stride += apart;
}

void gather_sum_expect(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = c->shape[0], width = c->shape[1];
    const struct kernel_tensor *out = run_find(run, "out");
    const double *in = run_value(run, "in"), *from = run_value(run, "from");
    for (int64_t i = 0; i < rows * width; i++) {
        double sum = kernel_case_has(c, CASE_ADD) ? out->value[i] : 0.0;
        for (int64_t j = 0; j < c->shape[2]; j++) {
            int64_t row = (int64_t)from[j * rows + i / width];
            sum += row >= 0 ? in[row * width + i % width] : 0.0;
        }
        out->expected[i] = sum;
    }
}

void gather_sum_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct gather_sum op = {.rows = c->shape[0],
                            .width = c->shape[1],
                            .terms = c->shape[2],
                            .in = run_device(run, "in"),
                            .in_rows = c->shape[3],
                            .in_stride = run_stride(run, "in"),
                            .in_type = c->type,
                            .from = run_device(run, "from"),
                            .from_stride = run_stride(run, "from"),
                            .add = kernel_case_has(c, CASE_ADD),
                            .out = run_device(run, "out"),
                            .out_stride = run_stride(run, "out"),
                            .out_type = c->shape[4] == 1 ? c->type : DTYPE_F32};
    run->backend->kernels->gather_sum(run->stream, &op);
}

// clear_rows: rows, width; STRIDED, NOT_FINITE
void clear_rows_build(const struct kernel_case *c, struct kernel_run *run)
{
    struct kernel_tensor *x =
        run_add_normal(run, "x", TENSOR_CHANGED, c->type, c->shape[0], c->shape[1], 1.0);
    x->stride += kernel_case_has(c, CASE_STRIDED) ? c->shape[1] : 0;
    add_scales(c, run, x);
}

void clear_rows_expect(const struct kernel_case *c, struct kernel_run *run)
{
    const double *scale = run_value(run, "scale"), *x = run_value(run, "x");
    for (int64_t i = 0; i < c->shape[0] * c->shape[1]; i++)
        run_expected(run, "x")[i] = scale[i / c->shape[1]] == 0.0 ? 0.0 : x[i];
}

void clear_rows_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct clear_rows op = {.rows = c->shape[0],
                            .width = c->shape[1],
                            .scale = run_device(run, "scale"),
                            .x = run_device(run, "x"),
                            .stride = run_stride(run, "x"),
                            .type = c->type};
    run->backend->kernels->clear_rows(run->stream, &op);
}
