// The chunked loss over a draft vocabulary, with a frozen or a trainable head, with and without a Markov head,
// against float64: every term, weights that the teacher's argmax masks, numbers over the whole vocabulary, any
// chunks. The backend is named on the command line.
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
#include "tests/support/naive.h"

#define COUNT(list) (sizeof(list) / sizeof(*(list)))

enum { S = 5, BLOCKS = 37, N = S * BLOCKS, T = 61, V = 1003, VD = 257, H = 48, R = 6, THREADS = 2 };

static struct test_backend on;

struct bench {
    struct loss_config config;
    struct loss_options options;
    bool trainable, markov, gradient;
    int64_t draft;               // of the map
    int32_t ids[V], draft_of[V]; // of the head's rows; draft ids
    float head[V * H];           // rows as `ids` has them
    float student_head[VD * H];
    float w1[V * R], w2[VD * R];
    float hidden[N * H];
    bf16 last[T * H];
    int32_t input_ids[T];
    struct slot slots[N];
    int32_t hidden_row[N];
    int64_t slot_count;
    // what came out
    struct slot_results results;
    float dhidden[N * H], dhead[VD * H], dw1[V * R], dw2[VD * R];
    int64_t chunks;
};

static struct rng_key key_of(uint64_t what)
{
    return rng_key_make(93, 0, what, RNG_TEST);
}

static float rounded(const struct bench *b, float value)
{
    return b->options.compute == DTYPE_BF16 ? bf16_to_float(bf16_from_float(value)) : value;
}

// A map that keeps ids here and there, and rows in the order that it gives.
static void make_map(struct bench *b)
{
    bool kept[V] = {false};
    for (int64_t left = VD, draw = 0; left > 0; draw++) {
        int64_t id = (int64_t)(rng_u64(key_of(1), (uint64_t)draw) % V);
        left -= !kept[id];
        kept[id] = true;
    }
    int32_t draft = 0, other = VD;
    for (int32_t id = 0; id < V; id++) {
        b->draft_of[id] = kept[id] ? draft : -1;
        b->ids[kept[id] ? draft++ : other++] = id;
    }
}

// Slots of positions as EAGLE-3 has them: five of a block follow each other, so a teacher row has several.
static void make_slots(struct bench *b)
{
    for (int32_t block = 0; block < BLOCKS; block++) {
        for (int32_t k = 0; k < S; k++) {
            uint64_t draw = rng_u64(key_of(2), (uint64_t)block * S + (uint64_t)k);
            if (draw % 9 == 0)
                continue;
            b->hidden_row[b->slot_count] = k * BLOCKS + block; // a step's rows together
            b->slots[b->slot_count++] =
                (struct slot){block, k, (int32_t)(draw / 9 % V), block + k, (float)pow(0.8, k)};
        }
    }
    b->slots[3].label = -1; // beyond its document
}

static struct bench *bench_open(enum dtype compute)
{
    struct bench *b = memory_alloc(1, sizeof(*b));
    b->options = (struct loss_options){.hidden = H,
                                       .vocab = V,
                                       .block_size = S,
                                       .group_rows = N,
                                       .chunk_rows = 17,
                                       .compute = compute,
                                       .logits = DTYPE_F32,
                                       .has_teacher = true,
                                       .norm_eps = 1e-6f,
                                       .logit_scale = 0.75f};
    b->config = (struct loss_config){.lk_eta = 3.0, .slot_weight = SLOT_WEIGHT_UNIFORM};
    b->options.map.mask_outside = b->options.map.full_in_training = true;
    b->gradient = true;
    b->draft = VD;
    make_map(b);
    make_slots(b);
    for (int64_t i = 0; i < V * H; i++)
        b->head[i] = rounded(b, 0.25f * rng_normal(key_of(3), (uint64_t)i));
    for (int64_t i = 0; i < VD * H; i++)
        b->student_head[i] = rounded(b, 0.25f * rng_normal(key_of(4), (uint64_t)i));
    for (int64_t i = 0; i < N * H; i++)
        b->hidden[i] = rounded(b, rng_normal(key_of(5), (uint64_t)i));
    for (int64_t i = 0; i < T * H; i++)
        b->last[i] = bf16_from_float(rng_normal(key_of(6), (uint64_t)i));
    for (int64_t i = 0; i < V * R; i++)
        b->w1[i] = rounded(b, 0.5f * rng_normal(key_of(9), (uint64_t)i));
    for (int64_t i = 0; i < VD * R; i++)
        b->w2[i] = rounded(b, 0.5f * rng_normal(key_of(10), (uint64_t)i));
    for (int64_t i = 0; i < T; i++) // a few tokens come often
        b->input_ids[i] = (int32_t)(V - 1 - (int64_t)(rng_u64(key_of(11), (uint64_t)i) % 13));
    slot_results_open(&b->results, N);
    return b;
}

