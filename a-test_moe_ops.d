test_moe_ops.o: test/test_moe_ops.c test/ops_env.h test/test.h \
 src/base/err.h src/base/rng.h test/tested_op.h src/device/ops.h \
 src/base/trace.h src/device/device.h src/device/tensor.h \
 src/base/arena.h src/device/step.h src/base/fp8.h src/base/half.h \
 src/device/ops.def
test/ops_env.h:
test/test.h:
src/base/err.h:
src/base/rng.h:
test/tested_op.h:
src/device/ops.h:
src/base/trace.h:
src/device/device.h:
src/device/tensor.h:
src/base/arena.h:
src/device/step.h:
src/base/fp8.h:
src/base/half.h:
src/device/ops.def:
