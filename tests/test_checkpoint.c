// Checkpoints: bitwise round trip, what counts as complete, what is kept and deleted, faults on disk
// and kills while writing (cases C6 and C7).
#include "trainer/checkpoint.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/log.h"
#include "base/rng.h"
#include "tests/support/checkpoint_fixture.h"
#include "tests/support/shard_fixture.h"
#include "trainer/checkpoint_folder.h"
#include "trainer/files.h"

static struct drafter_fixture drafter;
static char *folder; // of one test

static int open_group(void **state)
{
    (void)state;
    drafter_fixture_open(&drafter, 2);
    return 0;
}

static int close_group(void **state)
{
    (void)state;
    drafter_fixture_close(&drafter);
    return 0;
}

static int open_test(void **state)
{
    (void)state;
    folder = fixture_folder();
    return 0;
}

static int close_test(void **state)
{
    (void)state;
    fixture_folder_remove(folder);
    return 0;
}

// ---- helpers -------------------------------------------------------------------------------------

static void write_step(int64_t step)
{
    drafter_fixture_write(&drafter, folder, step);
}

static char *path_of(const char *name)
{
    return fixture_path(folder, name);
}

static bool is_there(const char *name)
{
    char *path = path_of(name);
    bool there = files_exists(path);
    free(path);
    return there;
}

static void make_folder(const char *name)
{
    struct error err = {""};
    char *path = path_of(name);
    if (files_make_folder(path, &err) != 0)
        fail_msg("%s", err.text);
    free(path);
}

static void delete_file(const char *name)
{
    char *path = path_of(name);
    assert_int_equal(unlink(path), 0);
    free(path);
}

static void cut_file(const char *name, int64_t less)
{
    char *path = path_of(name);
    assert_int_equal(truncate(path, files_size(path) - less), 0);
    free(path);
}

// 0 and the state as written, or -1 and the error.
static int read_step(const char *name, int64_t step, struct error *err)
{
    struct model_state state;
    model_state_open(&state, &drafter.params);
    char *path = path_of(name);
    uint64_t fingerprint = 0;
    *err = (struct error){""};
    int result = checkpoint_read(path, &state, &fingerprint, err);
    if (result == 0) {
        assert_true(drafter_fixture_matches(&state, step));
        assert_true(fingerprint == 0xfedcba9876543210u);
    }
    free(path);
    model_state_close(&state);
    return result;
}

static void assert_reads(const char *name, int64_t step)
{
    struct error err;
    if (read_step(name, step, &err) != 0)
        fail_msg("%s", err.text);
}

static void assert_names(const char *text, const char *word)
{
    if (strstr(text, word) == NULL)
        fail_msg("'%s' is not named in: %s", word, text);
}

static void assert_latest(const char *name)
{
    struct error err = {""};
    char *path = NULL, *wanted = name != NULL ? path_of(name) : NULL;
    assert_int_equal(checkpoint_find_latest(folder, &path, &err), 0);
    if (wanted == NULL)
        assert_null(path);
    else
        assert_string_equal(path, wanted);
    free(path);
    free(wanted);
}

// Everything logged while `f` runs.
static char *logged(void (*f)(void))
{
    char *path = path_of("captured.txt");
    assert_int_equal(log_file_set(path), 0);
    f();
    log_file_set(NULL);
    struct error err = {""};
    char *text = files_read_text(path, &err);
    assert_non_null(text);
    unlink(path);
    free(path);
    return text;
}

static int count_of(const char *text, const char *word)
{
    int count = 0;
    for (; (text = strstr(text, word)) != NULL; text++)
        count++;
    return count;
}

// ---- what is written -----------------------------------------------------------------------------

static void state_comes_back_bit_for_bit(void **state)
{
    (void)state;
    write_step(1200);
    assert_reads("step-00001200", 1200);
    struct error err = {""};
    char *path = path_of("step-00001200");
    assert_int_equal(checkpoint_check(path, &err), 0);
    free(path);
}

