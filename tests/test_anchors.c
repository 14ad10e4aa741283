// Anchors, slots and context ranges: the right answers of small cases (C2, C3), and every rule against
// its definition written out naively.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "base/rng.h"
#include "data/anchors.h"
#include "tests/support/rows.h"

static struct block_layout layout_of(int64_t block_size, bool from_anchor)
{
    return (struct block_layout){.block_size = block_size,
                                 .predict_from_anchor = from_anchor,
                                 .tail = TAIL_MASK,
                                 .slot_mask = SLOT_MASK_PREFIX,
                                 .slot_weight = SLOT_WEIGHT_EXP,
                                 .slot_decay_gamma = 7.0};
}

static void open_one(struct row *row, int32_t length)
{
    test_row_open(row, &length, 1, 1, 1);
}

// ---- small cases ------------------------------------------------------------------------------------

static void test_alignment(void **state)
{
    (void)state;
    struct row row;
    open_one(&row, 16);
    int32_t anchor = 5;
    struct slot slots[4];
    struct block_layout layout = layout_of(4, false);
    assert_int_equal(slots_make(&row, &layout, &anchor, 1, slots), 3);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(slots[i].slot, i + 1);
        assert_int_equal(slots[i].label, 6 + i);
        assert_int_equal(slots[i].teacher_row, 5 + i);
        assert_true(slots[i].weight == (float)exp(-i / 7.0));
    }
    layout = layout_of(4, true);
    assert_int_equal(slots_make(&row, &layout, &anchor, 1, slots), 4);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(slots[i].slot, i);
        assert_int_equal(slots[i].label, 6 + i);
        assert_int_equal(slots[i].teacher_row, 5 + i);
        assert_true(slots[i].weight == (float)exp(-i / 7.0));
    }
    row_close(&row, NULL);
}

static void test_one_supervised_token(void **state)
{
    (void)state;
    struct row row;
    open_one(&row, 16);
    memset(row.loss_mask, 0, 16);
    row.loss_mask[7] = 1;
    int32_t anchor = 5;
    struct slot slots[4];
    for (int from_anchor = 0; from_anchor < 2; from_anchor++) {
        struct block_layout layout = layout_of(4, from_anchor);
        layout.slot_mask = SLOT_MASK_EACH;
        assert_int_equal(slots_make(&row, &layout, &anchor, 1, slots), 1);
        assert_int_equal(slots[0].slot, from_anchor ? 1 : 2);
        assert_int_equal(slots[0].label, 7);
        assert_int_equal(slots[0].teacher_row, 6);
        layout.slot_mask = SLOT_MASK_PREFIX; // token 6 ends the block before 7
        assert_int_equal(slots_make(&row, &layout, &anchor, 1, slots), 0);
    }
    row_close(&row, NULL);
}

static void test_ends_of_a_document(void **state)
{
    (void)state;
    struct row row;
    open_one(&row, 20);
    int32_t anchors[20];
    struct slot slots[8];
    struct block_layout layout = layout_of(8, false);
    assert_int_equal(anchors_all(&row, &layout, anchors), 19);
    assert_int_equal(anchors[0], 0);
    assert_int_equal(anchors[18], 18);
    assert_int_equal(slots_make(&row, &layout, &anchors[18], 1, slots), 1);
    assert_int_equal(slots[0].label, 19);
    layout.tail = TAIL_WHOLE;
    assert_int_equal(anchors_all(&row, &layout, anchors), 13);
    assert_int_equal(anchors[12], 12);
    layout.predict_from_anchor = true; // one token further
    assert_int_equal(anchors_all(&row, &layout, anchors), 12);
    row_close(&row, NULL);

    open_one(&row, 7);
    layout.predict_from_anchor = false;
    assert_int_equal(anchors_all(&row, &layout, anchors), 0);
    struct anchors_config config = {.max_anchors = 512, .per = ANCHORS_PER_ROW};
    struct anchor_scratch scratch;
    anchor_scratch_open(&scratch, 7);
    int64_t valid = -1;
    assert_int_equal(anchors_draw(&row, &layout, &config, 1, &scratch, anchors, &valid), 0);
    assert_int_equal(valid, 0);
    anchor_scratch_close(&scratch);
    row_close(&row, NULL);
}

