//! Inserts counting calls into the compiler's output, LLVM's text: one at the start of every basic block, one before
//! every access of memory. It also classifies the instructions of a block as operations of a GPU.
//!
//! A vector operation of n elements counts as n operations, because Apple's GPUs are scalar per thread. Moves, changes
//! of width, and products that are fused with an addition do not count.

use std::collections::{HashMap, HashSet};

/// The kinds of operations that differ in speed on Apple's GPUs. `NAMES` has their names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Float32,
    Float16,
    Int,
    /// Products, shifts, counting of bits: a quarter of the rate.
    IntSlow,
    Int64,
    Int64Product,
    /// Conversions between integers and floats, and rounding.
    Convert,
    /// Powers of 2 and logarithms to base 2.
    Exp,
    Reciprocal,
    Root,
    Trigonometric,
    Branch,
}

pub(crate) const OPS: usize = 12;

/// The operations of a block, by `Op`.
pub(crate) type Ops = [u32; OPS];

/// A place that accesses memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Site {
    pub file: String,
    pub line: u32,
}

#[derive(Debug, Default)]
pub(crate) struct Table {
    pub blocks: Vec<Ops>,
    pub sites: Vec<Site>,
}

/// The type of a value: the width of its elements in bits, their number, and their kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ValueType {
    kind: Element,
    bits: u32,
    count: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Element {
    Integer,
    Float,
    Pointer,
    Other,
}

impl ValueType {
    fn bytes(self) -> u32 {
        (self.bits * self.count).div_ceil(8)
    }
}

/// The type at the start of a text, and the rest of the text.
fn split_type(text: &str) -> Option<(ValueType, &str)> {
    let text = text.trim_start();
    let one = |kind, bits, len: usize| Some((ValueType { kind, bits, count: 1 }, &text[len..]));
    for (name, kind, bits) in [
        ("float", Element::Float, 32),
        ("half", Element::Float, 16),
        ("bfloat", Element::Float, 16),
        ("double", Element::Float, 64),
        ("ptr", Element::Pointer, 64),
    ] {
        if text.strip_prefix(name).is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_')) {
            return one(kind, bits, name.len());
        }
    }
    if let Some(rest) = text.strip_prefix('i') {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        return one(Element::Integer, rest[..digits].parse().ok()?, 1 + digits);
    }
    // `<4 x float>`, `[8 x i32]`.
    let close = match text.bytes().next()? {
        b'<' => '>',
        b'[' => ']',
        b'{' => {
            let end = balanced(text)?;
            let mut bits = 0;
            let mut rest = text[1..end - 1].trim();
            while let Some((t, more)) = split_type(rest) {
                bits += t.bits * t.count;
                rest = more.trim_start().trim_start_matches(',');
            }
            return Some((ValueType { kind: Element::Other, bits, count: 1 }, &text[end..]));
        }
        _ => return None,
    };
    let (count, rest) = text[1..].trim_start().split_once(" x ")?;
    let (element, rest) = split_type(rest)?;
    let rest = rest.trim_start().strip_prefix(close)?;
    Some((ValueType { count: count.trim().parse::<u32>().ok()? * element.count, ..element }, rest))
}

/// The length of a bracketed text, brackets included.
fn balanced(text: &str) -> Option<usize> {
    let mut depth = 0;
    for (i, c) in text.char_indices() {
        match c {
            '(' | '[' | '{' | '<' => depth += 1,
            ')' | ']' | '}' | '>' => {
                depth -= 1;
                if depth == 0 {
                    return Some(i + 1);
                }
            }
            _ => {}
        }
    }
    None
}

/// The parts of a text between commas outside of brackets.
fn parts(text: &str) -> Vec<&str> {
    let (mut list, mut depth, mut from) = (Vec::new(), 0, 0);
    for (i, c) in text.char_indices() {
        match c {
            '(' | '[' | '{' | '<' => depth += 1,
            ')' | ']' | '}' | '>' => depth -= 1,
            ',' if depth == 0 => {
                list.push(text[from..i].trim());
                from = i + 1;
            }
            _ => {}
        }
    }
    list.push(text[from..].trim());
    list
}

