// Reads a command line by the table of commands.
#ifndef TRAINER_COMMAND_LINE_H
#define TRAINER_COMMAND_LINE_H

#include "base/error.h"
#include "trainer/command_table.h"

enum command_asked { ASKED_RUN, ASKED_HELP, ASKED_VERSION };

struct command_line {
    const struct command *command; // NULL: the command line names a group, as `dtrain data --help`
    const char *group;             // then
    bool named;                    // the command was; else it is the one that runs when none is
    enum command_asked asked;
    struct options options; // strings are borrowed from argv
};

// -1: the words make no command line; err says why. Release either way.
int command_line_read(struct command_line *line, int argc, char **argv, struct error *err);
void command_line_release(struct command_line *line);

#endif
