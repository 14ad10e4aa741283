// Owns the counter-based generator. No state anywhere.
#include "base/rng.h"

#include <math.h>

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
    uint32_t k0 = key.word[0], k1 = key.word[1];
    uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32), c2 = 0, c3 = 0;
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xd2511f53u * c0;
        uint64_t p1 = (uint64_t)0xcd9e8d57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        uint32_t n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

uint64_t rng_u64(struct rng_key key, uint64_t counter)
{
    uint32_t out[4];
    rng_block(key, counter, out);
    return (uint64_t)out[1] << 32 | out[0];
}

// 23 bits centred in their cells: exact in fp32 (24 bits and a half would round up to 1).
static float unit_interval(uint32_t bits)
{
    return ((float)(bits >> 9) + 0.5f) * 0x1p-23f;
}

float rng_uniform(struct rng_key key, uint64_t counter)
{
    uint32_t out[4];
    rng_block(key, counter, out);
    return unit_interval(out[0]);
}

float rng_normal(struct rng_key key, uint64_t counter)
{
    uint32_t out[4];
    rng_block(key, counter, out);
    float radius = sqrtf(-2.0f * logf(unit_interval(out[0])));
    return radius * cosf(6.28318530717958647692f * unit_interval(out[1]));
}
