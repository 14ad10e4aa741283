// Which rule updates a tensor, and with which rate and decay: a function of the config and the tensor.
#ifndef TRAINER_UPDATE_RULE_H
#define TRAINER_UPDATE_RULE_H

#include "configs/config.h"
#include "drafter/params.h"

// Muon takes hidden matrices, each tensor by itself. AdamW takes all else: norms, and tables that are indexed
// by tokens (an embedding, a head), whose rows do not act on one another.
bool update_is_muon(const struct optimizer_config *optimizer, const struct param *param);
// What the schedule's learning rate is multiplied by.
double update_lr_share(const struct optimizer_config *optimizer, const struct param *param);
// Of the moving average after update `applied`, from 1: less at first, so that the initial weights fade.
double update_average_decay(const struct optimizer_config *optimizer, int64_t applied);
double update_weight_decay(const struct optimizer_config *optimizer, const struct param *param);

#endif
