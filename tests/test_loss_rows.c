// The loss over the vocabulary with so many rows that every cluster of CTAs of a GPU gets a good dozen, where
// the table of kernel cases has few: the path that only some GPUs have against the one of every GPU.
// Needs a GPU; its memory holds the logits (4 GB).
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/bf16.h"
#include "base/rng.h"
#include "tests/support/backends.h"
#include "tests/support/kernel_ops.h"

enum {
    ROWS = 3500,
    TEACHERS = 400,
    PATTERN = (1 << 20) - 3, // random logits, repeated; odd, so that rows differ
    EVERY = 53               // rows whose gradients are compared
};

struct outputs {
    float loss[ROWS], student_lse[ROWS], teacher_lse[ROWS], overlap[ROWS], confidence[ROWS];
    float terms[ROWS * LOSS_TERM_COUNT];
    int32_t student_argmax[ROWS], teacher_argmax[ROWS];
    bf16 *gradient; // [ROWS / EVERY + 1, V]
};

struct problem {
    int64_t vocab;
    enum dtype type;
    int mix;
};

static struct test_backend on;

// Repeats what lies at the beginning.
static void *take_logits(struct stream *stream, const void *pattern, int64_t count, size_t size)
{
    size_t bytes = (size_t)count * size, done = PATTERN * size;
    unsigned char *logits = on.backend->alloc(bytes);
    on.backend->copy_in(stream, logits, pattern, done);
    while (done < bytes) {
        size_t more = bytes - done < done ? bytes - done : done;
        on.backend->copy(stream, logits + done, logits, more);
        done += more;
    }
    on.backend->sync(stream);
    return logits;
}

static void *make_pattern(enum dtype type)
{
    struct rng_key key = rng_key_make(17, 0, 0, RNG_TEST);
    void *pattern = memory_alloc(PATTERN, dtype_size(type));
    for (int64_t i = 0; i < PATTERN; i++) {
        float x = 3.0f * rng_normal(key, (uint64_t)i);
        if (type == DTYPE_F32)
            ((float *)pattern)[i] = x;
        else
            ((bf16 *)pattern)[i] = bf16_from_float(x);
    }
    return pattern;
}

static int32_t *take_integers(struct stream *stream, int64_t factor, int64_t divisor, int64_t limit)
{
    int32_t values[ROWS], *device = on.backend->alloc(sizeof(values));
    for (int64_t r = 0; r < ROWS; r++)
        values[r] = (int32_t)(r * factor / divisor % limit);
    on.backend->copy_in(stream, device, values, sizeof(values));
    on.backend->sync(stream);
    return device;
}

// Results lie behind one another in one allocation, as in struct outputs. It is not read here.
static void bind_outputs(struct softmax_loss *op, struct outputs *results)
{
    op->loss = results->loss;
    op->student_lse = results->student_lse;
    op->teacher_lse = results->teacher_lse;
    op->overlap = results->overlap;
    op->confidence = results->confidence;
    op->terms = results->terms;
    op->student_argmax = results->student_argmax;
    op->teacher_argmax = results->teacher_argmax;
}

static void fetch(struct stream *stream, const struct softmax_loss *op, const void *results,
                  struct outputs *out)
{
    on.backend->copy_out(stream, out, results, offsetof(struct outputs, gradient));
    out->gradient = memory_alloc((size_t)((ROWS / EVERY + 1) * op->vocab), sizeof(bf16));
    for (int64_t row = 0, i = 0; row < ROWS; row += EVERY, i++)
        on.backend->copy_out(stream, out->gradient + i * op->vocab,
                             (const bf16 *)op->gradient + row * op->gradient_stride,
                             (size_t)op->vocab * sizeof(bf16));
    on.backend->sync(stream);
}

// In place, as in training.
static void compute(const struct problem *p, bool generic, struct outputs *out)
{
    struct test_backend path = {on.name, on.backend, generic};
    struct stream *stream = test_backend_stream(&path, 1);
    size_t size = dtype_size(p->type);
    void *pattern = make_pattern(p->type);
    struct outputs *results = on.backend->alloc(sizeof(*out));
    struct softmax_loss op = {
        .rows = ROWS,
        .vocab = p->vocab,
        .logits_type = p->type,
        .student = take_logits(stream, pattern, ROWS * p->vocab, size),
        .teacher = take_logits(stream, pattern, TEACHERS * p->vocab, size),
        .teacher_row = take_integers(stream, TEACHERS, ROWS, TEACHERS),
        .label = take_integers(stream, 104729, 1, p->vocab),
        .lk_eta = 3.0f,
        .gradient_type = DTYPE_BF16,
        .gradient_stride = p->vocab * (int64_t)(size / sizeof(bf16)),
    };
    op.gradient = (void *)op.student;
    memcpy(op.weight, loss_mix(p->mix), sizeof(op.weight));
    bind_outputs(&op, results);
    on.backend->kernels->softmax_loss(stream, &op);
    fetch(stream, &op, results, out);
    on.backend->free((void *)op.student);
    on.backend->free((void *)op.teacher);
    on.backend->free((void *)op.teacher_row);
    on.backend->free((void *)op.label);
    on.backend->free(results);
    on.backend->stream_close(stream);
    free(pattern);
}

