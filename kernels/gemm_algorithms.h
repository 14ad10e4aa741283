// Which algorithm a product is computed with: chosen once by timing, written down, obeyed by resumed
// runs. The rows of A as stored (m of the product, or k where A is transposed) are tokens, blocks or
// slots and differ from call to call; all else is given by the model. So there is one algorithm for
// all counts of rows in a bucket.
//
// At most GEMM_ALGORITHMS are chosen, of at most GEMM_RECORDED products (gemm_cuda.cuh), the largest
// buckets first. What goes beyond takes the library's first proposal, as all that was never timed;
// gemm_tune_cuda logs how much that is.
#ifndef KERNELS_GEMM_ALGORITHMS_H
#define KERNELS_GEMM_ALGORITHMS_H

#include "base/error.h"
#include "kernels/gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

// What decides about the algorithm, besides alignment.
struct gemm_product {
    int64_t m, n, k, lda, ldb, ldc; // with parts, ldc is the stride of their sums
    bool transpose_a, transpose_b;
    bool add; // beta is not 0
    enum dtype in_type, out_type;
    int64_t parts; // of k, at least 1
};

// The smallest of 128, 256, 384, 512, 768, 1024, 1536, 2048, ... that is not below `rows`.
int64_t gemm_bucket(int64_t rows);
// The next smaller one; 0 below the smallest.
int64_t gemm_bucket_below(int64_t bucket);

// Of a gemm whose strides are filled in and whose C are the sums of its parts, where it has parts.
struct gemm_product gemm_product_of(const struct gemm *gemm);
int64_t gemm_product_rows(const struct gemm_product *product);
// The same product of another count of rows.
struct gemm_product gemm_product_with_rows(const struct gemm_product *product, int64_t rows);
bool gemm_product_equal(const struct gemm_product *a, const struct gemm_product *b);

// "bf16 fp32 TN+ m 34816 n 5120 k 8192 lda 34816 ldb 5120 ldc 5120": types of A and B and of C, which
// of A and B are transposed, + where something is added; then " parts 8" where k has parts.
enum { GEMM_PRODUCT_TEXT = 192, GEMM_ALGORITHM_TEXT = 132, GEMM_ALGORITHMS = 512 };
void gemm_product_print(const struct gemm_product *product, char text[GEMM_PRODUCT_TEXT]);
// -1 when it is not exactly what gemm_product_print writes.
int gemm_product_parse(struct gemm_product *product, const char *text);

struct gemm_algorithm {
    char product[GEMM_PRODUCT_TEXT];     // its rows are the bucket
    char algorithm[GEMM_ALGORITHM_TEXT]; // the library's description in hexadecimal
};

struct gemm_algorithms {
    int64_t count;
    struct gemm_algorithm items[GEMM_ALGORITHMS];
};

// Bytes as hexadecimal digits with a final 0, and back; -1 when text is not exactly that.
void gemm_hex_print(const void *bytes, size_t size, char *text);
int gemm_hex_parse(void *bytes, size_t size, const char *text);

// Backend functions; see backend.h.
void gemm_record_cuda(struct stream *stream);
void gemm_tune_cuda(struct stream *stream, double seconds, struct gemm_algorithms *algorithms);
int gemm_obey_cuda(struct stream *stream, const struct gemm_algorithms *algorithms,
                   struct error *err);

#ifdef __cplusplus
}
#endif
#endif
