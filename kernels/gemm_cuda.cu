// Owns matrix products on CUDA, through cuBLASLt. A product is computed with the algorithm that was
// chosen for its bucket of rows, where there is one and it works at these sizes; else with the first
// that the library proposes, which depends on sizes and alignment only. Splits of the inner dimension
// are allowed only where their parts are added in a fixed order. fp32 is multiplied as fp32, never as
// TF32. Parts of the inner dimension are a batch of products, whose sums an own kernel adds in order.
// Does not own the choice (see gemm_tune_cuda.cu).
#include "kernels/gemm.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/arguments.h"
#include "kernels/cuda_vector.cuh"
#include "kernels/gemm_cuda.cuh"

enum { SUM_THREADS = 256 }; // of a row of C

static cudaDataType_t data_type(enum dtype type)
{
    return is_bf16(type) ? CUDA_R_16BF : CUDA_R_32F;
}

struct gemm_state *gemm_state_of(struct stream *stream)
{
    BUG_UNLESS(stream->workspace != NULL); // a stream for copies computes nothing
    if (stream->gemm == NULL) {
        stream->gemm = (struct gemm_state *)memory_alloc(1, sizeof(*stream->gemm));
        cublas_check(cublasLtCreate(&stream->gemm->blas));
    }
    return stream->gemm;
}

void gemm_state_close(struct gemm_state *state)
{
    if (state != NULL)
        cublas_check(cublasLtDestroy(state->blas));
    free(state);
}

void gemm_forget_plans(struct gemm_state *state)
{
    for (int i = 0; i < GEMM_PLANS; i++)
        state->plans[i].known = false;
}

// ---- the library's view

// Parts of k are a batch of products.
static void set_batch(cublasLtMatrixLayoutOpaque_t *layout, int64_t parts, int64_t step)
{
    int32_t count = (int32_t)parts;
    cublas_check(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                                                  &count, sizeof(count)));
    cublas_check(cublasLtMatrixLayoutSetAttribute(
        layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step, sizeof(step)));
}

// Elements from a part of k to the next.
static int64_t step_in_a(int64_t k, int64_t parts)
{
    return k / parts; // A is not transposed
}

static int64_t step_in_b(int64_t k, int64_t parts, bool transpose_b, int64_t ldb)
{
    return k / parts * (transpose_b ? 1 : ldb);
}

void gemm_problem_init(struct gemm_problem *p, const struct gemm_product *g)
{
    cublasOperation_t a = g->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t b = g->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    uint64_t m = (uint64_t)g->m, n = (uint64_t)g->n, k = (uint64_t)(g->k / g->parts);
    cudaDataType_t in = data_type(g->in_type), out = data_type(g->out_type);
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
    if (g->parts > 1) {
        set_batch(&p->a, g->parts, step_in_b(g->k, g->parts, g->transpose_b, g->ldb));
        set_batch(&p->b, g->parts, step_in_a(g->k, g->parts));
        set_batch(&p->c, g->parts, g->n);
    }
}

// Of this address and those that lie multiples of `step` elements behind it.
static uint32_t alignment(const void *pointer, int64_t step, enum dtype type)
{
    uintptr_t address = (uintptr_t)pointer | (uintptr_t)step * dtype_size(type) | 256;
    return (uint32_t)(address & (~address + 1));
}

struct gemm_alignment gemm_alignment_of(const struct gemm *g)
{
    int64_t a = 0, b = 0, c = 0;
    if (g->parts > 1) {
        a = step_in_a(g->k, g->parts);
        b = step_in_b(g->k, g->parts, g->transpose_b, g->ldb);
        c = g->n;
    }
    struct gemm_alignment result = {alignment(g->a, a, g->a_type), alignment(g->b, b, g->b_type),
                                    alignment(g->c, c, g->c_type), alignment(g->d, c, g->c_type)};
    return result;
}

