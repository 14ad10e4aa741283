// The table of tensors, sizes resolved from config and target, and the rotary table.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/log.h"
#include "base/memory.h"
#include "data/safetensors.h"
#include "drafter/drafter_sizes.h"

static int64_t special[] = {1, 2};
static char sliding[] = "sliding_attention", full[] = "full_attention";
static char misspelt[] = "slidingattention";

static struct target small_target(void)
{
    return (struct target){.hidden_size = 8,
                           .vocab_size = 64,
                           .layers = 32,
                           .num_attention_heads = 2,
                           .num_key_value_heads = 1,
                           .head_dim = 4,
                           .intermediate_size = 12,
                           .max_position_embeddings = 4096,
                           .rms_norm_eps = 1e-5,
                           .rope_theta = 5e5,
                           .special_ids = special,
                           .special_count = 2,
                           .embed = {.rows = 64, .columns = 8}};
}

static const int64_t layer_ids[] = {1, 8, 31};

static void resolve(struct drafter_sizes *sizes, const struct drafter_config *config)
{
    struct target target = small_target();
    struct error err = {""};
    if (drafter_sizes_resolve(sizes, config, &target, layer_ids, 3, &err) != 0)
        fail_msg("%s", err.text);
}

static void defaults_come_from_the_target(void **state)
{
    (void)state;
    struct config config;
    config_init(&config);
    config.drafter.mask_token_id = 60;
    config.drafter.layers = 3;
    struct drafter_sizes sizes;
    resolve(&sizes, &config.drafter);
    assert_int_equal(sizes.hidden, 8);
    assert_int_equal(sizes.vocab, 64);
    assert_int_equal(sizes.target_layers, 32);
    assert_int_equal(sizes.heads, 2);
    assert_int_equal(sizes.kv_heads, 1);
    assert_int_equal(sizes.head_dim, 4);
    assert_int_equal(sizes.intermediate, 12);
    assert_int_equal(sizes.max_position_embeddings, 4096);
    assert_true(sizes.eps == 1e-5f);
    assert_true(sizes.rope_theta == 5e5);
    assert_int_equal(sizes.features, 3);
    assert_int_equal(sizes.target_layer_ids[2], 31);
    assert_int_equal(sizes.window, 0);
    for (int i = 0; i < 3; i++)
        assert_false(sizes.sliding[i]);
    config_release(&config);
}

static void given_sizes_win(void **state)
{
    (void)state;
    struct config config;
    config_init(&config);
    char *types[] = {sliding, full};
    struct drafter_config *drafter = &config.drafter;
    drafter->mask_token_id = 60;
    drafter->layers = 2;
    drafter->num_attention_heads = 6;
    drafter->num_key_value_heads = 3;
    drafter->head_dim = 10;
    drafter->intermediate_size = 7;
    drafter->rms_norm_eps = 1e-4;
    drafter->rope_theta = 777.0;
    drafter->layer_types = (struct config_texts){types, 2};
    drafter->sliding_window = 5;
    struct drafter_sizes sizes;
    resolve(&sizes, drafter);
    drafter->layer_types = (struct config_texts){NULL, 0};
    assert_int_equal(sizes.heads, 6);
    assert_int_equal(sizes.kv_heads, 3);
    assert_int_equal(sizes.head_dim, 10);
    assert_int_equal(sizes.intermediate, 7);
    assert_true(sizes.eps == 1e-4f);
    assert_true(sizes.rope_theta == 777.0);
    assert_true(sizes.sliding[0] && !sizes.sliding[1]);
    assert_int_equal(sizes.window, 5);
    assert_true(sizes.sliding_causal);
    config_release(&config);
}

// One fault each; the error must name the key.
struct refusal {
    const char *key;
    void (*spoil)(struct drafter_config *config, struct target *target, int64_t *ids);
};

static char *sliding_types[] = {sliding, full};
static char *wrong_types[] = {full, misspelt};

