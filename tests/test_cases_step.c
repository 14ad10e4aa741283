// Cases of whole steps on tiny inputs whose right answer is known: what a block may see (case C1), what
// a slot is compared with (C2), documents that share a row (C3), norms that move (C5), mask token (C10),
// non-finite gradients (C12).
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/bf16.h"
#include "base/rng.h"
#include "data/safetensors.h"
#include "drafter/dflash_internal.h"
#include "tests/support/config_files.h"
#include "tests/support/step_fixture.h"
#include "trainer/checkpoint.h"

#define COUNT(list) (sizeof(list) / sizeof(*(list)))
#define FIXTURE(f, seed_value, ...)                                                                \
    const char *const fixture_sets[] = {__VA_ARGS__};                                              \
    struct step_fixture f;                                                                         \
    step_fixture_init(&f, &(struct step_fixture_options){.seed = (seed_value),                     \
                                                         .sets = fixture_sets,                     \
                                                         .set_count = COUNT(fixture_sets)})

// Layouts that every rule about what a block sees must hold for.
static const char *const layouts[][3] = {
    {"drafter.predict_from_anchor=false", "drafter.layers=2", "drafter.num_key_value_heads=1"},
    {"drafter.layer_types=sliding_attention,full_attention", "drafter.sliding_window=5",
     "drafter.predict_from_anchor=true"},
    {"drafter.layer_types=full_attention,sliding_attention", "drafter.sliding_window=9",
     "drafter.sliding_window_non_causal=true"},
    {"drafter.layer_types=sliding_attention,sliding_attention", "drafter.sliding_window=6",
     "drafter.window_origin=anchor"},
};

static float *copy_floats(const float *from, int64_t count)
{
    float *copy = memory_alloc((size_t)count, sizeof(*copy));
    memcpy(copy, from, (size_t)count * sizeof(*copy));
    return copy;
}

// Adds 1 to the context features of positions [begin, end); the last hidden state stays.
static void shift_features(struct row *row, int64_t begin, int64_t end)
{
    for (int64_t t = begin; t < end; t++)
        for (int64_t i = 0; i < (row->planes - 1) * row->hidden_size; i++) {
            bf16 *value = row->hidden + t * row->planes * row->hidden_size + i;
            *value = bf16_from_float(bf16_to_float(*value) + 1.0f);
        }
}

static void copy_features(struct row *to, const struct row *from)
{
    memcpy(to->hidden, from->hidden,
           (size_t)(from->tokens * from->planes * from->hidden_size) * sizeof(bf16));
}

// ---- no leak: 24 tokens, anchors 4 and 6

// The hidden states of blocks 4 and 6 with the features of position t shifted (-1: none).
static void hidden_of(struct step_fixture *f, struct row *row, const struct row *clean, int64_t t,
                      float *out)
{
    static const int32_t anchors[] = {4, 6};
    copy_features(row, clean);
    if (t >= 0)
        shift_features(row, t, t + 1);
    const float *hidden = step_fixture_hidden(f, row, anchors, 2);
    memcpy(out, hidden, (size_t)(2 * f->sizes.block_size * f->sizes.hidden) * sizeof(*out));
}

static void a_block_sees_what_is_before_its_anchor(void **state)
{
    (void)state;
    for (size_t layout = 0; layout < COUNT(layouts); layout++) {
        FIXTURE(f, 11, layouts[layout][0], layouts[layout][1], layouts[layout][2]);
        struct row row, clean;
        step_fixture_open(&f);
        step_fixture_row(&f, &clean, (int32_t[]){24}, 1, 3);
        step_fixture_row(&f, &row, (int32_t[]){24}, 1, 3);
        size_t block = (size_t)(f.sizes.block_size * f.sizes.hidden);
        float *before = memory_alloc(2 * block, sizeof(float));
        float *after = memory_alloc(2 * block, sizeof(float));
        hidden_of(&f, &row, &clean, -1, before);
        for (int64_t t = 3; t < 24; t++) {
            hidden_of(&f, &row, &clean, t, after);
            bool same4 = memcmp(before, after, block * sizeof(float)) == 0;
            bool same6 = memcmp(before + block, after + block, block * sizeof(float)) == 0;
            if (same4 != (t >= 4) || same6 != (t >= 6))
                fail_msg("layout %zu, features at %lld: block 4 %d, block 6 %d", layout,
                         (long long)t, same4, same6);
        }
        const float *alone = step_fixture_hidden(&f, &clean, (int32_t[]){4}, 1);
        assert_memory_equal(alone, before, block * sizeof(float));
        free(before);
        free(after);
        row_close(&row, NULL);
        row_close(&clean, NULL);
        step_fixture_release(&f);
    }
}

