/*
 * The configuration's meaning: every key refuses what lies outside its range and says where, every rule between
 * keys has its case. The list of keys is frozen in golden/keys.txt: whoever adds one adds it there too, with a
 * reason in the change. Its text: test_config_text.c.
 */
#include "base/file.h"
#include "config_case.h"

TEST(keys_are_frozen)
{
    FILE *f = fopen("test/golden/keys.txt", "r");
    char line[128], full[128];
    CHECK_MSG(f != NULL, "run from the repository's root");
    for (int i = 0; f && i < CFG_COUNT; i++) {
        snprintf(full, sizeof full, "%s.%s\n", config_key((ConfigId)i)->section, config_key((ConfigId)i)->name);
        bool same = fgets(line, sizeof line, f) && strcmp(line, full) == 0;
        CHECK_MSG(same, "%.*s is not where golden/keys.txt has '%.*s'", (int)strlen(full) - 1, full,
                  (int)strcspn(line, "\n"), line);
        if (!same) break;
    }
    if (f) {
        CHECK(fgets(line, sizeof line, f) == NULL);
        fclose(f);
    }
}

TEST(defaults)
{
    Config c;
    OK(read_as(&c, NULL, "", 1));
    CHECK(c.run.device == RUN_DEVICE_CPU && c.run.precision == RUN_PRECISION_FP32 && c.run.seed == 1234);
    CHECK(c.run.reproducible == RUN_REPRODUCIBLE_LAYOUT && strcmp(c.run.dir, "runs/run") == 0);
    CHECK(c.model.position == MODEL_POSITION_LEARNED && c.model.norm == MODEL_NORM_LAYERNORM);
    CHECK(c.model.activation == MODEL_ACTIVATION_GELU && c.model.bias == 1 && c.model.tied == 1);
    CHECK(c.model.kv_heads == 12 && c.model.head_dim == 64 && c.model.ffn == 3072 && !c.parallel.sp);
    CHECK(c.parallel.tp_blocks == 8 && c.parallel.seq_blocks == 8 && c.parallel.attn_block == 64);
    CHECK(c.derived.world_size == 1 && c.derived.dp == 1 && c.derived.microbatches == 8);
    CHECK(c.derived.steps == 1000 && c.derived.decay_steps == 1000 && c.derived.wsd_decay == 100);
    CHECK(c.optim.lr == 3e-4 && c.optim.beta2 == 0.95 && c.log.jsonl && !*c.data.train);
    config_release(&c);
}

TEST(biases_of_attention) /* as the others, unless they are given */
{
    static const struct {
        const char *given;
        int bias, attention;
    } cases[] = { { "model.arch=gpt2", 1, ATTENTION_BIAS_ALL },
                  { "model.arch=llama", 0, ATTENTION_BIAS_NONE },
                  { "model.arch=llama model.bias=true", 1, ATTENTION_BIAS_ALL },
                  { "model.arch=llama model.attention_bias=qkv", 0, ATTENTION_BIAS_QKV },
                  { "model.arch=gpt2 model.attention_bias=none", 1, ATTENTION_BIAS_NONE } };
    Config c;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        OK(read_as(&c, NULL, cases[i].given, 1));
        CHECK(c.model.bias == cases[i].bias && (int)c.model.attention_bias == cases[i].attention);
        config_release(&c);
    }
}

/* Three matrices where the activation is gated, else two: of 768 columns 2/3 of 4 times as many, or 4 times. */
TEST(widths_of_activations)
{
#define TEXT_OF(name, text, gated) text,
    static const char *const names[] = { ACTIVATIONS(TEXT_OF) };
#undef TEXT_OF
    char text[96];
    Config c;
    for (int a = 0; a < (int)(sizeof names / sizeof *names); a++) {
        snprintf(text, sizeof text, "model.hidden=768 model.activation=%s", names[a]);
        OK(read_as(&c, NULL, text, 1));
        CHECK((int)config_activation(&c) == a);
        CHECK_MSG(c.model.ffn == (activation_gated((Activation)a) ? 2048 : 3072), "%s: %d", text, (int)c.model.ffn);
        config_release(&c);
    }
    CHECK(!activation_gated(ACT_GELU) && !activation_gated(ACT_GELU_ERF));
    CHECK(activation_gated(ACT_SWIGLU) && activation_gated(ACT_GEGLU));
    CHECK(activation_gated(ACT_CLAMPED_SWIGLU) && !activation_gated(ACT_RELU2));
}

TEST(recipes_and_what_follows)
{
    Config c;
    OK(read_as(&c, "[model]\narch=llama\nhidden=96\nheads=6\nkv_heads=2\nseq=48\nnorm=layernorm\n[train]\nsteps=7\n",
               "", 1));
    CHECK(c.model.position == MODEL_POSITION_ROPE && c.model.norm == MODEL_NORM_LAYERNORM);
    CHECK(c.model.activation == MODEL_ACTIVATION_SWIGLU && !c.model.bias && !c.model.tied);
    CHECK(c.model.ffn == 256 && c.model.head_dim == 16 && c.model.kv_heads == 2); /* floor(4*96*2/3 / 64) * 64 */
    CHECK(c.parallel.tp_blocks == 8 && c.parallel.seq_blocks == 1 && strcmp(c.run.name, "t") == 0);
    CHECK(c.derived.steps == 7 && c.derived.decay_steps == 7 && c.derived.wsd_decay == 1);
    config_release(&c);
    static const int64_t ffn[][2] = { { 768, 2048 }, { 1024, 2688 }, { 4096, 10880 }, { 24, 64 }, { 100, 256 } };
    for (size_t i = 0; i < sizeof ffn / sizeof *ffn; i++) { /* Megatron's int((4h * 2/3) // 64 * 64) */
        char text[96];
        snprintf(text, sizeof text, "model.arch=llama model.heads=2 model.hidden=%d", (int)ffn[i][0]);
        OK(read_as(&c, NULL, text, 1));
        CHECK_MSG(c.model.ffn == ffn[i][1], "%s: %d", text, (int)c.model.ffn);
        config_release(&c);
    }
    /* longer runs of experts' rows, where they are of 8 bits on a GPU, and a word has the last word */
    static const struct {
        const char *words;
        int64_t blocks;
    } eights[] = { { "run.device=cuda run.fp8_experts=true model.seq=4096", 4 },
                   { "run.device=cuda run.fp8_experts=true model.seq=256", 2 },
                   { "run.device=cuda run.fp8_experts=true model.seq=4096 moe.slack=4", 8 },
                   { "run.device=cuda run.fp8_experts=true model.seq=4096 parallel.seq_blocks=8", 8 },
                   { "run.device=cuda model.seq=4096", 8 },
                   { "run.device=cpu run.fp8_experts=true model.seq=4096", 8 },
                   { "run.device=cpu run.fp8_experts=true model.seq=4096 run.reproducible=layout", 8 } };
    for (size_t i = 0; i < sizeof eights / sizeof *eights; i++) {
        char text[300];
        snprintf(text, sizeof text,
                 "model.hidden=256 model.heads=4 model.ffn=256 moe.experts=4 moe.topk=2 moe.ffn=256 model.layers=4 "
                 "run.precision=fp8 run.fp8=blockwise %s",
                 eights[i].words);
        OK(read_as(&c, NULL, text, 1));
        CHECK_MSG(c.parallel.seq_blocks == eights[i].blocks, "%s: %lld", text, (long long)c.parallel.seq_blocks);
        config_release(&c);
    }
    OK(read_as(&c, NULL, "model.hidden=36 model.heads=3 model.seq=516", 1)); /* as many blocks as divide */
    CHECK(c.parallel.tp_blocks == 4 && c.parallel.seq_blocks == 4);
    config_release(&c);
    OK(read_as(&c, NULL, "train.tokens=100001 model.seq=1000 train.global_batch=10", 1));
    CHECK(c.derived.steps == 11 && c.train.steps == 0 && c.derived.decay_steps == 11);
    config_release(&c);
    OK(read_as(&c, NULL, "train.tokens=100001 model.seq=1000 train.global_batch=10*4,20", 1));
    CHECK(c.derived.steps == 8 && c.derived.decay_steps == 8); /* 101 samples: 4 steps of 10, 4 of 20 */
    CHECK(c.derived.global_batch == 20 && c.derived.microbatches == 20 && c.derived.batch.count == 2);
    config_release(&c);
    OK(read_as(&c, NULL, "parallel.tp=2 train.micro_batch=2 train.global_batch=24", 8));
    CHECK(c.derived.dp == 4 && c.derived.microbatches == 3 && c.parallel.sp == 1);
    CHECK(c.run.reproducible == RUN_REPRODUCIBLE_LAYOUT);
    config_release(&c);
    static const struct {
        const char *words;
        int grad, param; /* what travels beside products */
    } beside[] = { { "", 0, 0 },
                   { "parallel.zero=1", 0, 0 },
                   { "run.device=cuda", 1, 0 },
                   { "run.device=cuda parallel.zero=1", 1, 1 },
                   { "run.device=cuda parallel.zero=1 parallel.tp=2", 0, 0 },
                   { "run.device=cuda parallel.zero=1 parallel.cp=2", 1, 1 },
                   { "run.device=cuda parallel.overlap_grad=false", 0, 0 },
                   { "parallel.overlap_grad=true parallel.overlap_param=true", 1, 1 } };
    for (size_t i = 0; i < sizeof beside / sizeof *beside; i++) {
        OK(read_as(&c, NULL, beside[i].words, 2));
        CHECK_MSG(c.parallel.overlap_grad == beside[i].grad && c.parallel.overlap_param == beside[i].param, "%s",
                  beside[i].words);
        config_release(&c);
    }
    OK(read_as(&c, NULL, "run.device=cuda parallel.zero=1 parallel.pp=2 parallel.schedule=gems", 4));
    CHECK(c.derived.dp == 2 && !c.parallel.overlap_grad && c.parallel.overlap_param);
    config_release(&c);
    static const struct {
        const char *words; /* with 12 ranks and sequences of 128 tokens */
        int bands;
    } rows[] = { { "parallel.tp=4", 1 },
                 { "parallel.tp=4 parallel.overlap_tp=2", 2 },
                 { "run.device=cuda", 1 },
                 { "run.device=cuda parallel.tp=4", 1 },
                 { "run.device=cuda parallel.tp=4 train.micro_batch=32", 4 },
                 { "run.device=cuda parallel.tp=4 train.micro_batch=16", 2 },
                 { "run.device=cuda parallel.tp=4 train.micro_batch=16 parallel.cp=3 model.seq=384", 2 },
                 { "run.device=cuda parallel.tp=6 train.micro_batch=24 train.global_batch=48", 3 },
                 { "run.device=cuda parallel.tp=4 train.micro_batch=32 parallel.overlap_tp=1", 1 } };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char words[256];
        snprintf(words, sizeof words, "train.global_batch=384 model.seq=128 %s", rows[i].words);
        OK(read_as(&c, NULL, words, 12));
        CHECK_MSG(c.parallel.overlap_tp == rows[i].bands, "%s: %lld", rows[i].words, (long long)c.parallel.overlap_tp);
        config_release(&c);
    }
    OK(read_as(&c, NULL, "parallel.tp=3 train.micro_batch=3 train.global_batch=12", 6)); /* says so on stderr */
    CHECK(c.run.reproducible == RUN_REPRODUCIBLE_RUN && c.parallel.tp_blocks == 8);
    config_release(&c);
}

/* ---- ranges ---- */

/* Writes key = value into line 3 of a file, and expects this one mistake with its place. */
static void refused(const ConfigKey *key, const char *value, const char *why)
{
    char text[256], want[256];
    snprintf(text, sizeof text, "; comment\n[%s]\n%s = %s\n", key->section, key->name, value);
    snprintf(want, sizeof want, "t.ini:3: %s.%s = '%s': %s", key->section, key->name, value, why);
    const char *got = complaint(text, "", 1);
    CHECK_MSG(strncmp(got, want, strlen(want)) == 0 && count_lines(got) == 1, "got:  %s\n    want: %s", got, want);
    snprintf(text, sizeof text, "%s.%s=%s", key->section, key->name, value);
    snprintf(want, sizeof want, "command line: %s.%s = '%s': %s", key->section, key->name, value, why);
    got = complaint("", text, 1);
    CHECK_MSG(strncmp(got, want, strlen(want)) == 0 && count_lines(got) == 1, "got:  %s\n    want: %s", got, want);
}

/* The bound itself may break a rule between keys, but not its own range. */
static void in_range(const ConfigKey *key, const char *value)
{
    char text[256];
    snprintf(text, sizeof text, "[%s]\n%s = %s\n", key->section, key->name, value);
    const char *got = complaint(text, "", 1);
    CHECK_MSG(!strstr(got, "must lie between") && !strstr(got, "not a"), "%s: %s", text, got);
}

