/*
 * boot/secret.c: the file in which ranks find their secret. A byte of flags (1: rank 0 looks, which makes the file anew
 * where it is torn; 2 and 4: mode 600, 400, 640 or 604; 8 and 16: a plain file, a folder, a FIFO or a link), then the
 * file's bytes. A rank takes nothing but 64 hexadecimal digits of a plain file that nobody else may read; rank 1 takes
 * just those, and rank 0 leaves a file that rank 1 then takes.
 */
#include "fuzz.h"

#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "boot/secret.h"

enum { DIGITS = 64 };

static bool is_secret(const char *text) { return strspn(text, "0123456789abcdef") == DIGITS; }

static void make(const char *path, int kind, mode_t mode, const uint8_t *data, size_t size)
{
    FILE *f;
    if (kind == 1) mkdir(path, 0700);
    if (kind == 2) mkfifo(path, mode);
    if (kind == 3 && symlink("elsewhere", path)) abort();
    if (kind) return;
    if (!(f = fopen(path, "wb")) || (size && fwrite(data, 1, size, f) != size)) abort();
    if (fclose(f) || chmod(path, mode)) abort();
}

static Err find(int rank, const char *folder, Boot *b)
{
    static const volatile sig_atomic_t stop = 1; /* nobody waits */
    *b = (Boot){ .launcher = "none", .size = 2, .rank = rank, .job = "job", .stop = &stop };
    return secret_find(b, folder, 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const mode_t modes[] = { 0600, 0400, 0640, 0604 };
    char folder[256], path[300], digits[DIGITS + 1] = "";
    Boot b = { .job = "job" }, other;
    if (!size) return 0;
    const int flags = data[0], kind = flags >> 3 & 3;
    const mode_t mode = modes[flags >> 1 & 3];
    snprintf(folder, sizeof folder, "%s", fuzz_path("run"));
    snprintf(path, sizeof path, "%s/.secret-%016llx", folder, (unsigned long long)boot_key(&b));
    if (file_make_dirs(folder)) abort();
    make(path, kind, mode, data + 1, size - 1);
    memcpy(digits, data + 1, size - 1 < DIGITS ? size - 1 : DIGITS);
    fuzz_memory_start();
    const Err err = find(!(flags & 1), folder, &b);
    FUZZ_MEMORY_BOUND(size, 4, 4096);
    fuzz_check_error(err, ERR_STORAGE, ERR_RENDEZVOUS, false);
    const bool good = kind == 0 && !(mode & 077);
    FUZZ_CHECK(!err || !*b.secret, "an error, and a secret");
    FUZZ_CHECK(err || (good && is_secret(b.secret)), "'%s'", b.secret);
    if (b.rank == 1) FUZZ_CHECK(!err == (good && is_secret(digits)), "%s", err_message());
    if (!err && is_secret(digits)) FUZZ_CHECK(!strcmp(b.secret, digits), "'%s'", b.secret);
    if (!err) FUZZ_CHECK(!find(1, folder, &other) && !strcmp(other.secret, b.secret), "rank 1: %s", err_message());
    file_remove_tree(folder);
    return 0;
}
