// Times attention of bf16 block rows on CUDA at the sizes of training and prints one line per layout:
// milliseconds of the forward and the backward pass, and 10^12 useful operations per second: 4 D per
// pair of a query and a key that it sees forward, 10 D backward.
// Usage: bench_attention [part of names [generic]]
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "base/timer.h"
#include "kernels/kernels.h"

enum { RUNS = 5 };

struct layout {
    const char *name;
    // block_size 0: a row for each anchor, which sees itself and what is before it; window 0: none
    int64_t anchors, block_size, context, documents, window;
    int64_t heads, kv_heads, head_dim;
};

static const struct layout layouts[] = {
    {"1 document, 1024 anchors", 1024, 16, 8192, 1, 0, 32, 8, 128},
    {"4 documents, 1024 anchors", 1024, 16, 8192, 4, 0, 32, 8, 128},
    {"window 2048, 1024 anchors", 1024, 16, 8192, 1, 2048, 32, 8, 128},
    {"24 documents, 1024 anchors", 1024, 16, 8192, 24, 0, 32, 8, 128},
    {"1 document, 256 anchors", 256, 16, 8192, 1, 0, 32, 8, 128},
    {"1 document, heads of 64", 1024, 8, 8192, 1, 0, 9, 3, 64},
    {"1 document, heads of 96", 512, 16, 8192, 1, 0, 24, 8, 96},
    {"1 document, heads of 256", 512, 16, 8192, 1, 0, 16, 4, 256},
    {"no blocks, 8192 tokens", 8192, 0, 8192, 1, 0, 32, 8, 128},
    {"no blocks, 4 documents", 8192, 0, 8192, 4, 0, 32, 8, 128},
    {"no blocks, window 2048", 8192, 0, 8192, 1, 2048, 32, 8, 128},
    {"no blocks, 32768 tokens", 32768, 0, 32768, 1, 0, 32, 8, 128},
    {"no blocks, 2340 of 8192", 2340, 0, 8192, 1, 0, 32, 8, 128},
    {"no blocks, heads of 64", 8192, 0, 8192, 1, 0, 9, 3, 64},
};

struct bench {
    const struct backend *backend;
    struct stream *stream;
    void *taken[32];
    int count;
};

static void *take(struct bench *bench, size_t bytes)
{
    return bench->taken[bench->count++] = bench->backend->alloc(bytes);
}

// Uniform numbers of the variance of a standard normal one.
static void *take_random(struct bench *bench, int64_t n)
{
    bf16 *values = memory_alloc((size_t)n, sizeof(*values));
    uint64_t state = (uint64_t)n;
    for (int64_t i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        values[i] = bf16_from_float(((float)(state >> 40) * 0x1p-24f - 0.5f) * 3.4641f);
    }
    void *device = take(bench, (size_t)n * sizeof(bf16));
    bench->backend->copy_in(bench->stream, device, values, (size_t)n * sizeof(bf16));
    bench->backend->sync(bench->stream);
    free(values);
    return device;
}

static const int32_t *take_integers(struct bench *bench, const int32_t *values, int64_t n)
{
    void *device = take(bench, (size_t)n * sizeof(*values));
    bench->backend->copy_in(bench->stream, device, values, (size_t)n * sizeof(*values));
    bench->backend->sync(bench->stream);
    return device;
}

static int64_t rows_of(const struct layout *l)
{
    return l->anchors * (l->block_size > 0 ? l->block_size : 1);
}

// Anchors spread evenly over the row. Returns the pairs of a query and a key of one head.
static double bind_ranges(struct bench *bench, const struct layout *l, struct attention *op)
{
    int32_t *begin = memory_alloc((size_t)op->rows, sizeof(*begin));
    int32_t *end = memory_alloc((size_t)op->rows, sizeof(*end));
    int64_t length = l->context / l->documents, pairs = 0;
    for (int64_t row = 0; row < op->rows; row++) {
        int64_t size = l->block_size > 0 ? l->block_size : 1;
        int64_t anchor = (row / size * l->context + l->context / 2) / l->anchors;
        int64_t first = anchor / length * length;
        int64_t seen = anchor + row % size - l->window + 1;
        anchor += l->block_size == 0; // the row's own position
        if (l->window > 0 && seen > first)
            first = seen < anchor ? seen : anchor;
        begin[row] = (int32_t)first;
        end[row] = (int32_t)anchor;
        pairs += anchor - first + l->block_size;
    }
    op->begin = take_integers(bench, begin, op->rows);
    op->end = take_integers(bench, end, op->rows);
    free(begin);
    free(end);
    return (double)pairs;
}

