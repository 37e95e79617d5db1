/* See action_trace.h. */
#include "engine/action_trace.h"

#include <stddef.h>

#include "base/trace.h"

static const char *const payload_names[] = { [PAYLOAD_ACTIVATION] = "activation", [PAYLOAD_GRADIENT] = "gradient" };

const char *action_span(ActionKind kind)
{
    static const char *const names[ACT_KINDS] = { [ACT_F] = "forward",
                                                  [ACT_B] = "backward",
                                                  [ACT_I] = "dgrad",
                                                  [ACT_W] = "wgrad",
                                                  [ACT_SEND] = "messages",
                                                  [ACT_RECV] = "messages",
                                                  [ACT_TIED] = "tied embedding",
                                                  [ACT_REDUCE] = "reduce",
                                                  [ACT_NORM] = "norm",
                                                  [ACT_UPDATE] = "update" };
    return names[kind];
}

void trace_action(const Action *a)
{
    static const char *const of_compute[] = { "stage", "replica", "microbatch", "version" };
    static const char *const of_replica[] = { "stage", "replica", NULL };
    if (action_is_message(a->kind)) return trace_begin(action_span(a->kind));
    const TraceArgs args = { .kind = action_name(a->kind),
                             .names = action_is_compute(a->kind) ? of_compute : of_replica,
                             .value = { a->stage, a->replica, a->microbatch, a->version } };
    trace_begin_with(action_span(a->kind), &args);
}

/* A message's number among all that a recording is likely to see: 8 bits of the run, 1 of payload and replica each, 12
 * of the stage, 18 of the unit. */
static int64_t arrow_id(int payload, const Action *a, int unit, int64_t run)
{
    return (run & 0xff) << 32 | (int64_t)payload << 31 | (int64_t)a->replica << 30 | (int64_t)(a->stage & 0xfff) << 18 |
           (unit & 0x3ffff);
}

void trace_message(const Action *a, int64_t run)
{
    static const char *const names[] = { "stage", "replica", "microbatch", "peer" };
    const bool send = a->kind == ACT_SEND;
    const TraceArgs args = { .kind = payload_names[a->payload],
                             .names = names,
                             .value = { a->stage, a->replica, a->microbatch, a->peer } };
    trace_begin_with(send ? "send" : "receive", &args);
    if (send) trace_arrow(payload_names[a->payload], arrow_id(a->payload, a, a->microbatch, run), false);
    trace_end();
}

static int payload_of(const Action *a) { return a->kind == ACT_F ? PAYLOAD_ACTIVATION : PAYLOAD_GRADIENT; }

void trace_wait(const Action *a, int unit)
{
    static const char *const names[] = { "stage", "replica", "microbatch", NULL };
    const TraceArgs args = { .kind = payload_names[payload_of(a)],
                             .names = names,
                             .value = { a->stage, a->replica, unit } };
    trace_begin_with("wait", &args);
}

void trace_arrived(const Action *a, int unit, int64_t run)
{
    trace_arrow(payload_names[payload_of(a)], arrow_id(payload_of(a), a, unit, run), true);
    trace_end();
}
