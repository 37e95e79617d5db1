/* Files of config/devices: every one that ships reads; which fits a GPU by its name; what is wrong in one is said. */
#include "test.h"

#include "scratch.h"
#include "config/config_device.h"

TEST(a_gpu_by_the_name_that_its_driver_gives)
{
    static const struct {
        const char *gpu, *file;
        double bf16;
    } cases[] = {
        { "NVIDIA A100-SXM4-40GB", "a100-40", 312 },
        { "NVIDIA A100-SXM4-80GB", "a100", 312 },
        { "NVIDIA A100 80GB PCIe", "a100", 312 },
        { "NVIDIA H100 80GB HBM3", "h100", 989 },
        { "NVIDIA H100 PCIe", "h100-pcie", 756 },
        { "NVIDIA H100 NVL", "h100-nvl", 835 },
        { "NVIDIA H200", "h200", 989 },
        { "NVIDIA B200", "b200", 2250 },
        { "NVIDIA GB200", "gb200", 2500 },
        { "NVIDIA B300 SXM6 AC", "b300", 2250 },
        { "NVIDIA GB300", "gb300", 2500 },
        { "NVIDIA L40S", "l40s", 362 },
        { "NVIDIA GeForce RTX 4090", "4090", 165.2 },
        { "NVIDIA GeForce RTX 5090", "5090", 209.5 },
        { "NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000", 500 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        DeviceFile f = { 0 };
        CHECK_MSG(device_file_match(cases[i].gpu, &f), "%s", cases[i].gpu);
        CHECK_MSG(strcmp(f.name, cases[i].file) == 0, "%s: %s", cases[i].gpu, f.name);
        CHECK_CLOSE(f.bf16_tflops, cases[i].bf16, 1e-12, "%s", cases[i].gpu);
    }
    DeviceFile f;
    CHECK(!device_file_match("NVIDIA GeForce GTX 1080", &f));
}

TEST(by_name_in_any_case_and_by_path)
{
    DeviceFile name, path;
    OK(device_file_read("H100", &name));
    OK(device_file_read("config/devices/h100.ini", &path));
    CHECK(name.memory_mib == 81559 && name.sold_gb == 80 && name.fp32_tflops == 67);
    CHECK(path.memory_mib == name.memory_mib && strcmp(path.name, "h100") == 0);
    FAILS(device_file_read("h1000", &name), ERR_CONFIG, "none that is known");
    FAILS(device_file_read("none/of.ini", &name), ERR_CONFIG, "no file");
}

TEST(what_is_wrong_in_a_file_is_said)
{
    static const struct {
        const char *text, *says;
    } cases[] = {
        { "[device]\nsold_gb = 80\n", "memory_mib is missing" },
        { "[device]\nmemory_mib = lots\n", ":2: not a line of a device" },
        { "[device]\nmemory_mib = nan\n", ":2: not a line" },
        { "[device]\nmemory_mib = 0\n", ":2: not a line" },
        { "[device]\n\nmemory = 5\n", ":3: not a line" },
        { "[gpu]\nmemory_mib = 5\n", ":2: not a line" },
        { "[device]\nmemory_mib = 5\nmatrix_share = 1.01\n", ":3: not a line" },
        { "[device]\nmemory_mib = 5\noverlap_cost = 1\n", ":3: not a line" },
        { "[device]\nmemory_mib = 5\nhost_devices = 0.5\n", ":3: not a line" },
        { "[device]\nmemory_mib = 5\nhopper = 2\n", "hopper = '2' must be 1, or left out" },
        { "[device]\nmemory_mib = 5\nlink_gb_s = -1\n",
          ":3: not a line of a device: link_gb_s = '-1' is no number above 0" },
        { "[device]\nmemory_mib = 5\nlink_gb_s = 1e-300\n", "is no number above 0" },
        { "[device]\nmemory_mib = 5\nlink_gb_s = 1e300\n", ":3: not a line" },
        { "[device]\nmemory_mib = 5\nlink_gb_s = inf\n", ":3: not a line" },
        { "[device]\nmemory_mib = 5\nlink_gb_s =\n", ":3: not a line" },
        { "[device]\nmemory_mib = 5\nlink_gb_s = 5 GB\n", ":3: not a line" },
        { "[device]\nmemory_mib = 5\nlink_gbs = 5\n", ":3: not a line of a device: no key 'link_gbs'" },
        { "[device]\nmemory_mib = 0.5\n", "memory_mib = '0.5' must be whole" },
        { "[gpu]\nmemory_mib = 5\n", "no section 'gpu'" },
        { "memory_mib = 5\n", ":1: not a line" },
        { "[device\nmemory_mib = 5\n", ":1: not a line" },
        { "", "memory_mib is missing" },
        { "[device]\nmemory_mib = 5\n[op.gelu_fwd]\nus = f32 1x1 4096 nan\n",
          ":4: not a line of a device: [op.gelu_fwd]" },
        { "[device]\nmemory_mib = 5\n[op.gelu_fwd]\nus = f32 1x1 4096 -3\n", ":4: not a line" },
        { "[device]\nmemory_mib = 5\n[op.gelu_fwd]\nus = f32 1x1 4096 1e200\n", ":4: not a line" },
        { "[device]\nmemory_mib = 5\n[op.gelu_fwd]\nus = f32 0x1 4096 3\n", ":4: not a line" },
        { "[device]\nmemory_mib = 5\n[op.gelu_fwd]\nus = f32 99999999999x1 4096 3\n", ":4: not a line" },
        { "[device]\nmemory_mib = 5\n[op.gelu_fwd]\nus = f32 1x1 1x2x3x4 3\n", ":4: not a line" },
        { "[device]\nmemory_mib = 5\n[op.gelu_fwd]\nms = f32 1x1 4096 3\n", ":4: not a line" },
        { "[device]\nmemory_mib = 5\n[comm.barrier]\nus = 2 1x2 3\n", ":4: not a line" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        DeviceFile f;
        FAILS(device_file_read(write_text("own.ini", cases[i].text), &f), ERR_CONFIG, cases[i].says);
    }
    DeviceFile f;
    OK(device_file_read(write_text("own.ini", "[device]\nmemory_mib = 49152\n"), &f));
    CHECK(f.memory_mib == 49152 && strcmp(f.name, "own") == 0 && !f.sold_gb && !*f.match);
}

TEST_MAIN
