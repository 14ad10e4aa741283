// Damages or rewrites a finished shard through libhdf5, for tests of what a reader must accept or
// refuse. A failing call ends the test.
#ifndef TESTS_SUPPORT_SHARD_EDIT_H
#define TESTS_SUPPORT_SHARD_EDIT_H

#include <hdf5.h>
#include <stdbool.h>
#include <stdint.h>

enum edit_layout { EDIT_CONTIGUOUS, EDIT_CHUNKED, EDIT_DEFLATED, EDIT_COMPACT };

// Another storage of the same values. Zeros keep what is there.
struct edit_form {
    hid_t type; // in the file
    enum edit_layout layout;
    hsize_t chunk[3];
    hsize_t rows; // first dimension: cut, or filled with zeros
};

void edit_remove_attribute(const char *path, const char *name);
void edit_text_attribute(const char *path, const char *name, const char *text, bool variable);
// count 0: a scalar.
void edit_integer_attribute(const char *path, const char *name, hid_t type, const int64_t *values,
                            int64_t count);
void edit_remove_dataset(const char *path, const char *name);
void edit_rewrite_dataset(const char *path, const char *name, const struct edit_form *form);
// Replaces a dataset; memory: type of the values given.
void edit_replace_dataset(const char *path, const char *name, int dims, const hsize_t *shape,
                          hid_t memory, const void *values);
// Makes `name` a link to the same dataset in another file.
void edit_external_link(const char *path, const char *name, const char *other);
// Sets one byte of the file, or cuts the file.
void edit_byte(const char *path, int64_t offset, unsigned char value);
void edit_cut(const char *path, int64_t size);

#endif
