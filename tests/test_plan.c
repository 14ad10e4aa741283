// Plans: of the shipped presets without GPU, shards or weights; held against what training takes; values
// that are said to fit. Runs that are planned first: test_plan_runs.c.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include <cmocka.h>

#include "base/byte_size.h"
#include "base/memory.h"
#include "tests/support/program.h"
#include "tests/support/shard_fixture.h"
#include "tests/support/step_fixture.h"
#include "trainer/files.h"
#include "trainer/plan_admit.h"
#include "trainer/plan_fit.h"
#include "trainer/plan_open.h"

static const char v4_config[] = DTRAIN_SOURCE_DIR "/configs/v4.yaml";

static const size_t gib = (size_t)1 << 30;

// ---- presets -------------------------------------------------------------------------------------

struct preset {
    struct config config;
    struct plan_input input;
};

// A shipped preset planned for a GPU, as if none were here.
static void preset_open(struct preset *p, const char *file, const char *const *sets, size_t count)
{
    struct error err = {""};
    char *path = memory_format("%s/configs/%s", DTRAIN_SOURCE_DIR, file);
    config_init(&p->config);
    if (config_load(&p->config, path, sets, count, &err) != 0 ||
        plan_input_open(&p->input, &p->config, NULL, false, &err) != 0)
        fail_msg("%s", err.text);
    free(path);
}

static void preset_close(struct preset *p)
{
    plan_input_close(&p->input);
    config_release(&p->config);
}

static void make(struct plan *plan, const struct preset *p)
{
    struct error err = {""};
    if (plan_make(plan, &p->input.subject, &p->config, NULL, &err) != 0)
        fail_msg("%s", err.text);
}

static const char *const dflash_presets[] = {"v4.yaml", "dflash-qwen3-8b.yaml"};

static void more_anchors_take_no_more_memory(void **state)
{
    (void)state;
    static const char *const anchors[] = {"max_anchors=1024", "max_anchors=3072",
                                          "max_anchors=8191"};
    for (size_t n = 0; n < 2; n++) {
        size_t first = 0;
        for (size_t i = 0; i < 3; i++) {
            struct preset p;
            struct plan plan;
            preset_open(&p, dflash_presets[n], &anchors[i], 1);
            make(&plan, &p);
            first = i == 0 ? plan.needed : first;
            assert_int_equal(plan.needed, first);
            assert_true(plan.needed < 48 * gib);
            plan_release(&plan);
            preset_close(&p);
        }
    }
}

// What the shipped EAGLE-3 preset is made for; longer rows add features and context alone.
static void eagle3_fits(void **state)
{
    (void)state;
    static const struct {
        const char *sets[2];
        double most; // GiB
    } wanted[] = {{{"seq_len=8192", "memory.mode=normal"}, 13.5},
                  {{"seq_len=8192", "memory.mode=low"}, 10.0},
                  {{"seq_len=32768", "memory.mode=normal"}, 32.0}};
    for (size_t i = 0; i < sizeof(wanted) / sizeof(*wanted); i++) {
        struct preset p;
        struct plan plan;
        preset_open(&p, "eagle3-qwen3-8b.yaml", wanted[i].sets, 2);
        make(&plan, &p);
        assert_int_equal(plan.sizes.draft_vocab, 32000);
        assert_int_equal(plan.execution.group_rows % (7 * 1024), 0); // whole rounds of tiles
        assert_string_equal(plan.execution.recompute, i == 1 ? "layer" : "none");
        assert_true((double)plan.needed < wanted[i].most * (double)gib);
        plan_release(&plan);
        preset_close(&p);
    }
}

