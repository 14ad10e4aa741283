// A run whose features come through a spool, with the extractor alive beside it: bitwise the run from
// plain shards, whatever ends either side at whatever moment. `run_spool --kills 50` kills that often.
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/memory.h"
#include "base/rng.h"
#include "base/timer.h"
#include "data/shard_probe.h"
#include "data/spool_folder.h"
#include "tests/support/run_fixture.h"
#include "tests/support/spool_feeder.h"

enum { LIMIT = 120, SHARD_DOCUMENTS = 7 };

static struct run_fixture fixture;
static struct fixture documents; // of train.h5
static struct feeder feeder;
static const char *order, *spool;
static int kills = 10;
static double whole_seconds; // of a run through a spool

static void sleep_for(double seconds)
{
    double whole = floor(seconds);
    nanosleep(&(struct timespec){(time_t)whole, (long)((seconds - whole) * 1e9)}, NULL);
}

static void remove_tree(const char *name)
{
    fixture_folder_remove(memory_strdup(run_path(&fixture, "%s", name)));
}

// A test begins with an empty spool.
static int fresh_spool(void **state)
{
    (void)state;
    feeder_kill(&feeder);
    remove_tree("spool");
    return mkdir(spool, 0777);
}

// The config of spooled runs; `more` "key=value" pairs, NULL at the end.
#define SPOOLED                                                                                    \
    "--set", "data.train=[]", "--set", "data.manifest=manifest.h5", "--set", "data.spool=spool",   \
        "--set", "data.spool_bytes=1MiB"

static int open_all(void **state)
{
    (void)state;
    struct fixture_options options = run_train_shard();
    run_fixture_open(&fixture);
    // Steps long enough to be met by a signal.
    run_fixture_set(&fixture, "drafter.intermediate_size=1024");
    fixture_make(&documents, &options);
    order = run_path(&fixture, "order.out");
    spool = run_path(&fixture, "spool");
    feeder = (struct feeder){.folder = spool,
                             .order = order,
                             .source = &documents,
                             .documents = SHARD_DOCUMENTS,
                             .pause_us = 20000};
    if (run_train(&fixture, "whole", NULL) != 0)
        return -1;
    if (run_command(&fixture, "manifest", false, "data", "manifest", "--out",
                    run_path(&fixture, "manifest.h5"), run_path(&fixture, "train.h5"), NULL) != 0)
        return -1;
    return run_command(&fixture, "order", true, "data", "order", SPOOLED, NULL);
}

static int close_all(void **state)
{
    (void)state;
    feeder_kill(&feeder);
    fixture_release(&documents);
    run_fixture_close(&fixture);
    return 0;
}

static size_t shards_left(void)
{
    struct spool_listing listing;
    struct error err = {""};
    assert_int_equal(spool_list(&listing, spool, &err), 0);
    size_t count = listing.count;
    spool_listing_release(&listing);
    return count;
}

// ---- both alive ----------------------------------------------------------------------------------

static void spooled_run_equals_shards(void **state)
{
    (void)state;
    double start = timer_now();
    feeder_start(&feeder);
    assert_int_equal(run_train(&fixture, "spooled", SPOOLED, NULL), 0);
    whole_seconds = timer_now() - start;
    run_must_equal(&fixture, "whole", "spooled", RUN_STEPS);
    assert_int_equal(feeder_wait(&feeder, LIMIT), 0); // it was told that the run had ended
    assert_int_equal(shards_left(), 0);
    cJSON *metrics = program_metrics(run_path(&fixture, "spooled"));
    double waited = 0.0;
    const cJSON *line;
    cJSON_ArrayForEach(line, metrics)
    {
        waited += program_number(line, "spool_wait_seconds");
        assert_true(program_number(line, "spool_bytes") <= 1048576.0);
    }
    assert_true(waited > 0.0); // the feeder pauses longer than a step takes at the start
    cJSON_Delete(metrics);
}

