// Numbers of bytes as people write and read them: "96GiB", "512 MiB", "1.5TB", "1000".
#ifndef BASE_BYTE_SIZE_H
#define BASE_BYTE_SIZE_H

#include <stddef.h>
#include <stdint.h>

// A number and one of B, KiB, MiB, GiB, TiB (powers of 1024), kB, MB, GB, TB (powers of 1000); none: B.
// Returns 0, or -1 when the text is something else or above 2^62.
int byte_size_parse(const char *text, uint64_t *bytes);

// The same for the memory of a machine: also -1 for 0, and for a number below 1 MiB without a unit, since
// "96" is meant as 96GiB.
int byte_size_parse_memory(const char *text, uint64_t *bytes);

enum { BYTE_SIZE_TEXT = 32 };
// With the unit of 1024 that leaves the fewest digits: "45.3 GiB". Returns text.
const char *byte_size_text(double bytes, char text[BYTE_SIZE_TEXT]);

#endif
