// data check: one fault a case, told by file, document and row; verdict files; damaged bytes anywhere
// never end the program.
#include "data/check.h"

#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/memory.h"
#include "base/rng.h"
#include "data/manifest.h"
#include "tests/support/shard_edit.h"
#include "tests/support/shard_fixture.h"

// A folder with one shard of three documents of 5, 12 and 17 tokens.
static const int64_t lengths[] = {5, 12, 17};
enum { DOCUMENTS = 3, TOKENS = 34, PLANES = 3, HIDDEN = 8, VOCAB = 64 };

static int setup(void **state)
{
    struct shard_place *place = memory_alloc(1, sizeof(*place));
    struct fixture_options options = {
        .seed = 6, .documents = DOCUMENTS, .lengths = lengths, .crc = true, .teacher = true};
    place->folder = fixture_folder();
    place->path = fixture_path(place->folder, "a.h5");
    fixture_make(&place->fixture, &options);
    fixture_write(&place->fixture, place->path);
    *state = place;
    return 0;
}

// Result, report and summary of a check.
struct outcome {
    int result;
    char *text;
    struct check_summary summary;
};

static void run_check(struct outcome *outcome, const char *const *paths, size_t count)
{
    size_t size = 0;
    struct error err = {""};
    FILE *out = open_memstream(&outcome->text, &size);
    assert_non_null(out);
    outcome->result = data_check(paths, count, true, out, &outcome->summary, &err);
    fclose(out);
    assert_string_equal(err.text, "");
}

// Checks one shard: a single line, which begins with the file's name and these words.
static void check_one(const char *path, const char *words, int64_t bad_documents)
{
    struct outcome outcome;
    run_check(&outcome, &path, 1);
    char *line = memory_format("%s: %s", path, words);
    if (outcome.result != 1 || outcome.summary.faults != 1 ||
        strncmp(outcome.text, line, strlen(line)) != 0)
        fail_msg("\"%s\" alone is expected, the report is:\n%s", line, outcome.text);
    assert_int_equal(outcome.summary.bad_documents, bad_documents);
    free(line);
    free(outcome.text);
}

static void a_sound_shard_has_no_fault(void **state)
{
    struct shard_place *place = *state;
    struct outcome outcome;
    const char *path = place->path;
    memset(place->fixture.loss_mask + 5, 0, 10);
    fixture_write(&place->fixture, path);
    run_check(&outcome, &path, 1);
    if (outcome.result != 0)
        fail_msg("%s", outcome.text);
    assert_int_equal(outcome.summary.files, 1);
    assert_int_equal(outcome.summary.documents, DOCUMENTS);
    assert_int_equal(outcome.summary.tokens, TOKENS);
    assert_int_equal(outcome.summary.supervised, 24);
    assert_int_equal(outcome.summary.faults, 0);
    assert_non_null(strstr(outcome.text, "supervised tokens 24 (70.6 %)"));
    assert_non_null(strstr(outcome.text, "4 to 7"));
    assert_non_null(strstr(outcome.text, "length: shortest 5, mean 11.3, longest 17"));
    free(outcome.text);
}

// Changes in memory that make one document bad, and the words for it.
struct value_fault {
    const char *words;
    void (*make)(struct fixture *fixture);
};

static void make_nan(struct fixture *fixture)
{
    fixture_hidden(fixture, 17 + 7, 1)[2] = 0x7fff;
}

static void make_inf(struct fixture *fixture)
{
    fixture_hidden(fixture, 16, 2)[7] = 0x7f80;
}

static void make_minus_inf(struct fixture *fixture)
{
    fixture_hidden(fixture, 0, 0)[0] = 0xff80;
}

static void make_zero_plane(struct fixture *fixture)
{
    for (int64_t t = 17; t < TOKENS; t++)
        memset(fixture_hidden(fixture, t, 1), 0, HIDDEN * sizeof(bf16));
}

