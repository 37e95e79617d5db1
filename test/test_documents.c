/*
 * Documents kept apart (data.reset_at_eod) and ends of documents left out of the loss (data.mask_eod): the rows of
 * a batch against Megatron's procedure, and training on samples of several documents against training on the same
 * documents one by one.
 */
#include "test.h"
#include "tiny.h"

enum { EOD = 0, SEQ = TINY_SEQ };

/* Documents of one sample, without their ends; the last one is cut off by the sample's. */
static const int lengths[][5] = { { 9, 1, 20, 13, 17 }, { 0, 0, 30, 31 }, { 64 }, { 15, 16, 15, 15 }, { 63, 1 } };
enum { SAMPLES = sizeof lengths / sizeof *lengths };

/* A sample of seq + 1 tokens: documents, each but the last followed by EOD. */
static Err joined(void *user, int64_t first, int64_t count, int32_t *out)
{
    (void)user;
    for (int64_t s = first; s < first + count; s++, out += SEQ + 1) {
        TRY(tiny_tokens(NULL, s, 1, out));
        for (int i = 0; i <= SEQ; i++) out[i] += out[i] == EOD;
        for (int d = 0, at = 0; d < 5; d++) {
            at += lengths[s % SAMPLES][d];
            if (at < SEQ) out[at++] = EOD;
        }
    }
    return ERR_OK;
}

typedef struct {
    World world;
    Trainer t;
} Rig;

static void open_rig(Rig *r, const TrainSpec *spec)
{
    MemoryPlan plan;
    OK(trainer_plan(spec, (Grid){ .tp = 1, .dp = 1 }, 0, &plan));
    OK(world_open_self(&r->world));
    OK(trainer_open(&r->t, spec, &r->world, &plan));
}

static void close_rig(Rig *r)
{
    trainer_close(&r->t);
    world_close(&r->world);
}

static TrainSpec plain(TrainSpec s)
{
    s.model.dropout = s.model.attention_dropout = 0; /* drawn by position in the sample */
    s.micro_batch = 1;
    s.global_batch = SAMPLES;
    s.documents.eod = EOD;
    return s;
}

/* ---- the rows ---- */

/* Megatron's procedure: position ids behind each end of document are lowered to begin at 0 again. */
static void check_rows(const Batch *b, const int32_t *tokens, int row, int sample, bool mask)
{
    int32_t ids[SEQ], first[SEQ], before = 0;
    const int32_t *token = b->token.data, *target = b->target.data;
    for (int p = 0; p < SEQ; p++) ids[p] = p, first[p] = 0;
    for (int p = 0; p < SEQ; p++) {
        if (tokens[p] != EOD) continue;
        for (int q = p + 1; q < SEQ; q++) ids[q] -= p + 1 - before, first[q] = p + 1;
        before = p + 1;
    }
    for (int i = 0; i < b->T; i++) {
        const int64_t p = spans_position(b->span, i), n = row * b->T + i;
        const bool out = mask && tokens[p] == EOD;
        CHECK_MSG(token[n] == tokens[p] && target[n] == (out ? -1 : tokens[p + 1]), "sample %d, position %d", sample,
                  (int)p);
        CHECK(((int32_t *)b->position.data)[n] == p);
        CHECK_MSG(((int32_t *)b->doc_position.data)[n] == ids[p] && ((int32_t *)b->doc.data)[n] == first[p],
                  "sample %d, position %d", sample, (int)p);
    }
}

/* The token and the target that multi-token prediction has for row p at a depth. There is no token behind the sample's
 * end. There is no target where an end of document lies before the token, or where the token is one itself and
 * `mask`. */
static void check_further(const Batch *b, const int32_t *tokens, int row, int depth, bool mask)
{
    const int32_t *token = (int32_t *)b->further_token.data + (depth - 1) * b->B * b->T;
    const int32_t *target = (int32_t *)b->further_target.data + (depth - 1) * b->B * b->T;
    for (int i = 0; i < b->T; i++) {
        const int64_t p = spans_position(b->span, i), n = row * b->T + i;
        const bool there = p + depth < SEQ;
        bool counts = there && !(mask && tokens[p + depth] == EOD);
        for (int64_t q = p; counts && q < p + depth; q++) counts = tokens[q] != EOD;
        CHECK_MSG(token[n] == (there ? tokens[p + depth] : -1) && target[n] == (counts ? tokens[p + depth + 1] : -1),
                  "sample %d, position %d, depth %d", row, (int)p, depth);
    }
}

