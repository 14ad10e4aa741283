// Owns the side file FILE.verdict.json: which documents of a shard data check called bad, and why.
#include "data/check.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "base/memory.h"

enum { VERDICT_VERSION = 1, VERDICT_BYTES_MAX = 256 << 20 };

static char *side_path(const struct shard *shard)
{
    return memory_format("%s.verdict.json", shard->path);
}

void verdict_init(struct verdict *verdict, const struct shard *shard)
{
    *verdict = (struct verdict){.documents = shard->documents};
    verdict->bad = memory_alloc((size_t)shard->documents, sizeof(*verdict->bad));
    verdict->words = memory_alloc((size_t)shard->documents, sizeof(*verdict->words));
}

void verdict_release(struct verdict *verdict)
{
    for (int64_t d = 0; d < verdict->documents && verdict->words != NULL; d++)
        free(verdict->words[d]);
    free(verdict->words);
    free(verdict->bad);
    *verdict = (struct verdict){.present = false};
}

void verdict_add(struct verdict *verdict, const struct shard *shard, int64_t document,
                 const char *lines)
{
    BUG_UNLESS(document >= 0 && document < verdict->documents);
    size_t prefix = strlen(shard->path);
    verdict->bad_count += !verdict->bad[document];
    verdict->bad[document] = 1;
    char *words = memory_alloc(strlen(lines) + 1, 1);
    char *end = words;
    while (*lines != '\0') {
        // The path is left out: a shard that moves keeps its verdict.
        if (strncmp(lines, shard->path, prefix) == 0 && strncmp(lines + prefix, ": ", 2) == 0)
            lines += prefix + 2;
        size_t length = strcspn(lines, "\n");
        length += lines[length] == '\n';
        memcpy(end, lines, length);
        end += length;
        lines += length;
    }
    *end = '\0';
    free(verdict->words[document]);
    verdict->words[document] = words;
}

void verdict_lines(const struct verdict *verdict, const struct shard *shard, int64_t document,
                   struct error *err)
{
    const char *lines = verdict->words[document];
    while (*lines != '\0') {
        size_t length = strcspn(lines, "\n");
        error_add(err, "%s: %.*s", shard->path, (int)length, lines);
        lines += length + (lines[length] == '\n');
    }
}

// The whole file as text, NULL when there is none or it can not be read (err).
static char *read_side_file(const char *path, bool *absent, struct error *err)
{
    FILE *file = fopen(path, "rbe");
    *absent = file == NULL && errno == ENOENT;
    if (file == NULL) {
        if (!*absent)
            error_set(err, "%s: can not be read: %s", path, strerror(errno));
        return NULL;
    }
    struct stat status;
    char *text = NULL;
    if (fstat(fileno(file), &status) != 0 || !S_ISREG(status.st_mode) ||
        status.st_size > VERDICT_BYTES_MAX) {
        error_set(err, "%s: not a verdict file of data check; remove it", path);
    } else {
        size_t size = (size_t)status.st_size;
        text = memory_alloc(size + 1, 1);
        text[fread(text, 1, size, file)] = '\0';
    }
    fclose(file);
    return text;
}

// Sizes and times go through text: a JSON number is exact only up to 2^53.
static bool text_equals_number(const cJSON *item, int64_t value)
{
    char text[24];
    snprintf(text, sizeof(text), "%lld", (long long)value);
    return cJSON_IsString(item) && strcmp(item->valuestring, text) == 0;
}

static bool read_bad_document(struct verdict *verdict, const struct shard *shard, const cJSON *item)
{
    const cJSON *document = cJSON_GetObjectItemCaseSensitive(item, "document");
    const cJSON *faults = cJSON_GetObjectItemCaseSensitive(item, "faults");
    if (!cJSON_IsNumber(document) || !cJSON_IsString(faults) || !(document->valuedouble >= 0.0) ||
        !(document->valuedouble < (double)shard->documents))
        return false;
    verdict_add(verdict, shard, (int64_t)document->valuedouble, faults->valuestring);
    return true;
}

