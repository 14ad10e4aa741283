// A file system of 1 MB on a folder, seen by this process and its children only: a disk that is full.
#ifndef TESTS_SUPPORT_SMALL_DISK_H
#define TESTS_SUPPORT_SMALL_DISK_H

// Makes the folder, which must not be there. Skips the test where mounting is not allowed.
void small_disk_mount(const char *path);
// Makes room: 64 MB.
void small_disk_enlarge(const char *path);
void small_disk_unmount(const char *path);

#endif
