// `dtrain trace`: one optimizer step in one safetensors file, with everything needed to compute it
// again elsewhere. Layout: docs/file-formats.md.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "data/prefetch.h"
#include "data/safetensors.h"
#include "trainer/checkpoint.h"
#include "trainer/commands.h"
#include "trainer/files.h"
#include "trainer/plan_admit.h"
#include "trainer/resume.h"
#include "trainer/schedule.h"
#include "trainer/session.h"
#include "trainer/update_rule.h"
#include "version.h"

// A growing array of 4-byte elements.
struct column {
    unsigned char *bytes;
    size_t count, capacity;
};

enum trace_column {
    COLUMN_ROW,
    COLUMN_BLOCK,
    COLUMN_SLOT,
    COLUMN_LABEL,
    COLUMN_TEACHER_ROW,
    COLUMN_STUDENT_ARGMAX,
    COLUMN_TEACHER_ARGMAX,
    COLUMN_WEIGHT, // from here on float32
    COLUMN_LOSS,
    COLUMN_STUDENT_LSE,
    COLUMN_TEACHER_LSE,
    COLUMN_OVERLAP,
    COLUMN_COUNT
};

// Of EAGLE-3, COLUMN_BLOCK and COLUMN_SLOT are slots.position and slots.ttt_step.
static const char *const column_names[COLUMN_COUNT] = {
    "slots.row",         "slots.block",          "slots.slot",           "slots.label",
    "slots.teacher_row", "slots.student_argmax", "slots.teacher_argmax", "slots.weight",
    "slots.loss",        "slots.student_lse",    "slots.teacher_lse",    "slots.overlap"};

// A packed row of the step, copied.
struct trace_row {
    struct row row; // arrays owned
    int32_t *anchors;
    int64_t anchor_count;
    float *noise;  // [T, L, H] or NULL
    float *values; // [T, P, H] of float8 features, or NULL
};

struct trace {
    struct config config;
    struct session session;
    struct release release; // that the first step starts from
    struct step step;
    int64_t steps; // of the run
    struct trace_row *rows;
    int64_t row_count;
    struct column columns[COLUMN_COUNT];
    struct model_state before, after;
    float *grads;
    struct step_outcome outcome;
    double lr;
    float *decay;     // [params]
    bool left_behind; // a reader is, and may use the session
};

static void column_add(struct column *column, const void *element)
{
    if (column->count == column->capacity) {
        column->capacity = column->capacity * 2 + 1024;
        column->bytes = memory_resize(column->bytes, column->capacity, sizeof(int32_t));
    }
    memcpy(column->bytes + column->count++ * sizeof(int32_t), element, sizeof(int32_t));
}

static void *copy_of(const void *from, size_t count, size_t size)
{
    void *copy = memory_alloc(count, size);
    memcpy(copy, from, count * size);
    return copy;
}

static void keep_row(void *context, const struct row *row, const int32_t *anchors, int64_t count)
{
    struct trace *trace = context;
    size_t t = (size_t)row->tokens;
    trace->rows = memory_resize(trace->rows, (size_t)trace->row_count + 1, sizeof(*trace->rows));
    struct trace_row *kept = &trace->rows[trace->row_count++];
    *kept = (struct trace_row){.row = *row, .anchor_count = count};
    kept->row.input_ids = copy_of(row->input_ids, t, sizeof(int32_t));
    kept->row.positions = copy_of(row->positions, t, sizeof(int32_t));
    kept->row.loss_mask = copy_of(row->loss_mask, t, 1);
    kept->row.doc_offsets = copy_of(row->doc_offsets, (size_t)row->documents + 1, sizeof(int64_t));
    kept->row.hidden = copy_of(row->hidden, t * (size_t)row->features.stride, sizeof(bf16));
    if (row->features.float8) {
        size_t values = (size_t)(row->planes * row->hidden_size);
        kept->values = memory_alloc(t * values, sizeof(float));
        for (size_t i = 0; i < t; i++)
            features_to_float(&row->features, row->hidden + i * (size_t)row->features.stride,
                              kept->values + i * values);
    }
    kept->anchors = copy_of(anchors, (size_t)count, sizeof(int32_t));
    if (trace->config.data.noise_std > 0.0) {
        size_t values = (size_t)(trace->session.features * row->hidden_size);
        kept->noise = memory_alloc(t * values, sizeof(float));
        drafter_noise(&trace->step.drafter, row, (uint64_t)trace->config.run.seed, kept->noise);
    }
}

