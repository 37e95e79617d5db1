# megatrain
#
#   make            builds ./megatrain              make test       builds and runs all quick tests
#   make demo       trains on real text             make test-slow  mutants, layout controls, GPT-2 against PyTorch
#   make bench      speed beside PyTorch, OpenBLAS  make lint       format, warnings, layers, headers alone
#   make deps       what is missing, see below      make asan       the tests under ASan and UBSan
#   make test-ranks every layout as processes       make test-faults ranks that die, freeze or hang at every place
#   make test-launchers mpirun, torchrun, Slurm     make test-files every crash state, flipped bit and failing call
#   make test-grid  more models and layouts drawn for pairs of values, and checkpoints between pipelines
#   make soak       runs killed, stopped, damaged and started in another layout, again and again (FAULTS=20 SEED=1); 3,000 steps
#   make fuzz       libFuzzer on everything that reads bytes from outside, FUZZ_SECONDS=120 each (test/fuzz/README.md)
#   make fuzz-layouts  random models in random layouts against one rank, COUNT=200 SEED=1 (test/fuzz/README.md)
#   make test-emu   the CUDA kernels and the whole program with device=cuda, executed on the CPU; with sanitizers:
#                   make emu-asan, make emu-tsan; whether bugs in kernels are caught: make emu-bugs
#   FULL=1          with test-slow, test-ranks, test-grid, test-faults, test-emu, emu-bugs: every fault, bug and layout, not some
#   make bundle     a folder that checks and times it all on a machine with a GPU (docs/gpu.md)
#   make pictures   docs/architecture.svg and the table of layers in docs/architecture.md, from the source
#   make published  the tables of docs/published.md: predictions beside steps that others have published
#   make install    the program, its manual, documents and completion, launchers and configurations; PREFIX=/usr/local,
#                   DESTDIR=; make uninstall takes them away
#   make cuda-12    compiles the CUDA backend by CUDA 12.4, the oldest that it is for (headers from PyPI, clang)
#   make toys       the examples of docs/adding.md, added to a copy of the source and tried
#   make figures    how easy the source is to change: edits for a key or an operation, circles, lengths
#   make help       this text
#
# CUDA=1 builds the CUDA backend, CUDA=0 leaves it out; by default it is built where nvcc is found. `make demo` leaves it out,
# too, where it sees no GPU and nothing of it was built before: kernels take three quarters of a first build.
# BUILD= chooses the folder of objects. Every target that needs packages looks for them first (make deps): as root it
# installs what is missing, else it names it and the command that installs it.

.DEFAULT_GOAL := all
comma   := ,
BUILD   ?= build
ifeq ($(origin CC),default)
CC      := gcc
endif
WARN    := -Wall -Wextra -Wshadow -Wvla -Wstrict-prototypes -Wmissing-prototypes -Wno-missing-field-initializers
OPT     ?= -O2 -g
# no frame of src/ is larger, but of products, so that megatrain runs on a stack of 512 KiB (ulimit -s; base/heap.h)
FRAMES  ?= -Wframe-larger-than=32768
# HARDEN=0 leaves them out: guards of stacks and of the libraries' copies, and addresses that are bound before main. The
# CPU's kernels, which read no foreign bytes, have none of them. FORTIFY wants an optimiser, and no sanitizer.
HARDEN  ?= 1
GUARDS  := $(if $(filter 1,$(HARDEN)),-fstack-protector-strong $(if $(findstring -fsanitize,$(EXTRA_CFLAGS)),,$(if \
             $(filter -O1 -O2 -O3,$(OPT)),-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2)))
