/*
 * hf/: config.json of published models, in the words of transformers 4 and 5, against sections that were looked through
 * by hand (golden/hf); rules of windows, angles and experts; what is refused; damage; and that what is written reads
 * back. test_hf_config.sh has the command, sizes, and transformers itself.
 */
#include "base/json.h"
#include "config_case.h"
#include "hf/class.h"
#include "scratch.h"

static const struct {
    const char *name;
    HfClass class;
    HfClass written; /* the plainest class that says it */
} models[] = {
    { "gpt2", HF_GPT2, HF_GPT2 },
    { "llama-3.1-8b", HF_LLAMA, HF_LLAMA },
    { "llama-3.1-70b", HF_LLAMA, HF_LLAMA },
    { "llama-3.1-405b", HF_LLAMA, HF_LLAMA },
    { "llama-3.2-1b", HF_LLAMA, HF_LLAMA },
    { "mistral-7b-v0.1", HF_MISTRAL, HF_MISTRAL },
    { "qwen2.5-7b", HF_QWEN2, HF_QWEN2 },
    { "qwen3-0.6b", HF_QWEN3, HF_QWEN3 },
    { "qwen3-30b-a3b", HF_QWEN3_MOE, HF_QWEN3_MOE },
    { "qwen3-235b-a22b", HF_QWEN3_MOE, HF_QWEN3_MOE },
    { "mixtral-8x22b", HF_MIXTRAL, HF_MIXTRAL },
    { "deepseek-v2-lite", HF_DEEPSEEK_V2, HF_DEEPSEEK_V2 },
    { "deepseek-v3", HF_DEEPSEEK_V3, HF_DEEPSEEK_V3 },
    { "gpt-oss-120b", HF_GPT_OSS, HF_GPT_OSS },
    { "phi-3-mini-4k", HF_PHI3, HF_MISTRAL },
    { "gemma-2-9b", HF_GEMMA2, HF_GEMMA2 },
    { "gemma-3-27b", HF_GEMMA3, HF_GEMMA3 },
    { "olmo-2-7b", HF_OLMO2, HF_OLMO2 },
    { "qwen1.5-moe-a2.7b", HF_QWEN2_MOE, HF_QWEN2_MOE },
    { "olmoe-1b-7b", HF_OLMOE, HF_OLMOE },
    { "olmo-3-7b", HF_OLMO3, HF_OLMO3 },
    { "smollm3-3b", HF_SMOLLM3, HF_SMOLLM3 },
    { "glm-4.5-air", HF_GLM4_MOE, HF_GLM4_MOE },
    { "minimax-m2", HF_MINIMAX_M2, HF_MINIMAX_M2 },
    { "dots.llm1", HF_DOTS1, HF_GLM4_MOE },
    { "solar-open-100b", HF_SOLAR_OPEN, HF_GLM4_MOE },
    { "hy3", HF_HY_V3, HF_GLM4_MOE },
    { "ernie-4.5-0.3b", HF_ERNIE4_5, HF_LLAMA },
    { "seed-oss-36b", HF_SEED_OSS, HF_QWEN2 },
    { "gemma-7b", HF_GEMMA, HF_GEMMA },
    { "exaone-4.0-32b", HF_EXAONE4, HF_EXAONE4 },
    { "youtu-llm-2b", HF_YOUTU, HF_DEEPSEEK_V2 },
    { "starcoder2-3b", HF_STARCODER2, HF_STARCODER2 },
    { "stablelm-2-1.6b", HF_STABLELM, HF_STABLELM },
    { "k-exaone-236b", HF_EXAONE_MOE, HF_EXAONE_MOE },
    { "flexolmo-7x7b", HF_FLEX_OLMO, HF_FLEX_OLMO },
    { "ministral", HF_MINISTRAL, HF_MINISTRAL },
    { "cwm", HF_CWM, HF_MINISTRAL },
    { "helium-1-preview", HF_HELIUM, HF_LLAMA },
    { "glm-4-9b-chat", HF_GLM, HF_GLM },
    { "glm-4-9b-0414", HF_GLM4, HF_GLM4 },
    { "granite-3.1-1b-a400m", HF_GRANITEMOE, HF_GRANITEMOE },
    { "moonlight-16b-a3b", HF_DEEPSEEK_V3, HF_DEEPSEEK_V3 },
    { "glm-4.7-flash", HF_GLM4_MOE_LITE, HF_DEEPSEEK_V3 },
    { "trinity-nano", HF_AFMOE, HF_AFMOE },
    { "kimi-linear-48b", HF_KIMI_LINEAR, HF_KIMI_LINEAR },
};
enum { MODELS = sizeof models / sizeof *models };

static const HfExport plain = { .dtype = "float32", .vocab = 257, .ids = HF_NO_IDS };

static SetupArena arena; /* of what the last case read */

static Err parse(const char *text, HfConfig *out)
{
    setup_release(&arena);
    setup_init(&arena);
    return hf_config_parse("config.json", text, (int64_t)strlen(text), &arena, out);
}

static char *golden(const char *name, const char *kind)
{
    char path[128], *text = NULL;
    int64_t size;
    snprintf(path, sizeof path, "test/golden/hf/%s.%s", name, kind);
    OK(file_read_all(path, 1 << 20, &text, &size));
    return text;
}

TEST(published_models)
{
    static const char *const dialects[] = { "json", "v5.json" };
    for (int i = 0; i < MODELS; i++) {
        char *want = golden(models[i].name, "ini");
        for (int d = 0; d < 2; d++) {
            HfConfig hf;
            char *text = golden(models[i].name, dialects[d]);
            OK(parse(text, &hf));
            CHECK_MSG(hf.kind == models[i].class && strcmp(hf.ini, want) == 0, "%s.%s:\n%s", models[i].name,
                      dialects[d], hf.ini);
            free(text);
        }
        free(want);
    }
}

/* A folder of a model that sees images, too. */
TEST(wrapped)
{
    HfConfig hf;
    char *text = golden("gemma-3-27b", "json");
    OK(parse(text, &hf));
    CHECK(hf.wrapped);
    free(text);
}

TEST(how_weights_are_stored)
{
    HfConfig hf;
    char *text = golden("deepseek-v3", "json");
    OK(parse(text, &hf));
    CHECK(hf.store == HF_STORE_FP8_BLOCKS && hf.block_rows == 128 && hf.block_cols == 128 && hf.interleaved);
    free(text);
    text = golden("gpt-oss-120b", "json");
    OK(parse(text, &hf));
    CHECK(hf.store == HF_STORE_MXFP4 && !hf.interleaved && !hf.wrapped);
    free(text);
    text = golden("llama-3.1-8b", "json");
    OK(parse(text, &hf));
    CHECK(hf.store == HF_STORE_PLAIN);
    free(text);
}

/* ---- rules ---- */

/* A config.json of the class with these members; what is not given is the class's own. */
static const char *of_class(const char *type, const char *members)
{
    static char text[8192];
    snprintf(text, sizeof text, "{\"model_type\":\"%s\"%s%s}", type, *members ? "," : "", members);
    return text;
}

