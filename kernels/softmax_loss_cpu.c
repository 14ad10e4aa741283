// Owns the loss over the vocabulary on the CPU: per row one pass for the softmax statistics, then one
// for the sums that the terms are made of and the gradient, or two where the gradient needs the sums.
// Each pass goes through the row in pieces held in fp32; sums of pieces are added in fp64. A row's
// result depends on that row alone.
//
// Probabilities come from logits minus the row's maximum, so adding a constant to all logits changes
// nothing, and log p - log q is the difference of those shifted logits plus one constant of the row:
// exact zeros where student and teacher agree.
#include "kernels/softmax_loss.h"

#include <float.h>
#include <math.h>

#include "base/log.h"
#include "kernels/arguments.h"
#include "kernels/cpu_internal.h"

// log-softmax of element i is (logit[i] - max) - log_sum.
struct softmax {
    const void *logits; // [V]; NULL: no such row
    float max, inverse_sum;
    double log_sum;
    int32_t argmax;
};

static int32_t first_equal(const float *x, float value, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (x[i] == value)
            return (int32_t)i;
    return 0;
}

// A piece of logits as fp32: where they lie, or converted into the buffer.
static const float *logits_piece(float *buffer, const void *logits, enum dtype type, int64_t first,
                                 int64_t n)
{
    if (type == DTYPE_F32)
        return (const float *)logits + first;
    piece_load(buffer, logits, type, first, n);
    return buffer;
}

// A row of -inf alone, or with NaN or +inf in it, has a NaN sum and so NaN results.
static struct softmax softmax_of(const void *logits, enum dtype type, int64_t vocab)
{
    struct softmax row = {.logits = logits, .max = -INFINITY};
    double sum = 0.0;
    for (int64_t first = 0; first < vocab; first += PIECE) {
        float buffer[PIECE], e[PIECE];
        int64_t n = min_i64(PIECE, vocab - first);
        const float *x = logits_piece(buffer, logits, type, first, n);
        float largest = piece_max(x, n);
        if (largest > row.max) {
            sum *= exp((double)row.max - (double)largest);
            row.max = largest;
            row.argmax = (int32_t)first + first_equal(x, largest, n);
        }
        // While nothing finite was seen any reference will do: exp(-inf) is 0, NaN stays NaN.
        piece_exp(e, x, row.max == -INFINITY ? 0.0f : row.max, 1.0f, n);
        sum += (double)piece_sum(e, n);
    }
    if (row.max == -INFINITY)
        sum = (double)NAN;
    row.inverse_sum = (float)(1.0 / sum);
    row.log_sum = log(sum);
    return row;
}

static double softmax_lse(const struct softmax *row)
{
    return (double)row->max + row->log_sum;
}

// log-softmax of one element
static double softmax_log_at(const struct softmax *row, enum dtype type, int64_t index)
{
    float logit;
    piece_load(&logit, row->logits, type, index, 1);
    return (double)logit - (double)row->max - row->log_sum;
}

// Sums over the row that the terms and the gradient are made of.
struct sums {
    double overlap;  // min(p, q)
    double distance; // |p - q|
    double kl, reverse_kl;
    double kl_pm, kl_qm; // KL(p|m), KL(q|m)
    // q where q > p, and elsewhere. Each is summed by itself: where student and teacher have little in
    // common the second is far below the rounding of 1 - above, and nla divides it by the overlap.
    double above, below;
};

// What the gradient of a row is: kl (q - p) + ce q + reverse_kl q (log(q/p) - kl_qp)
// + js q (log(q/m) - kl_qm) + tv (q > p ? q below : -q above) - target at a token, twice.
struct gradient {
    float kl, ce, reverse_kl, kl_qp, js, kl_qm, tv, above, below;
    int64_t token[2]; // -1: none
    float target[2];
};

// Which sums are wanted.
struct needs {
    bool kl, reverse_kl, js, tv;
};

struct row {
    const struct softmax_loss *op;
    struct softmax student, teacher;
    int64_t label;
    double log_q_label, log_q_top; // of the label and of the teacher's largest
    struct needs needs;
    struct sums sums;
    double term[LOSS_TERM_COUNT];
    struct gradient gradient;
};

static struct needs needs_of(const float *weight)
{
    return (struct needs){
        .kl = weight[LOSS_KL] != 0.0f || weight[LOSS_LK] != 0.0f,
        .reverse_kl = weight[LOSS_REVERSE_KL] != 0.0f,
        .js = weight[LOSS_JS] != 0.0f,
        .tv = weight[LOSS_TV] != 0.0f || weight[LOSS_NLA] != 0.0f || weight[LOSS_LK] != 0.0f,
    };
}

