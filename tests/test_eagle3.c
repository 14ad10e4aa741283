// The EAGLE-3 step: gradients against finite differences for every parameter and option; that groups,
// packing and recomputation change nothing; that no position sees what serving would not have.
#include <stdarg.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/log.h"
#include "base/rng.h"
#include "tests/support/rows.h"
#include "tests/support/step_fixture.h"

enum { HIDDEN = 8, MOST_SETS = 12, STEPS = 4 };

struct variant {
    const char *name;
    const char *sets[MOST_SETS];
    int64_t draft; // 0: the whole vocabulary
    bool tied, float8;
    double scale; // of the weights; 0: 1
};

static const struct variant variants[] = {
    {"plain", {"drafter.style=llama"}, 0, false, false, 0.0},
    {"qwen3, normed residual, norm fed back",
     {"drafter.norm_before_residual=true", "drafter.norm_output=true"},
     0,
     true,
     false,
     0.0},
    {"one norm before fc, two layers",
     {"drafter.layers=2", "drafter.norm_before_fc=true", "drafter.norm_before_residual=true"},
     0,
     false,
     false,
     0.0},
    {"a norm per feature, three layers, windows",
     {"drafter.style=llama", "drafter.layers=3", "drafter.fc_norm=true", "drafter.norm_output=true",
      "drafter.layer_types=[full_attention,sliding_attention,sliding_attention]",
      "drafter.sliding_window=5"},
     0,
     false,
     false,
     0.0},
    {"draft vocabulary, trained head",
     {"drafter.lm_head=trainable", "loss.ttt_decay_base=0.7", "loss.out_of_vocab=kept",
      "drafter.norm_output=true"},
     20,
     false,
     false,
     0.0},
    {"draft vocabulary, kept columns alone, weights of 1",
     {"drafter.style=llama", "loss.ttt_decay_base=1.0", "loss.out_of_vocab=kept",
      "loss.full_vocab_metrics=false", "drafter.norm_output=true"},
     20,
     false,
     false,
     0.0},
    {"draft vocabulary, frozen, tied, float8", {"drafter.fc_norm=true"}, 30, true, true, 0.0},
    {"noise", {"data.noise_std=0.3", "drafter.num_key_value_heads=1"}, 0, false, false, 0.0},
    {"one step of two layers", {"drafter.ttt_steps=1", "drafter.layers=2"}, 0, false, false, 0.0},
    {"one step of one layer, one norm before fc",
     {"drafter.ttt_steps=1", "drafter.norm_before_fc=true"},
     0,
     false,
     false,
     0.0},
    {"masks that leave gaps", {"loss.mask_index=label", "drafter.layers=2"}, 0, false, false, 0.0},
    {"masks that leave gaps, one layer", {"loss.mask_index=label"}, 0, false, false, 0.0},
};

static void open_fixture(struct step_fixture *f, const struct variant *v, const char *more)
{
    const char *sets[MOST_SETS + 6] = {"drafter.kind=eagle3", "drafter.ttt_steps=4",
                                       "drafter.layers=1", "loss.ttt_decay_base=0.9",
                                       "loss.mask_index=served"};
    size_t count = 5;
    for (size_t i = 0; i < MOST_SETS && v->sets[i] != NULL; i++)
        sets[count++] = v->sets[i];
    if (more != NULL)
        sets[count++] = more;
    struct step_fixture_options options = {.seed = 5,
                                           .weight_scale = v->scale,
                                           .tied = v->tied,
                                           .float8 = v->float8,
                                           .draft_vocab = v->draft,
                                           .sets = sets,
                                           .set_count = count};
    step_fixture_init(f, &options);
    step_fixture_open(f);
}

static void gaps(struct row *row)
{
    row->loss_mask[4] = row->loss_mask[9] = row->loss_mask[10] = 0;
}

static void open_row(const struct step_fixture *f, struct row *row)
{
    step_fixture_row(f, row, (int32_t[]){13, 7, 2}, 3, 11);
    gaps(row);
}

static double loss_of(struct step_fixture *f, const struct row *row)
{
    step_fixture_begin(f);
    assert_int_equal(step_row(&f->step, row), 0);
    return f->step.metrics.loss;
}

// In fp32 on the CPU the weights are the masters: what is changed there is what the next pass reads.
static void move(const struct step_fixture *f, const struct param *param, const float *direction,
                 double by)
{
    float *weights = (float *)f->step.weights + param->offset;
    for (int64_t i = 0; i < param->count; i++)
        weights[i] += (float)(by * (double)direction[i]);
}

