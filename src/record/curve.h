/*
 * The losses of a run, thinned out to a size that does not depend on its length: what loss.svg and reports draw.
 *
 * At most CURVE_POINTS points, each standing for `stride` neighbouring steps; the stride doubles whenever they run
 * out. Validation losses are kept one by one; when CURVE_DOTS of them are there, every second one of each set goes.
 */
#ifndef MEGATRAIN_RECORD_CURVE_H
#define MEGATRAIN_RECORD_CURVE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/svg.h"

enum { CURVE_POINTS = 1024, CURVE_DOTS = 512, CURVE_NAMES = 32, CURVE_NAME_BYTES = 48 };

/* Some neighbouring steps: mean and range of the values of those that had one to show. */
typedef struct {
    int64_t step, tokens; /* step and tokens of the last of them */
    int64_t count;        /* with a value to show */
    double sum, low, high;
    int skipped; /* steps that were skipped */
} CurvePoint;

/* A validation loss. */
typedef struct {
    int64_t step, tokens;
    double loss;
    int series;
} CurveDot;

typedef struct {
    CurvePoint *points; /* ascending steps; the last one may stand for fewer steps than the others */
    int count;
    int64_t stride;
    CurveDot *dots; /* NULL: none are kept */
    int dot_count;
    char name[CURVE_NAMES][CURVE_NAME_BYTES]; /* name of each series of dots */
    int names;
} Curve;

/* A value that there is room for: finite, and not so large that sums of it or its digits would overflow. */
static inline bool curve_can_show(double value) { return value >= -1e9 && value <= 1e9; }

/* Takes the memory, of dots too when asked. ERR_MEMORY. */
Err curve_open(Curve *c, SetupArena *memory, bool dots);

/* Steps in ascending order. A value that cannot be shown counts as none. */
void curve_add(Curve *c, int64_t step, int64_t tokens, double value, bool skipped);

/* name: of the validation set, "" if there is only one; cut to what CURVE_NAME_BYTES hold. Sets beyond CURVE_NAMES
 * share the last series. */
void curve_add_dot(Curve *c, int64_t step, int64_t tokens, double loss, const char *name);

/* The name as a curve keeps it: cut between two characters. */
void curve_cut_name(char out[CURVE_NAME_BYTES], const char *name);

/*
 * Mean round point i, over points/40 neighbours on each side, so that the curve is not late. At the beginning, where
 * the loss falls so steeply that means lie above it, they are fewer. False: no finite value among them.
 */
bool curve_smooth(const Curve *c, int i, double *out);

/* The points as a picture draws them: means, smoothed or as they are. Returns how many. */
int curve_line(const Curve *c, bool by_tokens, bool smooth, SvgPoint out[CURVE_POINTS]);

/*
 * How far up an axis goes for single values, when smoothed ones reach from `low` to `high` and single ones down to
 * `lowest`: as much above as noise that reaches so far below may, and not for spikes.
 */
double curve_most(double low, double high, double lowest);

int64_t curve_skipped(const Curve *c); /* steps */

/* The losses as a picture for any browser, light or dark: loss.svg, with a title and a description for screen readers.
 * Allocates nothing; the longest takes less than CURVE_SVG_BYTES. */
enum { CURVE_SVG_BYTES = 320 << 10 };
void curve_svg(const Curve *c, const char *title, FILE *out);

#endif
