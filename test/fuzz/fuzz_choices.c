/*
 * cuda/gemm_choices.c: the file of timed algorithms in a run's folder. Input: its text, behind the first line, which is
 * right. What is accepted, saved and loaded again is the same; what is refused leaves the choices as they were.
 */
#include "../../cuda/gemm_choices.c"
#include "fuzz.h"

static CudaGemm *gemm_new(void)
{
    CudaGemm *g = calloc(1, sizeof *g);
    if (!g) abort();
    snprintf(g->made_for, sizeof g->made_for, "cublasLt 130100, a GPU");
    return g;
}

static void check_again(const CudaGemm *g)
{
    char *text = malloc(CUDA_GEMM_TEXT_BYTES);
    CudaGemm *again = gemm_new();
    if (!text) abort();
    int64_t size = cuda_gemm_save(g, text);
    FUZZ_CHECK(size < CUDA_GEMM_TEXT_BYTES && text[size] == 0, "%lld bytes of text", (long long)size);
    Err err = cuda_gemm_load(again, text);
    FUZZ_CHECK(!err, "%s: %s", err_message(), text);
    FUZZ_CHECK(again->choice_count == g->choice_count &&
                   !memcmp(again->choices, g->choices, (size_t)g->choice_count * sizeof *g->choices),
               "other choices: %s", text);
    free(again);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    CudaGemm *g = gemm_new();
    size_t head = strlen(g->made_for) + 1;
    char *text = malloc(head + size + 1);
    if (!text) abort();
    sprintf(text, "%s\n", g->made_for);
    memcpy(text + head, data, size);
    text[head + size] = 0;
    fuzz_memory_start();
    Err err = cuda_gemm_load(g, text);
    FUZZ_MEMORY_BOUND(0, 0, sizeof g->choices + 64);
    fuzz_check_error(err, ERR_CONFIG, ERR_CONFIG, false);
    FUZZ_CHECK(!err || g->choice_count == 0, "half of the choices were taken");
    if (!err) check_again(g);
    free(text);
    free(g);
    return 0;
}
