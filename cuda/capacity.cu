/*
 * Choices that experts of limited capacity drop (device/ops.def, choice_drop; docs/moe.md).
 *
 * Mapping   a block for each list, the choices of one expert and run of rows. The weight behind which they are dropped
 *           is found digit by digit: of the keys, integers that order as the weights do, 8 bits a pass are counted in
 *           shared memory, from the highest on. Of the choices with just that weight the first are kept: their places
 *           among each other are counted by votes, warp after warp. Nothing depends on which thread comes first.
 * Traffic   a choice's number and weight in each of 5 passes, of which all but the first hit L1 or L2, and 4 bytes
 *           written: 65,536 tokens of 8 choices, 8 MB, 2 us at 4.3 TB/s; a list of 1,000 choices takes its block some
 *           40 barriers, so all together some 30 us.
 * Needs     nothing.
 */
#include "kernel.cuh"

constexpr int DROP_THREADS = 256, DROP_WARPS = DROP_THREADS / WARP;
constexpr int DIGIT_BITS = 8, DIGITS = 1 << DIGIT_BITS, KEY_BITS = 32;

struct Drop {
    Rows<int32_t> kept;
    Rows<const float> weight; /* data NULL: choices are kept by their places */
    const int32_t *choice;
    const int64_t *offset, *limit; /* limit: or NULL */
    int64_t runs, most;
    int K;
};

/* Keys above `key` are kept, and so many of those that equal it. */
struct Cut {
    uint32_t key;
    int64_t equal;
};

/* The order of src/cpu/capacity.c: a NaN is the least. */
__device__ __forceinline__ uint32_t weight_key(float x)
{
    const uint32_t bits = __float_as_uint(x + 0.0f); /* -0 is 0 */
    if (x != x) return 0;
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

__device__ __forceinline__ uint32_t key_of(const Drop &d, int64_t p)
{
    const int number = d.choice[p], n = number / d.K;
    return d.weight.data ? weight_key(d.weight.at(n)[number - n * d.K]) : 0;
}

/* The cut of the list [first, end), which has more than `most` choices. The whole block finds it. */
__device__ __forceinline__ Cut find_cut(const Drop &d, int64_t first, int64_t end, int64_t most)
{
    SHARED(int, count, [DIGITS]);
    SHARED(Cut, found, [1]);
    Cut cut = { 0, most };
    uint32_t known = 0; /* the bits that are found */
    for (int shift = KEY_BITS - DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
        for (int i = threadIdx.x; i < DIGITS; i += blockDim.x) count[i] = 0;
        __syncthreads();
        for (int64_t p = first + threadIdx.x; p < end; p += blockDim.x) {
            const uint32_t key = key_of(d, p);
            if ((key & known) == cut.key) atomicAdd(&count[key >> shift & (DIGITS - 1)], 1);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int digit = DIGITS - 1;
            while (count[digit] < cut.equal) cut.equal -= count[digit--];
            found[0] = { cut.key | static_cast<uint32_t>(digit) << shift, cut.equal };
        }
        __syncthreads();
        cut = found[0];
        known |= static_cast<uint32_t>(DIGITS - 1) << shift;
    }
    return cut;
}

__global__ void __launch_bounds__(DROP_THREADS) choice_drop_kernel(Drop d)
{
    SHARED(int, part, [DROP_WARPS]);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int64_t list = blockIdx.x, first = d.offset[list], end = d.offset[list + 1];
    const int64_t most = d.limit ? d.limit[list] : d.most;
    Cut cut = { most > 0 ? 0 : UINT32_MAX, most };
    if (d.weight.data && most > 0 && end - first > most) cut = find_cut(d, first, end, most);
    for (int64_t base = first, before = 0; base < end; base += DROP_THREADS) {
        const int64_t p = base + threadIdx.x;
        const uint32_t key = p < end ? key_of(d, p) : 0;
        const bool equal = p < end && key == cut.key;
        const unsigned same = __ballot_sync(ALL_LANES, equal);
        int64_t place = before + __popc(same & ((1u << lane) - 1)); /* among the equal */
        if (lane == 0) part[warp] = __popc(same);
        __syncthreads();
        for (int w = 0; w < DROP_WARPS; w++) {
            if (w < warp) place += part[w];
            before += part[w];
        }
        if (p < end) {
            const int number = d.choice[p], n = number / d.K;
            const bool kept = key > cut.key || (equal && place < cut.equal);
            d.kept.at(n)[number - n * d.K] = kept ? static_cast<int32_t>(list / d.runs) : -1;
        }
        __syncthreads(); /* part is written again */
    }
}

extern "C" Err cuda_choice_drop(Stream *s, const choice_drop_args *a)
{
    const int64_t lists = a->offset.dim[0] - 1;
    const Drop d = { rows_of<int32_t>(a->kept), rows_of<const float>(a->weight), data_of<const int32_t>(a->choice),
                     data_of<const int64_t>(a->offset), data_of<const int64_t>(a->limit), lists / a->experts, a->most,
                     static_cast<int>(a->kept.dim[1]) };
    if (lists % a->experts || (d.limit && a->limit.dim[0] != lists))
        return err_set(ERR_SHAPE, "choice_drop: %lld lists of %lld experts, limits for %lld",
                       static_cast<long long>(lists), static_cast<long long>(a->experts),
                       static_cast<long long>(d.limit ? a->limit.dim[0] : lists));
    if (lists) LAUNCH(choice_drop_kernel, grid_blocks(lists), DROP_THREADS, 0, cuda_stream(s), d);
    return ERR_OK;
}
