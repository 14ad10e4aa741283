// Owns how the loss over the vocabulary is tested.
// Shape: rows, vocab, teacher rows, index of the mixture of terms; IN_PLACE, TO_F32 (fp32 gradient of
// bf16 logits), STRIDED (rows of the gradient), NO_TEACHER, NO_GRADIENT, EXCLUDED, NOT_FINITE, SORTED.
#include <math.h>
#include <string.h>

#include "tests/support/kernel_ops.h"
#include "tests/support/kernel_ops_parts.h"
#include "tests/support/naive.h"

static const float mixes[LOSS_MIXES][LOSS_TERM_COUNT] = {
    {[LOSS_KL] = 1.0f},
    {[LOSS_REVERSE_KL] = 1.0f},
    {[LOSS_JS] = 1.0f},
    {[LOSS_CE_TEACHER] = 1.0f},
    {[LOSS_CE_DATA] = 1.0f},
    {[LOSS_TV] = 1.0f},
    {[LOSS_NLA] = 1.0f},
    {[LOSS_LK] = 1.0f},
    {[LOSS_CE_TEACHER] = 0.1f, [LOSS_TV] = 0.9f},
    {[LOSS_KL] = 0.5f, [LOSS_REVERSE_KL] = 0.25f, [LOSS_CE_DATA] = 0.25f},
    {[LOSS_JS] = 2.0f, [LOSS_NLA] = 0.5f, [LOSS_LK] = 1.5f},
    {0.3f, 0.2f, 0.7f, 0.11f, 0.13f, 0.17f, 0.19f, 0.23f},
};

const float *loss_mix(int64_t index)
{
    return mixes[index];
}

static const double lk_eta = 3.0;

static enum dtype gradient_type(const struct kernel_case *c)
{
    return c->flags & CASE_TO_F32 ? DTYPE_F32 : DTYPE_BF16;
}

// Student rows 0, 1, 2 and teacher rows 3, 4, 5: with NaN, with inf, of -inf alone.
static void spoil_rows(struct kernel_tensor *tensor, int64_t first)
{
    int64_t vocab = tensor->columns;
    tensor->value[first * vocab + vocab / 3] = (double)NAN;
    tensor->value[(first + 1) * vocab + vocab / 2] = (double)INFINITY;
    for (int64_t i = 0; i < vocab; i++)
        tensor->value[(first + 2) * vocab + i] = (double)-INFINITY;
}

// The teacher is the student of another row plus as much again of its own, so that all overlaps come
// up; logits are as wide as a trained model's.
static void build_logits(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = c->shape[0], vocab = c->shape[1], teachers = c->shape[2];
    struct kernel_tensor *student =
        run_add_normal(run, "student", TENSOR_IN, c->type, rows, vocab, 3.0);
    for (int64_t r = 0; r < rows && c->flags & CASE_EXCLUDED; r++)
        student->value[r * vocab + r % vocab] = (double)-INFINITY;
    if (c->flags & CASE_NO_TEACHER)
        return;
    struct kernel_tensor *teacher =
        run_add_normal(run, "teacher", TENSOR_IN, c->type, teachers, vocab, 1.0);
    struct kernel_tensor *row = run_add(run, "teacher_row", TENSOR_IN, DTYPE_I32, rows, 1);
    for (int64_t r = 0; r < rows; r++)
        row->value[r] = (double)(c->flags & CASE_SORTED ? r * teachers / rows
                                 : r < teachers         ? r
                                                        : run_below(run, teachers));
    for (int64_t i = 0; i < teachers * vocab; i++) {
        double base = i / vocab < rows ? student->value[i] : 0.0;
        if (isfinite(base))
            teacher->value[i] = round_to(c->type, teacher->value[i] + base);
    }
    for (int64_t t = 0; t < teachers && c->flags & CASE_EXCLUDED; t++)
        teacher->value[t * vocab + t % vocab] = teacher->value[t * vocab + (t + 5) % vocab] =
            (double)-INFINITY;
    if (c->flags & CASE_NOT_FINITE) {
        spoil_rows(student, 0);
        spoil_rows(teacher, 3);
    }
}

