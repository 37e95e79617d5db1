/* The command line: everything behind main. Results go to stdout, everything else to stderr. */
#ifndef MEGATRAIN_CLI_CLI_H
#define MEGATRAIN_CLI_CLI_H

/* Runs the command that argv names; the process's exit status (README, "Exit codes"). */
int cli_main(int argc, char **argv);

#endif
