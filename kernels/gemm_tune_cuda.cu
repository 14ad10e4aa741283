// Owns the choice of algorithms by timing. Products are recorded while a step runs on made-up inputs;
// then each is timed at its largest count of rows and at the buckets below, on its own buffers, whose
// contents are lost.
//
// Most of the algorithms that the library proposes add up in the same order and so give the same bits.
// Only those are chosen from that agree with its first proposal, at a count of rows that fills no
// tile: so a timing that goes the other way changes no result, and runs that are started anew agree.
//
// A GPU at full load is limited by its power: what is fastest for a millisecond may be slower than
// others for as long as a step takes. Large products are therefore timed while the GPU is kept busy with
// the same candidate.
#include <algorithm>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/timer.h"
#include "kernels/gemm_cuda.cuh"

namespace
{
enum {
    CANDIDATES = 8,   // more are never proposed
    LEVELS = 20,      // buckets of a product, from the largest down
    PROBE_ROWS = 515, // where bits are compared: no multiple of any tile
    ROUNDS = 2,
    SMALL_RUNS = 4, // of a small product at a time
    THREADS = 256,
    FILL_CTAS = 1024
};
const double small_product = 2e11; // operations
const double large_product = 4e11; // operations: timed while the GPU is kept busy
const double busy_seconds = 0.02;  // for which it is, before and while it is timed
const double hopeless = 1.1;       // times the least of the first round: not run again
// Weight of the time at fewer rows than the most there can be, and of what is multiplied once a step.
const double seldom = 0.3;
const double worth_it = 0.98; // times the first proposal's: else that is taken

// How there is time to compare: not at all, in short, or with a GPU kept busy.
enum timing { TIMING_NONE, TIMING_SHORT, TIMING_BUSY };

struct candidate {
    cublasLtMatmulAlgo_t algorithm;
    uint64_t digest; // of the result
    double seconds;  // of all rounds
};

__device__ uint64_t mixed(uint64_t x)
{
    x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9u;
    return x ^ (x >> 32);
}

// x[rows, columns] = numbers in (-1, 1)
template <typename T>
__global__ void fill_kernel(T *x, int64_t rows, int64_t columns, int64_t stride, uint64_t seed)
{
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x)
        for (int64_t i = threadIdx.x; i < columns; i += THREADS) {
            uint64_t bits = mixed(((uint64_t)row << 32 | (uint64_t)i) + seed);
            store(x, row * stride + i, (float)((int)(bits & 0xffff) - 0x8000) / 32769.0f);
        }
}

// *digest += what depends on every bit of x[rows, columns] and its place; integers, so in any order.
template <typename T>
__global__ void digest_kernel(const T *x, int64_t rows, int64_t columns, int64_t stride,
                              unsigned long long *digest)
{
    unsigned long long sum = 0;
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x)
        for (int64_t i = threadIdx.x; i < columns; i += THREADS)
            sum += mixed(mixed((uint64_t)row << 32 | (uint64_t)i) ^
                         __float_as_uint(load(x, row * stride + i)));
    atomicAdd(digest, sum);
}

void fill(struct stream *stream, const void *operand, enum dtype type, int64_t rows,
          int64_t columns, int64_t stride, uint64_t seed)
{
    void *x = const_cast<void *>(operand);
    if (is_bf16(type))
        fill_kernel<<<FILL_CTAS, THREADS, 0, stream->cuda>>>((bf16_t *)x, rows, columns, stride,
                                                             seed);
    else
        fill_kernel<<<FILL_CTAS, THREADS, 0, stream->cuda>>>((float *)x, rows, columns, stride,
                                                             seed);
    launch_check();
}

// A is of activations or gradients always; B is where A is transposed, and weights elsewhere, unless all is
// scratch. What is left there may hold no numbers, and what is not a number has no bits to compare.
void fill_operands(struct stream *stream, const struct gemm *g)
{
    fill(stream, g->a, g->a_type, g->transpose_a ? g->k : g->m, g->transpose_a ? g->m : g->k,
         g->lda, 1);
    if (g->transpose_a || g->fixed)
        fill(stream, g->b, g->b_type, g->transpose_b ? g->n : g->k, g->transpose_b ? g->k : g->n,
             g->ldb, 2);
}

