// Owns the reading of launchers' environments; talks to nobody.
#include "trainer/rank_place.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"

enum {
    MOST_RANKS = 4096,
    PORT_OFFSET = 17, // from torchrun's port to the first that is tried
    PORT_TRIES = 8,
    JOB_PORT = 20000, // the first of a job's ports lies in the 10000 from here
    JOB_PORTS = 10000
};

// The environment and where its faults go.
struct reader {
    rank_variable_fn *variable;
    void *context;
    struct error *err;
};

const char *rank_variable(void *unused, const char *name)
{
    (void)unused;
    return getenv(name);
}

const char *rank_launcher_name(enum rank_launcher launcher)
{
    static const char *const names[] = {"no launcher", "dtrain", "torchrun", "mpirun", "srun"};
    return names[launcher];
}

static const char *look(const struct reader *reader, const char *name)
{
    const char *text = reader->variable(reader->context, name);
    return text != NULL && text[0] != '\0' ? text : NULL;
}

static uint64_t hash_text(uint64_t hash, const char *text)
{
    for (; text != NULL && *text != '\0'; text++)
        hash = rng_mix(hash, (uint64_t)(unsigned char)*text);
    return rng_mix(hash, 0x100);
}

// A whole number from minimum to maximum out of variable `name`, which must be set.
static int take_number(const struct reader *reader, const char *launcher, const char *name,
                       int minimum, int maximum, int *value)
{
    const char *text = look(reader, name);
    char *end;
    if (text == NULL)
        return error_add(reader->err,
                         "%s: not set, but other variables of %s are; a whole number from %d to %d "
                         "was expected (unset the others to train without a launcher)",
                         name, launcher, minimum, maximum);
    long number = strtol(text, &end, 10);
    if (*end != '\0' || end == text || number < minimum || number > maximum)
        return error_add(reader->err,
                         "%s: \"%s\", as set by %s; a whole number from %d to %d was expected",
                         name, text, launcher, minimum, maximum);
    *value = (int)number;
    return 0;
}

struct names {
    const char *rank, *size, *local;
};

static int take_numbers(const struct reader *reader, const char *launcher,
                        const struct names *names, struct rank_place *place)
{
    int result = take_number(reader, launcher, names->size, 1, MOST_RANKS, &place->size);
    int most = result == 0 ? place->size - 1 : MOST_RANKS - 1;
    result |= take_number(reader, launcher, names->rank, 0, most, &place->rank);
    result |= take_number(reader, launcher, names->local, 0, most, &place->local);
    return result;
}

static bool any_set(const struct reader *reader, const char *const *names, int count)
{
    for (int i = 0; i < count; i++)
        if (look(reader, names[i]) != NULL)
            return true;
    return false;
}

static int read_own(const struct reader *reader, struct rank_place *place)
{
    static const struct names names = {RANK_VARIABLE_RANK, RANK_VARIABLE_SIZE, RANK_VARIABLE_RANK};
    place->launcher = LAUNCHER_OWN;
    place->one_machine = true;
    place->ports = 1;
    snprintf(place->host, sizeof(place->host), "127.0.0.1");
    int result = take_numbers(reader, "dtrain", &names, place);
    result |= take_number(reader, "dtrain", RANK_VARIABLE_PORT, 1, 65535, &place->port);
    if (result == 0 && place->rank == 0)
        result =
            take_number(reader, "dtrain", RANK_VARIABLE_LISTEN_FD, 3, 1 << 20, &place->listen_fd);
    place->job = hash_text(1, look(reader, RANK_VARIABLE_TOKEN));
    return result;
}

// Ports after torchrun's own; before it, where there are none left.
static void choose_ports_near(struct rank_place *place, int master)
{
    place->held_port = master;
    place->ports = PORT_TRIES;
    place->port = master + PORT_OFFSET + PORT_TRIES <= 65536 ? master + PORT_OFFSET
                                                             : master - PORT_OFFSET - PORT_TRIES;
}

