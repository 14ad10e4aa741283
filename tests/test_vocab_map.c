// Draft vocabularies (case C13): offsets and membership, masked labels, unseen tokens, and maps of other
// data, another vocabulary or another target refused.
#include "data/vocab_map.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "data/safetensors.h"
#include "tests/support/shard_fixture.h"

enum { VOCAB = 10 };

struct place {
    char *folder, *map_path;
};

static int setup(void **state)
{
    struct place *place = memory_alloc(1, sizeof(*place));
    place->folder = fixture_folder();
    place->map_path = fixture_path(place->folder, "map.safetensors");
    *state = place;
    return 0;
}

static int teardown(void **state)
{
    struct place *place = *state;
    free(place->map_path);
    fixture_folder_remove(place->folder);
    free(place);
    return 0;
}

// One document of these ids, opened as a data set.
static void open_data(const struct place *place, const char *name, const char *target,
                      int64_t vocab_size, int64_t tokens, const int32_t *ids, const uint8_t *mask,
                      struct documents *documents)
{
    static const uint64_t id = 7;
    struct error err = {""};
    char *path = fixture_path(place->folder, name);
    struct fixture_options options = {.seed = 1,
                                      .target_model = target,
                                      .vocab_size = vocab_size,
                                      .documents = 1,
                                      .lengths = &tokens,
                                      .input_ids = ids,
                                      .loss_mask = mask,
                                      .doc_ids = &id};
    fixture_shard(path, &options);
    struct config_texts list = {.items = &path, .count = 1};
    if (documents_open(documents, &list, 64, BAD_SAMPLE_FAIL, &err) != 0)
        fail_msg("%s", err.text);
    free(path);
}

static void make(struct vocab_map *map, const int64_t *counts, int64_t draft_size)
{
    struct error err = {""};
    if (vocab_map_make(map, counts, VOCAB, draft_size, &err) != 0)
        fail_msg("%s", err.text);
}

static void offsets_and_members(void **state)
{
    static const int64_t counts[VOCAB] = {4, 0, 9, 2, 0, 1, 0, 3, 1, 0};
    static const int64_t offsets[] = {0, 1, 1, 4};
    static const uint8_t members[VOCAB] = {1, 0, 1, 1, 0, 0, 0, 1, 0, 0};
    struct vocab_map map;
    (void)state;
    make(&map, counts, 4);
    assert_memory_equal(map.d2t, offsets, sizeof(offsets));
    assert_memory_equal(map.t2d, members, sizeof(members));
    assert_true(map.coverage == 0.9);
    assert_int_equal(vocab_map_draft(&map, 5), -1); // a label that is masked
    for (int32_t draft = 0; draft < 4; draft++)
        assert_int_equal(vocab_map_draft(&map, (int32_t)(draft + map.d2t[draft])), draft);
    vocab_map_release(&map);
}

static void unseen_tokens_fill_the_rest(void **state)
{
    static const int64_t counts[VOCAB] = {0, 5, 0, 0, 2, 0, 0, 2, 0, 1};
    static const int64_t ids[] = {0, 1, 2, 4, 7, 9};
    struct vocab_map map;
    (void)state;
    make(&map, counts, 6);
    for (int64_t draft = 0; draft < 6; draft++)
        assert_int_equal(draft + map.d2t[draft], ids[draft]);
    assert_true(map.coverage == 1.0);
    vocab_map_release(&map);
    make(&map, counts, 2); // of 4 and 7, seen equally often, the smaller
    assert_int_equal(vocab_map_draft(&map, 4), 1);
    assert_int_equal(vocab_map_draft(&map, 7), -1);
    vocab_map_release(&map);
}

static void sizes_outside_the_vocabulary_are_refused(void **state)
{
    static const int64_t counts[VOCAB] = {0}, sizes[] = {0, -1, VOCAB + 1};
    (void)state;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct vocab_map map;
        struct error err = {""};
        assert_int_equal(vocab_map_make(&map, counts, VOCAB, sizes[i], &err), -1);
        assert_non_null(strstr(err.text, "allowed are 1 to 10"));
    }
}

static const int32_t ids_a[] = {2, 2, 7, 2, 0, 0, 3, 5};
static const uint8_t mask_a[] = {0, 1, 1, 1, 1, 1, 1, 0};

