// Owns sweep.json, what it takes over when the sweep is started again, and what that refuses.
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/memory.h"
#include "kernels/backend.h"
#include "trainer/files.h"
#include "trainer/json_text.h"
#include "trainer/run_end.h"
#include "trainer/sweep.h"

#define SWEEP_FORMAT "dtrain-sweep"
enum { SWEEP_VERSION = 1 };

static const char *const state_names[] = {
    [SWEEP_WAITING] = "waiting", [SWEEP_RUNNING] = "running", [SWEEP_STOPPED] = "stopped",
    [SWEEP_DONE] = "done",       [SWEEP_FAILED] = "failed",   [SWEEP_TOO_LARGE] = "does not fit",
};
static const char *const equal_names[] = {
    [SWEEP_EQUAL_STEPS] = "steps",
    [SWEEP_EQUAL_ANCHORS] = "anchors",
    [SWEEP_EQUAL_BLOCK_ROWS] = "block_rows",
    [SWEEP_EQUAL_TIME] = "time",
    [SWEEP_EQUAL_NONE] = "none",
};

static int find_name(const char *const *names, int count, const char *name)
{
    for (int i = 0; i < count; i++)
        if (strcmp(names[i], name) == 0)
            return i;
    return -1;
}

const char *sweep_state_name(enum sweep_state state)
{
    return state_names[state];
}

const char *sweep_equal_name(enum sweep_equal equal)
{
    return equal_names[equal];
}

int sweep_state_find(const char *name)
{
    return find_name(state_names, (int)(sizeof(state_names) / sizeof(*state_names)), name);
}

int sweep_equal_find(const char *name)
{
    return find_name(equal_names, (int)(sizeof(equal_names) / sizeof(*equal_names)), name);
}

void sweep_point_become(struct sweep_point *point, enum sweep_state state, char *reason_taken)
{
    free(point->reason);
    point->state = state;
    point->reason = reason_taken;
}

void sweep_points_open(struct sweep *sweep)
{
    sweep->point_count = sweep_grid_points(&sweep->grid);
    sweep->points = memory_alloc(sweep->point_count, sizeof(*sweep->points));
    for (size_t i = 0; i < sweep->point_count; i++) {
        struct sweep_point *point = &sweep->points[i];
        point->name = sweep_grid_name(&sweep->grid, i);
        point->folder = memory_format("%s/%s", sweep->folder, point->name);
        point->anchors = (double)NAN;
    }
}

void sweep_release(struct sweep *sweep)
{
    for (size_t i = 0; i < sweep->point_count; i++) {
        free(sweep->points[i].name);
        free(sweep->points[i].folder);
        free(sweep->points[i].reason);
    }
    free(sweep->points);
    free(sweep->drafts.items);
    free(sweep->folder);
    sweep_grid_release(&sweep->grid);
}

// ---- writing -------------------------------------------------------------------------------------

// By way of a second file, so that a kill meanwhile leaves the first.
static int replace(const char *path, files_write_fn *write, const void *context, struct error *err)
{
    char *begun = memory_format("%s.tmp", path);
    int result = files_write(begun, write, (void *)context, err);
    if (result == 0 && rename(begun, path) != 0)
        result = error_set(err, "%s: can not replace: %s", path, strerror(errno));
    free(begun);
    return result;
}

static void add_grid(cJSON *root, const struct sweep_grid *grid)
{
    cJSON *axes = cJSON_AddArrayToObject(root, "grid");
    for (size_t i = 0; i < grid->axis_count; i++) {
        cJSON *axis = cJSON_CreateObject(), *values;
        cJSON_AddStringToObject(axis, "key", grid->axes[i].key);
        values = cJSON_AddArrayToObject(axis, "values");
        for (size_t v = 0; v < grid->axes[i].count; v++)
            cJSON_AddItemToArray(values, cJSON_CreateString(grid->axes[i].values[v]));
        cJSON_AddItemToArray(axes, axis);
    }
}

static cJSON *point_json(const struct sweep_point *point)
{
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, "name", point->name);
    cJSON_AddStringToObject(object, "state", sweep_state_name(point->state));
    if (point->reason != NULL)
        cJSON_AddStringToObject(object, "reason", point->reason);
    json_add_int(object, "block_size", point->block_size);
    json_add_int(object, "steps", point->steps);
    json_add_real(object, "anchors", point->anchors);
    json_add_real(object, "step_seconds", point->step_seconds);
    json_add_int(object, "planned_bytes", point->needed);
    json_add_real(object, "step_flops", point->flops);
    return object;
}

static void put_json(void *context, FILE *out)
{
    char *text = cJSON_Print(context);
    fprintf(out, "%s\n", text);
    cJSON_free(text);
}

