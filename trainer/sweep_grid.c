// Owns the reading of --grid and the check of every point's config by the table of keys.
#include "trainer/sweep_grid.h"

#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/memory.h"
#include "base/rng.h"

// ---- reading -------------------------------------------------------------------------------------

struct sweep_axis *sweep_grid_add(struct sweep_grid *grid, const char *key)
{
    if (grid->axis_count == SWEEP_KEYS)
        return NULL;
    struct sweep_axis *axis = &grid->axes[grid->axis_count++];
    *axis = (struct sweep_axis){.count = 0};
    snprintf(axis->key, sizeof(axis->key), "%s", key);
    return axis;
}

void sweep_axis_add(struct sweep_axis *axis, const char *value, size_t length)
{
    axis->values = memory_resize(axis->values, axis->count + 1, sizeof(*axis->values));
    axis->values[axis->count++] = memory_format("%.*s", (int)length, value);
}

// Up to the next comma that no bracket encloses.
static size_t value_length(const char *text)
{
    int depth = 0;
    size_t n = 0;
    for (; text[n] != '\0' && (depth > 0 || text[n] != ','); n++)
        depth += (text[n] == '[') - (text[n] == ']');
    return n;
}

static void trim(const char **text, size_t *length)
{
    while (*length > 0 && **text == ' ') {
        (*text)++;
        (*length)--;
    }
    while (*length > 0 && (*text)[*length - 1] == ' ')
        (*length)--;
}

static int add_values(struct sweep_axis *axis, const char *text, struct error *err)
{
    int result = 0;
    for (;;) {
        size_t whole = value_length(text), n = whole;
        const char *value = text;
        trim(&value, &n);
        if (n == 0)
            return error_add(err, "--grid %s: a value is empty", axis->key);
        for (size_t i = 0; i < axis->count; i++)
            if (strlen(axis->values[i]) == n && memcmp(axis->values[i], value, n) == 0)
                result = error_add(err, "--grid %s: %s is given twice", axis->key, axis->values[i]);
        sweep_axis_add(axis, value, n);
        if (text[whole] == '\0')
            return result;
        text += whole + 1;
    }
}

static int parse_one(struct sweep_grid *grid, const char *text, struct error *err)
{
    char key[CONFIG_NAME_BYTES];
    struct error why = {""};
    const char *equals = strchr(text, '=');
    if (equals == NULL || equals == text || equals[1] == '\0')
        return error_add(err, "--grid %s: expected key=value,value,...", text);
    char *name = memory_format("%.*s", (int)(equals - text), text);
    int found = config_find_name(name, key, &why);
    free(name);
    if (found != 0)
        return error_add(err, "--grid %s", why.text);
    if (strcmp(key, "run.dir") == 0)
        return error_add(err,
                         "--grid run.dir: is the sweep's folder, each point gets one below it");
    for (size_t i = 0; i < grid->axis_count; i++)
        if (strcmp(grid->axes[i].key, key) == 0)
            return error_add(err, "--grid %s: given twice; one --grid holds all values of a key",
                             key);
    struct sweep_axis *axis = sweep_grid_add(grid, key);
    if (axis == NULL)
        return error_add(err, "--grid %s: more than %d keys", key, SWEEP_KEYS);
    return add_values(axis, equals + 1, err);
}

int sweep_grid_parse(struct sweep_grid *grid, const char *const *texts, size_t count,
                     struct error *err)
{
    int result = 0;
    double points = 1.0;
    *grid = (struct sweep_grid){.axis_count = 0};
    for (size_t i = 0; i < count; i++)
        result |= parse_one(grid, texts[i], err);
    for (size_t i = 0; i < grid->axis_count; i++)
        points *= (double)grid->axes[i].count;
    if (result == 0 && points > SWEEP_POINTS)
        return error_add(err, "--grid: %.0f points, more than %d", points, SWEEP_POINTS);
    return result;
}

void sweep_grid_release(struct sweep_grid *grid)
{
    for (size_t i = 0; i < grid->axis_count; i++) {
        for (size_t v = 0; v < grid->axes[i].count; v++)
            free(grid->axes[i].values[v]);
        free(grid->axes[i].values);
    }
    *grid = (struct sweep_grid){.axis_count = 0};
}

// ---- points --------------------------------------------------------------------------------------

size_t sweep_grid_points(const struct sweep_grid *grid)
{
    size_t points = 1;
    for (size_t i = 0; i < grid->axis_count; i++)
        points *= grid->axes[i].count;
    return points;
}

const char *sweep_grid_value(const struct sweep_grid *grid, size_t point, size_t axis)
{
    for (size_t i = grid->axis_count; --i > axis;)
        point /= grid->axes[i].count;
    return grid->axes[axis].values[point % grid->axes[axis].count];
}

// What a folder's name can not or should not hold becomes a '_'.
static void make_plain(char *name)
{
    for (; *name != '\0'; name++)
        if (strchr("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.,=+-", *name) ==
            NULL)
            *name = '_';
}

