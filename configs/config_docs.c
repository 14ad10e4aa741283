// Owns the table of keys as text for people: `dtrain config` and docs/config.md.
#include "configs/config.h"

#include <string.h>

#include "base/log.h"
#include "configs/config_print.h"
#include "configs/config_value.h"

// The default as text; "[]" for an empty list. Not "none": `--set draft_vocab=none` is a file of that name.
static void print_default(FILE *out, const struct config *defaults, const struct config_key *key)
{
    if (config_value_given(defaults, key))
        config_value_print(out, defaults, key, CONFIG_PRINT_PLAIN);
    else
        fputs("(absent)", out);
}

static bool has_range(const struct config_key *key)
{
    return key->type != CONFIG_TYPE_TEXT && key->type != CONFIG_TYPE_PATH &&
           key->type != CONFIG_TYPE_TEXTS && key->type != CONFIG_TYPE_PATHS;
}

static void describe_key(FILE *out, const struct config *defaults, const struct config_key *key)
{
    fprintf(out, "  %s: %s, default ", key->name, config_type_name(key->type));
    print_default(out, defaults, key);
    if (has_range(key)) {
        fputs(", allowed: ", out);
        config_range_print(out, key);
    }
    fprintf(out, "; %s\n      %s\n",
            key->resume == CONFIG_KEEP ? "fixed on resume" : "may change on resume", key->help);
}

void config_describe(FILE *out)
{
    struct config defaults;
    config_init(&defaults);
    for (size_t i = 0; i < CONFIG_SECTION_COUNT; i++) {
        const struct config_section *section = &config_sections[i];
        fprintf(out, "%s%s: %s\n", i > 0 ? "\n" : "", section->name, section->help);
        for (size_t k = 0; k < section->count; k++)
            describe_key(out, &defaults, &section->keys()[k]);
    }
    config_release(&defaults);
}

// Text inside a table cell: '|' would end it.
static void print_cell(FILE *out, const char *text)
{
    for (; *text != '\0'; text++)
        fprintf(out, "%s%c", *text == '|' ? "\\" : "", *text);
}

static void markdown_key(FILE *out, const struct config *defaults, const struct config_key *key)
{
    fprintf(out, "| `%s` | %s | ", key->name, config_type_name(key->type));
    print_default(out, defaults, key);
    fputs(" | ", out);
    config_range_print(out, key);
    fprintf(out, "%s| %s | ", has_range(key) ? " " : "",
            key->resume == CONFIG_KEEP ? "fixed" : "free");
    print_cell(out, key->help);
    fputs(" |\n", out);
}

void config_write_markdown(FILE *out)
{
    fputs("# Configuration keys\n\n"
          "This page is generated from `configs/config_keys.h`; change it there.\n\n"
          "A config is a YAML file of sections with keys. Paths are relative to the folder of the\n"
          "config file, those of `--set` too. `--set key=value` overrides the file; the key may\n"
          "come without its section where only one section has it, lists are `[a, b]` or `a,b`.\n"
          "`(absent)`: no value unless one is given, and no word of `--set` takes it away.\n"
          "Resume: a `fixed` key must stay the same when a run is resumed, a `free` key may\n"
          "change.\n",
          out);
    struct config defaults;
    config_init(&defaults);
    for (size_t i = 0; i < CONFIG_SECTION_COUNT; i++) {
        const struct config_section *section = &config_sections[i];
        fprintf(out, "\n## %s\n\n%s\n\n", section->name, section->help);
        fputs("| key | type | default | allowed | resume | meaning |\n"
              "|---|---|---|---|---|---|\n",
              out);
        for (size_t k = 0; k < section->count; k++)
            markdown_key(out, &defaults, &section->keys()[k]);
    }
    config_release(&defaults);
}