static void test_fewer_candidates_than_wanted(void **state)
{
    (void)state;
    struct row row;
    open_one(&row, 6);
    struct block_layout layout = layout_of(8, false);
    struct anchors_config config = {.max_anchors = 512, .per = ANCHORS_PER_ROW};
    struct anchor_scratch scratch;
    anchor_scratch_open(&scratch, 6);
    int32_t anchors[6];
    int64_t valid;
    assert_int_equal(anchors_draw(&row, &layout, &config, 1, &scratch, anchors, &valid), 5);
    assert_int_equal(valid, 5);
    for (int i = 0; i < 5; i++)
        assert_int_equal(anchors[i], i);
    anchor_scratch_close(&scratch);
    row_close(&row, NULL);
}

// A gamma so small that late slots have no weight at all must not yield slots that weigh 0.
static void test_no_slot_of_weight_zero(void **state)
{
    (void)state;
    struct row row;
    open_one(&row, 20);
    struct block_layout layout = layout_of(16, false);
    layout.slot_decay_gamma = 0.01;
    int32_t anchor = 0;
    struct slot slots[16];
    int64_t count = slots_make(&row, &layout, &anchor, 1, slots);
    assert_in_range(count, 1, 14);
    for (int64_t i = 0; i < count; i++)
        assert_true(slots[i].weight > 0.0f);
    row_close(&row, NULL);
}

// ---- against the definitions ------------------------------------------------------------------------

static uint32_t random_below(struct rng_key key, uint64_t *counter, uint32_t bound)
{
    return (uint32_t)(rng_u64(key, (*counter)++) % bound);
}

struct random_case {
    struct row row;
    int32_t lengths[6];
    int64_t documents;
};

static void random_case_open(struct random_case *c, struct rng_key key, uint64_t *counter)
{
    *c = (struct random_case){.documents = 1 + random_below(key, counter, 6)};
    for (int64_t d = 0; d < c->documents; d++)
        c->lengths[d] = (int32_t)(1 + random_below(key, counter, 30));
    test_row_open(&c->row, c->lengths, c->documents, 1, 1);
    uint32_t share = random_below(key, counter, 5); // of unsupervised tokens, in quarters
    for (int64_t t = 0; t < c->row.tokens; t++)
        c->row.loss_mask[t] = random_below(key, counter, 4) >= share;
}

// The document of position t, by walking over the lengths; -1 beyond the row.
static int64_t naive_document(const struct random_case *c, int64_t t)
{
    for (int64_t d = 0; d < c->documents; d++) {
        if (t < c->lengths[d])
            return d;
        t -= c->lengths[d];
    }
    return -1;
}

static bool naive_supervised(const struct random_case *c, int64_t anchor, int64_t t)
{
    return naive_document(c, t) == naive_document(c, anchor) && c->row.loss_mask[t] == 1;
}

static bool naive_valid(const struct random_case *c, const struct block_layout *layout, int64_t a)
{
    if (!naive_supervised(c, a, a) || !naive_supervised(c, a, a + 1))
        return false;
    if (layout->tail == TAIL_MASK)
        return true;
    for (int64_t k = 0; k < layout->block_size; k++) {
        if (naive_document(c, a + k + (layout->predict_from_anchor ? 1 : 0)) !=
            naive_document(c, a))
            return false;
    }
    return true;
}

// weight = in_document * mask * w(k), and with prefix nothing after the first zero of the mask.
static double naive_weight(const struct random_case *c, const struct block_layout *layout,
                           int64_t a, int64_t k)
{
    int64_t first = layout->predict_from_anchor ? 0 : 1, shift = layout->predict_from_anchor;
    if (k < first || !naive_supervised(c, a, a + k + shift))
        return 0.0;
    for (int64_t j = first; layout->slot_mask == SLOT_MASK_PREFIX && j < k; j++) {
        if (!naive_supervised(c, a, a + j + shift))
            return 0.0;
    }
    return layout->slot_weight == SLOT_WEIGHT_EXP
               ? exp(-(double)(k - first) / layout->slot_decay_gamma)
               : 1.0;
}

