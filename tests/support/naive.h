// Every op again, as plainly as it can be written, in double: what the backends are held against.
// Shares nothing with kernels/ but the formulas. Matrices are packed unless a stride is given.
#ifndef TESTS_SUPPORT_NAIVE_H
#define TESTS_SUPPORT_NAIVE_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/softmax_loss.h"

// c [m, n] = alpha op(a) op(b) + beta d
void naive_gemm(int64_t m, int64_t n, int64_t k, bool transpose_a, bool transpose_b, double alpha,
                const double *a, const double *b, double beta, const double *d, double *c);

// rstd may be NULL.
void naive_rms_norm(int64_t rows, int64_t width, double eps, double offset, const double *x,
                    const double *weight, double *y, double *rstd);
// dx is overwritten, dweight added to (NULL: not wanted).
void naive_rms_norm_backward(int64_t rows, int64_t width, double eps, double offset,
                             const double *x, const double *weight, const double *dy, double *dx,
                             double *dweight);

struct naive_rope {
    int64_t rows, heads, head_dim;
    double eps;
    const double *weight;     // [head_dim] or NULL
    const int32_t *positions; // [rows]
    const double *cos, *sin;  // [table_rows, head_dim / 2]
};
void naive_norm_rope(const struct naive_rope *rope, const double *x, double *y);
void naive_norm_rope_backward(const struct naive_rope *rope, const double *x, const double *dy,
                              double *dx, double *dweight);

// gate_up [rows, 2 width]
void naive_swiglu(int64_t rows, int64_t width, const double *gate_up, double *y);
void naive_swiglu_backward(int64_t rows, int64_t width, const double *gate_up, const double *dy,
                           double *dgate_up);

struct naive_attention {
    int64_t rows, block_size, context, heads, kv_heads, head_dim;
    bool causal;
    double scale;
    const double *q, *k_block, *v_block, *k_context, *v_context; // [., heads, head_dim]
    const int32_t *begin, *end;
};
void naive_attention(const struct naive_attention *in, double *out, double *lse);
// out is what the forward pass gave, as it was stored. Gradients are overwritten.
void naive_attention_backward(const struct naive_attention *in, const double *out,
                              const double *dout, double *dq, double *dk_block, double *dv_block,
                              double *dk_context, double *dv_context);

// Keys of the rows' own steps: key j of row r is row j * step_rows + r * row_rows of k and v.
struct naive_diagonal {
    int64_t rows, steps, heads, kv_heads, head_dim, step_rows, row_rows;
    double scale;
    const double *q, *k, *v; // [., heads, head_dim]
};
void naive_diagonal(const struct naive_diagonal *in, const double *context_out,
                    const double *context_lse, double *out, double *lse);
// Gradients are added to; dk, dv: [steps, rows, kv_heads, head_dim].
void naive_diagonal_backward(const struct naive_diagonal *in, const double *out, const double *lse,
                             const double *dout, double *dq, double *dk, double *dv);

// One row of the loss.
struct naive_loss {
    int64_t vocab;
    const double *student, *teacher; // [V] logits; teacher may be NULL
    int64_t label;
    double weight[LOSS_TERM_COUNT];
    double eta;
    double lambda; // of lk; negative: exp(-eta (1 - tv))
};
struct naive_loss_result {
    double loss, term[LOSS_TERM_COUNT];
    double student_lse, teacher_lse, overlap, confidence, lambda;
    int64_t student_argmax, teacher_argmax;
};
// gradient [V] may be NULL.
void naive_softmax_loss(const struct naive_loss *in, struct naive_loss_result *result,
                        double *gradient);

#endif
