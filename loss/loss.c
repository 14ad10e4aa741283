// Owns the chunked loss of an anchor group: order of rows, chunks, teacher rows, slot weights.
#include "loss/loss.h"

#include <stdlib.h>

#include "base/log.h"

struct loss_order {
    int32_t teacher_row; // position in the packed row
    int32_t slot;        // index into the group's slots
};

enum { HOST_STATS = 5 }; // loss, student_lse, teacher_lse, overlap, confidence; then the terms

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

    *loss = (struct loss){.options = *options};
    for (int term = 0; term < LOSS_TERM_COUNT; term++)
        loss->weight[term] = (float)weight[term];
    loss->logits = arena_take(arena, "loss", "logits", options->logits, chunk, options->vocab, 1);
    loss->student = arena_take(arena, "loss", "student", options->compute, chunk, h, 1);
    loss->teacher = arena_take(arena, "loss", "teacher", options->compute, chunk, h, 1);
    loss->gradient = arena_take(arena, "loss", "gradient", DTYPE_F32, rows, h, 1);
    loss->row = arena_take(arena, "loss", "row", DTYPE_I32, rows, 1, 1);
    loss->teacher_row = arena_take(arena, "loss", "teacher_row", DTYPE_I32, rows, 1, 1);
    loss->label = arena_take(arena, "loss", "label", DTYPE_I32, rows, 1, 1);
    loss->position = arena_take(arena, "loss", "position", DTYPE_I32, rows, 1, 1);
    loss->scale = arena_take(arena, "loss", "scale", DTYPE_F32, rows, 1, 1);
    loss->row_loss = arena_take(arena, "loss", "row_loss", DTYPE_F32, rows, 1, 1);
    loss->student_lse = arena_take(arena, "loss", "student_lse", DTYPE_F32, rows, 1, 1);
    loss->teacher_lse = arena_take(arena, "loss", "teacher_lse", DTYPE_F32, rows, 1, 1);
    loss->overlap = arena_take(arena, "loss", "overlap", DTYPE_F32, rows, 1, 1);
    loss->confidence = arena_take(arena, "loss", "confidence", DTYPE_F32, rows, 1, 1);
    loss->terms = arena_take(arena, "loss", "terms", DTYPE_F32, rows, LOSS_TERM_COUNT, 1);
    loss->student_argmax = arena_take(arena, "loss", "student_argmax", DTYPE_I32, rows, 1, 1);
    loss->teacher_argmax = arena_take(arena, "loss", "teacher_argmax", DTYPE_I32, rows, 1, 1);
}

void loss_open(struct loss *loss)
{
    size_t rows = (size_t)loss->options.group_rows;
    loss->order = memory_alloc(rows, sizeof(*loss->order));
    loss->h_index = memory_alloc(rows * 4, sizeof(*loss->h_index));
    loss->h_stats = memory_alloc(rows * (HOST_STATS + LOSS_TERM_COUNT), sizeof(*loss->h_stats));
    loss->h_argmax = memory_alloc(rows * 2, sizeof(*loss->h_argmax));
    loss->h_scale = memory_alloc(rows, sizeof(*loss->h_scale));
}

