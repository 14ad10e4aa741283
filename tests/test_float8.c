// float8 shards: read back exactly, refused and checked like others, and trained on bit for bit like a
// bf16 shard of the same values.
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/crc32c.h"
#include "base/e4m3.h"
#include "base/memory.h"
#include "tests/support/float8_shard.h"
#include "tests/support/run_fixture.h"
#include "tests/support/shard_edit.h"

// ---- values --------------------------------------------------------------------------------------

static void every_code_has_its_value(void **state)
{
    (void)state;
    for (int code = 0; code < 256; code++) {
        int exponent = code >> 3 & 15, mantissa = code & 7;
        double magnitude = exponent == 0 ? ldexp(mantissa, -9) : ldexp(8 + mantissa, exponent - 10);
        float value = e4m3_to_float((uint8_t)code);
        if ((code & 0x7f) == 0x7f)
            assert_true(isnan(value));
        else
            assert_true((double)value == (code & 0x80 ? -magnitude : magnitude));
        assert_int_equal(signbit(value) != 0, code >> 7);
    }
}

static void checksums_join(void **state)
{
    (void)state;
    unsigned char bytes[70000];
    for (size_t i = 0; i < sizeof(bytes); i++)
        bytes[i] = (unsigned char)(i * i >> 3);
    static const size_t cuts[] = {0, 1, 7, 4096, 69999, 70000};
    for (size_t c = 0; c < sizeof(cuts) / sizeof(cuts[0]); c++) {
        uint32_t a = crc32c(0, bytes, cuts[c]);
        uint32_t b = crc32c(0, bytes + cuts[c], sizeof(bytes) - cuts[c]);
        assert_int_equal(crc32c_join(a, b, sizeof(bytes) - cuts[c]),
                         crc32c(0, bytes, sizeof(bytes)));
    }
}

static void bytes_of_a_token(void **state)
{
    (void)state;
    struct feature_layout bf16s = feature_layout_make(6, true, 5120, false);
    struct feature_layout codes = feature_layout_make(6, true, 5120, true);
    assert_int_equal(feature_layout_file_bytes(&bf16s), 6 * 5120 * 2);
    assert_int_equal(feature_layout_file_bytes(&codes), 5 * 5120 + 5 * 4 + 5120 * 2);
    assert_int_equal(codes.stride * 2, 32 + 5 * 5120 + 5120 * 2); // 5 scales are 20 bytes, then 12
    struct feature_layout odd = feature_layout_make(3, false, 7, true);
    assert_int_equal(odd.stride * 2, 16 + 32);
    assert_int_equal(odd.last, -1);
}

// ---- shards --------------------------------------------------------------------------------------

enum { DOCUMENTS = 3, LAYERS = 2, HIDDEN = 9 };
static const int64_t lengths[DOCUMENTS] = {5, 12, 17};

struct made {
    char *folder, *path;
    struct fixture fixture;
    struct float8_shard shard;
};

static int make(void **state, enum last_hidden last_hidden)
{
    struct made *made = memory_alloc(1, sizeof(*made));
    struct fixture_options options = {.seed = 9,
                                      .documents = DOCUMENTS,
                                      .lengths = lengths,
                                      .hidden_size = HIDDEN,
                                      .last_hidden = last_hidden,
                                      .crc = true};
    struct error err = {""};
    made->folder = fixture_folder();
    made->path = fixture_path(made->folder, "a.h5");
    fixture_make(&made->fixture, &options);
    float8_shard_make(&made->shard, &made->fixture);
    assert_int_equal(shard_write(made->path, &made->shard.content, &err), 0);
    *state = made;
    return 0;
}

static int setup(void **state)
{
    return make(state, LAST_HIDDEN_PRE_NORM);
}

static int setup_without_last(void **state)
{
    return make(state, LAST_HIDDEN_ABSENT);
}

static int teardown(void **state)
{
    struct made *made = *state;
    float8_shard_release(&made->shard);
    fixture_release(&made->fixture);
    fixture_folder_remove(made->folder);
    free(made->path);
    free(made);
    return 0;
}

