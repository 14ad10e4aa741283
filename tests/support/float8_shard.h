// float8 shards for tests, and the bf16 shard of exactly the same values: scales are powers of two, so
// that code times scale is a bf16 number.
#ifndef TESTS_SUPPORT_FLOAT8_SHARD_H
#define TESTS_SUPPORT_FLOAT8_SHARD_H

#include "tests/support/shard_fixture.h"

struct float8_shard {
    struct shard_content content; // the fixture's, with codes
    uint8_t *codes;               // [tokens, layers, hidden_size]
    float *scales;                // [tokens, layers]
    bf16 *last;                   // [tokens, hidden_size]; NULL when absent
};

// Rounds the fixture's layers to what the codes mean (the fixture is then the bf16 twin).
void float8_shard_make(struct float8_shard *shard, struct fixture *fixture);
void float8_shard_release(struct float8_shard *shard);
// Writes the shard to path and its twin to twin_path.
void float8_shard_write_both(const struct fixture_options *options, const char *path,
                             const char *twin_path);

#endif
