// Starting from EAGLE-3 drafters on disk: from both layouts, from other spellings and from what other trainers release;
// another drafter is refused by name. What the layouts hold: test_export_eagle3.c.
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/bf16.h"
#include "base/memory.h"
#include "tests/support/eagle3_fixture.h"
#include "tests/support/model_config.h"
#include "trainer/files.h"
#include "trainer/release.h"

enum { H = EAGLE3_H, V = EAGLE3_V, VD = EAGLE3_VD };

static struct eagle3_fixture at;

static int open_test(void **state)
{
    (void)state;
    eagle3_fixture_open(&at);
    return 0;
}

static int close_test(void **state)
{
    (void)state;
    eagle3_fixture_close(&at);
    return 0;
}

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
            if (values[i] != bf16_to_float(bf16_from_float(eagle3_fixture_value(i))))
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
    static const char *const *const drafters[] = {eagle3_llama, eagle3_llama_trainable,
                                                  eagle3_qwen3};
    for (int d = 0; d < 3; d++) {
        for (int64_t draft = VD; draft <= V; draft += V - VD) {
            struct error err = {""};
            eagle3_fixture_resolve(&at, drafters[d], draft);
            eagle3_fixture_write_checkpoint(&at);
            must_start_with(at.checkpoint);
            const char *out = run_path(&at.run, "again");
            if (eagle3_fixture_export(&at, out, EXPORT_SPECULATORS, NULL, &err) != 0)
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
        const struct safetensors_entry *part = eagle3_fixture_must_find(file, rewrite->fuse[i]);
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
        int64_t shape[2] = {0, eagle3_fixture_must_find(&file, rewrite->fuse[1])->shape[1]};
        for (int i = 1; i < 4 && rewrite->fuse[i] != NULL; i++)
            shape[0] += eagle3_fixture_must_find(&file, rewrite->fuse[i])->shape[0];
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
    eagle3_fixture_resolve(&at, eagle3_llama_trainable, VD);
    eagle3_fixture_write_checkpoint(&at);
    const char *out = eagle3_fixture_must_export(&at, "other", EXPORT_SPECFORGE);
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
    eagle3_fixture_resolve(&at, eagle3_llama, VD);
    eagle3_fixture_write_checkpoint(&at);
    const char *specforge = eagle3_fixture_must_export(&at, "specforge", EXPORT_SPECFORGE);
    const char *speculators = eagle3_fixture_must_export(&at, "speculators", EXPORT_SPECULATORS);
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
    eagle3_fixture_resolve(&at, eagle3_llama, V);
    must_not_start_with(specforge, "d2t: a draft vocabulary of 20 tokens", NULL);
    eagle3_fixture_resolve(&at, eagle3_llama, VD + 1);
    must_not_start_with(specforge, "draft_vocab_size: 20, but", NULL);
    eagle3_fixture_resolve(&at, eagle3_llama, VD);
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
        {EXPORT_SPECFORGE, NULL, "eagle_aux_hidden_state_layer_ids", "[1, 3, 5]"},
        {EXPORT_SPECFORGE, "eagle_config", "norm_before_fc", "true"},
        {EXPORT_SPECFORGE, "eagle_config", "use_aux_hidden_state", "false"},
        {EXPORT_SPECFORGE, "eagle_config", "parallel_heads", "4"},
        {EXPORT_SPECULATORS, NULL, "eagle_aux_hidden_state_layer_ids", "[1, 3, 5]"},
        {EXPORT_SPECULATORS, NULL, "norm_before_fc", "true"},
        {EXPORT_SPECULATORS, NULL, "speculators_model_type", "\"peagle\""},
        {EXPORT_SPECULATORS, NULL, "transformer_layer_config", NULL},
        {EXPORT_SPECULATORS, "transformer_layer_config", "vocab_size", "32"},
        {EXPORT_SPECULATORS, "transformer_layer_config", "mlp_bias", "true"},
    };
    eagle3_fixture_resolve(&at, eagle3_llama, VD);
    eagle3_fixture_write_checkpoint(&at);
    for (size_t i = 0; i < sizeof(edits) / sizeof(*edits); i++) {
        struct error err;
        const char *out = run_path(&at.run, "edited");
        assert_int_equal(eagle3_fixture_export(&at, out, edits[i].format, NULL, &err), 0);
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
    eagle3_fixture_resolve(&at, eagle3_llama, VD);
    at.sizes.target_layer_ids[0] = 1; // of 8 layers: 1, 3, 4
    at.sizes.target_layer_ids[1] = 3;
    at.sizes.target_layer_ids[2] = 4;
    eagle3_fixture_write_checkpoint(&at);
    const char *out = eagle3_fixture_must_export(&at, "bare", EXPORT_SPECFORGE);
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

// Servers read these switches from eagle_config first, or under an older name, and vLLM captured layers at the top.
static void other_places_of_fields_are_read(void **state)
{
    (void)state;
    static const char ids[] = "eagle_aux_hidden_state_layer_ids";
    eagle3_fixture_resolve(&at, eagle3_qwen3, VD);
    eagle3_fixture_write_checkpoint(&at);
    model_config_edit(at.checkpoint, NULL, "norm_before_fc", NULL);
    must_not_start_with(at.checkpoint, "config.json: norm_before_fc: ", NULL);
    model_config_edit(at.checkpoint, "eagle_config", "norm_before_fc", "true");
    must_start_with(at.checkpoint);
    model_config_edit(at.checkpoint, NULL, ids, "[2, 4, 6]");
    must_start_with(at.checkpoint);
    model_config_edit(at.checkpoint, "eagle_config", ids, NULL);
    must_start_with(at.checkpoint);
    eagle3_fixture_resolve(&at, eagle3_llama, VD);
    eagle3_fixture_write_checkpoint(&at);
    model_config_edit(at.checkpoint, NULL, "fc_norm", NULL);
    model_config_edit(at.checkpoint, NULL, "use_aux_norm", "true");
    must_start_with(at.checkpoint);
    eagle3_fixture_resolve(&at, eagle3_llama_trainable, VD);
    must_not_start_with(at.checkpoint,
                        "config.json: use_aux_norm: true, but drafter.fc_norm is false", NULL);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_test, close_test)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(both_layouts_round_trip),
        TEST(fused_tensors_and_other_names_are_read),
        TEST(copies_and_maps_must_be_those_of_the_run),
        TEST(another_drafter_is_refused_by_name),
        TEST(what_is_not_stated_has_the_readers_defaults),
        TEST(other_places_of_fields_are_read),
    };
    return cmocka_run_group_tests_name("release_eagle3", tests, NULL, NULL);
}
