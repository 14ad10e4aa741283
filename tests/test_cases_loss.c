// Cases of the chunked loss (case C9): against float64 with sizes that nothing divides, whatever the
// chunks, where student and teacher agree, in bf16, with nothing to score, and what it plans and leaves
// alone.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/bf16.h"
#include "base/log.h"
#include "base/rng.h"
#include "loss/loss.h"
#include "tests/support/naive.h"

#define COUNT(list) (sizeof(list) / sizeof(*(list)))

enum { N = 1000, B = 8, T = 311, V = 1003, H = 64 };
static const double eps = 1e-6;

// One group of N block rows and everything it needs, in CPU memory.
struct bench {
    struct loss_config config;
    struct loss_options options;
    struct loss loss;
    struct stream *stream;
    void *memory;
    float head[V * H], norm[H], hidden[N * H]; // bf16 values when computing in bf16
    bf16 features[T * H];                      // the last hidden states only
    struct slot slots[N];
    int64_t slot_count;
    struct slot_results results;
    float dhidden[N * H];
};

static struct rng_key key_of(uint64_t what)
{
    return rng_key_make(91, 0, what, RNG_TEST);
}

// Random states. About every position is the teacher of several slots, and some rows have no slot.
static struct bench *bench_open(void)
{
    struct bench *b = memory_alloc(1, sizeof(*b));
    for (int64_t i = 0; i < V * H; i++)
        b->head[i] = 0.25f * rng_normal(key_of(1), (uint64_t)i);
    for (int64_t i = 0; i < H; i++)
        b->norm[i] = 1.0f + 0.2f * rng_normal(key_of(2), (uint64_t)i);
    for (int64_t i = 0; i < N * H; i++)
        b->hidden[i] = rng_normal(key_of(3), (uint64_t)i);
    for (int64_t i = 0; i < T * H; i++)
        b->features[i] = bf16_from_float(rng_normal(key_of(4), (uint64_t)i));
    for (int32_t r = 0; r < N; r++) {
        uint64_t draw = rng_u64(key_of(5), (uint64_t)r);
        if (r % B != 0 && draw % 11 != 0)
            b->slots[b->slot_count++] = (struct slot){.block = r / B,
                                                      .slot = r % B,
                                                      .label = (int32_t)(draw / 11 % V),
                                                      .teacher_row = (int32_t)(draw / 20011 % T),
                                                      .weight = 0.25f + (float)(r % B)};
    }
    b->config = (struct loss_config){.lk_eta = 3.0, .slot_weight = SLOT_WEIGHT_UNIFORM};
    b->options = (struct loss_options){.hidden = H,
                                       .vocab = V,
                                       .block_size = B,
                                       .group_rows = N,
                                       .chunk_rows = 256,
                                       .compute = DTYPE_F32,
                                       .logits = DTYPE_F32,
                                       .has_teacher = true,
                                       .norm_eps = (float)eps,
                                       .logit_scale = 1.0f};
    b->stream = backend_cpu()->stream_open(&(struct stream_options){
        .threads = 1, .workspace_bytes = backend_cpu()->stream_workspace_bytes(1)});
    return b;
}

static void set_term(struct loss_config *config, int term, double weight)
{
    double *const terms[LOSS_TERM_COUNT] = {&config->kl,         &config->reverse_kl, &config->js,
                                            &config->ce_teacher, &config->ce_data,    &config->tv,
                                            &config->nla,        &config->lk};
    *terms[term] = weight;
}

static void clear_terms(struct bench *b)
{
    for (int term = 0; term < LOSS_TERM_COUNT; term++)
        set_term(&b->config, term, 0.0);
}

static void bench_close_loss(struct bench *b)
{
    loss_close(&b->loss);
    slot_results_close(&b->results);
    free(b->memory);
    b->memory = NULL;
}

static void bench_close(struct bench *b)
{
    bench_close_loss(b);
    backend_cpu()->stream_close(b->stream);
    free(b);
}

// bf16 copies of the values, which bf16 holds already.
static void *in_compute_type(const float *values, int64_t count, enum dtype type)
{
    void *copy = memory_alloc((size_t)count, dtype_size(type));
    for (int64_t i = 0; i < count; i++)
        if (type == DTYPE_BF16)
            ((bf16 *)copy)[i] = bf16_from_float(values[i]);
        else
            ((float *)copy)[i] = values[i];
    return copy;
}

