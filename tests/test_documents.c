// Documents of a data set: which are in, which are left out and why, and the choice of planes.
#include "data/documents.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/memory.h"
#include "data/check.h"
#include "tests/support/shard_edit.h"
#include "tests/support/shard_fixture.h"

enum { SEQ_LEN = 16 };

// A folder with two shards: a.h5 of documents of 5, 12, 40 tokens and b.h5 of 16 and 17.
struct place {
    char *folder;
    char *paths[2];
    struct config_texts list;
    struct fixture fixtures[2];
};

static void write_both(const struct place *place)
{
    for (int i = 0; i < 2; i++)
        fixture_write(&place->fixtures[i], place->paths[i]);
}

static int setup(void **state)
{
    static const int64_t first[] = {5, 12, 40}, second[] = {16, 17};
    struct place *place = memory_alloc(1, sizeof(*place));
    place->folder = fixture_folder();
    place->paths[0] = fixture_path(place->folder, "a.h5");
    place->paths[1] = fixture_path(place->folder, "b.h5");
    place->list = (struct config_texts){.items = place->paths, .count = 2};
    struct fixture_options options = {.seed = 1, .documents = 3, .lengths = first};
    fixture_make(&place->fixtures[0], &options);
    options = (struct fixture_options){.seed = 2, .documents = 2, .lengths = second};
    fixture_make(&place->fixtures[1], &options);
    write_both(place);
    *state = place;
    return 0;
}

static int teardown(void **state)
{
    struct place *place = *state;
    for (int i = 0; i < 2; i++) {
        fixture_release(&place->fixtures[i]);
        free(place->paths[i]);
    }
    fixture_folder_remove(place->folder);
    free(place);
    return 0;
}

static void open_sound(struct documents *documents, const struct place *place, int on_bad_sample)
{
    struct error err = {""};
    if (documents_open(documents, &place->list, SEQ_LEN, on_bad_sample, &err) != 0)
        fail_msg("%s", err.text);
}

static void open_refused(const struct place *place, int on_bad_sample, struct error *err)
{
    struct documents documents;
    err->text[0] = '\0';
    assert_int_equal(documents_open(&documents, &place->list, SEQ_LEN, on_bad_sample, err), -1);
}

static void assert_words(const struct error *err, const char *words)
{
    if (strstr(err->text, words) == NULL)
        fail_msg("no \"%s\" in: %s", words, err->text);
}

static void all_documents_are_known(void **state)
{
    static const int32_t lengths[] = {5, 12, 16, 16, 16}, full[] = {5, 12, 40, 16, 17};
    static const int64_t first[] = {0, 5, 17, 0, 16};
    struct place *place = *state;
    struct documents documents;
    open_sound(&documents, place, BAD_SAMPLE_FAIL);
    assert_int_equal(documents.count, 5);
    assert_int_equal(documents.shard_count, 2);
    for (int i = 0; i < 5; i++) {
        const struct document *document = &documents.items[i];
        int shard = i >= 3, index = i - 3 * shard;
        assert_int_equal(document->length, lengths[i]);
        assert_int_equal(document->full_length, full[i]);
        assert_int_equal(document->first, first[i]);
        assert_int_equal(document->shard, shard);
        assert_int_equal(document->index, index);
        assert_int_equal(document->supervised, lengths[i]);
        assert_true(document->id == place->fixtures[shard].doc_ids[index]);
    }
    assert_int_equal(documents.tokens, 65);
    assert_int_equal(documents.supervised, 65);
    assert_int_equal(documents.cut, 2);
    assert_int_equal(documents.dropped_unsupervised, 0);
    assert_int_equal(documents.hidden_size, 8);
    assert_int_equal(documents.planes, 3);
    assert_int_equal(documents.shard_layers, 2);
    assert_int_equal(documents.vocab_size, 64);
    assert_string_equal(documents.target_model, "fixture");
    documents_close(&documents);
}

// Supervision is judged after the cut.
static void unsupervised_documents_are_left_out(void **state)
{
    struct place *place = *state;
    struct documents documents;
    uint8_t *mask = place->fixtures[0].loss_mask;
    memset(mask, 0, 5 + 12);       // document 0 and most of document 1
    mask[5 + 11] = 1;              // its last token
    memset(mask + 17, 0, SEQ_LEN); // document 2 has supervised tokens only after the cut
    write_both(place);
    open_sound(&documents, place, BAD_SAMPLE_FAIL);
    assert_int_equal(documents.count, 3);
    assert_int_equal(documents.dropped_unsupervised, 2);
    assert_int_equal(documents.items[0].index, 1);
    assert_int_equal(documents.items[0].supervised, 1);
    assert_int_equal(documents.tokens, 12 + 16 + 16);
    assert_int_equal(documents.supervised, 1 + 16 + 16);
    assert_int_equal(documents.cut, 1);
    documents_close(&documents);
}

