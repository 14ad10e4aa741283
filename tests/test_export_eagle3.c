// EAGLE-3 drafters on disk: what a checkpoint and `dtrain export` hold in both layouts, what is refused with
// which reason, and starting from them again, from other spellings and from what other trainers release.
#include "trainer/export.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

#include "base/bf16.h"
#include "base/log.h"
#include "base/rng.h"
#include "tests/support/model_config.h"
#include "tests/support/run_fixture.h"
#include "trainer/checkpoint.h"
#include "trainer/files.h"
#include "trainer/release.h"

enum { H = 8, V = 64, VD = 20, STEP = 3 };

// A drafter with weights, a map and a target on disk, not trained.
static struct {
    struct run_fixture run;
    struct config config;
    struct target target;
    struct drafter_sizes sizes;
    struct params params;
    struct vocab_map map;
    struct execution execution;
    const char *checkpoint;
} at;

// ---- the drafter ---------------------------------------------------------------------------------

static int open_test(void **state)
{
    (void)state;
    struct error err = {""};
    run_fixture_open(&at.run);
    if (target_open(&at.target, run_path(&at.run, "target"), &err) != 0)
        fail_msg("%s", err.text);
    return 0;
}

static int close_test(void **state)
{
    (void)state;
    params_release(&at.params);
    vocab_map_release(&at.map);
    target_close(&at.target);
    config_release(&at.config);
    run_fixture_close(&at.run);
    return 0;
}

// Every third token and some others.
static void make_map(int64_t size)
{
    int64_t counts[V] = {0};
    struct error err = {""};
    for (int64_t v = 0; v < V; v++)
        counts[v] = v % 3 == 1 ? 9 : v % 7 == 2;
    vocab_map_release(&at.map);
    if (vocab_map_make(&at.map, counts, V, size, &err) != 0)
        fail_msg("%s", err.text);
}

// From `sets` beside what every drafter here has; draft_size V: no map.
static void resolve(const char *const *sets, int64_t draft_size)
{
    static const int64_t layer_ids[] = {1, 3, 5, 6};
    static const char *const common[] = {"run.dir=run",         "data.train=[train.h5]",
                                         "drafter.kind=eagle3", "drafter.ttt_steps=3",
                                         "loss.kl=1.0",         "drafter.num_key_value_heads=1"};
    const char *all[24];
    int count = 0;
    struct error err = {""};
    char *target = memory_format("target.path=%s", run_path(&at.run, "target"));
    for (size_t i = 0; i < sizeof(common) / sizeof(*common); i++)
        all[count++] = common[i];
    all[count++] = target;
    for (; *sets != NULL; sets++)
        all[count++] = *sets;
    config_release(&at.config);
    config_init(&at.config);
    if (config_load(&at.config, NULL, all, (size_t)count, &err) != 0)
        fail_msg("%s", err.text);
    free(target);
    bool four = at.config.target.layer_ids.count == 4;
    if (drafter_sizes_resolve(&at.sizes, &at.config.drafter, &at.target, layer_ids, four ? 4 : 3,
                              &err) != 0)
        fail_msg("%s", err.text);
    at.sizes.draft_vocab = draft_size;
    params_release(&at.params);
    drafter_params(&at.sizes, &at.params);
    make_map(draft_size);
}

static float value_at(int64_t index)
{
    return rng_normal(rng_key_make(17, 0, 0, RNG_TEST), (uint64_t)index);
}

// A checkpoint of these weights.
static void write_checkpoint(void)
{
    struct model_state state;
    struct error err = {""};
    model_state_open(&state, &at.params);
    for (size_t p = 0; p < at.params.count; p++)
        for (int64_t i = 0; i < at.params.items[p].count; i++)
            state.master[at.params.items[p].offset + i] = value_at(at.params.items[p].offset + i);
    state.counters.step = STEP;
    at.execution = (struct execution){.device = "cpu",
                                      .hardware = "a processor",
                                      .library = "a library 1.0",
                                      .compute = "fp32",
                                      .logits = "fp32",
                                      .recompute = "none",
                                      .kernels = "auto",
                                      .world_size = 1};
    const struct checkpoint_info info = {.config = &at.config,
                                         .execution = &at.execution,
                                         .sizes = &at.sizes,
                                         .target = &at.target,
                                         .map = at.sizes.draft_vocab < V ? &at.map : NULL,
                                         .target_name = "some/model",
                                         .target_fingerprint = target_fingerprint(&at.target),
                                         .command = "dtrain"};
    const char *folder = run_path(&at.run, "checkpoints");
    at.checkpoint = run_path(&at.run, "checkpoints/step-%08d", STEP);
    if (files_exists(at.checkpoint) && files_remove_folder(at.checkpoint, &err) != 0)
        fail_msg("%s", err.text);
    if (files_make_folder(folder, &err) != 0 || checkpoint_write(folder, &state, &info, &err) != 0)
        fail_msg("%s", err.text);
    model_state_close(&state);
}

