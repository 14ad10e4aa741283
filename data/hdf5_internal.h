// Shared by hdf5_file.c and hdf5_array.c.
#ifndef DATA_HDF5_INTERNAL_H
#define DATA_HDF5_INTERNAL_H

enum { HDF5_REASON_MAX = 240 };

// What libhdf5 says about the call that failed last, in its own words. Clears its error stack.
void hdf5_reason(char text[HDF5_REASON_MAX]);

#endif
