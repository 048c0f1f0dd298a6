//! Pools on every device.

mod attention;
mod case;
mod graphs;
mod histories;
mod positions;
mod prefixes;
mod rows;
mod sealed;
mod sequences;
mod stale;
mod states;
mod stored;
mod tables;
mod tokens;
mod watching;
