// What the program writes about its own commands and keys: completion in a real bash, in zsh where there is one,
// the manual page, --help. What they must know comes from the same tables.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/error.h"
#include "base/memory.h"
#include "configs/config.h"
#include "tests/support/shard_fixture.h"
#include "trainer/command_table.h"
#include "trainer/export.h"

enum { MOST_WORDS = 8 };

static char *folder;

// Runs a command of the shell in the folder. Its output, which the caller frees; *status: its exit status.
static char *shell(int *status, const char *command)
{
    char *whole = memory_format("cd '%s' && %s", folder, command);
    FILE *pipe = popen(whole, "r");
    assert_non_null(pipe);
    size_t used = 0, size = 1 << 20;
    char *text = memory_alloc(size, 1);
    while (used + 1 < size && !feof(pipe))
        used += fread(text + used, 1, size - 1 - used, pipe);
    text[used] = '\0';
    *status = pclose(pipe);
    free(whole);
    return text;
}

static int open_folder(void **state)
{
    int status;
    (void)state;
    folder = fixture_folder();
    free(shell(&status, "mkdir shards && touch run.yaml 'of two words.yaml' shards/a.h5 && "
                        "'" DTRAIN_BINARY "' completion bash > complete.bash && "
                        "'" DTRAIN_BINARY "' completion zsh > _dtrain && "
                        "'" DTRAIN_BINARY "' man > dtrain.1"));
    return status;
}

static int close_folder(void **state)
{
    (void)state;
    fixture_folder_remove(folder);
    return 0;
}

// ---- bash ----------------------------------------------------------------------------------------

// What bash offers after these words, the last of which may have begun; a line each, sorted. The words are as bash
// has them: parted at '=' where `breaks` holds it.
static char *offers(const char *breaks, const char *const *words)
{
    char *list = memory_strdup("");
    int count = 0, status;
    for (; words[count] != NULL; count++) {
        char *before = list;
        list = memory_format("%s \"%s\"", before, words[count]);
        free(before);
    }
    char *script = memory_format("bash --norc -c 'source ./complete.bash; COMP_WORDBREAKS=\"%s\"; "
                                 "COMP_WORDS=(%s); COMP_CWORD=%d; _dtrain; "
                                 "printf \"%%s\\n\" \"${COMPREPLY[@]}\" | LC_ALL=C sort'",
                                 breaks, list, count - 1);
    char *text = shell(&status, script);
    assert_int_equal(status, 0);
    free(script);
    free(list);
    return text;
}

static const struct offered {
    const char *words[MOST_WORDS]; // behind dtrain
    const char *offers;            // lines
} offered[] = {
    {{"ev"}, "eval\n"},
    {{"tr"}, "trace\ntrain\n"},
    {{"data", "st"}, "stats\n"},
    {{"data", ""}, "--help\ncheck\nmanifest\norder\nstats\n"},
    {{"--re"}, "--replan\n--resume\n"},
    {{"train", "--re"}, "--replan\n--resume\n"},
    {{"eval", "--config", "r"}, "run.yaml\n"},
    {{"eval", "--config", "of"}, "of two words.yaml\n"},
    {{"eval", "--config", "=", "r"}, "run.yaml\n"},
    {{"eval", "--checkpoint", ""}, "shards\n"},
    {{"data", "check", "shards/"}, "shards/a.h5\n"},
    {{"export", "--format", "s"}, "specforge\nspeculators\n"},
    {{"export", "--allow-unservable", "=", "wi"}, "window_origin\n"},
    {{"--resume", "n"}, "none\n"},
    {{"--resume", "s"}, "shards\n"},
    {{"--set", "run.se"}, "run.seed=\n"},
    {{"--set", "rope_s"}, "rope_scaling=\n"},
    {{"--set", "run.device", "=", "c"}, "cpu\ncuda\n"},
    {{"--set", "=", "device", "=", "c"}, "cpu\ncuda\n"},
    {{"sweep", "--grid", "device", "=", "cuda,c"}, "cuda,cpu\ncuda,cuda\n"},
    {{"sweep", "--grid", "train", "=", "shards/a.h5,sh"}, "shards/a.h5,shards\n"},
    {{"--set", "check_crc", "="}, "false\ntrue\n"},
    {{"--set", "target.path", "=", "sh"}, "shards\n"},
    {{"--set", "run.seed", "=", "1", "--repl"}, "--replan\n"},
    {{"plan", "--vary", "seq_len,group_r"}, "seq_len,group_rows\n"},
    {{"completion", "z"}, "zsh\n"},
    {{"eval", "--rows", ""}, "\n"},
    {{"nonsense", "x"}, "\n"},
};

