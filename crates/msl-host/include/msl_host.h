// Replaces <metal_stdlib> for clang. Every kernel is compiled twice against it:
//   typed pass   -DMSL_TYPED: address spaces are part of the types and warnings are errors; no code is generated;
//   run pass     address spaces are plain pointers, which the checker's instrumentation can follow.
// The front end rewrites the source first (see src/rewrite.rs): vector constructors and casts become calls of
// metal::__make and metal::__cast, threadgroup variables and function constants use the macros of glue.h.
#pragma once
#pragma clang system_header
#include "msl/context.h"
#include "msl/types.h"
#include "msl/math.h"
#include "msl/columns.h"
#include "msl/sync.h"
#include "msl/atomic.h"
#include "msl/internals.h"
#include "msl/matrix.h"
#include "msl/glue.h"

#if __METAL_VERSION__ < 310
#define bfloat bfloat_needs_metal_3_1
#define bfloat2 bfloat2_needs_metal_3_1
#define bfloat3 bfloat3_needs_metal_3_1
#define bfloat4 bfloat4_needs_metal_3_1
#define simdgroup_bfloat8x8 simdgroup_bfloat8x8_needs_metal_3_1
#endif
