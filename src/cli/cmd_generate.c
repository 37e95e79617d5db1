/*
 * generate: continues a prompt with a run's checkpoint. The checkpoint carries its configuration, so only the run's
 * folder has to be named.
 *
 * Each token is one forward pass over what the cache of keys and values does not hold yet: the prompt, then one
 * token. Once the text is longer than model.seq its last model.seq tokens take new positions with every token, and
 * each is a pass over all of them. The draw for token number i of the text is Philox(seed; i), so the same seed
 * gives the same text, on every machine.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/heap.h"
#include "base/log.h"
#include "base/mathx.h"
#include "base/rng.h"
#include "cli/config_arg.h"
#include "cli/end_ids.h"
#include "cli/utf8_out.h"
#include "train/run.h"

static const char *run_dir, *prompt = "";
static int64_t step = -1, token_count = 100, top_k = 0, seed = 1;
static double temperature = 1, top_p = 1;
static bool ignore_eod;

static const Option options[] = {
    { "run", OPTION_TEXT, &run_dir, .required = true, .value = "DIR", .help = "the run's folder" },
    { "step", OPTION_INT, &step, .low = 0, .high = 9e15, .value = "N",
      .help = "the checkpoint of that step, not the newest" },
    { "prompt", OPTION_TEXT, &prompt, .value = "TEXT", .help = "what to continue; empty: the start of a document" },
    { "tokens", OPTION_INT, &token_count, .low = 0, .high = 1e9, .value = "N", .help = "tokens to add, at most" },
    { "ignore-eod", OPTION_FLAG, &ignore_eod, .help = "go on with another document where one ends" },
    { "temperature", OPTION_REAL, &temperature, .low = 0, .high = 100, .value = "T",
      .help = "0: always the most likely token" },
    { "top-k", OPTION_INT, &top_k, .low = 0, .high = 1e9, .value = "K",
      .help = "draw from the K most likely; 0: from all" },
    { "top-p", OPTION_REAL, &top_p, .low = 0, .high = 1, .value = "P",
      .help = "draw from the most likely that have P of all probability" },
    { "seed", OPTION_INT, &seed, .low = 0, .high = 9e18, .value = "S", .help = "of the draws" },
};

typedef struct {
    float logit;
    int32_t id;
} Candidate;

typedef struct {
    Run run;
    TokenList text;    /* prompt and what was added */
    int64_t cached;    /* tokens of it that the trainer has seen */
    float *logits;     /* [vocab] */
    Candidate *sorted; /* [choices] */
    int32_t choices;   /* ids that the tokenizer knows */
    HfIds ends;        /* what ends a document beside the tokenizer's own token */
    Utf8Out out;
} Generator;

/* ---- choosing ---- */

