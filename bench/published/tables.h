/*
 * Tables of text: a line of column names and lines of as many words, as rows.txt and simumax.txt are; and recipes.txt,
 * whose lines are a name and facts "key=value". Lines that begin with # and empty ones do not count.
 */
#ifndef MEGATRAIN_BENCH_TABLES_H
#define MEGATRAIN_BENCH_TABLES_H

#include <stdlib.h>
#include <string.h>

#include "base/file.h"

enum { TABLE_COLUMNS = 24, TABLE_ROWS = 128, TABLE_BYTES = 1 << 20 };

/* The words of one line, which lie in Table.text. */
typedef struct {
    char *word[TABLE_COLUMNS];
    int count;
} TableRow;

typedef struct {
    char *text;
    TableRow head, row[TABLE_ROWS];
    int rows;
} Table;

static inline Err table_line(Table *t, char *line, bool headed)
{
    TableRow r = { 0 };
    char *rest = NULL;
    if (*line == '#') return ERR_OK;
    for (char *w = strtok_r(line, " ", &rest); w; w = strtok_r(NULL, " ", &rest)) {
        if (r.count == TABLE_COLUMNS) return err_set(ERR_DATA, "more than %d words", TABLE_COLUMNS);
        r.word[r.count++] = w;
    }
    if (!r.count) return ERR_OK;
    if (headed && !t->head.count) return t->head = r, ERR_OK;
    if (headed && r.count != t->head.count)
        return err_set(ERR_DATA, "%d words, where the first line has %d", r.count, t->head.count);
    if (t->rows == TABLE_ROWS) return err_set(ERR_DATA, "more than %d lines", TABLE_ROWS);
    t->row[t->rows++] = r;
    return ERR_OK;
}

/* headed: its first line names the columns. The caller frees t->text, after an error, too. */
static inline Err table_read(const char *path, bool headed, Table *t)
{
    int64_t bytes;
    char *rest = NULL;
    *t = (Table){ 0 };
    TRY(file_read_all(path, TABLE_BYTES, &t->text, &bytes));
    Err err = ERR_OK;
    for (char *l = strtok_r(t->text, "\n", &rest); l && !err; l = strtok_r(NULL, "\n", &rest))
        err = table_line(t, l, headed);
    return err ? err_prefix(err, "%s", path) : ERR_OK;
}

/* The word of a row below that name; NULL: there is no such column. */
static inline const char *table_word(const Table *t, const TableRow *r, const char *name)
{
    for (int i = 0; i < t->head.count; i++)
        if (!strcmp(t->head.word[i], name)) return r->word[i];
    return NULL;
}

static inline double table_number(const Table *t, const TableRow *r, const char *name)
{
    const char *word = table_word(t, r, name);
    return word ? strtod(word, NULL) : 0;
}

/* The line of that name; NULL: there is none. */
static inline const TableRow *table_named(const Table *t, const char *name)
{
    for (int i = 0; i < t->rows; i++)
        if (!strcmp(t->row[i].word[0], name)) return &t->row[i];
    return NULL;
}

#endif
