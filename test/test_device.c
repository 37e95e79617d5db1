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

/* On the CPU a copy is made when its end is waited for: till then its source and where it goes are as they were. */
TEST(copies_are_made_when_they_are_waited_for)
{
    enum { COPIES = 20 }; /* more than wait at once */
    Device dev;
    Event end[COPIES];
    int device[COPIES], *host;
    void *p;
    OK(device_open(&dev, (DeviceChoice){ .threads = 1 }));
    OK(device_host_alloc(&dev, COPIES * (int64_t)sizeof *host, &p));
    host = p;
    for (int i = 0; i < COPIES; i++) {
        event_init(&end[i]);
        device[i] = i + 1;
        CHECK(host[i] == 0);
        OK(device_read_later(&dev.copies, &host[i], &device[i], sizeof *host));
        OK(device_mark(&dev.copies, &end[i]));
    }
    device[17] = 100;
    OK(stream_wait(&dev.stream, &end[17]));
    for (int i = 0; i < COPIES; i++) CHECK(host[i] == (i == 17 ? 100 : i < 17 ? i + 1 : 0));
    OK(event_wait(&end[COPIES - 1], 0));
    CHECK(host[18] == 19 && host[19] == 20);
    OK(device_write_later(&dev.copies, &device[0], &host[19], sizeof *host));
    OK(device_mark(&dev.copies, &end[0]));
    CHECK(device[0] == 1);
    OK(stream_wait(&dev.stream, &end[0]));
    CHECK(device[0] == 20);
    OK(device_read_later(&dev.stream, &host[0], &device[0], sizeof *host)); /* (ops run at once) */
    CHECK(host[0] == 20);
    for (int i = 0; i < COPIES; i++) event_release(&end[i]);
    device_host_free(&dev, p);
    device_close(&dev);
}

TEST_MAIN
