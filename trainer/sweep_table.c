// Owns the table as text, CSV and JSON. What is best is sweep_front.c's.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/byte_size.h"
#include "base/memory.h"
#include "trainer/files.h"
#include "trainer/json_text.h"
#include "trainer/sweep.h"

void sweep_table_read(struct sweep *sweep)
{
    for (size_t i = 0; i < sweep->point_count; i++)
        sweep_result_read(&sweep->points[i].result, sweep->points[i].folder,
                          sweep->points[i].block_size, &sweep->drafts);
    sweep_compare(sweep);
}

// ---- columns -------------------------------------------------------------------------------------

enum { MOST_COLUMNS = 24 + SWEEP_DRAFTS };

// A number of a point. What is measured comes after what is the same whenever the point is run.
struct column {
    char name[32];  // in CSV and JSON
    char title[24]; // in the text
    int digits;     // behind the point in the text; -1: bytes, -2: seconds as h:mm:ss
    bool measured, whole, shown;
    double (*value)(const struct sweep_point *point);
    int draft; // of walk_drafts
};

struct columns {
    struct column items[MOST_COLUMNS];
    size_t count;
};

#define VALUE(name, expression)                                                                    \
    static double name(const struct sweep_point *point)                                            \
    {                                                                                              \
        return expression;                                                                         \
    }
VALUE(value_step, (double)point->result.step)
VALUE(value_rows, point->result.rows)
VALUE(value_tokens, point->result.tokens)
VALUE(value_anchors, point->result.anchors)
VALUE(value_best, point->result.best_walk)
VALUE(value_best_step, (double)point->result.best_step)
VALUE(value_walk, point->result.walk)
VALUE(value_accept_len, point->result.accept_len)
VALUE(value_overlap, point->result.overlap)
VALUE(value_val_loss, point->result.val_loss)
VALUE(value_loss, point->result.loss)
VALUE(value_seconds, point->result.seconds)
VALUE(value_val_seconds, point->result.val_seconds)
VALUE(value_step_seconds, point->result.step_seconds)
VALUE(value_block_rows, point->result.block_rows_per_second)
VALUE(value_tokens_rate, point->result.tokens_per_second)
VALUE(value_memory, point->result.memory)
VALUE(value_planned, (double)point->needed)

static void add_column(struct columns *columns, struct column column)
{
    columns->items[columns->count++] = column;
}

static void add_drafts(struct columns *columns, const struct sweep *sweep)
{
    for (size_t i = 0; i < sweep->drafts.count; i++) {
        struct column column = {.digits = 3, .shown = true, .draft = (int)i};
        snprintf(column.name, sizeof(column.name), "accept_len_walk_%lld",
                 (long long)sweep->drafts.items[i]);
        snprintf(column.title, sizeof(column.title), "%lld draft%s",
                 (long long)sweep->drafts.items[i], sweep->drafts.items[i] == 1 ? "" : "s");
        add_column(columns, column);
    }
}

static bool varies(const struct sweep *sweep, const char *key)
{
    for (size_t a = 0; a < sweep->grid.axis_count; a++)
        if (strcmp(sweep->grid.axes[a].key, key) == 0)
            return sweep->grid.axes[a].count > 1;
    return false;
}