static void check_tensor(struct step_fixture *f, const struct row *row, const char *name,
                         const float *grads, size_t p)
{
    const struct param *param = &f->params.items[p];
    float *direction = memory_alloc((size_t)param->count, sizeof(*direction));
    double along = 0.0, size = 0.0;
    const double by = 1e-3;
    rng_normals(rng_key_make(3, 0, p, RNG_TEST), 0, param->count, direction);
    for (int64_t i = 0; i < param->count; i++) {
        along += (double)grads[param->offset + i] * (double)direction[i];
        size += (double)grads[param->offset + i] * (double)grads[param->offset + i];
    }
    move(f, param, direction, by);
    double up = loss_of(f, row);
    move(f, param, direction, -2.0 * by);
    double down = loss_of(f, row);
    move(f, param, direction, by);
    double measured = (up - down) / (2.0 * by);
    assert_true(size > 0.0);
    if (!(fabs(measured - along) <= 2e-2 * sqrt(size) + 2e-3))
        fail_msg("%s: %s: gradient %g along a direction, differences %g (norm %g)", name,
                 param->name, along, measured, sqrt(size));
    free(direction);
}

static void gradients_match_differences(void **state)
{
    (void)state;
    for (size_t v = 0; v < sizeof(variants) / sizeof(*variants); v++) {
        struct step_fixture f;
        struct row row;
        open_fixture(&f, &variants[v], "memory.group_rows=12");
        open_row(&f, &row);
        loss_of(&f, &row);
        float *grads = step_fixture_fetch(&f, f.step.grads);
        for (size_t p = 0; p < f.params.count; p++)
            check_tensor(&f, &row, variants[v].name, grads, p);
        free(grads);
        row_close(&row, NULL);
        step_fixture_release(&f);
    }
}

// Gradients of a row under another way of cutting or recomputing the step.
static float *gradients_with(const struct variant *v, const char *more, double *loss)
{
    struct step_fixture f;
    struct row row;
    open_fixture(&f, v, more);
    open_row(&f, &row);
    *loss = loss_of(&f, &row);
    float *grads = step_fixture_fetch(&f, f.step.grads);
    row_close(&row, NULL);
    step_fixture_release(&f);
    return grads;
}

static void cuts_change_nothing(void **state)
{
    (void)state;
    static const char *const cuts[] = {"memory.group_rows=4", "memory.group_rows=20",
                                       "memory.chunk_rows=3", "memory.recompute=cheap",
                                       "memory.recompute=layer"};
    for (size_t v = 0; v < sizeof(variants) / sizeof(*variants); v++) {
        struct step_fixture f;
        double want_loss, loss;
        float *want = gradients_with(&variants[v], "memory.recompute=none", &want_loss);
        open_fixture(&f, &variants[v], NULL);
        for (size_t i = 0; i < sizeof(cuts) / sizeof(*cuts); i++) {
            float *got = gradients_with(&variants[v], cuts[i], &loss);
            assert_true(fabs(loss - want_loss) <= 1e-5 * fabs(want_loss));
            // Whole layers are computed again step by step; else one layer's steps are added up together.
            bool exact = i == 3 || (i == 4 && f.sizes.layers > 1);
            step_fixture_compare(&f, got, want, exact ? 0.0 : 2e-5, cuts[i]);
            free(got);
        }
        free(want);
        step_fixture_release(&f);
    }
}

// Nothing of the step before is in a step's gradients, two rows add up, and a row without anchors adds nothing, even
// as the step's only one.
static void gradients_begin_anew(void **state)
{
    (void)state;
    for (size_t v = 0; v < sizeof(variants) / sizeof(*variants); v++) {
        struct step_fixture f;
        struct row row;
        open_fixture(&f, &variants[v], "memory.group_rows=20");
        open_row(&f, &row);
        loss_of(&f, &row);
        float *want = step_fixture_fetch(&f, f.step.grads);
        loss_of(&f, &row);
        float *got = step_fixture_fetch(&f, f.step.grads);
        step_fixture_compare(&f, got, want, 0.0, "again");
        free(got);
        loss_of(&f, &row);
        assert_int_equal(step_row_anchors(&f.step, &row, NULL, 0), 0);
        assert_int_equal(step_row(&f.step, &row), 0);
        got = step_fixture_fetch(&f, f.step.grads);
        for (int64_t i = 0; i < f.params.elements; i++)
            want[i] *= 2.0f;
        step_fixture_compare(&f, got, want, 2e-6, "two rows");
        free(got);
        step_fixture_begin(&f);
        assert_int_equal(step_row_anchors(&f.step, &row, NULL, 0), 0);
        got = step_fixture_fetch(&f, f.step.grads);
        for (int64_t i = 0; i < f.params.elements; i++)
            assert_true(got[i] == 0.0f);
        free(got);
        free(want);
        row_close(&row, NULL);
        step_fixture_release(&f);
    }
}