static bool is_eagle3(const struct trace *trace)
{
    return trace->config.drafter.kind == DRAFTER_EAGLE3;
}

static const char *column_name(const struct trace *trace, int column)
{
    if (is_eagle3(trace) && column == COLUMN_BLOCK)
        return "slots.position";
    if (is_eagle3(trace) && column == COLUMN_SLOT)
        return "slots.ttt_step";
    return column_names[column];
}

static void keep_group(void *context, int64_t first_block, const struct slot *slots, int64_t count,
                       const struct slot_results *results)
{
    struct trace *trace = context;
    int32_t row = (int32_t)trace->row_count - 1;
    for (int64_t i = 0; i < count; i++) {
        int32_t block = (int32_t)first_block + slots[i].block;
        int32_t place = is_eagle3(trace) ? trace->rows[row].anchors[block] - 1 : block;
        if (results->weight[i] == 0.0f && is_eagle3(trace))
            continue; // masked: the target's own answer is outside the draft vocabulary
        const void *values[COLUMN_COUNT] = {&row,
                                            &place,
                                            &slots[i].slot,
                                            &slots[i].label,
                                            &slots[i].teacher_row,
                                            &results->student_argmax[i],
                                            &results->teacher_argmax[i],
                                            &results->weight[i],
                                            &results->loss[i],
                                            &results->student_lse[i],
                                            &results->teacher_lse[i],
                                            &results->overlap[i]};
        for (int c = 0; c < COLUMN_COUNT; c++)
            column_add(&trace->columns[c], values[c]);
    }
}

// A tensor of the file: declared first, written later.
struct pending {
    int index;
    const void *bytes;
    size_t size;
};

struct trace_file {
    struct safetensors_writer *writer;
    struct pending *pending;
    size_t count, capacity;
};

static void add(struct trace_file *file, const char *name, enum dtype dtype, int dims,
                const int64_t *shape, const void *bytes)
{
    size_t size = dtype_size(dtype);
    for (int i = 0; i < dims; i++)
        size *= (size_t)shape[i];
    if (file->count == file->capacity) {
        file->capacity = file->capacity * 2 + 64;
        file->pending = memory_resize(file->pending, file->capacity, sizeof(*file->pending));
    }
    file->pending[file->count++] = (struct pending){
        safetensors_writer_add(file->writer, name, dtype, dims, shape), bytes, size};
}

static void add_vector(struct trace_file *file, const char *name, enum dtype dtype, int64_t count,
                       const void *bytes)
{
    add(file, name, dtype, 1, &count, bytes);
}

static void add_row(struct trace_file *file, int64_t r, const struct trace_row *kept,
                    int64_t features, bool anchors)
{
    const struct row *row = &kept->row;
    char name[64];
#define ROW_VECTOR(field, dtype, count, bytes)                                                     \
    do {                                                                                           \
        snprintf(name, sizeof(name), "row%lld." field, (long long)r);                              \
        add_vector(file, name, dtype, count, bytes);                                               \
    } while (0)
    ROW_VECTOR("input_ids", DTYPE_I32, row->tokens, row->input_ids);
    ROW_VECTOR("positions", DTYPE_I32, row->tokens, row->positions);
    ROW_VECTOR("loss_mask", DTYPE_U8, row->tokens, row->loss_mask);
    ROW_VECTOR("doc_offsets", DTYPE_I64, row->documents + 1, row->doc_offsets);
    if (anchors)
        ROW_VECTOR("anchors", DTYPE_I32, kept->anchor_count, kept->anchors);
#undef ROW_VECTOR
    snprintf(name, sizeof(name), "row%lld.hidden_states", (long long)r);
    add(file, name, kept->values != NULL ? DTYPE_F32 : DTYPE_BF16, 3,
        (int64_t[]){row->tokens, row->planes, row->hidden_size},
        kept->values != NULL ? (const void *)kept->values : row->hidden);
    snprintf(name, sizeof(name), "row%lld.noise", (long long)r);
    if (kept->noise != NULL)
        add(file, name, DTYPE_F32, 3, (int64_t[]){row->tokens, features, row->hidden_size},
            kept->noise);
}