static void a_set_without_supervision_is_refused(void **state)
{
    struct place *place = *state;
    struct error err;
    memset(place->fixtures[0].loss_mask, 0, 57);
    memset(place->fixtures[1].loss_mask, 0, 33);
    write_both(place);
    open_refused(place, BAD_SAMPLE_FAIL, &err);
    assert_words(&err, "no supervised token");
    assert_words(&err, "5 documents");
    open_refused(place, BAD_SAMPLE_SKIP, &err);
    assert_words(&err, "no supervised token");
}

static void every_fault_is_told(void **state)
{
    struct place *place = *state;
    struct error err;
    place->fixtures[0].input_ids[7] = 64;
    place->fixtures[0].input_ids[9] = -3;
    place->fixtures[0].loss_mask[56] = 3;
    write_both(place);
    edit_remove_attribute(place->paths[1], "last_hidden");
    open_refused(place, BAD_SAMPLE_FAIL, &err);
    assert_words(&err, "a.h5: document 1: row 2: token id 64 is outside 0 .. 63");
    assert_words(&err, "a.h5: document 2: row 39: loss_mask is 3");
    assert_words(&err, "b.h5: attribute last_hidden is missing");
}

static void faults_beyond_a_bound_are_counted(void **state)
{
    struct place *place = *state;
    struct error err;
    struct fixture_options options = {.seed = 3, .documents = 400};
    struct fixture fixture;
    fixture_make(&fixture, &options);
    for (int i = 0; i < 400; i++)
        fixture.input_ids[16 * i + i % 16] = 99;
    fixture_write(&fixture, place->paths[0]);
    open_refused(place, BAD_SAMPLE_FAIL, &err);
    int lines = 1;
    for (const char *at = err.text; (at = strchr(at, '\n')) != NULL; at++)
        lines++;
    char *more = memory_format("\nand %d more", 400 - (lines - 1));
    assert_true(lines > 10 && lines <= 51);
    assert_words(&err, more);
    assert_words(&err, "document 3: row 3: token id 99");
    free(more);
    fixture_release(&fixture);
}

static void bad_tokens_can_be_skipped(void **state)
{
    struct place *place = *state;
    struct documents documents;
    place->fixtures[0].input_ids[7] = 64;
    write_both(place);
    open_sound(&documents, place, BAD_SAMPLE_SKIP);
    assert_int_equal(documents.count, 4);
    assert_int_equal(documents.dropped_bad, 1);
    assert_int_equal(documents.items[1].index, 2);
    documents_close(&documents);
}

static void check_shards(const struct place *place)
{
    struct check_summary summary;
    struct error err = {""};
    FILE *out = fopen("/dev/null", "w");
    const char *paths[] = {place->paths[0], place->paths[1]};
    assert_true(data_check(paths, 2, true, out, &summary, &err) >= 0);
    fclose(out);
}

static void verdicts_leave_documents_out(void **state)
{
    struct place *place = *state;
    struct documents documents, without;
    struct error err;
    fixture_hidden(&place->fixtures[0], 5 + 7, 1)[3] = 0x7fc0;
    write_both(place);
    open_sound(&documents, place, BAD_SAMPLE_FAIL); // values are not read here
    assert_int_equal(documents.count, 5);
    documents_close(&documents);

    check_shards(place);
    open_refused(place, BAD_SAMPLE_FAIL, &err);
    assert_words(&err, "a.h5: document 1: row 7 of plane 1 (layer 3): NaN at element 3");
    open_sound(&documents, place, BAD_SAMPLE_SKIP);
    assert_int_equal(documents.count, 4);
    assert_int_equal(documents.dropped_bad, 1);

    // The same as a data set that never had the document.
    struct fixture_options options = {.seed = 8, .documents = 2, .lengths = (int64_t[]){5, 40}};
    struct fixture fixture;
    fixture_make(&fixture, &options);
    fixture.doc_ids[0] = place->fixtures[0].doc_ids[0];
    fixture.doc_ids[1] = place->fixtures[0].doc_ids[2];
    fixture_write(&fixture, place->paths[0]);
    open_sound(&without, place, BAD_SAMPLE_SKIP); // the verdict is of another file now
    assert_int_equal(without.count, documents.count);
    assert_int_equal(without.dropped_bad, 0);
    for (size_t i = 0; i < documents.count; i++) {
        assert_true(without.items[i].id == documents.items[i].id);
        assert_int_equal(without.items[i].length, documents.items[i].length);
    }
    assert_true(without.kept_fingerprint == documents.kept_fingerprint);
    fixture_release(&fixture);
    documents_close(&documents);
    documents_close(&without);
}