CFLAGS  := -std=gnu17 $(OPT) $(GUARDS) -ffp-contract=off -fno-math-errno -fopenmp -D_GNU_SOURCE -Isrc -MMD -MP $(WARN) $(EXTRA_CFLAGS)
CXX_SRC := $(sort $(wildcard src/*/*.cc))
CXXFLAGS := -std=gnu++17 $(OPT) $(GUARDS) -ffp-contract=off -fno-math-errno -fopenmp -D_GNU_SOURCE -Isrc -MMD -MP -Wall -Wextra -Wshadow $(EXTRA_CFLAGS)
LDFLAGS := -fopenmp $(if $(filter 1,$(HARDEN)),-Wl$(comma)-z$(comma)relro$(comma)-z$(comma)now) $(EXTRA_LDFLAGS)
HOST_LIBS := -linih -lhwloc -ljansson -lpcre2-8 -lutf8proc -lz -lzstd -lsodium -lgloo -lstdc++ -ldl -lpthread -lm
LIBS    := $(HOST_LIBS)
PREFIX  ?= /usr/local

# src/cpu/ is built three times, once for each instruction set (src/cpu/isa.h)
ISAS         := avx512 avx2 c
VEC_OPT      := -O3
avx512_FLAGS  = $(or $(GEMM_OPT),$(VEC_OPT)) -mavx512f -mavx512dq -mavx512vl -mavx512bw -mfma -mprefer-vector-width=512
avx2_FLAGS    = $(or $(GEMM_OPT),$(VEC_OPT)) -mavx2 -mfma
c_FLAGS      := -O2

SRC     := $(sort $(filter-out src/cpu/%,$(wildcard src/*/*.c)))
CPU_SRC := $(sort $(wildcard src/cpu/*.c))
OBJ     := $(SRC:%.c=$(BUILD)/%.o) $(CXX_SRC:%.cc=$(BUILD)/%.o) $(foreach i,$(ISAS),$(CPU_SRC:src/cpu/%.c=$(BUILD)/src/cpu/$(i)/%.o))
TESTS   := $(patsubst test/%.c,$(BUILD)/test/%,$(sort $(wildcard test/test_*.c)))
# what tests link besides the library
THREAD_RANKS := $(BUILD)/test/thread_ranks.o
# An op without a test does not link (test/tested_op.h): test_ops has the objects of the other tests of ops, too. Each has a
# main; a program's own comes first.
OP_TESTS := $(patsubst %,$(BUILD)/test/test_%.o,attention cast delta delta_around fp8 fp8_experts kda linear mamba moe_ops ops_step) $(BUILD)/test/every_op.o
FIRST_MAIN := -Wl,--allow-multiple-definition
# What is linked a hundred times has no debug information, without which it takes a seventh of the room and a third of the time:
# DEBUG=1 leaves it in, for gdb. (Sanitizers name lines by it.)
DEBUG   ?=
LEAN    := $(if $(DEBUG)$(findstring -fsanitize,$(EXTRA_LDFLAGS)),,-Wl$(comma)--strip-debug)
BENCHES := $(patsubst bench/%.c,$(BUILD)/bench/%,$(sort $(wildcard bench/bench_*.c)))
HEADERS := $(sort $(wildcard src/*/*.h))

