// Owns the values of features, for what does not compute on the backend.
#include "data/features.h"

#include <string.h>

#include "base/e4m3.h"

void features_to_float(const struct feature_layout *f, const bf16 *token, float *values)
{
    int64_t width = f->hidden_size, first = f->float8 ? f->layers : 0;
    const unsigned char *scales = (const unsigned char *)token;
    const uint8_t *codes = (const uint8_t *)(token + f->codes);
    for (int64_t plane = 0; plane < first; plane++) {
        float scale;
        memcpy(&scale, scales + (size_t)plane * sizeof(scale), sizeof(scale));
        for (int64_t i = plane * width; i < (plane + 1) * width; i++)
            values[i] = e4m3_to_float(codes[i]) * scale;
    }
    const bf16 *rest = f->float8 ? token + f->last : token;
    for (int64_t i = 0; i < (f->planes - first) * width; i++)
        values[first * width + i] = bf16_to_float(rest[i]);
}