static void more_ranks_take_less_each(void **state)
{
    (void)state;
    static const char *const computes[] = {"run.compute=bf16", "run.compute=fp32"};
    for (size_t n = 0; n < 2; n++) {
        struct preset p;
        struct plan plan;
        preset_open(&p, "v4.yaml", &computes[n], 1);
        make(&plan, &p);
        for (int64_t ranks = 1; ranks < 8; ranks++)
            assert_true(plan_device_bytes(&plan, ranks + 1) < plan_device_bytes(&plan, ranks));
        size_t masters = 3 * sizeof(float) * (size_t)plan.params.elements;
        // Whole tensors, so that the largest share is above an eighth, but they are many and small.
        size_t saved = plan_device_bytes(&plan, 1) - plan_device_bytes(&plan, 8);
        size_t copied = n == 1 ? sizeof(float) * (size_t)plan.params.elements : 0;
        assert_true(saved + copied < masters * 7 / 8 && saved + copied > masters * 8 / 10);
        plan_release(&plan);
        preset_close(&p);
    }
}

static int64_t whole(const cJSON *object, const char *name)
{
    return (int64_t)program_number(object, name);
}

// NCCL's memory is there on several GPUs, about the same on any number of them: on two as much as was measured.
static void check_nccl(const cJSON *part)
{
    const int64_t mib = 1 << 20;
    int64_t ranks = whole(part, "ranks");
    int64_t nccl = whole(cJSON_GetObjectItem(part, "groups"), "NCCL");
    assert_int_equal(nccl, ranks_gpu_bytes(ranks));
    if (ranks == 1)
        assert_int_equal(nccl, 0);
    else
        assert_true(nccl > 675 * mib && nccl < (ranks == 2 ? 677 : 1024) * mib);
}

static void check_sums(const cJSON *part)
{
    int64_t sum = 0;
    const cJSON *group;
    cJSON_ArrayForEach(group, cJSON_GetObjectItem(part, "groups"))
    {
        assert_true(group->valuedouble >= 0.0);
        sum += (int64_t)group->valuedouble;
    }
    assert_int_equal(sum, whole(part, "total"));
}

// Processor time of the children that have ended.
static double children_seconds(void)
{
    struct rusage use;
    getrusage(RUSAGE_CHILDREN, &use);
    return (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
           1e-6 * (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec);
}

static void json_adds_up(void **state)
{
    const char *folder = *state;
    char *out = fixture_path(folder, "plan.json");
    const char *words[] = {"plan",  "--config", v4_config, "--json",          "--device-memory",
                           "96GiB", "--fit",    "--set",   "run.device=cuda", NULL};
    double before = children_seconds(); // of processor, whatever else the machine does
    assert_int_equal(program_run(out, words), 0);
    assert_true(children_seconds() - before < 1.0);
    cJSON *root = program_json(out);
    const cJSON *ranks = cJSON_GetObjectItem(root, "ranks"), *part, *tensor;
    assert_int_equal(cJSON_GetArraySize(ranks), 4);
    cJSON_ArrayForEach(part, ranks)
    {
        check_sums(part);
        check_nccl(part);
    }
    check_sums(cJSON_GetObjectItem(root, "host"));
    int64_t sum = 0;
    cJSON_ArrayForEach(tensor, cJSON_GetObjectItem(root, "tensors"))
    {
        if (!cJSON_IsTrue(cJSON_GetObjectItem(tensor, "shares_memory")))
            sum += whole(tensor, "bytes");
    }
    const cJSON *one = cJSON_GetArrayItem(ranks, 0), *groups = cJSON_GetObjectItem(one, "groups");
    sum += whole(groups, "workspaces") + whole(groups, "CUDA context");
    assert_int_equal(sum, whole(one, "total"));
    assert_int_equal(sum, whole(root, "needed"));
    assert_true(cJSON_IsTrue(cJSON_GetObjectItem(root, "fits")));
    assert_int_equal(whole(cJSON_GetObjectItem(root, "disk"), "token_bytes"), 6 * 5120 * 2 + 5);
    assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(root, "fit")), 6);
    cJSON_Delete(root);
    free(out);
}

