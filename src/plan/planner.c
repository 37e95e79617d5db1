/* See planner.h. */
#include "plan/planner.h"

#include <string.h>

#include "base/log.h"
#include "base/processors.h"
#include "device/device.h"
#include "device/product_speedup.h"

static void warn_of(const DeviceFile *d, const Config *c, ConfigId id, const char *was, bool here)
{
    char is[CONFIG_VALUE_BYTES];
    const char *word = config_value(c, id, is);
    const bool is_auto = !strcmp(word, "auto");
    const bool open = is_auto || c->origin[id].kind == ORIGIN_AUTO || c->origin[id].kind == ORIGIN_DEFAULT;
    if (is_auto && id == CFG_debug_isa) word = isa_name(isa_best());
    if (!*was || (open && !here) || !strcmp(word, was) || !strcmp(word, "auto")) return;
    log_warn("'%s' was measured with debug.%s=%s: how long products take with debug.%s=%s nobody measured, "
             "and what "
             "is predicted is of the former",
             d->name, config_key(id)->name, was, config_key(id)->name, word);
}

void planner_warn(const DeviceFile *d, const Config *c, bool here)
{
    const char *isa = d->points.isa, *used = isa_name(product_by_names(isa, "").isa);
    if (d->multiprocessors > 0 && config_has_delta(c))
        log_warn("times of Gated DeltaNet are estimates: its kernels have not been measured");
    if (d->multiprocessors > 0 && config_has_kda(c))
        log_warn("times of Kimi Delta Attention are estimates: its kernels have not been measured");
    if (d->multiprocessors > 0 && config_has_mamba(c))
        log_warn("times of Mamba-2 are estimates: its kernels have not been measured");
    if (!(d->processors > 0)) return;
    if (*isa && strcmp(used, isa) != 0)
        log_warn("'%s' was measured by %s, which this processor lacks: threads are taken to share products "
                 "as they do "
                 "by %s",
                 d->name, isa, used);
    warn_of(d, c, CFG_debug_isa, isa, here);
    if (config_has_dots(c)) warn_of(d, c, CFG_debug_dot, d->points.dot, here);
}

Err planner_open(Planner *p, const char *device, int ranks)
{
    *p = (Planner){ 0 };
    p->source = predict_source(&p->model);
    if (!device)
        return err_set(ERR_CONFIG, "plan --search asks how long things take on a device, and none is named"),
               err_hint("--device h100, or the path of a device's file");
    TRY(device_file_read(device, &p->device));
    return cost_open(&p->model, &p->device, ranks);
}

void planner_close(Planner *p) { device_file_release(&p->device); }

SearchQuestion planner_question(const Planner *p, const Config *base, int64_t world)
{
    enum { TP_MOST = 8, LESS_TOKENS = 4096, BATCH_MOST = 8 };
    const int host = (int)p->device.host_devices;
    return (SearchQuestion){ .base = base,
                             .world = world,
                             .limits = { .tp_most = host > 0 && host < TP_MOST ? host : TP_MOST,
                                         .cp_tokens = LESS_TOKENS,
                                         .batch_most = BATCH_MOST },
                             .memory = p->device.memory_mib << 20,
                             .libraries = !p->model.cpu,
                             .source = p->source,
                             .threads = processors_share(1, 1) };
}
