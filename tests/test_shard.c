// Shards: what is written is read back, every storage that h5py may choose is read the same, and every
// structural fault is refused by name.
#include "data/shard.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/memory.h"
#include "tests/support/shard_edit.h"
#include "tests/support/shard_fixture.h"

// A folder with one shard of three documents of 5, 12 and 17 tokens: 34 tokens, 3 planes, H 8.
static const int64_t lengths[] = {5, 12, 17};
enum { DOCUMENTS = 3, TOKENS = 34, PLANES = 3, HIDDEN = 8, VOCAB = 64 };

static int setup(void **state)
{
    struct shard_place *place = memory_alloc(1, sizeof(*place));
    struct fixture_options options = {
        .seed = 5, .documents = DOCUMENTS, .lengths = lengths, .crc = true, .teacher = true};
    place->folder = fixture_folder();
    place->path = fixture_path(place->folder, "a.h5");
    fixture_make(&place->fixture, &options);
    for (int i = 0; i < TOKENS; i += 3)
        place->fixture.loss_mask[i] = 0;
    fixture_write(&place->fixture, place->path);
    *state = place;
    return 0;
}

static void open_sound(struct shard *shard, const char *path)
{
    struct error err = {""};
    if (shard_open(shard, path, &err) != 0)
        fail_msg("%s", err.text);
}

// The shard holds exactly the fixture's values.
static void assert_holds(const char *path, const struct fixture *fixture)
{
    struct shard shard;
    struct error err = {""};
    open_sound(&shard, path);
    int32_t ids[TOKENS], top1[TOKENS];
    uint8_t mask[TOKENS];
    float logit[TOKENS], lse[TOKENS];
    bf16 hidden[TOKENS * PLANES * HIDDEN];
    memset(ids, 0x5a, sizeof(ids));
    memset(hidden, 0x5a, sizeof(hidden));
    assert_int_equal(shard.tokens, TOKENS);
    assert_int_equal(shard.documents, DOCUMENTS);
    assert_int_equal(shard.planes, PLANES);
    assert_int_equal(shard.hidden_size, HIDDEN);
    assert_int_equal(shard.vocab_size, VOCAB);
    assert_int_equal(shard.layers, 2);
    assert_int_equal(shard.layer_ids[0], 1);
    assert_int_equal(shard.layer_ids[1], 3);
    assert_int_equal(shard.last_hidden, fixture->content.last_hidden);
    assert_string_equal(shard.target_model, "fixture");
    assert_memory_equal(shard.doc_offsets, fixture->doc_offsets, sizeof(int64_t) * 4);
    assert_memory_equal(shard.doc_ids, fixture->doc_ids, sizeof(uint64_t) * 3);
    assert_int_equal(shard_read_ids(&shard, 0, TOKENS, ids, &err), 0);
    assert_int_equal(shard_read_mask(&shard, 0, TOKENS, mask, &err), 0);
    // In two pieces that no chunk border matches.
    assert_int_equal(shard_read_hidden(&shard, 0, 11, hidden, &err), 0);
    assert_int_equal(
        shard_read_hidden(&shard, 11, TOKENS - 11, hidden + 11 * PLANES * HIDDEN, &err), 0);
    assert_memory_equal(ids, fixture->input_ids, sizeof(ids));
    assert_memory_equal(mask, fixture->loss_mask, sizeof(mask));
    assert_memory_equal(hidden, fixture->hidden_states, sizeof(hidden));
    assert_true(shard.has_teacher);
    assert_int_equal(shard_read_teacher(&shard, 0, TOKENS, top1, logit, lse, &err), 0);
    assert_memory_equal(top1, fixture->teacher_top1, sizeof(top1));
    assert_memory_equal(logit, fixture->teacher_top1_logit, sizeof(logit));
    assert_memory_equal(lse, fixture->teacher_lse, sizeof(lse));
    for (int64_t d = 0; d < DOCUMENTS; d++) {
        int64_t first = shard.doc_offsets[d], length = shard.doc_offsets[d + 1] - first;
        assert_int_equal(shard_check_document(&shard, d, length, ids + first, mask + first,
                                              hidden + first * PLANES * HIDDEN, true, &err),
                         0);
    }
    shard_close(&shard);
}

