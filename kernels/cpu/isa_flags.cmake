# How the CPU's ops are compiled for each instruction set (cpu/lanes.h). A list stands on one line, since tests/bench/gpu/build.sh reads them too.
set(ISA_FLAGS_plain -DCPU_ISA_BUILD=0)
set(ISA_FLAGS_avx2 -DCPU_ISA_BUILD=1 -mavx2 -mfma -mf16c)
set(ISA_FLAGS_avx512 -DCPU_ISA_BUILD=2 -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mprefer-vector-width=512)
# At -O3 the compiler spends minutes on unrolling the loops over lanes, for nothing.
set(ISA_RELEASE_FLAGS_plain -O2)
