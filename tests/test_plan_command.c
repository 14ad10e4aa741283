// `dtrain plan`: what it refuses to be asked, and what it says of what it was given.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/memory.h"
#include "tests/support/plan_preset.h"
#include "tests/support/program.h"
#include "tests/support/shard_fixture.h"
#include "trainer/files.h"

static const struct {
    const char *says;
    const char *words[9];
} refused[] = {
    {"--device-memory: much", {"--device-memory", "much"}},
    {"--device-memory: 0", {"--device-memory", "0"}},
    {"--device-memory: 96 is no amount", {"--device-memory", "96"}},
    {"memory.limit: 2 is no amount of memory with a unit; say", {"--set", "memory.limit=2"}},
    {"--gpus: 0", {"--gpus", "0"}},
    {"--gpus: two", {"--gpus", "two"}},
    {"--tflops: fast", {"--tflops", "fast"}},
    {"--vary seq_len: names keys for --fit", {"--vary", "seq_len"}},
    {"did you mean data.seq_len?", {"--fit", "--vary", "seq_lem", "--device-memory", "96GiB"}},
    {"did you mean seq_len?", {"--fit", "--vary", "data.seq_lem", "--device-memory", "96GiB"}},
    {"--vary: drafter.kind: not a key of whole numbers",
     {"--fit", "--vary", "drafter.kind", "--device-memory", "96GiB"}},
    {"has no value to start from",
     {"--fit", "--vary", "schedule.warmup_steps", "--device-memory", "96GiB"}},
    {"--target-config: ", {"--target-config", "/none/config.json"}},
    {"memory.limit: a lot is no amount of memory with a unit", {"--set", "memory.limit=a lot"}},
    {"--target-config FILE", {"--set", "target.path=/none/some-model"}},
    {"target.layer_ids: needed to plan without shards", {"--set", "target.layer_ids=[]"}},
};

static void bad_questions_are_refused(void **state)
{
    char *out = fixture_path(*state, "refused.out");
    for (size_t i = 0; i < sizeof(refused) / sizeof(*refused); i++) {
        const char *words[16] = {"plan", "--config", PRESET_V4, "--set", "run.device=cuda"};
        for (size_t w = 0; refused[i].words[w] != NULL; w++)
            words[5 + w] = refused[i].words[w];
        int status = program_run(out, words);
        if (status != 2 || !program_says(out, refused[i].says))
            fail_msg("status %d, where '%s' is expected", status, refused[i].says);
    }
    free(out);
}

static void sizes_of_any_target_are_enough(void **state)
{
    char *out = fixture_path(*state, "sizes.out"), *sizes = fixture_path(*state, "sizes.json");
    struct error err = {""};
    const char *words[] = {"plan",
                           "--config",
                           PRESET_V4,
                           "--set",
                           "target.path=/none/some-model",
                           "--target-config",
                           sizes,
                           "--set",
                           "run.device=cuda",
                           NULL};
    assert_int_equal(files_write_text(sizes,
                                      "{\"hidden_size\": 5120, \"vocab_size\": 248320, "
                                      "\"num_hidden_layers\": 64}\n",
                                      &err),
                     0);
    assert_int_equal(program_run(out, words), 0);
    assert_true(program_says(out, "vocabulary 248,320"));
    char *set = memory_format("target.path=%s",
                              (const char *)*state); // the folder, with nothing but a config.json
    char *config = fixture_path(*state, "config.json");
    assert_int_equal(rename(sizes, config), 0);
    const char *folder[] = {"plan", "--config", PRESET_V4,         "--set",
                            set,    "--set",    "run.device=cuda", NULL};
    assert_int_equal(program_run(out, folder), 0);
    assert_true(program_says(out, "sizes of"));
    free(config);
    free(set);
    const char *small[] = {
        "plan",  "--config", PRESET_V4, "--set", "run.device=cuda", "--device-memory",
        "20GiB", NULL};
    assert_int_equal(program_run(out, small), 1);
    assert_true(program_says(out, "does not fit"));
    free(sizes);
    free(out);
}

// The verdict is on several ranks, and says what holds on one.
static void more_ranks_are_judged(void **state)
{
    char *out = fixture_path(*state, "ranks.out");
    const char *words[] = {"plan",   "--config", PRESET_V4,         "--set", "run.device=cuda",
                           "--gpus", "4",        "--device-memory", "40GiB", NULL};
    assert_int_equal(program_run(out, words), 0);
    assert_true(program_says(out, "s at 700 TFLOP/s and 4.2 TB/s for the update, on one GPU\n"));
    assert_true(program_says(out, " s on 4 GPUs\n"));
    assert_true(program_says(out, "fits on each of 4 ranks: "));
    assert_true(program_says(out, "; on one rank this cut "));
    words[7] = NULL;
    assert_int_equal(program_run(out, words), 0);
    assert_true(program_says(out, " on one; --device-memory"));
    free(out);
}

// What was given and can not be is not called given; a key is asked once, however it is named.
static void answers_are_exact(void **state)
{
    char *out = fixture_path(*state, "exact.out");
    const char *clamped[] = {"plan",
                             "--config",
                             PRESET_V4,
                             "--set",
                             "run.device=cuda",
                             "--set",
                             "memory.group_rows=1001",
                             "--set",
                             "memory.chunk_rows=1",
                             NULL};
    assert_int_equal(program_run(out, clamped), 0);
    assert_true(program_says(out, "992      1,001 were given, which are not whole blocks of 16"));
    assert_true(program_says(out, "2        fewer were given, the least"));
    const char *twice[] = {"plan",
                           "--config",
                           PRESET_V4,
                           "--json",
                           "--set",
                           "run.device=cuda",
                           "--device-memory",
                           "96GiB",
                           "--fit",
                           "--vary",
                           "layers,drafter.layers,layers",
                           NULL};
    assert_int_equal(program_run(out, twice), 0);
    cJSON *root = program_json(out);
    assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(root, "fit")), 2);
    assert_null(cJSON_GetObjectItem(root, "fit_together"));
    cJSON_Delete(root);
    free(out);
}

// A run obeys memory.limit whatever the device has, so the smaller of both counts.
static void the_smaller_memory_counts(void **state)
{
    char *out = fixture_path(*state, "smaller.out");
    static const struct {
        const char *device, *limit, *says;
        int status;
    } cases[] = {{"96GiB", "memory.limit=20GiB", " of 20.00 GiB (memory.limit), ", 1},
                 {"20GiB", "memory.limit=96GiB", " of 20.00 GiB (--device-memory), ", 1},
                 {"96GiB", "memory.limit=90GiB", " of 90.00 GiB (memory.limit), ", 0}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        const char *words[] = {"plan",
                               "--config",
                               PRESET_V4,
                               "--set",
                               "run.device=cuda",
                               "--device-memory",
                               cases[i].device,
                               "--set",
                               cases[i].limit,
                               NULL};
        assert_int_equal(program_run(out, words), cases[i].status);
        assert_true(program_says(out, cases[i].says));
    }
    free(out);
}

static int open_folder(void **state)
{
    *state = fixture_folder();
    return 0;
}

static int close_folder(void **state)
{
    fixture_folder_remove(*state);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_questions_are_refused),
        cmocka_unit_test(sizes_of_any_target_are_enough),
        cmocka_unit_test(more_ranks_are_judged),
        cmocka_unit_test(answers_are_exact),
        cmocka_unit_test(the_smaller_memory_counts),
    };
    return cmocka_run_group_tests(tests, open_folder, close_folder);
}
