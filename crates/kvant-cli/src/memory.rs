//! Rejects models that cannot fit before they are loaded, and divides the remaining memory.

use kvant::{Codec, Device, device::DeviceKind};
use kvant_models::{CacheCodecs, Config, Files, Inspection, LoadOptions, MemoryEstimate, PoolOptions};

use crate::{output, result::Result};

/// The sequences that a model must serve.
pub struct Demand<'a> {
    /// Devices that share the model. Bytes are those of each.
    pub ranks: usize,
    pub pool: PoolOptions,
    pub load: LoadOptions,
    /// Bytes for pages, if the user set them. Otherwise, pages are sized for `pool`.
    pub bytes: Option<usize>,
    /// The files of a drafter.
    pub drafter: Option<&'a Files>,
    /// The option that shortens sequences.
    pub shorter: &'a str,
}

impl Demand<'_> {
    /// The model with its drafter, as the devices share it.
    fn inspect(&self, files: &Files) -> Result<Inspection> {
        let model = Inspection::open_for(files, self.ranks, self.load.cache_division)?;
        let Some(drafter) = self.drafter else { return Ok(model) };
        Ok(model.with_drafter(drafter).map_err(|error| format!("--drafter: {error}"))?)
    }
}

/// Free bytes of a device, or of each device of a group; `None` if it does not report them. The CPU devices of a group
/// share those of the host.
pub fn free(device: &Device) -> Option<usize> {
    let free = device.memory().ok()?.free;
    let is_host = matches!(device.kind(), DeviceKind::Cpu | DeviceKind::Reference);
    Some(if is_host { free / device.ranks() } else { free })
}

/// Compares the memory that a model needs with the free memory of the device. Devices that do not report it pass.
///
/// # Errors
/// The model does not fit: the message has the numbers and the remedy. Errors of the files.
pub fn check(files: &Files, device: &Device, demand: &Demand) -> Result {
    let Some(free) = free(device) else { return Ok(()) };
    let model = demand.inspect(files)?;
    let mut estimate = model.memory(&demand.pool, &demand.load)?;
    estimate.cache = demand.bytes.unwrap_or(estimate.cache);
    if estimate.total() <= free {
        return Ok(());
    }
    let MemoryEstimate { weights, cache, scratch, .. } = estimate;
    let [total, weights, cache, scratch] = [estimate.total(), weights, cache, scratch].map(output::bytes);
    let kv = match &demand.pool.codecs {
        CacheCodecs::Same(kv) => kv.to_string(),
        CacheCodecs::PerLayer(_) => "types per layer".to_string(),
    };
    let each = if demand.ranks == 1 { String::new() } else { format!(" on each of {} devices", demand.ranks) };
    Err(format!(
        "the model needs {total} of memory{each} (weights {weights}, cache {cache} in {kv}, activations {scratch}), and \
         {device} has {} free. {}",
        output::bytes(free),
        advice(&model, &estimate, free, demand)?
    )
    .into())
}

/// Rejects pages of `bytes` bytes that cannot store one sequence of maximum length.
///
/// # Errors
/// They cannot: the message has the numbers and the remedy. Errors of the files.
#[cfg(any(feature = "serve", test))]
pub fn check_pages(files: &Files, demand: &Demand, bytes: usize) -> Result {
    let model = demand.inspect(files)?;
    let of = |longest: usize| -> Result<usize> {
        Ok(model.cache_bytes(&PoolOptions { sequences: 1, longest, ..demand.pool.clone() }, &demand.load)?)
    };
    let (longest, page) = (demand.pool.longest, demand.pool.page_tokens.max(1));
    let need = of(longest)?;
    if need <= bytes {
        return Ok(());
    }
    let fit = max_below(longest.div_ceil(page), |pages| Ok(of(pages * page)? <= bytes))?;
    let shorter = match fit * page {
        0 => "; not even one page fits".to_string(),
        fit => format!(", or {} {fit}", demand.shorter),
    };
    let (bytes, enough) = (output::bytes(bytes), need.div_ceil(1 << 20));
    Err(format!(
        "--memory: {bytes} cannot store one text of {longest} tokens, which needs {}: use --memory {enough}MiB{shorter}",
        output::bytes(need)
    )
    .into())
}

/// Bytes for the pages of many sequences. `None` means enough for `demand.pool`: if the device has that much, or does
/// not report its memory. Otherwise: nine tenths of the device's free memory minus weights and activations, or all of
/// it minus these if nine tenths do not suffice for one sequence.
///
/// # Errors
/// Not even one sequence fits: as [`check`].
#[cfg(feature = "serve")]
pub fn pages(files: &Files, device: &Device, demand: &Demand) -> Result<Option<usize>> {
    let Some(free) = free(device) else { return Ok(None) };
    let model = demand.inspect(files)?;
    for free in [free / 10 * 9, free] {
        match pages_in(free, &model, demand)? {
            Pages::All => return Ok(None),
            Pages::Some(bytes) => return Ok(Some(bytes)),
            Pages::TooFew => {}
        }
    }
    let pool = PoolOptions { sequences: 1, ..demand.pool.clone() };
    check(files, device, &Demand { pool, ..*demand }).map(|()| None)
}

