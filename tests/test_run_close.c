// The end of a run that has nothing left to do while its reader still packs an epoch: readers end before
// what they use does, and one that does not come back keeps all that it may use. And of one whose threads can not be
// started. Linked with --wrap of the functions below, which tell the test's threads where the run stands.
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/memory.h"
#include "base/timer.h"
#include "tests/support/run_fixture.h"
#include "trainer/commands.h"
#include "trainer/run.h"

// Where the run of the running test stands; the wrapped functions get no context of the test's.
static struct {
    bool slow;             // the reader packs until the loop of steps has ended
    bool leave_behind;     // until command_train has returned
    atomic_int packing;    // the reader is at it
    atomic_int loop_ended; // of steps
    atomic_int used_late;  // the reader was at it when the ranks were closed
    atomic_int ranks_closed;
    atomic_int returned;
    atomic_int packed;  // the reader is done
    int refused;        // which of the run's threads can not be started, from 1; 0: none
    atomic_int threads; // that were to be started
} at;

static struct run *volatile left_run; // never freed; LeakSanitizer finds it here

void __real_session_pack_own(void *session, uint64_t epoch, struct packing *packing);
void __wrap_session_pack_own(void *session, uint64_t epoch, struct packing *packing);
int __real_prefetch_open(struct prefetch **prefetch, struct source *source,
                         const struct prefetch_options *options, prefetch_epoch_fn *epoch_packing,
                         void *context, uint64_t first_epoch, int64_t first_row,
                         uint64_t epoch_count, struct error *err);
int __wrap_prefetch_open(struct prefetch **prefetch, struct source *source,
                         const struct prefetch_options *options, prefetch_epoch_fn *epoch_packing,
                         void *context, uint64_t first_epoch, int64_t first_row,
                         uint64_t epoch_count, struct error *err);
void __real_run_report_memory(struct run *run);
void __wrap_run_report_memory(struct run *run);
void __real_ranks_close(struct ranks *ranks);
void __wrap_ranks_close(struct ranks *ranks);
typedef void *thread_main_fn(void *argument);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          thread_main_fn *thread_main, void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          thread_main_fn *thread_main, void *argument);

// False: it has not come in a minute.
static bool await(atomic_int *flag)
{
    double start = timer_now();
    while (atomic_load(flag) == 0 && timer_now() - start < 60.0)
        run_sleep(0.001);
    return atomic_load(flag) != 0;
}

void __wrap_session_pack_own(void *session, uint64_t epoch, struct packing *packing)
{
    atomic_store(&at.packing, 1);
    if (at.slow) {
        await(at.leave_behind ? &at.returned : &at.loop_ended);
        run_sleep(0.3); // a run that did not wait for this reader would close meanwhile
    }
    __real_session_pack_own(session, epoch, packing);
    atomic_store(&at.packed, 1);
}

int __wrap_prefetch_open(struct prefetch **prefetch, struct source *source,
                         const struct prefetch_options *options, prefetch_epoch_fn *epoch_packing,
                         void *context, uint64_t first_epoch, int64_t first_row,
                         uint64_t epoch_count, struct error *err)
{
    struct prefetch_options changed = *options;
    if (at.leave_behind)
        changed.stop_seconds = 0.1;
    return __real_prefetch_open(prefetch, source, &changed, epoch_packing, context, first_epoch,
                                first_row, epoch_count, err);
}

void __wrap_run_report_memory(struct run *run)
{
    __real_run_report_memory(run);
    if (at.leave_behind)
        left_run = run;
    if (!await(&at.packing))
        fail_msg("no reader packs");
    atomic_store(&at.loop_ended, 1);
}

void __wrap_ranks_close(struct ranks *ranks)
{
    atomic_store(&at.used_late, atomic_load(&at.packing) && !atomic_load(&at.packed));
    __real_ranks_close(ranks);
    atomic_store(&at.ranks_closed, 1);
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          thread_main_fn *thread_main, void *argument)
{
    if (atomic_fetch_add(&at.threads, 1) + 1 == at.refused)
        return EAGAIN;
    return __real_pthread_create(thread, attributes, thread_main, argument);
}

static int train_status(const struct run_fixture *f)
{
    char *run_dir = memory_format("run.dir=%s/run", f->folder);
    char *config = memory_format("%s/run.yaml", f->folder);
    char *val = memory_format("data.val=[%s/val.h5]", f->folder);
    const char *sets[] = {run_dir, val, "run.max_steps=1", "checkpoint.background=true"};
    struct options options = {.config = config,
                              .sets = sets,
                              .set_count = sizeof(sets) / sizeof(*sets),
                              .resume = "auto",
                              .command = "test"};
    int status = command_train(&options);
    atomic_store(&at.returned, 1);
    free(val);
    free(config);
    free(run_dir);
    return status;
}

static void train(const struct run_fixture *f)
{
    assert_int_equal(train_status(f), EXIT_DONE);
}

static void readers_end_before_ranks_are_freed(void **state)
{
    (void)state;
    struct run_fixture f;
    run_fixture_open(&f);
    memset(&at, 0, sizeof(at));
    train(&f);
    memset(&at, 0, sizeof(at));
    at.slow = true;
    train(&f);
    assert_true(atomic_load(&at.packed) != 0);
    assert_true(atomic_load(&at.ranks_closed) != 0);
    assert_int_equal(atomic_load(&at.used_late), 0);
    run_fixture_close(&f);
}

// The reader then packs with the run's session: sanitizers see when that is gone.
static void a_reader_left_behind_keeps_what_it_uses(void **state)
{
    (void)state;
    struct run_fixture f;
    run_fixture_open(&f);
    memset(&at, 0, sizeof(at));
    train(&f);
    memset(&at, 0, sizeof(at));
    at.slow = at.leave_behind = true;
    train(&f);
    assert_int_equal(atomic_load(&at.packed), 0);
    assert_true(program_says(run_path(&f, "run/log.txt"), "it is left behind"));
    assert_true(await(&at.packed));
    run_fixture_close(&f);
}

// The machine's fault, not the config's. One thread after the other is refused, until it is one that a run can do
// without, of those that write a checkpoint's parts.
static void a_thread_that_can_not_be_started(void **state)
{
    (void)state;
    struct run_fixture f;
    run_fixture_open(&f);
    int refused = 0, writers = 0, readers = 0;
    for (;;) {
        run_remove(&f, "run");
        memset(&at, 0, sizeof(at));
        at.refused = ++refused;
        int status = train_status(&f);
        assert_true(atomic_load(&at.threads) >= refused);
        if (status == EXIT_DONE)
            break;
        assert_int_equal(status, EXIT_FAILED);
        const char *log = run_path(&f, "run/log.txt");
        assert_true(program_says(log, ": Resource temporarily unavailable"));
        writers += program_says(log, "checkpoints: can not start the thread that writes them");
        readers += program_says(log, "can not start reader ");
    }
    assert_int_equal(writers, 1);
    assert_true(readers > 0 && writers + readers == refused - 1);
    run_fixture_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(readers_end_before_ranks_are_freed),
        cmocka_unit_test(a_thread_that_can_not_be_started),
        cmocka_unit_test(a_reader_left_behind_keeps_what_it_uses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
