//! The command `msl-host`: compiles a Metal source, or runs one of its kernels, and reports errors.

use std::process::ExitCode;

use msl_host::{
    ArgumentKind, Buffer, Build, Constant, Error, Grid, Host, Launch, Library, Schedule, Source, Strictness, SumOrder,
    Traffic,
};

const USAGE: &str = "\
msl-host: Metal compute kernels on x86-64 Linux, without a Mac and without a GPU

  msl-host check [SOURCE OPTIONS] FILE            compiles, and lists the kernels with their parameters
  msl-host run [OPTIONS] FILE KERNEL              runs a kernel in both builds under three schedules
  msl-host count [OPTIONS] FILE KERNEL            counts what a kernel does, in units of a GPU

Source options:
  -I DIR                     a directory of headers
  -D NAME[=VALUE]            a macro
  --only KERNEL              only this kernel; may be repeated
  --instantiate NAME=F<T>    an instance of a template
  --level LEVEL              strict (default), typed (no warnings) or trusted (Apple's compiler has accepted it)
  --metal VERSION            the version of the language, 3.1 by default
  --contract, --unaligned    fused products; accesses that violate alignment

Options of run:
  --groups X[,Y[,Z]]         threadgroups (1)
  --threads X[,Y[,Z]]        threads of each (32)
  --in N=TYPE:V,V,...        a buffer to read; TYPE is float, int, uint or bytes (hexadecimal); N=@PATH reads a file
  --out N=TYPE:COUNT         a buffer to write, printed after the run
  --memory N=BYTES           threadgroup memory
  --constant N=TYPE:VALUE    a function constant: bool, short, ushort, int, uint or float
  --schedule S               forward, reverse or random:SEED, instead of all three
  --build B                  plain or checker, instead of both
  --lockstep, --same-values, --reads-end, --divergence, --flush, --sums lanes|neighbours

Options of count: those of run, except schedules and builds, and
  --lines N                  the N lines that access memory most often (0)

The exit code is 1 if the source or the kernel has errors, or if two runs differ, and 2 if the command has.
";

/// The reason for an exit: a wrong command, or an error of the kernel.
enum Stop {
    Usage(String),
    Failed(String),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop::Failed(error.to_string())
    }
}

fn main() -> ExitCode {
    match command(std::env::args().skip(1).collect()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Stop::Failed(reason)) => {
            eprintln!("{reason}");
            ExitCode::from(1)
        }
        Err(Stop::Usage(reason)) => {
            eprintln!("msl-host: {reason}\nTry msl-host --help.");
            ExitCode::from(2)
        }
    }
}

fn command(arguments: Vec<String>) -> Result<(), Stop> {
    let mut arguments = arguments.into_iter();
    match arguments.next().as_deref() {
        Some("check") => check(&Request::parse(arguments, false)?),
        Some("run") => run(&Request::parse(arguments, true)?),
        Some("count") => count(&Request::parse(arguments, true)?),
        Some("--help" | "-h" | "help") => {
            print!("{USAGE}");
            Ok(())
        }
        Some(other) => Err(Stop::Usage(format!("no command {other}: check, run or count"))),
        None => Err(Stop::Usage("no command: check, run or count".into())),
    }
}

/// The parsed command line.
#[derive(Default)]
struct Request {
    places: Vec<String>,
    source: Vec<(String, String)>,
    groups: [u32; 3],
    threads: [u32; 3],
    inputs: Vec<(u32, Vec<u8>)>,
    outputs: Vec<(u32, Type, usize)>,
    memory: Vec<(u32, usize)>,
    constants: Vec<(u32, Constant)>,
    schedules: Vec<Schedule>,
    builds: Vec<Build>,
    flags: Vec<String>,
    sums: SumOrder,
    lines_shown: usize,
}

#[derive(Clone, Copy)]
enum Type {
    Float,
    Int,
    UInt,
    Bytes,
}

