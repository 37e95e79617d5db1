/* See config_arg.h. */
#include "cli/config_arg.h"

#include <stdlib.h>

#include "device/device.h"

Err config_arg(Config *c, const char *path, Words overrides, int64_t world_size)
{
    char why[256];
    return config_read(c, (ConfigSource){ .path = path,
                                          .gpus = device_cuda_count(why, sizeof why),
                                          .overrides = overrides.items,
                                          .override_count = overrides.count,
                                          .world_size = world_size });
}

/* The launchers of README, "Launchers"; a batch job's size alone says nothing, a step's does. */
Err single_process(void)
{
    static const char *const names[] = { "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE",
                                         "SLURM_STEP_NUM_TASKS" };
    for (int i = 0; i < 4; i++) {
        const char *text = getenv(names[i]);
        if (text && strtoll(text, NULL, 10) > 1)
            return err_set(ERR_CONFIG, "%s is '%s', and this command is a single process's", names[i], text),
                   err_hint("start it without a launcher");
        if (text) return ERR_OK;
    }
    return ERR_OK;
}
