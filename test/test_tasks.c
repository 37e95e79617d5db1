/*
 * Tasks (data/tasks.h): which tokens are scored, packing, accuracies and their errors by hand; and the scores of packed
 * requests (trainer_scores) against the logits of each request by itself, in float64.
 */
#include "test.h"
#include "scratch.h"
#include "tiny.h"

#include "base/mathx.h"
#include "data/tasks.h"

enum { EOD = 256, SEQ = TINY_SEQ };

static void open_text(Tasks *t, const char *text, int64_t seq)
{
    Tokenizer *byte;
    OK(tokenizer_open("byte", &byte));
    OK(tasks_open(t, write_text("one.jsonl", text), byte, seq));
    tokenizer_close(byte);
}

/* ---- tokens ---- */

/* Bytes are tokens; '$' stands for the end of document. */
static void expect_request(const Tasks *t, int n, const char *tokens, int scored, int chars, int bytes)
{
    const TaskRequest *q = &t->requests[n];
    const int count = (int)strlen(tokens);
    CHECK_MSG(q->count == count && q->scored == scored, "request %d: %d tokens, %d scored", n, q->count, q->scored);
    CHECK(q->chars == chars && q->bytes == bytes);
    for (int i = 0; i < count && i < q->count; i++)
        CHECK_MSG(t->pool[q->tokens + i] == (tokens[i] == '$' ? EOD : (uint8_t)tokens[i]), "request %d, token %d: %d",
                  n, i, t->pool[q->tokens + i]);
}

TEST(tokens_that_are_scored)
{
    Tasks t;
    open_text(&t,
              "{\"query\":\"ab\",\"choices\":[\"c\",\" d\",\"\\ne\",\"f \"],\"gold\":1}\n"
              "{\"query\":\"ab \\n\",\"choices\":[\"c\",\" d\"],\"gold\":0}\n"
              "{\"query\":\"\",\"choices\":[\"c\",\" d\"],\"gold\":0}\n"
              "{\"query\":\" \\t\",\"choices\":[\"c\"],\"gold\":0}\n"
              "{\"query\":\"a\",\"choices\":[\"\xc3\xa9\xe7\x95\x8c\"],\"gold\":0}\n",
              SEQ);
    CHECK(t.count == 1 && t.question_count == 5 && t.request_count == 10 && t.task[0].count == 5 && !t.task[0].cut);
    CHECK(!strcmp(t.task[0].name, "one") && t.task[0].form == TASK_CHOICES);
    expect_request(&t, 0, "ab c", 2, 1, 1); /* a blank between the two, which is the choice's */
    expect_request(&t, 1, "ab d", 2, 2, 2); /* the choice brings it */
    expect_request(&t, 2, "ab\ne", 2, 2, 2);
    expect_request(&t, 3, "ab f ", 3, 2, 2);
    expect_request(&t, 4, "ab \nc", 3, 1, 1); /* the context brings it: then it moves */
    expect_request(&t, 5, "ab \n d", 4, 2, 2);
    expect_request(&t, 6, "$ c", 2, 1, 1); /* a document begins */
    expect_request(&t, 7, "$ d", 2, 2, 2);
    expect_request(&t, 8, "$ \tc", 3, 1, 1);
    expect_request(&t, 9, "a \xc3\xa9\xe7\x95\x8c", 6, 2, 5);
    tasks_close(&t);
    open_text(&t, "{\"context_options\":[\"ab\",\"\",\"c \"],\"continuation\":\"de\",\"gold\":2}", SEQ);
    CHECK(t.task[0].form == TASK_CONTEXTS && t.questions[0].gold == 2 && t.questions[0].count == 3);
    expect_request(&t, 0, "ab de", 3, 2, 2);
    expect_request(&t, 1, "$ de", 3, 2, 2);
    expect_request(&t, 2, "c de", 3, 2, 2);
    tasks_close(&t);
    open_text(&t, "{\"context\":\"ab\",\"continuation\":\"de\",\"more\":[1]}\r\n\n", SEQ);
    CHECK(t.task[0].form == TASK_GREEDY && t.question_count == 1);
    expect_request(&t, 0, "ab de", 3, 2, 2);
    tasks_close(&t);
}

