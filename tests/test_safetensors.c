// safetensors files: what is written is read back, what is broken is refused with file and tensor, and
// no garbage makes the reader look outside the file.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/rng.h"
#include "data/safetensors.h"
#include "tests/support/config_files.h"

static int setup(void **state)
{
    struct config_folder *folder = memory_alloc(1, sizeof(*folder));
    config_folder_open(folder);
    *state = folder;
    return 0;
}

static int teardown(void **state)
{
    config_folder_close(*state);
    free(*state);
    return 0;
}

static void write_bytes(const char *path, const void *bytes, size_t size)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

static unsigned char *read_bytes(const char *path, size_t *size)
{
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    fseek(file, 0, SEEK_END);
    *size = (size_t)ftell(file);
    rewind(file);
    unsigned char *bytes = memory_alloc(*size, 1);
    assert_int_equal(fread(bytes, 1, *size, file), *size);
    fclose(file);
    return bytes;
}

// ---- writing and reading back -----------------------------------------------------------------------

static const char *const metadata_value = "a \"quoted\" \\ value\nwith\tcontrol \x01 and \xc3\xa9";

struct written {
    float weights[3][5];
    int64_t offsets[4];
    uint8_t flags[7];
    double scalar;
};

static struct written make_values(void)
{
    struct written values = {.offsets = {-1, 2, INT64_MAX, 4}, .scalar = 0.1};
    for (int i = 0; i < 15; i++)
        values.weights[i / 5][i % 5] = (float)i * 0.5f;
    for (int i = 0; i < 7; i++)
        values.flags[i] = (uint8_t)(i + 1);
    return values;
}

static void write_file(const char *path, const struct written *values)
{
    struct error err = {""};
    struct safetensors_writer *writer;
    assert_int_equal(safetensors_writer_open(&writer, path, &err), 0);
    safetensors_writer_metadata(writer, "config", metadata_value);
    safetensors_writer_metadata(writer, "empty", "");
    int weights = safetensors_writer_add(writer, "z.weight", DTYPE_F32, 2, (int64_t[]){3, 5});
    int flags = safetensors_writer_add(writer, "flags", DTYPE_U8, 1, (int64_t[]){7});
    int offsets = safetensors_writer_add(writer, "a \"name\"", DTYPE_I64, 1, (int64_t[]){4});
    safetensors_writer_add(writer, "nothing", DTYPE_BF16, 2, (int64_t[]){0, 9});
    int scalar = safetensors_writer_add(writer, "scalar", DTYPE_F64, 0, NULL);
    assert_int_equal(safetensors_writer_begin(writer, &err), 0);
    // any order, any pieces
    size_t half = 7 * sizeof(float);
    const char *weight_bytes = (const char *)values->weights;
    assert_int_equal(safetensors_writer_write(writer, scalar, 0, &values->scalar, 8, &err), 0);
    assert_int_equal(safetensors_writer_write(writer, weights, half, weight_bytes + half,
                                              sizeof(values->weights) - half, &err),
                     0);
    assert_int_equal(safetensors_writer_write(writer, offsets, 0, values->offsets, 32, &err), 0);
    assert_int_equal(safetensors_writer_write(writer, flags, 0, values->flags, 7, &err), 0);
    assert_int_equal(safetensors_writer_write(writer, weights, 0, weight_bytes, half, &err), 0);
    assert_int_equal(safetensors_writer_close(writer, true, &err), 0);
}

