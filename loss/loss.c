// Owns the chunked loss of an anchor group: order of rows, chunks, teacher rows, slot weights. What a
// draft vocabulary and a trainable head add is draft_vocab.c's, what a Markov head adds markov.c's.
#include <stdlib.h>

#include "base/log.h"
#include "loss/loss_internal.h"

enum {
    CHUNK_STEP = 128,  // rows that a matrix product takes at a time: chunks are whole steps
    MOST_PARTS = 8,    // of the vocabulary, in the product that makes dS
    LEAST_PART = 30000 // of shorter parts, to add the sums would cost more than 1 % of the product
};

// C = [rows, H] has so few tiles that a GPU's last round of them is mostly idle: so the vocabulary is cut
// into parts that each make a whole number of 16-byte accesses. Their sums lie in the half of a row of
// logits that its gradient leaves free. The number of parts follows from the model's sizes alone.
static int64_t gradient_parts(const struct loss_options *o, int64_t width, int64_t columns)
{
    int64_t parts = MOST_PARTS;
    if (dtype_size(o->logits) != 2 * dtype_size(o->compute))
        return 1;
    while (parts > 1 &&
           (width % (8 * parts) != 0 || width / parts < LEAST_PART || parts * columns > width / 2))
        parts /= 2;
    return parts;
}

static struct loss_results take_results(const struct loss *loss, struct arena *arena)
{
    int64_t rows = loss->options.group_rows;
    struct loss_results results = {.kept = false};
    results.stats = arena_take(arena, "loss", "stats", DTYPE_F32, STATS + LOSS_TERM_COUNT, rows, 1);
    results.argmax = arena_take(arena, "loss", "argmax", DTYPE_I32, 2, rows, 1);
    if (!loss_full_teacher(loss))
        return results;
    results.full_argmax = arena_take(arena, "loss", "full_argmax", DTYPE_I32, rows, 1, 1);
    results.full_overlap = arena_take(arena, "loss", "full_overlap", DTYPE_F32, rows, 1, 1);
    return results;
}

struct loss_results loss_plan_results(const struct loss_options *options, struct arena *arena)
{
    struct loss loss = {.options = *options, .width = options->vocab};
    loss_map_plan(&loss);
    struct loss_results results = take_results(&loss, arena);
    results.kept = true;
    return results;
}

void loss_plan(struct loss *loss, const struct loss_options *options, struct arena *arena)
{
    const struct loss_config *c = options->config;
    const double weight[LOSS_TERM_COUNT] = {
        [LOSS_KL] = c->kl,           [LOSS_REVERSE_KL] = c->reverse_kl,
        [LOSS_JS] = c->js,           [LOSS_CE_TEACHER] = c->ce_teacher,
        [LOSS_CE_DATA] = c->ce_data, [LOSS_TV] = c->tv,
        [LOSS_NLA] = c->nla,         [LOSS_LK] = c->lk,
    };
    _Static_assert(LOSS_TERM_COUNT == 8, "a new term needs its config key here");
    int64_t rows = options->group_rows, chunk = options->chunk_rows, h = options->hidden;

    *loss = (struct loss){.options = *options, .width = options->vocab};
    loss_map_plan(loss);
    for (int term = 0; term < LOSS_TERM_COUNT; term++)
        loss->weight[term] = (float)weight[term];
    loss->logits = arena_take(arena, "loss", "logits", options->logits, chunk, options->vocab, 1);
    loss->student =
        arena_take(arena, "loss", "student", options->compute, loss_most_students(loss), h, 1);
    loss->teacher =
        arena_take(arena, "loss", "teacher", options->compute, loss_most_teachers(loss), h, 1);
    loss->gradient_type = options->whole_weights && gradient_parts(options, loss->width, h) == 1
                              ? options->compute
                              : DTYPE_F32;
    loss->gradient = arena_take(arena, "loss", "gradient", loss->gradient_type, rows, h, 1);
    loss->index = arena_take(arena, "loss", "index", DTYPE_I32, INDICES, rows, 1);
    loss->scale = arena_take(arena, "loss", "scale", DTYPE_F32, rows, 1, 1);
    loss->results = options->results;
    if (!options->results.kept)
        loss->results = take_results(loss, arena);
    if (loss_full_teacher(loss))
        loss->full_lse = arena_take(arena, "loss", "full_lse", DTYPE_F32, chunk, 1, 1);
    loss_markov_plan(loss, arena);
}

