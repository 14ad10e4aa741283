// Owns the decision where a run continues.
#include "trainer/resume.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "trainer/checkpoint.h"
#include "trainer/checkpoint_folder.h"
#include "trainer/files.h"
#include "trainer/json_text.h"

// A checkpoint that was named, not left to be found.
static bool names_checkpoint(const struct resume *resume)
{
    return resume->choice != NULL && strcmp(resume->choice, "auto") != 0 &&
           strcmp(resume->choice, "none") != 0;
}

bool resume_likely(const struct resume *resume, const char *run_dir)
{
    char *checkpoints = memory_format("%s/checkpoints", run_dir);
    char *execution = memory_format("%s/execution.json", run_dir);
    bool likely = names_checkpoint(resume) || files_exists(checkpoints) || files_exists(execution);
    free(execution);
    free(checkpoints);
    return likely;
}

static int find_path(struct resume *resume, const struct run_folder *folder, struct error *err)
{
    if (names_checkpoint(resume)) {
        resume->path = memory_strdup(resume->choice);
        return 0;
    }
    if (checkpoint_find_latest(folder->checkpoints, &resume->path, err) != 0) {
        resume->failed = true;
        return -1;
    }
    if (resume->choice == NULL || strcmp(resume->choice, "auto") == 0 || resume->path == NULL)
        return 0;
    return error_set(err,
                     "--resume none: %s holds checkpoints of an earlier run; choose another "
                     "run.dir or remove them",
                     folder->checkpoints);
}

static int open_drafter_config(struct json_file *file, const char *checkpoint, struct error *err)
{
    char *path = memory_format("%s/config.json", checkpoint);
    int status = json_open(file, path, err);
    free(path);
    return status;
}

// The layers that the features came from, as the checkpoint's config.json lists them: the config may
// have left them to the shards.
static int compare_layers(const char *checkpoint, const struct session *session, struct error *err)
{
    struct json_file file;
    if (open_drafter_config(&file, checkpoint, err) != 0)
        return -1;
    int status = 0;
    const struct drafter_sizes *sizes = &session->sizes;
    bool eagle3 = sizes->kind == DRAFTER_EAGLE3;
    const cJSON *own =
        cJSON_GetObjectItemCaseSensitive(file.root, eagle3 ? "eagle_config" : "dflash_config");
    const cJSON *ids = cJSON_GetObjectItemCaseSensitive(
        own, eagle3 ? "eagle_aux_hidden_state_layer_ids" : "target_layer_ids");
    bool same = cJSON_GetArraySize(ids) == sizes->features;
    for (int l = 0; same && l < sizes->features; l++)
        same = cJSON_GetArrayItem(ids, l)->valuedouble == (double)sizes->target_layer_ids[l];
    if (!same) {
        char *trained = cJSON_PrintUnformatted(ids);
        status = error_set(err,
                           "target.layer_ids: %s was trained on the layers %s, which are not the "
                           "ones in use with these shards",
                           checkpoint, trained != NULL ? trained : "?");
        cJSON_free(trained);
    }
    json_close(&file);
    return status;
}

// What the config left to the target's config.json is in the checkpoint's config.json: another target,
// or an edited one, must not change what is trained. Sizes that change tensors show there.
static int compare_target_defaults(const char *checkpoint, const struct session *session,
                                   struct error *err)
{
    struct json_file file;
    if (open_drafter_config(&file, checkpoint, err) != 0)
        return -1;
    int status = 0;
    const struct drafter_sizes *sizes = &session->sizes;
    const struct {
        const char *key;
        double now;
    } values[] = {{"rope_theta", sizes->rope_theta}, {"rms_norm_eps", sizes->eps}};
    for (size_t i = 0; i < sizeof(values) / sizeof(*values); i++) {
        const cJSON *was = cJSON_GetObjectItemCaseSensitive(file.root, values[i].key);
        if (cJSON_IsNumber(was) &&
            !(fabs(was->valuedouble - values[i].now) <= 1e-6 * fabs(values[i].now)))
            status = error_add(err,
                               "drafter.%s: %s was trained with %g, and it is %g now: the "
                               "config.json of target.path is not what it was",
                               values[i].key, checkpoint, was->valuedouble, values[i].now);
    }
    json_close(&file);
    return status;
}

// The map's file may have been replaced under its name: the checkpoint's own export has the tables that it
// was trained with. Where it has none, every token was kept.
static int compare_map(const char *checkpoint, const struct session *session, struct error *err)
{
    struct safetensors model;
    struct vocab_map map = {0};
    const struct vocab_map *now = &session->map;
    if (!session->has_map) // as then, or the config would differ
        return 0;
    char *path = memory_format("%s/model.safetensors", checkpoint);
    int status = safetensors_open(&model, path, err);
    if (status == 0 && safetensors_find(&model, "d2t") != NULL)
        status = vocab_map_tables(&map, &model, err);
    int64_t kept = map.draft_size > 0 ? map.draft_size : now->vocab_size;
    bool both_all = kept == now->vocab_size && now->draft_size == now->vocab_size;
    if (status == 0 && !both_all &&
        (kept != now->draft_size || vocab_map_hash(&map) != vocab_map_hash(now)))
        status = error_set(err,
                           "drafter.draft_vocab: %s was trained with a map of %lld tokens, and the "
                           "one in use keeps others (%lld)",
                           checkpoint, (long long)kept, (long long)now->draft_size);
    vocab_map_release(&map);
    safetensors_close(&model);
    free(path);
    return status;
}

