// Owns what the system, control groups and limits say of host memory.
#include "base/host_memory.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/memory.h"

// A file of the form "name number" a line (a colon and "kB" after the number do no harm): adds up the named
// ones. False: there is no such file, or no such name in it.
static bool read_named(const char *path, const char *const *names, int count, uint64_t *sum)
{
    char line[256], name[128];
    unsigned long long number;
    bool found = false;
    FILE *file = fopen(path, "re");
    *sum = 0;
    while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
        if (sscanf(line, "%127[^: ]%*[: ]%llu", name, &number) != 2)
            continue;
        for (int i = 0; i < count; i++) {
            if (strcmp(name, names[i]) == 0) {
                *sum += number;
                found = true;
            }
        }
    }
    if (file != NULL)
        fclose(file);
    return found;
}

// A file of one number; "max" and no file: false.
static bool read_number(const char *folder, const char *name, uint64_t *number)
{
    unsigned long long value = 0;
    char *path = memory_format("%s/%s", folder, name);
    FILE *file = fopen(path, "re");
    bool found = file != NULL && fscanf(file, "%llu", &value) == 1;
    if (file != NULL)
        fclose(file);
    free(path);
    *number = value;
    return found;
}

// Names of the same things in both versions.
struct group_files {
    const char *limit, *usage;
    const char *of_files[2]; // pages of files, which are given up for others; in memory.stat
};
static const struct group_files version_2 = {
    "memory.max", "memory.current", {"inactive_file", "active_file"}};
static const struct group_files version_1 = {
    "memory.limit_in_bytes", "memory.usage_in_bytes", {"total_inactive_file", "total_active_file"}};

static void take_group(const char *folder, const struct group_files *files, size_t *available,
                       size_t *total)
{
    uint64_t limit, usage, of_files, left;
    char *stat = memory_format("%s/memory.stat", folder);
    if (read_number(folder, files->limit, &limit) && read_number(folder, files->usage, &usage)) {
        read_named(stat, files->of_files, 2, &of_files);
        usage -= of_files < usage ? of_files : usage;
        left = limit > usage ? limit - usage : 0;
        *available = left < *available ? (size_t)left : *available;
        *total = limit < *total ? (size_t)limit : *total;
    }
    free(stat);
}

// The group and all above it. In a container the first ones may not be there, under the names they have outside.
static void take_groups(const char *root, const char *group, const struct group_files *files,
                        size_t *available, size_t *total)
{
    char *folder = memory_format("%s%s", root, group);
    size_t end = strlen(root);
    for (;;) {
        take_group(folder, files, available, total);
        char *slash = strrchr(folder + end, '/');
        if (slash == NULL)
            break;
        *slash = '\0';
    }
    free(folder);
}

// A line is number:controllers:path; version 2 has number 0 and no controllers.
void host_memory_groups(const char *groups, const char *root, size_t *available, size_t *total)
{
    char line[4096], names[256], group[3072];
    FILE *file = fopen(groups, "re");
    *available = *total = SIZE_MAX;
    while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
        if (sscanf(line, "0::%3071[^\n]", group) == 1) {
            take_groups(root, group, &version_2, available, total);
        } else if (sscanf(line, "%*d:%255[^:]:%3071[^\n]", names, group) == 2 &&
                   strcmp(names, "memory") == 0) {
            char *mounted = memory_format("%s/memory", root);
            take_groups(mounted, group, &version_1, available, total);
            free(mounted);
        }
    }
    if (file != NULL)
        fclose(file);
}

struct host_memory host_memory_read(void)
{
    static const char *const names[] = {"MemAvailable"};
    struct host_memory memory = {.in_group = false};
    uint64_t kib;
    size_t page = (size_t)sysconf(_SC_PAGESIZE), available, total;
    memory.total = (size_t)sysconf(_SC_PHYS_PAGES) * page;
    memory.available = read_named("/proc/meminfo", names, 1, &kib)
                           ? (size_t)kib * 1024
                           : (size_t)sysconf(_SC_AVPHYS_PAGES) * page;
    host_memory_groups("/proc/self/cgroup", "/sys/fs/cgroup", &available, &total);
    memory.in_group = available < memory.available;
    memory.available = memory.in_group ? available : memory.available;
    memory.total = total < memory.total ? total : memory.total;
    return memory;
}

size_t host_memory_address_space(int threads)
{
    // A thread's stack and its heap; the buffer that OpenBLAS maps for each caller, and does not do without;
    // threads that read and write files.
    enum { OF_A_THREAD = (8 + 64) << 20, OF_PRODUCTS = 128 << 20, OF_OTHERS = 256 << 20 };
    struct rlimit limit;
    unsigned long long pages = 0;
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
        return SIZE_MAX;
    FILE *file = fopen("/proc/self/statm", "re");
    if (file != NULL && fscanf(file, "%llu", &pages) != 1)
        pages = 0;
    if (file != NULL)
        fclose(file);
    size_t taken = (size_t)pages * (size_t)sysconf(_SC_PAGESIZE) + OF_OTHERS +
                   (size_t)threads * ((size_t)OF_A_THREAD + OF_PRODUCTS);
    return limit.rlim_cur > taken ? (size_t)limit.rlim_cur - taken : 0;
}
