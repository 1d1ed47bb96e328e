/* Included in front of each unit of the checked build: calls of these functions become calls of the checker's, which look at what they read and write. C and C++. */
#pragma once
#include <string.h>
#ifdef __cplusplus
#define SIMT_CHECK_C extern "C"
#define SIMT_CHECK_NOEXCEPT noexcept
#else
#define SIMT_CHECK_C
#define SIMT_CHECK_NOEXCEPT
#endif

SIMT_CHECK_C void *memcpy(void *, const void *, size_t) SIMT_CHECK_NOEXCEPT __asm__("simt_memcpy");
SIMT_CHECK_C void *memmove(void *, const void *, size_t) SIMT_CHECK_NOEXCEPT __asm__("simt_memmove");
SIMT_CHECK_C void *memset(void *, int, size_t) SIMT_CHECK_NOEXCEPT __asm__("simt_memset");
SIMT_CHECK_C int memcmp(const void *, const void *, size_t) SIMT_CHECK_NOEXCEPT __asm__("simt_memcmp");
