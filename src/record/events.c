/*
 * See events.h. The messages, as far as they are written here (tensorflow/core/util/event.proto, summary.proto):
 *
 *   Event    1 wall_time double, 2 step int64, 3 file_version string, 5 summary Summary, 7 session_log SessionLog
 *   Summary  1 value, repeated Value          SessionLog  1 status enum, START = 1
 *   Value    1 tag string, 2 simple_value float, or, of a text, 8 tensor TensorProto, 9 metadata SummaryMetadata
 *   TensorProto  1 dtype enum, DT_STRING = 7, 2 tensor_shape, none: a single one, 8 string_val bytes
 *   SummaryMetadata  1 plugin_data, of which 1 plugin_name string
 *
 * A record: length u64, mask(crc32c(the length's 8 bytes)) u32, the message, mask(crc32c(message)) u32, little-endian;
 * mask(c) = (c rotated right by 15) + 0xa282ead8.
 */
#include "record/events.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/map.h"
#include "base/run_files.h"

static const char prefix[] = RUN_EVENTS, suffix[] = ".megatrain";

enum { HEAD_BYTES = 12, TAIL_BYTES = 4, MESSAGE_MAX_BYTES = EVENT_BYTES - HEAD_BYTES - TAIL_BYTES };
enum { WIRE_VARINT, WIRE_FIXED64, WIRE_BYTES, WIRE_FIXED32 = 5 };

/* ---- writing ---- */

typedef struct {
    char *at, *end;
} Out;

static void put(Out *o, const void *data, size_t n)
{
    ASSERT((size_t)(o->end - o->at) >= n);
    memcpy(o->at, data, n);
    o->at += n;
}

static void put_varint(Out *o, uint64_t x)
{
    for (; x >= 0x80; x >>= 7) put(o, &(uint8_t){ (uint8_t)(x | 0x80) }, 1);
    put(o, &(uint8_t){ (uint8_t)x }, 1);
}

static void put_key(Out *o, int field, int wire) { put_varint(o, (uint64_t)(field << 3 | wire)); }

static void put_bytes(Out *o, int field, const void *data, size_t n)
{
    put_key(o, field, WIRE_BYTES);
    put_varint(o, n);
    put(o, data, n);
}

static void put_value(Out *o, const char *tag, float value)
{
    char text[EVENT_TAG_BYTES + 8];
    Out v = { text, text + sizeof text };
    put_bytes(&v, 1, tag, strlen(tag));
    put_key(&v, 2, WIRE_FIXED32);
    put(&v, &value, sizeof value);
    put_bytes(o, 1, text, (size_t)(v.at - text));
}

static void put_message(Out *o, const EventRecord *e)
{
    char text[MESSAGE_MAX_BYTES];
    Out summary = { text, text + sizeof text };
    put_key(o, 1, WIRE_FIXED64);
    put(o, &e->wall_s, sizeof e->wall_s);
    if (e->step) {
        put_key(o, 2, WIRE_VARINT);
        put_varint(o, (uint64_t)e->step);
    }
    if (e->kind == EVENT_VERSION) put_bytes(o, 3, "brain.Event:2", 13);
    if (e->kind == EVENT_START) put_bytes(o, 7, (const char[]){ 1 << 3 | WIRE_VARINT, 1 }, 2);
    for (int i = 0; i < e->count; i++) put_value(&summary, e->scalar[i].tag, e->scalar[i].value);
    if (e->count) put_bytes(o, 5, text, (size_t)(summary.at - text));
}

static uint32_t masked_crc(const void *data, size_t n)
{
    const uint32_t c = crc32c(0, data, n);
    return (c >> 15 | c << 17) + 0xa282ead8u;
}

/* Behind a message that begins at buf + HEAD_BYTES and ends at o->at; bytes of the whole record. */
static int64_t frame(Out *o, char *buf)
{
    const uint64_t size = (uint64_t)(o->at - buf - HEAD_BYTES);
    const uint32_t crc = masked_crc(buf + HEAD_BYTES, size);
    Out head = { buf, buf + HEAD_BYTES };
    put(&head, &size, sizeof size);
    put(&head, &(uint32_t){ masked_crc(&size, sizeof size) }, sizeof crc);
    o->end += TAIL_BYTES;
    put(o, &crc, sizeof crc);
    return o->at - buf;
}

