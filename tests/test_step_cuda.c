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
    bool float8;
    int64_t draft_vocab;               // 0: the whole vocabulary
    int32_t documents[MOST_DOCUMENTS]; // tokens of each; 0: no more
    const char *sets[MOST_SETS];
};

static const struct step_case step_cases[] = {
    {"head_dim 64, grouped heads",
     16384,
     576,
     LAST_HIDDEN_POST_NORM,
     false,
     0,
     {600, 401},
     {"data.seq_len=1024", "drafter.layers=3", "drafter.head_dim=64",
      "drafter.num_attention_heads=9", "drafter.num_key_value_heads=3",
      "drafter.intermediate_size=1536", "anchors.max_anchors=64", "anchors.per=row",
      "loss.slot_decay_gamma=4"}},
    {"head_dim 128, windows, groups, chunks, noise, D-PACE",
     5003,
     256,
     LAST_HIDDEN_PRE_NORM,
     false,
     0,
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
     false,
     0,
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
     false,
     0,
     {250},
     {"data.seq_len=256", "drafter.block_size=32", "drafter.head_dim=256",
      "drafter.num_attention_heads=2", "drafter.num_key_value_heads=1",
      "drafter.intermediate_size=72", "anchors.max_anchors=7", "anchors.per=row", "loss.lk=0.5",
      "loss.nla=0.1", "loss.ce_data=0.1", "memory.chunk_rows=96"}},
    {"float8, noise, a width that packs do not divide",
     1009,
     100,
     LAST_HIDDEN_PRE_NORM,
     true,
     0,
     {301, 150},
     {"data.seq_len=512", "data.noise_std=0.05", "drafter.block_size=8", "drafter.head_dim=64",
      "drafter.num_attention_heads=4", "drafter.num_key_value_heads=2",
      "drafter.intermediate_size=136", "anchors.max_anchors=43", "anchors.per=row",
      "memory.group_rows=160"}},
    {"float8, packs",
     5003,
     256,
     LAST_HIDDEN_POST_NORM,
     true,
     0,
     {400},
     {"data.seq_len=512", "drafter.block_size=16", "drafter.head_dim=128",
      "drafter.num_attention_heads=4", "drafter.num_key_value_heads=2",
      "drafter.intermediate_size=520", "anchors.max_anchors=43", "anchors.per=row"}},
    {"EAGLE-3, head_dim 64, layers, windows, a draft vocabulary and its head",
     5003,
     192,
     LAST_HIDDEN_PRE_NORM,
     false,
     2000,
     {301, 150, 1, 61},
     {"data.seq_len=520", "drafter.kind=eagle3", "drafter.ttt_steps=5", "drafter.layers=3",
      "drafter.style=llama", "drafter.head_dim=64", "drafter.num_attention_heads=6",
      "drafter.num_key_value_heads=2", "drafter.intermediate_size=520", "drafter.fc_norm=true",
      "drafter.norm_output=true", "drafter.lm_head=trainable",
      "drafter.layer_types=[full_attention, sliding_attention, sliding_attention]",
      "drafter.sliding_window=33", "loss.ttt_decay_base=0.8", "loss.out_of_vocab=masked",
      "loss.tv=0.5", "memory.group_rows=800", "memory.chunk_rows=200"}},
    {"EAGLE-3, head_dim 128, one layer, normed residual, 16 steps by features, noise, float8",
     1009,
     256,
     LAST_HIDDEN_POST_NORM,
     true,
     0,
     {200, 7, 193},
     {"data.seq_len=400", "data.noise_std=0.05", "drafter.kind=eagle3", "drafter.ttt_steps=16",
      "drafter.layers=1", "drafter.head_dim=128", "drafter.num_attention_heads=4",
      "drafter.num_key_value_heads=1", "drafter.intermediate_size=136",
      "drafter.norm_before_fc=true", "drafter.norm_before_residual=true", "loss.mask_index=feature",
      "memory.group_rows=2000"}},
    {"a Markov head wider than the model, from the anchor, a vocabulary in parts",
     131072,
     64,
     LAST_HIDDEN_POST_NORM,
     false,
     0,
     {150, 40},
     {"data.seq_len=200", "drafter.block_size=8", "drafter.head_dim=64",
      "drafter.num_attention_heads=2", "drafter.num_key_value_heads=1",
      "drafter.intermediate_size=72", "drafter.predict_from_anchor=true", "drafter.markov_rank=256",
      "anchors.max_anchors=20", "anchors.per=row", "loss.tv=0.9", "loss.ce_teacher=0.1"}},
    {"EAGLE-3, a Markov head of a rank that packs do not divide, a draft vocabulary and its head",
     5003,
     96,
     LAST_HIDDEN_PRE_NORM,
     false,
     1999,
     {301, 61},
     {"data.seq_len=400", "drafter.kind=eagle3", "drafter.ttt_steps=4", "drafter.layers=1",
      "drafter.head_dim=64", "drafter.num_attention_heads=2", "drafter.num_key_value_heads=1",
      "drafter.intermediate_size=136", "drafter.lm_head=trainable", "drafter.markov_rank=27",
      "loss.out_of_vocab=masked", "memory.chunk_rows=200"}},
};

