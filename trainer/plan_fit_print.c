// Owns how values that fit are reported.
#include <inttypes.h>

#include "base/byte_size.h"
#include "trainer/json_text.h"
#include "trainer/plan_fit.h"
#include "trainer/plan_print.h"

static void print_doubled(const struct plan_fit *fit, FILE *out)
{
    char number[PLAN_NUMBER_TEXT], bytes[BYTE_SIZE_TEXT];
    fprintf(out, "    ");
    for (size_t i = 0; i < fit->doubled_count; i++)
        fprintf(out, "%s%s: %s%s", i > 0 ? ", " : "", plan_number(fit->doubled[i].value, number),
                fit->doubled[i].needed > 0 ? byte_size_text((double)fit->doubled[i].needed, bytes)
                                           : "not a possible value",
                fit->doubled[i].fits ? "" : " (too much)");
    fprintf(out, "\n");
}

static void print_host_growth(const struct plan_fit *fit, FILE *out)
{
    char number[PLAN_NUMBER_TEXT], bytes[BYTE_SIZE_TEXT];
    fprintf(out,
            "    any value that the host has memory for; the device's does not depend on it\n");
    fprintf(out, "    on the host");
    for (size_t i = 0; i < fit->doubled_count; i++)
        fprintf(out, "%s %s: %s", i > 0 ? "," : "", plan_number(fit->doubled[i].value, number),
                byte_size_text((double)fit->doubled[i].host, bytes));
    fprintf(out, "\n");
}

static void print_cut(const struct plan_cut *e, FILE *out)
{
    char group[PLAN_NUMBER_TEXT], chunk[PLAN_NUMBER_TEXT];
    fprintf(out, "    with group_rows %s, chunk_rows %s, recompute %s\n",
            plan_number(e->group_rows, group), plan_number(e->chunk_rows, chunk), e->recompute);
}

static void print_fit(const struct plan_fit *fit, size_t device_memory, FILE *out)
{
    char number[PLAN_NUMBER_TEXT], bytes[BYTE_SIZE_TEXT], host[BYTE_SIZE_TEXT];
    fprintf(out, "  %s, %s\n", fit->key,
            fit->open ? "cut as small as it takes" : "the step cut as it is now");
    if (fit->lists_types)
        fprintf(out, "    with as many drafter.layer_types, whose list has to change, too\n");
    if (fit->independent && !fit->host_grows) {
        fprintf(out, "    any value: memory does not depend on it\n");
        return;
    }
    if (fit->host_grows) {
        print_host_growth(fit, out);
        return;
    }
    if (fit->doubled_count > 1)
        print_doubled(fit, out);
    if (!fit->found) {
        fprintf(out, "    no value fits; %s, which takes least, needs %s: %s too much\n",
                plan_number(fit->next.value, number),
                byte_size_text((double)fit->next.needed, bytes),
                byte_size_text((double)fit->next.needed - (double)device_memory, host));
        return;
    }
    fprintf(out, "    %s fits: %s, and %s on the host\n", plan_number(fit->largest.value, number),
            byte_size_text((double)fit->largest.needed, bytes),
            byte_size_text((double)fit->largest.host, host));
    if (!fit->bounded)
        fprintf(out, "    and is the largest that the key can have\n");
    else if (fit->next.needed == 0)
        fprintf(out, "    %s is not a possible value\n", plan_number(fit->next.value, number));
    else
        fprintf(out, "    %s does not: %s too much\n", plan_number(fit->next.value, number),
                byte_size_text((double)(fit->next.needed - device_memory), bytes));
    if (fit->open)
        print_cut(&fit->cut, out);
}

static void print_together(const struct plan_fit_together *fit, size_t device_memory, FILE *out)
{
    char number[PLAN_NUMBER_TEXT], bytes[BYTE_SIZE_TEXT];
    fprintf(out, "  together, all by one factor, cut as small as it takes\n");
    if (!fit->found) {
        fprintf(out, "    no factor fits\n");
        return;
    }
    fprintf(out, "    times %.4g:", fit->factor);
    for (size_t i = 0; i < fit->count; i++)
        fprintf(out, " %s %s%s", fit->key[i], plan_number(fit->value[i], number),
                i + 1 < fit->count ? "," : "");
    fprintf(out, ": %s\n", byte_size_text((double)fit->needed, bytes));
    if (fit->bounded && fit->next_needed > device_memory)
        fprintf(out, "    times %.4g does not fit: %s too much\n", fit->factor + 1.0 / 16.0,
                byte_size_text((double)(fit->next_needed - device_memory), bytes));
}

// A search with the step as it is now says nothing new when smaller cuts were not needed.
static bool same_answer(const struct plan_fit *now, const struct plan_fit *open)
{
    return now->found == open->found && now->largest.value == open->largest.value;
}

void plan_fit_print(const struct plan_fit *fits, size_t count,
                    const struct plan_fit_together *together, size_t device_memory, FILE *out)
{
    char bytes[BYTE_SIZE_TEXT];
    fprintf(
        out,
        "\nlargest values that fit %s, every other key as it is (--vary KEYS asks for others)\n",
        byte_size_text((double)device_memory, bytes));
    for (size_t i = 0; i < count; i++)
        if (!fits[i].open || !same_answer(&fits[i - 1], &fits[i]))
            print_fit(&fits[i], device_memory, out);
    if (together != NULL)
        print_together(together, device_memory, out);
}

void plan_fit_json(const struct plan_fit *fits, size_t count,
                   const struct plan_fit_together *together, cJSON *root)
{
    cJSON *array = cJSON_AddArrayToObject(root, "fit");
    for (size_t i = 0; i < count; i++) {
        const struct plan_fit *fit = &fits[i];
        cJSON *object = cJSON_CreateObject();
        cJSON_AddStringToObject(object, "key", fit->key);
        cJSON_AddStringToObject(object, "cut", fit->open ? "as_small_as_it_takes" : "as_now");
        json_add_int(object, "now", fit->now);
        cJSON_AddBoolToObject(object, "independent", fit->independent && !fit->host_grows);
        cJSON_AddBoolToObject(object, "changes_layer_types", fit->lists_types);
        if (fit->found) {
            json_add_int(object, "largest", fit->largest.value);
            json_add_int(object, "largest_needed", (int64_t)fit->largest.needed);
            json_add_int(object, "largest_host", (int64_t)fit->largest.host);
            json_add_int(object, "group_rows", fit->cut.group_rows);
            json_add_int(object, "chunk_rows", fit->cut.chunk_rows);
            cJSON_AddStringToObject(object, "recompute", fit->cut.recompute);
        }
        if (fit->bounded) {
            json_add_int(object, "too_large", fit->next.value);
            json_add_int(object, "too_large_needed", (int64_t)fit->next.needed);
        }
        cJSON_AddItemToArray(array, object);
    }
    if (together == NULL)
        return;
    cJSON *object = cJSON_AddObjectToObject(root, "fit_together");
    cJSON_AddBoolToObject(object, "found", together->found);
    json_add_real(object, "factor", together->factor);
    for (size_t i = 0; i < together->count && together->found; i++)
        json_add_int(object, together->key[i], together->value[i]);
    json_add_int(object, "needed", (int64_t)together->needed);
}
