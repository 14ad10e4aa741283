// Owns the exchange between GPUs by NCCL: one communicator, one stream of high priority. The communicator does
// not block: what it has begun is asked for, so that the death of another rank ends the wait.
//
// Sums repeat bit for bit: ncclReduce has one algorithm, the ring, whose order follows from the machines; NVLS, the
// switches' own sums, is off, and no setting of NCCL is left to timing. Averages are not taken here, since
// NCCL would round the factor.
#include <cuda_runtime.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <atomic>

#include "base/log.h"
#include "base/memory.h"
#include "base/timer.h"
#include "kernels/cuda_internal.cuh"
#include "trainer/nccl_library.cuh"
#include "trainer/ranks_internal.h"

enum {
    STAGE_BYTES = RANKS_STAGE_BYTES,
    SPINS = 5000, // looks before the processor is left to others
    PAUSE_NANOSECONDS = 20000
};

struct nccl_state {
    struct ranks *ranks;
    int rank, size;
    struct nccl_library nccl;
    ncclComm_t comm;
    cudaStream_t stream;    // of communication
    struct stream *compute; // borrowed; NULL: host values only, so far
    cudaEvent_t computed;   // what compute holds when an exchange is queued
    cudaEvent_t marks[RANKS_MARKS];
    cudaEvent_t staged;          // host values have come
    char *device, *host;         // [1 + size, STAGE_BYTES] own values, then those of every rank
    int depth;                   // of groups
    std::atomic<int64_t> queued; // exchanges
    // the control thread's
    cudaEvent_t probe;
    bool probing;
    int64_t probed; // exchanges queued before the probe
    double since;
};

static const char *error_text(const struct nccl_state *s, ncclResult_t result)
{
    const char *last = s->nccl.GetLastError(s->comm);
    return last != NULL && last[0] != '\0' ? last : s->nccl.GetErrorString(result);
}

static void pause_a_little(int64_t look)
{
    const struct timespec pause = {0, PAUSE_NANOSECONDS};
    if (look < SPINS)
        sched_yield();
    else
        nanosleep(&pause, NULL);
}

// Waits until what the communicator was asked for is queued.
static ncclResult_t settle(struct nccl_state *s, ncclResult_t result)
{
    for (int64_t look = 0; result == ncclInProgress; look++) {
        ncclResult_t asked = s->nccl.CommGetAsyncError(s->comm, &result);
        if (asked != ncclSuccess)
            return asked;
        ranks_check(s->ranks);
        pause_a_little(look);
    }
    return result;
}

static void check(struct nccl_state *s, ncclResult_t result, const char *what)
{
    if (result != ncclSuccess && result != ncclInProgress)
        die("NCCL: %s: %s", what, error_text(s, result));
}

// Not ready is no error, but would be the thread's last one, which the next launch is checked for.
static bool is_done(cudaEvent_t event)
{
    cudaError_t status = cudaEventQuery(event);
    if (status == cudaErrorNotReady)
        (void)cudaGetLastError();
    else
        cuda_check(status);
    return status != cudaErrorNotReady;
}

// The host waits for an event.
static void await(struct nccl_state *s, cudaEvent_t event)
{
    for (int64_t look = 0; !is_done(event); look++) {
        ranks_check(s->ranks);
        pause_a_little(look);
    }
}

static void begin_group(struct nccl_state *s)
{
    if (s->depth++ == 0)
        check(s, s->nccl.GroupStart(), "ncclGroupStart");
}

// after: the stream whose work goes first, NULL: none.
static void end_group(struct nccl_state *s, struct stream *after)
{
    if (--s->depth > 0)
        return;
    if (after != NULL) {
        cuda_check(cudaEventRecord(s->computed, after->cuda));
        cuda_check(cudaStreamWaitEvent(s->stream, s->computed, 0));
    }
    check(s, settle(s, s->nccl.GroupEnd()), "an exchange");
    s->queued.fetch_add(1);
}

static void nccl_group_begin(void *state)
{
    begin_group((struct nccl_state *)state);
}

static void nccl_group_end(void *state)
{
    struct nccl_state *s = (struct nccl_state *)state;
    end_group(s, s->compute);
}

static void nccl_compute(void *state, struct stream *compute)
{
    ((struct nccl_state *)state)->compute = compute;
}

static void nccl_reduce(void *state, float *values, int64_t count, int owner)
{
    struct nccl_state *s = (struct nccl_state *)state;
    begin_group(s);
    check(s,
          s->nccl.Reduce(values, values, (size_t)count, ncclFloat, ncclSum, owner, s->comm,
                         s->stream),
          "ncclReduce");
    end_group(s, s->compute);
}

