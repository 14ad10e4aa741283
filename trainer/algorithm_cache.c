// Owns the files of GEMM algorithms chosen before. They only save what may be found again, so that
// whatever is wrong with them or their folder is no error.
#include "trainer/algorithm_cache.h"

#include <errno.h>
#include <pwd.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "base/rng.h"
#include "trainer/files.h"

char *algorithm_cache_folder(const char *key)
{
    if (key != NULL)
        return strcmp(key, "none") == 0 ? NULL : memory_strdup(key);
    struct passwd entry, *user = NULL;
    char texts[4096];
    if (getpwuid_r(geteuid(), &entry, texts, sizeof(texts), &user) != 0 || user == NULL ||
        user->pw_dir == NULL || user->pw_dir[0] != '/')
        return NULL;
    return memory_format("%s/.cache/dtrain", user->pw_dir);
}

// Raised where a step multiplies otherwise over the same buffers: files kept before lack products then.
enum { PRODUCTS_VERSION = 5 };

static uint64_t mix_text(uint64_t hash, const char *text)
{
    return rng_mix(hash, crc32c(0, text, strlen(text)));
}

// The table has the shape of everything that a step multiplies; how, the version stands for.
char *algorithm_cache_file(const char *folder, const struct arena *table, const struct execution *e)
{
    uint64_t hash = rng_mix(0, PRODUCTS_VERSION);
    hash = mix_text(mix_text(mix_text(hash, e->hardware), e->library), e->kernels);
    for (size_t i = 0; i < table->count; i++) {
        const struct arena_entry *entry = &table->entries[i];
        hash = rng_mix(mix_text(hash, entry->name), (uint64_t)entry->dtype);
        for (int dimension = 0; dimension < 3; dimension++)
            hash = rng_mix(hash, (uint64_t)entry->shape[dimension]);
    }
    return memory_format("%s/gemm-%016llx.json", folder, (unsigned long long)hash);
}

static bool read_file(const char *path, struct execution *execution)
{
    struct execution before;
    struct error err = {0};
    if (!files_exists(path) || execution_read(&before, path, &err) != 0 || before.gemm.count == 0 ||
        strcmp(before.hardware, execution->hardware) != 0 ||
        strcmp(before.library, execution->library) != 0)
        return false;
    execution->gemm = before.gemm;
    return true;
}

bool algorithm_cache_read(const char *folder, const struct arena *table,
                          struct execution *execution)
{
    char *path = algorithm_cache_file(folder, table, execution);
    bool found = read_file(path, execution);
    free(path);
    return found;
}

bool algorithm_cache_keep(const char *folder, const struct arena *table,
                          struct execution *execution)
{
    char *path = algorithm_cache_file(folder, table, execution);
    char *own = memory_format("%s.%lld", path, (long long)getpid());
    struct error err = {0};
    bool taken = false;
    if (execution->gemm.count > 0 && files_make_folder(folder, &err) == 0 &&
        execution_write(execution, own, &err) == 0) {
        if (link(own, path) != 0 && errno == EEXIST) {
            taken = read_file(path, execution);
            if (!taken) // damaged: ours instead
                rename(own, path);
        }
        unlink(own);
    }
    free(own);
    free(path);
    return taken;
}