/* `lines`: parted by "|", each a line of the sections. `not_lines`: no line begins so. */
static const struct {
    const char *type, *members, *lines, *not_lines;
} rules[] = {
    /* what is absent is the class's */
    { "llama", "", "hidden = 4096|heads = 32|ffn = 11008|norm_eps = 1e-06|rope_base = 10000",
      "kv_heads|head_dim|window" },
    { "mistral", "", "kv_heads = 8|window = 4096|seq = 131072", "bias" },
    { "mistral", "\"sliding_window\":null", "kv_heads = 8", "window" },
    { "mixtral", "", "rope_base = 1000000|experts = 8|topk = 2|ffn = 14336|router = softmax", "window|every" },
    { "qwen2", "", "attention_bias = qkv", "window|bias" },
    { "qwen3", "\"hidden_size\":1024", "head_dim = 128|qk_norm = true", "window" },
    { "qwen3_moe", "", "experts = 128|topk = 8|ffn = 768|normalize = false|layers = 24", "window|every|head_dim" },
    { "deepseek_v3", "", "every = 0*3,1*58|groups = 8|mtp_layers = 1|scale = 2.5|balance = bias", "rope_scaling" },
    { "gpt_oss", "", "window = 128,0|rope_scaling = yarn|rope_factor = 32|rope_truncate = false|bias = true", "every" },
    { "phi3", "\"partial_rotary_factor\":0.75", "rope_dim = 72", "window" },
    { "gpt2", "\"n_inner\":null,\"n_embd\":64,\"n_head\":4", "ffn = 256|dropout = 0.1", "rope|window" },
    { "qwen2_moe", "", "attention_bias = qkv|shared_ffn = 5632|shared_gate = true|normalize = false", "window" },
    { "qwen2_moe", "\"qkv_bias\":false,\"norm_topk_prob\":true", "normalize = true", "attention_bias" },
    { "olmoe", "\"num_local_experts\":16", "qk_norm = full|experts = 16|ffn = 2048", "attention_bias|block_norms" },
    { "olmo3", "", "window = 4096*3,0|rope_base = 500000", "rope_base_local" },
    { "qwen3_next", "",
      "mixer = delta*3,attention|delta_key_heads = 16|delta_value_dim = 128|rope_dim = 64|shared_gate = true",
      "delta_conv" },
    { "qwen3_next", "\"num_hidden_layers\":2,\"layer_types\":[\"full_attention\",\"full_attention\"]",
      "attention_gate = true", "mixer|delta_key_heads" },
    { "qwen3_next", "\"full_attention_interval\":2,\"linear_conv_kernel_dim\":3",
      "mixer = delta,attention|delta_conv = 3", NULL },
    { "granitemoehybrid", "",
      "mixer = mamba2|mamba_heads = 128|mamba_head_dim = 64|mamba_groups = 1|mamba_state = 256|position = none|"
      "experts = 8",
      "mamba_conv|mamba_dt_min|attention_scale|rope_base" },
    { "granitemoehybrid",
      "\"num_hidden_layers\":3,\"layer_types\":[\"mamba\",\"attention\",\"mamba\"],\"num_local_experts\":0,"
      "\"position_embedding_type\":\"rope\",\"mamba_d_conv\":3,\"mamba_conv_bias\":false,"
      "\"normalization_function\":\"rmsnorm\",\"init_method\":\"mup\",\"time_step_limit\":[0.0, Infinity]",
      "mixer = mamba2,attention|ffn = 1024|rope_base = 10000|attention_scale = 1|mamba_conv = 3|"
      "mamba_conv_bias = false",
      "[moe]" },
    { "mellum", "", "qk_norm = true|rope_base = 500000|rope_base_local = 10000|experts = 64|normalize = true",
      "window|every" },
    { "mellum",
      "\"num_hidden_layers\":2,\"layer_types\":[\"sliding_attention\",\"full_attention\"],\"num_mtp_layers\":1,"
      "\"rope_parameters\":{\"full_attention\":{\"rope_type\":\"yarn\",\"rope_theta\":5e5,\"factor\":4,"
      "\"original_max_position_embeddings\":64},\"sliding_attention\":{\"rope_type\":\"default\",\"rope_theta\":2e4}}",
      "window = 1024,0|rope_scaling = yarn|rope_factor = 4|rope_base_local = 20000", "mtp_layers" },
    { "flint", "\"num_hidden_layers\":7",
      "window = 0*2,513*3|rope_layers = 0*2,1*3|every = 0*2,1*5|router = sigmoid|shared_ffn = 1024|sinks = "
      "true",
      "balance|shared_gate" },
    { "granite_swa", "", "window = 0,128*3|sinks = true|attention_scale = 1|tied = true", "rope_layers|[moe]" },
    { "granitemoe_swa", "\"num_hidden_layers\":3,\"layer_rope_theta\":[0,500000.0,0],\"shared_intermediate_size\":64",
      "window = 0,128*2|rope_layers = 0,1|rope_base = 500000|experts = 8|shared_ffn = 64", NULL },
    { "phi", "", "block_norms = parallel|bias = true|head_bias = true|rope_dim = 32|activation = gelu|norm = layernorm",
      "attention_bias|kv_heads" },
    { "gptj", "\"n_positions\":1024,\"activation_function\":\"gelu\"",
      "attention_bias = none|bias = true|head_bias = true|rope_dim = 64|activation = gelu_erf|seq = 1024|ffn = 16384",
      "position" },
    { "aria_text", "\"moe_num_experts\":64,\"moe_topk\":6", "experts = 64|topk = 6|ffn = 4096|shared_ffn = 8192",
      "every" },
    { "bamba",
      "\"attn_rotary_emb\":64,"
      "\"attn_layer_indices\":[1],\"num_hidden_layers\":2,\"time_step_limit\":[0.25,{\"__float__\":\"Infinity\"}]",
      "mixer = mamba2,attention|rope_dim = 64|mamba_dt_min = 0.25|kv_heads = 8", "[moe]" },
    { "bamba", "\"num_hidden_layers\":2,\"attention_bias\":true,\"head_dim\":32", "mixer = mamba2",
      "kv_heads|head_dim|attention_bias" },
    { "nemotron_h", "\"rms_norm_eps\":1e-5,\"attention_head_dim\":128,\"time_step_limit\":[0.0, Infinity]",
      "layers = 4|mixer = mamba2,none,attention,none|ffn_layers = 0,1|every = 0,1,0*2|mamba_dt_min = 0.001|"
      "position = none|activation = relu2|shared_ffn = 7688|mamba_groups = 8|balance = bias",
      "latent|rope_base|groups = 1" },
    { "nemotron_h",
      "\"hybrid_override_pattern\":\"MEM*E\",\"num_hidden_layers\":5,\"moe_latent_size\":1024,\"n_group\":4,"
      "\"topk_group\":2,\"num_experts_per_tok\":4,\"use_conv_bias\":false",
      "layers = 5|mixer = mamba2,none,mamba2,attention,none|ffn_layers = 0,1,0|latent = 1024|"
      "mamba_conv_bias = false|groups = 4",
      "every|group_best" },
    { "nemotron_h",
      "\"hybrid_override_pattern\":\"-*-M\","
      "\"layers_block_type\":[\"mlp\",\"attention\",\"mlp\",\"mamba\"]",
      "mixer = none,attention,none,mamba2|ffn_layers = 1,0", "[moe]" },
    { "kimi_linear", "\"linear_conv_kernel_dim\":3,\"num_shared_experts\":2",
      "mixer = kda*4,attention,kda*3,attention,kda*3,attention,kda*3,attention,kda*3,attention,kda*3,attention|"
      "kda_heads = 32|kda_head_dim = 128|kda_conv = 3|position = none|"
      "attention = mla|latent_norm_eps = 1e-06|experts = 256|every = 0,1*26|shared_ffn = 2048|balance = bias|"
      "tied = false",
      "rope_base|groups" },
    { "kimi_linear",
      "\"num_hidden_layers\":3,\"linear_attn_config\":{\"kda_layers\":[1,3],\"full_attn_layers\":[2],\"num_heads\":4,"
      "\"head_dim\":16},\"layer_types\":[\"linear_attention\",\"full_attention\",\"linear_attention\"],"
      "\"mlp_layer_types\":[\"sparse\",\"dense\",\"sparse\"],\"rope_theta\":10000.0,\"rope_scaling\":null",
      "mixer = kda,attention|kda_heads = 4|kda_head_dim = 16|every = 1,0,1", "kda_conv" },
    { "kimi_linear",
      "\"num_hidden_layers\":2,\"linear_attn_config\":{\"kda_layers\":[1,2],\"full_attn_layers\":[]},"
      "\"attention_bias\":true",
      "mixer = kda|position = none|every = 0,1", "attention = mla|kv_lora_rank|attention_bias" },
    { "olmo_hybrid", "",
      "block_norms = post|state_norms = pre|qk_norm = full|mixer = delta*3,attention|delta_key_heads = 30|"
      "delta_value_heads = 30|delta_key_dim = 96|delta_value_dim = 192|delta_norm_eps = 1e-05|delta_negative = true|"
      "rope_base = 10000",
      "head_dim|position" },
    { "olmo_hybrid",
      "\"num_hidden_layers\":3,\"rope_theta\":null,\"linear_allow_neg_eigval\":false,\"linear_num_key_heads\":10,"
      "\"linear_value_head_dim\":64",
      "mixer = delta*2,attention|position = none|delta_key_heads = 10|delta_value_heads = 30|delta_key_dim = 288|"
      "delta_value_dim = 64",
      "delta_negative|rope_base" },
    { "olmo_hybrid", "\"rope_parameters\":{\"rope_theta\":null,\"rope_type\":\"default\"}", "position = none",
      "rope_base" },
    { "olmo_hybrid", "\"rope_parameters\":null", "rope_base = 10000", "position" },
    { "lara_mini", "",
      "mixer = delta,attention,delta,attention*2|window = 0,512,0*2,512|rope_layers = 0,1,0*2,1|qk_norm = true|"
      "delta_key_heads = 8|delta_value_heads = 16|experts = 128|shared_ffn = 512|router = softmax_pre|tied = true",
      "every|shared_gate|delta_conv" },
    { "lara_mini",
      "\"num_hidden_layers\":3,\"layer_types\":[\"full_attention\",\"linear_attention\",\"sliding_attention\"],"
      "\"sliding_window\":64",
      "mixer = attention,delta|window = 0*2,64|rope_layers = 0*2,1", NULL },
    { "qwen3_5_text", "\"mtp_num_hidden_layers\":1,\"attn_output_gate\":true,\"rope_parameters\":{\"rope_theta\":1e7,"
      "\"rope_type\":\"default\",\"mrope_section\":[11,11,10],\"mrope_interleaved\":true,"
      "\"partial_rotary_factor\":0.25}",
      "mixer = delta*3,attention|delta_value_heads = 32|rope_base = 10000000|rope_dim = 64|ffn = 12288",
      "experts|mtp_layers" },
    { "qwen3_5_moe_text", "\"mamba_ssm_dtype\":\"float32\",\"mlp_only_layers\":[]",
      "experts = 256|topk = 8|shared_ffn = 512|shared_gate = true|layers = 40|router = softmax", "every" },
    { "smollm3", "", "rope_layers = 1*3,0|rope_base = 2000000|kv_heads = 4", "window" },
    { "smollm3", "\"num_hidden_layers\":2,\"no_rope_layers\":[0,0]", "position = none", "rope_layers|rope_base" },
    { "smollm3", "\"num_hidden_layers\":3,\"no_rope_layers\":[1,1,1,0]", "layers = 3", "rope_layers" },
    { "glm4_moe", "\"use_qk_norm\":true,\"head_dim\":128", "qk_norm = true|rope_dim = 64|every = 0,1*45",
      "attention_bias" },
    { "minimax_m2", "\"rotary_dim\":64", "rope_dim = 64|qk_norm = full|experts = 256|ffn = 1536", "attention_bias" },
    { "dots1", "\"n_routed_experts\":8,\"num_experts_per_tok\":2,\"max_window_layers\":60", "window = 0*60,4096*2",
      "every" },
    { "solar_open", "\"attention_bias\":true", "attention_bias = qkv|rope_base = 1000000|shared_ffn = 1280", "every" },
    { "hy_v3", "\"num_hidden_layers\":3,\"mlp_layer_types\":[\"sparse\",\"dense\",\"sparse\"]", "every = 1,0,1", NULL },
    { "ernie4_5", "\"use_bias\":true", "bias = true", "attention_bias" },
    { "seed_oss", "\"attention_out_bias\":true,\"residual_dropout\":0", "attention_bias = all", "bias" },
    { "gemma", "\"hidden_act\":\"gelu\"", "activation = geglu|tied = true", "block_norms|window" },
    { "exaone4", "\"sliding_window_pattern\":\"LG\"", "window = 4096,0|rope_layers = 1,0", NULL },
    { "exaone4", "\"sliding_window\":null,\"sliding_window_pattern\":0", "block_norms = post", "window|rope_layers" },
    { "youtu", "\"hidden_size\":2000", "init_std = 0.02|attention = mla", "[moe]" },
    { "starcoder2", "\"use_bias\":false,\"residual_dropout\":0.1,\"embedding_dropout\":0.1",
      "dropout = 0.1|norm = layernorm", "bias" },
    { "exaone_moe", "\"first_k_dense_replace\":2,\"num_hidden_layers\":4",
      "every = 0*2,1*2|rope_layers = 1*3,0|window = 4096*3,0|scale = 2.5", NULL },
    { "flex_olmo", "", "block_norms = post|qk_norm = full|topk = 5|ffn = 11008", "every" },
    { "ministral", "", "window = 4096", "rope_scaling" },
    { "helium", "\"attention_bias\":true,\"mlp_bias\":true", "bias = true|attention_bias = qkv|rope_base = 100000",
      NULL },
    { "granite", "\"hidden_size\":512,\"num_attention_heads\":8,\"attention_multiplier\":0.125", "tied = false",
      "embed_scale|residual_scale|attention_scale|logits_scale" },
    { "granite",
      "\"embedding_multiplier\":12,\"residual_multiplier\":0.22,\"attention_multiplier\":0.015625,\"logits_scaling\":8",
      "embed_scale = 12|residual_scale = 0.22|attention_scale = 0.015625|logits_scale = 0.125", NULL },
    { "granite", "", "attention_scale = 1", "embed_scale|residual_scale|logits_scale" },
    { "arcee", "\"mlp_bias\":true", "activation = relu2|bias = true|attention_bias = none", "norm = " },
    { "jais2", "", "norm = layernorm|activation = relu2|bias = true", "attention_bias|rope_dim" },
    { "nemotron", "", "norm = layernorm|activation = relu2|rope_dim = 64|norm_eps = 1e-05", "bias" },
    { "nemotron", "\"partial_rotary_factor\":1,\"norm_eps\":0.001", "norm_eps = 0.001", "rope_dim" },
    { "vaultgemma", "", "activation = geglu|embed_scale = 48|window = 4096,0|attention_softcap = 50|final_softcap = 30",
      "block_norms|qk_norm|attention_scale" },
    { "hyperclovax", "", "block_norms = both", "embed_scale|residual_scale|attention_scale|logits_scale" },
    { "hyperclovax", "\"use_post_norm\":false,\"logits_scaling\":0.125,\"attention_multiplier\":0.0078125",
      "logits_scale = 0.125|attention_scale = 0.0078125", "block_norms" },
    { "granitemoe", "", "attention_scale = 1|experts = 8|topk = 2|ffn = 11008|router = softmax", "shared_ffn" },
    { "granitemoeshared", "\"shared_intermediate_size\":1024", "shared_ffn = 1024|router = softmax", "shared_gate" },
    { "afmoe", "\"num_hidden_layers\":8", "attention_gate = true|window = 1024*3,0|rope_layers = 1*3,0|every = 0,1*7",
      "embed_scale" },
    { "afmoe", "\"mup_enabled\":true", "embed_scale = 45.254833995939045|shared_ffn = 2816", NULL },
    { "gpt_bigcode", "", "arch = gpt2|kv_heads = 1|tied = true|dropout = 0.1", "bias|head_dim" },
    { "stablelm", "\"use_parallel_residual\":true", "block_norms = parallel", NULL },
    { "gpt_neox", "", "block_norms = parallel_two|activation = gelu_erf|rope_dim = 24|bias = true|norm = layernorm",
      "attention_bias|kv_heads" },
    { "gpt_neox", "\"rotary_pct\":1,\"use_parallel_residual\":false,\"hidden_act\":\"gelu_fast\"", "activation = gelu",
      "block_norms|rope_dim" },
    { "gpt_neox", "\"attention_bias\":false,\"hidden_dropout\":0.1", "attention_bias = none|dropout = 0.1", NULL },
    { "falcon", "", "block_norms = parallel|activation = gelu_erf|kv_heads = 1|ffn = 18176|tied = true", "bias" },
    { "falcon", "\"new_decoder_architecture\":true,\"num_kv_heads\":8,\"num_attention_heads\":64,\"hidden_size\":4096",
      "block_norms = parallel_two|kv_heads = 8", NULL },
    { "falcon",
      "\"new_decoder_architecture\":true,\"num_kv_heads\":8,\"num_attention_heads\":64,\"hidden_size\":4096,"
      "\"num_ln_in_parallel_attn\":1",
      "block_norms = parallel|kv_heads = 8", NULL },
    { "falcon", "\"multi_query\":false,\"parallel_attn\":false", "hidden = 4544", "block_norms|kv_heads" },
    { "cohere", "", "norm = layernorm|norm_bias = false|block_norms = parallel|logits_scale = 0.0625|tied = true",
      "bias|head_dim" },
    { "cohere", "\"head_dim\":64", "head_dim = 64", NULL },
    { "cohere", "\"head_dim\":null", "heads = 64", "head_dim" },
    { "cohere2", "\"head_dim\":64", "heads = 64", "head_dim" }, /* (its configuration puts its own in place of it) */
    { "cohere2", "\"num_hidden_layers\":8", "window = 4096*3,0|rope_layers = 1*3,0|norm_bias = false", "head_dim" },
    { "deepseek_v3", "\"rms_norm_eps\":1e-5", "norm_eps = 1e-05|latent_norm_eps = 1e-06", NULL },
    { "deepseek_v3", "", "norm_eps = 1e-06", "latent_norm_eps" },
    { "glm4_moe_lite", "\"num_hidden_layers\":3", "latent_norm_eps = 1e-06|every = 0,1*2|scale = 1.8|balance = bias",
      "mtp_layers" },
    { "glm4_moe_lite", "\"num_nextn_predict_layers\":1,\"first_k_dense_replace\":1", "mtp_layers = 1", NULL },
    { "minicpm3", "\"num_hidden_layers\":4",
      "embed_scale = 12|residual_scale = 0.7|logits_scale = 0.1|v_head_dim = 64|latent_norm_eps = 1e-06",
      "mtp_layers" },
    { "minicpm3", "\"scale_depth\":null,\"dim_model_base\":null,\"rms_norm_eps\":1e-6,\"v_head_dim\":32",
      "v_head_dim = 32", "residual_scale|logits_scale|latent_norm_eps" },
    { "cwm", "\"num_hidden_layers\":8", "window = 0,8192*3|rope_scaling = llama3|rope_factor = 16", "bias" },
    { "stablelm", "\"hidden_dropout\":0.1", "; not taken over: hidden_dropout of 0.1", "dropout" },
    { "exaone_moe", "\"num_hidden_layers\":2,\"mlp_layer_types\":[\"sparse\",\"dense\"],\"first_k_dense_replace\":1",
      "every = 1,0", NULL },
    { "exaone_moe", "\"num_hidden_layers\":2,\"mlp_layer_types\":[]", "every = 0,1", NULL },
    { "qwen2_moe", "\"num_attention_heads\":32", "kv_heads = 16", NULL },
    { "dots1", "\"num_attention_heads\":64,\"n_routed_experts\":8,\"num_experts_per_tok\":2", "kv_heads = 32", NULL },
    { "exaone_moe", "\"num_attention_heads\":64", "kv_heads = 32", NULL },
    { "olmo3", "\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":5e5}", "rope_base = 500000",
      "rope_base_local" },
    { "stablelm", "", "rope_dim = 20|norm = layernorm", "attention_bias" },
    { "gpt2", "\"n_inner\":100,\"resid_pdrop\":0.2", "ffn = 100|; not taken over: dropout of 0.2", "dropout" },
    /* biases */
    { "llama", "\"attention_bias\":true", "attention_bias = all", "bias" },
    { "llama", "\"attention_bias\":true,\"mlp_bias\":true", "bias = true", "attention_bias" },
    { "llama", "\"mlp_bias\":true", "bias = true|attention_bias = none", NULL },
    { "gpt_oss", "\"attention_bias\":false", "bias = true|attention_bias = none", NULL },
    { "qwen3", "\"attention_bias\":true", "attention_bias = all", "bias" },
    { "deepseek_v3", "\"attention_bias\":true", "attention_bias = all", "bias" },
    /* windows */
    { "qwen2", "\"use_sliding_window\":true,\"sliding_window\":64,\"max_window_layers\":5,\"num_hidden_layers\":8",
      "window = 0*5,64*3", NULL },
    { "qwen2", "\"use_sliding_window\":true,\"max_window_layers\":0,\"num_hidden_layers\":8", "window = 4096", NULL },
    { "qwen2", "\"use_sliding_window\":true,\"max_window_layers\":8,\"num_hidden_layers\":8", "layers = 8", "window" },
    { "qwen3",
      "\"use_sliding_window\":true,\"num_hidden_layers\":4,\"layer_types\":[\"full_attention\","
      "\"sliding_attention\",\"full_attention\",\"sliding_attention\"]",
      "window = 0,4096", NULL },
    { "qwen3_moe", "\"use_sliding_window\":true,\"sliding_window\":32", "window = 32", NULL },
    { "gpt_oss",
      "\"num_hidden_layers\":3,\"layer_types\":[\"full_attention\",\"full_attention\","
      "\"sliding_attention\"]",
      "window = 0*2,128", NULL },
    /* angles */
    { "llama", "\"rope_scaling\":{\"type\":\"linear\",\"factor\":4}", "rope_scaling = linear|rope_factor = 4",
      "rope_original" },
    { "llama", "\"rope_scaling\":{\"rope_type\":\"default\"}", "rope_base = 10000", "rope_scaling" },
    { "llama", "\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":5e5}", "rope_base = 500000",
      "rope_scaling" },
    { "llama", "\"rope_theta\":5e5,\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":500000}",
      "rope_base = 500000", NULL },
    { "qwen2", "\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4.0,\"original_max_position_embeddings\":32768}",
      "rope_scaling = yarn|rope_factor = 4|rope_original = 32768", "rope_slow|rope_fast|rope_magnitude" },
    { "qwen2", "\"rope_scaling\":{\"type\":\"yarn\",\"factor\":null,\"original_max_position_embeddings\":4096}",
      "rope_factor = 8|rope_original = 4096", NULL },
    { "qwen2", "\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4,\"attention_factor\":1.5,\"beta_fast\":16}",
      "rope_magnitude = 1.5|rope_fast = 16|rope_original = 32768", "rope_slow" },
    { "qwen2", "\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4,\"mscale\":1,\"mscale_all_dim\":1}",
      "rope_magnitude = 1", "rope_mscale_all" },
    { "gpt_oss", "\"rope_scaling\":{\"rope_type\":\"default\"}", "rope_base = 150000", "rope_scaling|rope_factor" },
    { "gpt_oss", "\"rope_scaling\":null", "rope_scaling = yarn", NULL },
    /* experts */
    { "qwen3_moe", "\"num_hidden_layers\":6,\"decoder_sparse_step\":2,\"mlp_only_layers\":[3],\"norm_topk_prob\":true",
      "every = 0,1,0*3,1|normalize = true|router = softmax_pre", NULL },
    { "qwen3_moe", "\"num_experts_per_tok\":1,\"norm_topk_prob\":true", "router = softmax", "normalize" },
    { "qwen3_moe", "\"num_hidden_layers\":2,\"mlp_only_layers\":[0,1]", "ffn = 6144", "experts|[moe]" },
    { "qwen3_moe", "\"num_experts\":16,\"num_local_experts\":16", "experts = 16", NULL },
    { "deepseek_v2",
      "\"num_experts_per_tok\":6,\"moe_intermediate_size\":1408,\"topk_method\":\"greedy\",\"n_group\":8",
      "router = softmax_pre|shared_ffn = 2816", "groups|every|balance" },
    { "deepseek_v2",
      "\"num_experts_per_tok\":3,\"moe_intermediate_size\":1408,\"n_group\":8,\"topk_group\":3,"
      "\"topk_method\":\"group_limited_greedy\"",
      "groups = 8|group_topk = 3", "group_best" },
    { "deepseek_v2",
      "\"num_experts_per_tok\":6,\"n_group\":8,\"topk_group\":3,\"topk_method\":\"group_limited_greedy\"",
      "groups = 8|group_topk = 3|group_best = 1", NULL },
    { "deepseek_v3", "\"topk_group\":2", "groups = 8|group_topk = 2|group_best = 2", NULL },
    { "deepseek_v3", "\"topk_group\":1,\"n_group\":1", "router = sigmoid", "groups|group_topk|group_best" },
    { "deepseek_v2", "\"num_experts_per_tok\":2,\"first_k_dense_replace\":32,\"q_lora_rank\":null", "attention = mla",
      "[moe]|q_lora_rank" },
    { "mixtral", "\"router_jitter_noise\":0.1",
      "; not taken over: router_jitter_noise of 0.1, which is on what experts "
      "get, too",
      "jitter" },
    /* nothing is said by null, by notes, by what others compute with */
    { "llama", "\"sliding_window\":null,\"_from\":3,\"use_cache\":false,\"torch_dtype\":\"bfloat16\"", "layers = 32",
      NULL },
    { "llama", "\"pruned_heads\":{},\"is_encoder_decoder\":false,\"summary_type\":\"mean\"", "layers = 32", NULL },
};

