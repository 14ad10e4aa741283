// The keys of a row's own earlier steps (EAGLE-3): after attention over the context alone, a row also
// attends to one key of each step so far, which no other row sees: the diagonal of every step's keys. The
// forward op merges them into what attention gave; the backward op adds their part, for which attention's
// own backward pass takes the merged out and lse. Softmax in fp32. Query head h reads key head
// h / (heads / kv_heads).
#ifndef KERNELS_ATTENTION_DIAGONAL_H
#define KERNELS_ATTENTION_DIAGONAL_H

#include <stdbool.h>

#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { DIAGONAL_MOST_STEPS = 16 };

struct diagonal {
    int64_t rows;  // N
    int64_t steps; // own keys of a row, at most DIAGONAL_MOST_STEPS
    int64_t heads, kv_heads, head_dim;
    float scale; // as for the context
    enum dtype type;
    const void *q; // [N, heads, head_dim], packed
    // Key j of row r: [kv_heads, head_dim] at k + j * k_step + r * k_stride, counted in elements.
    const void *k, *v;
    int64_t k_step, k_stride, v_step, v_stride;
    void *out;  // [N, heads, head_dim], packed: of the context, becomes that of all; backward: read
    float *lse; // [N, heads], likewise; -inf, with out 0, for a row that sees no context

    // backward only
    const void *dout; // [N, heads, head_dim]
    void *dq;         // [N, heads, head_dim], added to
    float *dk, *dv;   // fp32 [steps, N, kv_heads, head_dim], packed, added to
    bool fresh;       // dk and dv are written instead
};

typedef void diagonal_forward_fn(struct stream *stream, const struct diagonal *op);
typedef void diagonal_backward_fn(struct stream *stream, const struct diagonal *op);
diagonal_forward_fn diagonal_forward_cpu, diagonal_forward_cuda;
diagonal_backward_fn diagonal_backward_cpu, diagonal_backward_cuda;

#ifdef __cplusplus
}
#endif
#endif