static void check_int_key(const ConfigKey *key)
{
    char text[64];
    snprintf(text, sizeof text, "%lld", (long long)key->int_low - 1);
    refused(key, text, "must lie between");
    if (key->int_high < INT64_MAX) snprintf(text, sizeof text, "%lld", (long long)key->int_high + 1);
    else snprintf(text, sizeof text, "9223372036854775808");
    refused(key, text, "must lie between");
    refused(key, "99999999999999999999999", "must lie between");
    refused(key, "3x", "not an integer");
    refused(key, "2.5", "not an integer");
    refused(key, "", "not an integer");
    snprintf(text, sizeof text, "%lld", (long long)key->int_low);
    in_range(key, text);
    snprintf(text, sizeof text, "%lld", (long long)key->int_high);
    in_range(key, text);
}

static void check_real_key(const ConfigKey *key)
{
    char text[64];
    snprintf(text, sizeof text, "%.17g", nextafter(key->real_low, -INFINITY));
    refused(key, text, "must lie between");
    snprintf(text, sizeof text, "%.17g", nextafter(key->real_high, INFINITY));
    refused(key, text, "must lie between");
    refused(key, "nan", "must lie between");
    refused(key, "inf", "must lie between");
    refused(key, "1,5", "not a number");
    refused(key, "", "not a number");
    snprintf(text, sizeof text, "%.17g", key->real_low);
    in_range(key, text);
    snprintf(text, sizeof text, "%.17g", key->real_high);
    in_range(key, text);
}

TEST(every_key_refuses_what_is_outside_its_range)
{
    for (int i = 0; i < CFG_COUNT; i++) {
        const ConfigKey *key = config_key((ConfigId)i);
        CHECK_MSG(strlen(key->meaning) > 3, "%s.%s", key->section, key->name);
        switch (key->kind) {
        case CONFIG_INT: check_int_key(key); break;
        case CONFIG_REAL: check_real_key(key); break;
        case CONFIG_BOOL:
            refused(key, "maybe", "must be true");
            refused(key, "", "must be true");
            if (!key->has_auto) refused(key, "auto", "must be true or false");
            break;
        case CONFIG_PICK:
            refused(key, "nosuch", "must be one of: ");
            refused(key, "", "must be one of: ");
            break;
        case CONFIG_TEXT: {
            char text[128];
            snprintf(text, sizeof text, "%s.%s=a\x01", key->section, key->name);
            CHECK(strstr(complaint("", text, 1), "must not contain control characters"));
            snprintf(text, sizeof text,
                     "%s.%s=a\xC2\x9B"
                     "2J",
                     key->section, key->name); /* C1 */
            CHECK(strstr(complaint("", text, 1), "must not contain control characters"));
            snprintf(text, sizeof text, "%s.%s=;b", key->section, key->name);
            CHECK(strstr(complaint("", text, 1), "must not contain ';'"));
            snprintf(text, sizeof text, "%s.%s=caf\xE9", key->section, key->name);
            CHECK(strstr(complaint("", text, 1), "must be UTF-8"));
            break;
        }
        }
    }
}

TEST(words_for_true_and_false)
{
    static const char *const words[] = { "false", "true", "no", "yes", "off", "on", "0", "1" };
    for (int i = 0; i < 8; i++) {
        Config c;
        char text[64];
        /* (which may be full, too) */
        snprintf(text, sizeof text, "model.sinks=%s model.qk_norm=%s", words[i], words[i]);
        OK(read_as(&c, NULL, text, 1));
        CHECK(c.model.sinks == i % 2);
        CHECK(c.model.qk_norm == (i % 2 ? QK_NORM_HEADS : QK_NORM_NONE));
        config_release(&c);
    }
}

/* Who reads about a run takes the fewest ranks that hold its layout; keys at their limits are refused, not computed
 * with. */
TEST(any_number_of_ranks)
{
    Config c;
    OK(read_as(&c, NULL, "parallel.tp=4", CONFIG_ANY_WORLD));
    CHECK(c.derived.world_size == 4 && c.derived.dp == 1 && c.derived.microbatches == 8);
    config_release(&c);
    const char *most = "parallel.tp=4096 parallel.pp=4096 train.micro_batch=1048576 train.global_batch=1073741824 "
                       "model.seq=16777216";
    const char *unbuilt = "parallel.tp=4096 parallel.pp=4096 parallel.cp=4096 parallel.ep=65536 parallel.etp=4096";
    for (int64_t world = CONFIG_ANY_WORLD; world <= CONFIG_RANKS_MAX; world = world < 1 ? 1 : 2 * world) {
        CHECK(strstr(complaint(NULL, most, world), "tp x pp x cp must divide the number of ranks"));
        CHECK(strstr(complaint(NULL, unbuilt, world), "parallel.etp = '4096' with moe.experts = '0'"));
    }
}

/* ---- rules between keys ---- */

typedef struct {
    const char *wrong, *right; /* overrides */
    const char *says;
    int64_t world_size;
} Rule;

#define MOE "moe.experts=8 model.bias=false "
#define ROPE "model.position=rope "

#define EIGHT(text) text text text text text text text text
#define LONG EIGHT(EIGHT(EIGHT("12345678"))) /* 4,096 bytes */

/* A sample of 64 tokens: each of 4 ranks has 16 rows. */
#define LATENT_ROWS                                                                                             \
    "run.precision=fp8 run.fp8=mxfp8 run.reproducible=layout parallel.tp=4 parallel.seq_blocks=4 model.seq=64 " \
    "model.attention=mla model.position=rope model.kv_lora_rank=64 model.qk_rope_head_dim=32 "                  \
    "model.qk_nope_head_dim=32 model.v_head_dim=32 "

