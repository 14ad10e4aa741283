// GEMM algorithms that earlier runs on a device chose: taken by runs of the same shape, by no others.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/support/shard_fixture.h"
#include "trainer/algorithm_cache.h"
#include "trainer/files.h"

static struct execution made_execution(const char *hardware, const char *algorithm)
{
    struct execution e = {.group_rows = 64, .chunk_rows = 32, .threads = 1, .world_size = 1};
    snprintf(e.device, sizeof(e.device), "cuda");
    snprintf(e.hardware, sizeof(e.hardware), "%s", hardware);
    snprintf(e.library, sizeof(e.library), "library 1");
    snprintf(e.compute, sizeof(e.compute), "bf16");
    snprintf(e.logits, sizeof(e.logits), "fp32");
    snprintf(e.recompute, sizeof(e.recompute), "cheap");
    snprintf(e.kernels, sizeof(e.kernels), "auto");
    if (algorithm != NULL) {
        e.gemm.count = 1;
        snprintf(e.gemm.items[0].product, sizeof(e.gemm.items[0].product),
                 "bf16 fp32 TN+ m 256 n 128 k 512 lda 256 ldb 128 ldc 128");
        snprintf(e.gemm.items[0].algorithm, sizeof(e.gemm.items[0].algorithm), "%s", algorithm);
    }
    return e;
}

static void make_table(struct arena *table, int64_t rows)
{
    arena_init(table);
    arena_take(table, "weights", "weights", DTYPE_BF16, 1000, 1, 1);
    arena_take(table, "activations", "x", DTYPE_F32, rows, 16, 1);
}

// The folder does not exist before something is kept.
static char *cache_in(const char *parent)
{
    return memory_format("%s/a/cache", parent);
}

static void the_same_step_takes_what_was_kept(void **state)
{
    (void)state;
    char *parent = fixture_folder(), *folder = cache_in(parent);
    struct arena table, larger;
    make_table(&table, 64);
    make_table(&larger, 128);
    struct execution first = made_execution("GPU A", "0123"), none = made_execution("GPU A", NULL);
    struct execution other = made_execution("GPU B", NULL), now = none;
    assert_false(algorithm_cache_read(folder, &table, &now));
    assert_false(algorithm_cache_keep(folder, &table, &first));
    assert_true(algorithm_cache_read(folder, &table, &now));
    assert_int_equal(now.gemm.count, 1);
    assert_string_equal(now.gemm.items[0].algorithm, "0123");
    now = none;
    assert_false(algorithm_cache_read(folder, &larger, &now));
    assert_false(algorithm_cache_read(folder, &table, &other));
    snprintf(none.library, sizeof(none.library), "library 2");
    assert_false(algorithm_cache_read(folder, &table, &none));
    assert_int_equal(now.gemm.count + other.gemm.count + none.gemm.count, 0);
    arena_release(&table);
    arena_release(&larger);
    fixture_folder_remove(parent);
    free(folder);
}

// Two runs that start together time for themselves; who is later takes what is there.
static void the_first_choice_stays(void **state)
{
    (void)state;
    char *parent = fixture_folder(), *folder = cache_in(parent);
    struct arena table;
    make_table(&table, 64);
    struct execution first = made_execution("GPU A", "0123");
    struct execution second = made_execution("GPU A", "4567");
    assert_false(algorithm_cache_keep(folder, &table, &first));
    assert_true(algorithm_cache_keep(folder, &table, &second));
    assert_string_equal(second.gemm.items[0].algorithm, "0123");
    arena_release(&table);
    fixture_folder_remove(parent);
    free(folder);
}

static void a_damaged_file_is_replaced(void **state)
{
    (void)state;
    char *parent = fixture_folder();
    struct arena table;
    make_table(&table, 64);
    struct execution first = made_execution("GPU A", "0123");
    struct execution second = made_execution("GPU A", "4567"), now = made_execution("GPU A", NULL);
    assert_false(algorithm_cache_keep(parent, &table, &first));
    char *command = memory_format("for f in %s/gemm-*.json; do echo '{' > $f; done", parent);
    assert_int_equal(system(command), 0);
    assert_false(algorithm_cache_read(parent, &table, &now));
    assert_false(algorithm_cache_keep(parent, &table, &second));
    assert_true(algorithm_cache_read(parent, &table, &now));
    assert_string_equal(now.gemm.items[0].algorithm, "4567");
    arena_release(&table);
    fixture_folder_remove(parent);
    free(command);
}

// Without a folder that can be written nothing is kept, and nothing fails.
static void no_folder_is_no_error(void **state)
{
    (void)state;
    struct arena table;
    make_table(&table, 64);
    struct execution e = made_execution("GPU A", "0123"), now = made_execution("GPU A", NULL);
    assert_false(algorithm_cache_keep("/dev/null/cache", &table, &e));
    assert_string_equal(e.gemm.items[0].algorithm, "0123");
    assert_false(algorithm_cache_read("/dev/null/cache", &table, &now));
    arena_release(&table);
}

static void the_key_names_the_folder(void **state)
{
    (void)state;
    char *own = algorithm_cache_folder(NULL), *other = algorithm_cache_folder("/some/where");
    assert_null(algorithm_cache_folder("none"));
    assert_string_equal(other, "/some/where");
    if (own != NULL)
        assert_true(own[0] == '/' && strstr(own, "/.cache/dtrain") != NULL);
    free(own);
    free(other);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_same_step_takes_what_was_kept),
        cmocka_unit_test(the_first_choice_stays),
        cmocka_unit_test(a_damaged_file_is_replaced),
        cmocka_unit_test(no_folder_is_no_error),
        cmocka_unit_test(the_key_names_the_folder),
    };
    return cmocka_run_group_tests_name("algorithm_cache", tests, NULL, NULL);
}
