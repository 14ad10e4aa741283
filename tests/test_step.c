// The step as a whole: how it is cut changes nothing but rounding, rows without weight cost nothing,
// what memory is planned, bf16 beside fp32, what can be learned, scoring beside training.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/bf16.h"
#include "tests/support/step_fixture.h"

#define COUNT(list) (sizeof(list) / sizeof(*(list)))

enum { BLOCK = 8 };

// Documents with gaps in their masks and anchors in all of them.
static const int32_t lengths[] = {90, 1, 60, 49};
static const int32_t anchors[] = {0,  1,  2,  7,  8,   9,   20,  33,  47,  50,  51,  52,  70,
                                  80, 87, 92, 99, 101, 130, 149, 151, 152, 160, 170, 188, 195};
enum { ANCHORS = COUNT(anchors), GAPS = 7 };

static void open_fixture(struct step_fixture *f, struct row *row, double weight_scale,
                         const char *const *sets, size_t set_count)
{
    static const char *const base[] = {"data.seq_len=200", "drafter.sliding_window=20",
                                       "drafter.layer_types=sliding_attention,full_attention"};
    const char *all[COUNT(base) + 8];
    memcpy(all, base, sizeof(base));
    for (size_t i = 0; i < set_count; i++)
        all[COUNT(base) + i] = sets[i];
    step_fixture_init(f, &(struct step_fixture_options){.seed = 81,
                                                        .weight_scale = weight_scale,
                                                        .sets = all,
                                                        .set_count = COUNT(base) + set_count});
    step_fixture_row(f, row, lengths, COUNT(lengths), 1);
    for (int32_t t = 4; t < row->tokens; t += 200 / GAPS)
        row->loss_mask[t] = 0;
}

static void close_fixture(struct step_fixture *f, struct row *row)
{
    row_close(row, NULL);
    step_fixture_release(f);
}

static void cut(struct step_fixture *f, int64_t group_rows, int64_t chunk_rows,
                const char *recompute)
{
    f->execution.group_rows = group_rows;
    f->execution.chunk_rows = chunk_rows;
    snprintf(f->execution.recompute, sizeof(f->execution.recompute), "%s", recompute);
    step_fixture_open(f);
}

static float *copy_gradient(const struct step_fixture *f)
{
    size_t bytes = (size_t)f->params.elements * sizeof(float);
    float *copy = memory_alloc(bytes, 1);
    memcpy(copy, f->step.grads, bytes);
    return copy;
}

// ---- cuts

static void check_slots_near(const struct step_fixture *f, const struct seen_slot *want,
                             int64_t count)
{
    assert_int_equal(f->seen_count, count);
    for (int64_t i = 0; i < count; i++) {
        const struct seen_slot *got = &f->seen[i];
        assert_true(got->block == want[i].block && got->slot == want[i].slot);
        assert_true(got->label == want[i].label && got->teacher_row == want[i].teacher_row);
        assert_true(got->student_argmax == want[i].student_argmax);
        assert_true(got->teacher_argmax == want[i].teacher_argmax);
        assert_float_equal(got->weight, want[i].weight, 1e-5);
        assert_float_equal(got->loss, want[i].loss, 1e-4);
        assert_float_equal(got->student_lse, want[i].student_lse, 1e-4);
        assert_float_equal(got->teacher_lse, want[i].teacher_lse, 1e-4);
        assert_float_equal(got->overlap, want[i].overlap, 1e-5);
    }
}

static void check_cuts(const char *const *sets, size_t set_count)
{
    static const int64_t groups[] = {BLOCK, 2 * BLOCK, 7 * BLOCK, 512}, chunks[] = {2, 9, 16, 512};
    struct step_fixture f;
    struct row row;
    open_fixture(&f, &row, 0.3, sets, set_count);
    cut(&f, 512, 512, "none");
    step_fixture_run(&f, &row, anchors, ANCHORS);
    float *want = copy_gradient(&f);
    int64_t slots = f.seen_count;
    struct seen_slot *seen = memory_alloc((size_t)slots, sizeof(*seen));
    memcpy(seen, f.seen, (size_t)slots * sizeof(*seen));
    assert_true(slots > 100);
    for (size_t g = 0; g < COUNT(groups); g++)
        for (size_t c = 0; c < COUNT(chunks); c++) {
            cut(&f, groups[g], chunks[c], "none");
            step_fixture_run(&f, &row, anchors, ANCHORS);
            check_slots_near(&f, seen, slots);
            step_fixture_compare(&f, f.step.grads, want, 1e-6, "another cut");
        }
    free(seen);
    free(want);
    close_fixture(&f, &row);
}

