// Whole steps against files made in float64 by tests/reference: config, target, rows, anchors,
// parameters and moments from the file; every slot, gradient and updated weight compared with it. On the
// backend named on the command line: cpu, cuda, cuda-generic.
#include <glob.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "data/safetensors.h"
#include "tests/support/config_files.h"
#include "tests/support/step_fixture.h"

#define GOLDEN DTRAIN_SOURCE_DIR "/tests/golden"

// fp32 against float64, as norm of the difference over norm.
static const double tolerance = 1e-4;

struct golden {
    struct safetensors file;
    struct config_folder folder;
    struct step_fixture fixture;
    struct row *rows;
    int64_t row_count;
};

// ---- reading the file

static const struct safetensors_entry *entry_of(const struct golden *g, const char *name)
{
    const struct safetensors_entry *entry = safetensors_find(&g->file, name);
    if (entry == NULL)
        fail_msg("%s: no %s", g->file.path, name);
    return entry;
}

static const void *values_of(const struct golden *g, const char *name, const char *dtype,
                             int64_t count)
{
    const struct safetensors_entry *entry = entry_of(g, name);
    int64_t found = 1;
    for (int i = 0; i < entry->dims; i++)
        found *= entry->shape[i];
    assert_string_equal(entry->dtype, dtype);
    if (found != count)
        fail_msg("%s has %lld values, wanted %lld", name, (long long)found, (long long)count);
    return entry->bytes;
}

static double scalar_of(const struct golden *g, const char *name)
{
    double value;
    memcpy(&value, values_of(g, name, "F64", 1), sizeof(value));
    return value;
}

// A tensor "prefix.NAME" for every parameter into a flat array.
static void read_state(const struct golden *g, const char *prefix, enum state_array array,
                       float *values)
{
    const struct params *params = &g->fixture.params;
    const struct state_layout *layout = &g->fixture.state.layout;
    for (size_t i = 0; i < params->count; i++) {
        const struct param *param = &params->items[i];
        char *name = memory_format("%s.%s", prefix, param->name);
        if (state_has(layout, array, i))
            memcpy(values + state_offset(layout, array, i), values_of(g, name, "F32", param->count),
                   (size_t)param->count * sizeof(float));
        else
            assert_null(safetensors_find(&g->file, name));
        free(name);
    }
}

static void read_params(const struct golden *g, const char *prefix, float *flat)
{
    read_state(g, prefix, STATE_MASTER, flat);
}

// The file has no other parameters than the drafter.
static void check_names(const struct golden *g)
{
    size_t found = 0;
    for (size_t i = 0; i < g->file.count; i++)
        found += strncmp(g->file.entries[i].name, "param.", 6) == 0;
    assert_int_equal(found, g->fixture.params.count);
}

// The draft vocabulary of the tensor d2t, where the file has one.
static void read_map(struct golden *g)
{
    const struct safetensors_entry *entry = safetensors_find(&g->file, "d2t");
    struct step_fixture *f = &g->fixture;
    struct error err = {0};
    if (entry == NULL)
        return;
    int64_t size = entry->shape[0], vocab = f->target.vocab_size;
    const int64_t *d2t = values_of(g, "d2t", "I64", size);
    int64_t *counts = memory_alloc((size_t)vocab, sizeof(*counts));
    for (int64_t i = 0; i < size; i++)
        counts[i + d2t[i]] = 1;
    assert_int_equal(vocab_map_make(&f->map, counts, vocab, size, &err), 0);
    assert_memory_equal(f->map.d2t, d2t, (size_t)size * sizeof(*d2t));
    free(counts);
}