void loss_build(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = c->shape[0], vocab = c->shape[1];
    build_logits(c, run);
    struct kernel_tensor *label = run_add(run, "label", TENSOR_IN, DTYPE_I32, rows, 1);
    for (int64_t r = 0; r < rows; r++)
        label->value[r] = r % 5 == 3 ? -1.0 : (double)run_below(run, vocab);
    if (!(c->flags & CASE_NO_GRADIENT)) {
        struct kernel_tensor *gradient =
            run_add(run, "gradient", TENSOR_OUT, gradient_type(c), rows, vocab);
        if (c->flags & CASE_IN_PLACE) {
            gradient->alias = "student";
            gradient->stride =
                vocab * (int64_t)(dtype_size(c->type) / dtype_size(gradient_type(c)));
        } else if (c->flags & CASE_STRIDED) {
            gradient->stride = vocab + 8;
        }
    }
    run_add(run, "loss", TENSOR_OUT, DTYPE_F32, rows, 1);
    run_add(run, "terms", TENSOR_OUT, DTYPE_F32, rows, LOSS_TERM_COUNT);
    run_add(run, "student_lse", TENSOR_OUT, DTYPE_F32, rows, 1);
    run_add(run, "teacher_lse", TENSOR_OUT, DTYPE_F32, rows, 1);
    run_add(run, "overlap", TENSOR_OUT, DTYPE_F32, rows, 1);
    run_add(run, "confidence", TENSOR_OUT, DTYPE_F32, rows, 1);
    run_add(run, "student_argmax", TENSOR_OUT, DTYPE_I32, rows, 1);
    run_add(run, "teacher_argmax", TENSOR_OUT, DTYPE_I32, rows, 1);
}

struct naive_loss loss_of(const struct kernel_case *c, const struct kernel_run *run, int64_t row)
{
    int64_t vocab = c->shape[1];
    struct naive_loss in = {.vocab = vocab,
                            .student = run_value(run, "student") + row * vocab,
                            .label = (int64_t)run_value(run, "label")[row],
                            .eta = lk_eta,
                            .lambda = -1.0};
    if (run_find(run, "teacher") != NULL)
        in.teacher =
            run_value(run, "teacher") + (int64_t)run_value(run, "teacher_row")[row] * vocab;
    for (int i = 0; i < LOSS_TERM_COUNT; i++)
        in.weight[i] = (double)mixes[c->shape[3]][i];
    return in;
}

void loss_expect(const struct kernel_case *c, struct kernel_run *run)
{
    for (int64_t r = 0; r < c->shape[0]; r++) {
        struct naive_loss in = loss_of(c, run, r);
        struct naive_loss_result result;
        double *gradient = run_expected(run, "gradient");
        naive_softmax_loss(&in, &result, gradient != NULL ? gradient + r * in.vocab : NULL);
        run_expected(run, "loss")[r] = result.loss;
        for (int i = 0; i < LOSS_TERM_COUNT; i++)
            run_expected(run, "terms")[r * LOSS_TERM_COUNT + i] = result.term[i];
        run_expected(run, "student_lse")[r] = result.student_lse;
        run_expected(run, "teacher_lse")[r] = result.teacher_lse;
        run_expected(run, "overlap")[r] = result.overlap;
        run_expected(run, "confidence")[r] = result.confidence;
        run_expected(run, "student_argmax")[r] = (double)result.student_argmax;
        run_expected(run, "teacher_argmax")[r] = (double)result.teacher_argmax;
    }
}

void loss_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct softmax_loss op = {.rows = c->shape[0],
                              .vocab = c->shape[1],
                              .logits_type = c->type,
                              .student = run_device(run, "student"),
                              .teacher = run_device(run, "teacher"),
                              .teacher_row = run_device(run, "teacher_row"),
                              .label = run_device(run, "label"),
                              .lk_eta = (float)lk_eta,
                              .gradient = run_device(run, "gradient"),
                              .gradient_type = gradient_type(c),
                              .loss = run_device(run, "loss"),
                              .terms = run_device(run, "terms"),
                              .student_lse = run_device(run, "student_lse"),
                              .teacher_lse = run_device(run, "teacher_lse"),
                              .overlap = run_device(run, "overlap"),
                              .confidence = run_device(run, "confidence"),
                              .student_argmax = run_device(run, "student_argmax"),
                              .teacher_argmax = run_device(run, "teacher_argmax")};
    if (op.gradient != NULL)
        op.gradient_stride = run_stride(run, "gradient");
    memcpy(op.weight, mixes[c->shape[3]], sizeof(op.weight));
    run->backend->kernels->softmax_loss(run->stream, &op);
}