// ---- no leak: 512 random anchors in 600 tokens

enum { LONG_ROW = 600, MANY_ANCHORS = 512 };

// Every position can be an anchor but each document's last; a random 512 of those.
static void draw_many(const struct row *row, int32_t *anchors)
{
    struct rng_key key = rng_key_make(5, 0, 0, RNG_TEST);
    int64_t left = MANY_ANCHORS, candidates = row->tokens - row->documents, count = 0;
    for (int32_t t = 0; t < row->tokens; t++) {
        if (t + 1 == row->doc_offsets[row->doc_of[t] + 1])
            continue;
        if ((int64_t)(rng_u64(key, (uint64_t)t) % (uint64_t)candidates) < left) {
            anchors[count++] = t;
            left--;
        }
        candidates--;
    }
    assert_int_equal(count, MANY_ANCHORS);
}

static void set_group(struct step_fixture *f, int64_t blocks)
{
    f->execution.group_rows = blocks * f->sizes.block_size;
    step_fixture_open(f);
}

static struct seen_slot *keep_seen(const struct step_fixture *f)
{
    struct seen_slot *kept = memory_alloc((size_t)f->seen_count, sizeof(*kept));
    memcpy(kept, f->seen, (size_t)f->seen_count * sizeof(*kept));
    return kept;
}

// Blocks whose context the shifted positions [t, end of row) are not in are bitwise what they were;
// blocks of t's document that see t differ.
static void check_shifted(const struct step_fixture *f, const struct seen_slot *before,
                          const struct row *row, const int32_t *anchors, int64_t t)
{
    bool differs[MANY_ANCHORS] = {false};
    for (int64_t i = 0; i < f->seen_count; i++)
        differs[f->seen[i].block] |=
            f->seen[i].student_lse != before[i].student_lse || f->seen[i].loss != before[i].loss;
    for (int64_t b = 0; b < MANY_ANCHORS; b++) {
        // The first position that is both shifted and in the block's document.
        int64_t start = row->doc_offsets[row->doc_of[anchors[b]]];
        bool sees = anchors[b] > (t > start ? t : start);
        if (differs[b] != sees)
            fail_msg("features from %lld on: block at %d %s", (long long)t, anchors[b],
                     differs[b] ? "changed" : "did not change");
    }
}

static void groups_of_any_size_do_not_leak(void **state)
{
    (void)state;
    static const int64_t blocks[] = {1, 7, 64, MANY_ANCHORS}, from[] = {1, 57, 250, 411, 598};
    FIXTURE(f, 12, "data.seq_len=600", "drafter.sliding_window=300",
            "drafter.layer_types=sliding_attention,full_attention");
    struct row row, clean;
    int32_t anchors[MANY_ANCHORS];
    step_fixture_row(&f, &clean, (int32_t[]){250, 161, 189}, 3, 4);
    step_fixture_row(&f, &row, (int32_t[]){250, 161, 189}, 3, 4);
    draw_many(&row, anchors);
    for (size_t g = 0; g < COUNT(blocks); g++) {
        set_group(&f, blocks[g]);
        step_fixture_run(&f, &clean, anchors, MANY_ANCHORS);
        struct seen_slot *before = keep_seen(&f);
        for (size_t i = 0; i < COUNT(from); i++) {
            copy_features(&row, &clean);
            shift_features(&row, from[i], LONG_ROW);
            step_fixture_run(&f, &row, anchors, MANY_ANCHORS);
            check_shifted(&f, before, &row, anchors, from[i]);
        }
        free(before);
    }
    row_close(&row, NULL);
    row_close(&clean, NULL);
    step_fixture_release(&f);
}

// Every value of rows [begin, end) is exactly zero.
static bool all_zero(const float *values, int64_t begin, int64_t end, int64_t width)
{
    for (int64_t i = begin * width; i < end * width; i++)
        if (!(values[i] == 0.0f))
            return false;
    return true;
}

