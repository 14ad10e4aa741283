// Times every row of the table of kernel cases on one backend and prints CSV; the columns are defined
// in benchmarks/README.md. Usage: bench_kernels cpu|cuda [threads [part of names]]
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/timer.h"
#include "tests/kernel_cases.h"
#include "version.h"

enum {
    WARM_UP = 2,
    LEAST_RUNS = 5,
    MOST_RUNS = 50,
    FLUSH_BYTES = 128 << 20 // more than the last-level cache of the machines we know
};
static const double enough_seconds = 0.5;

struct bench {
    const struct backend *backend;
    struct stream *stream;
    void *flush; // [FLUSH_BYTES]
    char device[128];
};

static void name_device(struct bench *bench)
{
    snprintf(bench->device, sizeof(bench->device), "%s", bench->backend->name);
    FILE *file = strcmp(bench->backend->name, "cpu") == 0 ? fopen("/proc/cpuinfo", "re") : NULL;
    char line[256];
    while (file != NULL && fgets(line, sizeof(line), file) != NULL)
        if (sscanf(line, "model name : %127[^\n]", bench->device) == 1)
            break;
    if (file != NULL)
        fclose(file);
}

static double timed_call(const struct bench *bench, const struct kernel_case *c,
                         struct kernel_run *run)
{
    bench->backend->zero(bench->stream, bench->flush, FLUSH_BYTES);
    bench->backend->sync(bench->stream);
    double start = timer_now();
    kernel_case_call(c, run);
    bench->backend->sync(bench->stream);
    return timer_now() - start;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Bytes that the op must read and write at least once.
static double bytes_of(const struct kernel_run *run)
{
    double bytes = 0.0;
    for (int i = 0; i < run->count; i++) {
        const struct kernel_tensor *tensor = &run->tensors[i];
        double size = (double)(tensor->rows * tensor->columns) * (double)dtype_size(tensor->type);
        if (tensor->role != TENSOR_SCRATCH)
            bytes += tensor->role == TENSOR_CHANGED ? 2.0 * size : size;
    }
    return bytes;
}

static void bench_case(const struct bench *bench, const struct kernel_case *c)
{
    struct kernel_run run;
    double seconds[MOST_RUNS] = {0}, total = 0.0;
    int runs = 0;
    kernel_case_build(c, &run);
    kernel_run_send(&run, bench->backend, bench->stream);
    for (int i = 0; i < WARM_UP; i++)
        timed_call(bench, c, &run);
    while (runs < LEAST_RUNS || (runs < MOST_RUNS && total < enough_seconds))
        total += seconds[runs++] = timed_call(bench, c, &run);
    qsort(seconds, (size_t)runs, sizeof(seconds[0]), by_value);
    double median = seconds[runs / 2];

    char name[CASE_NAME];
    kernel_case_name(c, name);
    printf("%s,%.6f,%.6f,%.6f,%d,%.2f,%.2f,%s,%s\n", name, median * 1e3, seconds[0] * 1e3,
           (seconds[runs * 3 / 4] - seconds[runs / 4]) * 1e3, runs, bytes_of(&run) / median * 1e-9,
           kernel_case_flops(c) / median * 1e-9, DTRAIN_COMMIT, bench->device);
    fflush(stdout);
    kernel_run_free_device(&run);
    kernel_run_release(&run);
}

int main(int argc, char **argv)
{
    struct error why = {{0}};
    struct bench bench = {.backend = backend_cpu()};
    if (argc > 1 && strcmp(argv[1], "cuda") == 0)
        bench.backend = backend_cuda(&why);
    if (argc < 2 || bench.backend == NULL || strcmp(argv[1], bench.backend->name) != 0) {
        fprintf(stderr, "usage: bench_kernels cpu|cuda [threads [part of names]]\n%s\n", why.text);
        return 2;
    }
    int threads = argc > 2 ? atoi(argv[2]) : 1;
    if (threads < 1) {
        fprintf(stderr, "threads: a number from 1 is needed, not '%s'\n", argv[2]);
        return 2;
    }
    bench.stream = bench.backend->stream_open(&(struct stream_options){
        .threads = threads, .workspace_bytes = bench.backend->stream_workspace_bytes(threads)});
    bench.flush = bench.backend->alloc(FLUSH_BYTES);
    name_device(&bench);
    printf("case,median_ms,least_ms,quartiles_ms,runs,gbytes_per_s,gflops,commit,device\n");
    for (int i = 0; i < kernel_case_count; i++) {
        char name[CASE_NAME];
        kernel_case_name(&kernel_cases[i], name);
        if (argc <= 3 || strstr(name, argv[3]) != NULL)
            bench_case(&bench, &kernel_cases[i]);
    }
    bench.backend->free(bench.flush);
    bench.backend->stream_close(bench.stream);
    return 0;
}