// What shard_open and the check of every document say, "" when all is well.
static void told(const char *path, struct error *err)
{
    struct shard shard;
    *err = (struct error){""};
    if (shard_open(&shard, path, err) != 0)
        return;
    for (int64_t d = 0; d < shard.documents && err->text[0] == '\0'; d++) {
        int64_t first = shard.doc_offsets[d], count = shard.doc_offsets[d + 1] - first;
        int32_t *ids = memory_alloc((size_t)count, sizeof(*ids));
        uint8_t *mask = memory_alloc((size_t)count, 1);
        bf16 *hidden = memory_alloc((size_t)(count * shard.features.stride), sizeof(*hidden));
        if (shard_read_ids(&shard, first, count, ids, err) == 0 &&
            shard_read_mask(&shard, first, count, mask, err) == 0 &&
            shard_read_hidden(&shard, first, count, hidden, err) == 0)
            shard_check_document(&shard, d, count, ids, mask, hidden, true, err);
        free(ids);
        free(mask);
        free(hidden);
    }
    shard_close(&shard);
}

#define assert_told(path, words)                                                                   \
    do {                                                                                           \
        struct error told_error;                                                                   \
        told(path, &told_error);                                                                   \
        if (strstr(told_error.text, words) == NULL)                                                \
            fail_msg("no \"%s\" in \"%s\"", words, told_error.text);                               \
    } while (0)

// The values of any range of tokens are those of the twin.
static void values_are_read_back(void **state)
{
    struct made *made = *state;
    struct shard shard;
    struct error err = {""};
    told(made->path, &err);
    assert_string_equal(err.text, "");
    assert_int_equal(shard_open(&shard, made->path, &err), 0);
    assert_true(shard.features.float8);
    int64_t width = shard.planes * HIDDEN;
    bf16 *hidden = memory_alloc((size_t)(34 * shard.features.stride), sizeof(*hidden));
    float *values = memory_alloc((size_t)width, sizeof(*values));
    for (int64_t first = 0; first < 34; first += 11) {
        assert_int_equal(shard_read_hidden(&shard, first, 34 - first, hidden, &err), 0);
        for (int64_t t = first; t < 34; t++) {
            features_to_float(&shard.features, hidden + (t - first) * shard.features.stride,
                              values);
            for (int64_t i = 0; i < width; i++)
                assert_true(values[i] ==
                            bf16_to_float(*(fixture_hidden(&made->fixture, t, 0) + i)));
        }
    }
    free(values);
    free(hidden);
    shard_close(&shard);
}

static void every_storage_is_read(void **state)
{
    struct made *made = *state;
    static const char *const names[] = {"hidden_states", "scales", "last_hidden"};
    static const enum edit_layout layouts[] = {EDIT_CHUNKED, EDIT_DEFLATED};
    for (size_t l = 0; l < 2; l++)
        for (size_t n = 0; n < 3; n++) {
            struct edit_form form = {.layout = layouts[l],
                                     .chunk = {4, n == 0   ? 2
                                                  : n == 1 ? 2
                                                           : 9}};
            form.chunk[2] = n == 0 ? 9 : 0;
            edit_rewrite_dataset(made->path, names[n], &form);
            values_are_read_back(state);
        }
}

static void structure_is_refused(void **state)
{
    struct made *made = *state;
    static const struct {
        const char *dataset, *words;
    } without[] = {{"scales", "scales"}, {"last_hidden", "last_hidden"}};
    struct error err = {""};
    for (size_t i = 0; i < 2; i++) {
        edit_remove_dataset(made->path, without[i].dataset);
        assert_told(made->path, without[i].words);
        assert_int_equal(shard_write(made->path, &made->shard.content, &err), 0);
    }
    struct edit_form shorter = {.rows = 30};
    edit_rewrite_dataset(made->path, "scales", &shorter);
    assert_told(made->path, "scales has 30 rows for 34 tokens");
    assert_int_equal(shard_write(made->path, &made->shard.content, &err), 0);
    edit_rewrite_dataset(made->path, "last_hidden", &shorter);
    assert_told(made->path, "last_hidden has 30 rows for 34 tokens");
    assert_int_equal(shard_write(made->path, &made->shard.content, &err), 0);
    edit_text_attribute(made->path, "dtype", "bfloat16", true);
    assert_told(made->path, "the bits of bfloat16");
}

static void a_planes_width_is_refused(void **state)
{
    struct made *made = *state;
    float scales[34] = {1.0f};
    edit_replace_dataset(made->path, "scales", 2, (hsize_t[]){34, 1}, H5T_NATIVE_FLOAT, scales);
    assert_told(made->path, "scales has 1 planes; there are 2 layer ids");
}

