// Owns the step on one rank: memory, micro-steps, anchor groups. The update is step_update.c's, what ranks
// exchange step_exchange.c's.
#include "trainer/step.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"

static enum dtype compute_type(const struct step_setup *setup)
{
    return strcmp(setup->execution->compute, "bf16") == 0 ? DTYPE_BF16 : DTYPE_F32;
}

static enum recompute_level recompute_level(const struct execution *execution)
{
    if (strcmp(execution->recompute, "layer") == 0)
        return RECOMPUTE_LEVEL_LAYER;
    return strcmp(execution->recompute, "cheap") == 0 ? RECOMPUTE_LEVEL_CHEAP
                                                      : RECOMPUTE_LEVEL_NONE;
}

struct feature_layout step_features(const struct step_setup *setup)
{
    return feature_layout_make(setup->planes, setup->last_plane >= 0, setup->target->hidden_size,
                               setup->float8);
}

static void plan_rows(struct step *step, struct arena *arena)
{
    const struct step_setup *s = &step->setup;
    struct feature_layout features = step_features(s);
    int64_t rows = features.float8 ? 1 : features.planes;
    for (int i = 0; i < STEP_STAGES; i++)
        step->stage.places[i].features =
            arena_take(arena, "features", i == 0 ? "hidden_states" : "next_hidden_states",
                       DTYPE_BF16, s->config->data.seq_len, rows, features.stride / rows);
}

static float *take_state(const struct step *step, struct arena *arena, enum state_array array,
                         const char *name)
{
    int64_t elements = state_elements(&step->state, array);
    return arena_take(arena, "optimizer", name, DTYPE_F32, elements, 1, 1);
}

static bool has_map(const struct step_setup *setup)
{
    return setup->sizes->draft_vocab != setup->sizes->vocab;
}

// A draft vocabulary orders the head's rows in its own way.
static bool own_head(const struct step_setup *setup)
{
    return !setup->target->tied || has_map(setup);
}

static void plan_state(struct step *step, struct arena *arena)
{
    const struct step_setup *s = &step->setup;
    int64_t elements = s->params->elements;
    enum dtype type = compute_type(s);
    bool shared = ownership_shared(s->ownership);
    step->state = (struct state_layout){s->params, s->ownership, &s->config->optimizer};
    step->master = take_state(step, arena, STATE_MASTER, "master");
    step->weights = step->master;
    if (type != DTYPE_F32 || shared)
        step->weights = arena_take(arena, "weights", "weights", type, elements, 1, 1);
    if (type != DTYPE_F32 && shared)
        step->norms =
            arena_take(arena, "weights", "norms", DTYPE_F32, s->params->norm_elements, 1, 1);
    if (s->training) {
        step->m = take_state(step, arena, STATE_M, "adam_m");
        step->v = take_state(step, arena, STATE_V, "adam_v");
        if (state_exists(&step->state, STATE_EMA))
            step->ema = take_state(step, arena, STATE_EMA, "ema");
        step->grads = arena_take(arena, "gradients", "grads", DTYPE_F32, elements, 1, 1);
        step->squares =
            arena_take(arena, "gradients", "squares", DTYPE_F64, (int64_t)s->params->count, 1, 1);
        step->squares_scratch =
            arena_take(arena, "gradients", "squares_scratch", DTYPE_F64, SUM_SQUARES_PARTS, 1, 1);
        if (shared)
            step->own_squares = arena_take(arena, "gradients", "own_squares", DTYPE_F64,
                                           (int64_t)s->params->count, 1, 1);
    }
    const struct target *t = s->target;
    step->embed =
        arena_take(arena, "target", "embed_tokens", type, t->embed.rows, t->hidden_size, 1);
    step->head = step->embed;
    if (own_head(s))
        step->head = arena_take(arena, "target", "lm_head", type, t->vocab_size, t->hidden_size, 1);
    if (has_map(s))
        step->vocab_ids = arena_take(arena, "target", "vocab_ids", DTYPE_I32, t->vocab_size, 1, 1);
    step->norm = arena_take(arena, "target", "norm", DTYPE_F32, t->hidden_size, 1, 1);
    plan_rows(step, arena);
}

