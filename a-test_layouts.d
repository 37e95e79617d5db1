test_layouts.o: test/test_layouts.c src/engine/expert_load.h \
 src/base/layer_set.h src/engine/trainer.h src/base/batch_ramp.h \
 src/engine/batches.h src/layer/layer.h src/layer/spec.h \
 src/base/activation.h src/base/dispatcher.h src/device/step.h \
 src/base/fp8.h src/base/half.h src/layer/kinds.def src/param/param.h \
 src/comm/grid.h src/comm/comm.h src/boot/observer.h src/device/device.h \
 src/device/tensor.h src/base/arena.h src/base/err.h src/comm/groups.h \
 src/comm/groups.def src/device/ops.h src/base/trace.h src/device/ops.def \
 src/engine/executor.h src/engine/pair.h src/base/coroutine.h \
 src/pipeline/schedule.h src/engine/replays.h src/device/recorder.h \
 src/device/digest.h src/engine/save_heap.h src/layer/offload.h \
 src/model/model.h src/pipeline/simulate.h src/engine/parts.h \
 src/optim/optimizer.h src/optim/ddp.h src/optim/units.h \
 src/optim/optim.h src/optim/muon.h src/param/shard.h test/test.h \
 test/tiny.h src/base/rng.h test/call_order.h test/thread_ranks.h
src/engine/expert_load.h:
src/base/layer_set.h:
src/engine/trainer.h:
src/base/batch_ramp.h:
src/engine/batches.h:
src/layer/layer.h:
src/layer/spec.h:
src/base/activation.h:
src/base/dispatcher.h:
src/device/step.h:
src/base/fp8.h:
src/base/half.h:
src/layer/kinds.def:
src/param/param.h:
src/comm/grid.h:
src/comm/comm.h:
src/boot/observer.h:
src/device/device.h:
src/device/tensor.h:
src/base/arena.h:
src/base/err.h:
src/comm/groups.h:
src/comm/groups.def:
src/device/ops.h:
src/base/trace.h:
src/device/ops.def:
src/engine/executor.h:
src/engine/pair.h:
src/base/coroutine.h:
src/pipeline/schedule.h:
src/engine/replays.h:
src/device/recorder.h:
src/device/digest.h:
src/engine/save_heap.h:
src/layer/offload.h:
src/model/model.h:
src/pipeline/simulate.h:
src/engine/parts.h:
src/optim/optimizer.h:
src/optim/ddp.h:
src/optim/units.h:
src/optim/optim.h:
src/optim/muon.h:
src/param/shard.h:
test/test.h:
test/tiny.h:
src/base/rng.h:
test/call_order.h:
test/thread_ranks.h:
