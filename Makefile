# megatrain. `make deps` installs what is missing, `make` builds ./megatrain, `make demo` trains on real text,
# `make test` proves it. BUILD= chooses the folder, SAN=asan|tsan a sanitizer build.
BUILD   ?= build
CC      ?= gcc
ifeq ($(origin CC),default)
CC      := gcc
endif
WARN    := -Wall -Wextra -Wshadow -Wvla -Wstrict-prototypes -Wmissing-prototypes -Wno-missing-field-initializers
OPT     ?= -O2 -g
CFLAGS  := -std=gnu17 $(OPT) -ffp-contract=off -fno-math-errno -fopenmp -D_GNU_SOURCE -Isrc -MMD -MP $(WARN) $(EXTRA_CFLAGS)
LDFLAGS := -fopenmp $(EXTRA_LDFLAGS)
LIBS    := -linih -ljansson -lpcre2-8 -lutf8proc -lpthread -lm

SRC     := $(filter-out src/cpu/%,$(wildcard src/*/*.c))
CPU_SRC := $(wildcard src/cpu/*.c)
OBJ     := $(SRC:%.c=$(BUILD)/%.o) $(foreach i,avx512 avx2 c,$(CPU_SRC:src/cpu/%.c=$(BUILD)/src/cpu/$(i)/%.o))
TESTS   := $(patsubst test/%.c,$(BUILD)/test/%,$(wildcard test/test_*.c))

avx512_FLAGS := -O3 -mavx512f -mavx512dq -mavx512vl -mavx512bw -mfma -mprefer-vector-width=512
avx2_FLAGS   := -O3 -mavx2 -mfma
c_FLAGS      := -O2

all: megatrain

megatrain: $(BUILD)/main.o $(BUILD)/libmegatrain.a
	$(CC) $(LDFLAGS) -o $@ $^ $(LIBS)

$(BUILD)/libmegatrain.a: $(OBJ)
	@rm -f $@
	@ar rcs $@ $^

$(BUILD)/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -c -o $@ $<

define CPU_RULE
$(BUILD)/src/cpu/$(1)/%.o: src/cpu/%.c
	@mkdir -p $$(@D)
	$(CC) $(CFLAGS) $($(1)_FLAGS) -DCPU_ISA=$(1) -DCPU_ISA_$(1) -c -o $$@ $$<
endef
$(foreach i,avx512 avx2 c,$(eval $(call CPU_RULE,$(i))))

$(BUILD)/test/%: test/%.c $(BUILD)/libmegatrain.a
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -Itest -o $@ $< $(BUILD)/libmegatrain.a $(LDFLAGS) $(LIBS)

.PHONY: all clean
.SECONDARY:
clean:
	rm -rf $(BUILD) megatrain

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