// One flat array under PREFIX.NAME for every parameter.
static void add_params(struct trace_file *file, const char *prefix,
                       const struct state_layout *layout, enum state_array array, const float *flat)
{
    const struct params *params = layout->params;
    for (size_t i = 0; i < params->count; i++) {
        if (!state_has(layout, array, i))
            continue;
        const struct param *param = &params->items[i];
        char name[128];
        snprintf(name, sizeof(name), "%s.%s", prefix, param->name);
        add(file, name, DTYPE_F32, param->dims, param->shape,
            flat + state_offset(layout, array, i));
    }
}

static void add_decay(struct trace_file *file, struct trace *trace)
{
    const struct params *params = &trace->session.params;
    trace->decay = memory_alloc(params->count, sizeof(*trace->decay));
    for (size_t i = 0; i < params->count; i++) {
        const struct param *param = &params->items[i];
        char name[128];
        snprintf(name, sizeof(name), "decay.%s", param->name);
        trace->decay[i] = (float)update_weight_decay(&trace->config.optimizer, param);
        add_vector(file, name, DTYPE_F32, 1, &trace->decay[i]);
    }
}

static void add_metadata(struct trace_file *file, const struct trace *trace)
{
    const struct documents *documents = session_documents(&trace->session);
    static const char *const last_hidden[] = {"pre_norm", "post_norm", "absent"};
    char ids[DRAFTER_MAX_LAYERS * 8] = "[";
    size_t at = 1;
    for (int64_t l = 0; l < documents->shard_layers; l++)
        at += (size_t)snprintf(ids + at, sizeof(ids) - at, "%s%lld", l > 0 ? ", " : "",
                               (long long)documents->layer_ids[l]);
    snprintf(ids + at, sizeof(ids) - at, "]");
    char step[32];
    snprintf(step, sizeof(step), "%lld", (long long)trace->before.counters.step + 1);
    char *json = config_to_json(&trace->config);
    safetensors_writer_metadata(file->writer, "config", json);
    safetensors_writer_metadata(file->writer, "kind",
                                config_choice_name("drafter", "kind", trace->config.drafter.kind));
    safetensors_writer_metadata(file->writer, "step", step);
    safetensors_writer_metadata(file->writer, "world_size", "1");
    safetensors_writer_metadata(file->writer, "version", DTRAIN_VERSION);
    safetensors_writer_metadata(file->writer, "last_hidden", last_hidden[documents->last_hidden]);
    safetensors_writer_metadata(file->writer, "target_layer_ids", ids);
    free(json);
}

static int write_file(struct trace *trace, const char *path, struct error *err)
{
    struct trace_file file = {0};
    const struct metrics *metrics = &trace->step.metrics;
    double step = (double)trace->after.counters.applied;
    double loss = metrics_loss(metrics, trace->config.loss.normalize);
    int status = safetensors_writer_open(&file.writer, path, err);
    if (status != 0)
        return -1;
    add_metadata(&file, trace);
    for (int64_t r = 0; r < trace->row_count; r++)
        add_row(&file, r, &trace->rows[r], trace->session.features, !is_eagle3(trace));
    for (int c = 0; c < COLUMN_COUNT; c++)
        add_vector(&file, column_name(trace, c), c < COLUMN_WEIGHT ? DTYPE_I32 : DTYPE_F32,
                   (int64_t)trace->columns[c].count, trace->columns[c].bytes);
    if (trace->session.has_map)
        add_vector(&file, "d2t", DTYPE_I64, trace->session.map.draft_size, trace->session.map.d2t);
    const struct state_layout *layout = &trace->before.layout;
    add_params(&file, "param", layout, STATE_MASTER, trace->before.master);
    add_params(&file, "grad", layout, STATE_MASTER, trace->grads);
    add_params(&file, "updated", layout, STATE_MASTER, trace->after.master);
    add_params(&file, "adam_m", layout, STATE_M, trace->before.m);
    add_params(&file, "adam_v", layout, STATE_V, trace->before.v);
    add_decay(&file, trace);
    add_vector(&file, "scalar.loss", DTYPE_F64, 1, &loss);
    add_vector(&file, "scalar.weight_sum", DTYPE_F64, 1, &metrics->weight);
    add_vector(&file, "scalar.lr", DTYPE_F64, 1, &trace->lr);
    add_vector(&file, "scalar.grad_norm", DTYPE_F64, 1, &trace->outcome.grad_norm);
    add_vector(&file, "scalar.clip_factor", DTYPE_F64, 1, &trace->outcome.clip_factor);
    add_vector(&file, "scalar.step", DTYPE_F64, 1, &step);
    status = safetensors_writer_begin(file.writer, err);
    for (size_t i = 0; i < file.count && status == 0; i++)
        status = safetensors_writer_write(file.writer, file.pending[i].index, 0,
                                          file.pending[i].bytes, file.pending[i].size, err);
    free(file.pending);
    if (status != 0) {
        safetensors_writer_close(file.writer, false, &(struct error){0});
        return -1;
    }
    return safetensors_writer_close(file.writer, true, err);
}

