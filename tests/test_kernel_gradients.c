// Backward ops of the CPU backend against central finite differences, in double, of the naive forward
// pass: the formulas of gradients are checked without using any of them.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/kernel_cases.h"
#include "tests/support/kernel_ops.h"
#include "tests/support/naive.h"

struct check {
    struct kernel_case c;
    struct kernel_run run;
    double *y; // outputs of the naive forward pass
    // What is differentiated: sum of dy * y, or of the losses of all rows.
    double (*value)(struct check *check);
    double *lambda; // of each row; the loss takes it as a constant
};

static void check_open(struct check *check, int64_t outputs)
{
    const struct backend *backend = backend_cpu();
    kernel_case_build(&check->c, &check->run);
    for (int i = 0; i < check->run.count; i++)
        if (check->run.tensors[i].role == TENSOR_CHANGED) // gradients are added to zero
            memset(check->run.tensors[i].value, 0,
                   (size_t)(check->run.tensors[i].rows * check->run.tensors[i].columns) *
                       sizeof(double));
    struct stream *stream = backend->stream_open(&(struct stream_options){
        .threads = 2, .workspace_bytes = backend->stream_workspace_bytes(2)});
    kernel_run_send(&check->run, backend, stream);
    kernel_case_call(&check->c, &check->run);
    check->y = memory_alloc((size_t)outputs, sizeof(double));
}

static void check_close(struct check *check)
{
    struct stream *stream = check->run.stream;
    kernel_run_free_device(&check->run);
    backend_cpu()->stream_close(stream);
    kernel_run_release(&check->run);
    free(check->y);
    free(check->lambda);
}

// Differences with a step of 1e-5 are good to about 1e-9; the op computes in fp32.
static void check_gradient(struct check *check, const char *input, const char *gradient)
{
    struct kernel_tensor *x = run_find(&check->run, input);
    struct kernel_tensor *dx = run_find(&check->run, gradient);
    double *got = kernel_run_fetch(&check->run, dx);
    double *expected = memory_alloc((size_t)(x->rows * x->columns), sizeof(double));
    const double step = 1e-5;
    for (int64_t i = 0; i < x->rows * x->columns; i++) {
        double kept = x->value[i];
        x->value[i] = kept + step;
        double above = check->value(check);
        x->value[i] = kept - step;
        double below = check->value(check);
        x->value[i] = kept;
        expected[i] = (above - below) / (2.0 * step);
    }
    struct compare_bounds bounds = {5e-6, 2e-5, 1e-10};
    char what[CASE_NAME + 32], name[CASE_NAME];
    kernel_case_name(&check->c, name);
    snprintf(what, sizeof(what), "%s: %s", name, gradient);
    bool ok = compare_tensors(what, check->c.seed, got, expected, x->rows, x->columns, bounds);
    free(got);
    free(expected);
    assert_true(ok);
}

static double weighted(const struct check *check, const char *dy)
{
    const struct kernel_tensor *tensor = run_find(&check->run, dy);
    double sum = 0.0;
    for (int64_t i = 0; i < tensor->rows * tensor->columns; i++)
        sum += tensor->value[i] * check->y[i];
    return sum;
}

static double rms_norm_value(struct check *check)
{
    const struct kernel_case *c = &check->c;
    naive_rms_norm(c->shape[0], c->shape[1], 1e-6, c->flags & CASE_OFFSET ? 1.0 : 0.0,
                   run_value(&check->run, "x"), run_value(&check->run, "weight"), check->y, NULL);
    return weighted(check, "dy");
}

static void rms_norm(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct check check = {.c = {"rms_norm_backward", {3, 7}, DTYPE_F32, 0, 1, {0}, ""},
                              .value = rms_norm_value};
        check.c.flags = i == 1 ? CASE_OFFSET : 0;
        check_open(&check, 21);
        check_gradient(&check, "x", "dx");
        check_gradient(&check, "weight", "dweight");
        check_close(&check);
    }
}

// dy and more on the first norm's output, dsecond on the second's.
static double norm_chain_value(struct check *check)
{
    const struct kernel_run *run = &check->run;
    int64_t rows = check->c.shape[0], width = check->c.shape[1];
    double sum = 0.0, *second = check->y + rows * width;
    naive_rms_norm(rows, width, 1e-6, 0.0, run_value(run, "x"), run_value(run, "weight"), check->y,
                   NULL);
    naive_rms_norm(rows, width, 1e-6, 0.0, check->y, run_value(run, "second_weight"), second, NULL);
    for (int64_t i = 0; i < rows * width; i++)
        sum += run_value(run, "dsecond")[i] * second[i] +
               (run_value(run, "dy")[i] + run_value(run, "more")[i]) * check->y[i];
    return sum;
}

static void norm_chain(void **state)
{
    (void)state;
    struct check check = {.c = {"norm_chain_backward", {3, 7}, DTYPE_F32, 0, 8, {0}, ""},
                          .value = norm_chain_value};
    check_open(&check, 2 * 21);
    check_gradient(&check, "x", "dx");
    check_gradient(&check, "weight", "dweight");
    check_gradient(&check, "second_weight", "second_dweight");
    check_close(&check);
}

