// Metrics and reports of made-up steps.
#include "tests/support/report_fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

struct metrics report_metrics(void)
{
    struct metrics metrics = {.loss = 6.0,
                              .weight = 4.0,
                              .slots = 8.0,
                              .overlap = 1.5, // of 6 scored slots
                              .blocks = 4.0,
                              .accepted = 6.0,
                              .tokens = 5000000000.0,
                              .supervised = 2500000000.0,
                              .covered = 1250000000.0,
                              .anchors = 4.0,
                              .valid_anchors = 9.0,
                              .rows = 2.0,
                              .bad_documents = 1.0};
    metrics.terms[LOSS_KL] = 3.0;
    metrics.terms[LOSS_TV] = 1.0;
    metrics.scored[1] = 4.0;
    metrics.correct[1] = 3.0;
    metrics.scored[2] = 2.0;
    metrics.correct[2] = 1.0;
    return metrics;
}

struct step_report report_step_of(const struct metrics *metrics, int64_t step)
{
    static const double weights[LOSS_TERM_COUNT] = {[LOSS_KL] = 1.0, [LOSS_TV] = 0.5};
    return (struct step_report){.step = step,
                                .total_steps = 100,
                                .epoch = 1,
                                .metrics = metrics,
                                .normalize = NORMALIZE_WEIGHTED,
                                .term_weights = weights,
                                .block_size = 4,
                                .lr = 1e-4,
                                .grad_norm = 0.1,
                                .clip_factor = 1.0,
                                .seconds = 2.0,
                                .wait_seconds = 0.5,
                                .read_seconds = 4.0,
                                .read_bytes = 8e9,
                                .memory_bytes = 3e9,
                                .begin_bytes = 1e9,
                                .planned_bytes = 2e9,
                                .readers = 4,
                                .device = "GPU",
                                .flops = 1e12,
                                .disk_seconds = 3.0,
                                .copy_seconds = 0.125};
}

void report_write_step(struct run_folder *folder, int64_t step)
{
    struct metrics metrics = report_metrics();
    struct step_report report = report_step_of(&metrics, step);
    struct error err = {""};
    if (run_folder_step(folder, &report, 10, &err) != 0)
        fail_msg("%s", err.text);
}
