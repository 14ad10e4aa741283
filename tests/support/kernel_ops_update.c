// Owns the parts of the cases of Muon's elementwise ops and of the moving average.
#include "tests/support/kernel_ops_parts.h"

#include <math.h>

// muon_momentum: count
static const double momentum = 0.95, grad_scale = 0.25;

void muon_momentum_build(const struct kernel_case *c, struct kernel_run *run)
{
    run_add_normal(run, "grad", TENSOR_CHANGED, DTYPE_F32, 1, c->shape[0], 1.0);
    run_add_normal(run, "m", TENSOR_CHANGED, DTYPE_F32, 1, c->shape[0], 0.1);
}

void muon_momentum_expect(const struct kernel_case *c, struct kernel_run *run)
{
    for (int64_t i = 0; i < c->shape[0]; i++) {
        double g = grad_scale * run_value(run, "grad")[i];
        double m = momentum * run_value(run, "m")[i] + (1.0 - momentum) * g;
        run_expected(run, "m")[i] = m;
        run_expected(run, "grad")[i] = momentum * m + (1.0 - momentum) * g;
    }
}

void muon_momentum_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct muon_momentum op = {.count = c->shape[0],
                               .grad = run_device(run, "grad"),
                               .m = run_device(run, "m"),
                               .momentum = momentum,
                               .grad_scale = grad_scale};
    run->backend->kernels->muon_momentum(run->stream, &op);
}

// muon_normalise: count, 1: so small that the least norm counts; type of the result
void muon_normalise_build(const struct kernel_case *c, struct kernel_run *run)
{
    double scale = c->shape[1] == 1 ? 1e-12 : 3.0;
    run_add_normal(run, "from", TENSOR_IN, DTYPE_F32, 1, c->shape[0], scale);
    run_add(run, "squares", TENSOR_IN, DTYPE_F64, 1, 1);
    for (int64_t i = 0; i < c->shape[0]; i++)
        run_value(run, "squares")[0] += run_value(run, "from")[i] * run_value(run, "from")[i];
    run_add(run, "to", TENSOR_OUT, c->type, 1, c->shape[0]);
}

void muon_normalise_expect(const struct kernel_case *c, struct kernel_run *run)
{
    double norm = fmax(sqrt(run_value(run, "squares")[0]), MUON_LEAST_NORM);
    for (int64_t i = 0; i < c->shape[0]; i++)
        run_expected(run, "to")[i] = run_value(run, "from")[i] / norm;
}

void muon_normalise_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct muon_normalise op = {.count = c->shape[0],
                                .from = run_device(run, "from"),
                                .squares = run_device(run, "squares"),
                                .to = run_device(run, "to"),
                                .to_type = c->type};
    run->backend->kernels->muon_normalise(run->stream, &op);
}

// muon_update: count; type of x and of the copy; TO_F32: the copy is fp32, FROZEN: there is none
static const double keep = 0.999, step_size = 0.02;

void muon_update_build(const struct kernel_case *c, struct kernel_run *run)
{
    static const struct compare_bounds rounded = {1e-7, 0x1.01p-8, 1e-5};
    enum dtype copy = kernel_case_has(c, CASE_TO_F32) ? DTYPE_F32 : c->type;
    run_add_normal(run, "param", TENSOR_CHANGED, DTYPE_F32, 1, c->shape[0], 1.0);
    run_add_normal(run, "x", TENSOR_IN, c->type, 1, c->shape[0], 1.0);
    if (!kernel_case_has(c, CASE_FROZEN))
        run_add(run, "copy", TENSOR_OUT, copy, 1, c->shape[0])->bounds =
            copy == DTYPE_BF16 ? &rounded : NULL;
}

void muon_update_expect(const struct kernel_case *c, struct kernel_run *run)
{
    for (int64_t i = 0; i < c->shape[0]; i++) {
        double p = keep * run_value(run, "param")[i] - step_size * run_value(run, "x")[i];
        run_expected(run, "param")[i] = p;
        if (run_find(run, "copy") != NULL)
            run_expected(run, "copy")[i] = p;
    }
}

void muon_update_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct muon_update op = {.count = c->shape[0],
                             .param = run_device(run, "param"),
                             .x = run_device(run, "x"),
                             .x_type = c->type,
                             .copy = run_device(run, "copy"),
                             .copy_type = kernel_case_has(c, CASE_TO_F32) ? DTYPE_F32 : c->type,
                             .keep = keep,
                             .step = step_size};
    run->backend->kernels->muon_update(run->stream, &op);
}

// average: count
static const double share = 0.001;

void average_build(const struct kernel_case *c, struct kernel_run *run)
{
    run_add_normal(run, "average", TENSOR_CHANGED, DTYPE_F32, 1, c->shape[0], 1.0);
    run_add_normal(run, "x", TENSOR_IN, DTYPE_F32, 1, c->shape[0], 1.0);
}

void average_expect(const struct kernel_case *c, struct kernel_run *run)
{
    for (int64_t i = 0; i < c->shape[0]; i++)
        run_expected(run, "average")[i] =
            (1.0 - share) * run_value(run, "average")[i] + share * run_value(run, "x")[i];
}

void average_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct average op = {.count = c->shape[0],
                         .average = run_device(run, "average"),
                         .x = run_device(run, "x"),
                         .share = share};
    run->backend->kernels->average(run->stream, &op);
}

// exchange: count
void exchange_build(const struct kernel_case *c, struct kernel_run *run)
{
    run_add_normal(run, "a", TENSOR_CHANGED, DTYPE_F32, 1, c->shape[0], 1.0);
    run_add_normal(run, "b", TENSOR_CHANGED, DTYPE_F32, 1, c->shape[0], 1.0);
}

void exchange_expect(const struct kernel_case *c, struct kernel_run *run)
{
    for (int64_t i = 0; i < c->shape[0]; i++) {
        run_expected(run, "a")[i] = run_value(run, "b")[i];
        run_expected(run, "b")[i] = run_value(run, "a")[i];
    }
}

void exchange_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct exchange op = {
        .count = c->shape[0], .a = run_device(run, "a"), .b = run_device(run, "b")};
    run->backend->kernels->exchange(run->stream, &op);
}