static const Rule rules[] = {
    { "run.dir=" LONG, "run.dir=x", "a path of at most 3840 bytes", 1 },
    { "data.tokenizer=" LONG, "data.tokenizer=x", "a path of at most 3840 bytes", 1 },
    { "checkpoint.resume=" LONG, "checkpoint.resume=x", "a path of at most 3840 bytes", 1 },
    { "checkpoint.load=" LONG, "checkpoint.load=x", "a path of at most 3840 bytes", 1 },
    { "run.name=a/b", "run.name=a", "run.name = 'a/b': a name must not contain '/'", 1 },
    { "run.name=.", "run.name=...", "run.name = '.': a name of a folder", 1 },
    { "run.name=..", "run.name=..a", "run.name = '..': a name of a folder", 1 },
    { "run.reproducible=layout run.precision=fp16", "run.reproducible=layout run.precision=bf16",
      "on the CPU in fp32, bf16 and fp8 only", 1 },
    { "run.reproducible=layout run.precision=fp8 parallel.cp=2",
      "run.reproducible=layout run.precision=bf16 parallel.cp=2", "which cp and slices cut", 2 },
    { "run.reproducible=layout run.precision=fp8 parallel.slices=2", "run.reproducible=layout run.precision=fp8",
      "which cp and slices cut", 1 },
    { "debug.dot=vdpbf16", "debug.dot=vdpbf16 run.precision=bf16", "only the CPU in bf16 has a choice of products", 1 },
    { "run.reproducible=layout run.device=cuda run.precision=fp32", "run.device=cuda run.precision=fp32",
      "on the CPU in fp32, bf16 and fp8 only", 1 },
    { "run.precision=fp8 run.fp8=mxfp8 run.device=cuda run.fp8_experts=true moe.experts=8 moe.ffn=256",
      "run.precision=fp8 run.fp8=blockwise run.device=cuda run.fp8_experts=true moe.experts=8 moe.ffn=256",
      "with a scale for 32 numbers are built for the CPU alone", 1 },
    { "run.precision=fp8 run.fp8=mxfp8 run.device=cuda parallel.tp=2 parallel.overlap_tp=2 model.seq=96 "
      "train.micro_batch=1",
      "run.precision=fp8 run.device=cuda parallel.tp=2 parallel.overlap_tp=2 model.seq=96 train.micro_batch=1",
      "(mxfp8: 32), in each band", 2 },
    { "run.precision=fp8 run.device=cuda parallel.tp=2 parallel.overlap_tp=2 model.seq=48 train.micro_batch=1",
      "run.precision=fp8 run.device=cuda parallel.tp=2 parallel.overlap_tp=2 model.seq=96 train.micro_batch=1",
      "multiples of 16 rows (mxfp8: 32), in each band", 2 },
    { "run.fp8=blockwise", "run.fp8=blockwise run.precision=fp8", "only precision = fp8 has operands of 8 bits", 1 },
    { "run.fp8_keep=2", "run.fp8_keep=2 run.precision=fp8", "only precision = fp8 has operands of 8 bits", 1 },
    { "run.fp8_weights=true", "run.fp8_weights=true run.precision=fp8", "only precision = fp8 has operands of 8 bits",
      1 },
    { "run.precision=fp8 model.layers=2", "run.precision=fp8 model.layers=3", "no block is left", 1 },
    { "run.precision=fp8 model.ffn=1000", "run.precision=fp8 model.ffn=1008", "must be multiples of 16", 1 },
    { "run.precision=fp8 run.fp8=mxfp8 model.ffn=1008", "run.precision=fp8 model.ffn=1008", "must be multiples of 32",
      1 },
    { "run.precision=fp8 model.mixer=delta model.delta_key_heads=3 model.delta_value_heads=3 model.delta_value_dim=8",
      "run.precision=fp8 model.mixer=delta model.delta_key_heads=3 model.delta_value_heads=6 model.delta_value_dim=8",
      "columns of Gated DeltaNet's products must be multiples of 16", 1 },
    { "run.precision=fp8 model.mixer=kda model.kda_heads=2 model.kda_head_dim=8",
      "run.precision=fp8 model.mixer=kda model.kda_heads=2 model.kda_head_dim=16",
      "columns of Kimi Delta Attention's products must be multiples of 16", 1 },
    { "run.precision=fp8 model.mixer=mamba2 model.mamba_heads=3 model.mamba_head_dim=24",
      "run.precision=fp8 model.mixer=mamba2 model.mamba_heads=4 model.mamba_head_dim=24",
      "columns of Mamba-2's products must be multiples of 16", 1 },
    { "run.precision=fp8 run.fp8=blockwise run.fp8_experts=true moe.experts=8 moe.ffn=128 moe.latent=64",
      "run.precision=fp8 run.fp8=blockwise run.fp8_experts=true moe.experts=8 moe.ffn=128 moe.latent=128",
      "with moe.latent = '64', moe.ffn = '128', parallel.etp = '1': experts' latent, and", 1 },
    { "run.precision=fp8 model.seq=1000 train.micro_batch=1", "run.precision=fp8 model.seq=1000 train.micro_batch=2",
      "must be multiples of 16", 1 },
    { "run.precision=fp8 run.fp8=blockwise run.reproducible=layout model.seq=64",
      "run.precision=fp8 run.reproducible=layout model.seq=64", "cuts a block of numbers", 1 },
    { "run.precision=fp8 run.fp8=blockwise run.reproducible=layout parallel.tp=4",
      "run.precision=fp8 run.fp8=blockwise run.reproducible=layout parallel.tp=2", "cuts a block of numbers", 4 },
    { LATENT_ROWS "train.micro_batch=1", LATENT_ROWS "train.micro_batch=2", "cuts a block of numbers", 4 },
    { "run.fp8_experts=true", "run.fp8_experts=true run.precision=fp8 run.fp8=blockwise moe.experts=8",
      "only precision = fp8 has operands of 8 bits, and mixtures experts", 1 },
    { "run.fp8_experts=true run.precision=fp8 run.fp8=blockwise",
      "run.fp8_experts=true run.precision=fp8 run.fp8=blockwise moe.experts=8", "and mixtures experts", 1 },
    { "run.fp8_experts=true run.precision=fp8 moe.experts=8",
      "run.fp8_experts=true run.precision=fp8 run.fp8=mxfp8 moe.experts=8", "whose tensors have one scale each", 1 },
    { "run.precision=fp8 run.fp8=blockwise run.fp8_experts=true moe.experts=8 moe.ffn=192",
      "run.precision=fp8 run.fp8=mxfp8 moe.experts=8 moe.ffn=192", "must be multiples of 128", 1 },
    { "run.precision=fp8 run.fp8=blockwise moe.experts=8 moe.ffn=128 parallel.etp=2",
      "run.precision=fp8 run.fp8=blockwise moe.experts=8 moe.ffn=256 parallel.etp=2",
      "what etp leaves of an expert's width", 2 },
    { "run.precision=fp8 run.fp8=nvfp4 run.device=cuda", "run.precision=fp8 run.fp8=nvfp4",
      "codes of 4 bits have no products on GPUs here", 1 },
    { "run.precision=fp8 run.fp8=nvfp4 run.fp8_experts=true moe.experts=8",
      "run.precision=fp8 run.fp8=nvfp4 moe.experts=8", "whose tensors have one scale each", 1 },
    { "run.precision=fp8 run.fp8=nvfp4 parallel.tp=2 parallel.sp=true model.seq=48 train.micro_batch=1",
      "run.precision=fp8 run.fp8=nvfp4 parallel.tp=2 parallel.sp=true model.seq=96 train.micro_batch=1",
      "that a rank has must be a multiple of 16, too", 2 },
    { "run.precision=fp8 run.fp8=nvfp4 model.ffn=1000", "run.precision=fp8 run.fp8=nvfp4 model.ffn=1008",
      "must be multiples of 16", 1 },
    { "run.precision=fp8 run.fp8=nvfp4 run.reproducible=layout model.seq=40 train.micro_batch=2",
      "run.precision=fp8 run.fp8=nvfp4 run.reproducible=layout model.seq=48", "cuts a block of numbers", 1 },
    { "run.graphs=true", "run.graphs=true run.device=cuda", "run.graphs = 'true'", 1 },
    { "run.fp32_vectors=true run.device=cuda", "run.fp32_vectors=true run.precision=bf16",
      "kernels of GPUs read all weights in one", 1 },
    { "run.fp32_row_sums=true run.device=cuda", "run.fp32_row_sums=true run.precision=bf16",
      "kernels of GPUs sum rows in the precision of activations", 1 },
    { "run.fp32_row_sums=true run.device=cuda", "run.fp32_row_sums=true run.device=cuda run.precision=fp32",
      "kernels of GPUs sum rows in the precision of activations", 1 },
    { "run.fp32_row_sums=true run.precision=bf16 run.fp32_residual=false",
      "run.fp32_row_sums=true run.precision=bf16 run.fp32_residual=true", "a stream and norms of fp32", 1 },
    { "run.fp32_row_sums=true run.precision=fp16 run.fp32_vectors=false",
      "run.fp32_row_sums=true run.precision=fp32 run.fp32_vectors=false", "a stream and norms of fp32", 1 },
    { "run.autotune=true run.device=cpu", "run.autotune=true run.device=cuda", "run.autotune = 'true'", 1 },
    { "run.bind=core run.device=cuda", "run.bind=core", "bound near these", 1 },
    { "debug.dump=w", "debug.dump=w run.precision=fp8 model.layers=3", "products with precision = fp8 are written", 1 },
    { "debug.poison=true run.device=cuda", "debug.poison=true", "only the CPU's memory can be filled", 1 },
    { "model.kv_heads=5", "model.kv_heads=4",
      "model.kv_heads = '5' with model.heads = '12': heads must be a multiple of kv_heads", 1 },
    { "model.hidden=100", "model.hidden=120", "hidden must be a multiple of heads unless head_dim is given", 1 },
    { "model.hidden=100", "model.hidden=100 model.head_dim=8", "unless head_dim is given", 1 },
    { "model.hidden=49164", "model.hidden=49152",
      "model.hidden = '49164' with model.head_dim = '4097', model.heads = '12': head_dim, if not given "
      "hidden / heads, must "
      "not be above 4096",
      1 },
    { "model.arch=llama model.heads=2 model.hidden=20", "model.arch=llama model.heads=2 model.hidden=24",
      "too narrow for the usual ffn", 1 },
    { "model.position=rope model.head_dim=7", "model.position=learned model.head_dim=7",
      "rotary positions need an even head_dim, or rope_dim", 1 },
    { ROPE "model.rope_dim=7", ROPE "model.rope_dim=6 model.head_dim=7", "columns turn in pairs: it must be even", 1 },
    { ROPE "model.rope_dim=66", ROPE "model.rope_dim=64",
      "model.rope_dim = '66' with model.head_dim = '64': a head has fewer columns", 1 },
    { "model.rope_dim=4", ROPE "model.rope_dim=4", "model.position = 'learned': only position = rope has it", 1 },
    { "model.rope_scaling=linear", ROPE "model.rope_scaling=linear", "only position = rope has angles to scale", 1 },
    { ROPE "model.rope_factor=8", ROPE "model.rope_factor=1", "nothing is scaled: give rope_scaling", 1 },
    { ROPE "model.rope_scaling=linear model.rope_original=64", ROPE "model.rope_scaling=llama3 model.rope_original=64",
      "only rope_scaling = llama3 or yarn reads it", 1 },
    { ROPE "model.rope_slow=2", ROPE "model.rope_slow=2 model.rope_scaling=yarn", "llama3 or yarn reads it", 1 },
    { ROPE "model.rope_fast=4", ROPE "model.rope_fast=32", "llama3 or yarn reads it", 1 },
    { ROPE "model.rope_scaling=yarn model.seq=7", ROPE "model.rope_scaling=yarn model.seq=8",
      "seq / rope_factor is less than 1", 1 },
    { ROPE "model.rope_scaling=llama3 model.rope_slow=4", ROPE "model.rope_scaling=yarn model.rope_slow=32",
      "rope_slow must be below rope_fast", 1 },
    { "run.device=cuda model.hidden=96 model.heads=8", "run.device=cpu model.hidden=96 model.heads=8",
      "must be a multiple of 8, at most 256", 1 },
    { "run.device=cuda model.heads=1", "run.device=cuda model.heads=3", "must be a multiple of 8, at most 256", 1 },
    { "run.device=cuda model.head_dim=64 model.hidden=764",
      "run.device=cuda model.head_dim=64 model.hidden=764 run.precision=fp32", "rows of products begin on 16 bytes",
      1 },
    { "run.device=cuda model.ffn=3080 parallel.tp=2", "run.device=cuda model.ffn=3080",
      "ffn / tp must be a multiple of 8", 2 },
    { "run.device=cuda moe.experts=4 moe.shared_ffn=100",
      "run.device=cuda moe.experts=4 moe.shared_ffn=100 run.precision=fp32", "shared_ffn / tp must be a multiple of 8",
      1 },
    { "run.device=cuda moe.experts=4 moe.shared_ffn=72 parallel.tp=2",
      "run.device=cuda moe.experts=4 moe.shared_ffn=72", "shared_ffn / tp must be a multiple of 8", 2 },
    { ROPE "model.rope_scaling=llama3 model.rope_magnitude=2", ROPE "model.rope_scaling=yarn model.rope_magnitude=2",
      "only rope_scaling = yarn reads it", 1 },
    { ROPE "model.rope_scaling=llama3 model.rope_truncate=false",
      ROPE "model.rope_scaling=yarn model.rope_truncate=false", "only rope_scaling = yarn reads it", 1 },
    { ROPE "model.rope_scaling=yarn model.rope_base=1", ROPE "model.rope_scaling=llama3 model.rope_base=1",
      "yarn needs a base above 1", 1 },
    { "log.prometheus=loss.svg", "log.prometheus=gauges.prom", "the run writes this file itself", 1 },
    { "model.rope_base_local=100", ROPE "model.rope_base_local=100", "only position = rope has it", 1 },
    { ROPE "model.rope_base_local=0.5", ROPE "model.rope_base_local=1", "must be 0 (as all others), or 1 and more", 1 },
    { "model.block_norms=both", "model.block_norms=both model.bias=false", "behind the norm of what a layer gives", 1 },
    { "model.block_norms=post", "model.block_norms=post model.bias=false", "behind the norm of what a layer gives", 1 },
    { "model.block_norms=post model.bias=false model.state_norms=pre",
      "model.block_norms=post model.bias=false model.state_norms=pre model.mixer=delta",
      "only blocks with a state beside block_norms = both or post read it", 1 },
    { "model.state_norms=pre model.mixer=delta", "model.mixer=delta",
      "only blocks with a state beside block_norms = both or post read it", 1 },
    { "model.mixer=delta model.block_norms=parallel model.state_norms=pre",
      "model.mixer=delta model.block_norms=both model.bias=false model.state_norms=pre",
      "only blocks with a state beside block_norms = both or post read it", 1 },
    { "model.qk_norm=all", "model.qk_norm=full", "must be one of: false true full", 1 },
    { "model.arch=llama model.qk_norm=full model.seq=32 model.ffn=256 model.heads=64 model.hidden=128 "
      "parallel.sp=false parallel.tp_blocks=64 parallel.tp=64",
      "model.arch=llama model.qk_norm=full model.seq=64 model.ffn=256 model.heads=64 model.hidden=128 "
      "parallel.sp=false parallel.tp_blocks=64 parallel.tp=64",
      "each rank of tp norms some rows: tp must not be above seq / (cp x slices)", 64 },
    { "model.embed_scale=8", ROPE "model.embed_scale=8", "embeddings are scaled before positions are added", 1 },
    { "model.final_softcap=1e-4", "model.final_softcap=1e-3", "must be 0 (no cap), or 0.001 and more", 1 },
    { "model.mixer=delta,mamba", "model.mixer=delta,mamba2", "must be attention, delta, kda, mamba2 or none, or a list",
      1 },
    { "model.mixer=none", "model.mixer=none,attention", "no token would see those before it", 1 },
    { "model.mixer=attention,none model.ffn_layers=1,0", "model.mixer=attention,none model.ffn_layers=0,1",
      "block 1 would have neither a mixer nor a feed-forward layer", 1 },
    { "model.ffn_layers=0,2", "model.ffn_layers=0,1",
      "model.ffn_layers = '0,2': must be 0 or 1, or a list of them", 1 },
    { "model.ffn_layers=0*12,1", "model.ffn_layers=0*11,1", "the list is about 13 blocks, the model has 12", 1 },
    { "model.ffn_layers=0,1 model.block_norms=parallel", "model.ffn_layers=0,1 model.block_norms=post model.bias=false",
      "layers stand in parallel in blocks that have two", 1 },
    { "model.mixer=none,attention model.block_norms=parallel_two", "model.mixer=none,attention",
      "layers stand in parallel in blocks that have two", 1 },
    { "model.mixer=delta,none model.qk_norm=true", "model.mixer=attention,none model.qk_norm=true",
      "no block has attention", 1 },
    { "model.mixer=none,attention model.window=16,0", "model.mixer=none,attention model.window=0,16",
      "no block with attention has a window", 1 },
    { "model.mixer=delta*12,attention", "model.mixer=delta*11,attention",
      "the list is about 13 blocks, the model has 12", 1 },
    { "model.delta_key_heads=4", "model.delta_key_heads=4 model.mixer=delta", "only mixer = delta reads it", 1 },
    { "model.delta_value_heads=24", "model.delta_value_heads=24 model.mixer=delta", "only mixer = delta reads it", 1 },
    { "model.delta_value_heads=18 model.mixer=delta", "model.delta_value_heads=24 model.mixer=delta",
      "must be a multiple of delta_key_heads", 1 },
    { "model.delta_key_dim=32", "model.delta_key_dim=32 model.mixer=delta", "only mixer = delta reads it", 1 },
    { "model.delta_value_dim=32", "model.delta_value_dim=32 model.mixer=delta", "only mixer = delta reads it", 1 },
    { "model.mixer=delta model.delta_value_heads=12 parallel.tp=4 run.device=cuda",
      "model.mixer=delta model.delta_value_heads=48 parallel.tp=4 run.device=cuda",
      "2 delta_value_heads / tp must be a multiple of 8 in 16 bits", 4 },
    { "model.mixer=delta model.delta_value_dim=20 model.delta_value_heads=24 run.device=cuda",
      "model.mixer=delta model.delta_value_dim=24 model.delta_value_heads=24 run.device=cuda",
      "the widths of its heads must be multiples of 8", 1 },
    { "model.delta_conv=3", "model.delta_conv=3 model.mixer=delta", "only mixer = delta reads it", 1 },
    { "model.delta_norm_eps=1e-3", "model.delta_norm_eps=1e-3 model.mixer=delta", "only mixer = delta reads it", 1 },
    { "model.delta_negative=true", "model.delta_negative=true model.mixer=delta", "only mixer = delta reads it", 1 },
    { "model.mixer=delta model.delta_key_heads=6 parallel.tp_blocks=4", "model.mixer=delta parallel.tp_blocks=4",
      "with mixer = delta tp_blocks must divide delta_key_heads", 1 },
    { "model.mixer=delta model.delta_key_heads=3 parallel.tp=2",
      "model.mixer=delta model.delta_key_heads=6 parallel.tp=2", "tp must divide delta_key_heads", 2 },
    { "model.mixer=delta model.delta_key_heads=6 parallel.cp=4 parallel.cp_comm=a2a model.seq=1024",
      "model.mixer=delta model.delta_key_heads=4 parallel.cp=4 parallel.cp_comm=a2a model.seq=1024",
      "ranks of cp exchange positions for heads: tp x cp must divide delta_key_heads", 4 },
    { "model.position=rope model.mixer=delta", "model.position=rope model.mixer=attention,delta",
      "no block has attention, which alone", 1 },
    { "model.kda_heads=4", "model.kda_heads=4 model.mixer=kda", "only mixer = kda reads it", 1 },
    { "model.mixer=kda model.kda_heads=12 model.kda_head_dim=64 run.device=cuda",
      "model.mixer=kda model.kda_heads=16 model.kda_head_dim=64 run.device=cuda",
      "2 kda_head_dim + kda_heads must be a multiple of 8 in 16 bits", 1 },
    { "model.kda_head_dim=32", "model.kda_head_dim=32 model.mixer=kda", "only mixer = kda reads it", 1 },
    { "model.mixer=kda model.kda_heads=16 model.kda_head_dim=20 run.device=cuda",
      "model.mixer=kda model.kda_heads=16 model.kda_head_dim=24 run.device=cuda",
      "the widths of its heads must be multiples of 8", 1 },
    { "model.kda_conv=3", "model.kda_conv=3 model.mixer=kda", "only mixer = kda reads it", 1 },
    { "model.kda_bound=-5", "model.kda_bound=-5 model.mixer=kda", "only mixer = kda reads it", 1 },
    { "model.mixer=kda model.kda_heads=6 parallel.tp_blocks=4",
      "model.mixer=kda model.kda_heads=4 parallel.tp_blocks=4",
      "with mixer = kda tp_blocks must divide kda_heads", 1 },
    { "model.mixer=kda model.kda_heads=4 parallel.cp=2 model.seq=1024",
      "model.mixer=kda model.kda_heads=4 parallel.cp=2 parallel.cp_comm=a2a model.seq=1024", "theirs must be a2a", 2 },
    { "model.mixer=kda model.kda_heads=3 parallel.tp=2", "model.mixer=kda model.kda_heads=6 parallel.tp=2",
      "tp must divide kda_heads", 2 },
    { "model.mixer=kda model.kda_heads=6 parallel.cp=4 parallel.cp_comm=a2a model.seq=1024",
      "model.mixer=kda model.kda_heads=4 parallel.cp=4 parallel.cp_comm=a2a model.seq=1024",
      "ranks of cp exchange positions for heads: tp x cp must divide kda_heads", 4 },
    { "model.mamba_heads=4", "model.mamba_heads=4 model.mixer=mamba2", "only mixer = mamba2 reads it", 1 },
    { "model.mixer=mamba2 model.mamba_heads=12 run.device=cuda",
      "model.mixer=mamba2 model.mamba_heads=16 run.device=cuda",
      "mamba_heads / tp must be a multiple of 8 in 16 bits", 1 },
    { "model.mamba_head_dim=32", "model.mamba_head_dim=32 model.mixer=mamba2", "only mixer = mamba2 reads it", 1 },
    { "model.mixer=mamba2 model.mamba_heads=16 model.mamba_head_dim=20 run.device=cuda",
      "model.mixer=mamba2 model.mamba_heads=16 model.mamba_head_dim=24 run.device=cuda",
      "on GPUs the widths of its heads must be multiples of 8", 1 },
    { "model.mamba_groups=2", "model.mamba_groups=2 model.mixer=mamba2", "only mixer = mamba2 reads it", 1 },
    { "model.mixer=mamba2 model.mamba_groups=5", "model.mixer=mamba2 model.mamba_groups=6",
      "mamba_groups must divide mamba_heads", 1 },
    { "model.mamba_state=32", "model.mamba_state=32 model.mixer=mamba2", "only mixer = mamba2 reads it", 1 },
    { "model.mixer=mamba2 model.mamba_heads=16 model.mamba_state=20 run.device=cuda",
      "model.mixer=mamba2 model.mamba_heads=16 model.mamba_state=24 run.device=cuda",
      "on GPUs the widths of its keys must be multiples of 8", 1 },
    { "model.mamba_conv=3", "model.mamba_conv=3 model.mixer=mamba2", "only mixer = mamba2 reads it", 1 },
    { "model.mamba_conv_bias=false", "model.mamba_conv_bias=false model.mixer=mamba2", "only mixer = mamba2 reads it",
      1 },
    { "model.mamba_dt_min=0.001", "model.mamba_dt_min=0.001 model.mixer=mamba2", "only mixer = mamba2 reads it", 1 },
    { "model.mixer=mamba2 model.mamba_groups=6 parallel.tp_blocks=4",
      "model.mixer=mamba2 model.mamba_groups=4 parallel.tp_blocks=4",
      "with mixer = mamba2 tp_blocks must divide mamba_groups", 1 },
    { "model.mixer=mamba2 model.mamba_groups=3 parallel.tp=2",
      "model.mixer=mamba2 model.mamba_groups=6 parallel.tp=2", "tp must divide mamba_groups", 2 },
    { "model.mixer=mamba2 model.mamba_groups=6 parallel.cp=4 parallel.cp_comm=a2a model.seq=1024",
      "model.mixer=mamba2 model.mamba_groups=4 parallel.cp=4 parallel.cp_comm=a2a model.seq=1024",
      "ranks of cp exchange positions for heads: tp x cp must divide mamba_groups", 4 },
    { "model.mixer=delta model.rope_base=500",
      "model.mixer=attention,delta model.rope_base=500", "no block has attention", 1 },
    { "model.mixer=delta model.rope_layers=1,0",
      "model.position=rope model.mixer=attention,delta model.rope_layers=1,0", "no block has attention", 1 },
    { "model.mixer=delta model.rope_dim=32",
      "model.position=rope model.mixer=attention,delta model.rope_dim=32", "no block has attention", 1 },
    { "model.mixer=delta model.rope_base_local=100",
      "model.position=rope model.mixer=attention,delta model.rope_base_local=100", "no block has attention", 1 },
    { "model.mixer=delta model.rope_scaling=linear",
      "model.position=rope model.mixer=attention,delta model.rope_scaling=linear", "no block has attention", 1 },
    { "model.mixer=delta model.attention_dropout=0.1",
      "model.mixer=attention,delta model.attention_dropout=0.1", "no block has attention", 1 },
    { "model.mixer=delta model.qk_norm=true",
      "model.mixer=attention,delta model.qk_norm=true", "no block has attention", 1 },
    { "model.mixer=delta model.attention_scale=0.5",
      "model.mixer=attention,delta model.attention_scale=0.5", "no block has attention", 1 },
    { "model.mixer=delta model.attention_softcap=30",
      "model.mixer=attention,delta model.attention_softcap=30", "no block has attention", 1 },
    { "model.mixer=delta model.sinks=true",
      "model.mixer=attention,delta model.sinks=true", "no block has attention", 1 },
    { "model.mixer=delta model.attention_gate=true",
      "model.mixer=attention,delta model.attention_gate=true", "no block has attention", 1 },
    { "model.mixer=delta model.window=16",
      "model.mixer=attention,delta model.window=16", "no block has attention", 1 },
    { "model.mixer=delta model.kv_heads=4", "model.mixer=delta model.kv_heads=12", "no block has attention", 1 },
    { "model.mixer=mamba2 model.head_dim=32", "model.mixer=delta model.head_dim=32",
      "no block has attention, or reads it in the place", 1 },
    { "model.mixer=mamba2 model.head_dim=32", "model.mixer=mamba2 model.head_dim=64",
      "no block has attention, or reads it in the place", 1 },
    { "model.mixer=delta model.attention_bias=qkv", "model.mixer=delta,attention model.attention_bias=qkv",
      "no block has attention", 1 },
    { "model.mixer=delta model.bias=false model.attention_bias=all", "model.mixer=delta model.attention_bias=all",
      "no block has attention", 1 },
    { "model.mixer=delta parallel.attn_block=8", "model.mixer=delta parallel.attn_block=64", "no block has attention",
      1 },
    { "model.mixer=kda model.heads=7", "model.mixer=kda model.heads=7 model.kda_head_dim=64",
      "hidden must be a multiple of heads", 1 },
    { "optim.mup_base=384 model.head_bias=true", "model.head_bias=true", "and a bias not", 1 },
    { "optim.mup_base=384 model.mixer=delta optim.mup_head_dim=64",
      "optim.mup_base=384 model.mixer=attention,delta optim.mup_head_dim=64", "no block has attention", 1 },
    { "model.mixer=delta optim.qk_clip=100",
      "model.mixer=attention,delta optim.qk_clip=100", "no block has attention", 1 },
    { "model.mixer=delta log.max_attention_logit=true",
      "model.mixer=attention,delta log.max_attention_logit=true", "no block has attention", 1 },
    { "model.window=8,", "model.window=8,0", "model.window = '8,': must be a number of positions", 1 },
    { "model.window=-1", "model.window=0", "must be a number of positions up to 16777216", 1 },
    { "model.window=16777217", "model.window=16777216*5,0", "positions up to 16777216, or a list of them", 1 },
    { "model.window=8*12,0", "model.window=8*11,0", "the list is about 13 blocks, the model has 12", 1 },
    { "model.position=rope model.rope_layers=2", "model.position=rope model.rope_layers=1,0",
      "model.rope_layers = '2': must be 0 or 1, or a list of them", 1 },
    { "model.position=rope model.rope_layers=1*12,0", "model.position=rope model.rope_layers=1*11,0",
      "the list is about 13 blocks", 1 },
    { "model.position=rope model.rope_layers=0", "model.position=rope model.rope_layers=0*11,1",
      "no block has rotary positions", 1 },
    { "model.mixer=delta,attention model.position=rope model.rope_layers=1,0",
      "model.mixer=delta,attention model.position=rope model.rope_layers=0,1",
      "no block with attention has rotary positions", 1 },
    { "model.mixer=delta,attention model.window=16,0", "model.mixer=delta,attention model.window=0,16",
      "no block with attention has a window", 1 },
    { "model.rope_layers=1,0", "model.position=rope model.rope_layers=1,0", "only position = rope has it", 1 },
    { "model.attention_softcap=1e-4", "model.attention_softcap=1e-3", "must be 0 (no cap), or 0.001 and more", 1 },
    { "model.dropout=1", "model.dropout=0.99", "model.dropout = '1': dropout must be below 1", 1 },
    { "model.dropout=0.99999999", "model.dropout=0.9999999",
      "model.dropout = '0.99999999': dropout must be below 1 in single precision", 1 },
    { "model.attention_dropout=1", "model.attention_dropout=0", "model.attention_dropout = '1': dropout must be", 1 },
    { "model.attention_dropout=0.99999999", "model.attention_dropout=0.9999999", "below 1 in single precision", 1 },
    { "parallel.tp_blocks=6", "parallel.tp_blocks=16", "parallel.tp_blocks = '6': must be a power of two", 1 },
    { "parallel.tp_blocks=16 model.ffn=40", "parallel.tp_blocks=8 model.ffn=40", "tp_blocks must divide ffn", 1 },
    { "parallel.tp_blocks=16 model.heads=2 model.head_dim=4 model.kv_heads=1 model.ffn=64",
      "parallel.tp_blocks=8 model.heads=2 model.head_dim=4 model.kv_heads=1 model.ffn=64",
      "tp_blocks must divide heads * head_dim", 1 },
    { "parallel.tp_blocks=4 model.heads=4 model.head_dim=3 model.kv_heads=1 model.ffn=64 model.position=none",
      "parallel.tp_blocks=2 model.heads=4 model.head_dim=3 model.kv_heads=1 model.ffn=64 model.position=none",
      "tp_blocks must divide (heads + 2 kv_heads) * head_dim", 1 },
    { "parallel.seq_blocks=3 model.seq=48", "parallel.seq_blocks=4 model.seq=48", "must be a power of two", 1 },
    { "parallel.seq_blocks=32 model.seq=48", "parallel.seq_blocks=16 model.seq=48", "seq_blocks must divide seq", 1 },
    { "parallel.attn_block=48", "parallel.attn_block=32", "parallel.attn_block = '48': must be a power of two", 1 },
    { "parallel.tp=2", "parallel.tp=1",
      "tp x pp x cp must divide the number of ranks: the world size is 1; take 2 ranks", 1 },
    { "parallel.tp=4 train.global_batch=12", "parallel.tp=3 train.global_batch=12 train.micro_batch=3",
      "the world size is 6", 6 },
    { "parallel.tp=8", "parallel.tp=4", "tp must divide kv_heads x parts, here 12 x 1", 8 },
    { "parallel.tp=8 model.kv_heads=2", "parallel.tp=4 model.kv_heads=2", /* 6 query heads each: two parts of 3 */
      "tp must divide kv_heads x parts, here 2 x 2", 8 },
    { "parallel.tp=8 model.kv_heads=1 model.heads=8 model.head_dim=4 parallel.tp_blocks=4 "
      "run.reproducible=run",
      "parallel.tp=8 model.kv_heads=1 model.heads=8 model.head_dim=8 parallel.tp_blocks=8",
      "tp must divide kv_heads x parts, here 1 x 4", 8 },
    { "parallel.tp=4 model.kv_heads=2 model.head_dim=33", "parallel.tp=4 model.kv_heads=2 model.head_dim=34",
      "here 2 x 1", 4 },
    { "parallel.tp=4 parallel.tp_blocks=2 model.ffn=66 run.reproducible=run",
      "parallel.tp=2 parallel.tp_blocks=2 model.ffn=66 run.reproducible=run", "tp must divide ffn", 4 },
    { "parallel.sp=true", "parallel.sp=auto", "it needs tp > 1; take parallel.sp=auto", 1 },
    { "parallel.sp=true", "parallel.sp=true parallel.tp=2", "it needs tp > 1", 2 },
    { "parallel.tp=2 model.seq=9 run.reproducible=run", "parallel.tp=2 model.seq=9 parallel.sp=false",
      "with sp, tp must divide micro_batch * seq", 2 },
    { "parallel.tp=3 run.reproducible=layout train.micro_batch=3 train.global_batch=9",
      "parallel.tp=3 run.reproducible=run train.micro_batch=3 train.global_batch=9", "cuts inside a canonical block",
      3 },
    { "parallel.tp=4 run.reproducible=layout parallel.tp_blocks=2",
      "parallel.tp=4 run.reproducible=layout parallel.tp_blocks=4", "cuts inside a canonical block", 4 },
    { "parallel.cp=3 model.seq=1024 train.global_batch=6", "parallel.cp=2 model.seq=1024 train.global_batch=6",
      "each rank has two of 2 x cp equal parts of a sequence: 2 x cp must divide seq; take parallel.cp=2", 6 },
    { "parallel.cp=2 model.seq=9", "parallel.cp=2 model.seq=12", "2 x cp must divide seq; take parallel.cp=1", 2 },
    { "parallel.cp=8 run.reproducible=layout", "parallel.cp=8 run.reproducible=layout parallel.seq_blocks=16",
      "2 x cp must divide seq_blocks; take parallel.seq_blocks=16, or run.reproducible=run", 8 },
    { "parallel.cp=2 parallel.cp_comm=ring parallel.attn_block=512 run.reproducible=layout",
      "parallel.cp=2 parallel.cp_comm=ring parallel.attn_block=256 run.reproducible=layout",
      "attn_block must divide seq / (2 x its ranks), here 256", 2 },
    { "parallel.cp=2 parallel.cp_comm=rings", "parallel.cp=2 parallel.cp_comm=ring*2,a2a",
      "must be allgather, ring, a2a, hierarchical or state, or a list of them", 2 },
    { "parallel.cp_comm=ring*4096", "parallel.cp_comm=ring*2", "the list is about 4096 blocks, the model has", 1 },
    { "train.recompute=selectively", "train.recompute=selective",
      "must be none, selective or full, or a list of them with repetitions", 1 },
    { "train.recompute=full*2,", "train.recompute=full*2,none", "must be none, selective or full, or a list", 1 },
    { "train.recompute=full*0,none", "train.recompute=full*1,none", "must be none, selective or full, or a list", 1 },
    { "train.recompute=full*2000", "train.recompute=full*2", "the list is about more layers than the model has", 1 },
    { "train.offload=13", "train.offload=12", "the model has fewer layers", 1 },
    { "train.offload=2 parallel.pp=2 parallel.slices=2", "train.offload=2 parallel.pp=2",
      "later slices read what layers keep", 2 },
    { "parallel.cp=32 parallel.cp_comm=ring", "parallel.cp=16 parallel.cp_comm=ring train.global_batch=8",
      "a ring has at most 16 ranks", 32 },
    { "parallel.cp=16 parallel.cp_comm=a2a model.heads=16 model.hidden=256", "parallel.cp=16",
      "heads are exchanged between 8 ranks at most", 16 },
    { "parallel.cp=8 parallel.cp_comm=a2a", "parallel.cp=4 parallel.cp_comm=a2a",
      "each rank gets whole key heads of a tp rank, or whole parts of one; take "
      "parallel.cp_comm=hierarchical, or parallel.cp_comm=ring",
      8 },
    { "parallel.cp_heads=2", "parallel.cp_heads=2 parallel.cp=4 parallel.cp_comm=hierarchical", "give cp", 4 },
    { "parallel.cp=4 parallel.cp_heads=2", "parallel.cp=4 parallel.cp_heads=2 parallel.cp_comm=hierarchical",
      "only cp_comm = hierarchical has neighbours", 4 },
    { "parallel.cp=4 parallel.cp_heads=2 parallel.cp_comm=a2a", "parallel.cp=4 parallel.cp_comm=a2a",
      "a2a is between all ranks of cp", 4 },
    { "parallel.cp=4 parallel.cp_heads=3 parallel.cp_comm=hierarchical",
      "parallel.cp=4 parallel.cp_heads=4 parallel.cp_comm=hierarchical", "cp_heads must divide cp", 4 },
    { "parallel.cp=4 parallel.cp_comm=a2a model.kv_heads=2 model.heads=6 model.head_dim=64",
      "parallel.cp=4 parallel.cp_comm=a2a model.kv_heads=2 model.heads=8 model.head_dim=64",
      "or whole parts of one; take parallel.cp_comm=hierarchical", 4 },
    { "parallel.cp=2 parallel.tp=4 model.seq=12 run.reproducible=run", "parallel.cp=2 parallel.tp=4 model.seq=16",
      "with sp, tp x cp must divide micro_batch * seq", 8 },
    { MOE "parallel.cp=2 parallel.tp=4 parallel.seq_blocks=4 run.reproducible=layout",
      MOE "parallel.cp=2 parallel.tp=4 parallel.seq_blocks=8", "seq_blocks / cp, here 1 x 2", 8 },
    { "parallel.slices=2 parallel.cp=2 parallel.cp_comm=ring parallel.attn_block=256 run.reproducible=layout",
      "parallel.slices=2 parallel.cp=2 parallel.cp_comm=ring parallel.attn_block=128 run.reproducible=layout",
      "attn_block must divide seq / (2 x its ranks x slices), here 128", 2 },
    { "parallel.slices=4 parallel.cp=2 model.seq=40", "parallel.slices=4 parallel.cp=2 model.seq=48",
      "2 x cp x slices must divide seq; take parallel.slices=2, or parallel.slices=5", 2 },
    { "parallel.slices=4 parallel.cp=2 run.reproducible=layout",
      "parallel.slices=4 parallel.cp=2 run.reproducible=layout parallel.seq_blocks=16",
      "2 x cp x slices must divide seq_blocks; take parallel.seq_blocks=16", 2 },
    { MOE "parallel.slices=2 moe.balance=aux",
      MOE "parallel.slices=2 moe.balance=bias moe.aux_coeff=0 moe.router=sigmoid",
      "experts are balanced by whole sequences; take moe.balance=bias moe.aux_coeff=0 moe.router=sigmoid", 1 },
    { MOE "parallel.slices=2 moe.balance=sinkhorn moe.topk=1", MOE "parallel.slices=2", "balanced by whole sequences",
      1 },
    { MOE "parallel.slices=2 moe.capacity=1", MOE "parallel.slices=2 moe.slack=2",
      "experts drop rows of whole sequences", 1 },
    { "parallel.slices=3 train.global_batch=6", "parallel.slices=4 train.global_batch=6",
      "their number must divide seq; take parallel.slices=2, or parallel.slices=4", 1 },
    { "parallel.slices=16 run.reproducible=layout", "parallel.slices=16 run.reproducible=layout parallel.seq_blocks=16",
      "slices must divide seq_blocks; take parallel.seq_blocks=16, or run.reproducible=run", 1 },
    { "parallel.slices=8 parallel.tp=2 run.reproducible=layout",
      "parallel.slices=4 parallel.tp=2 run.reproducible=layout",
      "with sp, 2 x slices must divide seq_blocks; take parallel.seq_blocks=16", 2 },
    { "parallel.slices=4 parallel.attn_block=512 run.reproducible=layout",
      "parallel.slices=4 parallel.attn_block=256 run.reproducible=layout",
      "attn_block must divide seq / slices, here 256", 1 },
    { "parallel.slices=4 parallel.tp=4 model.seq=8 run.reproducible=run", "parallel.slices=2 parallel.tp=4 model.seq=8",
      "with sp, tp must divide micro_batch * seq / slices", 4 },
    { "model.mtp_layers=1", "model.mtp_layers=1 model.position=rope",
      "no learned positions; take model.position=rope, or model.position=none", 1 },
    { "model.mtp_weight=0.3", "model.mtp_weight=0.3 model.mtp_layers=1 model.arch=llama", "no losses to weigh", 1 },
    { "model.mtp_layers=1 model.arch=llama model.layers=1024", "model.mtp_layers=1 model.arch=llama model.layers=1023",
      "at most 1024 with model.layers", 1 },
    { "model.mtp_layers=1 model.arch=llama model.hidden=100 model.heads=8 model.head_dim=16 "
      "parallel.tp_blocks=8",
      "model.mtp_layers=1 model.arch=llama model.hidden=104 model.heads=8 model.head_dim=16 "
      "parallel.tp_blocks=8",
      "tp_blocks must divide hidden", 1 },
    { "model.mtp_layers=1 model.arch=llama model.hidden=100 model.heads=8 model.head_dim=16 parallel.tp=8 "
      "run.reproducible=run",
      "model.mtp_layers=1 model.arch=llama model.hidden=104 model.heads=8 model.head_dim=16 parallel.tp=8",
      "tp must divide hidden", 8 },
    { "moe.topk=4", MOE "moe.topk=4", "moe.topk = '4' with moe.experts = '0': only a mixture has it", 1 },
    { "moe.every=2", MOE "moe.every=2", "only a mixture has it: give moe.experts", 1 },
    { MOE "moe.topk=9", MOE "moe.topk=8", "more experts than there are: at most 8", 1 },
    { "moe.experts=12 model.bias=false moe.groups=5", "moe.experts=12 model.bias=false moe.groups=4",
      "groups must divide experts; take moe.groups=4, or moe.groups=6", 1 },
    { MOE "moe.groups=9", MOE "moe.groups=8 moe.group_topk=2", "groups must divide experts; take moe.groups=4", 1 },
    { MOE "moe.groups=4 moe.group_topk=5 moe.topk=5", MOE "moe.groups=4 moe.group_topk=4 moe.topk=4", "at most 4", 1 },
    { MOE "moe.groups=4 moe.group_topk=3 moe.topk=4", MOE "moe.groups=4 moe.group_topk=3 moe.topk=4 moe.group_best=1",
      "group_topk must divide topk: a group counts by its topk / group_topk best, unless group_best is given; take "
      "moe.group_topk=2, or moe.group_topk=4",
      1 },
    { MOE "moe.group_best=1", MOE "moe.group_best=1 moe.groups=2",
      "there are no groups: give groups; take moe.group_best=0", 1 },
    { MOE "moe.groups=4 moe.group_best=3", MOE "moe.groups=4 moe.group_best=2",
      "a group has fewer experts: experts / groups; take moe.group_best=0", 1 },
    { MOE "moe.groups=4 moe.group_topk=2 moe.topk=6", MOE "moe.groups=2 moe.group_topk=2 moe.topk=6",
      "the chosen groups hold fewer: group_topk * experts / groups is 4", 1 },
    { MOE "moe.every=0", MOE "moe.every=12", "moe.every = '0': must be an integer from 1 on", 1 },
    { MOE "moe.every=1*2,2", MOE "moe.every=1*2,0*10", "must be an integer from 1 on", 1 },
    { MOE "moe.every=1*12,", MOE "moe.every=1*11,0", "must be an integer from 1 on", 1 },
    { MOE "moe.every=0*3,1*58", "moe.experts=8 model.bias=false model.layers=61 moe.every=0*3,1*58",
      "the list is about 61 blocks, the model has 12", 1 },
    { "moe.latent=64", MOE "moe.latent=64", "only a mixture has it: give moe.experts", 1 },
    { MOE "moe.latent=60 run.device=cuda", MOE "moe.latent=64 run.device=cuda",
      "on GPUs rows of products begin on 16 bytes", 1 },
    { MOE "moe.latent=64 checkpoint.upcycle=true checkpoint.load=x", MOE "checkpoint.upcycle=true checkpoint.load=x",
      "parts of a dense layer read and write rows as wide as the model", 1 },
    { MOE "moe.every=0*12", MOE "moe.every=0*11,1", "no block is a mixture", 1 },
    { MOE "moe.every=2 model.ffn_layers=0,1", MOE "moe.every=2 model.ffn_layers=0,1,1",
      "no block that would be a mixture has a feed-forward layer", 1 },
    { "model.activation_limit=5", "model.activation_limit=5 model.activation=clamped_swiglu",
      "only activation = clamped_swiglu reads it", 1 },
    { MOE "moe.shared_gate=true", MOE "moe.shared_gate=true moe.shared_ffn=64", "no shared expert to gate", 1 },
    { MOE "moe.shared_ffn=100 parallel.tp_blocks=8", MOE "moe.shared_ffn=104 parallel.tp_blocks=8",
      "tp_blocks must divide shared_ffn", 1 },
    { MOE "moe.normalize=false", MOE "moe.normalize=false moe.router=softmax_pre", "add up to 1 by themselves", 1 },
    { MOE "moe.router=sigmoid moe.normalize=true moe.topk=1", MOE "moe.router=sigmoid moe.topk=1",
      "normalize needs topk > 1", 1 },
    { MOE "train.micro_batch=1048576 train.global_batch=1048576",
      MOE "train.micro_batch=524288 train.global_batch=1048576", "micro_batch * seq * topk must be below 2^31", 1 },
    { MOE "moe.aux_coeff=0.1", MOE "moe.aux_coeff=0.1 moe.balance=aux",
      "there is no balance loss to weigh: give balance", 1 },
    { MOE "moe.balance=aux moe.aux_coeff=0", MOE "moe.balance=aux", "aux_coeff must be above 0", 1 },
    { MOE "moe.balance=global_aux moe.aux_coeff=0", MOE "moe.balance=global_aux", "aux_coeff must be above 0", 1 },
    { MOE "moe.balance=bias", MOE "moe.balance=bias moe.router=sigmoid",
      "take moe.router=sigmoid, or moe.router=sqrt_softplus", 1 },
    { MOE "moe.balance=aux moe.unit=2", MOE "moe.balance=aux moe.unit=2 train.micro_batch=2", "unit must divide it",
      1 },
    { MOE "moe.balance=forced moe.groups=2", MOE "moe.balance=forced", "experts take turns in no groups", 1 },
    { MOE "moe.balance=forced moe.aux_coeff=0.1", MOE "moe.balance=forced moe.aux_coeff=0",
      "forced balance has no loss", 1 },
    { MOE "moe.balance=forced moe.jitter=0.1", MOE "moe.balance=aux moe.jitter=0.1", "does not ask the router", 1 },
    { MOE "moe.balance=sinkhorn moe.aux_coeff=0.1", MOE "moe.balance=sinkhorn", "sinkhorn balances by itself", 1 },
    { MOE "moe.drop=position", MOE "moe.drop=position moe.capacity=1.25", "nothing is dropped: give capacity", 1 },
    { MOE "moe.pad=true", MOE "moe.pad=true moe.capacity=2", "no capacity to pad to: give capacity", 1 },
    { MOE "moe.topk=4 moe.groups=2 moe.group_topk=4", MOE "moe.topk=4 moe.groups=4 moe.group_topk=4",
      "a token cannot be sent to more groups than there are: at most 2", 1 },
    { MOE "parallel.ep=4 parallel.etp=2", MOE "parallel.ep=2 parallel.etp=2",
      "ep x etp x pp must divide the number of ranks", 4 },
    { MOE "moe.slack=0.5", MOE "moe.slack=1", "not even an even load would have room", 1 },
    { MOE "moe.overflow=drop run.reproducible=run", MOE "moe.overflow=drop moe.slack=2 run.reproducible=run",
      "room for all rows that can come: give slack", 1 },
    { MOE "moe.overflow=drop moe.slack=2", MOE "moe.overflow=drop moe.slack=2 moe.drop=position run.reproducible=run",
      "what is dropped depends on the layout; take run.reproducible=run", 1 },
    { "moe.capacity=1.25", MOE "moe.capacity=1.25", "only a mixture has it: give moe.experts", 1 },
    { MOE "moe.balance=seq_aux moe.unit=2 train.micro_batch=2", MOE "moe.balance=seq_aux",
      "take moe.unit=1, or moe.balance=aux", 1 },
    { "parallel.ep=2", "parallel.ep=1", "a dense model has no experts to spread", 2 },
    { MOE "parallel.ep=3 train.global_batch=6", MOE "train.global_batch=6", "ep must divide experts", 3 },
    { MOE "parallel.ep=2 parallel.pp=2 parallel.order=tp-cp-ep-pp-dp", MOE "parallel.ep=2 parallel.pp=2",
      "take parallel.order=tp-cp-ep-dp-pp", 4 },
    { MOE "parallel.tp=2 parallel.sp=false", MOE "parallel.tp=2", "beside experts tp needs sp", 2 },
    { MOE "parallel.tp=4 parallel.seq_blocks=2", MOE "parallel.tp=4 parallel.seq_blocks=4", "here 1 x 2", 4 },
    { "model.mixer=delta parallel.tp=4 parallel.seq_blocks=2 run.reproducible=layout",
      "model.mixer=delta parallel.tp=4 parallel.seq_blocks=4", "here 1 x 2; take parallel.sp=false", 4 },
    { MOE "moe.ffn=100 parallel.tp_blocks=8", MOE "moe.ffn=104 parallel.tp_blocks=8",
      "tp_blocks must divide the width of an expert", 1 },
    { "parallel.etp=2", "parallel.etp=1", "a dense model has no experts to cut", 2 },
    { "parallel.tp=4 parallel.overlap_tp=3", "parallel.tp=4 parallel.overlap_tp=2", "overlap_tp must divide tp", 4 },
    { "parallel.overlap_tp=2", "parallel.overlap_tp=1", "as many ranks", 2 },
    { "parallel.zero=2 parallel.reshard=always", "parallel.zero=3 parallel.reshard=always", "cut with zero=3 alone",
      2 },
    { "parallel.zero_group=2", "parallel.zero_group=2 parallel.zero=1", "nothing is cut without zero", 4 },
    { "parallel.zero=1 parallel.zero_group=3", "parallel.zero=1 parallel.zero_group=2", "divides the ranks of dp x cp",
      4 },
    { "parallel.zero=1 parallel.zero_group=8", "parallel.zero=1 parallel.zero_group=4", "divides the ranks of dp x cp",
      4 },
    { "parallel.zero=1 parallel.cp=4 parallel.zero_group=2", "parallel.zero=1 parallel.cp=4 parallel.zero_group=4",
      "a multiple of cp", 8 },
    { MOE "parallel.tp=2 train.global_batch=12 parallel.zero=1 parallel.zero_group=3 parallel.ep=4",
      MOE "parallel.tp=2 train.global_batch=12 parallel.zero=1 parallel.zero_group=3 parallel.ep=2",
      "must divide ep x etp", 12 },
    { "parallel.overlap_moe=true", "parallel.overlap_moe=false", "a dense model has no rows that travel", 2 },
    { MOE "parallel.overlap_moe=true", MOE "parallel.overlap_moe=true parallel.ep=2",
      "rows do not travel where each rank has all", 2 },
    { MOE "parallel.etp=128 run.reproducible=run train.global_batch=128",
      MOE "parallel.etp=64 run.reproducible=run train.global_batch=128", "at most 64 ranks can share an expert", 128 },
    { MOE "parallel.etp=3 moe.ffn=64 run.reproducible=run train.global_batch=3",
      MOE "parallel.etp=3 moe.ffn=96 run.reproducible=run train.global_batch=3",
      "etp must divide the width of an expert", 3 },
    { MOE "parallel.etp=3 moe.ffn=96 run.reproducible=layout train.global_batch=3",
      MOE "parallel.etp=3 moe.ffn=96 run.reproducible=run train.global_batch=3", "etp must divide tp_blocks", 3 },
    { MOE "moe.dispatcher=allgather parallel.ep=8 train.micro_batch=262144 train.global_batch=2097152",
      MOE "moe.dispatcher=allgather parallel.ep=2 train.micro_batch=262144 train.global_batch=2097152",
      "ep * etp * micro_batch * seq * topk must be below 2^31", 8 },
    { "checkpoint.upcycle=true checkpoint.load=x", MOE "checkpoint.upcycle=true checkpoint.load=x",
      "a dense model has no experts to begin as another", 1 },
    { MOE "checkpoint.upcycle=true", MOE "checkpoint.upcycle=true checkpoint.load=x", "give checkpoint.load", 1 },
    { MOE "checkpoint.upcycle=true checkpoint.load=x moe.shared_ffn=64",
      MOE "checkpoint.upcycle=true checkpoint.load=x", "take moe.shared_ffn=0", 1 },
    { MOE "checkpoint.upcycle=true checkpoint.load=x moe.ffn=2000",
      MOE "checkpoint.upcycle=true checkpoint.load=x moe.ffn=1536", "moe.ffn must divide model.ffn", 1 },
    { MOE "checkpoint.upcycle=true checkpoint.load=x moe.ffn=768",
      MOE "checkpoint.upcycle=true checkpoint.load=x moe.ffn=768 moe.topk=4",
      "4 experts, which must divide experts and topk", 1 },
    { MOE "checkpoint.upcycle=true checkpoint.load=x moe.router=sigmoid moe.normalize=false",
      MOE "checkpoint.upcycle=true checkpoint.load=x moe.router=sigmoid", "take moe.normalize=true", 1 },
    { "debug.comm_check=true", "debug.comm_check=false", "one rank has no communication to compare", 1 },
    { MOE "debug.ranks_per_host=2", MOE "debug.ranks_per_host=0", "only moe.dispatcher=node goes by hosts", 1 },
    { MOE "moe.dispatcher=node parallel.ep=8 train.micro_batch=262144 train.global_batch=2097152",
      MOE "moe.dispatcher=node parallel.ep=2 train.micro_batch=262144 train.global_batch=2097152",
      "where choices of all ranks' tokens are numbered", 8 },
    { "debug.comm_delay_ms=5", "debug.comm_delay_ms=0", "one rank has no communication to delay", 1 },
    { "train.micro_batch=3", "train.micro_batch=4", "train.micro_batch = '3' with train.global_batch = '8'", 1 },
    { "train.global_batch=6", "train.global_batch=12", "a multiple of micro_batch x dp, where dp is 4", 4 },
    { "train.global_batch=6*10,12", "train.global_batch=4*10,12", "a multiple of micro_batch x dp, where dp is 4", 4 },
    { "train.global_batch=12,8", "train.global_batch=12*5,8", "for how many steps it holds: 32*1000,64", 1 },
    { "train.global_batch=8x", "train.global_batch=8", "train.global_batch = '8x': must be an integer from 1", 1 },
    { "train.global_batch=1073741824*900000000000,2 train.steps=1000000000000",
      "train.global_batch=1073741824*1000,2 train.steps=1000000000000", "more tokens than can be counted", 1 },
    { "train.tokens=1000 train.steps=5", "train.tokens=1000", "give either steps or tokens", 1 },
    { "train.steps=0", "train.steps=1", "give either steps or tokens", 1 },
    { "train.steps=1000000000000 train.global_batch=1073741824", "train.steps=1000000 train.global_batch=1073741824",
      "more tokens than can be counted", 1 },
    { "optim.min_lr=0.001", "optim.min_lr=0.0003", "min_lr must not be above lr", 1 },
    { "optim.min_lr=1e-5 optim.min_lr_ratio=0.1", "optim.min_lr_ratio=0.1", "give either min_lr or min_lr_ratio", 1 },
    { "optim.beta1=1", "optim.beta1=0", "optim.beta1 = '1': must be below 1", 1 },
    { "optim.beta1=0.99999999", "optim.beta1=0.9999999", "optim.beta1 = '0.99999999': must be below 1", 1 },
    { "optim.beta2=1", "optim.beta2=0.999", "optim.beta2 = '1': must be below 1", 1 },
    { "optim.moments=bf16 optim.beta2=0.9962", "optim.moments=bf16 optim.beta2=0.996",
      "the second moment would not fall: 1 - beta2 must be 2^-8 (0.0039) or more", 1 },
    { "optim.beta2=0.99999999", "optim.beta2=0.9999999", "optim.beta2 = '0.99999999': must be below 1", 1 },
    { "optim.mup_head_dim=8", "optim.mup_head_dim=8 optim.mup_base=64", "there is no base model: give mup_base", 1 },
    { "optim.name=muon optim.moments=bf16", "optim.name=muon", "muon, lion and sgd keep their moment in fp32", 1 },
    { "optim.name=lion optim.moments=bf16", "optim.name=lion", "muon, lion and sgd keep their moment in fp32", 1 },
    { "optim.name=sgd optim.beta2=0.9", "optim.name=lion optim.beta2=0.9", "sgd has one decay: beta1", 1 },
    { "optim.name=lion optim.eps=1e-6", "optim.name=muon optim.eps=1e-6", "lion and sgd have no second moment", 1 },
    { "optim.name=sgd optim.mup_base=16", "optim.name=lion optim.mup_base=16", "sgd's rates go by the width", 1 },
    { "optim.muon_momentum=0.9", "optim.name=muon optim.muon_momentum=0.9", "only muon has it", 1 },
    { "optim.name=muon optim.muon_momentum=1", "optim.name=muon optim.muon_momentum=0", "must be below 1", 1 },
    { "optim.muon_nesterov=false", "optim.name=muon optim.muon_nesterov=false", "only muon has it", 1 },
    { "optim.muon_coefficients=quintic", "optim.name=muon optim.muon_coefficients=quintic", "only muon has it", 1 },
    { "optim.muon_steps=3", "optim.name=muon optim.muon_steps=3", "only muon has it", 1 },
    { "optim.name=muon optim.mup_base=16", "optim.name=muon optim.mup_base=16 optim.muon_scale=unit_rms_norm",
      "muon's updates must not grow with the width", 1 },
    { "optim.muon_scale=shape", "optim.name=muon optim.muon_scale=shape", "only muon has it", 1 },
    { "optim.muon_split=head", "optim.name=muon optim.muon_split=head", "only muon has it", 1 },
    { "optim.muon_router=adamw", "optim.name=muon optim.muon_router=adamw", "only muon has it", 1 },
    { "optim.warmup=1000", "optim.warmup=999", "the warm-up must be shorter than decay_steps", 1 },
    { "train.steps=2 optim.warmup=10", "train.stop_at=2 optim.warmup=10", "longer run: train.stop_at=2 instead of", 1 },
    { "optim.warmup=50 optim.decay_steps=50", "optim.warmup=49 optim.decay_steps=50", "warm-up must be shorter", 1 },
    { "optim.wsd_decay=5", "optim.wsd_decay=5 optim.schedule=wsd", "only schedule = wsd has a closing decay", 1 },
    { "optim.qk_clip=100 model.qk_norm=true", "optim.qk_clip=100", "queries and keys have lengths of their own", 1 },
    { "optim.qk_clip=100 model.attention_softcap=50", "optim.qk_clip=49 model.attention_softcap=50",
      "no logit is above attention_softcap", 1 },
    { "optim.qk_clip_alpha=0.4", "optim.qk_clip_alpha=0.4 optim.qk_clip=100", "only qk_clip > 0 scales rows", 1 },
    { "optim.schedule=wsd optim.warmup=950", "optim.schedule=wsd optim.warmup=900",
      "warm-up and closing decay must fit", 1 },
    { "data.start=5 data.order=megatron", "data.start=5", "take order=keyed", 1 },
    { "data.valid=a data.split=98,2", "data.split=98,2", "give either valid or split", 1 },
    { "data.split=98", "data.split=969,30,1", "two or three shares", 1 },
    { "parallel.nccl.tp.min_ctas=5 parallel.nccl.tp.max_ctas=4 run.device=cuda",
      "parallel.nccl.tp.min_ctas=4 parallel.nccl.tp.max_ctas=4 run.device=cuda", "must not be above the most", 1 },
    { "parallel.nccl.dp.min_ctas=5 parallel.nccl.dp.max_ctas=4 run.device=cuda",
      "parallel.nccl.dp.min_ctas=5 run.device=cuda", "must not be above the most", 1 },
    { "parallel.nccl.tp.min_ctas=5", "parallel.nccl.tp.min_ctas=5 run.device=cuda", "only device=cuda has NCCL", 1 },
    { "parallel.nccl.tp.max_ctas=5", "parallel.nccl.tp.max_ctas=5 run.device=cuda", "only device=cuda has NCCL", 1 },
    { "parallel.nccl.dp.min_ctas=5", "parallel.nccl.dp.min_ctas=5 run.device=cuda", "only device=cuda has NCCL", 1 },
    { "parallel.nccl.dp.max_ctas=5", "parallel.nccl.dp.max_ctas=5 run.device=cuda", "only device=cuda has NCCL", 1 },
    { "parallel.pp=2 parallel.schedule=gems+split parallel.overlap_grad=true train.micro_batch=4 train.global_batch=4",
      "parallel.pp=2 parallel.schedule=gems+split parallel.overlap_grad=true train.micro_batch=2 train.global_batch=4",
      "gives the other copy of a stage nothing", 2 },
    { "run.device=cuda parallel.pp=2 parallel.schedule=gems+split parallel.overlap_grad=true",
      "run.device=cuda parallel.pp=2 parallel.schedule=gems+split", "must not queue behind them", 2 },
    { "run.device=cuda parallel.pp=2 parallel.schedule=gems parallel.overlap_grad=true",
      "run.device=cuda parallel.pp=2 parallel.schedule=gems", "must not queue behind them", 2 },
    { "parallel.auto_device=h100", "parallel.auto_device=h100 parallel.auto=true", "nothing is planned", 1 },
    { "parallel.staged=true", "parallel.staged=true run.device=cuda", "only device=cuda has another way", 1 },
    { "run.graphs=true run.device=cuda parallel.pp=2 parallel.schedule=2bw",
      "run.device=cuda parallel.pp=2 parallel.schedule=2bw", "graphs are of steps that update once", 2 },
    { "run.graphs=true run.device=cuda train.offload=1", "run.device=cuda train.offload=1", "graphs record one stream",
      1 },
    { "data.split=98,-2", "data.split=98,2.5", "two or three shares", 1 },
    { "data.split=0,0", "data.split=0,1", "two or three shares", 1 },
    { "data.split=1,2,3,4", "data.split=1,2,3", "two or three shares", 1 },
    { "data.split=98,2x", "data.split=1e2,2", "two or three shares", 1 },
    { "data.seed=4294967296 data.order=megatron", "data.seed=4294967295 data.order=megatron", "seeds below 2^32", 1 },
    { "data.tokenizer=", "data.tokenizer=byte", "data.tokenizer = '': must not be empty", 1 },
    { "checkpoint.resume=", "checkpoint.resume=none", "must be auto, none or a path", 1 },
    { "log.trace_steps=7-3", "log.trace_steps=3-7", "log.trace_steps = '7-3': must be a step, or two", 1 },
    { "log.trace_steps=0", "log.trace_steps=1", "must be a step, or two", 1 },
    { "log.trace_steps=3-", "log.trace_steps=3", "must be a step, or two", 1 },
    { "log.trace_ranks=1", "log.trace_ranks=0", "log.trace_ranks = '1': must be ranks of the run", 1 },
    { "log.trace_ranks=2-1", "log.trace_ranks=1-2,0", "must be ranks of the run", 4 },
    { "log.trace_ranks=0,", "log.trace_ranks=all", "must be ranks of the run", 4 },
    { "log.trace_steps=3 log.trace_every=2", "log.trace_every=2", "give either trace_steps or trace_every", 1 },
    { "checkpoint.keep_every=1500", "checkpoint.keep_every=3000", "keep_every must be a multiple of every", 1 },
    { "checkpoint.keep_every=1500 checkpoint.every=0", "checkpoint.keep_every=1500 checkpoint.every=500",
      "keep_every must be a multiple of every", 1 },
    { "data.start=0 data.order=megatron", "data.start=0", "Megatron's order is made for the whole run", 1 },
    { "train.eval_batches=1 train.eval_samples=8", "train.eval_samples=8", "give either eval_samples or eval_batches",
      1 },
    { "checkpoint.keep_best=1 train.eval_every=500", "checkpoint.keep_best=1 train.eval_every=500 data.valid=x",
      "give data.valid or data.split", 1 },
    { "checkpoint.keep_best=1 data.valid=x", "checkpoint.keep_best=1 data.valid=x train.eval_every=2000",
      "one must divide the other", 1 },
    { "checkpoint.keep_best=1 data.split=98,2 train.eval_every=300",
      "checkpoint.keep_best=1 data.split=98,2 train.eval_every=250", "one must divide the other", 1 },
    { "checkpoint.best_set=x", "checkpoint.best_set=x checkpoint.keep_best=1 data.valid=x train.eval_every=1000",
      "only keep_best goes by a validation set", 1 },
};