static void choose_ports_by_job(struct rank_place *place)
{
    place->port = JOB_PORT + (int)(place->job % (JOB_PORTS - PORT_TRIES));
    place->ports = PORT_TRIES;
}

static int take_address(const struct reader *reader, struct rank_place *place)
{
    const char *address = look(reader, "MASTER_ADDR");
    if (address == NULL)
        return error_add(
            reader->err,
            "MASTER_ADDR: not set, but RANK and WORLD_SIZE are; the host of rank 0 was "
            "expected, as torchrun sets it");
    if (strlen(address) >= sizeof(place->host))
        return error_add(reader->err, "MASTER_ADDR: longer than the name of a host can be");
    snprintf(place->host, sizeof(place->host), "%s", address);
    return 0;
}

static int read_torchrun(const struct reader *reader, struct rank_place *place)
{
    static const struct names names = {"RANK", "WORLD_SIZE", "LOCAL_RANK"};
    place->launcher = LAUNCHER_TORCHRUN;
    int result = take_numbers(reader, "torchrun", &names, place), master = 0;
    if (result != 0 || place->size == 1)
        return result;
    result = take_address(reader, place);
    result |= take_number(reader, "torchrun", "MASTER_PORT", 1, 65535, &master);
    if (result != 0)
        return result;
    choose_ports_near(place, master);
    int here = 0;
    const char *text = look(reader, "LOCAL_WORLD_SIZE");
    if (text != NULL)
        here = atoi(text);
    place->one_machine = here == place->size;
    place->job =
        hash_text(hash_text(2, look(reader, "TORCHELASTIC_RUN_ID")), look(reader, "MASTER_PORT"));
    // A script that sets torchrun's variables under mpirun: MPI is there all the same.
    const char *mpi_size = look(reader, "OMPI_COMM_WORLD_SIZE");
    const char *mpi_rank = look(reader, "OMPI_COMM_WORLD_RANK");
    place->mpi = mpi_size != NULL && mpi_rank != NULL && atoi(mpi_size) == place->size &&
                 atoi(mpi_rank) == place->rank;
    return 0;
}

// Where MPI is built in, it tells rank 0's address; the rest is for builds without.
static int read_mpirun(const struct reader *reader, struct rank_place *place)
{
    static const struct names names = {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                                       "OMPI_COMM_WORLD_LOCAL_RANK"};
    place->launcher = LAUNCHER_MPIRUN;
    place->mpi = true;
    if (take_numbers(reader, "mpirun", &names, place) != 0)
        return -1;
    const char *here = look(reader, "OMPI_COMM_WORLD_LOCAL_SIZE");
    place->one_machine = here != NULL && atoi(here) == place->size;
    const char *job = look(reader, "PMIX_NAMESPACE");
    place->job = hash_text(3, job != NULL ? job : look(reader, "OMPI_MCA_ess_base_jobid"));
    choose_ports_by_job(place);
    const char *address = look(reader, "MASTER_ADDR");
    if (place->one_machine)
        snprintf(place->host, sizeof(place->host), "127.0.0.1");
    else if (address != NULL && strlen(address) < sizeof(place->host))
        snprintf(place->host, sizeof(place->host), "%s", address);
    return 0;
}

int rank_first_host(const char *list, char *host, int size)
{
    int at = 0;
    while (*list != '\0' && *list != ',') {
        if (*list != '[') {
            if (at + 1 >= size)
                return -1;
            host[at++] = *list++;
            continue;
        }
        const char *close = strchr(list, ']');
        size_t digits = strcspn(list + 1, "-,]");
        if (close == NULL || digits == 0 || at + (int)digits >= size)
            return -1;
        memcpy(host + at, list + 1, digits);
        at += (int)digits;
        list = close + 1;
    }
    host[at] = '\0';
    return at > 0 ? 0 : -1;
}

