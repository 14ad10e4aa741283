// Owns the decision whether a training run starts ranks of its own, and how many.
#include <stdlib.h>

#include "base/log.h"
#include "base/memory.h"
#include "configs/config.h"
#include "kernels/backend.h"
#include "trainer/commands.h"
#include "trainer/files.h"
#include "trainer/launch.h"
#include "trainer/rank_gpu.h"
#include "trainer/rank_place.h"

// How many ranks the config asks for on a machine with that many GPUs; 0: more than there are, err says so.
static int wanted_ranks(const struct config *config, int gpus, struct error *err)
{
    int64_t wanted = config->parallel.gpus;
    if (wanted > gpus) {
        error_set(err, "parallel.gpus: %lld, but %d can be used on this machine", (long long)wanted,
                  gpus);
        return 0;
    }
    if (wanted > 0)
        return (int)wanted;
    if (config->data.rows_per_step >= gpus)
        return gpus;
    log_info("%d of %d GPUs are used, as many as data.rows_per_step; parallel.gpus uses more",
             (int)config->data.rows_per_step, gpus);
    return (int)config->data.rows_per_step;
}

static int start(const struct options *options, const struct config *config, int ranks,
                 struct error *err)
{
    const char **gpus = memory_alloc((size_t)ranks, sizeof(*gpus));
    char(*names)[256] = memory_alloc((size_t)ranks, sizeof(*names));
    int status = EXIT_REFUSED;
    for (int rank = 0; rank < ranks; rank++) {
        gpus[rank] = names[rank];
        if (rank_gpu_choose(getenv("CUDA_VISIBLE_DEVICES"), rank, names[rank], sizeof(names[rank]),
                            err) != 0) {
            log_error("%s", err->text);
            goto out;
        }
    }
    const struct launch launch = {.ranks = ranks,
                                  .program = "/proc/self/exe",
                                  .arguments = options->arguments,
                                  .gpus = gpus,
                                  .port = (int)config->parallel.port,
                                  .notice_seconds = 5.0,
                                  .kill_seconds = 10.0,
                                  .linger_seconds = (double)config->parallel.timeout};
    status = launch_run(&launch);
out:
    free(gpus);
    free(names);
    return status;
}

static bool several_possible(const struct config *config)
{
    struct rank_place place;
    struct error err = {0};
    return config->run.device != DEVICE_CPU && config->parallel.gpus != 1 &&
           rank_place_read(&place, rank_variable, NULL, &err) == 0 &&
           place.launcher == LAUNCHER_NONE;
}

// -1: this process trains itself (what is wrong with the config is then found again, and said).
static int launch_train(const struct options *options)
{
    struct config config;
    struct error err = {0};
    int status = -1;
    config_init(&config);
    if (config_load(&config, options->config, options->sets, options->set_count, &err) != 0 ||
        !several_possible(&config))
        goto out;
    int gpus = backend_cuda_count();
    log_configure((enum log_level)config.log.level, 0);
    if (gpus == 0 && config.parallel.gpus > 1)
        log_warn("parallel.gpus: %lld, but no GPU can be used: one rank trains",
                 (long long)config.parallel.gpus);
    if (gpus == 0 || (gpus == 1 && config.parallel.gpus <= 1))
        goto out;
    int ranks = wanted_ranks(&config, gpus, &err);
    if (ranks > 1) {
        status = start(options, &config, ranks, &err);
    } else if (ranks == 0) {
        log_error("%s", err.text);
        status = EXIT_REFUSED;
    }
out:
    config_release(&config);
    return status;
}

int command_launch(const struct options *options)
{
    struct rank_place place;
    struct error err = {0};
    if (rank_place_read(&place, rank_variable, NULL, &err) ==
        0) // else ranks_open says what is wrong
        log_configure(LOG_INFO, place.rank);
    err = (struct error){0};
    if (files_check_rereadable(options->config, &err) != 0) {
        log_error("--config: %s", err.text);
        return EXIT_REFUSED;
    }
    int status = launch_train(options);
    return status >= 0 ? status : command_train(options);
}
