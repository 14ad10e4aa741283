// C[m,n] = alpha * op(A)[m,k] op(B)[k,n] + beta * D[m,n], row-major, accumulated in fp32.
#ifndef KERNELS_GEMM_H
#define KERNELS_GEMM_H

#include <stdbool.h>

#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

struct gemm {
    int64_t m, n, k;
    bool transpose_a; // A is stored [k, m] instead of [m, k]
    bool transpose_b; // B is stored [n, k] (as weights [out, in] are) instead of [k, n]
    float alpha, beta;
    const void *a, *b;
    const void
        *d; // added input, same shape, dtype and stride as C; NULL: C itself. Unread if beta is 0
    void *c;
    int64_t lda, ldb, ldc;             // elements between rows as stored; 0: packed
    enum dtype a_type, b_type, c_type; // fp32 or bf16; A and B alike
    // For C of few tiles and a long k: products over `parts` equal parts of k, computed side by side,
    // then added in order. C is fp32, A is not transposed, beta is 0.
    int64_t parts;       // 0 or 1: k as a whole
    float *part_sums;    // [m, parts, n] scratch; no element of it is one of A, B or C
    int64_t part_stride; // elements between its rows; 0: packed
    // Of scratch alone, and of no other count of rows later: where algorithms are timed, for these sizes
    // only, A and B may lose their contents, too.
    bool fixed;
};

typedef void gemm_fn(struct stream *stream, const struct gemm *gemm);
gemm_fn gemm_cpu, gemm_cuda;

#ifdef __cplusplus
}
#endif
#endif
