// Owns how words become a command with its options, and what is said of words that do not.
#include "trainer/command_line.h"

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/memory.h"

enum { MOST_OPTIONS = 64, LONG_OPTION = 256 }; // getopt's value of option i is LONG_OPTION + i

// ---- the command ---------------------------------------------------------------------------------

static bool is_group(const char *word)
{
    char group[COMMAND_GROUP_BYTES];
    for (size_t i = 0; i < command_count; i++)
        if (command_group(&command_table[i], group) && strcmp(group, word) == 0)
            return true;
    return false;
}

// "check, stats, order or manifest".
static void list_words(const char *const *words, size_t count, char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; i < count && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s",
                                 i == 0           ? ""
                                 : i + 1 == count ? " or "
                                                  : ", ",
                                 words[i]);
}

static int refuse_group(const char *group, const char *word, struct error *err)
{
    const char *commands[MOST_OPTIONS];
    char words[256];
    size_t count = 0, length = strlen(group);
    for (size_t i = 0; i < command_count; i++)
        if (strncmp(command_table[i].name, group, length) == 0 &&
            command_table[i].name[length] == ' ')
            commands[count++] = command_table[i].name + length + 1;
    list_words(commands, count, words, sizeof(words));
    if (word == NULL || word[0] == '-')
        return error_set(err, "dtrain %s: say %s\nsee dtrain %s --help", group, words, group);
    return error_set(err, "dtrain %s: say %s, not %s\nsee dtrain %s --help", group, words, word,
                     group);
}

static int refuse_command(const char *word, struct error *err)
{
    const char *names[MOST_OPTIONS];
    for (size_t i = 0; i < command_count; i++)
        names[i] = command_table[i].name;
    const char *nearest = error_nearest(word, names, command_count);
    if (nearest != NULL)
        return error_set(err, "dtrain: unknown command %s; did you mean %s?\nsee dtrain --help",
                         word, nearest);
    return error_set(err, "dtrain: unknown command %s\nsee dtrain --help", word);
}

// The command that the first words name; the default where none is named. *skip: how many words it took.
static int find_command(struct command_line *line, int argc, char **argv, int *skip,
                        struct error *err)
{
    char name[2 * COMMAND_GROUP_BYTES];
    *skip = 0;
    line->command = command_default();
    if (argc < 2 || argv[1][0] == '-')
        return 0;
    line->named = true;
    const char *second = argc > 2 ? argv[2] : NULL;
    if (is_group(argv[1])) {
        line->group = argv[1];
        *skip = 2;
        snprintf(name, sizeof(name), "%s %s", argv[1], second != NULL ? second : "");
        line->command = command_find(name);
        if (line->command != NULL)
            return 0;
        line->asked = ASKED_HELP;
        bool asks = second != NULL && (strcmp(second, "--help") == 0 || strcmp(second, "-h") == 0);
        return asks ? 0 : refuse_group(argv[1], second, err);
    }
    *skip = 1;
    line->command = command_find(argv[1]);
    return line->command != NULL ? 0 : refuse_command(argv[1], err);
}

// ---- its options ---------------------------------------------------------------------------------

static int take_count(const struct option_row *row, const char *text, long long *value,
                      struct error *err)
{
    char *end;
    errno = 0;
    *value = strtoll(text, &end, 10);
    if (*end == '\0' && end != text && errno == 0 && *value >= row->least)
        return 0;
    return error_set(err, "--%s: not a number of %lld or more: %s", row->name, row->least, text);
}

static int take_option(const struct option_row *row, struct options *options, const char *value,
                       struct error *err)
{
    void *at = (char *)options + row->value_at;
    switch (row->kind) {
    case OPTION_FLAG:
        *(bool *)at = true;
        break;
    case OPTION_TEXT:
        *(const char **)at = value;
        break;
    case OPTION_PERHAPS:
        *(const char **)at = value != NULL ? value : "";
        break;
    case OPTION_COUNT:
        return take_count(row, value, at, err);
    case OPTION_TEXTS: {
        size_t *count = (size_t *)((char *)options + row->count_at);
        const char ***texts = at;
        *texts = memory_resize(*texts, *count + 1, sizeof(**texts));
        (*texts)[(*count)++] = value;
        break;
    }
    case OPTION_ASK:
        break;
    }
    return 0;
}

// The options of a command as getopt wants them.
static void list_options(const struct command *command, struct option list[MOST_OPTIONS])
{
    size_t count = 0;
    BUG_UNLESS(command->option_count + common_option_count < MOST_OPTIONS);
    for (size_t i = 0; i < command->option_count + common_option_count; i++) {
        const struct command_option *option = i < command->option_count
                                                  ? &command->options[i]
                                                  : &common_options[i - command->option_count];
        const struct option_row *row = option_row_of(option->name);
        int argument = row->kind == OPTION_FLAG || row->kind == OPTION_ASK ? no_argument
                       : row->kind == OPTION_PERHAPS                       ? optional_argument
                                                                           : required_argument;
        list[count] = (struct option){option->name, argument, NULL, LONG_OPTION + (int)count};
        count++;
    }
    list[count] = (struct option){NULL, 0, NULL, 0};
}

// The first command that takes an option of that name; NULL: none does.
static const struct command *taker_of(const char *name)
{
    for (size_t i = 0; i < command_count; i++)
        if (command_option_find(&command_table[i], name) != NULL)
            return &command_table[i];
    return NULL;
}