static void make_constant_plane(struct fixture *fixture)
{
    for (int64_t t = 17; t < TOKENS; t++)
        memset(fixture_hidden(fixture, t, 0), 0x3c, HIDDEN * sizeof(bf16));
}

static void make_same_rows(struct fixture *fixture)
{
    for (int64_t t = 6; t < 17; t++)
        memcpy(fixture_hidden(fixture, t, 2), fixture_hidden(fixture, 5, 2), HIDDEN * sizeof(bf16));
}

static void make_zero_row(struct fixture *fixture)
{
    memset(fixture_hidden(fixture, 33, 1), 0, HIDDEN * sizeof(bf16));
}

static void make_equal_planes(struct fixture *fixture)
{
    for (int64_t t = 0; t < 5; t++)
        memcpy(fixture_hidden(fixture, t, 2), fixture_hidden(fixture, t, 0), HIDDEN * sizeof(bf16));
}

static void make_large_id(struct fixture *fixture)
{
    fixture->input_ids[9] = VOCAB;
}

static void make_negative_id(struct fixture *fixture)
{
    fixture->input_ids[33] = -1;
}

static void make_mask_of_two(struct fixture *fixture)
{
    fixture->loss_mask[4] = 2;
}

static const struct value_fault value_faults[] = {
    {"document 2: row 7 of plane 1 (layer 3): NaN at element 2", make_nan},
    {"document 1: row 11 of plane 2 (last hidden state): inf at element 7", make_inf},
    {"document 0: row 0 of plane 0 (layer 1): inf at element 0", make_minus_inf},
    {"document 2: plane 1 (layer 3): all zero", make_zero_plane},
    {"document 2: plane 0 (layer 1): constant", make_constant_plane},
    {"document 1: plane 2 (last hidden state): constant: all its rows", make_same_rows},
    {"document 2: row 16 of plane 1 (layer 3): all zero", make_zero_row},
    {"document 0: plane 0 (layer 1) and plane 2 (last hidden state) are bitwise",
     make_equal_planes},
    {"document 1: row 4: token id 64 is outside 0 .. 63", make_large_id},
    {"document 2: row 16: token id -1 is outside 0 .. 63", make_negative_id},
    {"document 0: row 4: loss_mask is 2", make_mask_of_two},
};

// Also in storage that libhdf5 must read, and with a mask and ids of 64 bits.
static void bad_values_are_told(void **state)
{
    struct shard_place *place = *state;
    struct edit_form deflated = {.layout = EDIT_DEFLATED, .chunk = {8, PLANES, HIDDEN}},
                     wide = {.type = H5T_STD_I64LE};
    for (size_t i = 0; i < sizeof(value_faults) / sizeof(value_faults[0]); i++) {
        struct fixture fixture;
        struct fixture_options options = {
            .seed = i, .documents = DOCUMENTS, .lengths = lengths, .crc = true};
        fixture_make(&fixture, &options);
        value_faults[i].make(&fixture);
        fixture_write(&fixture, place->path);
        check_one(place->path, value_faults[i].words, 1);
        edit_rewrite_dataset(place->path, "hidden_states", &deflated);
        edit_rewrite_dataset(place->path, "input_ids", &wide);
        check_one(place->path, value_faults[i].words, 1);
        fixture_release(&fixture);
    }
}

static void a_changed_byte_is_found_by_the_crc(void **state)
{
    struct shard_place *place = *state;
    hid_t file = H5Fopen(place->path, H5F_ACC_RDONLY, H5P_DEFAULT);
    hid_t id = H5Dopen2(file, "hidden_states", H5P_DEFAULT);
    int64_t offset = (int64_t)H5Dget_offset(id) + (6 * PLANES * HIDDEN + 3) * 2;
    H5Dclose(id);
    H5Fclose(file);
    edit_byte(place->path, offset, 0x11);
    check_one(place->path, "document 1: its bytes have CRC-32C", 1);
}

