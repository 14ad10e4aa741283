// Times the loss of one anchor group alone, gather to scatter, at the sizes of training, and prints one
// line per size, type of logits and rows of logits held at a time: milliseconds of a call, of its
// vocabulary kernel and of the rest (matrix products mostly), the kernel's bytes per second (each
// student row read and each gradient row written once, each teacher row read once in a chunk) and the
// memory taken besides inputs and outputs.
// Usage: bench_loss cpu|cuda|cuda-generic [beginning of lines]
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "base/rng.h"
#include "base/timer.h"
#include "kernels/gemm_algorithms.h"
#include "loss/loss.h"
#include "tests/support/backends.h"

enum {
    RUNS = 3,
    BLOCK = 16,
    RANDOM = 33554393 /* numbers that are drawn; the rest repeats them */
};
static const double tune_seconds = 1.5;

struct size {
    const char *name;
    int64_t hidden, vocab, tokens, anchors, chunk_rows; // H, V, T, A
    enum dtype logits;
    struct loss_config config;
};

#define KL                                                                                         \
    {                                                                                              \
        .kl = 1.0                                                                                  \
    }
#define MIXTURE                                                                                    \
    {                                                                                              \
        .ce_teacher = 0.1, .tv = 0.9                                                               \
    }
static const struct size sizes[] = {
    {"v4", 5120, 248320, 8192, 1024, 5000, DTYPE_F32, KL},
    {"v4", 5120, 248320, 8192, 1024, 4224, DTYPE_F32, KL},
    {"v4", 5120, 248320, 8192, 1024, 2112, DTYPE_F32, KL},
    {"v4", 5120, 248320, 8192, 1024, 1024, DTYPE_F32, KL},
    {"v4", 5120, 248320, 8192, 1024, 5000, DTYPE_BF16, KL},
    {"v4", 5120, 248320, 8192, 1024, 1024, DTYPE_BF16, KL},
    {"v4 mixture", 5120, 248320, 8192, 1024, 5000, DTYPE_F32, MIXTURE},
    {"qwen3-8b", 4096, 151936, 8192, 1024, 5000, DTYPE_F32, KL},
    {"small", 64, 5000, 512, 32, 200, DTYPE_F32, KL},
};

// Counts and times the calls of the vocabulary kernel. One benchmark runs at a time.
static struct {
    const struct backend *backend;
    softmax_loss_fn *function;
    int calls;
    double rows;
} watched;

static void watched_softmax_loss(struct stream *stream, const struct softmax_loss *op)
{
    bool room = 2 * watched.calls + 1 < STREAM_TIME_SLOTS;
    if (room)
        watched.backend->time_mark(stream, 2 * watched.calls);
    watched.function(stream, op);
    if (room)
        watched.backend->time_mark(stream, 2 * watched.calls++ + 1);
    watched.rows += (double)op->rows;
}

static double watched_seconds(struct stream *stream)
{
    double seconds = 0.0;
    for (int i = 0; i < watched.calls; i++)
        seconds += watched.backend->time_between(stream, 2 * i, 2 * i + 1);
    return seconds;
}

struct bench {
    struct backend backend; // with the watched kernel
    struct kernels kernels;
    struct stream *stream;
    bf16 *random; // [RANDOM] of variance 1, on the host
    struct loss_options options;
    struct loss loss;
    struct loss_group group;
    struct slot_results results;
    struct slot *slots;
    int64_t teachers; // distinct
    void *memory;
    size_t bytes;
};

// n numbers of the given deviation.
static void *take_random(struct bench *bench, int64_t n, float deviation)
{
    const struct backend *backend = &bench->backend;
    bf16 *values = memory_alloc(RANDOM, sizeof(*values));
    unsigned char *to = backend->alloc((size_t)n * sizeof(*values));
    for (int64_t i = 0; i < RANDOM; i++)
        values[i] = bf16_from_float(bf16_to_float(bench->random[i]) * deviation);
    for (int64_t at = 0; at < n; at += RANDOM) {
        int64_t count = n - at < RANDOM ? n - at : RANDOM;
        backend->copy_in(bench->stream, to + (size_t)at * sizeof(*values), values,
                         (size_t)count * sizeof(*values));
    }
    backend->sync(bench->stream);
    free(values);
    return to;
}

// Uniform anchors, all slots but the first scored; counts the positions that are somebody's teacher.
static void make_slots(struct bench *bench, const struct size *size)
{
    struct rng_key key = rng_key_make(1, 0, 0, RNG_TEST);
    bool *taken = memory_alloc((size_t)size->tokens, 1),
         *teacher = memory_alloc((size_t)size->tokens, 1);
    uint64_t draw = 0;
    int64_t count = 0;
    memset(taken, 0, (size_t)size->tokens);
    memset(teacher, 0, (size_t)size->tokens);
    bench->slots = memory_alloc((size_t)(size->anchors * BLOCK), sizeof(*bench->slots));
    bench->teachers = 0;
    for (int32_t block = 0; block < size->anchors; block++) {
        int64_t anchor;
        do
            anchor = (int64_t)(rng_u64(key, draw++) % (uint64_t)(size->tokens - BLOCK));
        while (taken[anchor]);
        taken[anchor] = true;
        for (int32_t k = 1; k < BLOCK; k++) {
            int32_t position = (int32_t)anchor + k - 1;
            bench->teachers += !teacher[position];
            teacher[position] = true;
            bench->slots[count++] = (struct slot){
                block, k, (int32_t)(rng_u64(key, draw++) % (uint64_t)size->vocab), position, 1.0f};
        }
    }
    bench->group.slots = bench->slots;
    bench->group.slot_count = count;
    free(taken);
    free(teacher);
}

