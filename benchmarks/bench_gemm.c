// The products of a step at the sizes of configs/v4.yaml: TFLOP/s of the algorithm that the library
// proposes first and of the one that timing chooses. Needs a GPU with 20 GiB free.
#include <stdio.h>
#include <stdlib.h>

#include "base/timer.h"
#include "kernels/gemm_algorithms.h"
#include "kernels/kernels.h"

enum { N = 8192, H = 5120, V = 248320 };
enum { ROUNDS = 2, RUNS = 3 };
static const size_t buffer_bytes = (size_t)4400 * V * 4;

struct shape {
    const char *name;
    int64_t m, n, k, lda; // 0: packed
    bool transpose_a, transpose_b, add;
    enum dtype out;
    int64_t parts; // of k; 0: none
};

#define FORWARD(name, rows, columns, inner)                                                        \
    {                                                                                              \
        name, rows, columns, inner, 0, false, true, false, DTYPE_BF16, 0                           \
    }
#define DGRAD(name, rows, columns, inner)                                                          \
    {                                                                                              \
        name, rows, columns, inner, 0, false, false, false, DTYPE_BF16, 0                          \
    }
#define WGRAD(name, columns, inner, rows)                                                          \
    {                                                                                              \
        name, columns, inner, rows, 0, true, false, true, DTYPE_F32, 0                             \
    }
#define DS(name, rows, parts)                                                                      \
    {                                                                                              \
        name, rows, H, V, 2 * V, false, false, false, DTYPE_F32, parts                             \
    }

static const struct shape shapes[] = {
    FORWARD("fc", N, H, 5 * H),
    FORWARD("q", N, 4096, H),
    FORWARD("k, v", N, 1024, H),
    {"o, residual added", N, H, 4096, 0, false, true, true, DTYPE_BF16, 0},
    FORWARD("gate, up", N, 17408, H),
    {"down, residual added", N, H, 17408, 0, false, true, true, DTYPE_BF16, 0},
    DGRAD("inputs of gate, up", N, H, 17408),
    DGRAD("inputs of down", N, 17408, H),
    DGRAD("inputs of o", N, 4096, H),
    WGRAD("weights of fc", H, 5 * H, N),
    WGRAD("weights of gate, up", 17408, H, N),
    WGRAD("weights of down", H, 17408, N),
    WGRAD("weights of q, small group", 4096, H, 1280),
    {"logits of 1024", 1024, V, H, 0, false, true, false, DTYPE_F32, 0},
    {"logits of 2112", 2112, V, H, 0, false, true, false, DTYPE_F32, 0},
    {"logits of 4224", 4224, V, H, 0, false, true, false, DTYPE_F32, 0},
    DS("dS of 1024", 1024, 0),
    DS("dS of 1024 in 4 parts", 1024, 4),
    DS("dS of 1024 in 8 parts", 1024, 8),
    DS("dS of 2112", 2112, 0),
    DS("dS of 2112 in 4 parts", 2112, 4),
    DS("dS of 2112 in 8 parts", 2112, 8),
    DS("dS of 2560", 2560, 0),
    DS("dS of 2560 in 2 parts", 2560, 2),
    DS("dS of 2560 in 4 parts", 2560, 4),
    DS("dS of 2560 in 8 parts", 2560, 8),
    DS("dS of 4224", 4224, 0),
    DS("dS of 4224 in 4 parts", 4224, 4),
    DS("dS of 4224 in 8 parts", 4224, 8),
};
enum { SHAPES = sizeof(shapes) / sizeof(shapes[0]) };

struct bench {
    const struct backend *backend;
    struct stream *first, *timed;
    void *a, *b, *c;
};

static struct gemm gemm_of(const struct bench *bench, const struct shape *s)
{
    return (struct gemm){.m = s->m,
                         .n = s->n,
                         .k = s->k,
                         .lda = s->lda,
                         .transpose_a = s->transpose_a,
                         .transpose_b = s->transpose_b,
                         .alpha = 1.0f,
                         .beta = s->add ? 1.0f : 0.0f,
                         .a = bench->a,
                         .b = bench->b,
                         .c = bench->c,
                         .a_type = DTYPE_BF16,
                         .b_type = DTYPE_BF16,
                         .c_type = s->out,
                         .parts = s->parts,
                         .part_sums = (float *)bench->a + V / 2, // as in the rows of logits
                         .part_stride = s->parts > 1 ? V : 0};
}

