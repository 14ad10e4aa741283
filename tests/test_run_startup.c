// Start-up and steady state (case C14): many documents are indexed without reading their features; what
// a block row costs does not depend on how many there are; memory stays flat.
// `run_startup --documents 1000000` reports the start with that many.
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/log.h"
#include "base/memory.h"
#include "base/rng.h"
#include "base/timer.h"
#include "tests/support/run_fixture.h"
#include "tests/support/step_fixture.h"
#include "trainer/files.h"

static struct run_fixture fixture;
static int64_t documents = 10000;

static int open_test(void **state)
{
    (void)state;
    run_fixture_open(&fixture);
    return 0;
}

static int close_test(void **state)
{
    (void)state;
    run_fixture_close(&fixture);
    return 0;
}

// ---- start ---------------------------------------------------------------------------------------

// Returns tokens. One layer and the last hidden state: 32 bytes a token beside 5 of ids and masks.
static int64_t write_many(int64_t count)
{
    int64_t *lengths = memory_alloc((size_t)count, sizeof(*lengths)), tokens = 0;
    for (int64_t d = 0; d < count; d++)
        tokens += lengths[d] = 10 + d * 7 % 23;
    struct fixture_options options = {
        .seed = 3, .layers = 1, .documents = count, .lengths = lengths, .crc = true};
    fixture_shard(run_path(&fixture, "train.h5"), &options);
    free(lengths);
    return tokens;
}

// Bytes that the process has read by calls so far.
static int64_t bytes_read(const struct program *program)
{
    char path[64];
    long long bytes = -1;
    snprintf(path, sizeof(path), "/proc/%ld/io", (long)program->pid);
    char *text = program_text(path);
    if (sscanf(text, "rchar: %lld", &bytes) != 1)
        bytes = -1;
    free(text);
    return bytes;
}

static void first_step_comes_soon(void **state)
{
    (void)state;
    struct program program = {0};
    int64_t tokens = write_many(documents);
    double limit = documents <= 10000 ? 15.0 : 600.0;
    double start = timer_now();
    run_train_start(&fixture, &program, "many", NULL);
    program_wait_step(&program, run_path(&fixture, "many"), 1, limit);
    double seconds = timer_now() - start;
    program_signal(&program, SIGSTOP);
    int64_t read = bytes_read(&program), steps = program_step(run_path(&fixture, "many"));
    program_signal(&program, SIGCONT);
    program_signal(&program, SIGKILL);
    program_wait(&program, 60.0);
    print_message("%lld documents, %lld tokens: first step after %.2f s, %.1f MB of %.1f MB read, "
                  "peak memory %.0f MB\n",
                  (long long)documents, (long long)tokens, seconds, 1e-6 * (double)read,
                  1e-6 * (double)files_size(run_path(&fixture, "train.h5")),
                  1e-6 * (double)program.peak_bytes);
    if (read < 0) {
        print_message("skipped: /proc/PID/io can not be read\n");
        skip();
    }
    // Ids and masks, offsets, ids and CRCs of documents, both when the file is tried and when it is
    // opened; rows of the steps so far and of those read ahead; target and libraries.
    int64_t row_bytes = 256 * (5 + 2 * 8 * 2);
    int64_t wanted = 5 * tokens + 2 * 20 * documents + (2 * steps + 6) * row_bytes + 2000000;
    if (read > wanted)
        fail_msg("%lld bytes were read before the first step was done, %lld would do",
                 (long long)read, (long long)wanted);
}

// ---- steady state --------------------------------------------------------------------------------

static double cpu_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Least CPU time of three, since the machine may be doing other things.
static double time_of(struct step_fixture *f, const struct row *row, const int32_t *anchors,
                      int64_t count)
{
    double least = INFINITY;
    for (int i = 0; i < 3; i++) {
        double start = cpu_now();
        step_fixture_run(f, row, anchors, count);
        least = fmin(least, cpu_now() - start);
    }
    return least;
}

