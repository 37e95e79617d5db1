/*
 * Hopper's instructions, between the emulator's own files (hopper.cpp, wgmma.cpp, tensor_map.cpp); kernels see
 * emu_hopper.h.
 */
#ifndef MEGATRAIN_EMU_HOPPER_INSIDE_H
#define MEGATRAIN_EMU_HOPPER_INSIDE_H

#include "runtime.h"

#include "emu_hopper.h"

namespace emu
{

/* What cuTensorMapEncodeTiled writes into a CUtensorMap here. No word but `data` looks like an address (check_words). */
struct MapBits {
    uint64_t magic;
    unsigned char *data;
    uint64_t stride[5]; /* bytes, of dimension 0 the element's */
    uint64_t dim[5];
    uint16_t boxes[5];                  /* see box() */
    uint8_t rank, element, swizzle, no; /* element, swizzle: bytes */
    uint16_t end;
    enum { MARK = 0x8000 };
    int box(int i) const { return boxes[i] & ~MARK; }
    void set_box(int i, unsigned n) { boxes[i] = static_cast<uint16_t>(n | MARK); }
    /* From a row of the box to the next in shared memory: a swizzle's rows lie as far apart where they are not full. */
    int pitch() const { return swizzle > 16 ? swizzle : box(0) * element; }
};
static_assert(sizeof(MapBits) <= sizeof(CUtensorMap), "fits");
const uint64_t MAP_MAGIC = 0x70616d726f736e74;

/* Swizzles take addresses, in shared memory, of 18 bits. */
inline uint32_t swizzled(uint32_t at, uint32_t span)
{
    return span < 32 ? at : at ^ ((at >> 7 & (span / 16 - 1)) << 4);
}

void need_hopper(const char *what, Site at);
void give_way(); /* in random orders, by chance: others may come first */
void wait_on(const void *what_for, const char *what, Site at); /* until wake(what_for) */
void wake(const void *what_for);

/* What threads stored and no fence has shown to copies and products yet. */
bool is_shown(const unsigned char *p, size_t size);
void show(const unsigned char *p, size_t size); /* what a copy brought */

/* Events: each is to happen once, at a time that the order chooses. */
void hopper_begin(unsigned threads); /* a block begins */
bool hopper_event();                 /* the next; false: there is none */
void hopper_chance();                /* in random orders, by chance, one */
void hopper_end();
void hopper_leave(Fiber *f); /* the thread returns */
void product_event(int warpgroup,
                   uint32_t warps); /* of these warps: the next group of products, to be computed */

void wgmma_start(unsigned threads);
void wgmma_run(int warpgroup, uint32_t warps); /* the event has come */
void wgmma_leave(Fiber *f);

} // namespace emu

#endif