static const char *const llama[] = {"drafter.style=llama", "drafter.layers=1",
                                    "drafter.fc_norm=true", "drafter.norm_output=true", NULL};
static const char *const llama_trainable[] = {"drafter.style=llama", "drafter.layers=2",
                                              "drafter.lm_head=trainable", NULL};
static const char *const qwen3[] = {"drafter.style=qwen3", "drafter.layers=2",
                                    "drafter.norm_before_fc=true",
                                    "drafter.norm_before_residual=true", NULL};

// ---- files ---------------------------------------------------------------------------------------

static int export_to(const char *out, enum export_format format, const char *allow,
                     struct error *err)
{
    *err = (struct error){""};
    const struct export_request request = {at.checkpoint, out, format, NULL, allow};
    return export_command(&request, err);
}

static const char *must_export(const char *name, enum export_format format)
{
    struct error err;
    const char *out = run_path(&at.run, "%s", name);
    if (export_to(out, format, NULL, &err) != 0)
        fail_msg("%s", err.text);
    return out;
}

static void must_state(const char *directory, const char *wanted)
{
    cJSON *config = model_config_read(directory), *all = cJSON_Parse(wanted);
    assert_non_null(all);
    char *text = cJSON_Print(config);
    if (!cJSON_Compare(config, all, true))
        fail_msg("config.json is\n%s", text);
    cJSON_free(text);
    cJSON_Delete(all);
    cJSON_Delete(config);
}

static void open_model(const char *directory, struct safetensors *model)
{
    struct error err = {""};
    char *path = memory_format("%s/model.safetensors", directory);
    if (safetensors_open(model, path, &err) != 0)
        fail_msg("%s", err.text);
    free(path);
}

static const struct safetensors_entry *must_find(const struct safetensors *model, const char *name)
{
    const struct safetensors_entry *entry = safetensors_find(model, name);
    if (entry == NULL)
        fail_msg("%s: no tensor %s", model->path, name);
    return entry;
}

static bf16 bf16_at(const struct safetensors_entry *entry, int64_t index)
{
    bf16 value;
    memcpy(&value, entry->bytes + (size_t)index * sizeof(value), sizeof(value));
    return value;
}

static bf16 target_bf16(const struct target_tensor *tensor, int64_t index)
{
    return tensor->dtype == DTYPE_BF16 ? ((const bf16 *)tensor->data)[index]
                                       : bf16_from_float(((const float *)tensor->data)[index]);
}

// A parameter's values, rounded, under a name of the file.
static void must_hold_param(const struct safetensors *model, const char *name, const char *param)
{
    const struct safetensors_entry *entry = must_find(model, name);
    const struct param *p = params_find(&at.params, param);
    assert_non_null(p);
    assert_string_equal(entry->dtype, "BF16");
    assert_int_equal(entry->dims, p->dims);
    for (int d = 0; d < p->dims; d++)
        assert_int_equal(entry->shape[d], p->shape[d]);
    for (int64_t i = 0; i < p->count; i++)
        assert_int_equal(bf16_at(entry, i), bf16_from_float(value_at(p->offset + i)));
}

// Row r of the tensor is the target's row ids[r].
static void must_hold_rows(const struct safetensors *model, const char *name,
                           const struct target_tensor *tensor, const int32_t *ids, int64_t rows)
{
    const struct safetensors_entry *entry = must_find(model, name);
    assert_string_equal(entry->dtype, "BF16");
    assert_int_equal(entry->shape[0], rows);
    assert_int_equal(entry->shape[1], H);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < H; i++)
            assert_int_equal(bf16_at(entry, r * H + i),
                             target_bf16(tensor, (ids != NULL ? ids[r] : r) * H + i));
}

static void must_hold_map(const struct safetensors *model)
{
    const struct safetensors_entry *d2t = must_find(model, "d2t"), *t2d = must_find(model, "t2d");
    assert_string_equal(d2t->dtype, "I64");
    assert_string_equal(t2d->dtype, "BOOL");
    assert_int_equal(d2t->shape[0], VD);
    assert_int_equal(t2d->shape[0], V);
    int64_t kept = 0;
    for (int64_t v = 0; v < V; v++) {
        assert_int_equal(t2d->bytes[v], at.map.t2d[v]);
        if (t2d->bytes[v] == 0)
            continue;
        int64_t offset;
        memcpy(&offset, d2t->bytes + (size_t)kept * sizeof(offset), sizeof(offset));
        assert_int_equal(kept++ + offset, v);
    }
    assert_int_equal(kept, VD);
}