// Plans, runs and leaves results and gradient in the bench. What is frozen must stay as it is.
static void bench_run(struct bench *b)
{
    enum dtype type = b->options.compute;
    void *hidden = in_compute_type(b->hidden, N * H, type);
    void *head = in_compute_type(b->head, V * H, type);
    void *head_before = in_compute_type(b->head, V * H, type);
    void *norm = in_compute_type(b->norm, H, type);
    void *norm_before = in_compute_type(b->norm, H, type);
    void *dhidden = memory_alloc((size_t)N * H, dtype_size(type));
    bf16 *features = memory_alloc((size_t)T * H, sizeof(*features));
    memcpy(features, b->features, sizeof(b->features));
    memset(dhidden, 0xff, (size_t)N * H * dtype_size(type));

    struct arena arena;
    bench_close_loss(b);
    b->options.config = &b->config;
    b->options.head = head;
    b->options.norm = norm;
    arena_init(&arena);
    loss_plan(&b->loss, &b->options, &arena);
    b->memory = memory_alloc(arena.bytes, 1);
    memset(b->memory, 0xff, arena.bytes);
    arena_place(&arena, b->memory, arena.bytes);
    loss_plan(&b->loss, &b->options, &arena);
    loss_open(&b->loss, backend_cpu());
    slot_results_open(&b->results, N);
    struct loss_group group = {.rows = N,
                               .hidden = hidden,
                               .last = features,
                               .last_stride = H,
                               .tokens = T,
                               .slots = b->slots,
                               .slot_count = b->slot_count,
                               .dhidden = dhidden};
    loss_group_run(&b->loss, backend_cpu(), b->stream, &group, &b->results);
    arena_release(&arena);

    for (int64_t i = 0; i < N * H; i++)
        b->dhidden[i] =
            type == DTYPE_BF16 ? bf16_to_float(((bf16 *)dhidden)[i]) : ((float *)dhidden)[i];
    assert_memory_equal(head, head_before, (size_t)V * H * dtype_size(type));
    assert_memory_equal(norm, norm_before, (size_t)H * dtype_size(type));
    assert_memory_equal(features, b->features, sizeof(b->features));
    free(features);
    free(dhidden);
    free(norm_before);
    free(norm);
    free(head_before);
    free(head);
    free(hidden);
}

// ---- the same in float64

struct exact {
    double *student, *teacher; // logits [N, V] (rows with a slot) and [T, V]
    double *dhidden;           // [N, H]
    double loss[N];            // of slots
};

static void exact_logits(const struct bench *b, const double *state, double *logits)
{
    for (int64_t v = 0; v < V; v++) {
        double sum = 0.0;
        for (int64_t i = 0; i < H; i++)
            sum += (double)b->head[v * H + i] * state[i];
        logits[v] = sum * (double)b->options.logit_scale;
    }
}

static void exact_open(struct exact *e, const struct bench *b)
{
    double state[H], weight[H];
    e->student = memory_alloc((size_t)N * V, sizeof(double));
    e->teacher = memory_alloc((size_t)T * V, sizeof(double));
    e->dhidden = memory_alloc((size_t)N * H, sizeof(double));
    for (int64_t i = 0; i < H; i++)
        weight[i] = (double)b->norm[i];
    for (int64_t t = 0; t < T; t++) {
        for (int64_t i = 0; i < H; i++)
            state[i] = (double)bf16_to_float(b->features[t * H + i]);
        if (b->options.teacher_norm)
            naive_rms_norm(1, H, (double)b->options.norm_eps, (double)b->options.norm_weight_offset,
                           state, weight, state, NULL);
        exact_logits(b, state, e->teacher + t * V);
    }
    for (int64_t r = 0; r < N; r++) {
        for (int64_t i = 0; i < H; i++)
            state[i] = (double)b->hidden[r * H + i];
        exact_logits(b, state, e->student + r * V);
    }
}

static void exact_close(struct exact *e)
{
    free(e->student);
    free(e->teacher);
    free(e->dhidden);
}

