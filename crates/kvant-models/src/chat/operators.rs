//! Python's operators, which replace minijinja's.
//!
//! minijinja does not limit the size of values, so `x ~ x` in a loop exhausts memory; and its `~` prints `true`,
//! whereas Python prints `True`. Compiled templates are therefore rewritten: these operators become filters with names
//! that no template can write, and the sizes of results of filters, methods and slices are counted.
//!
//! Values are reference-counted and compared recursively: a value that contained itself would leak, and comparing it
//! could overflow the stack. Only assignments to namespaces and `loop.changed` can create such a value, so they reject
//! values that contain a namespace, a loop or a macro.
//!
//! Fuel, a cap on the output and a thread with a memory limit do not replace the rewriting:
//!
//! - Fuel counts instructions, not bytes: `x ~ x` is one instruction, whatever the length of `x`.
//! - A cap on the output sees printed text, not values in variables.
//! - Threads share the memory of their process. A limit needs another process, which a library cannot start from its
//!   own code, or a global allocator, whose failure ends the whole process instead of one request.
//! - A value that contains itself overflows the stack when it is compared, whatever the memory limit.
//! - `~`, `+`, `*` and `in` differ from Python's without it.

use minijinja::{
    Environment, Error, ErrorKind, Value,
    machinery::{CompiledTemplate, Instruction, Instructions},
    value::ValueKind,
};

use super::{
    budget::{made, spend},
    python,
};

const ADD: &str = "operator:+";
const MULTIPLY: &str = "operator:*";
const CONCATENATE: &str = "operator:~";
const CONTAINS: &str = "operator:in";
const ITERATE: &str = "operator:for";
const NEST: &str = "operator:nest";
const COUNT: &str = "operator:count";
const KEEP: &str = "operator:keep";

/// The method of loops that stores its arguments.
const CHANGED: &str = "changed";

/// Adds the operators to an environment.
pub fn add_to(env: &mut Environment) {
    env.add_filter(ADD, add);
    env.add_filter(MULTIPLY, multiply);
    env.add_filter(CONCATENATE, |a: &Value, b: &Value| {
        let (a, b) = (python::str(a), python::str(b));
        made(a + &b)
    });
    env.add_filter(CONTAINS, contains);
    env.add_filter(ITERATE, iterable);
    env.add_filter(NEST, |value: &Value| spend(NEST_BYTES).map(|()| value.clone()));
    env.add_filter(COUNT, count);
    env.add_filter(KEEP, keep);
}

/// Larger than constants in templates. minijinja evaluates constant expressions at compile time.
const MAX_CONSTANT: usize = 1 << 20;

/// Rewrites a compiled template.
pub fn rewrite(template: &mut CompiledTemplate) -> Result<(), Error> {
    for block in std::iter::once(&mut template.instructions).chain(template.blocks.values_mut()) {
        let constants = (0..block.len() as u32).filter_map(|index| match block.get(index) {
            Some(Instruction::LoadConst(value)) => Some(value),
            _ => None,
        });
        if constants
            .into_iter()
            .any(|value| value.as_str().map_or(value.len(), |text| Some(text.len())) > Some(MAX_CONSTANT))
        {
            return Err(Error::new(ErrorKind::InvalidOperation, "a constant expression is too large"));
        }
        let unpacks = |index| matches!(block.get(index), Some(Instruction::CallMethod(CHANGED, None)));
        if (0..block.len() as u32).any(unpacks) {
            return Err(Error::new(ErrorKind::InvalidOperation, "`changed` takes no unpacked arguments"));
        }
        *block = rewrite_block(block);
    }
    Ok(())
}

