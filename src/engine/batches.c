/* See batches.h. */
#include "engine/batches.h"

#include <string.h>

Err batch_alloc(const BatchSpec *spec, Batch *b, Arena *state)
{
    const int64_t T = spec->span.count[0] + spec->span.count[1], N = spec->B * T;
    *b = (Batch){ .B = spec->B, .T = T, .seq = spec->seq, .span = spec->span };
    TRY(tensor_new(state, &b->token, I32, N));
    TRY(tensor_new(state, &b->target, I32, N));
    if (spec->further) {
        TRY(tensor_new(state, &b->further_token, I32, spec->further, N));
        TRY(tensor_new(state, &b->further_target, I32, spec->further, N));
    }
    TRY(tensor_new(state, &b->position, I32, N));
    if (spec->documents.restart) {
        TRY(tensor_new(state, &b->doc, I32, b->B, b->T));
        TRY(tensor_new(state, &b->doc_position, I32, N));
    } else if (spec->scores) {
        TRY(tensor_new(state, &b->apart[0], I32, b->B, b->T));
        TRY(tensor_new(state, &b->apart[1], I32, N));
    }
    if (spec->scores) TRY(tensor_new(state, &b->scores, F32, spec->scores, N));
    TRY(tensor_new(state, &b->sample, I64, N));
    return tensor_new(state, &b->samples, I64, b->B);
}

Err batches_init(BatchMaker *m, const BatchSpec *spec, bool null_device, SetupArena *setup)
{
    *m = (BatchMaker){ .spec = *spec };
    if (null_device) return ERR_OK;
    TRY(setup_array(setup, spec->B * (spec->seq + 1), &m->tokens));
    if (spec->documents.restart || spec->scores) TRY(setup_array(setup, spec->B * spec->seq, &m->doc));
    if (spec->scores) TRY(setup_array(setup, spec->B * spec->seq, &m->counts));
    return setup_array(setup, 2 * spec->B * spec->seq, &m->rows);
}

static Err write_rows(Stream *s, Tensor dst, const void *src)
{
    return device_write(s, dst.data, src, tensor_bytes(dst));
}

/* Targets that follow an end of document are nobody's to predict: left out, as Megatron's eod_mask_loss does. */
static void leave_out_ends(const BatchMaker *m, const Batch *b, int32_t *targets)
{
    for (int64_t n = 0; n < b->B * b->T; n++) {
        const int64_t sample = n / b->T, position = spans_position(b->span, n - sample * b->T);
        if (m->tokens[sample * (b->seq + 1) + position] == m->spec.documents.eod) targets[n] = -1;
    }
}

static void leave_out_contexts(const BatchMaker *m, const Batch *b, int32_t *targets)
{
    for (int64_t n = 0; n < b->B * b->T; n++) {
        const int64_t sample = n / b->T, position = spans_position(b->span, n - sample * b->T);
        if (!m->counts[sample * b->seq + position]) targets[n] = -1;
    }
}

/* Behind each end of document a new one begins; a sample's first position always begins one. */
static void find_documents(const BatchMaker *m, const Batch *b)
{
    for (int64_t i = 0; i < b->B; i++) {
        const int32_t *token = m->tokens + i * (b->seq + 1);
        int32_t *doc = m->doc + i * b->seq, first = 0;
        for (int32_t p = 0; p < b->seq; p++) {
            doc[p] = first;
            if (token[p] == m->spec.documents.eod) first = p + 1;
        }
    }
}

/* The rows' documents, and their positions in these. */
static Err fill_documents(BatchMaker *m, Stream *s, const Batch *b)
{
    if (!m->requests) find_documents(m, b);
    for (int from_start = 0; from_start < 2; from_start++) {
        for (int64_t n = 0; n < b->B * b->T; n++) {
            const int64_t sample = n / b->T, position = spans_position(b->span, n - sample * b->T);
            const int32_t first = m->doc[sample * b->seq + position];
            m->rows[n] = from_start ? (int32_t)position - first : first;
        }
        TRY(write_rows(s, from_start ? b->doc_position : b->doc, m->rows));
    }
    return ERR_OK;
}

/* Whether what follows the token at `at` is for the row of position p before it to predict. */
static bool counts_further(const BatchMaker *m, int64_t sample, int64_t p, int64_t at)
{
    const int64_t seq = m->spec.seq;
    if (m->spec.documents.mask && m->tokens[sample * (seq + 1) + at] == m->spec.documents.eod) return false;
    return !m->spec.documents.restart || m->doc[sample * seq + at] == m->doc[sample * seq + p];
}

/*
 * Fills in, for depth 1, 2, ..., the tokens that the rows look up and those that they are to predict. A row whose
 * target does not count looks up its token all the same: later rows see it, and it passes experts beside others.
 */
