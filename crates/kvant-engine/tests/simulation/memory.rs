//! A storage that counts pages, and a model whose next token is a hash of its prefix.
//!
//! A page stores, for each position, the hash of all tokens up to it. The model computes it from the hash at the
//! previous position. A page that is read after it went to another request, or a prefix of another request, therefore
//! changes all following tokens.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap, HashSet},
    rc::Rc,
};

use kvant_engine::scheduler::{PlanRow, RowResult, StepPlan, Storage, StorageError};

/// The hash of an empty prefix.
pub const EMPTY: u64 = 0x9E37_79B9_7F4A_7C15;

/// The hash of a prefix and one more token.
pub fn extend(hash: u64, token: u32) -> u64 {
    let mut z = (hash ^ u64::from(token)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 29)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 32)
}

/// The token after a prefix.
pub fn next_token(hash: u64) -> u32 {
    ((hash >> 20) % 40) as u32
}

/// The token that ends a request.
pub const STOP: u32 = 0;

/// The output of a request that runs alone.
pub fn solo(prompt: &[u32], max_tokens: usize) -> Vec<u32> {
    let mut hash = prompt.iter().fold(EMPTY, |hash, &token| extend(hash, token));
    let mut tokens = Vec::new();
    while tokens.len() < max_tokens {
        let token = next_token(hash);
        tokens.push(token);
        if token == STOP {
            break;
        }
        hash = extend(hash, token);
    }
    tokens
}

struct Memory {
    hashes: Vec<u64>,
    holds: Vec<u32>,
    free: Vec<u32>,
    /// Pages by the hash of all tokens up to their end: page, and time of last use.
    kept: HashMap<u64, (u32, u64)>,
    by_use: BTreeMap<u64, u64>,
    /// The hashes of prefixes with recurrent states.
    states: HashSet<u64>,
    clock: u64,
    /// Number of holds of all sequences.
    held: usize,
}

impl Memory {
    fn take(&mut self) -> Option<u32> {
        if self.free.is_empty() {
            let holds = &self.holds;
            let unused = |key: &u64| holds[self.kept[key].0 as usize] == 1;
            let oldest = self.by_use.iter().find(|(_, key)| unused(key)).map(|(&used, &key)| (used, key));
            let (used, key) = oldest?;
            self.by_use.remove(&used);
            let (page, _) = self.kept.remove(&key)?;
            self.release(page);
        }
        let page = self.free.pop()?;
        self.holds[page as usize] = 1;
        Some(page)
    }

    fn release(&mut self, page: u32) {
        let holds = &mut self.holds[page as usize];
        assert!(*holds > 0, "a free page is released");
        *holds -= 1;
        if *holds == 0 {
            self.free.push(page);
        }
    }

    fn evictable(&self) -> usize {
        self.kept.values().filter(|(page, _)| self.holds[*page as usize] == 1).count()
    }

    fn touch(&mut self, key: u64) {
        self.clock += 1;
        if let Some((_, used)) = self.kept.get_mut(&key) {
            self.by_use.remove(used);
            *used = self.clock;
            self.by_use.insert(self.clock, key);
        }
    }

    fn check(&self) {
        let free = self.holds.iter().filter(|&&holds| holds == 0).count();
        assert_eq!(free, self.free.len(), "pages without holds are free");
        let holds: u32 = self.holds.iter().sum();
        assert_eq!(holds as usize, self.held + self.kept.len(), "holds of sequences and prefixes");
    }
}

/// The storage. Clones share their memory.
#[derive(Clone)]
pub struct Pages {
    memory: Rc<RefCell<Memory>>,
    page_tokens: usize,
    pages: usize,
    /// Whether sequences have recurrent states, and can only be continued where these are kept.
    has_states: bool,
}

/// The pages of a step.
#[derive(Clone, Debug)]
pub struct StepPages {
    /// The pages of each row.
    pub lists: Vec<Vec<u32>>,
    /// The length of each sequence before the step, where its states are.
    starts: Vec<usize>,
    /// The pages allocated for this step. Their old contents are overwritten when the step runs, not before: an earlier
    /// planned step may still read them.
    taken: Vec<u32>,
}

pub struct PageList {
    memory: Rc<RefCell<Memory>>,
    pages: Vec<u32>,
    len: usize,
    /// The length at the last page boundary where a step began.
    boundary: usize,
    /// Drafts of the next step.
    drafts: usize,
    /// The length before the latest step, if it has drafts.
    start: Option<usize>,
}

