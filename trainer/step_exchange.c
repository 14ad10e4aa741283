// Owns when gradients and weights travel between ranks. Does not own how (ranks.h), nor who owns a tensor
// (ownership.c).
#include "trainer/step_exchange.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "trainer/step.h"

enum {
    GRADIENT_MARK = RANKS_MARKS - 1,
    METRICS = sizeof(struct metrics) / sizeof(double),
    CLOCK_SPARE = 8 // laps that the rest of a group needs
};

// A mark that a later part uses again is a later place, for which waiting is right, too.
static int mark_of(int part)
{
    return part % GRADIENT_MARK;
}

// What the stream waits for is time of its own where the clock has room for it.
static void wait_for(struct step *step, int mark, enum step_part before)
{
    const struct backend *backend = step->setup.backend;
    bool timed = step->clock.unread + CLOCK_SPARE < STREAM_TIME_SLOTS;
    if (timed)
        step_clock_lap(&step->clock, backend, step->stream, before);
    ranks_wait(step->setup.ranks, mark);
    if (timed)
        step_clock_lap(&step->clock, backend, step->stream, STEP_EXCHANGE);
}

static void weights_needed(void *context, int part)
{
    struct step *step = context;
    if (!step->exchange.awaited[part])
        return;
    step->exchange.awaited[part] = false;
    wait_for(step, mark_of(part), STEP_FORWARD);
}

static int stage_of(const struct step *step, size_t param)
{
    return drafter_gradient_stage(step->setup.sizes, step->setup.params->items[param].part);
}

// Before a gradient leaves, its own squares are summed: they tell whose gradient is not finite.
static void measure_own(struct step *step, int stage)
{
    const struct params *params = step->setup.params;
    for (size_t i = 0; i < params->count; i++)
        if (stage_of(step, i) == stage)
            step->setup.backend->kernels->sum_squares(
                step->stream, &(struct sum_squares){.count = params->items[i].count,
                                                    .x = step->grads + params->items[i].offset,
                                                    .result = step->own_squares + i,
                                                    .scratch = step->squares_scratch});
}

static void give_stage(struct step *step, int stage)
{
    const struct step_setup *s = &step->setup;
    BUG_UNLESS(stage == step->exchange.next_stage);
    step->exchange.next_stage++;
    measure_own(step, stage);
    ranks_group_begin(s->ranks);
    for (size_t i = 0; i < s->params->count; i++)
        if (stage_of(step, i) == stage)
            ranks_reduce(s->ranks, step->grads + s->params->items[i].offset,
                         s->params->items[i].count, s->ownership->owner[i]);
    ranks_group_end(s->ranks);
}

static void gradients_final(void *context, int stage)
{
    struct step *step = context;
    if (step->exchange.final_row)
        give_stage(step, stage);
}

void step_exchange_open(struct step *step)
{
    const struct step_setup *s = &step->setup;
    struct step_exchange *e = &step->exchange;
    e->shared = s->ranks != NULL && ownership_shared(s->ownership);
    if (!e->shared)
        return;
    size_t ranks = (size_t)s->ownership->ranks;
    e->awaited = memory_alloc((size_t)s->params->parts, sizeof(*e->awaited));
    e->values = memory_alloc(METRICS + s->params->count + ranks * STEP_WORDS, sizeof(*e->values));
    e->words = memory_alloc(ranks * STEP_WORDS, sizeof(*e->words));
    step->hooks = (struct drafter_hooks){step, weights_needed, gradients_final};
    drafter_set_hooks(&step->drafter, &step->hooks);
    ranks_compute(s->ranks, step->stream);
}

void step_exchange_close(struct step *step)
{
    free(step->exchange.awaited);
    free(step->exchange.values);
    free(step->exchange.words);
    step->exchange = (struct step_exchange){.shared = false};
}

void step_exchange_begin(struct step *step)
{
    struct step_exchange *e = &step->exchange;
    e->final_row = false;
    e->next_stage = 0;
    memset(e->word, 0, sizeof(e->word));
}

void step_exchange_gradients(struct step *step)
{
    const struct step_setup *s = &step->setup;
    s->backend->range_push("exchange");
    drafter_settle_gradients(&step->drafter, s->backend, step->stream);
    while (step->exchange.next_stage < drafter_gradient_stages(s->sizes))
        give_stage(step, step->exchange.next_stage);
    ranks_mark(s->ranks, GRADIENT_MARK);
    wait_for(step, GRADIENT_MARK, STEP_BETWEEN);
    s->backend->range_pop();
}

void step_exchange_weights(struct step *step, int part)
{
    const struct step_setup *s = &step->setup;
    ranks_group_begin(s->ranks);
    for (size_t i = 0; i < s->params->count; i++) {
        enum dtype type;
        void *weights = step_weights_of(step, i, &type);
        if (s->params->items[i].part == part)
            ranks_broadcast(s->ranks, weights, (size_t)s->params->items[i].count * dtype_size(type),
                            s->ownership->owner[i]);
    }
    ranks_group_end(s->ranks);
    ranks_mark(s->ranks, mark_of(part));
    step->exchange.awaited[part] = true;
}

void step_exchange_settle(struct step *step)
{
    for (int part = 0; step->exchange.shared && part < step->setup.params->parts; part++)
        if (step->exchange.awaited[part]) {
            step->exchange.awaited[part] = false;
            ranks_wait(step->setup.ranks, mark_of(part));
        }
}

// The first tensor that was not finite here; each rank says so for itself.
static double first_nonfinite(const struct step *step)
{
    for (size_t i = 0; i < step->setup.params->count; i++)
        if (!isfinite(step->h_own_squares[i]))
            return (double)(i + 1);
    return 0.0;
}

void step_exchange_agree(struct step *step)
{
    const struct step_setup *s = &step->setup;
    struct step_exchange *e = &step->exchange;
    size_t count = s->params->count, words = (size_t)s->ownership->ranks * STEP_WORDS;
    double *squares = e->values + METRICS, *all = squares + count;
    e->word[WORD_NONFINITE] = first_nonfinite(step);
    memcpy(e->values, &step->metrics, sizeof(step->metrics));
    for (size_t i = 0; i < count; i++)
        squares[i] = ownership_mine(s->ownership, i) ? step->h_squares[i] : 0.0;
    memset(all, 0, words * sizeof(*all));
    memcpy(all + s->ownership->rank * STEP_WORDS, e->word, sizeof(e->word));
    ranks_sum(s->ranks, e->values, (int64_t)(METRICS + count + words));
    memcpy(&step->metrics, e->values, sizeof(step->metrics));
    memcpy(step->h_squares, squares, count * sizeof(*squares));
    memcpy(e->words, all, words * sizeof(*all));
}

double step_word_max(const struct step *step, enum step_word word)
{
    const struct step_exchange *e = &step->exchange;
    double most = e->shared ? 0.0 : e->word[word];
    for (int r = 0; e->shared && r < step->setup.ownership->ranks; r++)
        most = fmax(most, e->words[r * STEP_WORDS + (int)word]);
    return most;
}

double step_word_sum(const struct step *step, enum step_word word)
{
    const struct step_exchange *e = &step->exchange;
    double sum = e->shared ? 0.0 : e->word[word];
    for (int r = 0; e->shared && r < step->setup.ownership->ranks; r++)
        sum += e->words[r * STEP_WORDS + (int)word];
    return sum;
}
