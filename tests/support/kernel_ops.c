// Owns how products, norms, rotations, activations, moves of rows and the optimizer's ops are tested.
// Attention, the loss and the draft vocabulary are in files of their own.
#include "tests/support/kernel_ops.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "base/e4m3.h"
#include "tests/support/kernel_ops_parts.h"
#include "tests/support/naive.h"

static double no_flops(const struct kernel_case *c)
{
    (void)c;
    return 0.0;
}

// gemm: m, n, k, parts of k (0: none); TRANSPOSE_A, TRANSPOSE_B, BETA_ONE, BETA_D, TO_F32, STRIDED
static double gemm_alpha(const struct kernel_case *c)
{
    return kernel_case_has(c, CASE_BETA_D) ? 0.5 : 1.0;
}

static double gemm_beta(const struct kernel_case *c)
{
    return kernel_case_has(c, CASE_BETA_ONE) ? 1.0 : kernel_case_has(c, CASE_BETA_D) ? -0.25 : 0.0;
}

static void gemm_build(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t m = c->shape[0], n = c->shape[1], k = c->shape[2];
    bool ta = kernel_case_has(c, CASE_TRANSPOSE_A), tb = kernel_case_has(c, CASE_TRANSPOSE_B);
    enum dtype out = kernel_case_has(c, CASE_TO_F32) ? DTYPE_F32 : c->type;
    run_add_normal(run, "a", TENSOR_IN, c->type, ta ? k : m, ta ? m : k, 1.0);
    run_add_normal(run, "b", TENSOR_IN, c->type, tb ? n : k, tb ? k : n, 1.0);
    run_add_normal(run, "c", kernel_case_has(c, CASE_BETA_ONE) ? TENSOR_CHANGED : TENSOR_OUT, out,
                   m, n, 3.0);
    if (kernel_case_has(c, CASE_BETA_D))
        run_add_normal(run, "d", TENSOR_IN, out, m, n, 3.0);
    if (c->shape[3] > 1)
        run_add(run, "part_sums", TENSOR_SCRATCH, DTYPE_F32, m, c->shape[3] * n);
    for (int i = 0; i < run->count && kernel_case_has(c, CASE_STRIDED); i++)
        run->tensors[i].stride += i < 2 ? 5 + i : 9; // c and d alike, sums of parts too
}

static void gemm_expect(const struct kernel_case *c, struct kernel_run *run)
{
    naive_gemm(c->shape[0], c->shape[1], c->shape[2], kernel_case_has(c, CASE_TRANSPOSE_A),
               kernel_case_has(c, CASE_TRANSPOSE_B), gemm_alpha(c), run_value(run, "a"),
               run_value(run, "b"), gemm_beta(c),
               kernel_case_has(c, CASE_BETA_D) ? run_value(run, "d") : run_value(run, "c"),
               run_expected(run, "c"));
}

static void gemm_call(const struct kernel_case *c, struct kernel_run *run)
{
    enum dtype out = kernel_case_has(c, CASE_TO_F32) ? DTYPE_F32 : c->type;
    bool strided = kernel_case_has(c, CASE_STRIDED);
    struct gemm op = {.m = c->shape[0],
                      .n = c->shape[1],
                      .k = c->shape[2],
                      .transpose_a = kernel_case_has(c, CASE_TRANSPOSE_A),
                      .transpose_b = kernel_case_has(c, CASE_TRANSPOSE_B),
                      .alpha = (float)gemm_alpha(c),
                      .beta = (float)gemm_beta(c),
                      .a = run_device(run, "a"),
                      .b = run_device(run, "b"),
                      .c = run_device(run, "c"),
                      .d = run_device(run, "d"),
                      .lda = strided ? run_stride(run, "a") : 0,
                      .ldb = strided ? run_stride(run, "b") : 0,
                      .ldc = strided ? run_stride(run, "c") : 0,
                      .a_type = c->type,
                      .b_type = c->type,
                      .c_type = out,
                      .parts = c->shape[3]};
    if (op.parts > 1) {
        op.part_sums = run_device(run, "part_sums");
        op.part_stride = strided ? run_stride(run, "part_sums") : 0;
    }
    run->backend->kernels->gemm(run->stream, &op);
}

static double gemm_flops(const struct kernel_case *c)
{
    return 2.0 * (double)c->shape[0] * (double)c->shape[1] * (double)c->shape[2];
}

// rms_norm: rows, width; OFFSET, IN_PLACE, FROZEN, TO_F32 (x in fp32), backward also ADD, FROM
static const double norm_eps = 1e-6;

static double norm_offset(const struct kernel_case *c)
{
    return kernel_case_has(c, CASE_OFFSET) ? 1.0 : 0.0;
}

