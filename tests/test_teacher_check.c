// `dtrain data check --target`: the teacher columns of a shard prove head, norm and alignment. Shards
// whose columns a target of bf16 would have written pass; a norm read as w instead of 1 + w, applied
// twice or not at all, another head or another position do not (case C8).
#include "trainer/teacher_check.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "base/rng.h"
#include "data/target.h"
#include "tests/support/run_fixture.h"
#include "tests/support/shard_edit.h"

enum {
    HIDDEN = 64,
    VOCAB = 512,
    DOCUMENTS = 6,
    LENGTH = 80,
    TOKENS = DOCUMENTS * LENGTH,
    SHORT =
        16, // tokens of a document where there are many: one is too few for the shard's own verdict
    MANY = TOKENS / SHORT,
    PLANES = 2
};

// Norm weights as they are stored: around 1.3 and 1.8 in trained models at hand, around 0 in families
// of 1 + w; large ones, where w and 1 + w are near.
static const struct run_target targets[] = {
    {"llama", HIDDEN, VOCAB, 1.3, 0.056, 1},      {"llama", HIDDEN, VOCAB, 1.8, 0.3, 2},
    {"llama", HIDDEN, VOCAB, 30.0, 3.0, 3},       {"llama", HIDDEN, VOCAB, 100.0, 20.0, 4},
    {"qwen3_5_text", HIDDEN, VOCAB, 0.3, 0.2, 5}, {"gemma", HIDDEN, VOCAB, 20.0, 4.0, 6},
};
enum { TARGETS = sizeof(targets) / sizeof(*targets) };

static const char *other_family(const struct run_target *target)
{
    return strcmp(target->model_type, "llama") == 0 ? "qwen3_5_text" : "llama";
}

struct case_data {
    char *folder, *shard, *target;
    struct fixture fixture;
};

static double round_bf16(double value)
{
    return (double)bf16_to_float(bf16_from_float((float)value));
}

// norm(x) as a model of bf16 computes it.
static void true_norm(const struct target *target, const bf16 *x, double *normed)
{
    const float *weight = target->norm.data;
    double squares = 0.0;
    for (int64_t j = 0; j < HIDDEN; j++)
        squares += pow((double)bf16_to_float(x[j]), 2.0);
    double rstd = 1.0 / sqrt(squares / HIDDEN + target->rms_norm_eps);
    for (int64_t j = 0; j < HIDDEN; j++)
        normed[j] = round_bf16(round_bf16((double)bf16_to_float(x[j]) * rstd) *
                               ((double)weight[j] + (double)target->norm_weight_offset));
}

// What the target says at a position, logits rounded to bf16.
static void true_columns(const struct target *target, const double *normed, struct fixture *fixture,
                         int64_t token)
{
    const float *head = target->head.data;
    double logits[VOCAB], sum = 0.0;
    int32_t best = 0;
    for (int32_t v = 0; v < VOCAB; v++) {
        double logit = 0.0;
        for (int64_t j = 0; j < HIDDEN; j++)
            logit += normed[j] * (double)head[v * HIDDEN + j];
        logits[v] = round_bf16(logit);
        if (logits[v] > logits[best])
            best = v;
    }
    for (int32_t v = 0; v < VOCAB; v++)
        sum += exp(logits[v] - logits[best]);
    fixture->teacher_top1[token] = best;
    fixture->teacher_top1_logit[token] = (float)logits[best];
    fixture->teacher_lse[token] = (float)(logits[best] + log(sum));
}

// A trained model's states point at the head's row of what comes next.
static void learn(const struct target *target, struct fixture *fixture, uint64_t seed)
{
    struct rng_key key = rng_key_make(seed, 0, 9, RNG_TEST);
    const float *head = target->head.data;
    for (int64_t t = 0; t + 1 < TOKENS; t++) {
        bf16 *x = fixture_hidden(fixture, t, PLANES - 1);
        for (int64_t j = 0; j < HIDDEN; j++)
            x[j] = bf16_from_float(3.0f * head[fixture->input_ids[t + 1] * HIDDEN + j] +
                                   rng_normal(key, (uint64_t)(t * HIDDEN + j)));
    }
}

