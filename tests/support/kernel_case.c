// Owns what is the same for all kernel cases: their names, and the way to the parts of their op.
#include <stdio.h>

#include "base/log.h"
#include "tests/kernel_cases.h"
#include "tests/support/kernel_ops.h"

void kernel_case_name(const struct kernel_case *c, char name[CASE_NAME])
{
    static const char *const flags[] = {
        "transpose_a", "transpose_b", "beta_one",   "beta_d",    "to_fp32", "strided",
        "in_place",    "add",         "frozen",     "offset",    "no_norm", "causal",
        "window",      "normal",      "uniform",    "blank",     "scaled",  "no_teacher",
        "no_gradient", "excluded",    "bench",      "unaligned", "sorted",  "not_finite",
        "odd",         "float8",      "row_scaled", "fresh",     "from",
    };
    int dimensions = 6, at;
    while (dimensions > 1 && c->shape[dimensions - 1] == 0)
        dimensions--;
    at = snprintf(name, CASE_NAME, "%s/%lld", c->op, (long long)c->shape[0]);
    for (int i = 1; i < dimensions; i++)
        at += snprintf(name + at, (size_t)(CASE_NAME - at), "x%lld", (long long)c->shape[i]);
    at += snprintf(name + at, (size_t)(CASE_NAME - at), "/%s", dtype_name(c->type));
    for (size_t i = 0; i < sizeof(flags) / sizeof(flags[0]); i++)
        if (c->flags & 1u << i)
            at += snprintf(name + at, (size_t)(CASE_NAME - at), "/%s", flags[i]);
}

bool kernel_case_has(const struct kernel_case *c, enum case_flags flag)
{
    return (c->flags & (unsigned)flag) != 0;
}

static const struct kernel_op *op_of(const struct kernel_case *c)
{
    const struct kernel_op *op = kernel_op_find(c->op);
    BUG_UNLESS(op != NULL);
    return op;
}

void kernel_case_build(const struct kernel_case *c, struct kernel_run *run)
{
    kernel_run_init(run, c->seed);
    op_of(c)->build(c, run);
    for (int i = 0; i < run->count && (c->flags & CASE_UNALIGNED) != 0; i++)
        if (run->tensors[i].alias == NULL)
            run->tensors[i].shift = dtype_size(run->tensors[i].type);
}

void kernel_case_expect(const struct kernel_case *c, struct kernel_run *run)
{
    op_of(c)->expect(c, run);
}

void kernel_case_call(const struct kernel_case *c, struct kernel_run *run)
{
    op_of(c)->call(c, run);
}

double kernel_case_flops(const struct kernel_case *c)
{
    return op_of(c)->flops(c);
}
