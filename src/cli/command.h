/*
 * Commands and their options. A command is one constant: name, help, options, function; commands.c lists them all.
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

/* Words that follow on the command line; they point into argv. */
typedef struct {
    const char *const *items;
    int count;
} Words;

typedef enum { OPTION_FLAG, OPTION_TEXT, OPTION_INT, OPTION_REAL, OPTION_LIST } OptionKind;

enum { OPTION_JOIN_BYTES = 4096 };

typedef struct {
    const char *name; /* without the dashes */
    OptionKind kind;
    void *out; /* bool, const char *, int64_t, double, Words */
    bool required;
    double low, high;  /* the bounds of a number */
    const char *value; /* how help names it: "FILE" */
    const char *help;
    char *join; /* OPTION_JOIN_BYTES, where an option that is given again adds to the first, behind a comma; or NULL */
} Option;

typedef struct {
    const char *name;    /* has one word, or two: "tokenizer train" */
    const char *summary; /* a line, for the list of commands */
    const char *rest;    /* words that may follow besides options, as in help; NULL: none */
    const char *text;    /* more help: lines that begin with a blank stay, others flow; NULL: none */
    const char *verbs;   /* words, separated by blanks, of which one may come first; NULL: none */
    const Option *options;
    int option_count;
    Err (*run)(Words rest);
} Command;

#define OPTIONS(table) .options = table, .option_count = (int)(sizeof(table) / sizeof *(table))

/*
 * Reads the words behind a command's name: options into their places, everything else into `rest` (which has
 * room for argc words). *help: --help was among them, and nothing else is looked at.
 * ERR_CONFIG: unknown option (with the nearest one), a value missing or out of range, one required left out.
 */
Err options_read(const Command *c, int argc, const char *const *argv, const char **rest, int *rest_count, bool *help);
/* Print what --help says of a command, and what `megatrain --help` says: at most 24 lines of 80 columns
 * (test_help.sh). */
void command_help(const Command *c, FILE *out);
void program_help(FILE *out);

/* "--name VALUE", and what an option is when it is not given ("" if nothing). */
enum { OPTION_BYTES = 96 };
void option_form(const Option *o, char out[OPTION_BYTES]);
void option_default(const Option *o, char out[OPTION_BYTES]);

/* The same tables as a manual page (roff, man(7)) and as completion for bash. */
void manual_print(FILE *out);
void completion_print(FILE *out);

enum { COMMANDS_MAX = 32 };
/* All commands, in the order of the help. */
const Command *const *commands(int *count);

extern const Command command_train, command_eval, command_generate, command_preprocess, command_tokenizer_train,
    command_tokenize, command_plan, command_simulate, command_inspect, command_report, command_convert, command_doctor,
    command_config;

/* Program, compiler, backends, libraries, a line each. */
void version_print(FILE *out);

#endif