uint64_t digest_of(struct stream *stream, const struct gemm *g)
{
    int64_t columns = g->n * g->parts;
    unsigned long long *sum = (unsigned long long *)stream->workspace, result = 0;
    cuda_check(cudaMemsetAsync(sum, 0, sizeof(*sum), stream->cuda));
    if (is_bf16(g->c_type))
        digest_kernel<<<FILL_CTAS, THREADS, 0, stream->cuda>>>((const bf16_t *)g->c, g->m, columns,
                                                               g->ldc, sum);
    else
        digest_kernel<<<FILL_CTAS, THREADS, 0, stream->cuda>>>((const float *)g->c, g->m, columns,
                                                               g->ldc, sum);
    launch_check();
    cuda_check(cudaMemcpyAsync(&result, sum, sizeof(result), cudaMemcpyDeviceToHost, stream->cuda));
    cuda_check(cudaStreamSynchronize(stream->cuda));
    return result;
}

double operations_of(const struct gemm *g)
{
    return 2.0 * (double)g->m * (double)g->n * (double)g->k;
}

// Seconds of one of `runs` runs after as many as `before`.
double seconds_of(struct stream *stream, const struct gemm *g, struct gemm_problem *problem,
                  const cublasLtMatmulAlgo_t *algorithm, int before, int runs, cudaEvent_t *events)
{
    float milliseconds = 0.0f;
    for (int run = 0; run < before; run++)
        gemm_run(stream, g, problem, algorithm);
    cuda_check(cudaEventRecord(events[0], stream->cuda));
    for (int run = 0; run < runs; run++)
        gemm_run(stream, g, problem, algorithm);
    cuda_check(cudaEventRecord(events[1], stream->cuda));
    cuda_check(cudaEventSynchronize(events[1]));
    cuda_check(cudaEventElapsedTime(&milliseconds, events[0], events[1]));
    return (double)milliseconds * 1e-3 / runs;
}

struct gemm with_rows(const struct gemm *gemm, int64_t rows)
{
    struct gemm g = *gemm;
    *(g.transpose_a ? &g.k : &g.m) = rows;
    return g;
}

struct gemm_problem problem_of(const struct gemm *g)
{
    struct gemm_problem problem;
    struct gemm_product product = gemm_product_of(g);
    gemm_problem_init(&problem, &product);
    return problem;
}

// At most `most` of the library's proposals for `g` that also work at the bucket's size and at the
// probe's and give the same bits as the first of them.
int collect(struct stream *stream, const struct gemm *g, struct gemm_problem *problem,
            int64_t bucket, int most, struct candidate *candidates)
{
    cublasLtMatmulHeuristicResult_t results[CANDIDATES];
    struct gemm_alignment align = gemm_alignment_of(g);
    int64_t rows = g->transpose_a ? g->k : g->m;
    struct gemm at_bucket = with_rows(g, bucket);
    struct gemm probe = with_rows(g, std::min(rows, (int64_t)PROBE_ROWS));
    probe.beta = 0.0f; // C holds the last candidate's result
    probe.d = probe.c;
    struct gemm_problem bucket_problem = problem_of(&at_bucket), probe_problem = problem_of(&probe);
    memset(results, 0, sizeof(results));
    int found = gemm_candidates(stream, problem, &align, CANDIDATES, results), count = 0;
    for (int i = 0; i < found && count < most; i++) {
        const cublasLtMatmulAlgo_t *algorithm = &results[i].algo;
        if (!gemm_algorithm_works(stream, problem, &align, algorithm) ||
            !gemm_algorithm_works(stream, &bucket_problem, &align, algorithm) ||
            !gemm_algorithm_works(stream, &probe_problem, &align, algorithm))
            continue;
        gemm_run(stream, &probe, &probe_problem, algorithm);
        candidates[count].algorithm = *algorithm;
        candidates[count].digest = digest_of(stream, &probe);
        if (candidates[count].digest == candidates[0].digest)
            count++;
    }
    return count;
}

