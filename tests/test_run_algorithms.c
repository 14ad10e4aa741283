// GEMM algorithms of whole training runs in this process, on a CPU backend that has some to choose:
// which products are shown to be chosen for, which choices are obeyed, kept, and made anew when the library
// knows them no more. Linked with --wrap=backend_cpu.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "kernels/arguments.h"
#include "kernels/backend.h"
#include "kernels/gemm_algorithms.h"
#include "kernels/kernels.h"
#include "tests/support/run_fixture.h"
#include "trainer/commands.h"
#include "trainer/files.h"

// The only algorithm that the library knows; backend functions get no context.
static const char *known = "01";
static int times_chosen;
static char *kept_meanwhile; // a command that stands for another run; NULL: none

// A product of a step, with its rows where those are fixed, else with the most there were.
struct shown {
    struct gemm_product product;
    bool fixed;
};
enum { MOST_SHOWN = 256 };
static struct shown shown[MOST_SHOWN]; // between record and tune
static int shown_count;
static bool showing;
static int multiplied, multiplied_fixed, unseen; // after that

const struct backend *__real_backend_cpu(void);
const struct backend *__wrap_backend_cpu(void);

static void made_record(struct stream *stream)
{
    (void)stream;
    shown_count = multiplied = multiplied_fixed = unseen = 0;
    showing = true;
}

static bool was_shown(const struct gemm_product *product, bool fixed)
{
    int64_t rows = gemm_product_rows(product);
    for (int i = 0; i < shown_count; i++) {
        struct gemm_product alike = gemm_product_with_rows(&shown[i].product, rows);
        int64_t most = gemm_product_rows(&shown[i].product);
        if (shown[i].fixed == fixed && gemm_product_equal(&alike, product) &&
            (fixed ? rows == most : rows <= most))
            return true;
    }
    return false;
}

static void watched_gemm(struct stream *stream, const struct gemm *gemm)
{
    struct gemm g = gemm_with_strides(gemm);
    struct gemm_product product = gemm_product_of(&g);
    if (showing && !was_shown(&product, g.fixed)) {
        assert_true(shown_count < MOST_SHOWN);
        shown[shown_count++] = (struct shown){product, g.fixed};
    } else if (!showing && g.m > 0) {
        char text[GEMM_PRODUCT_TEXT];
        multiplied++;
        multiplied_fixed += g.fixed;
        if (!was_shown(&product, g.fixed)) {
            gemm_product_print(&product, text);
            print_message("not shown: %s\n", text);
            unseen++;
        }
    }
    __real_backend_cpu()->kernels->gemm(stream, gemm);
}

static void made_tune(struct stream *stream, double seconds, struct gemm_algorithms *algorithms)
{
    (void)stream;
    (void)seconds;
    showing = false;
    times_chosen++;
    algorithms->count = 1;
    snprintf(algorithms->items[0].product, GEMM_PRODUCT_TEXT,
             "bf16 fp32 TN+ m 256 n 128 k 512 lda 256 ldb 128 ldc 128");
    snprintf(algorithms->items[0].algorithm, GEMM_ALGORITHM_TEXT, "%s", known);
    if (kept_meanwhile != NULL)
        assert_int_equal(system(kept_meanwhile), 0);
}

static int made_obey(struct stream *stream, const struct gemm_algorithms *algorithms,
                     struct error *err)
{
    (void)stream;
    if (strcmp(algorithms->items[0].algorithm, known) == 0)
        return 0;
    return error_set(err, "the library refuses %s", algorithms->items[0].algorithm);
}

const struct backend *__wrap_backend_cpu(void)
{
    static struct backend backend;
    static struct kernels kernels;
    backend = *__real_backend_cpu();
    kernels = *backend.kernels;
    kernels.gemm = watched_gemm;
    backend.kernels = &kernels;
    backend.gemm_record = made_record;
    backend.gemm_tune = made_tune;
    backend.gemm_obey = made_obey;
    return &backend;
}

