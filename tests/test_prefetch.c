// Rows read ahead: order and content whatever the threads do, bad and unreadable documents, stalls,
// shutdown at any moment, flat memory; and the same over real shards.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <malloc.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/memory.h"
#include "base/rng.h"
#include "base/timer.h"
#include "data/prefetch.h"
#include "tests/support/rows.h"
#include "tests/support/shard_fixture.h"

// ---- a source whose every value is known ------------------------------------------------------------

enum { PLANES = 2, HIDDEN = 3, SEQ_LEN = 40, DOCUMENTS = 60 };

struct made_source {
    struct source source;
    struct documents documents;
    struct shard shard;      // only its path
    uint64_t seed;           // of the packings
    int32_t bad, unreadable; // documents; -1: none
    int32_t stuck; // document whose reading waits for `released`, or for the unreadable one
    atomic_int released;
    unsigned sleep_us; // longest pause in a read
    atomic_ullong reads;
    atomic_int packings; // made so far
};

static int32_t made_id(const struct document *document, int64_t t)
{
    return (int32_t)(document->id * 100 + (uint64_t)t);
}

static uint8_t made_mask(const struct document *document, int64_t t)
{
    return (uint8_t)(rng_mix(document->id, (uint64_t)t) & 1);
}

static bf16 made_hidden(const struct document *document, int64_t i)
{
    return (bf16)(rng_mix(document->id, 1000 + (uint64_t)i) & 0x3fffu);
}

static int read_made(struct source *source, const struct document *document, int64_t serial,
                     int32_t *ids, uint8_t *mask, bf16 *hidden, struct error *err)
{
    (void)serial;
    struct made_source *made = (struct made_source *)source;
    uint64_t read = atomic_fetch_add(&made->reads, 1);
    if (made->sleep_us > 0)
        usleep((useconds_t)(rng_mix(made->seed, read) % made->sleep_us));
    while (document->index == made->stuck && atomic_load(&made->released) == 0)
        usleep(1000);
    if (document->index == made->unreadable) {
        atomic_store(&made->released, 1);
        return error_set(err, "made.h5: document %d: can not read", (int)document->index);
    }
    for (int64_t t = 0; t < document->length; t++) {
        ids[t] = made_id(document, t);
        mask[t] = made_mask(document, t);
    }
    for (int64_t i = 0; i < document->length * PLANES * HIDDEN; i++)
        hidden[i] = made_hidden(document, i);
    if (document->index == made->bad) {
        error_set(err, "made.h5: document %d: NaN", (int)document->index);
        return SOURCE_BAD;
    }
    return 0;
}

static const struct source_ops made_ops = {"made", read_made, NULL, NULL};

static void made_open(struct made_source *made, size_t count, int32_t longest)
{
    int32_t *lengths = memory_alloc(count, sizeof(*lengths));
    for (size_t i = 0; i < count; i++)
        lengths[i] = (int32_t)(1 + rng_mix(3, i) % (uint64_t)longest);
    *made = (struct made_source){.bad = -1, .unreadable = -1, .stuck = -1, .seed = 5};
    test_documents_open(&made->documents, lengths, count);
    made->shard.path = memory_strdup("made.h5");
    made->documents.shards = &made->shard;
    made->documents.shard_count = 1;
    made->documents.planes = PLANES;
    made->documents.hidden_size = HIDDEN;
    made->documents.features = feature_layout_make(PLANES, true, HIDDEN, false);
    made->source = (struct source){.ops = &made_ops, .documents = &made->documents};
    free(lengths);
}

static void made_close(struct made_source *made)
{
    free(made->shard.path);
    test_documents_close(&made->documents);
}

static void pack(void *context, uint64_t epoch, struct packing *packing)
{
    struct made_source *made = context;
    packing_make(packing, &made->documents, SEQ_LEN, made->seed, epoch, true);
    atomic_fetch_add(&made->packings, 1);
}

static struct prefetch_options options_of(int64_t depth, int threads)
{
    return (struct prefetch_options){.depth = depth,
                                     .threads = threads,
                                     .on_bad_sample = BAD_SAMPLE_FAIL,
                                     .seq_len = SEQ_LEN,
                                     .stall_seconds = 60.0};
}

