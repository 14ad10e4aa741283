// Owns host allocation and the arenas' tables.
#include "base/memory.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"

void *memory_alloc(size_t count, size_t size)
{
    void *pointer = calloc(count > 0 ? count : 1, size > 0 ? size : 1);
    if (pointer == NULL)
        die("out of host memory: %zu bytes wanted", count * size);
    return pointer;
}

void *memory_resize(void *pointer, size_t count, size_t size)
{
    if (size != 0 && count > SIZE_MAX / size)
        die("out of host memory: %zu x %zu bytes wanted", count, size);
    void *result = realloc(pointer, count * size > 0 ? count * size : 1);
    if (result == NULL)
        die("out of host memory: %zu bytes wanted", count * size);
    return result;
}

char *memory_strdup(const char *text)
{
    size_t n = strlen(text) + 1;
    char *copy = memory_alloc(n, 1);
    memcpy(copy, text, n);
    return copy;
}

char *memory_format(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    char *text = memory_alloc((size_t)n + 1, 1);
    va_start(args, format);
    vsnprintf(text, (size_t)n + 1, format, args);
    va_end(args);
    return text;
}

size_t dtype_size(enum dtype dtype)
{
    static const size_t sizes[] = {4, 2, 4, 1, 8, 8};
    return sizes[dtype];
}

const char *dtype_name(enum dtype dtype)
{
    static const char *const names[] = {"fp32", "bf16", "int32", "uint8", "int64", "fp64"};
    return names[dtype];
}

void arena_init(struct arena *arena)
{
    *arena = (struct arena){0};
}

void arena_release(struct arena *arena)
{
    free(arena->entries);
    *arena = (struct arena){0};
}

void arena_place(struct arena *arena, void *base, size_t size)
{
    if (size < arena->bytes)
        BUG("arena of %zu bytes placed on %zu", arena->bytes, size);
    BUG_UNLESS(arena->overlay == NULL);
    arena->base = base;
    arena->size = size;
    arena->capacity = arena->count; // what may be taken
    arena->count = 0;
    arena->bytes = 0;
}

void *arena_take(struct arena *arena, const char *group, const char *name, enum dtype dtype,
                 int64_t d0, int64_t d1, int64_t d2)
{
    size_t bytes = (size_t)d0 * (size_t)d1 * (size_t)d2 * dtype_size(dtype);
    bytes = (bytes + ARENA_ALIGNMENT - 1) / ARENA_ALIGNMENT * ARENA_ALIGNMENT;
    if (arena->base != NULL) {
        if (arena->count == arena->capacity)
            BUG("arena: %s asked for, which was not planned", name);
        struct arena_entry *planned = &arena->entries[arena->count];
        if (strcmp(planned->name, name) != 0 || planned->bytes != bytes ||
            planned->offset != arena->bytes)
            BUG("arena: %s asked for where %s was planned", name, planned->name);
        arena->count++;
        arena->bytes += bytes;
        return arena->base + planned->offset;
    }
    if (arena->count == arena->capacity) {
        arena->capacity = arena->capacity * 2 + 64;
        arena->entries = memory_resize(arena->entries, arena->capacity, sizeof(*arena->entries));
    }
    struct arena_entry *entry = &arena->entries[arena->count++];
    *entry = (struct arena_entry){.dtype = dtype,
                                  .shape = {d0, d1, d2},
                                  .bytes = bytes,
                                  .offset = arena->bytes,
                                  .part = arena->part};
    if (arena->overlay != NULL)
        snprintf(entry->overlay, sizeof(entry->overlay), "%s", arena->overlay);
    snprintf(entry->group, sizeof(entry->group), "%s", group);
    snprintf(entry->name, sizeof(entry->name), "%s", name);
    arena->bytes += bytes;
    return NULL;
}

void arena_union_begin(struct arena *arena, const char *name)
{
    BUG_UNLESS(arena->overlay == NULL && strlen(name) < sizeof(arena->entries->overlay));
    arena->overlay = name;
    arena->part = arena->largest = 0;
    arena->overlay_first = arena->count;
    arena->overlay_start = arena->overlay_end = arena->bytes;
}

// The running part's end, if it is the furthest so far.
static void end_part(struct arena *arena)
{
    BUG_UNLESS(arena->overlay != NULL);
    if (arena->bytes > arena->overlay_end) {
        arena->overlay_end = arena->bytes;
        arena->largest = arena->part;
    }
}

void arena_union_next(struct arena *arena)
{
    end_part(arena);
    arena->part++;
    arena->bytes = arena->overlay_start;
}

void arena_union_end(struct arena *arena)
{
    end_part(arena);
    for (size_t i = arena->overlay_first; i < arena->count; i++)
        arena->entries[i].shared = arena->entries[i].part != arena->largest;
    arena->bytes = arena->overlay_end;
    arena->overlay = NULL;
    arena->part = 0;
}

size_t arena_group_bytes(const struct arena *arena, const char *group)
{
    size_t sum = 0;
    for (size_t i = 0; i < arena->count; i++)
        if (!arena->entries[i].shared &&
            (group == NULL || strcmp(arena->entries[i].group, group) == 0))
            sum += arena->entries[i].bytes;
    return sum;
}