static bool equal_floats(const char *what, const float *a, const float *b, int64_t count)
{
    struct compare_bounds bounds = {1e-6, 2e-5, 1e-10}; // each is within half of that of fp64
    double *x = memory_alloc((size_t)count, sizeof(double)),
           *y = memory_alloc((size_t)count, sizeof(double));
    for (int64_t i = 0; i < count; i++) {
        x[i] = (double)a[i];
        y[i] = (double)b[i];
    }
    bool ok = compare_tensors(what, 0, x, y, count, 1, bounds);
    free(x);
    free(y);
    return ok;
}

// Sums of another order may round to a neighbour in bf16.
static bool equal_gradients(const struct outputs *a, const struct outputs *b, int64_t vocab)
{
    struct compare_bounds bounds = {1e-9, 0x1.02p-7, 1e-5};
    double *x = memory_alloc((size_t)vocab, sizeof(double)),
           *y = memory_alloc((size_t)vocab, sizeof(double));
    bool ok = true;
    for (int64_t row = 0; row < ROWS && ok; row += EVERY) {
        for (int64_t i = 0; i < vocab; i++) {
            x[i] = (double)bf16_to_float(a->gradient[row / EVERY * vocab + i]);
            y[i] = (double)bf16_to_float(b->gradient[row / EVERY * vocab + i]);
        }
        ok = compare_tensors("gradient of a row", (uint64_t)row, x, y, 1, vocab, bounds);
    }
    free(x);
    free(y);
    return ok;
}

static void paths_agree(void **state)
{
    const struct problem *p = *state;
    struct outputs *ours = memory_alloc(2, sizeof(*ours)), *others = ours + 1;
    compute(p, false, ours);
    compute(p, true, others);
    bool ok = equal_floats("loss", ours->loss, others->loss, ROWS);
    ok = equal_floats("terms", ours->terms, others->terms, ROWS * LOSS_TERM_COUNT) && ok;
    ok = equal_floats("student_lse", ours->student_lse, others->student_lse, ROWS) && ok;
    ok = equal_floats("teacher_lse", ours->teacher_lse, others->teacher_lse, ROWS) && ok;
    ok = equal_floats("overlap", ours->overlap, others->overlap, ROWS) && ok;
    ok = equal_floats("confidence", ours->confidence, others->confidence, ROWS) && ok;
    ok = equal_gradients(ours, others, p->vocab) && ok;
    size_t bytes = sizeof(ours->student_argmax);
    ok = memcmp(ours->student_argmax, others->student_argmax, bytes) == 0 && ok;
    ok = memcmp(ours->teacher_argmax, others->teacher_argmax, bytes) == 0 && ok;
    free(ours->gradient);
    free(others->gradient);
    free(ours);
    assert_true(ok);
}

int main(void)
{
    static struct problem problems[] = {
        {49152, DTYPE_F32, 0},   {49152, DTYPE_F32, 11},  {49152, DTYPE_BF16, 0},
        {248320, DTYPE_F32, 0},  {248320, DTYPE_F32, 11}, {248320, DTYPE_BF16, 0},
        {248320, DTYPE_BF16, 8},
    };
    enum { COUNT = sizeof(problems) / sizeof(problems[0]) };
    struct CMUnitTest tests[COUNT];
    char names[COUNT][64];
    int status = test_backend_named(&on, "cuda");
    if (status != 0)
        return status;
    for (int i = 0; i < COUNT; i++) {
        const struct problem *p = &problems[i];
        snprintf(names[i], sizeof(names[i]), "paths_agree/%lld/%s/mix %d", (long long)p->vocab,
                 dtype_name(p->type), p->mix);
        tests[i] = (struct CMUnitTest){names[i], paths_agree, NULL, NULL, &problems[i]};
    }
    return cmocka_run_group_tests(tests, NULL, NULL) == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