static void case_open_of(struct case_data *c, const struct run_target *made, int64_t documents,
                         bool learned, bool columns)
{
    struct target target;
    struct error err = {""};
    double normed[HIDDEN];
    int64_t lengths[MANY];
    for (int64_t d = 0; d < documents; d++)
        lengths[d] = TOKENS / documents;
    struct fixture_options options = {.seed = made->seed,
                                      .hidden_size = HIDDEN,
                                      .vocab_size = VOCAB,
                                      .layers = PLANES - 1,
                                      .documents = documents,
                                      .lengths = lengths,
                                      .teacher = columns};
    *c = (struct case_data){.folder = fixture_folder()};
    c->shard = fixture_path(c->folder, "a.h5");
    c->target = fixture_path(c->folder, "target");
    run_target_write(c->target, made);
    if (target_open(&target, c->target, &err) != 0)
        fail_msg("%s", err.text);
    fixture_make(&c->fixture, &options);
    if (learned)
        learn(&target, &c->fixture, made->seed);
    for (int64_t t = 0; columns && t < TOKENS; t++) {
        true_norm(&target, fixture_hidden(&c->fixture, t, PLANES - 1), normed);
        true_columns(&target, normed, &c->fixture, t);
    }
    target_close(&target);
    fixture_write(&c->fixture, c->shard);
}

static void case_open(struct case_data *c, const struct run_target *made, bool learned,
                      bool columns)
{
    case_open_of(c, made, DOCUMENTS, learned, columns);
}

static void case_close(struct case_data *c)
{
    fixture_release(&c->fixture);
    free(c->shard);
    free(c->target);
    fixture_folder_remove(c->folder);
}

static void must_be(const struct case_data *c, int expected, const char *words, const char *what)
{
    char *text = NULL;
    size_t size = 0;
    struct error err = {""};
    const char *path = c->shard;
    FILE *out = open_memstream(&text, &size);
    int status = teacher_check(&path, 1, c->target, out, &err);
    fclose(out);
    if (status != expected || strstr(text, words) == NULL)
        fail_msg("%s: status %d, %s%s", what, status, text, err.text);
    free(text);
}

static void sound_columns_match(void **state)
{
    (void)state;
    for (int i = 0; i < 2 * TARGETS; i++) {
        struct case_data c;
        case_open(&c, &targets[i / 2], i % 2 == 1, true);
        must_be(&c, 0, "top-1 is the same at", "sound");
        must_be(&c, 0, "matches", "sound");
        case_close(&c);
    }
}

// Reads the same weights as another family does.
static void w_for_one_plus_w(struct case_data *c, const struct run_target *made)
{
    struct run_target other = *made;
    other.model_type = other_family(made);
    run_target_write(c->target, &other);
}

// States behind the norm in a shard that says they are before it.
static void norm_twice(struct case_data *c, const struct run_target *made)
{
    struct target target;
    struct error err = {""};
    double normed[HIDDEN];
    (void)made;
    if (target_open(&target, c->target, &err) != 0)
        fail_msg("%s", err.text);
    for (int64_t t = 0; t < TOKENS; t++) {
        bf16 *x = fixture_hidden(&c->fixture, t, PLANES - 1);
        true_norm(&target, x, normed);
        for (int64_t j = 0; j < HIDDEN; j++)
            x[j] = bf16_from_float((float)normed[j]);
    }
    target_close(&target);
    fixture_write(&c->fixture, c->shard);
}

static void norm_not_at_all(struct case_data *c, const struct run_target *made)
{
    (void)made;
    edit_text_attribute(c->shard, "last_hidden", "post_norm", true);
}

static void other_head(struct case_data *c, const struct run_target *made)
{
    struct run_target other = *made;
    other.seed += 100;
    run_target_write(c->target, &other);
}

static void one_position_off(struct case_data *c, const struct run_target *made)
{
    (void)made;
    size_t rest = TOKENS - 1;
    memmove(c->fixture.teacher_top1, c->fixture.teacher_top1 + 1, rest * sizeof(int32_t));
    memmove(c->fixture.teacher_top1_logit, c->fixture.teacher_top1_logit + 1, rest * sizeof(float));
    memmove(c->fixture.teacher_lse, c->fixture.teacher_lse + 1, rest * sizeof(float));
    fixture_write(&c->fixture, c->shard);
}