static bool has_line(const char *text, const char *line, size_t n)
{
    for (const char *at = text; (at = strstr(at, "\n")) != NULL;)
        if (strncmp(++at, line, n) == 0) return true;
    return strncmp(text, line, n) == 0;
}

TEST(keys_together)
{
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        HfConfig hf;
        const Err err = parse(of_class(rules[i].type, rules[i].members), &hf);
        CHECK_MSG(!err, "%s %s: %s", rules[i].type, rules[i].members, err_message());
        for (const char *at = rules[i].lines; !err && at; at = strchr(at, '|') ? strchr(at, '|') + 1 : NULL) {
            char line[128];
            snprintf(line, sizeof line, "%.*s\n", (int)strcspn(at, "|"), at);
            const size_t n = *at == ';' ? strlen(line) - 1 : strlen(line); /* (notes go on) */
            CHECK_MSG(has_line(hf.ini, line, n), "%s %s: no %s in\n%s", rules[i].type, rules[i].members, line, hf.ini);
        }
        for (const char *at = rules[i].not_lines; !err && at; at = strchr(at, '|') ? strchr(at, '|') + 1 : NULL) {
            char line[64];
            snprintf(line, sizeof line, "%.*s%s", (int)strcspn(at, "|"), at, *at == '[' ? "" : " =");
            CHECK_MSG(!has_line(hf.ini, line, strlen(line)), "%s %s: %s in\n%s", rules[i].type, rules[i].members, line,
                      hf.ini);
        }
    }
}