int64_t event_encode(const EventRecord *e, char buf[EVENT_BYTES])
{
    Out o = { buf + HEAD_BYTES, buf + EVENT_BYTES - TAIL_BYTES };
    put_message(&o, e);
    return frame(&o, buf);
}

/* ---- a text ---- */

static void put_varint_field(Out *o, int field, uint64_t x)
{
    put_key(o, field, WIRE_VARINT);
    put_varint(o, x);
}

static int varint_bytes(uint64_t x)
{
    int n = 1;
    for (; x >= 0x80; x >>= 7) n++;
    return n;
}

/* The bytes of a field of n bytes with its key, which is below 16, and its length. */
static size_t field_bytes(size_t n) { return 1 + (size_t)varint_bytes(n) + n; }

static void put_head(Out *o, int field, size_t n)
{
    put_key(o, field, WIRE_BYTES);
    put_varint(o, n);
}

int64_t event_text_bytes(size_t tag_bytes, size_t text_bytes)
{
    return (int64_t)(HEAD_BYTES + TAIL_BYTES + 128 + tag_bytes + text_bytes);
}

int64_t event_encode_text(double wall_s, int64_t step, const char *tag, const char *text, char *buf)
{
    static const char metadata[] = "\x0a\x06\x0a\x04text"; /* plugin_data: plugin_name */
    const size_t tag_bytes = strlen(tag), text_bytes = strlen(text);
    const size_t tensor = 2 + field_bytes(0) + field_bytes(text_bytes);
    const size_t value = field_bytes(tag_bytes) + field_bytes(tensor) + field_bytes(sizeof metadata - 1);
    Out o = { buf + HEAD_BYTES, buf + event_text_bytes(tag_bytes, text_bytes) - TAIL_BYTES };
    put_key(&o, 1, WIRE_FIXED64);
    put(&o, &wall_s, sizeof wall_s);
    put_varint_field(&o, 2, (uint64_t)step);
    put_head(&o, 5, field_bytes(value));
    put_head(&o, 1, value);
    put_bytes(&o, 1, tag, tag_bytes);
    put_head(&o, 8, tensor);
    put_varint_field(&o, 1, 7);
    put_head(&o, 2, 0);
    put_bytes(&o, 8, text, text_bytes);
    put_bytes(&o, 9, metadata, sizeof metadata - 1);
    return frame(&o, buf);
}

static Err write_event(Events *e, EventRecord *event)
{
    char buf[EVENT_BYTES];
    event->wall_s = clock_unix_s();
    return file_write_or_undo(&e->file, buf, event_encode(event, buf));
}

static void add_scalar(EventRecord *e, const char *tag, double value)
{
    snprintf(e->scalar[e->count].tag, EVENT_TAG_BYTES, "%s", tag);
    e->scalar[e->count++].value = (float)value;
}

Err events_step(Events *e, const MetricsRecord *r)
{
    EventRecord event = { .kind = EVENT_SCALARS, .step = r->step };
    for (int i = 0; i < RECORD_FIELDS; i++)
        if (record_tag(i)) add_scalar(&event, record_tag(i), record_value(r, i));
    return write_event(e, &event);
}

/* Makes a code block of Markdown, each line indented: TensorBoard shows texts as Markdown. */
static Err indented(const char *text, char **out)
{
    size_t size = 0;
    FILE *f = open_memstream(out, &size);
    if (!f) return err_set(ERR_MEMORY, "no memory for a text of an event file");
    for (const char *end; *text; text = end) {
        end = strchrnul(text, '\n');
        end += *end != 0;
        fprintf(f, "    %.*s", (int)(end - text), text);
    }
    return fclose(f) ? err_set(ERR_MEMORY, "no memory for a text of an event file") : ERR_OK;
}

Err events_config(Events *e, int64_t step, const char *text)
{
    static const char tag[] = "config/text_summary";
    char *shown = NULL;
    TRY(indented(text, &shown));
    char *buf = malloc((size_t)event_text_bytes(strlen(tag), strlen(shown)));
    Err err = buf ? file_write_or_undo(&e->file, buf, event_encode_text(clock_unix_s(), step, tag, shown, buf))
                  : err_set(ERR_MEMORY, "no memory for a text of an event file");
    free(buf);
    free(shown);
    return err;
}