/* seq + 1 tokens fit: the last one is only predicted. What is longer loses its beginning, and so that of a document. */
TEST(long_requests_are_cut_from_the_left)
{
    Tasks t;
    open_text(&t, "{\"query\":\"abcdef\",\"choices\":[\"g\",\"gh\",\"ghijklm\"],\"gold\":0}\n"
                  "{\"query\":\"\",\"choices\":[\"bcdefg\",\"bcdefgh\"],\"gold\":0}", 8);
    expect_request(&t, 0, "abcdef g", 2, 1, 1);
    expect_request(&t, 1, "abcdef gh", 3, 2, 2);
    expect_request(&t, 2, "f ghijklm", 8, 7, 7);
    expect_request(&t, 3, "$ bcdefg", 7, 6, 6);
    expect_request(&t, 4, "$ bcdefgh", 8, 7, 7);
    CHECK(t.task[0].cut == 1);
    tasks_close(&t);
}

/* A tokenizer that merges: as many tokens are scored as context and choice have more than the context. */
TEST(tokens_of_merges)
{
    Tokenizer *t;
    Tasks tasks;
    write_text("input.txt", "ab ab ab ab");
    const char *inputs[] = { in_dir("input.txt") };
    const char *out = in_dir("tok.json"); /* merges "ab", then " ab" */
    OK(tokenizer_train(&(TokenizerTrainOptions){ .inputs = inputs, .input_count = 1, .vocab = 259, .output = out },
                       NULL));
    OK(tokenizer_open(out, &t));
    const int32_t eod = tokenizer_eod(t);
    OK(tasks_open(&tasks, write_text("one.jsonl", "{\"query\":\"\",\"choices\":[\"ab\",\"b\"],\"gold\":0}\n"
                                                  "{\"query\":\"<|endoftext|>\",\"choices\":[\"ab\"],\"gold\":0}\n"
                                                  "{\"query\":\"ab  \",\"choices\":[\"ab\",\" ab\"],\"gold\":0}"),
                  t, SEQ));
    static const int counts[] = { 2, 3, 2, 3, 4 }, scored[] = { 1, 2, 1, 2, 3 };
    const TaskRequest *q = tasks.requests;
    for (int i = 0; i < 5; i++)
        CHECK_MSG(q[i].count == counts[i] && q[i].scored == scored[i], "request %d: %d of %d", i, q[i].scored,
                  q[i].count);
    for (int i = 0; i < 3; i++) CHECK(tasks.pool[q[i].tokens] == eod);
    CHECK(tasks.pool[q[0].tokens + 1] == tasks.pool[q[2].tokens + 1]);
    tasks_close(&tasks);
    tokenizer_close(t);
}

/* ---- packing ---- */

static void make_questions(char *text, size_t room, int count, int longest)
{
    size_t used = 0;
    for (int i = 0; i < count; i++) {
        used += (size_t)snprintf(text + used, room - used, "{\"query\":\"%.*s\",\"choices\":[",
                                 (int)(rng_mix((uint64_t)i) % 20), "the quick brown fox jumps");
        for (int k = 0; k < 3; k++)
            used += (size_t)snprintf(text + used, room - used, "%s\"%.*s%d\"", k ? "," : "",
                                     (int)(rng_mix((uint64_t)(3 * i + k) + 77) % (uint64_t)longest),
                                     "over a lazy dog and its", i % 10);
        used += (size_t)snprintf(text + used, room - used, "],\"gold\":%d}\n", i % 3);
        CHECK(used < room);
    }
}

/* Every request stands whole in one sample, no two in one place, and samples hardly have room left. */
TEST(requests_fill_samples)
{
    enum { COUNT = 200, MOST = 128 };
    static char text[64 << 10];
    static int32_t tokens[MOST + 1], begin[MOST];
    static bool counts[MOST];
    make_questions(text, sizeof text, COUNT, 20);
    for (int seq = 43; seq <= MOST; seq += 17) {
        Tasks t;
        int64_t seen = 0, all = 0, scored = 0;
        open_text(&t, text, seq);
        for (int64_t s = 0; s < t.samples; s++) {
            const TaskRequest *q;
            int32_t end = 0;
            memset(begin, 0x55, sizeof begin);
            memset(counts, 1, sizeof counts);
            OK(tasks_tokens(&t, s, 1, tokens));
            OK(tasks_requests(&t, s, 1, begin, counts));
            for (int64_t n = 0; (q = tasks_request(&t, s, n)); n++, seen++) {
                CHECK(q->sample == s && q->begin == end && q->begin + q->count <= seq + 1);
                end = q->begin + q->count;
                all += q->count;
                scored += q->scored;
                CHECK(!memcmp(tokens + q->begin, t.pool + q->tokens, (size_t)q->count * sizeof *tokens));
                for (int32_t p = q->begin; p < end && p < seq; p++)
                    CHECK(begin[p] == q->begin && counts[p] == (p >= end - 1 - q->scored && p < end - 1));
            }
            CHECK(end > 0);
            for (int32_t p = end; p < seq; p++) CHECK(begin[p] == end && !counts[p] && tokens[p] == 0);
        }
        CHECK(seen == t.request_count && t.request_count == 3 * COUNT);
        CHECK_MSG(t.samples * (seq + 1) <= all * 104 / 100 + seq, "%lld samples of %d for %lld tokens",
                  (long long)t.samples, seq + 1, (long long)all);
        tasks_close(&t);
    }
}