static void cuts_agree_to_rounding(void **state)
{
    (void)state;
    static const char *const plain[] = {"loss.slot_mask=each"};
    static const char *const dpace[] = {"loss.slot_weight=dpace", "loss.tv=0.5",
                                        "drafter.predict_from_anchor=true", "data.noise_std=0.1"};
    check_cuts(plain, COUNT(plain));
    check_cuts(dpace, COUNT(dpace));
}

// The same operations on the same numbers, some of them twice.
static void recomputation_is_bitwise(void **state)
{
    (void)state;
    static const char *const levels[] = {"none", "cheap", "layer"};
    static const char *const computes[] = {"run.compute=fp32", "run.compute=bf16"};
    static const int64_t groups[] = {3 * BLOCK, 512};
    for (size_t c = 0; c < COUNT(computes); c++)
        for (size_t g = 0; g < COUNT(groups); g++) {
            struct step_fixture f;
            struct row row;
            float *want = NULL;
            size_t arena[COUNT(levels)];
            open_fixture(&f, &row, 1.0, &computes[c], 1);
            for (size_t level = 0; level < COUNT(levels); level++) {
                cut(&f, groups[g], 64, levels[level]);
                arena[level] = f.step.arena.bytes;
                step_fixture_run(&f, &row, anchors, ANCHORS);
                if (want == NULL)
                    want = copy_gradient(&f);
                assert_memory_equal(f.step.grads, want, (size_t)f.params.elements * sizeof(float));
            }
            assert_true(arena[0] > arena[1] && arena[1] > arena[2]);
            free(want);
            close_fixture(&f, &row);
        }
}

static void runs_repeat_bitwise(void **state)
{
    (void)state;
    struct step_fixture f;
    struct row row;
    open_fixture(&f, &row, 1.0, NULL, 0);
    for (int threads = 1; threads <= 2; threads++) {
        f.execution.threads = threads;
        cut(&f, 5 * BLOCK, 64, "none");
        step_fixture_run(&f, &row, anchors, ANCHORS);
        float *want = copy_gradient(&f);
        for (int i = 0; i < 3; i++) {
            step_fixture_run(&f, &row, anchors, ANCHORS);
            assert_memory_equal(f.step.grads, want, (size_t)f.params.elements * sizeof(float));
        }
        free(want);
    }
    close_fixture(&f, &row);
}

// Rows, micro-steps and groups add to the same sums.
static void rows_of_a_step_add_up(void **state)
{
    (void)state;
    struct step_fixture f;
    struct row first, second;
    open_fixture(&f, &first, 0.3, NULL, 0);
    step_fixture_row(&f, &second, (int32_t[]){30, 20}, 2, 2);
    cut(&f, 4 * BLOCK, 64, "none");
    int64_t n = f.params.elements;
    step_fixture_run(&f, &first, anchors, ANCHORS);
    float *want = copy_gradient(&f);
    struct metrics sum = f.step.metrics;
    step_fixture_run(&f, &second, (int32_t[]){3, 31}, 2);
    for (int64_t i = 0; i < n; i++)
        want[i] += f.step.grads[i];
    metrics_add(&sum, &f.step.metrics);
    step_fixture_run(&f, &first, anchors, ANCHORS);
    assert_int_equal(step_row_anchors(&f.step, &second, NULL, 0), 0); // adds nothing
    assert_int_equal(step_row_anchors(&f.step, &second, (int32_t[]){3, 31}, 2), 0);
    step_fixture_compare(&f, f.step.grads, want, 1e-6, "two rows");
    assert_true(fabs(f.step.metrics.loss - sum.loss) <= 1e-9 * sum.loss);
    assert_true(f.step.metrics.slots == sum.slots && f.step.metrics.weight == sum.weight);
    assert_true(f.step.metrics.rows == 3.0);
    free(want);
    row_close(&second, NULL);
    close_fixture(&f, &first);
}

