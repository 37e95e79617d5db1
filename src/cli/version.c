/* --version, and the lines about libraries that doctor prints too. */
#include <gnu/libc-version.h>

#include "base/identity.h"
#include "base/json.h"
#include "base/version.h"
#include "cli/command.h"
#include "comm/gloo.h"
#include "data/libraries.h"
#include "device/device.h"

void version_print(FILE *out)
{
    char libraries[LIBRARIES_BYTES];
    uint32_t crc;
    fprintf(out, "megatrain %s\ncommit     %s\n", MEGATRAIN_VERSION, identity_commit());
    if (!identity_binary(&crc)) fprintf(out, "binary     %08x\n", crc);
    else fprintf(out, "binary     unknown (%s)\n", err_message());
    fprintf(out, "compiler   gcc %s, OpenMP %d\n", __VERSION__, _OPENMP);
    fprintf(out, "backends   cpu (");
    for (int isa = ISA_AVX512; isa < ISA_COUNT; isa++)
        fprintf(out, "%s%s%s", isa == ISA_AVX512 ? "" : ", ", isa_name((Isa)isa),
                isa == (int)isa_best() ? " in use" : "");
    fprintf(out, "), null%s\n", device_has_cuda() ? ", cuda" : "; no cuda");
    fprintf(out, "libraries  %s, %s, inih, Gloo %s, glibc %s\n", json_library(), data_libraries(libraries),
            gloo_version(), gnu_get_libc_version());
}
