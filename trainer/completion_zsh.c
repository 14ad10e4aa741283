// Owns the script for zsh, where descriptions stand beside the words. _arguments does the work; the tables give
// what it is told.
#include <string.h>

#include "configs/config.h"
#include "trainer/command_table.h"
#include "trainer/completion.h"

static const char head[] = "#compdef dtrain\n"
                           "# Completes the words of dtrain in zsh: dtrain completion zsh > "
                           "DIR/_dtrain, with DIR in fpath.\n"
                           "# Written by the program from its tables of commands and config keys.\n"
                           "\n"
                           "# KEY= or KEY=VALUE.\n"
                           "_dtrain_setting() {\n"
                           "    local -a keys\n"
                           "    local key=${PREFIX%%=*}\n"
                           "    if compset -P '*='; then\n"
                           "        _dtrain_key_value $key\n"
                           "    else\n"
                           "        _dtrain_key_names\n"
                           "        _describe -t keys 'config key' keys -S =\n"
                           "    fi\n"
                           "}\n"
                           "\n"
                           "# Names of keys, separated by commas.\n"
                           "_dtrain_key_list() {\n"
                           "    local -a keys\n"
                           "    compset -P '*,'\n"
                           "    _dtrain_key_names\n"
                           "    _describe -t keys 'config key' keys -S ''\n"
                           "}\n"
                           "\n";

// Text inside single quotes of zsh; in a _describe word or an _arguments spec, some signs have a meaning.
static void print_quoted(FILE *out, const char *text, const char *special)
{
    for (; *text != '\0'; text++) {
        if (*text == '\'')
            fputs("'\\''", out);
        else if (*text == '\\')
            fputs("\\\\", out);
        else if (strchr(special, *text) != NULL)
            fprintf(out, "\\%c", *text);
        else if (*text == '\n')
            fputc(' ', out);
        else
            fputc(*text, out);
    }
}

// ---- keys ----------------------------------------------------------------------------------------

static void print_key(void *context, const struct config_key_words *key)
{
    FILE *out = context;
    if (key->unique)
        fprintf(out, "        '%s:", key->name);
    else
        fprintf(out, "        '%s.%s:", key->section, key->name);
    print_quoted(out, key->help, ":");
    fputs("'\n", out);
}

static void print_full_key(void *context, const struct config_key_words *key)
{
    FILE *out = context;
    if (!key->unique)
        return;
    fprintf(out, "        '%s.%s:", key->section, key->name);
    print_quoted(out, key->help, ":");
    fputs("'\n", out);
}

static void print_key_case(void *context, const struct config_key_words *key)
{
    FILE *out = context;
    if (key->choices == NULL && !key->path)
        return;
    fprintf(out, "    %s.%s", key->section, key->name);
    if (key->unique)
        fprintf(out, "|%s", key->name);
    if (key->path) {
        fputs(") _files ;;\n", out);
    } else {
        fputs(") compadd -- ", out);
        completion_write_choices(out, key->choices);
        fputs(" ;;\n", out);
    }
}

static void print_keys(FILE *out)
{
    fputs("# Fills `keys`; with the section once a dot is typed.\n_dtrain_key_names() {\n"
          "    if [[ $PREFIX == *.* ]]; then\n    keys=(\n",
          out);
    config_visit_keys(print_full_key, out);
    fputs("    )\n    else\n    keys=()\n    fi\n    keys+=(\n", out);
    config_visit_keys(print_key, out);
    fputs("    )\n}\n\n_dtrain_key_value() {\n    case $1 in\n", out);
    config_visit_keys(print_key_case, out);
    fputs("    esac\n}\n\n", out);
}

// ---- options and commands ------------------------------------------------------------------------

// The part of a spec that says what a value is: ":FILE:_files".
static void print_action(FILE *out, const char *value, enum value_kind kind, const char *choices)
{
    static const char *const actions[] = {
        [VALUE_WORD] = " ",
        [VALUE_FILE] = "_files",
        [VALUE_FOLDER] = "_files -/",
        [VALUE_SETTING] = "_dtrain_setting",
        [VALUE_KEYS] = "_dtrain_key_list",
    };
    fputc(':', out);
    print_quoted(out, value, ":");
    fputc(':', out);
    if (choices == NULL) {
        fputs(actions[kind], out);
        return;
    }
    if (kind == VALUE_WORD) {
        fputc('(', out);
        completion_write_choices(out, choices);
        fputc(')', out);
        return;
    }
    fputs("_alternative \"words\\:word\\:(", out);
    completion_write_choices(out, choices);
    fprintf(out, ")\" \"paths\\:path\\:%s\"", actions[kind]);
}

