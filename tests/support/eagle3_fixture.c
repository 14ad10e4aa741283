// Owns the drafter's making. What its files must hold is the tests'.
#include "tests/support/eagle3_fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/memory.h"
#include "base/rng.h"
#include "trainer/checkpoint.h"
#include "trainer/files.h"

const char *const eagle3_llama[] = {"drafter.style=llama", "drafter.layers=1",
                                    "drafter.fc_norm=true", "drafter.norm_output=true", NULL};
const char *const eagle3_llama_trainable[] = {"drafter.style=llama", "drafter.layers=2",
                                              "drafter.lm_head=trainable", NULL};
const char *const eagle3_qwen3[] = {"drafter.style=qwen3", "drafter.layers=2",
                                    "drafter.norm_before_fc=true",
                                    "drafter.norm_before_residual=true", NULL};

void eagle3_fixture_open(struct eagle3_fixture *fixture)
{
    *fixture = (struct eagle3_fixture){.checkpoint = NULL};
    struct error err = {""};
    run_fixture_open(&fixture->run);
    if (target_open(&fixture->target, run_path(&fixture->run, "target"), &err) != 0)
        fail_msg("%s", err.text);
}

void eagle3_fixture_close(struct eagle3_fixture *fixture)
{
    params_release(&fixture->params);
    vocab_map_release(&fixture->map);
    target_close(&fixture->target);
    config_release(&fixture->config);
    run_fixture_close(&fixture->run);
}

// Every third token and some others.
static void make_map(struct eagle3_fixture *fixture, int64_t size)
{
    int64_t counts[EAGLE3_V] = {0};
    struct error err = {""};
    for (int64_t v = 0; v < EAGLE3_V; v++)
        counts[v] = v % 3 == 1 ? 9 : v % 7 == 2;
    vocab_map_release(&fixture->map);
    if (vocab_map_make(&fixture->map, counts, EAGLE3_V, size, &err) != 0)
        fail_msg("%s", err.text);
}

void eagle3_fixture_resolve(struct eagle3_fixture *fixture, const char *const *sets,
                            int64_t draft_size)
{
    static const int64_t layer_ids[] = {1, 3, 5, 6};
    static const char *const common[] = {"run.dir=run",         "data.train=[train.h5]",
                                         "drafter.kind=eagle3", "drafter.ttt_steps=3",
                                         "loss.kl=1.0",         "drafter.num_key_value_heads=1"};
    const char *all[24];
    int count = 0;
    struct error err = {""};
    char *target = memory_format("target.path=%s", run_path(&fixture->run, "target"));
    for (size_t i = 0; i < sizeof(common) / sizeof(*common); i++)
        all[count++] = common[i];
    all[count++] = target;
    for (; *sets != NULL; sets++)
        all[count++] = *sets;
    config_release(&fixture->config);
    config_init(&fixture->config);
    if (config_load(&fixture->config, NULL, all, (size_t)count, &err) != 0)
        fail_msg("%s", err.text);
    free(target);
    bool four = fixture->config.target.layer_ids.count == 4;
    if (drafter_sizes_resolve(&fixture->sizes, &fixture->config.drafter, &fixture->target,
                              layer_ids, four ? 4 : 3, &err) != 0)
        fail_msg("%s", err.text);
    fixture->sizes.draft_vocab = draft_size;
    params_release(&fixture->params);
    drafter_params(&fixture->sizes, &fixture->params);
    make_map(fixture, draft_size);
}

float eagle3_fixture_value(int64_t index)
{
    return rng_normal(rng_key_make(17, 0, 0, RNG_TEST), (uint64_t)index);
}

void eagle3_fixture_write_checkpoint(struct eagle3_fixture *fixture)
{
    struct model_state state;
    struct error err = {""};
    model_state_open(&state, &fixture->params);
    for (size_t p = 0; p < fixture->params.count; p++)
        for (int64_t i = 0; i < fixture->params.items[p].count; i++)
            state.master[fixture->params.items[p].offset + i] =
                eagle3_fixture_value(fixture->params.items[p].offset + i);
    state.counters.step = EAGLE3_STEP;
    fixture->execution = (struct execution){.device = "cpu",
                                            .hardware = "a processor",
                                            .library = "a library 1.0",
                                            .compute = "fp32",
                                            .logits = "fp32",
                                            .recompute = "none",
                                            .kernels = "auto",
                                            .world_size = 1};
    const struct checkpoint_info info = {
        .config = &fixture->config,
        .execution = &fixture->execution,
        .sizes = &fixture->sizes,
        .target = &fixture->target,
        .map = fixture->sizes.draft_vocab < EAGLE3_V ? &fixture->map : NULL,
        .target_name = "some/model",
        .target_fingerprint = target_fingerprint(&fixture->target),
        .command = "dtrain"};
    const char *folder = run_path(&fixture->run, "checkpoints");
    fixture->checkpoint = run_path(&fixture->run, "checkpoints/step-%08d", EAGLE3_STEP);
    if (files_exists(fixture->checkpoint) && files_remove_folder(fixture->checkpoint, &err) != 0)
        fail_msg("%s", err.text);
    if (files_make_folder(folder, &err) != 0 || checkpoint_write(folder, &state, &info, &err) != 0)
        fail_msg("%s", err.text);
    model_state_close(&state);
}

int eagle3_fixture_export(const struct eagle3_fixture *fixture, const char *out,
                          enum export_format format, const char *allow, struct error *err)
{
    *err = (struct error){""};
    const struct export_request request = {fixture->checkpoint, out, format, NULL, allow};
    return export_command(&request, err);
}

const char *eagle3_fixture_must_export(const struct eagle3_fixture *fixture, const char *name,
                                       enum export_format format)
{
    struct error err;
    const char *out = run_path(&fixture->run, "%s", name);
    if (eagle3_fixture_export(fixture, out, format, NULL, &err) != 0)
        fail_msg("%s", err.text);
    return out;
}

const struct safetensors_entry *eagle3_fixture_must_find(const struct safetensors *model,
                                                         const char *name)
{
    const struct safetensors_entry *entry = safetensors_find(model, name);
    if (entry == NULL)
        fail_msg("%s: no tensor %s", model->path, name);
    return entry;
}