static enum dtype rms_norm_x_type(const struct kernel_case *c)
{
    return kernel_case_has(c, CASE_TO_F32) ? DTYPE_F32 : c->type;
}

static void rms_norm_build(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = c->shape[0], width = c->shape[1];
    run_add_normal(run, "x", TENSOR_IN, rms_norm_x_type(c), rows, width, 2.0);
    run_add_normal(run, "weight", TENSOR_IN, DTYPE_F32, 1, width, 1.0);
    struct kernel_tensor *y = run_add(run, "y", TENSOR_OUT, c->type, rows, width);
    if (kernel_case_has(c, CASE_IN_PLACE))
        y->alias = "x";
    if (!kernel_case_has(c, CASE_FROZEN))
        run_add(run, "rstd", TENSOR_OUT, DTYPE_F32, rows, 1);
}

static void rms_norm_expect(const struct kernel_case *c, struct kernel_run *run)
{
    naive_rms_norm(c->shape[0], c->shape[1], norm_eps, norm_offset(c), run_value(run, "x"),
                   run_value(run, "weight"), run_expected(run, "y"), run_expected(run, "rstd"));
}

static struct rms_norm rms_norm_op(const struct kernel_case *c, const struct kernel_run *run)
{
    return (struct rms_norm){.rows = c->shape[0],
                             .width = c->shape[1],
                             .eps = (float)norm_eps,
                             .weight_offset = (float)norm_offset(c),
                             .type = c->type,
                             .x_type = rms_norm_x_type(c),
                             .x = run_device(run, "x"),
                             .weight = run_device(run, "weight"),
                             .y = run_device(run, "y"),
                             .rstd = run_device(run, "rstd"),
                             .dy = run_device(run, "dy"),
                             .dx = run_device(run, "dx"),
                             .dx_add = kernel_case_has(c, CASE_ADD),
                             .dweight = run_device(run, "dweight"),
                             .scratch = run_device(run, "scratch"),
                             .dx_from = run_device(run, "dx_from")};
}

static void rms_norm_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct rms_norm op = rms_norm_op(c, run);
    run->backend->kernels->rms_norm_forward(run->stream, &op);
}

static void rms_norm_backward_build(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = c->shape[0], width = c->shape[1];
    run_add_normal(run, "x", TENSOR_IN, rms_norm_x_type(c), rows, width, 2.0);
    run_add_normal(run, "weight", TENSOR_IN, DTYPE_F32, 1, width, 1.0);
    run_add_normal(run, "dy", TENSOR_IN, c->type, rows, width, 1.0);
    run_add(run, "rstd", TENSOR_IN, DTYPE_F32, rows, 1);
    double *y = memory_alloc((size_t)(rows * width), sizeof(double));
    naive_rms_norm(rows, width, norm_eps, 0.0, run_value(run, "x"), run_value(run, "weight"), y,
                   run_value(run, "rstd"));
    free(y);
    bool from = kernel_case_has(c, CASE_FROM), add = kernel_case_has(c, CASE_ADD) && !from;
    struct kernel_tensor *dx =
        run_add_normal(run, "dx", add ? TENSOR_CHANGED : TENSOR_OUT, c->type, rows, width, 1.0);
    if (kernel_case_has(c, CASE_IN_PLACE))
        dx->alias = "dy";
    if (from)
        run_add_normal(run, "dx_from", TENSOR_IN, c->type, rows, width, 1.0);
    if (kernel_case_has(c, CASE_FROZEN))
        return;
    struct kernel_tensor *dweight =
        run_add_normal(run, "dweight", TENSOR_CHANGED, DTYPE_F32, 1, width, 1.0);
    dweight->extra = 2e-6 * sqrt((double)rows); // an fp32 sum over rows of products near 1
    run_add(run, "scratch", TENSOR_SCRATCH, DTYPE_F32, RMS_NORM_PARTS, width);
}

static void rms_norm_backward_expect(const struct kernel_case *c, struct kernel_run *run)
{
    struct kernel_tensor *dx = run_find(run, "dx"), *dweight = run_find(run, "dweight");
    if (dweight != NULL)
        memcpy(dweight->expected, dweight->value, (size_t)c->shape[1] * sizeof(double));
    naive_rms_norm_backward(c->shape[0], c->shape[1], norm_eps, norm_offset(c), run_value(run, "x"),
                            run_value(run, "weight"), run_value(run, "dy"), dx->expected,
                            dweight != NULL ? dweight->expected : NULL);
    const double *added = kernel_case_has(c, CASE_FROM) ? run_value(run, "dx_from") : dx->value;
    for (int64_t i = 0; i < c->shape[0] * c->shape[1] && kernel_case_has(c, CASE_ADD); i++)
        dx->expected[i] += added[i];
}

static void rms_norm_backward_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct rms_norm op = rms_norm_op(c, run);
    run->backend->kernels->rms_norm_backward(run->stream, &op);
}

