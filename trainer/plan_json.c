// Owns the JSON of a plan: bytes and operations as whole numbers, the same parts as the text.
#include <string.h>

#include "trainer/json_text.h"
#include "trainer/plan_print.h"

static cJSON *add_object(cJSON *object, const char *name)
{
    return cJSON_AddObjectToObject(object, name);
}

static void add_bytes(cJSON *object, const char *name, double bytes)
{
    json_add_int(object, name, (int64_t)bytes);
}

static void add_model(cJSON *root, const struct plan_report *r)
{
    const struct drafter_sizes *s = &r->plan->sizes;
    cJSON *target = add_object(root, "target"), *drafter = add_object(root, "drafter");
    cJSON_AddStringToObject(target, "from", r->input->target_from);
    json_add_int(target, "hidden_size", s->hidden);
    json_add_int(target, "vocab_size", s->vocab);
    cJSON_AddBoolToObject(target, "tied", r->input->target.tied);
    json_add_int(drafter, "layers", s->layers);
    json_add_int(drafter, "num_attention_heads", s->heads);
    json_add_int(drafter, "num_key_value_heads", s->kv_heads);
    json_add_int(drafter, "head_dim", s->head_dim);
    json_add_int(drafter, "intermediate_size", s->intermediate);
    json_add_int(drafter, "block_size", s->block_size);
    if (s->kind == DRAFTER_EAGLE3) {
        json_add_int(drafter, "ttt_steps", s->ttt_steps);
        json_add_int(drafter, "draft_vocab", s->draft_vocab);
    }
    json_add_int(drafter, "parameters", r->plan->params.trainable);
}

static void add_execution(cJSON *root, const struct plan_report *r)
{
    const struct execution *e = &r->plan->execution;
    cJSON *object = add_object(root, "execution"), *why = add_object(root, "why");
    static const char *const names[] = {"group_rows", "chunk_rows", "recompute", "logits"};
    char text[PLAN_WHY_TEXT];
    cJSON_AddStringToObject(object, "device", e->device);
    cJSON_AddStringToObject(object, "compute", e->compute);
    json_add_int(object, "group_rows", e->group_rows);
    json_add_int(object, "chunk_rows", e->chunk_rows);
    cJSON_AddStringToObject(object, "recompute", e->recompute);
    cJSON_AddStringToObject(object, "logits", e->logits);
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
        cJSON_AddStringToObject(why, names[i], plan_why(r->plan, r->config, names[i], text));
}

static void add_ranks(cJSON *root, const struct plan_report *r)
{
    static const int64_t ranks[] = {1, 2, 4, 8};
    const struct plan *plan = r->plan;
    cJSON *array = cJSON_AddArrayToObject(root, "ranks");
    for (size_t n = 0; n < sizeof(ranks) / sizeof(*ranks); n++) {
        cJSON *object = cJSON_CreateObject(), *groups;
        json_add_int(object, "ranks", ranks[n]);
        groups = add_object(object, "groups");
        for (size_t i = 0; i < plan->device_count; i++)
            add_bytes(groups, plan->device[i].name, (double)plan_part_bytes(plan, i, ranks[n]));
        add_bytes(object, "total", (double)plan_device_bytes(plan, ranks[n]));
        cJSON_AddItemToArray(array, object);
    }
}

static void add_host(cJSON *root, const struct plan *plan)
{
    cJSON *host = add_object(root, "host"), *groups = add_object(host, "groups");
    for (size_t i = 0; i < plan->host_count; i++)
        add_bytes(groups, plan->host[i].name, (double)plan->host[i].bytes);
    add_bytes(host, "total", (double)plan_host_bytes(plan));
}

static void add_tensors(cJSON *root, const struct arena *arena)
{
    cJSON *array = cJSON_AddArrayToObject(root, "tensors");
    for (size_t i = 0; i < arena->count; i++) {
        const struct arena_entry *entry = &arena->entries[i];
        cJSON *object = cJSON_CreateObject(), *shape;
        cJSON_AddStringToObject(object, "group", entry->group);
        cJSON_AddStringToObject(object, "name", entry->name);
        cJSON_AddStringToObject(object, "dtype", dtype_name(entry->dtype));
        shape = cJSON_AddArrayToObject(object, "shape");
        for (int d = 0; d < 3; d++)
            cJSON_AddItemToArray(shape, json_int(entry->shape[d]));
        add_bytes(object, "bytes", (double)entry->bytes);
        add_bytes(object, "offset", (double)entry->offset);
        cJSON_AddBoolToObject(object, "shares_memory", entry->shared);
        cJSON_AddItemToArray(array, object);
    }
}

