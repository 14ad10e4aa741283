// Owns `dtrain data order` and `dtrain data manifest`.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "data/manifest.h"
#include "data/spool.h"
#include "trainer/commands.h"
#include "trainer/files.h"
#include "trainer/run_spool.h"

static const char *or_none(const char *path)
{
    return path != NULL ? path : "-";
}

static void print_head(const struct session *session, int64_t end)
{
    const struct config *config = session->config;
    const struct data_config *data = &config->data;
    uint64_t order = spool_order(&session->train, (uint64_t)config->run.seed, data->seq_len);
    printf("# dtrain-order 1\n# order %016llx\n", (unsigned long long)order);
    printf("# documents %zu\n# end %lld\n", session->train.count, (long long)end);
    printf("# bytes %llu\n", (unsigned long long)config_spool_bytes(config));
    printf("# manifest %s\n# spool %s\n", or_none(data->manifest), or_none(data->spool));
    printf("# serial epoch step doc_id tokens\n");
}

// The rows of an epoch whose steps are from..total. *step: of the epoch's first row, then of the next
// epoch's.
static void print_epoch(const struct session *session, uint64_t epoch, int64_t from, int64_t total,
                        int64_t *step)
{
    const struct documents *documents = &session->train;
    int64_t per_step = session->config->data.rows_per_step;
    long long serial = (long long)epoch * (long long)documents->count;
    struct packing packing;
    session_pack_epoch(session, epoch, &packing);
    for (int64_t r = 0; r < packing.rows; r++) {
        int64_t at = *step + r / per_step;
        for (int64_t i = packing.row_offsets[r]; i < packing.row_offsets[r + 1]; i++) {
            const struct document *d = &documents->items[packing.document[i]];
            if (at >= from && at <= total)
                printf("%lld %llu %lld %llu %d\n", serial + (long long)i, (unsigned long long)epoch,
                       (long long)at, (unsigned long long)d->id, (int)d->length);
        }
    }
    *step += (packing.rows + per_step - 1) / per_step;
    packing_release(&packing);
}

static int print_order(const struct session *session, int64_t from, struct error *err)
{
    struct session_steps steps;
    session_count_steps(session, &steps);
    int result = 0;
    if (from > steps.total) {
        result = error_set(err, "--from-step %lld: the run has %lld steps", (long long)from,
                           (long long)steps.total);
    } else {
        print_head(session, run_spool_end(session, &steps));
        int64_t step = 1;
        for (uint64_t epoch = 0; epoch < steps.epochs; epoch++)
            print_epoch(session, epoch, from, steps.total, &step);
    }
    session_steps_release(&steps);
    return result;
}

// Reads what the order follows from and nothing else: it may be asked for where target and validation
// shards are not.
static int load(struct config *config, const struct options *options, struct error *err)
{
    if (config_load(config, options->config, options->sets, options->set_count, err) != 0)
        return -1;
    log_configure((enum log_level)config->log.level, 0);
    for (size_t i = 0; i < config->data.val.count; i++)
        free(config->data.val.items[i]);
    config->data.val.count = 0;
    return config_expand_files(config, err);
}

int command_data_order(const struct options *options)
{
    struct config config;
    struct session session = {.config = &config};
    struct error err = {0};
    config_init(&config);
    int result = load(&config, options, &err);
    if (result == 0)
        result = session_open_train(&session, &err);
    if (result == 0)
        result = print_order(&session, options->from_step > 0 ? options->from_step : 1, &err);
    if (result != 0)
        log_error("%s", err.text);
    documents_close(&session.train);
    config_release(&config);
    return result == 0 ? EXIT_DONE : EXIT_REFUSED;
}

int command_data_manifest(const struct options *options)
{
    struct error err = {0};
    const char *const *shards = (const char *const *)options->files;
    int result = files_check_replace(options->out, &err);
    if (result != 0)
        error_prefix(&err, "--out");
    else
        result = manifest_write(options->out, shards, (size_t)options->file_count, &err);
    if (result == 0)
        return EXIT_DONE;
    log_error("%s", err.text);
    return result > 0 ? EXIT_FAILED : EXIT_REFUSED;
}