static void check_slots(const struct random_case *c, const struct block_layout *layout,
                        const int32_t *anchors, int64_t count)
{
    struct slot *slots = memory_alloc((size_t)(count * layout->block_size), sizeof(*slots));
    int64_t made = slots_make(&c->row, layout, anchors, count, slots), next = 0;
    for (int64_t b = 0; b < count; b++) {
        for (int64_t k = 0; k < layout->block_size; k++) {
            double weight = naive_weight(c, layout, anchors[b], k);
            if (weight == 0.0)
                continue;
            assert_true(next < made);
            const struct slot *slot = &slots[next++];
            int64_t predicted = anchors[b] + k + layout->predict_from_anchor;
            assert_int_equal(slot->block, b);
            assert_int_equal(slot->slot, k);
            assert_int_equal(slot->label, predicted); // ids are positions
            assert_int_equal(slot->teacher_row, predicted - 1);
            assert_true(fabs((double)slot->weight - weight) <= 1e-7);
        }
    }
    assert_int_equal(next, made);
    free(slots);
}

static void check_ranges(const struct random_case *c, int32_t anchor, int64_t k)
{
    for (int64_t window = 0; window < 12; window += 3) {
        for (int origin = WINDOW_FROM_QUERY; origin <= WINDOW_FROM_ANCHOR; origin++) {
            int32_t begin, end;
            context_range(&c->row, anchor, k, window, origin, &begin, &end);
            assert_true(begin <= end);
            for (int64_t kv = 0; kv < c->row.tokens; kv++) {
                bool sees = kv < anchor && naive_document(c, kv) == naive_document(c, anchor);
                if (window > 0 && origin == WINDOW_FROM_QUERY)
                    sees = sees && kv > anchor + k - window;
                if (window > 0 && origin == WINDOW_FROM_ANCHOR)
                    sees = sees && kv >= anchor - window;
                assert_int_equal(sees, kv >= begin && kv < end);
            }
        }
    }
}

static void test_definitions(void **state)
{
    (void)state;
    struct rng_key key = rng_key_make(7, 0, 0, RNG_TEST);
    uint64_t counter = 0;
    for (int trial = 0; trial < 400; trial++) {
        struct random_case c;
        random_case_open(&c, key, &counter);
        struct block_layout layout = layout_of(2 + random_below(key, &counter, 9), trial & 1);
        layout.tail = trial & 2 ? TAIL_WHOLE : TAIL_MASK;
        layout.slot_mask = trial & 4 ? SLOT_MASK_EACH : SLOT_MASK_PREFIX;
        layout.slot_weight = trial % 3;
        int32_t *all = memory_alloc((size_t)c.row.tokens, sizeof(*all));
        int64_t count = anchors_all(&c.row, &layout, all), next = 0;
        for (int32_t a = 0; a < c.row.tokens; a++) {
            bool valid = naive_valid(&c, &layout, a);
            assert_int_equal(anchor_is_valid(&c.row, &layout, a), valid);
            if (valid)
                assert_int_equal(all[next++], a);
            check_ranges(&c, a, random_below(key, &counter, 10));
        }
        assert_int_equal(next, count);
        check_slots(&c, &layout, all, count);
        free(all);
        row_close(&c.row, NULL);
    }
}

// ---- EAGLE-3 ----------------------------------------------------------------------------------------

static struct block_layout ttt_layout(int64_t steps, int mask_index, double base)
{
    return (struct block_layout){.block_size = steps,
                                 .predict_from_anchor = true,
                                 .tail = TAIL_WHOLE, // of DFlash: not read
                                 .eagle3 = true,
                                 .mask_index = mask_index,
                                 .ttt_decay_base = base};
}