static void nccl_broadcast(void *state, void *bytes, size_t size, int owner)
{
    struct nccl_state *s = (struct nccl_state *)state;
    begin_group(s);
    check(s, s->nccl.Broadcast(bytes, bytes, size, ncclChar, owner, s->comm, s->stream),
          "ncclBroadcast");
    end_group(s, s->compute);
}

static void nccl_mark(void *state, int slot)
{
    struct nccl_state *s = (struct nccl_state *)state;
    BUG_UNLESS(s->depth == 0);
    cuda_check(cudaEventRecord(s->marks[slot], s->stream));
}

static void nccl_wait(void *state, int slot)
{
    struct nccl_state *s = (struct nccl_state *)state;
    BUG_UNLESS(s->compute != NULL);
    cuda_check(cudaStreamWaitEvent(s->compute->cuda, s->marks[slot], 0));
}

// Every rank's bytes, at most STAGE_BYTES, to every rank: [size, STAGE_BYTES] on the host.
static const char *gather(struct nccl_state *s, const void *values, size_t bytes)
{
    char *all = s->host + STAGE_BYTES, *all_device = s->device + STAGE_BYTES;
    memcpy(s->host, values, bytes);
    cuda_check(cudaMemcpyAsync(s->device, s->host, bytes, cudaMemcpyHostToDevice, s->stream));
    begin_group(s);
    check(s, s->nccl.AllGather(s->device, all_device, bytes, ncclChar, s->comm, s->stream),
          "ncclAllGather");
    end_group(s, NULL);
    cuda_check(cudaMemcpyAsync(all, all_device, bytes * (size_t)s->size, cudaMemcpyDeviceToHost,
                               s->stream));
    cuda_check(cudaEventRecord(s->staged, s->stream));
    await(s, s->staged);
    return all;
}

// How many of `left` values of eight bytes go at a time.
static int64_t part_of(int64_t left)
{
    const int64_t most = STAGE_BYTES / 8;
    return left < most ? left : most;
}

static void nccl_sum(void *state, double *values, int64_t count)
{
    struct nccl_state *s = (struct nccl_state *)state;
    for (int64_t at = 0, part; at < count; at += part) {
        part = part_of(count - at);
        const double *all = (const double *)gather(s, values + at, (size_t)part * sizeof(*values));
        for (int64_t i = 0; i < part; i++) {
            double sum = all[i];
            for (int from = 1; from < s->size; from++)
                sum += all[from * part + i];
            values[at + i] = sum;
        }
    }
}

static void nccl_max(void *state, int64_t *values, int64_t count)
{
    struct nccl_state *s = (struct nccl_state *)state;
    for (int64_t at = 0, part; at < count; at += part) {
        part = part_of(count - at);
        const int64_t *all =
            (const int64_t *)gather(s, values + at, (size_t)part * sizeof(*values));
        for (int64_t i = 0; i < part; i++)
            for (int from = 0; from < s->size; from++)
                if (all[from * part + i] > values[at + i])
                    values[at + i] = all[from * part + i];
    }
}

static void nccl_share(void *state, void *bytes, size_t size, int from)
{
    struct nccl_state *s = (struct nccl_state *)state;
    for (size_t at = 0, part; at < size; at += part) {
        part = size - at < STAGE_BYTES ? size - at : STAGE_BYTES;
        const char *all = gather(s, (char *)bytes + at, part);
        memcpy((char *)bytes + at, all + (size_t)from * part, part);
    }
}

static void nccl_barrier(void *state)
{
    int64_t nothing = 0;
    nccl_max(state, &nothing, 1);
}

// A probe follows what is queued; while it is not done, the stream stands still or waits for compute.
static double nccl_waiting(void *state)
{
    struct nccl_state *s = (struct nccl_state *)state;
    int64_t queued = s->queued.load();
    if (s->probing && cudaEventQuery(s->probe) == cudaErrorNotReady)
        return timer_now() - s->since;
    s->probing = queued != s->probed && cudaEventRecord(s->probe, s->stream) == cudaSuccess;
    s->probed = queued;
    s->since = timer_now();
    return 0.0;
}

static void release(struct nccl_state *s)
{
    for (int slot = 0; slot < RANKS_MARKS; slot++)
        cuda_check(cudaEventDestroy(s->marks[slot]));
    cuda_check(cudaEventDestroy(s->computed));
    cuda_check(cudaEventDestroy(s->staged));
    cuda_check(cudaEventDestroy(s->probe));
    cuda_check(cudaStreamDestroy(s->stream));
    cuda_check(cudaFree(s->device));
    cuda_check(cudaFreeHost(s->host));
    free(s);
}

