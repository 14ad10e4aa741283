// Owns the tensors of a case, on the host and on the backend.
#include "tests/support/kernel_run.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "base/crc32c.h"
#include "base/log.h"

enum { GUARD = 512 }; // bytes

void kernel_run_init(struct kernel_run *run, uint64_t seed)
{
    *run = (struct kernel_run){.key = rng_key_make(seed, 0, 0, RNG_TEST)};
}

void kernel_run_release(struct kernel_run *run)
{
    for (int i = 0; i < run->count; i++) {
        free(run->tensors[i].value);
        free(run->tensors[i].expected);
        free(run->tensors[i].sent);
    }
}

double run_normal(struct kernel_run *run)
{
    return (double)rng_normal(run->key, run->counter++);
}

int64_t run_below(struct kernel_run *run, int64_t limit)
{
    return (int64_t)(rng_u64(run->key, run->counter++) % (uint64_t)limit);
}

double round_to(enum dtype type, double value)
{
    if (type == DTYPE_BF16)
        return (double)bf16_to_float(bf16_from_float((float)value));
    return type == DTYPE_F32 ? (double)(float)value : value;
}

struct kernel_tensor *run_add(struct kernel_run *run, const char *name, enum tensor_role role,
                              enum dtype type, int64_t rows, int64_t columns)
{
    BUG_UNLESS(run->count < RUN_TENSORS);
    struct kernel_tensor *tensor = &run->tensors[run->count++];
    *tensor = (struct kernel_tensor){.name = name,
                                     .role = role,
                                     .type = type,
                                     .rows = rows,
                                     .columns = columns,
                                     .stride = columns};
    tensor->value = memory_alloc((size_t)(rows * columns), sizeof(double));
    tensor->expected = memory_alloc((size_t)(rows * columns), sizeof(double));
    return tensor;
}

struct kernel_tensor *run_add_normal(struct kernel_run *run, const char *name,
                                     enum tensor_role role, enum dtype type, int64_t rows,
                                     int64_t columns, double scale)
{
    struct kernel_tensor *tensor = run_add(run, name, role, type, rows, columns);
    for (int64_t i = 0; i < rows * columns; i++)
        tensor->value[i] = round_to(type, scale * run_normal(run));
    return tensor;
}

struct kernel_tensor *run_find(const struct kernel_run *run, const char *name)
{
    for (int i = 0; i < run->count; i++)
        if (strcmp(run->tensors[i].name, name) == 0)
            return (struct kernel_tensor *)&run->tensors[i];
    return NULL;
}

double *run_value(const struct kernel_run *run, const char *name)
{
    struct kernel_tensor *tensor = run_find(run, name);
    return tensor != NULL ? tensor->value : NULL;
}

double *run_expected(const struct kernel_run *run, const char *name)
{
    struct kernel_tensor *tensor = run_find(run, name);
    return tensor != NULL ? tensor->expected : NULL;
}

int32_t *run_integers(const struct kernel_run *run, const char *name)
{
    const struct kernel_tensor *tensor = run_find(run, name);
    int64_t n = tensor->rows * tensor->columns;
    int32_t *values = memory_alloc((size_t)n, sizeof(int32_t));
    for (int64_t i = 0; i < n; i++)
        values[i] = (int32_t)tensor->value[i];
    return values;
}

static struct kernel_tensor *owner_of(const struct kernel_run *run, struct kernel_tensor *tensor)
{
    return tensor->alias != NULL ? run_find(run, tensor->alias) : tensor;
}

static void *start_of(const struct kernel_tensor *tensor)
{
    return (unsigned char *)tensor->device + tensor->shift;
}

void *run_device(const struct kernel_run *run, const char *name)
{
    struct kernel_tensor *tensor = run_find(run, name);
    return tensor != NULL ? start_of(owner_of(run, tensor)) : NULL;
}

int64_t run_stride(const struct kernel_run *run, const char *name)
{
    return run_find(run, name)->stride;
}

static void put(void *to, enum dtype type, int64_t i, double value)
{
    switch (type) {
    case DTYPE_F32:
        ((float *)to)[i] = (float)value;
        break;
    case DTYPE_BF16:
        ((bf16 *)to)[i] = bf16_from_float((float)value);
        break;
    case DTYPE_I32:
        ((int32_t *)to)[i] = (int32_t)value;
        break;
    case DTYPE_U8:
        ((uint8_t *)to)[i] = (uint8_t)value;
        break;
    case DTYPE_F64:
        ((double *)to)[i] = value;
        break;
    default:
        BUG("no tensors of this type");
    }
}

static double get(const void *from, enum dtype type, int64_t i)
{
    switch (type) {
    case DTYPE_F32:
        return (double)((const float *)from)[i];
    case DTYPE_BF16:
        return (double)bf16_to_float(((const bf16 *)from)[i]);
    case DTYPE_I32:
        return ((const int32_t *)from)[i];
    case DTYPE_U8:
        return ((const uint8_t *)from)[i];
    case DTYPE_F64:
        return ((const double *)from)[i];
    default:
        BUG("no tensors of this type");
    }
}

static void send(struct kernel_run *run, struct kernel_tensor *tensor)
{
    tensor->bytes = (size_t)(tensor->rows * tensor->stride) * dtype_size(tensor->type);
    tensor->sent = memory_alloc(tensor->bytes + GUARD, 1);
    memset(tensor->sent, 0xff, tensor->bytes + GUARD);
    if (tensor->role == TENSOR_IN || tensor->role == TENSOR_CHANGED)
        for (int64_t r = 0; r < tensor->rows; r++)
            for (int64_t c = 0; c < tensor->columns; c++)
                put(tensor->sent, tensor->type, r * tensor->stride + c,
                    tensor->value[r * tensor->columns + c]);
    if (tensor->alias != NULL)
        return;
    size_t all = tensor->shift + tensor->bytes + GUARD;
    tensor->device = tensor->host ? run->backend->host_alloc(all) : run->backend->alloc(all);
    if (tensor->host)
        memcpy(start_of(tensor), tensor->sent, tensor->bytes + GUARD);
    else
        run->backend->copy_in(run->stream, start_of(tensor), tensor->sent, tensor->bytes + GUARD);
}

