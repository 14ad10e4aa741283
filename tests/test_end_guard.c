// A process that does not end is killed in time, one that ends is left alone, and what guards it keeps no file open.
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/timer.h"
#include "trainer/end_guard.h"

enum { LIMIT = 30 /* seconds of anything here */, NO_FILTERS = 77 };

static int to_child, own_end; // the child's own end of a pipe, which the guard must not hold
static char said[4096];
static bool older_kernel;

// From here on the kernel answers as one before Linux 5.9 does.
static bool forget_close_range(void)
{
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_close_range, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {.len = sizeof(rules) / sizeof(*rules), .filter = rules};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

// A child that is guarded for so long and then does what it is for; its standard error is *words.
static pid_t start(double seconds, void (*act)(void), int *words)
{
    int ends[2], own[2];
    assert_int_equal(pipe(ends), 0);
    assert_int_equal(pipe(own), 0);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        close(own[0]);
        own_end = own[1];
        setpgid(0, 0); // to be signalled together with its guard
        if (older_kernel && !forget_close_range())
            _exit(NO_FILTERS);
        end_guard_begin(seconds, "rank 7");
        act();
        _exit(0);
    }
    close(ends[1]);
    close(own[1]);
    *words = ends[0];
    to_child = own[0];
    return pid;
}

// All that comes until nobody can write there any more.
static void read_all(int from)
{
    size_t size = 0;
    struct pollfd ready = {.fd = from, .events = POLLIN};
    for (;;) {
        assert_int_equal(poll(&ready, 1, 1000 * LIMIT), 1);
        ssize_t n = read(from, said + size, sizeof(said) - 1 - size);
        if (n <= 0)
            break;
        size += (size_t)n;
    }
    said[size] = '\0';
    close(from);
}

static int await(pid_t pid)
{
    int status = 0;
    for (double until = timer_now() + LIMIT; waitpid(pid, &status, WNOHANG) == 0;) {
        if (timer_now() > until) {
            kill(pid, SIGKILL);
            fail_msg("the process has not ended");
        }
        usleep(1000);
    }
    return status;
}

static void stop(void)
{
    raise(SIGSTOP);
}

static void let_go_and_stop(void)
{
    close(own_end);
    raise(SIGSTOP);
}

static void end(void) {}

static void work_for_a_while(void)
{
    if (write(own_end, "w", 1) != 1)
        _exit(1);
    for (int i = 0; i < 50; i++)
        usleep(10000);
}

static void a_stopped_process_is_killed(void **state)
{
    (void)state;
    int words;
    double begin = timer_now();
    pid_t pid = start(0.5, stop, &words);
    int status = await(pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    assert_true(timer_now() - begin >= 0.5);
    close(to_child);
    read_all(words); // ends, as the guard does
    char name[64];
    snprintf(name, sizeof(name), "rank 7 (process %d) has not ended", (int)pid);
    if (strstr(said, name) == NULL)
        fail_msg("\"%s\" is not in: %s", name, said);
}

static void an_older_kernel_is_enough(void **state)
{
    (void)state;
    int words;
    older_kernel = true;
    int status = await(start(0.5, stop, &words));
    older_kernel = false;
    close(to_child);
    read_all(words);
    if (WIFEXITED(status) && WEXITSTATUS(status) == NO_FILTERS) {
        print_message("system calls can not be filtered here\n");
        skip();
    }
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static void one_that_ends_is_left_alone(void **state)
{
    (void)state;
    int words;
    double begin = timer_now();
    int status = await(start(LIMIT, end, &words));
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    close(to_child);
    read_all(words); // the guard has standard error, and is gone
    assert_string_equal(said, "");
    assert_true(timer_now() - begin < LIMIT / 2.0);
}

// As a batch system stops a job: longer than the limit.
static void one_that_was_stopped_with_its_guard_is_left_alone(void **state)
{
    (void)state;
    int words;
    char begun;
    pid_t pid = start(2.0, work_for_a_while, &words);
    assert_int_equal(read(to_child, &begun, 1), 1);
    usleep(100000); // the guard waits by now
    assert_int_equal(kill(-pid, SIGSTOP), 0);
    sleep(3);
    assert_int_equal(kill(-pid, SIGCONT), 0);
    int status = await(pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    close(to_child);
    read_all(words);
    assert_string_equal(said, "");
}

// What the guarded process closes is closed: here a pipe of which the guard has a copy at first.
static void nothing_is_held(void **state)
{
    (void)state;
    int words;
    struct pollfd other = {.events = POLLIN};
    pid_t pid = start(LIMIT, let_go_and_stop, &words);
    other.fd = to_child;
    assert_int_equal(poll(&other, 1, 1000 * LIMIT / 2), 1);
    assert_true((other.revents & POLLHUP) != 0);
    close(to_child);
    kill(pid, SIGKILL);
    await(pid);
    read_all(words);
    assert_string_equal(said, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stopped_process_is_killed),
        cmocka_unit_test(an_older_kernel_is_enough),
        cmocka_unit_test(one_that_ends_is_left_alone),
        cmocka_unit_test(one_that_was_stopped_with_its_guard_is_left_alone),
        cmocka_unit_test(nothing_is_held),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
