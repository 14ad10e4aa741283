// Owns the comparison of tensors with their reference.
#include "tests/support/compare.h"

#include <math.h>
#include <stdio.h>

enum { SHOWN = 5 };

struct difference {
    int64_t count, worst;
    double worst_error;
};

static bool same_place(double got, double expected)
{
    if (isnan(expected))
        return isnan(got);
    return got == expected; // infinities, with their sign
}

static void report(struct difference *difference, const char *what, int64_t i, int64_t columns,
                   double got, double expected)
{
    double error = fabs(got - expected);
    if (difference->count++ < SHOWN)
        fprintf(stderr, "%s [%lld, %lld]: %.9g, expected %.9g\n", what, (long long)(i / columns),
                (long long)(i % columns), got, expected);
    if (!(error <= difference->worst_error)) {
        difference->worst_error = error;
        difference->worst = i;
    }
}

bool compare_tensors(const char *what, uint64_t seed, const double *got, const double *expected,
                     int64_t rows, int64_t columns, struct compare_bounds bounds)
{
    struct difference difference = {0};
    double errors = 0.0, squares = 0.0;
    const int64_t count = rows * columns;
    for (int64_t i = 0; i < count; i++) {
        if (!isfinite(expected[i]) || !isfinite(got[i])) {
            if (!same_place(got[i], expected[i]))
                report(&difference, what, i, columns, got[i], expected[i]);
            continue;
        }
        double error = fabs(got[i] - expected[i]);
        if (!(error <= bounds.atol + bounds.rtol * fabs(expected[i])))
            report(&difference, what, i, columns, got[i], expected[i]);
        errors += error * error;
        squares += expected[i] * expected[i];
    }
    if (difference.count > 0)
        fprintf(stderr, "%s: %lld of %lld differ, worst by %.3g at [%lld, %lld], seed %llu\n", what,
                (long long)difference.count, (long long)count, difference.worst_error,
                (long long)(difference.worst / columns), (long long)(difference.worst % columns),
                (unsigned long long)seed);
    bool close = squares == 0.0 || errors / squares <= bounds.nmse;
    if (!close)
        fprintf(stderr, "%s: mean square error %.3g of the mean square, at most %.3g, seed %llu\n",
                what, errors / squares, bounds.nmse, (unsigned long long)seed);
    return difference.count == 0 && close;
}
