// One rank: ranks_process SCENE TIMEOUT cpu|cuda|mixed [WORD]. Does what the scene says, with TIMEOUT as
// parallel.timeout; test_ranks starts several by mpirun, test_ranks_nccl by the supervisor. Exit status 0
// when what it expects came true.
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "base/memory.h"
#include "base/rng.h"
#include "base/timer.h"
#include "configs/config.h"
#include "trainer/ranks.h"
#include "trainer/signals.h"

struct rank {
    struct config config;
    struct ranks *ranks;
    int rank, size;
    const struct backend *backend;
    struct stream *stream;
};

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: rank %d: not true: %s\n", __FILE__, __LINE__, r->rank,         \
                    #condition);                                                                   \
            exit(3);                                                                               \
        }                                                                                          \
    } while (0)

static float value(int rank, int64_t i)
{
    return rng_normal(rng_key_make(7, 0, (uint64_t)rank, RNG_TEST), (uint64_t)i);
}

// Of two ranks there is one order to add in, and on CPUs there is one for any number.
static bool close_enough(const struct rank *r, float sum, float got)
{
    if (r->size <= 2 || strcmp(r->backend->name, "cpu") == 0)
        return memcmp(&sum, &got, sizeof(sum)) == 0;
    return fabsf(sum - got) <= 1e-6f * (float)r->size;
}

// Copies in, exchange, copies out: nothing but the ranks' own order lies between them.
static void check_reduce(struct rank *r, int64_t count, int owner)
{
    size_t bytes = (size_t)(count + 1) * sizeof(float);
    float *values = r->backend->host_alloc(bytes), *memory = r->backend->alloc(bytes);
    for (int64_t i = 0; i < count; i++)
        values[i] = value(r->rank, i);
    values[count] = 5.0f;
    r->backend->copy_in(r->stream, memory, values, bytes);
    ranks_reduce(r->ranks, memory, count, owner);
    ranks_mark(r->ranks, 0);
    ranks_wait(r->ranks, 0);
    r->backend->copy_out(r->stream, values, memory, bytes);
    r->backend->sync(r->stream);
    for (int64_t i = 0; r->rank == owner && i < count; i++) {
        float sum = value(0, i);
        for (int from = 1; from < r->size; from++)
            sum += value(from, i);
        EXPECT(close_enough(r, sum, values[i]));
    }
    EXPECT(values[count] == 5.0f);
    r->backend->free(memory);
    r->backend->host_free(values);
}

static void check_broadcast(struct rank *r, size_t size, int owner)
{
    unsigned char *bytes = r->backend->host_alloc(size + 1), *memory = r->backend->alloc(size + 1);
    for (size_t i = 0; i < size; i++)
        bytes[i] = r->rank == owner ? (unsigned char)(i * 7 + (size_t)owner) : 0;
    bytes[size] = 9;
    r->backend->copy_in(r->stream, memory, bytes, size + 1);
    ranks_broadcast(r->ranks, memory, size, owner);
    ranks_mark(r->ranks, 1);
    ranks_wait(r->ranks, 1);
    r->backend->copy_out(r->stream, bytes, memory, size + 1);
    r->backend->sync(r->stream);
    for (size_t i = 0; i < size; i++)
        EXPECT(bytes[i] == (unsigned char)(i * 7 + (size_t)owner));
    EXPECT(bytes[size] == 9);
    r->backend->free(memory);
    r->backend->host_free(bytes);
}

// Tensors of all owners in one launch, as a step gives them away; and again, for the same bits. The owners print a
// checksum, for two runs to be compared.
static void check_groups(struct rank *r)
{
    enum { TENSORS = 12 };
    int64_t count[TENSORS], total = 0;
    uint32_t crc[2] = {0, 0};
    for (int i = 0; i < TENSORS; i++)
        total += count[i] = i % 3 == 0 ? 7 : (1 << 18) + 77 * i;
    size_t bytes = (size_t)total * sizeof(float);
    float *values = r->backend->host_alloc(bytes), *memory = r->backend->alloc(bytes);
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = 0; i < total; i++)
            values[i] = value(r->rank, i);
        r->backend->copy_in(r->stream, memory, values, bytes);
        ranks_group_begin(r->ranks);
        int64_t at = 0;
        for (int i = 0; i < TENSORS; at += count[i++])
            ranks_reduce(r->ranks, memory + at, count[i], i % r->size);
        ranks_group_end(r->ranks);
        ranks_group_begin(r->ranks); // and back to everybody
        at = 0;
        for (int i = 0; i < TENSORS; at += count[i++])
            ranks_broadcast(r->ranks, memory + at, (size_t)count[i] * sizeof(float), i % r->size);
        ranks_group_end(r->ranks);
        ranks_mark(r->ranks, RANKS_MARKS - 1);
        ranks_wait(r->ranks, RANKS_MARKS - 1);
        r->backend->copy_out(r->stream, values, memory, bytes);
        r->backend->sync(r->stream);
        crc[pass] = crc32c(0, values, bytes);
    }
    EXPECT(crc[0] == crc[1]);
    int64_t own = crc[0], most = own;
    ranks_max(r->ranks, &most, 1);
    EXPECT(own == most);
    if (r->rank == 0)
        printf("sums %08x\n", crc[0]);
    r->backend->free(memory);
    r->backend->host_free(values);
}

