// Owns the choice of a rank's GPU. Before CUDA starts: it reads the variable once.
#include "trainer/rank_gpu.h"

#include <stdio.h>
#include <string.h>

int rank_gpu_choose(const char *list, int local, char *value, int size, struct error *err)
{
    int count = 1;
    if (list == NULL) {
        snprintf(value, (size_t)size, "%d", local);
        return 0;
    }
    for (const char *at = list; *at != '\0'; at++)
        count += *at == ',';
    if (count > 1 && local >= count)
        return error_set(
            err,
            "CUDA_VISIBLE_DEVICES: \"%s\" names %d GPUs, but this is process %d of its "
            "machine, counted from 0; start as many processes as there are GPUs",
            list, count, local);
    if (count > 1)
        for (int i = 0; i < local; i++)
            list = strchr(list, ',') + 1;
    int length = (int)strcspn(list, ",");
    if (length >= size)
        return error_set(err, "CUDA_VISIBLE_DEVICES: the name of a GPU has %d characters", length);
    memcpy(value, list, (size_t)length);
    value[length] = '\0';
    return 0;
}
