// THE table of commands and their options. The parser (command_line.h), --help (help.h), shell completion and
// the man page (completion.h, man_page.h) all come from it, so they can not disagree.
// docs/contributing.md says how to add a command or an option.
#ifndef TRAINER_COMMAND_TABLE_H
#define TRAINER_COMMAND_TABLE_H

#include <stdbool.h>
#include <stddef.h>

#include "trainer/commands.h"

enum option_kind {
    OPTION_FLAG,    // bool: --name
    OPTION_TEXT,    // const char *: --name VALUE
    OPTION_PERHAPS, // const char *: --name[=VALUE]; "" without a value
    OPTION_COUNT,   // long long: --name N, of `least` or more
    OPTION_TEXTS,   // const char ** and, at count_at, size_t: --name VALUE, any number of times
    OPTION_ASK,     // nothing is kept: --help and --version
};

// What a shell may complete a value with, beside its choices.
enum value_kind {
    VALUE_WORD, // nothing
    VALUE_FILE,
    VALUE_FOLDER,
    VALUE_SETTING, // KEY=VALUE of the config
    VALUE_KEYS,    // names of config keys, with commas
};

// An option, with one meaning in all commands that take it.
struct option_row {
    const char *name; // without --
    enum option_kind kind;
    size_t value_at, count_at; // offsets in struct options
    const char *value;         // as help names it, as "FILE"; NULL: it has none
    enum value_kind completes;
    const char *choices; // words one after another, each with its NUL, "" ends; NULL: none
    long long least;     // of a count
    const char *help;    // where the command does not say its own; as text of a command
};

// An option as a command takes it.
struct command_option {
    const char *name;
    bool required;     // of a text, or of a count of 1 or more
    const char *help;  // NULL: the option's own
    const char *value; // likewise
};

// Texts are paragraphs without line breaks, an empty line between two; `code` stands in back quotes.
struct command {
    const char *name; // "eval", "data check"
    int (*run)(const struct options *options);
    const char *summary; // a line without a full stop
    const char *text;    // what it does, below the usage
    const struct command_option *options;
    size_t option_count;
    // what follows the options; NULL: nothing
    const char *operand;
    enum value_kind operand_completes;
    const char *operand_choices; // as in struct option_row; only these
    bool operands;               // several
    // Ends with status 75 when it is told to stop: it begins with the signals held back (signals.h).
    bool stops;
};

extern const struct command command_table[];
extern const size_t command_count;
// The command that runs when none is named.
const struct command *command_default(void);
// NULL: there is none of that name.
const struct command *command_find(const char *name);
// The part of a name before its space, "data": in `group`; false: the name is one word.
enum { COMMAND_GROUP_BYTES = 32 };
bool command_group(const struct command *command, char group[COMMAND_GROUP_BYTES]);
// The first in the table whose name begins with that word.
bool command_is_first(const struct command *command);

// --help and --version, which every command takes.
extern const struct command_option common_options[];
extern const size_t common_option_count;
extern const struct option_row option_rows[];
extern const size_t option_row_count;
// The row of an option, which must be there.
const struct option_row *option_row_of(const char *name);
// What is said of an option of a command, and what its value is called.
const char *option_value(const struct command_option *option);
const char *option_help(const struct command_option *option);
// NULL: the command does not take it.
const struct command_option *command_option_find(const struct command *command, const char *name);

#endif
