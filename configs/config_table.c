// Owns the rows made from configs/config_keys.h, the search among them and the lifetime of values.
// Does not read or write any text form.
#include "configs/config_table.h"

#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/memory.h"
#include "configs/config_value.h"

#define ROW(key, row_type, row_resume, row_help)                                                   \
    .section = owner, .name = #key, .help = row_help, .type = row_type,                            \
    .resume = CONFIG_##row_resume, .value_at = values_at + offsetof(values, key),                  \
    .line_at = lines_at + offsetof(lines, key)
#define ROW_TEXT(key, def, resume, help)                                                           \
    {ROW(key, CONFIG_TYPE_TEXT, resume, help), .default_text = def},
#define ROW_PATH(key, def, resume, help)                                                           \
    {ROW(key, CONFIG_TYPE_PATH, resume, help), .default_text = def},
#define ROW_INT(key, def, min, max, resume, help)                                                  \
    {ROW(key, CONFIG_TYPE_INT, resume, help), .default_int = def, .min_int = min, .max_int = max},
#define ROW_REAL(key, def, min, max, resume, help)                                                 \
    {ROW(key, CONFIG_TYPE_REAL, resume, help), .default_real = (double)(def), .min_real = min,     \
     .max_real = max},
#define ROW_FLAG(key, def, resume, help)                                                           \
    {ROW(key, CONFIG_TYPE_FLAG, resume, help), .default_int = def},