static void test_round_trip(void **state)
{
    char *path = config_folder_path(*state, "file.safetensors");
    struct written values = make_values();
    write_file(path, &values);
    struct safetensors file;
    struct error err = {""};
    if (safetensors_open(&file, path, &err) != 0)
        fail_msg("%s", err.text);
    assert_int_equal(file.count, 5);
    assert_int_equal(file.metadata_count, 2);
    assert_string_equal(safetensors_metadata(&file, "config"), metadata_value);
    assert_string_equal(safetensors_metadata(&file, "empty"), "");
    assert_null(safetensors_metadata(&file, "other"));
    const struct {
        const char *name, *dtype;
        int dims;
        int64_t shape[2];
        const void *bytes;
        size_t size;
    } wanted[] = {
        {"z.weight", "F32", 2, {3, -1}, values.weights, sizeof(values.weights)},
        {"flags", "U8", 1, {7}, values.flags, 7},
        {"a \"name\"", "I64", 1, {4}, values.offsets, 32},
        {"nothing", "BF16", 2, {0, 9}, "", 0},
        {"scalar", "F64", 0, {0}, &values.scalar, 8},
    };
    for (size_t i = 0; i < sizeof(wanted) / sizeof(*wanted); i++) {
        const struct safetensors_entry *entry = safetensors_get(
            &file, wanted[i].name, wanted[i].dtype, wanted[i].dims, wanted[i].shape, &err);
        assert_non_null(entry);
        assert_int_equal(entry->size, wanted[i].size);
        assert_int_equal(memcmp(entry->bytes, wanted[i].bytes, wanted[i].size), 0);
    }
    const struct safetensors_entry *first = safetensors_find(&file, "z.weight");
    assert_int_equal((first->bytes - (const unsigned char *)file.map) % 64, 0);
    assert_null(safetensors_find(&file, "weight"));
    safetensors_close(&file);
    free(path);
}

static void test_wrong_wishes(void **state)
{
    char *path = config_folder_path(*state, "file.safetensors");
    struct written values = make_values();
    write_file(path, &values);
    struct safetensors file;
    struct error err = {""};
    assert_int_equal(safetensors_open(&file, path, &err), 0);
    assert_null(safetensors_get(&file, "absent", "F32", 1, (int64_t[]){1}, &err));
    assert_non_null(strstr(err.text, path));
    assert_non_null(strstr(err.text, "'absent'"));
    assert_null(safetensors_get(&file, "z.weight", "F32", 2, (int64_t[]){-1, 6}, &err));
    assert_non_null(strstr(err.text, "'z.weight' is F32 [3, 5], wanted is F32 [any, 6]"));
    assert_null(safetensors_get(&file, "z.weight", "BF16", 2, (int64_t[]){3, 5}, &err));
    assert_null(safetensors_get(&file, "z.weight", "F32", 1, (int64_t[]){15}, &err));
    safetensors_close(&file);
    free(path);
}

enum { PIECES = 64, PIECE = 1000, WRITERS = 4 };

struct piece_writer {
    struct safetensors_writer *writer;
    int first, index;
    int result;
};

static void *write_pieces(void *argument)
{
    struct piece_writer *own = argument;
    struct error err = {""};
    uint8_t bytes[PIECE];
    for (int piece = own->first; piece < PIECES; piece += WRITERS) {
        memset(bytes, piece + 1, PIECE);
        own->result |= safetensors_writer_write(own->writer, own->index, (size_t)piece * PIECE,
                                                bytes, PIECE, &err);
    }
    return NULL;
}

static void test_several_threads_write(void **state)
{
    char *path = config_folder_path(*state, "file.safetensors");
    struct error err = {""};
    struct safetensors_writer *writer;
    assert_int_equal(safetensors_writer_open(&writer, path, &err), 0);
    int index = safetensors_writer_add(writer, "t", DTYPE_U8, 2, (int64_t[]){PIECES, PIECE});
    assert_int_equal(safetensors_writer_begin(writer, &err), 0);
    struct piece_writer writers[WRITERS];
    pthread_t threads[WRITERS];
    for (int i = 0; i < WRITERS; i++) {
        writers[i] = (struct piece_writer){writer, i, index, 0};
        assert_int_equal(pthread_create(&threads[i], NULL, write_pieces, &writers[i]), 0);
    }
    for (int i = 0; i < WRITERS; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(writers[i].result, 0);
    }
    assert_int_equal(safetensors_writer_close(writer, true, &err), 0);
    struct safetensors file;
    assert_int_equal(safetensors_open(&file, path, &err), 0);
    const struct safetensors_entry *entry = safetensors_find(&file, "t");
    for (int i = 0; i < PIECES * PIECE; i++)
        assert_int_equal(entry->bytes[i], i / PIECE + 1);
    safetensors_close(&file);
    free(path);
}

static void test_giving_up_removes_the_file(void **state)
{
    char *path = config_folder_path(*state, "file.safetensors");
    struct error err = {""};
    struct safetensors_writer *writer;
    assert_int_equal(safetensors_writer_open(&writer, path, &err), 0);
    safetensors_writer_add(writer, "t", DTYPE_U8, 1, (int64_t[]){10});
    assert_int_equal(safetensors_writer_begin(writer, &err), 0);
    assert_int_equal(access(path, F_OK), 0);
    assert_int_equal(safetensors_writer_close(writer, false, &err), 0);
    assert_int_not_equal(access(path, F_OK), 0);
    free(path);
}

