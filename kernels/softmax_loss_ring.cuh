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
    MOST_SLOTS = 26,              // bf16 logits, one chunk
    WORKERS = LOSS_THREADS + WARP // the computing warps and the messenger
};

// How a thread's elements of a slot lie: units of 16 bytes, those of all threads side by side, so that a slot
// has its elements in the row's order.
template <typename Logit> struct layout {
    enum {
        UNIT = 16 / sizeof(Logit),
        UNITS = LOSS_ITEMS / UNIT,
        SLOT_BYTES = CHUNK * sizeof(Logit)
    };
};

struct place {
    int32_t rank, ctas;   // in the cluster
    int32_t begin, count; // elements of the row in this CTA's slice
    int32_t chunks;       // of the slice
    int32_t slots;        // of the ring
    // Shared addresses. ring, teacher: of this thread's first unit; nothing: a unit of -inf; barriers: full
    // and empty, slot by slot.
    uint32_t ring, teacher, nothing, barriers;
};

// A slot and how often, modulo 2, the ring was gone round.
struct cursor {
    int32_t slot;
    uint32_t phase;
};

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

// A word to a place in shared memory, possibly another CTA's. Its lowest bit is lost: it says to which of the
// place's messages, taken in turn, the word belongs (phase 0 first), so that nothing has to be ordered.
static __device__ __forceinline__ void mail_put(uint64_t *to, uint64_t word, uint32_t phase)
{
    asm volatile("st.relaxed.cluster.b64 [%0], %1;" ::"l"(to), "l"((word & ~(uint64_t)1) | phase)
                 : "memory");
}

static __device__ __forceinline__ uint64_t mail_take(const uint64_t *from, uint32_t phase)
{
    uint64_t word;
    do
        asm volatile("ld.relaxed.cluster.shared::cta.b64 %0, [%1];"
                     : "=l"(word)
                     : "r"(shared_address(from))
                     : "memory");
    while ((word & 1) != phase);
    return word & ~(uint64_t)1;
}

// All threads of the cluster. What was written before is seen behind it.
static __device__ __forceinline__ void cluster_sync(int ctas)
{
    if (ctas > 1)
        asm volatile("barrier.cluster.arrive.release;\n"
                     "barrier.cluster.wait.acquire;" ::
                         : "memory");
    __syncthreads(); // the barrier that racecheck knows for certain
}

// The computing warps and the messenger.
static __device__ __forceinline__ void workers_sync(void)
{
    asm volatile("bar.sync 1, %0;" ::"n"((int)WORKERS) : "memory");
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

static __device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}

// Barriers are there for the copy engine too.
static __device__ __forceinline__ void barriers_publish(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;\n"
                 "fence.proxy.async.shared::cta;" ::
                     : "memory");
}

static __device__ __forceinline__ void barrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// An arrival that announces so many bytes.
static __device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

static __device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t phase)
{
    uint32_t done = 0;
    while (!done)
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}\n"
                     : "=r"(done)
                     : "r"(barrier), "r"(phase)
                     : "memory");
}

// By the copy engine: multiples of 16 bytes, which the barrier counts.
static __device__ __forceinline__ void copy_bytes(uint32_t to, const void *from, int bytes,
                                                  uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], "
                 "%2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
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

static __device__ __forceinline__ int32_t slot_after(int32_t slot, int32_t count,
                                                     const struct place &at)
{
    slot += count;
    return slot >= at.slots ? slot - at.slots : slot;
}

static __device__ __forceinline__ void cursor_next(struct cursor *c, const struct place &at)
{
    c->slot = slot_after(c->slot, 1, at);
    c->phase ^= c->slot == 0 ? 1u : 0u;
}

static __device__ __forceinline__ uint32_t barrier_full(const struct place &at, int32_t slot)
{
    return at.barriers + 16 * slot;
}

static __device__ __forceinline__ uint32_t barrier_empty(const struct place &at, int32_t slot)
{
    return barrier_full(at, slot) + 8;
}

