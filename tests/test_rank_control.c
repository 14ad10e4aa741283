// The control channel between forked processes, without a launcher: who is let in, and what is noticed. Process 0 is
// rank 0.
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/log.h"
#include "base/memory.h"
#include "base/timer.h"
#include "trainer/rank_control.h"
#include "trainer/rank_join.h"
#include "trainer/signals.h"

enum { RANKS = 3 };

// What each process is like; changed by a test before it forks.
struct scene {
    struct rank_place place[RANKS];
    struct rank_identity identity[RANKS];
    bool absent[RANKS];
    double limit; // parallel.timeout
    void (*run)(struct control *control, int rank);
};

// Written by the processes, read by the test.
struct shared {
    char fault[RANKS][4096]; // of joining
    volatile int32_t port;   // where rank 0 listens
    volatile bool dying;     // the unlucky rank is about to
    volatile bool waits[RANKS], goes_on;
};

static struct shared *shared;
static char log_path[] = "/tmp/dtrain-control-XXXXXX";

static struct scene make_scene(void (*run)(struct control *, int), double limit)
{
    struct scene scene = {.limit = limit, .run = run};
    for (int rank = 0; rank < RANKS; rank++) {
        scene.place[rank] = (struct rank_place){.launcher = LAUNCHER_SRUN,
                                                .rank = rank,
                                                .size = RANKS,
                                                .one_machine = true,
                                                .ports = 1,
                                                .listen_fd = -1,
                                                .job = 77};
        strcpy(scene.place[rank].host, "127.0.0.1");
        strcpy(scene.identity[rank].program, "1.0 (abc, Release)");
        scene.identity[rank].config = 5;
        scene.identity[rank].timeout = limit;
    }
    return scene;
}

static int join(const struct scene *scene, int rank, struct rank_peer *peers, struct error *err)
{
    struct rank_place place = scene->place[rank];
    struct rank_address address;
    int listener;
    assert_int_equal(rank_join_address(&place, 0, &address, err), 0);
    if (rank == 0) {
        if (rank_join_listen(&place, false, &address, &listener, err) != 0)
            return -1;
        shared->port = address.port;
        return rank_join_gather(&place, &address, &scene->identity[0], listener, peers, err);
    }
    while (shared->port == 0)
        usleep(1000);
    address.port = shared->port;
    return rank_join_connect(&place, &address, &scene->identity[rank], &peers[0], err);
}

// In the child. Exit status 0 done, 1 ended by the channel, 2 could not join.
static void live(const struct scene *scene, int rank)
{
    struct error err = {0};
    struct rank_peer *peers = memory_alloc(RANKS, sizeof(*peers));
    log_configure(LOG_INFO, rank);
    if (freopen(log_path, "a", stderr) == NULL)
        _exit(9);
    for (int i = 0; i < RANKS; i++)
        peers[i].wire.fd = -1;
    signals_install();
    if (join(scene, rank, peers, &err) != 0) {
        memcpy(shared->fault[rank], err.text, sizeof(err.text));
        _exit(2);
    }
    struct control *control = control_open(rank, scene->place[rank].size, peers, scene->limit);
    scene->run(control, rank);
    control_close(control);
    _exit(0);
}

struct outcome {
    int status[RANKS]; // exit status, 128 + signal
    double seconds;    // until all but those stopped had ended
};

static pid_t children[RANKS];

static void start(const struct scene *scene)
{
    memset(shared, 0, sizeof(*shared));
    if (truncate(log_path, 0) != 0)
        fail();
    for (int rank = 0; rank < RANKS; rank++) {
        children[rank] = 0;
        if (scene->absent[rank])
            continue;
        children[rank] = fork();
        assert_true(children[rank] >= 0);
        if (children[rank] == 0)
            live(scene, rank);
    }
}

// Waits for all but `stopped` (-1: none), which is then killed.
static struct outcome finish(int stopped)
{
    struct outcome outcome = {.seconds = 0.0};
    double begin = timer_now();
    for (int i = 0; i < RANKS; i++) {
        int rank = (stopped + 1 + i) % RANKS, status = 0; // the stopped one last
        if (children[rank] == 0)
            continue;
        if (rank == stopped)
            kill(children[rank], SIGKILL);
        while (waitpid(children[rank], &status, WNOHANG) == 0) {
            if (timer_now() - begin > 60.0)
                kill(children[rank], SIGKILL);
            usleep(1000);
        }
        outcome.status[rank] = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        if (rank != stopped)
            outcome.seconds = timer_now() - begin;
    }
    return outcome;
}