static void bench_close(struct bench *b)
{
    slot_results_close(&b->results);
    free(b);
}

static double *const *terms_of(struct loss_config *c, double *terms[LOSS_TERM_COUNT])
{
    double *const all[LOSS_TERM_COUNT] = {&c->kl,      &c->reverse_kl, &c->js,  &c->ce_teacher,
                                          &c->ce_data, &c->tv,         &c->nla, &c->lk};
    memcpy(terms, all, sizeof(all));
    return terms;
}

static void set_terms(struct bench *b, const double weights[LOSS_TERM_COUNT])
{
    double *terms[LOSS_TERM_COUNT];
    for (int i = 0; i < LOSS_TERM_COUNT; i++)
        *terms_of(&b->config, terms)[i] = weights[i];
}

// ---- on the backend

enum { MOST_ARRAYS = 16 };
struct device {
    struct stream *stream;
    void *arrays[MOST_ARRAYS];
    int count;
};

static void *keep(struct device *d, size_t bytes)
{
    return d->arrays[d->count++] = on.backend->alloc(bytes);
}

static void *sent(struct device *d, const void *host, size_t bytes)
{
    void *to = keep(d, bytes);
    on.backend->copy_in(d->stream, to, host, bytes);
    on.backend->sync(d->stream);
    return to;
}

static void *sent_values(struct device *d, const float *values, int64_t count, enum dtype type)
{
    if (type == DTYPE_F32)
        return sent(d, values, (size_t)count * sizeof(float));
    bf16 *copy = memory_alloc((size_t)count, sizeof(*copy));
    for (int64_t i = 0; i < count; i++)
        copy[i] = bf16_from_float(values[i]);
    void *to = sent(d, copy, (size_t)count * sizeof(*copy));
    free(copy);
    return to;
}

static void fetch(struct device *d, void *host, const void *from, size_t bytes)
{
    on.backend->copy_out(d->stream, host, from, bytes);
    on.backend->sync(d->stream);
}

static void place_options(struct bench *b, struct device *d)
{
    struct loss_options *o = &b->options;
    o->config = &b->config;
    o->head = sent_values(d, b->head, V * H, o->compute);
    o->student_head = NULL;
    o->dhead = NULL;
    if (b->trainable) {
        o->student_head = sent_values(d, b->student_head, VD * H, o->compute);
        o->dhead = sent_values(d, b->dhead, VD * H, DTYPE_F32);
    }
    o->markov = (struct loss_markov){.rank = 0};
    if (b->markov)
        o->markov = (struct loss_markov){.rank = R,
                                         .w1 = sent_values(d, b->w1, V * R, o->compute),
                                         .w2 = sent_values(d, b->w2, VD * R, o->compute),
                                         .dw1 = sent_values(d, b->dw1, V * R, DTYPE_F32),
                                         .dw2 = sent_values(d, b->dw2, VD * R, DTYPE_F32)};
    o->map.draft = b->draft;
    o->map.ids = sent(d, b->ids, sizeof(b->ids));
    o->map.h_ids = b->ids;
    o->map.draft_of = b->draft_of;
}

