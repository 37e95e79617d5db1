/* How many pairs of a query and a key attention works on: see step.h. */
#include "base/int64.h"
#include "device/step.h"

/* Keys, of `count`, that lie before the positions 1, 2, ... `last`, all together. Positions count from the first key
 * on. */
static int64_t keys_before(int64_t last, int64_t count)
{
    const int64_t inside = min64(max64(last, 0), count);
    return inside * (inside + 1) / 2 + max64(last - count, 0) * count;
}

/* A query sees what is before its end and not before its window's begin. */
int64_t spans_pairs(Spans q, Spans k, int64_t window)
{
    int64_t sum = 0;
    for (int i = 0; i < 4; i++) {
        const int64_t count = k.count[i % 2], begin = q.first[i / 2] - k.first[i % 2], end = begin + q.count[i / 2];
        sum += keys_before(end, count) - keys_before(begin, count);
        if (window > 0) sum -= keys_before(end - window, count) - keys_before(begin - window, count);
    }
    return sum;
}
