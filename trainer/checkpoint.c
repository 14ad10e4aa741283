// Owns what is inside a checkpoint: which files, what they say, that they read back. Does not own the
// folder's names (checkpoint_folder.c) or when writing happens (checkpoint_writer.c).
#include "trainer/checkpoint.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "data/safetensors.h"
#include "trainer/checkpoint_folder.h"
#include "trainer/export.h"
#include "trainer/files.h"
#include "trainer/json_text.h"
#include "version.h"

enum { STATE_VERSION = 1 };
static const char state_format[] = "dtrain-checkpoint";

// All files but state.json and DONE. state.json holds their sizes, so it is written after them.
static const char *const file_names[] = {
    "master.safetensors", "adam_m.safetensors", "adam_v.safetensors", "model.safetensors",
    "config.json",        "config.yaml",        "execution.json",     "provenance.json"};
enum { FILE_COUNT = sizeof(file_names) / sizeof(*file_names) };

#define COUNTERS(INT, REAL)                                                                        \
    INT(step)                                                                                      \
    INT(epoch)                                                                                     \
    INT(row)                                                                                       \
    INT(applied)                                                                                   \
    INT(skipped_nonfinite)                                                                         \
    INT(nonfinite_in_a_row)                                                                        \
    INT(skipped_empty)                                                                             \
    INT(bad_documents)                                                                             \
    INT(tokens)                                                                                    \
    REAL(best_accept_len_walk)                                                                     \
    INT(best_step)                                                                                 \
    INT(validations_without_better)                                                                \
    INT(last_validation)

// ---- writing -------------------------------------------------------------------------------------

// One safetensors file, written by its own thread.
struct part {
    pthread_t thread;
    bool started;
    const char *directory, *file;
    const struct params *params;
    const float *values;                // [params->elements]
    const struct checkpoint_info *info; // of the servable part; NULL: fp32 tensors
    int result;
    struct error err;
};

static int write_tensors(struct safetensors_writer *writer, const struct params *params,
                         const float *values, struct error *err)
{
    for (size_t i = 0; i < params->count; i++) {
        const struct param *param = &params->items[i];
        safetensors_writer_add(writer, param->name, DTYPE_F32, param->dims, param->shape);
    }
    if (safetensors_writer_begin(writer, err) != 0)
        return -1;
    for (size_t i = 0; i < params->count; i++) {
        const struct param *param = &params->items[i];
        if (safetensors_writer_write(writer, (int)i, 0, values + param->offset,
                                     (size_t)param->count * sizeof(*values), err) != 0)
            return -1;
    }
    return 0;
}

static int write_fp32(const char *path, const struct params *params, const float *values,
                      struct error *err)
{
    struct safetensors_writer *writer;
    if (safetensors_writer_open(&writer, path, err) != 0)
        return -1;
    int result = write_tensors(writer, params, values, err);
    struct error close_err = {""};
    int closed = safetensors_writer_close(writer, result == 0, &close_err);
    if (result == 0 && closed != 0)
        return error_set(err, "%s", close_err.text);
    return result;
}

static void *write_part(void *argument)
{
    struct part *part = argument;
    if (part->info != NULL) {
        part->result = export_zlab_write(part->directory, part->params, part->values,
                                         part->info->sizes, part->info->target, &part->err);
    } else {
        char *path = memory_format("%s/%s", part->directory, part->file);
        part->result = write_fp32(path, part->params, part->values, &part->err);
        free(path);
    }
    return NULL;
}

static int write_parts(const char *directory, const struct model_state *state,
                       const struct checkpoint_info *info, struct error *err)
{
    struct part parts[] = {{.file = "master.safetensors", .values = state->master},
                           {.file = "adam_m.safetensors", .values = state->m},
                           {.file = "adam_v.safetensors", .values = state->v},
                           {.file = "model.safetensors", .values = state->master, .info = info}};
    enum { PARTS = sizeof(parts) / sizeof(*parts) };
    for (int i = 0; i < PARTS; i++) {
        parts[i].directory = directory;
        parts[i].params = state->params;
        parts[i].started = pthread_create(&parts[i].thread, NULL, write_part, &parts[i]) == 0;
        if (!parts[i].started)
            write_part(&parts[i]);
    }
    int result = 0;
    for (int i = 0; i < PARTS; i++) {
        if (parts[i].started)
            pthread_join(parts[i].thread, NULL);
        if (parts[i].result != 0)
            result = error_add(err, "%s", parts[i].err.text);
    }
    return result;
}

