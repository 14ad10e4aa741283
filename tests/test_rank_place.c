// The environments of launchers, as a table; first hosts of Slurm's lists; which GPU a rank sees.
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "trainer/rank_gpu.h"
#include "trainer/rank_place.h"

enum { VARIABLES = 12 };

struct place_case {
    const char *variables[VARIABLES]; // "NAME=VALUE"
    const char *fault;                // words of the error; NULL: none
    enum rank_launcher launcher;
    int rank, size, local;
    bool one_machine;
    const char *host;
    const char *notice; // words of it; NULL: none
};

static const struct place_case place_cases[] = {
    {{NULL}, NULL, LAUNCHER_NONE, 0, 1, 0, true, "", NULL},
    // torchrun
    {{"RANK=3", "WORLD_SIZE=4", "LOCAL_RANK=1", "MASTER_ADDR=node1", "MASTER_PORT=29500",
      "LOCAL_WORLD_SIZE=2"},
     NULL,
     LAUNCHER_TORCHRUN,
     3,
     4,
     1,
     false,
     "node1",
     NULL},
    {{"RANK=1", "WORLD_SIZE=2", "LOCAL_RANK=1", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=29500",
      "LOCAL_WORLD_SIZE=2", "SLURM_STEP_ID=0", "SLURM_PROCID=0", "SLURM_NTASKS=1",
      "OMPI_COMM_WORLD_RANK=0"},
     NULL,
     LAUNCHER_TORCHRUN,
     1,
     2,
     1,
     true,
     "127.0.0.1",
     NULL},
    {{"RANK=0", "WORLD_SIZE=1", "LOCAL_RANK=0"}, NULL, LAUNCHER_TORCHRUN, 0, 1, 0, true, "", NULL},
    {{"MASTER_ADDR=node1", "MASTER_PORT=29500"}, NULL, LAUNCHER_NONE, 0, 1, 0, true, "", NULL},
    {{"RANK=0", "WORLD_SIZE=4"}, "LOCAL_RANK: not set", LAUNCHER_NONE, 0, 0, 0, false, NULL, NULL},
    {{"WORLD_SIZE=4"}, "RANK: not set", LAUNCHER_NONE, 0, 0, 0, false, NULL, NULL},
    {{"LOCAL_RANK=0"}, "WORLD_SIZE: not set", LAUNCHER_NONE, 0, 0, 0, false, NULL, NULL},
    {{"RANK=4", "WORLD_SIZE=4", "LOCAL_RANK=0"},
     "RANK: \"4\", as set by torchrun; a whole number from 0 to 3 was expected",
     LAUNCHER_NONE,
     0,
     0,
     0,
     false,
     NULL,
     NULL},
    {{"RANK=1", "WORLD_SIZE=two", "LOCAL_RANK=0"},
     "WORLD_SIZE: \"two\"",
     LAUNCHER_NONE,
     0,
     0,
     0,
     false,
     NULL,
     NULL},
    {{"RANK=1", "WORLD_SIZE=2", "LOCAL_RANK=1x"},
     "LOCAL_RANK: \"1x\"",
     LAUNCHER_NONE,
     0,
     0,
     0,
     false,
     NULL,
     NULL},
    {{"RANK=-1", "WORLD_SIZE=2", "LOCAL_RANK=0"},
     "RANK: \"-1\"",
     LAUNCHER_NONE,
     0,
     0,
     0,
     false,
     NULL,
     NULL},
    {{"RANK=1", "WORLD_SIZE=2", "LOCAL_RANK=1", "MASTER_PORT=29500"},
     "MASTER_ADDR: not set",
     LAUNCHER_NONE,
     0,
     0,
     0,
     false,
     NULL,
     NULL},
    {{"RANK=1", "WORLD_SIZE=2", "LOCAL_RANK=1", "MASTER_ADDR=a"},
     "MASTER_PORT: not set",
     LAUNCHER_NONE,
     0,
     0,
     0,
     false,
     NULL,
     NULL},
    {{"RANK=1", "WORLD_SIZE=2", "LOCAL_RANK=1", "MASTER_ADDR=a", "MASTER_PORT=99999"},
     "MASTER_PORT: \"99999\"",
     LAUNCHER_NONE,
     0,
     0,
     0,
     false,
     NULL,
     NULL},
    // mpirun
    {{"OMPI_COMM_WORLD_RANK=2", "OMPI_COMM_WORLD_SIZE=3", "OMPI_COMM_WORLD_LOCAL_RANK=2",
      "OMPI_COMM_WORLD_LOCAL_SIZE=3", "SLURM_STEP_ID=1", "SLURM_PROCID=0"},
     NULL,
     LAUNCHER_MPIRUN,
     2,
     3,
     2,
     true,
     "127.0.0.1",
     NULL},
    {{"OMPI_COMM_WORLD_RANK=2", "OMPI_COMM_WORLD_SIZE=3", "OMPI_COMM_WORLD_LOCAL_RANK=0",
      "OMPI_COMM_WORLD_LOCAL_SIZE=1", "MASTER_ADDR=node7"},
     NULL,
     LAUNCHER_MPIRUN,
     2,
     3,
     0,
     false,
     "node7",
     NULL},
    {{"OMPI_COMM_WORLD_SIZE=3"},
     "OMPI_COMM_WORLD_RANK: not set",
     LAUNCHER_NONE,
     0,
     0,
     0,
     false,
     NULL,
     NULL},
    // srun
    {{"SLURM_JOB_ID=77", "SLURM_STEP_ID=0", "SLURM_PROCID=5", "SLURM_NTASKS=8", "SLURM_LOCALID=1",
      "SLURM_STEP_NUM_NODES=2", "SLURM_STEP_NODELIST=gpu[03-04]"},
     NULL,
     LAUNCHER_SRUN,
     5,
     8,
     1,
     false,
     "gpu03",
     NULL},
    {{"SLURM_JOB_ID=77", "SLURM_PROCID=1", "SLURM_NTASKS=2", "SLURM_LOCALID=1",
      "SLURM_STEP_NODELIST=gpu03"},
     NULL,
     LAUNCHER_SRUN,
     1,
     2,
     1,
     true,
     "127.0.0.1",
     NULL},
    {{"SLURM_JOB_ID=77", "SLURM_STEP_ID=2", "SLURM_PROCID=1", "SLURM_NTASKS=64", "SLURM_LOCALID=0",
      "SLURM_STEP_NUM_TASKS=2", "SLURM_STEP_NODELIST=a1,b7", "MASTER_ADDR=10.0.0.1"},
     NULL,
     LAUNCHER_SRUN,
     1,
     2,
     0,
     false,
     "10.0.0.1",
     NULL},
    {{"SLURM_JOB_ID=77", "SLURM_STEP_ID=0", "SLURM_PROCID=0", "SLURM_NTASKS=1", "SLURM_LOCALID=0",
      "SLURM_STEP_NODELIST=gpu03"},
     NULL,
     LAUNCHER_NONE,
     0,
     1,
     0,
     true,
     "",
     NULL},
    {{"SLURM_STEP_ID=0", "SLURM_NTASKS=8", "SLURM_LOCALID=1"},
     "SLURM_PROCID: not set",
     LAUNCHER_NONE,
     0,
     0,
     0,
     false,
     NULL,
     NULL},
    {{"SLURM_STEP_ID=0", "SLURM_PROCID=1", "SLURM_NTASKS=8", "SLURM_LOCALID=1"},
     "SLURM_JOB_ID: not set",
     LAUNCHER_NONE,
     0,
     0,
     0,
     false,
     NULL,
     NULL},
    {{"SLURM_JOB_ID=7", "SLURM_STEP_ID=0", "SLURM_PROCID=1", "SLURM_NTASKS=8", "SLURM_LOCALID=1"},
     "SLURM_STEP_NODELIST: not set",
     LAUNCHER_NONE,
     0,
     0,
     0,
     false,
     NULL,
     NULL},
    // Scripts of sbatch and shells of salloc: in a job, and not started by srun.
    {{"SLURM_JOB_ID=77", "SLURM_PROCID=0", "SLURM_NTASKS=1", "SLURM_LOCALID=0",
      "SLURM_NODELIST=gpu03"},
     NULL,
     LAUNCHER_NONE,
     0,
     1,
     0,
     true,
     "",
     NULL},
    {{"SLURM_JOB_ID=77", "SLURM_PROCID=0", "SLURM_NTASKS=4", "SLURM_LOCALID=0",
      "SLURM_NODELIST=gpu[03-04]"},
     NULL,
     LAUNCHER_NONE,
     0,
     1,
     0,
     true,
     "",
     "srun has not started this process"},
    // dtrain's own
    {{"DTRAIN_RANK=1", "DTRAIN_WORLD_SIZE=2", "DTRAIN_PORT=40000", "DTRAIN_TOKEN=ab", "RANK=0",
      "WORLD_SIZE=1", "LOCAL_RANK=0"},
     NULL,
     LAUNCHER_OWN,
     1,
     2,
     1,
     true,
     "127.0.0.1",
     NULL},
    {{"DTRAIN_RANK=0", "DTRAIN_WORLD_SIZE=2", "DTRAIN_PORT=40000"},
     "DTRAIN_LISTEN_FD: not set",
     LAUNCHER_NONE,
     0,
     0,
     0,
     false,
     NULL,
     NULL},
};

