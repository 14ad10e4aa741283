// Owns the search for values that fit: doubling, then bisection, each step a whole plan. Over many
// values bytes are taken not to fall when the value grows; few are all tried. No value is named that was
// not planned.
#include "trainer/plan_fit.h"

#include <string.h>

#include "base/log.h"

enum { TOGETHER_PARTS = 16 }; // of a factor of 1
enum { FEW = 64 };            // values, not too many to try each
enum { FINER = 8 };           // so much smaller a granule when the first is too large

// A config with some values replaced. What it points to is the original's; it is never released.
struct trial {
    struct config config;
    const struct config *original;
    char *layer_types[DRAFTER_MAX_LAYERS];
};

static void trial_begin(struct trial *trial, const struct config *config)
{
    trial->config = *config;
    trial->original = config;
}

// A list of layer types grows with drafter.layers: its first types again, and its last one last. Which
// types there are costs no memory.
static void stretch_layer_types(struct trial *trial)
{
    const struct config_texts *types = &trial->original->drafter.layer_types;
    int64_t layers = trial->config.drafter.layers;
    if (types->count == 0 || layers == trial->original->drafter.layers ||
        layers > DRAFTER_MAX_LAYERS)
        return;
    for (int64_t l = 0; l < layers; l++) {
        size_t from = l == layers - 1 ? types->count - 1 : (size_t)l % types->count;
        trial->layer_types[l] = types->items[from];
    }
    trial->config.drafter.layer_types = (struct config_texts){trial->layer_types, (size_t)layers};
}

static void trial_set(struct trial *trial, const char *key, int64_t value)
{
    struct config_int_key found;
    struct error err = {""};
    if (config_find_int(&trial->config, key, &found, &err) != 0)
        BUG("%s", err.text);
    *found.value = value;
    stretch_layer_types(trial);
}

// What the config leaves open becomes what it is now.
static void trial_pin(struct trial *trial, const struct execution *now)
{
    struct memory_config *memory = &trial->config.memory;
    if (memory->group_rows == 0)
        memory->group_rows = now->group_rows;
    if (memory->chunk_rows == 0)
        memory->chunk_rows = now->chunk_rows;
    if (memory->recompute == RECOMPUTE_AUTO)
        memory->recompute = strcmp(now->recompute, "layer") == 0   ? RECOMPUTE_LAYER
                            : strcmp(now->recompute, "cheap") == 0 ? RECOMPUTE_CHEAP
                                                                   : RECOMPUTE_NONE;
}

static struct fit_try trial_plan(const struct trial *trial, const struct plan_subject *subject,
                                 struct plan_cut *cut)
{
    struct plan plan = {.fits = false};
    struct error err = {""};
    struct fit_try result = {.needed = 0};
    if (config_validate(&trial->config, &err) == 0 &&
        plan_make(&plan, subject, &trial->config, NULL, &err) == 0) {
        result.needed = plan.needed;
        result.host = plan_host_needed(&plan);
        result.fits = plan.fits;
        if (cut != NULL)
            *cut = plan_cut_of(&plan.execution);
    }
    plan_release(&plan);
    return result;
}

// ---- one key -------------------------------------------------------------------------------------

struct search {
    const struct plan_subject *subject;
    const struct config *config;
    const struct plan *now;
    struct config_int_key key;
    int64_t least, step; // the smallest value, and what all values are multiples of
    struct plan_fit *fit;
};

static struct fit_try try_value(const struct search *s, int64_t value, struct plan_cut *cut)
{
    struct trial trial;
    trial_begin(&trial, s->config);
    if (!s->fit->open)
        trial_pin(&trial, &s->now->execution);
    trial_set(&trial, s->fit->key, value);
    struct fit_try result = trial_plan(&trial, s->subject, cut);
    result.value = value;
    return result;
}

// What a key left to be chosen or to the target is now.
static int64_t value_now(const struct plan *now, const struct config_int_key *key)
{
    const struct {
        const char *name;
        int64_t value;
    } chosen[] = {{"memory.group_rows", now->execution.group_rows},
                  {"memory.chunk_rows", now->execution.chunk_rows},
                  {"drafter.num_attention_heads", now->sizes.heads},
                  {"drafter.num_key_value_heads", now->sizes.kv_heads},
                  {"drafter.head_dim", now->sizes.head_dim},
                  {"drafter.intermediate_size", now->sizes.intermediate}};
    for (size_t i = 0; i < sizeof(chosen) / sizeof(*chosen); i++)
        if (strcmp(chosen[i].name, key->name) == 0)
            return chosen[i].value;
    return *key->value;
}

