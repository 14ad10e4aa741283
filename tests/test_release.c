// Released drafters, through the real program: export in every layout, a run that starts from it
// (drafter.init_from), and everything about it that is refused by name.
#include "trainer/release.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/bf16.h"
#include "base/memory.h"
#include "tests/support/model_config.h"
#include "tests/support/run_fixture.h"
#include "trainer/files.h"

static struct run_fixture fixture;

static int open_test(void **state)
{
    (void)state;
    run_fixture_open(&fixture);
    run_fixture_set(&fixture, "data.val=[val.h5]");
    return 0;
}

static int close_test(void **state)
{
    (void)state;
    run_fixture_close(&fixture);
    return 0;
}

// ---- helpers -------------------------------------------------------------------------------------

static void train_and_export(const char *const *formats)
{
    assert_int_equal(run_train(&fixture, "run", "--set", "run.max_steps=4", NULL), 0);
    for (; *formats != NULL; formats++)
        if (run_command(&fixture, *formats, false, "export", "--checkpoint",
                        run_checkpoint(&fixture, "run", 4), "--format", *formats, "--out",
                        run_path(&fixture, "%s-drafter", *formats), NULL) != 0)
            run_must_say(&fixture, *formats, "no error");
}

static const char *init_from(const char *format)
{
    return run_path(&fixture, "%s-drafter", format);
}

// One step from the release with these sets; the exit status. Output is in warm.out.
static int start_from(const char *directory, const char *first, const char *second)
{
    struct error err = {""};
    const char *earlier = run_checkpoint(&fixture, "warm", 1);
    if (files_exists(earlier))
        assert_int_equal(files_remove_folder(earlier, &err), 0);
    char *from = memory_format("drafter.init_from=%s", directory);
    int status = run_train(&fixture, "warm", "--set", from, "--set", "run.max_steps=1", "--set",
                           first, second != NULL ? "--set" : NULL, second, NULL);
    free(from);
    return status;
}

static void must_refuse(const char *directory, const char *set, const char *file, const char *name)
{
    assert_int_equal(start_from(directory, set, NULL), 2);
    char *words = memory_format("%s/%s: %s: ", directory, file, name);
    run_must_say(&fixture, "warm", words);
    free(words);
}

// A number line of `eval`, without its name.
static char *printed(const char *name, const char *line)
{
    char *text = program_text(run_path(&fixture, "%s.out", name));
    char *at = strstr(text, line);
    if (at == NULL)
        fail_msg("%s.out has no %s", name, line);
    char *value = at != NULL ? memory_strdup(at) : NULL;
    if (value != NULL)
        value[strcspn(value, "\n")] = '\0';
    free(text);
    return value;
}

static void must_score_alike(const char *first, const char *second)
{
    static const char *const lines[] = {"loss ", "accept_len_walk ", "accept_len ", "overlap "};
    for (size_t i = 0; i < sizeof(lines) / sizeof(*lines); i++) {
        char *a = printed(first, lines[i]), *b = printed(second, lines[i]);
        assert_string_equal(a, b);
        free(a);
        free(b);
    }
}

// The release once more, without one tensor, with one more, with one of another shape or in fp32.
struct rewrite {
    const char *without, *with, *reshaped;
    bool fp32;
};

static void write_entry(struct safetensors_writer *writer, int index,
                        const struct safetensors_entry *entry, bool fp32)
{
    struct error err = {""};
    size_t count = entry->size / sizeof(bf16);
    float *values = memory_alloc(count, sizeof(*values));
    for (size_t i = 0; i < count; i++)
        values[i] = bf16_to_float(((const bf16 *)(const void *)entry->bytes)[i]);
    int result =
        fp32 ? safetensors_writer_write(writer, index, 0, values, count * sizeof(*values), &err)
             : safetensors_writer_write(writer, index, 0, entry->bytes, entry->size, &err);
    assert_int_equal(result, 0);
    free(values);
}

