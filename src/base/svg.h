/*
 * Pictures as SVG: the plot area with its axes and lines, colours, text that cannot become markup, and memory for what
 * is drawn again and again. What else a picture shows it prints itself, between the calls.
 *
 * Coordinates are the picture's units, from its upper left corner. Styles know what is drawn here by its class: `grid`
 * (lines of axes), `e` and `m` (labels that end at their point, that have their middle there).
 */
#ifndef MEGATRAIN_BASE_SVG_H
#define MEGATRAIN_BASE_SVG_H

#include <stdbool.h>
#include <stdio.h>

#include "base/arena.h"

/*
 * Colours on a light ground and on a dark one. Those of series are told apart with any kind of colour vision: each two
 * of a set are 36 or more apart in CIELAB, also as simulated for protanopia, deuteranopia and tritanopia (Machado et
 * al. 2009); each has a contrast of 3 or more to its ground. They never stand alone: dashes and marks differ too.
 */
#define SVG_INK "#1f2328|#e6edf3"
#define SVG_DIM "#59636e|#9da7b3"
#define SVG_PAPER "#ffffff|#0d1117"
#define SVG_GRID "#d1d9e0|#353c45"
#define SVG_SOFT "#f6f8fa|#161b22"
#define SVG_C0 "#003a99|#6b95f5"
#define SVG_C1 "#d47019|#e16c24"
#define SVG_C2 "#6f976e|#00ed96"
#define SVG_C3 "#b07ab7|#a67393"
#define SVG_C4 "#5e3300|#ffe407"
#define SVG_C5 "#20273c|#dbeeff"

/* Rules of a style that have such pairs, of six digits each: the reader's browser asks for the one set or the other. */
void svg_rules(FILE *out, const char *rules);

typedef struct {
    double x, y; /* y NaN: a gap */
} SvgPoint;

typedef struct {
    FILE *out;
    double left, top, right, bottom; /* the plot area */
    double first, last, low, high; /* the values that it shows: x from `first` (0) to `last`, y from `low` to `high` */
    int digits;                    /* behind the point, of what lines pass through */
    bool bare;                     /* x has labels alone, no lines */
    bool times;                    /* x is a time, with ticks at fractions and labels as 20000; else a count: 20k */
} Svg;

/* A plot area whose axes hold nothing yet. */
Svg svg_frame(FILE *out, double left, double top, double right, double bottom);

/* Widens the axes so that they hold the points; of gaps their x. */
void svg_fit(Svg *s, const SvgPoint *points, int count);

/* Place of a value. One far outside is pulled in to SVG_FAR from the picture's corner: a clip hides it. */
enum { SVG_FAR = 1000000 };
double svg_x(const Svg *s, double x);
double svg_y(const Svg *s, double y);

/* Lines and labels at round values, about so many. name: below the labels, or NULL. */
void svg_x_axis(const Svg *s, int ticks, const char *name);
void svg_y_axis(const Svg *s, int ticks);

/* The label of a tick, with as many digits as the distance needs: "0.25", "20k", "1.5M", "2e-4". */
enum { SVG_LABEL_BYTES = 32 };
const char *svg_label(char buf[SVG_LABEL_BYTES], double value, double distance);

/* Opens a group that shows the plot area alone, and `beyond` of it on the right. `number` tells ids of a page apart. */
void svg_clip(const Svg *s, int number, double beyond);

/* For the d="" of a path: one line through the points, broken at gaps. */
void svg_line(const Svg *s, const SvgPoint *points, int count);

/* For there, too: a mark round the point that it follows ("M x y"). 4 shapes are told apart without colour. */
const char *svg_mark(int series);

/* Text between tags or in quotes, with markup before and behind it. What means something in XML is escaped, control
 * characters become blanks, bytes that are no UTF-8 the replacement character. */
void svg_text(FILE *out, const char *before, const char *text, const char *behind);

/* A file of its own: its beginning, up to the text of the title; </title> and <desc id="d"> are to follow. */
void svg_open(FILE *out, double width, double height);
/* Then the ground, and a style for it, text, axes and what is `dim`, `soft` or a `name`. */
void svg_ground(FILE *out, double width, double height);

/* Memory of a picture that is drawn again and again, to be written to a file: after the opening nothing is
 * allocated. */
typedef struct {
    FILE *out; /* the owner closes it, if it is there */
    char *text, stdio[4096];
} SvgSheet;

/* For pictures of less than size_bytes. ERR_MEMORY. The sheet must stay where it is. */
Err svg_sheet_open(SvgSheet *s, SetupArena *memory, int64_t size_bytes);

/* Replaces the file by all that was drawn since the last time. ERR_INTERNAL: it did not fit. */
Err svg_sheet_write(SvgSheet *s, const char *path);

#endif