/* ---- what is refused ---- */

static const struct {
    const char *type, *members;
    Err err;
    const char *text;
} wrong[] = {
    { "mamba", "", ERR_CONFIG, "'model_type' is 'mamba' (the class of the model)" },
    { "llama", "\"architectures\":[\"LlamaForSequenceClassification\"]", ERR_CONFIG,
      "megatrain reads language models" },
    { "llama", "\"sliding_window\":4096", ERR_CONFIG,
      "'sliding_window' is 4096 (positions that a query sees): the class has no such key" },
    { "llama", "\"clip\":8", ERR_CONFIG, "'clip' is 8 (not a key that megatrain knows of this class)" },
    { "llama", "\"clip_qkv\":8", ERR_CONFIG, "a bound of queries, keys and values): the class has no such key" },
    { "olmoe", "\"clip_qkv\":8", ERR_CONFIG, "'clip_qkv' is 8 (a bound of queries, keys and values)" },
    { "llama", "\"norm_type\":\"layer_norm\"", ERR_CONFIG, "'norm_type' is 'layer_norm' (not a key" },
    { "llama", "\"mlp_type\":\"gated\"", ERR_CONFIG, "'mlp_type' is 'gated' (not a key" },
    { "llama", "\"hidden_dropout\":0.1", ERR_CONFIG, "'hidden_dropout' is 0.1" },
    { "llama", "\"attn_type_list\":[0]", ERR_CONFIG, "'attn_type_list' is [...] (not a key" },
    { "granite_swa", "\"layer_rope_theta\":[1e4]", ERR_CONFIG, "is about fewer blocks than there are" },
    { "granite_swa", "\"num_hidden_layers\":2,\"layer_rope_theta\":[1e4,5e5]", ERR_CONFIG,
      "megatrain reads one base, and 0" },
    { "granite_swa", "\"layer_rope_theta\":[-1]", ERR_CKPT, "a list of numbers, one for each block" },
    { "granite_swa", "\"layer_rope_theta\":1e4", ERR_CKPT, "a list of numbers, one for each block" },
    { "mellum", "\"rope_theta\":1e4", ERR_CONFIG, "not a key that megatrain knows of this class" },
    { "aria_text", "\"mlp_bias\":true", ERR_CONFIG, "'mlp_bias' is true" },
    { "stablelm", "\"partial_rotary_factor\":0", ERR_CONFIG, "fewer than 2 columns" },
    { "glm4", "\"partial_rotary_factor\":0.015", ERR_CONFIG, "fewer than 2 columns" },
    { "phi3", "\"partial_rotary_factor\":1e15", ERR_CONFIG, "more than a head has" },
    { "minimax_m2", "\"rotary_dim\":1", ERR_CONFIG, "fewer than 2 columns" },
    { "olmo3", "\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":1e6}", ERR_CONFIG,
      "'rope_theta' is 1000000 (base and scaling" },
    { "olmo3", "\"rope_parameters\":{\"rope_type\":\"yarn\",\"factor\":8}", ERR_CONFIG, "'rope_type' is 'yarn'" },
    { "gemma3_text", "\"rope_parameters\":{\"rope_theta\":1e4}", ERR_CONFIG, "in the objects 'full_attention'" },
    { "olmo3", "\"rope_theta\":10000", ERR_CONFIG, "it can only be 500000" },
    { "qwen2_moe", "\"use_sliding_window\":true", ERR_CONFIG, "it can only be false" },
    { "smollm3", "\"no_rope_layers\":[1,0]", ERR_CONFIG, "about fewer blocks than there are" },
    { "smollm3", "\"no_rope_layers\":[1,2]", ERR_CKPT, "a list of 0 and 1" },
    { "minimax_m2", "\"rotary_dim\":64,\"partial_rotary_factor\":0.25", ERR_CONFIG, "different columns that turn" },
    { "granite", "\"attention_multiplier\":0", ERR_CONFIG, "'logits_scaling' must be above 0" },
    { "granite", "\"logits_scaling\":0", ERR_CONFIG, "'logits_scaling' must be above 0" },
    { "hyperclovax", "\"logits_scaling\":0", ERR_CONFIG, "'logits_scaling' must be above 0" },
    { "hyperclovax", "\"attention_bias\":true", ERR_CONFIG, "a bias would be added behind the norm" },
    { "granitemoe", "\"shared_intermediate_size\":64", ERR_CONFIG, "the class has no such key" },
    { "vaultgemma", "\"use_bidirectional_attention\":true", ERR_CONFIG, "queries see what follows them" },
    { "arcee", "\"hidden_act\":\"silu\"", ERR_CONFIG, "it can only be relu2" },
    { "jais2", "\"partial_rotary_factor\":0.5", ERR_CONFIG, "only a part of a head's columns turns" },
    { "nemotron", "\"layer_norm_eps\":1e-5", ERR_CONFIG, "the class has no such key" },
    { "llama", "\"logits_scaling\":8", ERR_CONFIG, "the class has no such key" },
    { "dots1", "", ERR_CONFIG, "'n_routed_experts' (experts) is missing" },
    { "glm4_moe", "\"head_dim\":128,\"first_k_dense_replace\":46", ERR_CONFIG,
      "modules of multi-token prediction have experts" },
    { "hy_v3", "\"num_hidden_layers\":2,\"mlp_layer_types\":[\"dense\"]", ERR_CONFIG, "as many blocks" },
    { "hy_v3", "\"mlp_layer_types\":[\"hash\"]", ERR_CONFIG, "'mlp_layer_types' is 'hash'" },
    { "nemotron_h", "\"hybrid_override_pattern\":\"MXM\"", ERR_CONFIG, "has no such layer in this class" },
    { "nemotron_h", "\"layers_block_type\":[\"mlp\",\"conv\"]", ERR_CONFIG, "'layers_block_type' is 'conv'" },
    { "nemotron_h", "\"layers_block_type\":7", ERR_CKPT, "should be a list of words, or letters, one for each block" },
    { "nemotron_h", "\"hybrid_override_pattern\":\"M*\",\"layers_block_type\":[\"mlp\",\"attention\"]", ERR_CKPT,
      "'layers_block_type' and 'hybrid_override_pattern' differ" },
    { "nemotron_h", "\"hybrid_override_pattern\":\"M*\",\"num_hidden_layers\":3", ERR_CONFIG, "as many blocks" },
    { "nemotron_h", "\"hybrid_override_pattern\":\"M*\",\"mlp_bias\":true", ERR_CONFIG, "it can only be false" },
    { "kimi_linear", "\"linear_attn_config\":7", ERR_CKPT, "should be an object" },
    { "kimi_linear", "\"linear_attn_config\":{\"kda_layers\":[1]}", ERR_CKPT,
      "has one of 'kda_layers' and 'full_attn_layers' without the other" },
    { "kimi_linear", "\"linear_attn_config\":{\"kda_layers\":[0],\"full_attn_layers\":[1]}", ERR_CKPT,
      "should be a list of blocks, counted from 1" },
    { "kimi_linear", "\"num_hidden_layers\":2,\"linear_attn_config\":{\"kda_layers\":[1],\"full_attn_layers\":[1]}",
      ERR_CONFIG, "do not name each block once" },
    { "kimi_linear", "\"num_hidden_layers\":2,\"linear_attn_config\":{\"kda_layers\":[1,2],\"full_attn_layers\":[3]}",
      ERR_CONFIG, "do not name each block once" },
    { "kimi_linear",
      "\"num_hidden_layers\":2,\"linear_attn_config\":{\"kda_layers\":[1],\"full_attn_layers\":[2]},"
      "\"layer_types\":[\"full_attention\",\"linear_attention\"]",
      ERR_CONFIG, "'layer_types' and 'linear_attn_config' differ" },
    { "kimi_linear", "\"linear_num_heads\":4,\"linear_attn_config\":{\"num_heads\":8}", ERR_CKPT,
      "differ, and mean the same" },
    { "kimi_linear", "\"linear_attn_config\":{\"gate_lower_bound\":-5.0}", ERR_CONFIG,
      "'gate_lower_bound' is -5 (not a key that megatrain knows of this class)" },
    { "kimi_linear", "\"mla_use_nope\":false", ERR_CONFIG, "it can only be true" },
    { "kimi_linear", "\"tie_word_embeddings\":true", ERR_CONFIG, "it can only be false" },
    { "olmo_hybrid", "\"num_hidden_layers\":1,\"layer_types\":[\"linear_attention\"]", ERR_CONFIG, "qk_norm = 'full'" },
    { "olmo_hybrid", "\"num_hidden_layers\":1,\"layer_types\":[\"full_attention\"]", ERR_CONFIG,
      "state_norms = 'pre'" },
    { "olmo_hybrid", "\"head_dim\":64", ERR_CONFIG, "the class has no such key" },
    { "lara_mini", "\"layer_types\":[\"mamba\"]", ERR_CONFIG, "has no such attention in this class" },
    { "lara_mini", "\"num_hidden_layers\":2,\"layer_types\":[\"linear_attention\"]", ERR_CONFIG, "as many blocks" },
    { "lara_mini", "\"intermediate_size\":512", ERR_CONFIG, "the class has no such key" },
    { "seed_oss", "\"attention_bias\":false,\"attention_out_bias\":true", ERR_CONFIG, "has no such biases" },
    { "exaone4", "\"sliding_window_pattern\":\"LLGL\"", ERR_CONFIG, "letters L with one G behind them" },
    { "exaone4", "\"sliding_window_pattern\":0", ERR_CONFIG, "says which blocks have a window" },
    { "cohere", "\"logit_scale\":0", ERR_CONFIG, "must be above 0" },
    { "cohere", "\"use_qk_norm\":true", ERR_CONFIG, "it can only be false" },
    { "falcon", "\"alibi\":true", ERR_CONFIG, "slopes over distances" },
    { "falcon", "\"new_decoder_architecture\":true,\"parallel_attn\":false", ERR_CONFIG, "without 'parallel_attn'" },
    { "falcon", "\"num_ln_in_parallel_attn\":2", ERR_CONFIG, "without 'new_decoder_architecture'" },
    { "gpt_neox", "\"hidden_act\":\"relu\"", ERR_CONFIG, "megatrain has no such thing" },
    { "gpt_bigcode", "\"multi_query\":false", ERR_CONFIG, "it can only be true" },
    { "afmoe", "\"score_func\":\"softmax\"", ERR_CONFIG, "it can only be sigmoid" },
    { "afmoe", "\"sliding_window\":null", ERR_CKPT, "should be given" },
    { "minicpm3", "\"scale_depth\":0", ERR_CONFIG, "'scale_emb' and 'scale_depth' must be above 0" },
    { "youtu", "\"v_head_dim\":null", ERR_CKPT, "'v_head_dim' is null, and should be given" },
    { "starcoder2", "\"hidden_act\":\"gelu\"", ERR_CONFIG, "it can only be gelu_pytorch_tanh" },
    { "stablelm", "\"qk_layernorm\":true", ERR_CONFIG, "norms of each head" },
    { "llama", "\"hidden_act\":\"gelu\"", ERR_CONFIG,
      "'hidden_act' is 'gelu' (the activation of the feed-forward layer)" },
    { "gpt2", "\"activation_function\":\"gelu\"", ERR_CONFIG, "it can only be gelu_new gelu_pytorch_tanh" },
    { "gpt2", "\"scale_attn_by_inverse_layer_idx\":true", ERR_CONFIG, "divided by the block's number, too" },
    { "gpt2", "\"reorder_and_upcast_attn\":true", ERR_CONFIG, "scaled in another order" },
    { "gpt2", "\"add_cross_attention\":true", ERR_CONFIG, "attention to another sequence" },
    { "llama", "\"pruned_heads\":{\"1\":[0]}", ERR_CONFIG, "heads that were taken out" },
    { "llama", "\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":2.0}", ERR_CONFIG,
      "'type' is 'dynamic' (how rotary angles are scaled): megatrain has no such thing" },
    { "phi3", "\"rope_scaling\":{\"type\":\"longrope\",\"short_factor\":[1],\"long_factor\":[1]}", ERR_CONFIG,
      "'longrope'" },
    { "llama", "\"rope_scaling\":{\"type\":\"linear\"}", ERR_CONFIG, "'rope_scaling' lacks 'factor'" },
    { "llama", "\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8}", ERR_CONFIG, "'low_freq_factor'" },
    { "llama", "\"rope_scaling\":{\"type\":\"yarn\",\"factor\":8,\"mrope_section\":[1]}", ERR_CONFIG,
      "'mrope_section'" },
    { "llama", "\"rope_theta\":1e4,\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":5e5}", ERR_CKPT,
      "'rope_theta' and 'rope_theta' differ" },
    { "llama", "\"partial_rotary_factor\":0.5", ERR_CONFIG, "only a part of a head's columns turns" },
    { "deepseek_v3", "\"rope_scaling\":{\"type\":\"linear\",\"factor\":4,\"mscale_all_dim\":1}", ERR_CONFIG,
      "'mscale_all_dim'" },
    { "deepseek_v3", "\"num_key_value_heads\":8", ERR_CONFIG, "latent attention has keys for each head" },
    { "deepseek_v3", "\"topk_method\":\"greedy\"", ERR_CONFIG, "it can only be noaux_tc" },
    { "deepseek_v3", "\"scoring_func\":\"softmax\"", ERR_CONFIG, "it can only be sigmoid" },
    { "deepseek_v3", "\"moe_layer_freq\":2", ERR_CONFIG, "only each block of so many has experts" },
    { "deepseek_v2", "\"num_experts_per_tok\":6,\"topk_method\":\"group_limited_greedy\"", ERR_CONFIG,
      "'n_group' or 'topk_group' is missing" },
    { "deepseek_v2", "\"num_experts_per_tok\":6,\"norm_topk_prob\":true", ERR_CONFIG,
      "weights are divided by their sum" },
    { "deepseek_v2", "", ERR_CONFIG, "'num_experts_per_tok' (experts of a token) is missing" },
    { "gpt_oss", "\"swiglu_alpha\":1.5", ERR_CONFIG, "'swiglu_alpha' is 1.5" },
    { "qwen3", "\"layer_types\":[\"full_attention\"]", ERR_CONFIG, "not about as many blocks" },
    { "gpt_oss", "\"num_hidden_layers\":1,\"layer_types\":[\"linear_attention\"]", ERR_CONFIG, "'linear_attention'" },
    { "qwen3", "\"num_hidden_layers\":1,\"layer_types\":[\"sliding_attention\"]", ERR_CONFIG,
      "'sliding_window' says none" },
    { "qwen3_moe", "\"use_sliding_window\":true,\"max_window_layers\":2", ERR_CONFIG,
      "releases of transformers differ" },
    { "llama", "\"quantization_config\":{\"quant_method\":\"gptq\",\"bits\":4}", ERR_CONFIG,
      "'quant_method' is 'gptq'" },
    { "llama", "\"quantization_config\":{\"quant_method\":\"mxfp4\"}", ERR_CONFIG, "'quant_method' is 'mxfp4'" },
    { "llama", "\"quantization_config\":{\"quant_method\":\"fp8\"}", ERR_CONFIG, "'weight_block_size' is" },
    { "llama", "\"quantization_config\":{\"quant_method\":\"fp8\",\"fmt\":\"e5m2\",\"weight_block_size\":[1,1]}",
      ERR_CONFIG, "megatrain reads e4m3" },
    /* values that make no model of ours: the rule's words */
    { "llama", "\"vocab_size\":16777217", ERR_CONFIG, "megatrain has no such model: model.vocab" },
    { "llama", "\"num_key_value_heads\":5", ERR_CONFIG, "heads must be a multiple of kv_heads" },
    { "llama", "\"num_attention_heads\":33", ERR_CONFIG, "'num_attention_heads' does not divide the width" },
    { "llama", "\"num_hidden_layers\":1025", ERR_CONFIG, "more than 1024 blocks" },
    { "mixtral", "\"num_experts_per_tok\":9", ERR_CONFIG, "megatrain has no such model" },
    /* damage */
    { "llama", "\"hidden_size\":\"wide\"", ERR_CKPT, "'hidden_size' is 'wide', and should be an integer above 0" },
    { "llama", "\"hidden_size\":0", ERR_CKPT, "an integer above 0" },
    { "llama", "\"hidden_size\":2147483648", ERR_CKPT, "is 2147483648, and should be at most 2147483647" },
    { "llama", "\"hidden_size\":-4096", ERR_CKPT, "an integer above 0" },
    { "llama", "\"hidden_size\":4096.5", ERR_CKPT, "an integer above 0" },
    { "llama", "\"hidden_size\":1e400", ERR_CKPT, "config.json" },
    { "llama", "\"hidden_size\":null", ERR_CKPT, "should be given" },
    { "llama", "\"rms_norm_eps\":true", ERR_CKPT, "a number of 0 or more" },
    { "llama", "\"attention_bias\":1", ERR_CKPT, "true or false" },
    { "llama", "\"rope_scaling\":[1]", ERR_CKPT, "an object" },
    { "qwen3", "\"layer_types\":\"full_attention\"", ERR_CKPT, "a list of words" },
    { "qwen3_moe", "\"mlp_only_layers\":[1024]", ERR_CKPT, "a list of blocks" },
    { "qwen3_moe", "\"num_experts\":8,\"num_local_experts\":16", ERR_CKPT,
      "'num_experts' and 'num_local_experts' differ" },
    { "llama", "\"quantization_config\":{}", ERR_CKPT, "an object with 'quant_method'" },
    { "gemma3", "", ERR_CKPT, "'text_config' is missing" },
};