static void exact_run(struct exact *e, const struct bench *b)
{
    struct naive_loss in = {.vocab = V, .eta = b->config.lk_eta, .lambda = -1.0};
    struct naive_loss_result result;
    double gradient[V];
    const double weight[LOSS_TERM_COUNT] = {
        b->config.kl,      b->config.reverse_kl, b->config.js,  b->config.ce_teacher,
        b->config.ce_data, b->config.tv,         b->config.nla, b->config.lk};
    memcpy(in.weight, weight, sizeof(weight));
    memset(e->dhidden, 0, (size_t)N * H * sizeof(double));
    for (int64_t s = 0; s < b->slot_count; s++) {
        const struct slot *slot = &b->slots[s];
        int64_t r = (int64_t)slot->block * B + slot->slot;
        in.student = e->student + r * V;
        in.teacher = e->teacher + (int64_t)slot->teacher_row * V;
        in.label = slot->label;
        naive_softmax_loss(&in, &result, gradient);
        e->loss[s] = result.loss;
        double scale = (double)slot->weight * (double)b->options.logit_scale;
        for (int64_t v = 0; v < V; v++)
            for (int64_t i = 0; i < H; i++)
                e->dhidden[r * H + i] += scale * gradient[v] * (double)b->head[v * H + i];
    }
}

static double gradient_error(const struct bench *b, const struct exact *e)
{
    double difference = 0.0, norm = 0.0;
    for (int64_t i = 0; i < N * H; i++) {
        double d = (double)b->dhidden[i] - e->dhidden[i];
        difference += d * d;
        norm += e->dhidden[i] * e->dhidden[i];
    }
    return sqrt(difference / norm);
}

static double loss_error(const struct bench *b, const struct exact *e)
{
    double worst = 0.0;
    for (int64_t s = 0; s < b->slot_count; s++) {
        double error = fabs((double)b->results.loss[s] - e->loss[s]) / fabs(e->loss[s]);
        if (!(error <= worst))
            worst = error;
    }
    return worst;
}

// ---- against float64

static const double mixtures[][LOSS_TERM_COUNT] = {
    {[LOSS_CE_TEACHER] = 0.1, [LOSS_TV] = 0.9},
    {1.0, 0.5, 2.0, 0.25, 0.125, 0.75, 0.3, 0.6},
};

static void check_exact(struct bench *b, struct exact *e, const char *what, int index)
{
    bench_run(b);
    exact_run(e, b);
    double loss = loss_error(b, e), gradient = gradient_error(b, e);
    if (!(loss <= 1e-5 && gradient <= 1e-5))
        fail_msg("%s %d: loss off by %g, gradient by %g", what, index, loss, gradient);
}

static void every_term_is_exact_to_fp32(void **state)
{
    (void)state;
    struct bench *b = bench_open();
    struct exact e;
    b->options.teacher_norm = true;
    b->options.norm_weight_offset = 0.125f;
    b->options.logit_scale = 0.75f;
    exact_open(&e, b);
    for (int term = 0; term < LOSS_TERM_COUNT; term++) {
        clear_terms(b);
        set_term(&b->config, term, 1.0);
        check_exact(b, &e, "term", term);
    }
    for (size_t m = 0; m < COUNT(mixtures); m++) {
        for (int term = 0; term < LOSS_TERM_COUNT; term++)
            set_term(&b->config, term, mixtures[m][term]);
        check_exact(b, &e, "mixture", (int)m);
    }
    exact_close(&e);
    bench_close(b);
}

// ---- chunks

static void chunks_agree(void **state)
{
    (void)state;
    static const int64_t chunks[] = {128, 256, 1000, 2, 17};
    struct bench *b = bench_open();
    float *dhidden = memory_alloc((size_t)N * H, sizeof(float));
    float loss[N];
    int32_t argmax[N];
    set_term(&b->config, LOSS_KL, 1.0);
    set_term(&b->config, LOSS_NLA, 0.5);
    for (size_t c = 0; c < COUNT(chunks); c++) {
        b->options.chunk_rows = chunks[c];
        bench_run(b);
        if (c == 0) {
            memcpy(dhidden, b->dhidden, sizeof(b->dhidden));
            memcpy(loss, b->results.loss, sizeof(loss));
            memcpy(argmax, b->results.teacher_argmax, sizeof(argmax));
        }
        double difference = 0.0, norm = 0.0;
        for (int64_t i = 0; i < N * H; i++) {
            double d = (double)b->dhidden[i] - (double)dhidden[i];
            difference += d * d;
            norm += (double)dhidden[i] * (double)dhidden[i];
        }
        assert_true(norm > 1.0 && sqrt(difference / norm) <= 1e-6);
        for (int64_t s = 0; s < b->slot_count; s++) {
            assert_true(fabsf(b->results.loss[s] - loss[s]) <= 1e-5f * loss[s]);
            assert_int_equal(b->results.teacher_argmax[s], argmax[s]);
        }
    }
    free(dhidden);
    bench_close(b);
}