static void only_supervised_tokens_count(void **state)
{
    static const int64_t expected[VOCAB] = {2, 0, 2, 1, 0, 0, 0, 1, 0, 0};
    struct documents documents;
    struct error err = {""};
    int64_t counts[VOCAB] = {0};
    open_data(*state, "a.h5", "t", VOCAB, 8, ids_a, mask_a, &documents);
    assert_int_equal(vocab_map_count(&documents, counts, &err), 0);
    assert_memory_equal(counts, expected, sizeof(expected));
    documents_close(&documents);
}

static void must_refuse(const struct place *place, const char *target, int64_t vocab_size,
                        const int32_t *ids, const char *words)
{
    struct documents documents;
    struct vocab_map map;
    struct error err = {""};
    open_data(place, "other.h5", target, vocab_size, 8, ids, mask_a, &documents);
    assert_int_equal(vocab_map_read(&map, &documents, true, place->map_path, &err), -1);
    if (strstr(err.text, words) == NULL || strstr(err.text, place->map_path) == NULL)
        fail_msg("\"%s\" is expected, the error is: %s", words, err.text);
    assert_non_null(strstr(err.text, "dtrain vocab --size")); // what to do
    assert_non_null(strstr(err.text, "exactly those of data.train"));
    documents_close(&documents);
}

static void maps_of_other_data_are_refused(void **state)
{
    static const int32_t other_ids[] = {2, 2, 7, 2, 0, 0, 4, 5};
    const struct place *place = *state;
    struct documents documents;
    struct vocab_map map, again;
    struct error err = {""};
    int64_t counts[VOCAB] = {0};
    open_data(place, "a.h5", "t", VOCAB, 8, ids_a, mask_a, &documents);
    assert_int_equal(vocab_map_count(&documents, counts, &err), 0);
    make(&map, counts, 4);
    assert_int_equal(vocab_map_write(&map, &documents, place->map_path, &err), 0);
    if (vocab_map_read(&again, &documents, true, place->map_path, &err) != 0)
        fail_msg("%s", err.text);
    assert_int_equal(again.draft_size, 4);
    assert_memory_equal(again.d2t, map.d2t, 4 * sizeof(*map.d2t));
    assert_memory_equal(again.draft_ids, map.draft_ids, VOCAB * sizeof(*map.draft_ids));
    assert_true(again.coverage == map.coverage);
    vocab_map_release(&again);
    documents_close(&documents);
    must_refuse(place, "t", VOCAB, other_ids, "made from other data");
    must_refuse(place, "t", VOCAB + 1, ids_a,
                "made for a vocabulary of 10 tokens, that of the shards has 11");
    must_refuse(place, "u", VOCAB, ids_a, "made for target t, the shards are of u");
    // Scored documents are others than those that were counted, but of the same target.
    open_data(place, "scored.h5", "t", VOCAB, 8, other_ids, mask_a, &documents);
    assert_int_equal(vocab_map_read(&again, &documents, false, place->map_path, &err), 0);
    vocab_map_release(&again);
    documents_close(&documents);
    vocab_map_release(&map);
}

// The order of the head's rows: kept ids ascending, then the others ascending.
static void the_heads_order_follows_from_the_map(void **state)
{
    static const int64_t counts[VOCAB] = {4, 0, 9, 2, 0, 0, 0, 3, 0, 0};
    static const int32_t order[VOCAB] = {0, 2, 3, 7, 1, 4, 5, 6, 8, 9};
    struct vocab_map map, other;
    (void)state;
    make(&map, counts, 4);
    assert_memory_equal(map.ids, order, sizeof(order));
    make(&other, counts, 3);
    assert_true(vocab_map_hash(&map) != vocab_map_hash(&other));
    vocab_map_release(&other);
    make(&other, counts, 4);
    assert_true(vocab_map_hash(&map) == vocab_map_hash(&other));
    vocab_map_release(&other);
    vocab_map_release(&map);
}

static void coverages_of_sizes(void **state)
{
    static const int64_t counts[VOCAB] = {4, 0, 9, 2, 0, 1, 0, 4, 0, 0}, sizes[] = {1, 3, 5, 10};
    double coverages[4];
    (void)state;
    assert_int_equal(vocab_map_coverages(counts, VOCAB, sizes, 4, coverages), 5);
    assert_true(coverages[0] == 9.0 / 20.0 && coverages[1] == 17.0 / 20.0);
    assert_true(coverages[2] == 1.0 && coverages[3] == 1.0);
    static const int64_t nothing[VOCAB] = {0};
    assert_int_equal(vocab_map_coverages(nothing, VOCAB, sizes, 4, coverages), 0);
    assert_true(coverages[3] == 0.0);
}

