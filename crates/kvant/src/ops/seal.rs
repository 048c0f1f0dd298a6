//! Sealing: encodes the dense rows of whole pages with the layer's codecs.
//!
//! A [`KvPool`](crate::KvPool) decides which pages to seal; nobody else seals. The pages are listed in a buffer, so
//! that a captured graph reads the list at each replay.

use crate::{
    Encoder, KvLayer, Result, Tensor,
    encoder::{Access::*, Touch},
    group::rank_tensors,
};

pub(crate) const NAME: &str = "seal";

/// Encodes whole pages of a layer that seals pages: the keys and the values of each page and KV head. If the codec is
/// centred, each side is encoded around its own mean. Vectors of sides with a dense codec are converted.
///
/// `pages` is u32 `[n, 3]`: entries of the page tables of the dense and of the sealed pages, and the page's index in
/// its sequence. A row with an entry that is not a page is skipped. No sealed page occurs twice.
///
/// Keys are encoded without their bias, if the layer has one ([`KeyBias`](crate::KeyBias)).
pub(crate) fn seal(enc: &mut Encoder, layer: &KvLayer, pages: &Tensor) -> Result<()> {
    let Some(dense) = layer.dense() else { return Ok(()) };
    if pages.elements() == 0 {
        return Ok(());
    }
    let (dense, sealed) = (dense.clone(), layer.sealed());
    enc.submit(super::Call::Seal(Call { dense, sealed, pages: pages.clone() }))
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    /// The layer of the dense pages.
    pub dense: KvLayer,
    /// The layer of the sealed pages.
    pub sealed: KvLayer,
    /// u32 `[n, 3]`.
    pub pages: Tensor,
}

rank_tensors! { Call { dense, sealed, pages } }

impl Call {
    /// Maximum pages.
    pub(crate) fn count(&self) -> usize {
        self.pages.shape()[0]
    }

    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        visit(Touch { arg: "pages", tensor: &self.pages, access: Read });
        // Both layers use the pool's memory. The pages that are read and written never overlap.
        self.sealed.touches(Write, visit);
    }

    pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    pub(crate) fn check_indices(&self) -> Result<()> {
        Ok(())
    }
}
