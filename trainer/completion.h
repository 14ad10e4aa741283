// What a shell needs to complete dtrain's words, as a script made from the table of commands and that of keys.
#ifndef TRAINER_COMPLETION_H
#define TRAINER_COMPLETION_H

#include <stdio.h>

void completion_write_bash(FILE *out);
void completion_write_zsh(FILE *out);
// Words that end with an empty one, with blanks between them.
void completion_write_choices(FILE *out, const char *choices);

#endif