static void rewrite_model(const char *directory, const struct rewrite *rewrite)
{
    struct error err = {""};
    struct safetensors file;
    struct safetensors_writer *writer;
    char *path = memory_format("%s/model.safetensors", directory);
    char *begun = memory_format("%s.new", path);
    assert_int_equal(safetensors_open(&file, path, &err), 0);
    assert_int_equal(safetensors_writer_open(&writer, begun, &err), 0);
    enum dtype type = rewrite->fp32 ? DTYPE_F32 : DTYPE_BF16;
    for (size_t i = 0; i < file.count; i++) {
        const struct safetensors_entry *entry = &file.entries[i];
        int64_t shape[2] = {entry->shape[0], entry->shape[1]};
        if (rewrite->reshaped != NULL && strcmp(entry->name, rewrite->reshaped) == 0) {
            shape[0] = entry->shape[1];
            shape[1] = entry->shape[0];
        }
        if (rewrite->without == NULL || strcmp(entry->name, rewrite->without) != 0)
            safetensors_writer_add(writer, entry->name, type, entry->dims, shape);
    }
    if (rewrite->with != NULL)
        safetensors_writer_add(writer, rewrite->with, type, 1, (const int64_t[]){4});
    assert_int_equal(safetensors_writer_begin(writer, &err), 0);
    int index = 0;
    for (size_t i = 0; i < file.count; i++)
        if (rewrite->without == NULL || strcmp(file.entries[i].name, rewrite->without) != 0)
            write_entry(writer, index++, &file.entries[i], rewrite->fp32);
    assert_int_equal(safetensors_writer_close(writer, true, &err), 0);
    safetensors_close(&file);
    assert_int_equal(rename(begun, path), 0);
    free(begun);
    free(path);
}

// ---- round trips ---------------------------------------------------------------------------------

static const char *const all_formats[] = {"zlab", "specforge", "speculators", NULL};

static void must_hold_the_same_model(const char *first, const char *second)
{
    char *a = memory_format("%s/model.safetensors", first);
    char *b = memory_format("%s/model.safetensors", second);
    struct safetensors one, two;
    struct error err = {""};
    assert_int_equal(safetensors_open(&one, a, &err), 0);
    assert_int_equal(safetensors_open(&two, b, &err), 0);
    assert_true(one.count > 0);
    assert_int_equal(one.count, two.count);
    for (size_t i = 0; i < one.count; i++) {
        assert_string_equal(one.entries[i].name, two.entries[i].name);
        assert_int_equal(one.entries[i].size, two.entries[i].size);
        assert_memory_equal(one.entries[i].bytes, two.entries[i].bytes, one.entries[i].size);
    }
    safetensors_close(&two);
    safetensors_close(&one);
    free(b);
    free(a);
}

// Export, a step of no length from it, and the checkpoint: the same bf16 weights bit for bit, and the
// same scores as the first one's rounded weights.
static void round_trip(const char *const *formats)
{
    train_and_export(formats);
    const char *checkpoint = run_checkpoint(&fixture, "run", 4);
    assert_int_equal(
        run_command(&fixture, "before", true, "eval", "--served", "--checkpoint", checkpoint, NULL),
        0);
    for (; *formats != NULL; formats++) {
        const char *name = run_path(&fixture, "from-%s", *formats);
        const char *run = strrchr(name, '/') + 1;
        char *from = memory_format("drafter.init_from=%s", init_from(*formats));
        assert_int_equal(run_train(&fixture, run, "--set", from, "--set", "run.max_steps=1",
                                   "--set", "optimizer.lr=1e-30", "--set", "checkpoint.every=1",
                                   NULL),
                         0);
        free(from);
        const char *warm = run_checkpoint(&fixture, run, 1);
        must_hold_the_same_model(checkpoint, warm);
        assert_int_equal(run_command(&fixture, "after", true, "eval", "--checkpoint", warm, NULL),
                         0);
        must_score_alike("before", "after");
    }
}

static void full_layers_round_trip(void **state)
{
    (void)state;
    run_fixture_set(&fixture, "drafter.rope_scaling=yarn");
    run_fixture_set(&fixture, "drafter.rope_factor=2.5");
    run_fixture_set(&fixture, "drafter.rope_theta=1e7");
    round_trip(all_formats);
}