static void structural_faults_are_told(void **state)
{
    struct shard_place *place = *state;
    struct edit_form shorter = {.rows = TOKENS - 1};
    edit_rewrite_dataset(place->path, "hidden_states", &shorter);
    check_one(place->path,
              "hidden_states has 33 rows for 34 tokens: row 16 of document 2 is missing", 0);
    fixture_write(&place->fixture, place->path);
    edit_rewrite_dataset(place->path, "loss_mask", &shorter);
    check_one(place->path, "loss_mask has 33 rows for 34 tokens: row 16 of document 2 is missing",
              0);
    fixture_write(&place->fixture, place->path);
    edit_remove_attribute(place->path, "last_hidden");
    check_one(place->path, "attribute last_hidden is missing", 0);
    struct stat status;
    fixture_write(&place->fixture, place->path);
    assert_int_equal(stat(place->path, &status), 0);
    edit_cut(place->path, status.st_size * 6 / 10);
    check_one(place->path, "truncated", 0);
}

static void unsupervised_documents_are_told(void **state)
{
    struct shard_place *place = *state;
    memset(place->fixture.loss_mask + 5, 0, 12);
    fixture_write(&place->fixture, place->path);
    check_one(place->path, "document 1: no supervised token", 0);
}

static void bad_teacher_columns_are_told(void **state)
{
    struct shard_place *place = *state;
    place->fixture.teacher_lse[18] = (float)NAN;
    fixture_write(&place->fixture, place->path);
    check_one(place->path, "document 2: row 1: teacher_top1", 0);
}

static void faults_between_files_are_told(void **state)
{
    struct shard_place *place = *state;
    struct outcome outcome;
    char *other = fixture_path(place->folder, "b.h5");
    const uint64_t ids[] = {77, place->fixture.doc_ids[2], 78};
    struct fixture_options options = {.seed = 9, .documents = 3, .doc_ids = ids, .hidden_size = 16};
    fixture_shard(other, &options);
    const char *paths[] = {place->path, other};
    run_check(&outcome, paths, 2);
    char *duplicate =
        memory_format("%s: document 1: doc_id %llu is also that of document 2 of %s\n", other,
                      (unsigned long long)ids[1], place->path);
    char *size = memory_format("%s: hidden_size is 16, but 8 in %s\n", other, place->path);
    assert_int_equal(outcome.result, 1);
    assert_int_equal(outcome.summary.faults, 2);
    assert_non_null(strstr(outcome.text, duplicate));
    assert_non_null(strstr(outcome.text, size));
    free(outcome.text);
    free(duplicate);
    free(size);
    free(other);
}

static void all_files_are_looked_at(void **state)
{
    struct shard_place *place = *state;
    struct outcome outcome;
    char *broken = fixture_path(place->folder, "0.h5"), *last = fixture_path(place->folder, "z.h5");
    struct fixture_options options = {.seed = 9};
    fixture_shard(broken, &options);
    edit_cut(broken, 100);
    make_nan(&place->fixture);
    place->fixture.content.write_crc = false;
    place->fixture.content.doc_ids = NULL;
    fixture_write(&place->fixture, last);
    const char *paths[] = {broken, place->path, last};
    run_check(&outcome, paths, 3);
    assert_int_equal(outcome.result, 1);
    assert_int_equal(outcome.summary.faults, 2);
    assert_non_null(strstr(outcome.text, broken));
    assert_non_null(strstr(outcome.text, "row 7 of plane 1"));
    assert_int_equal(outcome.summary.bad_documents, 1);
    free(outcome.text);
    free(broken);
    free(last);
}

static void read_verdict(struct verdict *verdict, const char *path)
{
    struct shard shard;
    struct error err = {""};
    assert_int_equal(shard_open(&shard, path, &err), 0);
    if (verdict_read(verdict, &shard, &err) != 0)
        fail_msg("%s", err.text);
    shard_close(&shard);
}

