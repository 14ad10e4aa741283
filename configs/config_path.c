// Owns how relative paths of a configuration become absolute. Looks at no file but the config's folder.
#include "configs/config_path.h"

#include <libgen.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"

// Length of `folder` without its last component; of "/" it stays 1.
static size_t parent_length(const char *folder, size_t length)
{
    while (length > 1 && folder[length - 1] != '/')
        length--;
    while (length > 1 && folder[length - 1] == '/')
        length--;
    return length;
}

char *config_path_resolve(const char *folder, const char *path)
{
    if (!folder || path[0] == '/')
        return memory_strdup(path);
    size_t length = strlen(folder);
    // The folder has no links in it, so going up is cutting a component off.
    for (;;) {
        size_t dots = path[0] != '.' ? 0 : path[1] != '.' ? 1 : 2;
        if (dots == 0 || (path[dots] != '/' && path[dots] != '\0'))
            break;
        if (dots == 2)
            length = parent_length(folder, length);
        path += dots;
        while (*path == '/')
            path++;
    }
    const char *slash = (length > 0 && folder[length - 1] == '/') || *path == '\0' ? "" : "/";
    return memory_format("%.*s%s%s", (int)length, folder, slash, path);
}

char *config_path_folder(const char *file)
{
    if (!file)
        return realpath(".", NULL);
    char *copy = memory_strdup(file);
    char *folder = realpath(dirname(copy), NULL);
    free(copy);
    return folder;
}

const char *config_path_base(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}