static struct test_backend cuda, cpu;

// ---- one step on one backend

// How a step is computed and cut; NULL and 0: as the case has it.
struct variant {
    const char *compute, *recompute;
    int64_t group_blocks, chunk_rows;
};

struct outcome {
    float *gradient;
    struct seen_slot *slots;
    int64_t count;
};

struct fixture {
    struct step_fixture f;
    struct execution plain; // as the case has it
    struct row row;
};

static void open_case(struct fixture *t, const struct step_case *c)
{
    size_t sets = 0;
    int64_t documents = 0;
    while (sets < MOST_SETS && c->sets[sets] != NULL)
        sets++;
    while (documents < MOST_DOCUMENTS && c->documents[documents] > 0)
        documents++;
    step_fixture_use(&cuda);
    step_fixture_init(&t->f, &(struct step_fixture_options){.seed = 11,
                                                            .vocab = c->vocab,
                                                            .hidden = c->hidden,
                                                            .weight_scale = 0.7,
                                                            .tied = true,
                                                            .last_hidden = c->last_hidden,
                                                            .float8 = c->float8,
                                                            .draft_vocab = c->draft_vocab,
                                                            .sets = c->sets,
                                                            .set_count = sets});
    t->f.execution.threads = CPU_THREADS;
    t->plain = t->f.execution;
    // Logits of both sides with a standard deviation of about 2, whatever H is.
    int64_t values = t->f.target.vocab_size * t->f.target.hidden_size;
    float scale = 2.0f / (0.7f * sqrtf((float)t->f.target.hidden_size));
    for (int64_t i = 0; i < values; i++)
        t->f.embed[i] *= scale;
    step_fixture_row(&t->f, &t->row, c->documents, documents, 5);
}

static void close_case(struct fixture *t)
{
    row_close(&t->row, NULL);
    step_fixture_release(&t->f);
}

static struct outcome run_step(struct fixture *t, const struct test_backend *on,
                               const struct variant *variant)
{
    struct step_fixture *f = &t->f;
    struct execution *e = &f->execution;
    *e = t->plain;
    if (variant->compute != NULL)
        snprintf(e->compute, sizeof(e->compute), "%s", variant->compute);
    if (variant->recompute != NULL)
        snprintf(e->recompute, sizeof(e->recompute), "%s", variant->recompute);
    if (variant->group_blocks > 0)
        e->group_rows = variant->group_blocks * f->sizes.block_size;
    if (variant->chunk_rows > 0)
        e->chunk_rows = variant->chunk_rows;
    step_close(&f->step); // on the backend that it was opened on
    step_fixture_use(on);
    step_fixture_open(f);
    assert_int_equal(step_row(&f->step, &t->row), 0);
    assert_true(f->seen_count > 100);
    struct outcome outcome = {step_fixture_fetch(f, f->step.grads), f->seen, f->seen_count};
    f->seen = NULL;
    f->seen_count = f->seen_capacity = 0;
    return outcome;
}

