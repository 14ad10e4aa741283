// Owns the manual page, written as roff from the tables of commands and keys.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "configs/config.h"
#include "trainer/command_table.h"
#include "trainer/help.h"
#include "version.h"

// One word. A line may not begin like a request; the '-' of options is no hyphen; `code` is bold. Returns the
// bytes written.
static int print_word(FILE *out, const char *word, size_t length, bool begins, bool *bold)
{
    int written = 0;
    if (begins && (*word == '.' || *word == '\''))
        written += fprintf(out, "\\&");
    for (size_t i = 0; i < length; i++) {
        if (word[i] == '`')
            written += fprintf(out, (*bold = !*bold) ? "\\fB" : "\\fR");
        else if (word[i] == '\\')
            written += fprintf(out, "\\e");
        else if (word[i] == '-')
            written += fprintf(out, "\\-");
        else
            written += fprintf(out, "%c", word[i]);
    }
    return written;
}

// Words in lines of less than 80 bytes; an empty line begins a paragraph.
static void print_text(FILE *out, const char *text)
{
    bool bold = false;
    int column = 0;
    while (*text != '\0') {
        size_t length = strcspn(text, " \n");
        if (column > 0 && column + 1 + 2 * (int)length > 78) {
            fputc('\n', out);
            column = 0;
        }
        if (column > 0)
            column += fprintf(out, " ");
        column += print_word(out, text, length, column == 0, &bold);
        text += length;
        if (*text == '\n') {
            fputs("\n.PP\n", out);
            column = 0;
        }
        text += strspn(text, " \n");
    }
    fputc('\n', out);
}

// ---- commands ------------------------------------------------------------------------------------

static void print_usage(FILE *out, const struct command *command)
{
    char *usage = help_usage(command);
    print_text(out, usage);
    free(usage);
}

static void print_options(FILE *out, const struct command_option *options, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        char *words = help_option(&options[i]);
        fputs(".TP\n.B ", out);
        print_text(out, words);
        print_text(out, option_help(&options[i]));
        free(words);
    }
}

static void print_commands(FILE *out)
{
    fputs(".SH COMMANDS\n", out);
    for (size_t i = 0; i < command_count; i++) {
        const struct command *command = &command_table[i];
        fprintf(out, ".SS dtrain %s\n", command->name);
        print_usage(out, command);
        fputs(".PP\n", out);
        print_text(out, command->text);
        print_options(out, command->options, command->option_count);
    }
    fputs(".SS Options of every command\n", out);
    print_options(out, common_options, common_option_count);
}

// ---- keys ----------------------------------------------------------------------------------------

struct keys {
    FILE *out;
    const char *section; // of the last key
};

static void print_key(void *context, const struct config_key_words *key)
{
    struct keys *keys = context;
    FILE *out = keys->out;
    if (keys->section != key->section) {
        fprintf(out, ".SS %s\n", key->section);
        print_text(out, key->section_help);
    }
    keys->section = key->section;
    fprintf(out, ".TP\n.BR %s.%s \" (%s", key->section, key->name, key->type);
    if (key->initial[0] != '\0')
        fprintf(out, "; %s", key->initial);
    fputs(")\"\n", out);
    print_text(out, key->help);
    if (key->allowed[0] != '\0' || key->fixed) {
        fprintf(out, "(%s%s%s)\n", key->allowed, key->allowed[0] != '\0' && key->fixed ? "; " : "",
                key->fixed ? "fixed on resume" : "");
    }
}

static void print_keys(FILE *out)
{
    struct keys keys = {out, NULL};
    fputs(".SH CONFIG KEYS\n", out);
    print_text(out,
               "A config is a YAML file of sections with keys; paths are relative to the folder "
               "of the file. `--set` overrides it. In parentheses: the type and the default.");
    config_visit_keys(print_key, &keys);
}

int command_man(const struct options *options)
{
    FILE *out = stdout;
    (void)options;
    fprintf(out,
            ".\\\" Written by `dtrain man` from the program's tables.\n"
            ".TH DTRAIN 1 %s \"dtrain %s\" \"User Commands\"\n"
            ".SH NAME\ndtrain \\- trains drafters for speculative decoding from hidden states\n"
            ".SH SYNOPSIS\n",
            DTRAIN_DATE, DTRAIN_VERSION);
    for (size_t i = 0; i < command_count; i++) {
        if (i > 0)
            fputs(".br\n", out);
        print_usage(out, &command_table[i]);
    }
    fputs(".SH DESCRIPTION\n", out);
    print_text(out,
               "The program trains small models that guess the next tokens of a large one, from "
               "hidden states of the large one that were extracted before and lie in HDF5 "
               "shards. A run is a config and a folder; started again, it continues.");
    print_commands(out);
    print_keys(out);
    fputs(".SH EXIT STATUS\n", out);
    for (size_t i = 0; i < sizeof(help_statuses) / sizeof(*help_statuses); i++) {
        fprintf(out, ".TP\n.B %d\n", help_statuses[i].status);
        print_text(out, help_statuses[i].meaning);
    }
    return EXIT_DONE;
}
