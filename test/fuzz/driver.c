/*
 * Runs a target on files: those named, or all of test/fuzz/seeds/NAME, where the program is called fuzz_NAME. Each
 * is a case that passes unless the program ends; one that takes longer than CASE_S ends it. Stands in for libFuzzer's
 * main in builds without it.
 */
#include "fuzz.h"

#include <dirent.h>
#include <unistd.h>

#include "base/file.h"

enum { CASE_S = 30 };

static int run_file(const char *path)
{
    char *text;
    int64_t bytes;
    if (file_read_all(path, 1 << 24, &text, &bytes)) {
        fprintf(stderr, "%s\n", err_message());
        return 1;
    }
    /* a copy of exactly the input's size: reading beyond its end is then seen */
    uint8_t *exact = malloc(bytes ? (size_t)bytes : 1);
    if (!exact) abort();
    memcpy(exact, text, (size_t)bytes);
    free(text);
    fprintf(stderr, "%s\n", path); /* the last one named is the one that failed */
    alarm(CASE_S);
    LLVMFuzzerTestOneInput(exact, (size_t)bytes);
    alarm(0);
    free(exact);
    return 0;
}

int main(int argc, char **argv)
{
    int passed = 0, failed = 0;
    for (int i = 1; i < argc; i++) run_file(argv[i]) ? failed++ : passed++;
    if (argc == 1) {
        const char *name = strrchr(argv[0], '/');
        char dir[256], path[PATH_MAX];
        snprintf(dir, sizeof dir, "test/fuzz/seeds/%.200s", (name ? name + 1 : argv[0]) + strlen("fuzz_"));
        struct dirent **entries;
        int n = scandir(dir, &entries, NULL, alphasort);
        for (int i = 0; i < n; i++) {
            snprintf(path, sizeof path, "%s/%s", dir, entries[i]->d_name);
            if (entries[i]->d_name[0] != '.') run_file(path) ? failed++ : passed++;
            free(entries[i]);
        }
        if (n >= 0) free(entries);
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed || !passed;
}
