/* See upcycle.h. */
#include "ckpt/upcycle.h"

#include <stdio.h>
#include <string.h>

static const char experts[] = ".mlp.experts.";

bool upcycle_source(const char *name, char *out)
{
    const char *at = strstr(name, experts);
    if (!at) return false;
    snprintf(out, PARAM_NAME_MAX, "%.*s.mlp.%s", (int)(at - name), name, at + strlen(experts));
    return true;
}

bool upcycle_is_new(const char *name) { return strstr(name, ".mlp.router."); }

/* fc1 and its bias are cut by rows within their sections, fc2 by columns; the bias of fc2 is whole. */
static bool cut_by(const Param *p, int dim) { return p->spec.cut[dim] == CUT_ETP; }

void upcycle_shape(const Upcycle *u, const Param *p, int64_t shape[2])
{
    shape[0] = p->spec.shape[0] / u->experts * (cut_by(p, 0) ? u->parts : 1);
    shape[1] = p->spec.shape[1] * (cut_by(p, 1) ? u->parts : 1);
}

static int sections(const Param *p) { return p->spec.section[0] ? 2 : 1; }

int upcycle_windows(const Upcycle *u, const Param *p) { return u->experts * sections(p); }

UpcycleWindow upcycle_window(const Upcycle *u, const Param *p, int index)
{
    const int n = sections(p), section = index % n, part = index / n % u->parts;
    const int64_t rows = p->spec.shape[0] / upcycle_windows(u, p), columns = p->spec.shape[1];
    UpcycleWindow w = { .to = { { index * rows, 0 }, { rows, columns } } };
    w.from[0] = (cut_by(p, 0) ? (section * u->parts + part) * rows : 0) - w.to.offset[0];
    w.from[1] = cut_by(p, 1) ? part * columns : 0;
    w.factor = cut_by(p, 0) ? 1 : cut_by(p, 1) ? u->factor : u->factor / (float)u->parts;
    return w;
}
