// Owns what a type of key does: its default, how it is read from the tree and compared.
// Does not know single keys, files or rules between keys.
#include "configs/config_value.h"

#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/memory.h"
#include "configs/config_number.h"
#include "configs/config_path.h"
#include "configs/config_print.h"

const char *config_choice_at(const struct config_key *key, int value)
{
    const char *text = key->choices;
    for (int i = 0; *text != '\0'; i++, text += strlen(text) + 1)
        if (i == value)
            return text;
    return NULL;
}

// Number of a choice, or -1.
static int choice_index(const struct config_key *key, const char *name)
{
    const char *text;
    for (int i = 0; (text = config_choice_at(key, i)) != NULL; i++)
        if (strcmp(text, name) == 0)
            return i;
    return -1;
}

static void texts_release(struct config_texts *texts)
{
    for (size_t i = 0; i < texts->count; i++)
        free(texts->items[i]);
    free(texts->items);
}

void config_value_release(struct config *config, const struct config_key *key)
{
    void *value = config_value(config, key);
    switch (key->type) {
    case CONFIG_TYPE_TEXT:
    case CONFIG_TYPE_PATH:
        free(*(char **)value);
        *(char **)value = NULL;
        break;
    case CONFIG_TYPE_TEXTS:
    case CONFIG_TYPE_PATHS:
        texts_release(value);
        *(struct config_texts *)value = (struct config_texts){0};
        break;
    case CONFIG_TYPE_INTS:
        free(((struct config_ints *)value)->items);
        *(struct config_ints *)value = (struct config_ints){0};
        break;
    case CONFIG_TYPE_REALS:
        free(((struct config_reals *)value)->items);
        *(struct config_reals *)value = (struct config_reals){0};
        break;
    case CONFIG_TYPE_INT:
    case CONFIG_TYPE_REAL:
    case CONFIG_TYPE_FLAG:
    case CONFIG_TYPE_CHOICE:
        break;
    }
}

// "0.9,0.999" of the table.
static void default_reals(struct config_reals *reals, const char *text)
{
    while (text && *text != '\0') {
        char *end;
        double item = strtod(text, &end);
        BUG_UNLESS(end > text);
        reals->items = memory_resize(reals->items, reals->count + 1, sizeof(double));
        reals->items[reals->count++] = item;
        text = end + (*end == ',');
    }
}

void config_value_default(struct config *config, const struct config_key *key)
{
    void *value = config_value(config, key);
    switch (key->type) {
    case CONFIG_TYPE_TEXT:
    case CONFIG_TYPE_PATH:
        *(char **)value = key->default_text ? memory_strdup(key->default_text) : NULL;
        break;
    case CONFIG_TYPE_INT:
        *(int64_t *)value = key->default_int;
        break;
    case CONFIG_TYPE_REAL:
        *(double *)value = key->default_real;
        break;
    case CONFIG_TYPE_FLAG:
        *(bool *)value = key->default_int != 0;
        break;
    case CONFIG_TYPE_CHOICE:
        *(int *)value = choice_index(key, key->default_text);
        BUG_UNLESS(*(int *)value >= 0);
        break;
    case CONFIG_TYPE_REALS:
        default_reals(value, key->default_text);
        break;
    case CONFIG_TYPE_TEXTS:
    case CONFIG_TYPE_PATHS:
    case CONFIG_TYPE_INTS:
        break;
    }
}

static bool is_list(enum config_type type)
{
    return type == CONFIG_TYPE_TEXTS || type == CONFIG_TYPE_PATHS || type == CONFIG_TYPE_INTS ||
           type == CONFIG_TYPE_REALS;
}

static bool is_empty(const struct config_node *node)
{
    static const char *const nulls[] = {"", "~", "null", "Null", "NULL"};
    if (node->quoted)
        return node->text[0] == '\0';
    for (size_t i = 0; i < sizeof(nulls) / sizeof(nulls[0]); i++)
        if (strcmp(node->text, nulls[i]) == 0)
            return true;
    return false;
}

// The place of a fault, passed down together.
struct reading {
    struct config *config;
    const struct config_key *key;
    struct config_faults *faults;
};

#define READING_FAULT(reading, node, ...)                                                          \
    config_fault((reading)->faults, (reading)->config, (node)->line, (reading)->key->section,      \
                 (reading)->key->name, __VA_ARGS__)

// "expected ..., got ...".
static int fault_kind(const struct reading *r, const struct config_node *node, const char *expected)
{
    static const char *const kinds[] = {"", "a list", "a map"};
    if (node->kind == CONFIG_NODE_SCALAR)
        READING_FAULT(r, node, "expected %s, got %s%s%s", expected,
                      node->quoted ? "the text \"" : "", node->text,
                      node->quoted ? "\"; leave out the quotes" : "");
    else
        READING_FAULT(r, node, "expected %s, got %s", expected, kinds[node->kind]);
    return -1;
}

