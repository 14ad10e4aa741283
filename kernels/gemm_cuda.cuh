// What choosing and running an algorithm for a product on CUDA share.
#ifndef KERNELS_GEMM_CUDA_CUH
#define KERNELS_GEMM_CUDA_CUH

#include <cublasLt.h>

#include "kernels/cuda_internal.cuh"
#include "kernels/gemm_algorithms.h"

#define cublas_check(call) cublas_check_status((call), #call, __FILE__, __LINE__)

static inline void cublas_check_status(cublasStatus_t status, const char *call, const char *file,
                                       int line)
{
    if (status != CUBLAS_STATUS_SUCCESS)
        log_die(file, line, "cuBLASLt: %s: %s", call, cublasLtGetStatusString(status));
}

// The library's view of a product. A row-major C = op(A) op(B) is the column-major
// C^T = op(B)^T op(A)^T of the same memory, so the library's first operand is B.
struct gemm_problem {
    cublasLtMatmulDescOpaque_t product;
    cublasLtMatrixLayoutOpaque_t a, b, c; // a: our B, b: our A
};

// Bytes that the addresses are multiples of, at most 256.
struct gemm_alignment {
    uint32_t a, b, c, d;
};

// How one product is computed, at these addresses' alignment.
struct gemm_plan {
    bool known;
    struct gemm_product product;
    struct gemm_alignment alignment;
    struct gemm_problem problem;
    cublasLtMatmulAlgo_t algorithm;
};

// An algorithm chosen by timing.
struct gemm_tuned {
    struct gemm_product product; // its rows are the bucket
    cublasLtMatmulAlgo_t algorithm;
};

enum { GEMM_PLANS = 256, GEMM_RECORDED = 128 };

struct gemm_state {
    cublasLtHandle_t blas;
    struct gemm_plan plans[GEMM_PLANS]; // by hash; a later product takes the place
    int tuned_count;
    struct gemm_tuned tuned[GEMM_ALGORITHMS];
    bool record;
    int recorded_count;
    struct gemm recorded[GEMM_RECORDED];  // of each product the call with the most rows
    int calls_left_out, buckets_left_out; // for which recorded, tuned had no room
};

// The stream's, made at the first call.
struct gemm_state *gemm_state_of(struct stream *stream);

void gemm_problem_init(struct gemm_problem *problem, const struct gemm_product *product);
struct gemm_alignment gemm_alignment_of(const struct gemm *gemm);
// Up to `most` algorithms, the one that the library holds for the fastest first. Returns how many.
int gemm_candidates(struct stream *stream, struct gemm_problem *problem,
                    const struct gemm_alignment *alignment, int most,
                    cublasLtMatmulHeuristicResult_t *candidates);
// Whether the algorithm computes the product in this stream's workspace, in a fixed order of additions.
bool gemm_algorithm_works(struct stream *stream, struct gemm_problem *problem,
                          const struct gemm_alignment *alignment,
                          const cublasLtMatmulAlgo_t *algorithm);
void gemm_run(struct stream *stream, const struct gemm *gemm, struct gemm_problem *problem,
              const cublasLtMatmulAlgo_t *algorithm);
// Forgets how products were computed so far.
void gemm_forget_plans(struct gemm_state *state);

#endif