// The count of operations against a hand count: 6 per layer weight and block row, and the loss's three
// products with the head.
static void operations_are_counted(void **state)
{
    (void)state;
    static const char *const sets[] = {"rows_per_step=1", "max_anchors=512"};
    struct preset p;
    struct plan plan;
    struct plan_work work;
    preset_open(&p, "v4.yaml", sets, 2);
    make(&plan, &p);
    plan_work(&work, &plan, &p.input.subject, &p.config, &p.input.documents, 700.0);
    double attention = 5120.0 * 4096 + 5120.0 * 1024 * 2;
    double behind = 5120.0 * 4096 + 3 * 5120.0 * 17408; // in the last layer for 15 of 16 rows
    assert_true(work.forward == 2.0 * 512 * (16 * (5 * attention + 4 * behind) + 15 * behind));
    assert_true(work.backward == 2.0 * work.forward && work.recompute == 0.0);
    assert_true(work.student == 2.0 * 5120 * 248320 * 512 * 15);
    assert_true(work.teacher < work.student && work.teacher > 0.5 * work.student);
    assert_true(work.seconds > 0.2 && work.seconds < 0.25);
    plan_release(&plan);
    preset_close(&p);
}

// Five iterations of three products, the short side first, for each matrix of v4 by itself.
static void muon_is_counted(void **state)
{
    (void)state;
    static const char *const sets[] = {"optimizer.kind=muon"};
    static const double matrices[][3] = {// short side, long side, how many
                                         {5120, 5 * 5120, 1},
                                         {4096, 5120, 2 * 5},
                                         {1024, 5120, 2 * 5},
                                         {5120, 17408, 3 * 5}};
    struct preset p;
    struct plan plan;
    struct plan_work work;
    double want = 0.0;
    for (size_t i = 0; i < sizeof(matrices) / sizeof(*matrices); i++) {
        double s = matrices[i][0], l = matrices[i][1];
        want += matrices[i][2] * 5.0 * (2.0 * s * s * l + 2.0 * s * s * s + 2.0 * s * s * l);
    }
    preset_open(&p, "v4.yaml", sets, 1);
    make(&plan, &p);
    plan_work(&work, &plan, &p.input.subject, &p.config, &p.input.documents, 600.0);
    assert_true(fabs(work.update - want) <= 1e-9 * want);
    // At eight rows a step it is less than a tenth of what a step takes at such a rate.
    assert_true(work.update < 0.1 * work.flops);
    plan_release(&plan);
    preset_close(&p);
}

// ---- the plan and the step -----------------------------------------------------------------------

static struct plan_subject fixture_subject(const struct step_fixture *f)
{
    struct plan_subject subject = {.target = &f->target,
                                   .backend = step_fixture_backend(),
                                   .features = f->sizes.features,
                                   .planes = f->planes,
                                   .last_plane = f->last_plane,
                                   .last_hidden = f->last_hidden,
                                   .training = true,
                                   .ranks = 1};
    memcpy(subject.plane, f->plane, sizeof(subject.plane));
    memcpy(subject.layer_ids, f->sizes.target_layer_ids, sizeof(subject.layer_ids));
    return subject;
}

// Of each number of ranks, what the rank that takes most takes.
static void must_plan_ranks(const struct step_fixture *f, const struct plan *plan, size_t workspace)
{
    for (int ranks = 2; ranks <= 8; ranks++) {
        size_t most = 0, state = 0;
        for (int rank = 0; rank < ranks; rank++) {
            struct step_setup setup = f->step.setup;
            struct ownership ownership;
            struct arena arena;
            ownership_open(&ownership, &f->params, ranks, rank);
            setup.ownership = &ownership;
            arena_init(&arena);
            step_plan(&arena, &setup);
            most = arena.bytes > most ? arena.bytes : most;
            state += arena_group_bytes(&arena, "optimizer");
            arena_release(&arena);
            ownership_close(&ownership);
        }
        assert_int_equal(plan_device_bytes(plan, ranks), most + workspace);
        // Nothing is owned twice, but for what aligns it.
        size_t arrays = f->config.optimizer.ema > 0.0 ? 4 : 3;
        size_t padding = (size_t)ranks * arrays * (f->params.count * PARAM_ALIGNMENT * 4 + 256);
        assert_true(state < arrays * sizeof(float) * (size_t)f->params.elements + padding);
    }
}

