/*
 * Signals by which a user ends a process: SIGINT, SIGTERM and, when the terminal goes, SIGHUP. Who ignores SIGHUP
 * (nohup) goes on, whatever a command does on the others.
 */
#ifndef MEGATRAIN_BASE_ENDING_H
#define MEGATRAIN_BASE_ENDING_H

#include <signal.h>

enum { ENDING_COUNT = 3 };
extern const int ending_signals[ENDING_COUNT];

void ending_catch(const struct sigaction *action);

#endif
