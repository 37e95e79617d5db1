/* CUDA's errors as ours; see device_cuda.h. */
#include "device_cuda.h"

#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

/* ---- whose error ---- */

enum { GPUS_MOST = 64 };
static char names[GPUS_MOST][96];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* As nvidia-smi writes them. A GPU that failed may not answer any more. */
void cuda_remember(int index, const struct cudaDeviceProp *p)
{
    const unsigned char *u = (const unsigned char *)p->uuid.bytes;
    if (index >= GPUS_MOST) return;
    pthread_mutex_lock(&lock);
    snprintf(names[index], sizeof names[index],
             ", %08X:%02X:%02X.0, GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
             (unsigned)p->pciDomainID, (unsigned)p->pciBusID, (unsigned)p->pciDeviceID, u[0], u[1], u[2], u[3], u[4],
             u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
    pthread_mutex_unlock(&lock);
}

static void name_gpu(char *out, size_t size)
{
    char host[64] = "";
    int index = 0;
    cudaGetDevice(&index);
    gethostname(host, sizeof host - 1);
    pthread_mutex_lock(&lock);
    snprintf(out, size, "GPU %d of %s%s", index, host, index < GPUS_MOST ? names[index] : "");
    pthread_mutex_unlock(&lock);
}

/* ---- what it means ---- */

#define RESET "its memory has an error: reset it by nvidia-smi --gpu-reset, replace it if it fails again"

/* Failures that no program causes, and what mends each. */
static const struct {
    cudaError_t code;
    const char *mend;
} failures[] = {
    { cudaErrorECCUncorrectable, RESET },
    { (cudaError_t)226, RESET }, /* cudaErrorContained, which CUDA 12.4 does not name */
    { cudaErrorNvlinkUncorrectable, "a link of GPUs fails: see nvidia-smi nvlink --errorcounters, reseat it" },
    { cudaErrorExternalDevice, "another GPU of the host failed: see nvidia-smi and the kernel's log for Xid" },
    { cudaErrorSystemNotReady, "its host is not ready: see nvidia-fabricmanager" },
    { cudaErrorUnknown, "see the kernel's log for Xid 79, off the bus: start the host again, then reseat it" },
};

static const char *mend_of(cudaError_t code)
{
    for (size_t i = 0; i < sizeof failures / sizeof *failures; i++)
        if (failures[i].code == code) return failures[i].mend;
    return NULL;
}

Err cuda_check(cudaError_t code, const char *what)
{
    char gpu[192];
    if (code == cudaSuccess) return ERR_OK;
    if (code == cudaErrorMemoryAllocation) return err_set(ERR_MEMORY, "%s: %s", what, cudaGetErrorString(code));
    const char *mend = mend_of(code);
    if (!mend)
        return err_set(ERR_DEVICE, "%s: %s (%s)", what, cudaGetErrorString(code), cudaGetErrorName(code)),
               err_hint("to find the kernel at fault run with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer");
    name_gpu(gpu, sizeof gpu);
    return err_set(ERR_GPU, "%s, in %s: %s (%s)", gpu, what, cudaGetErrorString(code), cudaGetErrorName(code)),
           err_hint("%s; until then keep jobs off the host (Slurm: sbatch --exclude)", mend);
}

Err cuda_ended(Err err, const char *what)
{
    const cudaError_t last = cudaGetLastError();
    return last != cudaSuccess && (!err || err == ERR_DEVICE) ? cuda_check(last, what) : err;
}
