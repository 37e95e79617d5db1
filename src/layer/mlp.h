/* The feed-forward layer, which a mixture of experts has as its shared expert, too. */
#ifndef MEGATRAIN_LAYER_MLP_H
#define MEGATRAIN_LAYER_MLP_H

#include "layer/internal.h"

typedef struct {
    const ModelSpec *spec;
    Linear fc1, fc2;
    int64_t ffn; /* width over all ranks */
} Mlp;

typedef struct {
    Saved hidden, active; /* before and behind the activation */
} MlpSave;

/* Weights without biases. */
int64_t mlp_weights(const ModelSpec *spec, int64_t ffn);
Err mlp_register(Mlp *m, ParamRegistry *reg, const ModelSpec *spec, const char *name, int layer, int64_t ffn);
/* LayerKind.forward and backward: of an Mlp, and its MlpSave. */
Err mlp_forward(const void *mlp, Ctx *c, Tensor x, Tensor y, void *save);
Err mlp_backward(const void *mlp, Ctx *c, const void *save, Tensor x, Tensor dy, Tensor dx);

/* Between the two products of a feed-forward layer of that width; gated: chunk by chunk (mlp.c). */
Err activation_forward(Ctx *c, const ModelSpec *spec, int64_t ffn, Tensor hidden, Tensor active);
typedef struct {
    Tensor hidden, dactive, dhidden;
} ActivationGrad;
Err activation_backward(Ctx *c, const ModelSpec *spec, int64_t ffn, ActivationGrad g);

#endif