// Ranks that own only some masters read norms, which are not rounded, from an array of their own.
static bool packs_norms(const struct step_setup *setup)
{
    return ownership_shared(setup->ownership) && compute_type(setup) != DTYPE_F32;
}

static const float *norms_of(const struct step *step)
{
    if (packs_norms(&step->setup))
        return step->norms;
    return ownership_shared(step->setup.ownership) ? step->weights : step->master;
}

// Weights of a parameter that the loss reads, and where its gradient is added.
static const void *trained_table(const struct step *step, const char *name, float **grad)
{
    const struct step_setup *s = &step->setup;
    const struct param *param = params_find(s->params, name);
    *grad = s->training ? step->grads + param->offset : NULL;
    return (unsigned char *)step->weights + (size_t)param->offset * dtype_size(compute_type(s));
}

// Of EAGLE-3 that compares the kept columns alone: as many teachers as have room with a student for each ttt_step.
static int64_t teacher_rows(const struct step_setup *s)
{
    int64_t steps = s->sizes->block_size;
    return s->execution->chunk_rows * s->sizes->vocab / (s->sizes->draft_vocab * (steps + 1));
}

// The draft vocabulary, and the heads that are trained, where there are such.
static void plan_student(const struct step *step, struct loss_options *loss)
{
    const struct step_setup *s = &step->setup;
    if (has_map(s))
        loss->map = (struct loss_vocab){
            .draft = s->sizes->draft_vocab,
            .ids = step->vocab_ids,
            .h_ids = s->map != NULL ? s->map->ids : NULL,
            .draft_of = s->map != NULL ? s->map->draft_ids : NULL,
            .mask_outside = s->config->loss.out_of_vocab == OUT_OF_VOCAB_MASKED,
            .full_in_training = s->config->loss.full_vocab_metrics,
        };
    if (has_map(s) && s->sizes->kind == DRAFTER_EAGLE3)
        loss->teacher_rows = teacher_rows(s);
    if (s->sizes->trainable_head)
        loss->student_head = trained_table(step, "lm_head.weight", &loss->dhead);
    if (s->sizes->markov_rank == 0)
        return;
    loss->markov.rank = s->sizes->markov_rank;
    loss->markov.w1 = trained_table(step, MARKOV_W1, &loss->markov.dw1);
    loss->markov.w2 = trained_table(step, MARKOV_W2, &loss->markov.dw2);
}

static bool weights_are_whole(const struct step_setup *s)
{
    return s->sizes->kind == DRAFTER_EAGLE3 && s->config->loss.ttt_decay_base == 1.0;
}

// EAGLE-3's activations take what a thrifty loss leaves of the memory that they share: one over the kept columns,
// whose gradients are not fp32. Of a row in several groups they take as much, but are a smaller part of its time.
static bool keeps_activations(const struct step_setup *s)
{
    bool one_group = s->execution->group_rows == execution_most_rows(s->config, s->sizes);
    return weights_are_whole(s) && has_map(s) && !s->config->loss.full_vocab_metrics && one_group;
}