// norm_rope: rows, heads, head_dim; NO_NORM, STRIDED, ODD, IN_PLACE (on x), backward also TO_F32 (dy in fp32)
enum { ROPE_TABLE = 41 };

static void rope_inputs(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = c->shape[0], heads = c->shape[1], d = c->shape[2];
    struct kernel_tensor *x = run_add_normal(run, "x", TENSOR_IN, c->type, rows, heads * d, 2.0);
    x->stride +=
        kernel_case_has(c, CASE_STRIDED) ? 2 * d + (kernel_case_has(c, CASE_ODD) ? 3 : 0) : 0;
    if (!kernel_case_has(c, CASE_NO_NORM))
        run_add_normal(run, "weight", TENSOR_IN, DTYPE_F32, 1, d, 1.0);
    struct kernel_tensor *positions = run_add(run, "positions", TENSOR_IN, DTYPE_I32, rows, 1);
    for (int64_t r = 0; r < rows; r++)
        positions->value[r] = (double)run_below(run, ROPE_TABLE);
    struct kernel_tensor *cosine = run_add(run, "cos", TENSOR_IN, DTYPE_F32, ROPE_TABLE, d / 2);
    struct kernel_tensor *sine = run_add(run, "sin", TENSOR_IN, DTYPE_F32, ROPE_TABLE, d / 2);
    for (int64_t i = 0; i < ROPE_TABLE * d / 2; i++) {
        cosine->value[i] = round_to(DTYPE_F32, cos((double)(i + 1)));
        sine->value[i] = round_to(DTYPE_F32, sin((double)(i + 1)));
    }
}

struct naive_rope rope_of(const struct kernel_case *c, const struct kernel_run *run)
{
    return (struct naive_rope){.rows = c->shape[0],
                               .heads = c->shape[1],
                               .head_dim = c->shape[2],
                               .eps = norm_eps,
                               .weight = run_value(run, "weight"),
                               .positions = run_integers(run, "positions"),
                               .cos = run_value(run, "cos"),
                               .sin = run_value(run, "sin")};
}

static void norm_rope_build(const struct kernel_case *c, struct kernel_run *run)
{
    rope_inputs(c, run);
    struct kernel_tensor *y =
        run_add(run, "y", TENSOR_OUT, c->type, c->shape[0], c->shape[1] * c->shape[2]);
    if (kernel_case_has(c, CASE_IN_PLACE))
        y->alias = "x";
}

static void norm_rope_expect(const struct kernel_case *c, struct kernel_run *run)
{
    struct naive_rope rope = rope_of(c, run);
    naive_norm_rope(&rope, run_value(run, "x"), run_expected(run, "y"));
    free((void *)rope.positions);
}

static struct norm_rope norm_rope_op(const struct kernel_case *c, const struct kernel_run *run)
{
    return (struct norm_rope){.rows = c->shape[0],
                              .heads = c->shape[1],
                              .head_dim = c->shape[2],
                              .eps = (float)norm_eps,
                              .type = c->type,
                              .x = run_device(run, "x"),
                              .x_stride = run_stride(run, "x"),
                              .weight = run_device(run, "weight"),
                              .positions = run_device(run, "positions"),
                              .cos = run_device(run, "cos"),
                              .sin = run_device(run, "sin"),
                              .table_rows = ROPE_TABLE,
                              .y = run_device(run, "y"),
                              .dy = run_device(run, "dy"),
                              .dy_type = kernel_case_has(c, CASE_TO_F32) ? DTYPE_F32 : c->type,
                              .dx = run_device(run, "dx"),
                              .dweight = run_device(run, "dweight"),
                              .scratch = run_device(run, "scratch")};
}

static void norm_rope_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct norm_rope op = norm_rope_op(c, run);
    run->backend->kernels->norm_rope_forward(run->stream, &op);
}

static void norm_rope_backward_build(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = c->shape[0], heads = c->shape[1], d = c->shape[2];
    rope_inputs(c, run);
    run_add_normal(run, "dy", TENSOR_IN, kernel_case_has(c, CASE_TO_F32) ? DTYPE_F32 : c->type,
                   rows, heads * d, 1.0);
    struct kernel_tensor *dx = run_add(run, "dx", TENSOR_OUT, c->type, rows, heads * d);
    dx->stride += kernel_case_has(c, CASE_STRIDED) ? d + (kernel_case_has(c, CASE_ODD) ? 1 : 0) : 0;
    if (kernel_case_has(c, CASE_IN_PLACE)) {
        dx->alias = "x";
        dx->stride = run_stride(run, "x");
    }
    if (kernel_case_has(c, CASE_NO_NORM))
        return;
    run_add_normal(run, "dweight", TENSOR_CHANGED, DTYPE_F32, 1, d, 1.0)->extra =
        2e-6 * sqrt((double)(rows * heads)); // as in rms_norm_backward_build
    run_add(run, "scratch", TENSOR_SCRATCH, DTYPE_F32, RMS_NORM_PARTS, d);
}

