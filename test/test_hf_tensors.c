/*
 * hf/tensors.c: where each element of ours lies in a published model's tensors, told here a second time, element by
 * element, from the models' own conventions; and that no element of theirs is used twice or left out. test_convert.sh
 * and test_hf.sh have whole folders.
 */
#include "hf/tensors.h"
#include "test.h"

enum { HEADS = 2, KV = 1, HEAD_DIM = 4, FFN = 6, HIDDEN = 10, EXPERTS = 3, NOPE = 2, ROPE = 4, WIDE = 8 };
enum { KEY = 3, VALUE = 5, GROUP = 2 }; /* of linear attention */

static HfNaming naming_of(HfClass kind)
{
    return (HfNaming){ .kind = kind,
                       .prefix = "model.",
                       .layers = 2,
                       .experts = EXPERTS,
                       .heads = HEADS,
                       .kv_heads = KV,
                       .head_dim = kind == HF_GLM4 ? WIDE : HEAD_DIM,
                       .turning = HEAD_DIM,
                       .nope = NOPE,
                       .rope = ROPE,
                       .halves = kind == HF_KIMI_LINEAR,
                       .kda_head = HEAD_DIM,
                       .first_rows = 2 * HEADS * (KEY + GROUP * VALUE),
                       .last_rows = 2 * HEADS * GROUP,
                       .delta = { HEADS, HEADS * GROUP, KEY, VALUE } };
}

static Param param_of(const char *name, int64_t rows, int64_t columns)
{
    Param p = { .spec = { .ndim = columns > 1 ? 2 : 1, .shape = { rows, columns } } };
    snprintf(p.name, sizeof p.name, "%s", name);
    return p;
}

/* The tensor that holds element (r, c), and which of its elements it is: as hf_part has it. */
static int64_t place_of(const HfNaming *n, const Param *p, int64_t r, int64_t c, char name[HF_NAME_MAX])
{
    int64_t at = -1;
    int found = 0;
    for (int k = 0; k < hf_part_count(n, p); k++) {
        const HfPart part = hf_part(n, p, k);
        const int64_t row = r - part.box.offset[0], column = c - part.box.offset[1];
        if (row < 0 || column < 0 || row >= part.box.shape[0] || column >= part.box.shape[1]) continue;
        at = part.first + row * part.row + column * part.column;
        snprintf(name, HF_NAME_MAX, "%s", part.name);
        found++;
    }
    CHECK_MSG(found == 1, "%s (%lld, %lld) is in %d parts", p->name, (long long)r, (long long)c, found);
    return at;
}

/* Place where it should be: the tensor's name behind "layers.1.", and the element. */
typedef int64_t Told(int64_t r, int64_t c, const char **name);

static void check(HfClass kind, bool gguf, const char *ours, int64_t rows, int64_t columns, Told *told)
{
    HfNaming n = naming_of(kind);
    char full[PARAM_NAME_MAX], got[HF_NAME_MAX];
    static char seen[4][1024];
    const char *names[4] = { 0 };
    n.gguf = gguf;
    memset(seen, 0, sizeof seen);
    snprintf(full, sizeof full, "layers.1.%s", ours);
    const Param p = param_of(full, rows, columns);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) {
            const char *want;
            const int64_t at = place_of(&n, &p, r, c, got), should = told(r, c, &want);
            const char *behind = strstr(got, "1.");
            CHECK_MSG(behind && !strcmp(behind + 2, want) && at == should,
                      "%s (%lld, %lld): '%s' element %lld, not '%s' element %lld", ours, (long long)r,
                      (long long)c, got, (long long)at, want, (long long)should);
            int which = 0;
            while (which < 3 && names[which] && strcmp(names[which], want)) which++;
            names[which] = want;
            CHECK_MSG(at >= 0 && at < 1024 && !seen[which][at]++, "'%s' element %lld twice", got, (long long)at);
        }
}

/* ---- as they publish them ---- */

static int64_t gpt2_fc(int64_t r, int64_t c, const char **name) /* y = x W, W [inputs, outputs] */
{
    *name = "mlp.c_fc.weight";
    return c * FFN + r;
}

static int64_t llama_qkv(int64_t r, int64_t c, const char **name)
{
    const int64_t q = HEADS * HEAD_DIM, kv = KV * HEAD_DIM;
    *name = r < q ? "self_attn.q_proj.weight" : r < q + kv ? "self_attn.k_proj.weight" : "self_attn.v_proj.weight";
    return (r < q ? r : r < q + kv ? r - q : r - q - kv) * HIDDEN + c;
}

static int64_t gguf_qkv(int64_t r, int64_t c, const char **name) /* element i and i + half of a head are neighbours */
{
    const int64_t q = HEADS * HEAD_DIM, kv = KV * HEAD_DIM, half = HEAD_DIM / 2;
    *name = r < q ? "attn_q.weight" : r < q + kv ? "attn_k.weight" : "attn_v.weight";
    const int64_t in = r < q ? r : r < q + kv ? r - q : r - q - kv, e = in % HEAD_DIM;
    const int64_t row = r < q + kv ? in - e + e % half * 2 + e / half : in;
    return row * HIDDEN + c;
}