// Rows without a slot may hold anything, and get zeros. So does a group without any slot.
static void rows_without_a_slot_are_exact_zeros(void **state)
{
    (void)state;
    struct bench *b = bench_open();
    bool scored[N] = {false};
    set_term(&b->config, LOSS_KL, 1.0);
    bench_run(b);
    float *dhidden = memory_alloc((size_t)N * H, sizeof(float));
    memcpy(dhidden, b->dhidden, sizeof(b->dhidden));
    for (int64_t s = 0; s < b->slot_count; s++)
        scored[b->slots[s].block * B + b->slots[s].slot] = true;
    for (int64_t i = 0; i < N * H; i++)
        if (!scored[i / H])
            b->hidden[i] = i % 2 == 0 ? (float)NAN : (float)INFINITY;
    bench_run(b);
    for (int64_t i = 0; i < N * H; i++) {
        assert_true(b->dhidden[i] == dhidden[i]);
        assert_true(scored[i / H] || b->dhidden[i] == 0.0f);
    }
    b->slot_count = 0;
    bench_run(b);
    for (int64_t i = 0; i < N * H; i++)
        assert_true(b->dhidden[i] == 0.0f);
    free(dhidden);
    bench_close(b);
}

// ---- logits

// Multiples of 1/8 in the states and of 1/4 in the head, whose first column is 1 and meets 0: every logit
// is exact in fp32, in whatever order it is summed, with 64 more too.
static void make_exact(struct bench *b)
{
    for (int64_t i = 0; i < V * H; i++)
        b->head[i] = i % H == 0 ? 1.0f : roundf(4.0f * b->head[i]) / 4.0f;
    for (int64_t i = 0; i < N * H; i++)
        b->hidden[i] = i % H == 0 ? 0.0f : roundf(8.0f * b->hidden[i]) / 8.0f;
    for (int64_t i = 0; i < T * H; i++) {
        float value = roundf(8.0f * bf16_to_float(b->features[i])) / 8.0f;
        b->features[i] = bf16_from_float(i % H == 0 ? 0.0f : value);
    }
}

static void a_constant_on_all_logits_changes_nothing(void **state)
{
    (void)state;
    struct bench *b = bench_open();
    make_exact(b);
    float *dhidden = memory_alloc((size_t)N * H, sizeof(float));
    float loss[N], overlap[N];
    for (int term = 0; term < LOSS_TERM_COUNT; term++)
        set_term(&b->config, term, 1.0);
    bench_run(b);
    memcpy(dhidden, b->dhidden, sizeof(b->dhidden));
    memcpy(loss, b->results.loss, sizeof(loss));
    memcpy(overlap, b->results.overlap, sizeof(overlap));
    for (int64_t r = 0; r < N; r++)
        b->hidden[r * H] = 64.0f;
    for (int64_t t = 0; t < T; t++)
        b->features[t * H] = bf16_from_float(64.0f);
    bench_run(b);
    assert_memory_equal(b->dhidden, dhidden, sizeof(b->dhidden));
    assert_memory_equal(b->results.loss, loss, (size_t)b->slot_count * sizeof(float));
    assert_memory_equal(b->results.overlap, overlap, (size_t)b->slot_count * sizeof(float));
    free(dhidden);
    bench_close(b);
}

// The student's states: the teacher's of each slot, plus noise.
static void follow_teacher(struct bench *b, float noise)
{
    for (int64_t s = 0; s < b->slot_count; s++) {
        const struct slot *slot = &b->slots[s];
        int64_t r = (int64_t)slot->block * B + slot->slot;
        for (int64_t i = 0; i < H; i++)
            b->hidden[r * H + i] = bf16_to_float(b->features[slot->teacher_row * H + i]) +
                                   noise * rng_normal(key_of(6), (uint64_t)(r * H + i));
    }
}

// Student and teacher go through different matrix products. tv's gradient jumps where q = p, so it is 0
// only where both logits are the same to the last bit: here they are exact.
static void an_equal_student_has_no_loss(void **state)
{
    (void)state;
    static const int terms[] = {LOSS_KL, LOSS_REVERSE_KL, LOSS_JS, LOSS_TV};
    struct bench *b = bench_open();
    make_exact(b);
    follow_teacher(b, 0.0f);
    for (int64_t s = 0; s < b->slot_count; s++)
        b->slots[s].weight = 1.0f;
    for (size_t i = 0; i < COUNT(terms); i++) {
        clear_terms(b);
        set_term(&b->config, terms[i], 1.0);
        bench_run(b);
        for (int64_t s = 0; s < b->slot_count; s++)
            assert_true(fabsf(b->results.loss[s]) < 1e-6f);
        for (int64_t j = 0; j < N * H; j++)
            assert_true(fabsf(b->dhidden[j]) < 1e-6f);
    }
    bench_close(b);
}

