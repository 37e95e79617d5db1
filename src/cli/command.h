/*
 * Commands and their options. A command is one constant: name, help, options, function; cli.c lists them all.
 *
 *   megatrain NAME --text VALUE --text=VALUE --flag --list A B C ... REST
 *
 * Options point at where their values go: a file of commands keeps those in static variables, whose
 * initialisers are the defaults (a process runs one command). Help is made from the same table.
 */
#ifndef MEGATRAIN_CLI_COMMAND_H
#define MEGATRAIN_CLI_COMMAND_H

#include <stdint.h>
#include <stdio.h>

#include "base/err.h"

/* What follows on the command line; points into argv. */
typedef struct {
    const char *const *items;
    int count;
} Words;

typedef enum { OPTION_FLAG, OPTION_TEXT, OPTION_INT, OPTION_REAL, OPTION_LIST } OptionKind;

typedef struct {
    const char *name; /* without the dashes */
    OptionKind kind;
    void *out; /* bool, const char *, int64_t, double, Words */
    bool required;
    double low, high;  /* of numbers */
    const char *value; /* how help names it: "FILE" */
    const char *help;
} Option;

typedef struct {
    const char *name;    /* one word, or two: "tokenizer train" */
    const char *summary; /* a line, for the list of commands */
    const char *rest;    /* what may follow besides options, as in help; NULL: nothing */
    const char *text;    /* more help, ended lines; NULL: none */
    const Option *options;
    int option_count;
    Err (*run)(Words rest); /* NULL: not built yet */
} Command;

#define OPTIONS(table) .options = table, .option_count = (int)(sizeof(table) / sizeof *(table))

/*
 * Reads the words behind a command's name: options into their places, everything else into `rest` (which has
 * room for argc words). *help: --help was among them, and nothing else is looked at.
 * ERR_CONFIG: unknown option (with the nearest one), a value missing or out of range, one required left out.
 */
Err options_read(const Command *c, int argc, const char *const *argv, const char **rest, int *rest_count,
                 bool *help);
void command_help(const Command *c, FILE *out);

/* All commands, in the order of the help. */
const Command *const *commands(int *count);

extern const Command command_train, command_eval, command_generate, command_preprocess,
    command_tokenizer_train, command_tokenize, command_plan, command_simulate, command_inspect,
    command_convert, command_doctor, command_config;

/* Program, compiler, backends, libraries, a line each. */
void version_print(FILE *out);

#endif
