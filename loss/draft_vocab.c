// Owns what a draft vocabulary and a trainable head add to the loss of a chunk. Does not own order and
// chunks (loss.c) nor how the map is made (data/vocab_map.h).
#include "base/log.h"
#include "loss/loss_internal.h"

bool loss_has_map(const struct loss *loss)
{
    return loss->options.map.draft > 0;
}

bool loss_full_teacher(const struct loss *loss)
{
    return loss_has_map(loss) && loss->options.has_teacher;
}

bool loss_full_group(const struct loss *loss, const struct loss_group *group)
{
    return loss_full_teacher(loss) &&
           (group->dhidden == NULL || loss->options.map.full_in_training);
}

void loss_map_plan(struct loss *loss)
{
    struct loss_vocab *map = &loss->options.map;
    BUG_UNLESS(map->draft >= 0 && map->draft <= loss->options.vocab);
    BUG_UNLESS(map->full_in_training || !map->mask_outside || !loss_full_teacher(loss));
    if (map->draft == loss->options.vocab) // the head's rows are in their own order
        map->draft = 0;
    if (map->draft > 0)
        loss->width = map->draft;
}

// Where student rows are shorter than the vocabulary, more of them have room.
int64_t loss_most_students(const struct loss *loss)
{
    const struct loss_options *o = &loss->options;
    int64_t most = o->chunk_rows * o->vocab / loss->width;
    return loss_has_map(loss) && most > o->group_rows ? o->group_rows : most;
}

int64_t loss_most_teachers(const struct loss *loss)
{
    const struct loss_options *o = &loss->options;
    bool shorter = loss_has_map(loss) && !o->map.full_in_training;
    return shorter && o->teacher_rows > o->chunk_rows ? o->teacher_rows : o->chunk_rows;
}

int32_t loss_label(const struct loss *loss, int32_t target_id)
{
    return loss_has_map(loss) && target_id >= 0 ? loss->options.map.draft_of[target_id] : target_id;
}

float loss_slot_weight(const struct loss *loss, const struct slot *slot)
{
    const struct loss_options *o = &loss->options;
    bool by_label = loss_has_map(loss) && o->map.mask_outside && !o->has_teacher;
    return by_label && loss_label(loss, slot->label) < 0 ? 0.0f : slot->weight;
}

const void *loss_student_head(const struct loss *loss)
{
    return loss->options.student_head != NULL ? loss->options.student_head : loss->options.head;
}

void loss_product(const struct loss *loss, const struct backend *backend, struct stream *stream,
                  int64_t rows, const void *states, const void *head, int64_t columns, void *logits)
{
    const struct loss_options *o = &loss->options;
    backend->kernels->gemm(stream, &(struct gemm){.m = rows,
                                                  .n = columns,
                                                  .k = o->hidden,
                                                  .transpose_b = true,
                                                  .alpha = o->logit_scale,
                                                  .a = states,
                                                  .b = head,
                                                  .c = logits,
                                                  .a_type = o->compute,
                                                  .b_type = o->compute,
                                                  .c_type = o->logits});
}

void loss_full_columns(struct loss *loss, const struct backend *backend, struct stream *stream,
                       const struct loss_chunk *chunk, void *teacher)
{
    const struct loss_options *o = &loss->options;
    int64_t kept = loss->width, others = o->vocab - kept;
    const unsigned char *head = o->head;
    head += (size_t)(kept * o->hidden) * dtype_size(o->compute);
    unsigned char *other = teacher;
    other += (size_t)(chunk->teachers * kept) * dtype_size(o->logits);
    loss_product(loss, backend, stream, chunk->teachers, loss->teacher, head, others, other);
    backend->kernels->vocab_scan(
        stream, &(struct vocab_scan){.rows = chunk->teachers,
                                     .kept = kept,
                                     .others = others,
                                     .logits_type = o->logits,
                                     .kept_logits = teacher,
                                     .other_logits = other,
                                     .ids = o->map.ids,
                                     .lse = loss->full_lse,
                                     .argmax = loss->results.full_argmax + chunk->first});
}