static bool stop_at_third(void *context)
{
    return ++*(int *)context == 3;
}

static void a_step_stops_between_groups(void **state)
{
    (void)state;
    struct step_fixture f;
    struct row row;
    int asked = 0;
    open_fixture(&f, &row, 1.0, NULL, 0);
    cut(&f, BLOCK, 64, "none");
    f.step.stop = stop_at_third;
    f.step.stop_context = &asked;
    step_fixture_begin(&f);
    assert_int_equal(step_row_anchors(&f.step, &row, anchors, ANCHORS), 1);
    assert_int_equal(asked, 3);
    assert_true(f.seen[f.seen_count - 1].block == 1);
    close_fixture(&f, &row);
}

// ---- work

// Teacher rows of the slots seen, each counted once per group of `blocks` blocks.
static int64_t distinct_teachers(const struct step_fixture *f, int64_t blocks)
{
    int64_t distinct = 0;
    for (int64_t i = 0; i < f->seen_count; i++) {
        bool before = false;
        for (int64_t j = 0; j < i && !before; j++)
            before = f->seen[j].teacher_row == f->seen[i].teacher_row &&
                     f->seen[j].block / blocks == f->seen[i].block / blocks;
        distinct += !before;
    }
    return distinct;
}

// Chunks with room for a position's students and its teacher row compute it once, however many there
// are: no position here has more than ROOM - 1 students.
static void only_rows_that_count_meet_the_head(void **state)
{
    (void)state;
    enum { ROOM = 12 };
    static const int64_t groups[] = {1, 5, ANCHORS}, chunks[] = {ROOM, 37, 512};
    static const char *const masks[] = {"loss.slot_mask=prefix", "loss.slot_mask=each"};
    for (size_t m = 0; m < COUNT(masks); m++) {
        struct step_fixture f;
        struct row row;
        open_fixture(&f, &row, 1.0, &masks[m], 1);
        for (size_t g = 0; g < COUNT(groups); g++)
            for (size_t c = 0; c < COUNT(chunks); c++) {
                cut(&f, groups[g] * BLOCK, chunks[c], "none");
                step_fixture_run(&f, &row, anchors, ANCHORS);
                struct head_rows rows = step_fixture_head_rows();
                assert_true(f.seen_count > 100 && f.seen_count < ANCHORS * (BLOCK - 1));
                assert_true(f.step.metrics.slots == (double)f.seen_count);
                assert_int_equal(rows.student, f.seen_count);
                assert_int_equal(rows.gradient, f.seen_count);
                assert_int_equal(rows.teacher, distinct_teachers(&f, groups[g]));
            }
        close_fixture(&f, &row);
    }
}

// ---- memory

static size_t planned(const struct step_fixture *f, const char *group)
{
    struct arena arena;
    struct step_setup setup = step_fixture_setup(f);
    arena_init(&arena);
    step_plan(&arena, &setup);
    size_t bytes = arena_group_bytes(&arena, group);
    arena_release(&arena);
    return bytes;
}

static void memory_does_not_depend_on_anchors(void **state)
{
    (void)state;
    static const char *const counts[] = {"anchors.max_anchors=1", "anchors.max_anchors=512",
                                         "anchors.max_anchors=1024", "anchors.max_anchors=100000"};
    size_t first = 0;
    for (size_t i = 0; i < COUNT(counts); i++) {
        struct step_fixture f;
        struct row row;
        open_fixture(&f, &row, 1.0, &counts[i], 1);
        size_t bytes = planned(&f, NULL);
        first = i == 0 ? bytes : first;
        assert_int_equal(bytes, first);
        step_fixture_open(&f);
        assert_int_equal(f.step.arena.bytes, bytes); // what is planned is what is taken
        close_fixture(&f, &row);
    }
}

