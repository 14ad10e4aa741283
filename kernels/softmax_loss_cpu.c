// Owns the loss over the vocabulary on the CPU: per row one pass for the softmax statistics, one for
// the terms' sums, one for the gradient. Each pass goes through the row in pieces held in fp32; sums
// of pieces are added in fp64. A row's result depends on that row alone.
//
// Probabilities come from logits minus the row's maximum, so adding a constant to all logits changes
// nothing, and log p - log q is the difference of those shifted logits plus one constant of the row:
// exact zeros where student and teacher agree.
#include "kernels/softmax_loss.h"

#include <float.h>
#include <math.h>

#include "base/log.h"
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

static KERNEL_CLONES void subtract(float *x, float value, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] -= value;
}

// A row of -inf alone, or with NaN or +inf in it, has a NaN sum and so NaN results.
static struct softmax softmax_of(const void *logits, enum dtype type, int64_t vocab)
{
    struct softmax row = {.logits = logits, .max = -INFINITY};
    double sum = 0.0;
    for (int64_t first = 0; first < vocab; first += PIECE) {
        float x[PIECE];
        int64_t n = min_i64(PIECE, vocab - first);
        piece_load(x, logits, type, first, n);
        float largest = piece_max(x, n);
        if (largest > row.max) {
            sum *= exp((double)row.max - (double)largest);
            row.max = largest;
            row.argmax = (int32_t)first + first_equal(x, largest, n);
        }
        // While nothing finite was seen any reference will do: exp(-inf) is 0, NaN stays NaN.
        subtract(x, row.max == -INFINITY ? 0.0f : row.max, n);
        piece_exp(x, x, n);
        sum += (double)piece_sum(x, n);
    }
    row.inverse_sum = row.max == -INFINITY ? NAN : (float)(1.0 / sum);
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

// A piece of both distributions; without a teacher p and d are unset.
struct piece {
    int64_t n;
    float q[PIECE], p[PIECE];
    float d[PIECE]; // log p - log q; NaN or infinite where p or q is 0
};

static KERNEL_CLONES void scale(float *x, float factor, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] *= factor;
}

static KERNEL_CLONES void difference(float *d, const float *t, const float *z, float shift,
                                     int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        d[i] = (t[i] - z[i]) + shift;
}

static void load_piece(struct piece *piece, const struct softmax *student,
                       const struct softmax *teacher, const struct softmax_loss *op, int64_t first)
{
    int64_t n = piece->n = min_i64(PIECE, op->vocab - first);
    piece_load(piece->q, student->logits, op->logits_type, first, n);
    subtract(piece->q, student->max, n);
    if (teacher->logits != NULL) {
        piece_load(piece->p, teacher->logits, op->logits_type, first, n);
        subtract(piece->p, teacher->max, n);
        difference(piece->d, piece->p, piece->q, (float)(student->log_sum - teacher->log_sum), n);
        piece_exp(piece->p, piece->p, n);
        scale(piece->p, teacher->inverse_sum, n);
    }
    piece_exp(piece->q, piece->q, n);
    scale(piece->q, student->inverse_sum, n);
}

static KERNEL_CLONES void overlap_values(float *x, const struct piece *piece)
{
    for (int64_t i = 0; i < piece->n; i++)
        x[i] = piece->q[i] < piece->p[i] ? piece->q[i] : piece->p[i];
}

static KERNEL_CLONES void distance_values(float *x, const struct piece *piece)
{
    for (int64_t i = 0; i < piece->n; i++)
        x[i] = fabsf(piece->p[i] - piece->q[i]);
}

static KERNEL_CLONES void kl_values(float *x, const struct piece *piece)
{
    for (int64_t i = 0; i < piece->n; i++)
        x[i] = piece->p[i] == 0.0f ? 0.0f : piece->p[i] * piece->d[i];
}

// Tokens that the teacher excludes (a logit of -inf) are left out: the term would be infinite.
static inline __attribute__((always_inline)) float log_q_over_p(float q, float d)
{
    return q == 0.0f || d == -INFINITY ? 0.0f : -d;
}

static KERNEL_CLONES void reverse_kl_values(float *x, const struct piece *piece)
{
    for (int64_t i = 0; i < piece->n; i++)
        x[i] = piece->q[i] * log_q_over_p(piece->q[i], piece->d[i]);
}

// With m = (p + q) / 2 and a = |p - q| / (p + q), the larger of p and q has log(x / m) = log(1 + a)
// = 2 atanh(a / (2 + a)), the smaller one that minus |log p - log q|. The polynomial is the least
// maximum one for 2 atanh(s) / s in s^2, s <= 1/3.
static KERNEL_CLONES void ratio_logs(float *log_pm, float *log_qm, const struct piece *piece)
{
    for (int64_t i = 0; i < piece->n; i++) {
        float p = piece->p[i], q = piece->q[i], d = piece->d[i];
        float sum = p + q;
        float a = fabsf(p - q) / (sum == 0.0f ? 1.0f : sum);
        float s = a / (2.0f + a), u = s * s;
        float g = 2.44249001e-1f;
        g = g * u + 2.13899627e-1f;
        g = g * u + 2.86210418e-1f;
        g = g * u + 3.99986774e-1f;
        g = g * u + 6.66666806e-1f;
        g = g * u + 2.0f;
        float larger = g * s;
        float smaller = larger - fabsf(d);
        log_pm[i] = p == 0.0f ? 0.0f : (p < q ? smaller : larger);
        log_qm[i] = q == 0.0f ? 0.0f : (p < q ? larger : smaller);
    }
}

