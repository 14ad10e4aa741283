// Owns what counts as a bad value of a document, and the words for it. Reads nothing itself.
#include "data/shard_scan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "base/e4m3.h"
#include "base/memory.h"

enum { NAME_MAX_BYTES = 48 };

static const float SCALE_MAX = 0x1p118f; // 448 of it are still finite in bf16

int shard_check_tokens(const struct shard *shard, int64_t document, int64_t length,
                       const int32_t *ids, const uint8_t *mask, struct error *err)
{
    // One pass that the compiler turns into vectors; the faulty row is looked for only afterwards.
    int32_t vocab = (int32_t)shard->vocab_size;
    int outside = 0;
    unsigned masks = 0;
    for (int64_t i = 0; i < length; i++) {
        outside |= (ids[i] < 0) | (ids[i] >= vocab);
        masks |= mask[i];
    }
    int64_t row = 0;
    if (outside) {
        while (ids[row] >= 0 && ids[row] < vocab)
            row++;
        error_add(err, "%s: document %lld: row %lld: token id %d is outside 0 .. %d", shard->path,
                  (long long)document, (long long)row, (int)ids[row], (int)vocab - 1);
    }
    if (masks > 1) {
        for (row = 0; mask[row] <= 1;)
            row++;
        error_add(err, "%s: document %lld: row %lld: loss_mask is %d, not 0 or 1", shard->path,
                  (long long)document, (long long)row, (int)mask[row]);
    }
    return outside || masks > 1 ? -1 : 0;
}

void shard_scan_open(struct shard_scan *scan, const struct shard *shard, int64_t document,
                     int64_t length, const int32_t *ids, const uint8_t *mask, bool check_crc,
                     struct error *err)
{
    size_t planes = (size_t)shard->planes;
    *scan = (struct shard_scan){.shard = shard, .document = document, .length = length, .err = err};
    scan->result = shard_check_tokens(shard, document, length, ids, mask, err);
    int64_t whole = shard->doc_offsets[document + 1] - shard->doc_offsets[document];
    scan->check_crc = check_crc && shard->doc_crc32c != NULL && length == whole;
    if (scan->check_crc) {
        scan->crc = crc32c(0, ids, (size_t)length * sizeof(*ids));
        scan->crc = crc32c(scan->crc, mask, (size_t)length);
    }
    scan->same_ids = true;
    for (int64_t i = 1; i < length && scan->same_ids; i++)
        scan->same_ids = ids[i] == ids[0];
    scan->planes = memory_alloc(planes, sizeof(*scan->planes));
    for (size_t p = 0; p < planes; p++)
        scan->planes[p] = (struct scan_plane){.zero = true, .constant = true, .same_rows = true};
    scan->equal = memory_alloc(planes * planes, sizeof(*scan->equal));
    scan->first_row = memory_alloc((size_t)shard->features.stride, sizeof(bf16));
}

static void place_add(struct scan_place *place, int64_t row, int64_t plane, int64_t element)
{
    if (place->count++ == 0) {
        place->row = row;
        place->plane = plane;
        place->element = element;
    }
}

// Largest magnitude as bits without the sign: 0 for a row of zeros, 0x7f80 and above for inf and NaN.
static int16_t largest_bits(const bf16 *values, int64_t count)
{
    int16_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        int16_t bits = (int16_t)(values[i] & 0x7fff);
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

// Largest code without the sign: 0 for a row of zeros, 0x7f with a NaN.
static uint8_t largest_code(const uint8_t *codes, int64_t count)
{
    uint8_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        uint8_t code = codes[i] & E4M3_MAGNITUDE;
        largest = code > largest ? code : largest;
    }
    return largest;
}

// One row of a plane, of either type.
struct scan_values {
    const unsigned char *bytes;
    size_t element, size; // bytes of one, of all
    float scale;          // of codes
};

static struct scan_values values_of(const struct shard_scan *scan, const bf16 *token, int64_t plane)
{
    const struct feature_layout *f = &scan->shard->features;
    size_t width = (size_t)f->hidden_size;
    struct scan_values v = {.element = sizeof(bf16), .size = width * sizeof(bf16), .scale = 1.0f};
    if (!f->float8) {
        v.bytes = (const unsigned char *)(token + plane * f->hidden_size);
    } else if (plane == f->layers) {
        v.bytes = (const unsigned char *)(token + f->last);
    } else {
        v = (struct scan_values){(const unsigned char *)(token + f->codes) + (size_t)plane * width,
                                 1, width, 1.0f};
        memcpy(&v.scale, (const unsigned char *)token + (size_t)plane * sizeof(v.scale),
               sizeof(v.scale));
    }
    return v;
}

static bool all_equal(const struct scan_values *v)
{
    return memcmp(v->bytes, v->bytes + v->element, v->size - v->element) == 0;
}