static int parse(struct verdict *verdict, const struct shard *shard, const char *path,
                 const char *text, struct error *err)
{
    cJSON *root = cJSON_Parse(text);
    const cJSON *format = cJSON_GetObjectItemCaseSensitive(root, "format");
    const cJSON *version = cJSON_GetObjectItemCaseSensitive(root, "format_version");
    const cJSON *bad = cJSON_GetObjectItemCaseSensitive(root, "bad");
    bool valid = cJSON_IsString(format) && strcmp(format->valuestring, "dtrain-verdict") == 0 &&
                 cJSON_IsNumber(version) && version->valueint == VERDICT_VERSION &&
                 cJSON_IsArray(bad);
    bool fits = valid &&
                text_equals_number(cJSON_GetObjectItemCaseSensitive(root, "file_size"),
                                   (int64_t)shard->file_size) &&
                text_equals_number(cJSON_GetObjectItemCaseSensitive(root, "file_time_ns"),
                                   shard->file_time_ns);
    const cJSON *item = NULL;
    if (fits)
        cJSON_ArrayForEach(item, bad) valid = valid && read_bad_document(verdict, shard, item);
    cJSON_Delete(root);
    if (!valid)
        return error_set(err, "%s: damaged; remove it, or run data check again", path);
    if (!fits)
        log_warn("%s: made for another size or time of the shard, ignored; run data check again",
                 path);
    verdict->present = fits;
    return 0;
}

int verdict_read(struct verdict *verdict, const struct shard *shard, struct error *err)
{
    char *path = side_path(shard);
    bool absent = false;
    char *text = read_side_file(path, &absent, err);
    *verdict = (struct verdict){.present = false};
    int result = absent || text != NULL ? 0 : -1;
    if (text != NULL) {
        verdict_init(verdict, shard);
        result = parse(verdict, shard, path, text, err);
        if (result != 0 || !verdict->present)
            verdict_release(verdict);
    }
    free(text);
    free(path);
    return result;
}

static char *verdict_json(const struct verdict *verdict, const struct shard *shard)
{
    char number[24];
    cJSON *root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "format", "dtrain-verdict");
    cJSON_AddNumberToObject(root, "format_version", VERDICT_VERSION);
    snprintf(number, sizeof(number), "%lld", (long long)shard->file_size);
    cJSON_AddStringToObject(root, "file_size", number);
    snprintf(number, sizeof(number), "%lld", (long long)shard->file_time_ns);
    cJSON_AddStringToObject(root, "file_time_ns", number);
    cJSON_AddNumberToObject(root, "documents", (double)shard->documents);
    cJSON *bad = cJSON_AddArrayToObject(root, "bad");
    for (int64_t d = 0; d < verdict->documents; d++) {
        if (!verdict->bad[d])
            continue;
        cJSON *item = cJSON_CreateObject();
        cJSON_AddNumberToObject(item, "document", (double)d);
        cJSON_AddStringToObject(item, "faults", verdict->words[d]);
        cJSON_AddItemToArray(bad, item);
    }
    char *text = cJSON_Print(root);
    cJSON_Delete(root);
    if (text == NULL)
        die("out of host memory: the verdict of %s", shard->path);
    return text;
}

int verdict_write(const struct verdict *verdict, const struct shard *shard, struct error *err)
{
    char *path = side_path(shard);
    char *temporary = memory_format("%s.%ld.tmp", path, (long)getpid());
    char *text = verdict_json(verdict, shard);
    int result = 0;
    FILE *file = fopen(temporary, "wbe");
    bool written = file != NULL && fputs(text, file) >= 0 && fputc('\n', file) != EOF &&
                   fflush(file) == 0 && fsync(fileno(file)) == 0;
    if (file != NULL && fclose(file) != 0)
        written = false;
    if (!written || rename(temporary, path) != 0) {
        result = error_set(err, "%s: can not be written: %s", path, strerror(errno));
        unlink(temporary);
    }
    cJSON_free(text);
    free(temporary);
    free(path);
    return result;
}