static struct prefetch *open_made(struct made_source *made, const struct prefetch_options *options,
                                  uint64_t first_epoch, int64_t first_row, uint64_t epochs)
{
    struct prefetch *prefetch;
    struct error err = {""};
    if (prefetch_open(&prefetch, &made->source, options, pack, made, first_epoch, first_row, epochs,
                      &err) != 0)
        fail_msg("%s", err.text);
    return prefetch;
}

// The row must be row r of the packing, value by value; blank where the document is `bad`.
static void check_row(const struct row *row, const struct made_source *made,
                      const struct packing *packing, int64_t r, int32_t bad)
{
    int64_t begin = packing->row_offsets[r], t = 0, supervised = 0, bad_documents = 0;
    assert_int_equal(row->documents, packing->row_offsets[r + 1] - begin);
    for (int64_t d = 0; d < row->documents; d++) {
        const struct document *document = &made->documents.items[packing->document[begin + d]];
        bool blank = document->index == bad;
        bad_documents += blank;
        assert_ptr_equal(row->docs[d], document);
        assert_int_equal(row->doc_ids[d], document->id);
        assert_int_equal(row->doc_offsets[d], t);
        for (int64_t p = 0; p < document->length; p++, t++) {
            assert_int_equal(row->input_ids[t], blank ? 0 : made_id(document, p));
            assert_int_equal(row->loss_mask[t], blank ? 0 : made_mask(document, p));
            assert_int_equal(row->blank[t], blank);
            assert_int_equal(row->positions[t], p);
            assert_int_equal(row->doc_of[t], d);
            supervised += row->loss_mask[t];
            for (int64_t i = 0; i < PLANES * HIDDEN; i++)
                assert_int_equal(row->hidden[t * PLANES * HIDDEN + i],
                                 blank ? 0 : made_hidden(document, p * PLANES * HIDDEN + i));
        }
    }
    assert_int_equal(row->doc_offsets[row->documents], t);
    assert_int_equal(row->tokens, t);
    assert_int_equal(row->supervised, supervised);
    assert_int_equal(row->bad_documents, bad_documents);
    assert_int_equal(row->read_bytes, t * (5 + 2 * PLANES * HIDDEN));
}

// Takes all rows of these epochs and checks each; `held` rows are given back that much later.
static void check_all_rows(struct prefetch *prefetch, struct made_source *made,
                           uint64_t first_epoch, int64_t first_row, uint64_t epochs, int held,
                           int32_t bad)
{
    struct row *row, *waiting[8] = {NULL};
    struct error err = {""};
    double wait;
    int64_t taken = 0;
    for (uint64_t e = 0; e < epochs; e++) {
        struct packing packing;
        packing_make(&packing, &made->documents, SEQ_LEN, made->seed, first_epoch + e, true);
        for (int64_t r = e == 0 ? first_row : 0; r < packing.rows; r++) {
            if (prefetch_next(prefetch, &row, &wait, &err) != 1)
                fail_msg("no row: %s", err.text);
            assert_true(wait >= 0.0);
            assert_int_equal(row->epoch, first_epoch + e);
            check_row(row, made, &packing, r, bad);
            struct row **place = &waiting[taken++ % (held + 1)];
            *place = row;
            struct row **oldest = &waiting[taken % (held + 1)];
            if (*oldest != NULL)
                prefetch_return(prefetch, *oldest);
            *oldest = NULL;
        }
        packing_release(&packing);
    }
    assert_int_equal(prefetch_next(prefetch, &row, &wait, &err), 0);
    assert_int_equal(prefetch_next(prefetch, &row, &wait, &err), 0);
}

// ---- order and content ------------------------------------------------------------------------------

static void test_rows_in_order(void **state)
{
    (void)state;
    struct made_source made;
    made_open(&made, DOCUMENTS, SEQ_LEN);
    for (int trial = 0; trial < 24; trial++) {
        struct prefetch_options options = options_of(1 + trial % 4, 1 + trial % 3);
        made.sleep_us = trial % 2 ? 300 : 0;
        made.seed = (uint64_t)trial;
        int64_t first_row = trial % 5;
        struct prefetch *prefetch = open_made(&made, &options, 7, first_row, 3);
        check_all_rows(prefetch, &made, 7, first_row, 3, trial % 4 < 2 ? 0 : 1, -1);
        prefetch_close(prefetch);
    }
    made_close(&made);
}

