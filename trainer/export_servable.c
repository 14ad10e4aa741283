// Owns what servers do not run of a drafter, by layout and with the reasons.
#include "trainer/export_internal.h"

#include <string.h>

#include "base/log.h"

bool export_any_sliding(const struct drafter_sizes *sizes)
{
    bool any = false;
    for (int64_t i = 0; i < sizes->layers; i++)
        any |= sizes->sliding[i];
    return any;
}

static bool is_mixed(const struct drafter_sizes *sizes)
{
    bool full = false;
    for (int64_t i = 0; i < sizes->layers; i++)
        full |= !sizes->sliding[i];
    return full && export_any_sliding(sizes);
}

// One thing that may be wrong; `name` is how --allow-unservable waives it.
struct reason {
    const char *name, *why;
    bool waivable;
    bool (*holds)(const struct drafter_sizes *sizes, enum export_format format);
};

static bool is_dflash(const struct drafter_sizes *sizes)
{
    return sizes->kind == DRAFTER_DFLASH;
}

static bool as_dspark(const struct drafter_sizes *sizes, enum export_format format)
{
    return export_is_dspark(sizes) && format == EXPORT_SPECULATORS;
}

static bool from_anchor(const struct drafter_sizes *sizes, enum export_format format)
{
    return is_dflash(sizes) && sizes->predict_from_anchor && !as_dspark(sizes, format);
}

static bool not_causal(const struct drafter_sizes *sizes, enum export_format format)
{
    (void)format;
    return is_dflash(sizes) && export_any_sliding(sizes) && !sizes->sliding_causal;
}

static bool other_origin(const struct drafter_sizes *sizes, enum export_format format)
{
    (void)format;
    return is_dflash(sizes) && export_any_sliding(sizes) &&
           sizes->window_origin != WINDOW_FROM_QUERY;
}

static bool mixed_layers(const struct drafter_sizes *sizes, enum export_format format)
{
    return is_dflash(sizes) && format == EXPORT_SPECULATORS && is_mixed(sizes);
}

static bool mask_outside(const struct drafter_sizes *sizes, enum export_format format)
{
    (void)format;
    return is_dflash(sizes) && sizes->mask_token_id >= sizes->vocab;
}

// EAGLE-3 in SpecForge's layout is SGLang's.
static bool of_sglang(const struct drafter_sizes *sizes, enum export_format format)
{
    return !is_dflash(sizes) && format == EXPORT_SPECFORGE;
}

static bool wrong_format(const struct drafter_sizes *sizes, enum export_format format)
{
    return !is_dflash(sizes) && format == EXPORT_ZLAB;
}

static bool head_norms(const struct drafter_sizes *sizes, enum export_format format)
{
    return of_sglang(sizes, format) && sizes->head_norms;
}

static bool normed_residual(const struct drafter_sizes *sizes, enum export_format format)
{
    return of_sglang(sizes, format) && sizes->norm_before_residual;
}

static bool normed_features(const struct drafter_sizes *sizes, enum export_format format)
{
    return of_sglang(sizes, format) && sizes->norm_before_fc;
}

// Transformers 5 looks at it before head_dim; its Qwen3 configuration does not.
static bool uneven_heads(const struct drafter_sizes *sizes, enum export_format format)
{
    return !is_dflash(sizes) && format != EXPORT_ZLAB && !sizes->head_norms &&
           sizes->hidden % sizes->heads != 0;
}

static bool windows(const struct drafter_sizes *sizes, enum export_format format)
{
    return of_sglang(sizes, format) && export_any_sliding(sizes);
}

static bool no_markov(const struct drafter_sizes *sizes, enum export_format format)
{
    return sizes->markov_rank > 0 && !as_dspark(sizes, format);
}

static bool dspark_windows(const struct drafter_sizes *sizes, enum export_format format)
{
    return as_dspark(sizes, format) && export_any_sliding(sizes);
}

