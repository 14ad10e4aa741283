// Owns the count of documents that a run has used, and the words and the limit of its waiting. Shards and
// their removal are data/spool.c's.
#include "trainer/run_spool.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "base/byte_size.h"
#include "base/log.h"
#include "base/timer.h"
#include "data/spool.h"
#include "data/spool_folder.h"

// A shard of a spool takes at most this share of its bytes, or one document.
enum { SHARD_SHARE = 8 };

struct run_spool {
    struct run_spool_options options;
    const struct session *session; // of the options
    struct source *source;
    struct packing packing; // of the epoch, for where its rows begin
    int64_t packed_epoch;   // -1: none
    bool terminal;
    // the wait that is going on
    int64_t waited_for;      // serial number, -1: none
    double wait_begin, told; // when it began, was told last
    bool waited;             // since it was asked
};

// ---- bytes ---------------------------------------------------------------------------------------

// A token in a file of a spool, with the teacher's columns that an extractor writes.
static double token_bytes(const struct documents *documents)
{
    return (double)feature_layout_file_bytes(&documents->features) + 17.0;
}

int run_spool_check(const struct config *config, const struct documents *documents,
                    struct error *err)
{
    const struct data_config *data = &config->data;
    const double bytes = (double)config_spool_bytes(config), per_token = token_bytes(documents);
    int64_t longest = 0;
    for (size_t i = 0; i < documents->count; i++)
        if (documents->items[i].length > longest)
            longest = documents->items[i].length;
    double step = (double)(data->rows_per_step * data->seq_len) * per_token;
    double document = (double)longest * per_token, least = step + 2.0 * document;
    double share = bytes / SHARD_SHARE;
    if (step + 2.0 * (document > share ? document : share) <= bytes)
        return 0;
    double enough = step * SHARD_SHARE / (SHARD_SHARE - 2);
    char has[BYTE_SIZE_TEXT], reads[BYTE_SIZE_TEXT], one[BYTE_SIZE_TEXT], wants[BYTE_SIZE_TEXT];
    return error_set(
        err,
        "data.spool_bytes: %s is too little: a step reads up to %s (data.rows_per_step "
        "x data.seq_len), the longest document has %s, and a shard is up to an eighth "
        "of spool_bytes: at least %s is needed",
        byte_size_text(bytes, has), byte_size_text(step, reads), byte_size_text(document, one),
        byte_size_text(least > enough ? least : enough, wants));
}

// ---- serial numbers ------------------------------------------------------------------------------

// Of the first document of a row.
static int64_t serial_of(struct run_spool *spool, int64_t epoch, int64_t row)
{
    int64_t first = epoch * (int64_t)spool->session->train.count;
    if (row == 0)
        return first;
    if (spool->packed_epoch != epoch) {
        packing_release(&spool->packing);
        session_pack_epoch(spool->session, (uint64_t)epoch, &spool->packing);
        spool->packed_epoch = epoch;
    }
    BUG_UNLESS(spool->packing.row_offsets != NULL);
    return first + spool->packing.row_offsets[row];
}

int64_t run_spool_end(const struct session *session, const struct session_steps *steps)
{
    int64_t per_step = session->config->data.rows_per_step, left = steps->total, epoch = 0;
    int64_t documents = (int64_t)session->train.count;
    while (left > 0 && left * per_step >= steps->epoch_rows[epoch])
        left -= (steps->epoch_rows[epoch++] + per_step - 1) / per_step;
    int64_t end = epoch * documents;
    if (left > 0) {
        struct packing packing;
        session_pack_epoch(session, (uint64_t)epoch, &packing);
        end += packing.row_offsets[left * per_step];
        packing_release(&packing);
    }
    return end;
}

// First document of the next step, and the first behind it.
static void next_step(struct run_spool *spool, int64_t *serial, int64_t *needed)
{
    const struct counters *counters = spool->options.counters;
    const struct session_steps *steps = spool->options.steps;
    int64_t rows = spool->session->config->data.rows_per_step;
    *serial = *needed = serial_of(spool, counters->epoch, counters->row);
    if (counters->step >= steps->total)
        return;
    int64_t left = steps->epoch_rows[counters->epoch] - counters->row;
    *needed = rows < left ? serial_of(spool, counters->epoch, counters->row + rows)
                          : serial_of(spool, counters->epoch + 1, 0);
}

// ---- waiting -------------------------------------------------------------------------------------

