// Times ops one by one at the sizes of real models, on random data, beside what the device can do: a
// copy and a large product are measured first. With --sizes cases it times the rows of the table of
// kernel cases instead. What it prints is defined in benchmarks/README.md.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "base/rng.h"
#include "benchmarks/kernel_rows.h"
#include "version.h"

enum {
    WARM_UP = 2,
    LEAST_RUNS = 10,
    MOST_RUNS = STREAM_TIME_SLOTS / 2, // each has two marks
    FLUSH_BYTES = 128 << 20,           // more than the last-level cache of the machines we know
    NAME = 192
};
static const double enough_seconds = 0.1;

static void call_case(const struct bench *bench, struct job *job)
{
    (void)bench;
    kernel_case_call(job->kernel_case, job->run);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

struct times {
    double median, least, quartiles; // seconds; third quartile minus first
    int runs;
};

// Before each run the cache is overwritten; device time between two marks.
static struct times times_of(const struct bench *bench, struct job *job)
{
    const struct backend *backend = bench->backend;
    double seconds[MOST_RUNS] = {0}, total = 0.0;
    struct times times = {0};
    for (int i = 0; i < WARM_UP; i++)
        job->call(bench, job);
    backend->sync(bench->stream);
    while (times.runs < LEAST_RUNS || (times.runs < MOST_RUNS && total < enough_seconds)) {
        backend->zero(bench->stream, bench->flush, FLUSH_BYTES);
        backend->time_mark(bench->stream, 0);
        job->call(bench, job);
        backend->time_mark(bench->stream, 1);
        backend->sync(bench->stream);
        seconds[times.runs] = backend->time_between(bench->stream, 0, 1);
        total += seconds[times.runs++];
    }
    qsort(seconds, (size_t)times.runs, sizeof(seconds[0]), by_value);
    times.median = seconds[times.runs / 2];
    times.least = seconds[0];
    times.quartiles = seconds[times.runs * 3 / 4] - seconds[times.runs / 4];
    return times;
}

static bool on_cpu(const struct bench *bench)
{
    return strcmp(bench->backend->name, "cpu") == 0;
}

// Of the ceiling's copy.
static int64_t copy_bytes(const struct bench *bench)
{
    return on_cpu(bench) ? 1 << 28 : (int64_t)1 << 31;
}

static void call_copy(const struct bench *bench, struct job *job)
{
    struct convert *op = &job->op.convert;
    bench->backend->copy(bench->stream, op->to, op->from, (size_t)op->count);
}

// Binds a copy that reads and writes so many bytes; both tensors are taken.
static void bind_copy(struct bench *bench, int64_t bytes, struct job *job)
{
    *job = (struct job){.call = call_copy};
    job->op.convert = (struct convert){.count = bytes,
                                       .from = bench_take_in(bench, DTYPE_F32, bytes / 4),
                                       .to = bench_take_out(bench, DTYPE_F32, bytes / 4),
                                       .from_type = DTYPE_F32,
                                       .to_type = DTYPE_F32};
}

static void call_copy_kernel(const struct bench *bench, struct job *job)
{
    struct convert op = job->op.convert;
    op.count /= (int64_t)sizeof(float);
    bench->backend->kernels->convert(bench->stream, &op);
}

// Seconds of a copy that moves `bytes` in all, half of them each way, by the backend's copy or by its
// conversion of fp32 to fp32, which are each the faster at some sizes: what a call of that size can hope
// for, as the start and the end of a call count more the less it moves.
static double copy_seconds(struct bench *bench, double bytes)
{
    int64_t half = (int64_t)(bytes / 2.0) / 4 * 4;
    struct job job;
    if (half == 0 || half >= copy_bytes(bench))
        return bytes / bench->copy_rate;
    bench->bytes = 0.0;
    bind_copy(bench, half, &job);
    double seconds = times_of(bench, &job).median;
    job.call = call_copy_kernel;
    double by_kernel = times_of(bench, &job).median;
    seconds = seconds < by_kernel ? seconds : by_kernel;
    double rate = bench->bytes / seconds;
    bench_give_all(bench);
    return bytes / rate;
}

// One line of the table, and of the CSV file. Share of the ceiling of what the op is bound by, and of a
// copy of as many bytes, which takes same_copy seconds.
static void print_row(const struct bench *bench, const char *name, const struct job *job,
                      const struct times *times, double same_copy)
{
    double rate = bench->bytes / times->median, flops = job->flops / times->median;
    double by_bytes = bench->copy_rate > 0.0 ? rate / bench->copy_rate : 0.0;
    double by_flops = bench->flop_rate > 0.0 ? flops / bench->flop_rate : 0.0;
    double share = by_flops > by_bytes ? by_flops : by_bytes;
    double copy_share = same_copy / times->median;
    printf("%-46s %9.3f ms %8.3f TFLOP/s %7.1f GB/s %5.1f %% %5.1f %%\n", name, times->median * 1e3,
           flops * 1e-12, rate * 1e-9, share * 100.0, copy_share * 100.0);
    fflush(stdout);
    if (bench->csv == NULL)
        return;
    fprintf(bench->csv, "%s,%.6f,%.6f,%.6f,%d,%.3f,%.3f,%.4f,%.4f,%s,%s\n", name,
            times->median * 1e3, times->least * 1e3, times->quartiles * 1e3, times->runs,
            rate * 1e-9, flops * 1e-9, share, copy_share, DTRAIN_COMMIT, bench->device);
    fflush(bench->csv);
}

static bool fits(const struct bench *bench, double bytes)
{
    size_t left, all;
    bench->backend->memory(&left, &all);
    return bytes < 0.9 * (double)left;
}

// Whether the name has one of the parts, which commas separate.
static bool wanted(const struct bench *bench, const char *name)
{
    for (const char *part = bench->only; part != NULL && *part != '\0';) {
        char one[NAME];
        size_t length = strcspn(part, ",");
        snprintf(one, sizeof(one), "%.*s", (int)length, part);
        if (strstr(name, one) != NULL)
            return true;
        part += length + (part[length] == ',');
    }
    return bench->only == NULL;
}

static void time_job(struct bench *bench, const char *name, struct job *job)
{
    struct times times = times_of(bench, job);
    double bytes = bench->bytes;
    bench_give_all(bench);
    double same_copy = copy_seconds(bench, bytes);
    bench->bytes = bytes;
    print_row(bench, name, job, &times, same_copy);
    bench->bytes = 0.0;
}

static void bench_weights(struct bench *bench, const struct sizes *s)
{
    for (int weight = 0; weight < BENCH_WEIGHTS; weight++)
        for (int pass = 0; pass < BENCH_PASSES; pass++) {
            struct job job = {0};
            char name[NAME];
            const char *weight_name = bench_weight_name(weight, pass);
            if (weight_name == NULL)
                continue;
            snprintf(name, sizeof(name), "gemm/%s/%s/%s", weight_name, bench_passes[pass], s->name);
            if (!wanted(bench, name))
                continue;
            bench_bind_weight(bench, s, weight, pass, &job);
            time_job(bench, name, &job);
        }
}

// What the largest op needs: the parameters with their moments, gradient and copy.
static void bench_at(struct bench *bench, const struct sizes *s)
{
    bench_weights(bench, s);
    for (int i = 0; i < bench_row_count; i++) {
        struct job job = {0};
        char name[NAME];
        snprintf(name, sizeof(name), "%s/%s/%s", bench_rows[i].op, bench_rows[i].variant, s->name);
        if (!wanted(bench, name))
            continue;
        bool update = strcmp(bench_rows[i].op, "adamw") == 0 ||
                      strncmp(bench_rows[i].op, "muon_", strlen("muon_")) == 0;
        if (update && !fits(bench, 18.0 * (double)s->parameters)) {
            printf("%-46s left out: not enough memory\n", name);
            continue;
        }
        bench_rows[i].bind(bench, s, &job);
        time_job(bench, name, &job);
    }
}

// Bytes that a case must read and write at least once.
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

static void bench_cases(struct bench *bench)
{
    for (int i = 0; i < kernel_case_count; i++) {
        struct kernel_run run;
        struct job job = {.kernel_case = &kernel_cases[i], .run = &run, .call = call_case};
        char name[CASE_NAME];
        kernel_case_name(&kernel_cases[i], name);
        if (!wanted(bench, name))
            continue;
        kernel_case_build(&kernel_cases[i], &run);
        kernel_run_send(&run, bench->backend, bench->stream);
        job.flops = kernel_case_flops(&kernel_cases[i]);
        bench->bytes = bytes_of(&run);
        time_job(bench, name, &job);
        kernel_run_free_device(&run);
        kernel_run_release(&run);
    }
}

// A copy of 2 GiB (CPU: 256 MiB), and a product of 8192 x 8192 x 8192 (CPU: 1024).
static void measure_ceilings(struct bench *bench)
{
    int64_t side = on_cpu(bench) ? 1024 : 8192;
    struct job job;
    bind_copy(bench, copy_bytes(bench), &job);
    struct times times = times_of(bench, &job);
    bench->copy_rate = bench->bytes / times.median;
    print_row(bench, "ceiling/copy", &job, &times, times.median);
    bench_give_all(bench);
    bench->bytes = 0.0;

    job = (struct job){0};
    bench_bind_square(bench, side, &job);
    times = times_of(bench, &job);
    bench->flop_rate = job.flops / times.median;
    print_row(bench, "ceiling/gemm", &job, &times, bench->bytes / bench->copy_rate);
    bench_give_all(bench);
    bench->bytes = 0.0;
    job = (struct job){0};
    bench_bind_call(bench, &job);
    time_job(bench, "ceiling/call", &job);
}

static void *send(const struct bench *bench, const void *values, size_t bytes)
{
    void *device = bench->backend->alloc(bytes);
    bench->backend->copy_in(bench->stream, device, values, bytes);
    bench->backend->sync(bench->stream);
    return device;
}

static void make_patterns(struct bench *bench)
{
    struct rng_key key = rng_key_make(1, 0, 0, RNG_TEST);
    float *values = memory_alloc(PATTERN, sizeof(*values));
    bf16 *rounded = memory_alloc(PATTERN, sizeof(*rounded));
    for (int i = 0; i < PATTERN; i++) {
        values[i] = rng_normal(key, (uint64_t)i);
        rounded[i] = bf16_from_float(values[i]);
    }
    bench->pattern[0] = send(bench, values, PATTERN * sizeof(*values));
    bench->pattern[1] = send(bench, rounded, PATTERN * sizeof(*rounded));
    for (int i = 0; i < PATTERN; i++)
        values[i] = values[i] < 0.0f ? -values[i] : values[i];
    bench->positive = send(bench, values, PATTERN * sizeof(*values));
    free(values);
    free(rounded);
}

struct arguments {
    const char *device, *sizes, *type, *csv;
    int threads;
};

static int usage(const char *why)
{
    fprintf(stderr,
            "bench_kernels: %s\n"
            "usage: bench_kernels [--device cpu|cuda] [--threads N] [--sizes NAME|cases|all]\n"
            "                     [--type bf16|fp32] [--only PARTS_OF_NAMES] [--tune SECONDS]\n"
            "                     [--csv FILE]\n",
            why);
    return 2;
}

static int parse(int argc, char **argv, struct arguments *arguments, struct bench *bench)
{
    for (int i = 1; i < argc; i += 2) {
        const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (value == NULL)
            return usage("an option without its value");
        if (strcmp(name, "--device") == 0)
            arguments->device = value;
        else if (strcmp(name, "--sizes") == 0)
            arguments->sizes = value;
        else if (strcmp(name, "--type") == 0)
            arguments->type = value;
        else if (strcmp(name, "--csv") == 0)
            arguments->csv = value;
        else if (strcmp(name, "--only") == 0)
            bench->only = value;
        else if (strcmp(name, "--tune") == 0)
            bench->tune_seconds = strtod(value, NULL);
        else if (strcmp(name, "--threads") == 0)
            arguments->threads = (int)strtol(value, NULL, 10);
        else
            return usage("an unknown option");
    }
    if (arguments->threads < 1)
        return usage("--threads takes a number from 1");
    return 0;
}

static int bench_open(struct bench *bench, const struct arguments *arguments)
{
    struct error why = {{0}};
    bool cuda = strcmp(arguments->device, "cuda") == 0;
    char library[128];
    if (!cuda && strcmp(arguments->device, "cpu") != 0)
        return usage("--device takes cpu or cuda");
    bench->backend = cuda ? backend_cuda(&why) : backend_cpu();
    if (bench->backend == NULL)
        return usage(why.text);
    const char *type = arguments->type != NULL ? arguments->type : cuda ? "bf16" : "fp32";
    if (strcmp(type, "bf16") != 0 && strcmp(type, "fp32") != 0)
        return usage("--type takes bf16 or fp32");
    bench->type = strcmp(type, "bf16") == 0 ? DTYPE_BF16 : DTYPE_F32;
    struct stream_options options = {
        .threads = arguments->threads,
        .workspace_bytes = bench->backend->stream_workspace_bytes(arguments->threads)};
    bench->stream = bench->backend->stream_open(&options);
    bench->flush = bench->backend->alloc(FLUSH_BYTES);
    bench->algorithms = memory_alloc(1, sizeof(*bench->algorithms));
    bench->backend->describe(bench->device, sizeof(bench->device), library, sizeof(library));
    make_patterns(bench);
    printf("%s, %s, %s, commit %s\n", bench->device, library, type, DTRAIN_COMMIT);
    if (arguments->csv == NULL)
        return 0;
    bench->csv = fopen(arguments->csv, "we");
    if (bench->csv == NULL)
        return usage("the file of --csv can not be written");
    fprintf(bench->csv,
            "case,median_ms,least_ms,quartiles_ms,runs,gbytes_per_s,gflops,share,copy_share,"
            "commit,device\n");
    return 0;
}

static void bench_close(struct bench *bench)
{
    bench->backend->free(bench->flush);
    bench->backend->free(bench->pattern[0]);
    bench->backend->free(bench->pattern[1]);
    bench->backend->free(bench->positive);
    bench->backend->stream_close(bench->stream);
    free(bench->algorithms);
    if (bench->csv != NULL)
        fclose(bench->csv);
}

static bool known_sizes(const char *name)
{
    for (int i = 0; i < bench_size_count; i++)
        if (strcmp(name, bench_sizes[i].name) == 0)
            return true;
    return strcmp(name, "all") == 0 || strcmp(name, "cases") == 0;
}

int main(int argc, char **argv)
{
    struct arguments arguments = {.device = "cpu", .threads = 1};
    struct bench bench = {.tune_seconds = 0.2};
    if (parse(argc, argv, &arguments, &bench) != 0)
        return 2;
    if (arguments.sizes != NULL && !known_sizes(arguments.sizes))
        return usage("--sizes takes v4, qwen3-8b, smollm2, all or cases");
    if (bench_open(&bench, &arguments) != 0)
        return 2;
    // A CPU takes minutes at the larger sizes.
    const char *sizes = arguments.sizes != NULL ? arguments.sizes
                        : on_cpu(&bench)        ? "smollm2"
                                                : "all";
    measure_ceilings(&bench);
    for (int i = 0; i < bench_size_count; i++)
        if (strcmp(sizes, "all") == 0 || strcmp(sizes, bench_sizes[i].name) == 0)
            bench_at(&bench, &bench_sizes[i]);
    if (strcmp(sizes, "cases") == 0)
        bench_cases(&bench);
    bench_close(&bench);
    return 0;
}