static char *said(void)
{
    static char text[1 << 16];
    FILE *file = fopen(log_path, "r");
    size_t n = file != NULL ? fread(text, 1, sizeof(text) - 1, file) : 0;
    text[n] = '\0';
    if (file != NULL)
        fclose(file);
    return text;
}

static int count_of(const char *words)
{
    int count = 0;
    for (const char *at = said(); (at = strstr(at, words)) != NULL; at++)
        count++;
    return count;
}

static void must_say(const char *words, int times)
{
    if (count_of(words) != times)
        fail_msg("\"%s\" %d times, %d expected, in:\n%s", words, count_of(words), times, said());
}

// ---- who is let in -------------------------------------------------------------------------------

static void do_nothing(struct control *control, int rank)
{
    (void)control;
    (void)rank;
}

static void ranks_meet_and_leave(void **state)
{
    (void)state;
    struct scene scene = make_scene(do_nothing, 60.0);
    start(&scene);
    struct outcome outcome = finish(-1);
    for (int rank = 0; rank < RANKS; rank++)
        assert_int_equal(outcome.status[rank], 0);
    assert_true(outcome.seconds < 30.0);
    assert_string_equal(said(), "");
}

static void must_refuse(const struct scene *scene, const char *words)
{
    start(scene);
    struct outcome outcome = finish(-1);
    for (int rank = 0; rank < RANKS; rank++)
        if (!scene->absent[rank])
            assert_int_equal(outcome.status[rank], 2);
    if (strstr(shared->fault[0], words) == NULL)
        fail_msg("\"%s\" is not in \"%s\"", words, shared->fault[0]);
    assert_true(outcome.seconds < 30.0);
}

static void strange_ranks_are_refused_by_name(void **state)
{
    (void)state;
    struct scene scene = make_scene(do_nothing, 20.0);
    scene.identity[2].config = 6;
    must_refuse(&scene, "has another configuration than rank 0");
    assert_non_null(strstr(shared->fault[0], "rank 2 ("));
    scene = make_scene(do_nothing, 20.0);
    strcpy(scene.identity[1].program, "1.1 (abd, Release)");
    must_refuse(&scene, "runs dtrain 1.1 (abd, Release), rank 0 runs 1.0");
    scene = make_scene(do_nothing, 20.0);
    scene.place[1].size = 2;
    must_refuse(&scene, "was told of 2 ranks, rank 0 of 3");
    scene = make_scene(do_nothing, 20.0);
    scene.place[2].rank = 1;
    must_refuse(&scene, "two processes have the same number");
}

static void missing_ranks_are_named(void **state)
{
    (void)state;
    struct scene scene = make_scene(do_nothing, 5.0);
    scene.absent[2] = true;
    must_refuse(&scene, "within 5 s (parallel.timeout): 2");
    // One of another job is a stranger: as if it had not come.
    scene = make_scene(do_nothing, 5.0);
    scene.place[1].job = 78;
    must_refuse(&scene, "within 5 s (parallel.timeout): 1");
    assert_non_null(strstr(shared->fault[1], "rank 0 has not answered on 127.0.0.1"));
}

// Connections that say nothing, rubbish, or half a hello do not keep the ranks from meeting.
static void strangers_do_not_disturb(void **state)
{
    (void)state;
    struct scene scene = make_scene(do_nothing, 60.0);
    scene.absent[2] = true;
    start(&scene);
    while (shared->port == 0)
        usleep(1000);
    int silent = wire_connect("127.0.0.1", shared->port, 1.0);
    int rubbish = wire_connect("127.0.0.1", shared->port, 1.0);
    int half = wire_connect("127.0.0.1", shared->port, 1.0);
    assert_true(silent >= 0 && rubbish >= 0 && half >= 0);
    static const char words[] = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";
    static const unsigned char begin[] = {0, 0, 0, 1, 0, 0, 0, 200, 'D', 'T'};
    assert_true(write(rubbish, words, sizeof(words) - 1) > 0);
    assert_true(write(half, begin, sizeof(begin)) > 0);
    usleep(300000);
    children[2] = fork();
    if (children[2] == 0)
        live(&scene, 2);
    struct outcome outcome = finish(-1);
    for (int rank = 0; rank < RANKS; rank++)
        assert_int_equal(outcome.status[rank], 0);
    close(silent);
    close(rubbish);
    close(half);
}