// Candidates take turns, since the GPU slows down while it is busy. busy: also each is kept running.
void measure(struct stream *stream, const struct gemm *g, struct gemm_problem *problem,
             struct candidate *candidates, int count, bool busy, cudaEvent_t *events)
{
    int few = operations_of(g) < small_product ? SMALL_RUNS : 1;
    double least = INFINITY;
    for (int i = 0; i < count; i++) {
        candidates[i].seconds =
            seconds_of(stream, g, problem, &candidates[i].algorithm, 0, few, events);
        least = std::min(least, candidates[i].seconds);
    }
    for (int i = 0; i < count; i++)
        if (i > 0 && candidates[i].seconds > hopeless * least)
            candidates[i].seconds = INFINITY;
        else if (busy)
            candidates[i].seconds = 0.0; // what a cool GPU does is forgotten
    int more = busy ? std::max((int)(busy_seconds / least), 1) : few;
    for (int round = busy ? 0 : 1; round < ROUNDS; round++)
        for (int i = 0; i < count; i++)
            if (isfinite(candidates[i].seconds))
                candidates[i].seconds += seconds_of(stream, g, problem, &candidates[i].algorithm,
                                                    busy ? more : 0, more, events);
}

int fastest(const struct candidate *candidates, int count)
{
    int best = 0;
    for (int i = 1; i < count; i++)
        if (candidates[i].seconds < candidates[best].seconds)
            best = i;
    return candidates[best].seconds < worth_it * candidates[0].seconds ? best : 0;
}

static bool is_tuned(const struct gemm_state *state, const struct gemm_product *product)
{
    for (int i = 0; i < state->tuned_count; i++)
        if (gemm_product_equal(&state->tuned[i].product, product))
            return true;
    return false;
}

// Not timed, the bucket gets the first proposal that works, so that the time there was for timing
// changes no bits either.
void tune_bucket(struct stream *stream, const struct gemm *recorded, int64_t bucket,
                 enum timing timing, cudaEvent_t *events)
{
    struct gemm_state *state = gemm_state_of(stream);
    struct gemm_product product = gemm_product_of(recorded);
    struct gemm g = with_rows(recorded, std::min(gemm_product_rows(&product), bucket));
    struct gemm_problem problem = problem_of(&g);
    struct candidate candidates[CANDIDATES];
    struct gemm_product at_bucket = gemm_product_with_rows(&product, bucket);
    if (is_tuned(state, &at_bucket)) // a fixed product like one whose rows vary
        return;
    if (state->tuned_count == GEMM_ALGORITHMS) {
        state->buckets_left_out++;
        return;
    }
    if (timing != TIMING_NONE)
        fill_operands(stream, &g);
    int count =
        collect(stream, &g, &problem, bucket, timing != TIMING_NONE ? CANDIDATES : 1, candidates);
    if (count == 0)
        return;
    if (count > 1)
        measure(stream, &g, &problem, candidates, count,
                timing == TIMING_BUSY && operations_of(&g) >= large_product, events);
    struct gemm_tuned *tuned = &state->tuned[state->tuned_count++];
    tuned->product = at_bucket;
    tuned->algorithm = candidates[count > 1 ? fastest(candidates, count) : 0].algorithm;
}

// Addresses below this alignment keep products from the fast algorithms; such products are few.
bool well_aligned(const struct gemm *g)
{
    enum { FAST_ALIGNMENT = 16 };
    struct gemm_alignment align = gemm_alignment_of(g);
    return std::min(std::min(align.a, align.b), std::min(align.c, align.d)) >= FAST_ALIGNMENT;
}
} // namespace

void gemm_record_cuda(struct stream *stream)
{
    struct gemm_state *state = gemm_state_of(stream);
    state->recorded_count = state->calls_left_out = state->buckets_left_out = 0;
    state->record = true;
}

// A product at a bucket of rows; those that take most of a step come first.
struct tuning_task {
    int recorded;
    int64_t bucket;
    double weight;
};

static int compare_tasks(const void *a, const void *b)
{
    const struct tuning_task *x = (const struct tuning_task *)a, *y = (const struct tuning_task *)b;
    if (x->weight != y->weight)
        return x->weight > y->weight ? -1 : 1;
    return x->recorded != y->recorded ? x->recorded - y->recorded : x->bucket > y->bucket ? -1 : 1;
}

// Whether the same product is recorded with something added: then this is the first of a step's, which
// begins a sum, and all others add.
static bool begins_a_sum(const struct gemm_state *state, int recorded)
{
    struct gemm_product product = gemm_product_of(&state->recorded[recorded]);
    for (int i = 0; i < state->recorded_count && !product.add; i++) {
        struct gemm_product other = gemm_product_of(&state->recorded[i]);
        bool adds = other.add;
        other.add = false;
        if (adds && gemm_product_equal(&other, &product))
            return true;
    }
    return false;
}