static void bash_offers_what_fits(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(offered) / sizeof(*offered); i++) {
        const char *words[MOST_WORDS + 2] = {"dtrain"};
        memcpy(words + 1, offered[i].words, sizeof(offered[i].words));
        char *text = offers(" =:", words);
        if (strcmp(text, offered[i].offers) != 0)
            fail_msg("case %zu, after %s: bash offers\n%swhere it should offer\n%s", i, words[1],
                     text, offered[i].offers);
        free(text);
    }
}

// Where '=' does not part words, all of the word is replaced.
static void bash_offers_whole_words(void **state)
{
    (void)state;
    static const struct offered whole[] = {
        {{"--set", "run.device=cu"}, "run.device=cuda\n"},
        {{"--set=run.device=cu"}, "--set=run.device=cuda\n"},
        {{"sweep", "--grid=run.device=cpu,cu"}, "--grid=run.device=cpu,cuda\n"},
        {{"--config=ru"}, "--config=run.yaml\n"},
        {{"--config", "ru"}, "run.yaml\n"},
    };
    for (size_t i = 0; i < sizeof(whole) / sizeof(*whole); i++) {
        const char *words[MOST_WORDS + 2] = {"dtrain"};
        memcpy(words + 1, whole[i].words, sizeof(whole[i].words));
        char *text = offers(" ", words);
        assert_string_equal(text, whole[i].offers);
        free(text);
    }
}

static bool has_line(const char *text, const char *line)
{
    size_t length = strlen(line);
    for (const char *at = text; (at = strstr(at, line)) != NULL; at += length)
        if ((at == text || at[-1] == '\n') && at[length] == '\n')
            return true;
    return false;
}

static size_t count_lines(const char *text)
{
    size_t count = 0;
    for (; (text = strchr(text, '\n')) != NULL; text++)
        count++;
    return count;
}

static void bash_knows_every_option(void **state)
{
    (void)state;
    for (size_t i = 0; i < command_count; i++) {
        const struct command *command = &command_table[i];
        const char *words[MOST_WORDS] = {"dtrain"};
        char *name = memory_strdup(command->name), *second = strchr(name, ' ');
        if (second != NULL)
            *second++ = '\0';
        words[1] = name;
        words[2] = second != NULL ? second : "--";
        words[3] = second != NULL ? "--" : NULL;
        char *text = offers(" =:", words);
        for (size_t o = 0; o < command->option_count; o++) {
            char *option = memory_format("--%s", command->options[o].name);
            if (!has_line(text, option))
                fail_msg("dtrain %s: bash does not offer %s", command->name, option);
            free(option);
        }
        assert_int_equal(count_lines(text), command->option_count + common_option_count);
        free(text);
        free(name);
    }
}

static void find_key(void *context, const struct config_key_words *key)
{
    char *full = memory_format("%s.%s=", key->section, key->name);
    if (!has_line(context, full))
        fail_msg("bash does not offer %s", full);
    if (key->unique != has_line(context, full + strlen(key->section) + 1))
        fail_msg(
            "%s without its section: bash offers it where it is not unique, or not where it is",
            full);
    free(full);
}

