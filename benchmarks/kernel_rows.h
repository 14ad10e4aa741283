// What bench_kernels times: every op with its arguments at the sizes of real models, on random data.
#ifndef BENCHMARKS_KERNEL_ROWS_H
#define BENCHMARKS_KERNEL_ROWS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "kernels/gemm_algorithms.h"
#include "kernels/kernels.h"
#include "tests/kernel_cases.h"

enum {
    PATTERN = 1 << 20, // random numbers, repeated in larger tensors
    BENCH_TENSORS = 16
};

// Sizes of a model's drafter and of a step.
struct sizes {
    const char *name;
    int64_t n; // block rows of a group
    int64_t t; // tokens of a row
    int64_t h; // hidden
    int64_t heads, kv_heads, head_dim;
    int64_t i;          // intermediate
    int64_t l;          // captured layers
    int64_t v;          // vocabulary
    int64_t c;          // rows of a chunk of the loss
    int64_t parameters; // trained
};

extern const struct sizes bench_sizes[];
extern const int bench_size_count;

struct bench {
    const struct backend *backend;
    struct stream *stream;
    enum dtype type;     // of what the ops compute with
    const char *only;    // parts of the names that are timed; NULL: all
    double tune_seconds; // for choosing the algorithm of a product
    FILE *csv;           // NULL: none
    void *flush;         // [FLUSH_BYTES]
    void *pattern[2];    // [PATTERN] standard normal, fp32 and bf16, on the device
    void *positive;      // [PATTERN] their absolute values, fp32
    struct gemm_algorithms *algorithms;
    double copy_rate, flop_rate; // ceilings: bytes and operations a second
    char device[128];
    // of the op that is being timed:
    void *tensors[BENCH_TENSORS];
    int tensor_count;
    double bytes; // that must be moved: inputs read once, outputs written once
};

// An op with its arguments, ready to be called.
struct job {
    union {
        struct gemm gemm;
        struct rms_norm rms_norm;
        struct norm_rope norm_rope;
        struct norm_chain norm_chain;
        struct norm_chain_gradient norm_chain_backward;
        struct norm_split norm_split;
        struct swiglu swiglu;
        struct gather_rows gather_rows;
        struct scatter_rows scatter_rows;
        struct gather_sum gather_sum;
        struct context_load context_load;
        struct diagonal diagonal;
        struct vocab_scan vocab_scan;
        struct draft_overlap draft_overlap;
        struct adamw adamw;
        struct sum_squares sum_squares;
        struct convert convert;
        struct muon_momentum muon_momentum;
        struct muon_normalise muon_normalise;
        struct muon_update muon_update;
        struct average average;
        struct exchange exchange;
    } op;
    int32_t planes[8];
    const struct kernel_case *kernel_case; // instead of op
    struct kernel_run *run;
    void (*call)(const struct bench *bench, struct job *job);
    double flops;
};

// Memory of the op that is being timed: an input (random), an output, both; its bytes are counted.
void *bench_take_in(struct bench *bench, enum dtype type, int64_t count);
void *bench_take_out(struct bench *bench, enum dtype type, int64_t count);
// Ends the op: its memory is given back.
void bench_give_all(struct bench *bench);

// Binds the arguments of an op at some sizes.
typedef void bind_fn(struct bench *bench, const struct sizes *s, struct job *job);

struct row {
    const char *op, *variant;
    bind_fn *bind;
};

extern const struct row bench_rows[];
extern const int bench_row_count;

// Weights of a drafter's layer and of its inputs, and the passes over them.
enum { BENCH_WEIGHTS = 6, BENCH_PASSES = 3 };
extern const char *const bench_passes[BENCH_PASSES]; // "forward", ...
// The weight's name, NULL when that pass is never needed.
const char *bench_weight_name(int weight, int pass);
void bench_bind_weight(struct bench *bench, const struct sizes *s, int weight, int pass,
                       struct job *job);
// C[side, side] = A B of square matrices, the second transposed.
void bench_bind_square(struct bench *bench, int64_t side, struct job *job);
// The smallest conversion.
void bench_bind_call(struct bench *bench, struct job *job);

#endif
