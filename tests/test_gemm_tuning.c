// GEMM algorithms that are chosen by timing: buckets, names, their place in execution.json, and, on a
// GPU, that what was chosen gives the same bits when it is read back.
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/bf16.h"
#include "base/rng.h"
#include "kernels/gemm_algorithms.h"
#include "tests/support/backends.h"
#include "tests/support/checkpoint_fixture.h"
#include "tests/support/compare.h"
#include "tests/support/shard_fixture.h"
#include "trainer/files.h"

// ---- buckets and names

static void buckets_form_a_ladder(void **state)
{
    (void)state;
    static const int64_t ladder[] = {128,  256,  384,  512,  768,  1024, 1536, 2048,  2560,
                                     3072, 3584, 4096, 5120, 6144, 7168, 8192, 12288, 16384};
    enum { COUNT = sizeof(ladder) / sizeof(*ladder) };
    for (int64_t rows = 1, i = 0; rows <= ladder[COUNT - 1]; rows++) {
        if (rows > ladder[i])
            i++;
        assert_int_equal(gemm_bucket(rows), ladder[i]);
    }
    for (int i = 0; i < COUNT; i++)
        assert_int_equal(gemm_bucket_below(ladder[i]), i > 0 ? ladder[i - 1] : 0);
    // Nowhere is more than half of a product's rows between it and its bucket's size.
    for (int64_t rows = 128; rows < 1 << 20; rows += 127)
        assert_true(2 * gemm_bucket(rows) <= 3 * rows + 256);
}

static const struct gemm_product product = {.m = 34816,
                                            .n = 5120,
                                            .k = 8192,
                                            .lda = 34816,
                                            .ldb = 5121,
                                            .ldc = 5122,
                                            .transpose_a = true,
                                            .add = true,
                                            .in_type = DTYPE_BF16,
                                            .out_type = DTYPE_F32,
                                            .parts = 1};

static void names_say_everything(void **state)
{
    (void)state;
    char text[GEMM_PRODUCT_TEXT];
    struct gemm_product read;
    for (int bits = 0; bits < 32; bits++) {
        struct gemm_product p = product;
        p.transpose_a = bits & 1;
        p.transpose_b = bits & 2;
        p.add = bits & 4;
        p.in_type = bits & 8 ? DTYPE_BF16 : DTYPE_F32;
        p.out_type = bits & 16 ? DTYPE_BF16 : DTYPE_F32;
        gemm_product_print(&p, text);
        assert_int_equal(gemm_product_parse(&read, text), 0);
        assert_true(gemm_product_equal(&read, &p));
        assert_int_equal(gemm_product_rows(&p), bits & 1 ? 8192 : 34816);
        struct gemm_product other = gemm_product_with_rows(&p, 77);
        assert_int_equal(gemm_product_rows(&other), 77);
        assert_false(gemm_product_equal(&other, &p));
        p.parts = 8;
        assert_false(gemm_product_equal(&read, &p));
        gemm_product_print(&p, text);
        // Parts are of products without a transposed A and without a sum.
        assert_int_equal(gemm_product_parse(&read, text), bits & (1 | 4) ? -1 : 0);
        assert_true(gemm_product_equal(&read, &p));
    }
    struct gemm_product large = {LONG_MAX, LONG_MAX, LONG_MAX, LONG_MAX,   LONG_MAX,   LONG_MAX,
                                 false,    true,     false,    DTYPE_BF16, DTYPE_BF16, LONG_MAX};
    gemm_product_print(&large, text);
    assert_int_equal(gemm_product_parse(&read, text), 0);
    assert_true(gemm_product_equal(&read, &large));
}

