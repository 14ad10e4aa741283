// Owns what is inside a checkpoint: which files, and what they say. Does not own reading them back
// (checkpoint_read.c), the folder's names (checkpoint_folder.c) or when writing happens (checkpoint_writer.c).
#include "trainer/checkpoint.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "base/log.h"
#include "data/safetensors.h"
#include "trainer/checkpoint_folder.h"
#include "trainer/checkpoint_internal.h"
#include "trainer/export.h"
#include "trainer/files.h"
#include "trainer/json_text.h"
#include "version.h"

const char *const checkpoint_arrays[STATE_ARRAYS] = {"master", "adam_m", "adam_v", "ema"};
// state.json holds all files' sizes, so it is written after them.
const char *const checkpoint_others[OTHER_FILES] = {
    "model.safetensors", "config.json", "config.yaml", "execution.json", "provenance.json"};

char *checkpoint_array_file(int array, int rank, int ranks)
{
    if (ranks == 1)
        return memory_format("%s.safetensors", checkpoint_arrays[array]);
    return memory_format("%s-%05d-of-%05d.safetensors", checkpoint_arrays[array], rank + 1, ranks);
}

// One safetensors file, written by its own thread.
struct part {
    pthread_t thread;
    bool started;
    const char *directory;
    const struct model_state *state;
    enum state_array array;
    const struct checkpoint_info *info; // of the servable part; NULL: fp32 tensors
    int result;
    struct error err;
};

static int state_ranks(const struct model_state *state)
{
    const struct ownership *ownership = state->layout.ownership;
    return ownership_shared(ownership) ? ownership->ranks : 1;
}

static int state_rank(const struct model_state *state)
{
    const struct ownership *ownership = state->layout.ownership;
    return ownership_shared(ownership) ? ownership->rank : 0;
}

// Of what is in memory, so that what the disk makes of it shows.
static void add_sum(struct safetensors_writer *writer, const char *name, const float *values,
                    int64_t count)
{
    char text[SUM_TEXT];
    char *key = memory_format(SUM_PREFIX "%s", name);
    snprintf(text, sizeof(text), SUM_FORMAT, crc32c(0, values, (size_t)count * sizeof(*values)));
    safetensors_writer_metadata(writer, key, text);
    free(key);
}

// The tensors that this rank owns and that are in the array.
static int write_tensors(struct safetensors_writer *writer, const struct model_state *state,
                         enum state_array array, const float *values, struct error *err)
{
    const struct state_layout *layout = &state->layout;
    const struct params *params = layout->params;
    for (size_t i = 0; i < params->count; i++) {
        const struct param *param = &params->items[i];
        if (!state_has(layout, array, i))
            continue;
        safetensors_writer_add(writer, param->name, DTYPE_F32, param->dims, param->shape);
        add_sum(writer, param->name, values + state_offset(layout, array, i), param->count);
    }
    if (safetensors_writer_begin(writer, err) != 0)
        return -1;
    int index = 0;
    for (size_t i = 0; i < params->count; i++) {
        if (!state_has(layout, array, i))
            continue;
        int64_t offset = state_offset(layout, array, i);
        if (safetensors_writer_write(writer, index++, 0, values + offset,
                                     (size_t)params->items[i].count * sizeof(*values), err) != 0)
            return -1;
    }
    return 0;
}

static int write_fp32(const char *path, const struct model_state *state, enum state_array array,
                      const float *values, struct error *err)
{
    struct safetensors_writer *writer;
    if (safetensors_writer_open(&writer, path, err) != 0)
        return -1;
    int result = write_tensors(writer, state, array, values, err);
    struct error close_err = {""};
    int closed = safetensors_writer_close(writer, result == 0, &close_err);
    if (result == 0 && closed != 0)
        return error_set(err, "%s", close_err.text);
    return result;
}

// The masters that servers' weights are made of, or their average.
static const float *served_values(const struct model_state *state)
{
    return state->ema != NULL ? state->ema : state->master;
}

static int write_servable(struct part *part)
{
    const struct model_state *state = part->state;
    const struct export_drafter drafter = {
        .params = state->layout.params,
        .weights = {state->served == NULL ? served_values(state) : NULL, state->served},
        .sizes = part->info->sizes,
        .target = part->info->target,
        .map = part->info->map};
    return export_servable_write(part->directory, &drafter, &part->err);
}

static void *write_part(void *argument)
{
    struct part *part = argument;
    const struct model_state *state = part->state;
    const float *const arrays[STATE_ARRAYS] = {state->master, state->m, state->v, state->ema};
    if (part->info != NULL) {
        part->result = write_servable(part);
        return NULL;
    }
    char *file = checkpoint_array_file(part->array, state_rank(state), state_ranks(state));
    char *path = memory_format("%s/%s", part->directory, file);
    part->result = write_fp32(path, state, part->array, arrays[part->array], &part->err);
    free(path);
    free(file);
    return NULL;
}