Err events_ranks(Events *e, const MetricsRecord *r)
{
    EventRecord event = { .kind = EVENT_SCALARS, .step = r->step };
    add_scalar(&event, "ranks/slowest", r->ranks.slowest);
    add_scalar(&event, "ranks/lag_ms", r->ranks.lag_ms);
    return write_event(e, &event);
}

/* Figures of what balances routers. */
static Err events_balance(Events *e, const MetricsRecord *r)
{
    EventRecord event = { .kind = EVENT_SCALARS, .step = r->step };
    if (r->aux_loss) add_scalar(&event, "loss/aux", *r->aux_loss);
    if (r->z_loss) add_scalar(&event, "loss/z", *r->z_loss);
    return event.count ? write_event(e, &event) : ERR_OK;
}

Err events_load(Events *e, const MetricsRecord *r)
{
    TRY(events_balance(e, r));
    for (int i = 0; i < r->layers; i++) {
        EventRecord event = { .kind = EVENT_SCALARS, .step = r->step };
        char tag[EVENT_TAG_BYTES];
        if (!(r->load[i] > 0)) continue;
        snprintf(tag, sizeof tag, "expert_load/layer %d", i);
        add_scalar(&event, tag, r->load[i]);
        if (r->dropped) {
            snprintf(tag, sizeof tag, "expert_dropped/layer %d", i);
            add_scalar(&event, tag, (double)r->dropped[i]);
        }
        TRY(write_event(e, &event));
    }
    return ERR_OK;
}

Err events_mtp(Events *e, const MetricsRecord *r)
{
    EventRecord event = { .kind = EVENT_SCALARS, .step = r->step };
    for (int i = 0; i < r->mtp; i++) {
        char tag[EVENT_TAG_BYTES];
        snprintf(tag, sizeof tag, "loss/mtp %d", i + 1);
        add_scalar(&event, tag, r->mtp_loss[i]);
    }
    return write_event(e, &event);
}

Err events_logits(Events *e, const MetricsRecord *r)
{
    EventRecord all = { .kind = EVENT_SCALARS, .step = r->step };
    add_scalar(&all, "attention/max_logit", r->logits.most);
    TRY(write_event(e, &all));
    for (int i = 0; i < r->layers; i++) {
        EventRecord event = { .kind = EVENT_SCALARS, .step = r->step };
        char tag[EVENT_TAG_BYTES];
        snprintf(tag, sizeof tag, "max_attention_logit/layer %d", i);
        add_scalar(&event, tag, r->logits.by_layer[i]);
        TRY(write_event(e, &event));
    }
    return ERR_OK;
}

Err events_valid(Events *e, int64_t step, const char *name, double loss)
{
    EventRecord event = { .kind = EVENT_SCALARS, .step = step };
    char tag[EVENT_TAG_BYTES] = "loss/valid";
    if (*name) snprintf(tag, sizeof tag, "valid/%s", name);
    add_scalar(&event, tag, loss);
    return write_event(e, &event);
}

/* ---- the files of a folder ---- */

static bool is_ours(const char *name)
{
    const size_t n = strlen(name), tail = strlen(suffix);
    return n > strlen(prefix) + tail && strncmp(name, prefix, strlen(prefix)) == 0 &&
           strcmp(name + n - tail, suffix) == 0;
}

/* Does f for each of our files. The folder changes under it only by removal of the file at hand. */
static Err each_file(const char *run_dir, Err (*f)(const char *path, const char *name, int64_t *arg), int64_t *arg)
{
    char path[PATH_MAX];
    DIR *d = opendir(run_dir);
    if (!d) return err_set(ERR_IO, "cannot open folder '%s': %m", run_dir);
    Err err = ERR_OK;
    for (struct dirent *entry; !err && (entry = readdir(d));) {
        if (!is_ours(entry->d_name)) continue;
        if (snprintf(path, sizeof path, "%s/%s", run_dir, entry->d_name) >= (int)sizeof path)
            err = err_set(ERR_IO, "path is too long: '%s/%s'", run_dir, entry->d_name);
        else err = f(path, entry->d_name, arg);
    }
    closedir(d);
    return err;
}

static Err newest_time(const char *path, const char *name, int64_t *newest)
{
    (void)path;
    const int64_t seconds = strtoll(name + strlen(prefix), NULL, 10);
    if (seconds > *newest && seconds < INT64_MAX) *newest = seconds;
    return ERR_OK;
}