static void a_taken_port_is_passed_over(void **state)
{
    (void)state;
    struct rank_place place = {.size = 2, .one_machine = true, .listen_fd = -1, .ports = 2};
    struct rank_address address;
    struct error err;
    int first = 0, listener, taken = wire_listen(&first, 1);
    assert_true(taken >= 0);
    place.port = first;
    assert_int_equal(rank_join_address(&place, 0, &address, &err), 0);
    if (rank_join_listen(&place, false, &address, &listener, &err) ==
        0) { // unless the next is taken, too
        assert_int_equal(address.port, first + 1);
        close(listener);
    }
    assert_int_equal(rank_join_address(&place, first, &address, &err), 0);
    assert_int_equal(rank_join_listen(&place, false, &address, &listener, &err), -1);
    assert_non_null(strstr(err.text, "can not listen on TCP port"));
    close(taken);
    place.held_port = 29500;
    assert_int_equal(rank_join_address(&place, 29500, &address, &err), -1);
    assert_non_null(strstr(err.text, "MASTER_PORT"));
}

// ---- what is noticed -----------------------------------------------------------------------------

static void wait_in_exchange(struct control *control)
{
    control_enter(control);
    for (;;) {
        control_check(control);
        usleep(1000);
    }
}

static void one_exchange(struct control *control)
{
    control_enter(control);
    control_leave(control);
}

static int unlucky; // the rank that something happens to
static int fate;    // the signal that it sends itself; 0: it stays away from the exchange

static void meet_fate(struct control *control, int rank)
{
    one_exchange(control);
    if (rank != unlucky)
        wait_in_exchange(control);
    usleep(100000);
    if (fate != 0)
        raise(fate);
    for (;;)
        pause();
}

// The main thread does not look: the control thread ends the process.
static void meet_fate_deaf(struct control *control, int rank)
{
    one_exchange(control);
    usleep(100000);
    if (rank == unlucky)
        raise(SIGKILL);
    for (;;)
        pause();
}

static void must_notice(void (*run)(struct control *, int), int rank, int signal_number,
                        const char *words, double seconds)
{
    char who[64];
    struct scene scene = make_scene(run, signal_number == SIGKILL ? 60.0 : 8.0);
    unlucky = rank;
    fate = signal_number;
    start(&scene);
    struct outcome outcome = finish(signal_number == SIGSTOP ? rank : -1);
    for (int i = 0; i < RANKS; i++)
        if (i != rank)
            assert_int_equal(outcome.status[i], 1);
    if (!(outcome.seconds < seconds))
        fail_msg("it took %.1f s:\n%s", outcome.seconds, said());
    snprintf(who, sizeof(who), "rank %d", rank);
    if (strstr(said(), who) == NULL || strstr(said(), words) == NULL)
        fail_msg("no \"%s ... %s\" in:\n%s", who, words, said());
}

static void every_fate_of_every_rank_is_noticed(void **state)
{
    (void)state;
    for (int rank = 0; rank < RANKS; rank++) {
        must_notice(meet_fate, rank, SIGKILL, "has ended without leaving the run", 20.0);
        must_notice(meet_fate_deaf, rank, SIGKILL, "has ended without leaving the run", 20.0);
    }
    for (int rank = 0; rank < RANKS; rank += 2) {
        must_notice(meet_fate, rank, SIGSTOP, "it is stopped", 30.0);
        must_notice(meet_fate, rank, 0, "it came to exchange 1, they are at 2", 30.0);
    }
}

static void stand_still(struct control *control, int rank)
{
    (void)rank;
    wait_in_exchange(control);
}

static void an_exchange_that_stands_still_ends_all(void **state)
{
    (void)state;
    struct scene scene = make_scene(stand_still, 4.0);
    start(&scene);
    struct outcome outcome = finish(-1);
    for (int rank = 0; rank < RANKS; rank++)
        assert_int_equal(outcome.status[rank], 1);
    assert_true(outcome.seconds < 30.0);
    must_say("exchange 1 stands still", RANKS);
}

static void wait_until_told(struct control *control, int rank)
{
    control_enter(control);
    shared->waits[rank] = true;
    while (!shared->goes_on) {
        control_check(control);
        usleep(1000);
    }
    control_leave(control);
}

