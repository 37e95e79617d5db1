/*
 * hf/config_read.c. Input: a config.json. What is accepted is sections that config_read takes; the class that says
 * them, if one does, is written, and reads back to the same model.
 */
#include "fuzz.h"

#include "hf/class.h"

/* What is in the class's folder, as sections. */
static char *written_sections(const Config *c, HfClass *class)
{
    const HfExport x = { .dtype = "float32", .vocab = 256, .ids = HF_NO_IDS };
    SetupArena arena;
    HfConfig hf;
    size_t size;
    const char *path = fuzz_path("config.json"), *slash = strrchr(path, '/');
    char folder[256];
    snprintf(folder, sizeof folder, "%.*s", (int)(slash - path), path);
    FUZZ_CHECK(!hf_config_write(c, &x, folder), "%s", err_message());
    char *text = fuzz_read("config.json", &size);
    setup_init(&arena);
    FUZZ_CHECK(!hf_config_parse("again", text, (int64_t)size, &arena, &hf), "%s: %s", err_message(), text);
    *class = hf.kind;
    char *ini = strdup(hf.ini);
    setup_release(&arena);
    free(text);
    return ini;
}

static void check_accepted(const HfConfig *hf)
{
    Config c, again;
    HfClass class, read;
    Err err = config_read(&c, (ConfigSource){ .path = "sections", .text = hf->ini });
    FUZZ_CHECK(!err, "%s:\n%s", err_message(), hf->ini);
    err = hf_class_of(&c, &class);
    fuzz_check_error(err, ERR_CONFIG, ERR_CONFIG, false);
    if (!err) {
        char *ini = written_sections(&c, &read);
        FUZZ_CHECK(read == class, "%s, then %s", hf_class_names(class)->model_type, hf_class_names(read)->model_type);
        FUZZ_CHECK(!config_read(&again, (ConfigSource){ .path = "again", .text = ini }), "%s:\n%s", err_message(), ini);
        FUZZ_CHECK(!hf_class_of(&again, &read) && read == class, "%s\nthen\n%s", hf->ini, ini);
        config_release(&again);
        free(ini);
    }
    config_release(&c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = fuzz_text(data, size);
    SetupArena arena;
    HfConfig hf;
    setup_init(&arena);
    fuzz_memory_start();
    Err err = hf_config_parse("config.json", text, (int64_t)strlen(text), &arena, &hf);
    FUZZ_MEMORY_BOUND(size, 4, FUZZ_JSON_BYTES + (1 << 20));
    fuzz_check_error(err, ERR_CKPT, ERR_CONFIG, false);
    if (!err) check_accepted(&hf);
    setup_release(&arena);
    free(text);
    return 0;
}
