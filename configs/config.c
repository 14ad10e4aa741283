// Owns loading: file and --set over the defaults, faults collected. Reading of text is in
// config_node.c, of single values in config_value.c; rules between keys are in config_rules.c.
#include "configs/config.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "configs/config_node.h"
#include "configs/config_path.h"
#include "configs/config_rules.h"
#include "configs/config_table.h"
#include "configs/config_value.h"

// The bytes of a file in memory the caller frees; NULL with errno set.
static char *read_file(const char *path, size_t *size)
{
    enum { BLOCK = 16384 };
    FILE *file = fopen(path, "rb");
    char *text = NULL;
    *size = 0;
    if (!file)
        return NULL;
    size_t got = BLOCK;
    while (got == BLOCK) {
        text = memory_resize(text, *size + BLOCK, 1);
        errno = 0;
        got = fread(text + *size, 1, BLOCK, file);
        *size += got;
    }
    int failure = ferror(file) ? errno : 0;
    fclose(file);
    text[*size] = '\0'; // the last block is never full
    if (failure) {
        free(text);
        text = NULL;
        errno = failure;
    }
    return text;
}

struct loading {
    struct config *config;
    struct config_faults *faults;
};

#define LOADING_FAULT(l, line, section, key, ...)                                                  \
    config_fault((l)->faults, (l)->config, line, section, key, __VA_ARGS__)

static void read_value(const struct loading *l, const struct config_key *key,
                       const struct config_node *value)
{
    size_t before = l->faults->count;
    config_value_read(l->config, key, value, l->faults);
    l->faults->values += l->faults->count - before;
}

static void read_key(const struct loading *l, const struct config_section *section,
                     const struct config_node *name, const struct config_node *value)
{
    char advice[CONFIG_ADVICE_BYTES];
    if (name->kind != CONFIG_NODE_SCALAR) {
        LOADING_FAULT(l, name->line, section->name, NULL, "a key must be a word");
        return;
    }
    const struct config_key *key = config_section_key(section, name->text);
    if (!key) {
        LOADING_FAULT(l, name->line, section->name, name->text, "unknown key%s",
                      config_key_advice(section, name->text, advice));
        return;
    }
    int *line = config_line(l->config, key);
    if (*line != CONFIG_LINE_DEFAULT) {
        LOADING_FAULT(l, name->line, section->name, key->name,
                      "given twice; the first is on line %d", *line);
        return;
    }
    *line = name->line;
    read_value(l, key, value);
}

static bool is_null(const struct config_node *node)
{
    return node->kind == CONFIG_NODE_SCALAR && !node->quoted &&
           (node->text[0] == '\0' || strcmp(node->text, "~") == 0 ||
            strcmp(node->text, "null") == 0);
}

// `seen` holds the line where each section was met first.
static void read_section(const struct loading *l, const struct config_node *name,
                         const struct config_node *value, int seen[CONFIG_SECTION_COUNT])
{
    char advice[CONFIG_ADVICE_BYTES];
    if (name->kind != CONFIG_NODE_SCALAR) {
        LOADING_FAULT(l, name->line, NULL, NULL, "a section must be a word");
        return;
    }
    const struct config_section *section = config_section_find(name->text);
    if (!section) {
        LOADING_FAULT(l, name->line, name->text, NULL, "unknown section%s",
                      config_section_advice(name->text, advice));
        return;
    }
    int *first = &seen[section - config_sections];
    if (*first > 0) {
        LOADING_FAULT(l, name->line, section->name, NULL,
                      "section given twice; the first is on line %d", *first);
        return;
    }
    *first = name->line;
    if (is_null(value)) // a section whose keys are all commented out
        return;
    if (value->kind != CONFIG_NODE_MAP) {
        LOADING_FAULT(l, value->line, section->name, NULL, "expected keys with values, got %s",
                      value->kind == CONFIG_NODE_LIST ? "a list" : value->text);
        return;
    }
    for (size_t i = 0; i < value->count; i += 2)
        read_key(l, section, &value->items[i], &value->items[i + 1]);
}