static Err fill_further(BatchMaker *m, Stream *s, const Batch *b, int64_t count)
{
    const int64_t N = b->B * b->T;
    for (int64_t i = 0; i < 2 * b->further_token.dim[0]; i++) {
        const int depth = (int)(i / 2) + 1, target = i % 2;
        const Tensor to = target ? b->further_target : b->further_token;
        for (int64_t n = 0; n < N; n++) {
            const int64_t sample = n / b->T, p = spans_position(b->span, n % b->T), at = p + depth;
            const bool there = sample < count && at < b->seq;
            const bool taken = there && (!target || counts_further(m, sample, p, at));
            m->rows[n] = taken ? m->tokens[sample * (b->seq + 1) + at + target] : -1;
        }
        TRY(write_rows(s, tensor_row_slice(to, depth - 1, 1), m->rows));
    }
    return ERR_OK;
}

/* One number a position -> one a row: those of the sample's positions that the batch has. Returns the next row. */
static int32_t *copy_positions(const Batch *b, const int32_t *from, int32_t *to)
{
    for (int s = 0; s < 2; to += b->span.count[s++])
        memcpy(to, from + b->span.first[s], (size_t)b->span.count[s] * sizeof *to);
    return to;
}

static Err fill_positions(Stream *s, Batch *b, int32_t *rows)
{
    int32_t *at = rows;
    if (!memcmp(&b->position_span, &b->span, sizeof b->span)) return ERR_OK;
    for (int64_t i = 0; i < b->B; i++)
        for (int k = 0; k < 2; k++)
            for (int64_t p = 0; p < b->span.count[k]; p++) *at++ = (int32_t)(b->span.first[k] + p);
    b->position_span = b->span;
    return write_rows(s, b->position, rows);
}

/* tokens [B][seq + 1] -> the row tensors of a batch: the GPU may be waiting, so without a division for each row. */
Err batch_fill(BatchMaker *m, Stream *s, Batch *b, int64_t first_sample, int64_t count)
{
    b->filling = b->B - count;
    if (!m->spec.documents.restart) {
        b->doc = m->requests ? b->apart[0] : (Tensor){ 0 };
        b->doc_position = m->requests ? b->apart[1] : (Tensor){ 0 };
    }
    if (s->dev->is_null) return ERR_OK;
    int64_t N = b->B * b->T, width = b->seq + 1;
    int32_t *rows = m->rows;
    int64_t *samples = (int64_t *)m->rows;
    memset(m->tokens + count * width, 0, (size_t)((b->B - count) * width) * sizeof *m->tokens);
    for (int shift = 0; shift < 2; shift++) {
        int32_t *at = rows;
        for (int64_t i = 0; i < b->B; i++) at = copy_positions(b, m->tokens + i * width + shift, at);
        if (shift && m->requests) leave_out_contexts(m, b, rows);
        else if (shift && m->spec.documents.mask) leave_out_ends(m, b, rows);
        for (int64_t n = count * b->T; shift && n < N; n++) rows[n] = -1;
        TRY(write_rows(s, shift ? b->target : b->token, rows));
    }
    TRY(fill_positions(s, b, rows));
    if (b->doc.data) TRY(fill_documents(m, s, b));
    if (b->further_token.data && !m->requests) TRY(fill_further(m, s, b, count));
    for (int64_t i = 0; i < b->B; i++)
        for (int64_t n = 0; n < b->T; n++) samples[i * b->T + n] = first_sample + i;
    TRY(write_rows(s, b->sample, samples));
    for (int64_t n = 0; n < b->B; n++) samples[n] = first_sample + n;
    return write_rows(s, b->samples, samples);
}

int64_t batch_bytes(const Batch *b)
{
    const Tensor all[] = { b->token,          b->target,   b->further_token,
                           b->further_target, b->position, b->doc_position,
                           b->sample,         b->samples,  b->doc };
    int64_t bytes = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].data) bytes += tensor_bytes(all[i]);
    return bytes;
}

Batch batch_part(const Batch *whole, int64_t past, int64_t n)
{
    Batch part = *whole;
    part.T = n;
    part.span = spans_run(past, n);
    part.token = tensor_row_slice(whole->token, 0, n);
    part.target = tensor_row_slice(whole->target, 0, n);
    part.position = tensor_row_slice(whole->position, 0, n);
    part.sample = tensor_row_slice(whole->sample, 0, n);
    if (whole->doc.data) {
        part.doc_position = tensor_row_slice(whole->doc_position, 0, n);
        part.doc = tensor_of(whole->doc.data, I32, 1, n);
    }
    return part;
}