static void plan_model(struct step *step, struct arena *arena)
{
    const struct step_setup *s = &step->setup;
    const struct config *config = s->config;
    const struct target *t = s->target;
    struct drafter_options drafter = {
        .sizes = s->sizes,
        .params = s->params,
        .compute = compute_type(s),
        .max_tokens = config->data.seq_len,
        .group_rows = s->execution->group_rows,
        .features = step_features(s),
        .recompute = recompute_level(s->execution),
        .keep_activations = keeps_activations(s),
        .training = s->training,
        .noise = config->data.noise_std == 0.0             ? NOISE_KIND_NONE
                 : config->data.noise_kind == NOISE_NORMAL ? NOISE_KIND_NORMAL
                                                           : NOISE_KIND_UNIFORM,
        .noise_std = (float)config->data.noise_std,
        .embed_scale = t->embed_scale,
        .weights = step->weights,
        .norms = norms_of(step),
        .norms_packed = packs_norms(s),
        .grads = step->grads,
        .embed = step->embed,
        .embed_rows = t->embed.rows,
    };
    memcpy(drafter.plane, s->plane, (size_t)s->sizes->features * sizeof(*s->plane));
    drafter_plan(&step->drafter, &drafter, arena);
    struct loss_options loss = {
        .config = &config->loss,
        .hidden = t->hidden_size,
        .vocab = t->vocab_size,
        .block_size = s->sizes->block_size,
        .group_rows = s->execution->group_rows,
        .chunk_rows = s->execution->chunk_rows,
        .compute = compute_type(s),
        .logits = strcmp(s->execution->logits, "bf16") == 0 ? DTYPE_BF16 : DTYPE_F32,
        .has_teacher = s->last_plane >= 0,
        .teacher_norm = s->last_hidden == LAST_HIDDEN_PRE_NORM,
        .norm_eps = (float)t->rms_norm_eps,
        .norm_weight_offset = t->norm_weight_offset,
        .logit_scale = t->logit_scale,
        .head = step->head,
        .norm = step->norm,
    };
    plan_student(step, &loss);
    // The passes of EAGLE-3 are so short that the way of the results to the host would show.
    if (s->sizes->kind == DRAFTER_EAGLE3)
        loss.results = loss_plan_results(&loss, arena);
    loss.whole_weights = weights_are_whole(s);
    // The loss runs between a group's forward and backward pass and leaves nothing else but the gradient of
    // the hidden states: it shares memory with what only these passes use. The update runs after all passes.
    bool muon = s->training && config->optimizer.kind == OPTIMIZER_MUON;
    arena_union_begin(arena, muon ? "passes, loss or update" : "passes or loss");
    drafter_plan_scratch(&step->drafter, arena);
    arena_union_next(arena);
    loss_plan(&step->loss, &loss, arena);
    if (muon) {
        arena_union_next(arena);
        muon_plan(&step->muon, &config->optimizer, s->params, compute_type(s), arena);
    }
    arena_union_end(arena);
}

// One pass over all buffers: the first sizes the arena, the second carves it.
static void plan_pass(struct step *step, struct arena *arena)
{
    plan_state(step, arena);
    plan_model(step, arena);
}

void step_plan(struct arena *arena, const struct step_setup *setup)
{
    struct step step = {.setup = *setup};
    plan_pass(&step, arena);
    drafter_close(&step.drafter);
}

static void open_host(struct step *step)
{
    const struct step_setup *s = &step->setup;
    const struct config *config = s->config;
    size_t tokens = (size_t)config->data.seq_len, rows = (size_t)s->execution->group_rows;
    step->layout = (struct block_layout){.block_size = s->sizes->block_size,
                                         .predict_from_anchor = s->sizes->predict_from_anchor,
                                         .tail = config->anchors.tail,
                                         .slot_mask = config->loss.slot_mask,
                                         .slot_weight = config->loss.slot_weight,
                                         .slot_decay_gamma = config->loss.slot_decay_gamma,
                                         .eagle3 = s->sizes->kind == DRAFTER_EAGLE3,
                                         .mask_index = config->loss.mask_index,
                                         .ttt_decay_base = config->loss.ttt_decay_base};
    anchor_scratch_open(&step->anchor_scratch, config->data.seq_len);
    step->anchors = memory_alloc(tokens, sizeof(*step->anchors));
    step->accepted = memory_alloc(tokens, sizeof(*step->accepted));
    step->slots = memory_alloc(rows, sizeof(*step->slots));
    step->hidden_row = memory_alloc(rows, sizeof(*step->hidden_row));
    step->h_squares = s->backend->host_alloc(s->params->count * sizeof(*step->h_squares));
    step->h_own_squares = s->backend->host_alloc(s->params->count * sizeof(*step->h_own_squares));
    slot_results_open(&step->results, s->execution->group_rows);
    loss_open(&step->loss, s->backend);
}