TEST(rows_as_megatron_makes_them)
{
    static const Spans spans[] = { { { 0, 0 }, { SEQ, 0 } }, { { 48, 0 }, { 16, 48 } }, { { 32, 0 }, { 32, 32 } } };
    int32_t tokens[SEQ + 1];
    for (int mask = 0; mask < 2; mask++)
        for (int k = 0; k < 3; k++) {
            Rig r;
            TrainSpec s = plain(tiny_further(tiny_llama(), 3));
            s.documents.restart = true, s.documents.mask = mask;
            s.micro_batch = SAMPLES;
            open_rig(&r, &s);
            r.t.serving.source = (TokenSource){ NULL, joined };
            Batch *b = &r.t.executor.stages[0].slots[0].batch;
            b->span = spans[k];
            OK(r.t.executor.hooks.batch(&r.t, 0, b));
            for (int i = 0; i < SAMPLES; i++) {
                OK(joined(NULL, i, 1, tokens));
                check_rows(b, tokens, i, i, mask);
                for (int depth = 1; depth <= 3; depth++) check_further(b, tokens, i, depth, mask);
            }
            close_rig(&r);
        }
}

/* ---- one by one ---- */

typedef struct {
    int length, counted; /* tokens, with the end of document; rows whose target counts */
    int32_t tokens[SEQ + 1];
} Document;

/* The documents of all samples. What is predicted from an end does not count; of the last one, all does. */
static int split(Document *out)
{
    int32_t sample[SEQ + 1];
    int n = 0;
    for (int s = 0; s < SAMPLES; s++) {
        OK(joined(NULL, s, 1, sample));
        for (int at = 0; at < SEQ; n++) {
            int end = at;
            while (end < SEQ && sample[end] != EOD) end++;
            const int ended = end < SEQ;
            out[n] = (Document){ .length = end + ended - at, .counted = end - at };
            memcpy(out[n].tokens, sample + at, (size_t)(end + 1 - at) * sizeof *sample);
            at = end + ended;
        }
    }
    return n;
}

static Document documents[64];

static Err one_by_one(void *user, int64_t first, int64_t count, int32_t *out)
{
    const int n = *(int *)user;
    for (int64_t i = 0; i < count; i++)
        memcpy(out + i * (SEQ + 1), documents[(first + i) % n].tokens, (SEQ + 1) * sizeof *out);
    return ERR_OK;
}

static Err (*real_batch)(void *user, int m, Batch *b);

/* Behind the document stands nothing that counts. */
static Err cut_batch(void *user, int m, Batch *b)
{
    TRY(real_batch(user, m, b));
    for (int p = documents[m].counted; p < SEQ; p++) ((int32_t *)b->target.data)[p] = -1;
    return ERR_OK;
}

enum { STEPS = 6 };

static void train_joined(TrainSpec s, double loss[STEPS], int64_t *counted)
{
    Rig r;
    StepReport report;
    open_rig(&r, &s);
    for (int i = 0; i < STEPS; i++) {
        r.t.progress.samples = 0; /* the same samples again */
        OK(trainer_step(&r.t, (TokenSource){ NULL, joined }, &report));
        loss[i] = report.loss;
        *counted = report.counted;
    }
    close_rig(&r);
}

static void train_one_by_one(TrainSpec s, double loss[STEPS], int64_t *counted)
{
    Rig r;
    StepReport report;
    int n = split(documents);
    s.global_batch = n;
    open_rig(&r, &s);
    real_batch = r.t.executor.hooks.batch;
    r.t.executor.hooks.batch = cut_batch;
    for (int i = 0; i < STEPS; i++) {
        r.t.progress.samples = 0;
        OK(trainer_step(&r.t, (TokenSource){ &n, one_by_one }, &report));
        loss[i] = report.loss;
        *counted = report.counted;
    }
    close_rig(&r);
}

static void compare(TrainSpec s, const char *what)
{
    double apart[STEPS], alone[STEPS], crossing[STEPS];
    int64_t counted, want;
    TrainSpec both = s;
    both.documents.mask = both.documents.restart = true;
    train_joined(both, apart, &counted);
    train_one_by_one(s, alone, &want);
    CHECK_MSG(counted == want && want > 200 && want < SAMPLES * SEQ, "%lld %lld", (long long)counted, (long long)want);
    for (int i = 0; i < STEPS; i++) CHECK_CLOSE(apart[i], alone[i], 1e-5, "%s, step %d", what, i + 1);
    CHECK(apart[STEPS - 1] < apart[0] - 0.05);

    s.documents.mask = true; /* attention and positions run through: something else is computed */
    train_joined(s, crossing, &counted);
    CHECK(counted == want && fabs(crossing[0] - apart[0]) > 1e-4);
    s.documents.mask = false, s.documents.restart = true;
    train_joined(s, crossing, &counted);
    CHECK(counted == SAMPLES * SEQ && fabs(crossing[0] - apart[0]) > 1e-4);
}

TEST(joined_documents_train_as_single_ones)
{
    compare(plain(tiny_gpt2()), "gpt2");
    compare(plain(tiny_llama()), "llama");
}

TEST_MAIN
