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