// Makes a target directory of the tensors in the file.
static void write_target(const struct golden *g)
{
    static const char *const names[] = {"target.embed_tokens.weight", "target.norm.weight",
                                        "target.lm_head.weight"};
    struct safetensors_writer *writer = NULL;
    struct error err = {0};
    int index[3];
    free(config_folder_write(&g->folder, "target/config.json",
                             safetensors_metadata(&g->file, "target_config")));
    char *path = config_folder_path(&g->folder, "target/head.safetensors");
    assert_int_equal(safetensors_writer_open(&writer, path, &err), 0);
    for (int i = 0; i < 3; i++) {
        const struct safetensors_entry *entry = safetensors_find(&g->file, names[i]);
        if (entry != NULL)
            index[i] = safetensors_writer_add(writer, names[i] + strlen("target."), DTYPE_F32,
                                              entry->dims, entry->shape);
    }
    assert_int_equal(safetensors_writer_begin(writer, &err), 0);
    for (int i = 0; i < 3; i++) {
        const struct safetensors_entry *entry = safetensors_find(&g->file, names[i]);
        if (entry != NULL)
            assert_int_equal(
                safetensors_writer_write(writer, index[i], 0, entry->bytes, entry->size, &err), 0);
    }
    assert_int_equal(safetensors_writer_close(writer, true, &err), 0);
    free(path);
}

static void read_row(const struct golden *g, int64_t r, struct row *row)
{
    char name[64];
    const struct step_fixture *f = &g->fixture;
#define NAME(what) (snprintf(name, sizeof(name), "row%lld." what, (long long)r), name)
    int64_t documents = entry_of(g, NAME("doc_offsets"))->shape[0] - 1;
    const int64_t *offsets = values_of(g, NAME("doc_offsets"), "I64", documents + 1);
    int32_t *lengths = memory_alloc((size_t)documents, sizeof(*lengths));
    for (int64_t d = 0; d < documents; d++)
        lengths[d] = (int32_t)(offsets[d + 1] - offsets[d]);
    step_fixture_row(f, row, lengths, documents, 0);
    int64_t t = row->tokens;
    memcpy(row->input_ids, values_of(g, NAME("input_ids"), "I32", t), (size_t)t * sizeof(int32_t));
    memcpy(row->loss_mask, values_of(g, NAME("loss_mask"), "U8", t), (size_t)t);
    memcpy(row->hidden,
           values_of(g, NAME("hidden_states"), "BF16", t * f->planes * f->target.hidden_size),
           (size_t)(t * f->planes * f->target.hidden_size) * sizeof(bf16));
    assert_memory_equal(row->positions, values_of(g, NAME("positions"), "I32", t),
                        (size_t)t * sizeof(int32_t));
    row->supervised = 0;
    for (int64_t i = 0; i < t; i++)
        row->supervised += row->loss_mask[i];
    free(lengths);
}

static void read_rows(struct golden *g)
{
    char name[64];
    for (;; g->row_count++) {
        snprintf(name, sizeof(name), "row%lld.input_ids", (long long)g->row_count);
        if (safetensors_find(&g->file, name) == NULL)
            return;
        g->rows = memory_resize(g->rows, (size_t)g->row_count + 1, sizeof(*g->rows));
        read_row(g, g->row_count, &g->rows[g->row_count]);
    }
}

static void golden_open(struct golden *g, const char *path)
{
    struct error err = {0};
    struct step_fixture *f = &g->fixture;
    *g = (struct golden){0};
    assert_int_equal(safetensors_open(&g->file, path, &err), 0);
    config_folder_open(&g->folder);
    write_target(g);
    const char *text = safetensors_metadata(&g->file, "config_yaml");
    assert_non_null(text);
    char *config = config_folder_write(&g->folder, "config.yaml", text);
    config_init(&f->config);
    if (config_load(&f->config, config, NULL, 0, &err) != 0 ||
        target_open(&f->target, f->config.target.path, &err) != 0)
        fail_msg("%s", err.text);
    free(config);
    const char *last = safetensors_metadata(&g->file, "last_hidden");
    f->last_hidden = strcmp(last, "pre_norm") == 0 ? LAST_HIDDEN_PRE_NORM : LAST_HIDDEN_POST_NORM;
    read_map(g);
    step_fixture_resolve(f, f->config.target.layer_ids.items,
                         (int64_t)f->config.target.layer_ids.count);
    check_names(g);
    read_params(g, "param", f->state.master);
    read_state(g, "adam_m", STATE_M, f->state.m);
    read_state(g, "adam_v", STATE_V, f->state.v);
    read_rows(g);
}

