// Opens what a plan needs from a config: the target's sizes, with or without its weights, and the shards'
// headers, or no shards at all.
#ifndef TRAINER_PLAN_OPEN_H
#define TRAINER_PLAN_OPEN_H

#include "trainer/plan_work.h"

enum plan_device {
    PLAN_DEVICE_HERE,    // the backend is live
    PLAN_DEVICE_NONE,    // planned for a GPU, and there is none
    PLAN_DEVICE_UNASKED, // planned for a GPU, without looking for one
};

struct plan_input {
    struct target target;
    char target_from[320];       // where its sizes are from, in words
    char data_from[64];          // where planes and documents are from, in words
    char no_shards[512];         // why there are no shards; "": there are
    struct error missing_shards; // beside those that are there, a line each
    struct plan_subject subject;
    struct plan_documents documents;
    enum plan_device device;
};

// target_config: a config.json or a folder with one, instead of the config's target.path; NULL: none.
// Reads the config's patterns of shards; those that match nothing are no fault. look: for a GPU, which
// takes a while where there is one.
int plan_input_open(struct plan_input *input, struct config *config, const char *target_config,
                    bool look, struct error *err);
void plan_input_close(struct plan_input *input);

#endif
