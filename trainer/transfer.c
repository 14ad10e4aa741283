// Owns the pieces in which large arrays move.
#include "trainer/transfer.h"

#include <string.h>

#include "base/log.h"

enum { LARGEST_PIECE = 64 << 20, SLICE = 1 << 20 };

void transfer_open(struct transfer *transfer, const struct backend *backend, size_t largest)
{
    *transfer = (struct transfer){.backend = backend};
    transfer->piece = largest < LARGEST_PIECE ? largest : LARGEST_PIECE;
    for (int i = 0; i < TRANSFER_BUFFERS; i++) {
        transfer->buffer[i] = backend->host_alloc(transfer->piece);
        transfer->stream[i] = backend->stream_open(&(struct stream_options){.threads = 1});
    }
}

void transfer_close(struct transfer *transfer)
{
    for (int i = 0; i < TRANSFER_BUFFERS && transfer->backend != NULL; i++) {
        transfer->backend->stream_close(transfer->stream[i]);
        transfer->backend->host_free(transfer->buffer[i]);
    }
    *transfer = (struct transfer){.backend = NULL};
}

// One core copies a tenth of what the bus does.
static void copy_parallel(void *to, const void *from, size_t bytes)
{
#pragma omp parallel for schedule(static)
    for (size_t at = 0; at < bytes; at += SLICE)
        memcpy((unsigned char *)to + at, (const unsigned char *)from + at,
               bytes - at < SLICE ? bytes - at : SLICE);
}

void transfer_copy(void *context, size_t at, size_t bytes, void *out)
{
    copy_parallel(out, (const unsigned char *)context + at, bytes);
}

// Bytes of the piece that starts at `at`.
static size_t piece_at(const struct transfer *transfer, size_t at, size_t bytes)
{
    return bytes - at < transfer->piece ? bytes - at : transfer->piece;
}

void transfer_in(struct transfer *transfer, void *device, size_t bytes, transfer_fill_fn *fill,
                 void *context)
{
    const struct backend *backend = transfer->backend;
    int turn = 0;
    for (size_t at = 0; at < bytes; at += transfer->piece, turn = (turn + 1) % TRANSFER_BUFFERS) {
        size_t n = piece_at(transfer, at, bytes);
        backend->sync(transfer->stream[turn]);
        fill(context, at, n, transfer->buffer[turn]);
        backend->copy_in(transfer->stream[turn], (unsigned char *)device + at,
                         transfer->buffer[turn], n);
    }
    for (int i = 0; i < TRANSFER_BUFFERS; i++)
        backend->sync(transfer->stream[i]);
}

void transfer_out(struct transfer *transfer, const void *device, size_t bytes, void *host)
{
    const struct backend *backend = transfer->backend;
    size_t pieces = (bytes + transfer->piece - 1) / transfer->piece;
    for (size_t p = 0; p < pieces + 1; p++) {
        size_t at = p * transfer->piece;
        if (p < pieces)
            backend->copy_out(transfer->stream[p % TRANSFER_BUFFERS],
                              transfer->buffer[p % TRANSFER_BUFFERS],
                              (const unsigned char *)device + at, piece_at(transfer, at, bytes));
        if (p == 0)
            continue;
        at -= transfer->piece; // the piece before, while this one travels
        backend->sync(transfer->stream[(p - 1) % TRANSFER_BUFFERS]);
        copy_parallel((unsigned char *)host + at, transfer->buffer[(p - 1) % TRANSFER_BUFFERS],
                      piece_at(transfer, at, bytes));
    }
}