/* ---- accuracies ---- */

static void set_scores(Tasks *t, const double *scores)
{
    for (int64_t i = 0; i < t->request_count; i++) t->requests[i].score = scores[i];
}

TEST(ties_and_what_is_not_finite)
{
    Tasks t;
    open_text(&t, "{\"query\":\"a\",\"choices\":[\"b\",\"c\",\"d\"],\"gold\":0}\n"
                  "{\"query\":\"a\",\"choices\":[\"b\",\"c\",\"d\"],\"gold\":1}", SEQ);
    const Task *task = t.task;
    set_scores(&t, (double[]){ -1, -1, -1, -2, -1, -1 }); /* the first of equals: both right */
    CHECK(task_mean(&t, task, TASK_ACC).mean == 1 && task_mean(&t, task, TASK_ACC).error == 0);
    set_scores(&t, (double[]){ -2, -1, -1, -1, -1, -3 });
    CHECK(task_mean(&t, task, TASK_ACC).mean == 0);
    set_scores(&t, (double[]){ NAN, -1, -1, NAN, -1, NAN }); /* never taken */
    CHECK(task_mean(&t, task, TASK_ACC).mean == 0.5);
    set_scores(&t, (double[]){ NAN, NAN, NAN, -INFINITY, -INFINITY, -INFINITY });
    CHECK(task_mean(&t, task, TASK_ACC).mean == 0);
    tasks_close(&t);
}

/* Sums favour the short, characters and bytes differ where characters have several: each metric takes another. */
TEST(what_scores_are_divided_by)
{
    Tasks t;
    open_text(&t, "{\"query\":\"a\",\"choices\":[\"b\",\"cdef\",\"\xe7\x95\x8c\xe7\x95\x8c\xe7\x95\x8c\"],\"gold\":0}",
              SEQ);
    for (int gold = 0; gold < 3; gold++) {
        t.questions[0].gold = gold;
        set_scores(&t, (double[]){ -1, -1.6, -1.8 }); /* a character: 1, 0.4, 0.6; a byte: 1, 0.4, 0.2 */
        CHECK(task_mean(&t, t.task, TASK_ACC).mean == (gold == 0));
        CHECK(task_mean(&t, t.task, TASK_ACC_NORM).mean == (gold == 1));
        CHECK(task_mean(&t, t.task, TASK_ACC_BYTES).mean == (gold == 2));
        CHECK(isnan(task_mean(&t, t.task, TASK_ACC).error)); /* one question has no spread */
    }
    tasks_close(&t);
}

