// What --help says.
#ifndef TRAINER_HELP_H
#define TRAINER_HELP_H

#include <stdio.h>

#include "trainer/command_table.h"

// Of the program: its commands, and what the default one takes.
void help_print(FILE *out);
void help_print_command(FILE *out, const struct command *command);
// Of all commands of a group.
void help_print_group(FILE *out, const char *group);

// How a command is called, without line breaks: "dtrain eval --config FILE ...". The caller frees.
char *help_usage(const struct command *command);
// "--set KEY=VALUE" of an option of a command. The caller frees.
char *help_option(const struct command_option *option);

// Statuses of the process, one after another.
struct help_status {
    int status;
    const char *meaning;
};
extern const struct help_status help_statuses[4];

#endif
