// A CPU backend whose streams do nothing before they must: what is queued runs at a sync of its stream,
// or when a stream that was told to wait for it runs. So work that reads memory which the host has
// changed meanwhile, or which another stream has yet to fill, gives other results than the CPU backend's
// own. Asking for a time before its mark has run is a BUG.
#ifndef TESTS_SUPPORT_LAZY_BACKEND_H
#define TESTS_SUPPORT_LAZY_BACKEND_H

#include "kernels/kernels.h"

// early: streams for copies run at once, after what they wait for; only the others are late.
const struct backend *lazy_backend(bool early);

#endif
