// A run takes its memory before its first step: a whole training run in this process, on a CPU backend
// that counts what is asked of it. Linked with --wrap=backend_cpu.
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/memory.h"
#include "kernels/kernels.h"
#include "tests/support/run_fixture.h"
#include "trainer/commands.h"

// Ops get no context, so what the counting backend counts is here.
static struct {
    int allocations, streams; // so far
    int64_t updates;          // tensors updated so far
    int before;               // allocations and streams before the end of the first update
} counted;

const struct backend *__real_backend_cpu(void);
const struct backend *__wrap_backend_cpu(void);

static void *counted_alloc(size_t bytes)
{
    counted.allocations++;
    return __real_backend_cpu()->alloc(bytes);
}

static struct stream *counted_stream_open(const struct stream_options *options)
{
    counted.streams++;
    return __real_backend_cpu()->stream_open(options);
}

static void counted_adamw(struct stream *stream, const struct adamw *op)
{
    if (op->step == 1)
        counted.before = counted.allocations + counted.streams;
    counted.updates++;
    kernels_cpu.adamw(stream, op);
}

const struct backend *__wrap_backend_cpu(void)
{
    static struct kernels kernels;
    static struct backend backend;
    kernels = kernels_cpu;
    kernels.adamw = counted_adamw;
    backend = *__real_backend_cpu();
    backend.kernels = &kernels;
    backend.alloc = counted_alloc;
    backend.host_alloc = counted_alloc;
    backend.stream_open = counted_stream_open;
    return &backend;
}

// Rows of one long document, of many short ones, and of one with next to nothing; groups of 4 blocks.
static void write_documents(const struct run_fixture *f)
{
    enum { DOCUMENTS = 24 };
    int64_t lengths[DOCUMENTS];
    for (int i = 0; i < DOCUMENTS; i++)
        lengths[i] = i % 3 == 0 ? 200 + i : i % 3 == 1 ? 2 : 30 + 5 * i;
    fixture_shard(run_path(f, "train.h5"), &(struct fixture_options){
                                               .seed = 5,
                                               .documents = DOCUMENTS,
                                               .lengths = lengths,
                                               .layers = 3,
                                           });
}

static void nothing_is_allocated_after_the_first_step(void **state)
{
    (void)state;
    struct run_fixture f;
    run_fixture_open(&f);
    write_documents(&f);
    const char *dir = run_path(&f, "run");
    char *run_dir = memory_format("run.dir=%s", dir);
    char *val = memory_format("data.val=[%s]", run_path(&f, "val.h5"));
    const char *sets[] = {run_dir,
                          val,
                          "run.max_steps=10",
                          "data.rows_per_step=1",
                          "anchors.max_anchors=100000",
                          "memory.group_rows=32",
                          "memory.chunk_rows=24",
                          "memory.recompute=cheap",
                          "validation.every=2",
                          "validation.at_start=false",
                          "checkpoint.every=3",
                          "checkpoint.background=true"};
    char *config = memory_format("%s", run_path(&f, "run.yaml"));
    struct options options = {.config = config,
                              .sets = sets,
                              .set_count = sizeof(sets) / sizeof(*sets),
                              .resume = "auto",
                              .command = "test"};
    assert_int_equal(command_train(&options), EXIT_DONE);
    assert_int_equal(program_checkpoint(dir), 10);
    assert_true(counted.updates > 0 && counted.before > 0);
    assert_int_equal(counted.allocations + counted.streams, counted.before);
    free(config);
    free(val);
    free(run_dir);
    run_fixture_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_is_allocated_after_the_first_step),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
