// Owns the small set-up that tests of the whole program train on.
#include "tests/support/run_fixture.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include <cmocka.h>

#include "base/log.h"
#include "base/memory.h"
#include "base/rng.h"
#include "data/safetensors.h"
#include "trainer/files.h"

enum { WORDS = 64, TEXTS = 2048 };

static const char config_text[] = "run:\n"
                                  "  dir: unset\n"
                                  "  seed: 7\n"
                                  "  epochs: 10\n"
                                  "  max_steps: 20\n"
                                  "  device: cpu\n"
                                  "  compute: fp32\n"
                                  "target:\n"
                                  "  path: target\n"
                                  "data:\n"
                                  "  train: [train.h5]\n"
                                  "  seq_len: 256\n"
                                  "  rows_per_step: 2\n"
                                  "validation:\n"
                                  "  rows: 4\n"
                                  "drafter:\n"
                                  "  layers: 2\n"
                                  "  block_size: 8\n"
                                  "  mask_token_id: 60\n"
                                  "anchors:\n"
                                  "  max_anchors: 48\n"
                                  "loss:\n"
                                  "  kl: 1.0\n"
                                  "optimizer:\n"
                                  "  lr: 2.0e-3\n"
                                  "schedule:\n"
                                  "  kind: cosine\n"
                                  "  warmup_ratio: 0.1\n"
                                  "  min_lr_ratio: 0.05\n"
                                  "checkpoint:\n"
                                  "  every: 4\n"
                                  "  keep: 100\n"
                                  "  background: false\n"
                                  "parallel:\n"
                                  "  threads: 1\n"
                                  "log:\n"
                                  "  every: 1\n"
                                  "  tensorboard: false\n";

static void write_text(const char *path, const char *text)
{
    struct error err = {""};
    if (files_write_text(path, text, &err) != 0)
        die("%s", err.text);
}

// ---- target --------------------------------------------------------------------------------------

static void put_tensor(struct safetensors_writer *writer, uint64_t seed, int index, int64_t count,
                       double mean, double std)
{
    struct rng_key key = rng_key_make(seed, 0, (uint64_t)index, RNG_TEST);
    struct error err = {""};
    float *values = memory_alloc((size_t)count, sizeof(*values));
    for (int64_t i = 0; i < count; i++)
        values[i] = (float)(mean + std * (double)rng_normal(key, (uint64_t)i));
    if (safetensors_writer_write(writer, index, 0, values, (size_t)count * sizeof(*values), &err) !=
        0)
        die("%s", err.text);
    free(values);
}

static void write_head(const char *path, const struct run_target *target)
{
    const int64_t matrix[] = {target->vocab, target->hidden}, vector[] = {target->hidden};
    struct safetensors_writer *writer;
    struct error err = {""};
    if (safetensors_writer_open(&writer, path, &err) != 0)
        die("%s", err.text);
    safetensors_writer_add(writer, "embed_tokens.weight", DTYPE_F32, 2, matrix);
    safetensors_writer_add(writer, "lm_head.weight", DTYPE_F32, 2, matrix);
    safetensors_writer_add(writer, "norm.weight", DTYPE_F32, 1, vector);
    if (safetensors_writer_begin(writer, &err) != 0)
        die("%s", err.text);
    put_tensor(writer, target->seed, 0, matrix[0] * matrix[1], 0.0, 0.7);
    put_tensor(writer, target->seed, 1, matrix[0] * matrix[1], 0.0, 0.7);
    put_tensor(writer, target->seed, 2, vector[0], target->norm_mean, target->norm_std);
    if (safetensors_writer_close(writer, true, &err) != 0)
        die("%s", err.text);
}

