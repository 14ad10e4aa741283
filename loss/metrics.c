// Owns the sums over scored slots and blocks and the numbers made from them. Does not own the losses
// (kernels/) or the walk (walk.c).
#include "loss/metrics.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/log.h"
#include "configs/config.h"

void metrics_add(struct metrics *sum, const struct metrics *other)
{
    // All members are doubles, so that ranks can reduce the struct as one array too.
    _Static_assert(sizeof(*sum) % sizeof(double) == 0, "struct metrics holds doubles only");
    double *to = (double *)sum;
    const double *from = (const double *)other;
    for (size_t i = 0; i < sizeof(*sum) / sizeof(double); i++)
        to[i] += from[i];
}

static void count_slot(struct metrics *sum, const struct slot *slot,
                       const struct slot_results *results, int64_t i)
{
    double weight = (double)results->weight[i];
    sum->loss += weight * (double)results->loss[i];
    sum->weight += weight;
    sum->slots += results->weight[i] != 0.0f;
    sum->overlap += (double)results->overlap[i];
    for (int t = 0; t < LOSS_TERM_COUNT && results->terms != NULL; t++)
        sum->terms[t] += weight * (double)results->terms[i * LOSS_TERM_COUNT + t];
    sum->scored[slot->slot] += 1.0;
    if (results->student_argmax[i] == results->teacher_argmax[i])
        sum->correct[slot->slot] += 1.0;
}

void metrics_count_slots(struct metrics *sum, int32_t first, const struct slot *slots,
                         int64_t count, const struct slot_results *results, int64_t blocks,
                         int32_t *accepted)
{
    if (accepted != NULL)
        memset(accepted, 0, (size_t)blocks * sizeof(*accepted));
    for (int64_t i = 0; i < count;) {
        int32_t block = slots[i].block, agreed = 0;
        BUG_UNLESS(block >= 0 && block < blocks);
        for (; i < count && slots[i].block == block; i++) {
            int32_t k = slots[i].slot;
            BUG_UNLESS(k >= 0 && k < METRICS_MAX_BLOCK);
            count_slot(sum, &slots[i], results, i);
            bool reached = k == first + agreed;
            bool agrees = reached && results->student_argmax[i] == results->teacher_argmax[i];
            sum->reached[k] += reached;
            sum->agreed[k] += agrees;
            agreed += agrees;
        }
        sum->blocks += 1.0;
        sum->accepted += (double)agreed;
        if (accepted != NULL)
            accepted[block] = agreed;
    }
}

double metrics_loss(const struct metrics *sum, int normalize)
{
    double divisor = normalize == NORMALIZE_COUNT ? sum->slots : sum->weight;
    return divisor > 0.0 ? sum->loss / divisor : 0.0;
}

double metrics_accept_len(const struct metrics *sum)
{
    return sum->blocks > 0.0 ? 1.0 + sum->accepted / sum->blocks : (double)NAN;
}

double metrics_accuracy(const struct metrics *sum, int k)
{
    return sum->scored[k] > 0.0 ? sum->correct[k] / sum->scored[k] : (double)NAN;
}

double metrics_conditional(const struct metrics *sum, int k)
{
    return sum->reached[k] > 0.0 ? sum->agreed[k] / sum->reached[k] : (double)NAN;
}

double metrics_overlap(const struct metrics *sum)
{
    double scored = 0.0;
    for (int k = 0; k < METRICS_MAX_BLOCK; k++)
        scored += sum->scored[k];
    return scored > 0.0 ? sum->overlap / scored : (double)NAN;
}

double metrics_eal_marginal(const struct metrics *sum)
{
    if (!(sum->blocks > 0.0))
        return (double)NAN;
    double total = 0.0, product = 1.0;
    for (int k = sum->scored[0] > 0.0 ? 0 : 1; k < METRICS_MAX_BLOCK && sum->scored[k] > 0.0; k++) {
        product *= metrics_accuracy(sum, k);
        total += product;
    }
    return total;
}
