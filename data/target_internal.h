// What target.c (weights), target_config.c (facts) and target_sizes.c (facts alone) share.
#ifndef DATA_TARGET_INTERNAL_H
#define DATA_TARGET_INTERNAL_H

#include <cjson/cJSON.h>

#include "data/target.h"

// What config.json says about tie_word_embeddings, or the family's own default where it is silent.
// MIXED: the text model's part and the file's top disagree, which some published configs do.
enum tie { TIE_NO, TIE_YES, TIE_SAID_NO, TIE_SAID_YES, TIE_SAID_MIXED };

struct target_facts {
    enum tie tie;
    bool embed_scale_is_root; // embed_scale is sqrt(H), to be rounded to the embedding's dtype
    // Asked for by the caller: vocab_size is required, and what no size follows from may be missing.
    bool sizes_only;
};

// Fills everything but the tensors from `file`, a config.json; vocab_size is 0 when it is not given
// there. On errors the caller releases what has been filled.
int target_read_config(struct target *target, const char *file, struct target_facts *facts,
                       struct error *err);

// A JSON file that must hold an object; free with cJSON_Delete.
int target_read_json(const char *path, cJSON **json, struct error *err);

#endif