/// The memory of a model that shares the device with others.
#[cfg(any(feature = "serve", test))]
#[derive(Debug, PartialEq)]
pub struct Share {
    /// Bytes of weights, pages and activations.
    pub total: usize,
    /// Bytes of pages.
    pub pages: usize,
}

/// Computes the memory of a model within `limit` bytes. Its pages are sized for `demand.pool`, but take at most `max`
/// bytes, or the bytes of one sequence if that is more.
///
/// # Errors
/// The model with one sequence exceeds `limit`; errors of the files.
#[cfg(any(feature = "serve", test))]
pub fn share(files: &Files, demand: &Demand, limit: usize, max: usize) -> Result<Share> {
    let model = demand.inspect(files)?;
    let all = model.memory(&demand.pool, &demand.load)?;
    let one = model.memory(&PoolOptions { sequences: 1, ..demand.pool.clone() }, &demand.load)?.cache;
    let others = all.weights.saturating_add(all.scratch);
    if others.saturating_add(one) > limit {
        let [need, limit] = [others.saturating_add(one), limit].map(output::bytes);
        let advice = demand.shorter;
        return Err(format!("the model needs {need} for one text, and --memory is {limit}: shorten {advice}").into());
    }
    let pages = all.cache.min(max).max(one).min(limit - others);
    Ok(Share { total: others + pages, pages })
}

#[cfg(any(feature = "serve", test))]
#[derive(Debug, PartialEq)]
enum Pages {
    All,
    Some(usize),
    /// Not enough for one sequence.
    TooFew,
}

#[cfg(any(feature = "serve", test))]
fn pages_in(free: usize, model: &Inspection, demand: &Demand) -> Result<Pages> {
    let all = model.memory(&demand.pool, &demand.load)?;
    if all.total() <= free {
        return Ok(Pages::All);
    }
    let left = free.saturating_sub(all.weights.saturating_add(all.scratch));
    let one = model.memory(&PoolOptions { sequences: 1, ..demand.pool.clone() }, &demand.load)?;
    Ok(if one.cache <= left { Pages::Some(left) } else { Pages::TooFew })
}

/// Warns if texts can be longer than the context that the model was trained for.
pub fn warn_of_context(files: &Files, context: usize) -> Result {
    let trained = Config::load_files(files)?.max_position_embeddings;
    if let Some(trained) = trained.filter(|&trained| context > trained) {
        let text = format!(
            "warning: --context {context} is beyond the {trained} tokens that the model was trained for: answers get \
             worse there\n"
        );
        let _ = output::note(&text);
    }
    Ok(())
}

/// Suggests settings that fit.
fn advice(model: &Inspection, estimate: &MemoryEstimate, free: usize, demand: &Demand) -> Result<String> {
    let without_cache = estimate.weights.saturating_add(estimate.scratch);
    if without_cache > free {
        return Ok("A checkpoint that is quantised to fewer bits, or a device with more memory, is necessary".into());
    }
    if demand.bytes.is_some() {
        let max = output::bytes(free - without_cache);
        return Ok(format!("At most {max} remain for --memory"));
    }
    let mut ways = Vec::new();
    let small = PoolOptions { codecs: Codec::tq(4).into(), ..demand.pool.clone() };
    if let Ok(memory) = model.memory(&small, &demand.load)
        && memory.total() <= free
    {
        ways.push(format!("--kv tq4 needs {}", output::bytes(memory.total())));
    }
    if demand.pool.sequences > 1
        && let Some(fit) = max_sequences(model, free, demand)?
    {
        ways.push(format!("{fit} at once fit (--max-sequences {fit})"));
    }
    if let Some(longest) = model.longest_in(free, &demand.pool, &demand.load)? {
        ways.push(format!("{longest} tokens fit ({})", demand.shorter));
    }
    if ways.is_empty() {
        ways.push("A device with more memory is necessary".into());
    }
    Ok(ways.join("; "))
}

/// Maximum sequences that fit; `None` if not even one does.
fn max_sequences(model: &Inspection, free: usize, demand: &Demand) -> Result<Option<usize>> {
    let fit = max_below(demand.pool.sequences, |sequences| {
        Ok(model.memory(&PoolOptions { sequences, ..demand.pool.clone() }, &demand.load)?.total() <= free)
    })?;
    Ok((fit > 0).then_some(fit))
}

