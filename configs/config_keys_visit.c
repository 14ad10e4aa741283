// Owns what is told of every key to those who write texts of their own: completion scripts, the man page.
#include <stdio.h>
#include <stdlib.h>

#include "base/log.h"
#include "configs/config.h"
#include "configs/config_print.h"
#include "configs/config_value.h"

static const char flag_choices[] = "true\0false\0";

static FILE *open_text(char **text, size_t *size)
{
    FILE *out = open_memstream(text, size);
    if (out == NULL)
        die("no memory for a text");
    return out;
}

static void visit(const struct config *defaults, const struct config_section *section,
                  const struct config_key *key, config_key_visit_fn *function, void *context)
{
    const struct config_key *same[CONFIG_SECTION_COUNT];
    char *initial, *allowed;
    size_t size;
    FILE *out = open_text(&initial, &size);
    if (config_value_given(defaults, key))
        config_value_print(out, defaults, key, CONFIG_PRINT_PLAIN);
    fclose(out);
    out = open_text(&allowed, &size);
    config_range_print(out, key);
    fclose(out);
    const struct config_key_words words = {.section = section->name,
                                           .section_help = section->help,
                                           .name = key->name,
                                           .type = config_type_name(key->type),
                                           .initial = initial,
                                           .allowed = allowed,
                                           .help = key->help,
                                           .choices = key->type == CONFIG_TYPE_CHOICE ? key->choices
                                                      : key->type == CONFIG_TYPE_FLAG ? flag_choices
                                                                                      : NULL,
                                           .path = key->type == CONFIG_TYPE_PATH ||
                                                   key->type == CONFIG_TYPE_PATHS,
                                           .fixed = key->resume == CONFIG_KEEP,
                                           .unique = config_keys_named(key->name, same) == 1};
    function(context, &words);
    free(initial);
    free(allowed);
}

void config_visit_keys(config_key_visit_fn *function, void *context)
{
    struct config defaults;
    config_init(&defaults);
    for (size_t s = 0; s < CONFIG_SECTION_COUNT; s++)
        for (size_t k = 0; k < config_sections[s].count; k++)
            visit(&defaults, &config_sections[s], &config_sections[s].keys()[k], function, context);
    config_release(&defaults);
}
