// Owns the opening of a preset. What its plan must say is the tests'.
#include "tests/support/plan_preset.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/memory.h"

const char *const preset_dflash[2] = {"v4.yaml", "dflash-qwen3-8b.yaml"};

void preset_open(struct preset *p, const char *file, const char *const *sets, size_t count)
{
    struct error err = {""};
    char *path = memory_format("%s/configs/%s", DTRAIN_SOURCE_DIR, file);
    config_init(&p->config);
    if (config_load(&p->config, path, sets, count, &err) != 0 ||
        plan_input_open(&p->input, &p->config, NULL, false, &err) != 0)
        fail_msg("%s", err.text);
    free(path);
}

void preset_close(struct preset *p)
{
    plan_input_close(&p->input);
    config_release(&p->config);
}

void preset_plan(struct plan *plan, const struct preset *p)
{
    struct error err = {""};
    if (plan_make(plan, &p->input.subject, &p->config, NULL, &err) != 0)
        fail_msg("%s", err.text);
}