// b->dhead, dw1 and dw2, filled beforehand, are what is added to.
static void bench_run(struct bench *b)
{
    struct device d = {.stream = test_backend_stream(&on, THREADS)};
    struct loss_options *o = &b->options;
    size_t bytes = (size_t)N * H * dtype_size(o->compute);
    place_options(b, &d);
    void *hidden = sent_values(&d, b->hidden, N * H, o->compute);
    void *last = sent(&d, b->last, sizeof(b->last)), *dhidden = keep(&d, bytes);
    struct loss loss;
    struct arena arena;
    arena_init(&arena);
    loss_plan(&loss, o, &arena);
    void *memory = keep(&d, arena.bytes);
    arena_place(&arena, memory, arena.bytes);
    loss_plan(&loss, o, &arena);
    loss_open(&loss, on.backend);
    struct loss_group group = {.rows = N,
                               .hidden = hidden,
                               .hidden_row = b->hidden_row,
                               .last = o->has_teacher ? last : NULL,
                               .last_stride = H,
                               .tokens = T,
                               .input_ids = b->input_ids,
                               .slots = b->slots,
                               .slot_count = b->slot_count,
                               .dhidden = b->gradient ? dhidden : NULL};
    loss_group_run(&loss, on.backend, d.stream, &group, &b->results);
    bf16 *raw = memory_alloc(1, bytes);
    fetch(&d, raw, dhidden, bytes);
    for (int64_t i = 0; i < N * H; i++)
        b->dhidden[i] =
            o->compute == DTYPE_BF16 ? bf16_to_float(raw[i]) : ((const float *)(void *)raw)[i];
    if (b->trainable)
        fetch(&d, b->dhead, o->dhead, sizeof(b->dhead));
    if (b->markov) {
        fetch(&d, b->dw1, o->markov.dw1, sizeof(b->dw1));
        fetch(&d, b->dw2, o->markov.dw2, sizeof(b->dw2));
    }
    free(raw);
    b->chunks = loss.chunk_count;
    loss_close(&loss);
    arena_release(&arena);
    while (d.count > 0)
        on.backend->free(d.arrays[--d.count]);
    on.backend->stream_close(d.stream);
}

// ---- the same in float64

struct exact {
    double student[VD], teacher[V]; // logits of one slot
    double loss[N], overlap[N], teacher_lse[N], student_lse[N], weight[N];
    int64_t student_argmax[N], teacher_argmax[N];
    double total; // sum of weight * loss
    double dhidden[N * H], dhead[VD * H], dw1[V * R], dw2[VD * R];
};

static const float *student_rows(const struct bench *b)
{
    return b->trainable ? b->student_head : b->head;
}

static double dot(const float *row, const double *state)
{
    double sum = 0.0;
    for (int64_t i = 0; i < H; i++)
        sum += (double)row[i] * state[i];
    return sum;
}

// The token that the target would take: of equals the smallest id.
static int64_t exact_argmax(const struct bench *b, const double *teacher)
{
    int64_t best = 0;
    for (int64_t c = 1; c < V; c++)
        if (teacher[c] > teacher[best] || (teacher[c] == teacher[best] && b->ids[c] < b->ids[best]))
            best = c;
    return b->ids[best];
}

// sum over the kept of min(q, p), p over the whole vocabulary
static double exact_overlap(const double *student, double student_lse, const double *teacher)
{
    double most = -INFINITY, sum = 0.0, overlap = 0.0;
    for (int64_t c = 0; c < V; c++)
        most = fmax(most, teacher[c]);
    for (int64_t c = 0; c < V; c++)
        sum += exp(teacher[c] - most);
    for (int64_t c = 0; c < VD; c++)
        overlap += fmin(exp(student[c] - student_lse), exp(teacher[c] - most) / sum);
    return overlap;
}

static void exact_gradients(struct exact *e, const struct bench *b, int64_t row,
                            const double *gradient, double scale)
{
    const float *head = student_rows(b);
    for (int64_t c = 0; c < VD; c++) {
        for (int64_t i = 0; i < H; i++) {
            e->dhidden[row * H + i] += scale * gradient[c] * (double)head[c * H + i];
            e->dhead[c * H + i] += scale * gradient[c] * (double)b->hidden[row * H + i];
        }
    }
}

static void exact_tables(struct exact *e, const struct bench *b, int32_t token,
                         const double *gradient, double weight)
{
    for (int64_t c = 0; c < VD && b->markov; c++)
        for (int64_t r = 0; r < R; r++) {
            e->dw1[token * R + r] += weight * gradient[c] * (double)b->w2[c * R + r];
            e->dw2[c * R + r] += weight * gradient[c] * (double)b->w1[token * R + r];
        }
}

static double bias(const struct bench *b, int32_t token, int64_t c)
{
    double sum = 0.0;
    for (int64_t r = 0; r < R && b->markov; r++)
        sum += (double)b->w1[token * R + r] * (double)b->w2[c * R + r];
    return sum;
}

