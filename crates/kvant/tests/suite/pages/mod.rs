//! Pools on every device.

mod attention;
mod case;
mod graphs;
mod histories;
mod means;
mod prefixes;
mod rows;
mod sequences;
mod tables;
mod tokens;