static KERNEL_CLONES void above_values(float *x, const struct piece *piece)
{
    for (int64_t i = 0; i < piece->n; i++)
        x[i] = piece->q[i] > piece->p[i] ? piece->q[i] : 0.0f;
}

static KERNEL_CLONES void below_values(float *x, const struct piece *piece)
{
    for (int64_t i = 0; i < piece->n; i++)
        x[i] = piece->q[i] > piece->p[i] ? 0.0f : piece->q[i];
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

// Which sums are wanted.
struct needs {
    bool kl, reverse_kl, js, tv;
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

static void add_piece(struct sums *sums, const struct needs *needs, const struct piece *piece)
{
    float x[PIECE], y[PIECE];
    overlap_values(x, piece);
    sums->overlap += (double)piece_sum(x, piece->n);
    if (needs->kl) {
        kl_values(x, piece);
        sums->kl += (double)piece_sum(x, piece->n);
    }
    if (needs->reverse_kl) {
        reverse_kl_values(x, piece);
        sums->reverse_kl += (double)piece_sum(x, piece->n);
    }
    if (needs->js) {
        ratio_logs(x, y, piece);
        sums->kl_pm += (double)piece_dot(x, piece->p, piece->n);
        sums->kl_qm += (double)piece_dot(y, piece->q, piece->n);
    }
    if (needs->tv) {
        distance_values(x, piece);
        sums->distance += (double)piece_sum(x, piece->n);
        above_values(x, piece);
        sums->above += (double)piece_sum(x, piece->n);
        below_values(x, piece);
        sums->below += (double)piece_sum(x, piece->n);
    }
}

// What the gradient of a row is: q (kl + ce) - p kl + reverse_kl q (log(q/p) - kl_qp)
// + js q (log(q/m) - kl_qm) + tv (q > p ? q below : -q above) - target at a token, twice.
struct gradient {
    float kl, ce, reverse_kl, kl_qp, js, kl_qm, tv, above, below;
    int64_t token[2]; // -1: none
    float target[2];
};

struct row {
    const struct softmax_loss *op;
    struct softmax student, teacher;
    int64_t label;
    struct sums sums;
    double term[LOSS_TERM_COUNT];
    struct gradient gradient;
};

// 1 - tv where it divides or goes into a logarithm: never 0, and NaN stays NaN.
static double overlap_at_least(double overlap)
{
    return overlap < (double)FLT_MIN ? (double)FLT_MIN : overlap;
}

static double nla_of(double tv, double overlap)
{
    return tv < 0.5 ? -log1p(-tv) : -log(overlap_at_least(overlap));
}

static void row_terms(struct row *row)
{
    const struct softmax_loss *op = row->op;
    const struct sums *sums = &row->sums;
    double tv = 0.5 * sums->distance;
    double lambda = exp(-(double)op->lk_eta * (1.0 - tv));
    double all[LOSS_TERM_COUNT] = {
        [LOSS_KL] = sums->kl,
        [LOSS_REVERSE_KL] = sums->reverse_kl,
        [LOSS_JS] = 0.5 * (sums->kl_pm + sums->kl_qm),
        [LOSS_TV] = tv,
        [LOSS_NLA] = nla_of(tv, sums->overlap),
        [LOSS_LK] = lambda * sums->kl + (1.0 - lambda) * tv,
    };
    if (row->teacher.logits != NULL)
        all[LOSS_CE_TEACHER] = -softmax_log_at(&row->student, op->logits_type, row->teacher.argmax);
    if (row->label >= 0)
        all[LOSS_CE_DATA] = -softmax_log_at(&row->student, op->logits_type, row->label);
    for (int i = 0; i < LOSS_TERM_COUNT; i++)
        row->term[i] = op->weight[i] != 0.0f ? all[i] : 0.0;
}

static void row_gradient(struct row *row)
{
    const float *w = row->op->weight;
    const struct sums *sums = &row->sums;
    struct gradient *g = &row->gradient;
    double tv = 0.5 * sums->distance;
    double lambda = exp(-(double)row->op->lk_eta * (1.0 - tv));
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

static KERNEL_CLONES void add_reverse_kl(float *out, const struct gradient *g,
                                         const struct piece *piece)
{
    for (int64_t i = 0; i < piece->n; i++)
        out[i] += g->reverse_kl * piece->q[i] * (log_q_over_p(piece->q[i], piece->d[i]) - g->kl_qp);
}

static KERNEL_CLONES void add_js(float *out, const struct gradient *g, const float *log_qm,
                                 const struct piece *piece)
{
    for (int64_t i = 0; i < piece->n; i++)
        out[i] += g->js * piece->q[i] * (log_qm[i] - g->kl_qm);
}

static KERNEL_CLONES void add_tv(float *out, const struct gradient *g, const struct piece *piece)
{
    for (int64_t i = 0; i < piece->n; i++) {
        float q = piece->q[i];
        out[i] += g->tv * (q > piece->p[i] ? q * g->below : -q * g->above);
    }
}

static KERNEL_CLONES void add_kl_ce(float *out, const struct gradient *g, const struct piece *piece,
                                    bool teacher)
{
    if (teacher)
        for (int64_t i = 0; i < piece->n; i++)
            out[i] = g->kl * (piece->q[i] - piece->p[i]) + g->ce * piece->q[i];
    else
        for (int64_t i = 0; i < piece->n; i++)
            out[i] = g->ce * piece->q[i];
}

static void gradient_piece(float *out, const struct row *row, const struct piece *piece,
                           int64_t first)
{
    const struct gradient *g = &row->gradient;
    add_kl_ce(out, g, piece, row->teacher.logits != NULL);
    if (g->reverse_kl != 0.0f)
        add_reverse_kl(out, g, piece);
    if (g->js != 0.0f) {
        float log_pm[PIECE], log_qm[PIECE];
        ratio_logs(log_pm, log_qm, piece);
        add_js(out, g, log_qm, piece);
    }
    if (g->tv != 0.0f)
        add_tv(out, g, piece);
    for (int i = 0; i < 2; i++)
        if (g->token[i] >= first && g->token[i] < first + piece->n)
            out[g->token[i] - first] -= g->target[i];
}

// The piece is read before it is written, and a written element is never wider than the logit it may
// lie on, so the gradient may take the student's place.
static void write_gradient(const struct row *row, void *out)
{
    for (int64_t first = 0; first < row->op->vocab; first += PIECE) {
        struct piece piece;
        float gradient[PIECE];
        load_piece(&piece, &row->student, &row->teacher, row->op, first);
        gradient_piece(gradient, row, &piece, first);
        piece_store(out, gradient, row->op->gradient_type, first, piece.n);
    }
}

static void add_sums(struct row *row)
{
    struct needs needs = needs_of(row->op->weight);
    for (int64_t first = 0; first < row->op->vocab; first += PIECE) {
        struct piece piece;
        load_piece(&piece, &row->student, &row->teacher, row->op, first);
        add_piece(&row->sums, &needs, &piece);
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

    double label_q =
        row->label < 0 ? 0.0 : exp(softmax_log_at(&row->student, op->logits_type, row->label));
    op->student_lse[r] = (float)softmax_lse(&row->student);
    op->student_argmax[r] = row->student.argmax;
    op->teacher_lse[r] = teacher ? (float)softmax_lse(&row->teacher) : 0.0f;
    op->teacher_argmax[r] = teacher ? row->teacher.argmax : (int32_t)row->label;
    op->overlap[r] = (float)(teacher ? row->sums.overlap : label_q);
    op->confidence[r] =
        (float)(!teacher || only_ce_data(op)
                    ? label_q
                    : exp(softmax_log_at(&row->student, op->logits_type, row->teacher.argmax)));
}

static void loss_row(const struct softmax_loss *op, int64_t r)
{
    struct row row = {.op = op, .label = op->label[r]};
    BUG_UNLESS(row.label < op->vocab);
    row.student =
        softmax_of(row_at(op->student, op->logits_type, r, op->vocab), op->logits_type, op->vocab);
    if (op->teacher != NULL) {
        const void *logits = row_at(op->teacher, op->logits_type, op->teacher_row[r], op->vocab);
        row.teacher = softmax_of(logits, op->logits_type, op->vocab);
        add_sums(&row);
    }
    row_terms(&row);
    write_statistics(&row, r);
    if (op->gradient == NULL)
        return;
    row_gradient(&row);
    write_gradient(&row, row_of(op->gradient, op->gradient_type, r, op->gradient_stride));
}

static void check(const struct softmax_loss *op)
{
    if (op->teacher == NULL)
        for (int i = 0; i < LOSS_TERM_COUNT; i++)
            BUG_UNLESS(i == LOSS_CE_DATA || op->weight[i] == 0.0f);
    if (op->gradient == op->student)
        BUG_UNLESS((size_t)op->gradient_stride * dtype_size(op->gradient_type) ==
                       (size_t)op->vocab * dtype_size(op->logits_type) &&
                   dtype_size(op->gradient_type) <= dtype_size(op->logits_type));
}

void softmax_loss_cpu(struct stream *stream, const struct softmax_loss *op)
{
    check(op);
#pragma omp parallel for num_threads(stream->threads) schedule(static)
    for (int64_t r = 0; r < op->rows; r++)
        loss_row(op, r);
}