TEST(every_rule_has_its_case)
{
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        const Rule *k = &rules[i];
        const char *got = complaint(NULL, k->wrong, k->world_size);
        CHECK_MSG(strstr(got, k->says) && strncmp(got, "command line: ", 14) == 0 && count_lines(got) == 1, "%s: %s",
                  k->wrong, got);
        got = complaint(NULL, k->right, k->world_size);
        CHECK_MSG(!*got, "%s: %s", k->right, got);
    }
}

/* ---- ways out ---- */

/* What is complained of with these words, and then the way, on so many ranks; a way of "N ranks" is of N. */
static const char *complaint_with(const Rule *k, const char *words, const char *way)
{
    char all[16384];
    const int64_t ranks = strstr(way, " rank") ? strtoll(way, NULL, 10) : 0;
    snprintf(all, sizeof all, "%s %s", words, ranks ? "" : way);
    return complaint(NULL, all, ranks ? ranks : k->world_size);
}

enum { WAYS = 64, WAY_BYTES = 160 };

/* The ways out that complaints name, line by line; how many. */
static int ways_of(const char *said, char ways[WAYS][WAY_BYTES])
{
    static char copy[16384];
    char *lines, *parts, *line, *at, *next;
    int count = 0;
    snprintf(copy, sizeof copy, "%s", said);
    for (line = strtok_r(copy, "\n", &lines); line; line = strtok_r(NULL, "\n", &lines)) {
        parts = strstr(line, "; take ");
        for (at = parts ? parts + strlen("; take ") : NULL; at && count < WAYS; at = next) {
            next = strstr(at, ", or ");
            if (next) *next = 0, next += strlen(", or ");
            snprintf(ways[count++], WAY_BYTES, "%s", at);
        }
    }
    return count;
}

