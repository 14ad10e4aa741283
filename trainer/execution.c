// Owns execution.json: how a run is executed, so that a resumed run does the same arithmetic.
#include "trainer/execution.h"

#include <stdio.h>
#include <string.h>

#include "trainer/json_text.h"

// Every member, once: TEXT(member) and INT(member).
#define EXECUTION_FIELDS(TEXT, INT)                                                                \
    TEXT(device)                                                                                   \
    TEXT(hardware)                                                                                 \
    TEXT(library)                                                                                  \
    TEXT(compute)                                                                                  \
    TEXT(logits)                                                                                   \
    TEXT(recompute)                                                                                \
    TEXT(kernels)                                                                                  \
    INT(group_rows)                                                                                \
    INT(chunk_rows)                                                                                \
    INT(threads)                                                                                   \
    INT(world_size)

static cJSON *algorithms_json(const struct gemm_algorithms *algorithms)
{
    cJSON *list = cJSON_CreateArray();
    for (int64_t i = 0; i < algorithms->count; i++) {
        cJSON *item = cJSON_CreateObject();
        cJSON_AddStringToObject(item, "product", algorithms->items[i].product);
        cJSON_AddStringToObject(item, "algorithm", algorithms->items[i].algorithm);
        cJSON_AddItemToArray(list, item);
    }
    return list;
}

// Copies a text member; -1 when it is none or too long.
static int get_text(const cJSON *item, const char *name, char *text, size_t size)
{
    const char *value = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, name));
    if (value == NULL || strlen(value) >= size)
        return -1;
    snprintf(text, size, "%s", value);
    return 0;
}

// That the backend knows an algorithm is seen when the run begins to obey it.
static int read_algorithms(struct gemm_algorithms *algorithms, const struct json_file *file,
                           struct error *err)
{
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(file->root, "gemm"), *item;
    if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) > GEMM_ALGORITHMS)
        return error_set(err, "%s: gemm is not a list of at most %d algorithms", file->path,
                         GEMM_ALGORITHMS);
    cJSON_ArrayForEach(item, list)
    {
        struct gemm_algorithm *to = &algorithms->items[algorithms->count++];
        struct gemm_product product;
        if (get_text(item, "product", to->product, sizeof(to->product)) != 0 ||
            get_text(item, "algorithm", to->algorithm, sizeof(to->algorithm)) != 0 ||
            gemm_product_parse(&product, to->product) != 0)
            return error_set(err,
                             "%s: gemm: entry %lld is not a product and its algorithm; the file "
                             "was changed or is damaged",
                             file->path, (long long)algorithms->count);
    }
    return 0;
}

int execution_write(const struct execution *execution, const char *path, struct error *err)
{
    cJSON *object = cJSON_CreateObject();
#define WRITE_TEXT(member) cJSON_AddStringToObject(object, #member, execution->member);
#define WRITE_INT(member)  json_add_int(object, #member, execution->member);
    EXECUTION_FIELDS(WRITE_TEXT, WRITE_INT)
    cJSON_AddItemToObject(object, "gemm", algorithms_json(&execution->gemm));
    int result = json_write_file(object, path, err);
    cJSON_Delete(object);
    return result;
}

int execution_read(struct execution *execution, const char *path, struct error *err)
{
    struct json_file file;
    if (json_open(&file, path, err) != 0)
        return -1;
    *execution = (struct execution){0};
    int result = 0;
#define READ_TEXT(member)                                                                          \
    result = result != 0 ? result                                                                  \
                         : json_get_text(&file, #member, execution->member,                        \
                                         sizeof(execution->member), err);
#define READ_INT(member)                                                                           \
    result = result != 0 ? result : json_get_int(&file, #member, &execution->member, err);
    EXECUTION_FIELDS(READ_TEXT, READ_INT)
    if (result == 0)
        result = read_algorithms(&execution->gemm, &file, err);
    json_close(&file);
    return result;
}

static int check_range(const char *path, const char *name, int64_t value, int64_t least,
                       int64_t most, struct error *err)
{
    if (value >= least && value <= most)
        return 0;
    return error_add(err, "%s: %s is %lld, which is not within %lld and %lld", path, name,
                     (long long)value, (long long)least, (long long)most);
}

int64_t execution_most_rows(const struct config *config, const struct drafter_sizes *sizes)
{
    return (config->data.seq_len - 1) * sizes->block_size;
}

int execution_check(const struct execution *execution, const struct config *config,
                    const struct drafter_sizes *sizes, const char *path, struct error *err)
{
    enum { MOST_CHUNK_ROWS = 1 << 30, MOST_THREADS = 4096 }; // as their keys' ranges
    static const char *const levels[] = {"none", "cheap", "layer"};
    int64_t block = sizes->block_size, rows = execution_most_rows(config, sizes);
    int faults = check_range(path, "group_rows", execution->group_rows, block, rows, err);
    if (faults == 0 && execution->group_rows % block != 0)
        faults =
            error_add(err, "%s: group_rows is %lld, which is no multiple of the %lld of a block",
                      path, (long long)execution->group_rows, (long long)block);
    faults |= check_range(path, "chunk_rows", execution->chunk_rows, 2, MOST_CHUNK_ROWS, err);
    faults |= check_range(path, "threads", execution->threads, 1, MOST_THREADS, err);
    for (size_t i = 0; i < sizeof(levels) / sizeof(*levels); i++)
        if (strcmp(execution->recompute, levels[i]) == 0)
            return faults;
    return error_add(err, "%s: recompute is %s, which is none of none, cheap and layer", path,
                     execution->recompute);
}

int execution_compare(const struct execution *before, const struct execution *now,
                      struct error *err)
{
    int result = 0;
#define COMPARE_TEXT(member)                                                                       \
    if (strcmp(before->member, now->member) != 0)                                                  \
        result = error_add(err, "%s: %s in execution.json, %s now", #member, before->member,       \
                           now->member);
#define COMPARE_INT(member)                                                                        \
    if (before->member != now->member)                                                             \
        result = error_add(err, "%s: %lld in execution.json, %lld now", #member,                   \
                           (long long)before->member, (long long)now->member);
    EXECUTION_FIELDS(COMPARE_TEXT, COMPARE_INT)
    return result;
}
