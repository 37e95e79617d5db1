/*
 * The manual page and the completion for bash, made from the tables of commands, options, keys and errors, so that
 * neither says anything that the program does not. `make install` puts both in place.
 */
#include <string.h>

#include "config/config.h"
#include "config/config_device.h"
#include "base/version.h"
#include "cli/command.h"
#include "pipeline/schedule.h"

/* ---- roff ---- */

/* Text in which nothing means anything to roff. */
static void put_plain(FILE *out, const char *text)
{
    for (const char *at = text; *at; at++) {
        bool starts = at == text || at[-1] == '\n';
        if (starts && (*at == '.' || *at == '\'')) fputs("\\&", out);
        if (*at == '\\') fputs("\\e", out);
        else if (*at == '-') fputs("\\-", out);
        else if (*at == '\'') fputs("\\(aq", out);
        else if (*at == '^') fputs("\\(ha", out);
        else if (*at == '`') fputs("\\(ga", out);
        else if (*at == '~') fputs("\\(ti", out);
        else fputc(*at, out);
    }
}

static void put_bold(FILE *out, const char *text)
{
    fputs("\\fB", out);
    put_plain(out, text);
    fputs("\\fR", out);
}

/* Help text: lines that begin with a blank stay as they are. */
static void put_help(FILE *out, const char *text)
{
    bool fixed = false;
    while (*text) {
        char line[256];
        size_t size = strcspn(text, "\n");
        snprintf(line, sizeof line, "%.*s", (int)size, text);
        text += size + (text[size] == '\n');
        bool stays = line[0] == ' ';
        if (stays != fixed) fprintf(out, stays ? ".nf\n" : ".fi\n");
        fixed = stays;
        if (!line[0]) fprintf(out, ".PP");
        else put_plain(out, line);
        fputc('\n', out);
    }
    if (fixed) fprintf(out, ".fi\n");
}

static void put_option(FILE *out, const Option *o)
{
    char form[OPTION_BYTES], usual[OPTION_BYTES];
    option_form(o, form);
    option_default(o, usual);
    fprintf(out, ".TP\n");
    put_bold(out, form);
    fputc('\n', out);
    put_plain(out, o->help);
    if (o->required) fprintf(out, " (required)");
    else if (*usual) {
        fprintf(out, " (default: ");
        put_plain(out, usual);
        fputc(')', out);
    }
    fputc('\n', out);
}

static void put_command(FILE *out, const Command *c)
{
    fprintf(out, ".SS \"megatrain ");
    put_plain(out, c->name);
    fputc('"', out);
    if (c->rest) {
        fprintf(out, "\n.RI \"[options] ");
        put_plain(out, c->rest);
        fprintf(out, "\"\n.PP");
    }
    fputc('\n', out);
    put_plain(out, c->summary);
    fprintf(out, ".\n");
    if (c->text) {
        fprintf(out, ".PP\n");
        put_help(out, c->text);
    }
    for (int i = 0; i < c->option_count; i++) put_option(out, &c->options[i]);
}

static void put_key(FILE *out, ConfigId id)
{
    const ConfigKey *key = config_key(id);
    char name[160], range[256], usual[CONFIG_VALUE_BYTES];
    if (id == 0 || strcmp(key->section, config_key((ConfigId)(id - 1))->section) != 0)
        fprintf(out, ".SS \"[%s]\"\n", key->section);
    snprintf(name, sizeof name, "%s.%s", key->section, key->name);
    config_range(id, range, sizeof range);
    fprintf(out, ".TP\n");
    put_bold(out, name);
    fputc('\n', out);
    put_plain(out, key->meaning);
    fprintf(out, ".\n.br\n");
    put_plain(out, range);
    fprintf(out, "; default: ");
    put_plain(out, config_default(id, usual));
    fprintf(out, "; %s on resume\n", key->fixed ? "fixed" : "may change");
}

/* All kinds of failure that end with this status. */
static void put_status(FILE *out, int status)
{
    bool any = false;
    for (int e = 0; e < ERR_COUNT; e++) {
        if (err_exit_code((Err)e) != status) continue;
        if (!any) fprintf(out, ".TP\n\\fB%d\\fR\n", status);
        else fprintf(out, ", ");
        put_plain(out, e == ERR_OK ? "done" : err_name((Err)e));
        any = true;
    }
    if (any) fputc('\n', out);
}