static struct stream *open_stream(const struct backend *backend)
{
    return backend->stream_open(&(struct stream_options){
        .threads = 1, .workspace_bytes = backend->stream_workspace_bytes(1)});
}

// Random bf16: how much power a product takes, and so how fast it is, depends on its numbers.
static void fill(const struct bench *bench, void *to)
{
    enum { PIECE = 1 << 20 };
    unsigned short *piece = malloc(PIECE * sizeof(*piece));
    uint64_t x = 88172645463325252u;
    for (int i = 0; i < PIECE; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        // sign and fraction at random, a size between 2^-7 and 1
        piece[i] = (unsigned short)((x & 0x807f) | (uint64_t)(120 + (x >> 16) % 7) << 7);
    }
    for (size_t at = 0; at + PIECE * sizeof(*piece) <= buffer_bytes; at += PIECE * sizeof(*piece))
        bench->backend->copy_in(bench->first, (unsigned char *)to + at, piece,
                                PIECE * sizeof(*piece));
    bench->backend->sync(bench->first);
    free(piece);
}

static double seconds_of(const struct bench *bench, struct stream *stream, const struct gemm *g)
{
    bench->backend->kernels->gemm(stream, g); // not counted: the GPU may have been idle
    bench->backend->time_mark(stream, 0);
    for (int i = 0; i < RUNS; i++)
        bench->backend->kernels->gemm(stream, g);
    bench->backend->time_mark(stream, 1);
    bench->backend->sync(stream);
    return bench->backend->time_between(stream, 0, 1) / RUNS;
}

static void compare(const struct bench *bench, const struct shape *s)
{
    struct gemm g = gemm_of(bench, s);
    double first = 0.0, timed = 0.0, work = 2.0 * (double)s->m * (double)s->n * (double)s->k;
    for (int round = 0; round < ROUNDS; round++)
        for (int turn = 0; turn < 2; turn++) // who is first has the cooler GPU
            if (turn == round % 2)
                first += seconds_of(bench, bench->first, &g) / ROUNDS;
            else
                timed += seconds_of(bench, bench->timed, &g) / ROUNDS;
    printf("%s,%lld,%lld,%lld,%.0f,%.0f,%.2f\n", s->name, (long long)s->m, (long long)s->n,
           (long long)s->k, work / first * 1e-12, work / timed * 1e-12, first / timed);
}

static void choose(const struct bench *bench)
{
    struct gemm_algorithms *algorithms = calloc(1, sizeof(*algorithms));
    double begin = timer_now();
    bench->backend->gemm_record(bench->timed);
    for (int i = 0; i < SHAPES; i++) {
        struct gemm g = gemm_of(bench, &shapes[i]);
        bench->backend->kernels->gemm(bench->timed, &g);
    }
    bench->backend->sync(bench->timed);
    double recorded = timer_now();
    bench->backend->gemm_tune(bench->timed, 8.0, algorithms);
    printf("# %lld algorithms chosen in %.2f s after %.2f s\n", (long long)algorithms->count,
           timer_now() - recorded, recorded - begin);
    free(algorithms);
}

int main(void)
{
    struct error why = {{0}};
    struct bench bench = {.backend = backend_cuda(&why)};
    if (bench.backend == NULL) {
        fprintf(stderr, "%s\n", why.text);
        return 2;
    }
    bench.first = open_stream(bench.backend);
    bench.timed = open_stream(bench.backend);
    bench.a = bench.backend->alloc(buffer_bytes);
    bench.b = bench.backend->alloc(buffer_bytes);
    bench.c = bench.backend->alloc(buffer_bytes);
    fill(&bench, bench.a);
    fill(&bench, bench.b);
    choose(&bench);
    printf("product,m,n,k,first_tflops,timed_tflops,faster\n");
    for (int i = 0; i < SHAPES; i++)
        compare(&bench, &shapes[i]);
    bench.backend->free(bench.a);
    bench.backend->free(bench.b);
    bench.backend->free(bench.c);
    bench.backend->stream_close(bench.first);
    bench.backend->stream_close(bench.timed);
    return 0;
}
