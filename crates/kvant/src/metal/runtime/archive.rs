//! Keeps compiled kernels on disk.
//!
//! Metal itself keeps what it compiled for an application, but may forget it. An archive holds the pipelines of one
//! kernel file for this GPU and this system, in `~/Library/Caches/kvant`. Whatever is wrong with it, the kernel is
//! compiled instead: an archive saves time and decides nothing.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
};

use objc2::{rc::Retained, runtime::ProtocolObject};
use objc2_foundation::{NSArray, NSProcessInfo, NSString, NSURL};
use objc2_metal::{
    MTLBinaryArchive, MTLBinaryArchiveDescriptor, MTLComputePipelineDescriptor, MTLComputePipelineState, MTLDevice,
    MTLPipelineOption,
};

/// The archive of one kernel file.
pub(super) struct Archive {
    archive: Retained<ProtocolObject<dyn MTLBinaryArchive>>,
    path: PathBuf,
    /// Whether it holds what the file does not.
    unsaved: bool,
}

// SAFETY: an archive may be used on any thread, by one at a time; it is only used under the lock of the pipelines.
unsafe impl Send for Archive {}

impl Archive {
    /// The archive of a kernel file of that name and text; an empty one, where there is none or none that Metal takes.
    pub(super) fn open(
        device: &ProtocolObject<dyn MTLDevice>,
        device_name: &str,
        name: &str,
        text: &str,
    ) -> Option<Archive> {
        let mut hash = DefaultHasher::new();
        let system = NSProcessInfo::processInfo().operatingSystemVersionString().to_string();
        (device_name, system, text).hash(&mut hash);
        let folder = std::env::home_dir()?.join("Library/Caches/kvant");
        let path = folder.join(format!("{name}-{:016x}.metalarchive", hash.finish()));
        let open = |path: Option<&Path>| {
            let descriptor = MTLBinaryArchiveDescriptor::new();
            descriptor.setUrl(path.map(url).as_deref());
            device
                .newBinaryArchiveWithDescriptor_error(&descriptor)
                .inspect_err(|error| tracing::warn!("archive of {name}: {}", error.localizedDescription()))
                .ok()
        };
        let found = if path.exists() { open(Some(&path)) } else { None };
        let archive = found.or_else(|| open(None))?;
        archive.setLabel(Some(&NSString::from_str(name)));
        Some(Archive { archive, path, unsaved: false })
    }

    /// The pipeline, if the archive holds it. From then on the descriptor names the archive.
    pub(super) fn pipeline(
        &self,
        device: &ProtocolObject<dyn MTLDevice>,
        descriptor: &MTLComputePipelineDescriptor,
    ) -> Option<Retained<ProtocolObject<dyn MTLComputePipelineState>>> {
        descriptor.setBinaryArchives(Some(&NSArray::from_slice(&[&*self.archive])));
        let options = MTLPipelineOption::FailOnBinaryArchiveMiss;
        device.newComputePipelineStateWithDescriptor_options_reflection_error(descriptor, options, None).ok()
    }

    /// Adds a pipeline. False when Metal refuses.
    pub(super) fn add(&mut self, descriptor: &MTLComputePipelineDescriptor) -> bool {
        match self.archive.addComputePipelineFunctionsWithDescriptor_error(descriptor) {
            Ok(()) => self.unsaved = true,
            Err(error) => tracing::warn!("{}: {}", self.path.display(), error.localizedDescription()),
        }
        self.unsaved
    }

    /// Writes the file, if there is anything new. A reader finds the old one or the new one, never a part.
    pub(super) fn save(&mut self) {
        if !std::mem::take(&mut self.unsaved) {
            return;
        }
        let part = self.path.with_extension(format!("{}.tmp", std::process::id()));
        let saved = std::fs::create_dir_all(self.path.parent().unwrap_or(Path::new(".")))
            .map_err(|error| error.to_string())
            .and_then(|()| {
                let written = self.archive.serializeToURL_error(&url(&part));
                written.map_err(|error| error.localizedDescription().to_string())
            })
            .and_then(|()| std::fs::rename(&part, &self.path).map_err(|error| error.to_string()));
        if let Err(error) = saved {
            tracing::warn!("{}: {error}", self.path.display());
        }
    }
}

fn url(path: &Path) -> Retained<NSURL> {
    NSURL::fileURLWithPath(&NSString::from_str(&path.to_string_lossy()))
}
