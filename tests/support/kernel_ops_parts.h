// The parts of attention, of the loss, of the draft vocabulary, of rows that are summed, of norms and of updates
// for the table in kernel_ops.c.
#ifndef TESTS_SUPPORT_KERNEL_OPS_PARTS_H
#define TESTS_SUPPORT_KERNEL_OPS_PARTS_H

#include "tests/kernel_cases.h"

void attention_build(const struct kernel_case *c, struct kernel_run *run);
void attention_expect(const struct kernel_case *c, struct kernel_run *run);
void attention_call(const struct kernel_case *c, struct kernel_run *run);
double attention_flops(const struct kernel_case *c);
void attention_backward_build(const struct kernel_case *c, struct kernel_run *run);
void attention_backward_expect(const struct kernel_case *c, struct kernel_run *run);
void attention_backward_call(const struct kernel_case *c, struct kernel_run *run);
double attention_backward_flops(const struct kernel_case *c);

void diagonal_build(const struct kernel_case *c, struct kernel_run *run);
void diagonal_expect(const struct kernel_case *c, struct kernel_run *run);
void diagonal_call(const struct kernel_case *c, struct kernel_run *run);
void diagonal_backward_build(const struct kernel_case *c, struct kernel_run *run);
void diagonal_backward_expect(const struct kernel_case *c, struct kernel_run *run);
void diagonal_backward_call(const struct kernel_case *c, struct kernel_run *run);

void loss_build(const struct kernel_case *c, struct kernel_run *run);
void loss_expect(const struct kernel_case *c, struct kernel_run *run);
void loss_call(const struct kernel_case *c, struct kernel_run *run);

void scan_build(const struct kernel_case *c, struct kernel_run *run);
void scan_expect(const struct kernel_case *c, struct kernel_run *run);
void scan_call(const struct kernel_case *c, struct kernel_run *run);
void overlap_build(const struct kernel_case *c, struct kernel_run *run);
void overlap_expect(const struct kernel_case *c, struct kernel_run *run);
void overlap_call(const struct kernel_case *c, struct kernel_run *run);
void mask_build(const struct kernel_case *c, struct kernel_run *run);
void mask_expect(const struct kernel_case *c, struct kernel_run *run);
void mask_call(const struct kernel_case *c, struct kernel_run *run);

void norm_chain_build(const struct kernel_case *c, struct kernel_run *run);
void norm_chain_expect(const struct kernel_case *c, struct kernel_run *run);
void norm_chain_call(const struct kernel_case *c, struct kernel_run *run);
void norm_chain_backward_build(const struct kernel_case *c, struct kernel_run *run);
void norm_chain_backward_expect(const struct kernel_case *c, struct kernel_run *run);
void norm_chain_backward_call(const struct kernel_case *c, struct kernel_run *run);
void norm_split_build(const struct kernel_case *c, struct kernel_run *run);
void norm_split_expect(const struct kernel_case *c, struct kernel_run *run);
void norm_split_call(const struct kernel_case *c, struct kernel_run *run);

void sum_rows_build(const struct kernel_case *c, struct kernel_run *run);
void sum_rows_expect(const struct kernel_case *c, struct kernel_run *run);
void sum_rows_call(const struct kernel_case *c, struct kernel_run *run);
void gather_sum_build(const struct kernel_case *c, struct kernel_run *run);
void gather_sum_expect(const struct kernel_case *c, struct kernel_run *run);
void gather_sum_call(const struct kernel_case *c, struct kernel_run *run);
void clear_rows_build(const struct kernel_case *c, struct kernel_run *run);
void clear_rows_expect(const struct kernel_case *c, struct kernel_run *run);
void clear_rows_call(const struct kernel_case *c, struct kernel_run *run);

void muon_momentum_build(const struct kernel_case *c, struct kernel_run *run);
void muon_momentum_expect(const struct kernel_case *c, struct kernel_run *run);
void muon_momentum_call(const struct kernel_case *c, struct kernel_run *run);
void muon_normalise_build(const struct kernel_case *c, struct kernel_run *run);
void muon_normalise_expect(const struct kernel_case *c, struct kernel_run *run);
void muon_normalise_call(const struct kernel_case *c, struct kernel_run *run);
void muon_update_build(const struct kernel_case *c, struct kernel_run *run);
void muon_update_expect(const struct kernel_case *c, struct kernel_run *run);
void muon_update_call(const struct kernel_case *c, struct kernel_run *run);
void average_build(const struct kernel_case *c, struct kernel_run *run);
void average_expect(const struct kernel_case *c, struct kernel_run *run);
void average_call(const struct kernel_case *c, struct kernel_run *run);
void exchange_build(const struct kernel_case *c, struct kernel_run *run);
void exchange_expect(const struct kernel_case *c, struct kernel_run *run);
void exchange_call(const struct kernel_case *c, struct kernel_run *run);

#endif