const SOURCE_FLAGS: &[&str] = &["--contract", "--unaligned"];
const RUN_FLAGS: &[&str] = &["--lockstep", "--same-values", "--reads-end", "--divergence", "--flush"];

impl Request {
    fn parse(mut arguments: impl Iterator<Item = String>, runs: bool) -> Result<Request, Stop> {
        let mut request = Request { groups: [1; 3], threads: [32, 1, 1], ..Request::default() };
        while let Some(word) = arguments.next() {
            let short = ["-I", "-D"].into_iter().find(|s| word.starts_with(s));
            if SOURCE_FLAGS.contains(&word.as_str()) || (runs && RUN_FLAGS.contains(&word.as_str())) {
                request.flags.push(word);
            } else if let Some(short) = short.filter(|s| word.len() > s.len()) {
                request.source.push((short.into(), word[2..].into()));
            } else if word.starts_with('-') {
                let value = arguments.next().ok_or_else(|| Stop::Usage(format!("{word} needs a value")))?;
                match word.as_str() {
                    "-I" | "-D" | "--only" | "--instantiate" | "--level" | "--metal" => {
                        request.source.push((word, value));
                    }
                    _ if runs => request.option(&word, &value)?,
                    _ => return Err(Stop::Usage(format!("no option {word}"))),
                }
            } else {
                request.places.push(word);
            }
        }
        let wanted = if runs { 2 } else { 1 };
        if request.places.len() != wanted {
            let what = if runs { "a file and a kernel" } else { "one file" };
            return Err(Stop::Usage(format!("expected {what}, got {:?}", request.places)));
        }
        Ok(request)
    }

    fn option(&mut self, word: &str, value: &str) -> Result<(), Stop> {
        let bad = || Stop::Usage(format!("{word} {value}: see msl-host --help"));
        let numbered = || {
            let (index, rest) = value.split_once('=').ok_or_else(bad)?;
            Ok::<_, Stop>((index.parse::<u32>().map_err(|_| bad())?, rest))
        };
        match word {
            "--groups" => self.groups = extent(value).ok_or_else(bad)?,
            "--threads" => self.threads = extent(value).ok_or_else(bad)?,
            "--in" => {
                let (index, rest) = numbered()?;
                let bytes = match rest.strip_prefix('@') {
                    Some(path) => std::fs::read(path).map_err(|e| Stop::Failed(format!("{path}: {e}")))?,
                    None => input(rest).ok_or_else(bad)?,
                };
                self.inputs.push((index, bytes));
            }
            "--out" => {
                let (index, rest) = numbered()?;
                let (kind, count) = rest.split_once(':').ok_or_else(bad)?;
                let kind = element(kind).ok_or_else(bad)?;
                let count = count.parse().ok().filter(|n: &usize| *n <= 1 << 28).ok_or_else(bad)?;
                self.outputs.push((index, kind, count));
            }
            "--memory" => {
                let (index, rest) = numbered()?;
                self.memory.push((index, rest.parse().map_err(|_| bad())?));
            }
            "--constant" => {
                let (index, rest) = numbered()?;
                self.constants.push((index, constant(rest).ok_or_else(bad)?));
            }
            "--schedule" => self.schedules.push(schedule(value).ok_or_else(bad)?),
            "--build" => self.builds.push(match value {
                "plain" => Build::Plain,
                "checker" => Build::Checker,
                _ => return Err(bad()),
            }),
            "--lines" => self.lines_shown = value.parse().map_err(|_| bad())?,
            "--sums" => {
                self.sums = match value {
                    "lanes" => SumOrder::Lanes,
                    "neighbours" => SumOrder::Neighbours,
                    _ => return Err(bad()),
                }
            }
            _ => return Err(Stop::Usage(format!("no option {word}"))),
        }
        Ok(())
    }

    fn has(&self, flag: &str) -> bool {
        self.flags.iter().any(|f| f == flag)
    }

