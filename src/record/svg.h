/*
 * The loss curve as a picture: SVG text for any browser, light or dark, a title and a description for screen
 * readers. Needs no memory of its own; a full curve fits into SVG_BYTES.
 */
#ifndef MEGATRAIN_RECORD_SVG_H
#define MEGATRAIN_RECORD_SVG_H

#include "record/curve.h"

enum { SVG_BYTES = 320 << 10 };

/* Bytes written to buf[SVG_BYTES], without the closing 0. */
int64_t svg_curve(const Curve *c, const char *title, char *buf);

#endif