// The order that is printed is the one that is read, from any step.
static void order_from_a_step(void **state)
{
    (void)state;
    int64_t count = 0;
    int64_t *all = feeder_order(order, &documents, &count);
    assert_true(count > 2 * RUN_DOCUMENTS); // several epochs
    assert_int_equal(
        run_command(&fixture, "part", true, "data", "order", SPOOLED, "--from-step", "13", NULL),
        0);
    char *whole_text = program_text(order), *part = program_text(run_path(&fixture, "part.out"));
    char *first = strstr(part, "tokens\n") + strlen("tokens\n");
    long long serial, epoch, step;
    assert_int_equal(sscanf(first, "%lld %lld %lld", &serial, &epoch, &step), 3);
    assert_int_equal(step, 13);
    assert_true(serial > 0 && serial < count);
    char *same = strstr(whole_text, first); // the end of the whole order, word for word
    assert_non_null(same);
    assert_int_equal(strlen(same), strlen(first));
    assert_int_equal(
        run_command(&fixture, "none", true, "data", "order", SPOOLED, "--from-step", "21", NULL),
        2);
    run_must_say(&fixture, "none", "--from-step 21: the run has 20 steps");
    free(part);
    free(whole_text);
    free(all);
}

// ---- kills ---------------------------------------------------------------------------------------

enum victim { VICTIM_TRAINER, VICTIM_EXTRACTOR, VICTIM_BOTH, VICTIMS };

// Kills one side, or both, after a while; the other one goes on. 1: the run had ended before.
static int kill_once(enum victim victim, double after)
{
    struct program program = {0};
    if (feeder.pid == 0)
        feeder_start(&feeder);
    run_train_start(&fixture, &program, "often", SPOOLED, NULL);
    sleep_for(after);
    if (victim != VICTIM_TRAINER)
        feeder_kill(&feeder);
    if (victim == VICTIM_EXTRACTOR) { // the run waits, and goes on with the next extractor
        sleep_for(0.1);
        feeder_start(&feeder);
        int status = program_wait(&program, LIMIT);
        assert_int_equal(status, 0);
        return 1;
    }
    program_signal(&program, SIGKILL);
    int status = program_wait(&program, LIMIT);
    assert_true(status == 128 + SIGKILL || status == 0);
    return status == 0;
}

static void kills_at_random_moments(void **state)
{
    (void)state;
    struct rng_key key = rng_key_make(37, 0, 0, RNG_TEST);
    int ended = 0;
    for (int round = 0; round < kills; round++) {
        double after = whole_seconds * (double)rng_uniform(key, (uint64_t)round);
        if (!kill_once((enum victim)(round % VICTIMS), after))
            continue;
        ended++;
        run_must_equal(&fixture, "whole", "often", RUN_STEPS);
        remove_tree("often");
        if (feeder.pid != 0)
            assert_int_equal(feeder_wait(&feeder, LIMIT), 0);
        assert_int_equal(shards_left(), 0);
        // What the ended run said would end the next run's extractor before that run begins.
        assert_int_equal(fresh_spool(NULL), 0);
    }
    if (feeder.pid == 0)
        feeder_start(&feeder);
    assert_int_equal(run_train(&fixture, "often", SPOOLED, NULL), 0);
    run_must_equal(&fixture, "whole", "often", RUN_STEPS);
    print_message("%d rounds, %d runs came to their end in them\n", kills, ended);
}

