// What the environment could change and a resumed run must not: chosen at the first start, written to
// execution.json in the run folder, obeyed on resume.
#ifndef TRAINER_EXECUTION_H
#define TRAINER_EXECUTION_H

#include <stdint.h>

#include "base/error.h"
#include "configs/config.h"
#include "drafter/drafter_sizes.h"
#include "kernels/gemm_algorithms.h"

struct execution {
    char device[16];    // "cpu", "cuda"
    char hardware[128]; // CPU or GPU model
    char library[128];  // BLAS or CUDA library and its version
    char compute[8];    // "fp32", "bf16"
    char logits[8];
    char recompute[8]; // "none", "cheap", "layer"
    char kernels[8];   // "auto", "generic"
    int64_t group_rows, chunk_rows;
    int64_t threads;
    int64_t world_size;
    struct gemm_algorithms gemm; // found by timing once all of the above is settled; CUDA only
};

// The most block rows that a row can need: every position but the last an anchor.
int64_t execution_most_rows(const struct config *config, const struct drafter_sizes *sizes);

int execution_write(const struct execution *execution, const char *path, struct error *err);
int execution_read(struct execution *execution, const char *path, struct error *err);
// Whether a step of this config and these sizes can be cut as an execution that was read says: a file may
// have been changed, or be of another run. A line for every member that is out of its range.
int execution_check(const struct execution *execution, const struct config *config,
                    const struct drafter_sizes *sizes, const char *path, struct error *err);
// A line for every field that differs; -1 when any does. The algorithms follow from the rest and are
// not compared.
int execution_compare(const struct execution *before, const struct execution *now,
                      struct error *err);

#endif