static void tell(struct run_spool *spool, double now)
{
    const double first = 5.0, again = 60.0; // seconds until a line, and until the next
    const struct data_config *data = &spool->session->config->data;
    double waited = now - spool->wait_begin;
    char text[160];
    snprintf(text, sizeof(text), "waiting for the extractor: document %lld, %.0f s",
             (long long)spool->waited_for, waited);
    if (spool->terminal && waited >= 1.0)
        log_status_line(text);
    if (now - spool->told < (spool->told > spool->wait_begin ? again : first))
        return;
    spool->told = now;
    log_info("%s; its shard is not in %s yet%s", text, data->spool,
             spool_extractor_runs(data->spool)
                 ? ""
                 : ", and no extractor holds extractor.lock there: does one run?");
}

// Nothing came for as long as the config bears.
static bool is_too_long(struct run_spool *spool, double now)
{
    int64_t limit = spool->session->config->data.spool_wait;
    if (limit == 0 || now - spool->wait_begin < (double)limit)
        return false;
    log_error("data.spool: nothing came for %lld s (data.spool_wait) while document %lld was "
              "waited for in %s; start this run again when the extractor works",
              (long long)limit, (long long)spool->waited_for, spool->session->config->data.spool);
    return true;
}

// The step waits for this document. True: for too long.
static bool waited_too_long(struct run_spool *spool, int64_t serial)
{
    double now = timer_now();
    if (serial != spool->waited_for) {
        spool->waited_for = serial;
        spool->wait_begin = spool->told = now;
    }
    spool->waited = true;
    tell(spool, now);
    return is_too_long(spool, now);
}

bool run_spool_stop(void *context)
{
    struct run_spool *spool = context;
    int64_t serial;
    if (spool->options.stop(spool->options.stop_context))
        return true;
    if (spool_waiting(spool->source, &serial))
        return waited_too_long(spool, serial);
    spool->waited_for = -1;
    return false;
}

bool run_spool_await_step(struct run_spool *spool, double *seconds)
{
    const struct timespec pause = {.tv_nsec = 50 * 1000 * 1000};
    double start = timer_now();
    int64_t serial, needed;
    if (session_ranks(spool->session) == 1)
        return false;
    next_step(spool, &serial, &needed);
    bool stopped = false;
    while (!stopped && (serial = spool_missing(spool->source, serial, needed)) < needed) {
        stopped =
            spool->options.stop(spool->options.stop_context) || waited_too_long(spool, serial);
        nanosleep(&pause, NULL);
    }
    *seconds += timer_now() - start;
    return stopped;
}

bool run_spool_waited(struct run_spool *spool)
{
    bool waited = spool->waited;
    spool->waited = false;
    spool->waited_for = -1; // the next wait is another one
    return waited;
}

// ---- opening, use and closing --------------------------------------------------------------------

int run_spool_open(struct run_spool **spool, const struct run_spool_options *options,
                   struct error *err)
{
    const struct session *session = options->session;
    const struct config *config = session->config;
    struct run_spool *s = memory_alloc(1, sizeof(*s));
    *s = (struct run_spool){.options = *options,
                            .session = session,
                            .packed_epoch = -1,
                            .waited_for = -1,
                            .terminal = session_rank(session) == 0 && isatty(STDERR_FILENO) == 1};
    struct spool_options wanted = {
        .folder = config->data.spool,
        .documents = &session->train,
        .order = spool_order(&session->train, (uint64_t)config->run.seed, config->data.seq_len),
        .end = run_spool_end(session, options->steps),
        .bytes = (int64_t)config_spool_bytes(config),
        .owner = session_rank(session) == 0,
        .check_crc = config->data.check_crc,
        .program = "/proc/self/exe"};
    next_step(s, &wanted.serial, &wanted.needed);
    if (source_open_spool(&s->source, &wanted, err) != 0) {
        run_spool_close(s);
        return -1;
    }
    if (wanted.owner)
        log_info("spool: %s, documents %lld to %lld of the order %016llx", config->data.spool,
                 (long long)wanted.serial, (long long)wanted.end - 1,
                 (unsigned long long)wanted.order);
    *spool = s;
    return 0;
}

void run_spool_close(struct run_spool *spool)
{
    if (spool == NULL)
        return;
    source_close(spool->source);
    packing_release(&spool->packing);
    free(spool);
}

struct source *run_spool_source(struct run_spool *spool)
{
    return spool->source;
}

void run_spool_used(struct run_spool *spool)
{
    int64_t serial, needed;
    next_step(spool, &serial, &needed);
    spool_used(spool->source, serial, needed);
}

void run_spool_finish(struct run_spool *spool)
{
    spool_finish(spool->source);
}
