// The tensors of one case of one op: values in double, the bytes a backend works on, guards behind
// them. Outputs are filled with NaN before the op runs; afterwards guards, gaps between rows and
// inputs must be as they were.
#ifndef TESTS_SUPPORT_KERNEL_RUN_H
#define TESTS_SUPPORT_KERNEL_RUN_H

#include <stdbool.h>
#include <stdint.h>

#include "base/rng.h"
#include "kernels/kernels.h"
#include "tests/support/compare.h"

enum tensor_role { TENSOR_IN, TENSOR_OUT, TENSOR_CHANGED, TENSOR_SCRATCH };

struct kernel_tensor {
    const char *name;
    enum tensor_role role;
    enum dtype type;
    int64_t rows, columns, stride;       // stride in elements, >= columns
    double *value;                       // [rows, columns] what goes in (IN and CHANGED)
    double *expected;                    // [rows, columns] what should come out (OUT and CHANGED)
    double extra;                        // added to the bounds, absolute
    const struct compare_bounds *bounds; // instead of the case's; NULL: those
    const char *alias;   // lies on this tensor, which it overwrites; NULL: own memory
    bool host;           // an input that the op reads in host memory
    size_t shift;        // bytes from the start of the memory to the tensor; 0 with an alias
    void *device;        // start of the memory
    unsigned char *sent; // [rows * stride] elements and a guard, as they were before the op
    size_t bytes;        // without the guard
};

enum { RUN_TENSORS = 24 };

struct kernel_run {
    struct kernel_tensor tensors[RUN_TENSORS];
    int count;
    struct rng_key key;
    uint64_t counter;
    const struct backend *backend;
    struct stream *stream;
};

void kernel_run_init(struct kernel_run *run, uint64_t seed);
void kernel_run_release(struct kernel_run *run);

// Next draws of the run.
double run_normal(struct kernel_run *run);
int64_t run_below(struct kernel_run *run, int64_t limit);

// Adds a tensor. Its values are zero; names must stay valid.
struct kernel_tensor *run_add(struct kernel_run *run, const char *name, enum tensor_role role,
                              enum dtype type, int64_t rows, int64_t columns);
// The same, filled with normal draws times scale, rounded to the type.
struct kernel_tensor *run_add_normal(struct kernel_run *run, const char *name,
                                     enum tensor_role role, enum dtype type, int64_t rows,
                                     int64_t columns, double scale);
// By name; NULL when the case has no such tensor.
struct kernel_tensor *run_find(const struct kernel_run *run, const char *name);
// Values as an array of integers; free() it.
int32_t *run_integers(const struct kernel_run *run, const char *name);
double *run_value(const struct kernel_run *run, const char *name);
double *run_expected(const struct kernel_run *run, const char *name);
void *run_device(const struct kernel_run *run, const char *name);
int64_t run_stride(const struct kernel_run *run, const char *name);
// A value as the type can hold it.
double round_to(enum dtype type, double value);

// Puts the tensors where the backend works: inputs copied, outputs and guards NaN.
void kernel_run_send(struct kernel_run *run, const struct backend *backend, struct stream *stream);
// Values of a tensor after the op; free() it.
double *kernel_run_fetch(const struct kernel_run *run, const struct kernel_tensor *tensor);
// Compares every output with what is expected and looks for writes where none belong.
bool kernel_run_check(const struct kernel_run *run, const char *name, uint64_t seed,
                      struct compare_bounds bounds);
// Bytes of all outputs together, for bitwise comparison of two runs of one case.
uint64_t kernel_run_digest(const struct kernel_run *run);
void kernel_run_free_device(struct kernel_run *run);

#endif