// Nothing but the target's own matrices and one chunk of logits is as wide as the vocabulary.
static void no_tensor_of_rows_by_vocabulary(void **state)
{
    (void)state;
    enum { WIDE = 997 };
    static const char *const sets[] = {"data.seq_len=512", "memory.chunk_rows=48"};
    struct step_fixture f;
    struct arena arena;
    step_fixture_init(&f, &(struct step_fixture_options){
                              .seed = 82, .vocab = WIDE, .sets = sets, .set_count = COUNT(sets)});
    struct step_setup setup = step_fixture_setup(&f);
    arena_init(&arena);
    step_plan(&arena, &setup);
    int64_t wide = 0;
    for (size_t i = 0; i < arena.count; i++) {
        const struct arena_entry *entry = &arena.entries[i];
        if (entry->shape[0] != WIDE && entry->shape[1] != WIDE)
            continue;
        bool target = strcmp(entry->group, "target") == 0;
        wide += !target;
        assert_true(target || entry->shape[0] == 48);
    }
    assert_int_equal(wide, 1);
    arena_release(&arena);
    step_fixture_release(&f);
}

// ---- bf16

// bf16 keeps 8 bits, an error of 0.2 % in each value. What a layer adds to the error is a few of them,
// and two layers and their way back give each gradient a few per cent; more where few numbers, each a
// sum of both signs, make a tensor (a head's norm has 4).
static void bf16_is_near_fp32(void **state)
{
    (void)state;
    static const char *const computes[] = {"run.compute=fp32", "run.compute=bf16"};
    float *want = NULL;
    double loss = 0.0;
    for (size_t c = 0; c < COUNT(computes); c++) {
        struct step_fixture f;
        struct row row;
        open_fixture(&f, &row, 0.5, &computes[c], 1);
        // Weights that bf16 holds, so that only computing differs.
        for (int64_t i = 0; i < f.params.elements; i++)
            f.state.master[i] = bf16_to_float(bf16_from_float(f.state.master[i]));
        step_fixture_open(&f);
        step_fixture_run(&f, &row, anchors, ANCHORS);
        double got = metrics_loss(&f.step.metrics, NORMALIZE_WEIGHTED);
        if (c == 0) {
            want = copy_gradient(&f);
            loss = got;
        } else {
            double error = relative_error(f.step.grads, want, f.params.elements);
            step_fixture_compare(&f, f.step.grads, want, 0.1, "bf16");
            assert_true(error > 1e-5 && error <= 0.02); // it is bf16, and it is near
            assert_true(fabs(got - loss) <= 0.01 * loss);
        }
        close_fixture(&f, &row);
    }
    free(want);
}

// Norm weights are near 1, where bf16 moves all of them the same way by up to 2^-8: a bf16 step reads
// them in fp32, so that a change below bf16's last bit is seen.
static void norms_are_not_rounded(void **state)
{
    (void)state;
    static const char *const sets[] = {"run.compute=bf16"};
    struct step_fixture f;
    struct row row;
    open_fixture(&f, &row, 0.5, sets, COUNT(sets));
    step_fixture_open(&f);
    for (size_t p = 0; p < f.params.count; p++) {
        const struct param *param = &f.params.items[p];
        if (!param->norm)
            continue;
        float *weight = f.state.master + param->offset, *want = NULL;
        for (int64_t i = 0; i < param->count; i++)
            weight[i] = 1.0f;
        step_load(&f.step, &f.state);
        step_fixture_run(&f, &row, anchors, ANCHORS);
        want = copy_gradient(&f);
        for (int64_t i = 0; i < param->count; i++)
            weight[i] = 1.0f + 0x1p-9f; // 1 in bf16
        step_load(&f.step, &f.state);
        step_fixture_run(&f, &row, anchors, ANCHORS);
        double change = relative_error(f.step.grads, want, f.params.elements);
        if (!(change > 1e-5 && change <= 0.1))
            fail_msg("%s: gradients change by %g", param->name, change);
        free(want);
    }
    close_fixture(&f, &row);
}

// ---- the target's scales