static void find_choices(void *context, const struct config_key_words *key)
{
    (void)context;
    if (key->choices == NULL)
        return;
    char *full = memory_format("%s.%s", key->section, key->name);
    const char *words[] = {"dtrain", "--set", full, "=", NULL};
    char *text = offers(" =:", words);
    for (const char *choice = key->choices; *choice != '\0'; choice += strlen(choice) + 1)
        if (!has_line(text, choice))
            fail_msg("bash does not offer %s=%s", full, choice);
    free(text);
    free(full);
}

static void bash_knows_every_key(void **state)
{
    (void)state;
    const char *words[] = {"dtrain", "--set", "", NULL};
    char *text = offers(" =:", words);
    config_visit_keys(find_key, text);
    free(text);
    config_visit_keys(find_choices, NULL);
}

// ---- zsh -----------------------------------------------------------------------------------------

static void zsh_completes(void **state)
{
    (void)state;
    int status;
    free(shell(&status, "command -v zsh"));
    if (status != 0) {
        print_message("skipped: there is no zsh\n");
        skip();
    }
    char *text = shell(
        &status,
        "timeout 120 zsh -f " DTRAIN_SOURCE_DIR "/tests/zsh_completion.zsh ./_dtrain "
        "'dtrain eva' 'dtrain data st' 'dtrain eval --serv' 'dtrain export --format z' "
        "'dtrain --set run.device=cu' 'dtrain --set run.dev' 'dtrain --set rope_s' "
        "'dtrain plan --vary seq_len,group_r' 'dtrain completion z' 'dtrain --config run.y' "
        "'dtrain data check shards/' 'dtrain export --allow-unservable=wi' 'dtrain --resume no' "
        "'dtrain --replan --res'");
    assert_int_equal(status, 0);
    assert_string_equal(text, "[dtrain eval ]\n[dtrain data stats ]\n[dtrain eval --served ]\n"
                              "[dtrain export --format zlab ]\n[dtrain --set run.device=cuda ]\n"
                              "[dtrain --set run.device=]\n[dtrain --set rope_scaling=]\n"
                              "[dtrain plan --vary seq_len,group_rows]\n[dtrain completion zsh ]\n"
                              "[dtrain --config run.yaml ]\n[dtrain data check shards/a.h5 ]\n"
                              "[dtrain export --allow-unservable=window_origin ]\n"
                              "[dtrain --resume none ]\n[dtrain --replan --resume=]\n");
    free(text);
}

// ---- the manual page -----------------------------------------------------------------------------

// Warnings of the tools, which say nothing of a good page.
static void man_page_renders(void **state)
{
    (void)state;
    int status;
    bool any = false;
    const char *const checks[] = {
        "groff",
        "groff -man -Tutf8 -ww dtrain.1 2>&1 >/dev/null",
        "mandoc",
        "mandoc -Tlint dtrain.1",
    };
    for (size_t i = 0; i < sizeof(checks) / sizeof(*checks); i += 2) {
        char *which = memory_format("command -v %s", checks[i]);
        free(shell(&status, which));
        free(which);
        if (status != 0)
            continue;
        char *said = shell(&status, checks[i + 1]);
        any = true;
        assert_string_equal(said, "");
        free(said);
    }
    if (!any) {
        print_message("skipped: there is neither groff nor mandoc\n");
        skip();
    }
}

// '-' is "\-" in roff.
static void must_hold(const char *page, const char *words)
{
    char *roff = memory_alloc(2 * strlen(words) + 1, 1), *end = roff;
    for (; *words != '\0'; words++) {
        if (*words == '-')
            *end++ = '\\';
        *end++ = *words;
    }
    if (strstr(page, roff) == NULL)
        fail_msg("the manual page does not hold: %s", roff);
    free(roff);
}

static void find_key_section(void *context, const struct config_key_words *key)
{
    char *words = memory_format(".BR %s.%s ", key->section, key->name);
    must_hold(context, words);
    free(words);
}

