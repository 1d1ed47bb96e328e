#include "kernels/cpu/cpu_isa.h"
#include <cpuid.h>
#include <stdint.h>

struct cpuid_leaves {
    uint32_t leaf1_ecx, leaf7_ebx, leaf7_ecx;
    uint64_t xcr0; /* register state that the operating system saves */
};

enum { XCR0_AVX = 0x6, XCR0_AVX512 = 0xE6 };

static uint64_t xcr0_read(void)
{
    uint32_t lo, hi;
    __asm__("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (uint64_t)hi << 32 | lo;
}

static struct cpuid_leaves cpuid_read(void)
{
    struct cpuid_leaves c = {0};
    uint32_t eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx))
        return c;
    c.leaf1_ecx = ecx;
    if (ecx & bit_OSXSAVE)
        c.xcr0 = xcr0_read();
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
        c.leaf7_ebx = ebx;
        c.leaf7_ecx = ecx;
    }
    return c;
}

static bool all_set(uint64_t value, uint64_t bits)
{
    return (value & bits) == bits;
}

static bool has_avx2(const struct cpuid_leaves *c)
{
    return all_set(c->leaf1_ecx, bit_FMA | bit_F16C | bit_AVX) && all_set(c->leaf7_ebx, bit_AVX2) && all_set(c->xcr0, XCR0_AVX);
}

static bool has_avx512(const struct cpuid_leaves *c)
{
    return has_avx2(c) && all_set(c->xcr0, XCR0_AVX512) && all_set(c->leaf7_ecx, bit_AVX512VNNI) &&
           all_set(c->leaf7_ebx, (uint32_t)bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ);
}

bool cpu_isa_supported(enum cpu_isa isa)
{
    struct cpuid_leaves c = cpuid_read();
    switch (isa) {
    case CPU_ISA_AUTO:
    case CPU_ISA_PLAIN:
        return true;
    case CPU_ISA_AVX2:
        return has_avx2(&c);
    case CPU_ISA_AVX512:
        return has_avx512(&c);
    }
    return false;
}

enum cpu_isa cpu_isa_best(void)
{
    if (cpu_isa_supported(CPU_ISA_AVX512))
        return CPU_ISA_AVX512;
    return cpu_isa_supported(CPU_ISA_AVX2) ? CPU_ISA_AVX2 : CPU_ISA_PLAIN;
}

const char *cpu_isa_name(enum cpu_isa isa)
{
    switch (isa) {
    case CPU_ISA_AUTO:
        return "auto";
    case CPU_ISA_PLAIN:
        return "plain";
    case CPU_ISA_AVX2:
        return "avx2";
    case CPU_ISA_AVX512:
        return "avx512";
    }
    return "unknown";
}
