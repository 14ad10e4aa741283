// Owns the comparison of points: the best one, and the Pareto fronts against time and memory.
#include <math.h>
#include <stdlib.h>

#include "base/memory.h"
#include "trainer/sweep.h"

// The larger the better: what points are ranked by.
static double score(const struct sweep *sweep, const struct sweep_point *point)
{
    if (point->state != SWEEP_DONE)
        return (double)NAN;
    return sweep->validates ? point->result.best_walk : -point->result.loss;
}

const struct sweep_point *sweep_best(const struct sweep *sweep)
{
    const struct sweep_point *best = NULL;
    for (size_t i = 0; i < sweep->point_count; i++) {
        const struct sweep_point *point = &sweep->points[i];
        double own = score(sweep, point), other = best != NULL ? score(sweep, best) : 0.0;
        if (!isfinite(own))
            continue;
        bool better = best == NULL || own > other ||
                      (!(own < other) && point->result.seconds < best->result.seconds);
        best = better ? point : best;
    }
    return best;
}

// ---- fronts --------------------------------------------------------------------------------------

// How much less than a better point one has to take: a process's memory differs from start to start.
static const double less_time = 1.0, less_memory = 0.99;

struct ranked {
    double score, cost;
    bool *front;
};

// The best first, of equals the one that takes less.
static int by_rank(const void *a, const void *b)
{
    const struct ranked *x = a, *y = b;
    if (x->score > y->score || x->score < y->score)
        return x->score > y->score ? -1 : 1;
    return (x->cost > y->cost) - (x->cost < y->cost);
}

// Each one that takes less than all better ones that are on the front. Not than any better one: of many that take
// little more each, the front would keep the last alone.
static void mark_front(struct ranked *points, size_t count, double less)
{
    double least = INFINITY;
    qsort(points, count, sizeof(*points), by_rank);
    for (size_t i = 0; i < count; i++) {
        bool twin = i > 0 && by_rank(&points[i - 1], &points[i]) == 0;
        *points[i].front = twin ? *points[i - 1].front : points[i].cost < less * least;
        least = *points[i].front ? points[i].cost : least;
    }
}

void sweep_compare(struct sweep *sweep)
{
    struct ranked *times = memory_alloc(sweep->point_count, sizeof(*times));
    struct ranked *memories = memory_alloc(sweep->point_count, sizeof(*memories));
    size_t timed = 0, measured = 0;
    for (size_t i = 0; i < sweep->point_count; i++) {
        struct sweep_point *point = &sweep->points[i];
        double own = score(sweep, point);
        point->front_time = point->front_memory = false;
        if (isfinite(own) && isfinite(point->result.seconds))
            times[timed++] = (struct ranked){own, point->result.seconds, &point->front_time};
        if (isfinite(own) && isfinite(point->result.memory))
            memories[measured++] = (struct ranked){own, point->result.memory, &point->front_memory};
    }
    mark_front(times, timed, less_time);
    mark_front(memories, measured, less_memory);
    free(memories);
    free(times);
}