static void training_takes_what_was_planned(void **state)
{
    (void)state;
    static const char *const variants[][2] = {
        {"run.compute=fp32", "memory.recompute=none"},
        {"run.compute=bf16", "memory.recompute=cheap"},
        {"run.compute=bf16", "memory.recompute=layer"},
        {"run.compute=bf16", "memory.logits=bf16"},
        {"memory.group_rows=64", "memory.chunk_rows=17"},
        {"optimizer.kind=muon", "run.compute=bf16"},
        {"optimizer.kind=muon", "optimizer.ema=0.99"},
        {"optimizer.ema=0.99", "run.compute=bf16"},
    };
    for (size_t i = 0; i < sizeof(variants) / sizeof(*variants); i++) {
        struct step_fixture f;
        struct plan plan;
        struct error err = {""};
        struct step_fixture_options options = {
            .seed = 3, .tied = i % 2 == 1, .sets = variants[i], .set_count = 2};
        step_fixture_init(&f, &options);
        step_fixture_open(&f);
        struct plan_subject subject = fixture_subject(&f);
        assert_int_equal(plan_make(&plan, &subject, &f.config, &f.execution, &err), 0);
        assert_int_equal(plan.arena.bytes, f.step.arena.bytes);
        assert_int_equal(plan.arena.count, f.step.arena.count);
        size_t workspace = subject.backend->stream_workspace_bytes((int)f.execution.threads);
        assert_int_equal(plan_device_bytes(&plan, 1), f.step.arena.bytes + workspace);
        must_plan_ranks(&f, &plan, workspace);
        plan_release(&plan);
        step_fixture_release(&f);
    }
}

// Every cut that the ladder offers takes no more than the first, the last one less; what the config says
// stays.
static void thriftier_cuts_take_less(void **state)
{
    (void)state;
    static const char *const sets[] = {"memory.group_rows=4096", "memory.recompute=none",
                                       "memory.chunk_rows=3000"};
    for (size_t given = 0; given <= 3; given++) {
        struct preset p;
        struct plan plan, tight;
        preset_open(&p, "v4.yaml", sets, given);
        make(&plan, &p);
        p.input.subject.limit = 1; // nothing fits: the last cut stands
        make(&tight, &p);
        assert_false(tight.fits);
        assert_true(given == 3 ? tight.needed == plan.needed : tight.needed < plan.needed);
        if (given > 0)
            assert_int_equal(tight.execution.group_rows, 4096);
        if (given > 1)
            assert_string_equal(tight.execution.recompute, "none");
        p.input.subject.limit = tight.needed; // and is found when only it fits
        plan_release(&tight);
        make(&tight, &p);
        assert_true(tight.fits && tight.needed <= p.input.subject.limit);
        p.input.subject.limit = plan.needed; // without need nothing is cut
        plan_release(&tight);
        make(&tight, &p);
        assert_int_equal(tight.execution.group_rows, plan.execution.group_rows);
        assert_int_equal(tight.execution.chunk_rows, plan.execution.chunk_rows);
        assert_string_equal(tight.execution.recompute, plan.execution.recompute);
        plan_release(&tight);
        plan_release(&plan);
        preset_close(&p);
    }
}

// ---- fits ----------------------------------------------------------------------------------------

// Bytes of the preset with one more set; the step cut as `now` unless open.
static struct plan planned_with(const struct preset *p, const char *key, int64_t value)
{
    struct config config = p->config;
    struct config_int_key found;
    struct plan plan;
    struct error err = {""};
    assert_int_equal(config_find_int(&config, key, &found, &err), 0);
    *found.value = value;
    if (plan_make(&plan, &p->input.subject, &config, NULL, &err) != 0)
        fail_msg("%s", err.text);
    return plan;
}

static void check_fit(const struct preset *p, const struct plan *now, const char *key)
{
    struct plan_fit fit;
    struct error err = {""};
    if (plan_fit_key(&fit, &p->input.subject, &p->config, now, key, true, &err) != 0)
        fail_msg("%s", err.text);
    assert_true(fit.found && fit.bounded && !fit.independent);
    assert_int_equal(fit.largest.value % fit.granule, 0);
    assert_int_equal(fit.next.value, fit.largest.value + fit.granule);
    struct plan largest = planned_with(p, fit.key, fit.largest.value);
    struct plan next = planned_with(p, fit.key, fit.next.value);
    assert_true(largest.fits && largest.needed == fit.largest.needed);
    assert_true(!next.fits && next.needed > p->input.subject.limit);
    assert_int_equal(largest.execution.group_rows, fit.cut.group_rows);
    plan_release(&next);
    plan_release(&largest);
}