static void a_checkpoint_has_all_its_files_and_leaves_nothing_else(void **state)
{
    (void)state;
    static const char *const names[] = {"master.safetensors", "adam_m.safetensors",
                                        "adam_v.safetensors", "state.json",
                                        "config.yaml",        "execution.json",
                                        "provenance.json",    "model.safetensors",
                                        "config.json",        "DONE"};
    write_step(4);
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        char *name = memory_format("step-00000004/%s", names[i]);
        assert_true(is_there(name));
        free(name);
    }
    char *done = path_of("step-00000004/DONE"), *step = path_of("step-00000004");
    assert_int_equal(files_size(done), 0);
    assert_int_equal(unlink(done), 0);
    struct error err = {""};
    assert_int_equal(files_remove_folder(step, &err), 0);
    assert_int_equal(rmdir(folder), 0); // nothing temporary stayed
    assert_int_equal(mkdir(folder, 0777), 0);
    free(step);
    free(done);
}

static void texts_say_where_it_came_from(void **state)
{
    (void)state;
    write_step(4);
    static const char *const wanted[][2] = {
        {"step-00000004/provenance.json", "dtrain --config \\\"a b\\\".yaml"},
        {"step-00000004/provenance.json", "a processor"},
        {"step-00000004/provenance.json", "some/target"},
        {"step-00000004/state.json", "9223372036854775803"}, // tokens, more than a double holds
        {"step-00000004/state.json", "fedcba9876543210"},
        {"step-00000004/config.yaml", "mask_token_id: 60"},
    };
    for (size_t i = 0; i < sizeof(wanted) / sizeof(*wanted); i++) {
        struct error err = {""};
        char *path = path_of(wanted[i][0]);
        char *text = files_read_text(path, &err);
        assert_non_null(text);
        assert_names(text, wanted[i][1]);
        free(text);
        free(path);
    }
    struct execution read;
    struct error err = {""};
    char *path = path_of("step-00000004/execution.json");
    assert_int_equal(execution_read(&read, path, &err), 0);
    assert_int_equal(execution_compare(&drafter.execution, &read, &err), 0);
    read.threads = 2;
    snprintf(read.compute, sizeof(read.compute), "bf16");
    assert_int_equal(execution_compare(&drafter.execution, &read, &err), -1);
    assert_string_equal(err.text, "compute: fp32 in execution.json, bf16 now\n"
                                  "threads: 1 in execution.json, 2 now");
    free(path);
}

// ---- faults of a checkpoint ----------------------------------------------------------------------

static void every_missing_or_cut_file_is_named(void **state)
{
    (void)state;
    static const char *const names[] = {
        "master.safetensors", "adam_m.safetensors", "adam_v.safetensors",
        "state.json",         "config.yaml",        "execution.json",
        "provenance.json",    "model.safetensors",  "config.json"};
    struct error err;
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        write_step(8);
        char *name = memory_format("step-00000008/%s", names[i]);
        cut_file(name, 3);
        assert_int_equal(read_step("step-00000008", 8, &err), -1);
        assert_names(err.text, name);
        delete_file(name);
        assert_int_equal(read_step("step-00000008", 8, &err), -1);
        assert_names(err.text, name);
        free(name);
    }
    write_step(8);
    assert_reads("step-00000008", 8);
}

// The bytes of a file changed in place by `edit`.
static void edit_file(const char *name, void (*edit)(char *bytes, size_t size))
{
    char *path = path_of(name);
    int64_t size = files_size(path);
    char *bytes = memory_alloc((size_t)size, 1);
    FILE *file = fopen(path, "r+b");
    assert_non_null(file);
    assert_int_equal(fread(bytes, 1, (size_t)size, file), size);
    edit(bytes, (size_t)size);
    rewind(file);
    assert_int_equal(fwrite(bytes, 1, (size_t)size, file), size);
    assert_int_equal(fclose(file), 0);
    free(bytes);
    free(path);
}