// Returns -1 when the file has no keys to look at: missing, not YAML, not a map.
static int load_file(const struct loading *l)
{
    struct config_node tree = {0};
    int seen[CONFIG_SECTION_COUNT] = {0}, status = -1;
    size_t size;
    char *text = read_file(l->config->file, &size);
    if (!text) {
        LOADING_FAULT(l, 0, NULL, NULL, "can not be read: %s", strerror(errno));
        return -1;
    }
    if (config_node_from_yaml(&tree, l->config, text, size, l->faults) != 0)
        goto out;
    if (tree.kind != CONFIG_NODE_MAP) {
        LOADING_FAULT(l, tree.line, NULL, NULL, "expected sections such as `run:`, got %s",
                      tree.kind == CONFIG_NODE_LIST ? "a list" : tree.text);
        goto out;
    }
    for (size_t i = 0; i < tree.count; i += 2)
        read_section(l, &tree.items[i], &tree.items[i + 1], seen);
    status = 0;
out:
    config_node_release(&tree);
    free(text);
    return status;
}

// A bare key that several sections have: a fault with all of them.
static void fault_ambiguous(const struct loading *l, const char *name,
                            const struct config_key *const *found, size_t n)
{
    char list[256] = "";
    for (size_t i = 0; i < n; i++) {
        size_t at = strlen(list);
        snprintf(list + at, sizeof(list) - at, "%s%s.%s", i > 0 ? ", " : "", found[i]->section,
                 found[i]->name);
    }
    LOADING_FAULT(l, CONFIG_LINE_SET, NULL, name, "more than one section has it: %s", list);
}

// The key that "section.key" or "key" names; NULL after a fault.
static const struct config_key *find_set_key(const struct loading *l, char *name)
{
    char advice[CONFIG_ADVICE_BYTES];
    const struct config_key *found[CONFIG_SECTION_COUNT];
    char *dot = strchr(name, '.');
    if (!dot) {
        size_t n = config_keys_named(name, found);
        if (n == 1)
            return found[0];
        if (n > 1)
            fault_ambiguous(l, name, found, n);
        else
            LOADING_FAULT(l, CONFIG_LINE_SET, NULL, name, "unknown key%s",
                          config_key_advice(NULL, name, advice));
        return NULL;
    }
    *dot = '\0';
    const struct config_section *section = config_section_find(name);
    const struct config_key *key = section ? config_section_key(section, dot + 1) : NULL;
    if (!section)
        LOADING_FAULT(l, CONFIG_LINE_SET, name, dot + 1, "unknown section %s%s", name,
                      config_section_advice(name, advice));
    else if (!key)
        LOADING_FAULT(l, CONFIG_LINE_SET, name, dot + 1, "unknown key%s",
                      config_key_advice(section, dot + 1, advice));
    return key;
}

static bool takes_list(const struct config_key *key)
{
    return key->type == CONFIG_TYPE_TEXTS || key->type == CONFIG_TYPE_PATHS ||
           key->type == CONFIG_TYPE_INTS || key->type == CONFIG_TYPE_REALS;
}

static void apply_set(const struct loading *l, const char *set)
{
    const char *equals = strchr(set, '=');
    if (!equals || equals == set) {
        LOADING_FAULT(l, CONFIG_LINE_SET, NULL, set, "expected key=value");
        return;
    }
    char *name = memory_format("%.*s", (int)(equals - set), set);
    const struct config_key *key = find_set_key(l, name);
    if (key) {
        struct config_node value;
        config_node_from_set(&value, equals + 1, takes_list(key));
        *config_line(l->config, key) = CONFIG_LINE_SET;
        read_value(l, key, &value);
        config_node_release(&value);
    }
    free(name);
}

int config_load(struct config *config, const char *file, const char *const *sets, size_t set_count,
                struct error *err)
{
    struct config_faults faults = {0};
    struct loading l = {config, &faults};
    free(config->file);
    free(config->folder);
    config->file = file ? memory_strdup(file) : NULL;
    config->folder = config_path_folder(file);
    memset(&config->lines, 0, sizeof(config->lines));
    if (!config->folder) {
        LOADING_FAULT(&l, 0, NULL, NULL, "its folder can not be read: %s", strerror(errno));
        return config_faults_end(&faults, err);
    }
    int status = file ? load_file(&l) : 0;
    for (size_t i = 0; i < set_count; i++)
        apply_set(&l, sets[i]);
    // A value that could not be read left the default behind: rules that compare it with other keys
    // would report what the user did not write. A file that could not be read has no keys at all.
    if (status == 0)
        config_check_missing(config, &faults);
    if (status == 0 && faults.values == 0)
        config_check_rules(config, &faults);
    return config_faults_end(&faults, err);
}