static void norm_rope_backward_expect(const struct kernel_case *c, struct kernel_run *run)
{
    struct naive_rope rope = rope_of(c, run);
    struct kernel_tensor *dweight = run_find(run, "dweight");
    if (dweight != NULL)
        memcpy(dweight->expected, dweight->value, (size_t)c->shape[2] * sizeof(double));
    naive_norm_rope_backward(&rope, run_value(run, "x"), run_value(run, "dy"),
                             run_expected(run, "dx"), dweight != NULL ? dweight->expected : NULL);
    free((void *)rope.positions);
}

static void norm_rope_backward_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct norm_rope op = norm_rope_op(c, run);
    op.dx_stride = run_stride(run, "dx");
    run->backend->kernels->norm_rope_backward(run->stream, &op);
}

// swiglu: rows, width; backward also IN_PLACE, then with y
static void swiglu_build(const struct kernel_case *c, struct kernel_run *run)
{
    run_add_normal(run, "gate_up", TENSOR_IN, c->type, c->shape[0], 2 * c->shape[1], 3.0);
    run_add(run, "y", TENSOR_OUT, c->type, c->shape[0], c->shape[1]);
}

static void swiglu_expect(const struct kernel_case *c, struct kernel_run *run)
{
    naive_swiglu(c->shape[0], c->shape[1], run_value(run, "gate_up"), run_expected(run, "y"));
}

static struct swiglu swiglu_op(const struct kernel_case *c, const struct kernel_run *run)
{
    return (struct swiglu){.rows = c->shape[0],
                           .width = c->shape[1],
                           .type = c->type,
                           .gate_up = run_device(run, "gate_up"),
                           .y = run_device(run, "y"),
                           .dy = run_device(run, "dy"),
                           .dgate_up = run_device(run, "dgate_up")};
}

static void swiglu_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct swiglu op = swiglu_op(c, run);
    run->backend->kernels->swiglu_forward(run->stream, &op);
}

static void swiglu_backward_build(const struct kernel_case *c, struct kernel_run *run)
{
    run_add_normal(run, "gate_up", TENSOR_IN, c->type, c->shape[0], 2 * c->shape[1], 3.0);
    run_add_normal(run, "dy", TENSOR_IN, c->type, c->shape[0], c->shape[1], 1.0);
    struct kernel_tensor *out =
        run_add(run, "dgate_up", TENSOR_OUT, c->type, c->shape[0], 2 * c->shape[1]);
    if (kernel_case_has(c, CASE_IN_PLACE)) {
        out->alias = "gate_up";
        run_add(run, "y", TENSOR_OUT, c->type, c->shape[0], c->shape[1])->alias = "dy";
    }
}

static void swiglu_backward_expect(const struct kernel_case *c, struct kernel_run *run)
{
    if (kernel_case_has(c, CASE_IN_PLACE))
        swiglu_expect(c, run);
    naive_swiglu_backward(c->shape[0], c->shape[1], run_value(run, "gate_up"), run_value(run, "dy"),
                          run_expected(run, "dgate_up"));
}

static void swiglu_backward_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct swiglu op = swiglu_op(c, run);
    run->backend->kernels->swiglu_backward(run->stream, &op);
}

// gather_rows: rows, width, in_rows; STRIDED, SCALED, ROW_SCALED, TO_F32
static void gather_build(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = c->shape[0], width = c->shape[1], in_rows = c->shape[2];
    run_add_normal(run, "in", TENSOR_IN, c->type, in_rows, width, 1.0)->stride +=
        kernel_case_has(c, CASE_STRIDED) ? 7 : 0;
    struct kernel_tensor *index = run_add(run, "index", TENSOR_IN, DTYPE_I32, rows, 1);
    for (int64_t r = 0; r < rows; r++)
        index->value[r] = (double)run_below(run, in_rows);
    if (kernel_case_has(c, CASE_ROW_SCALED)) {
        run_add_normal(run, "row_scale", TENSOR_IN, DTYPE_F32, rows, 1, 1.0)->value[0] = 0.0;
        index->value[0] = (double)(in_rows - 1);
        for (int64_t r = 1; r < rows; r++)
            index->value[r] = (double)run_below(run, in_rows - 1);
        run_value(run, "in")[(in_rows - 1) * width] = (double)INFINITY;
    }
    run_add(run, "out", TENSOR_OUT, kernel_case_has(c, CASE_TO_F32) ? DTYPE_F32 : c->type, rows,
            width);
}

