// Owns the command `completion` and what both shells' scripts have in common: none of their words is here but by
// way of the tables.
#include "trainer/completion.h"

#include <string.h>

#include "trainer/commands.h"

int command_completion(const struct options *options)
{
    if (strcmp(options->files[0], "bash") == 0)
        completion_write_bash(stdout);
    else
        completion_write_zsh(stdout);
    return EXIT_DONE;
}

void completion_write_choices(FILE *out, const char *choices)
{
    for (const char *word = choices; *word != '\0'; word += strlen(word) + 1)
        fprintf(out, "%s%s", word == choices ? "" : " ", word);
}