static void sliding_layers_round_trip(void **state)
{
    (void)state;
    run_fixture_set(&fixture, "drafter.layer_types=[sliding_attention, sliding_attention]");
    run_fixture_set(&fixture, "drafter.sliding_window=12");
    run_fixture_set(&fixture, "drafter.rope_scaling=linear");
    run_fixture_set(&fixture, "drafter.rope_factor=4");
    round_trip(all_formats);
}

static void mixed_layers_round_trip_where_they_are_served(void **state)
{
    (void)state;
    run_fixture_set(&fixture, "drafter.layer_types=[sliding_attention, full_attention]");
    run_fixture_set(&fixture, "drafter.sliding_window=12");
    round_trip((const char *const[]){"zlab", "specforge", NULL});
    const char *checkpoint = run_checkpoint(&fixture, "run", 4);
    for (int allow = 0; allow < 2; allow++) {
        const char *out = run_path(&fixture, "mixed%d", allow);
        int status = run_command(&fixture, "mixed", false, "export", "--checkpoint", checkpoint,
                                 "--format", "speculators", "--out", out,
                                 allow ? "--allow-unservable=layer_types" : NULL, NULL);
        assert_int_equal(status, allow ? 0 : 1);
        run_must_say(&fixture, "mixed", "drafter.layer_types: vLLM makes one causal flag");
        assert_int_equal(files_exists(out), allow);
    }
    assert_int_equal(start_from(run_path(&fixture, "mixed1"), "run.seed=7", NULL), 0);
}

static void a_resumed_run_does_not_need_the_release(void **state)
{
    (void)state;
    struct error err = {""};
    train_and_export((const char *const[]){"zlab", NULL});
    char *from = memory_format("drafter.init_from=%s", init_from("zlab"));
    assert_int_equal(run_train(&fixture, "warm", "--set", from, "--set", "run.max_steps=4", NULL),
                     0);
    assert_int_equal(files_remove_folder(init_from("zlab"), &err), 0);
    assert_int_equal(run_train(&fixture, "warm", "--set", from, "--set", "run.max_steps=8", "--set",
                               "schedule.kind=cosine", NULL),
                     0);
    run_must_say(&fixture, "warm", "resuming from");
    assert_int_equal(run_train(&fixture, "cold", "--set", from, "--set", "run.max_steps=4", NULL),
                     2);
    run_must_say(&fixture, "cold", "zlab-drafter/config.json");
    assert_int_equal(run_command(&fixture, "trace", true, "trace", "--out",
                                 run_path(&fixture, "step.safetensors"), "--set", from, NULL),
                     2);
    run_must_say(&fixture, "trace", "zlab-drafter/config.json");
    free(from);
}

// ---- the speculators layout ----------------------------------------------------------------------

static void speculators_states_every_field(void **state)
{
    (void)state;
    static const char wanted[] =
        "{\"architectures\": [\"DFlashSpeculator\"], \"speculators_model_type\": \"dflash\","
        "\"speculators_version\": \"0.9.0\", \"speculators_config\": {\"algorithm\": \"dflash\","
        "\"proposal_methods\": [{\"proposal_type\": \"greedy\", \"speculative_tokens\": 7,"
        "\"verifier_accept_k\": 1, \"accept_tolerance\": 0.0}],"
        "\"default_proposal_method\": \"greedy\", \"verifier\": {\"name_or_path\": \"some/model\","
        "\"architectures\": [\"Qwen3ForCausalLM\"]}}, \"transformer_layer_config\": {"
        "\"model_type\": \"qwen3\", \"num_hidden_layers\": 2, \"hidden_size\": 8,"
        "\"intermediate_size\": 12, \"num_attention_heads\": 2, \"num_key_value_heads\": 2,"
        "\"head_dim\": 4, \"hidden_act\": \"silu\", \"rms_norm_eps\": 1e-06,"
        "\"rope_theta\": 10000, \"rope_scaling\": null, \"is_neox_style\": true,"
        "\"max_position_embeddings\": 1024, \"attention_bias\": false, \"vocab_size\": 64,"
        "\"layer_types\": [\"sliding_attention\", \"sliding_attention\"],"
        "\"sliding_window\": 12, \"use_sliding_window\": true, \"max_window_layers\": 2,"
        "\"tie_word_embeddings\": false, \"dtype\": \"bfloat16\"}, \"draft_vocab_size\": 64,"
        "\"target_hidden_size\": 8, \"block_size\": 8, \"aux_hidden_state_layer_ids\": [2, 4, 6],"
        "\"mask_token_id\": 60, \"sample_from_anchor\": false,"
        "\"sliding_window_non_causal\": false, \"tie_word_embeddings\": false,"
        "\"dtype\": \"bfloat16\"}";
    run_fixture_set(&fixture, "target.name=some/model");
    run_fixture_set(&fixture, "drafter.layer_types=[sliding_attention, sliding_attention]");
    run_fixture_set(&fixture, "drafter.sliding_window=12");
    train_and_export(all_formats);
    cJSON *config = model_config_read(init_from("speculators")), *all = cJSON_Parse(wanted);
    char *text = cJSON_Print(config);
    if (!cJSON_Compare(config, all, true))
        fail_msg("config.json is\n%s", text);
    cJSON_free(text);
    cJSON_Delete(all);
    cJSON_Delete(config);
}

