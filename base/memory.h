// Host memory that must not fail, and planned memory: arenas.
//
// An arena is filled by one function that asks for every buffer by group and name. The function runs
// twice: first on a sizing arena (pointers are NULL, the table and the sum grow), then on an arena
// over real memory of that size. So the plan and the allocation can not disagree.
#ifndef BASE_MEMORY_H
#define BASE_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Zeroed memory, or die(). Free with free().
void *memory_alloc(size_t count, size_t size);
// Grows or shrinks like realloc, or die().
void *memory_resize(void *pointer, size_t count, size_t size);
char *memory_strdup(const char *text);
char *memory_format(const char *format, ...) __attribute__((format(printf, 1, 2)));

enum dtype { DTYPE_F32, DTYPE_BF16, DTYPE_I32, DTYPE_U8, DTYPE_I64, DTYPE_F64 };

size_t dtype_size(enum dtype dtype);
const char *dtype_name(enum dtype dtype);

// One planned buffer.
struct arena_entry {
    char group[24]; // "weights", "gradients", "optimizer", "activations", "loss", ...
    char name[64];
    enum dtype dtype;
    int64_t shape[3]; // unused dimensions are 1
    size_t bytes;     // padded to the alignment
    size_t offset;
};

struct arena {
    struct arena_entry *entries;
    size_t count, capacity;
    size_t bytes;        // sum so far
    unsigned char *base; // NULL: sizing
    size_t size;         // bytes at base
};

enum { ARENA_ALIGNMENT = 256 };

void arena_init(struct arena *arena);
void arena_release(struct arena *arena); // frees the table, not the memory at base
// Makes a sized arena carve memory at base (at least arena->bytes, which the caller owns): the table
// is kept and every arena_take that follows must repeat the sizing pass in the same order.
void arena_place(struct arena *arena, void *base, size_t size);
// Next buffer. NULL while sizing. BUG() when a placed arena is asked for something else than planned.
void *arena_take(struct arena *arena, const char *group, const char *name, enum dtype dtype,
                 int64_t d0, int64_t d1, int64_t d2);
// Sum of one group's bytes; NULL: of all.
size_t arena_group_bytes(const struct arena *arena, const char *group);

#ifdef __cplusplus
}
#endif
#endif
