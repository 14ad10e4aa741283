// Owns the script for bash: functions that are the same for all programs like this one, and the tables' words
// in the cases between them.
#include <string.h>

#include "configs/config.h"
#include "trainer/command_table.h"
#include "trainer/completion.h"

// Bash takes "--set run.seed=4" apart at the '='. _dtrain_join makes one word of it again; answers hold what
// follows the last '=' only, which is all that bash then replaces.
static const char functions[] =
    "# Completes the words of dtrain in bash: source <(dtrain completion bash)\n"
    "# Written by the program from its tables of commands and config keys.\n"
    "\n"
    "# WORDS CURRENT: those of the words that begin with the current one.\n"
    "_dtrain_words() {\n"
    "    local more\n"
    "    mapfile -t more < <(compgen -W \"$1\" -- \"$2\")\n"
    "    COMPREPLY+=(\"${more[@]}\")\n"
    "}\n"
    "\n"
    "# -f|-d CURRENT: files or folders.\n"
    "_dtrain_paths() {\n"
    "    local more\n"
    "    compopt -o filenames 2>/dev/null\n"
    "    mapfile -t more < <(compgen \"$1\" -- \"$2\")\n"
    "    COMPREPLY+=(\"${more[@]}\")\n"
    "}\n"
    "\n"
    "# CURRENT: KEY=, KEY=VALUE, or KEY=VALUE,VALUE.\n"
    "_dtrain_setting() {\n"
    "    local key=${1%%=*} value=${1#*=} first=\n"
    "    if [[ $1 == *=* ]]; then\n"
    "        prefix+=$key=\n"
    "        [[ $value == *,* ]] && first=${value%,*},\n"
    "        _dtrain_key_value \"$key\" \"${value##*,}\"\n"
    "        COMPREPLY=(\"${COMPREPLY[@]/#/$first}\")\n"
    "    else\n"
    "        compopt -o nospace 2>/dev/null\n"
    "        _dtrain_keys \"$1\"\n"
    "        COMPREPLY=(\"${COMPREPLY[@]/%/=}\")\n"
    "    fi\n"
    "}\n"
    "\n"
    "# CURRENT: names of keys, separated by commas.\n"
    "_dtrain_key_list() {\n"
    "    compopt -o nospace 2>/dev/null\n"
    "    _dtrain_keys \"${1##*,}\"\n"
    "    [[ $1 == *,* ]] && COMPREPLY=(\"${COMPREPLY[@]/#/${1%,*},}\")\n"
    "}\n"
    "\n"
    "# The words up to the cursor in `words`, each as it was typed.\n"
    "_dtrain_join() {\n"
    "    local i glue=\n"
    "    words=()\n"
    "    for ((i = 0; i <= COMP_CWORD; i++)); do\n"
    "        if [[ ${COMP_WORDS[i]} == '=' || $glue ]] && ((i > 1)); then\n"
    "            words[${#words[@]} - 1]+=${COMP_WORDS[i]}\n"
    "        else\n"
    "            words+=(\"${COMP_WORDS[i]}\")\n"
    "        fi\n"
    "        glue=\n"
    "        [[ ${COMP_WORDS[i]} == '=' ]] && glue=yes\n"
    "    done\n"
    "}\n"
    "\n"
    "_dtrain() {\n"
    "    local words current before command prefix=\n"
    "    COMPREPLY=()\n"
    "    _dtrain_join\n"
    "    current=${words[${#words[@]} - 1]}\n"
    "    before=${words[${#words[@]} - 2]}\n"
    "    _dtrain_command\n"
    "    if [[ $current == --*=* ]]; then\n"
    "        prefix=${current%%=*}=\n"
    "        _dtrain_value \"${current%%=*}\" \"${current#*=}\"\n"
    "    elif ! _dtrain_value \"$before\" \"$current\"; then\n"
    "        _dtrain_rest \"$command\" \"$current\"\n"
    "    fi\n"
    "    [[ $COMP_WORDBREAKS == *=* ]] || COMPREPLY=(\"${COMPREPLY[@]/#/$prefix}\")\n"
    "}\n"
    "\n";

// ---- keys ----------------------------------------------------------------------------------------

static void print_key(void *context, const struct config_key_words *key)
{
    FILE *out = context;
    if (key->unique)
        fprintf(out, " %s", key->name);
    fprintf(out, " %s.%s", key->section, key->name);
}

static void print_key_case(void *context, const struct config_key_words *key)
{
    FILE *out = context;
    if (key->choices == NULL && !key->path)
        return;
    fprintf(out, "    %s.%s", key->section, key->name);
    if (key->unique)
        fprintf(out, " | %s", key->name);
    if (key->path) {
        fputs(") _dtrain_paths -f \"$2\" ;;\n", out);
    } else {
        fputs(") _dtrain_words '", out);
        completion_write_choices(out, key->choices);
        fputs("' \"$2\" ;;\n", out);
    }
}