static void flip_last_bit(char *bytes, size_t size)
{
    bytes[size - 1] ^= 1;
}

// The first `from` becomes `to`, of the same length. Whether there is one.
static bool exchange(char *bytes, size_t size, const char *from, const char *to)
{
    char *found = memmem(bytes, size, from, strlen(from));
    if (found != NULL)
        memcpy(found, to, strlen(to));
    return found != NULL;
}

#define EDIT(name, from, to)                                                                       \
    static void name(char *bytes, size_t size)                                                     \
    {                                                                                              \
        assert_true(exchange(bytes, size, from, to));                                              \
    }
EDIT(forget_first_sum, "crc32c", "xrc32c")
EDIT(forget_own_sum, "\"state.json\"", "\"xtate.json\"") // the last entry of that file
EDIT(lower_version, "\"version\":\t2", "\"version\":\t1")
EDIT(add_one_to_step, "\"step\":\t8", "\"step\":\t9")
EDIT(make_row_negative, "\"row\":\t", "\"row\":\t-")

static void forget_names(char *bytes, size_t size)
{
    while (exchange(bytes, size, "crc32c", "xrc32c"))
        ;
}

// As files of before there were sums.
static void forget_sums(char *bytes, size_t size)
{
    forget_names(bytes, size);
    exchange(bytes, size, "\"version\":\t2", "\"version\":\t1");
}

static void a_changed_bit_is_refused_by_file_and_tensor(void **state)
{
    (void)state;
    static const char *const names[] = {
        "master.safetensors", "adam_m.safetensors", "adam_v.safetensors", "config.yaml",
        "execution.json",     "provenance.json",    "config.json"};
    struct error err;
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        write_step(8);
        char *name = memory_format("step-00000008/%s", names[i]);
        edit_file(name, flip_last_bit);
        assert_int_equal(read_step("step-00000008", 8, &err), -1);
        assert_names(err.text, name);
        assert_names(err.text, "its checksum (CRC-32C) is");
        if (i < 3)
            assert_names(err.text, "tensor '");
        free(name);
    }
    write_step(8); // what servers read is checked when it is taken
    char *path = path_of("step-00000008");
    err = (struct error){""};
    assert_int_equal(checkpoint_check_served(path, &err), 0);
    edit_file("step-00000008/model.safetensors", flip_last_bit);
    assert_int_equal(checkpoint_check_served(path, &err), -1);
    assert_names(err.text, "step-00000008/model.safetensors: its checksum");
    assert_reads("step-00000008", 8);
    free(path);
}

static void a_checkpoint_without_sums_is_read(void **state)
{
    (void)state;
    static const char *const names[] = {"master.safetensors", "adam_m.safetensors",
                                        "adam_v.safetensors", "state.json"};
    write_step(8);
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        char *name = memory_format("step-00000008/%s", names[i]);
        edit_file(name, forget_sums);
        free(name);
    }
    assert_reads("step-00000008", 8);
    struct error err = {""};
    char *path = path_of("step-00000008");
    assert_int_equal(checkpoint_check_served(path, &err), 0);
    free(path);
}

// The rest of its file has sums, so the tensor must have one.
static void a_sum_that_is_gone_is_refused(void **state)
{
    (void)state;
    struct error err;
    write_step(8);
    edit_file("step-00000008/state.json",
              forget_sums); // else the header's own sum is refused first
    edit_file("step-00000008/master.safetensors", forget_first_sum);
    assert_int_equal(read_step("step-00000008", 8, &err), -1);
    assert_names(err.text, "that of what was written is missing");
}