// By way of a temporary name, so that a failure leaves what was there.
static int write_trace(struct trace *trace, const char *path, struct error *err)
{
    char *temporary = memory_format("%s.tmp", path);
    int status = write_file(trace, temporary, err);
    if (status == 0 && rename(temporary, path) != 0) {
        status = error_set(err, "--out %s: %s", path, strerror(errno));
        unlink(temporary);
    }
    free(temporary);
    return status;
}

// The rows of the step that follows the counters.
static int run_rows(struct trace *trace, struct error *err)
{
    const struct config *config = &trace->config;
    struct prefetch_options options = {.depth = 1,
                                       .threads = 1,
                                       .on_bad_sample = config->data.on_bad_sample,
                                       .seq_len = config->data.seq_len};
    const struct counters *counters = &trace->before.counters;
    struct source *source = NULL;
    struct prefetch *prefetch = NULL;
    int status = source_open_shards(&source, &trace->session.train, config->data.check_crc, err);
    if (status == 0)
        status = prefetch_open(&prefetch, source, &options, session_pack_own, &trace->session,
                               (uint64_t)counters->epoch, counters->row, 1, err);
    for (int64_t r = 0; r < config->data.rows_per_step && status >= 0; r++) {
        struct row *row = NULL;
        double wait = 0.0;
        status = prefetch_next(prefetch, &row, &wait, err);
        if (status == 0)
            break;
        if (status == 1) {
            step_row(&trace->step, row);
            prefetch_return(prefetch, row);
        }
    }
    trace->left_behind = !prefetch_close(prefetch);
    if (!trace->left_behind)
        source_close(source);
    return status < 0 ? -1 : 0;
}

// Gradients as the optimizer sees them before clipping: divided by the sum of weights.
static void keep_gradients(struct trace *trace)
{
    const struct backend *backend = trace->session.backend;
    int64_t elements = trace->session.params.elements;
    double sum = trace->config.loss.normalize == NORMALIZE_COUNT ? trace->step.metrics.slots
                                                                 : trace->step.metrics.weight;
    backend->copy_out(trace->step.stream, trace->grads, trace->step.grads,
                      (size_t)elements * sizeof(float));
    backend->sync(trace->step.stream);
    for (int64_t i = 0; i < elements && sum > 0.0; i++)
        trace->grads[i] = (float)((double)trace->grads[i] / sum);
}

// A run that is over takes no further step, and its schedule and epochs have none to say.
static int check_follows(const struct trace *trace, const char *checkpoint, struct error *err)
{
    int64_t step = trace->before.counters.step;
    if (step < trace->steps)
        return 0;
    return error_set(err,
                     "--checkpoint %s: is of step %lld, and the run ends with step %lld, so none "
                     "follows; name an earlier checkpoint, or trace the step of a longer run: "
                     "--set run.max_steps or --set run.epochs",
                     checkpoint, (long long)step, (long long)trace->steps);
}