static bool gradient_needs_sums(const struct needs *needs)
{
    return needs->reverse_kl || needs->js || needs->tv;
}

// A piece of both distributions, filled up with zeros to a multiple of PIECE_LANES. Without a teacher p and
// d are zero.
struct piece {
    int64_t n, padded;
    float q[PIECE], p[PIECE];
    float d[PIECE]; // log p - log q where some term needs it; NaN or infinite where p or q is 0
    float log_pm[PIECE], log_qm[PIECE]; // log(p/m), log(q/m) where js needs them
};

static KERNEL_CLONES void log_ratios(struct piece *piece, const float *t, const float *z,
                                     float t_max, float z_max, float shift)
{
    for (int64_t i = 0; i < piece->n; i++)
        piece->d[i] = ((t[i] - t_max) - (z[i] - z_max)) + shift;
}

// With m = (p + q) / 2 and a = |p - q| / (p + q), the larger of p and q has log(x / m) = log(1 + a)
// = 2 atanh(a / (2 + a)), the smaller one that minus |log p - log q|. The polynomial is the least
// maximum one for 2 atanh(s) / s in s^2, s <= 1/3.
static KERNEL_CLONES void mixture_logs(struct piece *piece)
{
    for (int64_t i = 0; i < piece->padded; i++) {
        float p = piece->p[i], q = piece->q[i], sum = p + q;
        float a = fabsf(p - q) / (sum == 0.0f ? 1.0f : sum);
        float s = a / (2.0f + a), u = s * s;
        float g = 2.44249001e-1f;
        g = g * u + 2.13899627e-1f;
        g = g * u + 2.86210418e-1f;
        g = g * u + 3.99986774e-1f;
        g = g * u + 6.66666806e-1f;
        g = g * u + 2.0f;
        float larger = g * s;
        float smaller = larger - fabsf(piece->d[i]);
        piece->log_pm[i] = p == 0.0f ? 0.0f : (p < q ? smaller : larger);
        piece->log_qm[i] = q == 0.0f ? 0.0f : (p < q ? larger : smaller);
    }
}

static void clear_padding(struct piece *piece)
{
    piece->padded = (piece->n + PIECE_LANES - 1) / PIECE_LANES * PIECE_LANES;
    for (int64_t i = piece->n; i < piece->padded; i++)
        piece->q[i] = piece->p[i] = piece->d[i] = 0.0f;
}

static void load_piece(struct piece *piece, const struct row *row, int64_t first)
{
    const struct softmax_loss *op = row->op;
    const struct softmax *student = &row->student, *teacher = &row->teacher;
    int64_t n = piece->n = min_i64(PIECE, op->vocab - first);
    float z_buffer[PIECE], t_buffer[PIECE];
    const float *z = logits_piece(z_buffer, student->logits, op->logits_type, first, n);
    piece_exp(piece->q, z, student->max, student->inverse_sum, n);
    clear_padding(piece);
    if (teacher->logits == NULL) {
        memset(piece->p, 0, sizeof(piece->p));
        return;
    }
    const float *t = logits_piece(t_buffer, teacher->logits, op->logits_type, first, n);
    piece_exp(piece->p, t, teacher->max, teacher->inverse_sum, n);
    if (row->needs.kl || row->needs.reverse_kl || row->needs.js)
        log_ratios(piece, t, z, teacher->max, student->max,
                   (float)(student->log_sum - teacher->log_sum));
    if (row->needs.js)
        mixture_logs(piece);
}

// A function that sums an expression of p[i], q[i] and d[i] over a piece.
#define PIECE_SUM(name, expression)                                                                \
    static KERNEL_CLONES double name(const struct piece *piece)                                    \
    {                                                                                              \
        float lane[PIECE_LANES] = {0};                                                             \
        for (int64_t first = 0; first < piece->padded; first += PIECE_LANES)                       \
            for (int l = 0; l < PIECE_LANES; l++) {                                                \
                float p = piece->p[first + l], q = piece->q[first + l], d = piece->d[first + l];   \
                (void)p, (void)q, (void)d;                                                         \
                lane[l] += (expression);                                                           \
            }                                                                                      \
        return (double)lanes_sum(lane);                                                            \
    }

// Tokens that the teacher excludes (a logit of -inf) are left out: the term would be infinite.
static inline __attribute__((always_inline)) float log_q_over_p(float q, float d)
{
    return q == 0.0f || d == -INFINITY ? 0.0f : -d;
}

PIECE_SUM(sum_overlap, q < p ? q : p)
PIECE_SUM(sum_kl, p == 0.0f ? 0.0f : p * d)
PIECE_SUM(sum_reverse_kl, log_q_over_p(q, d) * q)
PIECE_SUM(sum_distance, fabsf(p - q))
PIECE_SUM(sum_above, q > p ? q : 0.0f)
PIECE_SUM(sum_below, q > p ? 0.0f : q)