void loss_full_results(struct loss *loss, const struct backend *backend, struct stream *stream,
                       const struct loss_group *group, const struct loss_chunk *chunk,
                       const void *teacher)
{
    const struct loss_options *o = &loss->options;
    const int32_t *rows = loss->index + INDEX_TEACHER * group->slot_count + chunk->first;
    backend->kernels->draft_overlap(
        stream, &(struct draft_overlap){.rows = chunk->rows,
                                        .vocab = loss->width,
                                        .logits_type = o->logits,
                                        .student = loss->logits,
                                        .teacher = teacher,
                                        .teacher_row = rows,
                                        .teacher_lse = loss->full_lse,
                                        .overlap = loss->results.full_overlap + chunk->first});
    if (o->map.mask_outside && group->dhidden != NULL)
        backend->kernels->mask_rows(
            stream, &(struct mask_rows){.rows = chunk->rows,
                                        .kept = loss->width,
                                        .weight = loss->scale + chunk->first,
                                        .teacher_row = rows,
                                        .argmax = loss->results.full_argmax + chunk->first,
                                        .scale = loss->scale + chunk->first});
}

void loss_clear_masked(struct loss *loss, const struct backend *backend, struct stream *stream,
                       const struct loss_chunk *chunk)
{
    const struct loss_options *o = &loss->options;
    int64_t ratio = (int64_t)(dtype_size(o->logits) / dtype_size(o->compute));
    if (!loss_has_map(loss) || !o->map.mask_outside)
        return;
    backend->kernels->clear_rows(stream, &(struct clear_rows){.rows = chunk->rows,
                                                              .width = loss->width,
                                                              .scale = loss->scale + chunk->first,
                                                              .x = loss->logits,
                                                              .stride = loss->width * ratio,
                                                              .type = o->compute});
}

// dW += G^T (weight * S)
void loss_head_gradient(struct loss *loss, const struct backend *backend, struct stream *stream,
                        const struct loss_group *group, const struct loss_chunk *chunk)
{
    const struct loss_options *o = &loss->options;
    backend->kernels->gather_rows(
        stream,
        &(struct gather_rows){.rows = chunk->rows,
                              .width = o->hidden,
                              .in = group->hidden,
                              .in_rows = group->rows,
                              .in_stride = o->hidden,
                              .in_type = o->compute,
                              .out_type = o->compute,
                              .index = loss->index + INDEX_ROW * group->slot_count + chunk->first,
                              .scale = 1.0f,
                              .row_scale = loss->scale + chunk->first,
                              .out = loss->student});
    loss_weight_gradient(loss, backend, stream, chunk, loss->student, o->hidden, o->logit_scale,
                         o->dhead);
}

static int32_t target_id(const struct loss *loss, int32_t column)
{
    BUG_UNLESS(column >= 0 && column < loss->options.vocab);
    return loss->options.map.h_ids[column];
}

void loss_map_results(const struct loss *loss, const struct loss_group *group,
                      struct slot_results *results)
{
    const struct loss_options *o = &loss->options;
    const int32_t *teacher = loss->h_index + INDEX_TEACHER * group->slot_count;
    for (int64_t c = 0; c < loss->chunk_count; c++) {
        const struct loss_chunk *chunk = &loss->chunks[c];
        for (int64_t i = chunk->first; i < chunk->first + chunk->rows; i++) {
            int32_t s = loss->order[i].slot;
            results->student_argmax[s] = target_id(loss, results->student_argmax[s]);
            if (!o->has_teacher) {
                results->teacher_argmax[s] = group->slots[s].label;
                continue;
            }
            if (!loss_full_group(loss, group)) {
                results->teacher_argmax[s] = target_id(loss, results->teacher_argmax[s]);
                continue;
            }
            int32_t column = loss->h_full_argmax[chunk->first + teacher[i]];
            results->teacher_argmax[s] = target_id(loss, column);
            results->overlap[s] = loss->h_full_overlap[i];
            if (o->map.mask_outside && column >= loss->width)
                results->weight[s] = 0.0f;
        }
    }
}