/* The environment's words to a run; the variables of tests are not told (test_help.sh has the list of those). */
static void put_environment(FILE *out)
{
    static const struct {
        const char *names, *text;
    } all[] = {
        { "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE",
          "which rank this process is, as torchrun and scripts/launch.sh set it; mpirun's, mpiexec's and "
          "srun's own variables do as well" },
        { "MASTER_ADDR, MASTER_PORT", "rank 0's host, by a name or a number that all hosts reach, and the "
                                      "first of 16 ports where the ranks meet" },
        { "MEGATRAIN_SECRET",
          "16 to 255 bytes by which the ranks of a start know each other; without it rank 0 leaves a "
          "secret in the run's folder" },
        { "MEGATRAIN_JOB",
          "a name of the job, where the launcher has none: two jobs on one port are told apart by it" },
        { "OMP_NUM_THREADS", "threads of a rank; debug.threads comes first, none: its share of the processors" },
        { "OMP_PROC_BIND, OMP_PLACES, GOMP_CPU_AFFINITY", "bind threads; run.bind then binds no rank" },
        { "OMP_WAIT_POLICY, GOMP_SPINCOUNT",
          "how long waiting threads spin; where neither is set megatrain sets the latter for itself" },
        { "CUDA_VISIBLE_DEVICES", "the GPUs that there are for a rank" },
        { "NCCL_HOME", "the folder of the NCCL to load; NCCL's own variables (NCCL_SOCKET_IFNAME, "
                       "NCCL_IB_HCA, NCCL_DEBUG, ...) hold as well" },
        { "NCCL_ALGO, NCCL_NVLS_ENABLE, NCCL_COMM_ID",
          "refused where they would change sums, or leave the ranks' own meeting" },
        { "NCCL_HOSTID, NCCL_MULTI_RANK_GPU_ENABLE",
          "how ranks that share a GPU use NCCL (parallel.staged = false): as hosts of these names, or as NCCL itself "
          "allows it" },
        { "NCCL_COLLNET_ENABLE", "sums in the network's switches: a warning, as their order may differ" },
        { "HOME", "what a path that begins with ~ means" },
        { "LD_LIBRARY_PATH", "where CUDA's libraries and NCCL are looked for" },
        { "TMPDIR", "of scripts/launch.sh: a folder for a file that it removes at once" },
        { "NO_COLOR, TERM", "NO_COLOR set or TERM=dumb: log lines without colours (log.color)" },
        { "MEGATRAIN, MEGATRAIN_HOME, RUN_DIR, SRUN_ARGS, NET_SUFFIX",
          "of the batch scripts in scripts/slurm, which describe them" },
    };
    fprintf(out, ".SH ENVIRONMENT\n");
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        fprintf(out, ".TP\n");
        put_bold(out, all[i].names);
        fputc('\n', out);
        put_plain(out, all[i].text);
        fputc('\n', out);
    }
}

void manual_print(FILE *out)
{
    int count;
    const Command *const *all = commands(&count);
    fprintf(out, ".\\\" made by: megatrain help --man\n"
                 ".TH MEGATRAIN 1 \"\" \"megatrain " MEGATRAIN_VERSION "\" \"User Commands\"\n"
                 ".SH NAME\nmegatrain \\- pretrains GPT models\n"
                 ".SH SYNOPSIS\n.B megatrain\n.I command\n.RI [ options ]\n.br\n"
                 ".B megatrain \\-\\-config\n.I file\n.RI [ section.key=value \" ...]\"\n.br\n"
                 ".B megatrain\n.I command\n.B \\-\\-help\n.br\n"
                 ".B megatrain \\-\\-version\n"
                 ".SH DESCRIPTION\n"
                 "Reads an INI file, builds the model, trains it, checkpoints it and draws its curve.\n"
                 "Every layout of ranks, threads and micro\\-batches gives the same bits on CPUs.\n"
                 "Results go to stdout, messages to stderr.\n"
                 ".SH COMMANDS\n");
    for (int i = 0; i < count; i++) put_command(out, all[i]);
    fprintf(out, ".SH CONFIGURATION\n"
                 "An INI file of these keys in their sections; a later value wins: default, file, command line\n"
                 "(\\fBsection.key=value\\fR, there also the later of two). In a file a key may stand once.\n"
                 "\\fBmegatrain config explain\\fR prints the same with present values.\n");
    for (int i = 0; i < CFG_COUNT; i++) put_key(out, (ConfigId)i);
    fprintf(out, ".SH EXIT STATUS\n"
                 "One line on stderr names what failed, where and why, and a hint what to do.\n");
    for (int status = 0; status < 256; status++) put_status(out, status);
    put_environment(out);
    fprintf(out, ".SH FILES\nA run leaves in its folder (\\fBrun.dir\\fR, runs/NAME):\n"
                 ".TP\n.B config.ini\nthe resolved configuration\n"
                 ".TP\n.B starts/N.ini\nthat of the N\\-th start\n"
                 ".TP\n.B metrics.jsonl\none object a step and an evaluation\n"
                 ".TP\n.B log.txt\nwhat was said on stderr, with times (UTC)\n"
                 ".TP\n.B tokenizer/\na copy of the tokenizer's files\n"
                 ".TP\n.B loss.svg\nthe curve\n"
                 ".TP\n.B checkpoints/step\\-N/\nsafetensors and a manifest with checksums\n");
}

