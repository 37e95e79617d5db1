/*
 * Evaluation (trainer.h): passes that change nothing. They run the action list of forwards on batches of samples, of
 * which the last may be filled in part, and give the mean loss, or what each row came to.
 *
 * A row is what one rank of dp, pp and cp computes, and of its columns a rank of tp has its part. The hosts put the
 * rows together: each writes what it has into zeros, and integers are summed over all ranks.
 */
#include <math.h>
#include <string.h>

#include "base/mathx.h"
#include "engine/expert_load.h"
#include "engine/trainer_open.h"

/* Takes the next samples of an evaluation, as many micro-batches as they fill on all ranks; the last may be filled in
 * part. */
static void take_eval_batch(Trainer *t, int64_t first, int64_t samples)
{
    const int64_t whole = trainer_batch_spec(t).B * t->world->grid.dp;
    trainer_take_batch(t, first, (samples + whole - 1) / whole * whole);
    t->serving.counting = samples;
}

/* Weights may have changed since the last one; between its batches they do not. */
static void begin_evaluation(Trainer *t)
{
    for (int r = 0; r < t->params.replicas; r++) param_store_forget(&t->stores[r]);
}

/* Loss, counted tokens and non-finite flag of the batch that was taken. */
static Err eval_batch(Trainer *t, int64_t sums[3])
{
    Stream *stream = &t->device.stream;
    Tensor device_sums = t->executor.sums;
    bool *retry_in_pieces = &t->executor.ctx.mode.retry_in_pieces, within = false;
    while (!within) {
        TRY(device_zero(stream, device_sums.data, tensor_bytes(device_sums)));
        TRY(device_zero(stream, t->stats.flags.data, tensor_bytes(t->stats.flags)));
        TRY(executor_run(&t->executor, &t->parts.forward.rank[t->world->pp_rank], false));
        TRY(expert_load_within_limit(t, &within));
        if (!within && !t->spec.model.moe.capacity.redo) return expert_load_over_limit(t, false);
        *retry_in_pieces = !within;
    }
    TRY(optim_sum_loss(&t->optim));
    return device_read(stream, sums, device_sums.data, 3 * (int64_t)sizeof *sums);
}

/* A batch's sum fits 64 bits, that of an evaluation need not: nats and their fraction are added apart. */
Err trainer_eval(Trainer *t, TokenSource source, int64_t first, int64_t samples, double *loss, int64_t *counted)
{
    const int64_t one = (int64_t)1 << LOSS_FIXED_BITS, most = t->spec.global_batch;
    int64_t sums[3] = { 0 }, nats = 0, rest = 0, bad = 0;
    t->serving.source = source;
    *counted = 0;
    begin_evaluation(t);
    for (int64_t done = 0; done < samples; done += most) {
        take_eval_batch(t, first + done, samples - done < most ? samples - done : most);
        TRY(eval_batch(t, sums));
        rest += sums[0] % one;
        nats += sums[0] / one + rest / one;
        rest %= one;
        *counted += sums[1];
        bad |= sums[2];
    }
    *loss = bad || !*counted ? NAN : ((double)nats + (double)rest / (double)one) / (double)*counted;
    return ERR_OK;
}

/* ---- rows ---- */

/* One row of logits to the host, in fp32; to NULL: only what memory that takes is seen. */
static Err read_row(Trainer *t, Tensor row, float *to, int64_t count)
{
    ArenaMark mark = arena_mark(&t->memory.scratch);
    Tensor wide = tensor_reshape(row, row.dim[1]);
    if (row.dtype != F32) {
        TRY(tensor_new(&t->memory.scratch, &wide, F32, row.dim[1]));
        TRY(op(&t->device.stream, cast, .y = wide, .x = tensor_reshape(row, row.dim[1])));
    }
    if (to && count > 0) TRY(device_read(&t->device.stream, to, wide.data, count * (int64_t)sizeof *to));
    arena_release(&t->memory.scratch, mark);
    return ERR_OK;
}

