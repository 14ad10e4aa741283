// A shipped preset, planned for a GPU as if none were here.
#ifndef TESTS_SUPPORT_PLAN_PRESET_H
#define TESTS_SUPPORT_PLAN_PRESET_H

#include "trainer/plan_open.h"

#define PRESET_V4 (DTRAIN_SOURCE_DIR "/configs/v4.yaml")
extern const char *const preset_dflash[2]; // file names
static const size_t preset_gib = (size_t)1 << 30;

struct preset {
    struct config config;
    struct plan_input input;
};

// file: in configs/. Failures fail the test.
void preset_open(struct preset *preset, const char *file, const char *const *sets, size_t count);
void preset_close(struct preset *preset);
void preset_plan(struct plan *plan, const struct preset *preset);

#endif
