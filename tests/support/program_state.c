// Owns the comparison of two checkpoints' tensors.
#include "tests/support/program.h"

#include <dirent.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/log.h"
#include "data/safetensors.h"

enum { FILES = 64 };

// The files of an array in a checkpoint directory ("": all tensors of it), open.
struct tensors {
    struct safetensors files[FILES];
    int count;
};

static void tensors_open(struct tensors *tensors, const char *directory, const char *array)
{
    struct dirent **found = NULL;
    int names = scandir(directory, &found, NULL, alphasort);
    tensors->count = 0;
    for (int i = 0; i < names; i++) {
        char *path = memory_format("%s/%s", directory, found[i]->d_name);
        struct error err = {""};
        bool wanted = strncmp(found[i]->d_name, array, strlen(array)) == 0 &&
                      strstr(found[i]->d_name, ".safetensors") != NULL;
        BUG_UNLESS(tensors->count < FILES);
        if (wanted && safetensors_open(&tensors->files[tensors->count++], path, &err) != 0)
            fail_msg("%s", err.text);
        free(path);
        free(found[i]);
    }
    free(found);
    if (tensors->count == 0)
        fail_msg("%s: no file of %s", directory, array);
}

static void tensors_close(struct tensors *tensors)
{
    for (int i = 0; i < tensors->count; i++)
        safetensors_close(&tensors->files[i]);
}

static const char *file_name(const struct safetensors *file)
{
    return strrchr(file->path, '/') + 1;
}

static bool same_file(const struct safetensors *a, const struct safetensors *b)
{
    return strcmp(file_name(a), file_name(b)) == 0 && a->map_size == b->map_size &&
           memcmp(a->map, b->map, a->map_size) == 0;
}

bool program_same_state(const char *first, const char *second)
{
    struct tensors a, b;
    tensors_open(&a, first, "");
    tensors_open(&b, second, "");
    bool same = a.count == b.count;
    for (int i = 0; same && i < a.count; i++) {
        same = same_file(&a.files[i], &b.files[i]);
        if (!same)
            print_error("%s and %s differ\n", a.files[i].path, b.files[i].path);
    }
    tensors_close(&a);
    tensors_close(&b);
    return same;
}

static const struct safetensors_entry *find(const struct tensors *tensors, const char *name)
{
    for (int f = 0; f < tensors->count; f++) {
        const struct safetensors_entry *entry = safetensors_find(&tensors->files[f], name);
        if (entry != NULL)
            return entry;
    }
    fail_msg("no tensor %s", name);
    return NULL;
}

double program_state_distance(const char *first, const char *second, const char *array)
{
    struct tensors a, b;
    double difference = 0.0, norm = 0.0;
    tensors_open(&a, first, array);
    tensors_open(&b, second, array);
    for (int f = 0; f < a.count; f++)
        for (size_t i = 0; i < a.files[f].count; i++) {
            const struct safetensors_entry *x = &a.files[f].entries[i], *y = find(&b, x->name);
            assert_int_equal(x->size, y->size);
            for (size_t at = 0; at < x->size; at += sizeof(float)) {
                float p, q;
                memcpy(&p, x->bytes + at, sizeof(p));
                memcpy(&q, y->bytes + at, sizeof(q));
                difference += ((double)p - (double)q) * ((double)p - (double)q);
                norm += (double)p * (double)p;
            }
        }
    tensors_close(&a);
    tensors_close(&b);
    return sqrt(difference / norm);
}