int checkpoint_write_part(const char *begun, const struct model_state *state,
                          const struct checkpoint_info *info, struct error *err)
{
    struct part parts[1 + STATE_ARRAYS] = {{.info = info}};
    int count = state_rank(state) == 0 ? 1 : 0; // rank 0 writes what servers read
    for (enum state_array array = 0; array < STATE_ARRAYS; array++)
        if (state_exists(&state->layout, array))
            parts[count++] = (struct part){.array = array};
    for (int i = 0; i < count; i++) {
        parts[i].directory = begun;
        parts[i].state = state;
        parts[i].started = pthread_create(&parts[i].thread, NULL, write_part, &parts[i]) == 0;
        if (!parts[i].started)
            write_part(&parts[i]);
    }
    int result = 0;
    for (int i = 0; i < count; i++) {
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

static void add_size(cJSON *files, const char *directory, const char *file)
{
    char *path = memory_format("%s/%s", directory, file);
    json_add_int(files, file, files_size(path));
    free(path);
}

static void add_sizes(cJSON *object, const char *directory, const struct state_layout *layout,
                      int ranks)
{
    cJSON *files = cJSON_AddObjectToObject(object, "files");
    for (enum state_array array = 0; array < STATE_ARRAYS; array++)
        for (int rank = 0; rank < ranks && state_exists(layout, array); rank++) {
            char *file = checkpoint_array_file(array, rank, ranks);
            add_size(files, directory, file);
            free(file);
        }
    for (int i = 0; i < OTHER_FILES; i++)
        add_size(files, directory, checkpoint_others[i]);
}

static int add_file_sum(cJSON *sums, const char *directory, const char *file,
                        checkpoint_sum_fn *sum_of, struct error *err)
{
    uint32_t sum = 0;
    char text[SUM_TEXT];
    char *path = memory_format("%s/%s", directory, file);
    int result = sum_of(path, &sum, err);
    snprintf(text, sizeof(text), SUM_FORMAT, sum);
    cJSON_AddStringToObject(sums, file, text);
    free(path);
    return result;
}

// The last entry of the file.
static void add_own_sum(const cJSON *object, cJSON *sums)
{
    char text[SUM_TEXT] = "";
    cJSON_AddStringToObject(sums, STATE_FILE, text);
    char *body = cJSON_Print(object);
    snprintf(text, sizeof(text), SUM_FORMAT, checkpoint_state_sum(body));
    cJSON_ReplaceItemInObjectCaseSensitive(sums, STATE_FILE, cJSON_CreateString(text));
    cJSON_free(body);
}

static int add_sums(cJSON *object, const char *directory, const struct state_layout *layout,
                    int ranks, struct error *err)
{
    cJSON *sums = cJSON_AddObjectToObject(object, "crc32c");
    int result = 0;
    for (enum state_array array = 0; array < STATE_ARRAYS; array++)
        for (int rank = 0; rank < ranks && state_exists(layout, array) && result == 0; rank++) {
            char *file = checkpoint_array_file(array, rank, ranks);
            result = add_file_sum(sums, directory, file, checkpoint_header_sum, err);
            free(file);
        }
    for (int i = 0; i < OTHER_FILES && result == 0; i++)
        result = add_file_sum(sums, directory, checkpoint_others[i], files_crc32c, err);
    add_own_sum(object, sums);
    return result;
}

static void add_fingerprint(cJSON *object, const char *name, uint64_t value)
{
    char text[32];
    snprintf(text, sizeof(text), "%016" PRIx64, value);
    cJSON_AddStringToObject(object, name, text);
}

static int write_state(const char *directory, const struct model_state *state,
                       const struct checkpoint_info *info, struct error *err)
{
    const struct counters *counters = &state->counters;
    int ranks = state_ranks(state);
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, "format", STATE_FORMAT);
    json_add_int(object, "version", STATE_VERSION);
#define ADD_INT(member)  json_add_int(object, #member, counters->member);
#define ADD_REAL(member) json_add_real(object, #member, counters->member);
    COUNTERS(ADD_INT, ADD_REAL)
    add_fingerprint(object, "data_fingerprint", info->data_fingerprint);
    add_fingerprint(object, "target_fingerprint", info->target_fingerprint);
    if (ranks > 1)
        json_add_int(object, "parts", ranks);
    add_sizes(object, directory, &state->layout, ranks);
    char *path = memory_format("%s/state.json", directory);
    int result = add_sums(object, directory, &state->layout, ranks, err);
    if (result == 0)
        result = json_write_file(object, path, err);
    free(path);
    cJSON_Delete(object);
    return result;
}

int checkpoint_complete(const char *directory, const char *begun, const struct model_state *state,
                        const struct checkpoint_info *info, struct error *err)
{
    int result = write_texts(begun, info, err);
    if (result == 0)
        result = write_state(begun, state, info, err);
    if (result == 0)
        result = checkpoint_publish(directory, begun, state->counters.step, err);
    if (result != 0)
        checkpoint_discard(begun);
    return result;
}

void checkpoint_discard(const char *begun)
{
    if (files_is_folder(begun))
        files_remove_folder(begun, &(struct error){""}); // the first fault is the one to report
}

int checkpoint_write(const char *directory, const struct model_state *state,
                     const struct checkpoint_info *info, struct error *err)
{
    char *begun = checkpoint_begin(directory, state->counters.step, err);
    if (begun == NULL)
        return -1;
    int result = checkpoint_write_part(begun, state, info, err);
    if (result == 0)
        result = checkpoint_complete(directory, begun, state, info, err);
    else
        checkpoint_discard(begun);
    free(begun);
    return result;
}
