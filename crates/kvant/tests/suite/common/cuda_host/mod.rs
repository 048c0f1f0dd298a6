//! A CUDA device that runs kernels on this machine's CPU, compiled by clang: kernels without PTX for clusters and
//! warpgroup products. `language.h` implements the parts of CUDA C++ that they use, [`PTX`] those of PTX; `runtime.cpp`
//! runs the threads of a block as fibers. `KVANT_TEST_DEVICE=cuda-host` selects this device. `KVANT_CUDA_LIKE` lowers
//! its limits as for a GPU, or (`sm_90`) allows bulk copies.
//!
//! Other kernels do not compile here: their launches fail with the compiler's first message.

use std::{
    any::Any,
    cell::UnsafeCell,
    collections::HashMap,
    ffi::{c_int, c_uint, c_void},
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::{self, Command},
    ptr::NonNull,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use super::without_gpu::Model;
use kvant::{
    Device, Error, Result,
    gpu::{self, Constant, Executor, Launch, LaunchPass, Limits, Memory, Replay, Wait},
};

/// The compiler, as in msl-host.
const CLANG: &str = "clang++-19";
/// Maximum arguments of a kernel.
const ARGUMENTS: usize = 32;

/// The device.
pub fn device() -> Device {
    gpu::cuda_device(CudaHost { number: 0 })
}

/// Groups of two and of three such devices. Each device has a copy of every kernel, so that all run at the same time.
pub fn groups() -> Vec<Device> {
    // Tests share them: groups with one device in common would wait for each other.
    static GROUPS: OnceLock<[Device; 2]> = OnceLock::new();
    let group = |numbers: std::ops::Range<usize>| {
        let devices: Vec<Device> = numbers.map(|number| gpu::cuda_device(CudaHost { number })).collect();
        Device::group(&devices).expect("they are connected")
    };
    GROUPS.get_or_init(|| [group(1..3), group(3..6)]).to_vec()
}

/// Devices: one alone, and those of groups.
const NUMBERS: usize = 6;

type Run = unsafe extern "C" fn(*mut *mut c_void, *const c_uint, *const c_uint, c_uint) -> c_int;

/// Compiled kernels by their text.
type Libraries = HashMap<String, libloading::Library>;

/// Libraries of each device. The lock is held while one runs: the runtime's state is global.
static LIBRARIES: [Mutex<Option<Libraries>>; NUMBERS] = [const { Mutex::new(None) }; NUMBERS];

#[derive(Clone, Copy)]
struct CudaHost {
    number: usize,
}

/// Memory in 16-byte words, so that vectors are aligned.
struct HostMemory {
    words: UnsafeCell<Vec<u128>>,
    /// Whether it is the host's, which has an address.
    is_of_host: bool,
}

// SAFETY: a device runs one call at a time, and the lock excludes other kernels.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    fn of(memory: &dyn Memory) -> *mut u8 {
        let memory = memory.as_any().downcast_ref::<HostMemory>().expect("memory of this device");
        // SAFETY: only the address is taken.
        unsafe { (*memory.words.get()).as_mut_ptr().cast() }
    }
}

