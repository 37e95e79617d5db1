/*
 * data/tasks.c: a file of questions. Input: model.seq (one byte, 1 to 64), the file. In what is accepted, questions
 * tile requests, a request fits into its sample beside no other, its tokens stand there, and a second reading has the
 * same checksum.
 */
#include "fuzz.h"

#include "data/tasks.h"

static Tokenizer *bytes;

static void check_questions(const Tasks *t)
{
    int64_t at = 0;
    FUZZ_CHECK(t->count == 1 && t->task[0].first == 0 && t->task[0].count == t->question_count &&
                   t->question_count > 0,
               "%lld questions", (long long)t->question_count);
    for (int64_t i = 0; i < t->question_count; i++) {
        const TaskQuestion *q = &t->questions[i];
        FUZZ_CHECK(q->first == at && q->count > 0 && q->gold >= 0 && q->gold < q->count, "question %lld",
                   (long long)i);
        at += q->count;
    }
    FUZZ_CHECK(at == t->request_count && t->task[0].cut <= at, "%lld requests", (long long)at);
}

static void check_request(const Tasks *t, const TaskRequest *q, int64_t sample, const int32_t *row)
{
    FUZZ_CHECK(q->sample == sample && q->begin >= 0 && q->begin + q->count <= t->seq + 1, "a request at %d",
               q->begin);
    FUZZ_CHECK(q->scored >= 1 && q->scored < q->count && q->scored <= t->seq, "%d of %d tokens are scored",
               q->scored, q->count);
    FUZZ_CHECK(q->bytes > 0 && q->chars > 0 && q->chars <= q->bytes, "%d bytes, %d characters", q->bytes,
               q->chars);
    FUZZ_CHECK(q->tokens >= 0 && q->tokens + q->count <= t->pool_count, "tokens at %lld",
               (long long)q->tokens);
    FUZZ_CHECK(!memcmp(row + q->begin, t->pool + q->tokens, (size_t)q->count * sizeof *row), "other tokens");
}

static void check_samples(Tasks *t)
{
    int64_t seen = 0;
    int32_t *row = malloc((size_t)(t->seq + 1) * sizeof *row),
            *begin = malloc((size_t)(t->seq + 1) * sizeof *begin);
    bool *counts = malloc((size_t)(t->seq + 1) * sizeof *counts);
    if (!row || !begin || !counts) abort();
    for (int64_t s = 0; s < t->samples; s++) {
        const TaskRequest *q;
        int64_t used = 0, n = 0;
        FUZZ_CHECK(!tasks_tokens(t, s, 1, row) && !tasks_requests(t, s, 1, begin, counts), "%s",
                   err_message());
        for (; (q = tasks_request(t, s, n)); n++) {
            check_request(t, q, s, row);
            FUZZ_CHECK(q->begin >= used, "two requests at %d", q->begin);
            used = q->begin + q->count;
        }
        FUZZ_CHECK(n > 0, "sample %lld is empty", (long long)s);
        seen += n;
    }
    FUZZ_CHECK(seen == t->request_count, "%lld of %lld requests have a place", (long long)seen,
               (long long)t->request_count);
    free(row);
    free(begin);
    free(counts);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static Tasks t, again;
    const int64_t seq = size ? 1 + data[0] % 64 : 1;
    if (!bytes && tokenizer_open("byte", &bytes)) abort();
    fuzz_write("in.jsonl", data + (size > 0), size - (size > 0));
    fuzz_memory_start();
    Err err = tasks_open(&t, fuzz_path("in.jsonl"), bytes, seq);
    FUZZ_MEMORY_BOUND(size, 200, FUZZ_JSON_BYTES + (64 << 10));
    fuzz_check_error(err, ERR_DATA, ERR_DATA, false);
    if (!err) {
        check_questions(&t);
        check_samples(&t);
        FUZZ_CHECK(!tasks_open(&again, fuzz_path("in.jsonl"), bytes, seq) &&
                       tasks_crc(&again) == tasks_crc(&t),
                   "another reading has other questions");
        tasks_close(&again);
    }
    tasks_close(&t);
    return 0;
}
