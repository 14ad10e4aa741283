// The table of keys at run time: rows made from configs/config_keys.h, and how a row finds its value
// in a struct config. Only for this folder; other folders use the structs.
#ifndef CONFIGS_CONFIG_TABLE_H
#define CONFIGS_CONFIG_TABLE_H

#include "configs/config.h"

enum config_type {
    CONFIG_TYPE_TEXT,
    CONFIG_TYPE_PATH,
    CONFIG_TYPE_INT,
    CONFIG_TYPE_REAL,
    CONFIG_TYPE_FLAG,
    CONFIG_TYPE_CHOICE,
    CONFIG_TYPE_TEXTS,
    CONFIG_TYPE_PATHS,
    CONFIG_TYPE_INTS,
    CONFIG_TYPE_REALS,
};

enum config_resume { CONFIG_KEEP, CONFIG_FREE };

struct config_key {
    const char *section, *name, *help;
    enum config_type type;
    enum config_resume resume;
    size_t value_at; // offset of the value in struct config
    size_t line_at;  // offset of its line, an int, in struct config
    int64_t min_int, max_int, default_int;
    double min_real, max_real, default_real;
    const char *default_text; // TEXT, CHOICE, REALS
    const char *choices;      // CHOICE: texts one after another, each with its NUL; "" ends
};

struct config_section {
    const char *name, *help;
    const struct config_key *(*keys)(void);
    size_t count;
};

#define CONFIG_COUNT_SECTION(section, LIST, help) +1
enum { CONFIG_SECTION_COUNT = 0 CONFIG_SECTIONS(CONFIG_COUNT_SECTION) };
#define CONFIG_COUNT_KEY(...) +1
#define CONFIG_COUNT_KEYS(section, LIST, help)                                                     \
    LIST(CONFIG_COUNT_KEY, CONFIG_COUNT_KEY, CONFIG_COUNT_KEY, CONFIG_COUNT_KEY, CONFIG_COUNT_KEY, \
         CONFIG_COUNT_KEY, CONFIG_COUNT_KEY, CONFIG_COUNT_KEY, CONFIG_COUNT_KEY, CONFIG_COUNT_KEY)
enum { CONFIG_KEY_COUNT = 0 CONFIG_SECTIONS(CONFIG_COUNT_KEYS) };

extern const struct config_section config_sections[CONFIG_SECTION_COUNT];

// NULL when there is none of that name.
const struct config_section *config_section_find(const char *name);
const struct config_key *config_section_key(const struct config_section *section, const char *name);
// Keys of that name in all sections; returns how many there are.
size_t config_keys_named(const char *name, const struct config_key *found[CONFIG_SECTION_COUNT]);

// The value of a key: char **, int64_t *, double *, bool *, int * or struct config_texts * etc.
void *config_value(struct config *config, const struct config_key *key);
const void *config_value_const(const struct config *config, const struct config_key *key);
int *config_line(struct config *config, const struct config_key *key);

// "; did you mean ...?" for an unknown word, or where to look; the text is in `buffer`.
enum { CONFIG_ADVICE_BYTES = 160 };
const char *config_section_advice(const char *word, char buffer[CONFIG_ADVICE_BYTES]);
// Section NULL: the key was given without one.
const char *config_key_advice(const struct config_section *section, const char *word,
                              char buffer[CONFIG_ADVICE_BYTES]);

#endif