static void verdicts_are_kept_beside_the_shard(void **state)
{
    struct shard_place *place = *state;
    struct outcome outcome;
    struct verdict verdict;
    const char *path = place->path;
    read_verdict(&verdict, path);
    assert_false(verdict.present);
    make_nan(&place->fixture);
    make_inf(&place->fixture);
    fixture_write(&place->fixture, path);
    run_check(&outcome, &path, 1);
    free(outcome.text);
    read_verdict(&verdict, path);
    assert_true(verdict.present);
    assert_int_equal(verdict.bad_count, 2);
    assert_memory_equal(verdict.bad, ((uint8_t[]){0, 1, 1}), 3);
    assert_non_null(strstr(verdict.words[2], "document 2: row 7 of plane 1 (layer 3): NaN"));
    verdict_release(&verdict);

    // A shard written again is another shard, even when its size is the same.
    fixture_write(&place->fixture, path);
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = 1000000, .tv_nsec = 5}};
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
    read_verdict(&verdict, path);
    assert_false(verdict.present);
}

static void damaged_verdicts_are_refused(void **state)
{
    static const char *const texts[] = {"", "{", "[]", "{\"format\": \"dtrain-verdict\"}",
                                        "{\"format\": 3, \"format_version\": 1, \"bad\": []}"};
    struct shard_place *place = *state;
    struct shard shard;
    struct error err = {""};
    char *path = memory_format("%s.verdict.json", place->path);
    assert_int_equal(shard_open(&shard, place->path, &err), 0);
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        struct verdict verdict;
        FILE *file = fopen(path, "w");
        fputs(texts[i], file);
        fclose(file);
        assert_int_equal(verdict_read(&verdict, &shard, &err), -1);
        assert_non_null(strstr(err.text, path));
    }
    for (int beyond = 0; beyond < 2; beyond++) {
        struct verdict verdict;
        FILE *file = fopen(path, "w");
        fprintf(file,
                "{\"format\": \"dtrain-verdict\", \"format_version\": 1, \"file_size\": \"%llu\", "
                "\"file_time_ns\": \"%lld\", \"bad\": [{\"document\": %d, \"faults\": \"x\"}]}",
                (unsigned long long)shard.file_size, (long long)shard.file_time_ns,
                beyond ? DOCUMENTS : DOCUMENTS - 1);
        fclose(file);
        assert_int_equal(verdict_read(&verdict, &shard, &err), beyond ? -1 : 0);
        verdict_release(&verdict);
    }
    shard_close(&shard);
    free(path);
}

static void nothing_is_written_when_not_wanted(void **state)
{
    struct shard_place *place = *state;
    struct check_summary summary;
    struct error err = {""};
    const char *path = place->path;
    char *side = memory_format("%s.verdict.json", path), *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    assert_int_equal(data_check(&path, 1, false, out, &summary, &err), 0);
    fclose(out);
    free(text);
    assert_int_equal(access(side, F_OK), -1);
    out = open_memstream(&text, &size);
    assert_int_equal(data_stats(&path, 1, out, &err), 0);
    fclose(out);
    assert_non_null(strstr(text, "files 1, documents 3, tokens 34"));
    assert_non_null(strstr(text, "supervised tokens 34 (100.0 %)"));
    free(text);
    edit_cut(path, 200);
    out = open_memstream(&text, &size);
    assert_int_equal(data_stats(&path, 1, out, &err), -1);
    assert_non_null(strstr(err.text, path));
    fclose(out);
    free(text);
    free(side);
}

static unsigned char *load(const char *path, size_t *size)
{
    struct stat status;
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    assert_int_equal(fstat(fileno(file), &status), 0);
    *size = (size_t)status.st_size;
    unsigned char *bytes = memory_alloc(*size, 1);
    assert_int_equal(fread(bytes, 1, *size, file), *size);
    fclose(file);
    return bytes;
}