void run_target_write(const char *path, const struct run_target *target)
{
    struct error err = {""};
    if (files_make_folder(path, &err) != 0)
        die("%s", err.text);
    char *config = memory_format(
        "{\"architectures\": [\"Qwen3ForCausalLM\"], \"model_type\": \"%s\", \"hidden_size\": "
        "%lld, "
        "\"vocab_size\": %lld, \"num_hidden_layers\": 8, \"num_attention_heads\": 2, "
        "\"num_key_value_heads\": 2, \"head_dim\": 4, \"intermediate_size\": 12, "
        "\"max_position_embeddings\": 1024, \"rms_norm_eps\": 1e-6, \"rope_theta\": 10000.0, "
        "\"eos_token_id\": 1, \"pad_token_id\": 2, \"tie_word_embeddings\": false}\n",
        target->model_type, (long long)target->hidden, (long long)target->vocab);
    char *config_path = memory_format("%s/config.json", path);
    char *head_path = memory_format("%s/head.safetensors", path);
    write_text(config_path, config);
    write_head(head_path, target);
    free(head_path);
    free(config_path);
    free(config);
}

// ---- shards --------------------------------------------------------------------------------------

static const int64_t *some_lengths(void)
{
    static int64_t lengths[RUN_DOCUMENTS];
    for (int64_t d = 0; d < RUN_DOCUMENTS; d++)
        lengths[d] = 30 + d * 37 % 101;
    return lengths;
}

struct fixture_options run_train_shard(void)
{
    return (struct fixture_options){
        .seed = 5, .layers = 3, .documents = RUN_DOCUMENTS, .lengths = some_lengths(), .crc = true};
}

struct fixture_options run_val_shard(void)
{
    return (struct fixture_options){
        .seed = 6, .layers = 3, .documents = 6, .lengths = some_lengths(), .crc = true};
}

// ---- the folder ----------------------------------------------------------------------------------

// Texts that tests asked for, freed at the end so that a test may nest calls.
static char *texts[TEXTS];
static int text_count;

static const char *keep_text(char *text)
{
    BUG_UNLESS(text_count < TEXTS);
    return texts[text_count++] = text;
}

