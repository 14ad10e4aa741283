// Faults of a configuration, one line each, in the order they are found.
#ifndef CONFIGS_CONFIG_FAULTS_H
#define CONFIGS_CONFIG_FAULTS_H

#include "configs/config.h"

struct config_faults {
    struct error shown;
    size_t count;
    size_t unshown; // of these, found when the text was full
    size_t values;  // of these, values of known keys that could not be read
};

// Adds "FILE:LINE: section.key: text". `line` as in struct config_lines; section or key may be NULL.
void config_fault(struct config_faults *faults, const struct config *config, int line,
                  const char *section, const char *key, const char *format, ...)
    __attribute__((format(printf, 6, 7)));
// 0 and err as it was when nothing was added; otherwise -1 and every line in err.
int config_faults_end(const struct config_faults *faults, struct error *err);

#endif