static void no_mask(struct drafter_config *config, struct target *target, int64_t *ids)
{
    (void)target, (void)ids;
    config->mask_token_id = CONFIG_UNSET;
}
static void mask_is_eos(struct drafter_config *config, struct target *target, int64_t *ids)
{
    (void)target, (void)ids;
    config->mask_token_id = 2;
}
static void mask_outside(struct drafter_config *config, struct target *target, int64_t *ids)
{
    (void)target, (void)ids;
    config->mask_token_id = 64;
}
static void heads_do_not_divide(struct drafter_config *config, struct target *target, int64_t *ids)
{
    (void)target, (void)ids;
    config->num_attention_heads = 5;
    config->num_key_value_heads = 2;
}
static void odd_head(struct drafter_config *config, struct target *target, int64_t *ids)
{
    (void)target, (void)ids;
    config->head_dim = 5;
}
static void no_heads(struct drafter_config *config, struct target *target, int64_t *ids)
{
    (void)config, (void)ids;
    target->num_attention_heads = 0;
}
static void no_theta(struct drafter_config *config, struct target *target, int64_t *ids)
{
    (void)config, (void)ids;
    target->rope_theta = 0.0;
}
static void layer_outside(struct drafter_config *config, struct target *target, int64_t *ids)
{
    (void)config, (void)target;
    ids[2] = 32;
}
static void layer_negative(struct drafter_config *config, struct target *target, int64_t *ids)
{
    (void)config, (void)target;
    ids[0] = -1;
}
static void layer_twice(struct drafter_config *config, struct target *target, int64_t *ids)
{
    (void)config, (void)target;
    ids[1] = ids[0];
}
static void no_window(struct drafter_config *config, struct target *target, int64_t *ids)
{
    (void)target, (void)ids;
    config->layer_types = (struct config_texts){sliding_types, 2};
}
static void unknown_type(struct drafter_config *config, struct target *target, int64_t *ids)
{
    (void)target, (void)ids;
    config->layer_types = (struct config_texts){wrong_types, 2};
}
static void too_few_types(struct drafter_config *config, struct target *target, int64_t *ids)
{
    (void)target, (void)ids;
    config->layer_types = (struct config_texts){sliding_types, 1};
}
static void block_too_big(struct drafter_config *config, struct target *target, int64_t *ids)
{
    (void)target, (void)ids;
    config->block_size = 65;
}

static void wide_head(struct drafter_config *config, struct target *target, int64_t *ids)
{
    (void)config, (void)ids;
    target->head_dim = 514;
}

static const struct refusal refusals[] = {
    {"drafter.mask_token_id", no_mask},      {"drafter.mask_token_id", mask_is_eos},
    {"drafter.mask_token_id", mask_outside}, {"drafter.num_attention_heads", heads_do_not_divide},
    {"drafter.head_dim", odd_head},          {"drafter.num_attention_heads", no_heads},
    {"drafter.rope_theta", no_theta},        {"target.layer_ids", layer_outside},
    {"target.layer_ids", layer_negative},    {"target.layer_ids", layer_twice},
    {"drafter.sliding_window", no_window},   {"drafter.layer_types", unknown_type},
    {"drafter.layer_types", too_few_types},  {"drafter.block_size", block_too_big},
    {"drafter.head_dim", wide_head},
};

static void faults_are_refused_by_key(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(refusals) / sizeof(*refusals); i++) {
        struct config config;
        config_init(&config);
        config.drafter.mask_token_id = 60;
        config.drafter.layers = 2;
        struct target target = small_target();
        int64_t ids[] = {1, 8, 31};
        refusals[i].spoil(&config.drafter, &target, ids);
        struct drafter_sizes sizes;
        struct error err = {""};
        int result = drafter_sizes_resolve(&sizes, &config.drafter, &target, ids, 3, &err);
        config.drafter.layer_types = (struct config_texts){NULL, 0};
        config_release(&config);
        if (result != -1 || strncmp(err.text, refusals[i].key, strlen(refusals[i].key)) != 0)
            fail_msg("fault %zu: wanted %s, got %d: %s", i, refusals[i].key, result, err.text);
    }
}

static void special_mask_can_be_allowed(void **state)
{
    (void)state;
    struct config config;
    config_init(&config);
    config.drafter.mask_token_id = 2;
    config.drafter.allow_special_mask = true;
    struct drafter_sizes sizes;
    resolve(&sizes, &config.drafter);
    assert_int_equal(sizes.mask_token_id, 2);
    config_release(&config);
}

static struct params make_params(int64_t layers, struct drafter_sizes *sizes)
{
    struct config config;
    config_init(&config);
    config.drafter.mask_token_id = 60;
    config.drafter.layers = layers;
    config.drafter.num_attention_heads = 3;
    config.drafter.num_key_value_heads = 1;
    config.drafter.head_dim = 6;
    config.drafter.intermediate_size = 5;
    resolve(sizes, &config.drafter);
    config_release(&config);
    struct params params = {0};
    drafter_params(sizes, &params);
    return params;
}

