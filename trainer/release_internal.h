// The two halves of reading a released drafter: its tensors (release.c) and its config.json.
#ifndef TRAINER_RELEASE_INTERNAL_H
#define TRAINER_RELEASE_INTERNAL_H

#include <cjson/cJSON.h>

#include "trainer/release.h"

struct release_check {
    const struct release_wanted *wanted;
    const char *file; // that is looked at
    bool *used;       // [wanted->allow->count] names that accepted something
    struct error *err;
    int faults;
};

// A difference in the field or tensor `name`: an error, or a warning when the name is allowed.
void release_fault(struct release_check *check, const char *name, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
// Tells the layout from config.json; -1: none that dtrain knows.
int release_recognise(const cJSON *root, const char *file, enum release_layout *layout,
                      struct error *err);
void release_check_config(struct release_check *check, const cJSON *root,
                          enum release_layout layout);

#endif