static bool same_values(const struct scan_values *a, const struct scan_values *b)
{
    return a->size == b->size && memcmp(&a->scale, &b->scale, sizeof(a->scale)) == 0 &&
           memcmp(a->bytes, b->bytes, a->size) == 0;
}

// -> whether all values are 0.
static bool scan_bf16(struct shard_scan *scan, const bf16 *values, int64_t row, int64_t plane)
{
    int64_t width = scan->shard->hidden_size;
    int16_t largest = largest_bits(values, width);
    if (largest >= 0x7f80)
        for (int64_t i = 0; i < width; i++)
            if (bf16_is_nonfinite(values[i]))
                place_add((values[i] & 0x7f) != 0 ? &scan->nan : &scan->inf, row, plane, i);
    return largest == 0;
}

static bool scan_codes(struct shard_scan *scan, const struct scan_values *v, int64_t row,
                       int64_t plane)
{
    int64_t width = scan->shard->hidden_size;
    uint8_t largest = largest_code(v->bytes, width);
    if (largest == E4M3_NAN)
        for (int64_t i = 0; i < width; i++)
            if ((v->bytes[i] & E4M3_MAGNITUDE) == E4M3_NAN)
                place_add(&scan->nan, row, plane, i);
    if (!(v->scale > 0.0f && v->scale <= SCALE_MAX))
        place_add(&scan->scale, row, plane, 0);
    return largest == 0;
}

static void scan_vector(struct shard_scan *scan, const bf16 *token, int64_t row, int64_t plane)
{
    struct scan_plane *state = &scan->planes[plane];
    struct scan_values values = values_of(scan, token, plane);
    struct scan_values first = values_of(scan, scan->first_row, plane);
    bool zero = values.element == 1
                    ? scan_codes(scan, &values, row, plane)
                    : scan_bf16(scan, (const bf16 *)(const void *)values.bytes, row, plane);
    state->zero &= zero;
    if (zero)
        place_add(&scan->zero_row, row, plane, 0);
    // Each of these ends at the first difference, so it costs nothing on sound data.
    state->same_rows = state->same_rows && same_values(&values, &first);
    state->constant = state->constant && all_equal(&values) &&
                      memcmp(values.bytes, first.bytes, values.element) == 0 &&
                      memcmp(&values.scale, &first.scale, sizeof(first.scale)) == 0;
}

// token: features of one row.
static void scan_equal_planes(struct shard_scan *scan, const bf16 *token)
{
    int64_t planes = scan->shard->planes;
    scan->equal_count = 0;
    for (int64_t p = 0; p < planes; p++)
        for (int64_t q = p + 1; q < planes; q++) {
            struct scan_values a = values_of(scan, token, p), b = values_of(scan, token, q);
            bool *equal = &scan->equal[p * planes + q];
            *equal = (scan->rows == 0 || *equal) && same_values(&a, &b);
            scan->equal_count += *equal;
        }
}

static void scan_crc(struct shard_scan *scan, const bf16 *hidden, int64_t rows)
{
    const struct feature_layout *f = &scan->shard->features;
    if (!f->float8) {
        scan->crc = crc32c(scan->crc, hidden, (size_t)(rows * f->stride) * sizeof(*hidden));
        return;
    }
    for (int64_t r = 0; r < rows; r++) {
        const bf16 *token = hidden + r * f->stride;
        size_t layers = (size_t)f->layers, width = (size_t)f->hidden_size;
        scan->parts[0] = crc32c(scan->parts[0], token + f->codes, layers * width);
        scan->parts[1] = crc32c(scan->parts[1], token, layers * sizeof(float));
        if (f->last >= 0)
            scan->parts[2] = crc32c(scan->parts[2], token + f->last, width * sizeof(bf16));
    }
}

// The parts follow each other in what the CRC is of.
static uint32_t whole_crc(const struct shard_scan *scan)
{
    const struct feature_layout *f = &scan->shard->features;
    uint64_t rows = (uint64_t)scan->rows, layers = (uint64_t)f->layers;
    uint64_t width = (uint64_t)f->hidden_size;
    uint32_t crc = scan->crc;
    if (!f->float8)
        return crc;
    crc = crc32c_join(crc, scan->parts[0], rows * layers * width);
    crc = crc32c_join(crc, scan->parts[1], rows * layers * sizeof(float));
    return f->last < 0 ? crc : crc32c_join(crc, scan->parts[2], rows * width * sizeof(bf16));
}

void shard_scan_feed(struct shard_scan *scan, const bf16 *hidden, int64_t rows)
{
    int64_t planes = scan->shard->planes, stride = scan->shard->features.stride;
    if (scan->check_crc)
        scan_crc(scan, hidden, rows);
    if (scan->rows == 0 && rows > 0)
        memcpy(scan->first_row, hidden, (size_t)stride * sizeof(*hidden));
    for (int64_t r = 0; r < rows; r++, scan->rows++) {
        const bf16 *token = hidden + r * stride;
        for (int64_t p = 0; p < planes; p++)
            scan_vector(scan, token, scan->rows, p);
        if (scan->rows == 0 || scan->equal_count > 0)
            scan_equal_planes(scan, token);
    }
}

