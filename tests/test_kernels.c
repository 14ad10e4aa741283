// Every row of the table of kernel cases on one backend, named on the command line: cpu, cuda, or
// cuda-generic (without the paths that only some GPUs have). A second argument is a part of names, or
// several with commas between: only those cases run. A third is the most values that a case's tensors may
// have: larger cases are left out, and none runs more than once (what a sanitizer has the time for).
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/kernel_cases.h"
#include "tests/support/backends.h"

enum { THREADS = 2 };

struct test_case {
    const struct test_backend *on;
    const struct kernel_case *c;
    char name[CASE_NAME];
};

static void runs_as_expected(void **state)
{
    const struct test_case *test = *state;
    struct stream *stream = test_backend_stream(test->on, THREADS);
    struct kernel_run run;
    kernel_case_build(test->c, &run);
    kernel_case_expect(test->c, &run);
    kernel_run_send(&run, test->on->backend, stream);
    kernel_case_call(test->c, &run);
    bool ok = kernel_run_check(&run, test->name, test->c->seed, test->c->bounds);
    kernel_run_free_device(&run);
    kernel_run_release(&run);
    test->on->backend->stream_close(stream);
    assert_true(ok);
}

static uint64_t digest_with(const struct test_case *test, struct kernel_run *run, int threads)
{
    struct stream *stream = test_backend_stream(test->on, threads);
    kernel_run_send(run, test->on->backend, stream);
    kernel_case_call(test->c, run);
    uint64_t digest = kernel_run_digest(run);
    kernel_run_free_device(run);
    test->on->backend->stream_close(stream);
    return digest;
}

// The same bits again, and on the CPU with any number of threads: but for gemm, whose tiles, and with
// them the library's order of additions, follow the number of threads (which a run freezes).
static void repeats_bitwise(void **state)
{
    const struct test_case *test = *state;
    struct kernel_run run;
    kernel_case_build(test->c, &run);
    uint64_t digest = digest_with(test, &run, THREADS);
    assert_true(digest == digest_with(test, &run, THREADS));
    if (strcmp(test->c->op, "gemm") != 0) {
        assert_true(digest == digest_with(test, &run, 1));
        assert_true(digest == digest_with(test, &run, 3));
    }
    kernel_run_release(&run);
}

static void every_kernel_has_a_case(void **state)
{
    (void)state;
    static const char *const names[] = {
#define KERNEL_NAME(op) #op,
        KERNEL_LIST(KERNEL_NAME)
#undef KERNEL_NAME
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        bool fp32 = false, found = false;
        for (int c = 0; c < kernel_case_count; c++)
            if (strcmp(kernel_cases[c].op, names[i]) == 0) {
                found = true;
                fp32 = fp32 || kernel_cases[c].type == DTYPE_F32;
            }
        if (!found || !fp32)
            print_error("%s has no row with fp32 in tests/kernel_cases.c\n", names[i]);
        assert_true(found && fp32);
    }
}

static void no_entry_is_missing(void **state)
{
    const struct test_case *test = *state;
#define KERNEL_SET(op) assert_true(test->on->backend->kernels->op != NULL);
    KERNEL_LIST(KERNEL_SET)
#undef KERNEL_SET
}

static void memory_moves(void **state)
{
    const struct test_case *test = *state;
    const struct backend *backend = test->on->backend;
    struct stream *stream = test_backend_stream(test->on, THREADS);
    enum { BYTES = 1027 };
    unsigned char *host = backend->host_alloc(BYTES);
    void *a = backend->alloc(BYTES), *b = backend->alloc(BYTES), *nothing = backend->alloc(0);
    assert_non_null(nothing);
    assert_int_equal((uintptr_t)a % 256, 0);
    assert_int_equal((uintptr_t)b % 256, 0);
    for (int i = 0; i < BYTES; i++)
        host[i] = (unsigned char)(i * 7);
    backend->copy_in(stream, a, host, BYTES);
    backend->copy(stream, b, a, BYTES);
    backend->zero(stream, (unsigned char *)b + 3, 5);
    backend->sync(stream);
    memset(host, 0, BYTES);
    backend->copy_out(stream, host, b, BYTES);
    backend->sync(stream);
    for (int i = 0; i < BYTES; i++)
        assert_int_equal(host[i], i >= 3 && i < 8 ? 0 : (unsigned char)(i * 7));
    backend->free(a);
    backend->free(b);
    backend->free(nothing);
    backend->host_free(host);
    backend->stream_close(stream);
}

