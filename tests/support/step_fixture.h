// A whole step over a made-up target and made-up rows, on a backend (the CPU's unless chosen) that
// counts rows that meet the target's head, hands out memory full of NaN, and can replace the noise.
//
// Order: step_fixture_init, changes to config, execution, target or state, step_fixture_open, runs;
// step_fixture_open again after further changes; step_fixture_release. One fixture is open at a time,
// since ops carry no context to count into.
#ifndef TESTS_SUPPORT_STEP_FIXTURE_H
#define TESTS_SUPPORT_STEP_FIXTURE_H

#include "tests/support/backends.h"
#include "trainer/step.h"

struct step_fixture_options {
    uint64_t seed;                // of weights and target
    int64_t vocab, hidden;        // 0: 64 and 8
    double weight_scale;          // of the drafter's matrices, times columns^-0.5; 0: 1
    bool tied;                    // the head is the embedding
    enum last_hidden last_hidden; // 0: pre_norm
    bool float8;                  // rows have codes and scales
    int64_t draft_vocab;          // tokens of a made-up draft vocabulary; 0: none
    const char *const *sets;      // "section.key=value" over tiny defaults with loss.kl 1
    size_t set_count;
};

// A scored slot as an observer saw it.
struct seen_slot {
    int32_t row, block, slot, label, teacher_row, student_argmax, teacher_argmax;
    float weight, loss, student_lse, teacher_lse, overlap;
};

// Rows multiplied with the head since step_fixture_run began.
struct head_rows {
    int64_t student, teacher, gradient;
};

struct step_fixture {
    struct config config;
    struct target target;
    float *embed, *head, *norm; // the made-up target's own tensors; NULL: the target is of files
    struct vocab_map map;       // draft_size 0: none
    struct drafter_sizes sizes;
    struct params params;
    struct execution execution;
    struct model_state state; // what opening loads
    int64_t planes;
    int32_t plane[DRAFTER_MAX_LAYERS], last_plane;
    enum last_hidden last_hidden;
    bool float8;
    struct step step;
    struct step_observer observer;
    struct seen_slot *seen; // since step_fixture_run began, in order
    int64_t seen_count, seen_capacity;
    int32_t seen_rows;
};

// The backend that fixtures initialised from now on run on.
void step_fixture_use(const struct test_backend *on);
void step_fixture_init(struct step_fixture *f, const struct step_fixture_options *options);
// That backend but for what the top of this file says.
const struct backend *step_fixture_backend(void);
// What a target, config and features count make: sizes, table of tensors, planes (the last one is the
// last hidden state), execution on that backend, zeroed state. Called by step_fixture_init.
void step_fixture_resolve(struct step_fixture *f, const int64_t *layer_ids, int64_t features);
void step_fixture_open(struct step_fixture *f);
void step_fixture_release(struct step_fixture *f);
struct step_setup step_fixture_setup(const struct step_fixture *f);

// A row of documents of these lengths, all supervised, with random ids and features. Close it with
// row_close(row, NULL).
void step_fixture_row(const struct step_fixture *f, struct row *row, const int32_t *lengths,
                      int64_t documents, uint64_t seed);
// Forgets what was seen and counted, clears gradients and metrics.
void step_fixture_begin(struct step_fixture *f);
// One row at these anchors, from a fresh start.
void step_fixture_run(struct step_fixture *f, const struct row *row, const int32_t *anchors,
                      int64_t count);
struct head_rows step_fixture_head_rows(void);
// A copy of the step's gradients, masters or moments [params->elements] in host memory; free() it.
float *step_fixture_fetch(const struct step_fixture *f, const float *flat);
// Noise [T, L, H] added to context features instead of the step's own; NULL: the step's own.
void step_fixture_force_noise(const float *noise);
// Drafter's hidden states [count * B, H] of blocks of a row, valid until the next call. Without noise;
// fp32 only; count * B must fit a group.
const float *step_fixture_hidden(struct step_fixture *f, const struct row *row,
                                 const int32_t *anchors, int64_t count);

// Norm of the difference over norm of `want`; the difference's own norm where `want` is 0.
double relative_error(const float *got, const float *want, int64_t count);
// The same over the gradients or weights of each tensor; fails naming tensor and `what` above tol.
void step_fixture_compare(const struct step_fixture *f, const float *got, const float *want,
                          double tol, const char *what);

#endif
