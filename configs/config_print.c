// Owns how values are printed. JSON strings are valid YAML double-quoted scalars, so one form serves
// both. Does not know whole files.
#include "configs/config_print.h"

#include <inttypes.h>

#include "configs/config_number.h"
#include "configs/config_value.h"

const char *config_type_name(enum config_type type)
{
    static const char *const names[] = {
        [CONFIG_TYPE_TEXT] = "text",     [CONFIG_TYPE_PATH] = "path",
        [CONFIG_TYPE_INT] = "integer",   [CONFIG_TYPE_REAL] = "number",
        [CONFIG_TYPE_FLAG] = "flag",     [CONFIG_TYPE_CHOICE] = "choice",
        [CONFIG_TYPE_TEXTS] = "texts",   [CONFIG_TYPE_PATHS] = "paths",
        [CONFIG_TYPE_INTS] = "integers", [CONFIG_TYPE_REALS] = "numbers",
    };
    return names[type];
}

void config_choices_print(FILE *out, const struct config_key *key, const char *separator)
{
    const char *name;
    for (int i = 0; (name = config_choice_at(key, i)) != NULL; i++)
        fprintf(out, "%s%s", i > 0 ? separator : "", name);
}

static void print_real(FILE *out, double value)
{
    char text[CONFIG_REAL_BYTES];
    config_format_real(value, text);
    fputs(text, out);
}

void config_range_print(FILE *out, const struct config_key *key)
{
    switch (key->type) {
    case CONFIG_TYPE_INT:
    case CONFIG_TYPE_INTS:
        if (key->max_int == INT64_MAX)
            fprintf(out, "at least %" PRId64, key->min_int);
        else
            fprintf(out, "%" PRId64 " to %" PRId64, key->min_int, key->max_int);
        break;
    case CONFIG_TYPE_REAL:
    case CONFIG_TYPE_REALS:
        print_real(out, key->min_real);
        fputs(" to ", out);
        print_real(out, key->max_real);
        break;
    case CONFIG_TYPE_FLAG:
        fputs("true or false", out);
        break;
    case CONFIG_TYPE_CHOICE:
        config_choices_print(out, key, ", ");
        break;
    case CONFIG_TYPE_TEXT:
    case CONFIG_TYPE_PATH:
    case CONFIG_TYPE_TEXTS:
    case CONFIG_TYPE_PATHS:
        break;
    }
}

bool config_value_given(const struct config *config, const struct config_key *key)
{
    const void *value = config_value_const(config, key);
    switch (key->type) {
    case CONFIG_TYPE_INT:
        return *(const int64_t *)value != CONFIG_UNSET;
    case CONFIG_TYPE_REAL:
        return !isnan(*(const double *)value);
    case CONFIG_TYPE_TEXT:
    case CONFIG_TYPE_PATH:
        return *(char *const *)value != NULL;
    default:
        return true;
    }
}

static void print_text(FILE *out, const char *text, enum config_print form)
{
    if (form == CONFIG_PRINT_PLAIN) {
        fputs(text, out);
        return;
    }
    fputc('"', out);
    for (; *text != '\0'; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\')
            fprintf(out, "\\%c", c);
        else if (c < 0x20 || c == 0x7f)
            fprintf(out, "\\u%04x", c);
        else
            fputc(c, out);
    }
    fputc('"', out);
}

static void print_texts(FILE *out, const struct config_texts *texts, enum config_print form)
{
    fputc('[', out);
    for (size_t i = 0; i < texts->count; i++) {
        fputs(i > 0 ? ", " : "", out);
        print_text(out, texts->items[i], form);
    }
    fputc(']', out);
}

static void print_ints(FILE *out, const struct config_ints *ints)
{
    fputc('[', out);
    for (size_t i = 0; i < ints->count; i++)
        fprintf(out, "%s%" PRId64, i > 0 ? ", " : "", ints->items[i]);
    fputc(']', out);
}

static void print_reals(FILE *out, const struct config_reals *reals)
{
    fputc('[', out);
    for (size_t i = 0; i < reals->count; i++) {
        fputs(i > 0 ? ", " : "", out);
        print_real(out, reals->items[i]);
    }
    fputc(']', out);
}

void config_value_print(FILE *out, const struct config *config, const struct config_key *key,
                        enum config_print form)
{
    const void *value = config_value_const(config, key);
    if (!config_value_given(config, key)) {
        fputs("null", out);
        return;
    }
    switch (key->type) {
    case CONFIG_TYPE_TEXT:
    case CONFIG_TYPE_PATH:
        print_text(out, *(char *const *)value, form);
        break;
    case CONFIG_TYPE_INT:
        fprintf(out, "%" PRId64, *(const int64_t *)value);
        break;
    case CONFIG_TYPE_REAL:
        print_real(out, *(const double *)value);
        break;
    case CONFIG_TYPE_FLAG:
        fputs(*(const bool *)value ? "true" : "false", out);
        break;
    case CONFIG_TYPE_CHOICE:
        print_text(out, config_choice_at(key, *(const int *)value), form);
        break;
    case CONFIG_TYPE_TEXTS:
    case CONFIG_TYPE_PATHS:
        print_texts(out, value, form);
        break;
    case CONFIG_TYPE_INTS:
        print_ints(out, value);
        break;
    case CONFIG_TYPE_REALS:
        print_reals(out, value);
        break;
    }
}