// Rows of a block are other work in another kind of drafter: the rate of them compares points of one kind.
static void make_columns(struct columns *columns, const struct sweep *sweep)
{
    bool val = sweep->validates, alike = !varies(sweep, "drafter.kind");
    *columns = (struct columns){.count = 0};
    add_column(columns, (struct column){"steps", "steps", 0, false, true, true, value_step, 0});
    add_column(columns, (struct column){"rows", "", 0, false, true, false, value_rows, 0});
    add_column(columns, (struct column){"tokens", "", 0, false, true, false, value_tokens, 0});
    add_column(columns,
               (struct column){"anchors", "anchors", 0, false, true, true, value_anchors, 0});
    if (val) {
        add_column(columns, (struct column){"best_accept_len_walk", "best walk", 3, false, false,
                                            true, value_best, 0});
        add_column(columns, (struct column){"best_step", "at step", 0, false, true, true,
                                            value_best_step, 0});
        add_column(columns, (struct column){"accept_len_walk", "last walk", 3, false, false, true,
                                            value_walk, 0});
        add_drafts(columns, sweep);
        add_column(columns,
                   (struct column){"accept_len", "", 3, false, false, false, value_accept_len, 0});
        add_column(columns,
                   (struct column){"overlap", "overlap", 3, false, false, true, value_overlap, 0});
        add_column(columns, (struct column){"val_loss", "val loss", 3, false, false, true,
                                            value_val_loss, 0});
    }
    add_column(columns, (struct column){"loss", "loss", 3, false, false, true, value_loss, 0});
    add_column(columns,
               (struct column){"seconds", "time", -2, true, false, true, value_seconds, 0});
    add_column(columns,
               (struct column){"step_seconds", "", 4, true, false, false, value_step_seconds, 0});
    add_column(columns,
               (struct column){"val_seconds", "", 1, true, false, false, value_val_seconds, 0});
    add_column(columns, (struct column){"block_rows_per_second", "block rows/s", 0, true, false,
                                        alike, value_block_rows, 0});
    add_column(columns, (struct column){"tokens_per_second", "tokens/s", 0, true, false, true,
                                        value_tokens_rate, 0});
    add_column(columns,
               (struct column){"memory_bytes", "memory", -1, true, true, true, value_memory, 0});
    add_column(columns,
               (struct column){"planned_bytes", "", -1, true, true, false, value_planned, 0});
}

static double value_of(const struct column *column, const struct sweep_point *point)
{
    return column->value != NULL ? column->value(point) : point->result.walk_drafts[column->draft];
}

// ---- text ----------------------------------------------------------------------------------------

enum { CELL = 176 };