// Version 2 says that there are sums: names of theirs that are damaged do not make it a checkpoint of before.
static void damaged_names_of_sums_are_refused(void **state)
{
    (void)state;
    static void (*const damages[])(char *, size_t) = {forget_names, forget_first_sum,
                                                      forget_own_sum, lower_version};
    struct error err;
    for (size_t i = 0; i < sizeof(damages) / sizeof(*damages); i++) {
        write_step(8);
        edit_file("step-00000008/state.json", damages[i]);
        assert_int_equal(read_step("step-00000008", 8, &err), -1);
        assert_names(err.text, "step-00000008/state.json: its checksum (CRC-32C) is");
    }
}

static void a_changed_counter_is_refused(void **state)
{
    (void)state;
    struct error err;
    write_step(8);
    edit_file("step-00000008/state.json", add_one_to_step);
    assert_int_equal(read_step("step-00000008", 8, &err), -1);
    assert_names(err.text, "step-00000008/state.json: its checksum (CRC-32C) is");
}

// Whole in themselves, and of the size that was written.
static void a_file_of_another_checkpoint_is_refused(void **state)
{
    (void)state;
    static const char *const names[][2] = {
        {"step-00000004/master.safetensors", "master.safetensors"},
        {"step-00000004/adam_m.safetensors", "adam_m.safetensors"},
        {"step-00000004/adam_v.safetensors", "adam_v.safetensors"},
        {"step-00000008/adam_m.safetensors", "adam_v.safetensors"}};
    struct error err;
    write_step(4);
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        write_step(8);
        char *name = memory_format("step-00000008/%s", names[i][1]);
        char *from = path_of(names[i][0]), *to = path_of(name);
        assert_int_equal(files_copy(from, to, &(struct error){""}), 0);
        assert_int_equal(read_step("step-00000008", 8, &err), -1);
        assert_names(err.text, name);
        assert_names(err.text, "damaged or of another checkpoint");
        free(from);
        free(to);
        free(name);
    }
}

// Of before there were sums, and edited since.
static void a_counter_that_no_run_writes_is_refused(void **state)
{
    (void)state;
    struct error err;
    write_step(8);
    edit_file("step-00000008/state.json", forget_sums);
    edit_file("step-00000008/state.json", make_row_negative);
    assert_int_equal(read_step("step-00000008", 8, &err), -1);
    assert_names(err.text, "which no run writes");
}

static void without_done_it_is_not_read(void **state)
{
    (void)state;
    struct error err;
    write_step(8);
    delete_file("step-00000008/DONE");
    assert_int_equal(read_step("step-00000008", 8, &err), -1);
    assert_names(err.text, "step-00000008/DONE");
    cut_file("step-00000008/adam_v.safetensors", 1000);
    assert_int_equal(read_step("step-00000008", 8, &err), -1);
    assert_names(err.text, "step-00000008/adam_v.safetensors");
    assert_int_equal(read_step("step-00000012", 12, &err), -1);
    assert_names(err.text, "step-00000012");
}

static void another_drafter_is_refused_by_tensor(void **state)
{
    (void)state;
    write_step(4);
    struct drafter_fixture other;
    drafter_fixture_open(&other, 1);
    struct params mine = drafter.params;
    struct error err;
    drafter.params = other.params; // fewer tensors than the file has
    assert_int_equal(read_step("step-00000004", 4, &err), -1);
    assert_names(err.text, "layers.1.");
    drafter.params = mine;
    drafter_fixture_write(&other, folder, 6);
    assert_int_equal(read_step("step-00000006", 6, &err), -1);
    assert_names(err.text, "layers.1.");
    assert_names(err.text, "master.safetensors");
    other.config.drafter.intermediate_size = 13;
    other.config.drafter.layers = 2;
    drafter_fixture_resolve(&other);
    drafter_fixture_write(&other, folder, 7);
    assert_int_equal(read_step("step-00000007", 7, &err), -1);
    assert_names(err.text, "layers.0.mlp.gate_proj.weight");
    drafter_fixture_close(&other);
}

// ---- which one is resumed ------------------------------------------------------------------------