// ---- what is written -----------------------------------------------------------------------------

static void specforge_has_midlayer_and_the_kept_rows(void **state)
{
    (void)state;
    struct safetensors model;
    resolve(llama, VD);
    write_checkpoint();
    const char *out = must_export("specforge", EXPORT_SPECFORGE);
    open_model(out, &model);
    must_hold_param(&model, "fc.weight", "fc.weight");
    must_hold_param(&model, "fc_norm.2.weight", "fc_norm.2.weight");
    must_hold_param(&model, "norm.weight", "norm.weight");
    static const char *const first[] = {
        "input_layernorm",  "hidden_norm",      "post_attention_layernorm", "self_attn.q_proj",
        "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",         "mlp.gate_proj",
        "mlp.up_proj",      "mlp.down_proj"};
    enum { FIRST = sizeof(first) / sizeof(*first) };
    for (int i = 0; i < FIRST; i++) {
        char *name = memory_format("midlayer.%s.weight", first[i]);
        char *param = memory_format("layers.0.%s.weight", first[i]);
        must_hold_param(&model, name, param);
        free(param);
        free(name);
    }
    assert_int_equal(must_find(&model, "midlayer.self_attn.q_proj.weight")->shape[1], 2 * H);
    assert_int_equal(must_find(&model, "fc.weight")->shape[1], 3 * H);
    must_hold_rows(&model, "lm_head.weight", &at.target.head, at.map.ids, VD);
    must_hold_map(&model);
    assert_int_equal(model.count, 2 + 3 + FIRST + 3); // no embedding, nothing else
    safetensors_close(&model);
    must_state(out, "{\"architectures\": [\"LlamaForCausalLMEagle3\"], \"eagle_config\": {"
                    "\"eagle_aux_hidden_state_layer_ids\": [1, 3, 5], "
                    "\"use_aux_hidden_state\": true}, \"target_hidden_size\": 8,"
                    "\"draft_vocab_size\": 20, \"fc_norm\": true, \"norm_output\": true,"
                    "\"model_type\": \"llama\", \"num_hidden_layers\": 1, \"hidden_size\": 8,"
                    "\"intermediate_size\": 12, \"num_attention_heads\": 2,"
                    "\"num_key_value_heads\": 1, \"head_dim\": 4, \"hidden_act\": \"silu\","
                    "\"rms_norm_eps\": 1e-06, \"rope_theta\": 10000, \"rope_scaling\": null,"
                    "\"is_neox_style\": true, \"max_position_embeddings\": 1024,"
                    "\"attention_bias\": false, \"vocab_size\": 64,"
                    "\"tie_word_embeddings\": false, \"dtype\": \"bfloat16\"}");
}

// vLLM and speculators call later layers' norm of their input input_layernorm, SGLang hidden_norm.
static void later_layers_have_both_names_of_their_norm(void **state)
{
    (void)state;
    struct safetensors model;
    resolve(llama_trainable, VD);
    write_checkpoint();
    const char *out = must_export("specforge", EXPORT_SPECFORGE);
    open_model(out, &model);
    must_hold_param(&model, "layers.1.input_layernorm.weight", "layers.1.input_layernorm.weight");
    must_hold_param(&model, "layers.1.hidden_norm.weight", "layers.1.input_layernorm.weight");
    must_hold_param(&model, "layers.1.self_attn.q_proj.weight", "layers.1.self_attn.q_proj.weight");
    assert_int_equal(must_find(&model, "layers.1.self_attn.q_proj.weight")->shape[1], H);
    must_hold_param(&model, "lm_head.weight", "lm_head.weight"); // trained
    safetensors_close(&model);
    open_model(must_export("speculators", EXPORT_SPECULATORS), &model);
    assert_null(safetensors_find(&model, "layers.1.hidden_norm.weight"));
    must_hold_param(&model, "layers.1.input_layernorm.weight", "layers.1.input_layernorm.weight");
    must_hold_param(&model, "lm_head.weight", "lm_head.weight");
    safetensors_close(&model);
}

