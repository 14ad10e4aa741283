// What a step computes and reads, and what a run keeps on disk.
#ifndef TRAINER_PLAN_WORK_H
#define TRAINER_PLAN_WORK_H

#include "trainer/plan.h"

// What is known of the documents.
struct plan_documents {
    int64_t shards, documents, tokens; // 0: no shards yet
    int64_t rows;                      // packed, of the first epoch
    double file_bytes;
    double mean_length; // of the document that a token is in, cut to seq_len
};

// Of one optimizer step, all rows together; every anchor drawn, every token supervised.
struct plan_work {
    int64_t rows;      // packed rows
    double tokens;     // of a row
    double anchors;    // of a row
    double block_rows; // N, of a row
    double groups;     // of a row
    double scored;     // R, of a row
    double teachers;   // distinct teacher positions, of a row
    double visible;    // context positions that a block row sees, mean over layers
    bool guessed;      // visible: of rows that hold one document each
    // floating-point operations
    double context, forward, backward, recompute, attention, student, teacher, gradient;
    double scored_layers; // the part of forward and backward that only scored rows go through
    double update;        // of Muon's products
    double flops;
    double optimizer_bytes; // read and written by the update
    double read_bytes;      // from shards
    double seconds;         // on one GPU with the rate given, at least
    double rank_seconds;    // on each of the subject's ranks
    // of the whole run; 0: not known
    int64_t epoch_steps, steps;
};

enum { PLAN_TFLOPS = 700 };                  // sustained bf16 products of an H200
static const double plan_bandwidth = 4.2e12; // bytes a second of its memory

void plan_work(struct plan_work *work, const struct plan *plan, const struct plan_subject *subject,
               const struct config *config, const struct plan_documents *documents, double tflops);

// Operations that a step of these counts, all rows together, can not do without: nothing that is computed
// again, and no more than what was there. The counts scale the parts of `work`. covered: supervised positions
// that some slot predicts, for the teacher's.
struct plan_counts {
    double tokens, anchors, slots, covered;
};
double plan_work_useful(const struct plan_work *work, const struct plan_counts *counts);

double plan_token_bytes(const struct plan_subject *subject); // of a token in shards
struct feature_layout plan_token_layout(const struct plan_subject *subject);
double plan_checkpoint_bytes(const struct plan *plan);

#endif
