// Whole steps on CUDA against the same steps on the CPU, at sizes where a kernel's tiles are many and
// end anywhere. The backend is named on the command line: cuda or cuda-generic.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/support/rows.h"
#include "tests/support/step_fixture.h"

#define COUNT(a) (sizeof(a) / sizeof(*(a)))

enum { MOST_SETS = 24, MOST_DOCUMENTS = 4, CPU_THREADS = 4 };

struct step_case {
    const char *name;
    int64_t vocab, hidden;
    enum last_hidden last_hidden;
    int32_t documents[MOST_DOCUMENTS]; // tokens of each; 0: no more
    const char *sets[MOST_SETS];
};

static const struct step_case step_cases[] = {
    {"head_dim 64, grouped heads",
     49152,
     576,
     LAST_HIDDEN_POST_NORM,
     {600, 401},
     {"data.seq_len=1024", "drafter.layers=3", "drafter.head_dim=64",
      "drafter.num_attention_heads=9", "drafter.num_key_value_heads=3",
      "drafter.intermediate_size=1536", "anchors.max_anchors=64", "anchors.per=row",
      "loss.slot_decay_gamma=4"}},
    {"head_dim 128, windows, groups, chunks, noise, D-PACE",
     5003,
     256,
     LAST_HIDDEN_PRE_NORM,
     {301, 150, 61},
     {"data.seq_len=512", "data.noise_std=0.05", "data.noise_kind=uniform", "drafter.layers=3",
      "drafter.block_size=16", "drafter.head_dim=128", "drafter.num_attention_heads=4",
      "drafter.num_key_value_heads=2", "drafter.intermediate_size=520",
      "drafter.layer_types=[full_attention, sliding_attention, sliding_attention]",
      "drafter.sliding_window=100", "anchors.max_anchors=43", "anchors.per=row", "loss.tv=0.5",
      "loss.reverse_kl=0.2", "loss.slot_weight=dpace", "memory.group_rows=160",
      "memory.chunk_rows=100"}},
    {"head_dim 96, from the anchor, window not causal",
     1009,
     96,
     LAST_HIDDEN_PRE_NORM,
     {200, 200},
     {"data.seq_len=400", "drafter.block_size=4", "drafter.head_dim=96",
      "drafter.num_attention_heads=6", "drafter.num_key_value_heads=2",
      "drafter.intermediate_size=136", "drafter.predict_from_anchor=true",
      "drafter.layer_types=[sliding_attention, full_attention]", "drafter.sliding_window=33",
      "drafter.sliding_window_non_causal=true", "anchors.max_anchors=97", "anchors.per=row",
      "loss.js=0.5", "loss.ce_teacher=0.3", "loss.slot_mask=each", "loss.normalize=count",
      "memory.group_rows=120"}},
    {"head_dim 256, blocks of 32, the largest vocabulary",
     300007,
     64,
     LAST_HIDDEN_POST_NORM,
     {250},
     {"data.seq_len=256", "drafter.block_size=32", "drafter.head_dim=256",
      "drafter.num_attention_heads=2", "drafter.num_key_value_heads=1",
      "drafter.intermediate_size=72", "anchors.max_anchors=7", "anchors.per=row", "loss.lk=0.5",
      "loss.nla=0.1", "loss.ce_data=0.1", "memory.chunk_rows=96"}},
};

static struct test_backend cuda;
static const struct test_backend *cpu(void)
{
    static struct test_backend chosen;
    test_backend_named(&chosen, "cpu");
    return &chosen;
}

// ---- one step on one backend

// How a step is cut; 0 and NULL: as the case has it.
struct variant {
    const char *compute, *recompute;
    int64_t group_blocks, chunk_rows;
};

struct outcome {
    float *gradient;
    struct seen_slot *slots;
    int64_t count;
};

