// Owns the log streams and the terminal's status line. Thread-safe.
#include "base/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

// The one piece of global state of the program: where messages go.
static struct {
    pthread_mutex_t lock;
    enum log_level level;
    int rank;
    FILE *file;
    char status[512];
} log_state = {.lock = PTHREAD_MUTEX_INITIALIZER, .level = LOG_INFO};

static const char *const level_names[] = {"error", "warn", "info", "debug"};

void log_configure(enum log_level level, int rank)
{
    log_state.level = level;
    log_state.rank = rank;
}

int log_rank(void)
{
    return log_state.rank;
}

int log_file_set(const char *path)
{
    FILE *file = NULL;
    if (path != NULL && (file = fopen(path, "ae")) == NULL)
        return -1;
    pthread_mutex_lock(&log_state.lock);
    if (log_state.file != NULL)
        fclose(log_state.file);
    log_state.file = file;
    pthread_mutex_unlock(&log_state.lock);
    return 0;
}

// The status line, cut to the terminal's width: only a line that does not wrap can be taken back.
static void draw_status(void)
{
    struct winsize size;
    bool known = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1;
    fprintf(stderr, "%.*s", known ? size.ws_col - 1 : (int)sizeof(log_state.status),
            log_state.status);
}

void log_status_line(const char *text)
{
    pthread_mutex_lock(&log_state.lock);
    if (log_state.status[0] != '\0' || text != NULL)
        fputs("\r\033[K", stderr);
    snprintf(log_state.status, sizeof(log_state.status), "%s", text != NULL ? text : "");
    draw_status();
    fflush(stderr);
    pthread_mutex_unlock(&log_state.lock);
}

static void write_message(enum log_level level, const char *format, va_list args)
{
    char stamp[32], message[4352];
    time_t now = time(NULL);
    struct tm local;
    localtime_r(&now, &local);
    strftime(stamp, sizeof(stamp), "%Y-%m-%d %H:%M:%S", &local);
    vsnprintf(message, sizeof(message), format, args);

    pthread_mutex_lock(&log_state.lock);
    // Another rank's message may come upon the line that rank 0 keeps on their terminal.
    if (log_state.status[0] != '\0' || (log_state.rank != 0 && isatty(STDERR_FILENO)))
        fputs("\r\033[K", stderr);
    fprintf(stderr, "%s %s %d %s\n", stamp, level_names[level], log_state.rank, message);
    draw_status();
    fflush(stderr);
    if (log_state.file != NULL) {
        fprintf(log_state.file, "%s %s %d %s\n", stamp, level_names[level], log_state.rank,
                message);
        fflush(log_state.file);
    }
    pthread_mutex_unlock(&log_state.lock);
}

#define LOG_FUNCTION(name, level_value)                                                            \
    void name(const char *format, ...)                                                             \
    {                                                                                              \
        if ((level_value) > log_state.level || ((level_value) >= LOG_INFO && log_state.rank != 0)) \
            return;                                                                                \
        va_list args;                                                                              \
        va_start(args, format);                                                                    \
        write_message(level_value, format, args);                                                  \
        va_end(args);                                                                              \
    }

LOG_FUNCTION(log_error, LOG_ERROR)
LOG_FUNCTION(log_warn, LOG_WARN)
LOG_FUNCTION(log_info, LOG_INFO)
LOG_FUNCTION(log_debug, LOG_DEBUG)

static void last_words(const char *kind, const char *file, int line, const char *format,
                       va_list args)
{
    char message[4096];
    vsnprintf(message, sizeof(message), format, args);
    log_error("%s (%s:%d): %s", kind, file, line, message);
}

void log_die(const char *file, int line, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    last_words("cannot go on", file, line, format, args);
    va_end(args);
    exit(1);
}

void log_bug(const char *file, int line, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    last_words("bug in dtrain, please report", file, line, format, args);
    va_end(args);
    abort();
}
