// Proof that head, norm and alignment are right: the teacher recomputed from a shard's last hidden
// states, against what the target itself computed when the states were captured.
#ifndef TRAINER_TEACHER_CHECK_H
#define TRAINER_TEACHER_CHECK_H

#include <stddef.h>
#include <stdio.h>

#include "base/error.h"

// Samples positions of every shard. With teacher columns: top-1, its logit and the log-sum-exp must match
// within bf16 tolerance; without: the teacher's argmax is compared with the next token, which is weaker
// and is said. Then document by document (docs/file-formats.md): names those whose columns or next
// tokens do not fit their states, which is a fault, or fit far less than those of the others, which is
// only told. Prints to out. 0: fine; 1: does not match; -1: could not run (err).
int teacher_check(const char *const *paths, size_t count, const char *target, FILE *out,
                  struct error *err);

#endif
