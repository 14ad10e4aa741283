// Arenas, randomness, bf16, checksums and the text of errors.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <math.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/bf16.h"
#include "base/byte_size.h"
#include "base/crc32c.h"
#include "base/error.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/rng.h"
#include "base/timer.h"

static void *take_two(struct arena *arena, int64_t rows)
{
    void *first = arena_take(arena, "weights", "w", DTYPE_BF16, rows, 7, 1);
    void *second = arena_take(arena, "loss", "logits", DTYPE_F32, 3, 5, 2);
    assert_true((first == NULL) == (second == NULL));
    return second;
}

static void arena_sizes_and_places(void **state)
{
    (void)state;
    struct arena arena;
    arena_init(&arena);
    assert_null(take_two(&arena, 100));
    assert_int_equal(arena.count, 2);
    assert_int_equal(arena.bytes, 1536 + 256); // 1400 and 120 bytes, padded to 256
    assert_int_equal(arena_group_bytes(&arena, "weights"), 1536);
    assert_int_equal(arena_group_bytes(&arena, "loss"), 256);
    assert_int_equal(arena_group_bytes(&arena, "nothing"), 0);
    assert_int_equal(arena_group_bytes(&arena, NULL), arena.bytes);
    unsigned char *memory = memory_alloc(arena.bytes, 1);
    arena_place(&arena, memory, 1536 + 256);
    assert_ptr_equal(take_two(&arena, 100), memory + 1536);
    assert_string_equal(arena.entries[1].name, "logits");
    assert_int_equal(arena.entries[1].shape[2], 2);
    free(memory);
    arena_release(&arena);
}

static void placed_with(int64_t rows, size_t missing, int more)
{
    struct arena arena;
    arena_init(&arena);
    take_two(&arena, 100);
    unsigned char *memory = memory_alloc(arena.bytes, 1);
    arena_place(&arena, memory, arena.bytes - missing);
    take_two(&arena, rows);
    for (int i = 0; i < more; i++)
        arena_take(&arena, "loss", "logits", DTYPE_F32, 3, 5, 2);
    free(memory);
    arena_release(&arena);
}

// Runs in a child process with stderr closed; true when it was aborted.
static bool aborts(int64_t rows, size_t missing, int more)
{
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        signal(SIGABRT, SIG_DFL);
        close(STDERR_FILENO);
        placed_with(rows, missing, more);
        _exit(0);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

static void arena_refuses_what_was_not_planned(void **state)
{
    (void)state;
    assert_false(aborts(100, 0, 0));
    assert_true(aborts(200, 0, 0)); // another size
    assert_true(aborts(100, 1, 0)); // too little memory
    assert_true(aborts(100, 0, 1)); // one buffer more
}

// A union of two parts between two plain buffers. With `more`, its second part is the larger.
static void take_union(struct arena *arena, bool more, unsigned char *at[5])
{
    at[0] = arena_take(arena, "weights", "first", DTYPE_U8, 256, 1, 1);
    arena_union_begin(arena, "either");
    at[1] = arena_take(arena, "one", "a", DTYPE_U8, 512, 1, 1);
    at[2] = arena_take(arena, "one", "b", DTYPE_U8, 256, 1, 1);
    arena_union_next(arena);
    at[3] = arena_take(arena, "two", "c", DTYPE_U8, more ? 1024 : 256, 1, 1);
    arena_union_end(arena);
    at[4] = arena_take(arena, "weights", "last", DTYPE_U8, 256, 1, 1);
}

static void arena_unions_share_memory(void **state)
{
    (void)state;
    for (int more = 0; more < 2; more++) {
        struct arena arena;
        unsigned char *at[5];
        size_t size = more ? 1024 : 768;
        arena_init(&arena);
        take_union(&arena, more, at);
        assert_int_equal(arena.bytes, 512 + size);
        assert_int_equal(arena_group_bytes(&arena, NULL), arena.bytes);
        assert_int_equal(arena_group_bytes(&arena, "weights"), 512);
        assert_int_equal(arena_group_bytes(&arena, "one"), more ? 0 : 768);
        assert_int_equal(arena_group_bytes(&arena, "two"), more ? 1024 : 0);
        assert_string_equal(arena.entries[3].overlay, "either");
        assert_string_equal(arena.entries[4].overlay, "");
        assert_int_equal(arena.entries[3].part, 1);
        unsigned char *memory = memory_alloc(arena.bytes, 1);
        arena_place(&arena, memory, arena.bytes);
        take_union(&arena, more, at);
        assert_ptr_equal(at[1], memory + 256);
        assert_ptr_equal(at[2], memory + 768);
        assert_ptr_equal(at[3], at[1]);
        assert_ptr_equal(at[4], memory + 256 + size);
        free(memory);
        arena_release(&arena);
    }
}

// Philox4x32-10 once more, from the paper's description.
static void philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c[4], k[2] = {key[0], key[1]};
    memcpy(c, counter, sizeof(c));
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = 0xd2511f53ull * c[0], p1 = 0xcd9e8d57ull * c[2];
        uint32_t next[4] = {(uint32_t)(p1 >> 32) ^ c[1] ^ k[0], (uint32_t)p1,
                            (uint32_t)(p0 >> 32) ^ c[3] ^ k[1], (uint32_t)p0};
        memcpy(c, next, sizeof(c));
        k[0] += 0x9e3779b9u; // golden ratio
        k[1] += 0xbb67ae85u; // sqrt(3) - 1
    }
    memcpy(out, c, sizeof(c));
}

