//! The memory of a drafter, from the headers of its files.

use kvant::{CacheLayer, DType};

use super::{FileKind, eagle3, mtp, not_a_drafter};
use crate::{Config, DecoderSpec, Files, LoadOptions, Result, pools, safetensors::Checkpoint, shard::divided_layer};

/// Part of the name of a matrix that keeps its dtype.
const CENTROIDS: &str = "centroids";

/// The memory that a drafter adds to that of its target.
#[derive(Clone, Debug)]
pub(crate) struct DraftMemory {
    /// Bytes of tensors that are loaded as they are stored.
    fixed: usize,
    /// Elements and bytes of the matrices to which [`LoadOptions::dense_weights`] applies.
    dense: [usize; 2],
    /// The decoder with the drafter's own keys and values.
    own: Option<DecoderSpec>,
}

impl DraftMemory {
    /// Reads the headers of a drafter's files: for MTP those of the model itself.
    ///
    /// # Errors
    /// As [`Drafter::load`](super::Drafter::load), except for the contents of tensors and the target.
    pub(crate) fn read(files: &Files) -> Result<DraftMemory> {
        let (own, prefix) = match FileKind::of(files)? {
            FileKind::Assistant => (None, String::new()),
            FileKind::Eagle3 => (Some(eagle3::layer_config(&files.read_json("config.json")?)?.decoder), String::new()),
            FileKind::Mtp => {
                let config = Config::load_files(files)?;
                mtp::check_family(&config)?;
                let decoder = config.decoder;
                let prefix = match files.as_gguf() {
                    Some(_) => format!("blk.{}.", decoder.blocks.len()),
                    None => mtp::PREFIX.to_string(),
                };
                (Some(mtp::describe(&decoder)?), prefix)
            }
        };
        let mut memory = DraftMemory { fixed: 0, dense: [0; 2], own };
        memory.add_tensors(files, &prefix)?;
        if memory.fixed == 0 && memory.dense[1] == 0 {
            return Err(not_a_drafter(format_args!("there is no tensor `{prefix}…`")));
        }
        Ok(memory)
    }

    fn add_tensors(&mut self, files: &Files, prefix: &str) -> Result<()> {
        if let Some(gguf) = files.as_gguf() {
            for (name, tensor) in gguf.tensors().filter(|(name, _)| name.starts_with(prefix)) {
                let is_dense = tensor.kind.block_elements() == 1;
                self.add(name, &tensor.shape, tensor.end - tensor.start, is_dense);
            }
            return Ok(());
        }
        let checkpoint = Checkpoint::open_files(files)?;
        for (name, tensor) in checkpoint.tensors().filter(|(name, _)| name.starts_with(prefix)) {
            let is_dense = matches!(tensor.dtype(), Some(DType::F32 | DType::F16 | DType::BF16));
            self.add(name, &tensor.shape, tensor.end - tensor.start, is_dense);
        }
        Ok(())
    }

    fn add(&mut self, name: &str, shape: &[usize], bytes: u64, is_dense: bool) {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        // Scales of quantised matrices are no matrices of weights.
        let is_matrix = shape.len() > 1 && !name.ends_with("scales") && !name.ends_with("biases");
        if !is_dense || !is_matrix || name.contains(CENTROIDS) {
            self.fixed = self.fixed.saturating_add(bytes);
            return;
        }
        let elements = shape.iter().fold(1usize, |product, &size| product.saturating_mul(size));
        self.dense = [self.dense[0].saturating_add(elements), self.dense[1].saturating_add(bytes)];
    }

    /// Bytes of the drafter's tensors. Each device of a group has these at most.
    pub(crate) fn weight_bytes(&self, load: &LoadOptions) -> usize {
        let [elements, bytes] = self.dense;
        let converted = load.dense_weights.map_or(bytes, |dtype| elements.saturating_mul(dtype.size()));
        self.fixed.saturating_add(converted)
    }

    /// The drafter's own layer in its target's pools, on each of `ranks` devices.
    pub(crate) fn cache_layer(&self, ranks: usize, load: &LoadOptions) -> Option<CacheLayer> {
        let layer = pools::draft_layer(self.own.as_ref()?, load.activations)?;
        Some(divided_layer(layer, ranks, load.cache_division))
    }
}
