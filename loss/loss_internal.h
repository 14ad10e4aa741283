// What the chunked loss, its draft vocabulary and its Markov head share.
#ifndef LOSS_LOSS_INTERNAL_H
#define LOSS_LOSS_INTERNAL_H

#include "loss/loss.h"

struct loss_order {
    int32_t teacher_row; // position in the packed row
    int32_t slot;        // index into the group's slots
};

// A sorted row and the token in front of what it predicts.
struct loss_token {
    int32_t token, row;
};

// Sorted rows [first, first + rows) and their distinct teacher positions.
struct loss_chunk {
    int64_t first, rows, teachers;
};

enum {
    STAT_LOSS,
    STAT_STUDENT_LSE,
    STAT_TEACHER_LSE,
    STAT_OVERLAP,
    STAT_CONFIDENCE,
    STATS, // the terms follow
    INDEX_ROW = 0,
    INDEX_TEACHER,
    INDEX_LABEL,
    INDEX_POSITION,
    INDICES
};

void loss_map_plan(struct loss *loss); // the width of a student's logits
int64_t loss_most_students(const struct loss *loss);
int64_t loss_most_teachers(const struct loss *loss);
bool loss_has_map(const struct loss *loss);
bool loss_full_teacher(const struct loss *loss); // a map and a teacher
// Whether this group compares with the teacher over all columns.
bool loss_full_group(const struct loss *loss, const struct loss_group *group);
int32_t loss_label(const struct loss *loss, int32_t target_id);
float loss_slot_weight(const struct loss *loss, const struct slot *slot); // as known beforehand
const void *loss_student_head(const struct loss *loss);

// logits [rows, columns] = states [rows, H] times `columns` rows of a head
void loss_product(const struct loss *loss, const struct backend *backend, struct stream *stream,
                  int64_t rows, const void *states, const void *head, int64_t columns,
                  void *logits);
// The teacher's other columns, behind the kept ones at `teacher`; log-sum-exp and argmax of all.
void loss_full_columns(struct loss *loss, const struct backend *backend, struct stream *stream,
                       const struct loss_chunk *chunk, void *teacher);
// Overlap of the student's logits with all columns, and the chunk's weights where they are masked.
void loss_full_results(struct loss *loss, const struct backend *backend, struct stream *stream,
                       const struct loss_group *group, const struct loss_chunk *chunk,
                       const void *teacher);
// Adds the chunk's gradient of the student's head.
void loss_head_gradient(struct loss *loss, const struct backend *backend, struct stream *stream,
                        const struct loss_group *group, const struct loss_chunk *chunk);
// Results of draft ids become those of target ids.
void loss_map_results(const struct loss *loss, const struct loss_group *group,
                      struct slot_results *results);

// out [rows, columns] in type = alpha G times the first columns' matrix [width, columns], where the softmax left G
// in the rows of the logits.
void loss_input_gradient(struct loss *loss, const struct backend *backend, struct stream *stream,
                         const struct loss_chunk *chunk, const void *matrix, int64_t columns,
                         float alpha, void *out, enum dtype type);
// out [width, columns] fp32 += alpha G^T times in [rows, columns].
void loss_weight_gradient(struct loss *loss, const struct backend *backend, struct stream *stream,
                          const struct loss_chunk *chunk, const void *in, int64_t columns,
                          float alpha, float *out);
// Rows of G whose slot is masked become 0, so that one that is not finite adds nothing to a sum over rows.
void loss_clear_masked(struct loss *loss, const struct backend *backend, struct stream *stream,
                       const struct loss_chunk *chunk);

// A Markov head. The index: once a group. The logits: on top of the student's. The gradient: dw2, and what
// the sums, once a group, take for dw1.
bool loss_has_markov(const struct loss *loss);
void loss_markov_plan(struct loss *loss, struct arena *arena);
void loss_markov_open(struct loss *loss);
void loss_markov_close(struct loss *loss);
void loss_markov_index(struct loss *loss, const struct backend *backend, struct stream *stream,
                       const struct loss_group *group);
void loss_markov_logits(struct loss *loss, const struct backend *backend, struct stream *stream,
                        const struct loss_chunk *chunk);
void loss_markov_gradient(struct loss *loss, const struct backend *backend, struct stream *stream,
                          const struct loss_chunk *chunk);
void loss_markov_sums(struct loss *loss, const struct backend *backend, struct stream *stream,
                      const struct loss_group *group);

#endif