/// Words between an opcode and its type.
const FLAGS: &[&str] = &[
    "nuw", "nsw", "exact", "disjoint", "nneg", "samesign", "fast", "nnan", "ninf", "nsz", "arcp", "contract", "afn",
    "reassoc", "inbounds", "nusw", "volatile", "atomic",
];

fn without_flags(mut text: &str) -> &str {
    loop {
        text = text.trim_start();
        let word = text.split([' ', '(']).next().unwrap_or("");
        if !FLAGS.contains(&word) {
            return text;
        }
        text = &text[word.len()..];
    }
}

/// An instruction: the value that it defines, its name, and the rest of its line.
struct Instruction<'a> {
    result: Option<&'a str>,
    opcode: &'a str,
    rest: &'a str,
}

fn instruction(line: &str) -> Option<Instruction<'_>> {
    let text = line.strip_prefix("  ")?.trim_start();
    let (result, text) = match text.split_once(" = ") {
        Some((name, rest)) if name.starts_with('%') => (Some(name), rest),
        _ => (None, text),
    };
    let (mut opcode, mut rest) = text.split_once(' ').unwrap_or((text, ""));
    if matches!(opcode, "tail" | "notail" | "musttail") {
        (opcode, rest) = rest.split_once(' ')?;
    }
    // Metadata at the end.
    let rest = rest.find(", !").map_or(rest, |i| &rest[..i]);
    Some(Instruction { result, opcode, rest })
}

/// The local values that a text names.
fn names(text: &str) -> impl Iterator<Item = &str> {
    text.match_indices('%').map(|(i, _)| {
        let len = text[i + 1..].bytes().take_while(|b| b.is_ascii_alphanumeric() || b"._-$".contains(b)).count();
        &text[i..i + 1 + len]
    })
}

/// A function: the values that it defines, and their users.
#[derive(Default)]
struct Function<'a> {
    defined: HashMap<&'a str, Instruction<'a>>,
    users: HashMap<&'a str, Vec<(&'a str, &'a str)>>,
}

