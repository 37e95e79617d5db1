/* See input.h. zlib and libzstd do the work; both are fed from one buffer of the file's bytes. */
#include "data/input.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include "base/file.h"

enum { BUFFER_BYTES = 256 << 10 };

typedef enum { PLAIN, GZIP, ZSTD } Kind;

struct Input {
    const char *path;
    int fd;
    InputStat stat; /* what it was when it was opened */
    int64_t offset; /* where in the file the end of the buffer lies */
    char *buffer;
    int64_t at, filled; /* the next byte in the buffer, and its end */
    Kind kind;
    bool stream;  /* stdin: no place to go back to */
    bool inside;  /* a compressed member has not ended yet */
    char *peeked; /* text that was looked at and is still to be read: [peeked_at, peeked_size) */
    int64_t peeked_at, peeked_size;
    z_stream gzip;
    ZSTD_DStream *zstd;
};

static Err stat_fd(int fd, const char *path, InputStat *out)
{
    struct stat st;
    if (fstat(fd, &st) != 0) return err_set(ERR_DATA, "cannot stat '%s': %m", path);
    *out = (InputStat){ st.st_size, (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec };
    return ERR_OK;
}

bool input_is_stdin(const char *path) { return strcmp(path, "-") == 0; }

Err input_stat(const char *path, InputStat *out)
{
    int fd;
    int64_t size_bytes;
    *out = (InputStat){ 0 };
    if (input_is_stdin(path)) return ERR_OK;
    TRY_AS(ERR_DATA, file_open_regular(path, &fd, &size_bytes));
    Err err = stat_fd(fd, path, out);
    close(fd);
    return err;
}

InputStat input_opened(const Input *in) { return in->stat; }

bool input_stat_same(InputStat a, InputStat b) { return a.size_bytes == b.size_bytes && a.mtime_ns == b.mtime_ns; }

int64_t input_consumed(const Input *in) { return in->offset - (in->filled - in->at); }

static Err damaged(const Input *in, const char *what)
{
    err_set(ERR_DATA, "'%s' cannot be decompressed at byte %lld: %s", in->path, (long long)input_consumed(in), what);
    return err_hint("copy it again; %s tests it", in->kind == GZIP ? "gzip -t" : "zstd -t");
}

/* ---- the file's bytes ---- */

static Err check_unchanged(const Input *in)
{
    InputStat now;
    TRY(stat_fd(in->fd, in->path, &now));
    if (input_stat_same(now, in->stat) && in->offset == in->stat.size_bytes) return ERR_OK;
    err_set(ERR_DATA, "'%s' changed while it was read: %lld bytes, %lld when it was opened", in->path,
            (long long)now.size_bytes, (long long)in->stat.size_bytes);
    return err_hint("leave files alone while they are read, and start again");
}

static volatile sig_atomic_t interrupted;

void input_interrupt(void) { interrupted = 1; }

/* A terminal or a pipe may never give another byte, and the signal may come to any thread at any time: so the wait for
 * bytes is a short one, again and again. */
static Err read_stream(Input *in, char *out, int64_t room, int64_t *got)
{
    enum { WAIT_MS = 100 };
    for (*got = 0; *got < room;) {
        struct pollfd wait = { .fd = in->fd, .events = POLLIN };
        if (interrupted) return err_set(ERR_INTERRUPTED, "interrupted while stdin was read");
        if (poll(&wait, 1, WAIT_MS) <= 0) continue;
        const ssize_t n = read(in->fd, out + *got, (size_t)(room - *got));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return err_set(ERR_DATA, "cannot read stdin: %m");
        if (n == 0) return ERR_OK;
        *got += n;
        in->offset += n;
    }
    return ERR_OK;
}

static Err read_file(Input *in, char *out, int64_t room, int64_t *got)
{
    if (in->stream) return read_stream(in, out, room, got);
    TRY_AS(ERR_DATA, file_read_some(in->fd, in->path, in->offset, out, room, got));
    in->offset += *got;
    return *got < room ? check_unchanged(in) : ERR_OK;
}

/* Fills the buffer anew once it is used up; still empty then: the file has ended. */
static Err refill(Input *in)
{
    if (in->at < in->filled) return ERR_OK;
    in->at = 0;
    return read_file(in, in->buffer, BUFFER_BYTES, &in->filled);
}

/* ---- decompression: each takes from the buffer and gives up to *room bytes ---- */

static Err run_gzip(Input *in, char *out, int64_t room, int64_t *got)
{
    in->gzip.next_in = (Bytef *)in->buffer + in->at;
    in->gzip.avail_in = (uInt)(in->filled - in->at);
    in->gzip.next_out = (Bytef *)out;
    in->gzip.avail_out = (uInt)(room < BUFFER_BYTES ? room : BUFFER_BYTES);
    *got = in->gzip.avail_out;
    int status = inflate(&in->gzip, Z_NO_FLUSH);
    *got -= in->gzip.avail_out;
    in->at = in->filled - in->gzip.avail_in;
    in->inside = status != Z_STREAM_END;
    if (status == Z_MEM_ERROR) return err_set(ERR_MEMORY, "no memory for decompressing '%s'", in->path);
    if (status != Z_OK && status != Z_STREAM_END && status != Z_BUF_ERROR)
        return damaged(in, in->gzip.msg ? in->gzip.msg : "not a gzip member");
    if (!in->inside) inflateReset(&in->gzip);
    return ERR_OK;
}

static Err run_zstd(Input *in, char *out, int64_t room, int64_t *got)
{
    ZSTD_inBuffer from = { in->buffer, (size_t)in->filled, (size_t)in->at };
    ZSTD_outBuffer to = { out, (size_t)room, 0 };
    size_t status = ZSTD_decompressStream(in->zstd, &to, &from);
    in->at = (int64_t)from.pos;
    *got = (int64_t)to.pos;
    if (ZSTD_isError(status)) return damaged(in, ZSTD_getErrorName(status));
    in->inside = status != 0;
    return ERR_OK;
}

static Err read_compressed(Input *in, char *out, int64_t room, int64_t *got)
{
    for (*got = 0; *got < room;) {
        int64_t n;
        TRY(refill(in));
        bool ended = in->at == in->filled;
        if (ended && !in->inside) return ERR_OK;
        TRY(in->kind == GZIP ? run_gzip(in, out + *got, room - *got, &n) : run_zstd(in, out + *got, room - *got, &n));
        *got += n;
        if (ended && in->inside && n == 0) return damaged(in, "the file ends too early, it was cut short");
    }
    return ERR_OK;
}

/* ---- the text ---- */

static Err read_text(Input *in, char *out, int64_t room, int64_t *got)
{
    if (in->kind != PLAIN) return read_compressed(in, out, room, got);
    int64_t first = in->filled - in->at < room ? in->filled - in->at : room;
    memcpy(out, in->buffer + in->at, (size_t)first);
    in->at += first;
    *got = 0;
    if (first < room) TRY(read_file(in, out + first, room - first, got));
    *got += first;
    return ERR_OK;
}

Err input_read(Input *in, char *out, int64_t room, int64_t *got)
{
    int64_t waiting = in->peeked_size - in->peeked_at, more;
    if (waiting > room) waiting = room;
    if (waiting) memcpy(out, in->peeked + in->peeked_at, (size_t)waiting);
    in->peeked_at += waiting;
    *got = waiting;
    if (waiting == room) return ERR_OK;
    TRY(read_text(in, out + waiting, room - waiting, &more));
    *got += more;
    return ERR_OK;
}

Err input_peek(Input *in, const char **text, int64_t *size)
{
    ASSERT(!in->peeked);
    in->peeked = malloc(INPUT_PEEK_BYTES);
    if (!in->peeked) return err_set(ERR_MEMORY, "no memory for reading '%s'", in->path);
    TRY(read_text(in, in->peeked, INPUT_PEEK_BYTES, &in->peeked_size));
    *text = in->peeked;
    *size = in->peeked_size;
    return ERR_OK;
}

Err input_skip(Input *in, int64_t bytes)
{
    int64_t got;
    if (in->kind == PLAIN && bytes <= in->stat.size_bytes) {
        in->offset = bytes;
        in->at = in->filled = 0;
        in->peeked_at = in->peeked_size;
        return ERR_OK;
    }
    char *scratch = malloc(BUFFER_BYTES);
    Err err = scratch ? ERR_OK : err_set(ERR_MEMORY, "no memory for reading '%s'", in->path);
    for (; !err && bytes > 0; bytes -= got) {
        int64_t want = bytes < BUFFER_BYTES ? bytes : BUFFER_BYTES;
        err = input_read(in, scratch, want, &got);
        if (!err && got < want)
            err = err_set(ERR_DATA, "'%s' is %lld bytes shorter than it was", in->path, (long long)(bytes - got));
    }
    free(scratch);
    return err;
}

/* Frames of zstd begin with one magic number, those that hold no data with one of sixteen. */
static bool is_zstd(const uint8_t *b, int64_t n)
{
    if (n < 4) return false;
    return (b[0] == 0x28 && b[1] == 0xB5 && b[2] == 0x2F && b[3] == 0xFD) ||
           ((b[0] & 0xF0) == 0x50 && b[1] == 0x2A && b[2] == 0x4D && b[3] == 0x18);
}

static Kind kind_of(const uint8_t *b, int64_t n)
{
    if (n >= 2 && b[0] == 0x1F && b[1] == 0x8B) return GZIP;
    return is_zstd(b, n) ? ZSTD : PLAIN;
}

static Err choose_kind(Input *in)
{
    bool ready = true;
    in->kind = kind_of((const uint8_t *)in->buffer, in->filled);
    if (in->kind == GZIP) {
        ready = inflateInit2(&in->gzip, 15 + 16) == Z_OK; /* the largest window; gzip's header and checksum */
    } else if (in->kind == ZSTD) {
        in->zstd = ZSTD_createDStream();
        ready = in->zstd != NULL;
    }
    if (!ready) in->kind = PLAIN;
    return ready ? ERR_OK : err_set(ERR_MEMORY, "no memory for decompressing '%s'", in->path);
}

static Err begin(Input *in)
{
    int64_t size_bytes;
    in->buffer = malloc(BUFFER_BYTES);
    if (!in->buffer) return err_set(ERR_MEMORY, "no memory for reading '%s'", in->path);
    in->stream = input_is_stdin(in->path);
    if (in->stream) in->fd = STDIN_FILENO;
    else {
        TRY_AS(ERR_DATA, file_open_regular(in->path, &in->fd, &size_bytes));
        TRY(stat_fd(in->fd, in->path, &in->stat));
    }
    TRY(refill(in));
    return choose_kind(in);
}

Err input_open(const char *path, Input **out)
{
    Input *in = calloc(1, sizeof *in);
    if (!in) return err_set(ERR_MEMORY, "no memory for reading '%s'", path);
    in->path = path;
    in->fd = -1;
    Err err = begin(in);
    if (err) input_close(in);
    else *out = in;
    return err;
}

void input_close(Input *in)
{
    if (!in) return;
    if (in->kind == GZIP) inflateEnd(&in->gzip);
    ZSTD_freeDStream(in->zstd);
    if (in->fd >= 0 && !in->stream) close(in->fd);
    free(in->buffer);
    free(in->peeked);
    free(in);
}
