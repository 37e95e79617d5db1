/*
 * boot/boot.c. Input: lines NAME=VALUE, the launcher's environment. What is accepted is within its bounds; told
 * again by the plain variables, it is understood the same.
 */
#include "fuzz.h"

#include "boot/boot.h"

static const char *value_in(void *context, const char *name)
{
    char *const *lines = context;
    size_t n = strlen(name);
    for (; *lines; lines++)
        if (!strncmp(*lines, name, n) && (*lines)[n] == '=') return *lines + n + 1;
    return NULL;
}

static void check_bounds(const Boot *b)
{
    FUZZ_CHECK(b->size >= 1 && b->rank >= 0 && b->rank < b->size, "rank %d of %d", b->rank, b->size);
    FUZZ_CHECK(b->local_size == -1 || (b->local_size >= 1 && b->local_size <= b->size), "%d here",
               b->local_size);
    FUZZ_CHECK(b->local_rank >= -1 && (b->local_size < 0 || b->local_rank < b->local_size),
               "local rank %d of %d", b->local_rank, b->local_size);
    FUZZ_CHECK(b->port >= 1 && b->port <= 65535, "port %d", b->port);
    FUZZ_CHECK(b->addr[0] && memchr(b->addr, 0, sizeof b->addr), "address '%.255s'", b->addr);
}

static void check_again(const Boot *b)
{
    char line[6][300], *lines[7] = { 0 };
    int n = 0;
    Boot again;
    snprintf(lines[n] = line[n], 300, "RANK=%d", b->rank), n++;
    snprintf(lines[n] = line[n], 300, "WORLD_SIZE=%d", b->size), n++;
    snprintf(lines[n] = line[n], 300, "MASTER_ADDR=%s", b->addr), n++;
    snprintf(lines[n] = line[n], 300, "MASTER_PORT=%d", b->port), n++;
    if (b->local_rank >= 0) snprintf(lines[n] = line[n], 300, "LOCAL_RANK=%d", b->local_rank), n++;
    if (b->local_size >= 0) snprintf(lines[n] = line[n], 300, "LOCAL_WORLD_SIZE=%d", b->local_size), n++;
    Err err = boot_read(&again, value_in, lines);
    FUZZ_CHECK(!err, "%s", err_message());
    FUZZ_CHECK(again.rank == b->rank && again.size == b->size && again.port == b->port &&
                   again.local_rank == b->local_rank && again.local_size == b->local_size &&
                   !strcmp(again.addr, b->addr),
               "rank %d/%d of %d/%d at %s:%d, then %d/%d of %d/%d at %s:%d", b->local_rank, b->rank,
               b->local_size, b->size, b->addr, b->port, again.local_rank, again.rank, again.local_size,
               again.size, again.addr, again.port);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    enum { LINES_MAX = 64 };
    char *text = fuzz_text(data, size), *lines[LINES_MAX + 1] = { 0 }, *at = text;
    for (int n = 0; n < LINES_MAX && at && *at; n++) lines[n] = strsep(&at, "\n");
    Boot b;
    fuzz_memory_start();
    Err err = boot_read(&b, value_in, lines);
    FUZZ_MEMORY_BOUND(0, 0, 0);
    fuzz_check_error(err, ERR_CONFIG, ERR_CONFIG, false);
    if (!err) {
        check_bounds(&b);
        check_again(&b);
    }
    free(text);
    return 0;
}