static void signal_all(int number)
{
    for (int rank = 0; rank < RANKS; rank++)
        kill(children[rank], number);
}

// As Ctrl-Z and fg, or a batch system that suspends a job.
static void a_job_that_was_stopped_as_a_whole_goes_on(void **state)
{
    (void)state;
    enum { SECONDS = 4 };
    struct scene scene = make_scene(wait_until_told, SECONDS);
    start(&scene);
    while (!(shared->waits[0] && shared->waits[1] && shared->waits[2]))
        usleep(1000);
    signal_all(SIGSTOP);
    sleep(2 * SECONDS);
    signal_all(SIGCONT);
    sleep(SECONDS / 4);
    shared->goes_on = true;
    struct outcome outcome = finish(-1);
    assert_string_equal(said(), "");
    for (int rank = 0; rank < RANKS; rank++)
        assert_int_equal(outcome.status[rank], 0);
}

// What an engine has queued counts like an exchange that the host waits in.
static double queued_waiting(void *context)
{
    const double *since = context;
    return timer_now() - *since;
}

static void stand_still_queued(struct control *control, int rank)
{
    double since = timer_now();
    (void)rank;
    one_exchange(control);
    control_watch(control, queued_waiting, NULL, &since);
    for (;;)
        pause();
}

static void a_queue_that_stands_still_ends_all(void **state)
{
    (void)state;
    struct scene scene = make_scene(stand_still_queued, 4.0);
    start(&scene);
    struct outcome outcome = finish(-1);
    for (int rank = 0; rank < RANKS; rank++)
        assert_int_equal(outcome.status[rank], 1);
    assert_true(outcome.seconds < 30.0);
    must_say("exchange 1 stands still", RANKS);
}

static void leave_early(struct control *control, int rank)
{
    if (rank != 1)
        wait_in_exchange(control);
}

static void one_that_leaves_early_is_missed(void **state)
{
    (void)state;
    struct scene scene = make_scene(leave_early, 60.0);
    start(&scene);
    struct outcome outcome = finish(-1);
    assert_int_equal(outcome.status[0], 1);
    assert_int_equal(outcome.status[1], 0);
    assert_int_equal(outcome.status[2], 1);
    assert_true(outcome.seconds < 30.0);
    must_say("has left the run, which goes on without it", 2);
}

// ---- signals and failures ------------------------------------------------------------------------

static void see_signal(struct control *control, int rank)
{
    double begin = timer_now();
    if (rank == unlucky)
        raise(SIGUSR1);
    while (control_signal(control) == 0 && timer_now() - begin < 10.0)
        usleep(1000);
    if (control_signal(control) != SIGUSR1 || timer_now() - begin > 5.0)
        _exit(7);
}

static void a_signal_on_any_rank_reaches_all(void **state)
{
    (void)state;
    for (unlucky = 0; unlucky < RANKS; unlucky++) {
        struct scene scene = make_scene(see_signal, 60.0);
        start(&scene);
        struct outcome outcome = finish(-1);
        for (int rank = 0; rank < RANKS; rank++)
            assert_int_equal(outcome.status[rank], 0);
    }
}

// As a launcher does it: one dies, the others are sent SIGTERM at once.
static void die_and_terminate(struct control *control, int rank)
{
    if (rank == unlucky) {
        usleep(300000);
        shared->dying = true;
        raise(SIGKILL);
    }
    while (!shared->dying)
        usleep(1000);
    raise(SIGTERM);
    double begin = timer_now();
    while (timer_now() - begin < 10.0) {
        if (control_signal(control) != 0)
            _exit(75);
        usleep(1000);
    }
}

static void a_launchers_signal_after_a_death_is_no_preemption(void **state)
{
    (void)state;
    for (unlucky = 0; unlucky < RANKS; unlucky++) {
        struct scene scene = make_scene(die_and_terminate, 60.0);
        start(&scene);
        struct outcome outcome = finish(-1);
        for (int rank = 0; rank < RANKS; rank++)
            assert_int_equal(outcome.status[rank], rank == unlucky ? 128 + SIGKILL : 1);
    }
}

static int status_of_failure;

static void fail_alone(struct control *control, int rank)
{
    if (rank != unlucky)
        wait_in_exchange(control);
    control_fail(control, "the disk is full", status_of_failure);
    _exit(3);
}

