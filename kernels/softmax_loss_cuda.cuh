// What the CUDA kernels of the loss share: softmax statistics in base 2, the elements of both
// distributions, sums over a row, the gradient's coefficients, and the record of a row from which
// loss_finish makes the results.
//
// A row's probabilities are 2^(x L - K) / sum, L the fp32 number next to log2 e and K the row's maximum
// times L. That K is rounded changes nothing, since all use the same K, and L's own error of 1e-8
// scales all logits alike. log p - log q is the difference of the logits plus one constant of the row
// pair: exact zeros where student and teacher agree.
#ifndef KERNELS_SOFTMAX_LOSS_CUDA_CUH
#define KERNELS_SOFTMAX_LOSS_CUDA_CUH

#include <float.h>
#include <math.h>

#include "kernels/cuda_internal.cuh"
#include "kernels/softmax_loss.h"

#define LOSS_L 0x1.715476p+0f

enum {
    LOSS_THREADS = 512,
    LOSS_WARPS = LOSS_THREADS / WARP,
    LOSS_ITEMS = 8 // elements of a thread at a time
};

// Sums over a row that the terms and the gradient are made of: names as in softmax_loss_cpu.c.
enum loss_sum {
    SUM_OVERLAP,
    SUM_KL,
    SUM_DISTANCE,
    SUM_REVERSE_KL,
    SUM_KL_PM,
    SUM_KL_QM,
    SUM_ABOVE, // q where q > p, and elsewhere: each by itself, 1 - above would cancel
    SUM_BELOW,
    SUM_COUNT
};

// Statistics of a row or of a part of it.
struct loss_softmax {
    float max, sum; // sum of 2^(x L - loss_reference(max))
    int32_t argmax;
};

// What a row's results are made of.
struct loss_record {
    struct loss_softmax student, teacher;
    float label_logit, top_logit; // student's logit of the label and of the teacher's argmax
    double sum[SUM_COUNT];
};

// Overlap and KL of one part of a row's elements: sums of the kernel that needs no others. kl: of
// p ((t - z) L - K of t + K of z), to which the difference of the sums' logarithms is to be added.
struct loss_part {
    float overlap, kl;
};

// Workspace of a row: its record and the parts of the kernel that makes most.
enum {
    LOSS_PARTS = 16 * LOSS_WARPS,
    LOSS_ROW_BYTES = sizeof(struct loss_record) + LOSS_PARTS * sizeof(struct loss_part)
};

struct loss_needs {
    bool kl, reverse_kl, js, tv, logs; // logs: log p - log q
};

static __host__ __device__ inline struct loss_needs loss_needs_of(const float *weight)
{
    struct loss_needs needs;
    needs.kl = weight[LOSS_KL] != 0.0f || weight[LOSS_LK] != 0.0f;
    needs.reverse_kl = weight[LOSS_REVERSE_KL] != 0.0f;
    needs.js = weight[LOSS_JS] != 0.0f;
    needs.tv = weight[LOSS_TV] != 0.0f || weight[LOSS_NLA] != 0.0f || weight[LOSS_LK] != 0.0f;
    needs.logs = needs.kl || needs.reverse_kl || needs.js;
    return needs;
}

// Whether the gradient is made of sums over the whole row.
static __host__ __device__ inline bool loss_needs_sums(const struct loss_needs &needs)
{
    return needs.reverse_kl || needs.js || needs.tv;
}

// Results of rows [0, rows) from their records and, with parts > 0, from [rows, parts] sums.
void loss_finish(struct stream *stream, const struct softmax_loss *op,
                 const struct loss_record *records, const struct loss_part *parts, int part_count);

// The kernel for GPUs of Hopper's kind. False: not for this call, nothing was done.
bool loss_cluster(struct stream *stream, const struct softmax_loss *op);

// 2^x within 2 units in the last place, 0 where that is below the normal numbers. NaN stays NaN.
static __device__ __forceinline__ float loss_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Finite also where nothing finite was seen: then 2^(-inf - reference) is 0 and NaN stays NaN.
static __device__ __forceinline__ float loss_reference(float max)
{
    return __fmul_rn(fmaxf(max, -2e38f), LOSS_L);
}

static __device__ __forceinline__ float loss_power(float x, float reference)
{
    return loss_exp2(fmaf(x, LOSS_L, -reference));
}

// A row of -inf alone, or with NaN or +inf in it, has NaN here and so NaN results.
static __device__ __forceinline__ float loss_inverse(const struct loss_softmax &s)
{
    return s.max == -INFINITY ? NAN : 1.0f / s.sum;
}

// Statistics of the elements that one thread has seen. group: of LOSS_ITEMS, the first with the maximum.
struct loss_running {
    float max, reference, sum;
    int32_t group, item;
};

static __device__ __forceinline__ struct loss_running loss_running_make(void)
{
    struct loss_running r = {-INFINITY, loss_reference(-INFINITY), 0.0f, 0, 0};
    return r;
}