// A state that can not be written for a while holds the extractor up, and is written when it can be.
static void state_that_can_not_be_written(void **state)
{
    (void)state;
    struct program program = {0};
    const char *in_the_way = run_path(&fixture, "spool/spool.json.tmp");
    const char *output = run_path(&fixture, "blocked.out");
    remove_tree("blocked");
    feeder_start(&feeder);
    run_train_start(&fixture, &program, "blocked", SPOOLED, "--set", "data.spool_bytes=256KiB",
                    NULL);
    program_wait_step(&program, run_path(&fixture, "blocked"), 2, LIMIT);
    double end = timer_now() + LIMIT;
    while (mkdir(in_the_way, 0777) != 0 && timer_now() < end) // while a state is being written
        sleep_for(0.001);
    while (!program_says(output, "the extractor may stand still until this is mended") &&
           timer_now() < end)
        sleep_for(0.01);
    sleep_for(0.5); // the extractor fills the spool and stands still
    assert_true(program_runs(&program));
    assert_int_equal(rmdir(in_the_way), 0);
    assert_int_equal(program_wait(&program, LIMIT), 0);
    run_must_say(&fixture, "blocked", "the extractor may stand still until this is mended");
    run_must_equal(&fixture, "whole", "blocked", RUN_STEPS);
}

// A resumed run asks again for what was removed: the extractor goes back.
static void resume_goes_back(void **state)
{
    (void)state;
    struct program program = {0};
    struct spool_state before, after;
    struct error err = {""};
    remove_tree("back");
    feeder_start(&feeder);
    run_train_start(&fixture, &program, "back", SPOOLED, NULL);
    program_wait_step(&program, run_path(&fixture, "back"), 7, LIMIT);
    program_signal(&program, SIGKILL);
    int status = program_wait(&program, LIMIT);
    assert_true(status == 128 + SIGKILL || status == 0);
    assert_int_equal(spool_state_read(&before, spool, &err), 1);
    assert_true(before.serial > 0);
    int64_t saved = program_checkpoint(run_path(&fixture, "back"));
    assert_true(saved >= 4);
    if (status != 0)
        assert_int_equal(run_train(&fixture, "back", SPOOLED, NULL), 0);
    run_must_equal(&fixture, "whole", "back", RUN_STEPS);
    assert_int_equal(feeder_wait(&feeder, LIMIT), 0);
    assert_int_equal(spool_state_read(&after, spool, &err), 1);
    assert_true(after.finished && after.serial == after.end);
}

// Ranks read their own rows of a step; rank 0 removes what all have used.
static void two_ranks_share_a_spool(void **state)
{
    (void)state;
    if (!program_has_ranks()) {
        print_message("no mpirun, or a build without MPI\n");
        skip();
    }
    fixture.ranks = 2;
    int plain = run_train(&fixture, "plain-2", "--set", "data.rows_per_step=5", NULL);
    int stopped = run_train(&fixture, "spooled-2", SPOOLED, "--set", "data.rows_per_step=5",
                            "--set", "data.spool_wait=1", NULL);
    fixture.ranks = 0;
    assert_int_equal(plain, 0);
    assert_int_equal(stopped, 75); // nobody feeds it yet
    int ordered = run_command(&fixture, "order", true, "data", "order", SPOOLED, "--set",
                              "data.rows_per_step=5", NULL);
    feeder_start(&feeder);
    fixture.ranks = 2;
    int spooled = run_train(&fixture, "spooled-2", SPOOLED, "--set", "data.rows_per_step=5", NULL);
    fixture.ranks = 0;
    assert_int_equal(ordered, 0);
    assert_int_equal(spooled, 0);
    run_must_equal(&fixture, "plain-2", "spooled-2", RUN_STEPS);
    assert_int_equal(feeder_wait(&feeder, LIMIT), 0);
    assert_int_equal(shards_left(), 0);
    assert_int_equal(run_command(&fixture, "order", true, "data", "order", SPOOLED, NULL), 0);
}

// ---- what is not there, or not right -------------------------------------------------------------

// Without an extractor a run waits as long as it was told to, says so, saves and can be continued.
static void waiting_has_an_end(void **state)
{
    (void)state;
    remove_tree("waits");
    assert_int_equal(run_train(&fixture, "waits", SPOOLED, "--set", "data.spool_wait=1", NULL), 75);
    run_must_say(&fixture, "waits", "nothing came for 1 s (data.spool_wait) while document 0 was");
    run_must_say(&fixture, "waits", "stopping at step 0");
    feeder_start(&feeder);
    assert_int_equal(run_train(&fixture, "waits", SPOOLED, NULL), 0);
    run_must_equal(&fixture, "whole", "waits", RUN_STEPS);
}

