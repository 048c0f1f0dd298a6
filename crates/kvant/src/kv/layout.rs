//! Divides the memory of a pool into pages of layer groups, and computes which pages a sequence of a given length
//! holds.

use std::ops::Range;

use super::{
    pool::NAME,
    spec::{CacheLayer, PoolSpec, StateLayer},
};
use crate::{
    Codec, Error, Planes, Result,
    layer::{PAGE_UNIT, PlaneBytes},
    ops::{StateRuns, check},
    position_share::check_page,
};

/// The division of a pool's memory, which follows from the pool's specification.
#[derive(Clone, Debug)]
pub(super) struct PoolLayout {
    pub groups: Vec<LayerGroup>,
    /// The group of each layer.
    pub layer_groups: Vec<usize>,
    pub page_tokens: usize,
    pub slab_units: u32,
    pub slabs: u32,
}

/// The kind of a group's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PageKind {
    /// Pages of layers that do not seal pages.
    Plain,
    /// Dense pages of layers that seal pages.
    Dense,
    /// Sealed pages of layers that seal pages.
    Sealed,
    /// States of recurrent layers. A page has the states of one sequence in all of these layers. `max` is the maximum
    /// number of pages of a sequence: the current states, and those of its last boundary.
    State { max: usize },
}

/// Layers with the same window, which hold the same positions. Layers that seal pages have two groups. All states form
/// one group, the last one.
#[derive(Clone, Debug)]
pub(super) struct LayerGroup {
    pub window: Option<usize>,
    pub kind: PageKind,
    pub page_bytes: usize,
    /// The number of pages before a token's page that it sees as dense pages, if the layers seal pages: 1, or 2 if
    /// ranks divide the positions of a layer, because a rank may have no row of the token's page yet.
    pub recent: usize,
}

/// The exclusive end of the sealed pages of a sequence of `len` tokens. The last token sees its own page and the page
/// before it as dense pages.
fn sealed_end(len: usize, page_tokens: usize) -> usize {
    (len.saturating_sub(1) / page_tokens).saturating_sub(1).max(1)
}

impl LayerGroup {
    /// The index of the first page that an empty sequence gets: page 0 is never sealed.
    pub fn first_index(&self) -> usize {
        usize::from(self.kind == PageKind::Sealed)
    }

    /// The first page that the next token of a sequence of `len` tokens needs, except a kept page 0.
    pub fn first_needed(&self, len: usize, page_tokens: usize) -> usize {
        let seen = self.oldest_seen(len) / page_tokens;
        match self.kind {
            PageKind::Plain => seen,
            PageKind::Dense => seen.max((len / page_tokens).saturating_sub(self.recent)),
            PageKind::Sealed => seen.max(1),
            PageKind::State { .. } => 0,
        }
    }

    /// The exclusive end of the pages that a sequence needs after truncation to `len` tokens.
    pub fn end_needed(&self, len: usize, page_tokens: usize) -> usize {
        match self.kind {
            PageKind::Plain | PageKind::Dense => len.div_ceil(page_tokens),
            // The pages that the next token sees as sealed.
            PageKind::Sealed => (len / page_tokens).saturating_sub(1).max(1),
            PageKind::State { .. } => len.min(1),
        }
    }

    /// The first page that a sequence of `len` tokens holds, if it can be truncated by up to `hold` tokens.
    pub fn first_held(&self, len: usize, hold: usize, page_tokens: usize) -> usize {
        let seen = self.oldest_seen(len).saturating_sub(hold) / page_tokens;
        match self.kind {
            PageKind::Plain => seen,
            // Pages that are not sealed yet.
            PageKind::Dense => {
                seen.max((len.saturating_sub(1).saturating_sub(hold) / page_tokens).saturating_sub(self.recent))
            }
            PageKind::Sealed => seen.max(1),
            PageKind::State { .. } => 0,
        }
    }

    /// Maximum pages of a sequence of up to `longest` tokens, fed with up to `max_new` tokens at a time.
    pub fn max_pages(&self, longest: usize, max_new: usize, page_tokens: usize) -> usize {
        let all = longest.div_ceil(page_tokens);
        // The window may begin and end within a page.
        let in_window = |window: usize| window.saturating_add(max_new).div_ceil(page_tokens).saturating_add(1);
        let seen = self.window.map_or(all, |window| in_window(window).min(all));
        match self.kind {
            PageKind::Plain => seen,
            // The first page, the page of the last token and the recent pages before it, and those of the new tokens.
            PageKind::Dense => max_new.div_ceil(page_tokens).saturating_add(2 + self.recent).min(all),
            PageKind::Sealed => seen.min(all.saturating_sub(2)),
            PageKind::State { max } => max.min(all),
        }
    }