// Known answers published with Random123 for counters and keys of zeros, of ones, and of pi.
static void rng_known_answers(void **state)
{
    (void)state;
    static const struct {
        uint32_t counter[4], key[2], out[4];
    } known[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}},
        {{~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}},
        {{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u},
         {0xa4093822u, 0x299f31d0u},
         {0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}},
    };
    uint32_t out[4];
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        philox(known[i].counter, known[i].key, out);
        assert_memory_equal(out, known[i].out, sizeof(out));
    }
    rng_block((struct rng_key){{0, 0}}, 0, out);
    assert_memory_equal(out, known[0].out, sizeof(out));
    for (uint64_t i = 0; i < 100; i++) {
        struct rng_key key = {{(uint32_t)rng_mix(i, 1), (uint32_t)rng_mix(i, 2)}};
        uint64_t at = rng_mix(i, 3);
        uint32_t counter[4] = {(uint32_t)at, (uint32_t)(at >> 32), 0, 0}, expected[4];
        philox(counter, key.word, expected);
        rng_block(key, at, out);
        assert_memory_equal(out, expected, sizeof(out));
        assert_true(rng_u64(key, at) == ((uint64_t)expected[1] << 32 | expected[0]));
    }
}

static void rng_keys_differ(void **state)
{
    (void)state;
    struct rng_key keys[6] = {
        rng_key_make(1, 2, 3, RNG_INIT), rng_key_make(1, 2, 3, RNG_NOISE),
        rng_key_make(1, 2, 4, RNG_INIT), rng_key_make(1, 3, 3, RNG_INIT),
        rng_key_make(2, 2, 3, RNG_INIT), rng_key_make(2, 1, 3, RNG_INIT),
    };
    for (int a = 0; a < 6; a++)
        for (int b = 0; b < a; b++)
            assert_memory_not_equal(&keys[a], &keys[b], sizeof(keys[a]));
    struct rng_key again = rng_key_make(1, 2, 3, RNG_INIT);
    assert_memory_equal(&again, &keys[0], sizeof(again));
}

enum { DRAWS = 1 << 18 };