// Bytes of the largest array that is brought in.
static size_t largest_array(const struct step_setup *setup)
{
    size_t frozen = (size_t)(setup->target->embed.rows * setup->target->hidden_size);
    size_t state = (size_t)setup->params->elements;
    return (state > frozen ? state : frozen) * sizeof(float);
}

static void load_target(struct step *step)
{
    const struct step_setup *s = &step->setup;
    const struct target *t = s->target;
    int32_t *order = has_map(s) ? s->map->ids : NULL;
    step_load_frozen(step, &t->embed, NULL, step->embed, compute_type(s));
    if (own_head(s))
        step_load_frozen(step, t->tied ? &t->embed : &t->head, order, step->head, compute_type(s));
    step_load_frozen(step, &t->norm, NULL, step->norm, DTYPE_F32);
    if (order != NULL)
        transfer_in(&step->transfer, step->vocab_ids, (size_t)t->vocab_size * sizeof(*order),
                    transfer_copy, order);
}

int step_open(struct step *step, const struct step_setup *setup, struct error *err)
{
    (void)err;
    *step = (struct step){.setup = *setup};
    const struct backend *backend = setup->backend;
    int threads = (int)setup->execution->threads;
    step->stream = backend->stream_open(
        &(struct stream_options){.threads = threads,
                                 .workspace_bytes = backend->stream_workspace_bytes(threads),
                                 .generic = strcmp(setup->execution->kernels, "generic") == 0});
    arena_init(&step->arena);
    plan_pass(step, &step->arena);
    drafter_close(&step->drafter);
    step->memory = backend->alloc(step->arena.bytes);
    arena_place(&step->arena, step->memory, step->arena.bytes);
    plan_pass(step, &step->arena);
    step_stage_open(&step->stage, backend);
    transfer_open(&step->transfer, backend, largest_array(setup));
    step_clock_start(&step->clock, backend, step->stream);
    open_host(step);
    drafter_open(&step->drafter, backend, step->stream);
    step_exchange_open(step);
    if (setup->training) // what lies between tensors is never written
        backend->zero(step->stream, step->grads, (size_t)setup->params->elements * sizeof(float));
    load_target(step);
    return 0;
}

void step_close(struct step *step)
{
    if (step->stream != NULL) // host memory that copies read is freed below
        step->setup.backend->sync(step->stream);
    drafter_close(&step->drafter);
    loss_close(&step->loss);
    slot_results_close(&step->results);
    anchor_scratch_close(&step->anchor_scratch);
    free(step->anchors);
    free(step->accepted);
    free(step->slots);
    free(step->hidden_row);
    if (step->h_squares != NULL)
        step->setup.backend->host_free(step->h_squares);
    if (step->h_own_squares != NULL)
        step->setup.backend->host_free(step->h_own_squares);
    step_exchange_close(step);
    step_stage_close(&step->stage);
    transfer_close(&step->transfer);
    if (step->memory != NULL)
        step->setup.backend->free(step->memory);
    if (step->stream != NULL)
        step->setup.backend->stream_close(step->stream);
    arena_release(&step->arena);
    *step = (struct step){0};
}

static void lap(struct step *step, enum step_part part)
{
    step_clock_lap(&step->clock, step->setup.backend, step->stream, part);
}

void step_begin(struct step *step)
{
    drafter_begin_gradients(&step->drafter, step->setup.backend, step->stream);
    step_clock_clear(&step->clock);
    step_exchange_begin(step);
    step->metrics = (struct metrics){0};
    step->rows = 0;
}

void step_last_row(struct step *step)
{
    step->exchange.final_row = true;
}

static bool stopped(const struct step *step)
{
    return step->stop != NULL && step->stop(step->stop_context);
}

static void group_backward(struct step *step, bool last)
{
    step->setup.backend->range_push("backward");
    drafter_group_backward(&step->drafter, step->setup.backend, step->stream, last);
    step->setup.backend->range_pop();
    lap(step, STEP_BACKWARD);
}

