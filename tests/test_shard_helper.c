// The process that opens shards for one with threads: what it says, what becomes of a shard that it dies of, and
// of shards when it is none. This program is its own helper. And forked children that something else kills.
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/memory.h"
#include "base/timer.h"
#include "data/shard_helper.h"
#include "data/shard_probe.h"
#include "tests/support/shard_fixture.h"

static const char itself[] = "/proc/self/exe";

// As for a process that waits for a file system for ever, which not even SIGKILL ends.
static bool stuck;
pid_t __real_waitpid(pid_t pid, int *status, int options);
pid_t __wrap_waitpid(pid_t pid, int *status, int options);
pid_t __wrap_waitpid(pid_t pid, int *status, int options)
{
    if (!stuck)
        return __real_waitpid(pid, status, options);
    if ((options & WNOHANG) == 0)
        fail_msg("a wait without a limit");
    return 0;
}

// In children of `prober` the next files of these names end the process, as if somebody killed it.
struct kills {
    pid_t prober;
    int left[2];
};
static const char *const killing[2] = {"a.h5", "b.h5"};
static struct kills *kills; // shared with them; NULL: none is killed
int __real_shard_open(struct shard *shard, const char *path, struct error *err);
int __wrap_shard_open(struct shard *shard, const char *path, struct error *err);
int __wrap_shard_open(struct shard *shard, const char *path, struct error *err)
{
    for (int i = 0; i < 2 && kills != NULL && getpid() != kills->prober; i++)
        if (strcmp(strrchr(path, '/') + 1, killing[i]) == 0 && kills->left[i] > 0) {
            kills->left[i]--;
            raise(SIGKILL);
        }
    return __real_shard_open(shard, path, err);
}

static bool never(void *context)
{
    (void)context;
    return false;
}

static bool after_a_while(void *context)
{
    return timer_now() > *(const double *)context;
}

// A folder with a shard.
static int setup(void **state)
{
    struct shard_place *place = memory_alloc(1, sizeof(*place));
    struct fixture_options options = {.seed = 5, .documents = 3};
    place->folder = fixture_folder();
    place->path = fixture_path(place->folder, "a.h5");
    fixture_make(&place->fixture, &options);
    fixture_write(&place->fixture, place->path);
    *state = place;
    return 0;
}

static void must_open(struct shard_helper *helper, const char *path)
{
    struct shard shard;
    struct error err = {""};
    if (shard_open_helped(&shard, path, helper, &err) != 0)
        fail_msg("%s", err.text);
    assert_int_equal(shard.documents, 3);
    shard_close(&shard);
}

// It is refused in the words of shard_probe, which a forked child has said.
static void must_refuse(struct shard_helper *helper, const char *path)
{
    struct shard shard;
    struct error err = {""};
    char **said = shard_probe(&path, 1);
    assert_non_null(said[0]);
    assert_int_equal(shard_open_helped(&shard, path, helper, &err), -1);
    assert_string_equal(err.text, said[0]);
    shard_probe_free(said, 1);
}

static void no_child_is_left(void)
{
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
    assert_int_equal(errno, ECHILD);
}

static void shards_are_opened_first(void **state)
{
    const struct shard_place *place = *state;
    char *cut = fixture_path(place->folder, "cut.h5");
    char *broken = fixture_path(place->folder, "broken.h5");
    char *gone = fixture_path(place->folder, "gone.h5");
    fixture_write(&place->fixture, cut);
    assert_int_equal(truncate(cut, 1500), 0);
    fixture_write(&place->fixture, broken);
    fixture_break_structure(broken);
    struct shard_helper *helper = shard_helper_open(itself, never, NULL);
    for (int again = 0; again < 2; again++) { // also when it had to be started again
        must_open(helper, place->path);
        must_refuse(helper, cut);
        must_refuse(helper, gone);
        must_refuse(helper, broken);
    }
    must_open(helper, place->path);
    must_open(NULL, place->path);
    shard_helper_close(helper);
    shard_helper_close(NULL);
    no_child_is_left();
    free(gone);
    free(broken);
    free(cut);
}

