/* See load_map.h. */
#include "record/load_map.h"

static double *row_of(const LoadMap *m, int layer) { return m->sum + (int64_t)layer * LOAD_MAP_BINS; }

double load_map_at(const LoadMap *m, int layer, int bin) { return row_of(m, layer)[bin] / m->steps[bin]; }

/* Two neighbouring bins become one. */
static void halve(LoadMap *m)
{
    for (int b = 0; b < LOAD_MAP_BINS / 2; b++) {
        m->step[b] = m->step[2 * b + 1];
        m->steps[b] = m->steps[2 * b] + m->steps[2 * b + 1];
        for (int l = 0; l < m->layers; l++) row_of(m, l)[b] = row_of(m, l)[2 * b] + row_of(m, l)[2 * b + 1];
    }
    m->bins = LOAD_MAP_BINS / 2;
    m->stride *= 2;
}

static void begin_bin(LoadMap *m)
{
    if (m->bins == LOAD_MAP_BINS) halve(m);
    m->steps[m->bins] = 0;
    for (int l = 0; l < m->layers; l++) row_of(m, l)[m->bins] = 0;
    m->bins++;
}

Err load_map_add(LoadMap *m, SetupArena *memory, int64_t step, const double *load, int layers)
{
    if (!m->layers) {
        TRY(setup_array(memory, (int64_t)layers * LOAD_MAP_BINS, &m->sum));
        m->layers = layers;
        m->stride = 1;
    }
    if (layers != m->layers) return ERR_OK;
    if (!m->bins || m->steps[m->bins - 1] == m->stride) begin_bin(m);
    const int b = m->bins - 1;
    m->step[b] = step;
    m->steps[b]++;
    for (int l = 0; l < layers; l++) row_of(m, l)[b] += load[l];
    return ERR_OK;
}