static const char *variable_of_case(void *context, const char *name)
{
    const struct place_case *c = context;
    size_t n = strlen(name);
    for (int i = 0; i < VARIABLES && c->variables[i] != NULL; i++)
        if (strncmp(c->variables[i], name, n) == 0 && c->variables[i][n] == '=')
            return c->variables[i] + n + 1;
    return NULL;
}

static void check_case(const struct place_case *c, size_t number)
{
    struct rank_place place;
    struct error err = {0};
    int result = rank_place_read(&place, variable_of_case, (void *)c, &err);
    if ((result != 0) != (c->fault != NULL) ||
        (c->fault != NULL && strstr(err.text, c->fault) == NULL))
        fail_msg("case %zu: %d, \"%s\"", number, result, err.text);
    if (c->fault != NULL)
        return;
    if (place.launcher != c->launcher || place.rank != c->rank || place.size != c->size ||
        place.local != c->local || place.one_machine != c->one_machine ||
        strcmp(place.host, c->host) != 0)
        fail_msg("case %zu: %s, rank %d of %d, local %d, one machine %d, host %s", number,
                 rank_launcher_name(place.launcher), place.rank, place.size, place.local,
                 place.one_machine, place.host);
    if ((place.notice[0] != '\0') != (c->notice != NULL) ||
        (c->notice != NULL && strstr(place.notice, c->notice) == NULL))
        fail_msg("case %zu: notice \"%s\"", number, place.notice);
}