// What values are multiples of: looked for at first, and of necessity.
static void take_granule(struct search *s)
{
    int64_t block = s->now->sizes.block_size, kv = s->now->sizes.kv_heads;
    const struct {
        const char *name;
        int64_t granule, step, least;
    } granules[] = {{"data.seq_len", 1024, 1, 1},    {"memory.group_rows", block, block, block},
                    {"memory.chunk_rows", 64, 1, 2}, {"drafter.num_attention_heads", kv, kv, kv},
                    {"drafter.head_dim", 8, 2, 2},   {"drafter.intermediate_size", 64, 1, 1}};
    s->fit->granule = s->step = 1;
    s->least = s->key.minimum > 1 ? s->key.minimum : 1; // 0 stands for what is chosen
    for (size_t i = 0; i < sizeof(granules) / sizeof(*granules); i++)
        if (strcmp(granules[i].name, s->key.name) == 0) {
            s->step = granules[i].step;
            s->fit->granule = s->fit->now >= granules[i].granule ? granules[i].granule : s->step;
            s->least = s->least > granules[i].least ? s->least : granules[i].least;
        }
}

static int search_open(struct search *s, const char *name, struct error *err)
{
    // The key's place is looked up in each trial's own copy; here its range and value are read.
    if (config_find_int((struct config *)s->config, name, &s->key, err) != 0)
        return -1;
    struct plan_fit *fit = s->fit;
    memcpy(fit->key, s->key.name, sizeof(fit->key));
    fit->now = value_now(s->now, &s->key);
    if (fit->now == CONFIG_UNSET || fit->now < 1)
        return error_set(err, "%s: has no value to start from; give one, as --set %s=...", fit->key,
                         fit->key);
    take_granule(s);
    // No row has more block rows than this, so that more change nothing.
    int64_t most = execution_most_rows(s->config, &s->now->sizes);
    if (strcmp(fit->key, "memory.group_rows") == 0 && s->key.maximum > most)
        s->key.maximum = most;
    return 0;
}

static int64_t finer(int64_t granule, int64_t step)
{
    return granule / FINER > step ? granule / FINER : step;
}

// Between low, which fits, and high, which does not, at multiples of the granule; at those of a smaller
// one when even the first is too much.
static void bisect(struct search *s, int64_t low, int64_t high)
{
    struct plan_fit *fit = s->fit;
    for (;;) {
        int64_t a = low / fit->granule, b = (high + fit->granule - 1) / fit->granule;
        while (b - a > 1) {
            int64_t middle = a + (b - a) / 2;
            if (try_value(s, middle * fit->granule, NULL).fits)
                low = (a = middle) * fit->granule;
            else
                high = (b = middle) * fit->granule;
        }
        if (low >= fit->granule || fit->granule == s->step)
            break;
        fit->granule = finer(fit->granule, s->step);
    }
    fit->found = fit->bounded = true;
    fit->largest = try_value(s, low, &fit->cut);
    fit->next = try_value(s, high, NULL);
}

// From a value that does not fit down to the first that does.
static void step_down(struct search *s)
{
    struct plan_fit *fit = s->fit;
    struct fit_try before = fit->doubled[0], least = before;
    for (int64_t value = (fit->now - 1) / s->step * s->step; value >= s->least; value -= s->step) {
        struct fit_try try = try_value(s, value, &fit->cut);
        if (try.fits) {
            fit->found = true;
            fit->largest = try;
            fit->next = before;
            return;
        }
        before = try;
        if (try.needed > 0 && try.needed < least.needed)
            least = try;
    }
    fit->next = least;
}

// Few values are all tried: memory does not follow each of them evenly.
static void search_down(struct search *s)
{
    struct plan_fit *fit = s->fit;
    fit->bounded = true;
    if ((fit->now - s->least) / s->step <= FEW) {
        step_down(s);
        return;
    }
    fit->next = try_value(s, s->least, NULL);
    if (fit->next.fits)
        bisect(s, s->least, fit->now);
}

static void remember(struct plan_fit *fit, struct fit_try try)
{
    if (fit->doubled_count < FIT_TRIES)
        fit->doubled[fit->doubled_count++] = try;
}

// Doubles a value that fits until one does not, or the key's range ends.
static void search_up(struct search *s)
{
    struct plan_fit *fit = s->fit;
    int64_t most = s->key.maximum / s->step * s->step, low = fit->now;
    while (low < most) {
        int64_t high = low > most / 2 ? most : 2 * low;
        struct fit_try try = try_value(s, high, NULL);
        remember(fit, try);
        if (!try.fits) {
            bisect(s, low, high);
            return;
        }
        low = high;
    }
    const struct fit_try *first = &fit->doubled[0];
    fit->found = true;
    fit->largest = try_value(s, low, &fit->cut);
    fit->independent = fit->doubled_count > 1 && fit->largest.needed == first->needed;
    fit->host_grows = fit->independent && fit->largest.host != first->host;
}