// Positions        0123456789, supervised 4 5 6 8 9, the document ends with 9. Position t = 3 has the
// anchor 4: ttt_step i is matched with teacher row 4+i and label x[5+i].
static void test_ttt_masks(void **state)
{
    (void)state;
    struct row row;
    open_one(&row, 10);
    static const uint8_t mask[] = {0, 0, 0, 0, 1, 1, 1, 0, 1, 1};
    memcpy(row.loss_mask, mask, sizeof(mask));
    static const struct {
        int mask_index, anchor;
        int slots[6], count;
    } cases[] = {
        {MASK_INDEX_SERVED, 4, {0, 1}, 2},         // labels 5, 6; 7 is not supervised
        {MASK_INDEX_SERVED, 3, {0}, 0},            // x3 itself was not generated
        {MASK_INDEX_SERVED, 6, {0}, 0},            // its first label is 7
        {MASK_INDEX_SERVED, 8, {0}, 1},            // label 9; the next one is beyond the document
        {MASK_INDEX_SERVED, 9, {0}, 0},            // no label at all
        {MASK_INDEX_LABEL, 4, {0, 1, 3, 4}, 4},    // labels 5 6 8 9
        {MASK_INDEX_LABEL, 2, {1, 2, 3, 5}, 4},    // labels 4 5 6 8
        {MASK_INDEX_LABEL, 9, {0}, 0},             // its label is beyond
        {MASK_INDEX_INPUT, 4, {0, 1, 2, 4, 5}, 5}, // inputs 4 5 6 8 9; the last one has no label
        {MASK_INDEX_INPUT, 9, {0}, 1},             // teacher row 9, no label
        {MASK_INDEX_FEATURE, 4, {1, 2, 3, 5}, 4},  // features 4 5 6 8, teacher rows 5 6 7 9
        {MASK_INDEX_FEATURE, 9, {0}, 1},           // feature 8, teacher row 9
        {MASK_INDEX_FEATURE, 1, {4, 5}, 2},        // features 4 5
    };
    for (size_t c = 0; c < sizeof(cases) / sizeof(*cases); c++) {
        struct block_layout layout = ttt_layout(6, cases[c].mask_index, 0.5);
        struct slot slots[6];
        int32_t anchor = cases[c].anchor;
        assert_int_equal(anchor_is_valid(&row, &layout, anchor), cases[c].count > 0);
        assert_int_equal(slots_make(&row, &layout, &anchor, 1, slots), cases[c].count);
        for (int s = 0; s < cases[c].count; s++) {
            int i = cases[c].slots[s];
            assert_int_equal(slots[s].slot, i);
            assert_int_equal(slots[s].teacher_row, anchor + i);
            assert_int_equal(slots[s].label, anchor + 1 + i < 10 ? anchor + 1 + i : -1);
            assert_true(slots[s].weight == (float)pow(0.5, i));
        }
    }
    row_close(&row, NULL);
}

// A document's first token can not be an anchor: no feature precedes it.
static void test_ttt_needs_a_token_before(void **state)
{
    (void)state;
    struct row row;
    static const int32_t lengths[] = {4, 1, 4};
    test_row_open(&row, lengths, 3, 1, 1);
    struct block_layout layout = ttt_layout(3, MASK_INDEX_SERVED, 0.8);
    int32_t anchors[9];
    static const int32_t wanted[] = {1, 2, 6, 7};
    assert_int_equal(anchors_all(&row, &layout, anchors), 4);
    assert_memory_equal(anchors, wanted, sizeof(wanted));
    row_close(&row, NULL);
}

