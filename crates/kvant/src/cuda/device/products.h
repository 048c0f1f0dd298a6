// Products over matrices in shared memory: of warpgroups (WARPGROUP_PRODUCTS), otherwise of warps.
#ifndef KVANT_CUDA_DEVICE_PRODUCTS_H
#define KVANT_CUDA_DEVICE_PRODUCTS_H
#if WARPGROUP_PRODUCTS
#include "device/wgmma.h"
#else
#include "device/warp_products.h"
#endif
#endif
