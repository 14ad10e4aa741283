// Owns the layout of --help. Its words are the table's.
#include "trainer/help.h"

#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/memory.h"

enum { WIDTH = 80, OPTION_COLUMN = 23 };

const struct help_status help_statuses[4] = {
    {EXIT_DONE, "done"},
    {EXIT_FAILED, "what was begun failed, faults were found, or it does not fit"},
    {EXIT_REFUSED, "command line, config or data were refused before any work"},
    {EXIT_STOPPED, "stopped by a signal or data.spool_wait, with a checkpoint that resumes"},
};

// Words of the text, broken into lines that begin at `indent`; the first one begins at `column`. An empty line
// stays one.
static void print_wrapped(FILE *out, const char *text, int column, int indent)
{
    bool first = true;
    while (*text != '\0') {
        if (*text == '\n') {
            fprintf(out, "\n\n%*s", indent, "");
            text += strspn(text, "\n");
            column = indent;
            first = true;
            continue;
        }
        int length = (int)strcspn(text, " \n");
        if (!first && column + 1 + length > WIDTH) {
            fprintf(out, "\n%*s", indent, "");
            column = indent;
            first = true;
        }
        fprintf(out, "%s%.*s", first ? "" : " ", length, text);
        column += length + (first ? 0 : 1);
        first = false;
        text += length;
        text += strspn(text, " ");
    }
    fputc('\n', out);
}

char *help_option(const struct command_option *option)
{
    const char *value = option_value(option);
    if (value == NULL)
        return memory_format("--%s", option->name);
    if (option_row_of(option->name)->kind == OPTION_PERHAPS)
        return memory_format("--%s[=%s]", option->name, value);
    return memory_format("--%s %s", option->name, value);
}

char *help_usage(const struct command *command)
{
    bool is_default = command == command_default();
    char *usage =
        memory_format("dtrain %s%s%s", is_default ? "[" : "", command->name, is_default ? "]" : "");
    for (size_t i = 0; i < command->option_count; i++) {
        const struct command_option *option = &command->options[i];
        bool again = option_row_of(option->name)->kind == OPTION_TEXTS;
        char *before = usage, *words = help_option(option);
        usage = memory_format(option->required ? "%s %s"
                              : again          ? "%s [%s]..."
                                               : "%s [%s]",
                              before, words);
        free(before);
        free(words);
    }
    if (command->operand != NULL) {
        char *before = usage;
        usage = memory_format("%s %s%s", before, command->operand, command->operands ? "..." : "");
        free(before);
    }
    return usage;
}

// The usage breaks between options, not inside one.
static void print_usage(FILE *out, const struct command *command)
{
    const int indent = 8;
    char *usage = help_usage(command);
    int column = fprintf(out, "usage: ");
    bool first = true;
    for (char *at = usage, *next; at != NULL; at = next) {
        next = strstr(at, " [-");
        char *need = strstr(at, " --");
        if (next == NULL || (need != NULL && need < next))
            next = need;
        if (next != NULL)
            *next++ = '\0';
        int length = (int)strlen(at);
        if (!first && column + 1 + length > WIDTH) {
            fprintf(out, "\n%*s", indent, "");
            column = indent;
        } else if (!first) {
            fputc(' ', out);
            column++;
        }
        fputs(at, out);
        column += length;
        first = false;
    }
    fputc('\n', out);
    free(usage);
}

static void print_option(FILE *out, const struct command_option *option)
{
    char *words = help_option(option);
    int column = fprintf(out, "  %s", words);
    if (column + 2 > OPTION_COLUMN) {
        fputc('\n', out);
        column = 0;
    }
    fprintf(out, "%*s", OPTION_COLUMN - column, "");
    print_wrapped(out, option_help(option), OPTION_COLUMN, OPTION_COLUMN);
    free(words);
}

static void print_body(FILE *out, const struct command *command)
{
    print_wrapped(out, command->text, 0, 0);
    if (command->option_count > 0)
        fputc('\n', out);
    for (size_t i = 0; i < command->option_count; i++)
        print_option(out, &command->options[i]);
}

void help_print_command(FILE *out, const struct command *command)
{
    print_usage(out, command);
    fputc('\n', out);
    print_body(out, command);
}

void help_print_group(FILE *out, const char *group)
{
    char of[COMMAND_GROUP_BYTES];
    bool first = true;
    for (size_t i = 0; i < command_count; i++) {
        if (!command_group(&command_table[i], of) || strcmp(of, group) != 0)
            continue;
        if (!first)
            fputc('\n', out);
        help_print_command(out, &command_table[i]);
        first = false;
    }
}

void help_print(FILE *out)
{
    const int column = 18;
    fputs("dtrain trains drafters for speculative decoding from hidden states.\n\nCommands:\n",
          out);
    for (size_t i = 0; i < command_count; i++) {
        fprintf(out, "  %-*s", column - 2, command_table[i].name);
        print_wrapped(out, command_table[i].summary, column, column);
    }
    fputc('\n', out);
    print_wrapped(
        out,
        "`dtrain plan --config FILE` says whether a run fits, `dtrain --config FILE` trains, "
        "and the same command continues; configs/recipes has configs to begin with. "
        "`dtrain COMMAND --help` says what a command takes, `dtrain --version` which "
        "program this is.",
        0, 0);
    fputs("\nExit status:\n", out);
    for (size_t i = 0; i < sizeof(help_statuses) / sizeof(*help_statuses); i++) {
        fprintf(out, "  %-*d", column - 2, help_statuses[i].status);
        print_wrapped(out, help_statuses[i].meaning, column, column);
    }
    fputs("\nWithout a command:\n\n", out);
    help_print_command(out, command_default());
}
