/* See jobs.h. Job i goes to slot i % slots, which is free once the caller asks for job i - slots + 1. */
#include "hf/jobs.h"

#include <pthread.h>

enum { SPARE = 2 };

typedef struct {
    char *data;
    int64_t size_bytes;
    bool done;
    Err err;
    ErrKept why;
} Slot;

typedef struct {
    Jobs *jobs;
    char *scratch;
    pthread_t thread;
} Worker;

struct Jobs {
    JobsSpec spec;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Slot *slots;
    Worker *workers;
    int slot_count, started;
    int64_t begun, taken; /* jobs that a thread has; that the caller has asked for */
    bool stop;
};

static void *worker_main(void *arg)
{
    const Worker *w = arg;
    Jobs *j = w->jobs;
    pthread_mutex_lock(&j->lock);
    while (!j->stop && j->begun < j->spec.count) {
        if (j->begun >= j->taken + j->slot_count - 1) {
            pthread_cond_wait(&j->changed, &j->lock);
            continue;
        }
        const int64_t index = j->begun++;
        Slot *s = &j->slots[index % j->slot_count];
        pthread_mutex_unlock(&j->lock);
        s->err = j->spec.work(j->spec.user, index, s->data, w->scratch, &s->size_bytes);
        if (s->err) err_keep(&s->why);
        pthread_mutex_lock(&j->lock);
        s->done = true;
        j->stop |= s->err != ERR_OK;
        pthread_cond_broadcast(&j->changed);
    }
    pthread_mutex_unlock(&j->lock);
    return NULL;
}

Err jobs_open(const JobsSpec *spec, SetupArena *a, Jobs **out)
{
    Jobs *j;
    *out = NULL;
    TRY(setup_array(a, 1, &j));
    j->spec = *spec;
    j->begun = j->taken = spec->first;
    j->slot_count = spec->threads + SPARE;
    TRY(setup_array(a, j->slot_count, &j->slots));
    TRY(setup_array(a, spec->threads, &j->workers));
    for (int i = 0; i < j->slot_count; i++) TRY(setup_array(a, spec->slot_bytes, &j->slots[i].data));
    for (int i = 0; i < spec->threads; i++) TRY(setup_array(a, spec->slot_bytes, &j->workers[i].scratch));
    pthread_mutex_init(&j->lock, NULL);
    pthread_cond_init(&j->changed, NULL);
    *out = j;
    for (; j->started < spec->threads; j->started++) {
        Worker *w = &j->workers[j->started];
        w->jobs = j;
        const int error = pthread_create(&w->thread, NULL, worker_main, w);
        if (error) return err_no_thread("converting tensors", error);
    }
    return ERR_OK;
}

/* Jobs begin in order, so the one that is waited for is done, or stopped by one that failed and began no later. */
static Err failure(const Jobs *j)
{
    for (int i = 0; i < j->slot_count; i++)
        if (j->slots[i].done && j->slots[i].err) return err_again(&j->slots[i].why, j->slots[i].err);
    return ERR_OK;
}

Err jobs_next(Jobs *j, const void **data, int64_t *size_bytes)
{
    pthread_mutex_lock(&j->lock);
    if (j->taken > j->spec.first) j->slots[(j->taken - 1) % j->slot_count].done = false;
    Slot *s = &j->slots[j->taken++ % j->slot_count];
    pthread_cond_broadcast(&j->changed);
    while (!s->done && !j->stop) pthread_cond_wait(&j->changed, &j->lock);
    const Err err = j->stop ? failure(j) : ERR_OK;
    pthread_mutex_unlock(&j->lock);
    *data = s->data;
    *size_bytes = s->size_bytes;
    return err;
}

void jobs_close(Jobs *j)
{
    if (!j) return;
    pthread_mutex_lock(&j->lock);
    j->stop = true;
    pthread_cond_broadcast(&j->changed);
    pthread_mutex_unlock(&j->lock);
    for (int i = 0; i < j->started; i++) pthread_join(j->workers[i].thread, NULL);
    pthread_mutex_destroy(&j->lock);
    pthread_cond_destroy(&j->changed);
}