static void full_layers_state_no_causality(void **state)
{
    (void)state;
    train_and_export(all_formats);
    cJSON *config = model_config_read(init_from("speculators"));
    assert_null(cJSON_GetObjectItem(config, "sliding_window_non_causal"));
    cJSON_Delete(config);
}

static void speculators_needs_the_target_of_the_run(void **state)
{
    (void)state;
    static const struct run_target other = {"qwen3", 8, 128, 1.0, 0.2, 11};
    assert_int_equal(run_train(&fixture, "run", "--set", "run.max_steps=4", NULL), 0);
    run_target_write(run_path(&fixture, "other"), &other);
    const char *checkpoint = run_checkpoint(&fixture, "run", 4);
    const char *out = run_path(&fixture, "out");
    assert_int_equal(run_command(&fixture, "wrong", false, "export", "--checkpoint", checkpoint,
                                 "--format", "speculators", "--out", out, "--target",
                                 run_path(&fixture, "other"), NULL),
                     1);
    run_must_say(&fixture, "wrong", "vocab_size: 64");
    assert_int_equal(run_command(&fixture, "gone", false, "export", "--checkpoint", checkpoint,
                                 "--format", "speculators", "--out", out, "--target",
                                 run_path(&fixture, "nowhere"), NULL),
                     1);
    run_must_say(&fixture, "gone", "--target");
    assert_false(files_exists(out));
    assert_int_equal(run_command(&fixture, "format", false, "export", "--checkpoint", checkpoint,
                                 "--format", "gguf", "--out", out, NULL),
                     2);
    run_must_say(&fixture, "format", "gguf");
}

// ---- what is refused -----------------------------------------------------------------------------

static void another_drafter_is_refused_by_name(void **state)
{
    (void)state;
    run_fixture_set(&fixture, "drafter.rope_scaling=yarn");
    run_fixture_set(&fixture, "drafter.rope_factor=2");
    run_fixture_set(&fixture, "drafter.layer_types=[sliding_attention, sliding_attention]");
    run_fixture_set(&fixture, "drafter.sliding_window=12");
    train_and_export(all_formats);
    static const char *const fields[][2] = {
        {"drafter.block_size=4", "block_size"},
        {"drafter.mask_token_id=61", "mask_token_id"},
        {"drafter.predict_from_anchor=true", "sample_from_anchor"},
        {"drafter.rope_theta=500", "rope_theta"},
        {"drafter.rope_factor=4", "factor"},
        {"drafter.rope_original_positions=77", "original_max_position_embeddings"},
        {"drafter.rms_norm_eps=1e-5", "rms_norm_eps"},
        {"drafter.num_key_value_heads=1", "num_key_value_heads"},
        {"drafter.head_dim=8", "head_dim"},
        {"drafter.intermediate_size=16", "intermediate_size"},
        {"drafter.sliding_window=13", "sliding_window"},
        {"drafter.sliding_window_non_causal=true", "sliding_window_non_causal"},
        {"drafter.layer_types=[sliding_attention, full_attention]", "layer_types"},
    };
    for (const char *const *format = all_formats; *format != NULL; format++) {
        const char *directory = init_from(*format);
        bool nested = strcmp(*format, "speculators") == 0;
        for (size_t i = 0; i < sizeof(fields) / sizeof(*fields); i++)
            must_refuse(directory, fields[i][0], "config.json", fields[i][1]);
        must_refuse(directory, "target.layer_ids=[1, 5]", "config.json",
                    nested ? "aux_hidden_state_layer_ids" : "target_layer_ids");
        must_refuse(directory, "target.layer_ids=[1, 5]", "model.safetensors", "fc.weight");
        must_refuse(directory, "drafter.intermediate_size=16", "model.safetensors",
                    "layers.1.mlp.down_proj.weight");
    }
    must_refuse(init_from("zlab"), "drafter.window_origin=anchor", "config.json", "window_origin");
}

