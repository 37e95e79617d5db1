/* See identity.h. */
#include "base/identity.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/map.h"
#include "base/plain.h"
#include "base/version.h"

static char commit[80] = "unknown", program[160];
static pthread_once_t made = PTHREAD_ONCE_INIT;

void identity_begin(const char *text)
{
    const int n = (int)strcspn(text, "+");
    if (n) snprintf(commit, sizeof commit, "%.*s%s", n < 40 ? n : 40, text, text[n] ? " with changes" : "");
}

const char *identity_commit(void) { return commit; }

Err identity_binary(uint32_t *crc)
{
    FileMap binary;
    TRY(file_map("/proc/self/exe", &binary));
    *crc = crc32c(0, binary.data, (size_t)binary.size_bytes);
    file_unmap(&binary);
    return ERR_OK;
}

static void make_program(void)
{
    uint32_t crc;
    char binary[16] = "unknown";
    ErrKept before;
    err_keep(&before); /* where there is no /proc that is no failure */
    if (!identity_binary(&crc)) snprintf(binary, sizeof binary, "%08x", crc);
    err_again(&before, ERR_IO);
    snprintf(program, sizeof program, "%s, commit %s, binary %s", MEGATRAIN_VERSION, commit, binary);
}

const char *identity_program(void)
{
    pthread_once(&made, make_program);
    return program;
}

void identity_machine(char out[IDENTITY_MACHINE_BYTES])
{
    static const char key[] = "model name";
    char host[64] = "unknown", line[160], processor[160] = "an unknown processor";
    if (gethostname(host, sizeof host - 1)) strcpy(host, "unknown");
    FILE *f = fopen("/proc/cpuinfo", "re");
    while (f && fgets(line, sizeof line, f)) {
        if (strncmp(line, key, sizeof key - 1)) continue;
        const char *at = line + sizeof key - 1;
        at += strspn(at, " \t:");
        snprintf(processor, sizeof processor, "%.*s", (int)strcspn(at, "\n"), at);
        break;
    }
    if (f) fclose(f);
    snprintf(out, IDENTITY_MACHINE_BYTES, "host '%s', %s", host, processor);
    plain_make(out, PLAIN_LINE);
}

bool identity_boot(char out[IDENTITY_BOOT_BYTES])
{
    *out = 0;
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (!f) return false;
    if (!fgets(out, IDENTITY_BOOT_BYTES, f)) *out = 0;
    fclose(f);
    return *out;
}
