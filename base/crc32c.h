// CRC-32C (Castagnoli, RFC 3720 appendix B.4): checksum of documents in shards and of event files.
#ifndef BASE_CRC32C_H
#define BASE_CRC32C_H

#include <stddef.h>
#include <stdint.h>

// Continues a checksum: crc32c(crc32c(0, a, n), b, m) == checksum of a followed by b.
uint32_t crc32c(uint32_t crc, const void *bytes, size_t n);
// Checksum of a followed by b, from theirs and b's length: crc32c(crc32c(0, a, n), b, m).
uint32_t crc32c_join(uint32_t a, uint32_t b, uint64_t b_bytes);

#endif
