// Owns the form of fault lines: where, what key, what is wrong. Does not know any rule.
#include "configs/config_faults.h"

#include <stdarg.h>
#include <string.h>

#include "configs/config_table.h"

enum { FAULT_BYTES = 1024, LAST_LINE_BYTES = 48 };

static void add_line(struct config_faults *faults, const char *text)
{
    faults->count++;
    size_t used = strlen(faults->shown.text) + strlen(text) + 1;
    // Once a line does not fit no later one is shown either, so that no gap goes unnoticed.
    if (faults->unshown > 0 || used + LAST_LINE_BYTES > sizeof(faults->shown.text))
        faults->unshown++;
    else
        error_add(&faults->shown, "%s", text);
}

static size_t write_place(char *text, size_t size, const struct config *config, int line)
{
    int n = 0;
    if (line == CONFIG_LINE_SET)
        n = snprintf(text, size, "--set ");
    else if (config->file && line > 0)
        n = snprintf(text, size, "%s:%d: ", config->file, line);
    else if (config->file)
        n = snprintf(text, size, "%s: ", config->file);
    return n < (int)size ? (size_t)n : size - 1;
}

void config_fault(struct config_faults *faults, const struct config *config, int line,
                  const char *section, const char *key, const char *format, ...)
{
    char text[FAULT_BYTES];
    size_t at = write_place(text, sizeof(text), config, line);
    if (section || key)
        snprintf(text + at, sizeof(text) - at, "%s%s%s: ", section ? section : "",
                 section && key ? "." : "", key ? key : "");
    at = strlen(text);
    va_list args;
    va_start(args, format);
    vsnprintf(text + at, sizeof(text) - at, format, args);
    va_end(args);
    for (char *c = text; *c != '\0'; c++)
        if (*c == '\n') // of a quoted value; a fault is one line
            *c = ' ';
    add_line(faults, text);
}

// The key that a line begins with, as "section.key: "; NULL: it begins with something else.
static const struct config_key *leading_key(const char *line)
{
    char name[CONFIG_NAME_BYTES];
    size_t length = strcspn(line, ": \n");
    if (line[length] != ':' || line[length + 1] != ' ' || length >= sizeof(name))
        return NULL;
    snprintf(name, sizeof(name), "%.*s", (int)length, line);
    char *dot = strchr(name, '.');
    if (dot == NULL)
        return NULL;
    *dot = '\0';
    const struct config_section *section = config_section_find(name);
    return section != NULL ? config_section_key(section, dot + 1) : NULL;
}

int config_name_places(const struct config *config, struct error *err)
{
    struct error found = *err;
    err->text[0] = '\0';
    for (const char *line = found.text; *line != '\0'; line += *line == '\n') {
        int length = (int)strcspn(line, "\n");
        char place[FAULT_BYTES] = "";
        const struct config_key *key = leading_key(line);
        int at = key == NULL ? CONFIG_LINE_DEFAULT
                             : *(const int *)(const void *)((const char *)config + key->line_at);
        if (at != CONFIG_LINE_DEFAULT)
            write_place(place, sizeof(place), config, at);
        error_add(err, "%s%.*s", place, length, line);
        line += length;
    }
    return -1;
}

int config_faults_end(const struct config_faults *faults, struct error *err)
{
    if (faults->count == 0)
        return 0;
    *err = faults->shown;
    if (faults->unshown > 0)
        error_add(err, "... and %zu more", faults->unshown);
    return -1;
}