static void man_page_has_everything(void **state)
{
    (void)state;
    int status;
    char *page = shell(&status, "cat dtrain.1");
    for (size_t i = 0; i < command_count; i++) {
        const struct command *command = &command_table[i];
        char *heading = memory_format(".SS dtrain %s\n", command->name);
        must_hold(page, heading);
        free(heading);
        for (size_t o = 0; o < command->option_count; o++) {
            char *option = memory_format(".B --%s", command->options[o].name);
            must_hold(page, option);
            free(option);
        }
    }
    config_visit_keys(find_key_section, page);
    free(page);
}

// ---- help, and the table itself ------------------------------------------------------------------

static void help_has_every_command(void **state)
{
    (void)state;
    int status;
    char *overview = shell(&status, "'" DTRAIN_BINARY "' --help");
    for (size_t i = 0; i < command_count; i++) {
        const struct command *command = &command_table[i];
        char *call = memory_format("'%s' %s --help", DTRAIN_BINARY, command->name);
        char *help = shell(&status, call);
        assert_int_equal(status, 0);
        assert_non_null(strstr(overview, command->summary[0] != '\0' ? command->name : "none"));
        for (size_t o = 0; o < command->option_count; o++) {
            char *option = memory_format("\n  --%s", command->options[o].name);
            if (strstr(help, option) == NULL)
                fail_msg("dtrain %s --help does not say %s", command->name, option + 3);
            free(option);
        }
        for (const char *line = help; line != NULL; line = strchr(line, '\n')) {
            line += *line == '\n';
            assert_true(strcspn(line, "\n") <= 80);
        }
        free(help);
        free(call);
    }
    free(overview);
}

// Options are in order, all are taken by some command, and each command says something of each of its own.
static void table_is_sound(void **state)
{
    (void)state;
    for (size_t i = 0; i < option_row_count; i++) {
        bool taken = false;
        const struct option_row *row = &option_rows[i];
        if (i > 0 && strcmp(option_rows[i - 1].name, row->name) >= 0)
            fail_msg("option rows: --%s is not in its place", row->name);
        assert_int_equal(row->value == NULL, row->kind == OPTION_FLAG || row->kind == OPTION_ASK);
        for (size_t c = 0; c < command_count; c++)
            taken = taken || command_option_find(&command_table[c], row->name) != NULL;
        if (!taken)
            fail_msg("no command takes --%s", row->name);
    }
    for (size_t c = 0; c < command_count; c++)
        for (size_t o = 0; o < command_table[c].option_count; o++)
            if (option_help(&command_table[c].options[o]) == NULL)
                fail_msg("dtrain %s: nothing is said of --%s", command_table[c].name,
                         command_table[c].options[o].name);
}

// Words that completion offers are taken by who reads them.
static void choices_are_taken(void **state)
{
    (void)state;
    struct error err = {""};
    const char *choice = option_row_of("format")->choices;
    for (; *choice != '\0'; choice += strlen(choice) + 1)
        assert_true(export_format_find(choice) >= 0);
    choice = option_row_of("allow-unservable")->choices;
    for (; *choice != '\0'; choice += strlen(choice) + 1)
        if (export_check_allowed(choice, &err) != 0)
            fail_msg("%s", err.text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(table_is_sound),          cmocka_unit_test(choices_are_taken),
        cmocka_unit_test(help_has_every_command),  cmocka_unit_test(bash_offers_what_fits),
        cmocka_unit_test(bash_offers_whole_words), cmocka_unit_test(bash_knows_every_option),
        cmocka_unit_test(bash_knows_every_key),    cmocka_unit_test(zsh_completes),
        cmocka_unit_test(man_page_renders),        cmocka_unit_test(man_page_has_everything),
    };
    return cmocka_run_group_tests(tests, open_folder, close_folder);
}