static void outcome_free(struct outcome *outcome)
{
    free(outcome->gradient);
    free(outcome->slots);
}

// ---- comparing

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

// ---- the tests, each of a case

// In fp32, and cut otherwise: the same numbers added in another order.
static void agrees(struct fixture *t, const struct outcome *exact)
{
    struct outcome whole = run_step(t, &cuda, &(struct variant){0});
    compare_slots(&whole, exact);
    compare_gradients(&t->f, &whole, exact, 1e-4);
    struct outcome cut = run_step(t, &cuda, &(struct variant){.group_blocks = 3, .chunk_rows = 37});
    compare_slots(&cut, &whole);
    compare_gradients(&t->f, &cut, &whole, 1e-5);
    outcome_free(&cut);
    outcome_free(&whole);
}

// Twice, and whatever is kept for the way back: the same bits. One layer of EAGLE-3 adds up its steps in another
// order when it is computed again.
static void repeats_bitwise(struct fixture *t, const char *compute)
{
    static const char *const levels[] = {"none", "cheap", "layer"};
    bool own_order = t->f.sizes.kind == DRAFTER_EAGLE3 && t->f.sizes.layers == 1;
    struct outcome want = run_step(t, &cuda, &(struct variant){compute, levels[0], 0, 0});
    for (size_t l = 0; l < COUNT(levels); l++) {
        if (own_order && strcmp(levels[l], "layer") == 0) {
            outcome_free(&want);
            want = run_step(t, &cuda, &(struct variant){compute, levels[l], 0, 0});
        }
        struct outcome got = run_step(t, &cuda, &(struct variant){compute, levels[l], 0, 0});
        if (!same_bits(&got, &want, t->f.params.elements))
            fail_msg("%s: other bits with recomputation %s", compute, levels[l]);
        outcome_free(&got);
    }
    outcome_free(&want);
}

// Both backends round the same tensors to bf16, so their errors against fp32 are alike. A tensor of few
// numbers (64 of a head's norm) has an error that is itself known to a tenth or two.
static void bf16_errs_like_the_cpu(struct fixture *t, const struct outcome *exact)
{
    struct outcome want = run_step(t, &cpu, &(struct variant){.compute = "bf16"});
    struct outcome got = run_step(t, &cuda, &(struct variant){.compute = "bf16"});
    for (size_t p = 0; p < t->f.params.count; p++) {
        const struct param *param = &t->f.params.items[p];
        const float *reference = exact->gradient + param->offset;
        double mine = relative_error(got.gradient + param->offset, reference, param->count);
        double its = relative_error(want.gradient + param->offset, reference, param->count);
        if (!(mine <= 1.5 * its))
            fail_msg("%s: error %g, on the CPU %g", param->name, mine, its);
        assert_true(mine > 1e-5); // it is bf16
    }
    outcome_free(&want);
    outcome_free(&got);
}

static void step_on_cuda(void **state)
{
    struct fixture t;
    open_case(&t, *state);
    struct outcome exact = run_step(&t, &cpu, &(struct variant){0});
    agrees(&t, &exact);
    repeats_bitwise(&t, "fp32");
    repeats_bitwise(&t, "bf16");
    bf16_errs_like_the_cpu(&t, &exact);
    outcome_free(&exact);
    close_case(&t);
}

int main(int argc, char **argv)
{
    static struct CMUnitTest tests[COUNT(step_cases)];
    size_t count = 0;
    int status = test_backend_named(&cuda, argc > 1 ? argv[1] : "cuda");
    if (status != 0)
        return status;
    test_backend_named(&cpu, "cpu");
    for (size_t c = 0; c < COUNT(step_cases); c++)
        if (argc <= 2 || strstr(step_cases[c].name, argv[2]) != NULL)
            tests[count++] = (struct CMUnitTest){step_cases[c].name, step_on_cuda, NULL, NULL,
                                                 (void *)&step_cases[c]};
    return _cmocka_run_group_tests(cuda.name, tests, count, NULL, NULL);
}