static void bad_values_are_told(void **state)
{
    struct made *made = *state;
    struct float8_shard *shard = &made->shard;
    struct shard_content content = shard->content;
    struct error err = {""};
    content.write_crc = false;
    float *scale = &shard->scales[(5 + 3) * LAYERS + 1], before = *scale;
    static const float bad_scales[] = {-1.0f, INFINITY, NAN, 0.0f, FLT_MAX};
    for (size_t i = 0; i < sizeof(bad_scales) / sizeof(bad_scales[0]); i++) {
        *scale = bad_scales[i];
        assert_int_equal(shard_write(made->path, &content, &err), 0);
        assert_told(made->path, "document 1: row 3 of plane 1 (layer 3): a scale that is not");
    }
    *scale = before;
    uint8_t *codes = &shard->codes[(5 + 12 + 2) * LAYERS * HIDDEN], kept[HIDDEN];
    memcpy(kept, codes, HIDDEN);
    codes[4] = 0xff;
    assert_int_equal(shard_write(made->path, &content, &err), 0);
    assert_told(made->path, "document 2: row 2 of plane 0 (layer 1): NaN at element 4");
    memset(codes, 0x80, HIDDEN); // minus zero
    assert_int_equal(shard_write(made->path, &content, &err), 0);
    assert_told(made->path, "document 2: row 2 of plane 0 (layer 1): all zero");
    memcpy(codes, kept, HIDDEN);
    for (int64_t t = 0; t < 5; t++) {
        memcpy(&shard->codes[(t * LAYERS + 1) * HIDDEN], &shard->codes[t * LAYERS * HIDDEN],
               HIDDEN);
        shard->scales[t * LAYERS + 1] = shard->scales[t * LAYERS];
    }
    assert_int_equal(shard_write(made->path, &content, &err), 0);
    assert_told(made->path,
                "document 0: plane 0 (layer 1) and plane 1 (layer 3) are bitwise equal");
}

// A change of any of the three datasets is seen by the CRC, also when the scan reads in pieces.
static void changes_are_seen(void **state)
{
    struct made *made = *state;
    struct error err = {""};
    shard_write(made->path, &made->shard.content, &err);
    uint8_t code[34 * LAYERS * HIDDEN];
    memcpy(code, made->shard.codes, sizeof(code));
    code[40] ^= 1;
    edit_replace_dataset(made->path, "hidden_states", 3, (hsize_t[]){34, LAYERS, HIDDEN},
                         H5T_NATIVE_UINT8, code);
    assert_told(made->path, "CRC-32C");
    shard_write(made->path, &made->shard.content, &err);
    float scales[34 * LAYERS];
    memcpy(scales, made->shard.scales, sizeof(scales));
    scales[60] *= 2.0f;
    edit_replace_dataset(made->path, "scales", 2, (hsize_t[]){34, LAYERS}, H5T_NATIVE_FLOAT,
                         scales);
    assert_told(made->path, "document 2: its bytes have CRC-32C");
    shard_write(made->path, &made->shard.content, &err);
    bf16 last[34 * HIDDEN];
    memcpy(last, made->shard.last, sizeof(last));
    last[33 * HIDDEN] ^= 1;
    edit_replace_dataset(made->path, "last_hidden", 2, (hsize_t[]){34, HIDDEN}, H5T_NATIVE_UINT16,
                         last);
    assert_told(made->path, "document 2: its bytes have CRC-32C");
}

// ---- training ------------------------------------------------------------------------------------

static struct run_fixture runs;

static int open_runs(void **state)
{
    (void)state;
    run_fixture_open(&runs);
    struct fixture_options train = run_train_shard(), val = run_val_shard();
    float8_shard_write_both(&train, run_path(&runs, "train8.h5"), run_path(&runs, "train.h5"));
    float8_shard_write_both(&val, run_path(&runs, "val8.h5"), run_path(&runs, "val.h5"));
    return 0;
}

static int close_runs(void **state)
{
    (void)state;
    run_fixture_close(&runs);
    return 0;
}