// A program that does what the lines say.
static char *script(const struct shard_place *place, const char *lines)
{
    char *path = fixture_path(place->folder, "program");
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fprintf(file, "#!/bin/sh\n%s\n", lines) > 0);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(chmod(path, 0755), 0);
    return path;
}

// One that something else kills between two files is started again.
static void a_killed_helper_is_replaced(void **state)
{
    const struct shard_place *place = *state;
    char *broken = fixture_path(place->folder, "broken.h5"), *self = realpath(itself, NULL);
    char *lines =
        memory_format("echo $$ >'%s/pid'\nexec '%s' " SHARD_HELPER_WORD, place->folder, self);
    char *program = script(place, lines);
    fixture_write(&place->fixture, broken);
    fixture_break_structure(broken);
    struct shard_helper *helper = shard_helper_open(program, never, NULL);
    must_open(helper, place->path);
    char *text = fixture_text(place->folder, "pid");
    pid_t pid = (pid_t)strtol(text, NULL, 10);
    siginfo_t ended;
    assert_true(pid > 0);
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitid(P_PID, (id_t)pid, &ended, WEXITED | WNOWAIT), 0);
    must_refuse(helper, broken);
    must_open(helper, place->path);
    shard_helper_close(helper);
    no_child_is_left();
    free(text);
    free(program);
    free(lines);
    free(self);
    free(broken);
}

// What ends a helper, or what it says, is not laid at a shard's door that it has not come to.
static void without_a_helper(void **state)
{
    static const char *const programs[] = {"exit 0",
                                           "exit 3",
                                           "kill -KILL $$",
                                           "kill -SEGV $$",
                                           "echo no helper is this",
                                           "echo 1 2 >&0; exit 1"};
    for (size_t i = 0; i < sizeof(programs) / sizeof(*programs); i++) {
        char *program = script(*state, programs[i]);
        struct shard_helper *helper = shard_helper_open(program, never, NULL);
        for (int again = 0; again < 2; again++)
            must_open(helper, ((const struct shard_place *)*state)->path);
        shard_helper_close(helper);
        free(program);
    }
    struct shard_helper *none = shard_helper_open("/nowhere/dtrain", never, NULL);
    must_open(none, ((const struct shard_place *)*state)->path);
    shard_helper_close(none);
    no_child_is_left();
}

static void a_wait_can_be_ended(void **state)
{
    struct shard shard;
    struct error err = {""};
    const struct shard_place *place = *state;
    char *program = script(place, "exec sleep 100");
    double start = timer_now(), end = start + 0.3;
    struct shard_helper *helper = shard_helper_open(program, after_a_while, &end);
    assert_int_equal(shard_open_helped(&shard, place->path, helper, &err), -1);
    assert_non_null(strstr(err.text, "a.h5: the wait for it was ended"));
    double waited = timer_now() - start;
    assert_true(waited >= 0.3 && waited < 60.0);
    shard_helper_close(helper);
    no_child_is_left();
    free(program);
}

// What does not end is left behind after a while: at the end of a run, in the middle of one, and when files are
// looked at by a fork.
static void no_wait_is_without_a_limit(void **state)
{
    const struct shard_place *place = *state;
    char *program = script(place, "kill -KILL $$");
    double start = timer_now();
    struct shard_helper *helper = shard_helper_open(itself, never, NULL);
    must_open(helper, place->path);
    stuck = true;
    shard_helper_close(helper);
    helper = shard_helper_open(program, never, NULL);
    must_open(helper, place->path);
    shard_helper_close(helper);
    const char *path = place->path;
    char **said = shard_probe(&path, 1);
    assert_null(said[0]);
    shard_probe_free(said, 1);
    stuck = false;
    double waited = timer_now() - start;
    assert_true(waited > 2.0 && waited < 120.0);
    while (waitpid(-1, NULL, 0) > 0)
        continue; // they had been killed
    free(program);
}

static void kill_at(int first, int second)
{
    *kills = (struct kills){.prober = getpid(), .left = {first, second}};
}

