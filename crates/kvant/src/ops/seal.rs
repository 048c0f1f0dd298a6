//! Sealing of pages: the dense rows of whole pages become those of the layer's codecs.
//!
//! A [`KvPool`](crate::KvPool) decides which pages; nobody else seals. A captured graph reads the pages of each replay,
//! so they are in a buffer.

use crate::{
    Encoder, KvLayer, Result, Tensor,
    encoder::{Access::*, Touch},
};

pub(crate) const NAME: &str = "seal";

/// Encodes whole pages of a layer that seals pages: of each page and KV head the keys, and the values, each side around
/// its own mean where the codec is centred. Vectors of dense sides are converted.
///
/// `pages` is u32 `[n, 3]`: entries of the page tables of the dense and of the sealed pages, and the page's index in
/// its sequence. A row with an entry that is no page is skipped. No sealed page is there twice.
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
    /// That of the sealed pages.
    pub sealed: KvLayer,
    /// u32 `[n, 3]`.
    pub pages: Tensor,
}

impl Call {
    /// The most pages.
    pub(crate) fn count(&self) -> usize {
        self.pages.shape()[0]
    }

    pub(crate) fn touches(&self, visit: &mut dyn FnMut(Touch)) {
        visit(Touch { arg: "pages", tensor: &self.pages, access: Read });
        // The pages of both are in the pool's memory: what is read and what is written never overlap.
        self.sealed.touches(Write, visit);
    }

    pub(crate) fn in_place(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    pub(crate) fn check_indices(&self) -> Result<()> {
        Ok(())
    }
}