void loss_open(struct loss *loss, const struct backend *backend)
{
    size_t rows = (size_t)loss->options.group_rows;
    loss->backend = backend;
    loss->copies = backend->stream_open(&(struct stream_options){.threads = 1});
    loss->order = memory_alloc(rows, sizeof(*loss->order));
    loss->chunks = memory_alloc(rows, sizeof(*loss->chunks));
    loss->h_index = backend->host_alloc(rows * INDICES * sizeof(*loss->h_index));
    loss->h_stats = backend->host_alloc(rows * (STATS + LOSS_TERM_COUNT) * sizeof(*loss->h_stats));
    loss->h_argmax = backend->host_alloc(rows * 2 * sizeof(*loss->h_argmax));
    loss->h_scale = backend->host_alloc(rows * sizeof(*loss->h_scale));
    if (loss_full_teacher(loss)) {
        loss->h_full_argmax = backend->host_alloc(rows * sizeof(*loss->h_full_argmax));
        loss->h_full_overlap = backend->host_alloc(rows * sizeof(*loss->h_full_overlap));
    }
    loss_markov_open(loss);
}

void loss_close(struct loss *loss)
{
    free(loss->order);
    free(loss->chunks);
    if (loss->backend == NULL)
        return;
    loss->backend->stream_close(loss->copies);
    loss->backend->host_free(loss->h_index);
    loss->backend->host_free(loss->h_stats);
    loss->backend->host_free(loss->h_argmax);
    loss->backend->host_free(loss->h_scale);
    if (loss_full_teacher(loss)) {
        loss->backend->host_free(loss->h_full_argmax);
        loss->backend->host_free(loss->h_full_overlap);
    }
    loss_markov_close(loss);
}

void slot_results_open(struct slot_results *results, int64_t slots)
{
    size_t n = (size_t)slots;
    results->weight = memory_alloc(n, sizeof(float));
    results->loss = memory_alloc(n, sizeof(float));
    results->terms = memory_alloc(n * LOSS_TERM_COUNT, sizeof(float));
    results->student_lse = memory_alloc(n, sizeof(float));
    results->teacher_lse = memory_alloc(n, sizeof(float));
    results->overlap = memory_alloc(n, sizeof(float));
    results->student_argmax = memory_alloc(n, sizeof(int32_t));
    results->teacher_argmax = memory_alloc(n, sizeof(int32_t));
}

void slot_results_close(struct slot_results *results)
{
    free(results->weight);
    free(results->loss);
    free(results->terms);
    free(results->student_lse);
    free(results->teacher_lse);
    free(results->overlap);
    free(results->student_argmax);
    free(results->teacher_argmax);
    *results = (struct slot_results){0};
}

void loss_dpace_weights(const float *confidence, int64_t count, double alpha, float *weight)
{
    double product = 1.0, sum = 0.0;
    for (int64_t k = 0; k < count; k++) {
        product *= (1.0 - alpha) * (double)confidence[k] + alpha;
        weight[k] = (float)product;
    }
    for (int64_t k = count - 1; k >= 0; k--) {
        sum += (double)weight[k];
        weight[k] = (float)sum;
    }
}

static int compare_order(const void *a, const void *b)
{
    const struct loss_order *x = a, *y = b;
    if (x->teacher_row != y->teacher_row)
        return x->teacher_row < y->teacher_row ? -1 : 1;
    return (x->slot > y->slot) - (x->slot < y->slot);
}

// The chunk from `first` on: at most `most` rows, and as many as the logits have room for. A position's
// rows stay together where the chunk has room for them, so that its teacher row is computed once.
static struct loss_chunk chunk_from(const struct loss *loss, const struct loss_group *group,
                                    int64_t first, int64_t most)
{
    const struct loss_order *order = loss->order;
    int64_t room = loss->options.chunk_rows * loss->options.vocab; // of the logits
    int64_t most_teachers = loss_most_teachers(loss);
    int64_t columns = loss_full_group(loss, group) ? loss->options.vocab : loss->width;
    struct loss_chunk chunk = {.first = first}, whole = chunk; // whole: up to the running position
    int64_t i = first;
    for (; i < group->slot_count && chunk.rows < most; i++) {
        bool distinct = i == first || order[i].teacher_row != order[i - 1].teacher_row;
        int64_t teachers = chunk.teachers + (loss->options.has_teacher && distinct);
        if ((chunk.rows + 1) * loss->width + teachers * columns > room || teachers > most_teachers)
            break;
        if (distinct)
            whole = chunk;
        chunk.rows++;
        chunk.teachers = teachers;
    }
    bool cut = i < group->slot_count && order[i].teacher_row == order[i - 1].teacher_row;
    return cut && whole.rows > 0 ? whole : chunk;
}