static __device__ __forceinline__ int first_equal(const float x[LOSS_ITEMS], float value)
{
    int item = 0;
#pragma unroll
    for (int j = LOSS_ITEMS - 1; j >= 0; j--)
        item = x[j] == value ? j : item;
    return item;
}

// NaN is never a maximum.
static __device__ __forceinline__ void loss_running_add(struct loss_running *r,
                                                        const float x[LOSS_ITEMS], int group)
{
    // In pairs, since a chain of eight operations would wait for each.
    float largest[LOSS_ITEMS / 2], part[LOSS_ITEMS / 2];
#pragma unroll
    for (int j = 0; j < LOSS_ITEMS / 2; j++)
        largest[j] = fmaxf(x[2 * j], x[2 * j + 1]);
    float most = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
    bool larger = most > r->max;
    r->group = larger ? group : r->group;
    r->max = fmaxf(r->max, most);
    float reference = loss_reference(r->max);
#pragma unroll
    for (int j = 0; j < LOSS_ITEMS / 2; j++)
        part[j] = loss_power(x[2 * j], reference) + loss_power(x[2 * j + 1], reference);
    float sum = (part[0] + part[1]) + (part[2] + part[3]);
    r->sum = fmaf(r->sum, loss_exp2(r->reference - reference), sum);
    r->reference = reference;
}

// Float as an integer of the same order, -0 below 0.
static __device__ __forceinline__ int ordered(float x)
{
    int bits = __float_as_int(x);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

static __device__ __forceinline__ float warp_max(float x)
{
    int most = __reduce_max_sync(0xffffffffu, ordered(x));
    return __int_as_float(most ^ ((most >> 31) & 0x7fffffff));
}

// Statistics of the warp, the same in all lanes. index: of the lane's maximum in the row.
static __device__ __forceinline__ struct loss_softmax loss_warp(const struct loss_running &r,
                                                                int32_t index)
{
    struct loss_softmax s;
    s.max = warp_max(r.max);
    s.argmax = __reduce_min_sync(0xffffffffu, r.max == s.max ? index : INT32_MAX);
    s.sum = warp_sum(r.sum * loss_exp2(r.reference - loss_reference(s.max)));
    return s;
}

// Statistics of several parts, added in order.
template <typename Part>
static __device__ __forceinline__ struct loss_softmax loss_combine(const Part *parts, int count)
{
    struct loss_softmax s = {-INFINITY, 0.0f, INT32_MAX};
#pragma unroll 1
    for (int i = 0; i < count; i++)
        s.max = fmaxf(s.max, parts[i].max);
    float reference = loss_reference(s.max);
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        s.sum += parts[i].sum * loss_exp2(loss_reference(parts[i].max) - reference);
        if (parts[i].max == s.max && parts[i].argmax < s.argmax)
            s.argmax = parts[i].argmax;
    }
    if (s.max == -INFINITY)
        s.argmax = 0;
    return s;
}

// Constants of a pair of rows.
struct loss_pair {
    float q_reference, q_inverse, p_reference, p_inverse;
    float shift; // log p - log q = t - z + shift
};

// From the references and the sums.
static __device__ __forceinline__ float loss_shift(const struct loss_pair &pair, float q_sum,
                                                   float p_sum)
{
    return (pair.q_reference - pair.p_reference + log2f(q_sum / p_sum)) *
           (float)(1.0 / (double)LOSS_L);
}

static __device__ __forceinline__ struct loss_pair loss_pair_of(const struct loss_softmax &student,
                                                                const struct loss_softmax &teacher)
{
    struct loss_pair pair;
    pair.q_reference = loss_reference(student.max);
    pair.p_reference = loss_reference(teacher.max);
    pair.q_inverse = loss_inverse(student);
    pair.p_inverse = loss_inverse(teacher);
    pair.shift = loss_shift(pair, student.sum, teacher.sum);
    return pair;
}

// One element of both distributions. d = log p - log q, NaN or infinite where p or q is 0.
struct loss_element {
    float q, p, d, log_pm, log_qm;
};

// log(p/m) and log(q/m), m = (p + q) / 2: see mixture_logs in softmax_loss_cpu.c.
static __device__ __forceinline__ void mixture_logs(struct loss_element *e)
{
    float p = e->p, q = e->q;
    // Below the normal numbers, where the fast division ends, the logarithms weigh nothing.
    float a = __fdividef(fabsf(p - q), fmaxf(p + q, FLT_MIN));
    float s = __fdividef(a, 2.0f + a), u = s * s;
    float g = 2.44249001e-1f;
    g = fmaf(g, u, 2.13899627e-1f);
    g = fmaf(g, u, 2.86210418e-1f);
    g = fmaf(g, u, 3.99986774e-1f);
    g = fmaf(g, u, 6.66666806e-1f);
    g = fmaf(g, u, 2.0f);
    float larger = g * s;
    float smaller = larger - fabsf(e->d);
    e->log_pm = p == 0.0f ? 0.0f : (p < q ? smaller : larger);
    e->log_qm = q == 0.0f ? 0.0f : (p < q ? larger : smaller);
}

