// Host memory that must not fail, and planned memory: arenas.
//
// An arena is filled by one function that asks for every buffer by group and name. The function runs
// twice: first on a sizing arena (pointers are NULL, the table and the sum grow), then on an arena
// over real memory of that size. So the plan and the allocation can not disagree.
//
// Buffers that are never in use together can lie on each other: in a union, which is made of parts, every
// part starts at the same place, and the union is as large as its largest part.
#ifndef BASE_MEMORY_H
#define BASE_MEMORY_H

#include <stdbool.h>
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
    char overlay[24]; // name of the union it is in; "": none
    int part;         // of the union, from 0
    bool shared;      // in a part that is not the largest: adds nothing to the sum
};

struct arena {
    struct arena_entry *entries;
    size_t count, capacity;
    size_t bytes;        // sum so far: in a union, end of the running part
    unsigned char *base; // NULL: sizing
    size_t size;         // bytes at base
    // the open union
    const char *overlay; // its name, NULL: none
    int part, largest;
    size_t overlay_first, overlay_start, overlay_end; // first entry; bytes
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
// Unions do not nest. begin opens the first part, next ends a part and opens another, end closes: the
// largest part counts, in every sum. Names are not copied and of less than 24 characters.
void arena_union_begin(struct arena *arena, const char *name);
void arena_union_next(struct arena *arena);
void arena_union_end(struct arena *arena);
// Sum of one group's bytes, without those that lie on larger parts of unions; NULL: of all groups.
size_t arena_group_bytes(const struct arena *arena, const char *group);

#ifdef __cplusplus
}
#endif
#endif
