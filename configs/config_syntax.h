// What is said of a text that is not YAML: libyaml's words, and what to do about it where that can be told.
#ifndef CONFIGS_CONFIG_SYNTAX_H
#define CONFIGS_CONFIG_SYNTAX_H

#include <yaml.h>

#include "configs/config_faults.h"

// Of a parser that has failed at `text`. Returns -1.
int config_syntax_fault(const yaml_parser_t *parser, const char *text, const struct config *config,
                        struct config_faults *faults);

#endif