/* What asks for nothing is no mistake, whoever knows the key. */
TEST(asks_for_nothing)
{
    static const char *const members[] = { "\"alibi\":false", "\"alibi\":null", "\"alibi\":{}", "\"alibi\":[]",
                                           "\"_note\":8" };
    static const char *const asks[] = { "\"alibi\":true", "\"alibi\":0", "\"alibi\":\"\"", "\"alibi\":[0]" };
    HfConfig hf;
    for (size_t i = 0; i < sizeof members / sizeof *members; i++)
        CHECK_MSG(!parse(of_class("llama", members[i]), &hf), "%s: %s", members[i], err_message());
    for (size_t i = 0; i < sizeof asks / sizeof *asks; i++)
        CHECK_MSG(parse(of_class("llama", asks[i]), &hf) == ERR_CONFIG, "%s is taken", asks[i]);
}

TEST(unknown_keys_all_at_once)
{
    HfConfig hf;
    CHECK(parse(of_class("llama", "\"omega\":true,\"is_llama_config\":true,\"delta\":3,\"gamma\":0.5"), &hf) ==
          ERR_CONFIG);
    CHECK_MSG(strstr(err_message(), "'omega'") && strstr(err_message(), "'delta'") &&
                  strstr(err_message(), "'gamma'") && !strstr(err_message(), "is_llama_config"),
              "%s", err_message());
    OK(parse(of_class("gemma2", "\"sliding_window_size\":4096"), &hf));
    CHECK(parse(of_class("gemma2", "\"sliding_window_size\":512,\"sliding_window\":4096"), &hf) == ERR_CKPT);
}

