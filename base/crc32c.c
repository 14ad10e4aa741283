// Owns CRC-32C: eight table look-ups per eight bytes (slicing), portable; on x86-64 processors that have
// it, the instruction for it, on three stretches at once, since it takes three cycles and one can begin
// in each.
#include "base/crc32c.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

enum { STRETCH = 4096 }; // bytes; long enough that joining three costs little

static uint32_t table[8][256];
static uint32_t after_stretch[4][256]; // by byte of a register: the register STRETCH zero bytes on
static bool has_instruction;
static pthread_once_t table_once = PTHREAD_ONCE_INIT;

// The register (crc inverted) after n more bytes.
static uint32_t advance_by_table(uint32_t crc, const unsigned char *p, size_t n)
{
    for (; n >= 8; n -= 8, p += 8) {
        uint32_t low, high;
        memcpy(&low, p, 4);
        memcpy(&high, p + 4, 4);
        low ^= crc;
        crc = table[7][low & 0xff] ^ table[6][low >> 8 & 0xff] ^ table[5][low >> 16 & 0xff] ^
              table[4][low >> 24] ^ table[3][high & 0xff] ^ table[2][high >> 8 & 0xff] ^
              table[1][high >> 16 & 0xff] ^ table[0][high >> 24];
    }
    for (; n > 0; n--, p++)
        crc = (crc >> 8) ^ table[0][(crc ^ *p) & 0xff];
    return crc;
}

// A register is a sum (exclusive or) of its bits, and so is what becomes of it.
static void after_stretch_make(void)
{
    static const unsigned char zeros[STRETCH];
    for (int byte = 0; byte < 4; byte++)
        for (int bit = 0; bit < 8; bit++) {
            uint32_t moved = advance_by_table(1u << (8 * byte + bit), zeros, STRETCH);
            for (int value = 0; value < 1 << bit; value++)
                after_stretch[byte][value | 1 << bit] = after_stretch[byte][value] ^ moved;
        }
}

static void table_make(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int bit = 0; bit < 8; bit++)
            c = (c >> 1) ^ (0x82f63b78u & (0u - (c & 1u)));
        table[0][i] = c;
    }
    for (uint32_t i = 0; i < 256; i++)
        for (int t = 1; t < 8; t++)
            table[t][i] = (table[t - 1][i] >> 8) ^ table[0][table[t - 1][i] & 0xffu];
    after_stretch_make();
#if defined(__x86_64__)
    has_instruction = __builtin_cpu_supports("sse4.2") != 0;
#endif
}

#if defined(__x86_64__)
static uint64_t word_at(const unsigned char *p)
{
    uint64_t word;
    memcpy(&word, p, sizeof(word));
    return word;
}

static uint64_t move_stretch(uint64_t crc)
{
    return after_stretch[0][crc & 0xff] ^ after_stretch[1][crc >> 8 & 0xff] ^
           after_stretch[2][crc >> 16 & 0xff] ^ after_stretch[3][crc >> 24 & 0xff];
}

__attribute__((target("sse4.2"))) static uint32_t
advance_by_instruction(uint32_t crc, const unsigned char *p, size_t n)
{
    uint64_t a = crc;
    for (; n >= 3 * STRETCH; n -= 3 * STRETCH, p += 3 * STRETCH) {
        uint64_t b = 0, c = 0;
        for (size_t i = 0; i < STRETCH; i += 8) {
            a = _mm_crc32_u64(a, word_at(p + i));
            b = _mm_crc32_u64(b, word_at(p + STRETCH + i));
            c = _mm_crc32_u64(c, word_at(p + 2 * STRETCH + i));
        }
        a = move_stretch(move_stretch(a) ^ b) ^ c;
    }
    for (; n >= 8; n -= 8, p += 8)
        a = _mm_crc32_u64(a, word_at(p));
    return advance_by_table((uint32_t)a, p, n);
}
#else
static uint32_t advance_by_instruction(uint32_t crc, const unsigned char *p, size_t n)
{
    return advance_by_table(crc, p, n);
}
#endif

uint32_t crc32c(uint32_t crc, const void *bytes, size_t n)
{
    pthread_once(&table_once, table_make);
    return has_instruction ? ~advance_by_instruction(~crc, bytes, n)
                           : ~advance_by_table(~crc, bytes, n);
}

// a after one more bit that is 0, as polynomials modulo the CRC's: the highest power is the lowest bit.
static uint32_t times_x(uint32_t a)
{
    return (a >> 1) ^ (0x82f63b78u & (0u - (a & 1u)));
}

static uint32_t multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1, b = times_x(b))
        if (a & bit)
            product ^= b;
    return product;
}

uint32_t crc32c_join(uint32_t a, uint32_t b, uint64_t b_bytes)
{
    uint32_t power = 1u << 31, square = 1u << 23; // 1, and x^8: a byte
    for (; b_bytes > 0; b_bytes >>= 1, square = multiply(square, square))
        if (b_bytes & 1)
            power = multiply(power, square);
    return multiply(power, a) ^ b;
}
