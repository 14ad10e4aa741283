// Shared memory of a CTA of the loss's cluster kernel: the ring of slots through which rows flow, with
// the copies that fill it, the place of the teacher's slice, and the memory of the other CTAs.
#ifndef KERNELS_SOFTMAX_LOSS_RING_CUH
#define KERNELS_SOFTMAX_LOSS_RING_CUH

#include "kernels/softmax_loss_cuda.cuh"

enum {
    CHUNK = LOSS_THREADS * LOSS_ITEMS, // elements in a slot
    MOST_CTAS = 16,
    LEAST_VOCAB = 4096, // below, a row is too little work for a CTA of this kind
    SHARED_BYTES = 224 << 10,
    CHUNKS = 5, // of a slice at most
    TEACHER_STEP = CHUNK * sizeof(float),
    TEACHER_BYTES = CHUNKS * TEACHER_STEP
};

// How a thread's elements of a slot lie: units of 16 bytes, those of all threads side by side.
template <typename Logit> struct layout {
    enum {
        UNIT = 16 / sizeof(Logit),
        UNITS = LOSS_ITEMS / UNIT,
        SLOT_BYTES = CHUNK * sizeof(Logit),
        SLOTS = (SHARED_BYTES - TEACHER_BYTES) / SLOT_BYTES
    };
};

struct place {
    int32_t rank, ctas;   // in the cluster
    int32_t begin, count; // elements of the row in this CTA's slice
    int32_t chunks;       // of the slice
};

// A unit of -inf: what is copied where a slot has more elements than the slice.
[[maybe_unused]] static __device__ const uint4 nothing_fp32 = {0xff800000u, 0xff800000u,
                                                               0xff800000u, 0xff800000u};
[[maybe_unused]] static __device__ const uint4 nothing_bf16 = {0xff80ff80u, 0xff80ff80u,
                                                               0xff80ff80u, 0xff80ff80u};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900

static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

// The same place in the shared memory of a CTA of the cluster; own: this CTA's rank.
template <typename Value>
static __device__ __forceinline__ Value *in_cta(Value *p, int rank, int own)
{
    uint64_t address;
    asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(p), "r"(rank));
    return rank == own ? p : (Value *)address;
}

// All threads of the cluster meet by an arrive and a wait of each. What a thread wrote before
// cluster_exchange, also to other CTAs, is seen by all behind their wait. cluster_pass publishes nothing, and
// so waits for nothing that the thread has under way.
static __device__ __forceinline__ void cluster_exchange(int ctas)
{
    if (ctas > 1)
        asm volatile("barrier.cluster.arrive.release;\n"
                     "barrier.cluster.wait.acquire;" ::
                         : "memory");
}

static __device__ __forceinline__ void cluster_pass(int ctas)
{
    if (ctas > 1)
        asm volatile("barrier.cluster.arrive.relaxed;\n"
                     "barrier.cluster.wait.acquire;" ::
                         : "memory");
}

// The CTA's own barrier is the one that racecheck knows for certain.
static __device__ __forceinline__ void cluster_sync(int ctas)
{
    cluster_exchange(ctas);
    __syncthreads();
}