int resume_check_drafter(const char *checkpoint, const struct session *session, struct error *err)
{
    char *path = memory_format("%s/config.yaml", checkpoint);
    struct config before;
    struct error other = {""};
    config_init(&before);
    int status = config_load(&before, path, NULL, 0, err);
    if (status == 0)
        status = config_compare_drafter(&before, session->config, err);
    if (status == 0)
        status = compare_layers(checkpoint, session, err);
    if (status == 0)
        status = compare_target_defaults(checkpoint, session, err);
    if (status == 0)
        status = compare_map(checkpoint, session, err);
    // Scoring what it does on another target is a question one may ask.
    if (status == 0 && checkpoint_check_target(checkpoint, &session->target, &other) != 0)
        log_warn("%s", other.text);
    config_release(&before);
    free(path);
    return status;
}

// Keys that must not change are compared with the config of the checkpoint.
static int compare_config(struct resume *resume, const struct session *session, struct error *err)
{
    char *path = memory_format("%s/config.yaml", resume->path);
    struct config before;
    config_init(&before);
    int status = config_load(&before, path, NULL, 0, err);
    resume->failed = status != 0;
    if (status == 0) {
        if (resume->replan) { // how the step is cut and by what it runs is execution
            char *limit = before.memory.limit; // its own text, freed with it
            before.memory = session->config->memory;
            before.memory.limit = limit;
            before.kernels = session->config->kernels;
        }
        resume->epochs = before.run.epochs;
        resume->max_steps = before.run.max_steps;
        config_expand_files(&before, &(struct error){0}); // files may have moved: names decide
        status = config_compare_for_resume(&before, session->config, err);
        if (status != 0)
            error_prefix(err, "can not resume %s with another config", resume->path);
    }
    config_release(&before);
    free(path);
    return status;
}

static void put_config(void *context, FILE *out)
{
    config_write_yaml(context, out);
}

int resume_freeze(const struct run_folder *folder, const struct session *session, struct error *err)
{
    char *execution = memory_format("%s/execution.json", folder->path);
    char *config = memory_format("%s/config.yaml", folder->path);
    int status = execution_write(&session->execution, execution, err);
    if (status == 0)
        status = files_write(config, put_config, session->config, err);
    free(config);
    free(execution);
    return status;
}

// What can be obeyed: nothing that a step can not be cut to leaves this.
static int read_execution(struct execution *execution, const struct session *session,
                          const char *path, struct error *err)
{
    if (execution_read(execution, path, err) != 0)
        return -1;
    return execution_check(execution, session->config, &session->sizes, path, err);
}

// What the config leaves open becomes what it was. -1 when something else differs.
static int follow(struct session *session, const struct execution *before, struct error *err)
{
    const struct memory_config *memory = &session->config->memory;
    struct execution *now = &session->execution;
    if (memory->group_rows == 0)
        now->group_rows = before->group_rows;
    if (memory->chunk_rows == 0)
        now->chunk_rows = before->chunk_rows;
    if (memory->recompute == RECOMPUTE_AUTO)
        memcpy(now->recompute, before->recompute, sizeof(now->recompute));
    if (session->config->parallel.threads == 0)
        now->threads = before->threads;
    int64_t ranks = now->world_size; // another number is another order of additions, nothing else
    now->world_size = before->world_size;
    int status = execution_compare(before, now, err);
    now->world_size = ranks;
    if (status == 0)
        now->gemm = before->gemm;
    return status;
}

// A run that ended before its first checkpoint, or a folder that was given another run's
// execution.json, is executed as that says, too. There is nothing to lose yet, so what does not fit
// is no error.
static void follow_first_start(struct resume *resume, const struct run_folder *folder,
                               struct session *session)
{
    char *path = memory_format("%s/execution.json", folder->path);
    struct execution before, chosen = session->execution;
    struct error why = {""};
    if (!resume->replan && access(path, F_OK) == 0) {
        resume->followed = read_execution(&before, session, path, &why) == 0 &&
                           follow(session, &before, &why) == 0;
        if (!resume->followed) {
            session->execution = chosen;
            log_warn("%s can not be obeyed, this run chooses everything anew:\n%s", path, why.text);
        }
    }
    free(path);
}