static void other_names_are_refused(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "",
        "bf16 fp32 TN+ m 1 n 2 k 3 lda 4 ldb 5",
        "bf16 fp32 TN+ m 1 n 2 k 3 lda 4 ldb 5 ldc 6 ",
        "bf16 fp32 TN+ m 1 n 2 k 3 lda 4 ldb 5 ldc 06",
        "bf16 fp32 TX+ m 1 n 2 k 3 lda 4 ldb 5 ldc 6",
        "bf16 fp64 TN+ m 1 n 2 k 3 lda 4 ldb 5 ldc 6",
        "bf16 fp32 TN+ m 0 n 2 k 3 lda 4 ldb 5 ldc 6",
        "bf16 fp32 TN+ m 1 n -2 k 3 lda 4 ldb 5 ldc 6",
        "bf16 fp32 NN= m 1 n 2 k 4 lda 4 ldb 5 ldc 6 parts 1",
        "bf16 fp32 NN= m 1 n 2 k 4 lda 4 ldb 5 ldc 6 parts 3",
        "bf16 fp32 NN= m 1 n 2 k 4 lda 4 ldb 5 ldc 6 parts -2",
        "bf16 fp32 NN= m 1 n 2 k 4 lda 4 ldb 5 ldc 6 parts",
    };
    struct gemm_product read;
    assert_int_equal(gemm_product_parse(&read, "bf16 fp32 TN+ m 1 n 2 k 3 lda 4 ldb 5 ldc 6"), 0);
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++)
        if (gemm_product_parse(&read, bad[i]) == 0)
            fail_msg("'%s' was taken", bad[i]);
}

static void bytes_go_through_digits(void **state)
{
    (void)state;
    const unsigned char bytes[4] = {0x00, 0xff, 0x1a, 0xa1};
    unsigned char back[4] = {0};
    char text[9];
    gemm_hex_print(bytes, sizeof(bytes), text);
    assert_string_equal(text, "00ff1aa1");
    assert_int_equal(gemm_hex_parse(back, sizeof(back), text), 0);
    assert_memory_equal(back, bytes, sizeof(bytes));
    static const char *const bad[] = {"", "00ff1aa", "00ff1aa12", "00ff1aag", "00FF1AA1"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++)
        assert_int_equal(gemm_hex_parse(back, sizeof(back), bad[i]), -1);
}

// ---- execution.json

static struct execution *some_execution(int64_t algorithms)
{
    struct execution *execution = calloc(1, sizeof(*execution));
    assert_non_null(execution);
    *execution = (struct execution){.device = "cuda",
                                    .hardware = "a GPU",
                                    .library = "a library",
                                    .compute = "bf16",
                                    .logits = "fp32",
                                    .recompute = "none",
                                    .kernels = "generic",
                                    .group_rows = 8192,
                                    .chunk_rows = 4224,
                                    .threads = 2,
                                    .world_size = 1};
    execution->gemm.count = algorithms;
    for (int64_t i = 0; i < algorithms; i++) {
        struct gemm_product p = gemm_product_with_rows(&product, i + 1);
        uint64_t bytes[8] = {(uint64_t)i, 2, 3, 4, 5, 6, 7, UINT64_MAX};
        gemm_product_print(&p, execution->gemm.items[i].product);
        gemm_hex_print(bytes, sizeof(bytes), execution->gemm.items[i].algorithm);
    }
    return execution;
}

static void execution_keeps_algorithms(void **state)
{
    (void)state;
    static const int64_t counts[] = {0, 1, 3, GEMM_ALGORITHMS};
    struct error err = {""};
    char *folder = fixture_folder(), *path = memory_format("%s/execution.json", folder);
    for (size_t c = 0; c < sizeof(counts) / sizeof(*counts); c++) {
        struct execution *written = some_execution(counts[c]), *read = calloc(1, sizeof(*read));
        assert_int_equal(execution_write(written, path, &err), 0);
        assert_int_equal(execution_read(read, path, &err), 0);
        assert_int_equal(read->gemm.count, counts[c]);
        for (int64_t i = 0; i < counts[c]; i++) {
            assert_string_equal(read->gemm.items[i].product, written->gemm.items[i].product);
            assert_string_equal(read->gemm.items[i].algorithm, written->gemm.items[i].algorithm);
        }
        assert_int_equal(execution_compare(written, read, &err), 0);
        free(written);
        free(read);
    }
    free(path);
    fixture_folder_remove(folder);
}