// Ends with a task without a bucket; the caller frees it.
static struct tuning_task *tuning_tasks_make(const struct gemm_state *state)
{
    struct tuning_task *tasks =
        (struct tuning_task *)memory_alloc(GEMM_RECORDED * LEVELS + 1, sizeof(*tasks));
    int count = 0;
    for (int i = 0; i < state->recorded_count; i++) {
        struct gemm_product product = gemm_product_of(&state->recorded[i]);
        int64_t rows = gemm_product_rows(&product), bucket = gemm_bucket(rows);
        double often = begins_a_sum(state, i) ? seldom : 1.0;
        if (!well_aligned(&state->recorded[i]))
            continue;
        for (int level = 0; level < LEVELS && bucket > 0; level++) {
            struct gemm g = with_rows(&state->recorded[i], std::min(rows, bucket));
            tasks[count++] = {i, bucket, operations_of(&g) * often * (level == 0 ? 1.0 : seldom)};
            bucket = state->recorded[i].fixed ? 0 : gemm_bucket_below(bucket);
        }
    }
    qsort(tasks, (size_t)count, sizeof(*tasks), compare_tasks);
    return tasks;
}

static enum timing timing_after(double used, double seconds)
{
    if (used < seconds * 0.75)
        return TIMING_BUSY;
    return used < seconds ? TIMING_SHORT : TIMING_NONE;
}

void gemm_tune_cuda(struct stream *stream, double seconds, struct gemm_algorithms *algorithms)
{
    struct gemm_state *state = gemm_state_of(stream);
    cudaEvent_t events[2];
    double begin = timer_now();
    cuda_check(cudaEventCreate(&events[0]));
    cuda_check(cudaEventCreate(&events[1]));
    state->record = false;
    state->tuned_count = 0;
    struct tuning_task *tasks = tuning_tasks_make(state);
    for (int i = 0; tasks[i].bucket > 0; i++)
        tune_bucket(stream, &state->recorded[tasks[i].recorded], tasks[i].bucket,
                    timing_after(timer_now() - begin, seconds), events);
    free(tasks);
    cuda_check(cudaEventDestroy(events[0]));
    cuda_check(cudaEventDestroy(events[1]));
    gemm_forget_plans(state);
    if (state->calls_left_out + state->buckets_left_out > 0)
        log_warn("gemm: no room for %d calls of further products and %d buckets; they take the "
                 "library's first proposal",
                 state->calls_left_out, state->buckets_left_out);
    algorithms->count = state->tuned_count;
    for (int i = 0; i < state->tuned_count; i++) {
        struct gemm_algorithm *to = &algorithms->items[i];
        gemm_product_print(&state->tuned[i].product, to->product);
        gemm_hex_print(&state->tuned[i].algorithm, sizeof(state->tuned[i].algorithm),
                       to->algorithm);
    }
}

int gemm_obey_cuda(struct stream *stream, const struct gemm_algorithms *algorithms,
                   struct error *err)
{
    static_assert(2 * sizeof(cublasLtMatmulAlgo_t) < GEMM_ALGORITHM_TEXT, "algorithms fit");
    const struct gemm_alignment whole = {256, 256, 256, 256};
    struct gemm_state *state = gemm_state_of(stream);
    struct gemm_problem problem;
    BUG_UNLESS(algorithms->count <= GEMM_ALGORITHMS);
    state->tuned_count = 0;
    gemm_forget_plans(state);
    for (int64_t i = 0; i < algorithms->count; i++) {
        const struct gemm_algorithm *from = &algorithms->items[i];
        struct gemm_tuned *tuned = &state->tuned[i];
        if (gemm_product_parse(&tuned->product, from->product) != 0 ||
            gemm_hex_parse(&tuned->algorithm, sizeof(tuned->algorithm), from->algorithm) != 0)
            return error_set(err, "gemm: entry %lld is not a product and its algorithm",
                             (long long)i + 1);
        gemm_problem_init(&problem, &tuned->product);
        if (!gemm_algorithm_works(stream, &problem, &whole, &tuned->algorithm))
            return error_set(err, "gemm: cuBLASLt refuses the algorithm of the product %s",
                             from->product);
    }
    state->tuned_count = (int)algorithms->count;
    return 0;
}
