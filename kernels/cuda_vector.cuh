// Packs of consecutive elements of a row, moved with accesses of 16 bytes. A kernel with packs of one
// element is its own fall-back for addresses, strides and widths that 16 bytes do not divide.
#ifndef KERNELS_CUDA_VECTOR_CUH
#define KERNELS_CUDA_VECTOR_CUH

#include "kernels/cuda_internal.cuh"

enum { PACK_BYTES = 16 };

// A code of float8 (base/e4m3.h).
struct e4m3_t {
    uint8_t code;
};

// N elements as they lie in memory: 8 bytes, a multiple of 16 bytes, or one element. A warp's accesses
// are best whole 32-byte sectors: more than one access a pack leaves gaps, which caches must fill.
template <typename Type, int N> struct pack {
    uint32_t word[(N * sizeof(Type) + 3) / 4];
};

// Elements of a pack that is one access of at most 16 bytes for both types.
template <typename A, typename B> struct pack_of {
    enum { N = PACK_BYTES / (sizeof(A) > sizeof(B) ? sizeof(A) : sizeof(B)) };
};

template <int N, typename Type>
static __device__ __forceinline__ struct pack<Type, N> pack_load(const Type *from) {
    static_assert(N == 1 || N * sizeof(Type) == 8 || N * sizeof(Type) % 16 == 0, "whole accesses");
    struct pack<Type, N> p;
    if constexpr (N > 1 && N * sizeof(Type) == 8) {
        uint2 two = *(const uint2 *)from;
        p.word[0] = two.x;
        p.word[1] = two.y;
    } else if constexpr (N > 1) {
#pragma unroll
        for (int i = 0; i < (int)(N * sizeof(Type) / PACK_BYTES); i++) {
            uint4 four = ((const uint4 *)from)[i];
            p.word[4 * i] = four.x;
            p.word[4 * i + 1] = four.y;
            p.word[4 * i + 2] = four.z;
            p.word[4 * i + 3] = four.w;
        }
    } else if constexpr (sizeof(Type) == 4) {
        p.word[0] = *(const uint32_t *)from;
    } else if constexpr (sizeof(Type) == 2) {
        p.word[0] = *(const uint16_t *)from;
    } else {
        p.word[0] = *(const uint8_t *)from;
    }
    return p;
}

// The same for what is read once: it does not take the place of other data in the first-level cache,
// unless that has to hold the sectors from one access of a pack to the next.
template <int N, typename Type>
static __device__ __forceinline__ struct pack<Type, N> pack_load_once(const Type *from) {
    if constexpr (N > 1 && N * sizeof(Type) == 16) {
        struct pack<Type, N> p;
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(p.word[0]), "=r"(p.word[1]), "=r"(p.word[2]), "=r"(p.word[3])
                     : "l"(from)
                     : "memory");
        return p;
    } else {
        return pack_load<N>(from);
    }
}

// To global memory, as the accesses say: a place in shared memory would be taken for a global address.
template <int N, typename Type>
static __device__ __forceinline__ void pack_store(Type *to, const struct pack<Type, N> &p)
{
    if constexpr (N > 1 && N * sizeof(Type) == 8) {
        asm volatile("st.global.v2.u32 [%0], {%1, %2};"
                     :
                     : "l"(to), "r"(p.word[0]), "r"(p.word[1])
                     : "memory");
    } else if constexpr (N > 1) {
#pragma unroll
        for (int i = 0; i < (int)(N * sizeof(Type) / PACK_BYTES); i++)
            // As an assignment it may be taken apart into four.
            asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                         :
                         : "l"((uint4 *)to + i), "r"(p.word[4 * i]), "r"(p.word[4 * i + 1]),
                           "r"(p.word[4 * i + 2]), "r"(p.word[4 * i + 3])
                         : "memory");
    } else if constexpr (sizeof(Type) == 4) {
        *(uint32_t *)to = p.word[0];
    } else {
        *(uint16_t *)to = (uint16_t)p.word[0];
    }
}

template <typename Type, int N>
static __device__ __forceinline__ struct pack<Type, N> pack_zero(void) {
    struct pack<Type, N> p;
#pragma unroll
    for (int i = 0; i < (int)(sizeof(p.word) / sizeof(p.word[0])); i++)
        p.word[i] = 0;
    return p;
}

// Element i in fp32.
template <int N>
static __device__ __forceinline__ float pack_value(const struct pack<float, N> &p, int i)
{
    return __uint_as_float(p.word[i]);
}

template <int N>
static __device__ __forceinline__ float pack_value(const struct pack<bf16_t, N> &p, int i)
{
    return __uint_as_float(i % 2 == 0 ? p.word[i / 2] << 16 : p.word[i / 2] & 0xffff0000u);
}

// The value of base/e4m3.h's code.
template <int N>
static __device__ __forceinline__ float pack_value(const struct pack<e4m3_t, N> &p, int i)
{
    uint32_t code = p.word[i / 4] >> (8 * (i % 4)) & 0xffu, magnitude = code & 0x7fu;
    float value = __uint_as_float(magnitude << 20) * 0x1p120f; // exact
    value = magnitude == 0x7fu ? __uint_as_float(0x7fc00000u) : value;
    return __uint_as_float(__float_as_uint(value) | (code & 0x80u) << 24);
}

// Keeps a pack packed: the compiler may not hold its fp32 values in registers from before to after.
template <typename Type, int N>
static __device__ __forceinline__ void pack_hold(struct pack<Type, N> &p)
{
#pragma unroll
    for (int i = 0; i < (int)(sizeof(p.word) / sizeof(p.word[0])); i++)
        asm volatile("" : "+r"(p.word[i]));
}

// Rounds fp32 values to the elements.
template <int N>
static __device__ __forceinline__ void pack_set(struct pack<float, N> &p, const float (&value)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        p.word[i] = __float_as_uint(value[i]);
}

template <int N>
static __device__ __forceinline__ void pack_set(struct pack<bf16_t, N> &p, const float (&value)[N])
{
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        bf16_t low = __float2bfloat16_rn(value[i]);
        bf16_t high = __float2bfloat16_rn(i + 1 < N ? value[i + (i + 1 < N)] : 0.0f);
        p.word[i / 2] = (uint32_t)__bfloat16_as_ushort(low) | (uint32_t)__bfloat16_as_ushort(high)
                                                                  << 16;
    }
}

template <int N, typename Type>
static __device__ __forceinline__ void store_values(Type *to, const float (&value)[N])
{
    struct pack<Type, N> p;
    pack_set(p, value);
    pack_store(to, p);
}

// Whether packs may be used at an address (NULL: not used), and for a width or stride in elements of
// which one pack has n.
static inline bool packs_at(const void *pointer)
{
    return (uintptr_t)pointer % PACK_BYTES == 0;
}

static inline bool packs_in(int64_t elements, int n)
{
    return elements % n == 0;
}

static inline int64_t round_up(int64_t a, int64_t b)
{
    return divide_up(a, b) * b;
}

#endif