// A target that scales embeddings and logits and stores its norm as w - 1 trains like one whose
// matrices are scaled and whose norm is whole. Powers of two: to the last bit.
static void scales_of_the_target_are_its_matrices(void **state)
{
    (void)state;
    struct step_fixture f;
    struct row row;
    open_fixture(&f, &row, 1.0, NULL, 0);
    int64_t values = f.sizes.vocab * f.sizes.hidden;
    for (int64_t i = 0; i < f.sizes.hidden; i++)
        f.norm[i] = 0.25f * (float)(i % 5); // exact with 1 more
    f.target.embed_scale = 4.0f;
    f.target.logit_scale = 0.5f;
    f.target.norm_weight_offset = 1.0f;
    step_fixture_open(&f);
    step_fixture_run(&f, &row, anchors, ANCHORS);
    float *want = copy_gradient(&f);
    double loss = f.step.metrics.loss;

    f.target.embed_scale = f.target.logit_scale = 1.0f;
    f.target.norm_weight_offset = 0.0f;
    step_fixture_open(&f);
    step_fixture_run(&f, &row, anchors, ANCHORS);
    assert_true(fabs(f.step.metrics.loss - loss) > 0.01 * loss); // they matter
    for (int64_t i = 0; i < values; i++) {
        f.embed[i] *= 4.0f;
        f.head[i] *= 0.5f;
    }
    for (int64_t i = 0; i < f.sizes.hidden; i++)
        f.norm[i] += 1.0f;
    step_fixture_open(&f);
    step_fixture_run(&f, &row, anchors, ANCHORS);
    assert_true(f.step.metrics.loss == loss);
    assert_memory_equal(f.step.grads, want, (size_t)f.params.elements * sizeof(float));
    free(want);
    close_fixture(&f, &row);
}

// ---- learning

// A uniform guess loses log V = 4.16 against a teacher that is sure, and random weights more than that.
// What has learned 3 blocks by heart loses next to nothing: 50 steps must bring a tenth of the guess.
static void check_overfit(const char *const *sets, size_t set_count)
{
    static const int32_t few[] = {10, 40, 100};
    struct step_fixture f;
    struct step_outcome outcome;
    double first = 0.0, last = 0.0;
    struct row row;
    step_fixture_init(
        &f,
        &(struct step_fixture_options){
            .seed = 83, .hidden = 32, .weight_scale = 0.5, .sets = sets, .set_count = set_count});
    step_fixture_row(&f, &row, (int32_t[]){120}, 1, 5);
    step_fixture_open(&f);
    for (int64_t s = 1; s <= 50; s++) {
        step_fixture_run(&f, &row, few, COUNT(few));
        step_apply(&f.step, 0.02, s, &outcome);
        assert_true(outcome.applied);
        last = metrics_loss(&f.step.metrics, NORMALIZE_WEIGHTED);
        first = s == 1 ? last : first;
    }
    if (!(first > log(64.0) && last <= 0.1 * log(64.0)))
        fail_msg("the loss went from %g to %g", first, last);
    row_close(&row, NULL);
    step_fixture_release(&f);
}

static void one_batch_can_be_learned(void **state)
{
    (void)state;
    static const char *const fp32[] = {"data.seq_len=128", "drafter.num_attention_heads=4",
                                       "drafter.head_dim=8", "drafter.intermediate_size=64"};
    static const char *const half[] = {
        "data.seq_len=128",         "drafter.num_attention_heads=4",
        "drafter.head_dim=8",       "drafter.intermediate_size=64",
        "run.compute=bf16",         "loss.kl=0",
        "loss.ce_teacher=1.0",      "drafter.layer_types=sliding_attention,full_attention",
        "drafter.sliding_window=32"};
    check_overfit(fp32, COUNT(fp32));
    check_overfit(half, COUNT(half));
}

// ---- scoring

enum { MOST_TOKENS = 200 };

// What the walk over a row is to find.
struct visits {
    const struct row *row;
    int32_t accepted[MOST_TOKENS]; // of the block at each position; -1: no anchor
    double blocks, tokens;
};

