// Owns what holds the ranks together: who this process is, the control channel, the engine. The calls of
// ranks.h are here; how values travel is the engines' business, who lives is rank_control's.
#include "trainer/ranks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/memory.h"
#include "base/rng.h"
#include "configs/config.h"
#include "trainer/commands.h"
#include "trainer/end_guard.h"
#include "trainer/rank_control.h"
#include "trainer/rank_gpu.h"
#include "trainer/rank_place.h"
#include "trainer/ranks_internal.h"
#include "trainer/signals.h"
#include "version.h"

// By which the guard of the end is later than the timeout: after that long in MPI's or NCCL's end rank 0 still waits 10
// seconds for the others to leave.
static const double end_grace_seconds = 15.0;

struct ranks {
    struct rank_place place;
    bool cpu;
    double timeout;
    struct control *control;           // NULL: one rank
    const struct ranks_engine *engine; // NULL: one rank, or not connected yet
    void *state;
    bool failed; // ranks_fail was called
};

static int set_gpu(const struct rank_place *place, struct error *err)
{
    char gpu[256];
    if (rank_gpu_choose(getenv("CUDA_VISIBLE_DEVICES"), place->local, gpu, sizeof(gpu), err) != 0)
        return -1;
    if (setenv("CUDA_VISIBLE_DEVICES", gpu, 1) != 0)
        die("setenv failed");
    return 0;
}

// Which GPU, if any, and whether there is a way for the processes to exchange anything.
static int choose_engine(struct ranks *ranks, const struct config *config, struct error *err)
{
    const struct rank_place *place = &ranks->place;
    struct error no_gpu = {0};
    if (config->run.device != DEVICE_CPU && place->launcher != LAUNCHER_OWN &&
        place->launcher != LAUNCHER_NONE && set_gpu(place, err) != 0)
        return -1;
    if (place->size == 1)
        return 0;
    ranks->cpu = config->run.device == DEVICE_CPU ||
                 (config->run.device == DEVICE_AUTO && backend_cuda(&no_gpu) == NULL);
    if (ranks->cpu && !place->mpi)
        return error_set(err,
                         "%s started %d processes, but on CPUs only MPI connects them: start them "
                         "by mpirun, or one alone%s%s",
                         rank_launcher_name(place->launcher), place->size,
                         config->run.device == DEVICE_AUTO ? "; no GPU is used because " : "",
                         no_gpu.text);
    return 0;
}

static struct rank_identity make_identity(const struct config *config)
{
    struct rank_identity identity;
    memset(&identity, 0, sizeof(identity));
    snprintf(identity.program, sizeof(identity.program), "%s (%s, %s)", DTRAIN_VERSION,
             DTRAIN_COMMIT, DTRAIN_BUILD);
    char *keys = config_to_json(config);
    for (const char *at = keys; *at != '\0'; at++)
        identity.config = rng_mix(identity.config, (uint64_t)(unsigned char)*at);
    free(keys);
    identity.timeout = (double)config->parallel.timeout;
    return identity;
}

// Rank 0 listens before MPI tells where, so that nobody knocks in vain. port 0 in the address: it can not.
static int meet(struct ranks *ranks, const struct config *config, struct rank_peer *peers,
                struct error *err)
{
    const struct rank_place *place = &ranks->place;
    const struct rank_identity identity = make_identity(config);
    struct rank_address address;
    int listener = -1;
    bool mpi = place->mpi && (ranks->cpu || place->launcher == LAUNCHER_MPIRUN);
    int result = rank_join_address(place, config->parallel.port, &address, err);
    if (result == 0 && mpi && (ranks->cpu || ranks_mpi_built()))
        result = ranks_mpi_start(ranks, ranks->cpu, ranks->timeout, err);
    else
        mpi = false;
    if (result == 0 && !mpi && address.host_count == 0)
        result = error_set(err,
                           "%s does not say where rank 0 is: set MASTER_ADDR to its host, or build "
                           "with MPI",
                           rank_launcher_name(place->launcher));
    if (result != 0)
        return -1;
    if (mpi && config->parallel.port == 0)
        address.port = 0; // any
    if (place->rank == 0 && rank_join_listen(place, mpi, &address, &listener, err) != 0) {
        address.port = 0;
        result = -1;
    }
    if (mpi)
        ranks_mpi_tell(&address, sizeof(address), !ranks->cpu);
    if (result != 0)
        return -1;
    if (place->rank == 0)
        return rank_join_gather(place, &address, &identity, listener, peers, err);
    if (mpi && address.port == 0)
        return -1; // rank 0 says why
    return rank_join_connect(place, &address, &identity, &peers[0], err);
}