// Gradients by context keys, values and fused features outside [first, anchor) are exactly zero, and
// inside they are not. Gradients by the features themselves are those by fused features times fc.
static void check_context_gradients(const struct step_fixture *f, const struct row *row,
                                    int64_t first, int64_t anchor)
{
    const struct dflash *d = &f->step.drafter.dflash;
    int64_t t = row->tokens, kv = f->sizes.kv_heads * f->sizes.head_dim;
    for (int64_t l = 0; l <= f->sizes.layers; l++) {
        const float *gradient[2] = {d->buffers->dcontext_rows, d->buffers->dcontext};
        int64_t width = f->sizes.hidden;
        if (l < f->sizes.layers) {
            gradient[0] = d->layers[l].dcontext_k;
            gradient[1] = d->layers[l].dcontext_v;
            width = kv;
        }
        for (int i = 0; i < 2; i++) {
            bool outside =
                all_zero(gradient[i], 0, first, width) && all_zero(gradient[i], anchor, t, width);
            bool inside = all_zero(gradient[i], first, anchor, width);
            if (!outside || inside != (anchor == first))
                fail_msg("anchor %lld, layer %lld, gradient %d: %s", (long long)anchor,
                         (long long)l, i, outside ? "nothing before it" : "leaks");
        }
    }
}

static void gradients_of_512_anchors_stay_before_them(void **state)
{
    (void)state;
    static const int64_t blocks[] = {3, 100, MANY_ANCHORS};
    FIXTURE(f, 13, "data.seq_len=600", "drafter.sliding_window=40",
            "drafter.layer_types=full_attention,sliding_attention");
    struct row row;
    int32_t anchors[MANY_ANCHORS];
    step_fixture_row(&f, &row, (int32_t[]){250, 161, 189}, 3, 4);
    draw_many(&row, anchors);
    set_group(&f, 1);
    int64_t n = f.params.elements;
    double *sum = memory_alloc((size_t)n, sizeof(*sum));
    for (int64_t b = 0; b < MANY_ANCHORS; b++) {
        int64_t first = row.doc_offsets[row.doc_of[anchors[b]]];
        step_fixture_run(&f, &row, &anchors[b], 1);
        check_context_gradients(&f, &row, first, anchors[b]);
        for (int64_t i = 0; i < n; i++)
            sum[i] += (double)f.step.grads[i];
    }
    float *alone = memory_alloc((size_t)n, sizeof(*alone));
    for (int64_t i = 0; i < n; i++)
        alone[i] = (float)sum[i];
    for (size_t g = 0; g < COUNT(blocks); g++) {
        set_group(&f, blocks[g]);
        step_fixture_run(&f, &row, anchors, MANY_ANCHORS);
        assert_true(relative_error(f.step.grads, alone, n) <= 1e-6);
        step_fixture_compare(&f, f.step.grads, alone, 1e-5, "sum of single blocks");
    }
    free(alone);
    free(sum);
    row_close(&row, NULL);
    step_fixture_release(&f);
}

// ---- alignment

enum { ALIGN_TOKENS = 16, ALIGN_ANCHOR = 5, ALIGN_BLOCK = 4 };

// Ids are positions; the teacher of position i puts all its mass on i + 1.
static void align_open(struct step_fixture *f, struct row *row, const char *from_anchor)
{
    const char *const sets[] = {"drafter.block_size=4", "loss.slot_mask=each", from_anchor};
    step_fixture_init(f, &(struct step_fixture_options){.seed = 21,
                                                        .last_hidden = LAST_HIDDEN_POST_NORM,
                                                        .sets = sets,
                                                        .set_count = COUNT(sets)});
    int64_t h = f->sizes.hidden;
    for (int64_t v = 0; v < f->sizes.vocab; v++) {
        double norm = 0.0;
        for (int64_t i = 0; i < h; i++)
            norm += (double)f->head[v * h + i] * (double)f->head[v * h + i];
        for (int64_t i = 0; i < h; i++)
            f->head[v * h + i] = (float)((double)f->head[v * h + i] / sqrt(norm));
    }
    step_fixture_row(f, row, (int32_t[]){ALIGN_TOKENS}, 1, 6);
    for (int32_t t = 0; t < ALIGN_TOKENS; t++) {
        row->input_ids[t] = t;
        bf16 *last = row->hidden + (t * row->planes + f->last_plane) * h;
        for (int64_t i = 0; i < h; i++)
            last[i] = bf16_from_float(1000.0f * f->head[(t + 1) * h + i]);
    }
    step_fixture_open(f);
}

