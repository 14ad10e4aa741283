// An EAGLE-3 drafter with weights, a map and a target on disk, not trained: what is exported, and started from.
#ifndef TESTS_SUPPORT_EAGLE3_FIXTURE_H
#define TESTS_SUPPORT_EAGLE3_FIXTURE_H

#include "tests/support/run_fixture.h"
#include "trainer/execution.h"
#include "trainer/export.h"

// Hidden size, vocabulary, draft vocabulary, step of the checkpoint.
enum { EAGLE3_H = 8, EAGLE3_V = 64, EAGLE3_VD = 20, EAGLE3_STEP = 3 };

struct eagle3_fixture {
    struct run_fixture run;
    struct config config;
    struct target target;
    struct drafter_sizes sizes;
    struct params params;
    struct vocab_map map;
    struct execution execution;
    const char *checkpoint;
};

// --set of three drafters.
extern const char *const eagle3_llama[], *const eagle3_llama_trainable[], *const eagle3_qwen3[];

// The folder with the target. Failures fail the test, here and below.
void eagle3_fixture_open(struct eagle3_fixture *fixture);
void eagle3_fixture_close(struct eagle3_fixture *fixture);
// From `sets` beside what every drafter here has, with a map of every third token and some others; draft_size
// EAGLE3_V: none.
void eagle3_fixture_resolve(struct eagle3_fixture *fixture, const char *const *sets,
                            int64_t draft_size);
// Of the master weights.
float eagle3_fixture_value(int64_t index);
void eagle3_fixture_write_checkpoint(struct eagle3_fixture *fixture);
// Of that checkpoint, into a folder; the result of export_command.
int eagle3_fixture_export(const struct eagle3_fixture *fixture, const char *out,
                          enum export_format format, const char *allow, struct error *err);
// The same into a folder of that name, which it returns.
const char *eagle3_fixture_must_export(const struct eagle3_fixture *fixture, const char *name,
                                       enum export_format format);
const struct safetensors_entry *eagle3_fixture_must_find(const struct safetensors *model,
                                                         const char *name);

#endif