static void find_latest(void)
{
    assert_latest("step-00000004");
}

static void the_newest_complete_one_is_found_and_others_are_named_once(void **state)
{
    (void)state;
    assert_latest(NULL);
    write_step(3);
    write_step(4);
    write_step(8);
    delete_file("step-00000008/DONE");
    cut_file("step-00000008/master.safetensors", 500);
    make_folder(".tmp-step-00000012-1");
    make_folder("abc");
    make_folder("step-16x");
    char *text = logged(find_latest);
    assert_int_equal(count_of(text, "warn"), 1);
    assert_names(text, "step-00000008");
    assert_names(text, ".tmp-step-00000012-1");
    assert_null(strstr(text, "abc"));
    free(text);
    assert_true(is_there("step-00000008") && is_there(".tmp-step-00000012-1") && is_there("abc"));
}

static void a_folder_that_is_not_there_has_none(void **state)
{
    (void)state;
    char *path = NULL, *nowhere = path_of("nowhere");
    struct error err = {""};
    assert_int_equal(checkpoint_find_latest(nowhere, &path, &err), 0);
    assert_null(path);
    assert_int_equal(checkpoint_prune(nowhere, 1, 0, &err), 0);
    free(nowhere);
}

static void steps_order_by_number(void **state)
{
    (void)state;
    write_step(99999999);
    write_step(100000000);
    assert_latest("step-100000000");
}

// ---- replacing, pruning, best --------------------------------------------------------------------

static void an_incomplete_one_of_the_same_step_is_put_aside(void **state)
{
    (void)state;
    for (int n = 0; n < 2; n++) {
        write_step(8);
        delete_file("step-00000008/DONE");
    }
    write_step(8);
    assert_reads("step-00000008", 8);
    assert_true(is_there("step-00000008.incomplete"));
    assert_true(is_there("step-00000008.incomplete.2"));
}

static void a_complete_one_of_the_same_step_is_replaced(void **state)
{
    (void)state;
    write_step(8);
    char *mark = path_of("step-00000008/old");
    struct error err = {""};
    assert_int_equal(files_write_text(mark, "x", &err), 0);
    write_step(8);
    assert_false(files_exists(mark));
    assert_reads("step-00000008", 8);
    char *step = path_of("step-00000008");
    assert_int_equal(files_remove_folder(step, &err), 0);
    assert_int_equal(rmdir(folder), 0); // the old one is gone
    assert_int_equal(mkdir(folder, 0777), 0);
    free(step);
    free(mark);
}

static void the_newest_and_the_best_are_kept(void **state)
{
    (void)state;
    struct error err = {""};
    for (int64_t step = 1; step <= 6; step++)
        write_step(step);
    delete_file("step-00000003/DONE");
    make_folder("abc");
    make_folder(".tmp-step-00000001-1");
    make_folder(".deleting-step-00000000"); // a kill while pruning
    assert_int_equal(checkpoint_mark_best(folder, 2, &err), 0);
    assert_int_equal(checkpoint_prune(folder, 2, 2, &err), 0);
    assert_true(is_there("step-00000006") && is_there("step-00000005"));
    assert_false(is_there("step-00000004") || is_there("step-00000001"));
    assert_true(is_there("step-00000003")); // not complete, not ours to delete
    assert_true(is_there("abc") && is_there(".tmp-step-00000001-1"));
    assert_false(is_there(".deleting-step-00000000"));
    assert_reads("best", 2);
    assert_int_equal(checkpoint_mark_best(folder, 5, &err), 0);
    assert_reads("best", 5);
    assert_int_equal(checkpoint_prune(folder, 2, 5, &err), 0);
    assert_false(is_there("step-00000002"));
    assert_int_equal(checkpoint_prune(folder, 1, 0, &err), 0);
    assert_false(is_there("step-00000005"));
    assert_latest("step-00000006");
}