/* Worked by hand from the definition: 3 of 10 and 2 of 4 right; one greedy, which no other metric knows. */
TEST(standard_errors)
{
    char list[2048], ten[2048] = "", four[1024] = "";
    Tokenizer *byte;
    Tasks t;
    int64_t n;
    for (int i = 0; i < 10; i++) strcat(ten, "{\"query\":\"a\",\"choices\":[\"b\",\"c\"],\"gold\":0}\n");
    for (int i = 0; i < 4; i++) strcat(four, "{\"query\":\"a\",\"choices\":[\"b\",\"c\"],\"gold\":1}\n");
    const char *a = write_text("ten.jsonl", ten), *b = write_text("four.jsonl", four);
    const char *c = write_text("word", "{\"context\":\"a\",\"continuation\":\"b\"}");
    snprintf(list, sizeof list, "%s,%s,%s", a, b, c);
    OK(tokenizer_open("byte", &byte));
    OK(tasks_open(&t, list, byte, SEQ));
    CHECK(t.count == 3 && t.question_count == 15 && !strcmp(t.task[2].name, "word"));
    for (int i = 0; i < 14; i++) { /* the first choice of questions 0 to 2, 10 and 11 */
        t.requests[2 * i].score = i < 3 || i == 10 || i == 11 ? -1 : -3;
        t.requests[2 * i + 1].score = -2;
    }
    t.requests[28].greedy = true;
    TaskMean m = task_mean(&t, &t.task[0], TASK_ACC);
    CHECK(m.mean == 0.3);
    CHECK_CLOSE(m.error, 0.15275252316519466, 1e-15, "sqrt(0.3 x 0.7 / 9)");
    m = task_mean(&t, &t.task[1], TASK_ACC_NORM);
    CHECK(m.mean == 0.5);
    CHECK_CLOSE(m.error, 0.28867513459481287, 1e-15, "sqrt(0.5 x 0.5 / 3)");
    CHECK(task_mean(&t, &t.task[2], TASK_ACC).mean == 1 && isnan(task_mean(&t, &t.task[2], TASK_ACC).error));
    CHECK(task_has(&t.task[2], TASK_ACC) && !task_has(&t.task[2], TASK_ACC_NORM) &&
          task_has(&t.task[0], TASK_ACC_BYTES));
    m = tasks_pooled(&t, TASK_ACC, &n);
    CHECK(n == 15 && m.mean == 0.4);
    CHECK_CLOSE(m.error, 0.13123346456686352, 1e-15, "sqrt((10 x 0.21 + 4 x 0.25) / (15 - 3) / 15)");
    m = tasks_pooled(&t, TASK_ACC_BYTES, &n);
    CHECK(n == 14);
    CHECK_CLOSE(m.mean, 5.0 / 14, 1e-15, " ");
    CHECK_CLOSE(m.error, 0.13583954119615152, 1e-15, "sqrt((10 x 0.21 + 4 x 0.25) / (14 - 2) / 14)");
    tasks_close(&t);
    tokenizer_close(byte);
}

/* ---- scores ---- */

typedef struct {
    World world;
    Trainer t;
} Rig;

static void open_rig(Rig *r, const TrainSpec *spec)
{
    MemoryPlan plan;
    OK(world_open_self(&r->world));
    OK(trainer_plan(spec, r->world.grid, 0, &plan));
    OK(trainer_open(&r->t, spec, &r->world, &plan));
    CHECK(r->t.device.counters.alloc_bytes + r->t.device.workspace_bytes == memory_plan_total(&plan));
}

static void close_rig(Rig *r)
{
    trainer_close(&r->t);
    world_close(&r->world);
}

/* A request a sample. */
static Err alone(void *tasks, int64_t first, int64_t count, int32_t *tokens)
{
    const Tasks *t = tasks;
    memset(tokens, 0, (size_t)(count * (SEQ + 1)) * sizeof *tokens);
    for (int64_t i = 0; i < count; i++, tokens += SEQ + 1) {
        const TaskRequest *q = &t->requests[first + i];
        memcpy(tokens, t->pool + q->tokens, (size_t)q->count * sizeof *tokens);
    }
    return ERR_OK;
}

/* The score of a request whose logits are these, and whether no token is more likely than each that is scored. */
static double score_of(const Tasks *t, const TaskRequest *q, const float *logits, int64_t vocab, bool *greedy)
{
    double score = 0;
    *greedy = true;
    for (int32_t i = q->count - q->scored; i < q->count; i++) {
        const float *row = logits + (i - 1) * vocab, target = row[t->pool[q->tokens + i]];
        double sum = 0;
        for (int64_t v = 0; v < vocab; v++) {
            sum += exp((double)row[v] - target);
            *greedy &= row[v] <= target;
        }
        score -= log(sum);
    }
    return score;
}

static void take_scores(Rig *r, Tasks *t)
{
    const int64_t most = r->t.spec.global_batch;
    for (int64_t first = 0; first < t->samples; first += most) {
        const int64_t count = t->samples - first < most ? t->samples - first : most;
        const RowScore *scores;
        TaskRequest *q;
        OK(trainer_scores(&r->t, (TokenSource){ t, tasks_tokens, tasks_requests }, first, count, &scores));
        for (int64_t i = 0; i < count; i++)
            for (int64_t n = 0; (q = tasks_request(t, first + i, n)); n++) {
                q->score = 0, q->greedy = true;
                for (int32_t k = q->begin + q->count - 1 - q->scored; k < q->begin + q->count - 1; k++) {
                    q->score -= scores[i * SEQ + k].loss;
                    q->greedy &= !scores[i * SEQ + k].outdone;
                }
            }
    }
}

