// Owns the waiting for shards of a spool, the proof that they hold what the order says, and their
// removal. Names and small files are spool_folder.c's; when documents are used is the trainer's to say.
#include "data/spool.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/memory.h"
#include "base/rng.h"
#include "base/timer.h"
#include "data/shard_helper.h"
#include "data/spool_folder.h"

// Seconds between looks into the folder: other machines' files are not announced.
static const double look_seconds = 0.05;

struct open_shard {
    int64_t first, last; // serial numbers
    struct shard shard;
    int users; // reads in it
};

// A read that waits for its shard.
struct waiter {
    int64_t serial;
    struct waiter *next;
};

struct spool {
    struct source source; // first, so that a source is a spool
    char *folder;
    bool owner;
    int lock_fd;
    struct shard_helper *helper; // the looking reader's
    pthread_mutex_t lock;
    pthread_cond_t changed; // shards, looking, stopping
    struct open_shard **shards;
    size_t shard_count, shard_capacity;
    struct waiter *waiters;
    bool looking;  // a reader is in the folder
    double looked; // when a reader last did not find its shard there
    bool stopping;
    struct spool_state state;
    int64_t bytes;
    bool unsettled; // the state could not be written, or a shard not be removed
};

uint64_t spool_order(const struct documents *documents, uint64_t seed, int64_t seq_len)
{
    uint64_t what = rng_mix(documents->fingerprint, documents->kept_fingerprint);
    return rng_mix(what, rng_mix(seed, (uint64_t)seq_len));
}

// ---- shards that are open ------------------------------------------------------------------------

static struct open_shard *find_open(const struct spool *spool, int64_t serial)
{
    for (size_t i = 0; i < spool->shard_count; i++)
        if (spool->shards[i]->first <= serial && serial <= spool->shards[i]->last)
            return spool->shards[i];
    return NULL;
}

// Closes those that nobody reads and nobody will. Lock held.
static void close_used(struct spool *spool)
{
    size_t kept = 0;
    for (size_t i = 0; i < spool->shard_count; i++) {
        struct open_shard *open = spool->shards[i];
        if (open->users > 0 || open->last >= spool->state.serial) {
            spool->shards[kept++] = open;
            continue;
        }
        shard_close(&open->shard);
        free(open);
    }
    spool->shard_count = kept;
}

// The shard must be of the manifest's target and hold as many documents as its name says. Which
// documents is seen when they are read.
static int check_shard(const struct spool *spool, const struct spool_file *file,
                       const struct shard *shard, struct error *err)
{
    struct error found = {""};
    const struct shard *manifest = &spool->source.documents->shards[0];
    int64_t documents = file->last - file->first + 1;
    int result = shard_compare(manifest, shard, &found);
    if (shard->documents != documents)
        result = error_add(&found, "%s: holds %lld documents, its name says %lld", shard->path,
                           (long long)shard->documents, (long long)documents);
    if (!shard->has_doc_ids)
        result = error_add(&found, "%s: doc_id is missing; a spool's shards need it", shard->path);
    if (result != 0) {
        error_add(&found, "%s is not of this run; remove it, and what wrote it", shard->path);
        *err = found;
    }
    return result;
}

// Opens the file without the lock, adds it with it.
static int open_file(struct spool *spool, const struct spool_file *file, struct error *err)
{
    char *path = spool_file_path(spool->folder, file->first, file->last);
    struct open_shard *open = memory_alloc(1, sizeof(*open));
    open->first = file->first;
    open->last = file->last;
    int result = shard_open_helped(&open->shard, path, spool->helper, err);
    if (result == 0 && check_shard(spool, file, &open->shard, err) != 0) {
        shard_close(&open->shard);
        result = -1;
    }
    free(path);
    if (result != 0) {
        free(open);
        return -1;
    }
    pthread_mutex_lock(&spool->lock);
    if (spool->shard_count == spool->shard_capacity) {
        spool->shard_capacity = 2 * spool->shard_capacity + 16;
        spool->shards = memory_resize(spool->shards, spool->shard_capacity, sizeof(*spool->shards));
    }
    spool->shards[spool->shard_count++] = open;
    pthread_mutex_unlock(&spool->lock);
    return 0;
}

// Two shards with the same document are of different cuts of the order, whichever of them is looked for.
static int check_overlaps(const char *folder, const struct spool_listing *listing,
                          struct error *err)
{
    for (size_t i = 1; i < listing->count; i++) {
        const struct spool_file *one = &listing->items[i - 1], *next = &listing->items[i];
        if (next->first <= one->last)
            return error_set(err,
                             "%s: features-%012lld-%012lld.h5 and features-%012lld-%012lld.h5 "
                             "hold the same documents; remove what is not of this run",
                             folder, (long long)one->first, (long long)one->last,
                             (long long)next->first, (long long)next->last);
    }
    return 0;
}

