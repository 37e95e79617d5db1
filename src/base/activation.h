/*
 * The activations of feed-forward layers, declared once: the choices of model.activation, the layers' kinds, and
 * whether one is gated, which the widths of weights follow from. docs/architecture.md says what else a new one needs.
 */
#ifndef MEGATRAIN_BASE_ACTIVATION_H
#define MEGATRAIN_BASE_ACTIVATION_H

#include <stdbool.h>

/* ROW(NAME, "in configurations", gated); gated: a column is made of two, a gate and what it is on */
#define ACTIVATIONS(ROW)             \
    ROW(GELU, "gelu", false)         \
    ROW(GELU_ERF, "gelu_erf", false) \
    ROW(RELU2, "relu2", false)       \
    ROW(SWIGLU, "swiglu", true)      \
    ROW(GEGLU, "geglu", true)        \
    ROW(CLAMPED_SWIGLU, "clamped_swiglu", true)

#define ACTIVATION_KIND(name, text, gated) ACT_##name,
typedef enum { ACTIVATIONS(ACTIVATION_KIND) } Activation;
#undef ACTIVATION_KIND

static inline bool activation_gated(Activation a)
{
#define ACTIVATION_GATED(name, text, gated) gated,
    static const bool all[] = { ACTIVATIONS(ACTIVATION_GATED) };
#undef ACTIVATION_GATED
    return all[a];
}

#endif
