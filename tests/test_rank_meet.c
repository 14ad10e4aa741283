// Processes find each other by the environments of launchers: two of them as each launcher would start them, on one
// machine and as if on two. What connects their data afterwards is not there: GPUs are asked for and none is needed.
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/memory.h"
#include "base/timer.h"
#include "tests/support/program.h"

enum { RANKS = 2, VARIABLES = 12 };

struct launcher {
    const char *name;
    bool meets;
    const char *variables[VARIABLES]; // NAME=VALUE; @ is the rank, % this process's number
};

// Arguments are whole: NAME=VALUE.
#define TORCHRUN(local, here, host)                                                                \
    "RANK=@", "WORLD_SIZE=2", local, here, host, "MASTER_PORT=29500", "TORCHELASTIC_RUN_ID=%"
#define SRUN(local, nodes, list)                                                                   \
    "SLURM_PROCID=@", "SLURM_NTASKS=2", "SLURM_STEP_NUM_TASKS=2", "SLURM_JOB_ID=%",                \
        "SLURM_STEP_ID=0", local, nodes, list

static const struct launcher launchers[] = {
    {"torchrun", true, {TORCHRUN("LOCAL_RANK=@", "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=localhost")}},
    {"torchrun on two machines",
     true,
     {TORCHRUN("LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1", "MASTER_ADDR=127.0.0.1")}},
    {"torchrun's variables under mpirun",
     true,
     {TORCHRUN("LOCAL_RANK=@", "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1"),
      "OMPI_COMM_WORLD_RANK=@", "OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_LOCAL_RANK=@"}},
    {"srun",
     true,
     {SRUN("SLURM_LOCALID=@", "SLURM_STEP_NUM_NODES=1", "SLURM_STEP_NODELIST=node7")}},
    {"srun on two nodes",
     true,
     {SRUN("SLURM_LOCALID=0", "SLURM_STEP_NUM_NODES=2", "SLURM_STEP_NODELIST=127.0.0.[1-2]")}},
    {"srun, of two jobs",
     false,
     {SRUN("SLURM_LOCALID=@", "SLURM_STEP_NUM_NODES=1", "SLURM_STEP_NODELIST=node7"),
      "SLURM_JOB_ID=%@"}},
};

static char folder[] = "/tmp/dtrain-meet-XXXXXX";

static char *value_of(const char *text, int rank)
{
    char *value = memory_alloc(strlen(text) + 64, 1), *end = value;
    for (; *text != '\0'; text++)
        if (*text == '@' || *text == '%')
            end += sprintf(end, "%d", *text == '@' ? rank : (int)getppid());
        else
            *end++ = *text;
    return value;
}

static void become_rank(const struct launcher *launcher, int rank, const char *output)
{
    int out = open(output, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    dup2(out, STDOUT_FILENO);
    dup2(out, STDERR_FILENO);
    for (int i = 0; i < VARIABLES && launcher->variables[i] != NULL; i++)
        putenv(value_of(launcher->variables[i], rank));
    execl(DTRAIN_RANKS_PROCESS, DTRAIN_RANKS_PROCESS, "meet", launcher->meets ? "60" : "4", "cuda",
          (char *)NULL);
    _exit(126);
}

static void launch(const struct launcher *launcher)
{
    pid_t pids[RANKS];
    char *outputs[RANKS];
    for (int rank = 0; rank < RANKS; rank++) {
        outputs[rank] = memory_format("%s/%d", folder, rank);
        pids[rank] = fork();
        assert_true(pids[rank] >= 0);
        if (pids[rank] == 0)
            become_rank(launcher, rank, outputs[rank]);
    }
    for (int rank = 0; rank < RANKS; rank++) {
        char *words = launcher->meets ? memory_format("rank %d of 2", rank)
                                      : memory_strdup("parallel.timeout");
        int status;
        assert_int_equal(waitpid(pids[rank], &status, 0), pids[rank]);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != (launcher->meets ? 0 : 2) ||
            !program_says(outputs[rank], words))
            fail_msg("%s, rank %d: status %d: %s", launcher->name, rank, status,
                     program_text(outputs[rank]));
        unlink(outputs[rank]);
        free(outputs[rank]);
        free(words);
    }
}

static void ranks_meet_by_every_launcher(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(launchers) / sizeof(*launchers); i++)
        launch(&launchers[i]);
}

int main(void)
{
    static const char *const names[] = {"RANK",         "WORLD_SIZE",           "LOCAL_RANK",
                                        "MASTER_ADDR",  "OMPI_COMM_WORLD_RANK", "SLURM_PROCID",
                                        "SLURM_STEP_ID"};
    const struct CMUnitTest tests[] = {cmocka_unit_test(ranks_meet_by_every_launcher)};
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
        unsetenv(names[i]);
    if (mkdtemp(folder) == NULL)
        return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    rmdir(folder);
    return failed;
}