// A limit on the size of files stands for the full disk.
static void test_no_room_shows_at_begin(void **state)
{
    char *path = config_folder_path(*state, "file.safetensors");
    struct error err = {""};
    struct safetensors_writer *writer;
    struct rlimit before, small;
    assert_int_equal(safetensors_writer_open(&writer, path, &err), 0);
    safetensors_writer_add(writer, "t", DTYPE_F32, 1, (int64_t[]){1 << 20});
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before);
    small = before;
    small.rlim_cur = 65536;
    setrlimit(RLIMIT_FSIZE, &small);
    int result = safetensors_writer_begin(writer, &err);
    setrlimit(RLIMIT_FSIZE, &before);
    assert_int_equal(result, -1);
    assert_non_null(strstr(err.text, path));
    assert_int_equal(safetensors_writer_close(writer, false, &err), 0);
    assert_int_not_equal(access(path, F_OK), 0);

    assert_int_equal(safetensors_writer_open(&writer, "/nowhere/file", &err), -1);
    assert_non_null(strstr(err.text, "/nowhere/file"));
    free(path);
}

// ---- broken files -----------------------------------------------------------------------------------

// A file of this header and so many bytes of data. Returns 0 when it opens.
static int open_header(const char *path, const char *header, size_t data, struct error *err)
{
    size_t length = strlen(header);
    unsigned char *bytes = memory_alloc(8 + length + data, 1);
    for (int i = 0; i < 8; i++)
        bytes[i] = (unsigned char)((uint64_t)length >> (8 * i));
    memcpy(bytes + 8, header, length);
    write_bytes(path, bytes, 8 + length + data);
    free(bytes);
    struct safetensors file;
    err->text[0] = '\0';
    int result = safetensors_open(&file, path, err);
    if (result == 0)
        safetensors_close(&file);
    return result;
}

