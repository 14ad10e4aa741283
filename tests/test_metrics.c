// Sums over slots against the recorded steps, and the walk against decoding done by hand.
#include <dirent.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "base/rng.h"
#include "configs/config.h"
#include "data/safetensors.h"
#include "loss/metrics.h"

enum { MANY_BLOCKS = 4096 };

// ---- slots ---------------------------------------------------------------------------------------

// One block a letter group: "1a 2a 3x" = slot 1 agrees, slot 2 agrees, slot 3 does not.
struct made {
    struct slot slots[64];
    float weight[64], loss[64], overlap[64];
    int32_t student[64], teacher[64];
    int64_t count;
};

static void add(struct made *made, int32_t block, int32_t slot, bool agrees)
{
    int64_t i = made->count++;
    made->slots[i] = (struct slot){block, slot, 0, 0, 1.0f};
    made->weight[i] = 0.5f;
    made->loss[i] = (float)(i + 1);
    made->overlap[i] = 0.25f;
    made->teacher[i] = 9;
    made->student[i] = agrees ? 9 : 8;
}

static struct metrics count(struct made *made, int32_t first, int64_t blocks, int32_t *accepted)
{
    struct metrics sum = {0};
    struct slot_results results = {.weight = made->weight,
                                   .loss = made->loss,
                                   .overlap = made->overlap,
                                   .student_argmax = made->student,
                                   .teacher_argmax = made->teacher};
    metrics_count_slots(&sum, first, made->slots, made->count, &results, blocks, accepted);
    return sum;
}

static void agreement_ends_at_the_first_mismatch_or_gap(void **state)
{
    (void)state;
    struct made made = {0};
    add(&made, 0, 1, true); // 1: then a mismatch, later agreement does not count
    add(&made, 0, 2, false);
    add(&made, 0, 3, true);
    add(&made, 1, 1, true); // 1: slot 2 is not scored, which ends the count
    add(&made, 1, 3, true);
    add(&made, 3, 2, true); // 0: slot 1 is not scored
    add(&made, 4, 1, true); // 3
    add(&made, 4, 2, true);
    add(&made, 4, 3, true);
    int32_t accepted[6] = {7, 7, 7, 7, 7, 7};
    struct metrics sum = count(&made, 1, 6, accepted);
    static const int32_t wanted[] = {1, 1, 0, 0, 3, 0};
    assert_memory_equal(accepted, wanted, sizeof(wanted));
    assert_true(sum.blocks == 4.0 && sum.accepted == 5.0 && sum.slots == 9.0);
    assert_true(metrics_accept_len(&sum) == 1.0 + 5.0 / 4.0);
    assert_true(metrics_accuracy(&sum, 1) == 1.0);
    assert_true(metrics_accuracy(&sum, 2) == 2.0 / 3.0);
    assert_true(metrics_accuracy(&sum, 3) == 1.0);
    assert_true(isnan(metrics_accuracy(&sum, 0)));
    assert_true(fabs(metrics_eal_marginal(&sum) - (1.0 + 2.0 / 3.0 + 2.0 / 3.0)) <= 1e-15);
    assert_true(sum.loss == 0.5 * 45.0 && sum.overlap == 0.25 * 9.0);
    assert_true(metrics_loss(&sum, NORMALIZE_WEIGHTED) == 5.0);
    assert_true(metrics_loss(&sum, NORMALIZE_COUNT) == 2.5);
}

static void from_the_anchor_slot_0_is_the_first(void **state)
{
    (void)state;
    struct made made = {0};
    add(&made, 0, 0, true);
    add(&made, 0, 1, true);
    add(&made, 0, 2, false);
    add(&made, 1, 0, false);
    add(&made, 1, 1, true);
    int32_t accepted[2];
    struct metrics sum = count(&made, 0, 2, accepted);
    assert_int_equal(accepted[0], 2);
    assert_int_equal(accepted[1], 0);
    assert_true(metrics_eal_marginal(&sum) == 0.5 + 0.5 * 1.0);
}

// EAGLE-3 with other masks than serving's: a block may lack slot 0 even where no other block has it.
static void a_block_without_its_first_slot_accepts_nothing(void **state)
{
    (void)state;
    struct made made = {0};
    add(&made, 0, 1, true);
    add(&made, 0, 2, true);
    int32_t accepted[1];
    struct metrics sum = count(&made, 0, 1, accepted);
    assert_int_equal(accepted[0], 0);
    assert_true(metrics_accept_len(&sum) == 1.0);
    assert_true(isnan(metrics_conditional(&sum, 1)));
}