static void refused(const char *path, const char *const *words, size_t count)
{
    struct shard shard;
    struct error err = {""};
    if (shard_open(&shard, path, &err) == 0)
        fail_msg("accepted, but \"%s\" is expected", words[0]);
    if (strstr(err.text, path) == NULL)
        fail_msg("no file name in: %s", err.text);
    for (size_t i = 0; i < count; i++)
        if (strstr(err.text, words[i]) == NULL)
            fail_msg("no \"%s\" in: %s", words[i], err.text);
}
#define assert_refused(path, ...)                                                                  \
    do {                                                                                           \
        const char *const words[] = {__VA_ARGS__};                                                 \
        refused(path, words, sizeof(words) / sizeof(words[0]));                                    \
    } while (0)

static void round_trip_is_bitwise(void **state)
{
    struct shard_place *place = *state;
    assert_holds(place->path, &place->fixture);
}

static void datasets_are_contiguous_and_aligned(void **state)
{
    static const char *const names[] = {"doc_offsets",  "doc_id",      "doc_crc32c",
                                        "input_ids",    "loss_mask",   "hidden_states",
                                        "teacher_top1", "teacher_lse", "teacher_top1_logit"};
    struct shard_place *place = *state;
    hid_t file = H5Fopen(place->path, H5F_ACC_RDONLY, H5P_DEFAULT);
    assert_true(file >= 0);
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        hid_t id = H5Dopen2(file, names[i], H5P_DEFAULT);
        hid_t options = H5Dget_create_plist(id);
        assert_int_equal(H5Pget_layout(options), H5D_CONTIGUOUS);
        assert_int_equal(H5Pget_nfilters(options), 0);
        assert_true(H5Dget_offset(id) != HADDR_UNDEF);
        assert_int_equal(H5Dget_offset(id) % 4096, 0);
        H5Pclose(options);
        H5Dclose(id);
    }
    H5Fclose(file);
}

static void no_temporary_file_stays(void **state)
{
    struct shard_place *place = *state;
    char *missing = fixture_path(place->folder, "no-such-folder/b.h5");
    struct error err = {""};
    assert_int_equal(shard_write(missing, &place->fixture.content, &err), -1);
    assert_non_null(strstr(err.text, missing));
    free(missing);
    char *command = memory_format("test \"$(ls %s)\" = a.h5", place->folder);
    assert_int_equal(system(command), 0);
    free(command);
}

static void integers_of_any_width(void **state)
{
    struct shard_place *place = *state;
    struct edit_form wide = {.type = H5T_STD_I64LE}, narrow = {.type = H5T_STD_U8LE},
                     big = {.type = H5T_STD_I32BE}, unsigned_wide = {.type = H5T_STD_U64LE};
    int64_t value = HIDDEN, version = 1, layers[] = {1, 3};
    edit_rewrite_dataset(place->path, "input_ids", &wide);
    edit_rewrite_dataset(place->path, "loss_mask", &wide);
    edit_rewrite_dataset(place->path, "doc_offsets", &narrow);
    edit_rewrite_dataset(place->path, "teacher_top1", &big);
    edit_rewrite_dataset(place->path, "doc_crc32c", &unsigned_wide);
    edit_integer_attribute(place->path, "hidden_size", H5T_STD_U8LE, &value, 0);
    edit_integer_attribute(place->path, "format_version", H5T_STD_I16BE, &version, 1);
    edit_integer_attribute(place->path, "target_layer_ids", H5T_STD_I64LE, layers, 2);
    assert_holds(place->path, &place->fixture);
    edit_rewrite_dataset(place->path, "input_ids", &narrow);
    edit_rewrite_dataset(place->path, "loss_mask", &big);
    edit_rewrite_dataset(place->path, "doc_offsets", &big);
    assert_holds(place->path, &place->fixture);
}

// A mask below 0 must not read as 0.
static void negative_masks_stay_wrong(void **state)
{
    struct shard_place *place = *state;
    hsize_t shape = TOKENS;
    int64_t masks[TOKENS] = {1, -1, -100, 257, 1};
    uint8_t mask[5];
    struct shard shard;
    struct error err = {""};
    edit_replace_dataset(place->path, "loss_mask", 1, &shape, H5T_NATIVE_INT64, masks);
    open_sound(&shard, place->path);
    assert_int_equal(shard_read_mask(&shard, 0, 5, mask, &err), 0);
    assert_memory_equal(mask, ((uint8_t[]){1, 255, 255, 255, 1}), 5);
    shard_close(&shard);
}