int plan_fit_key(struct plan_fit *fit, const struct plan_subject *subject,
                 const struct config *config, const struct plan *now, const char *key, bool open,
                 struct error *err)
{
    struct search s = {.subject = subject, .config = config, .now = now, .fit = fit};
    BUG_UNLESS(subject->limit > 0);
    *fit = (struct plan_fit){.open = open};
    if (search_open(&s, key, err) != 0)
        return -1;
    fit->lists_types =
        strcmp(fit->key, "drafter.layers") == 0 && config->drafter.layer_types.count > 0;
    struct fit_try first = try_value(&s, fit->now, NULL);
    remember(fit, first);
    if (first.fits)
        search_up(&s);
    else
        search_down(&s);
    return 0;
}

// ---- several keys --------------------------------------------------------------------------------

struct together {
    const struct plan_subject *subject;
    const struct config *config;
    struct plan_fit_together *fit;
    int64_t now[FIT_KEYS], granule[FIT_KEYS], step[FIT_KEYS], minimum[FIT_KEYS], maximum[FIT_KEYS];
};

static int64_t scaled(const struct together *t, size_t i, int64_t parts)
{
    int64_t granule = t->granule[i];
    BUG_UNLESS(granule > 0);
    if (parts == TOGETHER_PARTS)
        return t->now[i];
    if ((double)t->now[i] * (double)parts >= (double)t->maximum[i] * TOGETHER_PARTS)
        return t->maximum[i];
    int64_t value = t->now[i] * parts / TOGETHER_PARTS;
    while (granule > value && granule > t->step[i])
        granule = finer(granule, t->step[i]);
    value = value / granule * granule;
    return value > t->minimum[i] ? value : t->minimum[i];
}

static struct fit_try try_factor(const struct together *t, int64_t parts)
{
    struct trial trial;
    trial_begin(&trial, t->config);
    for (size_t i = 0; i < t->fit->count; i++)
        trial_set(&trial, t->fit->key[i], scaled(t, i, parts));
    return trial_plan(&trial, t->subject, NULL);
}

static int64_t largest_multiple(const struct together *t, size_t i)
{
    BUG_UNLESS(t->granule[i] > 0);
    return t->maximum[i] / t->granule[i] * t->granule[i];
}

static bool all_at_maximum(const struct together *t, int64_t parts)
{
    for (size_t i = 0; i < t->fit->count; i++)
        if (scaled(t, i, parts) < largest_multiple(t, i))
            return false;
    return true;
}

static void search_factor(struct together *t)
{
    struct plan_fit_together *fit = t->fit;
    int64_t low = 0, high = TOGETHER_PARTS;
    while (high < INT32_MAX && !all_at_maximum(t, low) && try_factor(t, high).fits) {
        low = high;
        high *= 2;
    }
    fit->bounded = high < INT32_MAX && !all_at_maximum(t, low);
    while (fit->bounded && high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (try_factor(t, middle).fits)
            low = middle;
        else
            high = middle;
    }
    fit->found = low > 0;
    fit->factor = (double)low / TOGETHER_PARTS;
    fit->next_needed = try_factor(t, low + 1).needed;
    if (fit->found)
        fit->needed = try_factor(t, low).needed;
    for (size_t i = 0; i < fit->count && fit->found; i++)
        fit->value[i] = scaled(t, i, low);
}

int plan_fit_together(struct plan_fit_together *fit, const struct plan_subject *subject,
                      const struct config *config, const struct plan *now, const char *const *keys,
                      size_t count, struct error *err)
{
    struct together t = {.subject = subject, .config = config, .fit = fit};
    *fit = (struct plan_fit_together){.count = count};
    BUG_UNLESS(count <= FIT_KEYS && subject->limit > 0);
    for (size_t i = 0; i < count; i++) {
        struct plan_fit one = {.open = true};
        struct search s = {.subject = subject, .config = config, .now = now, .fit = &one};
        if (search_open(&s, keys[i], err) != 0)
            return -1;
        memcpy(fit->key[i], one.key, sizeof(one.key));
        t.now[i] = one.now;
        t.granule[i] = one.granule;
        t.step[i] = s.step;
        t.minimum[i] = s.least;
        t.maximum[i] = s.key.maximum;
    }
    search_factor(&t);
    return 0;
}