fn rewrite_block<'s>(old: &Instructions<'s>) -> Instructions<'s> {
    let mut new = Instructions::new(old.name(), old.source());
    // The start of the replacement of each instruction.
    let mut places = Vec::with_capacity(old.len() + 1);
    for index in 0..old.len() as u32 {
        places.push(new.len() as u32);
        let line = old.get_line(index).and_then(|line| u16::try_from(line).ok()).unwrap_or(u16::MAX);
        let Some(instruction) = old.get(index) else { continue };
        replacement(instruction, &mut |instruction| {
            new.add_with_line(instruction, line);
        });
    }
    places.push(new.len() as u32);
    for index in 0..new.len() as u32 {
        if let Some(
            Instruction::Iterate(target)
            | Instruction::Jump(target)
            | Instruction::JumpIfFalse(target)
            | Instruction::JumpIfFalseOrPop(target)
            | Instruction::JumpIfTrueOrPop(target)
            | Instruction::BuildMacro(_, target, _),
        ) = new.get_mut(index)
        {
            *target = places.get(*target as usize).copied().unwrap_or(u32::MAX);
        }
    }
    new
}

/// The replacement of an instruction.
fn replacement<'s>(instruction: &Instruction<'s>, add: &mut impl FnMut(Instruction<'s>)) {
    let mut filter = |name, count| add(Instruction::ApplyFilter(name, Some(count), NO_LOCAL));
    match instruction {
        Instruction::Add => filter(ADD, 2),
        Instruction::Mul => filter(MULTIPLY, 2),
        Instruction::StringConcat => filter(CONCATENATE, 2),
        Instruction::In => filter(CONTAINS, 2),
        Instruction::PushLoop(_) => {
            filter(ITERATE, 1);
            add(instruction.clone());
        }
        // Raw text also counts.
        Instruction::EmitRaw(text) => {
            add(Instruction::LoadConst(Value::from(*text)));
            add(Instruction::Emit);
        }
        // Nested values are dropped recursively, so their number is limited more strictly.
        Instruction::BuildMap(_) | Instruction::BuildList(_) => {
            add(instruction.clone());
            add(Instruction::ApplyFilter(NEST, Some(1), NO_LOCAL));
        }
        // The namespace is above the value on the stack.
        Instruction::SetAttr(_) => {
            add(Instruction::Swap);
            add(Instruction::ApplyFilter(KEEP, Some(1), NO_LOCAL));
            add(Instruction::Swap);
            add(instruction.clone());
        }
        // The arguments after the object are collected in a list.
        Instruction::CallMethod(CHANGED, Some(count)) => {
            add(Instruction::BuildList(Some(usize::from(*count).saturating_sub(1))));
            add(Instruction::ApplyFilter(KEEP, Some(1), NO_LOCAL));
            add(Instruction::CallMethod(CHANGED, Some(2)));
        }
        Instruction::ApplyFilter(..) | Instruction::CallMethod(..) | Instruction::Slice => {
            add(instruction.clone());
            add(Instruction::ApplyFilter(COUNT, Some(1), NO_LOCAL));
        }
        _ => add(instruction.clone()),
    }
}

/// The part of the budget that a list or mapping in a template takes.
const NEST_BYTES: usize = 2048;

/// A value that makes minijinja look the filter up by name on each call.
const NO_LOCAL: u8 = u8::MAX;

fn failed(operator: &str, a: &Value, b: &Value) -> Error {
    let message = format!("`{operator}` does not support {} and {}", a.kind(), b.kind());
    Error::new(ErrorKind::InvalidOperation, message)
}

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

enum Numbers {
    Integers(i128, i128),
    Floats(f64, f64),
}

/// Two numbers. In Python, booleans are numbers.
fn numbers(a: &Value, b: &Value) -> Option<Numbers> {
    let integer = |value: &Value| match value.kind() {
        ValueKind::Bool => Some(i128::from(value.is_true())),
        ValueKind::Number if value.is_integer() => i128::try_from(value.clone()).ok(),
        _ => None,
    };
    let float = |value: &Value| integer(value).map(|x| x as f64).or_else(|| f64::try_from(value.clone()).ok());
    if let (Some(a), Some(b)) = (integer(a), integer(b)) {
        return Some(Numbers::Integers(a, b));
    }
    let are_numbers = [a, b].iter().all(|x| matches!(x.kind(), ValueKind::Bool | ValueKind::Number));
    are_numbers.then(|| Some(Numbers::Floats(float(a)?, float(b)?))).flatten()
}

