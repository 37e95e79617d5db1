#include "data/loader.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/arena.h"

/* Samples [first, first + count) of the data set; count 0: nothing (not fetched, or fetching
 * failed). */
typedef struct {
    int64_t first, count;
    int32_t *tokens;
} Window;

struct Loader {
    SetupArena mem;
    LoaderOptions o;
    int64_t row;            /* tokens a sample */
    int64_t step, position; /* the batch that `next` belongs to: its number, and where it begins */
    Window present, next;
    LoaderStats stats;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool busy, stop; /* under lock; while busy, `next` belongs to the thread */
};

static Err fetch(const Loader *l, int64_t first, int64_t count, int32_t *tokens)
{
    for (int64_t i = 0; i < count; i++) TRY(dataset_get(l->o.dataset, first + i, tokens + i * l->row));
    return ERR_OK;
}

/* How many samples `next` has. */
static int64_t window_samples(const Loader *l) { return batch_ramp_at(&l->o.ramp, l->step) / l->o.dp; }

/* Fills `next` whenever it is told to. A failure leaves it empty: loader_get then meets the same
 * error itself and can report it, as failures are recorded per thread. */
static void *prefetch(void *arg)
{
    Loader *l = arg;
    pthread_mutex_lock(&l->lock);
    while (!l->stop) {
        if (!l->busy) {
            pthread_cond_wait(&l->changed, &l->lock);
            continue;
        }
        pthread_mutex_unlock(&l->lock);
        const int64_t count = window_samples(l);
        bool ok = fetch(l, l->next.first, count, l->next.tokens) == ERR_OK;
        pthread_mutex_lock(&l->lock);
        l->next.count = ok ? count : 0;
        l->busy = false;
        pthread_cond_broadcast(&l->changed);
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

/* Fetches the batch behind that of `next`. */
static void start_prefetch(Loader *l)
{
    pthread_mutex_lock(&l->lock);
    l->position += batch_ramp_at(&l->o.ramp, l->step++);
    l->next.first = l->position + window_samples(l) * l->o.dp_rank;
    l->next.count = 0;
    l->busy = true;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
}

static void wait_prefetch(Loader *l)
{
    pthread_mutex_lock(&l->lock);
    while (l->busy) pthread_cond_wait(&l->changed, &l->lock);
    pthread_mutex_unlock(&l->lock);
}

int64_t loader_bytes(int64_t samples, int64_t seq) { return 2 * samples * (seq + 1) * (int64_t)sizeof(int32_t); }

static Err open_parts(Loader *l)
{
    const LoaderOptions *o = &l->o;
    const int64_t most = batch_ramp_most(&o->ramp) / o->dp;
    l->row = dataset_seq(o->dataset) + 1;
    TRY(setup_array(&l->mem, most * l->row, &l->present.tokens));
    TRY(setup_array(&l->mem, most * l->row, &l->next.tokens));
    l->step = o->first_step;
    l->position = o->first_position;
    l->next.first = l->position + window_samples(l) * o->dp_rank;
    l->busy = true;
    const int error = pthread_create(&l->thread, NULL, prefetch, l);
    return error ? err_no_thread("reading data ahead", error) : ERR_OK;
}

Err loader_open(const LoaderOptions *o, Loader **out)
{
    ASSERT(o->dp >= 1 && o->dp_rank >= 0 && o->dp_rank < o->dp && o->first_position >= 0);
    ASSERT(o->ramp.count >= 1 && o->first_step >= 1);
    for (int i = 0; i < o->ramp.count; i++) ASSERT(o->ramp.part[i].batch % o->dp == 0);
    Loader *l = calloc(1, sizeof *l);
    if (!l) return err_set(ERR_MEMORY, "no memory for a loader");
    l->o = *o;
    setup_init(&l->mem);
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->changed, NULL);
    Err err = open_parts(l);
    if (err) {
        setup_release(&l->mem);
        free(l);
        return err;
    }
    *out = l;
    return ERR_OK;
}

void loader_close(Loader *l)
{
    if (!l) return;
    pthread_mutex_lock(&l->lock);
    l->stop = true;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
    pthread_join(l->thread, NULL);
    pthread_cond_destroy(&l->changed);
    pthread_mutex_destroy(&l->lock);
    setup_release(&l->mem);
    free(l);
}

static bool covers(const Window *w, int64_t first, int64_t count)
{
    return first >= w->first && first + count <= w->first + w->count;
}

/* The next window becomes the present one, and its successor is started on. */
static void advance(Loader *l)
{
    Window old = l->present;
    l->present = l->next;
    l->next = old;
    start_prefetch(l);
}

Err loader_get(Loader *l, int64_t first_position, int64_t count, int32_t *tokens)
{
    ASSERT(first_position >= 0 && count >= 0);
    if (!covers(&l->present, first_position, count)) {
        /* next.first is ours to read: only this thread changes it */
        bool ahead = first_position >= l->next.first && first_position + count <= l->next.first + window_samples(l);
        if (ahead) wait_prefetch(l);
        if (ahead && covers(&l->next, first_position, count)) advance(l);
    }
    if (!covers(&l->present, first_position, count)) {
        l->stats.fetched_samples += count;
        return fetch(l, first_position, count, tokens);
    }
    l->stats.copied_samples += count;
    memcpy(tokens, l->present.tokens + (first_position - l->present.first) * l->row,
           (size_t)(count * l->row) * sizeof *tokens);
    return ERR_OK;
}

LoaderStats loader_stats(const Loader *l) { return l->stats; }