static void check_host_values(struct rank *r)
{
    double sums[3] = {0.1 * r->rank, 1e300 * (r->rank == 0), 1.0};
    int64_t largest[2] = {r->rank, -r->rank - 5};
    char text[16] = "mine";
    double expected = 0.1 * 0;
    for (int from = 1; from < r->size; from++)
        expected += 0.1 * from;
    ranks_sum(r->ranks, sums, 3);
    EXPECT(sums[0] == expected && sums[1] == 1e300 && sums[2] == r->size);
    ranks_max(r->ranks, largest, 2);
    EXPECT(largest[0] == r->size - 1 && largest[1] == -5);
    if (r->rank == r->size - 1)
        strcpy(text, "last rank's");
    ranks_share(r->ranks, text, sizeof(text), r->size - 1);
    EXPECT(strcmp(text, "last rank's") == 0);
    ranks_barrier(r->ranks);
}

static void exchange(struct rank *r)
{
    static const int64_t counts[] = {0, 1, 3, 1000, (1 << 20) - 1, (1 << 20) + 1};
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++)
        for (int owner = 0; owner < r->size; owner++) {
            check_reduce(r, counts[i], owner);
            check_broadcast(r, (size_t)counts[i], owner);
        }
    check_host_values(r);
    check_groups(r);
}

// The last rank is the one that something happens to.
static bool victim(const struct rank *r)
{
    return r->rank == r->size - 1;
}

static void exchanges(struct rank *r, int count)
{
    for (int i = 0; i < count; i++) {
        double one = 1.0;
        ranks_sum(r->ranks, &one, 1);
        EXPECT(one == r->size);
    }
}

// Exchanges that end only with the process.
static void go_on(struct rank *r)
{
    for (;;)
        exchanges(r, 1);
}

static void killed(struct rank *r)
{
    exchanges(r, 5);
    if (victim(r))
        raise(SIGKILL);
    go_on(r);
}

static void stopped(struct rank *r)
{
    exchanges(r, 5);
    if (victim(r))
        raise(SIGSTOP);
    go_on(r);
}

// Nobody waits for it any more but the launcher.
static void stopped_at_end(struct rank *r)
{
    exchanges(r, 5);
    ranks_close(r->ranks);
    if (victim(r))
        raise(SIGSTOP);
    exit(0);
}

// The main thread waits for the device, not for the ranks: exchanges that are queued stand still.
static void queue_and_sync(struct rank *r, int signal_number)
{
    float *memory = r->backend->alloc(1 << 20);
    exchanges(r, 5);
    if (victim(r))
        raise(signal_number);
    for (;;) {
        ranks_reduce(r->ranks, memory, (1 << 20) / sizeof(*memory), 0);
        ranks_mark(r->ranks, 0);
        ranks_wait(r->ranks, 0);
        r->backend->sync(r->stream);
    }
}

static void killed_queued(struct rank *r)
{
    queue_and_sync(r, SIGKILL);
}

static void stopped_queued(struct rank *r)
{
    queue_and_sync(r, SIGSTOP);
}

static void busy(struct rank *r)
{
    exchanges(r, 5);
    while (victim(r))
        pause();
    go_on(r);
}

// Ends like a program whose environment failed.
static void ended(struct rank *r)
{
    exchanges(r, 5);
    if (victim(r))
        exit(1);
    go_on(r);
}

static void fails(struct rank *r)
{
    exchanges(r, 5);
    if (victim(r)) {
        ranks_fail(r->ranks, "the disk of this rank is full");
        exit(1);
    }
    go_on(r);
}

static void all_fail(struct rank *r)
{
    exchanges(r, 5);
    usleep(100000 * (unsigned)r->rank);
    ranks_fail(r->ranks, "the data have no supervised token");
    ranks_close(r->ranks);
    exit(2);
}