static void booleans_as_h5py_writes_them(void **state)
{
    struct shard_place *place = *state;
    hid_t type = H5Tenum_create(H5T_STD_I8LE);
    int8_t no = 0, yes = 1;
    hsize_t shape = TOKENS;
    H5Tenum_insert(type, "FALSE", &no);
    H5Tenum_insert(type, "TRUE", &yes);
    edit_replace_dataset(place->path, "loss_mask", 1, &shape, type, place->fixture.loss_mask);
    H5Tclose(type);
    assert_holds(place->path, &place->fixture);
}

static void signed_bits_of_features(void **state)
{
    struct shard_place *place = *state;
    hsize_t shape[] = {TOKENS, PLANES, HIDDEN};
    edit_replace_dataset(place->path, "hidden_states", 3, shape, H5T_STD_I16LE,
                         place->fixture.hidden_states);
    assert_holds(place->path, &place->fixture);
}

static void strings_fixed_or_variable(void **state)
{
    static const char *const names[] = {"format", "target_model", "dtype", "last_hidden"};
    static const char *const texts[] = {"dtrain-features", "fixture", "bfloat16", "pre_norm"};
    struct shard_place *place = *state;
    for (int variable = 0; variable < 2; variable++) {
        for (int i = 3; i >= 0; i--)
            edit_text_attribute(place->path, names[i], texts[i], variable != 0);
        edit_text_attribute(place->path, "an_unknown_one", "is ignored", variable != 0);
        assert_holds(place->path, &place->fixture);
    }
}

static void every_layout_is_read_the_same(void **state)
{
    struct shard_place *place = *state;
    struct edit_form forms[] = {
        {.layout = EDIT_CHUNKED, .chunk = {7, PLANES, HIDDEN}},
        {.layout = EDIT_CHUNKED, .chunk = {5, 2, 3}},
        {.layout = EDIT_DEFLATED, .chunk = {10, PLANES, HIDDEN}},
        {.layout = EDIT_DEFLATED, .chunk = {1, 1, HIDDEN}},
        {.layout = EDIT_COMPACT},
        {.layout = EDIT_CONTIGUOUS},
    };
    for (size_t i = 0; i < sizeof(forms) / sizeof(forms[0]); i++) {
        edit_rewrite_dataset(place->path, "hidden_states", &forms[i]);
        edit_rewrite_dataset(place->path, "input_ids", &forms[i]);
        edit_rewrite_dataset(place->path, "loss_mask", &forms[i]);
        edit_rewrite_dataset(place->path, "teacher_lse", &forms[i]);
        forms[i].chunk[0] = 2;
        edit_rewrite_dataset(place->path, "doc_offsets", &forms[i]);
        edit_rewrite_dataset(place->path, "doc_id", &forms[i]);
        assert_holds(place->path, &place->fixture);
    }
}

static void floats_of_any_width(void **state)
{
    struct shard_place *place = *state;
    struct edit_form form = {.type = H5T_IEEE_F64LE};
    edit_rewrite_dataset(place->path, "teacher_lse", &form);
    form.type = H5T_IEEE_F32BE;
    edit_rewrite_dataset(place->path, "teacher_top1_logit", &form);
    assert_holds(place->path, &place->fixture);
}

static void a_user_block_shifts_nothing(void **state)
{
    struct shard_place *place = *state;
    if (system("command -v h5jam > /dev/null") != 0)
        skip(); // the package hdf5-tools
    char *other = fixture_path(place->folder, "b.h5");
    struct edit_form chunked = {.layout = EDIT_CHUNKED, .chunk = {7, PLANES, HIDDEN}};
    char *command = memory_format("head -c 512 /dev/zero | tr '\\0' x > %s.block && "
                                  "h5jam -i %s -u %s.block -o %s",
                                  other, place->path, other, other);
    assert_int_equal(system(command), 0);
    assert_holds(other, &place->fixture);
    edit_rewrite_dataset(other, "hidden_states", &chunked);
    assert_holds(other, &place->fixture);
    free(command);
    free(other);
}

struct reader {
    pthread_t thread;
    const struct shard *shard;
    const struct fixture *fixture;
    int64_t first;
    int wrong;
};