// The next of as few chunks as there can be, as equal as they can be.
static struct loss_chunk chunk_next(const struct loss *loss, const struct loss_group *group,
                                    int64_t first)
{
    int64_t left = group->slot_count - first, chunks = 0;
    for (int64_t at = first; at < group->slot_count; chunks++)
        at += chunk_from(loss, group, at, left).rows;
    int64_t rows = (left + chunks - 1) / chunks;
    if (rows > CHUNK_STEP)
        rows = (rows + CHUNK_STEP - 1) / CHUNK_STEP * CHUNK_STEP;
    return chunk_from(loss, group, first, rows);
}

// Fills the host's index for one chunk.
static void chunk_index(struct loss *loss, const struct loss_group *group,
                        const struct loss_chunk *chunk)
{
    int64_t count = group->slot_count;
    const struct loss_order *order = loss->order;
    int32_t teacher = -1;
    for (int64_t i = chunk->first; i < chunk->first + chunk->rows; i++) {
        const struct slot *slot = &group->slots[order[i].slot];
        if (i == chunk->first || order[i].teacher_row != order[i - 1].teacher_row)
            loss->h_index[INDEX_POSITION * count + chunk->first + ++teacher] = order[i].teacher_row;
        loss->h_index[INDEX_ROW * count + i] =
            group->hidden_row != NULL
                ? group->hidden_row[order[i].slot]
                : (int32_t)(slot->block * loss->options.block_size + slot->slot);
        loss->h_index[INDEX_TEACHER * count + i] = teacher;
        loss->h_index[INDEX_LABEL * count + i] = loss_label(loss, slot->label);
    }
    // Where a position has several rows, the rest is not used.
    for (int64_t i = chunk->first + teacher + 1; i < chunk->first + chunk->rows; i++)
        loss->h_index[INDEX_POSITION * count + i] = 0;
}

// Sorts the group's rows, divides them into chunks and sends the index of all chunks. The last group's
// copies are done: its results were waited for.
static void chunks_make(struct loss *loss, const struct backend *backend, struct stream *stream,
                        const struct loss_group *group)
{
    loss->chunk_count = 0;
    for (int64_t i = 0; i < group->slot_count; i++)
        loss->order[i] = (struct loss_order){group->slots[i].teacher_row, (int32_t)i};
    qsort(loss->order, (size_t)group->slot_count, sizeof(*loss->order), compare_order);
    for (int64_t first = 0; first < group->slot_count;) {
        struct loss_chunk *chunk = &loss->chunks[loss->chunk_count++];
        *chunk = chunk_next(loss, group, first);
        chunk_index(loss, group, chunk);
        first += chunk->rows;
    }
    backend->copy_in(stream, loss->index, loss->h_index,
                     (size_t)group->slot_count * INDICES * sizeof(*loss->index));
    if (loss_has_markov(loss))
        loss_markov_index(loss, backend, stream, group);
}

static void teacher_states(struct loss *loss, const struct backend *backend, struct stream *stream,
                           const struct loss_group *group, const struct loss_chunk *chunk)
{
    const struct loss_options *o = &loss->options;
    backend->kernels->gather_rows(
        stream, &(struct gather_rows){.rows = chunk->teachers,
                                      .width = o->hidden,
                                      .in = group->last,
                                      .in_rows = group->tokens,
                                      .in_stride = group->last_stride,
                                      .in_type = DTYPE_BF16,
                                      .out_type = o->compute,
                                      .index = loss->index + INDEX_POSITION * group->slot_count +
                                               chunk->first,
                                      .scale = 1.0f,
                                      .out = loss->teacher});
    if (o->teacher_norm)
        backend->kernels->rms_norm_forward(
            stream, &(struct rms_norm){.rows = chunk->teachers,
                                       .width = o->hidden,
                                       .eps = o->norm_eps,
                                       .weight_offset = o->norm_weight_offset,
                                       .type = o->compute,
                                       .x_type = o->compute,
                                       .x = loss->teacher,
                                       .weight = o->norm,
                                       .y = loss->teacher});
}

