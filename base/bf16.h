// bfloat16 as its 16 bits: the upper half of a float. Rounding is to nearest, ties to even.
#ifndef BASE_BF16_H
#define BASE_BF16_H

#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

static inline float bf16_to_float(bf16 value)
{
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof(result));
    return result;
}

static inline bf16 bf16_from_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (bf16)((bits >> 16) | 0x40u); // NaN stays NaN
    return (bf16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// True for inf and NaN.
static inline int bf16_is_nonfinite(bf16 value)
{
    return (value & 0x7f80u) == 0x7f80u;
}

#endif
