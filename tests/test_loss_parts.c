// The gradient of hidden states where the vocabulary is so large that its product is cut into parts, whose
// sums lie among the logits: against float64. The backend is named on the command line.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/bf16.h"
#include "base/rng.h"
#include "loss/loss.h"
#include "tests/support/backends.h"
#include "tests/support/compare.h"

enum { B = 8, BLOCKS = 6, N = BLOCKS * B, CHUNK_ROWS = 17, THREADS = 2 };
// dz and dS are rounded to bf16 once each; a part of the vocabulary that is missing or overwritten is
// thousandths of the mean square.
static const struct compare_bounds bounds = {0.02, 0x1p-6, 1e-5};

static struct test_backend on;

struct bench {
    int64_t vocab, hidden;
    bf16 *head, *states, *dhidden; // [V, H], [N, H], [N, H] in host memory
    struct slot slots[N];
    int64_t slot_count;
};

static void bench_fill(bf16 *to, int64_t count, float scale, uint64_t what)
{
    struct rng_key key = rng_key_make(92, 0, what, RNG_TEST);
    for (int64_t i = 0; i < count; i++)
        to[i] = bf16_from_float(scale * rng_normal(key, (uint64_t)i));
}

// Logits of a standard deviation of about 2, so that many tokens have a share in a row's gradient.
static void bench_open(struct bench *b, int64_t vocab, int64_t hidden)
{
    *b = (struct bench){.vocab = vocab, .hidden = hidden};
    b->head = memory_alloc((size_t)(vocab * hidden), sizeof(bf16));
    b->states = memory_alloc((size_t)(N * hidden), sizeof(bf16));
    b->dhidden = memory_alloc((size_t)(N * hidden), sizeof(bf16));
    bench_fill(b->head, vocab * hidden, 1.0f, 1);
    bench_fill(b->states, N * hidden, 2.0f / sqrtf((float)hidden), 2);
    for (int32_t row = 0; row < N; row++)
        if (row % B != 0)
            b->slots[b->slot_count++] = (struct slot){.block = row / B,
                                                      .slot = row % B,
                                                      .label = (int32_t)(row * 104729LL % vocab),
                                                      .weight = 1.0f};
}

static void bench_close(struct bench *b)
{
    free(b->head);
    free(b->states);
    free(b->dhidden);
}

static void *sent(struct stream *stream, const void *host, size_t bytes)
{
    void *device = on.backend->alloc(bytes);
    on.backend->copy_in(stream, device, host, bytes);
    on.backend->sync(stream);
    return device;
}

static void bench_run(struct bench *b)
{
    struct stream *stream = test_backend_stream(&on, THREADS);
    size_t rows_bytes = (size_t)(N * b->hidden) * sizeof(bf16);
    void *head = sent(stream, b->head, (size_t)(b->vocab * b->hidden) * sizeof(bf16));
    void *states = sent(stream, b->states, rows_bytes), *dhidden = on.backend->alloc(rows_bytes);
    struct loss_config config = {.ce_data = 1.0, .slot_weight = SLOT_WEIGHT_UNIFORM};
    struct loss_options options = {.config = &config,
                                   .hidden = b->hidden,
                                   .vocab = b->vocab,
                                   .block_size = B,
                                   .group_rows = N,
                                   .chunk_rows = CHUNK_ROWS,
                                   .compute = DTYPE_BF16,
                                   .logits = DTYPE_F32,
                                   .logit_scale = 1.0f,
                                   .head = head};
    struct loss loss;
    struct arena arena;
    struct slot_results results;
    arena_init(&arena);
    loss_plan(&loss, &options, &arena);
    void *memory = on.backend->alloc(arena.bytes);
    arena_place(&arena, memory, arena.bytes);
    loss_plan(&loss, &options, &arena);
    loss_open(&loss, on.backend);
    slot_results_open(&results, N);
    struct loss_group group = {.rows = N,
                               .hidden = states,
                               .slots = b->slots,
                               .slot_count = b->slot_count,
                               .dhidden = dhidden};
    loss_group_run(&loss, on.backend, stream, &group, &results);
    on.backend->copy_out(stream, b->dhidden, dhidden, rows_bytes);
    on.backend->sync(stream);
    slot_results_close(&results);
    loss_close(&loss);
    arena_release(&arena);
    on.backend->free(memory);
    on.backend->free(dhidden);
    on.backend->free(states);
    on.backend->free(head);
    on.backend->stream_close(stream);
}

// gradient [H] = sum over v of (p_v - [v is the label]) W_v; p [V] is room for the probabilities.
static void exact_row(const struct bench *b, int64_t row, int64_t label, double *p,
                      double *gradient)
{
    double most = -INFINITY, sum = 0.0;
    for (int64_t v = 0; v < b->vocab; v++) {
        p[v] = 0.0;
        for (int64_t i = 0; i < b->hidden; i++)
            p[v] += (double)bf16_to_float(b->head[v * b->hidden + i]) *
                    (double)bf16_to_float(b->states[row * b->hidden + i]);
        most = fmax(most, p[v]);
    }
    for (int64_t v = 0; v < b->vocab; v++)
        sum += p[v] = exp(p[v] - most);
    for (int64_t v = 0; v < b->vocab; v++)
        for (int64_t i = 0; i < b->hidden; i++)
            gradient[i] += (p[v] / sum - (v == label ? 1.0 : 0.0)) *
                           (double)bf16_to_float(b->head[v * b->hidden + i]);
}

static void check(int64_t vocab, int64_t hidden)
{
    struct bench b;
    bench_open(&b, vocab, hidden);
    bench_run(&b);
    double *p = memory_alloc((size_t)vocab, sizeof(*p));
    double *expected = memory_alloc((size_t)(N * hidden), sizeof(*expected));
    double *got = memory_alloc((size_t)(N * hidden), sizeof(*got));
    for (int64_t i = 0; i < N * hidden; i++)
        got[i] = (double)bf16_to_float(b.dhidden[i]);
    for (int64_t i = 0; i < b.slot_count; i++) {
        int64_t row = b.slots[i].block * B + b.slots[i].slot;
        exact_row(&b, row, b.slots[i].label, p, expected + row * hidden);
    }
    assert_true(compare_tensors("dhidden", 92, got, expected, N, hidden, bounds));
    free(p);
    free(expected);
    free(got);
    bench_close(&b);
}

// 240,000: eight parts; 120,064: four; 120,008 is no multiple of 16: none.
static void parts_of_the_vocabulary_are_all_in_the_gradient(void **state)
{
    (void)state;
    check(240000, 16);
    check(120064, 24);
    check(120008, 16);
}

int main(int argc, char **argv)
{
    int status = test_backend_named(&on, argc == 2 ? argv[1] : "");
    if (status != 0)
        return status;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parts_of_the_vocabulary_are_all_in_the_gradient),
    };
    return cmocka_run_group_tests_name("loss_parts", tests, NULL, NULL);
}
