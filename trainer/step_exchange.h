// What a step exchanges between ranks: gradients to their owners while the last backward pass runs, new
// weights to everybody while the update runs, and numbers that all must agree on. With one rank nothing here
// does anything. Every rank makes the same calls in the same order, whatever rows it has.
#ifndef TRAINER_STEP_EXCHANGE_H
#define TRAINER_STEP_EXCHANGE_H

#include <stdbool.h>

struct step;

// What each rank says of itself once a step, and learns of all others.
enum step_word {
    WORD_STOPPED,   // 1: the step was given up
    WORD_NONFINITE, // 1 + the first tensor whose gradient was not finite before the exchange; 0: none
    WORD_WAIT,      // seconds that the step waited for rows
    WORD_READ_TIME,  // seconds of reader threads
    WORD_READ_BYTES, // of shards
    WORD_DISK_TIME,  // seconds of reader threads in which files were read
    WORD_SAVING,     // enum checkpoint_phase
    STEP_WORDS
};

struct step_exchange {
    bool shared;             // several ranks
    bool final_row;          // the row that runs is this rank's last of the step
    int next_stage;          // of gradients that nobody has been given yet
    bool *awaited;           // [parts] weights on their way that nothing has waited for yet
    double *values;          // [metrics, parameters, ranks * STEP_WORDS] as they travel
    double *words;           // [ranks, STEP_WORDS] of all ranks, after the agreement
    double word[STEP_WORDS]; // this rank's, before
};

void step_exchange_open(struct step *step);
void step_exchange_close(struct step *step);
// Begins the sums of a step.
void step_exchange_begin(struct step *step);
// Hands over every gradient that has not been, and makes the stream wait until owners have the sums.
void step_exchange_gradients(struct step *step);
// Sends a part's weights from their owners to everybody. They are waited for where they are needed.
void step_exchange_weights(struct step *step, int part);
// The stream waits for all weights on their way.
void step_exchange_settle(struct step *step);
// Sums of metrics and squares, and every rank's words, on all ranks. The host waits.
void step_exchange_agree(struct step *step);
// The largest, and the sum, of what ranks said.
double step_word_max(const struct step *step, enum step_word word);
double step_word_sum(const struct step *step, enum step_word word);

#endif