// A word that begins with '-' and is no option of the command.
static int refuse_option(const char *word, const struct option *list, struct error *err)
{
    const char *names[MOST_OPTIONS];
    char name[64];
    size_t count = 0;
    snprintf(name, sizeof(name), "%.*s", (int)strcspn(word + 2, "="), word + 2);
    for (const struct option *option = list; option->name != NULL; option++)
        names[count++] = option->name;
    const struct command *taker = taker_of(name);
    if (taker != NULL)
        return error_set(err, "no option --%s here; dtrain %s takes it", name, taker->name);
    const char *nearest = error_nearest(name, names, count);
    if (nearest != NULL)
        return error_set(err, "no option --%s; did you mean --%s?", name, nearest);
    return error_set(err, "no option --%s", name);
}

// What getopt did not take.
static int refuse_word(int code, const char *word, const struct option *list, struct error *err)
{
    if (optopt == 0)
        return refuse_option(word, list, err);
    if (optopt < LONG_OPTION)
        return error_set(err, "no option -%c; options are words, as --%s", optopt, list[0].name);
    const struct option_row *row = option_row_of(list[optopt - LONG_OPTION].name);
    if (code == ':')
        return error_set(err, "--%s: %s is missing", row->name, row->value);
    return error_set(err, "--%s takes no value", row->name);
}

static int read_options(struct command_line *line, int argc, char **argv, struct error *err)
{
    struct option list[MOST_OPTIONS];
    int id;
    list_options(line->command, list);
    optind = 0; // begins anew, with the mode that the ':' asks for
    opterr = 0;
    while (line->asked == ASKED_RUN && (id = getopt_long(argc, argv, ":h", list, NULL)) != -1) {
        if (id == '?' || id == ':')
            return refuse_word(id, argv[optind - 1], list, err);
        const struct option_row *row =
            option_row_of(id == 'h' ? "help" : list[id - LONG_OPTION].name);
        if (row->kind == OPTION_ASK)
            line->asked = strcmp(row->name, "help") == 0 ? ASKED_HELP : ASKED_VERSION;
        else if (take_option(row, &line->options, optarg, err) != 0)
            return -1;
    }
    line->options.files = argv + optind;
    line->options.file_count = argc - optind;
    return 0;
}

// ---- what must be there --------------------------------------------------------------------------

static bool is_given(const struct options *options, const struct option_row *row)
{
    const void *at = (const char *)options + row->value_at;
    if (row->kind == OPTION_COUNT)
        return *(const long long *)at != 0;
    BUG_UNLESS(row->kind == OPTION_TEXT || row->kind == OPTION_TEXTS);
    return *(const void *const *)at != NULL;
}

// An operand that is one of a few words.
static int check_choice(const struct command *command, const char *word, struct error *err)
{
    const char *choices[MOST_OPTIONS];
    char text[256];
    size_t count = 0;
    const char *choice = command->operand_choices;
    for (; *choice != '\0'; choice += strlen(choice) + 1) {
        if (strcmp(choice, word) == 0)
            return 0;
        choices[count++] = choice;
    }
    list_words(choices, count, text, sizeof(text));
    return error_set(err, "%s: say %s, not %s", command->operand, text, word);
}

// A word that nothing takes: `--set max_steps 3` leaves one behind.
static int refuse_operand(const struct options *options, int at, struct error *err)
{
    for (size_t i = 0; i < options->set_count; i++)
        if (strchr(options->sets[i], '=') == NULL)
            return error_set(err, "--set %s: expected key=value, as --set %s=%s", options->sets[i],
                             options->sets[i], options->files[at]);
    return error_set(err, "unexpected word %s", options->files[at]);
}

static int check_operands(const struct command *command, const struct options *options,
                          struct error *err)
{
    int count = options->file_count;
    if (command->operand == NULL)
        return count == 0 ? 0 : refuse_operand(options, 0, err);
    if (count == 0)
        return error_set(err, command->operands ? "at least one %s is required" : "%s is required",
                         command->operand);
    if (count > 1 && !command->operands)
        return refuse_operand(options, 1, err);
    return command->operand_choices != NULL ? check_choice(command, options->files[0], err) : 0;
}

static int check_needs(const struct command *command, const struct options *options,
                       struct error *err)
{
    for (size_t i = 0; i < command->option_count; i++) {
        const struct command_option *option = &command->options[i];
        if (option->required && !is_given(options, option_row_of(option->name)))
            return error_set(err, "--%s is required", option->name);
    }
    return check_operands(command, options, err);
}

int command_line_read(struct command_line *line, int argc, char **argv, struct error *err)
{
    int skip;
    *line = (struct command_line){.options = {.arguments = argv}};
    if (find_command(line, argc, argv, &skip, err) != 0)
        return -1;
    const struct command *command = line->command;
    if (command == NULL)
        return 0;
    if (read_options(line, argc - skip, argv + skip, err) == 0 &&
        (line->asked != ASKED_RUN || check_needs(command, &line->options, err) == 0))
        return 0;
    struct error fault = *err;
    return error_set(err, "dtrain %s: %s\nsee dtrain %s --help", command->name, fault.text,
                     command->name);
}

void command_line_release(struct command_line *line)
{
    for (size_t i = 0; line->command != NULL && i < line->command->option_count; i++) {
        const struct option_row *row = option_row_of(line->command->options[i].name);
        if (row->kind == OPTION_TEXTS)
            free(*(const char ***)((char *)&line->options + row->value_at));
    }
}