static void test_ttt_weights(void **state)
{
    (void)state;
    struct row row;
    open_one(&row, 12);
    int32_t anchor = 3;
    struct slot slots[7];
    struct block_layout layout = ttt_layout(7, MASK_INDEX_SERVED, 1.0);
    assert_int_equal(slots_make(&row, &layout, &anchor, 1, slots), 7);
    for (int i = 0; i < 7; i++)
        assert_true(slots[i].weight == 1.0f);
    layout.ttt_decay_base = 0.8;
    assert_int_equal(slots_make(&row, &layout, &anchor, 1, slots), 7);
    for (int i = 0; i < 7; i++)
        assert_true(slots[i].weight == (float)pow(0.8, i));
    layout.ttt_decay_base = 0.0; // only the first step counts
    assert_int_equal(slots_make(&row, &layout, &anchor, 1, slots), 1);
    layout.ttt_decay_base = 1e-10; // below what fp32 holds from the sixth step on
    assert_int_equal(slots_make(&row, &layout, &anchor, 1, slots), 5);
    layout.least_weight = 0x1p-100f;
    assert_int_equal(slots_make(&row, &layout, &anchor, 1, slots), 7);
    assert_true(slots[3].weight == (float)pow(1e-10, 3) && slots[4].weight == 0x1p-100f);
    row_close(&row, NULL);
}

// By the definition of position t: mask index, label and teacher row.
static bool naive_ttt(const struct random_case *c, const struct block_layout *layout, int64_t t,
                      int64_t i)
{
    if (t < 0 || naive_document(c, t + 1 + i) != naive_document(c, t))
        return false;
    if (layout->mask_index == MASK_INDEX_FEATURE)
        return naive_supervised(c, t, t + i);
    if (layout->mask_index == MASK_INDEX_INPUT)
        return naive_supervised(c, t, t + 1 + i);
    if (layout->mask_index == MASK_INDEX_LABEL)
        return naive_supervised(c, t, t + 2 + i);
    bool all = true;
    for (int64_t j = t + 1; j <= t + 2 + i; j++)
        all = all && naive_supervised(c, t, j);
    return all;
}

static void check_ttt_ranges(const struct random_case *c, int32_t t, int64_t i)
{
    for (int64_t window = 0; window < 12; window += 3) {
        int32_t begin, end;
        context_range_ttt(&c->row, t, i, window, &begin, &end);
        for (int64_t kv = 0; kv < c->row.tokens; kv++) {
            bool sees = kv <= t && naive_document(c, kv) == naive_document(c, t) &&
                        (window == 0 || kv > t + i - window);
            assert_int_equal(sees, kv >= begin && kv < end);
        }
    }
}

static void test_ttt_definitions(void **state)
{
    (void)state;
    struct rng_key key = rng_key_make(8, 0, 0, RNG_TEST);
    uint64_t counter = 0;
    for (int trial = 0; trial < 400; trial++) {
        struct random_case c;
        random_case_open(&c, key, &counter);
        struct block_layout layout =
            ttt_layout(1 + random_below(key, &counter, 7), trial % 4, trial & 4 ? 0.8 : 1.0);
        int32_t all[256];
        struct slot slots[256 * 7];
        assert_true(c.row.tokens <= 256);
        int64_t count = anchors_all(&c.row, &layout, all), block = 0, next = 0;
        int64_t made = slots_make(&c.row, &layout, all, count, slots);
        for (int32_t t = -1; t < c.row.tokens - 1; t++) {
            bool any = false;
            for (int64_t i = 0; i < layout.block_size; i++) {
                if (!naive_ttt(&c, &layout, t, i))
                    continue;
                any = true;
                assert_true(block < count && all[block] == t + 1 && next < made);
                const struct slot *slot = &slots[next++];
                bool labelled = naive_document(&c, t + 2 + i) == naive_document(&c, t);
                assert_int_equal(slot->block, block);
                assert_int_equal(slot->slot, i);
                assert_int_equal(slot->teacher_row, t + 1 + i);
                assert_int_equal(slot->label, labelled ? t + 2 + i : -1); // ids are positions
                assert_true(fabs((double)slot->weight - pow(layout.ttt_decay_base, (double)i)) <=
                            1e-7);
            }
            assert_int_equal(anchor_is_valid(&c.row, &layout, t + 1), any);
            block += any;
            if (t >= 0)
                check_ttt_ranges(&c, t, random_below(key, &counter, 7));
        }
        assert_int_equal(next, made);
        assert_int_equal(block, count);
        row_close(&c.row, NULL);
    }
}

