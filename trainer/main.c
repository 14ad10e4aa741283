// The program: reads the command line, runs the command.
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/host_memory.h"
#include "base/log.h"
#include "base/memory.h"
#include "data/shard_helper.h"
#include "trainer/command_line.h"
#include "trainer/help.h"
#include "trainer/signals.h"
#include "version.h"

// Runs before the constructors of all libraries, which with CUDA take some 40 ms, and twice
// (wait_without_spinning): a signal that comes meanwhile waits for the handlers of commands that have some.
__attribute__((section(".preinit_array"),
               used)) static void (*const before_libraries)(void) = signals_hold;

// The command line in one string, for provenance. The caller frees.
static char *join_command(int argc, char **argv)
{
    size_t n = 1;
    for (int i = 0; i < argc; i++)
        n += strlen(argv[i]) + 1;
    char *text = memory_alloc(n, 1), *end = text;
    for (int i = 0; i < argc; i++)
        end = stpcpy(stpcpy(end, argv[i]), i + 1 < argc ? " " : "");
    return text;
}

// Libraries wait for ever for memory that they can not map, also when they end.
static void check_address_space(void)
{
    if (host_memory_address_space(1) > 0)
        return;
    log_error("ulimit -v leaves no address space beside libraries; raise it, or ask the batch "
              "system for more virtual memory");
    _exit(EXIT_REFUSED);
}

static int run(struct command_line *line)
{
    if (line->asked == ASKED_VERSION) {
        printf("dtrain %s (%s, %s)\n", DTRAIN_VERSION, DTRAIN_COMMIT, DTRAIN_BUILD);
        return EXIT_DONE;
    }
    if (line->asked == ASKED_RUN && line->command->stops)
        return line->command->run(&line->options);
    signals_let_go();
    if (line->asked == ASKED_RUN)
        return line->command->run(&line->options);
    if (line->command == NULL)
        help_print_group(stdout, line->group);
    else if (line->named)
        help_print_command(stdout, line->command);
    else
        help_print(stdout);
    return EXIT_DONE;
}

// OpenMP's threads spin while they wait unless told otherwise: beside other work that is ruinous, and
// alone it gains little. The runtime reads the policy when it is loaded, so the program starts itself
// again with it; a policy that the user has set stays.
static void wait_without_spinning(char **argv)
{
    if (getenv("OMP_WAIT_POLICY") != NULL || setenv("OMP_WAIT_POLICY", "passive", 1) != 0)
        return;
    execv("/proc/self/exe", argv); // returns only when it fails: then the threads spin
}

int main(int argc, char **argv)
{
    check_address_space();
    wait_without_spinning(argv);
    signal(SIGCHLD, SIG_DFL); // who ignores it, as some starters do, can not wait for children
    // "exe" since then, as which nobody finds it among processes.
    prctl(PR_SET_NAME, "dtrain");
    if (argc == 2 && strcmp(argv[1], SHARD_HELPER_WORD) == 0)
        shard_helper_main(); // a run's own, in no list of commands
    // A file that `ulimit -f` does not allow is an error of its write.
    signal(SIGXFSZ, SIG_IGN);
    struct command_line line;
    struct error err = {""};
    if (argc < 2) {
        help_print(stderr);
        return EXIT_REFUSED;
    }
    char *words = join_command(argc, argv);
    int status = EXIT_REFUSED;
    if (command_line_read(&line, argc, argv, &err) == 0) {
        line.options.command = words;
        status = run(&line);
    } else {
        fprintf(stderr, "%s\n", err.text);
    }
    if ((fflush(stdout) != 0 || ferror(stdout)) && status == EXIT_DONE) {
        log_error("standard output can not be written");
        status = EXIT_FAILED;
    }
    command_line_release(&line);
    free(words);
    return status;
}
