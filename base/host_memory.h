// How much of the machine's memory the process may take, bytes.
#ifndef BASE_HOST_MEMORY_H
#define BASE_HOST_MEMORY_H

#include <stdbool.h>
#include <stddef.h>

// What can be had without swapping, and what there is in all: the least of what the system says and of what
// the process's control groups allow (version 1 and 2; containers, Slurm). Pages of files count as free.
struct host_memory {
    size_t available, total;
    bool in_group; // a control group decides what is available
};

struct host_memory host_memory_read(void);

// The same of control groups alone, SIZE_MAX each when none has a limit. `groups` has the form of
// /proc/self/cgroup; `root` is where control groups are mounted, /sys/fs/cgroup.
void host_memory_groups(const char *groups, const char *root, size_t *available, size_t *total);

// What `ulimit -v` leaves the process for its own tensors: the libraries' threads and buffers are taken off.
// SIZE_MAX: there is no such limit. Pages that are mapped count, whether they are in use or not.
size_t host_memory_address_space(int threads);

#endif