static void what_is_said_to_fit_fits(void **state)
{
    (void)state;
    static const char *const sets[] = {"drafter.layer_types=[]"};
    static const size_t limits[] = {40, 48, 96, 139};
    for (size_t n = 0; n < 2; n++)
        for (size_t i = 0; i < sizeof(limits) / sizeof(*limits); i++) {
            struct preset p;
            struct plan plan;
            preset_open(&p, dflash_presets[n], sets, 1);
            p.input.subject.limit = limits[i] * gib;
            make(&plan, &p);
            check_fit(&p, &plan, "seq_len");
            check_fit(&p, &plan, "drafter.layers");
            check_fit(&p, &plan, "memory.chunk_rows");
            plan_release(&plan);
            preset_close(&p);
        }
}

// A fit of one key in v4 with a limit; the plan it starts from fits or not.
static struct plan_fit fit_with(struct preset *p, const char *key, size_t limit)
{
    struct plan plan;
    struct plan_fit fit;
    struct error err = {""};
    p->input.subject.limit = limit;
    make(&plan, p);
    if (plan_fit_key(&fit, &p->input.subject, &p->config, &plan, key, true, &err) != 0)
        fail_msg("%s", err.text);
    plan_release(&plan);
    return fit;
}

static size_t least_with(struct preset *p, const char *key, int64_t value)
{
    p->input.subject.limit = 1; // the thriftiest cut
    struct plan plan = planned_with(p, key, value);
    size_t needed = plan.needed;
    plan_release(&plan);
    return needed;
}

// Down from a value that does not fit: the smallest is tried, too, and steps are as fine as they must be.
static void small_values_are_found(void **state)
{
    (void)state;
    static const struct {
        const char *key;
        int64_t least, some, nearly;
    } keys[] = {{"data.seq_len", 2, 700, 512},
                {"drafter.layers", 1, 3, 3},
                {"drafter.block_size", 2, 7, 7}};
    static const char *const sets[] = {"drafter.layer_types=[]"};
    for (size_t i = 0; i < sizeof(keys) / sizeof(*keys); i++) {
        struct preset p;
        preset_open(&p, "v4.yaml", sets, 1);
        size_t least = least_with(&p, keys[i].key, keys[i].least);
        struct plan_fit none = fit_with(&p, keys[i].key, least / 4);
        assert_true(!none.found && none.bounded && !none.next.fits);
        assert_true(none.next.needed > least / 4 && none.next.needed <= least);
        struct plan_fit smallest = fit_with(&p, keys[i].key, least);
        assert_true(smallest.found && smallest.largest.value >= keys[i].least);
        size_t limit = least_with(&p, keys[i].key, keys[i].some);
        struct plan_fit some = fit_with(&p, keys[i].key, limit);
        assert_true(some.found && some.largest.fits && some.largest.needed <= limit);
        assert_in_range(some.largest.value, keys[i].nearly, 1 << 20);
        assert_true(some.next.value > some.largest.value && some.next.needed > limit);
        preset_close(&p);
    }
}

// A value that fits is never answered with a smaller one.
static void what_fits_is_not_made_smaller(void **state)
{
    (void)state;
    static const char *const sets[] = {"data.seq_len=9000"};
    struct preset p;
    preset_open(&p, "v4.yaml", sets, 1);
    struct plan_fit fit = fit_with(&p, "data.seq_len", least_with(&p, "data.seq_len", 9000));
    assert_true(fit.found && fit.largest.value >= 9000 && fit.next.value > fit.largest.value);
    assert_true(fit.largest.value == 9000 || fit.largest.value % fit.granule == 0);
    preset_close(&p);
}