static int64_t ernie_qkv(int64_t r, int64_t c, const char **name) /* the same pairs, in a folder */
{
    const int64_t at = gguf_qkv(r, c, name);
    *name = strstr(*name, "_q") ? "self_attn.q_proj.weight" : strstr(*name, "_k") ? "self_attn.k_proj.weight"
                                                                                  : "self_attn.v_proj.weight";
    return at;
}

/* The first half of a head turns, as pairs of neighbours; the other half is as it was. */
static int64_t glm_qkv(int64_t r, int64_t c, const char **name)
{
    static const int64_t place[WIDE] = { 0, 2, 1, 3, 4, 5, 6, 7 };
    const int64_t q = HEADS * WIDE, kv = KV * WIDE, in = r < q ? r : r < q + kv ? r - q : r - q - kv;
    *name = r < q ? "self_attn.q_proj.weight" : r < q + kv ? "self_attn.k_proj.weight" : "self_attn.v_proj.weight";
    return (r < q + kv ? in / WIDE * WIDE + place[in % WIDE] : in) * HIDDEN + c;
}

static int64_t llama_gate_up(int64_t r, int64_t c, const char **name)
{
    *name = r < FFN ? "mlp.gate_proj.weight" : "mlp.up_proj.weight";
    return r % FFN * HIDDEN + c;
}

static int64_t gpt_oss_gate_up(int64_t r, int64_t c, const char **name) /* [experts, inputs, gate, up, gate, ...] */
{
    const int64_t e = r / (2 * FFN), in = r % (2 * FFN), column = in % FFN * 2 + in / FFN;
    *name = "mlp.experts.gate_up_proj";
    return (e * HIDDEN + c) * 2 * FFN + column;
}

static int64_t deepseek_q(int64_t r, int64_t c, const char **name) /* rotary ones are pairs of neighbours */
{
    const int64_t head = r / (NOPE + ROPE), in = r % (NOPE + ROPE), turned = in - NOPE, half = ROPE / 2;
    *name = "self_attn.q_proj.weight";
    const int64_t row = in < NOPE ? in : NOPE + turned % half * 2 + turned / half;
    return (head * (NOPE + ROPE) + row) * HIDDEN + c;
}

/* Two latents as wide as a head, then a row of each head. */
static int64_t kimi_small(int64_t r, int64_t c, const char **name)
{
    *name = r < HEAD_DIM       ? "self_attn.f_a_proj.weight"
            : r < 2 * HEAD_DIM ? "self_attn.g_a_proj.weight"
                               : "self_attn.b_proj.weight";
    return (r < 2 * HEAD_DIM ? r % HEAD_DIM : r - 2 * HEAD_DIM) * HIDDEN + c;
}

static int64_t kimi_conv(int64_t r, int64_t c, const char **name) /* [channels, 1, taps] of each */
{
    const int64_t all = HEADS * HEAD_DIM, which = r / all;
    *name = which == 0   ? "self_attn.q_conv1d.weight"
            : which == 1 ? "self_attn.k_conv1d.weight"
                         : "self_attn.v_conv1d.weight";
    return r % all * ROPE + c;
}

static int64_t olmo_qkvz(int64_t r, int64_t c, const char **name)
{
    const int64_t keys = HEADS * KEY, values = HEADS * GROUP * VALUE;
    *name = r < keys                ? "linear_attn.q_proj.weight"
            : r < 2 * keys          ? "linear_attn.k_proj.weight"
            : r < 2 * keys + values ? "linear_attn.v_proj.weight"
                                    : "linear_attn.g_proj.weight";
    return (r < 2 * keys ? r % keys : (r - 2 * keys) % values) * HIDDEN + c;
}

enum { IN_ROWS = 2 * HEADS * (KEY + GROUP * VALUE), SMALL_ROWS = 2 * HEADS * GROUP };

static int64_t lara_in(int64_t r, int64_t c, const char **name) /* queries, keys, values, gates; then the next one's */
{
    *name = "linear_attn.in_proj.weight";
    return r * HIDDEN + c;
}

static int64_t lara_small(int64_t r, int64_t c, const char **name)
{
    *name = "linear_attn.in_proj.weight";
    return (IN_ROWS + r) * HIDDEN + c;
}

static int64_t olmo_conv(int64_t r, int64_t c, const char **name) /* [channels, 1, taps] of each */
{
    const int64_t keys = HEADS * KEY;
    *name = r < keys       ? "linear_attn.q_conv1d.weight"
            : r < 2 * keys ? "linear_attn.k_conv1d.weight"
                           : "linear_attn.v_conv1d.weight";
    return (r < 2 * keys ? r % keys : r - 2 * keys) * ROPE + c;
}

static int64_t kimi_q(int64_t r, int64_t c, const char **name) /* no column turns: no pairs */
{
    *name = "self_attn.q_proj.weight";
    return r * HIDDEN + c;
}