#define ROW_CHOICE(key, def, list, resume, help)                                                   \
    {ROW(key, CONFIG_TYPE_CHOICE, resume, help), .default_text = #def, .choices = list "\0"},
#define ROW_TEXTS(key, resume, help) {ROW(key, CONFIG_TYPE_TEXTS, resume, help)},
#define ROW_PATHS(key, resume, help) {ROW(key, CONFIG_TYPE_PATHS, resume, help)},
#define ROW_INTS(key, min, max, resume, help)                                                      \
    {ROW(key, CONFIG_TYPE_INTS, resume, help), .min_int = min, .max_int = max},
#define ROW_REALS(key, def, min, max, resume, help)                                                \
    {ROW(key, CONFIG_TYPE_REALS, resume, help), .default_text = def, .min_real = min,              \
     .max_real = max},

// One function a section, because only in its scope can the rows of a list name their section.
#define SECTION_KEYS(section, LIST, help)                                                          \
    static const struct config_key *section##_keys(void)                                           \
    {                                                                                              \
        typedef struct section##_config values;                                                    \
        typedef struct section##_lines lines;                                                      \
        enum {                                                                                     \
            values_at = offsetof(struct config, section),                                          \
            lines_at = offsetof(struct config, lines.section)                                      \
        };                                                                                         \
        static const char owner[] = #section;                                                      \
        static const struct config_key rows[] = {LIST(ROW_TEXT, ROW_PATH, ROW_INT, ROW_REAL,       \
                                                      ROW_FLAG, ROW_CHOICE, ROW_TEXTS, ROW_PATHS,  \
                                                      ROW_INTS, ROW_REALS)};                       \
        return rows;                                                                               \
    }
CONFIG_SECTIONS(SECTION_KEYS)

#define SECTION_ROW(section, LIST, help)                                                           \
    {#section, help, section##_keys, 0 CONFIG_COUNT_KEYS(, LIST, )},
const struct config_section config_sections[CONFIG_SECTION_COUNT] = {CONFIG_SECTIONS(SECTION_ROW)};

const struct config_section *config_section_find(const char *name)
{
    for (size_t i = 0; i < CONFIG_SECTION_COUNT; i++)
        if (strcmp(config_sections[i].name, name) == 0)
            return &config_sections[i];
    return NULL;
}

const struct config_key *config_section_key(const struct config_section *section, const char *name)
{
    const struct config_key *keys = section->keys();
    for (size_t i = 0; i < section->count; i++)
        if (strcmp(keys[i].name, name) == 0)
            return &keys[i];
    return NULL;
}

size_t config_keys_named(const char *name, const struct config_key *found[CONFIG_SECTION_COUNT])
{
    size_t n = 0;
    for (size_t i = 0; i < CONFIG_SECTION_COUNT; i++) {
        const struct config_key *key = config_section_key(&config_sections[i], name);
        if (key)
            found[n++] = key;
    }
    return n;
}

void *config_value(struct config *config, const struct config_key *key)
{
    return (char *)config + key->value_at;
}

const void *config_value_const(const struct config *config, const struct config_key *key)
{
    return (const char *)config + key->value_at;
}

int *config_line(struct config *config, const struct config_key *key)
{
    return (int *)(void *)((char *)config + key->line_at);
}

// Nearest key name in one section, or NULL.
static const char *nearest_key(const struct config_section *section, const char *word)
{
    const char *names[CONFIG_KEY_COUNT];
    const struct config_key *keys = section->keys();
    for (size_t i = 0; i < section->count; i++)
        names[i] = keys[i].name;
    return error_nearest(word, names, section->count);
}

static const char *nearest_section(const char *word)
{
    const char *names[CONFIG_SECTION_COUNT];
    for (size_t i = 0; i < CONFIG_SECTION_COUNT; i++)
        names[i] = config_sections[i].name;
    return error_nearest(word, names, CONFIG_SECTION_COUNT);
}

// Nearest key name of all sections.
static const struct config_key *nearest_anywhere(const char *word)
{
    const char *names[CONFIG_KEY_COUNT];
    size_t n = 0;
    for (size_t i = 0; i < CONFIG_SECTION_COUNT; i++)
        for (size_t k = 0; k < config_sections[i].count; k++)
            names[n++] = config_sections[i].keys()[k].name;
    const char *best = error_nearest(word, names, n);
    const struct config_key *found[CONFIG_SECTION_COUNT];
    return best && config_keys_named(best, found) > 0 ? found[0] : NULL;
}

// A key of that very name, wherever it is, is better advice than a similar name nearby.
static const char *advise(const char *near, const char *word, char buffer[CONFIG_ADVICE_BYTES])
{
    const struct config_key *found[CONFIG_SECTION_COUNT];
    const struct config_key *other = config_keys_named(word, found) > 0 ? found[0] : NULL;
    if (!other && !near)
        other = nearest_anywhere(word);
    if (other)
        snprintf(buffer, CONFIG_ADVICE_BYTES, "; did you mean %s.%s?", other->section, other->name);
    else if (near)
        snprintf(buffer, CONFIG_ADVICE_BYTES, "; did you mean %s?", near);
    else
        snprintf(buffer, CONFIG_ADVICE_BYTES, "; `dtrain config` lists every key");
    return buffer;
}

const char *config_section_advice(const char *word, char buffer[CONFIG_ADVICE_BYTES])
{
    return advise(nearest_section(word), word, buffer);
}

const char *config_key_advice(const struct config_section *section, const char *word,
                              char buffer[CONFIG_ADVICE_BYTES])
{
    return advise(section ? nearest_key(section, word) : NULL, word, buffer);
}

const char *config_choice_name(const char *section, const char *key, int value)
{
    const struct config_section *owner = config_section_find(section);
    const struct config_key *row = owner ? config_section_key(owner, key) : NULL;
    if (!row || row->type != CONFIG_TYPE_CHOICE)
        BUG("no choice key %s.%s", section, key);
    const char *name = config_choice_at(row, value);
    if (!name)
        BUG("%s.%s has no choice %d", section, key, value);
    return name;
}

void config_init(struct config *config)
{
    memset(config, 0, sizeof(*config));
    for (size_t i = 0; i < CONFIG_SECTION_COUNT; i++)
        for (size_t k = 0; k < config_sections[i].count; k++)
            config_value_default(config, &config_sections[i].keys()[k]);
}

void config_release(struct config *config)
{
    for (size_t i = 0; i < CONFIG_SECTION_COUNT; i++)
        for (size_t k = 0; k < config_sections[i].count; k++)
            config_value_release(config, &config_sections[i].keys()[k]);
    free(config->file);
    free(config->folder);
    memset(config, 0, sizeof(*config));
}