// Puts the teacher's hidden state, `shift` positions later, in every slot's place and runs the loss.
// Returns the largest loss; *gradient: the largest value of the gradient.
static double loss_of_teacher(struct step_fixture *f, const struct row *row, int32_t shift,
                              double *gradient)
{
    struct step *step = &f->step;
    int64_t h = f->sizes.hidden, n = ALIGN_BLOCK * h;
    float hidden[ALIGN_BLOCK * 8] = {0};
    int64_t count = slots_make(row, &step->layout, (int32_t[]){ALIGN_ANCHOR}, 1, step->slots);
    for (int64_t s = 0; s < count; s++) {
        int64_t t = step->slots[s].teacher_row + shift;
        for (int64_t i = 0; i < h; i++)
            hidden[step->slots[s].slot * h + i] =
                bf16_to_float(row->hidden[(t * row->planes + f->last_plane) * h + i]);
    }
    struct loss_group group = {.rows = ALIGN_BLOCK,
                               .hidden = hidden,
                               .last = row->hidden + row->features.last,
                               .last_stride = row->features.stride,
                               .tokens = row->tokens,
                               .slots = step->slots,
                               .slot_count = count,
                               .dhidden = dflash_group_gradient(&step->drafter.dflash)};
    loss_group_run(&step->loss, step->setup.backend, step->stream, &group, &step->results);
    double most = 0.0;
    for (int64_t s = 0; s < count; s++)
        most = fmax(most, (double)step->results.loss[s]);
    *gradient = 0.0;
    for (int64_t i = 0; i < n; i++)
        *gradient = fmax(*gradient, fabs((double)((float *)group.dhidden)[i]));
    return most;
}

static void check_alignment(bool from_anchor)
{
    struct step_fixture f;
    struct row row;
    double gradient;
    int32_t first = from_anchor ? 0 : 1;
    align_open(&f, &row,
               from_anchor ? "drafter.predict_from_anchor=true"
                           : "drafter.predict_from_anchor=false");
    step_fixture_run(&f, &row, (int32_t[]){ALIGN_ANCHOR}, 1);
    assert_int_equal(f.seen_count, ALIGN_BLOCK - first);
    for (int32_t i = 0; i < f.seen_count; i++) {
        const struct seen_slot *slot = &f.seen[i];
        assert_int_equal(slot->slot, first + i);
        assert_int_equal(slot->label, ALIGN_ANCHOR + 1 + i);
        assert_int_equal(slot->teacher_row, ALIGN_ANCHOR + i);
        assert_int_equal(slot->teacher_argmax, slot->label);
        assert_true(slot->weight > 0.0f);
    }
    assert_true(loss_of_teacher(&f, &row, 0, &gradient) < 1e-6);
    assert_true(gradient < 1e-6);
    assert_true(loss_of_teacher(&f, &row, 1, &gradient) > 1.0);
    assert_true(gradient > 0.1);

    for (int32_t t = 0; t < ALIGN_TOKENS; t++)
        row.loss_mask[t] = t == 7;
    step_fixture_run(&f, &row, (int32_t[]){ALIGN_ANCHOR}, 1);
    assert_int_equal(f.seen_count, 1);
    assert_int_equal(f.seen[0].slot, from_anchor ? 1 : 2);
    assert_int_equal(f.seen[0].label, 7);
    row_close(&row, NULL);
    step_fixture_release(&f);
}

static void slots_meet_their_own_teacher(void **state)
{
    (void)state;
    check_alignment(false);
    check_alignment(true);
}

// ---- ends and borders

static void few_candidates_cost_little(void **state)
{
    (void)state;
    FIXTURE(f, 31, "anchors.max_anchors=512");
    struct row row;
    step_fixture_open(&f);
    step_fixture_row(&f, &row, (int32_t[]){40}, 1, 7);
    for (int32_t t = 0; t < 40; t++) // anchors 20..24
        row.loss_mask[t] = t >= 20 && t <= 25;
    step_fixture_begin(&f);
    assert_int_equal(step_row(&f.step, &row), 0);
    assert_true(f.step.metrics.anchors == 5.0 && f.step.metrics.valid_anchors == 5.0);
    // Predicted: 21..25 from 20, 22..25 from 21 and so on; teacher rows 20..24.
    struct head_rows rows = step_fixture_head_rows();
    assert_int_equal(rows.student, 5 + 4 + 3 + 2 + 1);
    assert_int_equal(rows.gradient, rows.student);
    assert_int_equal(rows.teacher, 5);
    assert_int_equal(f.step.drafter.dflash.blocks, 5);
    row_close(&row, NULL);
    step_fixture_release(&f);
}

