// Packing: every document once, rows within bounds and full, the same again for the same seed and
// epoch, and an order that is a uniform permutation.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "base/rng.h"
#include "base/timer.h"
#include "data/packing.h"
#include "tests/support/rows.h"

// Lengths like those of conversations: mean about 335, a tail up to `longest`.
static void random_documents(struct documents *documents, size_t count, int32_t longest,
                             uint64_t seed)
{
    struct rng_key key = rng_key_make(seed, 0, 0, RNG_TEST);
    int32_t *lengths = memory_alloc(count, sizeof(*lengths));
    for (size_t i = 0; i < count; i++) {
        double length = 1.0 - 334.0 * log((double)rng_uniform(key, i));
        lengths[i] = length < longest ? (int32_t)length : longest;
    }
    test_documents_open(documents, lengths, count);
    free(lengths);
}

static void check_packing(const struct packing *packing, const struct documents *documents,
                          int64_t seq_len)
{
    uint8_t *seen = memory_alloc(documents->count, 1);
    assert_int_equal(packing->row_offsets[0], 0);
    assert_int_equal(packing->row_offsets[packing->rows], documents->count);
    for (int64_t r = 0; r < packing->rows; r++) {
        int64_t tokens = 0;
        assert_true(packing->row_offsets[r] < packing->row_offsets[r + 1]);
        for (int64_t i = packing->row_offsets[r]; i < packing->row_offsets[r + 1]; i++) {
            int32_t document = packing->document[i];
            assert_in_range(document, 0, documents->count - 1);
            assert_int_equal(seen[document]++, 0);
            tokens += documents->items[document].length;
        }
        assert_in_range(tokens, 1, seq_len);
    }
    assert_int_equal(packing->tokens, documents->tokens);
    free(seen);
}

static bool same_packing(const struct packing *a, const struct packing *b, size_t documents)
{
    return a->rows == b->rows &&
           memcmp(a->row_offsets, b->row_offsets, (size_t)(a->rows + 1) * sizeof(int64_t)) == 0 &&
           memcmp(a->document, b->document, documents * sizeof(int32_t)) == 0;
}

static void test_every_document_once(void **state)
{
    (void)state;
    for (uint64_t trial = 0; trial < 30; trial++) {
        struct documents documents;
        random_documents(&documents, trial * 37, 1000, trial);
        for (int shuffle = 0; shuffle < 2; shuffle++) {
            struct packing packing;
            packing_make(&packing, &documents, 1000, 1, trial, shuffle);
            check_packing(&packing, &documents, 1000);
            packing_release(&packing);
        }
        test_documents_close(&documents);
    }
}

static void test_no_documents(void **state)
{
    (void)state;
    struct documents documents = {.count = 0};
    struct packing packing;
    packing_make(&packing, &documents, 16, 1, 1, true);
    assert_int_equal(packing.rows, 0);
    assert_int_equal(packing.row_offsets[0], 0);
    packing_release(&packing);
}

static void test_depends_on_seed_and_epoch_only(void **state)
{
    (void)state;
    struct documents documents;
    random_documents(&documents, 500, 2000, 3);
    struct packing first, other;
    packing_make(&first, &documents, 2000, 1, 2, true);
    const struct {
        uint64_t seed, epoch;
        bool same;
    } cases[] = {{1, 2, true}, {1, 3, false}, {2, 2, false}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        packing_make(&other, &documents, 2000, cases[i].seed, cases[i].epoch, true);
        assert_int_equal(same_packing(&first, &other, documents.count), cases[i].same);
        packing_release(&other);
    }
    packing_release(&first);
    test_documents_close(&documents);
}

// Keys come from ids: the same documents listed in another order make the same rows.
static void test_order_follows_ids(void **state)
{
    (void)state;
    struct documents documents, reversed;
    random_documents(&documents, 300, 800, 4);
    random_documents(&reversed, 300, 800, 4);
    for (size_t i = 0; i < 300; i++)
        reversed.items[i] = documents.items[299 - i];
    struct packing a, b;
    packing_make(&a, &documents, 800, 9, 0, true);
    packing_make(&b, &reversed, 800, 9, 0, true);
    for (size_t i = 0; i < 300; i++)
        assert_int_equal(a.document[i], 299 - b.document[i]);
    assert_memory_equal(a.row_offsets, b.row_offsets, (size_t)(a.rows + 1) * sizeof(int64_t));
    packing_release(&a);
    packing_release(&b);
    test_documents_close(&documents);
    test_documents_close(&reversed);
}

