// The loss of a chunk of rows over the whole vocabulary: statistics, every loss term and the
// unweighted gradient with respect to the student's logits, from one visit to each row.
// Per row, teacher p = softmax(t), student q = softmax(z), m = (p + q) / 2, x the data token:
//   kl          sum p (log p - log q)                     d/dz = q - p
//   reverse_kl  sum q (log q - log p)                     d/dz = q (log q - log p - reverse_kl)
//   js          (KL(p|m) + KL(q|m)) / 2                   d/dz = q (log(q/m) - KL(q|m)) / 2
//   ce_teacher  -log q[argmax p]                          d/dz = q - onehot(argmax p)
//   ce_data     -log q[x]                                 d/dz = q - onehot(x)
//   tv          1 - sum min(p, q)                         d/dz = -q (1[q <= p] - s), s = sum of q where q <= p
//   nla         -log(1 - tv)                              d/dz = d tv / (1 - tv)
//   lk          lambda kl + (1 - lambda) tv, lambda = exp(-eta (1 - tv)) taken as a constant
// A logit of -inf is a token of probability 0 and adds 0; reverse_kl leaves out tokens that the teacher
// excludes so. A row with NaN or +inf, or of -inf alone, gives NaN and concerns no other row.
// (kl, tv, js, nla, lk as in the published speculators package; tv's subgradient as derived there.)
#ifndef KERNELS_SOFTMAX_LOSS_H
#define KERNELS_SOFTMAX_LOSS_H

#include <stdbool.h>

#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

enum loss_term {
    LOSS_KL,
    LOSS_REVERSE_KL,
    LOSS_JS,
    LOSS_CE_TEACHER,
    LOSS_CE_DATA,
    LOSS_TV,
    LOSS_NLA,
    LOSS_LK,
    LOSS_TERM_COUNT
};

struct softmax_loss {
    int64_t rows, vocab;        // C rows of V logits
    enum dtype logits_type;     // of student and teacher: fp32 or bf16
    const void *student;        // [C, V]
    const void *teacher;        // [U, V]; NULL: no teacher, then only ce_data may have weight
    const int32_t *teacher_row; // [C] row of `teacher` that row is matched with
    const int32_t *label;       // [C] data token; -1: none (ce_data then contributes 0)
    float weight[LOSS_TERM_COUNT];
    float lk_eta;
    void *gradient;           // [C, V] of dtype gradient_type; may be `student` (rows then keep the
    enum dtype gradient_type; // logits' stride in bytes); NULL: statistics only
    int64_t gradient_stride;  // elements of gradient_type between rows of gradient

    float *loss;  // [C] sum of weight * term
    float *terms; // [C, LOSS_TERM_COUNT] every term of nonzero weight, others 0; NULL: not wanted
    float *student_lse, *teacher_lse; // [C]; teacher_lse 0 without a teacher
    float *overlap;                   // [C] sum min(p, q); without a teacher q[label]
    // [C] q[argmax p]; q[label] (0: no label) without a teacher or when ce_data is the only term
    float *confidence;
    int32_t *student_argmax, *teacher_argmax; // [C] lowest index of the largest logit; without a
                                              // teacher teacher_argmax = label
};

typedef void softmax_loss_fn(struct stream *stream, const struct softmax_loss *op);
softmax_loss_fn softmax_loss_cpu, softmax_loss_cuda;

#ifdef __cplusplus
}
#endif
#endif
