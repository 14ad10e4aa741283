// The two halves of reading a released drafter: its tensors (release.c) and its config.json.
#ifndef TRAINER_RELEASE_INTERNAL_H
#define TRAINER_RELEASE_INTERNAL_H

#include <cjson/cJSON.h>

#include "trainer/release.h"

struct release_check {
    const struct release_wanted *wanted;
    const char *file; // that is looked at
    bool *used;       // [wanted->allow->count] names that accepted something
    bool *read;       // [model.count] tensors that parameters are read from
    struct error *err;
    int faults;
};

// A difference in the field or tensor `name`: an error, or a warning when the name is allowed.
void release_fault(struct release_check *check, const char *name, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
// Tells the layout of a kind of drafter from config.json; -1: none that dtrain knows.
int release_recognise(const cJSON *root, int kind, const char *file, enum release_layout *layout,
                      struct error *err);
void release_check_config(struct release_check *check, const cJSON *root,
                          enum release_layout layout);

// Where a parameter's values are: rows [row, row + shape[0]) of an entry that has `rows`.
struct release_place {
    const struct safetensors_entry *entry; // NULL: nowhere
    int64_t row, rows;
};
struct release_place release_find(const struct safetensors *model, const struct params *params,
                                  const struct param *param);
// Tensors of an EAGLE-3 release that are no parameters: the map, copies of the target. False: another one.
bool release_check_eagle3_tensor(struct release_check *check, const struct safetensors *model,
                                 const struct safetensors_entry *entry);
// That what a draft vocabulary needs is there.
void release_check_eagle3_map(struct release_check *check, const struct safetensors *model);
// A copy of the target's rows: the first `rows`, or those of ids [rows].
void release_check_copy(struct release_check *check, const struct safetensors_entry *entry,
                        const struct target_tensor *tensor, const int32_t *ids, int64_t rows,
                        const char *hint);

// ---- fields of config.json

const cJSON *release_get(const cJSON *object, const char *name); // NULL: absent or null
// A number that must be exactly the wanted one. Where it is not stated it is `standard`; NAN: it must
// be stated.
struct release_number {
    const char *name, *key;
    double standard, wanted;
};
void release_check_number(struct release_check *check, const cJSON *object,
                          const struct release_number *number);
void release_check_flag(struct release_check *check, const cJSON *object, const char *name,
                        bool standard, bool wanted, const char *meaning);
void release_check_text(struct release_check *check, const cJSON *object, const char *name,
                        const char *wanted, const char *meaning);
// `shift`: the file's number of a layer less dtrain's.
void release_check_layer_ids(struct release_check *check, const cJSON *object, const char *name,
                             int64_t shift);
void release_check_rope(struct release_check *check, const cJSON *layers, double positions);
void release_check_layer_types(struct release_check *check, const cJSON *layers);
void release_check_eps(struct release_check *check, const cJSON *layers);
void release_check_eagle3_config(struct release_check *check, const cJSON *root,
                                 enum release_layout layout);

#endif