static void test_broken_headers(void **state)
{
    static const struct {
        const char *header;
        size_t data;
        const char *says; // NULL: this one is right
    } cases[] = {
        {"{}", 0, NULL},
        {"{\"__metadata__\":{\"a\":\"b\"}}   ", 0, NULL},
        {"{\"t\":{\"dtype\":\"F32\",\"shape\":[1,1,2,1,1],\"data_offsets\":[0,8]}}", 8, NULL},
        {"{\"t\":{\"dtype\":\"F4\",\"shape\":[4],\"data_offsets\":[0,2]}}", 2, NULL},
        {"", 0, "not JSON"},
        {"[]", 0, "not a JSON object"},
        {"{\"t\":", 0, "not JSON"},
        {"{} x", 0, "goes on behind"},
        {"{}", 3, "3 bytes of data"},
        {"{\"t\":3}", 0, "'t': no dtype"},
        {"{\"t\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "'t': no dtype"},
        {"{\"t\":{\"dtype\":\"X9\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "dtype 'X9'"},
        {"{\"t\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "'t': no shape"},
        {"{\"t\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4, "dimension 0"},
        {"{\"t\":{\"dtype\":\"F32\",\"shape\":[1.5],\"data_offsets\":[0,6]}}", 6, "dimension 0"},
        {"{\"t\":{\"dtype\":\"F32\",\"shape\":[1e300],\"data_offsets\":[0,6]}}", 6, "dimension 0"},
        {"{\"t\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0,
         "overflows"},
        {"{\"t\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}", 4,
         "more than 8 dimensions"},
        {"{\"t\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,2]}}", 2, "whole byte"},
        {"{\"t\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4]}}", 4, "bad data_offsets"},
        {"{\"t\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 4, "bad data_offsets"},
        {"{\"t\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", 4,
         "bad data_offsets"},
        {"{\"t\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 7, "truncated"},
        {"{\"t\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4, "need 8"},
        {"{\"t\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", 8, "hole"},
        {"{\"t\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
         "\"u\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[2,6]}}",
         6, "'u' starts at byte 2"},
        {"{\"t\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
         "\"t\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
         8, "'t' is there twice"},
        {"{\"__metadata__\":3}", 0, "__metadata__"},
        {"{\"__metadata__\":{\"a\":3}}", 0, "__metadata__ 'a'"},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "twice"},
    };
    char *path = config_folder_path(*state, "broken.safetensors");
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        struct error err;
        int result = open_header(path, cases[i].header, cases[i].data, &err);
        if (cases[i].says == NULL) {
            if (result != 0)
                fail_msg("%s: %s", cases[i].header, err.text);
            continue;
        }
        if (result == 0 || strstr(err.text, cases[i].says) == NULL ||
            strstr(err.text, path) == NULL)
            fail_msg("%s: result %d, says '%s'", cases[i].header, result, err.text);
    }
    free(path);
}

static void test_no_safetensors_files(void **state)
{
    static const unsigned char longer[] = {0xff, 0xff, 0, 0, 0, 0, 0, 0, '{', '}'};
    static const unsigned char huge[] = {2, 0, 0, 0, 0, 0, 0, 0x80, '{', '}'};
    struct safetensors file;
    struct error err = {""};
    char *path = config_folder_path(*state, "other");
    assert_int_equal(safetensors_open(&file, path, &err), -1);
    assert_non_null(strstr(err.text, path));
    write_bytes(path, "short", 5);
    assert_int_equal(safetensors_open(&file, path, &err), -1);
    write_bytes(path, longer, sizeof(longer));
    assert_int_equal(safetensors_open(&file, path, &err), -1);
    write_bytes(path, huge, sizeof(huge));
    assert_int_equal(safetensors_open(&file, path, &err), -1);
    assert_int_equal(safetensors_open(&file, ((struct config_folder *)*state)->path, &err), -1);
    free(path);
}

// Damage at one or a few places: mostly in the header, where offsets and lengths stand.
static size_t damage(unsigned char *bytes, size_t size, uint64_t trial)
{
    struct rng_key key = rng_key_make(trial, 0, 0, RNG_TEST);
    uint64_t places = 1 + rng_u64(key, 0) % 4;
    for (uint64_t i = 1; i <= places; i++) {
        size_t at = (size_t)(rng_u64(key, 4 * i) % (rng_u64(key, 4 * i + 1) % 8 ? 440 : size));
        static const unsigned char favourites[] = "0123456789-{}[],:\"\\e.";
        bytes[at] = rng_u64(key, 4 * i + 2) % 3 != 0
                        ? favourites[rng_u64(key, 4 * i + 3) % (sizeof(favourites) - 1)]
                        : (unsigned char)rng_u64(key, 4 * i + 3);
    }
    return trial % 5 == 0 ? (size_t)(rng_u64(key, 1) % size) : size;
}

// Whatever opens must be readable to the last byte (the sanitizers see to that); whatever does not
// must say where.
static void test_damaged_files(void **state)
{
    char *path = config_folder_path(*state, "file.safetensors");
    char *damaged_path = config_folder_path(*state, "damaged.safetensors");
    struct written values = make_values();
    write_file(path, &values);
    size_t size, refused = 0, trials = 1000;
    unsigned char *good = read_bytes(path, &size), *bad = memory_alloc(size, 1);
    assert_true(size > 440);
    uint64_t sum = 0;
    for (uint64_t trial = 0; trial < trials; trial++) {
        memcpy(bad, good, size);
        write_bytes(damaged_path, bad, damage(bad, size, trial));
        struct safetensors file;
        struct error err = {""};
        if (safetensors_open(&file, damaged_path, &err) != 0) {
            refused++;
            assert_non_null(strstr(err.text, damaged_path));
            continue;
        }
        for (size_t i = 0; i < file.count; i++) {
            for (size_t b = 0; b < file.entries[i].size; b++)
                sum += file.entries[i].bytes[b];
        }
        safetensors_close(&file);
    }
    assert_true(sum > 0);
    assert_in_range(refused, trials / 4, trials * 95 / 100); // both outcomes were met
    free(good);
    free(bad);
    free(path);
    free(damaged_path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_wrong_wishes),
        cmocka_unit_test(test_several_threads_write),
        cmocka_unit_test(test_giving_up_removes_the_file),
        cmocka_unit_test(test_no_room_shows_at_begin),
        cmocka_unit_test(test_broken_headers),
        cmocka_unit_test(test_no_safetensors_files),
        cmocka_unit_test(test_damaged_files),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
