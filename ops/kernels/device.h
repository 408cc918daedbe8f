// Marks the functions that GPUs compute too.
#pragma once

#ifdef __CUDACC__
#define TFCOMMX_DEVICE __host__ __device__
#else
#define TFCOMMX_DEVICE
#endif