/* Readers go through files by name: a clock that went back must not put this one before an older one. */
static Err name_file(const char *run_dir, char path[PATH_MAX])
{
    char host[65] = "unknown-host";
    int64_t newest = 0, now = time(NULL);
    TRY(each_file(run_dir, newest_time, &newest));
    gethostname(host, sizeof host - 1);
    if (now <= newest) now = newest + 1;
    int n =
        snprintf(path, PATH_MAX, "%s/%s%010lld.%s.%d%s", run_dir, prefix, (long long)now, host, (int)getpid(), suffix);
    return n < PATH_MAX ? ERR_OK : err_set(ERR_IO, "path is too long: '%s'", run_dir);
}

Err events_open(Events *e, const char *run_dir, int64_t first_step)
{
    char path[PATH_MAX];
    EventRecord version = { .kind = EVENT_VERSION }, start = { .kind = EVENT_START, .step = first_step };
    TRY(name_file(run_dir, path));
    TRY(file_create(path, &e->file));
    Err err = write_event(e, &version);
    if (!err) err = write_event(e, &start);
    if (err) file_abandon(&e->file);
    return err;
}

/* ---- cutting back ---- */

static bool get_varint(const uint8_t **at, const uint8_t *end, uint64_t *out)
{
    *out = 0;
    for (int shift = 0; *at < end && shift < 64; shift += 7) {
        const uint8_t byte = *(*at)++;
        *out |= (uint64_t)(byte & 0x7F) << shift;
        if (byte < 0x80) return true;
    }
    return false;
}

/* Step and kind of a message; false when it is none. */
static bool read_message(const uint8_t *at, const uint8_t *end, int64_t *step, bool *has_summary)
{
    uint64_t key, x = 0;
    *step = 0;
    *has_summary = false;
    while (at < end) {
        if (!get_varint(&at, end, &key)) return false;
        const int wire = key & 7;
        uint64_t skip = wire == WIRE_FIXED64 ? 8 : wire == WIRE_FIXED32 ? 4 : 0;
        if (wire == WIRE_VARINT || wire == WIRE_BYTES) {
            if (!get_varint(&at, end, &x)) return false;
            if (wire == WIRE_BYTES) skip = x;
        } else if (!skip) return false;
        if (key == (2 << 3 | WIRE_VARINT)) *step = (int64_t)x;
        if (key == (5 << 3 | WIRE_BYTES)) *has_summary = true;
        if (skip > (uint64_t)(end - at)) return false;
        at += skip;
    }
    return true;
}

/* Size of the whole record at `at`, 0 if there is none. */
static int64_t read_record(const uint8_t *at, int64_t room, int64_t *step, bool *has_summary)
{
    uint64_t size;
    uint32_t head_crc, crc;
    if (room < HEAD_BYTES + TAIL_BYTES) return 0;
    memcpy(&size, at, 8);
    memcpy(&head_crc, at + 8, 4);
    if (masked_crc(at, 8) != head_crc || size > (uint64_t)(room - HEAD_BYTES - TAIL_BYTES)) return 0;
    memcpy(&crc, at + HEAD_BYTES + size, 4);
    if (masked_crc(at + HEAD_BYTES, size) != crc) return 0;
    if (!read_message(at + HEAD_BYTES, at + HEAD_BYTES + size, step, has_summary)) return 0;
    return (int64_t)size + HEAD_BYTES + TAIL_BYTES;
}

static Err cut_file(const char *path, const char *name, int64_t *last_step)
{
    FileMap map;
    int64_t keep = 0, step, n;
    bool values = false, later = false, summary;
    (void)name;
    TRY(file_map(path, &map));
    const int64_t size = map.size_bytes;
    while (keep < size) {
        n = read_record((const uint8_t *)map.data + keep, size - keep, &step, &summary);
        later = n > 0 && step > *last_step;
        if (n == 0 || later) break;
        values |= summary;
        keep += n;
    }
    Err err = map_intact(&map);
    file_unmap(&map);
    TRY(err);
    if (!later && size - keep > EVENT_BYTES) /* more than a record that a kill tore */
        log_warn("'%s': damaged behind %lld bytes, the rest is dropped", path, (long long)keep);
    if (!values) return file_remove_tree(path);
    return keep < size ? file_cut(path, keep) : ERR_OK;
}

Err events_cut(const char *run_dir, int64_t last_step) { return each_file(run_dir, cut_file, &last_step); }
