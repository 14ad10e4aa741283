// One rank that does what its first argument says, with the second as parallel.timeout; test_ranks starts several by mpirun. Exit status 0 when what
// it expects came true.
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/memory.h"
#include "base/rng.h"
#include "configs/config.h"
#include "trainer/ranks.h"
#include "trainer/signals.h"

struct rank {
    struct config config;
    struct ranks *ranks;
    int rank, size;
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

static void check_reduce(struct rank *r, int64_t count, int owner)
{
    float *values = memory_alloc((size_t)count + 1, sizeof(*values));
    for (int64_t i = 0; i < count; i++)
        values[i] = value(r->rank, i);
    values[count] = 5.0f;
    ranks_reduce(r->ranks, values, count, owner);
    ranks_mark(r->ranks, 0);
    ranks_wait(r->ranks, 0);
    for (int64_t i = 0; r->rank == owner && i < count; i++) {
        float sum = value(0, i);
        for (int from = 1; from < r->size; from++)
            sum += value(from, i);
        EXPECT(memcmp(&sum, &values[i], sizeof(sum)) == 0);
    }
    EXPECT(values[count] == 5.0f);
    free(values);
}

static void check_broadcast(struct rank *r, size_t size, int owner)
{
    unsigned char *bytes = memory_alloc(size + 1, 1);
    for (size_t i = 0; i < size; i++)
        bytes[i] = r->rank == owner ? (unsigned char)(i * 7 + (size_t)owner) : 0;
    bytes[size] = 9;
    ranks_broadcast(r->ranks, bytes, size, owner);
    for (size_t i = 0; i < size; i++)
        EXPECT(bytes[i] == (unsigned char)(i * 7 + (size_t)owner));
    EXPECT(bytes[size] == 9);
    free(bytes);
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

static void confirmed(struct rank *r)
{
    for (int64_t number = 1; number <= 3; number++) {
        usleep(50000 * (unsigned)r->rank);
        ranks_confirm(r->ranks, number);
        while (r->rank == 0 && ranks_confirmed(r->ranks) < number)
            usleep(1000);
        int64_t own[1] = {ranks_confirmed(r->ranks)};
        EXPECT(own[0] == number);
        ranks_barrier(r->ranks);
    }
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(struct rank *r);
    } scenes[] = {{"exchange", exchange}, {"killed", killed},       {"stopped", stopped},
                  {"busy", busy},         {"ended", ended},         {"fails", fails},
                  {"all_fail", all_fail}, {"signalled", signalled}, {"confirmed", confirmed}};
    struct rank rank, *r = &rank;
    struct error err = {0};
    if (argc < 3)
        return 2;
    config_init(&r->config);
    r->config.run.device = DEVICE_CPU;
    r->config.parallel.timeout = atoi(argv[2]);
    if (ranks_open(&r->ranks, &r->config, &err) != 0 ||
        ranks_connect(r->ranks, backend_cpu(), &err) != 0) {
        fprintf(stderr, "%s\n", err.text);
        return 2;
    }
    r->rank = ranks_rank(r->ranks);
    r->size = ranks_size(r->ranks);
    for (size_t i = 0; i < sizeof(scenes) / sizeof(scenes[0]); i++)
        if (strcmp(scenes[i].name, argv[1]) == 0)
            scenes[i].run(r);
    ranks_close(r->ranks);
    config_release(&r->config);
    return 0;
}
