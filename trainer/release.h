// A released drafter on disk: config.json and model.safetensors in any layout that `dtrain export`
// writes; config.json tells which. EAGLE-3 also with q, k and v, or gate and up, as one tensor. Strict:
// whatever is not as the run wants it is an error that names the file and the field or tensor, unless
// that name is allowed.
#ifndef TRAINER_RELEASE_H
#define TRAINER_RELEASE_H

#include "data/safetensors.h"
#include "data/vocab_map.h"
#include "drafter/drafter_sizes.h"

enum release_layout {
    RELEASE_ZLAB,        // SpecForge's too
    RELEASE_SPECULATORS, // with copies of the target's embedding and head, or without
    RELEASE_SPECFORGE,   // EAGLE-3 as SpecForge, SGLang and EAGLE have it
};

// What the drafter must be.
struct release_wanted {
    const struct drafter_sizes *sizes;
    const struct params *params;
    const struct target *target;
    const struct config_texts *allow; // fields and tensors that may differ; NULL: none
    const struct vocab_map *map;      // of eagle3; NULL: the whole vocabulary
};

struct release {
    enum release_layout layout;
    struct safetensors model;
};

// Compares the whole directory with what is wanted, values of embedding and head included. Allowed
// differences are logged.
int release_open(struct release *release, const char *directory,
                 const struct release_wanted *wanted, struct error *err);
void release_close(struct release *release);
// Puts the file's values into [first, first + count) of the flat array of `params`. Where a tensor was
// allowed to be absent or of another shape, in the padding, and with NULL or a closed release, `out`
// stays as it is.
void release_values(const struct release *release, const struct params *params, int64_t first,
                    int64_t count, float *out);

#endif
