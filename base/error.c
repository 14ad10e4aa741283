// Owns the text of errors. Does not print, does not exit.
#include "base/error.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

static void append(struct error *err, size_t at, const char *format, va_list args)
{
    vsnprintf(err->text + at, sizeof(err->text) - at, format, args);
}

int error_set(struct error *err, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    append(err, 0, format, args);
    va_end(args);
    return -1;
}

int error_add(struct error *err, const char *format, ...)
{
    size_t at = strlen(err->text);
    if (at > 0 && at + 1 < sizeof(err->text)) {
        err->text[at++] = '\n';
        err->text[at] = '\0';
    }
    va_list args;
    va_start(args, format);
    append(err, at, format, args);
    va_end(args);
    return -1;
}

int error_prefix(struct error *err, const char *format, ...)
{
    struct error copy = *err;
    va_list args;
    va_start(args, format);
    append(err, 0, format, args);
    va_end(args);
    size_t at = strlen(err->text);
    snprintf(err->text + at, sizeof(err->text) - at, ": %s", copy.text);
    return -1;
}

enum { NEAREST_MAX = 64 };

static size_t edit_distance(const char *a, const char *b)
{
    size_t la = strlen(a), lb = strlen(b);
    if (la >= NEAREST_MAX || lb >= NEAREST_MAX)
        return NEAREST_MAX;
    size_t row[NEAREST_MAX + 1];
    for (size_t j = 0; j <= lb; j++)
        row[j] = j;
    for (size_t i = 1; i <= la; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= lb; j++) {
            size_t above = row[j];
            size_t best = diagonal + (a[i - 1] != b[j - 1]);
            if (above + 1 < best)
                best = above + 1;
            if (row[j - 1] + 1 < best)
                best = row[j - 1] + 1;
            row[j] = best;
            diagonal = above;
        }
    }
    return row[lb];
}

const char *error_nearest(const char *word, const char *const *candidates, size_t n)
{
    const char *best = NULL;
    size_t best_distance = strlen(word) / 2 + 1;
    for (size_t i = 0; i < n; i++) {
        size_t d = edit_distance(word, candidates[i]);
        if (d < best_distance) {
            best_distance = d;
            best = candidates[i];
        }
    }
    return best;
}