int sweep_state_write(const struct sweep *sweep, struct error *err)
{
    cJSON *root = cJSON_CreateObject(), *array;
    cJSON_AddStringToObject(root, "format", SWEEP_FORMAT);
    json_add_int(root, "version", SWEEP_VERSION);
    add_grid(root, &sweep->grid);
    cJSON_AddStringToObject(root, "equal", sweep_equal_name(sweep->equal));
    json_add_real(root, "seconds", sweep->budget);
    json_add_int(root, "parallel", sweep->parallel);
    json_add_int(root, "threads", sweep->threads);
    cJSON_AddBoolToObject(root, "validates", sweep->validates);
    array = cJSON_AddArrayToObject(root, "draft_tokens");
    for (size_t i = 0; i < sweep->drafts.count; i++)
        cJSON_AddItemToArray(array, json_int(sweep->drafts.items[i]));
    array = cJSON_AddArrayToObject(root, "points");
    for (size_t i = 0; i < sweep->point_count; i++)
        cJSON_AddItemToArray(array, point_json(&sweep->points[i]));
    char *path = memory_format("%s/sweep.json", sweep->folder);
    int result = replace(path, put_json, root, err);
    free(path);
    cJSON_Delete(root);
    return result;
}

static void put_config(void *context, FILE *out)
{
    const struct sweep *sweep = context;
    fprintf(out,
            "# What the points of this sweep have in common, with the first point's values of:");
    for (size_t i = 0; i < sweep->grid.axis_count; i++)
        fprintf(out, "%s %s", i > 0 ? "," : "", sweep->grid.axes[i].key);
    fprintf(out, "\n");
    config_write_yaml(&sweep->config, out);
}

static void put_point(void *context, FILE *out)
{
    fprintf(out, "# A point of a sweep: what `dtrain sweep` has its run read.\n");
    config_write_yaml(context, out);
}

static void set_text(char **text, char *taken)
{
    free(*text);
    *text = taken;
}

// What the sweep decides for a point beside its grid values.
static void decide(const struct sweep *sweep, const struct sweep_point *point,
                   struct config *config)
{
    size_t available = 0, total = 0;
    set_text(&config->run.dir, memory_strdup(point->folder));
    if (point->steps > 0 || sweep->equal == SWEEP_EQUAL_TIME) // 0: a measurement ends by its time
        config->run.max_steps = point->steps;
    if (sweep->equal == SWEEP_EQUAL_TIME)
        config->run.epochs = SWEEP_MANY_EPOCHS;
    if (config->parallel.threads == 0)
        config->parallel.threads = sweep->threads;
    if (sweep->gpus > 0 || sweep->parallel < 2)
        return;
    // Points on one CPU share its memory, whichever starts first.
    backend_cpu()->memory(&available, &total);
    size_t share = total / (size_t)sweep->parallel;
    if (config->memory.limit == NULL || config_memory_limit(config) > share)
        set_text(&config->memory.limit, memory_format("%zuB", share));
}

int sweep_write_point(const struct sweep *sweep, size_t at, struct error *err)
{
    const struct sweep_point *point = &sweep->points[at];
    struct config config;
    char *path = memory_format("%s/%s", point->folder, SWEEP_POINT_FILE);
    config_init(&config);
    int result = files_make_folder(point->folder, err);
    if (result == 0)
        result = sweep_load_point(sweep, at, &config, err);
    if (result == 0) {
        decide(sweep, point, &config);
        result = replace(path, put_point, &config, err);
    }
    config_release(&config);
    free(path);
    return result;
}

int sweep_write_configs(const struct sweep *sweep, struct error *err)
{
    char *path = memory_format("%s/config.yaml", sweep->folder);
    int result = replace(path, put_config, sweep, err);
    for (size_t i = 0; i < sweep->point_count && result == 0; i++)
        result = sweep_write_point(sweep, i, err);
    free(path);
    return result;
}

bool sweep_is_point(const char *config)
{
    const char *slash = strrchr(config, '/');
    int folder = slash != NULL ? (int)(slash - config) + 1 : 0;
    if (strcmp(config + folder, SWEEP_POINT_FILE) != 0)
        return false;
    char *above = memory_format("%.*s..", folder, config);
    bool found = sweep_state_exists(above);
    free(above);
    return found;
}

// ---- reading -------------------------------------------------------------------------------------

bool sweep_state_exists(const char *folder)
{
    char *path = memory_format("%s/sweep.json", folder);
    bool found = files_exists(path);
    free(path);
    return found;
}

static double number_of(const cJSON *object, const char *name, double otherwise)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    return cJSON_IsNumber(item) ? item->valuedouble : otherwise;
}