static void a_document_too_short_for_whole_blocks_adds_nothing(void **state)
{
    (void)state;
    FIXTURE(f, 32, "anchors.tail=whole", "optimizer.weight_decay=0.1");
    struct row row;
    struct step_outcome outcome;
    int64_t n = f.params.elements;
    step_fixture_open(&f);
    step_fixture_row(&f, &row, (int32_t[]){7}, 1, 7);
    step_fixture_begin(&f);
    assert_int_equal(step_row(&f.step, &row), 0);
    assert_int_equal(f.seen_count, 0);
    assert_true(all_zero(f.step.grads, 0, n, 1));
    step_apply(&f.step, 1e-3, 1, &outcome);
    assert_true(outcome.empty && !outcome.applied && !outcome.nonfinite);
    assert_memory_equal(f.step.master, f.state.master, (size_t)n * sizeof(float));
    assert_memory_equal(f.step.m, f.state.m, (size_t)n * sizeof(float));
    row_close(&row, NULL);
    step_fixture_release(&f);
}

// Document d of a packed row as a row of its own.
static void take_document(const struct step_fixture *f, const struct row *packed, int64_t d,
                          struct row *alone)
{
    int64_t first = packed->doc_offsets[d], tokens = packed->doc_offsets[d + 1] - first;
    int64_t values = packed->planes * packed->hidden_size;
    step_fixture_row(f, alone, (int32_t[]){(int32_t)tokens}, 1, 0);
    alone->doc_ids[0] = packed->doc_ids[d];
    memcpy(alone->input_ids, packed->input_ids + first, (size_t)tokens * sizeof(int32_t));
    memcpy(alone->loss_mask, packed->loss_mask + first, (size_t)tokens);
    memcpy(alone->hidden, packed->hidden + first * values,
           (size_t)(tokens * values) * sizeof(bf16));
}

// Three documents in one row, anchors in all of them, against the same documents one after another.
static void check_packing(const char *const *sets, size_t set_count)
{
    static const int32_t lengths[] = {23, 9, 30};
    static const int32_t anchors[] = {0, 5, 17, 21, 24, 30, 32, 33, 45, 46, 60};
    struct step_fixture f;
    struct row packed, alone;
    // Moderate weights: large ones turn the rounding of other sums into more than 1e-6.
    step_fixture_init(&f,
                      &(struct step_fixture_options){
                          .seed = 33, .weight_scale = 0.3, .sets = sets, .set_count = set_count});
    step_fixture_open(&f);
    step_fixture_row(&f, &packed, lengths, COUNT(lengths), 8);
    packed.loss_mask[19] = packed.loss_mask[40] = packed.loss_mask[48] = 0;
    step_fixture_run(&f, &packed, anchors, COUNT(anchors));
    float *gradient = copy_floats(f.step.grads, f.params.elements);
    struct metrics metrics = f.step.metrics;
    assert_true(metrics.slots > 30.0);

    step_fixture_begin(&f);
    for (int64_t d = 0, a = 0; d < (int64_t)COUNT(lengths); d++) {
        int32_t own[COUNT(anchors)];
        int64_t count = 0;
        for (; a < (int64_t)COUNT(anchors) && anchors[a] < packed.doc_offsets[d + 1]; a++)
            own[count++] = anchors[a] - (int32_t)packed.doc_offsets[d];
        take_document(&f, &packed, d, &alone);
        assert_int_equal(step_row_anchors(&f.step, &alone, own, count), 0);
        row_close(&alone, NULL);
    }
    assert_true(f.step.metrics.slots == metrics.slots);
    assert_true(fabs(f.step.metrics.loss - metrics.loss) <= 1e-6 * fabs(metrics.loss));
    assert_true(fabs(f.step.metrics.weight - metrics.weight) <= 1e-6 * metrics.weight);
    assert_true(f.step.metrics.accepted == metrics.accepted);
    step_fixture_compare(&f, f.step.grads, gradient, 1e-6, "packed against alone");
    free(gradient);
    row_close(&packed, NULL);
    step_fixture_release(&f);
}