static bool one_line(const char *text) { return *text && !strchr(text, '\n'); }

TEST(refused)
{
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        HfConfig hf;
        const Err err = parse(of_class(wrong[i].type, wrong[i].members), &hf);
        CHECK_MSG(err == wrong[i].err && one_line(err_message()) && strstr(err_message(), wrong[i].text),
                  "%s %s: %d %s", wrong[i].type, wrong[i].members, (int)err, err ? err_message() : hf.ini);
    }
}

/* Cut anywhere, a text is refused; with a byte changed it is refused or some model. */
TEST(damaged_text)
{
    for (int i = 0; i < MODELS; i++) {
        char *text = golden(models[i].name, "v5.json");
        const int64_t size = (int64_t)strlen(text);
        HfConfig hf;
        for (int64_t n = 0; n + 2 < size; n += i ? 37 : 1) {
            setup_release(&arena);
            setup_init(&arena);
            CHECK_MSG(hf_config_parse("config.json", text, n, &arena, &hf) == ERR_CKPT && one_line(err_message()),
                      "%s cut at %lld", models[i].name, (long long)n);
        }
        for (int64_t n = 0; n < size; n += i ? 41 : 1) {
            const char was = text[n];
            text[n] = (char)(was ^ 1 << n % 7);
            const Err err = parse(text, &hf);
            CHECK_MSG(!err || ((err == ERR_CKPT || err == ERR_CONFIG) && one_line(err_message())), "%s at %lld: %d",
                      models[i].name, (long long)n, (int)err);
            text[n] = was;
        }
        free(text);
    }
}

TEST(files)
{
    HfConfig hf;
    setup_release(&arena);
    setup_init(&arena);
    CHECK(hf_config_read(in_dir("nothing"), &arena, &hf) == ERR_CKPT && strstr(err_message(), "nothing/config.json"));
    OK(file_make_dirs(in_dir("list")));
    write_text("list/config.json", "[1, 2]");
    CHECK(hf_config_read(in_dir("list"), &arena, &hf) == ERR_CKPT && strstr(err_message(), "'model_type' is missing"));
    write_text("list/config.json", "{\"model_type\":\"llama\",\"vocab_size\":64}\n");
    OK(hf_config_read(in_dir("list"), &arena, &hf));
    CHECK(hf.kind == HF_LLAMA && strstr(hf.ini, "vocab = 64\n"));
}

/* The warning of a folder without the modules says who speaks of them. */
TEST(modules_that_are_not_there)
{
    static const struct {
        const char *config, *text;
    } cases[] = {
        { "{\"model_type\":\"glm4_moe\",\"head_dim\":128}", "that its class has where config.json says nothing" },
        { "{\"model_type\":\"glm4_moe\",\"head_dim\":128,\"num_nextn_predict_layers\":1}",
          "that its config.json speaks of" },
    };
    OK(file_make_dirs(in_dir("less")));
    write_bytes("less/model.safetensors", "\2\0\0\0\0\0\0\0{}", 10);
    for (int i = 0; i < 2; i++) {
        HfConfig hf;
        char *said;
        int64_t size;
        setup_release(&arena);
        setup_init(&arena);
        write_text("less/config.json", cases[i].config);
        fflush(stderr);
        const int kept = dup(2);
        CHECK(freopen(in_dir("said.txt"), "w", stderr));
        const Err err = hf_config_read(in_dir("less"), &arena, &hf);
        fflush(stderr);
        dup2(kept, 2);
        close(kept);
        OK(err);
        OK(file_read_all(in_dir("said.txt"), 1 << 16, &said, &size));
        CHECK_MSG(!strstr(hf.ini, "mtp_layers") && strstr(said, cases[i].text), "%s: %s", cases[i].config, said);
        free(said);
    }
}

