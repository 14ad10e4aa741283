// Owns the loss over the vocabulary on CUDA: one CTA a row. One pass for the softmax statistics, then
// one for the sums that the terms are made of and the gradient, or two where the gradient needs the
// sums. The arithmetic is that of softmax_loss_cpu.c: sums in fp64 of fp32 elements, probabilities
// from logits minus the row's maximum. Threads take elements in a fixed pattern and reductions have a
// fixed order, so results repeat bit for bit.
#include "kernels/softmax_loss.h"

#include <float.h>
#include <math.h>

#include "kernels/arguments.h"
#include "kernels/cuda_internal.cuh"

enum {
    THREADS = 512,
    ITEMS = 4, // of a thread at a time, THREADS apart
    TILE = THREADS * ITEMS
};

// log-softmax of element i is (logit[i] - max) - log_sum.
struct softmax {
    float max, inverse_sum;
    double log_sum;
    int32_t argmax;
};

// Sums over the row that the terms and the gradient are made of; names as in softmax_loss_cpu.c.
struct sums {
    double overlap, distance, kl, reverse_kl, kl_pm, kl_qm;
    double above, below; // q where q > p, and elsewhere: each by itself, 1 - above would cancel
};

// Coefficients of the gradient, see element_gradient.
struct gradient {
    float kl, ce, reverse_kl, kl_qp, js, kl_qm, tv, above, below;
    int64_t token[2]; // -1: none
    float target[2];
};

struct needs {
    bool kl, reverse_kl, js, tv, logs; // logs: log p - log q
};

struct row {
    const void *student, *teacher; // [V]; teacher NULL: none
    struct softmax q, p;
    int64_t label;
    double log_q_label, log_q_top;
    struct needs needs;
};

// One element of both distributions. d = log p - log q, NaN or infinite where p or q is 0.
struct element {
    float q, p, d, log_pm, log_qm;
};

static __device__ struct needs needs_of(const float *weight)
{
    struct needs needs;
    needs.kl = weight[LOSS_KL] != 0.0f || weight[LOSS_LK] != 0.0f;
    needs.reverse_kl = weight[LOSS_REVERSE_KL] != 0.0f;
    needs.js = weight[LOSS_JS] != 0.0f;
    needs.tv = weight[LOSS_TV] != 0.0f || weight[LOSS_NLA] != 0.0f || weight[LOSS_LK] != 0.0f;
    needs.logs = needs.kl || needs.reverse_kl || needs.js;
    return needs;
}

// exp, and 0 below where fp32 would lose bits. NaN stays NaN.
static __device__ __forceinline__ float exp_or_zero(float x)
{
    return x < -86.9f ? 0.0f : expf(x);
}

// Takes one more logit into a thread's running maximum and sum. NaN is never a maximum.
template <typename Logit>
static __device__ void softmax_add_tile(struct softmax *s, double *sum, const Logit *logits,
                                        int64_t first, int64_t vocab)
{
    float x[ITEMS], before = s->max, part = 0.0f;
#pragma unroll
    for (int j = 0; j < ITEMS; j++) {
        int64_t i = first + j * THREADS + threadIdx.x;
        x[j] = i < vocab ? load(logits, i) : -INFINITY;
    }
#pragma unroll
    for (int j = 0; j < ITEMS; j++)
        if (x[j] > s->max) {
            s->max = x[j];
            s->argmax = (int32_t)(first + j * THREADS + threadIdx.x);
        }
    if (s->max > before)
        *sum *= (double)exp_or_zero(before - s->max);
    // While nothing finite was seen any reference will do: exp(-inf) is 0, NaN stays NaN.
    float reference = s->max == -INFINITY ? 0.0f : s->max;
#pragma unroll
    for (int j = 0; j < ITEMS; j++)
        part += exp_or_zero(x[j] - reference);
    *sum += (double)part;
}

