// The table of trainable tensors. Every tensor is one row, by name: initial weights, weight decay,
// gradient norms, checkpoints, exports and ownership by ranks all come from it. Values of all tensors
// lie in flat arrays of `elements` values (weights in compute dtype; masters, gradients and both
// moments in fp32), a tensor at its offset.
#ifndef DRAFTER_PARAMS_H
#define DRAFTER_PARAMS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

struct param {
    char name[96];    // as in the layout that servers read, e.g. "layers.0.self_attn.q_proj.weight"
    int dims;         // 1 or 2
    int64_t shape[2]; // [out, in] or [width]
    int64_t offset;   // elements
    int64_t count;    // elements
    bool norm;        // starts at 1 and never decays; else normal with init_std
    // elements, in an array of the norms alone, each aligned to PARAM_ALIGNMENT; 0 for matrices
    int64_t norm_offset;
    int part; // of the model, see drafter_params
};

struct params {
    struct param *items;
    size_t count;
    int64_t elements;      // of the flat arrays, padding included
    int64_t trainable;     // without padding
    int64_t norm_elements; // of an array of the norms alone, padding included
    int parts;
};

void params_release(struct params *params);
// Appends a tensor. `joined`: directly behind the last one, so that both are one matrix for a GEMM;
// else aligned to PARAM_ALIGNMENT elements.
const struct param *params_add(struct params *params, const char *name, int dims, int64_t rows,
                               int64_t columns, bool norm, bool joined);
const struct param *params_find(const struct params *params, const char *name);
// Initial fp32 values into flat [elements] (padding 0): a function of (seed, tensor name, index) only.
void params_initialize(const struct params *params, uint64_t seed, double init_std, float *flat);

// The same for values [first, first + count) of the flat array.
void params_values(const struct params *params, uint64_t seed, double init_std, int64_t first,
                   int64_t count, float *out);

enum { PARAM_ALIGNMENT = 64 };

#endif