static void speculators_has_layers_and_the_embedding(void **state)
{
    (void)state;
    struct safetensors model;
    resolve(qwen3, VD);
    write_checkpoint();
    const char *out = must_export("speculators", EXPORT_SPECULATORS);
    open_model(out, &model);
    for (size_t i = 0; i < at.params.count; i++)
        must_hold_param(&model, at.params.items[i].name, at.params.items[i].name);
    must_find(&model, "layers.1.self_attn.k_norm.weight");
    must_find(&model, "input_norm.weight");
    must_hold_rows(&model, "embed_tokens.weight", &at.target.embed, NULL, V);
    must_hold_rows(&model, "lm_head.weight", &at.target.head, at.map.ids, VD);
    must_hold_map(&model);
    assert_int_equal(model.count, at.params.count + 4);
    safetensors_close(&model);
    must_state(
        out,
        "{\"architectures\": [\"Eagle3Speculator\"], \"speculators_model_type\": \"eagle3\","
        "\"speculators_version\": \"0.9.0\", \"speculators_config\": {\"algorithm\": \"eagle3\","
        "\"proposal_methods\": [{\"proposal_type\": \"greedy\", \"speculative_tokens\": 3,"
        "\"verifier_accept_k\": 1, \"accept_tolerance\": 0.0}],"
        "\"default_proposal_method\": \"greedy\", \"verifier\": {\"name_or_path\": \"some/model\","
        "\"architectures\": [\"Qwen3ForCausalLM\"]}}, \"transformer_layer_config\": {"
        "\"model_type\": \"qwen3\", \"num_hidden_layers\": 2, \"hidden_size\": 8,"
        "\"intermediate_size\": 12, \"num_attention_heads\": 2, \"num_key_value_heads\": 1,"
        "\"head_dim\": 4, \"hidden_act\": \"silu\", \"rms_norm_eps\": 1e-06,"
        "\"rope_theta\": 10000, \"rope_scaling\": null, \"is_neox_style\": true,"
        "\"max_position_embeddings\": 1024, \"attention_bias\": false, \"vocab_size\": 64,"
        "\"layer_types\": [\"full_attention\", \"full_attention\"], \"sliding_window\": null,"
        "\"use_sliding_window\": false, \"max_window_layers\": 2,"
        "\"tie_word_embeddings\": false, \"dtype\": \"bfloat16\"}, \"draft_vocab_size\": 20,"
        "\"target_hidden_size\": 8, \"eagle_aux_hidden_state_layer_ids\": [2, 4, 6],"
        "\"norm_before_residual\": true, \"norm_before_fc\": true, \"fc_norm\": false,"
        "\"norm_output\": false, \"embed_requires_grad\": false, \"tie_word_embeddings\": false,"
        "\"dtype\": \"bfloat16\"}");
}

// Where the student knows every token there are no tables: vLLM has no place for them then.
static void the_whole_vocabulary_has_no_tables(void **state)
{
    (void)state;
    static const enum export_format formats[] = {EXPORT_SPECFORGE, EXPORT_SPECULATORS};
    resolve(llama, V);
    write_checkpoint();
    for (int f = 0; f < 2; f++) {
        struct safetensors model;
        const char *out = must_export(f == 0 ? "specforge" : "speculators", formats[f]);
        open_model(out, &model);
        assert_null(safetensors_find(&model, "d2t"));
        assert_null(safetensors_find(&model, "t2d"));
        must_hold_rows(&model, "lm_head.weight", &at.target.head, NULL, V);
        safetensors_close(&model);
        cJSON *config = model_config_read(out);
        assert_int_equal(cJSON_GetObjectItem(config, "draft_vocab_size")->valueint, V);
        cJSON_Delete(config);
    }
}

static void another_number_of_features_is_stated(void **state)
{
    (void)state;
    resolve((const char *const[]){"drafter.style=llama", "target.layer_ids=[1, 3, 5, 6]",
                                  "drafter.layers=1", NULL},
            VD);
    write_checkpoint();
    cJSON *config = model_config_read(must_export("specforge", EXPORT_SPECFORGE));
    assert_int_equal(cJSON_GetObjectItem(config, "num_aux_hidden_states")->valueint, 4);
    cJSON_Delete(config);
    config = model_config_read(must_export("speculators", EXPORT_SPECULATORS));
    const cJSON *layers = cJSON_GetObjectItem(config, "transformer_layer_config");
    assert_int_equal(cJSON_GetObjectItem(layers, "num_aux_hidden_states")->valueint, 4);
    cJSON_Delete(config);
}

// ---- what is refused -----------------------------------------------------------------------------

