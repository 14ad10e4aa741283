// Owns the exchange between CPU processes by MPI. Nothing here blocks inside MPI: every call is begun and
// asked for until it is done, so that the death of another rank ends the wait. Values are added by the owner in
// the order of ranks, whatever MPI's own reductions would do.
#include "trainer/ranks_internal.h"

#ifndef DTRAIN_MPI

bool ranks_mpi_built(void)
{
    return false;
}

int ranks_mpi_start(const struct ranks *ranks, bool cpu, double seconds, struct error *err)
{
    (void)ranks;
    (void)cpu;
    (void)seconds;
    return error_set(err,
                     "this build has no MPI: CMake found none, or was given -DWITH_MPI=OFF; ranks "
                     "on CPUs need it");
}

void ranks_mpi_tell(void *bytes, size_t size, bool last)
{
    (void)bytes;
    (void)size;
    (void)last;
}

const struct ranks_engine *ranks_mpi_engine(struct ranks *ranks, void **state)
{
    (void)ranks;
    *state = NULL;
    return NULL;
}

#else

#include <limits.h>
#include <mpi.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "base/memory.h"
#include "trainer/commands.h"

enum {
    CHUNK_FLOATS = 1 << 20,   // of a reduction, from each rank at a time
    CHUNK_BYTES = 1 << 28,    // of a broadcast
    SPINS = 2000,             // looks at a request before the processor is left to others
    PAUSE_NANOSECONDS = 50000 // between looks after that
};

struct mpi_state {
    struct ranks *ranks;
    int rank, size;
    float *parts;          // [size, CHUNK_FLOATS] of the others, on owners
    MPI_Request *requests; // [size]
};

bool ranks_mpi_built(void)
{
    return true;
}

static void check(int status, const char *what)
{
    char text[MPI_MAX_ERROR_STRING];
    int length;
    if (status == MPI_SUCCESS)
        return;
    MPI_Error_string(status, text, &length);
    die("MPI: %s: %s", what, text);
}

// MPI's own start waits for all processes without a limit.
static void give_up(int signal_number)
{
    static const char text[] =
        "dtrain: MPI has not started within parallel.timeout seconds: a rank is "
        "stopped or gone\n";
    (void)signal_number;
    if (write(STDERR_FILENO, text, sizeof(text) - 1) < 0)
        _exit(EXIT_FAILED);
    _exit(EXIT_FAILED);
}

// Where run.device is auto, a machine of several may see no GPU.
static int check_devices(bool cpu, struct error *err)
{
    int kinds[2] = {cpu, !cpu};
    check(MPI_Allreduce(MPI_IN_PLACE, kinds, 2, MPI_INT, MPI_MAX, MPI_COMM_WORLD), "MPI_Allreduce");
    if (kinds[0] && kinds[1])
        return error_set(err,
                         "this rank computes on %s, another one does not: run.device (cpu or cuda) "
                         "says what is meant",
                         cpu ? "a CPU, since it sees no GPU" : "a GPU");
    return 0;
}

int ranks_mpi_start(const struct ranks *ranks, bool cpu, double seconds, struct error *err)
{
    struct sigaction action = {.sa_handler = give_up};
    int got, rank, size;
    sigaction(SIGALRM, &action, NULL);
    alarm((unsigned)seconds);
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &got) != MPI_SUCCESS)
        return error_set(err, "MPI does not start");
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (got < MPI_THREAD_FUNNELED)
        return error_set(err,
                         "MPI does not allow other threads in the process (MPI_THREAD_FUNNELED)");
    if (size != ranks_size(ranks) || rank != ranks_rank(ranks))
        return error_set(err,
                         "MPI sees rank %d of %d, the launcher's environment says %d of %d; srun "
                         "connects MPI to it by --mpi=pmix, mpirun must be of the same MPI",
                         rank, size, ranks_rank(ranks), ranks_size(ranks));
    return check_devices(cpu, err);
}

void ranks_mpi_tell(void *bytes, size_t size, bool last)
{
    check(MPI_Bcast(bytes, (int)size, MPI_BYTE, 0, MPI_COMM_WORLD), "MPI_Bcast");
    if (last)
        check(MPI_Finalize(), "MPI_Finalize");
    alarm(0);
    signal(SIGALRM, SIG_DFL);
}

static void finish(struct mpi_state *s, MPI_Request *requests, int count)
{
    const struct timespec pause = {.tv_nsec = PAUSE_NANOSECONDS};
    for (int64_t look = 0;; look++) {
        int done;
        check(MPI_Testall(count, requests, &done, MPI_STATUSES_IGNORE), "MPI_Testall");
        if (done)
            return;
        ranks_check(s->ranks);
        if (look < SPINS)
            sched_yield();
        else
            nanosleep(&pause, NULL);
    }
}

static void mpi_close(void *state)
{
    struct mpi_state *s = state;
    check(MPI_Finalize(), "MPI_Finalize");
    free(s->parts);
    free(s->requests);
    free(s);
}

