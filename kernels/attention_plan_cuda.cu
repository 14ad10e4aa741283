// Owns what is known before the gradients of keys and values are computed: the bounds of what each tile
// of queries sees, and the tiles of context keys in the order in which they start.
#include "kernels/attention_plan.cuh"

enum { COUNT_THREADS = 128, RANK_THREADS = 256 };

// A warp for each tile of queries.
static __global__ void bounds_kernel(struct attention op, struct query_matrix q,
                                     struct attention_plan plan)
{
    int tile = (int)(blockIdx.x * COUNT_THREADS + threadIdx.x) / WARP;
    if (tile >= plan.query_tiles)
        return;
    struct span_bounds b = {INT32_MAX, 0, 0, INT32_MAX};
    for (int i = threadIdx.x % WARP; i < plan.rows; i += WARP)
        bounds_add(&b, context_span(op, row_of(q, min(tile * plan.rows + i, q.count - 1))));
    b = warp_bounds(b);
    if (threadIdx.x % WARP == 0)
        plan.bounds[tile] = b;
}

static __global__ void count_kernel(struct attention_plan plan, int keys)
{
    int count = 0, first = (int)blockIdx.x * keys;
    for (int i = threadIdx.x; i < plan.query_tiles; i += COUNT_THREADS)
        count += may_see(plan.bounds[i], first, keys);
    count = block_sum<COUNT_THREADS>(count);
    if (threadIdx.x == 0)
        plan.counts[blockIdx.x] = count;
}

// order[rank of a tile] = tile; the most seen first, then the earlier.
static __global__ void rank_kernel(struct attention_plan plan)
{
    int tile = (int)(blockIdx.x * RANK_THREADS + threadIdx.x), rank = 0;
    if (tile >= plan.context_tiles)
        return;
    int count = plan.counts[tile];
    for (int i = 0; i < plan.context_tiles; i++)
        rank += plan.counts[i] > count || (plan.counts[i] == count && i < tile);
    plan.order[rank] = tile;
}

struct attention_plan attention_plan_make(struct stream *stream, const struct attention *op,
                                          const struct query_matrix &q, int rows, int keys)
{
    struct attention_plan plan;
    plan.rows = rows;
    plan.query_tiles = (int32_t)divide_up(q.count, rows);
    plan.context_tiles = (int32_t)divide_up(op->context, keys);
    int64_t own_tiles = op->block_size > 0 ? divide_up(op->rows, keys) : 0;
    int64_t items = (plan.context_tiles + own_tiles) * op->kv_heads;
    BUG_UNLESS(items <= INT32_MAX);
    plan.items = (int32_t)items;
    plan.bounds = (struct span_bounds *)stream->workspace;
    plan.counts = (int32_t *)(plan.bounds + plan.query_tiles);
    plan.order = plan.counts + plan.context_tiles;
    size_t bytes = (size_t)((char *)(plan.order + plan.context_tiles) - (char *)stream->workspace);
    BUG_UNLESS(bytes <= stream->workspace_bytes);
    if (plan.context_tiles == 0)
        return plan;
    bounds_kernel<<<grid_size(divide_up(plan.query_tiles, COUNT_THREADS / WARP)), COUNT_THREADS, 0,
                    stream->cuda>>>(*op, q, plan);
    launch_check();
    count_kernel<<<grid_size(plan.context_tiles), COUNT_THREADS, 0, stream->cuda>>>(plan, keys);
    launch_check();
    rank_kernel<<<grid_size(divide_up(plan.context_tiles, RANK_THREADS)), RANK_THREADS, 0,
                  stream->cuda>>>(plan);
    launch_check();
    return plan;
}
