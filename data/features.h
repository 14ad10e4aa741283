// How the features of one token lie in memory, on the host and on the backend: one token after the
// other, `stride` apart. All numbers are in elements of 2 bytes.
//   bf16:   the planes [P, H] as in the file
//   float8: scales fp32 [L], e4m3 codes [L, H], the last hidden state bf16 [H]; each begins at a
//           multiple of 16 bytes
#ifndef DATA_FEATURES_H
#define DATA_FEATURES_H

#include <stdbool.h>
#include <stdint.h>

#include "base/bf16.h"

struct feature_layout {
    int64_t planes, layers; // P; L, those that are not the last hidden state
    int64_t hidden_size;
    bool float8;
    int64_t stride; // from a token to the next
    int64_t codes;  // of the codes; float8 only
    int64_t last;   // of the last hidden state; -1: there is none
};

static inline int64_t feature_layout_round(int64_t bytes)
{
    return (bytes + 15) / 16 * 8;
}

static inline struct feature_layout feature_layout_make(int64_t planes, bool has_last,
                                                        int64_t hidden_size, bool float8)
{
    struct feature_layout f = {.planes = planes,
                               .layers = planes - has_last,
                               .hidden_size = hidden_size,
                               .float8 = float8,
                               .stride = planes * hidden_size};
    f.last = has_last ? f.layers * hidden_size : -1;
    if (!float8)
        return f;
    f.codes = feature_layout_round(4 * f.layers);
    f.stride = f.codes + feature_layout_round(f.layers * hidden_size);
    f.last = has_last ? f.stride : -1;
    f.stride += has_last ? feature_layout_round(2 * hidden_size) : 0;
    return f;
}

// A token's planes as fp32 values [P, H]; token: its features.
void features_to_float(const struct feature_layout *f, const bf16 *token, float *values);

// Bytes of a token in a file.
static inline int64_t feature_layout_file_bytes(const struct feature_layout *f)
{
    if (!f->float8)
        return 2 * f->planes * f->hidden_size;
    return f->layers * (f->hidden_size + 4) + 2 * (f->planes - f->layers) * f->hidden_size;
}

#endif
