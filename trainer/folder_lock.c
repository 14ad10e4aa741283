// Owns FOLDER/lock: taking it, and who holds it.
#include "trainer/folder_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "base/memory.h"

static char *read_holder(int fd)
{
    char holder[320] = "";
    ssize_t n = pread(fd, holder, sizeof(holder) - 1, 0);
    holder[n > 0 ? n : 0] = '\0';
    holder[strcspn(holder, "\n")] = '\0';
    return memory_strdup(holder[0] != '\0' ? holder : "another process");
}

static int refuse(const char *path, const char *what, int fd, struct error *err)
{
    if (errno != EWOULDBLOCK)
        return error_set(err, "%s: can not lock: %s", path, strerror(errno));
    char *holder = read_holder(fd);
    error_set(err, "%s: the %s is in use by %s", path, what, holder);
    free(holder);
    return -1;
}

// Who only looks (folder_lock_holder) has it for a moment, too.
static int lock_now(int fd)
{
    enum { TRIES = 5 };
    const struct timespec pause = {.tv_nsec = 20000000};
    int result;
    for (int i = 0;
         (result = flock(fd, LOCK_EX | LOCK_NB)) != 0 && errno == EWOULDBLOCK && i < TRIES; i++)
        nanosleep(&pause, NULL);
    return result;
}

int folder_lock_take(const char *folder, const char *what, int *fd, struct error *err)
{
    char *path = memory_format("%s/lock", folder);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    int result = 0;
    if (file < 0) {
        result = error_set(err, "%s: can not create: %s", path, strerror(errno));
    } else if (lock_now(file) != 0) {
        result = refuse(path, what, file, err);
        close(file);
    } else {
        char host[256] = "";
        gethostname(host, sizeof(host) - 1);
        *fd = file;
        // Who holds it is a courtesy to others: the lock counts without it.
        if (ftruncate(file, 0) != 0 ||
            dprintf(file, "process %ld on %s\n", (long)getpid(), host) < 0)
            log_warn("%s: writing failed: %s", path, strerror(errno));
    }
    free(path);
    return result;
}

char *folder_lock_holder(const char *folder)
{
    char *path = memory_format("%s/lock", folder), *holder = NULL;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file >= 0 && flock(file, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        holder = read_holder(file);
    if (file >= 0)
        close(file);
    free(path);
    return holder;
}