static void environments_are_read(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(place_cases) / sizeof(place_cases[0]); i++)
        check_case(&place_cases[i], i);
}

static struct rank_place read_place(struct place_case *c)
{
    struct rank_place place;
    struct error err = {0};
    assert_int_equal(rank_place_read(&place, variable_of_case, c, &err), 0);
    return place;
}

// Never torchrun's own, always ports that exist, and the same for all ranks of a job.
static void ports_are_near_and_not_the_launchers(void **state)
{
    (void)state;
    static const char *const masters[] = {"MASTER_PORT=29500", "MASTER_PORT=65535",
                                          "MASTER_PORT=65510", "MASTER_PORT=1024"};
    for (size_t i = 0; i < sizeof(masters) / sizeof(masters[0]); i++) {
        struct place_case c = {
            .variables = {"RANK=1", "WORLD_SIZE=2", "LOCAL_RANK=0", "MASTER_ADDR=a", masters[i]}};
        struct rank_place place = read_place(&c);
        int master = atoi(masters[i] + strlen("MASTER_PORT="));
        assert_int_equal(place.held_port, master);
        assert_true(place.port > 0 && place.port + place.ports <= 65536);
        assert_true(master < place.port || master >= place.port + place.ports);
    }
}

static void jobs_have_tokens_of_their_own(void **state)
{
    (void)state;
    static const char *const jobs[] = {"SLURM_JOB_ID=77", "SLURM_JOB_ID=78"};
    static const char *const steps[] = {"SLURM_STEP_ID=0", "SLURM_STEP_ID=1"};
    uint64_t tokens[2][2];
    for (int job = 0; job < 2; job++)
        for (int step = 0; step < 2; step++) {
            struct place_case c = {.variables = {jobs[job], steps[step], "SLURM_PROCID=1",
                                                 "SLURM_NTASKS=2", "SLURM_LOCALID=0",
                                                 "SLURM_STEP_NODELIST=a[1-2]"}};
            tokens[job][step] = read_place(&c).job;
            c.variables[2] = "SLURM_PROCID=0";
            assert_true(read_place(&c).job == tokens[job][step]);
        }
    assert_true(tokens[0][0] != tokens[0][1] && tokens[0][0] != tokens[1][0] &&
                tokens[0][1] != tokens[1][1]);
}

#define LONG_NAME "a-name-that-is-longer-than-the-place-for-it-which-has-64-characters"

static void first_hosts_of_lists(void **state)
{
    (void)state;
    static const char *const lists[][2] = {{"node3", "node3"},
                                           {"node[03-05,9],login", "node03"},
                                           {"a,b", "a"},
                                           {"gpu-[7]", "gpu-7"},
                                           {"r[1-2]n[08-09]", "r1n08"},
                                           {"x[2,5-7].cluster", "x2.cluster"}};
    char host[64];
    for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
        assert_int_equal(rank_first_host(lists[i][0], host, sizeof(host)), 0);
        assert_string_equal(host, lists[i][1]);
    }
    static const char *const faults[] = {"", ",a", "a[", "a[]", "a[-3]", LONG_NAME};
    for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++)
        assert_int_equal(rank_first_host(faults[i], host, sizeof(host)), -1);
}

static void a_rank_sees_one_gpu(void **state)
{
    (void)state;
    static const struct {
        const char *list;
        int local;
        const char *value; // NULL: refused
    } cases[] = {{NULL, 0, "0"},     {NULL, 3, "3"}, {"2,5", 0, "2"}, {"2,5", 1, "5"},
                 {"2,5", 2, NULL},   {"7", 3, "7"},  {"", 1, ""},     {"GPU-a,MIG-b,c", 1, "MIG-b"},
                 {"0,1,2,3", 3, "3"}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char value[16];
        struct error err = {0};
        int result = rank_gpu_choose(cases[i].list, cases[i].local, value, sizeof(value), &err);
        assert_int_equal(result, cases[i].value != NULL ? 0 : -1);
        if (cases[i].value != NULL)
            assert_string_equal(value, cases[i].value);
        else
            assert_non_null(strstr(err.text, "names 2 GPUs"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(environments_are_read),
        cmocka_unit_test(ports_are_near_and_not_the_launchers),
        cmocka_unit_test(jobs_have_tokens_of_their_own),
        cmocka_unit_test(first_hosts_of_lists),
        cmocka_unit_test(a_rank_sees_one_gpu),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
