// One optimizer step: rows in, gradients summed over micro-steps and anchor groups, one update.
// Owns the model's memory on the backend, planned and taken once. The same object scores rows for
// validation.
#ifndef TRAINER_STEP_H
#define TRAINER_STEP_H

#include "configs/config.h"
#include "data/vocab_map.h"
#include "drafter/drafter.h"
#include "loss/loss.h"
#include "trainer/execution.h"
#include "trainer/model_state.h"
#include "trainer/muon.h"
#include "trainer/ownership.h"
#include "trainer/ranks.h"
#include "trainer/release.h"
#include "trainer/step_clock.h"
#include "trainer/step_exchange.h"
#include "trainer/step_stage.h"
#include "trainer/transfer.h"

struct step_setup {
    const struct config *config;
    const struct execution *execution;
    const struct backend *backend;
    const struct target *target;
    const struct drafter_sizes *sizes;
    const struct params *params;
    const struct vocab_map *map; // draft vocabulary; NULL: none, and in plans
    int64_t planes;              // P of the rows
    const int32_t *plane;        // [sizes->features]
    int32_t last_plane;          // -1: no last hidden state
    enum last_hidden last_hidden;
    bool training;                     // false: scoring only, no gradients, no optimizer state
    const struct ownership *ownership; // NULL: one rank owns everything
    struct ranks *ranks;               // connected; NULL: nobody else
    bool float8;                       // of the rows' features
};

// What an observer sees of each anchor group, for traces and tests. Arrays are valid during the call.
struct step_observer {
    void *context;
    // Anchors of a training row, before its first group. `row` counts rows since step_begin.
    void (*row)(void *context, const struct row *row, const int32_t *anchors, int64_t count);
    // Scored slots of a group; slot.block counts from first_block of the row's anchors.
    void (*group)(void *context, int64_t first_block, const struct slot *slots, int64_t count,
                  const struct slot_results *results);
};

struct step {
    struct step_setup setup;
    struct stream *stream;
    struct arena arena; // the table of everything on the backend
    void *memory;
    // flat arrays, backend memory
    void *weights; // [params->elements] compute dtype; on one rank in fp32 the masters themselves
    float *grads;  // [params->elements]
    float *norms;  // [params->norm_elements] for several ranks that compute in bf16; else NULL
    struct state_layout state;
    float *master, *m, *v, *ema;       // [state_elements of each]; ema NULL: none
    struct muon muon;                  // where the config says so
    void *embed, *head;                // frozen, compute dtype
    int32_t *vocab_ids;                // [V] target id of a row of head; NULL: row i is token i
    float *norm;                       // [H] fp32, frozen
    struct transfer transfer;          // of target and state
    struct step_stage stage;           // features
    double *squares, *squares_scratch; // [param count], [SUM_SQUARES_PARTS]
    double *own_squares;               // [param count] of this rank's rows alone; on several ranks
    double *h_squares, *h_own_squares;
    struct step_exchange exchange;
    struct drafter_hooks hooks;
    struct drafter drafter;
    struct loss loss;
    struct block_layout layout;
    struct anchor_scratch anchor_scratch;
    int32_t *anchors, *accepted; // [seq_len] host
    struct slot *slots;          // [group_rows] host
    int32_t *hidden_row;         // [group_rows] host: row of each slot's hidden state
    struct slot_results results;
    struct metrics metrics;               // since step_begin
    struct step_clock clock;              // since step_begin
    int64_t rows;                         // since step_begin
    const struct step_observer *observer; // NULL: none
    // Asked between groups; true: give up the running step.
    bool (*stop)(void *context);
    void *stop_context;
};

// How the features of the rows lie in memory.
struct feature_layout step_features(const struct step_setup *setup);

// Fills the plan without taking memory (arena table and sum) ...
void step_plan(struct arena *arena, const struct step_setup *setup);
// ... and takes it. Copies the target's embedding, head and norm in.
int step_open(struct step *step, const struct step_setup *setup, struct error *err);
void step_close(struct step *step);

// Initial weights: the release's, and of the config's seed where it (or NULL) has none; moments 0.
void step_initialize(struct step *step, const struct release *release);
void step_load(struct step *step, const struct model_state *state);
// A tensor of the target to backend memory in `type`; row i is its row order[i] (NULL: i).
void step_load_frozen(struct step *step, const struct target_tensor *tensor, const int32_t *order,
                      void *to, enum dtype type);
// Copies this rank's masters and moments into the snapshot (not the counters), and what servers read where
// the snapshot has room for it.
void step_save(struct step *step, struct model_state *state);

// Begins new sums, of gradients and all else.
void step_begin(struct step *step);
// Starts copying the features of a row that step_row or step_evaluate is to run soon: at most one row
// besides the one that runs next or is running. It must stay as it is until it has been run.
void step_stage_row(struct step *step, const struct row *row);
// The row that comes next is this rank's last of the step: its gradients travel while they are made.
// Optional: those that have not travelled do so in step_apply.
void step_last_row(struct step *step);
// Adds a row's gradients; when it returns, the row is not read any more. Returns 1 when stop() asked to
// give up (the gradients are then useless).
int step_row(struct step *step, const struct row *row);
// The same at given positions, ascending, instead of drawn anchors.
int step_row_anchors(struct step *step, const struct row *row, const int32_t *anchors,
                     int64_t count);

struct step_outcome {
    bool applied;
    bool empty;         // sum of weights 0: nothing changed
    bool nonfinite;     // nothing changed
    bool stopped;       // some rank has given the step up: nothing changed
    char tensor[96];    // the first tensor whose gradient is not finite
    double grad_norm;   // after normalisation, before clipping
    double clip_factor; // 1: not clipped
    double weight_sum;  // what the gradient was divided by
};
// Sums over all ranks, normalises, clips, updates; returns while the update is still queued, so that its
// time counts for the next step. applied_step counts updates from 1 (AdamW's bias correction).
void step_apply(struct step *step, double lr, int64_t applied_step, struct step_outcome *outcome);

// What is the same for all tensors of an update.
struct step_update {
    double lr, grad_scale;
    int64_t applied_step;
};
// Of one tensor that this rank owns, queued: what step_apply does with each.
void step_update_tensor(struct step *step, const struct step_update *update, size_t param);

// Masters and their moving average change places, and with them the weights that are read: to score with the
// average, and once more, to go on training bitwise as before. Every rank calls it. Nothing without an average.
void step_exchange_average(struct step *step);

// Where a tensor's weights are read, and in which type; the same on every rank.
void *step_weights_of(const struct step *step, size_t param, enum dtype *type);

// Scores every valid anchor of a row, adds to metrics and the walk; visit may be NULL. 1: stopped.
int step_evaluate(struct step *step, const struct row *row, struct metrics *metrics,
                  struct walk *walk, walk_block_fn *visit, void *context);

// Threads of the CPU backend: parallel.threads, or as many as there are cores.
int64_t execution_threads(const struct config *config);
// Group rows, chunk rows and recomputation that the config leaves open, and what the hardware is.
int execution_choose(struct execution *execution, const struct config *config,
                     const struct drafter_sizes *sizes, const struct backend *backend,
                     struct error *err);

#endif
