// What the cluster kernel of the loss stands on: its sizes, what CTAs tell each other, and the
// instructions for barriers, messages to other CTAs and copies into shared memory.
#ifndef KERNELS_SOFTMAX_LOSS_CLUSTER_CUH
#define KERNELS_SOFTMAX_LOSS_CLUSTER_CUH

#include "kernels/softmax_loss_cuda.cuh"

enum {
    CHUNK = LOSS_THREADS * LOSS_ITEMS, // elements in a slot
    CHUNKS = 10,                       // of a slice at most: 80 registers of a thread
    MOST_CTAS = 8,
    LEAST_VOCAB = 4096, // below, a row is too little work for a CTA of this kind
    RING_BYTES = 224 << 10
};

// How a thread's elements of a slot lie: units of 16 bytes, those of all threads side by side.
template <typename Logit> struct layout {
    enum {
        UNIT = 16 / sizeof(Logit),
        UNITS = LOSS_ITEMS / UNIT,
        SLOT_BYTES = CHUNK * sizeof(Logit),
        SLOTS = RING_BYTES / SLOT_BYTES
    };
};

struct __align__(16) message
{
    float max, sum;
    int32_t argmax, unused;
};

struct exchange {
    struct message warp[2][LOSS_WARPS];   // student, teacher
    struct message mail[2][2][MOST_CTAS]; // turn by turn; student, teacher; from each CTA
    float warp_sum[LOSS_WARPS][SUM_COUNT];
    double sum_mail[MOST_CTAS][SUM_COUNT];
    struct loss_gradient gradient;
    struct loss_softmax teacher; // thread 0's, in the CTA of rank 0
    unsigned long long barrier[2], sum_barrier;
};

struct place {
    int32_t rank, ctas;   // in the cluster
    int32_t begin, count; // elements of the row in this CTA's slice
    int32_t chunks;       // of the slice
};

// Where rows' records and sums go.
struct output {
    struct loss_record *records; // [rows]
    struct loss_part *parts;     // [rows, CTAs, warps]
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

static __device__ __forceinline__ uint32_t remote_address(const void *p, int rank)
{
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank));
    return address;
}

static __device__ __forceinline__ void barrier_init(unsigned long long *barrier)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier))
                 : "memory");
}

// Opens a phase that ends when so many bytes have come.
static __device__ __forceinline__ void barrier_expect(unsigned long long *barrier, int bytes)
{
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
        "r"(bytes)
        : "memory");
}

static __device__ __forceinline__ void barrier_wait(unsigned long long *barrier, int phase)
{
    uint32_t done = 0;
    while (!done)
        asm volatile("{\n"
                     ".reg .pred p;\n"
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n"
                     "}"
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(phase)
                     : "memory");
}

static __device__ __forceinline__ void send(struct message *to, unsigned long long *barrier,
                                            int rank, const struct loss_softmax &s)
{
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
                 "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote_address(to, rank)),
                 "r"(__float_as_int(s.max)), "r"(__float_as_int(s.sum)), "r"(s.argmax), "r"(0),
                 "r"(remote_address(barrier, rank))
                 : "memory");
}

static __device__ __forceinline__ void send(double *to, unsigned long long *barrier, int rank,
                                            double value)
{
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 "
                 "[%0], %1, [%2];" ::"r"(remote_address(to, rank)),
                 "l"(__double_as_longlong(value)), "r"(remote_address(barrier, rank))
                 : "memory");
}

static __device__ __forceinline__ void cluster_sync(void)
{
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
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

#endif // sm_90
#endif
