// Owns the counter-based generator. No state anywhere.
#include "base/rng.h"

#include <math.h>

#include "base/philox.h"

uint64_t rng_mix(uint64_t a, uint64_t b)
{
    uint64_t z = a + 0x9e3779b97f4a7c15u * (b + 1);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

struct rng_key rng_key_make(uint64_t seed, uint64_t epoch, uint64_t document,
                            enum rng_purpose purpose)
{
    uint64_t mixed = rng_mix(rng_mix(rng_mix(rng_mix(0, seed), epoch), document), purpose);
    return (struct rng_key){{(uint32_t)mixed, (uint32_t)(mixed >> 32)}};
}

void rng_block(struct rng_key key, uint64_t counter, uint32_t out[4])
{
    philox_block(key.word[0], key.word[1], counter, out);
}

uint64_t rng_u64(struct rng_key key, uint64_t counter)
{
    uint32_t out[4];
    rng_block(key, counter, out);
    return (uint64_t)out[1] << 32 | out[0];
}

float rng_uniform(struct rng_key key, uint64_t counter)
{
    uint32_t out[4];
    rng_block(key, counter, out);
    return philox_unit(out[0]);
}

float rng_normal(struct rng_key key, uint64_t counter)
{
    uint32_t out[4];
    rng_block(key, counter, out);
    float radius = sqrtf(-2.0f * logf(philox_unit(out[0])));
    return radius * cosf(6.28318530717958647692f * philox_unit(out[1]));
}

enum { DRAWS = 512 }; // together in first-level cache

// The compiler makes vectors of it: one version for each width of registers.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(DTRAIN_SANITIZE)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
static void
draw_units(struct rng_key key, uint64_t first, int64_t count, float *a, float *b)
{
    for (int64_t i = 0; i < count; i++) {
        uint32_t out[4];
        philox_block(key.word[0], key.word[1], first + (uint64_t)i, out);
        a[i] = philox_unit(out[0]);
        b[i] = 6.28318530717958647692f * philox_unit(out[1]);
    }
}

void rng_normals(struct rng_key key, uint64_t first, int64_t count, float *out)
{
    float angle[DRAWS];
    for (int64_t at = 0; at < count; at += DRAWS) {
        int64_t n = count - at < DRAWS ? count - at : DRAWS;
        float *radius = out + at;
        draw_units(key, first + (uint64_t)at, n, radius, angle);
        for (int64_t i = 0; i < n; i++)
            radius[i] = sqrtf(-2.0f * logf(radius[i]));
        for (int64_t i = 0; i < n; i++)
            radius[i] *= cosf(angle[i]);
    }
}
