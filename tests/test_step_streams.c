// The step queues work and goes on: nothing it queues may read what the host or another stream changes
// before it runs. Steps on a backend that runs everything as late as it may, or copies as early as they
// may, against the CPU backend, which runs everything at once.
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "tests/support/lazy_backend.h"
#include "tests/support/step_fixture.h"

#define COUNT(array) (sizeof(array) / sizeof(*(array)))

enum { ROWS = 7, STEPS = 3, PER_STEP = 2 };

// Rows of one document, of many, and one in which nothing can be predicted.
static const int32_t lengths[ROWS][4] = {{60},      {20, 1, 30, 9}, {1, 1},      {5, 50},
                                         {3, 2, 4}, {33, 21},       {16, 16, 16}};
static const int64_t documents[ROWS] = {1, 4, 2, 2, 3, 2, 3};

// As when its reader fills the next one into it.
static void spoil(struct row *row)
{
    size_t tokens = (size_t)row->tokens;
    memset(row->hidden, 0xff,
           tokens * (size_t)(row->planes * row->hidden_size) * sizeof(*row->hidden));
    memset(row->input_ids, 0, tokens * sizeof(*row->input_ids));
    memset(row->positions, 0, tokens * sizeof(*row->positions));
    memset(row->loss_mask, 0, tokens);
    memset(row->blank, 1, tokens);
}

struct result {
    float *master;
    double loss, evaluated, walked;
};

// Three steps of two rows, and a row scored after each step while the next step's first row waits.
static struct result run(const struct step_fixture *f, const struct backend *backend, bool staged)
{
    struct step_setup setup = step_fixture_setup(f);
    struct step step;
    struct row rows[ROWS], scored;
    struct error err = {0};
    struct step_outcome outcome;
    struct metrics metrics = {0};
    struct walk walk = {0};
    struct result result = {.loss = 0.0};
    setup.backend = backend;
    assert_int_equal(step_open(&step, &setup, &err), 0);
    step_load(&step, &f->state);
    for (int r = 0; r < ROWS; r++)
        step_fixture_row(f, &rows[r], lengths[r], documents[r], 50 + (uint64_t)r);
    for (int s = 0, r = 0; s < STEPS; s++) {
        step_begin(&step);
        for (int i = 0; i < PER_STEP; i++, r++) {
            if (staged)
                step_stage_row(&step, &rows[r + 1]);
            assert_int_equal(step_row(&step, &rows[r]), 0);
            spoil(&rows[r]);
        }
        step_apply(&step, 1e-2, s + 1, &outcome);
        assert_true(outcome.applied);
        result.loss += metrics_loss(&step.metrics, NORMALIZE_WEIGHTED);
        step_fixture_row(f, &scored, lengths[0], documents[0], 99);
        assert_int_equal(step_evaluate(&step, &scored, &metrics, &walk, NULL, NULL), 0);
        spoil(&scored);
        row_close(&scored, NULL);
    }
    result.evaluated = metrics.loss;
    result.walked = walk.tokens;
    struct model_state after;
    model_state_open(&after, &f->params);
    step_save(&step, &after);
    result.master = after.master;
    free(after.m);
    free(after.v);
    step_close(&step);
    for (int r = 0; r < ROWS; r++)
        row_close(&rows[r], NULL);
    return result;
}

static void compare(const char *const *sets, size_t count, int64_t draft_vocab)
{
    struct step_fixture f;
    step_fixture_init(
        &f, &(struct step_fixture_options){
                .seed = 11, .draft_vocab = draft_vocab, .sets = sets, .set_count = count});
    struct result want = run(&f, backend_cpu(), false);
    for (int early = 0; early < 2; early++)
        for (int staged = 0; staged < 2; staged++) {
            struct result got = run(&f, lazy_backend(early), staged);
            assert_true(want.loss > 0.0 && want.walked > 0.0);
            assert_true(got.loss == want.loss);
            assert_true(got.evaluated == want.evaluated);
            assert_true(got.walked == want.walked);
            for (size_t i = 0; i < f.params.count; i++) {
                const struct param *param = &f.params.items[i];
                assert_memory_equal(got.master + param->offset, want.master + param->offset,
                                    (size_t)param->count * sizeof(float));
            }
            free(got.master);
        }
    free(want.master);
    step_fixture_release(&f);
}

#define CUT "memory.group_rows=32", "memory.chunk_rows=24", "anchors.max_anchors=24"

static void steps_do_not_depend_on_when_work_runs(void **state)
{
    (void)state;
    static const char *const sets[] = {CUT, "memory.recompute=none"};
    compare(sets, COUNT(sets), 0);
}

static void nor_with_features_read_in_place(void **state)
{
    (void)state;
    static const char *const sets[] = {CUT, "run.compute=bf16", "memory.recompute=cheap"};
    compare(sets, COUNT(sets), 0);
}

static void nor_with_noise_and_weights_of_whole_blocks(void **state)
{
    (void)state;
    static const char *const sets[] = {CUT, "memory.recompute=layer", "data.noise_std=0.1",
                                       "loss.slot_weight=dpace"};
    compare(sets, COUNT(sets), 0);
}

static void nor_of_eagle3(void **state)
{
    (void)state;
    static const char *const sets[] = {"memory.group_rows=28", "memory.chunk_rows=24",
                                       "drafter.kind=eagle3",  "drafter.ttt_steps=4",
                                       "drafter.fc_norm=true", "memory.recompute=layer",
                                       "data.noise_std=0.1",   "drafter.lm_head=trainable"};
    static const char *const in_bf16[] = {
        "memory.group_rows=28",     "memory.chunk_rows=24",  "drafter.kind=eagle3",
        "drafter.layers=1",         "run.compute=bf16",      "drafter.norm_before_residual=true",
        "drafter.norm_output=true", "memory.recompute=cheap"};
    compare(sets, COUNT(sets), 20);
    compare(in_bf16, COUNT(in_bf16), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_do_not_depend_on_when_work_runs),
        cmocka_unit_test(nor_with_features_read_in_place),
        cmocka_unit_test(nor_with_noise_and_weights_of_whole_blocks),
        cmocka_unit_test(nor_of_eagle3),
    };
    return cmocka_run_group_tests_name("step_streams", tests, NULL, NULL);
}
