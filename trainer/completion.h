// What a shell needs to complete dtrain's words, as a script made from the table of commands and that of keys.
#ifndef TRAINER_COMPLETION_H
#define TRAINER_COMPLETION_H

#include <stdio.h>

void completion_write_bash(FILE *out);
void completion_write_zsh(FILE *out);

#endif