static void chunk_softmax(struct loss *loss, const struct backend *backend, struct stream *stream,
                          const struct loss_group *group, const struct loss_chunk *chunk,
                          const void *teacher)
{
    const struct loss_options *o = &loss->options;
    int64_t at = chunk->first, count = group->slot_count;
    const int32_t *index = loss->index + at;
    float *stats = loss->results.stats + at;
    size_t ratio = dtype_size(o->logits) / dtype_size(o->compute);
    struct softmax_loss op = {.rows = chunk->rows,
                              .vocab = loss->width,
                              .logits_type = o->logits,
                              .student = loss->logits,
                              .teacher = teacher,
                              .teacher_row = index + INDEX_TEACHER * count,
                              .label = index + INDEX_LABEL * count,
                              .lk_eta = (float)o->config->lk_eta,
                              .gradient = group->dhidden != NULL ? loss->logits : NULL,
                              .gradient_type = o->compute,
                              .gradient_stride = loss->width * (int64_t)ratio,
                              .loss = stats + STAT_LOSS * count,
                              .terms = loss->results.stats + STATS * count + at * LOSS_TERM_COUNT,
                              .student_lse = stats + STAT_STUDENT_LSE * count,
                              .teacher_lse = stats + STAT_TEACHER_LSE * count,
                              .overlap = stats + STAT_OVERLAP * count,
                              .confidence = stats + STAT_CONFIDENCE * count,
                              .student_argmax = loss->results.argmax + at,
                              .teacher_argmax = loss->results.argmax + count + at};
    for (int term = 0; term < LOSS_TERM_COUNT; term++)
        op.weight[term] = loss->weight[term];
    backend->kernels->softmax_loss(stream, &op);
}

void loss_input_gradient(struct loss *loss, const struct backend *backend, struct stream *stream,
                         const struct loss_chunk *chunk, const void *matrix, int64_t columns,
                         float alpha, void *out, enum dtype type)
{
    const struct loss_options *o = &loss->options;
    size_t ratio = dtype_size(o->logits) / dtype_size(o->compute);
    int64_t parts = gradient_parts(o, loss->width, columns);
    struct gemm product = {.m = chunk->rows,
                           .n = columns,
                           .k = loss->width,
                           .alpha = alpha,
                           .a = loss->logits,
                           .lda = loss->width * (int64_t)ratio,
                           .b = matrix,
                           .c = out,
                           .a_type = o->compute,
                           .b_type = o->compute,
                           .c_type = type,
                           .parts = parts};
    if (parts > 1) {
        product.part_sums = (float *)loss->logits + loss->width / 2;
        product.part_stride = loss->width;
    }
    backend->kernels->gemm(stream, &product);
}

void loss_weight_gradient(struct loss *loss, const struct backend *backend, struct stream *stream,
                          const struct loss_chunk *chunk, const void *in, int64_t columns,
                          float alpha, float *out)
{
    const struct loss_options *o = &loss->options;
    int64_t ratio = (int64_t)(dtype_size(o->logits) / dtype_size(o->compute));
    backend->kernels->gemm(stream, &(struct gemm){.m = loss->width,
                                                  .n = columns,
                                                  .k = chunk->rows,
                                                  .transpose_a = true,
                                                  .alpha = alpha,
                                                  .beta = 1.0f,
                                                  .a = loss->logits,
                                                  .lda = loss->width * ratio,
                                                  .b = in,
                                                  .c = out,
                                                  .a_type = o->compute,
                                                  .b_type = o->compute,
                                                  .c_type = DTYPE_F32});
}

static void student_logits(struct loss *loss, const struct backend *backend, struct stream *stream,
                           const struct loss_group *group, const struct loss_chunk *chunk)
{
    const struct loss_options *o = &loss->options;
    const int32_t *rows = loss->index + INDEX_ROW * group->slot_count + chunk->first;
    backend->kernels->gather_rows(stream, &(struct gather_rows){.rows = chunk->rows,
                                                                .width = o->hidden,
                                                                .in = group->hidden,
                                                                .in_rows = group->rows,
                                                                .in_stride = o->hidden,
                                                                .in_type = o->compute,
                                                                .out_type = o->compute,
                                                                .index = rows,
                                                                .scale = 1.0f,
                                                                .out = loss->student});
    loss_product(loss, backend, stream, chunk->rows, loss->student, loss_student_head(loss),
                 loss->width, loss->logits);
    if (loss_has_markov(loss))
        loss_markov_logits(loss, backend, stream, chunk);
}