static void must_refuse(const char *const *sets, enum export_format format, const char *words,
                        const char *allow)
{
    struct error err;
    const char *out = run_path(&at.run, "refused");
    resolve(sets, VD);
    write_checkpoint();
    assert_int_equal(export_to(out, format, NULL, &err), -1);
    if (strstr(err.text, words) == NULL)
        fail_msg("\"%s\" is expected, the error is: %s", words, err.text);
    assert_false(files_exists(out));
    int waived = export_to(out, format, allow, &err);
    assert_int_equal(waived, allow != NULL ? 0 : -1);
    if (waived == 0)
        assert_int_equal(files_remove_folder(out, &err), 0);
}

static void what_sglang_does_not_run_is_refused_by_name(void **state)
{
    (void)state;
    must_refuse((const char *const[]){"drafter.style=qwen3", "drafter.layers=1", NULL},
                EXPORT_SPECFORGE, "drafter.style: SGLang has no norms on queries and keys",
                "style");
    must_refuse((const char *const[]){"drafter.style=llama", "drafter.layers=1",
                                      "drafter.norm_before_residual=true", NULL},
                EXPORT_SPECFORGE, "drafter.norm_before_residual: SGLang", "norm_before_residual");
    must_refuse((const char *const[]){"drafter.style=llama", "drafter.layers=1",
                                      "drafter.norm_before_fc=true", NULL},
                EXPORT_SPECFORGE, "drafter.norm_before_fc: SGLang", "norm_before_fc");
    must_refuse((const char *const[]){"drafter.style=llama", "drafter.layers=1",
                                      "drafter.layer_types=[sliding_attention]",
                                      "drafter.sliding_window=12", NULL},
                EXPORT_SPECFORGE, "drafter.layer_types: SGLang does not read windows",
                "layer_types");
    must_refuse(llama, EXPORT_ZLAB,
                "not exported: drafter.kind: the z-lab layout is one of DFlash drafters", NULL);
    struct error err = {""};
    assert_int_equal(export_check_allowed("kind", &err), -1);
    assert_int_equal(export_check_allowed("style,norm_before_fc,norm_before_residual", &err), 0);
}

// What SGLang does not run, the speculators layout states.
static void speculators_takes_what_sglang_does_not_run(void **state)
{
    (void)state;
    resolve((const char *const[]){"drafter.style=llama", "drafter.layers=2",
                                  "drafter.norm_before_residual=true",
                                  "drafter.layer_types=[sliding_attention, full_attention]",
                                  "drafter.sliding_window=12", NULL},
            VD);
    write_checkpoint();
    cJSON *config = model_config_read(must_export("speculators", EXPORT_SPECULATORS));
    const cJSON *layers = cJSON_GetObjectItem(config, "transformer_layer_config");
    char *types = cJSON_PrintUnformatted(cJSON_GetObjectItem(layers, "layer_types"));
    assert_string_equal(types, "[\"sliding_attention\",\"full_attention\"]");
    assert_int_equal(cJSON_GetObjectItem(layers, "sliding_window")->valueint, 12);
    assert_true(cJSON_IsTrue(cJSON_GetObjectItem(config, "norm_before_residual")));
    cJSON_free(types);
    cJSON_Delete(config);
}

// A frozen head is the target's rows: those of another target are noticed.
static void speculators_needs_the_target_of_the_run(void **state)
{
    (void)state;
    static const struct run_target other = {"qwen3", H, V, 1.0, 0.2, 12};
    struct error err = {""};
    resolve(llama, VD);
    write_checkpoint();
    run_target_write(run_path(&at.run, "other"), &other);
    const struct export_request request = {at.checkpoint, run_path(&at.run, "out"),
                                           EXPORT_SPECULATORS, run_path(&at.run, "other"), NULL};
    assert_int_equal(export_command(&request, &err), -1);
    assert_non_null(strstr(err.text, "lm_head.weight: row 0 is not that of the target"));
}

// ---- starting from it ----------------------------------------------------------------------------

static int open_release(struct release *release, const char *directory, const char *allowed,
                        struct error *err)
{
    char *word = allowed != NULL ? memory_strdup(allowed) : NULL;
    const struct config_texts allow = {.items = &word, .count = allowed != NULL};
    const struct release_wanted wanted = {.sizes = &at.sizes,
                                          .params = &at.params,
                                          .target = &at.target,
                                          .allow = &allow,
                                          .map = at.sizes.draft_vocab < V ? &at.map : NULL};
    *err = (struct error){""};
    int result = release_open(release, directory, &wanted, err);
    free(word);
    return result;
}