// By one thread, before the others use the ring.
static __device__ __forceinline__ void ring_open(const struct place &at)
{
    for (int i = 0; i < at.slots; i++) {
        barrier_init(barrier_full(at, i), 1);
        barrier_init(barrier_empty(at, i), LOSS_THREADS);
    }
    barriers_publish();
}

// This thread has read its elements of the slot for the last time. An arrival of each thread takes no longer
// than one of each warp that has met before.
static __device__ __forceinline__ void slot_release(const struct place &at, int32_t slot)
{
    barrier_arrive(barrier_empty(at, slot));
}

// Copies a slice. first: shared address of the ring; source: the slice's first element. By one thread.
template <typename Logit>
static __device__ __forceinline__ void feed_slice(struct cursor *c, uint32_t first,
                                                  const Logit *source, const struct place &at)
{
#pragma unroll 1
    for (int g = 0; g < at.chunks; g++) {
        uint32_t full = barrier_full(at, c->slot);
        int bytes = min((int32_t)CHUNK, at.count - g * CHUNK) * (int)sizeof(Logit);
        barrier_wait(barrier_empty(at, c->slot), c->phase ^ 1u);
        barrier_expect(full, bytes);
        copy_bytes(first + c->slot * layout<Logit>::SLOT_BYTES, source + g * CHUNK, bytes, full);
        cursor_next(c, at);
    }
}

// All copies for rows [begin, end), in the order of use, as soon as there is a slot.
template <typename Logit>
static __device__ __forceinline__ void feed_run(const struct softmax_loss &op,
                                                const struct place &at, uint32_t first,
                                                int32_t begin, int32_t end)
{
    const Logit *teacher = (const Logit *)op.teacher + at.begin,
                *student = (const Logit *)op.student + at.begin;
    struct cursor c = {0, 0};
    int32_t before = -1, now = op.teacher != NULL ? op.teacher_row[begin] : -1;
#pragma unroll 1
    for (int32_t r = begin; r < end; r++) {
        int32_t next = op.teacher != NULL && r + 1 < end ? op.teacher_row[r + 1] : -1;
        if (now != before)
            feed_slice<Logit>(&c, first, teacher + now * op.vocab, at);
        feed_slice<Logit>(&c, first, student + r * op.vocab, at);
        before = now;
        now = next;
    }
}

static __device__ __forceinline__ void unit_values(float *x, uint4 v, const float *)
{
    x[0] = __uint_as_float(v.x);
    x[1] = __uint_as_float(v.y);
    x[2] = __uint_as_float(v.z);
    x[3] = __uint_as_float(v.w);
}

static __device__ __forceinline__ void unit_values(float *x, uint4 v, const bf16_t *)
{
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        x[2 * j] = __uint_as_float(words[j] << 16);
        x[2 * j + 1] = __uint_as_float(words[j] & 0xffff0000u);
    }
}

// This thread's elements of the slice's g-th chunk, in a slot that is full; -inf beyond the slice.
template <typename Logit>
static __device__ __forceinline__ void take(float x[LOSS_ITEMS], int32_t slot, int g,
                                            const struct place &at)
{
    typedef layout<Logit> lay;
    uint32_t from = at.ring + slot * lay::SLOT_BYTES;
    int32_t left = at.count - g * CHUNK - (int32_t)threadIdx.x * lay::UNIT;
#pragma unroll
    for (int u = 0; u < lay::UNITS; u++) {
        bool there = u * LOSS_THREADS * lay::UNIT < left;
        unit_values(x + u * lay::UNIT, load_unit(there ? from + u * LOSS_THREADS * 16 : at.nothing),
                    (const Logit *)NULL);
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
#pragma unroll
    for (int u = 0; u < 2; u++)
        unit_values(x + 4 * u, load_unit(from + u * LOSS_THREADS * 16), (const float *)NULL);
}

#endif // sm_90

#endif
