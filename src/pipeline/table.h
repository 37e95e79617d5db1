/*
 * The table of schedules. An author writes one generator and one row. A generator appends the compute actions of each
 * rank in the order in which the rank is to run them; everything else is derived.
 */
#ifndef MEGATRAIN_PIPELINE_TABLE_H
#define MEGATRAIN_PIPELINE_TABLE_H

#include "pipeline/schedule.h"

/* Why the shape is not legal, as the end of "schedule 'x' needs ..."; NULL if it is. */
typedef const char *ScheduleRule(const Schedule *shape);

struct ScheduleKind {
    const char *name;
    void (*generate)(Schedule *s);
    ScheduleRule *rule;
    Placement placement;
    Versions versions;
    int chunks;          /* how many stages of a replica a rank has; 0: free, 2 when not given */
    int waves;           /* 0: no waves; else the usual number, and chunks = 2 * waves */
    int unit_div;        /* 0: 1 */
    int batches;         /* how many an asynchronous schedule usually covers; 0: synchronous */
    bool grouped;        /* `group` means something */
    bool sliced;         /* micro-batches may pass in slices; with `slices` 1 they do not */
    bool pairs;          /* it marks pairs of a forward and a backward (ACTION_PAIR) */
    const char *aliases; /* other names, separated by blanks; NULL: none */
};

extern const ScheduleKind schedule_table[];
extern const int schedule_table_count;

/* ---- for generators ---- */

/* Appends an action. If a list cannot grow, s->no_memory is set, and nothing more is appended. */
void schedule_push(Schedule *s, int rank, Action a);
void schedule_add(Schedule *s, int rank, ActionKind kind, int stage, int microbatch); /* replica 0, 1 unit */

/* gen_loop.c */
void generate_gpipe(Schedule *s);
void generate_1f1b(Schedule *s); /* with slices it is seq1f1b */
void generate_eager_1f1b(Schedule *s);
void generate_interleaved(Schedule *s);
void generate_bfs(Schedule *s);
void generate_zb_h1(Schedule *s); /* with several chunks it is zb-h1-int */
void generate_zb_h2(Schedule *s);

/* gen_v.c */
void generate_zb_v(Schedule *s);
void generate_v_half(Schedule *s);
void generate_v_min(Schedule *s);

/* gen_slots.c */
void generate_chimera(Schedule *s);
void generate_chimera_doubled(Schedule *s); /* with half units it is backward halving */
void generate_wave(Schedule *s);
void generate_gems(Schedule *s);

/* gen_dualpipe.c */
void generate_dualpipe(Schedule *s); /* with V placement it is DualPipeV */
void generate_dualpipe_serial(Schedule *s);

#endif
