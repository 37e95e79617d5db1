/*
 * The part of NCCL's interface that is used, declared here: so it takes no header of NCCL's to build, and one program
 * runs with every version from 2.21 on. Names and numbers are NCCL's own; test/test_nccl.sh compares them with the
 * headers that there are. Where one of those was included before, its types hold.
 *
 * The configuration has grown at its end from version to version, and says by its size and version how much of it
 * there is (nccl_config): a library takes what it knows and has its own values for the rest.
 *
 * Source: NCCL's user guide, chapter "NCCL API"; nccl.h of 2.21 to 2.28.
 */
#ifndef MEGATRAIN_CUDA_NCCL_API_H
#define MEGATRAIN_CUDA_NCCL_API_H

#include <cuda_runtime_api.h>
#include <limits.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef NCCL_H_
typedef struct ncclComm *ncclComm_t;

typedef struct {
    char internal[128];
} ncclUniqueId;

typedef enum {
    ncclSuccess,
    ncclUnhandledCudaError,
    ncclSystemError,
    ncclInternalError,
    ncclInvalidArgument,
    ncclInvalidUsage,
    ncclRemoteError,
    ncclInProgress
} ncclResult_t;

typedef enum { ncclUint8 = 1, ncclInt64 = 4, ncclUint64 = 5, ncclFloat32 = 7 } ncclDataType_t;
typedef enum { ncclSum = 0, ncclMax = 2 } ncclRedOp_t;

enum { NCCL_SPLIT_NOCOLOR = -1, NCCL_CONFIG_UNDEF_INT = INT_MIN };

typedef struct {
    size_t size;
    unsigned int magic, version;
    int blocking, cgaClusterSize, minCTAs, maxCTAs;
    const char *netName;
    int splitShare;
    int trafficClass;     /* from 2.25 on: in what was padding */
    const char *commName; /* this and what follows: from 2.27 on */
    int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs;
} ncclConfig_t;
#endif

/* The number as the library says it: 2.21.5 is 22105. */
#define NCCL_NUMBER(major, minor, patch) ((major) * 10000 + (minor) * 100 + (patch))
enum { NCCL_OLDEST = NCCL_NUMBER(2, 21, 0), NCCL_ORDERS = NCCL_NUMBER(2, 26, 0), NCCL_NAMES = NCCL_NUMBER(2, 27, 0) };
enum { NCCL_LISTS = NCCL_NUMBER(2, 24, 0) /* NCCL_ALGO by function */, NCCL_SHARES = NCCL_NUMBER(2, 30, 3) };
#define NCCL_MAGIC 0xcafebeefu

ncclResult_t ncclGetVersion(int *version);
ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *config);
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *out, ncclConfig_t *config);
ncclResult_t ncclCommFinalize(ncclComm_t comm);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error);
const char *ncclGetErrorString(ncclResult_t error);
const char *ncclGetLastError(ncclComm_t comm);

/* Counts are of elements: of each rank's share in AllGather and ReduceScatter. */
ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream);
ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream);
ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);

#ifdef __cplusplus
}
#endif

#endif