impl Drop for PageList {
    fn drop(&mut self) {
        let memory = &mut *self.memory.borrow_mut();
        memory.held -= self.pages.len();
        self.pages.drain(..).for_each(|page| memory.release(page));
    }
}

impl Pages {
    pub fn new(pages: usize, page_tokens: usize, has_states: bool) -> Pages {
        let memory = Memory {
            hashes: vec![0; pages * page_tokens],
            holds: vec![0; pages],
            free: (0..pages as u32).collect(),
            kept: HashMap::new(),
            by_use: BTreeMap::new(),
            states: HashSet::new(),
            clock: 0,
            held: 0,
        };
        Pages { memory: Rc::new(RefCell::new(memory)), page_tokens, pages, has_states }
    }

    /// Checks that every page is either free or held, and that holds are counted correctly.
    pub fn check(&self) {
        self.memory.borrow().check();
    }

    /// Checks that no sequence holds a page.
    pub fn check_unused(&self) {
        let memory = self.memory.borrow();
        memory.check();
        assert_eq!(memory.held, 0);
    }

    /// Runs a step as a device would: in order, with the tokens that the previous step has sampled.
    pub fn run(&self, plan: &StepPlan<StepPages>, drawn: &HashMap<u64, u32>) -> Vec<(PlanRow, Vec<u32>)> {
        let memory = &mut *self.memory.borrow_mut();
        for &page in &plan.step.taken {
            let first = page as usize * self.page_tokens;
            memory.hashes[first..first + self.page_tokens].fill(0xDEAD);
        }
        let mut results = Vec::new();
        for ((row, pages), start) in plan.rows.iter().zip(&plan.step.lists).zip(&plan.step.starts) {
            assert_eq!(row.position, *start, "states continue where the sequence ends");
            let mut draws = Vec::new();
            for (index, position) in row.tokens.clone().zip(row.position..) {
                let token = match plan.tokens[index] {
                    StepPlan::<()>::SAMPLED => drawn[&row.id],
                    token => token,
                };
                let slot = |position: usize| {
                    pages[position / self.page_tokens] as usize * self.page_tokens + position % self.page_tokens
                };
                let before = if position == 0 { EMPTY } else { memory.hashes[slot(position - 1)] };
                let hash = extend(before, token);
                memory.hashes[slot(position)] = hash;
                if row.drawn().contains(&index) {
                    draws.push(next_token(hash));
                }
            }
            results.push((row.clone(), draws));
        }
        results
    }
}

/// The result of a row from the tokens sampled after each of its last tokens: the accepted drafts, and one more.
pub fn accept(row: &PlanRow, tokens: &[u32], draws: &[u32]) -> RowResult {
    let drafts = &tokens[row.drawn()].get(1..).unwrap_or(&[]);
    let accepted = drafts.iter().zip(draws).take_while(|(draft, drawn)| draft == drawn).count();
    let mut tokens: Vec<u32> = draws.iter().copied().take(accepted + 1).collect();
    if let Some(stop) = tokens.iter().position(|&token| token == STOP) {
        tokens.truncate(stop + 1);
    }
    RowResult { id: row.id, is_last: tokens.last() == Some(&STOP), tokens }
}

/// The prefixes of whole pages: their lengths and hashes.
fn prefixes<'a>(salt: &[u8], tokens: &'a [u32], page_tokens: usize) -> impl Iterator<Item = (usize, u64)> + use<'a> {
    let mut hash = salt.iter().fold(!EMPTY, |hash, &byte| extend(hash, byte.into()));
    tokens.chunks_exact(page_tokens).enumerate().map(move |(index, page)| {
        hash = page.iter().fold(hash, |hash, &token| extend(hash, token));
        ((index + 1) * page_tokens, hash)
    })
}

impl Pages {
    /// The length of the longest kept prefix that a sequence can continue.
    fn continued(&self, memory: &Memory, salt: &[u8], tokens: &[u32]) -> usize {
        let kept = prefixes(salt, tokens, self.page_tokens).take_while(|(_, hash)| memory.kept.contains_key(hash));
        let continued = kept.filter(|(_, hash)| !self.has_states || memory.states.contains(hash));
        continued.map(|(end, _)| end).last().unwrap_or(0)
    }
}

impl Storage for Pages {
    type Sequence = PageList;
    type Step = StepPages;

    fn empty(&mut self) -> PageList {
        PageList { memory: Rc::clone(&self.memory), pages: Vec::new(), len: 0, boundary: 0, drafts: 0, start: None }
    }