/* Most likely first; equals in the order of their ids, so that the order is the same everywhere. */
static int by_logit(const void *a, const void *b)
{
    const Candidate *x = a, *y = b;
    if (x->logit != y->logit) return x->logit > y->logit ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

/* Uniform in [0, 1). */
static double draw(int64_t index)
{
    Philox r = philox(rng_key((uint64_t)seed, "generate"), (uint32_t)index, (uint32_t)((uint64_t)index >> 32), 0, 0);
    return (double)((uint64_t)r.v[0] << 21 | r.v[1] >> 11) * 0x1p-53;
}

/* Probability beside that of the most likely one. */
static double weight(const Candidate *c, int64_t i) { return m_exp(((double)c[i].logit - c[0].logit) / temperature); }

/* How many of the first n have so much of their sum; *at: what they have. */
static int64_t reach(const Candidate *c, int64_t n, double limit, double *at)
{
    int64_t i = 0;
    for (*at = weight(c, 0); i < n - 1 && !(*at > limit);) *at += weight(c, ++i);
    return i + 1;
}

/* First the K most likely, then of those the fewest that have P of their probability, then the draw. */
static int32_t choose(const Generator *g, int64_t index)
{
    const Candidate *c = g->sorted;
    int64_t n = top_k > 0 && top_k < g->choices ? top_k : g->choices;
    double sum = 0, at;
    if (temperature == 0) return c[0].id;
    for (int64_t i = 0; i < n; i++) sum += weight(c, i);
    if (top_p < 1) n = reach(c, n, top_p * sum, &sum);
    return c[reach(c, n, draw(index) * sum, &at) - 1].id;
}

static Err next_token(Generator *g, int32_t *id)
{
    int64_t seq = g->run.spec.model.seq, first = g->text.count > seq ? g->text.count - seq : 0;
    int64_t past = first ? 0 : g->cached, n = g->text.count - first - past;
    TRY(trainer_logits(&g->run.trainer, g->text.ids + first + past, past, n, g->logits));
    g->cached = g->text.count;
    for (int32_t i = 0; i < g->choices; i++) {
        if (!isfinite(g->logits[i]))
            return err_set(ERR_NUMERICS, "the model's output is not finite after token %lld", (long long)g->text.count);
        g->sorted[i] = (Candidate){ g->logits[i], i };
    }
    qsort(g->sorted, (size_t)g->choices, sizeof *g->sorted, by_logit);
    *id = choose(g, g->text.count);
    return ERR_OK;
}

/* ---- the text ---- */

static Err start(Generator *g)
{
    const Tokenizer *t = g->run.tokenizer;
    int64_t vocab = g->run.spec.model.vocab;
    g->choices = tokenizer_vocab(t) < vocab ? tokenizer_vocab(t) : (int32_t)vocab;
    g->logits = malloc((size_t)vocab * sizeof *g->logits);
    g->sorted = malloc((size_t)g->choices * sizeof *g->sorted);
    if (!g->logits || !g->sorted) return err_set(ERR_MEMORY, "no memory for %lld logits", (long long)vocab);
    if (*prompt) {
        TRY(tokenizer_encode(t, prompt, (int64_t)strlen(prompt), &g->text));
        if (g->text.count > g->run.spec.model.seq)
            log_warn("the prompt has %lld tokens: the model sees the last %lld of them (model.seq)",
                     (long long)g->text.count, (long long)g->run.spec.model.seq);
        return ERR_OK;
    }
    if (tokenizer_eod(t) >= 0) return token_list_add(&g->text, tokenizer_eod(t));
    return err_set(ERR_CONFIG, "this tokenizer has no end of document to start from: give a --prompt");
}

static bool is_end(const Generator *g, int32_t id)
{
    return id == tokenizer_eod(g->run.tokenizer) || hf_ids_end(&g->ends, id);
}

static Err write_text(Generator *g)
{
    int32_t id = -1, size;
    int64_t i = 0;
    utf8_out_write(&g->out, prompt, (int64_t)strlen(prompt));
    for (; i < token_count; i++) {
        TRY(next_token(g, &id));
        if (is_end(g, id) && !ignore_eod) break;
        TRY(token_list_add(&g->text, id));
        if (is_end(g, id)) {
            utf8_out_write(&g->out, "\n", 1);
            continue;
        }
        const bool begins = i == 0 && !*prompt;
        const char *bytes = tokenizer_bytes(g->run.tokenizer, id, begins, &size);
        utf8_out_write(&g->out, bytes, size);
        fflush(stdout);
    }
    utf8_out_end(&g->out);
    putchar('\n');
    fflush(stdout);
    if (i < token_count)
        log_info("the document ends after %lld of %lld tokens (--ignore-eod goes on)", (long long)i,
                 (long long)token_count);
    return ERR_OK;
}

/* Names in a run's configuration are those of the folder where it was started. */
static Err find_tokenizer(const Config *cfg)
{
    const char *name = cfg->data.tokenizer;
    if (!strcmp(name, "byte") || *name == '/' || file_exists(name)) return ERR_OK;
    return err_set(ERR_DATA,
                   "no tokenizer '%s': in '%s' data.tokenizer is relative to the folder where the run was "
                   "trained",
                   name, run_dir),
           err_hint("start megatrain in that folder, and give --run as it is seen from there");
}

static Err generate_with(Generator *g, const Config *cfg)
{
    TRY(find_tokenizer(cfg));
    TRY(end_ids_of_run(run_dir, step, cfg->data.tokenizer, &g->ends));
    TRY(run_open(&g->run, cfg, RUN_GENERATE, NULL));
    Err err = run_load_weights(&g->run, run_dir, step);
    if (!err) err = start(g);
    if (!err) err = write_text(g);
    run_close(&g->run);
    return err;
}

static Err generate(Words rest)
{
    Config cfg = { 0 };
    ON_HEAP(Generator, g, 1);
    g->out.file = stdout;
    g->out.terminal = isatty(STDOUT_FILENO);
    TRY(single_process());
    Err err = config_of_run(&cfg, run_dir, step, rest, CONFIG_ANY_WORLD);
    if (!err) err = generate_with(g, &cfg);
    free(g->text.ids);
    free(g->logits);
    free(g->sorted);
    config_release(&cfg);
    return err;
}

const Command command_generate = {
    .name = "generate",
    .summary = "continue a prompt with a run's checkpoint",
    .text = "Prompt and continuation go to stdout as they come, until N tokens or the end of the document. "
            "The same\n"
            "seed gives the same text.\n",
    OPTIONS(options),
    .run = generate,
};
