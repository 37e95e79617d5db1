/*
 * The part of the model that each pipeline stage is: even shares, or a layout that the user wrote (model.h).
 *
 *   layout  := stage { "|" stage }          stage := { item }          item := unit [ "*" number ]
 *   unit    := "E" | "t" | "m" | "L" | "(" layout ")"
 *
 * A repeated group may hold '|', so "(tt|)*3" is three stages of two blocks. Commas and blanks mean nothing.
 */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "model/model.h"

enum { LAYOUT_DEPTH = 8, LAYOUT_STAGES = 65536, LAYOUT_LAYERS = 65536, LAYOUT_REPEAT = 65536 };

/* The stages as they are read: out may be NULL, to count. */
typedef struct {
    const char *text, *at, *unit; /* unit: the one that is being put */
    StageShare *out;
    int capacity;
    int stage;      /* the one that is being filled */
    int64_t layers; /* so far, over all stages */
    int embeddings, modules, heads;
    int modules_stage; /* where the last module is */
} Layout;

static Err bad_layout(const Layout *l, const char *why)
{
    return err_set(ERR_CONFIG, "parallel.layout='%s': %s, at character %d", l->text, why, (int)(l->at - l->text) + 1),
           err_hint("of each stage E (embedding), t (a block), m (a module of multi-token prediction) and L "
                    "(head), stages "
                    "apart by '|', with x*n and (...)*n: Et|(tt|)*2,tL");
}

static Err bad_unit(Layout *l, const char *why)
{
    l->at = l->unit;
    return bad_layout(l, why);
}

static Err put_unit(Layout *l)
{
    const char unit = *l->unit;
    StageShare *s = l->out && l->stage < l->capacity ? &l->out[l->stage] : NULL;
    if (!l->embeddings && unit != 'E') return bad_unit(l, "'E' must come first");
    if (l->heads) return bad_unit(l, "'L' must come last");
    if (l->modules && unit == 't') return bad_unit(l, "behind 'm' come others and 'L' alone");
    if (l->modules && unit == 'm' && l->stage != l->modules_stage) return bad_unit(l, "each 'm' in the same stage");
    if (l->modules && unit == 'L' && l->stage > l->modules_stage + 1)
        return bad_unit(l, "'L' in the stage of the 'm' or in the next one");
    if (unit == '|') {
        if (++l->stage >= LAYOUT_STAGES) return bad_unit(l, "too many stages");
        if (l->out && l->stage < l->capacity) l->out[l->stage] = (StageShare){ .first_layer = (int)l->layers };
        return ERR_OK;
    }
    if (unit == 'E' && l->embeddings++) return bad_unit(l, "a second 'E'");
    l->heads += unit == 'L';
    l->layers += unit == 't';
    l->modules += unit == 'm';
    if (unit == 'm') l->modules_stage = l->stage;
    if (l->layers + l->modules > LAYOUT_LAYERS) return bad_unit(l, "too many blocks");
    if (!s) return ERR_OK;
    s->embedding |= unit == 'E';
    s->head |= unit == 'L';
    s->layer_count += unit == 't';
    s->mtp += unit == 'm';
    return ERR_OK;
}

static Err read_list(Layout *l, int depth);

/* "*n" behind a unit; 1 without. */
static Err read_times(Layout *l, int64_t *times)
{
    *times = 1;
    if (*l->at != '*') return ERR_OK;
    char *end;
    *times = strtoll(++l->at, &end, 10);
    if (end == l->at || !isdigit((unsigned char)*l->at) || *times < 1 || *times > LAYOUT_REPEAT)
        return bad_layout(l, "how many times?");
    l->at = end;
    return ERR_OK;
}

