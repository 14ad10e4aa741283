// Owns the temporary folders of config tests.
#include "tests/support/config_files.h"

#include <errno.h>
#include <ftw.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "base/memory.h"

void config_folder_open(struct config_folder *folder)
{
    const char *base = getenv("TMPDIR");
    char *name = memory_format("%s/config-XXXXXX", base && *base ? base : "/tmp");
    if (!mkdtemp(name))
        die("%s: %s", name, strerror(errno));
    folder->path = realpath(name, NULL);
    if (!folder->path)
        die("%s: %s", name, strerror(errno));
    free(name);
}

static int remove_one(const char *path, const struct stat *info, int kind, struct FTW *place)
{
    (void)info, (void)kind, (void)place;
    return remove(path);
}

void config_folder_close(struct config_folder *folder)
{
    nftw(folder->path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    free(folder->path);
    folder->path = NULL;
}

char *config_folder_path(const struct config_folder *folder, const char *name)
{
    return memory_format("%s/%s", folder->path, name);
}

char *config_folder_write(const struct config_folder *folder, const char *name, const char *text)
{
    char *path = config_folder_path(folder, name);
    for (char *slash = strchr(path + strlen(folder->path) + 1, '/'); slash;
         slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        if (mkdir(path, 0777) != 0 && errno != EEXIST)
            die("%s: %s", path, strerror(errno));
        *slash = '/';
    }
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(text, 1, strlen(text), file) != strlen(text) || fclose(file) != 0)
        die("%s: %s", path, strerror(errno));
    return path;
}