static void lse_is_no_number(struct case_data *c, const struct run_target *made)
{
    (void)made;
    for (int64_t t = 0; t < TOKENS; t++)
        c->fixture.teacher_lse[t] = (float)NAN;
    fixture_write(&c->fixture, c->shard);
}

static void every_fault_is_caught(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        void (*make)(struct case_data *c, const struct run_target *made);
    } faults[] = {{"w for 1 + w or back", w_for_one_plus_w}, {"norm twice", norm_twice},
                  {"norm not at all", norm_not_at_all},      {"another head", other_head},
                  {"one position off", one_position_off},    {"no number", lse_is_no_number}};
    enum { FAULTS = sizeof(faults) / sizeof(*faults) };
    for (int i = 0; i < 2 * TARGETS * FAULTS; i++) {
        struct case_data c;
        char what[96];
        const struct run_target *made = &targets[i / 2 % TARGETS];
        int fault = i / 2 / TARGETS;
        snprintf(what, sizeof(what), "%s, target %d, %s states", faults[fault].name,
                 i / 2 % TARGETS, i % 2 == 1 ? "learned" : "random");
        case_open(&c, made, i % 2 == 1, true);
        faults[fault].make(&c, made);
        must_be(&c, 1, "DOES NOT MATCH", what);
        case_close(&c);
    }
}

// Without columns: only the next token, which is said to be weaker.
static void next_token_without_columns(void **state)
{
    (void)state;
    struct case_data c;
    case_open(&c, &targets[1], true, false);
    must_be(&c, 0, "no teacher columns", "learned");
    must_be(&c, 0, "weaker", "learned");
    other_head(&c, &targets[1]);
    must_be(&c, 1, "DOES NOT FIT", "another head");
    case_close(&c);
}

// Bad states are data check's to name, not a wrong norm.
static void bad_states_are_left_aside(void **state)
{
    (void)state;
    struct case_data c;
    case_open(&c, &targets[0], true, true);
    for (int64_t t = 0; t < TOKENS / 2; t++)
        fixture_hidden(&c.fixture, t, PLANES - 1)[3] = 0x7fc0;
    fixture_write(&c.fixture, c.shard);
    must_be(&c, 0, "matches", "half of the states are NaN");
    case_close(&c);
}

// The states of tokens [first, first + count) moved by one token, to the back or to the front.
static void move_states(struct case_data *c, int64_t first, int64_t count, int by)
{
    enum { ROW = PLANES * HIDDEN };
    bf16 *rows = fixture_hidden(&c->fixture, first, 0), kept[ROW];
    int64_t rest = (count - 1) * ROW;
    bf16 *end = rows + rest;
    memcpy(kept, by > 0 ? end : rows, sizeof(kept));
    memmove(by > 0 ? rows + ROW : rows, by > 0 ? rows : rows + ROW, (size_t)rest * sizeof(*rows));
    memcpy(by > 0 ? rows : end, kept, sizeof(kept));
}

// Ids that the target would not have chosen, in a share of positions: answers sampled at a temperature,
// or a text of another kind.
static void spoil_ids(struct case_data *c, int64_t first, int64_t count, double spoiled,
                      uint64_t seed)
{
    struct rng_key key = rng_key_make(seed, 1, 3, RNG_TEST);
    for (int64_t t = first; t < first + count; t++)
        if ((double)rng_uniform(key, (uint64_t)(2 * t)) < spoiled)
            c->fixture.input_ids[t] = (int32_t)(rng_u64(key, (uint64_t)(2 * t + 1)) % VOCAB);
}

// One document among many, too few positions for the shard's verdict: named with what it looks like.
static void one_document_off_by_one_token(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        struct case_data c;
        bool columns = i % 2 == 1, late = i < 2;
        case_open_of(&c, &targets[1], MANY, true, columns);
        move_states(&c, 3 * SHORT, SHORT, late ? 1 : -1);
        fixture_write(&c.fixture, c.shard);
        must_be(&c, 1, "a.h5: document 3 (doc_id ", "one document moved");
        must_be(&c, 1, late ? "ONE TOKEN LATE" : "ONE TOKEN EARLY", "one document moved");
        must_be(&c, 1, columns ? "DOES NOT MATCH" : "DOES NOT FIT", "one document moved");
        must_be(&c, 1, "30 of 30 documents looked at", "one document moved");
        must_be(&c, 1, "1 can not be right, 0 more stand out", "one document moved");
        case_close(&c);
    }
}