/* ---- bash ---- */

/* "a|b|c" as "a b c". */
static void put_choices(FILE *out, const char *choices)
{
    for (const char *at = choices; *at; at++) fputc(*at == '|' ? ' ' : *at, out);
}

/* The words that may come first. */
static void put_commands(FILE *out)
{
    int count;
    const Command *const *all = commands(&count);
    fprintf(out, "  local commands=\"");
    for (int i = 0; i < count; i++) fprintf(out, "%.*s ", (int)strcspn(all[i]->name, " "), all[i]->name);
    fprintf(out, "help\"\n");
}

/* Commands of two words. */
static void put_second_words(FILE *out)
{
    int count;
    const Command *const *all = commands(&count);
    for (int i = 0; i < count; i++) {
        int first = (int)strcspn(all[i]->name, " ");
        const char *second = all[i]->name + first;
        if (*second)
            fprintf(out, "    %.*s) second=\"%s\" command=\"%.*s ${COMP_WORDS[2]}\" at=3 ;;\n", first, all[i]->name,
                    second + 1, first, all[i]->name);
    }
}

/* Words that may stand behind a command. */
static void put_command_words(FILE *out)
{
    int count;
    const Command *const *all = commands(&count);
    for (int i = 0; i < count; i++) {
        const Command *c = all[i];
        fprintf(out, "    \"%s\") words=\"", c->name);
        for (int o = 0; o < c->option_count; o++) fprintf(out, "--%s ", c->options[o].name);
        fprintf(out, "--help\" verbs=\"%s\"%s ;;\n", c->verbs ? c->verbs : "",
                c->rest && strstr(c->rest, "section.key=value") ? " keys=1" : "");
    }
}

static void put_device(void *out, const char *name) { fprintf(out, " %s", name); }

static void put_schedules(FILE *out)
{
    for (int i = 0; schedule_name(i); i++) fprintf(out, " %s", schedule_name(i));
}

/* Names that the program knows, of options and keys whose values are texts. False: it knows none. */
static bool put_known_names(FILE *out, const char *what)
{
    if (!strcmp(what, "device")) {
        fprintf(out, "more=1 values=\"");
        device_file_names(put_device, out);
    } else if (!strcmp(what, "schedule")) {
        fprintf(out, "values=\"auto");
        put_schedules(out);
    } else return false;
    fprintf(out, "\"");
    return true;
}

/* Values that may stand behind an option: one of its choices, a file, or something that nobody can guess. */
static void put_option_values(FILE *out, const Command *c)
{
    for (int i = 0; i < c->option_count; i++) {
        const Option *o = &c->options[i];
        if (!o->value || o->kind == OPTION_LIST) continue;
        fprintf(out, "    \"%s --%s\") known=1 ", c->name, o->name);
        if (put_known_names(out, o->name)) {
            fprintf(out, " ;;\n");
            continue;
        }
        bool choices = strchr(o->value, '|') != NULL;
        bool free = o->kind != OPTION_TEXT || !strcmp(o->value, "TEXT") || !strcmp(o->value, "KEY");
        fprintf(out, "%s", choices ? "values=\"" : free ? "" : "files=1");
        if (choices) put_choices(out, o->value);
        fprintf(out, "%s ;;\n", choices ? "\"" : "");
    }
}

