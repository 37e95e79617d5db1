/*
 * Operations: generated from ops.def. A call names its arguments:
 *
 *   TRY(op(s, norm_fwd, .y = y, .rstd = rstd, .x = x, .w = w, .eps = 1e-5f));
 *
 * op() checks shapes and dtypes against the declaration (ERR_SHAPE, naming op, argument and dim), counts
 * bytes and FLOP, and calls the device's table in a span of the trace (on a GPU: of the launch). Every backend
 * implements every op (a missing one does not compile); implementations may assume what the declaration says
 * and nothing more.
 */
#ifndef MEGATRAIN_DEVICE_OPS_H
#define MEGATRAIN_DEVICE_OPS_H

#include "base/trace.h"
#include "device/device.h"
#include "device/step.h"
#include "device/tensor.h"

/* argument structs */
#define T(name, dims) Tensor name;
#define S(type, name) type name;
#define OP(name, flop, args) \
    typedef struct {         \
        args                 \
    } name##_args;
#include "device/ops.def"
#undef OP
#undef S
#undef T

typedef enum {
#define OP(name, flop, args) OP_##name,
#include "device/ops.def"
#undef OP
    OP_COUNT
} OpId;

struct OpTable {
#define OP(name, flop, args) Err (*name)(Stream *, const name##_args *);
#include "device/ops.def"
#undef OP
};

/* One tensor argument of an op, as declared. */
typedef struct {
    const char *name, *dims;
    int64_t offset;     /* place of the Tensor in the argument struct */
    bool read, written; /* both: changed in place */
} OpField;

typedef struct {
    const char *name, *flop;
    const OpField *fields; /* tensors only */
    int field_count;
} OpInfo;

const OpInfo *op_info(OpId id);

/* residual_norm_fwd as the two ops that it is, for backends that gain nothing by making both in one pass. */
Err residual_norm_apart(const OpTable *ops, Stream *s, const residual_norm_fwd_args *a);

/* Digest of all arguments, and of which op it is (digest.h). */
uint64_t op_digest(OpId id, const void *args);

/* Shape check and counters, common to all backends; the device's recorder hears of the op. */
Err op_begin(Stream *s, OpId id, const void *args);

#define OP(name, flop, args)                                     \
    static inline Err op_##name(Stream *s, const name##_args *a) \
    {                                                            \
        TRY(op_begin(s, OP_##name, a));                          \
        trace_begin(#name);                                      \
        Err err = s->dev->ops->name(s, a);                       \
        trace_end();                                             \
        return err;                                              \
    }
#include "device/ops.def"
#undef OP

#define op(stream, name, ...) op_##name((stream), &(name##_args){ __VA_ARGS__ })

#endif
