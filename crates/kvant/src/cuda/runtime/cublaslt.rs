//! Matrix products by cuBLASLt, if it can be loaded; otherwise the launch's own kernel computes them.

use std::{
    collections::HashMap,
    ffi::c_void,
    ptr::null_mut,
    sync::{Arc, Mutex, PoisonError},
};

use cudarc::{
    cublaslt::sys::{self as lt, cublasStatus_t, cudaDataType},
    driver::sys::{CUdeviceptr, CUstream},
};

use super::{
    driver::{CudaDevice, CudaMemory, fault},
    libraries,
};
use crate::{DType, gpu::Product};

/// Bytes of scratch memory of a product.
const WORKSPACE: usize = 32 << 20;
/// Maximum cached plans. Every length of a prompt has a plan.
const MAX_PLANS: usize = 1024;

/// The library, with plans by shape.
pub(super) struct CublasLt {
    handle: lt::cublasLtHandle_t,
    /// The workspace. All products share it: they run one after the other.
    workspace: CudaMemory,
    plans: Mutex<HashMap<MatmulShape, Option<Arc<CublasLtPlan>>>>,
}

/// Rows, outputs, inputs, and the two dtypes.
type MatmulShape = (usize, usize, usize, DType, DType);

/// How the library computes products of one shape.
pub(super) struct CublasLtPlan {
    description: MatmulDescription,
    /// Layouts of W, x and out.
    layouts: [MatrixLayout; 3],
    algorithm: lt::cublasLtMatmulAlgo_t,
}

/// Declares an owner of a handle, which destroys it when it is dropped.
macro_rules! owned {
    ($name:ident, $handle:ty, $destroy:ident) => {
        struct $name($handle);

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: nobody else has it.
                let status = unsafe { lt::$destroy(self.0) };
                if let Err(error) = check(stringify!($destroy), status) {
                    tracing::debug!(error, "a descriptor of cuBLASLt was not freed");
                }
            }
        }
    };
}
owned!(MatmulDescription, lt::cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy);
owned!(MatrixLayout, lt::cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy);
owned!(MatmulPreference, lt::cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy);

// SAFETY: the handle may be used from several threads; descriptors are only read after their creation.
unsafe impl Send for CublasLt {}
// SAFETY: as above.
unsafe impl Sync for CublasLt {}
// SAFETY: descriptors are only read.
unsafe impl Send for CublasLtPlan {}
// SAFETY: as above.
unsafe impl Sync for CublasLtPlan {}

fn check(call: &'static str, status: cublasStatus_t) -> Result<(), String> {
    if status == cublasStatus_t::CUBLAS_STATUS_SUCCESS { Ok(()) } else { Err(format!("{call}: {status:?}")) }
}

fn data_type(dtype: DType) -> cudaDataType {
    match dtype {
        DType::F16 => cudaDataType::CUDA_R_16F,
        DType::BF16 => cudaDataType::CUDA_R_16BF,
        _ => cudaDataType::CUDA_R_32F,
    }
}

impl CublasLt {
    /// The library, if it is installed and works.
    ///
    /// # Errors
    /// There is no memory for its workspace.
    pub(super) fn open(gpu: &Arc<CudaDevice>) -> crate::Result<Option<CublasLt>> {
        if !libraries::has_cublaslt() {
            return Ok(None);
        }
        let workspace = gpu.allocate(WORKSPACE)?;
        let _entered = gpu.enter().map_err(fault)?;
        let mut handle = null_mut();
        // SAFETY: the context is current; `handle` is what the function fills.
        if let Err(error) = check("cublasLtCreate", unsafe { lt::cublasLtCreate(&mut handle) }) {
            tracing::debug!(error, "cuBLASLt is not used");
            return Ok(None);
        }
        Ok(Some(CublasLt { handle, workspace, plans: Mutex::default() }))
    }

    /// The library's plan for this product, if it supports it.
    pub(super) fn plan(&self, gpu: &CudaDevice, product: &Product) -> Option<Arc<CublasLtPlan>> {
        let Product { rows, outputs, inputs, dtype, out_dtype, .. } = *product;
        let shape = (rows, outputs, inputs, dtype, out_dtype);
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get(&shape) {
            return plan.clone();
        }
        // Plans in use stay alive.
        if plans.len() >= MAX_PLANS {
            plans.clear();
        }
        let plan = match gpu.enter() {
            // The library uses the current device.
            Ok(_entered) => self.make(product),
            Err(failure) => Err(failure.to_string()),
        };
        let plan =
            plan.inspect_err(|error| tracing::debug!(error, ?product, "cuBLASLt has no plan")).ok().map(Arc::new);
        plans.insert(shape, plan.clone());
        plan
    }