static void exact_slot(struct exact *e, struct bench *b, int64_t s)
{
    const struct slot *slot = &b->slots[s];
    int64_t row = b->hidden_row[s];
    int32_t token = b->input_ids[slot->teacher_row];
    double state[H], gradient[VD], *terms[LOSS_TERM_COUNT];
    double scale = (double)b->options.logit_scale;
    struct naive_loss_result result;
    struct naive_loss in = {.vocab = VD,
                            .student = e->student,
                            .teacher = b->options.has_teacher ? e->teacher : NULL,
                            .label = slot->label >= 0 ? b->draft_of[slot->label] : -1,
                            .eta = b->config.lk_eta,
                            .lambda = -1.0};
    for (int64_t i = 0; i < H; i++)
        state[i] = (double)b->hidden[row * H + i];
    for (int64_t c = 0; c < VD; c++)
        e->student[c] = scale * dot(student_rows(b) + c * H, state) + bias(b, token, c);
    for (int64_t i = 0; i < H; i++)
        state[i] = (double)bf16_to_float(b->last[slot->teacher_row * H + i]);
    for (int64_t c = 0; c < V; c++)
        e->teacher[c] = scale * dot(b->head + c * H, state);
    for (int i = 0; i < LOSS_TERM_COUNT; i++)
        in.weight[i] = *terms_of(&b->config, terms)[i];
    naive_softmax_loss(&in, &result, gradient);
    e->loss[s] = result.loss;
    e->student_lse[s] = result.student_lse;
    e->teacher_lse[s] = result.teacher_lse;
    e->student_argmax[s] = b->ids[result.student_argmax];
    e->teacher_argmax[s] = slot->label;
    e->overlap[s] = result.overlap;
    if (b->options.has_teacher) {
        e->teacher_argmax[s] = exact_argmax(b, e->teacher);
        e->overlap[s] = exact_overlap(e->student, result.student_lse, e->teacher);
    }
    if (b->options.has_teacher && b->gradient && !b->options.map.full_in_training) {
        e->teacher_argmax[s] = b->ids[result.teacher_argmax];
        e->overlap[s] = result.overlap;
    }
    bool outside = e->teacher_argmax[s] < 0 || b->draft_of[e->teacher_argmax[s]] < 0;
    e->weight[s] = outside && b->options.map.mask_outside ? 0.0 : (double)slot->weight;
    e->total += e->weight[s] * result.loss;
    exact_gradients(e, b, row, gradient, e->weight[s] * scale);
    exact_tables(e, b, token, gradient, e->weight[s]);
}

static void exact_run(struct exact *e, struct bench *b)
{
    memset(e, 0, sizeof(*e));
    for (int64_t s = 0; s < b->slot_count; s++)
        exact_slot(e, b, s);
}

static double error_of(const float *got, const double *wanted, int64_t count)
{
    double difference = 0.0, norm = 0.0;
    for (int64_t i = 0; i < count; i++) {
        difference += ((double)got[i] - wanted[i]) * ((double)got[i] - wanted[i]);
        norm += wanted[i] * wanted[i];
    }
    return sqrt(difference / norm);
}

static void near(const char *what, double got, double wanted, double tolerance)
{
    if (!(fabs(got - wanted) <= tolerance * (1.0 + fabs(wanted))))
        fail_msg("%s is %g, not %g", what, got, wanted);
}

static void clear_gradients(struct bench *b)
{
    memset(b->dhead, 0, sizeof(b->dhead));
    memset(b->dw1, 0, sizeof(b->dw1));
    memset(b->dw2, 0, sizeof(b->dw2));
}