static void conditional_accuracy_is_of_what_was_reached(void **state)
{
    (void)state;
    struct made made = {0};
    add(&made, 0, 0, true);
    add(&made, 0, 1, true);
    add(&made, 0, 2, false);
    add(&made, 1, 0, true);
    add(&made, 1, 1, false);
    add(&made, 1, 2, true); // behind a mismatch: not reached
    add(&made, 2, 0, false);
    add(&made, 2, 1, true);
    add(&made, 3, 0, true);
    add(&made, 3, 2, true); // behind a gap
    struct metrics sum = count(&made, 0, 4, NULL);
    assert_true(metrics_conditional(&sum, 0) == 3.0 / 4.0);
    assert_true(metrics_conditional(&sum, 1) == 1.0 / 2.0);
    assert_true(metrics_conditional(&sum, 2) == 0.0);
    assert_true(isnan(metrics_conditional(&sum, 3)));
    assert_true(metrics_accuracy(&sum, 2) == 2.0 / 3.0);
    assert_true(sum.accepted == sum.agreed[0] + sum.agreed[1] + sum.agreed[2]);
}

// A teacher argmax outside the draft vocabulary: a rejection, and nothing of the loss.
static void a_masked_slot_is_a_rejection_alone(void **state)
{
    (void)state;
    struct made made = {0};
    add(&made, 0, 0, true);
    add(&made, 0, 1, false);
    add(&made, 0, 2, true);
    made.weight[1] = 0.0f;
    int32_t accepted[1];
    struct metrics sum = count(&made, 0, 1, accepted);
    assert_int_equal(accepted[0], 1);
    assert_true(sum.slots == 2.0 && sum.weight == 1.0 && sum.loss == 0.5 * (1.0 + 3.0));
    assert_true(metrics_accuracy(&sum, 1) == 0.0 && metrics_conditional(&sum, 1) == 0.0);
    assert_true(metrics_loss(&sum, NORMALIZE_COUNT) == 1.0);
    assert_true(metrics_overlap(&sum) == 0.25); // serving meets it too
}

static void nothing_scored_is_no_number(void **state)
{
    (void)state;
    struct made made = {0};
    struct metrics sum = count(&made, 1, 0, NULL);
    assert_true(metrics_loss(&sum, NORMALIZE_WEIGHTED) == 0.0);
    assert_true(isnan(metrics_accept_len(&sum)));
    assert_true(isnan(metrics_eal_marginal(&sum)));
    assert_true(isnan(metrics_overlap(&sum)));
}

static void sums_of_parts_are_the_sum(void **state)
{
    (void)state;
    struct made first = {0}, second = {0}, both = {0};
    add(&first, 0, 1, true);
    add(&second, 0, 1, false);
    add(&second, 0, 2, true);
    add(&both, 0, 1, true);
    add(&both, 1, 1, false);
    add(&both, 1, 2, true);
    struct metrics a = count(&first, 1, 1, NULL), b = count(&second, 1, 1, NULL);
    a.covered = 3.0;
    b.covered = 4.0;
    metrics_add(&a, &b);
    struct metrics whole = count(&both, 1, 2, NULL);
    assert_true(a.accepted == whole.accepted && a.blocks == whole.blocks);
    assert_memory_equal(a.correct, whole.correct, sizeof(a.correct));
    assert_memory_equal(a.scored, whole.scored, sizeof(a.scored));
    assert_true(a.covered == 7.0);
}

// ---- recorded steps ------------------------------------------------------------------------------

static const void *bytes_of(const struct safetensors *file, const char *name)
{
    const struct safetensors_entry *entry = safetensors_find(file, name);
    return entry != NULL ? entry->bytes : NULL;
}

static void near(const struct safetensors *file, const char *name, double got, double tolerance)
{
    double wanted;
    memcpy(&wanted, bytes_of(file, name), sizeof(wanted));
    if (!(fabs(got - wanted) <= tolerance * (1.0 + fabs(wanted))))
        fail_msg("%s: %s is %.9g, not %.9g", file->path, name, got, wanted);
}

