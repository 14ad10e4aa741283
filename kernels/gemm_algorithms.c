// Owns buckets of rows and the names of products and algorithms in files.
#include "kernels/gemm_algorithms.h"

#include <stdio.h>
#include <string.h>

enum { LEAST_BUCKET = 128, FINE_FROM = 2048, FINE_TO = 8192 };

// Above the first two: a power of two, one and a half times it, the next power of two; where most of the
// work of training is, in quarters, since a tile more or less is a larger part of a product there.
static int64_t bucket_above(int64_t bucket)
{
    int64_t power = LEAST_BUCKET;
    while (2 * power <= bucket)
        power *= 2;
    if (bucket == LEAST_BUCKET)
        return 2 * LEAST_BUCKET;
    if (bucket >= FINE_FROM && bucket < FINE_TO)
        return bucket + power / 4;
    return bucket + power / 2;
}

int64_t gemm_bucket(int64_t rows)
{
    int64_t bucket = LEAST_BUCKET;
    while (bucket < rows)
        bucket = bucket_above(bucket);
    return bucket;
}

int64_t gemm_bucket_below(int64_t bucket)
{
    int64_t below = 0, next = LEAST_BUCKET;
    while (next < bucket) {
        below = next;
        next = bucket_above(next);
    }
    return below;
}

struct gemm_product gemm_product_of(const struct gemm *gemm)
{
    struct gemm_product product = {.m = gemm->m,
                                   .n = gemm->n,
                                   .k = gemm->k,
                                   .lda = gemm->lda,
                                   .ldb = gemm->ldb,
                                   .ldc = gemm->ldc,
                                   .transpose_a = gemm->transpose_a,
                                   .transpose_b = gemm->transpose_b,
                                   .add = gemm->beta != 0.0f,
                                   .in_type = gemm->a_type,
                                   .out_type = gemm->c_type,
                                   .parts = gemm->parts};
    return product;
}

int64_t gemm_product_rows(const struct gemm_product *product)
{
    return product->transpose_a ? product->k : product->m;
}

struct gemm_product gemm_product_with_rows(const struct gemm_product *product, int64_t rows)
{
    struct gemm_product other = *product;
    *(product->transpose_a ? &other.k : &other.m) = rows;
    return other;
}

bool gemm_product_equal(const struct gemm_product *a, const struct gemm_product *b)
{
    return a->m == b->m && a->n == b->n && a->k == b->k && a->lda == b->lda && a->ldb == b->ldb &&
           a->ldc == b->ldc && a->transpose_a == b->transpose_a &&
           a->transpose_b == b->transpose_b && a->add == b->add && a->in_type == b->in_type &&
           a->out_type == b->out_type && a->parts == b->parts;
}

void gemm_product_print(const struct gemm_product *p, char text[GEMM_PRODUCT_TEXT])
{
    int length = snprintf(
        text, GEMM_PRODUCT_TEXT, "%s %s %c%c%c m %lld n %lld k %lld lda %lld ldb %lld ldc %lld",
        dtype_name(p->in_type), dtype_name(p->out_type), p->transpose_a ? 'T' : 'N',
        p->transpose_b ? 'T' : 'N', p->add ? '+' : '=', (long long)p->m, (long long)p->n,
        (long long)p->k, (long long)p->lda, (long long)p->ldb, (long long)p->ldc);
    if (p->parts > 1)
        snprintf(text + length, (size_t)(GEMM_PRODUCT_TEXT - length), " parts %lld",
                 (long long)p->parts);
}

static enum dtype type_named(const char *name)
{
    return strcmp(name, dtype_name(DTYPE_BF16)) == 0 ? DTYPE_BF16 : DTYPE_F32;
}

int gemm_product_parse(struct gemm_product *product, const char *text)
{
    char in[8], out[8], a, b, add, again[GEMM_PRODUCT_TEXT];
    long long m, n, k, lda, ldb, ldc, parts = 1;
    if (sscanf(text, "%7s %7s %c%c%c m %lld n %lld k %lld lda %lld ldb %lld ldc %lld parts %lld",
               in, out, &a, &b, &add, &m, &n, &k, &lda, &ldb, &ldc, &parts) < 11)
        return -1;
    *product = (struct gemm_product){.m = m,
                                     .n = n,
                                     .k = k,
                                     .lda = lda,
                                     .ldb = ldb,
                                     .ldc = ldc,
                                     .transpose_a = a == 'T',
                                     .transpose_b = b == 'T',
                                     .add = add == '+',
                                     .in_type = type_named(in),
                                     .out_type = type_named(out),
                                     .parts = parts};
    gemm_product_print(product, again);
    bool positive = m > 0 && n > 0 && k > 0 && lda > 0 && ldb > 0 && ldc > 0;
    bool divides = parts == 1 || (parts > 1 && k % parts == 0 && a == 'N' && add == '=');
    return positive && divides && strcmp(text, again) == 0 ? 0 : -1;
}

void gemm_hex_print(const void *bytes, size_t size, char *text)
{
    const unsigned char *byte = bytes;
    for (size_t i = 0; i < size; i++)
        snprintf(text + 2 * i, 3, "%02x", byte[i]);
}

static int digit(char c)
{
    static const char digits[] = "0123456789abcdef";
    const char *at = c != '\0' ? strchr(digits, c) : NULL;
    return at != NULL ? (int)(at - digits) : -1;
}

int gemm_hex_parse(void *bytes, size_t size, const char *text)
{
    unsigned char *byte = bytes;
    if (strlen(text) != 2 * size)
        return -1;
    for (size_t i = 0; i < size; i++) {
        int high = digit(text[2 * i]), low = digit(text[2 * i + 1]);
        if (high < 0 || low < 0)
            return -1;
        byte[i] = (unsigned char)(high << 4 | low);
    }
    return 0;
}
