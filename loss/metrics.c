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
    sum->slots += 1.0;
    sum->overlap += (double)results->overlap[i];
    for (int t = 0; t < LOSS_TERM_COUNT && results->terms != NULL; t++)
        sum->terms[t] += weight * (double)results->terms[i * LOSS_TERM_COUNT + t];
    sum->scored[slot->slot] += 1.0;
    if (results->student_argmax[i] == results->teacher_argmax[i])
        sum->correct[slot->slot] += 1.0;
}

// First slot that is predicted: 0 only exists when blocks predict from the anchor, and there every
// block with a valid anchor has it.
static int32_t first_slot(const struct slot *slots, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        if (slots[i].slot == 0)
            return 0;
    }
    return 1;
}

void metrics_count_slots(struct metrics *sum, const struct slot *slots, int64_t count,
                         const struct slot_results *results, int64_t blocks, int32_t *accepted)
{
    if (accepted != NULL)
        memset(accepted, 0, (size_t)blocks * sizeof(*accepted));
    int32_t first = first_slot(slots, count);
    for (int64_t i = 0; i < count;) {
        int32_t block = slots[i].block, agreed = 0;
        BUG_UNLESS(block >= 0 && block < blocks);
        for (; i < count && slots[i].block == block; i++) {
            BUG_UNLESS(slots[i].slot >= 0 && slots[i].slot < METRICS_MAX_BLOCK);
            count_slot(sum, &slots[i], results, i);
            bool next = slots[i].slot == first + agreed;
            agreed += next && results->student_argmax[i] == results->teacher_argmax[i];
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

double metrics_eal_marginal(const struct metrics *sum)
{
    if (!(sum->slots > 0.0))
        return (double)NAN;
    double total = 0.0, product = 1.0;
    for (int k = sum->scored[0] > 0.0 ? 0 : 1; k < METRICS_MAX_BLOCK && sum->scored[k] > 0.0; k++) {
        product *= metrics_accuracy(sum, k);
        total += product;
    }
    return total;
}