static void golden_close(struct golden *g)
{
    for (int64_t r = 0; r < g->row_count; r++)
        row_close(&g->rows[r], NULL);
    free(g->rows);
    step_fixture_release(&g->fixture);
    config_folder_close(&g->folder);
    safetensors_close(&g->file);
}

// ---- comparing

// A file has the slots of nonzero weight; those that are masked are seen as well.
static void forget_masked(struct step_fixture *f)
{
    int64_t kept = 0;
    for (int64_t i = 0; i < f->seen_count; i++)
        if (f->seen[i].weight != 0.0f)
            f->seen[kept++] = f->seen[i];
    f->seen_count = kept;
}

static void check_slot_numbers(const struct golden *g, const char *name, size_t field)
{
    const struct step_fixture *f = &g->fixture;
    const int32_t *want = values_of(g, name, "I32", f->seen_count);
    for (int64_t i = 0; i < f->seen_count; i++) {
        int32_t got;
        memcpy(&got, (const unsigned char *)&f->seen[i] + field, sizeof(got));
        if (got != want[i])
            fail_msg("%s[%lld] is %d, wanted %d", name, (long long)i, got, want[i]);
    }
}

// Each value by itself, not as a norm: a slot that is wrong must not hide among the others.
static void check_slot_values(const struct golden *g, const char *name, size_t field)
{
    const struct step_fixture *f = &g->fixture;
    const float *want = values_of(g, name, "F32", f->seen_count);
    for (int64_t i = 0; i < f->seen_count; i++) {
        float got;
        memcpy(&got, (const unsigned char *)&f->seen[i] + field, sizeof(got));
        double error = fabs((double)got - (double)want[i]);
        if (!(error <= 2e-5 + tolerance * fabs((double)want[i])))
            fail_msg("%s[%lld] is %g, wanted %g", name, (long long)i, (double)got, (double)want[i]);
    }
}

static void check_slots(const struct golden *g)
{
#define FIELD(member) offsetof(struct seen_slot, member)
    check_slot_numbers(g, "slots.row", FIELD(row));
    check_slot_numbers(g, "slots.block", FIELD(block));
    check_slot_numbers(g, "slots.slot", FIELD(slot));
    check_slot_numbers(g, "slots.label", FIELD(label));
    check_slot_numbers(g, "slots.teacher_row", FIELD(teacher_row));
    check_slot_numbers(g, "slots.student_argmax", FIELD(student_argmax));
    check_slot_numbers(g, "slots.teacher_argmax", FIELD(teacher_argmax));
    check_slot_values(g, "slots.weight", FIELD(weight));
    check_slot_values(g, "slots.loss", FIELD(loss));
    check_slot_values(g, "slots.student_lse", FIELD(student_lse));
    check_slot_values(g, "slots.teacher_lse", FIELD(teacher_lse));
    check_slot_values(g, "slots.overlap", FIELD(overlap));
#undef FIELD
}

static void near(const struct golden *g, const char *name, double got)
{
    double want = scalar_of(g, name);
    if (!(fabs(got - want) <= tolerance * fabs(want)))
        fail_msg("%s is %.9g, wanted %.9g", name, got, want);
}

static void check_scalars(const struct golden *g, const struct step_outcome *outcome)
{
    const struct metrics *metrics = &g->fixture.step.metrics;
    near(g, "scalar.loss", metrics_loss(metrics, g->fixture.config.loss.normalize));
    near(g, "scalar.weight_sum", metrics->weight);
    near(g, "scalar.grad_norm", outcome->grad_norm);
    near(g, "scalar.clip_factor", outcome->clip_factor);
    if (safetensors_find(&g->file, "scalar.accept_len") == NULL) {
        assert_true(metrics->slots == 0.0);
        return;
    }
    near(g, "scalar.accept_len", metrics_accept_len(metrics));
    near(g, "scalar.eal_marginal", metrics_eal_marginal(metrics));
    int64_t b = g->fixture.sizes.block_size;
    const float *acc = values_of(g, "metrics.acc", "F32", b);
    bool conditional = safetensors_find(&g->file, "metrics.cond_acc") != NULL;
    const float *reached = conditional ? values_of(g, "metrics.cond_acc", "F32", b) : NULL;
    for (int k = 0; k < b; k++) {
        if (metrics->scored[k] > 0.0)
            assert_float_equal(metrics_accuracy(metrics, k), acc[k], 1e-6);
        if (conditional && metrics->reached[k] > 0.0)
            assert_float_equal(metrics_conditional(metrics, k), reached[k], 1e-6);
    }
    if (conditional)
        near(g, "scalar.overlap", metrics_overlap(metrics));
}