# The CUDA backend: C by the host's compiler, kernels by nvcc, which is asked where its headers and libraries are.
# CUDA_ARCHS: GPUs that there is object code for, as 80 90a, by default all of ours that this nvcc knows; for one alone it
# compiles in half the time. Others from 8.0 on run from PTX, which their driver compiles when the program first starts.
# CUDA_OWN_ARCHS: more of them, for the files alone that have code of their own there; for trying that all compiles.
# Another toolkit or another choice builds anew.
CUDA_HOME ?= $(firstword $(wildcard $(patsubst %/bin/nvcc,%,$(shell command -v nvcc 2>/dev/null)) /usr/local/cuda))
NVCC      := $(CUDA_HOME)/bin/nvcc
CUDA      ?= $(if $(wildcard $(NVCC)),1,0)
TOOLKIT    = $(if $(CUDA_HOME),$(shell scripts/cuda-toolkit.sh $(1) $(CUDA_HOME) $(2)))
CUDA_HEADERS := $(call TOOLKIT,headers)
CUDA_ARCHS ?=
CUDA_OWN_ARCHS ?=
TOOLKIT_STAMP := $(BUILD)/.toolkit$(subst $(empty) ,+,$(subst /,-,$(strip $(CUDA_HOME) $(CUDA_ARCHS) $(CUDA_OWN_ARCHS:%=own%))))
NVCCFLAGS := -std=c++17 -O3 -Icuda -Isrc --threads 0
GENCODE   := $(if $(filter 1,$(CUDA)),$(call TOOLKIT,flags,$(CUDA_ARCHS)))
GENCODE_OWN := $(if $(CUDA_OWN_ARCHS),$(if $(filter 1,$(CUDA)),$(call TOOLKIT,flags,$(CUDA_ARCHS) $(CUDA_OWN_ARCHS))),$(GENCODE))
# NCCL and cuBLASLt are looked up at run time.
CUDA_C    := $(sort $(wildcard cuda/*.c))
CUDA_CU   := $(sort $(wildcard cuda/*.cu))
CUDA_OWN  := $(filter %_hopper.cu cuda/fp8%,$(CUDA_CU))
CUDA_INC  := -Icuda $(CUDA_HEADERS:%=-isystem %)
ifeq ($(CUDA),1)
OBJ       := $(filter-out $(BUILD)/src/comm/without_cuda.o,$(OBJ)) \
             $(CUDA_C:%.c=$(BUILD)/%.o) $(CUDA_CU:%.cu=$(BUILD)/%.o)
# (an rpath of the old kind: libraries in the bundle's lib/ find those that they need there, too)
CUDA_LIBRARIES := $(call TOOLKIT,libraries)
RPATH     := -Wl,--disable-new-dtags,-rpath,'$$ORIGIN/lib:$$ORIGIN/../lib$(CUDA_LIBRARIES:%=:%)'
# (installed: behind LD_LIBRARY_PATH, so that a module's library comes first)
RUNPATH   := $(CUDA_LIBRARIES:%=-Wl,--enable-new-dtags,-rpath,%)
LIBS      += $(CUDA_LIBRARIES:%=-L%) $(RPATH) -lcudart_static -lrt
$(BUILD)/src/device/device.o: CFLAGS += -DMEGATRAIN_CUDA
endif
# main.c alone knows the commit, so that no other object is built anew by each
ifndef COMMIT
COMMIT := $(shell scripts/commit.sh)
endif
$(BUILD)/main.o: CFLAGS += -DMEGATRAIN_COMMIT='"$(COMMIT)"'
$(BUILD)/main.o: $(BUILD)/.commit-$(COMMIT)
$(BUILD)/.commit-$(COMMIT):
	@mkdir -p $(@D)
	@rm -f $(BUILD)/.commit-*
	@touch $@

$(BUILD)/src/device/device.o: $(BUILD)/.cuda-$(CUDA) # the one file that knows; built anew when CUDA= changes
$(BUILD)/.cuda-$(CUDA):
	@mkdir -p $(@D)
	@rm -f $(BUILD)/.cuda-* $(BUILD)/libmegatrain.a
	@touch $@

$(CUDA_C:%.c=$(BUILD)/%.o) $(CUDA_CU:%.cu=$(BUILD)/%.o): $(TOOLKIT_STAMP)
$(TOOLKIT_STAMP):
	@scripts/cuda-toolkit.sh check $(CUDA_HOME)
	@mkdir -p $(@D)
	@rm -f $(BUILD)/.toolkit*
	@touch $@

# Tests and benchmarks of the CUDA backend on a device (scripts/gpu-check.sh): the emulator's, in one program.
GPU_NAMES := $(patsubst test/cuda/%.c,%,$(sort $(wildcard test/cuda/test_*.c))) test_cuda_hopper links rooflines steps
GPU_OBJ   := $(patsubst %.c,$(BUILD)/%.o,$(filter-out test/cuda/programs.c,$(sort $(wildcard test/cuda/*.c bench/cuda/*.c))))
GPU_OBJ   += $(BUILD)/test/cuda/test_cuda_hopper.o
GPU_LINKS := $(GPU_NAMES:%=$(BUILD)/gpu/%)

# The same files on the emulator (test/emu/README.md). EMU: folder of objects. EMU_FLAGS: sanitizers for kernels
# and tests; EMU_RUNTIME_FLAGS: for the emulator itself.
# EMU_LANE=asan, tsan: with sanitizers, by clang; the library is gcc's, and so is its OpenMP.
EMU_LANE ?=
# checks of UBSan at every access, of what ASan sees as well: without them kernels compile in half the time
ASAN_SEES := null,object-size,pointer-overflow
ifneq ($(EMU_LANE),)
EMU       ?= $(BUILD)/emu-$(EMU_LANE)
EMU_CC    ?= clang
EMU_CXX   ?= clang++
EMU_LDFLAGS ?= -fopenmp=libgomp
# (checks as calls and traps, which ASan reports: kernels compile in two thirds of the time)
EMU_asan  := -O1 -fsanitize=address,undefined -fno-sanitize=$(ASAN_SEES) -fsanitize-trap=undefined -fno-omit-frame-pointer \
             -mllvm -asan-instrumentation-with-call-threshold=0 -fno-sanitize-address-use-after-scope
EMU_tsan  := -O1 -fsanitize=thread
EMU_FLAGS ?= $(EMU_$(EMU_LANE))
EMU_RUNTIME_asan := -DEMU_ASAN -fno-builtin
EMU_RUNTIME_tsan := -DEMU_TSAN -fno-builtin
EMU_RUNTIME_FLAGS ?= $(EMU_RUNTIME_$(EMU_LANE))
endif
EMU       ?= $(BUILD)/emu
EMU_CC    ?= $(CC)
EMU_CXX   ?= g++
EMU_LDFLAGS ?= $(LDFLAGS)
EMU_FLAGS ?=
EMU_RUNTIME_FLAGS ?= $(EMU_FLAGS)
EMU_SRC   := $(sort $(filter-out test/emu/test_%,$(wildcard test/emu/*.cpp)))
EMU_HOST  := $(EMU)/src/device/device.o $(patsubst %.c,$(EMU)/%.o,$(filter-out cuda/cublaslt.c,$(wildcard cuda/*.c))) $(CUDA_CU:%.cu=$(EMU)/%.cu.o)
EMU_RUNTIME := $(EMU_SRC:%.cpp=$(EMU)/%.o)
EMU_TESTS := $(patsubst test/cuda/%.c,$(EMU)/%,$(sort $(wildcard test/cuda/test_*.c)))
EMU_FORMS := $(EMU)/test_cuda_hopper
EMU_BENCHES := $(EMU)/links $(EMU)/rooflines $(EMU)/steps
# (fmaf() is then one instruction, of the same result)
EMU_FMA   := $(if $(shell grep -m1 -ow fma /proc/cpuinfo),-mfma)
# (as nvcc does; where the host has no fma, nothing is contracted. -O1 compiles in two thirds of the time, but moves 16 bytes
# in two halves, so that a wrong alignment is not seen)
EMU_CONTRACT := -ffp-contract=fast
EMU_SELF  := $(patsubst test/emu/%.cpp,$(EMU)/%,$(sort $(wildcard test/emu/test_*.cpp)))
EMU_CXXFLAGS := -std=c++17 -O2 -g1 $(EMU_FMA) -fno-strict-aliasing -ffp-contract=off -Itest -Itest/emu -Isrc $(CUDA_INC) -DNVTX_DISABLE \
                -MMD -MP -Wall -Wno-unknown-pragmas
EMU_CFLAGS   := -std=gnu17 -O2 -g1 -ffp-contract=off -D_GNU_SOURCE -DMEGATRAIN_CUDA -DMEGATRAIN_NCCL_LINKED -DNVTX_DISABLE -Isrc -Itest $(CUDA_INC) \
                -MMD -MP $(WARN)

# test/fuzz, in the plain build; fuzz_choices reads what the CUDA backend wrote, with its headers
FUZZ      := $(patsubst test/fuzz/%.c,$(BUILD)/test/%,$(sort $(filter-out \
               $(if $(wildcard $(CUDA_HOME)/include/cublasLt.h),,%/fuzz_choices.c),$(wildcard test/fuzz/fuzz_*.c))))
$(BUILD)/test/fuzz_choices: CFLAGS += $(CUDA_INC)

# The fuzz targets under libFuzzer: by clang, and so is what they read with; the rest of the library is as it is.
FUZZER      := $(BUILD)/fuzz
FUZZ_LINKED := $(FUZZ:$(BUILD)/test/%=$(FUZZER)/%)
FUZZ_OBJ    := $(patsubst $(BUILD)/%,$(FUZZER)/%,$(filter-out $(CXX_SRC:%.cc=$(BUILD)/%.o),$(filter \
                 $(addprefix $(BUILD)/src/,base/% config/% boot/% data/% ckpt/% comm/% hf/% record/metrics.o record/curve_svg.o),$(OBJ))))
FUZZ_CFLAGS := -std=gnu17 -O1 -g -D_GNU_SOURCE -Isrc -Itest/fuzz -MMD -MP $(WARN) -Wno-unknown-pragmas -fno-omit-frame-pointer \
               -fsanitize=address,undefined -fno-sanitize-recover=all

.PHONY: all help deps deps-dev deps-launchers deps-hf demo test fuzz fuzz-layouts soak cuda-headers emu-programs test-emu emu-asan emu-tsan emu-bugs test-ranks test-grid test-faults test-launchers test-files test-slow bench asan lint cuda-12 toys pictures published fmt figures hdr-check install uninstall clean
# objects in the middle of a chain are kept (not by .SECONDARY: a missing stamp would then build nothing anew)
.PRECIOUS: $(FUZZER)/%.o $(BUILD)/%.o $(BUILD)/cuda/%.o $(EMU)/%.o $(EMU)/%.cu.o

all: deps
	@$(MAKE) --no-print-directory -j$$(nproc) megatrain

help:
	@sed -n '3,/^$$/s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

megatrain: $(BUILD)/main.o $(BUILD)/libmegatrain.a
	@echo "  LD $@"
	@$(CC) $(LDFLAGS) -o $@ $^ $(LIBS)

$(BUILD)/libmegatrain.a: $(OBJ)
	@rm -f $@
	@ar rcs $@ $^

$(BUILD)/%.o: %.c
	@mkdir -p $(@D)
	@echo "  CC $<"
	@$(CC) $(CFLAGS) -c -o $@ $<

$(BUILD)/%.o: %.cc
	@mkdir -p $(@D)
	@echo "  CXX $<"
	@$(CXX) $(CXXFLAGS) -c -o $@ $<

$(OBJ): CFLAGS += $(FRAMES)
$(OBJ): CXXFLAGS += $(FRAMES)
# (the leaf that waits beside the kernel's own, which is to stay in the L1 cache)
$(BUILD)/src/cpu/avx512/gemm.o $(BUILD)/src/cpu/avx2/gemm.o: CFLAGS += $(if $(FRAMES),-Wframe-larger-than=98304)
$(BUILD)/src/comm/reduce.o: CFLAGS += -O3 # its loops are to be vectorised

define CPU_RULE
$(BUILD)/src/cpu/$(1)/%.o: src/cpu/%.c
	@mkdir -p $$(@D)
	@echo "  CC $$< ($(1))"
	@$$(CC) $$(CFLAGS) $$($(1)_FLAGS) -fno-stack-protector -U_FORTIFY_SOURCE -DCPU_ISA=$(1) -DCPU_ISA_$(1) -c -o $$@ $$<
endef
$(foreach i,$(ISAS),$(eval $(call CPU_RULE,$(i))))

# (ASAN_GEMM_OPT: instrumented products take most of a test's time; optimised they take half of it)
$(BUILD)/src/cpu/avx512/gemm.o $(BUILD)/src/cpu/avx2/gemm.o: GEMM_OPT = $(ASAN_GEMM_OPT)

# (of AVX-512's build; a compiler that does not know the flag builds it without the instruction)
PAIRS_FLAG := $(shell $(CC) -mavx512bf16 -E -x c /dev/null >/dev/null 2>&1 && echo -mavx512bf16)
$(BUILD)/src/cpu/avx512/gemm_pairs.o: CFLAGS += $(PAIRS_FLAG)

# (the same with TDPBF16PS; of the tests' own build the instruction is emulated)
TILES_FLAG := $(shell $(CC) -mamx-tile -mamx-bf16 -E -x c /dev/null >/dev/null 2>&1 && echo -mamx-tile -mamx-bf16)
$(BUILD)/src/cpu/avx512/gemm_tiles.o: CFLAGS += $(TILES_FLAG)
EMULATED_TILES := $(BUILD)/test/gemm_tiles.o $(BUILD)/test/tile_emulation.o
$(BUILD)/test/gemm_tiles.o: src/cpu/gemm_tiles.c
	@mkdir -p $(@D)
	@echo "  CC $< (emulated)"
	@$(CC) $(CFLAGS) $(c_FLAGS) -Itest -DCPU_ISA=c -DCPU_ISA_c -DTILE_EMULATION='"tile_emulation.h"' -c -o $@ $<
$(BUILD)/test/tile_emulation.o: CFLAGS += -Itest -O3
$(BUILD)/test/test_dot: $(EMULATED_TILES)

$(BUILD)/test/test_%.o: CFLAGS += -Itest
$(BUILD)/test/test_ops: $(OP_TESTS)
$(BUILD)/test/test_ops: LDFLAGS += $(FIRST_MAIN)
$(BUILD)/test/%: $(BUILD)/test/%.o $(THREAD_RANKS) $(BUILD)/libmegatrain.a
	@$(CC) $(CFLAGS) -o $@ $(filter %.o,$^) $(filter %.a,$^) $(LDFLAGS) $(LEAN) $(LIBS)

$(BUILD)/test/fuzz_%: test/fuzz/fuzz_%.c test/fuzz/support.c test/fuzz/driver.c $(BUILD)/libmegatrain.a
	@mkdir -p $(@D)
	@echo "  CC $<"
	@$(CC) $(CFLAGS) -Itest/fuzz -o $@ $< test/fuzz/support.c test/fuzz/driver.c $(BUILD)/libmegatrain.a $(LDFLAGS) $(LEAN) $(LIBS)

$(FUZZER)/%.o: %.c
	@mkdir -p $(@D)
	@echo "  FUZZ $<"
	@clang $(FUZZ_CFLAGS) $(FUZZ_COVERAGE) -c -o $@ $<

$(FUZZER)/test/fuzz/fuzz_choices.o: FUZZ_CFLAGS += $(CUDA_INC)
$(FUZZER)/%.o: FUZZ_COVERAGE := -fsanitize=fuzzer-no-link
# no parsers, but most of the time if every comparison in them is noted
$(FUZZER)/src/base/words.o $(FUZZER)/src/base/err.o $(FUZZER)/test/fuzz/support.o: FUZZ_COVERAGE :=

$(FUZZER)/libread.a: $(FUZZ_OBJ)
	@rm -f $@
	@ar rcs $@ $^

# the instrumented library first: what it defines is then not taken from the other
$(FUZZ_LINKED): $(FUZZER)/%: $(FUZZER)/test/fuzz/%.o $(FUZZER)/test/fuzz/support.o $(FUZZER)/libread.a $(BUILD)/libmegatrain.a
	@echo "  LD $@"
	@clang++ -fsanitize=fuzzer,address,undefined -o $@ $^ -fopenmp=libgomp $(LIBS)

$(BUILD)/bench/%: bench/%.c $(BUILD)/libmegatrain.a
	@mkdir -p $(@D)
	@echo "  CC $<"
	@$(CC) $(CFLAGS) -o $@ $< $(BUILD)/libmegatrain.a $(LDFLAGS) $(LEAN) $(LIBS)

$(BUILD)/cuda/%.o: cuda/%.c
	@mkdir -p $(@D)
	@echo "  CC $<"
	@$(CC) $(CFLAGS) $(CUDA_INC) -c -o $@ $<

$(CUDA_OWN:%.cu=$(BUILD)/%.o) $(BUILD)/test/cuda/test_cuda_hopper.o: GENCODE = $(GENCODE_OWN)
# (registers and PTX stay beside the object, for scripts/check-kernels.sh)
$(BUILD)/cuda/%.o: cuda/%.cu
	@mkdir -p $(@D)
	@echo "  NVCC $<"
	@mkdir -p $(@:.o=.keep)
	@$(NVCC) $(NVCCFLAGS) $(GENCODE) -Xptxas -v --keep --keep-dir $(@:.o=.keep) -MMD -MF $(@:.o=.d) -c -o $@ $< 2>$(@:.o=.ptxas) || \
	    { cat $(@:.o=.ptxas) >&2; exit 1; }
	@grep -vE '^ptxas info|bytes stack frame' $(@:.o=.ptxas) >&2 || true
	@rm -f $(@:.o=.ptx) $(@:.o=).compute_*.ptx # (of other GPUs, before)
	@mv $(@:.o=.keep)/*.ptx $(@D) && rm -rf $(@:.o=.keep)

$(BUILD)/test/cuda/%.o: test/cuda/%.cu
	@mkdir -p $(@D)
	@echo "  NVCC $<"
	@$(NVCC) $(NVCCFLAGS) $(GENCODE) -Dmain=$(basename $(notdir $@))_main -MMD -MF $(@:.o=.d) -c -o $@ $<

$(GPU_OBJ): CFLAGS += -DMEGATRAIN_CUDA -Itest $(CUDA_INC) -Dmain=$(basename $(notdir $@))_main -Wno-missing-prototypes

$(BUILD)/gpu/names.def: test/cuda bench/cuda
	@mkdir -p $(@D)
	@printf 'PROGRAM(%s)\n' $(GPU_NAMES) >$@

$(BUILD)/gpu/programs: test/cuda/programs.c $(BUILD)/gpu/names.def $(GPU_OBJ) $(BUILD)/test/every_op.o $(THREAD_RANKS) $(BUILD)/libmegatrain.a
	@echo "  LD $@"
	@$(CC) $(CFLAGS) -I$(@D) -o $@ $(filter-out %.def,$^) $(LDFLAGS) $(LIBS)

$(GPU_LINKS): $(BUILD)/gpu/programs
	@ln -sf programs $@

.PHONY: gpu-programs bundle
gpu-programs: $(GPU_LINKS)

# all of it in one folder for a machine with a GPU (docs/gpu.md)
bundle: deps
	@[ -x "$(NVCC)" ] || { echo "make bundle: no nvcc; CUDA_HOME names the toolkit" >&2; exit 1; }
	@$(MAKE) --no-print-directory -j$$(nproc) CUDA=1 megatrain gpu-programs
	@BUILD=$(BUILD) scripts/bundle.sh
	@BUILD=$(BUILD) test/bundle.sh

$(EMU)/%.cu.o: %.cu test/emu/bounds.awk
	@mkdir -p $(@D)
	@echo "  EMU $<"
	@awk -f test/emu/bounds.awk $< >$(@:.o=.cpp)
	@$(EMU_CXX) $(EMU_CXXFLAGS) $(EMU_CONTRACT) $(EMU_FLAGS) -c -o $@ $(@:.o=.cpp)

$(EMU)/%.o: %.cpp
	@mkdir -p $(@D)
	@echo "  EMU $<"
	@$(EMU_CXX) $(EMU_CXXFLAGS) $(EMU_RUNTIME_FLAGS) -c -o $@ $<

$(EMU)/%.o: %.c
	@mkdir -p $(@D)
	@echo "  EMU $<"
	@$(EMU_CC) $(EMU_CFLAGS) $(EMU_FLAGS) -c -o $@ $<

$(EMU)/src/device/device.o: src/device/device.c
	@mkdir -p $(@D)
	@echo "  EMU $<"
	@$(CC) $(CFLAGS) -DMEGATRAIN_CUDA -c -o $@ $<

# objects first: what they define is then not taken from the library
$(EMU)/megatrain: $(BUILD)/main.o $(EMU_HOST) $(EMU_RUNTIME) $(BUILD)/libmegatrain.a
	@echo "  LD $@"
	@$(EMU_CXX) $(EMU_FLAGS) -o $@ $^ $(EMU_LDFLAGS) $(HOST_LIBS)

$(EMU)/test_cuda_elementwise: $(EMU_TESTS:$(EMU)/%=$(EMU)/test/cuda/%.o) $(BUILD)/test/every_op.o
$(EMU)/test_cuda_elementwise: EMU_LDFLAGS += $(FIRST_MAIN)
$(EMU_TESTS): $(EMU)/%: $(EMU)/test/cuda/%.o $(EMU_HOST) $(EMU_RUNTIME) $(THREAD_RANKS) $(BUILD)/libmegatrain.a
	@echo "  LD $@"
	@$(EMU_CXX) $(EMU_FLAGS) -o $@ $(filter %.o,$^) $(filter %.a,$^) $(EMU_LDFLAGS) $(if $(EMU_LANE),,$(LEAN)) $(HOST_LIBS)

$(EMU_FORMS): $(EMU)/%: $(EMU)/test/cuda/%.cu.o $(EMU)/cuda/tensor_map.o $(EMU)/cuda/check.o $(EMU_RUNTIME) $(BUILD)/libmegatrain.a
	@echo "  LD $@"
	@$(EMU_CXX) $(EMU_FLAGS) -o $@ $^ $(EMU_LDFLAGS) $(HOST_LIBS)

$(EMU_BENCHES): $(EMU)/%: $(EMU)/bench/cuda/%.o $(EMU_HOST) $(EMU_RUNTIME) $(BUILD)/libmegatrain.a
	@echo "  LD $@"
	@$(EMU_CXX) $(EMU_FLAGS) -o $@ $^ $(EMU_LDFLAGS) $(LIBS)

$(EMU_SELF): $(EMU)/%: $(EMU)/test/emu/%.o $(patsubst %.cu,$(EMU)/%.cu.o,$(wildcard test/emu/*.cu)) $(EMU_RUNTIME)
	@echo "  LD $@"
	@$(EMU_CXX) $(EMU_FLAGS) -o $@ $^ -lpthread

deps:
	@scripts/install-deps.sh && echo "all packages are there"

deps-dev:
	@scripts/install-deps.sh dev

deps-launchers:
	@scripts/install-deps.sh launchers

# what test_hf.sh and test_gguf*.sh hold converted models to: transformers and llama.cpp, no packages of the system (some GB)
deps-hf:
	@python3 -m venv $(BUILD)/venv-hf
	@$(BUILD)/venv-hf/bin/pip install --quiet torch 'transformers>=5' safetensors numpy
	@$(BUILD)/venv-hf/bin/pip install --quiet --no-deps xllamacpp

SEES_GPU   = $(or $(wildcard /dev/nvidia[0-9]*),$(shell nvidia-smi -L 2>/dev/null | grep -m1 '^GPU'))
# whether the demo builds CUDA's kernels: it does not switch off what was built before
DEMO_CUDA  = $(if $(filter 1,$(CUDA)),$(if $(filter file,$(origin CUDA)),$(if $(wildcard $(BUILD)/.cuda-1)$(SEES_GPU),1,0),1),0)
demo: deps
	@[ $(CUDA)$(DEMO_CUDA) != 10 ] || echo "no GPU is seen: built for the CPU alone, without CUDA's kernels (CUDA=1 builds them, too)"
	@$(MAKE) --no-print-directory -j$$(nproc) CUDA=$(DEMO_CUDA) megatrain $(BUILD)/split_text
	@BUILD=$(BUILD) scripts/demo.sh

$(BUILD)/split_text: scripts/split_text.c
	@mkdir -p $(@D)
	$(CC) -std=gnu17 -O2 $(WARN) -o $@ $<

test: deps
	@$(MAKE) --no-print-directory -j$$(nproc) megatrain $(TESTS) $(FUZZ)
	@BUILD=$(BUILD) test/run.sh quick

fuzz: deps-dev
	@$(MAKE) --no-print-directory -j$$(nproc) $(FUZZ_LINKED)
	@BUILD=$(BUILD) test/fuzz/run.sh

# OPTIONS: further ones, as --shrink (python3 test/fuzz/layouts --help)
SEED  ?= 1
COUNT ?= 200
fuzz-layouts: deps
	@$(MAKE) --no-print-directory -j$$(nproc) megatrain
	@/usr/bin/python3 test/fuzz/layouts --seed $(SEED) --count $(COUNT) $(OPTIONS)

cuda-headers:
	@test -n "$(CUDA_HOME)" || { echo "the emulator needs headers of the CUDA toolkit: CUDA_HOME=FOLDER"; exit 2; }

emu-programs: $(EMU_TESTS) $(EMU_FORMS) $(EMU_SELF)

test-emu: deps cuda-headers
	@$(MAKE) --no-print-directory -j$$(nproc) $(EMU)/megatrain emu-programs $(EMU_BENCHES)
	@BUILD=$(BUILD) EMU=$(EMU) test/run.sh emu

emu-asan emu-tsan: emu-%: deps-dev cuda-headers
	@mkdir -p $(BUILD) && test/emu/passed.sh emu-$* sum >$(BUILD)/emu-$*.sum
	@$(MAKE) --no-print-directory -j$$(nproc) EMU_LANE=$* emu-programs
	@BUILD=$(BUILD) EMU=$(BUILD)/emu-$* test/run.sh emu-$*
	@test/emu/passed.sh emu-$* record $$(cat $(BUILD)/emu-$*.sum)

# each bug of test/cuda_bugs.txt is put into a kernel and must be caught
emu-bugs: deps-dev cuda-headers
	@$(MAKE) --no-print-directory -j$$(nproc) $(EMU_TESTS)
	@BUILD=$(BUILD) test/run.sh emu-bugs

test-ranks test-faults: test-%: deps
	@$(MAKE) --no-print-directory -j$$(nproc) megatrain
	@BUILD=$(BUILD) test/run.sh $*

test-launchers: deps-launchers
	@$(MAKE) --no-print-directory -j$$(nproc) megatrain
	@BUILD=$(BUILD) test/run.sh launchers

soak: deps-dev
	@$(MAKE) --no-print-directory -j$$(nproc) megatrain
	@BUILD=$(BUILD) test/run.sh soak

test-slow test-files test-grid: test-%: deps-dev
	@$(MAKE) --no-print-directory -j$$(nproc) megatrain $(TESTS) $(if $(filter test-slow,$@),$(BENCHES))
	@BUILD=$(BUILD) test/run.sh $*

# (the plain C kernels without optimisation: instrumented and optimised they compile for a quarter of an hour)
asan: deps-dev
	@$(MAKE) --no-print-directory -j$$(nproc) BUILD=build-asan CUDA=0 FRAMES= OPT="-O1 -g1" VEC_OPT=-O1 ASAN_GEMM_OPT=-O2 c_FLAGS=-O0 \
	    EXTRA_CFLAGS="-fsanitize=address,undefined -fno-sanitize=$(ASAN_SEES) -fno-sanitize-recover=all -fno-omit-frame-pointer" \
	    EXTRA_LDFLAGS="-fsanitize=address,undefined" $(TESTS:$(BUILD)/%=build-asan/%)
	@BUILD=build-asan test/run.sh asan

bench: deps-dev
	@$(MAKE) --no-print-directory -j$$(nproc) megatrain $(BENCHES)
	@BUILD=$(BUILD) bench/run.py

lint: deps-dev hdr-check
	@CUDA=$(CUDA) BUILD=$(BUILD) scripts/check-kernels.sh
	@scripts/check-layers.sh
	@scripts/check-style.sh
	@/usr/bin/python3 scripts/architecture.py --check
	@scripts/figures.py --check
	@/usr/bin/python3 test/tools/models_page.py check .
	@scripts/toys.py --places

cuda-12:
	@scripts/install-deps.sh cuda-12
	@BUILD=$(BUILD) scripts/cuda-12.sh

toys: deps
	@BUILD=$(BUILD) scripts/toys.py

pictures:
	@/usr/bin/python3 scripts/architecture.py

published: $(BUILD)/bench/bench_published
	@$< --moves --fit | bench/published/page.py

figures:
	@scripts/figures.py

fmt:
	@clang-format -i $(HEADERS) $(SRC) $(CPU_SRC) $(CXX_SRC) main.c

# each header compiles alone, as C17 and as C++17 (ops.def's designated arguments are C only)
hdr-check:
	@for h in $(filter-out src/cpu/%,$(HEADERS)); do \
	    echo "#include \"$${h#src/}\"" | $(CC) $(CFLAGS) -MF /dev/null -Werror -x c -fsyntax-only - || exit 1; done
	@for h in $(filter-out src/cpu/%,$(HEADERS)); do \
	    echo "#include \"$${h#src/}\"" | g++ -std=gnu++17 -fopenmp -D_GNU_SOURCE -Isrc -Wall -x c++ -fsyntax-only - || exit 1; done
	@for h in $(filter-out src/cpu/vec_%,$(filter src/cpu/%,$(HEADERS))); do for i in $(ISAS); do \
	    case $$i in avx512) f="$(avx512_FLAGS)";; avx2) f="$(avx2_FLAGS)";; *) f="$(c_FLAGS)";; esac; \
	    echo "#include \"$${h#src/}\"" | $(CC) $(CFLAGS) $$f -MF /dev/null -Wno-unused-function -DCPU_ISA=$$i -DCPU_ISA_$$i \
	    -x c -fsyntax-only - || exit 1; done; done

# what is installed, and from where; uninstall removes these files, and the folders that are then empty
INSTALLED = $(DESTDIR)$(PREFIX)
SHARED    = $(INSTALLED)/share/megatrain
DOCUMENTS = $(INSTALLED)/share/doc/megatrain

$(BUILD)/installed/megatrain: megatrain
	@mkdir -p $(@D)
	@echo "  LD $@"
	@$(CC) $(LDFLAGS) -o $@ $(BUILD)/main.o $(BUILD)/libmegatrain.a $(subst $(RPATH),$(RUNPATH),$(LIBS))

install: all
	@$(MAKE) --no-print-directory $(BUILD)/installed/megatrain
	install -D $(BUILD)/installed/megatrain "$(INSTALLED)/bin/megatrain"
	install -d "$(INSTALLED)/share/man/man1" "$(INSTALLED)/share/bash-completion/completions"
	./megatrain help --man >"$(INSTALLED)/share/man/man1/megatrain.1"
	./megatrain help --bash >"$(INSTALLED)/share/bash-completion/completions/megatrain"
	install -d "$(SHARED)/config/devices" "$(SHARED)/scripts/slurm" "$(DOCUMENTS)/docs"
	install -m 644 config/*.ini "$(SHARED)/config"
	install -m 644 config/devices/*.ini "$(SHARED)/config/devices"
	install scripts/launch.sh "$(SHARED)/scripts"
	install scripts/slurm/* "$(SHARED)/scripts/slurm"
	install -m 644 README.md LICENSE "$(DOCUMENTS)"
	install -m 644 docs/*.md docs/*.svg "$(DOCUMENTS)/docs"

uninstall:
	rm -f "$(INSTALLED)/bin/megatrain" "$(INSTALLED)/share/man/man1/megatrain.1"
	rm -f "$(INSTALLED)/share/bash-completion/completions/megatrain"
	for file in config/*.ini config/devices/*.ini scripts/launch.sh scripts/slurm/*; do rm -f "$(SHARED)/$$file"; done
	for file in README.md LICENSE docs/*.md docs/*.svg; do rm -f "$(DOCUMENTS)/$$file"; done
	for folder in config/devices config scripts/slurm scripts .; do rmdir "$(SHARED)/$$folder" 2>/dev/null || true; done
	rmdir "$(DOCUMENTS)/docs" "$(DOCUMENTS)" "$(SHARED)" 2>/dev/null || true

clean:
	rm -rf $(BUILD) build-asan build-lint megatrain

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