// Looks for the shard with the document and opens it: 1, 0 when it is not there, -1. Without the lock.
static int look_for(struct spool *spool, int64_t serial, struct error *err)
{
    struct spool_listing listing;
    const struct spool_file *found = NULL;
    if (spool_list(&listing, spool->folder, err) != 0)
        return -1;
    int result = check_overlaps(spool->folder, &listing, err);
    for (size_t i = 0; i < listing.count && found == NULL; i++)
        if (listing.items[i].first <= serial && serial <= listing.items[i].last)
            found = &listing.items[i];
    if (result == 0 && found != NULL)
        result = open_file(spool, found, err) == 0 ? 1 : -1;
    pthread_mutex_lock(&spool->lock);
    spool->bytes = listing.bytes;
    pthread_mutex_unlock(&spool->lock);
    spool_listing_release(&listing);
    return result;
}

static void wait_shortly(struct spool *spool)
{
    struct timespec until = timer_after(look_seconds);
    pthread_cond_timedwait(&spool->changed, &spool->lock, &until);
}

static void remove_waiter(struct spool *spool, const struct waiter *waiter)
{
    struct waiter **at = &spool->waiters;
    while (*at != waiter)
        at = &(*at)->next;
    *at = waiter->next;
}

// One look, by one reader at a time. Lock held, given up meanwhile.
static int take_look(struct spool *spool, int64_t serial, struct error *err)
{
    spool->looking = true;
    pthread_mutex_unlock(&spool->lock);
    int result = look_for(spool, serial, err);
    pthread_mutex_lock(&spool->lock);
    spool->looking = false;
    if (result == 0)
        spool->looked = timer_now();
    pthread_cond_broadcast(&spool->changed);
    return result;
}

// The open shard with the document, marked as in use; waits as long as it takes. NULL: err says why.
static struct open_shard *acquire(struct spool *spool, int64_t serial, struct error *err)
{
    struct open_shard *open;
    struct waiter waiter = {.serial = serial};
    int result = 0;
    pthread_mutex_lock(&spool->lock);
    waiter.next = spool->waiters;
    // cppcheck-suppress autoVariables ; it leaves the list before this returns
    spool->waiters = &waiter;
    while ((open = find_open(spool, serial)) == NULL && result >= 0) {
        if (spool->stopping)
            result = error_set(err, "%s: the wait for a shard was ended", spool->folder);
        else if (!spool->looking && timer_now() - spool->looked >= look_seconds)
            result = take_look(spool, serial, err);
        if (result == 0)
            wait_shortly(spool);
    }
    remove_waiter(spool, &waiter);
    if (open != NULL)
        open->users++;
    pthread_mutex_unlock(&spool->lock);
    return open;
}

static void give_back(struct spool *spool, struct open_shard *open)
{
    pthread_mutex_lock(&spool->lock);
    open->users--;
    close_used(spool);
    pthread_mutex_unlock(&spool->lock);
}

// ---- reading -------------------------------------------------------------------------------------

// The document that the shard has in this place must be the order's: identity, then every token.
static int check_document(const struct open_shard *open, const struct document *document,
                          int64_t serial, struct error *err)
{
    const struct shard *shard = &open->shard;
    int64_t index = serial - open->first;
    int64_t length = shard->doc_offsets[index + 1] - shard->doc_offsets[index];
    if (shard->doc_ids[index] != document->id)
        return error_set(err,
                         "%s: document %lld has doc_id %llu, but the order has %llu at %lld: the "
                         "shard was written for another order (seed, seq_len, manifest); remove it",
                         shard->path, (long long)index, (unsigned long long)shard->doc_ids[index],
                         (unsigned long long)document->id, (long long)serial);
    if (length < document->length)
        return error_set(err, "%s: document %lld (doc_id %llu) has %lld tokens, the manifest %lld",
                         shard->path, (long long)index, (unsigned long long)document->id,
                         (long long)length, (long long)document->length);
    return 0;
}