static const char *text_of(const cJSON *object, const char *name)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    return cJSON_IsString(item) ? item->valuestring : "";
}

static int read_grid(struct sweep *sweep, const cJSON *root)
{
    const cJSON *item, *value;
    cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(root, "grid"))
    {
        struct sweep_axis *axis = sweep_grid_add(&sweep->grid, text_of(item, "key"));
        if (axis == NULL)
            return -1;
        cJSON_ArrayForEach(value, cJSON_GetObjectItemCaseSensitive(item, "values"))
        {
            if (cJSON_IsString(value))
                sweep_axis_add(axis, value->valuestring, strlen(value->valuestring));
        }
    }
    return sweep->grid.axis_count > 0 && sweep_grid_points(&sweep->grid) > 0 &&
                   sweep_grid_points(&sweep->grid) <= SWEEP_POINTS
               ? 0
               : -1;
}

static void read_point(struct sweep_point *point, const cJSON *object)
{
    const char *reason = text_of(object, "reason");
    int state = sweep_state_find(text_of(object, "state"));
    point->state = state >= 0 ? (enum sweep_state)state : SWEEP_WAITING;
    point->reason = reason[0] != '\0' ? memory_strdup(reason) : NULL;
    point->block_size = (int64_t)number_of(object, "block_size", 0.0);
    point->steps = (int64_t)number_of(object, "steps", 0.0);
    point->anchors = number_of(object, "anchors", (double)NAN);
    point->step_seconds = number_of(object, "step_seconds", 0.0);
    point->needed = (int64_t)number_of(object, "planned_bytes", 0.0);
    point->flops = number_of(object, "step_flops", 0.0);
}

static int read_points(struct sweep *sweep, const cJSON *root)
{
    const cJSON *array = cJSON_GetObjectItemCaseSensitive(root, "points");
    if ((size_t)cJSON_GetArraySize(array) != sweep->point_count)
        return -1;
    for (size_t i = 0; i < sweep->point_count; i++) {
        const cJSON *object = cJSON_GetArrayItem(array, (int)i);
        if (strcmp(text_of(object, "name"), sweep->points[i].name) != 0)
            return -1;
        read_point(&sweep->points[i], object);
    }
    return 0;
}

static void read_drafts(struct sweep *sweep, const cJSON *root)
{
    const cJSON *item;
    sweep->drafts.items = memory_alloc(SWEEP_DRAFTS, sizeof(*sweep->drafts.items));
    cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(root, "draft_tokens"))
    {
        if (cJSON_IsNumber(item) && sweep->drafts.count < SWEEP_DRAFTS)
            sweep->drafts.items[sweep->drafts.count++] = (int64_t)item->valuedouble;
    }
}

static int read_root(struct sweep *sweep, const cJSON *root)
{
    int equal = sweep_equal_find(text_of(root, "equal"));
    if (strcmp(text_of(root, "format"), SWEEP_FORMAT) != 0 ||
        !(fabs(number_of(root, "version", 0.0) - SWEEP_VERSION) < 0.5) || equal < 0 ||
        read_grid(sweep, root) != 0)
        return -1;
    sweep->equal = (enum sweep_equal)equal;
    sweep->budget = number_of(root, "seconds", 0.0);
    sweep->parallel =
        number_of(root, "parallel", 1.0) > 1.0 ? (int)number_of(root, "parallel", 1.0) : 1;
    sweep->threads = (int64_t)number_of(root, "threads", 0.0);
    sweep->validates = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(root, "validates"));
    read_drafts(sweep, root);
    sweep_points_open(sweep);
    return read_points(sweep, root);
}

int sweep_state_read(struct sweep *sweep, const char *folder, struct error *err)
{
    struct json_file file;
    char *path = memory_format("%s/sweep.json", folder);
    sweep->folder = memory_strdup(folder);
    int result = json_open(&file, path, err);
    if (result == 0) {
        if (read_root(sweep, file.root) != 0)
            result = error_set(err, "%s: not what a sweep of this program has written", path);
        json_close(&file);
    }
    free(path);
    return result;
}

// ---- going on ------------------------------------------------------------------------------------

bool sweep_point_finished(const struct sweep_point *point)
{
    struct run_end end;
    return point->steps > 0 && run_end_read(point->folder, &end) && end.total_steps == point->steps;
}