    fn source(&self) -> Result<Source, Stop> {
        let mut source = Source::file(&self.places[0])?;
        for (word, value) in &self.source {
            let bad = || Stop::Usage(format!("{word} {value}: see msl-host --help"));
            source = match word.as_str() {
                "-I" => source.include_dir(value),
                "-D" => {
                    let (name, value) = value.split_once('=').unwrap_or((value, "1"));
                    source.define(name, value)
                }
                "--only" => source.only([value.as_str()]),
                "--instantiate" => {
                    let (name, function) = value.split_once('=').ok_or_else(bad)?;
                    source.instantiate(name, function)
                }
                "--level" => source.strictness(match value.as_str() {
                    "strict" => Strictness::Strict,
                    "typed" => Strictness::Typed,
                    "trusted" => Strictness::Trusted,
                    _ => return Err(bad()),
                }),
                _ => {
                    let (major, minor) = value.split_once('.').ok_or_else(bad)?;
                    let number = |text: &str| text.parse().ok().filter(|n: &u32| *n < 100).ok_or_else(bad);
                    source.language(number(major)?, number(minor)?)
                }
            };
        }
        source = if self.has("--contract") { source.contract() } else { source };
        Ok(if self.has("--unaligned") { source.unaligned() } else { source })
    }
}

fn extent(text: &str) -> Option<[u32; 3]> {
    let mut extent = [1; 3];
    let parts: Vec<&str> = text.split(',').collect();
    for (i, part) in parts.iter().enumerate() {
        *extent.get_mut(i)? = part.parse().ok()?;
    }
    Some(extent)
}

fn element(text: &str) -> Option<Type> {
    Some(match text {
        "float" => Type::Float,
        "int" => Type::Int,
        "uint" => Type::UInt,
        "bytes" => Type::Bytes,
        _ => return None,
    })
}

/// Parses `float:1,2.5` and similar inputs.
fn input(text: &str) -> Option<Vec<u8>> {
    let (kind, values) = text.split_once(':')?;
    let kind = element(kind)?;
    let mut bytes = Vec::new();
    for value in values.split(',') {
        match kind {
            Type::Float => bytes.extend(value.parse::<f32>().ok()?.to_le_bytes()),
            Type::Int => bytes.extend(value.parse::<i32>().ok()?.to_le_bytes()),
            Type::UInt => bytes.extend(value.parse::<u32>().ok()?.to_le_bytes()),
            Type::Bytes => bytes.push(u8::from_str_radix(value, 16).ok()?),
        }
    }
    Some(bytes)
}

fn constant(text: &str) -> Option<Constant> {
    let (kind, value) = text.split_once(':')?;
    Some(match kind {
        "bool" => Constant::Bool(value.parse().ok()?),
        "short" => Constant::Short(value.parse().ok()?),
        "ushort" => Constant::UShort(value.parse().ok()?),
        "int" => Constant::Int(value.parse().ok()?),
        "uint" => Constant::UInt(value.parse().ok()?),
        "float" => Constant::Float(value.parse().ok()?),
        _ => return None,
    })
}

fn schedule(text: &str) -> Option<Schedule> {
    Some(match text {
        "forward" => Schedule::Forward,
        "reverse" => Schedule::Reverse,
        _ => Schedule::Random(text.strip_prefix("random:")?.parse().ok()?),
    })
}

fn check(request: &Request) -> Result<(), Stop> {
    let (host, source) = (Host::new()?, request.source()?);
    let library = host.compile(&source, Build::Plain)?;
    host.compile(&source, Build::Checker)?;
    for kernel in library.kernels() {
        println!("{}", kernel.name);
        for argument in &kernel.arguments {
            let place = match &argument.kind {
                ArgumentKind::Buffer(index) => format!("buffer({index})"),
                ArgumentKind::Threadgroup(index) => format!("threadgroup({index})"),
                ArgumentKind::Builtin(_) => continue,
            };
            let condition = argument.only_if.as_ref().map_or(String::new(), |name| format!(" if {name}"));
            println!("  {place} {}{condition}", argument.name);
        }
    }
    Ok(())
}