/* What is proposed is legal: with it nothing is left to complain of. */
TEST(ways_out_are_ways_out)
{
    char ways[WAYS][WAY_BYTES];
    int all = 0;
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        const int count = ways_of(complaint(NULL, rules[i].wrong, rules[i].world_size), ways);
        for (int k = 0; k < count; k++) {
            const char *left = complaint_with(&rules[i], rules[i].wrong, ways[k]);
            CHECK_MSG(!*left, "%s, and then %s: %s", rules[i].wrong, ways[k], left);
        }
        all += count;
    }
    CHECK_MSG(all >= 60, "%d", all);
}

/* Two mistakes at once: a way out of one leaves the other at most. */
TEST(ways_out_of_several_mistakes)
{
    char ways[WAYS][WAY_BYTES], words[16384];
    uint64_t seed = 11;
    int all = 0;
    const size_t number = sizeof rules / sizeof *rules;
    for (int i = 0; i < 2000; i++) {
        const Rule *a = &rules[test_rand(&seed) % number], *b = &rules[test_rand(&seed) % number];
        if (a->world_size != b->world_size) continue;
        snprintf(words, sizeof words, "%s %s", a->wrong, b->wrong);
        const char *said = complaint(NULL, words, a->world_size);
        const int lines = count_lines(said), count = ways_of(said, ways);
        for (int k = 0; k < count; k++) {
            const char *left = complaint_with(a, words, ways[k]);
            CHECK_MSG(!*left || count_lines(left) < lines, "%s, and then %s: %s", words, ways[k], left);
        }
        all += count;
    }
    CHECK_MSG(all >= 500, "%d", all);
}