static int check_tokens(const struct shard *shard, int64_t index, int64_t length,
                        const int32_t *ids, const uint8_t *mask, struct error *err)
{
    int32_t *own_ids = memory_alloc((size_t)length, sizeof(*own_ids));
    uint8_t *own_mask = memory_alloc((size_t)length, sizeof(*own_mask));
    int64_t first = shard->doc_offsets[index], t = 0;
    int result = shard_read_ids(shard, first, length, own_ids, err);
    if (result == 0)
        result = shard_read_mask(shard, first, length, own_mask, err);
    while (result == 0 && t < length && own_ids[t] == ids[t] && own_mask[t] == mask[t])
        t++;
    if (result == 0 && t < length)
        result = error_set(err,
                           "%s: document %lld: row %lld: token %d with loss_mask %d, but %d with "
                           "%d in the manifest; remove the shard",
                           shard->path, (long long)index, (long long)t, (int)own_ids[t],
                           (int)own_mask[t], (int)ids[t], (int)mask[t]);
    free(own_mask);
    free(own_ids);
    return result;
}

static int read_features(struct spool *spool, const struct open_shard *open,
                         const struct document *document, int64_t serial, const int32_t *ids,
                         const uint8_t *mask, bf16 *hidden, struct error *err)
{
    const struct shard *shard = &open->shard;
    int64_t index = serial - open->first, length = document->length;
    double start = timer_now();
    if (check_document(open, document, serial, err) != 0 ||
        check_tokens(shard, index, length, ids, mask, err) != 0 ||
        shard_read_hidden(shard, shard->doc_offsets[index], length, hidden, err) != 0)
        return -1;
    source_count_disk(&spool->source, start);
    if (shard_check_document(shard, index, length, ids, mask, hidden, spool->source.check_crc,
                             err) != 0)
        return SOURCE_BAD;
    return 0;
}

static int read_from_spool(struct source *source, const struct document *document, int64_t serial,
                           int32_t *ids, uint8_t *mask, bf16 *hidden, struct error *err)
{
    struct spool *spool = (struct spool *)source;
    const struct shard *manifest = &source->documents->shards[document->shard];
    if (shard_read_ids(manifest, document->first, document->length, ids, err) != 0 ||
        shard_read_mask(manifest, document->first, document->length, mask, err) != 0)
        return -1;
    struct open_shard *open = acquire(spool, serial, err);
    if (open == NULL)
        return -1;
    int result = read_features(spool, open, document, serial, ids, mask, hidden, err);
    give_back(spool, open);
    return result;
}

static void interrupt_spool(struct source *source)
{
    struct spool *spool = (struct spool *)source;
    pthread_mutex_lock(&spool->lock);
    spool->stopping = true;
    pthread_cond_broadcast(&spool->changed);
    pthread_mutex_unlock(&spool->lock);
}

// ---- what has been used --------------------------------------------------------------------------

// Removes the shards that lie wholly before the state's serial number.
static int remove_used(struct spool *spool, struct error *err)
{
    struct spool_listing listing;
    int result = 0;
    if (spool_list(&listing, spool->folder, err) != 0)
        return -1;
    for (size_t i = 0; i < listing.count; i++) {
        const struct spool_file *file = &listing.items[i];
        if (file->last >= spool->state.serial)
            continue;
        char *path = spool_file_path(spool->folder, file->first, file->last);
        if (unlink(path) == 0 || errno == ENOENT)
            listing.bytes -= file->bytes;
        else
            result = error_set(err, "%s: can not be removed: %s", path, strerror(errno));
        free(path);
    }
    spool->bytes = listing.bytes;
    spool_listing_release(&listing);
    return result;
}

// The state first: an extractor that sees it never begins what is about to be removed.
static int settle(struct spool *spool, struct error *err)
{
    if (!spool->owner)
        return 0;
    if (spool_state_write(spool->folder, &spool->state, err) != 0)
        return -1;
    return remove_used(spool, err);
}

// A full disk or a folder that is gone for a while holds the extractor up, not the steps that have their
// features; later steps and waits try again.
static void settle_or_warn(struct spool *spool)
{
    struct error err = {""};
    int result = settle(spool, &err);
    if (result != 0 && !spool->unsettled)
        log_warn("data.spool: %s; the extractor may stand still until this is mended", err.text);
    spool->unsettled = result != 0;
}

// A run that waits completes no step, so that the wait itself must try again. Lock held.
static void settle_what_failed(struct spool *spool)
{
    if (spool->unsettled)
        settle_or_warn(spool);
}

void spool_used(struct source *source, int64_t serial, int64_t needed)
{
    struct spool *spool = (struct spool *)source;
    pthread_mutex_lock(&spool->lock);
    spool->state.serial = serial;
    spool->state.needed = needed;
    close_used(spool);
    settle_or_warn(spool);
    pthread_mutex_unlock(&spool->lock);
}

