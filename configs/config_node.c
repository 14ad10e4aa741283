// Owns the step from text to a tree: libyaml events with their lines, and the short form of --set.
// Knows no key.
#include "configs/config_node.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#include "base/memory.h"
#include "configs/config_syntax.h"

enum { MAX_DEPTH = 8 }; // a config needs 3: file, section, list

void config_node_release(struct config_node *node)
{
    for (size_t i = 0; i < node->count; i++)
        config_node_release(&node->items[i]);
    free(node->items);
    free(node->text);
    memset(node, 0, sizeof(*node));
}

static struct config_node *add_item(struct config_node *node)
{
    node->items = memory_resize(node->items, node->count + 1, sizeof(*node->items));
    struct config_node *item = &node->items[node->count++];
    memset(item, 0, sizeof(*item));
    return item;
}

// What reading one text needs at every level.
struct reader {
    yaml_parser_t parser;
    yaml_event_t event; // the last one; a zeroed event has nothing to free
    const struct config *config;
    const char *text;
    struct config_faults *faults;
};

#define READER_FAULT(r, line, ...)                                                                 \
    config_fault((r)->faults, (r)->config, line, NULL, NULL, __VA_ARGS__)

static int event_line(const struct reader *r)
{
    return (int)r->event.start_mark.line + 1;
}

static int next_event(struct reader *r)
{
    yaml_event_delete(&r->event);
    memset(&r->event, 0, sizeof(r->event));
    return yaml_parser_parse(&r->parser, &r->event)
               ? 0
               : config_syntax_fault(&r->parser, r->text, r->config, r->faults);
}

// Anchors, aliases and tags have no use in a config and hide what is set where.
static int refuse_extras(const struct reader *r)
{
    const yaml_event_t *e = &r->event;
    const yaml_char_t *anchor = NULL, *tag = NULL;
    if (e->type == YAML_ALIAS_EVENT) {
        READER_FAULT(r, event_line(r),
                     "alias *%s: anchors and aliases are not accepted; write the value out",
                     (const char *)e->data.alias.anchor);
        return -1;
    }
    if (e->type == YAML_SCALAR_EVENT) {
        anchor = e->data.scalar.anchor;
        tag = e->data.scalar.tag;
    } else if (e->type == YAML_SEQUENCE_START_EVENT) {
        anchor = e->data.sequence_start.anchor;
        tag = e->data.sequence_start.tag;
    } else if (e->type == YAML_MAPPING_START_EVENT) {
        anchor = e->data.mapping_start.anchor;
        tag = e->data.mapping_start.tag;
    }
    if (anchor)
        READER_FAULT(r, event_line(r),
                     "anchor &%s: anchors and aliases are not accepted; write the value out",
                     (const char *)anchor);
    if (tag)
        READER_FAULT(r, event_line(r), "tag %s: tags are not accepted", (const char *)tag);
    return anchor || tag ? -1 : 0;
}

// Builds the node that starts at the current event and reads up to its end.
static int build(struct reader *r, struct config_node *node, int depth)
{
    node->line = event_line(r);
    if (refuse_extras(r) != 0)
        return -1;
    if (r->event.type == YAML_SCALAR_EVENT) {
        node->kind = CONFIG_NODE_SCALAR;
        node->quoted = r->event.data.scalar.style != YAML_PLAIN_SCALAR_STYLE;
        node->text = memory_strdup((const char *)r->event.data.scalar.value);
        if (strlen(node->text) == r->event.data.scalar.length)
            return 0;
        READER_FAULT(r, node->line, "a value with a NUL character in it");
        return -1;
    }
    bool list = r->event.type == YAML_SEQUENCE_START_EVENT;
    node->kind = list ? CONFIG_NODE_LIST : CONFIG_NODE_MAP;
    if (depth == MAX_DEPTH) {
        READER_FAULT(r, node->line, "nested more than %d levels deep", MAX_DEPTH);
        return -1;
    }
    for (;;) {
        if (next_event(r) != 0)
            return -1;
        if (r->event.type == (list ? YAML_SEQUENCE_END_EVENT : YAML_MAPPING_END_EVENT))
            return 0;
        if (build(r, add_item(node), depth + 1) != 0)
            return -1;
    }
}

// Stream and document events around the one tree.
static int build_document(struct reader *r, struct config_node *node)
{
    if (next_event(r) != 0 || next_event(r) != 0) // stream start; then document start or end
        return -1;
    if (r->event.type == YAML_STREAM_END_EVENT) {
        node->kind = CONFIG_NODE_MAP;
        return 0;
    }
    if (next_event(r) != 0 || build(r, node, 0) != 0)
        return -1;
    if (next_event(r) != 0 || next_event(r) != 0) // document end; then stream end
        return -1;
    if (r->event.type == YAML_STREAM_END_EVENT)
        return 0;
    READER_FAULT(r, event_line(r), "a second YAML document starts here; a config is one");
    return -1;
}

int config_node_from_yaml(struct config_node *node, const struct config *config, const char *text,
                          size_t size, struct config_faults *faults)
{
    struct reader r = {.config = config, .text = text, .faults = faults};
    if (!yaml_parser_initialize(&r.parser)) {
        READER_FAULT(&r, 0, "the YAML parser has no memory");
        return -1;
    }
    yaml_parser_set_input_string(&r.parser, (const unsigned char *)text, size);
    memset(node, 0, sizeof(*node));
    int status = build_document(&r, node);
    yaml_event_delete(&r.event);
    yaml_parser_delete(&r.parser);
    return status;
}

// Takes text[0..n) without blanks around it and without a pair of quotes.
static void set_scalar(struct config_node *node, const char *text, size_t n)
{
    while (n > 0 && isspace((unsigned char)text[0]))
        text++, n--;
    while (n > 0 && isspace((unsigned char)text[n - 1]))
        n--;
    node->kind = CONFIG_NODE_SCALAR;
    node->line = CONFIG_LINE_SET;
    node->quoted = n >= 2 && (text[0] == '"' || text[0] == '\'') && text[n - 1] == text[0];
    node->text =
        memory_format("%.*s", (int)(node->quoted ? n - 2 : n), node->quoted ? text + 1 : text);
}

// Length up to the next comma that is not inside quotes.
static size_t item_length(const char *text, size_t n)
{
    bool quoted = false;
    char quote = '\0';
    for (size_t i = 0; i < n; i++) {
        if (quoted) {
            quoted = text[i] != quote;
        } else if (text[i] == '"' || text[i] == '\'') {
            quoted = true;
            quote = text[i];
        } else if (text[i] == ',') {
            return i;
        }
    }
    return n;
}

void config_node_from_set(struct config_node *node, const char *text, bool list)
{
    struct config_node whole = {0};
    set_scalar(&whole, text, strlen(text));
    memset(node, 0, sizeof(*node));
    if (!list) {
        *node = whole;
        return;
    }
    node->kind = CONFIG_NODE_LIST;
    node->line = CONFIG_LINE_SET;
    const char *at = whole.quoted ? text : whole.text;
    size_t n = strlen(at);
    if (n >= 2 && at[0] == '[' && at[n - 1] == ']') {
        at++;
        n -= 2;
    }
    bool blank = strspn(at, " \t") >= n;
    while (!blank) {
        size_t length = item_length(at, n);
        set_scalar(add_item(node), at, length);
        if (length == n)
            break;
        at += length + 1;
        n -= length + 1;
    }
    config_node_release(&whole);
}
