// Buffers of the EAGLE-3 drafter, and a layer on a set of rows, shared by its files.
#ifndef DRAFTER_EAGLE3_INTERNAL_H
#define DRAFTER_EAGLE3_INTERNAL_H

#include "drafter/eagle3.h"

// What one layer computes for n rows. q and kv: heads * head_dim and kv_heads * head_dim.
struct eagle3_rows {
    float *x;        // [n, H] input: the residual stream is fp32
    float *rstd1;    // [n]
    void *n1;        // [n, H] after hidden_norm (first layer) or input_layernorm
    float *residual; // [n, H] what attention is added to: x, or fp32 n1 with norm_before_residual
    void *q_raw;     // [n, q] before norm and rotation; without q_norm the same memory as q
    void *q;         // [n, q]
    void *kv;        // [n, 2 kv] keys before norm and rotation, then values
    void *key;       // [n, kv]
    void *attention; // [n, q]
    float *lse;      // [n, heads]
    float *mid;      // [n, H] after the attention residual
    float *rstd2;    // [n]
    void *n2;        // [n, H] after post_attention_layernorm
    void *gate_up;   // [n, 2 * intermediate]
    // [n, intermediate] of the running step: comes back with its gradient, unless all are kept.
    void *act;
};

struct eagle3_layer {
    // q, kv and qkv: of the columns that n1 is multiplied with; q, k and v are joined
    struct layer_tensor norm1, q, kv, qkv, q_norm, k_norm, o, norm2, gate_up, down;
    bool sliding;
    struct eagle3_rows context; // [T]
    struct eagle3_rows steps;   // [steps, count] where it is kept, else [count] for all steps
    float *dkey, *dvalue;       // fp32 [T, kv] gradients of the context's, summed over groups
};

enum { EAGLE3_ROW_ARRAYS = 5 }; // from token to step_sliding

struct eagle3_buffers {
    struct layer_tensor fc, input_norm, norm;        // input_norm: norm_before_fc
    struct layer_tensor fc_norm[DRAFTER_MAX_LAYERS]; // fc_norm: one for each feature
    struct layer_tensor embed_norm, embed_qkv;       // the first layer's embedding half
    float *cos, *sin;                                // [table rows, head_dim / 2]
    // context
    int32_t *ids;                              // [T] token ids
    int32_t *next;                             // [T] position whose embedding step 0 reads
    int32_t *places;                           // [T] rotary positions of step 0
    int32_t *begin_full, *begin_sliding, *end; // [T] keys that step 0 sees; more than one layer
    float *ones;        // [H], of norm_before_fc [L * H]: the weight of norms without one
    void *embed_part;   // [T, q + 2 kv] the embedding's part of the first layer's products
    float *dembed_part; // [T, q + 2 kv] fp32; added up once: in compute dtype
    void *dx_context;   // [T, H] gradient of the last layer's context x, then of those before
    // scratch of the context
    void *normed;       // [T, L * H] features under norms before fc
    void *embed_normed; // [T, H]
    // group: [steps, count], behind one another as eagle3_apart says
    int32_t *token;       // position whose embedding is read
    int32_t *step_places; // rotary positions
    int32_t *step_full, *step_end, *step_sliding;
    int32_t *position; // [count] t
    float *last;       // [steps, count, H] output of the last layer; scoring: [count, H]
    float *last_rstd;  // [steps, count]
    void *hidden;      // [steps, count, H] after the final norm; then its gradient and that of h
    // backward, for rows of a step or of the context; dmid and dqkv where gradients of weights wait for all steps, and
    // dact where it also brings back their activations: [steps, count]
    void *dnorm;      // [n, H]
    void *dact;       // [n, intermediate]
    void *dmid;       // [steps, count, H]; only there
    void *dattention; // [n, q]
    void *dq;         // [n, q]
    void *dqkv;       // [n, q + 2 kv]
    int32_t *readers; // [steps + 1, T] row of dqkv that reads a token's embedding; only there. The
        // last: of the context's, which lie behind the steps' where they are added up at once
    float *delta;         // [n, heads]
    float *dkey, *dvalue; // fp32 [layers, steps - 1, count, kv] of the steps' own keys
    float *norm_scratch;
    float *sums; // fp32, largest matrix behind such a norm: its gradient before the norm's weight
    // host
    int32_t *h_context; // [6, T]
    int32_t *h_group;   // as token and what is behind it, then position
    int32_t *h_readers; // as readers; only there
};

