// Owns the times of a step's parts.
#include "trainer/step_clock.h"

#include "base/log.h"

static int slot_after(int slot, int laps)
{
    return (slot + laps) % STREAM_TIME_SLOTS;
}

void step_clock_start(struct step_clock *clock, const struct backend *backend,
                      struct stream *stream)
{
    *clock = (struct step_clock){.last = 0};
    backend->time_mark(stream, 0);
}

void step_clock_clear(struct step_clock *clock)
{
    for (int part = 0; part < STEP_PARTS; part++)
        clock->seconds[part] = 0.0;
}

void step_clock_lap(struct step_clock *clock, const struct backend *backend, struct stream *stream,
                    enum step_part part)
{
    BUG_UNLESS(clock->unread < STREAM_TIME_SLOTS - 1);
    clock->last = slot_after(clock->last, 1);
    clock->unread++;
    clock->part[clock->last] = part;
    backend->time_mark(stream, clock->last);
}

void step_clock_read(struct step_clock *clock, const struct backend *backend, struct stream *stream,
                     int running)
{
    for (; clock->unread > running; clock->unread--) {
        int to = slot_after(clock->last, STREAM_TIME_SLOTS - clock->unread + 1);
        int from = slot_after(to, STREAM_TIME_SLOTS - 1);
        if (clock->part[to] != STEP_BETWEEN)
            clock->seconds[clock->part[to]] += backend->time_between(stream, from, to);
    }
}
