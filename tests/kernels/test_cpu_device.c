#include "kernels/device.h"
#include <criterion/criterion.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>

static struct device *open_device(size_t limit)
{
    struct device *device = NULL;
    int rc = cpu_device_ops()->open(&(struct device_config){.n_threads = 2, .isa = CPU_ISA_PLAIN, .memory_limit = limit}, &device);
    cr_assert_eq(rc, 0);
    return device;
}

Test(cpu_device, test_accounting_is_exact_by_tag_and_in_total)
{
    const struct device_ops *ops = cpu_device_ops();
    struct device *device = open_device(0);
    struct device_properties properties;
    ops->properties(device, &properties);
    struct device_memory_stats stats;
    ops->memory_stats(device, &stats);
    cr_assert_eq(stats.total_now, properties.fixed_bytes);
    cr_assert_eq(stats.now[MEM_WORKSPACE], properties.fixed_bytes);

    void *a, *b, *c;
    cr_assert_eq(ops->alloc(device, MEM_WEIGHTS, 1000001, &a), 0);
    cr_assert_eq(ops->alloc(device, MEM_BRIDGE, 3 << 20, &b), 0);
    cr_assert_eq(ops->alloc(device, MEM_WEIGHTS, 7, &c), 0);
    cr_assert(((uintptr_t)a | (uintptr_t)b | (uintptr_t)c) % 64 == 0);
    memset(a, 1, 1000001);
    memset(b, 2, 3 << 20);
    ops->free(device, a);
    ops->memory_stats(device, &stats);
    cr_assert_eq(stats.now[MEM_WEIGHTS], 7);
    cr_assert_eq(stats.peak[MEM_WEIGHTS], 1000008);
    cr_assert_eq(stats.peak[MEM_BRIDGE], 3 << 20);
    cr_assert_eq(stats.total_now, properties.fixed_bytes + 7 + (3 << 20));
    cr_assert_eq(stats.total_peak, properties.fixed_bytes + 1000008 + (3 << 20));
    cr_assert_eq(stats.n_allocations, 3);

    ops->reset_peaks(device);
    ops->memory_stats(device, &stats);
    cr_assert_eq(stats.peak[MEM_WEIGHTS], 7);
    cr_assert_eq(stats.total_peak, stats.total_now);
    ops->free(device, b);
    ops->free(device, c);
    ops->free(device, NULL);
    ops->close(device);
}

Test(cpu_device, test_limit_refuses_and_leaves_the_output_alone)
{
    const struct device_ops *ops = cpu_device_ops();
    struct device *device = open_device(0);
    struct device_properties properties;
    ops->properties(device, &properties);
    ops->close(device);

    device = open_device(properties.fixed_bytes + 4096);
    void *a, *b = &b;
    cr_assert_eq(ops->alloc(device, MEM_FAST, 4096, &a), 0);
    cr_assert_eq(ops->alloc(device, MEM_FAST, 1, &b), -ENOMEM);
    cr_assert_eq(b, &b);
    cr_assert_eq(ops->alloc(device, MEM_FAST, SIZE_MAX, &b), -ENOMEM);
    ops->free(device, a);
    cr_assert_eq(ops->alloc(device, MEM_FAST, 4096, &a), 0);
    ops->free(device, a);
    ops->close(device);

    device = open_device(0);
    cr_assert_eq(ops->alloc(device, MEM_FAST, SIZE_MAX, &b), -ENOMEM);
    cr_assert_eq(ops->alloc(device, MEM_FAST, SIZE_MAX - 4096, &b), -ENOMEM);
    cr_assert_eq(ops->alloc(device, MEM_TAG_COUNT, 1, &b), -EINVAL);
    ops->close(device);
}

Test(cpu_device, test_open_rejects_bad_configurations)
{
    struct device *device;
    const struct device_ops *ops = cpu_device_ops();
    cr_assert_eq(ops->open(&(struct device_config){.n_threads = 0}, &device), -EINVAL);
    cr_assert_eq(ops->open(&(struct device_config){.n_threads = 257}, &device), -EINVAL);
    cr_assert_eq(ops->open(&(struct device_config){.n_threads = 1, .isa = (enum cpu_isa)9}, &device), -EINVAL);
    cr_assert_eq(ops->open(&(struct device_config){.n_threads = 1, .memory_limit = 1}, &device), -ENOMEM);
}

Test(cpu_device, test_properties_name_the_instruction_set)
{
    struct device *device = open_device(0);
    struct device_properties properties;
    cpu_device_ops()->properties(device, &properties);
    cr_assert_str_eq(properties.name, "cpu plain 2 threads");
    cr_assert_eq(properties.isa, CPU_ISA_PLAIN);
    cr_assert_gt(properties.memory_bytes, 1 << 20);
    cpu_device_ops()->close(device);
}

Test(cpu_device, test_streams_and_events_do_their_work_at_once)
{
    const struct device_ops *ops = cpu_device_ops();
    struct device *device = open_device(0);
    struct stream *stream;
    struct device_event *event;
    char from[100], to[100];
    memset(from, 5, sizeof from);
    cr_assert_eq(ops->stream_create(device, &stream), 0);
    cr_assert_eq(ops->event_create(device, &event), 0);
    cr_assert_eq(ops->copy(stream, to, from, sizeof to), 0);
    cr_assert_eq(ops->copy_batch(stream, (const struct device_copy[]){{to, from, 1}, {to + 1, from + 1, 0}}, 2), 0);
    cr_assert_eq(ops->event_record(event, stream), 0);
    cr_assert_eq(ops->stream_wait(stream, event), 0);
    cr_assert_eq(memcmp(to, from, sizeof to), 0);
    cr_assert_eq(ops->stream_sync(stream), 0);
    cr_assert_eq(ops->event_query(event), 1);
    cr_assert_eq(ops->event_sync(event), 0);
    ops->event_free(event);
    ops->stream_free(stream);
    ops->close(device);
}

static bool stop_at_once(size_t done_bytes, void *arg)
{
    *(size_t *)arg = done_bytes;
    return false;
}

Test(cpu_device, test_host_memory_is_plain_memory)
{
    const struct device_ops *ops = cpu_device_ops();
    struct device *device = open_device(0);
    size_t done = 0;
    void *memory;
    cr_assert_eq(ops->host_alloc(device, 1000, &memory), 0);
    memset(memory, 1, 1000);
    cr_assert_eq(ops->host_register(device, memory, 1000, stop_at_once, &done), -ECANCELED);
    cr_assert_eq(done, 1000);
    cr_assert_eq(ops->host_register(device, memory, 1000, NULL, NULL), 0);
    ops->host_unregister(device, memory);
    ops->host_free(device, memory);
    ops->host_free(device, NULL);
    ops->close(device);
}

Test(cpu_device, test_tags_have_names)
{
    cr_assert_str_eq(mem_tag_name(MEM_WEIGHTS), "weights");
    cr_assert_str_eq(mem_tag_name(MEM_PAGE_CACHE), "page_cache");
    cr_assert_str_eq(mem_tag_name(MEM_LIBRARIES), "libraries");
    cr_assert_str_eq(mem_tag_name(MEM_TAG_COUNT), "unknown");
}
