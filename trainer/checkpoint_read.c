// Owns reading what is inside a checkpoint: that it is whole, and every tensor by name, whichever ranks wrote
// it and whichever read it.
#include "trainer/checkpoint.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "data/safetensors.h"
#include "trainer/checkpoint_folder.h"
#include "trainer/checkpoint_internal.h"
#include "trainer/files.h"
#include "trainer/json_text.h"

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

int checkpoint_header_sum(const char *path, uint32_t *sum, struct error *err)
{
    struct safetensors file;
    if (safetensors_open(&file, path, err) != 0)
        return -1;
    size_t size = file.map_size; // tensors take all behind the header
    for (size_t i = 0; i < file.count; i++)
        size -= file.entries[i].size;
    *sum = crc32c(0, file.map, size);
    safetensors_close(&file);
    return 0;
}

uint32_t checkpoint_state_sum(const char *text)
{
    static const char entry[] = "\"" STATE_FILE "\"";
    const char *own = NULL;
    for (const char *at = text; (at = strstr(at, entry)) != NULL; at++)
        own = at;
    return crc32c(0, text, own != NULL ? (size_t)(own - text) : strlen(text));
}

// Of a file, or of its header, as sum_of says. Checkpoints of before there were sums have none; where they are due,
// open_state has refused a file without them.
static int check_sum(const char *directory, const char *name, const cJSON *sums,
                     checkpoint_sum_fn *sum_of, struct error *err)
{
    const cJSON *wanted = cJSON_GetObjectItemCaseSensitive(sums, name);
    struct error why = {""}; // err may have faults of other files
    uint32_t sum = 0;
    char text[SUM_TEXT];
    if (sums == NULL)
        return 0;
    char *path = memory_format("%s/%s", directory, name);
    int result = sum_of(path, &sum, &why);
    snprintf(text, sizeof(text), SUM_FORMAT, sum);
    if (result != 0)
        error_add(err, "%s", why.text);
    else if (!cJSON_IsString(wanted) || strcmp(wanted->valuestring, text) != 0)
        result = error_add(err,
                           "%s: its %schecksum (CRC-32C) is %s, that of what was written is %s; "
                           "the file was edited, is damaged or of another checkpoint",
                           path, sum_of == checkpoint_header_sum ? "header's " : "", text,
                           cJSON_IsString(wanted) ? wanted->valuestring : "missing");
    free(path);
    return result;
}

static int check_format(const struct json_file *state, int64_t *version, struct error *err)
{
    char format[64];
    if (json_get_text(state, "format", format, sizeof(format), err) != 0 ||
        json_get_int(state, "version", version, err) != 0)
        return -1;
    if (strcmp(format, STATE_FORMAT) != 0 || *version < STATE_OLDEST || *version > STATE_VERSION)
        return error_set(err, "%s: %s version %" PRId64 ", this program reads %s versions %d to %d",
                         state->path, format, *version, STATE_FORMAT, STATE_OLDEST, STATE_VERSION);
    return 0;
}

// Of all that stands in front of it, so of the version and of the other sums, too.
static int check_own_sum(const struct json_file *state, int64_t version, struct error *err)
{
    const cJSON *sums = cJSON_GetObjectItemCaseSensitive(state->root, "crc32c");
    const cJSON *wanted = cJSON_GetObjectItemCaseSensitive(sums, STATE_FILE);
    char text[SUM_TEXT];
    snprintf(text, sizeof(text), SUM_FORMAT, checkpoint_state_sum(state->text));
    if (wanted == NULL ? version < STATE_WITH_SUMS
                       : cJSON_IsString(wanted) && strcmp(wanted->valuestring, text) == 0)
        return 0;
    return error_set(err,
                     "%s: its checksum (CRC-32C) is %s, that of what was written is %s; the file "
                     "is damaged or was edited",
                     state->path, text, cJSON_IsString(wanted) ? wanted->valuestring : "missing");
}

static int open_state(struct json_file *state, const char *path, struct error *err)
{
    int64_t version;
    if (!files_is_folder(path))
        return error_set(err, "%s: there is no such checkpoint directory", path);
    char *name = memory_format("%s/" STATE_FILE, path);
    int result = json_open(state, name, err);
    free(name);
    if (result != 0)
        return error_add(err,
                         "%s is not a whole checkpoint; those of a run are checkpoints/step-... in "
                         "its folder, and checkpoints/best",
                         path);
    if (check_format(state, &version, err) == 0 && check_own_sum(state, version, err) == 0)
        return 0;
    json_close(state);
    return -1;
}

// How many ranks wrote it.
static int read_parts(const struct json_file *state, int *parts, struct error *err)
{
    enum { MOST_PARTS = 99999 };
    int64_t value = 1;
    if (cJSON_GetObjectItemCaseSensitive(state->root, "parts") != NULL &&
        json_get_int(state, "parts", &value, err) != 0)
        return -1;
    if (value < 1 || value > MOST_PARTS)
        return error_set(err, "%s: parts is %" PRId64 ", which no run writes", state->path, value);
    *parts = (int)value;
    return 0;
}

