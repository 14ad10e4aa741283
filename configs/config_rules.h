// Rules between keys, in two parts because the second only makes sense when every value was read.
#ifndef CONFIGS_CONFIG_RULES_H
#define CONFIGS_CONFIG_RULES_H

#include "configs/config_faults.h"

// Required keys that were not given.
void config_check_missing(const struct config *config, struct config_faults *faults);
// Keys that contradict each other.
void config_check_rules(const struct config *config, struct config_faults *faults);

#endif