static void *read_repeatedly(void *argument)
{
    struct reader *reader = argument;
    bf16 hidden[9 * PLANES * HIDDEN];
    int32_t ids[9];
    struct error err = {""};
    for (int i = 0; i < 400; i++) {
        int64_t first = (reader->first + 7 * i) % (TOKENS - 8), count = 1 + i % 9;
        count = first + count > TOKENS ? TOKENS - first : count;
        const bf16 *wanted = reader->fixture->hidden_states + first * PLANES * HIDDEN;
        reader->wrong += shard_read_hidden(reader->shard, first, count, hidden, &err) != 0;
        reader->wrong += shard_read_ids(reader->shard, first, count, ids, &err) != 0;
        reader->wrong +=
            memcmp(hidden, wanted, (size_t)(count * PLANES * HIDDEN) * sizeof(bf16)) != 0;
        reader->wrong +=
            memcmp(ids, reader->fixture->input_ids + first, (size_t)count * sizeof(int32_t)) != 0;
    }
    return NULL;
}

static void read_from_threads(const struct shard_place *place)
{
    enum { READERS = 4 };
    struct reader readers[READERS];
    struct shard shard;
    open_sound(&shard, place->path);
    for (int i = 0; i < READERS; i++) {
        readers[i] = (struct reader){.shard = &shard, .fixture = &place->fixture, .first = 3 * i};
        assert_int_equal(pthread_create(&readers[i].thread, NULL, read_repeatedly, &readers[i]), 0);
    }
    for (int i = 0; i < READERS; i++) {
        pthread_join(readers[i].thread, NULL);
        assert_int_equal(readers[i].wrong, 0);
    }
    shard_close(&shard);
}

static void threads_read_at_once(void **state)
{
    struct shard_place *place = *state;
    struct edit_form filtered = {.layout = EDIT_DEFLATED, .chunk = {10, PLANES, HIDDEN}};
    read_from_threads(place);
    edit_rewrite_dataset(place->path, "hidden_states", &filtered);
    read_from_threads(place);
}

static void ids_are_made_from_name_and_index(void **state)
{
    struct shard_place *place = *state;
    struct shard shard, again;
    char *other = fixture_path(place->folder, "b.h5");
    edit_remove_dataset(place->path, "doc_id");
    open_sound(&shard, place->path);
    open_sound(&again, place->path);
    assert_false(shard.has_doc_ids);
    assert_memory_equal(shard.doc_ids, again.doc_ids, sizeof(uint64_t) * DOCUMENTS);
    assert_true(shard.doc_ids[0] != shard.doc_ids[1]);
    shard_close(&again);
    assert_int_equal(rename(place->path, other), 0);
    open_sound(&again, other);
    assert_true(shard.doc_ids[0] != again.doc_ids[0]);
    shard_close(&again);
    shard_close(&shard);
    free(other);
}

static void missing_attributes_are_refused(void **state)
{
    static const char *const names[] = {"format",     "format_version", "target_model",
                                        "dtype",      "hidden_size",    "target_layer_ids",
                                        "vocab_size", "last_hidden"};
    struct shard_place *place = *state;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        fixture_write(&place->fixture, place->path);
        edit_remove_attribute(place->path, names[i]);
        assert_refused(place->path, names[i], "missing");
    }
}

static void every_fault_of_the_attributes_is_told(void **state)
{
    struct shard_place *place = *state;
    int64_t zero = 0;
    edit_remove_attribute(place->path, "last_hidden");
    edit_text_attribute(place->path, "dtype", "float16", true);
    edit_integer_attribute(place->path, "vocab_size", H5T_STD_I64LE, &zero, 0);
    assert_refused(place->path, "last_hidden is missing", "float16", "vocab_size is 0");
}

static void wrong_attributes_are_refused(void **state)
{
    struct shard_place *place = *state;
    const char *path = place->path;
    int64_t newer = 2, large = 9;
    edit_text_attribute(path, "format", "something", false);
    assert_refused(path, "format is \"something\"");
    fixture_write(&place->fixture, path);
    edit_integer_attribute(path, "format_version", H5T_STD_I32LE, &newer, 0);
    assert_refused(path, "format_version 2 is newer");
    fixture_write(&place->fixture, path);
    edit_text_attribute(path, "dtype", "float8_e4m3", true);
    assert_refused(path, "hidden_states has little-endian integers of 16 bits", "as uint8",
                   "scales", "last_hidden");
    edit_text_attribute(path, "dtype", "float32", true);
    assert_refused(path, "dtype is \"float32\"");
    fixture_write(&place->fixture, path);
    edit_text_attribute(path, "last_hidden", "normed", true);
    assert_refused(path, "last_hidden is \"normed\"", "post_norm");
    fixture_write(&place->fixture, path);
    edit_text_attribute(path, "hidden_size", "8", true);
    assert_refused(path, "hidden_size is not an integer");
    edit_integer_attribute(path, "hidden_size", H5T_STD_I32LE, &large, 0);
    assert_refused(path, "hidden_states is 8 wide", "hidden_size is 9");
    fixture_write(&place->fixture, path);
    edit_integer_attribute(path, "target_model", H5T_STD_I32LE, &large, 0);
    assert_refused(path, "target_model is not one string");
}