static int64_t mixtral_down(int64_t r, int64_t c, const char **name)
{
    static const char *const names[] = { "block_sparse_moe.experts.0.w2.weight", "block_sparse_moe.experts.1.w2.weight",
                                         "block_sparse_moe.experts.2.w2.weight" };
    *name = names[r / HIDDEN];
    return r % HIDDEN * FFN + c;
}

static int64_t squared_up(int64_t r, int64_t c, const char **name)
{
    *name = "mlp.up_proj.weight";
    return r * HIDDEN + c;
}

static int64_t gemma_norm(int64_t r, int64_t c, const char **name)
{
    *name = "pre_feedforward_layernorm.weight";
    return r + c;
}

TEST(each_element_has_its_published_place)
{
    const int64_t qkv = (HEADS + 2 * KV) * HEAD_DIM;
    check(HF_GPT2, false, "mlp.fc1.weight", FFN, HIDDEN, gpt2_fc);
    check(HF_LLAMA, false, "attn.qkv.weight", qkv, HIDDEN, llama_qkv);
    check(HF_LLAMA, true, "attn.qkv.weight", qkv, HIDDEN, gguf_qkv);
    check(HF_ERNIE4_5, false, "attn.qkv.weight", qkv, HIDDEN, ernie_qkv);
    check(HF_GLM4, false, "attn.qkv.weight", (HEADS + 2 * KV) * WIDE, HIDDEN, glm_qkv);
    check(HF_HELIUM, false, "attn.qkv.weight", qkv, HIDDEN, ernie_qkv);
    check(HF_LLAMA, false, "mlp.fc1.weight", 2 * FFN, HIDDEN, llama_gate_up);
    check(HF_NEMOTRON, false, "mlp.fc1.weight", FFN, HIDDEN, squared_up);
    check(HF_GPT_OSS, false, "mlp.experts.fc1.weight", EXPERTS * 2 * FFN, HIDDEN, gpt_oss_gate_up);
    check(HF_DEEPSEEK_V2, false, "attn.q.weight", HEADS * (NOPE + ROPE), HIDDEN, deepseek_q);
    check(HF_MIXTRAL, false, "mlp.experts.fc2.weight", EXPERTS * HIDDEN, FFN, mixtral_down);
    check(HF_MINIMAX_M2, false, "mlp.experts.fc2.weight", EXPERTS * HIDDEN, FFN, mixtral_down);
    check(HF_KIMI_LINEAR, false, "attn.q.weight", HEADS * (NOPE + ROPE), HIDDEN, kimi_q);
    check(HF_KIMI_LINEAR, false, "kda.fgb.weight", 2 * HEAD_DIM + HEADS, HIDDEN, kimi_small);
    check(HF_KIMI_LINEAR, false, "kda.conv.weight", 3 * HEADS * HEAD_DIM, ROPE, kimi_conv);
    check(HF_LARA_MINI, false, "delta.qkvz.weight", IN_ROWS, HIDDEN, lara_in);
    check(HF_LARA_MINI, false, "delta.ba.weight", SMALL_ROWS, HIDDEN, lara_small);
    check(HF_OLMO_HYBRID, false, "delta.qkvz.weight", 2 * HEADS * (KEY + GROUP * VALUE), HIDDEN, olmo_qkvz);
    check(HF_OLMO_HYBRID, false, "delta.conv.weight", HEADS * (2 * KEY + GROUP * VALUE), ROPE, olmo_conv);
    check(HF_YOUTU, false, "attn.q.weight", HEADS * (NOPE + ROPE), HIDDEN, deepseek_q);
    check(HF_GEMMA3, false, "norm2.weight", HIDDEN, 1, gemma_norm);
}

TEST(norms_that_are_one_more)
{
    const Param norm = param_of("layers.1.norm2.weight", HIDDEN, 1), matrix = param_of("layers.1.mlp.fc2.weight", 4, 6);
    const Param bias = param_of("layers.1.attn.proj.bias", HIDDEN, 1), of_norm = param_of("final_norm.bias", HIDDEN, 1);
    for (int kind = 0; kind < HF_CLASSES; kind++) {
        const HfNaming n = naming_of((HfClass)kind);
        const bool gemma = kind == HF_GEMMA || kind == HF_GEMMA2 || kind == HF_GEMMA3 || kind == HF_VAULTGEMMA;
        const bool hybrid = kind == HF_QWEN3_NEXT || kind == HF_QWEN3_5 || kind == HF_QWEN3_5_MOE;
        const float want = gemma || hybrid || kind == HF_NEMOTRON ? 1 : 0;
        if (hf_part_count(&n, &norm))
            CHECK_CLOSE((double)hf_part(&n, &norm, 0).more, (double)want, 0, "class %d", kind);
        CHECK_CLOSE((double)hf_part(&n, &matrix, 0).more, 0, 0, "class %d", kind);
        CHECK_CLOSE((double)hf_part(&n, &bias, 0).more, 0, 0, "class %d", kind);
        CHECK_CLOSE((double)hf_part(&n, &of_norm, 0).more, 0, 0, "class %d", kind);
    }
}

TEST_MAIN