static struct metrics count_recorded(const struct safetensors *file, int64_t total)
{
    const int32_t *row = bytes_of(file, "slots.row"), *block = bytes_of(file, "slots.block");
    const int32_t *slot = bytes_of(file, "slots.slot");
    const float *weight = bytes_of(file, "slots.weight"), *loss = bytes_of(file, "slots.loss");
    const float *overlap = bytes_of(file, "slots.overlap");
    const int32_t *student = bytes_of(file, "slots.student_argmax");
    const int32_t *teacher = bytes_of(file, "slots.teacher_argmax");
    struct metrics sum = {0};
    struct made made;
    int32_t first = 1;
    for (int64_t i = 0; i < total; i++)
        first = slot[i] < first ? slot[i] : first;
    for (int64_t begin = 0; begin < total;) {
        made.count = 0; // parts end at block borders and at row borders, as groups do
        int64_t i = begin;
        while (i < total && row[i] == row[begin]) {
            int64_t end = i;
            while (end < total && row[end] == row[i] && block[end] == block[i])
                end++;
            if (made.count + end - i > 64)
                break;
            for (; i < end; i++) {
                made.slots[made.count] = (struct slot){block[i], slot[i], 0, 0, weight[i]};
                made.weight[made.count] = weight[i];
                made.loss[made.count] = loss[i];
                made.overlap[made.count] = overlap[i];
                made.student[made.count] = student[i];
                made.teacher[made.count++] = teacher[i];
            }
        }
        struct metrics part = count(&made, first, MANY_BLOCKS, NULL);
        metrics_add(&sum, &part);
        begin = i;
    }
    return sum;
}

// Slots that a draft vocabulary masks are rejections, and are not recorded.
static void check_acceptance(const struct safetensors *file, const struct metrics *sum)
{
    const char *config = safetensors_metadata(file, "config");
    if (safetensors_find(file, "d2t") != NULL &&
        strstr(config, "\"out_of_vocab\": \"masked\"") != NULL)
        return;
    near(file, "scalar.accept_len", metrics_accept_len(sum), 1e-12);
    near(file, "scalar.eal_marginal", metrics_eal_marginal(sum), 1e-12);
    const struct safetensors_entry *acc = safetensors_find(file, "metrics.acc");
    const float *wanted = (const float *)(const void *)acc->bytes;
    for (int k = 0; k < acc->shape[0]; k++) {
        double got = sum->scored[k] > 0.0 ? metrics_accuracy(sum, k) : 0.0;
        assert_true(fabs(got - (double)wanted[k]) <= 1e-7);
    }
}

static bool check_recorded(const char *path)
{
    struct safetensors file;
    struct error err = {""};
    if (safetensors_open(&file, path, &err) != 0)
        fail_msg("%s", err.text);
    const struct safetensors_entry *slots = safetensors_find(&file, "slots.row");
    bool compared = slots != NULL && bytes_of(&file, "scalar.accept_len") != NULL;
    if (compared) {
        struct metrics sum = count_recorded(&file, slots->shape[0]);
        const char *config = safetensors_metadata(&file, "config");
        int normalize = strstr(config, "\"normalize\": \"count\"") != NULL ? NORMALIZE_COUNT
                                                                           : NORMALIZE_WEIGHTED;
        near(&file, "scalar.loss", metrics_loss(&sum, normalize), 1e-6);
        near(&file, "scalar.weight_sum", sum.weight, 1e-6);
        check_acceptance(&file, &sum);
    }
    safetensors_close(&file);
    return compared;
}

static void recorded_steps_give_the_recorded_numbers(void **state)
{
    (void)state;
    const char *folder = DTRAIN_SOURCE_DIR "/tests/golden";
    struct dirent **found = NULL;
    int files = scandir(folder, &found, NULL, alphasort), compared = 0;
    for (int i = 0; i < files; i++) {
        if (strstr(found[i]->d_name, ".safetensors") != NULL) {
            char *path = memory_format("%s/%s", folder, found[i]->d_name);
            compared += check_recorded(path);
            free(path);
        }
        free(found[i]);
    }
    free(found);
    assert_true(compared >= 5);
}

// ---- walk ----------------------------------------------------------------------------------------

enum { WALK_TOKENS = 400 };

// A row of documents with a mask; anchors are all positions with a supervised successor.
struct walk_case {
    struct row row;
    int32_t positions[WALK_TOKENS], doc_of[WALK_TOKENS];
    uint8_t mask[WALK_TOKENS];
    uint64_t doc_ids[WALK_TOKENS];
    int32_t anchors[WALK_TOKENS], accepted[WALK_TOKENS];
    int64_t count;
};

static void add_token(struct walk_case *c, bool new_document, bool supervised)
{
    int64_t t = c->row.tokens++;
    if (new_document)
        c->doc_ids[c->row.documents] = 1000 + (uint64_t)c->row.documents;
    c->row.documents += new_document;
    c->doc_of[t] = (int32_t)c->row.documents - 1;
    c->positions[t] = new_document ? 0 : c->positions[t - 1] + 1;
    c->mask[t] = supervised;
}