static void rng_uniform_moments(void **state)
{
    (void)state;
    struct rng_key key = rng_key_make(7, 0, 0, RNG_TEST);
    double sum = 0.0, squares = 0.0;
    for (uint64_t i = 0; i < DRAWS; i++) {
        double u = (double)rng_uniform(key, i);
        assert_true(u > 0.0 && u < 1.0);
        sum += u;
        squares += u * u;
    }
    // Five standard deviations of the mean of DRAWS.
    assert_true(fabs(sum / DRAWS - 1.0 / 2.0) < 5.0 * sqrt(1.0 / 12.0 / DRAWS));
    assert_true(fabs(squares / DRAWS - 1.0 / 3.0) < 5.0 * sqrt(4.0 / 45.0 / DRAWS));
}

// The largest and the smallest draw that 32 bits allow, found by search: about one counter in 2^23
// gives each, which is where rounding could reach 1.
static void rng_uniform_ends(void **state)
{
    (void)state;
    struct rng_key key = rng_key_make(8, 0, 0, RNG_TEST);
    int ends = 0;
    for (uint64_t i = 0; i < 1u << 26 && ends < 8; i++) {
        uint32_t out[4];
        rng_block(key, i, out);
        if (out[0] >= 0xffffff00u || out[0] < 0x100u) {
            float u = rng_uniform(key, i);
            assert_true(u > 0.0f && u < 1.0f);
            ends++;
        }
    }
    assert_true(ends > 0);
}

static void rng_normal_moments(void **state)
{
    (void)state;
    struct rng_key key = rng_key_make(9, 0, 0, RNG_TEST);
    double sum = 0.0, squares = 0.0, fourth = 0.0, neighbours = 0.0, last = 0.0;
    for (uint64_t i = 0; i < DRAWS; i++) {
        double x = (double)rng_normal(key, i);
        assert_true(isfinite(x));
        sum += x;
        squares += x * x;
        fourth += x * x * x * x;
        neighbours += x * last;
        last = x;
    }
    assert_true(fabs(sum / DRAWS) < 5.0 * sqrt(1.0 / DRAWS));
    assert_true(fabs(squares / DRAWS - 1.0) < 5.0 * sqrt(2.0 / DRAWS));
    assert_true(fabs(fourth / DRAWS - 3.0) < 5.0 * sqrt(96.0 / DRAWS));
    assert_true(fabs(neighbours / DRAWS) < 5.0 * sqrt(1.0 / DRAWS));
}

// Counters that pass 2^32, and counts that do not fill what is drawn together.
static void rng_normals_are_rng_normal(void **state)
{
    (void)state;
    static float many[2000];
    struct rng_key key = rng_key_make(5, 6, 7, RNG_TEST);
    for (int64_t count = 0; count < 2000; count += 333) {
        uint64_t first = ((uint64_t)1 << 32) - 700;
        rng_normals(key, first, count, many);
        for (int64_t i = 0; i < count; i++)
            assert_true(many[i] == rng_normal(key, first + (uint64_t)i));
    }
}

static void bf16_rounds_to_nearest_even(void **state)
{
    (void)state;
    assert_int_equal(bf16_from_float(1.0f), 0x3f80);
    assert_int_equal(bf16_from_float(-2.0f), 0xc000);
    assert_int_equal(bf16_from_float(0x1.01p0f), 0x3f80);     // half way, even below
    assert_int_equal(bf16_from_float(0x1.03p0f), 0x3f82);     // half way, even above
    assert_int_equal(bf16_from_float(0x1.010002p0f), 0x3f81); // just over half way
    assert_int_equal(bf16_from_float(0x1.00fffep0f), 0x3f80); // just under
    assert_int_equal(bf16_from_float(0.0f), 0x0000);
    assert_int_equal(bf16_from_float(-0.0f), 0x8000);
    assert_int_equal(bf16_from_float(0x1.fffffep127f), 0x7f80); // the largest float rounds to inf
    assert_int_equal(bf16_from_float(INFINITY), 0x7f80);
    assert_int_equal(bf16_from_float(-INFINITY), 0xff80);
    assert_int_equal(bf16_from_float(0x1p-149f), 0x0000); // below half of the least subnormal
    assert_int_equal(bf16_from_float(0x1p-133f), 0x0001);
}

