// Owns the update: the norm of the gradient, clipping, AdamW or Muon (muon.c) on the tensors that this rank owns.
#include <math.h>
#include <stdio.h>

#include "trainer/step.h"
#include "trainer/update_rule.h"

static void lap(struct step *step, enum step_part part)
{
    step_clock_lap(&step->clock, step->setup.backend, step->stream, part);
}

void *step_weights_of(const struct step *step, size_t param, enum dtype *type)
{
    const struct param *p = &step->setup.params->items[param];
    if (p->norm && step->norms != NULL) {
        *type = DTYPE_F32;
        return step->norms + p->norm_offset;
    }
    *type = step->drafter.options.compute;
    return (unsigned char *)step->weights + (size_t)p->offset * dtype_size(*type);
}

// Sums of squares of the gradients that this rank owns into h_squares; those of its rows alone as well.
static void measure_squares(struct step *step)
{
    const struct params *params = step->setup.params;
    const struct backend *backend = step->setup.backend;
    for (size_t i = 0; i < params->count; i++)
        if (ownership_mine(step->setup.ownership, i))
            backend->kernels->sum_squares(
                step->stream, &(struct sum_squares){.count = params->items[i].count,
                                                    .x = step->grads + params->items[i].offset,
                                                    .result = step->squares + i,
                                                    .scratch = step->squares_scratch});
    size_t bytes = params->count * sizeof(double);
    backend->copy_out(step->stream, step->h_squares, step->squares, bytes);
    if (step->exchange.shared)
        backend->copy_out(step->stream, step->h_own_squares, step->own_squares, bytes);
    backend->sync(step->stream);
    step_clock_read(&step->clock, backend, step->stream, 0);
}

// Sum of squares of every gradient; the tensors' order fixes the order of additions.
static double add_squares(const struct step *step, char *nonfinite, size_t size)
{
    const struct params *params = step->setup.params;
    double sum = 0.0;
    for (size_t i = 0; i < params->count; i++) {
        sum += step->h_squares[i];
        if (!isfinite(step->h_squares[i]) && nonfinite[0] == '\0')
            snprintf(nonfinite, size, "%s", params->items[i].name);
    }
    return sum;
}

static void update_by_adamw(struct step *step, const struct step_update *update, size_t i)
{
    const struct optimizer_config *o = &step->setup.config->optimizer;
    const struct param *param = &step->setup.params->items[i];
    enum dtype type;
    void *weights = step_weights_of(step, i, &type);
    step->setup.backend->kernels->adamw(
        step->stream,
        &(struct adamw){.count = param->count,
                        .param = step->master + state_offset(&step->state, STATE_MASTER, i),
                        .m = step->m + state_offset(&step->state, STATE_M, i),
                        .v = step->v + state_offset(&step->state, STATE_V, i),
                        .grad = step->grads + param->offset,
                        .copy = step->weights != (void *)step->master ? weights : NULL,
                        .copy_type = type,
                        .lr = update->lr,
                        .beta1 = o->betas.items[0],
                        .beta2 = o->betas.items[1],
                        .eps = o->eps,
                        .weight_decay = update_weight_decay(o, param),
                        .grad_scale = update->grad_scale,
                        .step = update->applied_step});
}

static void update_by_muon(struct step *step, const struct step_update *update, size_t i)
{
    const struct optimizer_config *o = &step->setup.config->optimizer;
    const struct param *param = &step->setup.params->items[i];
    enum dtype type;
    void *weights = step_weights_of(step, i, &type);
    muon_apply(
        &step->muon, o, step->setup.backend, step->stream,
        &(struct muon_tensor){.rows = param->shape[0],
                              .columns = param->shape[1],
                              .param = step->master + state_offset(&step->state, STATE_MASTER, i),
                              .m = step->m + state_offset(&step->state, STATE_M, i),
                              .grad = step->grads + param->offset,
                              .copy = step->weights != (void *)step->master ? weights : NULL,
                              .copy_type = type,
                              .lr = update->lr * update_lr_share(o, param),
                              .weight_decay = update_weight_decay(o, param),
                              .grad_scale = update->grad_scale});
}

static void update_average(struct step *step, const struct step_update *update, size_t i)
{
    const struct step_setup *s = &step->setup;
    double keep = update_average_decay(&s->config->optimizer, update->applied_step);
    s->backend->kernels->average(
        step->stream, &(struct average){
                          .count = s->params->items[i].count,
                          .average = step->ema + state_offset(&step->state, STATE_EMA, i),
                          .x = step->master + state_offset(&step->state, STATE_MASTER, i),
                          .share = 1.0 - keep,
                      });
}

void step_update_tensor(struct step *step, const struct step_update *update, size_t i)
{
    const struct step_setup *s = &step->setup;
    if (update_is_muon(&s->config->optimizer, &s->params->items[i]))
        update_by_muon(step, update, i);
    else
        update_by_adamw(step, update, i);
    if (step->ema != NULL)
        update_average(step, update, i);
}

// Part after part, in the order in which the next forward pass reads them: a part travels while the next
// one is computed.
static void update_all(struct step *step, const struct step_update *update)
{
    const struct params *params = step->setup.params;
    bool shared = step->exchange.shared;
    for (int part = 0; shared && part < params->parts; part++) {
        for (size_t i = 0; i < params->count; i++)
            if (params->items[i].part == part && ownership_mine(step->setup.ownership, i))
                step_update_tensor(step, update, i);
        step_exchange_weights(step, part);
    }
    for (size_t i = 0; !shared && i < params->count; i++)
        step_update_tensor(step, update, i);
}

// Sums of all ranks, on all of them. False: some rank has given the step up.
static bool exchange(struct step *step)
{
    step_exchange_gradients(step);
    measure_squares(step);
    step_exchange_agree(step);
    return step_word_max(step, WORD_STOPPED) == 0.0;
}

void step_apply(struct step *step, double lr, int64_t applied_step, struct step_outcome *outcome)
{
    const struct config *config = step->setup.config;
    lap(step, STEP_BETWEEN);
    *outcome = (struct step_outcome){.clip_factor = 1.0};
    outcome->stopped =
        step->exchange.shared ? !exchange(step) : step->exchange.word[WORD_STOPPED] != 0.0;
    if (outcome->stopped)
        return;
    outcome->weight_sum =
        config->loss.normalize == NORMALIZE_COUNT ? step->metrics.slots : step->metrics.weight;
    // D-PACE weights follow the student, so the sum itself may be NaN: that is not an empty step.
    if (outcome->weight_sum <= 0.0) {
        outcome->empty = true;
        step->setup.backend->sync(step->stream);
        step_clock_read(&step->clock, step->setup.backend, step->stream, 0);
        return;
    }
    if (!step->exchange.shared)
        measure_squares(step);
    double squares = add_squares(step, outcome->tensor, sizeof(outcome->tensor));
    outcome->grad_norm = sqrt(squares) / outcome->weight_sum;
    if (!isfinite(outcome->grad_norm)) {
        outcome->nonfinite = true;
        return;
    }
    double clip = config->optimizer.grad_clip;
    if (clip > 0.0 && outcome->grad_norm > clip)
        outcome->clip_factor = clip / outcome->grad_norm;
    step->setup.backend->range_push("update");
    update_all(step,
               &(struct step_update){lr, outcome->clip_factor / outcome->weight_sum, applied_step});
    step->setup.backend->range_pop();
    outcome->applied = true;
    lap(step, STEP_OPTIMIZER); // read in the next step: nobody waits for the update
}
