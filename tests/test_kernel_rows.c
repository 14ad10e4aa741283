// Promises of the CPU backend that go beyond a tolerance: a row's (a block's) bits do not depend on
// what else is in the call, and the loss is exact where it can be. Not among them: gemm, where the
// library's order of additions in a row follows from the row's place.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/kernel_cases.h"
#include "tests/support/kernel_ops.h"

static struct stream *stream_of(int threads)
{
    return backend_cpu()->stream_open(&(struct stream_options){
        .threads = threads, .workspace_bytes = backend_cpu()->stream_workspace_bytes(threads)});
}

static void *normals(int64_t count, enum dtype type, float scale, uint64_t seed)
{
    struct rng_key key = rng_key_make(seed, 0, 0, RNG_TEST);
    struct stream *stream = stream_of(1);
    float *values = memory_alloc((size_t)count, sizeof(float));
    void *result = memory_alloc((size_t)count, dtype_size(type));
    for (int64_t i = 0; i < count; i++)
        values[i] = scale * rng_normal(key, (uint64_t)i);
    struct convert op = {
        .count = count, .from = values, .to = result, .from_type = DTYPE_F32, .to_type = type};
    convert_cpu(stream, &op);
    free(values);
    backend_cpu()->stream_close(stream);
    return result;
}

enum { BLOCKS = 6, B = 8, T = 700, HEADS = 6, KV = 2, D = 16, Q_ROW = HEADS * D, KV_ROW = KV * D };

struct attention_memory {
    float q[BLOCKS * B * Q_ROW], k[BLOCKS * B * KV_ROW], v[BLOCKS * B * KV_ROW];
    float kc[T * KV_ROW], vc[T * KV_ROW], dout[BLOCKS * B * Q_ROW];
    int32_t begin[BLOCKS * B], end[BLOCKS * B];
};

struct attention_result {
    float out[BLOCKS * B * Q_ROW], lse[BLOCKS * B * HEADS], delta[BLOCKS * B * HEADS];
    float dq[BLOCKS * B * Q_ROW], dk[BLOCKS * B * KV_ROW], dv[BLOCKS * B * KV_ROW];
    float dkc[T * KV_ROW], dvc[T * KV_ROW];
};

// Both passes over blocks [first, first + blocks); results lie where those of all blocks would.
static void attend(const struct attention_memory *m, int64_t first, int64_t blocks,
                   struct attention_result *r)
{
    int64_t row = first * B;
    struct attention op = {.rows = blocks * B,
                           .block_size = B,
                           .context = T,
                           .heads = HEADS,
                           .kv_heads = KV,
                           .head_dim = D,
                           .scale = 0.25f,
                           .type = DTYPE_F32,
                           .q = m->q + row * Q_ROW,
                           .k_block = m->k + row * KV_ROW,
                           .v_block = m->v + row * KV_ROW,
                           .k_context = m->kc,
                           .v_context = m->vc,
                           .v_block_stride = KV_ROW,
                           .v_context_stride = KV_ROW,
                           .begin = m->begin + row,
                           .end = m->end + row,
                           .out = r->out + row * Q_ROW,
                           .lse = r->lse + row * HEADS,
                           .dout = m->dout + row * Q_ROW,
                           .delta = r->delta + row * HEADS,
                           .dq = r->dq + row * Q_ROW,
                           .dk_block = r->dk + row * KV_ROW,
                           .dv_block = r->dv + row * KV_ROW,
                           .dk_context = r->dkc,
                           .dv_context = r->dvc};
    struct stream *stream = stream_of(2);
    attention_forward_cpu(stream, &op);
    attention_backward_cpu(stream, &op);
    backend_cpu()->stream_close(stream);
}

static struct attention_memory *attention_memory_make(void)
{
    struct attention_memory *m = memory_alloc(1, sizeof(*m));
    float *values = normals(sizeof(*m) / sizeof(float), DTYPE_F32, 1.0f, 3);
    memcpy(m, values, offsetof(struct attention_memory, begin));
    free(values);
    for (int32_t row = 0; row < BLOCKS * B; row++) {
        m->begin[row] = 5;
        m->end[row] = 6 + row / B * 130; // from one key to more than a tile
    }
    return m;
}

static void attention_blocks(void **state)
{
    (void)state;
    struct attention_memory *m = attention_memory_make();
    struct attention_result *all = memory_alloc(1, sizeof(*all)),
                            *some = memory_alloc(1, sizeof(*some));
    attend(m, 0, BLOCKS, all);
    for (int64_t block = 0; block < BLOCKS; block++)
        attend(m, block, 1, some); // fills its own rows
    assert_memory_equal(all, some, offsetof(struct attention_result, dkc));
    free(all);
    free(some);
    free(m);
}