// A copy of one document of a packed row as a row of its own.
static void open_alone(const struct step_fixture *f, const struct row *packed, int64_t document,
                       struct row *row)
{
    int64_t first = packed->doc_offsets[document];
    int32_t length = (int32_t)(packed->doc_offsets[document + 1] - first);
    step_fixture_row(f, row, &length, 1, 11);
    memcpy(row->input_ids, packed->input_ids + first, (size_t)length * sizeof(int32_t));
    memcpy(row->loss_mask, packed->loss_mask + first, (size_t)length);
    memcpy(row->hidden, packed->hidden + first * packed->features.stride,
           (size_t)(length * packed->features.stride) * sizeof(bf16));
    row->doc_ids[0] = packed->doc_ids[document];
}

static void packed_documents_equal_each_alone(void **state)
{
    (void)state;
    for (size_t v = 0; v < sizeof(variants) / sizeof(*variants); v++) {
        struct step_fixture f;
        struct row packed;
        open_fixture(&f, &variants[v], NULL);
        open_row(&f, &packed);
        double want = loss_of(&f, &packed);
        float *whole = step_fixture_fetch(&f, f.step.grads);
        step_fixture_begin(&f);
        for (int64_t d = 0; d < packed.documents; d++) {
            struct row row;
            open_alone(&f, &packed, d, &row);
            assert_int_equal(step_row(&f.step, &row), 0);
            row_close(&row, NULL);
        }
        float *sum = step_fixture_fetch(&f, f.step.grads);
        assert_true(fabs(f.step.metrics.loss - want) <= 1e-5 * fabs(want));
        step_fixture_compare(&f, sum, whole, 2e-5, variants[v].name);
        free(whole);
        free(sum);
        row_close(&packed, NULL);
        step_fixture_release(&f);
    }
}

// Hidden states [steps, H] of one position.
static void hidden_of(struct step_fixture *f, const struct row *row, int32_t t, float *out)
{
    struct step *step = &f->step;
    struct eagle3 *eagle3 = &step->drafter.eagle3;
    const int32_t anchor = t + 1;
    eagle3_context_forward(eagle3, step->setup.backend, step->stream, row, row->hidden, false, 0);
    const float *hidden =
        eagle3_group_forward(eagle3, step->setup.backend, step->stream, &anchor, 1, STEPS);
    memcpy(out, hidden, sizeof(float) * STEPS * HIDDEN);
}

// Whether the hidden state of a step differs.
static bool differs(const float *a, const float *b, int64_t step)
{
    return memcmp(a + step * HIDDEN, b + step * HIDDEN, sizeof(float) * HIDDEN) != 0;
}

static void nothing_later_is_seen(void **state)
{
    (void)state;
    enum { POSITION = 6, TOKENS = 14 };
    for (size_t v = 0; v < sizeof(variants) / sizeof(*variants); v++) {
        struct step_fixture f;
        struct row row;
        float want[STEPS * HIDDEN], got[STEPS * HIDDEN];
        open_fixture(&f, &variants[v], NULL);
        if (f.sizes.ttt_steps < STEPS || f.float8) {
            step_fixture_release(&f);
            continue;
        }
        step_fixture_row(&f, &row, (int32_t[]){TOKENS}, 1, 11);
        hidden_of(&f, &row, POSITION, want);
        int64_t stride = row.features.stride;
        for (int32_t t = 0; t < TOKENS; t++) { // features of t concern positions from t on
            bf16 *value = row.hidden + t * stride + 2, kept = *value;
            *value = bf16_from_float(bf16_to_float(kept) + 2.0f);
            hidden_of(&f, &row, POSITION, got);
            *value = kept;
            for (int64_t i = 0; i < STEPS; i++)
                if (t > POSITION || f.sizes.window == 0)
                    assert_int_equal(differs(want, got, i), t <= POSITION);
        }
        for (int32_t t = 0; t < TOKENS; t++) { // step i reads tokens up to position + 1 + i
            int32_t kept = row.input_ids[t];
            row.input_ids[t] = (kept + 1) % 59;
            hidden_of(&f, &row, POSITION, got);
            row.input_ids[t] = kept;
            for (int64_t i = 0; i < STEPS; i++)
                if (t > POSITION + 1 + i || (t > 0 && f.sizes.window == 0))
                    assert_int_equal(differs(want, got, i), t <= POSITION + 1 + i);
        }
        row_close(&row, NULL);
        step_fixture_release(&f);
    }
}

