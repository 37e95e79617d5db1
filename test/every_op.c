/* "undefined reference to tested_NAME": the op NAME of device/ops.def has no test among those linked here. See
 * tested_op.h. */
#define OP(name, flop, args) extern const char tested_##name;
#include "device/ops.def"
#undef OP

extern const char *const every_op[];
const char *const every_op[] = {
#define OP(name, flop, args) &tested_##name,
#include "device/ops.def"
#undef OP
};