static int fault_range(const struct reading *r, const struct config_node *node)
{
    char *range = NULL;
    size_t size;
    FILE *out = open_memstream(&range, &size);
    if (!out)
        die("out of memory");
    config_range_print(out, r->key);
    fclose(out);
    READING_FAULT(r, node, "%s is out of range; allowed: %s", node->text, range);
    free(range);
    return -1;
}

// A scalar with something in it; `plain`: without quotes. Otherwise a fault and -1.
static int check_scalar(const struct reading *r, const struct config_node *node,
                        const char *expected, bool plain)
{
    if (node->kind != CONFIG_NODE_SCALAR)
        return fault_kind(r, node, expected);
    if (is_empty(node)) {
        READING_FAULT(r, node, "has no value; expected %s, or leave the key out", expected);
        return -1;
    }
    return plain && node->quoted ? fault_kind(r, node, expected) : 0;
}

static int read_int(const struct reading *r, const struct config_node *node, int64_t *value)
{
    static const char expected[] = "an integer";
    if (check_scalar(r, node, expected, true) != 0)
        return -1;
    int64_t parsed = 0;
    enum config_number state = config_parse_int(node->text, &parsed);
    if (state == CONFIG_NUMBER_NOT)
        return fault_kind(r, node, expected);
    if (state == CONFIG_NUMBER_BIG || parsed < r->key->min_int || parsed > r->key->max_int)
        return fault_range(r, node);
    *value = parsed;
    return 0;
}

static int read_real(const struct reading *r, const struct config_node *node, double *value)
{
    static const char expected[] = "a number";
    if (check_scalar(r, node, expected, true) != 0)
        return -1;
    double parsed = 0.0;
    enum config_number state = config_parse_real(node->text, &parsed);
    if (state == CONFIG_NUMBER_NOT)
        return fault_kind(r, node, expected);
    if (state == CONFIG_NUMBER_BIG || !(parsed >= r->key->min_real && parsed <= r->key->max_real))
        return fault_range(r, node);
    *value = parsed;
    return 0;
}

static int read_flag(const struct reading *r, const struct config_node *node, bool *value)
{
    static const char expected[] = "true or false";
    if (check_scalar(r, node, expected, true) != 0)
        return -1;
    *value = strcmp(node->text, "true") == 0;
    return *value || strcmp(node->text, "false") == 0 ? 0 : fault_kind(r, node, expected);
}

// Words for a choice that spelling does not lead to.
static const char *choice_meant(const struct config_key *key, const char *text)
{
    bool is_gpu = strcmp(text, "gpu") == 0 || strcmp(text, "GPU") == 0;
    return is_gpu && choice_index(key, "cuda") >= 0 ? "cuda" : NULL;
}

static void fault_choice(const struct reading *r, const struct config_node *node)
{
    char *list = NULL;
    size_t size, n = 0;
    const char *names[16];
    FILE *out = open_memstream(&list, &size);
    if (!out)
        die("out of memory");
    config_choices_print(out, r->key, ", ");
    fclose(out);
    while (n < 16 && (names[n] = config_choice_at(r->key, (int)n)) != NULL)
        n++;
    const char *near = choice_meant(r->key, node->text);
    if (near == NULL)
        near = error_nearest(node->text, names, n);
    READING_FAULT(r, node, "%s is not a choice; allowed: %s%s%s%s", node->text, list,
                  near ? "; did you mean " : "", near ? near : "", near ? "?" : "");
    free(list);
}

static int read_choice(const struct reading *r, const struct config_node *node, int *value)
{
    if (check_scalar(r, node, "one word", false) != 0)
        return -1;
    int index = choice_index(r->key, node->text);
    if (index < 0) {
        fault_choice(r, node);
        return -1;
    }
    *value = index;
    return 0;
}

// A copy the caller owns, absolute where the key holds paths; NULL after a fault.
static char *read_text(const struct reading *r, const struct config_node *node)
{
    bool path = r->key->type == CONFIG_TYPE_PATH || r->key->type == CONFIG_TYPE_PATHS;
    if (check_scalar(r, node, path ? "a path" : "text", false) != 0)
        return NULL;
    return path ? config_path_resolve(r->config->folder, node->text) : memory_strdup(node->text);
}