#define MLA "model.arch=llama model.attention=mla "

/* Rules of latent attention: a bad line and what is said. */
static const char *const latent_wrong[][2] = {
    { "model.q_lora_rank=64", "only attention = mla reads it" },
    { "model.kv_lora_rank=64", "only attention = mla reads it" },
    { "model.qk_nope_head_dim=64", "only attention = mla reads it" },
    { "model.qk_rope_head_dim=32", "only attention = mla reads it" },
    { "model.v_head_dim=64", "only attention = mla reads it" },
    { "model.rope_mscale_all=1", "only attention = mla reads it" },
    { MLA "model.kv_heads=4", "keys and values for each head; take model.kv_heads=0" },
    { MLA "model.head_dim=64", "it is qk_nope_head_dim + qk_rope_head_dim; take model.head_dim=0" },
    { MLA "model.attention_scale=1", "latent attention has rope_mscale_all" },
    { MLA "model.rope_base_local=100", "latent attention has one table of angles" },
    { MLA "model.rope_dim=32", "it is qk_rope_head_dim; take model.rope_dim=0" },
    { MLA "model.position=learned", "latent attention has rotary positions, or none" },
    { MLA "model.qk_rope_head_dim=31", "columns turn in pairs" },
    { MLA "model.rope_mscale_all=1", "only rope_scaling = yarn reads it" },
    { "model.arch=llama model.norm_bias=false", "only norm = layernorm has them" },
    { "model.latent_norm_eps=1e-6", "only attention = mla reads it" },
    { MLA "model.latent_norm_eps=1e-13", "must be 0 (norm_eps), or 1e-12 and more" },
    { MLA "model.qk_norm=true", "norms of its own" },
    { MLA "model.qk_norm=full", "norms of its own; take model.qk_norm=false" },
    { MLA "model.attention_bias=qkv",
      "biases in all or none; take model.attention_bias=all, or model.attention_bias=none" },
    { MLA "parallel.tp_blocks=8", "with attention = mla tp_blocks must divide heads" },
    { MLA "model.mixer=delta", "no block has attention of any kind; take model.attention=mha" },
    { MLA "run.device=cuda model.v_head_dim=20", "must be multiples of 8" },
    { MLA "run.device=cuda model.qk_nope_head_dim=256", "at most 256 columns" },
};