/// The maximum number below `end` that fits; 0 if none does. `fits` must be monotonic.
fn max_below(end: usize, fits: impl Fn(usize) -> Result<bool>) -> Result<usize> {
    let (mut fit, mut too_large) = (0, end);
    while too_large - fit > 1 {
        let middle = fit + (too_large - fit) / 2;
        if fits(middle)? { fit = middle } else { too_large = middle }
    }
    Ok(fit)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn pages_hold_one_text() {
        let files = crate::shipped::files(None).unwrap();
        let model = Inspection::open(&files).unwrap();
        let pool = PoolOptions { sequences: 1, longest: 8192, ..PoolOptions::default() };
        let demand = Demand {
            ranks: 1,
            pool: pool.clone(),
            load: LoadOptions::default(),
            bytes: None,
            drafter: None,
            shorter: "--context",
        };
        let one = model.memory(&pool, &demand.load).unwrap().cache;
        check_pages(&files, &demand, one).unwrap();
        let error = check_pages(&files, &demand, one / 2).unwrap_err().to_string();
        let fit: usize = error.rsplit("--context ").next().unwrap().parse().unwrap();
        assert!(error.contains("8192 tokens") && (1..8192).contains(&fit), "{error}");
        check_pages(&files, &Demand { pool: PoolOptions { longest: fit, ..pool }, ..demand }, one / 2).unwrap();
        let demand = Demand { ranks: 1, pool: PoolOptions { longest: 8192, ..PoolOptions::default() }, ..demand };
        let error = check_pages(&files, &demand, 1000).unwrap_err().to_string();
        assert!(error.contains("not even one page"), "{error}");
    }

    /// A drafter's tensors and its layer need memory, too.
    #[test]
    fn drafters_need_memory() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kvant-models/tests/golden");
        let files = |name: &str| Files::at(&golden.join(name)).unwrap();
        let (target, drafter, pool) = (files("dense"), files("assistant"), PoolOptions::default());
        let demand = |drafter| Demand {
            ranks: 1,
            pool: pool.clone(),
            load: LoadOptions::default(),
            bytes: None,
            drafter,
            shorter: "--context",
        };
        let total = |drafter| {
            let demand = demand(drafter);
            demand.inspect(&target).unwrap().memory(&pool, &demand.load).unwrap().total()
        };
        let file = std::fs::metadata(golden.join("assistant/model.safetensors")).unwrap().len() as usize;
        let more = total(Some(&drafter)) - total(None);
        assert!((file - 20_000..file).contains(&more), "{more} of {file} bytes");
        let error = demand(Some(&target)).inspect(&target).unwrap_err().to_string();
        assert!(error.starts_with("--drafter: "), "{error}");
    }

    #[test]
    fn models_share_memory() {
        let files = crate::shipped::files(None).unwrap();
        let model = Inspection::open(&files).unwrap();
        let pool = PoolOptions { sequences: 16, longest: 8192, ..PoolOptions::default() };
        let load = LoadOptions::default();
        let demand = Demand { ranks: 1, pool: pool.clone(), load, bytes: None, drafter: None, shorter: "--context" };
        let all = model.memory(&pool, &load).unwrap();
        let one = model.memory(&PoolOptions { sequences: 1, ..pool.clone() }, &load).unwrap().cache;
        let others = all.weights + all.scratch;
        let of = |limit, max| share(&files, &demand, limit, max).map(|share| (share.total - others, share.pages));
        assert_eq!(of(usize::MAX, usize::MAX).unwrap(), (all.cache, all.cache));
        assert_eq!(of(usize::MAX, 2 * one).unwrap(), (2 * one, 2 * one));
        assert_eq!(of(usize::MAX, 1).unwrap(), (one, one));
        assert_eq!(of(others + one + 5, usize::MAX).unwrap(), (one + 5, one + 5));
        assert!(of(others + one - 1, 1).unwrap_err().to_string().contains("--context"));
    }

    #[test]
    fn sequences_share_the_remaining_memory() {
        let files = crate::shipped::files(None).unwrap();
        let model = Inspection::open(&files).unwrap();
        let pool = PoolOptions { sequences: 16, longest: 1 << 20, ..PoolOptions::default() };
        let load = LoadOptions::default();
        let demand = Demand { ranks: 1, pool: pool.clone(), load, bytes: None, drafter: None, shorter: "--context" };
        let all = model.memory(&pool, &load).unwrap();
        let one = model.memory(&PoolOptions { sequences: 1, ..pool.clone() }, &load).unwrap();
        let others = all.weights + all.scratch;
        let pages = |free| pages_in(free, &model, &demand).unwrap();
        assert_eq!(pages(all.total()), Pages::All);
        assert_eq!(pages(all.total() - 1), Pages::Some(all.cache - 1));
        assert_eq!(pages(others + one.cache), Pages::Some(one.cache));
        assert_eq!(pages(others + one.cache - 1), Pages::TooFew);
        assert_eq!(pages(0), Pages::TooFew);
    }
}