static void print_option(FILE *out, const struct command_option *option)
{
    const struct option_row *row = option_row_of(option->name);
    bool valued = row->value != NULL;
    fprintf(out, "        '%s--%s%s[", row->kind == OPTION_TEXTS ? "*" : "", row->name,
            row->kind == OPTION_PERHAPS ? "=-"
            : valued                    ? "="
                                        : "");
    print_quoted(out, option_help(option), "[]");
    fputc(']', out);
    if (row->kind == OPTION_PERHAPS)
        fputc(':', out);
    if (valued)
        print_action(out, option_value(option), row->completes, row->choices);
    fputs("' \\\n", out);
}

static void print_command(FILE *out, const struct command *command)
{
    fprintf(out, "    '%s')\n        _arguments \\\n", command->name);
    for (size_t i = 0; i < command->option_count; i++)
        print_option(out, &command->options[i]);
    for (size_t i = 0; i < common_option_count; i++)
        print_option(out, &common_options[i]);
    if (command->operand != NULL) {
        fprintf(out, "        '%s", command->operands ? "*" : "1");
        print_action(out, command->operand, command->operand_completes, command->operand_choices);
        fputs("' \\\n", out);
    }
    fputs("        && return 0\n        ;;\n", out);
}

// "'eval:acceptance of ...'" of each command that has the group, or of each first word.
static void print_words_of(FILE *out, const char *group)
{
    char of[COMMAND_GROUP_BYTES];
    for (size_t i = 0; i < command_count; i++) {
        const struct command *command = &command_table[i];
        bool grouped = command_group(command, of);
        if (group == NULL && command_is_first(command)) {
            fprintf(out, "            '%s:", of);
            print_quoted(out, grouped ? "commands for files of features" : command->summary, ":");
            fputs("'\n", out);
        } else if (group != NULL && grouped && strcmp(of, group) == 0) {
            fprintf(out, "            '%s:", command->name + strlen(group) + 1);
            print_quoted(out, command->summary, ":");
            fputs("'\n", out);
        }
    }
}

static void print_groups(FILE *out)
{
    char group[COMMAND_GROUP_BYTES];
    for (size_t i = 0; i < command_count; i++) {
        if (command_group(&command_table[i], group) && command_is_first(&command_table[i])) {
            fprintf(out,
                    "    if [[ $words[2] == %s ]]; then\n"
                    "        if (( CURRENT == 3 )); then\n            commands=(\n",
                    group);
            print_words_of(out, group);
            fputs("            )\n            _describe -t commands 'command' commands\n"
                  "            return\n        fi\n"
                  "        command=\"$words[2] $words[3]\"\n        taken=3\n    fi\n",
                  out);
        }
    }
}

void completion_write_zsh(FILE *out)
{
    fputs(head, out);
    print_keys(out);
    fprintf(out,
            "_dtrain() {\n    local curcontext=$curcontext command=%s taken=1\n"
            "    local -a commands\n"
            "    if (( CURRENT == 2 )) && [[ $words[2] != -* ]]; then\n        commands=(\n",
            command_default()->name);
    print_words_of(out, NULL);
    fputs(
        "        )\n        _describe -t commands 'command' commands\n        return\n    fi\n"
        "    if [[ $words[2] != -* ]]; then\n        command=$words[2]\n        taken=2\n    fi\n",
        out);
    print_groups(out);
    fputs("    # What follows is as if the command were the first word.\n"
          "    words=(dtrain \"${(@)words[taken + 1, -1]}\")\n"
          "    (( CURRENT -= taken - 1 ))\n    case $command in\n",
          out);
    for (size_t i = 0; i < command_count; i++)
        print_command(out, &command_table[i]);
    fputs("    esac\n    return 1\n}\n\n"
          "# Found in fpath, the file is the function; sourced, it names it.\n"
          "if [[ $zsh_eval_context[-1] == loadautofunc ]]; then\n    _dtrain \"$@\"\n"
          "else\n    compdef _dtrain dtrain\nfi\n",
          out);
}