// Largest value of all threads, the lowest index among equals; the same for all threads.
static __device__ void block_argmax(float *value, int32_t *index)
{
    __shared__ float values[THREADS / WARP];
    __shared__ int32_t indices[THREADS / WARP];
    float v = *value;
    int32_t at = *index;
    for (int half = WARP / 2; half > 0; half /= 2) {
        float other = __shfl_xor_sync(0xffffffffu, v, half);
        int32_t other_at = __shfl_xor_sync(0xffffffffu, at, half);
        if (other > v || (other == v && other_at < at)) {
            v = other;
            at = other_at;
        }
    }
    __syncthreads(); // the last call's readers are done
    if (threadIdx.x % WARP == 0) {
        values[threadIdx.x / WARP] = v;
        indices[threadIdx.x / WARP] = at;
    }
    __syncthreads();
    v = values[0];
    at = indices[0];
    for (int warp = 1; warp < THREADS / WARP; warp++)
        if (values[warp] > v || (values[warp] == v && indices[warp] < at)) {
            v = values[warp];
            at = indices[warp];
        }
    *value = v;
    *index = at;
}

// A row of -inf alone, or with NaN or +inf in it, has a NaN sum and so NaN results.
template <typename Logit>
static __device__ struct softmax softmax_of(const Logit *logits, int64_t vocab)
{
    struct softmax s;
    double sum = 0.0;
    s.max = -INFINITY;
    s.argmax = INT32_MAX; // a thread that saw nothing
    for (int64_t first = 0; first < vocab; first += TILE)
        softmax_add_tile(&s, &sum, logits, first, vocab);
    float mine = s.max;
    block_argmax(&s.max, &s.argmax);
    if (mine != -INFINITY) // else the sum is 0 or NaN
        sum *= (double)exp_or_zero(mine - s.max);
    sum = block_sum<THREADS>(sum);
    if (s.max == -INFINITY)
        s.argmax = 0;
    s.inverse_sum = s.max == -INFINITY ? NAN : (float)(1.0 / sum);
    s.log_sum = log(sum);
    return s;
}

template <typename Logit>
static __device__ double log_softmax_at(const struct softmax *s, const Logit *logits, int64_t i)
{
    return (double)load(logits, i) - (double)s->max - s->log_sum;
}

// log(p/m) and log(q/m), m = (p + q) / 2: see mixture_logs in softmax_loss_cpu.c.
static __device__ __forceinline__ void mixture_logs(struct element *e)
{
    float p = e->p, q = e->q, sum = p + q;
    float a = fabsf(p - q) / (sum == 0.0f ? 1.0f : sum);
    float s = a / (2.0f + a), u = s * s;
    float g = 2.44249001e-1f;
    g = g * u + 2.13899627e-1f;
    g = g * u + 2.86210418e-1f;
    g = g * u + 3.99986774e-1f;
    g = g * u + 6.66666806e-1f;
    g = g * u + 2.0f;
    float larger = g * s;
    float smaller = larger - fabsf(e->d);
    e->log_pm = p == 0.0f ? 0.0f : (p < q ? smaller : larger);
    e->log_qm = q == 0.0f ? 0.0f : (p < q ? larger : smaller);
}

// An element beyond the vocabulary, and p and d without a teacher, are 0.
template <typename Logit>
static __device__ __forceinline__ struct element element_at(const struct row *row, float shift,
                                                            int64_t i, int64_t vocab)
{
    struct element e = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    if (i >= vocab)
        return e;
    float z = load((const Logit *)row->student, i) - row->q.max;
    e.q = exp_or_zero(z) * row->q.inverse_sum;
    if (row->teacher == NULL)
        return e;
    float t = load((const Logit *)row->teacher, i) - row->p.max;
    e.p = exp_or_zero(t) * row->p.inverse_sum;
    if (row->needs.logs)
        e.d = (t - z) + shift;
    if (row->needs.js)
        mixture_logs(&e);
    return e;
}

// Tokens that the teacher excludes (a logit of -inf) are left out: the term would be infinite.
static __device__ __forceinline__ float log_q_over_p(float q, float d)
{
    return q == 0.0f || d == -INFINITY ? 0.0f : -d;
}