// What the sum of gradients is divided by.
static double divisor_of(const struct step_fixture *f)
{
    const struct metrics *metrics = &f->step.metrics;
    return f->config.loss.normalize == NORMALIZE_COUNT ? metrics->slots : metrics->weight;
}

// Gradients in the file are of the loss that has been divided.
static void check_gradients(const struct golden *g)
{
    const struct step_fixture *f = &g->fixture;
    size_t n = (size_t)f->params.elements;
    float *want = memory_alloc(n, sizeof(*want)), *got = step_fixture_fetch(f, f->step.grads);
    double divisor = divisor_of(f);
    read_params(g, "grad", want);
    for (size_t i = 0; i < n && divisor > 0.0; i++)
        got[i] = (float)((double)got[i] / divisor);
    step_fixture_compare(f, got, want, tolerance, "gradient");
    free(want);
    free(got);
}

// Before the second step AdamW moves a weight by lr g / (|g| + eps), so that an error of 1e-9 in a
// gradient near eps shows in full. Such weights are left to check_change.
static void check_updated(const struct golden *g)
{
    const struct step_fixture *f = &g->fixture;
    size_t n = (size_t)f->params.elements;
    float *want = memory_alloc(n, sizeof(*want)), *gradient = memory_alloc(n, sizeof(*gradient));
    float *got = step_fixture_fetch(f, f->step.master);
    read_params(g, "updated", want);
    read_params(g, "grad", gradient);
    for (size_t i = 0; i < n; i++)
        if (fabs((double)gradient[i]) < 100.0 * f->config.optimizer.eps)
            got[i] = want[i];
    step_fixture_compare(f, got, want, tolerance, "updated");
    free(got);
    free(gradient);
    free(want);
}

// The update by itself, from the file's gradients: weights are so much larger than their change that
// comparing them says little, and AdamW's first steps make much of errors in tiny gradients.
static void check_change(struct golden *g)
{
    struct step_fixture *f = &g->fixture;
    const struct backend *backend = step_fixture_backend();
    struct step_outcome outcome;
    size_t n = (size_t)f->params.elements;
    float *want = memory_alloc(n, sizeof(*want));
    step_load(&f->step, &f->state);
    read_params(g, "grad", want);
    for (size_t i = 0; i < n; i++)
        want[i] = (float)((double)want[i] * divisor_of(f));
    backend->copy_in(f->step.stream, f->step.grads, want, n * sizeof(float));
    backend->sync(f->step.stream);
    step_apply(&f->step, scalar_of(g, "scalar.lr"), (int64_t)scalar_of(g, "scalar.step"), &outcome);
    float *got = step_fixture_fetch(f, f->step.master);
    if (outcome.empty)
        assert_memory_equal(got, f->state.master, n * sizeof(float));
    read_params(g, "updated", want);
    for (size_t i = 0; i < n; i++) {
        want[i] -= f->state.master[i];
        got[i] -= f->state.master[i];
    }
    step_fixture_compare(f, got, want, tolerance, "change");
    free(want);
    free(got);
}

// ---- the step

// How the step is cut must not matter.
struct cut {
    int64_t group_blocks; // 0: as chosen
    int64_t chunk_rows;   // 0: as chosen
    const char *recompute;
    int64_t threads;
};
static const struct cut cuts[] = {
    {0, 0, "none", 1}, {1, 2, "cheap", 1}, {2, 7, "layer", 2}, {3, 11, "none", 1}};
enum { CUTS = sizeof(cuts) / sizeof(*cuts) };

