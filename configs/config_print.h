// Values and ranges as text: for files that are read again, and for people.
#ifndef CONFIGS_CONFIG_PRINT_H
#define CONFIGS_CONFIG_PRINT_H

#include "configs/config_table.h"

enum config_print {
    CONFIG_PRINT_QUOTED, // valid in YAML and JSON
    CONFIG_PRINT_PLAIN,  // for people
};

// Numbers print so that they read back to the same bits. Not given: null.
void config_value_print(FILE *out, const struct config *config, const struct config_key *key,
                        enum config_print form);
// Whether there is a value at all: CONFIG_UNSET, NAN and NULL are none.
bool config_value_given(const struct config *config, const struct config_key *key);

const char *config_type_name(enum config_type type);
// "2 to 64", "at least 0", "true or false", the choices; nothing for texts and paths.
void config_range_print(FILE *out, const struct config_key *key);
// The choices with `separator` between them.
void config_choices_print(FILE *out, const struct config_key *key, const char *separator);

#endif
