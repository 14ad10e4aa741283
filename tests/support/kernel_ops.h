// How each op is tested: its tensors, its reference, its call. One entry for each op.
#ifndef TESTS_SUPPORT_KERNEL_OPS_H
#define TESTS_SUPPORT_KERNEL_OPS_H

#include "tests/kernel_cases.h"

struct kernel_op {
    const char *name;
    void (*build)(const struct kernel_case *c, struct kernel_run *run);
    void (*expect)(const struct kernel_case *c, struct kernel_run *run);
    void (*call)(const struct kernel_case *c, struct kernel_run *run);
    double (*flops)(const struct kernel_case *c);
};

// NULL when no op has this name.
const struct kernel_op *kernel_op_find(const char *name);

// Naive forms of a case's tensors, also used by the gradient tests.
struct naive_rope;
struct naive_attention;
struct naive_diagonal;
struct naive_loss;
// positions, begin and end are to be freed by the caller.
struct naive_rope rope_of(const struct kernel_case *c, const struct kernel_run *run);
struct naive_attention attention_of(const struct kernel_case *c, const struct kernel_run *run);
struct naive_diagonal diagonal_of(const struct kernel_case *c, const struct kernel_run *run);
struct naive_loss loss_of(const struct kernel_case *c, const struct kernel_run *run, int64_t row);
// The mixtures of loss terms that the cases use.
enum { LOSS_MIXES = 12 };
const float *loss_mix(int64_t index);

#endif