static void signalled(struct rank *r)
{
    signals_install();
    exchanges(r, 5);
    if (victim(r))
        raise(SIGUSR1);
    int64_t number = 0;
    while (number == 0) {
        number = ranks_signal(r->ranks);
        ranks_max(r->ranks, &number, 1);
    }
    EXPECT(number == SIGUSR1);
}

// Reductions and broadcasts of 1.7e9 parameters in 64 tensors, in groups of 8, as a large step has them.
static void speed(struct rank *r)
{
    enum { TENSORS = 64, GROUP = 8, PASSES = 5 };
    const size_t count = 27000000, bytes = count * sizeof(float);
    float *memory = r->backend->alloc(TENSORS * bytes);
    for (int kind = 0; kind < 2; kind++) {
        double start = 0.0;
        for (int pass = -1; pass < PASSES; pass++) {
            if (pass == 0)
                start = timer_now();
            for (int i = 0; i < TENSORS; i++) {
                if (i % GROUP == 0)
                    ranks_group_begin(r->ranks);
                if (kind == 0)
                    ranks_reduce(r->ranks, memory + (size_t)i * count, (int64_t)count, i % r->size);
                else
                    ranks_broadcast(r->ranks, memory + (size_t)i * count, bytes / 2, i % r->size);
                if (i % GROUP == GROUP - 1)
                    ranks_group_end(r->ranks);
            }
            ranks_mark(r->ranks, 0);
            ranks_wait(r->ranks, 0);
            r->backend->sync(r->stream);
        }
        if (r->rank == 0)
            printf("%s of 1.73e9 %s: %.2f ms\n", kind == 0 ? "reduction" : "broadcast",
                   kind == 0 ? "fp32" : "bf16", (timer_now() - start) / PASSES * 1e3);
    }
    double start = timer_now();
    exchanges(r, 100);
    if (r->rank == 0)
        printf("a sum of host values: %.1f us\n", (timer_now() - start) / 100 * 1e6);
    r->backend->free(memory);
}

// Without anything that connects their data, so on any machine.
static int meet(struct rank *r)
{
    struct error err = {0};
    if (ranks_open(&r->ranks, &r->config, &err) != 0) {
        fprintf(stderr, "%s\n", err.text);
        return 2;
    }
    printf("rank %d of %d\n", ranks_rank(r->ranks), ranks_size(r->ranks));
    ranks_close(r->ranks);
    return 0;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(struct rank *r);
    } scenes[] = {{"exchange", exchange},
                  {"killed", killed},
                  {"stopped", stopped},
                  {"stopped_at_end", stopped_at_end},
                  {"busy", busy},
                  {"ended", ended},
                  {"fails", fails},
                  {"all_fail", all_fail},
                  {"signalled", signalled},
                  {"killed_queued", killed_queued},
                  {"stopped_queued", stopped_queued},
                  {"speed", speed}};
    struct rank rank, *r = &rank;
    struct error err = {0};
    if (argc < 4)
        return 2;
    const char *number = getenv("OMPI_COMM_WORLD_RANK");
    bool odd = number != NULL && atoi(number) % 2 == 1;
    bool cuda = strcmp(argv[3], "cuda") == 0 || (strcmp(argv[3], "mixed") == 0 && odd);
    config_init(&r->config);
    r->config.run.device = cuda ? DEVICE_CUDA : DEVICE_CPU;
    r->config.parallel.timeout = atoi(argv[2]);
    if (strcmp(argv[1], "meet") == 0) {
        int status = meet(r);
        config_release(&r->config);
        return status;
    }
    if (ranks_open(&r->ranks, &r->config, &err) != 0 ||
        (r->backend = cuda ? backend_cuda(&err) : backend_cpu()) == NULL ||
        ranks_connect(r->ranks, r->backend, &err) != 0) {
        fprintf(stderr, "%s\n", err.text);
        return 2;
    }
    r->rank = ranks_rank(r->ranks);
    r->size = ranks_size(r->ranks);
    r->stream = r->backend->stream_open(&(struct stream_options){.threads = 1});
    ranks_compute(r->ranks, r->stream);
    for (size_t i = 0; i < sizeof(scenes) / sizeof(scenes[0]); i++)
        if (strcmp(scenes[i].name, argv[1]) == 0)
            scenes[i].run(r);
    ranks_close(r->ranks);
    r->backend->stream_close(r->stream);
    config_release(&r->config);
    return 0;
}
