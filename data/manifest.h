// The manifest of a spooled data set: the documents (identity, tokens, masks) without features, and what
// the features will be. It is opened by documents_open_manifest.
#ifndef DATA_MANIFEST_H
#define DATA_MANIFEST_H

#include <stddef.h>

#include "base/error.h"

// Writes the manifest of all documents of these shards, in their order. Shards that disagree, and
// documents with the same id, are errors: -1. 1: the file could not be written.
int manifest_write(const char *path, const char *const *shards, size_t count, struct error *err);

#endif
