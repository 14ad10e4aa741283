// Owns the count of operations and bytes of a step. A product of [m, k] and [k, n] is 2 m k n operations.
#include "trainer/plan_work.h"

#include <math.h>
#include <string.h>

#include "trainer/muon.h"
#include "trainer/update_rule.h"

static double least(double a, double b)
{
    return a < b ? a : b;
}

// Context positions that block rows see in a layer. Anchors lie evenly over documents of length n: on
// average they see n / 2 positions, and with a window w min(p, w) at position p.
static double visible_positions(double n, double window)
{
    if (window <= 0.0 || window >= n)
        return n / 2.0;
    return window - window * window / (2.0 * n);
}

static void count_rows(struct plan_work *w, const struct plan *plan, const struct config *config,
                       const struct plan_documents *documents)
{
    const struct drafter_sizes *s = &plan->sizes;
    double tokens = (double)config->data.seq_len, block = (double)s->block_size;
    double drafts = block - (s->predict_from_anchor ? 0.0 : 1.0);
    double most = (double)config->anchors.max_anchors, in_row = 1.0;
    if (documents->documents > 0)
        in_row = fmax(1.0, tokens * (double)documents->documents / (double)documents->tokens);
    if (config->anchors.per == ANCHORS_PER_DOCUMENT)
        most *= in_row;
    w->rows = config->data.rows_per_step;
    w->tokens = tokens;
    bool all = s->kind == DRAFTER_EAGLE3; // positions are not drawn
    w->anchors = all ? tokens - 1.0 : least(most, tokens - 1.0);
    w->block_rows = w->anchors * block;
    w->groups = ceil(w->block_rows / (double)plan->execution.group_rows);
    w->scored = w->anchors * drafts;
    w->teachers = all ? tokens : tokens * (1.0 - exp(-w->scored / tokens));
    w->guessed = documents->tokens == 0;
    double length = w->guessed ? tokens : documents->mean_length;
    for (int64_t l = 0; l < s->layers; l++)
        w->visible +=
            visible_positions(length, s->sliding[l] ? (double)s->window : 0.0) / (double)s->layers;
}

// Of one row of EAGLE-3. Step 0 of the layers before the last, and all keys and values of step 0, are the
// context's; so is the embedding's half of the first layer's products.
static void count_steps_of_layers(struct plan_work *w, const struct plan *plan,
                                  const struct config *config)
{
    const struct drafter_sizes *s = &plan->sizes;
    double h = (double)s->hidden, q = (double)(s->heads * s->head_dim);
    double kv = (double)(s->kv_heads * s->head_dim), before = (double)s->layers - 1.0;
    double later = w->anchors * ((double)s->ttt_steps - 1.0) * (double)s->layers;
    double behind = q * h + 3.0 * h * (double)s->intermediate,
           tokens = (double)config->data.seq_len;
    double fc = 2.0 * tokens * (double)s->features * h * h;
    double embedding = 2.0 * tokens * h * (q + 2.0 * kv);
    double keys = 2.0 * tokens * h * (before + 1.0) * 2.0 * kv;
    double whole = 2.0 * tokens * before * (h * q + behind);
    w->forward = 2.0 * (later * (h * (q + 2.0 * kv) + behind) + w->anchors * (h * q + behind));
    w->backward = 2.0 * w->forward;
    w->context = 2.0 * (fc + embedding) + 3.0 * (keys + whole); // what they read needs no gradient
    w->recompute = whole;
    if (strcmp(plan->execution.recompute, "layer") == 0)
        w->recompute +=
            2.0 * (later + w->anchors) * (2.0 * q * h + 2.0 * h * (double)s->intermediate);
    double pairs = (later + w->anchors) * (w->visible + 0.5 * (double)s->ttt_steps);
    w->attention = (2.0 + 5.0) * 2.0 * q * (pairs + tokens * before * w->visible);
}

// Of one row.
static void count_layers(struct plan_work *w, const struct plan *plan, const struct config *config)
{
    const struct drafter_sizes *s = &plan->sizes;
    double h = (double)s->hidden, q = (double)(s->heads * s->head_dim);
    double kv = (double)(s->kv_heads * s->head_dim), layers = (double)s->layers;
    double tokens = (double)config->data.seq_len;
    double behind = q * h + 3.0 * h * (double)s->intermediate; // a layer's attention
    double weights = h * (q + 2.0 * kv) + behind;
    double fc = 2.0 * tokens * (double)s->features * h * h;
    double keys = layers * 2.0 * tokens * h * 2.0 * kv;
    // In the last layer only scored rows go on.
    w->forward = 2.0 * (w->block_rows * layers * weights - (w->block_rows - w->scored) * behind);
    w->backward = 2.0 * w->forward;
    w->scored_layers = 3.0 * 2.0 * w->scored * behind;
    w->context = 2.0 * fc + 3.0 * keys; // the features need no gradient
    double pairs = layers * w->block_rows * (w->visible + (double)s->block_size);
    double product = 2.0 * q * pairs;
    w->attention = (2.0 + 5.0) * product; // two products forward, five backward
    if (strcmp(plan->execution.recompute, "layer") == 0)
        w->recompute = w->forward + 2.0 * product;
}

