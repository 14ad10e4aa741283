// Plans as text and as JSON.
#ifndef TRAINER_PLAN_PRINT_H
#define TRAINER_PLAN_PRINT_H

#include <cjson/cJSON.h>
#include <stdio.h>

#include "trainer/plan_open.h"

// Everything that is said of one config.
struct plan_report {
    const struct config *config;
    const struct plan_input *input;
    const struct plan *plan;
    const struct plan_work *work;
    size_t device_memory;    // of one device; 0: not known
    const char *memory_from; // what says so
    double tflops;
    bool fitting; // values that fit are looked for, too
};

void plan_print(const struct plan_report *report, FILE *out);
// An object that the caller frees with cJSON_Delete.
cJSON *plan_json(const struct plan_report *report);

enum { PLAN_NUMBER_TEXT = 32, PLAN_WHY_TEXT = 160 };
// 16,384
const char *plan_number(int64_t value, char text[PLAN_NUMBER_TEXT]);
// Why the execution's "group_rows", "chunk_rows", "recompute" or "logits" is as it is.
const char *plan_why(const struct plan *plan, const struct config *config, const char *what,
                     char text[PLAN_WHY_TEXT]);
// A line for each part on one rank, for logs and refusals: "weights 3.22 GiB, ..., total 46.1 GiB".
void plan_summary(const struct plan *plan, int64_t ranks, char *text, size_t size);

#endif