static void prefer(cublasLtMatmulPreference_t preference,
                   cublasLtMatmulPreferenceAttributes_t attribute, uint32_t value)
{
    cublas_check(
        cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
}

int gemm_candidates(struct stream *stream, struct gemm_problem *p,
                    const struct gemm_alignment *align, int most,
                    cublasLtMatmulHeuristicResult_t *candidates)
{
    cublasLtMatmulPreferenceOpaque_t preference;
    uint64_t workspace = stream->workspace_bytes;
    int found = 0, works = 0;
    cublas_check(cublasLtMatmulPreferenceInit(&preference));
    cublas_check(cublasLtMatmulPreferenceSetAttribute(
        &preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof(workspace)));
    prefer(&preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    prefer(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, align->b);
    prefer(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, align->a);
    prefer(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, align->d);
    prefer(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, align->c);
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(gemm_state_of(stream)->blas, &p->product, &p->a, &p->b,
                                       &p->c, &p->c, &preference, most, candidates, &found);
    for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < found; i++)
        if (candidates[i].state == CUBLAS_STATUS_SUCCESS)
            candidates[works++] = candidates[i];
    return works;
}

// Whether addresses are as aligned as the algorithm asks.
static bool aligned_for(const cublasLtMatmulAlgo_t *algorithm, const struct gemm_alignment *align)
{
    const struct {
        cublasLtMatmulAlgoCapAttributes_t attribute;
        uint32_t alignment;
    } operands[] = {{CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_A_BYTES, align->b},
                    {CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_B_BYTES, align->a},
                    {CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_C_BYTES, align->d},
                    {CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_D_BYTES, align->c}};
    for (size_t i = 0; i < sizeof(operands) / sizeof(operands[0]); i++) {
        uint32_t wanted = 0;
        size_t size = 0;
        if (cublasLtMatmulAlgoCapGetAttribute(algorithm, operands[i].attribute, &wanted,
                                              sizeof(wanted), &size) != CUBLAS_STATUS_SUCCESS ||
            wanted > operands[i].alignment)
            return false;
    }
    return true;
}

bool gemm_algorithm_works(struct stream *stream, struct gemm_problem *p,
                          const struct gemm_alignment *align, const cublasLtMatmulAlgo_t *algorithm)
{
    cublasLtMatmulHeuristicResult_t result;
    uint32_t reduction = 0;
    size_t size = 0;
    memset(&result, 0, sizeof(result));
    if (cublasLtMatmulAlgoCheck(gemm_state_of(stream)->blas, &p->product, &p->a, &p->b, &p->c,
                                &p->c, algorithm, &result) != CUBLAS_STATUS_SUCCESS ||
        result.state != CUBLAS_STATUS_SUCCESS || result.workspaceSize > stream->workspace_bytes)
        return false;
    if (cublasLtMatmulAlgoConfigGetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
                                             &reduction, sizeof(reduction),
                                             &size) != CUBLAS_STATUS_SUCCESS ||
        (reduction & ~(uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) != 0)
        return false;
    return aligned_for(algorithm, align);
}

// In the library's words C is what is added and D the result.
void gemm_run(struct stream *stream, const struct gemm *g, struct gemm_problem *p,
              const cublasLtMatmulAlgo_t *algorithm)
{
    cublasStatus_t status =
        cublasLtMatmul(gemm_state_of(stream)->blas, &p->product, &g->alpha, g->b, &p->a, g->a,
                       &p->b, &g->beta, g->d, &p->c, g->c, &p->c, algorithm, stream->workspace,
                       stream->workspace_bytes, stream->cuda);
    if (status != CUBLAS_STATUS_SUCCESS) {
        char text[GEMM_PRODUCT_TEXT];
        struct gemm_product product = gemm_product_of(g);
        gemm_product_print(&product, text);
        die("cuBLASLt: the product %s: %s", text, cublasLtGetStatusString(status));
    }
}

// ---- which algorithm

static bool same_alignment(const struct gemm_alignment *x, const struct gemm_alignment *y)
{
    return x->a == y->a && x->b == y->b && x->c == y->c && x->d == y->d;
}

static size_t slot_of(const struct gemm_product *p, const struct gemm_alignment *align)
{
    const uint64_t numbers[] = {(uint64_t)p->m,
                                (uint64_t)p->n,
                                (uint64_t)p->k,
                                (uint64_t)p->lda,
                                (uint64_t)p->ldb,
                                (uint64_t)p->ldc,
                                (uint64_t)p->parts << 3 | (uint64_t)p->transpose_a << 2 |
                                    (uint64_t)p->transpose_b << 1 | (uint64_t)p->add,
                                (uint64_t)p->in_type << 8 | (uint64_t)p->out_type,
                                (uint64_t)align->a << 32 | align->b,
                                (uint64_t)align->c << 32 | align->d};
    uint64_t value = 0xcbf29ce484222325u;
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        value = (value ^ numbers[i]) * 0x100000001b3u;
        value ^= value >> 29;
    }
    return (size_t)(value >> 32) % GEMM_PLANS;
}

static bool take_tuned(struct stream *stream, struct gemm_plan *plan)
{
    struct gemm_state *state = gemm_state_of(stream);
    struct gemm_product bucket =
        gemm_product_with_rows(&plan->product, gemm_bucket(gemm_product_rows(&plan->product)));
    for (int i = 0; i < state->tuned_count; i++)
        if (gemm_product_equal(&state->tuned[i].product, &bucket)) {
            plan->algorithm = state->tuned[i].algorithm;
            return gemm_algorithm_works(stream, &plan->problem, &plan->alignment, &plan->algorithm);
        }
    return false;
}