static void a_packed_row_is_the_sum_of_its_documents(void **state)
{
    (void)state;
    static const char *const more[][3] = {
        {"loss.slot_mask=each", "loss.slot_weight=dpace", "data.noise_std=0.2"},
        {"loss.slot_mask=prefix", "loss.normalize=count", "data.noise_kind=uniform"},
    };
    for (size_t i = 0; i < COUNT(layouts); i++)
        for (size_t j = 0; j < COUNT(more); j++) {
            const char *sets[6];
            memcpy(sets, layouts[i], sizeof(layouts[i]));
            memcpy(sets + 3, more[j], sizeof(more[j]));
            check_packing(sets, 6);
        }
}

// ---- noise

static void noise_is_of_training_and_of_context_only(void **state)
{
    (void)state;
    static const int32_t anchors[] = {2, 9, 20, 33, 40};
    FIXTURE(f, 41, "data.noise_std=0.3");
    struct row row;
    struct metrics noisy = {0}, clean = {0};
    struct walk walk = {0};
    step_fixture_row(&f, &row, (int32_t[]){24, 22}, 2, 9);
    step_fixture_open(&f);
    step_fixture_run(&f, &row, anchors, COUNT(anchors));
    float *gradient = copy_floats(f.step.grads, f.params.elements);
    struct seen_slot *with = keep_seen(&f);
    assert_int_equal(step_evaluate(&f.step, &row, &noisy, &walk, NULL, NULL), 0);

    // What a trace writes down is what was added.
    size_t values = (size_t)(row.tokens * f.sizes.features * f.sizes.hidden);
    float *noise = memory_alloc(values, sizeof(*noise));
    drafter_noise(&f.step.drafter, &row, (uint64_t)f.config.run.seed, noise);
    step_fixture_force_noise(noise);
    step_fixture_run(&f, &row, anchors, COUNT(anchors));
    step_fixture_compare(&f, f.step.grads, gradient, 1e-6, "noise as traced");

    f.config.data.noise_std = 0.0;
    step_fixture_open(&f);
    step_fixture_run(&f, &row, anchors, COUNT(anchors));
    for (int64_t i = 0; i < f.seen_count; i++) {
        assert_true(f.seen[i].teacher_lse == with[i].teacher_lse);
        assert_true(f.seen[i].student_lse != with[i].student_lse || anchors[f.seen[i].block] == 24);
    }
    assert_int_equal(step_evaluate(&f.step, &row, &clean, &walk, NULL, NULL), 0);
    assert_true(clean.slots > 0.0 && noisy.loss == clean.loss);
    assert_true(noisy.overlap == clean.overlap);
    free(noise);
    free(with);
    free(gradient);
    row_close(&row, NULL);
    step_fixture_release(&f);
}

// ---- norms move

// `steps` updates from update `first` on, with a gradient of 1 everywhere.
static void push(struct step_fixture *f, int64_t first, int64_t steps)
{
    struct step_outcome outcome;
    for (int64_t s = first; s < first + steps; s++) {
        step_begin(&f->step);
        for (int64_t i = 0; i < f->params.elements; i++)
            f->step.grads[i] = 1.0f;
        f->step.metrics.weight = 1.0; // the gradient of one slot of weight 1
        step_apply(&f->step, 1e-3, s, &outcome);
        assert_true(outcome.applied);
    }
}

// All weights moved alike: norms by their gradient alone, matrices by decay too.
static void check_moved(const struct step_fixture *f)
{
    for (size_t p = 0; p < f->params.count; p++) {
        const struct param *param = &f->params.items[p];
        double value = (double)f->step.master[param->offset];
        float stored = bf16_to_float(((const bf16 *)f->step.weights)[param->offset]);
        assert_true(stored == bf16_to_float(bf16_from_float((float)value)));
        if (!param->norm)
            assert_true(value < 0.895);
        if (param->norm && (!(fabs(value - 0.9) <= 1e-4) || stored != 0.8984375f))
            fail_msg("%s: %.7f, %.7f in bf16", param->name, value, (double)stored);
    }
}

// Writes a checkpoint after `step` steps; the path is the caller's.
static char *write_checkpoint(struct step_fixture *f, const struct config_folder *folder,
                              int64_t step)
{
    struct error err = {0};
    struct checkpoint_info info = {.config = &f->config,
                                   .execution = &f->execution,
                                   .sizes = &f->sizes,
                                   .target = &f->target,
                                   .target_name = "made up",
                                   .command = "test"};
    char name[32];
    step_save(&f->step, &f->state);
    f->state.counters.step = step;
    if (checkpoint_write(folder->path, &f->state, &info, &err) != 0)
        fail_msg("%s", err.text);
    snprintf(name, sizeof(name), "step-%08lld", (long long)step);
    return config_folder_path(folder, name);
}