static void put_config(void *context, FILE *out)
{
    config_write_yaml(context, out);
}

static void add_time(cJSON *object)
{
    char text[32];
    time_t now = time(NULL);
    struct tm utc;
    gmtime_r(&now, &utc);
    strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &utc);
    cJSON_AddStringToObject(object, "time", text);
}

// Where this came from, for people.
static int write_provenance(const char *path, const struct checkpoint_info *info, struct error *err)
{
    char host[256] = "";
    gethostname(host, sizeof(host) - 1);
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, "version", DTRAIN_VERSION);
    cJSON_AddStringToObject(object, "commit", DTRAIN_COMMIT);
    cJSON_AddStringToObject(object, "build", DTRAIN_BUILD);
    cJSON_AddStringToObject(object, "command", info->command != NULL ? info->command : "");
    add_time(object);
    cJSON_AddStringToObject(object, "host", host);
    cJSON_AddStringToObject(object, "device", info->execution->device);
    cJSON_AddStringToObject(object, "hardware", info->execution->hardware);
    cJSON_AddStringToObject(object, "library", info->execution->library);
    json_add_int(object, "world_size", info->execution->world_size);
    cJSON_AddStringToObject(object, "target", info->target_name != NULL ? info->target_name : "");
    cJSON_AddStringToObject(object, "target_path",
                            info->target->path != NULL ? info->target->path : "");
    int result = json_write_file(object, path, err);
    cJSON_Delete(object);
    return result;
}

static int write_texts(const char *directory, const struct checkpoint_info *info, struct error *err)
{
    char *config = memory_format("%s/config.yaml", directory);
    char *execution = memory_format("%s/execution.json", directory);
    char *provenance = memory_format("%s/provenance.json", directory);
    int result = files_write(config, put_config, (void *)info->config, err);
    if (result == 0)
        result = execution_write(info->execution, execution, err);
    if (result == 0)
        result = write_provenance(provenance, info, err);
    free(provenance);
    free(execution);
    free(config);
    return result;
}

static void add_sizes(cJSON *object, const char *directory)
{
    cJSON *files = cJSON_AddObjectToObject(object, "files");
    for (int i = 0; i < FILE_COUNT; i++) {
        char *path = memory_format("%s/%s", directory, file_names[i]);
        json_add_int(files, file_names[i], files_size(path));
        free(path);
    }
}

static int write_state(const char *directory, const struct counters *counters,
                       uint64_t data_fingerprint, struct error *err)
{
    char fingerprint[32];
    snprintf(fingerprint, sizeof(fingerprint), "%016" PRIx64, data_fingerprint);
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, "format", state_format);
    json_add_int(object, "version", STATE_VERSION);
#define ADD_INT(member)  json_add_int(object, #member, counters->member);
#define ADD_REAL(member) json_add_real(object, #member, counters->member);
    COUNTERS(ADD_INT, ADD_REAL)
    cJSON_AddStringToObject(object, "data_fingerprint", fingerprint);
    add_sizes(object, directory);
    char *path = memory_format("%s/state.json", directory);
    int result = json_write_file(object, path, err);
    free(path);
    cJSON_Delete(object);
    return result;
}

int checkpoint_write(const char *directory, const struct model_state *state,
                     const struct checkpoint_info *info, struct error *err)
{
    int64_t step = state->counters.step;
    char *begun = checkpoint_begin(directory, step, err);
    if (begun == NULL)
        return -1;
    int result = write_parts(begun, state, info, err);
    if (result == 0)
        result = write_texts(begun, info, err);
    if (result == 0)
        result = write_state(begun, &state->counters, info->data_fingerprint, err);
    if (result == 0)
        result = checkpoint_publish(directory, begun, step, err);
    if (result != 0 && files_is_folder(begun))
        files_remove_folder(begun, &(struct error){""}); // the first fault is the one to report
    free(begun);
    return result;
}

// ---- reading -------------------------------------------------------------------------------------