// Epochs of one row each: several epochs are in flight at once.
static void test_short_epochs(void **state)
{
    (void)state;
    struct made_source made;
    made_open(&made, 2, SEQ_LEN / 2);
    struct prefetch_options options = options_of(4, 3);
    struct prefetch *prefetch = open_made(&made, &options, 0, 0, 50);
    check_all_rows(prefetch, &made, 0, 0, 50, 1, -1);
    assert_int_equal(atomic_load(&made.packings), 50); // once an epoch
    prefetch_close(prefetch);
    // A run that stopped at the very end of an epoch goes on with the next.
    prefetch = open_made(&made, &options, 3, 1, 2);
    check_all_rows(prefetch, &made, 3, 1, 2, 0, -1);
    prefetch_close(prefetch);
    made_close(&made);
}

static void test_nothing_to_read(void **state)
{
    (void)state;
    struct made_source made;
    made_open(&made, 0, SEQ_LEN);
    struct prefetch_options options = options_of(2, 2);
    struct prefetch *prefetch = open_made(&made, &options, 0, 0, 3);
    check_all_rows(prefetch, &made, 0, 0, 3, 0, -1);
    prefetch_close(prefetch);
    made_close(&made);
}

// ---- faults -----------------------------------------------------------------------------------------

// Row of the epoch's packing that has the document.
static int64_t row_of_document(const struct made_source *made, uint64_t epoch, int32_t document)
{
    struct packing packing;
    packing_make(&packing, &made->documents, SEQ_LEN, made->seed, epoch, true);
    int64_t found = -1;
    for (int64_t r = 0; r < packing.rows; r++) {
        for (int64_t i = packing.row_offsets[r]; i < packing.row_offsets[r + 1]; i++) {
            if (packing.document[i] == document)
                found = r;
        }
    }
    packing_release(&packing);
    return found;
}

// Rows before the fault come, then its words, as often as one asks.
static void expect_failure_at(struct prefetch *prefetch, int64_t rows, const char *says)
{
    struct row *row;
    struct error err = {""};
    double wait;
    for (int64_t r = 0; r < rows; r++) {
        assert_int_equal(prefetch_next(prefetch, &row, &wait, &err), 1);
        prefetch_return(prefetch, row);
    }
    for (int again = 0; again < 2; again++) {
        err.text[0] = '\0';
        assert_int_equal(prefetch_next(prefetch, &row, &wait, &err), -1);
        assert_string_equal(err.text, says);
    }
}

static void test_bad_document_fails(void **state)
{
    (void)state;
    struct made_source made;
    made_open(&made, DOCUMENTS, SEQ_LEN);
    for (int threads = 1; threads <= 3; threads++) {
        struct prefetch_options options = options_of(3, threads);
        made.bad = 17;
        struct prefetch *prefetch = open_made(&made, &options, 0, 0, 2);
        expect_failure_at(prefetch, row_of_document(&made, 0, 17), "made.h5: document 17: NaN");
        prefetch_close(prefetch);
    }
    made_close(&made);
}

static void test_bad_document_is_skipped(void **state)
{
    (void)state;
    struct made_source made;
    made_open(&made, DOCUMENTS, SEQ_LEN);
    struct prefetch_options options = options_of(2, 2);
    options.on_bad_sample = BAD_SAMPLE_SKIP;
    made.bad = 17;
    struct prefetch *prefetch = open_made(&made, &options, 0, 0, 3);
    check_all_rows(prefetch, &made, 0, 0, 3, 0, 17);
    prefetch_close(prefetch);
    made_close(&made);
}

static void test_unreadable_fails_always(void **state)
{
    (void)state;
    struct made_source made;
    made_open(&made, DOCUMENTS, SEQ_LEN);
    struct prefetch_options options = options_of(2, 2);
    options.on_bad_sample = BAD_SAMPLE_SKIP;
    made.unreadable = 23;
    struct prefetch *prefetch = open_made(&made, &options, 0, 0, 1);
    expect_failure_at(prefetch, row_of_document(&made, 0, 23),
                      "made.h5: document 23: can not read");
    prefetch_close(prefetch);
    made_close(&made);
}