fn add(a: &Value, b: &Value) -> Result<Value, Error> {
    if a.is_safe() || b.is_safe() {
        let (a, b) = (escaped(a), escaped(b));
        return made(a + &b).map(Value::from_safe_string);
    }
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        spend(a.len() + b.len())?;
        return Ok(Value::from([a, b].concat()));
    }
    if is_list(a) && is_list(b) {
        return collect(a.try_iter()?.chain(b.try_iter()?));
    }
    match numbers(a, b) {
        Some(Numbers::Integers(x, y)) => x.checked_add(y).map(integer).ok_or_else(|| failed("+", a, b)),
        Some(Numbers::Floats(x, y)) => Ok(Value::from(x + y)),
        None => Err(failed("+", a, b)),
    }
}

/// Escapes a value that is concatenated with one that `safe` has marked, as Python's markupsafe does.
fn escaped(value: &Value) -> String {
    let text = python::str(value);
    if value.is_safe() {
        return text;
    }
    text.replace('&', "&amp;").replace('>', "&gt;").replace('<', "&lt;").replace('\'', "&#39;").replace('"', "&#34;")
}

fn multiply(a: &Value, b: &Value) -> Result<Value, Error> {
    match numbers(a, b) {
        Some(Numbers::Integers(x, y)) => return x.checked_mul(y).map(integer).ok_or_else(|| failed("*", a, b)),
        Some(Numbers::Floats(x, y)) => return Ok(Value::from(x * y)),
        None => {}
    }
    let (repeated, count) = if a.as_str().is_some() || is_list(a) { (a, b) } else { (b, a) };
    let count = count.as_i64().ok_or_else(|| failed("*", a, b))?;
    let count = usize::try_from(count).unwrap_or(0);
    if let Some(text) = repeated.as_str() {
        spend(text.len().saturating_mul(count))?;
        return Ok(Value::from(text.repeat(count)));
    }
    if !is_list(repeated) {
        return Err(failed("*", a, b));
    }
    let items: Vec<Value> = repeated.try_iter()?.collect();
    spend(items.len().saturating_mul(count).saturating_mul(size_of::<Value>()))?;
    Ok(Value::from(vec![items; count].concat()))
}

/// Small numbers are `i64`, as in minijinja.
fn integer(value: i128) -> Value {
    i64::try_from(value).map_or_else(|_| Value::from(value), Value::from)
}

/// Collects items in a list and counts them.
fn collect(items: impl Iterator<Item = Value>) -> Result<Value, Error> {
    let mut list = Vec::new();
    for item in items {
        spend(size_of::<Value>())?;
        list.push(item);
    }
    Ok(Value::from(list))
}

/// `item in container`.
fn contains(item: &Value, container: &Value) -> Result<bool, Error> {
    // Searching takes time, so it counts.
    spend(container.as_str().map_or_else(|| container.len().unwrap_or(0), str::len))?;
    match container.kind() {
        ValueKind::Undefined => Ok(false),
        ValueKind::String => match item.as_str() {
            Some(item) => Ok(container.as_str().unwrap_or_default().contains(item)),
            None if item.is_undefined() => Ok(false),
            None => Err(failed("in", item, container)),
        },
        ValueKind::Map => Ok(container.get_item(item).is_ok_and(|value| !value.is_undefined())),
        ValueKind::Seq | ValueKind::Iterable => Ok(container.try_iter()?.any(|value| value == *item)),
        _ => Err(failed("in", item, container)),
    }
}

/// The iterable of a loop. Python iterates over neither `None` nor numbers.
fn iterable(value: &Value) -> Result<Value, Error> {
    if value.is_none() {
        return Err(Error::new(ErrorKind::InvalidOperation, "none is not iterable"));
    }
    Ok(value.clone())
}

