/* What the CUDA backend of a build finds on this machine, GPU or not. */
#include <string.h>

#include "device/device.h"
#include "test.h"

/* The library of products is no part of the program: there with all its functions, or missing with its name. */
TEST(blas_is_looked_up)
{
    const char *why = NULL;
    const bool found = device_cuda_blas(&why);
    CHECK(why && found == (why[0] == 0));
    if (!device_has_cuda()) CHECK(strstr(why, "no CUDA backend"));
    else if (!found) CHECK(strstr(why, "libcublasLt.so") && strstr(why, "cannot open shared object file"));
}

TEST(count_has_a_reason)
{
    char why[256] = "";
    const int count = device_cuda_count(why, sizeof why);
    CHECK(count > 0 || strstr(why, device_has_cuda() ? "CUDA finds no GPU: " : "no CUDA backend"));
}

/* Who tells tensors apart by their addresses, as widened copies do, must tell them apart in a dry run. */
TEST(allocations_of_the_null_device_lie_apart)
{
    Device dev;
    void *a, *b, *c;
    OK(device_open(&dev, (DeviceChoice){ .kind = DEVICE_NULL }));
    OK(device_alloc(&dev, (int64_t)1 << 61, &a));
    OK(device_alloc(&dev, 1, &b));
    OK(device_alloc(&dev, 64, &c));
    CHECK((char *)b - (char *)a >= (int64_t)1 << 61 && (char *)c > (char *)b);
    CHECK((uintptr_t)b % 4096 == 0 && (uintptr_t)c % 4096 == 0);
    device_close(&dev);
}

TEST_MAIN
