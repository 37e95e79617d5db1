/* Generators and arithmetic on action lists; see schedule.h. */
#include "pipeline/schedule.h"

/* Warm-up forwards, then pairs, then the remaining backwards; at the end what happens once a step. */
int schedule_1f1b(Action *out, int stage, int stages, int microbatches)
{
    int warm = stages - 1 - stage, n = 0, f = 0, b = 0;
    if (warm > microbatches) warm = microbatches;
    while (f < warm) out[n++] = (Action){ ACT_F, stage, f++ };
    while (f < microbatches) {
        out[n++] = (Action){ ACT_F, stage, f++ };
        out[n++] = (Action){ ACT_B, stage, b++ };
    }
    while (b < microbatches) out[n++] = (Action){ ACT_B, stage, b++ };
    for (ActionKind k = ACT_REDUCE; k <= ACT_UPDATE; k++) out[n++] = (Action){ k, stage, 0 };
    return n;
}

int schedule_in_flight(const Action *list, int count)
{
    int now = 0, most = 0;
    for (int i = 0; i < count; i++) {
        if (list[i].kind == ACT_F && ++now > most) most = now;
        if (list[i].kind == ACT_B || list[i].kind == ACT_W) now--;
    }
    return most;
}