// Trains `steps` in the folder `name` with this value of kernels.algorithms and the fixture's sets. The exit
// status.
static int train(const struct run_fixture *f, const char *name, int steps, const char *algorithms)
{
    enum { MOST_SETS = 32 };
    char *run_dir = memory_format("run.dir=%s/%s", f->folder, name);
    char *key = memory_format("kernels.algorithms=%s", algorithms);
    char *max_steps = memory_format("run.max_steps=%d", steps);
    char *config = memory_format("%s/run.yaml", f->folder);
    const char *sets[MOST_SETS] = {run_dir, key, max_steps, "schedule.kind=constant",
                                   "schedule.warmup_ratio=0"};
    size_t count = 5;
    for (int i = 0; i < f->set_count; i++)
        sets[count++] = f->sets[i];
    struct options options = {
        .config = config, .sets = sets, .set_count = count, .resume = "auto", .command = "test"};
    int status = command_train(&options);
    free(config);
    free(max_steps);
    free(key);
    free(run_dir);
    return status;
}

static bool holds(const struct run_fixture *f, const char *name, const char *algorithm)
{
    char *quoted = memory_format("\"algorithm\":\t\"%s\"", algorithm);
    bool says = program_says(run_path(f, "%s/execution.json", name), quoted);
    free(quoted);
    return says;
}

static bool logs(const struct run_fixture *f, const char *name, const char *words)
{
    return program_says(run_path(f, "%s/log.txt", name), words);
}

static void shell(const struct run_fixture *f, const char *command)
{
    char *all = memory_format("cd %s && %s", f->folder, command);
    assert_int_equal(system(all), 0);
    free(all);
}

static int open_fixture(void **state)
{
    struct run_fixture *f = memory_alloc(1, sizeof(*f));
    run_fixture_open(f);
    known = "01";
    times_chosen = 0;
    *state = f;
    return 0;
}

static int close_fixture(void **state)
{
    free(kept_meanwhile);
    kept_meanwhile = NULL;
    run_fixture_close(*state);
    free(*state);
    return 0;
}

static void what_was_kept_is_taken_unless_it_is_off(void **state)
{
    const struct run_fixture *f = *state;
    const char *folder = run_path(f, "kept");
    assert_int_equal(train(f, "first", 1, folder), EXIT_DONE);
    assert_int_equal(train(f, "second", 1, folder), EXIT_DONE);
    assert_int_equal(times_chosen, 1);
    assert_true(holds(f, "second", "01"));
    assert_true(logs(f, "second", "as chosen before") && logs(f, "second", "/kept/gemm-"));
    assert_int_equal(train(f, "off", 1, "none"), EXIT_DONE);
    assert_int_equal(times_chosen, 2);
}

static void what_is_refused_of_the_kept_is_chosen_anew(void **state)
{
    const struct run_fixture *f = *state;
    const char *folder = run_path(f, "kept");
    assert_int_equal(train(f, "old", 1, folder), EXIT_DONE);
    known = "02";
    assert_int_equal(train(f, "new", 1, folder), EXIT_DONE);
    assert_true(holds(f, "new", "02"));
    assert_true(logs(f, "new", "/kept/gemm-") && logs(f, "new", "the library refuses 01"));
    assert_int_equal(train(f, "next", 1, folder), EXIT_DONE);
    assert_int_equal(times_chosen, 2);
    assert_false(logs(f, "next", "refuses"));
}

// The same when another run keeps it while this one chooses.
static void what_another_keeps_meanwhile_is_no_error(void **state)
{
    const struct run_fixture *f = *state;
    const char *folder = run_path(f, "kept");
    assert_int_equal(train(f, "old", 1, folder), EXIT_DONE);
    shell(f, "mv kept aside");
    known = "02";
    kept_meanwhile =
        memory_format("mkdir -p %s/kept && cp %s/aside/* %s/kept", f->folder, f->folder, f->folder);
    assert_int_equal(train(f, "new", 1, folder), EXIT_DONE);
    assert_true(holds(f, "new", "02"));
    assert_true(logs(f, "new", "the library refuses 01"));
}

static void what_a_checkpoint_had_is_obeyed_or_refused(void **state)
{
    const struct run_fixture *f = *state;
    assert_int_equal(train(f, "run", 1, "none"), EXIT_DONE);
    shell(f, "mkdir fresh && cp run/execution.json fresh");
    assert_int_equal(train(f, "run", 2, "none"), EXIT_DONE);
    assert_int_equal(times_chosen, 1);
    known = "02";
    assert_int_equal(train(f, "run", 3, "none"), EXIT_FAILED);
    assert_int_equal(program_checkpoint(run_path(f, "run")), 2);
    assert_true(holds(f, "run", "01"));
    // Without a checkpoint there is nothing to continue.
    assert_int_equal(train(f, "fresh", 1, "none"), EXIT_DONE);
    assert_true(holds(f, "fresh", "02"));
    assert_true(logs(f, "fresh", "fresh/execution.json can not be obeyed") &&
                logs(f, "fresh", "the library refuses 01"));
}

