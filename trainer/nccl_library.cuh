// NCCL's functions, found when several GPUs are used: a program must start where the library is not there.
// C++, for ranks_nccl.cu.
#ifndef TRAINER_NCCL_LIBRARY_CUH
#define TRAINER_NCCL_LIBRARY_CUH

#include <dlfcn.h>
#include <nccl.h>

#include "base/error.h"

// Every function that is called.
#define NCCL_FUNCTIONS(X)                                                                          \
    X(GetVersion)                                                                                  \
    X(GetUniqueId)                                                                                 \
    X(CommInitRankConfig)                                                                          \
    X(CommGetAsyncError)                                                                           \
    X(CommFinalize)                                                                                \
    X(CommDestroy)                                                                                 \
    X(CommAbort)                                                                                   \
    X(GetErrorString)                                                                              \
    X(GetLastError)                                                                                \
    X(Reduce)                                                                                      \
    X(Broadcast)                                                                                   \
    X(AllGather)                                                                                   \
    X(GroupStart)                                                                                  \
    X(GroupEnd)

struct nccl_library {
#define NCCL_POINTER(name) decltype(&nccl##name) name;
    NCCL_FUNCTIONS(NCCL_POINTER)
#undef NCCL_POINTER
};

static inline int nccl_library_open(struct nccl_library *library, struct error *err)
{
    // Where the loader looks, then where CMake found it.
    void *handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL)
        handle = dlopen(DTRAIN_NCCL_PATH, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL)
        return error_set(
            err,
            "NCCL, which several GPUs need, is not found (%s): install libnccl2, or name "
            "its folder in LD_LIBRARY_PATH",
            dlerror());
#define NCCL_FIND(name)                                                                            \
    library->name = (decltype(&nccl##name))dlsym(handle, "nccl" #name);                            \
    if (library->name == NULL)                                                                     \
        return error_set(err, "NCCL: the library has no nccl" #name ": 2.18 or newer is needed");
    NCCL_FUNCTIONS(NCCL_FIND)
#undef NCCL_FIND
    return 0;
}

#endif
