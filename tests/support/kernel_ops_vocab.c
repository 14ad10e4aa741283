// Owns how the ops of a draft vocabulary are tested.
#include <math.h>
#include <stdlib.h>

#include "base/memory.h"
#include "tests/support/kernel_ops.h"
#include "tests/support/kernel_ops_parts.h"

static double log_sum_exp(const double *x, int64_t n)
{
    double max = -INFINITY, sum = 0.0;
    for (int64_t i = 0; i < n; i++)
        max = x[i] > max ? x[i] : max;
    for (int64_t i = 0; i < n; i++)
        sum += exp(x[i] - max);
    return max + log(sum);
}

// vocab_scan: rows, kept, others; EXCLUDED, NOT_FINITE. Which ids are kept is drawn.
static void build_ids(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t kept = c->shape[1], all = kept + c->shape[2], in = 0, out = kept;
    struct kernel_tensor *ids = run_add(run, "ids", TENSOR_IN, DTYPE_I32, all, 1);
    for (int64_t id = 0; id < all; id++) {
        bool keep = run_below(run, all - id) < kept - in;
        ids->value[keep ? in++ : out++] = (double)id;
    }
}

static double *logit_at(const struct kernel_case *c, const struct kernel_run *run, int64_t row,
                        int64_t column)
{
    int64_t kept = c->shape[1], others = c->shape[2];
    return column < kept ? run_value(run, "kept") + row * kept + column
                         : run_value(run, "others") + row * others + column - kept;
}

// Of most rows three columns share the largest logit.
static void build_ties(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t all = c->shape[1] + c->shape[2];
    for (int64_t row = 0; row < c->shape[0]; row++)
        for (int i = 0; i < 3 && row % 4 != 0; i++)
            *logit_at(c, run, row, run_below(run, all)) = 16.0;
}

// Rows 0 to 3: with NaN among the others, with NaN among the kept, with inf, of -inf alone.
static void spoil(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t kept = c->shape[1], all = kept + c->shape[2];
    *logit_at(c, run, 0, all - 1) = (double)NAN;
    *logit_at(c, run, 1, kept / 2) = (double)NAN;
    *logit_at(c, run, 2, kept) = (double)INFINITY;
    for (int64_t i = 0; i < all; i++)
        *logit_at(c, run, 3, i) = (double)-INFINITY;
}

void scan_build(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = c->shape[0], kept = c->shape[1], others = c->shape[2];
    run_add_normal(run, "kept", TENSOR_IN, c->type, rows, kept, 3.0);
    run_add_normal(run, "others", TENSOR_IN, c->type, rows, others, 3.0);
    build_ids(c, run);
    build_ties(c, run);
    for (int64_t row = 0; row < rows && kernel_case_has(c, CASE_EXCLUDED); row++)
        for (int64_t i = 0; i < (row % 2 == 0 ? kept : others); i++)
            *logit_at(c, run, row, (row % 2 == 0 ? 0 : kept) + i) = (double)-INFINITY;
    if (kernel_case_has(c, CASE_NOT_FINITE))
        spoil(c, run);
    run_add(run, "lse", TENSOR_OUT, DTYPE_F32, rows, 1);
    run_add(run, "argmax", TENSOR_OUT, DTYPE_I32, rows, 1);
}

// In the order of the ids, where the first of the largest is what is wanted.
void scan_expect(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t all = c->shape[1] + c->shape[2];
    const double *ids = run_value(run, "ids");
    double *logits = memory_alloc((size_t)all, sizeof(double));
    int64_t *column = memory_alloc((size_t)all, sizeof(*column));
    for (int64_t i = 0; i < all; i++)
        column[(int64_t)ids[i]] = i;
    for (int64_t row = 0; row < c->shape[0]; row++) {
        double max = -INFINITY;
        run_expected(run, "argmax")[row] = 0.0;
        for (int64_t id = 0; id < all; id++) {
            logits[id] = *logit_at(c, run, row, column[id]);
            if (!(logits[id] > max))
                continue;
            max = logits[id];
            run_expected(run, "argmax")[row] = (double)column[id];
        }
        run_expected(run, "lse")[row] = log_sum_exp(logits, all);
    }
    free(logits);
    free(column);
}

void scan_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct vocab_scan op = {.rows = c->shape[0],
                            .kept = c->shape[1],
                            .others = c->shape[2],
                            .logits_type = c->type,
                            .kept_logits = run_device(run, "kept"),
                            .other_logits = run_device(run, "others"),
                            .ids = run_device(run, "ids"),
                            .lse = run_device(run, "lse"),
                            .argmax = run_device(run, "argmax")};
    run->backend->kernels->vocab_scan(run->stream, &op);
}