static void expect_refused(const char *path, const char *text, const char *reason)
{
    struct error err = {""};
    struct execution *read = calloc(1, sizeof(*read));
    assert_int_equal(files_write_text(path, text, &err), 0);
    assert_int_equal(execution_read(read, path, &err), -1);
    if (strstr(err.text, reason) == NULL || strstr(err.text, path) == NULL)
        fail_msg("'%s' does not say '%s'", err.text, reason);
    free(read);
}

static void damaged_algorithms_are_refused(void **state)
{
    (void)state;
    struct error err = {""};
    char *folder = fixture_folder(), *path = memory_format("%s/execution.json", folder);
    struct execution *written = some_execution(2);
    assert_int_equal(execution_write(written, path, &err), 0);
    char *text = files_read_text(path, &err);
    assert_non_null(text);
    char *at = strstr(text, "TN+ m 34816 n 5120 k 2");
    assert_non_null(at);
    at[1] = 'X';
    expect_refused(path, text, "gemm: entry 2 is not a product and its algorithm");
    at[1] = 'N';
    at = strstr(text, "\"gemm\"");
    assert_non_null(at);
    memcpy(at, "\"gemn\"", 6);
    expect_refused(path, text, "gemm is not a list");
    free(text);
    free(written);
    free(path);
    fixture_folder_remove(folder);
}

// ---- on a GPU

enum { ROWS = 1000, OUT = 384, IN = 512, FEW = 72, PARTS = 4, SHAPES = 5, FEWER = 3 };

// Buffers of products with ROWS rows, and one more odd size.
struct bench {
    const struct backend *backend;
    struct stream *stream;
    void *x, *dy, *weight, *y; // [ROWS, IN], [ROWS, OUT], [OUT, IN], [ROWS, OUT or IN]
    float *grad;               // [OUT, IN]
    void *host;
    size_t bytes;
};

static void bench_open(struct bench *bench, const struct backend *backend)
{
    *bench = (struct bench){.backend = backend, .bytes = (size_t)ROWS * IN * sizeof(float)};
    bench->stream = backend->stream_open(&(struct stream_options){
        .threads = 1, .workspace_bytes = backend->stream_workspace_bytes(1)});
    bench->host = backend->host_alloc(bench->bytes);
    bench->x = backend->alloc(bench->bytes);
    bench->dy = backend->alloc(bench->bytes);
    bench->weight = backend->alloc(bench->bytes);
    bench->y = backend->alloc(bench->bytes);
    bench->grad = backend->alloc(bench->bytes);
}

static void bench_close(struct bench *bench)
{
    bench->backend->free(bench->x);
    bench->backend->free(bench->dy);
    bench->backend->free(bench->weight);
    bench->backend->free(bench->y);
    bench->backend->free(bench->grad);
    bench->backend->host_free(bench->host);
    bench->backend->stream_close(bench->stream);
}

static void put_random(struct bench *bench, void *device, uint64_t stream)
{
    struct rng_key key = rng_key_make(7, 0, stream, RNG_TEST);
    for (size_t i = 0; i < bench->bytes / sizeof(bf16); i++)
        ((bf16 *)bench->host)[i] = bf16_from_float(rng_normal(key, i));
    bench->backend->copy_in(bench->stream, device, bench->host, bench->bytes);
    bench->backend->sync(bench->stream);
}

static void put_inputs(struct bench *bench)
{
    put_random(bench, bench->x, 1);
    put_random(bench, bench->dy, 2);
    put_random(bench, bench->weight, 3);
    bench->backend->zero(bench->stream, bench->grad, bench->bytes);
    bench->backend->zero(bench->stream, bench->y, bench->bytes);
}

