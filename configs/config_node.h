// The text of a configuration as a tree, before any key is known: from a YAML file, or from the value
// of one --set.
#ifndef CONFIGS_CONFIG_NODE_H
#define CONFIGS_CONFIG_NODE_H

#include "configs/config_faults.h"

enum config_node_kind { CONFIG_NODE_SCALAR, CONFIG_NODE_LIST, CONFIG_NODE_MAP };

struct config_node {
    enum config_node_kind kind;
    int line; // in the file; CONFIG_LINE_SET for --set
    bool quoted;
    char *text;                // scalar
    struct config_node *items; // list: items; map: key, value, key, value, ...
    size_t count;
};

void config_node_release(struct config_node *node);

// The tree of a YAML text of `size` bytes. Syntax errors, anchors, aliases, tags and second documents
// are faults. Returns 0, or -1 with a fault added; an empty text gives an empty map.
int config_node_from_yaml(struct config_node *node, const struct config *config, const char *text,
                          size_t size, struct config_faults *faults);
// The tree of a --set value: a scalar, or for a list key "[a, b]" or "a, b". Quotes keep commas.
void config_node_from_set(struct config_node *node, const char *text, bool list);

#endif