// One layer on the rows of a step or of the context.
struct eagle3_pass {
    int64_t l, step; // step -1: the context
    int64_t rows;
    bool queries; // whole; false: keys and values alone, as of the last layer's context
    bool keys;    // false: step 0, whose keys and values are the context's
    struct eagle3_rows at;
    const int32_t *token, *places, *begin, *end;
    float *out; // [rows, H]
    // backward
    void *dact;          // [rows, intermediate]
    void *dqkv;          // [rows], those of q, keys and values that the pass has, dqkv_stride apart
    int64_t dqkv_stride; // elements
    float *dkey, *dvalue; // fp32 [rows, kv]
    // gradients of out, mid and x, which is added to unless it is mid's; they may be one
    void *dout, *dmid, *dx;
};

struct eagle3_pass eagle3_step_pass(const struct eagle3 *e, int64_t l, int64_t step);
struct eagle3_pass eagle3_context_pass(const struct eagle3 *e, int64_t l);
void eagle3_pass_forward(struct eagle3 *e, const struct backend *backend, struct stream *stream,
                         const struct eagle3_pass *pass);
// Brings back what the recompute level (the context: as RECOMPUTE_LEVEL_LAYER) did not keep.
void eagle3_pass_recompute(struct eagle3 *e, const struct backend *backend, struct stream *stream,
                           const struct eagle3_pass *pass);
// Without queries dout and dmid are not read, and dx is added to.
void eagle3_pass_backward(struct eagle3 *e, const struct backend *backend, struct stream *stream,
                          const struct eagle3_pass *pass);
// Its attention over the context, and over the own keys of the steps up to its own.
struct attention eagle3_attention(const struct eagle3 *e, const struct eagle3_pass *pass);
struct diagonal eagle3_diagonal(const struct eagle3 *e, const struct eagle3_pass *pass);
// The input of step 0, which starts behind the last layer but one, as it is and normed: the context's rows of the
// positions.
void eagle3_step_input(const struct eagle3 *e, const struct backend *backend,
                       struct stream *stream);

// The position whose embedding position t reads at a step. Positions of one step read different ones.
int32_t eagle3_token(const struct row *row, int32_t t, int64_t step);

// Of the context: g and the embedding's part, and their backward passes.
void eagle3_features_forward(struct eagle3 *e, const struct backend *backend,
                             struct stream *stream);
void eagle3_features_backward(struct eagle3 *e, const struct backend *backend,
                              struct stream *stream);
void eagle3_embedding_forward(struct eagle3 *e, const struct backend *backend,
                              struct stream *stream);
void eagle3_embedding_backward(struct eagle3 *e, const struct backend *backend,
                               struct stream *stream);

void eagle3_need_weights(const struct eagle3 *e, int part);

int64_t eagle3_q(const struct eagle3 *e);  // heads * head_dim
int64_t eagle3_kv(const struct eagle3 *e); // kv_heads * head_dim
// From one array of a group's rows to the next.
int64_t eagle3_apart(int64_t rows);
// Columns [first, first + H) of a matrix in compute dtype.
struct layer_tensor eagle3_columns(const struct drafter_options *options,
                                   struct layer_tensor matrix, int64_t first);
// Most positions of a group.
int64_t eagle3_capacity(const struct eagle3 *e);
// Whether each step keeps its own of what is computed again from this level on.
bool eagle3_keeps(const struct eagle3 *e, enum recompute_level level);
// Whether gradients of weights wait for all steps of a group, to be one product each: what they are made of is
// kept so long. With one layer that is little more than is kept anyway.
bool eagle3_waits(const struct eagle3 *e);
// Whether steps that wait have all positions of a row, so that gradients by token are added up once, for all steps and
// the context.
bool eagle3_sums_once(const struct eagle3 *e);
// Whether the MLP's activations of all steps are kept for them.
bool eagle3_keeps_act(const struct eagle3 *e);
// Whether steps that wait go back through the norms between them at once, without what the later one read.
bool eagle3_chains(const struct eagle3 *e);

#endif
