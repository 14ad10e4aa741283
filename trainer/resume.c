// Owns the decision where a run continues.
#include "trainer/resume.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "trainer/checkpoint.h"

static int find_path(struct resume *resume, const struct run_folder *folder, struct error *err)
{
    if (resume->choice != NULL && strcmp(resume->choice, "auto") != 0 &&
        strcmp(resume->choice, "none") != 0) {
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

// Keys that must not change are compared with the config of the checkpoint.
static int compare_config(const struct resume *resume, const struct session *session,
                          struct error *err)
{
    char *path = memory_format("%s/config.yaml", resume->path);
    struct config before;
    config_init(&before);
    int status = config_load(&before, path, NULL, 0, err);
    if (status == 0) {
        config_expand_files(&before, &(struct error){0}); // files may have moved: names decide
        status = config_compare_for_resume(&before, session->config, err);
        if (status != 0)
            error_prefix(err, "can not resume %s with another config", resume->path);
    }
    config_release(&before);
    free(path);
    return status;
}

static int write_frozen(const struct run_folder *folder, const struct session *session,
                        struct error *err)
{
    char *path = memory_format("%s/execution.json", folder->path);
    int status = execution_write(&session->execution, path, err);
    free(path);
    if (status != 0)
        return -1;
    path = memory_format("%s/config.yaml", folder->path);
    FILE *file = fopen(path, "we");
    if (file == NULL) {
        status = error_set(err, "%s: can not be written", path);
    } else {
        config_write_yaml(session->config, file);
        if (fclose(file) != 0)
            status = error_set(err, "%s: can not be written", path);
    }
    free(path);
    return status;
}

// A resumed run obeys what its first start chose, where the config leaves it open.
static int obey_frozen(const struct resume *resume, struct session *session, struct error *err)
{
    char *path = memory_format("%s/execution.json", resume->path);
    struct execution before;
    int status = execution_read(&before, path, err);
    free(path);
    if (status != 0)
        return -1;
    const struct memory_config *memory = &session->config->memory;
    struct execution *now = &session->execution;
    if (memory->group_rows == 0)
        now->group_rows = before.group_rows;
    if (memory->chunk_rows == 0)
        now->chunk_rows = before.chunk_rows;
    if (memory->recompute == RECOMPUTE_AUTO)
        memcpy(now->recompute, before.recompute, sizeof(now->recompute));
    if (session->config->parallel.threads == 0)
        now->threads = before.threads;
    if (execution_compare(&before, now, err) == 0)
        return 0;
    if (resume->replan) {
        log_warn(
            "resuming with another execution (--replan); results are not bitwise the same:\n%s",
            err->text);
        err->text[0] = '\0';
        return 0;
    }
    error_add(err, "--replan accepts this; the continued run is then not bitwise the same");
    return error_prefix(err, "can not resume %s as it was", resume->path);
}

int resume_find(struct resume *resume, struct run_folder *folder, struct session *session,
                struct error *err)
{
    if (find_path(resume, folder, err) != 0)
        return -1;
    if (resume->path != NULL) {
        char *done = memory_format("%s/DONE", resume->path);
        bool complete = access(done, F_OK) == 0;
        free(done);
        if (!complete) {
            struct model_state state;
            model_state_open(&state, &session->params);
            resume->failed = true;
            int status = checkpoint_read(resume->path, &state, NULL, err);
            model_state_close(&state);
            return status != 0 ? -1
                               : error_set(err, "%s: no DONE file: the checkpoint was not finished",
                                           resume->path);
        }
        if (compare_config(resume, session, err) != 0 || obey_frozen(resume, session, err) != 0)
            return -1;
    }
    return write_frozen(folder, session, err);
}

int resume_load(const struct resume *resume, const struct session *session,
                struct model_state *state, struct error *err)
{
    size_t bytes = (size_t)session->params.elements * sizeof(float);
    if (resume->path == NULL) {
        params_initialize(&session->params, (uint64_t)session->config->run.seed,
                          session->config->drafter.init_std, state->master);
        memset(state->m, 0, bytes);
        memset(state->v, 0, bytes);
        state->counters = (struct counters){.last_validation = -1};
        return 0;
    }
    uint64_t fingerprint = 0;
    if (checkpoint_read(resume->path, state, &fingerprint, err) != 0)
        return -1;
    if (fingerprint != session->train.fingerprint)
        return error_set(err,
                         "%s was trained on other data: the documents of data.train have "
                         "changed since",
                         resume->path);
    log_info("resuming from %s", resume->path);
    return 0;
}

void resume_release(struct resume *resume)
{
    free(resume->path);
    resume->path = NULL;
}