static void open_case(struct step_fixture *f, const struct test_backend *on,
                      const struct step_case *c, const struct variant *variant)
{
    const char *sets[MOST_SETS + 2];
    size_t count = 0;
    while (count < MOST_SETS && c->sets[count] != NULL) {
        sets[count] = c->sets[count];
        count++;
    }
    if (variant->compute != NULL)
        sets[count++] = variant->compute;
    step_fixture_use(on);
    step_fixture_init(f, &(struct step_fixture_options){.seed = 11,
                                                        .vocab = c->vocab,
                                                        .hidden = c->hidden,
                                                        .weight_scale = 0.7,
                                                        .last_hidden = c->last_hidden,
                                                        .sets = sets,
                                                        .set_count = count});
    f->execution.threads = CPU_THREADS;
    if (variant->recompute != NULL)
        snprintf(f->execution.recompute, sizeof(f->execution.recompute), "%s", variant->recompute);
    if (variant->group_blocks > 0)
        f->execution.group_rows = variant->group_blocks * f->sizes.block_size;
    if (variant->chunk_rows > 0)
        f->execution.chunk_rows = variant->chunk_rows;
    // Logits of both sides with a standard deviation of about 2, whatever H is.
    int64_t values = f->target.vocab_size * f->target.hidden_size;
    float scale = 2.0f / (0.7f * sqrtf((float)f->target.hidden_size));
    for (int64_t i = 0; i < values; i++)
        f->head[i] *= scale;
    step_fixture_open(f);
}

static struct outcome run_step(const struct test_backend *on, const struct step_case *c,
                               const struct variant *variant)
{
    struct step_fixture f;
    struct row row;
    int64_t documents = 0;
    while (documents < MOST_DOCUMENTS && c->documents[documents] > 0)
        documents++;
    open_case(&f, on, c, variant);
    step_fixture_row(&f, &row, c->documents, documents, 5);
    assert_int_equal(step_row(&f.step, &row), 0);
    assert_true(f.seen_count > 100);
    struct outcome outcome = {step_fixture_fetch(&f, f.step.grads), f.seen, f.seen_count};
    f.seen = NULL;
    row_close(&row, NULL);
    step_fixture_release(&f);
    return outcome;
}

static void outcome_free(struct outcome *outcome)
{
    free(outcome->gradient);
    free(outcome->slots);
}

// ---- comparing

// Names and places of the gradients' tensors.
static void params_of(const struct step_case *c, struct step_fixture *f)
{
    open_case(f, cpu(), c, &(struct variant){0});
}

static void near(const char *what, int64_t slot, float got, float want)
{
    if (!(fabs((double)got - (double)want) <= 2e-5 + 1e-4 * fabs((double)want)))
        fail_msg("%s of slot %lld is %g, wanted %g", what, (long long)slot, (double)got,
                 (double)want);
}

static void compare_slots(const struct outcome *got, const struct outcome *want)
{
    assert_int_equal(got->count, want->count);
    for (int64_t i = 0; i < want->count; i++) {
        const struct seen_slot *a = &got->slots[i], *b = &want->slots[i];
        assert_true(a->block == b->block && a->slot == b->slot);
        assert_true(a->label == b->label && a->teacher_row == b->teacher_row);
        assert_true(a->student_argmax == b->student_argmax);
        assert_true(a->teacher_argmax == b->teacher_argmax);
        near("weight", i, a->weight, b->weight);
        near("loss", i, a->loss, b->loss);
        near("student_lse", i, a->student_lse, b->student_lse);
        near("teacher_lse", i, a->teacher_lse, b->teacher_lse);
        near("overlap", i, a->overlap, b->overlap);
    }
}

// As norm of the difference over norm, and the largest difference over the largest value.
static void compare_gradients(const struct step_fixture *f, const struct outcome *got,
                              const struct outcome *want, double tolerance)
{
    step_fixture_compare(f, got->gradient, want->gradient, tolerance, "gradient");
    for (size_t p = 0; p < f->params.count; p++) {
        const struct param *param = &f->params.items[p];
        double largest = 0.0, worst = 0.0;
        for (int64_t i = param->offset; i < param->offset + param->count; i++) {
            largest = fmax(largest, fabs((double)want->gradient[i]));
            worst = fmax(worst, fabs((double)got->gradient[i] - (double)want->gradient[i]));
        }
        if (!(worst <= tolerance * largest))
            fail_msg("gradient: %s off by %g of %g", param->name, worst, largest);
    }
}

static bool same_bits(const struct outcome *a, const struct outcome *b, int64_t elements)
{
    return a->count == b->count &&
           memcmp(a->slots, b->slots, (size_t)a->count * sizeof(*a->slots)) == 0 &&
           memcmp(a->gradient, b->gradient, (size_t)elements * sizeof(float)) == 0;
}

// ---- tests, each for every case

