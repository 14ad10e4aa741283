// Buffers of the DFlash drafter, shared by its forward and backward files.
#ifndef DRAFTER_DFLASH_INTERNAL_H
#define DRAFTER_DFLASH_INTERNAL_H

#include "drafter/dflash.h"

struct dflash_layer {
    struct layer_tensor input_norm, qkv, q_norm, k_norm, o, post_norm, gate_up, down;
    struct layer_tensor kv; // k and v of qkv, for the context
    bool sliding;
    // context, kept from forward to the last group's backward
    void *context_kv;  // [T, 2 * kv_heads * head_dim] keys before norm and rope, then values
    void *context_k;   // [T, kv_heads * head_dim]
    float *dcontext_k; // fp32 [T, kv_heads * head_dim] gradient, summed over groups
    float *dcontext_v; // fp32 [T, kv_heads * head_dim]
    // block rows of the group; which of them are a layer's own and which shared: recompute level
    float *x;          // [N, H] input: the residual stream is fp32
    float *input_rstd; // [N]
    void *n1;          // [N, H] after input_layernorm
    void *qkv_rows;    // [N, (heads + 2 kv_heads) * head_dim]
    void *q;           // [N, heads * head_dim] after norm and rope
    void *key;         // [N, kv_heads * head_dim]
    void *attention;   // [N, heads * head_dim]
    float *lse;        // [N, heads]
    // from here on [N] are the wanted rows in the last layer
    float *mid;         // [N, H] after the attention residual
    float *post_rstd;   // [N]
    void *n2;           // [N, H] after post_attention_layernorm
    void *gate_up_rows; // [N, 2 * intermediate]
    void *act;          // [N, intermediate]
};

struct dflash_buffers {
    struct layer_tensor fc, hidden_norm, norm;
    float *cos, *sin; // [max_tokens + B, head_dim / 2]
    // context
    void *fused;       // [T, H] fc output
    float *fused_rstd; // [T]
    void *context;     // [T, H] c
    // group
    int32_t *ids, *row_positions; // [N]
    int32_t *begin_full, *end;    // [N]
    int32_t *begin_sliding;       // [N]
    int32_t *wanted;              // [wanted] block rows that go on after the last layer's attention
    void *picked;     // [wanted, heads * head_dim] their attention; training: dq's memory
    float *last;      // [N, H] output of the last layer
    float *last_rstd; // [N]
    void *hidden;     // [N, H] after the final norm
    // backward
    void *dx;            // [N, H] gradient of hidden, then of the residual stream: over hidden
    void *dnorm;         // [N, H]
    void *dact;          // [N, intermediate]; over act where that is not kept
    void *dattention;    // [N, heads * head_dim]
    void *dq, *dkey;     // [N, heads * head_dim], [N, kv_heads * head_dim]
    void *dqkv;          // [N, (heads + 2 kv_heads) * head_dim]
    float *delta;        // [N, heads]
    float *dcontext;     // fp32 [T, H]
    void *dcontext_rows; // [T, H] compute dtype
    void *dkv;           // [T, 2 * kv_heads * head_dim] gradient of a layer's context_kv
    float *norm_scratch; // [RMS_NORM_PARTS, max(H, head_dim)]
};

void dflash_need_weights(const struct dflash *d, int part);

// Rows of layer l behind its attention, and whether these are only some of the block rows.
int64_t dflash_rows_behind(const struct dflash *d, int64_t l);
bool dflash_picks(const struct dflash *d, int64_t l);
// The attention of these rows: layer l's own, or picked from it.
const void *dflash_attention_behind(const struct dflash *d, const struct backend *backend,
                                    struct stream *stream, int64_t l);

// Whether the level keeps what is cheap to compute again.
bool dflash_keeps_cheap(const struct drafter_options *options);

// Layer `l` from its x to `out` (a row for each of dflash_rows_behind), filling the layer's buffers; NULL: only
// those up to gate_up_rows.
void dflash_layer_forward(struct dflash *d, const struct backend *backend, struct stream *stream,
                          int64_t l, void *out);
struct attention dflash_attention(const struct dflash *d, int64_t l);

#endif
