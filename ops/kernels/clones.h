// Compiles a function once for each of three instruction sets; the processor's own is taken when the
// library is loaded. For loops of which a compiler makes vector instructions by itself. `flatten`
// puts what the function calls into it, so that it is compiled for the same set.
#pragma once

#if defined(__x86_64__) && defined(__ELF__)
#define TFCOMMX_CLONES __attribute__((target_clones("avx512f", "avx2", "default"), flatten))
#else
#define TFCOMMX_CLONES
#endif
