// The end of a process has a limit: a launcher waits for a process that is stopped, or stuck in a library's end, for as
// long as it takes.
#ifndef TRAINER_END_GUARD_H
#define TRAINER_END_GUARD_H

// Kills this process `seconds` from now unless it has ended by then, with a line on standard error that begins with
// `who`. For a process that has nothing left to do but to end; it can not be taken back. What kills it is a process of
// its own, since a stopped one does nothing, and ends with it.
void end_guard_begin(double seconds, const char *who);

#endif
