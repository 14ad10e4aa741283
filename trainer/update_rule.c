// Owns which rule updates which tensor.
#include "trainer/update_rule.h"

#include <math.h>
#include <string.h>

#include "drafter/drafter_sizes.h"

static bool is_table(const struct param *param)
{
    return strcmp(param->name, "embed_tokens.weight") == 0 ||
           strcmp(param->name, "lm_head.weight") == 0 || drafter_is_markov(param);
}

bool update_is_muon(const struct optimizer_config *optimizer, const struct param *param)
{
    return optimizer->kind == OPTIMIZER_MUON && param->dims == 2 && !param->norm &&
           param->shape[0] > 1 && param->shape[1] > 1 && !is_table(param);
}

double update_lr_share(const struct optimizer_config *optimizer, const struct param *param)
{
    bool own = update_is_muon(optimizer, param) && !isnan(optimizer->muon_lr);
    return own && optimizer->lr > 0.0 ? optimizer->muon_lr / optimizer->lr : 1.0;
}

double update_average_decay(const struct optimizer_config *optimizer, int64_t applied)
{
    double t = (double)applied;
    return fmin(optimizer->ema, (1.0 + t) / (10.0 + t));
}

double update_weight_decay(const struct optimizer_config *optimizer, const struct param *param)
{
    if (param->norm)
        return 0.0;
    if (update_is_muon(optimizer, param) && !isnan(optimizer->muon_weight_decay))
        return optimizer->muon_weight_decay;
    return optimizer->weight_decay;
}
