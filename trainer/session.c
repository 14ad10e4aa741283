// Owns the opening of a model with its data, for all commands.
#include "trainer/session.h"

#include <stdlib.h>
#include <string.h>

#include "base/host_memory.h"
#include "base/log.h"
#include "base/rng.h"
#include "trainer/run_spool.h"

static void drop_texts(struct config_texts *texts)
{
    for (size_t i = 0; i < texts->count; i++)
        free(texts->items[i]);
    free(texts->items);
    *texts = (struct config_texts){.items = NULL};
}

// OpenBLAS asks again and again for a thread's buffer that `ulimit -v` does not leave it.
static int check_address_space(const struct config *config, struct error *err)
{
    int64_t threads = execution_threads(config);
    if (host_memory_address_space((int)threads) > 0)
        return 0;
    return error_set(err,
                     "ulimit -v leaves no address space for tensors beside libraries and %lld "
                     "threads; raise it, or ask the batch system for more virtual memory",
                     (long long)threads);
}

int session_config(struct config *config, const char *file, const char *const *sets,
                   size_t set_count, int needs, struct error *err)
{
    struct error warnings = {0}, shared = {0};
    if (config_load(config, file, sets, set_count, err) != 0)
        return -1;
    log_configure((enum log_level)config->log.level, log_rank());
    // The same for all ranks.
    if (config_warnings(config, &warnings) > 0 && log_rank() == 0)
        log_warn("%s", warnings.text);
    if ((needs & SESSION_TRAIN) == 0) {
        drop_texts(&config->data.train);
        free(config->data.manifest);
        config->data.manifest = NULL;
    }
    if ((needs & SESSION_VAL) == 0)
        drop_texts(&config->data.val);
    if (config_check_files(config, err) != 0 || check_address_space(config, err) != 0 ||
        config_expand_files(config, err) != 0)
        return -1;
    if (config_shared_files(config, &shared) > 0 && log_rank() == 0)
        log_warn("%s", shared.text);
    return 0;
}

int session_check_built(const struct config *config, struct error *err)
{
    if (config->target.path == NULL)
        return error_set(err, "target.path: required; a target directory or Hugging Face model");
    return 0;
}

int session_open_train(struct session *session, struct error *err)
{
    const struct config *config = session->config;
    const struct data_config *data = &config->data;
    if (data->manifest != NULL) {
        if (documents_open_manifest(&session->train, data->manifest, data->seq_len,
                                    data->on_bad_sample, err) != 0)
            return error_prefix(err, "data.manifest");
        session->has_train = true;
        return run_spool_check(config, &session->train, err);
    }
    if (data->train.count == 0)
        return error_set(err, "data.train: required; feature shards to train on");
    if (documents_open(&session->train, &data->train, data->seq_len, data->on_bad_sample, err) != 0)
        return error_prefix(err, "data.train");
    session->has_train = true;
    return 0;
}

static int open_documents(struct session *session, int needs, struct error *err)
{
    const struct config *config = session->config;
    if ((needs & SESSION_TRAIN) && session_open_train(session, err) != 0)
        return -1;
    if ((needs & SESSION_VAL) && config->data.val.count > 0) {
        if (documents_open(&session->val, &config->data.val, config->data.seq_len,
                           config->data.on_bad_sample, err) != 0)
            return error_prefix(err, "data.val");
        session->has_val = true;
    }
    return 0;
}

static bool same_ids(const struct documents *a, const struct documents *b)
{
    return a->shard_layers == b->shard_layers &&
           memcmp(a->layer_ids, b->layer_ids, (size_t)a->shard_layers * sizeof(*a->layer_ids)) == 0;
}

// Training and validation shards must be of one target and one layout.
static int check_agreement(const struct session *session, struct error *err)
{
    const struct documents *a = &session->train, *b = &session->val;
    if (!session->has_train || !session->has_val)
        return 0;
    if (a->planes != b->planes || a->hidden_size != b->hidden_size ||
        a->last_hidden != b->last_hidden || a->features.float8 != b->features.float8 ||
        !same_ids(a, b))
        return error_set(err,
                         "data.val: %s and %s of data.train differ in dtype, planes, layer ids, "
                         "hidden size or last_hidden; extract both with the same settings",
                         b->shards[0].path, a->shards[0].path);
    return 0;
}

static int check_target(const struct session *session, struct error *err)
{
    const struct documents *d = session_documents(session);
    const struct target *target = &session->target;
    if (d->hidden_size != target->hidden_size)
        return error_set(err, "%s: hidden_size %lld, but target %s has %lld", d->shards[0].path,
                         (long long)d->hidden_size, target->path, (long long)target->hidden_size);
    if (d->vocab_size != target->vocab_size)
        return error_set(err, "%s: vocab_size %lld, but the head of target %s has %lld rows",
                         d->shards[0].path, (long long)d->vocab_size, target->path,
                         (long long)target->vocab_size);
    return 0;
}