// A step without gradients, which keeps next to nothing, scores like one that trains.
static void scoring_agrees_with_training(void **state)
{
    (void)state;
    for (size_t v = 0; v < sizeof(variants) / sizeof(*variants); v++) {
        struct step_fixture f;
        struct row row;
        struct step scoring;
        struct error err = {0};
        struct metrics metrics[2] = {{.loss = 0.0}, {.loss = 0.0}};
        struct walk walk = {0};
        open_fixture(&f, &variants[v], "memory.group_rows=12");
        open_row(&f, &row);
        assert_int_equal(step_evaluate(&f.step, &row, &metrics[0], &walk, NULL, NULL), 0);
        struct step_setup setup = step_fixture_setup(&f);
        setup.training = false;
        assert_int_equal(step_open(&scoring, &setup, &err), 0);
        assert_true(scoring.arena.bytes < f.step.arena.bytes);
        step_load(&scoring, &f.state);
        assert_int_equal(step_evaluate(&scoring, &row, &metrics[1], &walk, NULL, NULL), 0);
        assert_true(metrics[0].loss > 0.0);
        assert_memory_equal(&metrics[0], &metrics[1], sizeof(metrics[0]));
        step_close(&scoring);
        row_close(&row, NULL);
        step_fixture_release(&f);
    }
}

// In bf16 the gradients of every tensor stay near those in fp32, where the steps do not blow up what is
// rounded.
static void bf16_is_near(void **state)
{
    (void)state;
    for (size_t v = 0; v < sizeof(variants) / sizeof(*variants); v++) {
        struct step_fixture f;
        struct variant calm = variants[v];
        double want_loss, loss;
        calm.scale = 0.5;
        float *want = gradients_with(&calm, NULL, &want_loss);
        float *got = gradients_with(&calm, "run.compute=bf16", &loss);
        open_fixture(&f, &calm, NULL);
        assert_true(fabs(loss - want_loss) <= 0.02 * fabs(want_loss));
        step_fixture_compare(&f, got, want, 0.05, variants[v].name);
        free(got);
        free(want);
        step_fixture_release(&f);
    }
}

// A window that holds everything is none; a smaller one is something else.
static void a_wide_window_is_none(void **state)
{
    (void)state;
    static const struct variant full = {.name = "full"};
    static const struct variant wide = {
        .name = "wide",
        .sets = {"drafter.layer_types=[sliding_attention]", "drafter.sliding_window=64"}};
    static const struct variant narrow = {
        .name = "narrow",
        .sets = {"drafter.layer_types=[sliding_attention]", "drafter.sliding_window=4"}};
    double want, same, other;
    free(gradients_with(&full, NULL, &want));
    free(gradients_with(&wide, NULL, &same));
    free(gradients_with(&narrow, NULL, &other));
    assert_true(same == want);
    assert_true(fabs(other - want) > 1e-3 * fabs(want));
}

// A map of the whole vocabulary changes nothing; outside of a smaller one nothing agrees, and with
// `masked` nothing weighs.
static void what_is_outside_is_counted(void **state)
{
    (void)state;
    struct step_fixture f;
    struct row row;
    static const struct variant v = {.name = "masked", .draft = 16};
    open_fixture(&f, &v, "loss.out_of_vocab=masked");
    open_row(&f, &row);
    loss_of(&f, &row);
    int64_t outside = 0, weighed = 0;
    for (int64_t i = 0; i < f.seen_count; i++) {
        bool out = f.map.draft_ids[f.seen[i].teacher_argmax] < 0;
        outside += out;
        weighed += f.seen[i].weight > 0.0f;
        assert_int_equal(f.seen[i].weight > 0.0f, !out);
        assert_true(!out || f.seen[i].student_argmax != f.seen[i].teacher_argmax);
    }
    assert_true(outside > 0 && weighed > 0);
    assert_true(f.step.metrics.outside == (double)outside);
    assert_true(f.step.metrics.slots == (double)weighed);
    row_close(&row, NULL);
    step_fixture_release(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_match_differences),
        cmocka_unit_test(cuts_change_nothing),
        cmocka_unit_test(gradients_begin_anew),
        cmocka_unit_test(packed_documents_equal_each_alone),
        cmocka_unit_test(nothing_later_is_seen),
        cmocka_unit_test(scoring_agrees_with_training),
        cmocka_unit_test(bf16_is_near),
        cmocka_unit_test(a_wide_window_is_none),
        cmocka_unit_test(what_is_outside_is_counted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
