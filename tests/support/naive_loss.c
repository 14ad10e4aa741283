// Owns the reference of the loss over the vocabulary, in double, term by term as in the formulas.
#include <math.h>
#include <stdlib.h>

#include "base/memory.h"
#include "tests/support/naive.h"

struct distribution {
    double *log_p, *p; // [V]
    double lse;
    int64_t argmax;
};

static void distribution_open(struct distribution *d, const double *logits, int64_t vocab)
{
    double max = -INFINITY, sum = 0.0;
    for (int64_t i = 0; i < vocab; i++)
        if (logits[i] > max) {
            max = logits[i];
            d->argmax = i;
        }
    for (int64_t i = 0; i < vocab; i++)
        sum += exp(logits[i] - max);
    d->lse = max + log(sum);
    d->log_p = memory_alloc((size_t)vocab, sizeof(double));
    d->p = memory_alloc((size_t)vocab, sizeof(double));
    for (int64_t i = 0; i < vocab; i++) {
        d->log_p[i] = logits[i] - max - log(sum);
        d->p[i] = exp(d->log_p[i]);
    }
}

static void distribution_close(struct distribution *d)
{
    free(d->log_p);
    free(d->p);
}

// a log(a / b), 0 where a is 0
static double divergence(double a, double log_a, double log_b)
{
    return a == 0.0 ? 0.0 : a * (log_a - log_b);
}

struct totals {
    double kl, reverse_kl, p_to_m, q_to_m, tv, overlap, below;
};

static struct totals totals_of(const struct distribution *p, const struct distribution *q,
                               int64_t vocab)
{
    struct totals t = {0};
    for (int64_t i = 0; i < vocab; i++) {
        double log_m = log((p->p[i] + q->p[i]) / 2.0);
        t.kl += divergence(p->p[i], p->log_p[i], q->log_p[i]);
        if (p->log_p[i] != (double)-INFINITY)
            t.reverse_kl += divergence(q->p[i], q->log_p[i], p->log_p[i]);
        t.p_to_m += divergence(p->p[i], p->log_p[i], log_m);
        t.q_to_m += divergence(q->p[i], q->log_p[i], log_m);
        t.tv += fabs(p->p[i] - q->p[i]) / 2.0;
        t.overlap += isnan(p->p[i] + q->p[i]) ? (double)NAN : fmin(p->p[i], q->p[i]);
        t.below += q->p[i] <= p->p[i] ? q->p[i] : 0.0;
    }
    return t;
}

static double tv_gradient(const struct totals *t, double p, double q)
{
    return -q * ((q <= p ? 1.0 : 0.0) - t->below);
}

// The gradient of one term at one logit; `target` says whether the logit is the term's token.
static double term_gradient(enum loss_term term, const struct totals *t, double lambda, double p,
                            double q, double log_p, double log_q, bool target)
{
    double reverse = q == 0.0 || log_p == (double)-INFINITY ? 0.0 : log_q - log_p;
    double to_m = q == 0.0 ? 0.0 : log_q - log((p + q) / 2.0);
    switch (term) {
    case LOSS_KL:
        return q - p;
    case LOSS_REVERSE_KL:
        return q * (reverse - t->reverse_kl);
    case LOSS_JS:
        return q * (to_m - t->q_to_m) / 2.0;
    case LOSS_CE_TEACHER:
    case LOSS_CE_DATA:
        return q - (target ? 1.0 : 0.0);
    case LOSS_TV:
        return tv_gradient(t, p, q);
    case LOSS_NLA:
        return tv_gradient(t, p, q) / (1.0 - t->tv);
    case LOSS_LK:
        return lambda * (q - p) + (1.0 - lambda) * tv_gradient(t, p, q);
    default:
        abort();
    }
}

static int64_t target_of(enum loss_term term, const struct naive_loss *in,
                         const struct distribution *p)
{
    return term == LOSS_CE_TEACHER ? p->argmax : in->label;
}

static void gradient_of(const struct naive_loss *in, const struct distribution *p,
                        const struct distribution *q, const struct totals *t, double lambda,
                        double *gradient)
{
    for (int64_t i = 0; i < in->vocab; i++) {
        // A teacher that is no distribution leaves no gradient, whatever the terms.
        gradient[i] = p->p != NULL && isnan(p->p[i]) ? (double)NAN : 0.0;
        for (int term = 0; term < LOSS_TERM_COUNT; term++) {
            if (in->weight[term] == 0.0 || (term == LOSS_CE_DATA && in->label < 0))
                continue;
            gradient[i] +=
                in->weight[term] * term_gradient(term, t, lambda, p->p != NULL ? p->p[i] : 0.0,
                                                 q->p[i], p->p != NULL ? p->log_p[i] : 0.0,
                                                 q->log_p[i], i == target_of(term, in, p));
        }
    }
}

static bool only_data(const struct naive_loss *in)
{
    for (int term = 0; term < LOSS_TERM_COUNT; term++)
        if (term != LOSS_CE_DATA && in->weight[term] != 0.0)
            return false;
    return in->weight[LOSS_CE_DATA] != 0.0;
}

void naive_softmax_loss(const struct naive_loss *in, struct naive_loss_result *result,
                        double *gradient)
{
    struct distribution p = {0}, q = {0};
    struct totals t = {0};
    distribution_open(&q, in->student, in->vocab);
    double label_q = in->label >= 0 ? q.p[in->label] : 0.0;
    *result = (struct naive_loss_result){.student_lse = q.lse,
                                         .student_argmax = q.argmax,
                                         .teacher_argmax = in->label,
                                         .overlap = label_q,
                                         .confidence = label_q};
    double term[LOSS_TERM_COUNT] = {0};
    if (in->label >= 0)
        term[LOSS_CE_DATA] = -q.log_p[in->label];
    if (in->teacher != NULL) {
        distribution_open(&p, in->teacher, in->vocab);
        t = totals_of(&p, &q, in->vocab);
        result->lambda = in->lambda >= 0.0 ? in->lambda : exp(-in->eta * (1.0 - t.tv));
        term[LOSS_KL] = t.kl;
        term[LOSS_REVERSE_KL] = t.reverse_kl;
        term[LOSS_JS] = (t.p_to_m + t.q_to_m) / 2.0;
        term[LOSS_CE_TEACHER] = -q.log_p[p.argmax];
        term[LOSS_TV] = t.tv;
        term[LOSS_NLA] = -log(1.0 - t.tv);
        term[LOSS_LK] = result->lambda * t.kl + (1.0 - result->lambda) * t.tv;
        result->teacher_lse = p.lse;
        result->teacher_argmax = p.argmax;
        result->overlap = t.overlap;
        if (!only_data(in))
            result->confidence = q.p[p.argmax];
    }
    for (int i = 0; i < LOSS_TERM_COUNT; i++) {
        result->term[i] = in->weight[i] != 0.0 ? term[i] : 0.0;
        result->loss += in->weight[i] * result->term[i];
    }
    if (gradient != NULL)
        gradient_of(in, &p, &q, &t, result->lambda, gradient);
    distribution_close(&p);
    distribution_close(&q);
}
