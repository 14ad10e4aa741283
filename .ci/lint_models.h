// What the analysers of .ci/lint can not see from one file: that error functions return -1, what
// cJSON's tests of a type mean, and gcc's shuffle.
#ifndef CI_LINT_MODELS_H
#define CI_LINT_MODELS_H

#include <stddef.h>

#include <cjson/cJSON.h>

#include "base/error.h"

#define error_set(...)    ((error_set)(__VA_ARGS__), -1)
#define error_add(...)    ((error_add)(__VA_ARGS__), -1)
#define error_prefix(...) ((error_prefix)(__VA_ARGS__), -1)

#define cJSON_HasType(item, which) ((item) != NULL && ((item)->type & 0xFF) == (which))
#define cJSON_IsNumber(item)       cJSON_HasType(item, cJSON_Number)
#define cJSON_IsString(item)       cJSON_HasType(item, cJSON_String)
#define cJSON_IsArray(item)        cJSON_HasType(item, cJSON_Array)
#define cJSON_IsObject(item)       cJSON_HasType(item, cJSON_Object)

#ifdef __clang__
#define __builtin_shuffle(a, b, mask) ((void)(b), (void)(mask), (a))
#endif

#endif