static void bf16_keeps_nan_and_itself(void **state)
{
    (void)state;
    // NaNs whose payload lies only in the bits that are cut off must not become inf.
    const uint32_t nans[] = {0x7f800001u, 0xff800001u, 0x7fc00000u, 0x7fffffffu, 0xffffffffu};
    for (size_t i = 0; i < sizeof(nans) / sizeof(nans[0]); i++) {
        float value;
        memcpy(&value, &nans[i], sizeof(value));
        bf16 rounded = bf16_from_float(value);
        assert_true(isnan(bf16_to_float(rounded)));
        assert_true(bf16_is_nonfinite(rounded));
    }
    for (uint32_t bits = 0; bits < 0x10000u; bits++) {
        float value = bf16_to_float((bf16)bits);
        assert_true((bf16_is_nonfinite((bf16)bits) != 0) == !isfinite(value));
        if (!isnan(value))
            assert_int_equal(bf16_from_float(value), bits);
    }
}

// Check values of the Castagnoli polynomial from RFC 3720, appendix B.4, and the usual one of digits.
static void crc32c_known_answers(void **state)
{
    (void)state;
    unsigned char bytes[32];
    assert_int_equal(crc32c(0, "123456789", 9), 0xe3069283u);
    assert_int_equal(crc32c(0, "", 0), 0);
    memset(bytes, 0, sizeof(bytes));
    assert_int_equal(crc32c(0, bytes, 32), 0x8a9136aau);
    memset(bytes, 0xff, sizeof(bytes));
    assert_int_equal(crc32c(0, bytes, 32), 0x62a8ab43u);
    for (unsigned i = 0; i < 32; i++)
        bytes[i] = (unsigned char)i;
    assert_int_equal(crc32c(0, bytes, 32), 0x46dd794eu);
    for (size_t cut = 0; cut <= 32; cut++)
        assert_int_equal(crc32c(crc32c(0, bytes, cut), bytes + cut, 32 - cut), 0x46dd794eu);
}

// Long inputs take other paths than single bytes do.
static void crc32c_of_long_inputs(void **state)
{
    (void)state;
    enum { LONGEST = 40000 };
    static const size_t lengths[] = {9, 4096, 12287, 12288, 12289, 24576, 24583, LONGEST - 1};
    unsigned char *bytes = memory_alloc(LONGEST, 1);
    for (size_t i = 0; i < LONGEST; i++)
        bytes[i] = (unsigned char)rng_mix(7, i);
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        size_t first = i % 2; // odd addresses too
        uint32_t expected = 11;
        for (size_t j = 0; j < lengths[i]; j++)
            expected = crc32c(expected, bytes + first + j, 1);
        assert_int_equal(crc32c(11, bytes + first, lengths[i]), expected);
    }
    free(bytes);
}

static void errors_say_what_was_put_in(void **state)
{
    (void)state;
    struct error err = {{0}};
    assert_int_equal(error_set(&err, "row %d", 7), -1);
    assert_int_equal(error_add(&err, "row %d", 8), -1);
    assert_int_equal(error_prefix(&err, "shard %s", "a.h5"), -1);
    assert_string_equal(err.text, "shard a.h5: row 7\nrow 8");
    error_set(&err, "again");
    assert_string_equal(err.text, "again");
    for (int i = 0; i < 10000; i++)
        error_add(&err, "%d", i);
    assert_int_equal(strlen(err.text), sizeof(err.text) - 1);
}

static void nearest_word(void **state)
{
    (void)state;
    static const char *const keys[] = {"block_size", "max_anchors", "loss", "seed"};
    assert_string_equal(error_nearest("block_sise", keys, 4), "block_size");
    assert_string_equal(error_nearest("blocksize", keys, 4), "block_size");
    assert_string_equal(error_nearest("max_anchor", keys, 4), "max_anchors");
    assert_string_equal(error_nearest("seed", keys, 4), "seed");
    assert_string_equal(error_nearest("sede", keys, 4), "seed");
    assert_null(error_nearest("learning_rate", keys, 4));
    assert_null(error_nearest("x", keys, 4));
    assert_null(error_nearest("loss", keys, 0));
}