static void tensors_are_named_and_shaped_as_in_files(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int64_t rows, columns;
    } wanted[] = {
        {"fc.weight", 8, 24},
        {"hidden_norm.weight", 8, 1},
        {"layers.0.input_layernorm.weight", 8, 1},
        {"layers.0.self_attn.q_proj.weight", 18, 8},
        {"layers.0.self_attn.k_proj.weight", 6, 8},
        {"layers.0.self_attn.v_proj.weight", 6, 8},
        {"layers.0.self_attn.q_norm.weight", 6, 1},
        {"layers.0.self_attn.k_norm.weight", 6, 1},
        {"layers.0.self_attn.o_proj.weight", 8, 18},
        {"layers.0.post_attention_layernorm.weight", 8, 1},
        {"layers.0.mlp.gate_proj.weight", 5, 8},
        {"layers.0.mlp.up_proj.weight", 5, 8},
        {"layers.0.mlp.down_proj.weight", 8, 5},
        {"norm.weight", 8, 1},
    };
    struct drafter_sizes sizes;
    struct params params = make_params(1, &sizes);
    assert_int_equal(params.count, sizeof(wanted) / sizeof(*wanted));
    int64_t end = 0, trainable = 0;
    for (size_t i = 0; i < params.count; i++) {
        const struct param *param = &params.items[i];
        assert_string_equal(param->name, wanted[i].name);
        assert_int_equal(param->shape[0], wanted[i].rows);
        assert_int_equal(param->shape[1], wanted[i].columns);
        assert_int_equal(param->dims, wanted[i].columns == 1 ? 1 : 2);
        assert_true(param->norm == (param->dims == 1));
        assert_int_equal(param->count, wanted[i].rows * wanted[i].columns);
        assert_true(param->offset >= end);
        end = param->offset + param->count;
        trainable += param->count;
    }
    assert_true(params.elements >= end && params.elements % PARAM_ALIGNMENT == 0);
    assert_int_equal(params.trainable, trainable);
    params_release(&params);
}

// The first layer takes embedding and hidden state side by side.
static void tensors_of_eagle3(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int64_t rows, columns;
    } wanted[] = {
        {"fc.weight", 8, 24},
        {"input_norm.weight", 24, 1},
        {"layers.0.input_layernorm.weight", 8, 1},
        {"layers.0.hidden_norm.weight", 8, 1},
        {"layers.0.self_attn.q_proj.weight", 18, 16},
        {"layers.0.self_attn.k_proj.weight", 6, 16},
        {"layers.0.self_attn.v_proj.weight", 6, 16},
        {"layers.0.self_attn.o_proj.weight", 8, 18},
        {"layers.0.post_attention_layernorm.weight", 8, 1},
        {"layers.0.mlp.gate_proj.weight", 5, 8},
        {"layers.0.mlp.up_proj.weight", 5, 8},
        {"layers.0.mlp.down_proj.weight", 8, 5},
        {"layers.1.input_layernorm.weight", 8, 1},
        {"layers.1.self_attn.q_proj.weight", 18, 8},
    };
    struct config config;
    struct drafter_sizes sizes;
    config_init(&config);
    config.drafter.kind = DRAFTER_EAGLE3;
    config.drafter.style = STYLE_LLAMA;
    config.drafter.lm_head = HEAD_TRAINABLE;
    config.drafter.norm_before_fc = true;
    config.drafter.layers = 2;
    config.drafter.num_attention_heads = 3;
    config.drafter.num_key_value_heads = 1;
    config.drafter.head_dim = 6;
    config.drafter.intermediate_size = 5;
    resolve(&sizes, &config.drafter);
    config_release(&config);
    assert_int_equal(sizes.block_size, 7);
    assert_true(sizes.predict_from_anchor);
    sizes.draft_vocab = 11;
    struct params params = {0};
    drafter_params(&sizes, &params);
    for (size_t i = 0; i < sizeof(wanted) / sizeof(*wanted); i++) {
        assert_string_equal(params.items[i].name, wanted[i].name);
        assert_int_equal(params.items[i].shape[0], wanted[i].rows);
        assert_int_equal(params.items[i].shape[1], wanted[i].columns);
    }
    const struct param *head = &params.items[params.count - 1];
    assert_string_equal(head->name, "lm_head.weight");
    assert_int_equal(head->shape[0], 11);
    assert_false(head->norm);
    params_release(&params);
}

