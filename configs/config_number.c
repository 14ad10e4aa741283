// Owns how numbers are written in configurations. Knows no key and no range.
#include "configs/config_number.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static size_t count_digits(const char *text)
{
    size_t n = 0;
    while (isdigit((unsigned char)text[n]))
        n++;
    return n;
}

enum config_number config_parse_int(const char *text, int64_t *value)
{
    const char *digits = text + (*text == '-' || *text == '+');
    size_t n = count_digits(digits);
    // 010 is 8 to one YAML reader and 10 to the next.
    if (n == 0 || digits[n] != '\0' || (n > 1 && digits[0] == '0'))
        return CONFIG_NUMBER_NOT;
    errno = 0;
    long long parsed = strtoll(text, NULL, 10);
    if (errno == ERANGE)
        return CONFIG_NUMBER_BIG;
    *value = (int64_t)parsed;
    return CONFIG_NUMBER_OK;
}

static int is_decimal(const char *text)
{
    text += *text == '-' || *text == '+';
    size_t whole = count_digits(text), part = 0;
    text += whole;
    if (*text == '.') {
        part = count_digits(text + 1);
        text += 1 + part;
    }
    if (whole + part == 0)
        return 0;
    if (*text == 'e' || *text == 'E') {
        text++;
        text += *text == '-' || *text == '+';
        size_t exponent = count_digits(text);
        if (exponent == 0)
            return 0;
        text += exponent;
    }
    return *text == '\0';
}

enum config_number config_parse_real(const char *text, double *value)
{
    if (!is_decimal(text))
        return CONFIG_NUMBER_NOT;
    double parsed = strtod(text, NULL);
    if (!isfinite(parsed))
        return CONFIG_NUMBER_BIG;
    *value = parsed;
    return CONFIG_NUMBER_OK;
}

void config_format_real(double value, char text[CONFIG_REAL_BYTES])
{
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, CONFIG_REAL_BYTES, "%.*g", digits, value);
        if (strtod(text, NULL) == value)
            return;
    }
}
