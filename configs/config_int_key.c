// Owns the way to one key by its name, for commands that try other values of it.
#include <stdio.h>
#include <string.h>

#include "base/memory.h"
#include "configs/config_table.h"

static const struct config_key *find_key(const char *name, struct error *err)
{
    char advice[CONFIG_ADVICE_BYTES];
    const struct config_key *found[CONFIG_SECTION_COUNT];
    const char *dot = strchr(name, '.');
    if (dot == NULL) {
        size_t n = config_keys_named(name, found);
        if (n == 1)
            return found[0];
        if (n == 0)
            error_set(err, "%s: unknown key%s", name, config_key_advice(NULL, name, advice));
        else
            error_set(err, "%s: in more than one section; say %s.%s or %s.%s", name,
                      found[0]->section, name, found[1]->section, name);
        return NULL;
    }
    char section_name[32];
    snprintf(section_name, sizeof(section_name), "%.*s", (int)(dot - name), name);
    const struct config_section *section = config_section_find(section_name);
    const struct config_key *key = NULL;
    if (section == NULL)
        error_set(err, "%s: unknown section%s", name, config_section_advice(section_name, advice));
    else if ((key = config_section_key(section, dot + 1)) == NULL)
        error_set(err, "%s: unknown key%s", name, config_key_advice(section, dot + 1, advice));
    return key;
}

int config_find_int(struct config *config, const char *name, struct config_int_key *key,
                    struct error *err)
{
    const struct config_key *row = find_key(name, err);
    if (row == NULL)
        return -1;
    if (row->type != CONFIG_TYPE_INT)
        return error_set(err, "%s.%s: not a key of whole numbers", row->section, row->name);
    *key = (struct config_int_key){
        .value = config_value(config, row), .minimum = row->min_int, .maximum = row->max_int};
    snprintf(key->name, sizeof(key->name), "%s.%s", row->section, row->name);
    return 0;
}

int config_find_name(const char *name, char full[CONFIG_NAME_BYTES], struct error *err)
{
    const struct config_key *row = find_key(name, err);
    if (row == NULL)
        return -1;
    snprintf(full, CONFIG_NAME_BYTES, "%s.%s", row->section, row->name);
    return 0;
}

const char *config_short_name(const char *full)
{
    const struct config_key *found[CONFIG_SECTION_COUNT];
    const char *dot = strchr(full, '.');
    return dot != NULL && config_keys_named(dot + 1, found) == 1 ? dot + 1 : full;
}
