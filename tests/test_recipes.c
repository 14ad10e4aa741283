// The published recipes in configs/recipes: each loads, names its source beside every value, and plans for a
// target of which only sizes are known.
#include <glob.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "configs/config.h"
#include "tests/support/config_files.h"
#include "tests/support/program.h"

#define RECIPES DTRAIN_SOURCE_DIR "/configs/recipes/"

static const char target[] =
    "{\"model_type\": \"qwen3\", \"hidden_size\": 64, \"vocab_size\": 151936,"
    " \"num_hidden_layers\": 36, \"num_attention_heads\": 4, \"num_key_value_heads\": 2,"
    " \"head_dim\": 16, \"intermediate_size\": 128, \"rms_norm_eps\": 1e-6,"
    " \"rope_theta\": 1000000, \"tie_word_embeddings\": true}";

static glob_t recipes;

static void each_loads(void **state)
{
    (void)state;
    for (size_t i = 0; i < recipes.gl_pathc; i++) {
        struct config config;
        struct error err = {""};
        config_init(&config);
        if (config_load(&config, recipes.gl_pathv[i], NULL, 0, &err) != 0)
            fail_msg("%s", err.text);
        // The place of its results is its own name.
        const char *name = strrchr(recipes.gl_pathv[i], '/') + 1;
        const char *run = strrchr(config.run.dir, '/') + 1;
        assert_int_equal(strncmp(name, run, strlen(run)), 0);
        assert_string_equal(name + strlen(run), ".yaml");
        config_release(&config);
    }
}

// Whether the line's key is a place of the user's, or a choice whose numbers follow.
static bool says_itself(const char *line)
{
    static const char *const keys[] = {
        "dir:", "path:", "train:", "kind:", "slot_weight:", "compute:", "per:", "layer_types:"};
    const char *key = line + strspn(line, " ");
    for (size_t i = 0; i < sizeof(keys) / sizeof(*keys); i++)
        if (strncmp(key, keys[i], strlen(keys[i])) == 0)
            return true;
    return false;
}

// Every other value has a comment.
static void each_names_its_sources(void **state)
{
    (void)state;
    for (size_t i = 0; i < recipes.gl_pathc; i++) {
        FILE *file = fopen(recipes.gl_pathv[i], "re");
        char line[512];
        int values = 0, commented = 0;
        assert_non_null(file);
        while (fgets(line, sizeof(line), file) != NULL) {
            bool value = line[0] == ' ' && !says_itself(line);
            values += value;
            commented += value && strchr(line, '#') != NULL;
        }
        fclose(file);
        assert_true(values > 15);
        if (commented != values)
            fail_msg("%s: %d of %d values name no source", recipes.gl_pathv[i], values - commented,
                     values);
    }
}

static void each_plans(void **state)
{
    struct config_folder *folder = *state;
    char *sizes = config_folder_write(folder, "target.json", target);
    for (size_t i = 0; i < recipes.gl_pathc; i++) {
        char *out = memory_format("%s/plan.json", folder->path);
        const char *const words[] = {
            "plan", "--config", recipes.gl_pathv[i], "--json", "--target-config", sizes, "--gpus",
            "8",    "--set",    "run.device=cpu",    NULL};
        int status = program_run(out, words);
        char *text = program_text(out);
        if (status != 0)
            fail_msg("%s: %s", recipes.gl_pathv[i], text);
        free(text);
        cJSON *plan = program_json(out);
        const cJSON *step = cJSON_GetObjectItem(plan, "step");
        assert_true(program_number(cJSON_GetObjectItem(step, "flops"), "total") > 0.0);
        cJSON_Delete(plan);
        free(out);
    }
    free(sizes);
}

static int open_folder(void **state)
{
    static struct config_folder folder;
    config_folder_open(&folder);
    *state = &folder;
    return 0;
}

static int close_folder(void **state)
{
    config_folder_close(*state);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_loads),
        cmocka_unit_test(each_names_its_sources),
        cmocka_unit_test_setup_teardown(each_plans, open_folder, close_folder),
    };
    if (glob(RECIPES "*.yaml", 0, NULL, &recipes) != 0 || recipes.gl_pathc < 4)
        return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    globfree(&recipes);
    return failed;
}
