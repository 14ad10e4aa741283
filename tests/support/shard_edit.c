// Owns edits of shards on disk.
#include "tests/support/shard_edit.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/memory.h"

static hid_t must(hid_t id)
{
    if (id < 0)
        die("libhdf5 failed in a test's edit");
    return id;
}

static hid_t open_file(const char *path)
{
    return must(H5Fopen(path, H5F_ACC_RDWR, H5P_DEFAULT));
}

static void remove_attribute(hid_t file, const char *name)
{
    if (H5Aexists(file, name) > 0)
        must(H5Adelete(file, name));
}

void edit_remove_attribute(const char *path, const char *name)
{
    hid_t file = open_file(path);
    remove_attribute(file, name);
    must(H5Fclose(file));
}

static void write_attribute(const char *path, const char *name, hid_t type, hid_t memory,
                            const void *values, int64_t count)
{
    hid_t file = open_file(path);
    hsize_t extent = (hsize_t)count;
    remove_attribute(file, name);
    hid_t space = must(count > 0 ? H5Screate_simple(1, &extent, NULL) : H5Screate(H5S_SCALAR));
    hid_t id = must(H5Acreate2(file, name, type, space, H5P_DEFAULT, H5P_DEFAULT));
    must(H5Awrite(id, memory, values));
    must(H5Aclose(id));
    must(H5Sclose(space));
    must(H5Fclose(file));
}

void edit_text_attribute(const char *path, const char *name, const char *text, bool variable)
{
    hid_t type = must(H5Tcopy(H5T_C_S1));
    must(H5Tset_size(type, variable ? H5T_VARIABLE : strlen(text)));
    if (variable)
        must(H5Tset_cset(type, H5T_CSET_UTF8));
    else
        must(H5Tset_strpad(type, H5T_STR_NULLPAD));
    write_attribute(path, name, type, type, variable ? (const void *)&text : text, 0);
    must(H5Tclose(type));
}

void edit_integer_attribute(const char *path, const char *name, hid_t type, const int64_t *values,
                            int64_t count)
{
    write_attribute(path, name, type, H5T_NATIVE_INT64, values, count);
}

void edit_remove_dataset(const char *path, const char *name)
{
    hid_t file = open_file(path);
    must(H5Ldelete(file, name, H5P_DEFAULT));
    must(H5Fclose(file));
}

static void create_dataset(hid_t file, const char *name, int dims, const hsize_t *shape,
                           const struct edit_form *form, hid_t memory, const void *values)
{
    hid_t options = must(H5Pcreate(H5P_DATASET_CREATE));
    if (form->layout == EDIT_CHUNKED || form->layout == EDIT_DEFLATED)
        must(H5Pset_chunk(options, dims, form->chunk));
    if (form->layout == EDIT_DEFLATED)
        must(H5Pset_deflate(options, 4));
    if (form->layout == EDIT_COMPACT)
        must(H5Pset_layout(options, H5D_COMPACT));
    hid_t space = must(H5Screate_simple(dims, shape, NULL));
    hid_t id = must(H5Dcreate2(file, name, form->type, space, H5P_DEFAULT, options, H5P_DEFAULT));
    if (values != NULL)
        must(H5Dwrite(id, memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, values));
    must(H5Dclose(id));
    must(H5Sclose(space));
    must(H5Pclose(options));
}

void edit_rewrite_dataset(const char *path, const char *name, const struct edit_form *form)
{
    hid_t file = open_file(path);
    hid_t id = must(H5Dopen2(file, name, H5P_DEFAULT));
    hid_t space = must(H5Dget_space(id)), type = must(H5Dget_type(id));
    hsize_t shape[3] = {0};
    int dims = (int)must(H5Sget_simple_extent_dims(space, shape, NULL));
    hsize_t elements = 1, rows = form->rows > shape[0] ? form->rows : shape[0];
    for (int i = 1; i < dims; i++)
        elements *= shape[i];
    void *values = memory_alloc(rows * elements, H5Tget_size(type));
    must(H5Dread(id, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values));
    must(H5Dclose(id));
    must(H5Ldelete(file, name, H5P_DEFAULT));
    struct edit_form wanted = *form;
    wanted.type = form->type != 0 ? form->type : type;
    shape[0] = form->rows != 0 ? form->rows : shape[0];
    create_dataset(file, name, dims, shape, &wanted, type, values);
    free(values);
    must(H5Tclose(type));
    must(H5Sclose(space));
    must(H5Fclose(file));
}

void edit_replace_dataset(const char *path, const char *name, int dims, const hsize_t *shape,
                          hid_t memory, const void *values)
{
    hid_t file = open_file(path);
    if (H5Lexists(file, name, H5P_DEFAULT) > 0)
        must(H5Ldelete(file, name, H5P_DEFAULT));
    struct edit_form form = {.type = memory, .layout = EDIT_CONTIGUOUS};
    create_dataset(file, name, dims, shape, &form, memory, values);
    must(H5Fclose(file));
}

void edit_external_link(const char *path, const char *name, const char *other)
{
    hid_t file = open_file(path);
    must(H5Ldelete(file, name, H5P_DEFAULT));
    must(H5Lcreate_external(other, name, file, name, H5P_DEFAULT, H5P_DEFAULT));
    must(H5Fclose(file));
}

void edit_byte(const char *path, int64_t offset, unsigned char value)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || pwrite(fd, &value, 1, (off_t)offset) != 1)
        die("%s can not be edited", path);
    close(fd);
}

void edit_cut(const char *path, int64_t size)
{
    if (truncate(path, (off_t)size) != 0)
        die("%s can not be cut", path);
}