// The last hidden states of the running row.
static const bf16 *step_last_hidden(const struct step *step, const struct row *row)
{
    return row->features.last < 0 ? NULL : step->drafter.features + row->features.last;
}

// Scored slots whose teacher wants a token that the drafter can not say.
static void count_outside(const struct step *step, int64_t slots, struct metrics *metrics)
{
    const struct step_setup *s = &step->setup;
    for (int64_t i = 0; has_map(s) && s->last_plane >= 0 && i < slots; i++)
        metrics->outside += s->map->draft_ids[step->results.teacher_argmax[i]] < 0;
}

// One group: blocks anchors[first .. first + count). Its scored slots are counted into metrics.
static void run_group(struct step *step, const struct row *row, int64_t first, int64_t count,
                      bool gradient, bool last, struct metrics *metrics)
{
    const struct step_setup *s = &step->setup;
    const struct backend *backend = s->backend;
    int64_t slots = slots_make(row, &step->layout, step->anchors + first, count, step->slots);
    int64_t rows;
    backend->range_push("forward");
    const void *hidden =
        drafter_group_forward(&step->drafter, backend, step->stream, step->anchors + first, count,
                              step->slots, slots, step->hidden_row, &rows);
    backend->range_pop();
    lap(step, STEP_FORWARD);
    struct loss_group group = {.rows = rows,
                               .hidden = hidden,
                               .hidden_row = step->hidden_row,
                               .last = step_last_hidden(step, row),
                               .last_stride = row->features.stride,
                               .tokens = row->tokens,
                               .input_ids = row->input_ids,
                               .slots = step->slots,
                               .slot_count = slots,
                               .dhidden = gradient ? drafter_group_gradient(&step->drafter) : NULL};
    int before = step->clock.unread; // laps that are over when the results are there
    backend->range_push("loss");
    bool ready = loss_group_queue(&step->loss, backend, step->stream, &group);
    backend->range_pop();
    lap(step, STEP_LOSS);
    if (gradient && ready)
        group_backward(step, last);
    loss_group_collect(&step->loss, backend, step->stream, &group, &step->results);
    step_clock_read(&step->clock, backend, step->stream, step->clock.unread - before);
    if (gradient && !ready)
        group_backward(step, last);
    count_outside(step, slots, metrics);
    metrics_count_slots(metrics, step->layout.predict_from_anchor ? 0 : 1, step->slots, slots,
                        &step->results, count, step->accepted + first);
    if (step->observer != NULL)
        step->observer->group(step->observer->context, first, step->slots, slots, &step->results);
}

// Context, then all groups of step->anchors[0 .. count). 1: stopped.
static int run_row(struct step *step, const struct row *row, int64_t count, bool gradient,
                   struct metrics *metrics)
{
    const struct step_setup *s = &step->setup;
    int64_t per_group = s->execution->group_rows / s->sizes->block_size;
    lap(step, STEP_BETWEEN);
    const bf16 *features = step_stage_take(&step->stage, step->stream, row)->features;
    lap(step, STEP_COPY);
    s->backend->range_push("context");
    // Noise belongs to training: a row that is scored is seen as it is when serving.
    drafter_context_forward(&step->drafter, s->backend, step->stream, row, features, gradient,
                            (uint64_t)s->config->run.seed);
    s->backend->range_pop();
    lap(step, STEP_FORWARD);
    for (int64_t first = 0; first < count; first += per_group) {
        if (stopped(step))
            return 1;
        int64_t blocks = count - first < per_group ? count - first : per_group;
        s->backend->range_push("group");
        run_group(step, row, first, blocks, gradient, first + blocks >= count, metrics);
        s->backend->range_pop();
    }
    return 0;
}