const char *run_path(const struct run_fixture *fixture, const char *format, ...)
{
    char name[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(name, sizeof(name), format, args);
    va_end(args);
    return keep_text(memory_format("%s/%s", fixture->folder, name));
}

void run_fixture_open(struct run_fixture *fixture)
{
    static const struct run_target target = {"qwen3", 8, 64, 1.0, 0.2, 11};
    *fixture = (struct run_fixture){.folder = fixture_folder()};
    struct fixture_options train = run_train_shard(), val = run_val_shard();
    run_target_write(run_path(fixture, "target"), &target);
    fixture_shard(run_path(fixture, "train.h5"), &train);
    fixture_shard(run_path(fixture, "val.h5"), &val);
    write_text(run_path(fixture, "run.yaml"), config_text);
}

void run_fixture_close(struct run_fixture *fixture)
{
    while (text_count > 0)
        free(texts[--text_count]);
    fixture_folder_remove(fixture->folder);
    *fixture = (struct run_fixture){0};
}

void run_fixture_set(struct run_fixture *fixture, const char *set)
{
    BUG_UNLESS(fixture->set_count < (int)(sizeof(fixture->sets) / sizeof(*fixture->sets)));
    fixture->sets[fixture->set_count++] = set;
}

// ---- commands ------------------------------------------------------------------------------------

struct words {
    const char *items[WORDS];
    int count;
};

static void add_word(struct words *words, const char *word)
{
    BUG_UNLESS(words->count + 1 < WORDS);
    words->items[words->count++] = word;
}

static void add_rest(struct words *words, va_list args)
{
    for (const char *word; (word = va_arg(args, const char *)) != NULL;)
        add_word(words, word);
}

static void add_config(struct words *words, const struct run_fixture *fixture)
{
    add_word(words, "--config");
    add_word(words, run_path(fixture, "run.yaml"));
    for (int i = 0; i < fixture->set_count; i++) {
        add_word(words, "--set");
        add_word(words, fixture->sets[i]);
    }
}

static struct words train_words(const struct run_fixture *fixture, const char *name, va_list args)
{
    struct words words = {.count = 0};
    add_config(&words, fixture);
    add_word(&words, "--set");
    add_word(&words, keep_text(memory_format("run.dir=%s/%s", fixture->folder, name)));
    add_rest(&words, args);
    return words;
}

int run_train(const struct run_fixture *fixture, const char *name, ...)
{
    va_list args;
    va_start(args, name);
    struct words words = train_words(fixture, name, args);
    struct program program = {.ranks = fixture->ranks};
    va_end(args);
    program_start(&program, run_path(fixture, "%s.out", name), words.items);
    return program_wait(&program, 120.0);
}

void run_train_start(const struct run_fixture *fixture, struct program *program, const char *name,
                     ...)
{
    va_list args;
    va_start(args, name);
    struct words words = train_words(fixture, name, args);
    va_end(args);
    program->ranks = fixture->ranks;
    program_start(program, run_path(fixture, "%s.out", name), words.items);
}

int run_command(const struct run_fixture *fixture, const char *name, bool config, ...)
{
    struct words words = {.count = 0};
    va_list args;
    va_start(args, config);
    add_rest(&words, args);
    va_end(args);
    if (config)
        add_config(&words, fixture);
    return program_run(run_path(fixture, "%s.out", name), words.items);
}

bool run_says(const struct run_fixture *fixture, const char *name, const char *words)
{
    return program_says(run_path(fixture, "%s.out", name), words);
}

void run_must_say(const struct run_fixture *fixture, const char *name, const char *words)
{
    const char *path = run_path(fixture, "%s.out", name);
    if (program_says(path, words))
        return;
    char *text = program_text(path);
    print_error("%s\n", text);
    free(text);
    fail_msg("%s.out does not say: %s", name, words);
}

void run_remove(const struct run_fixture *fixture, const char *name)
{
    fixture_folder_remove(memory_strdup(run_path(fixture, "%s", name)));
}

void run_sleep(double seconds)
{
    double whole = floor(seconds);
    nanosleep(&(struct timespec){(time_t)whole, (long)((seconds - whole) * 1e9)}, NULL);
}

const char *run_checkpoint(const struct run_fixture *fixture, const char *name, int64_t step)
{
    return run_path(fixture, "%s/checkpoints/step-%08lld", name, (long long)step);
}

double run_state_number(const struct run_fixture *fixture, const char *name, int64_t step,
                        const char *number)
{
    char *path = memory_format("%s/state.json", run_checkpoint(fixture, name, step));
    cJSON *object = program_json(path);
    double value = program_number(object, number);
    cJSON_Delete(object);
    free(path);
    return value;
}

// The lines of a run without these members, NULL at the end.
static cJSON *lines_without(const struct run_fixture *fixture, const char *name,
                            const char *const *members)
{
    cJSON *metrics = program_steady_metrics(run_path(fixture, "%s", name)), *line;
    cJSON_ArrayForEach(line, metrics)
    {
        for (const char *const *member = members; *member != NULL; member++)
            cJSON_DeleteItemFromObjectCaseSensitive(line, *member);
    }
    return metrics;
}

void run_must_equal(const struct run_fixture *fixture, const char *first, const char *second,
                    int64_t step)
{
    static const char *const none[] = {NULL};
    run_must_equal_but(fixture, first, second, step, none);
}

void run_must_equal_but(const struct run_fixture *fixture, const char *first, const char *second,
                        int64_t step, const char *const *members)
{
    cJSON *a = lines_without(fixture, first, members), *b = lines_without(fixture, second, members);
    assert_true(cJSON_GetArraySize(a) > 0);
    int lines = cJSON_GetArraySize(a) > cJSON_GetArraySize(b) ? cJSON_GetArraySize(a)
                                                              : cJSON_GetArraySize(b);
    for (int i = 0; i < lines; i++) {
        char *x = cJSON_PrintUnformatted(cJSON_GetArrayItem(a, i));
        char *y = cJSON_PrintUnformatted(cJSON_GetArrayItem(b, i));
        if (x == NULL || y == NULL || strcmp(x, y) != 0)
            fail_msg("line %d of metrics.jsonl differs:\n%s: %s\n%s: %s", i + 1, first,
                     x != NULL ? x : "none", second, y != NULL ? y : "none");
        cJSON_free(x);
        cJSON_free(y);
    }
    cJSON_Delete(a);
    cJSON_Delete(b);
    if (!program_same_state(run_checkpoint(fixture, first, step),
                            run_checkpoint(fixture, second, step)))
        fail_msg("%s and %s have other weights at step %lld", first, second, (long long)step);
}