// Forward, gradient of inputs, gradient of weights, a forward with rows of an odd width, and one of parts.
static struct gemm gemm_of(const struct bench *bench, int shape, int64_t rows)
{
    struct gemm g = {.alpha = 1.0f, .a_type = DTYPE_BF16, .b_type = DTYPE_BF16};
    g.a = shape == 0 || shape == 3 ? bench->x : bench->dy;
    g.b = shape == 2 ? bench->x : bench->weight;
    g.c = shape == 2 ? (void *)bench->grad : bench->y;
    g.c_type = shape == 2 ? DTYPE_F32 : DTYPE_BF16;
    g.m = shape == 2 ? OUT : rows;
    g.n = shape == 0 || shape == 3 ? OUT : IN;
    g.k = shape == 0 ? IN : shape == 1 ? OUT : shape == 2 ? rows : IN - 3;
    g.transpose_a = shape == 2;
    g.transpose_b = shape == 0 || shape == 3;
    g.beta = shape == 2 ? 1.0f : 0.0f;
    if (shape == 4)
        g = (struct gemm){.m = rows,
                          .n = FEW,
                          .k = IN,
                          .transpose_b = true,
                          .alpha = 1.0f,
                          .a = bench->x,
                          .b = bench->weight,
                          .c = bench->grad,
                          .a_type = DTYPE_BF16,
                          .b_type = DTYPE_BF16,
                          .c_type = DTYPE_F32,
                          .parts = PARTS,
                          .part_sums = bench->y};
    return g;
}

// Results of every shape at a few counts of rows, one after another.
static void run_all(struct bench *bench, unsigned char *results)
{
    static const int64_t fewer[FEWER] = {ROWS, ROWS - 257, 100};
    const struct backend *backend = bench->backend;
    put_inputs(bench);
    for (int shape = 0; shape < SHAPES; shape++)
        for (int i = 0; i < FEWER; i++) {
            struct gemm g = gemm_of(bench, shape, fewer[i]);
            size_t bytes = (size_t)(g.m * g.n) * dtype_size(g.c_type);
            backend->kernels->gemm(bench->stream, &g);
            backend->copy_out(bench->stream, bench->host, g.c, bytes);
            backend->sync(bench->stream);
            memset(results, 0, bench->bytes);
            memcpy(results, bench->host, bytes);
            results += bench->bytes;
        }
}

// NULL and the running test skipped where there is no GPU.
static const struct backend *gpu(void)
{
    struct test_backend chosen;
    int status = test_backend_named(&chosen, "cuda");
    if (status == 77)
        skip();
    assert_int_equal(status, 0);
    return chosen.backend;
}

static void tune(struct bench *bench, double seconds, struct gemm_algorithms *algorithms)
{
    put_inputs(bench);
    bench->backend->gemm_record(bench->stream);
    for (int shape = 0; shape < SHAPES; shape++)
        for (int64_t rows = ROWS - 1; rows <= ROWS; rows++) {
            struct gemm g = gemm_of(bench, shape, rows);
            bench->backend->kernels->gemm(bench->stream, &g);
        }
    bench->backend->gemm_tune(bench->stream, seconds, algorithms);
}

static void what_was_chosen_is_obeyed_bitwise(void **state)
{
    (void)state;
    const struct backend *backend = gpu();
    struct gemm_algorithms *algorithms = calloc(1, sizeof(*algorithms));
    struct gemm_algorithms *others = calloc(1, sizeof(*others));
    struct bench chosen, obeying;
    struct error err = {""};
    bench_open(&chosen, backend);
    bench_open(&obeying, backend);
    size_t bytes = chosen.bytes * SHAPES * FEWER;
    unsigned char *once = malloc(bytes), *again = malloc(bytes), *obeyed = malloc(bytes);
    tune(&chosen, 10.0, algorithms);
    // The bucket of 1000 rows and the five below it, for each shape.
    assert_int_equal(algorithms->count, 6 * SHAPES);
    assert_non_null(strstr(algorithms->items[0].product, "m 1024 "));
    run_all(&chosen, once);
    run_all(&chosen, again);
    assert_memory_equal(once, again, bytes);
    assert_int_equal(backend->gemm_obey(obeying.stream, algorithms, &err), 0);
    run_all(&obeying, obeyed);
    assert_memory_equal(once, obeyed, bytes);
    // Another timing may choose other algorithms, and so may the lack of one, but no other bits.
    for (int seconds = 10; seconds >= 0; seconds -= 10) {
        tune(&obeying, (double)seconds, others);
        assert_int_equal(others->count, algorithms->count);
        run_all(&obeying, obeyed);
        assert_memory_equal(once, obeyed, bytes);
    }
    free(others);
    free(once);
    free(again);
    free(obeyed);
    bench_close(&chosen);
    bench_close(&obeying);
    free(algorithms);
}