static void gather_expect(const struct kernel_case *c, struct kernel_run *run)
{
    const double *in = run_value(run, "in"), *index = run_value(run, "index");
    const double *row_scale = run_value(run, "row_scale");
    for (int64_t i = 0; i < c->shape[0] * c->shape[1]; i++) {
        double scale = kernel_case_has(c, CASE_SCALED) ? 0.3125 : 1.0;
        scale *= row_scale != NULL ? row_scale[i / c->shape[1]] : 1.0;
        run_expected(run, "out")[i] =
            scale == 0.0
                ? 0.0
                : scale * in[(int64_t)index[i / c->shape[1]] * c->shape[1] + i % c->shape[1]];
    }
}

static void gather_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct gather_rows op = {.rows = c->shape[0],
                             .width = c->shape[1],
                             .in = run_device(run, "in"),
                             .in_rows = c->shape[2],
                             .in_stride = run_stride(run, "in"),
                             .in_type = c->type,
                             .out_type = kernel_case_has(c, CASE_TO_F32) ? DTYPE_F32 : c->type,
                             .index = run_device(run, "index"),
                             .scale = kernel_case_has(c, CASE_SCALED) ? 0.3125f : 1.0f,
                             .row_scale = run_device(run, "row_scale"),
                             .out = run_device(run, "out")};
    run->backend->kernels->gather_rows(run->stream, &op);
}

// scatter_rows: rows, width, out_rows; SCALED (row 0 by 0 with inf in it), TO_F32
static void scatter_build(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = c->shape[0], width = c->shape[1], out_rows = c->shape[2];
    struct kernel_tensor *in = run_add_normal(run, "in", TENSOR_IN, c->type, rows, width, 1.0);
    struct kernel_tensor *index = run_add(run, "index", TENSOR_IN, DTYPE_I32, rows, 1);
    // Distinct and out of order.
    for (int64_t r = 0; r < rows; r++)
        index->value[r] = (double)(out_rows - 1 - r * (out_rows / rows));
    if (kernel_case_has(c, CASE_SCALED)) {
        run_add_normal(run, "scale", TENSOR_IN, DTYPE_F32, rows, 1, 1.0)->value[0] = 0.0;
        in->value[0] = (double)INFINITY;
    }
    run_add(run, "out", TENSOR_OUT, kernel_case_has(c, CASE_TO_F32) ? DTYPE_F32 : c->type, out_rows,
            width);
}

static void scatter_expect(const struct kernel_case *c, struct kernel_run *run)
{
    const double *scale = run_value(run, "scale");
    for (int64_t i = 0; i < c->shape[0] * c->shape[1]; i++) {
        int64_t row = i / c->shape[1];
        double factor = scale != NULL ? scale[row] : 1.0;
        run_expected(run,
                     "out")[(int64_t)run_value(run, "index")[row] * c->shape[1] + i % c->shape[1]] =
            factor == 0.0 ? 0.0 : factor * run_value(run, "in")[i];
    }
}

static void scatter_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct scatter_rows op = {.rows = c->shape[0],
                              .width = c->shape[1],
                              .in = run_device(run, "in"),
                              .in_type = c->type,
                              .out_type = kernel_case_has(c, CASE_TO_F32) ? DTYPE_F32 : c->type,
                              .index = run_device(run, "index"),
                              .scale = run_device(run, "scale"),
                              .out = run_device(run, "out"),
                              .out_rows = c->shape[2]};
    run->backend->kernels->scatter_rows(run->stream, &op);
}

// add_rows: rows, width, out_rows (0: no index); STRIDED, TO_F32
static void add_rows_build(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = c->shape[0], width = c->shape[1], out_rows = c->shape[2];
    run_add_normal(run, "in", TENSOR_IN, c->type, rows, width, 1.0);
    if (out_rows > 0) {
        struct kernel_tensor *index = run_add(run, "index", TENSOR_IN, DTYPE_I32, rows, 1);
        // Distinct and out of order.
        for (int64_t r = 0; r < rows; r++)
            index->value[r] = (double)(out_rows - 1 - r * (out_rows / rows));
    }
    run_add_normal(run, "out", TENSOR_CHANGED,
                   kernel_case_has(c, CASE_TO_F32) ? DTYPE_F32 : c->type,
                   out_rows > 0 ? out_rows : rows, width, 1.0)
        ->stride += kernel_case_has(c, CASE_STRIDED) ? 8 : 0;
}

static void add_rows_expect(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t width = c->shape[1];
    const struct kernel_tensor *out = run_find(run, "out");
    const double *index = run_value(run, "index");
    memcpy(out->expected, out->value, (size_t)(out->rows * width) * sizeof(double));
    for (int64_t i = 0; i < c->shape[0] * width; i++) {
        int64_t row = index != NULL ? (int64_t)index[i / width] : i / width;
        out->expected[row * width + i % width] += run_value(run, "in")[i];
    }
}