static void count_loss(struct plan_work *w, const struct plan *plan,
                       const struct plan_subject *subject, const struct config *config)
{
    const struct drafter_sizes *s = &plan->sizes;
    int64_t columns = config->loss.full_vocab_metrics ? s->vocab : s->draft_vocab;
    double token = 2.0 * (double)s->hidden, student = w->scored * token * (double)s->draft_vocab;
    double markov = w->scored * 2.0 * (double)(s->markov_rank * s->draft_vocab);
    w->student = student + markov;
    w->gradient = (s->trainable_head ? 2.0 * student : student) + 2.0 * markov;
    w->teacher = subject->last_plane >= 0 ? w->teachers * token * (double)columns : 0.0;
}

// Gradients read for their norm and for the update, masters and moments read and written, weights written;
// Muon's matrices have one moment, a direction that is written and read twice, and the orthogonal one.
static void count_update(struct plan_work *w, const struct plan *plan)
{
    bool rounds = strcmp(plan->execution.compute, "bf16") == 0;
    double type = rounds ? 2.0 : 4.0, copy = rounds ? 2.0 : 0.0;
    for (size_t i = 0; i < plan->params.count; i++) {
        const struct param *p = &plan->params.items[i];
        bool muon = update_is_muon(&plan->optimizer, p);
        if (muon)
            w->update += muon_flops(&plan->optimizer, p->shape[0], p->shape[1]);
        double average = plan->optimizer.ema > 0.0 ? 12.0 : 0.0;
        w->optimizer_bytes +=
            (double)p->count * ((muon ? 36.0 + 2.0 * type : 32.0) + copy + average);
    }
}

static void sum(struct plan_work *w)
{
    double *parts[] = {&w->context,   &w->forward, &w->backward, &w->recompute,
                       &w->attention, &w->student, &w->teacher,  &w->gradient};
    for (size_t i = 0; i < sizeof(parts) / sizeof(*parts); i++) {
        *parts[i] *= (double)w->rows;
        w->flops += *parts[i];
    }
    w->scored_layers *= (double)w->rows;
    w->flops += w->update;
}

// Of the whole run; later epochs may have a row more or less than the first.
static void count_steps(struct plan_work *w, const struct config *config,
                        const struct plan_documents *documents)
{
    int64_t most = config->run.max_steps;
    w->epoch_steps = (documents->rows + w->rows - 1) / w->rows;
    w->steps = w->epoch_steps * config->run.epochs;
    if (most > 0 && (w->steps == 0 || w->steps > most))
        w->steps = most;
}

// Of the busiest of so many ranks.
static double least_seconds(const struct plan_work *w, int64_t ranks, double tflops)
{
    double rows = ceil((double)w->rows / (double)ranks);
    double flops = (w->flops - w->update) * rows / (double)w->rows + w->update / (double)ranks;
    return flops / (tflops * 1e12) + w->optimizer_bytes / (double)ranks / plan_bandwidth;
}

void plan_work(struct plan_work *w, const struct plan *plan, const struct plan_subject *subject,
               const struct config *config, const struct plan_documents *documents, double tflops)
{
    *w = (struct plan_work){.rows = 0};
    count_rows(w, plan, config, documents);
    if (plan->sizes.kind == DRAFTER_EAGLE3)
        count_steps_of_layers(w, plan, config);
    else
        count_layers(w, plan, config);
    count_loss(w, plan, subject, config);
    count_update(w, plan);
    sum(w);
    count_steps(w, config, documents);
    w->read_bytes = (double)(w->rows * config->data.seq_len) * plan_token_bytes(subject);
    w->seconds = least_seconds(w, 1, tflops);
    w->rank_seconds = least_seconds(w, subject->ranks, tflops);
}

double plan_work_useful(const struct plan_work *w, const struct plan_counts *counts)
{
    double rows = (double)w->rows, anchors = counts->anchors / (rows * w->anchors),
           scored = counts->slots / (rows * w->scored);
    return w->update + w->context * counts->tokens / (rows * w->tokens) +
           (w->forward + w->backward - w->scored_layers + w->attention) * anchors +
           (w->scored_layers + w->student + w->gradient) * scored +
           w->teacher * counts->covered / (rows * w->teachers);
}

double plan_token_bytes(const struct plan_subject *subject)
{
    struct feature_layout features = plan_token_layout(subject);
    return (double)feature_layout_file_bytes(&features) + sizeof(int32_t) +
           sizeof(uint8_t); // token id and loss mask
}

// What servable weights hold beside parameters: EAGLE-3's second names of norms, its own copy of a frozen head,
// tables of a draft vocabulary.
static double served_bytes(const struct drafter_sizes *s)
{
    double draft = (double)s->draft_vocab;
    if (s->kind != DRAFTER_EAGLE3)
        return 0.0;
    double bytes = (double)((s->layers - 1) * s->hidden) * sizeof(bf16);
    if (!s->trainable_head)
        bytes += draft * (double)s->hidden * sizeof(bf16);
    if (s->draft_vocab != s->vocab)
        bytes += draft * sizeof(int64_t) + (double)s->vocab;
    return bytes;
}

double plan_checkpoint_bytes(const struct plan *plan)
{
    // Master, moments and average in fp32, and the servable weights in bf16.
    double bytes = served_bytes(&plan->sizes);
    for (size_t i = 0; i < plan->params.count; i++) {
        const struct param *p = &plan->params.items[i];
        double arrays = update_is_muon(&plan->optimizer, p) ? 2.0 : 3.0;
        arrays += plan->optimizer.ema > 0.0 ? 1.0 : 0.0;
        bytes += (double)p->count * (arrays * sizeof(float) + sizeof(bf16));
    }
    return bytes;
}
