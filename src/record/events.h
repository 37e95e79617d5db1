/*
 * Event files of TensorBoard: run.dir/events.out.tfevents.SECONDS.HOST.PID.megatrain, a new one each time a run starts.
 *
 *   events_cut -> events_open -> events_step, events_valid ... -> file_sync_close(&e->file)
 *
 * A file is a row of records, each framed by its length and masked CRC32Cs; a record is one protobuf message `Event`:
 * first the version, then a session's start, the configuration, then one message a step with all its scalars.
 *
 * A resumed run shows no point twice and none of steps that were undone: events_cut takes what is later than the
 * checkpoint off the files, for every reader of them; and a session's start tells a TensorBoard that is watching and
 * has read those points already to forget them.
 */
#ifndef MEGATRAIN_RECORD_EVENTS_H
#define MEGATRAIN_RECORD_EVENTS_H

#include "base/file.h"
#include "record/record.h"

typedef struct {
    FileWriter file;
} Events;

/* Takes records later than `last_step`, and what is torn, off the files of run_dir; files left without a value go.
 * Files of other programs are not touched. ERR_IO. */
Err events_cut(const char *run_dir, int64_t last_step);

/* A new file, behind all others in the order of names, for steps from first_step on. ERR_IO. */
Err events_open(Events *e, const char *run_dir, int64_t first_step);

/* The configuration of the start, as TensorBoard's texts show it: "config". step: the first. ERR_IO, ERR_MEMORY. */
Err events_config(Events *e, int64_t step, const char *text);

/* Tags: record_tag(); "loss/valid" of an only validation set, else "valid/NAME". TensorBoard shows those with the same
 * word before the '/' as a group. ERR_IO, then the file is as it was before. */
Err events_step(Events *e, const MetricsRecord *r);
/* Loads of experts, a curve a layer; "loss/aux", "loss/z". */
Err events_load(Events *e, const MetricsRecord *r);
Err events_mtp(Events *e, const MetricsRecord *r);    /* losses of multi-token prediction, "loss/mtp 1" and so on */
Err events_logits(Events *e, const MetricsRecord *r); /* "attention/max_logit", and a curve a layer */
Err events_ranks(Events *e, const MetricsRecord *r);  /* "ranks/slowest", "ranks/lag_ms" */
Err events_valid(Events *e, int64_t step, const char *name, double loss);

/* ---- one record, for tests ---- */

enum { EVENT_BYTES = 2048, EVENT_TAG_BYTES = 64 };

typedef enum { EVENT_VERSION, EVENT_SCALARS, EVENT_START } EventKind;

typedef struct {
    EventKind kind;
    double wall_s; /* since 1970 */
    int64_t step;
    int count; /* number of scalars */
    struct {
        char tag[EVENT_TAG_BYTES];
        float value;
    } scalar[RECORD_FIELDS];
} EventRecord;

/* Its bytes, framed; the return value counts them. */
int64_t event_encode(const EventRecord *e, char buf[EVENT_BYTES]);

/* The same of a text, into buf[event_text_bytes]. */
int64_t event_text_bytes(size_t tag_bytes, size_t text_bytes);
int64_t event_encode_text(double wall_s, int64_t step, const char *tag, const char *text, char *buf);

#endif