static void add_rows_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct add_rows op = {.rows = c->shape[0],
                          .width = c->shape[1],
                          .in = run_device(run, "in"),
                          .in_type = c->type,
                          .index = run_device(run, "index"),
                          .out = run_device(run, "out"),
                          .out_type = kernel_case_has(c, CASE_TO_F32) ? DTYPE_F32 : c->type,
                          .out_rows = run_find(run, "out")->rows,
                          .out_stride = run_stride(run, "out")};
    run->backend->kernels->add_rows(run->stream, &op);
}

// context_load: tokens, planes, layers, hidden; NORMAL, UNIFORM, BLANK, FLOAT8
static const double noise_std = 0.25;

// Every code that is a number comes, and scales over six powers of ten.
static void context_add_in(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t tokens = c->shape[0], planes = c->shape[1], width = planes * c->shape[3];
    if (!kernel_case_has(c, CASE_FLOAT8)) {
        run_add_normal(run, "in", TENSOR_IN, DTYPE_BF16, tokens, width, 1.0);
        return;
    }
    struct kernel_tensor *in = run_add(run, "in", TENSOR_IN, DTYPE_U8, tokens, width);
    for (int64_t i = 0; i < tokens * width; i++)
        in->value[i] = (double)(i % 127 + (i / 127 % 2) * 128);
    struct kernel_tensor *scales = run_add(run, "scales", TENSOR_IN, DTYPE_F32, tokens, planes);
    for (int64_t i = 0; i < tokens * planes; i++)
        scales->value[i] = (double)(float)(1.37 * pow(10.0, (double)(i % 7 - 4)));
}

static double context_in(const struct kernel_case *c, const struct kernel_run *run, int64_t t,
                         int64_t plane, int64_t h)
{
    double value = run_value(run, "in")[(t * c->shape[1] + plane) * c->shape[3] + h];
    if (!kernel_case_has(c, CASE_FLOAT8))
        return value;
    float product =
        e4m3_to_float((uint8_t)value) * (float)run_value(run, "scales")[t * c->shape[1] + plane];
    bool rounded = c->type == DTYPE_BF16 && !kernel_case_has(c, CASE_NORMAL) &&
                   !kernel_case_has(c, CASE_UNIFORM);
    return rounded ? (double)bf16_to_float(bf16_from_float(product)) : (double)product;
}

static void context_build(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t tokens = c->shape[0], planes = c->shape[1], layers = c->shape[2];
    context_add_in(c, run);
    struct kernel_tensor *plane = run_add(run, "plane", TENSOR_IN, DTYPE_I32, layers, 1);
    plane->host = true;
    for (int64_t l = 0; l < layers; l++)
        plane->value[l] = (double)((l * 2 + 1) % planes);
    struct kernel_tensor *key = run_add(run, "key", TENSOR_IN, DTYPE_I32, tokens, 2);
    struct kernel_tensor *positions = run_add(run, "positions", TENSOR_IN, DTYPE_I32, tokens, 1);
    for (int64_t t = 0; t < tokens; t++) {
        positions->value[t] = (double)(t % 5);
        key->value[2 * t] = key->value[2 * t + 1] = (double)(t / 5 + 77); // documents of 5
    }
    if (kernel_case_has(c, CASE_BLANK)) {
        struct kernel_tensor *blank = run_add(run, "blank", TENSOR_IN, DTYPE_U8, tokens, 1);
        for (int64_t t = 0; t < tokens; t++)
            blank->value[t] = t / 5 % 2 == 1;
    }
    run_add(run, "out", TENSOR_OUT, c->type, tokens, layers * c->shape[3]);
}

static double noise_of(const struct kernel_case *c, struct rng_key key, int64_t counter)
{
    if (kernel_case_has(c, CASE_NORMAL))
        return noise_std * (double)rng_normal(key, (uint64_t)counter);
    if (kernel_case_has(c, CASE_UNIFORM))
        return noise_std * (2.0 * (double)rng_uniform(key, (uint64_t)counter) - 1.0);
    return 0.0;
}

static void context_expect(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t layers = c->shape[2], hidden = c->shape[3];
    const double *blank = run_value(run, "blank");
    for (int64_t i = 0; i < c->shape[0] * layers * hidden; i++) {
        int64_t t = i / (layers * hidden), l = i / hidden % layers, h = i % hidden;
        uint32_t word = (uint32_t)run_value(run, "key")[2 * t];
        int64_t position = (int64_t)run_value(run, "positions")[t];
        int64_t plane = (int64_t)run_value(run, "plane")[l];
        double value =
            context_in(c, run, t, plane, h) +
            noise_of(c, (struct rng_key){{word, word}}, (position * layers + l) * hidden + h);
        run_expected(run, "out")[i] = blank != NULL && blank[t] != 0.0 ? 0.0 : value;
    }
}

