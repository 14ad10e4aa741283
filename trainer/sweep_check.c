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

// ---- keys without effect -------------------------------------------------------------------------

// Which values of the grid change nothing.
struct idle {
    const struct sweep_grid *grid;
    size_t point;          // that is looked at
    bool *at;              // [points, axes]
    char *why[SWEEP_KEYS]; // "SECTION.KEY: has no effect ..."; NULL: of none
};

static void note_idle(void *context, const char *section, const char *key, const char *why)
{
    struct idle *idle = context;
    const struct sweep_grid *grid = idle->grid;
    char *name = memory_format("%s.%s", section, key);
    for (size_t a = 0; a < grid->axis_count; a++) {
        if (strcmp(grid->axes[a].key, name) != 0)
            continue;
        idle->at[idle->point * grid->axis_count + a] = true;
        if (idle->why[a] == NULL)
            idle->why[a] = memory_format("%s: has no effect %s", name, why);
    }
    free(name);
}

// Whether each point has one beside it, or is one, that differs in this key alone and is the same. Default values
// are not told of, so one of them is enough.
static bool idle_everywhere(const struct idle *idle, size_t axis)
{
    const struct sweep_grid *grid = idle->grid;
    size_t stride = 1, count = grid->axes[axis].count, points = sweep_grid_points(grid);
    bool all = true;
    for (size_t a = axis + 1; a < grid->axis_count; a++)
        stride *= grid->axes[a].count;
    for (size_t p = 0; p < points; p++) {
        size_t first = p - p / stride % count * stride;
        bool any = false;
        for (size_t v = 0; v < count; v++)
            any |= idle->at[(first + v * stride) * grid->axis_count + axis];
        all = all && any;
    }
    return all;
}

// A key that changes nothing at any point leaves nothing to compare. Where another key of the grid decides whether
// it does, some points are worth having.
static int tell_idle(const struct idle *idle, struct error *err)
{
    int status = 0;
    for (size_t a = 0; a < idle->grid->axis_count; a++) {
        if (idle->why[a] == NULL)
            continue;
        if (idle->grid->axes[a].count == 1)
            log_warn("--grid %s", idle->why[a]);
        else if (idle_everywhere(idle, a))
            status = error_add(err, "--grid %s; the points would be the same", idle->why[a]);
        else
            log_warn("--grid %s; such points that differ in it alone are the same", idle->why[a]);
    }
    return status;
}

// ---- all points ----------------------------------------------------------------------------------

static int check_point(struct sweep *sweep, size_t i, struct idle *idle, struct error *missing,
                       struct error *err)
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
    idle->point = i;
    config_idle_keys(&config, note_idle, idle);
    config_release(&config);
    return status;
}

int sweep_check_points(struct sweep *sweep, struct error *err)
{
    struct error missing = {""};
    struct idle idle = {
        .grid = &sweep->grid,
        .at = memory_alloc(sweep->point_count * sweep->grid.axis_count, sizeof(*idle.at))};
    int status = 0;
    for (size_t i = 0; i < sweep->point_count && status == 0; i++)
        status = check_point(sweep, i, &idle, &missing, err);
    if (status == 0)
        status = tell_idle(&idle, err);
    if (status == 0 && missing.text[0] != '\0')
        log_warn("%s", missing.text);
    for (size_t a = 0; a < sweep->grid.axis_count; a++)
        free(idle.why[a]);
    free(idle.at);
    return status;
}