fn run(request: &Request) -> Result<(), Stop> {
    let (host, source) = (Host::new()?, request.source()?);
    let all = [Schedule::Forward, Schedule::Reverse, Schedule::Random(1)];
    let schedules = if request.schedules.is_empty() { &all[..] } else { &request.schedules };
    let mut builds =
        if request.builds.is_empty() { vec![Build::Plain, Build::Checker] } else { request.builds.clone() };
    if request.has("--lockstep") {
        builds = vec![Build::Checker];
    }
    let mut first: Option<Vec<Vec<u8>>> = None;
    for build in builds {
        let library = host.compile(&source, build)?;
        for &schedule in schedules {
            let outputs = run_once(request, &library, schedule)?;
            match &first {
                None => first = Some(outputs),
                Some(first) if *first != outputs => {
                    return Err(Stop::Failed(format!("{build:?} {schedule:?} gives other results than the first run")));
                }
                Some(_) => {}
            }
        }
    }
    for ((index, kind, _), bytes) in request.outputs.iter().zip(first.unwrap_or_default()) {
        let word = |b: &[u8]| [b[0], b[1], b[2], b[3]];
        let values: Vec<String> = match kind {
            Type::Float => bytes.chunks_exact(4).map(|b| f32::from_le_bytes(word(b)).to_string()).collect(),
            Type::Int => bytes.chunks_exact(4).map(|b| i32::from_le_bytes(word(b)).to_string()).collect(),
            Type::UInt => bytes.chunks_exact(4).map(|b| u32::from_le_bytes(word(b)).to_string()).collect(),
            Type::Bytes => bytes.iter().map(|b| format!("{b:02x}")).collect(),
        };
        println!("buffer({index}): {}", values.join(" "));
    }
    Ok(())
}

/// Memory that a kernel writes. Unwritten bytes are equal in every run.
fn outputs(request: &Request) -> Vec<Vec<u8>> {
    let size = |kind: Type| if matches!(kind, Type::Bytes) { 1 } else { 4 };
    request.outputs.iter().map(|o| vec![0xFF; o.2 * size(o.1)]).collect()
}

fn launch<'a>(request: &'a Request, outputs: &'a mut [Vec<u8>]) -> Launch<'a> {
    let grid = Grid::Threadgroups { groups: request.groups, threads: request.threads };
    let mut launch = Launch::new(&request.places[1], grid).sum_order(request.sums);
    for (index, bytes) in &request.inputs {
        launch = launch.buffer(*index, Buffer::read(bytes));
    }
    for ((index, ..), bytes) in request.outputs.iter().zip(outputs) {
        launch = launch.buffer(*index, Buffer::read_write(bytes));
    }
    launch = request.memory.iter().fold(launch, |l, &(index, bytes)| l.threadgroup_memory(index, bytes));
    launch = request.constants.iter().fold(launch, |l, &(index, value)| l.constant(index, value));
    for flag in &request.flags {
        launch = match flag.as_str() {
            "--lockstep" => launch.lockstep(),
            "--same-values" => launch.same_values(),
            "--reads-end" => launch.reads_end_at_barriers(),
            "--divergence" => launch.allow_divergence(),
            "--flush" => launch.flush_subnormals(),
            _ => launch, // options of the source
        };
    }
    launch
}

fn run_once(request: &Request, library: &Library, schedule: Schedule) -> Result<Vec<Vec<u8>>, Stop> {
    let mut outputs = outputs(request);
    library.run(&launch(request, &mut outputs), schedule)?;
    Ok(outputs)
}

fn count(request: &Request) -> Result<(), Stop> {
    let (host, source) = (Host::new()?, request.source()?);
    let mut outputs = outputs(request);
    let counts = host.count(&source, &launch(request, &mut outputs))?;
    println!("{counts}");
    for line in counts.lines.iter().take(request.lines_shown) {
        let Traffic { accesses, bytes, units, .. } = line.traffic;
        println!("{}: {} {accesses} accesses, {bytes} bytes, {units} units", line.line, line.space);
    }
    Ok(())
}