// Whether the checkpoint lists files of the array: of an average, only those of runs that have one.
static bool has_array(const cJSON *sizes, int array, int parts)
{
    char *first = checkpoint_array_file(array, 0, parts);
    bool listed = cJSON_HasObjectItem(sizes, first);
    free(first);
    return listed || array != STATE_EMA;
}

// Sizes of all files, sums of small ones and of the headers of large ones. The state's tensors are checked when they
// are read.
static int check_files(const char *path, const struct json_file *state, int parts,
                       struct error *err)
{
    const cJSON *sizes = cJSON_GetObjectItemCaseSensitive(state->root, "files");
    const cJSON *sums = cJSON_GetObjectItemCaseSensitive(state->root, "crc32c");
    int result = 0;
    for (int array = 0; array < STATE_ARRAYS; array++)
        for (int part = 0; part < parts && has_array(sizes, array, parts); part++) {
            char *file = checkpoint_array_file(array, part, parts);
            int status = check_file(path, file, sizes, err);
            result |=
                status != 0 ? status : check_sum(path, file, sums, checkpoint_header_sum, err);
            free(file);
        }
    for (int i = 0; i < OTHER_FILES; i++) {
        int status = check_file(path, checkpoint_others[i], sizes, err);
        if (status == 0 && i != SERVED_FILE)
            status = check_sum(path, checkpoint_others[i], sums, files_crc32c, err);
        result |= status;
    }
    return result;
}

int checkpoint_check(const char *path, struct error *err)
{
    struct json_file state;
    int parts = 1, result;
    if (open_state(&state, path, err) != 0)
        return -1;
    result = read_parts(&state, &parts, err);
    if (result == 0)
        result = check_files(path, &state, parts, err);
    json_close(&state);
    if (!checkpoint_is_complete(path))
        result |=
            error_add(err, "%s/DONE: missing; writing this checkpoint was not finished", path);
    return result != 0 ? -1 : 0;
}

int checkpoint_check_served(const char *path, struct error *err)
{
    struct json_file state;
    if (open_state(&state, path, err) != 0)
        return -1;
    int result =
        check_sum(path, checkpoint_others[SERVED_FILE],
                  cJSON_GetObjectItemCaseSensitive(state.root, "crc32c"), files_crc32c, err);
    json_close(&state);
    return result;
}

// What no run writes and what would lead a run out of its data.
static int check_counters(const struct counters *counters, const char *path, struct error *err)
{
#define CHECK_INT(member)                                                                          \
    if (counters->member < 0 && &counters->member != &counters->last_validation)                   \
        return error_set(err, "%s: %s is %" PRId64 ", which no run writes", path, #member,         \
                         counters->member);
#define CHECK_REAL(member)
    COUNTERS(CHECK_INT, CHECK_REAL)
    if (counters->applied <= counters->step)
        return 0;
    return error_set(err, "%s: applied is %" PRId64 " of %" PRId64 " steps, which no run writes",
                     path, counters->applied, counters->step);
}

static int read_fingerprint(const struct json_file *state, const char *name, uint64_t *value,
                            struct error *err)
{
    char text[32], *end;
    if (json_get_text(state, name, text, sizeof(text), err) != 0)
        return -1;
    *value = strtoull(text, &end, 16);
    if (*end != '\0' || end == text)
        return error_set(err, "%s: %s is not a hexadecimal number", state->path, name);
    return 0;
}

int checkpoint_check_target(const char *path, const struct target *target, struct error *err)
{
    struct json_file state;
    uint64_t found = 0;
    if (open_state(&state, path, err) != 0)
        return -1;
    bool told = cJSON_HasObjectItem(state.root, "target_fingerprint");
    int result = told ? read_fingerprint(&state, "target_fingerprint", &found, err) : 0;
    if (result == 0 && told && found != target_fingerprint(target))
        result = error_set(err,
                           "%s was trained with another target: the norm, embedding or head in %s "
                           "are other weights",
                           path, target->path);
    json_close(&state);
    return result;
}

static int read_counters(const char *path, struct counters *counters, uint64_t *fingerprint,
                         int *parts, struct error *err)
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
    if (result == 0)
        result = check_counters(counters, state.path, err);
    if (result == 0)
        result = read_parts(&state, parts, err);
    uint64_t value = 0;
    if (result == 0)
        result = read_fingerprint(&state, "data_fingerprint", &value, err);
    if (result == 0 && fingerprint != NULL)
        *fingerprint = value;
    json_close(&state);
    return result;
}

// One array of the state: its files, of one rank or of several.
struct array_files {
    struct safetensors *files; // [count]
    int count;
};

static void close_files(struct array_files *array)
{
    for (int i = 0; i < array->count; i++)
        safetensors_close(&array->files[i]);
    free(array->files);
}

static int open_files(struct array_files *array, const char *directory, int which, int parts,
                      struct error *err)
{
    int result = 0;
    *array = (struct array_files){
        .files = memory_alloc((size_t)parts, sizeof(*array->files)),
    };
    for (int part = 0; part < parts && result == 0; part++) {
        char *file = checkpoint_array_file(which, part, parts);
        char *path = memory_format("%s/%s", directory, file);
        result = safetensors_open(&array->files[part], path, err);
        array->count += result == 0;
        free(path);
        free(file);
    }
    return result;
}