// The weights, read back in two pieces that end inside tensors.
static void must_start_with(const char *directory)
{
    struct release release;
    struct error err;
    if (open_release(&release, directory, NULL, &err) != 0)
        fail_msg("%s", err.text);
    int64_t all = at.params.elements, half = all / 2 + 3;
    float *values = memory_alloc((size_t)all, sizeof(*values));
    release_values(&release, &at.params, 0, half, values);
    release_values(&release, &at.params, half, all - half, values + half);
    for (size_t p = 0; p < at.params.count; p++) {
        const struct param *param = &at.params.items[p];
        for (int64_t i = param->offset; i < param->offset + param->count; i++)
            if (values[i] != bf16_to_float(bf16_from_float(value_at(i))))
                fail_msg("%s: value %lld is %g", param->name, (long long)(i - param->offset),
                         (double)values[i]);
    }
    free(values);
    release_close(&release);
}

static void must_not_start_with(const char *directory, const char *words, const char *allow)
{
    struct release release;
    struct error err;
    assert_int_equal(open_release(&release, directory, NULL, &err), -1);
    if (strstr(err.text, words) == NULL)
        fail_msg("\"%s\" is expected, the error is: %s", words, err.text);
    release_close(&release);
    if (allow == NULL)
        return;
    if (open_release(&release, directory, allow, &err) != 0)
        fail_msg("%s", err.text);
    release_close(&release);
}

static void both_layouts_round_trip(void **state)
{
    (void)state;
    static const char *const *const drafters[] = {llama, llama_trainable, qwen3};
    for (int d = 0; d < 3; d++) {
        for (int64_t draft = VD; draft <= V; draft += V - VD) {
            struct error err = {""};
            resolve(drafters[d], draft);
            write_checkpoint();
            must_start_with(at.checkpoint);
            const char *out = run_path(&at.run, "again");
            if (export_to(out, EXPORT_SPECULATORS, NULL, &err) != 0)
                fail_msg("%s", err.text);
            must_start_with(out);
            assert_int_equal(files_remove_folder(out, &err), 0);
        }
    }
}

// The release once more: `rename` from one tensor's name to another's, `without` one, or with tensors of
// `fuse` joined by rows under its first name.
struct rewrite {
    const char *rename, *to, *without;
    const char *fuse[4]; // name, parts
};

static bool in_fuse(const struct rewrite *rewrite, const char *name)
{
    bool found = false;
    for (int i = 1; i < 4 && rewrite->fuse[i] != NULL; i++)
        found |= strcmp(rewrite->fuse[i], name) == 0;
    return found;
}

static void write_fused(struct safetensors_writer *writer, const struct safetensors *file,
                        const struct rewrite *rewrite, int index)
{
    struct error err = {""};
    size_t offset = 0;
    for (int i = 1; i < 4 && rewrite->fuse[i] != NULL; i++) {
        const struct safetensors_entry *part = must_find(file, rewrite->fuse[i]);
        assert_int_equal(
            safetensors_writer_write(writer, index, offset, part->bytes, part->size, &err), 0);
        offset += part->size;
    }
}

static void rewrite_model(const char *directory, const struct rewrite *rewrite)
{
    struct safetensors file;
    struct safetensors_writer *writer;
    struct error err = {""};
    char *path = memory_format("%s/model.safetensors", directory);
    char *begun = memory_format("%s.new", path);
    assert_int_equal(safetensors_open(&file, path, &err), 0);
    assert_int_equal(safetensors_writer_open(&writer, begun, &err), 0);
    int fused = -1, count = 0;
    for (size_t i = 0; i < file.count; i++) {
        const struct safetensors_entry *entry = &file.entries[i];
        bool renamed = rewrite->rename != NULL && strcmp(entry->name, rewrite->rename) == 0;
        bool out = rewrite->without != NULL && strcmp(entry->name, rewrite->without) == 0;
        int64_t elements = 1;
        for (int d = 0; d < entry->dims; d++)
            elements *= entry->shape[d];
        if (!out && !in_fuse(rewrite, entry->name))
            safetensors_writer_add_as(writer, renamed ? rewrite->to : entry->name, entry->dtype,
                                      entry->size / (size_t)elements, entry->dims, entry->shape);
    }
    if (rewrite->fuse[0] != NULL) {
        int64_t shape[2] = {0, must_find(&file, rewrite->fuse[1])->shape[1]};
        for (int i = 1; i < 4 && rewrite->fuse[i] != NULL; i++)
            shape[0] += must_find(&file, rewrite->fuse[i])->shape[0];
        fused = safetensors_writer_add(writer, rewrite->fuse[0], DTYPE_BF16, 2, shape);
    }
    assert_int_equal(safetensors_writer_begin(writer, &err), 0);
    for (size_t i = 0; i < file.count; i++) {
        const struct safetensors_entry *entry = &file.entries[i];
        bool out = rewrite->without != NULL && strcmp(entry->name, rewrite->without) == 0;
        if (!out && !in_fuse(rewrite, entry->name))
            assert_int_equal(
                safetensors_writer_write(writer, count++, 0, entry->bytes, entry->size, &err), 0);
    }
    if (fused >= 0)
        write_fused(writer, &file, rewrite, fused);
    assert_int_equal(safetensors_writer_close(writer, true, &err), 0);
    safetensors_close(&file);
    assert_int_equal(rename(begun, path), 0);
    free(begun);
    free(path);
}