static void add_sums(struct row *row, const struct piece *piece)
{
    struct sums *sums = &row->sums;
    sums->overlap += sum_overlap(piece);
    if (row->needs.kl)
        sums->kl += sum_kl(piece);
    if (row->needs.reverse_kl)
        sums->reverse_kl += sum_reverse_kl(piece);
    if (row->needs.js) {
        sums->kl_pm += (double)piece_dot(piece->p, piece->log_pm, piece->padded);
        sums->kl_qm += (double)piece_dot(piece->q, piece->log_qm, piece->padded);
    }
    if (row->needs.tv) {
        sums->distance += sum_distance(piece);
        sums->above += sum_above(piece);
        sums->below += sum_below(piece);
    }
}

// 1 - tv where it divides or goes into a logarithm: never 0, and NaN stays NaN.
static double overlap_at_least(double overlap)
{
    return overlap < (double)FLT_MIN ? (double)FLT_MIN : overlap;
}

static double nla_of(double tv, double overlap)
{
    return tv < 0.5 ? -log1p(-tv) : -log(overlap_at_least(overlap));
}

static double lambda_of(const struct row *row)
{
    return exp(-(double)row->op->lk_eta * (1.0 - 0.5 * row->sums.distance));
}

static void row_terms(struct row *row)
{
    const struct softmax_loss *op = row->op;
    const struct sums *sums = &row->sums;
    double tv = 0.5 * sums->distance, lambda = lambda_of(row);
    double all[LOSS_TERM_COUNT] = {
        [LOSS_KL] = sums->kl,
        [LOSS_REVERSE_KL] = sums->reverse_kl,
        [LOSS_JS] = 0.5 * (sums->kl_pm + sums->kl_qm),
        [LOSS_CE_TEACHER] = -row->log_q_top,
        [LOSS_CE_DATA] = row->label >= 0 ? -row->log_q_label : 0.0,
        [LOSS_TV] = tv,
        [LOSS_NLA] = nla_of(tv, sums->overlap),
        [LOSS_LK] = lambda * sums->kl + (1.0 - lambda) * tv,
    };
    for (int i = 0; i < LOSS_TERM_COUNT; i++)
        row->term[i] = op->weight[i] != 0.0f ? all[i] : 0.0;
}

static void row_gradient(struct row *row)
{
    const float *w = row->op->weight;
    const struct sums *sums = &row->sums;
    struct gradient *g = &row->gradient;
    double lambda = lambda_of(row);
    double nla = (double)w[LOSS_NLA] / overlap_at_least(sums->overlap);
    *g = (struct gradient){
        .kl = (float)((double)w[LOSS_KL] + (double)w[LOSS_LK] * lambda),
        .reverse_kl = w[LOSS_REVERSE_KL],
        .kl_qp = (float)sums->reverse_kl,
        .js = 0.5f * w[LOSS_JS],
        .kl_qm = (float)sums->kl_qm,
        .tv = (float)((double)w[LOSS_TV] + (double)w[LOSS_LK] * (1.0 - lambda) + nla),
        .above = (float)sums->above,
        .below = (float)sums->below,
        .token = {-1, -1},
    };
    if (w[LOSS_CE_TEACHER] != 0.0f) {
        g->token[0] = row->teacher.argmax;
        g->target[0] = w[LOSS_CE_TEACHER];
    }
    if (w[LOSS_CE_DATA] != 0.0f && row->label >= 0) {
        g->token[1] = row->label;
        g->target[1] = w[LOSS_CE_DATA];
    }
    g->ce = g->target[0] + g->target[1];
}

static KERNEL_CLONES void set_kl_ce(float *out, const struct gradient *g, const struct piece *piece)
{
    for (int64_t i = 0; i < piece->padded; i++)
        out[i] = g->kl * (piece->q[i] - piece->p[i]) + g->ce * piece->q[i];
}

static KERNEL_CLONES void add_reverse_kl(float *out, const struct gradient *g,
                                         const struct piece *piece)
{
    for (int64_t i = 0; i < piece->padded; i++)
        out[i] += g->reverse_kl * piece->q[i] * (log_q_over_p(piece->q[i], piece->d[i]) - g->kl_qp);
}

static KERNEL_CLONES void add_js(float *out, const struct gradient *g, const struct piece *piece)
{
    for (int64_t i = 0; i < piece->padded; i++)
        out[i] += g->js * piece->q[i] * (piece->log_qm[i] - g->kl_qm);
}

static KERNEL_CLONES void add_tv(float *out, const struct gradient *g, const struct piece *piece)
{
    for (int64_t i = 0; i < piece->padded; i++) {
        float q = piece->q[i];
        out[i] += g->tv * (q > piece->p[i] ? q * g->below : -q * g->above);
    }
}