// What the elements of one thread in one tile add, in fp32.
struct tile_sums {
    float overlap, distance, kl, reverse_kl, kl_pm, kl_qm, above, below;
};

static __device__ __forceinline__ void add_element(struct tile_sums *s, const struct element &e,
                                                   const struct needs &needs)
{
    s->overlap += e.q < e.p ? e.q : e.p;
    if (needs.kl)
        s->kl += e.p == 0.0f ? 0.0f : e.p * e.d;
    if (needs.reverse_kl)
        s->reverse_kl += log_q_over_p(e.q, e.d) * e.q;
    if (needs.js) {
        s->kl_pm += e.p * e.log_pm;
        s->kl_qm += e.q * e.log_qm;
    }
    if (needs.tv) {
        s->distance += fabsf(e.p - e.q);
        s->above += e.q > e.p ? e.q : 0.0f;
        s->below += e.q > e.p ? 0.0f : e.q;
    }
}

static __device__ __forceinline__ void add_tile(struct sums *sums, const struct tile_sums &tile,
                                                const struct needs &needs)
{
    sums->overlap += (double)tile.overlap;
    if (needs.kl)
        sums->kl += (double)tile.kl;
    if (needs.reverse_kl)
        sums->reverse_kl += (double)tile.reverse_kl;
    if (needs.js) {
        sums->kl_pm += (double)tile.kl_pm;
        sums->kl_qm += (double)tile.kl_qm;
    }
    if (needs.tv) {
        sums->distance += (double)tile.distance;
        sums->above += (double)tile.above;
        sums->below += (double)tile.below;
    }
}

static __device__ void reduce_sums(struct sums *sums, const struct needs &needs)
{
    sums->overlap = block_sum<THREADS>(sums->overlap);
    if (needs.kl)
        sums->kl = block_sum<THREADS>(sums->kl);
    if (needs.reverse_kl)
        sums->reverse_kl = block_sum<THREADS>(sums->reverse_kl);
    if (needs.js) {
        sums->kl_pm = block_sum<THREADS>(sums->kl_pm);
        sums->kl_qm = block_sum<THREADS>(sums->kl_qm);
    }
    if (needs.tv) {
        sums->distance = block_sum<THREADS>(sums->distance);
        sums->above = block_sum<THREADS>(sums->above);
        sums->below = block_sum<THREADS>(sums->below);
    }
}

// kl (q - p) + ce q + reverse_kl q (log(q/p) - kl_qp) + js q (log(q/m) - kl_qm)
// + tv (q > p ? q below : -q above) - target at a token, twice.
static __device__ __forceinline__ float element_gradient(const struct gradient &g,
                                                         const struct element &e, int64_t i)
{
    float value = g.kl * (e.q - e.p) + g.ce * e.q;
    if (g.reverse_kl != 0.0f)
        value += g.reverse_kl * e.q * (log_q_over_p(e.q, e.d) - g.kl_qp);
    if (g.js != 0.0f)
        value += g.js * e.q * (e.log_qm - g.kl_qm);
    if (g.tv != 0.0f)
        value += g.tv * (e.q > e.p ? e.q * g.below : -e.q * g.above);
    if (i == g.token[0])
        value -= g.target[0];
    if (i == g.token[1])
        value -= g.target[1];
    return value;
}

// One pass over the row: sums (not NULL: added to) and the gradient (out not NULL). The gradient may
// take the student's place: a tile is read by all threads before any of it is written, and a written
// element is never wider than the logit that it may lie on.
template <typename Logit, typename Out>
static __device__ void pass(const struct row *row, int64_t vocab, struct sums *sums,
                            const struct gradient *g, Out *out)
{
    float shift = (float)(row->q.log_sum - row->p.log_sum);
    for (int64_t first = 0; first < vocab; first += TILE) {
        struct element e[ITEMS];
#pragma unroll
        for (int j = 0; j < ITEMS; j++)
            e[j] = element_at<Logit>(row, shift, first + j * THREADS + threadIdx.x, vocab);
        if (sums != NULL) {
            struct tile_sums tile = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int j = 0; j < ITEMS; j++)
                add_element(&tile, e[j], row->needs);
            add_tile(sums, tile, row->needs);
        }
        if (out == NULL)
            continue;
        if ((const void *)out == row->student)
            __syncthreads();
#pragma unroll
        for (int j = 0; j < ITEMS; j++) {
            int64_t i = first + j * THREADS + threadIdx.x;
            if (i < vocab)
                store(out, i, element_gradient(*g, e[j], i));
        }
    }
}