static void what_dtrain_does_not_have_is_refused_by_name(void **state)
{
    (void)state;
    static const char *const edits[][4] = {
        {"zlab", NULL, "attention_bias", "true"},
        {"zlab", NULL, "hidden_act", "\"gelu\""},
        {"zlab", NULL, "model_type", "\"llama\""},
        {"zlab", NULL, "is_neox_style", "false"},
        {"zlab", NULL, "partial_rotary_factor", "0.5"},
        {"zlab", NULL, "rope_scaling", "{\"rope_type\": \"default\", \"mrope_section\": [1, 1]}"},
        {"zlab", NULL, "rope_scaling", "{\"rope_type\": \"llama3\", \"factor\": 2.0}"},
        {"zlab", NULL, "rope_scaling", "{\"rope_type\": \"default\", \"beta_fast\": 16}"},
        {"zlab", NULL, "use_sliding_window", "true"},
        {"zlab", NULL, "num_target_layers", "9"},
        {"zlab", NULL, "head_dim", NULL},
        {"zlab", NULL, "is_causal", "true"},
        {"zlab", NULL, "rope_is_neox_style", "false"},
        {"zlab", NULL, "use_gemma_norm", "true"},
        {"zlab", NULL, "logit_scale", "0.5"},
        {"speculators", "transformer_layer_config", "is_causal", "true"},
        {"zlab", "dflash_config", "use_swa", "true"},
        {"zlab", "dflash_config", "causal", "true"},
        {"zlab", "dflash_config", "mask_token_id", "null"},
        {"zlab", "dflash_config", "block_size", "4"},
        {"zlab", "dflash_config", "num_target_layers", "9"},
        {"speculators", NULL, "draft_vocab_size", "32"},
        {"speculators", NULL, "target_hidden_size", "16"},
        {"speculators", "transformer_layer_config", "vocab_size", "32"},
        {"speculators", NULL, "speculators_model_type", "\"peagle\""},
        {"speculators", NULL, "markov_rank", "8"},
        {"speculators", NULL, "markov_head_type", "\"gated\""},
        {"speculators", NULL, "enable_confidence_head", "true"},
    };
    train_and_export(all_formats);
    for (size_t i = 0; i < sizeof(edits) / sizeof(*edits); i++) {
        const char *directory = init_from(edits[i][0]), *member = edits[i][2];
        cJSON *before = model_config_read(directory);
        if (strcmp(member, "use_sliding_window") == 0)
            model_config_edit(directory, NULL, "layer_types", NULL);
        model_config_edit(directory, edits[i][1], member, edits[i][3]);
        must_refuse(directory, "run.seed=7", "config.json",
                    strcmp(member, "use_sliding_window") == 0 ? "layer_types" : member);
        struct error err = {""};
        char *text = cJSON_Print(before), *path = memory_format("%s/config.json", directory);
        assert_int_equal(files_write_text(path, text, &err), 0);
        free(path);
        cJSON_free(text);
        cJSON_Delete(before);
    }
    assert_int_equal(start_from(init_from("zlab"), "run.seed=7", NULL), 0);
}