static void independence_is_seen_not_guessed(void **state)
{
    (void)state;
    static const char *const sets[] = {"data.prefetch_rows=64"};
    struct preset p;
    preset_open(&p, "v4.yaml", NULL, 0);
    struct plan_fit rows = fit_with(&p, "data.prefetch_rows", 96 * gib);
    assert_true(rows.independent && rows.host_grows);
    struct plan_fit readers = fit_with(&p, "data.readers", 96 * gib);
    assert_true(readers.independent && !readers.host_grows);
    preset_close(&p);
    preset_open(&p, "v4.yaml", sets, 1);
    rows = fit_with(&p, "data.prefetch_rows", 96 * gib);
    assert_true(rows.found && !rows.independent && !rows.bounded && rows.largest.value == 64);
    preset_close(&p);
}

static void layer_types_follow_the_layers(void **state)
{
    (void)state;
    struct preset p;
    struct plan plan;
    struct plan_fit fit;
    struct error err = {""};
    preset_open(&p, "v4.yaml", NULL, 0);
    p.input.subject.limit = 96 * gib;
    make(&plan, &p);
    assert_int_equal(plan_fit_key(&fit, &p.input.subject, &p.config, &plan, "layers", false, &err),
                     0);
    assert_true(fit.found && fit.largest.value > 5 && fit.lists_types);
    assert_int_equal(p.config.drafter.layer_types.count, 5); // the config itself is as it was
    assert_int_equal(
        plan_fit_key(&fit, &p.input.subject, &p.config, &plan, "max_anchors", false, &err), 0);
    assert_true(fit.independent);
    plan_release(&plan);
    preset_close(&p);
}

static void keys_grow_together(void **state)
{
    (void)state;
    static const char *const keys[] = {"data.seq_len", "memory.group_rows"};
    struct preset p;
    struct plan plan;
    struct plan_fit_together fit;
    struct error err = {""};
    preset_open(&p, "v4.yaml", NULL, 0);
    p.input.subject.limit = 96 * gib;
    make(&plan, &p);
    assert_int_equal(plan_fit_together(&fit, &p.input.subject, &p.config, &plan, keys, 2, &err), 0);
    assert_true(fit.found && fit.bounded && fit.factor > 1.0);
    assert_true(fit.value[0] > 8192 && fit.value[1] > 8192);
    assert_true(fit.needed <= 96 * gib && fit.next_needed > 96 * gib);
    plan_release(&plan);
    preset_close(&p);
}

// Below the steps in which a key is tried at first, smaller ones are: not its least value at once.
static void keys_shrink_together(void **state)
{
    (void)state;
    static const char *const keys[] = {"data.seq_len", "memory.group_rows"};
    static const char *const sets[] = {"data.seq_len=1024", "memory.group_rows=512",
                                       "memory.chunk_rows=512", "memory.recompute=cheap"};
    struct preset p;
    struct plan plan;
    struct plan_fit_together fit;
    struct error err = {""};
    preset_open(&p, "v4.yaml", sets, 4);
    p.input.subject.limit = 96 * gib;
    make(&plan, &p);
    p.input.subject.limit = plan.needed - 1;
    assert_int_equal(plan_fit_together(&fit, &p.input.subject, &p.config, &plan, keys, 2, &err), 0);
    assert_true(fit.found && fit.bounded && fit.factor < 1.0);
    assert_true(fit.value[0] >= 512 && fit.value[0] < 1024);
    assert_true(fit.needed < plan.needed && fit.next_needed >= plan.needed);
    plan_release(&plan);
    preset_close(&p);
}

// ---- the command ---------------------------------------------------------------------------------