// Tolerances of losses and statistics, and of gradients.
static void check_exact(struct bench *b, struct exact *e, double tolerance, double gradients)
{
    exact_run(e, b);
    clear_gradients(b);
    bench_run(b);
    for (int64_t s = 0; s < b->slot_count; s++) {
        near("loss", (double)b->results.loss[s], e->loss[s], tolerance);
        near("overlap", (double)b->results.overlap[s], e->overlap[s], tolerance);
        near("student_lse", (double)b->results.student_lse[s], e->student_lse[s], tolerance);
        if (b->options.has_teacher)
            near("teacher_lse", (double)b->results.teacher_lse[s], e->teacher_lse[s], tolerance);
        near("weight", (double)b->results.weight[s], e->weight[s], 0.0);
        assert_int_equal(b->results.student_argmax[s], e->student_argmax[s]);
        assert_int_equal(b->results.teacher_argmax[s], e->teacher_argmax[s]);
    }
    double dhidden = error_of(b->dhidden, e->dhidden, N * H);
    double dhead = b->trainable ? error_of(b->dhead, e->dhead, VD * H) : 0.0;
    double dw1 = b->markov ? error_of(b->dw1, e->dw1, V * R) : 0.0;
    double dw2 = b->markov ? error_of(b->dw2, e->dw2, VD * R) : 0.0;
    if (!(dhidden <= gradients && dhead <= gradients && dw1 <= gradients && dw2 <= gradients))
        fail_msg("dhidden is off by %g, dhead by %g, dw1 by %g, dw2 by %g", dhidden, dhead, dw1,
                 dw2);
}

static const double mixtures[][LOSS_TERM_COUNT] = {
    {[LOSS_CE_TEACHER] = 0.1, [LOSS_TV] = 0.9},
    {1.0, 0.5, 2.0, 0.25, 0.125, 0.75, 0.3, 0.6},
};

static void every_term_is_exact_to_fp32(void **state)
{
    (void)state;
    struct bench *b = bench_open(DTYPE_F32);
    struct exact *e = memory_alloc(1, sizeof(*e));
    for (int heads = 0; heads < 4; heads++) {
        b->trainable = heads % 2 == 1;
        b->markov = heads >= 2;
        for (int term = 0; term < LOSS_TERM_COUNT; term++) {
            double weights[LOSS_TERM_COUNT] = {0.0};
            weights[term] = 1.0;
            set_terms(b, weights);
            check_exact(b, e, 1e-5, 1e-5);
        }
        for (size_t m = 0; m < COUNT(mixtures); m++) {
            set_terms(b, mixtures[m]);
            check_exact(b, e, 1e-5, 1e-5);
        }
    }
    int64_t masked = 0;
    for (int64_t s = 0; s < b->slot_count; s++)
        masked += e->weight[s] == 0.0;
    assert_in_range(masked, b->slot_count / 4, b->slot_count - b->slot_count / 10);
    free(e);
    bench_close(b);
}

static void what_is_outside_may_be_kept(void **state)
{
    (void)state;
    struct bench *b = bench_open(DTYPE_F32);
    struct exact *e = memory_alloc(1, sizeof(*e));
    b->trainable = true;
    b->options.map.mask_outside = false;
    set_terms(b, mixtures[1]);
    check_exact(b, e, 1e-5, 1e-5);
    for (int64_t s = 0; s < b->slot_count; s++)
        assert_true(b->results.weight[s] == b->slots[s].weight);
    free(e);
    bench_close(b);
}

// Training may compare with the kept columns alone: the same losses and gradients by fewer products, whose
// chunks hold more rows. What has no gradient still compares with all.
static void training_may_leave_the_other_columns(void **state)
{
    (void)state;
    struct bench *b = bench_open(DTYPE_F32);
    struct exact *e = memory_alloc(1, sizeof(*e));
    b->trainable = b->markov = true;
    b->options.map.mask_outside = b->options.map.full_in_training = false;
    for (int64_t chunk = 2; chunk < 200; chunk = 5 * chunk + 1) {
        b->options.chunk_rows = chunk;
        set_terms(b, mixtures[1]);
        check_exact(b, e, 1e-5, 1e-5);
    }
    int64_t outside = 0;
    b->gradient = false;
    exact_run(e, b);
    bench_run(b);
    for (int64_t s = 0; s < b->slot_count; s++) {
        near("overlap", (double)b->results.overlap[s], e->overlap[s], 1e-5);
        assert_int_equal(b->results.teacher_argmax[s], e->teacher_argmax[s]);
        outside += b->draft_of[e->teacher_argmax[s]] < 0;
    }
    assert_true(outside > 0);
    free(e);
    bench_close(b);
}