// draft_overlap: rows, vocab, teachers; EXCLUDED, NOT_FINITE
static void build_teacher(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = c->shape[0], vocab = c->shape[1], teachers = c->shape[2];
    struct kernel_tensor *teacher =
        run_add_normal(run, "teacher", TENSOR_IN, c->type, teachers, vocab, 1.0);
    struct kernel_tensor *row = run_add(run, "teacher_row", TENSOR_IN, DTYPE_I32, rows, 1);
    struct kernel_tensor *lse = run_add(run, "teacher_lse", TENSOR_IN, DTYPE_F32, teachers, 1);
    const double *student = run_value(run, "student");
    for (int64_t i = 0; i < rows; i++)
        row->value[i] = (double)(i < teachers ? i : run_below(run, teachers));
    for (int64_t i = 0; i < teachers * vocab; i++)
        teacher->value[i] =
            round_to(c->type, teacher->value[i] + (i / vocab < rows ? student[i] : 0.0));
    // The tokens that are not kept have a share of their own.
    for (int64_t t = 0; t < teachers; t++)
        lse->value[t] = round_to(DTYPE_F32, log_sum_exp(teacher->value + t * vocab, vocab) +
                                                fabs(run_normal(run)));
    for (int64_t i = 0; i < vocab && kernel_case_has(c, CASE_EXCLUDED); i += 3)
        teacher->value[i] = run_value(run, "student")[vocab + i] = (double)-INFINITY;
}

void overlap_build(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = c->shape[0], vocab = c->shape[1];
    struct kernel_tensor *student =
        run_add_normal(run, "student", TENSOR_IN, c->type, rows, vocab, 3.0);
    build_teacher(c, run);
    if (kernel_case_has(c, CASE_NOT_FINITE)) {
        student->value[vocab / 3] = (double)NAN;
        student->value[vocab + vocab / 2] = (double)INFINITY;
        for (int64_t i = 0; i < vocab; i++)
            student->value[2 * vocab + i] = (double)-INFINITY;
        run_value(run, "teacher_lse")[3] = (double)NAN;
    }
    run_add(run, "overlap", TENSOR_OUT, DTYPE_F32, rows, 1);
}

void overlap_expect(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t vocab = c->shape[1];
    for (int64_t row = 0; row < c->shape[0]; row++) {
        int64_t t = (int64_t)run_value(run, "teacher_row")[row];
        const double *student = run_value(run, "student") + row * vocab;
        const double *teacher = run_value(run, "teacher") + t * vocab;
        double q_lse = log_sum_exp(student, vocab), p_lse = run_value(run, "teacher_lse")[t];
        double sum = 0.0;
        for (int64_t i = 0; i < vocab; i++)
            sum += fmin(exp(student[i] - q_lse), exp(teacher[i] - p_lse));
        run_expected(run, "overlap")[row] = isnan(q_lse) || isnan(p_lse) ? (double)NAN : sum;
    }
}

void overlap_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct draft_overlap op = {.rows = c->shape[0],
                               .vocab = c->shape[1],
                               .logits_type = c->type,
                               .student = run_device(run, "student"),
                               .teacher = run_device(run, "teacher"),
                               .teacher_row = run_device(run, "teacher_row"),
                               .teacher_lse = run_device(run, "teacher_lse"),
                               .overlap = run_device(run, "overlap")};
    run->backend->kernels->draft_overlap(run->stream, &op);
}

// mask_rows: rows, kept, teachers; IN_PLACE
void mask_build(const struct kernel_case *c, struct kernel_run *run)
{
    int64_t rows = c->shape[0], kept = c->shape[1], teachers = c->shape[2];
    run_add_normal(run, "weight", TENSOR_IN, DTYPE_F32, rows, 1, 1.0);
    struct kernel_tensor *row = run_add(run, "teacher_row", TENSOR_IN, DTYPE_I32, rows, 1);
    struct kernel_tensor *argmax = run_add(run, "argmax", TENSOR_IN, DTYPE_I32, teachers, 1);
    for (int64_t i = 0; i < rows; i++)
        row->value[i] = (double)run_below(run, teachers);
    for (int64_t t = 0; t < teachers; t++)
        argmax->value[t] = (double)(kept - 2 + run_below(run, 4)); // about the border
    run_add(run, "scale", TENSOR_OUT, DTYPE_F32, rows, 1)->alias =
        kernel_case_has(c, CASE_IN_PLACE) ? "weight" : NULL;
}

void mask_expect(const struct kernel_case *c, struct kernel_run *run)
{
    for (int64_t i = 0; i < c->shape[0]; i++) {
        int64_t t = (int64_t)run_value(run, "teacher_row")[i];
        bool masked = run_value(run, "argmax")[t] >= (double)c->shape[1];
        run_expected(run, "scale")[i] = masked ? 0.0 : run_value(run, "weight")[i];
    }
}

void mask_call(const struct kernel_case *c, struct kernel_run *run)
{
    struct mask_rows op = {.rows = c->shape[0],
                           .kept = c->shape[1],
                           .weight = run_device(run, "weight"),
                           .teacher_row = run_device(run, "teacher_row"),
                           .argmax = run_device(run, "argmax"),
                           .scale = run_device(run, "scale")};
    run->backend->kernels->mask_rows(run->stream, &op);
}