static int join(struct ranks *ranks, const struct config *config, struct error *err)
{
    const struct rank_place *place = &ranks->place;
    if (choose_engine(ranks, config, err) != 0)
        return -1;
    if (place->size == 1)
        return 0;
    struct rank_peer *peers = memory_alloc((size_t)place->size, sizeof(*peers));
    for (int rank = 0; rank < place->size; rank++)
        peers[rank].wire.fd = -1;
    if (meet(ranks, config, peers, err) != 0) {
        free(peers);
        return -1;
    }
    ranks->control = control_open(place->rank, place->size, peers, ranks->timeout);
    return 0;
}

int ranks_open(struct ranks **ranks, const struct config *config, struct error *err)
{
    struct ranks *r = memory_alloc(1, sizeof(*r));
    *ranks = NULL;
    err->text[0] = '\0';
    r->timeout = (double)config->parallel.timeout;
    if (rank_place_read(&r->place, rank_variable, NULL, err) != 0) {
        free(r);
        return -1;
    }
    log_configure((enum log_level)config->log.level, r->place.rank);
    if (r->place.notice[0] != '\0')
        log_warn("%s", r->place.notice);
    if (join(r, config, err) != 0) {
        free(r);
        return -1;
    }
    *ranks = r;
    return 0;
}

// Seconds for which the exchanges that are queued on the device have stood still.
static double engine_waiting(void *context)
{
    const struct ranks *ranks = context;
    return ranks->engine->waiting(ranks->state);
}

static void engine_abort(void *context)
{
    const struct ranks *ranks = context;
    ranks->engine->abort(ranks->state);
}

int ranks_connect(struct ranks *ranks, const struct backend *backend, struct error *err)
{
    const struct ranks_engine *engine;
    if (ranks->place.size == 1)
        return 0;
    control_enter(ranks->control);
    if (strcmp(backend->name, "cpu") == 0)
        engine = ranks_mpi_engine(ranks, &ranks->state);
    else
        engine = ranks_nccl_engine(ranks, &ranks->state, err);
    control_leave(ranks->control);
    if (engine == NULL)
        return -1;
    ranks->engine = engine;
    control_watch(ranks->control, engine_waiting, engine_abort, ranks);
    log_info("ranks: %d by %s, started by %s", ranks->place.size, engine->name,
             rank_launcher_name(ranks->place.launcher));
    return 0;
}

// Ranks that wait for one another here end by themselves after the timeout; this is for one that can not.
static void guard_end(const struct ranks *ranks)
{
    char who[32];
    snprintf(who, sizeof(who), "rank %d", ranks->place.rank);
    end_guard_begin(ranks->timeout + end_grace_seconds, who);
}

void ranks_close(struct ranks *ranks)
{
    if (ranks == NULL)
        return;
    if (ranks->engine != NULL && !ranks->failed) {
        ranks_barrier(ranks);
        guard_end(ranks);
        control_enter(ranks->control);
        control_watch(ranks->control, NULL, NULL, NULL);
        ranks->engine->close(ranks->state);
        control_leave(ranks->control);
    }
    if (ranks->control != NULL) {
        control_close(ranks->control);
        // Nothing is left to be stopped, and a launcher that sees another rank's status may send its signal.
        signals_ignore();
    }
    if (!ranks->failed) // else the control thread may still use it
        free(ranks);
}

void ranks_compute(struct ranks *ranks, struct stream *compute)
{
    if (ranks->engine != NULL)
        ranks->engine->compute(ranks->state, compute);
}

int ranks_rank(const struct ranks *ranks)
{
    return ranks->place.rank;
}

int ranks_size(const struct ranks *ranks)
{
    return ranks->place.size;
}