impl<'a> Function<'a> {
    fn of(lines: &[&'a str]) -> Function<'a> {
        let mut f = Function::default();
        for line in lines {
            let Some(i) = instruction(line) else { continue };
            let unique: HashSet<&str> = names(i.rest).collect();
            for name in unique {
                f.users.entry(name).or_default().push((i.opcode, i.rest));
            }
            if let Some(result) = i.result {
                f.defined.insert(result, i);
            }
        }
        f
    }

    /// Whether a pointer points to memory with 32-bit addresses: threadgroup memory, or a thread's own.
    fn is_near(&self, pointer: &str, depth: usize) -> bool {
        let Some(i) = self.defined.get(pointer) else { return false };
        match i.opcode {
            "alloca" => true,
            "call" => i.rest.contains("@__msl_threadgroup_"),
            "getelementptr" | "phi" | "select" | "freeze" if depth < 64 => {
                let from = if i.opcode == "select" { i.rest.split_once(',').map_or("", |r| r.1) } else { i.rest };
                names(from).find(|n| *n != pointer && self.is_pointer(n)).is_some_and(|n| self.is_near(n, depth + 1))
            }
            _ => false,
        }
    }

    fn is_pointer(&self, name: &str) -> bool {
        self.defined.get(name).is_some_and(|i| match i.opcode {
            "alloca" | "getelementptr" => true,
            "phi" | "load" | "freeze" => without_flags(i.rest).starts_with("ptr"),
            "call" => i.rest.contains("ptr @"),
            "select" => i.rest.split_once(',').is_some_and(|r| r.1.trim_start().starts_with("ptr")),
            _ => false,
        })
    }

    /// The name in a text, with the function's lifetime.
    fn own(&self, text: &str) -> Option<&'a str> {
        let name = names(text).next()?;
        self.users.get_key_value(name).map(|p| *p.0)
    }

    /// Splits a pointer into a base pointer and a constant offset in bytes.
    fn resolve(&self, pointer: &'a str) -> (&'a str, i64) {
        let (mut at, mut distance) = (pointer, 0);
        for _ in 0..64 {
            let Some(i) = self.defined.get(at).filter(|i| i.opcode == "getelementptr") else { break };
            let parts = parts(without_flags(i.rest));
            let (Some((t, _)), [_, base, index]) = (split_type(parts[0]), parts.as_slice()) else { break };
            let Some(index) = index.rsplit_once(' ').and_then(|p| p.1.parse::<i64>().ok()) else { break };
            let Some(base) = names(base).next() else { break };
            (at, distance) = (base, distance + index * i64::from(t.bytes()));
        }
        (at, distance)
    }

    /// Whether an access computes this address itself: a base and a 32-bit offset.
    fn is_offset(&self, index: &str, result: &str) -> bool {
        let name = names(index).next();
        let narrow = name.and_then(|n| self.defined.get(n)).is_some_and(|i| {
            matches!(i.opcode, "zext" | "sext") && !i.rest.trim_start_matches("nneg ").starts_with("i64")
        });
        narrow && self.is_only_accessed(result, 0)
    }

    fn is_only_accessed(&self, pointer: &str, depth: usize) -> bool {
        self.users.get(pointer).is_none_or(|users| {
            users.iter().all(|(opcode, rest)| match *opcode {
                "load" => true,
                "store" => !rest.trim_start().starts_with("ptr"),
                "call" => rest.contains("@__msl_library_access") || rest.contains("@llvm."),
                "getelementptr" => depth < 8 && !parts(rest)[2..].iter().any(|p| p.contains('%')),
                _ => false,
            })
        })
    }

    /// Whether an `and` extracts the low bits of a value shifted by a constant, which is one instruction.
    fn cuts(&self, i: &Instruction<'_>) -> bool {
        let low = i.rest.rsplit_once(", ").and_then(|p| p.1.trim().parse::<u64>().ok());
        let mask = low.is_some_and(|n| n.count_ones() == n.trailing_ones());
        let shift = names(i.rest).next().and_then(|n| self.defined.get(n)).is_some_and(|s| s.opcode == "lshr");
        mask && shift
    }

    /// Whether all users of a shift extract bits.
    fn is_cut(&self, result: &str) -> bool {
        self.users.get(result).is_some_and(|users| {
            users
                .iter()
                .all(|(opcode, rest)| *opcode == "and" && self.cuts(&Instruction { result: None, opcode: "and", rest }))
        })
    }

    /// Whether a product is fused with an addition: it has no other use, and the addition has no other product.
    fn is_fused(&self, result: &str) -> bool {
        let Some(users) = self.users.get(result) else { return false };
        let [(opcode, rest)] = users.as_slice() else { return false };
        if !matches!(*opcode, "fadd" | "fsub") {
            return false;
        }
        let first = names(rest).find(|n| {
            self.defined.get(n).is_some_and(|i| i.opcode == "fmul") && self.users.get(n).is_some_and(|u| u.len() == 1)
        });
        first == Some(result)
    }
}

fn add(ops: &mut Ops, op: Op, n: u32) {
    ops[op as usize] += n;
}

fn add_float(ops: &mut Ops, t: ValueType) {
    // A double only replaces a half or float inside a function.
    add(ops, if t.bits == 16 { Op::Float16 } else { Op::Float32 }, t.count);
}

fn add_integer(ops: &mut Ops, t: ValueType, slow: bool) {
    match (t.bits > 32, slow) {
        (true, _) => add(ops, Op::Int64, t.count * t.bits.div_ceil(64)),
        (false, true) => add(ops, Op::IntSlow, t.count),
        (false, false) => add(ops, Op::Int, t.count),
    }
}

/// The operations of an instruction.
fn count(f: &Function<'_>, i: &Instruction<'_>, ops: &mut Ops) {
    let rest = without_flags(i.rest);
    let typed = || split_type(rest).map(|t| t.0);
    match i.opcode {
        "fadd" | "fsub" | "fmul" => {
            if let (Some(t), false) = (typed(), i.result.is_some_and(|r| i.opcode == "fmul" && f.is_fused(r))) {
                add_float(ops, t);
            }
        }
        "fdiv" | "frem" => {
            let Some(t) = typed() else { return };
            // The only division of doubles is 1 / √x.
            add(ops, if t.bits == 64 { Op::Root } else { Op::Reciprocal }, t.count);
            if t.bits != 64 && !rest.contains(" 1.000000e+00,") {
                add_float(ops, t);
            }
        }
        "and" if f.cuts(i) => typed().into_iter().for_each(|t| add_integer(ops, t, true)),
        "add" | "sub" | "and" | "or" | "xor" => typed().into_iter().for_each(|t| add_integer(ops, t, false)),
        // Extracted bits are one instruction.
        "lshr" if i.result.is_some_and(|r| f.is_cut(r)) => {}
        "shl" | "lshr" | "ashr" => typed().into_iter().for_each(|t| add_integer(ops, t, true)),
        "mul" => {
            let Some(t) = typed() else { return };
            if t.bits > 32 { add(ops, Op::Int64Product, t.count) } else { add(ops, Op::IntSlow, t.count) }
        }
        "udiv" | "sdiv" | "urem" | "srem" => {
            // A 64-bit product and a shift by a constant; otherwise a dozen instructions.
            let Some(t) = typed() else { return };
            let constant = !parts(rest).get(1).is_some_and(|p| p.contains('%'));
            add(ops, Op::Int64Product, t.count * if constant { 1 } else { 4 });
            add(ops, Op::IntSlow, t.count * if constant { 1 } else { 8 });
        }
        "icmp" | "fcmp" => {
            let Some((_, rest)) = rest.split_once(' ') else { return };
            let Some((t, _)) = split_type(rest) else { return };
            if t.kind == Element::Float { add_float(ops, t) } else { add_integer(ops, t, false) }
        }
        "select" => {
            let Some(t) = parts(rest).get(1).and_then(|p| split_type(p)).map(|t| t.0) else { return };
            if t.kind == Element::Float { add_float(ops, t) } else { add_integer(ops, t, false) }
        }
        "sitofp" | "uitofp" | "fptosi" | "fptoui" => typed().into_iter().for_each(|t| add(ops, Op::Convert, t.count)),
        "br" if rest.starts_with("i1") => add(ops, Op::Branch, 1),
        "switch" => add(ops, Op::Branch, 1),
        "getelementptr" => {
            let parts = parts(rest);
            let (Some(result), Some(base)) = (i.result, parts.get(1).and_then(|p| names(p).next())) else { return };
            let variable: Vec<&&str> = parts[2..].iter().filter(|p| p.contains('%')).collect();
            let near = f.is_near(base, 0);
            match variable.as_slice() {
                // A constant distance is part of an access, unless a loop moves the pointer.
                [] => {
                    let moves = f.users.get(result).is_some_and(|u| u.iter().any(|(opcode, _)| *opcode == "phi"));
                    if moves {
                        add(ops, if near { Op::Int } else { Op::Int64 }, 1);
                    }
                }
                _ if near => add(ops, Op::Int, variable.len() as u32),
                [index] if f.is_offset(index, result) => {}
                _ => add(ops, Op::Int64, variable.len() as u32),
            }
        }
        "call" => called(rest, ops),
        _ => {}
    }
}

/// The operations of a function that the library or the compiler provides.
fn called(rest: &str, ops: &mut Ops) {
    let Some((before, after)) = rest.split_once('@') else { return };
    let name = after.split('(').next().unwrap_or("");
    // The result's type is the last one before the name.
    let t = before.trim().rsplit_once(' ').map_or(before.trim(), |p| p.1);
    let vector = before.trim().ends_with('>').then(|| before.rfind('<').map(|i| &before[i..])).flatten();
    let t = split_type(vector.unwrap_or(t)).map_or(ValueType { kind: Element::Other, bits: 32, count: 1 }, |t| t.0);
    let base = name.strip_prefix("llvm.").map_or(name, |n| n.split('.').next().unwrap_or(n));
    match base {
        "fma" | "fmuladd" => add_float(ops, ValueType { bits: if t.bits == 64 { 16 } else { t.bits }, ..t }),
        "maxnum" | "minnum" | "maximum" | "minimum" | "fmaxf" | "fminf" | "ldexpf" | "ldexp" => add_float(ops, t),
        "floor" | "ceil" | "trunc" | "rint" | "round" | "roundeven" | "nearbyint" | "floorf" | "ceilf" | "truncf"
        | "rintf" | "roundf" => add(ops, Op::Convert, t.count),
        "sqrt" if t.bits != 64 => add(ops, Op::Root, t.count),
        "sqrtf" => add(ops, Op::Root, 1),
        "exp2" | "log2" | "exp2f" | "log2f" => add(ops, Op::Exp, t.count),
        "exp" | "log" | "expf" | "logf" | "log10" | "log10f" => {
            add(ops, Op::Exp, t.count);
            add(ops, Op::Float32, t.count);
        }
        "pow" | "powf" => {
            add(ops, Op::Exp, 2 * t.count);
            add(ops, Op::Float32, t.count);
        }
        "tanh" | "tanhf" => {
            add(ops, Op::Exp, t.count);
            add(ops, Op::Reciprocal, t.count);
            add(ops, Op::Float32, 4 * t.count);
        }
        "sin" | "cos" | "sinf" | "cosf" | "tanf" | "tan" => add(ops, Op::Trigonometric, t.count),
        "umin" | "umax" | "smin" | "smax" | "abs" => add_integer(ops, t, false),
        "ctpop" | "ctlz" | "cttz" | "bitreverse" | "fshl" | "fshr" | "bswap" => add_integer(ops, t, true),
        _ => {}
    }
}

/// The text with counting calls, and the meaning of its blocks and sites.
pub(crate) fn instrument(text: &str) -> (String, Table) {
    let (mut out, mut table) = (String::with_capacity(text.len() * 2), Table::default());
    let places = Places::of(text);
    let lines: Vec<&str> = text.lines().collect();
    let mut at = 0;
    while at < lines.len() {
        let line = lines[at];
        if !line.starts_with("define ") {
            out.push_str(line);
            out.push('\n');
            at += 1;
            continue;
        }
        let end = (at..lines.len()).find(|&i| lines[i] == "}").unwrap_or(lines.len() - 1);
        if line.contains("section \".msl.library\"") {
            lines[at..=end].iter().for_each(|l| {
                out.push_str(l);
                out.push('\n')
            });
        } else {
            function(&lines[at..=end], &places, &mut out, &mut table);
        }
        at = end + 1;
    }
    out.push_str(DECLARATIONS);
    (out, table)
}

const DECLARATIONS: &str = "
declare void @__msl_block(i32)
declare void @__msl_access(ptr, i32, i32, i32)
declare void @__msl_access_many(ptr, i64, i32, i32)
";

fn function(lines: &[&str], places: &Places<'_>, out: &mut String, table: &mut Table) {
    let f = Function::of(lines);
    let hooks = hooks(&f, lines);
    let mut begun = false; // the block has its call
    let mut in_switch = false;
    for (number, line) in lines.iter().enumerate() {
        let label = number > 0 && !line.starts_with(' ') && line.contains(':');
        if number == 0 || label {
            begun = false;
        } else if in_switch {
            in_switch = !line.trim_start().starts_with(']');
        } else if let Some(i) = instruction(line) {
            if !begun && i.opcode != "phi" {
                out.push_str(&format!("  call void @__msl_block(i32 {})\n", table.blocks.len()));
                table.blocks.push([0; OPS]);
                begun = true;
            }
            if let Some(ops) = table.blocks.last_mut().filter(|_| begun) {
                count(&f, &i, ops);
            }
            for hook in hooks.get(&number).into_iter().flatten() {
                let Hook { pointer, bytes, write } = hook;
                let call = match bytes.parse::<u32>() {
                    Ok(bytes) if bytes <= 16 => format!("@__msl_access({pointer}, i32 {bytes}"),
                    _ => format!("@__msl_access_many({pointer}, i64 {bytes}"),
                };
                out.push_str(&format!("  call void {call}, i32 {}, i32 {})\n", u32::from(*write), table.sites.len()));
                table.sites.push(places.of_line(line));
            }
            in_switch = i.opcode == "switch" && line.trim_end().ends_with('[');
        }
        out.push_str(line);
        out.push('\n');
    }
}

/// A call that counts an access.
struct Hook {
    pointer: String,
    bytes: String,
    write: bool,
}

/// Accesses of neighbouring elements that are one instruction of a GPU: up to four.
struct Run {
    base: String,
    element: u32,
    write: bool,
    from: i64,
    to: i64,
    /// The pointer to the first element, and the line of the last access.
    pointer: String,
    line: usize,
}

/// The calls before each line of a function.
fn hooks<'a>(f: &Function<'a>, lines: &[&'a str]) -> HashMap<usize, Vec<Hook>> {
    let mut all: HashMap<usize, Vec<Hook>> = HashMap::new();
    let mut open: Vec<Run> = Vec::new();
    let close = |open: &mut Vec<Run>, all: &mut HashMap<usize, Vec<Hook>>| {
        for run in open.drain(..) {
            let hook = Hook { pointer: run.pointer, bytes: (run.to - run.from).to_string(), write: run.write };
            all.entry(run.line).or_default().push(hook);
        }
    };
    for (number, line) in lines.iter().enumerate() {
        let Some(i) = instruction(line) else {
            close(&mut open, &mut all);
            continue;
        };
        // Lanes meet here, or the block ends.
        let meets = i.opcode == "call" && !i.rest.contains("@llvm.") && i.rest.contains("@_Z");
        if meets || matches!(i.opcode, "br" | "switch" | "ret") {
            close(&mut open, &mut all);
        }
        for (pointer, bytes, write) in accesses(&i) {
            let name = f.own(&pointer);
            // Values that every kernel gets: its positions.
            if name.is_some_and(|n| is_context(f, n, lines[0])) {
                continue;
            }
            let element = split_type(without_flags(i.rest)).map(|t| t.0).filter(|_| i.opcode != "call");
            let (Some(name), Some(t)) = (name, element.filter(|t| t.bits >= 8)) else {
                all.entry(number).or_default().push(Hook { pointer, bytes, write });
                continue;
            };
            let (base, from) = f.resolve(name);
            let (element, to) = (t.bits / 8, from + i64::from(t.bytes()));
            let joins = |r: &&mut Run| {
                r.write == write
                    && r.element == element
                    && r.base == base
                    && (r.to == from || to == r.from)
                    && r.to.max(to) - r.from.min(from) <= 4 * i64::from(element)
            };
            match open.iter_mut().find(joins) {
                Some(run) => {
                    if from < run.from {
                        run.pointer = pointer;
                    }
                    (run.from, run.to, run.line) = (run.from.min(from), run.to.max(to), number);
                }
                None => open.push(Run { base: base.into(), element, write, from, to, pointer, line: number }),
            }
        }
    }
    close(&mut open, &mut all);
    all
}

/// Whether a pointer points into the context of an entry point.
fn is_context(f: &Function<'_>, pointer: &str, header: &str) -> bool {
    if !header.contains("@msl_entry_") {
        return false;
    }
    match f.defined.get(pointer) {
        None => true, // the parameter
        Some(i) if i.opcode == "getelementptr" => {
            parts(i.rest).get(1).and_then(|p| names(p).next()).is_some_and(|n| !f.defined.contains_key(n))
        }
        _ => false,
    }
}

/// The accesses of an instruction: pointer, bytes, and whether it writes.
fn accesses(i: &Instruction<'_>) -> Vec<(String, String, bool)> {
    let rest = without_flags(i.rest);
    let pointer = |text: &str| text.trim().to_string();
    match i.opcode {
        "load" => {
            let Some((t, _)) = split_type(rest) else { return Vec::new() };
            parts(rest).get(1).map(|p| (pointer(p), t.bytes().to_string(), false)).into_iter().collect()
        }
        "store" => {
            let Some((t, _)) = split_type(rest) else { return Vec::new() };
            parts(rest).get(1).map(|p| (pointer(p), t.bytes().to_string(), true)).into_iter().collect()
        }
        "call" if ["@llvm.memcpy.", "@llvm.memmove.", "@llvm.memset."].iter().any(|n| rest.contains(n)) => {
            let Some(open) = rest.find('(') else { return Vec::new() };
            let Some(close) = balanced(&rest[open..]) else { return Vec::new() };
            let arguments = parts(&rest[open + 1..open + close - 1]);
            // `ptr noundef align 4 dereferenceable(16) %x`; a constant expression ends with a parenthesis.
            let last = |a: &str| a.rsplit_once(' ').map_or(a, |p| p.1).to_string();
            let bare = |a: &str| format!("ptr {}", last(a));
            let simple = |a: &str| last(a).starts_with(['%', '@']) && !last(a).ends_with(')');
            let [to, from, bytes, ..] = arguments.as_slice() else { return Vec::new() };
            let bytes = bytes.rsplit_once(' ').map_or("0", |p| p.1).to_string();
            let mut list = Vec::new();
            if !rest.contains("memset") && simple(from) {
                list.push((bare(from), bytes.clone(), false));
            }
            if simple(to) {
                list.push((bare(to), bytes, true));
            }
            list
        }
        _ => Vec::new(),
    }
}

/// The places in the source, from the metadata at the end.
struct Places<'a> {
    nodes: HashMap<&'a str, &'a str>,
}

impl<'a> Places<'a> {
    fn of(text: &'a str) -> Places<'a> {
        let nodes = text.lines().filter(|l| l.starts_with('!')).filter_map(|l| l.split_once(" = ")).collect();
        Places { nodes }
    }

    fn field(text: &'a str, name: &str) -> Option<&'a str> {
        let at = text.find(&format!("{name}: "))? + name.len() + 2;
        Some(text[at..].split([',', ')']).next().unwrap_or(""))
    }

    fn of_line(&self, line: &str) -> Site {
        let place = || {
            let at = line.find("!dbg ")? + 5;
            let node = line[at..].split([',', ' ']).next()?;
            let location = self.nodes.get(node)?;
            let line = Self::field(location, "line")?.parse().ok()?;
            let mut scope = *self.nodes.get(Self::field(location, "scope")?)?;
            for _ in 0..16 {
                if let Some(file) = Self::field(scope, "file").and_then(|f| self.nodes.get(f)) {
                    let name = file.split("filename: \"").nth(1).and_then(|n| n.split('"').next()).unwrap_or("");
                    return Some(Site { file: name.into(), line });
                }
                scope = self.nodes.get(Self::field(scope, "scope")?)?;
            }
            None
        };
        place().unwrap_or_default()
    }
}