void loss_close(struct loss *loss)
{
    free(loss->order);
    free(loss->h_index);
    free(loss->h_stats);
    free(loss->h_argmax);
    free(loss->h_scale);
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

// One chunk: sorted rows [first, first + rows) and their `teachers` distinct positions.
struct chunk {
    int64_t first, rows, teachers;
};

// Fills h_index for the next chunk. A position's rows stay together where the chunk has room for them,
// so that its teacher row is computed once.
static struct chunk chunk_make(struct loss *loss, const struct loss_group *group, int64_t first)
{
    int64_t capacity = loss->options.group_rows, limit = loss->options.chunk_rows;
    const struct loss_order *order = loss->order;
    int64_t end = first, teachers = 0, run_start = first;
    while (end < group->slot_count) {
        bool distinct = end == first || order[end].teacher_row != order[end - 1].teacher_row;
        int64_t needed = loss->options.has_teacher && distinct ? 2 : 1;
        if (end - first + teachers + needed > limit)
            break;
        if (distinct)
            run_start = end;
        teachers += needed - 1;
        end++;
    }
    bool cut = end < group->slot_count && order[end].teacher_row == order[end - 1].teacher_row;
    if (cut && run_start > first) {
        end = run_start;
        teachers -= loss->options.has_teacher;
    }
    int64_t teacher = -1;
    for (int64_t i = first; i < end; i++) {
        const struct slot *slot = &group->slots[order[i].slot];
        if (i == first || order[i].teacher_row != order[i - 1].teacher_row)
            loss->h_index[3 * capacity + first + ++teacher] = order[i].teacher_row;
        loss->h_index[i] = (int32_t)(slot->block * loss->options.block_size + slot->slot);
        loss->h_index[capacity + i] = (int32_t)teacher;
        loss->h_index[2 * capacity + i] = slot->label;
    }
    return (struct chunk){first, end - first, teachers};
}

static void teacher_logits(struct loss *loss, const struct backend *backend, struct stream *stream,
                           const struct loss_group *group, const struct chunk *chunk, void *logits)
{
    const struct loss_options *o = &loss->options;
    backend->kernels->gather_rows(
        stream, &(struct gather_rows){.rows = chunk->teachers,
                                      .width = o->hidden,
                                      .in = group->features + group->last_plane * o->hidden,
                                      .in_rows = group->tokens,
                                      .in_stride = group->planes * o->hidden,
                                      .in_type = DTYPE_BF16,
                                      .out_type = o->compute,
                                      .index = loss->position + chunk->first,
                                      .scale = 1.0f,
                                      .out = loss->teacher});
    if (o->teacher_norm)
        backend->kernels->rms_norm_forward(
            stream, &(struct rms_norm){.rows = chunk->teachers,
                                       .width = o->hidden,
                                       .eps = o->norm_eps,
                                       .weight_offset = o->norm_weight_offset,
                                       .type = o->compute,
                                       .x = loss->teacher,
                                       .weight = o->norm,
                                       .y = loss->teacher});
    backend->kernels->gemm(stream, &(struct gemm){.m = chunk->teachers,
                                                  .n = o->vocab,
                                                  .k = o->hidden,
                                                  .transpose_b = true,
                                                  .alpha = o->logit_scale,
                                                  .a = loss->teacher,
                                                  .b = o->head,
                                                  .c = logits,
                                                  .a_type = o->compute,
                                                  .b_type = o->compute,
                                                  .c_type = o->logits});
}

static void chunk_softmax(struct loss *loss, const struct backend *backend, struct stream *stream,
                          const struct chunk *chunk, const void *teacher, bool gradient)
{
    const struct loss_options *o = &loss->options;
    int64_t at = chunk->first;
    size_t ratio = dtype_size(o->logits) / dtype_size(o->compute);
    struct softmax_loss op = {.rows = chunk->rows,
                              .vocab = o->vocab,
                              .logits_type = o->logits,
                              .student = loss->logits,
                              .teacher = teacher,
                              .teacher_row = loss->teacher_row + at,
                              .label = loss->label + at,
                              .lk_eta = (float)o->config->lk_eta,
                              .gradient = gradient ? loss->logits : NULL,
                              .gradient_type = o->compute,
                              .gradient_stride = o->vocab * (int64_t)ratio,
                              .loss = loss->row_loss + at,
                              .terms = loss->terms + at * LOSS_TERM_COUNT,
                              .student_lse = loss->student_lse + at,
                              .teacher_lse = loss->teacher_lse + at,
                              .overlap = loss->overlap + at,
                              .confidence = loss->confidence + at,
                              .student_argmax = loss->student_argmax + at,
                              .teacher_argmax = loss->teacher_argmax + at};
    for (int term = 0; term < LOSS_TERM_COUNT; term++)
        op.weight[term] = loss->weight[term];
    backend->kernels->softmax_loss(stream, &op);
}

static void chunk_run(struct loss *loss, const struct backend *backend, struct stream *stream,
                      const struct loss_group *group, const struct chunk *chunk)
{
    const struct loss_options *o = &loss->options;
    size_t bytes = (size_t)chunk->rows * sizeof(int32_t);
    int64_t at = chunk->first, capacity = o->group_rows;
    backend->copy_in(stream, loss->row + at, loss->h_index + at, bytes);
    backend->copy_in(stream, loss->teacher_row + at, loss->h_index + capacity + at, bytes);
    backend->copy_in(stream, loss->label + at, loss->h_index + 2 * capacity + at, bytes);
    backend->copy_in(stream, loss->position + at, loss->h_index + 3 * capacity + at, bytes);

    unsigned char *teacher = NULL;
    if (o->has_teacher) {
        teacher = (unsigned char *)loss->logits +
                  (size_t)(chunk->rows * o->vocab) * dtype_size(o->logits);
        teacher_logits(loss, backend, stream, group, chunk, teacher);
    }
    backend->kernels->gather_rows(stream, &(struct gather_rows){.rows = chunk->rows,
                                                                .width = o->hidden,
                                                                .in = group->hidden,
                                                                .in_rows = group->rows,
                                                                .in_stride = o->hidden,
                                                                .in_type = o->compute,
                                                                .out_type = o->compute,
                                                                .index = loss->row + at,
                                                                .scale = 1.0f,
                                                                .out = loss->student});
    backend->kernels->gemm(stream, &(struct gemm){.m = chunk->rows,
                                                  .n = o->vocab,
                                                  .k = o->hidden,
                                                  .transpose_b = true,
                                                  .alpha = o->logit_scale,
                                                  .a = loss->student,
                                                  .b = o->head,
                                                  .c = loss->logits,
                                                  .a_type = o->compute,
                                                  .b_type = o->compute,
                                                  .c_type = o->logits});
    bool gradient = group->dhidden != NULL;
    chunk_softmax(loss, backend, stream, chunk, teacher, gradient);
    if (!gradient)
        return;
    size_t ratio = dtype_size(o->logits) / dtype_size(o->compute);
    backend->kernels->gemm(stream, &(struct gemm){.m = chunk->rows,
                                                  .n = o->hidden,
                                                  .k = o->vocab,
                                                  .alpha = o->logit_scale,
                                                  .a = loss->logits,
                                                  .lda = o->vocab * (int64_t)ratio,
                                                  .b = o->head,
                                                  .c = loss->gradient + at * o->hidden,
                                                  .a_type = o->compute,
                                                  .b_type = o->compute,
                                                  .c_type = DTYPE_F32});
}

// Brings the statistics to the host and puts them into the order of the slots.
static void collect(struct loss *loss, const struct backend *backend, struct stream *stream,
                    int64_t count, struct slot_results *results)
{
    size_t capacity = (size_t)loss->options.group_rows;
    size_t bytes = (size_t)count * sizeof(float);
    const void *stats[HOST_STATS] = {loss->row_loss, loss->student_lse, loss->teacher_lse,
                                     loss->overlap, loss->confidence};
    float *h_terms = loss->h_stats + HOST_STATS * capacity;
    for (size_t i = 0; i < HOST_STATS; i++)
        backend->copy_out(stream, loss->h_stats + i * capacity, stats[i], bytes);
    backend->copy_out(stream, h_terms, loss->terms, bytes * LOSS_TERM_COUNT);
    backend->copy_out(stream, loss->h_argmax, loss->student_argmax, bytes);
    backend->copy_out(stream, loss->h_argmax + capacity, loss->teacher_argmax, bytes);
    backend->sync(stream);
    for (int64_t i = 0; i < count; i++) {
        int32_t s = loss->order[i].slot;
        results->loss[s] = loss->h_stats[i];
        results->student_lse[s] = loss->h_stats[capacity + (size_t)i];
        results->teacher_lse[s] = loss->h_stats[2 * capacity + (size_t)i];
        results->overlap[s] = loss->h_stats[3 * capacity + (size_t)i];
        results->weight[s] = loss->h_stats[4 * capacity + (size_t)i]; // confidence until weighted
        results->student_argmax[s] = loss->h_argmax[i];
        results->teacher_argmax[s] = loss->h_argmax[capacity + (size_t)i];
        for (int term = 0; term < LOSS_TERM_COUNT; term++)
            results->terms[s * LOSS_TERM_COUNT + term] = h_terms[i * LOSS_TERM_COUNT + term];
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
                results->weight[end] = group->slots[end].weight;
        if (config->slot_weight == SLOT_WEIGHT_DPACE) {
            float confidence[METRICS_MAX_BLOCK];
            for (int64_t i = first; i < end; i++)
                confidence[i - first] = results->weight[i];
            loss_dpace_weights(confidence, end - first, config->dpace_alpha,
                               results->weight + first);
        }
    }
}

void loss_group_run(struct loss *loss, const struct backend *backend, struct stream *stream,
                    const struct loss_group *group, struct slot_results *results)
{
    const struct loss_options *o = &loss->options;
    if (group->rows > o->group_rows || group->slot_count > o->group_rows)
        BUG("a group of %lld rows, planned for %lld", (long long)group->rows,
            (long long)o->group_rows);
    for (int64_t i = 0; i < group->slot_count; i++)
        loss->order[i] = (struct loss_order){group->slots[i].teacher_row, (int32_t)i};
    qsort(loss->order, (size_t)group->slot_count, sizeof(*loss->order), compare_order);

    for (int64_t first = 0; first < group->slot_count;) {
        struct chunk chunk = chunk_make(loss, group, first);
        chunk_run(loss, backend, stream, group, &chunk);
        first += chunk.rows;
    }
    collect(loss, backend, stream, group->slot_count, results);
    weigh(loss, group, results);
    if (group->dhidden == NULL)
        return;
    for (int64_t i = 0; i < group->slot_count; i++)
        loss->h_scale[i] = results->weight[loss->order[i].slot];
    backend->copy_in(stream, loss->scale, loss->h_scale,
                     (size_t)group->slot_count * sizeof(*loss->h_scale));
    backend->kernels->scatter_rows(stream, &(struct scatter_rows){.rows = group->slot_count,
                                                                  .width = o->hidden,
                                                                  .in = loss->gradient,
                                                                  .in_type = DTYPE_F32,
                                                                  .out_type = o->compute,
                                                                  .index = loss->row,
                                                                  .scale = loss->scale,
                                                                  .out = group->dhidden,
                                                                  .out_rows = group->rows});
}
