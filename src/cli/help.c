/* Help on the screen, made from the tables of commands and options. manual.c makes the manual page from the same. */
#include <string.h>

#include "cli/command.h"

enum { WIDTH = 79, OPTION_COLUMN = 25, SUMMARY_COLUMN = 19 };

/* ---- flowing text ---- */

typedef struct {
    FILE *out;
    int column, indent; /* indent: that of lines that go on */
    bool fresh;         /* no word stands in this line yet */
} Flow;

/* A word, or several that stay together. */
static void put_item(Flow *f, const char *item, int size)
{
    if (!f->fresh && f->column + 1 + size > WIDTH) {
        fprintf(f->out, "\n%*s", f->indent, "");
        f->column = f->indent;
        f->fresh = true;
    }
    fprintf(f->out, "%s%.*s", f->fresh ? "" : " ", size, item);
    f->column += size + !f->fresh;
    f->fresh = false;
}

static void put_words(Flow *f, const char *text)
{
    for (text += strspn(text, " \n"); *text; text += strspn(text, " \n")) {
        int size = (int)strcspn(text, " \n");
        put_item(f, text, size);
        text += size;
    }
}

/* Lines that begin with a blank stay as they are, the others flow together. */
static void put_text(FILE *out, const char *text)
{
    char line[256];
    Flow f = { .out = out, .fresh = true };
    while (*text) {
        size_t size = strcspn(text, "\n");
        snprintf(line, sizeof line, "%.*s", (int)size, text);
        text += size + (text[size] == '\n');
        bool stays = line[0] == ' ' || !line[0];
        if (!stays) put_words(&f, line);
        if (!stays && *text) continue;
        fprintf(out, "%s%s%s", f.fresh ? "" : "\n", stays ? line : "", stays ? "\n" : "");
        f = (Flow){ .out = out, .fresh = true };
    }
}

/* ---- options ---- */

void option_form(const Option *o, char out[OPTION_BYTES])
{
    snprintf(out, OPTION_BYTES, "--%s%s%s", o->name, o->kind == OPTION_FLAG ? "" : " ", o->value ? o->value : "");
}

void option_default(const Option *o, char out[OPTION_BYTES])
{
    const char *text = o->kind == OPTION_TEXT ? *(const char **)o->out : NULL;
    out[0] = 0;
    if (o->required) return;
    if (o->kind == OPTION_INT && (double)*(const int64_t *)o->out >= o->low) /* below: none */
        snprintf(out, OPTION_BYTES, "%lld", (long long)*(const int64_t *)o->out);
    if (o->kind == OPTION_REAL && *(const double *)o->out >= o->low)
        snprintf(out, OPTION_BYTES, "%g", *(const double *)o->out);
    if (text) snprintf(out, OPTION_BYTES, "%s", text);
}

static void put_usage(const Command *c, FILE *out)
{
    char form[OPTION_BYTES], item[OPTION_BYTES + 2];
    int column = fprintf(out, "usage: megatrain %s", c->name);
    Flow f = { .out = out, .column = column, .indent = 17 };
    for (int i = 0; i < c->option_count; i++) {
        option_form(&c->options[i], form);
        int size = snprintf(item, sizeof item, c->options[i].required ? "%s" : "[%s]", form);
        put_item(&f, item, size);
    }
    if (c->rest) put_item(&f, c->rest, (int)strlen(c->rest));
    fputc('\n', out);
}

static void put_option(const Option *o, FILE *out)
{
    char form[OPTION_BYTES], usual[OPTION_BYTES], item[OPTION_BYTES + 2];
    option_form(o, form);
    option_default(o, usual);
    int column = fprintf(out, "  %-22s ", form);
    Flow f = { .out = out, .column = column, .indent = OPTION_COLUMN, .fresh = true };
    put_words(&f, o->help);
    if (*usual) put_item(&f, item, snprintf(item, sizeof item, "(%s)", usual));
    fputc('\n', out);
}

void command_help(const Command *c, FILE *out)
{
    put_usage(c, out);
    fputc('\n', out);
    put_text(out, c->summary);
    if (c->text) {
        fputc('\n', out);
        put_text(out, c->text);
    }
    for (int i = 0; i < c->option_count; i++) {
        if (i == 0) fprintf(out, "\noptions\n");
        put_option(&c->options[i], out);
    }
}

/* ---- the program ---- */

void program_help(FILE *out)
{
    int count;
    const Command *const *all = commands(&count);
    fprintf(out, "usage: megatrain COMMAND ...\n"
                 "       megatrain --config FILE [section.key=value ...]   the same as 'train'\n"
                 "       megatrain COMMAND --help | --version\n\ncommands\n");
    for (int i = 0; i < count; i++) {
        int column = fprintf(out, "  %-16s ", all[i]->name);
        Flow f = { .out = out, .column = column, .indent = SUMMARY_COLUMN, .fresh = true };
        put_words(&f, all[i]->summary);
        fputc('\n', out);
    }
    fprintf(out, "\nexit status: 0 done, 2 usage or configuration, 3 data, 4 checkpoint, 5 storage,\n"
                 "6 numerics, 7 peer lost, 8 hang, 9 out of memory, 10 rendezvous, 11 device\n"
                 "failed, 75 stopped on request after a checkpoint; all else: man megatrain (or\n"
                 "megatrain help --man)\n");
}