static const struct {
    const char *says;
    const char *words[9];
} refused[] = {
    {"--device-memory: much", {"--device-memory", "much"}},
    {"--device-memory: 0", {"--device-memory", "0"}},
    {"--device-memory: 96 is no amount", {"--device-memory", "96"}},
    {"memory.limit: 2 is no amount of memory with a unit; say", {"--set", "memory.limit=2"}},
    {"--gpus: 0", {"--gpus", "0"}},
    {"--gpus: two", {"--gpus", "two"}},
    {"--tflops: fast", {"--tflops", "fast"}},
    {"--vary seq_len: names keys for --fit", {"--vary", "seq_len"}},
    {"did you mean data.seq_len?", {"--fit", "--vary", "seq_lem", "--device-memory", "96GiB"}},
    {"did you mean seq_len?", {"--fit", "--vary", "data.seq_lem", "--device-memory", "96GiB"}},
    {"--vary: drafter.kind: not a key of whole numbers",
     {"--fit", "--vary", "drafter.kind", "--device-memory", "96GiB"}},
    {"has no value to start from",
     {"--fit", "--vary", "schedule.warmup_steps", "--device-memory", "96GiB"}},
    {"--target-config: ", {"--target-config", "/none/config.json"}},
    {"memory.limit: a lot is no amount of memory with a unit", {"--set", "memory.limit=a lot"}},
    {"--target-config FILE", {"--set", "target.path=/none/some-model"}},
    {"target.layer_ids: needed to plan without shards", {"--set", "target.layer_ids=[]"}},
};

static void bad_questions_are_refused(void **state)
{
    char *out = fixture_path(*state, "refused.out");
    for (size_t i = 0; i < sizeof(refused) / sizeof(*refused); i++) {
        const char *words[16] = {"plan", "--config", v4_config, "--set", "run.device=cuda"};
        for (size_t w = 0; refused[i].words[w] != NULL; w++)
            words[5 + w] = refused[i].words[w];
        int status = program_run(out, words);
        if (status != 2 || !program_says(out, refused[i].says))
            fail_msg("status %d, where '%s' is expected", status, refused[i].says);
    }
    free(out);
}

static void sizes_of_any_target_are_enough(void **state)
{
    char *out = fixture_path(*state, "sizes.out"), *sizes = fixture_path(*state, "sizes.json");
    struct error err = {""};
    const char *words[] = {"plan",
                           "--config",
                           v4_config,
                           "--set",
                           "target.path=/none/some-model",
                           "--target-config",
                           sizes,
                           "--set",
                           "run.device=cuda",
                           NULL};
    assert_int_equal(files_write_text(sizes,
                                      "{\"hidden_size\": 5120, \"vocab_size\": 248320, "
                                      "\"num_hidden_layers\": 64}\n",
                                      &err),
                     0);
    assert_int_equal(program_run(out, words), 0);
    assert_true(program_says(out, "vocabulary 248,320"));
    char *set = memory_format("target.path=%s",
                              (const char *)*state); // the folder, with nothing but a config.json
    char *config = fixture_path(*state, "config.json");
    assert_int_equal(rename(sizes, config), 0);
    const char *folder[] = {"plan", "--config", v4_config,         "--set",
                            set,    "--set",    "run.device=cuda", NULL};
    assert_int_equal(program_run(out, folder), 0);
    assert_true(program_says(out, "sizes of"));
    free(config);
    free(set);
    const char *small[] = {
        "plan",  "--config", v4_config, "--set", "run.device=cuda", "--device-memory",
        "20GiB", NULL};
    assert_int_equal(program_run(out, small), 1);
    assert_true(program_says(out, "does not fit"));
    free(sizes);
    free(out);
}

// The verdict is on several ranks, and says what holds on one.
static void more_ranks_are_judged(void **state)
{
    char *out = fixture_path(*state, "ranks.out");
    const char *words[] = {"plan",   "--config", v4_config,         "--set", "run.device=cuda",
                           "--gpus", "4",        "--device-memory", "40GiB", NULL};
    assert_int_equal(program_run(out, words), 0);
    assert_true(program_says(out, "s at 700 TFLOP/s and 4.2 TB/s for the update, on one GPU\n"));
    assert_true(program_says(out, " s on 4 GPUs\n"));
    assert_true(program_says(out, "fits on each of 4 ranks: "));
    assert_true(program_says(out, "; on one rank this cut "));
    words[7] = NULL;
    assert_int_equal(program_run(out, words), 0);
    assert_true(program_says(out, " on one; --device-memory"));
    free(out);
}

