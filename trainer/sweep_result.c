// Owns the numbers of a run for the table, made from all lines of its metrics.jsonl.
#include "trainer/sweep.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>

#include "base/memory.h"

struct sums {
    int64_t block_size;
    double rows, tokens, anchors, seconds, val_seconds, memory;
    double *loss; // [steps]
    size_t steps, room;
    bool validated, drew;
};

static double number(const cJSON *line, const char *name)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(line, name);
    return cJSON_IsNumber(item) ? item->valuedouble : (double)NAN;
}

static double add(double sum, double value)
{
    return isfinite(value) ? sum + value : sum;
}

static void take_step(struct sums *sums, struct sweep_result *result, const cJSON *line)
{
    double memory = number(line, "memory_bytes"), anchors = number(line, "anchors");
    result->step = (int64_t)number(line, "step");
    sums->rows = add(sums->rows, number(line, "rows"));
    sums->tokens = add(sums->tokens, number(line, "tokens"));
    sums->anchors = add(sums->anchors, anchors);
    sums->drew = sums->drew || isfinite(anchors);
    sums->seconds = add(sums->seconds, number(line, "seconds"));
    if (memory > sums->memory)
        sums->memory = memory;
    if (sums->steps == sums->room) {
        sums->room = 2 * sums->room + 256;
        sums->loss = memory_resize(sums->loss, sums->room, sizeof(*sums->loss));
    }
    sums->loss[sums->steps++] = number(line, "loss");
}

// Slot 0 of a block is its anchor, which has no agreement, or a draft.
static int most_drafts(const cJSON *acc)
{
    int slots = cJSON_GetArraySize(acc);
    return slots - (slots > 0 && cJSON_IsNull(cJSON_GetArrayItem(acc, 0)));
}

static void take_validation(struct sums *sums, struct sweep_result *result, const cJSON *line,
                            const struct config_ints *drafts)
{
    double walk = number(line, "val_accept_len_walk"), step = number(line, "step");
    result->walk = walk;
    result->most_drafts = most_drafts(cJSON_GetObjectItemCaseSensitive(line, "val_acc"));
    result->accept_len = number(line, "val_accept_len");
    result->overlap = number(line, "val_overlap");
    result->val_loss = number(line, "val_loss");
    sums->val_seconds = add(sums->val_seconds, number(line, "val_seconds"));
    sums->validated = true;
    for (size_t i = 0; i < drafts->count && i < SWEEP_DRAFTS; i++) {
        char name[48];
        snprintf(name, sizeof(name), "val_accept_len_walk_%lld", (long long)drafts->items[i]);
        result->walk_drafts[i] = number(line, name);
    }
    // As a run chooses its checkpoints/best.
    if (step > 0.0 && isfinite(walk) &&
        (!isfinite(result->best_walk) || walk > result->best_walk)) {
        result->best_walk = walk;
        result->best_step = (int64_t)step;
    }
}

// Steps whose loss is not known (skipped ones) are left out.
static double mean_of_last_tenth(const struct sums *sums)
{
    size_t begin = sums->steps - (sums->steps + 9) / 10, count = 0;
    double sum = 0.0;
    for (size_t i = begin; i < sums->steps; i++)
        if (isfinite(sums->loss[i])) {
            sum += sums->loss[i];
            count++;
        }
    return count > 0 ? sum / (double)count : (double)NAN;
}

static double ratio(double part, double whole)
{
    return whole > 0.0 ? part / whole : (double)NAN;
}

static void conclude(const struct sums *sums, struct sweep_result *result)
{
    result->rows = sums->rows;
    result->tokens = sums->tokens;
    result->anchors = sums->drew ? sums->anchors : (double)NAN;
    result->loss = mean_of_last_tenth(sums);
    result->val_seconds = sums->validated ? sums->val_seconds : (double)NAN;
    if (sums->steps == 0)
        return;
    result->seconds = sums->seconds;
    result->memory = sums->memory > 0.0 ? sums->memory : (double)NAN;
    result->step_seconds = ratio(sums->seconds, (double)sums->steps);
    result->tokens_per_second = ratio(sums->tokens, sums->seconds);
    result->block_rows_per_second =
        sums->drew ? ratio(sums->anchors * (double)sums->block_size, sums->seconds) : (double)NAN;
}

static struct sweep_result unknown(void)
{
    const double nan_value = (double)NAN;
    struct sweep_result result = {.walk = nan_value,
                                  .best_walk = nan_value,
                                  .accept_len = nan_value,
                                  .overlap = nan_value,
                                  .val_loss = nan_value,
                                  .seconds = nan_value,
                                  .step_seconds = nan_value,
                                  .tokens_per_second = nan_value,
                                  .block_rows_per_second = nan_value,
                                  .memory = nan_value};
    for (int i = 0; i < SWEEP_DRAFTS; i++)
        result.walk_drafts[i] = nan_value;
    return result;
}

void sweep_result_read(struct sweep_result *result, const char *folder, int64_t block_size,
                       const struct config_ints *drafts)
{
    struct sums sums = {.block_size = block_size};
    char *path = memory_format("%s/metrics.jsonl", folder), *line = NULL;
    FILE *file = fopen(path, "re");
    size_t room = 0;
    *result = unknown();
    for (ssize_t n; file != NULL && (n = getline(&line, &room, file)) > 0 && line[n - 1] == '\n';) {
        cJSON *object = cJSON_Parse(line);
        if (cJSON_GetObjectItemCaseSensitive(object, "val_loss") != NULL)
            take_validation(&sums, result, object, drafts);
        else if (cJSON_IsNumber(cJSON_GetObjectItemCaseSensitive(object, "step")))
            take_step(&sums, result, object);
        cJSON_Delete(object);
    }
    conclude(&sums, result);
    if (file != NULL)
        fclose(file);
    free(line);
    free(sums.loss);
    free(path);
}
