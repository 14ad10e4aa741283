// Compares tensors with a reference: places of NaN and inf first, then a bound on every element, then
// one on the mean square. A NaN never passes.
#ifndef TESTS_SUPPORT_COMPARE_H
#define TESTS_SUPPORT_COMPARE_H

#include <stdbool.h>
#include <stdint.h>

struct compare_bounds {
    double atol, rtol; // |got - expected| <= atol + rtol |expected|
    double nmse;       // sum of squared errors / sum of squared expected values
};

// True when got [rows, columns] is within the bounds. Otherwise says on stderr what differs: the first
// few coordinates with both values, how many, the worst, and the seed that makes the case again.
bool compare_tensors(const char *what, uint64_t seed, const double *got, const double *expected,
                     int64_t rows, int64_t columns, struct compare_bounds bounds);

#endif
