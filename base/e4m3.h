// float8 e4m3 (the variant without infinities): sign, 4 bits of exponent with bias 7, 3 of mantissa;
// 0x7f and 0xff are NaN.
#ifndef BASE_E4M3_H
#define BASE_E4M3_H

#include <stdint.h>
#include <string.h>

enum { E4M3_MAGNITUDE = 0x7f, E4M3_NAN = 0x7f };

static inline float e4m3_to_float(uint8_t code)
{
    uint32_t magnitude = code & E4M3_MAGNITUDE, sign = (uint32_t)(code & 0x80) << 24;
    // The fields one after the other as in fp32, whose exponent has a bias that is larger by 120.
    uint32_t bits = magnitude << 20;
    float value;
    if (magnitude == E4M3_NAN)
        bits = 0x7fc00000u;
    memcpy(&value, &bits, sizeof(value));
    value *= 0x1p120f; // exact, subnormals too
    memcpy(&bits, &value, sizeof(bits));
    bits |= sign;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

#endif