static void what_is_not_complete_can_not_be_the_best(void **state)
{
    (void)state;
    struct error err = {""};
    write_step(4);
    assert_int_equal(checkpoint_mark_best(folder, 4, &err), 0);
    assert_int_equal(checkpoint_mark_best(folder, 5, &err), -1);
    assert_names(err.text, "step-00000005");
    assert_reads("best", 4);
}

// ---- failing writes ------------------------------------------------------------------------------

// No file may grow beyond `bytes`: as a full disk, but without a file system of its own.
static void limit_files(rlim_t bytes)
{
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit limit;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    limit.rlim_cur = bytes;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

static void a_failed_write_leaves_nothing_and_harms_nothing(void **state)
{
    (void)state;
    static const rlim_t limits[] = {0, 100, 500, 2000};
    write_step(4);
    for (size_t i = 0; i < sizeof(limits) / sizeof(*limits); i++) {
        struct model_state values;
        struct error err = {""};
        model_state_open(&values, &drafter.params);
        drafter_fixture_fill(&values, 8);
        limit_files(limits[i]);
        int result = checkpoint_write(folder, &values, &drafter.info, &err);
        limit_files(RLIM_INFINITY);
        assert_int_equal(result, -1);
        assert_names(err.text, folder);
        model_state_close(&values);
        assert_false(is_there("step-00000008"));
        assert_false(is_there(".tmp-step-00000008-1"));
        assert_latest("step-00000004");
        assert_reads("step-00000004", 4);
    }
}

static void a_folder_that_can_not_be_written_is_an_error(void **state)
{
    (void)state;
    struct model_state values;
    struct error err = {""};
    model_state_open(&values, &drafter.params);
    char *nowhere = path_of("no/such/folder");
    assert_int_equal(checkpoint_write(nowhere, &values, &drafter.info, &err), -1);
    assert_names(err.text, "no/such/folder");
    free(nowhere);
    model_state_close(&values);
}

// ---- the writer ----------------------------------------------------------------------------------

static struct checkpoint_writer *open_writer(int64_t keep, bool background)
{
    struct checkpoint_writer *writer = NULL;
    struct error err = {""};
    if (checkpoint_writer_open(&writer, folder, &drafter.params, NULL, &drafter.info, keep,
                               background, &err) != 0)
        fail_msg("%s", err.text);
    return writer;
}

static void save(struct checkpoint_writer *writer, int64_t step, bool best)
{
    drafter_fixture_fill(checkpoint_writer_snapshot(writer), step);
    checkpoint_writer_save(writer, best);
}

static void the_writer_writes_marks_and_prunes(void **state)
{
    (void)state;
    for (int background = 0; background < 2; background++) {
        struct checkpoint_writer *writer = open_writer(2, background != 0);
        for (int64_t step = 1; step <= 5; step++)
            save(writer, step, step == 4); // each waits for the one before
        struct error err = {""};
        assert_int_equal(checkpoint_writer_wait(writer, &err), 0);
        checkpoint_writer_close(writer);
        assert_false(is_there("step-00000003"));
        assert_reads("step-00000004", 4);
        assert_reads("best", 4);
        assert_latest("step-00000005");
        fixture_folder_remove(folder);
        folder = fixture_folder();
    }
}

static void close_writes_what_was_asked_for(void **state)
{
    (void)state;
    struct checkpoint_writer *writer = open_writer(2, true);
    save(writer, 7, false);
    checkpoint_writer_close(writer);
    assert_reads("step-00000007", 7);
}

static void the_run_goes_on_after_a_failed_write(void **state)
{
    (void)state;
    struct error err = {""};
    struct checkpoint_writer *writer = open_writer(3, true);
    save(writer, 4, false);
    assert_int_equal(checkpoint_writer_wait(writer, &err), 0);
    limit_files(300);
    save(writer, 8, false);
    int result = checkpoint_writer_wait(writer, &err);
    limit_files(RLIM_INFINITY);
    assert_int_equal(result, -1);
    assert_names(err.text, "safetensors");
    assert_latest("step-00000004");
    save(writer, 12, false);
    assert_int_equal(checkpoint_writer_wait(writer, &err), 0);
    checkpoint_writer_close(writer);
    assert_reads("step-00000004", 4);
    assert_reads("step-00000012", 12);
}

static void a_run_that_went_back_puts_later_checkpoints_aside(void **state)
{
    (void)state;
    write_step(4);
    write_step(8);
    write_step(12);
    struct checkpoint_writer *writer = open_writer(1, true);
    save(writer, 6, false); // resumed from 4
    checkpoint_writer_close(writer);
    assert_latest("step-00000006");
    assert_reads("step-00000006", 6);
    assert_true(is_there("step-00000008.abandoned") && is_there("step-00000012.abandoned"));
}

// ---- kills ---------------------------------------------------------------------------------------

// Saves steps first, first + 1, ... until it is killed.
static void save_until_killed(int64_t first)
{
    log_configure(LOG_ERROR, 0);
    struct checkpoint_writer *writer = open_writer(2, true);
    for (int64_t step = first;; step++)
        save(writer, step, step % 3 == 0);
}

static void a_kill_at_any_moment_leaves_a_whole_checkpoint(void **state)
{
    (void)state;
    struct rng_key key = rng_key_make((uint64_t)getpid(), 0, 0, RNG_TEST);
    int64_t newest = 1;
    write_step(newest);
    for (int kill_count = 0; kill_count < 25; kill_count++) {
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0)
            save_until_killed(newest + 1);
        usleep(2000 + (useconds_t)(rng_u64(key, (uint64_t)kill_count) % 120000));
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        char *path = NULL;
        struct error err = {""};
        assert_int_equal(checkpoint_find_latest(folder, &path, &err), 0);
        assert_non_null(path);
        const char *name = strrchr(path, '/') + 1;
        int64_t step = strtoll(name + strlen("step-"), NULL, 10);
        assert_true(step >= newest);
        assert_reads(name, step);
        newest = step;
        free(path);
    }
    assert_true(newest > 1);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_test, close_test)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(state_comes_back_bit_for_bit),
        TEST(a_checkpoint_has_all_its_files_and_leaves_nothing_else),
        TEST(texts_say_where_it_came_from),
        TEST(every_missing_or_cut_file_is_named),
        TEST(a_changed_bit_is_refused_by_file_and_tensor),
        TEST(a_checkpoint_without_sums_is_read),
        TEST(a_sum_that_is_gone_is_refused),
        TEST(damaged_names_of_sums_are_refused),
        TEST(a_changed_counter_is_refused),
        TEST(a_file_of_another_checkpoint_is_refused),
        TEST(a_counter_that_no_run_writes_is_refused),
        TEST(without_done_it_is_not_read),
        TEST(another_drafter_is_refused_by_tensor),
        TEST(the_newest_complete_one_is_found_and_others_are_named_once),
        TEST(a_folder_that_is_not_there_has_none),
        TEST(steps_order_by_number),
        TEST(an_incomplete_one_of_the_same_step_is_put_aside),
        TEST(a_complete_one_of_the_same_step_is_replaced),
        TEST(the_newest_and_the_best_are_kept),
        TEST(what_is_not_complete_can_not_be_the_best),
        TEST(a_failed_write_leaves_nothing_and_harms_nothing),
        TEST(a_folder_that_can_not_be_written_is_an_error),
        TEST(the_writer_writes_marks_and_prunes),
        TEST(close_writes_what_was_asked_for),
        TEST(the_run_goes_on_after_a_failed_write),
        TEST(a_run_that_went_back_puts_later_checkpoints_aside),
        TEST(a_kill_at_any_moment_leaves_a_whole_checkpoint),
    };
    return cmocka_run_group_tests(tests, open_group, close_group);
}
