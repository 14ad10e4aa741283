// Owns finished.json.
#include "trainer/run_end.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/memory.h"
#include "trainer/files.h"
#include "trainer/json_text.h"

static const char *const reasons[] = {"steps", "patience"};

static char *path_of(const char *folder)
{
    return memory_format("%s/finished.json", folder);
}

// By way of a second file: half of it must not be taken for the end.
int run_end_write(const char *folder, const struct run_end *end, struct error *err)
{
    char *path = path_of(folder), *begun = memory_format("%s.tmp", path);
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, "ended_by", reasons[end->patience]);
    json_add_int(object, "step", end->step);
    json_add_int(object, "total_steps", end->total_steps);
    int result = json_write_file(object, begun, err);
    if (result == 0 && rename(begun, path) != 0)
        result = error_set(err, "%s: can not replace: %s", path, strerror(errno));
    cJSON_Delete(object);
    free(begun);
    free(path);
    return result;
}

void run_end_forget(const char *folder)
{
    char *path = path_of(folder);
    if (unlink(path) != 0 && errno != ENOENT)
        log_warn("%s: can not delete: %s", path, strerror(errno));
    free(path);
}

bool run_end_read(const char *folder, struct run_end *end)
{
    char *path = path_of(folder), reason[16];
    struct json_file file;
    struct error err;
    bool found = files_exists(path) && json_open(&file, path, &err) == 0;
    if (found) {
        found = json_get_int(&file, "step", &end->step, &err) == 0 &&
                json_get_int(&file, "total_steps", &end->total_steps, &err) == 0 &&
                json_get_text(&file, "ended_by", reason, sizeof(reason), &err) == 0;
        end->patience = found && strcmp(reason, reasons[1]) == 0;
        json_close(&file);
    }
    free(path);
    return found;
}
