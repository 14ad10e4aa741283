// Owns the judgement of how long steps wait for data, and its words.
#include "trainer/wait_watch.h"

#include <stdio.h>

#include "base/log.h"
#include "trainer/run_folder.h"

enum { LEAST_STEPS = 20 };
static const double least_seconds = 10.0, most_share = 0.05, quiet_seconds = 600.0,
                    busy_share = 0.8; // of reader threads that can do no more

static void add(struct wait_watch *w, const struct step_report *r)
{
    w->steps++;
    w->seconds += r->seconds;
    w->elapsed += r->seconds;
    w->wait += r->wait_seconds;
    w->copy += r->copy_seconds;
    w->read += r->read_seconds;
    w->disk += r->disk_seconds;
    w->bytes += r->read_bytes;
    w->spool += r->spool_wait_seconds;
}

static void clear(struct wait_watch *w)
{
    w->steps = 0;
    w->seconds = w->wait = w->copy = w->read = w->disk = w->bytes = w->spool = 0.0;
}

static double waited(const struct wait_watch *w)
{
    return w->wait + w->copy;
}

// What came, and what would have to come for nothing to wait.
static void rates(const struct wait_watch *w, char *text, size_t size)
{
    double working = w->seconds - waited(w);
    double least = 1e-3 * w->seconds; // of a window that did nothing else
    snprintf(text, size, "%.3g GB/s come, %.3g GB/s are needed", 1e-9 * w->bytes / w->seconds,
             1e-9 * w->bytes / (working > least ? working : least));
}

static void explain_readers(const struct wait_watch *w, const struct step_report *r,
                            const char *come, char *text, size_t size)
{
    double capacity = (double)r->readers * w->seconds,
           disk = w->read > 0.0 ? w->disk / w->read : 0.0;
    long long readers = (long long)r->readers;
    if (w->read < busy_share * capacity)
        snprintf(text, size,
                 "rows that are read too late (%s, but the %lld reader threads are busy only "
                 "%.0f %% of the time). A larger data.prefetch_rows lets them read further ahead",
                 come, readers, 100.0 * w->read / capacity);
    else if (disk >= 0.5)
        snprintf(text, size,
                 "reading from disk (%s; the %lld reader threads spend %.0f %% of their time "
                 "there). More data.readers help where the disk serves several at once, else a "
                 "faster disk or float8 shards",
                 come, readers, 100.0 * disk);
    else
        snprintf(text, size,
                 "checking values and CRC of what was read (%s; the %lld reader threads spend "
                 "%.0f %% of their time there). More data.readers help, and data.check_crc: false "
                 "once dtrain data check has passed",
                 come, readers, 100.0 * (1.0 - disk));
}

static void explain(const struct wait_watch *w, const struct step_report *r, char *text,
                    size_t size)
{
    char come[80];
    rates(w, come, sizeof(come));
    if (w->copy > w->wait)
        snprintf(text, size, "copying rows to the %s (%s). float8 shards are 58 %% of the bytes",
                 r->device, come);
    else if (r->spool && w->spool >= 0.5 * w->wait)
        snprintf(text, size,
                 "the extractor that fills data.spool (%s). It needs a faster GPU, or more of "
                 "them: see docs/spooling.md",
                 come);
    else
        explain_readers(w, r, come, text, size);
}

static void warn(struct wait_watch *w, const struct step_report *r)
{
    char why[512];
    explain(w, r, why, sizeof(why));
    log_warn("the %s waited for data %.0f %% of the last %lld steps (%.0f s). What holds it up: %s",
             r->device, 100.0 * waited(w) / w->seconds, (long long)w->steps, w->seconds, why);
    w->told = w->elapsed;
    w->warned++;
    w->waits = true;
}

void wait_watch_step(struct wait_watch *w, const struct step_report *r)
{
    if (!w->begun) {
        w->begun = true;
        return;
    }
    add(w, r);
    if (w->steps < LEAST_STEPS || w->seconds < least_seconds)
        return;
    bool late = waited(w) > most_share * w->seconds;
    if (late && (w->warned == 0 || w->elapsed - w->told >= quiet_seconds)) {
        warn(w, r);
    } else if (!late && w->waits) {
        log_info("the %s waits for data no longer: %.1f %% of the last %lld steps", r->device,
                 100.0 * waited(w) / w->seconds, (long long)w->steps);
        w->waits = false;
    }
    clear(w);
}