// Where p - q is a small difference of nearly equal numbers, bf16 inputs must not spoil it.
static void bf16_keeps_small_differences(void **state)
{
    (void)state;
    static const int terms[] = {LOSS_KL, LOSS_REVERSE_KL, LOSS_JS, LOSS_TV};
    struct bench *b = bench_open();
    struct exact e;
    follow_teacher(b, 0.025f);
    for (int64_t i = 0; i < N * H; i++)
        b->hidden[i] = bf16_to_float(bf16_from_float(b->hidden[i]));
    for (int64_t i = 0; i < V * H; i++)
        b->head[i] = bf16_to_float(bf16_from_float(b->head[i]));
    b->options.compute = DTYPE_BF16;
    exact_open(&e, b);
    for (size_t i = 0; i < COUNT(terms); i++) {
        clear_terms(b);
        set_term(&b->config, terms[i], 1.0);
        bench_run(b);
        double overlap = 0.0;
        for (int64_t s = 0; s < b->slot_count; s++)
            overlap += (double)b->results.overlap[s] / (double)b->slot_count;
        assert_true(overlap > 0.975 && overlap < 0.985);
        exact_run(&e, b);
        double error = gradient_error(b, &e);
        if (!(error <= 0.005))
            fail_msg("term %d: gradient off by %g", terms[i], error);
    }
    exact_close(&e);
    bench_close(b);
}

// ---- memory

// Bytes of the plan, which takes nothing.
static size_t planned(int64_t group_rows, int64_t chunk_rows, int64_t vocab, int64_t hidden)
{
    struct loss_config config = {.kl = 1.0};
    struct loss_options options = {.config = &config,
                                   .hidden = hidden,
                                   .vocab = vocab,
                                   .block_size = 16,
                                   .group_rows = group_rows,
                                   .chunk_rows = chunk_rows,
                                   .compute = DTYPE_BF16,
                                   .logits = DTYPE_F32,
                                   .has_teacher = true,
                                   .logit_scale = 1.0f};
    struct loss loss;
    struct arena arena;
    arena_init(&arena);
    loss_plan(&loss, &options, &arena);
    size_t bytes = arena.bytes;
    arena_release(&arena);
    return bytes;
}

// 16,384 rows over 248,320 tokens: logits, probabilities and a gradient of all rows would be 49 GB. What
// is planned is one chunk of logits, two of states, and a gradient row and some numbers for each row.
static void a_large_vocabulary_costs_one_chunk(void **state)
{
    (void)state;
    const int64_t rows = 16384, chunk = 2048, vocab = 248320, hidden = 5120;
    enum { NUMBERS = 32, ENTRIES = 32 }; // per row, and entries to round up
    size_t bytes = planned(rows, chunk, vocab, hidden);
    size_t logits = (size_t)(chunk * vocab) * sizeof(float);
    size_t states = 2 * (size_t)(chunk * hidden) * sizeof(bf16);
    size_t gradient = (size_t)(rows * hidden) * sizeof(float);
    assert_true(bytes >= logits + states + gradient);
    assert_true(bytes <= logits + states + gradient + (size_t)rows * NUMBERS * sizeof(float) +
                             ENTRIES * ARENA_ALIGNMENT);
    // More rows cost no logits.
    assert_true(planned(2 * rows, chunk, vocab, hidden) - bytes ==
                planned(2 * rows, chunk, 1000, hidden) - planned(rows, chunk, 1000, hidden));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_term_is_exact_to_fp32),
        cmocka_unit_test(chunks_agree),
        cmocka_unit_test(rows_without_a_slot_are_exact_zeros),
        cmocka_unit_test(a_constant_on_all_logits_changes_nothing),
        cmocka_unit_test(an_equal_student_has_no_loss),
        cmocka_unit_test(bf16_keeps_small_differences),
        cmocka_unit_test(a_large_vocabulary_costs_one_chunk),
    };
    return cmocka_run_group_tests_name("cases_loss", tests, NULL, NULL);
}
