// What the analysers of .ci/lint can not see: the bodies of the cJSON functions that test a type. With
// them it is known that an item that passed such a test is there.
#ifndef CI_LINT_MODELS_H
#define CI_LINT_MODELS_H

#include <cjson/cJSON.h>

#define cJSON_HasType(item, which) ((item) != NULL && ((item)->type & 0xFF) == (which))
#define cJSON_IsNumber(item)       cJSON_HasType(item, cJSON_Number)
#define cJSON_IsString(item)       cJSON_HasType(item, cJSON_String)
#define cJSON_IsArray(item)        cJSON_HasType(item, cJSON_Array)
#define cJSON_IsObject(item)       cJSON_HasType(item, cJSON_Object)

#endif
