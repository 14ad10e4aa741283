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
};

typedef void gemm_fn(struct stream *stream, const struct gemm *gemm);
gemm_fn gemm_cpu, gemm_cuda;

#ifdef __cplusplus
}
#endif
#endif
