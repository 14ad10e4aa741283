// Muon's update of one matrix that a rank owns whole: momentum, Newton-Schulz iteration by plain products,
// the step. Which matrices those are: update_rule.h.
#ifndef TRAINER_MUON_H
#define TRAINER_MUON_H

#include "base/memory.h"
#include "configs/config.h"
#include "drafter/params.h"
#include "kernels/backend.h"

// Scratch on the backend for the largest matrix [r, c], s = min(r, c).
struct muon {
    enum dtype type;  // of the products
    int64_t elements; // of the largest matrix
    void *x[2];       // [r, c] before and after an iteration
    void *gram;       // [s, s]
    void *poly;       // [s, s]
    double *squares;  // [1]
    double *squares_scratch;
};

void muon_plan(struct muon *muon, const struct optimizer_config *optimizer,
               const struct params *params, enum dtype type, struct arena *arena);

struct muon_tensor {
    int64_t rows, columns;
    float *param, *m, *grad; // grad is overwritten
    void *copy;              // as in struct adamw
    enum dtype copy_type;
    double lr, weight_decay, grad_scale;
};

void muon_apply(const struct muon *muon, const struct optimizer_config *optimizer,
                const struct backend *backend, struct stream *stream,
                const struct muon_tensor *tensor);

// One iteration for each matrix that Muon takes, whoever owns it, on scratch: every product that an update
// consists of on any rank, for a choice of algorithms. No tensor is touched.
void muon_show_products(const struct muon *muon, const struct optimizer_config *optimizer,
                        const struct params *params, const struct backend *backend,
                        struct stream *stream);

// What the orthogonal matrix is multiplied by, besides the learning rate.
double muon_factor(const struct optimizer_config *optimizer, int64_t rows, int64_t columns);
// Operations of the products of one update of one matrix.
double muon_flops(const struct optimizer_config *optimizer, int64_t rows, int64_t columns);

#endif