// Without a last hidden state there is no teacher.
static int check_teacher(const struct session *session, struct error *err)
{
    const struct loss_config *loss = &session->config->loss;
    if (session->last_plane >= 0)
        return 0;
    if (loss->kl + loss->reverse_kl + loss->js + loss->ce_teacher + loss->tv + loss->nla +
            loss->lk >
        0.0)
        return error_set(err,
                         "%s: last_hidden is absent, so there is no teacher: only loss.ce_data "
                         "can have weight",
                         session_documents(session)->shards[0].path);
    return 0;
}

// The draft vocabulary: of this target, and counted from the documents that are trained on.
static int open_map(struct session *session, struct error *err)
{
    const char *path = session->config->drafter.draft_vocab;
    if (session->config->drafter.kind != DRAFTER_EAGLE3 || path == NULL)
        return 0;
    if (vocab_map_read(&session->map, session_documents(session), session->has_train, path, err) !=
        0)
        return error_prefix(err, "drafter.draft_vocab");
    session->has_map = true;
    session->sizes.draft_vocab = session->map.draft_size;
    log_info("draft vocabulary %s: %lld of %lld tokens, %.2f %% of the supervised ones", path,
             (long long)session->map.draft_size, (long long)session->map.vocab_size,
             100.0 * session->map.coverage);
    return 0;
}

static int choose_backend(struct session *session, struct error *err)
{
    struct error why = {0};
    const struct backend *cuda = backend_cuda(&why);
    int device = session->config->run.device;
    if (device == DEVICE_CUDA && cuda == NULL)
        return error_set(err, "run.device: cuda: %s", why.text);
    session->backend = device != DEVICE_CPU && cuda != NULL ? cuda : backend_cpu();
    return 0;
}

const struct documents *session_documents(const struct session *session)
{
    return session->has_train ? &session->train : &session->val;
}

int session_open_data(struct session *session, struct config *config, int needs, struct error *err)
{
    *session = (struct session){.config = config};
    if (session_check_built(config, err) != 0 || open_documents(session, needs, err) != 0)
        return config_name_places(config, err);
    return 0;
}

static int open_model(struct session *session, struct error *err)
{
    struct config *config = session->config;
    if (!session->has_train && !session->has_val)
        return error_set(err, "data.val: required; feature shards to score");
    if (target_open(&session->target, config->target.path, err) != 0)
        return error_prefix(err, "target.path");
    int64_t ids[DRAFTER_MAX_LAYERS];
    if (check_agreement(session, err) != 0 || check_target(session, err) != 0)
        return -1;
    const struct documents *documents = session_documents(session);
    if (documents_select_planes(documents, &config->target.layer_ids, session->target.layers,
                                session->plane, DRAFTER_MAX_LAYERS, &session->features,
                                &session->last_plane, err) != 0)
        return -1;
    if (check_teacher(session, err) != 0)
        return -1;
    for (int64_t l = 0; l < session->features; l++)
        ids[l] = documents->layer_ids[session->plane[l]];
    if (drafter_sizes_resolve(&session->sizes, &config->drafter, &session->target, ids,
                              session->features, err) != 0)
        return -1;
    if (open_map(session, err) != 0)
        return -1;
    drafter_params(&session->sizes, &session->params);
    session->target_name =
        config->target.name != NULL ? config->target.name : documents->target_model;
    if (choose_backend(session, err) != 0)
        return -1;
    return execution_choose(&session->execution, config, &session->sizes, session->backend, err);
}

int session_open_model(struct session *session, struct error *err)
{
    return open_model(session, err) == 0 ? 0 : config_name_places(session->config, err);
}

int session_open(struct session *session, struct config *config, int needs, struct error *err)
{
    if (session_open_data(session, config, needs, err) != 0)
        return -1;
    return session_open_model(session, err);
}

static size_t memory_left(const struct backend *backend)
{
    size_t left = 0, total = 0;
    backend->memory(&left, &total);
    return left;
}

int session_join(struct session *session, struct ranks *ranks, struct error *err)
{
    size_t before = memory_left(session->backend), after;
    if (ranks_connect(ranks, session->backend, err) != 0)
        return -1;
    after = memory_left(session->backend);
    session->joined_bytes = after < before ? before - after : 0;
    session->ranks = ranks;
    session->rank = ranks_rank(ranks);
    session->rank_count = ranks_size(ranks);
    session->execution.world_size = ranks_size(ranks);
    ownership_open(&session->ownership, &session->params, ranks_size(ranks), ranks_rank(ranks));
    int64_t local = ranks_local(ranks) + 1;
    ranks_max(ranks, &local, 1);
    session->local_ranks = (int)local;
    return 0;
}

int session_ranks(const struct session *session)
{
    return session->ranks != NULL ? session->rank_count : 1;
}

int session_rank(const struct session *session)
{
    return session->ranks != NULL ? session->rank : 0;
}

double session_stop_seconds(const struct session *session)
{
    // The other ranks wait for this one, at most parallel.timeout, while it ends two kinds of readers.
    return session_ranks(session) > 1 ? (double)session->config->parallel.timeout / 4.0 : 0.0;
}