// y M^T with y = n w, for sums = dz^T n.
static double norm_split_value(struct check *check)
{
    const struct kernel_tensor *matrix = run_find(&check->run, "matrix");
    double sum = 0.0;
    for (int64_t i = 0; i < matrix->rows * matrix->columns; i++)
        sum += run_value(&check->run, "sums")[i] * matrix->value[i] *
               run_value(&check->run, "weight")[i % matrix->columns];
    return sum;
}

static void norm_split(void **state)
{
    (void)state;
    struct check check = {.c = {"norm_split", {5, 7}, DTYPE_F32, CASE_ADD, 7, {0}, ""},
                          .value = norm_split_value};
    check_open(&check, 1);
    check_gradient(&check, "matrix", "dmatrix");
    check_gradient(&check, "weight", "dweight");
    check_close(&check);
}

static double norm_rope_value(struct check *check)
{
    struct naive_rope rope = rope_of(&check->c, &check->run);
    naive_norm_rope(&rope, run_value(&check->run, "x"), check->y);
    free((void *)rope.positions);
    return weighted(check, "dy");
}

static void norm_rope(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct check check = {.c = {"norm_rope_backward", {4, 3, 6}, DTYPE_F32, 0, 2, {0}, ""},
                              .value = norm_rope_value};
        check.c.flags = i == 1 ? CASE_NO_NORM : 0;
        check_open(&check, 4 * 3 * 6);
        check_gradient(&check, "x", "dx");
        if (i == 0)
            check_gradient(&check, "weight", "dweight");
        check_close(&check);
    }
}

static double swiglu_value(struct check *check)
{
    naive_swiglu(check->c.shape[0], check->c.shape[1], run_value(&check->run, "gate_up"), check->y);
    return weighted(check, "dy");
}

static void swiglu(void **state)
{
    (void)state;
    struct check check = {.c = {"swiglu_backward", {3, 5}, DTYPE_F32, 0, 3, {0}, ""},
                          .value = swiglu_value};
    check_open(&check, 15);
    check_gradient(&check, "gate_up", "dgate_up");
    check_close(&check);
}

static double attention_value(struct check *check)
{
    struct naive_attention in = attention_of(&check->c, &check->run);
    naive_attention(&in, check->y, check->y + in.rows * in.heads * in.head_dim);
    free((void *)in.begin);
    free((void *)in.end);
    return weighted(check, "dout");
}

static void attention(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        struct check check = {
            .c = {"attention_backward", {4, 3, 17, 4, 2, 4}, DTYPE_F32, 0, 4, {0}, ""},
            .value = attention_value};
        check.c.flags = i == 1 ? CASE_CAUSAL | CASE_WINDOW : 0;
        if (i == 2) { // without blocks
            check.c.shape[0] = 12;
            check.c.shape[1] = 0;
        }
        check_open(&check, 12 * 4 * 5);
        check_gradient(&check, "q", "dq");
        if (i < 2) {
            check_gradient(&check, "k_block", "dk_block");
            check_gradient(&check, "v_block", "dv_block");
        }
        check_gradient(&check, "k_context", "dk_context");
        check_gradient(&check, "v_context", "dv_context");
        check_close(&check);
    }
}

// What attention over the context gave is taken as a constant.
static double diagonal_value(struct check *check)
{
    struct naive_diagonal in = diagonal_of(&check->c, &check->run);
    naive_diagonal(&in, run_value(&check->run, "context_out"),
                   run_value(&check->run, "context_lse"), check->y,
                   check->y + in.rows * in.heads * in.head_dim);
    return weighted(check, "dout");
}

static void diagonal(void **state)
{
    (void)state;
    struct check check = {.c = {"diagonal_backward", {5, 3, 4, 2, 6}, DTYPE_F32, 0, 6, {0}, ""},
                          .value = diagonal_value};
    check_open(&check, 5 * 4 * 7);
    check_gradient(&check, "q", "dq");
    check_gradient(&check, "k", "dk");
    check_gradient(&check, "v", "dv");
    check_close(&check);
}

static double loss_value(struct check *check)
{
    double sum = 0.0;
    for (int64_t row = 0; row < check->c.shape[0]; row++) {
        struct naive_loss in = loss_of(&check->c, &check->run, row);
        in.lambda = check->lambda[row];
        struct naive_loss_result result;
        naive_softmax_loss(&in, &result, NULL);
        sum += result.loss;
    }
    return sum;
}

static void softmax_loss(void **state)
{
    (void)state;
    for (int mix = 0; mix < LOSS_MIXES; mix++) {
        struct check check = {
            .c = {"softmax_loss", {5, 23, 3, mix}, DTYPE_F32, CASE_TO_F32, 5, {0}, ""},
            .value = loss_value};
        check_open(&check, 1);
        check.lambda = memory_alloc(5, sizeof(double));
        for (int64_t row = 0; row < 5; row++) {
            struct naive_loss in = loss_of(&check.c, &check.run, row);
            struct naive_loss_result result;
            naive_softmax_loss(&in, &result, NULL);
            check.lambda[row] = result.lambda;
        }
        check_gradient(&check, "student", "gradient");
        check_close(&check);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rms_norm),   cmocka_unit_test(norm_rope),  cmocka_unit_test(swiglu),
        cmocka_unit_test(attention),  cmocka_unit_test(diagonal),   cmocka_unit_test(softmax_loss),
        cmocka_unit_test(norm_split), cmocka_unit_test(norm_chain),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