static void context_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct context_load op = {.tokens = c->shape[0],
                              .layers = c->shape[2],
                              .hidden = c->shape[3],
                              .in = run_device(run, "in"),
                              .in_bytes = c->shape[1] * c->shape[3] *
                                          (kernel_case_has(c, CASE_FLOAT8) ? 1 : 2),
                              .scales = run_device(run, "scales"),
                              .scale_stride = c->shape[1],
                              .plane = run_device(run, "plane"),
                              .type = c->type,
                              .out = run_device(run, "out"),
                              .noise = kernel_case_has(c, CASE_NORMAL)    ? NOISE_KIND_NORMAL
                                       : kernel_case_has(c, CASE_UNIFORM) ? NOISE_KIND_UNIFORM
                                                                          : NOISE_KIND_NONE,
                              .noise_std = (float)noise_std,
                              .noise_key = run_device(run, "key"),
                              .positions = run_device(run, "positions"),
                              .blank = run_device(run, "blank")};
    run->backend->kernels->context_load(run->stream, &op);
}

// adamw: count, step; type of the copy; FROZEN: no copy
static const struct adamw adamw_settings = {
    .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .grad_scale = 0.5};

static void adamw_build(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t n = c->shape[0];
    run_add_normal(run, "param", TENSOR_CHANGED, DTYPE_F32, 1, n, 1.0);
    run_add_normal(run, "m", TENSOR_CHANGED, DTYPE_F32, 1, n, 0.1);
    run_add_normal(run, "v", TENSOR_CHANGED, DTYPE_F32, 1, n, 0.1);
    run_add_normal(run, "grad", TENSOR_IN, DTYPE_F32, 1, n, 1.0);
    for (int64_t i = 0; i < n; i++)
        run_value(run, "v")[i] = fabs(run_value(run, "v")[i]);
    static const struct compare_bounds rounded = {1e-7, 0x1.01p-8, 1e-5};
    if (!kernel_case_has(c, CASE_FROZEN))
        run_add(run, "copy", TENSOR_OUT, c->type, 1, n)->bounds =
            c->type == DTYPE_BF16 ? &rounded : NULL;
}

static void adamw_expect(const struct kernel_case *c, struct kernel_run *run)
{
    const struct adamw *s = &adamw_settings;
    double step = (double)c->shape[1];
    for (int64_t i = 0; i < c->shape[0]; i++) {
        double g = s->grad_scale * run_value(run, "grad")[i];
        double m = s->beta1 * run_value(run, "m")[i] + (1.0 - s->beta1) * g;
        double v = s->beta2 * run_value(run, "v")[i] + (1.0 - s->beta2) * g * g;
        double p = run_value(run, "param")[i] * (1.0 - s->lr * s->weight_decay);
        double mean = m / (1.0 - pow(s->beta1, step)), square = v / (1.0 - pow(s->beta2, step));
        p -= s->lr * mean / (sqrt(square) + s->eps);
        run_expected(run, "m")[i] = m;
        run_expected(run, "v")[i] = v;
        run_expected(run, "param")[i] = p;
        if (run_find(run, "copy") != NULL)
            run_expected(run, "copy")[i] = p;
    }
}

static void adamw_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct adamw op = adamw_settings;
    op.count = c->shape[0];
    op.step = c->shape[1];
    op.param = run_device(run, "param");
    op.m = run_device(run, "m");
    op.v = run_device(run, "v");
    op.grad = run_device(run, "grad");
    op.copy = run_device(run, "copy");
    op.copy_type = c->type;
    run->backend->kernels->adamw(run->stream, &op);
}

// sum_squares: count
static void sum_squares_build(const struct kernel_case *c, struct kernel_run *run)
{
    run_add_normal(run, "x", TENSOR_IN, DTYPE_F32, 1, c->shape[0], 1.0);
    run_add(run, "result", TENSOR_OUT, DTYPE_F64, 1, 1);
    run_add(run, "scratch", TENSOR_SCRATCH, DTYPE_F64, 1, SUM_SQUARES_PARTS);
}

static void sum_squares_expect(const struct kernel_case *c, struct kernel_run *run)
{
    const double *x = run_value(run, "x");
    for (int64_t i = 0; i < c->shape[0]; i++)
        run_expected(run, "result")[0] += x[i] * x[i];
}

static void sum_squares_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct sum_squares op = {.count = c->shape[0],
                             .x = run_device(run, "x"),
                             .result = run_device(run, "result"),
                             .scratch = run_device(run, "scratch")};
    run->backend->kernels->sum_squares(run->stream, &op);
}

