// Plans: of the shipped presets without GPU, shards or weights; held against what training takes. Values that are
// said to fit: test_plan_fit.c. `dtrain plan`: test_plan_command.c. Runs that are planned first: test_plan_runs.c.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include <cmocka.h>

#include "base/memory.h"
#include "tests/support/plan_preset.h"
#include "tests/support/program.h"
#include "tests/support/shard_fixture.h"
#include "tests/support/step_fixture.h"
#include "trainer/plan_admit.h"

// ---- presets -------------------------------------------------------------------------------------

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
            preset_open(&p, preset_dflash[n], &anchors[i], 1);
            preset_plan(&plan, &p);
            first = i == 0 ? plan.needed : first;
            assert_int_equal(plan.needed, first);
            assert_true(plan.needed < 48 * preset_gib);
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
        preset_plan(&plan, &p);
        assert_int_equal(plan.sizes.draft_vocab, 32000);
        assert_int_equal(plan.execution.group_rows % (7 * 1024), 0); // whole rounds of tiles
        assert_string_equal(plan.execution.recompute, i == 1 ? "layer" : "none");
        assert_true((double)plan.needed < wanted[i].most * (double)preset_gib);
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
        preset_plan(&plan, &p);
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
    const char *words[] = {"plan",  "--config", PRESET_V4, "--json",          "--device-memory",
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
    preset_plan(&plan, &p);
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
    preset_plan(&plan, &p);
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
        preset_plan(&plan, &p);
        p.input.subject.limit = 1; // nothing fits: the last cut stands
        preset_plan(&tight, &p);
        assert_false(tight.fits);
        assert_true(given == 3 ? tight.needed == plan.needed : tight.needed < plan.needed);
        if (given > 0)
            assert_int_equal(tight.execution.group_rows, 4096);
        if (given > 1)
            assert_string_equal(tight.execution.recompute, "none");
        p.input.subject.limit = tight.needed; // and is found when only it fits
        plan_release(&tight);
        preset_plan(&tight, &p);
        assert_true(tight.fits && tight.needed <= p.input.subject.limit);
        p.input.subject.limit = plan.needed; // without need nothing is cut
        plan_release(&tight);
        preset_plan(&tight, &p);
        assert_int_equal(tight.execution.group_rows, plan.execution.group_rows);
        assert_int_equal(tight.execution.chunk_rows, plan.execution.chunk_rows);
        assert_string_equal(tight.execution.recompute, plan.execution.recompute);
        plan_release(&tight);
        plan_release(&plan);
        preset_close(&p);
    }
}

// Of NCCL no more counts as free than has come with it: the rest of its part may be in use by another process.
static void memory_of_others_is_not_nccls(void **state)
{
    (void)state;
    size_t nccl = ranks_gpu_bytes(2), context = plan_begun_bytes(1, 0);
    assert_true(nccl > preset_gib / 2 && context > 0 && context < preset_gib);
    assert_true(plan_begun_bytes(1, preset_gib) == context);
    assert_true(plan_begun_bytes(2, 0) == context);
    assert_true(plan_begun_bytes(2, preset_gib / 4) == context + preset_gib / 4);
    assert_true(plan_begun_bytes(2, 2 * preset_gib) == context + nccl); // no more than the plan has
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
        cmocka_unit_test(memory_of_others_is_not_nccls),
    };
    return cmocka_run_group_tests(tests, open_folder, close_folder);
}