// The state before the step: of a checkpoint, or as a run begins. *status where a checkpoint is damaged: a
// failure, as for a run.
static int load_before(struct trace *trace, const struct options *options, int *status,
                       struct error *err)
{
    const struct session *session = &trace->session;
    if (options->checkpoint == NULL) {
        step_initialize(&trace->step, &trace->release);
        step_save(&trace->step, &trace->before);
        return 0;
    }
    *status = EXIT_FAILED;
    if (checkpoint_check(options->checkpoint, err) != 0)
        return -1;
    *status = EXIT_REFUSED;
    if (resume_check_drafter(options->checkpoint, session, err) != 0)
        return -1;
    *status = EXIT_FAILED;
    if (checkpoint_read(options->checkpoint, &trace->before, NULL, err) != 0)
        return -1;
    *status = EXIT_REFUSED;
    if (check_follows(trace, options->checkpoint, err) != 0)
        return -1;
    step_load(&trace->step, &trace->before);
    return 0;
}

// Everything up to the step.
static int open_trace(struct trace *trace, const struct options *options, int *status,
                      struct error *err)
{
    const struct params *params = &trace->session.params;
    struct session_steps steps;
    session_count_steps(&trace->session, &steps);
    trace->steps = steps.total;
    session_steps_release(&steps);
    struct step_setup setup = session_step_setup(&trace->session, true);
    const struct state_layout layout = {params, NULL, &trace->config.optimizer};
    model_state_open_as(&trace->before, &layout, false);
    model_state_open_as(&trace->after, &layout, false);
    trace->grads = memory_alloc((size_t)params->elements, sizeof(*trace->grads));
    return step_open(&trace->step, &setup, err) != 0 ? -1
                                                     : load_before(trace, options, status, err);
}

static int run_trace(struct trace *trace, const struct options *options, struct error *err)
{
    struct step_observer observer = {trace, keep_row, keep_group};
    trace->step.observer = &observer;
    step_begin(&trace->step);
    if (run_rows(trace, err) != 0)
        return -1;
    keep_gradients(trace);
    trace->lr = schedule_lr(&trace->config.schedule, trace->config.optimizer.lr,
                            trace->before.counters.step + 1, trace->steps);
    trace->after.counters.applied = trace->before.counters.applied + 1;
    step_apply(&trace->step, trace->lr, trace->after.counters.applied, &trace->outcome);
    step_save(&trace->step, &trace->after);
    return write_trace(trace, options->out, err);
}

static void close_trace(struct trace *trace)
{
    for (int64_t r = 0; r < trace->row_count; r++) {
        struct trace_row *kept = &trace->rows[r];
        free(kept->row.input_ids);
        free(kept->row.positions);
        free(kept->row.loss_mask);
        free(kept->row.doc_offsets);
        free(kept->row.hidden);
        free(kept->values);
        free(kept->anchors);
        free(kept->noise);
    }
    for (int c = 0; c < COLUMN_COUNT; c++)
        free(trace->columns[c].bytes);
    free(trace->rows);
    free(trace->grads);
    free(trace->decay);
    model_state_close(&trace->before);
    model_state_close(&trace->after);
    step_close(&trace->step);
    release_close(&trace->release);
    if (trace->left_behind)
        return;
    session_close(&trace->session);
    config_release(&trace->config);
}

int command_trace(const struct options *options)
{
    struct trace trace = {0};
    struct error err = {0};
    int status = EXIT_REFUSED;
    config_init(&trace.config);
    if (files_check_replace(options->out, &err) != 0) {
        error_prefix(&err, "--out");
        goto out;
    }
    if (session_config(&trace.config, options->config, options->sets, options->set_count,
                       SESSION_TRAIN, &err) != 0 ||
        session_open(&trace.session, &trace.config, SESSION_TRAIN, &err) != 0 ||
        plan_admit(&trace.session, ADMIT_NEW, NULL, &err) != 0 ||
        (options->checkpoint == NULL &&
         session_open_release(&trace.session, &trace.release, &err) != 0) ||
        open_trace(&trace, options, &status, &err) != 0)
        goto out;
    status = run_trace(&trace, options, &err) == 0 ? EXIT_DONE : EXIT_FAILED;
out:
    if (status != EXIT_DONE)
        log_error("%s", err.text);
    else
        log_info("%s: %lld rows, %zu slots", options->out, (long long)trace.row_count,
                 trace.columns[0].count);
    close_trace(&trace);
    return status;
}