// States and columns agree with each other, but not with the ids of one document: no other looks so.
static void states_and_columns_off_by_one_token(void **state)
{
    (void)state;
    struct case_data c;
    case_open_of(&c, &targets[1], MANY, true, true);
    memmove(&c.fixture.input_ids[5 * SHORT + 1], &c.fixture.input_ids[5 * SHORT],
            (SHORT - 1) * sizeof(int32_t));
    fixture_write(&c.fixture, c.shard);
    must_be(&c, 1, "document 5 (doc_id ", "ids moved");
    must_be(&c, 1, "ONE TOKEN EARLY: DOES NOT FIT", "ids moved");
    case_close(&c);
}

// A document of which the target expects next to nothing is told, and no more: it may be another kind
// of text. With columns, its states are known to be right.
static void document_far_below_the_others(void **state)
{
    (void)state;
    for (int columns = 0; columns < 2; columns++) {
        struct case_data c;
        case_open(&c, &targets[1], true, columns == 1);
        spoil_ids(&c, 2 * LENGTH, LENGTH, 1.0, 7);
        fixture_write(&c.fixture, c.shard);
        must_be(&c, 0, "document 2 (doc_id ", "another text");
        must_be(&c, 0, ": warning; ", "another text");
        must_be(&c, 0, "0 can not be right, 1 more stand out", "another text");
        case_close(&c);
    }
}

// Sampled answers, texts that fit the target less than others, short documents.
static void sound_documents_do_not_stand_out(void **state)
{
    (void)state;
    for (int i = 0; i < 4 * TARGETS; i++) {
        struct case_data c;
        int64_t documents = i % 2 == 0 ? DOCUMENTS : MANY, length = TOKENS / documents;
        case_open_of(&c, &targets[i / 4], documents, true, i / 2 % 2 == 1);
        for (int64_t d = 0; d < documents; d++)
            spoil_ids(&c, d * length, length, 0.1 * (double)(d % 6), (uint64_t)i);
        fixture_write(&c.fixture, c.shard);
        must_be(&c, 0, "none stands out", "noisy text");
        case_close(&c);
    }
}

// A target that repeats the token it reads, as one without training may: with columns that say the same
// it is not a fault of every document.
static void a_target_that_repeats_is_no_shift(void **state)
{
    (void)state;
    struct case_data c;
    case_open_of(&c, &targets[1], MANY, true, true);
    memmove(c.fixture.input_ids, c.fixture.input_ids + 1, (TOKENS - 1) * sizeof(int32_t));
    fixture_write(&c.fixture, c.shard);
    must_be(&c, 0, "0 can not be right", "a target that repeats");
    must_be(&c, 0, "ONE TOKEN LATE: warning", "a target that repeats");
    case_close(&c);
}

// The same through the program: exit status 1, and the columns' own line.
static void through_the_program(void **state)
{
    (void)state;
    struct case_data c;
    case_open(&c, &targets[4], true, true);
    char *output = fixture_path(c.folder, "out");
    const char *const words[] = {"data",  "check", "--no-verdicts", "--target", c.target,
                                 c.shard, NULL};
    assert_int_equal(program_run(output, words), 0);
    assert_true(program_says(output, "matches"));
    w_for_one_plus_w(&c, &targets[4]);
    assert_int_equal(program_run(output, words), 1);
    assert_true(program_says(output, "DOES NOT MATCH"));
    free(output);
    case_close(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sound_columns_match),
        cmocka_unit_test(every_fault_is_caught),
        cmocka_unit_test(next_token_without_columns),
        cmocka_unit_test(bad_states_are_left_aside),
        cmocka_unit_test(one_document_off_by_one_token),
        cmocka_unit_test(states_and_columns_off_by_one_token),
        cmocka_unit_test(document_far_below_the_others),
        cmocka_unit_test(sound_documents_do_not_stand_out),
        cmocka_unit_test(a_target_that_repeats_is_no_shift),
        cmocka_unit_test(through_the_program),
    };
    return cmocka_run_group_tests_name("teacher_check", tests, NULL, NULL);
}