    fn find(&mut self, salt: &[u8], tokens: &[u32]) -> Result<PageList, StorageError> {
        let mut list = self.empty();
        let memory = &mut *self.memory.borrow_mut();
        let known = self.continued(memory, salt, tokens);
        let mut hash = salt.iter().fold(!EMPTY, |hash, &byte| extend(hash, byte.into()));
        for page in tokens[..known].chunks_exact(self.page_tokens) {
            hash = page.iter().fold(hash, |hash, &token| extend(hash, token));
            let Some(&(page, _)) = memory.kept.get(&hash) else { break };
            memory.touch(hash);
            memory.holds[page as usize] += 1;
            memory.held += 1;
            list.pages.push(page);
            list.len += self.page_tokens;
        }
        list.boundary = list.len;
        Ok(list)
    }

    fn stops(&mut self, salt: &[u8], tokens: &[u32]) -> Vec<usize> {
        if !self.has_states {
            return Vec::new();
        }
        let known = tokens.len() - 1;
        let prefixes = prefixes(salt, &tokens[..known], self.page_tokens);
        let memory = self.memory.borrow();
        let matched = prefixes.take_while(|(_, hash)| memory.kept.contains_key(hash)).map(|(end, _)| end).last();
        let mut stops: Vec<usize> = matched.into_iter().chain([known / self.page_tokens * self.page_tokens]).collect();
        stops.sort_unstable();
        stops.dedup();
        stops
    }

    fn keep(&mut self, salt: &[u8], list: &PageList, tokens: &[u32], _: usize) -> Result<(), StorageError> {
        assert_eq!(list.len, tokens.len());
        let memory = &mut *self.memory.borrow_mut();
        let mut hash = salt.iter().fold(!EMPTY, |hash, &byte| extend(hash, byte.into()));
        for (tokens, &page) in tokens.chunks_exact(self.page_tokens).zip(&list.pages) {
            hash = tokens.iter().fold(hash, |hash, &token| extend(hash, token));
            if !memory.kept.contains_key(&hash) {
                memory.holds[page as usize] += 1;
                memory.clock += 1;
                memory.kept.insert(hash, (page, memory.clock));
                memory.by_use.insert(memory.clock, hash);
            }
            memory.touch(hash);
        }
        for (end, hash) in prefixes(salt, tokens, self.page_tokens) {
            if end == list.boundary || end == list.len {
                memory.states.insert(hash);
            }
        }
        Ok(())
    }

    fn append(&mut self, batch: &mut [(&mut PageList, usize)]) -> Result<StepPages, StorageError> {
        let memory = &mut *self.memory.borrow_mut();
        let missing = |list: &PageList, count: usize| (list.len + count).div_ceil(self.page_tokens) - list.pages.len();
        let need: usize = batch.iter().map(|(list, count)| missing(list, *count)).sum();
        if need > memory.free.len() && need > memory.free.len() + memory.evictable() {
            return Err(StorageError::OutOfPages);
        }
        let mut step = StepPages { lists: Vec::new(), starts: Vec::new(), taken: Vec::new() };
        for (list, count) in batch {
            for _ in 0..missing(list, *count) {
                let page = memory.take().expect("counted before");
                step.taken.push(page);
                list.pages.push(page);
                memory.held += 1;
            }
            if list.len.is_multiple_of(self.page_tokens) {
                list.boundary = list.len;
            }
            step.starts.push(list.len);
            list.start = (list.drafts > 0).then_some(list.len);
            list.len += *count;
            step.lists.push(list.pages.clone());
        }
        Ok(step)
    }

    fn max_drafts(&self) -> usize {
        if self.has_states { 4 } else { usize::MAX }
    }

    fn hold(&mut self, list: &mut PageList, drafts: usize) {
        assert!(drafts <= self.max_drafts());
        list.drafts = drafts;
    }

    fn truncate(&mut self, list: &mut PageList, len: usize) -> Result<(), StorageError> {
        let start = list.start.take().expect("the latest step has drafts");
        assert!(start < len && len <= list.len && len + list.drafts >= list.len);
        let memory = &mut *self.memory.borrow_mut();
        list.len = len;
        for page in list.pages.split_off(len.div_ceil(self.page_tokens)) {
            memory.held -= 1;
            memory.release(page);
        }
        Ok(())
    }

    fn len(&self, list: &PageList) -> usize {
        list.len
    }

    fn need(&self, len: usize) -> usize {
        len.div_ceil(self.page_tokens)
    }

    fn spared(&self, found: usize) -> usize {
        found / self.page_tokens
    }

    fn capacity(&self) -> usize {
        self.pages
    }

    fn page_tokens(&self) -> usize {
        self.page_tokens
    }
}