impl Memory for HostMemory {
    fn host(&self) -> Option<NonNull<u8>> {
        if self.is_of_host { NonNull::new(HostMemory::of(self)) } else { None }
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn fault(reason: impl std::fmt::Display) -> Error {
    Error::DeviceFault { device: "cuda-host".to_string(), reason: reason.to_string() }
}

impl Executor for CudaHost {
    fn name(&self) -> String {
        "CUDA kernels on this CPU".to_string()
    }
    fn limits(&self) -> Limits {
        let like = std::env::var("KVANT_CUDA_LIKE").unwrap_or_default();
        let threadgroup_bytes = match like.as_str() {
            "sm_80" => Model::A100.limits().threadgroup_bytes,
            "sm_89" => Model::Rtx4090.limits().threadgroup_bytes,
            "sm_90" | "" => 227 << 10,
            other => panic!("KVANT_CUDA_LIKE is {other:?}; it can be sm_80, sm_89 or sm_90"),
        };
        // With bulk copies, but without warpgroup products.
        let is_hopper = like == "sm_90";
        Limits {
            threads: 1024,
            threadgroup_bytes,
            // Kernels whose blocks wait for each other get one block, because blocks run one after the other. Kernels
            // with bulk copies that run here do not wait.
            busy_groups: if is_hopper { 6 } else { 1 },
            warpgroup_products: false,
            library_products: false,
            clusters: is_hopper,
        }
    }
    fn in_order(&self) -> bool {
        true
    }
    fn allocate(&self, bytes: usize, zeroed: bool) -> Result<Box<dyn Memory>> {
        let fill = if zeroed { 0 } else { u128::MAX / 255 * 0xA5 };
        Ok(Box::new(HostMemory { words: UnsafeCell::new(vec![fill; bytes.div_ceil(16)]), is_of_host: false }))
    }
    fn number(&self) -> Option<usize> {
        Some(self.number)
    }
    fn share_with(&self, _others: &[usize]) -> Result<()> {
        Ok(())
    }
    fn allocate_host(&self, bytes: usize) -> Result<Box<dyn Memory>> {
        Ok(Box::new(HostMemory { words: UnsafeCell::new(vec![0; bytes.div_ceil(16)]), is_of_host: true }))
    }
    fn upload(&self, memory: &dyn Memory, offset: usize, bytes: &[u8]) -> Result<()> {
        // SAFETY: the caller keeps the range within the allocation.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), HostMemory::of(memory).add(offset), bytes.len()) };
        Ok(())
    }
    fn download(&self, memory: &dyn Memory, offset: usize, out: &mut [u8]) -> Result<()> {
        // SAFETY: as in `upload`.
        unsafe { std::ptr::copy_nonoverlapping(HostMemory::of(memory).add(offset), out.as_mut_ptr(), out.len()) };
        Ok(())
    }
    fn begin(&self) -> Result<Box<dyn LaunchPass>> {
        Ok(Box::new(Recorded { number: self.number, launches: Vec::new() }))
    }
    fn capture(self: Arc<Self>, launches: Vec<Launch>) -> Result<Box<dyn Replay>> {
        Ok(Box::new(Recorded { number: self.number, launches }))
    }
}

struct Recorded {
    number: usize,
    launches: Vec<Launch>,
}

impl Replay for Recorded {
    fn replay(&self) -> Result<Option<Box<dyn Wait>>> {
        self.launches.iter().try_for_each(|launch| run(launch, self.number))?;
        Ok(None)
    }
}

impl LaunchPass for Recorded {
    fn launch(&mut self, launch: Launch) -> Result<()> {
        if self.number == 0 {
            return run(&launch, self.number);
        }
        // Ranks run at the same time.
        self.launches.push(launch);
        Ok(())
    }
    fn commit(self: Box<Self>) -> Result<Box<dyn Wait>> {
        self.replay()?;
        Ok(Box::new(Done))
    }
}

struct Done;

impl Wait for Done {
    fn wait(self: Box<Self>) -> Result<()> {
        Ok(())
    }
    fn is_done(&self) -> bool {
        true
    }
}

fn run(launch: &Launch, number: usize) -> Result<()> {
    let mut values = [0u64; ARGUMENTS];
    for binding in &launch.bindings {
        // SAFETY: the binding is within the allocation.
        values[binding.index as usize] = unsafe { HostMemory::of(binding.memory()).add(binding.offset) } as u64;
    }
    let mut arguments = values.each_mut().map(|value| std::ptr::from_mut(value).cast::<c_void>());
    if let Some((index, bytes)) = &launch.params {
        arguments[*index as usize] = bytes.as_ptr().cast_mut().cast();
    }
    let text = format!("{}// {number}\n", text(launch));
    let mut libraries = LIBRARIES[number].lock().unwrap_or_else(PoisonError::into_inner);
    let libraries = libraries.get_or_insert_default();
    if !libraries.contains_key(&text) {
        let library = compile(&text).map_err(|why| fault(format!("{} does not run here: {why}", launch.kernel)))?;
        libraries.insert(text.clone(), library);
    }
    // SAFETY: runtime.cpp has this function.
    let run = unsafe { libraries[&text].get::<Run>(b"kvant_run") }.map_err(fault)?;
    let (grid, threads) = (launch.grid.groups, launch.grid.threads);
    // SAFETY: the arguments match the kernel's, in memory that the launch keeps; the lock is held.
    match unsafe { run(arguments.as_mut_ptr(), grid.as_ptr(), threads.as_ptr(), launch.threadgroup_bytes) } {
        0 => Ok(()),
        _ => Err(fault(format!("{}: threads wait for others that have ended", launch.kernel))),
    }
}

/// The PTX that kernels use, by a part of the statement, and its implementation here. Asynchronous copies complete at
/// once.
const PTX: [(&str, &str); 62] = [
    ("fma.rn.bf16x2 %0, %0, %1, %2", "pair = kvant_fma<kvant_of_bf16, kvant_to_bf16>(pair, 0x3F803F80, 0xC300C300);"),
    ("setmaxnreg", ";"),
    ("%globaltimer", "time = 1;"),
    ("st.relaxed.sys.global.v2.u64", "kvant_publish(to->halves, first); kvant_publish(to->halves + 1, second);"),
    ("ld.relaxed.sys.global.v2.u64", "first = kvant_look(from->halves); second = kvant_look(from->halves + 1);"),
    ("st.relaxed.sys.global.u32", "kvant_publish(failed, 1u);"),
    ("ld.relaxed.sys.global.u32", "seen = kvant_look(failed);"),
    ("st.release.sys.global.u32", "kvant_publish(to, number);"),
    ("ld.acquire.sys.global.u32", "seen = kvant_look(from);"),
    ("griddepcontrol", ";"),
    ("fence.mbarrier_init", ";"),
    ("elect.sync", "is = threadIdx.x % 32 == 0;"),
    ("mbarrier.arrive.expect_tx", "kvant_barrier_arrive(kvant_at(at));"),
    ("cp.async.bulk.shared::cluster.global.mbarrier", "kvant_copy(to, from, bytes, bytes);"),
    ("\"n\"((WARPS + 1) * 32)", "kvant_wait_for_threads(1, (WARPS + 1) * 32);"),
    ("\"n\"((WARPS + ADDERS) * 32)", "kvant_wait_for_threads(1, (WARPS + ADDERS) * 32);"),
    (
        "lop3.b32 %0, %1, %2, %3, 0xEA;\" : \"=r\"(pair)",
        "pair = ((i < 4 ? two.x : two.y) >> i % 4 * 4 & 0x000F000F) | 0x43004300;",
    ),
    ("mad.wide.u32 %0", "row = first + (unsigned long)slot * (row_slot * BYTES);"),
    ("prmt.b32 %0", "out = __byte_perm(a, b, which);"),
    ("lop3.b32 %0, %1, %2, %3, 0xCA", "out = (mask & a) | (~mask & b);"),
    ("ld.shared.u32 %0, [%1 + %2]", "kvant_load(address + AT + OFFSET, x);"),
    ("ld.shared.u32 %0, [%1];", "kvant_load(at, x);"),
    ("bar.sync %0, %1;", "kvant_wait_for_threads(barrier, threads);"),
    ("bar.sync 1, %0;", "kvant_wait_for_threads(1, CONSUMERS);"),
    ("bar.red.or.pred any", "any = kvant_count_of_threads(barrier, threads, found) > 0;"),
    ("mbarrier.init.shared::cta.b64", "kvant_store(at, (unsigned long)count);"),
    ("mbarrier.arrive.shared::cta.b64", "kvant_barrier_arrive(kvant_at(at));"),
    ("cp.async.mbarrier.arrive.noinc.shared::cta.b64", "kvant_barrier_arrive(kvant_at(at));"),
    ("@!over bra again", "kvant_barrier_wait(kvant_at(at), parity);"),
    ("cvt.f32.f16 %0", "x = kvant_of_half(bits);"),
    ("cvt.rn.f16.f32 %0", "bits = kvant_to_half(x);"),
    ("cvt.rn.f16x2.f32 %0", "pair = kvant_to_half(low) | unsigned(kvant_to_half(high)) << 16;"),
    ("cvt.rn.bf16x2.f32 %0", "pair = float_to_bf16(low) | unsigned(float_to_bf16(high)) << 16;"),
    ("sub.f16x2 %0", "out = kvant_fma<kvant_of_half, kvant_to_half>(constant, 0xBC00BC00, pair);"),
    ("mul.f16x2 %0", "out = kvant_fma<kvant_of_half, kvant_to_half>(factor, pair, 0x80008000);"),
    (
        "\"r\"(constant), \"r\"(0xBF80BF80)",
        "out = kvant_fma<kvant_of_bf16, kvant_to_bf16>(constant, 0xBF80BF80, pair);",
    ),
    (
        "\"r\"(factor), \"r\"(pair), \"r\"(0x80008000)",
        "out = kvant_fma<kvant_of_bf16, kvant_to_bf16>(factor, pair, 0x80008000);",
    ),
    ("fma.rn.f16x2 %0, %1, %2, %3", "out = kvant_fma<kvant_of_half, kvant_to_half>(pair, 0, sums);"),
    ("fma.rn.bf16x2 %0, %1, %1, %2", "out = kvant_fma<kvant_of_bf16, kvant_to_bf16>(pair, pair, sums);"),
    ("min.f16x2 t", "y = kvant_made_finite(pair, 0x7C00, 0x7BFF);"),
    ("min.bf16x2 t", "y = kvant_made_finite(pair, 0x7F80, 0x7F7F);"),
    (
        "row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, \"\"{%10",
        "kvant_mma_alone<kvant_of_half>(d, a, b);",
    ),
    ("%9}, {%10, %10, %10, %10};", "kvant_mma_alone<kvant_of_bf16>(d, a, b);"),
    ("mma.sync.aligned.m16n8k16.row.col.f32.f16", "kvant_mma<kvant_of_half>(c, a, b);"),
    ("mma.sync.aligned.m16n8k16.row.col.f32.bf16", "kvant_mma<kvant_of_bf16>(c, a, b);"),
    (
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16",
        "{ const uint4 all = kvant_load_matrices(from); w = make_uint2(all.x, all.y); }",
    ),
    ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", "w = kvant_load_matrices(from);"),
    (
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\": \"=r\"(w.x)",
        "w = kvant_load_matrices_transposed(from);",
    ),
    (
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\": \"=r\"(a[j][0])",
        "{ const uint4 all = kvant_load_matrices_transposed((j == 0 ? from + other : from - other) + (i + j) * 32); \
         a[j][0] = all.x; a[j][1] = all.y; a[j][2] = all.z; a[j][3] = all.w; }",
    ),
    ("movmatrix.sync.aligned.m8n8.trans.b16", "out = kvant_transpose8(pair);"),
    ("ex2.approx.ftz.f32 %0", "y = exp2f(x);"),
    ("max.NaN.f32 %0, %1, %2;\" : \"=f\"(m)", "m = a != a || b != b ? a + b : fmaxf(a, b);"),
    ("cp.async.cg.shared.global [%0], [%1], 16", "kvant_copy(to, from, 16, bytes);"),
    ("cp.async.ca.shared.global [%0], [%1], %3", "kvant_copy(to, from, BYTES, bytes);"),
    ("cp.async.commit_group", ";"),
    ("cp.async.wait_group", ";"),
    ("prefetch.global.L2 [%0]", ";"),
    ("ld.acquire.gpu.global.u32 %0, [%1];\" : \"=r\"(seen)", "seen = *arrived;"),
    ("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1", "before = (*counter)++;"),
    (
        "ld.shared.v2.b32 {%0, %1}, [%2];\" : \"=f\"(threshold)",
        "kvant_load(cell * (CELL_COPIES * 8) + cells, threshold, index);",
    ),
    ("ld.shared.b32 %0, [%1];\" : \"=f\"(c)", "kvant_load(index * (COPIES * 4) + centroids, c);"),
    ("st.shared.u16 [%0], %1;\" ::\"r\"(at + j)", "kvant_store(at + j, x);"),
];

/// The kernel as C++: its constants, its text with all headers, and its call.
fn text(launch: &Launch) -> String {
    let mut text = String::from("#include \"language.h\"\n");
    for (name, value) in &launch.constants {
        let value = match value {
            Constant::Bool(value) => value.to_string(),
            Constant::UInt(value) => format!("{value}u"),
        };
        text += &format!("#define {name} {value}\n");
    }
    text += &format!("#define KERNEL_{} 1\n#define KVANT_KERNEL kvant_kernel\n", launch.kernel);
    let expanded = launch.source.expand() + &launch.source.assertions();
    let mut lines = expanded.lines();
    while let Some(line) = lines.next() {
        let line = match line.trim() {
            line if line.starts_with("asm") => {
                let mut statement = line.to_string();
                while !statement.ends_with(';') {
                    statement += lines.next().unwrap_or(";").trim();
                }
                let known = PTX.iter().find(|(part, _)| statement.contains(part));
                known.map_or_else(|| format!("kvant_has_no_ptx({statement:?});"), |(_, here)| (*here).to_string())
            }
            // Dynamic shared memory is not a static variable.
            line => match line.strip_prefix("extern __shared__ ").and_then(|rest| rest.strip_suffix("[];")) {
                Some(declared) => {
                    let (dtype, name) = declared.rsplit_once(' ').expect("a type and a name");
                    let dtype = dtype.rsplit(' ').next().unwrap_or(dtype);
                    format!("{dtype} *{name} = reinterpret_cast<{dtype} *>(kvant_shared);")
                }
                None => line.to_string(),
            },
        };
        text += &line;
        text.push('\n');
    }
    text + "extern \"C\" void kvant_enter(void **args) { kvant_call(kvant_kernel, args); }\n"
}

fn compile(text: &str) -> std::result::Result<libloading::Library, String> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/suite/common/cuda_host");
    let read = |name: &str| std::fs::read_to_string(sources.join(name)).map_err(|error| error.to_string());
    let (language, runtime) = (read("language.h")?, read("runtime.cpp")?);
    let include = format!("-I{}", sources.display());
    let object = make(&runtime, "o", &["-c"])?;
    let linked = [include.as_str(), "-shared", object.to_str().ok_or("a path that is no UTF-8")?];
    let path = make(&format!("// {:x} {:x}\n{text}", hash(&language), hash(&runtime)), "so", &linked)?;
    // SAFETY: it is a kernel with its runtime; loading it runs nothing.
    unsafe { libloading::Library::new(&path) }.map_err(|error| error.to_string())
}

fn hash(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

/// The file that clang makes of a text; reused if it exists.
fn make(text: &str, extension: &str, options: &[&str]) -> std::result::Result<PathBuf, String> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda-host");
    std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    let path = folder.join(format!("{:016x}.{extension}", hash(text)));
    // Devices of a group need the same files.
    static MAKING: Mutex<()> = Mutex::new(());
    let _making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    if path.exists() {
        return Ok(path);
    }
    // Written under a name of this process until it is complete.
    let (source, made) =
        (path.with_extension(format!("{}.cpp", process::id())), path.with_extension(process::id().to_string()));
    std::fs::write(&source, text).map_err(|error| error.to_string())?;
    let output = Command::new(CLANG)
        .args(["-std=c++17", "-O1", "-fPIC", "-w", "-ffp-contract=on", "-mf16c"])
        .arg(&source)
        .args(options)
        .arg("-o")
        .arg(&made)
        .output()
        .map_err(|error| format!("{CLANG}: {error}"))?;
    let _ = std::fs::remove_file(&source);
    if !output.status.success() {
        let messages = String::from_utf8_lossy(&output.stderr);
        return Err(messages.lines().find(|line| line.contains("error")).unwrap_or(&messages).to_string());
    }
    std::fs::rename(&made, &path).map_err(|error| error.to_string())?;
    Ok(path)
}