// MPI_Finalize and MPI_Abort would wait for processes that may be gone.
static void mpi_abort(void *state)
{
    (void)state;
}

static void mpi_compute(void *state, struct stream *compute)
{
    (void)state;
    (void)compute;
}

static void reduce_chunk(struct mpi_state *s, float *values, int count, int owner)
{
    if (s->rank != owner) {
        check(MPI_Isend(values, count, MPI_FLOAT, owner, 0, MPI_COMM_WORLD, s->requests),
              "MPI_Isend");
        finish(s, s->requests, 1);
        return;
    }
    if (s->parts == NULL)
        s->parts = memory_alloc((size_t)s->size * CHUNK_FLOATS, sizeof(*s->parts));
    for (int from = 0; from < s->size; from++) {
        s->requests[from] = MPI_REQUEST_NULL;
        if (from != owner)
            check(MPI_Irecv(s->parts + (size_t)from * CHUNK_FLOATS, count, MPI_FLOAT, from, 0,
                            MPI_COMM_WORLD, &s->requests[from]),
                  "MPI_Irecv");
    }
    finish(s, s->requests, s->size);
    float *own = s->parts + (size_t)owner * CHUNK_FLOATS;
    memcpy(own, values, (size_t)count * sizeof(*values));
    memcpy(values, s->parts, (size_t)count * sizeof(*values));
    for (int from = 1; from < s->size; from++) {
        const float *part = s->parts + (size_t)from * CHUNK_FLOATS;
        for (int i = 0; i < count; i++)
            values[i] += part[i];
    }
}

static void mpi_reduce(void *state, float *values, int64_t count, int owner)
{
    for (int64_t at = 0; at < count; at += CHUNK_FLOATS)
        reduce_chunk(state, values + at,
                     (int)(count - at < CHUNK_FLOATS ? count - at : CHUNK_FLOATS), owner);
}

static void mpi_broadcast(void *state, void *bytes, size_t size, int owner)
{
    struct mpi_state *s = state;
    for (size_t at = 0; at < size; at += CHUNK_BYTES) {
        int count = (int)(size - at < CHUNK_BYTES ? size - at : CHUNK_BYTES);
        check(MPI_Ibcast((char *)bytes + at, count, MPI_BYTE, owner, MPI_COMM_WORLD, s->requests),
              "MPI_Ibcast");
        finish(s, s->requests, 1);
    }
}

// Everything is done when its call returns: there is nothing to bundle, to mark or to wait for.
static void mpi_group(void *state)
{
    (void)state;
}

static void mpi_place(void *state, int slot)
{
    (void)state;
    (void)slot;
}

static void mpi_sum(void *state, double *values, int64_t count)
{
    struct mpi_state *s = state;
    BUG_UNLESS(count <= INT_MAX);
    double *all = memory_alloc((size_t)(count * s->size) + 1, sizeof(*all)); // [size, count]
    check(MPI_Iallgather(values, (int)count, MPI_DOUBLE, all, (int)count, MPI_DOUBLE,
                         MPI_COMM_WORLD, s->requests),
          "MPI_Iallgather");
    finish(s, s->requests, 1);
    for (int64_t i = 0; i < count; i++) {
        values[i] = all[i];
        for (int from = 1; from < s->size; from++)
            values[i] += all[from * count + i];
    }
    free(all);
}

static void mpi_max(void *state, int64_t *values, int64_t count)
{
    struct mpi_state *s = state;
    BUG_UNLESS(count <= INT_MAX);
    check(MPI_Iallreduce(MPI_IN_PLACE, values, (int)count, MPI_INT64_T, MPI_MAX, MPI_COMM_WORLD,
                         s->requests),
          "MPI_Iallreduce");
    finish(s, s->requests, 1);
}

static void mpi_barrier(void *state)
{
    struct mpi_state *s = state;
    check(MPI_Ibarrier(MPI_COMM_WORLD, s->requests), "MPI_Ibarrier");
    finish(s, s->requests, 1);
}

static double mpi_waiting(void *state)
{
    (void)state;
    return 0.0; // a call that waits is seen as one
}

const struct ranks_engine *ranks_mpi_engine(struct ranks *ranks, void **state)
{
    static const struct ranks_engine engine = {
        .name = "mpi",
        .close = mpi_close,
        .abort = mpi_abort,
        .compute = mpi_compute,
        .reduce = mpi_reduce,
        .broadcast = mpi_broadcast,
        .group_begin = mpi_group,
        .group_end = mpi_group,
        .mark = mpi_place,
        .wait = mpi_place,
        .sum = mpi_sum,
        .max = mpi_max,
        .share = mpi_broadcast,
        .barrier = mpi_barrier,
        .waiting = mpi_waiting,
    };
    struct mpi_state *s = memory_alloc(1, sizeof(*s));
    *s = (struct mpi_state){.ranks = ranks, .rank = ranks_rank(ranks), .size = ranks_size(ranks)};
    s->requests = memory_alloc((size_t)s->size, sizeof(*s->requests));
    *state = s;
    return &engine;
}

#endif