/* ---- writing ---- */

/* A folder of this name, where MEGATRAIN_HF_OUT (test_hf_config.sh, for transformers to read) or the test has its
 * own. */
static const char *out_folder(const char *name)
{
    static char path[512];
    const char *out = getenv("MEGATRAIN_HF_OUT");
    snprintf(path, sizeof path, "%s/%s", out ? out : in_dir("out"), name);
    OK(file_make_dirs(path));
    return path;
}

/* The configuration, the class that is chosen for it, and what its folder reads back as. */
static void write_and_read(const char *name, const char *ini, HfClass want)
{
    const char *folder = out_folder(name);
    Config c, back;
    HfConfig hf;
    HfClass class;
    OK(config_read(&c, (ConfigSource){ .path = name, .text = ini }));
    Err err = hf_class_of(&c, &class);
    CHECK_MSG(!err && class == want, "%s: %s", name, err ? err_message() : hf_class_names(class)->model_type);
    OK(hf_config_write(&c, &plain, folder));
    setup_release(&arena);
    setup_init(&arena);
    OK(hf_config_read(folder, &arena, &hf));
    CHECK(hf.kind == want);
    OK(config_read(&back, (ConfigSource){ .path = name, .text = hf.ini }));
    for (int i = 0; i < CFG_COUNT; i++) {
        char x[CONFIG_VALUE_BYTES], y[CONFIG_VALUE_BYTES];
        const ConfigKey *key = config_key((ConfigId)i);
        if (strcmp(key->section, "model") != 0 && strcmp(key->section, "moe") != 0) continue;
        const char *was = config_value(&c, (ConfigId)i, x), *is = config_value(&back, (ConfigId)i, y);
        CHECK_MSG(strcmp(was, is) == 0, "%s: %s.%s was %s, is %s", name, key->section, key->name, was, is);
    }
    config_release(&back);
    config_release(&c);
}

TEST(published_models_written)
{
    for (int i = 0; i < MODELS; i++) {
        char *ini = golden(models[i].name, "ini");
        write_and_read(models[i].name, ini, models[i].written);
        free(ini);
    }
}

/* What the rules above read is written so that it reads back. */
TEST(rules_written)
{
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        char name[32];
        HfConfig hf;
        HfClass class;
        Config c;
        if (strstr(rules[i].lines, "; not")) continue;
        OK(parse(of_class(rules[i].type, rules[i].members), &hf));
        char *ini = strdup(hf.ini);
        OK(config_read(&c, (ConfigSource){ .path = "rule", .text = ini }));
        OK(hf_class_of(&c, &class));
        config_release(&c);
        snprintf(name, sizeof name, "rule%zu", i);
        write_and_read(name, ini, class);
        free(ini);
    }
}

/* Models of ours; "" for a class: none says it. */
static const struct {
    const char *keys, *type, *text;
} ours[] = {
    { "", "gpt2", NULL },
    { "model.tied=false model.dropout=0.1", "gpt2", NULL },
    { "model.arch=llama", "llama", NULL },
    { "model.arch=llama model.attention_bias=qkv", "qwen2", NULL },
    { "model.arch=llama model.qk_norm=true", "qwen3", NULL },
    { "model.arch=llama model.window=64", "mistral", NULL },
    { "model.arch=llama model.heads=10 model.head_dim=64", "mistral", NULL }, /* (as Llama's it is not opened) */
    { "model.arch=llama model.window=64,0 model.qk_norm=true", "qwen3", NULL },
    { "model.arch=llama model.rope_dim=48", "phi3", NULL },
    { "model.arch=llama model.residual_scale=0.22 model.logits_scale=0.3", "granite", NULL },
    { "model.arch=llama model.residual_scale=0.22 model.block_norms=post", NULL,
      "no class of transformers has a model" },
    { "model.arch=llama model.activation=relu2", "arcee", NULL },
    { "model.arch=llama model.activation=relu2 model.norm=layernorm", "jais2", NULL },
    { "model.arch=llama model.activation=relu2 model.norm=layernorm model.rope_dim=32", "nemotron", NULL },
    { "model.arch=llama model.activation=relu2 model.qk_norm=true", NULL, "no class of transformers has a model with" },
    { "model.arch=llama model.block_norms=post model.qk_norm=full", "olmo2", NULL },
    { "model.arch=llama model.block_norms=post", NULL, "no class of transformers has a model with" },
    { "model.arch=llama model.qk_norm=full", NULL, "no class of transformers has a model with" },
    { "model.arch=llama moe.experts=4", "mixtral", NULL },
    { "model.arch=llama moe.experts=4 moe.router=softmax_pre moe.normalize=true", "mixtral", NULL },
    { "model.arch=llama moe.experts=4 model.qk_norm=true", "qwen3_moe", NULL },
    { "model.arch=llama moe.experts=4 model.qk_norm=true moe.router=softmax_pre moe.every=3 moe.capacity=1.25",
      "qwen3_moe", NULL },
    { "model.arch=llama model.norm=layernorm model.block_norms=parallel", "stablelm", NULL },
    { "model.arch=gpt2 model.position=rope model.activation=gelu_erf model.block_norms=parallel_two model.tied=false",
      "gpt_neox", NULL },
    { "model.arch=gpt2 model.position=rope model.activation=gelu_erf model.block_norms=parallel model.bias=false "
      "model.kv_heads=2",
      "falcon", NULL },
    { "model.arch=llama model.block_norms=parallel", NULL, "model.block_norms = parallel" },
    { "model.arch=llama model.norm=layernorm model.norm_bias=false model.block_norms=parallel", "cohere", NULL },
    { "model.kv_heads=1", "gpt_bigcode", NULL },
    { "model.arch=llama model.attention_gate=true model.qk_norm=true model.block_norms=both model.window=64,0 "
      "model.rope_layers=1,0 moe.experts=4 moe.router=sigmoid moe.balance=bias",
      "afmoe", NULL },
    { "model.arch=llama model.attention=mla", NULL, "model.latent_norm_eps = 0 beside the other keys" },
    { "model.arch=llama model.attention=mla model.latent_norm_eps=1e-6", "deepseek_v2", NULL },
    { "model.arch=llama model.attention=mla model.norm_eps=1e-6 model.latent_norm_eps=1e-6 model.residual_scale=0.5 "
      "model.logits_scale=0.25 model.embed_scale=12",
      "minicpm3", NULL },
    { "model.arch=llama model.attention=mla model.norm_eps=1e-6 moe.experts=8 moe.router=sigmoid moe.balance=bias "
      "moe.every=1,0*11",
      "glm4_moe_lite", NULL },
    { "model.arch=llama model.attention=mla model.norm_eps=1e-6", "deepseek_v2", NULL },
    { "model.arch=llama model.attention=mla model.norm_eps=1e-6 moe.experts=8 moe.router=sigmoid moe.balance=bias "
      "moe.every=0,1*11",
      "deepseek_v3", NULL },
    { "model.arch=llama model.bias=true model.sinks=true model.activation=clamped_swiglu moe.experts=4", "gpt_oss",
      NULL },
    { "model.arch=llama model.bias=true model.sinks=true model.activation=clamped_swiglu moe.experts=4 "
      "model.activation_limit=5 model.window=32*2,0",
      "gpt_oss", NULL },
    { "model.arch=llama model.attention_gate=true", NULL, "model.attention_gate = true" },
    { "model.arch=llama model.norm=layernorm", "stablelm", NULL },
    { "model.arch=llama model.norm=layernorm model.rope_dim=16", "stablelm", NULL },
    { "model.arch=llama model.norm=layernorm model.qk_norm=true", NULL, "no class of transformers has a model with" },
    { "model.arch=gpt2 model.position=rope", "starcoder2", NULL },
    { "model.arch=llama model.rope_layers=1,0", "smollm3", NULL },
    { "model.arch=llama model.rope_layers=1,0 model.bias=true", "smollm3", NULL },
    { "model.arch=llama model.position=none", "smollm3", NULL },
    { "model.arch=llama model.attention_bias=qkv model.norm_eps=1e-4 model.bias=true", "seed_oss", NULL },
    { "model.arch=llama model.block_norms=post model.qk_norm=true model.window=64,0 model.rope_layers=1,0", "exaone4",
      NULL },
    { "model.arch=llama model.block_norms=post model.qk_norm=true", "exaone4", NULL },
    { "model.arch=llama model.block_norms=post model.qk_norm=true model.window=64,0", NULL,
      "no class of transformers has a model with" },
    { "model.arch=llama model.block_norms=post model.qk_norm=full model.window=64*3,0 model.rope_base=500000", "olmo3",
      NULL },
    { "model.arch=llama model.block_norms=post model.qk_norm=full model.window=64*3,0", NULL,
      "no class of transformers has a model with" },
    { "model.arch=llama moe.experts=4 model.qk_norm=full moe.router=softmax_pre", "olmoe", NULL },
    { "model.arch=llama moe.experts=4 model.qk_norm=full moe.router=sigmoid moe.balance=bias", "minimax_m2", NULL },
    { "model.arch=llama moe.experts=4 model.attention_bias=qkv moe.router=softmax_pre moe.shared_ffn=64 "
      "moe.shared_gate=true",
      "qwen2_moe", NULL },
    { "model.arch=llama moe.experts=4 moe.router=sigmoid moe.balance=bias", "glm4_moe", NULL },
    { "model.arch=llama moe.experts=4 moe.router=sigmoid moe.balance=bias model.attention_bias=all", NULL,
      "no class of transformers has a model with" },
    { "model.arch=llama moe.experts=4 moe.router=sigmoid moe.balance=bias model.qk_norm=true model.window=0,64*11",
      "dots1", NULL },
    { "model.arch=llama moe.experts=4 moe.router=sigmoid moe.balance=bias model.qk_norm=true moe.every=1*11,0", "hy_v3",
      NULL },
    { "model.arch=llama model.window=64,0", "ministral", NULL },
    { "model.arch=llama model.window=64,0 model.rope_layers=1,0", NULL, "no class of transformers has a model with" },
    { "model.arch=llama model.window=64,0 model.bias=true model.attention_bias=none", "cwm", NULL },
    { "model.arch=llama model.block_norms=post model.qk_norm=full moe.experts=4", "flex_olmo", NULL },
    { "model.arch=llama moe.experts=4 moe.router=sigmoid moe.balance=bias model.qk_norm=true model.window=64,0 "
      "model.rope_layers=1,0",
      "exaone_moe", NULL },
    { "model.arch=llama moe.experts=4 moe.shared_ffn=64", "granitemoeshared", NULL },
    { "model.arch=llama moe.experts=4 moe.shared_ffn=64 model.qk_norm=true", NULL,
      "no class of transformers has a model with" },
    { "model.arch=llama moe.experts=4 model.residual_scale=0.22", "granitemoe", NULL },
    { "model.arch=llama model.block_norms=both model.residual_scale=0.22 model.logits_scale=0.3", "hyperclovax", NULL },
    { "model.arch=llama model.activation=geglu model.embed_scale=27.712812921102035 model.window=64,0 model.tied=true",
      "vaultgemma", NULL },
    { "model.arch=llama model.mixer=kda*3,attention model.position=none model.attention=mla model.latent_norm_eps=1e-6 "
      "model.kda_heads=4 model.kda_head_dim=32 model.tied=false moe.experts=4 moe.router=sigmoid moe.balance=bias "
      "moe.shared_ffn=64 moe.ffn=32 moe.every=0,1*11",
      "kimi_linear", NULL },
    { "model.arch=llama model.mixer=kda model.kda_heads=4 model.kda_head_dim=32 model.position=none model.tied=false",
      "kimi_linear", NULL },
    { "model.arch=llama model.mixer=delta,attention model.block_norms=post model.state_norms=pre model.qk_norm=full "
      "model.delta_norm_eps=1e-5",
      "olmo_hybrid", NULL },
    { "model.arch=llama model.mixer=delta,attention model.block_norms=post model.state_norms=pre model.qk_norm=full "
      "model.delta_negative=true model.position=none",
      "olmo_hybrid", NULL },
    { "model.arch=llama model.mixer=delta,attention model.window=64 model.qk_norm=true moe.experts=4 moe.ffn=64 "
      "moe.shared_ffn=64",
      "lara_mini", NULL }, /* (in blocks without attention windows and rotary positions say nothing) */
    { "model.arch=llama model.mixer=delta,attention*2 model.window=0*2,64 model.rope_layers=0*2,1 model.qk_norm=true "
      "moe.experts=4 moe.ffn=64 moe.shared_ffn=64",
      "lara_mini", NULL },
    { "model.arch=llama model.mixer=delta,attention*2 model.window=0*2,64 model.rope_layers=0,1,1 model.qk_norm=true "
      "moe.experts=4 moe.ffn=64 moe.shared_ffn=64",
      NULL, "model.rope_layers = 0,1,1" },
    { "model.arch=llama model.mixer=delta,attention model.block_norms=post model.qk_norm=full", NULL,
      "model.state_norms = same" },
    { "model.arch=llama model.mixer=delta,attention model.block_norms=post model.state_norms=pre model.qk_norm=full "
      "model.delta_norm_eps=1e-3",
      NULL, "model.delta_norm_eps = 0.001" },
    { "model.arch=llama model.mixer=kda model.kda_heads=4 model.kda_head_dim=32 model.position=none model.kda_bound=-5",
      NULL, "model.kda_bound = -5" },
    { "model.arch=llama moe.experts=4 moe.router=sqrt_softplus", NULL, "moe.router = sqrt_softplus" },
    { "model.arch=gpt2 model.position=rope model.block_norms=parallel model.head_bias=true", "phi", NULL },
    { "model.arch=gpt2 model.position=rope model.block_norms=parallel model.head_bias=true model.attention_bias=none",
      "gptj", NULL },
    { "model.arch=llama model.head_bias=true", NULL, "model.head_bias = true beside the other keys" },
    { "model.arch=llama model.mtp_layers=1", NULL, "model.mtp_layers = 1" },
    { "model.arch=llama model.mixer=delta*3,attention", NULL, "the nearest, qwen3_5_text, would have" },
    { "model.arch=llama model.mixer=mamba2*3,attention model.norm=layernorm", NULL, "the nearest, granitemoehybrid," },
    { "model.arch=llama model.mixer=mamba2,delta", NULL, "model.mixer = mamba2,delta beside the other keys" },
};

