/* Starts a checkpoint and waits for its outcome, which is returned. */
#ifndef MEGATRAIN_TEST_CKPT_SAVE_H
#define MEGATRAIN_TEST_CKPT_SAVE_H

#include "ckpt/ckpt.h"

static inline Err ckpt_save(Ckpt *c, const CkptMeta *meta)
{
    CkptOutcome o;
    TRY(ckpt_start(c, meta));
    return ckpt_collect(c, true, &o) && o.err ? err_again(&o.why, o.err) : ERR_OK;
}

#endif