static void print_keys(FILE *out)
{
    fputs("# CURRENT: names of config keys.\n_dtrain_keys() {\n    _dtrain_words '", out);
    config_visit_keys(print_key, out);
    fputs("' \"$1\"\n}\n\n# KEY CURRENT: values of a key.\n_dtrain_key_value() {\n    case $1 in\n",
          out);
    config_visit_keys(print_key_case, out);
    fputs("    esac\n}\n\n", out);
}

// ---- options and commands ------------------------------------------------------------------------

static void print_completion(FILE *out, enum value_kind kind, const char *choices)
{
    static const char *const calls[] = {
        [VALUE_WORD] = "",
        [VALUE_FILE] = "_dtrain_paths -f \"$2\"; ",
        [VALUE_FOLDER] = "_dtrain_paths -d \"$2\"; ",
        [VALUE_SETTING] = "_dtrain_setting \"$2\"; ",
        [VALUE_KEYS] = "_dtrain_key_list \"$2\"; ",
    };
    if (choices != NULL) {
        fputs("_dtrain_words '", out);
        completion_write_choices(out, choices);
        fputs("' \"$2\"; ", out);
    }
    fputs(calls[kind], out);
}

// An optional value is completed behind a '=' only.
static void print_values(FILE *out)
{
    fputs("# OPTION CURRENT: the option's value; false: it has none.\n_dtrain_value() {\n"
          "    case $1 in\n",
          out);
    for (size_t i = 0; i < option_row_count; i++) {
        const struct option_row *row = &option_rows[i];
        if (row->value == NULL)
            continue;
        fprintf(out, "    --%s) ", row->name);
        if (row->kind == OPTION_PERHAPS)
            fputs("[[ $current == --*=* ]] || return 1; ", out);
        print_completion(out, row->completes, row->choices);
        fputs(";;\n", out);
    }
    fputs("    *) return 1 ;;\n    esac\n    return 0\n}\n\n", out);
}

static void print_command_word(FILE *out)
{
    char group[COMMAND_GROUP_BYTES];
    fprintf(out,
            "# Sets `command`; '?' is still to be chosen.\n_dtrain_command() {\n"
            "    command=%s\n    ((${#words[@]} == 2)) && command='?'\n"
            "    [[ ${words[1]} == -* || ${#words[@]} -eq 2 ]] && return\n"
            "    case ${words[1]} in\n",
            command_default()->name);
    for (size_t i = 0; i < command_count; i++)
        if (command_group(&command_table[i], group) && command_is_first(&command_table[i]))
            fprintf(out,
                    "    %s)\n        command=\"%s ${words[2]}\"\n"
                    "        ((${#words[@]} == 3)) && command='%s ?'\n        ;;\n",
                    group, group, group);
    fputs("    *) command=${words[1]} ;;\n    esac\n}\n\n", out);
}

static void print_options(FILE *out, const struct command *command)
{
    fputs("_dtrain_words '", out);
    for (size_t i = 0; i < command->option_count; i++)
        fprintf(out, "--%s ", command->options[i].name);
    for (size_t i = 0; i < common_option_count; i++)
        fprintf(out, "--%s%s", common_options[i].name, i + 1 < common_option_count ? " " : "");
    fputs("' \"$2\"; ", out);
}

// The words that may come first, or second in a group.
static void print_words_of(FILE *out, const char *group)
{
    char of[COMMAND_GROUP_BYTES];
    fputs("_dtrain_words '", out);
    for (size_t i = 0; i < command_count; i++) {
        bool grouped = command_group(&command_table[i], of);
        if (group == NULL && command_is_first(&command_table[i]))
            fprintf(out, "%s ", of);
        else if (group != NULL && grouped && strcmp(of, group) == 0)
            fprintf(out, "%s ", command_table[i].name + strlen(group) + 1);
    }
    fputs("--help' \"$2\"; ", out);
}

static void print_rest(FILE *out)
{
    char group[COMMAND_GROUP_BYTES];
    fputs("# COMMAND CURRENT: what else it takes.\n_dtrain_rest() {\n    case $1 in\n    '?') ",
          out);
    print_words_of(out, NULL);
    print_options(out, command_default());
    fputs(";;\n", out);
    for (size_t i = 0; i < command_count; i++) {
        const struct command *command = &command_table[i];
        if (command_group(command, group) && command_is_first(command)) {
            fprintf(out, "    '%s ?') ", group);
            print_words_of(out, group);
            fputs(";;\n", out);
        }
        fprintf(out, "    '%s') ", command->name);
        print_options(out, command);
        if (command->operand != NULL)
            print_completion(out, command->operand_completes, command->operand_choices);
        fputs(";;\n", out);
    }
    fputs("    esac\n}\n\n", out);
}

void completion_write_bash(FILE *out)
{
    fputs(functions, out);
    print_keys(out);
    print_values(out);
    print_command_word(out);
    print_rest(out);
    fputs("complete -F _dtrain dtrain\n", out);
}
