// Attention of block rows (DFlash): a query sees context positions [begin, end) of the packed row,
// given per query, and the rows of its own block (all of them, or only up to itself). No mask exists.
// With block_size 0 (EAGLE-3) it sees the context alone. Softmax in fp32. Grouped queries: query head h
// reads key head h / (heads / kv_heads).
#ifndef KERNELS_ATTENTION_H
#define KERNELS_ATTENTION_H

#include <stdbool.h>

#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

struct attention {
    int64_t rows;       // N, a multiple of block_size; row r is slot r % block_size of its block
    int64_t block_size; // B; 0: no blocks, no k_block, v_block, dk_block, dv_block, and any N
    int64_t context;    // T
    int64_t heads, kv_heads, head_dim;
    bool causal; // own block: slot j sees slots <= j only
    float scale; // head_dim^-1/2
    enum dtype type;
    const void *q;         // [N, heads, head_dim], packed
    const void *k_block;   // [N, kv_heads, head_dim], packed
    const void *v_block;   // [N, kv_heads, head_dim], rows v_block_stride apart
    const void *k_context; // [T, kv_heads, head_dim], packed
    const void *v_context; // [T, kv_heads, head_dim], rows v_context_stride apart
    int64_t v_block_stride, v_context_stride; // elements
    const int32_t *begin, *end;               // [N] context seen by each row; begin >= end: none
    // A row that sees nothing, which a row with a block never is, has out 0, lse -inf and gradients 0.
    void *out;  // [N, heads, head_dim], packed; backward: read
    float *lse; // [N, heads] natural log-sum-exp of the scaled scores; backward: read

    // backward only
    const void *dout;  // [N, heads, head_dim]
    float *delta;      // [N, heads] scratch
    void *dq;          // [N, heads, head_dim], overwritten
    void *dk_block;    // [N, kv_heads, head_dim], packed, overwritten
    void *dv_block;    // [N, kv_heads, head_dim], rows v_block_stride apart, overwritten
    float *dk_context; // fp32 [T, kv_heads, head_dim], packed, added to
    float *dv_context; // fp32 [T, kv_heads, head_dim], packed, added to
};

typedef void attention_forward_fn(struct stream *stream, const struct attention *op);
typedef void attention_backward_fn(struct stream *stream, const struct attention *op);
attention_forward_fn attention_forward_cpu, attention_forward_cuda;
attention_backward_fn attention_backward_cpu, attention_backward_cuda;

#ifdef __cplusplus
}
#endif
#endif
