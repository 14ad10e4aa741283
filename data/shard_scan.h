// The values of one document, looked at in pieces, so that a document of any length is checked in
// bounded memory. shard_check_document (data/shard.h) is the same with everything at hand.
#ifndef DATA_SHARD_SCAN_H
#define DATA_SHARD_SCAN_H

#include "data/shard.h"

// Token ids outside the vocabulary and mask values other than 0 and 1, of the first `length` tokens of
// a document: the first of each, as lines added to err. 0 when clean.
int shard_check_tokens(const struct shard *shard, int64_t document, int64_t length,
                       const int32_t *ids, const uint8_t *mask, struct error *err);

// A value met: where first, and how many.
struct scan_place {
    int64_t count;
    int64_t row, plane, element;
};

struct scan_plane {
    bool zero, constant, same_rows; // still true of every row seen
};

struct shard_scan {
    const struct shard *shard;
    int64_t document, length, rows; // rows: seen so far
    bool check_crc, same_ids;
    uint32_t crc;      // of ids, mask and, unless float8, the planes
    uint32_t parts[3]; // float8: of codes, scales and last hidden states
    struct scan_place nan, inf, zero_row, scale;
    struct scan_plane *planes; // [P]
    bool *equal;               // [P, P] planes p < q are equal in every row seen
    int64_t equal_count;
    bf16 *first_row; // features of the first token
    struct error *err;
    int result;
};

// Starts with the ids and mask of the document's first `length` tokens (faults go to err). The CRC is
// looked at only when that is the whole document.
void shard_scan_open(struct shard_scan *scan, const struct shard *shard, int64_t document,
                     int64_t length, const int32_t *ids, const uint8_t *mask, bool check_crc,
                     struct error *err);
// The next rows, laid out as shard->features says.
void shard_scan_feed(struct shard_scan *scan, const bf16 *hidden, int64_t rows);
// Adds what was found to err. Returns 0 when clean, else -1.
int shard_scan_close(struct shard_scan *scan);

#endif