/* Does some case set the key? */
static void has_case(const char *section, const char *name)
{
    char full[96];
    ConfigId id;
    bool used = false;
    CHECK(config_find(section, name, &id));
    snprintf(full, sizeof full, "%s.%s=", section, name);
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) used |= strstr(rules[i].wrong, full) != NULL;
    for (size_t i = 0; i < sizeof latent_wrong / sizeof *latent_wrong; i++)
        used |= strstr(latent_wrong[i][0], full) != NULL;
    CHECK_MSG(used, "no case sets %s", full);
}

/* Each key that a rule stands under, in config.def, or names first, in config_check*.c, is set by some case above. */
TEST(no_rule_without_a_case)
{
    static const char *const files[] = { "config_check.c", "config_check_moe.c", "config_check_context.c",
                                         "config_check_attention.c", "config_check_slices.c" };
    int found = 0;
    char path[64], *text, section[32] = "", name[64] = "";
    int64_t n;
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        snprintf(path, sizeof path, "src/config/%s", files[i]);
        OK(file_read_all(path, 1 << 20, &text, &n));
        for (const char *p = strstr(text, "    RULE("); p; p = strstr(p + 1, "    RULE("), found++) {
            const char *id = strstr(p, "CFG_"), *end = strstr(p, ");\n");
            if (id && end && id < end && sscanf(id, "CFG_%31[a-z]_%63[a-z0-9_]", section, name) == 2)
                has_case(section, name);
        }
        free(text);
    }
    OK(file_read_all("src/config/config.def", 1 << 20, &text, &n));
    for (const char *p = text; p; p = strchr(p, '\n'), p += p != NULL) {
        if (*p != ' ') sscanf(p, "%*[A-Z_ ](%31[a-z], %63[a-z0-9_],", section, name);
        sscanf(p, "DOTS(%31[a-z], %*[a-z_], \"%63[a-z._]\",", section, name);
        sscanf(p, "WORD(%31[a-z], %*[a-z_], \"%63[a-z._]\",", section, name);
        if (strncmp(p, "    MUST(", 9) && strncmp(p, "    ONLY(", 9)) continue;
        has_case(section, name);
        found++;
    }
    CHECK_MSG(found >= 140, "%d", found);
    free(text);
}