static void store(const char *path, const unsigned char *bytes, size_t size)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    fclose(file);
}

// Changes 1 to 8 bytes, each to a random or a telling value; every fourth time also cuts the file.
static size_t damage(unsigned char *bytes, size_t size, uint64_t seed)
{
    static const unsigned char telling[] = {0x00, 0x01, 0x7f, 0x80, 0xff};
    struct rng_key key = rng_key_make(seed, 0, 0, RNG_TEST);
    uint64_t counter = 0, changes = 1 + rng_u64(key, counter++) % 8;
    for (uint64_t i = 0; i < changes; i++) {
        // Most bytes of a shard are data; half of the changes go to where the structure is.
        uint64_t place = rng_u64(key, counter++), value = rng_u64(key, counter++);
        size_t at =
            place % 2 == 0 ? (place >> 1) % size : (place >> 1) % (size < 2048 ? size : 2048);
        bytes[at] = value % 2 == 0 ? (unsigned char)(value >> 8) : telling[(value >> 8) % 5];
    }
    return seed % 4 == 3 ? rng_u64(key, counter) % size : size;
}

// A report or a refusal whatever the bytes are, and no manifest of what is refused; memory is bounded, so
// that a damaged size is not simply allocated.
static void check_damaged(const char *path, const char *damaged, uint64_t first, uint64_t count)
{
    size_t size;
    char *manifest = memory_format("%s.manifest", damaged);
    unsigned char *sound = load(path, &size), *bytes = memory_alloc(size, 1);
    int64_t refused = 0;
    for (uint64_t seed = first; seed < first + count; seed++) {
        struct outcome outcome;
        memcpy(bytes, sound, size);
        store(damaged, bytes, damage(bytes, size, seed));
        run_check(&outcome, &damaged, 1);
        assert_true(outcome.result == 0 || outcome.result == 1);
        assert_int_equal(outcome.result == 1, outcome.summary.faults > 0);
        refused += outcome.result;
        free(outcome.text);
        struct error err = {""};
        if (manifest_write(manifest, &damaged, 1, &err) != 0)
            assert_memory_equal(err.text, damaged, strlen(damaged));
    }
    assert_true(refused > (int64_t)count / 8);
    free(sound);
    free(bytes);
    free(manifest);
}

static void damaged_bytes_never_end_the_program(void **state)
{
    enum { SEEDS = 100 };
    struct shard_place *place = *state;
    struct edit_form forms[] = {{.layout = EDIT_CHUNKED, .chunk = {7, PLANES, HIDDEN}},
                                {.layout = EDIT_DEFLATED, .chunk = {7, PLANES, HIDDEN}}};
    char *damaged = fixture_path(place->folder, "damaged.h5");
    check_damaged(place->path, damaged, 0, SEEDS);
    for (int i = 0; i < 2; i++) {
        edit_rewrite_dataset(place->path, "hidden_states", &forms[i]);
        edit_rewrite_dataset(place->path, "loss_mask", &forms[i]);
        check_damaged(place->path, damaged, (uint64_t)(i + 1) * SEEDS, SEEDS);
    }
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    assert_true(usage.ru_maxrss < 1024 * 1024); // KiB
    free(damaged);
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, setup, shard_place_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_sound_shard_has_no_fault),         TEST(bad_values_are_told),
        TEST(a_changed_byte_is_found_by_the_crc), TEST(structural_faults_are_told),
        TEST(unsupervised_documents_are_told),    TEST(bad_teacher_columns_are_told),
        TEST(faults_between_files_are_told),      TEST(all_files_are_looked_at),
        TEST(verdicts_are_kept_beside_the_shard), TEST(damaged_verdicts_are_refused),
        TEST(nothing_is_written_when_not_wanted), TEST(damaged_bytes_never_end_the_program),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