static void choose(struct stream *stream, struct gemm_plan *plan)
{
    cublasLtMatmulHeuristicResult_t first;
    memset(&first, 0, sizeof(first));
    gemm_problem_init(&plan->problem, &plan->product);
    if (!take_tuned(stream, plan)) {
        if (gemm_candidates(stream, &plan->problem, &plan->alignment, 1, &first) == 0) {
            char text[GEMM_PRODUCT_TEXT];
            gemm_product_print(&plan->product, text);
            die("cuBLASLt has no algorithm for the product %s", text);
        }
        plan->algorithm = first.algo;
    }
    plan->known = true;
}

static struct gemm_plan *plan_for(struct stream *stream, const struct gemm *g)
{
    struct gemm_product product = gemm_product_of(g);
    struct gemm_alignment align = gemm_alignment_of(g);
    struct gemm_plan *plan = &gemm_state_of(stream)->plans[slot_of(&product, &align)];
    if (!plan->known || !gemm_product_equal(&plan->product, &product) ||
        !same_alignment(&plan->alignment, &align)) {
        plan->product = product;
        plan->alignment = align;
        choose(stream, plan);
    }
    return plan;
}

// ---- the op

static struct gemm with_defaults(const struct gemm *gemm)
{
    struct gemm g = gemm_with_strides(gemm);
    BUG_UNLESS(g.a_type == g.c_type || g.c_type == DTYPE_F32);
    if (g.parts > 1) { // what is multiplied and what algorithms are chosen for
        g.c = g.part_sums;
        g.ldc = g.part_stride;
    }
    if (g.d == NULL || g.beta == 0.0f)
        g.d = g.c;
    return g;
}

// One CTA a row of C: its sums of parts, added in order.
template <int N>
static __global__ void __launch_bounds__(SUM_THREADS)
    add_parts_kernel(const float *sums, int64_t stride, int64_t parts, int64_t n, float *c,
                     int64_t ldc)
{
    const float *from = sums + blockIdx.x * stride;
    for (int64_t column = threadIdx.x * N; column < n; column += (int64_t)blockDim.x * N) {
        float sum[N];
        struct pack<float, N> first = pack_load_once<N>(from + column);
#pragma unroll
        for (int i = 0; i < N; i++)
            sum[i] = pack_value(first, i);
#pragma unroll 4
        for (int64_t part = 1; part < parts; part++) {
            struct pack<float, N> next = pack_load_once<N>(from + part * n + column);
#pragma unroll
            for (int i = 0; i < N; i++)
                sum[i] += pack_value(next, i);
        }
        store_values<N>(c + blockIdx.x * ldc + column, sum);
    }
}

static void add_parts(struct stream *stream, const struct gemm *gemm)
{
    enum { N = 4 };
    struct gemm g = gemm_with_strides(gemm);
    float *c = (float *)g.c;
    unsigned grid = grid_size(g.m);
    if (packs_at(g.part_sums) && packs_at(c) && packs_in(g.part_stride, N) && packs_in(g.n, N) &&
        packs_in(g.ldc, N))
        add_parts_kernel<N><<<grid, SUM_THREADS, 0, stream->cuda>>>(g.part_sums, g.part_stride,
                                                                    g.parts, g.n, c, g.ldc);
    else
        add_parts_kernel<1><<<grid, SUM_THREADS, 0, stream->cuda>>>(g.part_sums, g.part_stride,
                                                                    g.parts, g.n, c, g.ldc);
    launch_check();
}

// Keeps of each product the call with the most rows; of a fixed one, which may be the same product at other
// rows, every count of them.
static void record(struct gemm_state *state, const struct gemm *g)
{
    struct gemm_product product = gemm_product_of(g), any = gemm_product_with_rows(&product, 0);
    int i = 0;
    for (; i < state->recorded_count; i++) {
        struct gemm_product other = gemm_product_of(&state->recorded[i]);
        struct gemm_product other_any = gemm_product_with_rows(&other, 0);
        if (!gemm_product_equal(&any, &other_any) || state->recorded[i].fixed != g->fixed ||
            (g->fixed && gemm_product_rows(&product) != gemm_product_rows(&other)))
            continue;
        if (gemm_product_rows(&product) > gemm_product_rows(&other))
            state->recorded[i] = *g;
        return;
    }
    if (i < GEMM_RECORDED)
        state->recorded[state->recorded_count++] = *g;
    else
        state->calls_left_out++;
}

void gemm_cuda(struct stream *stream, const struct gemm *gemm)
{
    struct gemm g = with_defaults(gemm);
    if (g.m == 0 || g.n == 0)
        return;
    struct gemm_state *state = gemm_state_of(stream);
    if (state->record)
        record(state, &g);
    struct gemm_plan *plan = plan_for(stream, &g);
    gemm_run(stream, &g, &plan->problem, &plan->algorithm);
    if (g.parts > 1)
        add_parts(stream, gemm);
}