static void cell_text(char text[CELL], const struct column *column, const struct sweep_point *point)
{
    double value = value_of(column, point);
    char bytes[BYTE_SIZE_TEXT];
    long long s = isfinite(value) ? (long long)(value + 0.5) : 0;
    if (!isfinite(value) || point->result.step == 0)
        snprintf(text, CELL, "-");
    else if (column->value == value_step && point->state != SWEEP_DONE && point->steps > 0)
        snprintf(text, CELL, "%.0f/%lld", value, (long long)point->steps);
    else if (column->digits == -1)
        snprintf(text, CELL, "%s", byte_size_text(value, bytes));
    else if (column->digits == -2 && value < 99.5)
        snprintf(text, CELL, "%.1f s", value);
    else if (column->digits == -2)
        snprintf(text, CELL, "%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
    else
        snprintf(text, CELL, "%.*f", column->digits, value);
}

// One line of cells, of which the first `axes` and the state come before the columns.
struct grid_text {
    char (*cells)[CELL]; // [rows, width]
    size_t *widths;      // [width]
    bool *hidden;        // [width] columns that are left out
    size_t rows, width;
};

static char *cell_at(const struct grid_text *text, size_t row, size_t column)
{
    return text->cells[row * text->width + column];
}

static void fill_head(const struct grid_text *text, const struct sweep *sweep,
                      const struct columns *columns)
{
    size_t at = 0;
    for (size_t a = 0; a < sweep->grid.axis_count; a++)
        snprintf(cell_at(text, 0, at++), CELL, "%s", config_short_name(sweep->grid.axes[a].key));
    snprintf(cell_at(text, 0, at++), CELL, "state");
    for (size_t c = 0; c < columns->count; c++)
        if (columns->items[c].shown)
            snprintf(cell_at(text, 0, at++), CELL, "%s", columns->items[c].title);
    snprintf(cell_at(text, 0, at++), CELL, "front");
}

static void fill_point(const struct grid_text *text, const struct sweep *sweep,
                       const struct columns *columns, size_t i)
{
    const struct sweep_point *point = &sweep->points[i];
    size_t at = 0;
    for (size_t a = 0; a < sweep->grid.axis_count; a++)
        snprintf(cell_at(text, i + 1, at++), CELL, "%s", sweep_grid_value(&sweep->grid, i, a));
    snprintf(cell_at(text, i + 1, at++), CELL, "%s%s", sweep_state_name(point->state),
             point == sweep_best(sweep) ? ", best" : "");
    for (size_t c = 0; c < columns->count; c++)
        if (columns->items[c].shown)
            cell_text(cell_at(text, i + 1, at++), &columns->items[c], point);
    bool time = point->front_time, memory = point->front_memory;
    snprintf(cell_at(text, i + 1, at++), CELL, "%s%s%s", time ? "time" : "",
             time && memory ? ", " : "", memory ? "memory" : "");
}

static void measure(const struct grid_text *text)
{
    for (size_t c = 0; c < text->width; c++) {
        text->widths[c] = 0;
        for (size_t r = 0; r < text->rows; r++) {
            size_t n = strlen(cell_at(text, r, c));
            text->widths[c] = n > text->widths[c] ? n : text->widths[c];
        }
    }
}

static size_t line_width(const struct grid_text *text)
{
    size_t sum = 0;
    for (size_t c = 0; c < text->width; c++)
        sum += text->hidden[c] ? 0 : text->widths[c] + (c > 0 ? 2 : 0);
    return sum;
}

// What a narrow terminal does without, until the rest fits.
static void hide_columns(const struct grid_text *text, const struct columns *columns, size_t first,
                         size_t most)
{
    // NULL: those of numbers of drafts.
    static const char *const order[] = {"at step",  "tokens/s",  "block rows/s", "anchors",
                                        "val loss", "last walk", "overlap",      NULL,
                                        "steps",    "loss",      "time"};
    for (size_t o = 0; o < sizeof(order) / sizeof(*order); o++) {
        size_t at = first;
        for (size_t c = 0; c < columns->count; c++) {
            const struct column *column = &columns->items[c];
            if (!column->shown)
                continue;
            bool draft = column->value == NULL;
            bool next = order[o] == NULL ? draft : strcmp(column->title, order[o]) == 0;
            if (next && line_width(text) > most)
                text->hidden[at] = true;
            at++;
        }
    }
}

static void print_cells(const struct grid_text *text, FILE *out)
{
    for (size_t r = 0; r < text->rows; r++) {
        const char *last = cell_at(text, r, text->width - 1);
        for (size_t c = 0; c + 1 < text->width; c++)
            if (!text->hidden[c])
                fprintf(out, "%s%*s", c > 0 ? "  " : "", (int)text->widths[c], cell_at(text, r, c));
        fprintf(out, "%s%s\n", last[0] != '\0' ? "  " : "", last);
    }
}

// Says which columns are not there, and where they are.
static void print_hidden(const struct grid_text *text, const struct sweep *sweep, FILE *out)
{
    char *path = memory_format("%s/table.txt", sweep->folder);
    const char *between = "left out on this narrow terminal: ";
    for (size_t c = 0; c < text->width; c++)
        if (text->hidden[c]) {
            fprintf(out, "%s%s", between, cell_at(text, 0, c));
            between = ", ";
        }
    if (between[0] == ',' && files_exists(path))
        fprintf(out, "; all columns: less -S '%s'", path);
    fprintf(out, "%s", between[0] == ',' ? "\n" : "");
    free(path);
}

static void print_reasons(const struct sweep *sweep, FILE *out)
{
    for (size_t i = 0; i < sweep->point_count; i++) {
        const struct sweep_point *point = &sweep->points[i];
        if (point->reason != NULL)
            fprintf(out, "%s: %s: %s\n", point->name, sweep_state_name(point->state),
                    point->reason);
    }
}

static void print_front(const struct sweep *sweep, bool memory, FILE *out)
{
    bool first = true;
    fprintf(out, "Pareto front, %s against %s:", sweep->validates ? "best walk" : "loss",
            memory ? "memory" : "time");
    for (size_t i = 0; i < sweep->point_count; i++)
        if (memory ? sweep->points[i].front_memory : sweep->points[i].front_time) {
            fprintf(out, "%s %s", first ? "" : ";", sweep->points[i].name);
            first = false;
        }
    fprintf(out, "%s\n", first ? " no point yet" : "");
}

static bool varies_drafts(const struct sweep *sweep)
{
    int first = 0;
    for (size_t i = 0; i < sweep->point_count; i++) {
        int drafts = sweep->points[i].result.most_drafts;
        if (first > 0 && drafts > 0 && drafts != first)
            return true;
        first = first > 0 ? first : drafts;
    }
    return false;
}

static void print_conclusion(const struct sweep *sweep, FILE *out)
{
    const struct sweep_point *best = sweep_best(sweep);
    if (best != NULL && sweep->validates)
        fprintf(out, "best: %s, accept_len_walk %.4f at step %lld\n", best->name,
                best->result.best_walk, (long long)best->result.best_step);
    else if (best != NULL)
        fprintf(out,
                "best: %s, training loss %.4f; there is no data.val, so nothing is known of "
                "acceptance\n",
                best->name, best->result.loss);
    print_front(sweep, false, out);
    print_front(sweep, true, out);
    if (sweep->validates && varies_drafts(sweep))
        fprintf(out, "Points have different numbers of drafts%s.\n",
                sweep->drafts.count > 0
                    ? ": the columns of drafts compare them at the same number"
                    : "; validation.draft_tokens adds columns at the same number");
}

void sweep_table_print(const struct sweep *sweep, size_t most, FILE *out)
{
    struct columns columns;
    make_columns(&columns, sweep);
    struct grid_text text = {.rows = sweep->point_count + 1, .width = sweep->grid.axis_count + 2};
    for (size_t c = 0; c < columns.count; c++)
        text.width += columns.items[c].shown;
    text.cells = memory_alloc(text.rows * text.width, sizeof(*text.cells));
    text.widths = memory_alloc(text.width, sizeof(*text.widths));
    text.hidden = memory_alloc(text.width, sizeof(*text.hidden));
    fill_head(&text, sweep, &columns);
    for (size_t i = 0; i < sweep->point_count; i++)
        fill_point(&text, sweep, &columns, i);
    measure(&text);
    if (most > 0)
        hide_columns(&text, &columns, sweep->grid.axis_count + 1, most);
    print_cells(&text, out);
    print_hidden(&text, sweep, out);
    print_reasons(sweep, out);
    print_conclusion(sweep, out);
    free(text.hidden);
    free(text.widths);
    free(text.cells);
}

// ---- files ---------------------------------------------------------------------------------------

static void put_text(void *context, FILE *out)
{
    sweep_table_print(context, 0, out);
}

static void put_quoted(const char *text, FILE *out)
{
    bool plain = strpbrk(text, ",\"\n") == NULL;
    if (plain) {
        fputs(text, out);
        return;
    }
    fputc('"', out);
    for (; *text != '\0'; text++)
        fprintf(out, *text == '"' ? "\"\"" : "%c", *text);
    fputc('"', out);
}

static void put_csv_point(const struct sweep *sweep, const struct columns *columns, size_t i,
                          FILE *out)
{
    const struct sweep_point *point = &sweep->points[i];
    put_quoted(point->name, out);
    for (size_t a = 0; a < sweep->grid.axis_count; a++) {
        fputc(',', out);
        put_quoted(sweep_grid_value(&sweep->grid, i, a), out);
    }
    fprintf(out, ",%s", sweep_state_name(point->state));
    for (size_t c = 0; c < columns->count; c++) {
        double value = value_of(&columns->items[c], point);
        fputc(',', out);
        if (isfinite(value))
            fprintf(out, columns->items[c].whole ? "%.0f" : "%.17g", value);
    }
    fprintf(out, ",%d,%d,%d,", point == sweep_best(sweep), point->front_time, point->front_memory);
    put_quoted(point->reason != NULL ? point->reason : "", out);
    fputc('\n', out);
}

static void put_csv(void *context, FILE *out)
{
    const struct sweep *sweep = context;
    struct columns columns;
    make_columns(&columns, sweep);
    fprintf(out, "point");
    for (size_t a = 0; a < sweep->grid.axis_count; a++)
        fprintf(out, ",%s", sweep->grid.axes[a].key);
    fprintf(out, ",state");
    for (size_t c = 0; c < columns.count; c++)
        fprintf(out, ",%s", columns.items[c].name);
    fprintf(out, ",best,front_time,front_memory,reason\n");
    for (size_t i = 0; i < sweep->point_count; i++)
        put_csv_point(sweep, &columns, i, out);
}

static cJSON *point_json(const struct sweep *sweep, const struct columns *columns, size_t i)
{
    const struct sweep_point *point = &sweep->points[i];
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, "point", point->name);
    cJSON *values = cJSON_AddObjectToObject(object, "values");
    for (size_t a = 0; a < sweep->grid.axis_count; a++)
        cJSON_AddStringToObject(values, sweep->grid.axes[a].key,
                                sweep_grid_value(&sweep->grid, i, a));
    cJSON_AddStringToObject(object, "state", sweep_state_name(point->state));
    if (point->reason != NULL)
        cJSON_AddStringToObject(object, "reason", point->reason);
    cJSON *result = cJSON_AddObjectToObject(object, "result");
    cJSON *measured = cJSON_AddObjectToObject(object, "measured");
    for (size_t c = 0; c < columns->count; c++) {
        const struct column *column = &columns->items[c];
        cJSON *to = column->measured ? measured : result;
        double value = value_of(column, point);
        if (column->whole && isfinite(value))
            json_add_int(to, column->name, (int64_t)value);
        else
            json_add_real(to, column->name, value);
    }
    cJSON_AddBoolToObject(object, "front_time", point->front_time);
    cJSON_AddBoolToObject(object, "front_memory", point->front_memory);
    return object;
}