static void nccl_close(void *state)
{
    struct nccl_state *s = (struct nccl_state *)state;
    cuda_check(cudaEventRecord(s->staged, s->stream));
    await(s, s->staged);
    check(s, settle(s, s->nccl.CommFinalize(s->comm)), "ncclCommFinalize");
    check(s, s->nccl.CommDestroy(s->comm), "ncclCommDestroy");
    release(s);
}

static void nccl_abort(void *state)
{
    struct nccl_state *s = (struct nccl_state *)state;
    s->nccl.CommAbort(s->comm);
}

static void open_streams(struct nccl_state *s)
{
    int least, greatest;
    size_t bytes = (size_t)(1 + s->size) * STAGE_BYTES;
    cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cuda_check(cudaStreamCreateWithPriority(&s->stream, cudaStreamNonBlocking, greatest));
    for (int slot = 0; slot < RANKS_MARKS; slot++)
        cuda_check(cudaEventCreateWithFlags(&s->marks[slot], cudaEventDisableTiming));
    cuda_check(cudaEventCreateWithFlags(&s->computed, cudaEventDisableTiming));
    cuda_check(cudaEventCreateWithFlags(&s->staged, cudaEventDisableTiming));
    cuda_check(cudaEventCreateWithFlags(&s->probe, cudaEventDisableTiming));
    cuda_check(cudaMalloc((void **)&s->device, bytes));
    cuda_check(cudaHostAlloc((void **)&s->host, bytes, cudaHostAllocDefault));
}

// Connections are made by the first exchange of each kind: here, so that later nothing is allocated.
static void connect_all(struct nccl_state *s)
{
    float *values = (float *)s->device;
    for (int owner = 0; owner < s->size; owner++) {
        nccl_reduce(s, values, STAGE_BYTES / sizeof(*values), owner);
        nccl_broadcast(s, values, STAGE_BYTES, owner);
    }
    nccl_barrier(s);
}

// NVLS sums in an order of its own, and is never wanted. The others are what it would choose for large
// tensors; whoever sets them has chosen.
static void set_environment(void)
{
    if (setenv("NCCL_NVLS_ENABLE", "0", 1) != 0 || setenv("NCCL_ALGO", "Ring", 0) != 0 ||
        setenv("NCCL_PROTO", "Simple", 0) != 0)
        die("setenv failed");
}

static int join(struct nccl_state *s, struct error *err)
{
    ncclUniqueId id;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    memset(&id, 0, sizeof(id));
    config.blocking = 0;
    config.maxCTAs = RANKS_CHANNELS;
    if (s->rank == 0) {
        ncclResult_t result = s->nccl.GetUniqueId(&id);
        if (result != ncclSuccess)
            return error_set(err, "NCCL does not start: %s", error_text(s, result));
    }
    if (ranks_tell(s->ranks, &id, sizeof(id), err) != 0)
        return -1;
    ncclResult_t result =
        settle(s, s->nccl.CommInitRankConfig(&s->comm, s->size, id, s->rank, &config));
    if (result != ncclSuccess)
        return error_set(err, "NCCL can not connect the GPUs: %s (NCCL_DEBUG=INFO tells more)",
                         error_text(s, result));
    return 0;
}

static size_t memory_used(void)
{
    size_t left = 0, total = 0;
    cuda_check(cudaMemGetInfo(&left, &total));
    return total - left;
}

// used: before NCCL was there. Other processes on the GPU may blur it.
static void describe(struct nccl_state *s, size_t used)
{
    int version = 0;
    double taken = (double)memory_used() - (double)used, planned = (double)ranks_gpu_bytes(s->size);
    check(s, s->nccl.GetVersion(&version), "ncclGetVersion");
    log_info("NCCL %d.%d.%d takes %.0f MiB of the GPU's memory, %.0f were planned", version / 10000,
             version % 10000 / 100, version % 100, taken / 0x1p20, planned / 0x1p20);
}

const struct ranks_engine *ranks_nccl_engine(struct ranks *ranks, void **state, struct error *err)
{
    static const struct ranks_engine engine = {
        "nccl",         nccl_close,       nccl_abort,     nccl_compute, nccl_reduce,
        nccl_broadcast, nccl_group_begin, nccl_group_end, nccl_mark,    nccl_wait,
        nccl_sum,       nccl_max,         nccl_share,     nccl_barrier, nccl_waiting,
    };
    struct nccl_state *s = (struct nccl_state *)memory_alloc(1, sizeof(*s));
    s->ranks = ranks;
    s->rank = ranks_rank(ranks);
    s->size = ranks_size(ranks);
    set_environment();
    size_t used = memory_used();
    if (nccl_library_open(&s->nccl, err) != 0 || join(s, err) != 0) {
        free(s);
        return NULL;
    }
    open_streams(s);
    connect_all(s);
    describe(s, used);
    *state = s;
    return &engine;
}
