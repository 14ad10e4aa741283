// Owns the choice of a backend for test programs.
#include "tests/support/backends.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SKIPPED = 77 };

int test_backend_named(struct test_backend *chosen, const char *name)
{
    struct error why = {{0}};
    bool generic = strcmp(name, "cuda-generic") == 0, cuda = generic || strcmp(name, "cuda") == 0;
    *chosen = (struct test_backend){.name = name, .generic = generic};
    if (cuda)
        chosen->backend = backend_cuda(&why);
    else if (strcmp(name, "cpu") == 0)
        chosen->backend = backend_cpu();
    else
        error_set(&why, "backends are cpu, cuda, cuda-generic");
    if (chosen->backend != NULL)
        return 0;
    const char *required = getenv("REQUIRE_CUDA");
    bool skip = cuda && (required == NULL || strcmp(required, "1") != 0);
    fprintf(stderr, "%s: %s: %s\n", skip ? "SKIPPED" : "not possible", name, why.text);
    return skip ? SKIPPED : EXIT_FAILURE;
}

struct stream *test_backend_stream(const struct test_backend *chosen, int threads)
{
    const struct backend *backend = chosen->backend;
    return backend->stream_open(
        &(struct stream_options){.threads = threads,
                                 .workspace_bytes = backend->stream_workspace_bytes(threads),
                                 .generic = chosen->generic});
}
