// Owns whole-config output and comparison: YAML, JSON, what differs on resume. Single values are
// printed in config_print.c.
#include "configs/config.h"

#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/memory.h"
#include "configs/config_faults.h"
#include "configs/config_path.h"
#include "configs/config_print.h"
#include "configs/config_value.h"

void config_write_yaml(const struct config *config, FILE *out)
{
    for (size_t i = 0; i < CONFIG_SECTION_COUNT; i++) {
        const struct config_section *section = &config_sections[i];
        fprintf(out, "%s:\n", section->name);
        for (size_t k = 0; k < section->count; k++) {
            const struct config_key *key = &section->keys()[k];
            if (!config_value_given(config, key)) {
                fprintf(out, "  # %s: not given\n", key->name);
                continue;
            }
            fprintf(out, "  %s: ", key->name);
            config_value_print(out, config, key, CONFIG_PRINT_QUOTED);
            fputc('\n', out);
        }
    }
}

static void write_json(const struct config *config, FILE *out)
{
    fputc('{', out);
    for (size_t i = 0; i < CONFIG_SECTION_COUNT; i++) {
        const struct config_section *section = &config_sections[i];
        fprintf(out, "%s\"%s\": {", i > 0 ? ", " : "", section->name);
        for (size_t k = 0; k < section->count; k++) {
            const struct config_key *key = &section->keys()[k];
            fprintf(out, "%s\"%s\": ", k > 0 ? ", " : "", key->name);
            config_value_print(out, config, key, CONFIG_PRINT_QUOTED);
        }
        fputc('}', out);
    }
    fputc('}', out);
}

char *config_to_json(const struct config *config)
{
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    if (!out)
        die("out of memory");
    write_json(config, out);
    if (fclose(out) != 0)
        die("out of memory");
    return text;
}

static bool same_base(const char *a, const char *b)
{
    return a && b ? strcmp(config_path_base(a), config_path_base(b)) == 0 : a == b;
}

// Whether a key is the same for a resume: values are equal, paths end in the same name.
static bool same_for_resume(const struct config *before, const struct config *now,
                            const struct config_key *key)
{
    const void *a = config_value_const(before, key), *b = config_value_const(now, key);
    if (key->type == CONFIG_TYPE_PATH)
        return same_base(*(char *const *)a, *(char *const *)b);
    if (key->type != CONFIG_TYPE_PATHS)
        return config_value_equal(before, now, key);
    const struct config_texts *ta = a, *tb = b;
    bool same = ta->count == tb->count;
    for (size_t i = 0; same && i < ta->count; i++)
        same = same_base(ta->items[i], tb->items[i]);
    return same;
}

// Lists of hundreds of shards would hide the other lines.
enum { SHOWN_VALUE_BYTES = 160 };

static void print_short(char text[SHOWN_VALUE_BYTES], const struct config *config,
                        const struct config_key *key)
{
    char *whole = NULL;
    size_t size;
    FILE *out = open_memstream(&whole, &size);
    if (!out)
        die("out of memory");
    config_value_print(out, config, key, CONFIG_PRINT_PLAIN);
    if (fclose(out) != 0)
        die("out of memory");
    int n = snprintf(text, SHOWN_VALUE_BYTES, "%s", whole);
    if (n >= SHOWN_VALUE_BYTES)
        memcpy(text + SHOWN_VALUE_BYTES - 4, "...", 4);
    free(whole);
}

static void compare_key(const struct config *before, const struct config *now,
                        const struct config_key *key, const char *rule,
                        struct config_faults *faults)
{
    char old[SHOWN_VALUE_BYTES], new[SHOWN_VALUE_BYTES], counts[64] = "";
    if (key->resume == CONFIG_FREE || same_for_resume(before, now, key))
        return;
    print_short(old, before, key);
    print_short(new, now, key);
    if (key->type == CONFIG_TYPE_PATHS) {
        const struct config_texts *a = config_value_const(before, key);
        const struct config_texts *b = config_value_const(now, key);
        snprintf(counts, sizeof(counts), " (%zu files, now %zu)", a->count, b->count);
    }
    int line = *(const int *)(const void *)((const char *)now + key->line_at);
    config_fault(faults, now, line, key->section, key->name, "%s: it was %s and is %s%s", rule, old,
                 new, counts);
}

int config_compare_for_resume(const struct config *before, const struct config *now,
                              struct error *err)
{
    struct config_faults faults = {0};
    for (size_t i = 0; i < CONFIG_SECTION_COUNT; i++)
        for (size_t k = 0; k < config_sections[i].count; k++)
            compare_key(before, now, &config_sections[i].keys()[k], "must stay the same on resume",
                        &faults);
    return config_faults_end(&faults, err);
}

int config_compare_drafter(const struct config *before, const struct config *now, struct error *err)
{
    struct config_faults faults = {0};
    for (size_t i = 0; i < CONFIG_SECTION_COUNT; i++)
        for (size_t k = 0; k < config_sections[i].count; k++)
            if (strcmp(config_sections[i].name, "drafter") == 0)
                compare_key(before, now, &config_sections[i].keys()[k],
                            "must be what the weights were trained with", &faults);
    return config_faults_end(&faults, err);
}
