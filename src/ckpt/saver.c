/*
 * Saving while training goes on. The stream's thread copies what this rank will write (the snapshot, in the order of
 * its shard) and a thread of our own does the rest, by the same code that writes straight from the device (save.c):
 * shard, agreement of the ranks, commit, removal of what is old. It touches the Ckpt, the snapshot and a communicator
 * that nobody else uses, and neither the device nor the store.
 *
 * One save is in flight at most. Whoever starts the next one has collected the outcome of the one before, so the two
 * threads never use the Ckpt at a time; the lock is for handing it over.
 */
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "ckpt/pieces.h"

/* ---- the snapshot ---- */

Err ckpt_snapshot_bytes(const ParamSet *params, const World *world, int64_t *bytes)
{
    Ckpt c = { .o = { .params = params, .world = (World *)world }, .states = CKPT_STATES };
    SetupArena a;
    setup_init(&a);
    Err err = pieces_open(&c, &a);
    if (!err) *bytes = pieces_bytes(&c, world->rank);
    setup_release(&a);
    return err;
}

static Err take_snapshot(Ckpt *c)
{
    const GradStats *stats = c->o.params->stats;
    char *at = c->snapshot;
    PieceIter it;
    if (c->o.source) return ERR_OK;
    TRY(device_read(c->o.stream, c->shifts, stats->shift.data, tensor_bytes(stats->shift)));
    if (!at) return ERR_OK;
    for (piece_first(&it, c, c->o.world->rank); piece_next(&it);)
        for (int i = 0; i < it.count; i++) {
            const int64_t n = box_count(it.boxes[i].box) * dtype_size(piece_dtype(&it));
            TRY(device_read(c->o.stream, at, piece_data(&it, i), n));
            at += n;
        }
    return ERR_OK;
}

/* ---- one save ---- */

static void run_save(Ckpt *c)
{
    CkptOutcome *o = &c->saver.outcome;
    const double begin = clock_s();
    o->step = c->saver.meta.step;
    o->err = save_now(c, &c->saver.meta);
    if (o->err) err_keep(&o->why);
    o->seconds = clock_s() - begin;
}

static void *saver_main(void *arg)
{
    Ckpt *c = arg;
    CkptSaver *s = &c->saver;
    log_set_rank(c->o.world->rank, c->o.world->size);
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (s->state != SAVER_ASKED && !s->closing) pthread_cond_wait(&s->changed, &s->lock);
        if (s->state != SAVER_ASKED) break;
        pthread_mutex_unlock(&s->lock);
        run_save(c);
        pthread_mutex_lock(&s->lock);
        s->state = SAVER_ENDED;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static Err open_thread(Ckpt *c, SetupArena *setup)
{
    CkptSaver *s = &c->saver;
    if (!c->o.async || c->o.stream->dev->is_null) return ERR_OK;
    const int64_t bytes = pieces_bytes(c, c->o.world->rank);
    TRY(setup_array(setup, bytes, &c->snapshot));
    memset(c->snapshot, 0xFF, (size_t)bytes); /* its pages are there before the first save */
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    const int error = pthread_create(&s->thread, NULL, saver_main, c);
    if (error) return err_no_thread("writing checkpoints", error);
    s->open = true;
    return ERR_OK;
}

Err ckpt_open(Ckpt *c, CkptOptions o, SetupArena *setup)
{
    *c = (Ckpt){ .o = o, .states = o.params->stores->trained ? CKPT_STATES : 1 };
    ASSERT(o.comm || !o.async || o.world->size == 1);
    if (!o.comm) c->o.comm = &o.world->host;
    TRY(save_open(c, setup));
    return open_thread(c, setup);
}

void ckpt_close(Ckpt *c)
{
    CkptSaver *s = &c->saver;
    if (!s->open) return;
    pthread_mutex_lock(&s->lock);
    s->closing = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    s->open = false;
}

Err ckpt_start(Ckpt *c, const CkptMeta *meta)
{
    CkptSaver *s = &c->saver;
    ASSERT(s->state == SAVER_IDLE);
    if (c->o.stream->dev->is_null) return ERR_OK;
    TRY(take_snapshot(c));
    s->meta = *meta;
    if (!s->open) {
        run_save(c);
        s->state = SAVER_ENDED;
        return ERR_OK;
    }
    pthread_mutex_lock(&s->lock);
    s->state = SAVER_ASKED;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    return ERR_OK;
}

bool ckpt_collect(Ckpt *c, bool wait, CkptOutcome *out)
{
    CkptSaver *s = &c->saver;
    if (s->open) pthread_mutex_lock(&s->lock);
    while (wait && s->state == SAVER_ASKED) pthread_cond_wait(&s->changed, &s->lock);
    const bool ended = s->state == SAVER_ENDED;
    if (ended) {
        *out = s->outcome;
        s->state = SAVER_IDLE;
    }
    if (s->open) pthread_mutex_unlock(&s->lock);
    return ended;
}