// ---- drawing ----------------------------------------------------------------------------------------

static uint64_t naive_key(const struct random_case *c, uint64_t seed, int64_t t)
{
    uint64_t id = c->row.doc_ids[naive_document(c, t)];
    return rng_u64(rng_key_make(seed, c->row.epoch, id, RNG_ANCHOR), (uint64_t)c->row.positions[t]);
}

// How many candidates of the same budget have a smaller key: by definition those below max_anchors win.
static int64_t naive_rank(const struct random_case *c, const struct block_layout *layout,
                          const struct anchors_config *config, uint64_t seed, int64_t a)
{
    int64_t smaller = 0;
    for (int64_t t = 0; t < c->row.tokens; t++) {
        if (naive_valid(c, layout, t) &&
            (config->per == ANCHORS_PER_ROW || naive_document(c, t) == naive_document(c, a)))
            smaller += naive_key(c, seed, t) < naive_key(c, seed, a);
    }
    return smaller;
}

static void test_draw_takes_smallest_keys(void **state)
{
    (void)state;
    struct rng_key key = rng_key_make(8, 0, 0, RNG_TEST);
    uint64_t counter = 0;
    int64_t partial = 0;
    for (int trial = 0; trial < 200; trial++) {
        struct random_case c;
        random_case_open(&c, key, &counter);
        c.row.epoch = (uint64_t)trial;
        struct block_layout layout = layout_of(4, false);
        struct anchors_config config = {.max_anchors = 1 + random_below(key, &counter, 12),
                                        .per = trial & 1 ? ANCHORS_PER_DOCUMENT : ANCHORS_PER_ROW};
        struct anchor_scratch scratch;
        anchor_scratch_open(&scratch, c.row.tokens);
        int32_t *anchors = memory_alloc((size_t)c.row.tokens, sizeof(*anchors));
        int64_t valid, next = 0, candidates = 0;
        int64_t drawn = anchors_draw(&c.row, &layout, &config, 99, &scratch, anchors, &valid);
        for (int32_t a = 0; a < c.row.tokens; a++) {
            if (!naive_valid(&c, &layout, a))
                continue;
            candidates++;
            if (naive_rank(&c, &layout, &config, 99, a) < config.max_anchors) {
                assert_true(next < drawn);
                assert_int_equal(anchors[next++], a); // ascending, none twice
            }
        }
        assert_int_equal(next, drawn);
        assert_int_equal(candidates, valid);
        partial += drawn < valid;
        free(anchors);
        anchor_scratch_close(&scratch);
        row_close(&c.row, NULL);
    }
    assert_true(partial > 50); // the cases do exercise the selection
}

enum { UNIFORM_TOKENS = 41, UNIFORM_DRAWN = 10, UNIFORM_EPOCHS = 4000 };

// Draws without replacement: each of n candidates is in with probability k / n, each neighbouring pair
// with k (k - 1) / (n (n - 1)).
static void test_draw_is_uniform(void **state)
{
    (void)state;
    struct row row;
    open_one(&row, UNIFORM_TOKENS);
    struct block_layout layout = layout_of(4, false);
    struct anchors_config config = {.max_anchors = UNIFORM_DRAWN, .per = ANCHORS_PER_ROW};
    struct anchor_scratch scratch;
    anchor_scratch_open(&scratch, UNIFORM_TOKENS);
    int32_t anchors[UNIFORM_TOKENS];
    double singles[UNIFORM_TOKENS] = {0.0}, pairs = 0.0;
    int64_t valid;
    for (uint64_t epoch = 0; epoch < UNIFORM_EPOCHS; epoch++) {
        row.epoch = epoch;
        int64_t drawn = anchors_draw(&row, &layout, &config, 5, &scratch, anchors, &valid);
        assert_int_equal(drawn, UNIFORM_DRAWN);
        for (int64_t i = 0; i < drawn; i++) {
            singles[anchors[i]] += 1.0;
            pairs += i > 0 && anchors[i] == anchors[i - 1] + 1;
        }
    }
    double n = UNIFORM_TOKENS - 1, p = UNIFORM_DRAWN / n, chi = 0.0;
    for (int i = 0; i < UNIFORM_TOKENS - 1; i++) {
        double off = singles[i] - UNIFORM_EPOCHS * p;
        chi += off * off / (UNIFORM_EPOCHS * p * (1.0 - p)) * (n - 1.0) / n;
    }
    // 39 degrees of freedom: one in a million lies beyond, on either side
    assert_true(chi > 10.0 && chi < 96.6);
    double expected = UNIFORM_EPOCHS * (n - 1.0) * p * (UNIFORM_DRAWN - 1) / (n - 1.0);
    assert_true(fabs(pairs - expected) < 5.0 * sqrt(expected));
    anchor_scratch_close(&scratch);
    row_close(&row, NULL);
}

