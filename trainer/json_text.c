// Owns exact numbers in JSON. Does not own what any file means.
#include "trainer/json_text.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "trainer/files.h"

cJSON *json_int(int64_t value)
{
    char text[32];
    snprintf(text, sizeof(text), "%lld", (long long)value);
    return cJSON_CreateRaw(text);
}

cJSON *json_real(double value)
{
    char text[40];
    if (!isfinite(value))
        return cJSON_CreateNull();
    // The shortest of the usual lengths that reads back as the same number.
    for (int digits = 9; digits <= 17; digits += 4) {
        snprintf(text, sizeof(text), "%.*g", digits, value);
        if (strtod(text, NULL) == value)
            break;
    }
    return cJSON_CreateRaw(text);
}

void json_add_int(cJSON *object, const char *name, int64_t value)
{
    cJSON_AddItemToObject(object, name, json_int(value));
}

void json_add_real(cJSON *object, const char *name, double value)
{
    cJSON_AddItemToObject(object, name, json_real(value));
}

int json_write_file(const cJSON *object, const char *path, struct error *err)
{
    char *body = cJSON_Print(object);
    char *text = memory_format("%s\n", body);
    int result = files_write_text(path, text, err);
    free(text);
    cJSON_free(body);
    return result;
}

int json_open(struct json_file *file, const char *path, struct error *err)
{
    *file = (struct json_file){0};
    // Opening a pipe would wait, a device may have no end.
    if (files_exists(path) && files_size(path) < 0)
        return error_set(err, "%s: is not a plain file", path);
    if ((file->text = files_read_text(path, err)) == NULL)
        return -1;
    file->path = memory_strdup(path);
    file->root = cJSON_Parse(file->text);
    if (cJSON_IsObject(file->root))
        return 0;
    json_close(file);
    return error_set(err, "%s: not a JSON object; the file is damaged", path);
}

void json_close(struct json_file *file)
{
    cJSON_Delete(file->root);
    free(file->text);
    free(file->path);
    *file = (struct json_file){0};
}

static const cJSON *member(const struct json_file *file, const char *name, struct error *err)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(file->root, name);
    if (item == NULL)
        error_set(err, "%s: %s is missing", file->path, name);
    return item;
}

int json_get_int(const struct json_file *file, const char *name, int64_t *value, struct error *err)
{
    const cJSON *item = member(file, name, err);
    if (item == NULL)
        return -1;
    // The files that are read here are flat in their integers: the first such name is the member.
    char *quoted = memory_format("\"%s\"", name), *end = NULL;
    const char *at = strstr(file->text, quoted);
    at = at != NULL ? strchr(at + strlen(quoted), ':') : NULL;
    errno = 0;
    int64_t number = at != NULL ? strtoll(at + 1, &end, 10) : 0;
    free(quoted);
    if (!cJSON_IsNumber(item) || at == NULL || end == at + 1 || errno != 0 ||
        (double)number != item->valuedouble)
        return error_set(err, "%s: %s is not an integer", file->path, name);
    *value = number;
    return 0;
}

int json_get_real(const struct json_file *file, const char *name, double *value, struct error *err)
{
    const cJSON *item = member(file, name, err);
    if (item == NULL)
        return -1;
    if (!cJSON_IsNumber(item))
        return error_set(err, "%s: %s is not a number", file->path, name);
    *value = item->valuedouble;
    return 0;
}

int json_get_text(const struct json_file *file, const char *name, char *value, size_t size,
                  struct error *err)
{
    const cJSON *item = member(file, name, err);
    if (item == NULL)
        return -1;
    if (!cJSON_IsString(item) || strlen(item->valuestring) >= size)
        return error_set(err, "%s: %s is not a text of fewer than %zu bytes", file->path, name,
                         size);
    snprintf(value, size, "%s", item->valuestring);
    return 0;
}
