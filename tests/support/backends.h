// Which backend a test program runs on, by the word on its command line: cpu, cuda, or cuda-generic
// (CUDA without the paths that only some GPUs have).
#ifndef TESTS_SUPPORT_BACKENDS_H
#define TESTS_SUPPORT_BACKENDS_H

#include <stdbool.h>

#include "kernels/kernels.h"

struct test_backend {
    const char *name; // the word
    const struct backend *backend;
    bool generic;
};

// 0, or, where the backend can not be used, what the program ends with: 77 (skipped) where there is no
// GPU, failure for other words and with REQUIRE_CUDA=1 in the environment. Says why on stderr.
int test_backend_named(struct test_backend *chosen, const char *name);
struct stream *test_backend_stream(const struct test_backend *chosen, int threads);

#endif
