// Owns the reader threads and the rows they fill. Rows are planned in order (which documents, where in
// the row), their documents are read by any thread in any order, and rows are handed out in order.
// Owns no order of documents (packing.c) and no file formats (source.c).
#include "data/prefetch.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/memory.h"
#include "base/timer.h"

static const double usual_patience = 600.0; // seconds without progress

enum place_state { PLACE_FREE, PLACE_READING, PLACE_READY, PLACE_BORROWED };

// One row's memory and where its reading stands.
struct place {
    struct row row;
    enum place_state state;
    int64_t sequence; // its turn
    int64_t claimed;  // documents given to readers
    int64_t finished; // documents read
    int64_t failed;   // first document that could not be used; -1: none
    struct error error;
};

struct reader {
    struct prefetch *prefetch;
    pthread_t thread;
    const struct document *document; // being read now, or NULL
};

struct prefetch {
    struct source *source;
    struct prefetch_options options;
    prefetch_epoch_fn *epoch_packing;
    void *context;

    pthread_mutex_t lock;
    pthread_cond_t changed; // anything below changed
    struct place *places;   // [place_count]
    int64_t place_count;
    struct reader *readers; // [reader_count]
    int reader_count;       // started
    int readers_running;
    bool stopping;
    bool stopped, left_behind; // what prefetch_stop came to; its caller's
    bool halted;               // a row failed: nothing more is planned
    uint64_t progress;         // grows with every document and every epoch's packing
    struct error stall;        // "" while all is well
    bool given_up;             // stop() ended a wait

    // the plan: next row to be planned. Only the thread that has set `planning` touches the packing.
    bool planning, packed;
    struct packing packing;
    uint64_t epoch, epochs_left;
    int64_t next_row;      // in the packing
    int64_t next_sequence; // its turn
    int64_t end_sequence;  // -1 until all epochs are planned
    int64_t wanted;        // turn of the next row handed out
};

// ---- planning ---------------------------------------------------------------------------------------

static void lay_out_row(const struct prefetch *prefetch, struct place *place)
{
    const struct documents *documents = prefetch->source->documents;
    const struct packing *packing = &prefetch->packing;
    struct row *row = &place->row;
    int64_t begin = packing->row_offsets[prefetch->next_row];
    row->documents = packing->row_offsets[prefetch->next_row + 1] - begin;
    row->epoch = prefetch->epoch;
    row->serial =
        (int64_t)(prefetch->epoch * documents->count) + packing->row_places[prefetch->next_row];
    row->bad_documents = row->supervised = row->read_bytes = 0;
    row->read_seconds = 0.0;
    row->doc_offsets[0] = 0;
    for (int64_t d = 0; d < row->documents; d++) {
        const struct document *document = &documents->items[packing->document[begin + d]];
        BUG_UNLESS(document->length > 0 && row->doc_offsets[d] + document->length <= row->capacity);
        row->docs[d] = document;
        row->doc_ids[d] = document->id;
        row->doc_offsets[d + 1] = row->doc_offsets[d] + document->length;
    }
    row->tokens = row->doc_offsets[row->documents];
}

// Makes next_row a row that exists, going on to further epochs. False: there is none. Called with the
// lock held, which is given up while an epoch is packed.
static bool reach_next_row(struct prefetch *prefetch)
{
    while (!prefetch->packed || prefetch->next_row >= prefetch->packing.rows) {
        if (prefetch->packed) {
            BUG_UNLESS(prefetch->next_row == prefetch->packing.rows);
            packing_release(&prefetch->packing);
            prefetch->packed = false;
            prefetch->next_row = 0;
            prefetch->epoch++;
            prefetch->epochs_left--;
        }
        if (prefetch->epochs_left == 0)
            return false;
        pthread_mutex_unlock(&prefetch->lock);
        prefetch->epoch_packing(prefetch->context, prefetch->epoch, &prefetch->packing);
        pthread_mutex_lock(&prefetch->lock);
        prefetch->packed = true;
        prefetch->progress++;
        if (prefetch->stopping)
            return false;
    }
    return true;
}

static void plan_row(struct prefetch *prefetch, struct place *place)
{
    prefetch->planning = true;
    if (reach_next_row(prefetch)) {
        lay_out_row(prefetch, place);
        place->state = PLACE_READING;
        place->sequence = prefetch->next_sequence++;
        place->claimed = place->finished = 0;
        place->failed = -1;
        prefetch->next_row++;
    } else {
        prefetch->end_sequence = prefetch->next_sequence;
    }
    prefetch->planning = false;
    pthread_cond_broadcast(&prefetch->changed);
}

// ---- reading ----------------------------------------------------------------------------------------