static void defaults_and_other_spellings_are_understood(void **state)
{
    (void)state;
    train_and_export(all_formats);
    const char *directory = init_from("speculators");
    static const char layers[] = "transformer_layer_config";
    // As Transformers 5 saves it: what is at its default is left out.
    static const char *const left_out[] = {"rope_theta",     "rope_scaling",       "hidden_act",
                                           "attention_bias", "use_sliding_window", "layer_types",
                                           "rms_norm_eps"};
    for (size_t i = 0; i < sizeof(left_out) / sizeof(*left_out); i++)
        model_config_edit(directory, layers, left_out[i], NULL);
    model_config_edit(directory, NULL, "block_size", NULL); // 8
    model_config_edit(directory, layers, "rope_scaling",
                      "{\"rope_type\": \"default\", \"beta_fast\": 32.0, \"beta_slow\": 1}");
    assert_int_equal(start_from(directory, "run.seed=7", NULL), 0);
    model_config_edit(directory, layers, "rope_parameters",
                      "{\"rope_type\": \"default\", \"rope_theta\": 500.0}");
    must_refuse(directory, "run.max_steps=1", "config.json", "rope_theta");
    // It leaves copies of the target out, too.
    model_config_edit(directory, layers, "rope_parameters", NULL);
    rewrite_model(directory, &(struct rewrite){.without = "embed_tokens.weight"});
    rewrite_model(directory, &(struct rewrite){.without = "lm_head.weight", .fp32 = true});
    char *from = memory_format("drafter.init_from=%s", directory);
    assert_int_equal(run_train(&fixture, "fp32", "--set", "run.max_steps=1", "--set",
                               "optimizer.lr=1e-30", "--set", "checkpoint.every=1", "--set", from,
                               NULL),
                     0);
    free(from);
    must_hold_the_same_model(run_checkpoint(&fixture, "run", 4),
                             run_checkpoint(&fixture, "fp32", 1));
}

static void what_dflash_config_states_has_precedence(void **state)
{
    (void)state;
    static const char *const names[][2] = {{"block_size", "8"}, {"num_target_layers", "8"}};
    train_and_export((const char *const[]){"zlab", NULL});
    const char *directory = init_from("zlab");
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        model_config_edit(directory, "dflash_config", names[i][0], names[i][1]);
        model_config_edit(directory, NULL, names[i][0], i == 0 ? NULL : "9");
    }
    assert_int_equal(start_from(directory, "run.seed=7", NULL), 0);
}

static void tensors_must_fit_and_names_allow(void **state)
{
    (void)state;
    static const struct {
        struct rewrite rewrite;
        const char *name, *allow;
    } cases[] = {
        {{.without = "layers.1.mlp.up_proj.weight"},
         "layers.1.mlp.up_proj.weight",
         "drafter.init_allow=[layers.1.mlp.up_proj.weight]"},
        {{.with = "markov_head.weight"},
         "markov_head.weight",
         "drafter.init_allow=[layers.1.mlp.up_proj.weight, markov_head.weight]"},
        {{.reshaped = "fc.weight"},
         "fc.weight",
         "drafter.init_allow=[layers.1.mlp.up_proj.weight, markov_head.weight, fc.weight]"},
    };
    train_and_export(all_formats);
    const char *directory = init_from("zlab");
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        rewrite_model(directory, &cases[i].rewrite);
        must_refuse(directory, "run.seed=7", "model.safetensors", cases[i].name);
        assert_int_equal(start_from(directory, cases[i].allow, NULL), 0);
        run_must_say(&fixture, "warm", "accepted by drafter.init_allow");
    }
}

// Neither of its own accord nor by name.
static void weights_in_several_files_are_told(void **state)
{
    (void)state;
    struct error err = {""};
    train_and_export((const char *const[]){"zlab", NULL});
    char *model = memory_format("%s/model.safetensors", init_from("zlab"));
    char *index = memory_format("%s.index.json", model);
    assert_int_equal(unlink(model), 0);
    assert_int_equal(files_write_text(index, "{}", &err), 0);
    assert_int_equal(start_from(init_from("zlab"), "run.seed=7", NULL), 2);
    run_must_say(&fixture, "warm", index);
    run_must_say(&fixture, "warm", "weights in several files are not read");
    free(index);
    free(model);
}