// Draws for one document of 60 tokens that is packed behind `before` tokens of another one.
static int64_t draw_behind(int32_t before, int per, uint64_t seed, uint64_t epoch, int32_t *anchors)
{
    int32_t lengths[] = {before, 60};
    struct row row;
    test_row_open(&row, before > 0 ? lengths : lengths + 1, before > 0 ? 2 : 1, 1, 1);
    int64_t document = row.documents - 1;
    row.doc_ids[document] = 77;
    row.epoch = epoch;
    struct block_layout layout = layout_of(8, false);
    struct anchors_config config = {.max_anchors = 9, .per = per};
    struct anchor_scratch scratch;
    anchor_scratch_open(&scratch, row.tokens);
    int32_t *all = memory_alloc((size_t)row.tokens, sizeof(*all));
    int64_t valid, count = 0;
    int64_t drawn = anchors_draw(&row, &layout, &config, seed, &scratch, all, &valid);
    for (int64_t i = 0; i < drawn; i++) {
        if (all[i] >= before)
            anchors[count++] = all[i] - before;
    }
    free(all);
    anchor_scratch_close(&scratch);
    row_close(&row, NULL);
    return count;
}

static void test_per_document_ignores_packing(void **state)
{
    (void)state;
    int32_t alone[60], packed[60];
    assert_int_equal(draw_behind(0, ANCHORS_PER_DOCUMENT, 1, 2, alone), 9);
    assert_int_equal(draw_behind(33, ANCHORS_PER_DOCUMENT, 1, 2, packed), 9);
    assert_memory_equal(alone, packed, 9 * sizeof(*alone));
    // One budget for the row: the other document takes its part.
    assert_in_range(draw_behind(60, ANCHORS_PER_ROW, 1, 2, packed), 0, 8);
}

static void test_draw_follows_seed_and_epoch(void **state)
{
    (void)state;
    int32_t first[60], again[60], other[60];
    draw_behind(0, ANCHORS_PER_ROW, 1, 2, first);
    draw_behind(0, ANCHORS_PER_ROW, 1, 2, again);
    assert_memory_equal(first, again, 9 * sizeof(*first));
    draw_behind(0, ANCHORS_PER_ROW, 1, 3, other);
    assert_memory_not_equal(first, other, 9 * sizeof(*first));
    draw_behind(0, ANCHORS_PER_ROW, 2, 2, other);
    assert_memory_not_equal(first, other, 9 * sizeof(*first));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_alignment),
        cmocka_unit_test(test_one_supervised_token),
        cmocka_unit_test(test_ends_of_a_document),
        cmocka_unit_test(test_fewer_candidates_than_wanted),
        cmocka_unit_test(test_no_slot_of_weight_zero),
        cmocka_unit_test(test_definitions),
        cmocka_unit_test(test_ttt_masks),
        cmocka_unit_test(test_ttt_needs_a_token_before),
        cmocka_unit_test(test_ttt_weights),
        cmocka_unit_test(test_ttt_definitions),
        cmocka_unit_test(test_draw_takes_smallest_keys),
        cmocka_unit_test(test_draw_is_uniform),
        cmocka_unit_test(test_per_document_ignores_packing),
        cmocka_unit_test(test_draw_follows_seed_and_epoch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