// A bad document keeps its place, but nothing of it may reach a result: not even its ids, which may be
// what is bad.
static void blank_document(struct row *row, int64_t begin, int64_t length)
{
    size_t token_values = (size_t)row->features.stride;
    memset(row->input_ids + begin, 0, (size_t)length * sizeof(*row->input_ids));
    memset(row->loss_mask + begin, 0, (size_t)length);
    memset(row->blank + begin, 1, (size_t)length);
    memset(row->hidden + (size_t)begin * token_values, 0,
           (size_t)length * token_values * sizeof(*row->hidden));
}

static int read_document(struct prefetch *prefetch, struct row *row, int64_t d, struct error *err)
{
    int64_t begin = row->doc_offsets[d], length = row->doc_offsets[d + 1] - begin;
    bf16 *hidden = row->hidden + begin * row->features.stride;
    for (int64_t t = 0; t < length; t++) {
        row->positions[begin + t] = (int32_t)t;
        row->doc_of[begin + t] = (int32_t)d;
    }
    memset(row->blank + begin, 0, (size_t)length);
    int result =
        prefetch->source->ops->read(prefetch->source, row->docs[d], row->serial + d,
                                    row->input_ids + begin, row->loss_mask + begin, hidden, err);
    if (result == SOURCE_BAD)
        blank_document(row, begin, length);
    return result;
}

static void finish_row(struct prefetch *prefetch, struct place *place)
{
    struct row *row = &place->row;
    for (int64_t t = 0; t < row->tokens; t++)
        row->supervised += row->loss_mask[t];
    row->read_bytes = row->tokens * (int64_t)(sizeof(*row->input_ids) + sizeof(*row->loss_mask)) +
                      row->tokens * feature_layout_file_bytes(&row->features);
    place->state = PLACE_READY;
    prefetch->halted = prefetch->halted || place->failed >= 0;
}

// Reads one document of the place. Called with the lock held, which is given up meanwhile.
static void read_next(struct prefetch *prefetch, struct reader *reader, struct place *place)
{
    int64_t d = place->claimed++;
    struct error error = {""};
    reader->document = place->row.docs[d];
    pthread_mutex_unlock(&prefetch->lock);
    double start = timer_now();
    int result = read_document(prefetch, &place->row, d, &error);
    double seconds = timer_now() - start;
    bool skip = result == SOURCE_BAD && prefetch->options.on_bad_sample == BAD_SAMPLE_SKIP;
    if (skip)
        log_warn("left out: %s", error.text);
    pthread_mutex_lock(&prefetch->lock);
    reader->document = NULL;
    place->row.read_seconds += seconds;
    if (skip) {
        place->row.bad_documents++;
    } else if (result != 0 && (place->failed < 0 || d < place->failed)) {
        place->failed = d; // the first in the row, whichever thread was faster
        place->error = error;
    }
    prefetch->progress++;
    if (++place->finished == place->row.documents)
        finish_row(prefetch, place);
    pthread_cond_broadcast(&prefetch->changed);
}

// The row that is next in turn among those with documents left to claim.
static struct place *place_to_read(struct prefetch *prefetch)
{
    struct place *first = NULL;
    for (int64_t i = 0; i < prefetch->place_count; i++) {
        struct place *place = &prefetch->places[i];
        if (place->state == PLACE_READING && place->claimed < place->row.documents &&
            (first == NULL || place->sequence < first->sequence))
            first = place;
    }
    return first;
}

static struct place *place_to_plan(struct prefetch *prefetch)
{
    if (prefetch->planning || prefetch->halted || prefetch->end_sequence >= 0)
        return NULL;
    for (int64_t i = 0; i < prefetch->place_count; i++) {
        if (prefetch->places[i].state == PLACE_FREE)
            return &prefetch->places[i];
    }
    return NULL;
}

static void *reader_main(void *argument)
{
    struct reader *reader = argument;
    struct prefetch *prefetch = reader->prefetch;
    pthread_mutex_lock(&prefetch->lock);
    while (!prefetch->stopping) {
        struct place *place;
        if ((place = place_to_read(prefetch)) != NULL)
            read_next(prefetch, reader, place);
        else if ((place = place_to_plan(prefetch)) != NULL)
            plan_row(prefetch, place);
        else
            pthread_cond_wait(&prefetch->changed, &prefetch->lock);
    }
    prefetch->readers_running--;
    pthread_cond_broadcast(&prefetch->changed);
    pthread_mutex_unlock(&prefetch->lock);
    return NULL;
}

// ---- opening and closing ----------------------------------------------------------------------------

