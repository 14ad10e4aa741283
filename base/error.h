// Errors that a user's input can cause (config, data, checkpoints): a function returns 0 or -1 and
// fills a struct error whose text is fit to print as it is. Broken invariants use BUG(), a failed
// environment die(); both are in base/log.h.
#ifndef BASE_ERROR_H
#define BASE_ERROR_H

#include <stdarg.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct error {
    char text[4096]; // one message a line; "" when nothing is wrong
};

// Replaces the text. Always returns -1, so that `return error_set(...)` reads well.
int error_set(struct error *err, const char *format, ...) __attribute__((format(printf, 2, 3)));
// Adds a line (parsers report every fault of a file, not the first). Always returns -1.
int error_add(struct error *err, const char *format, ...) __attribute__((format(printf, 2, 3)));
// Puts "prefix: " before the text, to say where a fault of a lower layer was met. Always returns -1.
int error_prefix(struct error *err, const char *format, ...) __attribute__((format(printf, 2, 3)));

// Closest word to `word` among n candidates, by edit distance; NULL when none is near enough to help.
const char *error_nearest(const char *word, const char *const *candidates, size_t n);

#ifdef __cplusplus
}
#endif
#endif
