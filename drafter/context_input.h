// A row's captured features on their way into fc, the same for every drafter: planes picked, float8
// codes scaled, noise added, bad documents blanked.
#ifndef DRAFTER_CONTEXT_INPUT_H
#define DRAFTER_CONTEXT_INPUT_H

#include "drafter/drafter_options.h"

struct context_input {
    const struct row *row; // the running one
    const bf16 *features;
    enum noise_kind noise; // of the row
    const void *fc_in;     // [T, L * H] what fc reads, rows fc_stride elements apart
    int64_t fc_stride;
    // backend memory
    void *loaded;        // [T, L * H]; none where fc reads the features themselves
    int32_t *positions;  // [T]
    uint32_t *noise_key; // [T, 2]
    uint8_t *blank;      // [T]
    // Host memory that copies are queued from: overwritten only after a sync.
    const struct backend *backend; // whose host memory it is; NULL: none yet
    uint32_t *h_noise_key;         // [T, 2]
    int32_t *h_positions;          // [T]
    uint8_t *h_blank;              // [T]
};

// Whether the features are what fc reads as they are: the first planes in order, bf16 (both), no noise.
// (Those of bad documents are zeros already.) Where one norm is before fc they are loaded in any case.
bool context_input_direct(const struct drafter_options *options);

// All backend memory but `loaded`, which context_input_plan_loaded takes where it is needed.
void context_input_plan(struct context_input *input, const struct drafter_options *options,
                        struct arena *arena);
void context_input_plan_loaded(struct context_input *input, const struct drafter_options *options,
                               struct arena *arena);
void context_input_open(struct context_input *input, const struct drafter_options *options,
                        const struct backend *backend);
void context_input_close(struct context_input *input);

// Takes a row: positions, blanks and noise keys of its tokens go to the backend.
void context_input_begin(struct context_input *input, const struct drafter_options *options,
                         const struct backend *backend, struct stream *stream,
                         const struct row *row, const bf16 *features, bool noisy, uint64_t seed);
// Makes fc_in from the row's features.
void context_input_load(struct context_input *input, const struct drafter_options *options,
                        const struct backend *backend, struct stream *stream);
// Noise as it is added, for a trace: out [T, L, H] fp32.
void context_input_noise(const struct drafter_options *options, const struct row *row,
                         uint64_t seed, float *out);

#endif