static void weights_must_be_finite(void **state)
{
    (void)state;
    static const char name[] = "norm.weight";
    static const unsigned char nan[] = {0xc0, 0x7f};
    struct error err = {""};
    struct safetensors model;
    train_and_export(all_formats);
    const char *directory = init_from("zlab");
    char *path = memory_format("%s/model.safetensors", directory);
    assert_int_equal(safetensors_open(&model, path, &err), 0);
    const struct safetensors_entry *entry = safetensors_find(&model, name);
    assert_non_null(entry);
    long at = (long)(entry->bytes - (const unsigned char *)model.map) + 3 * (long)sizeof(nan);
    safetensors_close(&model);
    FILE *file = fopen(path, "r+b");
    assert_non_null(file);
    assert_int_equal(fseek(file, at, SEEK_SET), 0);
    assert_int_equal(fwrite(nan, sizeof(nan), 1, file), 1);
    assert_int_equal(fclose(file), 0);
    must_refuse(directory, "run.seed=7", "model.safetensors", name);
    run_must_say(&fixture, "warm", "element 3 is NaN or infinite");
    assert_int_equal(start_from(directory, "drafter.init_allow=[norm.weight]", NULL), 2);
    free(path);
}

static void fields_are_allowed_by_name(void **state)
{
    (void)state;
    train_and_export(all_formats);
    const char *directory = init_from("speculators");
    assert_int_equal(
        start_from(directory, "drafter.block_size=4", "drafter.init_allow=[mask_token_id]"), 2);
    assert_int_equal(
        start_from(directory, "drafter.block_size=4", "drafter.init_allow=[block_size, head_dim]"),
        0);
    run_must_say(&fixture, "warm", "drafter.init_allow: head_dim: nothing of that name differs");
}

// A file beside the drafter that servers read; dtrain would start from another mask embedding.
static void a_mask_embedding_of_its_own_is_refused(void **state)
{
    (void)state;
    train_and_export((const char *const[]){"zlab", NULL});
    const char *drafter = init_from("zlab");
    char *path = memory_format("%s/mask_embedding.pt", drafter);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fclose(file), 0);
    must_refuse(drafter, "log.every=1", "mask_embedding.pt", "mask_embedding.pt");
    assert_int_equal(start_from(drafter, "drafter.init_allow=[mask_embedding.pt]", NULL), 0);
    free(path);
}

static void copies_of_another_target_are_refused(void **state)
{
    (void)state;
    static const struct run_target other = {"qwen3", 8, 64, 1.0, 0.2, 12};
    train_and_export(all_formats);
    run_target_write(run_path(&fixture, "other"), &other);
    must_refuse(init_from("speculators"), "target.path=other", "model.safetensors",
                "embed_tokens.weight");
    run_must_say(&fixture, "warm", "lm_head.weight: row 0 is not that of the target");
    assert_int_equal(start_from(init_from("speculators"), "target.path=other",
                                "drafter.init_allow=[embed_tokens.weight, lm_head.weight]"),
                     0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_test, close_test)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(full_layers_round_trip),
        TEST(sliding_layers_round_trip),
        TEST(mixed_layers_round_trip_where_they_are_served),
        TEST(a_resumed_run_does_not_need_the_release),
        TEST(speculators_states_every_field),
        TEST(full_layers_state_no_causality),
        TEST(speculators_needs_the_target_of_the_run),
        TEST(another_drafter_is_refused_by_name),
        TEST(what_dtrain_does_not_have_is_refused_by_name),
        TEST(defaults_and_other_spellings_are_understood),
        TEST(what_dflash_config_states_has_precedence),
        TEST(tensors_must_fit_and_names_allow),
        TEST(weights_in_several_files_are_told),
        TEST(weights_must_be_finite),
        TEST(fields_are_allowed_by_name),
        TEST(a_mask_embedding_of_its_own_is_refused),
        TEST(copies_of_another_target_are_refused),
    };
    return cmocka_run_group_tests_name("release", tests, NULL, NULL);
}
