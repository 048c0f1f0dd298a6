// Products over matrices in shared memory: by warpgroups if WARPGROUP_PRODUCTS, otherwise by warps.
#ifndef KVANT_CUDA_DEVICE_PRODUCTS_H
#define KVANT_CUDA_DEVICE_PRODUCTS_H
#if WARPGROUP_PRODUCTS
#include "device/wgmma.h"
#else
#include "device/warp_products.h"
#endif
#endif