/* A group is read again for every repetition: the text is short. */
static Err read_group(Layout *l, int depth)
{
    const char *begin = l->at + 1, *behind;
    int64_t times;
    const Layout before = *l;
    if (depth >= LAYOUT_DEPTH) return bad_layout(l, "groups too deep");
    l->at = begin;
    TRY(read_list(l, depth + 1));
    if (*l->at != ')') return bad_layout(l, "')' is missing");
    l->at++;
    TRY(read_times(l, &times));
    behind = l->at;
    if (l->stage == before.stage && l->layers == before.layers && l->modules == before.modules &&
        l->embeddings + l->heads == before.embeddings)
        return bad_layout(l, "a group of nothing");
    for (; times > 1; times--) {
        l->at = begin;
        TRY(read_list(l, depth + 1));
    }
    l->at = behind;
    return ERR_OK;
}

static Err read_list(Layout *l, int depth)
{
    for (; *l->at && *l->at != ')';) {
        const char unit = *l->at, *from = l->at;
        int64_t times;
        l->unit = from;
        if (unit == ',' || isspace((unsigned char)unit)) {
            l->at++;
        } else if (unit == '(') {
            TRY(read_group(l, depth));
        } else if (unit == '|') {
            TRY(put_unit(l));
            l->at++;
        } else if (strchr("EtmL", unit)) {
            l->at++;
            TRY(read_times(l, &times));
            for (l->unit = from; times; times--) TRY(put_unit(l));
        } else {
            return bad_layout(l, "not a part of a layout");
        }
    }
    return ERR_OK;
}

static Err read_layout(Layout *l)
{
    if (l->out) l->out[0] = (StageShare){ 0 };
    TRY(read_list(l, 0));
    if (*l->at) return bad_layout(l, "')' without '('");
    if (!l->embeddings || !l->heads) return bad_layout(l, "the model needs one 'E' and one 'L'");
    return ERR_OK;
}

Err stage_layout_count(const char *layout, int *stages)
{
    Layout l = { .text = layout, .at = layout };
    *stages = 0;
    if (!*layout) return ERR_OK;
    TRY(read_layout(&l));
    *stages = l.stage + 1;
    return ERR_OK;
}

static Err even_shares(const ModelSpec *spec, int stages, StageShare *out)
{
    const int each = spec->layers / stages, more = spec->layers % stages, first = (stages - more) / 2;
    if (!each)
        return err_set(ERR_CONFIG, "%d blocks cannot be shared by %d pipeline stages", spec->layers, stages),
               err_hint("parallel.pp x parallel.vpp of at most %d, or a parallel.layout that says which "
                        "stages are empty",
                        spec->layers);
    for (int s = 0, layer = 0; s < stages; s++) {
        const int count = each + (s >= first && s < first + more);
        const bool last = s == stages - 1;
        out[s] = (StageShare){ layer, count, s == 0, last, last ? spec->mtp.count : 0 };
        layer += count;
    }
    return ERR_OK;
}

Err stage_shares(const ModelSpec *spec, const char *layout, int stages, StageShare *out)
{
    Layout l = { .text = layout, .at = layout, .out = out, .capacity = stages };
    if (!*layout) return even_shares(spec, stages, out);
    TRY(read_layout(&l));
    if (l.stage + 1 != stages)
        return err_set(ERR_CONFIG, "parallel.layout='%s' has %d stages, the pipeline %d", layout, l.stage + 1, stages),
               err_hint("a pipeline has parallel.pp x parallel.vpp stages; with nothing between two '|' one "
                        "is empty");
    if (l.layers != spec->layers)
        return err_set(ERR_CONFIG, "parallel.layout='%s' has %lld blocks, the model %d", layout, (long long)l.layers,
                       spec->layers),
               err_hint("a 't' for each of model.layers, over all stages");
    if (l.modules != spec->mtp.count)
        return err_set(ERR_CONFIG, "parallel.layout='%s' has %d modules of multi-token prediction, the model %d",
                       layout, l.modules, spec->mtp.count),
               err_hint("an 'm' for each of model.mtp_layers, before the 'L'");
    return ERR_OK;
}
