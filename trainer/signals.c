// Owns the process's signal handlers.
#include "trainer/signals.h"

#include <signal.h>
#include <stddef.h>
#include <unistd.h>

#include "base/log.h"

static volatile sig_atomic_t received; // a handler can reach nothing but a global

static void handle(int signal_number)
{
    if (received != 0)
        _exit(128 + signal_number);
    received = signal_number;
}

void signals_install(void)
{
    struct sigaction action = {.sa_handler = handle, .sa_flags = SA_RESTART};
    sigemptyset(&action.sa_mask);
    if (sigaction(SIGTERM, &action, NULL) != 0 || sigaction(SIGINT, &action, NULL) != 0 ||
        sigaction(SIGUSR1, &action, NULL) != 0)
        die("sigaction failed");
    signal(SIGPIPE, SIG_IGN);
}

int signals_received(void)
{
    return received;
}

bool signals_stop(void *unused)
{
    (void)unused;
    return received != 0;
}