// Row `first` of dS.
static void *gradient_from(const struct loss *loss, int64_t first)
{
    return (unsigned char *)loss->gradient +
           (size_t)(first * loss->options.hidden) * dtype_size(loss->gradient_type);
}

// Whether G is multiplied with what the slots' weights are already in.
static bool sums_over_rows(const struct loss *loss)
{
    return loss->options.dhead != NULL || loss->options.markov.dw2 != NULL;
}

static void chunk_run(struct loss *loss, const struct backend *backend, struct stream *stream,
                      const struct loss_group *group, const struct loss_chunk *chunk)
{
    const struct loss_options *o = &loss->options;
    unsigned char *teacher = NULL;
    if (o->has_teacher) {
        teacher = (unsigned char *)loss->logits +
                  (size_t)(chunk->rows * loss->width) * dtype_size(o->logits);
        teacher_states(loss, backend, stream, group, chunk);
        loss_product(loss, backend, stream, chunk->teachers, loss->teacher, o->head, loss->width,
                     teacher);
    }
    if (loss_full_group(loss, group))
        loss_full_columns(loss, backend, stream, chunk, teacher);
    student_logits(loss, backend, stream, group, chunk);
    if (loss_full_group(loss, group))
        loss_full_results(loss, backend, stream, group, chunk, teacher);
    chunk_softmax(loss, backend, stream, group, chunk, teacher);
    if (group->dhidden == NULL)
        return;
    if (sums_over_rows(loss))
        loss_clear_masked(loss, backend, stream, chunk);
    loss_input_gradient(loss, backend, stream, chunk, loss_student_head(loss), o->hidden,
                        o->logit_scale, gradient_from(loss, chunk->first), loss->gradient_type);
    if (o->dhead != NULL)
        loss_head_gradient(loss, backend, stream, group, chunk);
    if (o->markov.dw2 != NULL)
        loss_markov_gradient(loss, backend, stream, chunk);
}

// Statistics on their way to the host. What follows on the stream waits for them where it may overwrite them.
static void send_results(struct loss *loss, const struct backend *backend, struct stream *stream,
                         const struct loss_group *group)
{
    int64_t count = group->slot_count;
    backend->stream_wait(loss->copies, stream);
    backend->copy_out(loss->copies, loss->h_stats, loss->results.stats,
                      (size_t)(count * (STATS + LOSS_TERM_COUNT)) * sizeof(*loss->results.stats));
    backend->copy_out(loss->copies, loss->h_argmax, loss->results.argmax,
                      (size_t)(count * 2) * sizeof(*loss->results.argmax));
    if (loss_full_group(loss, group)) {
        backend->copy_out(loss->copies, loss->h_full_argmax, loss->results.full_argmax,
                          (size_t)count * sizeof(*loss->results.full_argmax));
        backend->copy_out(loss->copies, loss->h_full_overlap, loss->results.full_overlap,
                          (size_t)count * sizeof(*loss->results.full_overlap));
    }
    if (!loss->results.kept)
        backend->stream_wait(stream, loss->copies);
}

// Statistics in the order of the slots.
static void sort_results(const struct loss *loss, int64_t count, struct slot_results *results)
{
    const float *stats = loss->h_stats, *terms = stats + STATS * count;
    for (int64_t i = 0; i < count; i++) {
        int32_t s = loss->order[i].slot;
        results->loss[s] = stats[STAT_LOSS * count + i];
        results->student_lse[s] = stats[STAT_STUDENT_LSE * count + i];
        results->teacher_lse[s] = stats[STAT_TEACHER_LSE * count + i];
        results->overlap[s] = stats[STAT_OVERLAP * count + i];
        results->weight[s] = stats[STAT_CONFIDENCE * count + i]; // until weighted
        results->student_argmax[s] = loss->h_argmax[i];
        results->teacher_argmax[s] = loss->h_argmax[count + i];
        for (int term = 0; term < LOSS_TERM_COUNT; term++)
            results->terms[s * LOSS_TERM_COUNT + term] = terms[i * LOSS_TERM_COUNT + term];
    }
}

