// Owns how tests read and change a drafter's config.json.
#include "tests/support/model_config.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/memory.h"
#include "trainer/files.h"

cJSON *model_config_read(const char *directory)
{
    struct error err = {""};
    char *path = memory_format("%s/config.json", directory);
    char *text = files_read_text(path, &err);
    if (text == NULL)
        fail_msg("%s", err.text);
    cJSON *config = cJSON_Parse(text);
    assert_non_null(config);
    free(text);
    free(path);
    return config;
}

void model_config_edit(const char *directory, const char *object, const char *member,
                       const char *json)
{
    struct error err = {""};
    cJSON *config = model_config_read(directory);
    cJSON *place = object != NULL ? cJSON_GetObjectItem(config, object) : config;
    cJSON_DeleteItemFromObject(place, member);
    if (json != NULL)
        cJSON_AddItemToObject(place, member, cJSON_Parse(json));
    char *text = cJSON_Print(config), *path = memory_format("%s/config.json", directory);
    assert_int_equal(files_write_text(path, text, &err), 0);
    free(path);
    cJSON_free(text);
    cJSON_Delete(config);
}
