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
    int64_t slice, row; /* samples a slice, tokens a sample */
    Window present, next;
    LoaderStats stats;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool busy, stop; /* under lock; while busy, `next` belongs to the thread */
};

int64_t loader_slice(const LoaderOptions *o, int64_t batch_position)
{
    return batch_position + o->global_batch / o->dp * o->dp_rank;
}

static Err fetch(const Loader *l, int64_t first, int64_t count, int32_t *tokens)
{
    for (int64_t i = 0; i < count; i++) TRY(dataset_get(l->o.dataset, first + i, tokens + i * l->row));
    return ERR_OK;
}

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
        bool ok = fetch(l, l->next.first, l->slice, l->next.tokens) == ERR_OK;
        pthread_mutex_lock(&l->lock);
        l->next.count = ok ? l->slice : 0;
        l->busy = false;
        pthread_cond_broadcast(&l->changed);
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

static void start_prefetch(Loader *l, int64_t first)
{
    pthread_mutex_lock(&l->lock);
    l->next.first = first;
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

int64_t loader_bytes(int64_t samples, int64_t seq)
{
    return 2 * samples * (seq + 1) * (int64_t)sizeof(int32_t);
}

static Err open_parts(Loader *l)
{
    const LoaderOptions *o = &l->o;
    l->slice = o->global_batch / o->dp;
    l->row = dataset_seq(o->dataset) + 1;
    TRY(setup_array(&l->mem, l->slice * l->row, &l->present.tokens));
    TRY(setup_array(&l->mem, l->slice * l->row, &l->next.tokens));
    l->next.first = loader_slice(o, o->first_position);
    l->busy = true;
    if (pthread_create(&l->thread, NULL, prefetch, l) != 0)
        return err_set(ERR_MEMORY, "cannot start the thread that reads data ahead");
    return ERR_OK;
}

Err loader_open(const LoaderOptions *o, Loader **out)
{
    ASSERT(o->dp >= 1 && o->dp_rank >= 0 && o->dp_rank < o->dp && o->first_position >= 0);
    ASSERT(o->global_batch >= 1 && o->global_batch % o->dp == 0);
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

/* The next slice becomes the present one, and its successor is started on. */
static void advance(Loader *l)
{
    Window old = l->present;
    l->present = l->next;
    l->next = old;
    start_prefetch(l, l->present.first + l->o.global_batch);
}

Err loader_get(Loader *l, int64_t first_position, int64_t count, int32_t *tokens)
{
    ASSERT(first_position >= 0 && count >= 0);
    if (!covers(&l->present, first_position, count)) {
        /* next.first is ours to read: only this thread changes it */
        bool ahead = first_position >= l->next.first && first_position + count <= l->next.first + l->slice;
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
