// config.json of an exported or released drafter, read and changed by tests.
#ifndef TESTS_SUPPORT_MODEL_CONFIG_H
#define TESTS_SUPPORT_MODEL_CONFIG_H

#include <cjson/cJSON.h>

// Of a directory; the caller deletes it. Fails the test when it can not be read.
cJSON *model_config_read(const char *directory);
// Sets a member, in an object of it when `object` is given; json NULL removes it.
void model_config_edit(const char *directory, const char *object, const char *member,
                       const char *json);

#endif
