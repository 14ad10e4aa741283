// Owns execution.json: how a run is executed, so that a resumed run does the same arithmetic.
#include "trainer/execution.h"

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

int execution_write(const struct execution *execution, const char *path, struct error *err)
{
    cJSON *object = cJSON_CreateObject();
#define WRITE_TEXT(member) cJSON_AddStringToObject(object, #member, execution->member);
#define WRITE_INT(member)  json_add_int(object, #member, execution->member);
    EXECUTION_FIELDS(WRITE_TEXT, WRITE_INT)
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
    json_close(&file);
    return result;
}

int execution_compare(const struct execution *before, const struct execution *now,
                      struct error *err)
{
    int result = 0;
#define COMPARE_TEXT(member)                                                                       \
    if (strcmp(before->member, now->member) != 0)                                                  \
        result = error_add(err, "%s: %s when the run was started, %s now", #member,                \
                           before->member, now->member);
#define COMPARE_INT(member)                                                                        \
    if (before->member != now->member)                                                             \
        result = error_add(err, "%s: %lld when the run was started, %lld now", #member,            \
                           (long long)before->member, (long long)now->member);
    EXECUTION_FIELDS(COMPARE_TEXT, COMPARE_INT)
    return result;
}
