# Compiler settings of the whole tree.
set(CMAKE_C_STANDARD 17)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  set(CMAKE_C_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()

add_compile_definitions(_GNU_SOURCE)
add_compile_options(-Wall -Wextra -Wshadow $<$<COMPILE_LANGUAGE:C>:-Wstrict-prototypes> $<$<COMPILE_LANGUAGE:C>:-Wmissing-prototypes> -Wvla -Werror
                    -fno-common -fno-strict-aliasing -fstack-protector-strong)
# Results must not depend on the instruction set (docs/design.md, determinism): a multiply and an add
# are fused only where the source says fma.
add_compile_options(-ffp-contract=off -fno-fast-math)

set(CMAKE_C_FLAGS_RELEASE "-O3 -g")
set(CMAKE_C_FLAGS_DEBUG "-O0 -g")
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -g")
set(CMAKE_CXX_FLAGS_DEBUG "-O0 -g")
if(TIDEPOOL_SANITIZE OR TIDEPOOL_FUZZ)
  add_compile_definitions(TIDEPOOL_SANITIZED)
  if(CMAKE_C_COMPILER_ID MATCHES "Clang")
    # At -O1 clang unrolls no loop and says so of each that asks for it.
    add_compile_options(-Wno-pass-failed)
  endif()
endif()
if(TIDEPOOL_SANITIZE)
  if(CMAKE_C_COMPILER_ID STREQUAL "GNU")
    # Warnings that follow the flow of values are wrong more often than right in instrumented code; the Release build heeds them.
    add_compile_options(-Wno-format-truncation -Wno-maybe-uninitialized)
  endif()
  add_compile_options(-O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
endif()
if(TIDEPOOL_FUZZ)
  if(NOT CMAKE_C_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "TIDEPOOL_FUZZ needs clang: configure with CC=clang")
  endif()
  add_compile_options(-O1 -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
endif()