static void a_failure_of_one_is_said_once_and_ends_all(void **state)
{
    (void)state;
    for (unlucky = 0; unlucky < RANKS; unlucky++) {
        struct scene scene = make_scene(fail_alone, 60.0);
        status_of_failure = unlucky == 1 ? 2 : 1;
        start(&scene);
        struct outcome outcome = finish(-1);
        for (int rank = 0; rank < RANKS; rank++)
            assert_int_equal(outcome.status[rank], rank == unlucky ? 3 : status_of_failure);
        assert_true(outcome.seconds < 30.0);
        must_say("error 0 ", 1); // rank 0 says it, whoever fails
        must_say(unlucky == 0 ? "error 0 the disk is full" : "): the disk is full", 1);
    }
}

static void fail_together(struct control *control, int rank)
{
    usleep(150000 * (unsigned)((rank + unlucky) % RANKS));
    control_fail(control, "the data have no supervised token", 2);
    _exit(2);
}

static void the_same_failure_of_all_is_said_once(void **state)
{
    (void)state;
    for (unlucky = 0; unlucky < RANKS; unlucky++) {
        struct scene scene = make_scene(fail_together, 60.0);
        start(&scene);
        struct outcome outcome = finish(-1);
        for (int rank = 0; rank < RANKS; rank++)
            assert_int_equal(outcome.status[rank], 2);
        must_say("the data have no supervised token", 1);
        must_say("error", 1);
    }
}

static void fail_differently(struct control *control, int rank)
{
    char text[64];
    snprintf(text, sizeof(text), "shard %d is missing", rank);
    control_fail(control, text, 2);
    _exit(2);
}

static void different_failures_are_all_said(void **state)
{
    (void)state;
    struct scene scene = make_scene(fail_differently, 60.0);
    start(&scene);
    struct outcome outcome = finish(-1);
    for (int rank = 0; rank < RANKS; rank++)
        assert_int_equal(outcome.status[rank], 2);
    must_say("shard 0 is missing", 1);
    must_say("shard 1 is missing", 1);
    must_say("shard 2 is missing", 1);
}

static void tell_bytes(struct control *control, int rank)
{
    struct error err;
    char bytes[128] = "", more[3] = "";
    if (rank == 0)
        strcpy(bytes, "an id of 128 bytes");
    if (rank == 0)
        strcpy(more, "ab");
    if (rank == 2)
        usleep(200000);
    if (control_tell(control, bytes, sizeof(bytes), &err) != 0 ||
        strcmp(bytes, "an id of 128 bytes") != 0)
        _exit(7);
    usleep(300000); // the second may come before the first is fetched
    if (control_tell(control, more, sizeof(more), &err) != 0 || strcmp(more, "ab") != 0)
        _exit(8);
}

static void bytes_of_rank_0_reach_all(void **state)
{
    (void)state;
    struct scene scene = make_scene(tell_bytes, 60.0);
    start(&scene);
    struct outcome outcome = finish(-1);
    for (int rank = 0; rank < RANKS; rank++)
        assert_int_equal(outcome.status[rank], 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_meet_and_leave),
        cmocka_unit_test(strange_ranks_are_refused_by_name),
        cmocka_unit_test(missing_ranks_are_named),
        cmocka_unit_test(strangers_do_not_disturb),
        cmocka_unit_test(a_taken_port_is_passed_over),
        cmocka_unit_test(every_fate_of_every_rank_is_noticed),
        cmocka_unit_test(an_exchange_that_stands_still_ends_all),
        cmocka_unit_test(a_queue_that_stands_still_ends_all),
        cmocka_unit_test(a_job_that_was_stopped_as_a_whole_goes_on),
        cmocka_unit_test(one_that_leaves_early_is_missed),
        cmocka_unit_test(a_signal_on_any_rank_reaches_all),
        cmocka_unit_test(a_launchers_signal_after_a_death_is_no_preemption),
        cmocka_unit_test(a_failure_of_one_is_said_once_and_ends_all),
        cmocka_unit_test(the_same_failure_of_all_is_said_once),
        cmocka_unit_test(different_failures_are_all_said),
        cmocka_unit_test(bytes_of_rank_0_reach_all),
    };
    shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int file = mkstemp(log_path);
    if (shared == MAP_FAILED || file < 0)
        return 1;
    close(file);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(log_path);
    return failed;
}