static void damaged_verdicts_are_refused(void **state)
{
    struct place *place = *state;
    struct error err;
    char *path = memory_format("%s.verdict.json", place->paths[1]);
    FILE *file = fopen(path, "w");
    fputs("{\"format\":", file);
    fclose(file);
    open_refused(place, BAD_SAMPLE_SKIP, &err);
    assert_words(&err, path);
    free(path);
}

static void duplicate_ids_name_both_places(void **state)
{
    struct place *place = *state;
    struct error err;
    place->fixtures[1].doc_ids[1] = place->fixtures[0].doc_ids[2];
    place->fixtures[0].doc_ids[1] = place->fixtures[0].doc_ids[0];
    write_both(place);
    open_refused(place, BAD_SAMPLE_SKIP, &err);
    char *within = memory_format("%s: document 1: doc_id %llu is also that of document 0 of %s",
                                 place->paths[0], (unsigned long long)place->fixtures[0].doc_ids[0],
                                 place->paths[0]);
    char *across = memory_format("%s: document 1: doc_id %llu is also that of document 2 of %s",
                                 place->paths[1], (unsigned long long)place->fixtures[0].doc_ids[2],
                                 place->paths[0]);
    assert_words(&err, within);
    assert_words(&err, across);
    free(within);
    free(across);
}

static void the_same_file_twice_is_refused(void **state)
{
    struct place *place = *state;
    struct error err;
    char *paths[] = {place->paths[0], place->paths[0]};
    struct place twice = {.list = {.items = paths, .count = 2}};
    open_refused(&twice, BAD_SAMPLE_FAIL, &err);
    assert_words(&err, "is also that of document 0");
    edit_remove_dataset(place->paths[0], "doc_id");
    open_refused(&twice, BAD_SAMPLE_FAIL, &err);
    assert_words(&err, "made from the file's name");
}

static void made_ids_work(void **state)
{
    struct place *place = *state;
    struct documents documents;
    edit_remove_dataset(place->paths[0], "doc_id");
    edit_remove_dataset(place->paths[1], "doc_id");
    open_sound(&documents, place, BAD_SAMPLE_FAIL);
    assert_int_equal(documents.count, 5);
    assert_true(documents.items[0].id != documents.items[3].id);
    documents_close(&documents);
}

static void shards_that_disagree_are_refused(void **state)
{
    struct place *place = *state;
    struct error err;
    struct fixture_options options = {.seed = 4, .hidden_size = 16, .layers = 3};
    fixture_shard(place->paths[1], &options);
    open_refused(place, BAD_SAMPLE_SKIP, &err);
    assert_words(&err, "b.h5: hidden_size is 16, but 8 in ");
    assert_words(&err, "b.h5: the number of target_layer_ids is 3, but 2 in ");
}

static uint64_t fingerprint_of(const struct place *place)
{
    struct documents documents;
    open_sound(&documents, place, BAD_SAMPLE_FAIL);
    uint64_t fingerprint = documents.fingerprint;
    documents_close(&documents);
    return fingerprint;
}

static void the_fingerprint_sees_ids_lengths_and_masks(void **state)
{
    struct place *place = *state;
    uint64_t original = fingerprint_of(place);
    struct fixture *fixture = &place->fixtures[0];
    assert_true(fingerprint_of(place) == original);

    fixture->loss_mask[3] = 0;
    write_both(place);
    assert_true(fingerprint_of(place) != original);
    fixture->loss_mask[3] = 1;

    fixture->input_ids[3] ^= 1;
    write_both(place);
    assert_true(fingerprint_of(place) != original);
    fixture->input_ids[3] ^= 1;

    fixture->doc_ids[1]++;
    write_both(place);
    assert_true(fingerprint_of(place) != original);
    fixture->doc_ids[1]--;

    fixture->doc_offsets[1]++;
    write_both(place);
    assert_true(fingerprint_of(place) != original);
    fixture->doc_offsets[1]--;

    write_both(place);
    assert_true(fingerprint_of(place) == original);
    char *first = place->paths[0];
    place->paths[0] = place->paths[1];
    place->paths[1] = first;
    assert_true(fingerprint_of(place) != original);
}

