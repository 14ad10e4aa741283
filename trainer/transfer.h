// Large arrays between ordinary host memory and the backend: in pieces through two buffers that copies
// are fast with, which all threads fill or empty while the other's piece is on its way.
#ifndef TRAINER_TRANSFER_H
#define TRAINER_TRANSFER_H

#include "kernels/backend.h"

enum { TRANSFER_BUFFERS = 2 };

struct transfer {
    const struct backend *backend;
    size_t piece; // bytes of a buffer
    void *buffer[TRANSFER_BUFFERS];
    struct stream *stream[TRANSFER_BUFFERS];
};

// largest: bytes of the largest array that will come.
void transfer_open(struct transfer *transfer, const struct backend *backend, size_t largest);
void transfer_close(struct transfer *transfer);

// Makes bytes [at, at + bytes) of an array.
typedef void transfer_fill_fn(void *context, size_t at, size_t bytes, void *out);
// The array is on the backend when it returns.
void transfer_in(struct transfer *transfer, void *device, size_t bytes, transfer_fill_fn *fill,
                 void *context);
// A fill: the array is at context in host memory.
void transfer_copy(void *context, size_t at, size_t bytes, void *out);
// The array is at host when it returns. What wrote it must have ended before.
void transfer_out(struct transfer *transfer, const void *device, size_t bytes, void *host);

#endif