static int check_file(const char *directory, const char *name, const cJSON *sizes,
                      struct error *err)
{
    const cJSON *size = cJSON_GetObjectItemCaseSensitive(sizes, name);
    char *path = memory_format("%s/%s", directory, name);
    int64_t found = files_size(path);
    int result = 0;
    if (!cJSON_IsNumber(size))
        result = error_add(err, "%s/state.json: the size of %s is missing", directory, name);
    else if (found < 0)
        result = error_add(err, "%s: missing", path);
    else if ((double)found != size->valuedouble)
        result = error_add(err, "%s: %" PRId64 " bytes, %.0f were written; the file is damaged",
                           path, found, size->valuedouble);
    free(path);
    return result;
}

static int check_format(const struct json_file *state, struct error *err)
{
    char format[64];
    int64_t version;
    if (json_get_text(state, "format", format, sizeof(format), err) != 0 ||
        json_get_int(state, "version", &version, err) != 0)
        return -1;
    if (strcmp(format, state_format) != 0 || version != STATE_VERSION)
        return error_set(err, "%s: %s version %" PRId64 ", this program reads %s version %d",
                         state->path, format, version, state_format, STATE_VERSION);
    return 0;
}

static int open_state(struct json_file *state, const char *path, struct error *err)
{
    if (!files_is_folder(path))
        return error_set(err, "%s: there is no such checkpoint directory", path);
    char *name = memory_format("%s/state.json", path);
    int result = json_open(state, name, err);
    free(name);
    if (result != 0)
        return error_add(err, "%s is not a whole checkpoint", path);
    if (check_format(state, err) == 0)
        return 0;
    json_close(state);
    return -1;
}

int checkpoint_check(const char *path, struct error *err)
{
    struct json_file state;
    if (open_state(&state, path, err) != 0)
        return -1;
    int result = 0;
    const cJSON *sizes = cJSON_GetObjectItemCaseSensitive(state.root, "files");
    for (int i = 0; i < FILE_COUNT; i++)
        result |= check_file(path, file_names[i], sizes, err);
    json_close(&state);
    if (!checkpoint_is_complete(path))
        result |=
            error_add(err, "%s/DONE: missing; writing this checkpoint was not finished", path);
    return result != 0 ? -1 : 0;
}

static int read_counters(const char *path, struct counters *counters, uint64_t *fingerprint,
                         struct error *err)
{
    struct json_file state;
    if (open_state(&state, path, err) != 0)
        return -1;
    int result = 0;
#define READ_INT(member)                                                                           \
    result = result != 0 ? result : json_get_int(&state, #member, &counters->member, err);
#define READ_REAL(member)                                                                          \
    result = result != 0 ? result : json_get_real(&state, #member, &counters->member, err);
    COUNTERS(READ_INT, READ_REAL)
    char text[32], *end = text;
    if (result == 0)
        result = json_get_text(&state, "data_fingerprint", text, sizeof(text), err);
    uint64_t value = result == 0 ? strtoull(text, &end, 16) : 0;
    if (result == 0 && (*end != '\0' || end == text))
        result = error_set(err, "%s: data_fingerprint is not a hexadecimal number", state.path);
    if (result == 0 && fingerprint != NULL)
        *fingerprint = value;
    json_close(&state);
    return result;
}

static int read_values(const char *directory, const char *name, const struct params *params,
                       float *values, struct error *err)
{
    char *path = memory_format("%s/%s", directory, name);
    struct safetensors file;
    int result = safetensors_open(&file, path, err);
    free(path);
    if (result != 0)
        return -1;
    for (size_t i = 0; i < params->count && result == 0; i++) {
        const struct param *param = &params->items[i];
        const struct safetensors_entry *entry =
            safetensors_get(&file, param->name, "F32", param->dims, param->shape, err);
        if (entry == NULL)
            result = -1;
        else
            memcpy(values + param->offset, entry->bytes, entry->size);
    }
    for (size_t i = 0; i < file.count && result == 0; i++) {
        if (params_find(params, file.entries[i].name) == NULL)
            result = error_set(err, "%s: tensor '%s' is not one of this drafter's", file.path,
                               file.entries[i].name);
    }
    safetensors_close(&file);
    return result;
}

int checkpoint_read(const char *path, struct model_state *state, uint64_t *fingerprint,
                    struct error *err)
{
    if (checkpoint_check(path, err) != 0 ||
        read_counters(path, &state->counters, fingerprint, err) != 0)
        return -1;
    if (read_values(path, "master.safetensors", state->params, state->master, err) != 0 ||
        read_values(path, "adam_m.safetensors", state->params, state->m, err) != 0)
        return -1;
    return read_values(path, "adam_v.safetensors", state->params, state->v, err);
}