/* A key's values, as far as they are known. */
static void put_key_values(FILE *out)
{
    for (int i = 0; i < CFG_COUNT; i++) {
        const ConfigKey *key = config_key((ConfigId)i);
        if (i == CFG_parallel_schedule || i == CFG_parallel_auto_device) {
            fprintf(out, "    %s.%s) ", key->section, key->name);
            put_known_names(out, i == CFG_parallel_schedule ? "schedule" : "device");
            fprintf(out, " ;;\n");
        } else if (key->kind == CONFIG_TEXT) fprintf(out, "    %s.%s) files=1 ;;\n", key->section, key->name);
        if (key->kind != CONFIG_PICK && key->kind != CONFIG_BOOL) continue;
        const char *values = key->kind == CONFIG_PICK ? key->choices : key->has_auto ? "true false auto" : "true false";
        fprintf(out, "    %s.%s) values=\"", key->section, key->name);
        put_choices(out, values);
        fprintf(out, "\" ;;\n");
    }
}

static void put_keys(FILE *out)
{
    fprintf(out, "  local names=\"");
    for (int i = 0; i < CFG_COUNT; i++)
        fprintf(out, "%s%s.%s", i ? " " : "", config_key((ConfigId)i)->section, config_key((ConfigId)i)->name);
    fprintf(out, "\"\n");
}

/* bash has cut the command line into COMP_WORDS, at '=' too unless it was told otherwise. */
static const char bash_begin[] =
    "_megatrain()\n{\n"
    "  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]} at=2 "
    "place=2\n"
    "  local second words verbs keys key front values known files more suffix\n"
    "  COMPREPLY=()\n"
    "  if [[ $cur == = ]]; then key=$prev cur=\n"
    "  elif [[ $prev == = ]]; then key=${COMP_WORDS[COMP_CWORD-2]}\n"
    "  elif [[ $cur == *=* ]]; then key=${cur%%=*} front=${cur%%=*}= cur=${cur#*=}; fi\n";

static const char bash_words[] =
    "  if (( COMP_CWORD == 1 )); then\n"
    "    COMPREPLY=($(compgen -W \"$commands --config --help --version\" -- \"$cur\")); return\n"
    "  elif [[ $command == help ]] && (( COMP_CWORD == at )); then\n"
    "    COMPREPLY=($(compgen -W \"$commands --man --bash\" -- \"$cur\")); return\n"
    "  elif [[ $command == help ]]; then command=${COMP_WORDS[2]} place=3\n"
    "  elif [[ $command == -* ]]; then command=train at=1; fi\n"
    "  case $command in\n";

static const char bash_end[] =
    "  esac\n"
    "  if [[ -n $files ]]; then known= key=\n"
    "  elif [[ -n $known || -n $key ]]; then COMPREPLY=($(compgen -P \"$front\" -W \"$values\" -- "
    "\"$cur\"))\n"
    "    [[ -z $more || -n ${COMPREPLY[*]} ]] || compopt -o default 2>/dev/null # a file instead of a name\n"
    "    return\n"
    "  elif [[ $cur == -* ]]; then COMPREPLY=($(compgen -W \"$words\" -- \"$cur\")); return\n"
    "  elif [[ -n $verbs ]] && (( COMP_CWORD == at )) && COMPREPLY=($(compgen -W \"$verbs\" -- \"$cur\")); "
    "then return\n"
    "  elif [[ -n $keys ]]; then\n"
    "    [[ ${COMP_WORDS[at]} == explain ]] || suffix== && compopt -o nospace 2>/dev/null\n"
    "    COMPREPLY=($(compgen -S \"$suffix\" -W \"$names\" -- \"$cur\")); return\n"
    "  fi\n"
    "  compopt -o default 2>/dev/null # file names\n"
    "}\n"
    "complete -F _megatrain megatrain\n";

void completion_print(FILE *out)
{
    int count;
    const Command *const *all = commands(&count);
    fprintf(out, "# bash completion for megatrain, made by: megatrain help --bash\n%s", bash_begin);
    put_commands(out);
    put_keys(out);
    fprintf(out, "%s", bash_words);
    put_second_words(out);
    fprintf(out, "  esac\n"
                 "  if [[ -n $second ]] && (( COMP_CWORD == place )); then\n"
                 "    COMPREPLY=($(compgen -W \"$second\" -- \"$cur\")); return\n"
                 "  elif [[ ${COMP_WORDS[1]} == help ]]; then return; fi\n"
                 "  case $command in\n");
    put_command_words(out);
    fprintf(out, "  esac\n  case \"$command ${key:-$prev}\" in\n");
    for (int i = 0; i < count; i++) put_option_values(out, all[i]);
    fprintf(out, "  esac\n  case $key in\n");
    put_key_values(out);
    fprintf(out, "%s", bash_end);
}