static void bind_tensors(struct bench *bench, struct attention *op)
{
    int64_t queries = op->rows * op->heads, keys = op->rows * op->kv_heads;
    int64_t context = op->context * op->kv_heads, d = op->head_dim;
    op->q = take_random(bench, queries * d);
    op->dout = take_random(bench, queries * d);
    if (op->block_size > 0) {
        op->k_block = take_random(bench, keys * d);
        op->v_block = take_random(bench, keys * d);
        op->dk_block = take(bench, (size_t)(keys * d) * sizeof(bf16));
        op->dv_block = take(bench, (size_t)(keys * d) * sizeof(bf16));
    }
    op->k_context = take_random(bench, context * d);
    op->v_context = take_random(bench, context * d);
    op->out = take(bench, (size_t)(queries * d) * sizeof(bf16));
    op->dq = take(bench, (size_t)(queries * d) * sizeof(bf16));
    op->lse = take(bench, (size_t)queries * sizeof(float));
    op->delta = take(bench, (size_t)queries * sizeof(float));
    op->dk_context = take(bench, (size_t)(context * d) * sizeof(float));
    op->dv_context = take(bench, (size_t)(context * d) * sizeof(float));
    bench->backend->zero(bench->stream, op->dk_context, (size_t)(context * d) * sizeof(float));
    bench->backend->zero(bench->stream, op->dv_context, (size_t)(context * d) * sizeof(float));
}

static double seconds_of(const struct bench *bench, const struct attention *op,
                         attention_forward_fn *function)
{
    function(bench->stream, op);
    bench->backend->sync(bench->stream);
    double start = timer_now();
    for (int i = 0; i < RUNS; i++)
        function(bench->stream, op);
    bench->backend->sync(bench->stream);
    return (timer_now() - start) / RUNS;
}

static void bench_layout(struct bench *bench, const struct layout *l)
{
    struct attention op = {.rows = rows_of(l),
                           .block_size = l->block_size,
                           .context = l->context,
                           .heads = l->heads,
                           .kv_heads = l->kv_heads,
                           .head_dim = l->head_dim,
                           .scale = 1.0f / sqrtf((float)l->head_dim),
                           .type = DTYPE_BF16,
                           .v_block_stride = l->kv_heads * l->head_dim,
                           .v_context_stride = l->kv_heads * l->head_dim};
    double pairs = bind_ranges(bench, l, &op);
    bind_tensors(bench, &op);
    double flops = 4.0 * pairs * (double)(l->heads * l->head_dim);
    double forward = seconds_of(bench, &op, bench->backend->kernels->attention_forward);
    double backward = seconds_of(bench, &op, bench->backend->kernels->attention_backward);
    printf("%-28s forward %8.3f ms %6.1f TFLOP/s, backward %8.3f ms %6.1f TFLOP/s\n", l->name,
           forward * 1e3, flops / forward * 1e-12, backward * 1e3, 2.5 * flops / backward * 1e-12);
    while (bench->count > 0)
        bench->backend->free(bench->taken[--bench->count]);
}

int main(int argc, char **argv)
{
    struct error why = {{0}};
    struct bench bench = {.backend = backend_cuda(&why)};
    if (bench.backend == NULL) {
        fprintf(stderr, "bench_attention: %s\n", why.text);
        return 1;
    }
    struct stream_options options = {.threads = 1,
                                     .workspace_bytes = bench.backend->stream_workspace_bytes(1),
                                     .generic = argc > 2 && strcmp(argv[2], "generic") == 0};
    bench.stream = bench.backend->stream_open(&options);
    for (size_t i = 0; i < sizeof(layouts) / sizeof(layouts[0]); i++)
        if (argc < 2 || strstr(layouts[i].name, argv[1]) != NULL)
            bench_layout(&bench, &layouts[i]);
    bench.backend->stream_close(bench.stream);
    return 0;
}