// The two first slots of each block alone.
static void keep_two_slots(struct bench *b)
{
    int64_t count = 0;
    for (int64_t i = 0; i < b->slot_count; i++)
        if (b->slots[i].slot < 2) {
            b->slots[count] = b->slots[i];
            b->hidden_row[count++] = b->hidden_row[i];
        }
    b->slot_count = count;
}

// With few students for each there is room for more teachers than chunk_rows, and so for fewer chunks; where all
// columns are compared there is none.
static void more_teachers_make_fewer_chunks(void **state)
{
    (void)state;
    struct bench *b = bench_open(DTYPE_F32);
    struct exact *e = memory_alloc(1, sizeof(*e));
    keep_two_slots(b);
    set_terms(b, mixtures[1]);
    b->options.map.mask_outside = false;
    b->options.chunk_rows = 4;
    for (int full = 0; full < 2; full++) {
        b->options.map.full_in_training = full == 1;
        b->options.teacher_rows = 0;
        check_exact(b, e, 1e-5, 1e-5);
        int64_t chunks = b->chunks;
        b->options.teacher_rows = 8;
        check_exact(b, e, 1e-5, 1e-5);
        assert_true(full == 1 ? b->chunks == chunks : b->chunks < chunks);
    }
    free(e);
    bench_close(b);
}

static void without_a_teacher_the_label_decides(void **state)
{
    (void)state;
    struct bench *b = bench_open(DTYPE_F32);
    struct exact *e = memory_alloc(1, sizeof(*e));
    b->trainable = b->markov = true;
    b->options.has_teacher = false;
    set_terms(b, (const double[LOSS_TERM_COUNT]){[LOSS_CE_DATA] = 1.0});
    for (int masked = 0; masked < 2; masked++) {
        b->options.map.mask_outside = masked == 1;
        check_exact(b, e, 1e-5, 1e-5);
        for (int64_t s = 0; s < b->slot_count; s++) {
            bool outside = b->slots[s].label < 0 || b->draft_of[b->slots[s].label] < 0;
            assert_true(!outside || b->results.loss[s] == 0.0f);
        }
    }
    free(e);
    bench_close(b);
}

// What is added to along a direction, and the direction itself.
static double slope_of(const float *gradient, int64_t count, uint64_t key)
{
    double slope = 0.0;
    for (int64_t i = 0; i < count; i++)
        slope += (double)gradient[i] * (double)rng_normal(key_of(key), (uint64_t)i);
    return slope;
}

static void move_along(float *values, int64_t count, uint64_t key, float step)
{
    for (int64_t i = 0; i < count; i++)
        values[i] += step * rng_normal(key_of(key), (uint64_t)i);
}

// The reference's gradients are those of its own loss: a step in a random direction of states and heads.
static void gradients_are_slopes(void **state)
{
    (void)state;
    enum { STEP = 4096 }; // of 1 / STEP
    struct bench *b = bench_open(DTYPE_F32);
    struct exact *e = memory_alloc(1, sizeof(*e));
    b->trainable = b->markov = true;
    set_terms(b, (const double[LOSS_TERM_COUNT]){
                     [LOSS_KL] = 1.0, [LOSS_JS] = 0.5, [LOSS_CE_DATA] = 0.25});
    clear_gradients(b);
    bench_run(b);
    double slope = slope_of(b->dhidden, N * H, 7) + slope_of(b->dhead, VD * H, 8) +
                   slope_of(b->dw1, V * R, 12) + slope_of(b->dw2, VD * R, 13),
           totals[2];
    for (int side = 0; side < 2; side++) {
        float step = (side == 0 ? -1.0f : 2.0f) / STEP; // from the first side to the second
        move_along(b->hidden, N * H, 7, step);
        move_along(b->student_head, VD * H, 8, step);
        move_along(b->w1, V * R, 12, step);
        move_along(b->w2, VD * R, 13, step);
        exact_run(e, b);
        totals[side] = e->total;
    }
    near("the slope", (totals[1] - totals[0]) * STEP / 2.0, slope, 1e-3);
    free(e);
    bench_close(b);
}

static void bf16_is_near(void **state)
{
    (void)state;
    struct bench *b = bench_open(DTYPE_BF16);
    struct exact *e = memory_alloc(1, sizeof(*e));
    b->trainable = b->markov = true;
    set_terms(b, mixtures[1]);
    check_exact(b, e, 1e-4, 6e-3);
    for (int64_t s = 0; s < b->slot_count; s++)
        b->slots[s].weight = 1.0f;
    b->options.whole_weights = true; // dS is rounded before it is weighted
    check_exact(b, e, 1e-4, 6e-3);
    free(e);
    bench_close(b);
}