void spool_finish(struct source *source)
{
    struct spool *spool = (struct spool *)source;
    pthread_mutex_lock(&spool->lock);
    spool->state.finished = true;
    settle_or_warn(spool);
    pthread_mutex_unlock(&spool->lock);
}

int64_t spool_missing(struct source *source, int64_t first, int64_t end)
{
    struct spool *spool = (struct spool *)source;
    struct spool_listing listing;
    struct error err = {""};
    pthread_mutex_lock(&spool->lock);
    settle_what_failed(spool);
    pthread_mutex_unlock(&spool->lock);
    if (spool_list(&listing, spool->folder, &err) != 0)
        return first; // a folder that can not be read now may be there later
    for (size_t i = 0; i < listing.count && first < end; i++)
        if (listing.items[i].first <= first && first <= listing.items[i].last)
            first = listing.items[i].last + 1;
    spool_listing_release(&listing);
    return first < end ? first : end;
}

bool spool_waiting(struct source *source, int64_t *serial)
{
    struct spool *spool = (struct spool *)source;
    bool found = false;
    pthread_mutex_lock(&spool->lock);
    settle_what_failed(spool);
    for (const struct waiter *w = spool->waiters; w != NULL; w = w->next) {
        if (w->serial >= spool->state.end || (found && w->serial >= *serial))
            continue;
        *serial = w->serial;
        found = true;
    }
    pthread_mutex_unlock(&spool->lock);
    return found;
}

int64_t spool_bytes(struct source *source)
{
    struct spool *spool = (struct spool *)source;
    pthread_mutex_lock(&spool->lock);
    int64_t bytes = spool->bytes;
    pthread_mutex_unlock(&spool->lock);
    return bytes;
}

// ---- opening and closing -------------------------------------------------------------------------

static void close_spool(struct source *source)
{
    struct spool *spool = (struct spool *)source;
    BUG_UNLESS(spool->waiters == NULL);
    for (size_t i = 0; i < spool->shard_count; i++) {
        shard_close(&spool->shards[i]->shard);
        free(spool->shards[i]);
    }
    shard_helper_close(spool->helper);
    if (spool->lock_fd >= 0)
        close(spool->lock_fd);
    pthread_cond_destroy(&spool->changed);
    pthread_mutex_destroy(&spool->lock);
    free(spool->shards);
    free(spool->folder);
    free(spool);
}

static bool is_stopping(void *context)
{
    struct spool *spool = context;
    pthread_mutex_lock(&spool->lock);
    bool stopping = spool->stopping;
    pthread_mutex_unlock(&spool->lock);
    return stopping;
}

static const struct source_ops spool_source_ops = {"spool", read_from_spool, interrupt_spool,
                                                   close_spool};

// What another run left must not be taken for this one's, nor be removed unasked.
static int check_order(const struct spool *spool, struct error *err)
{
    struct spool_state before;
    struct spool_listing listing;
    int there = spool_state_read(&before, spool->folder, err);
    if (there <= 0 || before.order == spool->state.order)
        return there < 0 ? -1 : 0;
    if (spool_list(&listing, spool->folder, err) != 0)
        return -1;
    size_t shards = listing.count;
    spool_listing_release(&listing);
    if (shards == 0)
        return 0;
    return error_set(err,
                     "%s: holds %zu shards for another order of documents (run.seed, data.seq_len "
                     "or data.manifest differ); remove them, or give every run a spool of its own",
                     spool->folder, shards);
}

static int begin(struct spool *spool, struct error *err)
{
    if (!spool->owner)
        return 0;
    spool->lock_fd = spool_lock(spool->folder, err);
    if (spool->lock_fd < 0 || check_order(spool, err) != 0)
        return -1;
    return settle(spool, err);
}

int source_open_spool(struct source **source, const struct spool_options *options,
                      struct error *err)
{
    struct spool *spool = memory_alloc(1, sizeof(*spool));
    spool->source = (struct source){
        .ops = &spool_source_ops, .documents = options->documents, .check_crc = options->check_crc};
    spool->folder = memory_strdup(options->folder);
    spool->owner = options->owner;
    spool->lock_fd = -1;
    spool->state = (struct spool_state){.order = options->order,
                                        .documents = (int64_t)options->documents->count,
                                        .serial = options->serial,
                                        .needed = options->needed,
                                        .end = options->end,
                                        .bytes = options->bytes};
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&spool->lock, NULL);
    pthread_cond_init(&spool->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    if (begin(spool, err) != 0) {
        close_spool(&spool->source);
        return error_prefix(err, "data.spool");
    }
    if (options->program != NULL)
        spool->helper = shard_helper_open(options->program, is_stopping, spool);
    *source = &spool->source;
    return 0;
}
