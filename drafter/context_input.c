// Owns a row's features on their way into fc. Does not own fc.
#include "drafter/context_input.h"

#include <string.h>

#include "base/log.h"
#include "base/rng.h"
#include "drafter/layer.h"

bool context_input_direct(const struct drafter_options *options)
{
    bool in_order = !options->sizes->norm_before_fc;
    for (int64_t l = 0; l < options->sizes->features; l++)
        in_order = in_order && options->plane[l] == l;
    return in_order && !options->features.float8 && options->compute == DTYPE_BF16 &&
           options->noise == NOISE_KIND_NONE;
}

void context_input_plan(struct context_input *input, const struct drafter_options *o,
                        struct arena *arena)
{
    int64_t t = o->max_tokens;
    input->fc_stride =
        context_input_direct(o) ? o->features.stride : o->sizes->features * o->sizes->hidden;
    input->positions = layer_take(arena, "context", -1, "positions", DTYPE_I32, t, 1);
    input->noise_key = layer_take(arena, "context", -1, "noise_key", DTYPE_I32, t, 2);
    input->blank = layer_take(arena, "context", -1, "blank", DTYPE_U8, t, 1);
}

void context_input_plan_loaded(struct context_input *input, const struct drafter_options *o,
                               struct arena *arena)
{
    input->loaded = layer_take(arena, "context", -1, "context_in", o->compute, o->max_tokens,
                               o->sizes->features * o->sizes->hidden);
}

void context_input_open(struct context_input *input, const struct drafter_options *o,
                        const struct backend *backend)
{
    size_t tokens = (size_t)o->max_tokens;
    input->backend = backend;
    input->h_noise_key = backend->host_alloc(tokens * 2 * sizeof(uint32_t));
    input->h_positions = backend->host_alloc(tokens * sizeof(int32_t));
    input->h_blank = backend->host_alloc(tokens);
}

void context_input_close(struct context_input *input)
{
    if (input->backend == NULL)
        return;
    input->backend->host_free(input->h_noise_key);
    input->backend->host_free(input->h_positions);
    input->backend->host_free(input->h_blank);
}

void context_input_begin(struct context_input *input, const struct drafter_options *o,
                         const struct backend *backend, struct stream *stream,
                         const struct row *row, const bf16 *features, bool noisy, uint64_t seed)
{
    size_t tokens = (size_t)row->tokens;
    if (row->tokens > o->max_tokens)
        BUG("a row of %lld tokens, planned for %lld", (long long)row->tokens,
            (long long)o->max_tokens);
    input->row = row;
    input->features = features;
    input->noise = noisy ? o->noise : NOISE_KIND_NONE;
    memcpy(input->h_positions, row->positions, tokens * sizeof(int32_t));
    memcpy(input->h_blank, row->blank, tokens);
    backend->copy_in(stream, input->positions, input->h_positions, tokens * sizeof(int32_t));
    backend->copy_in(stream, input->blank, input->h_blank, tokens);
    if (input->noise == NOISE_KIND_NONE)
        return;
    for (int64_t document = 0; document < row->documents; document++) {
        struct rng_key key = rng_key_make(seed, row->epoch, row->doc_ids[document], RNG_NOISE);
        for (int64_t t = row->doc_offsets[document]; t < row->doc_offsets[document + 1]; t++) {
            input->h_noise_key[2 * t] = key.word[0];
            input->h_noise_key[2 * t + 1] = key.word[1];
        }
    }
    backend->copy_in(stream, input->noise_key, input->h_noise_key, tokens * 2 * sizeof(uint32_t));
}

void context_input_load(struct context_input *input, const struct drafter_options *o,
                        const struct backend *backend, struct stream *stream)
{
    bool direct = context_input_direct(o);
    input->fc_in = direct ? (const void *)input->features : input->loaded;
    if (direct)
        return;
    const struct feature_layout *f = &o->features;
    struct context_load load = {.tokens = input->row->tokens,
                                .layers = o->sizes->features,
                                .hidden = o->sizes->hidden,
                                .in = input->features,
                                .in_bytes = f->stride * (int64_t)sizeof(bf16),
                                .plane = o->plane,
                                .type = o->compute,
                                .out = input->loaded,
                                .noise = input->noise,
                                .noise_std = o->noise_std,
                                .noise_key = input->noise_key,
                                .positions = input->positions,
                                .blank = input->blank};
    if (f->float8) {
        load.in = input->features + f->codes;
        load.scales = (const float *)(const void *)input->features;
        load.scale_stride = load.in_bytes / (int64_t)sizeof(float);
    }
    backend->kernels->context_load(stream, &load);
}

void context_input_noise(const struct drafter_options *o, const struct row *row, uint64_t seed,
                         float *out)
{
    int64_t layers = o->sizes->features, hidden = o->sizes->hidden;
    for (int64_t document = 0; document < row->documents; document++) {
        struct rng_key key = rng_key_make(seed, row->epoch, row->doc_ids[document], RNG_NOISE);
        for (int64_t t = row->doc_offsets[document]; t < row->doc_offsets[document + 1]; t++)
            for (int64_t i = 0; i < layers * hidden; i++) {
                uint64_t counter = (uint64_t)(row->positions[t] * layers * hidden + i);
                float draw = o->noise == NOISE_KIND_NORMAL
                                 ? rng_normal(key, counter)
                                 : 2.0f * rng_uniform(key, counter) - 1.0f;
                out[t * layers * hidden + i] = o->noise_std * draw;
            }
    }
}
