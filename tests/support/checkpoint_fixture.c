// Owns the small drafter of checkpoint and export tests.
#include "tests/support/checkpoint_fixture.h"

#include <stdarg.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"

static int64_t special_ids[] = {1, 2};

static struct target make_target(void)
{
    return (struct target){.path = memory_strdup("/targets/small"),
                           .hidden_size = 8,
                           .vocab_size = 64,
                           .layers = 6,
                           .num_attention_heads = 2,
                           .num_key_value_heads = 1,
                           .head_dim = 4,
                           .intermediate_size = 12,
                           .max_position_embeddings = 128,
                           .rms_norm_eps = 1e-6,
                           .rope_theta = 1e6,
                           .special_ids = special_ids,
                           .special_count = 2,
                           .embed = {.rows = 64, .columns = 8}};
}

void drafter_fixture_resolve(struct drafter_fixture *fixture)
{
    static const int64_t layer_ids[] = {1, 3, 5};
    struct error err = {""};
    if (drafter_sizes_resolve(&fixture->sizes, &fixture->config.drafter, &fixture->target,
                              layer_ids, 3, &err) != 0)
        fail_msg("%s", err.text);
    params_release(&fixture->params);
    drafter_params(&fixture->sizes, &fixture->params);
}

void drafter_fixture_open(struct drafter_fixture *fixture, int64_t layers)
{
    *fixture = (struct drafter_fixture){.target = make_target()};
    static const char *const sets[] = {"run.dir=/runs/small",       "target.path=/targets/small",
                                       "data.train=[/shards/a.h5]", "drafter.block_size=8",
                                       "drafter.mask_token_id=60",  "loss.kl=1.0"};
    struct error err = {""};
    config_init(&fixture->config);
    if (config_load(&fixture->config, NULL, sets, sizeof(sets) / sizeof(*sets), &err) != 0)
        fail_msg("%s", err.text);
    fixture->config.drafter.layers = layers;
    drafter_fixture_resolve(fixture);
    fixture->execution = (struct execution){.device = "cpu",
                                            .hardware = "a processor",
                                            .library = "a library 1.0",
                                            .compute = "fp32",
                                            .logits = "fp32",
                                            .recompute = "none",
                                            .kernels = "auto",
                                            .group_rows = 64,
                                            .chunk_rows = 32,
                                            .threads = 1,
                                            .world_size = 1};
    fixture->info = (struct checkpoint_info){.config = &fixture->config,
                                             .execution = &fixture->execution,
                                             .sizes = &fixture->sizes,
                                             .target = &fixture->target,
                                             .target_name = "some/target",
                                             .data_fingerprint = 0xfedcba9876543210u,
                                             .target_fingerprint = 0x0123456789abcdefu,
                                             .command = "dtrain --config \"a b\".yaml"};
}

void drafter_fixture_close(struct drafter_fixture *fixture)
{
    params_release(&fixture->params);
    config_release(&fixture->config);
    free(fixture->target.path);
}

void drafter_fixture_layer_types(struct drafter_fixture *fixture, const char *types)
{
    struct config_texts *texts = &fixture->config.drafter.layer_types;
    char *words = memory_strdup(types), *rest = NULL;
    for (char *word = strtok_r(words, " ", &rest); word != NULL;
         word = strtok_r(NULL, " ", &rest)) {
        texts->items = memory_resize(texts->items, texts->count + 1, sizeof(*texts->items));
        texts->items[texts->count++] = memory_format("%s_attention", word);
    }
    free(words);
}

// Bit patterns of all sorts: small, huge and subnormal numbers, both zeros.
static float value_at(int64_t step, int array, int64_t index)
{
    struct rng_key key = rng_key_make((uint64_t)step, (uint64_t)array, 0, RNG_TEST);
    uint32_t bits = (uint32_t)rng_u64(key, (uint64_t)index);
    if (index % 7 == 0)
        bits &= 0x80000fffu; // subnormal or zero
    if ((bits & 0x7f800000u) == 0x7f800000u)
        bits &= 0xff7fffffu; // finite
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static struct counters counters_at(int64_t step)
{
    return (struct counters){.step = step,
                             .epoch = 2,
                             .row = 17,
                             .applied = step - 1,
                             .skipped_nonfinite = 1,
                             .nonfinite_in_a_row = 0,
                             .skipped_empty = 5,
                             .bad_documents = 6,
                             .tokens = INT64_MAX - step, // does not fit a double
                             .best_accept_len_walk = 3.0 + 1.0 / (double)(step + 2),
                             .best_step = 0,
                             .validations_without_better = 4,
                             .last_validation = step > 2 ? step - 2 : -1};
}

void drafter_fixture_fill(struct model_state *state, int64_t step)
{
    float *arrays[] = {state->master, state->m, state->v};
    for (size_t p = 0; p < state->layout.params->count; p++) {
        const struct param *param = &state->layout.params->items[p];
        for (int a = 0; a < 3; a++)
            for (int64_t i = param->offset; i < param->offset + param->count; i++)
                arrays[a][i] = value_at(step, a, i);
    }
    state->counters = counters_at(step);
}

void drafter_fixture_write(const struct drafter_fixture *fixture, const char *directory,
                           int64_t step)
{
    struct model_state state;
    struct error err = {""};
    model_state_open(&state, &fixture->params);
    drafter_fixture_fill(&state, step);
    if (checkpoint_write(directory, &state, &fixture->info, &err) != 0)
        fail_msg("%s", err.text);
    model_state_close(&state);
}

bool drafter_fixture_matches(const struct model_state *state, int64_t step)
{
    struct model_state wanted;
    model_state_open(&wanted, state->layout.params);
    drafter_fixture_fill(&wanted, step);
    size_t bytes = (size_t)state->layout.params->elements * sizeof(float);
    bool same = memcmp(state->master, wanted.master, bytes) == 0 &&
                memcmp(state->m, wanted.m, bytes) == 0 && memcmp(state->v, wanted.v, bytes) == 0 &&
                memcmp(&state->counters, &wanted.counters, sizeof(wanted.counters)) == 0;
    model_state_close(&wanted);
    return same;
}