static const char *plane_name(const struct shard *shard, int64_t plane, char name[NAME_MAX_BYTES])
{
    if (plane < shard->layers)
        snprintf(name, NAME_MAX_BYTES, "plane %lld (layer %lld)", (long long)plane,
                 (long long)shard->layer_ids[plane]);
    else
        snprintf(name, NAME_MAX_BYTES, "plane %lld (last hidden state)", (long long)plane);
    return name;
}

static void tell_place(struct shard_scan *scan, const struct scan_place *place, const char *what)
{
    char name[NAME_MAX_BYTES];
    if (place->count == 0)
        return;
    scan->result = error_add(scan->err,
                             "%s: document %lld: row %lld of %s: %s at element %lld "
                             "(%lld in the document)",
                             scan->shard->path, (long long)scan->document, (long long)place->row,
                             plane_name(scan->shard, place->plane, name), what,
                             (long long)place->element, (long long)place->count);
}

static void tell_plane(struct shard_scan *scan, int64_t plane, const char *what)
{
    char name[NAME_MAX_BYTES];
    scan->result = error_add(scan->err, "%s: document %lld: %s: %s", scan->shard->path,
                             (long long)scan->document, plane_name(scan->shard, plane, name), what);
}

// First plane that is all zero, first that is constant otherwise, first whose rows are all the same
// otherwise. Rows of the same tokens throughout are the same by right: attention over equal values is
// that value. A row of zeros is told unless its whole plane is zero: no model gives one, an
// unwritten part of a file does.
static void tell_planes(struct shard_scan *scan)
{
    const struct shard *shard = scan->shard;
    bool zero = false, constant = false, same = false;
    for (int64_t p = 0; p < shard->planes; p++) {
        const struct scan_plane *state = &scan->planes[p];
        if (state->zero) {
            if (!zero)
                tell_plane(scan, p, "all zero");
            zero = true;
        } else if (state->constant && scan->length * shard->hidden_size > 1) {
            if (!constant)
                tell_plane(scan, p, "constant: all its values are the same");
            constant = true;
        } else if (state->same_rows && scan->length > 1 && !scan->same_ids) {
            if (!same)
                tell_plane(scan, p, "constant: all its rows are the same");
            same = true;
        }
    }
    if (scan->zero_row.count > 0 && !zero)
        tell_place(scan, &scan->zero_row, "all zero");
}

static void tell_equal_planes(struct shard_scan *scan)
{
    const struct shard *shard = scan->shard;
    int64_t planes = shard->planes;
    for (int64_t p = 0; p < planes && scan->equal_count > 0; p++)
        for (int64_t q = p + 1; q < planes; q++) {
            if (!scan->equal[p * planes + q] || scan->planes[p].constant)
                continue;
            char first[NAME_MAX_BYTES], second[NAME_MAX_BYTES];
            scan->result = error_add(scan->err, "%s: document %lld: %s and %s are bitwise equal",
                                     shard->path, (long long)scan->document,
                                     plane_name(shard, p, first), plane_name(shard, q, second));
            return;
        }
}

int shard_scan_close(struct shard_scan *scan)
{
    const struct shard *shard = scan->shard;
    if (scan->rows > 0) {
        tell_place(scan, &scan->nan, "NaN");
        tell_place(scan, &scan->inf, "inf");
        tell_place(scan, &scan->scale, "a scale that is not positive or makes values infinite");
        tell_planes(scan);
        tell_equal_planes(scan);
    }
    uint32_t crc = whole_crc(scan);
    if (scan->check_crc && crc != shard->doc_crc32c[scan->document])
        scan->result = error_add(scan->err,
                                 "%s: document %lld: its bytes have CRC-32C %08x, doc_crc32c says "
                                 "%08x: they changed after they were written",
                                 shard->path, (long long)scan->document, (unsigned)crc,
                                 (unsigned)shard->doc_crc32c[scan->document]);
    free(scan->planes);
    free(scan->equal);
    free(scan->first_row);
    return scan->result;
}

int shard_check_document(const struct shard *shard, int64_t document, int64_t length,
                         const int32_t *ids, const uint8_t *mask, const bf16 *hidden,
                         bool check_crc, struct error *err)
{
    struct error found = {""};
    struct shard_scan scan;
    shard_scan_open(&scan, shard, document, length, ids, mask, check_crc, &found);
    shard_scan_feed(&scan, hidden, length);
    if (shard_scan_close(&scan) == 0)
        return 0;
    *err = found;
    return -1;
}
