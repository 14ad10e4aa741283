// Owns making float8 shards for tests.
#include "tests/support/float8_shard.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/e4m3.h"
#include "base/log.h"
#include "base/memory.h"

static uint8_t nearest_code(float value)
{
    uint8_t best = 0;
    for (int code = 1; code < E4M3_NAN; code++)
        if (fabsf(fabsf(value) - e4m3_to_float((uint8_t)code)) <
            fabsf(fabsf(value) - e4m3_to_float(best)))
            best = (uint8_t)code;
    return value < 0.0f ? best | 0x80 : best;
}

static float power_of_two_scale(const bf16 *values, int64_t count)
{
    float most = 0.0f, largest = e4m3_to_float(E4M3_NAN - 1);
    for (int64_t i = 0; i < count; i++)
        most = fmaxf(most, fabsf(bf16_to_float(values[i])));
    return most > 0.0f ? exp2f(ceilf(log2f(most / largest))) : 1.0f;
}

void float8_shard_make(struct float8_shard *shard, struct fixture *fixture)
{
    const struct shard_content *content = &fixture->content;
    int64_t layers = content->layers, width = content->hidden_size;
    size_t tokens = (size_t)content->tokens;
    bool has_last = content->last_hidden != LAST_HIDDEN_ABSENT;
    *shard = (struct float8_shard){.content = *content};
    shard->codes = memory_alloc(tokens * (size_t)(layers * width), 1);
    shard->scales = memory_alloc(tokens * (size_t)layers, sizeof(float));
    shard->last = has_last ? memory_alloc(tokens * (size_t)width, sizeof(bf16)) : NULL;
    for (int64_t t = 0; t < content->tokens; t++) {
        for (int64_t l = 0; l < layers; l++) {
            bf16 *values = fixture_hidden(fixture, t, l);
            float scale = power_of_two_scale(values, width);
            shard->scales[t * layers + l] = scale;
            for (int64_t i = 0; i < width; i++) {
                uint8_t code = nearest_code(bf16_to_float(values[i]) / scale);
                shard->codes[(t * layers + l) * width + i] = code;
                values[i] = bf16_from_float(e4m3_to_float(code) * scale);
            }
        }
        if (has_last)
            memcpy(shard->last + t * width, fixture_hidden(fixture, t, layers),
                   (size_t)width * sizeof(bf16));
    }
    shard->content.codes = shard->codes;
    shard->content.scales = shard->scales;
    shard->content.hidden_states = shard->last;
}

void float8_shard_release(struct float8_shard *shard)
{
    free(shard->codes);
    free(shard->scales);
    free(shard->last);
}

void float8_shard_write_both(const struct fixture_options *options, const char *path,
                             const char *twin_path)
{
    struct fixture fixture;
    struct float8_shard shard;
    struct error err = {""};
    fixture_make(&fixture, options);
    float8_shard_make(&shard, &fixture);
    fixture_write(&fixture, twin_path);
    if (shard_write(path, &shard.content, &err) != 0)
        die("%s", err.text);
    float8_shard_release(&shard);
    fixture_release(&fixture);
}
