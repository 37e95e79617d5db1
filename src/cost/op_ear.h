/* Hears every op of a device, and lets it go on: for whoever counts or times a dry run. */
#ifndef MEGATRAIN_COST_OP_EAR_H
#define MEGATRAIN_COST_OP_EAR_H

#include "device/ops.h"

typedef struct OpEar OpEar;
struct OpEar {
    OpTable ops; /* the first member: by it an op of the device finds the ear */
    const OpTable *below;
    WideCount flop; /* the device's counter at the last op */
    /* args: those of the op. flop: what the device counted for it. */
    void (*hear)(OpEar *ear, OpId id, const void *args, double flop);
};

/* The ear must outlive the device's use. */
void op_ear_attach(OpEar *ear, Device *dev, void (*hear)(OpEar *ear, OpId id, const void *args, double flop));

#endif
