// The lock of a folder: one process works in it at a time. The kernel drops it with its process, so a
// killed one leaves none behind.
#ifndef TRAINER_FOLDER_LOCK_H
#define TRAINER_FOLDER_LOCK_H

#include "base/error.h"

// Takes FOLDER/lock, *fd holds it until it is closed. `what` the folder is, for the error, which names the
// holder: "run folder". Writes there who holds it.
int folder_lock_take(const char *folder, const char *what, int *fd, struct error *err);
// Who holds FOLDER/lock, in words, in memory the caller frees; NULL: nobody.
char *folder_lock_holder(const char *folder);

#endif