static int check_names(const struct array_files *array, const struct params *params,
                       struct error *err)
{
    for (int f = 0; f < array->count; f++) {
        const struct safetensors *file = &array->files[f];
        for (size_t i = 0; i < file->count; i++)
            if (params_find(params, file->entries[i].name) == NULL)
                return error_set(err, "%s: tensor '%s' is not one of this drafter's", file->path,
                                 file->entries[i].name);
    }
    return 0;
}

// The file that has the tensor; where none has, the first one, which then says so.
static const struct safetensors *file_of(const struct array_files *array, const char *name)
{
    for (int f = 0; f < array->count; f++)
        if (safetensors_find(&array->files[f], name) != NULL)
            return &array->files[f];
    return &array->files[0];
}

// Files of before there were sums have none; a file that has some has all.
static bool has_sums(const struct safetensors *file)
{
    for (size_t i = 0; i < file->metadata_count; i++)
        if (strncmp(file->metadata_keys[i], SUM_PREFIX, strlen(SUM_PREFIX)) == 0)
            return true;
    return false;
}

// Piece by piece, so that the sum is of what the copy has left in a cache. Returns the sum.
static uint32_t copy_bytes(void *to, const void *from, size_t size)
{
    enum { PIECE = 1 << 18 };
    uint32_t sum = 0;
    for (size_t at = 0; at < size; at += PIECE) {
        size_t n = size - at < PIECE ? size - at : PIECE;
        memcpy((char *)to + at, (const char *)from + at, n);
        sum = crc32c(sum, (char *)to + at, n);
    }
    return sum;
}

int checkpoint_check_tensor(const struct safetensors *file, const struct safetensors_entry *entry,
                            uint32_t sum, struct error *err)
{
    char text[SUM_TEXT];
    int result = 0;
    if (!has_sums(file))
        return 0;
    char *key = memory_format(SUM_PREFIX "%s", entry->name);
    const char *wanted = safetensors_metadata(file, key);
    snprintf(text, sizeof(text), SUM_FORMAT, sum);
    if (wanted == NULL || strcmp(wanted, text) != 0)
        result = error_set(err,
                           "%s: tensor '%s' is damaged: its checksum (CRC-32C) is %s, that of what "
                           "was written is %s",
                           file->path, entry->name, text, wanted != NULL ? wanted : "missing");
    free(key);
    return result;
}

static int copy_tensors(const struct array_files *array, const struct model_state *state,
                        enum state_array which, float *values, struct error *err)
{
    const struct state_layout *layout = &state->layout;
    const struct params *params = layout->params;
    if (which == STATE_EMA) // lies as the masters do
        which = STATE_MASTER;
    for (size_t i = 0; i < params->count; i++) {
        const struct param *param = &params->items[i];
        if (!state_has(layout, which, i))
            continue;
        const struct safetensors *file = file_of(array, param->name);
        const struct safetensors_entry *entry =
            safetensors_get(file, param->name, "F32", param->dims, param->shape, err);
        if (entry == NULL)
            return -1;
        uint32_t sum =
            copy_bytes(values + state_offset(layout, which, i), entry->bytes, entry->size);
        if (checkpoint_check_tensor(file, entry, sum, err) != 0)
            return -1;
    }
    return check_names(array, params, err);
}

static int read_array(const char *path, const struct model_state *state, enum state_array which,
                      int parts, float *values, struct error *err)
{
    struct array_files array;
    int result = open_files(&array, path, which, parts, err);
    if (result == 0)
        result = copy_tensors(&array, state, which, values, err);
    close_files(&array);
    return result;
}

int checkpoint_read(const char *path, struct model_state *state, uint64_t *fingerprint,
                    struct error *err)
{
    float *const arrays[STATE_ARRAYS] = {state->master, state->m, state->v, state->ema};
    int parts = 1, result = 0;
    if (checkpoint_check(path, err) != 0 ||
        read_counters(path, &state->counters, fingerprint, &parts, err) != 0)
        return -1;
    for (enum state_array which = 0; which < STATE_ARRAYS && result == 0; which++)
        if (arrays[which] != NULL)
            result = read_array(path, state, which, parts, arrays[which], err);
    return result;
}

bool checkpoint_has_average(const char *path)
{
    struct json_file state;
    struct error err = {""};
    int parts = 1;
    if (open_state(&state, path, &err) != 0)
        return false;
    bool has = read_parts(&state, &parts, &err) == 0 &&
               has_array(cJSON_GetObjectItemCaseSensitive(state.root, "files"), STATE_EMA, parts);
    json_close(&state);
    return has;
}

int checkpoint_read_weights(const char *path, struct model_state *state, bool average,
                            struct error *err)
{
    int parts = 1;
    if (checkpoint_check(path, err) != 0 ||
        read_counters(path, &state->counters, NULL, &parts, err) != 0)
        return -1;
    return read_array(path, state, average ? STATE_EMA : STATE_MASTER, parts, state->master, err);
}
