// A tmpfs in a mount namespace of its own.
#include "tests/support/small_disk.h"

#include <errno.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include <cmocka.h>

void small_disk_mount(const char *path)
{
    assert_int_equal(mkdir(path, 0777), 0);
    if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("tmpfs", path, "tmpfs", 0, "size=1m") != 0) {
        print_message("skipped: no small tmpfs can be mounted: %s\n", strerror(errno));
        skip();
    }
}

void small_disk_enlarge(const char *path)
{
    if (mount(NULL, path, NULL, MS_REMOUNT, "size=64m") != 0)
        fail_msg("remount: %s", strerror(errno));
}

void small_disk_unmount(const char *path)
{
    umount2(path, MNT_DETACH);
}