// What was given and can not be is not called given; a key is asked once, however it is named.
static void answers_are_exact(void **state)
{
    char *out = fixture_path(*state, "exact.out");
    const char *clamped[] = {"plan",
                             "--config",
                             v4_config,
                             "--set",
                             "run.device=cuda",
                             "--set",
                             "memory.group_rows=1001",
                             "--set",
                             "memory.chunk_rows=1",
                             NULL};
    assert_int_equal(program_run(out, clamped), 0);
    assert_true(program_says(out, "992      1,001 were given, which are not whole blocks of 16"));
    assert_true(program_says(out, "2        fewer were given, the least"));
    const char *twice[] = {"plan",
                           "--config",
                           v4_config,
                           "--json",
                           "--set",
                           "run.device=cuda",
                           "--device-memory",
                           "96GiB",
                           "--fit",
                           "--vary",
                           "layers,drafter.layers,layers",
                           NULL};
    assert_int_equal(program_run(out, twice), 0);
    cJSON *root = program_json(out);
    assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(root, "fit")), 2);
    assert_null(cJSON_GetObjectItem(root, "fit_together"));
    cJSON_Delete(root);
    free(out);
}

// A run obeys memory.limit whatever the device has, so the smaller of both counts.
static void the_smaller_memory_counts(void **state)
{
    char *out = fixture_path(*state, "smaller.out");
    static const struct {
        const char *device, *limit, *says;
        int status;
    } cases[] = {{"96GiB", "memory.limit=20GiB", " of 20.00 GiB (memory.limit), ", 1},
                 {"20GiB", "memory.limit=96GiB", " of 20.00 GiB (--device-memory), ", 1},
                 {"96GiB", "memory.limit=90GiB", " of 90.00 GiB (memory.limit), ", 0}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        const char *words[] = {"plan",
                               "--config",
                               v4_config,
                               "--set",
                               "run.device=cuda",
                               "--device-memory",
                               cases[i].device,
                               "--set",
                               cases[i].limit,
                               NULL};
        assert_int_equal(program_run(out, words), cases[i].status);
        assert_true(program_says(out, cases[i].says));
    }
    free(out);
}

// Of NCCL no more counts as free than has come with it: the rest of its part may be in use by another process.
static void memory_of_others_is_not_nccls(void **state)
{
    (void)state;
    size_t nccl = ranks_gpu_bytes(2), context = plan_begun_bytes(1, 0);
    assert_true(nccl > gib / 2 && context > 0 && context < gib);
    assert_true(plan_begun_bytes(1, gib) == context);
    assert_true(plan_begun_bytes(2, 0) == context);
    assert_true(plan_begun_bytes(2, gib / 4) == context + gib / 4);
    assert_true(plan_begun_bytes(2, 2 * gib) == context + nccl); // no more than the plan has
}

static int open_folder(void **state)
{
    *state = fixture_folder();
    return 0;
}

static int close_folder(void **state)
{
    fixture_folder_remove(*state);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(eagle3_fits),
        cmocka_unit_test(more_anchors_take_no_more_memory),
        cmocka_unit_test(more_ranks_take_less_each),
        cmocka_unit_test(json_adds_up),
        cmocka_unit_test(operations_are_counted),
        cmocka_unit_test(muon_is_counted),
        cmocka_unit_test(training_takes_what_was_planned),
        cmocka_unit_test(thriftier_cuts_take_less),
        cmocka_unit_test(what_is_said_to_fit_fits),
        cmocka_unit_test(small_values_are_found),
        cmocka_unit_test(what_fits_is_not_made_smaller),
        cmocka_unit_test(independence_is_seen_not_guessed),
        cmocka_unit_test(layer_types_follow_the_layers),
        cmocka_unit_test(keys_grow_together),
        cmocka_unit_test(keys_shrink_together),
        cmocka_unit_test(bad_questions_are_refused),
        cmocka_unit_test(sizes_of_any_target_are_enough),
        cmocka_unit_test(more_ranks_are_judged),
        cmocka_unit_test(answers_are_exact),
        cmocka_unit_test(the_smaller_memory_counts),
        cmocka_unit_test(memory_of_others_is_not_nccls),
    };
    return cmocka_run_group_tests(tests, open_folder, close_folder);
}