// Two faults in one row: the first in the row is told, although the second is met before it.
static void test_first_fault_of_a_row(void **state)
{
    (void)state;
    struct made_source made;
    made_open(&made, 2, SEQ_LEN / 2);
    struct packing packing;
    packing_make(&packing, &made.documents, SEQ_LEN, made.seed, 0, true);
    assert_int_equal(packing.rows, 1);
    made.bad = made.stuck = packing.document[0];
    made.unreadable = packing.document[1];
    packing_release(&packing);
    struct prefetch_options options = options_of(1, 2);
    struct prefetch *prefetch = open_made(&made, &options, 0, 0, 1);
    char *says = memory_format("made.h5: document %d: NaN", (int)made.bad);
    expect_failure_at(prefetch, 0, says);
    free(says);
    prefetch_close(prefetch);
    made_close(&made);
}

static void test_stall_is_an_error(void **state)
{
    (void)state;
    struct made_source made;
    made_open(&made, DOCUMENTS, SEQ_LEN);
    struct prefetch_options options = options_of(2, 2);
    options.stall_seconds = 0.2;
    made.stuck = 31;
    struct prefetch *prefetch = open_made(&made, &options, 0, 0, 1);
    double start = timer_now();
    expect_failure_at(prefetch, row_of_document(&made, 0, 31),
                      "made.h5: document 31: reading made no progress for 0 seconds; is the file "
                      "system there?");
    assert_true(timer_now() - start < 30.0);
    atomic_store(&made.released, 1);
    prefetch_close(prefetch);
    made_close(&made);
}

static bool is_set(void *flag)
{
    return atomic_load((atomic_int *)flag) != 0;
}

// A wait for data that does not come ends soon when the caller wants to stop, and so does closing.
static void test_stop_ends_a_wait(void **state)
{
    (void)state;
    struct made_source made;
    struct row *row = NULL;
    struct error err = {""};
    atomic_int wanted = 0;
    double wait;
    made_open(&made, 1, SEQ_LEN);
    made.stuck = 0;
    struct prefetch_options options = options_of(1, 1);
    options.stop = is_set;
    options.stop_context = &wanted;
    struct prefetch *prefetch = open_made(&made, &options, 0, 0, 1);
    atomic_store(&wanted, 1);
    double start = timer_now();
    assert_int_equal(prefetch_next(prefetch, &row, &wait, &err), 2);
    assert_string_equal(err.text, "");
    assert_true(timer_now() - start < 30.0);
    atomic_store(&made.released, 1);
    prefetch_close(prefetch);
    made_close(&made);
}

// ---- shutdown and memory ----------------------------------------------------------------------------

static void test_close_at_any_moment(void **state)
{
    (void)state;
    struct made_source made;
    made_open(&made, DOCUMENTS, SEQ_LEN);
    made.sleep_us = 200;
    for (uint64_t trial = 0; trial < 200; trial++) {
        struct prefetch_options options =
            options_of(1 + (int64_t)(trial % 3), 1 + (int)(trial % 4));
        struct prefetch *prefetch = open_made(&made, &options, 0, 0, 2);
        struct row *row;
        struct error err;
        double wait;
        for (uint64_t taken = rng_mix(trial, 1) % 6; taken > 0; taken--) {
            assert_int_equal(prefetch_next(prefetch, &row, &wait, &err), 1);
            if (taken > 1) // the last one is still borrowed at the end
                prefetch_return(prefetch, row);
        }
        usleep((useconds_t)(rng_mix(trial, 2) % 800));
        prefetch_close(prefetch);
    }
    made_close(&made);
}

// Rows that are lent stay when the reading has ended.
static void test_stop_keeps_lent_rows(void **state)
{
    (void)state;
    struct made_source made;
    struct packing packing;
    struct row *row;
    struct error err = {""};
    double wait;
    made_open(&made, DOCUMENTS, SEQ_LEN);
    packing_make(&packing, &made.documents, SEQ_LEN, made.seed, 0, true);
    struct prefetch_options options = options_of(3, 3);
    struct prefetch *prefetch = open_made(&made, &options, 0, 0, 2);
    assert_int_equal(prefetch_next(prefetch, &row, &wait, &err), 1);
    assert_true(prefetch_stop(prefetch));
    unsigned long long reads = atomic_load(&made.reads);
    check_row(row, &made, &packing, 0, -1);
    usleep(20 * 1000);
    assert_true(atomic_load(&made.reads) == reads);
    assert_true(prefetch_stop(prefetch));
    assert_true(prefetch_close(prefetch));
    assert_true(prefetch_stop(NULL) && prefetch_close(NULL));
    packing_release(&packing);
    made_close(&made);
}