// One algorithm, for their own rows, and none where a product whose rows vary has one.
static void fixed_products_get_one_bucket(void **state)
{
    (void)state;
    const struct backend *backend = gpu();
    struct gemm_algorithms *algorithms = calloc(1, sizeof(*algorithms));
    struct bench bench;
    bench_open(&bench, backend);
    put_inputs(&bench);
    struct gemm varied = gemm_of(&bench, 0, ROWS), same = gemm_of(&bench, 0, ROWS - 500);
    struct gemm other = gemm_of(&bench, 1, ROWS - 300);
    same.fixed = other.fixed = true;
    backend->gemm_record(bench.stream);
    backend->kernels->gemm(bench.stream, &varied);
    backend->kernels->gemm(bench.stream, &same);
    backend->kernels->gemm(bench.stream, &other);
    backend->gemm_tune(bench.stream, 10.0, algorithms);
    assert_int_equal(algorithms->count, 6 + 1);
    int found = 0;
    for (int64_t i = 0; i < algorithms->count; i++) // of m 700 n 512 k 384
        found += strstr(algorithms->items[i].product, "m 768 n 512 k 384") != NULL;
    assert_int_equal(found, 1);
    bench_close(&bench);
    free(algorithms);
}

static void timing_changes_no_number_much(void **state)
{
    (void)state;
    const struct backend *backend = gpu();
    struct gemm_algorithms *algorithms = calloc(1, sizeof(*algorithms));
    struct bench chosen, plain;
    bench_open(&chosen, backend);
    bench_open(&plain, backend);
    size_t bytes = chosen.bytes * SHAPES * FEWER, wrong = 0;
    unsigned char *tuned = malloc(bytes), *first = malloc(bytes);
    tune(&chosen, 10.0, algorithms);
    run_all(&chosen, tuned);
    run_all(&plain, first);
    // The gradients of weights are fp32: sums of 1000 products of normal numbers.
    const float *a = (const void *)(tuned + 2 * FEWER * chosen.bytes);
    const float *b = (const void *)(first + 2 * FEWER * chosen.bytes);
    for (int i = 0; i < OUT * IN; i++)
        wrong += !(a[i] - b[i] <= 1e-3f && b[i] - a[i] <= 1e-3f) || a[i] == 0.0f;
    assert_int_equal(wrong, 0);
    free(tuned);
    free(first);
    bench_close(&chosen);
    bench_close(&plain);
    free(algorithms);
}

static void unknown_algorithms_are_refused(void **state)
{
    (void)state;
    const struct backend *backend = gpu();
    struct gemm_algorithms *algorithms = calloc(1, sizeof(*algorithms));
    struct bench bench;
    struct error err = {""};
    bench_open(&bench, backend);
    tune(&bench, 10.0, algorithms);
    assert_true(algorithms->count > 1);
    struct gemm_algorithm *damaged = &algorithms->items[1];
    memset(damaged->algorithm, 'e', strlen(damaged->algorithm));
    assert_int_equal(backend->gemm_obey(bench.stream, algorithms, &err), -1);
    assert_non_null(strstr(err.text, damaged->product));
    damaged->algorithm[0] = '\0';
    assert_int_equal(backend->gemm_obey(bench.stream, algorithms, &err), -1);
    assert_non_null(strstr(err.text, "entry 2"));
    bench_close(&bench);
    free(algorithms);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(buckets_form_a_ladder),
        cmocka_unit_test(names_say_everything),
        cmocka_unit_test(other_names_are_refused),
        cmocka_unit_test(bytes_go_through_digits),
        cmocka_unit_test(execution_keeps_algorithms),
        cmocka_unit_test(damaged_algorithms_are_refused),
        cmocka_unit_test(what_was_chosen_is_obeyed_bitwise),
        cmocka_unit_test(fixed_products_get_one_bucket),
        cmocka_unit_test(timing_changes_no_number_much),
        cmocka_unit_test(unknown_algorithms_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