// Names that would be cut or made plain alike get a number made from the whole text.
char *sweep_grid_name(const struct sweep_grid *grid, size_t point)
{
    enum { LONGEST = 160 };
    char *name = memory_strdup("");
    uint64_t hash = 0;
    for (size_t i = 0; i < grid->axis_count; i++) {
        char *longer =
            memory_format("%s%s%s=%s", name, i > 0 ? "," : "", config_short_name(grid->axes[i].key),
                          sweep_grid_value(grid, point, i));
        free(name);
        name = longer;
    }
    char *whole = memory_strdup(name);
    make_plain(name);
    if (strlen(name) > LONGEST || strcmp(name, whole) != 0) {
        for (const char *c = whole; *c != '\0'; c++)
            hash = rng_mix(hash, (uint64_t)(unsigned char)*c);
        char *cut = memory_format("%.*s~%08x", LONGEST, name, (unsigned)(hash & 0xffffffffU));
        free(name);
        name = cut;
    }
    free(whole);
    return name;
}

void sweep_sets_open(struct sweep_sets *sets, const struct sweep_grid *grid, size_t point,
                     const char *const *base, size_t base_count)
{
    *sets = (struct sweep_sets){
        .items = memory_alloc(base_count + grid->axis_count, sizeof(*sets->items))};
    for (size_t i = 0; i < base_count; i++)
        sets->items[sets->count++] = base[i];
    for (size_t i = 0; i < grid->axis_count; i++) {
        sets->own[i] = memory_format("%s=%s", grid->axes[i].key, sweep_grid_value(grid, point, i));
        sets->items[sets->count++] = sets->own[i];
    }
}

void sweep_sets_close(struct sweep_sets *sets)
{
    for (size_t i = 0; i < SWEEP_KEYS; i++)
        free(sets->own[i]);
    free(sets->items);
    *sets = (struct sweep_sets){.count = 0};
}

// ---- checks --------------------------------------------------------------------------------------

static bool has_line(const struct error *err, const char *line)
{
    size_t n = strlen(line);
    for (const char *at = err->text; (at = strstr(at, line)) != NULL; at += n)
        if ((at == err->text || at[-1] == '\n') &&
            (at[n] == '\n' || at[n] == '\0' || strncmp(at + n, " (first at ", 11) == 0))
            return true;
    return false;
}

// Whether a fault is of a value that came from the grid: then the user gave it to --grid, not to --set.
static bool is_varied(const struct sweep_grid *grid, const char *line)
{
    bool varied = false;
    for (size_t i = 0; i < grid->axis_count && !varied; i++) {
        char *set = memory_format("--set %s: ", grid->axes[i].key);
        varied = strncmp(line, set, strlen(set)) == 0;
        free(set);
    }
    return varied;
}

// Faults of all points, each once: those of a single value are the same at many of them.
static void add_faults(const struct sweep_grid *grid, size_t point, char *faults, struct error *err)
{
    char *name = sweep_grid_name(grid, point), *rest = NULL;
    for (char *line = strtok_r(faults, "\n", &rest); line != NULL;
         line = strtok_r(NULL, "\n", &rest)) {
        bool varied = is_varied(grid, line);
        char *text =
            varied ? memory_format("--grid %s", line + strlen("--set ")) : memory_strdup(line);
        if (!has_line(err, text) && varied)
            error_add(err, "%s", text);
        else if (!has_line(err, text))
            error_add(err, "%s (first at the point %s)", text, name);
        free(text);
    }
    free(name);
}

static int load(struct config *config, const struct sweep_grid *grid, size_t point,
                const char *file, const char *const *sets, size_t set_count, struct error *err)
{
    struct sweep_sets all;
    config_init(config);
    sweep_sets_open(&all, grid, point, sets, set_count);
    int result = config_load(config, file, all.items, all.count, err);
    sweep_sets_close(&all);
    return result;
}

// Two points of equal configs: their values are the same, spelled differently.
static int check_twins(const struct sweep_grid *grid, char *const *configs, struct error *err)
{
    size_t points = sweep_grid_points(grid);
    for (size_t a = 0; a < points; a++)
        for (size_t b = a + 1; b < points; b++)
            if (strcmp(configs[a], configs[b]) == 0) {
                char *first = sweep_grid_name(grid, a), *second = sweep_grid_name(grid, b);
                error_set(err, "--grid: the points %s and %s are the same", first, second);
                free(second);
                free(first);
                return -1;
            }
    return 0;
}

// A key that is varied can not be fixed as well.
static int check_sets(const struct sweep_grid *grid, const char *const *sets, size_t count,
                      struct error *err)
{
    int result = 0;
    for (size_t i = 0; i < count; i++) {
        char key[CONFIG_NAME_BYTES];
        char *name = memory_format("%.*s", (int)strcspn(sets[i], "="), sets[i]);
        struct error unknown; // is found when the config is loaded
        if (config_find_name(name, key, &unknown) == 0)
            for (size_t a = 0; a < grid->axis_count; a++)
                if (strcmp(grid->axes[a].key, key) == 0)
                    result = error_add(err, "--set %s: is varied by --grid; give it once", key);
        free(name);
    }
    return result;
}

int sweep_grid_check(const struct sweep_grid *grid, const char *file, const char *const *sets,
                     size_t set_count, struct error *err)
{
    size_t points = sweep_grid_points(grid);
    char **configs = memory_alloc(points, sizeof(*configs));
    int result = check_sets(grid, sets, set_count, err);
    for (size_t point = 0; point < points; point++) {
        struct config config;
        struct error faults = {""};
        if (load(&config, grid, point, file, sets, set_count, &faults) != 0) {
            result = -1;
            add_faults(grid, point, faults.text, err);
        }
        configs[point] = config_to_json(&config);
        config_release(&config);
    }
    if (result == 0)
        result = check_twins(grid, configs, err);
    for (size_t point = 0; point < points; point++)
        free(configs[point]);
    free(configs);
    return result;
}