static struct made_source *stuck_source; // never freed, nor what is read from it
static struct prefetch *stuck_prefetch;

// A reader that does not come back is left behind, with all that it may use.
static void test_stuck_reader_is_left_behind(void **state)
{
    (void)state;
    struct made_source *made = stuck_source = memory_alloc(1, sizeof(*made));
    made_open(made, 1, SEQ_LEN);
    made->stuck = 0;
    struct prefetch_options options = options_of(1, 1);
    options.stop_seconds = 0.1;
    stuck_prefetch = open_made(made, &options, 0, 0, 1);
    while (atomic_load(&made->reads) == 0)
        usleep(1000);
    double start = timer_now();
    assert_false(prefetch_stop(stuck_prefetch));
    assert_false(prefetch_close(stuck_prefetch));
    assert_true(timer_now() - start < 30.0); // stall_seconds is 60
    atomic_store(&made->released, 1);        // it writes into its row and ends
}

struct counted {
    atomic_int open;
    atomic_int total;
};
static struct counted counted_memory;

static void *counted_alloc(size_t size)
{
    counted_memory.open++;
    counted_memory.total++;
    return malloc(size);
}

static void counted_free(void *pointer)
{
    counted_memory.open--;
    free(pointer);
}

enum { WARM_UP_ROWS = 2000, FLAT_ROWS = 10000 };

// One reader: glibc counts what a thread has freed and keeps for itself as in use, so with several the
// sum depends on which of them happened to pack how often. At either moment an epoch may be in the
// middle of being packed, which is a key, two numbers and a place per document, and the rows.
static void test_memory_stays_flat(void **state)
{
    (void)state;
    struct made_source made;
    made_open(&made, DOCUMENTS, SEQ_LEN);
    struct prefetch_options options = options_of(2, 1);
    options.host_alloc = counted_alloc;
    options.host_free = counted_free;
    struct prefetch *prefetch = open_made(&made, &options, 0, 0, 1000000);
    struct row *row;
    struct error err;
    double wait;
    size_t before = 0;
    for (int64_t taken = 0; taken < WARM_UP_ROWS + FLAT_ROWS; taken++) {
        if (taken == WARM_UP_ROWS)
            before = mallinfo2().uordblks;
        assert_int_equal(prefetch_next(prefetch, &row, &wait, &err), 1);
        prefetch_return(prefetch, row);
    }
    size_t after = mallinfo2().uordblks;
    assert_int_equal(counted_memory.total, 3); // depth + 1, once
    prefetch_close(prefetch);
    assert_int_equal(counted_memory.open, 0);
    made_close(&made);
    print_message("heap %zu bytes, 10,000 rows later %zu (sanitizers have their own heap: 0)\n",
                  before, after);
    size_t packing_alive = DOCUMENTS * (16 + 4 + 8 + 4) + (DOCUMENTS + 1) * 8;
    assert_true(after <= before + packing_alive);
}

// ---- over real shards -------------------------------------------------------------------------------

struct shard_case {
    char *folder, *path;
    struct fixture fixture;
    struct documents documents;
    struct source *source;
};

static void pack_shards(void *context, uint64_t epoch, struct packing *packing)
{
    const struct shard_case *c = context;
    packing_make(packing, &c->documents, SEQ_LEN, 1, epoch, true);
}

// Writes the fixture and opens its documents, cut to SEQ_LEN.
static void shard_case_open(struct shard_case *c)
{
    struct error err = {""};
    fixture_write(&c->fixture, c->path);
    struct config_texts paths = {&c->path, 1};
    if (documents_open(&c->documents, &paths, SEQ_LEN, BAD_SAMPLE_FAIL, &err) != 0 ||
        source_open_shards(&c->source, &c->documents, true, &err) != 0)
        fail_msg("%s", err.text);
}

static void shard_case_make(struct shard_case *c)
{
    static const int64_t lengths[] = {7, 33, 40, 41, 90, 1, 12};
    c->folder = fixture_folder();
    c->path = fixture_path(c->folder, "shard.h5");
    struct fixture_options options = {.seed = 9, .documents = 7, .lengths = lengths, .crc = true};
    fixture_make(&c->fixture, &options);
}