static void wrong_layer_ids_are_refused(void **state)
{
    struct shard_place *place = *state;
    int64_t twice[] = {8, 8}, negative[] = {-1, 3}, descending[] = {3, 1}, three[] = {1, 3, 5};
    edit_integer_attribute(place->path, "target_layer_ids", H5T_STD_I32LE, twice, 2);
    assert_refused(place->path, "target_layer_ids holds 8 twice");
    edit_integer_attribute(place->path, "target_layer_ids", H5T_STD_I32LE, negative, 2);
    assert_refused(place->path, "target_layer_ids holds -1");
    edit_integer_attribute(place->path, "target_layer_ids", H5T_STD_I32LE, descending, 2);
    assert_refused(place->path, "not ascending", "1 comes after 3");
    edit_integer_attribute(place->path, "target_layer_ids", H5T_STD_I32LE, three, 3);
    assert_refused(place->path, "hidden_states has 3 planes", "3 layer ids and a last hidden");
}

static void an_absent_last_hidden_state_has_no_plane(void **state)
{
    struct shard_place *place = *state;
    struct shard shard;
    edit_text_attribute(place->path, "last_hidden", "absent", true);
    assert_refused(place->path, "hidden_states has 3 planes; 2 layer ids make 2");
    struct fixture_options options = {.seed = 1, .last_hidden = LAST_HIDDEN_ABSENT};
    fixture_shard(place->path, &options);
    open_sound(&shard, place->path);
    assert_int_equal(shard.planes, 2);
    assert_int_equal(shard.last_hidden, LAST_HIDDEN_ABSENT);
    shard_close(&shard);
}

static void missing_datasets_are_refused(void **state)
{
    static const char *const names[] = {"doc_offsets", "input_ids", "loss_mask", "hidden_states",
                                        "teacher_lse"};
    struct shard_place *place = *state;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        fixture_write(&place->fixture, place->path);
        edit_remove_dataset(place->path, names[i]);
        assert_refused(place->path, names[i], "missing");
    }
}

static void rows_that_disagree_are_refused(void **state)
{
    struct shard_place *place = *state;
    struct edit_form shorter = {.rows = TOKENS - 1}, longer = {.rows = TOKENS + 1},
                     much_shorter = {.rows = 16};
    edit_rewrite_dataset(place->path, "hidden_states", &shorter);
    edit_rewrite_dataset(place->path, "loss_mask", &longer);
    edit_rewrite_dataset(place->path, "teacher_lse", &much_shorter);
    assert_refused(place->path,
                   "hidden_states has 33 rows for 34 tokens: row 16 of document 2 is missing",
                   "loss_mask has 35 rows for 34 tokens",
                   "teacher_lse has 16 rows for 34 tokens: row 11 of document 1 is missing");
    fixture_write(&place->fixture, place->path);
    edit_rewrite_dataset(place->path, "input_ids", &shorter);
    assert_refused(place->path, "document 2 ends at token 34; input_ids has 33");
    fixture_write(&place->fixture, place->path);
    shorter.rows = 2;
    edit_rewrite_dataset(place->path, "doc_id", &shorter);
    assert_refused(place->path, "doc_id has 2 values for 3 documents");
}

static void bad_offsets_are_refused(void **state)
{
    struct shard_place *place = *state;
    hsize_t shape = 4;
    int64_t late[] = {1, 5, 17, 34}, back[] = {0, 17, 5, 34}, empty[] = {0, 5, 5, 34};
    int64_t beyond[] = {0, 5, 17, INT64_MAX}, negative[] = {0, INT64_MIN, 17, 34};
    edit_replace_dataset(place->path, "doc_offsets", 1, &shape, H5T_NATIVE_INT64, late);
    assert_refused(place->path, "document 0 begins at token 1");
    edit_replace_dataset(place->path, "doc_offsets", 1, &shape, H5T_NATIVE_INT64, back);
    assert_refused(place->path, "document 1 begins at token 17 and ends at 5");
    edit_replace_dataset(place->path, "doc_offsets", 1, &shape, H5T_NATIVE_INT64, empty);
    assert_refused(place->path, "document 1 begins at token 5 and ends at 5");
    edit_replace_dataset(place->path, "doc_offsets", 1, &shape, H5T_NATIVE_INT64, beyond);
    assert_refused(place->path, "document 2", "doc_offsets");
    edit_replace_dataset(place->path, "doc_offsets", 1, &shape, H5T_NATIVE_INT64, negative);
    assert_refused(place->path, "document 0", "doc_offsets");
}