// Rows that are dealt out know where they were among all of them.
static void test_kept_rows_have_their_places(void **state)
{
    (void)state;
    struct documents documents;
    random_documents(&documents, 400, 900, 8);
    struct packing all, kept;
    packing_make(&all, &documents, 900, 3, 1, true);
    int32_t *owner = memory_alloc((size_t)all.rows, sizeof(*owner));
    int64_t rows = 0;
    for (int64_t r = 0; r < all.rows; r++)
        owner[r] = (int32_t)(rng_mix(5, (uint64_t)r) % 3);
    for (int32_t rank = 0; rank < 3; rank++) {
        packing_make(&kept, &documents, 900, 3, 1, true);
        packing_keep(&kept, owner, rank);
        for (int64_t r = 0; r < kept.rows; r++) {
            int64_t begin = kept.row_offsets[r], count = kept.row_offsets[r + 1] - begin;
            assert_memory_equal(kept.document + begin, all.document + kept.row_places[r],
                                (size_t)count * sizeof(*kept.document));
        }
        rows += kept.rows;
        packing_release(&kept);
    }
    assert_int_equal(rows, all.rows);
    free(owner);
    packing_release(&all);
    test_documents_close(&documents);
}

// Best fit by hand, row length 10: 6 | 7 | 3 joins the 7 | 4 joins the 6 | 5 | 5 joins it.
static void test_best_fit(void **state)
{
    (void)state;
    const int32_t lengths[] = {6, 7, 3, 4, 5, 5}, order[] = {0, 3, 1, 2, 4, 5};
    const int64_t offsets[] = {0, 2, 4, 6};
    struct documents documents;
    test_documents_open(&documents, lengths, 6);
    struct packing packing;
    packing_make(&packing, &documents, 10, 0, 0, false);
    assert_int_equal(packing.rows, 3);
    assert_memory_equal(packing.document, order, sizeof(order));
    assert_memory_equal(packing.row_offsets, offsets, sizeof(offsets));
    packing_release(&packing);
    test_documents_close(&documents);
}

enum { PERMUTED = 10, PERMUTATIONS = 3000 };

// One document a row, so rows are the permutation: every document is equally often in every place.
static void test_order_is_uniform(void **state)
{
    (void)state;
    int32_t lengths[PERMUTED];
    double counts[PERMUTED][PERMUTED] = {{0.0}};
    for (int i = 0; i < PERMUTED; i++)
        lengths[i] = 8;
    struct documents documents;
    test_documents_open(&documents, lengths, PERMUTED);
    for (uint64_t epoch = 0; epoch < PERMUTATIONS; epoch++) {
        struct packing packing;
        packing_make(&packing, &documents, 8, 11, epoch, true);
        assert_int_equal(packing.rows, PERMUTED);
        for (int i = 0; i < PERMUTED; i++)
            counts[packing.document[i]][i] += 1.0;
        packing_release(&packing);
    }
    double expected = (double)PERMUTATIONS / PERMUTED, chi = 0.0;
    for (int i = 0; i < PERMUTED * PERMUTED; i++) {
        double off = counts[i / PERMUTED][i % PERMUTED] - expected;
        chi += off * off / expected;
    }
    // Nearly chi-squared with 81 degrees of freedom: one in a million lies beyond, on either side.
    assert_true(chi * (PERMUTED - 1) / PERMUTED > 35.0);
    assert_true(chi * (PERMUTED - 1) / PERMUTED < 156.0);
    test_documents_close(&documents);
}

static void test_rows_are_full(void **state)
{
    (void)state;
    struct documents documents;
    random_documents(&documents, 20000, 4042, 6);
    for (int shuffle = 0; shuffle < 2; shuffle++) {
        struct packing packing;
        packing_make(&packing, &documents, 8192, 1, 0, shuffle);
        double fill = (double)packing.tokens / (double)(packing.rows * 8192);
        print_message("fill of %lld rows: %.2f %%\n", (long long)packing.rows, 100.0 * fill);
        assert_true(fill > 0.99);
        packing_release(&packing);
    }
    test_documents_close(&documents);
}

static void test_a_million_documents(void **state)
{
    (void)state;
    struct documents documents;
    random_documents(&documents, 1000000, 4042, 7);
    struct packing packing;
    double start = timer_now();
    packing_make(&packing, &documents, 8192, 1, 0, true);
    print_message("1,000,000 documents packed in %.2f s\n", timer_now() - start);
    check_packing(&packing, &documents, 8192);
    packing_release(&packing);
    test_documents_close(&documents);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_document_once),
        cmocka_unit_test(test_no_documents),
        cmocka_unit_test(test_depends_on_seed_and_epoch_only),
        cmocka_unit_test(test_order_follows_ids),
        cmocka_unit_test(test_kept_rows_have_their_places),
        cmocka_unit_test(test_best_fit),
        cmocka_unit_test(test_order_is_uniform),
        cmocka_unit_test(test_rows_are_full),
        cmocka_unit_test(test_a_million_documents),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