static void run_rows(struct golden *g)
{
    struct step_fixture *f = &g->fixture;
    char name[64];
    for (int64_t r = 0; r < g->row_count; r++) {
        snprintf(name, sizeof(name), "row%lld.noise", (long long)r);
        if (f->config.data.noise_std > 0.0)
            step_fixture_force_noise((const void *)entry_of(g, name)->bytes);
        snprintf(name, sizeof(name), "row%lld.anchors", (long long)r);
        int64_t count = entry_of(g, name)->shape[0];
        const int32_t *anchors = values_of(g, name, "I32", count);
        assert_int_equal(step_row_anchors(&f->step, &g->rows[r], anchors, count), 0);
    }
}

static void check_step(struct golden *g, const struct cut *cut)
{
    struct step_fixture *f = &g->fixture;
    struct step_outcome outcome;
    if (cut->group_blocks > 0)
        f->execution.group_rows = cut->group_blocks * f->sizes.block_size;
    if (cut->chunk_rows > 0)
        f->execution.chunk_rows = cut->chunk_rows;
    f->execution.threads = cut->threads;
    snprintf(f->execution.recompute, sizeof(f->execution.recompute), "%s", cut->recompute);
    step_fixture_open(f);
    run_rows(g);
    forget_masked(f);
    check_slots(g);
    check_gradients(g);
    step_apply(&f->step, scalar_of(g, "scalar.lr"), (int64_t)scalar_of(g, "scalar.step"), &outcome);
    check_scalars(g, &outcome);
    assert_int_equal(outcome.empty, f->seen_count == 0);
    assert_int_equal(outcome.applied, f->seen_count > 0);
    check_updated(g);
    check_change(g);
}

static void recorded_step(void **state)
{
    struct golden g;
    golden_open(&g, *state);
    for (int i = 0; i < CUTS; i++)
        check_step(&g, &cuts[i]);
    golden_close(&g);
}

// ---- loss terms by themselves

enum { MOST_ROWS = 64 };

static const char *const term_names[LOSS_TERM_COUNT] = {
    "kl", "reverse_kl", "js", "ce_teacher", "ce_data", "tv", "nla", "lk"};

// Logits [n, V] in float64, rounded once.
static float *logits_of(const struct golden *g, const char *hidden_name, int64_t n, int64_t v,
                        int64_t h)
{
    const float *hidden = values_of(g, hidden_name, "F32", n * h);
    const float *head = values_of(g, "head", "F32", v * h);
    float *logits = memory_alloc((size_t)(n * v), sizeof(*logits));
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < v; j++) {
            double sum = 0.0;
            for (int64_t k = 0; k < h; k++)
                sum += (double)hidden[i * h + k] * (double)head[j * h + k];
            logits[i * v + j] = (float)sum;
        }
    return logits;
}

static void check_term(const struct golden *g, struct softmax_loss op, int term)
{
    float loss[MOST_ROWS];
    char *name = memory_format("loss.%s", term_names[term]);
    const double *want = values_of(g, name, "F64", op.rows);
    struct stream *stream = backend_cpu()->stream_open(&(struct stream_options){
        .threads = 2, .workspace_bytes = backend_cpu()->stream_workspace_bytes(2)});
    op.loss = loss;
    op.weight[term] = 1.0f;
    kernels_cpu.softmax_loss(stream, &op);
    backend_cpu()->stream_close(stream);
    for (int64_t i = 0; i < op.rows; i++)
        if (!(fabs((double)loss[i] - want[i]) <= 1e-6 + 1e-5 * fabs(want[i])))
            fail_msg("%s[%lld] is %g, wanted %g", name, (long long)i, (double)loss[i], want[i]);
    free(name);
    name = memory_format("grad_logits.%s", term_names[term]);
    const float *gradient = values_of(g, name, "F32", op.rows * op.vocab);
    for (int64_t i = 0; i < op.rows; i++) {
        const float *got = (const float *)op.gradient + i * op.vocab;
        double size = 0.0, error = 0.0;
        for (int64_t j = 0; j < op.vocab; j++) {
            double difference = (double)got[j] - (double)gradient[i * op.vocab + j];
            size += (double)gradient[i * op.vocab + j] * (double)gradient[i * op.vocab + j];
            error += difference * difference;
        }
        // Where student and teacher nearly agree a gradient is the difference of nearly equal
        // probabilities, which fp32 holds to 1e-7.
        if (!(sqrt(error) <= 1e-6 + 1e-5 * sqrt(size)))
            fail_msg("%s, row %lld: off by %g of %g", name, (long long)i, sqrt(error), sqrt(size));
    }
    free(name);
}

