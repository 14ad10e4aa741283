// Numbers of a step as a run would report them, easy to check by hand.
#ifndef TESTS_SUPPORT_REPORT_FIXTURE_H
#define TESTS_SUPPORT_REPORT_FIXTURE_H

#include "trainer/run_folder.h"

struct metrics report_metrics(void);
// Of step `step` of 100: two seconds, blocks of 4, losses kl and tv.
struct step_report report_step_of(const struct metrics *metrics, int64_t step);
// Reports that step, with those metrics, to an open run folder; a fault fails the test.
void report_write_step(struct run_folder *folder, int64_t step);

#endif