// Leading slots that agree, by the slots that an observer saw.
static void expect_accepted(const struct step_fixture *f, const int32_t *all, int64_t count,
                            struct visits *visits)
{
    for (int64_t t = 0; t < MOST_TOKENS; t++)
        visits->accepted[t] = -1;
    for (int64_t b = 0; b < count; b++)
        visits->accepted[all[b]] = 0;
    for (int64_t i = 0; i < f->seen_count; i++) {
        const struct seen_slot *slot = &f->seen[i];
        int32_t *accepted = &visits->accepted[all[slot->block]];
        *accepted += *accepted == slot->slot - 1 && slot->student_argmax == slot->teacher_argmax;
    }
}

static void check_visit(void *context, uint64_t doc_id, int32_t position, int32_t accepted)
{
    struct visits *visits = context;
    int64_t document = (int64_t)(doc_id - visits->row->doc_ids[0]);
    int64_t t = visits->row->doc_offsets[document] + position;
    assert_int_equal(accepted, visits->accepted[t]);
    visits->blocks += 1.0;
    visits->tokens += (double)accepted + 1.0;
}

// Makes the student right at some places: there the teacher says what the student says.
static void let_teacher_agree(struct step_fixture *f, struct row *row, const int32_t *all,
                              int64_t count)
{
    step_fixture_run(f, row, all, count);
    for (int64_t i = 0; i < f->seen_count; i++) {
        const struct seen_slot *slot = &f->seen[i];
        bf16 *last = row->hidden + (slot->teacher_row * row->planes + f->last_plane) * 8;
        if (slot->block % 3 != 0)
            for (int64_t h = 0; h < 8; h++)
                last[h] = bf16_from_float(f->head[slot->student_argmax * 8 + h]);
    }
}

// Scoring sees every valid anchor, says of each what training says there, and leaves the step alone.
static void scoring_agrees_with_training(void **state)
{
    (void)state;
    struct step_fixture f;
    struct row row;
    struct metrics metrics = {0};
    struct walk walk = {0};
    struct visits visits = {.row = &row};
    int32_t all[MOST_TOKENS];
    open_fixture(&f, &row, 1.0, NULL, 0);
    cut(&f, 6 * BLOCK, 64, "layer");
    int64_t count = anchors_all(&row, &f.step.layout, all);
    let_teacher_agree(&f, &row, all, count);
    step_fixture_run(&f, &row, all, count);
    expect_accepted(&f, all, count, &visits);
    float *gradient = copy_gradient(&f);
    struct metrics trained = f.step.metrics;
    assert_int_equal(step_evaluate(&f.step, &row, &metrics, &walk, check_visit, &visits), 0);
    assert_true(metrics.loss == trained.loss && metrics.slots == trained.slots);
    assert_true(metrics.accepted == trained.accepted && metrics.blocks == trained.blocks);
    assert_true(metrics.overlap == trained.overlap && metrics.covered == trained.covered);
    assert_true(metrics.valid_anchors == (double)count);
    assert_true(visits.blocks > 10.0 && visits.blocks == walk.blocks);
    assert_true(visits.tokens > visits.blocks && visits.tokens == walk.tokens);
    assert_memory_equal(f.step.grads, gradient, (size_t)f.params.elements * sizeof(float));
    assert_true(f.step.metrics.loss == trained.loss && f.step.metrics.rows == trained.rows);
    free(gradient);
    close_fixture(&f, &row);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cuts_agree_to_rounding),
        cmocka_unit_test(recomputation_is_bitwise),
        cmocka_unit_test(runs_repeat_bitwise),
        cmocka_unit_test(rows_of_a_step_add_up),
        cmocka_unit_test(a_step_stops_between_groups),
        cmocka_unit_test(only_rows_that_count_meet_the_head),
        cmocka_unit_test(memory_does_not_depend_on_anchors),
        cmocka_unit_test(no_tensor_of_rows_by_vocabulary),
        cmocka_unit_test(bf16_is_near_fp32),
        cmocka_unit_test(norms_are_not_rounded),
        cmocka_unit_test(scales_of_the_target_are_its_matrices),
        cmocka_unit_test(one_batch_can_be_learned),
        cmocka_unit_test(scoring_agrees_with_training),
    };
    return cmocka_run_group_tests_name("step", tests, NULL, NULL);
}
