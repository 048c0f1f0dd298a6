//! Biases of keys, which a pool subtracts from stored keys.

use kvant::{CacheLayer, KeyBias, KeyTurns, KvPool, PoolSpec, ops::Angles};

use crate::{
    Model, Result,
    spec::{AttentionSpec, RopeSpec},
    weights::Mixer,
};

impl Model {
    /// Creates a pool of `spec`, whose layers are [`Model::cache_layers`], for texts of up to `longest` tokens. Layers
    /// that seal pages store keys without the model's biases ([`KeyBias`]).
    ///
    /// # Errors
    /// `Kvant` as [`KvPool::with_key_biases`].
    pub fn pool_of(&self, spec: &PoolSpec, longest: usize) -> Result<KvPool> {
        let mut turns = Vec::new();
        let biases = self
            .rank_decoder()
            .cache_blocks()
            .zip(&spec.layers)
            .map(|((l, attention), layer)| self.key_bias(l, attention, layer, spec, longest, &mut turns));
        let mut biases = biases.collect::<Result<Vec<_>>>()?;
        // A drafter's layer is not sealed.
        biases.resize_with(spec.layers.len().max(biases.len()), || None);
        Ok(KvPool::with_key_biases(self.device(), spec, biases)?)
    }

    /// The bias of a block's keys. `None` if a norm follows it, the keys do not rotate, or they are stored unquantised.
    /// Blocks with equal rotary embeddings share its `turns`.
    fn key_bias<'a>(
        &'a self,
        l: usize,
        attention: &'a AttentionSpec,
        layer: &CacheLayer,
        spec: &PoolSpec,
        longest: usize,
        turns: &mut Vec<(&'a RopeSpec, [usize; 2], KeyTurns)>,
    ) -> Result<Option<KeyBias>> {
        let network = self.network();
        let is_stored_without = layer.seals() && layer.k.is_quantised() && attention.qk_norm.is_none();
        let Mixer::Attention(weights) = &network.weights.blocks[l].mixer else { return Ok(None) };
        let (Some(biases), Some(rope), true) = (&weights.qkv.biases, network.rope(l), is_stored_without) else {
            return Ok(None);
        };
        // LongRoPE uses tables. No model has both them and a bias.
        let (Some(bias), Angles::Theta(_)) = (biases.parts.get(1), rope.angles) else { return Ok(None) };
        let head_dim = attention.head_dim;
        let ranks = layer.position_ranks;
        let known = turns.iter().find(|(rope, of, _)| **rope == attention.rope && *of == [head_dim, ranks]);
        let of_rope = match known {
            Some((_, _, of_rope)) => of_rope.clone(),
            None => {
                let made = KeyTurns::divided(self.device(), rope, head_dim, [spec.page_tokens, ranks], longest.max(1))?;
                turns.push((&attention.rope, [head_dim, ranks], made.clone()));
                made
            }
        };
        Ok(Some(KeyBias::new(&bias.reshape(&[attention.kv_heads, head_dim])?, &of_rope)?))
    }
}
