// What a draft vocabulary needs beyond the loss over it: numbers of the teacher over the whole
// vocabulary. The head's rows come as columns of logits in this order: the ids that are kept, ascending,
// then the others, ascending. So the draft id of a kept token is its column.
#ifndef KERNELS_VOCAB_H
#define KERNELS_VOCAB_H

#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

// Log-sum-exp and largest logit of each row over all columns. NaN is never the largest; where all
// others are -inf, column 0 is. A row with NaN or +inf, or of -inf alone, has a lse of NaN.
struct vocab_scan {
    int64_t rows;             // U
    int64_t kept, others;     // Vd, V - Vd
    enum dtype logits_type;   // fp32 or bf16
    const void *kept_logits;  // [U, Vd]
    const void *other_logits; // [U, V - Vd]
    const int32_t *ids;       // [V] target id of each column
    float *lse;               // [U] natural
    int32_t *argmax; // [U] column of the largest logit; among equals that of the smallest id
};

// Expected acceptance against the whole vocabulary: sum over the kept tokens of min(q, p), q of the
// student over the draft vocabulary, p of the teacher over all.
struct draft_overlap {
    int64_t rows, vocab;        // C, Vd
    enum dtype logits_type;     // of student and teacher: fp32 or bf16
    const void *student;        // [C, Vd]
    const void *teacher;        // [U, Vd] logits of the kept tokens
    const int32_t *teacher_row; // [C] row of `teacher` and teacher_lse
    const float *teacher_lse;   // [U] over the whole vocabulary
    float *overlap;             // [C]
};

// scale[r] = weight[r], or 0 where the teacher's largest logit is of a token that is not kept.
struct mask_rows {
    int64_t rows, kept;         // C, Vd
    const float *weight;        // [C]
    const int32_t *teacher_row; // [C]
    const int32_t *argmax;      // [U] a column of vocab_scan
    float *scale;               // [C]; may be `weight`
};

typedef void vocab_scan_fn(struct stream *stream, const struct vocab_scan *op);
typedef void draft_overlap_fn(struct stream *stream, const struct draft_overlap *op);
typedef void mask_rows_fn(struct stream *stream, const struct mask_rows *op);
vocab_scan_fn vocab_scan_cpu, vocab_scan_cuda;
draft_overlap_fn draft_overlap_cpu, draft_overlap_cuda;
mask_rows_fn mask_rows_cpu, mask_rows_cuda;

#ifdef __cplusplus
}
#endif
#endif
