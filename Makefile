# megatrain
#
#   make            builds ./megatrain              make test       builds and runs all quick tests
#   make demo       trains on real text             make test-slow  mutants, layout controls, GPT-2 against PyTorch
#   make bench      speed beside PyTorch, OpenBLAS  make lint       format, warnings, layers, headers alone
#   make deps       installs what is missing        make asan       the tests under ASan and UBSan
#
# BUILD= chooses the folder of objects. Every target that needs packages installs them first (make deps).

BUILD   ?= build
ifeq ($(origin CC),default)
CC      := gcc
endif
WARN    := -Wall -Wextra -Wshadow -Wvla -Wstrict-prototypes -Wmissing-prototypes -Wno-missing-field-initializers
OPT     ?= -O2 -g
CFLAGS  := -std=gnu17 $(OPT) -ffp-contract=off -fno-math-errno -fopenmp -D_GNU_SOURCE -Isrc -MMD -MP $(WARN) $(EXTRA_CFLAGS)
LDFLAGS := -fopenmp $(EXTRA_LDFLAGS)
LIBS    := -linih -ljansson -lpcre2-8 -lutf8proc -ldl -lpthread -lm
PREFIX  ?= /usr/local

# src/cpu/ is built three times, once for each instruction set (src/cpu/isa.h)
ISAS         := avx512 avx2 c
avx512_FLAGS := -O3 -mavx512f -mavx512dq -mavx512vl -mavx512bw -mfma -mprefer-vector-width=512
avx2_FLAGS   := -O3 -mavx2 -mfma
c_FLAGS      := -O2

SRC     := $(sort $(filter-out src/cpu/%,$(wildcard src/*/*.c)))
CPU_SRC := $(sort $(wildcard src/cpu/*.c))
OBJ     := $(SRC:%.c=$(BUILD)/%.o) $(foreach i,$(ISAS),$(CPU_SRC:src/cpu/%.c=$(BUILD)/src/cpu/$(i)/%.o))
TESTS   := $(patsubst test/%.c,$(BUILD)/test/%,$(sort $(wildcard test/test_*.c)))
BENCHES := $(patsubst bench/%.c,$(BUILD)/bench/%,$(sort $(wildcard bench/bench_*.c)))
HEADERS := $(sort $(wildcard src/*/*.h))

.PHONY: all deps deps-dev demo test test-slow bench asan lint fmt hdr-check install clean
.SECONDARY:

all: deps
	@$(MAKE) --no-print-directory -j$$(nproc) megatrain

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

define CPU_RULE
$(BUILD)/src/cpu/$(1)/%.o: src/cpu/%.c
	@mkdir -p $$(@D)
	@echo "  CC $$< ($(1))"
	@$(CC) $(CFLAGS) $($(1)_FLAGS) -DCPU_ISA=$(1) -DCPU_ISA_$(1) -c -o $$@ $$<
endef
$(foreach i,$(ISAS),$(eval $(call CPU_RULE,$(i))))

$(BUILD)/test/%: test/%.c $(BUILD)/libmegatrain.a
	@mkdir -p $(@D)
	@echo "  CC $<"
	@$(CC) $(CFLAGS) -Itest -o $@ $< $(BUILD)/libmegatrain.a $(LDFLAGS) $(LIBS)

$(BUILD)/bench/%: bench/%.c $(BUILD)/libmegatrain.a
	@mkdir -p $(@D)
	@echo "  CC $<"
	@$(CC) $(CFLAGS) -o $@ $< $(BUILD)/libmegatrain.a $(LDFLAGS) $(LIBS)

deps:
	@scripts/install-deps.sh

deps-dev:
	@scripts/install-deps.sh dev

demo: all
	@$(MAKE) --no-print-directory $(BUILD)/split_text
	@BUILD=$(BUILD) scripts/demo.sh

$(BUILD)/split_text: scripts/split_text.c
	@mkdir -p $(@D)
	$(CC) -std=gnu17 -O2 $(WARN) -o $@ $<

test: deps
	@$(MAKE) --no-print-directory -j$$(nproc) megatrain $(TESTS)
	@BUILD=$(BUILD) test/run.sh quick

test-slow: deps-dev
	@$(MAKE) --no-print-directory -j$$(nproc) megatrain $(TESTS)
	@BUILD=$(BUILD) test/run.sh slow

# (the plain C kernels without optimisation: instrumented and optimised they compile for a quarter of an hour)
asan: deps-dev
	@$(MAKE) --no-print-directory -j$$(nproc) BUILD=build-asan OPT="-O1 -g" \
	    EXTRA_CFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer" c_FLAGS=-O0 \
	    EXTRA_LDFLAGS="-fsanitize=address,undefined" $(TESTS:$(BUILD)/%=build-asan/%)
	@BUILD=build-asan test/run.sh asan

bench: deps-dev
	@$(MAKE) --no-print-directory -j$$(nproc) $(BENCHES)
	@BUILD=$(BUILD) bench/run.py

lint: deps-dev hdr-check
	@scripts/check-layers.sh
	@scripts/check-style.sh

fmt:
	@clang-format -i $(HEADERS) $(SRC) $(CPU_SRC) main.c

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

install: all
	install -D megatrain $(DESTDIR)$(PREFIX)/bin/megatrain

clean:
	rm -rf $(BUILD) build-asan megatrain

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