/* Packed requests, in a trainer that also trains, against each alone. */
static void compare_scores(TrainSpec s)
{
    static char text[8 << 10];
    Tasks t;
    Rig packed, each;
    int greedy = 0;
    s.model.vocab = 257;
    s.model.padded_vocab = head_padded_vocab(257, s.model.tp_blocks);
    s.model.init_std = 0.3f; /* scores far apart, and some words found */
    make_questions(text, sizeof text, 20, 3);
    open_text(&t, text, SEQ);
    s.purpose.scores = true;
    open_rig(&packed, &s);
    take_scores(&packed, &t);
    s.purpose = (TrainPurpose){ .forward_only = true, .logits = true };
    s.documents = (DocumentSpec){ 0 };
    open_rig(&each, &s);
    const int64_t most = trainer_row_samples(&each.t);
    float *logits = malloc((size_t)(most * SEQ * 257 + 1) * sizeof *logits);
    for (int64_t first = 0; first < t.request_count; first += most) {
        const int64_t count = t.request_count - first < most ? t.request_count - first : most;
        OK(trainer_row_logits(&each.t, (TokenSource){ &t, alone, NULL }, first, count, SEQ, logits));
        for (int64_t i = 0; i < count; i++) {
            bool best;
            const TaskRequest *q = &t.requests[first + i];
            const double want = score_of(&t, q, logits + i * SEQ * 257, 257, &best);
            CHECK_CLOSE(q->score, want, 1e-5 * q->scored, "request %lld", (long long)(first + i));
            CHECK(q->greedy == best);
            greedy += best;
        }
    }
    CHECK(greedy < t.request_count);
    free(logits);
    close_rig(&each);
    close_rig(&packed);
    tasks_close(&t);
}

TEST(scores_of_gpt2) { compare_scores(tiny_gpt2()); }
TEST(scores_of_llama) { compare_scores(tiny_llama()); }
TEST(scores_of_windows_and_sinks) { compare_scores(tiny_variants()); }
TEST(scores_of_latent_attention) { compare_scores(tiny_latent(tiny_llama(), 24)); }
TEST(scores_of_documents_apart) { compare_scores(tiny_apart(tiny_gpt2())); }
TEST(scores_of_a_mixture) { compare_scores(tiny_mixture(TINY_QWEN3, 2)); }
TEST(scores_beside_further_tokens) { compare_scores(tiny_further(tiny_llama(), 2)); }

/* Each of several largest logits counts as most likely: a model of zeros finds every word. */
TEST(the_largest_logits_are_the_most_likely)
{
    TrainSpec s = tiny_gpt2();
    Tasks t;
    Rig r;
    s.model.vocab = 257, s.model.padded_vocab = head_padded_vocab(257, s.model.tp_blocks);
    s.model.init_std = 0;
    s.purpose.scores = true;
    open_text(&t, "{\"context\":\"a\",\"continuation\":\"bc\"}", SEQ);
    open_rig(&r, &s);
    take_scores(&r, &t);
    CHECK(t.requests[0].greedy);
    CHECK_CLOSE(t.requests[0].score, -3 * log(257), 1e-6, " ");
    close_rig(&r);
    tasks_close(&t);
}

/* The same loss and the same step with and without requests scored in between. */
TEST(scores_leave_training_alone)
{
    static char text[8 << 10];
    double loss[2], valid[2];
    make_questions(text, sizeof text, 20, 3);
    for (int asked = 0; asked < 2; asked++) {
        TrainSpec s = tiny_gpt2();
        StepReport report;
        Tasks t;
        Rig r;
        int64_t counted;
        s.model.vocab = 257, s.model.padded_vocab = head_padded_vocab(257, s.model.tp_blocks);
        s.purpose.scores = asked;
        open_text(&t, text, SEQ);
        open_rig(&r, &s);
        OK(trainer_step(&r.t, tiny_source(&r.t), &report));
        if (asked) take_scores(&r, &t);
        OK(trainer_step(&r.t, tiny_source(&r.t), &report));
        if (asked) take_scores(&r, &t);
        OK(trainer_eval(&r.t, tiny_source(&r.t), 0, s.global_batch, &valid[asked], &counted));
        loss[asked] = report.loss;
        close_rig(&r);
        tasks_close(&t);
    }
    CHECK(loss[0] == loss[1] && valid[0] == valid[1]);
}

TEST_MAIN
