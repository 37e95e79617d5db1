/*
 * data/resume.c and data/indexed_write.c: job.json of an interrupted preprocess with two inputs, and the tokens that it
 * speaks of (8 of 2 bytes, 2 documents). Input: the JSON line, then, behind a 0 byte, what follows it; left out: the
 * right checksum. What is there to go on from is within the inputs and the tokens; saved again, it is found again.
 */
#include "fuzz.h"

#include "data/resume.h"

enum { TOKENS = 8, DOCUMENTS = 2 };

static const char *const inputs[] = { "a.txt", "b.txt" };
static const InputStat stats[] = { { 1000, 1 }, { 2000, 2 } };

static void write_job(const uint8_t *data, size_t size)
{
    static const uint16_t tokens[TOKENS] = { 1, 2, 3, 4, 5, 6, 7, 8 };
    static const int32_t lengths[DOCUMENTS] = { 5, 3 };
    const uint8_t *end = memchr(data, 0, size);
    size_t n = end ? (size_t)(end - data) : size, rest = end ? size - n - 1 : 0;
    char *text = malloc(size + 16);
    if (!text) abort();
    memcpy(text, data, n);
    if (end) memcpy(text + n, end + 1, rest);
    else rest = (size_t)sprintf(text + n, "\n%08x\n", crc32c(0, data, n));
    fuzz_write("job.part/job.json", text, n + rest);
    fuzz_write("job.part/tokens", tokens, sizeof tokens);
    fuzz_write("job.part/lengths", lengths, sizeof lengths);
    free(text);
}

static void check_again(const JobIdentity *id, const JobDone *done, const JobDone *start)
{
    JobDone again[2];
    bool found;
    Err err = job_save(id, done, start);
    if (!err) err = job_load(id, &again[0], &again[1], &found);
    FUZZ_CHECK(!err && found, "%s", err ? err_message() : "not found");
    FUZZ_CHECK(!memcmp(&again[0], done, sizeof *done) && !memcmp(&again[1], start, sizeof *start),
               "another place: input %lld, then %lld", (long long)done->place.input,
               (long long)again[0].place.input);
}

static void check_writer(const JobIdentity *id, const JobDone *done)
{
    IndexedWriter *w;
    fuzz_memory_start();
    Err err = indexed_resume(id->prefix, TOKEN_U16, &done->written, &w);
    FUZZ_MEMORY_BOUND(0, 0, (3 << 20) + (1 << 16));
    fuzz_check_error(err, ERR_DATA, ERR_DATA, false);
    if (err) return;
    FUZZ_CHECK(done->written.tokens <= TOKENS && done->written.documents <= DOCUMENTS, "%lld tokens",
               (long long)done->written.tokens);
    FUZZ_CHECK(indexed_written_tokens(w) == done->written.tokens, "%lld tokens are written",
               (long long)indexed_written_tokens(w));
    indexed_abandon(w);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    JobIdentity id = { .prefix = fuzz_path("job"),
                       .options = "text",
                       .tokenizer = 7,
                       .inputs = inputs,
                       .stats = stats,
                       .input_count = 2 };
    JobDone done, start;
    bool found;
    if (file_make_dirs(fuzz_path("job.part"))) abort();
    write_job(data, size);
    fuzz_memory_start();
    Err err = job_load(&id, &done, &start, &found);
    FUZZ_MEMORY_BOUND(size, 4, FUZZ_JSON_BYTES + (1 << 14));
    fuzz_check_error(err, ERR_CONFIG, ERR_DATA, false);
    if (err || !found) return 0;
    FUZZ_CHECK(done.place.input >= 0 && done.place.input <= 2 && done.place.offset >= 0, "input %lld at %lld",
               (long long)done.place.input, (long long)done.place.offset);
    check_again(&id, &done, &start);
    check_writer(&id, &done);
    return 0;
}