/// Counts the size of a result.
fn count(value: &Value) -> Result<Value, Error> {
    match value.as_str() {
        Some(text) => spend(text.len())?,
        None if is_list(value) => spend(value.len().unwrap_or(0).saturating_mul(size_of::<Value>()))?,
        None => {}
    }
    Ok(value.clone())
}

/// Checks a value that a namespace or a loop stores. Converts an iterable to a list.
fn keep(value: &Value) -> Result<Value, Error> {
    let mut kept = value.clone();
    if value.kind() == ValueKind::Iterable {
        kept = collect(value.try_iter()?)?;
    }
    let mut left = vec![kept.clone()];
    while let Some(next) = left.pop() {
        // Searching takes time, so it counts.
        spend(size_of::<Value>())?;
        let Some(object) = next.as_object() else { continue };
        // Compares type names: minijinja does not expose these types.
        if ["Namespace", "Loop", "Macro", "Closure"].iter().any(|name| object.type_name().ends_with(name)) {
            let message = "a namespace, a loop or a macro cannot be kept in a namespace or a loop";
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
        match next.kind() {
            ValueKind::Map => {
                for key in next.try_iter()? {
                    left.push(next.get_item(&key)?);
                }
            }
            ValueKind::Seq | ValueKind::Iterable => left.extend(next.try_iter()?),
            _ => {}
        }
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use minijinja::value::Object;

    use super::{
        super::{jinja, template::compile},
        *,
    };

    #[derive(Debug)]
    struct Probe(#[allow(dead_code, reason = "it is counted")] Arc<()>);

    impl Object for Probe {}

    /// Renders a template with `probe`, and checks that it is freed afterwards.
    fn render(source: &str) -> Result<String, Error> {
        let (env, template, count) = (jinja::environment(), compile(source)?, Arc::new(()));
        let context = Value::from_iter([("probe", Value::from_object(Probe(count.clone())))]);
        let text = jinja::render(&env, &template, context);
        assert_eq!(Arc::strong_count(&count), 1, "{source}: it is not freed");
        text
    }

    #[test]
    fn no_value_contains_itself() {
        for source in [
            "{% set ns = namespace(kept=probe) %}{% set ns.itself = ns %}",
            "{% set a = namespace(kept=probe) %}{% set b = namespace(a=a) %}{% set a.b = [b] %}",
            "{% set ns = namespace(kept=probe) %}{% set ns.a = {'b': [ns]} %}",
            "{% set ns = namespace(kept=probe) %}{% for x in [ns] %}{% set ns.a = loop %}{% endfor %}",
            "{% set ns = namespace(kept=probe) %}{% macro m() %}{{ ns }}{% endmacro %}{% set ns.a = m %}",
            "{% for p in [probe] %}{% if loop.changed(loop) %}{% endif %}{% endfor %}",
            "{% for p in [probe] %}{% if loop.changed(1, [loop]) %}{% endif %}{% endfor %}",
            // Comparing them would never end.
            "{% set a = namespace() %}{% set b = namespace() %}{% set a.x = a %}{% set b.x = b %}{{ a == b }}",
        ] {
            let error = render(source).expect_err(source).to_string();
            assert!(error.contains("cannot be kept"), "{source}: {error}");
        }
    }

    #[test]
    fn namespaces_and_loops_keep_values() {
        for (source, want) in [
            ("{% set ns = namespace(a=[]) %}{% set ns.a = ns.a + [probe, {'x': 1}] %}{{ ns.a | length }}", "2"),
            (
                "{% set ns = namespace(inner=namespace(x=probe)) %}{% set ns.y = ns.inner.x is defined %}{{ ns.y }}",
                "True",
            ),
            ("{% set ns = namespace() %}{% set ns.a = 'abc' | reverse %}{{ ns.a | length }}", "3"),
            ("{% for x in [1, 1, 2] %}{{ loop.changed(x) }} {% endfor %}", "True False True "),
            ("{% for x in [1, 1, 2] %}{{ loop.changed(x, 'a') }} {% endfor %}", "True False True "),
        ] {
            assert_eq!(render(source).expect(source), want, "{source}");
        }
    }
}