static void check_exported_norm(const char *checkpoint)
{
    struct safetensors file;
    struct error err = {0};
    char *path = memory_format("%s/model.safetensors", checkpoint);
    assert_int_equal(safetensors_open(&file, path, &err), 0);
    const struct safetensors_entry *norm = safetensors_find(&file, "norm.weight");
    bf16 value;
    assert_non_null(norm);
    assert_string_equal(norm->dtype, "BF16");
    memcpy(&value, norm->bytes, sizeof(value));
    assert_true(bf16_to_float(value) == 0.8984375f);
    safetensors_close(&file);
    free(path);
}

static void norms_move(void **state)
{
    (void)state;
    FIXTURE(f, 51, "run.compute=bf16", "optimizer.grad_clip=0", "optimizer.weight_decay=0.1");
    struct config_folder folder;
    struct error err = {0};
    int64_t n = f.params.elements;
    float *ones = copy_floats(f.state.master, n);
    config_folder_open(&folder);
    for (int64_t i = 0; i < n; i++)
        ones[i] = 1.0f;
    memcpy(f.state.master, ones, (size_t)n * sizeof(float));
    step_fixture_open(&f);
    push(&f, 1, 100);
    check_moved(&f);
    float *whole = copy_floats(f.step.master, n);
    char *path = write_checkpoint(&f, &folder, 100);
    check_exported_norm(path);
    free(path);

    // The same with everything but a checkpoint forgotten after 50.
    memcpy(f.state.master, ones, (size_t)n * sizeof(float));
    memset(f.state.m, 0, (size_t)n * sizeof(float));
    memset(f.state.v, 0, (size_t)n * sizeof(float));
    step_fixture_open(&f);
    push(&f, 1, 50);
    path = write_checkpoint(&f, &folder, 50);
    model_state_close(&f.state);
    model_state_open(&f.state, &f.params);
    if (checkpoint_read(path, &f.state, NULL, &err) != 0)
        fail_msg("%s", err.text);
    step_fixture_open(&f);
    push(&f, 51, 50);
    for (size_t p = 0; p < f.params.count; p++)
        assert_memory_equal(f.step.master + f.params.items[p].offset,
                            whole + f.params.items[p].offset,
                            (size_t)f.params.items[p].count * sizeof(float));
    free(path);
    free(whole);
    free(ones);
    config_folder_close(&folder);
    step_fixture_release(&f);
}

// ---- mask token

static void mask_slots_read_the_mask_token(void **state)
{
    (void)state;
    static const int32_t anchors[] = {3, 11};
    FIXTURE(f, 61, "drafter.mask_token_id=60");
    struct row row;
    int64_t h = f.sizes.hidden, b = f.sizes.block_size;
    step_fixture_row(&f, &row, (int32_t[]){24}, 1, 10);
    for (int64_t t = 0; t < row.tokens; t++)
        row.input_ids[t] %= 50;
    row.input_ids[3] = 7;
    row.input_ids[11] = 8;
    step_fixture_open(&f);
    float *before = copy_floats(step_fixture_hidden(&f, &row, anchors, 2), 2 * b * h);
    for (int32_t id = 0; id < f.sizes.vocab; id++) {
        float value = f.embed[id * h + 2];
        f.embed[id * h + 2] = value + 0.5f;
        step_fixture_open(&f);
        const float *after = step_fixture_hidden(&f, &row, anchors, 2);
        for (int64_t r = 0; r < 2 * b; r++) {
            bool same = memcmp(after + r * h, before + r * h, (size_t)h * sizeof(float)) == 0;
            // Full attention: slot 0 carries the anchor's token to all of its block.
            bool used = id == 60 || id == (r < b ? 7 : 8);
            if (same == used)
                fail_msg("embedding row %d: block row %lld %s", id, (long long)r,
                         same ? "does not follow" : "follows");
        }
        f.embed[id * h + 2] = value;
    }
    free(before);
    row_close(&row, NULL);
    step_fixture_release(&f);
}

// ---- non-finite