static void recorded_terms(void **state)
{
    struct golden g = {0};
    struct error err = {0};
    float terms[MOST_ROWS * LOSS_TERM_COUNT], student_lse[MOST_ROWS], teacher_lse[MOST_ROWS];
    float overlap[MOST_ROWS], confidence[MOST_ROWS];
    int32_t student_argmax[MOST_ROWS], teacher_argmax[MOST_ROWS], teacher_row[MOST_ROWS];
    (void)state;
    assert_int_equal(safetensors_open(&g.file, GOLDEN "/loss_terms.safetensors", &err), 0);
    const struct safetensors_entry *head = entry_of(&g, "head");
    int64_t n = entry_of(&g, "labels")->shape[0], v = head->shape[0], h = head->shape[1];
    assert_true(n <= MOST_ROWS);
    for (int32_t i = 0; i < n; i++)
        teacher_row[i] = i;
    float *student = logits_of(&g, "student_hidden", n, v, h);
    float *teacher = logits_of(&g, "teacher_hidden", n, v, h);
    float *gradient = memory_alloc((size_t)(n * v), sizeof(*gradient));
    const struct softmax_loss op = {.rows = n,
                                    .vocab = v,
                                    .logits_type = DTYPE_F32,
                                    .student = student,
                                    .teacher = teacher,
                                    .teacher_row = teacher_row,
                                    .label = values_of(&g, "labels", "I32", n),
                                    .lk_eta = 3.0f,
                                    .gradient = gradient,
                                    .gradient_type = DTYPE_F32,
                                    .gradient_stride = v,
                                    .terms = terms,
                                    .student_lse = student_lse,
                                    .teacher_lse = teacher_lse,
                                    .overlap = overlap,
                                    .confidence = confidence,
                                    .student_argmax = student_argmax,
                                    .teacher_argmax = teacher_argmax};
    for (int term = 0; term < LOSS_TERM_COUNT; term++)
        check_term(&g, op, term);
    const double *overlaps = values_of(&g, "overlap", "F64", n);
    for (int64_t i = 0; i < n; i++)
        assert_true(fabs((double)overlap[i] - overlaps[i]) <= 1e-6);
    free(gradient);
    free(teacher);
    free(student);
    safetensors_close(&g.file);
}

// ---- the files

static int is_step(const char *path)
{
    struct safetensors file;
    struct error err = {0};
    if (safetensors_open(&file, path, &err) != 0)
        return 0;
    int found = safetensors_metadata(&file, "config_yaml") != NULL;
    safetensors_close(&file);
    return found;
}

enum { MOST_FILES = 64, LEAST_STEPS = 23 };

int main(int argc, char **argv)
{
    static struct CMUnitTest tests[MOST_FILES + 1];
    struct test_backend on;
    size_t count = 0;
    int status = test_backend_named(&on, argc > 1 ? argv[1] : "cpu");
    if (status != 0)
        return status;
    step_fixture_use(&on);
    glob_t found;
    if (glob(GOLDEN "/*.safetensors", 0, NULL, &found) != 0 || found.gl_pathc > MOST_FILES)
        return 1;
    for (size_t i = 0; i < found.gl_pathc; i++)
        if (is_step(found.gl_pathv[i]))
            tests[count++] = (struct CMUnitTest){.name = strrchr(found.gl_pathv[i], '/') + 1,
                                                 .test_func = recorded_step,
                                                 .initial_state = found.gl_pathv[i]};
    if (count < LEAST_STEPS) // a file that does not open would go unseen
        return 1;
    if (strcmp(on.name, "cpu") == 0)
        tests[count++] = (struct CMUnitTest)cmocka_unit_test(recorded_terms);
    int failed = _cmocka_run_group_tests(on.name, tests, count, NULL, NULL);
    globfree(&found);
    return failed;
}
