// Numbers as text, stricter than strtoll and strtod: all of the text, decimal only, no inf and no nan.
#ifndef CONFIGS_CONFIG_NUMBER_H
#define CONFIGS_CONFIG_NUMBER_H

#include <stddef.h>
#include <stdint.h>

enum config_number {
    CONFIG_NUMBER_OK,
    CONFIG_NUMBER_NOT, // not a number of this kind
    CONFIG_NUMBER_BIG, // too large for the type
};

// [+-] digits, no leading zero, no '_'.
enum config_number config_parse_int(const char *text, int64_t *value);
// The forms of an integer, 0.5, .5, 5., 6.0e-4, 1e9.
enum config_number config_parse_real(const char *text, double *value);

enum { CONFIG_REAL_BYTES = 32 };
// Shortest of 15, 16 or 17 digits that reads back to the same bits.
void config_format_real(double value, char text[CONFIG_REAL_BYTES]);

#endif
