#ifndef JAX_EP_CSRC_CORE_MACROS_H_
#define JAX_EP_CSRC_CORE_MACROS_H_

// Marks what runs on the host and, compiled by nvcc, in kernels too.
#ifdef __CUDACC__
#define JAX_EP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define JAX_EP_HOST_DEVICE inline
#endif

#endif  // JAX_EP_CSRC_CORE_MACROS_H_