static void tables_that_contradict_are_refused(void **state)
{
    const struct place *place = *state;
    static const char *const words[] = {"t2d keeps 5 tokens, d2t has 4", "d2t[3] is 5",
                                        "t2d[0] is 2", "d2t is empty"};
    static const int64_t counts[VOCAB] = {4, 0, 9, 2, 0, 0, 0, 3, 0, 0};
    struct documents documents;
    open_data(place, "a.h5", "t", VOCAB, 8, ids_a, mask_a, &documents);
    for (int i = 0; i < 4; i++) {
        struct vocab_map map, read;
        struct error err = {""};
        make(&map, counts, 4);
        map.t2d[9] = i == 0;
        map.d2t[3] += i == 1;
        map.t2d[0] = i == 2 ? 2 : 1;
        if (i == 3) {
            map.draft_size = 0;
            memset(map.t2d, 0, VOCAB);
        }
        assert_int_equal(vocab_map_write(&map, &documents, place->map_path, &err), 0);
        assert_int_equal(vocab_map_read(&read, &documents, true, place->map_path, &err), -1);
        if (strstr(err.text, words[i]) == NULL)
            fail_msg("\"%s\" is expected, the error is: %s", words[i], err.text);
        vocab_map_release(&map);
    }
    documents_close(&documents);
}

// Replaces the only such text of the file by one of the same length.
static void edit_map(const char *path, const char *text, const char *other)
{
    char bytes[4096];
    FILE *file = fopen(path, "r+b");
    assert_non_null(file);
    size_t size = fread(bytes, 1, sizeof(bytes), file), length = strlen(text), at = 0;
    while (at + length <= size && memcmp(bytes + at, text, length) != 0)
        at++;
    assert_true(at + length <= size && strlen(other) == length);
    assert_int_equal(fseek(file, (long)at, SEEK_SET), 0);
    assert_int_equal(fwrite(other, 1, length, file), length);
    assert_int_equal(fclose(file), 0);
}

static void metadata_of_other_sizes_is_refused(void **state)
{
    static const struct {
        const char *text, *other, *words;
    } edits[] = {
        {"\"vocab_size\":\"10\"", "\"vocab_size\":\"11\"",
         "metadata vocab_size is \"11\", but t2d has 10"},
        {"\"draft_vocab_size\":\"4\"", "\"draft_vocab_size\":\"5\"",
         "metadata draft_vocab_size is \"5\", but d2t has 4"},
        {"\"vocab_size\":\"10\"", "\"vocab_size\":\"1x\"", "metadata vocab_size is \"1x\""},
        {"\"vocab_size\":", "\"vocab_sizE\":", "metadata vocab_size is missing"},
    };
    static const int64_t counts[VOCAB] = {4, 0, 9, 2, 0, 0, 0, 3, 0, 0};
    const struct place *place = *state;
    struct documents documents;
    open_data(place, "a.h5", "t", VOCAB, 8, ids_a, mask_a, &documents);
    for (size_t i = 0; i < sizeof(edits) / sizeof(edits[0]); i++) {
        struct vocab_map map, read;
        struct error err = {""};
        make(&map, counts, 4);
        assert_int_equal(vocab_map_write(&map, &documents, place->map_path, &err), 0);
        edit_map(place->map_path, edits[i].text, edits[i].other);
        assert_int_equal(vocab_map_read(&read, &documents, true, place->map_path, &err), -1);
        if (strstr(err.text, edits[i].words) == NULL)
            fail_msg("\"%s\" is expected, the error is: %s", edits[i].words, err.text);
        vocab_map_release(&map);
    }
    documents_close(&documents);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(offsets_and_members),
        TEST(unseen_tokens_fill_the_rest),
        TEST(sizes_outside_the_vocabulary_are_refused),
        TEST(only_supervised_tokens_count),
        TEST(maps_of_other_data_are_refused),
        TEST(the_heads_order_follows_from_the_map),
        TEST(coverages_of_sizes),
        TEST(tables_that_contradict_are_refused),
        TEST(metadata_of_other_sizes_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