static void byte_sizes_are_read_and_written(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {{"0", 0},      {"1000", 1000},        {"96GiB", 96ull << 30}, {"1.5 KiB", 1536},
                {"2kB", 2000}, {"80GB", 80000000000}, {"512MiB", 512u << 20}, {"1TiB", 1ull << 40},
                {"1e3B", 1000}};
    static const char *const bad[] = {"",     "GiB", "96G",   "96gib", "-1",        "1GiB of",
                                      "0x10", "inf", "1e30B", ".5GiB", "9000000TiB"};
    for (size_t i = 0; i < sizeof(good) / sizeof(*good); i++) {
        uint64_t bytes = 7;
        assert_int_equal(byte_size_parse(good[i].text, &bytes), 0);
        assert_int_equal(bytes, good[i].bytes);
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        uint64_t bytes = 7;
        if (byte_size_parse(bad[i], &bytes) != -1)
            fail_msg("'%s' was taken for %llu", bad[i], (unsigned long long)bytes);
        assert_int_equal(bytes, 7);
    }
    static const char *const no_memory[] = {"0", "0GiB", "2", "96", "1048575", "", "96G"};
    for (size_t i = 0; i < sizeof(no_memory) / sizeof(*no_memory); i++) {
        uint64_t bytes = 7;
        assert_int_equal(byte_size_parse_memory(no_memory[i], &bytes), -1);
        assert_int_equal(bytes, 7);
    }
    uint64_t bytes = 0;
    assert_int_equal(byte_size_parse_memory("1048576", &bytes), 0);
    assert_int_equal(bytes, 1 << 20);
    assert_int_equal(byte_size_parse_memory("1KiB", &bytes), 0);
    assert_int_equal(bytes, 1024);
    char text[BYTE_SIZE_TEXT];
    assert_string_equal(byte_size_text(1023.0, text), "1023 B");
    assert_string_equal(byte_size_text(1536.0, text), "1.50 KiB");
    assert_string_equal(byte_size_text(96.0 * 0x1p30, text), "96.00 GiB");
}

static void waits_end_at_their_moment(void **state)
{
    (void)state;
    static const double waits[] = {0.0, 0.25, 0.999999999, 1.0, 2.75, 86400.5};
    for (size_t i = 0; i < sizeof(waits) / sizeof(waits[0]); i++) {
        double before = timer_now();
        struct timespec at = timer_after(waits[i]);
        double after = timer_now(), moment = (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
        assert_true(at.tv_nsec >= 0 && at.tv_nsec < 1000000000);
        assert_true(moment >= before + waits[i] - 1e-6 && moment <= after + waits[i] + 1e-6);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(arena_sizes_and_places),
        cmocka_unit_test(arena_refuses_what_was_not_planned),
        cmocka_unit_test(arena_unions_share_memory),
        cmocka_unit_test(rng_known_answers),
        cmocka_unit_test(rng_keys_differ),
        cmocka_unit_test(rng_uniform_moments),
        cmocka_unit_test(rng_uniform_ends),
        cmocka_unit_test(rng_normal_moments),
        cmocka_unit_test(rng_normals_are_rng_normal),
        cmocka_unit_test(bf16_rounds_to_nearest_even),
        cmocka_unit_test(bf16_keeps_nan_and_itself),
        cmocka_unit_test(crc32c_known_answers),
        cmocka_unit_test(crc32c_of_long_inputs),
        cmocka_unit_test(errors_say_what_was_put_in),
        cmocka_unit_test(nearest_word),
        cmocka_unit_test(byte_sizes_are_read_and_written),
        cmocka_unit_test(waits_end_at_their_moment),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
