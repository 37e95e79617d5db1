/* See supervised.h. */
#include "boot/supervised.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* "PAGE CONFIG BYTES": two descriptors, and how long the text is */
#define VARIABLE "MEGATRAIN_LAUNCHER_WORKER"

void supervised_cause(Supervised *s, const char *text)
{
    if (s) snprintf(s->cause, sizeof s->cause, "%s", text);
}

static Err no_memory(void)
{
    return err_set(ERR_MEMORY, "no memory for what a worker shares with its supervisor: %s", strerror(errno));
}

static Supervised *map(int fd)
{
    void *at = mmap(NULL, sizeof(Supervised), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return at == MAP_FAILED ? NULL : at;
}

Err supervised_make(const char *config, Supervised **out)
{
    char value[64];
    const size_t bytes = strlen(config);
    const int page = memfd_create("supervised", 0), text = memfd_create("config", 0); /* (workers inherit them) */
    if (page < 0 || text < 0 || ftruncate(page, sizeof **out)) return no_memory();
    if (write(text, config, bytes) != (ssize_t)bytes || !(*out = map(page))) return no_memory();
    snprintf(value, sizeof value, "%d %d %zu", page, text, bytes);
    return setenv(VARIABLE, value, 1) ? no_memory() : ERR_OK;
}

Err supervised_find(Boot *boot, char **config)
{
    int page, text;
    size_t bytes;
    const char *value = getenv(VARIABLE);
    *config = NULL;
    if (!value || sscanf(value, "%d %d %zu", &page, &text, &bytes) != 3) return ERR_OK;
    unsetenv(VARIABLE); /* what this process starts is no worker */
    *config = calloc(1, bytes + 1);
    boot->supervised = map(page);
    if (!*config || !boot->supervised || pread(text, *config, bytes, 0) != (ssize_t)bytes) return no_memory();
    close(page);
    close(text);
    boot->attempt = boot->supervised->attempt;
    return ERR_OK;
}