// The gradient of context that a block does not see is exactly zero, whatever lies there.
static void attention_leaks_nothing(void **state)
{
    (void)state;
    struct attention_memory *m = attention_memory_make();
    struct attention_result *clean = memory_alloc(1, sizeof(*clean)),
                            *other = memory_alloc(1, sizeof(*other));
    attend(m, 2, 1, clean);
    int64_t begin = m->begin[2 * B], end = m->end[2 * B];
    for (int64_t t = 0; t < T; t++)
        for (int64_t i = 0; i < KV_ROW; i++)
            if (t < begin || t >= end) {
                assert_true(clean->dkc[t * KV_ROW + i] == 0.0f &&
                            clean->dvc[t * KV_ROW + i] == 0.0f);
                m->kc[t * KV_ROW + i] += 1.0f;
                m->vc[t * KV_ROW + i] = NAN;
            }
    attend(m, 2, 1, other);
    assert_memory_equal(clean, other, sizeof(*clean));
    free(clean);
    free(other);
    free(m);
}

struct loss_memory {
    int64_t rows, vocab;
    float *student, *teacher, *gradient, *loss, *terms, *other; // other: four [rows] outputs
    int32_t *label, *teacher_row, *argmax;                      // argmax: two [rows] outputs
};

static struct loss_memory loss_memory_make(int64_t rows, int64_t vocab)
{
    struct loss_memory m = {.rows = rows, .vocab = vocab};
    m.student = normals(rows * vocab, DTYPE_F32, 4.0f, 5);
    m.teacher = normals(rows * vocab, DTYPE_F32, 4.0f, 6);
    m.gradient = memory_alloc((size_t)(rows * vocab), sizeof(float));
    m.loss = memory_alloc((size_t)rows, sizeof(float));
    m.terms = memory_alloc((size_t)rows * LOSS_TERM_COUNT, sizeof(float));
    m.other = memory_alloc((size_t)rows * 4, sizeof(float));
    m.label = memory_alloc((size_t)rows, sizeof(int32_t));
    m.teacher_row = memory_alloc((size_t)rows, sizeof(int32_t));
    m.argmax = memory_alloc((size_t)rows * 2, sizeof(int32_t));
    for (int64_t r = 0; r < rows; r++) {
        m.label[r] = (int32_t)(r * 7 % vocab);
        m.teacher_row[r] = (int32_t)r;
    }
    return m;
}

static void loss_memory_free(struct loss_memory *m)
{
    void *all[] = {m->student, m->teacher, m->gradient,    m->loss,  m->terms,
                   m->other,   m->label,   m->teacher_row, m->argmax};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        free(all[i]);
}

// The rows [first, first + count) with every term in the mixture.
static void loss_run(const struct loss_memory *m, int64_t first, int64_t count, const float *weight)
{
    struct softmax_loss op = {.rows = count,
                              .vocab = m->vocab,
                              .student = m->student + first * m->vocab,
                              .teacher = m->teacher,
                              .teacher_row = m->teacher_row + first,
                              .label = m->label + first,
                              .lk_eta = 3.0f,
                              .gradient = m->gradient + first * m->vocab,
                              .gradient_stride = m->vocab,
                              .loss = m->loss + first,
                              .terms = m->terms + first * LOSS_TERM_COUNT,
                              .student_lse = m->other + first,
                              .teacher_lse = m->other + m->rows + first,
                              .overlap = m->other + 2 * m->rows + first,
                              .confidence = m->other + 3 * m->rows + first,
                              .student_argmax = m->argmax + first,
                              .teacher_argmax = m->argmax + m->rows + first};
    memcpy(op.weight, weight, sizeof(op.weight));
    struct stream *stream = stream_of(2);
    softmax_loss_cpu(stream, &op);
    backend_cpu()->stream_close(stream);
}

static void loss_rows(void **state)
{
    (void)state;
    struct loss_memory all = loss_memory_make(9, 1003), alone = loss_memory_make(9, 1003);
    loss_run(&all, 0, 9, loss_mix(LOSS_MIXES - 1));
    for (int64_t r = 0; r < 9; r++)
        loss_run(&alone, r, 1, loss_mix(LOSS_MIXES - 1));
    assert_memory_equal(all.gradient, alone.gradient, 9 * 1003 * sizeof(float));
    assert_memory_equal(all.terms, alone.terms, 9 * LOSS_TERM_COUNT * sizeof(float));
    assert_memory_equal(all.other, alone.other, 9 * 4 * sizeof(float));
    loss_memory_free(&all);
    loss_memory_free(&alone);
}