static void find_anchors(struct walk_case *c)
{
    c->row.positions = c->positions;
    c->row.doc_of = c->doc_of;
    c->row.loss_mask = c->mask;
    c->row.doc_ids = c->doc_ids;
    c->count = 0;
    for (int32_t t = 0; t + 1 < c->row.tokens; t++) {
        if (c->mask[t] && c->mask[t + 1] && c->doc_of[t] == c->doc_of[t + 1])
            c->anchors[c->count++] = t;
    }
}

// "|" starts a document, "s" is a supervised token, "." one that is not.
static void make_row(struct walk_case *c, const char *text)
{
    *c = (struct walk_case){0};
    bool new_document = true;
    for (; *text != '\0'; text++) {
        if (*text == '|')
            new_document = true;
        else {
            add_token(c, new_document, *text == 's');
            new_document = false;
        }
    }
    find_anchors(c);
}

struct visits {
    int count;
    uint64_t doc_id[16];
    int32_t position[16], accepted[16];
};

static void record(void *context, uint64_t doc_id, int32_t position, int32_t accepted)
{
    struct visits *visits = context;
    visits->doc_id[visits->count] = doc_id;
    visits->position[visits->count] = position;
    visits->accepted[visits->count++] = accepted;
}

static void walk_visits_what_decoding_visits(void **state)
{
    (void)state;
    struct walk_case c;
    // positions       0123456789   0123
    make_row(&c, "..sssss.ss|ssss");
    // anchors: 2 3 4 5, 8, then 10 11 12 in the second document
    assert_int_equal(c.count, 8);
    static const int32_t accepted[] = {1, 3, 1, 0, 1, 0, 2, 1};
    memcpy(c.accepted, accepted, sizeof(accepted));
    struct walk walk = {0};
    struct visits visits = {0};
    walk_row(&walk, &c.row, c.anchors, c.accepted, c.count, 7, record, &visits);
    // 2 takes 2 tokens -> 4 takes 2 -> 6 is no anchor; 8 takes 2 -> 10 is the next document's own run:
    // 10 takes 1 -> 11 takes 3 -> end.
    static const int32_t positions[] = {2, 4, 8, 0, 1}, taken[] = {1, 1, 1, 0, 2};
    static const uint64_t ids[] = {1000, 1000, 1000, 1001, 1001};
    assert_int_equal(visits.count, 5);
    assert_memory_equal(visits.position, positions, sizeof(positions));
    assert_memory_equal(visits.accepted, taken, sizeof(taken));
    assert_memory_equal(visits.doc_id, ids, sizeof(ids));
    assert_true(walk.blocks == 5.0 && walk.tokens == 10.0);
    assert_true(walk_accept_len(&walk) == 2.0);
    // With one draft: 2 -> 4 -> 6; 8; 10 -> 11 -> 13.
    assert_true(walk.draft_blocks[1] == 5.0 && walk.draft_tokens[1] == 9.0);
    assert_true(walk_accept_len_drafts(&walk, 1) == 9.0 / 5.0);
    assert_true(walk_accept_len_drafts(&walk, 2) == 2.0);
    assert_true(walk_accept_len_drafts(&walk, 63) == 2.0);
}

static void walk_does_not_cross_documents(void **state)
{
    (void)state;
    struct walk_case c;
    make_row(&c, "sss|sssss");
    // The block at 0 takes exactly to the border: 3 is the next document's own start, visited once.
    for (int64_t i = 0; i < c.count; i++)
        c.accepted[i] = 2;
    struct walk walk = {0};
    walk_row(&walk, &c.row, c.anchors, c.accepted, c.count, 7, NULL, NULL);
    assert_true(walk.blocks == 3.0 && walk.tokens == 9.0); // 0, 3, 6
}

// EAGLE-3 needs a token before the anchor: a document that is supervised from its first token on.
static void walk_starts_at_the_second_token_where_the_first_is_no_anchor(void **state)
{
    (void)state;
    struct walk_case c;
    make_row(&c, "ssss|.sss");
    // anchors 0 1 2, 5 6 without the first
    assert_int_equal(c.count, 5);
    struct walk walk = {0};
    struct visits visits = {0};
    for (int64_t i = 0; i < c.count; i++)
        c.accepted[i] = 1;
    walk_row(&walk, &c.row, c.anchors + 1, c.accepted + 1, c.count - 1, 7, record, &visits);
    static const int32_t positions[] = {1, 1}; // each takes two tokens: the next would be no anchor
    assert_int_equal(visits.count, 2);
    assert_memory_equal(visits.position, positions, sizeof(positions));
    // In the middle of a document, what is no anchor still ends the chain.
    memset(&walk, 0, sizeof(walk));
    walk_row(&walk, &c.row, c.anchors + 4, c.accepted + 4, 1, 7, NULL, NULL);
    assert_true(walk.blocks == 0.0);
}