static void joined_tensors_touch_and_others_are_aligned(void **state)
{
    (void)state;
    struct drafter_sizes sizes;
    struct params params = make_params(2, &sizes);
    int joined = 0;
    for (size_t i = 0; i < params.count; i++) {
        const struct param *param = &params.items[i];
        bool join = strstr(param->name, "k_proj") != NULL ||
                    strstr(param->name, "v_proj") != NULL || strstr(param->name, "up_proj") != NULL;
        if (join)
            assert_int_equal(param->offset, param[-1].offset + param[-1].count);
        else
            assert_int_equal(param->offset % PARAM_ALIGNMENT, 0);
        joined += join;
    }
    assert_int_equal(joined, 6);
    assert_ptr_equal(params_find(&params, "layers.1.mlp.up_proj.weight"), &params.items[22]);
    assert_null(params_find(&params, "layers.2.mlp.up_proj.weight"));
    params_release(&params);
}

static void initial_values_depend_on_seed_and_name_only(void **state)
{
    (void)state;
    struct drafter_sizes sizes;
    struct params two = make_params(2, &sizes), one = make_params(1, &sizes);
    float *a = memory_alloc((size_t)two.elements, sizeof(*a));
    float *b = memory_alloc((size_t)one.elements, sizeof(*b));
    float *c = memory_alloc((size_t)one.elements, sizeof(*c));
    params_initialize(&two, 7, 0.02, a);
    params_initialize(&one, 7, 0.02, b);
    params_initialize(&one, 8, 0.02, c);
    for (size_t i = 0; i < one.count; i++) {
        const struct param *mine = &one.items[i], *theirs = params_find(&two, mine->name);
        size_t bytes = (size_t)mine->count * sizeof(float);
        assert_memory_equal(b + mine->offset, a + theirs->offset, bytes);
        for (int64_t j = 0; mine->norm && j < mine->count; j++)
            assert_true(b[mine->offset + j] == 1.0f);
        assert_true(mine->norm == (memcmp(b + mine->offset, c + mine->offset, bytes) == 0));
    }
    const struct param *q = params_find(&two, "layers.0.self_attn.q_proj.weight");
    const struct param *q1 = params_find(&two, "layers.1.self_attn.q_proj.weight");
    assert_memory_not_equal(a + q->offset, a + q1->offset, (size_t)q->count * sizeof(float));
    free(a);
    free(b);
    free(c);
    params_release(&one);
    params_release(&two);
}

static void initial_values_have_the_deviation_and_padding_is_zero(void **state)
{
    (void)state;
    struct params params = {0};
    params_add(&params, "odd", 1, 3, 1, true, false);
    params_add(&params, "big", 2, 100, 101, false, false);
    float *flat = memory_alloc((size_t)params.elements, sizeof(*flat));
    memset(flat, 0xff, (size_t)params.elements * sizeof(*flat));
    params_initialize(&params, 1, 0.5, flat);
    for (int i = 3; i < PARAM_ALIGNMENT; i++)
        assert_true(flat[i] == 0.0f);
    double sum = 0.0, squares = 0.0;
    const struct param *big = params_find(&params, "big");
    for (int64_t j = 0; j < big->count; j++) {
        double x = (double)flat[big->offset + j];
        sum += x;
        squares += x * x;
    }
    double mean = sum / (double)big->count;
    double deviation = sqrt(squares / (double)big->count);
    assert_true(fabs(mean) <= 0.02);
    assert_true(fabs(deviation - 0.5) <= 0.02);
    for (int64_t j = big->offset + big->count; j < params.elements; j++)
        assert_true(flat[j] == 0.0f);
    free(flat);
    params_release(&params);
}

