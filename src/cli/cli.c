/*
 * The way from argv to a command (commands.c) and to an exit status.
 * A first word that is an option means training: megatrain --config FILE.
 */
#include "cli/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/processors.h"
#include "base/words.h"
#include "cli/command.h"

static bool asks_for_help(const char *word) { return !strcmp(word, "--help") || !strcmp(word, "-h"); }

/* Words of the name that stand at the front of argv: 0 if it is another command. */
static int matches(const Command *c, int argc, const char *const *argv)
{
    size_t first = strcspn(c->name, " ");
    if (argc < 1 || strlen(argv[0]) != first || strncmp(argv[0], c->name, first) != 0) return 0;
    if (!c->name[first]) return 1;
    if (argc > 1 && asks_for_help(argv[1])) return 1; /* the help of the first command with that word */
    return argc > 1 && strcmp(argv[1], c->name + first + 1) == 0 ? 2 : 0;
}

/* Our name of a command that others call so; NULL: nobody does. */
static const char *meant_command(const char *word)
{
    static const char *const names[][2] = {
        { "resume", "train" },    { "pretrain", "train" },    { "run", "train" },
        { "sample", "generate" }, { "complete", "generate" }, { "evaluate", "eval" }
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(names[i][0], word)) return names[i][1];
    return NULL;
}

static Err unknown_command(int argc, const char *const *argv)
{
    int count;
    const Command *const *table = commands(&count);
    const char *names[COMMANDS_MAX];
    for (int i = 0; i < count; i++) {
        size_t first = strcspn(table[i]->name, " ");
        names[i] = table[i]->name;
        if (!table[i]->name[first] || strlen(argv[0]) != first || strncmp(argv[0], names[i], first) != 0) continue;
        if (argc > 1) err_set(ERR_CONFIG, "unknown command '%s %s'", argv[0], argv[1]);
        else err_set(ERR_CONFIG, "'%s' wants another word", argv[0]);
        return err_hint("did you mean 'megatrain %s'?", table[i]->name);
    }
    const char *meant = meant_command(argv[0]);
    const char *nearest = meant ? meant : word_nearest(argv[0], names, count);
    err_set(ERR_CONFIG, "unknown command '%s'", argv[0]);
    if (text_ends(argv[0], ".ini")) return err_hint("did you mean 'megatrain --config %s'?", argv[0]);
    return nearest ? err_hint("did you mean 'megatrain %s'?", nearest) : err_hint("megatrain --help lists them");
}

static Err run_command(const Command *c, int argc, const char *const *argv)
{
    int rest_count;
    bool help;
    const char **rest = calloc((size_t)argc + 1, sizeof *rest);
    if (!rest) return err_set(ERR_MEMORY, "no memory for %d words", argc);
    Err err = options_read(c, argc, argv, rest, &rest_count, &help);
    if (!err && help) command_help(c, stdout);
    else if (!err) err = c->run((Words){ rest, rest_count });
    free(rest);
    return err;
}

static Err dispatch(int argc, const char *const *argv)
{
    int count;
    const Command *const *table = commands(&count);
    for (int i = 0; i < count; i++) {
        int words = matches(table[i], argc, argv);
        if (words) return run_command(table[i], argc - words, argv + words);
    }
    if (argv[0][0] == '-') return run_command(&command_train, argc, argv);
    return unknown_command(argc, argv);
}

/* Results that did not reach their reader must not look like success. */
static Err flush_results(void)
{
    if (fflush(stdout) == 0 && !ferror(stdout)) return ERR_OK;
    return err_set(ERR_STORAGE, "cannot write the results to stdout: %s", strerror(errno));
}

/* The number of a standard stream that was closed (2>&-) would be that of the next file, and messages would be written
 * into it. What holds the number is of no use: reading stdin and writing results to stdout fail as before. */
static void hold_streams(void)
{
    static const int modes[] = { O_WRONLY, O_RDONLY, O_WRONLY };
    for (int fd = 0; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", modes[fd]) != fd) _exit(err_exit_code(ERR_STORAGE));
}

/* argv: the words behind the program's name, at least one. */
static Err answer(int argc, const char *const *argv)
{
    const char *first = argv[0];
    const bool help = !strcmp(first, "help");
    if (asks_for_help(first) || (help && argc == 1)) program_help(stdout);
    else if (!strcmp(first, "--version")) version_print(stdout);
    else if (help && !strcmp(argv[1], "--man")) manual_print(stdout);
    else if (help && !strcmp(argv[1], "--bash")) completion_print(stdout);
    else if (help) {
        const char *const ask[] = { argv[1], argc > 2 ? argv[2] : "--help", "--help" };
        return dispatch(argc > 2 ? 3 : 2, ask);
    } else return dispatch(argc, argv);
    return ERR_OK;
}

/* Below it a run could end in the middle, without a line. No frame is above 32 KiB (Makefile, FRAMES). */
enum { STACK_LEAST_KIB = 512 };

static Err check_stack(void)
{
    struct rlimit stack;
    if (getrlimit(RLIMIT_STACK, &stack) || stack.rlim_cur >= STACK_LEAST_KIB * 1024ull) return ERR_OK;
    err_set(ERR_MEMORY, "the stack's limit is %llu KiB, and %d are needed", (unsigned long long)stack.rlim_cur / 1024,
            STACK_LEAST_KIB);
    return err_hint("ulimit -s 8192, the usual one");
}

int cli_main(int argc, char **argv)
{
    hold_streams();
    signal(SIGXFSZ, SIG_IGN); /* a file beyond ulimit -f is a failed write as any other */
    if (argc < 2) {
        program_help(stderr);
        return err_exit_code(ERR_CONFIG);
    }
    Err err = check_stack();
    if (!err) err = processors_check();
    if (!err) err = answer(argc - 1, (const char *const *)argv + 1);
    if (!err) err = flush_results();
    if (err) err_print(err, err == ERR_INTERNAL || err == ERR_SHAPE);
    return err_exit_code(err);
}
