// Counter-based randomness: every draw is a pure function of (seed, epoch, document, purpose,
// counter), so it does not depend on world size, packing, threads or resume.
// Generator: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
#ifndef BASE_RNG_H
#define BASE_RNG_H

#include <stdint.h>

// What a stream of random numbers is for. Values are part of every run's meaning: never renumber.
enum rng_purpose {
    RNG_INIT = 1,   // initial weights
    RNG_ORDER = 2,  // order of documents in an epoch
    RNG_ANCHOR = 3, // keys of candidate anchors
    RNG_NOISE = 4,  // noise on features
    RNG_TEST = 5,   // data of tests and benchmarks
};

struct rng_key {
    uint32_t word[2];
};

// 64-bit mix of two words (splitmix64 finaliser over both); good enough to key streams.
uint64_t rng_mix(uint64_t a, uint64_t b);
// Key of one stream. `document` is a document's stable id, or any index where there is none.
struct rng_key rng_key_make(uint64_t seed, uint64_t epoch, uint64_t document,
                            enum rng_purpose purpose);
// Four 32-bit draws at `counter`.
void rng_block(struct rng_key key, uint64_t counter, uint32_t out[4]);
// One 64-bit draw at `counter`.
uint64_t rng_u64(struct rng_key key, uint64_t counter);
// Uniform in (0, 1), never 0 or 1.
float rng_uniform(struct rng_key key, uint64_t counter);
// Standard normal (Box-Muller), one per counter.
float rng_normal(struct rng_key key, uint64_t counter);
// The same at counters first, first + 1, ...: the same bits, in half the time.
void rng_normals(struct rng_key key, uint64_t first, int64_t count, float *out);

#endif