static const struct reason reasons[] = {
    {"markov_rank",
     "this layout has no place for a Markov head, and a server would draft without it; of DFlash "
     "drafters --format speculators has",
     false, no_markov},
    {"layer_types",
     "with a Markov head only drafters whose layers are all full are written; what servers make of "
     "windows in DSpark's layout is not known",
     false, dspark_windows},
    {"predict_from_anchor",
     "no server of DFlash drafters without a Markov head reads slot 0; they take drafts from slot "
     "1 on",
     false, from_anchor},
    {"sliding_window_non_causal",
     "servers run sliding layers causally inside the block and ignore this", true, not_causal},
    {"window_origin", "servers measure the window from the query, not from the anchor", true,
     other_origin},
    {"layer_types",
     "vLLM makes one causal flag for all layers of this layout, so sliding and full layers can not "
     "be "
     "mixed in it; --format zlab can",
     true, mixed_layers},
    {"mask_token_id",
     "outside the vocabulary, and servers keep embedding rows for the vocabulary alone", false,
     mask_outside},
    {"kind",
     "the z-lab layout is one of DFlash drafters; EAGLE-3 has --format specforge, which SGLang "
     "reads, "
     "and speculators, which vLLM reads",
     false, wrong_format},
    {"style",
     "SGLang has no norms on queries and keys for EAGLE-3 (style llama has none); --format "
     "speculators has",
     true, head_norms},
    {"norm_before_residual",
     "SGLang adds the layer to the feature as it is, not to the normed one; --format speculators "
     "states it",
     true, normed_residual},
    {"norm_before_fc",
     "SGLang has no norm over all features before fc (0.5.23 has; versions before leave it out "
     "without a word); --format speculators states it",
     true, normed_features},
    {"layer_types",
     "SGLang does not read windows from a drafter; it has one for all layers, "
     "--speculative-draft-window-size; --format speculators states them",
     true, windows},
    {"num_attention_heads",
     "hidden_size is not a multiple of it, and Transformers 5, through which servers and "
     "speculators read it, refuses such a configuration of a Llama (style llama), whatever "
     "head_dim is",
     true, uneven_heads},
};
enum { REASONS = sizeof(reasons) / sizeof(*reasons) };

// Whether `name` is a word of the comma-separated list; "" stands for every name.
static bool is_listed(const char *list, const char *name)
{
    size_t n = strlen(name);
    if (list == NULL)
        return false;
    if (*list == '\0')
        return true;
    for (const char *at = list; at != NULL; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (strncmp(at, name, n) == 0 && (at[n] == ',' || at[n] == '\0'))
            return true;
    return false;
}

int export_check_allowed(const char *allow, struct error *err)
{
    for (const char *at = allow; at != NULL && *at != '\0';) {
        size_t n = strcspn(at, ",");
        bool known = false;
        for (int i = 0; i < REASONS; i++)
            known |= reasons[i].waivable && strlen(reasons[i].name) == n &&
                     strncmp(reasons[i].name, at, n) == 0;
        if (!known)
            return error_set(err,
                             "--allow-unservable: %.*s can not be allowed; there are "
                             "sliding_window_non_causal, window_origin and layer_types, and of "
                             "eagle3 style, norm_before_residual, norm_before_fc and "
                             "num_attention_heads",
                             (int)n, at);
        at += n + (at[n] == ',');
    }
    return 0;
}

int export_check_servable(const struct drafter_sizes *sizes, enum export_format format,
                          const char *allow, struct error *err)
{
    struct error why = {""};
    int refused = 0, waivable = 0;
    for (int i = 0; i < REASONS; i++) {
        const struct reason *reason = &reasons[i];
        if (!reason->holds(sizes, format))
            continue;
        if (reason->waivable && is_listed(allow, reason->name)) {
            log_warn("servers do not run this drafter as it was trained: drafter.%s: %s",
                     reason->name, reason->why);
            continue;
        }
        refused++;
        waivable += reason->waivable;
        error_add(&why, "drafter.%s: %s", reason->name, reason->why);
    }
    if (refused == 0)
        return 0;
    if (wrong_format(sizes, format)) // the layout is not this drafter's, so no server was asked
        return error_set(err, "not exported: %s", why.text);
    return error_set(err, "not exported: servers do not run this drafter as it was trained%s\n%s",
                     waivable == refused ? " (--allow-unservable exports it all the same)" : "",
                     why.text);
}