static void fused_tensors_and_other_names_are_read(void **state)
{
    (void)state;
    resolve(llama_trainable, VD);
    write_checkpoint();
    const char *out = must_export("other", EXPORT_SPECFORGE);
    rewrite_model(out, &(struct rewrite){.fuse = {"midlayer.self_attn.qkv_proj.weight",
                                                  "midlayer.self_attn.q_proj.weight",
                                                  "midlayer.self_attn.k_proj.weight",
                                                  "midlayer.self_attn.v_proj.weight"}});
    must_start_with(out);
    rewrite_model(out, &(struct rewrite){.fuse = {"layers.1.mlp.gate_up_proj.weight",
                                                  "layers.1.mlp.gate_proj.weight",
                                                  "layers.1.mlp.up_proj.weight"}});
    must_start_with(out);
    rewrite_model(out, &(struct rewrite){.rename = "midlayer.hidden_norm.weight",
                                         .to = "layers.0.hidden_norm.weight"});
    must_start_with(out);
    // As SGLang alone has it.
    rewrite_model(out, &(struct rewrite){.without = "layers.1.input_layernorm.weight"});
    must_start_with(out);
    rewrite_model(out, &(struct rewrite){.rename = "midlayer.self_attn.qkv_proj.weight",
                                         .to = "midlayer.self_attn.qk_proj.weight"});
    must_not_start_with(out, "layers.0.self_attn.q_proj.weight: the tensor is missing", NULL);
}

static void copies_and_maps_must_be_those_of_the_run(void **state)
{
    (void)state;
    static const struct run_target other = {"qwen3", H, V, 1.0, 0.2, 12};
    struct error err = {""};
    resolve(llama, VD);
    write_checkpoint();
    const char *specforge = must_export("specforge", EXPORT_SPECFORGE);
    const char *speculators = must_export("speculators", EXPORT_SPECULATORS);
    // A head that was trained is not the target's.
    run_target_write(run_path(&at.run, "other"), &other);
    target_close(&at.target);
    assert_int_equal(target_open(&at.target, run_path(&at.run, "other"), &err), 0);
    must_not_start_with(specforge, "drafter.lm_head: trainable starts from the file's",
                        "lm_head.weight");
    must_not_start_with(speculators, "embed_tokens.weight: row 0 is not that of the target", NULL);
    target_close(&at.target);
    assert_int_equal(target_open(&at.target, run_path(&at.run, "target"), &err), 0);
    // Another map, none, another size.
    vocab_map_release(&at.map);
    int64_t counts[V] = {0};
    counts[5] = 1;
    assert_int_equal(vocab_map_make(&at.map, counts, V, VD, &err), 0);
    must_not_start_with(specforge, "d2t: draft id 0 is token 1, but drafter.draft_vocab makes it 0",
                        NULL);
    resolve(llama, V);
    must_not_start_with(specforge, "d2t: a draft vocabulary of 20 tokens", NULL);
    resolve(llama, VD + 1);
    must_not_start_with(specforge, "draft_vocab_size: 20, but", NULL);
    resolve(llama, VD);
    rewrite_model(specforge, &(struct rewrite){.without = "d2t"});
    must_not_start_with(specforge, "d2t: the tensor is missing", NULL);
}