static void store_gradient(const struct row *row, const struct piece *piece, int64_t first,
                           void *out)
{
    const struct gradient *g = &row->gradient;
    float values[PIECE];
    set_kl_ce(values, g, piece);
    if (g->reverse_kl != 0.0f)
        add_reverse_kl(values, g, piece);
    if (g->js != 0.0f)
        add_js(values, g, piece);
    if (g->tv != 0.0f)
        add_tv(values, g, piece);
    for (int i = 0; i < 2; i++)
        if (g->token[i] >= first && g->token[i] < first + piece->n)
            values[g->token[i] - first] -= g->target[i];
    piece_store(out, values, row->op->gradient_type, first, piece->n);
}

// One pass over the row. A piece is read before its gradient is written, and a written element is
// never wider than the logit it may lie on, so the gradient may take the student's place.
static void pass(struct row *row, bool sums, void *gradient)
{
    for (int64_t first = 0; first < row->op->vocab; first += PIECE) {
        struct piece piece;
        load_piece(&piece, row, first);
        if (sums)
            add_sums(row, &piece);
        if (gradient != NULL)
            store_gradient(row, &piece, first, gradient);
    }
}

static void passes(struct row *row, void *gradient)
{
    bool teacher = row->teacher.logits != NULL;
    bool two = gradient != NULL && gradient_needs_sums(&row->needs);
    if (teacher && (two || gradient == NULL))
        pass(row, true, NULL);
    if (gradient != NULL) {
        row_gradient(row);
        pass(row, teacher && !two, gradient);
    }
    // A minimum drops a NaN on one side.
    if (isnan(row->student.inverse_sum) || isnan(row->teacher.inverse_sum))
        row->sums.overlap = (double)NAN;
}

static bool only_ce_data(const struct softmax_loss *op)
{
    for (int i = 0; i < LOSS_TERM_COUNT; i++)
        if (i != LOSS_CE_DATA && op->weight[i] != 0.0f)
            return false;
    return op->weight[LOSS_CE_DATA] != 0.0f;
}

static void write_statistics(const struct row *row, int64_t r)
{
    const struct softmax_loss *op = row->op;
    bool teacher = row->teacher.logits != NULL;
    double loss = 0.0;
    for (int i = 0; i < LOSS_TERM_COUNT; i++)
        if (op->weight[i] != 0.0f)
            loss += (double)op->weight[i] * row->term[i];
    op->loss[r] = (float)loss;
    if (op->terms != NULL)
        for (int i = 0; i < LOSS_TERM_COUNT; i++)
            op->terms[r * LOSS_TERM_COUNT + i] = (float)row->term[i];

    double q_label = row->label >= 0 ? exp(row->log_q_label) : 0.0;
    op->student_lse[r] = (float)softmax_lse(&row->student);
    op->student_argmax[r] = row->student.argmax;
    op->teacher_lse[r] = teacher ? (float)softmax_lse(&row->teacher) : 0.0f;
    op->teacher_argmax[r] = teacher ? row->teacher.argmax : (int32_t)row->label;
    op->overlap[r] = (float)(teacher ? row->sums.overlap : q_label);
    op->confidence[r] = (float)(teacher && !only_ce_data(op) ? exp(row->log_q_top) : q_label);
}

static void loss_row(const struct softmax_loss *op, int64_t r)
{
    struct row row = {.op = op, .label = op->label[r], .needs = needs_of(op->weight)};
    BUG_UNLESS(row.label < op->vocab);
    row.student =
        softmax_of(row_at(op->student, op->logits_type, r, op->vocab), op->logits_type, op->vocab);
    // Read before the gradient may take their place.
    if (row.label >= 0)
        row.log_q_label = softmax_log_at(&row.student, op->logits_type, row.label);
    if (op->teacher != NULL) {
        row.teacher =
            softmax_of(row_at(op->teacher, op->logits_type, op->teacher_row[r], op->vocab),
                       op->logits_type, op->vocab);
        row.log_q_top = softmax_log_at(&row.student, op->logits_type, row.teacher.argmax);
    }
    void *gradient = op->gradient;
    if (gradient != NULL)
        gradient = row_of(gradient, op->gradient_type, r, op->gradient_stride);
    passes(&row, gradient);
    row_terms(&row);
    write_statistics(&row, r);
}

void softmax_loss_cpu(struct stream *stream, const struct softmax_loss *op)
{
    softmax_loss_check(op);
#pragma omp parallel for num_threads(team(stream, op->rows * op->vocab)) schedule(static)
    for (int64_t r = 0; r < op->rows; r++)
        loss_row(op, r);
}