static void initial_values_in_pieces_are_the_same(void **state)
{
    (void)state;
    struct params params = {0};
    params_add(&params, "odd", 1, 3, 1, true, false);
    params_add(&params, "big", 2, 300, 101, false, false);
    params_add(&params, "joined", 2, 7, 101, false, true);
    float *flat = memory_alloc((size_t)params.elements, sizeof(*flat));
    params_initialize(&params, 1, 0.5, flat);
    static const int64_t pieces[] = {1, 50, 4096, 20011};
    for (size_t i = 0; i < sizeof(pieces) / sizeof(*pieces); i++)
        for (int64_t at = 0; at < params.elements; at += pieces[i]) {
            int64_t n = params.elements - at < pieces[i] ? params.elements - at : pieces[i];
            float *piece = memory_alloc((size_t)n, sizeof(*piece));
            memset(piece, 0xff, (size_t)n * sizeof(*piece));
            params_values(&params, 1, 0.5, at, n, piece);
            assert_memory_equal(piece, flat + at, (size_t)n * sizeof(*piece));
            free(piece);
        }
    free(flat);
    params_release(&params);
}

static double number(const struct safetensors *file, int i, const char *what)
{
    char name[64];
    snprintf(name, sizeof(name), "%d.%s", i, what);
    const struct safetensors_entry *entry = safetensors_find(file, name);
    double value;
    assert_non_null(entry);
    memcpy(&value, entry->bytes, sizeof(value));
    return value;
}

static void check_rope(const struct safetensors *file, int i, int scaling)
{
    enum { POSITIONS = 600 };
    struct drafter_sizes sizes = {.head_dim = (int64_t)number(file, i, "head_dim"),
                                  .rope_theta = number(file, i, "theta"),
                                  .rope_scaling = scaling,
                                  .rope_factor = number(file, i, "factor"),
                                  .rope_original_positions =
                                      (int64_t)number(file, i, "original_positions")};
    double factor = number(file, i, "attention_factor");
    char name[64];
    snprintf(name, sizeof(name), "%d.inverse_frequencies", i);
    const struct safetensors_entry *entry = safetensors_find(file, name);
    size_t half = (size_t)sizes.head_dim / 2;
    assert_int_equal(entry->size, half * sizeof(double));
    const double *inverse = (const double *)(const void *)entry->bytes;
    float *cosines = memory_alloc(POSITIONS * half, sizeof(float));
    float *sines = memory_alloc(POSITIONS * half, sizeof(float));
    drafter_rope_table(&sizes, POSITIONS, cosines, sines);
    for (size_t j = 0; j < POSITIONS * half; j++) {
        double angle = (double)(j / half) * inverse[j % half];
        double cosine = (double)cosines[j] - factor * cos(angle);
        double sine = (double)sines[j] - factor * sin(angle);
        if (!(fabs(cosine) <= 2e-7 && fabs(sine) <= 2e-7))
            fail_msg("rope case %d, position %zu, pair %zu: off by %g, %g", i, j / half, j % half,
                     cosine, sine);
    }
    free(cosines);
    free(sines);
}

static void rope_tables_match_the_recorded_frequencies(void **state)
{
    (void)state;
    static const char *const names[] = {"\"none\"", "\"linear\"", "\"yarn\""};
    struct safetensors file;
    struct error err = {""};
    if (safetensors_open(&file, DTRAIN_SOURCE_DIR "/tests/golden/rope.safetensors", &err) != 0)
        fail_msg("%s", err.text);
    // A JSON list of the scaling of each case.
    const char *next = safetensors_metadata(&file, "rope_scaling");
    int cases = 0, seen = 0;
    for (; (next = strchr(next, '"')) != NULL; next = strchr(next + 1, '"') + 1) {
        for (int s = 0; s < 3; s++) {
            if (strncmp(next, names[s], strlen(names[s])) == 0) {
                check_rope(&file, cases, s);
                seen |= 1 << s;
            }
        }
        cases++;
    }
    assert_int_equal(seen, 7);
    assert_true(cases >= 3);
    safetensors_close(&file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_come_from_the_target),
        cmocka_unit_test(given_sizes_win),
        cmocka_unit_test(faults_are_refused_by_key),
        cmocka_unit_test(special_mask_can_be_allowed),
        cmocka_unit_test(tensors_are_named_and_shaped_as_in_files),
        cmocka_unit_test(tensors_of_eagle3),
        cmocka_unit_test(joined_tensors_touch_and_others_are_aligned),
        cmocka_unit_test(initial_values_depend_on_seed_and_name_only),
        cmocka_unit_test(initial_values_have_the_deviation_and_padding_is_zero),
        cmocka_unit_test(initial_values_in_pieces_are_the_same),
        cmocka_unit_test(rope_tables_match_the_recorded_frequencies),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