static void agrees_with_the_cpu(void **state)
{
    const struct step_case *c = *state;
    struct step_fixture f;
    struct outcome want = run_step(cpu(), c, &(struct variant){0});
    struct outcome got = run_step(&cuda, c, &(struct variant){0});
    params_of(c, &f);
    compare_slots(&got, &want);
    compare_gradients(&f, &got, &want, 1e-4);
    step_fixture_release(&f);
    outcome_free(&got);
    outcome_free(&want);
}

// Another cut of the work adds the same numbers in another order.
static void cuts_agree(void **state)
{
    const struct step_case *c = *state;
    struct step_fixture f;
    struct outcome want = run_step(&cuda, c, &(struct variant){0});
    struct outcome got = run_step(&cuda, c, &(struct variant){.group_blocks = 3, .chunk_rows = 37});
    params_of(c, &f);
    compare_slots(&got, &want);
    compare_gradients(&f, &got, &want, 1e-5);
    step_fixture_release(&f);
    outcome_free(&got);
    outcome_free(&want);
}

// Twice, and whatever is kept for the way back: the same bits.
static void repeats_bitwise(void **state)
{
    static const char *const computes[] = {"run.compute=fp32", "run.compute=bf16"};
    static const char *const levels[] = {"none", "none", "cheap", "layer"};
    const struct step_case *c = *state;
    struct step_fixture f;
    params_of(c, &f);
    for (size_t i = 0; i < COUNT(computes); i++) {
        struct variant variant = {.compute = computes[i], .recompute = levels[0]};
        struct outcome want = run_step(&cuda, c, &variant);
        for (size_t l = 1; l < COUNT(levels); l++) {
            variant.recompute = levels[l];
            struct outcome got = run_step(&cuda, c, &variant);
            if (!same_bits(&got, &want, f.params.elements))
                fail_msg("%s: other bits with recomputation %s", computes[i], levels[l]);
            outcome_free(&got);
        }
        outcome_free(&want);
    }
    step_fixture_release(&f);
}

// Both backends round the same tensors to bf16, so their errors against fp32 are alike. A tensor of few
// numbers (64 of a head's norm) has an error that is itself known to a tenth or two.
static void bf16_errs_like_the_cpu(void **state)
{
    const struct step_case *c = *state;
    struct variant rounded = {.compute = "run.compute=bf16"};
    struct step_fixture f;
    struct outcome exact = run_step(cpu(), c, &(struct variant){0});
    struct outcome want = run_step(cpu(), c, &rounded), got = run_step(&cuda, c, &rounded);
    params_of(c, &f);
    for (size_t p = 0; p < f.params.count; p++) {
        const struct param *param = &f.params.items[p];
        const float *reference = exact.gradient + param->offset;
        double mine = relative_error(got.gradient + param->offset, reference, param->count);
        double its = relative_error(want.gradient + param->offset, reference, param->count);
        if (!(mine <= 1.5 * its))
            fail_msg("%s: error %g, on the CPU %g", param->name, mine, its);
        assert_true(mine > 1e-5); // it is bf16
    }
    step_fixture_release(&f);
    outcome_free(&exact);
    outcome_free(&want);
    outcome_free(&got);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        CMUnitTestFunction run;
    } each[] = {{"agrees with the CPU", agrees_with_the_cpu},
                {"cuts agree", cuts_agree},
                {"repeats bitwise", repeats_bitwise},
                {"bf16 errs like the CPU", bf16_errs_like_the_cpu}};
    static struct CMUnitTest tests[COUNT(each) * COUNT(step_cases)];
    char *names[COUNT(tests)];
    size_t count = 0;
    int status = test_backend_named(&cuda, argc > 1 ? argv[1] : "cuda");
    if (status != 0)
        return status;
    for (size_t i = 0; i < COUNT(each); i++)
        for (size_t c = 0; c < COUNT(step_cases); c++) {
            names[count] = memory_format("%s: %s", each[i].name, step_cases[c].name);
            tests[count] =
                (struct CMUnitTest){names[count], each[i].run, NULL, NULL, (void *)&step_cases[c]};
            if (argc <= 2 || strstr(names[count], argv[2]) != NULL)
                count++;
            else
                free(names[count]);
        }
    int failed = _cmocka_run_group_tests(cuda.name, tests, count, NULL, NULL);
    for (size_t i = 0; i < count; i++)
        free(names[i]);
    return failed;
}
