// Owns what holds the ranks together: who this process is, the control channel, the engine. The calls of
// ranks.h are here; how values travel is the engines' business, who lives is rank_control's.
#include "trainer/ranks.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/memory.h"
#include "trainer/rank_gpu.h"
#include "trainer/rank_place.h"
#include "trainer/ranks_internal.h"
#include "trainer/signals.h"

struct ranks {
    struct rank_place place;
    bool cpu;
    const struct ranks_engine *engine; // NULL: one rank, or not connected yet
    void *state;
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

static int join(struct ranks *ranks, const struct config *config, struct error *err)
{
    struct rank_place *place = &ranks->place;
    struct error no_gpu = {0};
    if (config->run.device != DEVICE_CPU && place->launcher != LAUNCHER_OWN &&
        place->launcher != LAUNCHER_NONE && set_gpu(place, err) != 0)
        return -1;
    ranks->cpu = config->run.device == DEVICE_CPU ||
                 (config->run.device == DEVICE_AUTO && backend_cuda(&no_gpu) == NULL);
    if (place->size == 1)
        return 0;
    if (ranks->cpu && !place->mpi)
        return error_set(err,
                         "%s started %d processes, but on CPUs only MPI connects them: start them "
                         "by mpirun, or set run.device: cuda",
                         rank_launcher_name(place->launcher), place->size);
    if (ranks->cpu || place->launcher == LAUNCHER_MPIRUN)
        return ranks_mpi_start(ranks, err);
    return 0;
}

int ranks_open(struct ranks **ranks, const struct config *config, struct error *err)
{
    struct ranks *r = memory_alloc(1, sizeof(*r));
    *ranks = NULL;
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

int ranks_connect(struct ranks *ranks, const struct backend *backend, struct error *err)
{
    if (ranks->place.size == 1)
        return 0;
    if (strcmp(backend->name, "cpu") == 0)
        ranks->engine = ranks_mpi_engine(ranks, &ranks->state);
    else
        return error_set(err, "this build has no NCCL");
    log_info("ranks: %d by %s, started by %s", ranks->place.size, ranks->engine->name,
             rank_launcher_name(ranks->place.launcher));
    return 0;
}

void ranks_compute(struct ranks *ranks, struct stream *compute)
{
    if (ranks->engine != NULL)
        ranks->engine->compute(ranks->state, compute);
}

void ranks_close(struct ranks *ranks)
{
    if (ranks == NULL)
        return;
    if (ranks->engine != NULL) {
        ranks->engine->barrier(ranks->state);
        ranks->engine->close(ranks->state);
    }
    free(ranks);
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
    (void)ranks;
}

void ranks_reduce(struct ranks *ranks, float *values, int64_t count, int owner)
{
    if (ranks->engine != NULL)
        ranks->engine->reduce(ranks->state, values, count, owner);
}

void ranks_broadcast(struct ranks *ranks, void *bytes, size_t size, int owner)
{
    if (ranks->engine != NULL)
        ranks->engine->broadcast(ranks->state, bytes, size, owner);
}

void ranks_group_begin(struct ranks *ranks)
{
    if (ranks->engine != NULL)
        ranks->engine->group_begin(ranks->state);
}

void ranks_group_end(struct ranks *ranks)
{
    if (ranks->engine != NULL)
        ranks->engine->group_end(ranks->state);
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
    if (ranks->engine != NULL)
        ranks->engine->sum(ranks->state, values, count);
}

void ranks_max(struct ranks *ranks, int64_t *values, int64_t count)
{
    if (ranks->engine != NULL)
        ranks->engine->max(ranks->state, values, count);
}

void ranks_share(struct ranks *ranks, void *bytes, size_t size, int from)
{
    if (ranks->engine != NULL)
        ranks->engine->share(ranks->state, bytes, size, from);
}

void ranks_barrier(struct ranks *ranks)
{
    if (ranks->engine != NULL)
        ranks->engine->barrier(ranks->state);
}

int ranks_signal(const struct ranks *ranks)
{
    (void)ranks;
    return signals_received();
}

void ranks_fail(struct ranks *ranks, const char *text)
{
    log_error("%s", text);
    if (ranks->place.size > 1)
        _exit(1);
}

void ranks_confirm(struct ranks *ranks, int64_t number)
{
    (void)ranks;
    (void)number;
}

int64_t ranks_confirmed(const struct ranks *ranks)
{
    (void)ranks;
    return INT64_MAX;
}
