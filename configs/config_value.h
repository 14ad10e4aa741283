// Values of keys: defaults, reading from the tree, comparing. Printing is in config_print.h.
#ifndef CONFIGS_CONFIG_VALUE_H
#define CONFIGS_CONFIG_VALUE_H

#include "configs/config_node.h"
#include "configs/config_table.h"

// Sets the default over a zeroed value.
void config_value_default(struct config *config, const struct config_key *key);
// Frees what the value owns and zeroes it.
void config_value_release(struct config *config, const struct config_key *key);
// Replaces the value by what the node says. A node that does not fit adds faults and changes nothing.
void config_value_read(struct config *config, const struct config_key *key,
                       const struct config_node *node, struct config_faults *faults);

bool config_value_equal(const struct config *a, const struct config *b,
                        const struct config_key *key);
// Text of choice number `value`; NULL when there are fewer.
const char *config_choice_at(const struct config_key *key, int value);

#endif