static void open_synchronisation(struct prefetch *prefetch)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes,
                              CLOCK_MONOTONIC); // bounded waits must not follow the date
    pthread_mutex_init(&prefetch->lock, NULL);
    pthread_cond_init(&prefetch->changed, &attributes);
    pthread_condattr_destroy(&attributes);
}

static int start_readers(struct prefetch *prefetch, struct error *err)
{
    pthread_mutex_lock(&prefetch->lock);
    int result = 0;
    for (int i = 0; i < prefetch->options.threads && result == 0; i++) {
        struct reader *reader = &prefetch->readers[i];
        reader->prefetch = prefetch;
        int code = pthread_create(&reader->thread, NULL, reader_main, reader);
        if (code != 0) {
            result = error_set(err, "can not start reader %d of %d: %s", i + 1,
                               prefetch->options.threads, strerror(code));
            break;
        }
        prefetch->reader_count++;
        prefetch->readers_running++;
    }
    pthread_mutex_unlock(&prefetch->lock);
    return result;
}

int prefetch_open(struct prefetch **prefetch, struct source *source,
                  const struct prefetch_options *options, prefetch_epoch_fn *epoch_packing,
                  void *context, uint64_t first_epoch, int64_t first_row, uint64_t epoch_count,
                  struct error *err)
{
    BUG_UNLESS(options->depth > 0 && options->threads > 0 && first_row >= 0);
    struct prefetch *p = memory_alloc(1, sizeof(*p));
    p->source = source;
    p->options = *options;
    if (!(p->options.stall_seconds > 0.0))
        p->options.stall_seconds = usual_patience;
    p->epoch_packing = epoch_packing;
    p->context = context;
    p->epoch = first_epoch;
    p->next_row = first_row;
    p->epochs_left = epoch_count;
    p->end_sequence = -1;
    p->place_count = options->depth + 1;
    p->places = memory_alloc((size_t)p->place_count, sizeof(*p->places));
    for (int64_t i = 0; i < p->place_count; i++)
        row_open(&p->places[i].row, options->seq_len, &source->documents->features,
                 options->host_alloc);
    p->readers = memory_alloc((size_t)options->threads, sizeof(*p->readers));
    open_synchronisation(p);
    if (start_readers(p, err) != 0) {
        prefetch_close(p);
        return -1;
    }
    *prefetch = p;
    return 0;
}

// False: some reader did not come back in time.
static bool await_readers(struct prefetch *prefetch)
{
    const struct prefetch_options *options = &prefetch->options;
    double patience = options->stop_seconds > 0.0 ? options->stop_seconds : options->stall_seconds;
    struct timespec limit = timer_after(fmin(patience, usual_patience));
    pthread_mutex_lock(&prefetch->lock);
    prefetch->stopping = true;
    pthread_cond_broadcast(&prefetch->changed);
    if (prefetch->source->ops->interrupt != NULL)
        prefetch->source->ops->interrupt(prefetch->source);
    int code = 0;
    // After a stall nobody waits another full period for the same reader, nor after a stop.
    if (prefetch->stall.text[0] != '\0' || prefetch->given_up)
        limit = timer_after(fmin(patience, 1.0));
    while (prefetch->readers_running > 0 && code != ETIMEDOUT)
        code = pthread_cond_timedwait(&prefetch->changed, &prefetch->lock, &limit);
    bool ended = prefetch->readers_running == 0;
    pthread_mutex_unlock(&prefetch->lock);
    return ended;
}

bool prefetch_stop(struct prefetch *prefetch)
{
    if (prefetch == NULL || prefetch->stopped)
        return true;
    if (prefetch->left_behind)
        return false;
    if (!await_readers(prefetch)) {
        log_warn("a reader of shards does not come back; it is left behind");
        prefetch->left_behind = true;
        for (int i = 0; i < prefetch->reader_count; i++)
            pthread_detach(prefetch->readers[i].thread);
        return false;
    }
    for (int i = 0; i < prefetch->reader_count; i++)
        pthread_join(prefetch->readers[i].thread, NULL);
    prefetch->stopped = true;
    return true;
}

bool prefetch_close(struct prefetch *prefetch)
{
    if (!prefetch_stop(prefetch))
        return false;
    if (prefetch == NULL)
        return true;
    for (int64_t i = 0; i < prefetch->place_count; i++)
        row_close(&prefetch->places[i].row, prefetch->options.host_free);
    if (prefetch->packed)
        packing_release(&prefetch->packing);
    pthread_cond_destroy(&prefetch->changed);
    pthread_mutex_destroy(&prefetch->lock);
    free(prefetch->places);
    free(prefetch->readers);
    free(prefetch);
    return true;
}