// Logits that stay exact when 64 is added give the same loss and gradient, bit by bit.
static void loss_ignores_a_shift(void **state)
{
    (void)state;
    struct loss_memory plain = loss_memory_make(5, 1003), shifted = loss_memory_make(5, 1003);
    for (int64_t i = 0; i < 5 * 1003; i++) {
        plain.student[i] = rintf(plain.student[i] * 64.0f) / 64.0f;
        plain.teacher[i] = rintf(plain.teacher[i] * 64.0f) / 64.0f;
        shifted.student[i] = plain.student[i] + 64.0f;
        shifted.teacher[i] = plain.teacher[i] + 64.0f;
    }
    for (int mix = 0; mix < LOSS_MIXES; mix++) {
        loss_run(&plain, 0, 5, loss_mix(mix));
        loss_run(&shifted, 0, 5, loss_mix(mix));
        assert_memory_equal(plain.gradient, shifted.gradient, 5 * 1003 * sizeof(float));
        assert_memory_equal(plain.loss, shifted.loss, 5 * sizeof(float));
    }
    loss_memory_free(&plain);
    loss_memory_free(&shifted);
}

static void loss_of_equals_is_zero(void **state)
{
    (void)state;
    static const int zero[] = {LOSS_KL, LOSS_REVERSE_KL, LOSS_JS, LOSS_TV, LOSS_NLA};
    struct loss_memory m = loss_memory_make(4, 50021);
    memcpy(m.student, m.teacher, 4 * 50021 * sizeof(float));
    for (size_t i = 0; i < sizeof(zero) / sizeof(zero[0]); i++) {
        loss_run(&m, 0, 4, loss_mix(zero[i]));
        for (int64_t r = 0; r < 4; r++)
            assert_true(fabsf(m.loss[r]) < 1e-6f);
        for (int64_t j = 0; j < 4 * 50021; j++)
            assert_true(fabsf(m.gradient[j]) < 1e-6f);
    }
    loss_memory_free(&m);
}

// What is not a number comes out as such, in its own row only.
static void loss_passes_nan_on(void **state)
{
    (void)state;
    for (int which = 0; which < 4; which++)
        for (int mix = 0; mix < LOSS_MIXES; mix++) {
            struct loss_memory m = loss_memory_make(3, 1003);
            float *logits = which < 2 ? m.student : m.teacher;
            logits[1003 + 600] = which % 2 == 0 ? NAN : INFINITY;
            loss_run(&m, 0, 3, loss_mix(mix));
            bool from_teacher = which >= 2 && (mix == LOSS_CE_DATA || mix == LOSS_CE_TEACHER);
            assert_true(from_teacher || isnan(m.loss[1]));
            assert_true(from_teacher || isnan(m.gradient[1003 + 3]));
            assert_true(isnan(m.other[2 * 3 + 1])); // overlap
            for (int64_t j = 0; j < 1003; j++)
                assert_true(isfinite(m.gradient[j]) && isfinite(m.gradient[2 * 1003 + j]));
            assert_true(isfinite(m.loss[0]) && isfinite(m.loss[2]));
            loss_memory_free(&m);
        }
}

// Distributions with nothing in common: as far apart as they can be, and still finite where the
// formulas are.
static void loss_without_overlap(void **state)
{
    (void)state;
    struct loss_memory m = loss_memory_make(1, 600);
    for (int64_t i = 0; i < 600; i++) {
        m.student[i] = i < 300 ? 0.0f : -300.0f;
        m.teacher[i] = i < 300 ? -300.0f : 0.0f;
    }
    loss_run(&m, 0, 1, loss_mix(LOSS_MIXES - 1));
    assert_true(fabsf(m.terms[LOSS_KL] - 300.0f) < 1e-3f);
    assert_true(fabsf(m.terms[LOSS_REVERSE_KL] - 300.0f) < 1e-3f);
    assert_true(fabsf(m.terms[LOSS_JS] - 0.6931472f) < 1e-6f);
    assert_true(fabsf(m.terms[LOSS_TV] - 1.0f) < 1e-6f);
    assert_true(isfinite(m.terms[LOSS_NLA]) && m.terms[LOSS_NLA] > 80.0f);
    for (int64_t i = 0; i < 600; i++)
        assert_true(isfinite(m.gradient[i]));
    loss_memory_free(&m);
}

// The lowest index wins, also across pieces.
static void argmax_of_ties(void **state)
{
    (void)state;
    struct loss_memory m = loss_memory_make(2, 2000);
    for (int64_t i = 0; i < 2 * 2000; i++)
        m.student[i] = m.teacher[i] = 1.0f;
    m.student[700] = m.student[1900] = m.student[702] = 2.0f;
    m.teacher[1999] = m.teacher[511] = m.teacher[512] = 3.0f;
    loss_run(&m, 0, 2, loss_mix(LOSS_KL));
    assert_int_equal(m.argmax[0], 700);
    assert_int_equal(m.argmax[1], 0);
    assert_int_equal(m.argmax[2], 511);
    assert_int_equal(m.argmax[3], 0);
    loss_memory_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_blocks),
        cmocka_unit_test(attention_leaks_nothing),
        cmocka_unit_test(loss_rows),
        cmocka_unit_test(loss_ignores_a_shift),
        cmocka_unit_test(loss_of_equals_is_zero),
        cmocka_unit_test(loss_passes_nan_on),
        cmocka_unit_test(loss_without_overlap),
        cmocka_unit_test(argmax_of_ties),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