// Shards of layers 1, 8, 15, 22, 29 and the last hidden state.
static void open_layers(const struct place *place, enum last_hidden last_hidden,
                        struct documents *documents)
{
    static const int32_t layers[] = {1, 8, 15, 22, 29};
    struct place one = {.list = {.items = (char **)place->paths, .count = 1}};
    struct fixture_options options = {
        .seed = 5, .layers = 5, .layer_ids = layers, .last_hidden = last_hidden};
    fixture_shard(place->paths[0], &options);
    open_sound(documents, &one, BAD_SAMPLE_FAIL);
}

static void planes_are_selected_in_order(void **state)
{
    struct place *place = *state;
    struct documents documents;
    struct error err = {""};
    int32_t plane[5], last;
    int64_t layers, some[] = {8, 29};
    struct config_ints none = {NULL, 0}, two = {some, 2};
    open_layers(place, LAST_HIDDEN_PRE_NORM, &documents);
    assert_int_equal(documents_select_planes(&documents, &none, 32, plane, 5, &layers, &last, &err),
                     0);
    assert_int_equal(layers, 5);
    for (int i = 0; i < 5; i++)
        assert_int_equal(plane[i], i);
    assert_int_equal(last, 5);
    assert_int_equal(documents_select_planes(&documents, &two, 32, plane, 5, &layers, &last, &err),
                     0);
    assert_int_equal(layers, 2);
    assert_int_equal(plane[0], 1);
    assert_int_equal(plane[1], 4);
    assert_int_equal(last, 5);
    assert_int_equal(documents_select_planes(&documents, &two, 32, plane, 1, &layers, &last, &err),
                     -1);
    documents_close(&documents);
    open_layers(place, LAST_HIDDEN_ABSENT, &documents);
    assert_int_equal(documents_select_planes(&documents, &none, 32, plane, 5, &layers, &last, &err),
                     0);
    assert_int_equal(last, -1);
    documents_close(&documents);
}

static void bad_layer_ids_are_named(void **state)
{
    static int64_t twice[] = {1, 8, 8, 22, 29}, negative[] = {-1, 8, 15, 22, 29},
                   beyond[] = {1, 8, 15, 22, 32}, order[] = {8, 1, 15, 22, 29},
                   elsewhere[] = {1, 8, 15, 22, 28};
    static const struct {
        int64_t *ids;
        const char *words;
    } cases[] = {
        {twice, "target.layer_ids: 8 is given twice"},
        {negative, "target.layer_ids: -1 is not a layer of the target (0 to 31)"},
        {beyond, "target.layer_ids: 32 is not a layer of the target (0 to 31)"},
        {order, "target.layer_ids: 1 comes after 8"},
        {elsewhere, "layer 28 is not in the shards, which hold 1, 8, 15, 22, 29"},
    };
    struct place *place = *state;
    struct documents documents;
    int32_t plane[5], last;
    int64_t layers;
    open_layers(place, LAST_HIDDEN_PRE_NORM, &documents);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct error err = {""};
        struct config_ints ids = {cases[i].ids, 5};
        assert_int_equal(
            documents_select_planes(&documents, &ids, 32, plane, 5, &layers, &last, &err), -1);
        assert_words(&err, cases[i].words);
        assert_null(strchr(err.text, '\n'));
    }
    // Ids of the shards that the target can not have mean another numbering, whichever are selected.
    struct error err = {""};
    struct config_ints first = {(int64_t[]){1}, 1};
    assert_int_equal(
        documents_select_planes(&documents, &first, 29, plane, 5, &layers, &last, &err), -1);
    assert_words(&err, "target_layer_ids holds 29, but the target has 29 layers (0 to 28)");
    documents_close(&documents);
}

static void no_shards_are_refused(void **state)
{
    (void)state;
    struct place none = {.list = {NULL, 0}};
    struct error err;
    open_refused(&none, BAD_SAMPLE_FAIL, &err);
    assert_words(&err, "no shards");
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(all_documents_are_known),
        TEST(unsupervised_documents_are_left_out),
        TEST(a_set_without_supervision_is_refused),
        TEST(every_fault_is_told),
        TEST(faults_beyond_a_bound_are_counted),
        TEST(bad_tokens_can_be_skipped),
        TEST(verdicts_leave_documents_out),
        TEST(damaged_verdicts_are_refused),
        TEST(duplicate_ids_name_both_places),
        TEST(the_same_file_twice_is_refused),
        TEST(made_ids_work),
        TEST(shards_that_disagree_are_refused),
        TEST(the_fingerprint_sees_ids_lengths_and_masks),
        TEST(planes_are_selected_in_order),
        TEST(bad_layer_ids_are_named),
        TEST(no_shards_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