static void add_work(cJSON *root, const struct plan_report *r)
{
    const struct plan_work *w = r->work;
    cJSON *object = add_object(root, "step"), *flops;
    json_add_int(object, "rows", w->rows);
    json_add_real(object, "anchors_of_a_row", w->anchors);
    json_add_real(object, "block_rows_of_a_row", w->block_rows);
    json_add_real(object, "groups_of_a_row", w->groups);
    json_add_real(object, "visible_context", w->visible);
    flops = add_object(object, "flops");
    json_add_real(flops, "context", w->context);
    json_add_real(flops, "forward", w->forward);
    json_add_real(flops, "backward", w->backward);
    json_add_real(flops, "recompute", w->recompute);
    json_add_real(flops, "attention", w->attention);
    json_add_real(flops, "loss_student", w->student);
    json_add_real(flops, "loss_teacher", w->teacher);
    json_add_real(flops, "loss_gradient", w->gradient);
    json_add_real(flops, "muon", w->update);
    json_add_real(flops, "total", w->flops);
    json_add_real(object, "tflops", r->tflops);
    json_add_real(object, "least_seconds", w->seconds);
    json_add_real(object, "least_seconds_for_ranks", w->rank_seconds);
    add_bytes(object, "read_bytes", w->read_bytes);
}

// What is not known without shards is left out.
static void add_run(cJSON *root, const struct plan_report *r)
{
    cJSON *object = add_object(root, "run");
    json_add_int(object, "epochs", r->config->run.epochs);
    if (r->input->documents.rows > 0) {
        json_add_int(object, "epoch_rows", r->input->documents.rows);
        json_add_int(object, "epoch_steps", r->work->epoch_steps);
    }
    if (r->work->steps == 0)
        return;
    json_add_int(object, "steps", r->work->steps);
    if (strcmp(r->plan->execution.device, "cpu") != 0) // whose rate is not known
        json_add_real(object, "least_seconds", r->work->seconds * (double)r->work->steps);
}

static void add_disk(cJSON *root, const struct plan_report *r)
{
    cJSON *object = add_object(root, "disk");
    const struct plan_documents *documents = &r->input->documents;
    add_bytes(object, "token_bytes", plan_token_bytes(&r->input->subject));
    add_bytes(object, "checkpoint_bytes", plan_checkpoint_bytes(r->plan));
    if (documents->tokens == 0)
        return;
    json_add_int(object, "documents", documents->documents);
    json_add_int(object, "tokens", documents->tokens);
    add_bytes(object, "data_bytes", documents->file_bytes);
}

cJSON *plan_json(const struct plan_report *r)
{
    cJSON *root = cJSON_CreateObject();
    if (r->config->file != NULL)
        cJSON_AddStringToObject(root, "config", r->config->file);
    json_add_int(root, "device_bytes", (int64_t)plan_device_bytes(r->plan, 1));
    json_add_int(root, "needed", (int64_t)r->plan->needed);
    json_add_int(root, "for_ranks", r->input->subject.ranks);
    if (r->device_memory > 0) {
        json_add_int(root, "device_memory", (int64_t)r->device_memory);
        cJSON_AddStringToObject(root, "device_memory_from", r->memory_from);
        cJSON_AddBoolToObject(root, "fits", r->plan->fits);
    }
    if (r->input->missing_shards.text[0] != '\0')
        cJSON_AddStringToObject(root, "missing_shards", r->input->missing_shards.text);
    add_model(root, r);
    add_execution(root, r);
    add_ranks(root, r);
    add_host(root, r->plan);
    add_work(root, r);
    add_run(root, r);
    add_disk(root, r);
    add_tensors(root, &r->plan->arena);
    return root;
}