// Another number of anchors every step, so another shape of nearly everything.
static void block_rows_cost_the_same(void **state)
{
    (void)state;
    enum { STEPS = 24, TOKENS = 640, LEAST = 160 };
    static const char *const sets[] = {"data.seq_len=640", "memory.group_rows=1024",
                                       "drafter.intermediate_size=64"};
    struct step_fixture_options options = {
        .seed = 4, .vocab = 256, .hidden = 32, .sets = sets, .set_count = 3};
    struct step_fixture f;
    struct row row;
    struct rng_key key = rng_key_make(17, 0, 0, RNG_TEST);
    int32_t anchors[TOKENS], length = TOKENS;
    double cost[STEPS], sorted[STEPS];
    step_fixture_init(&f, &options);
    step_fixture_open(&f);
    step_fixture_row(&f, &row, &length, 1, 5);
    for (int s = 0; s < STEPS; s++) {
        int64_t count = LEAST + (int64_t)(rng_u64(key, (uint64_t)s) % (TOKENS - 1 - LEAST));
        for (int64_t i = 0; i < count; i++)
            anchors[i] = (int32_t)(i * (TOKENS - 1) / count);
        cost[s] = time_of(&f, &row, anchors, count) / (double)(8 * count);
    }
    memcpy(sorted, cost, sizeof(sorted));
    qsort(sorted, STEPS, sizeof(*sorted), by_value);
    double median = sorted[STEPS / 2];
    print_message("CPU time of a block row: %.2f us, least %.2f, most %.2f\n", 1e6 * median,
                  1e6 * sorted[0], 1e6 * sorted[STEPS - 1]);
    if (!(sorted[STEPS - 1] <= 2.0 * median) || !(sorted[0] >= 0.5 * median))
        fail_msg("the cost of a block row is not within a factor of 2 of the median");
    row_close(&row, NULL);
    step_fixture_release(&f);
}

// 10,000 rows over hundreds of epochs, with validations and checkpoints between.
static void memory_stays_flat(void **state)
{
    (void)state;
#ifdef DTRAIN_SANITIZE
    print_message("skipped: the sanitizer keeps freed memory\n");
    skip();
#endif
    const char *const sets[] = {
        "run.max_steps=1000",    "run.epochs=1000",       "data.seq_len=64",
        "data.rows_per_step=10", "anchors.max_anchors=4", "log.every=100",
        "data.val=[val.h5]",     "validation.every=100",  "checkpoint.keep=1",
        "checkpoint.every=100",  "log.tensorboard=true",  "checkpoint.background=true"};
    for (size_t i = 0; i < sizeof(sets) / sizeof(*sets); i++)
        run_fixture_set(&fixture, sets[i]);
    assert_int_equal(run_train(&fixture, "flat", NULL), 0);
    cJSON *metrics = program_metrics(run_path(&fixture, "flat"));
    double rows = 0.0, early = program_number(program_line(metrics, 250, "loss"), "memory_bytes");
    double late = program_number(program_line(metrics, 1000, "loss"), "memory_bytes");
    const cJSON *line;
    cJSON_ArrayForEach(line, metrics)
    {
        if (cJSON_HasObjectItem(line, "loss"))
            rows += program_number(line, "rows");
    }
    cJSON_Delete(metrics);
    print_message("%.0f rows, peak memory %.1f MB after 250 steps, %.1f MB after 1000\n", rows,
                  1e-6 * early, 1e-6 * late);
    assert_true(rows > 8000.0);
    // 150 bytes of every row that are not given back would show.
    assert_true(late - early <= 1.2e6);
}

// What started the run may be larger than the run.
static void memory_is_the_runs_own(void **state)
{
    (void)state;
    size_t bytes = (size_t)512 << 20;
    unsigned char *large = memory_alloc(bytes, 1);
    memset(large, 1, bytes);
    int status = run_train(&fixture, "own", "--set", "run.max_steps=2", NULL);
    int last = large[bytes - 1]; // it was there all the time
    free(large);
    assert_int_equal(status, 0);
    assert_int_equal(last, 1);
    cJSON *metrics = program_metrics(run_path(&fixture, "own"));
    double memory = program_number(program_line(metrics, 2, "lr"), "memory_bytes");
    if (!(memory > 0.0 && memory < (double)bytes))
        fail_msg("the run's %.0f MB are those of the process that started it", 1e-6 * memory);
    cJSON_Delete(metrics);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_test, close_test)

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        TEST(first_step_comes_soon),
        cmocka_unit_test(block_rows_cost_the_same),
        TEST(memory_stays_flat),
        TEST(memory_is_the_runs_own),
    };
    if (argc == 3 && strcmp(argv[1], "--documents") == 0) {
        const struct CMUnitTest start[] = {TEST(first_step_comes_soon)};
        documents = atoll(argv[2]);
        return cmocka_run_group_tests_name("run_startup", start, NULL, NULL);
    }
    return cmocka_run_group_tests_name("run_startup", tests, NULL, NULL);
}
