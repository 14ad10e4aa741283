// What --help says.
#ifndef TRAINER_HELP_H
#define TRAINER_HELP_H

#include <stdbool.h>
#include <stdio.h>

// Help of one command; `overview`: of the program, with all commands.
void help_print(FILE *out, const char *command, bool overview);

#endif