// 1 - tv where it divides or goes into a logarithm: never 0, and NaN stays NaN.
static __device__ double overlap_at_least(double overlap)
{
    return overlap < (double)FLT_MIN ? (double)FLT_MIN : overlap;
}

static __device__ double nla_of(double tv, double overlap)
{
    return tv < 0.5 ? -log1p(-tv) : -log(overlap_at_least(overlap));
}

static __device__ double lambda_of(const struct softmax_loss &op, const struct sums *sums)
{
    return exp(-(double)op.lk_eta * (1.0 - 0.5 * sums->distance));
}

static __device__ struct gradient gradient_of(const struct softmax_loss &op, const struct row *row,
                                              const struct sums *sums)
{
    const float *w = op.weight;
    double lambda = lambda_of(op, sums);
    double nla = (double)w[LOSS_NLA] / overlap_at_least(sums->overlap);
    struct gradient g;
    g.kl = (float)((double)w[LOSS_KL] + (double)w[LOSS_LK] * lambda);
    g.reverse_kl = w[LOSS_REVERSE_KL];
    g.kl_qp = (float)sums->reverse_kl;
    g.js = 0.5f * w[LOSS_JS];
    g.kl_qm = (float)sums->kl_qm;
    g.tv = (float)((double)w[LOSS_TV] + (double)w[LOSS_LK] * (1.0 - lambda) + nla);
    g.above = (float)sums->above;
    g.below = (float)sums->below;
    g.token[0] = w[LOSS_CE_TEACHER] != 0.0f ? row->p.argmax : -1;
    g.target[0] = w[LOSS_CE_TEACHER];
    g.token[1] = w[LOSS_CE_DATA] != 0.0f ? row->label : -1;
    g.target[1] = g.token[1] >= 0 ? w[LOSS_CE_DATA] : 0.0f;
    g.ce = g.target[0] + g.target[1];
    return g;
}

static __device__ bool only_ce_data(const struct softmax_loss &op)
{
    for (int i = 0; i < LOSS_TERM_COUNT; i++)
        if (i != LOSS_CE_DATA && op.weight[i] != 0.0f)
            return false;
    return op.weight[LOSS_CE_DATA] != 0.0f;
}

static __device__ void write_terms(const struct softmax_loss &op, const struct row *row,
                                   const struct sums *sums, int64_t r)
{
    double tv = 0.5 * sums->distance, lambda = lambda_of(op, sums), loss = 0.0;
    double all[LOSS_TERM_COUNT];
    all[LOSS_KL] = sums->kl;
    all[LOSS_REVERSE_KL] = sums->reverse_kl;
    all[LOSS_JS] = 0.5 * (sums->kl_pm + sums->kl_qm);
    all[LOSS_CE_TEACHER] = -row->log_q_top;
    all[LOSS_CE_DATA] = row->label >= 0 ? -row->log_q_label : 0.0;
    all[LOSS_TV] = tv;
    all[LOSS_NLA] = nla_of(tv, sums->overlap);
    all[LOSS_LK] = lambda * sums->kl + (1.0 - lambda) * tv;
    for (int i = 0; i < LOSS_TERM_COUNT; i++) {
        bool wanted = op.weight[i] != 0.0f;
        if (wanted)
            loss += (double)op.weight[i] * all[i];
        if (op.terms != NULL)
            op.terms[r * LOSS_TERM_COUNT + i] = wanted ? (float)all[i] : 0.0f;
    }
    op.loss[r] = (float)loss;
}

