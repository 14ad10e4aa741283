// The grid of a sweep: keys with their values, as --grid gives them, and the points they span. The last
// key's values vary fastest.
#ifndef TRAINER_SWEEP_GRID_H
#define TRAINER_SWEEP_GRID_H

#include "configs/config.h"

enum { SWEEP_KEYS = 16, SWEEP_POINTS = 1024 };

struct sweep_axis {
    char key[CONFIG_NAME_BYTES]; // "section.key"
    char **values;               // as they were given
    size_t count;
};

struct sweep_grid {
    struct sweep_axis axes[SWEEP_KEYS];
    size_t axis_count;
};

// "KEY=V1,V2,..."; a value that is a list stands in brackets. Every fault is a line of err, which names key
// and value. Release it either way.
int sweep_grid_parse(struct sweep_grid *grid, const char *const *texts, size_t count,
                     struct error *err);
void sweep_grid_release(struct sweep_grid *grid);
// One key more with no values yet; NULL: there are too many.
struct sweep_axis *sweep_grid_add(struct sweep_grid *grid, const char *key);
void sweep_axis_add(struct sweep_axis *axis, const char *value, size_t length);

size_t sweep_grid_points(const struct sweep_grid *grid);
// The value of a key at a point.
const char *sweep_grid_value(const struct sweep_grid *grid, size_t point, size_t axis);
// A folder's name for the point, the same whenever it is asked: "max_anchors=512,block_size=8". The caller
// frees.
char *sweep_grid_name(const struct sweep_grid *grid, size_t point);

// The words of --set that make a point of a config.
struct sweep_sets {
    const char **items;
    size_t count;
    char *own[SWEEP_KEYS];
};
void sweep_sets_open(struct sweep_sets *sets, const struct sweep_grid *grid, size_t point,
                     const char *const *base, size_t base_count);
void sweep_sets_close(struct sweep_sets *sets);

// Loads the config of every point: each fault once, with the point that has it.
int sweep_grid_check(const struct sweep_grid *grid, const char *file, const char *const *sets,
                     size_t set_count, struct error *err);

#endif
