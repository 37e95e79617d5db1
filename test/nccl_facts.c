/*
 * What NCCL's declarations amount to, a line each: of cuda/nccl_api.h, or with `-include nccl.h` of that header.
 * There the functions are declared twice, so that it compiles only if both mean the same. For test_nccl.sh.
 */
#include <stdio.h>

#include "nccl_api.h"

#ifndef NCCL_VERSION_CODE /* our own: all that there is */
#define NCCL_VERSION_CODE NCCL_NUMBER(99, 0, 0)
#define NCCL_CONFIG_INITIALIZER { .magic = NCCL_MAGIC }
#define OLD_BYTES offsetof(ncclConfig_t, commName)
#define OWN
#else
#define OLD_BYTES sizeof(ncclConfig_t)
#endif

#define SAY(fact) printf("%s %lld\n", #fact, (long long)(fact));
#define PLACE(member) SAY(offsetof(ncclConfig_t, member))

int main(void)
{
    const ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    SAY(ncclSuccess) SAY(ncclUnhandledCudaError) SAY(ncclSystemError) SAY(ncclInternalError) SAY(ncclInvalidArgument)
    SAY(ncclInvalidUsage) SAY(ncclRemoteError) SAY(ncclInProgress) SAY(sizeof(ncclResult_t))
    SAY(ncclUint8) SAY(ncclInt64) SAY(ncclUint64) SAY(ncclFloat32) SAY(sizeof(ncclDataType_t))
    SAY(ncclSum) SAY(ncclMax) SAY(sizeof(ncclRedOp_t))
    SAY(sizeof(ncclUniqueId)) SAY(NCCL_SPLIT_NOCOLOR) SAY(NCCL_CONFIG_UNDEF_INT) SAY(config.magic)
    PLACE(size) PLACE(magic) PLACE(version) PLACE(blocking) PLACE(cgaClusterSize) PLACE(minCTAs) PLACE(maxCTAs)
    PLACE(netName) PLACE(splitShare)
#if defined OWN || NCCL_VERSION_CODE < 22700
    printf("size before 2.27: %zu\n", OLD_BYTES);
#endif
#if NCCL_VERSION_CODE >= 22700
    PLACE(trafficClass) PLACE(commName) PLACE(collnetEnable) PLACE(CTAPolicy) PLACE(shrinkShare) PLACE(nvlsCTAs)
    printf("size from 2.27 on: %zu\n", offsetof(ncclConfig_t, nvlsCTAs) + sizeof config.nvlsCTAs);
#endif
#ifdef OWN
    if (sizeof config != offsetof(ncclConfig_t, nvlsCTAs) + sizeof config.nvlsCTAs) return 1;
#endif
    return 0;
}