// convert: count, width (0: packed); type of the input; TO_F32
static void convert_build(const struct kernel_case *c, struct kernel_run *run)
{
    struct kernel_tensor *from =
        run_add_normal(run, "from", TENSOR_IN, c->type, 1, c->shape[0], 1e3);
    if (c->shape[0] > 2) {
        from->value[0] = (double)NAN;
        from->value[1] = (double)-INFINITY;
    }
    enum dtype to = kernel_case_has(c, CASE_TO_F32) ? DTYPE_F32 : DTYPE_BF16;
    if (c->shape[1] == 0)
        run_add(run, "to", TENSOR_OUT, to, 1, c->shape[0]);
    else
        run_add(run, "to", TENSOR_OUT, to, c->shape[0] / c->shape[1], c->shape[1])->stride +=
            c->shape[1];
}

static void convert_expect(const struct kernel_case *c, struct kernel_run *run)
{
    memcpy(run_expected(run, "to"), run_value(run, "from"), (size_t)c->shape[0] * sizeof(double));
}

static void convert_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct convert op = {.count = c->shape[0],
                         .width = c->shape[1],
                         .to_stride = 2 * c->shape[1],
                         .from = run_device(run, "from"),
                         .to = run_device(run, "to"),
                         .from_type = c->type,
                         .to_type = kernel_case_has(c, CASE_TO_F32) ? DTYPE_F32 : DTYPE_BF16};
    run->backend->kernels->convert(run->stream, &op);
}

static const struct kernel_op ops[] = {
    {"gemm", gemm_build, gemm_expect, gemm_call, gemm_flops},
    {"rms_norm_forward", rms_norm_build, rms_norm_expect, rms_norm_call, no_flops},
    {"rms_norm_backward", rms_norm_backward_build, rms_norm_backward_expect, rms_norm_backward_call,
     no_flops},
    {"norm_rope_forward", norm_rope_build, norm_rope_expect, norm_rope_call, no_flops},
    {"norm_rope_backward", norm_rope_backward_build, norm_rope_backward_expect,
     norm_rope_backward_call, no_flops},
    {"norm_chain", norm_chain_build, norm_chain_expect, norm_chain_call, no_flops},
    {"norm_chain_backward", norm_chain_backward_build, norm_chain_backward_expect,
     norm_chain_backward_call, no_flops},
    {"norm_split", norm_split_build, norm_split_expect, norm_split_call, no_flops},
    {"swiglu_forward", swiglu_build, swiglu_expect, swiglu_call, no_flops},
    {"swiglu_backward", swiglu_backward_build, swiglu_backward_expect, swiglu_backward_call,
     no_flops},
    {"gather_rows", gather_build, gather_expect, gather_call, no_flops},
    {"scatter_rows", scatter_build, scatter_expect, scatter_call, no_flops},
    {"add_rows", add_rows_build, add_rows_expect, add_rows_call, no_flops},
    {"sum_rows", sum_rows_build, sum_rows_expect, sum_rows_call, no_flops},
    {"gather_sum", gather_sum_build, gather_sum_expect, gather_sum_call, no_flops},
    {"clear_rows", clear_rows_build, clear_rows_expect, clear_rows_call, no_flops},
    {"context_load", context_build, context_expect, context_call, no_flops},
    {"attention_forward", attention_build, attention_expect, attention_call, attention_flops},
    {"attention_backward", attention_backward_build, attention_backward_expect,
     attention_backward_call, attention_backward_flops},
    {"diagonal_forward", diagonal_build, diagonal_expect, diagonal_call, no_flops},
    {"diagonal_backward", diagonal_backward_build, diagonal_backward_expect, diagonal_backward_call,
     no_flops},
    {"softmax_loss", loss_build, loss_expect, loss_call, no_flops},
    {"vocab_scan", scan_build, scan_expect, scan_call, no_flops},
    {"draft_overlap", overlap_build, overlap_expect, overlap_call, no_flops},
    {"mask_rows", mask_build, mask_expect, mask_call, no_flops},
    {"adamw", adamw_build, adamw_expect, adamw_call, no_flops},
    {"sum_squares", sum_squares_build, sum_squares_expect, sum_squares_call, no_flops},
    {"convert", convert_build, convert_expect, convert_call, no_flops},
    {"muon_momentum", muon_momentum_build, muon_momentum_expect, muon_momentum_call, no_flops},
    {"muon_normalise", muon_normalise_build, muon_normalise_expect, muon_normalise_call, no_flops},
    {"muon_update", muon_update_build, muon_update_expect, muon_update_call, no_flops},
    {"average", average_build, average_expect, average_call, no_flops},
    {"exchange", exchange_build, exchange_expect, exchange_call, no_flops},
};

const struct kernel_op *kernel_op_find(const char *name)
{
    for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]); i++)
        if (strcmp(ops[i].name, name) == 0)
            return &ops[i];
    return NULL;
}
