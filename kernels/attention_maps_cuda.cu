// Owns what the launches of Hopper's kernels of attention need of the driver: descriptions of tensors by
// which the copy engine finds tiles, and the number of CTAs.
#include <string.h>

#include "kernels/attention_wgmma.cuh"

typedef CUresult encode_fn(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                           const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                           const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// From the driver, so that the program needs no library of it.
static encode_fn *encoder(void)
{
    void *function = NULL;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    cuda_check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                cudaEnableDefault, &found));
#else
    cuda_check(
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found));
#endif
    if (found != cudaDriverEntryPointSuccess)
        die("CUDA: the driver has no cuTensorMapEncodeTiled, 12.0 or newer is needed");
    return (encode_fn *)function;
}

// Dimensions and boxes from the innermost on; strides of all but the innermost, in elements.
static void map_make(encode_fn *encode, CUtensorMap *map, const void *tensor, int dimensions,
                     const int64_t *sizes, const int64_t *strides, const int *box)
{
    cuuint64_t size[3], stride[2];
    cuuint32_t boxes[3], steps[3] = {1, 1, 1};
    for (int i = 0; i < dimensions; i++) {
        size[i] = (cuuint64_t)sizes[i];
        boxes[i] = (cuuint32_t)box[i];
        if (i > 0)
            stride[i - 1] = (cuuint64_t)strides[i - 1] * sizeof(bf16_t);
    }
    CUresult status =
        encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, (cuuint32_t)dimensions, (void *)tensor, size,
               stride, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS)
        die("CUDA: cuTensorMapEncodeTiled fails with %d", (int)status);
}

static void map_queries(encode_fn *encode, const struct attention *op, CUtensorMap *map,
                        const void *tensor, int rows)
{
    int group = (int)(op->heads / op->kv_heads);
    int64_t sizes[] = {op->head_dim, op->heads, op->rows};
    int64_t strides[] = {op->head_dim, op->heads * op->head_dim};
    int box[] = {PANEL, group, rows / group};
    map_make(encode, map, tensor, 3, sizes, strides, box);
}

static void map_keys(encode_fn *encode, const struct attention *op, CUtensorMap *map,
                     const void *tensor, int64_t stride, int64_t count, int rows)
{
    int64_t sizes[] = {op->kv_heads * op->head_dim, count};
    int box[] = {PANEL, rows};
    map_make(encode, map, tensor, 2, sizes, &stride, box);
}

void attention_maps_make(const struct attention *op, int query_rows, int key_rows,
                         struct attention_maps *maps)
{
    encode_fn *encode = encoder();
    int64_t packed = op->kv_heads * op->head_dim;
    memset(maps, 0, sizeof(*maps));
    map_queries(encode, op, &maps->q, op->q, query_rows);
    if (op->dout != NULL)
        map_queries(encode, op, &maps->dout, op->dout, query_rows);
    if (op->block_size > 0) {
        map_keys(encode, op, &maps->k_block, op->k_block, packed, op->rows, key_rows);
        map_keys(encode, op, &maps->v_block, op->v_block, op->v_block_stride, op->rows, key_rows);
    }
    if (op->context == 0)
        return;
    map_keys(encode, op, &maps->k_context, op->k_context, packed, op->context, key_rows);
    map_keys(encode, op, &maps->v_context, op->v_context, op->v_context_stride, op->context,
             key_rows);
}

unsigned attention_hopper_ctas(int64_t items)
{
    int device = 0, processors = 0;
    cuda_check(cudaGetDevice(&device));
    cuda_check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    BUG_UNLESS(items <= INT32_MAX - 2 * processors);
    return grid_size(items < processors ? items : processors);
}
