// Owns what is looked at in every point's config before anything is planned: what a sweep can not run, files that
// a plan alone does without, keys of the grid that change nothing.
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/memory.h"
#include "trainer/files.h"
#include "trainer/sweep.h"

// A real start refuses it. Steps and most of the memory follow without it.
static void note_missing_map(const struct sweep *sweep, size_t point, const struct config *config,
                             struct error *missing)
{
    const char *path = config->drafter.draft_vocab;
    if (path != NULL && !files_exists(path) && strstr(missing->text, path) == NULL)
        error_add(missing,
                  "drafter.draft_vocab: %s is not there; its size is guessed (first at the point "
                  "%s)",
                  path, sweep->points[point].name);
}

static int check_point(struct sweep *sweep, size_t i, struct error *missing, struct error *err)
{
    struct config config;
    config_init(&config);
    int status = sweep_load_point(sweep, i, &config, err);
    if (status == 0 && config.data.spool != NULL)
        status = error_set(err, "data.spool: its features are gone when they have been used, so "
                                "points can not share them; a sweep needs shards (data.train)");
    sweep->points[i].block_size = config.drafter.kind == DRAFTER_DFLASH ? config.drafter.block_size
                                                                        : config.drafter.ttt_steps;
    note_missing_map(sweep, i, &config, missing);
    config_release(&config);
    return status;
}

int sweep_check_points(struct sweep *sweep, struct error *err)
{
    struct error missing = {""};
    int status = 0;
    for (size_t i = 0; i < sweep->point_count && status == 0; i++)
        status = check_point(sweep, i, &missing, err);
    if (status == 0 && missing.text[0] != '\0')
        log_warn("%s", missing.text);
    return status;
}