static int read_srun_address(const struct reader *reader, struct rank_place *place)
{
    const char *nodes = look(reader, "SLURM_STEP_NODELIST"), *address = look(reader, "MASTER_ADDR");
    const char *count = look(reader, "SLURM_STEP_NUM_NODES");
    if (nodes == NULL)
        nodes = look(reader, "SLURM_NODELIST");
    place->one_machine =
        count != NULL ? atoi(count) == 1 : nodes != NULL && strpbrk(nodes, ",[") == NULL;
    if (place->one_machine)
        snprintf(place->host, sizeof(place->host), "127.0.0.1");
    else if (address != NULL && strlen(address) < sizeof(place->host))
        snprintf(place->host, sizeof(place->host), "%s", address);
    else if (nodes == NULL)
        return error_add(reader->err, "SLURM_STEP_NODELIST: not set, but other variables of srun "
                                      "are; the hosts of the step were expected");
    else if (rank_first_host(nodes, place->host, sizeof(place->host)) != 0)
        return error_add(reader->err,
                         "SLURM_STEP_NODELIST: \"%s\"; a list of hosts was expected, as "
                         "node[01-04]",
                         nodes);
    return 0;
}

static int read_srun(const struct reader *reader, struct rank_place *place)
{
    const char *size =
        look(reader, "SLURM_STEP_NUM_TASKS") != NULL ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
    const struct names names = {"SLURM_PROCID", size, "SLURM_LOCALID"};
    place->launcher = LAUNCHER_SRUN;
    place->mpi = true;
    if (take_numbers(reader, "srun", &names, place) != 0)
        return -1;
    if (place->size == 1) { // a job's only task: this program may start ranks of its own
        place->launcher = LAUNCHER_NONE;
        place->mpi = false;
        place->local = 0;
        return 0;
    }
    if (look(reader, "SLURM_JOB_ID") == NULL)
        return error_add(reader->err, "SLURM_JOB_ID: not set, but other variables of srun are; the "
                                      "number of the job was expected");
    if (read_srun_address(reader, place) != 0)
        return -1;
    const char *step = look(reader, "SLURM_STEP_ID") != NULL ? "SLURM_STEP_ID" : "SLURM_STEPID";
    place->job = hash_text(hash_text(4, look(reader, "SLURM_JOB_ID")), look(reader, step));
    choose_ports_by_job(place);
    return 0;
}

int rank_place_read(struct rank_place *place, rank_variable_fn *variable, void *context,
                    struct error *err)
{
    static const char *const own[] = {RANK_VARIABLE_RANK, RANK_VARIABLE_SIZE, RANK_VARIABLE_PORT};
    static const char *const torchrun[] = {"RANK", "WORLD_SIZE", "LOCAL_RANK"};
    static const char *const mpirun[] = {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                                         "OMPI_COMM_WORLD_LOCAL_RANK"};
    // A batch script and a shell of salloc have SLURM_PROCID and SLURM_NTASKS, too, but none of these.
    static const char *const srun[] = {"SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST",
                                       "SLURM_STEP_NUM_TASKS"};
    const struct reader reader = {variable, context, err};
    *place = (struct rank_place){.size = 1, .one_machine = true, .listen_fd = -1};
    err->text[0] = '\0';
    if (any_set(&reader, own, 3))
        return read_own(&reader, place);
    if (any_set(&reader, torchrun, 3))
        return read_torchrun(&reader, place);
    if (any_set(&reader, mpirun, 3))
        return read_mpirun(&reader, place);
    if (any_set(&reader, srun, 4))
        return read_srun(&reader, place);
    const char *tasks = look(&reader, "SLURM_NTASKS");
    if (tasks != NULL && atoi(tasks) > 1)
        snprintf(place->notice, sizeof(place->notice),
                 "SLURM_NTASKS is %s, but srun has not started this process: it trains on this "
                 "machine only; start dtrain by srun to use all tasks",
                 tasks);
    return 0;
}