// Nothing is said against a file at which a forked child was killed once, and the others are looked at.
static void must_probe(const struct shard_place *place, const char *second, const char *broken)
{
    const char *const paths[] = {place->path, second, broken};
    char **said = shard_probe(paths, 3);
    assert_null(said[0]);
    assert_null(said[1]);
    assert_non_null(strstr(said[2], "damaged: libhdf5"));
    shard_probe_free(said, 3);
    assert_int_equal(kills->left[0] + kills->left[1], 0);
}

// In a child: what it says goes to the file.
static void say_into(const char *said)
{
    int output = open(said, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (output < 0 || dup2(output, STDERR_FILENO) < 0)
        _exit(99);
}

// Killed again at the same file, the program says what happened. What it says goes to the file; its status.
static int probe_killed_twice(const struct shard_place *place, const char *said)
{
    int status;
    fflush(NULL); // the child ends by exit
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        say_into(said);
        const char *path = place->path;
        kill_at(2, 0);
        shard_probe(&path, 1);
        _exit(98);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void a_kill_is_not_laid_at_a_files_door(void **state)
{
    const struct shard_place *place = *state;
    char *second = fixture_path(place->folder, "b.h5"), *said = fixture_path(place->folder, "said");
    char *broken = fixture_path(place->folder, "broken.h5");
    fixture_write(&place->fixture, second);
    fixture_write(&place->fixture, broken);
    fixture_break_structure(broken);
    kills = mmap(NULL, sizeof(*kills), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(kills != MAP_FAILED);
    kill_at(1, 0);
    must_probe(place, second, broken);
    kill_at(1, 1);
    must_probe(place, second, broken);
    assert_int_equal(probe_killed_twice(place, said), 1);
    assert_int_equal(kills->left[0], 0);
    char *text = fixture_text(place->folder, "said");
    assert_non_null(strstr(text, "a.h5: the process that opens it first was killed twice"));
    assert_null(strstr(text, "damaged"));
    free(text);
    munmap(kills, sizeof(*kills));
    kills = NULL;
    no_child_is_left();
    free(broken);
    free(said);
    free(second);
}

// A helper with that standard input, which is closed here; what it says goes to the file. Its status.
static int called_with(int input, const char *said)
{
    int status;
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        say_into(said);
        if (input < 0)
            close(STDIN_FILENO);
        else if (dup2(input, STDIN_FILENO) < 0)
            _exit(99);
        alarm(30); // one that waits
        execl(itself, "dtrain", SHARD_HELPER_WORD, (char *)NULL);
        _exit(99);
    }
    if (input >= 0)
        close(input);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// A terminal, a pipe that nobody closes, nothing at all, and a socket on which no names of files come.
static void a_call_by_hand_is_refused(void **state)
{
    const struct shard_place *place = *state;
    char *said = fixture_path(place->folder, "said");
    int ends[2], terminal = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    const int inputs[] = {terminal, ends[0], open("/dev/null", O_RDONLY | O_CLOEXEC), -1};
    for (size_t i = 0; i < sizeof(inputs) / sizeof(*inputs); i++) {
        if (i == 0 && terminal < 0)
            continue; // none to be had here
        assert_int_equal(called_with(inputs[i], said), 2);
        char *text = fixture_text(place->folder, "said");
        assert_non_null(strstr(text, "dtrain open-shards: a training run"));
        assert_non_null(strstr(text, "does nothing by hand"));
        free(text);
    }
    close(ends[1]);
    static const char words[] = "not the name of a file";
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    assert_int_equal(write(ends[1], words, sizeof(words)), sizeof(words));
    assert_int_equal(called_with(ends[0], said), 2);
    close(ends[1]);
    free(said);
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, setup, shard_place_teardown)

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], SHARD_HELPER_WORD) == 0)
        shard_helper_main();
    const struct CMUnitTest tests[] = {
        TEST(shards_are_opened_first),
        TEST(a_killed_helper_is_replaced),
        TEST(without_a_helper),
        TEST(a_wait_can_be_ended),
        TEST(a_call_by_hand_is_refused),
        TEST(no_wait_is_without_a_limit),
        TEST(a_kill_is_not_laid_at_a_files_door),
    };
    return cmocka_run_group_tests_name("shard_helper", tests, NULL, NULL);
}