static void bench_open(struct bench *bench, const struct size *size)
{
    int64_t rows = size->anchors * BLOCK, h = size->hidden;
    float scale = 3.0f / sqrtf((float)h); // logits of deviation 3
    bench->options = (struct loss_options){.config = &size->config,
                                           .hidden = h,
                                           .vocab = size->vocab,
                                           .block_size = BLOCK,
                                           .group_rows = rows,
                                           .chunk_rows = size->chunk_rows,
                                           .compute = DTYPE_BF16,
                                           .logits = size->logits,
                                           .has_teacher = true,
                                           .norm_eps = 1e-6f,
                                           .logit_scale = 1.0f,
                                           .head = take_random(bench, size->vocab * h, scale)};
    bench->group = (struct loss_group){.rows = rows,
                                       .hidden = take_random(bench, rows * h, 1.0f),
                                       .last = take_random(bench, size->tokens * h, 1.0f),
                                       .last_stride = h,
                                       .tokens = size->tokens,
                                       .dhidden = take_random(bench, rows * h, 1.0f)};
    make_slots(bench, size);
    slot_results_open(&bench->results, rows);
    struct arena arena;
    arena_init(&arena);
    loss_plan(&bench->loss, &bench->options, &arena);
    bench->bytes = arena.bytes;
    bench->memory = bench->backend.alloc(arena.bytes);
    arena_place(&arena, bench->memory, arena.bytes);
    loss_plan(&bench->loss, &bench->options, &arena);
    arena_release(&arena);
    loss_open(&bench->loss, &bench->backend);
}

static void bench_close(struct bench *bench)
{
    loss_close(&bench->loss);
    slot_results_close(&bench->results);
    free(bench->slots);
    bench->backend.free(bench->memory);
    bench->backend.free((void *)bench->options.head);
    bench->backend.free((void *)bench->group.hidden);
    bench->backend.free((void *)bench->group.last);
    bench->backend.free(bench->group.dhidden);
}

static double timed_run(struct bench *bench)
{
    watched.calls = 0;
    watched.rows = 0.0;
    double start = timer_now();
    loss_group_run(&bench->loss, &bench->backend, bench->stream, &bench->group, &bench->results);
    bench->backend.sync(bench->stream);
    return timer_now() - start;
}

// The first run, with what products are tuned for.
static void warm_up(struct bench *bench)
{
    const struct backend *backend = &bench->backend;
    if (backend->gemm_record == NULL) {
        timed_run(bench);
        return;
    }
    struct gemm_algorithms *algorithms = memory_alloc(1, sizeof(*algorithms));
    backend->gemm_record(bench->stream);
    timed_run(bench);
    backend->gemm_tune(bench->stream, tune_seconds, algorithms);
    timed_run(bench);
    free(algorithms);
}

static void name_size(const struct size *size, char *text, size_t text_size)
{
    snprintf(text, text_size, "%s %s %lld rows", size->name, dtype_name(size->logits),
             (long long)size->chunk_rows);
}

// The fastest run: others on the machine can only slow it down.
static void bench_size(struct bench *bench, const struct size *size)
{
    bench_open(bench, size);
    warm_up(bench);
    double seconds = 1e9, kernel = 0.0;
    for (int i = 0; i < RUNS; i++) {
        double took = timed_run(bench);
        if (took < seconds) {
            seconds = took;
            kernel = watched_seconds(bench->stream);
        }
    }
    double logit = (double)dtype_size(size->logits), vocab = (double)size->vocab;
    double bytes = (watched.rows * (logit + 2.0) + (double)bench->teachers * logit) * vocab;
    char line[64];
    name_size(size, line, sizeof(line));
    printf("%-26s %2d chunks: %8.2f ms, kernel %7.2f ms, rest %8.2f ms, %6.0f GB/s, %.2f GiB\n",
           line, watched.calls, seconds * 1e3, kernel * 1e3, (seconds - kernel) * 1e3,
           bytes / kernel * 1e-9, (double)bench->bytes / 0x1p30);
    fflush(stdout);
    bench_close(bench);
}

int main(int argc, char **argv)
{
    struct test_backend chosen;
    int status = test_backend_named(&chosen, argc > 1 ? argv[1] : "");
    if (status != 0) {
        fprintf(stderr, "usage: bench_loss cpu|cuda|cuda-generic [beginning of lines]\n");
        return status;
    }
    struct bench bench = {.backend = *chosen.backend, .kernels = *chosen.backend->kernels};
    watched.backend = chosen.backend;
    watched.function = bench.kernels.softmax_loss;
    bench.kernels.softmax_loss = watched_softmax_loss;
    bench.backend.kernels = &bench.kernels;
    bench.stream = test_backend_stream(&chosen, 2);
    bench.random = memory_alloc(RANDOM, sizeof(*bench.random));
    uint64_t state = 1;
    for (int64_t i = 0; i < RANDOM; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        bench.random[i] = bf16_from_float(((float)(state >> 40) * 0x1p-24f - 0.5f) * 3.4641f);
    }
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        char line[64];
        name_size(&sizes[i], line, sizeof(line));
        if (argc <= 2 || strncmp(line, argv[2], strlen(argv[2])) == 0)
            bench_size(&bench, &sizes[i]);
    }
    free(bench.random);
    bench.backend.stream_close(bench.stream);
    return EXIT_SUCCESS;
}
