/* See threads.h. */
#include "train/threads.h"

#include <omp.h>
#include <stdlib.h>

#include "base/processors.h"

/* FLOP of a thread in 10 to 50 us, some times what it takes to begin together and to wait for the last. */
enum { FLOP_OF_A_THREAD = 1000000 };

int threads_useful(const MemoryPlan *plan) { return 1 + (int)(plan->flop_of_op / FLOP_OF_A_THREAD); }

int threads_of_rank(const Ranks *ranks, const MemoryPlan *plan)
{
    if (getenv("OMP_NUM_THREADS")) return omp_get_max_threads();
    const int share = ranks ? processors_share(ranks->cpu_sharers, ranks->local_size) : processors_share(1, 1);
    const int useful = threads_useful(plan);
    return useful < share ? useful : share;
}