// Supervised positions that at least one block predicts, up to the end of each block.
static double covered_positions(const struct step *step, const struct row *row, int64_t count)
{
    const struct block_layout *layout = &step->layout;
    int64_t covered = 0, done = 0; // positions before `done` have been counted
    int64_t drafts = layout->block_size - (layout->predict_from_anchor ? 0 : 1);
    for (int64_t i = 0; i < count; i++) {
        int64_t anchor = step->anchors[i];
        int64_t end = row->doc_offsets[row->doc_of[anchor] + 1];
        for (int64_t t = anchor + 1; t <= anchor + drafts && t < end; t++) {
            if (t < done)
                continue;
            covered += row->loss_mask[t] != 0;
            done = t + 1;
        }
    }
    return (double)covered;
}

static void count_row(struct metrics *metrics, const struct row *row)
{
    metrics->rows += 1.0;
    metrics->tokens += (double)row->tokens;
    metrics->supervised += (double)row->supervised;
    metrics->bad_documents += (double)row->bad_documents;
}

void step_stage_row(struct step *step, const struct row *row)
{
    step_stage_put(&step->stage, step->stream, row);
}

// Adds the gradients of step->anchors[0 .. count). 1: stopped.
static int train_row(struct step *step, const struct row *row, int64_t count)
{
    count_row(&step->metrics, row);
    step->metrics.anchors += (double)count;
    step->metrics.covered += covered_positions(step, row, count);
    if (step->observer != NULL)
        step->observer->row(step->observer->context, row, step->anchors, count);
    step->rows++;
    if (count == 0) { // nothing to predict: this row adds zeros
        step_stage_drop(&step->stage, row);
        drafter_settle_gradients(&step->drafter, step->setup.backend, step->stream);
        return 0;
    }
    return run_row(step, row, count, true, &step->metrics);
}

int step_row(struct step *step, const struct row *row)
{
    const struct config *config = step->setup.config;
    int64_t valid = 0, count;
    if (step->layout.eagle3) // whose blocks share what they cost, so that all are taken
        valid = count = anchors_all(row, &step->layout, step->anchors);
    else
        count = anchors_draw(row, &step->layout, &config->anchors, (uint64_t)config->run.seed,
                             &step->anchor_scratch, step->anchors, &valid);
    step->metrics.valid_anchors += (double)valid;
    return train_row(step, row, count);
}

int step_row_anchors(struct step *step, const struct row *row, const int32_t *anchors,
                     int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        BUG_UNLESS(anchors[i] < row->tokens && anchors[i] > (i == 0 ? -1 : anchors[i - 1]));
    if (count > 0)
        memcpy(step->anchors, anchors, (size_t)count * sizeof(*anchors));
    return train_row(step, row, count);
}

static int evaluate(struct step *step, const struct row *row, struct metrics *metrics,
                    struct walk *walk, walk_block_fn *visit, void *context)
{
    const struct drafter_sizes *sizes = step->setup.sizes;
    int64_t count = anchors_all(row, &step->layout, step->anchors);
    count_row(metrics, row);
    metrics->anchors += (double)count;
    metrics->valid_anchors += (double)count;
    metrics->covered += covered_positions(step, row, count);
    if (count == 0)
        step_stage_drop(&step->stage, row);
    else if (run_row(step, row, count, false, metrics) != 0)
        return 1;
    int64_t drafts = sizes->block_size - (sizes->predict_from_anchor ? 0 : 1);
    walk_row(walk, row, step->anchors, step->accepted, count, drafts, visit, context);
    return 0;
}

int step_evaluate(struct step *step, const struct row *row, struct metrics *metrics,
                  struct walk *walk, walk_block_fn *visit, void *context)
{
    // Acceptance is about the states that serving reaches, whatever positions are trained on, and about all
    // drafts, those too that a small loss.ttt_decay_base gives no weight in training.
    const int trained = step->layout.mask_index;
    step->layout.mask_index = MASK_INDEX_SERVED;
    step->layout.least_weight = FLT_MIN;
    int result = evaluate(step, row, metrics, walk, visit, context);
    step->layout.mask_index = trained;
    step->layout.least_weight = 0.0f;
    return result;
}