static void chunks_agree(void **state)
{
    (void)state;
    static const int64_t chunks[] = {1000, 2, 3, 7, 40, 131};
    struct bench *b = bench_open(DTYPE_F32);
    double *wanted = memory_alloc(N * H, sizeof(*wanted));
    double *wanted_head = memory_alloc(VD * H, sizeof(*wanted_head)), w1[V * R] = {0.0},
           w2[VD * R] = {0.0};
    int32_t argmax[N];
    b->trainable = b->markov = true;
    set_terms(b, mixtures[1]);
    for (size_t c = 0; c < COUNT(chunks); c++) {
        b->options.chunk_rows = chunks[c];
        clear_gradients(b);
        bench_run(b);
        if (c == 0) {
            for (int64_t i = 0; i < N * H; i++)
                wanted[i] = (double)b->dhidden[i];
            for (int64_t i = 0; i < VD * H; i++)
                wanted_head[i] = (double)b->dhead[i];
            for (int64_t i = 0; i < V * R; i++)
                w1[i] = (double)b->dw1[i];
            for (int64_t i = 0; i < VD * R; i++)
                w2[i] = (double)b->dw2[i];
            memcpy(argmax, b->results.teacher_argmax, sizeof(argmax));
        }
        assert_true(error_of(b->dhidden, wanted, N * H) <= 1e-6);
        assert_true(error_of(b->dhead, wanted_head, VD * H) <= 1e-6);
        assert_true(error_of(b->dw1, w1, V * R) <= 1e-6);
        assert_true(error_of(b->dw2, w2, VD * R) <= 1e-6);
        assert_memory_equal(b->results.teacher_argmax, argmax,
                            (size_t)b->slot_count * sizeof(*argmax));
    }
    free(wanted_head);
    free(wanted);
    bench_close(b);
}

// Where the teacher wants a token that the student does not know, nothing is learned, whatever the states
// hold; and the head keeps what other groups have added.
static void a_masked_group_is_exact_zeros(void **state)
{
    (void)state;
    struct bench *b = bench_open(DTYPE_F32);
    b->trainable = b->markov = true;
    set_terms(b, mixtures[1]);
    for (int64_t i = 0; i < H; i++)
        b->head[(V - 1) * H + i] = 4.0f; // outside
    for (int64_t i = 0; i < T * H; i++)
        b->last[i] = bf16_from_float(1.0f + 0.125f * bf16_to_float(b->last[i]));
    for (int64_t i = 0; i < VD * H; i++)
        b->dhead[i] = (float)(i % 7) - 2.5f;
    for (int64_t i = 0; i < V * R; i++)
        b->dw1[i] = (float)(i % 5) - 1.5f;
    for (int64_t i = 0; i < VD * R; i++)
        b->dw2[i] = (float)(i % 3) - 0.5f;
    struct bench *before = memory_alloc(1, sizeof(*before));
    *before = *b;
    bench_run(b);
    for (int64_t s = 0; s < b->slot_count; s++) {
        assert_int_equal(b->results.teacher_argmax[s], b->ids[V - 1]);
        assert_true(b->results.weight[s] == 0.0f && isfinite(b->results.loss[s]));
    }
    for (int64_t i = 0; i < N * H; i++)
        assert_true(b->dhidden[i] == 0.0f);
    assert_memory_equal(b->dhead, before->dhead, sizeof(b->dhead));
    assert_memory_equal(b->dw1, before->dw1, sizeof(b->dw1));
    assert_memory_equal(b->dw2, before->dw2, sizeof(b->dw2));
    free(before);
    bench_close(b);
}