// Logits of -inf where there is no element or no teacher.
static __device__ __forceinline__ struct loss_element
loss_element_of(const struct loss_pair &pair, const struct loss_needs &needs, float z, float t)
{
    struct loss_element e = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    e.q = loss_power(z, pair.q_reference) * pair.q_inverse;
    e.p = loss_power(t, pair.p_reference) * pair.p_inverse;
    if (needs.logs)
        e.d = (t - z) + pair.shift;
    if (needs.js)
        mixture_logs(&e);
    return e;
}

// Tokens that the teacher excludes (a logit of -inf) are left out: the term would be infinite.
static __device__ __forceinline__ float log_q_over_p(float q, float d)
{
    return q == 0.0f || d == -INFINITY ? 0.0f : -d;
}

static __device__ __forceinline__ void loss_add(float sum[SUM_COUNT], const struct loss_element &e,
                                                const struct loss_needs &needs)
{
    sum[SUM_OVERLAP] += fminf(e.q, e.p);
    if (needs.kl)
        sum[SUM_KL] += e.p == 0.0f ? 0.0f : e.p * e.d;
    if (needs.reverse_kl)
        sum[SUM_REVERSE_KL] += log_q_over_p(e.q, e.d) * e.q;
    if (needs.js) {
        sum[SUM_KL_PM] += e.p * e.log_pm;
        sum[SUM_KL_QM] += e.q * e.log_qm;
    }
    if (needs.tv) {
        sum[SUM_DISTANCE] += fabsf(e.p - e.q);
        sum[SUM_ABOVE] += e.q > e.p ? e.q : 0.0f;
        sum[SUM_BELOW] += e.q > e.p ? 0.0f : e.q;
    }
}

// Coefficients of the gradient: kl (q - p) + ce q + reverse_kl q (log(q/p) - kl_qp)
// + js q (log(q/m) - kl_qm) + tv (q > p ? q below : -q above), minus target at a token, twice.
struct loss_gradient {
    float kl, ce, reverse_kl, kl_qp, js, kl_qm, tv, above, below;
    float target[2]; // of the teacher's argmax and of the label
};

static __device__ __forceinline__ float loss_gradient_at(const struct loss_gradient &g,
                                                         const struct loss_element &e)
{
    float value = g.kl * (e.q - e.p) + g.ce * e.q;
    if (g.reverse_kl != 0.0f)
        value += g.reverse_kl * e.q * (log_q_over_p(e.q, e.d) - g.kl_qp);
    if (g.js != 0.0f)
        value += g.js * e.q * (e.log_qm - g.kl_qm);
    if (g.tv != 0.0f)
        value += g.tv * (e.q > e.p ? e.q * g.below : -e.q * g.above);
    return value;
}

// 1 - tv where it divides or goes into a logarithm: never 0, and NaN stays NaN.
static __device__ __forceinline__ double overlap_at_least(double overlap)
{
    return overlap < (double)FLT_MIN ? (double)FLT_MIN : overlap;
}

static __device__ __forceinline__ double loss_lambda(const struct softmax_loss &op,
                                                     const double *sum)
{
    return op.weight[LOSS_LK] == 0.0f ? 0.0
                                      : exp(-(double)op.lk_eta * (1.0 - 0.5 * sum[SUM_DISTANCE]));
}

// sum: unread where the gradient needs no sums.
static __device__ __forceinline__ struct loss_gradient
loss_gradient_of(const struct softmax_loss &op, const double *sum, int32_t label)
{
    const float *w = op.weight;
    double lambda = loss_lambda(op, sum), nla = 0.0;
    if (w[LOSS_NLA] != 0.0f)
        nla = (double)w[LOSS_NLA] / overlap_at_least(sum[SUM_OVERLAP]);
    struct loss_gradient g;
    g.kl = (float)((double)w[LOSS_KL] + (double)w[LOSS_LK] * lambda);
    g.reverse_kl = w[LOSS_REVERSE_KL];
    g.kl_qp = (float)sum[SUM_REVERSE_KL];
    g.js = 0.5f * w[LOSS_JS];
    g.kl_qm = (float)sum[SUM_KL_QM];
    g.tv = (float)((double)w[LOSS_TV] + (double)w[LOSS_LK] * (1.0 - lambda) + nla);
    g.above = (float)sum[SUM_ABOVE];
    g.below = (float)sum[SUM_BELOW];
    g.target[0] = w[LOSS_CE_TEACHER];
    g.target[1] = label >= 0 ? w[LOSS_CE_DATA] : 0.0f;
    g.ce = g.target[0] + g.target[1];
    return g;
}

#endif