TEST(a_refused_value_breaks_no_further_rules)
{
    const char *got = complaint("[model]\nhidden = x\nheads = 7\n[train]\nglobal_batch = -1\nmicro_batch = 5\n", "", 1);
    CHECK_MSG(count_lines(got) == 3 && strstr(got, "t.ini:2: model.hidden = 'x'") && strstr(got, "t.ini:5:"), "%s",
              got);
}

/* Keys of a kind of block are not looked at where the list of kinds is none. */
TEST(a_list_of_kinds_that_is_none_is_one_mistake)
{
    static const char *const lists[] = { "foo", "delta*0", "delta,", "" };
    static const char keys[] = "model.delta_key_heads=4 model.delta_value_dim=32 model.delta_conv=3 model.sinks=true "
                               "model.position=rope model.rope_layers=0,1 model.window=0,16 model.heads=6";
    char words[400];
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        snprintf(words, sizeof words, "model.mixer=%s %s", lists[i], keys);
        const char *got = complaint(NULL, words, 1);
        CHECK_MSG(count_lines(got) == 1 && strstr(got, "attention, delta, kda, mamba2 or none"), "%s: %s", words,
                  got);
    }
}

TEST(rules_between_keys)
{
    CHECK(strstr(complaint(NULL, "parallel.nccl.tp.max_ctas=4", 1), "only device=cuda has NCCL"));
    CHECK(strstr(complaint(NULL, "parallel.nccl.dp.min_ctas=5 parallel.nccl.dp.max_ctas=4 run.device=cuda", 1),
                 "the least must not be above the most"));
    CHECK(strstr(complaint(NULL, "parallel.nccl.pp.min_ctas=5", 1), "unknown key"));
    CHECK(strstr(complaint(NULL, "parallel.pp=2", 1), "the world size is 1"));
    CHECK(!*complaint(NULL, "run.device=cpu run.precision=fp32 parallel.schedule=1f1b moe.experts=0", 1));
}

/* Heads of attention mean nothing where no block has it. */
TEST(rules_of_attention_are_of_its_blocks_alone)
{
    static const struct {
        const char *heads, *says; /* of a model with attention */
        int world_size;
    } cases[] = {
        { "model.heads=1 model.head_dim=32 model.delta_key_heads=2 parallel.tp=2 parallel.tp_blocks=2",
          "tp must divide kv_heads x parts", 2 },
        { "model.heads=1 model.head_dim=1 model.delta_key_heads=4 model.delta_value_heads=8 model.delta_key_dim=16 "
          "model.delta_value_dim=16 parallel.tp=4 parallel.tp_blocks=4",
          "tp must divide kv_heads x parts", 4 },
        { "model.heads=3 model.head_dim=5 model.arch=llama", "rotary positions need an even head_dim", 1 },
        { "model.heads=3 model.head_dim=5 parallel.tp_blocks=2 model.delta_key_heads=2", "tp_blocks must divide heads",
          1 },
        { "model.heads=5 model.delta_key_heads=4 model.delta_key_dim=16", "hidden must be a multiple of heads", 1 },
    };
    char words[512];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(words, sizeof words, "model.mixer=delta %s", cases[i].heads);
        const char *got = complaint(NULL, words, cases[i].world_size);
        CHECK_MSG(!*got, "%s: %s", words, got);
        snprintf(words, sizeof words, "model.mixer=delta,attention %s", cases[i].heads);
        got = complaint(NULL, words, cases[i].world_size);
        CHECK_MSG(strstr(got, cases[i].says), "%s: %s", words, got);
    }
    CHECK(strstr(complaint(NULL, "model.mixer=delta model.heads=5", 1), "hidden must be a multiple of heads"));
    const char *got = complaint(NULL, "model.mixer=delta model.position=rope", 1);
    CHECK_MSG(count_lines(got) == 1 && strstr(got, "no block has attention, which alone has rotary positions; take "
                                                   "model.position=none"), "%s", got);
    CHECK(!*complaint(NULL, "model.mixer=delta model.position=none model.arch=llama", 1));
}

/* States exchange heads, whatever attention does; ways out are lists with both. */
TEST(ranks_of_cp_meet_block_by_block)
{
    static const char keys[] = "model.mixer=delta*2,attention model.layers=6 model.heads=4 model.kv_heads=1 "
                               "model.delta_key_heads=4 parallel.tp_blocks=1 parallel.cp=4 parallel.seq_blocks=8";
    static const struct {
        const char *way, *says, *takes;
    } cases[] = {
        { "a2a*2,ring", NULL, NULL },
        { "ring", "theirs must be a2a", "take parallel.cp_comm=a2a*2,allgather" },
        { "state*2,ring", NULL, NULL },
        { "allgather", "theirs must be a2a", "parallel.cp_comm=state*2,allgather" },
        { "state", "blocks with attention have no state to hand on", "take parallel.cp_comm=a2a*2,allgather" },
        { "a2a", "each rank gets whole key heads of a tp rank", "take parallel.cp_comm=a2a*2,ring" },
    };
    char words[512];
    static const char states[] = "model.mixer=mamba2,delta,none model.heads=4 model.delta_key_heads=4 model.layers=6 "
                                 "model.mamba_groups=4 parallel.cp=2 parallel.seq_blocks=8 model.position=none";
    const char *all = complaint(NULL, states, 2);
    CHECK_MSG(strstr(all, "take parallel.cp_comm=a2a, or"), "%s", all);
    static const char group[] = "model.mixer=mamba2*2,attention model.layers=6 model.heads=4 model.mamba_groups=1 "
                                "model.mamba_heads=4 parallel.tp_blocks=1 parallel.cp=2 parallel.seq_blocks=8 "
                                "model.seq=1024 parallel.cp_comm=";
    snprintf(words, sizeof words, "%sa2a*2,ring", group);
    const char *no = complaint(NULL, words, 2);
    CHECK_MSG(count_lines(no) == 1 && strstr(no, "take parallel.cp_comm=state*2,allgather"), "%s", no);
    snprintf(words, sizeof words, "%sstate*2,ring", group);
    CHECK_MSG(!*complaint(NULL, words, 2), "%s", words);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(words, sizeof words, "%s parallel.cp_comm=%s", keys, cases[i].way);
        const char *got = complaint(NULL, words, 4);
        if (!cases[i].says) CHECK_MSG(!*got, "%s: %s", words, got);
        else CHECK_MSG(count_lines(got) == 1 && strstr(got, cases[i].says) && strstr(got, cases[i].takes), "%s: %s",
                       words, got);
    }
}

TEST(mixtures)
{
    CHECK(strstr(complaint(NULL, "moe.normalize=true", 1), "only a mixture has it"));
    CHECK(!*complaint(NULL, MOE "moe.every=0*3,1*8,0", 1));
    CHECK(!*complaint(NULL, MOE "moe.every=5 moe.shared_ffn=64 moe.shared_gate=true", 1));
    CHECK(!*complaint(NULL, "model.bias=true moe.experts=8 moe.shared_ffn=64 moe.shared_gate=true", 1));
    CHECK(!*complaint(NULL, "model.bias=true moe.experts=8 checkpoint.upcycle=true checkpoint.load=x", 1));
    CHECK(!*complaint(NULL,
                      "moe.experts=256 moe.topk=8 moe.groups=8 moe.group_topk=4 moe.router=sigmoid moe.scale=2.5 "
                      "model.bias=false",
                      1));
}

TEST(latent_attention)
{
    Config c;
    for (size_t i = 0; i < sizeof latent_wrong / sizeof *latent_wrong; i++)
        CHECK_MSG(strstr(complaint(NULL, latent_wrong[i][0], 1), latent_wrong[i][1]), "%s: %s", latent_wrong[i][0],
                  complaint(NULL, latent_wrong[i][0], 1));
    const char *const sp =
        MLA "run.device=cpu run.precision=fp32 parallel.tp=4 parallel.seq_blocks=2 train.micro_batch=1 ";
    CHECK(
        strstr(complaint(NULL, sp, 4), "tp must divide micro_batch x seq_blocks, here 1 x 2; take parallel.sp=false"));
    CHECK(!*complaint(NULL, MLA "run.device=cpu run.precision=fp32 parallel.tp=2 parallel.seq_blocks=2", 2));
    CHECK(!*complaint(NULL, MLA "model.bias=true model.attention_gate=true model.q_lora_rank=192", 1));
    CHECK(!*complaint(NULL, MLA "model.q_lora_rank=192 model.hidden=770", 1)); /* heads need not divide hidden */
    OK(read_as(&c, NULL, MLA "model.rope_scaling=yarn model.rope_factor=40 model.rope_mscale_all=1", 1));
    CHECK(c.model.head_dim == 192 && c.model.kv_heads == 12 && c.parallel.tp_blocks == 4);
    CHECK_CLOSE(c.model.rope_magnitude, 1, 1e-12, "mscale over mscale_all");
    config_release(&c);
}

/* What is filled in reads back to itself, of mixtures and of dense models. */
TEST(mixtures_filled_in)
{
    Config c;
    OK(read_as(&c, NULL, "moe.experts=8 model.bias=false", 1));
    CHECK(c.moe.ffn == 3072 && c.moe.normalize == 1 && c.moe.topk == 2 && c.moe.balance == MOE_BALANCE_NONE);
    config_release(&c);
    OK(read_as(&c, NULL, "moe.experts=8 model.bias=false moe.router=sigmoid", 1));
    CHECK(c.moe.normalize == 1);
    config_release(&c);
    OK(read_as(&c, NULL, "moe.experts=8 model.bias=false moe.router=sigmoid moe.topk=1", 1));
    CHECK(c.moe.normalize == 0);
    config_release(&c);
    OK(read_as(&c, NULL, "moe.experts=8 model.bias=false moe.router=softmax_pre", 1));
    CHECK(c.moe.normalize == 0);
    config_release(&c);
    OK(read_as(&c, NULL, "", 1));
    CHECK(c.moe.normalize == 0 && c.moe.ffn == 0);
    config_release(&c);
    CHECK(!*complaint(NULL, "moe.normalize=false moe.ffn=0", 1));
}

TEST_MAIN