    fn make(&self, product: &Product) -> Result<CublasLtPlan, String> {
        let Product { rows, outputs, inputs, .. } = *product;
        let (input, output) = (data_type(product.dtype), data_type(product.out_dtype));
        let layout = |kind, height: usize, width: usize| {
            let mut layout = null_mut();
            // SAFETY: `layout` is what the function fills.
            let status = unsafe {
                lt::cublasLtMatrixLayoutCreate(&mut layout, kind, height as u64, width as u64, height as i64)
            };
            check("cublasLtMatrixLayoutCreate", status).map(|()| MatrixLayout(layout))
        };
        let mut found: lt::cublasLtMatmulHeuristicResult_t;
        let mut count = 0;
        // The library is column-major: its x and W are transposed, and outᵀ = W xᵀ.
        let layouts = [layout(input, inputs, outputs)?, layout(input, inputs, rows)?, layout(output, outputs, rows)?];
        let description;
        // SAFETY: every pointer is to a local of the type and size that the function takes.
        unsafe {
            found = std::mem::zeroed();
            let compute = lt::cublasComputeType_t::CUBLAS_COMPUTE_32F;
            let scale = cudaDataType::CUDA_R_32F;
            let mut made = null_mut();
            check("cublasLtMatmulDescCreate", lt::cublasLtMatmulDescCreate(&mut made, compute, scale))?;
            description = MatmulDescription(made);
            // CUBLAS_OP_T.
            let transposed = 1i32;
            let attribute = lt::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
            check(
                "cublasLtMatmulDescSetAttribute",
                lt::cublasLtMatmulDescSetAttribute(
                    description.0,
                    attribute,
                    (&raw const transposed).cast(),
                    size_of_val(&transposed),
                ),
            )?;
            let mut made = null_mut();
            check("cublasLtMatmulPreferenceCreate", lt::cublasLtMatmulPreferenceCreate(&mut made))?;
            let preference = MatmulPreference(made);
            use lt::cublasLtMatmulPreferenceAttributes_t::*;
            let set = |attribute, bytes: *const c_void, size| {
                let status = lt::cublasLtMatmulPreferenceSetAttribute(preference.0, attribute, bytes, size);
                check("cublasLtMatmulPreferenceSetAttribute", status)
            };
            let (workspace, alignment) = (WORKSPACE, 16u32);
            set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (&raw const workspace).cast(), size_of_val(&workspace))?;
            for attribute in [
                CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
            ] {
                set(attribute, (&raw const alignment).cast(), size_of_val(&alignment))?;
            }
            let [w, x, out] = layouts.each_ref().map(|layout| layout.0);
            let status = lt::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                description.0,
                w,
                x,
                out,
                out,
                preference.0,
                1,
                &mut found,
                &mut count,
            );
            check("cublasLtMatmulAlgoGetHeuristic", status)?;
        }
        if count == 0 {
            return Err("no algorithm".to_string());
        }
        check("cublasLtMatmulAlgoGetHeuristic", found.state)?;
        Ok(CublasLtPlan { description, layouts, algorithm: found.algo })
    }

    /// Enqueues a product in a stream.
    ///
    /// # Safety
    /// The addresses are those of matrices of the plan's shape, aligned as [`Product`] requires. They live until the
    /// stream has finished with them.
    pub(super) unsafe fn run(
        &self,
        plan: &CublasLtPlan,
        alpha: f32,
        [x, w, out]: [CUdeviceptr; 3],
        stream: CUstream,
    ) -> Result<(), String> {
        let [w_layout, x_layout, out_layout] = plan.layouts.each_ref().map(|layout| layout.0);
        let (alpha, beta) = (alpha, 0f32);
        // SAFETY: the caller's promise; scalars are read before the call returns.
        let status = unsafe {
            lt::cublasLtMatmul(
                self.handle,
                plan.description.0,
                (&raw const alpha).cast(),
                w as *const c_void,
                w_layout,
                x as *const c_void,
                x_layout,
                (&raw const beta).cast(),
                out as *const c_void,
                out_layout,
                out as *mut c_void,
                out_layout,
                &plan.algorithm,
                self.workspace.address as *mut c_void,
                WORKSPACE,
                stream.cast(),
            )
        };
        check("cublasLtMatmul", status)
    }
}