void kernel_run_send(struct kernel_run *run, const struct backend *backend, struct stream *stream)
{
    run->backend = backend;
    run->stream = stream;
    for (int i = 0; i < run->count; i++)
        send(run, &run->tensors[i]);
    backend->sync(stream);
}

void kernel_run_free_device(struct kernel_run *run)
{
    for (int i = 0; i < run->count; i++) {
        struct kernel_tensor *tensor = &run->tensors[i];
        if (tensor->alias == NULL && tensor->host)
            run->backend->host_free(tensor->device);
        else if (tensor->alias == NULL)
            run->backend->free(tensor->device);
        free(tensor->sent);
        tensor->sent = NULL;
        tensor->device = NULL;
    }
}

// The bytes of a tensor's memory, guard included.
static unsigned char *fetch_bytes(const struct kernel_run *run, const struct kernel_tensor *tensor)
{
    struct kernel_tensor *owner = owner_of(run, (struct kernel_tensor *)tensor);
    unsigned char *bytes = memory_alloc(owner->bytes + GUARD, 1);
    if (owner->host) {
        memcpy(bytes, start_of(owner), owner->bytes + GUARD);
        return bytes;
    }
    run->backend->copy_out(run->stream, bytes, start_of(owner), owner->bytes + GUARD);
    run->backend->sync(run->stream);
    return bytes;
}

static double *values_of(const struct kernel_tensor *tensor, const unsigned char *bytes)
{
    double *values = memory_alloc((size_t)(tensor->rows * tensor->columns), sizeof(double));
    for (int64_t r = 0; r < tensor->rows; r++)
        for (int64_t c = 0; c < tensor->columns; c++)
            values[r * tensor->columns + c] = get(bytes, tensor->type, r * tensor->stride + c);
    return values;
}

double *kernel_run_fetch(const struct kernel_run *run, const struct kernel_tensor *tensor)
{
    unsigned char *bytes = fetch_bytes(run, tensor);
    double *values = values_of(tensor, bytes);
    free(bytes);
    return values;
}

static bool is_overwritten(const struct kernel_run *run, const struct kernel_tensor *tensor)
{
    for (int i = 0; i < run->count; i++)
        if (run->tensors[i].alias != NULL && strcmp(run->tensors[i].alias, tensor->name) == 0)
            return true;
    return false;
}

// Inputs, the gaps between rows of outputs, and guards are as they were sent.
static bool untouched(const struct kernel_run *run, const char *name,
                      const struct kernel_tensor *tensor, const unsigned char *bytes)
{
    size_t size = dtype_size(tensor->type), row = (size_t)tensor->stride * size;
    size_t written = tensor->role == TENSOR_IN ? 0 : (size_t)tensor->columns * size;
    bool ok = true;
    for (int64_t r = 0; r < tensor->rows && tensor->role != TENSOR_SCRATCH; r++)
        if (memcmp(bytes + (size_t)r * row + written, tensor->sent + (size_t)r * row + written,
                   row - written) != 0 &&
            !is_overwritten(run, tensor)) {
            fprintf(stderr, "%s: %s: row %lld was written where it should not be\n", name,
                    tensor->name, (long long)r);
            ok = false;
        }
    if (memcmp(bytes + tensor->bytes, tensor->sent + tensor->bytes, GUARD) != 0) {
        fprintf(stderr, "%s: %s: written behind its end\n", name, tensor->name);
        ok = false;
    }
    return ok;
}

bool kernel_run_check(const struct kernel_run *run, const char *name, uint64_t seed,
                      struct compare_bounds bounds)
{
    bool ok = true;
    for (int i = 0; i < run->count; i++) {
        const struct kernel_tensor *tensor = &run->tensors[i];
        unsigned char *bytes = fetch_bytes(run, tensor);
        if (tensor->alias == NULL)
            ok = untouched(run, name, tensor, bytes) && ok;
        if (tensor->role == TENSOR_OUT || tensor->role == TENSOR_CHANGED) {
            struct compare_bounds exact = {0.0, 0.0, 0.0},
                                  wide = tensor->bounds != NULL ? *tensor->bounds : bounds;
            wide.atol += tensor->extra;
            bool real = tensor->type == DTYPE_F32 || tensor->type == DTYPE_BF16 ||
                        tensor->type == DTYPE_F64;
            char what[256];
            snprintf(what, sizeof(what), "%s: %s", name, tensor->name);
            double *got = values_of(tensor, bytes);
            ok = compare_tensors(what, seed, got, tensor->expected, tensor->rows, tensor->columns,
                                 real ? wide : exact) &&
                 ok;
            free(got);
        }
        free(bytes);
    }
    return ok;
}

uint64_t kernel_run_digest(const struct kernel_run *run)
{
    uint64_t digest = 0;
    for (int i = 0; i < run->count; i++) {
        const struct kernel_tensor *tensor = &run->tensors[i];
        if (tensor->role != TENSOR_OUT && tensor->role != TENSOR_CHANGED)
            continue;
        unsigned char *bytes = fetch_bytes(run, tensor);
        digest =
            rng_mix(digest, crc32c(0, bytes, owner_of(run, (struct kernel_tensor *)tensor)->bytes));
        free(bytes);
    }
    return digest;
}