    /// Maximum pages of states that a sequence holds only because its latest tokens can be removed.
    pub fn held_states(&self, tokens: usize) -> usize {
        if matches!(self.kind, PageKind::State { .. }) { tokens.min(StateRuns::MAX_KEPT) } else { 0 }
    }

    /// The pages that a sequence gets when it grows from `len` to `new_len` tokens and has pages up to `end`.
    pub fn new_pages(&self, len: usize, new_len: usize, end: usize, page_tokens: usize) -> Range<usize> {
        match self.kind {
            PageKind::Plain | PageKind::Dense => end..new_len.div_ceil(page_tokens),
            // Pages that the window has passed need not be sealed.
            PageKind::Sealed => {
                let first = end.max(self.oldest_seen(len) / page_tokens);
                first..sealed_end(new_len, page_tokens)
            }
            // One for each row of a step after which they stay.
            PageKind::State { .. } => 0..0,
        }
    }

    /// The oldest position that a token at `position` sees.
    pub fn oldest_seen(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }
}

/// The location of a layer in the pages of a group: where the planes of its keys and values begin.
pub(super) struct LayerPlace {
    pub group: usize,
    pub planes: [PlaneBytes; 2],
}

/// The location of a layer, and that of its dense pages if it seals pages.
pub(super) type LayerPlaces = (LayerPlace, Option<LayerPlace>);

/// The groups of a specification, the location of each layer, and the first byte of each state in its page.
pub(super) type Groups = (Vec<LayerGroup>, Vec<LayerPlaces>, Vec<usize>);

/// Divides the layers and states of a specification into groups.
pub(super) fn layer_groups(spec: &PoolSpec) -> Result<Groups> {
    let page_tokens = spec.page_tokens;
    let sizes = page_tokens.is_power_of_two() && (16..=256).contains(&page_tokens);
    check::value_is(NAME, "page_tokens", sizes, "16, 32, 64, 128 or 256", page_tokens)?;
    check::value_is(NAME, "layers", !spec.layers.is_empty(), "at least one layer", 0)?;
    let (mut groups, mut places) = (Vec::new(), Vec::new());
    for layer in &spec.layers {
        check::positive(NAME, "kv_heads", layer.kv_heads)?;
        check::positive(NAME, "head_dim", layer.head_dim)?;
        layer.window.map_or(Ok(()), |window| check::positive(NAME, "window", window))?;
        check_division(layer, page_tokens)?;
        let dense = Codec::Dense(layer.dense);
        for (arg, codec) in [("k", layer.k), ("v", layer.v), ("dense", dense)] {
            codec.validate(NAME, arg, layer.head_dim)?;
        }
        let kind = if layer.seals() { PageKind::Sealed } else { PageKind::Plain };
        let place = add_to_group(&mut groups, layer, kind, [layer.k, layer.v], page_tokens)?;
        let dense = layer.seals().then(|| add_to_group(&mut groups, layer, PageKind::Dense, [dense; 2], page_tokens));
        places.push((place, dense.transpose()?));
    }
    let states = add_states(&mut groups, spec)?;
    Ok((groups, places, states))
}

/// Checks whether ranks can divide the positions of a layer.
fn check_division(layer: &CacheLayer, page_tokens: usize) -> Result<()> {
    check_page(NAME, layer.position_ranks, page_tokens)?;
    if layer.position_ranks == 1 {
        return Ok(());
    }
    let expected = "none for a layer whose positions the ranks divide";
    check::value_is(NAME, "window", layer.window.is_none(), expected, layer.window.unwrap_or(0))
}

/// Adds the group of states, if the specification has any. Returns the first byte of each state in its page.
fn add_states(groups: &mut Vec<LayerGroup>, spec: &PoolSpec) -> Result<Vec<usize>> {
    let (mut end, mut starts) = (0usize, Vec::new());
    for StateLayer { dtype, shape } in &spec.states {
        let overflow = Error::Overflow { op: NAME, arg: "states" };
        let bytes = shape.iter().try_fold(dtype.size(), |bytes, &n| bytes.checked_mul(n));
        let bytes = bytes.and_then(|bytes| bytes.checked_next_multiple_of(PAGE_UNIT));
        check::value_is(NAME, "states", bytes != Some(0), "states that are not empty", format_args!("{shape:?}"))?;
        starts.push(end);
        end = bytes.and_then(|bytes| end.checked_add(bytes)).ok_or(overflow)?;
    }
    if end > 0 {
        let kind = PageKind::State { max: if spec.keeps_boundaries { 2 } else { 1 } };
        groups.push(LayerGroup { window: None, kind, page_bytes: end, recent: 0 });
    }
    Ok(starts)
}

