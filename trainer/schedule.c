// Owns the learning rate as a function of the step. Nothing is remembered: a resumed run asks again.
#include "trainer/schedule.h"

#include <math.h>

#include "base/log.h"

static int64_t share_of(double ratio, int64_t total)
{
    return llround(ratio * (double)total);
}

static int64_t warmup_steps(const struct schedule_config *schedule, int64_t total)
{
    if (schedule->warmup_steps != CONFIG_UNSET)
        return schedule->warmup_steps;
    return share_of(schedule->warmup_ratio, total);
}

// Share of the way from the peak (0) to the end (1) at `step`, after `begin` steps at the peak.
static double progress(int64_t step, int64_t begin, int64_t total)
{
    if (step <= begin)
        return 0.0;
    return step >= total ? 1.0 : (double)(step - begin) / (double)(total - begin);
}

// Share of the peak.
static double factor_after_warmup(const struct schedule_config *schedule, int64_t step,
                                  int64_t warmup, int64_t total)
{
    double fall = 1.0 - schedule->min_lr_ratio;
    double way = progress(step, warmup, total);
    switch (schedule->kind) {
    case SCHEDULE_COSINE:
        return schedule->min_lr_ratio + fall * 0.5 * (1.0 + cos(acos(-1.0) * way));
    case SCHEDULE_LINEAR:
        return 1.0 - fall * way;
    case SCHEDULE_WSD: {
        int64_t decay = share_of(schedule->decay_ratio, total);
        int64_t begin = total - (decay > 0 ? decay : 1); // the last step is at the end always
        return 1.0 - fall * progress(step, begin > warmup ? begin : warmup, total);
    }
    case SCHEDULE_CONSTANT:
        return 1.0;
    default:
        BUG("schedule kind %d", schedule->kind);
    }
}

double schedule_lr(const struct schedule_config *schedule, double peak, int64_t step, int64_t total)
{
    BUG_UNLESS(step >= 1 && total >= 1);
    int64_t warmup = warmup_steps(schedule, total);
    if (step <= warmup)
        return peak * (double)step / (double)warmup;
    return peak * factor_after_warmup(schedule, step, warmup, total);
}