static __device__ void write_statistics(const struct softmax_loss &op, const struct row *row,
                                        const struct sums *sums, int64_t r)
{
    bool teacher = row->teacher != NULL;
    double q_label = row->label >= 0 ? exp(row->log_q_label) : 0.0;
    op.student_lse[r] = (float)((double)row->q.max + row->q.log_sum);
    op.student_argmax[r] = row->q.argmax;
    op.teacher_lse[r] = teacher ? (float)((double)row->p.max + row->p.log_sum) : 0.0f;
    op.teacher_argmax[r] = teacher ? row->p.argmax : (int32_t)row->label;
    op.overlap[r] = (float)(teacher ? sums->overlap : q_label);
    op.confidence[r] = (float)(teacher && !only_ce_data(op) ? exp(row->log_q_top) : q_label);
}

template <typename Logit>
static __device__ struct row row_make(const struct softmax_loss &op, int64_t r)
{
    struct row row;
    const Logit *student = (const Logit *)op.student + r * op.vocab;
    row.student = student;
    row.teacher = NULL;
    row.label = op.label[r];
    row.needs = needs_of(op.weight);
    row.log_q_label = row.log_q_top = 0.0;
    bug_unless(row.label < op.vocab);
    row.q = softmax_of(student, op.vocab);
    row.p.max = row.p.inverse_sum = 0.0f;
    row.p.log_sum = 0.0;
    row.p.argmax = 0;
    // Read before the gradient may take their place.
    if (row.label >= 0)
        row.log_q_label = log_softmax_at(&row.q, student, row.label);
    if (op.teacher != NULL) {
        const Logit *teacher = (const Logit *)op.teacher + op.teacher_row[r] * op.vocab;
        row.teacher = teacher;
        row.p = softmax_of(teacher, op.vocab);
        row.log_q_top = log_softmax_at(&row.q, student, row.p.argmax);
    }
    return row;
}

template <typename Logit, typename Out>
static __global__ void __launch_bounds__(THREADS) loss_kernel(struct softmax_loss op)
{
    int64_t r = blockIdx.x;
    struct row row = row_make<Logit>(op, r);
    struct sums sums = {0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0};
    bool teacher = row.teacher != NULL, wanted = op.gradient != NULL;
    bool two = wanted && (row.needs.reverse_kl || row.needs.js || row.needs.tv);
    __syncthreads(); // all have read the logits of the label and the teacher's token
    if (teacher && (two || !wanted)) {
        pass<Logit, Out>(&row, op.vocab, &sums, NULL, NULL);
        reduce_sums(&sums, row.needs);
    }
    if (wanted) {
        struct gradient g = gradient_of(op, &row, &sums);
        bool both = teacher && !two;
        Out *out = (Out *)op.gradient + r * op.gradient_stride;
        pass<Logit, Out>(&row, op.vocab, both ? &sums : NULL, &g, out);
        if (both)
            reduce_sums(&sums, row.needs);
    }
    // A minimum drops a NaN on one side.
    if (isnan(row.q.inverse_sum) || isnan(row.p.inverse_sum))
        sums.overlap = (double)NAN;
    if (threadIdx.x == 0) {
        write_terms(op, &row, &sums, r);
        write_statistics(op, &row, &sums, r);
    }
}

// One CTA a row.
void softmax_loss_cuda(struct stream *stream, const struct softmax_loss *op)
{
    softmax_loss_check(op);
    if (op->rows == 0)
        return;
    unsigned grid = grid_size(op->rows);
    bool logits = is_bf16(op->logits_type);
    bool gradient = op->gradient != NULL && is_bf16(op->gradient_type);
    if (logits && gradient)
        loss_kernel<bf16_t, bf16_t><<<grid, THREADS, 0, stream->cuda>>>(*op);
    else if (logits)
        loss_kernel<bf16_t, float><<<grid, THREADS, 0, stream->cuda>>>(*op);
    else if (gradient)
        loss_kernel<float, bf16_t><<<grid, THREADS, 0, stream->cuda>>>(*op);
    else
        loss_kernel<float, float><<<grid, THREADS, 0, stream->cuda>>>(*op);
    launch_check();
}
