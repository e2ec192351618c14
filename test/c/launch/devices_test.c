#include "launch/workers/machine.h"
#include "machine.h"

/* GPUs as the driver shows them; the address's bus is 0x10 * (i + 1), the minor number i. */
static char *machine_with(int count, bool device_files)
{
    char *root = machine_make();
    for (int i = 0; i < count; i++) {
        char text[256];
        (void)snprintf(text, sizeof text,
                       "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-%d%d%d0aaaa-bbbb\n"
                       "Bus Location: \t 0000:%x0:00.0\nDevice Minor: \t %d\n",
                       i / 2, i / 2, i, i + 1, i);
        machine_file(root, text, "proc/driver/nvidia/gpus/0000:%x0:00.0/information", i + 1);
        (void)snprintf(text, sizeof text, "%d\n", i % 2);
        machine_file(root, text, "sys/bus/pci/devices/0000:%x0:00.0/numa_node", i + 1);
        if (device_files) {
            machine_gpu(root, i);
        }
    }
    machine_device(root, "nvidiactl");
    return root;
}

/* The names that are found, with blanks between; "-" if there are none. */
static void check_found(const char *root, const char *visible, const char *expected)
{
    tddp_launch_devices found;
    char text[1024] = "-";
    CHECK_OK(tddp_launch_devices_find(root, visible, &found));
    for (int i = 0, size = 0; found.count > 0 && i < found.named; i++) {
        size += snprintf(text + size, sizeof text - (size_t)size, "%s%s", i > 0 ? " " : "",
                         found.list[i].name);
    }
    CHECK_TEXT(text, expected);
    tddp_launch_devices_free(&found);
}

TEST(a_machine_without_gpus)
{
    char *root = machine_with(0, false);
    tddp_launch_devices found;
    check_found(root, NULL, "-");
    check_found(root, "0,1", "-");
    CHECK_OK(tddp_launch_devices_find(root, "0", &found));
    CHECK_INT(found.count, 0);
    tddp_launch_devices_free(&found);
    machine_remove(root);
}

TEST(all_gpus_where_nothing_is_said)
{
    char *root = machine_with(4, true);
    check_found(root, NULL, "0 1 2 3");
    machine_remove(root);
}

TEST(numbers_are_read_as_cuda_reads_them)
{
    char *root = machine_with(4, true);
    check_found(root, "", "-");
    check_found(root, "  ", "-");
    check_found(root, "0", "0");
    check_found(root, "2,0, 1 ", "2 0 1");
    check_found(root, "3, 1x", "3 1x"); /* as strtol reads it */
    check_found(root, "0,-1,2", "0");   /* what is below 0 ends the list */
    check_found(root, "-1", "-");
    check_found(root, "0,7,1", "0"); /* so does a GPU that does not exist */
    check_found(root, "0,,1", "0");
    check_found(root, "1,0,1", "-"); /* twice: none at all */
    check_found(root, "none", "-");
    check_found(root, "NoDevFiles", "-");
    check_found(root, "0,GPU-0000", "0"); /* another kind ends the list */
    check_found(root, "99999999999999999999", "-");
    machine_remove(root);
}

TEST(identifiers_may_be_shortened)
{
    char *root = machine_with(4, true);
    check_found(root, "GPU-1120aaaa-bbbb", "GPU-1120aaaa-bbbb");
    check_found(root, "GPU-112, GPU-000", "GPU-112 GPU-000");
    check_found(root, "GPU-11", "-"); /* could be either of two */
    check_found(root, "GPU-000,GPU-77,GPU-112", "GPU-000");
    check_found(root, "GPU-000,GPU-0000", "-"); /* the same twice */
    check_found(root, "GPU-000,1", "GPU-000");
    machine_remove(root);
}

TEST(instances_of_a_gpu)
{
    char *root = machine_with(1, true);
    tddp_launch_devices found;
    check_found(root, "MIG-1a,MIG-GPU-00/1/0", "MIG-1a MIG-GPU-00/1/0");
    check_found(root, "MIG-1a,0", "MIG-1a");
    check_found(root, "MIG-1a,MIG-1a", "-");
    CHECK_OK(tddp_launch_devices_find(root, "MIG-1a,MIG-1b", &found));
    CHECK_INT(found.named, 2);
    CHECK_INT(found.count, 1);
    tddp_launch_devices_free(&found);
    machine_remove(root);
}

/* A container sees all GPUs in the driver's folder, and device files for its own. */
TEST(a_containers_gpus)
{
    char *root = machine_with(4, false);
    tddp_launch_devices found;
    check_found(root, NULL, "-"); /* none is given to it */
    check_found(root, "0,1", "-");
    CHECK_OK(tddp_launch_devices_find(root, NULL, &found));
    CHECK_INT(found.count, 0);
    tddp_launch_devices_free(&found);
    machine_file(root, "", "dev/nvidia0"); /* no device */
    check_found(root, NULL, "-");
    machine_gpu(root, 1);
    machine_gpu(root, 3);
    check_found(root, NULL, "0 1");
    check_found(root, "0,1,2", "0 1");
    check_found(root, "GPU-113", "GPU-113");
    check_found(root, "GPU-000", "-");
    CHECK_OK(tddp_launch_devices_find(root, NULL, &found));
    CHECK_INT(found.list[0].node, 1);
    tddp_launch_devices_free(&found);
    machine_remove(root);
}

TEST(device_files_alone)
{
    char *root = machine_make();
    machine_gpu(root, 0);
    machine_gpu(root, 10);
    machine_device(root, "nvidia-uvm");
    check_found(root, NULL, "0 1");
    check_found(root, "1", "1");
    machine_remove(root);
}

/* Drivers that show no GPU in files: what the variable says is believed. */
TEST(uncounted_gpus)
{
    char *root = machine_make();
    machine_file(root, "", "dev/dxg");
    check_found(root, NULL, "0");
    check_found(root, "0,1", "0 1");
    check_found(root, "", "-");
    machine_remove(root);
}

TEST(numa_nodes_of_gpus)
{
    char *root = machine_with(3, true);
    tddp_launch_devices found;
    machine_file(root, "Device Minor: 3\n", "proc/driver/nvidia/gpus/0000:C1:00.0/information");
    machine_file(root, "1\n", "sys/bus/pci/devices/0000:c1:00.0/numa_node");
    machine_gpu(root, 3);
    CHECK_OK(tddp_launch_devices_find(root, "1,2,3,0", &found));
    CHECK_INT(found.count, 4);
    CHECK_INT(found.list[0].node, 1);
    CHECK_INT(found.list[1].node, 0);
    CHECK_INT(found.list[2].node, 1);
    CHECK_INT(found.list[3].node, 0);
    tddp_launch_devices_free(&found);
    machine_remove(root);
}