static void shards_without_documents_are_refused(void **state)
{
    struct shard_place *place = *state;
    hsize_t one = 1, none = 0;
    int64_t zero = 0;
    edit_replace_dataset(place->path, "doc_offsets", 1, &one, H5T_NATIVE_INT64, &zero);
    assert_refused(place->path, "no documents");
    edit_replace_dataset(place->path, "doc_offsets", 1, &none, H5T_NATIVE_INT64, NULL);
    assert_refused(place->path, "no documents");
}

static void other_types_of_features_are_refused(void **state)
{
    struct shard_place *place = *state;
    hsize_t shape[] = {TOKENS, PLANES, HIDDEN}, flat[] = {TOKENS, PLANES * HIDDEN};
    hid_t half = H5Tcopy(H5T_IEEE_F32LE);
    H5Tset_fields(half, 15, 10, 5, 0, 10);
    H5Tset_size(half, 2);
    H5Tset_ebias(half, 15);
    edit_replace_dataset(place->path, "hidden_states", 3, shape, half,
                         place->fixture.hidden_states);
    assert_refused(place->path, "hidden_states is float16");
    H5Tclose(half);
    float *wide = memory_alloc(TOKENS * PLANES * HIDDEN, sizeof(*wide));
    edit_replace_dataset(place->path, "hidden_states", 3, shape, H5T_IEEE_F32LE, wide);
    free(wide);
    assert_refused(place->path, "hidden_states is float32");
    edit_replace_dataset(place->path, "hidden_states", 3, shape, H5T_STD_U8LE,
                         place->fixture.hidden_states);
    assert_refused(place->path, "hidden_states has little-endian integers of 8 bits");
    edit_replace_dataset(place->path, "hidden_states", 3, shape, H5T_STD_U16BE,
                         place->fixture.hidden_states);
    assert_refused(place->path, "big-endian");
    edit_replace_dataset(place->path, "hidden_states", 2, flat, H5T_STD_U16LE,
                         place->fixture.hidden_states);
    assert_refused(place->path, "hidden_states has 2 dimensions");
    fixture_write(&place->fixture, place->path);
    edit_replace_dataset(place->path, "loss_mask", 1, shape, H5T_IEEE_F32LE,
                         place->fixture.teacher_lse);
    assert_refused(place->path, "loss_mask must hold integers");
}

static void data_that_is_not_there_is_refused(void **state)
{
    struct shard_place *place = *state;
    hsize_t shape[] = {TOKENS, PLANES, HIDDEN};
    char *other = fixture_path(place->folder, "b.h5");
    fixture_write(&place->fixture, other);
    edit_replace_dataset(place->path, "hidden_states", 3, shape, H5T_STD_U16LE, NULL);
    assert_refused(place->path, "hidden_states", "never written");
    fixture_write(&place->fixture, place->path);
    edit_external_link(place->path, "hidden_states", other);
    assert_refused(place->path, "hidden_states", "is a link");
    free(other);
}

static void truncated_files_name_both_sizes(void **state)
{
    struct shard_place *place = *state;
    struct stat status;
    assert_int_equal(stat(place->path, &status), 0);
    int64_t size = status.st_size, cut = size * 6 / 10;
    edit_cut(place->path, cut);
    char *sizes =
        memory_format("has %lld bytes, its header says %lld", (long long)cut, (long long)size);
    assert_refused(place->path, "truncated", sizes);
    free(sizes);
    edit_cut(place->path, 3);
    assert_refused(place->path, "not a readable HDF5 file");
    edit_cut(place->path, 0);
    assert_refused(place->path, "empty file");
    edit_cut(place->path, 100000);
    assert_refused(place->path, "not a readable HDF5 file");
}

static void what_is_no_file_is_refused(void **state)
{
    struct shard_place *place = *state;
    char *missing = fixture_path(place->folder, "missing.h5");
    assert_refused(place->folder, "not a regular file");
    assert_refused(missing, "No such file");
    free(missing);
}