/* The unit's rows among those that were asked for. */
static Err read_logits(Trainer *t, const ExecutorSlot *slot)
{
    const Batch *b = &slot->batch;
    const Tensor logits = save_get(&t->executor.ctx, slot->save.head.logits);
    const int64_t vocab = t->spec.model.vocab, columns = logits.dim[1], first = columns * t->world->tp.rank;
    const int64_t own = vocab - first < columns ? vocab - first : columns,
                  positions = t->device.is_null ? b->seq : t->rows.positions;
    for (int64_t n = 0; n < (b->B - b->filling) * b->T; n++) {
        const int64_t sample = b->first + n / b->T, position = spans_position(b->span, n % b->T);
        float *to = t->rows.logits ? t->rows.logits + (sample * positions + position) * vocab + first : NULL;
        if (position < positions) TRY(read_row(t, tensor_row_slice(logits, n, 1), to, own));
    }
    return ERR_OK;
}

/* The unit's rows, which all ranks of tp have, into the scores of the batch: staging is [2 + tp, N]. */
static Err read_scores(Trainer *t, const ExecutorSlot *slot)
{
    const Batch *b = &slot->batch;
    const int64_t N = b->B * b->T, tp = t->world->tp.size;
    float *loss = t->rows.staging, *target = loss + N, *largest = target + tp * N;
    if (t->world->tp.rank || t->device.is_null) return ERR_OK;
    TRY(device_read(&t->device.stream, loss, b->scores.data, tensor_bytes(b->scores)));
    TRY(device_read(&t->device.stream, largest, save_get(&t->executor.ctx, slot->save.head.row_max).data,
                    N * (int64_t)sizeof *largest));
    for (int64_t n = 0; n < (b->B - b->filling) * b->T; n++) {
        RowScore *to = t->rows.scores + (b->first + n / b->T) * b->seq + spans_position(b->span, n % b->T);
        float logit = 0;
        for (int64_t r = 0; r < tp; r++) logit += target[r * N + n];
        *to = (RowScore){ loss[n], !(logit >= largest[n]) };
    }
    return ERR_OK;
}

Err trainer_open_rows(Trainer *t)
{
    const TrainSpec *s = &t->spec;
    const BatchSpec b = trainer_batch_spec(t);
    if (!s->purpose.scores || t->device.is_null) return ERR_OK;
    TRY(setup_array(&t->memory.setup, s->global_batch * s->model.seq, &t->rows.room));
    return setup_array(&t->memory.setup, (1 + b.scores) * b.B * b.seq, &t->rows.staging);
}

Err trainer_hook_rows(void *trainer, const ExecutorSlot *slot)
{
    Trainer *t = trainer;
    if (t->spec.purpose.logits) return read_logits(t, slot);
    return t->rows.scores ? read_scores(t, slot) : ERR_OK;
}

Err trainer_scores(Trainer *t, TokenSource source, int64_t first, int64_t samples, const RowScore **scores)
{
    const int64_t rows = samples * t->spec.model.seq;
    int64_t sums[3];
    ASSERT(t->spec.purpose.scores && samples <= t->spec.global_batch);
    if (t->rows.room) memset(t->rows.room, 0, (size_t)rows * sizeof *t->rows.room);
    t->serving.source = source;
    *scores = t->rows.scores = t->rows.room;
    t->batches.requests = true;
    if (!first) begin_evaluation(t);
    take_eval_batch(t, first, samples);
    Err err = eval_batch(t, sums);
    t->batches.requests = false;
    t->rows.scores = NULL;
    TRY(err);
    return comm_sum_i64(&t->world->host, &t->device.stream, (int64_t *)(void *)t->rows.room, rows, NULL);
}

int64_t trainer_row_samples(const Trainer *t) { return trainer_batch_spec(t).B * t->world->grid.dp; }

Err trainer_row_logits(Trainer *t, TokenSource source, int64_t first, int64_t samples, int64_t positions, float *logits)
{
    const int64_t words = (samples * positions * t->spec.model.vocab + 1) / 2;
    int64_t sums[3];
    ASSERT(t->spec.purpose.logits && samples <= trainer_row_samples(t));
    memset(logits, 0, (size_t)words * sizeof(int64_t));
    t->serving.source = source;
    t->rows = (RowsOut){ logits, positions };
    if (!first) begin_evaluation(t);
    take_eval_batch(t, first, samples);
    Err err = eval_batch(t, sums);
    t->rows.logits = NULL;
    TRY(err);
    return comm_sum_i64(&t->world->host, &t->device.stream, (int64_t *)(void *)logits, words, NULL);
}