static void shard_case_close(struct shard_case *c)
{
    source_close(c->source);
    documents_close(&c->documents);
    fixture_release(&c->fixture);
    free(c->path);
    fixture_folder_remove(c->folder);
}

static void check_shard_row(const struct shard_case *c, const struct row *row)
{
    for (int64_t t = 0; t < row->tokens; t++) {
        const struct document *document = row->docs[row->doc_of[t]];
        int64_t token = document->first + row->positions[t];
        assert_int_equal(row->input_ids[t], c->fixture.input_ids[token]);
        assert_int_equal(row->loss_mask[t], c->fixture.loss_mask[token]);
        int64_t values = row->planes * row->hidden_size;
        assert_memory_equal(row->hidden + t * values, c->fixture.hidden_states + token * values,
                            (size_t)values * sizeof(bf16));
    }
}

static void test_shards(void **state)
{
    (void)state;
    struct shard_case c;
    struct error err = {""};
    shard_case_make(&c);
    shard_case_open(&c);
    struct prefetch_options options = options_of(2, 3);
    struct prefetch *prefetch;
    assert_int_equal(prefetch_open(&prefetch, c.source, &options, pack_shards, &c, 0, 0, 2, &err),
                     0);
    struct row *row;
    double wait;
    int64_t tokens = 0;
    int result;
    while ((result = prefetch_next(prefetch, &row, &wait, &err)) == 1) {
        check_shard_row(&c, row);
        tokens += row->tokens;
        prefetch_return(prefetch, row);
    }
    assert_int_equal(result, 0);
    assert_int_equal(tokens, 2 * (7 + 33 + 40 + 40 + 40 + 1 + 12)); // two were cut
    prefetch_close(prefetch);
    shard_case_close(&c);
}

// Reads one document through the source. Returns what the source says.
static int read_one(const struct shard_case *c, int64_t index, struct error *err)
{
    size_t values = (size_t)(c->documents.planes * c->documents.hidden_size);
    int32_t *ids = memory_alloc(SEQ_LEN, sizeof(*ids));
    uint8_t *mask = memory_alloc(SEQ_LEN, 1);
    bf16 *hidden = memory_alloc(SEQ_LEN * values, sizeof(*hidden));
    const struct document *document = NULL;
    for (size_t i = 0; i < c->documents.count; i++) {
        if (c->documents.items[i].index == index)
            document = &c->documents.items[i];
    }
    assert_non_null(document);
    int result = c->source->ops->read(c->source, document, 0, ids, mask, hidden, err);
    free(ids);
    free(mask);
    free(hidden);
    return result;
}

static void test_bad_values_in_shards(void **state)
{
    (void)state;
    struct shard_case c;
    struct error err = {""};
    shard_case_make(&c);
    // NaN in document 1; in document 4 only behind the cut, where nobody reads it
    fixture_hidden(&c.fixture, 7 + 5, 1)[2] = 0x7fc1;
    fixture_hidden(&c.fixture, 7 + 33 + 40 + 41 + SEQ_LEN + 3, 0)[0] = 0x7fc1;
    shard_case_open(&c);
    assert_int_equal(read_one(&c, 1, &err), SOURCE_BAD);
    assert_non_null(strstr(err.text, c.path));
    assert_non_null(strstr(err.text, "document 1"));
    assert_non_null(strstr(err.text, "NaN"));
    assert_int_equal(read_one(&c, 4, &err), 0);
    assert_int_equal(read_one(&c, 0, &err), 0);
    shard_case_close(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows_in_order),
        cmocka_unit_test(test_short_epochs),
        cmocka_unit_test(test_nothing_to_read),
        cmocka_unit_test(test_bad_document_fails),
        cmocka_unit_test(test_bad_document_is_skipped),
        cmocka_unit_test(test_unreadable_fails_always),
        cmocka_unit_test(test_first_fault_of_a_row),
        cmocka_unit_test(test_stall_is_an_error),
        cmocka_unit_test(test_stop_ends_a_wait),
        cmocka_unit_test(test_close_at_any_moment),
        cmocka_unit_test(test_stop_keeps_lent_rows),
        cmocka_unit_test(test_stuck_reader_is_left_behind),
        cmocka_unit_test(test_memory_stays_flat),
        cmocka_unit_test(test_shards),
        cmocka_unit_test(test_bad_values_in_shards),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
