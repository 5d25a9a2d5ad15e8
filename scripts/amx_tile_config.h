/* Included before llama.cpp's own code where the compiler spoils AMX, see the Makefile.
 *
 * GCC before 11.5, 12.4 and 13.3 takes the operand of _tile_loadconfig for eight bytes and drops the stores of the
 * others (GCC bug 114098), so the first product of two rows would end with SIGSEGV. Here all 64 are named. */
#if defined(__AMX_INT8__) && !defined(__clang__) && \
    (__GNUC__ < 11 || (__GNUC__ == 11 && __GNUC_MINOR__ < 5) || (__GNUC__ == 12 && __GNUC_MINOR__ < 4) || \
     (__GNUC__ == 13 && __GNUC_MINOR__ < 3))
#include <immintrin.h>
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" : : "m"(*(const char(*)[64])(config)))
#endif