void session_close(struct session *session)
{
    ownership_close(&session->ownership);
    vocab_map_release(&session->map);
    params_release(&session->params);
    target_close(&session->target);
    documents_close(&session->train);
    documents_close(&session->val);
}

int session_open_release(const struct session *session, struct release *release, struct error *err)
{
    const struct drafter_config *drafter = &session->config->drafter;
    *release = (struct release){.layout = RELEASE_ZLAB};
    if (drafter->init_from == NULL)
        return 0;
    const struct release_wanted wanted = {.sizes = &session->sizes,
                                          .params = &session->params,
                                          .target = &session->target,
                                          .allow = &drafter->init_allow,
                                          .map = session->has_map ? &session->map : NULL};
    if (release_open(release, drafter->init_from, &wanted, err) != 0)
        return error_prefix(err,
                            "drafter.init_from: not the drafter of this config (drafter.init_allow "
                            "accepts by name)");
    log_info("starting from the weights of %s", drafter->init_from);
    return 0;
}

struct step_setup session_step_setup(const struct session *session, bool training)
{
    return (struct step_setup){.config = session->config,
                               .execution = &session->execution,
                               .backend = session->backend,
                               .target = &session->target,
                               .sizes = &session->sizes,
                               .params = &session->params,
                               .map = session->has_map ? &session->map : NULL,
                               .planes = session_documents(session)->planes,
                               .plane = session->plane,
                               .last_plane = session->last_plane,
                               .last_hidden = session_documents(session)->last_hidden,
                               .float8 = session_documents(session)->features.float8,
                               .training = training,
                               .ownership = session->ranks != NULL ? &session->ownership : NULL,
                               .ranks = session->ranks};
}

uint64_t session_fingerprint(const struct session *session)
{
    uint64_t data = rng_mix(session->train.fingerprint, session->train.kept_fingerprint);
    uint64_t all = rng_mix(data, target_fingerprint(&session->target));
    return session->has_map ? rng_mix(all, vocab_map_hash(&session->map)) : all;
}

void session_pack_epoch(const struct session *s, uint64_t epoch, struct packing *packing)
{
    packing_make(packing, &s->train, s->config->data.seq_len, (uint64_t)s->config->run.seed, epoch,
                 true);
}

void session_share_rows(const struct session *s, const struct packing *packing,
                        struct row_shares *shares)
{
    struct row_work work = row_work_of(&s->sizes, &s->params, s->config->loss.full_vocab_metrics);
    int64_t most = s->config->anchors.max_anchors;
    if (s->sizes.kind == DRAFTER_EAGLE3) // all positions
        most = 0;
    if (s->config->anchors.per == ANCHORS_PER_ROW)
        work.most_per_row = most;
    else
        work.most_per_document = most;
    row_shares_make(shares, packing, &s->train, &work, s->config->data.rows_per_step,
                    session_ranks(s));
}

void session_pack_own(void *session, uint64_t epoch, struct packing *packing)
{
    const struct session *s = session;
    struct row_shares shares;
    session_pack_epoch(s, epoch, packing);
    if (session_ranks(s) == 1)
        return;
    session_share_rows(s, packing, &shares);
    packing_keep(packing, shares.owner, session_rank(s));
    row_shares_release(&shares);
}

void session_pack_validation(const struct session *s, int64_t limit, struct packing *packing)
{
    packing_make(packing, &s->val, s->config->data.seq_len, 0, 0, false);
    if (limit > 0 && limit < packing->rows)
        packing->rows = limit;
    if (session_ranks(s) == 1 || packing->rows == 0)
        return;
    struct row_shares shares;
    struct row_work work = row_work_of(&s->sizes, &s->params, true);
    row_shares_make(&shares, packing, &s->val, &work, packing->rows, session_ranks(s));
    packing_keep(packing, shares.owner, session_rank(s));
    row_shares_release(&shares);
}

void session_count_steps(const struct session *session, struct session_steps *steps)
{
    const struct config *config = session->config;
    int64_t per_step = config->data.rows_per_step, most = config->run.max_steps;
    size_t capacity = 0;
    *steps = (struct session_steps){.epoch_rows = NULL};
    while (steps->epochs < (uint64_t)config->run.epochs && (most == 0 || steps->total < most)) {
        struct packing packing;
        session_pack_epoch(session, steps->epochs, &packing);
        if (steps->epochs == capacity) {
            capacity = 2 * capacity + 16;
            steps->epoch_rows =
                memory_resize(steps->epoch_rows, capacity, sizeof(*steps->epoch_rows));
        }
        steps->epoch_rows[steps->epochs++] = packing.rows;
        steps->total += (packing.rows + per_step - 1) / per_step;
        packing_release(&packing);
    }
    if (most > 0 && steps->total > most)
        steps->total = most;
}

void session_steps_release(struct session_steps *steps)
{
    free(steps->epoch_rows);
    *steps = (struct session_steps){.epoch_rows = NULL};
}