// Turns the confidences in results->weight into weights, block by block.
static void weigh(const struct loss *loss, const struct loss_group *group,
                  struct slot_results *results)
{
    const struct loss_config *config = loss->options.config;
    for (int64_t first = 0, end; first < group->slot_count; first = end) {
        for (end = first;
             end < group->slot_count && group->slots[end].block == group->slots[first].block; end++)
            if (config->slot_weight != SLOT_WEIGHT_DPACE)
                results->weight[end] = loss_slot_weight(loss, &group->slots[end]);
        if (config->slot_weight == SLOT_WEIGHT_DPACE) {
            float confidence[METRICS_MAX_BLOCK];
            for (int64_t i = first; i < end; i++)
                confidence[i - first] = results->weight[i];
            loss_dpace_weights(confidence, end - first, config->dpace_alpha,
                               results->weight + first);
        }
    }
}

static void send_weights(struct loss *loss, const struct backend *backend, struct stream *stream,
                         int64_t count)
{
    backend->copy_in(stream, loss->scale, loss->h_scale, (size_t)count * sizeof(*loss->h_scale));
}

// dhidden from the unweighted gradient and the weights.
static void scale_gradient(struct loss *loss, const struct backend *backend, struct stream *stream,
                           const struct loss_group *group)
{
    const struct loss_options *o = &loss->options;
    backend->kernels->scatter_rows(stream, &(struct scatter_rows){.rows = group->slot_count,
                                                                  .width = o->hidden,
                                                                  .in = loss->gradient,
                                                                  .in_type = loss->gradient_type,
                                                                  .out_type = o->compute,
                                                                  .index = loss->index,
                                                                  .scale = loss->scale,
                                                                  .out = group->dhidden,
                                                                  .out_rows = group->rows});
}

static bool weights_follow_losses(const struct loss *loss)
{
    return loss->options.config->slot_weight == SLOT_WEIGHT_DPACE;
}

bool loss_group_queue(struct loss *loss, const struct backend *backend, struct stream *stream,
                      const struct loss_group *group)
{
    const struct loss_options *o = &loss->options;
    if (group->rows > o->group_rows || group->slot_count > o->group_rows)
        BUG("a group of %lld rows, planned for %lld", (long long)group->rows,
            (long long)o->group_rows);
    chunks_make(loss, backend, stream, group);
    bool scaled = group->dhidden != NULL && !weights_follow_losses(loss);
    BUG_UNLESS(scaled || group->dhidden == NULL || !sums_over_rows(loss));
    for (int64_t i = 0; i < group->slot_count && scaled; i++)
        loss->h_scale[i] = loss_slot_weight(loss, &group->slots[loss->order[i].slot]);
    if (scaled)
        send_weights(loss, backend, stream, group->slot_count);
    for (int64_t i = 0; i < loss->chunk_count; i++) {
        backend->range_push("chunk");
        chunk_run(loss, backend, stream, group, &loss->chunks[i]);
        backend->range_pop();
    }
    if (scaled)
        scale_gradient(loss, backend, stream, group);
    if (scaled && loss->options.markov.dw1 != NULL)
        loss_markov_sums(loss, backend, stream, group);
    send_results(loss, backend, stream, group);
    return !weights_follow_losses(loss);
}

void loss_group_collect(struct loss *loss, const struct backend *backend, struct stream *stream,
                        const struct loss_group *group, struct slot_results *results)
{
    backend->sync(loss->copies);
    sort_results(loss, group->slot_count, results);
    weigh(loss, group, results);
    if (loss_has_map(loss))
        loss_map_results(loss, group, results);
    if (group->dhidden == NULL || !weights_follow_losses(loss))
        return;
    for (int64_t i = 0; i < group->slot_count; i++)
        loss->h_scale[i] = results->weight[loss->order[i].slot];
    send_weights(loss, backend, stream, group->slot_count);
    scale_gradient(loss, backend, stream, group);
}

void loss_group_run(struct loss *loss, const struct backend *backend, struct stream *stream,
                    const struct loss_group *group, struct slot_results *results)
{
    loss_group_queue(loss, backend, stream, group);
    loss_group_collect(loss, backend, stream, group, results);
}
