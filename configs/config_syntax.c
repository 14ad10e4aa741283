// Owns what is said of a text that is not YAML. libyaml names what its grammar misses there, which after a wrong
// indentation is seldom what is wrong.
#include "configs/config_syntax.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"

// Start of a line, which are counted from 0; NULL: there is none.
static const char *line_start(const char *text, size_t line)
{
    for (; line > 0 && text != NULL; line--) {
        text = strchr(text, '\n');
        text = text != NULL ? text + 1 : NULL;
    }
    return text;
}

static size_t indent_of(const char *line)
{
    return strspn(line, " ");
}

static bool holds_nothing(const char *line)
{
    return strchr("\r\n#", line[indent_of(line)]) != NULL; // also at the end of the text
}

// Whether what the scanner stopped at is a tab among the blanks that a line begins with.
static bool is_tab(const yaml_parser_t *p, const char *text)
{
    const yaml_mark_t *mark = &p->problem_mark;
    const char *line = line_start(text, mark->line);
    return line != NULL && strspn(line, " \t") > mark->column && line[mark->column] == '\t';
}

static bool problem_is(const yaml_parser_t *p, const char *words)
{
    return p->problem != NULL && strcmp(p->problem, words) == 0;
}

// "epochs:10" where a key of one line was begun and no colon with a blank behind it came. 0: it is not that.
static int colon_without_blank(const yaml_parser_t *p, const char *text, const char **word)
{
    if (!problem_is(p, "could not find expected ':'"))
        return 0;
    const char *line = line_start(text, p->context_mark.line);
    if (line == NULL)
        return 0;
    *word = line + indent_of(line);
    size_t name = 0;
    while (isalnum((unsigned char)(*word)[name]) || (*word)[name] == '_')
        name++;
    bool joined = name > 0 && (*word)[name] == ':' && isgraph((unsigned char)(*word)[name + 1]);
    return joined ? (int)strcspn(*word, " \t\r\n") : 0;
}

// ---- hints: NULL where it is not that; the caller frees ------------------------------------------

// Of the line where the problem is, beside another one.
static char *hint_of_indents(const char *line, const char *text, size_t other, const char *rule)
{
    return memory_format("this line is indented by %zu, line %zu by %zu; %s", indent_of(line),
                         other + 1, indent_of(line_start(text, other)), rule);
}

// The last line above that holds something; false: none does.
static bool find_above(const yaml_parser_t *p, const char *text, size_t *above)
{
    for (*above = p->problem_mark.line; *above > 0;)
        if (!holds_nothing(line_start(text, --*above)))
            return true;
    return false;
}

// A line that begins left of the section or the list above it, and right of what that is in.
static char *hint_of_block(const yaml_parser_t *p, const char *text, const char *line)
{
    size_t above, own = indent_of(line);
    if (p->problem_mark.column != own || own == p->context_mark.column ||
        !find_above(p, text, &above))
        return NULL;
    return hint_of_indents(line, text, above, "what belongs together begins in one column");
}

// A section left of the file's first one, which is indented.
static char *hint_of_file(const yaml_parser_t *p, const char *text, const char *line)
{
    size_t first = 0;
    while (first < p->problem_mark.line && holds_nothing(line_start(text, first)))
        first++;
    if (indent_of(line) >= indent_of(line_start(text, first)))
        return NULL;
    return hint_of_indents(line, text, first, "sections begin in one column, the first");
}

// A key in what libyaml takes for a value: of the line above, or of its own.
static char *hint_of_value(const yaml_parser_t *p, const char *text, const char *line)
{
    size_t above;
    const char *colon = strchr(line, ':');
    if (colon == line + p->problem_mark.column && find_above(p, text, &above) &&
        indent_of(line) > indent_of(line_start(text, above)))
        return hint_of_indents(line, text, above, "nothing can be below a key that has a value");
    return memory_strdup("a section's keys stand in lines of their own, and a value that holds a "
                         "colon with a space stands in quotes");
}

static char *hint_of_bracket(const yaml_parser_t *p, char bracket)
{
    return memory_format("the %c of line %zu is not closed, or a comma is missing%s", bracket,
                         p->context_mark.line + 1,
                         bracket == '[' ? "; in a list, a text with brackets stands in quotes"
                                        : "");
}

static char *hint_of(const yaml_parser_t *p, const char *text)
{
    const char *line = line_start(text, p->problem_mark.line);
    if (line == NULL ||
        strlen(line) < p->problem_mark.column) // libyaml knows other ends of lines, too
        return NULL;
    if (problem_is(p, "did not find expected key") ||
        problem_is(p, "did not find expected '-' indicator"))
        return hint_of_block(p, text, line);
    if (problem_is(p, "did not find expected <document start>"))
        return hint_of_file(p, text, line);
    if (problem_is(p, "mapping values are not allowed in this context"))
        return hint_of_value(p, text, line);
    if (problem_is(p, "did not find expected ',' or ']'"))
        return hint_of_bracket(p, '[');
    if (problem_is(p, "did not find expected ',' or '}'"))
        return hint_of_bracket(p, '{');
    if (problem_is(p, "could not find expected ':'"))
        return memory_format("line %zu needs a key, a colon and a space", p->context_mark.line + 1);
    if (problem_is(p, "found character that cannot start any token") &&
        isgraph((unsigned char)line[p->problem_mark.column]))
        return memory_format("a value that begins with %c stands in quotes",
                             line[p->problem_mark.column]);
    if (problem_is(p, "found unexpected end of stream"))
        return memory_format("the quotes that line %zu opens are not closed",
                             p->context_mark.line + 1);
    return NULL;
}

// --------------------------------------------------------------------------------------------------

int config_syntax_fault(const yaml_parser_t *p, const char *text, const struct config *config,
                        struct config_faults *faults)
{
    const char *word = NULL;
    bool scanner = p->error == YAML_SCANNER_ERROR;
    int line = (int)p->problem_mark.line + 1;
    int length = scanner ? colon_without_blank(p, text, &word) : 0;
    if (length > 0) {
        config_fault(faults, config, (int)p->context_mark.line + 1, NULL, NULL,
                     "not valid YAML: %.*s needs a space after the colon", length, word);
        return -1;
    }
    if (scanner && is_tab(p, text)) {
        config_fault(faults, config, line, NULL, NULL,
                     "not valid YAML: a tab at the start of a line; YAML indents by spaces");
        return -1;
    }
    if (p->error == YAML_READER_ERROR) { // has an offset in bytes instead of a mark
        line = 1;
        for (size_t i = 0; i < p->problem_offset; i++)
            line += text[i] == '\n';
    }
    char *hint = p->error != YAML_READER_ERROR ? hint_of(p, text) : NULL;
    config_fault(faults, config, line, NULL, NULL, "not valid YAML: %s%s%s%s%s%s",
                 hint != NULL ? hint : "", hint != NULL ? " (" : "",
                 p->problem != NULL ? p->problem : "unknown problem",
                 p->context != NULL ? ", " : "", p->context != NULL ? p->context : "",
                 hint != NULL ? ")" : "");
    free(hint);
    return -1;
}
