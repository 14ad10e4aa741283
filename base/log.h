// Messages to stderr and to the run's log file: "time level rank message". Also the two ways to give
// up: BUG() for a broken invariant of this program, die() for an environment that failed.
#ifndef BASE_LOG_H
#define BASE_LOG_H

#ifdef __cplusplus
extern "C" {
#endif

enum log_level { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG };

// Sets what is printed. info and debug come from rank 0 only, warnings and errors from every rank.
void log_configure(enum log_level level, int rank);
// That was set last; 0 before.
int log_rank(void);
// Copies every message to this file too (append). NULL closes it. Returns 0, or -1 with errno set.
int log_file_set(const char *path);
// Text that every message is printed above, for a live progress line on a terminal. NULL: none.
void log_status_line(const char *text);

void log_error(const char *format, ...) __attribute__((format(printf, 1, 2)));
void log_warn(const char *format, ...) __attribute__((format(printf, 1, 2)));
void log_info(const char *format, ...) __attribute__((format(printf, 1, 2)));
void log_debug(const char *format, ...) __attribute__((format(printf, 1, 2)));

void log_die(const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4), noreturn));
void log_bug(const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4), noreturn));

// The environment failed (memory, device, system call): message with file and line, exit status 1.
#define die(...) log_die(__FILE__, __LINE__, __VA_ARGS__)
// An invariant of this program is broken: message and abort().
#define BUG(...) log_bug(__FILE__, __LINE__, __VA_ARGS__)
#define BUG_UNLESS(condition)                                                                      \
    do {                                                                                           \
        if (!(condition))                                                                          \
            BUG("not true: %s", #condition);                                                       \
    } while (0)

#ifdef __cplusplus
}
#endif
#endif
