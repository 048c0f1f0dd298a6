//! NEON: 4 lanes. Not written yet: the portable vectors stand in.