// Work on a stream for copies only, then on one that waits for it, with times and free memory noted.
static void streams_wait_and_tell_time(void **state)
{
    const struct test_case *test = *state;
    const struct backend *backend = test->on->backend;
    struct stream *stream = test_backend_stream(test->on, THREADS);
    struct stream *copies = backend->stream_open(&(struct stream_options){0});
    enum { BYTES = 1 << 25, LAST = STREAM_TIME_SLOTS - 1 };
    size_t left = 0, total = 0, left_after = 0;
    backend->memory(&left, &total);
    unsigned char *host = backend->host_alloc(BYTES), *back = backend->host_alloc(BYTES);
    void *a = backend->alloc(BYTES), *b = backend->alloc(BYTES);
    for (int i = 0; i < BYTES; i++)
        host[i] = (unsigned char)(i * 7 + i / 256);
    backend->time_mark(stream, 0);
    backend->copy_in(copies, a, host, BYTES);
    backend->stream_wait(stream, copies);
    backend->copy(stream, b, a, BYTES);
    backend->time_mark(stream, LAST);
    backend->stream_wait(copies, stream);
    backend->copy_out(copies, back, b, BYTES);
    backend->sync(copies);
    backend->sync(stream);
    assert_memory_equal(back, host, BYTES);
    assert_true(backend->time_between(stream, 0, LAST) > 0.0);
    assert_true(backend->time_between(stream, 0, LAST) < 60.0);
    backend->memory(&left_after, &total);
    assert_true(left > 0 && left <= total && left_after > 0 && left_after <= total);
    backend->free(a);
    backend->free(b);
    backend->host_free(host);
    backend->host_free(back);
    backend->stream_close(copies);
    backend->stream_close(stream);
}

// A row is named by its numbers, so two rows that say the same would hide each other.
static void names_and_seeds_differ(void **state)
{
    (void)state;
    for (int a = 0; a < kernel_case_count; a++)
        for (int b = 0; b < a; b++) {
            char name_a[CASE_NAME], name_b[CASE_NAME];
            kernel_case_name(&kernel_cases[a], name_a);
            kernel_case_name(&kernel_cases[b], name_b);
            assert_string_not_equal(name_a, name_b);
            assert_true(kernel_cases[a].seed != kernel_cases[b].seed);
        }
}

// Whether the name has one of the parts, which commas separate.
static bool is_named(const char *name, const char *parts)
{
    for (const char *part = parts; part != NULL;) {
        const char *comma = strchr(part, ',');
        char *one = comma != NULL ? strndup(part, (size_t)(comma - part)) : strdup(part);
        bool found = strstr(name, one) != NULL;
        free(one);
        if (found)
            return true;
        part = comma != NULL ? comma + 1 : NULL;
    }
    return parts == NULL;
}

static bool is_small(const struct kernel_case *c, int64_t most)
{
    struct kernel_run run;
    int64_t values = 0;
    kernel_case_build(c, &run);
    for (int i = 0; i < run.count; i++)
        values += run.tensors[i].rows * run.tensors[i].columns;
    kernel_run_release(&run);
    return values <= most;
}

// Fills both arrays; parts: of names, NULL: any; most: values, 0: any. Returns how many.
static size_t add_cases(const struct test_backend *on, const char *parts, int64_t most,
                        struct test_case *cases, struct CMUnitTest *tests)
{
    size_t count = 0;
    for (int i = 0; i < kernel_case_count; i++) {
        struct test_case *test = &cases[count];
        *test = (struct test_case){.on = on, .c = &kernel_cases[i]};
        kernel_case_name(test->c, test->name);
        if ((test->c->flags & CASE_BENCH) || !is_named(test->name, parts) ||
            (most > 0 && !is_small(test->c, most)))
            continue;
        tests[count++] = (struct CMUnitTest){test->name, runs_as_expected, NULL, NULL, test};
        if (most > 0)
            continue;
        cases[count] = *test;
        strncat(cases[count].name, "/repeats", CASE_NAME - strlen(test->name) - 1);
        tests[count] =
            (struct CMUnitTest){cases[count].name, repeats_bitwise, NULL, NULL, &cases[count]};
        count++;
    }
    return count;
}

int main(int argc, char **argv)
{
    struct test_backend on;
    int status = test_backend_named(&on, argc > 1 ? argv[1] : "cpu");
    if (status != 0)
        return status;
    size_t most = 2 * (size_t)kernel_case_count + 5;
    struct test_case *cases = calloc(most, sizeof(*cases));
    struct CMUnitTest *tests = calloc(most, sizeof(*tests));
    size_t count = add_cases(&on, argc > 2 ? argv[2] : NULL,
                             argc > 3 ? strtoll(argv[3], NULL, 10) : 0, cases, tests);
    cases[count] = (struct test_case){.on = &on};
    struct CMUnitTest general[] = {
        {"every_kernel_has_a_case", every_kernel_has_a_case, NULL, NULL, &cases[count]},
        {"no_entry_is_missing", no_entry_is_missing, NULL, NULL, &cases[count]},
        {"names_and_seeds_differ", names_and_seeds_differ, NULL, NULL, &cases[count]},
        {"memory_moves", memory_moves, NULL, NULL, &cases[count]},
        {"streams_wait_and_tell_time", streams_wait_and_tell_time, NULL, NULL, &cases[count]},
    };
    memcpy(tests + count, general, sizeof(general));
    count += sizeof(general) / sizeof(general[0]);
    int failed = _cmocka_run_group_tests(on.name, tests, count, NULL, NULL);
    free(tests);
    free(cases);
    return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