// Of this process's children that have ended.
static double processor_seconds(void)
{
    struct rusage used;
    assert_int_equal(getrusage(RUSAGE_CHILDREN, &used), 0);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
           1e-6 * (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
}

// And costs nothing: readers that wait do not keep one another awake.
static void waiting_is_said(void **state)
{
    (void)state;
    remove_tree("told");
    double begin = processor_seconds();
    assert_int_equal(run_train(&fixture, "told", SPOOLED, "--set", "data.spool_wait=1", NULL), 75);
    double short_wait = processor_seconds() - begin;
    remove_tree("told");
    begin = processor_seconds();
    assert_int_equal(run_train(&fixture, "told", SPOOLED, "--set", "data.spool_wait=7", NULL), 75);
    double long_wait = processor_seconds() - begin;
    if (!(long_wait - short_wait < 2.0))
        fail_msg("6 s of waiting took %.2f s of processors", long_wait - short_wait);
    run_must_say(&fixture, "told", "waiting for the extractor: document 0, 5 s; its shard is not");
    run_must_say(&fixture, "told", "no extractor holds extractor.lock");
}

// Until a run is ready for its first step.
static void wait_for_start(const char *name)
{
    const char *output = run_path(&fixture, "%s.out", name);
    double end = timer_now() + LIMIT;
    while (!program_says(output, "steps: 20, from step 1") && timer_now() < end)
        sleep_for(0.01);
}

// A signal ends a wait like a step.
static void signal_ends_a_wait(void **state)
{
    (void)state;
    struct program program = {0};
    remove_tree("signal");
    run_train_start(&fixture, &program, "signal", SPOOLED, NULL);
    wait_for_start("signal");
    program_signal(&program, SIGTERM);
    assert_int_equal(program_wait(&program, LIMIT), 75);
}

// A run that fails over a shard names it.
static void must_fail_over(const char *name, const char *words)
{
    remove_tree(name);
    assert_int_equal(run_train(&fixture, name, SPOOLED, NULL), 1);
    run_must_say(&fixture, name, words);
}

static void wrong_shards_are_refused(void **state)
{
    (void)state;
    struct error err = {""};
    int64_t count = 0;
    int64_t *right = feeder_order(order, &documents, &count);
    int64_t wrong[SHARD_DOCUMENTS];
    for (int64_t i = 0; i < SHARD_DOCUMENTS; i++)
        wrong[i] = right[i + 1]; // of another order
    assert_int_equal(feeder_write(spool, &documents, wrong, 0, SHARD_DOCUMENTS - 1, &err), 0);
    must_fail_over("wrong", "the shard was written for another order");

    struct fixture_options options = run_train_shard();
    struct fixture other;
    fresh_spool(NULL);
    options.hidden_states = documents.hidden_states;
    fixture_make(&other, &options);
    int64_t token = documents.content.doc_offsets[right[0]] + 3;
    other.input_ids[token] = (other.input_ids[token] + 1) % 64;
    assert_int_equal(feeder_write(spool, &other, right, 0, SHARD_DOCUMENTS - 1, &err), 0);
    must_fail_over("tokens", "in the manifest; remove the shard");

    // Of another cut: only its first document is in the right shard, too, and that one is open already.
    fresh_spool(NULL);
    assert_int_equal(feeder_write(spool, &documents, right, 0, SHARD_DOCUMENTS - 1, &err), 0);
    assert_int_equal(
        feeder_write(spool, &documents, right, SHARD_DOCUMENTS - 1, 2 * SHARD_DOCUMENTS - 2, &err),
        0);
    must_fail_over("cut", "hold the same documents; remove what is not of this run");

    fresh_spool(NULL);
    other.content.target_model = "another model";
    assert_int_equal(feeder_write(spool, &other, right, 0, SHARD_DOCUMENTS - 1, &err), 0);
    must_fail_over("other", "target_model is \"another model\"");
    run_must_say(&fixture, "other", "is not of this run; remove it");
    fixture_release(&other);

    fresh_spool(NULL);
    options.layers = 2;
    options.hidden_states = NULL;
    fixture_make(&other, &options);
    assert_int_equal(feeder_write(spool, &other, right, 0, SHARD_DOCUMENTS - 1, &err), 0);
    must_fail_over("planes", "the number of target_layer_ids is 2, but 3");
    fixture_release(&other);
    free(right);
}

// The caller frees its path.
static char *write_first_shard(void)
{
    struct error err = {""};
    int64_t count = 0;
    int64_t *right = feeder_order(order, &documents, &count);
    assert_int_equal(feeder_write(spool, &documents, right, 0, SHARD_DOCUMENTS - 1, &err), 0);
    free(right);
    return spool_file_path(spool, 0, SHARD_DOCUMENTS - 1);
}

// Half a file under its last name: not written as a writer must.
static void partial_files(void **state)
{
    (void)state;
    char *path = write_first_shard();
    struct stat status;
    assert_int_equal(stat(path, &status), 0);
    assert_int_equal(truncate(path, status.st_size / 2), 0);
    must_fail_over("partial", path);

    // Under another name it is nobody's business.
    char *unfinished = memory_format("%s.123.tmp", path);
    assert_int_equal(rename(path, unfinished), 0);
    remove_tree("partial");
    feeder_start(&feeder);
    assert_int_equal(run_train(&fixture, "partial", SPOOLED, NULL), 0);
    run_must_equal(&fixture, "whole", "partial", RUN_STEPS);
    free(unfinished);
    free(path);
}

// Where libhdf5 itself breaks down over a shard, the run says what `data check` would: it does not die of it.
static void a_shard_that_crashes_libhdf5(void **state)
{
    (void)state;
    char *path = write_first_shard();
    fixture_break_structure(path);
    char **said = shard_probe((const char *const *)&path, 1);
    assert_non_null(said[0]);
    must_fail_over("structure", said[0]);

    // Also under a starter that does not want to hear of its children: how they end is known all the same.
    struct program program = {0};
    remove_tree("structure");
    signal(SIGCHLD, SIG_IGN); // which the program inherits
    run_train_start(&fixture, &program, "structure", SPOOLED, NULL);
    signal(SIGCHLD, SIG_DFL);
    assert_int_equal(program_wait(&program, LIMIT), 1);
    run_must_say(&fixture, "structure", said[0]);
    shard_probe_free(said, 1);

    // Once it is gone, the extractor writes it again and the run goes on.
    assert_int_equal(unlink(path), 0);
    remove_tree("structure");
    feeder_start(&feeder);
    assert_int_equal(run_train(&fixture, "structure", SPOOLED, NULL), 0);
    run_must_equal(&fixture, "whole", "structure", RUN_STEPS);
    free(path);
}

static void other_orders_are_refused(void **state)
{
    (void)state;
    struct error err = {""};
    struct program program = {0};
    int64_t count = 0;
    int64_t *right = feeder_order(order, &documents, &count);
    remove_tree("first");
    remove_tree("second");
    run_train_start(&fixture, &program, "first", SPOOLED, NULL);
    wait_for_start("first");
    // Two runs on one spool.
    assert_int_equal(run_train(&fixture, "second", SPOOLED, NULL), 2);
    run_must_say(&fixture, "second", "another run reads this spool (process ");
    program_signal(&program, SIGKILL);
    program_wait(&program, LIMIT);
    // The lock of a killed run is no lock; its shards are another run's only with another order.
    assert_int_equal(feeder_write(spool, &documents, right, 0, SHARD_DOCUMENTS - 1, &err), 0);
    assert_int_equal(run_train(&fixture, "second", SPOOLED, "--set", "run.seed=8", NULL), 2);
    run_must_say(&fixture, "second", "holds 1 shards for another order of documents");
    assert_int_equal(shards_left(), 1);
    free(right);
}

// A plan knows from the manifest what it knows from shards.
static void plan_from_a_manifest(void **state)
{
    (void)state;
    assert_int_equal(run_command(&fixture, "plan-s", true, "plan", "--json", NULL), 0);
    assert_int_equal(run_command(&fixture, "plan-m", true, "plan", "--json", SPOOLED, NULL), 0);
    cJSON *shards = program_json(run_path(&fixture, "plan-s.out"));
    cJSON *manifest = program_json(run_path(&fixture, "plan-m.out"));
    cJSON *items[] = {cJSON_GetObjectItem(shards, "tensors"),
                      cJSON_GetObjectItem(manifest, "tensors")};
    assert_true(cJSON_IsArray(items[0]) && cJSON_GetArraySize(items[0]) > 10);
    assert_true(cJSON_Compare(items[0], items[1], true));
    cJSON_Delete(manifest);
    cJSON_Delete(shards);
}

static void configs_are_refused(void **state)
{
    (void)state;
    assert_int_equal(run_train(&fixture, "small", SPOOLED, "--set", "data.spool_bytes=1MiB",
                               "--set", "data.seq_len=8192", NULL),
                     2);
    run_must_say(&fixture, "small",
                 "data.spool_bytes: 1.00 MiB is too little: a step reads up to ");
    assert_int_equal(run_train(&fixture, "shards", "--set", "data.train=[manifest.h5]", NULL), 2);
    run_must_say(&fixture, "shards",
                 "attribute format is \"dtrain-manifest\", not \"dtrain-features\"");
    assert_int_equal(run_train(&fixture, "plain", SPOOLED, "--set", "data.manifest=train.h5", NULL),
                     2);
    run_must_say(&fixture, "plain",
                 "attribute format is \"dtrain-features\", not \"dtrain-manifest\"");
    char *damaged = memory_strdup(run_path(&fixture, "damaged.h5"));
    assert_int_equal(run_command(&fixture, "manifest", false, "data", "manifest", "--out", damaged,
                                 run_path(&fixture, "train.h5"), NULL),
                     0);
    assert_int_equal(truncate(damaged, 3000), 0);
    assert_int_equal(run_train(&fixture, "cut", SPOOLED, "--set", "data.manifest=damaged.h5", NULL),
                     2);
    run_must_say(&fixture, "cut", "damaged.h5: truncated");
    free(damaged);
    assert_int_equal(run_command(&fixture, "trace", true, "trace", SPOOLED, "--out",
                                 run_path(&fixture, "trace.safetensors"), NULL),
                     1);
    run_must_say(&fixture, "trace", "a manifest has no features");
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--kills") == 0)
        kills = atoi(argv[2]);
#define SPOOL_TEST(test) cmocka_unit_test_setup(test, fresh_spool)
    const struct CMUnitTest tests[] = {
        SPOOL_TEST(spooled_run_equals_shards),
        SPOOL_TEST(order_from_a_step),
        SPOOL_TEST(state_that_can_not_be_written),
        SPOOL_TEST(kills_at_random_moments),
        SPOOL_TEST(resume_goes_back),
        SPOOL_TEST(two_ranks_share_a_spool),
        SPOOL_TEST(waiting_has_an_end),
        SPOOL_TEST(waiting_is_said),
        SPOOL_TEST(signal_ends_a_wait),
        SPOOL_TEST(wrong_shards_are_refused),
        SPOOL_TEST(partial_files),
        SPOOL_TEST(a_shard_that_crashes_libhdf5),
        SPOOL_TEST(other_orders_are_refused),
        SPOOL_TEST(plan_from_a_manifest),
        SPOOL_TEST(configs_are_refused),
    };
    return cmocka_run_group_tests_name("run_spool", tests, open_all, close_all);
}
