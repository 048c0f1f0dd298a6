//! Model architectures on kvant.