static void must_train_the_same(const char *set, const char *more)
{
    const char *none = "run.seed=7";
    run_fixture_set(&runs, set != NULL ? set : none);
    run_fixture_set(&runs, more != NULL ? more : none);
    assert_int_equal(run_train(&runs, "twin", NULL), 0);
    assert_int_equal(run_train(&runs, "codes", "--set", "data.train=[train8.h5]", NULL), 0);
    // Codes take fewer bytes than what they stand for.
    static const char *const bytes[] = {"read_bytes", "planned_bytes", NULL};
    run_must_equal_but(&runs, "twin", "codes", RUN_STEPS, bytes);
}

static void training_equals_bf16(void **state)
{
    (void)state;
    must_train_the_same(NULL, NULL);
}

static void training_equals_bf16_with_noise_in_bf16(void **state)
{
    (void)state;
    must_train_the_same("data.noise_std=0.05", "run.compute=bf16");
}

static void training_equals_bf16_of_chosen_layers(void **state)
{
    (void)state;
    must_train_the_same("target.layer_ids=[3, 5]", "run.compute=bf16");
}

static void a_bad_document_is_skipped_the_same(void **state)
{
    (void)state;
    float scales[8192 * 3];
    struct fixture_options train = run_train_shard();
    int64_t tokens = 0;
    for (int64_t d = 0; d < train.documents; d++)
        tokens += train.lengths[d];
    assert_true(tokens < 8192);
    for (size_t i = 0; i < 8192 * 3; i++)
        scales[i] = 1.0f;
    scales[7] = NAN;
    edit_replace_dataset(run_path(&runs, "train8.h5"), "scales", 2, (hsize_t[]){(hsize_t)tokens, 3},
                         H5T_NATIVE_FLOAT, scales);
    edit_remove_dataset(run_path(&runs, "train8.h5"), "doc_crc32c");
    assert_int_equal(run_train(&runs, "bad", "--set", "data.train=[train8.h5]", NULL), 1);
    run_must_say(&runs, "bad", "document 0: row 2 of plane 1");
    run_fixture_set(&runs, "data.on_bad_sample=skip");
    run_fixture_set(&runs, "data.max_bad_fraction=0.2");
    assert_int_equal(run_train(&runs, "skipped", "--set", "data.train=[train8.h5]", NULL), 0);
    run_must_say(&runs, "skipped", "left out");
}

static void types_are_not_mixed(void **state)
{
    (void)state;
    assert_int_equal(run_train(&runs, "mixed", "--set", "data.train=[train.h5, val8.h5]", NULL), 2);
    run_must_say(&runs, "mixed", "dtype is float8_e4m3, but bfloat16 in");
    assert_int_equal(run_train(&runs, "apart", "--set", "data.val=[val8.h5]", NULL), 2);
    run_must_say(&runs, "apart", "differ in dtype");
}

static void the_plan_counts_what_is_stored(void **state)
{
    (void)state;
    assert_int_equal(run_command(&runs, "plan16", true, "plan", NULL), 0);
    run_must_say(&runs, "plan16", "(69 bytes a token)"); // 4 planes of 8 bf16, id, mask
    assert_int_equal(
        run_command(&runs, "plan8", true, "plan", "--set", "data.train=[train8.h5]", NULL), 0);
    run_must_say(&runs, "plan8", "(57 bytes a token)"); // 3 of 8 codes and a scale, 8 bf16
}

int main(void)
{
#define SHARD_TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
#define RUN_TEST(name)   cmocka_unit_test_setup_teardown(name, open_runs, close_runs)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_code_has_its_value),
        cmocka_unit_test(checksums_join),
        cmocka_unit_test(bytes_of_a_token),
        SHARD_TEST(values_are_read_back),
        SHARD_TEST(every_storage_is_read),
        cmocka_unit_test_setup_teardown(values_are_read_back, setup_without_last, teardown),
        SHARD_TEST(structure_is_refused),
        SHARD_TEST(a_planes_width_is_refused),
        SHARD_TEST(bad_values_are_told),
        SHARD_TEST(changes_are_seen),
        RUN_TEST(training_equals_bf16),
        RUN_TEST(training_equals_bf16_with_noise_in_bf16),
        RUN_TEST(training_equals_bf16_of_chosen_layers),
        RUN_TEST(a_bad_document_is_skipped_the_same),
        RUN_TEST(types_are_not_mixed),
        RUN_TEST(the_plan_counts_what_is_stored),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