static void another_drafter_is_refused_by_name(void **state)
{
    (void)state;
    static const struct {
        enum export_format format;
        const char *object, *member, *json;
    } edits[] = {
        {EXPORT_SPECFORGE, NULL, "fc_norm", "false"},
        {EXPORT_SPECFORGE, NULL, "norm_output", NULL},
        {EXPORT_SPECFORGE, NULL, "norm_before_residual", "true"},
        {EXPORT_SPECFORGE, NULL, "draft_vocab_size", "32"},
        {EXPORT_SPECFORGE, NULL, "target_hidden_size", "16"},
        {EXPORT_SPECFORGE, NULL, "tie_word_embeddings", "true"},
        {EXPORT_SPECFORGE, NULL, "model_type", "\"qwen3\""},
        {EXPORT_SPECFORGE, NULL, "attention_bias", "true"},
        {EXPORT_SPECFORGE, NULL, "bias", "true"},
        {EXPORT_SPECFORGE, NULL, "rope_theta", "500"},
        {EXPORT_SPECFORGE, NULL, "num_hidden_layers", "2"},
        {EXPORT_SPECFORGE, NULL, "architectures", "[\"LlamaForCausalLMEagle\"]"},
        {EXPORT_SPECFORGE, "eagle_config", "eagle_aux_hidden_state_layer_ids", "[2, 4, 6]"},
        {EXPORT_SPECFORGE, "eagle_config", "eagle_aux_hidden_state_layer_ids", NULL},
        {EXPORT_SPECFORGE, "eagle_config", "use_aux_hidden_state", "false"},
        {EXPORT_SPECFORGE, "eagle_config", "parallel_heads", "4"},
        {EXPORT_SPECULATORS, NULL, "eagle_aux_hidden_state_layer_ids", "[1, 3, 5]"},
        {EXPORT_SPECULATORS, NULL, "norm_before_fc", "true"},
        {EXPORT_SPECULATORS, NULL, "speculators_model_type", "\"peagle\""},
        {EXPORT_SPECULATORS, NULL, "transformer_layer_config", NULL},
        {EXPORT_SPECULATORS, "transformer_layer_config", "vocab_size", "32"},
        {EXPORT_SPECULATORS, "transformer_layer_config", "mlp_bias", "true"},
    };
    resolve(llama, VD);
    write_checkpoint();
    for (size_t i = 0; i < sizeof(edits) / sizeof(*edits); i++) {
        struct error err;
        const char *out = run_path(&at.run, "edited");
        assert_int_equal(export_to(out, edits[i].format, NULL, &err), 0);
        must_start_with(out);
        model_config_edit(out, edits[i].object, edits[i].member, edits[i].json);
        char *words = memory_format("config.json: %s: ", edits[i].member);
        bool missing = strcmp(edits[i].member, "transformer_layer_config") == 0;
        must_not_start_with(out, missing ? "transformer_layer_config is missing" : words, NULL);
        free(words);
        assert_int_equal(files_remove_folder(out, &err), 0);
    }
}

// Fields that a reader fills in itself: Llama's defaults, and the layers that servers take.
static void what_is_not_stated_has_the_readers_defaults(void **state)
{
    (void)state;
    resolve(llama, VD);
    at.sizes.target_layer_ids[0] = 1; // of 8 layers: 1, 3, 4
    at.sizes.target_layer_ids[1] = 3;
    at.sizes.target_layer_ids[2] = 4;
    write_checkpoint();
    const char *out = must_export("bare", EXPORT_SPECFORGE);
    static const char *const left_out[] = {"eagle_config",       "rope_theta", "rope_scaling",
                                           "is_neox_style",      "hidden_act", "rms_norm_eps",
                                           "attention_bias",     "head_dim",   "target_hidden_size",
                                           "tie_word_embeddings"};
    for (size_t i = 0; i < sizeof(left_out) / sizeof(*left_out); i++)
        model_config_edit(out, NULL, left_out[i], NULL);
    must_start_with(out);
    model_config_edit(out, NULL, "num_key_value_heads", NULL); // as many as there are heads
    must_not_start_with(out, "config.json: num_key_value_heads: ", NULL);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_test, close_test)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(specforge_has_midlayer_and_the_kept_rows),
        TEST(later_layers_have_both_names_of_their_norm),
        TEST(speculators_has_layers_and_the_embedding),
        TEST(the_whole_vocabulary_has_no_tables),
        TEST(another_number_of_features_is_stated),
        TEST(what_sglang_does_not_run_is_refused_by_name),
        TEST(speculators_takes_what_sglang_does_not_run),
        TEST(speculators_needs_the_target_of_the_run),
        TEST(both_layouts_round_trip),
        TEST(fused_tensors_and_other_names_are_read),
        TEST(copies_and_maps_must_be_those_of_the_run),
        TEST(another_drafter_is_refused_by_name),
        TEST(what_is_not_stated_has_the_readers_defaults),
    };
    return cmocka_run_group_tests_name("export_eagle3", tests, NULL, NULL);
}
