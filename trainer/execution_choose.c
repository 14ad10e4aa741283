// Owns the choices that a config leaves open: how the step is cut, and on what it runs.
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "trainer/step.h"

enum { CPU_GROUP_ROWS = 512, CUDA_GROUP_ROWS = 8192 };
// Of a chunk's logits. With little memory: no more than what the passes need in the same place.
static const double cpu_chunk_bytes = 256e6, cuda_chunk_bytes = 4.1e9, low_chunk_bytes = 2.3e9;
// EAGLE-3: the rows of a ttt_step are multiplied together, so groups are larger, and where there are several they
// are whole WAVE_POSITIONS: that many rows of 4,096 columns are 128 tiles of a product for 132 SMs. A chunk
// holds ttt_steps short rows of students for one of a teacher.
enum { CUDA_EAGLE3_ROWS = 24576, WAVE_POSITIONS = 1024, LOW_POSITIONS = 1024 };
enum { CHUNK_STEP = 128 }; // to which chunks are rounded up; see loss.c
static const double eagle3_chunk_bytes = 1.6e9, low_eagle3_chunk_bytes = 0.8e9;

static int64_t round_down(int64_t value, int64_t multiple)
{
    int64_t result = value / multiple * multiple;
    return result > 0 ? result : multiple;
}

static double chunk_bytes(const struct config *config, const struct drafter_sizes *sizes, bool cpu)
{
    bool low = config->memory.mode == MEMORY_LOW;
    if (cpu)
        return cpu_chunk_bytes;
    if (sizes->kind == DRAFTER_EAGLE3)
        return low ? low_eagle3_chunk_bytes : eagle3_chunk_bytes;
    return low ? low_chunk_bytes : cuda_chunk_bytes;
}

// As few groups of so many rows at most, whole waves of positions, as `rows` need; as equal as they can be.
static int64_t even_group(int64_t most, int64_t rows, int64_t block)
{
    int64_t wave = WAVE_POSITIONS * block, waves = (rows + wave - 1) / wave;
    int64_t each = most > wave ? most / wave : 1, groups = (waves + each - 1) / each;
    return rows <= most ? rows : (waves + groups - 1) / groups * wave;
}

static int64_t usual_group(const struct config *config, const struct drafter_sizes *sizes, bool cpu)
{
    if (cpu)
        return CPU_GROUP_ROWS;
    if (sizes->kind == DRAFTER_EAGLE3 && config->memory.mode == MEMORY_LOW)
        return sizes->ttt_steps * LOW_POSITIONS;
    if (sizes->kind == DRAFTER_EAGLE3)
        return even_group(CUDA_EAGLE3_ROWS, execution_most_rows(config, sizes), sizes->block_size);
    return CUDA_GROUP_ROWS;
}

// Of EAGLE-3 that compares the kept columns alone: rows of the vocabulary for as few chunks of a full group as `most`
// make, as equal as they can be. Documents' ends have a few more teachers for as many students.
static int64_t even_chunk(int64_t most, int64_t group_rows, const struct drafter_sizes *sizes)
{
    const double spare = 1.02;
    double each = (double)sizes->draft_vocab / (double)sizes->vocab; // of a student's row
    each *= 1.0 + 1.0 / (double)sizes->block_size; // and its share of the teacher's
    int64_t chunks = (int64_t)ceil(each * (double)group_rows / (double)most);
    int64_t students = (group_rows + chunks - 1) / chunks;
    int64_t rows = (int64_t)ceil(spare * each * (double)(students + CHUNK_STEP));
    return rows < most ? rows : most;
}

static void choose_cut(struct execution *e, const struct config *config,
                       const struct drafter_sizes *sizes, bool cpu)
{
    int64_t group = config->memory.group_rows, chunk = config->memory.chunk_rows;
    if (group == 0)
        group = usual_group(config, sizes, cpu);
    if (group > execution_most_rows(config, sizes))
        group = execution_most_rows(config, sizes);
    e->group_rows = round_down(group, sizes->block_size);
    if (chunk == 0) {
        double logit = strcmp(e->logits, "bf16") == 0 ? 2.0 : 4.0;
        chunk = (int64_t)(chunk_bytes(config, sizes, cpu) / (logit * (double)sizes->vocab));
        if (chunk > 2 * e->group_rows)
            chunk = 2 * e->group_rows; // students and as many teachers
        if (!cpu && sizes->kind == DRAFTER_EAGLE3 && sizes->draft_vocab < sizes->vocab &&
            !config->loss.full_vocab_metrics)
            chunk = even_chunk(chunk, e->group_rows, sizes);
        if (chunk < 64)
            chunk = 64;
    }
    e->chunk_rows = chunk < 2 ? 2 : chunk;
}

static const char *choose_recompute(const struct config *config, const struct drafter_sizes *sizes,
                                    bool cpu)
{
    if (config->memory.recompute != RECOMPUTE_AUTO)
        return config_choice_name("memory", "recompute", config->memory.recompute);
    if (config->memory.mode == MEMORY_LOW)
        return "layer";
    // On a GPU cheap costs less than 1 % of a step; one layer of EAGLE-3 has little to keep.
    bool one_layer = sizes->kind == DRAFTER_EAGLE3 && sizes->layers == 1;
    return cpu || one_layer ? "none" : "cheap";
}

int64_t execution_threads(const struct config *config)
{
    return config->parallel.threads > 0 ? config->parallel.threads : sysconf(_SC_NPROCESSORS_ONLN);
}

int execution_choose(struct execution *e, const struct config *config,
                     const struct drafter_sizes *sizes, const struct backend *backend,
                     struct error *err)
{
    bool cpu = strcmp(backend->name, "cpu") == 0;
    *e = (struct execution){.world_size = 1};
    snprintf(e->device, sizeof(e->device), "%s", backend->name);
    snprintf(e->compute, sizeof(e->compute), "%s",
             config->run.compute == COMPUTE_BF16 ? "bf16" : "fp32");
    snprintf(e->logits, sizeof(e->logits), "%s",
             config->memory.logits == LOGITS_BF16 ? "bf16" : "fp32");
    snprintf(e->recompute, sizeof(e->recompute), "%s", choose_recompute(config, sizes, cpu));
    snprintf(e->kernels, sizeof(e->kernels), "%s",
             config->kernels.path == KERNELS_GENERIC ? "generic" : "auto");
    if (config->run.compute == COMPUTE_FP32 && config->memory.logits == LOGITS_BF16)
        return error_set(err, "memory.logits: bf16 needs run.compute: bf16");
    e->threads = execution_threads(config);
    backend->describe(e->hardware, sizeof(e->hardware), e->library, sizeof(e->library));
    choose_cut(e, config, sizes, cpu);
    return 0;
}