// A resumed run obeys what its first start chose, where the config leaves it open.
static int obey_frozen(struct resume *resume, struct session *session, struct error *err)
{
    char *path = memory_format("%s/execution.json", resume->path);
    struct execution before;
    int status = read_execution(&before, session, path, err);
    free(path);
    resume->ranks = before.world_size;
    resume->failed = status != 0;
    if (status != 0)
        return -1;
    if (follow(session, &before, err) == 0) {
        if (resume->replan && before.gemm.count > 0) {
            log_warn(
                "--replan: GEMM algorithms are those of a fresh run; results may differ in bits");
            session->execution.gemm.count = 0;
            resume->warned = true;
        }
        return 0;
    }
    if (resume->replan) {
        log_warn(
            "resuming with another execution (--replan); results are not bitwise the same:\n%s",
            err->text);
        resume->warned = true;
        err->text[0] = '\0';
        return 0;
    }
    error_add(err, "--replan accepts this; the continued run is then not bitwise the same");
    return error_prefix(err, "can not resume %s as it was", resume->path);
}

// What can be done about a checkpoint that is damaged.
static int advise_older(const struct resume *resume, struct error *err)
{
    char *checkpoints = memory_format("%s/checkpoints", resume->path);
    bool run = files_is_folder(checkpoints);
    free(checkpoints);
    if (run)
        return error_add(err,
                         "%s is a run's folder: name one of the checkpoints in it, or leave "
                         "--resume out, which takes the newest",
                         resume->path);
    if (!files_is_folder(resume->path))
        return -1;
    return error_add(err, "move %s away, or name an older checkpoint with --resume DIR",
                     resume->path);
}

int resume_find(struct resume *resume, const struct run_folder *folder, struct session *session,
                struct error *err)
{
    if (find_path(resume, folder, err) != 0)
        return -1;
    if (resume->path == NULL) {
        follow_first_start(resume, folder, session);
        return 0;
    }
    if (checkpoint_check(resume->path, err) != 0) {
        resume->failed = true;
        return advise_older(resume, err);
    }
    if (compare_config(resume, session, err) != 0 ||
        compare_layers(resume->path, session, err) != 0 ||
        compare_target_defaults(resume->path, session, err) != 0 ||
        compare_map(resume->path, session, err) != 0)
        return -1;
    return obey_frozen(resume, session, err);
}

void resume_share(struct resume *resume, struct session *session)
{
    struct shared {
        struct execution execution;
        bool found, followed, warned;
        int64_t epochs, max_steps, ranks;
        char path[4096];
    } *shared = memory_alloc(1, sizeof(*shared));
    if (resume->path != NULL && strlen(resume->path) >= sizeof(shared->path))
        die("%s: a path of more than %zu bytes", resume->path, sizeof(shared->path) - 1);
    *shared = (struct shared){.execution = session->execution,
                              .found = resume->path != NULL,
                              .followed = resume->followed,
                              .warned = resume->warned,
                              .epochs = resume->epochs,
                              .ranks = resume->ranks,
                              .max_steps = resume->max_steps};
    if (shared->found)
        snprintf(shared->path, sizeof(shared->path), "%s", resume->path);
    ranks_share(session->ranks, shared, sizeof(*shared), 0);
    free(resume->path);
    resume->path = shared->found ? memory_strdup(shared->path) : NULL;
    resume->followed = shared->followed;
    resume->warned = shared->warned;
    resume->epochs = shared->epochs;
    resume->max_steps = shared->max_steps;
    resume->ranks = shared->ranks;
    session->execution = shared->execution;
    free(shared);
}

int resume_load(struct resume *resume, const struct session *session, struct model_state *state,
                struct error *err)
{
    if (resume->path == NULL) {
        state->counters = (struct counters){.last_validation = -1};
        return 0;
    }
    uint64_t fingerprint = 0;
    if (checkpoint_read(resume->path, state, &fingerprint, err) != 0) {
        resume->failed = true;
        return advise_older(resume, err);
    }
    if (fingerprint != session_fingerprint(session))
        return error_set(
            err,
            "%s was trained on other data: the documents of data.train or the weights of "
            "target.path have changed since, or other documents are left out (%lld are now, as bad "
            "by ids or "
            "by a verdict file beside their shard)",
            resume->path, (long long)session->train.dropped_bad);
    log_info("resuming from %s", resume->path);
    if (resume->ranks != session_ranks(session))
        log_info("it was written by %lld ranks, now there are %d: results agree to rounding, not "
                 "bitwise",
                 (long long)resume->ranks, session_ranks(session));
    return 0;
}

bool resume_is_own(const struct resume *resume, const struct run_folder *folder, int64_t step)
{
    if (resume->path == NULL)
        return false;
    char *own = checkpoint_path(folder->checkpoints, step);
    bool same = files_same(own, resume->path);
    free(own);
    return same;
}

void resume_release(struct resume *resume)
{
    free(resume->path);
    resume->path = NULL;
}
