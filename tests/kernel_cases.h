// The one table of kernel cases: op, shape, dtype, variant, seed, bounds. Each row is a test on every
// backend (tests/test_kernels.c) and a line of the benchmark (benchmarks/bench_kernels.c).
#ifndef TESTS_KERNEL_CASES_H
#define TESTS_KERNEL_CASES_H

#include <stdbool.h>

#include "tests/support/kernel_run.h"

// Variants. Which of them an op knows is said at its builder.
enum case_flags {
    CASE_TRANSPOSE_A = 1 << 0,
    CASE_TRANSPOSE_B = 1 << 1,
    CASE_BETA_ONE = 1 << 2, // C += A B
    CASE_BETA_D = 1 << 3,   // C = A B / 2 - D / 4
    CASE_TO_F32 = 1 << 4,   // fp32 out of bf16
    CASE_STRIDED = 1 << 5,  // rows further apart than they are wide
    CASE_IN_PLACE = 1 << 6, // the output lies on an input
    CASE_ADD = 1 << 7,      // gradients are added
    CASE_FROZEN = 1 << 8,   // no weight gradient, no rstd kept
    CASE_OFFSET = 1 << 9,   // norm weights stored as w - 1
    CASE_NO_NORM = 1 << 10, // rotation only
    CASE_CAUSAL = 1 << 11,  // own block only up to itself
    CASE_WINDOW = 1 << 12,  // context begins later for later slots
    CASE_NORMAL = 1 << 13,  // noise
    CASE_UNIFORM = 1 << 14, // noise
    CASE_BLANK = 1 << 15,   // some documents are blanked
    CASE_SCALED = 1 << 16,  // rows scaled, some by 0
    CASE_NO_TEACHER = 1 << 17,
    CASE_NO_GRADIENT = 1 << 18,
    CASE_EXCLUDED = 1 << 19,   // some logits are -inf, in student and teacher
    CASE_BENCH = 1 << 20,      // for the benchmark alone: too large for the reference
    CASE_UNALIGNED = 1 << 21,  // any op: tensors begin one element after an aligned address
    CASE_SORTED = 1 << 22,     // rows of one teacher row follow each other
    CASE_NOT_FINITE = 1 << 23, // rows with NaN, with inf and of -inf alone, among others
    CASE_ODD = 1 << 24,        // with STRIDED: strides that no power of two divides
    CASE_FLOAT8 = 1 << 25,     // e4m3 codes with a scale
    CASE_ROW_SCALED = 1 << 26, // a scale for each row, row 0's 0 with inf in it
    CASE_FRESH = 1 << 27,      // gradients of keys are written instead of added
    CASE_FROM = 1 << 28,       // with ADD: to what lies in another place
};

struct kernel_case {
    const char *op;
    int64_t shape[6]; // letters at each op's builder
    enum dtype type;
    unsigned flags;
    uint64_t seed;
    struct compare_bounds bounds;
    const char *reason; // why these bounds
};

extern const struct kernel_case kernel_cases[];
extern const int kernel_case_count;

enum { CASE_NAME = 160 };

bool kernel_case_has(const struct kernel_case *c, enum case_flags flag);
// "rms_norm_forward/3x257/bf16"
void kernel_case_name(const struct kernel_case *c, char name[CASE_NAME]);
// The ops' own parts: tensors with their inputs; the expected outputs; the call.
void kernel_case_build(const struct kernel_case *c, struct kernel_run *run);
void kernel_case_expect(const struct kernel_case *c, struct kernel_run *run);
void kernel_case_call(const struct kernel_case *c, struct kernel_run *run);
// Floating-point operations of one call, as they are usually counted; 0 where bytes are what matters.
double kernel_case_flops(const struct kernel_case *c);

#endif