static __device__ __forceinline__ int cluster_rank(void)
{
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

static __device__ __forceinline__ int cluster_size(void)
{
    int size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

static __device__ __forceinline__ void copy_unit(uint32_t to, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

static __device__ __forceinline__ void store_shared(uint32_t to, uint4 v)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

static __device__ __forceinline__ uint4 load_unit(uint32_t from)
{
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}

static __device__ __forceinline__ void copy_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until at most PENDING of this thread's youngest copies are under way.
template <int PENDING> static __device__ __forceinline__ void copy_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

static __device__ __forceinline__ const float *nothing(const float *)
{
    return (const float *)&nothing_fp32;
}

static __device__ __forceinline__ const bf16_t *nothing(const bf16_t *)
{
    return (const bf16_t *)&nothing_bf16;
}

// The stream of chunks into the ring: what comes next. It goes where the oldest chunk was.
template <typename Logit> struct feed {
    const Logit *source;     // this thread's next element
    int32_t left;            // chunks of the slice that were not copied yet
    int32_t row, begin, end; // of the cluster
    int32_t teacher;         // row of the teacher, of `row`
    int32_t teachers;        // lane by lane, of rows row / 32 * 32 and on
    bool is_teacher;         // of the source
    uint32_t fresh;          // bit r % 32: row r has another teacher than the row before
};

// Shared address of this thread's first unit in the ring's first slot.
static __device__ __forceinline__ uint32_t ring_first(const unsigned char *ring)
{
    return shared_address(ring) + threadIdx.x * 16;
}

template <typename Logit>
static __device__ __forceinline__ uint32_t ring_next(uint32_t slot, const unsigned char *ring)
{
    slot += layout<Logit>::SLOT_BYTES;
    bool end = slot >= shared_address(ring) + layout<Logit>::SLOTS * layout<Logit>::SLOT_BYTES;
    return end ? slot - layout<Logit>::SLOTS * layout<Logit>::SLOT_BYTES : slot;
}

// The teacher of the next row. Read for 32 rows at a time, since the copies would wait for each one.
template <typename Logit>
static __device__ __forceinline__ void feed_teacher(struct feed<Logit> *f,
                                                    const int32_t *teacher_row)
{
    if (f->row == f->begin || f->row % WARP == 0) {
        int32_t r = f->row / WARP * WARP + (int32_t)threadIdx.x % WARP;
        f->teachers = r < f->end ? teacher_row[r] : 0;
    }
    f->teacher = __shfl_sync(0xffffffffu, f->teachers, f->row % WARP);
}

// Moves on to the next row: the teacher's of a student row with another teacher, then the student's.
template <typename Logit>
static __device__ __forceinline__ void
feed_row(struct feed<Logit> *f, const struct softmax_loss &op, const struct place &at)
{
    if (f->is_teacher) {
        f->is_teacher = false;
    } else {
        int32_t before = f->teacher;
        f->row++;
        if (op.teacher != NULL && f->row < f->end)
            feed_teacher(f, op.teacher_row);
        f->is_teacher = op.teacher != NULL && f->teacher != before;
        uint32_t bit = 1u << f->row % 32;
        f->fresh = f->is_teacher ? f->fresh | bit : f->fresh & ~bit;
    }
    const Logit *rows = (const Logit *)(f->is_teacher ? op.teacher : op.student);
    f->source = rows + (int64_t)(f->is_teacher ? f->teacher : f->row) * op.vocab + at.begin +
                (int32_t)threadIdx.x * layout<Logit>::UNIT;
    f->left = f->row < f->end ? at.chunks : 0;
}

// Starts the copy of the next chunk; an empty one after the last row, so that counts stay the same.
template <typename Logit>
static __device__ __forceinline__ void feed_chunk(struct feed<Logit> *f, uint32_t slot,
                                                  const struct softmax_loss &op,
                                                  const struct place &at)
{
    typedef layout<Logit> lay;
    const int32_t step = LOSS_THREADS * lay::UNIT; // elements from unit to unit
    if (f->left > 1) {
#pragma unroll
        for (int u = 0; u < lay::UNITS; u++)
            copy_unit(slot + u * LOSS_THREADS * 16, f->source + u * step);
        f->source += CHUNK;
        f->left--;
    } else if (f->left == 1) {
        int32_t first = (at.chunks - 1) * CHUNK + (int32_t)threadIdx.x * lay::UNIT;
#pragma unroll
        for (int u = 0; u < lay::UNITS; u++)
            copy_unit(slot + u * LOSS_THREADS * 16,
                      first + u * step < at.count ? f->source + u * step : nothing(f->source));
        feed_row(f, op, at);
    }
    copy_commit();
}

template <typename Logit>
static __device__ __forceinline__ struct feed<Logit>
feed_begin(const struct softmax_loss &op, const struct place &at, const unsigned char *ring,
           int32_t begin, int32_t end) {
    struct feed<Logit> f;
    f.row = begin - 1;
    f.begin = begin;
    f.end = end;
    f.teachers = 0;
    f.teacher = -1;
    f.is_teacher = false;
    f.fresh = 0;
    feed_row(&f, op, at);
    uint32_t slot = ring_first(ring);
#pragma unroll 1
    for (int i = 0; i < layout<Logit>::SLOTS; i++, slot += layout<Logit>::SLOT_BYTES)
        feed_chunk(&f, slot, op, at);
    return f;
}

static __device__ __forceinline__ void
take(float x[LOSS_ITEMS], uint32_t slot, const float *)
{
#pragma unroll
    for (int u = 0; u < 2; u++) {
        uint4 v = load_unit(slot + u * LOSS_THREADS * 16);
        x[4 * u] = __uint_as_float(v.x);
        x[4 * u + 1] = __uint_as_float(v.y);
        x[4 * u + 2] = __uint_as_float(v.z);
        x[4 * u + 3] = __uint_as_float(v.w);
    }
}

static __device__ __forceinline__ void take(float x[LOSS_ITEMS], uint32_t slot, const bf16_t *)
{
    uint4 v = load_unit(slot);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        x[2 * j] = __uint_as_float(words[j] << 16);
        x[2 * j + 1] = __uint_as_float(words[j] & 0xffff0000u);
    }
}

// This thread's element in the row, and the other way round: -1 where it is another thread's.
template <typename Logit>
static __device__ __forceinline__ int32_t index_of(const struct place &at, int chunk, int item)
{
    typedef layout<Logit> lay;
    int32_t unit = item / lay::UNIT, thread = (int32_t)threadIdx.x;
    return at.begin + chunk * CHUNK + (unit * LOSS_THREADS + thread) * lay::UNIT + item % lay::UNIT;
}

template <typename Logit>
static __device__ __forceinline__ int32_t own_item(const struct place &at, int32_t index)
{
    typedef layout<Logit> lay;
    int32_t i = index - at.begin;
    if (index < 0 || i < 0 || i >= at.count)
        return -1;
    int32_t chunk = i / CHUNK, unit = i % CHUNK / lay::UNIT;
    if (unit % LOSS_THREADS != (int32_t)threadIdx.x)
        return -1;
    return chunk * LOSS_ITEMS + unit / LOSS_THREADS * lay::UNIT + i % lay::UNIT;
}

// A chunk of the teacher's slice, which lies as fp32 whatever the logits are. to, from: shared address of
// this thread's first unit.
static __device__ __forceinline__ void teacher_store(uint32_t to, const float x[LOSS_ITEMS])
{
#pragma unroll
    for (int u = 0; u < 2; u++)
        store_shared(to + u * LOSS_THREADS * 16,
                     make_uint4(__float_as_uint(x[4 * u]), __float_as_uint(x[4 * u + 1]),
                                __float_as_uint(x[4 * u + 2]), __float_as_uint(x[4 * u + 3])));
}

static __device__ __forceinline__ void teacher_load(float x[LOSS_ITEMS], uint32_t from)
{
    take(x, from, (const float *)NULL);
}

#endif // sm_90

#endif