static int read_list_item(const struct reading *r, const struct config_node *item, void *list,
                          size_t i)
{
    switch (r->key->type) {
    case CONFIG_TYPE_INTS:
        return read_int(r, item, &((struct config_ints *)list)->items[i]);
    case CONFIG_TYPE_REALS:
        return read_real(r, item, &((struct config_reals *)list)->items[i]);
    default:
        ((struct config_texts *)list)->items[i] = read_text(r, item);
        return ((struct config_texts *)list)->items[i] ? 0 : -1;
    }
}

// Every bad item is a fault; the list is taken only when all are good.
static void read_list(const struct reading *r, const struct config_node *node)
{
    if (node->kind != CONFIG_NODE_LIST) {
        fault_kind(r, node, "a list such as [a, b]");
        return;
    }
    // The three list structs are a pointer and a count, but each is touched by its own type only.
    struct config_texts texts = {0};
    struct config_ints ints = {0};
    struct config_reals reals = {0};
    void *list = &texts, *value = config_value(r->config, r->key);
    if (r->key->type == CONFIG_TYPE_INTS) {
        ints = (struct config_ints){memory_alloc(node->count + 1, sizeof(int64_t)), node->count};
        list = &ints;
    } else if (r->key->type == CONFIG_TYPE_REALS) {
        reals = (struct config_reals){memory_alloc(node->count + 1, sizeof(double)), node->count};
        list = &reals;
    } else {
        texts = (struct config_texts){memory_alloc(node->count + 1, sizeof(char *)), node->count};
    }
    int status = 0;
    for (size_t i = 0; i < node->count; i++)
        if (read_list_item(r, &node->items[i], list, i) != 0)
            status = -1;
    if (status != 0) {
        texts_release(&texts);
        free(ints.items);
        free(reals.items);
        return;
    }
    config_value_release(r->config, r->key);
    if (list == &ints)
        *(struct config_ints *)value = ints;
    else if (list == &reals)
        *(struct config_reals *)value = reals;
    else
        *(struct config_texts *)value = texts;
}

void config_value_read(struct config *config, const struct config_key *key,
                       const struct config_node *node, struct config_faults *faults)
{
    struct reading r = {config, key, faults};
    void *value = config_value(config, key);
    if (is_list(key->type)) {
        read_list(&r, node);
        return;
    }
    switch (key->type) {
    case CONFIG_TYPE_INT:
        read_int(&r, node, value);
        break;
    case CONFIG_TYPE_REAL:
        read_real(&r, node, value);
        break;
    case CONFIG_TYPE_FLAG:
        read_flag(&r, node, value);
        break;
    case CONFIG_TYPE_CHOICE:
        read_choice(&r, node, value);
        break;
    default: {
        char *text = read_text(&r, node);
        if (text) {
            free(*(char **)value);
            *(char **)value = text;
        }
    }
    }
}

static bool texts_equal(const struct config_texts *a, const struct config_texts *b)
{
    bool equal = a->count == b->count;
    for (size_t i = 0; equal && i < a->count; i++)
        equal = strcmp(a->items[i], b->items[i]) == 0;
    return equal;
}

static bool ints_equal(const struct config_ints *a, const struct config_ints *b)
{
    bool equal = a->count == b->count;
    for (size_t i = 0; equal && i < a->count; i++)
        equal = a->items[i] == b->items[i];
    return equal;
}

// NAN, "not given", equals itself here.
static bool real_equal(double a, double b)
{
    return a == b || (isnan(a) && isnan(b));
}

static bool reals_equal(const struct config_reals *a, const struct config_reals *b)
{
    bool equal = a->count == b->count;
    for (size_t i = 0; equal && i < a->count; i++)
        equal = real_equal(a->items[i], b->items[i]);
    return equal;
}

bool config_value_equal(const struct config *a, const struct config *b,
                        const struct config_key *key)
{
    const void *va = config_value_const(a, key), *vb = config_value_const(b, key);
    switch (key->type) {
    case CONFIG_TYPE_INT:
        return *(const int64_t *)va == *(const int64_t *)vb;
    case CONFIG_TYPE_REAL:
        return real_equal(*(const double *)va, *(const double *)vb);
    case CONFIG_TYPE_FLAG:
        return *(const bool *)va == *(const bool *)vb;
    case CONFIG_TYPE_CHOICE:
        return *(const int *)va == *(const int *)vb;
    case CONFIG_TYPE_TEXTS:
    case CONFIG_TYPE_PATHS:
        return texts_equal(va, vb);
    case CONFIG_TYPE_INTS:
        return ints_equal(va, vb);
    case CONFIG_TYPE_REALS:
        return reals_equal(va, vb);
    case CONFIG_TYPE_TEXT:
    case CONFIG_TYPE_PATH:
        break;
    }
    const char *ta = *(char *const *)va, *tb = *(char *const *)vb;
    return ta && tb ? strcmp(ta, tb) == 0 : ta == tb;
}