// Whatever a step multiplies later is one of the products that were shown before the first step, at no more
// rows: so it has an algorithm in execution.json. Muon's products are shown at their very sizes.
static void all_products_of_a_step_are_shown(void **state)
{
    struct run_fixture *f = *state;
    assert_int_equal(train(f, "adamw", 3, "none"), EXIT_DONE);
    assert_int_equal(unseen, 0);
    assert_true(multiplied > 100);
    assert_int_equal(multiplied_fixed, 0);
    run_fixture_set(f, "optimizer.kind=muon");
    assert_int_equal(train(f, "muon", 3, "none"), EXIT_DONE);
    assert_int_equal(unseen, 0);
    assert_true(multiplied_fixed > 100 && multiplied > multiplied_fixed);
    run_fixture_set(f, "run.compute=bf16");
    assert_int_equal(train(f, "bf16", 3, "none"), EXIT_DONE);
    assert_int_equal(unseen, 0);
    assert_true(multiplied_fixed > 100);
}

static void all_products_of_a_markov_head_are_shown(void **state)
{
    struct run_fixture *f = *state;
    run_fixture_set(f, "drafter.markov_rank=4");
    run_fixture_set(f, "optimizer.kind=muon");
    assert_int_equal(train(f, "markov", 3, "none"), EXIT_DONE);
    assert_int_equal(unseen, 0);
    assert_true(multiplied_fixed > 100 && multiplied > multiplied_fixed);
}

static void all_products_of_eagle3_are_shown(void **state)
{
    static const char *const sets[] = {"drafter.kind=eagle3", "drafter.ttt_steps=4",
                                       "drafter.style=llama", "drafter.layers=2",
                                       "drafter.lm_head=trainable"};
    struct run_fixture *f = *state;
    for (size_t i = 0; i < sizeof(sets) / sizeof(*sets); i++)
        run_fixture_set(f, sets[i]);
    assert_int_equal(train(f, "adamw", 3, "none"), EXIT_DONE);
    assert_int_equal(unseen, 0);
    assert_true(multiplied > 100);
    run_fixture_set(f, "optimizer.kind=muon");
    assert_int_equal(train(f, "muon", 3, "none"), EXIT_DONE);
    assert_int_equal(unseen, 0);
    assert_true(multiplied_fixed > 100);
}

// Of scoring, too, where it compares with more of the vocabulary than training does.
static void all_products_of_scoring_are_shown(void **state)
{
    static const char *const sets[] = {
        "drafter.kind=eagle3",    "drafter.ttt_steps=2",
        "drafter.style=llama",    "drafter.draft_vocab=map.safetensors",
        "loss.out_of_vocab=kept", "loss.full_vocab_metrics=false",
        "data.val=[val.h5]",      "validation.every=2"};
    struct run_fixture *f = *state;
    assert_int_equal(run_command(f, "map", false, "vocab", "--size", "24", "--out",
                                 run_path(f, "map.safetensors"), run_path(f, "train.h5"), NULL),
                     0);
    for (size_t i = 0; i < sizeof(sets) / sizeof(*sets); i++)
        run_fixture_set(f, sets[i]);
    assert_int_equal(train(f, "scored", 3, "none"), EXIT_DONE);
    assert_int_equal(unseen, 0);
    assert_true(multiplied > 100);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, open_fixture, close_fixture)
    const struct CMUnitTest tests[] = {
        TEST(what_was_kept_is_taken_unless_it_is_off),
        TEST(what_is_refused_of_the_kept_is_chosen_anew),
        TEST(what_another_keeps_meanwhile_is_no_error),
        TEST(what_a_checkpoint_had_is_obeyed_or_refused),
        TEST(all_products_of_a_step_are_shown),
        TEST(all_products_of_a_markov_head_are_shown),
        TEST(all_products_of_eagle3_are_shown),
        TEST(all_products_of_scoring_are_shown),
    };
    return cmocka_run_group_tests_name("run_algorithms", tests, NULL, NULL);
}