static int write_json(const struct sweep *sweep, const char *path, struct error *err)
{
    struct columns columns;
    const struct sweep_point *best = sweep_best(sweep);
    cJSON *root = cJSON_CreateObject();
    make_columns(&columns, sweep);
    cJSON_AddStringToObject(root, "format", "dtrain-sweep-table");
    json_add_int(root, "version", 1);
    cJSON_AddStringToObject(root, "equal", sweep_equal_name(sweep->equal));
    cJSON_AddStringToObject(root, "ranked_by", sweep->validates ? "best_accept_len_walk" : "loss");
    cJSON_AddItemToObject(root, "best",
                          best != NULL ? cJSON_CreateString(best->name) : cJSON_CreateNull());
    cJSON *points = cJSON_AddArrayToObject(root, "points");
    for (size_t i = 0; i < sweep->point_count; i++)
        cJSON_AddItemToArray(points, point_json(sweep, &columns, i));
    int result = json_write_file(root, path, err);
    cJSON_Delete(root);
    return result;
}

int sweep_table_write(const struct sweep *sweep, struct error *err)
{
    char *text = memory_format("%s/table.txt", sweep->folder);
    char *csv = memory_format("%s/table.csv", sweep->folder);
    char *json = memory_format("%s/table.json", sweep->folder);
    int result = files_write(text, put_text, (void *)sweep, err);
    if (result == 0)
        result = files_write(csv, put_csv, (void *)sweep, err);
    if (result == 0)
        result = write_json(sweep, json, err);
    free(json);
    free(csv);
    free(text);
    return result;
}
