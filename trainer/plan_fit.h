// The largest values of keys that fit a device's memory, found by planning.
#ifndef TRAINER_PLAN_FIT_H
#define TRAINER_PLAN_FIT_H

#include <cjson/cJSON.h>
#include <stdio.h>

#include "trainer/plan.h"

enum { FIT_TRIES = 48, FIT_KEYS = 8 };

struct fit_try {
    int64_t value;
    size_t needed; // bytes; 0: the config would be faulty
    size_t host;   // bytes of host memory beside them
    bool fits;
};

// Of one key, everything else as the config has it.
struct plan_fit {
    char key[64];
    int64_t now, granule;   // values tried besides are multiples of the granule
    bool independent;       // the device's memory is the same for all values tried
    bool host_grows;        // and the host's is not
    bool lists_types;       // another value needs another list drafter.layer_types
    bool open;              // the execution may be cut smaller; else it stays as it is now
    bool found, bounded;    // some value fits; some value does not
    struct fit_try largest; // that fits
    struct fit_try next;    // the next one tried, too much; of none found the one that needs least
    struct plan_cut cut;    // with `largest`
    struct fit_try doubled[FIT_TRIES]; // now, and its doubles until one does not fit
    size_t doubled_count;
};

// now: the plan of the config as it is. The subject's limit must be set. -1: no such key, or one that has no
// value to start from.
int plan_fit_key(struct plan_fit *fit, const struct plan_subject *subject,
                 const struct config *config, const struct plan *now, const char *key, bool open,
                 struct error *err);

// Of several keys together, all by the same factor, which is a multiple of 1/16.
struct plan_fit_together {
    size_t count;
    char key[FIT_KEYS][64];
    int64_t value[FIT_KEYS];
    bool found, bounded;
    double factor;
    size_t needed, next_needed; // with this factor, and 1/16 more
};
int plan_fit_together(struct plan_fit_together *fit, const struct plan_subject *subject,
                      const struct config *config, const struct plan *now, const char *const *keys,
                      size_t count, struct error *err);

// What was found, as text or as "fit" and "fit_together" of an object. together NULL: one key only.
void plan_fit_print(const struct plan_fit *fits, size_t count,
                    const struct plan_fit_together *together, size_t device_memory, FILE *out);
void plan_fit_json(const struct plan_fit *fits, size_t count,
                   const struct plan_fit_together *together, cJSON *root);

#endif
