// Owns matrix products on CUDA, through cuBLASLt. A row-major C = op(A) op(B) is the column-major
// C^T = op(B)^T op(A)^T of the same memory, so the library's first operand is B. The algorithm is the
// first that the library proposes for a shape; splits of the inner dimension are allowed only where
// their parts are added in a fixed order. fp32 is multiplied as fp32, never as TF32.
#include "kernels/gemm.h"

#include <string.h>

#include "kernels/arguments.h"
#include "kernels/cuda_internal.cuh"

static cudaDataType_t data_type(enum dtype type)
{
    return is_bf16(type) ? CUDA_R_16BF : CUDA_R_32F;
}

static struct gemm with_defaults(const struct gemm *gemm)
{
    struct gemm g = gemm_with_strides(gemm);
    BUG_UNLESS(g.a_type == g.c_type || g.c_type == DTYPE_F32);
    if (g.d == NULL || g.beta == 0.0f)
        g.d = g.c;
    return g;
}

// The largest power of two that divides the address, at most 256.
static uint32_t alignment(const void *pointer)
{
    uintptr_t address = (uintptr_t)pointer | 256;
    return (uint32_t)(address & (~address + 1));
}

static struct gemm_key key_of(const struct gemm *g)
{
    struct gemm_key key;
    memset(&key, 0, sizeof(key)); // compared as bytes
    key.m = g->m;
    key.n = g->n;
    key.k = g->k;
    key.lda = g->lda;
    key.ldb = g->ldb;
    key.ldc = g->ldc;
    key.transpose_a = g->transpose_a;
    key.transpose_b = g->transpose_b;
    key.in_type = g->a_type;
    key.out_type = g->c_type;
    key.align_a = alignment(g->a);
    key.align_b = alignment(g->b);
    key.align_c = alignment(g->c);
    key.align_d = alignment(g->d);
    return key;
}

static size_t hash(const struct gemm_key *key)
{
    const unsigned char *byte = (const unsigned char *)key;
    uint64_t value = 0xcbf29ce484222325u;
    for (size_t i = 0; i < sizeof(*key); i++)
        value = (value ^ byte[i]) * 0x100000001b3u;
    return (size_t)(value >> 32) % GEMM_CHOICES;
}

// The library's view of a product.
struct problem {
    cublasLtMatmulDescOpaque_t product;
    cublasLtMatrixLayoutOpaque_t a, b, c; // a: our B, b: our A
};

static void problem_init(struct problem *p, const struct gemm *g)
{
    cublasOperation_t a = g->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t b = g->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    uint64_t m = (uint64_t)g->m, n = (uint64_t)g->n, k = (uint64_t)g->k;
    cudaDataType_t in = data_type(g->a_type), out = data_type(g->c_type);
    cublas_check(cublasLtMatmulDescInit(&p->product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    cublas_check(
        cublasLtMatmulDescSetAttribute(&p->product, CUBLASLT_MATMUL_DESC_TRANSA, &a, sizeof(a)));
    cublas_check(
        cublasLtMatmulDescSetAttribute(&p->product, CUBLASLT_MATMUL_DESC_TRANSB, &b, sizeof(b)));
    cublas_check(cublasLtMatrixLayoutInit(&p->a, in, g->transpose_b ? k : n, g->transpose_b ? n : k,
                                          g->ldb));
    cublas_check(cublasLtMatrixLayoutInit(&p->b, in, g->transpose_a ? m : k, g->transpose_a ? k : m,
                                          g->lda));
    cublas_check(cublasLtMatrixLayoutInit(&p->c, out, n, m, g->ldc));
}

static void set_preference(cublasLtMatmulPreference_t preference,
                           cublasLtMatmulPreferenceAttributes_t attribute, uint32_t value)
{
    cublas_check(
        cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
}

static void choose(struct stream *stream, struct problem *p, struct gemm_choice *choice)
{
    const struct gemm_key *key = &choice->key;
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasLtMatmulHeuristicResult_t result;
    uint64_t workspace = stream->workspace_bytes;
    int found = 0;
    memset(&result, 0, sizeof(result));
    cublas_check(cublasLtMatmulPreferenceInit(&preference));
    cublas_check(cublasLtMatmulPreferenceSetAttribute(
        &preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof(workspace)));
    set_preference(&preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                   CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    set_preference(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key->align_b);
    set_preference(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key->align_a);
    set_preference(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key->align_d);
    set_preference(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key->align_c);
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        stream->blas, &p->product, &p->a, &p->b, &p->c, &p->c, &preference, 1, &result, &found);
    if (status != CUBLAS_STATUS_SUCCESS || found == 0 || result.state != CUBLAS_STATUS_SUCCESS)
        die("cuBLASLt has no algorithm for a product of m %lld, n %lld, k %lld (%s): %s",
            (long long)key->m, (long long)key->n, (long long)key->k,
            dtype_name((enum dtype)key->in_type), cublasLtGetStatusString(status));
    choice->algorithm = result.algo;
    choice->known = true;
}

void gemm_cuda(struct stream *stream, const struct gemm *gemm)
{
    struct gemm g = with_defaults(gemm);
    if (g.m == 0 || g.n == 0)
        return;
    if (stream->blas == NULL)
        cublas_check(cublasLtCreate(&stream->blas));
    struct problem problem;
    problem_init(&problem, &g);
    struct gemm_key key = key_of(&g);
    struct gemm_choice *choice = &stream->choices[hash(&key)];
    if (!choice->known || memcmp(&choice->key, &key, sizeof(key)) != 0) {
        choice->key = key;
        choose(stream, &problem, choice);
    }
    // In the library's words C is what is added and D the result.
    cublas_check(cublasLtMatmul(stream->blas, &problem.product, &g.alpha, g.b, &problem.a, g.a,
                                &problem.b, &g.beta, g.d, &problem.c, g.c, &problem.c,
                                &choice->algorithm, stream->workspace, stream->workspace_bytes,
                                stream->cuda));
}