// Values of document 1 (12 tokens) after a change, as lines.
static void check_changed(const struct shard_place *place, bool check_crc, struct error *err)
{
    const struct fixture *fixture = &place->fixture;
    struct shard shard;
    int64_t first = fixture->doc_offsets[1], length = fixture->doc_offsets[2] - first;
    open_sound(&shard, place->path);
    err->text[0] = '\0';
    int result = shard_check_document(&shard, 1, length, fixture->input_ids + first,
                                      fixture->loss_mask + first, fixture_hidden(fixture, first, 0),
                                      check_crc, err);
    assert_int_equal(result, err->text[0] != '\0' ? -1 : 0);
    shard_close(&shard);
}

static void assert_told(const struct shard_place *place, bool check_crc, const char *words)
{
    struct error err;
    check_changed(place, check_crc, &err);
    char *line = memory_format("%s: document 1: %s", place->path, words);
    if (strncmp(err.text, line, strlen(line)) != 0)
        fail_msg("\"%s\" is expected, told was: %s", line, err.text);
    if (strchr(err.text, '\n') != NULL)
        fail_msg("more than one fault: %s", err.text);
    free(line);
}

static void bad_values_are_told_by_row_and_plane(void **state)
{
    struct shard_place *place = *state;
    struct fixture *fixture = &place->fixture;
    bf16 *value = fixture_hidden(fixture, 5 + 7, 1) + 3, kept = *value;
    *value = 0x7fc1;
    assert_told(place, false, "row 7 of plane 1 (layer 3): NaN at element 3 (1 in the document)");
    *value = 0xff80;
    assert_told(place, false, "row 7 of plane 1 (layer 3): inf at element 3");
    *value = kept;
    value = fixture_hidden(fixture, 5 + 11, 2) + 7;
    *value = 0xffff;
    assert_told(place, false, "row 11 of plane 2 (last hidden state): NaN at element 7");
    *value = bf16_from_float(1e38f);
    assert_told(place, true, "its bytes have CRC-32C");
    fixture->input_ids[5 + 4] = VOCAB;
    assert_told(place, false, "row 4: token id 64 is outside 0 .. 63");
    fixture->input_ids[5 + 4] = -1;
    assert_told(place, false, "row 4: token id -1");
    fixture->input_ids[5 + 4] = VOCAB - 1;
    fixture->loss_mask[5 + 2] = 2;
    assert_told(place, false, "row 2: loss_mask is 2");
}

static void fill_rows(const struct fixture *fixture, int64_t first, int64_t end, int64_t plane,
                      bf16 value)
{
    for (int64_t t = first; t < end; t++)
        for (int64_t i = 0; i < HIDDEN; i++)
            fixture_hidden(fixture, t, plane)[i] = value;
}

static void bad_planes_are_told(void **state)
{
    struct shard_place *place = *state;
    struct fixture *fixture = &place->fixture;
    size_t bytes = HIDDEN * sizeof(bf16);
    fill_rows(fixture, 5, 17, 1, 0);
    assert_told(place, false, "plane 1 (layer 3): all zero");
    fill_rows(fixture, 5, 17, 1, 0x8000);
    assert_told(place, false, "plane 1 (layer 3): all zero");
    fill_rows(fixture, 5, 17, 1, 0x3f80);
    assert_told(place, false, "plane 1 (layer 3): constant");
    for (int64_t t = 5; t < 17; t++)
        memcpy(fixture_hidden(fixture, t, 1), fixture_hidden(fixture, 0, 1), bytes);
    assert_told(place, false, "plane 1 (layer 3): constant: all its rows");
    for (int64_t t = 5; t < 17; t++)
        memcpy(fixture_hidden(fixture, t, 1), fixture_hidden(fixture, t, 2), bytes);
    assert_told(place, false,
                "plane 1 (layer 3) and plane 2 (last hidden state) are bitwise equal");
    fixture_hidden(fixture, 16, 1)[7] ^= 1;
    struct error err;
    check_changed(place, false, &err);
    assert_string_equal(err.text, "");
    fill_rows(fixture, 9, 11, 0, 0);
    assert_told(place, false, "row 4 of plane 0 (layer 1): all zero");
}

// Attention over equal values is that value: such a document is odd, but not damaged.
static void equal_tokens_may_have_equal_features(void **state)
{
    struct shard_place *place = *state;
    struct fixture *fixture = &place->fixture;
    struct error err;
    for (int64_t t = 5; t < 17; t++) {
        fixture->input_ids[t] = 9;
        memcpy(fixture_hidden(fixture, t, 0), fixture_hidden(fixture, 5, 0),
               PLANES * HIDDEN * sizeof(bf16));
    }
    check_changed(place, false, &err);
    assert_string_equal(err.text, "");
}

