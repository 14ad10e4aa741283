// Owns the table of trainable tensors: names, shapes, offsets and initial values. Does not own the
// flat arrays the offsets point into.
#include "drafter/params.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/memory.h"
#include "base/rng.h"

static int64_t aligned(int64_t elements)
{
    return (elements + PARAM_ALIGNMENT - 1) / PARAM_ALIGNMENT * PARAM_ALIGNMENT;
}

void params_release(struct params *params)
{
    free(params->items);
    *params = (struct params){0};
}

const struct param *params_add(struct params *params, const char *name, int dims, int64_t rows,
                               int64_t columns, bool norm, bool joined)
{
    BUG_UNLESS((dims == 2 || (dims == 1 && columns == 1)) && rows > 0 && columns > 0);
    BUG_UNLESS(strlen(name) < sizeof(params->items->name) && params_find(params, name) == NULL);
    BUG_UNLESS(!joined || params->count > 0);
    params->items = memory_resize(params->items, params->count + 1, sizeof(*params->items));
    struct param *param = &params->items[params->count++];
    *param = (struct param){.dims = dims, .shape = {rows, columns}, .norm = norm};
    snprintf(param->name, sizeof(param->name), "%s", name);
    param->count = rows * columns;
    param->offset = joined ? param[-1].offset + param[-1].count : params->elements;
    params->elements = aligned(param->offset + param->count);
    params->trainable += param->count;
    if (norm) {
        param->norm_offset = params->norm_elements;
        params->norm_elements = aligned(param->norm_offset + param->count);
    }
    return param;
}

const struct param *params_find(const struct params *params, const char *name)
{
    for (size_t i = 0; i < params->count; i++) {
        if (strcmp(params->items[i].name, name) == 0)
            return &params->items[i];
    }
    return NULL;
}

// FNV-1a, 64 bits: names key the random numbers, so a tensor starts the same whatever else there is.
static uint64_t name_hash(const char *name)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (; *name != '\0'; name++)
        hash = (hash ^ (unsigned char)*name) * 0x100000001b3u;
    return hash;
}

enum { SLICE = 1 << 14 }; // values that a thread makes at a time

// Initial values [first, first + count) of one tensor.
static void make_values(const struct param *param, struct rng_key key, double init_std,
                        int64_t first, int64_t count, float *out)
{
    if (!param->norm)
        rng_normals(key, (uint64_t)first, count, out);
    for (int64_t i = 0; i < count; i++)
        out[i] = param->norm ? 1.0f : (float)(init_std * (double)out[i]);
}

void params_values(const struct params *params, uint64_t seed, double init_std, int64_t first,
                   int64_t count, float *out)
{
    int64_t done = first;
    for (size_t i = 0; i < params->count; i++) { // offsets ascend
        const struct param *param = &params->items[i];
        struct rng_key key = rng_key_make(seed, 0, name_hash(param->name), RNG_INIT);
        int64_t begin = first > param->offset ? first - param->offset : 0;
        int64_t end = first + count - param->offset;
        if (end > param->count)
            end = param->count;
        if (begin >= end)
            continue;
        memset(out + (done - first), 0, (size_t)(param->offset + begin - done) * sizeof(*out));
        done = param->offset + end;
#pragma omp parallel for schedule(static)
        for (int64_t at = begin; at < end; at += SLICE)
            make_values(param, key, init_std, at, end - at < SLICE ? end - at : SLICE,
                        out + (param->offset + at - first));
    }
    memset(out + (done - first), 0, (size_t)(first + count - done) * sizeof(*out));
}

void params_initialize(const struct params *params, uint64_t seed, double init_std, float *flat)
{
    params_values(params, seed, init_std, 0, params->elements, flat);
}