static void compare_grid(const struct sweep *before, const struct sweep *now, struct error *err)
{
    const struct sweep_grid *a = &before->grid, *b = &now->grid;
    bool same = a->axis_count == b->axis_count;
    for (size_t i = 0; same && i < a->axis_count; i++) {
        same = strcmp(a->axes[i].key, b->axes[i].key) == 0 && a->axes[i].count == b->axes[i].count;
        for (size_t v = 0; same && v < a->axes[i].count; v++)
            same = strcmp(a->axes[i].values[v], b->axes[i].values[v]) == 0;
    }
    if (same)
        return;
    char *text = memory_strdup("");
    for (size_t i = 0; i < a->axis_count; i++) {
        char *longer = memory_format("%s --grid %s=", text, config_short_name(a->axes[i].key));
        for (size_t v = 0; v < a->axes[i].count; v++) {
            char *more = memory_format("%s%s%s", longer, v > 0 ? "," : "", a->axes[i].values[v]);
            free(longer);
            longer = more;
        }
        free(text);
        text = longer;
    }
    error_add(err, "another grid; this sweep was begun with%s", text);
    free(text);
}

// Keys that a single run may change, and points that are compared may not.
static const char *const kept_ints[] = {"run.epochs",          "run.max_steps",
                                        "validation.every",    "validation.rows",
                                        "validation.patience", "parallel.threads"};

static void compare_ints(struct config *before, struct config *now, struct error *err)
{
    for (size_t i = 0; i < sizeof(kept_ints) / sizeof(*kept_ints); i++) {
        struct config_int_key a, b;
        struct error unknown;
        if (config_find_int(before, kept_ints[i], &a, &unknown) != 0 ||
            config_find_int(now, kept_ints[i], &b, &unknown) != 0)
            BUG("no key %s", kept_ints[i]);
        if (*a.value != *b.value)
            error_add(err, "%s: must stay the same in a sweep: it was %lld and is %lld",
                      kept_ints[i], (long long)*a.value, (long long)*b.value);
    }
}

static bool same_text(const char *a, const char *b)
{
    return a == NULL || b == NULL ? a == b : strcmp(a, b) == 0;
}

static int compare_config(struct sweep *sweep, struct error *err)
{
    char *path = memory_format("%s/config.yaml", sweep->folder);
    struct config before;
    struct error keys = {""};
    config_init(&before);
    int result = config_load(&before, path, NULL, 0, err);
    if (result == 0) {
        config_expand_files(&before, &(struct error){""}); // files may have moved: names decide
        if (config_compare_for_resume(&before, &sweep->config, &keys) != 0)
            error_add(err, "%s", keys.text);
        compare_ints(&before, &sweep->config, err);
        if (!same_text(before.drafter.init_from, sweep->config.drafter.init_from))
            error_add(err, "drafter.init_from: must stay the same in a sweep");
    }
    config_release(&before);
    free(path);
    return err->text[0] != '\0' ? -1 : 0;
}

static void compare_how(const struct sweep *before, const struct sweep *now, struct error *err)
{
    if (before->equal != now->equal)
        error_add(err, "--equal: it was %s and is %s", sweep_equal_name(before->equal),
                  sweep_equal_name(now->equal));
    else if (before->equal == SWEEP_EQUAL_TIME && !(fabs(before->budget - now->budget) < 1e-6))
        error_add(err, "--equal time: it was %g seconds and is %g", before->budget, now->budget);
}

// Steps stay: where they are counted anew, sweep_steps.c holds them against these.
static void take_point(struct sweep_point *now, const struct sweep_point *before)
{
    now->needed = before->needed; // a point that is done is not planned again
    now->flops = before->flops;
    now->steps = before->steps;
    now->step_seconds = before->step_seconds;
    if (sweep_point_finished(now))
        now->state = SWEEP_DONE;
    else if (before->state == SWEEP_RUNNING || before->state == SWEEP_STOPPED)
        now->state = SWEEP_STOPPED;
}

int sweep_refuse_to_go_on(const struct sweep *sweep, const char *differs, struct error *err)
{
    error_set(err, "%s", differs);
    return error_prefix(
        err, "%s holds a sweep that this one does not go on with; choose another run.dir",
        sweep->folder);
}

int sweep_state_continue(struct sweep *sweep, struct error *err)
{
    struct sweep before = {.lock_fd = -1};
    int result = sweep_state_read(&before, sweep->folder, err);
    if (result == 0) {
        compare_grid(&before, sweep, err);
        compare_how(&before, sweep, err);
        result = err->text[0] != '\0' ? -1 : compare_config(sweep, err);
        sweep->threads = before.threads; // another number would be other bits
        for (size_t i = 0; result == 0 && i < sweep->point_count; i++)
            take_point(&sweep->points[i], &before.points[i]);
        struct error differs = *err;
        if (result != 0)
            sweep_refuse_to_go_on(sweep, differs.text, err);
    }
    sweep_release(&before);
    return result;
}