// A target's state with an infinity, whose largest logit is outside: its slots are masked, and leave every
// gradient as if they were not there, although their losses are not finite.
static void a_masked_infinity_adds_nothing(void **state)
{
    (void)state;
    enum { POSITION = 11 };
    struct bench *b = bench_open(DTYPE_F32);
    struct bench *without = memory_alloc(1, sizeof(*without));
    int64_t left = 0;
    b->trainable = b->markov = true;
    set_terms(b, mixtures[1]);
    for (int64_t c = 0; c < V; c++)
        b->head[c * H] =
            (c < VD ? -1.0f : 1.0f) * fabsf(b->head[c * H]) - (c < VD ? 0.01f : -0.01f);
    b->last[POSITION * H] = bf16_from_float(INFINITY);
    *without = *b;
    slot_results_open(&without->results, N);
    for (int64_t s = 0; s < b->slot_count; s++)
        if (b->slots[s].teacher_row != POSITION) {
            without->hidden_row[left] = b->hidden_row[s];
            without->slots[left++] = b->slots[s];
        }
    without->slot_count = left;
    assert_true(left < b->slot_count);
    bench_run(b);
    for (int64_t s = 0; s < b->slot_count; s++)
        if (b->slots[s].teacher_row == POSITION)
            assert_true(b->results.weight[s] == 0.0f && !isfinite(b->results.loss[s]));
    struct exact *e = memory_alloc(1, sizeof(*e));
    exact_run(e, without);
    assert_true(error_of(b->dhidden, e->dhidden, N * H) <= 1e-5);
    assert_true(error_of(b->dhead, e->dhead, VD * H) <= 1e-5);
    assert_true(error_of(b->dw1, e->dw1, V * R) <= 1e-5);
    assert_true(error_of(b->dw2, e->dw2, VD * R) <= 1e-5);
    free(e);
    bench_close(without);
    bench_close(b);
}

// Scored without a gradient, as in validation: the same numbers, and weights that are masked.
static void scoring_masks_as_training_does(void **state)
{
    (void)state;
    struct bench *b = bench_open(DTYPE_F32);
    float loss[N], weight[N];
    set_terms(b, mixtures[0]);
    bench_run(b);
    memcpy(loss, b->results.loss, sizeof(loss));
    memcpy(weight, b->results.weight, sizeof(weight));
    b->gradient = false;
    bench_run(b);
    assert_memory_equal(b->results.loss, loss, (size_t)b->slot_count * sizeof(*loss));
    assert_memory_equal(b->results.weight, weight, (size_t)b->slot_count * sizeof(*weight));
    bench_close(b);
}

// A map that keeps every token is no map, bit for bit.
static void a_map_of_everything_changes_nothing(void **state)
{
    (void)state;
    struct bench *b = bench_open(DTYPE_F32);
    float *dhidden = memory_alloc(1, sizeof(b->dhidden)), loss[N];
    int32_t argmax[N];
    set_terms(b, mixtures[1]);
    for (int32_t id = 0; id < V; id++)
        b->ids[id] = b->draft_of[id] = id;
    b->draft = 0;
    bench_run(b);
    memcpy(dhidden, b->dhidden, sizeof(b->dhidden));
    memcpy(loss, b->results.loss, sizeof(loss));
    memcpy(argmax, b->results.teacher_argmax, sizeof(argmax));
    b->draft = V;
    bench_run(b);
    assert_memory_equal(b->dhidden, dhidden, sizeof(b->dhidden));
    assert_memory_equal(b->results.loss, loss, (size_t)b->slot_count * sizeof(*loss));
    assert_memory_equal(b->results.teacher_argmax, argmax, (size_t)b->slot_count * sizeof(*argmax));
    free(dhidden);
    bench_close(b);
}

int main(int argc, char **argv)
{
    int status = test_backend_named(&on, argc == 2 ? argv[1] : "");
    if (status != 0)
        return status;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_term_is_exact_to_fp32),
        cmocka_unit_test(what_is_outside_may_be_kept),
        cmocka_unit_test(training_may_leave_the_other_columns),
        cmocka_unit_test(more_teachers_make_fewer_chunks),
        cmocka_unit_test(without_a_teacher_the_label_decides),
        cmocka_unit_test(gradients_are_slopes),
        cmocka_unit_test(bf16_is_near),
        cmocka_unit_test(chunks_agree),
        cmocka_unit_test(a_masked_group_is_exact_zeros),
        cmocka_unit_test(a_masked_infinity_adds_nothing),
        cmocka_unit_test(scoring_masks_as_training_does),
        cmocka_unit_test(a_map_of_everything_changes_nothing),
    };
    return cmocka_run_group_tests_name("loss_vocab", tests, NULL, NULL);
}