/// Adds a layer to the pages of its group. Makes the group if it does not exist.
fn add_to_group(
    groups: &mut Vec<LayerGroup>,
    layer: &CacheLayer,
    kind: PageKind,
    codecs: [Codec; 2],
    page_tokens: usize,
) -> Result<LayerPlace> {
    let is_same = |group: &LayerGroup| (group.window, group.kind) == (layer.window, kind);
    let group = groups.iter().position(is_same).unwrap_or_else(|| {
        groups.push(LayerGroup { window: layer.window, kind, page_bytes: 0, recent: 1 });
        groups.len() - 1
    });
    if layer.position_ranks > 1 {
        groups[group].recent = 2;
    }
    let overflow = || Error::Overflow { op: NAME, arg: "layers" };
    let mut at = groups[group].page_bytes;
    let mut side = |codec| -> Result<PlaneBytes> {
        let mut planes = Planes::page_bytes(codec, layer.head_dim, layer.kv_heads, page_tokens / layer.position_ranks);
        for plane in planes.as_mut().ok_or_else(overflow)?.iter_mut().flatten() {
            let end = plane.checked_next_multiple_of(PAGE_UNIT).and_then(|bytes| at.checked_add(bytes));
            *plane = std::mem::replace(&mut at, end.ok_or_else(overflow)?);
        }
        planes.ok_or_else(overflow)
    };
    let planes = [side(codecs[0])?, side(codecs[1])?];
    groups[group].page_bytes = at;
    Ok(LayerPlace { group, planes })
}

impl PoolLayout {
    /// Computes the layout, the location of each layer, and the first byte of each state in its page.
    pub fn new(spec: &PoolSpec) -> Result<(PoolLayout, Vec<LayerPlaces>, Vec<usize>)> {
        let (groups, places, states) = layer_groups(spec)?;
        let layer_groups = places.iter().map(|(place, _)| place.group).collect();
        let page_tokens = spec.page_tokens;
        let slab = groups.iter().map(|group| group.page_bytes).max().unwrap_or(PAGE_UNIT);
        let enough = spec.bytes / slab >= groups.len();
        let min_bytes = slab.saturating_mul(groups.len());
        let expected = format_args!("at least {min_bytes} for a page of each group");
        check::value_is(NAME, "bytes", enough, expected, spec.bytes)?;
        let units = spec.bytes / slab * (slab / PAGE_UNIT);
        check::value_is(NAME, "bytes", units < u32::MAX as usize, "less than 1 TiB", spec.bytes)?;
        let (slabs, slab_units) = ((spec.bytes / slab) as u32, (slab / PAGE_UNIT) as u32);
        Ok((PoolLayout { groups, layer_groups, page_tokens, slab_units, slabs }, places, states))
    }

    /// The group of states, if there are any.
    pub fn state_group(&self) -> Option<usize> {
        let last = self.groups.len().checked_sub(1)?;
        matches!(self.groups[last].kind, PageKind::State { .. }).then_some(last)
    }

    /// The number of groups with page tables: all but the group of states.
    pub fn tables(&self) -> usize {
        self.state_group().unwrap_or(self.groups.len())
    }

    /// Bytes of a slab per page: the page, and its share of the remainder that is too short for a page.
    pub fn slab_share(&self, group: &LayerGroup) -> usize {
        let slab = self.slab_units as usize * PAGE_UNIT;
        slab / (slab / group.page_bytes.max(1)).max(1)
    }

    /// Whether any layer seals pages.
    pub fn seals(&self) -> bool {
        self.groups.iter().any(|group| group.kind == PageKind::Sealed)
    }

    /// The group of dense pages that belongs to a group of sealed pages.
    pub fn dense_group(&self, sealed: usize) -> Option<usize> {
        let LayerGroup { window, kind, .. } = self.groups[sealed];
        let is_its = |group: &LayerGroup| group.kind == PageKind::Dense && group.window == window;
        if kind == PageKind::Sealed { self.groups.iter().position(is_its) } else { None }
    }

    /// The group of sealed pages that belongs to a group of dense pages.
    pub fn sealed_group(&self, dense: usize) -> Option<usize> {
        (0..self.groups.len()).find(|&group| self.dense_group(group) == Some(dense))
    }

    /// The number of groups of sealed pages before a group.
    pub fn sealed_before(&self, group: usize) -> usize {
        self.groups[..group].iter().filter(|group| group.kind == PageKind::Sealed).count()
    }

    /// The group of a layer.
    pub fn group_of(&self, layer: usize) -> Result<usize> {
        let layers = self.layer_groups.len();
        check::value_is(NAME, "layer", layer < layers, format_args!("below {layers}"), layer)?;
        Ok(self.layer_groups[layer])
    }
}