static void a_cut_document_is_checked_without_its_crc(void **state)
{
    struct shard_place *place = *state;
    struct fixture *fixture = &place->fixture;
    struct shard shard;
    struct error err = {""};
    open_sound(&shard, place->path);
    fixture_hidden(fixture, 5 + 9, 1)[0] = 0x7f80;
    assert_int_equal(shard_check_document(&shard, 1, 9, fixture->input_ids + 5,
                                          fixture->loss_mask + 5, fixture_hidden(fixture, 5, 0),
                                          true, &err),
                     0);
    assert_int_equal(shard_check_document(&shard, 1, 10, fixture->input_ids + 5,
                                          fixture->loss_mask + 5, fixture_hidden(fixture, 5, 0),
                                          true, &err),
                     -1);
    assert_non_null(strstr(err.text, "row 9 of plane 1"));
    shard_close(&shard);
}

static void a_file_cut_while_open_is_an_error(void **state)
{
    struct shard_place *place = *state;
    struct shard shard;
    struct error err = {""};
    bf16 hidden[TOKENS * PLANES * HIDDEN];
    open_sound(&shard, place->path);
    edit_cut(place->path, 4096);
    assert_int_equal(shard_read_hidden(&shard, 0, TOKENS, hidden, &err), -1);
    assert_non_null(strstr(err.text, "truncated since"));
    assert_non_null(strstr(err.text, place->path));
    shard_close(&shard);
}

static void shards_of_one_set_must_agree(void **state)
{
    struct shard_place *place = *state;
    struct shard first, second;
    struct error err = {""};
    const int32_t layers[] = {1, 4};
    char *other = fixture_path(place->folder, "b.h5");
    struct fixture_options options = {.hidden_size = 16,
                                      .vocab_size = 65,
                                      .layer_ids = layers,
                                      .last_hidden = LAST_HIDDEN_POST_NORM,
                                      .target_model = "another"};
    fixture_shard(other, &options);
    open_sound(&first, place->path);
    open_sound(&second, other);
    assert_int_equal(shard_compare(&first, &first, &err), 0);
    assert_int_equal(shard_compare(&first, &second, &err), -1);
    assert_non_null(strstr(err.text, "hidden_size is 16, but 8"));
    assert_non_null(strstr(err.text, "vocab_size is 65, but 64"));
    assert_non_null(strstr(err.text, "target_layer_ids is 4, but 3"));
    assert_non_null(strstr(err.text, "last_hidden is post_norm, but pre_norm"));
    assert_non_null(strstr(err.text, "target_model is \"another\""));
    shard_close(&first);
    shard_close(&second);
    free(other);
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, setup, shard_place_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(round_trip_is_bitwise),
        TEST(datasets_are_contiguous_and_aligned),
        TEST(no_temporary_file_stays),
        TEST(integers_of_any_width),
        TEST(negative_masks_stay_wrong),
        TEST(booleans_as_h5py_writes_them),
        TEST(signed_bits_of_features),
        TEST(strings_fixed_or_variable),
        TEST(every_layout_is_read_the_same),
        TEST(floats_of_any_width),
        TEST(a_user_block_shifts_nothing),
        TEST(threads_read_at_once),
        TEST(ids_are_made_from_name_and_index),
        TEST(missing_attributes_are_refused),
        TEST(every_fault_of_the_attributes_is_told),
        TEST(wrong_attributes_are_refused),
        TEST(wrong_layer_ids_are_refused),
        TEST(an_absent_last_hidden_state_has_no_plane),
        TEST(missing_datasets_are_refused),
        TEST(rows_that_disagree_are_refused),
        TEST(bad_offsets_are_refused),
        TEST(shards_without_documents_are_refused),
        TEST(other_types_of_features_are_refused),
        TEST(data_that_is_not_there_is_refused),
        TEST(truncated_files_name_both_sizes),
        TEST(what_is_no_file_is_refused),
        TEST(bad_values_are_told_by_row_and_plane),
        TEST(bad_planes_are_told),
        TEST(equal_tokens_may_have_equal_features),
        TEST(a_cut_document_is_checked_without_its_crc),
        TEST(a_file_cut_while_open_is_an_error),
        TEST(shards_of_one_set_must_agree),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
