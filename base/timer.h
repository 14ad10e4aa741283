// Monotonic wall-clock seconds, and moments of that clock to wait for.
#ifndef BASE_TIMER_H
#define BASE_TIMER_H

#include <time.h>

static inline double timer_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// The moment so many seconds (0 or more) from now, for waits on CLOCK_MONOTONIC.
static inline struct timespec timer_after(double seconds)
{
    const long second = 1000000000;
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    time_t whole = (time_t)seconds;
    t.tv_sec += whole;
    t.tv_nsec += (long)((seconds - (double)whole) * 1e9);
    if (t.tv_nsec >= second) {
        t.tv_sec++;
        t.tv_nsec -= second;
    }
    return t;
}

#endif
