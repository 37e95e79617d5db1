/*
 * Calls of a recurrence that hand on their state. Include it behind Sequence and Whole, sequence, run_forward and
 * run_backward, and the sizes CUT_ROWS, CUT_STATE and CUT_WINDOW (test_delta.c, test_kda.c, test_mamba.c).
 */
/* Cut at any window, rows and states have the bits of one call; and no row looks at what is behind it. */
static void check_cuts(bool documents)
{
    static Whole one, cut;
    Device dev;
    Sequence *s = sequence(documents);
    OK(device_open(&dev, (DeviceChoice){ .threads = 2 }));
    run_forward(&dev, s, &one, 0, CUT_ROWS, s->before);
    run_backward(&dev, s, &one, 0, CUT_ROWS, s->dafter);
    for (int64_t at = CUT_WINDOW; at < CUT_ROWS; at += CUT_WINDOW) {
        float state[CUT_STATE];
        memset(&cut, 0xFF, sizeof cut);
        run_forward(&dev, s, &cut, 0, at, s->before);
        memcpy(state, cut.after, sizeof state);
        run_forward(&dev, s, &cut, at, CUT_ROWS - at, state);
        run_backward(&dev, s, &cut, at, CUT_ROWS - at, s->dafter);
        memcpy(state, cut.dbefore, sizeof state);
        run_backward(&dev, s, &cut, 0, at, state);
        CHECK_MSG(!memcmp(&one, &cut, sizeof one), "cut at %d", (int)at);
    }
    for (int64_t T = 1; T < CUT_ROWS; T += 7) {
        memset(&cut, 0xFF, sizeof cut);
        run_forward(&dev, s, &cut, 0, T, s->before);
        CHECK_MSG(!memcmp(one.o, cut.o, (size_t)T * sizeof *one.o), "the first %d rows", (int)T);
    }
    device_close(&dev);
}
