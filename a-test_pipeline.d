test_pipeline.o: test/test_pipeline.c test/ckpt_save.h src/ckpt/ckpt.h \
 src/ckpt/upcycle.h src/param/shard.h src/param/param.h src/comm/grid.h \
 src/comm/comm.h src/boot/observer.h src/device/device.h \
 src/device/tensor.h src/base/arena.h src/base/err.h src/comm/groups.h \
 src/comm/groups.def src/device/ops.h src/base/trace.h src/device/step.h \
 src/base/fp8.h src/base/half.h src/device/ops.def \
 src/pipeline/simulate.h src/pipeline/schedule.h test/scratch.h \
 test/test.h src/base/file.h test/tiny.h src/base/rng.h test/call_order.h \
 src/engine/trainer.h src/base/batch_ramp.h src/engine/batches.h \
 src/layer/layer.h src/layer/spec.h src/base/activation.h \
 src/base/dispatcher.h src/base/layer_set.h src/layer/kinds.def \
 src/engine/executor.h src/engine/pair.h src/base/coroutine.h \
 src/engine/replays.h src/device/recorder.h src/device/digest.h \
 src/engine/save_heap.h src/layer/offload.h src/model/model.h \
 src/engine/parts.h src/optim/optimizer.h src/optim/ddp.h \
 src/optim/units.h src/optim/optim.h src/optim/muon.h test/thread_ranks.h
test/ckpt_save.h:
src/ckpt/ckpt.h:
src/ckpt/upcycle.h:
src/param/shard.h:
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
src/device/step.h:
src/base/fp8.h:
src/base/half.h:
src/device/ops.def:
src/pipeline/simulate.h:
src/pipeline/schedule.h:
test/scratch.h:
test/test.h:
src/base/file.h:
test/tiny.h:
src/base/rng.h:
test/call_order.h:
src/engine/trainer.h:
src/base/batch_ramp.h:
src/engine/batches.h:
src/layer/layer.h:
src/layer/spec.h:
src/base/activation.h:
src/base/dispatcher.h:
src/base/layer_set.h:
src/layer/kinds.def:
src/engine/executor.h:
src/engine/pair.h:
src/base/coroutine.h:
src/engine/replays.h:
src/device/recorder.h:
src/device/digest.h:
src/engine/save_heap.h:
src/layer/offload.h:
src/model/model.h:
src/engine/parts.h:
src/optim/optimizer.h:
src/optim/ddp.h:
src/optim/units.h:
src/optim/optim.h:
src/optim/muon.h:
test/thread_ranks.h:
