// What control groups and limits leave of the machine's memory: made-up trees of both versions.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "base/host_memory.h"
#include "base/memory.h"
#include "tests/support/shard_fixture.h"

static char *folder;

static void make_folder(const char *name)
{
    char *path = memory_format("%s/%s", folder, name);
    assert_int_equal(mkdir(path, 0755), 0);
    free(path);
}

static void put(const char *name, const char *text)
{
    char *path = memory_format("%s/%s", folder, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
    free(path);
}

static void must_leave(const char *groups, size_t available, size_t total)
{
    size_t found_available, found_total;
    char *path = memory_format("%s/groups", folder);
    put("groups", groups);
    host_memory_groups(path, folder, &found_available, &found_total);
    assert_int_equal(found_available, available);
    assert_int_equal(found_total, total);
    free(path);
}

static int open_folder(void **state)
{
    (void)state;
    folder = fixture_folder();
    return 0;
}

static int close_folder(void **state)
{
    (void)state;
    fixture_folder_remove(folder);
    return 0;
}

static void put_version_2(const char *group, const char *limit, const char *usage)
{
    char *name = memory_format("%s/memory.max", group);
    put(name, limit);
    free(name);
    name = memory_format("%s/memory.current", group);
    put(name, usage);
    free(name);
}

// Slurm limits the job and leaves its steps free.
static void the_least_of_nested_groups_counts(void **state)
{
    (void)state;
    make_folder("job");
    make_folder("job/step");
    put_version_2("job/step", "max\n", "3000\n");
    must_leave("0::/job/step\n", SIZE_MAX, SIZE_MAX);
    put_version_2("job", "10000\n", "6000\n");
    must_leave("0::/job/step\n", 4000, 10000);
    put_version_2("job/step", "5000\n", "3000\n");
    must_leave("0::/job/step\n", 2000, 5000);
    must_leave("0::/job\n", 4000, 10000);
    must_leave("0::/\n", SIZE_MAX, SIZE_MAX);
}

static void pages_of_files_can_be_had(void **state)
{
    (void)state;
    make_folder("job");
    put_version_2("job", "10000\n", "9000\n");
    put("job/memory.stat",
        "anon 3000\nfile 6000\ninactive_file 2500\nactive_file 1500\nshmem 2000\n");
    must_leave("0::/job\n", 5000, 10000);
    put_version_2("job", "10000\n", "12000\n");
    put("job/memory.stat", "anon 12000\n");
    must_leave("0::/job\n", 0, 10000);
}

// A container sees its own group where the root is; its name is of the world outside.
static void groups_of_a_container_are_found(void **state)
{
    (void)state;
    put_version_2(".", "8000\n", "1000\n");
    must_leave("0::/docker/0123abcd\n", 7000, 8000);
    must_leave("0::/\n", 7000, 8000);
}

static void version_1_is_read_too(void **state)
{
    (void)state;
    make_folder("memory");
    make_folder("memory/slurm");
    put("memory/memory.limit_in_bytes", "9223372036854771712\n");
    put("memory/memory.usage_in_bytes", "70000\n");
    put("memory/slurm/memory.limit_in_bytes", "20000\n");
    put("memory/slurm/memory.usage_in_bytes", "15000\n");
    put("memory/slurm/memory.stat",
        "inactive_file 1\ntotal_inactive_file 600\ntotal_active_file 400\n");
    must_leave("5:cpu,cpuacct:/other\n4:memory:/slurm\n0::/\n", 6000, 20000);
    must_leave("5:cpu,cpuacct:/slurm\n4:memory:/slurm/job_1/step_0\n", 6000, 20000);
    must_leave("5:cpu,cpuacct:/slurm\n", SIZE_MAX, SIZE_MAX);
}

static void nothing_is_there(void **state)
{
    (void)state;
    size_t available, total;
    host_memory_groups("/nowhere", "/nowhere", &available, &total);
    assert_true(available == SIZE_MAX && total == SIZE_MAX);
    must_leave("", SIZE_MAX, SIZE_MAX);
    must_leave("nonsense\n0:\n:::\n", SIZE_MAX, SIZE_MAX);
}

static void this_machine_has_memory(void **state)
{
    (void)state;
    struct host_memory memory = host_memory_read();
    assert_true(memory.available > 0 && memory.available <= memory.total);
    assert_true(memory.total < SIZE_MAX);
}

static void address_space_is_shared_by_threads(void **state)
{
    (void)state;
    struct rlimit before, limit;
    assert_int_equal(getrlimit(RLIMIT_AS, &before), 0);
    limit = before;
    limit.rlim_cur = (rlim_t)1 << 46; // more than a sanitizer maps
    assert_int_equal(setrlimit(RLIMIT_AS, &limit), 0);
    size_t one = host_memory_address_space(1), eight = host_memory_address_space(8);
    assert_true(eight > 0 && eight < one && one < limit.rlim_cur);
    assert_int_equal(host_memory_address_space(1 << 30), 0);
    assert_int_equal(setrlimit(RLIMIT_AS, &before), 0);
    if (before.rlim_cur == RLIM_INFINITY)
        assert_true(host_memory_address_space(1) == SIZE_MAX);
}

#define TEST(function) cmocka_unit_test_setup_teardown(function, open_folder, close_folder)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(the_least_of_nested_groups_counts),
        TEST(pages_of_files_can_be_had),
        TEST(groups_of_a_container_are_found),
        TEST(version_1_is_read_too),
        TEST(nothing_is_there),
        TEST(this_machine_has_memory),
        TEST(address_space_is_shared_by_threads),
    };
    return cmocka_run_group_tests_name("host_memory", tests, NULL, NULL);
}
