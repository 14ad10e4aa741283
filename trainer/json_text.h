// JSON as this program writes and reads it: integers keep all 64 bits, reals all 17 digits, and what
// is no number (NaN, inf) is null.
#ifndef TRAINER_JSON_TEXT_H
#define TRAINER_JSON_TEXT_H

#include <cjson/cJSON.h>
#include <stdint.h>

#include "base/error.h"

void json_add_int(cJSON *object, const char *name, int64_t value);
void json_add_real(cJSON *object, const char *name, double value);
cJSON *json_real(double value);
cJSON *json_int(int64_t value);

// Writes an object with line breaks, durably.
int json_write_file(const cJSON *object, const char *path, struct error *err);

// A JSON file with the text it was parsed from: cJSON keeps numbers as doubles, so integers are read
// from the text.
struct json_file {
    char *path, *text;
    cJSON *root;
};
int json_open(struct json_file *file, const char *path, struct error *err);
void json_close(struct json_file *file);
// Members of the outermost object. Errors name the file and the member.
int json_get_int(const struct json_file *file, const char *name, int64_t *value, struct error *err);
int json_get_real(const struct json_file *file, const char *name, double *value, struct error *err);
int json_get_text(const struct json_file *file, const char *name, char *value, size_t size,
                  struct error *err);

#endif