static void a_row_without_anchors_walks_nowhere(void **state)
{
    (void)state;
    struct walk_case c;
    make_row(&c, "s.s.|s|...");
    assert_int_equal(c.count, 0);
    struct walk walk = {0};
    walk_row(&walk, &c.row, c.anchors, c.accepted, c.count, 7, NULL, NULL);
    assert_true(walk.blocks == 0.0);
    assert_true(isnan(walk_accept_len(&walk)));
    assert_true(isnan(walk_accept_len_drafts(&walk, 3)));
}

// Decoding by hand: a cursor over each document that emits accepted + 1 tokens a block.
static void decode(const struct walk_case *c, int64_t drafts, double *blocks, double *tokens)
{
    int32_t accept_at[WALK_TOKENS];
    for (int t = 0; t < WALK_TOKENS; t++)
        accept_at[t] = -1;
    for (int64_t i = 0; i < c->count; i++)
        accept_at[c->anchors[i]] = c->accepted[i];
    for (int32_t t = 0; t < c->row.tokens; t++) {
        bool starts = c->mask[t] && (c->positions[t] == 0 || !c->mask[t - 1]);
        if (!starts)
            continue;
        for (int32_t a = t; a < c->row.tokens && c->doc_of[a] == c->doc_of[t] && c->mask[a];) {
            if (accept_at[a] < 0)
                break;
            int32_t n = accept_at[a] > drafts ? (int32_t)drafts : accept_at[a];
            *blocks += 1.0;
            *tokens += n + 1.0;
            a += n + 1;
        }
    }
}

static void random_rows_walk_as_decoding_by_hand(void **state)
{
    (void)state;
    struct rng_key key = rng_key_make(3, 0, 0, RNG_TEST);
    uint64_t draw = 0;
    for (int trial = 0; trial < 50; trial++) {
        struct walk_case c = {0};
        bool supervised = false;
        for (int t = 0; t < WALK_TOKENS; t++) {
            bool border = t == 0 || rng_uniform(key, draw++) < 0.03f;
            supervised = rng_uniform(key, draw++) < 0.1f ? !supervised : supervised;
            add_token(&c, border, supervised);
        }
        find_anchors(&c);
        // As slots_make scores: never past the supervised run that the anchor is in.
        for (int64_t i = 0; i < c.count; i++) {
            int32_t a = c.anchors[i], room = 0;
            while (a + room + 1 < c.row.tokens && c.mask[a + room + 1] &&
                   c.doc_of[a + room + 1] == c.doc_of[a])
                room++;
            int32_t wanted = (int32_t)(rng_uniform(key, draw++) * 8.0f);
            c.accepted[i] = wanted < room ? wanted : room;
        }
        struct walk walk = {0};
        walk_row(&walk, &c.row, c.anchors, c.accepted, c.count, 7, NULL, NULL);
        for (int64_t n = 1; n <= 8; n++) {
            double blocks = 0.0, tokens = 0.0;
            decode(&c, n < 7 ? n : 7, &blocks, &tokens);
            assert_true(walk.draft_blocks[n] == blocks && walk.draft_tokens[n] == tokens);
            assert_true(n < 7 || (walk.blocks == blocks && walk.tokens == tokens));
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(agreement_ends_at_the_first_mismatch_or_gap),
        cmocka_unit_test(from_the_anchor_slot_0_is_the_first),
        cmocka_unit_test(a_block_without_its_first_slot_accepts_nothing),
        cmocka_unit_test(conditional_accuracy_is_of_what_was_reached),
        cmocka_unit_test(a_masked_slot_is_a_rejection_alone),
        cmocka_unit_test(nothing_scored_is_no_number),
        cmocka_unit_test(sums_of_parts_are_the_sum),
        cmocka_unit_test(recorded_steps_give_the_recorded_numbers),
        cmocka_unit_test(walk_visits_what_decoding_visits),
        cmocka_unit_test(walk_does_not_cross_documents),
        cmocka_unit_test(walk_starts_at_the_second_token_where_the_first_is_no_anchor),
        cmocka_unit_test(a_row_without_anchors_walks_nowhere),
        cmocka_unit_test(random_rows_walk_as_decoding_by_hand),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