static void check_unchanged(const struct step_fixture *f, const struct step_outcome *outcome)
{
    size_t bytes = (size_t)f->params.elements * sizeof(float);
    assert_true(outcome->nonfinite && !outcome->applied && !outcome->empty);
    assert_memory_equal(f->step.master, f->state.master, bytes);
    assert_memory_equal(f->step.m, f->state.m, bytes);
    assert_memory_equal(f->step.v, f->state.v, bytes);
}

static void a_nonfinite_gradient_changes_nothing(void **state)
{
    (void)state;
    static const float bad[] = {INFINITY, -INFINITY, NAN};
    static const int32_t anchors[] = {3, 11};
    FIXTURE(f, 71, "optimizer.weight_decay=0.1");
    struct row row;
    struct step_outcome outcome;
    step_fixture_row(&f, &row, (int32_t[]){24}, 1, 11);
    step_fixture_open(&f);
    for (size_t p = 0; p < f.params.count; p++) {
        const struct param *param = &f.params.items[p];
        step_fixture_run(&f, &row, anchors, 2);
        f.step.grads[param->offset + param->count - 1] = bad[p % COUNT(bad)];
        step_apply(&f.step, 1e-3, 1, &outcome);
        assert_string_equal(outcome.tensor, param->name);
        check_unchanged(&f, &outcome);
    }
    // The run goes on.
    step_fixture_run(&f, &row, anchors, 2);
    step_apply(&f.step, 1e-3, 1, &outcome);
    assert_true(outcome.applied && !outcome.nonfinite);
    assert_string_equal(outcome.tensor, "");
    assert_memory_not_equal(f.step.master, f.state.master,
                            (size_t)f.params.elements * sizeof(float));
    row_close(&row, NULL);
    step_fixture_release(&f);
}

// Values that overflow on the way: a step that is not finite must not pass for one without slots.
static void overflow_in_the_forward_pass_is_nonfinite(void **state)
{
    (void)state;
    static const char *const weights[] = {"loss.slot_weight=exp", "loss.slot_weight=dpace",
                                          "loss.slot_weight=uniform"};
    static const int32_t anchors[] = {3, 11};
    for (size_t i = 0; i < COUNT(weights); i++) {
        FIXTURE(f, 72, weights[i]);
        struct row row;
        struct step_outcome outcome;
        step_fixture_row(&f, &row, (int32_t[]){24}, 1, 12);
        for (int64_t v = 0; v < row.planes * row.hidden_size; v++)
            row.hidden[v] = bf16_from_float(3e38f);
        step_fixture_open(&f);
        step_fixture_run(&f, &row, anchors, 2);
        step_apply(&f.step, 1e-3, 1, &outcome);
        check_unchanged(&f, &outcome);
        assert_non_null(params_find(&f.params, outcome.tensor));
        row_close(&row, NULL);
        step_fixture_release(&f);
    }
}

// Finite, but its square is not in fp32: an update like any other, clipped.
static void a_large_gradient_is_clipped(void **state)
{
    (void)state;
    FIXTURE(f, 73, "optimizer.grad_clip=1");
    struct step_outcome outcome;
    step_fixture_open(&f);
    for (int64_t i = 0; i < f.params.elements; i++)
        f.step.grads[i] = 1e30f;
    f.step.metrics.weight = 1.0;
    step_apply(&f.step, 1e-3, 1, &outcome);
    assert_true(outcome.applied && outcome.clip_factor > 0.0 && outcome.clip_factor < 1e-29);
    for (int64_t i = 0; i < f.params.elements; i++)
        assert_true(isfinite(f.step.master[i]));
    step_fixture_release(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_block_sees_what_is_before_its_anchor),
        cmocka_unit_test(groups_of_any_size_do_not_leak),
        cmocka_unit_test(gradients_of_512_anchors_stay_before_them),
        cmocka_unit_test(slots_meet_their_own_teacher),
        cmocka_unit_test(few_candidates_cost_little),
        cmocka_unit_test(a_document_too_short_for_whole_blocks_adds_nothing),
        cmocka_unit_test(a_packed_row_is_the_sum_of_its_documents),
        cmocka_unit_test(noise_is_of_training_and_of_context_only),
        cmocka_unit_test(norms_move),
        cmocka_unit_test(mask_slots_read_the_mask_token),
        cmocka_unit_test(a_nonfinite_gradient_changes_nothing),
        cmocka_unit_test(overflow_in_the_forward_pass_is_nonfinite),
        cmocka_unit_test(a_large_gradient_is_clipped),
    };
    return cmocka_run_group_tests_name("cases_step", tests, NULL, NULL);
}
