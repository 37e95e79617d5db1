/*
 * The loss curve as a picture: SVG text for any browser, light or dark, a title and a description for screen
 * readers. Needs no memory of its own; up to 1024 points and 512 dots fit into SVG_BYTES.
 */
#ifndef MEGATRAIN_TRAIN_SVG_H
#define MEGATRAIN_TRAIN_SVG_H

#include <stdint.h>

enum { SVG_BYTES = 160 << 10, SVG_NAME_BYTES = 48 };

/* Some neighbouring steps: mean and range of the loss of those that had a finite one. */
typedef struct {
    int64_t step;  /* the last of them */
    int64_t count; /* with a finite loss */
    double sum, low, high;
    int skipped; /* steps that were skipped */
} SvgPoint;

/* A validation loss. */
typedef struct {
    int64_t step;
    double loss;
    int series;
} SvgDot;

typedef struct {
    const char *title;
    const SvgPoint *points; /* ascending steps */
    int count;
    const SvgDot *dots;
    int dot_count;
    const char (*series)[SVG_NAME_BYTES]; /* their names */
    int series_count;
} SvgCurve;

/* Bytes written to buf[SVG_BYTES], without the closing 0. */
int64_t svg_curve(const SvgCurve *c, char *buf);

#endif