// ---- the step's side --------------------------------------------------------------------------------

static struct place *place_of_turn(struct prefetch *prefetch, int64_t sequence)
{
    for (int64_t i = 0; i < prefetch->place_count; i++) {
        struct place *place = &prefetch->places[i];
        if (place->state == PLACE_READY && place->sequence == sequence)
            return place;
    }
    return NULL;
}

static bool all_borrowed(const struct prefetch *prefetch)
{
    for (int64_t i = 0; i < prefetch->place_count; i++) {
        if (prefetch->places[i].state != PLACE_BORROWED)
            return false;
    }
    return true;
}

static void describe_stall(struct prefetch *prefetch)
{
    const struct documents *documents = prefetch->source->documents;
    for (int i = 0; i < prefetch->reader_count; i++) {
        const struct document *document = prefetch->readers[i].document;
        if (document != NULL) {
            error_set(&prefetch->stall,
                      "%s: document %d: reading made no progress for %.0f seconds; is the file "
                      "system there?",
                      documents->shards[document->shard].path, (int)document->index,
                      prefetch->options.stall_seconds);
            return;
        }
    }
    error_set(&prefetch->stall, "packing epoch %llu took more than %.0f seconds",
              (unsigned long long)prefetch->epoch, prefetch->options.stall_seconds);
}

// Nothing to wait for any more, although the row is not there: the end, a stall, or a stop.
static bool wait_is_over(struct prefetch *prefetch)
{
    const struct prefetch_options *options = &prefetch->options;
    if (options->stop != NULL && options->stop(options->stop_context))
        prefetch->given_up = true;
    return prefetch->wanted == prefetch->end_sequence || prefetch->stall.text[0] != '\0' ||
           prefetch->given_up;
}

// Waits until the wanted row is ready; NULL: there is none, by the end, a stall or a stop. Lock held.
static struct place *wait_for_row(struct prefetch *prefetch)
{
    const double look = 0.2; // seconds between looks at stop()
    struct place *place;
    uint64_t seen = prefetch->progress;
    double stalls = timer_now() + prefetch->options.stall_seconds;
    while ((place = place_of_turn(prefetch, prefetch->wanted)) == NULL && !wait_is_over(prefetch)) {
        double left = stalls - timer_now();
        struct timespec limit = timer_after(left < look ? fmax(left, 0.0) : look);
        pthread_cond_timedwait(&prefetch->changed, &prefetch->lock, &limit);
        if (prefetch->progress != seen) {
            seen = prefetch->progress;
            stalls = timer_now() + prefetch->options.stall_seconds;
        } else if (timer_now() >= stalls) {
            describe_stall(prefetch);
        }
    }
    return place;
}

static void lend(struct prefetch *prefetch, struct place *place, struct row **row)
{
    place->state = PLACE_BORROWED;
    prefetch->wanted++;
    *row = &place->row;
}

int prefetch_next(struct prefetch *prefetch, struct row **row, double *wait_seconds,
                  struct error *err)
{
    double start = timer_now();
    pthread_mutex_lock(&prefetch->lock);
    BUG_UNLESS(!all_borrowed(prefetch));
    struct place *place = wait_for_row(prefetch);
    int result = 0;
    if (place != NULL && place->failed >= 0) {
        result = error_set(err, "%s", place->error.text);
    } else if (place != NULL) {
        lend(prefetch, place, row);
        result = 1;
    } else if (prefetch->stall.text[0] != '\0') {
        result = error_set(err, "%s", prefetch->stall.text);
    } else if (prefetch->given_up) {
        result = 2;
    }
    pthread_mutex_unlock(&prefetch->lock);
    *wait_seconds = timer_now() - start;
    return result;
}

bool prefetch_try_next(struct prefetch *prefetch, struct row **row)
{
    pthread_mutex_lock(&prefetch->lock);
    struct place *place = place_of_turn(prefetch, prefetch->wanted);
    bool ready = place != NULL && place->failed < 0;
    if (ready)
        lend(prefetch, place, row);
    pthread_mutex_unlock(&prefetch->lock);
    return ready;
}

void prefetch_return(struct prefetch *prefetch, struct row *row)
{
    struct place *place = NULL;
    pthread_mutex_lock(&prefetch->lock);
    for (int64_t i = 0; i < prefetch->place_count; i++) {
        if (&prefetch->places[i].row == row)
            place = &prefetch->places[i];
    }
    BUG_UNLESS(place != NULL && place->state == PLACE_BORROWED);
    place->state = PLACE_FREE;
    pthread_cond_broadcast(&prefetch->changed);
    pthread_mutex_unlock(&prefetch->lock);
}
