// Owns how numbers of bytes are read and written.
#include "base/byte_size.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    double bytes;
} units[] = {{"", 1.0},       {"B", 1.0},      {"KiB", 0x1p10}, {"MiB", 0x1p20},
             {"GiB", 0x1p30}, {"TiB", 0x1p40}, {"kB", 1e3},     {"KB", 1e3},
             {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12}};

int byte_size_parse(const char *text, uint64_t *bytes)
{
    char *end;
    if (!isdigit((unsigned char)text[0]) ||
        (text[0] == '0' && tolower((unsigned char)text[1]) == 'x'))
        return -1;
    double value = strtod(text, &end);
    while (*end == ' ')
        end++;
    for (size_t i = 0; i < sizeof(units) / sizeof(*units); i++) {
        if (strcmp(end, units[i].name) != 0)
            continue;
        value *= units[i].bytes;
        if (!(value <= 0x1p62))
            return -1;
        *bytes = (uint64_t)value;
        return 0;
    }
    return -1;
}

int byte_size_parse_memory(const char *text, uint64_t *bytes)
{
    uint64_t value = 0;
    bool plain = text[0] != '\0' && isdigit((unsigned char)text[strlen(text) - 1]);
    if (byte_size_parse(text, &value) != 0 || value == 0 || (plain && value < 1 << 20))
        return -1;
    *bytes = value;
    return 0;
}

const char *byte_size_text(double bytes, char text[BYTE_SIZE_TEXT])
{
    static const char *const names[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    size_t unit = 0;
    while (bytes >= 1024.0 && unit + 1 < sizeof(names) / sizeof(*names)) {
        bytes /= 1024.0;
        unit++;
    }
    snprintf(text, BYTE_SIZE_TEXT, unit == 0 ? "%.0f %s" : "%.2f %s", bytes, names[unit]);
    return text;
}