int ranks_local(const struct ranks *ranks)
{
    return ranks->place.local;
}

void ranks_check(struct ranks *ranks)
{
    control_check(ranks->control);
}

int ranks_tell(struct ranks *ranks, void *bytes, size_t size, struct error *err)
{
    return control_tell(ranks->control, bytes, size, err);
}

// NCCL 2.28 takes 676 MiB of an H200 for two ranks, as measured. A channel has receive buffers of 9.2 MiB, flags to send
// with and three tables, each in pages of 2 MiB; towards another machine there are buffers to send from as well. The
// rest, of the code of its kernels and their stacks for every thread that a GPU holds, is there once.
size_t ranks_gpu_bytes(int64_t ranks)
{
    enum { MIB = 1 << 20, ONE_MACHINE = 8, ONCE = 387 };
    size_t channel = (10 + 2 + 3 * 2) * MIB;
    if (ranks == 1)
        return 0;
    if (ranks > ONE_MACHINE)
        channel += 8 * MIB;
    return RANKS_CHANNELS * channel + ONCE * MIB + (size_t)(1 + ranks) * RANKS_STAGE_BYTES;
}

// Around every exchange: the control thread sees how long it takes and how many there were.
static bool begin(struct ranks *ranks)
{
    if (ranks->place.size == 1)
        return false;
    BUG_UNLESS(ranks->engine != NULL); // ranks_connect comes first
    control_enter(ranks->control);
    return true;
}

static void done(struct ranks *ranks)
{
    control_leave(ranks->control);
}

void ranks_reduce(struct ranks *ranks, float *values, int64_t count, int owner)
{
    if (!begin(ranks))
        return;
    ranks->engine->reduce(ranks->state, values, count, owner);
    done(ranks);
}

void ranks_broadcast(struct ranks *ranks, void *bytes, size_t size, int owner)
{
    if (!begin(ranks))
        return;
    ranks->engine->broadcast(ranks->state, bytes, size, owner);
    done(ranks);
}

void ranks_group_begin(struct ranks *ranks)
{
    if (ranks->engine != NULL)
        ranks->engine->group_begin(ranks->state);
}

void ranks_group_end(struct ranks *ranks)
{
    if (!begin(ranks))
        return;
    ranks->engine->group_end(ranks->state);
    done(ranks);
}

void ranks_mark(struct ranks *ranks, int slot)
{
    BUG_UNLESS(slot >= 0 && slot < RANKS_MARKS);
    if (ranks->engine != NULL)
        ranks->engine->mark(ranks->state, slot);
}

void ranks_wait(struct ranks *ranks, int slot)
{
    BUG_UNLESS(slot >= 0 && slot < RANKS_MARKS);
    if (ranks->engine != NULL)
        ranks->engine->wait(ranks->state, slot);
}

void ranks_sum(struct ranks *ranks, double *values, int64_t count)
{
    if (!begin(ranks))
        return;
    ranks->engine->sum(ranks->state, values, count);
    done(ranks);
}

void ranks_max(struct ranks *ranks, int64_t *values, int64_t count)
{
    if (!begin(ranks))
        return;
    ranks->engine->max(ranks->state, values, count);
    done(ranks);
}

void ranks_share(struct ranks *ranks, void *bytes, size_t size, int from)
{
    if (!begin(ranks))
        return;
    ranks->engine->share(ranks->state, bytes, size, from);
    done(ranks);
}

void ranks_barrier(struct ranks *ranks)
{
    if (!begin(ranks))
        return;
    ranks->engine->barrier(ranks->state);
    done(ranks);
}

int ranks_signal(const struct ranks *ranks)
{
    return ranks->control != NULL ? control_signal(ranks->control) : signals_received();
}

static void give_up(struct ranks *ranks, const char *text, int status)
{
    if (ranks->control != NULL) {
        ranks->failed = true;
        control_fail(ranks->control, text, status);
    } else if (text[0] != '\0') {
        log_error("%s", text);
    }
}

void ranks_fail(struct ranks *ranks, const char *text)
{
    give_up(ranks, text, EXIT_FAILED);
}

void ranks_refuse(struct ranks *ranks, const char *text)
{
    give_up(ranks, text, EXIT_REFUSED);
}
