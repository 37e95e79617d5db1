/* See op_ear.h. */
#include "cost/op_ear.h"

#define OP(name, flop_of, args)                                     \
    static Err heard_##name(Stream *s, const name##_args *a)        \
    {                                                               \
        OpEar *ear = (OpEar *)(void *)(uintptr_t)(s->dev->ops);     \
        const WideCount before = ear->flop;                         \
        ear->flop = s->dev->counters.flop;                          \
        ear->hear(ear, OP_##name, a, (double)(ear->flop - before)); \
        return ear->below->name(s, a);                              \
    }
#define T(name, dims)
#define S(type, name)
#include "device/ops.def"
#undef OP

static const OpTable heard_ops = {
#define OP(name, flop, args) .name = heard_##name,
#include "device/ops.def"
#undef OP
};
#undef T
#undef S

void op_ear_attach(OpEar *ear, Device *dev, void (*hear)(OpEar *ear, OpId id, const void *args, double flop))
{
    *ear = (OpEar){ .ops = heard_ops, .below = dev->ops, .flop = dev->counters.flop, .hear = hear };
    dev->ops = &ear->ops;
}