TEST(classes_of_ours)
{
    for (size_t i = 0; i < sizeof ours / sizeof *ours; i++) {
        Config c;
        HfClass class = HF_CLASSES;
        OK(read_as(&c, NULL, ours[i].keys, 1));
        const Err err = hf_class_of(&c, &class);
        if (ours[i].type && !ours[i].text)
            CHECK_MSG(!err && !strcmp(hf_class_names(class)->model_type, ours[i].type), "%s: %s", ours[i].keys,
                      err ? err_message() : hf_class_names(class)->model_type);
        else
            CHECK_MSG(err == ERR_CONFIG && one_line(err_message()) &&
                          (strstr(err_message(), ours[i].text) || strstr(err_hint_text(), ours[i].text)),
                      "%s: %s %s", ours[i].keys, err ? err_message() : hf_class_names(class)->model_type,
                      err_hint_text());
        config_release(&c);
    }
}

TEST(what_is_written)
{
    const HfExport x = { .dtype = "bfloat16",
                         .vocab = 300,
                         .ids = { .begin = 256, .ends = { 257 }, .end_count = 1, .pad = -1 } };
    Config c;
    Json *j;
    OK(read_as(&c, NULL, "model.arch=llama model.rope_scaling=llama3 model.rope_factor=8 model.rope_original=64", 1));
    OK(file_make_dirs(in_dir("x")));
    OK(hf_config_write(&c, &x, in_dir("x")));
    OK(json_read_file(in_dir("x/config.json"), 1 << 20, &j));
    CHECK(json_int(json_get(j, "vocab_size"), 0) == 300 &&
          !strcmp(json_text(json_get(j, "torch_dtype"), NULL), "bfloat16"));
    CHECK(!strcmp(json_text(json_at(json_get(j, "architectures"), 0), NULL), "LlamaForCausalLM"));
    CHECK(json_int(json_get(j, "bos_token_id"), 0) == 256 && json_is_null(json_get(j, "pad_token_id")));
    const Json *rope = json_get(j, "rope_scaling");
    CHECK(json_count(rope) == 5 && json_number(json_get(rope, "high_freq_factor"), 0) == 4);
    CHECK(json_number(json_get(j, "rope_theta"), 0) == 10000 && !json_get(j, "rope_parameters"));
    json_free(j);
    OK(json_read_file(in_dir("x/generation_config.json"), 1 << 20, &j));
    CHECK(json_int(json_get(j, "eos_token_id"), 0) == 257 && !json_get(j, "pad_token_id"));
    json_free(j);
    CHECK(hf_config_write(&c, &x, in_dir("not there")) == ERR_STORAGE);
    config_release(&c);
}

/* eos_token_id as files have it, and the ids that are read of it. */
static const struct {
    const char *text;
    int count;
    int64_t last;
} ids[] = {
    { "{\"eos_token_id\": 7, \"bos_token_id\": 1, \"pad_token_id\": -1}", 1, 7 },
    { "{\"eos_token_id\": [1, 106], \"bos_token_id\": 1}", 2, 106 },
    { "{\"eos_token_id\": null, \"bos_token_id\": 1, \"text_config\": {\"eos_token_id\": [1, 9]}}", 2, 9 },
    { "{\"eos_token_id\": [3, null, -1, \"4\"], \"bos_token_id\": 1}", 1, 3 },
    { "{\"eos_token_id\": \"</s>\", \"bos_token_id\": 1}", 0, 0 },
    { "{\"bos_token_id\": 1}", 0, 0 },
};

TEST(ids_of_ends)
{
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
        HfIds x;
        OK(file_replace(in_dir("ids.json"), ids[i].text, (int64_t)strlen(ids[i].text)));
        OK(hf_ids_read(in_dir("ids.json"), &x));
        CHECK_MSG(x.begin == 1 && x.pad == -1 && x.end_count == ids[i].count, "%s: %d", ids[i].text, x.end_count);
        CHECK(!x.end_count || x.ends[x.end_count - 1] == ids[i].last);
        CHECK(hf_ids_end(&x, ids[i].last) == (x.end_count > 0) && !hf_ids_end(&x, -1));
        OK(hf_ids_write(&x, in_dir(".")));
        OK(hf_ids_read(in_dir("generation_config.json"), &x));
        CHECK_MSG(x.begin == 1 && x.end_count == ids[i].count, "written and read: %s", ids[i].text);
    }
}

TEST_MAIN
